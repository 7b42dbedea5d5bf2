from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tula_hpc.ddp.agreement import Agreement, Decision, SaveRequest, Stop
from tula_hpc.ddp.stop_signals import StopRequest


class Peers:
    """A worker whose peers report the given values."""

    device = torch.device("cpu")

    def __init__(self, *peers: tuple[float, ...]) -> None:
        self.peers = peers

    def agree(self, *values: float) -> list[float]:
        return [max(column) for column in zip(values, *self.peers, strict=True)]

    def synchronize_device(self) -> None:
        pass


def asking(request: SaveRequest) -> Callable[[], SaveRequest]:
    """Make a worker that always asks for the same."""
    return lambda: request


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield StopRequest().install()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_both_signals_are_remembered_until_the_step_ends(stop: StopRequest, number: signal.Signals) -> None:
    agreement = Agreement(Peers(), stop, asking(SaveRequest.NOTHING))
    assert agreement.decide() == Decision(stop=False, save=False)
    os.kill(os.getpid(), number)
    assert agreement.decide() == Decision(stop=True, save=True)
    assert stop.received is number


def test_a_stop_of_any_worker_stops_all() -> None:
    assert Agreement(Peers((Stop.NOW, 0.0, 0.0)), StopRequest(), asking(SaveRequest.NOTHING)).decide().stop


def test_what_one_worker_asks_for_all_do() -> None:
    def decided(mine: SaveRequest, peers: SaveRequest, *, stop: Stop = Stop.NONE) -> Decision:
        return Agreement(Peers((stop, peers, 0.0)), StopRequest(), asking(mine)).decide()

    for mine, peers in ((SaveRequest.SAVE, SaveRequest.NOTHING), (SaveRequest.NOTHING, SaveRequest.SAVE)):
        assert decided(mine, peers) == Decision(stop=False, save=True)
    assert decided(SaveRequest.FAIL, SaveRequest.SAVE) == Decision(stop=False, save=False, failed=True)
    assert decided(SaveRequest.NOTHING, SaveRequest.FAIL, stop=Stop.NOW) == Decision(stop=True, save=True, failed=True)


def test_a_stop_where_something_is_saved_next_is_obeyed_one_step_later(stop: StopRequest) -> None:
    """This holds even if every agreement falls on an epoch's end: epochs of 5 steps, agreements every 10."""
    agreement = Agreement(Peers((Stop.NONE, 0.0, 0.1)), stop, asking(SaveRequest.NOTHING))
    for _ in range(15):
        assert not agreement.decide().stop
    assert agreement.interval_steps == 10
    os.kill(os.getpid(), signal.SIGTERM)
    stops = [agreement.decide(asks=step % 5 != 0).stop for step in range(16, 22)]
    assert stops == [False] * 5 + [True]


def test_quick_steps_are_not_slowed_by_a_check_at_each() -> None:
    agreement = Agreement(Peers(), StopRequest(), asking(SaveRequest.NOTHING))
    for _ in range(1000):
        agreement.decide()
    assert agreement.interval_steps > 100


@pytest.mark.parametrize("pause_s", [0.0, 7200.0], ids=["slower", "slower, after a pause"])
def test_steps_that_become_slower_are_soon_checked_each_second(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    now = 0.0
    looks: list[float] = []
    monkeypatch.setattr("tula_hpc.ddp.agreement.time", SimpleNamespace(monotonic=lambda: now))

    def request() -> SaveRequest:
        looks.append(now)
        return SaveRequest.NOTHING

    agreement = Agreement(Peers(), StopRequest(), request)
    for seconds, steps in ((0.01, 20_000), (pause_s, 1), (0.5, 400)):
        for _ in range(steps):
            now += seconds
            agreement.decide()
    slow = [look for look in looks if look > 200.0 + pause_s]
    gaps = [later - earlier for earlier, later in pairwise(slow)]
    assert gaps[0] <= 100 * 0.5, "the interval is the number of steps of the last second"
    assert max(gaps[2:]) <= 1.0


def test_all_workers_check_at_the_same_steps() -> None:
    """The interval follows from the slowest worker's step time, so it is the same number everywhere."""
    fast, slow = (Agreement(Peers((0.0, 0.0, 0.25)), StopRequest(), asking(SaveRequest.NOTHING)) for _ in range(2))
    slow.started -= 1.0
    for _ in range(10):
        fast.decide()
    for _ in range(10):
        slow.decide()
    assert fast.interval_steps == 4
