"""A model with BatchNorm that trains in a millisecond."""

from __future__ import annotations

from torch import nn


def normed(classes: int, image_size: int) -> nn.Module:
    """Return a model with one hidden layer, for `model = "tests.examples.normed:normed"`."""
    pixels = 3 * image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))
