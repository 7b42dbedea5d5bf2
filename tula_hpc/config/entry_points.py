"""Whether the models and data sets that a sweep names exist; nothing is imported for that."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config.mistakes import nearest


def known_or_entry_point(
    value: str, known: Iterable[str], what: str, called_with: Sequence[str], *, check_exists: bool
) -> str:
    """The value, if it is one of the known names or a user's "package.module:function".

    Args:
        value: What the sweep names.
        known: Names of ours.
        what: What such a name names, with its article.
        called_with: What the user's function is given, one after another.
        check_exists: Whether to look for the function.

    Raises:
        ValueError: It is neither, or `check_exists` and there is no such function, or it takes something else.
    """
    if ":" in value:
        if check_exists:
            _check_entry_point(value, called_with)
        return value
    if value not in known:
        module, _, function = value.rpartition(".")
        if module and _defines(module, function):
            raise ValueError(f"{value!r} is not {what} (did you mean '{module}:{function}'?)")
        names = f"or one of: {', '.join(known)}" if known else ""
        raise ValueError(
            f'{value!r} is not {what}{nearest(value, known)}; expected "package.module:function" {names}'.rstrip()
        )
    return value


class _Source(NamedTuple):
    path: Path
    names: set[str]
    takes: dict[str, ast.arguments]  # of the functions whose parameters can be read off


def _check_entry_point(value: str, called_with: Sequence[str]) -> None:
    """Make sure that module and function exist, from the source text: importing could pull in torch."""
    module, _, function = value.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(f'{value!r}: expected "package.module:function"')
    source = _find_source(module)
    if source is None:
        raise ValueError(f"{value!r}: no module {module!r} in the working directory or the installed packages")
    if function not in source.names and "*" not in source.names:
        raise ValueError(f"{value!r}: {source.path} defines no {function!r}{_hidden(module, source.path)}")
    if function in source.takes and not _can_be_given(source.takes[function], len(called_with)):
        raise ValueError(
            f"{value!r}: {source.path} defines it so that it cannot be called with ({', '.join(called_with)})"
        )


def _defines(module: str, function: str) -> bool:
    """Whether there is such a module, and a function of this name in it."""
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        return False
    try:
        source = _find_source(module)
    except ValueError:  # not valid Python
        return False
    return source is not None and function in source.names


def _find_source(module: str) -> _Source | None:
    found = (path for folder in _module_folders(module.partition(".")[0]) for path in _files(folder, module))
    path = next(found, None)
    return None if path is None else _source(path)


def _files(folder: Path, module: str) -> list[Path]:
    """The file of a module that lies in a folder, if there is one."""
    relative = Path(*module.split("."))
    places = (folder / relative.with_suffix(".py"), folder / relative / "__init__.py")
    return [path for path in places if path.is_file()]


def _hidden(module: str, found: Path) -> str:
    """What to say where a module of the working directory has an installed one's name."""
    own = [path for path in _files(Path.cwd(), module) if not path.samefile(found)]
    return f"; it hides {own[0]}, which needs another name" if own else ""


def _module_folders(package: str) -> Iterator[Path]:
    """Where modules are looked for: installed ones, also where an editable install's finder has them, then here."""
    yield from map(Path, sys.path)
    # imports nothing, as the name has no dot; it is __main__'s that may be refused
    with contextlib.suppress(ValueError):
        spec = importlib.util.find_spec(package)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location).parent
    yield Path.cwd()


def _source(path: Path) -> _Source:
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = list(_names(body))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None
    plain = [node for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    return _Source(path, set(names), {node.name: node.args for node in plain if names.count(node.name) == 1})


def _can_be_given(takes: ast.arguments, count: int) -> bool:
    """Whether a function takes so many arguments by place, and needs no others."""
    places = len(takes.posonlyargs) + len(takes.args)
    enough = places >= count or takes.vararg is not None
    return enough and places - len(takes.defaults) <= count and None not in takes.kw_defaults


def _names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module bind, those below `if` and `try` included."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _names([*node.body, *node.orelse])
            yield from _names(inner for handler in getattr(node, "handlers", ()) for inner in handler.body)
