"""A loader that is too slow, or uneven, in a profile and in the drift watch, by a clock of the test's own."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tula_hpc.analysis.drift import Detector, Watch
from tula_hpc.ddp.worker import Worker
from tula_hpc.profiling.measure import SharedTimes, StepProfile
from tula_hpc.profiling.timing import LoaderWaits, StoppingRule, driven, mean_interval
from tula_hpc.records import Interval
from tula_hpc.training.drift import StepClock

STEP_S = 0.04
PREFETCH = 2
ITEMS = 16
CPU = torch.device("cpu")
# the loader's time for a batch in steps, how uneven items are, and the number of processes
ROWS = [(2.0, 0.5, 8), (2.0, 1.0, 4), (1.3, 0.5, 8), (1.3, 1.0, 4), (0.8, 0.5, 8)]


class FakeWorker:
    """A worker that loads and trains by a clock that only it moves.

    Process k mod L makes batch k, once it has made batch k − L and the training has taken batch k − 2L.
    """

    def __init__(self, need: float, cv: float, processes: int, seed: int = 0) -> None:
        self.now, self.device = 100.0, CPU
        self.need_s, self.cv, self.random = need * STEP_S * processes, cv, random.Random(seed)
        self.loader = SimpleNamespace(num_workers=processes, prefetch_factor=PREFETCH)
        self.optimizer = SimpleNamespace(param_groups=[{}])

    def batches(self) -> Iterator[tuple[None, None]]:
        processes = self.loader.num_workers
        made: list[float] = []
        began = self.now
        taken = [began] * (PREFETCH * processes)
        for batch in itertools.count():
            free = made[batch - processes] if batch >= processes else began
            made.append(max(free, taken[batch]) + self.seconds_of_a_batch())
            self.now = max(self.now, made[batch])
            taken.append(self.now)
            yield None, None

    def seconds_of_a_batch(self) -> float:
        shape = ITEMS / self.cv**2
        return self.random.gammavariate(shape, self.need_s / shape)

    def train_step(self, *_: object) -> None:
        self.now += STEP_S

    def agree(self, *values: float) -> list[float]:
        return list(values)

    def synchronize_device(self) -> None:
        pass


def profiled(monkeypatch: pytest.MonkeyPatch, fake: FakeWorker) -> StepProfile:
    """Run the part of a profile that times whole steps, after a warm-up in which the loader gets ahead."""
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    profile = StepProfile(cast(Worker, fake), StoppingRule(15, 200, 60.0, 0.02), SharedTimes())
    for _ in range(5):
        next(profile.batches)
        fake.now += 10 * STEP_S * fake.loader.num_workers
    about_s = driven(profile.settled(), profile._whole_step)
    driven(profile.timed(about_s), profile._whole_step)
    return profile


def trained_s(fake: FakeWorker, steps: int = 20_000) -> float:
    """Return the seconds of a step in a long training."""
    batches, started = fake.batches(), fake.now
    for _ in range(steps):
        next(batches)
        fake.train_step()
    return (fake.now - started) / steps


@pytest.mark.parametrize(("need", "cv", "processes"), ROWS)
def test_a_profile_sees_what_a_training_takes(
    monkeypatch: pytest.MonkeyPatch, need: float, cv: float, processes: int
) -> None:
    truth_s = trained_s(FakeWorker(need, cv, processes))
    found = []
    for seed in range(10):
        samples = profiled(monkeypatch, FakeWorker(need, cv, processes, seed)).samples
        step_s, wait_s = (mean_interval(samples[name]).mean_s for name in ("step", "data"))
        assert step_s == pytest.approx(truth_s, rel=0.1)
        assert wait_s == pytest.approx(step_s - STEP_S, abs=1e-6 + 0.02 * step_s)
        found.append(step_s)
    assert fmean(found) == pytest.approx(truth_s, rel=0.03)


def test_the_first_rounds_do_not_use_up_batches_that_were_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise five rounds with a loader that is nearly fast enough would see no wait at all, and agree on that."""
    need, cv, processes = 1.3, 0.5, 8
    runs = [profiled(monkeypatch, FakeWorker(need, cv, processes, seed)).samples["step"] for seed in range(20)]
    first_s = fmean(fmean(steps[:3]) for steps in runs)
    assert first_s == pytest.approx(trained_s(FakeWorker(need, cv, processes)), rel=0.06)


def test_a_loader_that_keeps_up_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = profiled(monkeypatch, FakeWorker(0.5, 0.1, 4)).samples
    assert mean_interval(samples["step"]).mean_s == pytest.approx(STEP_S, rel=1e-3)


@pytest.mark.parametrize(("need", "cv", "processes"), ROWS)
def test_the_drift_watch_sees_the_same(monkeypatch: pytest.MonkeyPatch, need: float, cv: float, processes: int) -> None:
    """Looks are shorter than a round of the loader's processes, so that most of them see no wait."""
    fake = FakeWorker(need, cv, processes)
    truth_s = trained_s(FakeWorker(need, cv, processes))
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    watch, clock = Watch(Detector(Interval(truth_s, 0.0, 1.0)), window_s=10.0), StepClock(CPU)
    batches = fake.batches()
    for step in range(4000):
        clock.start()
        asked = fake.now
        next(batches)
        clock.waited(fake.now - asked)
        fake.train_step()
        clock.stop()
        if step % 3 == 0:
            watch.observe(clock.read())
    assert watch.detector.measured_s == pytest.approx(truth_s, rel=0.05)
    assert watch.data_time_s == pytest.approx(truth_s - STEP_S, abs=0.05 * truth_s)


class FakeEvent:
    """An event that the device reaches once it has done all earlier work, as torch.cuda.Event."""

    device_s = 0.0
    host_s = 0.0

    def __init__(self, **_: Any) -> None:
        self.at_s = 0.0

    def record(self, _: object) -> None:
        self.at_s = max(FakeEvent.device_s, FakeEvent.host_s)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


@pytest.mark.parametrize(("wait_s", "step_s", "felt_s"), [(0.03, 0.04, 0.0), (0.1, 0.04, 0.06), (0.04, 0.04, 0.0)])
def test_a_wait_delays_a_gpu_only_while_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, step_s: float, felt_s: float
) -> None:
    """The host asks for the next batch at once, and launches in no time."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    waits, steps = LoaderWaits(torch.device("cuda", 0)), 50
    FakeEvent.host_s = FakeEvent.device_s = 0.0
    for _ in range(steps):
        FakeEvent.host_s += wait_s
        waits.arrived(wait_s)
        FakeEvent.device_s = max(FakeEvent.device_s, FakeEvent.host_s) + step_s
        waits.launched()
    # the device waits for the first batch in any case
    assert waits.take() == pytest.approx(wait_s + (steps - 1) * felt_s)
    assert waits.take() == 0.0
    assert FakeEvent.device_s == pytest.approx(wait_s + (steps - 1) * felt_s + steps * step_s)


def test_every_wait_delays_a_cpu() -> None:
    waits = LoaderWaits(CPU)
    for _ in range(3):
        waits.arrived(0.5)
        waits.launched()
    assert waits.take() == 1.5
    assert waits.take() == 0.0
