"""Critical batch size: the gradient's noise scale, from profiles or from training.

The critical batch is taken to be the simple noise scale B_noise = tr(Σ)/|G|² (S. McCandlish et al.,
"An Empirical Model of Large-Batch Training", 2018, equation 2.9): G is the true gradient, Σ the
covariance of one sample's gradient. Training with batch B to the same loss needs about (1 +
B_noise/B) times the fewest possible steps and (1 + B/B_noise) times the fewest possible samples:
twice as many of both at B = B_noise. Far above B_noise a larger batch saves hardly any steps.

B_noise grows during training, often tenfold and more, so a profile at the first weights gives a
lower bound. The approximation ignores momentum, batch normalization and the learning rate. The
interval counts the scatter of the measurements only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records import Measurement, Metrics

Array = NDArray[np.float64]
Source = Literal["training", "profile"]
Batch = TypeVar("Batch", float, Array)

# fewer estimates than this do not show their scatter
MIN_TERMS = 3
# largest half-width of an interval, in logarithms: a wider one says no more
FARTHEST = 30.0


class CriticalBatch(NamedTuple):
    """Estimate of the critical batch, in samples of a global batch."""

    batch: float
    source: Source
    interval_90: tuple[float, float]


class Terms(NamedTuple):
    """Finite estimates of |G|² and tr(Σ), (n, 2), and their weights (n,)."""

    values: Array
    weights: Array

    @property
    def ratio(self) -> float | None:
        """tr(Σ)/|G|² of the weighted means; None for too few estimates, or for noise alone."""
        if len(self.weights) < MIN_TERMS:
            return None
        square, trace = self.weights @ self.values
        return None if square <= 0 or trace <= 0 else float(trace / square)

    def interval_90(self, ratio: float) -> tuple[float, float]:
        """Return the 90 % interval of the ratio r of weighted means of |G|² = g and tr(Σ) = t.

        The ratio is linearized, `d log r = Σ w (t − r g) / Σ w t`, and Student's t has n − 1
        degrees of freedom.
        """
        # imported here, since `tula status` does without SciPy
        from scipy.special import stdtrit

        count = len(self.weights)
        square, trace = self.values.T
        off = self.weights * (trace - ratio * square)
        error = math.sqrt(count / (count - 1) * (off @ off)) / (self.weights @ trace)
        half = min(float(stdtrit(count - 1, 0.95)) * error, FARTHEST)
        return ratio * math.exp(-half), ratio * math.exp(half)


def critical_batch(
    measurements: Iterable[Measurement], metrics: Metrics | None = None
) -> CriticalBatch | None:
    """Estimate a training's critical batch from its metrics if they suffice, else from profiles.

    Of the metrics only the later half of the training is used (by samples seen): the noise scale
    rises steeply at first, and most steps are taken after that. |G|² and tr(Σ) are averaged before
    they are divided: single estimates of either are unbiased, those of their ratio are not.

    Returns None if nothing, too little, or only noise was measured.
    """
    known: dict[Source, Terms] = {}
    if metrics is not None:
        known["training"] = _trained(metrics)
    known["profile"] = _profiled(measurements)
    for source, terms in known.items():
        if (batch := terms.ratio) is not None:
            return CriticalBatch(batch, source, terms.interval_90(batch))
    return None


def profiled_batch(measurements: Iterable[Measurement]) -> float | None:
    """Return the critical batch from profiles only; None if unknown."""
    return _profiled(measurements).ratio


def samples_to_same_progress(critical: float, batch: Batch, base: int) -> Batch:
    """Return (1 + B/B_noise) / (1 + base/B_noise): samples that B needs, over those of `base`."""
    return (critical + batch) / (critical + base)


def _trained(metrics: Metrics) -> Terms:
    rows = [
        (step.samples_seen, step.noise_gradient_square, step.noise_trace)
        for step in metrics.steps
        if step.noise_gradient_square is not None and step.noise_trace is not None
    ]
    later = [row[1:] for row in rows if row[0] >= rows[-1][0] / 2]
    return _finite(np.array(later).reshape(-1, 2), np.ones(len(later)))


def _profiled(measurements: Iterable[Measurement]) -> Terms:
    # |G|², tr(Σ) and weight of each pass
    passes: list[tuple[float, float, float]] = []
    for row in measurements:
        if row.status == "ok" and row.noise_samples > 0 and row.noise_terms:
            # passes over more samples scatter less
            weight = row.noise_samples / len(row.noise_terms)
            passes += [(*terms, weight) for terms in row.noise_terms]
    # sorted, since sums of floats depend on the order of the measurements
    table = np.array(sorted(passes)).reshape(-1, 3)
    return _finite(table[:, :2], table[:, 2])


def _finite(values: Array, weights: Array) -> Terms:
    known = np.isfinite(values).all(axis=1)
    return Terms(values[known], weights[known])
