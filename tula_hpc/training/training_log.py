"""Log of the built-in training: decide when a line is due, which `metrics_writer.py` then writes.

There is a line for every few steps, and one for each evaluated epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.errors import DivergedError, InputError
from tula_hpc.training.evaluation import NO_EVALUATION, Evaluation
from tula_hpc.training.metrics_writer import MetricsWriter, StepWindow
from tula_hpc.training.progress import Training


class TrainingLog:
    """Log of one worker's training; rank 0 writes it."""

    def __init__(self, training: Training, suspensions: Suspensions) -> None:
        self.training = training
        self.suspensions = suspensions
        self.metrics = MetricsWriter(
            training.files.metrics_file if training.is_main else None,
            training.samples_per_epoch,
            training.global_batch,
            training.env.world_size,
        )
        self.restart_window()
        self.begin_step()
        # sum of the losses of the epoch's steps
        self.epoch_loss = torch.zeros((), dtype=torch.float64, device=training.worker.device)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's content."""
        self.metrics.critical_batch.load_state_dict(state["critical_batch"])
        self.epoch_loss.fill_(self.training.progress.epoch_loss)

    def restart_window(self) -> None:
        """Begin to count steps and their time now."""
        progress = self.training.progress
        # epoch, and samples of it before the window
        self.began = progress.epoch, progress.offset
        self.window = StepWindow()
        self.started = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Leave out time that belongs to no step."""
        self.started += seconds

    def begin_step(self) -> float:
        """Return the time at which the next step begins, by `perf_counter`."""
        self.step_began = time.perf_counter()
        self.step_waited_s = 0.0
        return self.step_began

    def add_wait(self, seconds: float) -> None:
        """Count a wait for the loader in the current step."""
        self.step_waited_s += seconds
        self.window.waited_s += seconds

    def leave_out_step(self) -> None:
        """Leave the last step's time out of its line: the training was suspended meanwhile."""
        self.exclude(time.perf_counter() - self.step_began)
        self.window.waited_s -= self.step_waited_s
        self.window.suspended += 1

    def add_step(self, loss: Tensor) -> None:
        """Count a step that the progress knows of already; write a line if one is due."""
        self.epoch_loss += loss
        self.window.add(loss=loss)
        interval = self.training.job.sweep.training.log_interval_steps
        if self.training.epoch_ends:
            self.flush()
        elif self.training.progress.step % interval == 0:
            self.write_steps()

    def flush(self) -> None:
        """Write a line for the steps since the last one, and all lines that wait to be written."""
        if self.window.steps:
            self.write_steps()
        self.metrics.flush()

    def write_steps(self) -> None:
        """Write a line for the steps since the last one. Nothing else waits for the device.

        Raises:
            DivergedError: The loss of these steps ends the training.
            InputError: The same, where samples are not finite.
        """
        training = self.training
        window = self.window
        began = self.began
        mean_loss = window.mean_loss()
        if self.suspensions.seen:
            self.leave_out_step()
        window.seconds = time.perf_counter() - self.started
        self.restart_window()
        stuck = training.worker.steps_are_skipped
        has_diverged = stuck or not math.isfinite(mean_loss)
        if training.study is not None:
            # all workers end together, as rank 0 writes the result
            has_diverged = training.any(has_diverged)
        if has_diverged:
            self._refuse_samples(began, window.steps)
            if training.study is not None:
                # rank 0 may not be stuck
                stuck = training.any(stuck)
            raise DivergedError(_why_diverged(training.progress.step, stuck=stuck))
        lr = training.worker.optimizer.param_groups[0]["lr"]
        observer = training.worker.observer
        self.metrics.write_steps(training.progress, window, observer, lr=lr, loss=mean_loss)

    def _refuse_samples(self, began: tuple[int, int], steps: int) -> None:
        """Raise InputError if samples of the steps are not finite: no learning rate helps then."""
        index = self.training.worker.loader.not_finite(*began, batches=steps)
        is_found = index is not None
        if self.training.study is not None:
            # all workers come here, and rank 0, which writes the result, may have finite samples
            is_found = self.training.any(is_found)
        if is_found:
            which = "an item" if index is None else f"item {index}"
            words = f"{which} of the training set holds inf or nan; mend the data"
            raise InputError(words, key="workload.dataset")

    def write_epoch(self, evaluation: Evaluation) -> None:
        """Write a line for the epoch that has ended, if it was evaluated."""
        if evaluation is NO_EVALUATION:
            return
        progress = self.training.progress
        scores = {
            "train_loss": progress.last_loss,
            "test_loss": evaluation.loss,
            "test_accuracy": evaluation.accuracy,
            "test_top5_accuracy": evaluation.top5_accuracy,
        }
        self.metrics.write_epoch(
            progress, progress.epoch, self.training.worker.observer, scores, evaluation.seconds
        )


def _why_diverged(step: int, *, stuck: bool) -> str:
    if stuck:
        return (
            f"at step {step} gradients in float16 are still not finite at the smallest useful loss "
            'scale, so that no step is taken; set workload.precision to "bf16" or "fp32", or lower '
            "workload.lr"
        )
    remedy = "lower workload.lr or warm up longer, unless samples hold inf or nan"
    return f"the loss is not finite at step {step}; {remedy}"
