"""Noise scale of the gradient, from gradients of two batch sizes at the same weights.

With the true gradient G and one sample's covariance Σ, a batch of B samples has E|g_B|² = |G|² +
tr(Σ)/B. Two batch sizes b < B therefore give both unknowns without bias (S. McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018, appendix A.1):

    |G|²  ≈ (B·|g_B|² − b·|g_b|²) / (B − b)
    tr(Σ) ≈ (|g_b|² − |g_B|²) / (1/b − 1/B)          B_noise = tr(Σ) / |G|²

This holds also where the small batch is a part of the large one. Both estimates are noisy, |G|² may
come out negative, and the ratio of two noisy numbers is biased: each is averaged by itself, and
only the averages are divided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# decay of the moving averages for each pair of gradients
DECAY = 0.9
# the same decay if every step brings a pair
STEP_DECAY = 0.99

Number = TypeVar("Number", float, Tensor)


def gradient_square(small: Number, large: Number, small_batch: float, large_batch: float) -> Number:
    """Return the unbiased |G|², of any sign; vectors of squared norms, one per tensor, will do.

    Args:
        small: |g_b|², squared norm of the mean gradient over b samples, or the mean of several.
        large: |g_B|², likewise.
        small_batch: b.
        large_batch: B, above b.
    """
    return (large * large_batch - small * small_batch) / (large_batch - small_batch)


def noise_trace(small: Number, large: Number, small_batch: float, large_batch: float) -> Number:
    """Return the unbiased tr(Σ), the variance of one sample's gradient summed over all elements.

    The arguments are those of `gradient_square`.
    """
    return (small - large) / (1.0 / small_batch - 1.0 / large_batch)


def square_at(
    small: Number, large: Number, small_batch: float, large_batch: float, batch: float
) -> Number:
    """Return E|g|² at a batch of n samples: the line in 1/n through both measurements; of any sign.

        s(n) = |g_B|² + (|g_b|² − |g_B|²)·(1/n − 1/B)/(1/b − 1/B)

    The other arguments are those of `gradient_square`.
    """
    trace = noise_trace(small, large, small_batch, large_batch)
    return large + trace * (1.0 / batch - 1.0 / large_batch)


def noise_scale(square: float, trace: float) -> float:
    """Return B_noise in samples; NaN where noise hides the gradient (|G|² or tr(Σ) not above 0)."""
    return trace / square if square > 0 and trace > 0 else math.nan


class NoiseReading(NamedTuple):
    """Reading of a `NoiseScale`; NaN where unknown."""

    # samples, from the moving averages
    noise_scale: float
    # mean |G|² of the pairs since the last reading
    recent_square: float
    # mean tr(Σ) of the same pairs
    recent_trace: float


NO_READING = NoiseReading(math.nan, math.nan, math.nan)


class NoiseScale:
    """Moving averages of |G|² and tr(Σ) over training, kept on the device.

    Both averages have the same weights, so that their ratio is right from the first pair on.
    Pairs that are not finite (an overflow in float16) are passed over.
    """

    def __init__(self) -> None:
        # (5,), float64: averages of |G|², tr(Σ); sums and count since the last reading
        self._sums: Tensor | None = None

    def observe(
        self,
        small: Tensor,
        large: Tensor,
        small_batch: float,
        large_batch: float,
        decay: float = DECAY,
    ) -> None:
        """Add squared norms of two batches' gradients at the same weights, without synchronization.

        The norms are 0-dim. A pair with b not below B is passed over; another one counts 1 −
        `decay` in the averages. See `gradient_square`.
        """
        if large_batch <= small_batch:
            return
        small = small.double()
        large = large.to(small.device).double()
        square = gradient_square(small, large, small_batch, large_batch)
        trace = noise_trace(small, large, small_batch, large_batch)
        pair = torch.stack([square, trace])
        old = self._sums
        if old is None:
            old = torch.zeros(5, dtype=torch.float64, device=pair.device)
        averages = decay * old[:2] + (1 - decay) * pair
        new = torch.cat([averages, old[2:4] + pair, old[4:] + 1])
        self._sums = torch.where(torch.isfinite(pair).all(), new, old)

    def observe_parts(
        self,
        small: Tensor,
        large: Tensor,
        total: Tensor,
        batches: tuple[float, float],
        *,
        factor: Tensor | float,
    ) -> None:
        """Add squared norms of each parameter's gradients; a parameter that lacks one is left out.

        `small` and `large` are |g_b|² and |g_B|², (n,), NaN where there is none, at `batches`, b
        and B, and both are multiplied by `factor`. The pair is passed over where `total`, ‖g_B‖² of
        all of them, is not finite, as after an overflow.
        """
        known = ~(small.isnan() | large.isnan())
        small_sum = torch.where(known, small, 0.0).sum() * factor
        large_sum = torch.where(known, large, 0.0).sum() * factor
        large_sum = torch.where(total.isfinite(), large_sum, torch.nan)
        self.observe(small_sum, large_sum, *batches, STEP_DECAY)

    def read(self) -> NoiseReading:
        """Return the current values and reset the means of recent pairs; waits for the device."""
        if self._sums is None:
            return NO_READING
        square, trace, recent_square, recent_trace, recent = self._sums.tolist()
        self._sums = torch.cat([self._sums[:2], torch.zeros_like(self._sums[2:])])
        scale = noise_scale(square, trace)
        if not recent:
            return NoiseReading(scale, math.nan, math.nan)
        return NoiseReading(scale, recent_square / recent, recent_trace / recent)

    def state_dict(self) -> Tensor | None:
        """Return the state as one tensor; None before the first pair."""
        return self._sums

    def load_state_dict(self, state: Tensor | None, device: torch.device) -> None:
        """Restore a state that `state_dict` returned, as a copy on `device`."""
        self._sums = None if state is None else state.to(device, copy=True)


class CriticalBatch:
    """Critical batch of an epoch, from means of |G|² and tr(Σ) over its readings.

    As in `NoiseScale`, the means are divided and not their single estimates; here all steps have
    the same weight.
    """

    def __init__(self) -> None:
        self._square = self._trace = self._weight = 0.0

    def add(self, reading: NoiseReading, weight: float) -> None:
        """Add a reading of the last `weight` steps, unless it covers no new ones."""
        if math.isfinite(reading.recent_square) and math.isfinite(reading.recent_trace):
            self._square += weight * reading.recent_square
            self._trace += weight * reading.recent_trace
            self._weight += weight

    def state_dict(self) -> dict[str, float]:
        """Return the sums, for a checkpoint."""
        return {"square": self._square, "trace": self._trace, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the sums that `state_dict` returned."""
        self._square = state["square"]
        self._trace = state["trace"]
        self._weight = state["weight"]

    def take(self) -> float:
        """Return tr(Σ)/|G|² in samples and reset the sums; NaN if unknown (see `noise_scale`)."""
        result = noise_scale(self._square, self._trace) if self._weight else math.nan
        self._square = self._trace = self._weight = 0.0
        return result
