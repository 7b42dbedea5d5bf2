"""VGG and AlexNet for small images: their convolutions, fewer poolings, and a head of 512 units.

The published heads alone hold 100 million (VGG) and 50 million (AlexNet) weights. They are never allocated here: the
model is laid out on the meta device, cut to size, and only then given memory and weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tula_hpc.workloads.stems import small_stem
from tula_hpc.workloads.zoo import zoo_model

_HEAD_WIDTH = 512
_ALEXNET_STRIDE_ABOVE = 32  # pixels; 64 would make its 5×5 convolution four times as dear as at 32


def small_vgg(name: str, classes: int, image_size: int) -> nn.Module:
    """`vgg*` with as many poolings as the image has halvings, global average pooling, and a small head."""
    with torch.device("meta"):
        model: Any = zoo_model(name, classes, init_weights=False)
        _limit_poolings(model.features, image_size.bit_length() - 1)
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = _head(512, classes)
    return _with_weights(model)


def small_alexnet(name: str, classes: int, image_size: int) -> nn.Module:
    """`alexnet` with a 5×5 first convolution, padded poolings, global average pooling, and a small head."""
    with torch.device("meta"):
        model: Any = zoo_model(name, classes)
        model.features[0] = small_stem(model.features[0], kernel_size=5)
        if image_size > _ALEXNET_STRIDE_ABOVE:
            model.features[0].stride = (2, 2)
        for module in model.features:
            if isinstance(module, nn.MaxPool2d):
                module.padding = 1
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = _head(256, classes)
    return _with_weights(model)


def _head(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(channels, _HEAD_WIDTH),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_HEAD_WIDTH, _HEAD_WIDTH),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(_HEAD_WIDTH, classes),
    )


def _limit_poolings(features: nn.Sequential, halvings: int) -> None:
    """Drop the poolings for which nothing is left to pool."""
    poolings = [i for i, module in enumerate(features) if isinstance(module, nn.MaxPool2d)]
    for i in poolings[halvings:]:
        features[i] = nn.Identity()


def _with_weights(model: nn.Module) -> nn.Module:
    """Memory on the default device, and He-normal weights everywhere: neither family normalises its activations."""
    model.to_empty(device=torch.get_default_device())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
