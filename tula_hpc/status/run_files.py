"""Contents of a run directory at this moment, for `status`.

This module only reads and needs no right to write. Missing or damaged files are left out; damage is
listed in `Facts.doubts`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from tula_hpc.config import ClusterSpec, SweepSpec, load_frozen_cluster, load_frozen_sweep
from tula_hpc.env import process_fields, unix_time
from tula_hpc.errors import InputError
from tula_hpc.files import MEASUREMENTS_GONE, PLAN_WITHOUT_MEASUREMENTS, has_no_room, open_regular
from tula_hpc.launch.diagnosis import informative_line, read_logs
from tula_hpc.launch.job_files import Submitted
from tula_hpc.launch.launcher import NOTICE
from tula_hpc.records import (
    MAIN_LABEL,
    RECENT_STEPS,
    EpochMetrics,
    JobNote,
    Measurement,
    Plan,
    RunDirectory,
    RunHistory,
    StepMetrics,
    TrainDirectory,
    TrainResult,
    parse_record,
)
from tula_hpc.records.events import setup_failures
from tula_hpc.records.measurement import damaged_footprints
from tula_hpc.records.run_directory import Holder, holder_of
from tula_hpc.records.training import WITHOUT_SCORES
from tula_hpc.stages.context import jobs_of_original
from tula_hpc.stages.plan import MADE_AGAIN, is_plan_lost, obstacle

# last lines on epochs that are searched for a score: an epoch has several, and short epochs end
# before the scores of those before them are read from the script's output
RECENT_EPOCHS = 50
BLOCK_BYTES = 1 << 16
# most bytes to read of metrics.jsonl, from its end
MOST_BYTES = 1 << 24


class Tail(NamedTuple):
    """Last lines of metrics.jsonl in the order of the file: after a restart later lines count."""

    steps: list[StepMetrics]
    epoch: EpochMetrics | None


class TrainingFacts(NamedTuple):
    """Contents of one training's files."""

    label: str
    result: TrainResult | None
    tail: Tail
    # of the newest checkpoint: Unix time, and samples seen by then
    checkpoint_at: float | None
    saved_samples: int | None
    # Unix time of the last line of metrics.jsonl
    logged_at: float | None


class Facts(NamedTuple):
    """Everything that the files contain."""

    run: RunDirectory
    now: float
    spec: SweepSpec | None
    cluster: ClusterSpec | None
    history: RunHistory
    notes: list[JobNote]
    measurements: list[Measurement]
    # the first damaged line of measurements, in words, if a file was changed after the last event
    damaged_after: str
    plan: Plan | None
    # Unix time at which the plan was written; 0: no plan
    plan_at: float
    # by label
    trainings: dict[str, TrainingFacts]
    holder: Holder
    has_report: bool
    # the report is older than a measurement, a result or the plan
    is_report_stale: bool
    # folders of submissions that were begun but are in no event
    cut_off: list[str]
    # what could not be read
    doubts: list[str]
    # a file that stops every command, and what to do; "" if there is none
    obstacle: str = ""
    # also if its sweep.toml is missing or damaged
    is_study: bool = False
    # the disk is full
    is_full: bool = False
    # the command that holds the lock is stopped, as by Ctrl-Z
    is_stopped: bool = False

    @property
    def executor(self) -> str:
        """Return `local` or `slurm`; "" if the cluster file cannot be read."""
        return self.cluster.executor if self.cluster else ""

    @property
    def profiled(self) -> list[Measurement]:
        """Return the measurements of profile jobs."""
        return [row for row in self.measurements if row.stage == "profile"]


def read_facts(run: RunDirectory) -> Facts:
    """Read all files that exist.

    Raises:
        RunDirectoryError: The directory does not exist, holds no run, or cannot be read.
    """
    run.require()
    with run.reading():
        return _read(run)


def _read(run: RunDirectory) -> Facts:
    doubts: list[str] = []
    # frozen inputs: the data need not exist on this machine
    spec = _try(lambda: load_frozen_sweep(run.sweep_file), doubts)
    measured = run.measurements()
    logged = run.read_events()
    doubts += [*damaged_footprints(run.root), *measured.damage, *logged.damage]
    doubts += (
        f"this is a copy of {home}: its job {job_id} writes there, not here"
        for job_id, home in jobs_of_original(run).items()
    )
    # a study measures nothing and has no plan
    is_study = run.has_studied() if spec is None else spec.study is not None
    is_without = not is_study and not measured.records
    if is_without and run.has_trained():
        doubts.append(MEASUREMENTS_GONE)
    elif is_without and run.plan_file.exists():
        doubts.append(
            f"{PLAN_WITHOUT_MEASUREMENTS}: put profile/ back, or run the same command again, which measures and "
            "plans anew"
        )
    history = RunHistory(logged.records)
    cut_off = _cut_off(run, history)
    notes = run.job_notes()
    holder = holder_of(run.root / ".lock")
    trainings = {label: _training(run.train(label), label, doubts) for label in _labels(run)}
    report_at = _newest(run.report / name for name in ("report.html", "study.html"))
    measured_at = _newest(run.profile.glob("*.jsonl")) or 0.0
    logged_at = max((event.time for event in logged.records), default=0.0)
    return Facts(
        run=run,
        now=unix_time(),
        spec=spec,
        cluster=_try(lambda: load_frozen_cluster(run.cluster_file), doubts),
        history=history,
        notes=notes,
        measurements=measured.records,
        damaged_after=next(iter(measured.damage), "") if measured_at > logged_at else "",
        plan=_try(run.read_plan, doubts) if run.plan_file.exists() else None,
        plan_at=_newest([run.plan_file]) or 0.0,
        trainings=trainings,
        holder=holder,
        has_report=report_at is not None,
        is_report_stale=report_at is not None and report_at < _changed_at(run),
        cut_off=cut_off,
        doubts=[
            *doubts,
            *([f"{run.plan_file}: {MADE_AGAIN}"] if is_plan_lost(run) and not is_study else []),
            *_renamed(run, history),
            *setup_failures(notes),
            *_without_scores(spec, trainings.get(MAIN_LABEL)),
            *(
                f"{name}: its submission is going on or was cut off; the next command looks for the job"
                for name in cut_off
            ),
        ],
        obstacle=obstacle(run, measured.records),
        is_study=is_study,
        is_full=has_no_room(run.root),
        is_stopped=_is_stopped(holder),
    )


def _renamed(run: RunDirectory, history: RunHistory) -> list[str]:
    """Warn, if the run directory was renamed, that the same command would begin another run."""
    jobs = history.submissions()
    named = Path(jobs[-1].run).name if jobs and jobs[-1].run else run.root.name
    if named == run.root.name:
        return []
    place = shlex.quote(str(run.root))
    return [f"this run was called {named}: to go on with it add --run-dir {place}"]


def _is_stopped(holder: Holder) -> bool:
    """Tell whether a command of this machine holds the lock and is stopped, as by Ctrl-Z."""
    if not holder.alive or holder.host != os.uname().nodename:
        return False
    # the first field is the state
    return process_fields(holder.process)[:1] == ["T"]


def _changed_at(run: RunDirectory) -> float:
    """Return the Unix time of the latest change to files that a report shows."""
    results = (run.root / "train").rglob("result.json")
    return _newest([*run.profile.glob("*.jsonl"), run.plan_file, *results]) or 0.0


def _cut_off(run: RunDirectory, history: RunHistory) -> list[str]:
    known = {Path(job.folder).name for job in history.submissions()}
    return [
        path.parent.name
        for path in sorted(run.slurm.glob(f"*/{NOTICE}"))
        if path.parent.name not in known
    ]


Read = TypeVar("Read")


def _try(read: Callable[[], Read], doubts: list[str]) -> Read | None:
    try:
        return read()
    except InputError as error:
        doubts.append(str(error).splitlines()[0])
        return None


def _labels(run: RunDirectory) -> list[str]:
    root = run.root / "train"
    folders = [path for path in (*root.glob("*"), *root.glob("*/*")) if path.is_dir()]
    files = ("metrics.jsonl", "result.json", "checkpoints")
    trainings = (path for path in folders if any((path / name).exists() for name in files))
    return sorted(path.relative_to(root).as_posix() for path in trainings)


def _without_scores(spec: SweepSpec | None, training: TrainingFacts | None) -> list[str]:
    result = training.result if training is not None else None
    if spec is None or result is None or not spec.workload.is_script or not spec.workload.metric:
        return []
    return [] if result.is_scored else [WITHOUT_SCORES]


def _training(files: TrainDirectory, label: str, doubts: list[str]) -> TrainingFacts:
    result = _try(files.read_result, doubts)
    return TrainingFacts(
        label=label,
        result=result,
        tail=Tail([], None) if result else read_tail(files.metrics_file),
        checkpoint_at=_newest(files.checkpoints.glob("checkpoint-*.tula")),
        saved_samples=files.saved_samples,
        logged_at=_newest([files.metrics_file]),
    )


def _newest(paths: Iterable[Path]) -> float | None:
    times = []
    for path in paths:
        # an older checkpoint may be deleted meanwhile, when a newer one is written
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def read_tail(path: Path) -> Tail:
    """Read the last logged steps and the last epoch without reading all of metrics.jsonl.

    A script may report an epoch's score after its end; until then the epoch before it is returned.
    """
    steps: list[StepMetrics] = []
    epochs: list[EpochMetrics] = []
    for line in _lines_from_end(path):
        # a torn line; pydantic's ValidationError is a ValueError
        with contextlib.suppress(ValueError):
            # a line's kind is its first field
            head = line[:40].replace(b" ", b"")
            if b'"kind":"step"' in head and len(steps) < RECENT_STEPS:
                steps.append(parse_record(StepMetrics, line))
            elif b'"kind":"epoch"' in head and len(epochs) < RECENT_EPOCHS:
                epochs.append(parse_record(EpochMetrics, line))
        if len(steps) == RECENT_STEPS and (
            any(each.is_scored for each in epochs) or len(epochs) == RECENT_EPOCHS
        ):
            break
    scored = (each for each in epochs if each.is_scored)
    return Tail(steps[::-1], next(scored, epochs[0] if epochs else None))


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield lines from the last to the first, at most the last `MOST_BYTES` of the file."""
    if not path.is_file():
        return
    with open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        lowest, rest = max(0, end - MOST_BYTES), b""
        while end > lowest:
            start = max(lowest, end - BLOCK_BYTES)
            file.seek(start)
            rest, *whole = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(whole)
            end = start
        if lowest == 0:
            yield rest


def find_log(folder: Path, job_id: str) -> tuple[str, str]:
    """Return the log that best explains a job's end, and its most telling line, or "" twice."""
    best, logs = read_logs(Submitted(job_id, folder).log_files())
    return (str(best), informative_line("\n".join(logs))) if best else ("", "")
