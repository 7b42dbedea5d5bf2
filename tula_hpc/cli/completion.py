"""Command `tula completion`: print a script that completes the commands in a shell.

    tula completion bash >~/.local/share/bash-completion/completions/tula
    tula completion zsh >FOLDER/_tula       # a folder of $fpath

or, made anew by each shell, `eval "$(tula completion bash)"` in ~/.bashrc, for zsh in ~/.zshrc
after compinit. shtab makes the script from the parsers of the commands. The script needs nothing
else: pressing the tab key starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import shtab

from tula_hpc.cli.commands import COMMANDS
from tula_hpc.command_errors import CommandParser, command
from tula_hpc.files import write_out
from tula_hpc.python_path import PROGRAM

# metavars of arguments that are run directories or a report's folder
FOLDERS = ("RUN", "FOLDER")
# metavar of the user's script, which may be followed by its own options and files
SCRIPT = "SCRIPT"
# bash functions that complete files by their endings, which shtab cannot do
BY_ENDING = """\
_tula_ending() {
    compopt -o filenames 2>/dev/null
    compgen -d -- "$2"
    compgen -f -X "!*$1" -- "$2"
}
_tula_toml() { _tula_ending .toml "$1"; }
_tula_py() { _tula_ending .py "$1"; }
"""


def _run(options: argparse.Namespace) -> int:
    write_out(script_for(options.shell))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} completion",
        description="Print a script that completes commands, options and files of tula.",
        epilog="bash: tula completion bash >~/.local/share/bash-completion/completions/tula. "
        "zsh: tula completion zsh >FOLDER/_tula, a folder of $fpath. "
        'Or eval "$(tula completion SHELL)" in the shell\'s own file, after compinit in zsh.',
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def script_for(shell: str) -> str:
    """Return the script for a shell."""
    parser = argparse.ArgumentParser(PROGRAM)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, each in COMMANDS.items():
        # each command's module has a `_parser`
        own = importlib.import_module(each.module)._parser()
        added = commands.add_parser(name, help=each.help, parents=[own], add_help=False)
        for action in added._actions:
            if (how := _files(action)) is not None:
                vars(action)["complete"] = how
    preamble = BY_ENDING if shell == "bash" else ""
    return str(shtab.complete(parser, shell, preamble=preamble)) + "\n"


def _files(action: argparse.Action) -> dict[str, Any] | None:
    """Return how shtab completes an argument that is a file or a folder; None for others."""
    name = str(action.metavar or action.dest)
    ending = ".py" if name == SCRIPT else Path(name).suffix
    if ending in (".toml", ".py"):
        return {"bash": f"_tula_{ending[1:]}", "zsh": f"_files -g '*{ending}'"}
    if name in FOLDERS:
        return dict(shtab.DIRECTORY)
    is_file = action.type is Path or action.nargs == argparse.REMAINDER
    return dict(shtab.FILE) if is_file else None


main = command(_parser, _run)
