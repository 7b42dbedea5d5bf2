"""A model and a data set that take time but no processor, for `workload.model` and `workload.dataset`."""

from __future__ import annotations

import os
import random
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec

CLASSES = 4
STEP_S = 0.04
# environment variables: mean seconds of an item, and how uneven items are
ITEM_S, ITEM_CV = "SLEEPY_ITEM_S", "SLEEPY_ITEM_CV"


class SleepyImages(Dataset[tuple[Tensor, int]]):
    """Training images that each take a while to load, always the same; test images take no time."""

    def __init__(self, samples: int, *, sleeps: bool) -> None:
        self.samples = samples
        self.mean_s = float(os.environ[ITEM_S]) if sleeps else 0.0
        self.cv = float(os.environ[ITEM_CV])

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.mean_s:
            shape = 1 / self.cv**2
            time.sleep(random.Random(index).gammavariate(shape, self.mean_s / shape))
        return torch.zeros(3, 8, 8), index % CLASSES


def images(spec: WorkloadSpec) -> tuple[SleepyImages, SleepyImages, int]:
    """Return training set, test set, number of classes."""
    return SleepyImages(spec.samples or 4096, sleeps=True), SleepyImages(64, sleeps=False), CLASSES


class Sleepy(nn.Module):
    """A single layer that sleeps in every training pass."""

    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * image_size**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(STEP_S)
        output: Tensor = self.layer(images.flatten(1))
        return output


def model(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.sleepy:model"`."""
    return Sleepy(classes, image_size)
