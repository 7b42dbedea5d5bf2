"""The Pareto front of two quantities that are both to be small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pareto_front(first: Array, second: Array) -> NDArray[np.intp]:
    """Rows that no other row beats in both: none is at most as large in one and smaller in the other.

    Args:
        first: (n,) finite numbers.
        second: (n,) finite numbers.

    Returns:
        Indices, ascending in `first`, so that `second` falls. Of equal points the one that comes first.
    """
    order = np.argsort(first)
    improves = second[order] < np.concatenate([[np.inf], np.minimum.accumulate(second[order])[:-1]])
    few = np.sort(order[improves])  # in these equal values of `first` may still be in the wrong order
    few = few[np.lexsort((second[few], first[few]))]
    return few[second[few] < np.concatenate([[np.inf], np.minimum.accumulate(second[few])[:-1]])]
