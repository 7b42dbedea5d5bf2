"""Norms of gradients in few operations on the device, none of which the host waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def foreach_norms(gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """‖g‖ of each gradient in one call for each device and type.

    Half-precision gradients are accumulated in float32: float16 would overflow at a norm of 65504.

    Args:
        gradients: Dense tensors of any shapes, devices and floating-point types.

    Returns: 0-dim tensors by the gradient's place, float32 or float64, on its device. They come
        device by device and type by type, so that their sum is always added up in the same order.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, gradient in enumerate(gradients):
        alike.setdefault((gradient.device, gradient.dtype), []).append(place)
    norms: dict[int, Tensor] = {}
    for (_, dtype), places in alike.items():
        group = [gradients[place] for place in places]
        norms |= zip(
            places,
            torch._foreach_norm(group, 2.0, torch.promote_types(dtype, torch.float32)),
            strict=True,
        )
    return norms


def norms_where_present(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """‖g‖ of each gradient in order, None where there is none."""
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    norms = foreach_norms([gradient for gradient in gradients if gradient is not None])
    of = {place: norms[index] for index, place in enumerate(places)}
    return [of.get(place) for place in range(len(gradients))]


def squares(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """(n,) squares of 0-dim norms, NaN for None; float64, in which small float32 numbers do not vanish."""
    absent = torch.full((), torch.nan, device=device)
    return (
        torch.stack([absent if norm is None else norm.to(device) for norm in norms])
        .double()
        .square()
    )


def squared(scale: Tensor | float) -> Tensor | float:
    """A loss scale's square; of a tensor in float64, as float32 ends at 2^128 and a scale may grow beyond 2^64."""
    return scale.double().square() if isinstance(scale, Tensor) else scale**2


def sum_of_squares(norms: Iterable[Tensor], device: torch.device) -> Tensor:
    """Σ n² over 0-dim tensors, at least one of them, in their own type; no synchronization of devices of one kind."""
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def squared_norm(gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """‖G‖² over all gradients taken as one vector.

    Args:
        gradients: As for `foreach_norms`.
        device: Where the result lies; the first gradient's device if None.

    Returns:
        0-dim tensor, float32 or float64; 0 without gradients.
    """
    if not gradients:
        return torch.zeros((), device=device)
    return sum_of_squares(foreach_norms(gradients).values(), device or gradients[0].device)


def dense_gradients(parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """`.grad` of those that have one, by parameter.

    Raises:
        TypeError: One is sparse or complex.
    """
    gradients = {
        parameter: parameter.grad for parameter in parameters if parameter.grad is not None
    }
    for parameter, gradient in gradients.items():
        if gradient.layout is not torch.strided or gradient.is_complex():
            kind, shape = "complex" if gradient.is_complex() else "sparse", tuple(parameter.shape)
            message = f"gradient scaling needs dense real gradients; a parameter of shape {shape} has a {kind} one"
            raise TypeError(message)
    return gradients
