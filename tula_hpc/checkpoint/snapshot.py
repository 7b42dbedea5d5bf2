"""A copy of a training's state in host memory, taken between two steps, while the next one goes on.

It needs as much host memory as the state: a model's parameters and buffers, and the optimizer's
states. Plans reckon with that, see `analysis.memory.checkpoint_copy_bytes`; profiles do not see it.

On a CPU tensors are cloned. On a GPU they are copied to page-locked memory, which is kept for the
next time, by a stream of its own, after all that the training's stream was asked for. Meanwhile the
next step must not change them: they are cloned on the GPU first where at least twice as much memory
is free as that takes, else the training's stream waits for the copy. The host waits for neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Something that a device was asked for."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class Snapshot(NamedTuple):
    """A state as it was; whole once `wait` returns."""

    state: dict[str, Any]
    # None: it is whole
    copied: Pending | None
    # clones on the device, until they are copied
    held: list[Tensor]

    def wait(self) -> dict[str, Any]:
        """The state, when the last tensor has arrived; any thread may ask."""
        if self.copied is not None:
            self.copied.synchronize()
            self.held.clear()
        return self.state


class Device(Protocol):
    """Where tensors are copied from, behind the host's back."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is there, and not on the host."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much may be cloned."""

    def buffer(self, tensor: Tensor) -> Tensor:
        """Host memory for it."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, block: bool) -> Pending:
        """Begin to copy to each first tensor from the second; `block`: what the training asks for later comes later."""


class Gpu:
    """A CUDA device.

    Args:
        device: Which one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def holds(self, tensor: Tensor) -> bool:
        """See `Device.holds`."""
        return tensor.device.type != "cpu"

    def has_room(self, size_bytes: int) -> bool:
        """Memory that the training has used before stays its own: what is free now, no step has needed so far."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return 2 * size_bytes <= free

    def buffer(self, tensor: Tensor) -> Tensor:
        """Page-locked: only to and from there the device copies by itself."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, block: bool) -> Pending:
        """See `Device.copy`."""
        training = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(training)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        # whoever waits for it leaves the core to the training
        copied: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch's
        self.stream.record_event(copied)  # type: ignore[no-untyped-call] # torch's
        if block:
            training.wait_event(copied)
        return copied


class Snapshots:
    """Takes snapshots, one at a time: of a GPU's, each lives in the memory of the one before.

    Args:
        device: Where the training runs; None: on the host.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> Snapshot:
        """Copy a state of tensors and plain values in dicts, lists and tuples; nothing in it is shared with the copy.

        Tensors become plain ones (no parameters), and those that share their memory go on sharing
        it.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        known: dict[tuple[object, ...], Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place not in known:
                known[place] = self._copied(tensor, pairs)
            return known[place]

        taken = each_tensor(state, copied)
        if self.device is None or not pairs:
            return Snapshot(taken, None, [])
        clones = self._clones([source for _, source in pairs], self.device)
        sources = clones or [source for _, source in pairs]
        targets = [target for target, _ in pairs]
        pending = self.device.copy(list(zip(targets, sources, strict=True)), block=not clones)
        return Snapshot(taken, pending, clones)

    def _copied(self, tensor: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """A clone, or where the tensor is on the device, host memory that is to be filled."""
        tensor = tensor.detach()
        if self.device is None or not self.device.holds(tensor):
            return tensor.clone()
        target = self._buffer(len(pairs), tensor, self.device)
        pairs.append((target, tensor))
        return target

    def _buffer(self, place: int, tensor: Tensor, device: Device) -> Tensor:
        """Of the last snapshot where it fits: page-locking memory takes longer than filling it."""
        if place == len(self.buffers):
            self.buffers.append(device.buffer(tensor))
        old = self.buffers[place]
        if (old.shape, old.dtype) != (
            tensor.shape,
            tensor.dtype,
        ) or old.stride() != tensor.stride():
            self.buffers[place] = device.buffer(tensor)
        return self.buffers[place]

    @staticmethod
    def _clones(tensors: Sequence[Tensor], device: Device) -> list[Tensor]:
        """On the device; none where they might take memory that steps need."""
        if not device.has_room(sum(tensor.nbytes for tensor in tensors)):
            return []
        try:
            return [tensor.clone() for tensor in tensors]
        except torch.OutOfMemoryError:
            # of another process's doing: it is free for all
            return []


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same containers anew, with every tensor changed; other values as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        # with its attributes: a model's state has the modules' versions in one
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = each_tensor(item, change)
        return result
    if isinstance(value, list | tuple):
        return type(value)(each_tensor(item, change) for item in value)
    return value
