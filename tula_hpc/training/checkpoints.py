"""Checkpoints of a training: saving while it goes on, and resuming from the newest good one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import Any

from torch.utils.data import default_collate

from tula_hpc.checkpoint.background import Saving
from tula_hpc.checkpoint.interval import Cadence, expected_interruptions
from tula_hpc.checkpoint.per_worker_states import LocalStates
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.env import unix_time
from tula_hpc.errors import StageError, StorageError
from tula_hpc.files import HeldFolder
from tula_hpc.training.journal import Progress
from tula_hpc.training.progress import Training
from tula_hpc.training.training_log import TrainingLog


class Checkpoints:
    """One worker's part of saving and resuming. Building it resumes the training. Collective.

    Args:
        training: Gets the state and the progress of the newest good checkpoint, if there is one.
        log: Its part of a checkpoint.

    Raises:
        StageError: Workers see different checkpoints, or the state of one cannot be used.
    """

    def __init__(self, training: Training, log: TrainingLog) -> None:
        self.training = training
        self.log = log
        self.worker = training.worker
        folder = training.files.checkpoints
        self.store = CheckpointStore(folder)
        self.local_states = LocalStates(folder, self.worker)
        self.restart_count = training.env.restart_count
        self._resume()
        self.saving = self._start_saving()

    def _start_saving(self) -> Saving:
        job, progress = self.training.job, self.training.progress
        options = job.sweep.training
        interruptions = expected_interruptions(
            job.cluster.pricing,
            options,
            job.configuration.nodes,
            seen=progress.interruptions,
            over_s=progress.train_time_s + progress.epoch_time_s,
        )
        fixed_s = None if options.checkpoint_minutes is None else options.checkpoint_s
        cadence = Cadence(interruptions, fixed_s)
        if not self.training.is_main:
            return Saving(self.worker, None, self.local_states, cadence)
        folder = HeldFolder(self.training.files.root)
        return Saving(self.worker, self.store, self.local_states, cadence, folder)

    def save(self, *, wait: bool = False) -> None:
        """Save this moment. Collective.

        Args:
            wait: Return when the checkpoint is on disk, not while it is being written.
        """
        started = time.perf_counter()
        # or the losses since the last line would be lost to a resumed run
        self.log.flush()
        self.saving.save(
            self._state,
            samples_seen=self.training.progress.samples_seen,
            restart_count=self.restart_count,
            wait=wait,
        )
        self.log_cost()
        self.training.progress.saving_s += time.perf_counter() - started
        # the time of saving is no step's time
        self.log.restart_window()

    def log_cost(self) -> None:
        """Log an event with the cost of saving, the first time and after a large change."""
        news = self.saving.cadence.news()
        if news is not None:
            cost = f"{news['cost_s']:.3g} s of training, {news['share']:.2%} of it so far"
            detail = f"saving costs {cost}; one every {news['interval_s']:.0f} s"
            self.training.log_event("checkpoint", detail, news)

    def keep_last_only(self) -> None:
        """Delete all but the newest checkpoint of a training that is over."""
        self.local_states.keep_newest_only()
        if self.training.is_main:
            self.store.keep_newest_only()

    def close(self) -> None:
        """Wait for a checkpoint that is being written, however the training has ended."""
        error = self.saving.abandon()
        if error is not None:
            # a full disk must not hide the error that has ended the training
            with contextlib.suppress(StorageError):
                self.training.log_event("checkpoint", f"not saved: {error}")

    def _state(self) -> dict[str, Any]:
        """Return a checkpoint's content, whole on rank 0, {} on the others. Collective."""
        training, worker = self.training, self.worker
        training.progress.epoch_loss = float(self.log.epoch_loss)
        optimizer_state = worker.optimizer_state()
        if not training.is_main:
            return {}
        observer_state = worker.observer.extra_state()
        return {
            "model": worker.model.state_dict(),
            "optimizer": optimizer_state,
            "scaler": worker.scaler.state_dict(),
            "progress": asdict(training.progress),
            "critical_batch": self.log.journal.critical_batch.state_dict(),
            "global_batch": training.global_batch,
            **({"observer": observer_state} if observer_state else {}),
        }

    def _resume(self) -> None:
        """Restore the newest good checkpoint, or keep the initial state.

        DDP regroups its gradient buckets after the first backward pass, which changes the order of
        additions. One pass is thrown away before any state is set, so that a resumed run adds in
        the same order as an uninterrupted one.
        """
        training, worker = self.training, self.worker
        initial = {key: value.clone() for key, value in worker.model.state_dict().items()}
        self._throw_away_one_pass()
        # on the host: on a GPU, Adam's step counts would be waited for at every step
        loaded = self.store.load_latest()
        self._check_same(loaded)
        if loaded is None:
            worker.model.load_state_dict(initial)
            training.progress = Progress(started_at=unix_time())
            return
        worker.load_own_state(self.local_states.load(loaded))
        worker.observer.load_extra_state(loaded.state.get("observer"))
        # a resubmitted job counts its restarts from 0 again, and would be fenced out as the stale
        # one
        self.restart_count = max(self.restart_count, loaded.restart_count + 1)
        training.progress = progress = Progress(**loaded.state["progress"])
        progress.go_on()
        self.log.resume(loaded.state)
        self._log_resume(loaded)

    def _throw_away_one_pass(self) -> None:
        worker = self.worker
        first = worker.loader.dataset[(0, 0)]
        inputs, targets = default_collate([first] * self.training.job.configuration.local_batch)
        worker.forward_backward(*worker.to_device(inputs, targets))
        worker.optimizer.zero_grad(set_to_none=True)

    def _check_same(self, loaded: LoadedCheckpoint | None) -> None:
        """Refuse different checkpoints, as a stale directory listing on one node may cause."""
        mine = (-1.0, -1.0)
        if loaded is not None:
            mine = (float(loaded.restart_count), float(loaded.samples_seen))
        highest = self.worker.agree(*mine)
        lowest = self.worker.agree(*(-value for value in mine))
        if highest != [-value for value in lowest]:
            raise StageError(
                f"workers see different checkpoints in {self.store.folder}; start the job again"
            )

    def _log_resume(self, loaded: LoadedCheckpoint) -> None:
        if not self.training.is_main:
            return
        progress = self.training.progress
        refused = "; ".join(f"{bad.name} refused: {why}" for bad, why in loaded.rejected)
        detail = f"from {loaded.path.name} at step {progress.step}{self.local_states.note(loaded)}"
        detail += f" ({refused})" if refused else ""
        data = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "epoch": progress.epoch,
            "epochs_seen": self.training.epochs_seen,
        }
        self.training.log_event("resumed", detail, data)
