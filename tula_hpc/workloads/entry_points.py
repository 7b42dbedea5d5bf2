"""Bring your own model and data: ``"package.module:function"`` in a sweep file.

The whole protocol:

``model = "package.module:function"``
    ``function(classes: int, image_size: int) -> torch.nn.Module``. The module maps a float batch (N, C, H, W) to
    scores (N, classes). It is called on the CPU after torch's random numbers were seeded with ``workload.seed``.

``dataset = "package.module:function"``
    ``function(spec: tula_hpc.config.WorkloadSpec) -> tuple[Dataset, Dataset, int]``: training set, test set, number of
    classes. Both are map-style (``__len__`` and ``__getitem__``); an item is ``(image, label)``: a float tensor
    C×H×W, as the model takes it, and an integer from 0 to classes − 1. The function may use anything in the spec
    (``data_dir``, ``image_size``, ``augment``). ``samples`` is applied afterwards, by the caller.

    Draw augmentation from torch's default random numbers (``torch.rand``, ``torchvision.transforms``): they are seeded
    for each item from (seed, epoch, index), so a resumed training or one with another number of workers sees the same
    images. Random numbers from elsewhere are left as they are.

The module is looked for in the working directory first, then among the installed packages. Both functions run in every
worker process of every job. An example is ``tests/examples/own_workload.py``.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError

_MODEL_KEY, _DATASET_KEY = "workload.model", "workload.dataset"


class OwnData(NamedTuple):
    """What a data set function returns."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int


def is_entry_point(name: str) -> bool:
    """Whether a model or data set is the user's own."""
    return ":" in name


def own_model(name: str, classes: int, image_size: int) -> nn.Module:
    """Call the user's model function.

    Raises:
        InputError: No such function, other arguments, or no module came.
    """
    model = _call(_MODEL_KEY, name, classes, image_size)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned {_kind(model)}; expected a torch.nn.Module", key=_MODEL_KEY)
    return model


def own_data(spec: WorkloadSpec) -> OwnData:
    """Call the user's data set function and look at the first item of each set.

    Raises:
        InputError: No such function, other arguments, or something else than the protocol says came.
    """
    data = _call(_DATASET_KEY, spec.dataset, spec)
    if not isinstance(data, tuple) or len(data) != len(OwnData._fields):
        raise _data_error(spec, f"returned {_kind(data)}; expected a tuple (train, test, classes)")
    own = OwnData(*data)
    if not isinstance(own.classes, int) or own.classes < 1:
        raise _data_error(spec, f"returned {own.classes!r} for classes; expected a whole number of at least 1")
    _check_set(spec, "train", own.train, own.classes)
    _check_set(spec, "test", own.test, own.classes)
    return own


def check_scores(spec: WorkloadSpec, model: nn.Module, data: Dataset[Any], classes: int) -> None:
    """Pass one test image through the model, so that two parts which do not fit are told before a job is hours old.

    Raises:
        InputError: The model does not return one score a class.
    """
    image, _ = data[0]
    was_training = model.training
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            scores = model.eval()(image[None])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shape = "×".join(map(str, image.shape))
            reason = str(error).strip().partition("\n")[0]
            raise InputError(f"{spec.model} cannot take an image of {shape}: {reason}", key=_MODEL_KEY) from error
    model.train(was_training)
    if not isinstance(scores, Tensor) or scores.shape != (1, classes):
        raise InputError(
            f"{spec.model} returns {_kind(scores)} for one image; expected a tensor of shape (1, {classes})",
            key=_MODEL_KEY,
        )


def _check_set(spec: WorkloadSpec, which: str, data: Any, classes: int) -> None:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise _data_error(spec, f"returned {_kind(data)} as the {which} set; expected one with __len__ and __getitem__")
    if len(data) == 0:
        raise _data_error(spec, f"returned an empty {which} set")
    with torch.random.fork_rng(devices=[]):
        item = data[0]
    if not _is_item(item, classes):
        raise _data_error(
            spec,
            f"has {_describe(item)} as item 0 of the {which} set; "
            f"expected (float tensor of 3 dimensions, label from 0 to {classes - 1})",
        )


def _is_item(item: Any, classes: int) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        return False
    image, label = item
    if not image.is_floating_point() or image.dim() != 3:
        return False
    try:
        return 0 <= operator.index(label) < classes  # int, NumPy's integers, tensors of one integer
    except TypeError:
        return False


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return "(" + ", ".join(_kind(part) for part in item) + ")"
    return _kind(item)


def _kind(value: Any) -> str:
    """A value in a few words: type, and what tells it from the expected."""
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, int):
        return f"{type(value).__name__} {value}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of length {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _data_error(spec: WorkloadSpec, message: str) -> InputError:
    return InputError(f"{spec.dataset} {message}", key=_DATASET_KEY)


def _call(key: str, name: str, *arguments: Any) -> Any:
    function = _load(key, name)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        expected = "(classes, image_size)" if key == _MODEL_KEY else "(spec)"
        raise InputError(f"{name} cannot be called with {expected}", key=key) from None
    return function(*arguments)


def _load(key: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    _search_working_directory()
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"{name}: {module_name} cannot be imported: {error}", key=key) from error
    except AttributeError:
        raise InputError(f"{name}: {module_name} has no {function_name!r}", key=key) from None
    if not callable(function):
        raise InputError(f"{name} is {_kind(function)}; expected a function", key=key)
    return function  # type: ignore[no-any-return] # callable() does not narrow Any


def _search_working_directory() -> None:
    """First in the path, as `python -m` has it; loader processes are given this path too."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
