"""Time of the evaluation after each epoch, and of a job's start and end.

    t_evaluation = correction × ⌈samples / W⌉ × (forward_time(b) + data_time(b)) / b

W workers share the test samples, in batches of b = max(local batch, `LEAST_BATCH`) as in training.
forward_time is the forward pass of a batch in evaluation, data_time the wait for the loader in
training. Between the profiled batches the time of a batch is interpolated over b; beyond them the
time per sample is that of the nearest profiled batch. This is -8 to 5 % off
(tests/benchmarks/evaluation_share.py). A forward pass that was not timed, for example because it
ran out of memory, is taken as a share of the computation: the median share of the timed ones, or
`FORWARD_SHARE`. The correction is the ratio of the evaluations that the run's trainings measured to
their predictions, or 1; it is the same for all kinds of nodes.

A script's work outside its steps (evaluation, saving, start of loaders) replaces the evaluation.
Its samples are unknown:

    t_between = correction × (fixed + shared / W)

It comes from profiles that reached the end of an epoch, else from the training's own epochs.
Without either it is unknown, and the plan says so.

A job's start lasts until its first step, and every restart pays for it. It is `pricing.restart_s`
if that is set, else as profile jobs measured it, each with its first configuration. No job can
measure its own end, from its last work until the scheduler has its nodes back. With a measured
start, the end is `END_SHARE` of it; a start set in the prices is taken to include the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs.spread import Array
from tula_hpc.analysis.models.profiles import Profile, medians_by_key
from tula_hpc.config import WorkloadSpec
from tula_hpc.formatting import format_duration, format_percent, plural
from tula_hpc.records import EpochMetrics, StepTimes

# Assumed share of the forward pass in forward and backward. Counting operations gives a third
# (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", 2021, appendix); measured were 0.15 to 0.45, as evaluation keeps nothing for a
# backward pass.
FORWARD_SHARE = 0.27
LEAST_BATCH = 64.0
# longer evaluations come from damaged records
MOST_EVALUATION_S = 1e7
# A job's end as a share of its start: 0.13 to 0.21 by the controller's log, in twelve jobs whose
# starts took 7.4 to 16.8 s.
END_SHARE = 0.18
# measured over predicted evaluation time, 90 % interval: forward passes timed, and not timed
TIMED_FACTORS = (0.85, 1.18)
ASSUMED_FACTORS = (0.57, 1.67)
# assumed test samples per training sample, as if four fifths of all samples were trained on
ASSUMED_SHARE = 0.25


class EvaluationTime(NamedTuple):
    """Model of the time of an evaluation."""

    # test samples of each evaluation, and whether they are known, see `evaluated_on`
    samples: float
    samples_known: bool
    # local batches that were profiled, ascending
    batches: Array
    # seconds that one worker takes for each of these batches
    seconds_per_batch: Array
    # profiling timed forward passes, or a script's time between epochs
    timed: bool = False
    # share of the forward pass in the measured computation
    forward_share: float = FORWARD_SHARE
    correction: float = 1.0
    # number of evaluations that the correction comes from
    measured: int = 0
    # a script's seconds between two epochs: the fixed part, and the part that W workers share
    between_s: tuple[float, float] | None = None

    def seconds(self, workers: Array, local_batch: Array) -> Array:
        """Predict the seconds of one evaluation by the module's equations; all arrays are (n,)."""
        if self.between_s is not None:
            fixed_s, shared_s = self.between_s
            return np.asarray(self.correction * (fixed_s + shared_s / workers))
        batch = np.clip(np.maximum(local_batch, LEAST_BATCH), self.batches[0], self.batches[-1])
        each = np.interp(batch, self.batches, self.seconds_per_batch) / batch
        return np.asarray(self.correction * np.ceil(self.samples / workers) * each)

    def corrected(self, epochs: Iterable[EpochMetrics]) -> EvaluationTime:
        """Return a copy corrected by the evaluations of trainings; unchanged if none was timed."""
        rows = [row for row in epochs if 0.0 < (row.evaluation_time_s or 0.0) < MOST_EVALUATION_S]
        if self.is_of_script and rows and self.between_s is None:
            typical_s = median(row.evaluation_time_s or 0.0 for row in rows)
            return self._replace(between_s=(typical_s, 0.0), measured=len(rows))
        ratios = []
        for row in rows:
            workers = row.workers or 0
            if 0 < workers <= row.global_batch:
                local_batch = np.array(row.global_batch / workers)
                predicted_s = float(self.seconds(np.array(float(workers)), local_batch))
                if predicted_s > 0.0:
                    ratios.append((row.evaluation_time_s or 0.0) / predicted_s)
        if not ratios:
            return self
        return self._replace(correction=self.correction * median(ratios), measured=len(ratios))

    def corrected_as(self, other: EvaluationTime) -> EvaluationTime:
        """Return a copy with the correction of another kind of nodes."""
        between_s = other.between_s if self.between_s is None else self.between_s
        return self._replace(
            correction=other.correction, measured=other.measured, between_s=between_s
        )

    @property
    def is_of_script(self) -> bool:
        """True for a script, whose test samples are unknown."""
        return self.samples == 0

    @property
    def factors(self) -> tuple[float, float]:
        """Factors between which evaluations lie with 90 % probability."""
        return TIMED_FACTORS if self.timed or self.measured else ASSUMED_FACTORS

    @property
    def is_assumed(self) -> bool:
        """True if neither profiles nor a training have timed an evaluation."""
        if self.is_of_script:
            return self.between_s is None
        return not (self.timed or self.measured)

    def describe(self) -> str:
        """Return a sentence on the samples and the source of the prediction."""
        if self.is_of_script:
            return self._describe_between()
        if self.measured:
            source = f"corrected by {plural(self.measured, 'evaluation')} of this run's training"
        elif self.timed:
            source = "forward passes were timed at profiling"
        else:
            share = format_percent(self.forward_share)
            source = f"a forward pass is assumed to take {share} of the measured computation"
        assumed = "" if self.samples_known else " (assumed)"
        samples = f"{self.samples:,.0f} test samples{assumed}"
        return f"evaluation after every epoch: {samples}; {source}"

    def _describe_between(self) -> str:
        if self.between_s is None:
            return (
                "what the script does outside its steps, evaluation included, comes on top: it is "
                "unknown, as no profile saw the end of an epoch"
            )
        what = "what the script does outside its steps (evaluation, saving, start of loaders)"
        if self.measured:
            return f"{what} is taken from {plural(self.measured, 'epoch')} of its training"
        an_epoch = f"{format_duration(sum(self.between_s))} an epoch"
        return f"{what} takes {an_epoch}, as its profiles measured"


def evaluation_of(
    profiles: Sequence[Profile], workload: WorkloadSpec, train_samples: int, test_samples: int = 0
) -> EvaluationTime:
    """Fit the model to at least one profile; the samples come from `evaluated_on`."""
    shares = []
    for row in profiles:
        forward_s = _forward_time_s(row.times)
        if forward_s is not None and row.times.compute_time_s > 0.0:
            shares.append(forward_s / row.times.compute_time_s)
    share = median(shares) if shares else FORWARD_SHARE
    pairs = []
    for row in profiles:
        forward_s = _forward_time_s(row.times) or row.times.compute_time_s * share
        pairs.append((row.configuration.local_batch, forward_s + row.times.data_time_s))
    by_batch = medians_by_key(pairs)
    between_s = _between(profiles) if workload.is_script else None
    return EvaluationTime(
        *evaluated_on(workload, train_samples, test_samples),
        np.array(list(by_batch), dtype=np.float64),
        np.array(list(by_batch.values())),
        timed=bool(shares) or between_s is not None,
        forward_share=share,
        between_s=between_s,
    )


def _between(profiles: Sequence[Profile]) -> tuple[float, float] | None:
    """Fit the time between a script's epochs by relative errors; None if no profile saw it."""
    by_workers = medians_by_key(
        (row.configuration.world_size, row.between_epochs_s)
        for row in profiles
        if row.between_epochs_s is not None and row.between_epochs_s > 0.0
    )
    if not by_workers:
        return None
    # imported late: `tula status` prices runs too, and SciPy would double its memory
    from scipy.optimize import nnls

    seconds = np.array(list(by_workers.values()))
    if len(seconds) == 1:
        return float(seconds[0]), 0.0
    workers = np.array(list(by_workers), dtype=np.float64)
    columns = np.stack([np.ones_like(workers), 1.0 / workers], axis=1)
    (fixed_s, shared_s), _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    return float(fixed_s), float(shared_s)


def _forward_time_s(times: StepTimes) -> float | None:
    known = times.forward_time_s
    return known if known is not None and 0.0 < known < MOST_EVALUATION_S else None


def evaluated_on(
    workload: WorkloadSpec, train_samples: int, test_samples: int = 0
) -> tuple[float, bool]:
    """Return the test samples, and False if they are assumed.

    They are counted by profiles (unless 0), held out, known, or assumed. For a script they are 0,
    since nothing says whether it evaluates, and on which samples.
    """
    if workload.is_script:
        return 0.0, True
    if test_samples > 0:
        return float(test_samples), True
    if workload.holdout:
        held_out = train_samples * workload.holdout / (1.0 - workload.holdout)
        return math.ceil(held_out), True
    if workload.test_set_size is not None:
        return float(workload.test_set_size), True
    return math.ceil(ASSUMED_SHARE * train_samples), False


def describe(start_s: float, *, measured: bool) -> str:
    """Return a sentence on the time of a start and its source."""
    duration = format_duration(start_s)
    if measured:
        return f"a job takes {duration} to its first step, as profile jobs of this run measured"
    return f"a job is assumed to take {duration} to its first step (pricing.restart_s)"
