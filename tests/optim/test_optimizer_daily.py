"""TulaOptimizer with all options in training loops: mixed precision, accumulation, clipping, closures, ZeRO, resume."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import is_dynamo_supported
from torch.amp.grad_scaler import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from tests.known import known
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim import scaled_step as applying
from tula_hpc.optim.optimizer import STATE_KEY

SMALL, LARGE, LOCAL = 8, 128, 32


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, step: int, part: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 4, generator=generator)
    loss: Tensor = (model(inputs[part]) - 1).square().mean()
    return loss


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_squares(optimizer: Optimizer, factor: float = 1.0) -> Tensor:
    """Return the present gradients' squared norms times `factor`, as of a smaller batch; NaN without a gradient."""
    values = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return torch.tensor([math.nan if g is None else factor * float(g.square().sum()) for g in values])


FORMS: dict[str, dict[str, Any]] = {
    "tensor": {"granularity": "tensor"},
    "model": {"granularity": "model", "delta": 2.0, "exponent": 2.0, "smoothing": 0.5},
    "warm": {"granularity": "tensor", "scale_warmup": 9, "smoothing": 0.8},
    "update": {"granularity": "model", "exponent": 2.0, "gate": "none", "apply": "update", "smoothing": 0.9},
    "all": {"granularity": "tensor", "exponent": 1.5, "smoothing": 0.9, "scale_warmup": 9, "apply": "update"},
}


def wrap(model: nn.Module, base: Optimizer | None = None, **form: Any) -> TulaOptimizer:
    params = list(model.parameters())
    form = {"small_batch": SMALL, "large_batch": LARGE, **form}
    return TulaOptimizer(base or SGD(params, lr=0.1, momentum=0.9), **form)


def step_once(model: nn.Module, optimizer: TulaOptimizer, step: int) -> None:
    """Take one step with norms of small gradients that change from step to step."""
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, step))
    optimizer.observe_small(gradient_squares(optimizer, 1.5 + math.sin(step)), LOCAL)
    optimizer.step()


def train(model: nn.Module, optimizer: TulaOptimizer, steps: range) -> None:
    for step in steps:
        step_once(model, optimizer, step)


# mixed precision


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_taken_after_unscaling(form: str) -> None:
    results = []
    for scale in (1.0, 2.0**10):
        model = make_model()
        optimizer, scaler = wrap(model, **FORMS[form]), GradScaler("cpu", init_scale=scale, growth_interval=1000)
        for step in range(6):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(loss_of(model, step)))
            scaler.unscale_(optimizer)
            optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
            scaler.step(optimizer)
            scaler.update()
        results.append((weights(model), optimizer.statistics(), optimizer.noise()))
    assert torch.equal(results[0][0], results[1][0]), "powers of two must not change a bit"
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("form", FORMS)
def test_a_step_that_the_scaler_skips_leaves_everything_as_it_was(form: str) -> None:
    model = make_model()
    optimizer, scaler = wrap(model, **FORMS[form]), GradScaler("cpu", init_scale=4.0)
    train(model, optimizer, range(4))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(loss_of(model, 4)))
    next(p.grad for p in model.parameters() if p.grad is not None).fill_(math.inf)
    scaler.unscale_(optimizer)
    optimizer.observe_small(gradient_squares(optimizer, 99.0), LOCAL)
    scaler.step(optimizer)
    scaler.update()
    assert str(optimizer.state_dict()) == str(before)
    # norms are discarded with their gradients
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, 5))
    factors = [f if f is None else f.item() for f in optimizer.gradscale]
    optimizer.step()
    assert [f if f is None else f.item() for f in optimizer.gradscale] == factors
    assert torch.equal(optimizer.state_dict()[STATE_KEY]["averages"], before[STATE_KEY]["averages"])


def test_norms_are_used_once_and_an_overflow_is_no_pair_for_the_noise() -> None:
    model = make_model()
    optimizer = wrap(model, granularity="tensor", smoothing=0.5)
    train(model, optimizer, range(2))
    seen = optimizer.noise().noise_scale
    averages = optimizer.state_dict()[STATE_KEY]["averages"]
    # zeroed by the model, which the optimizer does not see
    model.zero_grad()
    torch.autograd.backward(loss_of(model, 2))
    optimizer.step()
    assert torch.equal(optimizer.state_dict()[STATE_KEY]["averages"], averages)
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, 3))
    for parameter, bad in zip(model.parameters(), (math.nan, 1.0, 1.0, 1.0), strict=True):
        known(parameter.grad).mul_(bad)
    optimizer.observe_small(gradient_squares(optimizer, 7.0), LOCAL)
    optimizer.step()
    assert optimizer.noise().noise_scale == pytest.approx(seen, nan_ok=True)
    assert math.isfinite(seen)


def test_bfloat16_weights_are_scaled_in_their_own_type() -> None:
    for form in ({"granularity": "tensor"}, {"granularity": "tensor", "apply": "update"}, {"granularity": "element"}):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = TulaOptimizer(SGD([parameter], lr=0.5), small_batch=8, large_batch=128, gate="none", **form)  # type: ignore[arg-type]  # a mapping of options
        ones = torch.ones(4, dtype=torch.bfloat16)
        optimizer.update_gradscale([2 * ones], [ones])
        parameter.grad = ones.clone()
        optimizer.step()
        assert parameter.dtype == torch.bfloat16
        # 1 − 0.5 · 2
        assert parameter.tolist() == [0.0] * 4


# gradients that are made in several ways


@pytest.mark.parametrize("form", FORMS)
def test_accumulated_gradients_train_as_those_of_the_whole_batch(form: str) -> None:
    whole, parts = make_model(), make_model()
    optimizers = [wrap(whole, **FORMS[form]), wrap(parts, **FORMS[form])]
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss_of(whole, step))
        for start in range(0, 16, 4):
            torch.autograd.backward(loss_of(parts, step, slice(start, start + 4)) / 4)
        for optimizer in optimizers:
            optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
            optimizer.step()
    torch.testing.assert_close(weights(whole), weights(parts))
    assert optimizers[0].statistics() == pytest.approx(optimizers[1].statistics(), rel=1e-4, abs=1e-6)


def test_clipping_comes_first_and_does_not_change_the_factors_if_informed() -> None:
    model = make_model()
    optimizer, informed = wrap(model, granularity="tensor", gate="none"), wrap(make_model(), granularity="tensor")
    torch.autograd.backward(loss_of(model, 0))
    for mine, other in zip(optimizer.parameters(), informed.parameters(), strict=True):
        other.grad = known(mine.grad).clone()
    large = gradient_squares(optimizer)
    optimizer.observe_small(large * 3, LOCAL)
    optimizer.step()
    assert nn.utils.clip_grad_norm_(informed.parameters(), 0.1) > 0.2, "clipping must do something"
    informed.observe_small(large * 3, LOCAL, large)
    informed.step()
    for one, two in zip(optimizer.gradscale, informed.gradscale, strict=True):
        assert one is not None
        assert two is not None
        torch.testing.assert_close(one, two)
    assert informed.statistics().gradient_norm == pytest.approx(0.1, rel=1e-3), "the gate sees what the base will see"


def test_the_gate_uses_norms_before_clipping_if_informed() -> None:
    """Gradients that are all clipped to one norm would seem to be equal."""
    optimizers = [wrap(make_model(), granularity="tensor", gate="paper") for _ in range(3)]
    for step in range(4):
        for name, optimizer in zip(("whole", "clipped", "informed"), optimizers, strict=True):
            optimizer.zero_grad()
            for parameter in optimizer.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            if name != "whole":
                norm = nn.utils.clip_grad_norm_(optimizer.parameters(), 0.1)
            if name == "informed":
                optimizer.observe_clipping(torch.clamp(0.1 / (norm + 1e-6), max=1.0))
            optimizer.step()
    whole, clipped, informed = (optimizer.statistics().sensitivity for optimizer in optimizers)
    assert clipped == pytest.approx(0.0, abs=1e-5)
    assert informed == pytest.approx(whole, rel=1e-4)
    assert whole == pytest.approx((4 / 3) ** 2 - 1, rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_zeroed_and_absent_gradients_train_the_same(form: str) -> None:
    models = [make_model(), make_model()]
    for model, to_none in zip(models, (True, False), strict=True):
        optimizer = wrap(model, **FORMS[form])
        for step in range(6):
            optimizer.zero_grad(set_to_none=to_none)
            torch.autograd.backward(loss_of(model, step))
            optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
            optimizer.step()
    assert torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("granularity", ["tensor", "model"])
@pytest.mark.parametrize("apply", ["gradient", "update"])
def test_frozen_and_unused_parameters_neither_move_nor_count(granularity: str, apply: str) -> None:
    model, alone = make_model(), make_model()
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3))
    form: dict[str, Any] = {"small_batch": SMALL, "large_batch": LARGE, "granularity": granularity, "apply": apply}
    params, others = list(model.parameters()), list(alone.parameters())
    optimizer = TulaOptimizer(SGD([*params, unused], lr=0.1), gate="none", **form)
    reference = TulaOptimizer(SGD([others[0], *others[2:]], lr=0.1), gate="none", **form)
    for step in range(3):
        for each, its_model in ((optimizer, model), (reference, alone)):
            each.zero_grad()
            torch.autograd.backward(loss_of(its_model, step))
            each.observe_small(gradient_squares(each, 2.0), LOCAL)
            each.step()
    assert [factor is None for factor in optimizer.gradscale] == [False, True, False, False, True]
    assert torch.equal(weights(model), weights(alone))
    assert torch.equal(unused, torch.ones(3))
    assert optimizer.noise() == pytest.approx(reference.noise(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.9])
@pytest.mark.parametrize("way", ["observe_small", "update_gradscale"])
def test_a_parameter_that_is_frozen_on_the_way_no_longer_decides_a_shared_factor(way: str, smoothing: float) -> None:
    params = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(3))]
    form: dict[str, Any] = {"granularity": "model", "exponent": 2.0, "smoothing": smoothing}
    optimizer = TulaOptimizer(SGD(params, lr=0.0), small_batch=SMALL, large_batch=SMALL * 64, gate="none", **form)
    # gradients of ratios 8 and 2
    small = [torch.full((300,), math.sqrt(8.0)), torch.full((3,), math.sqrt(2.0))]
    for frozen in (False, True):
        for _ in range(3):
            for parameter, without in zip(params, (frozen, False), strict=True):
                parameter.grad = None if without else torch.ones_like(parameter)
            gradients = [None if p.grad is None else g for p, g in zip(params, small, strict=True)]
            if way == "observe_small":
                squares = [math.nan if g is None else g.square().sum().item() for g in gradients]
                optimizer.observe_small(torch.tensor(squares), SMALL)
            else:
                optimizer.update_gradscale(gradients, [p.grad for p in params])
            optimizer.step()
    factor = known(optimizer.gradscale[1])
    assert factor.item() == pytest.approx(2.0, rel=1e-5)


def test_a_refused_gradient_leaves_the_norms_for_the_next_step() -> None:
    model = make_model()
    optimizer = wrap(model, granularity="tensor")
    torch.autograd.backward(loss_of(model, 0))
    optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
    parameter = optimizer.parameters()[0]
    good = known(parameter.grad)
    parameter.grad = good.to_sparse()
    before = weights(model)
    with pytest.raises(TypeError, match=r"dense real gradients.*sparse"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert (optimizer.steps, optimizer.gradscale) == (0, [None] * 4)
    parameter.grad = good
    optimizer.step()
    assert None not in optimizer.gradscale


def test_a_factor_may_span_several_groups_of_which_each_keeps_its_rate() -> None:
    one, several = make_model(), make_model()
    params = list(several.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:3]}, {"params": params[3:], "lr": 0.05}]
    form: dict[str, Any] = {"granularity": "model", "apply": "update", "smoothing": 0.5, "gate": "none"}
    optimizers = [wrap(one, **form), wrap(several, SGD(groups, lr=0.1, momentum=0.9), **form)]
    for optimizer, model in zip(optimizers, (one, several), strict=True):
        step_once(model, optimizer, 0)
    factors = [[f.item() for f in optimizer.gradscale if f is not None] for optimizer in optimizers]
    assert factors[0][0] == pytest.approx(factors[0][1])
    torch.testing.assert_close(params[:3], list(one.parameters())[:3])
    assert not torch.equal(params[3], list(one.parameters())[3])


def test_a_group_that_comes_later_has_a_factor() -> None:
    model, extra = make_model(), nn.Parameter(torch.zeros(2))
    params = list(model.parameters())
    optimizer = TulaOptimizer(
        SGD(params, lr=0.1), small_batch=SMALL, large_batch=LARGE, granularity="tensor", smoothing=0.9
    )
    train(model, optimizer, range(3))
    before = optimizer.state_dict()[STATE_KEY]["averages"]
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(2)
    optimizer.observe_small(gradient_squares(optimizer, 4.0), SMALL)
    optimizer.step()
    factor = known(optimizer.gradscale[-1])
    assert factor.item() == pytest.approx(2.0)
    assert (before.shape, optimizer.state_dict()[STATE_KEY]["averages"].shape) == ((3, 4), (3, 5))


# schedulers, closures, memory formats, compilers, ZeRO


@pytest.mark.parametrize("form", FORMS)
def test_a_closure_is_looked_at_after_it_ran(form: str) -> None:
    by_closure, by_hand = make_model(), make_model()
    first, second = wrap(by_closure, **FORMS[form]), wrap(by_hand, **FORMS[form])
    for step in range(6):

        def closure(step: int = step) -> float:
            first.zero_grad()
            loss = loss_of(by_closure, step)
            torch.autograd.backward(loss)
            first.observe_small(gradient_squares(first, 1.5 + math.sin(step)), LOCAL)
            return loss.item()

        assert first.step(closure) == pytest.approx(loss_of(by_hand, step).item())
        step_once(by_hand, second, step)
    assert torch.equal(weights(by_closure), weights(by_hand))
    assert first.statistics() == second.statistics()


def test_the_whole_update_of_a_base_that_calls_its_closure_often_is_scaled_once() -> None:
    moved = []
    for scale in (1.0, 0.5):
        model = make_model()
        before = weights(model)
        optimizer = wrap(model, LBFGS(model.parameters(), max_iter=4), static_scale=scale, gate="none", apply="update")

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            torch.autograd.backward(loss)
            return loss

        optimizer.step(closure)
        moved.append(weights(model) - before)
    torch.testing.assert_close(moved[1], moved[0] / 2)


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("apply", ["gradient", "update"])
def test_channels_last_trains_the_same_and_stays_so(
    granularity: Any, apply: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # makes the step cut these tensors
    monkeypatch.setattr(applying, "HEAP_ELEMENTS", 50)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3)).to(memory_format=memory_format)  # type: ignore[call-overload]  # torch's stubs lack it
        base = SGD(model.parameters(), lr=0.1)
        optimizer = TulaOptimizer(
            base, small_batch=8, large_batch=128, granularity=granularity, apply=apply, gate="none"
        )
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
            torch.autograd.backward(model(inputs.to(memory_format=memory_format)).square().mean())
            large = [p.grad for p in model.parameters()]
            optimizer.update_gradscale([g * 0.7 for g in large if g is not None], large)
            optimizer.step()
        assert model[0].weight.is_contiguous(memory_format=memory_format)
        results.append(weights(model))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.processes
@pytest.mark.skipif(not is_dynamo_supported(), reason="torch.compile does not know this Python yet")
def test_a_compiled_model_trains_as_the_plain_one() -> None:
    """No code is generated, because that takes a minute and leads to the same gradients."""
    plain, model = make_model(), make_model()
    compiled: Any = torch.compile(model, backend="aot_eager")
    optimizers = [wrap(plain, **FORMS["all"]), wrap(model, **FORMS["all"])]
    for step in range(3):
        for optimizer, called in zip(optimizers, (plain, compiled), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(called, step))
            optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
            optimizer.step()
    torch.testing.assert_close(weights(plain), weights(model), rtol=1e-4, atol=1e-5)


@pytest.mark.processes
@pytest.mark.skipif(not is_dynamo_supported(), reason="torch.compile does not know this Python yet")
def test_a_compiled_step_is_the_plain_one() -> None:
    """The optimizer itself is not compiled."""
    models = make_model(), make_model()
    for model, backend in zip(models, (None, "eager"), strict=True):
        optimizer = wrap(model, granularity="tensor", apply="update")

        def train_step(step: int, optimizer: TulaOptimizer = optimizer, model: nn.Module = model) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step))
            optimizer.observe_small(gradient_squares(optimizer, 2.0), LOCAL)
            optimizer.step()

        compiled = train_step if backend is None else torch.compile(train_step, backend=backend)
        for step in range(3):
            compiled(step)
    assert torch.equal(weights(models[0]), weights(models[1]))


@pytest.fixture
def group_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("form", ["tensor", "update", "all"])
def test_zero_redundancy_trains_as_the_plain_base_and_resumes(form: str) -> None:
    plain, sharded, resumed = make_model(), make_model(), make_model()

    def zero(model: nn.Module) -> TulaOptimizer:
        return wrap(model, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01), **FORMS[form])

    optimizers = [wrap(plain, AdamW(plain.parameters(), lr=0.01), **FORMS[form]), zero(sharded)]
    for optimizer, model in zip(optimizers, (plain, sharded), strict=True):
        train(model, optimizer, range(5))
    assert torch.equal(weights(plain), weights(sharded))
    base = optimizers[1].base
    assert isinstance(base, ZeroRedundancyOptimizer)
    base.consolidate_state_dict(to=0)
    resumed.load_state_dict(sharded.state_dict())
    restored = zero(resumed)
    restored.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    train(resumed, restored, range(5, 8))
    train(sharded, optimizers[1], range(5, 8))
    assert torch.equal(weights(resumed), weights(sharded))


# resume and change of batch


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", [SGD, pytest.param(AdamW, marks=pytest.mark.processes)])
def test_resume_equals_uninterrupted_bit_for_bit_with_every_option(form: str, base: type[Optimizer]) -> None:
    def build(model: nn.Module) -> TulaOptimizer:
        return wrap(model, base(model.parameters(), lr=0.01), **FORMS[form])  # type: ignore[call-arg]  # all have lr

    straight, resumed = make_model(), make_model()
    optimizer = build(straight)
    train(straight, optimizer, range(5))
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(straight, optimizer, range(5, 12))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    restored = build(resumed)
    restored.load_state_dict(saved["optimizer"])
    train(resumed, restored, range(5, 12))
    assert torch.equal(weights(straight), weights(resumed))
    assert str(restored.state_dict()) == str(optimizer.state_dict())
    assert restored.statistics() == optimizer.statistics()


def test_after_a_fall_back_warm_up_and_interval_go_on_with_the_data_seen() -> None:
    """With half the batch both last twice as many steps, and the steps so far count twice."""
    model = make_model()
    before = wrap(model, scale_warmup=8, update_interval=4)
    for step in range(4):
        before.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        before.step()
    after = wrap(make_model(), scale_warmup=16, update_interval=8, large_batch=LARGE // 2)
    after.load_state_dict(before.state_dict())
    assert (before.steps, before.update_due) == (4, True)
    assert (after.steps, after.update_due) == (8, True)


@pytest.mark.parametrize("shape", [(3, 7), (2, 4), (3,), (3, 4, 1)])
def test_averages_of_other_parameters_are_refused_before_anything_changes(shape: tuple[int, ...]) -> None:
    model = make_model()
    optimizer = wrap(model, granularity="tensor")
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    state[STATE_KEY]["averages"] = torch.zeros(shape)
    target = wrap(make_model(), granularity="tensor")
    with pytest.raises(ValueError, match="averages belong to other parameters"):
        target.load_state_dict(state)
    assert target.steps == 0


@pytest.mark.parametrize("large_batch", [LARGE, LARGE // 2])
def test_a_state_taken_before_an_added_groups_first_update_goes_on_as_it_was(large_batch: int) -> None:
    seen = []
    saved: dict[str, Any] = {}
    for resumed in (False, True):
        model = make_model()
        optimizer = wrap(model, SGD(model[0].parameters(), lr=0.1), granularity="tensor", smoothing=0.5)
        if not resumed:
            train(model, optimizer, range(3))
        optimizer.add_param_group({"params": list(model[2].parameters())})
        if resumed:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        else:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        optimizer.set_batch(large_batch)
        train(model, optimizer, range(3, 6))
        seen.append(weights(model))
        assert None not in optimizer.gradscale
    assert torch.equal(seen[0], seen[1])


SQUARE, TRACE = 3.0, 400.0


def law(batch: float) -> float:
    """Return E|g|² at a batch."""
    return SQUARE + TRACE / batch


def one_norm(optimizer: TulaOptimizer, parameter: Tensor) -> None:
    parameter.grad = torch.full_like(parameter, math.sqrt(law(optimizer.large_batch)))
    optimizer.observe_small(torch.tensor([law(16)]), 16)
    optimizer.step()


@pytest.mark.parametrize("way", ["set_batch", "state"])
@pytest.mark.parametrize("batches", [(8, 64), (8, 512), (4, 64), (32, 128)])
def test_averages_follow_a_change_of_batch(way: str, batches: tuple[int, int]) -> None:
    """The averages become what they would be if all batches had had the new size, so the factor is right at once."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    form: dict[str, Any] = {"granularity": "tensor", "smoothing": 0.95, "s_max": 99.0}
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=SMALL, large_batch=LARGE, **form)
    for _ in range(3):
        one_norm(optimizer, parameter)
    if way == "set_batch":
        optimizer.set_batch(batches[1], batches[0])
    else:
        state = optimizer.state_dict()
        optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=batches[0], large_batch=batches[1], **form)
        optimizer.load_state_dict(state)
    one_norm(optimizer, parameter)
    (factor,) = optimizer.gradscale
    assert factor is not None
    assert factor.item() == pytest.approx(math.sqrt(law(batches[0]) / law(batches[1])), rel=1e-5)


@pytest.mark.parametrize("spike_guard", [False, True])
@pytest.mark.parametrize("reference", [1.5, SMALL, 64, LARGE])
def test_factors_can_refer_to_another_batch_while_averages_stay(reference: float, spike_guard: bool) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    form: dict[str, Any] = {"granularity": "tensor", "smoothing": 0.95, "spike_guard": spike_guard, "exponent": 2.0}
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=SMALL, large_batch=LARGE, **form)
    one_norm(optimizer, parameter)
    optimizer.set_reference(reference)
    assert optimizer.small_batch == SMALL
    assert optimizer.s_max == pytest.approx(LARGE / reference)
    one_norm(optimizer, parameter)
    (factor,) = optimizer.gradscale
    assert factor is not None
    assert factor.item() == pytest.approx(law(reference) / law(LARGE), rel=1e-5)
    averages = optimizer.state_dict()[STATE_KEY]["averages"]
    assert (averages[:2] / averages[2]).flatten().tolist() == pytest.approx([law(SMALL), law(LARGE)])
    optimizer.set_batch(LARGE)
    assert optimizer.s_max == LARGE / SMALL


@pytest.mark.parametrize("large_batch", [LARGE, 2 * LARGE])
def test_a_state_brings_its_reference_along_to_the_same_batches(large_batch: int) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    form: dict[str, Any] = {"granularity": "tensor", "exponent": 2.0, "small_batch": SMALL}
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), large_batch=LARGE, **form)
    optimizer.set_reference(1)
    one_norm(optimizer, parameter)
    (factor,) = optimizer.gradscale
    other = TulaOptimizer(SGD([parameter], lr=0.0), large_batch=large_batch, **form)
    other.load_state_dict(optimizer.state_dict())
    assert other.s_max == (optimizer.s_max if large_batch == LARGE else pytest.approx(large_batch / SMALL))
    assert factor is not None
    assert factor.item() > LARGE / SMALL
    assert other.gradscale == ([factor] if large_batch == LARGE else [factor.clamp_max(other.s_max)])


@pytest.mark.parametrize("reference", [1e9, 0.0, math.nan, "1", [1]])
def test_a_state_with_an_impossible_reference_is_refused_and_changes_nothing(reference: object) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = TulaOptimizer(SGD([parameter], lr=0.5), small_batch=SMALL, large_batch=LARGE, granularity="tensor")
    state = optimizer.state_dict()
    state["tula"]["reference"], state["param_groups"][0]["lr"] = reference, 7.0
    with pytest.raises(ValueError, match=f"^state_dict: expected a reference from 1 to {LARGE}"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_warm_up_and_interval_go_on_with_the_data_seen_at_another_batch() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    form: dict[str, Any] = {"granularity": "tensor", "scale_warmup": 100, "update_interval": 60}
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=SMALL, large_batch=LARGE, **form)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(50):
        optimizer.step()
    optimizer.set_batch(LARGE // 2)
    assert (optimizer.steps, optimizer.scale_warmup, optimizer.update_interval) == (100, 200, 120)
    assert not optimizer.update_due
    for _ in range(20):
        optimizer.step()
    assert optimizer.update_due


def test_noise_estimated_below_zero_is_not_stretched_until_nothing_is_left_of_a_step() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    form: dict[str, Any] = {"granularity": "tensor", "exponent": 2.0}
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=SMALL, large_batch=LARGE, **form)
    optimizer.set_reference(1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.observe_small(torch.tensor([0.99]), 16)
    optimizer.step()
    (factor,) = optimizer.gradscale
    assert factor is not None
    assert factor.item() == pytest.approx(1.0)


def test_a_refused_reference_changes_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = TulaOptimizer(SGD([parameter], lr=0.0), small_batch=SMALL, large_batch=LARGE, granularity="tensor")
    before = optimizer.s_max
    for wrong in (0.5, LARGE + 1, math.nan):
        with pytest.raises(ValueError, match=r"^batch: expected from 1 to large_batch"):
            optimizer.set_reference(wrong)
    assert optimizer.s_max == before


# cost


class OperationRecorder(TorchDispatchMode):
    """A mode that records operators, and the largest tensor that one creates."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        new = out if isinstance(out, (list, tuple)) else [out]
        if not self.names[-1].endswith("_"):
            self.largest = max([self.largest, *(each.numel() for each in new if isinstance(each, Tensor))])
        return out


def counted(sizes: Sequence[int], **form: Any) -> OperationRecorder:
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    base = SGD(params, lr=0.1, foreach=True)
    optimizer = TulaOptimizer(base, small_batch=SMALL, large_batch=LARGE, gate="none", **form)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.observe_small(torch.full((len(sizes),), 2.0), LOCAL)
    optimizer.step()
    optimizer.observe_small(torch.full((len(sizes),), 2.0), LOCAL)
    count = OperationRecorder()
    with count:
        optimizer.step()
    return count


@pytest.mark.parametrize("granularity", ["tensor", "model"])
def test_shared_factors_are_never_spread_out_and_norms_are_taken_once(granularity: str) -> None:
    count = counted([10_000] * 3, granularity=granularity)
    assert count.largest < 100
    assert count.names.count("_foreach_norm") == 1
    assert "linalg_vector_norm" not in count.names


@pytest.mark.parametrize("granularity", ["tensor", "model"])
def test_the_number_of_operations_does_not_grow_with_that_of_tensors(granularity: str) -> None:
    few, many = (counted([5] * n, granularity=granularity) for n in (2, 40))
    # views, which are no work on a device
    free = {"unbind", "detach", "alias"}
    counts = [len([name for name in count.names if name not in free]) for count in (few, many)]
    assert counts[0] == counts[1]


def test_full_size_factors_are_mixed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "HEAP_ELEMENTS", 1000)
    parameter = nn.Parameter(torch.ones(100, 100))
    optimizer = TulaOptimizer(SGD([parameter], lr=0.1, foreach=True), small_batch=SMALL, large_batch=LARGE)
    optimizer.update_gradscale([torch.rand(100, 100)], [torch.rand(100, 100)])
    parameter.grad = torch.ones(100, 100)
    with OperationRecorder() as count:
        optimizer.step()
    assert count.largest <= 1000
