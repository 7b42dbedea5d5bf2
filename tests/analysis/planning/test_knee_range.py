"""The knee belongs to the training: it does not move with the end of the search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tests.planning_data import cluster, memory, ok, sweep, times
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.report.plan_text import why_not_better
from tula_hpc.records import Measurement, Plan

SIZES = (1, 2, 4)
MEASURED = (32, 128, 512, 2048)
ENDS = [2**k for k in range(6, 13, 2)]


def planned(rows: list[Measurement], largest: int) -> Plan:
    return make_plan(sweep("knee", cluster_sizes=SIZES, min_batch=32, max_batch=largest), cluster(), rows)


def recorded(fixed_s: float, sample_s: float, ring_s: float) -> list[Measurement]:
    rows = []
    for nodes in SIZES:
        for batch in MEASURED:
            local = batch // nodes
            compute_s = fixed_s + sample_s * local
            step_s = compute_s + ring_s * (1 - 1 / nodes)
            found = times(
                nodes, local, step_time_s=step_s, compute_time_s=compute_s, allreduce_time_s=step_s - compute_s
            )
            rows.append(ok(nodes, local, times=found, memory=memory(local)))
    return rows


@fuzz(2)
@given(st.floats(0.002, 0.5), st.floats(1e-4, 1e-2), st.floats(0.0, 1.0))
def test_a_longer_search_leaves_the_choice_alone_from_where_it_holds_it(
    fixed_s: float, sample_s: float, ring_s: float
) -> None:
    rows = recorded(fixed_s, sample_s, ring_s)
    plans = {largest: planned(rows, largest) for largest in ENDS}
    final = plans[ENDS[-1]]
    assert final.knee is not None
    assert final.knee.global_batch is not None
    for largest, plan in plans.items():
        assert plan.knee == final.knee
        if largest >= final.chosen.global_batch:
            assert plan.chosen.configuration == final.chosen.configuration
        else:
            assert plan.chosen.global_batch == largest
        is_short = final.knee.global_batch >= 2 * largest
        assert any("to measure up to the knee, B=" in text for text in plan.warnings) == is_short


@pytest.mark.parametrize(("most", "is_told"), [(None, True), (256, False), (511, False), (512, True)])
def test_batches_that_the_objective_rules_out_are_not_to_be_measured(most: int | None, is_told: bool) -> None:
    spec = sweep(cluster_sizes=[1], min_batch=32, max_batch=256)
    spec = spec.model_copy(update={"objective": spec.objective.model_copy(update={"max_global_batch": most})})
    plan = make_plan(spec, cluster(), recorded(0.5, 1e-4, 0.1))
    assert any("to measure up to the knee, B=" in text for text in plan.warnings) is is_told


def test_kneedle_follows_the_range_as_in_the_paper() -> None:
    rows = recorded(0.1, 0.001, 0.1)
    spec = sweep("kneedle", cluster_sizes=SIZES, min_batch=32, max_batch=4096)
    chosen = []
    for largest in (256, 4096):
        search = spec.search.model_copy(update={"max_batch": largest})
        chosen.append(make_plan(spec.model_copy(update={"search": search}), cluster(), rows).chosen.global_batch)
    assert chosen[0] < chosen[1]


@pytest.mark.parametrize("objective", ["knee", "kneedle"])
def test_a_candidate_that_is_faster_and_cheaper_is_named_with_the_reason(objective: str) -> None:
    plan = make_plan(
        sweep(objective, cluster_sizes=[1], min_batch=32, max_batch=4096), cluster(), recorded(0.01, 0.001, 0.1)
    )
    (message,) = why_not_better(plan)
    assert message.startswith("N=1 b=4096 (B=4096) would be ")
    assert "faster" in message
    assert "beyond the knee" in message
    assert plan.knee is not None
    below = plan.knee.model_copy(update={"global_batch": plan.chosen.global_batch - 1.0})
    (message,) = why_not_better(plan.model_copy(update={"knee": below}))
    assert "its batch lies further beyond the knee" in message
    none = plan.knee.model_copy(update={"global_batch": None})
    (message,) = why_not_better(plan.model_copy(update={"knee": none}))
    assert "but the plan takes the smallest batch within 10 % of the least time, on the fewest nodes;" in message
    fastest = make_plan(
        sweep("time", cluster_sizes=[1], min_batch=32, max_batch=4096), cluster(), recorded(0.01, 0.001, 0.1)
    )
    assert why_not_better(fastest) == []
