"""Cost of profiling, in node-seconds and, apart from them, in time spent waiting for nodes.

From the notes that profile jobs leave, by their own clock: from the start of the allocation to
their last note. The scheduler's accounting has a second or two more, in which the processes end.
For comparison, a full search with one job for each configuration would have cost an estimated `Σ
N·(s + e(c))` over the candidates c: s is the median of the measured start-ups, e(c) the time that c
takes to measure, predicted where c was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from tula_hpc.analysis.costs.usage import job_runs, only_waiting_s
from tula_hpc.analysis.search.propose import believed_to_fit
from tula_hpc.config import ClusterSpec, SweepSpec, sweep_for
from tula_hpc.formatting import format_duration, format_number, format_percent, plural
from tula_hpc.records import Configuration, JobNote, Measurement, is_usable

# times the node-seconds that were spent
NOTEWORTHY = 1.5


class ProfilingCost(NamedTuple):
    """Cost of the profile jobs of a run."""

    # runs, requeued ones counted again
    jobs: int
    node_seconds: float
    # included in node_seconds
    startup_node_seconds: float
    # in which at least one job waited and none ran
    queue_s: float
    # measured ones
    configurations: int


class FullSearch(NamedTuple):
    """Estimated cost of a full search."""

    jobs: int
    node_seconds: float


def profiling_cost(
    measurements: Sequence[Measurement],
    notes: Sequence[JobNote],
    cluster: ClusterSpec | None = None,
) -> ProfilingCost:
    """Add up the profile jobs of all partitions, each up to its time limit on the cluster."""
    runs = job_runs(notes, measurements, cluster)
    profiles = [row for row in measurements if row.stage == "profile"]
    measured = {(row.partition, row.configuration) for row in profiles if is_usable(row)}
    return ProfilingCost(
        jobs=len(runs),
        node_seconds=sum(run.node_seconds for run in runs),
        startup_node_seconds=sum(run.nodes * run.startup_s for run in runs),
        queue_s=only_waiting_s(runs),
        configurations=len(measured),
    )


def full_search(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    notes: Sequence[JobNote],
) -> FullSearch | None:
    """Estimate a full search over all candidates that memory allows; None without a measurement.

    The partitions are added up.
    """
    startups = [run.startup_s for run in job_runs(notes, measurements, cluster)]
    startup_s = median(startups) if startups else 0.0
    jobs = 0
    node_seconds = 0.0
    for name, partition in zip(cluster.part_names(), cluster.parts(), strict=True):
        rows = [row for row in measurements if row.partition == name and row.stage == "profile"]
        partition_sweep = sweep_for(sweep, partition)
        if partition_sweep is None or not any(row.elapsed_s > 0 for row in rows):
            continue
        wanted = believed_to_fit(partition_sweep, partition, rows)
        if not wanted:
            continue
        elapsed_s = elapsed_times(rows, wanted)
        jobs += len(wanted)
        node_seconds += sum(
            c.nodes * (startup_s + s) for c, s in zip(wanted, elapsed_s, strict=True)
        )
    return FullSearch(jobs, node_seconds) if jobs else None


def elapsed_times(
    measurements: Iterable[Measurement], wanted: Sequence[Configuration]
) -> list[float]:
    """Return the seconds to measure each configuration, predicted where it was not measured.

    Smaller batches that a profile times as well are left out: a full search measures each by itself.

    A measurement takes a number of steps, and a step has compute that is affine in the local batch
    b and a synchronization that grows with `1 − 1/W`: predictions are on `c₀ + c₁·b + c₂·(1 − 1/W)`
    with coefficients at least 0, fit to relative errors.
    """
    usable = (row for row in measurements if is_usable(row) and row.elapsed_s > row.beside_s)
    known = {row.configuration: row.elapsed_s - row.beside_s for row in usable}
    if not known:
        return [0.0] * len(wanted)
    scale = np.array(list(known.values()))
    line, _ = nnls(_design(list(known)) / scale[:, None], np.ones(len(scale)))
    predicted = _design(wanted) @ line
    return [known.get(c, float(s)) for c, s in zip(wanted, predicted, strict=True)]


def _design(
    configurations: Sequence[Configuration],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([[1.0, c.local_batch, 1.0 - 1.0 / c.world_size] for c in configurations])


def describe(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    notes: Sequence[JobNote],
) -> str:
    """Compare profiling with a full search in one sentence; empty where no job left notes."""
    cost = profiling_cost(measurements, notes, cluster)
    if not cost.jobs:
        return ""
    starting = format_percent(cost.startup_node_seconds / max(cost.node_seconds, 1e-9))
    waiting = format_duration(cost.queue_s) if cost.queue_s >= 0.5 else "no time"
    text = (
        f"{plural(cost.configurations, 'configuration')} in {plural(cost.jobs, 'job')}: "
        f"{format_number(cost.node_seconds, 3)} node-seconds "
        f"({starting} of them starting up), and {waiting} waiting for nodes"
    )
    full = full_search(sweep, cluster, measurements, notes)
    # hardly more is not worth a word
    if full is None or full.node_seconds < NOTEWORTHY * cost.node_seconds:
        return text
    return (
        f"{text}; a full search with a job for each of {plural(full.jobs, 'configuration')} "
        f"would have cost an estimated {format_number(full.node_seconds, 3)} node-seconds"
    )
