"""Data sets of small images that lie decoded as bytes: a whole batch is read and augmented with plain array operations.

A transform per image costs some 100 µs, as much as a small network's step; here it is a few µs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tula_hpc.workloads.hashing import Keys, below

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]


class PixelSource(Protocol):
    """Where the bytes come from."""

    def read(self, positions: Indices) -> Bytes:
        """Images at these positions, (n, 3, edge, edge)."""


class ArraySource(NamedTuple):
    """Images in memory, (n, 3, edge, edge)."""

    images: Bytes

    def read(self, positions: Indices) -> Bytes:
        """Images at these positions, a copy."""
        return self.images[positions]


class Jitter(NamedTuple):
    """Augmentation: a crop at a random place after zero padding, and a mirror image half of the time."""

    padding: int  # pixels on each side; the image moves by up to this much
    flip: bool

    def apply(self, images: Bytes, keys: Keys) -> Bytes:
        """Augment (n, 3, edge, edge); each image by its own key alone."""
        p, edge = self.padding, images.shape[-1]
        padded = np.pad(images, ((0, 0), (0, 0), (p, p), (p, p)))
        down, right = below(keys, 2 * p + 1, 0), below(keys, 2 * p + 1, 1)
        mirrored = below(keys, 2, 2) if self.flip else np.zeros(len(keys), np.int64)
        result = np.empty_like(images)
        for i, (y, x, mirror) in enumerate(zip(down.tolist(), right.tolist(), mirrored.tolist(), strict=True)):
            crop = padded[i, :, y : y + edge, x : x + edge]
            result[i] = crop[:, :, ::-1] if mirror else crop
        return result


class Scaling(NamedTuple):
    """From bytes to the floats a model sees: (byte / white − mean) / deviation, by channel."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    deviation: tuple[float, float, float] = (1.0, 1.0, 1.0)
    white: float = 255.0

    def apply(self, images: Bytes) -> Tensor:
        """Float tensor of the same shape (n, 3, edge, edge)."""
        deviation = torch.tensor(self.deviation).view(3, 1, 1)
        mean = torch.tensor(self.mean).view(3, 1, 1)
        return torch.from_numpy(images).float().mul_(1 / (self.white * deviation)).sub_(mean / deviation)


class PixelDataset(Dataset[tuple[Tensor, int]]):
    """Small labelled images.

    Args:
        source: The bytes.
        positions: Place of each sample in the source, (n,).
        labels: Class of each sample, (n,).
        scaling: Bytes to floats.
        image_size: Edge that the model wants, pixels; other sources are resized (bilinear) after augmentation.
        jitter: Augmentation; None for none.
    """

    def __init__(
        self,
        source: PixelSource,
        positions: Indices,
        labels: Indices,
        *,
        scaling: Scaling,
        image_size: int,
        jitter: Jitter | None = None,
    ) -> None:
        self.source, self.positions, self.labels = source, positions, labels
        self.scaling, self.image_size, self.jitter = scaling, image_size, jitter

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Items whose augmentation follows torch's default random numbers."""
        drawn = torch.randint(2**62, (len(indices),)).numpy() if self.jitter else np.zeros(len(indices))
        return self.keyed_items(np.asarray(indices), drawn.astype(np.uint64))

    def keyed_items(self, indices: Indices, keys: Keys) -> list[tuple[Tensor, int]]:
        """Items whose augmentation follows these keys, (n,), and nothing else."""
        images = self.source.read(self.positions[indices])
        if self.jitter:
            images = self.jitter.apply(images, keys)
        tensors = self._resized(self.scaling.apply(images))
        return list(zip(tensors.unbind(0), self.labels[indices].tolist(), strict=True))

    def take(self, indices: Indices) -> PixelDataset:
        """The same data set with these samples only."""
        return PixelDataset(
            self.source,
            self.positions[indices],
            self.labels[indices],
            scaling=self.scaling,
            image_size=self.image_size,
            jitter=self.jitter,
        )

    def _resized(self, images: Tensor) -> Tensor:
        if images.shape[-1] == self.image_size:
            return images
        size: Any = (self.image_size, self.image_size)
        return torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True)
