"""A step in which a training was suspended, where it is the last of a logged line and where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tula_hpc.training.checkpoints import Checkpoints
from tula_hpc.training.metrics_writer import StepWindow


@pytest.mark.parametrize(("steps", "left_out"), [(0, []), (3, [2.0])])
def test_a_suspension_is_left_out_of_the_line_that_it_is_in(steps: int, left_out: list[float]) -> None:
    """With no step in the window a line has just been written, and the next one has nothing of the suspension."""
    excluded: list[float] = []
    window = StepWindow()
    for _ in range(steps):
        window.add()
    checkpoints: Any = SimpleNamespace(log=SimpleNamespace(window=window, exclude=excluded.append))
    Checkpoints.count_time(checkpoints, 2.0, suspended=True)
    assert excluded == left_out
