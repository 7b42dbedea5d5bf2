"""Options beyond Algorithm 1: who shares a factor, exponent, smoothing, warm-up, gates, exclusion, scaled updates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.norm_ratio import norm_ratio

SHAPES = ((3, 2), (4,), (), (5,))
# b_small, b_large, and the batch of observed squares
SMALL, LARGE, LOCAL = 4, 64, 16
NORM_FORMS = ("tensor", "model")
UNITS = {"tensor": [[0], [1], [2], [3]], "model": [[0, 1, 2, 3]]}


class IdleOptimizer(Optimizer):
    """An optimizer that does nothing, because the wrapper changes the gradients."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        return None if closure is None else closure()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES]


def wrap(params: Sequence[nn.Parameter], base: Optimizer | None = None, **options: Any) -> TulaOptimizer:
    options = {"small_batch": SMALL, "large_batch": LARGE, "delta": math.inf, **options}
    return TulaOptimizer(base or IdleOptimizer(params), **options)


def gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def set_gradients(params: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    for parameter, value in zip(params, values, strict=True):
        parameter.grad = None if value is None else value.clone()


def squares_of(values: Sequence[Tensor]) -> list[float]:
    return [float(value.square().sum()) for value in values]


def square_norms(values: Sequence[Tensor | None], factor: float = 1.0) -> Tensor:
    """Return the squared norms times `factor`; NaN without a gradient."""
    return torch.tensor([math.nan if g is None else factor * squares_of([g])[0] for g in values], dtype=torch.float64)


def factors(optimizer: TulaOptimizer) -> list[float]:
    found = []
    for factor in optimizer.gradscale:
        assert factor is not None
        assert factor.dim() == 0, "one number, never spread over the tensor"
        found.append(float(factor))
    return found


def square_at_batch(small: float, large: float, batch: float, wanted: float, large_batch: float) -> float:
    """Return the squared norm at the batch `wanted` by the law, written differently than in the code."""
    return large + (small - large) * (1 / wanted - 1 / large_batch) / (1 / batch - 1 / large_batch)


# factors from norms


@pytest.mark.parametrize("granularity", NORM_FORMS)
@given(
    seed=st.integers(0, 2**16),
    exponent=st.sampled_from([0.5, 1.0, 2.0]),
    smoothing=st.sampled_from([0.0, 0.9]),
    s_min=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=12)
def test_factors_from_observed_norms_follow_their_formula(
    granularity: str, seed: int, exponent: float, smoothing: float, s_min: float
) -> None:
    """The reference is a plain transcription: law in 1/batch, averages without bias, sums, root, power, bounds."""
    params = parameters()
    optimizer = wrap(params, granularity=granularity, exponent=exponent, smoothing=smoothing, s_min=s_min)
    sums, weight = [[0.0, 0.0] for _ in SHAPES], 0.0
    for step in range(4):
        large = gradients(seed + step)
        small = [value * (1 + 2 * torch.rand((), dtype=torch.float64).item()) for value in squares_of(large)]
        set_gradients(params, large)
        optimizer.observe_small(torch.tensor(small), LOCAL)
        optimizer.step()
        weight = smoothing * weight + 1 - smoothing
        for pair, s, g in zip(sums, torch.tensor(small).tolist(), squares_of(large), strict=True):
            for which, value in enumerate((square_at_batch(s, g, LOCAL, SMALL, LARGE), g)):
                pair[which] = smoothing * pair[which] + (1 - smoothing) * value
        expected = [0.0] * len(SHAPES)
        for unit in UNITS[granularity]:
            s, g = (max(0.0, sum(sums[place][which] / weight for place in unit)) for which in (0, 1))
            ratio = (math.sqrt(s) / (math.sqrt(g) + 1e-8)) ** exponent
            for place in unit:
                expected[place] = min(max(ratio, s_min), (LARGE / SMALL) ** (exponent / 2))
        assert factors(optimizer) == pytest.approx(expected, rel=1e-9)
        for parameter, before, factor in zip(params, large, expected, strict=True):
            # no Δ at the first step
            torch.testing.assert_close(parameter.grad, before * (factor if step else 1.0))


@pytest.mark.parametrize("granularity", NORM_FORMS)
def test_both_references_give_the_same_factors_from_the_same_gradients(granularity: str) -> None:
    params, others = parameters(), parameters()
    free, by_pass = wrap(params, granularity=granularity), wrap(others, granularity=granularity)
    small, large = gradients(1), gradients(2)
    by_pass.update_gradscale(small, large)
    set_gradients(params, large)
    free.observe_small(torch.tensor(squares_of(small), dtype=torch.float64), SMALL)
    free.step()
    assert factors(free) == pytest.approx(factors(by_pass), rel=1e-12)
    assert (free.update_interval, by_pass.update_due) == (None, False)


@pytest.mark.parametrize("batch", [2, 8, 31.5])
def test_expected_norms_give_the_same_factor_whatever_batch_they_come_from(batch: float) -> None:
    """|g_n|² = |G|² + tr(Σ)/n for every n, so that the factor is that of b_small."""
    square, trace = 3.0, 40.0
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = wrap([parameter], granularity="tensor")
    parameter.grad = torch.full((1,), math.sqrt(square + trace / LARGE), dtype=torch.float64)
    optimizer.observe_small(torch.tensor([square + trace / batch]), batch)
    optimizer.step()
    expected = math.sqrt((square + trace / SMALL) / (square + trace / LARGE))
    assert factors(optimizer) == pytest.approx([expected], rel=1e-6)
    assert optimizer.noise().noise_scale == pytest.approx(trace / square, rel=1e-5)


@pytest.mark.parametrize("granularity", NORM_FORMS)
def test_the_guard_holds_a_sudden_length_against_the_average_and_leaves_the_rest_alone(granularity: str) -> None:
    params = parameters()
    guarded, plain = (wrap(params, granularity=granularity, smoothing=0.9, s_max=99.0, spike_guard=g) for g in (1, 0))
    small = 4.0 * torch.tensor(squares_of(gradients(0)), dtype=torch.float64)
    for length in (1.0, 1.0, 0.5, 30.0, 1.0):
        set_gradients(params, [length * gradient for gradient in gradients(0)])
        for optimizer in (guarded, plain):
            optimizer.observe_small(small, SMALL)
            optimizer.step()
            # the last step has scaled them
            set_gradients(params, [length * gradient for gradient in gradients(0)])
        both = list(zip(factors(guarded), factors(plain), strict=True))
        if length == 30.0:
            assert all(mine == pytest.approx(2.0 / 30.0, rel=1e-6) and mine < 0.6 * other for mine, other in both)
        # the averages remember the long one, with the guard and without
        else:
            assert all(mine == pytest.approx(other, rel=1e-9) for mine, other in both)


def observe(optimizer: TulaOptimizer, small: Sequence[float], large: Sequence[float]) -> None:
    """Take a step with these squared norms, the small ones at b_small."""
    params = optimizer.parameters()
    set_gradients(
        params, [torch.full_like(p, math.sqrt(square / p.numel())) for p, square in zip(params, large, strict=True)]
    )
    optimizer.observe_small(torch.tensor(small, dtype=torch.float64), SMALL)
    optimizer.step()


def test_the_guard_compares_a_model_as_a_whole() -> None:
    """Length that only moves from one tensor of the model to another is no spike."""
    guarded, plain = (
        wrap(parameters(), granularity="model", smoothing=0.9, s_max=99.0, spike_guard=g) for g in (True, False)
    )
    for step in range(30):
        moved = [1.9, 0.1] if step % 2 else [0.1, 1.9]
        for optimizer in (guarded, plain):
            observe(optimizer, [4.0] * 4, [*moved, 1.0, 1.0])
    assert factors(guarded) == pytest.approx(factors(plain))
    observe(guarded, [4.0] * 4, [1.9, 1.9, 1.0, 1.0])
    observe(plain, [4.0] * 4, [1.9, 1.9, 1.0, 1.0])
    assert factors(guarded)[0] < 0.95 * factors(plain)[0]


def test_one_pass_is_no_spike_for_the_steps_that_follow() -> None:
    seen = []
    for guard in (True, False):
        optimizer = wrap(parameters(), granularity="tensor", smoothing=0.9, s_max=99.0, spike_guard=guard)
        for length in (1.0, 1.0, 30.0):
            small, large = ([scale * length * gradient for gradient in gradients(0)] for scale in (2.0, 1.0))
            optimizer.update_gradscale(small, large)
        seen.append(factors(optimizer))
    assert seen[0] == seen[1] == pytest.approx([2.0] * 4)


def test_without_an_average_the_guard_changes_nothing() -> None:
    seen = []
    for guard in (True, False):
        optimizer = wrap(parameters(), granularity="tensor", spike_guard=guard)
        for length in (1.0, 30.0):
            observe(optimizer, squares_of(gradients(1)), [length**2 * s for s in squares_of(gradients(2))])
        seen.append(factors(optimizer))
    assert seen[0] == seen[1]


def test_smoothed_elements_move_towards_each_new_ratio_within_the_bounds() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = wrap([parameter], smoothing=0.75)
    ones = torch.ones(3)
    optimizer.update_gradscale([ones * 2], [ones])
    optimizer.update_gradscale([torch.tensor([1.0, 1e9, 3.0])], [torch.tensor([1.0, 0.0, 1.0])])
    (factor,) = optimizer.gradscale
    # the middle one towards s_max = 4
    torch.testing.assert_close(factor, torch.tensor([1.75, 2.5, 2.25]))


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0])
def test_the_default_bound_and_the_element_ratio_follow_the_exponent(exponent: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = wrap([parameter], exponent=exponent)
    assert optimizer.s_max == pytest.approx((LARGE / SMALL) ** (exponent / 2))
    optimizer.update_gradscale([torch.tensor([1.5, -100.0])], [torch.tensor([-1.0, 1.0])])
    (factor,) = optimizer.gradscale
    torch.testing.assert_close(factor, torch.tensor([1.5**exponent, optimizer.s_max]))
    optimizer.set_batch(16)
    assert optimizer.s_max == pytest.approx(2.0**exponent)


def test_norm_ratio_of_nothing_is_one() -> None:
    small, large = torch.tensor([0.0, 4.0, -1.0, math.nan, 1.0]), torch.tensor([0.0, 1.0, 1.0, 1.0, math.nan])
    assert norm_ratio(small, large).tolist() == pytest.approx([1.0, 2.0, 0.0, 1.0, 1.0])


# what is passed over


@pytest.mark.parametrize("granularity", NORM_FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["small", "large"])
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_a_norm_that_is_not_finite_changes_no_factor_of_its_unit(
    granularity: str, bad: float, where: str, smoothing: float
) -> None:
    params = parameters()
    optimizer = wrap(params, granularity=granularity, smoothing=smoothing, spike_guard=smoothing > 0)
    for step in range(3):
        set_gradients(params, gradients(step))
        squares = torch.tensor(squares_of(gradients(step)), dtype=torch.float64) * (1.5 + step)
        before = optimizer.state_dict()["tula"]["averages"]
        if step == 2 and where == "small":
            squares[3] = bad
        elif step == 2:
            params[3].grad = torch.full_like(params[3], bad)
        optimizer.observe_small(squares, LOCAL)
        optimizer.step()
    after = optimizer.state_dict()["tula"]["averages"]
    assert torch.equal(before[:, 3], after[:, 3])
    assert not torch.equal(before[:, 0], after[:, 0])
    assert all(math.isfinite(factor) for factor in factors(optimizer))


@pytest.mark.parametrize("granularity", NORM_FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_pass_that_overflowed_changes_no_factor(granularity: str, bad: float, where: int) -> None:
    optimizer = wrap(parameters(), granularity=granularity)
    pair = [gradients(1), gradients(2)]
    optimizer.update_gradscale(*pair)
    before = factors(optimizer)
    pair[where] = [torch.full_like(gradient, bad) for gradient in pair[where]]
    optimizer.update_gradscale(*pair)
    assert factors(optimizer) == before


@pytest.mark.parametrize("granularity", ["element", *NORM_FORMS])
@pytest.mark.parametrize("gate", ["paper", "none"])
@pytest.mark.parametrize("apply", ["gradient", "update"])
def test_zero_infinite_and_missing_gradients_leave_finite_factors_and_the_other_weights_alone(
    granularity: str, gate: str, apply: str
) -> None:
    params = parameters()
    optimizer = wrap(params, SGD(params, lr=0.1), granularity=granularity, gate=gate, apply=apply, smoothing=0.5)
    zeros = [torch.zeros_like(p) for p in params]
    unused: list[Tensor | None] = [None, *gradients(3)[1:]]
    for large in (zeros, gradients(1), zeros, unused, [None] * 4, gradients(2)):
        set_gradients(params, large)
        if granularity == "element":
            optimizer.update_gradscale(large, large)
        else:
            optimizer.observe_small(torch.tensor([math.nan if g is None else 1.0 for g in large]), LOCAL)
        optimizer.step()
    assert all(f is None or (f.isfinite().all() and f.min() >= 0) for f in optimizer.gradscale)
    assert all(parameter.isfinite().all() for parameter in params)
    set_gradients(params, [torch.full_like(params[0], math.inf), *gradients(4)[1:]])
    optimizer.step()
    assert not params[0].isfinite().any()
    assert all(parameter.isfinite().all() for parameter in params[1:])
    assert all(f is None or f.isfinite().all() for f in optimizer.gradscale)


# gates


def test_without_a_gate_steps_of_any_norm_are_scaled() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer, seen = wrap([parameter], gate="none", static_scale=2.0, delta=0.5), []
    for norm in (math.nan, math.inf, 0.0, 1.0):
        parameter.grad = torch.full((2,), norm)
        optimizer.step()
        seen.append(optimizer.statistics().scaled)
    assert seen == [1, 1, 1, 1]


# warm-up


@pytest.mark.parametrize("gate", ["none", "paper"])
def test_the_scale_warms_up_over_so_many_steps(gate: str) -> None:
    norms = [1.0] * 7
    seen = []
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = wrap([parameter], gate=gate, static_scale=3.0, scale_warmup=4)
    for norm in norms:
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        optimizer.step()
        seen.append(parameter.grad.item())
    assert seen == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0], rel=1e-6)
    assert optimizer.statistics().scale_mean == 3.0


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(("gate", "norms"), [("none", [1.0] * 7), ("paper", [1.0, 1.0, 1.1, 9.0, 9.0, 9.1, 9.2])])
def test_statistics_tell_how_much_of_the_scale_was_applied(gate: str, norms: Sequence[float], warmup: int) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = wrap([parameter], gate=gate, delta=0.5, static_scale=3.0, scale_warmup=warmup)
    applied = []
    for norm in norms:
        parameter.grad = torch.full((1,), norm, dtype=torch.float64)
        optimizer.step()
        applied.append(parameter.grad.item() / norm)
    found = optimizer.statistics()
    assert 1 + found.share * (found.scale_mean - 1) == pytest.approx(statistics.fmean(applied), rel=1e-5)
    assert found.scaled_steps == sum(factor > 1 for factor in applied)
    assert found.scaled == pytest.approx((applied[-1] - 1) / 2, rel=1e-5)
    assert optimizer.statistics().share == 0.0, "no steps since the last question"


def test_a_finished_warm_up_leaves_no_trace() -> None:
    weights = []
    for warmup in (0, 3):
        params = parameters()
        optimizer = wrap(params, SGD(params, lr=0.1), scale_warmup=warmup)
        optimizer.steps = 3
        optimizer.update_gradscale(gradients(1), gradients(2))
        for step in range(4):
            set_gradients(params, gradients(step))
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(weights[0], weights[1])


# scaled updates

BASES: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda p: AdamW(p, lr=0.01),
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("granularity", ["element", "tensor", "model"])
def test_a_scaled_update_is_so_many_times_the_bases(name: str, granularity: str) -> None:
    params = parameters()
    base = BASES[name](params)
    optimizer = wrap(params, base, granularity=granularity, apply="update", gate="none")
    optimizer.update_gradscale(gradients(8), gradients(9))
    shadow = parameters()
    plain = BASES[name](shadow)
    for step in range(3):
        before = [p.detach().clone() for p in params]
        for mine, other in zip(params, shadow, strict=True):
            # the same weights, and momenta that saw the same gradients
            other.data.copy_(mine.detach())
        set_gradients(params, gradients(step))
        set_gradients(shadow, gradients(step))
        optimizer.step()
        plain.step()
        for parameter, old, new, factor in zip(params, before, shadow, optimizer.gradscale, strict=True):
            assert factor is not None
            torch.testing.assert_close(parameter.detach(), old + factor * (new.detach() - old))
            assert parameter.grad is not None
        assert torch.equal(
            torch.cat([p.grad.flatten() for p in params if p.grad is not None]),
            torch.cat([g.flatten() for g in gradients(step)]),
        ), "gradients are left as they are"


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(
    "options",
    [
        {"static_scale": 1.0},
        # the gate never opens
        {"static_scale": 5.0, "delta": 1e-12},
        # no factors yet
        {},
        {"granularity": "tensor", "s_min": 1.0, "s_max": 1.0},
    ],
)
def test_a_scaled_update_with_scale_one_equals_the_base_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    plain, wrapped = parameters(), parameters()
    base = BASES[name](plain)
    optimizer = wrap(wrapped, BASES[name](wrapped), apply="update", **options)
    if "s_max" in options:
        optimizer.update_gradscale(gradients(8), gradients(9))
    for step in range(6):
        set_gradients(plain, gradients(step))
        set_gradients(wrapped, gradients(step))
        base.step()
        optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(wrapped, plain, strict=True))


def test_adam_swallows_a_scaled_gradient_but_not_a_scaled_update() -> None:
    moved = {}
    for scale, apply in ((1.0, "gradient"), (4.0, "gradient"), (4.0, "update")):
        parameter = nn.Parameter(torch.zeros(1))
        base = Adam([parameter], lr=0.1, eps=0.0)
        optimizer = wrap([parameter], base, static_scale=scale, apply=apply, gate="none")
        parameter.grad = torch.ones(1)
        optimizer.step()
        moved[scale, apply] = parameter.item()
    assert moved[4.0, "gradient"] == pytest.approx(moved[1.0, "gradient"])
    assert moved[4.0, "update"] == pytest.approx(4 * moved[1.0, "gradient"])


class ClosureTwice(IdleOptimizer):
    """An optimizer that calls its closure twice, then takes 1 from every weight."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # no overloads
        assert closure is not None
        losses = [closure(), closure()]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(1.0)
        return losses[-1]


def test_of_several_calls_of_a_closure_the_last_decides_on_the_update() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = wrap([parameter], ClosureTwice([parameter]), static_scale=3.0, apply="update")

    def closure() -> float:
        parameter.grad = torch.ones(1)
        return 0.0

    # the first call has no Δ, the second has one
    optimizer.step(closure)
    assert parameter.item() == pytest.approx(-3.0)


# what a user can get wrong


@pytest.mark.parametrize(
    ("options", "squares", "batch", "message"),
    [
        ({"granularity": "element"}, 4, LOCAL, "observe_small: granularity"),
        ({"static_scale": 2.0}, 4, LOCAL, "static_scale"),
        ({}, 3, LOCAL, "squares: expected one number for each of 4 parameters"),
        ({}, 4, LARGE, "batch: expected above 0 and below large_batch = 64, got 64"),
        ({}, 4, 0, "batch"),
    ],
)
def test_observed_norms_that_do_not_fit_are_refused(
    options: dict[str, Any], squares: int, batch: int, message: str
) -> None:
    optimizer = wrap(parameters(), **{"granularity": "tensor", **options})
    with pytest.raises(ValueError, match=message):
        optimizer.observe_small(torch.ones(squares), batch)
