"""Cost of profiling, in node-seconds and, apart from them, in time spent waiting for nodes.

From the notes that profile jobs leave, by their own clock: from the start of the allocation to
their last note. The scheduler's accounting has a second or two more, in which the processes end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tula_hpc.analysis.costs.usage import job_runs, only_waiting_s
from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import format_duration, format_number, format_percent, plural
from tula_hpc.records import JobNote, Measurement, is_usable


class ProfilingCost(NamedTuple):
    """Cost of the profile jobs of a run."""

    # runs, requeued ones counted again
    jobs: int
    node_seconds: float
    # included in node_seconds
    startup_node_seconds: float
    # in which at least one job waited and none ran
    queue_s: float
    configurations: int


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


def describe(
    cluster: ClusterSpec, measurements: Sequence[Measurement], notes: Sequence[JobNote]
) -> str:
    """Return the cost of profiling in one sentence; empty where no job left notes."""
    cost = profiling_cost(measurements, notes, cluster)
    if not cost.jobs:
        return ""
    starting = format_percent(cost.startup_node_seconds / max(cost.node_seconds, 1e-9))
    waiting = format_duration(cost.queue_s) if cost.queue_s >= 0.5 else "no time"
    return (
        f"{plural(cost.configurations, 'configuration')} in {plural(cost.jobs, 'job')}: "
        f"{format_number(cost.node_seconds, 3)} node-seconds "
        f"({starting} of them starting up), and {waiting} waiting for nodes"
    )
