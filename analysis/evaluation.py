"""How long the evaluation after each epoch takes.

    t_evaluation = correction × ⌈samples / W⌉ × (compute_time(b) × `FORWARD_SHARE` + data_time(b)) / b

for W workers that share the test samples, in batches of b = max(local batch, `LEAST_BATCH`) as training evaluates.
compute_time is forward and backward as it was profiled. By operations the forward pass is a third of it: the backward
pass multiplies for the gradients of activations and of weights (D. Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", 2021, appendix). An evaluation keeps nothing for a backward pass and
has no statistics to reduce; measured are shares from 0.16 (depthwise convolutions) to 0.44 (a large head), 0.27 in the
median (tests/benchmarks/evaluation_share.py, on a CPU). What a recomputing backward pass adds is a forward pass more.
data_time is the wait for the loader. Between the profiled batches times per sample are interpolated over log b,
beyond them they are those of the nearest one.

The correction is what trainings of the same run measured over what this says of them, or 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.aggregate import Profile
from tula_hpc.analysis.formatting import format_percent, plural
from tula_hpc.config import WorkloadSpec
from tula_hpc.records import EpochMetrics

Array = NDArray[np.float64]

FORWARD_SHARE = 0.27  # of forward and backward
RECOMPUTED_SHARE = FORWARD_SHARE / (1.0 + FORWARD_SHARE)  # with activation checkpointing
LEAST_BATCH = 64.0
CREDIBLE_S = 1e7  # what a record says beyond that is damaged
ASSUMED_SHARE = 0.25  # of the training samples, as if four fifths of all were trained on


class EvaluatedOn(NamedTuple):
    """The samples that each evaluation takes."""

    samples: float
    known: bool  # from the data set and the sweep; else assumed


class Evaluation(NamedTuple):
    """What predicts the time of an evaluation."""

    samples: EvaluatedOn
    batches: Array  # local batches that were profiled, ascending
    seconds_per_sample: Array  # at each of them, of one worker
    correction: float = 1.0
    measured: int = 0  # evaluations that the correction comes from

    def seconds(self, workers: Array, local_batch: Array) -> Array:
        """Seconds of one evaluation, see the module; all (n,)."""
        place = np.log2(np.maximum(local_batch, LEAST_BATCH))
        each = np.interp(place, np.log2(self.batches), self.seconds_per_sample)
        return np.asarray(self.correction * np.ceil(self.samples.samples / workers) * each)

    def corrected(self, epochs: Iterable[EpochMetrics]) -> Evaluation:
        """With what trainings measured, the median over their epochs; as before where none did."""
        found = [
            (row.evaluation_time_s or 0.0) / self._seconds_of(row.workers or 1, row.global_batch)
            for row in epochs
            if 0.0 < (row.evaluation_time_s or 0.0) < CREDIBLE_S and 0 < (row.workers or 0) <= row.global_batch
        ]
        return self._replace(correction=self.correction * median(found), measured=len(found)) if found else self

    def _seconds_of(self, workers: int, global_batch: int) -> float:
        return float(self.seconds(np.array(float(workers)), np.array(global_batch / workers)))

    def describe(self) -> str:
        """What it comes from, a sentence."""
        samples = f"{self.samples.samples:,.0f} test samples{'' if self.samples.known else ' (assumed)'}"
        forward = f"a forward pass is reckoned as {format_percent(FORWARD_SHARE)} of the measured computation"
        said = (
            f"corrected by {plural(self.measured, 'evaluation')} of this run's training" if self.measured else forward
        )
        return f"evaluation after every epoch: {samples}; {said}"


def evaluation_of(profiles: Sequence[Profile], workload: WorkloadSpec, train_samples: int) -> Evaluation:
    """From what was profiled.

    Args:
        profiles: At least one.
        workload: The test set follows from it.
        train_samples: D.
    """
    share = RECOMPUTED_SHARE if workload.activation_checkpointing else FORWARD_SHARE
    by_batch: dict[int, list[float]] = {}
    for row in profiles:
        seconds = row.times.compute_time_s * share + row.times.data_time_s
        by_batch.setdefault(row.configuration.local_batch, []).append(seconds / row.configuration.local_batch)
    batches = sorted(by_batch)
    each = [median(by_batch[batch]) for batch in batches]
    return Evaluation(evaluated_on(workload, train_samples), np.array(batches, dtype=np.float64), np.array(each))


def evaluated_on(workload: WorkloadSpec, train_samples: int) -> EvaluatedOn:
    """The samples of each evaluation: what is held out, what the data set is known to have, or an assumption."""
    if workload.holdout:
        return EvaluatedOn(np.ceil(train_samples * workload.holdout / (1.0 - workload.holdout)), known=True)
    if workload.test_samples is not None:
        return EvaluatedOn(float(workload.test_samples), known=True)
    return EvaluatedOn(np.ceil(ASSUMED_SHARE * train_samples), known=False)
