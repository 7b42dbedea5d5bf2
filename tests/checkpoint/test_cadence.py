"""How often a training saves: the laws of the interval, and a clock that is driven by made-up steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis.costs import interruptions
from tula_hpc.analysis.costs.interruptions import MAX_SHARE, MIN_INTERVAL_S, MOST_S, best_interval_s
from tula_hpc.checkpoint.interval import FIRST_S, WARM_UP_STEPS, Cadence, Interruptions, expected_interruptions
from tula_hpc.config import PricingSpec, TrainingSpec

DAY_S = 86_400.0
costs = st.floats(0.0, 1e4)
betweens = st.floats(1.0, 1e9)


def interval_s(cost_s: float, between_s: float) -> float:
    """Return the seconds of training between two saves."""
    return float(interruptions.interval_s(cost_s, np.array([between_s]))[0])


@given(cost_s=costs, between_s=betweens)
def test_a_save_is_never_more_than_its_share_and_seldom_rarer_than_the_bound(cost_s: float, between_s: float) -> None:
    every_s = interval_s(cost_s, between_s)
    assert cost_s <= MAX_SHARE * every_s * (1 + 1e-9)
    assert MIN_INTERVAL_S <= every_s <= max(MOST_S, cost_s / MAX_SHARE)


@given(cost_s=costs, factor=st.floats(1.0, 100.0), between_s=betweens)
def test_costlier_saves_and_rarer_kills_make_the_interval_longer(
    cost_s: float, factor: float, between_s: float
) -> None:
    every_s = interval_s(cost_s, between_s)
    assert interval_s(cost_s, factor * between_s) >= every_s * (1 - 1e-9)
    # beyond, Daly's interval is M itself
    if cost_s * factor < between_s / 10:
        assert interval_s(factor * cost_s, between_s) >= every_s * (1 - 1e-9)


@given(cost_s=st.floats(0.01, 0.3))
def test_between_the_bounds_the_interval_is_that_of_least_loss(cost_s: float) -> None:
    assert interval_s(cost_s, DAY_S) == pytest.approx(float(best_interval_s(cost_s, np.array([DAY_S]))[0]))
    # Young's
    assert interval_s(cost_s, DAY_S) == pytest.approx((2 * cost_s * DAY_S) ** 0.5, rel=0.02)


# how often it is cut off


def test_an_interruption_a_day_is_assumed_until_more_is_known() -> None:
    fresh = Interruptions(DAY_S)
    assert fresh.mean_s(0.0) == DAY_S
    assert fresh.mean_s(9 * DAY_S) == 10 * DAY_S
    assert Interruptions(DAY_S, seen=4, over_s=4 * DAY_S).mean_s(0.0) == DAY_S
    assert Interruptions(DAY_S, seen=9, over_s=0.0).mean_s(0.0) == DAY_S / 10


def test_spot_prices_or_otherwise_the_configuration_give_the_rate_of_interruptions() -> None:
    spot = PricingSpec(basis="spot", preemption_hours=12.0, preempted="node")
    training = TrainingSpec(interruption_hours=2.0)
    known = expected_interruptions(spot, training, 6, seen=3, over_s=1e6)
    assert known.mean_s(1e9) == pytest.approx(2 * 3600)
    assumed = expected_interruptions(PricingSpec(), training, 6, seen=0, over_s=0.0)
    assert assumed.mean_s(0.0) == pytest.approx(2 * 3600)
    assert expected_interruptions(PricingSpec(), training, 6, seen=3, over_s=0.0).mean_s(0.0) < 3600


# the clock


def drive(cadence: Cadence, steps: int, seconds: float) -> None:
    for _ in range(steps):
        cadence.worked(seconds)


def warm(fixed_s: float | None = None, between_s: float = DAY_S, step_s: float = 0.1) -> Cadence:
    """Return a cadence after some slow first steps and 20 steps of `step_s`."""
    cadence = Cadence(Interruptions(between_s, is_known=True), fixed_s)
    drive(cadence, WARM_UP_STEPS, 2.0)
    drive(cadence, 20, step_s)
    return cadence


def test_the_first_save_comes_early_so_that_its_cost_is_known() -> None:
    cadence = warm()
    assert not cadence.due()
    drive(cadence, 1, FIRST_S)
    assert cadence.due()
    cadence.began(0.01)
    assert not cadence.due()


def test_the_cost_of_a_save_is_the_stall_and_the_extra_time_of_the_steps() -> None:
    cadence = warm(step_s=0.1)
    cadence.began(stall_s=0.2)
    drive(cadence, 10, 0.15)
    cadence.ended(write_s=1.4)
    assert cadence.cost_s == pytest.approx(0.2 + 10 * 0.05)
    assert cadence.interval_s == pytest.approx(interval_s(0.7, DAY_S))
    assert cadence.share == pytest.approx(0.7 / cadence.work.seconds)


def test_steps_that_are_no_slower_cost_nothing_and_with_nothing_to_compare_writing_counts() -> None:
    cadence = warm(step_s=0.1)
    cadence.began(0.2)
    drive(cadence, 10, 0.09)
    cadence.ended(1.0)
    assert cadence.cost_s == pytest.approx(0.2)
    fresh = Cadence(Interruptions(DAY_S))
    drive(fresh, 1, 70.0)
    fresh.began(0.2)
    drive(fresh, 1, 70.0)
    fresh.ended(write_s=4.0)
    assert fresh.cost_s == pytest.approx(4.2)


def test_a_step_that_hangs_for_another_reason_is_no_cost_of_a_short_write() -> None:
    cadence = warm()
    cadence.began(0.0)
    drive(cadence, 1, 600.0)
    cadence.ended(write_s=0.5)
    assert cadence.cost_s == pytest.approx(0.5)


def test_a_save_that_was_waited_for_says_nothing_about_one_that_is_not() -> None:
    cadence = warm()
    drive(cadence, 1, FIRST_S)
    cadence.waited()
    assert not cadence.due()
    assert cadence.cost_s is None


@settings(max_examples=20)
@given(
    times_s=st.tuples(st.floats(0.05, 20.0), st.floats(0.0, 30.0)),
    slower=st.floats(1.0, 2.0),
    busy_steps=st.integers(0, 5),
    epoch_steps=st.integers(3, 200),
    between_s=st.floats(100.0, 1e6),
)
def test_over_a_whole_training_saving_takes_its_share_at_most(
    times_s: tuple[float, float], slower: float, busy_steps: int, epoch_steps: int, between_s: float
) -> None:
    """This includes saves at the ends of short epochs; only the first save, of unknown cost, may exceed the share."""
    cadence = Cadence(Interruptions(between_s, is_known=True))
    step_s, stall_s = times_s
    cost_s = stall_s + busy_steps * (slower - 1.0) * step_s
    steps = saves = 0
    while steps < 600:
        cadence.worked(step_s)
        steps += 1
        ends = steps % epoch_steps == 0
        if steps > 2 * WARM_UP_STEPS and (cadence.due() or (ends and cadence.may_save)):
            cadence.began(stall_s)
            drive(cadence, busy_steps, slower * step_s)
            steps += busy_steps
            cadence.ended(write_s=busy_steps * slower * step_s)
            saves += 1
    assert (saves - 1) * cost_s <= MAX_SHARE * cadence.work.seconds * 1.001
    assert cadence.spent_s == pytest.approx(saves * cost_s, abs=1e-6)


def test_an_interval_that_the_user_has_set_is_kept_whatever_it_costs() -> None:
    cadence = warm(fixed_s=7.0)
    cadence.began(stall_s=100.0)
    cadence.ended(write_s=0.0)
    assert cadence.interval_s == 7.0
    assert cadence.may_save
    drive(cadence, 70, 0.1)
    assert cadence.due()


def test_only_the_first_cost_and_a_changed_interval_are_reported() -> None:
    cadence = warm()
    assert cadence.news() is None
    seen = []
    for stall_s in (0.1, 0.11, 0.1, 3.0, 3.0, 3.0):
        cadence.began(stall_s)
        drive(cadence, 100, 0.1)
        cadence.ended(0.0)
        seen.append(cadence.news())
    assert [line is not None for line in seen[:3]] == [True, False, False]
    assert any(seen[3:])
    assert seen[0] is not None
    assert seen[0]["interval_s"] == pytest.approx(interval_s(0.1, DAY_S), rel=1e-3)
    assert seen[0]["between_interruptions_s"] == DAY_S
