"""Time from a job's start to its first step: measured, stated or assumed; and what it adds to a training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning_data import cluster, grid, sweep
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import make_plan
from tula_hpc.records import Plan


def plan(start_s: float = 0.0, **pricing: Any) -> Plan:
    """Return a plan in which every fourth measurement is the first one of its job."""
    rows = [row.model_copy(update={"start_s": start_s * (i % 4 == 0)}) for i, row in enumerate(grid())]
    return make_plan(sweep("time"), cluster(pricing=pricing), rows)


def starts_s(made: Plan) -> float:
    return made.chosen.wall_parts_s["starts"]


def test_a_start_takes_what_profile_jobs_measured() -> None:
    assert starts_s(plan(7.5)) == 7.5
    assert any("a job takes 7.5 s to its first step, as profile jobs" in note for note in plan(7.5).notes)


def test_what_the_prices_state_goes_before_what_was_measured() -> None:
    stated = plan(7.5, restart_s=300.0)
    assert starts_s(stated) == 300.0
    assert any("assumed to take 5 min to its first step (pricing.restart_s)" in note for note in stated.notes)


def test_without_either_a_minute_is_assumed() -> None:
    assert starts_s(plan()) == 60.0
    assert any("assumed to take 1 min" in note for note in plan().notes)


def test_a_plan_marks_the_notes_that_a_training_will_replace() -> None:
    made = plan()
    assert any("a checkpoint is assumed" in note for note in {*made.notes} & {*made.provisional["save"]})
    assert any("a job is assumed" in note for note in {*made.notes} & {*made.provisional["start"]})
    assert plan(7.5).provisional["start"] == []


def test_it_is_the_median_over_jobs_and_passes_over_what_is_damaged() -> None:
    values = [0.0, 5.0, -1.0, 9.0, float("inf"), 6.0, float("nan"), 1e12]
    rows = [row.model_copy(update={"start_s": s}) for row, s in zip(grid(), values, strict=False)]
    assert summarize(rows).start_s == pytest.approx(6.0)
    assert summarize(grid()).start_s is None
