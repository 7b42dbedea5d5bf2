"""Models that need much memory and little time: 4 MiB of activations per sample, for tests that run out of memory."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

BYTES_PER_SAMPLE = 4 * 1024**2


class Hungry(nn.Module):
    """A linear classifier on averaged pixels, by way of an activation of `BYTES_PER_SAMPLE` bytes per sample.

    Args:
        classes: Outputs.
        frugal_passes: So many training passes come before the first hungry one.
    """

    def __init__(self, classes: int, frugal_passes: int = 0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, classes)
        self.frugal_passes = frugal_passes

    def forward(self, images: Tensor) -> Tensor:
        pixels = nn.functional.adaptive_avg_pool2d(images, 8).mean(1).flatten(1)  # (b, 64)
        self.frugal_passes -= self.training
        copies = 1 if self.frugal_passes >= 0 else BYTES_PER_SAMPLE // (4 * pixels.shape[1])
        wide = pixels.repeat(1, copies) * self.gain  # kept for the backward pass
        output: Tensor = self.head(wide.view(len(images), -1, 64).mean(1))
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """For `model = "tests.examples.hungry:build"`."""
    return Hungry(classes)


def build_late(classes: int, image_size: int) -> nn.Module:
    """Runs out of memory only in the course of training."""
    return Hungry(classes, frugal_passes=6)


def build_one_rank(classes: int, image_size: int) -> nn.Module:
    """Only the job's second process is hungry."""
    return Hungry(classes, frugal_passes=0 if os.environ.get("RANK") == "1" else 10**9)
