"""Command `tula completion`: print a script that completes the commands in bash or zsh.

    tula completion bash >~/.local/share/bash-completion/completions/tula
    tula completion zsh >FOLDER/_tula       # a folder of $fpath

or, made anew by each shell, `source <(tula completion bash)` in ~/.bashrc, or with zsh in ~/.zshrc
behind compinit. The script is made from the parsers of the commands. It is complete in itself: a
press of the tab key starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.cli.commands import COMMANDS
from tula_hpc.command_errors import CommandParser
from tula_hpc.files import write_out
from tula_hpc.python_path import PROGRAM

# what a value may be, beside words to choose from: files by their ending, any file, or folders
FILES = "file"
FOLDERS = "folder"
ANYTHING = ""
# names of the values that are run directories, or a report's folder
_FOLDER_NAMES = ("RUN", "FOLDER")
# has options and files of its own
_SCRIPT = "SCRIPT"


class Argument(NamedTuple):
    """Option or positional argument of a command, as a shell completes it."""

    # none: positional
    flags: tuple[str, ...]
    help: str
    name: str
    takes_value: bool
    # what its value may be: FILES with an ending or without, FOLDERS, words, or ANYTHING
    kind: str
    words: tuple[str, ...] = ()
    # further values of the same kind may follow
    repeats: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script and return 0."""
    shell = _parser().parse_args(arguments).shell
    write_out({"bash": bash_script, "zsh": zsh_script}[shell](commands()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"{PROGRAM} completion",
        description="Print a script that completes commands, options and files of tula.",
        epilog="bash: tula completion bash >~/.local/share/bash-completion/completions/tula. "
        "zsh: tula completion zsh >FOLDER/_tula, a folder of $fpath. "
        "Or source <(tula completion SHELL) in the shell's own file, behind compinit in zsh.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def commands() -> dict[str, list[Argument]]:
    """Return the arguments of every command, by its name."""
    return {
        # each module of a command has a parser by this name
        name: list(_arguments(importlib.import_module(command.module)._parser()))
        for name, command in COMMANDS.items()
    }


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    for action in parser._actions:
        name = str(action.metavar or action.dest)
        yield Argument(
            flags=tuple(action.option_strings),
            help=(action.help or "").partition(" (default")[0].replace("%%", "%"),
            name=name,
            takes_value=action.nargs != 0,
            kind=_kind(action, name),
            words=tuple(map(str, action.choices or ())),
            repeats=action.nargs in ("*", "+", argparse.REMAINDER),
        )


def _kind(action: argparse.Action, name: str) -> str:
    ending = Path(name).suffix
    if ending in (".toml", ".py"):
        return FILES + ending
    if name in _FOLDER_NAMES:
        return FOLDERS
    if name == _SCRIPT:
        return f"{FILES}.py"
    return FILES if action.type is Path or action.nargs == argparse.REMAINDER else ANYTHING


_BASH = """\
# completion of {program} for bash: source <({program} completion bash)
_{program}_value() {{
    # prints what the value of this option of this command may be
    case "$1 $2" in
{values}
    *) return 1 ;;
    esac
}}
_{program}_argument() {{
    # the same for the argument at this place
    case "$1 $2" in
{positional}
    esac
}}
_{program}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} kind= place=0 i
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W '{commands} --help --version' -- "$word")
        return
    fi
    # --option=value is three words
    if [[ $word == = ]]; then word=; elif [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    if ! kind=$(_{program}_value "$command" "$before"); then
        if [[ $word == -* ]]; then
            case $command in
{options}
            esac
        else
            for ((i = 2; i < COMP_CWORD; i++)); do
                if _{program}_value "$command" "${{COMP_WORDS[i]}}" >/dev/null; then ((i++))
                elif [[ ${{COMP_WORDS[i]}} != -* ]]; then ((place++)); fi
            done
            kind=$(_{program}_argument "$command" "$place")
        fi
    fi
    case $kind in
    words:*) mapfile -t COMPREPLY < <(compgen -W "${{kind#words:}}" -- "$word") ;;
    folder) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$word") ;;
    file) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$word") ;;
    file.*)
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -d -- "$word"; compgen -f -X "!*${{kind#file}}" -- "$word")
        ;;
    esac
}}
complete -F _{program} {program}
"""


def bash_script(found: dict[str, list[Argument]]) -> str:
    """Return the script for bash."""
    values: list[str] = []
    positional: list[str] = []
    options: list[str] = []
    for command, arguments in found.items():
        flags = " ".join(flag for each in arguments for flag in each.flags)
        options.append(f"            {command}) kind={shlex.quote(f'words:{flags}')} ;;")
        for each in arguments:
            said = f"echo {shlex.quote(_of_bash(each))}"
            if each.flags and each.takes_value:
                pattern = "|".join(f"'{command} {flag}'" for flag in each.flags)
                values.append(f"    {pattern}) {said} ;;")
        places = [each for each in arguments if not each.flags]
        for place, each in enumerate(places):
            pattern = f"'{command} '*" if each.repeats else f"'{command} {place}'"
            positional.append(f"    {pattern}) echo {shlex.quote(_of_bash(each))} ;;")
    return _BASH.format(
        program=PROGRAM,
        commands=" ".join(found),
        values="\n".join(values),
        positional="\n".join(positional),
        options="\n".join(options),
    )


def _of_bash(argument: Argument) -> str:
    return f"words:{' '.join(argument.words)}" if argument.words else argument.kind


_ZSH = """\
#compdef {program}
# completion of {program} for zsh: source <({program} completion zsh)
_{program}() {{
    local curcontext=$curcontext state line
    local -a commands=(
{commands}
    )
    _arguments -C '(- *)--help[show the way and the commands]' '(- *)--version[print the version]' \\
        '1:command:->command' '*::argument:->argument'
    case $state in
    command) _describe command commands ;;
    argument)
        case $words[1] in
{cases}
        esac
        ;;
    esac
}}
if [[ $funcstack[1] == _{program} ]]; then _{program} "$@"; else compdef _{program} {program}; fi
"""


def zsh_script(found: dict[str, list[Argument]]) -> str:
    """Return the script for zsh."""
    named = [f"        {shlex.quote(f'{name}:{_escaped(COMMANDS[name].help)}')}" for name in found]
    cases: list[str] = []
    for command, arguments in found.items():
        specs = [spec for each in arguments for spec in _of_zsh(each)]
        lines = " \\\n                ".join(map(shlex.quote, specs))
        cases.append(f"        {command}) _arguments -s \\\n                {lines} ;;")
    return _ZSH.format(program=PROGRAM, commands="\n".join(named), cases="\n".join(cases))


def _of_zsh(argument: Argument) -> Iterator[str]:
    """Yield the specifications of `_arguments`."""
    value = f":{_escaped(argument.name)}:{_action_of_zsh(argument)}"
    if not argument.flags:
        yield f"*{value}" if argument.repeats else value
        return
    for flag in argument.flags:
        yield f"{flag}[{_escaped(argument.help)}]{value if argument.takes_value else ''}"


def _action_of_zsh(argument: Argument) -> str:
    if argument.words:
        return f"({' '.join(argument.words)})"
    if argument.kind == FOLDERS:
        return "_files -/"
    if argument.kind.startswith(FILES):
        ending = argument.kind.removeprefix(FILES)
        return f"_files -g '*{ending}'" if ending else "_files"
    return " "


def _escaped(text: str) -> str:
    for character in "\\:[]":
        text = text.replace(character, f"\\{character}")
    return text
