"""Progress of a training, and the one writer of its metrics.jsonl, whoever takes the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tula_hpc.optim import CriticalBatch, NoiseReading
from tula_hpc.records import EpochMetrics, StepMetrics, append_record


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
    # sum of the steps' losses on rank 0 in this epoch
    epoch_loss: float = 0.0
    train_time_s: float = 0.0
    # Unix time of the first start
    started_at: float = 0.0
    restarts: int = 0
    # restarts after which work had to be done again
    interruptions: int = 0
    # saved at a stop: its process did no more
    stopped: bool = False
    # mean over the last whole epoch
    last_loss: float = 0.0
    # see `TrainResult`
    starts_s: float = 0.0
    evaluation_s: float = 0.0
    saving_s: float = 0.0

    def count_step(self, samples: int) -> None:
        """Count a step with so many samples over all workers."""
        self.offset += samples
        self.samples_seen += samples
        self.step += 1

    def count_epoch(self) -> None:
        """Count the current epoch, which `begin_epoch` forgets."""
        self.epoch += 1
        self.train_time_s += self.epoch_time_s

    def begin_epoch(self) -> None:
        """Begin the next epoch, of which nothing was seen."""
        self.offset = 0
        self.epoch_steps = 0
        self.epoch_time_s = 0.0

    def go_on(self) -> None:
        """Count a start with this progress, which a checkpoint had."""
        self.restarts += 1
        self.interruptions += not self.stopped
        self.stopped = False

    def epoch_ends(self, samples: int, batch: int) -> bool:
        """Tell whether the current epoch, of so many samples, has no further whole batch."""
        return self.offset + batch > samples

    def epoch_share(self, samples: int, batch: int) -> float:
        """Return the share of the epoch's whole batches that are trained on; 1 at its end."""
        left = max(0, samples - self.offset) // batch * batch
        return self.offset / (self.offset + left) if self.offset > 0 else 0.0


class StepWindow:
    """Steps since the last logged line; losses stay on the device until then."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        # seconds of waiting for the loader
        self.waited_s = 0.0
        self.total: Tensor | None = None

    def add(self, *, seconds: float = 0.0, loss: Tensor | None = None) -> None:
        """Count one step, with its time and its loss where they are known by now."""
        self.steps += 1
        self.seconds += seconds
        if loss is not None:
            self.total = loss.double() if self.total is None else self.total + loss

    def mean_loss(self) -> float:
        """Return the mean loss of the steps. Waits for the device."""
        return math.nan if self.total is None else float(self.total) / self.steps


class Readings(Protocol):
    """Part of `GradientObserver` that lines show."""

    def step_metrics(self, steps: int) -> dict[str, float]:
        """Return numbers for a line of that many steps."""

    def noise(self) -> NoiseReading:
        """Return the noise scale and restart its recent means."""

    def read_scales(self) -> list[int] | None:
        """Return and reset counts of applied factors."""


class Journal:
    """Writer of one training's metrics.jsonl.

    Args:
        file: Is written to; None: by another worker.
        samples: Of an epoch, over all workers.
        global_batch: Of a step.
        workers: Over all nodes.
    """

    def __init__(self, file: Path | None, samples: int, global_batch: int, workers: int) -> None:
        self.file, self.samples = file, samples
        self.global_batch, self.workers = global_batch, workers
        # rank 0 alone reads the noise
        self.critical_batch = CriticalBatch()
        # the last epoch that was written, and its critical batch
        self._written: tuple[int, float | None] = (0, None)

    def write_steps(
        self,
        progress: Progress,
        window: StepWindow,
        readings: Readings,
        *,
        lr: float,
        loss: float | None = None,
    ) -> None:
        """Write a line for the steps since the last one."""
        if self.file is None:
            return
        noise = readings.noise()
        self.critical_batch.add(noise, window.steps)
        numbers = readings.step_metrics(window.steps)
        line = StepMetrics(
            step=progress.step,
            samples_seen=progress.samples_seen,
            epoch=progress.epoch + progress.epoch_share(self.samples, self.global_batch),
            loss=loss,
            lr=lr,
            step_time_s=window.seconds / window.steps,
            **{name: finite_or_none(value) for name, value in numbers.items()},
            data_time_s=window.waited_s / window.steps,
            noise_scale=finite_or_none(noise.noise_scale),
            noise_gradient_square=finite_or_none(noise.recent_square),
            noise_trace=finite_or_none(noise.recent_trace),
            scale_histogram=readings.read_scales(),
        )
        append_record(self.file, line, durable=False)

    def write_epoch(
        self,
        progress: Progress,
        epoch: int,
        readings: Readings,
        scores: Mapping[str, Any],
        evaluation_time_s: float | None = None,
    ) -> None:
        """Write a line for an epoch; a later one for the same epoch takes its place.

        Args:
            progress: At the epoch's end.
            epoch: Counted from 1.
            readings: Of the gradients.
            scores: Losses and accuracies of `EpochMetrics`, None where they are not known.
            evaluation_time_s: See `EpochMetrics`.
        """
        if self.file is None:
            return
        if self._written[0] != epoch:
            self._written = (epoch, finite_or_none(self.critical_batch.take()))
        line = EpochMetrics(
            epoch=epoch,
            step=progress.step,
            samples_seen=progress.samples_seen,
            global_batch=self.global_batch,
            epoch_time_s=progress.epoch_time_s,
            steps=progress.epoch_steps,
            noise_scale=finite_or_none(readings.noise().noise_scale),
            critical_batch=self._written[1],
            evaluation_time_s=evaluation_time_s,
            workers=self.workers,
            **scores,
        )
        append_record(self.file, line)


def finite_or_none(value: float | None) -> float | None:
    """Return None for a value that JSON cannot hold, as the first step's Δ(G)."""
    return value if value is not None and math.isfinite(value) else None
