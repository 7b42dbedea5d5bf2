"""Batches as `torch.utils.data.default_collate` makes them.

A batch is a tensor, samples first, or a tuple, list or dict of batches.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

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
    """Count the samples of a batch, by its first tensor."""
    return len(next(tensors_of(batch)))


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Return some of the samples of a batch, as views."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def split(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into `count` views; the first ones get a sample more where there is a rest."""
    size, larger = divmod(samples_in(batch), count)
    ends = [size * index + min(index, larger) for index in range(count + 1)]
    return [take(batch, start, stop) for start, stop in itertools.pairwise(ends)]
