"""Splitting and thinning of data sets, always the same way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tula_hpc.workloads.pixels import Indices

_TEST_SHARE = 0.2
# One split for every sweep: results with different seeds are results on the same test images.
_SPLIT_SEED = 20_150_000


class Split(NamedTuple):
    """Indices of the two parts, ascending."""

    train: Indices
    test: Indices


def stratified_split(labels: Indices) -> Split:
    """A fifth of each class, at least one sample of it, for testing; classes of a single sample are only trained on."""
    random = np.random.default_rng(_SPLIT_SEED)
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        wanted = max(1, round(_TEST_SHARE * len(members))) if len(members) > 1 else 0
        is_test[members[:wanted]] = True
    return Split(np.flatnonzero(~is_test), np.flatnonzero(is_test))


def random_order(samples: int, seed: int) -> Indices:
    """A fixed random order of a data set; subsets are its beginnings, so a larger subset contains the smaller."""
    return np.random.default_rng((seed, samples)).permutation(samples)
