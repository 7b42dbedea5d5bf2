"""Batches on their way to a GPU: one is copied while the device works on the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tula_hpc.nested import Batch, map_tensors, tensors_of

C = TypeVar("C")


class Copies(Protocol[C]):
    """How batches are copied."""

    def begin(self, batch: Batch) -> C:
        """Begin to copy a batch, and do not wait for it."""

    def arrive(self, copying: C) -> Batch:
        """Give the batch to whoever works on the device: what is asked of it from now on finds the batch there."""


def one_ahead(batches: Iterator[Batch], copies: Copies[C]) -> Iterator[Batch]:
    """Yield batches on the device in their order; when one is yielded, the copy of the next has begun.

    Whoever asks for a batch waits for the loader to have the next one. Of what was yielded nothing is kept.
    """
    under_way: deque[C] = deque()
    for batch in batches:
        under_way.append(copies.begin(batch))
        # Or host memory of one more batch would be held during a step.
        del batch
        if len(under_way) > 1:
            yield copies.arrive(under_way.popleft())
    while under_way:
        yield copies.arrive(under_way.popleft())


class Copying(NamedTuple):
    """A batch that a stream copies."""

    batch: Batch
    done: torch.cuda.Event


class StreamCopies:
    """Copies to a GPU on a stream of their own.

    The batch must lie in pinned memory, or the host waits for the copy. It may be freed at once: the allocator of
    pinned memory does not hand it out again before the copy is done. Likewise the GPU's: memory of a copy belongs to
    this stream, and `record_stream` keeps it from the next copy until the stream that uses the tensor has done what it
    was asked before the tensor was freed.

    Args:
        device: Which GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def begin(self, batch: Batch) -> Copying:
        """Begin to copy."""
        with torch.cuda.stream(self.stream):
            copied = map_tensors(self._copy, batch)
        return Copying(copied, self.stream.record_event())  # type: ignore[no-untyped-call] # torch's

    def arrive(self, copying: Copying) -> Batch:
        """Let the current stream wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copying.done)
        for tensor in tensors_of(copying.batch):
            tensor.record_stream(current)
        return copying.batch

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)
