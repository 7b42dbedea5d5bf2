from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis.costs.interruptions import MIN_INTERVAL_S, best_interval_s, expected_time_s

MINUTE = 60.0
HOUR = 3600.0


def expected(work_s: float, interval_s: float, between_s: float, write_s: float, restart_s: float) -> float:
    columns = (np.array([value]) for value in (work_s, interval_s, between_s))
    return float(expected_time_s(*columns, write_s=write_s, restart_s=restart_s)[0])


def best(write_s: float, between_s: float) -> float:
    return float(best_interval_s(write_s, np.array([between_s]))[0])


@pytest.mark.parametrize(("between_min", "optimum_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_intervals_of_dalys_examples(between_min: float, optimum_min: float) -> None:
    """In Daly 2006, figures 3 to 5, a checkpoint takes 5 min."""
    assert best(5 * MINUTE, between_min * MINUTE) / MINUTE == pytest.approx(
        optimum_min, abs=0.5 if optimum_min > 10 else 0.05
    )


@settings(max_examples=40)
@given(st.floats(1.0, 600.0), st.floats(0.5, 200.0), st.floats(0.0, 300.0))
def test_no_other_interval_is_much_better(write_s: float, between_h: float, restart_s: float) -> None:
    between_s = between_h * HOUR
    mine = expected(1000 * HOUR, best(write_s, between_s), between_s, write_s, restart_s)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = expected(1000 * HOUR, factor * best(write_s, between_s), between_s, write_s, restart_s)
        assert mine <= other * 1.002


@settings(max_examples=40)
@given(st.floats(1.0, 1e5), st.floats(10.0, 1e4), st.floats(0.0, 60.0), st.floats(0.0, 300.0))
def test_without_preemptions_only_checkpoints_are_lost(
    work_s: float, interval_s: float, write_s: float, restart_s: float
) -> None:
    """This also holds for work shorter than an interval, which pays the same share as longer work."""
    checkpoints_s = work_s / interval_s * write_s
    assert expected(work_s, interval_s, 1e12, write_s, restart_s) == pytest.approx(work_s + checkpoints_s, rel=1e-4)


def test_preemptions_cost_more_the_more_often_they_come_and_the_longer_the_work() -> None:
    times = [expected(HOUR * 10, best(5, m * HOUR), m * HOUR, 5, 60) for m in (1, 2, 8, 1000)]
    assert times == sorted(times, reverse=True)
    assert times[-1] > HOUR * 10
    assert expected(HOUR * 20, 600, HOUR, 5, 60) == pytest.approx(2 * expected(HOUR * 10, 600, HOUR, 5, 60))


def test_a_simulation_takes_as_long() -> None:
    """A simulation draws preemptions at random; each returns to the last checkpoint, and restarts may fail as well."""
    work, interval, between, write, restart = 20_000.0, 500.0, 2_000.0, 20.0, 400.0
    random = np.random.default_rng(0)
    segments = round(work / interval)

    def once() -> float:
        elapsed, left = 0.0, random.exponential(between)
        for _ in range(segments):
            needs = interval + write
            while left < needs:
                elapsed += left
                left, needs = random.exponential(between), interval + write + restart
            elapsed, left = elapsed + needs, left - needs
        return elapsed

    mean = np.mean([once() for _ in range(300)])
    assert expected(work, interval, between, write, restart) == pytest.approx(mean, rel=0.03)


def test_a_checkpoint_that_takes_no_time_is_still_not_written_all_the_time() -> None:
    assert best(0.0, HOUR) == MIN_INTERVAL_S


def test_with_preemptions_faster_than_restarts_a_training_never_ends() -> None:
    assert expected(HOUR, 600.0, 0.01, 5.0, 60.0) == np.inf


def test_no_work_takes_no_time() -> None:
    assert expected(0.0, 600.0, HOUR, 5.0, 60.0) == 0.0
