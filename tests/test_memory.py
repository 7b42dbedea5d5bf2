from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tula_hpc.analysis.memory import UNBOUNDED_BATCH, MemoryModel

MIB = 1024**2
BATCHES = np.array([8.0, 16.0, 32.0, 64.0, 128.0])
laws = settings(max_examples=40, deadline=None)
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


@laws
@given(st.permutations(range(5)))
def test_the_order_of_the_records_does_not_matter(order: list[int]) -> None:
    peaks = (100 * MIB + MIB * BATCHES) * np.array([1.02, 0.97, 1.0, 1.05, 0.99])
    assert MemoryModel().fit(BATCHES[order], peaks[order]).parameters_ == MemoryModel().fit(BATCHES, peaks).parameters_


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
