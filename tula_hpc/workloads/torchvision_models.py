"""Models by name: any torchvision classifier, or a function of the user's.

Torchvision's classifiers as they come, without pretrained weights.

Stems and heads for images of at most 64 pixels.

Torchvision's classifiers are drawn for 224 pixels: their stems throw away a factor 4 of resolution
before the first block, and an 8-pixel or 32-pixel image ends as a single pixel half-way. Here each
family keeps its blocks and gets the stem that the literature uses on CIFAR: a 3×3 convolution of
stride 1 and no pooling for residual networks (He et al. 2016, §4.2), the first stride removed for
mobile networks, smaller patches for transformers, a head of 512 instead of 4096 units for VGG and
AlexNet.

First layers for small images, initialised as their families initialise theirs.

VGG and AlexNet for small images: their convolutions, fewer poolings, and a head of 512 units.

The published heads alone hold 100 million (VGG) and 50 million (AlexNet) weights. They are never
allocated here: the model is laid out on the meta device, cut to size, and only then given memory
and weights.

Vision transformers, which are built for one image size: their grids of patches must divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models.maxvit import MaxVit

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.user_code import is_entry_point, own_model

# Auxiliary heads would make the output a tuple in training and add a loss that nobody asked for.
# init_weights spells the default out: torchvision warns where it is left open.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


def zoo_model(name: str, classes: int, **arguments: Any) -> nn.Module:
    """A torchvision classifier with `classes` outputs; `arguments` go to its constructor."""
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=classes, **_ARGUMENTS.get(name, {}), **arguments
    )
    return model


def size_error(name: str, image_size: int, expected: str) -> InputError:
    """The error for a model that cannot take images of this size."""
    return InputError(
        f"{name} cannot take images of {image_size} pixels: {expected}", key="workload.image_size"
    )


def small_stem(first: nn.Conv2d, kernel_size: int = 3) -> nn.Conv2d:
    """A convolution in place of `first` that keeps the resolution: stride 1, same padding.

    Weights are He-normal over the fan-out (He et al. 2015), as ResNet, DenseNet and VGG have it.
    """
    padding = kernel_size // 2
    conv = nn.Conv2d(
        first.in_channels,
        first.out_channels,
        kernel_size,
        stride=1,
        padding=padding,
        bias=first.bias is not None,
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


_HEAD_WIDTH = 512
# pixels; 64 would make its 5×5 convolution four times as dear as at 32
_ALEXNET_STRIDE_ABOVE = 32


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


# patches along an edge of a small image: 64 tokens, so that attention has something to attend to
_SMALL_GRID = 8
# from the image to the last block's grid
_MAXVIT_STRIDE = 32
# window edges, largest first; torchvision's is 7, and 1 would attend to nothing
_MAXVIT_PARTITIONS = range(12, 1, -1)


def vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    """`vit_*` with its own patch.

    Raises:
        InputError: The patch does not divide the image.
    """
    patch = int(name.rsplit("_", 1)[1])
    if image_size % patch:
        below = image_size // patch * patch
        raise size_error(
            name,
            image_size,
            f"expected a multiple of {patch}, for example {below} or {below + patch}",
        )
    return zoo_model(name, classes, image_size=image_size)


def small_vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    """`vit_*` with a patch so small that 8 fit along an edge.

    Raises:
        InputError: The edge is not a multiple of 8.
    """
    if image_size % _SMALL_GRID:
        raise size_error(
            name, image_size, f"expected a multiple of {_SMALL_GRID}; the smallest is {_SMALL_GRID}"
        )
    own_patch = int(name.rsplit("_", 1)[1])
    # a size that has as many position embeddings as we need
    model: Any = zoo_model(name, classes, image_size=_SMALL_GRID * own_patch)
    patch = image_size // _SMALL_GRID
    model.conv_proj = patch_conv(model.conv_proj, patch)
    model.patch_size, model.image_size = patch, image_size
    return model  # type: ignore[no-any-return] # a module, whose attributes are typed too loosely to be set


def maxvit(name: str, classes: int, image_size: int) -> nn.Module:
    """`maxvit_t` with the largest window that divides every block's grid (7 at 224 pixels, as published).

    Raises:
        InputError: No window does.
    """
    last_grid = image_size // _MAXVIT_STRIDE
    windows = [window for window in _MAXVIT_PARTITIONS if last_grid and last_grid % window == 0]
    if image_size % _MAXVIT_STRIDE or not windows:
        raise size_error(
            name,
            image_size,
            "expected 32, 64 or a larger multiple of 32, for example 96, 128 or 224",
        )
    preferred = 7 if 7 in windows else windows[0]
    return _maxvit_t(classes, image_size, preferred)


def small_maxvit(name: str, classes: int, image_size: int) -> nn.Module:
    """`maxvit_t` whose stem keeps the resolution, so that half the image size suffices.

    Raises:
        InputError: The size is neither 32 nor 64.
    """
    if image_size % _MAXVIT_STRIDE:
        raise size_error(name, image_size, "expected a multiple of 32; the smallest is 32")
    model = maxvit(name, classes, 2 * image_size)
    keep_resolution(model)
    return model


def _maxvit_t(classes: int, image_size: int, window: int) -> nn.Module:
    """torchvision.models.maxvit_t, which does not let its partition_size be chosen."""
    model: nn.Module = MaxVit(
        input_size=(image_size, image_size),
        stem_channels=64,
        partition_size=window,
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        num_classes=classes,
    )
    return model


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

# below, its unpadded stem leaves nothing for the last blocks
_SMALLEST_INCEPTION = 75


def build_model(spec: WorkloadSpec, classes: int, image_size: int) -> nn.Module:
    """The workload's model on the CPU, its weights drawn from `spec.seed` alone.

    Up to 64 pixels torchvision's models get a stem and a head that suit small images (see
    `small_images`); above, they are torchvision's own.

    Args:
        spec: Which model, and the seed.
        classes: Width of the output.
        image_size: Edge of the square images, pixels.

    Returns:
        A module that maps (batch, 3, image_size, image_size) to (batch, classes).

    Raises: InputError: The model cannot take images of this size, or the user's function is not as
        expected.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)
        if is_entry_point(spec.model):
            return own_model(spec.model, classes, image_size)
        if image_size <= LARGEST_SMALL_SIZE:
            return small_image_model(spec.model, classes, image_size)
        return _large_image_model(spec.model, classes, image_size)


def _large_image_model(name: str, classes: int, image_size: int) -> nn.Module:
    if name.startswith("vit_"):
        return vision_transformer(name, classes, image_size)
    if name.startswith("maxvit_"):
        return maxvit(name, classes, image_size)
    if name == "inception_v3" and image_size < _SMALLEST_INCEPTION:
        raise size_error(
            name,
            image_size,
            f"expected at most {LARGEST_SMALL_SIZE} or at least {_SMALLEST_INCEPTION}",
        )
    return zoo_model(name, classes)
