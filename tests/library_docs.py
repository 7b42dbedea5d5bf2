"""Write the pages of the library's documentation with pdoc, from its docstrings.

python -m tests.library_docs FOLDER
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import typing
from pathlib import Path

# packages and modules that users call; a leading `!` excludes internal modules
PAGES = (
    "tula_hpc.optim",
    "tula_hpc.analysis.performance",
    "tula_hpc.analysis.memory",
    "tula_hpc.analysis.plan",
    "tula_hpc.attach",
    "!tula_hpc.attach.",
)


def build(folder: Path) -> None:
    """Write the pages into a folder; pdoc warns about docstrings that it cannot parse."""
    # imported here because that takes seconds
    import pdoc

    for name in PAGES:
        if not name.startswith("!"):
            _resolve_tuples(name)
    pdoc.render.configure(docformat="google", math=False)
    pdoc.pdoc(*PAGES, output_directory=folder)


def _resolve_tuples(name: str) -> None:
    """Replace the text annotations of named tuples by types: outside of its module the text means nothing."""
    module = importlib.import_module(name)
    names = [name, *(each.name for each in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."))]
    for each in names:
        for _, kind in inspect.getmembers(importlib.import_module(each), inspect.isclass):
            if issubclass(kind, tuple) and hasattr(kind, "_fields") and kind.__module__.startswith("tula_hpc"):
                kind.__new__.__annotations__ = typing.get_type_hints(kind)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
