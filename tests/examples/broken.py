"""A model that fails on the nodes in BROKEN_HOSTS with the text in BROKEN_SAYS, such as that of a broken GPU."""

from __future__ import annotations

import os

from torch import Tensor, nn


class Broken(nn.Module):
    """A linear classifier whose second training pass fails on those nodes."""

    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
        self.passes = 0
        here = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
        self.is_broken = here in os.environ.get("BROKEN_HOSTS", "").split(",")

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        if self.is_broken and self.passes > 1:
            raise RuntimeError(os.environ.get("BROKEN_SAYS", "CUDA error: uncorrectable ECC error encountered"))
        output: Tensor = self.head(images)
        return output


def build(classes: int, image_size: int) -> nn.Module:
    """Return the model, for `model = "tests.examples.broken:build"`."""
    return Broken(classes, image_size)
