"""The reference gradient: what a small batch says at the weights of the large one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from tula_hpc.batches import Batch


def reference_gradient(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Batch,
    targets: Batch,
    parameters: Sequence[Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    loss_scale: float = 1.0,
) -> list[Tensor | None]:
    """Gradient of the mean loss on a (sub-)batch at the current weights, averaged over the workers.

    Training goes on as if this call had not happened: `.grad`, all buffers (BatchNorm's running
    statistics) and the random number generators of the CPU and of the parameters' devices are bit
    for bit as before. The model is used in the mode (train or eval) that it is in.

    Args: model: The plain module (`ddp.module`, not the DistributedDataParallel around it), called
        as `model(inputs)`. loss: Called as `loss(output, targets)`; a mean over the batch. inputs:
        This worker's part of the batch. The parts of all workers have the same size, as in DDP: the
        average
            over workers is then the gradient over all samples.
        targets: This worker's targets.
        parameters: Parameters in the optimizer's order.
        group: Process group of the average; the default group if None. Without torch.distributed
            nothing is exchanged.
        autocast: Context for forward pass and loss, for example `torch.autocast("cuda",
            torch.bfloat16)`.
        loss_scale: The loss is multiplied, the gradient divided by it, so that small float16
            gradients do not vanish.

    Returns: A gradient of each parameter's shape and type, in order. None where the parameter is
        frozen, or where the loss does not depend on it on any worker.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        return [None] * len(parameters)
    gradients = local_gradient(
        model, loss, inputs, targets, trainable, autocast=autocast, loss_scale=loss_scale
    )
    with torch.no_grad():
        found = average_over_workers(gradients, trainable, group)
    of = dict(zip(trainable, found, strict=True))
    return [of.get(parameter) for parameter in parameters]


def local_gradient(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Batch,
    targets: Batch,
    parameters: Sequence[Tensor],
    *,
    autocast: AbstractContextManager[Any] | None = None,
    loss_scale: float = 1.0,
) -> list[Tensor | None]:
    """This worker's own gradient, exchanged with nobody, and as traceless as `reference_gradient`, whose words apply.

    Args:
        model: The plain module.
        loss: Called as `loss(output, targets)`; a mean over the batch.
        inputs: A batch.
        targets: Its targets.
        parameters: At least one, all trainable.
        autocast: Context for forward pass and loss.
        loss_scale: The loss is multiplied and the gradient divided by it.

    Returns:
        For each parameter its gradient, or None where the loss does not depend on it.
    """
    with traceless_loss(model, loss, inputs, targets, parameters, autocast=autocast) as value:
        gradients = torch.autograd.grad(value * loss_scale, parameters, allow_unused=True)
    if loss_scale == 1.0:
        return list(gradients)
    return [None if gradient is None else gradient / loss_scale for gradient in gradients]


@contextmanager
def traceless_loss(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    inputs: Batch,
    targets: Batch,
    parameters: Sequence[Tensor],
    *,
    seed: int | None = None,
    autocast: AbstractContextManager[Any] | None = None,
) -> Iterator[Tensor]:
    """The loss with its graph, to be derived inside the block; buffers and random numbers are then as before.

    Args:
        model: The plain module.
        loss: Called as `loss(output, targets)`.
        inputs: A batch.
        targets: Its targets.
        parameters: What the loss is derived by; their devices' random numbers are restored.
        seed: Of the random numbers inside the block; None: those that come next.
        autocast: Context for forward pass and loss.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), _untouched_rng(parameters):
        if seed is not None:
            torch.manual_seed(seed)
        with autocast or nullcontext():
            # the module's own buffers are swapped out for the copies meanwhile, and back afterwards
            # whatever happens
            value = loss(functional_call(model, buffers, (inputs,)), targets)
        yield value


@contextmanager
def _untouched_rng(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Restore the random number generators of the CPU and of the parameters' accelerators on the way out."""
    accelerators = {p.device for p in parameters if p.device.type != "cpu"}
    # without devices the kind has no effect
    kind = next((device.type for device in accelerators), "cuda")
    indices = sorted(device.index or 0 for device in accelerators)
    with torch.random.fork_rng(indices, device_type=kind):
        yield


def average_over_workers(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> Sequence[Tensor | None]:
    """Mean over the workers in one all-reduce; what was given, where there is one worker.

    A parameter that only some workers used counts as zero on the others. Behind the gradients
    travels one number for each parameter, how many workers used it, so that all workers agree on
    which entries are None.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return gradients
    workers = dist.get_world_size(group)
    if workers == 1:
        return gradients
    used = torch.tensor([float(gradient is not None) for gradient in gradients])
    flat = flatten(gradients, parameters, used)
    dist.all_reduce(flat, group=group)
    counts = flat[-len(parameters) :].tolist()
    averages = unflatten(flat[: -len(parameters)] / workers, parameters)
    return [average if count else None for average, count in zip(averages, counts, strict=True)]


def flatten(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], *behind: Tensor
) -> Tensor:
    """One vector in the parameters' order, with zeros for None, on the first one's device; `behind` at its end."""
    device, dtype = flat_kind(parameters)
    parts = [
        torch.zeros(p.numel(), device=device, dtype=dtype)
        if g is None
        else g.to(device, dtype).reshape(-1)
        for g, p in zip(gradients, parameters, strict=True)
    ]
    return torch.cat([*parts, *(tensor.to(device, dtype) for tensor in behind)])


def flat_kind(parameters: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    """Device and type of that vector: the first parameter's device, and float32 at least."""
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return parameters[0].device, dtype


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a vector as the parameters are: in shape, type and device."""
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        part.view(p.shape).to(p.device, p.dtype) for part, p in zip(parts, parameters, strict=True)
    ]
