"""Which configurations are candidates, and which of them to profile next.

Everything is a pure function of the measurements so far: replayed over recorded ones, a search
proposes the same again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tula_hpc.analysis.models.profiles import (
    equivalent_batches,
    is_out_of_memory,
    is_short_of_memory,
)
from tula_hpc.analysis.planning.memory_limit import memory_limit_bytes
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, local_batches
from tula_hpc.errors import Failure
from tula_hpc.records import Configuration, Measurement, is_usable

if TYPE_CHECKING:
    from tula_hpc.analysis.search.adaptive import AdaptiveSearch


# local batches that must have been measured to say what larger ones need
TELL_MEMORY = 2
# a configuration that fails so often, for other reasons than memory, is given up
ATTEMPTS = 2


def candidates(search: SearchSpec, workers_per_node: int) -> list[Configuration]:
    """Every configuration with a power of two as local batch and its global batch within the bounds, ascending."""
    return [
        Configuration(nodes, workers_per_node, local_batch)
        for nodes in sorted(search.cluster_sizes)
        for local_batch in local_batches(search, nodes, workers_per_node)
    ]


def propose(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    *,
    trusted_batch: int | None = None,
) -> list[Configuration]:
    """Configurations to profile next; none when the search is done.

    Mode "full" wants every candidate, "partial" the smallest and the largest local batch on the
    fewest and on the most nodes, "adaptive" what the model needs to decide, see `adaptive`. Memory
    does not depend on the number of nodes, so that a local batch that ran out of memory rules out
    itself and all larger ones everywhere; corners then move to the next smaller one. So they do
    from batches that surely need more memory than there is, by what smaller ones used, as each
    would cost a job. A configuration that failed for another reason is proposed once more, then
    given up.

    Args: sweep: Bounds and mode. cluster: Workers on each node, and their memory. measurements: All
        measurements so far, in any order. trusted_batch: Largest local batch that an estimate lets
        fit before anything was measured; None: any.
    """
    search = sweep.search
    fitting = believed_to_fit(search, cluster, measurements)
    if trusted_batch is not None and not any(is_usable(row) for row in measurements):
        fitting = [c for c in fitting if c.local_batch <= trusted_batch] or fitting[:1]
    done = _settled(measurements)
    if search.mode == "adaptive":
        return _adaptive(sweep, cluster, fitting).propose(measurements, frozenset(done))
    wanted = fitting if search.mode == "full" else _corners(fitting)
    return [configuration for configuration in wanted if configuration not in done]


def believed_to_fit(
    search: SearchSpec, cluster: ClusterSpec, measurements: Sequence[Measurement]
) -> list[Configuration]:
    """Candidates below every batch that ran out of memory, without those that surely would; ascending."""
    below = _below_bound(candidates(search, cluster.workers_per_node), measurements)
    return _within_memory(below, cluster, measurements)


def _adaptive(
    sweep: SweepSpec, cluster: ClusterSpec, fitting: Sequence[Configuration]
) -> AdaptiveSearch:
    # late: it pulls in the numeric libraries
    from tula_hpc.analysis.search.adaptive import AdaptiveSearch
    from tula_hpc.analysis.search.decision import Aim

    aim = Aim(sweep.objective.kind, sweep, cluster)
    return AdaptiveSearch(fitting, aim, sweep.search.max_profiles, sweep.search.form)


def _settled(measurements: Sequence[Measurement]) -> set[Configuration]:
    """Configurations below the out-of-memory bound that need no further profile: measured, or given up."""
    known = {
        row.configuration
        for row in measurements
        # on record is a broken device only after the last attempt, see
        # `tula_hpc.records.broken_hosts`
        if is_usable(row)
        or row.failure is Failure.DEVICE_FAILED
        or (row.failure and row.failure.is_the_users)
    }
    attempts = Counter(row.configuration for row in measurements)
    return known | {configuration for configuration, count in attempts.items() if count >= ATTEMPTS}


def _below_bound(
    wanted: Iterable[Configuration], measurements: Sequence[Measurement]
) -> list[Configuration]:
    out = [
        row.configuration
        for row in measurements
        if is_out_of_memory(row) or is_short_of_memory(row)
    ]
    parts = max((row.parts for row in measurements if is_usable(row)), default=1)
    bounds = {
        alone: min(equivalent_batches(out, parts, alone=alone), default=math.inf)
        for alone in (True, False)
    }
    return [c for c in wanted if c.local_batch < bounds[c.world_size == 1]]


def _within_memory(
    wanted: list[Configuration], cluster: ClusterSpec, measurements: Sequence[Measurement]
) -> list[Configuration]:
    """Without those of which even the lower end of the 90 % interval is above the limit; all where that is unknown."""
    usable = [row for row in measurements if is_usable(row)]
    measured = {row.local_batch for row in usable}
    limit = memory_limit_bytes(cluster, (row.memory for row in usable if row.memory))
    if limit is None or len(measured) < TELL_MEMORY:
        return wanted
    largest = max(measured)
    larger = [c for c in wanted if c.local_batch > largest]
    if not larger:
        return wanted
    # late: it pulls in the numeric libraries
    from tula_hpc.analysis.models.memory import fit_memory
    from tula_hpc.analysis.models.profiles import summarize

    model = fit_memory(summarize(measurements), limit)
    low, _ = model.interval([c.local_batch for c in larger], workers=[c.world_size for c in larger])
    beyond = {c for c, least in zip(larger, low.tolist(), strict=True) if least > limit}
    return [c for c in wanted if c not in beyond] if beyond else wanted


def _corners(fitting: Sequence[Configuration]) -> list[Configuration]:
    """Smallest and largest local batch on the fewest and on the most nodes that have any, each once, ascending."""
    sizes = [configuration.nodes for configuration in fitting]
    ends = {min(sizes), max(sizes)} if sizes else set()
    rows = [
        [configuration for configuration in fitting if configuration.nodes == nodes]
        for nodes in ends
    ]
    return sorted({corner for row in rows for corner in (row[0], row[-1])})
