"""The critical batch of an epoch, from readings of the gradient's noise at its steps.

As `NoiseScale`, but with equal weights over the epoch: both |G|² and tr(Σ) are averaged before they are divided, since
their single estimates are unbiased and that of their ratio is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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

    def state_dict(self) -> dict[str, float]:
        """Return the sums, for a checkpoint."""
        return {"square": self._square, "trace": self._trace, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with what `state_dict` gave."""
        self._square, self._trace, self._weight = (state[name] for name in ("square", "trace", "weight"))

    def take(self) -> float:
        """tr(Σ)/|G|² in samples, and start anew; NaN without readings, or where noise hides the gradient."""
        result = noise_scale(self._square, self._trace) if self._weight else math.nan
        self._square = self._trace = self._weight = 0.0
        return result
