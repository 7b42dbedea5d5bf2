"""The histogram of applied scales: every element is counted once a step, in the bin that its scale belongs to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tula_hpc import records
from tula_hpc.analysis.figures import gradients as figures_scale
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim import observer as scale_histogram
from tula_hpc.optim.observer import BINS, BINS_PER_OCTAVE, OCTAVES, ONE, ScaleHistogram

scales = st.floats(-5.9, 5.9).map(lambda octaves: 2.0**octaves)


def centre(place: int) -> float:
    """log2 of what a bin is centred on."""
    return (place - ONE) / BINS_PER_OCTAVE


def counted(factor: Tensor | None, size: int, gate: Tensor | float | None = None) -> list[int]:
    histogram = ScaleHistogram()
    histogram.observe([factor], [size], gate)
    return histogram.read()


def only_bin(counts: list[int]) -> int:
    (place,) = (place for place, count in enumerate(counts) if count)
    return place


def test_readers_know_the_bins() -> None:
    assert (OCTAVES, BINS_PER_OCTAVE) == (records.SCALE_OCTAVES, records.SCALE_BINS_PER_OCTAVE)
    assert figures_scale.BINS + 2 == BINS
    assert [math.log2(scale) for scale in figures_scale.bin_scales()] == pytest.approx(
        [centre(place) for place in range(1, BINS - 1)]
    )


@given(scales, st.booleans())
def test_a_scale_is_within_half_a_bin_of_its_centre(scale: float, elementwise: bool) -> None:
    factor = torch.full((3,), scale) if elementwise else torch.tensor(scale)
    counts = counted(factor, 3)
    assert counts[only_bin(counts)] == 3
    assert abs(math.log2(scale) - centre(only_bin(counts))) <= 0.5 / BINS_PER_OCTAVE + 1e-5


@given(st.lists(st.tuples(st.sampled_from(["none", "shared", "element"]), st.integers(0, 9), scales), max_size=6))
def test_every_element_is_counted_once_a_step(rows: list[tuple[str, int, float]]) -> None:
    def factor_of(kind: str, size: int, scale: float) -> Tensor | None:
        return {"none": None, "shared": torch.tensor(scale), "element": torch.full((size,), scale)}[kind]

    histogram = ScaleHistogram()
    factors = [factor_of(*row) for row in rows]
    sizes = [size for _, size, _ in rows]
    for _ in range(3):
        histogram.observe(factors, sizes)
    assert sum(histogram.read()) == 3 * sum(sizes)


def test_a_shared_factor_counts_as_often_as_the_tensor_has_elements() -> None:
    shared, each = counted(torch.tensor(2.0), 12), counted(torch.full((3, 4), 2.0), 12)
    assert shared == each
    assert shared[ONE + BINS_PER_OCTAVE] == 12


def test_nothing_scaled_is_one() -> None:
    for counts in (counted(None, 7), counted(torch.tensor(1.0), 7), counted(torch.tensor(4.0), 7, torch.tensor(0.0))):
        assert (only_bin(counts), sum(counts)) == (ONE, 7)


@pytest.mark.parametrize("gate", [1.0, torch.tensor(1.0), torch.tensor(True)])
def test_an_open_gate_changes_nothing(gate: Tensor | float) -> None:
    factor = torch.rand(50, generator=torch.Generator().manual_seed(0)) * 4
    assert counted(factor, 50, gate) == counted(factor, 50)


def test_a_gate_half_open_goes_half_the_way() -> None:
    assert only_bin(counted(torch.tensor(3.0), 5, torch.tensor(0.5))) == ONE + BINS_PER_OCTAVE  # 1 + ½·(3 − 1)


@pytest.mark.parametrize(("factor", "place"), [(0.0, 0), (2.0**-9, 0), (2.0**9, BINS - 1), (math.inf, BINS - 1)])
def test_what_is_beyond_the_bins_is_in_the_ends(factor: float, place: int) -> None:
    assert only_bin(counted(torch.full((4,), factor), 4)) == place
    assert only_bin(counted(torch.tensor(factor), 4)) == place


def test_reading_starts_anew() -> None:
    histogram = ScaleHistogram()
    assert histogram.read() == [0] * BINS
    histogram.observe([None, torch.tensor(2.0)], [3, 4])
    assert sum(histogram.read()) == 7
    histogram.observe([torch.tensor(2.0)], [4])
    assert (only_bin(counts := histogram.read()), sum(counts)) == (ONE + BINS_PER_OCTAVE, 4)


def test_large_tensors_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 4
    whole = counted(factor, 1000)
    monkeypatch.setattr(scale_histogram, "PIECE_ELEMENTS", 64)
    assert counted(factor, 1000) == whole


def test_counts_beyond_what_float32_knows_are_exact() -> None:
    histogram = ScaleHistogram()
    histogram.observe([torch.full((4,), 2.0)], [4])
    for _ in range(3):
        histogram.observe([torch.tensor(2.0)], [2**30 + 1])
    assert sum(histogram.read()) == 4 + 3 * (2**30 + 1)


# in the optimizer


def applied_and_counted(steps: int, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """For each step the histogram of what gradients were really multiplied by, and what was counted."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (2,))]
    optimizer = TulaOptimizer(torch.optim.SGD(parameters, lr=0.0), small_batch=8, large_batch=128, **options)
    optimizer.histogram = ScaleHistogram()
    seen, found = [], []
    for step in range(steps):
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters[:2]] + [None]
        if step == 1 and "static_scale" not in options:
            optimizer.update_gradscale([None if g is None else 1.9 * g for g in gradients], gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        pairs = [
            (p.grad, g) for p, g in zip(parameters, gradients, strict=True) if p.grad is not None and g is not None
        ]
        ratios = torch.cat([(after / before).flatten() for after, before in pairs])
        seen.append(counted(ratios, len(ratios)))
        found.append(optimizer.histogram.read())
    return seen, found


@pytest.mark.parametrize("gate", ["paper", "none", "smooth"])
@pytest.mark.parametrize("granularity", ["element", "tensor", "model", "static"])
def test_the_optimizer_counts_what_it_multiplied_by(granularity: str, gate: str) -> None:
    options = {"static_scale": 3.0} if granularity == "static" else {"granularity": granularity}
    applied, found = applied_and_counted(6, gate=gate, delta=0.6, scale_warmup=4, **options)
    assert found == applied
    assert all(sum(counts) == 4 * 3 + 5 for counts in found)  # of parameters with a gradient
    assert any(counts[ONE] < 17 for counts in found)


def test_scaled_updates_are_counted_as_scaled_gradients_are() -> None:
    for options in ({"granularity": "tensor"}, {"static_scale": 3.0}):
        of_gradients, of_updates = (
            applied_and_counted(4, gate="none", apply=apply, **options)[1] for apply in ("gradient", "update")
        )
        assert of_updates == of_gradients


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device() -> None:
    histogram = ScaleHistogram()
    factors = [torch.tensor(2.0, device="cuda"), torch.full((100,), 3.0, device="cuda")]
    gate = torch.tensor(True, device="cuda")
    histogram.observe(factors, [50, 100], gate)  # sizes are copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        histogram.observe(factors, [50, 100], gate)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(histogram.read()) == 300
