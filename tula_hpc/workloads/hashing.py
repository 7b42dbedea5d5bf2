"""Random bits as a function of (seed, epoch, index), so that no order of calls and no process can change them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]


def scramble(values: Keys) -> Keys:
    """SplitMix64's output function: 64 well mixed bits for each counter.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with their 64-bit constants.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around silently, which is what is wanted
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mix(*parts: ArrayLike) -> Keys:
    """64 bits for each combination of the parts, which broadcast against each other; shape at least (1,)."""
    mixed = np.zeros(1, np.uint64)
    for part in parts:
        mixed = scramble(mixed ^ np.atleast_1d(np.asarray(part)).astype(np.uint64))
    return mixed


def below(keys: Keys, limit: int, stream: int) -> NDArray[np.int64]:
    """A whole number in [0, limit) for each key; different streams are independent of each other."""
    return (mix(keys, stream) % np.uint64(limit)).astype(np.int64)
