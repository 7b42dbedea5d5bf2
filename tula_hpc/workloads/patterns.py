"""The synthetic data set: a smooth pattern for each class under noise, made when it is read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.workloads.pixels import Bytes, Indices

_WAVES = 4  # cosines per channel and class: as smooth as photographs are at a small scale
_CONTRAST = 40.0  # of 255: amplitude of the pattern
_NOISE = 50.0  # of 255: deviation of the noise, of pixels; the classes overlap but can be told apart


class PatternSource(NamedTuple):
    """Images that follow from (seed, position) alone; position p is of class p mod `classes`.

    Attributes:
        seed: Of patterns and noise.
        classes: How many patterns.
        edge: Pixels.
    """

    seed: int
    classes: int
    edge: int

    def read(self, positions: Indices) -> Bytes:
        """Images at these positions, (n, 3, edge, edge)."""
        patterns = {label: self._pattern(label) for label in np.unique(positions % self.classes).tolist()}
        return np.stack([self._image(position, patterns[position % self.classes]) for position in positions.tolist()])

    def _image(self, position: int, pattern: NDArray[np.float32]) -> Bytes:
        noise = np.random.default_rng((self.seed, 1, position)).standard_normal(pattern.shape, np.float32)
        return np.clip(127.5 + pattern + _NOISE * noise, 0, 255).astype(np.uint8)

    def _pattern(self, label: int) -> NDArray[np.float32]:
        """Sum of cosines of at most two periods along an edge, (3, edge, edge), amplitude about `_CONTRAST`."""
        random = np.random.default_rng((self.seed, 0, label))
        frequency = random.uniform(-2, 2, (3, _WAVES, 2))
        phase = random.uniform(0, 2 * np.pi, (3, _WAVES, 1, 1))
        y, x = np.mgrid[0 : 1 : 1j * self.edge, 0 : 1 : 1j * self.edge]
        angle = 2 * np.pi * (frequency[..., :1, None] * y + frequency[..., 1:, None] * x) + phase
        waves: NDArray[np.float32] = (_CONTRAST / np.sqrt(_WAVES) * np.cos(angle).sum(axis=1)).astype(np.float32)
        return waves
