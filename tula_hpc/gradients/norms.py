"""Norms of gradients in few operations on the device, none of which the host waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def foreach_norms(gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return ‖g‖ of each gradient, with one call for each device and type.

    Half-precision gradients are accumulated in float32: float16 would overflow at a norm of 65504.
    The norms are 0-dim, by the dense gradient's index, on its device. They come device by device
    and type by type, so that their sum is always added up in the same order.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        alike.setdefault((gradient.device, gradient.dtype), []).append(index)
    norms: dict[int, Tensor] = {}
    for (_, dtype), indices in alike.items():
        accumulated_in = torch.promote_types(dtype, torch.float32)
        found = torch._foreach_norm([gradients[index] for index in indices], 2.0, accumulated_in)
        norms |= zip(indices, found, strict=True)
    return norms


def norms_where_present(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return ‖g‖ of each gradient in order, None where there is none."""
    indices: list[int] = []
    present: list[Tensor] = []
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            indices.append(index)
            present.append(gradient)
    norms: list[Tensor | None] = [None] * len(gradients)
    for position, norm in foreach_norms(present).items():
        norms[indices[position]] = norm
    return norms


def squares(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the squares of 0-dim norms, (n,), NaN for None.

    They are float64, in which the squares of small float32 numbers do not vanish.
    """
    absent = torch.full((), torch.nan, device=device)
    found = [absent if norm is None else norm.to(device) for norm in norms]
    return torch.stack(found).double().square()


def squared(scale: Tensor | float) -> Tensor | float:
    """Return a loss scale's square; float64 for a tensor, as a scale may grow beyond 2^64."""
    return scale.double().square() if isinstance(scale, Tensor) else scale**2


def sum_of_squares(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return Σ n² over at least one 0-dim tensor, in their own type."""
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def is_dense(gradient: Tensor) -> bool:
    """Tell whether a gradient can be scaled: not sparse, as that of an embedding, or complex."""
    return gradient.layout is torch.strided and not gradient.is_complex()


def dense_gradients(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return the gradients by parameter; a parameter without one is left out.

    Raises:
        TypeError: A gradient is sparse or complex.
    """
    gradients: dict[Tensor, Tensor] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if not is_dense(gradient):
            kind = "complex" if gradient.is_complex() else "sparse"
            raise TypeError(
                "gradient scaling needs dense real gradients; "
                f"a parameter of shape {tuple(parameter.shape)} has a {kind} one"
            )
        gradients[parameter] = gradient
    return gradients
