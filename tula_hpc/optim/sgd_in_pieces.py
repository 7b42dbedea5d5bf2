"""Scaling and SGD's step on a CPU in one go, large tensors piece by piece.

SGD with weight decay makes a temporary as large as each tensor. Above 32 MiB the C library maps it anew at every step,
and the kernel clears each of its pages: for layers of a hundred million weights that takes as long as the arithmetic.
Pieces use the same memory again and again, which pays for the scaling.
The arithmetic is torch's own, `torch.optim.sgd.sgd`, and so is its rounding: a tensor is cut only where all operations
fall into the same vectors of elements, on the same threads, as for the whole of it (`pieces`), else it is one piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.sgd import sgd

from tula_hpc.optim.applying import HEAP_ELEMENTS, mixed, multiply_where

PIECE = HEAP_ELEMENTS  # at most
GRAIN = 2**15  # elements: ATen gives no thread fewer, unless it has all of them
VECTOR = 64  # elements, a multiple of what ATen's kernels take at once; what is left over it rounds otherwise
HYPERPARAMETERS = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")


class _Part(NamedTuple):
    """Tensors of one shape, and the factor of the gradient."""

    parameter: Tensor
    gradient: Tensor
    momentum: Tensor | None
    factor: Tensor | None


def fits(base: Optimizer, gradients: Mapping[Tensor, Tensor]) -> TypeGuard[SGD]:
    """Whether `scale_and_step` does what scaling and then `base.step()` would do for these gradients of parameters.

    Not where somebody else follows the base's step (hooks, a scheduler made for it), nor at its first step, which makes
    the momenta.
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
    base: SGD, share: Tensor, gradients: Mapping[Tensor, Tensor], factors: Mapping[Tensor, Tensor | None]
) -> None:
    """Multiply gradients in place by their factors, as far as `share` says, and take the base's step with them.

    Args:
        base: For which `fits` holds.
        share: 0-dim, bool or from 0 to 1; see `applying`.
        gradients: Of each parameter that has one.
        factors: As many, of the parameter's shape or 0-dim; None stands for 1.
    """
    numbers = [factor for factor in factors.values() if factor is not None and factor.dim() == 0]
    once = {id(number): by for number, by in zip(numbers, mixed(share, numbers), strict=True)}
    for group in base.param_groups:
        stepped = [parameter for parameter in group["params"] if parameter in gradients]
        momenta = [base.state[p]["momentum_buffer"] if group["momentum"] else None for p in stepped]
        parts = [_Part(p.detach(), gradients[p], m, factors[p]) for p, m in zip(stepped, momenta, strict=True)]
        for piece in _pieces(parts):
            for _, gradient, _, factor in piece:
                if (by := once.get(id(factor))) is not None:
                    gradient.mul_(by)
                else:
                    multiply_where(share, [gradient], [factor])
            _step(group, piece)


@cache
def pieces(elements: int, threads: int) -> int:
    """Into how many equal pieces of half of `PIECE` to all of it a tensor is cut; 1: it is not.

    ATen cuts a large tensor evenly among the threads and takes each share vector by vector. Pieces that are whole
    vectors on every thread, as the whole tensor is, give the same bits.
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
    return not group["momentum"] or all(base.state[p].get("momentum_buffer") is not None for p in stepped)


def _step(group: Mapping[str, Any], piece: Sequence[_Part]) -> None:
    momenta = [part.momentum for part in piece] if group["momentum"] else []
    columns = [part.parameter for part in piece], [part.gradient for part in piece], momenta
    settings = {name: group[name] for name in HYPERPARAMETERS}
    sgd(*columns, has_sparse_grad=False, foreach=False, fused=False, **settings)


def _pieces(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Lists of parts that together are about as large as a piece of a large tensor."""
    opened: list[_Part] = []
    held = 0
    for part in chain.from_iterable(_cut(part) for part in parts):
        if opened and held + part.parameter.numel() > PIECE:
            yield opened
            opened, held = [], 0
        opened.append(part)
        held += part.parameter.numel()
    if opened:
        yield opened


def _cut(part: _Part) -> list[_Part]:
    """Pieces along the memory, where it is in one order for all tensors and without gaps."""
    count = pieces(part.parameter.numel(), torch.get_num_threads())
    full = [tensor for tensor in part if tensor is not None and tensor.dim()]
    in_order = all(tensor.stride() == part.parameter.stride() for tensor in full)
    if count == 1 or not in_order or not torch.ops.aten.is_non_overlapping_and_dense(part.parameter):
        return [part]
    return [_Part(*cut) for cut in zip(*(_cuts(tensor, count) for tensor in part), strict=True)]


def _cuts(tensor: Tensor | None, count: int) -> Sequence[Tensor | None]:
    if tensor is None or not tensor.dim():
        return [tensor] * count
    return tensor.as_strided((tensor.numel(),), (1,)).chunk(count)
