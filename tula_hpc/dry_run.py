"""What `--dry-run` prints of a sweep: the first jobs, an upper bound of their node-hours, and the sbatch scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.analysis.formatting import plural
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.profile_stage import allocated_nodes, first_wave, parts_of, propose_on
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.stages import Sweep
from tula_hpc.submission import Preview, Script, script_of


class Wave(NamedTuple):
    """Configurations that are measured in allocations of one size: in one job, or in a job for each."""

    nodes: int
    configurations: tuple[Configuration, ...]
    tasks: int


def describe_submission(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Preview:
    """What a sweep would submit first; nothing is created."""
    head = f"sweep {spec.name!r} on {cluster.name!r} ({cluster.executor}), run directory {root}"
    lines, scripts = [head], []
    for part in parts_of(Sweep(spec, cluster, RunDirectory(root))):
        waves = _waves(part)
        lines += [*_profiling(part, waves), _training(part)]
        scripts += [*_profile_scripts(part, waves), *_train_script(part)]
    return Preview(lines, scripts)


def _waves(part: Sweep) -> list[Wave]:
    """What the search proposes first, by size of allocation, as if all could be submitted together."""
    everything = part.cluster.model_copy(update={"executor": "slurm", "array_parallelism": 2})
    packed = part.spec.search.packed
    return [
        Wave(allocated_nodes(part.spec, group), group, 1 if packed else len(group))
        for group in first_wave(part.spec, everything, propose_on(part))
    ]


def _profiling(part: Sweep, waves: Sequence[Wave]) -> Iterator[str]:
    from tula_hpc.analysis.search import candidates

    search, minutes = part.spec.search, part.cluster.profile_minutes
    every = len(candidates(search, part.cluster.workers_per_node))
    first = sum(len(wave.configurations) for wave in waves)
    where = f"partition {part.partition!r}: " if part.partition else ""
    if search.mode == "adaptive":
        most = min(search.max_profiles, every)
        yield f"{where}{every} candidates; adaptive search starts with {first} and measures at most {most} of them:"
    else:
        yield f"{where}{every} candidates, {first} to profile ({search.mode} search):"
    yield from _jobs(search.nest, waves)
    hours = sum(wave.nodes * wave.tasks for wave in waves) * minutes / 60
    yield f"profiling: at most {hours:.2f} node-hours for these jobs ({minutes} min is the limit of each)"
    if search.mode == "adaptive":
        yield "  a job goes on with what the search wants next, where that is cheaper than a new job; other jobs follow"


def _jobs(nest: bool, waves: Iterable[Wave]) -> Iterator[str]:
    for wave in waves:
        how = "in one job" if wave.tasks == 1 else f"in an array of {wave.tasks} jobs"
        if nest:
            shown = ", ".join(f"{c.nodes}×{c.local_batch}" for c in wave.configurations)
            yield f"  nodes × local batch {shown}, all {how} on {wave.nodes} nodes"
        else:
            yield f"  N={wave.nodes}: local batches {', '.join(str(c.local_batch) for c in wave.configurations)}, {how}"


def _training(part: Sweep) -> str:
    largest, minutes = max(part.spec.search.cluster_sizes), part.cluster.train_minutes
    return (
        f"training: at most {largest * minutes / 60:.2f} node-hours per submission, if {plural(largest, 'node')} "
        f"{'of this partition ' if part.partition else ''}{'is' if largest == 1 else 'are'} chosen"
    )


def _profile_scripts(part: Sweep, waves: Iterable[Wave]) -> Iterator[Script]:
    for wave in waves:
        title = f"profile, N={wave.nodes}, {plural(wave.tasks, 'task')}"
        minutes = part.cluster.profile_minutes
        yield from script_of(part.launcher, title, stage="profile", nodes=wave.nodes, minutes=minutes, tasks=wave.tasks)


def _train_script(part: Sweep) -> Iterator[Script]:
    nodes, minutes = max(part.spec.search.cluster_sizes), part.cluster.train_minutes
    title = f"train, N={nodes}, 1 task"
    yield from script_of(part.launcher, title, stage="train", nodes=nodes, minutes=minutes, tasks=1)
