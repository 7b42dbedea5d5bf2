"""Which storages live at each moment of a computation, seen from the operators that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(NamedTuple):
    """The moment when most bytes were alive."""

    live_bytes: int
    blocks: tuple[int, ...]  # bytes of each storage that lived then and had been made since `AllocationTracker.watch`


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while it is active, until they are freed.

    It sees tensors, fake ones as well as real ones, not what a library takes for itself inside of an operator
    (convolution workspaces, reordered weights). Views count once, with their storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, weakref.ref[Any]] = {}  # by identity, which is unique while a storage lives
        self._log: list[tuple[int, int]] = []  # (number of the block, bytes; negative when it is freed)
        self._count = self._live = self._live_at_start = 0

    def watch(self) -> None:
        """Start a new peak from what is alive now."""
        self._log, self._live_at_start = [], self._live

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._living or not size:
            return
        self._count += 1
        self._add(self._count, size)
        self._living[key] = weakref.ref(storage, self._release(key, self._count, size))

    def _release(self, key: int, number: int, size: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            del self._living[key]
            self._add(number, -size)

        return release

    def _add(self, number: int, size: int) -> None:
        self._live += size
        self._log.append((number, size))

    def peak(self) -> Peak:
        """The largest sum of living bytes since `watch`."""
        live = highest = self._live_at_start
        length = 0
        for position, (_, size) in enumerate(self._log):
            live += size
            if live > highest:
                highest, length = live, position + 1
        made = {number: size for number, size in self._log[:length] if size > 0}
        for number, size in self._log[:length]:
            if size < 0:
                made.pop(number, None)
        return Peak(highest, tuple(made.values()))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.hold(leaf)
        return result
