"""A workload: model, loss and data, ready to be trained."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.workloads.checkpointing import checkpoint_activations
from tula_hpc.workloads.criterion import Criterion, build_criterion
from tula_hpc.workloads.data import build_data
from tula_hpc.workloads.entry_points import is_entry_point
from tula_hpc.workloads.fitting import CPU, check_fits
from tula_hpc.workloads.models import build_model


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        model: In training mode, on the CPU unless it was tried on another device; (batch, 3, image_size, image_size) to
            (batch, classes), unless it, or the data, is the user's own.
        criterion: What it is trained for and judged by.
        train: Items (image, label), images as bytes (see `pixels.ImageDataset`), or the user's own (inputs, targets);
            random augmentation draws from torch's default random numbers, unless read through `make_train_loader`.
        test: Such items, always the same.
        classes: Number of classes.
        image_size: Edge of an image, pixels; of other inputs the last dimension.
    """

    model: nn.Module
    criterion: Criterion
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int


def build_workload(spec: WorkloadSpec, device: torch.device = CPU) -> Workload:
    """Build what a sweep's `[workload]` names. The same spec gives the same weights and samples everywhere.

    Args:
        spec: The table.
        device: Where what is the user's own is tried.

    Raises:
        InputError: The data folder, or something of the user's own, is not as expected.
    """
    data = build_data(spec)
    model = build_model(spec, data.classes, data.image_size)
    if spec.channels_last and any(parameter.dim() > 4 for parameter in model.parameters()):
        message = "true, but the model has parameters of 5 dimensions; it is a layout of images"
        raise InputError(message, key="workload.channels_last")
    criterion = build_criterion(spec)
    if spec.loss or spec.metric or is_entry_point(spec.model) or is_entry_point(spec.dataset):
        check_fits(spec, model, criterion, data.test, data.classes, device=device)
    if spec.activation_checkpointing:
        checkpoint_activations(model)
    return Workload(model, criterion, data.train, data.test, data.classes, data.image_size)
