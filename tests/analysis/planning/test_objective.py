from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.known import known
from tests.planning_data import CORNERS, cluster, sweep
from tests.table_factory import Row, hyperbola, rows_of, table_of
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.knee import TimeCurves, TrainTime, lines_of
from tula_hpc.analysis.planning.objective import Choice, choose, objective_of, pareto_front, weighted_score
from tula_hpc.config import ObjectiveSpec
from tula_hpc.formatting import FOREVER_S

laws = settings(max_examples=15)
POWERS = [2**k for k in range(5, 13)]
KINDS = ["knee", "kneedle", "time", "progress", "cost", "weighted"]


def spec(kind: str, **more: Any) -> ObjectiveSpec:
    return ObjectiveSpec.model_validate({"kind": kind, **more})


def ranked(kind: str, rows: list[Row], law: TrainTime, **more: Any) -> tuple[list[Row], Choice]:
    table = table_of(rows)
    choice = choose(spec(kind, **more), table, TimeCurves(lines_of(table.take(table.why == 0)), law))
    return [rows[index] for index in choice.ranking], choice


def test_the_largest_batch_up_to_the_knee_is_chosen() -> None:
    """For a hyperbola α/B + β the knee is 3 α/β."""
    law = hyperbola(1.0, 0.01)
    ranking, choice = ranked("knee", rows_of(law, 1, POWERS), law)
    assert known(choice.knee).global_batch == pytest.approx(300, rel=0.02)
    assert ranking[0].global_batch == 256
    assert choice.warnings == ()
    assert choice.reason.endswith(
        ", the knee of the curve fitted to time over batch; "
        "beyond it a doubling of the batch saves less than 20 % of the time"
    )
    assert [row.global_batch for row in ranking] == [256, 128, 64, 32, 512, 1024, 2048, 4096]


def test_kneedle_takes_the_candidate_nearest_to_its_own_knee() -> None:
    law = hyperbola(1.0, 0.01)
    ranking, choice = ranked("kneedle", rows_of(law, 1, POWERS), law)
    assert " with a batch up to half an octave above B=" in choice.reason
    assert known(choice.knee).global_batch == pytest.approx(np.sqrt(32 * 4096), rel=0.02)
    assert ranking[0].global_batch == 512
    assert "bends most" in choice.reason


def test_up_to_the_knee_the_fastest_is_chosen_then_the_one_with_fewer_nodes() -> None:
    law = hyperbola(1.0, 0.01)
    feasible = rows_of(law, 1, POWERS)
    at_knee = ranked("knee", feasible, law)[0][0]
    faster = Row(4, at_knee.local_batch // 8, at_knee.time_s / 2)
    assert ranked("knee", [*feasible, faster], law)[0][0] == faster
    as_fast = Row(2, at_knee.local_batch // 2, at_knee.time_s)
    assert ranked("knee", [as_fast, *feasible], law)[0][0] == at_knee
    assert ranked("knee", [*feasible, faster._replace(why=3)], law)[0][0] == at_knee


def test_up_to_the_knee_the_cheapest_of_those_as_fast_as_measurements_can_show_is_chosen() -> None:
    law = hyperbola(1.0, 0.01)
    feasible = rows_of(law, 1, POWERS)
    at_knee = ranked("knee", feasible, law)[0][0]
    dearer = Row(2, at_knee.local_batch // 2, at_knee.time_s / 1.02, 2 * at_knee.cost)
    ranking, choice = ranked("knee", [*feasible, dearer], law)
    assert ranking[:2] == [at_knee, dearer]
    cheapest = "it is the cheapest within 3 % of the fastest feasible configuration with a batch up to B="
    assert choice.reason.startswith(cheapest)
    notably = dearer._replace(time_s=at_knee.time_s / 1.04)
    ranking, choice = ranked("knee", [*feasible, notably], law)
    assert ranking[:2] == [notably, at_knee]
    assert choice.reason.startswith("it is the fastest feasible configuration with a batch up to B=")


def test_where_constraints_leave_nothing_up_to_the_knee_the_next_above_it_is_taken() -> None:
    law = hyperbola(1.0, 0.01)
    rows = [row._replace(why=5 if row.global_batch <= 256 else 0) for row in rows_of(law, 1, POWERS)]
    choice = choose(spec("knee"), table_of(rows), TimeCurves(lines_of(table_of(rows)), law))
    assert rows[choice.ranking[0]].global_batch == 512
    assert choice.reason.startswith("no batch is below B=29")
    # they may be ruled out because they never end
    table = table_of([row._replace(time_s=FOREVER_S) if row.why else row for row in rows])
    with np.errstate(all="raise"):
        never = choose(spec("knee"), table, TimeCurves(lines_of(table), law))
    assert list(never.ranking) == list(choice.ranking)


@laws
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=8, max_size=8))
def test_no_feasible_candidate_beats_the_one_at_the_knee_in_batch_time_and_cost(pairs: list[tuple[int, int]]) -> None:
    law = hyperbola(1.0, 0.01)
    table = [Row(1, batch, float(time), float(cost)) for batch, (time, cost) in zip(POWERS, pairs, strict=True)]
    first = ranked("knee", table, law)[0][0]
    own = (first.global_batch, first.time_s, first.cost)
    for row in table:
        other = (row.global_batch, row.time_s, row.cost)
        assert other == own or any(theirs > mine for theirs, mine in zip(other, own, strict=True))


def test_without_kneedles_knee_the_smallest_batch_near_the_least_time_is_taken_and_named() -> None:
    law = hyperbola(0.0001, 1.0)
    feasible = rows_of(law, 1, POWERS)
    ranking, choice = ranked("kneedle", feasible, law)
    assert known(choice.knee).global_batch is None
    assert choice.warnings[0].startswith("the curve has no knee, ")
    assert "within 10 %" in choice.reason
    assert ranking[0].global_batch == 32
    assert len(ranking) == len(feasible)
    slow = Row(1, 16, 1.2 * min(row.time_s for row in feasible))
    assert ranked("kneedle", [slow, *feasible], law)[0][0].global_batch == 32
    # of equal nodes and batches the cheapest, wherever it stands
    dearer = ranking[0]._replace(cost=2 * ranking[0].cost)
    assert ranked("kneedle", [dearer, *feasible], law)[0][:2] == [ranking[0], dearer]


@pytest.mark.parametrize(("law", "batch"), [(hyperbola(0.0001, 1.0), 32), (hyperbola(1.0), 4096)])
def test_a_flat_curve_asks_for_the_smallest_batch_and_one_that_falls_to_its_end_for_the_largest(
    law: TrainTime, batch: int
) -> None:
    assert ranked("knee", rows_of(law, 1, POWERS), law)[0][0].global_batch == batch
    assert ranked("knee", rows_of(law, 1, [32, 4096]), law)[0][0].global_batch == batch


def test_progress_counts_the_samples_that_a_larger_batch_needs() -> None:
    law = hyperbola(1.0, 0.01)
    rows = rows_of(law, 1, POWERS)
    table = table_of(rows)
    progress_s = table.wall_time_s * (1.0 + table.global_batch / 200.0)
    choice = choose(spec("progress"), table._replace(progress_time_s=progress_s))
    assert choice.ranking[0] == np.argmin(progress_s)
    assert 32 < rows[choice.ranking[0]].global_batch < 4096


one = st.tuples(st.integers(1, 4), st.sampled_from(POWERS), st.floats(1, 9), st.floats(1, 9)).map(lambda row: Row(*row))
rows = st.lists(one, min_size=1, max_size=20)


@laws
@given(rows)
def test_time_and_cost_take_the_least_and_rank_all(feasible: list[Row]) -> None:
    by_time, by_cost = (ranked(kind, feasible, hyperbola(1.0))[0] for kind in ("time", "cost"))
    assert by_time[0].time_s == min(row.time_s for row in feasible)
    assert by_cost[0].cost == min(row.cost for row in feasible)
    assert len(by_time) == len(by_cost) == len(feasible)


@laws
@given(rows, st.floats(0.1, 10), st.floats(0.01, 100), st.floats(0.01, 100))
def test_weighing_does_not_depend_on_units(feasible: list[Row], weight: float, hour: float, coin: float) -> None:
    other = [row._replace(time_s=row.time_s * hour, cost=row.cost * coin) for row in feasible]
    least = min(row.time_s**weight * row.cost for row in feasible)
    for table in (feasible, other):
        best = choose(spec("weighted", time_weight=weight), table_of(table)).ranking[0]
        assert feasible[best].time_s ** weight * feasible[best].cost == pytest.approx(least)


@laws
@given(rows)
def test_weights_of_one_side_alone_are_time_and_cost(feasible: list[Row]) -> None:
    law = hyperbola(1.0)
    time = ranked("weighted", feasible, law, cost_weight=0.0)[0][0]
    cost = ranked("weighted", feasible, law, time_weight=0.0)[0][0]
    assert time.time_s == pytest.approx(min(row.time_s for row in feasible))
    assert cost.cost == pytest.approx(min(row.cost for row in feasible))


def test_what_is_free_can_be_weighed() -> None:
    free = table_of([Row(1, 8, 2.0, 0.0), Row(2, 8, 1.0, 0.0)])
    assert np.all(np.isfinite(weighted_score(spec("weighted"), free.wall_time_s, free.cost)))
    assert choose(spec("weighted"), free).ranking[0] == 1


@pytest.mark.parametrize("kind", ["time", "cost", "weighted"])
def test_ties_go_to_fewer_nodes_then_to_the_smaller_batch(kind: str) -> None:
    feasible = [Row(4, 8, 1.0), Row(2, 128, 1.0), Row(2, 64, 1.0)]
    assert ranked(kind, feasible, hyperbola(1.0))[0][0] == feasible[2]


def test_of_equal_costs_the_fastest_is_taken_and_of_equal_times_the_cheapest() -> None:
    free = [Row(1, 8, 2.0, 0.0), Row(2, 8, 1.0, 0.0)]
    for weights in ({}, {"time_weight": 0.0}):
        assert ranked("weighted" if weights else "cost", free, hyperbola(1.0), **weights)[0] == free[::-1]
    as_fast = [Row(1, 8, 1.0, 2.0), Row(2, 8, 1.0, 1.0)]
    for weights in ({}, {"cost_weight": 0.0}):
        assert ranked("weighted" if weights else "time", as_fast, hyperbola(1.0), **weights)[0] == as_fast[::-1]


@laws
@given(st.permutations(range(16)), st.sampled_from(KINDS))
def test_the_order_of_the_candidates_does_not_matter(order: list[int], kind: str) -> None:
    law = hyperbola(1.0, 0.01)
    feasible = rows_of(law, 1, POWERS) + rows_of(law, 2, POWERS)
    shuffled = [feasible[index] for index in order]
    assert ranked(kind, shuffled, law)[0] == ranked(kind, feasible, law)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_feasible_is_never_ranked(kind: str) -> None:
    law = hyperbola(1.0)
    feasible = rows_of(law, 1, POWERS)
    out = [Row(1, 2, 1e-9, 1e-9, why=3), *feasible]
    assert ranked(kind, out, law)[0] == ranked(kind, feasible, law)[0]


points = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(points)
def test_the_front_is_what_nothing_beats(coordinates: list[tuple[int, int]]) -> None:
    first, second = np.array(coordinates, dtype=float).T
    front = pareto_front(first, second)
    kept = {coordinates[index] for index in front}

    def beaten(a: tuple[int, int]) -> bool:
        return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in coordinates)

    assert kept == {point for point in coordinates if not beaten(point)}
    assert len(front) == len(kept)
    assert np.all(np.diff(first[front]) > 0)


def test_the_objective_is_that_of_the_plan() -> None:
    plan = make_plan(sweep("time"), cluster(), CORNERS).model_copy(
        update={"objective": "cost", "other_objective": ['objective.kind = "cost"', "objective.budget = 3.5"]}
    )
    found = objective_of(plan, spec("time"))
    assert (found.kind, found.budget) == ("cost", 3.5)
