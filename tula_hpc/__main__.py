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
from tula_hpc.search_path import PROGRAM


class Command(NamedTuple):
    """Module with a `main` that takes the arguments after the command's name, and its help."""

    module: str
    help: str


COMMANDS = {
    "sweep": Command(
        "tula_hpc.sweep", "profile a training, plan it, train at the best, and report"
    ),
    "plan": Command(
        "tula_hpc.analysis.plan", "plan again from a run's measurements; submits nothing"
    ),
    "report": Command(
        "tula_hpc.analysis.report.__main__", "write the report of a run or study again"
    ),
    "status": Command(
        "tula_hpc.status.__main__", "show a run's jobs, failures, costs and next steps"
    ),
    "study": Command("tula_hpc.study", "compare methods of training: methods × batches × seeds"),
    "init": Command("tula_hpc.init.__main__", "write a cluster file for this login node's cluster"),
    "attach": Command(
        "tula_hpc.attach.__main__",
        "run a training script here for some steps, and say what was seen",
    ),
    "check": Command("tula_hpc.check.__main__", "check a cluster before anything is trained there"),
    "footprint": Command(
        "tula_hpc.workloads.footprint", "estimate a worker's memory before anything ran"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # the rest is for the command's own parser
    name = _parser().parse_args(given[:1]).command
    return int(importlib.import_module(COMMANDS[name].module).main(given[1:]))


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<11}{command.help}" for name, command in COMMANDS.items())
    question = "How many nodes, which batch size, how long, and at what cost?"
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        description=f"{question}\n\ncommands:\n{lines}",
        epilog=f"{PROGRAM} COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {tula_hpc.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
