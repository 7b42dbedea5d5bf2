"""Torchvision's classifiers as they come, without pretrained weights."""

from __future__ import annotations

from typing import Any

import torchvision
from torch import nn

from tula_hpc.errors import InputError

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
    return InputError(f"{name} cannot take images of {image_size} pixels: {expected}", key="workload.image_size")
