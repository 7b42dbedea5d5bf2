"""Batches: a tensor, samples first, or tuples, lists and dicts of batches.

What `torch.utils.data.default_collate` makes of samples that are built in the same way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

# recursive, and of the user's making
Batch = Any


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch that is built in the same way of what a function makes of each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: map_tensors(function, part) for key, part in batch.items()})
    # of other holders of tensors, as optimizers' states, that hold more
    if not isinstance(batch, tuple | list):
        return batch
    parts = [map_tensors(function, part) for part in batch]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def _like(mapping: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """The same kind of mapping, as `default_collate` keeps it: a model may ask for attributes that it has."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return parts
    clone = copy.copy(mapping)
    clone.update(parts)
    return clone


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Everything in a batch that is no tuple, list or dict."""
    if not isinstance(batch, Mapping | tuple | list):
        yield batch
        return
    for part in batch.values() if isinstance(batch, Mapping) else batch:
        yield from leaves_of(part)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def samples_in(batch: Batch) -> int:
    """How many samples a batch holds, by its first tensor."""
    return len(next(tensors_of(batch)))


def take(batch: Batch, start: int, stop: int) -> Batch:
    """Some of the samples of a batch, as views."""
    return map_tensors(lambda tensor: tensor[start:stop], batch)


def split(batch: Batch, count: int) -> list[Batch]:
    """So many parts of a batch, as views, the first ones larger by a sample where it cannot be divided evenly."""
    size, larger = divmod(samples_in(batch), count)
    ends = [size * place + min(place, larger) for place in range(count + 1)]
    return [take(batch, start, stop) for start, stop in itertools.pairwise(ends)]
