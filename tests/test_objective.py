from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis.objective import Array, Curve, TrainTime, choose, find_knee, lower_envelope
from tula_hpc.records import Candidate

laws = settings(max_examples=15, deadline=None)


def candidate(nodes: int, local_batch: int, train_time_s: float, cost: float = 1.0) -> Candidate:
    return Candidate(
        nodes=nodes,
        local_batch=local_batch,
        global_batch=nodes * local_batch,
        step_time_s=1.0,
        epoch_time_s=train_time_s,
        train_time_s=train_time_s,
        cost=cost,
        peak_memory_bytes=1,
    )


def hyperbola(fixed: float, per_sample: float = 0.0) -> TrainTime:
    """Training time per sample of a step that takes `fixed + per_sample × b`."""

    def train_time_s(nodes: Array, workers_per_node: Array, local_batch: Array) -> Array:
        return (fixed + per_sample * local_batch) / (nodes * workers_per_node * local_batch)

    return train_time_s


def candidates_of(train_time_s: TrainTime, nodes: int, batches: list[int]) -> list[Candidate]:
    count, batch = np.full(len(batches), float(nodes)), np.array(batches, dtype=float)
    times = train_time_s(count, np.ones_like(count), batch)
    return [candidate(nodes, b, float(t)) for b, t in zip(batches, times, strict=True)]


POWERS = [2**k for k in range(5, 13)]


@laws
@given(st.floats(0.001, 100.0), st.floats(0.0, 1.0), st.integers(4, 10))
def test_the_knee_of_a_hyperbola_is_the_geometric_mean_of_its_ends(fixed: float, share: float, octaves: int) -> None:
    """T = α/B + β has slope −1 on axes normalized to its ends exactly where B² = B_min · B_max."""
    batches = np.geomspace(32, 32 * 2**octaves, 3001)
    knee = find_knee(Curve(batches, fixed / batches + share * fixed / 4096))
    expected = 32 * 2 ** (octaves / 2)
    assert knee == pytest.approx(expected, rel=0.01)


def test_the_candidate_nearest_to_the_knee_is_chosen() -> None:
    law = hyperbola(1.0)
    feasible = candidates_of(law, 1, POWERS)
    choice = choose("knee", feasible, law)
    assert choice.knee_batch is not None
    assert choice.knee_batch == pytest.approx(np.sqrt(32 * 4096), rel=0.01)
    assert choice.ranking[0].global_batch in (256, 512)
    assert choice.warnings == ()
    assert "knee" in choice.reason
    distances = [abs(np.log2(c.global_batch / choice.knee_batch)) for c in choice.ranking]
    assert distances == sorted(distances)


def test_of_equal_batches_the_fastest_is_chosen_then_the_one_with_fewer_nodes() -> None:
    law = hyperbola(1.0)
    feasible = candidates_of(law, 1, POWERS)
    at_knee = choose("knee", feasible, law).ranking[0]
    faster = candidate(4, at_knee.local_batch // 4, at_knee.train_time_s / 2)
    assert choose("knee", [*feasible, faster], law).ranking[0] == faster
    as_fast = candidate(2, at_knee.local_batch // 2, at_knee.train_time_s)
    assert choose("knee", [as_fast, *feasible], law).ranking[0] == at_knee


def test_the_envelope_takes_the_fastest_cluster_size_at_every_batch_and_never_rises() -> None:
    law = hyperbola(1.0, 0.01)
    feasible = [*candidates_of(law, 1, [32, 1024]), *candidates_of(law, 4, [8, 64])]
    batches, times = lower_envelope(feasible, law)
    assert (batches[0], batches[-1]) == (pytest.approx(32), pytest.approx(1024))
    assert np.all(np.diff(times) <= 0)
    one, four = (law(np.full_like(batches, n), np.ones_like(batches), batches / n) for n in (1.0, 4.0))
    inside = batches <= 4 * 64
    np.testing.assert_allclose(times[inside], np.minimum(one, four)[inside])
    assert np.all(times <= one + 1e-12)


def test_a_gap_between_the_sizes_is_no_candidate_area() -> None:
    law = hyperbola(1.0)
    batches, _ = lower_envelope([*candidates_of(law, 1, [32, 64]), *candidates_of(law, 4, [256, 512])], law)
    assert not np.any((batches > 65) & (batches < 1023))


@pytest.mark.parametrize(
    "times",
    [
        np.full(100, 5.0),
        np.linspace(1.0, 5.0, 100),
        np.linspace(5.0, 1.0, 100),
        5.0 - np.linspace(0.0, 2.0, 100) ** 2,
        np.linspace(1.03, 1.0, 100) ** 2,
    ],
    ids=["flat", "rising", "straight", "concave", "nearly flat"],
)
def test_a_curve_that_does_not_bend_has_no_knee(times: Array) -> None:
    assert find_knee(Curve(np.linspace(32, 4096, 100), np.minimum.accumulate(times))) is None


def test_without_a_knee_the_smallest_batch_near_the_least_time_is_taken_and_said() -> None:
    law = hyperbola(0.0001, 1.0)
    feasible = candidates_of(law, 1, POWERS)
    choice = choose("knee", feasible, law)
    assert choice.knee_batch is None
    assert "no knee: the curve has no knee" in choice.warnings[0]
    assert "within 10 %" in choice.reason
    assert choice.ranking[0].global_batch == 32
    slow = candidate(1, 16, 1.2 * min(c.train_time_s for c in feasible))
    assert choose("knee", [slow, *feasible], law).ranking[0].global_batch == 32


def test_two_batches_make_no_knee() -> None:
    law = hyperbola(1.0)
    choice = choose("knee", candidates_of(law, 1, [32, 4096]), law)
    assert "needs 3 feasible global batches" in choice.warnings[0]
    assert choice.ranking[0].global_batch == 4096
    assert choose("knee", candidates_of(law, 1, [64]), law).ranking[0].global_batch == 64


rows = st.lists(
    st.builds(candidate, st.integers(1, 4), st.sampled_from(POWERS), st.floats(1, 9), st.floats(1, 9)), min_size=1
)


@laws
@given(rows)
def test_time_and_cost_take_the_least_and_rank_all(feasible: list[Candidate]) -> None:
    by_time, by_cost = (choose(kind, feasible, hyperbola(1.0)).ranking for kind in ("time", "cost"))
    assert by_time[0].train_time_s == min(c.train_time_s for c in feasible)
    assert by_cost[0].cost == min(c.cost for c in feasible)
    assert len(by_time) == len(by_cost) == len(feasible)


@pytest.mark.parametrize("kind", ["time", "cost"])
def test_ties_go_to_fewer_nodes_then_to_the_smaller_batch(kind: str) -> None:
    feasible = [candidate(4, 8, 1.0), candidate(2, 128, 1.0), candidate(2, 64, 1.0)]
    assert choose(kind, feasible, hyperbola(1.0)).ranking[0] == feasible[2]  # type: ignore[arg-type]


@laws
@given(st.permutations(range(16)), st.sampled_from(["knee", "time", "cost"]))
def test_the_order_of_the_candidates_does_not_matter(order: list[int], kind: str) -> None:
    law = hyperbola(1.0, 0.01)
    feasible = candidates_of(law, 1, POWERS) + candidates_of(law, 2, POWERS)
    shuffled = [feasible[index] for index in order]
    assert choose(kind, shuffled, law).ranking == choose(kind, feasible, law).ranking  # type: ignore[arg-type]
