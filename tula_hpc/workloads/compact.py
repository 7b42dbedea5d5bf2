"""Two small convolutional networks that train in seconds to minutes on CPU cores.

They are written as a user's own models would be (see `entry_points`) and are named in a sweep the same way:
``model = "tula_hpc.workloads.compact:compact_cnn"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def compact_cnn(classes: int, image_size: int) -> nn.Module:
    """Three convolutions and a linear layer, 0.1 million parameters; for images of 8 to 32 pixels."""
    return _network((32, 64, 128), _strides(3, image_size), classes)


def medium_cnn(classes: int, image_size: int) -> nn.Module:
    """Six convolutions and a linear layer, 2.9 million parameters, 25 million multiplications for 32 pixels.

    Most weights sit in the last layers, where the image is small: enough gradient for the network to matter, at a
    step that half a CPU core can do.
    """
    return _network((32, 64, 128, 256, 384, 512), _strides(6, image_size), classes)


def _strides(layers: int, image_size: int) -> list[int]:
    """Halve after the first layer until two pixels are left."""
    halvings = max(0, image_size.bit_length() - 2)
    return [1] + [2 if layer < halvings else 1 for layer in range(layers - 1)]


def _network(widths: Sequence[int], strides: Sequence[int], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after, stride in zip((3, *widths), widths, strides, strict=False):
        layers += [
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
