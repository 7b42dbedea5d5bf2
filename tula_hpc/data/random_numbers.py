"""Random numbers on the host, noted before each batch at little cost.

Python's, NumPy's and torch's generators are those that a data set draws from in a process that
loads by itself. NumPy's takes 0.1 ms to read, as each of its 624 words becomes a number of Python
first; but most data sets never draw from it.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np
import torch

# NumPy's own generator has 624 words of state, and its place in them
MT19937_BYTES = 4 * 625


class Numbers(NamedTuple):
    """States of random numbers on the host, as their libraries have them."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor


class NumpyState:
    """State of NumPy's random numbers, which is read anew only once it may be another.

    A normal number is kept beside the generator, as they are drawn in pairs, and may be used
    without a change of the generator: while there is one the state is always read.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._memory = b""

    def now(self) -> tuple[Any, ...]:
        """Return it as `numpy.random.get_state` does."""
        memory = _memory()
        is_same = self._state is not None and memory == self._memory != b""
        if not is_same or self._state[3]:
            self._state = np.random.get_state(legacy=True)
            self._memory = memory
        state: tuple[Any, ...] = self._state
        return state


def _memory() -> bytes:
    """Return the memory of NumPy's generator; b"" where a script has put another in its place."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # is public
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


_numpy = NumpyState()


def random_numbers() -> Numbers:
    """Return them as they are now."""
    return Numbers(random.getstate(), _numpy.now(), torch.get_rng_state())
