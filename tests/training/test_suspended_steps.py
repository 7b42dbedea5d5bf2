"""Steps in which a training was suspended: their lines have the time of the other steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_logged_numbers import sweep, train
from tula_hpc.ddp.agreement import Agreement
from tula_hpc.ddp.worker import Worker

PAUSE_S = 2.0
pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCONT)
    yield
    signal.signal(signal.SIGCONT, before)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("where", [(Worker, "train_step"), (Agreement, "decide")])
def test_a_suspension_is_in_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], step: int, interval: int
) -> None:
    """It is neither in the line of its step nor in the next, even if the step ends a line or is suspended after it."""
    usual = getattr(*where)
    calls: list[None] = []

    def suspended(*given: Any) -> Any:
        calls.append(None)
        if len(calls) == step:
            # as after a real suspension: time has passed, and CONT arrives
            time.sleep(PAUSE_S)
            os.kill(os.getpid(), signal.SIGCONT)
        return usual(*given)

    monkeypatch.setattr(*where, suspended)
    metrics, _ = train(tmp_path, sweep(log_interval_steps=interval), monkeypatch)
    assert [row.step for row in metrics.steps] == list(range(interval, 17, interval))
    times = [row.step_time_s for row in metrics.steps]
    assert min(times) > 0.0
    assert interval * max(times) < PAUSE_S
    assert all((row.data_time_s or 0.0) <= row.step_time_s for row in metrics.steps)
    assert sum(epoch.epoch_time_s for epoch in metrics.epochs) < PAUSE_S


def test_a_suspension_that_began_while_a_step_waited_for_data_is_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Worker.batches

    def late(worker: Worker, epoch: int = 0, offset: int = 0) -> Iterator[Any]:
        for number, batch in enumerate(usual(worker, epoch, offset)):
            if number == 5:
                time.sleep(PAUSE_S)
                os.kill(os.getpid(), signal.SIGCONT)
            yield batch

    monkeypatch.setattr(Worker, "batches", late)
    metrics, _ = train(tmp_path, sweep(log_interval_steps=4), monkeypatch)
    assert all(4 * (row.data_time_s or 0.0) < PAUSE_S for row in metrics.steps)
