"""Copy a training's state to host memory between two steps, while the next step goes on.

The copy needs as much host memory as the state: a model's parameters and buffers, and the
optimizer's states. Plans count it, see `analysis.planning.memory_limit.checkpoint_copy_bytes`;
profiles do not see it.

On a CPU tensors are cloned. On a GPU a separate stream copies them to page-locked memory, which is
kept for the next time, after all work queued in the training's stream. Meanwhile the next step must
not change them: they are first cloned on the GPU if at least twice the memory for that is free,
else the training's stream waits for the copy. The host waits in neither case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tula_hpc.batches import map_tensors


class Snapshot(NamedTuple):
    """A state as it was; complete once `wait` returns."""

    state: dict[str, Any]
    # event after which the state is complete; None: it is complete already
    copied: torch.cuda.Event | None
    # clones on the device, until they are copied
    held: list[Tensor]

    def wait(self) -> dict[str, Any]:
        """Wait until the last tensor has arrived, and return the state; works in any thread."""
        if self.copied is not None:
            self.copied.synchronize()
            self.held.clear()
        return self.state


class Gpu:
    """A CUDA device that copies its tensors to the host while the host goes on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether the tensor is on the device, not on the host."""
        return tensor.device.type != "cpu"

    def has_room(self, size_bytes: int) -> bool:
        """Tell whether `size_bytes` may be cloned on the device.

        torch keeps memory that the training has used before, so no step so far needed the memory
        that is free now.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        return 2 * size_bytes <= free

    def buffer(self, tensor: Tensor) -> Tensor:
        """Return page-locked memory, the only host memory that the device copies to by itself."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, block: bool) -> torch.cuda.Event:
        """Begin to copy into the first tensor of each pair from the second.

        With `block`, later work of the training's stream waits for the copy.
        """
        training = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(training)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        # blocking: a thread that waits for the event sleeps, and leaves its core to the training
        copied: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.stream.record_event(copied)  # type: ignore[no-untyped-call]
        if block:
            training.wait_event(copied)
        return copied


class Snapshots:
    """Maker of snapshots, one at a time: those of a GPU reuse the memory of the one before."""

    def __init__(self, device: Gpu | None = None) -> None:
        self.device = device
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> Snapshot:
        """Copy tensors and plain values in dicts, lists and tuples; the copy shares no memory.

        Parameters become plain tensors. Tensors that share memory with each other also do so in the
        copy.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        known: dict[tuple[object, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in known:
                known[key] = self._copied(tensor, pairs)
            return known[key]

        taken = map_tensors(copied, state)
        if self.device is None or not pairs:
            return Snapshot(taken, None, [])
        targets, sources = zip(*pairs, strict=True)
        clones = self._clones(sources, self.device)
        copies = list(zip(targets, clones or sources, strict=True))
        return Snapshot(taken, self.device.copy(copies, block=not clones), clones)

    def _copied(self, tensor: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return a clone, or for a tensor on the device host memory to be filled."""
        tensor = tensor.detach()
        if self.device is None or not self.device.holds(tensor):
            return tensor.clone()
        target = self._buffer(len(pairs), tensor, self.device)
        pairs.append((target, tensor))
        return target

    def _buffer(self, index: int, tensor: Tensor, device: Gpu) -> Tensor:
        """Return the last snapshot's buffer if it fits: page-locking takes longer than copying."""
        if index == len(self.buffers):
            self.buffers.append(device.buffer(tensor))
        old = self.buffers[index]
        wanted = (tensor.shape, tensor.dtype, tensor.stride())
        if (old.shape, old.dtype, old.stride()) != wanted:
            self.buffers[index] = device.buffer(tensor)
        return self.buffers[index]

    @staticmethod
    def _clones(tensors: Sequence[Tensor], device: Gpu) -> list[Tensor]:
        """Return clones on the device, none if they might take memory that steps need."""
        if not device.has_room(sum(tensor.nbytes for tensor in tensors)):
            return []
        try:
            return [tensor.clone() for tensor in tensors]
        except torch.OutOfMemoryError:
            # another process may have taken the free memory
            return []
