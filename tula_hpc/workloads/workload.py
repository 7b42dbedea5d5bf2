"""Build a workload (model, loss and data), and try it on some samples so that it fails early.

Its `Identity` distinguishes it from other workloads: the digest of a model's structure is the same
in every process and on every machine and device.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset, default_collate

from tula_hpc.batches import bytes_of, map_tensors, samples_in, tensors_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.data.datasets import Data, build_data
from tula_hpc.data.images import prepared, samples_of
from tula_hpc.errors import InputError
from tula_hpc.formatting import in_short
from tula_hpc.own_sources import digests_of
from tula_hpc.records import Identity
from tula_hpc.user_code import TRIED_BY_JOBS, blamed, is_entry_point, kind_of, spread
from tula_hpc.workloads.activation_checkpointing import checkpoint_activations
from tula_hpc.workloads.criterion import Criterion, OfSamples, build_criterion, labels_without_score
from tula_hpc.workloads.torchvision_models import build_model

CPU_DTYPES = {
    "fp32": torch.float32,
    # stands in for fp16, which CPUs lack; both have the same size
    "fp16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
CPU = torch.device("cpu")


class Workload(NamedTuple):
    """A model, its criterion and its data.

    Attributes:
        model: In training mode, on the CPU unless it was tried on another device; maps (batch, 3,
            image_size, image_size) to (batch, classes), unless it, or the data, is the user's own.
        criterion: Loss and scores.
        train: Items (image, label), images as bytes (see `images.ImageDataset`), or the user's own
            (inputs, targets); random augmentation draws from torch's default random numbers, unless
            items are read through `make_train_loader`.
        test: Items like those of `train`, always the same.
        classes: Number of classes.
        image_size: Edge of an image, pixels; for other inputs the last dimension.
        identity: Identity of model, code and data.
    """

    model: nn.Module
    criterion: Criterion
    train: Dataset[Any]
    test: Dataset[Any]
    classes: int
    image_size: int
    identity: Identity


def build_workload(spec: WorkloadSpec, device: torch.device = CPU) -> Workload:
    """Build a sweep's `[workload]`; the same spec gives the same weights and samples everywhere.

    The user's own code is tried on the device, with some items of each set.

    Raises:
        InputError: The data folder, or something of the user's own, is not as expected.
    """
    return workload_of(spec, build_data(spec), device)


def workload_of(
    spec: WorkloadSpec, data: Data, device: torch.device, tried: int = TRIED_BY_JOBS
) -> Workload:
    """Return the workload with data that are loaded already; see `build_workload`."""
    model = build_model(spec, data.classes, data.image_size)
    if spec.channels_last and any(parameter.dim() > 4 for parameter in model.parameters()):
        message = "is for images, and the model has parameters of 5 dimensions; set it to false"
        raise InputError(message, key="workload.channels_last")
    criterion = build_criterion(spec)
    if spec.loss or spec.metric or is_entry_point(spec.model) or is_entry_point(spec.dataset):
        _check_fits(spec, model, criterion, data, device=device, tried=tried)
    # before the model's blocks are wrapped
    identity = identity_of(spec, model, data)
    if spec.activation_checkpointing:
        checkpoint_activations(model)
    return Workload(
        model, criterion, data.train, data.test, data.classes, data.image_size, identity
    )


def identity_of(spec: WorkloadSpec, model: nn.Module, data: Data) -> Identity:
    """Return the identity of a model, the code behind it and its data."""
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    return Identity(
        parameters=sum(p.numel() for p in parameters),
        gradient_bytes=bytes_of(p for p in parameters if p.requires_grad),
        structure=structure_of(model),
        train_samples=samples_of(data.train),
        test_samples=samples_of(data.test),
        item=_describe_item(data.test),
        sources=own_code(tuple(spec.entry_points)),
    )


@functools.cache
def own_code(entry_points: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of own sources as this process has imported them: files may change."""
    return digests_of(entry_points)


def structure_of(model: nn.Module) -> str:
    """Return a digest of the module tree; weights, devices and modes do not count."""
    lines = sorted({*_modules(model), *_tensors(model)})
    return hashlib.sha256("\n".join(lines).encode(errors="replace")).hexdigest()[:32]


def _modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        settings = ""
        # only of torch's modules: a user's attributes may be counters, paths or times
        if kind.__module__.startswith("torch.nn."):
            plain = {key: value for key, value in vars(module).items() if _is_setting(key, value)}
            settings = f" {sorted(plain.items())}"
        yield f"module {name} {kind.__qualname__}{settings}"


def _is_setting(key: str, value: object) -> bool:
    if key.startswith("_") or key == "training":
        return False
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(number, bool | int | float | str | None) for number in numbers)


def _tensors(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"parameter {name} {_kind_of_state(parameter)} {parameter.requires_grad}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"buffer {name} {_kind_of_state(buffer)}"


def _kind_of_state(tensor: Tensor) -> str:
    return f"{tensor.dtype} lazy" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def _describe_item(test: Dataset[Any]) -> str:
    with torch.random.fork_rng(devices=[]):
        inputs, targets = default_collate([test[0]])
    parts = (prepared(test, inputs), targets)
    return " with ".join(", ".join(map(_kind_of_tensor, tensors_of(part))) for part in parts)


def _kind_of_tensor(batch: Tensor) -> str:
    shape = "×".join(map(str, batch.shape[1:]))
    return f"{str(batch.dtype).removeprefix('torch.')} {shape}".rstrip()


def _check_fits(
    spec: WorkloadSpec,
    model: nn.Module,
    criterion: Criterion,
    data: Data,
    *,
    device: torch.device,
    tried: int,
) -> None:
    """Pass test samples through model, loss and metric; modes and random numbers stay as they are.

    The device is that of the training: some models run on GPUs only.

    Raises:
        InputError: One of the three fails, or does not return what the protocol asks for.
    """
    items = [data.test[index] for index in spread(samples_of(data.test), tried)]
    inputs, targets = default_collate(items)
    batch = (prepared(data.test, inputs), targets)
    inputs, targets = map_tensors(lambda tensor: tensor.to(device), batch)
    with blamed("workload.model", f"{spec.model} cannot be moved to {device}"):
        model.to(device)
    modes = [(module, module.training) for module in model.modules()]
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), autocast_on(spec, device):
        outputs = _outputs(spec, model.eval(), inputs)
        if spec.loss is None:
            _check_scores(spec, outputs, (len(items), data.classes))
        else:
            losses = _of_samples("workload.loss", spec.loss, criterion.losses, outputs, targets)
            _check_loss(spec.loss, losses, model)
        if spec.metric is not None and criterion.metric is not None:
            key = "workload.metric"
            shares = _of_samples(key, spec.metric, criterion.metric, outputs, targets)
            wrong = [share for share in shares.double().tolist() if not -1e-6 <= share <= 1 + 1e-6]
            if wrong:
                found = f"{spec.metric} gives {wrong[0]:g} for a sample"
                raise InputError(f"{found}; expected shares from 0 to 1", key=key)
    for module, training in modes:
        module.training = training


def refuse_unused(model: nn.Module) -> None:
    """Refuse parameters that get no gradient, since several workers would wait for it.

    Raises:
        InputError: A parameter has none after a backward pass.
    """
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        raise InputError(
            f"the loss gives no gradient to {in_short(unused)}, and several workers would wait for "
            "it forever; use it, remove it, or freeze it by requires_grad_(False)",
            key="workload.model",
        )


def autocast_on(spec: WorkloadSpec, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass in the workload's precision, or the device's nearest."""
    dtype = CPU_DTYPES[spec.precision]
    if (spec.precision, device.type) == ("fp16", "cuda"):
        dtype = torch.float16
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def _outputs(spec: WorkloadSpec, model: nn.Module, inputs: Any) -> Any:
    shapes = ["×".join(map(str, tensor.shape[1:])) for tensor in tensors_of(inputs)]
    found = ", ".join(shape or "one number" for shape in shapes)
    key = "workload.model"
    hint = ""
    origin = " from the test set"
    if isinstance(inputs, Mapping):
        hint = "; it is called as model(inputs), here with a dict"
    if any(tensor.dtype == torch.float64 for tensor in tensors_of(inputs)):
        key = "workload.dataset"
        hint = "; the data set gives float64: return tensor.float()"
        origin = ""
    words = f"{spec.model} cannot take inputs of {found}{origin}"
    with blamed(key, words, lambda error: f"{layer_of(error, model)}{hint}"):
        return model(inputs)


def layer_of(error: BaseException, model: nn.Module) -> str:
    """Name the layer of a model that raised, for a message; "" if no layer did."""
    names = {module: name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module):
            kind = f"{type(module).__name__}({module.extra_repr()})"
            found = f"; in its layer {names[module]}, {kind}"
    return found


def _check_scores(spec: WorkloadSpec, scores: Any, expected: tuple[int, int]) -> None:
    if not isinstance(scores, Tensor) or scores.shape != expected:
        found = f"{spec.model} returns {kind_of(scores)} for {expected[0]} image(s)"
        message = f"{found}; expected a tensor of shape {expected}"
        raise InputError(message, key="workload.model")


def _of_samples(key: str, name: str, function: OfSamples, outputs: Any, targets: Any) -> Tensor:
    words = f"{name} cannot take ({kind_of(outputs)}, {kind_of(targets)})"
    with blamed(key, words, lambda _: labels_without_score(outputs, targets)):
        numbers = function(outputs, targets)
    count = samples_in(targets)
    if not isinstance(numbers, Tensor) or numbers.shape != (count,):
        expected = f"a number for each, a tensor of shape ({count},)"
        took = f"outputs ({kind_of(outputs)}) and targets ({kind_of(targets)})"
        message = f"{name} returns {kind_of(numbers)} for {count} sample(s), of {took}"
        message = f"{message}; expected {expected}"
        if isinstance(numbers, Tensor) and numbers.dim() == 0:
            is_loss = key == "workload.loss"
            message += ', as a loss of torch returns with reduction="none"' if is_loss else ""
        raise InputError(message, key=key)
    return numbers


def _check_loss(name: str, losses: Tensor, model: nn.Module) -> None:
    key = "workload.loss"
    if not losses.is_floating_point():
        message = f"{name} returns {kind_of(losses)}; expected floating-point numbers"
        raise InputError(message, key=key)
    trainable = any(parameter.requires_grad for parameter in model.parameters())
    if trainable and not losses.requires_grad:
        remedy = "compute it from the outputs by torch's functions, outside of no_grad()"
        raise InputError(f"{name} gives a loss without a gradient; {remedy}", key=key)
