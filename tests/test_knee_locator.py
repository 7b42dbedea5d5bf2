from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis import knee_locator as light

# the whole of kneed and scipy.signal take a second to import: here, for the processes that run these tests
values = st.lists(st.floats(-5.0, 5.0) | st.integers(0, 3).map(float), min_size=1, max_size=30)


@settings(max_examples=50)
@given(values, st.sampled_from([np.greater_equal, np.less_equal, np.greater]))
def test_extrema_are_those_that_scipy_finds(row: list[float], comparator: light.Comparator) -> None:
    from scipy import signal

    data = np.array(row)
    (theirs,) = signal.argrelextrema(data, comparator)
    assert light.argrelextrema(data, comparator)[0].tolist() == theirs.tolist()


@settings(max_examples=30)
@given(st.lists(st.floats(0.001, 10.0), min_size=4, max_size=40))
def test_knees_are_those_of_the_whole_package(falls: list[float]) -> None:
    from kneed import KneeLocator

    x, y = np.arange(float(len(falls))), np.cumsum(falls)[::-1]
    options = {"curve": "convex", "direction": "decreasing", "online": True}
    mine, theirs = (locator(x, y, **options) for locator in (light.knee_locator(), KneeLocator))
    assert mine.all_knees == theirs.all_knees
    assert mine.knee == theirs.knee


def test_it_is_kneeds_own_and_leaves_the_package_as_it_is() -> None:
    code = (
        "import sys, numpy as np; from tula_hpc.analysis.knee import Curve, find_knee\n"
        "x = np.geomspace(1, 64, 50); assert find_knee(Curve(x, 1 / x))\n"
        "print([m for m in ('matplotlib', 'scipy.signal', 'scipy.stats', 'kneed') if m in sys.modules])\n"
        "from tula_hpc.analysis.knee_locator import knee_locator; print(knee_locator().__module__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert done.stdout.splitlines() == ["[]", "kneed.knee_locator"]
    from kneed import KneeLocator
    from scipy import signal

    assert light.knee_locator() is not KneeLocator
    assert sys.modules["kneed.knee_locator"].argrelextrema is signal.argrelextrema


def test_a_version_that_needs_more_is_loaded_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "kneed"
    package.mkdir()
    (package / "__init__.py").write_text("from .knee_locator import KneeLocator\n")
    (package / "knee_locator.py").write_text("from scipy.signal import find_peaks\nclass KneeLocator: found = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kneed"]:
        monkeypatch.delitem(sys.modules, name)
    assert light.knee_locator.__wrapped__().found == 1
    monkeypatch.undo()
