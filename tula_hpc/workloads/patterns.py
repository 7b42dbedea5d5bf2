"""The synthetic data set: a smooth pattern for each class under noise, made when it is read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tula_hpc.workloads.hashing import below, mix
from tula_hpc.workloads.pixels import Bytes, Indices

_WAVES = 4  # cosines per channel and class, of at most two periods along an edge
_GREY = 127.5
_CONTRAST = 40.0  # of 255: amplitude of the pattern
_NOISE = 50.0  # of 255: deviation of each pixel's noise; the classes overlap but can be told apart
_NOISE_VALUES = 2**20  # each image takes its noise from somewhere in a long row: fresh noise costs 100 times as much


class PatternSource:
    """Images that follow from (seed, position) alone; position p is of class p mod `classes`.

    Args:
        seed: Of patterns and noise.
        classes: How many patterns.
        edge: Pixels.
    """

    def __init__(self, seed: int, classes: int, edge: int) -> None:
        self.seed, self.classes = seed, classes
        self._patterns = np.stack([_pattern(seed, label, edge) for label in range(classes)])
        noise = np.random.default_rng((seed, 1)).standard_normal(_NOISE_VALUES + 3 * edge * edge, np.float32)
        self._noise = (_NOISE * noise).astype(np.int16)

    def read(self, positions: Indices) -> Bytes:
        """Images at these positions, (n, 3, edge, edge)."""
        shape = self._patterns.shape[1:]
        starts = below(mix(self.seed, positions), _NOISE_VALUES, stream=0)
        images = np.empty((len(positions), *shape), np.uint8)
        noisy = np.empty(shape, np.int16)
        for image, label, start in zip(images, positions % self.classes, starts, strict=True):
            noise = self._noise[start : start + image.size].reshape(shape)
            np.add(self._patterns[label], noise, out=noisy)
            image[:] = noisy.clip(0, 255, out=noisy)
        return images


def _pattern(seed: int, label: int, edge: int) -> NDArray[np.int16]:
    """A sum of cosines around mid-grey, (3, edge, edge)."""
    random = np.random.default_rng((seed, 0, label))
    frequency = random.uniform(-2, 2, (3, _WAVES, 2, 1, 1))
    phase = random.uniform(0, 2 * np.pi, (3, _WAVES, 1, 1))
    y, x = np.mgrid[0 : 1 : 1j * edge, 0 : 1 : 1j * edge]
    waves = np.cos(2 * np.pi * (frequency[:, :, 0] * y + frequency[:, :, 1] * x) + phase)
    pattern: NDArray[np.float64] = _GREY + _CONTRAST / np.sqrt(_WAVES) * waves.sum(axis=1)
    return pattern.astype(np.int16)
