"""Batches as `torch.utils.data.default_collate` makes them, and what torch's loaders tell of theirs.

A batch is a tensor, samples first, or a tuple, list or dict of batches.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _DatasetKind

# recursive, and built by users' data sets
Batch = Any
# times the samples of an epoch: so many a sampler only has for a training that never ends
ENDLESS = 1000


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
    # as `default_collate` does: a model may use attributes of the user's own kind of mapping
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return parts
    clone = copy.copy(mapping)
    clone.update(parts)
    return clone


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Yield everything in a batch that is no tuple, list or dict."""
    # a tuple of them, as a union is made anew at each call
    if not isinstance(batch, (tuple, list, Mapping)):
        yield batch
        return
    for part in batch.values() if isinstance(batch, Mapping) else batch:
        yield from leaves_of(part)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Return the tensors of a batch."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def is_finite(batch: Batch) -> bool:
    """Tell whether no tensor of a batch holds inf or nan."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors_of(batch))


def samples_in(batch: Batch) -> int:
    """Count the samples of a batch, or of a call's arguments, by the first tensor; 0: none."""
    # without a search through what holds it: at every step of most models
    if isinstance(batch, Tensor) and batch.dim() > 0:
        return len(batch)
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim() > 0), 0)


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return some of the samples of a batch, as views."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def split(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into `count` views; the first ones get a sample more where there is a rest."""
    size, larger = divmod(samples_in(batch), count)
    ends = [size * index + min(index, larger) for index in range(count + 1)]
    return [take(batch, start, stop) for start, stop in itertools.pairwise(ends)]


def length_of(loader: Any) -> int | None:
    """Return the number of batches, or samples of a data set; None where it is unknown."""
    try:
        return len(loader)
    # Lightning's have none before they are gone through
    except (TypeError, AttributeError, NotImplementedError, RuntimeError):
        return None


class LoaderPass:
    """One pass over the batches of torch's loader, as its iterator tells of it.

    Attributes:
        size: Items in a whole batch; 0 where it has no size.
        drawn: Samples that the sampler draws in an epoch; 0: unknown, or without an end.
        given_out: Samples in batches, those that fill no batch too. None where these are left out,
            or where that is not known; `sys.maxsize` where it is not known how many there are.

    Args:
        iterator: Of torch's loader. Of any other nothing is known.
    """

    def __init__(self, iterator: object) -> None:
        batches: Any = getattr(iterator, "_index_sampler", None)
        size = getattr(batches, "batch_size", None)
        self.size = size if isinstance(size, int) else 0
        if getattr(batches, "split_batches", False):
            # accelerate's, of which this worker has its share
            self.size //= batches.num_processes
        self.drawn = _drawn_by(batches)
        if self.drawn >= ENDLESS * (length_of(getattr(iterator, "_dataset", None)) or self.drawn):
            self.drawn = 0
        # without collation these are no batches
        self._is_collated = bool(getattr(iterator, "_auto_collation", False))
        self._is_indexed = getattr(iterator, "_dataset_kind", None) == _DatasetKind.Map
        self.given_out: int | None = None
        # of single items none is shorter, and they may be batches
        if self._is_collated and self.size != 1 and not getattr(batches, "drop_last", True):
            self.given_out = self.drawn or sys.maxsize

    def epoch(self, samples: int, batch: int, workers: int) -> tuple[int, int]:
        """Return the samples of an epoch over all workers, and how many still make a step at its end.

        Args:
            samples: Of an epoch, as the sweep file says.
            batch: How many still make a step, where full batches alone are given out.
            workers: As many go through such passes.
        """
        if self.given_out is None:
            return samples, batch
        return min(samples, self.given_out * workers), 1

    def items_in(self, batch: object, count: int) -> int:
        """Return the items in a batch, whose tensors need not tell: graphs are joined.

        Args:
            batch: Has been given out.
            count: Batches given out so far, with this one.

        Returns:
            0 where they are not known.
        """
        size = self.size
        if not self._is_collated or not size:
            return 0
        if size == 1:
            first = batch[0] if isinstance(batch, list | tuple) and batch else batch
            if not isinstance(first, list | tuple):
                # perhaps a data set that makes whole batches
                return 0
        if self.drawn:
            left = self.drawn - (count - 1) * size
            return size if left >= size else max(0, left)
        # a sampler without an end fills each batch; an iterable data set may not, but for lists
        is_listed = isinstance(batch, list) and len(batch) == size
        return size if self._is_indexed or is_listed else 0


def _drawn_by(batches: Any) -> int:
    try:
        # some wrap a sampler of batches, to repeat it without an end
        while isinstance(batches.sampler, BatchSampler):
            batches = batches.sampler
        return len(batches.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


def data_of(loader: object) -> int:
    """Return the id of the data set of an iterator of torch's loader, which all its iterators share.

    Of None it is 0: not known.
    """
    return 0 if loader is None else id(getattr(loader, "_dataset", loader))
