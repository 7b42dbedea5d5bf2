"""A model that needs much memory and little time: 4 MiB of activations per sample, for tests that run out of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BYTES_PER_SAMPLE = 4 * 1024**2


class Hungry(nn.Module):
    """A linear classifier on averaged pixels, by way of an activation of `BYTES_PER_SAMPLE` bytes per sample."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        pixels = nn.functional.adaptive_avg_pool2d(images, 8).mean(1).flatten(1)  # (b, 64)
        wide = pixels.repeat(1, BYTES_PER_SAMPLE // (4 * pixels.shape[1])) * self.gain  # kept for the backward pass
        output: Tensor = self.head(wide.view(len(images), -1, 64).mean(1))
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """For `model = "tests.examples.hungry:build"`."""
    return Hungry(classes)
