from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_data import failed, ok, oom
from tula_hpc.analysis.planning.candidates import candidates
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import Configuration, Measurement

PARTIAL = SearchSpec(cluster_sizes=(1, 2, 4), min_batch=32, max_batch=512, mode="partial")
FULL = PARTIAL.model_copy(update={"mode": "full"})


def at(*pairs: tuple[int, int]) -> list[Configuration]:
    return [Configuration(nodes, 1, batch) for nodes, batch in pairs]


def proposed_by(
    search: SearchSpec, workers_per_node: int, measurements: Sequence[Measurement], trusted_batch: int | None = None
) -> list[Configuration]:
    sweep, cluster = SweepSpec(name="test", search=search), ClusterSpec(workers_per_node=workers_per_node)
    return propose(sweep, cluster, measurements, trusted_batch=trusted_batch)


@st.composite
def searches(draw: st.DrawFn) -> SearchSpec:
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True))
    low = draw(st.integers(1, 200))
    high = draw(st.integers(low, 20 * low + 100))
    mode = draw(st.sampled_from(["full", "partial", "adaptive"]))
    return SearchSpec.model_validate({"cluster_sizes": sizes, "min_batch": low, "max_batch": high, "mode": mode})


@given(searches(), st.integers(1, 8))
def test_candidates_are_powers_of_two_within_the_bounds_each_once(search: SearchSpec, workers: int) -> None:
    found = candidates(search, workers)
    assert found == sorted(set(found))
    for configuration in found:
        assert configuration.local_batch.bit_count() == 1
        assert search.min_batch <= configuration.global_batch <= search.max_batch
        assert configuration.nodes in search.cluster_sizes


def test_full_wants_all_and_partial_the_corners() -> None:
    assert proposed_by(FULL, 1, []) == candidates(FULL, 1)
    assert proposed_by(PARTIAL, 1, []) == at((1, 32), (1, 512), (4, 8), (4, 128))


def test_what_is_measured_is_not_proposed_again() -> None:
    rows = [ok(1, 32), ok(4, 128)]
    assert proposed_by(PARTIAL, 1, rows) == at((1, 512), (4, 8))
    assert proposed_by(FULL, 1, rows) == [c for c in candidates(FULL, 1) if c not in at((1, 32), (4, 128))]


def test_out_of_memory_rules_out_larger_batches_everywhere_and_the_corner_moves() -> None:
    assert proposed_by(PARTIAL, 1, [oom(1, 512)]) == at((1, 32), (1, 256), (4, 8), (4, 128))
    assert proposed_by(PARTIAL, 1, [oom(1, 512), oom(1, 256), ok(1, 128)]) == at((1, 32), (4, 8), (4, 128))
    assert proposed_by(PARTIAL, 1, [oom(4, 64)]) == at((1, 32), (4, 8), (4, 32))
    assert max(c.local_batch for c in proposed_by(FULL, 1, [oom(2, 64)])) == 32


def test_a_local_batch_without_a_finite_loss_is_left_out_on_any_number_of_nodes_until_it_was_measured() -> None:
    diverged = failed(1, 128, failure=Failure.DIVERGED)
    left = [c for c in candidates(FULL, 1) if c.local_batch != 128]
    assert proposed_by(FULL, 1, [diverged]) == left
    mended = proposed_by(FULL, 1, [diverged, ok(2, 128)])
    assert {c.nodes for c in mended if c.local_batch == 128} == {4}


def test_where_the_fewest_nodes_have_no_batch_left_the_next_size_is_a_corner() -> None:
    assert proposed_by(PARTIAL, 1, [oom(1, 32)]) == at((2, 16), (4, 8), (4, 16))
    assert proposed_by(PARTIAL, 1, [oom(4, 8)]) == []


def test_other_failures_are_tried_twice() -> None:
    assert Configuration(1, 1, 32) in proposed_by(PARTIAL, 1, [failed(1, 32)])
    assert Configuration(1, 1, 32) not in proposed_by(PARTIAL, 1, [failed(1, 32), failed(1, 32)])
    assert Configuration(1, 1, 32) not in proposed_by(PARTIAL, 1, [failed(1, 32), ok(1, 32)])


def test_a_failure_from_lack_of_memory_is_a_bound_whatever_its_status() -> None:
    assert proposed_by(PARTIAL, 1, [failed(1, 512, failure=Failure.HOST_OOM)]) == proposed_by(PARTIAL, 1, [oom(1, 512)])


def test_a_training_that_ran_out_of_memory_is_a_bound_too() -> None:
    assert proposed_by(PARTIAL, 1, [oom(1, 512, stage="train")]) == proposed_by(PARTIAL, 1, [oom(1, 512)])


@settings(max_examples=60)
@given(searches(), st.integers(1, 4), st.data())
def test_every_search_ends_and_respects_what_it_saw(search: SearchSpec, workers: int, data: st.DataObject) -> None:
    rows: list[Measurement] = []
    outcome = st.sampled_from([ok, oom, failed])
    while proposed := proposed_by(search, workers, rows):
        bound = min((row.local_batch for row in rows if row.status == "oom"), default=2**40)
        assert set(proposed) <= set(candidates(search, workers))
        assert all(configuration.local_batch < bound for configuration in proposed)
        # a job may die before it has measured everything
        done = data.draw(st.integers(1, len(proposed)))
        for nodes, per_node, batch in proposed[:done]:
            rows.append(data.draw(outcome)(nodes, batch, workers_per_node=per_node))
    counts = Counter(row.configuration for row in rows)
    assert max(counts.values(), default=0) <= 2
    assert proposed_by(search, workers, list(reversed(rows))) == []


@pytest.mark.parametrize("search", [PARTIAL, FULL])
def test_replayed_over_its_own_records_a_search_asks_for_the_same(search: SearchSpec) -> None:
    rows: list[Measurement] = []
    rounds = []
    while proposed := proposed_by(search, 1, rows):
        rounds.append(proposed)
        rows += [ok(n, b) if b <= 128 else oom(n, b) for n, _, b in proposed]
    seen = 0
    for proposed in rounds:
        assert proposed_by(search, 1, rows[:seen]) == proposed
        seen += len(proposed)
