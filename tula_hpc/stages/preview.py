"""Ask Slurm before anything is submitted: for a dry run's `Preview`, and for what is `impossible`.

A preview shows one whole script of each kind (profile, train, control), the others as a table of
their differences, and Slurm's answer to each (`sbatch --test-only`): a wrong account, partition or
limit shows before anything waits in a queue. Every command refuses what is `impossible`: a
partition that does not exist, or that is too small for the jobs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, cluster_sizes, study_part
from tula_hpc.errors import LaunchError, NotConfiguredError, RefusedError, SubmitLimitError
from tula_hpc.formatting import aligned, plural
from tula_hpc.launch import slurm
from tula_hpc.launch.bounded_command import count_in
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm_executor import NO_SUCH_NODE, could_start, origin_of, partitions_of
from tula_hpc.stages.context import Sweep

# options of a script that say nothing about its job
UNIQUE = frozenset({"job-name", "output", "error", "comment"})
# longest wait for Slurm's answer about its partitions
ASK_S = 20.0
# sbatch's options that send a job to another cluster, whose partitions are not known here
ELSEWHERE = {"clusters", "M", "cluster-constraint"}
MIB_OF_GIB = 1024
# options that say which nodes a job asks for
SHAPE = ("partition", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "gres", "constraint")


class Script(NamedTuple):
    """An sbatch script, its title, and its kind: the stage."""

    title: str
    text: str
    kind: str = ""


class Preview(NamedTuple):
    """Description of a submission, and its scripts: none if jobs do not go through Slurm."""

    words: Sequence[str]
    scripts: Sequence[Script]

    def show(self) -> None:
        """Print the preview, with Slurm's answers.

        Raises:
            RefusedError: Slurm would refuse a submission.
        """
        kinds: dict[str, list[Script]] = {}
        for script in self.scripts:
            kinds.setdefault(script.kind, []).append(script)
        shown = chain.from_iterable(map(_show, kinds.values()))
        sys.stdout.write("\n".join([*self.words, *shown]) + "\n")
        sys.stdout.flush()
        if self.scripts:
            _ask_slurm(self.scripts)
            sys.stdout.write("This was a dry run: nothing was submitted.\n")


def _show(scripts: Sequence[Script]) -> Iterator[str]:
    """Yield the first script, and a table of the options in which the others differ."""
    first, *others = scripts
    yield f"\n# ---- {first.title} ----\n{first.text}"
    if not others:
        return
    options = [_options(script.text) for script in scripts]
    names = dict.fromkeys(name for found in options for name in found)
    differing = [n for n in names if len({found.get(n) for found in options}) > 1]
    # without options that differ between any two submissions
    columns = [name for name in differing if name not in UNIQUE]
    rows = [["", *columns]]
    for script, found in zip(scripts, options, strict=True):
        rows.append([script.title, *(found.get(name, "-") for name in columns)])
    yield f"# {len(others)} more like this one; they differ in these options:"
    for line in aligned(rows):
        yield f"#   {line}".rstrip()


def _options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def _ask_slurm(scripts: Sequence[Script]) -> None:
    if not slurm.available():
        sys.stdout.write("Slurm was not asked: sbatch is not on PATH\n")
        return
    refused = 0
    sys.stdout.write("Slurm's answers if they were submitted now (sbatch --test-only):\n")
    for script in scripts:
        try:
            answer = re.sub(r"^Job \d+ to start", "could start", could_start(script.text))
        except RefusedError as error:
            if absent := _absent(script, error):
                answer = absent
            elif _waits(error):
                answer = f"would wait until you have fewer jobs: {error}"
            else:
                answer = f"refused: {error}{_asked(script, error)}"
                refused += 1
        except LaunchError as error:
            sys.stdout.write(f"  {error}\n")
            break
        sys.stdout.write(f"  {script.title}: {answer}\n")
        sys.stdout.flush()
    if refused:
        raise RefusedError(f"Slurm would refuse {refused} of {len(scripts)} submissions, see above")


def _absent(script: Script, error: RefusedError) -> str:
    """Say that a job would wait for nodes that are down or drained; "" if that is not the reason.

    `sbatch --test-only` answers as if such nodes did not exist, though sbatch would accept the job.
    They are the reason if the partition has enough nodes, but not enough of them are up.
    """
    options = _options(script.text)
    wanted = count_in(options.get("nodes", "")) or 1
    if NO_SUCH_NODE not in str(error) or ELSEWHERE & options.keys():
        return ""
    try:
        shown = slurm.run_command(["sinfo", "-a", "-h", "-o", "%P %F"], ASK_S)
    except LaunchError:
        return ""
    # the name, with a star if it is the default, and the nodes: allocated, idle, other, all
    for name, star, *found in re.findall(
        r"^(\S+?)(\*?) (\d+)/(\d+)/(\d+)/(\d+)$", shown, re.MULTILINE
    ):
        allocated, idle, other, every = map(int, found)
        is_asked = name == options["partition"] if "partition" in options else bool(star)
        if is_asked and allocated + idle < wanted <= every:
            return (
                f"would wait: {other} of the {every} nodes of partition {name} are down or drained "
                "(sinfo -R says why)"
            )
    return ""


def _asked(script: Script, error: RefusedError) -> str:
    """Name the options that ask for nodes of which there are too few; "" for other refusals."""
    if NO_SUCH_NODE not in str(error):
        return ""
    options = _options(script.text)
    asked = ", ".join(f"{name}={options[name]}" for name in SHAPE if name in options)
    return f"; it asks for {asked}"


def _waits(error: RefusedError) -> bool:
    """Tell whether a submission would wait until the user has fewer jobs.

    Slurm also names the same limit for a job that is too large, so other jobs are counted.
    """
    return isinstance(error, SubmitLimitError) and slurm.retry_until_answered(slurm.own_jobs) > 0


def script_of(
    launcher: Launcher, title: str, *, stage: str, nodes: int, minutes: int, tasks: int
) -> Iterator[Script]:
    """Yield the script of one submission; none if jobs do not go through Slurm.

    If the site allows no array of so many tasks, it is that of the first piece.
    """
    most = launcher.executor.most_together(tasks)
    text = launcher.script(stage=stage, nodes=nodes, minutes=minutes, tasks=most)
    if text:
        where = f"{launcher.cluster.partition}: " if launcher.cluster.partition else ""
        yield Script(f"{where}{title}", text, stage)


def impossible(sweep: Sweep) -> tuple[str, str] | None:
    """Return key and message if a partition does not exist, or has too little for the jobs.

    Return None if all is well or Slurm cannot be asked. A site's plugin may send jobs to other
    partitions than they ask for, so only a job that sbatch would refuse, too, is impossible.

    Raises:
        NotConfiguredError: Slurm's commands find no configuration on this machine.
    """
    partitions = _partitions()
    if not partitions:
        return None
    kinds = _kinds_of_nodes()
    for name, part, nodes in _largest_jobs(sweep):
        if ELSEWHERE & part.sbatch.keys():
            continue
        mistake = _mistake(part, nodes, partitions, kinds)
        if mistake is not None and _is_refused(sweep.on(name), nodes):
            key, words = mistake
            return f"partitions.{name}.{key}" if name else key, words
    return None


def _partitions() -> dict[str, dict[str, str]]:
    """Return the fields of Slurm's partitions by name, including hidden partitions."""
    try:
        shown = slurm.run_command(["scontrol", "show", "partition", "--all", "--oneliner"], ASK_S)
    except NotConfiguredError:
        raise
    except LaunchError:
        return {}
    rows: dict[str, dict[str, str]] = {}
    for line in shown.splitlines():
        if line.startswith("PartitionName="):
            row = dict(re.findall(r"(\w+)=(\S*)", line))
            rows[row["PartitionName"]] = row
    return rows


def _largest_jobs(sweep: Sweep) -> Iterator[tuple[str, ClusterSpec, int]]:
    """Yield each partition that jobs go to: name, cluster, and nodes of the largest job."""
    spec, cluster = sweep.spec, sweep.cluster
    if spec.study is not None:
        if part := study_part(spec.study, cluster):
            yield *part, spec.study.nodes
        return
    for name, own in cluster.by_name().items():
        if sizes := cluster_sizes(spec.search, own):
            yield name, own, max(sizes)


def _mistake(
    part: ClusterSpec,
    nodes: int,
    partitions: Mapping[str, Mapping[str, str]],
    kinds: Sequence[tuple[str, str, str]],
) -> tuple[str, str] | None:
    names = partitions_of(part)
    origin = origin_of(part, "partition")
    if missing := [name for name in names if name not in partitions]:
        known = ", ".join(partitions)
        words = f"Slurm has no partition {missing[0]!r}{origin}; expected one of: {known}"
        return "partition", words
    names = names or [name for name, row in partitions.items() if row.get("Default") == "YES"]
    most = max((count_in(partitions[name].get("TotalNodes", "")) or 0 for name in names), default=0)
    if 0 < most < nodes:
        where = f"partition {', '.join(names)}{origin}"
        found = f"{part.max_nodes}, but {where} has {plural(most, 'node')}"
        return "max_nodes", f"{found}; set max_nodes = {most}, and search.cluster_sizes up to that"
    return _too_large(part, names, [kind for kind in kinds if kind[0] in names])


def _too_large(
    part: ClusterSpec, names: Sequence[str], kinds: Sequence[tuple[str, str, str]]
) -> tuple[str, str] | None:
    """Return key and message if a job needs more than any node of these partitions has."""
    cpus = max((int(kind[1]) for kind in kinds), default=0)
    memory_mb = max((int(kind[2]) for kind in kinds), default=0)
    where = f"nodes of partition {', '.join(names)} have"
    asked = part.cpus_per_worker * part.workers_per_node
    if 0 < cpus < asked:
        workers = plural(part.workers_per_node, "worker")
        words = f"{part.cpus_per_worker}, with {workers} a node, but {where} {plural(cpus, 'CPU')}"
        also = " or workers_per_node" if part.workers_per_node > 1 else ""
        return "cpus_per_worker", f"{words}; lower it{also}"
    if part.memory_gb is not None and 0 < memory_mb < part.memory_gb * MIB_OF_GIB:
        words = f"{part.memory_gb:g} GiB of a node, but {where} {memory_mb / MIB_OF_GIB:.3g} GiB"
        return "memory_gb", f"{words}; lower it"
    return None


def _kinds_of_nodes() -> list[tuple[str, str, str]]:
    """Return partition, CPUs and MiB of each kind of node, including hidden partitions."""
    try:
        shown = slurm.run_command(["sinfo", "-a", "-h", "-e", "-o", "%R %c %m"], ASK_S)
    except LaunchError:
        return []
    return re.findall(r"^(\S+) (\d+) (\d+)", shown, re.MULTILINE)


def _is_refused(part: Sweep, nodes: int) -> bool:
    minutes = part.cluster.profile_minutes
    script = part.launcher.script(stage="profile", nodes=nodes, minutes=minutes, tasks=1)
    try:
        could_start(script)
    except RefusedError as error:
        return not isinstance(error, SubmitLimitError)
    except LaunchError:
        return False
    return False
