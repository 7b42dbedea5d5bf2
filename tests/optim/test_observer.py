"""An observer of gradients that nothing scales reports what `TulaOptimizer` would, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer

from tests.optim.test_optimizer_options import (
    LARGE,
    LOCAL,
    IdleOptimizer,
    gradients,
    parameters,
    set_gradients,
    square_norms,
    squares_of,
    wrap,
)
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.observer import StepObserver

STEPS = 6


def observed(params: Sequence[Tensor], base: Optimizer | None = None) -> tuple[StepObserver, Optimizer]:
    optimizer = base or IdleOptimizer(params)
    return StepObserver(optimizer, LARGE), optimizer


def pass_norms(
    observer: StepObserver | TulaOptimizer, values: Sequence[Tensor | None], clipped: float, *, norms: bool
) -> None:
    """Pass small gradients with three times these squared norms, the clipping of these gradients, and their norms."""
    observer.observe_small(square_norms(values, 3.0), LOCAL)
    observer.observe_clipping(clipped)
    if norms:
        observer.observe_norms(square_norms(values))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("clipped", [1.0, 0.25])
@pytest.mark.parametrize("absent", [None, 1])
def test_an_observer_reports_what_the_scaling_optimizer_would(norms: bool, clipped: float, absent: int | None) -> None:
    mine, theirs = parameters(), parameters()
    observer, stepped = observed(mine)
    scaling = wrap(theirs, granularity="tensor")
    for step in range(STEPS):
        values: list[Tensor | None] = [gradient * clipped for gradient in gradients(step)]
        if absent is not None:
            values[absent] = None
        for params, each, optimizer in ((mine, observer, stepped), (theirs, scaling, scaling)):
            set_gradients(params, values)
            pass_norms(each, values, clipped, norms=norms)
            optimizer.step()
        assert tuple(observer.step_metrics(1).values()) == pytest.approx(tuple(scaling.statistics()[:2]), nan_ok=True)
        assert tuple(observer.noise()) == pytest.approx(tuple(scaling.noise()), nan_ok=True)
    assert observer.step_metrics(1)["gradient_norm"] == pytest.approx(
        math.sqrt(sum(squares_of([g for g in values if g is not None]))) / clipped
    )


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_steps_stay_what_they_are_bit_for_bit(kind: Any) -> None:
    plain, seen = parameters(), parameters()
    optimizers = [kind(plain, lr=0.1), kind(seen, lr=0.1)]
    observer, _ = observed(seen, optimizers[1])
    for step in range(STEPS):
        pass_norms(observer, gradients(step), 1.0, norms=False)
        for params, optimizer in zip((plain, seen), optimizers, strict=True):
            set_gradients(params, gradients(step))
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))
    assert observer.noise().noise_scale > 0


def test_a_skipped_step_is_not_observed_and_its_norms_are_not_used() -> None:
    params = parameters()
    observer, stepped = observed(params)
    for step in range(STEPS):
        set_gradients(params, gradients(step))
        pass_norms(observer, gradients(step), 1.0, norms=True)
        if step != 2:
            stepped.step()
    other, again = observed(params)
    for step in [0, 1, 3, 4, 5]:
        set_gradients(params, gradients(step))
        pass_norms(other, gradients(step), 1.0, norms=True)
        again.step()
    assert observer.step_metrics(1) == other.step_metrics(1)
    assert observer.noise() == other.noise()


@pytest.mark.parametrize("unscaled", [False, True])
def test_the_loss_scale_of_a_fused_step_is_divided_out_and_an_overflow_is_not_seen(unscaled: bool) -> None:
    params = parameters()
    observer, stepped = observed(params, AdamW(params, lr=0.0, fused=True))
    scaler = GradScaler("cpu", init_scale=1024.0)
    # a scaler scales a loss before its first step
    scaler.scale(torch.zeros(()))
    for step in range(STEPS):
        set_gradients(params, [1024.0 * gradient for gradient in gradients(step)])
        if step == STEPS - 1:
            set_gradients(params, [math.inf * gradient for gradient in gradients(step)])
        if unscaled:
            scaler.unscale_(stepped)
        scaler.step(stepped)
        scaler.update()
    expected = math.sqrt(sum(squares_of(gradients(STEPS - 2))))
    assert observer.step_metrics(1)["gradient_norm"] == pytest.approx(expected, rel=1e-5)


def test_forgotten_norms_are_not_used_at_the_next_step() -> None:
    params = parameters()
    observer, stepped = observed(params)
    set_gradients(params, gradients(0))
    pass_norms(observer, [g * math.inf for g in gradients(1)], 0.5, norms=True)
    observer.forget()
    stepped.step()
    assert observer.step_metrics(1)["gradient_norm"] == pytest.approx(math.sqrt(sum(squares_of(gradients(0)))))
    assert math.isnan(observer.noise().noise_scale)


def test_an_idle_observer_sees_nothing() -> None:
    params = parameters()
    observer, stepped = observed(params)
    for step in range(3):
        observer.idle = step == 1
        set_gradients(params, [g * (1 + step) for g in gradients(0)])
        pass_norms(observer, gradients(step), 1.0, norms=False)
        stepped.step()
    assert observer.step_metrics(1)["sensitivity"] == pytest.approx(8.0)


def test_observed_norms_hold_for_one_step() -> None:
    params = parameters()
    observer, stepped = observed(params)
    set_gradients(params, gradients(0))
    pass_norms(observer, gradients(5), 0.5, norms=True)
    stepped.step()
    first = observer.noise()
    stepped.step()
    assert observer.step_metrics(1)["gradient_norm"] == pytest.approx(math.sqrt(sum(squares_of(gradients(0)))))
    assert observer.noise().noise_scale == first.noise_scale


@pytest.mark.parametrize("norms", [False, True])
def test_an_overflow_is_not_remembered(norms: bool) -> None:
    params = parameters()
    observer, stepped = observed(params)
    for values in (gradients(0), [g * math.inf for g in gradients(1)], [g * math.nan for g in gradients(1)]):
        set_gradients(params, values)
        pass_norms(observer, values, 1.0, norms=norms)
        stepped.step()
    assert not math.isfinite(observer.step_metrics(1)["sensitivity"])
    assert math.isfinite(observer.noise().noise_scale)
    set_gradients(params, [2 * g for g in gradients(0)])
    stepped.step()
    assert observer.step_metrics(1)["sensitivity"] == pytest.approx(3.0)


def test_an_observer_continues_from_its_state() -> None:
    runs = []
    for stop in (None, 3):
        params = parameters()
        observer, stepped = observed(params)
        for step in range(STEPS):
            if step == stop:
                state = observer.extra_state()
                observer, stepped = observed(params)
                observer.load_extra_state(state)
            set_gradients(params, gradients(step))
            pass_norms(observer, gradients(step), 1.0, norms=False)
            stepped.step()
        runs.append((observer.step_metrics(1), observer.noise()))
    assert runs[0] == runs[1]


def test_a_training_that_was_not_observed_is_observed_from_then_on() -> None:
    params = parameters()
    observer, stepped = observed(params)
    set_gradients(params, gradients(0))
    stepped.step()
    observer.load_extra_state(None)
    assert math.isnan(observer.step_metrics(1)["gradient_norm"])


def test_sparse_gradients_are_not_observed() -> None:
    embedding, linear = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)
    optimizer = SGD([*embedding.parameters(), *linear.parameters()], lr=0.1)
    observer = StepObserver(optimizer, LARGE)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(embedding.weight, before)
    assert math.isnan(observer.step_metrics(1)["gradient_norm"])


def test_without_gradients_nothing_is_observed() -> None:
    observer, stepped = observed(parameters())
    stepped.step()
    assert math.isnan(observer.step_metrics(1)["gradient_norm"])
