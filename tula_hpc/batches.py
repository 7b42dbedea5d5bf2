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
    if not isinstance(batch, Mapping | tuple | list):
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


def items_in_whole_batch(loader: object) -> int:
    """Return the items in a whole batch of an iterator of torch's loader; 0 where it has no size."""
    size = getattr(getattr(loader, "_index_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else 0


def samples_drawn(loader: object) -> int:
    """Return the samples that an iterator's sampler draws in an epoch; 0: unknown, or without an end."""
    sampler: Any = getattr(loader, "_index_sampler", None)
    try:
        # some wrap one of batches, to repeat it without an end
        while isinstance(sampler.sampler, BatchSampler):
            sampler = sampler.sampler
        return len(sampler.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


def samples_given_out(loader: object) -> int | None:
    """Return the samples that an iterator of torch's loader gives out, those that fill no batch too.

    None where it leaves those out, or where that is not known; `sys.maxsize` where it does not know
    how many there are.
    """
    batches: Any = getattr(loader, "_index_sampler", None)
    # without collation these are no batches; of single items none is shorter, and they may be batches
    has_batches = getattr(loader, "_auto_collation", False) and items_in_whole_batch(loader) != 1
    if not has_batches or getattr(batches, "drop_last", True):
        return None
    return samples_drawn(loader) or sys.maxsize


def items_given_out(loader: object, batch: object) -> int:
    """Return the items in this batch, which an iterator of torch's loader has just given out.

    Their tensors need not tell: detectors take lists of images, and graphs are joined.

    Returns:
        0 where it does not know them.
    """
    size = items_in_whole_batch(loader)
    given = getattr(loader, "_num_yielded", 0)
    if not getattr(loader, "_auto_collation", False) or not size:
        return 0
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if size == 1 and not isinstance(first, list | tuple):
        # perhaps a data set that makes whole batches
        return 0
    if drawn := samples_drawn(loader):
        return max(0, min(size, drawn - (given - 1) * size))
    # a sampler without an end fills each batch; an iterable data set may not, but for lists of items
    is_whole = getattr(loader, "_dataset_kind", None) == _DatasetKind.Map
    is_listed = isinstance(batch, list) and len(batch) == size
    return size if is_whole or is_listed else 0
