"""Models by name: any torchvision classifier without pretrained weights, or a user's function.

Torchvision's classifiers are made for 224 pixels: their stems reduce the resolution by a factor of
4 before the first block, and an 8-pixel or 32-pixel image is a single pixel half-way. Up to 64
pixels each family keeps its blocks and gets the stem that the literature uses on CIFAR: a 3×3
convolution of stride 1 and no pooling for residual networks (He et al. 2016, §4.2), the first
stride removed for mobile networks, smaller patches for transformers, a head of 512 instead of 4096
units for VGG and AlexNet. First layers are initialised as their families initialise theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.user_code import is_entry_point, own_model

LARGEST_SMALL_SIZE = 64
# Auxiliary heads would make the output a tuple in training and add a loss that no one asked for.
# init_weights states the default, because torchvision warns if it is missing.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}
_HEAD_WIDTH = 512
# pixels; the 5×5 convolution has stride 1 up to here, and would cost four times as much at 64
_ALEXNET_STRIDE_ABOVE = 32
# patches along an edge of a small image: 64 tokens, so that attention has something to attend to
_SMALL_GRID = 8
# edge of the image divided by that of the last block's grid
_MAXVIT_STRIDE = 32
# window edges, largest first; torchvision's is 7, and 1 would attend to nothing
_MAXVIT_PARTITIONS = range(12, 1, -1)
# pixels; below that, the unpadded stem leaves nothing for the last blocks
_SMALLEST_INCEPTION = 75


def build_model(spec: WorkloadSpec, classes: int, image_size: int) -> nn.Module:
    """Return the workload's model on the CPU, its weights drawn from `spec.seed` alone.

    Returns:
        A module that maps (batch, 3, image_size, image_size) to (batch, classes).

    Raises:
        InputError: The model cannot take images of this size, or the user's function is not as
            expected.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)
        if is_entry_point(spec.model):
            return own_model(spec.model, classes, image_size)
        if image_size <= LARGEST_SMALL_SIZE:
            return _small_image_model(spec.model, classes, image_size)
        return _large_image_model(spec.model, classes, image_size)


def _large_image_model(name: str, classes: int, image_size: int) -> nn.Module:
    if name.startswith("vit_"):
        return _vision_transformer(name, classes, image_size)
    if name.startswith("maxvit_"):
        return _maxvit(name, classes, image_size)
    if name == "inception_v3" and image_size < _SMALLEST_INCEPTION:
        expected = f"expected at most {LARGEST_SMALL_SIZE} or at least {_SMALLEST_INCEPTION}"
        raise _size_error(name, image_size, expected)
    return _torchvision_model(name, classes)


def _small_image_model(name: str, classes: int, image_size: int) -> nn.Module:
    for prefix, build in _BUILDERS.items():
        if name.startswith(prefix):
            return build(name, classes, image_size)
    model = _torchvision_model(name, classes)
    for prefix, adapt in _ADAPTERS.items():
        if name.startswith(prefix):
            adapt(model, image_size)
    return model


def _torchvision_model(name: str, classes: int, **arguments: Any) -> nn.Module:
    # imported here, since a user's own model does not need torchvision
    from torchvision.models import get_model

    model: nn.Module = get_model(
        name, weights=None, num_classes=classes, **_ARGUMENTS.get(name, {}), **arguments
    )
    return model


def _size_error(name: str, image_size: int, expected: str) -> InputError:
    message = f"{name} cannot take images of {image_size} pixels: {expected}"
    return InputError(message, key="workload.image_size")


def _small_stem(first: nn.Conv2d, kernel_size: int = 3) -> nn.Conv2d:
    """Return a convolution to replace `first` that keeps the resolution: stride 1, same padding.

    Weights are He-normal over the fan-out (He et al. 2015), as in ResNet, DenseNet and VGG.
    """
    conv = nn.Conv2d(
        first.in_channels,
        first.out_channels,
        kernel_size,
        stride=1,
        padding=kernel_size // 2,
        bias=first.bias is not None,
    )
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


def _patch_conv(first: nn.Conv2d, patch: int) -> nn.Conv2d:
    """Return a patch embedding to replace `first`; its patches do not overlap.

    Patches of one pixel are seen through 3×3 windows. Weights are normal with variance 1/fan-in,
    truncated, as in torchvision's transformers.
    """
    kernel, padding = (3, 1) if patch == 1 else (patch, 0)
    conv = nn.Conv2d(first.in_channels, first.out_channels, kernel, stride=patch, padding=padding)
    nn.init.trunc_normal_(conv.weight, std=math.sqrt(1 / (first.in_channels * kernel**2)))
    nn.init.zeros_(conv.bias)  # type: ignore[arg-type] # there is one
    return conv


def _keep_resolution(model: nn.Module, _: int = 0) -> None:
    """Set the stride of a model's or block's first convolution, which must be padded, to 1."""
    next(module for module in model.modules() if isinstance(module, nn.Conv2d)).stride = (1, 1)


# The published heads of VGG and AlexNet hold 100 million and 50 million weights. They are never
# allocated: the models are laid out on the meta device, cut to size, and only then given memory
# and weights.


def _small_vgg(name: str, classes: int, image_size: int) -> nn.Module:
    """Build `vgg*` with as many poolings as the image has halvings, and a small head."""
    with torch.device("meta"):
        model: Any = _torchvision_model(name, classes, init_weights=False)
        poolings = [i for i, one in enumerate(model.features) if isinstance(one, nn.MaxPool2d)]
        for i in poolings[image_size.bit_length() - 1 :]:
            model.features[i] = nn.Identity()
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = _head(512, classes)
    return _with_weights(model)


def _small_alexnet(name: str, classes: int, image_size: int) -> nn.Module:
    """Build `alexnet` with a 5×5 first convolution, padded poolings, and a small head."""
    with torch.device("meta"):
        model: Any = _torchvision_model(name, classes)
        model.features[0] = _small_stem(model.features[0], kernel_size=5)
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


def _with_weights(model: nn.Module) -> nn.Module:
    """Allocate the model on the default device with He-normal weights.

    VGG and AlexNet do not normalise their activations.
    """
    model.to_empty(device=torch.get_default_device())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


# Vision transformers are built for one image size: their grids of patches must divide evenly.


def _vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    patch = int(name.rsplit("_", 1)[1])
    if image_size % patch:
        below = image_size // patch * patch
        expected = f"expected a multiple of {patch}, for example {below} or {below + patch}"
        raise _size_error(name, image_size, expected)
    return _torchvision_model(name, classes, image_size=image_size)


def _small_vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    """Build `vit_*` with a patch so small that 8 fit along an edge."""
    if image_size % _SMALL_GRID:
        expected = f"expected a multiple of {_SMALL_GRID}; the smallest is {_SMALL_GRID}"
        raise _size_error(name, image_size, expected)
    own_patch = int(name.rsplit("_", 1)[1])
    # at this size the model has as many position embeddings as there are patches
    model: Any = _torchvision_model(name, classes, image_size=_SMALL_GRID * own_patch)
    patch = image_size // _SMALL_GRID
    model.conv_proj = _patch_conv(model.conv_proj, patch)
    model.patch_size, model.image_size = patch, image_size
    built: nn.Module = model
    return built


def _maxvit(name: str, classes: int, image_size: int) -> nn.Module:
    """Build `maxvit_t` with a window that divides every block's grid.

    The window is 7, as published, if that fits (224 pixels), else the largest one that fits.
    torchvision.models.maxvit_t does not let its partition_size be chosen.
    """
    from torchvision.models.maxvit import MaxVit

    last_grid = image_size // _MAXVIT_STRIDE
    windows = [window for window in _MAXVIT_PARTITIONS if last_grid and last_grid % window == 0]
    if image_size % _MAXVIT_STRIDE or not windows:
        expected = "expected 32, 64 or a larger multiple of 32, for example 96, 128 or 224"
        raise _size_error(name, image_size, expected)
    model: nn.Module = MaxVit(
        input_size=(image_size, image_size),
        stem_channels=64,
        partition_size=7 if 7 in windows else windows[0],
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        num_classes=classes,
    )
    return model


def _small_maxvit(name: str, classes: int, image_size: int) -> nn.Module:
    """Build `maxvit_t` with a stem that keeps the resolution, so that half the size suffices."""
    if image_size % _MAXVIT_STRIDE:
        expected = "expected a multiple of 32; the smallest is 32"
        raise _size_error(name, image_size, expected)
    model = _maxvit(name, classes, 2 * image_size)
    _keep_resolution(model)
    return model


def _replace_stem(conv: str, pooling: str, model: Any, _: int) -> None:
    """Replace the first convolution, and remove the pooling behind it if there is a name of one."""
    model.set_submodule(conv, _small_stem(model.get_submodule(conv)))
    if pooling:
        model.set_submodule(pooling, nn.Identity())


def _adapt_shufflenet(model: Any, _: int) -> None:
    _keep_resolution(model)
    model.maxpool = nn.Identity()


def _adapt_inception(model: Any, _: int) -> None:
    """Remove the stem's stride and pooling, and pad the convolutions that take 6 pixels together."""
    for block in (model.Conv2d_1a_3x3, model.Conv2d_2a_3x3, model.Conv2d_4a_3x3):
        _keep_resolution(block)
        block.conv.padding = (1, 1)
    model.maxpool1 = model.maxpool2 = nn.Identity()


def _adapt_patches(model: Any, image_size: int) -> None:
    """Make the first grid 16 patches along an edge, or single pixels: three halvings follow."""
    model.features[0][0] = _patch_conv(model.features[0][0], max(1, image_size // 16))


_BUILDERS: dict[str, Callable[[str, int, int], nn.Module]] = {
    "vgg": _small_vgg,
    "alexnet": _small_alexnet,
    "vit_": _small_vision_transformer,
    "maxvit_": _small_maxvit,
}
_ADAPTERS: dict[str, Callable[[nn.Module, int], None]] = {
    "resnet": partial(_replace_stem, "conv1", "maxpool"),
    "resnext": partial(_replace_stem, "conv1", "maxpool"),
    "wide_resnet": partial(_replace_stem, "conv1", "maxpool"),
    "shufflenet": _adapt_shufflenet,
    "densenet": partial(_replace_stem, "features.conv0", "features.pool0"),
    "squeezenet": partial(_replace_stem, "features.0", ""),
    "googlenet": partial(_replace_stem, "conv1.conv", "maxpool1"),
    "inception": _adapt_inception,
    "mobilenet": _keep_resolution,
    "efficientnet": _keep_resolution,
    "mnasnet": _keep_resolution,
    "regnet": _keep_resolution,
    "convnext": _adapt_patches,
    "swin": _adapt_patches,
}
