"""What became of each job of a run: from its own events and records, and, where they leave it open, from Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from tula_hpc.errors import Failure
from tula_hpc.launch.reasons import explain, waits
from tula_hpc.launch.slurm import JobState
from tula_hpc.records import MAIN_LABEL, Configuration, Event, JobNote, Measurement, Record
from tula_hpc.status.facts import Facts


class JobPhase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    # it did its work, which may be to find out that memory does not suffice
    FINISHED = "finished"
    # and the sweep has taken note of it
    FAILED = "failed"
    # the scheduler no longer has it, and the sweep has not taken note of that
    OVER = "over"
    # not over as far as the files tell, and the scheduler could not be asked
    UNKNOWN = "unknown"


class JobStatus(Record):
    """One submitted job."""

    job_id: str
    stage: str
    phase: JobPhase
    # of the training; of a control job its role
    label: str = ""
    # it was to measure
    what: str = ""
    partition: str = ""
    nodes: int | None = None
    # Unix time
    submitted_at: float
    # in the run directory: scripts and logs
    folder: str = ""
    # Slurm's word
    state: str = ""
    # Slurm's word for what it waits for
    reason: str = ""
    # the same in plain words
    waits_for: str = ""
    # that will not go away by itself
    stuck: bool = False
    failure: Failure | None = None
    # last line of its log
    detail: str = ""
    log_file: str = ""

    @property
    def kind(self) -> str:
        """For people: the stage, or `guard`, of a job that carries a detached sweep on where its controller dies."""
        return self.label if self.stage == "control" and self.label else self.stage


class Answer(NamedTuple):
    """What the scheduler says; `local` jobs are answered for by the processes of this machine."""

    # jobs that it still has; None: it could not be asked
    active: Mapping[str, JobState] | None
    # why not
    words: str = ""
    # of jobs that are over, as far as accounting knows them
    last_states: Mapping[str, str] = {}


class Submission(NamedTuple):
    """A submitted job and what was written down of it afterwards."""

    event: Event
    own: list[Event]

    @property
    def label(self) -> str:
        """Of the training, or the role of a control job; "" for other jobs."""
        stage, data = self.event.stage, self.event.data
        if stage == "train":
            return str(data.get("label", MAIN_LABEL))
        return str(data.get("role", "")) if stage == "control" else ""


def submissions(events: Iterable[Event]) -> list[Submission]:
    """Every submitted job with its own events. Process numbers return: what follows is the latest's of that id."""
    found: list[Submission] = []
    latest: dict[str, Submission] = {}
    for event in events:
        if event.event == "submitted":
            latest[event.job_id] = Submission(event, [])
            found.append(latest[event.job_id])
        elif event.job_id in latest:
            latest[event.job_id].own.append(event)
    return found


class _Told(NamedTuple):
    """What the files say of the end of a job."""

    phase: JobPhase
    failure: Failure | None = None
    detail: str = ""


class _Records:
    """What profile jobs left, by job, and what later stages imply."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.jobs = submissions(facts.events)
        self.measured: dict[str, list[Measurement]] = {}
        for row in facts.measurements:
            self.measured.setdefault(row.job_id, []).append(row)
        self.last_note: dict[str, JobNote] = {}
        for note in sorted(facts.notes, key=lambda note: note.time):
            self.last_note[note.job_id] = note
        self.last_of_label = {(job.event.stage, job.label): job for job in self.jobs}
        self.trained_from = min(
            (j.event.time for j in self.jobs if j.event.stage == "train"), default=None
        )

    def told(self, job: Submission) -> _Told | None:
        """None where the files leave open whether the job is over."""
        told = _by_events(job)
        if job.event.stage == "profile":
            return self._profiled(job, told)
        if told is not None:
            return told
        followed = self.last_of_label[job.event.stage, job.label] is not job
        if job.event.stage == "control":
            return _Told(JobPhase.FINISHED) if followed else None
        training = self.facts.trainings.get(job.label)
        # the sweep submits a training again only when its job is over
        if followed:
            return _Told(JobPhase.FAILED, None, "ended without a result; was submitted again")
        return _Told(JobPhase.FINISHED) if training and training.result else None

    def _profiled(self, job: Submission, told: _Told | None) -> _Told | None:
        rows = self.measured.get(job.event.job_id, [])
        bad = next((row for row in rows if row.status == "failed"), None)
        if bad is not None:
            return _Told(JobPhase.FAILED, bad.failure or Failure.BUG, bad.detail)
        if told is not None:
            return told._replace(
                detail=told.detail or next((row.detail for row in rows if row.detail), "")
            )
        note = self.last_note.get(job.event.job_id)
        # before there were notes a job measured one thing
        did_all = note.note == "ended" if note else bool(rows)
        if did_all or any(row.status == "oom" for row in rows):
            return _Told(JobPhase.FINISHED)
        if self._was_planned_after(job):
            return (
                _Told(JobPhase.FINISHED)
                if rows
                else _Told(JobPhase.FAILED, None, "left no measurement")
            )
        return None

    def _was_planned_after(self, job: Submission) -> bool:
        """The sweep plans and trains only when all profile jobs are over."""
        return self.trained_from is not None or self.facts.plan_at > job.event.time


def _by_events(job: Submission) -> _Told | None:
    kinds = [event.event for event in job.own]
    if "finished" in kinds:
        return _Told(JobPhase.FINISHED)
    failures = {event.event: event for event in job.own if event.failure is not None}
    # what the job itself said goes before what the scheduler says
    for kind in ("oom", "failed", "ended"):
        if kind in failures:
            detail = next((e.detail for e in (failures[kind], *reversed(job.own)) if e.detail), "")
            return _Told(JobPhase.FAILED, failures[kind].failure, detail)
    return _Told(JobPhase.FINISHED) if "ended" in kinds else None


def undecided(facts: Facts) -> list[Submission]:
    """Jobs of which the files leave open whether they are over: the scheduler has to be asked."""
    records = _Records(facts)
    return [job for job in records.jobs if records.told(job) is None]


def job_statuses(facts: Facts, answer: Answer) -> list[JobStatus]:
    """Every job, in the order of submission."""
    records = _Records(facts)
    return [_status(job, records.told(job), answer) for job in records.jobs]


def _status(job: Submission, told: _Told | None, answer: Answer) -> JobStatus:
    event, data = job.event, job.event.data
    nodes = data.get("nodes")
    known = JobStatus(
        job_id=event.job_id,
        stage=event.stage,
        phase=told.phase if told else JobPhase.UNKNOWN,
        label=job.label,
        what=_what(data.get("configurations")),
        partition=str(data.get("partition") or ""),
        nodes=nodes if isinstance(nodes, int) else None,
        submitted_at=event.time,
        folder=str(data.get("folder") or ""),
        failure=told.failure if told else None,
        detail=told.detail.strip().partition("\n")[0] if told else "",
    )
    return known if told or answer.active is None else _as_scheduled(known, answer.active, answer)


def _what(configurations: object) -> str:
    """The configurations of a profile job, in a few words."""
    if not isinstance(configurations, list) or not configurations:
        return ""
    first = configurations[0]
    is_known = (
        isinstance(first, list)
        and len(first) == 3
        and all(isinstance(number, int) for number in first)
    )
    if len(configurations) > 1 or not is_known:
        return f"{len(configurations)} configurations"
    return str(Configuration(*first))


def _as_scheduled(job: JobStatus, active: Mapping[str, JobState], answer: Answer) -> JobStatus:
    state = active.get(job.job_id)
    if state is None or state.is_over:
        last = state.state if state else answer.last_states.get(job.job_id, "")
        return job.model_copy(update={"phase": JobPhase.OVER, "state": last})
    if not waits(state):
        return job.model_copy(update={"phase": JobPhase.RUNNING, "state": state.state})
    wait = explain(state)
    why = {
        "state": state.state,
        "reason": state.reason,
        "waits_for": wait.words,
        "stuck": wait.stuck,
    }
    return job.model_copy(update={"phase": JobPhase.WAITING, **why})
