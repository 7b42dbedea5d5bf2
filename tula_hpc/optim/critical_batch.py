"""The critical batch of an epoch, from readings of the gradient's noise at its steps.

As `NoiseScale`, but with equal weights over the epoch: both |G|² and tr(Σ) are averaged before they are divided, since
their single estimates are unbiased and that of their ratio is not.
"""

from __future__ import annotations

import math

from tula_hpc.optim.noise_scale import NoiseReading, noise_scale


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

    def take(self) -> float:
        """tr(Σ)/|G|² in samples, and start anew; NaN without readings, or where noise hides the gradient."""
        result = noise_scale(self._square, self._trace) if self._weight else math.nan
        self._square = self._trace = self._weight = 0.0
        return result
