"""Δ(G): how much the gradient's norm changed since the step before. Everything stays on the device.

Source: Tula paper, equation of the gradient variability, Δ(G_i) = |(‖G_i‖² − ‖G_{i−1}‖²) / ‖G_{i−1}‖²|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def squared_norm(gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """‖G‖² over all gradients taken as one vector; no host synchronization between devices of one kind.

    Half-precision gradients are accumulated in float32: float16 would overflow at a norm of 65504.

    Args:
        gradients: Dense tensors of any shapes, devices and floating-point types.
        device: Where the result lies; the first gradient's device if None.

    Returns:
        0-dim tensor, float32 or float64; 0 without gradients.
    """
    if not gradients:
        return torch.zeros((), device=device)
    device = device or gradients[0].device
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms: list[Tensor] = []
    for (_, dtype), group in alike.items():
        norms += torch._foreach_norm(group, 2.0, torch.promote_types(dtype, torch.float32))
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


def relative_change(current: Tensor, previous: Tensor) -> Tensor:
    """Δ(G) from two squared norms; 0 where both are equal (also both 0), inf where only the previous is 0.

    Args:
        current: ‖G_i‖², 0-dim.
        previous: ‖G_{i−1}‖², 0-dim; NaN where there is none, which makes the result NaN.
    """
    change = ((current - previous) / previous).abs()
    return torch.where(current == previous, torch.zeros_like(change), change)


class _Seen(NamedTuple):
    """What the gate knows; 0-dim tensors on one device."""

    previous: Tensor  # last finite ‖G‖²; NaN before the first
    norm_squared: Tensor  # ‖G‖² of the last step, finite or not
    sensitivity: Tensor  # Δ(G) of the last step; NaN where it has no meaning
    quiet: Tensor  # 1 where the last step was not sensitive, else 0
    quiet_steps: Tensor  # how many steps were not sensitive since the count was last taken


class Sensitivity:
    """Follows Δ(G) from step to step and says, on the device, whether a step is sensitive.

    A step is quiet (its gradient may be scaled) where Δ(G) < δ. The first step has no predecessor and a non-finite norm
    has no Δ: both are sensitive. A non-finite norm is not remembered: the next Δ compares with the last finite one.

    Args:
        delta: Threshold δ > 0; `math.inf` makes every step quiet that has a Δ.
    """

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self._seen: _Seen | None = None

    def observe(self, gradients: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
        """Take in the gradients of one step, before any scaling; returns a 0-dim bool tensor: the step is quiet."""
        norm_squared = squared_norm(gradients, device)
        seen = self._seen or _nothing_seen(norm_squared)
        sensitivity = relative_change(norm_squared, seen.previous)
        quiet = sensitivity < self.delta  # false where Δ is NaN
        previous = torch.where(torch.isfinite(norm_squared), norm_squared, seen.previous)
        self._seen = _Seen(previous, norm_squared, sensitivity, quiet.to(sensitivity.dtype), seen.quiet_steps + quiet)
        return quiet

    def read(self) -> tuple[float, float, float, int]:
        """Δ(G), ‖G‖, quiet (0 or 1) and quiet steps since the last reading. Waits for the device."""
        if self._seen is None:
            return float("nan"), float("nan"), 0.0, 0
        seen = self._seen
        values = torch.stack([seen.sensitivity, seen.norm_squared.sqrt(), seen.quiet, seen.quiet_steps]).tolist()
        self._seen = seen._replace(quiet_steps=torch.zeros_like(seen.quiet_steps))
        return values[0], values[1], values[2], round(values[3])

    def state_dict(self) -> dict[str, Tensor] | None:
        """Tensors only; None before the first step."""
        return None if self._seen is None else self._seen._asdict()

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Restore what `state_dict` gave, as copies on `device`."""
        fields = None if state is None else {name: state[name].to(device, copy=True) for name in _Seen._fields}
        self._seen = None if fields is None else _Seen(**fields)


def _nothing_seen(like: Tensor) -> _Seen:
    nothing, zero = torch.full_like(like, torch.nan), torch.zeros_like(like)
    return _Seen(nothing, nothing, nothing, zero, zero)
