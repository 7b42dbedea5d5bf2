"""Steps that are unsettled or drift are reported with what they change and what to do, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning_data import cluster, grid, ok, oom, sweep, times
from tula_hpc.analysis.plan import make_plan
from tula_hpc.records import Configuration, Measurement, Plan

ROWS = grid()


def planned(rows: list[Measurement], **search: Any) -> Plan:
    return make_plan(sweep("time", mode="full", **search), cluster(), rows)


def with_step(where: Configuration, step: dict[str, float] | None = None, **changes: Any) -> list[Measurement]:
    """Return all measurements, with these factors on the step time of one configuration."""
    nodes, _, batch = where
    seconds = times(nodes, batch).step_time_s
    fields = {f"{name}_s": factor * seconds for name, factor in (step or {}).items()}
    fields |= {"halves_scatter_s": 0.02 * seconds} if "first_half" in (step or {}) else {}
    changed = ok(nodes, batch, times=times(nodes, batch, **fields), **changes)
    return [changed if row.configuration == where else row for row in ROWS]


def warnings_about(plan: Plan, where: Configuration) -> list[str]:
    return [text for text in plan.warnings if f"the step of {where} " in text]


USUAL = planned(ROWS)
CHOSEN, NEXT, LAST = (item.configuration for item in (USUAL.chosen, USUAL.runners_up[0], USUAL.candidates[0]))
WIDE = {"step_time_low": 0.5, "step_time_high": 1.5}
UNSETTLED: dict[str, Any] = {"converged": False, "steps": 40, "round_steps": {"step": 4}}


@pytest.mark.parametrize("where", [CHOSEN, NEXT])
def test_unsettled_steps_are_reported_where_another_choice_lies_within(where: Configuration) -> None:
    plan = planned(with_step(where, WIDE, **UNSETTLED))
    assert plan.chosen.configuration == CHOSEN
    (text,) = warnings_about(plan, where)
    assert f"the step of {where} takes between " in text
    assert f", predictions change, and the plan would choose {NEXT}. " in text
    assert text.endswith("A new sweep with --set search.max_seconds=240 and another --run-dir measures it for longer")


def test_of_several_partitions_the_choice_is_said_to_be_that_of_one() -> None:
    rows = [
        row.model_copy(update={"partition": name})
        for name, own in (("a", ROWS), ("b", with_step(CHOSEN, WIDE, **UNSETTLED)))
        for row in own
    ]
    # b is as fast as a, and cheaper
    parts = [{"partition": name, "pricing": {"usd_per_node_hour": price}} for name, price in (("a", 2.0), ("b", 1.0))]
    plan = make_plan(sweep("time", mode="full"), cluster(partitions=parts), rows)
    assert (plan.chosen.partition, plan.chosen.configuration) == ("b", CHOSEN)
    (text,) = warnings_about(plan, CHOSEN)
    assert text.startswith(f"b: the step of {CHOSEN} takes between ")
    assert f", predictions change, and the best there would be {NEXT}. " in text


@pytest.mark.parametrize(
    ("where", "step", "changes"),
    [
        # it would not be chosen, however its steps settled
        (LAST, WIDE, UNSETTLED),
        # it would be chosen, however its steps settled
        (CHOSEN, {"step_time_low": 0.995, "step_time_high": 1.005}, UNSETTLED),
        # its steps had settled
        (NEXT, WIDE, {}),
    ],
)
def test_unsettled_steps_that_change_nothing_are_not_reported(
    where: Configuration, step: dict[str, float], changes: dict[str, Any]
) -> None:
    plan = planned(with_step(where, step, **changes))
    assert plan.warnings == USUAL.warnings
    assert plan.chosen.configuration == CHOSEN


def test_the_limit_that_ended_the_measurement_is_the_one_to_raise() -> None:
    rows = with_step(NEXT, WIDE, **{**UNSETTLED, "steps": 197})
    assert "--set search.max_steps=800 and" in warnings_about(planned(rows), NEXT)[0]
    assert "--set search.max_seconds=40 and" in warnings_about(planned(rows, max_steps=500, max_seconds=10.0), NEXT)[0]
    # without max_seconds the limit is a share of the training
    short = with_step(NEXT, WIDE, **UNSETTLED, samples={"step": [0.7] * 5})
    assert "--set search.max_seconds=56 and" in warnings_about(planned(short), NEXT)[0]
    # the script ended early
    short = with_step(NEXT, WIDE, **UNSETTLED, samples={"step": [0.1] * 5})
    assert (
        "The script ended before its steps had settled: with more samples, " in warnings_about(planned(short), NEXT)[0]
    )


def test_a_drift_of_the_choice_is_reported_with_what_it_does_to_training() -> None:
    slower = {"first_half": 0.97, "second_half": 1.03}
    (text,) = warnings_about(planned(with_step(CHOSEN, slower)), CHOSEN)
    assert f"{CHOSEN} became 6.2 % longer while it was measured (" in text
    assert "at its later pace the training's steps take 3 % more time than predicted" in text
    assert "search.max_seconds=240" in text
    faster = {"first_half": 1.03, "second_half": 0.97}
    (text,) = warnings_about(planned(with_step(CHOSEN, faster)), CHOSEN)
    assert "became 5.8 % shorter" in text
    assert "the training's steps take 3 % less time than predicted" in text
    assert "--set search.warmup_steps=20 and another --run-dir measures it when it has warmed up" in text


@pytest.mark.parametrize(("where", "halves"), [(LAST, (0.9, 1.1)), (CHOSEN, (0.98, 1.02)), (CHOSEN, (0.991, 1.009))])
def test_a_drift_that_matters_to_nothing_is_not_reported(where: Configuration, halves: tuple[float, float]) -> None:
    first, second = halves
    assert planned(with_step(where, {"first_half": first, "second_half": second})).warnings == USUAL.warnings


def test_a_drift_within_which_another_choice_lies_is_reported_for_any_configuration() -> None:
    (text,) = warnings_about(planned(with_step(NEXT, {"first_half": 0.5, "second_half": 1.5})), NEXT)
    assert "became 3 times as long while it was measured (" in text
    assert f", predictions change, and the plan would choose {NEXT}. " in text


def test_several_that_had_not_settled_are_one_warning() -> None:
    rows = [with_step(where, WIDE, **UNSETTLED) for where in (CHOSEN, NEXT)]
    both = [rows[0][at] if row.configuration == CHOSEN else rows[1][at] for at, row in enumerate(rows[0])]
    plan = planned(both)
    (text,) = [text for text in plan.warnings if "too short for its noise" in text]
    assert f"the plan would choose {NEXT}. The steps of N=" in text


def test_what_ran_out_of_memory_is_no_choice_whatever_the_steps_are() -> None:
    nodes, _, batch = CHOSEN
    rows = [*with_step(CHOSEN, WIDE, **UNSETTLED), oom(nodes, 2 * batch)]
    plan = planned(rows, max_batch=2 * USUAL.chosen.global_batch)
    assert plan.chosen.configuration == CHOSEN
    (text,) = warnings_about(plan, CHOSEN)
    assert f", predictions change, and the plan would choose {NEXT}. " in text
