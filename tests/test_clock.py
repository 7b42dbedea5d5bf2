"""Times on record when the machine's clock is set: durations within a process and what they cost stay right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tula_hpc.clock import unix_time
from tula_hpc.records import RunDirectory

YEARS_S = 1e8


@pytest.mark.parametrize("jump_s", [YEARS_S, -YEARS_S])
def test_events_of_one_process_are_as_far_apart_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    real = time.time
    assert unix_time() == pytest.approx(real(), abs=60.0)
    run.log_event("started", "train")
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    run.log_event("finished", "train")
    first, last = (event.time for event in run.events())
    assert 0.0 <= last - first < 60.0
