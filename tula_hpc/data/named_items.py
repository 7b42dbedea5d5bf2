"""Name the item that shows a mistake in a data set.

A loader process sends an error in place of the batch. The error is raised where the batch is
requested: a traceback of this package would say nothing about the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Subset

from tula_hpc.batches import Batch
from tula_hpc.data.images import ImageDataset, samples_of
from tula_hpc.errors import DataError, InputError
from tula_hpc.files import NO_SPACE
from tula_hpc.user_code import collate, describe_error, is_mistake

# part of torch's message about a loader process that was killed
KILLED_WORKER = re.compile(r"DataLoader worker \(pid")


class NamedItems(Dataset[Any]):
    """Data set whose errors name the item that cannot be loaded.

    Targets are checked as labels of `classes` classes; with None they are no labels.
    """

    def __init__(self, dataset: Dataset[Any], what: str, classes: int | None) -> None:
        self.dataset = dataset
        self.what = what
        # labels of this package's data sets need no check
        self.classes = None if isinstance(dataset, ImageDataset) else classes

    def __len__(self) -> int:
        return samples_of(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.items([index])[0]

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        """Return the items of a batch, or a list of the error alone."""
        try:
            return _Items(self.items(indices), self, indices)
        except (InputError, DataError) as error:
            return [error]

    def items(self, indices: list[Any]) -> list[Any]:
        """Return items.

        Raises:
            InputError: An item cannot be loaded, or its label is none of the classes.
            DataError: An item cannot be read because a file system fails.
        """
        several = getattr(self.dataset, "__getitems__", None)
        if several is None or isinstance(self.dataset, Subset):
            return [self.item(index) for index in indices]
        try:
            return [self._checked(*pair) for pair in zip(indices, several(indices), strict=True)]
        except (InputError, DataError):
            raise
        except Exception:  # noqa: BLE001 # which item it was shows below
            return [self.item(index) for index in indices]

    def item(self, index: int) -> Any:
        """Return an item; see `items`."""
        try:
            return self._checked(index, self.dataset[index])
        except InputError:
            raise
        except Exception as error:
            if is_mistake(error):
                raise self._mistake(index, f"cannot be loaded: {describe_error(error)}") from error
            if isinstance(error, OSError) and error.errno not in NO_SPACE:
                # a file system that fails may work the next time
                raise DataError(
                    f"{self._place(index)} cannot be read: {describe_error(error)}"
                ) from error
            error.add_note(f"({self._place(index)})")
            raise

    def _checked(self, index: int, item: Any) -> Any:
        if item is None:
            expected = "(inputs, targets)" if self.classes is None else "(image, label)"
            raise self._mistake(index, f"is None; expected {expected}")
        if self.classes is not None and not 0 <= int(item[1]) < self.classes:
            expected = f"expected 0 to {self.classes - 1}"
            raise self._mistake(index, f"has label {int(item[1])}; {expected}")
        return item

    def _mistake(self, index: int, words: str) -> InputError:
        return InputError(f"{self._place(index)} {words}", key="workload.dataset")

    def _place(self, index: int) -> str:
        return f"item {self._own(index)} of the {self.what} set"

    def pair(self, first: int, second: int) -> str:
        """Name two items for a message."""
        return f"has items {self._own(first)} and {self._own(second)} in the {self.what} set"

    def _own(self, index: int) -> int:
        """Return the index in the user's own data set, of which `dataset` may be a subset."""
        dataset: Any = self.dataset
        while isinstance(dataset, Subset):
            index = int(dataset.indices[index])
            dataset = dataset.dataset
        return index


class _Items(list[Any]):
    """Items of a batch with their indices, until they are collated."""

    def __init__(self, items: list[Any], source: NamedItems, indices: list[Any]) -> None:
        super().__init__(items)
        self.source = source
        self.indices = indices

    def named(self, mistake: InputError) -> InputError:
        """Return the error of collating the items, with the first two that do not fit."""
        for index, item in zip(self.indices[1:], self[1:], strict=True):
            try:
                collate([self[0], item], self.source.pair(self.indices[0], index))
            except InputError as error:
                return error
        return mistake


class RaisingLoader(DataLoader[Any]):
    """A loader that raises the errors that came in place of batches."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # nothing else is asked of it
        # not a generator function, which would keep a batch alive while it is used
        return map(_raise_mistake, _Watched(super().__iter__()))


class _Watched(Iterator[Any]):
    """Batches of loader processes; a process that was killed becomes a DataError."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __next__(self) -> Any:
        try:
            return next(self.batches)
        except (ConnectionError, RuntimeError) as error:
            # batches come through sockets of the process, which may fail before torch sees its end
            if isinstance(error, RuntimeError) and not KILLED_WORKER.search(str(error)):
                raise
            raise DataError(
                f"a loader process was killed, perhaps for lack of memory ({describe_error(error)})"
            ) from None


def _raise_mistake(batch: Any) -> Any:
    if isinstance(batch, InputError | DataError):
        raise batch
    return batch


def collated(
    make: Callable[[list[Any]], Batch], items: list[Any]
) -> Batch | InputError | DataError:
    """Collate items into a batch; return the error if that cannot be done."""
    if isinstance(items[0], InputError | DataError):
        return items[0]
    try:
        return make(items)
    except InputError as error:
        return items.named(error) if isinstance(items, _Items) else error
