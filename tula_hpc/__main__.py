"""Commands of the package under one name: `tula COMMAND …`, or `python -m tula_hpc COMMAND …`.

With `python -P` nothing is imported from the working directory. A command is imported when it is
called: `tula --help` loads none of them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import tula_hpc
from tula_hpc.command_errors import INTERRUPTED, CommandParser, ending_at_once
from tula_hpc.python_path import PROGRAM


class Command(NamedTuple):
    """Module with a `main` that takes the arguments after the command's name, and its help."""

    module: str
    help: str


COMMANDS = {
    "init": Command(
        "tula_hpc.init.__main__", "write a cluster file, and a sweep file for a script"
    ),
    "check": Command("tula_hpc.check.__main__", "check a cluster before anything is trained there"),
    "attach": Command(
        "tula_hpc.attach.__main__",
        "run a training script here for some steps, and say what was seen",
    ),
    "footprint": Command(
        "tula_hpc.workloads.footprint", "estimate a worker's memory before anything ran"
    ),
    "sweep": Command(
        "tula_hpc.sweep", "profile a training, plan it, train at the best, and report"
    ),
    "study": Command("tula_hpc.study", "compare methods of training: methods × batches × seeds"),
    "status": Command(
        "tula_hpc.status.__main__", "show a run's jobs, failures, costs and next steps"
    ),
    "plan": Command(
        "tula_hpc.analysis.plan", "plan again from a run's measurements; submits nothing"
    ),
    "report": Command(
        "tula_hpc.analysis.report.__main__", "write the report of a run or study again"
    ),
    "completion": Command(
        "tula_hpc.completion", "print the completion of commands for bash or zsh"
    ),
}
# what is typed, in order, and what comes of it
WAY = (
    ("init --script train.py", "cluster.toml and train.toml, in which some is unknown"),
    ("attach --into train.toml train.py --epochs 100", "runs it for some steps, fills that in"),
    ("check cluster.toml", "is the cluster as its file says? a job of 3 minutes"),
    ("sweep train.toml --cluster cluster.toml --until plan", "measure, and choose"),
    ("status runs/train", "what runs and waits, and what it cost so far"),
    ("plan runs/train --objective cost", "the same measurements, another question"),
    ("sweep train.toml --cluster cluster.toml", "train what was planned, and report"),
    ("report runs/train", "the report once more: runs/train/report/report.html"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without one, show the way."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        # the whole page, but not as what was asked for: a script that lost its command has to notice
        _parser().print_help(sys.stderr)
        raise SystemExit(2)
    # the rest is for the command's own parser
    name = _parser().parse_args(given[:1]).command
    try:
        with ending_at_once():
            return int(importlib.import_module(COMMANDS[name].module).main(given[1:]))
    except KeyboardInterrupt:
        # while its libraries are loaded, or in a command that leaves nothing to be told
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    way = "\n".join(f"  {PROGRAM} {line}\n      {what}" for line, what in WAY)
    lines = "\n".join(f"  {name:<12}{command.help}" for name, command in COMMANDS.items())
    question = "How many nodes, which batch size, how long, and at what cost?"
    parser = CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        description=f"{question}\n\nfrom a script to a report:\n{way}\n\ncommands:\n{lines}",
        epilog=f"{PROGRAM} COMMAND --help shows the options of a command.\n"
        f"{PROGRAM} init --examples FOLDER writes examples that run on this machine.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {tula_hpc.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
