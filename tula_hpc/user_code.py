"""Bring your own model, data, loss and metric: ``"package.module:function"`` in a sweep file.

`sweeps/README.md` has a table of what each function is called with and returns. Beyond that:

- ``model`` is called on the CPU after torch's random numbers were seeded with ``workload.seed``.
  Without ``loss``, it maps a float batch (N, C, H, W) to scores (N, classes).
- ``dataset`` returns two map-style sets (``__len__`` and ``__getitem__``). The caller applies
  ``workload.samples`` afterwards.
- Draw augmentation from the default random numbers of torch, NumPy or Python: they are seeded for
  each item from (seed, epoch, index), so a training that is resumed, or that has another number of
  workers, sees the same images. Generators of your own are left as they are.
- With ``loss`` an item is ``(inputs, targets)``, each a tensor, a number, or a tuple, list or dict
  of these, with the same shapes for every item (sequences padded or cut to one length). The model
  is called as ``model(inputs)`` with a batch of ``torch.utils.data.default_collate``; its output
  goes to the loss as it is, and training minimizes the mean. ``classes`` is any number that the
  model should get from the data (a vocabulary), and ``image_size``, unless the sweep gives it, the
  last dimension of the first input.
- ``metric`` is reported as accuracy. Without it, accuracy is known if outputs are scores
  (N, classes) and targets labels (N,); otherwise the loss on the test set is reported.

Any exception of these functions becomes an `InputError` of one line, unless memory ran out or a
file system failed. A command tries all of them on its own machine before it submits a job, with
several items of both sets. Labels that can be seen without reading items (an attribute `targets` or
`labels`, as torchvision's data sets have, or a `TensorDataset`) are all checked.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import random
import re
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from tula_hpc.batches import Batch, leaves_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.errors import InputError, PreemptedError
from tula_hpc.own_sources import is_own
from tula_hpc.process_memory import out_of_memory

# items of each set that a job tries
TRIED_BY_JOBS = 2
# items of each set that a command tries before it submits a job
TRIED_BEFORE = 8
# seed of the random numbers while a data set function is called
SEED_OF_DATA = 0
# parts of torch's messages without a GPU, or from a build for CPUs only
_NO_GPU = re.compile(r"NVIDIA driver|not compiled with CUDA|No CUDA GPUs|no GPUs found")
# characters kept of each further line of an error message
MOST_OF_LINE = 200
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# torch.load's message, with the name far below a long piece of advice
_NOT_WEIGHTS = re.compile(r"^Weights only load failed(?s:.*)Unsupported global: GLOBAL (\S+)")
_MOVED = (
    "leave out .cuda() and .to(...): model and batches are moved to the `device` of the cluster "
    "file, and are built and tried on CPUs"
)
_MODEL_KEY = "workload.model"
_DATASET_KEY = "workload.dataset"
# modules that call the user's code: an error is traced to the code that they call
_CALLERS = (
    Path(__file__),
    Path(__file__).parent / "workloads" / "workload.py",
    Path(__file__).parent / "profiling" / "rehearsal_process.py",
    *(Path(__file__).parent / "attach" / name for name in ("child.py", "script.py")),
    Path(__file__).parent / "attach" / "hooks" / "patches.py",
)


@contextlib.contextmanager
def blamed(key: str, words: str, hint: str | Callable[[BaseException], str] = "") -> Iterator[None]:
    """Turn any exception of the block into one line for the user: `words`, its message, the hint.

    `key` is the sweep file's; a hint may be a function that returns the text for an exception.

    Raises:
        InputError: For any exception that may be a mistake, see `is_mistake`.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if not is_mistake(error):
            raise
        end = hint if isinstance(hint, str) else hint(error)
        raise InputError(f"{words}: {describe_with_remedy(error)}{end}", key=key) from error


def is_mistake(error: Exception | SystemExit) -> bool:
    """Tell whether an exception in the user's code may be a mistake there.

    Lack of memory has remedies of its own, and a file system that fails may work the next time. The
    exception of a stop signal is raised wherever the code is at that moment.
    """
    from submitit.core.utils import UncompletedJobError

    if isinstance(error, PreemptedError | UncompletedJobError):
        return False
    if out_of_memory(error) is not None or isinstance(error, ConnectionError | TimeoutError):
        return False
    named = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    return not isinstance(error, OSError) or error.errno is None or isinstance(error, named)


def describe_error(error: Exception | SystemExit) -> str:
    """Describe an error of the user's code in one line: its type, its message, and the place."""
    text = _ESCAPES.sub("", str(error)).strip()
    message, _, rest = text.partition("\n")
    if message.endswith(":"):
        # the first two of the lines that the message announces, such as missing and unexpected keys
        announced = [line.strip()[:MOST_OF_LINE] for line in rest.strip().splitlines()[:2]]
        message = " ".join([message, *announced])
    elif (refused := _NOT_WEIGHTS.search(text)) is not None:
        message = f"torch.load refuses {refused[1]}, unless with weights_only=False"
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, BdbQuit):
        description = "a breakpoint() or pdb stops it; remove that"
    innermost_first = reversed(traceback.extract_tb(error.__traceback__))
    frames = [(Path(frame.filename), frame.lineno) for frame in innermost_first]
    others = (f for f in frames if f[0] not in _CALLERS and not _is_foreign(f[0]))
    # a model of this package has no file of the user's own
    place = next((f for f in frames if is_own(f[0])), next(others, None))
    return description if place is None else f"{description} ({place[0].name}:{place[1]})"


def _is_foreign(path: Path) -> bool:
    # a name such as "<frozen runpy>" is no file
    return "site-packages" in path.parts or path.name.startswith("<")


def describe_with_remedy(error: Exception | SystemExit) -> str:
    """Describe an error of a function that the sweep file names, and say how to mend it."""
    return (
        f"{_MOVED}; torch said: {describe_error(error)}"
        if lacks_gpu(error)
        else describe_error(error)
    )


def lacks_gpu(error: Exception | SystemExit) -> bool:
    """Tell whether an error of torch says that there is no GPU."""
    return bool(_NO_GPU.search(str(error)))


def collate(items: list[Any], what: str = "has samples") -> Batch:
    """Put samples into one batch.

    Raises:
        InputError: The samples differ in shape or kind.
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
        message = f"{name} returned {kind_of(model)}; expected a torch.nn.Module"
        raise InputError(message, key=_MODEL_KEY)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise InputError(
            f"{name} has nothing to train: requires_grad is False for all of its {count} "
            "parameters; expected True for those that are trained",
            key=_MODEL_KEY,
        )
    return model


def own_function(key: str, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Load a user's function and check its parameters, without calling it.

    Raises:
        InputError: The function is missing, or cannot be called with that many arguments.
    """
    function = _load(key, name)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError:
        message = f"{name} cannot be called with ({', '.join(parameters)})"
        raise InputError(message, key=key) from None
    return function


def own_data(spec: WorkloadSpec, tried: int = TRIED_BY_JOBS) -> OwnData:
    """Call the user's data set function; check `tried` items of each set, and labels.

    Raises:
        InputError: The function is missing, takes other arguments, fails, or departs from the
            protocol.
    """
    function = own_function(_DATASET_KEY, spec.dataset, ("spec",))
    words = f"{spec.dataset} failed"
    with blamed(_DATASET_KEY, words), random_numbers_kept():
        seed_random_numbers(SEED_OF_DATA)
        try:
            data = function(spec)
        except (TypeError, AttributeError) as error:
            if spec.data_dir is None and "NoneType" in str(error):
                without = "spec.data_dir is None, as workload.data_dir is not set"
                raise InputError(
                    f"{words}: {describe_error(error)}; {without}", key=_DATASET_KEY
                ) from error
            raise
    if not isinstance(data, tuple) or len(data) != len(OwnData._fields):
        expected = "expected a tuple (train, test, classes)"
        raise _data_error(spec, f"returned {kind_of(data)}; {expected}")
    own = OwnData(*data)
    classes = operator.index(own.classes) if _is_whole(own.classes) else 0
    if classes < 1 or isinstance(own.classes, bool):
        expected = "expected a whole number of at least 1"
        raise _data_error(spec, f"returned {own.classes!r} for classes; {expected}")
    _check_set(spec, "train", own.train, classes, tried)
    _check_set(spec, "test", own.test, classes, tried)
    return own._replace(classes=classes)


class RandomNumbers(NamedTuple):
    """States of the random numbers on the host, as Python, NumPy and torch have them."""

    python: tuple[Any, ...]
    numpy: Any
    torch: Tensor


def random_numbers() -> RandomNumbers:
    """Return the states as they are now."""
    return RandomNumbers(random.getstate(), np.random.get_state(), torch.get_rng_state())


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's CPU random numbers after the block."""
    before = random_numbers()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before.python)
            np.random.set_state(before.numpy)


def seed_random_numbers(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU random numbers."""
    random.seed(seed)
    # NumPy takes 32 bits
    np.random.seed(seed % 2**32)
    # not torch.manual_seed, which would call every backend, and reseed the GPU as well
    torch.default_generator.manual_seed(seed)


def spread(samples: int, count: int) -> list[int]:
    """Return at most `count` positions spread over a set, the first two among them."""
    steps = max(1, count - 2)
    later = {round(step * (samples - 1) / steps) for step in range(1, count - 1)}
    return sorted(position for position in {0, 1} | later if 0 <= position < samples)


def _check_set(spec: WorkloadSpec, which: str, data: Any, classes: int, tried: int) -> None:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        message = f"returned {kind_of(data)} as the {which} set"
        expected = "expected one with __len__ and __getitem__"
        if isinstance(data, DataLoader):
            expected = "return its data set, from which batches are made here"
        raise _data_error(spec, f"{message}; {expected}")
    words = f"{spec.dataset} failed"
    with blamed(_DATASET_KEY, words, f", at len() of the {which} set"):
        length = len(data)
    if length == 0:
        raise _data_error(spec, f"returned an empty {which} set; expected at least one item")
    items = {}
    for index in spread(length, tried):
        place = f", at item {index} of the {which} set"
        with torch.random.fork_rng(devices=[]), blamed(_DATASET_KEY, words, place):
            items[index] = data[index]
        _check_item(spec, items[index], classes, f"item {index} of the {which} set")
    if spec.loss is None:
        _check_labels(spec, which, data, items, classes)
    first, *others = items
    for other in others:
        pair = f"{first}, {_describe(items[first])}, and {other}, {_describe(items[other])},"
        collate([items[first], items[other]], f"{spec.dataset} has items {pair} in the {which} set")


def _check_item(spec: WorkloadSpec, item: Any, classes: int, place: str) -> None:
    if spec.loss is None:
        fits = _has_image(item) and _is_whole(item[1])
        if fits and not 0 <= (label := operator.index(item[1])) < classes:
            hint = ""
            if label >= classes:
                hint = (
                    f"; labels count from 0: return {label + 1} or more classes, or smaller labels"
                )
            found = f"has label {label} as {place}; expected 0 to {classes - 1}"
            raise _data_error(spec, f"{found}, as it returned {classes} for classes{hint}")
        if not fits and _has_image(item):
            found = f"has {kind_of(item[1])} as the label of {place}"
            meant = f"expected a whole number from 0 to {classes - 1}, such as int(label)"
            raise _data_error(
                spec, f"{found}; {meant}; anything else needs a workload.loss of your own"
            )
        expected = (
            f"(float tensor of 3 dimensions, label from 0 to {classes - 1}); "
            "anything else needs a workload.loss of your own"
        )
    else:
        fits = _is_pair(item)
        expected = "(inputs, targets), each made of tensors and numbers only"
    if not fits:
        raise _data_error(spec, f"has {_describe(item)} as {place}; expected {expected}")


def _check_labels(
    spec: WorkloadSpec, which: str, data: Any, items: dict[int, Any], classes: int
) -> None:
    labels = visible_labels(data)
    # the attribute may hold other labels than the items have
    if labels is None or any(int(labels[i]) != int(item[1]) for i, item in items.items()):
        return
    wrong = torch.nonzero((labels < 0) | (labels >= classes)).flatten()
    if len(wrong):
        index = int(wrong[0])
        found = f"has label {int(labels[index])} at item {index} of the {which} set"
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise _data_error(spec, f"{found}{more}; expected 0 to {classes - 1}")


def visible_labels(data: Any) -> Tensor | None:
    """Return the labels of all samples, (n,); None if that would take reading the items."""
    if isinstance(data, Subset):
        inner = visible_labels(data.dataset)
        return None if inner is None else inner[torch.as_tensor(data.indices)]
    if isinstance(data, TensorDataset):
        found: Any = data.tensors[-1]
    elif isinstance(data, list | tuple):
        found = [item[-1] for item in data if isinstance(item, list | tuple) and item]
    else:
        found = getattr(data, "targets", getattr(data, "labels", None))
    try:
        labels = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        return None
    whole = not (labels.is_floating_point() or labels.is_complex())
    return labels.cpu() if whole and labels.shape == (len(data),) else None


def _is_pair(item: Any) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    try:
        batch = default_collate([item])
    except TypeError:
        # the item holds something other than tensors and numbers
        return False
    leaves = [list(leaves_of(part)) for part in batch]
    return all(part and all(isinstance(leaf, Tensor) for leaf in part) for part in leaves)


def _has_image(item: Any) -> bool:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        return False
    return item[0].is_floating_point() and item[0].dim() == 3


def _is_whole(label: Any) -> bool:
    try:
        # int, NumPy's integers, tensors of one integer
        operator.index(label)
    except TypeError:
        return False
    return True


def _describe(item: Any) -> str:
    if isinstance(item, tuple | list):
        return "(" + ", ".join(map(kind_of, item)) + ")"
    return kind_of(item)


def kind_of(value: Any) -> str:
    """Describe a value by its type and shape, length or number."""
    if isinstance(value, Tensor):
        is_number = value.dim() == 0 and not (value.is_floating_point() or value.is_meta)
        what = f"{value.item()}" if is_number else f"of shape {tuple(value.shape)}"
        return f"{value.dtype} tensor {what}".removeprefix("torch.")
    if isinstance(value, int | float):
        return f"{type(value).__name__} {value}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of length {len(value)}"
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an object of it"
    return f"an object of type {type(value).__name__}"


def _data_error(spec: WorkloadSpec, message: str) -> InputError:
    return InputError(f"{spec.dataset} {message}", key=_DATASET_KEY)


def _load(key: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    _make_importable(module_name.partition(".")[0])
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        own = module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == own:
            why = f"{error}; it was looked for among the installed packages and in {Path.cwd()}"
        elif isinstance(error, SyntaxError):
            why = f"{error.msg} ({Path(error.filename or own).name}, line {error.lineno})"
        else:
            why = f"{describe_error(error)}; correct the name, or install what is missing"
        raise InputError(f"{name}: {module_name} cannot be imported: {why}", key=key) from error
    except (Exception, SystemExit) as error:
        if not is_mistake(error):
            raise
        words = f"{name}: {module_name} cannot be imported: {describe_error(error)}"
        if isinstance(error, SystemExit):
            words += (
                ": it exits, as it does if it cannot parse the command line; put what only a "
                'script does below `if __name__ == "__main__":`'
            )
        raise InputError(words, key=key) from error
    function = getattr(module, function_name, None)
    if function is None:
        raise InputError(f"{name}: {module_name} has no {function_name!r}", key=key)
    if not callable(function):
        raise InputError(f"{name} is {kind_of(function)}; expected a function", key=key)
    return function  # type: ignore[no-any-return] # callable() does not narrow Any


def _make_importable(package: str) -> None:
    # Last on the path, and only if the package is nowhere else. Modules that the package imports
    # may lie in this folder as well. Loader processes get the same path.
    folder = str(Path.cwd())
    if folder not in sys.path and not _is_installed(package):
        sys.path.append(folder)


def _is_installed(package: str) -> bool:
    try:
        spec = find_spec(package)
    # find_spec raises if the package was loaded in another way
    except ValueError:
        return True
    # a folder without __init__.py has no origin, and gives way to a package found later
    return spec is not None and spec.origin is not None
