"""Times on record when the machine's clock is set: durations within a process, and their cost, stay right."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.known import known
from tests.run_factory import CLUSTER_TOML, make_run
from tula_hpc import env
from tula_hpc.env import unix_time
from tula_hpc.records import Event, RunDirectory, append_record, write_atomically
from tula_hpc.records.run_directory import holder_of
from tula_hpc.status.__main__ import status_of

YEARS_S = 1e8


@pytest.mark.parametrize("jump_s", [YEARS_S, -YEARS_S])
def test_events_of_one_process_are_as_far_apart_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    real = time.time
    assert unix_time() == pytest.approx(real(), abs=60.0)
    run.log_event("submitted", "train")
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    run.log_event("finished", "train")
    first, last = (event.time for event in run.events())
    assert 0.0 <= last - first < 60.0


@pytest.mark.parametrize("jump_s", [100.0, -100.0])
def test_a_command_is_at_work_since_a_moment_of_its_events_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Files have the system's clock, which was set after the process began."""
    monkeypatch.setattr(env, "_EPOCH_OF_STEADY", env._EPOCH_OF_STEADY - jump_s)
    run = RunDirectory(tmp_path / "run").create()
    before = unix_time()
    with run.locked():
        run.log_event("submitted", "train")
        assert before <= holder_of(run.root / ".lock").since <= run.events()[-1].time


@pytest.mark.parametrize("jump_s", [YEARS_S, -YEARS_S])
def test_a_training_costs_what_it_took_where_the_clock_was_set_before_it_began(tmp_path: Path, jump_s: float) -> None:
    """For jobs on this machine there are only events; the command that submitted them continues with its own clock."""
    run = make_run(tmp_path / "run", stage="plan")
    write_atomically(run.cluster_file, CLUSTER_TOML.replace('executor = "slurm"', 'executor = "local"'))
    for event, at in (("submitted", 0.0), ("finished", 35.0 + jump_s), ("ended", 36.0)):
        record = Event(
            time=1.75e9 + at, event=event, stage="train", job_id="4000000", data={"nodes": 2, "label": "main"}
        )
        append_record(run.events_file, record)
    cost = known(status_of(run.root).cost.train)
    assert cost.node_hours == pytest.approx(2 * 36.0 / 3600)
