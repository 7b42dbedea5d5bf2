"""Intervals of a training's whole time, and of its parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_data import cluster, grid, sweep
from tula_hpc.analysis.costs.evaluation import END_SHARE
from tula_hpc.analysis.costs.spread import Z_90, Spread, TimePart, start_factors, step_factors, whole_factors
from tula_hpc.analysis.plan import make_plan
from tula_hpc.records import Plan

PACE = (0.9, 1.2)
seconds = st.floats(0.0, 1e6)
parts = st.fixed_dictionaries(dict.fromkeys((str(part) for part in TimePart if part is not TimePart.FAILED), seconds))
factors = st.tuples(st.floats(0.1, 1.0), st.floats(1.0, 5.0))


def planned(start_s: float = 7.5, **pricing: object) -> Plan:
    rows = [row.model_copy(update={"start_s": start_s * (i % 4 == 0)}) for i, row in enumerate(grid())]
    return make_plan(sweep("time"), cluster(pricing=pricing), rows)


@given(parts, factors, factors, factors)
def test_the_whole_is_less_sure_than_any_part_and_surer_than_all_together(
    parts_s: dict[str, float], pace: tuple[float, float], starts: tuple[float, float], evaluation: tuple[float, float]
) -> None:
    found = Spread(starts).of_parts(parts_s, pace, evaluation, 60.0)
    assert found.keys() == parts_s.keys()
    whole_s = sum(parts_s.values())
    low, high = (whole_s * factor for factor in whole_factors(parts_s, found, pace))
    below = [parts_s[part] - ends[0] for part, ends in found.items()]
    above = [ends[1] - parts_s[part] for part, ends in found.items()]
    slack = 1e-9 * max(1.0, whole_s)
    if whole_s > 1e-3:
        assert max(above) - slack <= high - whole_s <= sum(above) + slack
        assert min(whole_s, max(below)) - slack <= whole_s - low <= sum(below) + slack


def test_a_measurement_that_the_model_allows_has_the_models_prediction_in_its_interval() -> None:
    model, ends = np.full(3, 25.0), np.array([[20.0] * 3, [31.25] * 3])
    # as predicted, a little outside, and far outside, where only the measurement counts
    low, high = step_factors(np.array([25.0, 19.0, 100.0]), model, ends)
    assert low == pytest.approx([0.8, 0.8, 0.8])
    assert high == pytest.approx([1.25, 25.0 / 19.0, 1.25])


def test_independent_parts_leave_the_whole_inside_nine_times_in_ten() -> None:
    """Each part is lognormal and has its own 90 % interval."""
    random = np.random.default_rng(0)
    parts_s = {"starts": 8.0, "steps": 10.0, "evaluation": 5.0}
    spreads = {"starts": 0.2, "steps": 0.1, "evaluation": 0.15}
    found, drawn = {}, np.zeros(20_000)
    for part, sigma in spreads.items():
        half = math.exp(Z_90 * sigma)
        found[part] = (parts_s[part] / half, parts_s[part] * half)
        drawn += parts_s[part] * random.lognormal(0.0, sigma, len(drawn))
    low, high = (sum(parts_s.values()) * factor for factor in whole_factors(parts_s, found, PACE))
    assert np.mean((low <= drawn) & (drawn <= high)) == pytest.approx(0.9, abs=0.02)


def test_where_no_parts_are_known_the_whole_is_as_sure_as_the_steps() -> None:
    assert whole_factors({}, {}, PACE) == PACE


def width(*measured_s: float) -> float:
    low, high = start_factors(measured_s)
    assert low * high == pytest.approx(1.0)
    return high


@given(st.floats(0.1, 1e4), st.integers(1, 20))
def test_starts_are_the_surer_the_more_were_measured_and_the_more_they_agree(start_s: float, count: int) -> None:
    alike = [start_s] * count
    assert width(*alike, start_s) < width(*alike) < width()
    assert width(*alike, 3.0 * start_s) > width(*alike, start_s)


def test_the_uncertainty_of_the_parts_reaches_the_plan() -> None:
    chosen = planned().chosen
    assert chosen.part_intervals_90.keys() == chosen.wall_parts_s.keys()
    low, high = chosen.interval_90["wall_time_s"]
    for part, (least, most) in chosen.part_intervals_90.items():
        assert least <= chosen.wall_parts_s[part] <= most
        assert high - chosen.wall_time_s >= 0.999 * (most - chosen.wall_parts_s[part])
        assert chosen.wall_time_s - low >= 0.999 * (chosen.wall_parts_s[part] - least)
    relative = [end / chosen.cost for end in chosen.interval_90["cost"]]
    assert relative == pytest.approx([low / chosen.wall_time_s, high / chosen.wall_time_s])


def test_a_job_has_an_end_where_starts_were_measured() -> None:
    assert planned().chosen.wall_parts_s["ends"] == pytest.approx(7.5 * END_SHARE)
    for other in (planned(0.0), planned(restart_s=300.0)):
        assert other.chosen.wall_parts_s["ends"] == 0.0
    for made in (planned(), planned(0.0)):
        assert sum(made.chosen.wall_parts_s.values()) == pytest.approx(made.chosen.wall_time_s)


def test_each_job_of_a_training_at_its_time_limit_has_a_start_and_an_end() -> None:
    rows = [row.model_copy(update={"start_s": 7.5, "dataset_samples": 20_000_000}) for row in grid()]
    chosen = make_plan(sweep("time"), cluster(train_minutes=20), rows).chosen
    jobs = chosen.wall_parts_s["starts"] / 7.5
    assert jobs == round(jobs) > 1
    assert chosen.wall_parts_s["ends"] == pytest.approx(jobs * 7.5 * END_SHARE)
