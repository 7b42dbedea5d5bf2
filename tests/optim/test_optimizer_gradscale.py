"""UpdateGradScale: the factors, their bounds, when they are due, and what the log says about them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim import scaled_step as applying
from tula_hpc.optim.scale_factors import element_ratio

anything = st.floats(width=32, allow_nan=True, allow_infinity=True)
pairs = st.lists(st.tuples(anything, anything), min_size=1, max_size=8)


def build(*sizes: int, **options: Any) -> TulaOptimizer:
    options = {"small_batch": 32, "large_batch": 512, **options}
    return TulaOptimizer(SGD([nn.Parameter(torch.zeros(size)) for size in sizes], lr=0.1), **options)


def present(optimizer: TulaOptimizer) -> list[Tensor]:
    factors = optimizer.gradscale
    assert all(factor is not None for factor in factors)
    return [factor for factor in factors if factor is not None]


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@given(values=pairs, s_min=st.floats(0, 1), s_max=st.floats(1, 100) | st.none())
@settings(max_examples=25)
def test_factors_lie_within_the_bounds_whatever_the_gradients(
    granularity: str, values: list[tuple[float, float]], s_min: float, s_max: float | None
) -> None:
    optimizer = build(len(values), granularity=granularity, s_min=s_min, s_max=s_max)
    small, large = torch.tensor(values).T
    optimizer.update_gradscale([small], [large])
    (factor,) = present(optimizer)
    assert factor.isfinite().all()
    assert (factor >= torch.tensor(s_min)).all()
    assert (factor <= torch.tensor(optimizer.s_max)).all()


def test_element_ratio_is_the_papers_formula() -> None:
    small = torch.tensor([2.0, -2.0, 3.0, 0.0, 1.0, 0.0])
    large = torch.tensor([1.0, 1.0, -1.5, 1.0, 0.0, 0.0])
    expected = [2.0, 2.0, 2.0, 0.0, 1e8, 0.0]
    torch.testing.assert_close(element_ratio(small, large), torch.tensor(expected), rtol=1e-6, atol=0)


def test_ratios_that_are_not_finite_count_as_one() -> None:
    small = torch.tensor([1.0, math.inf, math.nan, 1.0, 3e38, 1.0, 1.0, 0.0])
    # with ε the first and last are 0
    large = torch.tensor([-1e-8, 1.0, 1.0, math.nan, 0.0, math.inf, -math.inf, -1e-8])
    assert element_ratio(small, large).tolist() == [1.0] * 8
    for granularity, factors in (("element", [2.0] * 8), ("tensor", 2.0)):
        optimizer = build(8, granularity=granularity, s_min=2.0)
        optimizer.update_gradscale([small], [large])
        assert present(optimizer)[0].tolist() == factors, "the bounds hold for the replaced value too"


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8), st.floats(0.01, 100))
@settings(max_examples=40)
def test_the_factor_of_a_tensor_with_proportional_gradients_is_theirs(values: list[float], factor: float) -> None:
    large = torch.tensor(values)
    # for such norms ε does not matter
    if large.norm() > 1e-3:
        optimizer = build(len(values), granularity="tensor", s_min=0.0, s_max=100.0)
        optimizer.update_gradscale([-factor * large], [large])
        assert present(optimizer)[0].item() == pytest.approx(factor, rel=1e-4)


def test_half_precision_gradients_are_divided_in_float32() -> None:
    optimizer = build(1)
    # ε = 1e-8 is 0 in float16
    gradient = torch.tensor([1e-7], dtype=torch.float16)
    optimizer.update_gradscale([gradient], [torch.zeros_like(gradient)])
    (factor,) = present(optimizer)
    assert factor.dtype == torch.float32
    assert factor.item() == pytest.approx(optimizer.s_max)


def test_default_s_max_is_the_square_root_rule_and_follows_the_batch() -> None:
    optimizer = build(1, small_batch=32, large_batch=512)
    assert optimizer.s_max == 4.0
    optimizer.update_gradscale([torch.ones(1) * 100], [torch.ones(1)])
    before = optimizer.gradscale
    optimizer.set_batch(128)
    assert (optimizer.s_max, present(optimizer)[0].item()) == (2.0, 2.0)
    assert before[0] is not None
    assert before[0].item() == 4.0, "factors handed out before keep their values"
    optimizer.set_batch(128, small_batch=8)
    assert (optimizer.large_batch, optimizer.small_batch, optimizer.s_max) == (128, 8, 4.0)


def test_set_batch_keeps_an_explicit_s_max() -> None:
    optimizer = build(1, s_max=7.0)
    optimizer.set_batch(64)
    assert optimizer.s_max == 7.0


def test_a_refused_set_batch_changes_nothing() -> None:
    optimizer = build(1)
    with pytest.raises(ValueError, match="small_batch"):
        optimizer.set_batch(16)
    assert (optimizer.large_batch, optimizer.s_max) == (512, 4.0)


def test_the_default_s_max_never_falls_below_s_min() -> None:
    optimizer = build(1, s_min=3.0)
    optimizer.update_gradscale([torch.ones(1) * 100], [torch.ones(1)])
    # as after running out of memory; √(b_large / b_small) is √2 and 1
    for large in (64, 32):
        optimizer.set_batch(large)
        assert (optimizer.s_max, present(optimizer)[0].item()) == (3.0, 3.0)
    optimizer.set_batch(512)
    assert optimizer.s_max == 4.0


def test_none_keeps_the_old_factor() -> None:
    optimizer = build(1, 1)
    one, two = torch.ones(1), 2 * torch.ones(1)
    optimizer.update_gradscale([two, None], [one, one])
    assert [f if f is None else round(f.item(), 5) for f in optimizer.gradscale] == [2.0, None]
    optimizer.update_gradscale([one, two], [None, one])
    assert [f if f is None else round(f.item(), 5) for f in optimizer.gradscale] == [2.0, 2.0]


def test_update_reads_its_gradients_only() -> None:
    optimizer = build(3)
    small, large = torch.randn(3), torch.randn(3)
    copies = small.clone(), large.clone()
    optimizer.update_gradscale([small], [large])
    assert torch.equal(small, copies[0])
    assert torch.equal(large, copies[1])


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        ([torch.ones(2)], [torch.ones(2), torch.ones(3)], "small_grads: expected one entry for each of 2"),
        ([torch.ones(2), torch.ones(3)], [], "large_grads: expected one entry for each of 2"),
        ([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(3)], "shapes"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(small: list[Tensor], large: list[Tensor], message: str) -> None:
    optimizer = build(2, 3)
    with pytest.raises(ValueError, match=message):
        optimizer.update_gradscale(small, large)
    assert optimizer.gradscale == [None, None]


def test_static_scaling_has_nothing_to_update() -> None:
    optimizer = build(1, static_scale=2.0)
    with pytest.raises(ValueError, match="static_scale"):
        optimizer.update_gradscale([torch.ones(1)], [torch.ones(1)])


def test_update_is_due_every_so_many_steps() -> None:
    optimizer = build(1, update_interval=3)
    due = []
    for _ in range(7):
        due.append(optimizer.update_due)
        if optimizer.update_due:
            optimizer.update_gradscale([torch.ones(1)], [torch.ones(1)])
        optimizer.step()
    assert due == [False, False, False, True, False, False, True]
    never = build(1)
    for _ in range(5):
        never.step()
    assert not never.update_due


def test_statistics_weigh_factors_by_elements_and_count_absent_ones_as_one() -> None:
    optimizer = build(3, 1, 2, granularity="tensor")
    assert optimizer.statistics()[3:6] == (1.0, 1.0, 1.0)
    ones = [torch.ones(3), torch.ones(1), torch.ones(2)]
    optimizer.update_gradscale([ones[0] * 2, ones[1] * 0.5, None], ones)
    statistics = optimizer.statistics()
    assert statistics.scale_mean == pytest.approx((3 * 2 + 0.5 + 2 * 1) / 6, rel=1e-5)
    assert statistics[4:6] == pytest.approx((0.5, 2.0))
    optimizer = build(1, 1)
    optimizer.update_gradscale([torch.ones(1) * 3, None], [torch.ones(1)] * 2)
    assert optimizer.statistics()[4:6] == pytest.approx((1.0, 3.0))


def test_statistics_count_since_they_were_last_asked() -> None:
    optimizer = build(1, static_scale=5.0)
    parameter = optimizer.param_groups[0]["params"][0]
    before = optimizer.statistics()
    assert math.isnan(before.sensitivity)
    assert math.isnan(before.gradient_norm)
    for value in (1.0, 1.0, 3.0, 3.0):
        parameter.grad = torch.full((1,), value)
        optimizer.step()
    statistics = optimizer.statistics()
    assert statistics == (0.0, 3.0, 1.0, 5.0, 5.0, 5.0, 2, 4, 0.5)
    assert optimizer.statistics()[6:] == (0, 0, 0.0)


@pytest.mark.parametrize("limit", [1, 4, 1000])
@pytest.mark.parametrize("name", ["PIECE_ELEMENTS", "HEAP_ELEMENTS"])
def test_scaling_piece_by_piece_gives_the_same(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, name, limit)
    sizes, types = (3, 5, 1, 4, 2), (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32)
    gradients = [torch.rand(size).to(dtype) for size, dtype in zip(sizes, types, strict=True)]
    factors = [torch.rand(3), torch.rand(5, dtype=torch.float64), torch.rand(1), None, torch.rand(())]
    expected = [g.clone() if f is None else g.clone().mul_(f) for g, f in zip(gradients, factors, strict=True)]
    applying.multiply_where(torch.tensor(False), gradients, factors)
    applying.multiply_where(torch.tensor(True), gradients, factors)
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"granularity": "row"}, "granularity: expected one of element, tensor, model; got 'row'"),
        ({"small_batch": 0}, "small_batch"),
        ({"small_batch": 1024}, "small_batch"),
        ({"s_min": 5.0, "s_max": 4.0}, "s_min"),
        ({"s_min": math.inf}, "s_min"),
        ({"s_min": math.nan}, "s_min"),
        ({"s_min": -1.0}, "s_min"),
        ({"s_max": 0.0}, "s_min"),
        ({"static_scale": 0.0}, "static_scale"),
        ({"static_scale": math.inf}, "static_scale"),
        ({"update_interval": 0}, "update_interval"),
        ({"exponent": 0.0}, "exponent"),
        ({"exponent": math.inf}, "exponent"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"smoothing": -0.1}, "smoothing"),
        ({"scale_warmup": -1}, "scale_warmup"),
        ({"gate": "open"}, "gate: expected one of paper, none; got 'open'"),
        ({"apply": "weights"}, "apply: expected one of gradient, update"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(1, **options)


def test_only_an_optimizer_can_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"base: expected a torch\.optim.Optimizer, got list"):
        TulaOptimizer([], small_batch=1, large_batch=2)  # type: ignore[arg-type]  # the mistake is the test
