"""Sensitivity gate: the change Δ(G) of the gradient's norm, and the share of the scale to use.

Source: Tula paper, equation of the gradient variability, Δ(G_i) = |(‖G_i‖² − ‖G_{i−1}‖²) /
‖G_{i−1}‖²|. Everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Gate = Literal["paper", "none"]


def relative_change(current: Tensor, previous: Tensor) -> Tensor:
    """Return Δ(G) from two squared norms; 0 where both are equal, inf where the previous is 0.

    Both are 0-dim. Where there is no previous one it is NaN, and so is the result.
    """
    change = ((current - previous) / previous).abs()
    return torch.where(current == previous, torch.zeros_like(change), change)


class _Seen(NamedTuple):
    """State of the gate; 0-dim tensors on one device."""

    # last finite ‖G‖²; NaN before the first
    previous: Tensor
    # ‖G‖² of the last step, finite or not
    norm_squared: Tensor
    # Δ(G) of the last step; NaN where it has no meaning
    sensitivity: Tensor
    # share of the scale in the last step: 0, 1, or between them while it warms up
    quiet: Tensor
    # steps with a share above 0 since the last reading
    quiet_steps: Tensor
    # sum of the shares of those steps
    used: Tensor


class Sensitivity:
    """Follows Δ(G) from step to step and gives, on the device, the share of the scale to use.

    The first step has no predecessor and a non-finite norm has no Δ: such steps use none of the
    scale, except with gate "none". A non-finite norm is not remembered: the next Δ compares with
    the last finite norm.

    Args:
        delta: Threshold δ > 0; `math.inf` makes every step quiet that has a Δ.
        gate: "paper": all of the scale where Δ < δ, else nothing. "none": always all.
    """

    def __init__(self, delta: float, gate: Gate = "paper") -> None:
        self.delta, self.gate = delta, gate
        self._seen: _Seen | None = None

    def observe(self, norm_squared: Tensor, most: float = 1.0) -> Tensor:
        """Take in ‖G‖² (0-dim) of one step before any scaling; return its share of the scale.

        The share is a 0-dim bool, or a number where `most` is below 1, as while the scale warms up.
        """
        seen = self._seen or _nothing_seen(norm_squared)
        sensitivity = relative_change(norm_squared, seen.previous)
        # false where Δ is NaN
        share = sensitivity < self.delta
        if self.gate == "none":
            share = torch.ones_like(share)
        if most < 1:
            share = share * most
        previous = torch.where(torch.isfinite(norm_squared), norm_squared, seen.previous)
        counts = seen.quiet_steps + (share > 0), seen.used + share
        self._seen = _Seen(
            previous, norm_squared, sensitivity, share.to(sensitivity.dtype), *counts
        )
        return share

    def read(self) -> tuple[float, float, float, int, float]:
        """Return Δ(G), ‖G‖ and share of the last step; steps with a share, and the sum of shares.

        The latter two count from the last reading. Waits for the device.
        """
        if self._seen is None:
            return float("nan"), float("nan"), 0.0, 0, 0.0
        seen = self._seen
        norms = seen.norm_squared.sqrt()
        fields = [seen.sensitivity, norms, seen.quiet, seen.quiet_steps, seen.used]
        change, norm, quiet, steps, used = torch.stack(fields).tolist()
        nothing = torch.zeros_like(seen.quiet_steps)
        self._seen = seen._replace(quiet_steps=nothing, used=nothing)
        return change, norm, quiet, round(steps), used

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return tensors only; None before the first step."""
        return None if self._seen is None else self._seen._asdict()

    def load_state_dict(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Restore a `state_dict` as copies on `device`."""
        if state is None:
            self._seen = None
            return
        self._seen = _Seen(*(state[name].to(device, copy=True) for name in _Seen._fields))


def _nothing_seen(like: Tensor) -> _Seen:
    nothing, zero = torch.full_like(like, torch.nan), torch.zeros_like(like)
    return _Seen(nothing, nothing, nothing, zero, zero, zero)
