"""First layers for small images, initialised as their families initialise theirs."""

from __future__ import annotations

import math

from torch import nn


def small_stem(first: nn.Conv2d, kernel_size: int = 3) -> nn.Conv2d:
    """A convolution in place of `first` that keeps the resolution: stride 1, same padding.

    Weights are He-normal over the fan-out (He et al. 2015), as ResNet, DenseNet and VGG have it.
    """
    padding = kernel_size // 2
    conv = nn.Conv2d(
        first.in_channels, first.out_channels, kernel_size, stride=1, padding=padding, bias=first.bias is not None
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def patch_conv(first: nn.Conv2d, patch: int) -> nn.Conv2d:
    """A patch embedding in place of `first`: patches that do not overlap; 3×3 windows where a patch is one pixel.

    Weights are normal with variance 1/fan-in, truncated, as torchvision's transformers have it.
    """
    kernel, padding = (3, 1) if patch == 1 else (patch, 0)
    conv = nn.Conv2d(first.in_channels, first.out_channels, kernel, stride=patch, padding=padding)
    nn.init.trunc_normal_(conv.weight, std=math.sqrt(1 / (first.in_channels * kernel**2)))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type] # there is one
    return conv


def keep_resolution(model: nn.Module) -> None:
    """Take the stride out of the first convolution of a model or block, which must be padded."""
    next(module for module in model.modules() if isinstance(module, nn.Conv2d)).stride = (1, 1)
