"""Stems and heads for images of at most 64 pixels.

Torchvision's classifiers are drawn for 224 pixels: their stems throw away a factor 4 of resolution before the first
block, and an 8-pixel or 32-pixel image ends as a single pixel half-way. Here each family keeps its blocks and gets the
stem that the literature uses on CIFAR: a 3×3 convolution of stride 1 and no pooling for residual networks (He et al.
2016, §4.2), the first stride removed for mobile networks, smaller patches for transformers, a head of 512 instead of
4096 units for VGG and AlexNet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tula_hpc.workloads.plain import small_alexnet, small_vgg
from tula_hpc.workloads.stems import keep_resolution, patch_conv, small_stem
from tula_hpc.workloads.transformers import small_maxvit, small_vision_transformer
from tula_hpc.workloads.zoo import zoo_model

LARGEST_SMALL_SIZE = 64


def small_image_model(name: str, classes: int, image_size: int) -> nn.Module:
    """A torchvision classifier for images of at most 64 pixels.

    Raises:
        InputError: The family cannot take this size; the message says which it can.
    """
    for prefix, build in _BUILDERS.items():
        if name.startswith(prefix):
            return build(name, classes, image_size)
    model = zoo_model(name, classes)
    for prefix, adapt in _ADAPTERS.items():
        if name.startswith(prefix):
            adapt(model, image_size)
    return model


def _residual(model: Any, _: int) -> None:
    model.conv1 = small_stem(model.conv1)
    model.maxpool = nn.Identity()


def _shuffle(model: Any, _: int) -> None:
    keep_resolution(model)
    model.maxpool = nn.Identity()


def _dense(model: Any, _: int) -> None:
    model.features.conv0 = small_stem(model.features.conv0)
    model.features.pool0 = nn.Identity()


def _squeeze(model: Any, _: int) -> None:
    model.features[0] = small_stem(model.features[0])


def _google(model: Any, _: int) -> None:
    model.conv1.conv = small_stem(model.conv1.conv)
    model.maxpool1 = nn.Identity()


def _inception(model: Any, _: int) -> None:
    """Inception's stem is not padded and takes 8 of 11 pixels; padded and without stride or pooling it takes none."""
    for block in (model.Conv2d_1a_3x3, model.Conv2d_2a_3x3, model.Conv2d_4a_3x3):
        keep_resolution(block)
        block.conv.padding = (1, 1)
    model.maxpool1 = model.maxpool2 = nn.Identity()


def _first_stride(model: nn.Module, _: int) -> None:
    keep_resolution(model)


def _patches(model: Any, image_size: int) -> None:
    """A first grid of 16 patches along an edge, or of single pixels: three halvings follow."""
    model.features[0][0] = patch_conv(model.features[0][0], max(1, image_size // 16))


_BUILDERS: dict[str, Callable[[str, int, int], nn.Module]] = {
    "vgg": small_vgg,
    "alexnet": small_alexnet,
    "vit_": small_vision_transformer,
    "maxvit_": small_maxvit,
}
_ADAPTERS: dict[str, Callable[[nn.Module, int], None]] = {
    "resnet": _residual,
    "resnext": _residual,
    "wide_resnet": _residual,
    "shufflenet": _shuffle,
    "densenet": _dense,
    "squeezenet": _squeeze,
    "googlenet": _google,
    "inception": _inception,
    "mobilenet": _first_stride,
    "efficientnet": _first_stride,
    "mnasnet": _first_stride,
    "regnet": _first_stride,
    "convnext": _patches,
    "swin": _patches,
}
