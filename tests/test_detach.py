"""Controller jobs: one at a time, and an end that is noted before another one looks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.run_factory import CLUSTER_TOML, SWEEP_TOML
from tula_hpc import detach
from tula_hpc.errors import Failure, RunDirectoryError, StageError
from tula_hpc.jobs import ControlJob
from tula_hpc.records import RunDirectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    run = RunDirectory(tmp_path / "run").create()
    run.sweep_file.write_text(SWEEP_TOML.replace("/nowhere/cifar100", str(tmp_path)))
    run.cluster_file.write_text(CLUSTER_TOML)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return run


def is_locked(run: RunDirectory) -> bool:
    try:
        with run.locked():
            return False
    except RunDirectoryError:
        return True


def test_a_controller_waits_until_another_has_left_the_run_directory(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was requeued after it had left another behind meets that one."""
    began, over = threading.Event(), threading.Event()
    seen = []
    monkeypatch.setattr(detach, "_step", lambda *_: seen.append(over.is_set()))

    def hold() -> None:
        with run.locked():
            began.set()
            time.sleep(0.3)
            over.set()

    other = threading.Thread(target=hold)
    other.start()
    began.wait()
    detach.run_controller(ControlJob(run.root, "report", 0.0))
    other.join()
    assert seen == [True]


def test_its_end_is_noted_before_another_may_look_who_is_left(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked_then = []
    note = RunDirectory.log_event

    def log(self: RunDirectory, event: str, stage: str, **fields: object) -> None:
        locked_then.append(is_locked(self))
        note(self, event, stage, **fields)

    monkeypatch.setattr(detach, "_step", lambda *_: None)
    monkeypatch.setattr(RunDirectory, "log_event", log)
    detach.run_controller(ControlJob(run.root, "report", 0.0))
    assert locked_then == [True]
    assert [(event.event, event.job_id, event.failure) for event in run.events()] == [("ended", "17", None)]


def test_what_ends_a_controller_is_said(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StageError("plan: too little data")

    monkeypatch.setattr(detach, "_step", fail)
    with pytest.raises(SystemExit, match="plan: too little data\nMend the cause and run the same command again"):
        detach.run_controller(ControlJob(run.root, "report", 0.0))
    monkeypatch.setattr(detach, "TURN_S", 0.0)
    with run.locked(), pytest.raises(SystemExit, match="is in use by process"):
        detach.run_controller(ControlJob(run.root, "report", 0.0))
    assert [event.failure for event in run.events()] == [Failure.BUG, Failure.BUG]
