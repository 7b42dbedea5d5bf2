"""TulaOptimizer behaves like any torch optimizer: schedulers, mixed precision, hooks, closures, groups, state."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, lr_scheduler

from tests.known import known
from tests.optim.test_optimizer_daily import loss_of, make_model, weights
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.optimizer import STATE_KEY


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap(base: Optimizer, **options: Any) -> TulaOptimizer:
    return TulaOptimizer(base, **{"small_batch": 8, "large_batch": 128, **options})


def train(model: nn.Module, optimizer: Optimizer, steps: range, after: Callable[[Tensor], None] | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        torch.autograd.backward(loss)
        optimizer.step()
        if after is not None:
            after(loss.detach())


def random_gradients(optimizer: Optimizer, seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for group in optimizer.param_groups for p in group["params"]]


def updated(optimizer: TulaOptimizer) -> TulaOptimizer:
    optimizer.update_gradscale(random_gradients(optimizer, 1), random_gradients(optimizer, 2))
    return optimizer


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[4]
    ),
}


def run_scheduled(wrapped: bool, name: str, base: Callable[[nn.Module], Optimizer]) -> tuple[Tensor, list[Any]]:
    model = make_model()
    optimizer = wrap(base(model)) if wrapped else base(model)
    scheduler = SCHEDULERS[name](optimizer)
    seen: list[Any] = []

    def after(loss: Tensor) -> None:
        scheduler.step(loss) if name == "plateau" else scheduler.step()
        seen.append({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})

    train(model, optimizer, range(10), after)
    return weights(model), seen


@pytest.mark.parametrize("name", SCHEDULERS)
# SequentialLR itself passes the epoch
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_schedulers_drive_it_as_they_drive_the_base(name: str) -> None:
    bases: list[Callable[[nn.Module], Optimizer]] = [sgd, lambda model: AdamW(model.parameters(), lr=0.01)]
    for base in bases:
        (plain, rates), (wrapped, wrapped_rates) = (run_scheduled(flag, name, base) for flag in (False, True))
        assert torch.equal(plain, wrapped)
        assert rates == wrapped_rates
        assert len({str(rate) for rate in rates}) > 1, "the schedule changed nothing"


def test_a_scheduler_built_on_the_base_before_wrapping_still_works() -> None:
    model = make_model()
    base = sgd(model)
    scheduler = lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = wrap(base)
    train(model, optimizer, range(2), lambda _: scheduler.step())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_groups_and_state_are_the_bases_own_also_after_loading() -> None:
    model = make_model()
    base = sgd(model)
    optimizer = wrap(base)
    train(model, optimizer, range(2))
    for _ in range(2):
        assert optimizer.param_groups is base.param_groups
        assert optimizer.state is base.state
        # replaces both objects
        base.load_state_dict(base.state_dict())


def test_grad_scaler_unscales_before_the_gate_and_skips_overflow() -> None:
    results = []
    for initial in (1.0, 2.0**10):
        model = make_model()
        optimizer = updated(wrap(sgd(model)))
        scaler = GradScaler("cpu", init_scale=initial, growth_interval=100)
        for step in range(6):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(loss_of(model, step)))
            if step == 3:
                next(p.grad for p in model.parameters() if p.grad is not None).fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.steps == 5, "the step with the overflow was taken"
        results.append((weights(model), optimizer.statistics()))
    (one, statistics), (two, other_statistics) = results
    assert torch.equal(one, two), "powers of two must not change a bit"
    assert statistics == other_statistics


def test_grad_scaler_works_with_a_fused_base() -> None:
    """Fused optimizers apply the scale themselves; the gate must see unscaled gradients nevertheless."""
    model = make_model()
    optimizer = wrap(Adam(model.parameters(), lr=0.01, fused=True))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    loss = loss_of(model, 0)
    torch.autograd.backward(scaler.scale(loss))
    scaler.step(optimizer)
    plain = make_model()
    torch.autograd.backward(loss_of(plain, 0))
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm().item()
    assert optimizer.statistics().gradient_norm == pytest.approx(norm, rel=1e-5)


def test_lbfgs_may_call_its_closure_again_and_again() -> None:
    model = make_model()
    optimizer = wrap(LBFGS(model.parameters(), max_iter=5))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        torch.autograd.backward(loss)
        return loss

    before = loss_of(model, 0).item()
    optimizer.step(closure)
    assert loss_of(model, 0).item() < before
    assert optimizer.steps == 1


def test_hooks_run_around_the_scaled_step() -> None:
    model = make_model()
    optimizer = wrap(sgd(model), static_scale=2.0, delta=math.inf)
    norms: list[tuple[str, float]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            norms.append((name, torch.cat(gradients).norm().item()))

        return hook

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.base.register_step_pre_hook(note("base"))
    train(model, optimizer, range(2))
    names, values = zip(*norms, strict=True)
    assert names == ("before", "base", "after") * 2
    assert values[3] * 2 == pytest.approx(values[4])
    assert values[4] == values[5]


def test_state_dict_hooks_run() -> None:
    optimizer = wrap(sgd(make_model()))
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(f"load {state['extra']}"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "load 1", "loaded"]


def test_added_groups_are_stepped_scaled_and_saved() -> None:
    model, extra = make_model(), nn.Parameter(torch.zeros(2))
    optimizer = updated(wrap(sgd(model), delta=math.inf))
    mean_before = optimizer.statistics().scale_mean
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    assert [factor is None for factor in optimizer.gradscale] == [False] * 4 + [True]
    assert optimizer.statistics().scale_mean != mean_before, "the added group has two elements of scale 1"
    updated(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        extra.grad = torch.ones(2)
        optimizer.step()
    assert optimizer.gradscale[-1] is not None
    torch.testing.assert_close(extra.grad, optimizer.gradscale[-1])
    assert len(optimizer.state_dict()[STATE_KEY]["gradscale"]) == 5


@pytest.mark.parametrize("options", [{}, {"static_scale": 1.5}, {"update_interval": 4}])
def test_resume_equals_uninterrupted_bit_for_bit(options: dict[str, Any]) -> None:
    def build(model: nn.Module) -> TulaOptimizer:
        return wrap(sgd(model), **options)

    straight = make_model()
    optimizer = build(straight)
    if "static_scale" not in options:
        updated(optimizer)
    train(straight, optimizer, range(5))
    is_due = optimizer.update_due
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(straight, optimizer, range(5, 12))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = make_model()
    resumed.load_state_dict(saved["model"])
    restored = build(resumed)
    restored.load_state_dict(saved["optimizer"])
    assert restored.update_due == is_due
    train(resumed, restored, range(5, 12))
    assert torch.equal(weights(straight), weights(resumed))
    assert (restored.steps, restored.update_due) == (optimizer.steps, optimizer.update_due)
    assert restored.statistics() == optimizer.statistics()
    assert str(restored.state_dict()) == str(optimizer.state_dict())


def test_state_saved_before_the_first_step_loads() -> None:
    optimizer = wrap(sgd(make_model()))
    optimizer.load_state_dict(wrap(sgd(make_model())).state_dict())
    assert optimizer.steps == 0
    assert math.isnan(optimizer.statistics().sensitivity)


def test_loaded_state_is_a_copy() -> None:
    model = make_model()
    source = updated(wrap(sgd(model)))
    train(model, source, range(1))
    state = source.state_dict()
    target = wrap(sgd(make_model()))
    target.load_state_dict(state)
    for tensor in (state[STATE_KEY]["gradscale"][0], *state[STATE_KEY]["sensitivity"].values()):
        tensor.zero_()
    assert known(target.gradscale[0]).any()
    assert target.statistics().gradient_norm > 0


def test_loading_into_a_smaller_batch_clamps() -> None:
    state = updated(wrap(sgd(make_model()))).state_dict()
    optimizer = wrap(sgd(make_model()), large_batch=32)
    optimizer.load_state_dict(state)
    assert optimizer.statistics().scale_max == optimizer.s_max == 2.0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop(STATE_KEY), "no 'tula' entry"),
        (lambda state: state[STATE_KEY].update(version=3), "version"),
        (lambda state: state[STATE_KEY].update(gradscale=[None]), "other parameters"),
        (lambda state: state[STATE_KEY]["gradscale"].__setitem__(0, torch.ones(3)), "other parameters"),
    ],
)
def test_foreign_state_is_refused_before_anything_changes(spoil: Callable[[dict[str, Any]], Any], message: str) -> None:
    state = updated(wrap(SGD(make_model().parameters(), lr=7.0))).state_dict()
    optimizer = wrap(sgd(make_model()))
    spoil(state)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_deep_copy_trains_on_like_the_original() -> None:
    model = make_model()
    optimizer = updated(wrap(sgd(model)))
    # patches step, which must not follow into the copy
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, range(4))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert scheduler.optimizer is optimizer
    for trained, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(trained, its_optimizer, range(4, 8))
    assert torch.equal(weights(model), weights(twin))
    assert twin_optimizer.steps == optimizer.steps == 8


def test_repr_names_it() -> None:
    assert repr(wrap(sgd(make_model()))).startswith("TulaOptimizer")
