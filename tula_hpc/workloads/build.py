"""A workload: model, loss and data, ready to be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec
from tula_hpc.workloads.checkpointing import checkpoint_activations
from tula_hpc.workloads.data import build_data
from tula_hpc.workloads.entry_points import check_scores, is_entry_point
from tula_hpc.workloads.models import build_model


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        model: On the CPU, in training mode; (batch, 3, image_size, image_size) to (batch, classes).
        loss: Mean over a batch of the cross-entropy of (scores, labels).
        train: Items (image, label); random augmentation draws from torch's default random numbers, unless read through
            `make_train_loader`.
        test: Items (image, label), always the same.
        classes: Number of classes.
        image_size: Edge of an image, pixels.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int


def build_workload(spec: WorkloadSpec) -> Workload:
    """Build what a sweep's `[workload]` names. The same spec gives the same weights and samples everywhere.

    Raises:
        InputError: The data folder, or the user's own model or data set, is not as expected.
    """
    data = build_data(spec)
    model = build_model(spec, data.classes, data.image_size)
    if is_entry_point(spec.model) or is_entry_point(spec.dataset):
        check_scores(spec, model, data.test, data.classes)
    if spec.activation_checkpointing:
        checkpoint_activations(model)
    return Workload(model, cross_entropy, data.train, data.test, data.classes, data.image_size)
