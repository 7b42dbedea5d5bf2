"""Save a training: copy its state between two steps, and write the copy while training goes on.

Rank 0 writes in a thread of its own, one checkpoint at a time. A write may fail: the disk is full,
or a later restart has fenced this process out. This becomes an error on every worker when the
workers next agree on a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from tula_hpc.checkpoint.interval import Cadence
from tula_hpc.checkpoint.snapshot import Gpu, Snapshot, Snapshots
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.ddp.agreement import Agreeing, SaveRequest
from tula_hpc.errors import CheckpointError
from tula_hpc.files import HeldFolder


class BackgroundWriter:
    """Writer of checkpoints during training; the process does not end before the last write."""

    def __init__(self, store: CheckpointStore, device: torch.device) -> None:
        self.store = store
        self.snapshots = Snapshots(Gpu(device) if device.type == "cuda" else None)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.write: Future[float] | None = None

    def begin(self, state: dict[str, Any], *, samples_seen: int, restart_count: int) -> None:
        """Copy the state, which may change once this returns, and begin to write the copy.

        `finish` has been called for the write before this one.
        """
        snapshot = self.snapshots.take(state)
        self.write = self.thread.submit(self._save, snapshot, samples_seen, restart_count)

    def _save(self, snapshot: Snapshot, samples_seen: int, restart_count: int) -> float:
        started = time.perf_counter()
        self.store.save(snapshot.wait(), samples_seen=samples_seen, restart_count=restart_count)
        return time.perf_counter() - started

    @property
    def is_busy(self) -> bool:
        """Tell whether a write is in progress."""
        return self.write is not None and not self.write.done()

    @property
    def has_landed(self) -> bool:
        """Tell whether a write has ended, and `finish` was not called for it."""
        return self.write is not None and self.write.done()

    @property
    def has_failed(self) -> bool:
        """Tell whether such a write failed."""
        return self.write is not None and self.write.done() and self.write.exception() is not None

    def finish(self) -> tuple[float, BaseException | None] | None:
        """Wait for the write that was begun; return its seconds and error, None if there is none."""
        write, self.write = self.write, None
        if write is None:
            return None
        error = write.exception()
        return (0.0, error) if error is not None else (write.result(), None)


# Number of an error that is not the operating system's. Of several workers' numbers the largest
# counts, and the others say more.
NO_NUMBER = 0.5


def error_number(error: BaseException | None) -> float:
    """Return an error's number in the operating system, for other workers; 0: no error."""
    cause = None if error is None else error.__cause__
    if isinstance(cause, OSError) and cause.errno:
        return cause.errno
    return 0 if error is None else NO_NUMBER


def words_of(number: float) -> str:
    """Return the end of a sentence about a thing that another worker could not save, and why.

    The job's failure must be known by each worker's log: the first worker that ends makes srun -K1
    end the others, perhaps before they have written theirs.
    """
    why = "" if number == NO_NUMBER else f": {os.strerror(int(number))}"
    return f"cannot be saved{why}; that worker's log may say more"


class OwnState(Protocol):
    """State that each worker saves by itself."""

    def save(self, *, samples_seen: int, restart_count: int) -> dict[str, int]:
        """Save this worker's state, and return entries for rank 0's checkpoint. Collective."""


class Saving:
    """One worker's share of saving; rank 0 decides when to save.

    `store` and `folder` are None on workers that write no checkpoints, `own` is None if rank 0 has
    the whole state. If the training's folder is deleted the training fails, before it could write
    into the folder of a later training.
    """

    def __init__(
        self,
        worker: Agreeing,
        store: CheckpointStore | None,
        own: OwnState | None,
        cadence: Cadence,
        folder: HeldFolder | None = None,
    ) -> None:
        self.worker, self.own, self.cadence, self.folder = worker, own, cadence, folder
        self.writer = None if store is None else BackgroundWriter(store, worker.device)

    def request(self) -> SaveRequest:
        """Return this worker's request; a write in progress puts the next checkpoint off."""
        if self.writer is None:
            return SaveRequest.NOTHING
        if self.writer.has_failed or self._folder_error():
            return SaveRequest.FAIL
        is_due = self.writer.write is None and self.cadence.due()
        return SaveRequest.SAVE if is_due else SaveRequest.NOTHING

    @property
    def may_save(self) -> bool:
        """Tell whether to save at a good moment before a save is due, see `Cadence.may_save`.

        Unless the user has set the interval, it is False while a write is in progress.
        """
        if self.writer is None or not self.cadence.may_save:
            return False
        return self.cadence.fixed_s is not None or not self.writer.is_busy

    @property
    def has_landed(self) -> bool:
        """Tell whether a checkpoint has reached the disk and its cost is not recorded yet.

        If so, call `note` when the device has no work left.
        """
        return self.writer is not None and self.writer.has_landed and not self.writer.has_failed

    def note(self) -> None:
        """Record the cost of the checkpoint that is on disk."""
        landed = self._finish()
        if landed is not None:
            seconds, _ = landed
            self.cadence.ended(seconds)

    def save(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        samples_seen: int,
        restart_count: int,
        wait: bool = False,
    ) -> None:
        """Begin a checkpoint, after the previous one is on disk. Collective.

        The states of other workers, divided optimizer states and whole states of their own, are
        gathered or written before this returns: a background thread could not exchange anything,
        since all workers have to call collectives in the same order.

        `state` returns the content, whole on rank 0; it is collective, and called once. With `wait`
        this returns when the checkpoint is on disk.

        Raises:
            CheckpointError: The previous checkpoint, or with `wait` this one, could not be saved.
        """
        started = time.perf_counter()
        self.settle()
        position = {"samples_seen": samples_seen, "restart_count": restart_count}
        extra = {} if self.own is None else self.own.save(**position)
        content = state()
        if self.writer is not None:
            self.writer.begin({**content, **extra}, **position)
        if wait:
            self.settle(measured=False)
            self.cadence.waited()
        else:
            self.cadence.began(time.perf_counter() - started)

    def settle(self, *, measured: bool = True) -> None:
        """Wait until the write that was begun is on disk. Collective.

        If `measured`, training went on during the write, and its cost is counted.

        Raises:
            CheckpointError: The checkpoint could not be saved, or the training's folder is gone;
                the error on rank 0 gives the reason.
        """
        landed = self._finish()
        seconds, error = landed or (0.0, None)
        error = error or self._folder_error()
        (number,) = self.worker.agree(error_number(error))
        if error is not None:
            raise error
        if number:
            raise CheckpointError(f"rank 0's checkpoint {words_of(number)}")
        if landed is not None and measured:
            self.cadence.ended(seconds)

    def abandon(self) -> BaseException | None:
        """Wait for the write after training has failed, and return its error; not collective."""
        _, error = self._finish() or (0.0, None)
        return error

    def _finish(self) -> tuple[float, BaseException | None] | None:
        if self.writer is None:
            return None
        return self.writer.finish()

    def _folder_error(self) -> CheckpointError | None:
        if self.folder is not None and (message := self.folder.loss("trained")):
            return CheckpointError(message)
        return None
