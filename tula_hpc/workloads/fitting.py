"""Whether model, data, loss and metric fit each other: two samples are passed through before a job is hours old."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.nested import samples_in, tensors_of
from tula_hpc.workloads.criterion import Criterion, OfSamples
from tula_hpc.workloads.entry_points import OWN_ERRORS, first_line, kind_of


def check_fits(spec: WorkloadSpec, model: nn.Module, criterion: Criterion, data: Dataset[Any], classes: int) -> None:
    """Pass test samples through model, loss and metric; modes and random numbers stay as they are.

    Raises:
        InputError: One of them cannot take them, or returns something else than the protocol says.
    """
    items = [data[index] for index in range(min(2, len(data)))]  # type: ignore[arg-type] # checked when it was built
    inputs, targets = default_collate(items)
    was_training = model.training
    with torch.random.fork_rng(devices=[]):
        outputs = _outputs(spec, model.eval(), inputs)
        if spec.loss is None:
            _check_scores(spec, outputs, (len(items), classes))
        else:
            losses = _check_of_samples("workload.loss", spec.loss, criterion.losses, outputs, targets)
            if not losses.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
                raise InputError(f"{spec.loss} gives a loss without a gradient", key="workload.loss")
        if spec.metric is not None and criterion.metric is not None:
            _check_of_samples("workload.metric", spec.metric, criterion.metric, outputs, targets)
    model.train(was_training)


def _outputs(spec: WorkloadSpec, model: nn.Module, inputs: Any) -> Any:
    try:
        return model(inputs)
    except OWN_ERRORS as error:
        shapes = ", ".join("×".join(map(str, tensor.shape[1:])) or "one number" for tensor in tensors_of(inputs))
        message = f"{spec.model} cannot take inputs of {shapes}: {first_line(error)}"
        raise InputError(message, key="workload.model") from error


def _check_scores(spec: WorkloadSpec, scores: Any, expected: tuple[int, int]) -> None:
    if not isinstance(scores, Tensor) or scores.shape != expected:
        raise InputError(
            f"{spec.model} returns {kind_of(scores)} for {expected[0]} image(s); expected a tensor of shape {expected}",
            key="workload.model",
        )


def _check_of_samples(key: str, name: str, function: OfSamples, outputs: Any, targets: Any) -> Tensor:
    try:
        numbers = function(outputs, targets)
    except OWN_ERRORS as error:
        message = f"{name} cannot take ({kind_of(outputs)}, {kind_of(targets)})"
        raise InputError(f"{message}: {first_line(error)}", key=key) from error
    count = samples_in(targets)
    if not isinstance(numbers, Tensor) or numbers.shape != (count,) or not numbers.is_floating_point():
        raise InputError(
            f"{name} returns {kind_of(numbers)} for {count} sample(s); expected a number for each, "
            f"a float tensor of shape ({count},)",
            key=key,
        )
    return numbers
