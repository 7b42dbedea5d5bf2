"""Whether a training learned anything, judged by its loss and its accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tula_hpc.analysis.run_contents import is_guess, learned_nothing
from tula_hpc.config import WorkloadSpec
from tula_hpc.records import EpochMetrics, Metrics, StepMetrics

DIGITS = WorkloadSpec(dataset="digits")
OWN_LOSS = DIGITS.model_copy(update={"loss": "my.module:loss"})


def logged(steps: Sequence[float], epochs: Sequence[float]) -> Metrics:
    """Return metrics with these losses of steps and of epochs."""
    common = {"step": 1, "samples_seen": 1}
    rows = [StepMetrics(epoch=1, loss=loss, lr=1, step_time_s=1, **common) for loss in steps]
    none = dict.fromkeys(("test_loss", "test_accuracy", "test_top5_accuracy"), 0.5)
    fields = {"global_batch": 1, "epoch_time_s": 1, "steps": 1, **common, **none}
    return Metrics(rows, [EpochMetrics(epoch=1, train_loss=loss, **fields) for loss in epochs], 0)


@pytest.mark.parametrize(
    ("steps", "epochs", "work", "words"),
    [
        ([2.4, 1.0, 0.5], [1.5, 0.6], DIGITS, ""),
        ([2.4, 1e6, 3.0], [1e9, 5.0], DIGITS, "ended at 5, above the 2.4"),
        ([30.0, 1e6, 2.32], [1e9, 2.33], DIGITS, f"not below the {math.log(10):.3g} of guessing among 10 classes"),
        # nobody knows the loss of guessing with an own criterion
        ([30.0, 1e6, 2.32], [1e9, 2.33], OWN_LOSS, ""),
        # the mean of a single epoch includes its beginning
        ([30.0, 2.0], [9.0], DIGITS, ""),
        ([2.35], [2.35], DIGITS, ""),
        # the last line may be of one noisy step
        ([0.21, 0.2, 0.3], [0.22], DIGITS, ""),
        ([-1.0], [-1.0, -2.0], OWN_LOSS, ""),
        ([], [2.0, 2.1], DIGITS, "above the 2 "),
        ([], [9.0], DIGITS, ""),
        ([], [], DIGITS, ""),
    ],
)
def test_a_training_learned_nothing_where_its_loss_says_so(
    steps: list[float], epochs: list[float], work: WorkloadSpec, words: str
) -> None:
    message = learned_nothing(logged(steps, epochs), work)
    assert words in message
    assert bool(message) == bool(words)


@pytest.mark.parametrize(
    ("accuracy", "keys", "among", "guessed"),
    [
        # of 359 test samples, 14.7 % are within three errors of 10 %
        (0.139, {}, 1, True),
        (0.16, {}, 1, False),
        (0.56, {}, 5, True),
        (0.45, {"classes": 2}, 1, True),
        # the five most probable of two classes are always right
        (0.45, {"classes": 2}, 5, False),
        # the number of classes is unknown
        (0.1, {"dataset": "imagefolder"}, 1, False),
        (0.1, {"metric": "my.module:share"}, 1, False),
        (0.1, {"dataset": "cifar10"}, 1, True),
        (0.12, {"dataset": "cifar10"}, 1, False),
        (0.12, {"dataset": "cifar10", "test_samples": 100}, 1, True),
    ],
)
def test_guessing_is_recognized_by_classes_and_test_samples(
    accuracy: float, keys: dict[str, object], among: int, guessed: bool
) -> None:
    assert is_guess(accuracy, DIGITS.model_copy(update=keys), among) == guessed
