"""Candidates of a search that are to be profiled next.

The way from the sweep file to a job: of the `candidates`, those that are `believed_to_fit` and
neither measured nor given up (see `retry_policy.py`) can be proposed. `stages/profile.py` asks once
a round (`propose_on`) and submits those that do not disturb each other (`first_wave`). A job then
goes on by itself: `WorkQueue` in `profiling/work_queue.py` measures its list, then asks here for
more on its own number of nodes, or fewer, until its time is up.

Everything is a pure function of the measurements so far: replayed over recorded ones, a search
proposes the same again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tula_hpc.analysis.models.memory import fit_memory
from tula_hpc.analysis.models.profiles import Summary, is_out_of_memory, summarize
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.planning.candidates import candidates
from tula_hpc.analysis.planning.memory_limit import memory_limit_bytes
from tula_hpc.analysis.planning.partitions import with_passes
from tula_hpc.analysis.search.adaptive import AdaptiveSearch
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Configuration, Measurement, corners, is_usable
from tula_hpc.retry_policy import is_configuration_given_up

# number of measured local batches from which on the memory of larger ones is predicted
MEMORY_BATCHES = 2


def propose(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    *,
    trusted_batch: int | None = None,
    model: StepTimeModel | None = None,
) -> list[Configuration]:
    """Return the configurations to profile next; none at the end of the search.

    Mode "full" wants every candidate, "partial" the smallest and the largest local batch on the
    fewest and on the most nodes; for "adaptive" see `adaptive`. Memory does not depend on the
    number of nodes. So a local batch that ran out of memory, or surely would, rules out itself and
    all larger ones everywhere. Corners move to the next smaller one. A configuration that failed
    for another reason is proposed once more, then given up. Before any measurement, only batches up
    to `trusted_batch` are proposed, which fit by an estimate; None: any. `model` is the step-time
    model of these measurements, if a plan has fitted it already.
    """
    search = sweep.search
    fitting = believed_to_fit(sweep, cluster, measurements)
    if trusted_batch is not None and not any(map(is_usable, measurements)):
        fitting = [c for c in fitting if c.local_batch <= trusted_batch] or fitting[:1]
    done = _settled(measurements)
    if search.mode == "adaptive":
        decision = DecisionModel(sweep.objective.kind, sweep, cluster)
        adaptive = AdaptiveSearch(fitting, decision, search.max_profiles, search.form)
        return adaptive.propose(measurements, frozenset(done), model)
    wanted = fitting if search.mode == "full" else corners(fitting)
    return [configuration for configuration in wanted if configuration not in done]


def believed_to_fit(
    sweep: SweepSpec, cluster: ClusterSpec, measurements: Sequence[Measurement]
) -> list[Configuration]:
    """Return the candidates below every batch that ran out of memory or surely would, ascending.

    Local batches at which the loss is not finite are left out: training there would be in vain.
    If a script takes a batch in as many passes as memory needs, these are all candidates, or none
    if a single sample ran out of memory.
    """
    every = candidates(sweep.search, cluster.workers_per_node)
    if sweep.workload.accumulates:
        out = list(filter(is_out_of_memory, measurements))
        hopeless = any(row.local_batch <= (row.accumulation or 1) for row in out)
        return [] if hopeless else every
    summary = summarize(measurements)
    alone = summary.oom_bound(alone=True)
    several = summary.oom_bound(alone=False)
    finite = [c for c in every if c.local_batch not in summary.diverged]
    below = [c for c in finite if c.local_batch < (alone if c.world_size == 1 else several)]
    return _within_memory(below, cluster, summary)


def largest_pass(
    sweep: SweepSpec, cluster: ClusterSpec, measurements: Sequence[Measurement]
) -> float | None:
    """Return the largest batch of one forward pass of a script that fits; None: any is tried."""
    if not sweep.workload.accumulates:
        return None
    most = with_passes(sweep, cluster, summarize(measurements)).passes.most
    return None if math.isinf(most) else most


def _settled(measurements: Sequence[Measurement]) -> set[Configuration]:
    """Return the configurations that are measured or given up."""
    attempts: Counter[Configuration] = Counter()
    settled: set[Configuration] = set()
    for row in measurements:
        if row.accumulation is not None and is_out_of_memory(row):
            # it will be proposed again, with more passes
            continue
        attempts[row.configuration] += 1
        given_up = is_configuration_given_up(row.failure, attempts[row.configuration])
        if is_usable(row) or row.is_left_out or given_up:
            settled.add(row.configuration)
    return settled


def _within_memory(
    wanted: list[Configuration], cluster: ClusterSpec, summary: Summary
) -> list[Configuration]:
    """Leave out candidates whose whole 90 % interval is above the limit, if that is known."""
    measured = {row.configuration.local_batch for row in summary.profiles}
    limit = memory_limit_bytes(cluster, summary.memory_uses)
    if limit is None or len(measured) < MEMORY_BATCHES:
        return wanted
    largest = max(measured)
    larger = [c for c in wanted if c.local_batch > largest]
    if not larger:
        return wanted
    model = fit_memory(summary, limit)
    low, _ = model.interval([c.local_batch for c in larger], workers=[c.world_size for c in larger])
    beyond = {c for c, least in zip(larger, low.tolist(), strict=True) if least > limit}
    return [c for c in wanted if c not in beyond]
