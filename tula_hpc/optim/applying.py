"""Scale tensors in place by factors of which a number on the device says how much counts; nothing waits for it.

A factor s with the share w counts as 1 + w·(s − 1): s itself where w is 1 or true, exactly 1 where it is 0 or false.
Factors that many elements share stay one number: they are mixed with 1 in one vector and never spread out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_ELEMENTS = 2**24  # full-size factors are mixed for so many elements at a time: 64 MiB more memory in float32
HEAP_ELEMENTS = 2**22  # on a CPU for so many: what they take, 16 MiB in float32, the C library gives again and again;
# above 32 MiB it maps memory anew each time. Smaller pieces are no faster and wait more often for a core that is busy

Mix = Callable[[Tensor], Tensor]


def multiply_where(share: Tensor, gradients: Sequence[Tensor], factors: Sequence[Tensor | None]) -> None:
    """Multiply gradients in place by their factors, as far as `share` says; None stands for the factor 1.

    Args:
        share: 0-dim, bool or from 0 to 1.
        gradients: Dense gradients.
        factors: For each gradient a factor of its shape or 0-dim, on its device.
    """
    for piece in _pieces([_Part((g,), f) for g, f in zip(gradients, factors, strict=True) if f is not None]):
        by = mixed(share, [part.factor for part in piece])
        targets = [part.tensors[0] for part in piece]
        if by[0].dim() == 0 and all(factor is by[0] for factor in by):
            torch._foreach_mul_(targets, by[0])  # one kernel for all of them on a GPU
        else:
            torch._foreach_mul_(targets, by)


def move_where(
    share: Tensor, parameters: Sequence[Tensor], before: Sequence[Tensor], factors: Sequence[Tensor | None]
) -> None:
    """Take parameters to p_before + s·(p − p_before) in place, as far as `share` says; None stands for the factor 1.

    It is computed as p + (1 − s)·(p_before − p), which leaves p as it is, to the bit, where s is 1.

    Args:
        share: 0-dim, bool or from 0 to 1.
        parameters: What the optimizer has made of them.
        before: What they were, of the same shapes and types.
        factors: For each a factor of its shape or 0-dim, on its device.
    """
    triples = zip(parameters, before, factors, strict=True)
    for piece in _pieces([_Part((p, old), f) for p, old, f in triples if f is not None]):
        mix = partial(_rest, share.to(piece[0].factor.device), piece[0].tensors[0].dtype)
        rests = _each(mix, [part.factor for part in piece])
        torch._foreach_lerp_([part.tensors[0] for part in piece], [part.tensors[1] for part in piece], rests)


def mixed(share: Tensor, factors: Sequence[Tensor]) -> list[Tensor]:
    """1 + w·(s − 1) of each factor s, all on one device; those that are one and the same give one and the same."""
    return _each(partial(_mixed, share.to(factors[0].device)), factors) if factors else []


def copies(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """A copy of each parameter in its memory format, by parameter."""
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
        return torch.where(share, factor, 1.0)  # one operation, where each is a launch
    weight = share.to(factor.dtype)
    return (factor * weight).add_(1 - weight)  # exact at 0 and 1; on a CPU these two are faster than `where`


def _rest(share: Tensor, dtype: torch.dtype, factor: Tensor) -> Tensor:
    """What is left of the old value: `lerp` asks for weights of the parameter's own type."""
    return (1 - _mixed(share, factor)).to(dtype)


def _each(mix: Mix, factors: Sequence[Tensor]) -> list[Tensor]:
    """`mix` of each factor; 0-dim ones all at once, and those that are one and the same give one and the same."""
    shared = {id(factor): factor for factor in factors if factor.dim() == 0}
    mixed = dict(zip(shared, mix(torch.stack(list(shared.values()))).unbind(), strict=True)) if shared else {}
    return [mixed[id(factor)] if factor.dim() == 0 else mix(factor) for factor in factors]


def _pieces(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Lists of one device and type, each of about as many elements of factors as the device's limit (or one tensor)."""
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
    """On a CPU tensors above the limit are cut along their first dimension, whatever their memory format."""
    size, limit = part.factor.numel(), _limit(part.factor)
    if part.factor.device.type != "cpu" or part.factor.dim() == 0 or size <= limit:
        return [part]
    rows = max(1, limit * len(part.factor) // size)
    cuts = zip(*(torch.split(tensor, rows) for tensor in (*part.tensors, part.factor)), strict=True)
    return [_Part(tuple(cut[:-1]), cut[-1]) for cut in cuts]


def _limit(factor: Tensor) -> int:
    return min(HEAP_ELEMENTS, PIECE_ELEMENTS) if factor.device.type == "cpu" else PIECE_ELEMENTS
