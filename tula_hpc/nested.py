"""Batches: a tensor, samples first, or tuples, lists and dicts of batches.

What `torch.utils.data.default_collate` makes of samples that are built in the same way. What is neither (text, None)
stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

Batch = Any  # recursive, and of the user's making


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch that is built in the same way of what a function makes of each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, part) for key, part in batch.items()}
    if not isinstance(batch, tuple | list):
        return batch
    parts = [map_tensors(function, part) for part in batch]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Every tensor of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | tuple | list):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(part)


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
