"""Progress of each training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

from tula_hpc.analysis.drift import describe_drift
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import (
    Record,
    StepMetrics,
    TrainResult,
    kept_steps,
    samples_a_step,
    steps_left_s,
)
from tula_hpc.records.events import Restart
from tula_hpc.status.jobs import JobPhase, JobStatus
from tula_hpc.status.run_files import Facts, TrainingFacts

Stand = Literal["finished", "diverged", "running", "waiting", "over", "failed", "unknown", "none"]


class TrainingStatus(Record):
    """Progress of one training."""

    label: str
    # none: never submitted; over, failed, unknown: the phase of its last job, see `JobPhase`
    stand: Stand = "none"
    # id of its last job
    job_id: str = ""
    # number of jobs submitted so far
    jobs: int = 0
    # epochs trained
    epoch: float = 0.0
    # epochs to train in all
    epochs: int | None = None
    # share of the epochs that is trained, 0 to 1
    share: float | None = None
    step: int = 0
    samples_seen: int = 0
    global_batch: int | None = None
    # median of the last logged steps
    step_time_s: float | None = None
    # estimated seconds of the remaining steps at this pace, without anything else
    left_s: float | None = None
    # from 0 to 1
    test_accuracy: float | None = None
    test_loss: float | None = None
    # number of the epoch after which these were measured
    test_epoch: int | None = None
    restarts: int = 0
    checkpoint_age_s: float | None = None
    # number of fallbacks to a smaller batch, after running out of memory
    fallbacks: int = 0
    # nothing is saved yet that a next job could resume from
    starts_over: bool = True
    # description of the drift while steps are slower than predicted, else ""
    drift: str = ""
    # checkpoints newer than the one it resumed from, and why they could not be used
    passed_over: str = ""


def training_statuses(facts: Facts, jobs: Iterable[JobStatus]) -> dict[str, TrainingStatus]:
    """Return the trainings by label, except those moved away to train from the start."""
    of_label: dict[str, list[JobStatus]] = {}
    for job in jobs:
        if job.stage == "train":
            of_label.setdefault(job.label, []).append(job)
    labels = {label for label, own in of_label.items() if not _was_moved(facts, label, own)}
    return {
        label: _status(facts, label, of_label.get(label, []))
        for label in sorted(labels | facts.trainings.keys())
    }


def _was_moved(facts: Facts, label: str, jobs: Sequence[JobStatus]) -> bool:
    settled = (JobPhase.FINISHED, JobPhase.FAILED)
    is_over = all(job.phase in settled for job in jobs)
    return is_over and label not in facts.trainings and facts.history.has_left_files(label)


def _status(facts: Facts, label: str, jobs: Sequence[JobStatus]) -> TrainingStatus:
    files = facts.trainings.get(label)
    epochs = facts.plan.epochs if facts.plan else None
    if facts.spec:
        epochs = facts.spec.workload.epochs
    restart = facts.history.last_restart(label)
    stand = _stand(files, jobs)
    known: dict[str, object] = {
        "label": label,
        "stand": stand,
        "job_id": jobs[-1].job_id if jobs else "",
        "jobs": len(jobs),
        "epochs": epochs,
        "restarts": facts.history.restarts(label),
        "fallbacks": facts.history.fallbacks(label),
        "passed_over": restart.passed_over if restart else "",
    }
    if stand in ("running", "unknown"):
        known["drift"] = describe_drift(facts.history.of_training(label))
    if files is not None:
        if files.checkpoint_at is not None:
            known["checkpoint_age_s"] = max(0.0, facts.now - files.checkpoint_at)
        # a script may have saved files of its own that it resumes from
        resumes_itself = facts.spec is not None and facts.spec.workload.goes_on
        known["starts_over"] = files.checkpoint_at is None and not resumes_itself
        if files.result:
            known |= _ended(files.result, epochs)
        else:
            steps = _kept_steps(files, restart, stand)
            known |= _under_way(files, steps, epochs)
        # a diverged training does not go on, and one that starts over has all its steps left
        has_diverged = bool(jobs) and jobs[-1].failure is Failure.DIVERGED
        starts_over = known["starts_over"] and stand in ("waiting", "failed", "over")
        if has_diverged or starts_over:
            known["left_s"] = None
            if stand == "waiting":
                known |= {"epoch": 0.0, "share": 0.0, "step": 0, "samples_seen": 0}
    return TrainingStatus.model_validate(known)


def _stand(files: TrainingFacts | None, jobs: Sequence[JobStatus]) -> Stand:
    if files is not None and files.result is not None:
        return "diverged" if files.result.diverged else "finished"
    if not jobs:
        return "none"
    stands: Mapping[JobPhase, Stand] = {
        JobPhase.WAITING: "waiting",
        JobPhase.RUNNING: "running",
        JobPhase.FAILED: "failed",
        JobPhase.UNKNOWN: "unknown",
    }
    return stands.get(jobs[-1].phase, "over")


def _ended(result: TrainResult, epochs: int | None) -> dict[str, object]:
    return {
        "epoch": float(result.epochs),
        # a script may stop early
        "share": min(1.0, result.epochs / epochs) if epochs else 1.0,
        "step": result.steps,
        "samples_seen": result.samples_seen,
        "global_batch": result.global_batch,
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "test_epoch": result.epochs,
        "restarts": result.restarts,
    }


def _kept_steps(
    files: TrainingFacts, restart: Restart | None, stand: Stand
) -> Sequence[StepMetrics]:
    """Return the last logged steps; if steps were lost at a kill, end with the saved progress."""
    saved = None
    if stand in ("waiting", "failed", "over"):
        saved = files.saved_samples
    elif restart and (restart.began_at or 0.0) > (files.logged_at or math.inf):
        # the present job has logged nothing yet
        saved = restart.samples_seen
    return kept_steps(files.tail.steps, saved)


def _under_way(
    files: TrainingFacts, steps: Sequence[StepMetrics], epochs: int | None
) -> dict[str, object]:
    """Return the progress by the last lines of the metrics; an epoch's line follows its steps."""
    known: dict[str, object] = {}
    if files.tail.epoch is not None:
        last_epoch = files.tail.epoch
        known |= {"test_accuracy": last_epoch.test_accuracy, "test_loss": last_epoch.test_loss}
        known["test_epoch"] = last_epoch.epoch
    if not steps:
        return known
    last = steps[-1]
    batch = samples_a_step(steps)
    step_time_s = median(row.step_time_s for row in steps)
    known |= {
        "epoch": last.epoch,
        "step": last.step,
        "samples_seen": last.samples_seen,
        "step_time_s": step_time_s,
    }
    if batch:
        known["global_batch"] = round(batch)
    # `batch` may be a mean with an epoch's shorter last batch; after a fallback it is half or less
    if files.tail.epoch is not None and 0.5 < batch / files.tail.epoch.global_batch < 1.0:
        known["global_batch"] = files.tail.epoch.global_batch
    if epochs:
        known["share"] = min(1.0, last.epoch / epochs)
        known["left_s"] = steps_left_s(steps, epochs)
    return known
