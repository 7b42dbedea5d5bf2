"""`python -m tula_hpc COMMAND …`, as `tula COMMAND …`; with `-P` nothing of the working directory is imported.

`tula COMMAND …`: every command of the package under one name, which `python -m tula_hpc COMMAND …`
is too.

A command is imported when it is called for: `tula --help` loads none of them.
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
    """A module with a `main` that takes the words after the command's name, and what it does."""

    module: str
    does: str


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
        "tula_hpc.status.__main__",
        "what a run does: what ran, runs, waits, failed, and what it cost",
    ),
    "study": Command("tula_hpc.study", "compare methods of training: methods × batches × seeds"),
    "check": Command("tula_hpc.check.__main__", "check a cluster before anything is trained there"),
    "footprint": Command(
        "tula_hpc.workloads.footprint", "estimate a worker's memory before anything ran"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # the rest is for the command's own parser
    name = _parser().parse_args(given[:1]).command
    return int(importlib.import_module(COMMANDS[name].module).main(given[1:]))


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<11}{command.does}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        description="How many nodes, which batch size, how long, what will it cost?\n\ncommands:\n"
        + lines,
        epilog=f"{PROGRAM} COMMAND --help tells the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {tula_hpc.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
