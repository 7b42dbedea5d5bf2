"""Do two quantities rise and fall together? Spearman's rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's ρ, in [−1, 1]; equal values share the mean of their ranks.

    Args:
        first: (n,).
        second: (n,). Pairs with a value that is not finite are left out.

    Returns:
        NaN for fewer than three pairs, or where one of the two does not change.
    """
    pairs = [pair for pair in zip(first, second, strict=True) if all(map(math.isfinite, pair))]
    if len(pairs) < 3:
        return math.nan
    ranks = np.array([_ranks(column) for column in zip(*pairs, strict=True)])
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    spread = np.sqrt((centred**2).sum(axis=1).prod())
    return float((centred[0] * centred[1]).sum() / spread) if spread > 0 else math.nan


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = last - (counts - 1) / 2
    return mean[place]
