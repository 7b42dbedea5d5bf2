from __future__ import annotations

import math
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.config import SearchSpec
from tula_hpc.profiling.timing import (
    LEAST_ROUNDS,
    ROUND_S,
    StoppingRule,
    driven,
    halves_of,
    mean_interval,
    rounds_of,
    warm_up,
)
from tula_hpc.records import StepTimes

seconds = st.floats(min_value=1e-6, max_value=1e3)
RULE = StoppingRule(min_steps=15, max_steps=200, max_seconds=60, ci_width=0.02)


class LoneWorker:
    """A worker without peers."""

    device = torch.device("cpu")

    def agree(self, *values: float) -> list[float]:
        return list(values)

    def synchronize_device(self) -> None:
        pass


class WithSlowPeer(LoneWorker):
    """A worker whose peer has measured enough only after this many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def agree(self, *values: float) -> list[float]:
        self.looks -= 1
        return [max(value, float(self.looks > 0)) for value in values]


@given(st.lists(seconds, min_size=1, max_size=200))
def test_interval_holds_the_mean_and_the_mean_lies_among_the_rounds(rounds: list[float]) -> None:
    interval = mean_interval(rounds)
    assert 0.0 <= interval.low_s <= interval.mean_s <= interval.high_s
    assert min(rounds) <= interval.mean_s <= max(rounds)


@given(st.lists(seconds, min_size=2, max_size=50), st.floats(min_value=0.1, max_value=10))
def test_interval_scales_with_the_unit(rounds: list[float], factor: float) -> None:
    interval, scaled = mean_interval(rounds), mean_interval([factor * s for s in rounds])
    assert scaled.mean_s == pytest.approx(factor * interval.mean_s)
    assert scaled.relative_width == pytest.approx(interval.relative_width, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("rounds", [3, 5, 8, 25])
def test_interval_covers_the_true_mean_about_95_percent_of_the_time(rounds: int) -> None:
    source = random.Random(0)
    hits = 0
    for _ in range(2000):
        interval = mean_interval([source.gauss(0.1, 0.02) for _ in range(rounds)])
        hits += interval.low_s <= 0.1 <= interval.high_s
    assert 1860 <= hits <= 1960


@given(st.lists(st.floats(0.9, 1.1), min_size=LEAST_ROUNDS - 1, max_size=30), st.floats(0.0, 1e6), st.integers(0, 30))
def test_a_single_disturbance_moves_the_mean_by_no_more_than_an_ordinary_round(
    rounds: list[float], disturbed: float, place: int
) -> None:
    rounds.insert(place % (len(rounds) + 1), disturbed)
    assert 0.9 <= mean_interval(rounds).mean_s <= 1.1


@pytest.mark.parametrize("rounds", [5, 10, 25])
def test_what_happens_in_every_fourth_step_is_counted(rounds: int) -> None:
    """A loader with four processes delivers in bursts, for which the median of steps would be 1."""
    steps = [1.0, 1.0, 1.0, 5.0] * rounds
    means = [sum(steps[at : at + 4]) / 4 for at in range(0, len(steps), 4)]
    assert mean_interval(means).mean_s == 2.0


def drift_of(rounds: list[float]) -> float:
    """Return the drift that a measurement over these rounds would record."""
    first, second, scatter = halves_of(rounds) or (None, None, None)
    zeros = dict.fromkeys(name for name, field in StepTimes.model_fields.items() if field.is_required())
    halves = {"first_half_s": first, "second_half_s": second, "halves_scatter_s": scatter}
    return StepTimes.model_validate({**dict.fromkeys(zeros, 0.0), **halves}).drift


@pytest.mark.parametrize("rounds", [6, 8, 11, 25])
def test_rounds_that_only_scatter_are_called_a_drift_at_most_one_time_in_twenty(rounds: int) -> None:
    source = random.Random(0)
    found = sum(drift_of([source.gauss(0.1, 0.002) for _ in range(rounds)]) != 0.0 for _ in range(600))
    assert found <= 0.06 * 600


@pytest.mark.parametrize("rounds", [10, 11, 40])
@pytest.mark.parametrize("change", [0.1, -0.2])
def test_steps_that_become_slower_or_faster_are_a_drift_of_half_their_change(rounds: int, change: float) -> None:
    source = random.Random(0)
    slope = [0.1 * (1.0 + change * place / (rounds - 1)) * source.gauss(1.0, 0.003) for place in range(rounds)]
    assert drift_of(slope) == pytest.approx(change / 2 / (1 + change / 4), rel=0.25)
    jump = [0.1 if place < rounds / 2 else 0.1 * (1.0 + change) for place in range(rounds)]
    assert drift_of(jump) == pytest.approx(change, rel=0.25)


@given(st.lists(st.floats(0.99, 1.01), min_size=10, max_size=30), st.floats(0.0, 1e6), st.integers(0, 30))
def test_a_single_disturbance_is_no_drift_of_the_rest(rounds: list[float], disturbed: float, place: int) -> None:
    rounds.insert(place % (len(rounds) + 1), disturbed)
    assert abs(drift_of(rounds)) <= 0.03


def test_a_few_rounds_are_not_halved() -> None:
    assert halves_of([0.1, 0.1, 0.1, 0.2, 0.2]) is None
    assert drift_of([0.1]) == 0.0


@pytest.mark.parametrize("multiple_of", [1, 2, 8, 12])
@given(about_s=st.floats(1e-5, 20.0))
def test_a_round_holds_whole_turns_of_the_loader_and_lasts_long_enough(about_s: float, multiple_of: int) -> None:
    steps = RULE.steps_per_round(about_s, multiple_of=multiple_of)
    assert steps % multiple_of == 0
    assert LEAST_ROUNDS * steps >= RULE.min_steps
    assert steps < RULE.max_steps // 10 + multiple_of
    assert steps * about_s >= min(ROUND_S, about_s * RULE.max_steps // 10)


def test_stops_once_the_mean_is_known() -> None:
    rule = StoppingRule(min_steps=10, max_steps=100, max_seconds=60, ci_width=0.02)
    assert not rule.done([1e-3] * 4, 2)
    # as many steps, but too few rounds to believe in an interval
    assert not rule.done([1e-3] * 4, 3)
    assert rule.done([1e-3] * 5, 2)
    noisy = [1e-3, 2e-3] * 10
    assert not rule.done(noisy, 2)
    assert not rule.converged(noisy)


@pytest.mark.parametrize(("steps", "rounds"), [(1, 23), (4, 5), (8, 2), (40, 2)])
def test_never_exceeds_the_upper_bound_but_for_two_rounds(steps: int, rounds: int) -> None:
    source = random.Random(1)
    rule = StoppingRule(min_steps=5, max_steps=23, max_seconds=60, ci_width=1e-9)
    calls: list[float] = []
    samples = driven(rounds_of(LoneWorker(), rule, steps), lambda: calls.append(source.random()))
    assert (len(samples), len(calls)) == (rounds, rounds * steps)


def test_time_limit_ends_a_slow_measurement() -> None:
    rule = StoppingRule(min_steps=5, max_steps=1000, max_seconds=1.0, ci_width=1e-9)
    assert rule.done([0.3, 0.1, 0.4, 0.3, 0.5], 1)
    assert rule.done([0.2, 0.1], 5)
    assert not rule.done([0.1, 0.09], 5)


def test_a_short_training_is_timed_for_less_long() -> None:
    """It takes 1.5 % of its steps, between 10 s and a minute, and at least five; the user's settings come first."""
    rule = StoppingRule.of(SearchSpec(), 2000)
    assert [rule.in_proportion(step_s).max_seconds for step_s in (0.01, 0.4, 10.0)] == [10.0, 12.0, 60.0]
    assert [rule.in_proportion(step_s).min_steps for step_s in (0.01, 0.4, 10.0, 30.0)] == [15, 15, 6, 5]
    for asked in (5.0, 240.0):
        assert StoppingRule.of(SearchSpec(max_seconds=asked), 1000).in_proportion(0.4).max_seconds == asked
    assert StoppingRule.of(SearchSpec(), math.inf).in_proportion(0.4).max_seconds == 60.0


@pytest.mark.parametrize(("step_s", "most", "taken"), [(0.1, 5, 5), (1.9, 5, 3), (9.0, 5, 2), (9.0, 1, 1), (9.0, 0, 0)])
def test_long_steps_warm_up_in_fewer(monkeypatch: pytest.MonkeyPatch, step_s: float, most: int, taken: int) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    steps: list[None] = []

    def step() -> None:
        now[0] += step_s
        steps.append(None)

    driven(warm_up(LoneWorker(), most), step)
    assert len(steps) == taken


def test_all_workers_take_as_many_rounds_as_the_one_that_needs_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert len(driven(rounds_of(LoneWorker(), RULE, 3), list)) == LEAST_ROUNDS
    assert len(driven(rounds_of(WithSlowPeer(looks=9), RULE, 3), list)) == 9
