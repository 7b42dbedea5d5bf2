"""A network with little computation and many weights, like VGG's head: a workload dominated by synchronization."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def vgg_like(classes: int, image_size: int) -> nn.Module:
    """Return three convolutions and three linear layers, two of them wide; 5.4 million parameters for 32 pixels."""
    widths = (3, 16, 32, 64)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    features = widths[-1] * (image_size // 8) ** 2
    head = [nn.Linear(features, 2048), nn.ReLU(inplace=True), nn.Linear(2048, 1536), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(1536, classes))
