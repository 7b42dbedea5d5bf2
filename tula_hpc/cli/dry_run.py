"""Preview of `--dry-run`: the next jobs, an upper bound of their node-hours, and sbatch scripts."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tula_hpc.cli.changed_inputs import changes_of, freeze, that_matter
from tula_hpc.cli.open_run import check_run
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.containers import describe, folders_of
from tula_hpc.env import unix_time
from tula_hpc.errors import InputError
from tula_hpc.formatting import plural
from tula_hpc.records import Candidate, Configuration, RunDirectory, Trial, write_atomically
from tula_hpc.records.events import CONTROL
from tula_hpc.stages.batches_that_fit import Estimate, estimate, none_fits
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.plan import plan_is_good
from tula_hpc.stages.preview import Preview, Script, script_of
from tula_hpc.stages.profile import (
    allocated_nodes,
    first_wave,
    parts_of,
    propose_on,
    wants_estimate,
)
from tula_hpc.stages.rehearsal import (
    TRYING,
    is_here,
    is_tried,
    refuse_another_model,
    rehearse,
    warn_of_script,
)
from tula_hpc.stages.study import describe_study
from tula_hpc.stages.train import next_candidate


class Wave(NamedTuple):
    """Configurations measured in allocations of one size, in one job or in one job each."""

    nodes: int
    configurations: tuple[Configuration, ...]
    tasks: int


class Beginning(NamedTuple):
    """First profile jobs on a partition of the cluster."""

    part: Sweep
    # estimate of memory; None: the profile stage would make none
    estimate: Estimate | None
    waves: list[Wave]


def preview(
    options: argparse.Namespace,
    spec: SweepSpec,
    cluster: ClusterSpec,
    root: Path,
    *,
    trains: bool = True,
) -> int:
    """Print the next jobs of a sweep, without its training unless it `trains`; create nothing.

    Raises:
        InputError: The sweep would be refused for a mistake in its workload.
        RunDirectoryError: The folder is no run directory, or was made from other inputs.
        StageError: No batch of the plan is left, or Slurm would refuse a submission.
    """
    check_run(spec, cluster, root, has_cluster_file=options.cluster is not None)
    if spec.study is None:
        described = _describe(spec, cluster, root, trains=trains)
    else:
        _try_dry(Sweep(spec, cluster, RunDirectory(root)))
        described = describe_study(spec, cluster, root)
    if options.detach:
        described = _with_controller(described, spec, cluster, root)
    described.show()
    return 0


def _describe(spec: SweepSpec, cluster: ClusterSpec, root: Path, *, trains: bool) -> Preview:
    head = f"sweep {spec.name!r} on {cluster.name!r} ({cluster.executor}), run directory {root}"
    # started now: configurations that failed before this are tried again
    sweep = Sweep(spec, cluster, RunDirectory(root), started_at=unix_time())
    if sweep.run.train().result_file.exists():
        over = "the training is over: nothing is submitted, and the report is written again"
        return Preview([head, over], [])
    begun = []
    if not sweep.run.has_trained():
        tried = _try_dry(sweep)
        begun = [_beginning(part, tried) for part in parts_of(sweep)]
    lines = [head, *_container(sweep), *_on_their_way(sweep)]
    refusals = [none_fits(each.part, each.estimate and each.estimate.footprint) for each in begun]
    if refusals and all(refusals):
        raise InputError("\n".join(refusals))
    lines += filter(None, refusals)
    begun = [each for each, words in zip(begun, refusals, strict=True) if not words]
    scripts: list[Script] = []
    for each in begun:
        lines += _profiling(each)
        for wave in each.waves:
            scripts += _scripts(each.part, "profile", wave.nodes, wave.tasks)
    profiling = Preview(lines, scripts)
    return _with_training(sweep, begun, profiling) if trains else profiling


def _with_training(sweep: Sweep, begun: Iterable[Beginning], profiling: Preview) -> Preview:
    chosen = None if any(each.waves for each in begun) else _chosen(sweep)
    if chosen is not None:
        there = sweep.on(chosen.partition)
        lines = [_planned_training(there, chosen)]
        scripts = list(_scripts(there, "train", chosen.nodes))
    else:
        lines = []
        scripts = []
        for part in parts_of(sweep):
            lines.append(_training(part))
            scripts += _scripts(part, "train", max(part.spec.search.cluster_sizes))
    return Preview([*profiling.words, *lines], [*profiling.scripts, *scripts])


def _with_controller(shown: Preview, spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Preview:
    """Add the controller job that a detached sweep submits behind its jobs, if it submits any."""
    if not shown.scripts:
        return shown
    minutes = cluster.controller_minutes
    there = Sweep(spec, cluster.controller(), RunDirectory(root))
    scripts = script_of(
        there.launcher, "controller, N=1, 1 task", stage=CONTROL, nodes=1, minutes=minutes, tasks=1
    )
    words = (
        f"detached: when these jobs are over, a controller job of at most {minutes} min on one "
        "core submits the next ones; a second one waits in case it is killed"
    )
    return Preview([*shown.words, words], [*shown.scripts, *scripts])


def _container(sweep: Sweep) -> Iterator[str]:
    if sweep.cluster.container is not None:
        folders = folders_of(sweep.spec.workload)
        yield f"jobs run {describe(sweep.cluster, folders, sweep.run.root)}"


def _on_their_way(sweep: Sweep) -> Iterator[str]:
    stage = "train" if sweep.run.has_trained() else "profile"
    jobs = [job.job_id for job in sweep.run.history().unsettled(stage)]
    if jobs:
        more = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
        yield f"first the command waits for the jobs of earlier commands: {stage} job {jobs[0]}{more}"


def _chosen(sweep: Sweep) -> Candidate | None:
    """Return the next training by the present plan; None if a new plan is made first."""
    run = sweep.run
    changed = changes_of(run.sweep_file, sweep.spec)
    changed |= changes_of(run.cluster_file, sweep.cluster)
    if not plan_is_good(run) or that_matter(changed):
        return None
    return next_candidate(run.read_plan(), run, sweep.spec.training.max_fallbacks)


def _beginning(part: Sweep, tried: Trial | None) -> Beginning:
    """Return the first proposals by size of allocation, as if all could be submitted at once."""
    everything = part.cluster.model_copy(update={"executor": "slurm", "array_parallelism": 2})
    packed = part.spec.search.packed
    made = _estimate(part, tried)
    proposed = propose_on(part, None if made is None else made.trusted_batch)
    waves = [
        Wave(allocated_nodes(part.spec, group), group, 1 if packed else len(group))
        for group in first_wave(part.spec, everything, proposed)
    ]
    return Beginning(part, made, waves)


def _try_dry(sweep: Sweep) -> Trial | None:
    """Try the workload as the sweep would, if its data and code are here; keep nothing.

    Raises:
        InputError: The sweep would be refused.
    """
    spec, cluster = sweep.spec, sweep.cluster
    warn_of_script(sweep)
    if not is_tried(spec, cluster) or not is_here(spec):
        return None
    parts = parts_of(sweep) if spec.study is None else []
    memory = [part.partition for part in parts if wants_estimate(part)]
    sys.stderr.write(f"trying {TRYING} ...\n")
    with _input_files(sweep) as files:
        tried = rehearse(spec, cluster, files, memory)
    if isinstance(tried, str):
        sys.stderr.write(
            f"your code is not tried here, so only a job will show its mistakes: {tried}\n"
        )
        return None
    refuse_another_model(sweep, tried)
    return tried


@contextlib.contextmanager
def _input_files(sweep: Sweep) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        sweep_file, cluster_file = Path(folder, "sweep.toml"), Path(folder, "cluster.toml")
        write_atomically(sweep_file, freeze(sweep.spec))
        write_atomically(cluster_file, freeze(sweep.cluster))
        yield sweep_file, cluster_file


def _estimate(part: Sweep, tried: Trial | None) -> Estimate | None:
    """Return the estimate of memory that the profile stage has or would make; keep nothing."""
    name = part.partition
    if tried is not None and (name in tried.footprints or name in tried.reasons):
        return Estimate(tried.footprints.get(name), tried.reasons.get(name, ""))
    stored = part.run.footprints([name]).get(name)
    if stored is not None:
        return Estimate(stored)
    if not wants_estimate(part):
        return None
    sys.stderr.write("estimating which batches fit into memory (search.estimate) ...\n")
    with _input_files(part) as files:
        return estimate(*files)


def _profiling(beginning: Beginning) -> Iterator[str]:
    from tula_hpc.analysis.planning.candidates import candidates

    part, waves = beginning.part, beginning.waves
    search, minutes = part.spec.search, part.cluster.profile_minutes
    every = len(candidates(search, part.cluster.workers_per_node))
    first = sum(len(wave.configurations) for wave in waves)
    where = f"partition {part.partition!r}: " if part.partition else ""
    count = f"{where}{plural(every, 'candidate')}"
    if not waves:
        yield f"{count}, and nothing is left to profile"
        return
    if beginning.estimate is not None:
        yield f"{where}{beginning.estimate.describe()}"
    if search.mode == "adaptive":
        measured = part.run.measurements().records
        here = [row for row in measured if row.partition == part.partition]
        done = len({row.configuration for row in here if row.status != "failed"})
        most = min(search.max_profiles, every)
        if done:
            more = max(first, most - done)
            yield f"{count}, {done} measured; adaptive search goes on with {first} and measures at most {more} more:"
        elif first >= most:
            yield f"{count}; adaptive search measures {most} of them:"
        else:
            yield f"{count}; adaptive search starts with {first} and measures at most {most} of them:"
    else:
        yield f"{count}, {first} to profile ({search.mode} search):"
    yield from _jobs(search.nest, waves)
    hours = sum(wave.nodes * wave.tasks for wave in waves) * minutes / 60
    yield f"profiling: at most {hours:.2f} node-hours for these jobs ({minutes} min is the limit of each)"
    if search.mode == "adaptive":
        yield "  a job also measures what the search proposes next, if that is cheaper than a new job; more jobs follow"


def _jobs(nest: bool, waves: Iterable[Wave]) -> Iterator[str]:
    for wave in waves:
        how = "in one job" if wave.tasks == 1 else f"in an array of {wave.tasks} jobs"
        if nest:
            shown = ", ".join(f"{c.nodes}×{c.local_batch}" for c in wave.configurations)
            yield f"  nodes × local batch {shown}, all {how} on {plural(wave.nodes, 'node')}"
        else:
            yield f"  N={wave.nodes}: local batches {', '.join(str(c.local_batch) for c in wave.configurations)}, {how}"


def _training(part: Sweep) -> str:
    largest, minutes = max(part.spec.search.cluster_sizes), part.cluster.train_minutes
    where = f" of partition {part.partition!r}" if part.partition else ""
    return (
        f"training: at most {largest * minutes / 60:.2f} node-hours per submission, if "
        f"{plural(largest, 'node')}{where} {'is' if largest == 1 else 'are'} chosen"
    )


def _planned_training(there: Sweep, chosen: Candidate) -> str:
    hours = chosen.nodes * there.cluster.train_minutes / 60
    where = f" on {chosen.partition}" if chosen.partition else ""
    return f"training: at most {hours:.2f} node-hours per submission, at {chosen.configuration}{where} by the plan"


def _scripts(part: Sweep, stage: str, nodes: int, tasks: int = 1) -> Iterator[Script]:
    cluster = part.cluster
    minutes = cluster.train_minutes if stage == "train" else cluster.profile_minutes
    title = f"{stage}, N={nodes}, {plural(tasks, 'task')}"
    return script_of(part.launcher, title, stage=stage, nodes=nodes, minutes=minutes, tasks=tasks)
