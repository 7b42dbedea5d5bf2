"""State of each job of a run, from its events and records, or else from the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import first_line
from tula_hpc.launch.diagnosis import explain, waits
from tula_hpc.launch.slurm import JobState
from tula_hpc.records import Configuration, JobNote, Measurement, Record, Submission
from tula_hpc.status.run_files import Facts


class JobPhase(StrEnum):
    """State of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    # it did its work; that includes finding out that a batch does not fit into memory
    FINISHED = "finished"
    # it failed, and the sweep has recorded that
    FAILED = "failed"
    # the scheduler no longer has it, but the sweep has not recorded its end yet
    OVER = "over"
    # not over according to the files, and the scheduler could not be asked
    UNKNOWN = "unknown"


class JobStatus(Record):
    """One submitted job."""

    job_id: str
    stage: str
    phase: JobPhase
    # name of a training; role of a controller job
    label: str = ""
    # what a profile job was to measure
    what: str = ""
    partition: str = ""
    nodes: int | None = None
    submitted_at: float
    # folder of scripts and logs, in the run directory
    folder: str = ""
    # Slurm's name for the state
    state: str = ""
    # Slurm's name for what the job waits for
    reason: str = ""
    # the same in plain words
    waits_for: str = ""
    # somebody has to act before it can start
    stuck: bool = False
    failure: Failure | None = None
    # last line of its log, or another description of its failure
    detail: str = ""
    log_file: str = ""

    @property
    def kind(self) -> str:
        """Return the stage, or "guard" for a controller's guard, to show."""
        return self.label if self.stage == "control" and self.label else self.stage


def of_stage(jobs: Iterable[JobStatus], stage: str) -> list[JobStatus]:
    """Return the jobs of one stage."""
    return [job for job in jobs if job.stage == stage]


def in_phase(jobs: Iterable[JobStatus], phase: JobPhase) -> list[JobStatus]:
    """Return the jobs in one phase."""
    return [job for job in jobs if job.phase is phase]


def work_in(jobs: Iterable[JobStatus], phase: JobPhase) -> list[JobStatus]:
    """Return the jobs in one phase, without controllers, which are meant to wait for the others."""
    return [job for job in in_phase(jobs, phase) if job.stage != "control"]


class Answer(NamedTuple):
    """Answer of the scheduler; for local jobs: which processes of this machine run."""

    # jobs that the scheduler still has, by id; None: it could not be asked
    active: Mapping[str, JobState] | None
    # why it could not be asked
    words: str = ""
    # last state of jobs that are over, by id, as far as accounting has them
    last_states: Mapping[str, str] = {}


class _End(NamedTuple):
    phase: JobPhase
    failure: Failure | None = None
    detail: str = ""


class _Records:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.jobs = facts.history.submissions()
        self.measured: dict[str, list[Measurement]] = {}
        for row in facts.measurements:
            self.measured.setdefault(row.job_id, []).append(row)
        self.last_note: dict[str, JobNote] = {}
        for note in sorted(facts.notes, key=lambda note: note.time):
            self.last_note[note.job_id] = note
        self.last_of_label = {(job.stage, label_of(job)): job for job in self.jobs}
        self.has_trained = any(job.stage == "train" for job in self.jobs)

    def end_of(self, job: Submission) -> _End | None:
        """Return the end of a job; None if the files do not show whether it is over."""
        end = _by_events(job)
        if job.stage == "profile":
            return self._profiled(job, end)
        if end is not None:
            return end
        followed = self.last_of_label[job.stage, label_of(job)] is not job
        if job.stage == "control":
            return _End(JobPhase.FINISHED) if followed else None
        training = self.facts.trainings.get(job.label)
        # the sweep submits a training again only after its job is over
        if followed:
            return _End(JobPhase.FAILED, None, "ended without a result; was submitted again")
        return _End(JobPhase.FINISHED) if training and training.result else None

    def _profiled(self, job: Submission, end: _End | None) -> _End | None:
        rows = self.measured.get(job.job_id, [])
        bad = next((row for row in rows if row.status == "failed" and not row.is_left_out), None)
        if bad is not None:
            return _End(JobPhase.FAILED, bad.failure or Failure.BUG, bad.detail)
        if end is not None:
            detail = next((row.detail for row in rows if row.detail), "")
            return end._replace(detail=end.detail or detail)
        note = self.last_note.get(job.job_id)
        did_all = note is not None and note.note == "ended"
        if did_all or any(row.status == "oom" for row in rows):
            return _End(JobPhase.FINISHED)
        # a later stage begins only after all profile jobs are over
        if not self.has_trained and self.facts.plan_at <= job.submitted_at:
            return None
        if rows:
            return _End(JobPhase.FINISHED)
        return _End(JobPhase.FAILED, None, "left no measurement")


def _by_events(job: Submission) -> _End | None:
    if job.has_finished:
        return _End(JobPhase.FINISHED)
    failure = job.failure
    if failure is not None:
        return _End(JobPhase.FAILED, failure.kind, failure.detail)
    return _End(JobPhase.FINISHED) if job.end else None


def undecided(facts: Facts) -> list[Submission]:
    """Return the jobs that may not be over according to the files, to ask the scheduler for."""
    records = _Records(facts)
    return [job for job in records.jobs if records.end_of(job) is None]


def job_statuses(facts: Facts, answer: Answer) -> list[JobStatus]:
    """Return the status of every job, in order of submission."""
    records = _Records(facts)
    return [_status(job, records.end_of(job), answer) for job in records.jobs]


def _status(job: Submission, end: _End | None, answer: Answer) -> JobStatus:
    known = JobStatus(
        job_id=job.job_id,
        stage=job.stage,
        phase=end.phase if end else JobPhase.UNKNOWN,
        label=label_of(job),
        what=_what(job.configurations),
        partition=job.partition or "",
        nodes=job.nodes,
        submitted_at=job.submitted_at,
        folder=job.folder,
        failure=end.failure if end else None,
        detail=first_line(end.detail) if end else "",
    )
    return known if end else _as_scheduled(known, answer)


def label_of(job: Submission) -> str:
    """Return the label of a training or the role of a controller job, "" for other jobs."""
    return job.label or job.role


def _what(configurations: Sequence[Configuration]) -> str:
    if len(configurations) > 1:
        return f"{len(configurations)} configurations"
    return str(configurations[0]) if configurations else ""


def _as_scheduled(job: JobStatus, answer: Answer) -> JobStatus:
    if answer.active is None:
        return job
    state = answer.active.get(job.job_id)
    if state is None or state.is_over:
        last = state.state if state else answer.last_states.get(job.job_id, "")
        return job.model_copy(update={"phase": JobPhase.OVER, "state": last})
    if not waits(state):
        return job.model_copy(update={"phase": JobPhase.RUNNING, "state": state.state})
    wait = explain(state)
    why = {
        "state": state.state,
        "reason": state.reason,
        "waits_for": wait.words.replace("JOB", job.job_id),
        "stuck": wait.stuck,
    }
    return job.model_copy(update={"phase": JobPhase.WAITING, **why})
