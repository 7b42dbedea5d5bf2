"""Norms that the optimizer is given for its next gradients count as its own, for one step."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from tests.optim.test_optimizer_options import (
    LARGE,
    LOCAL,
    NORM_FORMS,
    gradients,
    parameters,
    set_gradients,
    square_norms,
    squares_of,
    wrap,
)
from tula_hpc.gradients.norms import foreach_norms
from tula_hpc.optim import TulaOptimizer


def train(
    form: dict[str, Any], *, is_given: bool, absent: int | None = None
) -> tuple[list[Tensor], TulaOptimizer, int]:
    """Return the weights after some steps, the optimizer, and how often it computed norms."""
    params = parameters()
    optimizer = wrap(params, SGD(params, lr=0.1, momentum=0.9), delta=0.7, **form)
    with mock.patch("tula_hpc.optim.optimizer.foreach_norms", wraps=foreach_norms) as taken:
        for step in range(5):
            values: list[Tensor | None] = list(gradients(step))
            if absent is not None:
                values[absent] = None
            optimizer.zero_grad()
            set_gradients(params, values)
            if form["granularity"] != "element":
                optimizer.observe_small(4 * square_norms(values), LOCAL)
            if is_given:
                optimizer.observe_norms(square_norms(values))
            optimizer.step()
    return [p.detach() for p in params], optimizer, taken.call_count


@pytest.mark.parametrize("absent", [None, 1])
@pytest.mark.parametrize("granularity", [*NORM_FORMS, "element"])
def test_a_step_with_given_norms_computes_none_and_does_the_same(granularity: str, absent: int | None) -> None:
    form = {"granularity": granularity}
    mine, one, taken = train(form, is_given=False, absent=absent)
    theirs, other, taken_by_other = train(form, is_given=True, absent=absent)
    assert (taken, taken_by_other) == (5, 0)
    for weight, same in zip(mine, theirs, strict=True):
        torch.testing.assert_close(weight, same)
    assert one.statistics() == pytest.approx(other.statistics())


def steps_with(forget: Any) -> int:
    """Return how many of two steps computed norms, if `forget` is called after norms are given and before the first."""
    params = parameters()
    optimizer = wrap(params, granularity="tensor")
    with mock.patch("tula_hpc.optim.optimizer.foreach_norms", wraps=foreach_norms) as taken:
        optimizer.observe_norms(square_norms([*gradients(0)]))
        forget(optimizer)
        for _ in range(2):
            set_gradients(params, gradients(0))
            optimizer.step()
    return taken.call_count


def test_given_norms_count_for_one_step_and_are_forgotten_with_the_gradients() -> None:
    assert steps_with(lambda _: None) == 1
    assert steps_with(lambda optimizer: optimizer.zero_grad()) == 2
    assert steps_with(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict())) == 2


def test_observed_clipping_is_forgotten_with_the_gradients() -> None:
    params = parameters()
    optimizer = wrap(params, granularity="tensor")
    for load in (False, True):
        optimizer.observe_clipping(0.01)
        if load:
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.zero_grad()
        set_gradients(params, gradients(0))
        optimizer.step()
        assert optimizer.statistics().gradient_norm == pytest.approx(math.sqrt(sum(squares_of(gradients(0)))))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("large_given", [False, True])
def test_the_noise_is_that_of_the_gradient_before_clipping(is_given: bool, large_given: bool) -> None:
    """|G|² = 1 and tr Σ = 64, so that |g|² is 1 + 64 / B."""
    params, small, large, factor = parameters(), 1 + 64 / LOCAL, 1 + 64 / LARGE, 0.1
    optimizer, elements = wrap(params, granularity="tensor"), sum(p.numel() for p in params)
    sizes = torch.tensor([p.numel() for p in params], dtype=torch.float64) / elements
    set_gradients(params, [torch.full_like(p, factor * math.sqrt(large / elements)) for p in params])
    optimizer.observe_clipping(torch.tensor(factor, dtype=torch.float64))
    if large_given:
        optimizer.observe_small(small * sizes, LOCAL, large * sizes)
    else:
        optimizer.observe_small(factor**2 * small * sizes, LOCAL)
    if is_given:
        optimizer.observe_norms(factor**2 * large * sizes)
    optimizer.step()
    assert optimizer.noise() == pytest.approx((64.0, 1.0, 64.0))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_another_number_of_norms_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="squares: expected one number for each of 4 parameters"):
        wrap(parameters()).observe_norms(torch.ones(count))
