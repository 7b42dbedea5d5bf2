"""The adaptive search under constraints aims at what the plan will choose, so that it chooses as after a full search.

With the law of `planning_data`, 1 to 8 nodes and batches from 32 to 2048, the fastest candidate without a constraint is
N=8 with B=2048, and the cheapest N=1 with B=2048.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.search.test_adaptive import POINTS, measure
from tests.planning_data import cluster, peak_bytes, sweep
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.search.adaptive import cheap_corners
from tula_hpc.analysis.search.decision import Evaluated
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import GIB, ClusterSpec, SweepSpec
from tula_hpc.records import Configuration, Measurement

CLUSTER = cluster(max_nodes=8)


def constrained(kind: str, **constraints: Any) -> SweepSpec:
    spec = sweep(kind, cluster_sizes=[1, 2, 4, 8], min_batch=32, max_batch=2048, mode="adaptive")
    return spec.model_copy(update={"objective": spec.objective.model_copy(update=constraints)})


def searched(spec: SweepSpec, on: ClusterSpec, noise: float) -> list[Measurement]:
    rows: list[Measurement] = []
    while proposed := propose(spec, on, rows):
        rows.append(measure(proposed[0], len(rows), noise))
    return rows


def chosen(spec: SweepSpec, on: ClusterSpec, rows: list[Measurement]) -> Configuration:
    return make_plan(spec, on, rows).chosen.configuration


def everything(noise: float) -> list[Measurement]:
    return [measure(point, order, noise) for order, point in enumerate(POINTS)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "constraints"),
    [("time", {"budget": 0.1}), ("cost", {"deadline_hours": 0.04}), ("knee", {"max_global_batch": 256})],
)
def test_the_choice_is_that_of_a_full_search(kind: str, constraints: dict[str, float]) -> None:
    spec, free = constrained(kind, **constraints), constrained(kind)
    rows = searched(spec, CLUSTER, 0.02)
    wanted = chosen(spec, CLUSTER, everything(0.02))
    assert wanted != chosen(free, CLUSTER, everything(0.02))
    assert chosen(spec, CLUSTER, rows) == wanted
    assert len(rows) <= spec.search.max_profiles


@pytest.mark.processes
def test_it_looks_where_the_deadline_moves_the_choice() -> None:
    """The corners alone find the cheapest candidate; what a deadline leaves has to be measured.

    The free choice is one of the corners. Other candidates cost 0.5 % more by the law, which is less than a single
    configuration may depart from it, so some of them are measured, too.
    """
    noise = 0.02
    late = constrained("cost", deadline_hours=0.04)
    free = searched(constrained("cost"), CLUSTER, noise)
    assert len(free) < 8
    assert chosen(constrained("cost"), CLUSTER, free) in cheap_corners(POINTS)
    rows = searched(late, CLUSTER, noise)
    assert chosen(late, CLUSTER, everything(noise)) == Configuration(2, 1, 1024)
    # so short a training is not always worth the profile that would confirm its choice
    assert any(row.configuration.nodes == 2 for row in rows)
    assert chosen(late, CLUSTER, rows) == Configuration(2, 1, 1024)


def test_batches_that_are_never_allowed_are_not_profiled() -> None:
    rows = searched(constrained("time", max_global_batch=256), CLUSTER, 0.0)
    assert max(row.configuration.global_batch for row in rows) == 256


def test_what_needs_too_much_memory_is_not_profiled_once_that_is_known() -> None:
    small = cluster(max_nodes=8, memory_gb=1.2)
    rows = searched(constrained("cost"), small, 0.02)
    corners = cheap_corners(POINTS)
    later = [row for row in rows if row.configuration not in corners]
    assert later
    assert all(peak_bytes(row.local_batch) <= 1.2 * GIB for row in later)
    assert chosen(constrained("cost"), small, rows) == chosen(constrained("cost"), small, everything(0.02))


@pytest.mark.parametrize("constraints", [{"deadline_hours": 1e-4}, {"budget": 1e-4}, {"max_global_batch": 16}])
def test_it_ends_early_where_nothing_keeps_the_constraints(constraints: dict[str, float]) -> None:
    assert len(searched(constrained("time", **constraints), CLUSTER, 0.0)) == len(cheap_corners(POINTS))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["cost", "knee"])
def test_wide_constraints_change_nothing(kind: str) -> None:
    wide = constrained(kind, deadline_hours=1e6, budget=1e9, max_global_batch=2**40)
    assert searched(wide, CLUSTER, 0.02) == searched(constrained(kind), CLUSTER, 0.02)


@settings(max_examples=50)
@given(st.data())
def test_nothing_is_lost_by_the_best_allowed_and_something_by_breaking_a_limit(data: st.DataObject) -> None:
    numbers = st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4)
    value = np.array([data.draw(numbers)] * 2)
    over = np.array([data.draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=4, max_size=4))] * 2)
    evaluated = Evaluated(value, over)
    best = int(np.argmin(np.where(evaluated.eligible[0], value[0], np.inf)))
    losses = [float(evaluated.loss(place)[0]) for place in range(4)]
    assert losses[best] == 0.0
    assert all(loss >= 0.0 for loss in losses)
    assert all(losses[place] > 0.0 for place in range(4) if not evaluated.eligible[0, place])


@pytest.mark.parametrize(("sizes", "largest"), [([1], 32), ([4], 63), ([1, 5], 32)])
def test_a_largest_batch_that_leaves_one_local_batch_is_planned_from_it(sizes: list[int], largest: int) -> None:
    """The search measures no other local batch, and running it again would not either."""
    spec = sweep("time", cluster_sizes=sizes, min_batch=32, max_batch=1024, mode="adaptive")
    spec = spec.model_copy(update={"objective": spec.objective.model_copy(update={"max_global_batch": largest})})
    rows = searched(spec, CLUSTER, 0.0)
    assert chosen(spec, CLUSTER, rows).global_batch <= largest


def test_a_limit_below_the_knee_leaves_the_allowed_choice_nearest_to_it() -> None:
    """A limit that the choice keeps does not move it; one that rules it out is named."""
    rows = everything(0.0)
    free = make_plan(constrained("knee"), CLUSTER, rows)
    most = free.chosen.global_batch
    for factor in (1.01, 3.0):
        late = constrained("knee", deadline_hours=factor * free.chosen.wall_time_s / 3600, max_global_batch=most)
        plan = make_plan(late, CLUSTER, rows)
        assert (plan.chosen.configuration, plan.binding) == (free.chosen.configuration, [])
        assert plan.knee == free.knee
    soon = make_plan(constrained("knee", max_global_batch=free.chosen.global_batch // 2), CLUSTER, rows)
    assert soon.chosen.global_batch == free.chosen.global_batch // 2
    assert "without objective.max_global_batch" in soon.binding[0]
