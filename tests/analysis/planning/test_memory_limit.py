"""What a worker may use of a GPU: the smaller of stated and measured memory, less what is in use already."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.known import known
from tests.planning_data import BYTES_PER_SAMPLE, MIB, cluster, grid, memory, ok, peak_bytes, sweep
from tula_hpc.analysis.models.memory import fit_memory
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.memory_limit import checkpoint_copy_bytes, describe_limit, memory_limit_bytes
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import GIB, ClusterSpec
from tula_hpc.records import Configuration, Measurement, Plan

BYTES = st.integers(MIB, 200 * GIB)


def of_device(row: Measurement, **seen: int) -> Measurement:
    """Return the measurement with what a profile sees of the device."""
    return row.model_copy(update={"memory": known(row.memory).model_copy(update=seen)})


def plan_of(typed_gb: float | None = None, **seen: int) -> Plan:
    rows = [of_device(row, **seen) for row in grid()]
    return make_plan(sweep("time"), cluster(device="cuda", device_memory_gb=typed_gb), rows)


def largest(plan: Plan) -> int:
    return max(candidate.local_batch for candidate in plan.candidates if candidate.feasible)


@given(typed=st.none() | BYTES, seen=st.lists(st.tuples(BYTES, st.integers(0, 3 * GIB)), min_size=1))
def test_the_limit_exceeds_nothing_that_was_typed_or_measured(typed: int | None, seen: list[tuple[int, int]]) -> None:
    on = cluster(device="cuda", device_memory_gb=None if typed is None else typed / GIB)
    uses = [memory(32, total_bytes=total, other_bytes=other) for total, other in seen]
    limit = known(memory_limit_bytes(on, uses))
    bounds = [total for total, _ in seen] + ([] if typed is None else [typed])
    most_outside = max(other for _, other in seen)
    assert 0 < limit <= max(1, min(bounds) - most_outside)
    more = [*uses, memory(32, total_bytes=min(bounds), other_bytes=most_outside + MIB)]
    assert (memory_limit_bytes(on, more) or 0) <= limit


@pytest.mark.parametrize("typed_gb", [None, 2.0])
def test_without_a_measurement_of_the_device_the_cluster_file_alone_says_it(typed_gb: float | None) -> None:
    on = cluster(device="cuda", device_memory_gb=typed_gb)
    for uses in ([], [memory(32)]):
        assert memory_limit_bytes(on, uses) == on.memory_limit_bytes
        assert describe_limit(on, uses) == []
    on_cpu = cluster(memory_gb=typed_gb)
    assert memory_limit_bytes(on_cpu, [memory(32, total_bytes=MIB)]) == on_cpu.memory_limit_bytes


def test_what_lies_outside_the_allocator_is_not_planned_with() -> None:
    assert largest(plan_of(2.0)) == 256
    room_for_128 = int((peak_bytes(128) + 8 * BYTES_PER_SAMPLE) / 0.9)
    assert largest(plan_of(2.0, total_bytes=2 * GIB, other_bytes=2 * GIB - room_for_128)) == 128


def test_a_measured_device_needs_no_typed_memory_and_outdoes_a_larger_one() -> None:
    measured = [plan_of(typed, total_bytes=2 * GIB, other_bytes=200 * MIB) for typed in (None, 2.0, 64.0)]
    assert {plan.memory_limit_bytes for plan in measured} == {2 * GIB - 200 * MIB}
    assert len({largest(plan) for plan in measured}) == 1
    less = "less 200 MiB outside of torch's allocator (CUDA context, NCCL, cuDNN, other processes)"
    assert any(f"2.0 GiB that a GPU has, {less}" in note for note in measured[0].notes)
    typed = plan_of(1.5, total_bytes=2 * GIB, other_bytes=200 * MIB)
    assert any("1.5 GiB of device_memory_gb" in note for note in typed.notes)


def test_the_search_asks_for_what_it_would_with_that_limit_typed() -> None:
    spec = sweep(mode="full", max_batch=4096, cluster_sizes=[1])
    rows = [ok(1, batch) for batch in (32, 64, 128)]
    seen = [of_device(row, total_bytes=2 * GIB, other_bytes=512 * MIB) for row in rows]
    measured = propose(spec, cluster(device="cuda"), seen)
    assert measured == propose(spec, cluster(device="cuda", device_memory_gb=1.5), rows)
    assert len(measured) < len(propose(spec, cluster(device="cuda"), rows))


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("lack", [{"alloc_retries": 1}, {"ooms": 1}])
def test_a_batch_that_ran_short_of_memory_is_a_bound_and_a_warning(lack: dict[str, int], repeats: int) -> None:
    ran = [row for row in grid() if row.local_batch <= 256]
    rows = [of_device(row, **(lack if row.local_batch == 256 else {})) for row in ran]
    # with other repeats of the same batch that had enough
    rows += [of_device(row) for row in ran] * (repeats - 1)
    plan = make_plan(sweep("time"), cluster(device="cuda", device_memory_gb=64.0), rows)
    assert largest(plan) == 128
    reasons = {candidate.why for candidate in plan.candidates if candidate.local_batch == 512}
    assert reasons == {"local batch 256 ran only after the allocator had freed memory"}
    (warning,) = [text for text in plan.warnings if "freed its cache" in text]
    assert "N=1 b=256" in warning
    assert not any("bound is kept" in text for text in plan.warnings)
    wanted = propose(sweep(mode="full", max_batch=8192), cluster(device="cuda"), rows)
    assert all(configuration.local_batch < 256 for configuration in wanted)


def test_of_repeats_those_that_know_the_device_count() -> None:
    """The others were measured by an earlier version."""
    rows = [*grid(), *(of_device(row, total_bytes=2 * GIB, other_bytes=200 * MIB) for row in grid())]
    plan = make_plan(sweep("time"), cluster(device="cuda"), rows)
    assert plan.memory_limit_bytes == 2 * GIB - 200 * MIB


# 10 % above the memory of a batch of 1024, and a margin of 10 %
BARELY = cluster(memory_gb=1.25 * peak_bytes(1024) / GIB)


def far_from_limit(batches: list[int], on: ClusterSpec) -> tuple[Plan, float]:
    """Return the plan from these batches on one and two nodes, and the bytes that it allows."""
    rows = [ok(nodes, batch) for nodes in (1, 2) for batch in batches]
    spec = sweep("time", cluster_sizes=[1, 2], min_batch=32, max_batch=1024)
    assert on.memory_limit_bytes is not None
    return make_plan(spec, on, rows), on.memory_limit_bytes * (1.0 - on.memory_margin)


@given(
    batches=st.lists(st.sampled_from([16, 32, 64, 128, 256, 512]), min_size=2, max_size=4, unique=True),
    room=st.floats(0.5, 4.0),
)
@settings(max_examples=5)
def test_no_batch_is_relied_on_that_is_far_larger_than_any_measured_and_might_not_fit(
    batches: list[int], room: float
) -> None:
    plan, allowed = far_from_limit(batches, cluster(memory_gb=room * peak_bytes(1024) / GIB))
    rows = [ok(nodes, batch) for nodes in (1, 2) for batch in batches]
    model = fit_memory(summarize(rows), allowed)
    for candidate in plan.candidates:
        _, high = model.interval(candidate.local_batch, workers=candidate.nodes)
        fits = candidate.local_batch <= 2 * max(batches) or high <= allowed
        assert fits or not candidate.feasible
        assert fits or "samples at once were measured" in candidate.why or "needs" in candidate.why


def test_batches_left_out_for_their_unmeasured_memory_are_reported() -> None:
    plan, _ = far_from_limit([32, 64], BARELY)
    (largest,) = [c for c in plan.candidates if c.configuration == (1, 1, 1024)]
    assert re.search(r"at most 64 samples at once were measured, .* reaches [\d.]+ GiB per worker, more", largest.why)
    assert any("local batches from 512 on are not planned" in text for text in plan.warnings)
    measured, _ = far_from_limit([32, 64, 512], BARELY)
    assert all(candidate.feasible for candidate in measured.candidates)
    assert not any("are not planned" in text for text in measured.warnings)


def test_the_search_spends_a_profile_on_the_memory_of_a_far_larger_batch_before_it_is_chosen() -> None:
    """A single worker takes its batch in eight parts, so it never held what two workers hold at once."""
    spec = sweep("time", mode="adaptive", cluster_sizes=[1, 2], min_batch=32, max_batch=2048, max_profiles=4)

    def measured(nodes: int, batch: int) -> Measurement:
        parts = 8 if nodes == 1 else 1
        return ok(nodes, batch, parts=parts, memory=memory(batch // parts), dataset_samples=10**7)

    rows = [measured(1, 32), measured(1, 2048), measured(2, 16)]
    assert make_plan(spec, BARELY, rows).chosen.configuration == (2, 1, 512)
    assert propose(spec, BARELY, rows) == [Configuration(2, 1, 1024)]
    rows.append(measured(2, 1024))
    assert make_plan(spec, BARELY, rows).chosen.configuration == (2, 1, 1024)


def copied(rows: list[Measurement]) -> int:
    return checkpoint_copy_bytes(summarize(rows))


def test_the_copy_for_a_checkpoint_is_the_state_and_divided_states_are_gathered_first() -> None:
    plain = memory(32)
    assert copied([ok(4, 32)]) == plain.parameter_bytes + plain.optimizer_bytes
    divided = ok(4, 32, memory=memory(32, optimizer_bytes=10 * MIB, sharded_bytes=10 * MIB))
    assert copied([divided]) == plain.parameter_bytes + 2 * 4 * 10 * MIB
    assert copied([ok(1, 32), divided]) == copied([divided])


def test_an_interval_that_nothing_measured_bounds_is_told_by_the_limit() -> None:
    rows = [ok(n, b, memory=memory(0), dataset_samples=10**7) for n in (1, 2) for b in (32, 64)]
    spec = sweep("knee", cluster_sizes=[1, 2], min_batch=32, max_batch=2**20)
    largest = make_plan(spec, cluster(memory_gb=16.0), rows).candidates[-1]
    assert "this batch reaches beyond 160 GiB per worker, more than 14.4 GiB" in largest.why
