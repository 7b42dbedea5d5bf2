"""The user's own source files, found and read without importing them.

The user's own modules are those that define a sweep's functions (`"package.module:function"`), or
its training script, and the modules that these import from the same folder; site-packages, Python's
library and this package do not count. Imports below `if`, `try` and in functions are found, imports
by a computed name are not.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# source files that are looked at; a user's own project has fewer
MOST_FILES = 500
# finds NAME in "../NAME", or in ".." that is joined to "NAME"
_ABOVE = re.compile(r"""(?<![\w./])\.\.(?:/|["']\)?\s*[,/]\s*["'])(\w[\w.-]*)""")
_PACKAGE = Path(__file__).absolute().parent
_LIBRARIES = ("site-packages", "dist-packages")
# option by which torch.distributed.launch gives a script its place on the node
_LOCAL_RANK = re.compile(rb"""(?:add_argument|option)\([^)]*?["'](--local[-_]rank)["']""")
# argparse takes everything behind such an argument as it is, options too
_REST = re.compile(rb"""nargs\s*=\s*(?:[\w.]*\bREMAINDER|["']\.\.\.["'])""")
# ways for several workers to train one model: torch's, and frameworks around it
_TOGETHER = re.compile(
    rb"distributed|\bddp\b|accelerat|trainer|fabric|lightning|deepspeed|horovod", re.IGNORECASE
)


def module_folders(package: str) -> Iterator[Path]:
    """Yield the folders with modules: Python's path, editable installs, the working directory."""
    yield from map(Path, sys.path)
    # find_spec imports nothing, as the name has no dot; it raises for __main__
    with contextlib.suppress(ValueError):
        spec = importlib.util.find_spec(package)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location).parent
    yield Path.cwd()


def module_files(folder: Path, module: str) -> list[Path]:
    """Return the files of a module in a folder: none, one, or rarely both a file and a package."""
    relative = Path(*module.split("."))
    candidates = (folder / relative.with_suffix(".py"), folder / relative / "__init__.py")
    return [path for path in candidates if path.is_file()]


def find_module(module: str) -> tuple[Path, Path] | None:
    """Return the folder in which a module is found first, and its file."""
    for folder in module_folders(module.partition(".")[0]):
        for path in module_files(folder, module):
            return folder, path
    return None


def is_own(path: Path | str) -> bool:
    """Tell whether a source file is the user's own."""
    absolute = Path(path).absolute()
    if any(part in _LIBRARIES for part in absolute.parts) or absolute.is_relative_to(_PACKAGE):
        return False
    resolved = absolute.resolve()
    return resolved.suffix == ".py" and not resolved.is_relative_to(_standard_library())


@functools.cache
def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


class _Module(NamedTuple):
    name: str
    folder: Path
    path: Path

    @property
    def package(self) -> str:
        """Return the package from which relative imports of this module start."""
        is_package = self.path.name == "__init__.py"
        return self.name if is_package else self.name.rpartition(".")[0]


def own_sources(entry_points: Iterable[str]) -> dict[str, Path]:
    """Return the user's own files behind these entry points, by path below their folder.

    Each is "package.module:function", a module's name, or the path of a script.
    """
    todo: list[_Module] = []
    for entry in entry_points:
        path, name = Path(entry), entry.partition(":")[0]
        if path.is_absolute():
            todo.append(_Module(path.stem, path.parent, path))
        elif (found := find_module(name)) is not None:
            todo += _with_parents(found[0], name)
    sources: dict[str, Path] = {}
    while todo and len(sources) < MOST_FILES:
        module = todo.pop()
        shown = module.path.relative_to(module.folder).as_posix()
        if shown in sources or not is_own(module.path):
            continue
        sources[shown] = module.path
        for name in _imported(module):
            todo += _with_parents(module.folder, name)
    return dict(sorted(sources.items()))


def trains_together(entry_points: Iterable[str]) -> bool:
    """Tell whether own code may train a model on several workers: False if it names no such way."""
    texts = _texts_of(entry_points)
    return not texts or any(map(_TOGETHER.search, texts))


def named_above(entry_points: Iterable[str], arguments: Iterable[str]) -> list[str]:
    """Return names in the folder above that own code or its arguments use: `data` of "../data"."""
    texts = [text.decode(errors="replace") for text in _texts_of(entry_points)]
    return sorted({name for text in (*texts, *arguments) for name in _ABOVE.findall(text)})


def local_rank_option(entry_points: Iterable[str]) -> str:
    """Return the option in which own code takes its local rank; "" if it has none."""
    found = filter(None, map(_LOCAL_RANK.search, _texts_of(entry_points)))
    return next((match[1].decode() for match in found), "")


def takes_rest(entry_points: Iterable[str]) -> bool:
    """Tell whether own code takes the rest of a command line as it is: no option may follow it."""
    return any(map(_REST.search, _texts_of(entry_points)))


def _texts_of(entry_points: Iterable[str]) -> list[bytes]:
    texts = []
    for path in own_sources(entry_points).values():
        with contextlib.suppress(OSError):
            texts.append(path.read_bytes())
    return texts


def _with_parents(folder: Path, name: str) -> list[_Module]:
    """Return a module and the packages around it, as far as they are in the folder."""
    parts = name.split(".")
    names = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return [_Module(each, folder, path) for each in names for path in module_files(folder, each)]


def _imported(module: _Module) -> Iterator[str]:
    """Yield the imported names that may be modules; nothing if the module cannot be parsed."""
    try:
        tree = parsed(module.path)
    except ValueError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _may_be_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            if base and _may_be_own(base):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _base(module: _Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.package.split(".") if module.package else []
    above = package[: len(package) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def _may_be_own(name: str) -> bool:
    top = name.partition(".")[0]
    return top != _PACKAGE.name and top not in sys.stdlib_module_names


def digest_of(path: Path) -> str:
    """Return a digest of a source file's code; comments and formatting do not count."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        content = ast.unparse(ast.parse(content)).encode(errors="surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]


def digests_of(entry_points: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of the user's own files, by path below their folder."""
    return {name: digest_of(path) for name, path in own_sources(entry_points).items()}


class Source(NamedTuple):
    """Names that a module's source binds, and the parameters of its functions."""

    path: Path
    # names that the module's statements bind
    names: set[str]
    # parameters of the functions, by name, if the source shows them
    takes: dict[str, ast.arguments]


def parsed(path: Path) -> ast.Module:
    """Parse a source file, as bytes, since it may name its encoding.

    Raises:
        ValueError: The file cannot be read, or is not valid Python.
    """
    try:
        return ast.parse(path.read_bytes(), path.name)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"is not valid Python: {error}") from None


def find_source(module: str) -> Source | None:
    """Return the source of a module, None if there is no such module.

    Raises:
        ValueError: The source cannot be read, or is not valid Python.
    """
    found = find_module(module)
    return None if found is None else source_of(found[1])


def source_of(path: Path) -> Source:
    """Read a module's source without importing the module, which could import torch.

    Raises:
        ValueError: The source cannot be read, or is not valid Python.
    """
    try:
        body = parsed(path).body
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    names = list(_bound_names(body))
    plain = [node for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    takes = {node.name: node.args for node in plain if names.count(node.name) == 1}
    return Source(path, set(names), takes)


def can_be_given(takes: ast.arguments, count: int) -> bool:
    """Tell whether a function takes `count` positional arguments and needs no others."""
    positional = len(takes.posonlyargs) + len(takes.args)
    enough = positional >= count or takes.vararg is not None
    return enough and positional - len(takes.defaults) <= count and None not in takes.kw_defaults


def _bound_names(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements of a module bind, also below `if`, `try`, `with` and `for`."""
    todo = list(statements)
    # no recursion, as a chain of elif may be deeper than Python's stack
    for node in todo:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # a target may be a tuple of names
            within = (each for target in targets for each in ast.walk(target))
            yield from (each.id for each in within if isinstance(each, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            todo += [*node.body, *getattr(node, "orelse", ())]
            todo += [each for handler in getattr(node, "handlers", ()) for each in handler.body]


def program_of(module: str) -> Path | None:
    """Return the file that `python -m` runs; for a package, that of its module `__main__`."""
    found = find_module(module)
    if found is not None and found[1].name == "__init__.py":
        found = find_module(f"{module}.__main__")
    return None if found is None else found[1]
