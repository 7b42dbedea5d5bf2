"""Tuning of δ and the reference batch while training: losses on held-out samples, checkpoints of rounds, what is said.

What is decided is in `tuner.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch.utils.data import DataLoader

from tula_hpc.checkpoint import CheckpointStore, file_name
from tula_hpc.records import RollbackMetrics, RunDirectory, TuningOutcome, append_record
from tula_hpc.tuner import Setting, Step, Tuner, compare, settings
from tula_hpc.worker import Worker

ROUNDS = "rounds"  # folder of the checkpoints of rounds, beside the training's own


class Tuning:
    """Tries settings in rounds; see `Tuner`. Every worker has one, and all decide alike.

    Args:
        worker: Whose optimizer is tuned.
        run: For events.
        label: Of the training.
        samples: The held-out ones, this worker's share of them.
        watched: Gives the batches of such a loader, and may raise between two of them.
    """

    def __init__(
        self,
        worker: Worker,
        run: RunDirectory,
        label: str,
        samples: DataLoader[Any],
        watched: Callable[[DataLoader[Any]], Iterable[Any]] = iter,
    ) -> None:
        training = worker.sweep.training
        self.worker, self.run, self.label, self.samples = worker, run, label, samples
        self._watched = watched
        self.every_epochs, self.last_epoch = training.tune_every_epochs, worker.sweep.workload.epochs
        small_batch = training.reference_batch(worker.configuration.global_batch)
        configured = Setting(training.ags.delta, small_batch)
        self.settings = settings(configured, training.tune_delta, training.tune_small_batch)
        self.tuner = Tuner(len(self.settings), training.max_rollbacks)
        self.store = CheckpointStore(run.train(label).checkpoints / ROUNDS, keep=sys.maxsize)
        self.start_epoch = 0  # of the round
        self.start_file = self.best_file = ""  # where it began, and the end of its best run
        self.attempt = self.best_attempt = 0  # number of the run of a round: metrics of lost ones do not count
        self.lost_samples = 0  # trained on in runs that were rolled back
        self.lost_s = 0.0  # of training steps in them

    @property
    def setting(self) -> Setting:
        """The one in use."""
        return self.settings[self.tuner.current]

    @property
    def active(self) -> bool:
        """Whether rounds are still judged."""
        return self.tuner.active

    def due(self, epoch: int, offset: int) -> bool:
        """Whether a run of a round has just ended.

        Args:
            epoch: Epochs completed.
            offset: Samples seen of the next one.
        """
        ends = epoch % self.every_epochs == 0 or epoch >= self.last_epoch
        return self.active and offset == 0 and epoch > self.start_epoch and ends

    def begin(self, progress: Mapping[str, Any], state: Callable[[], dict[str, Any]], restart_count: int) -> None:
        """Before the first step; nothing where a resumed run has begun before. Collective; see `end_round`."""
        if self.start_file or not self.active:
            return
        self.tuner.begin(self.losses())
        self.start_epoch = progress["epoch"]
        self.start_file = self._save(state(), progress["samples_seen"], restart_count)

    def end_round(
        self,
        progress: Mapping[str, Any],
        state: Callable[[], dict[str, Any]],
        restart_count: int,
        *,
        diverged: bool = False,
    ) -> dict[str, Any] | None:
        """Judge what a run of a round came to. Collective.

        Args:
            progress: Of the training, now.
            state: A checkpoint's content; whole on rank 0, collective.
            restart_count: See `CheckpointStore.save`.
            diverged: The loss was not finite.

        Returns:
            The content of the checkpoint to go on from, already loaded but for the progress; None: go on as it is.
        """
        tried, losses = self.tuner.current, [] if diverged else self.losses()
        before = list(self.tuner.start), list(self.tuner.end)
        step = self.tuner.observe(losses)
        if step.won:
            total = progress["samples_seen"] + self.lost_samples
            self.best_file = self._save(state(), total, restart_count)
        self._count_attempt(step)
        self._say(step, self.settings[tried], losses, before)
        loaded = self._go_back(step, progress) if step.load else None
        if step.over:
            self.start_file = self.best_file
            self.start_epoch = (loaded["progress"] if loaded else progress)["epoch"]
        return loaded

    def tidy(self) -> None:
        """Delete the files that no decision to come needs; call it once a checkpoint is saved that needs them not."""
        if self.worker.env.rank == 0:
            self.store.keep_only({self.start_file, self.best_file} if self.active else ())

    def close(self) -> None:
        """Delete the files of rounds, when training is over."""
        if self.worker.env.rank == 0:
            self.store.keep_only(())

    def losses(self) -> list[float]:
        """Of every held-out sample, in a fixed order, whatever the number of workers. Collective."""
        worker = self.worker
        worker.share_buffers()
        own: list[float] = []
        with worker.evaluating():
            for inputs, targets in self._watched(self.samples):
                own += worker.losses(inputs, targets).tolist()
        every = [0.0] * len(self.samples.dataset)  # type: ignore[arg-type] # it has a length: it was split off by index
        every[worker.env.rank :: worker.env.world_size] = own
        return worker.total(*every)

    def outcome(self) -> TuningOutcome:
        """For the result: what was tried, and what it came to."""
        return TuningOutcome(
            **self.setting._asdict(),
            settings=len(self.settings),
            tried=len(self.tuner.tried),
            pruned=len(self.tuner.pruned),
            rollbacks=self.tuner.rollbacks,
            lost_samples=self.lost_samples,
            lost_s=self.lost_s,
        )

    _SAVED = ("start_epoch", "start_file", "best_file", "attempt", "best_attempt", "lost_samples", "lost_s")

    def state_dict(self) -> dict[str, Any]:
        """Strings, numbers and lists."""
        return {"tuner": self.tuner.state_dict(), **{name: getattr(self, name) for name in self._SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave, before the optimizer's state is loaded."""
        self.tuner.load_state_dict(state["tuner"])
        for name in self._SAVED:
            setattr(self, name, state[name])
        self.apply()

    def apply(self) -> None:
        """Give the setting to the optimizer; averages that it loads afterwards are carried over to it."""
        self.worker.use_setting(*self.setting)

    def _save(self, state: dict[str, Any], total: int, restart_count: int) -> str:
        # training stands still meanwhile: a round ends seldom, and the run after it may need the file at once
        where = {"samples_seen": total, "restart_count": restart_count}
        if self.worker.env.rank == 0:
            self.store.save(state, **where)
        self.worker.agree(0.0)  # it is on disk
        return file_name(restart_count, total)

    def _go_back(self, step: Step, progress: Mapping[str, Any]) -> dict[str, Any]:
        name = self.start_file if step.load == "start" else self.best_file
        loaded = self.store.load(self.store.folder / name)
        self.apply()
        self.worker.load_own_state(loaded)
        then = loaded["progress"]
        self.lost_samples += progress["samples_seen"] - then["samples_seen"]
        self.lost_s += _steps_s(progress) - _steps_s(then)
        return loaded

    def _count_attempt(self, step: Step) -> None:
        """Number the next run, and take the metrics of the one that lost out of what counts."""
        if step.pruned is not None:
            lost = self.best_attempt if step.won else self.attempt
            if self.worker.env.rank == 0:
                append_record(self.run.train(self.label).metrics_file, RollbackMetrics(attempt=lost))
        if step.won:
            self.best_attempt = self.attempt
        self.attempt += 1

    def _say(
        self, step: Step, tried: Setting, losses: Sequence[float], before: tuple[Sequence[float], Sequence[float]]
    ) -> None:
        if self.worker.env.rank != 0:
            return
        means = dict(zip(("start_loss", "best_loss"), map(_mean, before), strict=True)) | {"loss": _mean(losses)}
        outcome = ("kept" if step.over else "rolled_back") if step.won else "pruned"
        data = {
            "label": self.label,
            "tried": tried._asdict(),
            "outcome": outcome,
            **means,
            "pruned": None if step.pruned is None else self.settings[step.pruned]._asdict(),
            "next": self.setting._asdict(),
            "from": step.load or "here",
            "rollbacks": self.tuner.rollbacks,
        }
        detail = _in_words(outcome, tried, losses, before, self.setting)
        if step.won and step.pruned is not None:
            detail += f"; {self.settings[step.pruned]} is not used again"
        self.run.log_event("tuned", "train", detail=detail, job_id=self.worker.env.job_id, data=data)


def _in_words(
    outcome: str,
    tried: Setting,
    losses: Sequence[float],
    before: tuple[Sequence[float], Sequence[float]],
    goes: Setting,
) -> str:
    start, best = before
    end = {"kept": "kept", "rolled_back": f"now the same with {goes}", "pruned": f"not used again; now {goes}"}[outcome]
    if _mean(losses) is None:
        return f"{tried}: training diverged; {end}"
    text = f"{tried}: loss on held-out samples {fmean(losses):.4g} after {fmean(start):.4g} at the round's start"
    if best:
        versus = compare(losses, best)
        text += f", {versus.difference:+.2g} ± {versus.error:.1g} against the best run of the round so far"
    return f"{text}; {end}"


def _mean(losses: Sequence[float]) -> float | None:
    """None where there is none, or it is not finite: JSON has no infinity."""
    mean = fmean(losses) if losses else math.nan
    return mean if math.isfinite(mean) else None


def _steps_s(progress: Mapping[str, Any]) -> float:
    return float(progress["train_time_s"] + progress["epoch_time_s"])
