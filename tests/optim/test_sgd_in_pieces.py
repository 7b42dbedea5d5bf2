"""SGD's step in pieces: every bit equals scaling first and stepping then, and no hook of a user is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.sgd import sgd

from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim import scaled_step as sgd_in_pieces
from tula_hpc.optim.scaled_step import GRAIN, VECTOR, pieces

STEPS = 3
# the first and third are cut into two
SHAPES = ((2, 2**16), (101, 333), (128, 32, 4, 8), (77,), (), (70_001,))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.9, "weight_decay": 5e-2},
    "nesterov": {"momentum": 0.9, "weight_decay": 5e-2, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "maximize": {"momentum": 0.9, "maximize": True, "weight_decay": 5e-2},
    "rate as tensor": {"momentum": 0.9, "lr": torch.tensor(0.03)},
}
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {"granularity": "tensor"},
    "element": {"granularity": "element"},
    "model": {"granularity": "model"},
    "half of the scale": {"granularity": "element", "scale_warmup": 8},
    "gate shut": {"granularity": "tensor", "delta": 1e-9},
    "static": {"static_scale": 1.7},
}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make pieces of as few elements as one thread takes, so that no test needs large tensors."""
    monkeypatch.setattr(sgd_in_pieces, "PIECE", 2 * GRAIN)
    pieces.cache_clear()
    yield
    pieces.cache_clear()


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[2].data = made[2].data.to(memory_format=torch.channels_last)
    return made


def gradients(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator)) for p in params]
    # another memory order than the parameter's
    return [g.contiguous() for g in found] if seed == 2 else found


def train(
    base: Callable[[list[nn.Parameter]], SGD], form: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], int]:
    """Return the whole state after a few steps, and how often torch's arithmetic was called for pieces."""
    params = parameters(dtype)
    options = {"small_batch": 4, "large_batch": 64, "delta": math.inf, **form}
    optimizer = TulaOptimizer(base(params), **options)
    with mock.patch.object(sgd_in_pieces, "sgd", wraps=sgd) as called:
        for step in range(STEPS):
            for parameter, gradient in zip(params, gradients(params, step), strict=True):
                parameter.grad = gradient
            if "static_scale" not in form and step % 2 == 0:
                optimizer.update_gradscale(gradients(params, 100 + step), [p.grad for p in params])
            optimizer.step()
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    kept = [tensor for tensor in momenta if tensor is not None]
    return [*(p.detach() for p in params), *(p.grad for p in params if p.grad is not None), *kept], called.call_count


def alike(base: Callable[[list[nn.Parameter]], SGD], form: dict[str, Any], dtype: torch.dtype = torch.float32) -> int:
    """Assert that pieces change no bit; return how many calls for pieces there were."""
    inside, calls = train(base, form, dtype)
    with mock.patch("tula_hpc.optim.optimizer.fits", return_value=False):
        outside, none = train(base, form, dtype)
    assert none == 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(inside, outside, strict=True))
    return calls


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_of_sgd_steps_as_it_does_by_itself(setting: str) -> None:
    # two tensors in two pieces
    assert alike(lambda params: SGD(params, **{"lr": 0.1, **SETTINGS[setting]}), FORMS["tensor"]) >= 5 * (STEPS - 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_scale_is_applied_as_before_the_step(form: str) -> None:
    assert alike(lambda params: SGD(params, lr=0.1, momentum=0.9), FORMS[form]) > 0


def test_each_group_keeps_its_own_settings() -> None:
    def base(params: list[nn.Parameter]) -> SGD:
        groups = [{"params": params[:2], "lr": 0.5, "weight_decay": 0.1}, {"params": params[2:], "momentum": 0.5}]
        return SGD(groups, lr=0.1, momentum=0.9)

    assert alike(base, FORMS["tensor"]) > 0


def test_half_precision_is_scaled_and_stepped_in_its_own_type() -> None:
    assert alike(lambda params: SGD(params, lr=0.1, momentum=0.9), FORMS["tensor"], torch.bfloat16) > 0


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    params = parameters()
    optimizer = TulaOptimizer(SGD(params, lr=0.1, momentum=0.9), small_batch=4, large_batch=64, static_scale=2.0)
    for step in range(3):
        for parameter, gradient in zip(params[:-1], gradients(params, step), strict=False):
            parameter.grad = gradient
        optimizer.step()
    assert torch.equal(params[-1], parameters()[-1])
    assert params[-1] not in optimizer.state


def untouched(base: SGD) -> None:
    """Leave the base as it is, without anything that watches it."""


def hook_before(base: SGD) -> None:
    base.register_step_pre_hook(lambda *_: None)


def hook_after(base: SGD) -> None:
    base.register_step_post_hook(lambda *_: None)


def scheduler(base: SGD) -> None:
    StepLR(base, 10)


def several_at_once(base: SGD) -> None:
    base.param_groups[0]["foreach"] = True


def one_kernel(base: SGD) -> None:
    base.param_groups[0]["fused"] = True


@pytest.mark.parametrize("watch", [hook_before, hook_after, scheduler, several_at_once, one_kernel])
def test_a_base_whose_step_others_follow_or_that_steps_otherwise_takes_it_itself(watch: Callable[[SGD], None]) -> None:
    calls = {}
    for name, prepare in (("free", untouched), ("watched", watch)):

        def base(params: list[nn.Parameter], prepare: Callable[[SGD], None] = prepare) -> SGD:
            made = SGD(params, lr=0.1, momentum=0.9)
            prepare(made)
            return made

        calls[name] = train(base, FORMS["tensor"])[1]
    assert calls["free"] > 0
    assert calls["watched"] == 0


def test_a_hook_for_all_optimizers_sees_every_step_of_the_base() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(type(optimizer)))
    try:
        train(lambda params: SGD(params, lr=0.1, momentum=0.9), FORMS["tensor"])
    finally:
        handle.remove()
    assert seen.count(SGD) == STEPS


class OwnStep(SGD):
    """A subclass of SGD with its own step."""


def test_a_subclass_takes_its_own_step() -> None:
    assert train(lambda params: OwnStep(params, lr=0.1, momentum=0.9), FORMS["tensor"])[1] == 0


@pytest.mark.parametrize("piece", [2**17, 2**22])
@given(elements=st.integers(1, 2**32), threads=st.integers(1, 64))
def test_pieces_are_equal_and_whole_vectors_on_every_thread(piece: int, elements: int, threads: int) -> None:
    with mock.patch.object(sgd_in_pieces, "PIECE", piece):
        pieces.cache_clear()
        count = pieces(elements, threads)
    assert elements % count == 0
    if count > 1:
        assert elements % (count * VECTOR * threads) == 0
        assert max(piece // 2, GRAIN * threads) <= elements // count <= piece


@pytest.mark.parametrize("threads", [1, 2, 4, 8, 16])
def test_the_large_layers_of_known_networks_are_cut(threads: int) -> None:
    with mock.patch.object(sgd_in_pieces, "PIECE", 2**22):
        pieces.cache_clear()
        assert all(pieces(elements, threads) > 1 for elements in (4096 * 25088, 4096 * 4096, 4096 * 9216))


def test_the_first_step_is_the_bases_own() -> None:
    """That step creates the momenta."""
    params = parameters()
    optimizer = TulaOptimizer(SGD(params, lr=0.1, momentum=0.9), small_batch=4, large_batch=64, static_scale=2.0)
    with mock.patch.object(sgd_in_pieces, "sgd", wraps=sgd) as called:
        for parameter, gradient in zip(params, gradients(params, 0), strict=True):
            parameter.grad = gradient
        optimizer.step()
        assert called.call_count == 0
        optimizer.step()
    assert called.call_count > 0
