"""Reference gradient: the gradient of a small batch at the weights of the large one."""

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
    autocast: AbstractContextManager[Any] | None = None,
    loss_scale: float = 1.0,
) -> list[Tensor | None]:
    """Return the gradient of the mean loss on a (sub-)batch, averaged over the workers.

    Training goes on as if this call had not happened: `.grad`, all buffers (BatchNorm's running
    statistics) and the random number generators of the CPU and of the parameters' devices are bit
    for bit as before. The model is used in the mode (train or eval) that it is in.

    `model` is the plain module, `ddp.module` rather than the DistributedDataParallel around it, and
    `loss(output, targets)` a mean over the batch. All workers have equally many samples, as in DDP:
    the average over workers is then the gradient over all samples. Forward pass and loss run within
    `autocast`. The loss is multiplied, the gradient divided by `loss_scale`, so that small float16
    gradients do not vanish.

    Returns:
        A gradient of each parameter's shape and type, in order. None where the parameter is frozen,
        or where the loss does not depend on it on any worker.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        return [None] * len(parameters)
    gradients = local_gradient(
        model, loss, inputs, targets, trainable, autocast=autocast, loss_scale=loss_scale
    )
    with torch.no_grad():
        averages = average_over_workers(gradients, trainable)
    by_parameter = dict(zip(trainable, averages, strict=True))
    return [by_parameter.get(parameter) for parameter in parameters]


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
    """Return this worker's own gradient without an exchange, and leave no trace either.

    The arguments are those of `reference_gradient`; there is at least one parameter, and all are
    trainable.

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
    autocast: AbstractContextManager[Any] | None = None,
) -> Iterator[Tensor]:
    """Yield the loss with its graph, and restore buffers and random numbers afterwards.

    The random numbers are those of the CPU and of the parameters' devices. The arguments are those
    of `reference_gradient`.
    """
    accelerators = {p.device for p in parameters if p.device.type != "cpu"}
    # without accelerators the kind has no effect
    kind = next((device.type for device in accelerators), "cuda")
    indices = sorted(device.index or 0 for device in accelerators)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), torch.random.fork_rng(indices, device_type=kind):
        with autocast or nullcontext():
            # this works on copies of the buffers; the module gets its own back in any case
            value = loss(functional_call(model, buffers, (inputs,)), targets)
        yield value


def average_over_workers(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> Sequence[Tensor | None]:
    """Return the mean over the workers, by one all-reduce; a single worker keeps its own.

    A parameter that only some workers used counts as zero on the others. The number of workers that
    used each parameter is appended to the gradients, so that all agree on which entries are None.
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
    """Return one vector in the parameters' order, zeros for None, with `behind` at its end.

    Its device and type are those of `flat_kind`.
    """
    device, dtype = flat_kind(parameters)
    pieces: list[Tensor] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            pieces.append(torch.zeros(parameter.numel(), device=device, dtype=dtype))
        else:
            # gradients of embeddings may be sparse
            pieces.append(gradient.to_dense().to(device, dtype).reshape(-1))
    return torch.cat([*pieces, *(tensor.to(device, dtype) for tensor in behind)])


def flat_kind(parameters: Sequence[Tensor]) -> tuple[torch.device, torch.dtype]:
    """Return the first parameter's device, and a type for all of them, at least float32."""
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return parameters[0].device, dtype


def unflatten(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into tensors of the parameters' shapes, types and devices."""
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [
        piece.view(p.shape).to(p.device, p.dtype)
        for piece, p in zip(pieces, parameters, strict=True)
    ]
