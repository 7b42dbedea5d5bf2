"""Whether a training learned anything: its loss against the one it began with, its accuracy against guessing."""

from __future__ import annotations

import math

from tula_hpc.analysis.formatting import format_number
from tula_hpc.config import WorkloadSpec
from tula_hpc.records import Metrics

ERRORS = 3.0  # standard errors of counting above an accuracy of guessing: less cannot be told from it
SMALLER_STEPS = "lower workload.lr or warm up longer"
USUAL_TEST_SAMPLES = 1000  # where their number is not known


def learned_nothing(metrics: Metrics, work: WorkloadSpec) -> str:
    """What of the loss says so, in words; "" where it says nothing of the kind, or too little was logged.

    It ended at the mean of the last epoch; that of a single one holds the beginning.
    """
    if len(metrics.epochs) < 2:
        return ""
    began, ended = _first_loss(metrics), metrics.epochs[-1].train_loss
    if ended > began:
        return f"the loss ended at {format_number(ended, 3)}, above the {format_number(began, 3)} that it began with"
    classes = work.class_count if work.loss is None else None
    if classes and ended >= math.log(classes):  # cross-entropy where each class is held for equally likely
        guessing = f"the {format_number(math.log(classes), 3)} of guessing among {classes:,} classes"
        return f"the loss ended at {format_number(ended, 3)}, not below {guessing}"
    return ""


def _first_loss(metrics: Metrics) -> float:
    return metrics.steps[0].loss if metrics.steps else metrics.epochs[0].train_loss


def is_guess(accuracy: float, work: WorkloadSpec, among_best: int = 1) -> bool:
    """Whether guessing among the classes reaches as much, as far as counting test samples can tell.

    Args:
        accuracy: On the test set, a share of 1.
        work: Of whose data the number of classes is known, or nothing is said.
        among_best: A sample counts where its class is among so many guesses.
    """
    if work.class_count is None or work.metric is not None or work.class_count <= among_best:
        return False
    guessed = among_best / work.class_count
    error = math.sqrt(guessed * (1 - guessed) / (work.test_samples or USUAL_TEST_SAMPLES))
    return accuracy <= guessed + ERRORS * error
