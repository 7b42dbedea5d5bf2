"""Batches as `torch.utils.data.default_collate` makes them, and facts read from torch's loaders.

A batch is a tensor with samples along the first dimension, or a tuple, list or dict of batches.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

# the type is recursive, and users' data sets build it
Batch = Any
# a sampler with at least this many times an epoch's samples is taken to be endless
ENDLESS = 1000
# attribute of an iterator that has the number of items in each batch so far
CUTS = "_tula_cuts"


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply a function to every tensor of a nested batch; anything else stays as it is."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: map_tensors(function, part) for key, part in batch.items()})
    if not isinstance(batch, tuple | list):
        return batch
    parts = [map_tensors(function, part) for part in batch]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def _like(mapping: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    # copied as `default_collate` does: a model may use attributes of the user's own mapping type
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return parts
    clone = copy.copy(mapping)
    # not by `update`, by which a Counter would add
    for key, part in parts.items():
        clone[key] = part
    return clone


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Yield everything in a batch that is no tuple, list or dict."""
    # a tuple of types, since a union would be built again at each call
    if not isinstance(batch, (tuple, list, Mapping)):
        yield batch
        return
    for part in batch.values() if isinstance(batch, Mapping) else batch:
        yield from leaves_of(part)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Return the tensors of a batch."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors hold."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_finite(batch: Batch) -> bool:
    """Tell whether no tensor of a batch holds inf or nan."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors_of(batch))


def samples_in(batch: Batch) -> int:
    """Count the samples in a batch or in a call's arguments by the first tensor; 0 without one."""
    # most batches are a tensor, which needs no search at each step
    if isinstance(batch, Tensor) and batch.dim() > 0:
        return len(batch)
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim() > 0), 0)


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples from `start` up to `stop` of a batch, as views."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def split(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into `count` views; if they cannot be equal, the first get one sample more."""
    size, larger = divmod(samples_in(batch), count)
    ends = [size * index + min(index, larger) for index in range(count + 1)]
    return [take(batch, start, stop) for start, stop in itertools.pairwise(ends)]


def length_of(loader: Any) -> int | None:
    """Return the number of a loader's batches or a data set's samples; None if it is unknown."""
    try:
        return len(loader)
    # Lightning's combined loaders have no length before their first iteration
    except (TypeError, AttributeError, NotImplementedError, RuntimeError):
        return None


class LoaderPass:
    """One pass over the batches of a torch loader; of any other iterator nothing is known.

    Attributes:
        data: Id of the data set; see `data_of`.
        size: Items in a full batch; 0 if batches have no fixed size.
        drawn: Samples that the sampler draws in an epoch; 0 if unknown or endless.
        given_out: Samples that the pass gives out, a shorter last batch included. None if such a
            batch is left out or this is unknown; `sys.maxsize` if only the number is unknown.
        full: Batches, from the first one on, that are known to have `size` items.
    """

    def __init__(self, iterator: object) -> None:
        self.data = data_of(iterator)
        batches: Any = getattr(iterator, "_index_sampler", None)
        size = getattr(batches, "batch_size", None)
        self.size = size if isinstance(size, int) else 0
        # some scripts cut all batches of an epoch beforehand, as fairseq does by their tokens
        self._cut: list[Any] = batches if isinstance(batches, list) else []
        # items in each batch that a sampler of the script's own has cut so far; see `note_cuts`
        self._noted: list[int] = getattr(iterator, CUTS, [])
        if getattr(batches, "split_batches", False):
            # accelerate splits each batch of this sampler between the workers
            self.size //= batches.num_processes
        # items in all batches of the pass, if all are full; 0 if unknown
        self._whole = self.size * (length_of(batches) or 0)
        self.drawn = _drawn_by(batches)
        if self.drawn >= ENDLESS * (length_of(getattr(iterator, "_dataset", None)) or self.drawn):
            self.drawn = 0
        # a sampler that begins within an epoch has the number of samples that it leaves out
        left_out = getattr(getattr(batches, "sampler", None), "left_out", 0)
        self._left = self.drawn - left_out if isinstance(left_out, int) else self.drawn
        # without collation the loader gives out single items
        self._is_collated = bool(getattr(iterator, "_auto_collation", False))
        is_known = self._is_collated and self.size > 1
        self.full = max(0, self._left) // self.size if is_known else 0
        # torch's own sampler leaves a shorter last batch out: without it the pass is an epoch
        self._leaves_out = is_known and type(batches) is BatchSampler and batches.drop_last
        self._is_indexed = getattr(iterator, "_dataset_kind", None) == _DatasetKind.Map
        self.given_out: int | None = None
        # a batch of one item cannot be shorter, and the item may itself be a batch
        if self._is_collated and self.size != 1 and not _drops_last(batches):
            self.given_out = self.drawn or sys.maxsize

    @property
    def gives_items(self) -> bool:
        """Tell whether the loader gives out items one by one, each of which may be a batch."""
        return self.size == 1 or not (self.size or self._is_collated)

    def epoch(
        self,
        samples: int,
        batch: int,
        workers: int,
        before: LoaderPass | None = None,
        *,
        is_begun: bool = False,
    ) -> tuple[int, int]:
        """Return the samples of an epoch over all workers, and the fewest that make its last step.

        `samples` is the sweep file's number, and each of the `workers` makes such a pass. If only
        full batches are given out, a step has at least `batch` samples.
        `before` is the pass before this one. `is_begun`: batches before belong to this epoch, from
        that pass or from before a resume.
        """
        if is_begun and before is not None and before.data != self.data:
            # loaders that take turns have a part of the epoch each
            return samples, batch if self.given_out is None else 1
        if self.given_out is None:
            # a sampler of the script's own may fill its last batches up, by less than a step
            whole = self._whole * workers
            # a data set may be smaller at first, as in a curriculum; where the script is given its
            # steps, epochs go by their samples, and `batch` is 1
            is_smaller = self._leaves_out and not is_begun and self.size <= batch
            is_smaller = is_smaller and 0 < whole < samples
            return whole if is_smaller or samples < whole < samples + batch else samples, batch
        return min(samples, self.given_out * workers), 1

    def items_in(self, batch: object, count: int) -> int:
        """Count the items in the last of the `count` batches given out so far; 0 if unknown.

        Its tensors need not show them: graphs are joined into one.
        """
        if self._is_collated and 0 < count <= len(self._cut):
            return len(self._cut[count - 1])
        is_noted = 0 < count <= len(self._noted)
        size = self._noted[count - 1] if is_noted else self.size
        if not self._is_collated or not size:
            return 0
        if size == 1:
            first = batch[0] if isinstance(batch, list | tuple) and batch else batch
            if not isinstance(first, list | tuple):
                # the item may be a whole batch that the data set has made
                return 0
        if self.drawn and not is_noted:
            left = self._left - (count - 1) * size
            return size if left >= size else max(0, left)
        # An endless sampler fills each batch. An iterable data set may not, but a list shows it.
        is_listed = isinstance(batch, list) and len(batch) == size
        return size if self._is_indexed or is_listed else 0


def note_cuts(iterator: Any) -> None:
    """Have an iterator of a torch loader note the items of its batches if these have no fixed size.

    Call this whenever the iterator was made or reset. Its batches need not show their items: those
    that a sampler has cut by their tokens may be joined in one row.
    """
    batches = getattr(iterator, "_index_sampler", None)
    indices = getattr(iterator, "_sampler_iter", None)
    # a list shows its batches by itself; a state of the iterator over indices may be asked for
    if isinstance(batches, list) or indices is None or hasattr(indices, "state_dict"):
        return
    if iterator._auto_collation and not isinstance(getattr(batches, "batch_size", None), int):
        cuts: list[int] = []
        setattr(iterator, CUTS, cuts)
        iterator._sampler_iter = _noting(indices, cuts)


def _noting(indices: Iterator[Any], cuts: list[int]) -> Iterator[Any]:
    for index in indices:
        cuts.append(len(index))
        yield index


def _drops_last(batches: Any) -> bool:
    """Tell whether a sampler leaves a shorter last batch out; True if that is unknown."""
    # accelerate wraps a batch sampler to skip the first batches of a resumed epoch
    while not hasattr(batches, "drop_last") and hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return bool(getattr(batches, "drop_last", True))


def _drawn_by(batches: Any) -> int:
    try:
        # some scripts wrap a batch sampler to repeat it endlessly
        while isinstance(batches.sampler, BatchSampler):
            batches = batches.sampler
        return len(batches.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


def data_of(loader: object) -> int:
    """Return the id of the data set behind an iterator of a torch loader.

    All iterators of the loader share it. Without an iterator it is 0, for unknown.
    """
    return 0 if loader is None else id(getattr(loader, "_dataset", loader))
