"""Checkpoints while every worker has a model of its own: post-local SGD between two averages.

Models, momenta, BatchNorm's statistics and loss scales then differ from worker to worker, and
momenta even right after an average. Rank 0's are in the checkpoint as always. Before it is written,
every other worker saves its own under the same name in a folder next to it, such as `worker-0001/`,
so that every checkpoint is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tula_hpc.checkpoint.background import error_number, words_of
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import CheckpointError, StageError

# key in a checkpoint: number of its states, rank 0's included; absent if all workers share one
WORKERS = "workers"
# states kept, one more than checkpoints: a checkpoint may fail after the workers' states are saved
KEPT = 3


class LocalStates:
    """One worker's part of such checkpoints."""

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.folder, self.worker = folder, worker
        self.store = CheckpointStore(self._folder_of(worker.env.rank), KEPT, partners=folder)

    def save(self, *, samples_seen: int, restart_count: int) -> dict[str, int]:
        """Save this worker's state; return the entry for rank 0's checkpoint. Collective.

        Raises:
            CheckpointError: A file of a worker cannot be written.
        """
        if not self.worker.is_local:
            return {}
        error: CheckpointError | None = None
        # not in the background: rank 0 may begin its file only after all the others are on disk
        if self.worker.env.rank != 0:
            try:
                self.store.save(
                    self.worker.own_state(), samples_seen=samples_seen, restart_count=restart_count
                )
            except CheckpointError as failed:
                # raised below, once all workers know of it
                error = failed
        (number,) = self.worker.agree(error_number(error))
        if number:
            raise error or CheckpointError(f"another worker's state {words_of(number)}")
        return {WORKERS: self.worker.env.world_size}

    def load(self, loaded: LoadedCheckpoint) -> dict[str, Any]:
        """Return the model, optimizer and scaler state for this worker. Collective.

        If the same number of workers saved it, it is the worker's own state, and training goes on
        bit for bit. Otherwise it is the mean of all states, momenta included: an average that an
        uninterrupted training would not have taken at that point.

        Raises:
            StageError: A worker's file is missing or damaged.
        """
        saved_by, rank = int(loaded.state.get(WORKERS, 1)), self.worker.env.rank
        wanted = [rank] if saved_by == self.worker.env.world_size else range(saved_by)
        state, problem = self._mean(loaded, [other for other in wanted if saved_by > 1])
        if any(self.worker.agree(float(bool(problem)))):
            why = problem or "another worker's state cannot be used"
            raise StageError(f"{why}; delete {loaded.path} to go on from the checkpoint before it")
        return state

    def note(self, loaded: LoadedCheckpoint) -> str:
        """Return a note for the log if states were averaged, else ""."""
        saved_by = int(loaded.state.get(WORKERS, 1))
        if saved_by in (1, self.worker.env.world_size):
            return ""
        return f", the mean of {saved_by} workers' models"

    def _mean(self, loaded: LoadedCheckpoint, ranks: list[int]) -> tuple[dict[str, Any], str]:
        """Return the mean of these workers' states, or rank 0's, and any problem."""
        state: dict[str, Any] = {}
        for count, rank in enumerate(ranks, start=1):
            try:
                other = self._read(loaded, rank)
            except CheckpointError as error:
                return loaded.state, str(error)
            state = state or other
            if other is not state:
                fold_into(state, other, count)
        return state or loaded.state, ""

    def _read(self, loaded: LoadedCheckpoint, rank: int) -> dict[str, Any]:
        if rank == 0:
            return loaded.state
        return CheckpointStore.load(self._folder_of(rank) / loaded.path.name)

    def keep_newest_only(self) -> None:
        """Delete older states when training is over; see `CheckpointStore.keep_newest_only`."""
        self.store.keep_newest_only()

    def _folder_of(self, rank: int) -> Path:
        return self.folder / f"worker-{rank:04d}"


@torch.no_grad()
def fold_into(mean: Any, value: Any, count: int) -> None:
    """Add a state to the mean of `count` − 1 states, in place: mean += (value − mean) / count.

    Only floating-point and complex tensors change, at any depth of dicts and lists.
    """
    if isinstance(mean, Tensor):
        if mean.is_floating_point() or mean.is_complex():
            mean += (value - mean) / count
    elif isinstance(mean, dict):
        for key in mean.keys() & value.keys():
            fold_into(mean[key], value[key], count)
    elif isinstance(mean, list | tuple):
        for own, other in zip(mean, value, strict=True):
            fold_into(own, other, count)
