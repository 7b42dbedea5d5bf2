"""Candidates as NumPy columns: the grid of a search, predicted and priced.

A search needs the choice under hundreds of predictions; only a plan's own candidates become
records, see `candidate_records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.costs.evaluation import EvaluationTime
from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.costs.pricing import Bill, NodePower, Usage, bill
from tula_hpc.analysis.costs.spread import Spread
from tula_hpc.analysis.models.critical_batch import samples_to_same_progress
from tula_hpc.analysis.models.fitted import Models
from tula_hpc.analysis.models.profiles import Summary
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.planning.memory_limit import allowed_bytes, memory_limit_bytes, on_top_bytes
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, local_batches
from tula_hpc.formatting import FOREVER_S
from tula_hpc.records import Configuration, steps_of_epoch

Integers = NDArray[np.int64]


class Grid(NamedTuple):
    """Configurations as columns of one length, ascending by nodes, then by local batch."""

    nodes: Integers
    workers_per_node: Integers
    local_batch: Integers

    @property
    def global_batch(self) -> Integers:
        """Samples per step over all workers."""
        return self.nodes * self.workers_per_node * self.local_batch

    def take(self, rows: NDArray[np.bool_]) -> Grid:
        """Return some rows."""
        return Grid(*(column[rows] for column in self))

    def keys(self) -> Integers:
        """Return one number for each configuration, for comparing many at once."""
        return (self.nodes << 38) | (self.workers_per_node << 31) | self.local_batch


def candidates(search: SearchSpec, workers_per_node: int) -> list[Configuration]:
    """Return the configurations with a power of two as local batch within the bounds, ascending."""
    return [
        Configuration(nodes, workers_per_node, local_batch)
        for nodes in sorted(search.cluster_sizes)
        for local_batch in local_batches(search, nodes, workers_per_node)
    ]


def candidate_grid(search: SearchSpec, cluster: ClusterSpec) -> Grid:
    """Return the candidates that the cluster has enough nodes for."""
    every = candidates(search, cluster.workers_per_node)
    rows = [one for one in every if one.nodes <= cluster.max_nodes]
    return Grid(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


class Why(IntEnum):
    """Reason why a candidate is not feasible; 0 if it is."""

    FEASIBLE = 0
    SAMPLES = 1
    OUT_OF_MEMORY = 2
    MEMORY = 3
    FOREVER = 4
    DEADLINE = 5
    BUDGET = 6
    BATCH = 7
    # memory of so large a batch was not measured and may exceed the limit
    UNSEEN = 8
    DIVERGED = 9


FEASIBLE = Why.FEASIBLE
# variance of a measurement's noise, as a share of the variance of a departure from the law
NUGGET = 0.1
# with more measurements than this, the model's own departures show how neighbours differ
MOST_NEIGHBOURS = 64
# Batches more than this factor above the largest measured one may use other kernels, whose
# workspace no smaller batch shows. Candidates lie a factor of two apart: the next one is believed.
BELIEVED_FACTOR = 2.0


class Partition(NamedTuple):
    """Partition with its measurements and models; the whole cluster if it has no partitions."""

    name: str
    cluster: ClusterSpec
    summary: Summary
    models: Models
    power: NodePower | None
    evaluation: EvaluationTime
    spread: Spread
    # seconds of each job's end, see `costs.evaluation`; 0 unless its start was measured
    end_s: float = 0.0
    # seconds of a checkpoint, as measured, or 0 if it costs no steps' time; None: not measured
    save_s: float | None = None
    # samples; None: the gradient's noise was not measured
    critical_batch: float | None = None
    # 90 % interval of critical_batch; None: not needed
    critical_interval: tuple[float, float] | None = None
    # `training.base_batch`, whose progress all candidates have to make
    base_batch: int = 1
    resume: Resume = Resume.CHECKPOINT

    @property
    def memory_limit_bytes(self) -> int | None:
        """Limit of one worker, from the cluster file and from profiles; None if unknown."""
        return memory_limit_bytes(self.cluster, self.summary.memory_uses)

    @property
    def allowed_bytes(self) -> float:
        """Limit of one worker less its margin; infinite if unknown."""
        allowed = allowed_bytes(self.cluster, self.summary.memory_uses)
        return np.inf if allowed is None else allowed


class CandidateTable(NamedTuple):
    """Candidates as columns of one length."""

    # index of the partition
    part: Integers
    nodes: Integers
    workers_per_node: Integers
    local_batch: Integers
    global_batch: Integers
    # forward passes in which a script takes the local batch
    accumulation: Integers
    step_time_s: Array
    epoch_time_s: Array
    train_time_s: Array
    wall_time_s: Array
    requeues: Array
    cost: Array
    energy_kwh: Array
    # seconds of steps between two checkpoints
    checkpoint_s: Array
    # seconds of the wall time for all evaluations, and for all checkpoints
    evaluation_s: Array
    saving_s: Array
    # wall time to the progress that as many epochs make with `training.base_batch`; NaN: unknown
    progress_time_s: Array
    peak_bytes: Array
    why: Integers
    measured: NDArray[np.bool_]

    @property
    def rows(self) -> int:
        """Number of candidates."""
        return len(self.part)

    @property
    def grid(self) -> Grid:
        """Configurations of the candidates."""
        return Grid(self.nodes, self.workers_per_node, self.local_batch)

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_] | Sequence[int]) -> CandidateTable:
        """Return some rows."""
        columns: list[Any] = [column[rows] for column in self]
        return CandidateTable(*columns)


def stacked(tables: Sequence[CandidateTable]) -> CandidateTable:
    """Concatenate tables."""
    if len(tables) == 1:
        return tables[0]
    columns: list[Any] = [np.concatenate(column) for column in zip(*tables, strict=True)]
    return CandidateTable(*columns)


def predict(index: int, part: Partition, grid: Grid, sweep: SweepSpec) -> CandidateTable:
    """Predict and price configurations on one partition, see `priced`."""
    model = part.models.step_time
    step_s = model.predict(grid.nodes, grid.local_batch, grid.workers_per_node)
    return priced(index, part, grid, sweep, as_measured(step_s, grid, part.summary, model))


def as_measured(step_s: Array, grid: Grid, summary: Summary, model: StepTimeModel) -> Array:
    """Return step times (..., n), for measured configurations as they were measured.

    The model is robust and smooth: a configuration that takes several times as long as predicted
    from all others hardly moves it. It would be chosen for a speed that it does not have, and its
    neighbours after it. So if any measurement lies outside the model's 90 % interval, the ratios of
    measured to predicted times also apply to neighbours, less with each octave of nodes and batch.
    """
    profiles = summary.as_planned
    if not profiles:
        return step_s
    # ascending, as the profiles are
    measured = Grid(*np.array([row.configuration for row in profiles], dtype=np.int64).T)
    measured_s = np.array([row.times.step_time_s for row in profiles])
    columns = measured.nodes, measured.local_batch, measured.workers_per_node
    low_s, high_s = model.interval(*columns)
    outside = (measured_s < low_s) | (measured_s > high_s)
    if outside.any() and len(outside) <= MOST_NEIGHBOURS:
        ratios = np.log(measured_s / model.predict(*columns))
        known = _nearness(measured, measured) + NUGGET * np.eye(len(ratios))
        step_s = step_s * np.exp(_nearness(grid, measured) @ np.linalg.solve(known, ratios))
    keys = grid.keys()
    place = np.minimum(np.searchsorted(measured.keys(), keys), len(measured_s) - 1)
    return np.where(measured.keys()[place] == keys, measured_s[place], step_s)


def _nearness(some: Grid, others: Grid) -> Array:
    """Return the correlation (n, m) of departures from the law: 0.6 at a distance of one octave."""
    octaves = [np.log2(np.stack(columns, axis=1)) for columns in (some, others)]
    away = octaves[0][:, None, :] - octaves[1][None, :, :]
    return np.asarray(np.exp(-0.5 * np.sum(away**2, axis=2)))


def priced(
    index: int, part: Partition, grid: Grid, sweep: SweepSpec, step: Array
) -> CandidateTable:
    """Price configurations on the partition of this index, whose steps take `step` seconds, (n,).

    An epoch consists of its steps and the updates of the gradient scale.
    """
    nodes, per_node, batch = (column.astype(np.float64) for column in grid)
    workers = nodes * per_node
    models = part.models
    peak = np.ceil(models.memory.predict(batch, workers))
    on_top = on_top_bytes(part.summary, part.cluster, sweep.training, workers)
    batches = _batches(part.summary, grid)
    epoch = step * steps_of_epoch(batches, short_batch=part.summary.short_batch)
    epoch += _updates_per_epoch(part, grid, sweep) * models.update_time_s.predict(workers)
    train = sweep.workload.epochs * epoch
    evaluation = sweep.workload.epochs * part.evaluation.seconds(workers, batch)
    usage = Usage(nodes, per_node, train, peak, evaluation, sweep.workload.epochs, part.end_s)
    paid = _bill(usage, part, sweep)
    return CandidateTable(
        part=np.full(grid.nodes.shape, index, dtype=np.int64),
        **grid._asdict(),
        global_batch=grid.global_batch,
        # a script without {accumulation} always takes `workload.accumulation` passes
        accumulation=np.maximum(
            part.summary.passes.of(grid.local_batch), sweep.workload.accumulation
        ).astype(np.int64),
        step_time_s=step,
        epoch_time_s=epoch,
        train_time_s=train,
        **paid._asdict(),
        evaluation_s=evaluation,
        progress_time_s=_progress_time_s(part, usage, grid, sweep),
        peak_bytes=peak,
        why=_why_not(part, grid, peak, on_top, paid.wall_time_s),
        measured=_measured(part.summary, grid),
    )


def _batches(summary: Summary, grid: Grid) -> Array:
    """Return the number of batches in an epoch (n,), a shorter last one as a fraction."""
    return np.asarray(summary.dataset_samples / (grid.global_batch * summary.batch_share))


def _bill(usage: Usage, part: Partition, sweep: SweepSpec) -> Bill:
    return bill(usage, part.cluster, sweep.training, part.power, part.save_s, resume=part.resume)


def _progress_time_s(part: Partition, usage: Usage, grid: Grid, sweep: SweepSpec) -> Array:
    """Return the wall time for the samples that the same progress needs, see `critical_batch`.

    More batches make up for the samples that full batches leave out of an epoch. The longer work
    includes the starts and ends of all jobs that it takes.
    """
    if part.critical_batch is None:
        return np.full(grid.global_batch.shape, np.nan)
    global_batch = grid.global_batch.astype(np.float64)
    more = samples_to_same_progress(part.critical_batch, global_batch, part.base_batch)
    batches = _batches(part.summary, grid)
    more *= batches / np.maximum(steps_of_epoch(batches, short_batch=part.summary.short_batch), 1)
    longer = usage._replace(
        train_time_s=usage.train_time_s * more,
        evaluation_s=usage.evaluation_s * more,
        epochs=usage.epochs * more,
    )
    return _bill(longer, part, sweep).wall_time_s


def _why_not(
    part: Partition, grid: Grid, peak: Array, on_top: Array, wall_time_s: Array
) -> Integers:
    """Return the first reason against each candidate; the user's constraints come later."""
    summary = part.summary
    allowed = part.allowed_bytes
    bound = np.where(
        grid.nodes * grid.workers_per_node == 1,
        summary.oom_bound(alone=True),
        summary.oom_bound(alone=False),
    )
    steps = steps_of_epoch(_batches(summary, grid), short_batch=summary.short_batch)
    against = [
        # batches that vary may be larger than asked for, so that none is full
        (Why.SAMPLES, (grid.global_batch > summary.dataset_samples) | (steps == 0.0)),
        (Why.DIVERGED, np.isin(grid.local_batch, summary.diverged)),
        (Why.OUT_OF_MEMORY, summary.passes.batch_of_one(grid.local_batch) >= bound),
        (Why.MEMORY, peak + on_top > allowed),
        (Why.FOREVER, wall_time_s >= FOREVER_S),
        (Why.UNSEEN, _may_lack_memory(part, grid, allowed - on_top)),
    ]
    reasons, rows = zip(*against, strict=True)
    return np.select(rows, list(map(int, reasons)), int(FEASIBLE)).astype(np.int64)


def _may_lack_memory(part: Partition, grid: Grid, allowed: Array) -> NDArray[np.bool_]:
    """Mark batches far larger than any measured that may need more memory than is allowed."""
    workers = grid.nodes * grid.workers_per_node
    at_once = part.summary.passes.batch_of_one(grid.local_batch)
    at_once /= np.where(workers == 1, part.summary.parts, 1)
    most = max(profile.part_batch for profile in part.summary.profiles)
    found = (at_once > BELIEVED_FACTOR * most) & np.isfinite(allowed)
    if found.any():
        _, high = part.models.memory.interval(grid.local_batch[found], workers=workers[found])
        found[found] = high > allowed[found]
    return found


def _updates_per_epoch(part: Partition, grid: Grid, sweep: SweepSpec) -> Array:
    """Return the updates of the gradient scale in an epoch that need an extra pass."""
    training = sweep.training
    samples = part.summary.dataset_samples
    if not training.free_reference:
        steps, rows = np.unique(samples // grid.global_batch, return_inverse=True)
        return np.array([sweep.updates_per_epoch(int(count)) for count in steps])[rows]
    alone = grid.nodes * grid.workers_per_node == 1
    batches, rows = np.unique(grid.local_batch[alone], return_inverse=True)
    of_batch = [samples // b / training.pass_interval(b, 1, samples) for b in batches.tolist()]
    updates = np.zeros(grid.global_batch.shape)
    updates[alone] = np.array(of_batch)[rows]
    return updates


def _measured(summary: Summary, grid: Grid) -> NDArray[np.bool_]:
    measured = [profile.configuration for profile in summary.as_planned]
    rows = np.array(measured, dtype=np.int64).reshape(-1, 3)
    return np.isin(grid.keys(), Grid(*rows.T).keys())
