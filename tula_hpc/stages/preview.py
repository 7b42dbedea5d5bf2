"""Preview of a submission for a dry run: its sbatch scripts, and Slurm's answer to them.

One script of each kind (profile, train) is shown whole, the others as a table of their differences.

Slurm is asked about each script (`sbatch --test-only`): an account, a partition or a limit that is
wrong shows before anything waits in a queue.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tula_hpc.errors import LaunchError, RefusedError, SubmitLimitError
from tula_hpc.launch import slurm
from tula_hpc.launch.launcher import Launcher

# options of a script that say nothing about its job
UNIQUE = frozenset({"job-name", "output", "error", "comment"})
# what of a node a job asks for
SHAPE = ("partition", "nodes", "ntasks-per-node", "cpus-per-task", "mem", "gres", "constraint")


class Script(NamedTuple):
    """An sbatch script, its title, and its kind: the stage."""

    title: str
    text: str
    kind: str = ""


class Preview(NamedTuple):
    """Description of a submission, and its scripts; none where jobs do not go through Slurm."""

    words: Sequence[str]
    scripts: Sequence[Script]

    def show(self) -> None:
        """Print it, with Slurm's answers.

        Raises:
            RefusedError: Slurm would not take all of it.
        """
        shown = [part for kind in _by_kind(self.scripts) for part in _show(kind)]
        sys.stdout.write("\n".join([*self.words, *shown]) + "\n")
        sys.stdout.flush()
        if self.scripts:
            _ask_slurm(self.scripts)


def _by_kind(scripts: Sequence[Script]) -> list[list[Script]]:
    kinds: dict[str, list[Script]] = {}
    for script in scripts:
        kinds.setdefault(script.kind, []).append(script)
    return [*kinds.values()]


def _show(scripts: Sequence[Script]) -> Iterator[str]:
    """Yield the first script, and a table of what the others have in its place."""
    first, *others = scripts
    yield f"\n# ---- {first.title} ----\n{first.text}"
    if not others:
        return
    options = [_options(script.text) for script in scripts]
    names = dict.fromkeys(name for found in options for name in found)
    differing = [n for n in names if len({found.get(n) for found in options}) > 1]
    # each submission has one of its own
    columns = [name for name in differing if name not in UNIQUE]
    rows = [["", *columns]]
    for script, found in zip(scripts, options, strict=True):
        rows.append([script.title, *(found.get(name, "-") for name in columns)])
    yield f"# {len(others)} more like this one, with these options:"
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"#   {'  '.join(cells)}".rstrip()


def _options(text: str) -> dict[str, str]:
    """Return the options of a script's #SBATCH lines."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def _ask_slurm(scripts: Sequence[Script]) -> None:
    from tula_hpc.launch.slurm_executor import could_start

    if not slurm.available():
        sys.stdout.write("Slurm was not asked: sbatch is not on PATH\n")
        return
    refused = 0
    sys.stdout.write("Slurm, if they were submitted now (sbatch --test-only):\n")
    for script in scripts:
        try:
            answer = re.sub(r"^Job \d+ to start", "could start", could_start(script.text))
        except RefusedError as error:
            waits = _waits(error)
            answer = f"{'would wait until you have fewer jobs' if waits else 'refused'}: {error}{_asked(script, error)}"
            refused += not waits
        except LaunchError as error:
            sys.stdout.write(f"  {error}\n")
            return
        sys.stdout.write(f"  {script.title}: {answer}\n")
        sys.stdout.flush()
    if refused:
        raise RefusedError(f"Slurm would refuse {refused} of {len(scripts)} submissions, see above")


def _asked(script: Script, error: RefusedError) -> str:
    """Say what no node has, or not enough of them, and the keys that ask for it."""
    if "Requested node configuration is not available" not in str(error):
        return ""
    options = _options(script.text)
    asked = ", ".join(f"{name}={options[name]}" for name in SHAPE if name in options)
    return (
        f"; it asks for {asked}: see max_nodes, workers_per_node, cpus_per_worker, memory_gb, gres "
        "and constraint of the cluster file, and search.cluster_sizes"
    )


def _waits(error: RefusedError) -> bool:
    """Tell whether a submission would wait until the user has fewer jobs.

    Slurm names the same limit for a job that is too large.
    """
    return isinstance(error, SubmitLimitError) and slurm.retry_until_answered(slurm.own_jobs) > 0


def script_of(
    launcher: Launcher, title: str, *, stage: str, nodes: int, minutes: int, tasks: int
) -> Iterator[Script]:
    """Yield the script of one submission; none where jobs do not go through Slurm."""
    text = launcher.script(stage=stage, nodes=nodes, minutes=minutes, tasks=tasks)
    if text:
        where = f"{launcher.cluster.partition}: " if launcher.cluster.partition else ""
        yield Script(f"{where}{title}", text, stage)
