"""What whoever reads a plan should know before relying on it: the warnings of plan.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tula_hpc.analysis.aggregate import Profile, Summary
from tula_hpc.analysis.formatting import plural
from tula_hpc.analysis.search import propose
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Candidate, Configuration, Measurement

LOADER_SHARE = 0.2  # of a step; above it the data loader is worth the user's attention
DROPPED_SHARE = 0.1  # of the samples


def about_measurements(summary: Summary, sweep: SweepSpec, workers_per_node: int) -> list[str]:
    """Doubts about the measurements themselves."""
    profiles = summary.profiles
    return [
        *summary.warnings,
        *_listed([p for p in profiles if not p.converged], "stopped before the step time had settled"),
        *_listed([p for p in profiles if not p.exclusive], "shared their nodes with other jobs"),
        *_listed([p for p in profiles if p.emulated], "shared one machine between their nodes; real nodes will differ"),
        *_other_workers(profiles, workers_per_node),
        *_slow_loader(profiles, sweep.workload.loader_workers),
    ]


def about_missing(
    summary: Summary, sweep: SweepSpec, cluster: ClusterSpec, measurements: Sequence[Measurement], skipped: int
) -> list[str]:
    """What should be there and is not."""
    found = [f"{configuration} was not measured: {why}" for configuration, why in summary.failed.items()]
    pending = [c for c in propose(sweep, cluster, measurements) if c not in summary.failed]
    if pending:
        found.append(f"not yet profiled: {_names(pending)}; run the sweep again")
    if skipped:
        found.append(f"{plural(skipped, 'damaged line')} of the measurements skipped")
    return found


def about_choice(chosen: Candidate, feasible: Sequence[Candidate], summary: Summary) -> list[str]:
    """Doubts about the chosen candidate."""
    return [*_extrapolated(chosen, feasible, summary.profiles), *_dropped(chosen, summary.dataset_samples)]


def _listed(profiles: Sequence[Profile], what: str) -> list[str]:
    return [f"measurements that {what}: {_names(p.configuration for p in profiles)}"] if profiles else []


def _names(configurations: Iterable[Configuration], shown: int = 6) -> str:
    names = [str(configuration) for configuration in configurations]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _other_workers(profiles: Sequence[Profile], workers_per_node: int) -> list[str]:
    other = [p for p in profiles if p.configuration.workers_per_node != workers_per_node]
    return _listed(other, f"were not run with {plural(workers_per_node, 'worker')} per node")


def _slow_loader(profiles: Sequence[Profile], loader_workers: int) -> list[str]:
    def share(profile: Profile) -> float:
        return profile.times.data_time_s / profile.times.step_time_s

    slow = [profile for profile in profiles if share(profile) > LOADER_SHARE]
    if not slow:
        return []
    worst = max(slow, key=share)
    where = f"{share(worst):.0%} of a step at {worst.configuration}"
    return [f"waiting for data takes up to {where}: raise workload.loader_workers (now {loader_workers})"]


def _extrapolated(chosen: Candidate, feasible: Sequence[Candidate], profiles: Sequence[Profile]) -> list[str]:
    """Candidates outside the rectangle of node counts and local batches that were profiled."""
    nodes = [profile.configuration.nodes for profile in profiles]
    batches = [profile.configuration.local_batch for profile in profiles]

    def outside(candidate: Candidate) -> bool:
        inside = min(nodes) <= candidate.nodes <= max(nodes)
        return not (inside and min(batches) <= candidate.local_batch <= max(batches))

    beyond = [candidate for candidate in feasible if outside(candidate)]
    if not beyond:
        return []
    profiled = f"the profiled range (N {min(nodes)} to {max(nodes)}, b {min(batches)} to {max(batches)})"
    mine = ", the chosen one among them," if outside(chosen) else ""
    verb = "lies" if len(beyond) == 1 else "lie"
    return [f"{len(beyond)} of {len(feasible)} feasible candidates{mine} {verb} beyond {profiled}: extrapolated"]


def _dropped(chosen: Candidate, samples: int) -> list[str]:
    share = samples % chosen.global_batch / samples
    if share <= DROPPED_SHARE:
        return []
    return [f"full batches of {chosen.global_batch:,} leave out {share:.0%} of the {samples:,} samples in every epoch"]
