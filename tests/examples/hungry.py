"""Models that need much memory and little time: 8 MiB per sample, for tests that run out of memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

BYTES_PER_SAMPLE = 8 * 1024**2
PAGE = 4096


class Kept(torch.autograd.Function):
    """Keep memory for the backward pass, as activations are kept."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor) -> Tensor:
        # small enough for the heap, which keeps its pages for the next pass: fresh ones would take most of the time
        ctx.kept = [torch.empty(BYTES_PER_SAMPLE, dtype=torch.uint8) for _ in pixels]
        for sample in ctx.kept:
            # the kernel provides a page once it is written to
            sample[::PAGE] = 1
        return pixels.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Hungry(nn.Module):
    """A linear classifier on averaged pixels that keeps `BYTES_PER_SAMPLE` bytes per sample.

    Args:
        classes: Number of outputs.
        frugal_passes: Number of training passes before the first one that needs much memory.
    """

    def __init__(self, classes: int, frugal_passes: int = 0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, classes)
        self.frugal_passes = frugal_passes

    def forward(self, images: Tensor) -> Tensor:
        # (b, 64)
        pixels = nn.functional.adaptive_avg_pool2d(images, 8).mean(1).flatten(1)
        self.frugal_passes -= self.training
        scaled = pixels * self.gain
        if self.frugal_passes < 0:
            scaled = Kept.apply(scaled)  # type: ignore[no-untyped-call]
        output: Tensor = self.head(scaled)
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.examples.hungry:build"`."""
    return Hungry(classes)


def build_late(classes: int, image_size: int) -> nn.Module:
    """Return a model that runs out of memory only later in the training."""
    return Hungry(classes, frugal_passes=6)


def build_one_rank(classes: int, image_size: int) -> nn.Module:
    """Return a model that needs much memory only in the job's second process."""
    return Hungry(classes, frugal_passes=0 if os.environ.get("RANK") == "1" else 10**9)
