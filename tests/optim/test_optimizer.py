"""Algorithm 1: the gate, the scaled step, and identity with the base optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.known import known
from tula_hpc.gradients.norms import foreach_norms, sum_of_squares
from tula_hpc.optim import TulaOptimizer

SHAPES = ((3, 2), (4,), ())
BASES: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    "sgd foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True),
}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def random_gradients(steps: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    # norms for which Δ falls on both sides of 0.5
    sizes = torch.rand(steps, generator=generator) + 0.5
    return [[size * torch.randn(shape, generator=generator) for shape in SHAPES] for size in sizes]


def take_steps(optimizer: Optimizer, params: Sequence[Tensor], gradients: Sequence[Sequence[Tensor | None]]) -> None:
    for step in gradients:
        for parameter, gradient in zip(params, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.dtype)
        optimizer.step()


def wrap(params: Sequence[nn.Parameter], **options: Any) -> TulaOptimizer:
    options = {"small_batch": 16, "large_batch": 256, **options}
    return TulaOptimizer(SGD(params, lr=1.0), **options)


def test_many_steps_without_any_estimate_are_warned_of_once(recwarn: pytest.WarningsRecorder) -> None:
    params = parameters()
    optimizer, static = wrap(params), wrap(params, static_scale=2.0)
    due = wrap(params, update_interval=1000)
    for _ in range(250):
        for each in (optimizer, static, due):
            take_steps(each, params, random_gradients(1))
    (warning,) = [each for each in recwarn if "nothing has been scaled" in str(each.message)]
    assert str(warning.message).startswith(
        "after 100 steps nothing has been scaled: call update_gradscale or observe_small"
    )
    # the caller of step
    assert warning.filename == __file__


@pytest.mark.parametrize(("before", "batch", "after"), [(99, 128, 500), (101, 1024, 100)])
def test_a_change_of_batch_neither_silences_nor_repeats_the_warning(
    recwarn: pytest.WarningsRecorder, before: int, batch: int, after: int
) -> None:
    params = parameters()
    optimizer = wrap(params)
    for steps, large_batch in ((before, 256), (after, batch)):
        optimizer.set_batch(large_batch)
        for _ in range(steps):
            take_steps(optimizer, params, random_gradients(1))
    assert sum("nothing has been scaled" in str(warning.message) for warning in recwarn) == 1


def scaled_flags(optimizer: TulaOptimizer, norms: Sequence[float]) -> list[float]:
    """Take one step for each norm, with a gradient of that norm, and return which steps were scaled."""
    flags = []
    for norm in norms:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, norm)
        optimizer.step()
        flags.append(optimizer.statistics().scaled)
    return flags


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize(
    "options",
    [
        # no update yet
        {"delta": 0.5},
        {"static_scale": 1.0, "delta": math.inf},
        # with the update below all factors are 1
        {"s_min": 1.0, "s_max": 1.0, "delta": math.inf},
        {"s_min": 1.0, "s_max": 1.0, "granularity": "tensor"},
    ],
)
def test_scale_one_equals_the_base_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    gradients = random_gradients(12)
    plain, wrapped = parameters(), parameters()
    optimizer = TulaOptimizer(BASES[name](wrapped), small_batch=16, large_batch=256, **options)
    if "s_min" in options:
        optimizer.update_gradscale(*random_gradients(2, seed=9))
    take_steps(BASES[name](plain), plain, gradients)
    take_steps(optimizer, wrapped, gradients)
    assert optimizer.statistics().scaled_steps > 0, "the gate never opened: the test says nothing"
    for mine, theirs in zip(wrapped, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@given(seed=st.integers(0, 2**16), delta=st.sampled_from([0.1, 0.5, 2.0, math.inf]))
@settings(max_examples=15)
def test_follows_algorithm_1_step_by_step(granularity: str, seed: int, delta: float) -> None:
    """The reference is a plain float64 transcription of the algorithm with SGD."""
    params = parameters(torch.float64)
    expected = [p.detach().clone() for p in params]
    optimizer = wrap(params, delta=delta, granularity=granularity, s_min=0.05)
    gradients = [[g.double() for g in step] for step in random_gradients(8, seed)]
    small, large = ([g.double() for g in step] for step in random_gradients(2, seed + 1))
    optimizer.update_gradscale(small, large)
    previous = None
    for step in gradients:
        take_steps(optimizer, params, [step])
        squared = sum(float((g * g).sum()) for g in step)
        quiet = previous is not None and abs((squared - previous) / previous) < delta
        previous = squared
        for weight, gradient, g_small, g_large in zip(expected, step, small, large, strict=True):
            if granularity == "element":
                scale = (g_small / (g_large + 1e-8)).abs()
            else:
                scale = g_small.norm() / (g_large.norm() + 1e-8)
            weight.sub_((scale.clamp(0.05, 4.0) if quiet else 1.0) * gradient)
    for mine, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-12)


def test_threshold_is_strict() -> None:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = wrap(params, delta=0.5)
    one, zero = torch.ones(1), torch.zeros(1)
    # ‖G‖² is 2, then 3: Δ is 0.5 exactly
    take_steps(optimizer, params, [[one, one, zero], [one, one, one]])
    statistics = optimizer.statistics()
    assert (statistics.sensitivity, statistics.scaled) == (0.5, 0.0)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        # no predecessor
        ((1.0,), [0]),
        ((1.0, 1.0), [0, 1]),
        # from 0 on Δ is inf
        ((0.0, 1.0, 1.0), [0, 0, 1]),
        # no change
        ((0.0, 0.0), [0, 1]),
        # the infinite norm is not remembered
        ((1.0, math.inf, 1.0), [0, 0, 1]),
        ((1.0, math.nan, math.nan, 1.1), [0, 0, 0, 1]),
        # the first finite norm has no predecessor either
        ((math.nan, 1.0, 1.0), [0, 0, 1]),
        ((math.inf, math.inf), [0, 0]),
    ],
)
def test_edges_of_the_gate(norms: Sequence[float], expected: list[int]) -> None:
    assert scaled_flags(wrap([nn.Parameter(torch.zeros(2))]), norms) == expected


def test_another_delta_gates_the_steps_that_follow() -> None:
    optimizer = wrap([nn.Parameter(torch.zeros(2))], static_scale=2.0, delta=0.5)
    # Δ = 3 and 0
    assert scaled_flags(optimizer, [1.0, 2.0, 2.0]) == [0, 0, 1]
    optimizer.set_delta(4.0)
    assert optimizer.delta == 4.0
    assert scaled_flags(optimizer, [1.0, 2.0]) == [1, 1]
    with pytest.raises(ValueError, match="delta: expected above 0"):
        optimizer.set_delta(0.0)


def test_gate_off_still_leaves_non_finite_gradients_unscaled() -> None:
    (parameter,) = params = [nn.Parameter(torch.zeros(2))]
    optimizer = wrap(params, static_scale=2.0, delta=math.inf)
    take_steps(optimizer, params, [[torch.ones(2)], [torch.tensor([math.inf, 1.0])]])
    assert known(parameter.grad).tolist() == [math.inf, 1.0]


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    return sum_of_squares(foreach_norms(gradients).values(), gradients[0].device)


def test_half_precision_norms_do_not_overflow() -> None:
    huge = torch.full((1000,), 60000.0, dtype=torch.float16)
    assert squared_norm([huge]).item() == pytest.approx(1000 * 60000.0**2, rel=1e-6)
    assert squared_norm([huge, torch.ones(2)]).isfinite()


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), cut=st.integers(0, 20))
@settings(max_examples=40)
def test_norm_does_not_depend_on_how_parameters_are_cut(values: list[float], cut: int) -> None:
    whole = torch.tensor(values)
    torch.testing.assert_close(squared_norm([whole[:cut], whole[cut:]]), squared_norm([whole]), rtol=1e-5, atol=1e-30)


def test_a_step_without_any_gradient_leaves_the_gate_alone() -> None:
    params = parameters()
    optimizer = wrap(params)
    gradients = random_gradients(1)
    take_steps(optimizer, params, [*gradients, [None] * 3, *gradients])
    statistics = optimizer.statistics()
    assert (statistics.sensitivity, statistics.scaled_steps, statistics.steps) == (0.0, 1, 3)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused_before_anything_changes(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex64 if kind == "complex" else torch.float32))
    other = nn.Parameter(torch.ones(3))
    optimizer = wrap([other, parameter], static_scale=2.0, delta=math.inf)
    other.grad = torch.ones(3)
    parameter.grad = torch.ones_like(parameter) if kind == "complex" else torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=f"dense real gradients.*{kind}"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert optimizer.steps == 0


class _RefuseHostSync(TorchDispatchMode):
    """A mode that fails on every operator that copies a tensor's value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}, func
        return func(*args, **(kwargs or {}))


SYNC_FREE: list[dict[str, Any]] = [
    {},
    {"exponent": 2.0, "smoothing": 0.5, "apply": "update"},
    {"static_scale": 2.0},
    {"granularity": "tensor"},
    {"granularity": "tensor", "gate": "none", "scale_warmup": 3, "apply": "update"},
    {"granularity": "tensor", "smoothing": 0.9, "scale_warmup": 3},
    {"granularity": "model", "exponent": 2.0, "smoothing": 0.9},
]

ON_GPUS = [options for options in SYNC_FREE if options is not SYNC_FREE[-3]]


@pytest.mark.parametrize("options", SYNC_FREE)
def test_a_step_never_waits_for_the_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params, squares = parameters(), torch.ones(len(SHAPES))
    optimizer = wrap(params, **options)
    free = options.get("granularity", "element") != "element"
    if "static_scale" not in options:
        optimizer.update_gradscale(*random_gradients(2))
    gradients = random_gradients(4)
    # on CPUs no operator is called for it
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: [value.item() for value in tensor])
    refuse: Any = _RefuseHostSync
    with refuse():
        for step in gradients:
            if free:
                optimizer.observe_small(squares, 32)
            take_steps(optimizer, params, [step])
    # shows that the detector works
    with pytest.raises(AssertionError, match="_local_scalar_dense"), refuse():
        optimizer.statistics()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [SYNC_FREE[-3], *(pytest.param(it, marks=pytest.mark.processes) for it in ON_GPUS)])
def test_a_step_on_a_gpu_without_one_mixes_no_devices(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Fake tensors refuse what CUDA refuses: operands on two devices, and reading a value."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype)) for shape in SHAPES]
        gradients = [[torch.empty_like(p) for p in params] for _ in range(3)]
        optimizer = wrap(params, **options)
        if "static_scale" not in options:
            optimizer.update_gradscale(gradients[0], gradients[1])
        for step in gradients:
            if options.get("granularity", "element") != "element":
                optimizer.observe_small(torch.empty(len(SHAPES), device="cuda", dtype=torch.float64), 32)
                optimizer.observe_clipping(torch.empty((), device="cuda"))
                optimizer.observe_norms(torch.empty(len(SHAPES), device="cuda", dtype=torch.float64))
            take_steps(optimizer, params, [step])
        factors = [factor for factor in optimizer.gradscale if factor is not None]
        assert len(factors) == len(SHAPES)
        assert all(factor.device.type == "cuda" for factor in factors)


@pytest.mark.gpu
@pytest.mark.parametrize("options", SYNC_FREE)
def test_a_step_on_cuda_never_waits_for_the_device(options: dict[str, Any]) -> None:
    params = [nn.Parameter(p.detach().cuda()) for p in parameters()]
    optimizer = wrap(params, **options)
    gradients = [[g.cuda() for g in step] for step in random_gradients(4)]
    squares = torch.ones(len(SHAPES), device="cuda")
    if "static_scale" not in options:
        optimizer.update_gradscale(gradients[0], gradients[1])
    take_steps(optimizer, params, gradients)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in gradients:
            if options.get("granularity", "element") != "element":
                optimizer.observe_small(squares, 32)
                optimizer.observe_norms(squares)
            take_steps(optimizer, params, [step])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_parameters_on_two_devices_share_one_gate() -> None:
    params = parameters()
    mixed = [params[0], nn.Parameter(params[1].detach().cuda()), params[2]]
    optimizers = [wrap(params, static_scale=2.0), wrap(mixed, static_scale=2.0)]
    for gradients in random_gradients(6):
        take_steps(optimizers[0], params, [gradients])
        take_steps(optimizers[1], mixed, [[g.to(p.device) for g, p in zip(gradients, mixed, strict=True)]])
    assert optimizers[0].statistics() == pytest.approx(optimizers[1].statistics(), rel=1e-5)
    for one, two in zip(params, mixed, strict=True):
        torch.testing.assert_close(one, two.cpu())
