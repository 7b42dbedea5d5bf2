"""Whether the models and data sets that a sweep names exist; nothing is imported for that."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config.mistakes import nearest


def known_or_entry_point(value: str, known: Iterable[str], what: str, check_exists: bool) -> str:
    """The value, if it is one of the known names or a user's "package.module:function".

    Raises:
        ValueError: It is neither, or `check_exists` and there is no such function.
    """
    if ":" in value:
        if check_exists:
            _check_entry_point(value)
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


def _check_entry_point(value: str) -> None:
    """Make sure that module and function exist, from the source text: importing could pull in torch."""
    module, _, function = value.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(f'{value!r}: expected "package.module:function"')
    source = _find_source(module)
    if source is None:
        raise ValueError(f"{value!r}: no module {module!r} in the working directory or the installed packages")
    if function not in source.names and "*" not in source.names:
        raise ValueError(f"{value!r}: {source.path} defines no {function!r}")


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
    relative = Path(*module.split("."))
    for folder in _module_folders(module.partition(".")[0]):
        for path in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return _Source(path, _top_level_names(path))
    return None


def _module_folders(package: str) -> Iterator[Path]:
    """Where modules are looked for, and where the finder of an editable install says that the package lies."""
    yield from (Path.cwd(), *map(Path, sys.path))
    try:
        spec = importlib.util.find_spec(package)  # imports nothing, as the name has no dot
    except ValueError:  # __main__
        return
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location).parent


def _top_level_names(path: Path) -> set[str]:
    try:
        return set(_names(ast.parse(path.read_text(encoding="utf-8")).body))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid Python: {error}") from None


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
