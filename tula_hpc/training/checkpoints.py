"""Checkpoints of a training: saving while it goes on, and resuming from the newest good one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from tula_hpc.batches import map_tensors
from tula_hpc.checkpoint.interval import expected_interruptions
from tula_hpc.checkpoint.per_worker_states import LocalStates
from tula_hpc.checkpoint.safe_points import Progress, SafePoints
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import job_started_at, unix_time
from tula_hpc.records.events import EventName
from tula_hpc.training.progress import Training
from tula_hpc.training.training_log import TrainingLog


class Checkpoints(SafePoints):
    """One worker's part of saving and resuming. Building it resumes the training. Collective.

    Raises:
        DataError: Workers see different checkpoints.
        StageError: The state of a checkpoint cannot be used.
    """

    worker: Worker

    def __init__(self, training: Training, log: TrainingLog, suspensions: Suspensions) -> None:
        folder = training.files.checkpoints
        number = training.job.run_number(training.env.restart_count)
        super().__init__(CheckpointStore(folder), number, suspensions)
        self.training = training
        self.log = log
        self.worker = training.worker
        self.local_states = LocalStates(folder, training.worker)
        self._resume()
        self._start_saving()

    @property
    def progress(self) -> Progress:
        """See `SafePoints`."""
        return self.training.progress

    @property
    def is_main(self) -> bool:
        """See `SafePoints`."""
        return self.training.is_main

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """See `SafePoints`."""
        self.training.log_event(event, detail, data)

    def flush(self) -> None:
        """See `SafePoints`."""
        self.log.flush()

    def pause(self) -> None:
        """See `SafePoints`."""
        self.log.restart_window()

    def count_time(self, seconds: float, *, suspended: bool) -> None:
        """See `SafePoints`."""
        if not suspended:
            self.progress.epoch_time_s += seconds
        elif self.log.window.steps:
            self.log.leave_out_step()
        else:
            # this step's line has been written, and the time since then belongs to no step
            self.log.restart_window()

    def keep_last_only(self) -> None:
        """Delete all but the newest checkpoint of a training that is over."""
        self.local_states.keep_newest_only()
        if self.is_main:
            self.store.keep_newest_only()

    def _start_saving(self) -> None:
        job, progress = self.training.job, self.progress
        options = job.sweep.training
        interruptions = expected_interruptions(
            job.cluster.pricing,
            options,
            job.configuration.nodes,
            seen=progress.interruptions,
            over_s=progress.train_time_s + progress.epoch_time_s,
        )
        root = self.training.files.root
        self.begin_saving(interruptions, options.checkpoint_s, self.local_states, root)

    def state(self) -> dict[str, Any]:
        """See `SafePoints`."""
        training, worker = self.training, self.worker
        training.progress.epoch_loss = float(self.log.epoch_loss)
        optimizer_state = worker.optimizer_state()
        if not training.is_main:
            return {}
        content = {
            **worker.model_state(),
            "optimizer": optimizer_state,
            "scaler": worker.scaler.state_dict(),
            "progress": asdict(training.progress),
            "critical_batch": self.log.metrics.critical_batch.state_dict(),
            "global_batch": training.global_batch,
        }
        if observer_state := worker.observer.extra_state():
            content["observer"] = observer_state
        return content

    def _resume(self) -> None:
        """Restore the newest good checkpoint, or keep the initial state.

        DDP regroups its gradient buckets after the first backward pass, which changes the order of
        additions. One pass is thrown away before any state is set, so that a resumed run adds in
        the same order as an uninterrupted one.
        """
        training, worker = self.training, self.worker
        initial = map_tensors(Tensor.clone, worker.model_state())
        self._throw_away_one_pass()
        # loaded on the host: on a GPU, every step would wait for Adam's step counts
        loaded = self.store.load_latest()
        self.check_same(loaded)
        if loaded is None:
            worker.load_model_state(initial)
            training.progress = Progress(started_at=unix_time())
            return
        worker.load_own_state(self.local_states.load(loaded))
        worker.observer.load_extra_state(loaded.state.get("observer"))
        training.progress = Progress(**loaded.state["progress"])
        self.go_on_from(loaded)
        self.log.resume(loaded.state)
        note = self.local_states.note(loaded)
        began_at = job_started_at()
        self.log_resume(loaded, note, epochs_seen=training.epochs_seen, began_at=began_at)

    def _throw_away_one_pass(self) -> None:
        worker = self.worker
        first = worker.loader.dataset[(0, 0)]
        inputs, targets = default_collate([first] * self.training.job.configuration.local_batch)
        worker.forward_backward(*worker.to_device(inputs, targets))
        worker.optimizer.zero_grad(set_to_none=True)
