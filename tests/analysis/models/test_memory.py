from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning_data import memory, ok, oom
from tula_hpc.analysis.models.memory import SEGMENT_BYTES, UNBOUNDED_BATCH, MemoryModel, fit_memory
from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.records import Measurement

MIB = 1024**2
BATCHES = np.array([8.0, 16.0, 32.0, 64.0, 128.0])
laws = settings(max_examples=20)
fixed_bytes = st.integers(1 * MIB, 10**11)
sample_bytes = st.integers(1024, 10**9)


@laws
@given(fixed=fixed_bytes, per_sample=sample_bytes)
def test_an_exact_line_is_recovered(fixed: int, per_sample: int) -> None:
    peaks = fixed + per_sample * BATCHES
    model = MemoryModel().fit(BATCHES, peaks)
    np.testing.assert_allclose(model.predict([1, 100, 1000]), fixed + per_sample * np.array([1, 100, 1000]), rtol=1e-3)
    assert model.pinned_ == []
    assert model.residual_median_ < 1e-6


@laws
@given(fixed=fixed_bytes, per_sample=sample_bytes)
def test_an_exact_line_has_no_kink_whatever_rounding_leaves(fixed: int, per_sample: int) -> None:
    gradients = np.full(len(BATCHES), fixed / 3)
    model = MemoryModel().fit(BATCHES, fixed + per_sample * BATCHES, static_bytes=gradients, gradient_bytes=gradients)
    assert model.predict(1) == pytest.approx(fixed + per_sample, rel=1e-3)
    assert model.parameters_["floor_bytes"] == pytest.approx(2 / 3 * fixed)


@laws
@given(
    st.lists(st.tuples(st.integers(1, 1024), st.integers(1, 10**11)), min_size=1, max_size=12), st.integers(0, 10**11)
)
def test_memory_never_falls_with_the_batch_and_max_batch_is_the_largest_that_fits(
    rows: list[tuple[int, int]], limit: int
) -> None:
    batches, peaks = zip(*rows, strict=True)
    model = MemoryModel().fit(batches, peaks)
    assert np.all(np.diff(model.predict(np.arange(1, 5000))) >= 0)
    assert min(model.parameters_.values()) >= 0
    for bytes_allowed in (limit, float(model.predict(37)), float(np.nextafter(model.predict(1000), 0))):
        largest = model.max_batch(bytes_allowed)
        assert largest == 0 or model.predict(largest) <= bytes_allowed
        assert largest == UNBOUNDED_BATCH or model.predict(largest + 1) > bytes_allowed


def test_memory_that_seems_to_fall_is_taken_as_constant() -> None:
    model = MemoryModel().fit(BATCHES, np.linspace(1.3, 1.0, 5) * 100 * MIB)
    assert model.parameters_["bytes_per_sample"] == pytest.approx(0, abs=10)
    assert 100 * MIB < model.predict(1000) < 130 * MIB


def test_an_out_of_memory_bound_caps_the_largest_batch() -> None:
    peaks = 100 * MIB + MIB * BATCHES
    assert MemoryModel().fit(BATCHES, peaks).max_batch(1000 * MIB) in (899, 900)
    assert MemoryModel().fit(BATCHES, peaks, oom_local_batch=256).max_batch(1000 * MIB) == 255
    assert MemoryModel().fit(BATCHES, peaks, oom_local_batch=4096).max_batch(1000 * MIB) in (899, 900)


def test_memory_that_does_not_grow_bounds_nothing() -> None:
    model = MemoryModel().fit(BATCHES, np.full(5, 7.0 * MIB))
    assert model.parameters_["bytes_per_sample"] == pytest.approx(0, abs=10)
    assert model.max_batch(100 * MIB) > 10**6
    assert model.max_batch(6 * MIB) == 0


def test_one_disturbed_measurement_does_not_drag_the_line_along() -> None:
    peaks = 100 * MIB + MIB * BATCHES
    disturbed = peaks.copy()
    disturbed[2] *= 3
    np.testing.assert_allclose(MemoryModel().fit(BATCHES, disturbed).predict(BATCHES), peaks, rtol=0.03)


def test_one_batch_alone_predicts_too_much_for_larger_ones_and_says_what_is_pinned() -> None:
    model = MemoryModel().fit([32, 32], [200 * MIB, 200 * MIB])
    assert model.pinned_ == ["fixed_bytes"]
    assert model.predict(32) == pytest.approx(200 * MIB)
    assert model.predict(64) == pytest.approx(400 * MIB)


def test_the_interval_holds_new_measurements_as_often_as_it_says() -> None:
    random, truth, inside = np.random.default_rng(5), 100 * MIB + MIB * BATCHES, []
    for _ in range(100):
        low, high = MemoryModel().fit(BATCHES, truth * random.lognormal(0, 0.1, 5)).interval(BATCHES)
        new = truth * random.lognormal(0, 0.1, 5)
        inside.append(np.mean((low <= new) & (new <= high)))
    assert 0.84 <= np.mean(inside) <= 0.98


def test_shapes_and_mistakes() -> None:
    model = MemoryModel().fit(BATCHES, 100 * MIB + MIB * BATCHES)
    assert model.predict(8).shape == ()
    assert [end.shape for end in model.interval([[8, 16]])] == [(1, 2), (1, 2)]
    with pytest.raises(ValueError, match="peak_bytes: expected positive"):
        MemoryModel().fit([8, 16], [0, 1])
    with pytest.raises(ValueError, match="local_batch: expected at least one"):
        MemoryModel().fit([], [])


def test_memory_that_ran_out_raises_the_line_above_the_limit() -> None:
    peaks = 100 * MIB + MIB * BATCHES
    limit = 700 * MIB
    plain = MemoryModel().fit(BATCHES, peaks)
    assert plain.predict(512) < limit
    model = MemoryModel().fit(BATCHES, peaks, 512, oom_limit_bytes=limit)
    assert np.all(model.predict([512, 513, 4096]) > limit)
    assert model.predict(300) > plain.predict(300)
    assert model.oom_local_batch_ == 512
    assert not model.oom_contradicts_
    assert model.max_batch(limit) < 512
    # a larger device may hold what a smaller one could not
    assert model.max_batch(4 * limit) > 512


def test_memory_that_ran_out_for_another_reason_bounds_but_does_not_bend() -> None:
    peaks = 100 * MIB + MIB * BATCHES
    model = MemoryModel().fit(BATCHES, peaks, [256], oom_limit_bytes=[50_000 * MIB])
    assert model.oom_contradicts_
    np.testing.assert_allclose(model.predict(BATCHES), peaks, rtol=1e-3)
    assert model.max_batch(50_000 * MIB) == 255


def test_a_bound_that_the_line_keeps_changes_nothing() -> None:
    peaks = 100 * MIB + MIB * BATCHES
    model = MemoryModel().fit(BATCHES, peaks, 512, oom_limit_bytes=600 * MIB)
    assert model.parameters_ == MemoryModel().fit(BATCHES, peaks).parameters_


@laws
@given(st.integers(129, 4096), st.integers(1 * MIB, 10**12), st.floats(0.5, 2.0))
def test_whatever_ran_out_lies_above_its_limit_and_memory_never_falls(batch: int, limit: int, spread: float) -> None:
    peaks = (100 * MIB + MIB * BATCHES) * np.array([1.0, spread, 1.0, 1.0, 1 / spread])
    model = MemoryModel().fit(BATCHES, peaks, [batch], oom_limit_bytes=[limit])
    assert model.predict(batch) > limit
    assert np.all(np.diff(model.predict(np.arange(1, 5000))) >= 0)
    assert model.max_batch(limit) < batch


def test_the_step_of_the_optimizer_makes_a_floor_for_small_batches() -> None:
    static, gradients = 400 * MIB, 200 * MIB
    batches = np.array([1.0, 2.0, 4.0, 64.0, 128.0, 256.0])
    peaks = np.maximum(static + gradients + 50 * MIB, static + 20 * MIB + 4 * MIB * batches)
    model = MemoryModel().fit(batches, peaks, static_bytes=static, gradient_bytes=gradients)
    np.testing.assert_allclose(
        model.predict([1, 3, 8, 100, 1000]), [650 * MIB] * 3 + [820 * MIB, 4420 * MIB], rtol=0.01
    )
    assert np.all(model.predict(np.arange(1, 100)) >= static + gradients)


@pytest.mark.parametrize("bucket", [0, 90 * MIB])
def test_what_several_workers_need_more_is_learned(bucket: int) -> None:
    workers = np.array([1, 1, 2, 2, 4, 4])
    batches = np.array([64, 128, 32, 64, 16, 32])
    peaks = 300 * MIB + 2 * MIB * batches + bucket * (workers > 1)
    model = MemoryModel().fit(batches, peaks, static_bytes=100 * MIB, gradient_bytes=50 * MIB, workers=workers)
    assert model.predict(100, 1) == pytest.approx(500 * MIB, rel=0.01)
    assert model.predict(100, [2, 16]) == pytest.approx(500 * MIB + bucket, rel=0.01)


def test_after_a_single_worker_alone_the_gradients_buckets_are_expected_for_several() -> None:
    model = MemoryModel().fit(BATCHES, 300 * MIB + MIB * BATCHES, static_bytes=100 * MIB, gradient_bytes=50 * MIB)
    assert "bucket_bytes" in model.pinned_
    assert model.predict(64, 2) - model.predict(64, 1) == pytest.approx(50 * MIB)


def test_divided_states_shrink_with_the_workers_that_hold_them() -> None:
    states, workers = 600 * MIB, np.array([2, 2, 4, 4])
    batches = np.array([32, 64, 16, 32])
    peaks = 200 * MIB + states // workers + MIB * batches
    model = MemoryModel().fit(batches, peaks, static_bytes=100 * MIB, sharded_bytes=states // workers, workers=workers)
    assert model.predict(32, 8) == pytest.approx((232 + 75) * MIB, rel=0.01)
    assert np.all(np.diff(model.predict(32, [2, 4, 8, 16])) < 0)


@laws
@given(ratio=st.floats(1.0, 1.4), slack=st.integers(0, 100 * MIB))
def test_memory_that_the_allocator_reserves_is_distinguished(ratio: float, slack: int) -> None:
    allocated = 500 * MIB + 7 * MIB * BATCHES
    reserved = np.ceil((ratio * allocated + slack) / SEGMENT_BYTES) * SEGMENT_BYTES
    model = MemoryModel().fit(BATCHES, reserved, allocated_bytes=allocated)
    np.testing.assert_allclose(model.predict(BATCHES), reserved, rtol=0.01)
    assert np.all(model.predict([5, 77, 300]) % SEGMENT_BYTES == 0)
    # the bytes are those of tensors, without what the allocator keeps
    assert model.parameters_["bytes_per_sample"] == pytest.approx(7 * MIB, rel=1e-3)
    assert model.max_batch(float(model.predict(77))) >= 77


def summary(*rows: Measurement) -> Summary:
    return summarize(rows)


def row_bytes(batch: int) -> int:
    return memory(batch).reserved_bytes


def test_a_summary_is_fitted_with_the_counted_bytes() -> None:
    rows = [ok(nodes, batch) for nodes in (1, 2) for batch in (32, 64, 128)]
    model = fit_memory(summary(*rows, oom(1, 1024)), limit_bytes=2000 * MIB)
    # baseline, parameters and optimizer
    assert model.parameters_["static_bytes"] == 280 * MIB
    assert model.predict(64, 1) == pytest.approx(ok(1, 64).memory.reserved_bytes, rel=0.01)  # type: ignore[union-attr]
    assert model.predict(1024, 1) > 2000 * MIB


def test_counts_that_cannot_be_are_left_aside() -> None:
    rows = [ok(1, batch, memory=memory(batch, parameter_bytes=10**12)) for batch in (32, 64)]
    assert fit_memory(summary(*rows)).predict(64) == pytest.approx(rows[1].memory.reserved_bytes, rel=0.01)  # type: ignore[union-attr]


def test_what_a_single_worker_takes_in_parts_says_what_a_part_takes_on_several() -> None:
    def taken(batch: int, of: int) -> Measurement:
        return ok(1, batch, parts=2, memory=memory(of))

    rows = [taken(batch, batch // 2) for batch in (64, 256, 1024)]
    alone = fit_memory(summary(*rows))
    np.testing.assert_allclose(alone.predict([64, 512], 1), [row_bytes(32), row_bytes(256)], rtol=0.01)
    together = fit_memory(summary(*rows, ok(4, 32), ok(4, 512)))
    np.testing.assert_allclose(together.predict([64, 512], 1), [row_bytes(32), row_bytes(256)], rtol=0.02)
    np.testing.assert_allclose(together.predict([64, 512], 4), [row_bytes(64), row_bytes(512)], rtol=0.02)
    low, high = together.interval([512, 512], workers=[1, 4])
    assert low[0] < row_bytes(256) < high[0] < low[1] < row_bytes(512) < high[1]


def test_what_ran_out_of_memory_in_parts_bounds_smaller_batches_of_several_workers() -> None:
    rows = [ok(1, batch, parts=2, memory=memory(batch // 2)) for batch in (64, 256)]
    limit = 1.2 * row_bytes(256)
    model = fit_memory(summary(*rows, oom(1, 512)), limit_bytes=limit)
    assert model.max_batch(limit, 1) < 512
    assert model.max_batch(limit, 4) < 256
    several = fit_memory(summary(*rows, oom(4, 512)), limit_bytes=limit)
    assert 512 <= several.max_batch(limit, 1) < 1024
    assert several.max_batch(limit, 4) < 512


def test_far_from_all_measured_batches_an_interval_has_no_upper_end_and_no_warning() -> None:
    """A small model's memory may not grow with its batch; then nothing bounds what millions of samples need."""
    model = MemoryModel().fit([32, 64], [5e8, 5e8])
    with np.errstate(over="raise"):
        low, high = model.interval(2**24)
    assert low < model.predict(2**24) < high == np.inf
