"""Models by name: any torchvision classifier, or a function of the user's."""

from __future__ import annotations

import torch
from torch import nn

from tula_hpc.config import WorkloadSpec
from tula_hpc.workloads.entry_points import is_entry_point, own_model
from tula_hpc.workloads.small_images import LARGEST_SMALL_SIZE, small_image_model
from tula_hpc.workloads.transformers import maxvit, vision_transformer
from tula_hpc.workloads.zoo import size_error, zoo_model

_SMALLEST_INCEPTION = 75  # below, its unpadded stem leaves nothing for the last blocks


def build_model(spec: WorkloadSpec, classes: int, image_size: int) -> nn.Module:
    """The workload's model on the CPU, its weights drawn from `spec.seed` alone.

    Up to 64 pixels torchvision's models get a stem and a head that suit small images (see `small_images`); above,
    they are torchvision's own.

    Args:
        spec: Which model, and the seed.
        classes: Width of the output.
        image_size: Edge of the square images, pixels.

    Returns:
        A module that maps (batch, 3, image_size, image_size) to (batch, classes).

    Raises:
        InputError: The model cannot take images of this size, or the user's function is not as expected.
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
        raise size_error(name, image_size, f"expected at most {LARGEST_SMALL_SIZE} or at least {_SMALLEST_INCEPTION}")
    return zoo_model(name, classes)
