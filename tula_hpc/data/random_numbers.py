"""States of the random numbers on the host, recorded before each batch at little cost.

A data set draws from Python's, NumPy's and torch's generators in a process that loads by itself.
Reading NumPy's state takes 0.1 ms, as each of its 624 words becomes a number of Python first; but
most data sets never draw from it.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np
import torch

# state of NumPy's default generator: 624 words of 4 bytes, and the position in them
MT19937_BYTES = 4 * 625


class Numbers(NamedTuple):
    """States of random numbers on the host, as their libraries have them."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch: torch.Tensor


class NumpyState:
    """State of NumPy's random numbers, which is read again only if it may have changed.

    Normal numbers are drawn in pairs. The second one is stored outside the generator's memory, and
    using it does not change that memory: while there is one, the state is always read.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._memory = b""

    def now(self) -> tuple[Any, ...]:
        """Return the state as `numpy.random.get_state` does."""
        memory = _memory()
        is_same = self._state is not None and memory == self._memory != b""
        if not is_same or self._state[3]:
            self._state = np.random.get_state(legacy=True)
            self._memory = memory
        state: tuple[Any, ...] = self._state
        return state


def _memory() -> bytes:
    """Return the memory of NumPy's generator; b"" if a script has replaced the generator."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # is public
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


_numpy = NumpyState()


def random_numbers() -> Numbers:
    """Return the states as they are now."""
    return Numbers(random.getstate(), _numpy.now(), torch.get_rng_state())
