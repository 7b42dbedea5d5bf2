"""Lines of metrics.jsonl: one for some steps, and one for each evaluated epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tula_hpc.errors import DivergedError
from tula_hpc.optim import CriticalBatch
from tula_hpc.records import EpochMetrics, StepMetrics, append_record
from tula_hpc.training.evaluation import NO_EVALUATION, Evaluation, finite_or_none
from tula_hpc.training.hooks import TrainingHooks
from tula_hpc.training.progress import Training


class StepWindow:
    """Losses and time since the last logged line; losses stay on the device until then."""

    def __init__(self) -> None:
        self.steps = 0
        self.total: Tensor | None = None
        # seconds of waiting for the loader
        self.waited_s = 0.0
        self.started = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """Count one step."""
        self.total = loss.double() if self.total is None else self.total + loss
        self.steps += 1

    def mean_loss(self) -> float:
        """Return the mean loss of the steps. Waits for the device."""
        return math.nan if self.total is None else float(self.total) / self.steps


class TrainingLog:
    """Log of one worker's training; rank 0 writes it.

    Args:
        training: Its progress is logged.
        hooks: Asked whether a loss ends the training.
    """

    def __init__(self, training: Training, hooks: TrainingHooks) -> None:
        self.training = training
        self.hooks = hooks
        self.window = StepWindow()
        # rank 0 alone reads the noise
        self.critical_batch = CriticalBatch()
        # sum over the steps of the epoch
        self.epoch_loss = torch.zeros((), dtype=torch.float64, device=training.worker.device)
        if training.job.sweep.training.scale_histogram and training.is_main:
            training.worker.observer.count_scales()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's content."""
        if "critical_batch" in state:
            self.critical_batch.load_state_dict(state["critical_batch"])
        self.epoch_loss.fill_(self.training.progress.epoch_loss)

    def restart_window(self) -> None:
        """Begin to count steps and their time now."""
        self.window = StepWindow()

    def exclude(self, seconds: float) -> None:
        """Leave out time that was not the steps'."""
        self.window.started += seconds

    def add_step(self, loss: Tensor) -> None:
        """Count a step that the progress knows of already; write a line if one is due."""
        self.epoch_loss += loss
        self.window.add(loss)
        interval = self.training.job.sweep.training.log_interval_steps
        if self.training.progress.step % interval == 0 or self.training.epoch_ends:
            self.write_steps()

    def flush(self) -> None:
        """Write a line for the steps since the last one, if there are any."""
        if self.window.steps:
            self.write_steps()

    def write_steps(self) -> None:
        """Write a line for the steps since the last one. Nothing else waits for the device.

        Raises:
            DivergedError: Their loss ends the training.
        """
        training, progress = self.training, self.training.progress
        window, observer = self.window, self.training.worker.observer
        mean_loss = window.mean_loss()
        seconds = time.perf_counter() - window.started
        self.restart_window()
        if self.hooks.has_diverged(mean_loss):
            where = f"at step {progress.step}"
            remedy = "lower workload.lr or warm up longer"
            raise DivergedError(f"the loss is not finite {where}; {remedy}")
        if not training.is_main:
            return
        noise = observer.noise()
        self.critical_batch.add(noise, window.steps)
        numbers = observer.step_metrics(window.steps)
        line = StepMetrics(
            step=progress.step,
            samples_seen=progress.samples_seen,
            epoch=progress.epoch + training.epoch_share,
            loss=mean_loss,
            lr=training.worker.optimizer.param_groups[0]["lr"],
            step_time_s=seconds / window.steps,
            **{name: finite_or_none(value) for name, value in numbers.items()},
            data_time_s=window.waited_s / window.steps,
            noise_scale=finite_or_none(noise.noise_scale),
            noise_gradient_square=finite_or_none(noise.recent_square),
            noise_trace=finite_or_none(noise.recent_trace),
            scale_histogram=observer.read_scales(),
        )
        append_record(training.files.metrics_file, line, durable=False)

    def write_epoch(self, evaluation: Evaluation) -> None:
        """Write a line for the epoch that has ended, if it was evaluated."""
        training, progress = self.training, self.training.progress
        if evaluation is NO_EVALUATION or not training.is_main:
            return
        line = EpochMetrics(
            epoch=progress.epoch,
            step=progress.step,
            samples_seen=progress.samples_seen,
            global_batch=training.global_batch,
            train_loss=progress.last_loss,
            test_loss=evaluation.loss,
            test_accuracy=evaluation.accuracy,
            test_top5_accuracy=evaluation.top5_accuracy,
            epoch_time_s=progress.epoch_time_s,
            steps=progress.epoch_steps,
            noise_scale=finite_or_none(training.worker.observer.noise().noise_scale),
            critical_batch=finite_or_none(self.critical_batch.take()),
            evaluation_time_s=evaluation.seconds,
            workers=training.env.world_size,
        )
        append_record(training.files.metrics_file, line)
