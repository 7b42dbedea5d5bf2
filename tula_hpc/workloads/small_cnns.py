"""Small convolutional networks that train in seconds to minutes on CPU cores.

They are written as a user's own models would be (see `user_code`) and are named in a sweep the
same way: ``model = "tula_hpc.workloads.small_cnns:compact_cnn"``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def compact_cnn(classes: int, image_size: int) -> nn.Module:
    """Build three convolutions and a linear layer, 0.1 million parameters; for 8 to 32 pixels."""
    return _network((32, 64, 128), _strides(3, image_size), classes)


def plain_cnn(classes: int, image_size: int) -> nn.Module:
    """Build `compact_cnn` with biases in place of BatchNorm: a high learning rate harms it."""
    layers: list[nn.Module] = []
    strides = _strides(3, image_size)
    for before, after, stride in zip((3, 32, 64), (32, 64, 128), strides, strict=True):
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.ReLU(inplace=True)]
    return _with_head(layers, 128, classes)


def depthwise_cnn(classes: int, image_size: int) -> nn.Module:
    """Build a convolution and three depthwise separable ones (MobileNet).

    It has 0.03 million parameters in many small tensors.
    """
    strides = _strides(4, image_size)
    layers = _convolution(3, 32, stride=strides[0])
    for before, after, stride in zip((32, 64, 96), (64, 96, 128), strides[1:], strict=True):
        layers += _convolution(before, before, stride=stride, groups=before)
        layers += _convolution(before, after, kernel=1)
    return _with_head(layers, 128, classes)


def medium_cnn(classes: int, image_size: int) -> nn.Module:
    """Build six convolutions and a linear layer, 2.9 million parameters.

    An image of 32 pixels takes 25 million multiplications. Most weights are in the last layers,
    where the image is small: gradients are large enough for the all-reduce to matter, at a step
    that half a CPU core can do.
    """
    return _network((32, 64, 128, 256, 384, 512), _strides(6, image_size), classes)


def _strides(layers: int, image_size: int) -> list[int]:
    """Return strides that halve the image after the first layer until two pixels are left."""
    halvings = max(0, image_size.bit_length() - 2)
    return [1] + [2 if layer < halvings else 1 for layer in range(layers - 1)]


def _network(widths: Sequence[int], strides: Sequence[int], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after, stride in zip((3, *widths), widths, strides, strict=False):
        layers += _convolution(before, after, stride=stride)
    return _with_head(layers, widths[-1], classes)


def _convolution(
    before: int, after: int, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(
            before, after, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
        ),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    ]


def _with_head(layers: Sequence[nn.Module], width: int, classes: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
