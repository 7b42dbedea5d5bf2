"""Commands of the package under one name: `tula COMMAND …`, or `python -m tula_hpc COMMAND …`.

With `python -P` nothing is imported from the working directory. A command is imported when it is
called: `tula --help` loads none of them. What takes a while to load is imported once Ctrl-C is
taken care of.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tula_hpc
from tula_hpc.python_path import PROGRAM, starts_a_command

if TYPE_CHECKING:
    import argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; without a command, print the help and exit with 2."""
    if starts_a_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # else it would show a traceback while the modules below are loaded
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tula_hpc.cli.commands import COMMANDS
    from tula_hpc.command_errors import INTERRUPTED, ending_at_once

    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        # nobody asked for the help, so this is an error: a script that lost its command must notice
        _parser().print_help(sys.stderr)
        raise SystemExit(2)
    # the rest is for the command's own parser
    name = _parser().parse_args(given[:1]).command
    try:
        with ending_at_once():
            return int(importlib.import_module(COMMANDS[name].module).main(given[1:]))
    except KeyboardInterrupt:
        # interrupted while libraries were loading, or in a command that has nothing to report
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    import argparse

    from tula_hpc.cli.commands import COMMANDS, overview
    from tula_hpc.command_errors import CommandParser

    parser = CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        description=overview(),
        epilog=f"{PROGRAM} COMMAND --help shows the options of a command.\n"
        f"{PROGRAM} init --examples FOLDER writes examples that run on this machine.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {tula_hpc.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
