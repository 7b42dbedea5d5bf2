"""Progress of a training; saving and stopping between two steps, and resuming.

All this is the same for the built-in loop and for scripts. `interval.py` decides when a checkpoint
is written.
"""

from __future__ import annotations

import contextlib
import operator
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_hpc.checkpoint.background import OwnState, Saving
from tula_hpc.checkpoint.interval import Cadence, Interruptions
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.ddp.agreement import Agreeing, Decision
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.errors import DataError, StorageError
from tula_hpc.files import HeldFolder
from tula_hpc.formatting import format_duration, format_percent
from tula_hpc.records.events import EventName


@dataclass
class Progress:
    """Progress of a training, saved with every checkpoint.

    It is counted in samples, not steps: the batch may change on the way.
    """

    # epochs completed
    epoch: int = 0
    # samples seen of the current epoch, over all workers
    offset: int = 0
    samples_seen: int = 0
    step: int = 0
    # steps of this epoch that were timed
    epoch_steps: int = 0
    epoch_time_s: float = 0.0
    # steps of this epoch whose time counts as part of a start
    start_steps: int = 0
    # sum of the steps' losses on rank 0 in this epoch
    epoch_loss: float = 0.0
    train_time_s: float = 0.0
    # Unix time of the first start
    started_at: float = 0.0
    restarts: int = 0
    # restarts after which work had to be done again
    interruptions: int = 0
    # whether the checkpoint was saved at a stop, after which its process took no further step
    stopped: bool = False
    # mean loss over the last whole epoch
    last_loss: float = 0.0
    # see `TrainResult`
    starts_s: float = 0.0
    evaluation_s: float = 0.0
    saving_s: float = 0.0

    def count_step(self, samples: int) -> None:
        """Count a step with `samples` samples over all workers."""
        self.offset += samples
        self.samples_seen += samples
        self.step += 1

    def count_epoch(self) -> None:
        """Count the current epoch as completed; `begin_epoch` then resets its counts."""
        self.epoch += 1
        self.train_time_s += self.whole_epoch_s

    @property
    def whole_epoch_s(self) -> float:
        """Time of the epoch's steps, as if those of starts had taken as long as the others."""
        return self.epoch_time_s * (1 + self.start_steps / max(1, self.epoch_steps))

    def begin_epoch(self) -> None:
        """Reset the counts for the next epoch."""
        self.offset = 0
        self.epoch_steps = 0
        self.epoch_time_s = 0.0
        self.start_steps = 0

    def go_on(self) -> None:
        """Count a restart from the checkpoint that holds this progress."""
        self.restarts += 1
        self.interruptions += not self.stopped
        self.stopped = False

    def epoch_ends(self, samples: int, batch: int) -> bool:
        """Tell whether the current epoch, of `samples` samples, has no further whole batch."""
        return self.offset + batch > samples

    def epoch_share(self, samples: int, batch: int) -> float:
        """Return the share of the epoch's whole batches that are trained on; 1 at its end."""
        left = max(0, samples - self.offset) // batch * batch
        return self.offset / (self.offset + left) if self.offset > 0 else 0.0


class SafePoints:
    """One worker's part in saving, stopping and resuming; subclasses give a checkpoint's content.

    A step during one of the `suspensions` says nothing about the time of steps.
    """

    worker: Agreeing
    saving: Saving

    def __init__(
        self, store: CheckpointStore, restart_count: int, suspensions: Suspensions | None = None
    ) -> None:
        self.store, self.restart_count = store, restart_count
        self.suspensions = suspensions or Suspensions()

    # what depends on who takes the steps

    @property
    def progress(self) -> Progress:
        """Progress of the training."""
        raise NotImplementedError

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes."""
        raise NotImplementedError

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of this training to the run's events."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write the metrics of the steps so far, or a resumed run would lack them."""
        raise NotImplementedError

    def pause(self) -> None:
        """Leave the time from the last step up to now out of the next step's."""
        raise NotImplementedError

    def count_time(self, seconds: float, *, suspended: bool) -> None:
        """Count a step's time unless the step was suspended; by default it is counted elsewhere."""

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's content, whole on rank 0, {} on the others. Collective."""
        raise NotImplementedError

    # save and stop

    def begin_saving(
        self, interruptions: Interruptions, fixed_s: float | None, own: OwnState | None, root: Path
    ) -> None:
        """Save from now on, at the user's interval, `fixed_s`, or as the interruptions require.

        `own` is the state that each worker saves by itself; None: rank 0 has the whole state.
        """
        is_main = self.is_main
        self.saving = Saving(
            self.worker,
            self.store if is_main else None,
            own,
            Cadence(interruptions, fixed_s),
            HeldFolder(root) if is_main else None,
        )

    def step_ended(self, started: float, decision: Decision) -> None:
        """Count a step's time, and carry out the decision after it; a stop is left to the caller.

        Collective. `started` is the step's beginning, by `perf_counter`.
        """
        landed = self.saving.has_landed
        if decision.save or landed:
            # the work in the device's queue belongs to the steps' time, not to that of a save
            self.worker.synchronize_device()
        seconds = time.perf_counter() - started
        suspended = self.suspensions.take()
        self.count_time(seconds, suspended=suspended)
        self.saving.cadence.worked(0.0 if suspended else seconds)
        if landed:
            self.saving.note()
            self.log_cost()
        if decision.failed:
            # all workers raise the error here
            self.saving.settle()
        if decision.save:
            self.progress.stopped = decision.stop
            self.save(wait=decision.stop)

    def save(self, *, wait: bool = False) -> None:
        """Save the current state; with `wait`, return when it is on disk. Collective."""
        started = time.perf_counter()
        self.flush()
        self.saving.save(
            self.state,
            samples_seen=self.progress.samples_seen,
            restart_count=self.restart_count,
            wait=wait,
        )
        self.log_cost()
        self.progress.saving_s += time.perf_counter() - started
        self.pause()

    def log_cost(self) -> None:
        """Log an event with the cost of saving, the first time and after a large change."""
        news = self.saving.cadence.news()
        if news is not None:
            cost = format_duration(news["cost_s"])
            share = format_percent(news["share"])
            often = f"a save every {format_duration(news['interval_s'])}, sooner at an epoch's end"
            words = f"saving costs {cost} of training, {share} of it so far; {often}"
            self.log_event("checkpoint", words, news)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, however the training has ended."""
        error = self.saving.abandon()
        if error is not None:
            # a full disk must not hide the error that has ended the training
            with contextlib.suppress(StorageError):
                self.log_event("checkpoint", f"not saved: {error}")

    # resume

    def check_same(self, loaded: LoadedCheckpoint | None) -> None:
        """Refuse different checkpoints, as a stale directory listing on one node may cause.

        Raises:
            DataError: Workers see different ones; in the next job all may see the same.
        """
        mine = (-1.0, -1.0)
        if loaded is not None:
            mine = (float(loaded.restart_count), float(loaded.samples_seen))
        highest = self.worker.agree(*mine)
        lowest = self.worker.agree(*map(operator.neg, mine))
        if highest != list(map(operator.neg, lowest)):
            raise DataError(
                f"workers see different checkpoints in {self.store.folder}: a node's file system shows "
                "an old state; the next job may see the same ones"
            )

    def go_on_from(self, loaded: LoadedCheckpoint) -> None:
        """Count this restart; the progress has been loaded from the checkpoint."""
        # a resubmitted job counts its restarts from 0 again, and would be fenced out as stale
        self.restart_count = max(self.restart_count, loaded.restart_count + 1)
        self.progress.go_on()

    def log_resume(self, loaded: LoadedCheckpoint, note: str = "", **more: float) -> None:
        """Log the event of a resume, on rank 0."""
        if not self.is_main:
            return
        progress = self.progress
        refused = "; ".join(f"{bad.name} refused: {why}" for bad, why in loaded.rejected)
        detail = f"from {loaded.path.name} at step {progress.step}{note}"
        if refused:
            detail += f" ({refused})"
        data: dict[str, Any] = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "epoch": progress.epoch,
            **more,
        }
        if loaded.rejected:
            data["passed_over"] = "; ".join(f"{bad}: {why}" for bad, why in loaded.rejected)
        self.log_event("resumed", detail, data)
