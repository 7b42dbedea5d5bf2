"""A network whose layers take as long as on a device of their own, whatever the processor does meanwhile.

The test cluster's nodes share two cores with each other and with other machines, so the time of their computation
differs by a tenth from minute to minute. Here it is the clock that decides how long a layer takes, as for a host that
waits for a GPU: the layer is computed, and the rest of its time slept. Gradients, their all-reduce, the loop and the
measurements are real.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

# seconds of forward and backward pass together: of any batch, and of each sample
FIXED_S = 0.010
SAMPLE_S = 0.0015
# the backward pass takes twice as long as the forward pass
BACKWARD = 2.0 / 3.0


class Clock:
    """When the emulated device is done with what it was given in a step of so many samples."""

    def __init__(self, batch: int) -> None:
        self.step_s = FIXED_S + SAMPLE_S * batch
        self.done_at = time.perf_counter()

    def wait(self, share: float) -> None:
        """Sleep until a share of the step's time has passed since the work before it was done."""
        self.done_at += share * self.step_s
        time.sleep(max(0.0, self.done_at - time.perf_counter()))


class _Pace(torch.autograd.Function):
    """Ends no earlier than its time after the layer before it, in both directions."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, clock: Clock, share: float) -> torch.Tensor:
        ctx.clock, ctx.share = clock, share
        clock.wait((1.0 - BACKWARD) * share)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.wait(BACKWARD * ctx.share)
        return gradient, None, None


class Paced(nn.Module):
    """Layers that share the step's time equally."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the layers, each in its time."""
        clock = Clock(len(images))
        values = images
        for layer in self.layers:
            values = _Pace.apply(layer(values), clock, 1.0 / len(self.layers))  # type: ignore[no-untyped-call]
        return values


def paced_perceptron(classes: int, image_size: int) -> nn.Module:
    """Return four linear layers with 0.7 million parameters over images scaled down to 8 × 8 pixels."""
    first = nn.Sequential(nn.AvgPool2d(image_size // 8), nn.Flatten(), nn.Linear(192, 512), nn.ReLU())
    second = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
    third = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
    return Paced(first, second, third, nn.Linear(512, classes))
