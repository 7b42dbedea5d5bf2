"""How long the evaluation after each epoch takes.

    t_evaluation = correction × ⌈samples / W⌉ × (forward_time(b) + data_time(b)) / b

for W workers that share the test samples, in batches of b = max(local batch, `LEAST_BATCH`) as
training evaluates. forward_time is that of a batch as evaluation takes it, timed at each profiled
batch; data_time is the wait for the loader in training. Between the profiled batches the time of a
batch is interpolated over b, which is exact where it is affine; beyond them times per sample are
those of the nearest one. Over what evaluations took, that was -8 to 5 %
(tests/benchmarks/evaluation_share.py, nine configurations on a CPU, whose own process loads).

Records of former versions have no forward_time. There it is a share of compute_time, forward and
backward as they were
profiled: the share that other records of the run have, or `FORWARD_SHARE`. By operations the
forward pass is a third: the backward pass multiplies for the gradients of activations and of
weights (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, appendix). An evaluation keeps nothing for a backward pass and has no statistics
to reduce; measured are shares from 0.15 (depthwise convolutions) to 0.45 (a large head), the median
0.25 to 0.27 by the run (the same command), and what is said of an evaluation is off by -40 to 76 %.
What a recomputing backward pass adds is a forward pass more.

The correction is what trainings of the same run measured over what this says of them, on the kind
of nodes where they ran, or 1. It is the same for all kinds.

How long a job takes until its first step: interpreter, torch, rendezvous, model and data. Every
restart pays it.

Profile jobs measure it, each with its first configuration; `pricing.restart_s` overrides that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.config import ClusterSpec, PricingSpec, WorkloadSpec
from tula_hpc.formatting import format_duration, format_percent, plural
from tula_hpc.records import EpochMetrics, StepTimes

Array = NDArray[np.float64]

# of forward and backward, where it was not measured
FORWARD_SHARE = 0.27
# with activation checkpointing
RECOMPUTED_SHARE = FORWARD_SHARE / (1.0 + FORWARD_SHARE)
LEAST_BATCH = 64.0
# what a record says of evaluating beyond that is damaged
MOST_EVALUATION_S = 1e7
# of the training samples, as if four fifths of all were trained on
ASSUMED_SHARE = 0.25


class EvaluatedOn(NamedTuple):
    """The samples that each evaluation takes."""

    samples: float
    # from profiles, the data set or the sweep; else assumed
    known: bool


class Evaluation(NamedTuple):
    """What predicts the time of an evaluation."""

    samples: EvaluatedOn
    # local batches that were profiled, ascending
    batches: Array
    # at each of them, of one worker
    seconds_per_batch: Array
    # forward passes were, at profiling
    timed: bool = False
    correction: float = 1.0
    # evaluations that the correction comes from
    measured: int = 0

    def seconds(self, workers: Array, local_batch: Array) -> Array:
        """Seconds of one evaluation, see the module; all (n,)."""
        place = np.clip(np.maximum(local_batch, LEAST_BATCH), self.batches[0], self.batches[-1])
        each = np.interp(place, self.batches, self.seconds_per_batch) / place
        return np.asarray(self.correction * np.ceil(self.samples.samples / workers) * each)

    def corrected(self, epochs: Iterable[EpochMetrics]) -> Evaluation:
        """With what trainings measured, the median over their epochs; as before where none did."""
        found = [
            (row.evaluation_time_s or 0.0) / self._seconds_of(row.workers or 1, row.global_batch)
            for row in epochs
            if 0.0 < (row.evaluation_time_s or 0.0) < MOST_EVALUATION_S
            and 0 < (row.workers or 0) <= row.global_batch
        ]
        return (
            self._replace(correction=self.correction * median(found), measured=len(found))
            if found
            else self
        )

    def corrected_as(self, other: Evaluation) -> Evaluation:
        """With the correction of another kind of nodes."""
        return self._replace(correction=other.correction, measured=other.measured)

    def _seconds_of(self, workers: int, global_batch: int) -> float:
        return float(self.seconds(np.array(float(workers)), np.array(global_batch / workers)))

    def describe(self) -> str:
        """What it comes from, a sentence."""
        samples = (
            f"{self.samples.samples:,.0f} test samples{'' if self.samples.known else ' (assumed)'}"
        )
        said = f"a forward pass is reckoned as {format_percent(FORWARD_SHARE)} of the measured computation"
        if self.timed:
            said = "forward passes were timed at profiling"
        if self.measured:
            said = f"corrected by {plural(self.measured, 'evaluation')} of this run's training"
        return f"evaluation after every epoch: {samples}; {said}"


def evaluation_of(
    profiles: Sequence[Profile], workload: WorkloadSpec, train_samples: int, test_samples: int = 0
) -> Evaluation:
    """From what was profiled.

    Args:
        profiles: At least one.
        workload: The test set follows from it, where profiles do not say.
        train_samples: D.
        test_samples: As profiles counted them; 0: they did not.
    """
    shares = [share for row in profiles if (share := _measured_share(row.times)) is not None]
    assumed = RECOMPUTED_SHARE if workload.activation_checkpointing else FORWARD_SHARE
    share = median(shares) if shares else assumed
    by_batch: dict[int, list[float]] = {}
    for row in profiles:
        seconds = _forward_time_s(row.times) or row.times.compute_time_s * share
        by_batch.setdefault(row.configuration.local_batch, []).append(
            seconds + row.times.data_time_s
        )
    batches = sorted(by_batch)
    each = [median(by_batch[batch]) for batch in batches]
    samples = evaluated_on(workload, train_samples, test_samples)
    return Evaluation(
        samples, np.array(batches, dtype=np.float64), np.array(each), timed=bool(shares)
    )


def _forward_time_s(times: StepTimes) -> float | None:
    known = times.forward_time_s
    return known if known is not None and 0.0 < known < MOST_EVALUATION_S else None


def _measured_share(times: StepTimes) -> float | None:
    """Of forward and backward; None where either is unknown."""
    forward_s = _forward_time_s(times)
    return (
        None
        if forward_s is None or times.compute_time_s <= 0.0
        else forward_s / times.compute_time_s
    )


def evaluated_on(workload: WorkloadSpec, train_samples: int, test_samples: int = 0) -> EvaluatedOn:
    """The samples of each evaluation.

    What profiles counted, what is held out, what the data set is known to have, or an assumption.
    """
    if test_samples > 0:
        return EvaluatedOn(float(test_samples), known=True)
    if workload.holdout:
        return EvaluatedOn(
            np.ceil(train_samples * workload.holdout / (1.0 - workload.holdout)), known=True
        )
    if workload.test_samples is not None:
        return EvaluatedOn(float(workload.test_samples), known=True)
    return EvaluatedOn(np.ceil(ASSUMED_SHARE * train_samples), known=False)


def with_start(cluster: ClusterSpec, measured_s: float | None) -> ClusterSpec:
    """The cluster with the measured time in its prices, where they do not state one and it is known."""
    if cluster.pricing.restart_s is not None or measured_s is None:
        return cluster
    pricing = cluster.pricing.model_copy(update={"restart_s": measured_s})
    return cluster.model_copy(update={"pricing": pricing})


def describe(measured_s: float | None, pricing: PricingSpec) -> str:
    """What a start is taken to take, and who says so.

    Args:
        measured_s: As profile jobs measured it.
        pricing: As `with_start` left it.
    """
    said = format_duration(pricing.start_s)
    if measured_s is not None and pricing.restart_s == measured_s:
        return f"a job takes {said} to its first step, as profile jobs of this run measured"
    return f"a job is taken to take {said} to its first step (pricing.restart_s)"
