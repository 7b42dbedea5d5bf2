"""Have the model of a resumed script take its first pass twice.

DDP regroups its gradient buckets after the first backward pass, which changes the order of
additions. A resumed script therefore passes its first batch an extra time beforehand, and throws
the gradients away. So it adds in the same order as an uninterrupted script.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.attach.hooks.patches import before_forward
from tula_hpc.attach.train.loaders import random_state, set_random_state
from tula_hpc.batches import map_tensors, tensors_of


def rehearse_first_pass(
    model: DistributedDataParallel,
    then: Callable[[], None],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Have a model pass its first training batch twice, and undo all effects of the first pass.

    The model has not been called since it was wrapped. The first pass runs within `around`, which
    undoes its effects elsewhere, and `then` is called after that pass.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # not the wrapper's mode: Lightning leaves the wrapper in evaluation mode
        if model.module.training and torch.is_grad_enabled():
            handle.remove()
            with around():
                _rehearse(model, args, kwargs)
            then()

    handle = before_forward(model, before)


def _rehearse(
    model: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # a forward pass may replace buffers by other tensors
    buffers = [(each._buffers, dict(each._buffers)) for each in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # frozen parameters may follow the trained ones in each forward pass; copied to the host, as
    # a frozen model has many
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    values += [(each, each.detach().to("cpu", copy=True)) for each in frozen]
    numbers = random_state()
    synchronizes = model.require_backward_grad_sync
    # Lightning has another method called once, through a `forward` that removes itself
    replaced = vars(model.module).get("forward")
    for parameter, _ in gradients:
        parameter.grad = None
    model.require_backward_grad_sync = True
    # inputs may be another model's outputs, through which the script has yet to go backward
    own_args, own_kwargs = map_tensors(_as_leaf, (args, kwargs))
    # not the module itself, whose hooks would count another pass
    outputs = model.forward(*own_args, **own_kwargs)  # type: ignore[no-untyped-call] # torch's
    sums: list[Tensor] = [t.float().sum() for t in tensors_of(outputs) if t.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call] # torch's
    model.require_backward_grad_sync = synchronizes
    if replaced is not None:
        vars(model.module)["forward"] = replaced
    set_random_state(numbers)
    with torch.no_grad():
        for now, before in buffers:
            now.update(before)
        for tensor, value in values:
            tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor from which no gradient goes further back."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor
