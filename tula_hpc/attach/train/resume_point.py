"""Find where a script's training goes on after a stop, by what the script itself has saved.

How it saves is its own matter. That it does is seen as it opens a file for that, and noted with the
place of the training (`own_folder.Saved`); where no place is noted, it is taken to save at the ends
of its epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tula_hpc.attach.own_folder import (
    OF_WEIGHTS,
    Saved,
    last_saved_in,
    newest_in,
    places_saved_in,
)
from tula_hpc.attach.script import filled, values_of
from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import (
    EpochMetrics,
    Metrics,
    RunDirectory,
    put_aside,
    read_metrics,
)
from tula_hpc.records.base import Record

# by which the time of a file may be behind the clock
FILE_CLOCK_S = 0.02
# of an epoch's steps: so well a part of one is recognised again
SAME = 0.1


class TrainedSoFar(Record):
    """Progress of a script, and the reason why its process ended: its last message."""

    # stopped: as it was asked to, after a step; exited: by itself
    end: Literal["stopped", "exited"]
    # of its process
    code: int = 0
    # it goes on from a checkpoint of ours
    is_kept: bool = False
    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    train_time_s: float = 0.0
    starts_s: float = 0.0
    saving_s: float = 0.0
    # 0: it took no step
    started_at: float = 0.0
    restarts: int = 0
    further_steps: int = 0


@dataclass
class ScriptProgress(Progress):
    """Progress of a script's training, with its place in `tula.batches`."""

    # of `tula.batches` in this epoch that are over, and batches of the next one
    calls: int = 0
    batches: int = 0
    # by which these were cut
    batch_size: int = 0
    workers: int = 1
    # epochs done at the end of each loop over `tula.epochs`
    loops: list[int] = field(default_factory=list)
    # scores of this epoch, or of the last one, that are in no line yet
    reported: dict[str, float] = field(default_factory=dict)

    def begin_epoch(self) -> None:
        """See `Progress`."""
        super().begin_epoch()
        self.calls = 0
        self.batches = 0


@dataclass
class Start:
    """State of a training when a job begins with it, from rank 0 for all workers."""

    # jobs, and runs of requeued ones, that began with this training before
    restarts: int = 0
    # Unix time of the first
    started_at: float = 0.0
    # the script goes on from what it has saved, with these arguments appended
    resumes: bool = False
    resuming: Sequence[str] = ()
    # where the script begins, unless it is kept: see `ScriptProgress`
    epoch: int = 0
    offset: int = 0
    step: int = 0
    samples_seen: int = 0
    epoch_steps: int = 0
    epoch_time_s: float = 0.0
    train_time_s: float = 0.0
    # of the jobs whose work it goes on from
    starts_s: float = 0.0

    def progress(self) -> dict[str, int | float]:
        """Return what is done already, as fields of a `ScriptProgress`."""
        others = ("resumes", "resuming")
        known = {name: value for name, value in asdict(self).items() if name not in others}
        # a first start takes its first step for the beginning
        return known if self.restarts else {**known, "started_at": 0.0}


def begin_where_the_script_does(start: Start, job: TrainJob, work: Path) -> str:
    """Find out where a script with checkpoints of its own goes on, and return it in words.

    `start`, of a training that was started before, is completed. `work` is the script's folder.
    """
    run = RunDirectory(job.root)
    metrics_file = run.train(job.label).metrics_file
    metrics = read_metrics(metrics_file)
    how = "begins from the start"
    saved_at: float | None = None
    # or it might take another training's checkpoint for its own
    if metrics.steps:
        how, saved_at = _look_for_saved(start, job, work, is_first=not metrics.epochs)
    if start.resumes:
        _go_on_from(start, metrics, _place_of(work, saved_at), saved_at)
    else:
        start.starts_s = 0.0
        put_aside(metrics_file)
    return how


def _look_for_saved(
    start: Start, job: TrainJob, work: Path, *, is_first: bool
) -> tuple[str, float | None]:
    """Tell a script to go on, in its first epoch or later; return how, and when it saved."""
    run = RunDirectory(job.root)
    given = job.sweep.workload.resume_arguments
    if given is None:
        why = "there are no workload.resume_arguments, and nothing is kept"
        if run.history().has_left_files(job.label):
            why = f"what was saved in {run.train(job.label).checkpoints} is gone"
        return f"begins anew: {why}", None
    saved_at: float | None = None
    resuming = []
    submitted = (job.submitted_at for job in run.history().submissions("train"))
    # where events were lost nothing is known to be older
    began_at = min(submitted, default=0.0)
    for argument in filled(given, values_of(job.sweep, job.configuration, work)):
        option, equals, name = argument.rpartition("=")
        named = newest_in(work, name) if "*" in name else name
        file = work / named
        written_at = _written_at(file, work)
        if written_at and written_at >= began_at - FILE_CLOCK_S:
            saved_at = max(saved_at or 0.0, written_at)
        elif _should_be_saved(file, name, work):
            return f"begins anew: the script has not written {named} yet", None
        resuming.append(f"{option}{equals}{named}")
    saved_at = saved_at or last_saved_in(work)
    logged_at = run.train(job.label).metrics_file.stat().st_mtime
    has_failed = run.history().failed_as_it_went_on(job.label, logged_at)
    if saved_at is None and (has_failed or is_first):
        return "begins anew: the script has saved nothing yet", None
    start.resumes = True
    start.resuming = resuming
    return f"goes on by itself, with {' '.join(resuming) or 'the same arguments'}", saved_at


def _written_at(file: Path, work: Path) -> float:
    """Return the Unix time at which a file was written, or the newest one in a folder; 0: none is there.

    A script's folder has those of the user's folder anew, with links to what stands in them.
    """
    if not file.is_dir() or file.is_symlink() or not file.is_relative_to(work):
        return file.stat().st_mtime if file.exists() else 0.0
    files = (each for each in file.rglob("*") if each.is_file())
    return max((each.stat().st_mtime for each in files), default=0.0)


def _should_be_saved(file: Path, name: str, work: Path) -> bool:
    """Tell whether a script cannot go on without a file that it has not written in this training.

    An argument has it as `name`, which may be an option or a word, and no file.
    """
    if "*" in name:
        return True
    if not file.exists():
        return "/" in name
    if not file.is_relative_to(work):
        return False
    # of another training; others of the user's are inputs, as one of settings
    files = file.rglob("*") if file.is_dir() else [file]
    return any(each.suffix in OF_WEIGHTS and not _is_within(each, work) for each in files)


def _is_within(file: Path, work: Path) -> bool:
    return file.resolve().is_relative_to(work.resolve())


def _place_of(work: Path, saved_at: float | None) -> Saved | None:
    """Return the last place that was saved by then; None: none is noted."""
    if saved_at is None:
        return None
    places = [place for place in places_saved_in(work) if place.at <= saved_at + FILE_CLOCK_S]
    return places[-1] if places else None


def _go_on_from(
    start: Start, metrics: Metrics, place: Saved | None, saved_at: float | None
) -> None:
    last = metrics.steps[-1].step
    if place is None:
        rows = [row for row in metrics.epochs if _was_saved(row, saved_at, last)]
        if rows:
            start.epoch = rows[-1].epoch
            start.step = rows[-1].step
            start.samples_seen = rows[-1].samples_seen
    else:
        rows = [row for row in metrics.epochs if row.step <= place.step]
        start.epoch = place.epoch
        start.offset = place.offset
        start.step = place.step
        start.samples_seen = place.samples_seen
    start.train_time_s = sum(row.epoch_time_s for row in rows)
    if start.offset:
        before = rows[-1].step if rows else 0
        start.epoch_steps = start.step - before
        for row in metrics.steps:
            if before < row.step <= start.step:
                start.epoch_time_s += row.step_time_s * (row.step - before)
                before = row.step


def _was_saved(row: EpochMetrics, saved_at: float | None, last_step: int) -> bool:
    """Tell whether a script that saves at the ends of its epochs has saved this one.

    `saved_at` is the Unix time of its newest file, None: not known; `last_step` the last logged.
    """
    if saved_at is None or row.ended_at is None:
        # what it saves it saves before its next step
        return row.step < last_step
    return row.ended_at <= saved_at + FILE_CLOCK_S


def without_repeated(
    told: TrainedSoFar, start: Start, epochs: int, rows: Sequence[EpochMetrics]
) -> TrainedSoFar:
    """Return the progress at the end without what a script went through again as it went on.

    Some save an epoch's number before its end. Which epochs were repeated is not known; they are
    taken to be as long as the last ones. Others save in mid-epoch, and begin that epoch anew: at
    the end as many steps are left over.
    """
    if not start.resumes or not rows:
        return told
    if epochs < told.epoch <= epochs + told.restarts:
        repeated = rows[epochs - told.epoch :]
        return told.model_copy(
            update={
                "epoch": epochs,
                "step": told.step - sum(row.steps or 0 for row in repeated),
                "samples_seen": told.samples_seen * epochs // told.epoch,
                "train_time_s": told.train_time_s - sum(row.epoch_time_s for row in repeated),
            }
        )
    left = told.samples_seen - rows[-1].samples_seen
    if told.epoch == epochs and start.offset and abs(left - start.offset) <= SAME * start.offset:
        update = {"step": rows[-1].step, "samples_seen": rows[-1].samples_seen}
        return told.model_copy(update=update)
    return told
