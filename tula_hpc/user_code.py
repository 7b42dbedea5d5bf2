"""Bring your own model, data, loss and metric: ``"package.module:function"`` in a sweep file.

The whole protocol:

``model = "package.module:function"``
    ``function(classes: int, image_size: int) -> torch.nn.Module``. The module maps a float batch
    (N, C, H, W) to scores (N, classes). It is called on the CPU after torch's random numbers were
    seeded with ``workload.seed``.

``dataset = "package.module:function"``
    ``function(spec: tula_hpc.config.WorkloadSpec) -> tuple[Dataset, Dataset, int]``: training set,
    test set, number of classes. Both are map-style (``__len__`` and ``__getitem__``); an item is
    ``(image, label)``: a float tensor C×H×W, as the model takes it, and an integer from 0 to
    classes − 1. The function may use anything in the spec (``data_dir``, ``image_size``,
    ``augment``). ``samples`` is applied afterwards, by the caller.

    Draw augmentation from torch's default random numbers (``torch.rand``,
    ``torchvision.transforms``): they are seeded for each item from (seed, epoch, index), so a
    resumed training or one with another number of workers sees the same images. Random numbers from
    elsewhere are left as they are.

``loss = "package.module:function"``
    ``function(outputs, targets) -> Tensor``: the loss of each sample, (N,); training minimizes the
    mean. With it, workloads need not be classifications of images: an item of the data set is
    ``(inputs, targets)``, each a tensor, a number, or a tuple, list or dict of such, of the same
    shapes for every item (sequences padded or cut to one length). The model is called as
    ``model(inputs)`` with N items in a batch of ``torch.utils.data.default_collate``, and its
    output goes to the loss as it is. ``classes`` is any number that the model should get from the
    data (a vocabulary), and ``image_size``, where the sweep does not give it, the last dimension of
    the first input.

``metric = "package.module:function"``
    ``function(outputs, targets) -> Tensor``: the share of each sample that is right, (N,), from 0
    to 1; it is reported as accuracy. Without it, accuracy is known where outputs are scores
    (N, classes) and targets labels (N,); elsewhere the loss on the test set is reported.

The module is looked for among the installed packages, then in the working directory in which the
command was started: nothing there replaces an installed package. All functions run in every worker
process of every job. Examples are ``tests/examples/own_workload.py`` and, for a language model,
``tula_hpc/workloads/language_model.py``.

Any exception of these functions becomes an `InputError` of one line, unless memory ran out.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from tula_hpc.batches import Batch, leaves_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.process_memory import out_of_memory

_MODEL_KEY, _DATASET_KEY = "workload.model", "workload.dataset"
# modules that call the user's code: an error is traced to the code that they call
_CALLERS = (Path(__file__), Path(__file__).parent / "workloads" / "workload.py")


@contextlib.contextmanager
def blamed(key: str, words: str, hint: str = "") -> Iterator[None]:
    """Turn any exception of the block into one line for the user.

    Args:
        key: Key of the sweep file.
        words: Text before the exception's message.
        hint: Text after it.

    Raises:
        InputError: For any exception but lack of memory, which is no mistake and has remedies of
            its own.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if out_of_memory(error) is not None:
            raise
        raise InputError(f"{words}: {told(error)}{hint}", key=key) from error


def told(error: Exception) -> str:
    """Describe an error of the user's code in one line: its type, its message, and the place."""
    message = str(error).strip().partition("\n")[0]
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and path not in _CALLERS:
            return f"{description} ({path.name}:{frame.lineno})"
    return description


def collate(items: list[Any], what: str = "has samples") -> Batch:
    """Put samples into one batch.

    Args:
        items: The samples.
        what: Their place, for the message.

    Raises:
        InputError: They differ in shape or kind.
    """
    words = f"{what} that cannot be put into one batch"
    with blamed("workload.dataset", words, "; expected the same shapes, padded or cut"):
        return default_collate(items)


class OwnData(NamedTuple):
    """Result of a data set function."""

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int


def is_entry_point(name: str) -> bool:
    """Tell whether the name of a model or data set is a user's "package.module:function"."""
    return ":" in name


def own_model(name: str, classes: int, image_size: int) -> nn.Module:
    """Call the user's model function.

    Raises:
        InputError: The function is missing, takes other arguments, fails, or returns no module.
    """
    function = own_function(_MODEL_KEY, name, ("classes", "image_size"))
    with blamed(_MODEL_KEY, f"{name} failed"):
        model = function(classes, image_size)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} returned {kind_of(model)}; expected a torch.nn.Module", key=_MODEL_KEY
        )
    return model


def own_function(key: str, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load a user's function and check its parameters, without calling it.

    Args:
        key: Key of the sweep file.
        name: "package.module:function".
        parameters: Names of its arguments, for the message.

    Raises:
        InputError: The function is missing, or cannot be called with so many arguments.
    """
    function = _load(key, name)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        raise InputError(
            f"{name} cannot be called with ({', '.join(parameters)})", key=key
        ) from None
    return function


def own_data(spec: WorkloadSpec) -> OwnData:
    """Call the user's data set function and check the first items of each set.

    Raises:
        InputError: The function is missing, takes other arguments, fails, or departs from the
            protocol.
    """
    function = own_function(_DATASET_KEY, spec.dataset, ("spec",))
    with blamed(_DATASET_KEY, f"{spec.dataset} failed"):
        data = function(spec)
    if not isinstance(data, tuple) or len(data) != len(OwnData._fields):
        raise _data_error(
            spec, f"returned {kind_of(data)}; expected a tuple (train, test, classes)"
        )
    own = OwnData(*data)
    if not isinstance(own.classes, int) or own.classes < 1:
        raise _data_error(
            spec, f"returned {own.classes!r} for classes; expected a whole number of at least 1"
        )
    _check_set(spec, "train", own.train, own.classes)
    _check_set(spec, "test", own.test, own.classes)
    return own


def _check_set(spec: WorkloadSpec, which: str, data: Any, classes: int) -> None:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        message = f"returned {kind_of(data)} as the {which} set"
        raise _data_error(spec, f"{message}; expected one with __len__ and __getitem__")
    if len(data) == 0:
        raise _data_error(spec, f"returned an empty {which} set; expected at least one item")
    with torch.random.fork_rng(devices=[]), blamed(_DATASET_KEY, f"{spec.dataset} failed"):
        items = [data[index] for index in range(min(2, len(data)))]
    if spec.loss is None:
        fits = _is_item(items[0], classes)
        expected = (
            f"(float tensor of 3 dimensions, label from 0 to {classes - 1}); "
            "others need a workload.loss of your own"
        )
    else:
        fits = _is_pair(items[0])
        expected = "(inputs, targets), each of tensors and numbers and nothing else"
    if not fits:
        found = f"has {_describe(items[0])} as item 0 of the {which} set"
        raise _data_error(spec, f"{found}; expected {expected}")
    collate(items, f"{spec.dataset} has items 0 and 1 in the {which} set")


def _is_pair(item: Any) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    try:
        batch = default_collate([item])
    except TypeError:
        # it holds something else than tensors and numbers
        return False
    for part in batch:
        leaves = list(leaves_of(part))
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return False
    return True


def _is_item(item: Any, classes: int) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        return False
    image, label = item
    if not image.is_floating_point() or image.dim() != 3:
        return False
    try:
        # int, NumPy's integers, tensors of one integer
        return 0 <= operator.index(label) < classes
    except TypeError:
        return False


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return "(" + ", ".join(kind_of(part) for part in item) + ")"
    return kind_of(item)


def kind_of(value: Any) -> str:
    """Describe a value by its type and shape, length or number."""
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}".removeprefix("torch.")
    if isinstance(value, int):
        return f"{type(value).__name__} {value}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of length {len(value)}"
    if value is None:
        return "None"
    return f"an object of type {type(value).__name__}"


def _data_error(spec: WorkloadSpec, message: str) -> InputError:
    return InputError(f"{spec.dataset} {message}", key=_DATASET_KEY)


def _load(key: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    _make_importable(module_name.partition(".")[0])
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, SyntaxError) as error:
        raise InputError(f"{name}: {module_name} cannot be imported: {error}", key=key) from error
    except AttributeError:
        raise InputError(f"{name}: {module_name} has no {function_name!r}", key=key) from None
    if not callable(function):
        raise InputError(f"{name} is {kind_of(function)}; expected a function", key=key)
    return function  # type: ignore[no-any-return] # callable() does not narrow Any


def _make_importable(package: str) -> None:
    # After all else, and only where the package is nowhere else; modules that it imports may
    # lie there as well. Loader processes get this path, too.
    folder = str(Path.cwd())
    if folder not in sys.path and not _is_installed(package):
        sys.path.append(folder)


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    # the package was loaded in another way
    except ValueError:
        return True
    # a folder without __init__.py, which has no origin, gives way to a package
    return spec is not None and spec.origin is not None
