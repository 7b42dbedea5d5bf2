"""Find where a script's training goes on after a stop, by what the script itself has saved.

How the script saves is its own matter. That it saves is noticed when it opens a file to save in,
and noted with the place of the training (`own_folder.Saved`). If no place is noted, the script is
taken to save at the ends of its epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tula_hpc.attach.own_folder import (
    OF_WEIGHTS,
    Saved,
    last_saved_in,
    names_saved_in,
    newest_in,
    places_saved_in,
)
from tula_hpc.attach.script import filled, values_of
from tula_hpc.attach.train.script_drift import DriftSettings
from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.env import unix_time
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import EpochMetrics, Metrics, RunDirectory, put_aside, read_metrics
from tula_hpc.records.base import Record

# seconds by which the time of a file may be behind the clock
FILE_CLOCK_S = 0.02
# values that switch an option on, which name no checkpoint
SWITCHES = ("true", "yes", "on", "1")
# relative difference up to which left-over samples are taken for a repeated part of an epoch
SAME = 0.1


class TrainSettings(Record):
    """Settings of a script's training, in addition to those that every process has."""

    # run directory
    root: Path
    label: str
    job_id: str
    # samples of an epoch, over all workers
    samples: int
    global_batch: int
    # epochs of the whole training; 0: unknown
    epochs: int = 0
    # the script is given the steps of all epochs together: an epoch may end within a step
    counts_steps: bool = False
    # samples of one forward pass of one worker; 0: unknown
    forward_batch: int = 0
    log_interval_steps: int
    # parameters of the model that was measured; None: unknown
    parameters: int | None = None
    # higher for each later run of this training
    restart_count: int = 0
    # where this start begins, unless there is a checkpoint: fields of `ScriptProgress`
    progress: dict[str, int | float] = Field(default={})
    # Unix time of this job's beginning
    job_began_at: float = Field(default_factory=unix_time)
    # sweep file of a method that scales gradients; empty: the script's steps are left as they are
    sweep: dict[str, Any] = Field(default={})
    # nodes, workers per node and local batch
    configuration: tuple[int, int, int] = (1, 1, 1)
    # what decides the interval between checkpoints: see `Interruptions` and `Cadence`
    between_s: float
    between_is_known: bool = False
    fixed_s: float | None = None
    # None: step times are compared with nothing
    drift: DriftSettings | None = None


class TrainedSoFar(Record):
    """Progress of a script, and the reason why its process ended: its last message."""

    # stopped: after a step, as it was asked to; exited: by itself
    end: Literal["stopped", "exited"]
    # exit code of the script's process
    code: int = 0
    # the script goes on from checkpoints of ours
    is_kept: bool = False
    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    train_time_s: float = 0.0
    starts_s: float = 0.0
    saving_s: float = 0.0
    # Unix time of the first step; 0: it took no step
    started_at: float = 0.0
    restarts: int = 0
    further_steps: int = 0


@dataclass
class ScriptProgress(Progress):
    """Progress of a script's training, with its place in `tula.batches`."""

    # loops over `tula.batches` in this epoch that are over, and batches done of the next loop
    calls: int = 0
    batches: int = 0
    # samples in each of these batches, and number of workers
    batch_size: int = 0
    workers: int = 1
    # epochs done at the end of each loop over `tula.epochs`
    loops: list[int] = field(default_factory=list)
    # scores of this epoch, or of the last one, that no line of the metrics has yet
    reported: dict[str, float] = field(default_factory=dict)
    # samples seen when the loader began its present pass; None: unknown
    pass_began: int | None = None

    def begin_epoch(self) -> None:
        """See `Progress`."""
        super().begin_epoch()
        self.calls = 0
        self.batches = 0

    def begin_pass(self, carried: int, samples: int, batch: int) -> None:
        """Note that the loader has begun another pass, of which `carried` samples were seen.

        If the pass before was an epoch of `samples`, give or take a batch, all of it belongs to
        that epoch: a sampler may give out several short batches, which need not be the last ones.
        Where most of an epoch is open, that epoch has not been counted yet, and is about to end.
        """
        began = self.samples_seen - carried
        before = self.pass_began
        is_epoch = before is not None and abs(began - before - samples) < batch
        if self.epoch and is_epoch and self.offset <= samples / 2:
            self.offset = carried
        self.pass_began = began


@dataclass
class Start(Progress):
    """Progress of a training at the beginning of a job, from rank 0 for all workers.

    Its `restarts` are the earlier jobs of this training, each run of a requeued job counted.
    """

    # the script goes on from what it has saved, with `resuming` appended to its arguments
    resumes: bool = False
    resuming: Sequence[str] = ()

    def progress(self) -> dict[str, int | float]:
        """Return what is done already, as fields of a `ScriptProgress`."""
        others = ["resumes", "resuming"]
        if not self.restarts:
            # the time of the first step is taken instead
            others.append("started_at")
        known = asdict(self).items()
        return {name: value for name, value in known if value and name not in others}


def begin_where_the_script_does(start: Start, job: TrainJob, work: Path) -> str:
    """Find out where a script with checkpoints of its own goes on; return that in words.

    Completes `start`, which belongs to a training started before. `work` is the script's folder.
    """
    run = RunDirectory(job.root)
    metrics_file = run.train(job.label).metrics_file
    metrics = read_metrics(metrics_file)
    how = "begins from the start"
    saved_at: float | None = None
    # without a step of this training the script might go on from another training's checkpoint
    if metrics.steps:
        how, saved_at = _look_for_saved(start, job, work, is_first=not metrics.epochs)
    if start.resumes:
        _go_on_from(start, metrics, work, saved_at)
    else:
        start.starts_s = 0.0
        put_aside(metrics_file)
    return how


def _look_for_saved(
    start: Start, job: TrainJob, work: Path, *, is_first: bool
) -> tuple[str, float | None]:
    """Have a script go on from what it has saved; return how in words, and when it saved.

    `is_first`: the script has not completed an epoch yet.
    """
    run = RunDirectory(job.root)
    given = job.sweep.workload.resume_arguments
    if given is None:
        why = "workload.resume_arguments are not set, and the script keeps nothing"
        if run.history().has_left_files(job.label):
            why = f"what was saved in {run.train(job.label).checkpoints} is gone"
        return f"begins anew: {why}", None
    saved_at: float | None = None
    resuming = []
    # an argument is a word, such as `latest`, for a checkpoint that the script looks for itself
    is_word = False
    submitted = (each.submitted_at for each in run.history().submissions("train"))
    # if events were lost, no file is known to be older than this training
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
        is_word |= not (name.startswith("-") or file.exists() or name.lower() in SWITCHES)
        resuming.append(f"{option}{equals}{named}")
    saved_at = saved_at or last_saved_in(work)
    logged_at = run.train(job.label).metrics_file.stat().st_mtime
    has_failed = run.history().failed_as_it_went_on(job.label, logged_at)
    if saved_at is None and (has_failed or is_first or is_word):
        return "begins anew: the script has saved nothing yet", None
    start.resumes = True
    start.resuming = resuming
    return f"goes on by itself, with {' '.join(resuming) or 'the same arguments'}", saved_at


def _written_at(file: Path, work: Path) -> float:
    """Return the Unix time at which a file or a folder's newest file was written; 0: there is none.

    In the script's folder, the user's own folders are made anew with links to their files.
    """
    if not file.is_dir() or file.is_symlink() or not file.is_relative_to(work):
        return file.stat().st_mtime if file.exists() else 0.0
    files = (each for each in file.rglob("*") if each.is_file())
    return max((each.stat().st_mtime for each in files), default=0.0)


def _should_be_saved(file: Path, name: str, work: Path) -> bool:
    """Tell whether a script cannot go on without a file that it has not written in this training.

    An argument names the file as `name`, which may also be an option or a word.
    """
    if "*" in name:
        return True
    if not file.exists():
        return "/" in name or _is_lacking(name, work)
    if not file.is_relative_to(work):
        return False
    # weights from outside are another training's; other files of the user's are inputs
    files = file.rglob("*") if file.is_dir() else [file]
    weights = (each.resolve() for each in files if each.suffix in OF_WEIGHTS)
    return not all(each.is_relative_to(work.resolve()) for each in weights)


def _is_lacking(name: str, work: Path) -> bool:
    """Tell whether a script has saved files of weights, but none of this name.

    It may join the name to that of a folder, inside or outside its own, which it knows itself.
    """
    if not name.endswith(OF_WEIGHTS):
        return False
    files = (each for each in work.rglob("*") if each.suffix in OF_WEIGHTS)
    names = names_saved_in(work).union(each.name for each in files if not each.is_symlink())
    # a file without a name may be the one
    return bool(names) and names.isdisjoint({name, ""})


def _go_on_from(start: Start, metrics: Metrics, work: Path, saved_at: float | None) -> None:
    last = metrics.steps[-1].step
    rows = [row for row in metrics.epochs if _was_saved(row, saved_at, last)]
    reached: EpochMetrics | Saved | None = rows[-1] if rows else None
    latest = 0.0 if saved_at is None else saved_at + FILE_CLOCK_S
    if places := [place for place in places_saved_in(work) if place.at <= latest]:
        reached = places[-1]
        start.offset = places[-1].offset
        rows = [row for row in metrics.epochs if row.step <= places[-1].step]
    if reached is not None:
        start.epoch = reached.epoch
        start.step = reached.step
        start.samples_seen = reached.samples_seen
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

    `saved_at` is the Unix time of its newest file, None: unknown; `last_step` the last logged step.
    """
    if saved_at is None or row.ended_at is None:
        # an epoch that is saved is saved before the next step
        return row.step < last_step
    return row.ended_at <= saved_at + FILE_CLOCK_S


def without_repeated(
    done: TrainedSoFar, start: Start, epochs: int, rows: Sequence[EpochMetrics]
) -> TrainedSoFar:
    """Return the progress at the end without what a script repeated after a resume.

    Some scripts save an epoch's number before the epoch's end. Which epochs were repeated is
    unknown; they are taken to be as long as the last ones. Other scripts save in mid-epoch and
    begin that epoch anew: at the end, the repeated part is left over.
    """
    if not start.resumes or not rows:
        return done
    if epochs < done.epoch <= epochs + done.restarts:
        repeated = rows[epochs - done.epoch :]
        return done.model_copy(
            update={
                "epoch": epochs,
                "step": done.step - sum(row.steps or 0 for row in repeated),
                "samples_seen": done.samples_seen * epochs // done.epoch,
                "train_time_s": done.train_time_s - sum(row.epoch_time_s for row in repeated),
            }
        )
    left = done.samples_seen - rows[-1].samples_seen
    if done.epoch == epochs and start.offset and abs(left - start.offset) <= SAME * start.offset:
        update = {"step": rows[-1].step, "samples_seen": rows[-1].samples_seen}
        return done.model_copy(update=update)
    return done
