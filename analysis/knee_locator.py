"""kneed's KneeLocator without the libraries that the package loads beside it.

kneed imports matplotlib, for plots, and all of SciPy's signal processing, for one function. Together they take 0.7 s,
several times as long as a plan. The module is run with an import of its own, which answers those two: nothing outside
of it sees a difference, and `import kneed` elsewhere gives the whole package.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Comparator = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]


@cache
def knee_locator() -> Any:
    """The class `kneed.KneeLocator`; of the whole package where a version of it needs more than is known here."""
    spec = _spec()
    if spec is None or spec.loader is None:
        return _whole()
    module = module_from_spec(spec)
    module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return _whole()
    return module.KneeLocator


def _whole() -> Any:
    from kneed import KneeLocator

    return KneeLocator


def _spec() -> ModuleSpec | None:
    """Where the module is, found without running the package."""
    package = find_spec("kneed")
    folders = (package and package.submodule_search_locations) or []
    files = [file for folder in folders if (file := Path(folder) / "knee_locator.py").is_file()]
    return spec_from_file_location("kneed.knee_locator", files[0]) if files else None


def _import(name: str, *arguments: Any, **named: Any) -> ModuleType | SimpleNamespace:
    if name.partition(".")[0] == "matplotlib":
        raise ImportError(name)  # kneed takes that for "not installed", and only refuses to plot
    if name == "scipy.signal":
        return SimpleNamespace(argrelextrema=argrelextrema)
    return __import__(name, *arguments, **named)


def argrelextrema(data: NDArray[np.float64], comparator: Comparator) -> tuple[NDArray[np.intp]]:
    """Places where the comparator holds against both neighbours, the ends against themselves; as SciPy's function."""
    before, after = np.append(data[:1], data[:-1]), np.append(data[1:], data[-1:])
    return (np.flatnonzero(comparator(data, before) & comparator(data, after)),)
