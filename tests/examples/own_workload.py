"""A model and a data set of the user's own, as `tula_hpc.user_code` describes them.

From the root of the repository::

    tula sweep sweeps/quickstart.toml \
        --set workload.model=tests.examples.own_workload:perceptron \
        --set workload.dataset=tests.examples.own_workload:stripes
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec

# angles of the stripes
CLASSES = 4


class Stripes(Dataset[tuple[Tensor, int]]):
    """Images of stripes at four angles, shifted at random when augmented.

    Args:
        samples: Number of images.
        size: Edge in pixels.
        augment: Whether stripes are shifted at random.
    """

    def __init__(self, samples: int, size: int, augment: bool) -> None:
        self.samples, self.size, self.augment = samples, size, augment

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % CLASSES
        angle = torch.tensor(torch.pi * label / CLASSES)
        shift = torch.rand(()) if self.augment else torch.tensor(index / self.samples)
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        wave = torch.cos(2 * torch.pi * ((x * angle.cos() + y * angle.sin()) / 4 + shift))
        return wave.expand(3, -1, -1), label


def stripes(spec: WorkloadSpec) -> tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]], int]:
    """Return training set, test set, number of classes."""
    size = spec.image_size or 16
    return Stripes(512, size, spec.augment), Stripes(128, size, augment=False), CLASSES


def perceptron(classes: int, image_size: int) -> nn.Module:
    """Return a model with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 64), nn.ReLU(), nn.Linear(64, classes))
