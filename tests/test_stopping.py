from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tula_hpc.stopping import Agreed, Decision, StopRequest


class Peers:
    """A worker whose peers report the given values."""

    def __init__(self, *peers: tuple[float, ...]) -> None:
        self.peers = peers

    def agree(self, *values: float) -> list[float]:
        return [max(column) for column in zip(values, *self.peers, strict=True)]

    def synchronize_device(self) -> None:
        pass


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield StopRequest().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_both_signals_are_remembered_until_the_step_ends(stop: StopRequest, number: signal.Signals) -> None:
    agreed = Agreed(Peers(), stop, checkpoint_s=1e9)
    assert agreed.decide() == Decision(stop=False, save=False)
    os.kill(os.getpid(), number)
    assert agreed.decide() == Decision(stop=True, save=True)
    assert stop.received is number


def test_a_stop_of_any_worker_stops_all() -> None:
    assert Agreed(Peers((1.0, 0.0, 0.0)), StopRequest(), checkpoint_s=1e9).decide().stop


def test_checkpoint_is_due_after_its_interval_and_not_right_after_a_save() -> None:
    agreed = Agreed(Peers(), StopRequest(), checkpoint_s=0.01)
    time.sleep(0.02)
    assert agreed.decide() == Decision(stop=False, save=True)
    agreed.checkpoint_s = 1e9
    agreed.mark_saved()
    assert not agreed.decide().save


def test_quick_steps_are_not_slowed_by_a_look_at_each() -> None:
    agreed = Agreed(Peers(), StopRequest(), checkpoint_s=1e9)
    for _ in range(20):
        agreed.decide()
    assert agreed.interval_steps > 100


def test_all_workers_look_at_the_same_steps() -> None:
    """The interval follows from the slowest worker's step time, so it is the same number everywhere."""
    fast, slow = (Agreed(Peers((0.0, 0.0, 0.25)), StopRequest(), checkpoint_s=1e9) for _ in range(2))
    slow.started -= 1.0
    for _ in range(10):
        fast.decide()
    for _ in range(10):
        slow.decide()
    assert fast.interval_steps == 4
