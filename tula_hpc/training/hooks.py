"""Decisions that differ between the training of a plan and the trainings of a study."""

from __future__ import annotations

import math

from tula_hpc.config import StudySpec
from tula_hpc.errors import DivergedError
from tula_hpc.formatting import plural
from tula_hpc.training.evaluation import Evaluation
from tula_hpc.training.progress import Training


class TrainingHooks:
    """Decisions for a plan's training."""

    # a loss that is not finite is the training's result, not an error
    divergence_is_result = False
    # the accuracy on training samples is measured at the end
    scores_training_samples = False
    # after the end, the last checkpoint is enough
    keeps_last_checkpoint_only = False

    def __init__(self, training: Training) -> None:
        self.training = training

    def is_evaluated(self, epoch: int) -> bool:
        """Tell whether the test set is evaluated at the end of that epoch, counted from 1."""
        return True

    def has_diverged(self, loss: float) -> bool:
        """Tell whether the training ends with this loss, a mean over steps."""
        return not math.isfinite(loss)

    def on_epoch_end(self, evaluation: Evaluation) -> None:
        """Look at an epoch's evaluation.

        Raises:
            DivergedError: The training ends with it.
        """


class StudyHooks(TrainingHooks):
    """Decisions for a study's training, which is one cell of a comparison."""

    divergence_is_result = True
    scores_training_samples = True
    keeps_last_checkpoint_only = True

    def __init__(self, training: Training, study: StudySpec) -> None:
        super().__init__(training)
        self.study = study

    def is_evaluated(self, epoch: int) -> bool:
        """Evaluate some epochs and the last."""
        return epoch % self.study.evaluate_every == 0 or epoch == self.training.epochs

    def has_diverged(self, loss: float) -> bool:
        """Agree with all workers, as all of them write the result. Collective."""
        return self.training.any(super().has_diverged(loss))

    def on_epoch_end(self, evaluation: Evaluation) -> None:
        """End the training where the loss on the test set is not finite."""
        if not math.isfinite(evaluation.loss):
            epochs = plural(self.training.progress.epoch, "epoch")
            raise DivergedError(f"the loss on the test set is not finite after {epochs}")


def hooks_of(training: Training) -> TrainingHooks:
    """Return the hooks for a training, by whether its sweep is a study."""
    study = training.job.sweep.study
    return TrainingHooks(training) if study is None else StudyHooks(training, study)
