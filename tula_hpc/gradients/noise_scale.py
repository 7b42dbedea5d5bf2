"""The gradient's noise scale from gradients of two batch sizes at the same weights.

With the true gradient G and one sample's covariance Σ, a batch of B samples has E|g_B|² = |G|² +
tr(Σ)/B. Two batch sizes b < B therefore give both unknowns without bias (S. McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018, appendix A.1):

    |G|²  ≈ (B·|g_B|² − b·|g_b|²) / (B − b)
    tr(Σ) ≈ (|g_b|² − |g_B|²) / (1/b − 1/B)          B_noise = tr(Σ) / |G|²

This holds also where the small batch is a part of the large one. Both are noisy, |G|² may come out
negative, and the ratio of two noisy numbers is biased: so they are smoothed apart, and only then
divided.

The critical batch of an epoch, from readings of the gradient's noise at its steps.

As `NoiseScale`, but with equal weights over the epoch: both |G|² and tr(Σ) are averaged before they
are divided, since their single estimates are unbiased and that of their ratio is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# of the moving averages, for each pair of gradients
DECAY = 0.9
# of the same, where every step brings a pair
STEP_DECAY = 0.99

Number = TypeVar("Number", float, Tensor)


def gradient_square(small: Number, large: Number, small_batch: float, large_batch: float) -> Number:
    """Unbiased |G|² from |g_b|² and |g_B|²; of any sign. Vectors of squared norms, one for each tensor, will do.

    Args: small: |g_b|², squared norm of the mean gradient over b samples; a mean of several such
        norms will do. large: |g_B|², likewise. small_batch: b. large_batch: B, above b.
    """
    return (large * large_batch - small * small_batch) / (large_batch - small_batch)


def noise_trace(small: Number, large: Number, small_batch: float, large_batch: float) -> Number:
    """Unbiased tr(Σ), the variance of one sample's gradient summed over all elements; see `gradient_square`."""
    return (small - large) / (1.0 / small_batch - 1.0 / large_batch)


def square_at(
    small: Number, large: Number, small_batch: float, large_batch: float, batch: float
) -> Number:
    """E|g|² at any batch, from |g_b|² and |g_B|²: the line in 1/batch through both; of any sign.

        s(n) = |g_B|² + (|g_b|² − |g_B|²)·(1/n − 1/B)/(1/b − 1/B)

    Args:
        small: |g_b|².
        large: |g_B|².
        small_batch: b.
        large_batch: B, above b.
        batch: n, samples.
    """
    return large + noise_trace(small, large, small_batch, large_batch) * (
        1.0 / batch - 1.0 / large_batch
    )


def noise_scale(square: float, trace: float) -> float:
    """B_noise in samples; NaN where the noise hides the gradient (|G|² or tr(Σ) not above 0)."""
    return trace / square if square > 0 and trace > 0 else math.nan


class NoiseReading(NamedTuple):
    """What `NoiseScale.read` returns; NaN where unknown."""

    # samples, from the moving averages
    noise_scale: float
    # mean |G|² of the pairs since the last reading
    recent_square: float
    # mean tr(Σ) of the same pairs
    recent_trace: float


NO_READING = NoiseReading(math.nan, math.nan, math.nan)


class NoiseScale:
    """Follows |G|² and tr(Σ) over training in moving averages that stay on the device.

    Both averages have the same weights, so that their ratio is right from the first pair on.
    Pairs that are not finite (an overflow in float16) are passed over.
    """

    def __init__(self) -> None:
        # (5,), float64: averages of |G|², tr(Σ); sums and count since last read
        self._sums: Tensor | None = None

    def observe(
        self,
        small: Tensor,
        large: Tensor,
        small_batch: float,
        large_batch: float,
        decay: float = DECAY,
    ) -> None:
        """Take in squared norms of two batches' gradients at the same weights. Does not wait for the device.

        Args:
            small: |g_b|², 0-dim.
            large: |g_B|², 0-dim.
            small_batch: b; a pair that is not of a smaller and a larger batch is passed over.
            large_batch: B.
            decay: The pair counts 1 − `decay` in the averages.
        """
        if large_batch <= small_batch:
            return
        small, large = small.double(), large.to(small.device).double()
        square = gradient_square(small, large, small_batch, large_batch)
        trace = noise_trace(small, large, small_batch, large_batch)
        pair = torch.stack([square, trace])
        old = (
            torch.zeros(5, dtype=torch.float64, device=pair.device)
            if self._sums is None
            else self._sums
        )
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
        decay: float,
    ) -> None:
        """Take in squared norms of each parameter's gradients; those without both count for nothing.

        Args: small: (n,) |g_b|², NaN where there is none. large: (n,) |g_B|², likewise. total:
            ‖g_B‖² of all of them, 0-dim; where it is not finite, as after an overflow, the pair is
            passed over. batches: b and B. factor: That both are multiplied with, 0-dim or a number.
            decay: As for `observe`.
        """
        known = ~(small.isnan() | large.isnan())
        sums = [torch.where(known, values, 0.0).sum() * factor for values in (small, large)]
        self.observe(sums[0], torch.where(total.isfinite(), sums[1], torch.nan), *batches, decay)

    def read(self) -> NoiseReading:
        """The current values; starts the means of recent pairs anew. Waits for the device."""
        if self._sums is None:
            return NO_READING
        square, trace, recent_square, recent_trace, recent = self._sums.tolist()
        self._sums = torch.cat([self._sums[:2], torch.zeros_like(self._sums[2:])])
        means = (recent_square / recent, recent_trace / recent) if recent else (math.nan, math.nan)
        return NoiseReading(noise_scale(square, trace), *means)

    def state_dict(self) -> Tensor | None:
        """One tensor; None before the first pair."""
        return self._sums

    def load_state_dict(self, state: Tensor | None, device: torch.device) -> None:
        """Restore what `state_dict` gave, as a copy on `device`."""
        self._sums = None if state is None else state.to(device, copy=True)


class CriticalBatch:
    """Means of |G|² and tr(Σ) over the readings since the last one that was taken."""

    def __init__(self) -> None:
        self._square = self._trace = self._weight = 0.0

    def add(self, reading: NoiseReading, weight: float) -> None:
        """Take in a reading; one of no new steps says nothing.

        Args:
            reading: Means of |G|² and tr(Σ) since the reading before.
            weight: How much they count: the steps since then.
        """
        if math.isfinite(reading.recent_square) and math.isfinite(reading.recent_trace):
            self._square += weight * reading.recent_square
            self._trace += weight * reading.recent_trace
            self._weight += weight

    def state_dict(self) -> dict[str, float]:
        """Return the sums, for a checkpoint."""
        return {"square": self._square, "trace": self._trace, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with what `state_dict` gave."""
        self._square, self._trace, self._weight = (
            state[name] for name in ("square", "trace", "weight")
        )

    def take(self) -> float:
        """tr(Σ)/|G|² in samples, and start anew; NaN without readings, or where noise hides the gradient."""
        result = noise_scale(self._square, self._trace) if self._weight else math.nan
        self._square = self._trace = self._weight = 0.0
        return result
