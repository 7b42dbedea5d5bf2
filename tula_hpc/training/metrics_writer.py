"""Write a training's metrics.jsonl, for the built-in training and for scripts alike.

    `MetricsWriter`   lines of steps and of epochs, on rank 0. For the built-in training
                      `training_log.py` decides when a line is due, for a script
                      `attach/train/script_training.py`.
    `write_scores`    scores that `attach/train/scores.py` has read in a script's output; that file
                      also appends corrections of earlier scores by itself

`put_aside` of `records/metrics.py` keeps the old file when a script's training begins anew.

`read_metrics` there reads a whole file: for reports (`analysis/run_contents.py` and
`study_results.py`), for `tula plan` (`analysis/plan.py`), for what a sweep prints at its end
(`cli/pipeline.py`), and for a script that goes on or ends (`resume_point.py`, `scores.py` and
`script_job.py` in `attach/train/`). Three read the file as it grows: `stages/train.py` for the
progress of the command, `tracking/follow.py` for trackers, and `status/run_files.py` from its end.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.env import unix_time
from tula_hpc.errors import StorageError
from tula_hpc.gradients.noise_scale import CriticalBatch
from tula_hpc.optim.observer import GradientObserver
from tula_hpc.records import EpochMetrics, StepMetrics, append_record
from tula_hpc.records.metrics import parse_metrics

# seconds that steps' lines wait for further ones, as each write would delay a short step
GATHER_S = 1.0
# lines at the end to look through: scores of earlier epochs may have been added after the last one
MOST_ADDED = 16


class StepWindow:
    """Steps since the last logged line; losses stay on the device until then."""

    def __init__(self) -> None:
        self.steps = 0
        # steps whose time is not counted, as the training was suspended meanwhile
        self.suspended = 0
        self.seconds = 0.0
        # seconds of waiting for the loader
        self.waited_s = 0.0
        self.total: Tensor | None = None

    def add(self, *, seconds: float = 0.0, loss: Tensor | None = None) -> None:
        """Count one step, with its time and its loss if they are known by now."""
        self.steps += 1
        self.seconds += seconds
        if loss is not None:
            self.total = loss.double() if self.total is None else self.total + loss

    def mean_loss(self) -> float:
        """Return the mean loss of the steps. Waits for the device."""
        return math.nan if self.total is None else float(self.total) / self.steps


class MetricsWriter:
    """Writer of one training's metrics.jsonl; `file` is None where another worker writes it.

    An epoch has `samples`, a step `global_batch` of them, over all workers.
    """

    def __init__(self, file: Path | None, samples: int, global_batch: int, workers: int) -> None:
        self.file, self.samples = file, samples
        self.global_batch, self.workers = global_batch, workers
        # rank 0 alone reads the noise
        self.critical_batch = CriticalBatch()
        # time of a step and its wait for the loader, in the last line
        self._step_s = self._waited_s = 0.0
        self._last: EpochMetrics | None = None
        # fields of the lines that are not written yet, and the time of the last write
        self._gathered: list[dict[str, Any]] = []
        self._wrote_at = -math.inf

    def write_steps(
        self,
        progress: Progress,
        window: StepWindow,
        readings: GradientObserver,
        *,
        lr: float,
        loss: float | None = None,
    ) -> None:
        """Add a line for the steps since the last one; lines are written once a second at most."""
        if self.file is None:
            return
        noise = readings.noise()
        self.critical_batch.add(noise, window.steps)
        numbers = readings.step_metrics(window.steps)
        if timed := window.steps - window.suspended:
            self._step_s = window.seconds / timed
            self._waited_s = window.waited_s / timed
        line = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "epoch": progress.epoch + progress.epoch_share(self.samples, self.global_batch),
            "loss": loss,
            "lr": lr,
            "step_time_s": self._step_s,
            **{name: finite_or_none(value) for name, value in numbers.items()},
            "data_time_s": self._waited_s,
            "noise_scale": finite_or_none(noise.noise_scale),
            "noise_gradient_square": finite_or_none(noise.recent_square),
            "noise_trace": finite_or_none(noise.recent_trace),
        }
        self._gathered.append(line)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write all lines so far unless lines were written within the last second."""
        if time.monotonic() >= self._wrote_at + GATHER_S:
            self.flush()

    def flush(self) -> None:
        """Write all lines so far, as before a checkpoint and at a training's end."""
        gathered = self._gathered
        self._gathered = []
        if gathered:
            lines = [StepMetrics(**line) for line in gathered]
            append_record(cast("Path", self.file), *lines, durable=False)
            self._wrote_at = time.monotonic()

    def close(self) -> None:
        """Write all lines so far, however the training has ended."""
        # a full disk must not hide the error that has ended it
        with contextlib.suppress(StorageError):
            self.flush()

    def write_epoch(
        self,
        progress: Progress,
        epoch: int,
        readings: GradientObserver,
        scores: Mapping[str, Any],
        evaluation_time_s: float | None = None,
    ) -> None:
        """Write a line for an epoch; a later one for the same epoch takes its place.

        Epochs count from 1. Scores that are not known are None.
        """
        if self.file is None:
            return
        self.flush()
        if self._last is not None and self._last.epoch == epoch:
            critical_batch = self._last.critical_batch
            ended_at = self._last.ended_at
        else:
            critical_batch = self.critical_batch.take()
            ended_at = unix_time()
        self._last = EpochMetrics(
            epoch=epoch,
            step=progress.step,
            samples_seen=progress.samples_seen,
            global_batch=self.global_batch,
            epoch_time_s=progress.whole_epoch_s,
            steps=progress.epoch_steps and progress.epoch_steps + progress.start_steps,
            noise_scale=finite_or_none(readings.noise().noise_scale),
            critical_batch=finite_or_none(critical_batch),
            evaluation_time_s=evaluation_time_s,
            workers=self.workers,
            ended_at=ended_at,
            **scores,
        )
        append_record(self.file, self._last)

    def amend(self, known: Mapping[str, Any]) -> None:
        """Write the last epoch's line again, with values that are known by now."""
        if self._last is None and self.file is not None and self.file.exists():
            # written before this process began
            content = self.file.read_bytes()
            self._last = _last_epoch(content, len(content))
        if self._last is not None:
            self._last = self._last.model_copy(update=dict(known))
            append_record(cast("Path", self.file), self._last)


def write_scores(file: Path, found: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Add scores to the epoch that was the last one over when they were found.

    Args:
        file: The training's metrics.jsonl, in which a later line of an epoch replaces earlier ones.
        found: Scores, with the file's size when they were found. Later scores of an epoch replace
            earlier ones.

    Returns:
        The last scores that were found within the first epoch, and are not written.
    """
    within: dict[str, float] = {}
    rows: dict[int, EpochMetrics] = {}
    content = b""
    # there is no file before the first step
    with contextlib.suppress(FileNotFoundError):
        content = file.read_bytes()
    for size, scores in found:
        # an epoch whose line was still being written was not over yet
        row = _last_epoch(content, content.rfind(b"\n", 0, size) + 1)
        if row is not None:
            rows[row.epoch] = rows.get(row.epoch, row).model_copy(update=dict(scores))
        elif size:
            within |= scores
    for row in rows.values():
        append_record(file, row)
    return within


def _last_epoch(content: bytes, end: int) -> EpochMetrics | None:
    """Return the row of the last epoch before `end`; scores of earlier epochs may follow it."""
    newest: EpochMetrics | None = None
    start = end
    for _ in range(MOST_ADDED):
        start = content.rfind(b'{"kind":"epoch"', 0, start)
        if start < 0:
            break
        line_end = content.find(b"\n", start)
        # half a line, of a writer that was killed, does not count
        with contextlib.suppress(ValueError):
            row = parse_metrics(content[start:line_end] if line_end >= 0 else content[start:])
            # the later line of an epoch has all that is known of it
            if isinstance(row, EpochMetrics) and (newest is None or row.epoch > newest.epoch):
                newest = row
    return newest


def finite_or_none(value: float | None) -> float | None:
    """Return None for a value that JSON cannot hold, such as the first step's Δ(G)."""
    return value if value is not None and math.isfinite(value) else None
