"""A workload: model, loss and data, ready to be trained.

Whether model, data, loss and metric fit each other: two samples are passed through before a job is
hours old.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from tula_hpc.batches import map_tensors, samples_in, tensors_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.data.datasets import build_data
from tula_hpc.data.images import prepared
from tula_hpc.errors import InputError
from tula_hpc.user_code import blamed, is_entry_point, kind_of
from tula_hpc.workloads.activation_checkpointing import checkpoint_activations
from tula_hpc.workloads.criterion import Criterion, OfSamples, build_criterion
from tula_hpc.workloads.torchvision_models import build_model

CPU_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.bfloat16,
    "bf16": torch.bfloat16,
    # CPUs have no fp16; the size is one
}
CPU = torch.device("cpu")


def check_fits(
    spec: WorkloadSpec,
    model: nn.Module,
    criterion: Criterion,
    data: Dataset[Any],
    classes: int,
    *,
    device: torch.device = CPU,
) -> None:
    """Pass test samples through model, loss and metric; modes and random numbers stay as they are.

    Args:
        spec: Names them.
        model: It is moved to the device.
        criterion: Loss and metric.
        data: The test samples.
        classes: Scores that the model gives for each.
        device: That it will be trained on: some models run on GPUs only.

    Raises:
        InputError: One of them cannot take them, or returns something else than the protocol says.
    """
    items = [data[index] for index in range(min(2, len(data)))]  # type: ignore[arg-type] # checked when it was built
    inputs, targets = default_collate(items)
    inputs = prepared(data, inputs)
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), (inputs, targets))
    with blamed("workload.model", f"{spec.model} cannot be moved to {device}"):
        model.to(device)
    modes = [(module, module.training) for module in model.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), _autocast(spec, device):
        outputs = _outputs(spec, model.eval(), inputs)
        if spec.loss is None:
            _check_scores(spec, outputs, (len(items), classes))
        else:
            _check_loss(
                spec.loss,
                _of_samples("workload.loss", spec.loss, criterion.losses, outputs, targets),
                model,
            )
        if spec.metric is not None and criterion.metric is not None:
            _check_shares(
                spec.metric,
                _of_samples("workload.metric", spec.metric, criterion.metric, outputs, targets),
            )
    for module, training in modes:
        module.training = training


def _autocast(spec: WorkloadSpec, device: torch.device) -> AbstractContextManager[object]:
    dtype = (
        torch.float16
        if (spec.precision, device.type) == ("fp16", "cuda")
        else CPU_DTYPES[spec.precision]
    )
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def _outputs(spec: WorkloadSpec, model: nn.Module, inputs: Any) -> Any:
    shapes = ", ".join(
        "×".join(map(str, tensor.shape[1:])) or "one number" for tensor in tensors_of(inputs)
    )
    hint = (
        "; it is called as model(inputs), here with a dict" if isinstance(inputs, Mapping) else ""
    )
    with blamed("workload.model", f"{spec.model} cannot take inputs of {shapes}", hint):
        return model(inputs)


def _check_scores(spec: WorkloadSpec, scores: Any, expected: tuple[int, int]) -> None:
    if not isinstance(scores, Tensor) or scores.shape != expected:
        raise InputError(
            f"{spec.model} returns {kind_of(scores)} for {expected[0]} image(s); expected a tensor of shape {expected}",
            key="workload.model",
        )


def _of_samples(key: str, name: str, function: OfSamples, outputs: Any, targets: Any) -> Tensor:
    with blamed(key, f"{name} cannot take ({kind_of(outputs)}, {kind_of(targets)})"):
        numbers = function(outputs, targets)
    count = samples_in(targets)
    if not isinstance(numbers, Tensor) or numbers.shape != (count,):
        expected = f"a number for each, a tensor of shape ({count},)"
        message = f"{name} returns {kind_of(numbers)} for {count} sample(s); expected {expected}"
        raise InputError(message, key=key)
    return numbers


def _check_loss(name: str, losses: Tensor, model: nn.Module) -> None:
    if not losses.is_floating_point():
        raise InputError(
            f"{name} returns {kind_of(losses)}; expected floating-point numbers",
            key="workload.loss",
        )
    if not losses.requires_grad and any(
        parameter.requires_grad for parameter in model.parameters()
    ):
        raise InputError(f"{name} gives a loss without a gradient", key="workload.loss")


def _check_shares(name: str, shares: Tensor) -> None:
    wrong = [share for share in shares.double().tolist() if not -1e-6 <= share <= 1 + 1e-6]
    if wrong:
        raise InputError(
            f"{name} gives {wrong[0]:g} for a sample; expected shares from 0 to 1",
            key="workload.metric",
        )


class Workload(NamedTuple):
    """What is trained.

    Attributes: model: In training mode, on the CPU unless it was tried on another device; (batch,
        3, image_size, image_size) to
            (batch, classes), unless it, or the data, is the user's own.
        criterion: What it is trained for and judged by.
        train: Items (image, label), images as bytes (see `pixels.ImageDataset`), or the user's own
            (inputs, targets); random augmentation draws from torch's default random numbers, unless
            read through `make_train_loader`.
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
