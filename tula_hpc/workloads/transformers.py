"""Vision transformers, which are built for one image size: their grids of patches must divide evenly."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models.maxvit import MaxVit

from tula_hpc.workloads.stems import keep_resolution, patch_conv
from tula_hpc.workloads.zoo import size_error, zoo_model

_SMALL_GRID = 8  # patches along an edge of a small image: 64 tokens, so that attention has something to attend to
_MAXVIT_STRIDE = 32  # from the image to the last block's grid
_MAXVIT_PARTITIONS = range(12, 1, -1)  # window edges, largest first; torchvision's is 7, and 1 would attend to nothing


def vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    """`vit_*` with its own patch.

    Raises:
        InputError: The patch does not divide the image.
    """
    patch = int(name.rsplit("_", 1)[1])
    if image_size % patch:
        below = image_size // patch * patch
        raise size_error(name, image_size, f"expected a multiple of {patch}, for example {below} or {below + patch}")
    return zoo_model(name, classes, image_size=image_size)


def small_vision_transformer(name: str, classes: int, image_size: int) -> nn.Module:
    """`vit_*` with a patch so small that 8 fit along an edge.

    Raises:
        InputError: The edge is not a multiple of 8.
    """
    if image_size % _SMALL_GRID:
        raise size_error(name, image_size, f"expected a multiple of {_SMALL_GRID}; the smallest is {_SMALL_GRID}")
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
        raise size_error(name, image_size, "expected 32, 64 or a larger multiple of 32, for example 96, 128 or 224")
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
