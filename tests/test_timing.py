from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.timing import StoppingRule, median_interval, time_steps

seconds = st.floats(min_value=1e-6, max_value=1e3)


class Alone:
    """A worker without peers."""

    def agree(self, *values: float) -> list[float]:
        return list(values)

    def synchronize_device(self) -> None:
        pass


@given(st.lists(seconds, min_size=1, max_size=200))
def test_interval_holds_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert interval.low_s <= interval.median_s <= interval.high_s


@given(st.lists(seconds, min_size=2, max_size=50), st.floats(min_value=0.1, max_value=10))
def test_interval_scales_with_the_unit(samples: list[float], factor: float) -> None:
    interval, scaled = median_interval(samples), median_interval([factor * s for s in samples])
    assert scaled.median_s == pytest.approx(factor * interval.median_s)
    assert scaled.relative_width == pytest.approx(interval.relative_width, rel=1e-9, abs=1e-9)


def test_interval_covers_the_true_median_about_95_percent_of_the_time() -> None:
    source = random.Random(0)
    hits = 0
    for _ in range(1000):
        interval = median_interval([source.expovariate(1.0) for _ in range(40)])
        hits += interval.low_s <= 0.6931471805599453 <= interval.high_s
    assert 930 <= hits <= 995


def test_stops_once_the_median_is_known() -> None:
    rule = StoppingRule(min_steps=10, max_steps=100, max_seconds=60, ci_width=0.02)
    assert not rule.done([1e-3] * 9)
    assert rule.done([1e-3] * 10)
    noisy = [1e-3, 2e-3] * 20
    assert not rule.done(noisy)
    assert not rule.converged(noisy)


def test_never_exceeds_the_upper_bound() -> None:
    source = random.Random(1)
    rule = StoppingRule(min_steps=5, max_steps=23, max_seconds=60, ci_width=1e-9)
    calls: list[float] = []
    samples = time_steps(Alone(), rule, lambda: calls.append(source.random()))
    assert len(samples) == len(calls) == 23


def test_time_limit_ends_a_slow_measurement() -> None:
    assert StoppingRule(min_steps=5, max_steps=1000, max_seconds=1.0, ci_width=1e-9).done([0.3, 0.1, 0.4, 0.3, 0.5])
