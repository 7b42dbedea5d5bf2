"""Scaling of tensors in place, without waiting for the device, and SGD's step with it on a CPU.

A factor s with the share w, a number on the device, counts as 1 + w·(s − 1): s itself where w is 1
or true, exactly 1 where it is 0 or false. Factors that many elements share stay one number: they
are mixed with 1 in one vector and never expanded. A share is 0-dim, bool or from 0 to 1; a factor
has the shape of its tensor or is 0-dim, is on its device, and None stands for the factor 1.

SGD with weight decay makes a temporary as large as each tensor. Above 32 MiB the C library maps new
memory at every step, and the kernel clears each of its pages: for layers of a hundred million
weights that takes as long as the arithmetic. On a CPU, scaling and step therefore go piece by
piece, which reuses the memory and so pays for the scaling. The arithmetic is torch's own,
`torch.optim.sgd.sgd`, and so is its rounding. So a tensor is cut only where all operations then
fall into the same vectors of elements, on the same threads, as for the whole of it (`pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.sgd import sgd

# most elements of full-size factors that are mixed at a time: 64 MiB more memory in float32
PIECE_ELEMENTS = 2**24
# the same on a CPU: the C library reuses the 16 MiB of float32; above 32 MiB it maps new memory
# each time. Smaller pieces are no faster and wait more often for a busy core
HEAP_ELEMENTS = 2**22

Mix = Callable[[Tensor], Tensor]


def multiply_where(
    share: Tensor, gradients: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> None:
    """Multiply dense gradients in place by a share of their factors."""
    for piece in _pieces(
        [_Part((g,), f) for g, f in zip(gradients, factors, strict=True) if f is not None]
    ):
        by = mixed(share, [part.factor for part in piece])
        targets = [part.tensors[0] for part in piece]
        if by[0].dim() == 0 and all(factor is by[0] for factor in by):
            # one kernel for all of them on a GPU
            torch._foreach_mul_(targets, by[0])
        else:
            torch._foreach_mul_(targets, by)


def move_where(
    share: Tensor,
    parameters: Sequence[Tensor],
    before: Sequence[Tensor],
    factors: Sequence[Tensor | None],
) -> None:
    """Set parameters to p_before + s·(p − p_before) in place, for a share of each factor.

    `before` has copies from before the optimizer's step, of the same shapes and types. The result
    is computed as p + (1 − s)·(p_before − p), which leaves p as it is, to the bit, where s is 1.
    """
    triples = zip(parameters, before, factors, strict=True)
    for piece in _pieces([_Part((p, old), f) for p, old, f in triples if f is not None]):
        mix = partial(_rest, share.to(piece[0].factor.device), piece[0].tensors[0].dtype)
        rests = _each(mix, [part.factor for part in piece])
        torch._foreach_lerp_(
            [part.tensors[0] for part in piece], [part.tensors[1] for part in piece], rests
        )


def mixed(share: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """Return 1 + w·(s − 1) of each factor s, all on one device; identical ones stay identical."""
    return _each(partial(_mixed, share.to(factors[0].device)), factors) if factors else []


def copies(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return a copy of each parameter in its memory format, by parameter."""
    into = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
    if into:
        torch._foreach_copy_(into, list(parameters))
    return dict(zip(parameters, into, strict=True))


class _Part(NamedTuple):
    """Tensors of one shape, the first of which is changed, and their factor."""

    tensors: tuple[Tensor, ...]
    factor: Tensor


def _mixed(share: Tensor, factor: Tensor) -> Tensor:
    if share.dtype is torch.bool and factor.device.type != "cpu":
        # a single operation, as each one is a kernel launch
        return torch.where(share, factor, 1.0)
    weight = share.to(factor.dtype)
    # exact at 0 and 1; on a CPU these two are faster than `where`
    return (factor * weight).add_(1 - weight)


def _rest(share: Tensor, dtype: torch.dtype, factor: Tensor) -> Tensor:
    """Return the weight of the old value; `lerp` needs the parameter's own type."""
    return (1 - _mixed(share, factor)).to(dtype)


def _each(mix: Mix, factors: Sequence[Tensor]) -> list[Tensor]:
    """Mix each factor; 0-dim ones all at once, and identical ones stay identical."""
    shared = {id(factor): factor for factor in factors if factor.dim() == 0}
    numbers: dict[int, Tensor] = {}
    if shared:
        values = mix(torch.stack(list(shared.values()))).unbind()
        numbers = dict(zip(shared, values, strict=True))
    return [numbers[id(factor)] if factor.dim() == 0 else mix(factor) for factor in factors]


def _pieces(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield lists of parts of one device and type, with factors up to its limit, or one tensor."""
    opened: dict[tuple[torch.device, torch.dtype, torch.dtype], list[_Part]] = {}
    elements: dict[tuple[torch.device, torch.dtype, torch.dtype], int] = {}
    for part in (cut for whole in parts for cut in _cut(whole)):
        key = (part.factor.device, part.factor.dtype, part.tensors[0].dtype)
        if key in opened and elements[key] + part.factor.numel() > _limit(part.factor):
            yield opened.pop(key)
        piece = opened.setdefault(key, [])
        elements[key] = part.factor.numel() + (elements[key] if piece else 0)
        piece.append(part)
    yield from opened.values()


def _cut(part: _Part) -> list[_Part]:
    """Cut tensors above the limit along their first dimension, on a CPU only."""
    size, limit = part.factor.numel(), _limit(part.factor)
    if part.factor.device.type != "cpu" or part.factor.dim() == 0 or size <= limit:
        return [part]
    rows = max(1, limit * len(part.factor) // size)
    cuts = zip(*(torch.split(tensor, rows) for tensor in (*part.tensors, part.factor)), strict=True)
    return [_Part(tuple(cut[:-1]), cut[-1]) for cut in cuts]


def _limit(factor: Tensor) -> int:
    return min(HEAP_ELEMENTS, PIECE_ELEMENTS) if factor.device.type == "cpu" else PIECE_ELEMENTS


# most elements of a piece
PIECE = HEAP_ELEMENTS
# fewest elements that ATen gives a thread, unless one thread has them all
GRAIN = 2**15
# elements: a multiple of the vectors of ATen's kernels, which round a remainder differently
VECTOR = 64
HYPERPARAMETERS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class _StepPiece(NamedTuple):
    """Tensors of one shape, and the factor of the gradient."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor | None
    factor: Tensor | None


def fits(base: Optimizer, gradients: Mapping[Tensor, Tensor]) -> TypeGuard[SGD]:
    """Tell whether `scale_and_step` equals scaling and then `base.step()` for these gradients.

    It does not where hooks or a scheduler watch the base's step, nor at the base's first step,
    which makes the momenta.
    """
    if type(base) is not SGD or any(each.device.type != "cpu" for each in gradients.values()):
        return False
    watched = "step" in vars(base) or any(
        (
            base._optimizer_step_pre_hooks,
            base._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
            getattr(base, "grad_scale", None) is not None,
            getattr(base, "found_inf", None) is not None,
        )
    )
    return not watched and all(_plain(base, group, gradients) for group in base.param_groups)


def scale_and_step(
    base: SGD,
    share: Tensor,
    gradients: Mapping[Tensor, Tensor],
    factors: Mapping[Tensor, Tensor | None],
) -> None:
    """Multiply gradients in place by a share of their factors, and take the base's step.

    `fits` holds for the base and these gradients, each of which has an entry in `factors`.
    """
    numbers = [factor for factor in factors.values() if factor is not None and factor.dim() == 0]
    once = {id(number): by for number, by in zip(numbers, mixed(share, numbers), strict=True)}
    for group in base.param_groups:
        stepped = [parameter for parameter in group["params"] if parameter in gradients]
        momenta = [base.state[p]["momentum_buffer"] if group["momentum"] else None for p in stepped]
        parts = [
            _StepPiece(p.detach(), gradients[p], m, factors[p])
            for p, m in zip(stepped, momenta, strict=True)
        ]
        for piece in _step_pieces(parts):
            for _, gradient, _, factor in piece:
                if (by := once.get(id(factor))) is not None:
                    gradient.mul_(by)
                else:
                    multiply_where(share, [gradient], [factor])
            _step(group, piece)


@cache
def pieces(elements: int, threads: int) -> int:
    """Return how many equal pieces of `PIECE` / 2 to `PIECE` elements a tensor is cut into; or 1.

    ATen cuts a large tensor evenly among the threads and takes each share vector by vector. Pieces
    that are whole vectors on every thread, as the whole tensor is, give the same bits.
    """
    vectors, rest = divmod(elements, VECTOR * threads)
    if rest or GRAIN * threads > PIECE // 2:
        return 1
    fewest, most = -(-elements // PIECE), elements // (PIECE // 2)
    return next((count for count in range(fewest, most) if vectors % count == 0), 1)


def _plain(base: Optimizer, group: Mapping[str, Any], gradients: Collection[Tensor]) -> bool:
    if group["foreach"] or group["fused"] or group["differentiable"]:
        return False
    stepped = (parameter for parameter in group["params"] if parameter in gradients)
    return not group["momentum"] or all(
        base.state[p].get("momentum_buffer") is not None for p in stepped
    )


def _step(group: Mapping[str, Any], piece: Sequence[_StepPiece]) -> None:
    momenta = [part.momentum for part in piece] if group["momentum"] else []
    columns = [part.parameter for part in piece], [part.gradient for part in piece], momenta
    settings = {name: group[name] for name in HYPERPARAMETERS}
    sgd(*columns, has_sparse_grad=False, foreach=False, fused=False, **settings)


def _step_pieces(parts: Sequence[_StepPiece]) -> Iterator[list[_StepPiece]]:
    """Yield lists of parts that together are about as large as a piece of a large tensor."""
    opened: list[_StepPiece] = []
    held = 0
    for part in chain.from_iterable(map(_cut_to_vectors, parts)):
        if opened and held + part.parameter.numel() > PIECE:
            yield opened
            opened, held = [], 0
        opened.append(part)
        held += part.parameter.numel()
    if opened:
        yield opened


def _cut_to_vectors(part: _StepPiece) -> list[_StepPiece]:
    """Cut tensors along their memory, if all of them have it in the same order without gaps."""
    count = pieces(part.parameter.numel(), torch.get_num_threads())
    full = [tensor for tensor in part if tensor is not None and tensor.dim()]
    in_order = all(tensor.stride() == part.parameter.stride() for tensor in full)
    if (
        count == 1
        or not in_order
        or not torch.ops.aten.is_non_overlapping_and_dense(part.parameter)
    ):
        return [part]
    return [
        _StepPiece(*cut) for cut in zip(*(_cuts(tensor, count) for tensor in part), strict=True)
    ]


def _cuts(tensor: Tensor | None, count: int) -> Sequence[Tensor | None]:
    if tensor is None or not tensor.dim():
        return [tensor] * count
    return tensor.as_strided((tensor.numel(),), (1,)).chunk(count)
