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


class CriticalBatch(NamedTuple):
    """Estimate of the critical batch, in samples of a global batch."""

    batch: float
    source: Literal["training", "profile"]


def critical_batch(
    measurements: Iterable[Measurement], metrics: Metrics | None = None
) -> CriticalBatch | None:
    """Estimate a training's critical batch from its metrics if they suffice, else from profiles.

    From metrics the later half of the training counts (by samples seen): the noise scale rises
    steeply at first, and most steps are taken after that. Both |G|² and tr(Σ) are averaged before
    they are divided: their single estimates are unbiased, that of their ratio is not.

    None where nothing, too little, or only noise was measured.
    """
    trained = None if metrics is None else _trained_batch(metrics)
    if trained is not None:
        return CriticalBatch(trained, "training")
    profiled = profiled_batch(measurements)
    return None if profiled is None else CriticalBatch(profiled, "profile")


def _trained_batch(metrics: Metrics) -> float | None:
    rows = [
        (step.samples_seen, step.noise_gradient_square, step.noise_trace)
        for step in metrics.steps
        if step.noise_gradient_square is not None and step.noise_trace is not None
    ]
    later = [row[1:] for row in rows if row[0] >= rows[-1][0] / 2]
    return _ratio_of_means(np.array(later).reshape(-1, 2), np.ones(len(later)))


def profiled_batch(measurements: Iterable[Measurement]) -> float | None:
    """Return the critical batch by profiles alone; None where unknown."""
    # |G|², tr(Σ) and weight of each pass
    passes: list[tuple[float, float, float]] = []
    for row in measurements:
        if row.status == "ok" and row.noise_samples > 0 and row.noise_terms:
            # passes over more samples scatter less
            weight = row.noise_samples / len(row.noise_terms)
            passes += [(*terms, weight) for terms in row.noise_terms]
    # in one order, whatever that of the measurements is: sums of floats depend on it
    table = np.array(sorted(passes)).reshape(-1, 3)
    return _ratio_of_means(table[:, :2], table[:, 2])


def _ratio_of_means(terms: Array, weights: Array) -> float | None:
    """Return tr(Σ)/|G|² of weighted means of terms (n, 2); None for too few, or noise alone."""
    known = np.isfinite(terms).all(axis=1)
    if np.sum(known) < MIN_TERMS:
        return None
    square, trace = weights[known] @ terms[known]
    return None if square <= 0 or trace <= 0 else float(trace / square)
