"""Find the options of a program's command line in its syntax tree.

These are options of argparse and click, and absl's flags; parameters of functions and fields of
dataclasses from which typer, Fire, tyro or Hugging Face's `HfArgumentParser` make a command line;
keys that a program with Hydra or OmegaConf reads; and variables that a program lets nanoGPT's
configurator set.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from tula_hpc.init.syntax import (
    constants_of,
    holder_of,
    imported_by,
    keys_of,
    keywords_of,
    last_name,
    nodes_in,
    value_of,
)

_MAKERS = frozenset({"run", "Fire", "cli", "HfArgumentParser", "ArgumentParser"})
# calls that describe an option in place of its default
_DESCRIBING = frozenset({"field", "Option", "Argument"})
_GIVES_DEFAULT = frozenset({"default_factory", "init"})
_CONFIGS = frozenset({"cfg", "config", "conf"})


class Option(NamedTuple):
    """An option of a command line."""

    # The flag as it is typed, with a final "=" if the value is in the same word. A plain name is a
    # positional argument: only its value is typed.
    flag: str
    # all names of the option, as the script's code writes them
    names: tuple[str, ...]
    # the default, if the source has it as a literal; else None
    default: Any = None
    takes_value: bool = True
    is_required: bool = False
    help: str = ""
    # subcommand that the option belongs to; "": none
    command: str = ""
    # True if the program has subcommands and takes the option before them
    is_before: bool = False

    @property
    def example(self) -> str:
        """Word that stands for a value which only the user knows."""
        return written(self.flag).strip("=").upper()

    def words(self, value: str) -> list[str]:
        """Return the words of a command line that give the option this value."""
        if not self.takes_value:
            return [self.flag]
        if re.fullmatch(r"\w+", self.flag):
            # a positional argument
            return [value]
        return [self.flag + value] if self.flag.endswith("=") else [self.flag, value]


def declared_in(
    tree: ast.Module, made_of: Collection[str] = (), *, takes_keys: bool = False
) -> list[Option]:
    """Return the options that a program's source declares.

    `made_of`: names of further functions and dataclasses from which another module makes options.
    `takes_keys`: the program is known to take keys of its configuration, as in `train.lr=0.1`.
    """
    found = [*_of_calls(tree), *_made(tree, {*makers_in(tree), *made_of}), *_of_configurator(tree)]
    if takes_keys or _takes_keys(tree):
        found += _of_config(tree)
    return found


def _of_calls(tree: ast.Module) -> Iterator[Option]:
    """Yield the options that a call declares: those of argparse, click and absl."""
    constants = constants_of(tree)
    parsers = _Parsers(tree)
    of_click = _commands_of_click(tree)
    for call in nodes_in(tree, ast.Call):
        name = last_name(call.func)
        values = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
        texts = [value for value in values if isinstance(value, str)]
        given = keywords_of(call)
        if name.startswith("DEFINE_") and texts:
            default = value_of(call.args[1], constants) if len(call.args) > 1 else None
            takes_value = name not in ("DEFINE_bool", "DEFINE_boolean")
            yield Option(f"--{texts[0]}", (written(texts[0]),), default, takes_value)
        elif name in ("add_argument", "option", "argument") and texts:
            option = _of_call(texts, given, constants)
            command = of_click.get(call, parsers.command_of(call))
            yield option._replace(command=command or "", is_before=command is None)


class _Parsers:
    """Variables that hold argparse's parsers, and the subcommand of each parser."""

    def __init__(self, tree: ast.Module) -> None:
        self.programs: set[str] = set()
        for call in nodes_in(tree, ast.Call):
            if last_name(call.func) == "add_subparsers":
                self.programs.add(holder_of(call.func))
        self.programs.discard("")
        # line, variable and subcommand: a variable may hold one parser after another
        self.made: list[tuple[int, str, str | None]] = []
        for node in sorted(nodes_in(tree, ast.Assign), key=lambda each: each.lineno):
            if isinstance(node.value, ast.Call):
                for each in node.targets:
                    if isinstance(each, ast.Name):
                        self.made.append((node.lineno, each.id, self._made_by(node.value, each.id)))

    def _made_by(self, call: ast.Call, variable: str) -> str | None:
        kind = last_name(call.func)
        if kind == "add_parser" and call.args:
            return str(value_of(call.args[0], {}) or "")
        if kind in ("add_argument_group", "add_mutually_exclusive_group"):
            return self.command_of(call)
        return None if variable in self.programs else ""

    def command_of(self, call: ast.Call) -> str | None:
        """Return the subcommand of the parser whose method is called; "" if none is known.

        None stands for the main parser of a program with subcommands.
        """
        variable = holder_of(call.func)
        last = None if variable in self.programs else ""
        for line, name, command in self.made:
            if name == variable and line <= call.lineno:
                last = command
        return last


def _commands_of_click(tree: ast.Module) -> dict[ast.Call, str | None]:
    """Return the subcommand of each option's decorator; None: it stands before any subcommand."""
    functions = nodes_in(tree, ast.FunctionDef)
    groups = {each.name for each in functions if "group" in map(last_name, each.decorator_list)}
    commands: dict[ast.Call, str | None] = {}
    for each in functions:
        calls = [node for node in each.decorator_list if isinstance(node, ast.Call)]
        if each.name in groups:
            commands |= dict.fromkeys(calls)
        for call in calls:
            if last_name(call.func) == "command" and holder_of(call.func) in groups:
                commands |= dict.fromkeys(calls, _command_name(each, call))
    return commands


def _command_name(function: ast.FunctionDef, decorator: ast.expr) -> str:
    """Return the name of a command of click or typer."""
    given = decorator.args if isinstance(decorator, ast.Call) else []
    named = value_of(given[0], {}) if given else None
    return named if isinstance(named, str) else function.name.replace("_", "-")


def _of_call(texts: list[str], given: dict[str, ast.expr], constants: dict[str, Any]) -> Option:
    flags = [text.partition("/")[0] for text in texts if text.startswith("-")]
    action = value_of(given.get("action"), constants)
    is_switch = isinstance(action, str) and action.startswith(
        ("store_true", "store_false", "count")
    )
    is_switch |= last_name(given.get("action")) == "BooleanOptionalAction"
    is_switch |= value_of(given.get("is_flag"), constants) is True
    # an option of argparse that may be given without a value, or click's `--on/--off`
    is_switch |= "const" in given or "/" in "".join(texts)
    dest = value_of(given.get("dest"), constants)
    typed = [*(text.partition("/")[0] for text in texts), *filter(None, [dest])]
    names = [written(text) for text in typed if isinstance(text, str)]
    # a positional argument is required, unless a default, nargs or required=False says otherwise
    optional = "default" in given or value_of(given.get("nargs"), constants) in ("?", "*", 0, -1)
    required = value_of(given.get("required"), constants)
    help_text = value_of(given.get("help"), constants)
    return Option(
        flag=max(flags, key=len, default=texts[0]),
        names=tuple(names),
        default=value_of(given.get("default"), constants),
        takes_value=not is_switch,
        is_required=bool(required) or (not flags and not optional and required is not False),
        help=help_text if isinstance(help_text, str) else "",
    )


def makers_in(tree: ast.Module) -> set[str]:
    """Return the names of the functions and dataclasses from which calls make options."""
    # absl's `app.run` gives its function the arguments that are left, and makes no options of it
    is_absl = any(name.startswith("absl") for name in imported_by(tree))
    making = _MAKERS - {"run"} if is_absl else _MAKERS
    makers: set[str] = set()
    for call in nodes_in(tree, ast.Call):
        if last_name(call.func) in making:
            for argument in call.args:
                makers |= {each.id for each in nodes_in(argument, ast.Name)}
    return makers


def _made(tree: ast.Module, makers: set[str]) -> Iterator[Option]:
    """Yield the parameters and fields from which a call or a decorator makes options."""
    constants = constants_of(tree)
    is_typer = "typer" in imported_by(tree)
    # without click's commands, whose options `_of_calls` finds
    commands: dict[str, str | None] = {**dict.fromkeys(makers, ""), **_commands_of_typer(tree)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in commands:
            command = commands[node.name]
            for option in _parameters(node.args, constants, is_typer=is_typer):
                yield option._replace(command=command or "", is_before=command is None)
        elif isinstance(node, ast.ClassDef) and node.name in makers:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield _of_name(field.target.id, field.annotation, field.value, constants)


def _commands_of_typer(tree: ast.Module) -> dict[str, str | None]:
    """Return typer's subcommands by the names of their functions.

    None stands for the function whose options come before any subcommand, "" for the function of a
    program without subcommands.
    """
    commands: dict[str, str | None] = {}
    if "typer" not in imported_by(tree):
        return commands
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for each in functions:
        for decorator in each.decorator_list:
            if last_name(decorator) == "command":
                commands[each.name] = _command_name(each, decorator)
            elif last_name(decorator) == "callback":
                commands[each.name] = None
    # a single command is the program itself
    return commands if len(commands) > 1 else dict.fromkeys(commands, "")


def _parameters(
    given: ast.arguments, constants: dict[str, Any], *, is_typer: bool
) -> Iterator[Option]:
    named = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(named) - len(given.defaults)), *given.defaults, *given.kw_defaults]
    for parameter, value in zip([*named, *given.kwonlyargs], defaults, strict=True):
        option = _of_name(parameter.arg, parameter.annotation, value, constants)
        calls = [last_name(each) for each in _wrappers(parameter.annotation, value)]
        # typer makes a parameter without a default a positional argument
        by_place = is_typer and option.is_required and "Option" not in calls
        yield option._replace(flag=parameter.arg) if by_place or "Argument" in calls else option


def _wrappers(annotation: ast.expr | None, value: ast.expr | None) -> list[ast.Call]:
    """Return the calls that describe an option: its default, or in its `Annotated[...]`."""
    described: list[ast.AST | None] = [value]
    if isinstance(annotation, ast.Subscript) and last_name(annotation.value) == "Annotated":
        described += ast.iter_child_nodes(annotation.slice)
    return [each for each in described if isinstance(each, ast.Call)]


def _of_name(
    name: str, annotation: ast.expr | None, value: ast.expr | None, constants: dict[str, Any]
) -> Option:
    """Return the option of a parameter or field, which a call may describe."""
    is_required = value is None
    flags: list[str] = []
    help_text = None
    for call in _wrappers(annotation, value):
        texts = [value_of(argument, constants) for argument in call.args]
        flags += [text for text in texts if isinstance(text, str) and text.startswith("--")]
        keywords = keywords_of(call)
        help_text = value_of(keywords.get("help"), constants)
        if call is value:
            value = keywords.get("default", call.args[0] if call.args else None)
            is_required = isinstance(value, ast.Constant) and value.value is ...
            if last_name(call.func) in _DESCRIBING and not _GIVES_DEFAULT & keywords.keys():
                is_required |= value is None
    flags = [flag.partition("/")[0] for flag in flags] or [f"--{name.replace('_', '-')}"]
    default = value_of(value, constants)
    return Option(
        flag=flags[0],
        names=tuple(dict.fromkeys((written(name), *map(written, flags)))),
        default=default,
        takes_value=not isinstance(default, bool),
        is_required=is_required,
        help=help_text if isinstance(help_text, str) else "",
    )


def _takes_keys(tree: ast.Module) -> bool:
    """Tell whether a script takes keys of its configuration, by Hydra or by OmegaConf itself."""
    imported = imported_by(tree)
    functions = nodes_in(tree, ast.FunctionDef)
    decorators = itertools.chain.from_iterable(each.decorator_list for each in functions)
    if "hydra" in imported and "main" in map(last_name, decorators):
        return True
    return "omegaconf" in imported and any(last_name(node) == "from_cli" for node in ast.walk(tree))


def _of_config(tree: ast.Module) -> Iterator[Option]:
    """Yield the keys that a script reads from its configuration."""
    for node in ast.walk(tree):
        keys = keys_of(node)
        if len(keys) > 1 and keys[0] in _CONFIGS:
            yield Option(f"{'.'.join(keys[1:])}=", (written(keys[-1]),))


def _of_configurator(tree: ast.Module) -> Iterator[Option]:
    """Yield the variables that nanoGPT's configurator, executed below them, takes as options."""
    calls = [node for node in tree.body if isinstance(node, ast.Expr)]
    lines = [node.lineno for node in calls if last_name(node.value) == "exec"]
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.lineno < min(lines, default=0):
            for name in filter(None, map(last_name, node.targets)):
                yield Option(f"--{name}=", (written(name),), value_of(node.value, {}))


def written(flag: str) -> str:
    """Return the name of a flag's value in the program's code."""
    return flag.lstrip("-").replace("-", "_").lower()
