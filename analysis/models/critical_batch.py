"""Critical batch size: the gradient's noise scale, from profiles or from training.

The critical batch is taken to be the simple noise scale B_noise = tr(Σ)/|G|² (S. McCandlish et al.,
"An Empirical Model of Large-Batch Training", 2018, equation 2.9): G is the true gradient, Σ the
covariance of one sample's gradient. Training with batch B to the same loss needs about (1 +
B_noise/B) times the fewest possible steps and (1 + B/B_noise) times the fewest possible samples: at
B = B_noise twice as many of both. Far above it a larger batch saves hardly any steps.

B_noise grows during training, often tenfold and more, so a profile at the first weights gives a
lower bound. Momentum, batch normalization and the learning rate are not in the approximation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records import Measurement, Metrics

Array = NDArray[np.float64]

# with fewer the scatter is unknown
MIN_TERMS = 3
RESAMPLES = 1000
# bounds the bootstrap's memory; with more terms the interval is wider than necessary
MAX_TERMS = 4_000
LEVEL = 0.9


class CriticalBatch(NamedTuple):
    """Estimate of the critical batch, in samples of a global batch, with its 90 % interval.

    The interval covers the scatter of the batches that were drawn, not the change of the noise
    scale during training. `high` is infinite where the data give no upper bound.
    """

    batch: float
    low: float
    high: float
    source: Literal["training", "profile"]
    # with a measured gradient; 0: not recorded
    samples: int


def critical_batch(
    measurements: Iterable[Measurement], metrics: Metrics | None = None
) -> CriticalBatch | None:
    """Estimate a training's critical batch from its metrics if they suffice, else from profiles.

    From metrics the later half of the training counts (by samples seen): the noise scale rises
    steeply at first, and most steps are taken after that. Both |G|² and tr(Σ) are averaged before
    they are divided: their single estimates are unbiased, that of their ratio is not.

    Args:
        measurements: Of any configurations; those without an estimate are ignored.
        metrics: Of a training, finished or not.

    Returns:
        None where nothing, too little, or only noise was measured.
    """
    found = None if metrics is None else _from_metrics(metrics)
    return found or _from_measurements(measurements)


def _from_metrics(metrics: Metrics) -> CriticalBatch | None:
    rows = [
        (step.samples_seen, step.noise_gradient_square, step.noise_trace)
        for step in metrics.steps
        if step.noise_gradient_square is not None and step.noise_trace is not None
    ]
    later = [row[1:] for row in rows if row[0] >= rows[-1][0] / 2]
    return _estimate(np.array(later).reshape(-1, 2), np.ones(len(later)), "training", 0)


def profiled_batch(measurements: Iterable[Measurement]) -> float | None:
    """Return the critical batch by profiles alone, without its interval; None where unknown."""
    terms, weights, _ = _profiled_terms(measurements)
    return _ratio_of_means(*_finite(terms, weights))


def _from_measurements(measurements: Iterable[Measurement]) -> CriticalBatch | None:
    terms, weights, samples = _profiled_terms(measurements)
    return _estimate(terms, weights, "profile", samples)


def _profiled_terms(measurements: Iterable[Measurement]) -> tuple[Array, Array, int]:
    """Return |G|² and tr(Σ) of each pass, (n, 2), weights, (n,), and the samples of all."""
    # |G|², tr(Σ) and weight of each pass
    passes: list[tuple[float, float, float]] = []
    samples = 0
    for row in measurements:
        if row.status == "ok" and row.noise_samples > 0 and row.noise_terms:
            # passes over more samples scatter less
            weight = row.noise_samples / len(row.noise_terms)
            passes += [(*terms, weight) for terms in row.noise_terms]
            samples += row.noise_samples
    # in one order, whatever that of the measurements is: sums of floats depend on it
    table = np.array(sorted(passes)).reshape(-1, 3)
    return table[:, :2], table[:, 2], samples


def _finite(terms: Array, weights: Array) -> tuple[Array, Array]:
    known = np.isfinite(terms).all(axis=1)
    return terms[known], weights[known]


def _ratio_of_means(terms: Array, weights: Array) -> float | None:
    """Return tr(Σ)/|G|² of weighted means; None for too few, and where noise hides the gradient."""
    if len(terms) < MIN_TERMS:
        return None
    square, trace = weights @ terms
    return None if square <= 0 or trace <= 0 else float(trace / square)


def _estimate(
    terms: Array, weights: Array, source: Literal["training", "profile"], samples: int
) -> CriticalBatch | None:
    """Return the ratio of weighted means with the bootstrap's percentile interval.

    `terms` are (n, 2): |G|² and tr(Σ).
    """
    terms, weights = _finite(terms, weights)
    batch = _ratio_of_means(terms, weights)
    if batch is None:
        return None
    random = np.random.default_rng(0)
    if len(terms) > MAX_TERMS:
        some = random.choice(len(terms), MAX_TERMS, replace=False)
        terms, weights = terms[some], weights[some]
    drawn = random.integers(len(terms), size=(RESAMPLES, len(terms)))
    ratios = _ratio(np.einsum("rn,rnk->rk", weights[drawn], terms[drawn]))
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return CriticalBatch(batch, min(float(low), batch), max(float(high), batch), source, samples)


def _ratio(sums: Array) -> Array:
    """Return tr(Σ)/|G|² of each row of (|G|², tr(Σ)); infinite where the gradient is all noise."""
    square, trace = sums.T
    usable = square > 0
    return np.where(usable, np.maximum(trace, 0.0) / np.where(usable, square, 1.0), np.inf)
