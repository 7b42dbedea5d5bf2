"""Saving while training goes on: what is written is the state of its step, errors reach all, kills do no harm."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_checkpoint import in_child
from tests.known import known
from tula_hpc.checkpoint import store as checkpoint
from tula_hpc.checkpoint.background import Saving, error_number
from tula_hpc.checkpoint.interval import Cadence, Interruptions
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.ddp.agreement import SaveRequest
from tula_hpc.errors import CheckpointError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.diagnosis import classify


class Worker:
    """A worker whose peers report the given value."""

    def __init__(self, others: float = 0.0) -> None:
        self.device, self.others = torch.device("cpu"), others

    def agree(self, *values: float) -> list[float]:
        return [max(value, self.others) for value in values]

    def synchronize_device(self) -> None:
        """Nothing to wait for."""


class Training:
    """A training whose steps change its state in place, as an optimizer does."""

    def __init__(self, folder: Path, restart: int = 0) -> None:
        self.store, self.restart, self.step = CheckpointStore(folder), restart, 0
        self.cadence = Cadence(Interruptions(1e5), fixed_s=1.0)
        self.saving = Saving(Worker(), self.store, None, self.cadence)
        self.weights, self.losses = torch.zeros(50_000), [0.0]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.weights += 1.0
            self.losses[0] += 1.0
            self.cadence.worked(1.0)

    def save(self, *, wait: bool = False) -> None:
        self.saving.save(self.state, samples_seen=self.step, restart_count=self.restart, wait=wait)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "losses": self.losses, "step": self.step}


def saved_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; assert that all its parts are of that step."""
    loaded = known(CheckpointStore(folder).load_latest())
    step = loaded.state["step"]
    assert loaded.state["weights"].eq(step).all()
    assert loaded.state["losses"] == [step]
    return int(step)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "checkpoints")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event before whose setting nothing is written."""
    real, opened = checkpoint._write_checkpoint, threading.Event()

    def wait_and_write(*arguments: Any) -> None:
        assert opened.wait(30)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "_write_checkpoint", wait_and_write)
    yield opened
    opened.set()


def test_steps_taken_while_it_is_written_are_not_in_it(training: Training, gate: threading.Event) -> None:
    training.train(3)
    training.save()
    training.train(5)
    assert not training.saving.has_landed
    gate.set()
    training.saving.settle()
    assert (saved_step(training.store.folder), training.step) == (3, 8)


def test_the_next_save_is_put_off_while_one_is_written(training: Training, gate: threading.Event) -> None:
    training.train(1)
    assert training.saving.request() is SaveRequest.SAVE
    training.save()
    training.train(100)
    assert training.saving.request() is SaveRequest.NOTHING
    gate.set()
    training.saving.settle()
    assert training.saving.request() is SaveRequest.SAVE


def test_a_save_that_must_be_now_waits_for_the_one_before_and_then_for_itself(
    training: Training, gate: threading.Event
) -> None:
    training.train(1)
    training.save()
    training.train(1)
    threading.Timer(0.05, gate.set).start()
    asked = []

    def state() -> dict[str, Any]:
        asked.append([path.name for path in training.store.paths()])
        return training.state()

    training.saving.save(state, samples_seen=2, restart_count=0, wait=True)
    assert asked == [[checkpoint.file_name(0, 1)]], "the checkpoint before was on disk when the state was requested"
    assert saved_step(training.store.folder) == 2


def test_a_finished_save_is_noted_once_and_measured(training: Training) -> None:
    training.train(20)
    training.save()
    wait_until_over(training)
    assert training.saving.has_landed
    training.saving.note()
    training.saving.note()
    assert training.cadence.saves == 1
    assert training.cadence.last is not None
    assert training.cadence.last.stall_s > 0
    assert training.cadence.last.write_s > 0


def test_a_worker_that_writes_nothing_requests_no_saves(tmp_path: Path) -> None:
    other = Saving(Worker(), None, None, Cadence(Interruptions(1e5), fixed_s=1e-9))
    other.cadence.worked(1.0)
    assert other.request() is SaveRequest.NOTHING
    other.save(dict, samples_seen=1, restart_count=0, wait=True)
    assert other.abandon() is None


# errors


def fail(code: int) -> Callable[..., None]:
    def failing(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return failing


def wait_until_over(training: Training) -> None:
    write = known(training.saving.writer.write if training.saving.writer is not None else None)
    write.exception(timeout=30)


def test_a_full_disk_is_an_error_at_the_next_look(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.train(1)
    training.save(wait=True)
    training.train(1)
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    training.save()
    wait_until_over(training)
    monkeypatch.undo()
    assert training.saving.request() is SaveRequest.FAIL
    assert not training.saving.has_landed
    with pytest.raises(CheckpointError, match=r"000000000002.tula: cannot be saved: No space left on device"):
        training.saving.settle()
    assert saved_step(training.store.folder) == 1
    assert len(list(training.store.folder.iterdir())) == 1


def test_the_next_save_reports_a_full_disk_if_nothing_did_before(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train(1)
    monkeypatch.setattr(os, "fsync", fail(errno.EDQUOT))
    training.save()
    with pytest.raises(CheckpointError, match=os.strerror(errno.EDQUOT)):
        training.save()


@pytest.mark.parametrize(
    ("cause", "words", "failure"),
    [
        (OSError(errno.EIO, "x"), "cannot be saved: Input/output error; that worker's log", Failure.KILLED),
        (OSError(errno.ENOSPC, "x"), "cannot be saved: No space left on device; that worker's log", Failure.NO_SPACE),
        (None, "cannot be saved; that worker's log", Failure.BUG),
    ],
)
def test_workers_whose_peer_failed_to_write_end_as_well_for_the_same_reason(
    cause: OSError | None, words: str, failure: Failure
) -> None:
    error = CheckpointError("a file")
    error.__cause__ = cause
    other = Saving(Worker(others=error_number(error)), None, None, Cadence(Interruptions(1e5)))
    with pytest.raises(CheckpointError, match=f"^rank 0's checkpoint {words}") as caught:
        other.settle()
    log = f"Traceback (most recent call last):\n  x\ntula_hpc.errors.CheckpointError: {caught.value}"
    assert classify([], log) is failure


def test_a_failed_training_waits_for_the_write_and_gets_its_error(
    training: Training, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.train(1)
    training.save()
    threading.Timer(0.05, gate.set).start()
    assert training.saving.abandon() is None
    assert saved_step(training.store.folder) == 1
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    training.save()
    assert os.strerror(errno.EIO) in str(training.saving.abandon())


def test_a_left_over_process_is_fenced_out_while_it_writes(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    real, later_has_saved = checkpoint._write_checkpoint, threading.Event()

    def slow_for_the_left_over(file: Any, state: dict[str, Any]) -> None:
        assert state["step"] != 10 or later_has_saved.wait(30)
        real(file, state)

    monkeypatch.setattr(checkpoint, "_write_checkpoint", slow_for_the_left_over)
    training.train(10)
    training.save()
    later = Training(training.store.folder, restart=1)
    later.train(9)
    later.save(wait=True)
    later_has_saved.set()
    wait_until_over(training)
    assert training.saving.request() is SaveRequest.FAIL
    with pytest.raises(CheckpointError, match="restart 1 has already saved; this process of restart 0 is a left-over"):
        training.saving.settle()
    assert saved_step(training.store.folder) == 9
    assert len(list(training.store.folder.iterdir())) == 1


# killed


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(writer: checkpoint._HashingWriter, data: bytes) -> int:
    """Write, and die after half of the weights."""
    writer.file.write(data)
    writer.length += len(data)
    writer.file.flush()
    if writer.length > 100_000:
        die()
    return len(data)


STAGES: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "before the write": (checkpoint, "_write_checkpoint", die, 1),
    "in the middle": (checkpoint._HashingWriter, "write", die_in_the_middle, 1),
    "before the fsync": (os, "fsync", die, 1),
    "before the rename": (Path, "replace", die, 1),
    "after the rename": (checkpoint, "sync_folder", die, 2),
    "before the old ones go": (CheckpointStore, "_prune", die, 2),
}


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_any_stage_the_newest_whole_one_loads(tmp_path: Path, stage: str) -> None:
    """The process is killed from its writing thread, while it trains on."""
    owner, name, dying, expected = STAGES[stage]
    folder = tmp_path / "checkpoints"

    def train_until_killed() -> None:
        training = Training(folder)
        training.train(1)
        training.save(wait=True)
        training.train(1)
        # this process ends soon
        setattr(owner, name, dying)
        training.save()
        while True:
            training.train(1)

    assert in_child(train_until_killed) == signal.SIGKILL
    assert saved_step(folder) == expected
    restarted = Training(folder, restart=1)
    restarted.train(7)
    restarted.save(wait=True)
    assert saved_step(folder) == 7
    assert all(path.suffix == ".tula" for path in folder.iterdir()), "the killed process's temporary files are gone"
