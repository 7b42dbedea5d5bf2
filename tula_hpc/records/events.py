"""events.jsonl, the log of a run, and `RunHistory`, which interprets it; notes of profile jobs.

Each line of the file is an `Event`; each kind of event has a type for its data here. No other
package looks into an event: `RunHistory` answers questions about all events of a run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from tula_hpc.failure_kinds import Failure
from tula_hpc.records.base import Configuration, JobId, Nodes, Record

# label of the training that a sweep ends with
MAIN_LABEL = "main"
# the stage of a detached sweep's controller jobs
CONTROL = "control"
# the role of the controller job that takes over if another one is killed with its batch script
GUARD = "guard"

EventName = Literal[
    "submitted",
    "oom",
    "preempted",
    "requeued",
    "resumed",
    "checkpoint",
    "fell_back",
    "drifted",
    "recovered",
    "finished",
    "failed",
    "ended",
    "detached",
]
Stage = Literal["profile", "plan", "train", "report", "control"]


class JobNote(Record):
    """Note of a profile job on itself: gives its cost, and how far it came if it is found dead.

    A job that is requeued begins again: its notes then hold several runs, each starting at "began".
    """

    # ready: all workers have met
    note: Literal["began", "ready", "measuring", "ended"]
    time: float
    job_id: JobId = ""
    allocated_nodes: Nodes = 1
    submitted_at: float = 0.0
    # when the allocation was granted, as far as the job can tell
    began_at: float = 0.0
    # the one that is measured next
    configuration: Configuration | None = None
    # see `Measurement.accumulation`
    accumulation: int | None = None
    # for "began": what failed of the cluster file's `setup`; for "ended": why the job ended
    detail: str = ""


def setup_failures(notes: Iterable[JobNote]) -> list[str]:
    """Say what of `setup` failed in profile jobs that went on; name each failure's first job."""
    jobs: dict[str, str] = {}
    for note in notes:
        if note.note == "began" and note.detail:
            jobs.setdefault(note.detail, note.job_id)
    return [
        f"job {job_id} went on although {words}; correct it there (the shell's error is in "
        f"slurm/profile-*/{job_id}_0_log.err of the run), and measure with another --run-dir"
        for words, job_id in jobs.items()
    ]


class JobAccount(Record):
    """A line of accounting.jsonl: one run of a job, from the scheduler's accounting."""

    job_id: JobId
    stage: Stage
    # the scheduler's name for the state
    state: str
    # the run has ended for good
    over: bool
    nodes: int = Field(ge=0, le=10**15)
    # seconds of the allocation
    elapsed_s: float = Field(ge=0.0, le=1e15)

    @property
    def node_seconds(self) -> float:
        """Nodes × seconds of the allocation."""
        return self.nodes * self.elapsed_s


class Event(Record):
    """One line of events.jsonl."""

    time: float
    event: EventName
    stage: Stage
    detail: str = ""
    failure: Failure | None = None
    job_id: JobId = ""
    # a subclass of `EventData` has the types
    data: dict[str, Any] = Field(default={})

    @property
    def title(self) -> str:
        """Name of the event, to show and not to compare."""
        return self.event


class StopReason(StrEnum):
    """Reason why a training that was interrupted is not resumed by its own job."""

    REQUEUE_REFUSED = "requeue_refused"
    # the job restarted as often as training.max_requeues allows
    REQUEUES_EXHAUSTED = "requeues_exhausted"
    # a time limit ended the job, and a restart would begin anew
    LIMIT_IN_VAIN = "limit_in_vain"


class EventData(Record):
    """Data of one kind of event; a damaged field counts as missing."""

    @classmethod
    def of(cls, event: Event) -> Self:
        """Read an event's data."""
        return cls.model_validate(event.data)

    @field_validator("*", mode="wrap")
    @classmethod
    def _drop_damaged(
        cls, value: object, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        try:
            return validate(value)
        except ValidationError:
            return cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)


class SubmissionData(EventData):
    """Data of "submitted"."""

    # path of the run directory
    run: str = ""
    # folder of scripts and logs, in the run directory
    folder: str = ""
    nodes: Nodes | None = None
    # name of a training
    label: str = ""
    # role of a controller job, see `GUARD`
    role: str = ""
    # None: not on record
    partition: str | None = None
    # what a training runs with
    configuration: Configuration | None = None
    # see `Measurement.accumulation`
    accumulation: int | None = None
    # the earlier training's files were moved away, and this one begins from the start
    anew: bool = False
    # what a profile job measures
    configurations: tuple[Configuration, ...] = ()
    # file of a profile job's measurements, in the run directory
    output: str = ""


class EndData(EventData):
    """Data of "failed" and "ended"."""

    # name of a training
    label: str = ""
    stop: StopReason | None = None
    # what a profile job was measuring
    configuration: Configuration | None = None
    partition: str | None = None


class ProgressData(EventData):
    """Data of "resumed", and of the end of a training's job."""

    samples_seen: int | None = None
    step: int | None = None
    # epochs trained on, including the part of the present epoch
    epochs_seen: float | None = None
    # newer checkpoints that could not be used, and why
    passed_over: str = ""
    # Unix time of the start of the job, or of its run after a requeue
    began_at: float | None = None


class CheckpointData(EventData):
    """Data of "checkpoint"."""

    cost_s: float | None = None


class DriftData(EventData):
    """Data of "drifted": step times of a training beyond the plan's prediction."""

    # measured over predicted; 0: not recorded
    ratio: float = 0.0
    # compute, network, loader or unknown
    part: str = ""


class DetachedData(EventData):
    """Data of "detached", and of the end of a controller."""

    # the last stage that it runs
    until: str = ""
    # a command that stays took over from the controllers
    taken_over: bool = False


def hosts_in(event: Event) -> list[str]:
    """Return the hosts that an event names as broken."""
    named = event.data.get("hosts")
    if not isinstance(named, list):
        return []
    # checked, since host names become part of a job script
    return [
        host for host in named if isinstance(host, str) and re.fullmatch(r"[\w.-]{1,255}", host)
    ]


class JobFailure(NamedTuple):
    """Failure of a job, from its events."""

    # None: no event names one
    kind: Failure | None
    detail: str = ""
    stop: StopReason | None = None


def _last_of(events: Sequence[Event], *names: EventName) -> Event | None:
    return next((event for event in reversed(events) if event.event in names), None)


def _named(events: Iterable[Event], *names: EventName) -> list[Event]:
    return [event for event in events if event.event in names]


def _failure_in(event: Event) -> JobFailure:
    return JobFailure(event.failure, event.detail, EndData.of(event).stop)


class JobEvents(Record):
    """Events of one job after its latest submission."""

    job_id: str
    events: list[Event] = Field(default=[])

    @property
    def has_finished(self) -> bool:
        """Tell whether the job has reported that its work is done."""
        return bool(_named(self.events, "finished"))

    @property
    def end(self) -> Event | None:
        """The job's end, recorded by the command that handled it, if any."""
        return _last_of(self.events, "ended")

    @property
    def memory_failure(self) -> Failure | None:
        """The recorded out-of-memory failure of this job, on the device or on the host, if any."""
        failed = reversed(_named(self.events, "oom"))
        return next((event.failure for event in failed if event.failure), None)

    @property
    def met_broken_device(self) -> bool:
        """Tell whether a worker reported a broken device."""
        return any(event.failure is Failure.DEVICE_FAILED for event in self.events)

    @property
    def own_failure(self) -> JobFailure | None:
        """The last failure that the job itself reported, if any."""
        failed = _last_of(self.events, "failed")
        return _failure_in(failed) if failed else None

    @property
    def failure(self) -> JobFailure | None:
        """The recorded failure, if any; the job's own report is preferred to the scheduler's."""
        for name in ("oom", "failed", "ended"):
            failed = [event for event in _named(self.events, name) if event.failure is not None]
            if failed:
                details = [event.detail for event in (failed[-1], *reversed(self.events))]
                return _failure_in(failed[-1])._replace(detail=next(filter(None, details), ""))
        return None

    @property
    def begun_with_nothing(self) -> list[bool]:
        """Tell for each of the job's runs that trained at all whether it began from the start."""
        from_start: list[bool] = []
        for event in self.events:
            if event.event == "resumed":
                from_start.append(ProgressData.of(event).samples_seen == 0)
            elif not from_start and event.event in ("checkpoint", "preempted", "finished"):
                from_start.append(True)
        return from_start

    @property
    def hosts(self) -> list[str]:
        """Hosts that workers of the job reported as broken."""
        return list(chain.from_iterable(map(hosts_in, self.events)))


class Submission(JobEvents, SubmissionData):
    """One submitted job."""

    stage: Stage
    submitted_at: float

    @property
    def last_sign_at(self) -> float:
        """Unix time of the job's own end, else of its last recorded event, or of its submission."""
        last = self.events[-1].time if self.events else self.submitted_at
        finished = _last_of(self.events, "finished")
        # a command may notice the end much later; a job whose clock was set is not believed
        if finished and self.submitted_at <= finished.time <= last:
            return finished.time
        return last


def _submission(event: Event) -> Submission:
    fields = dict(SubmissionData.of(event))
    if event.stage == "train" and not fields["label"]:
        fields["label"] = MAIN_LABEL
    return Submission(job_id=event.job_id, stage=event.stage, submitted_at=event.time, **fields)


def _drift_of(event: Event) -> DriftData | None:
    data = DriftData.of(event)
    return data if data.ratio > 0 else None


class Detached(NamedTuple):
    """Start of a detached sweep."""

    # Unix time
    since: float
    # the last stage that it runs
    until: str


class Sign(NamedTuple):
    """Sign of life of a training."""

    time: float
    kind: Literal["resumed", "stopped", "finished"]
    # the name of the event, to show
    title: str = ""
    job_id: str = ""
    # name of the training
    label: str = MAIN_LABEL
    # Unix time of the start of the job's run, if this event records it
    began_at: float | None = None


class News(NamedTuple):
    """Event of a training that the user may want to be notified of."""

    kind: Literal["training_preempted", "training_failed", "training_finished"]
    # name of the training
    label: str
    text: str


_SIGNS: Mapping[EventName, Literal["resumed", "stopped", "finished"]] = {
    "resumed": "resumed",
    "preempted": "stopped",
    "requeued": "stopped",
    "failed": "stopped",
    "oom": "stopped",
    "finished": "finished",
}


class Restart(ProgressData):
    """Restart of a training's job; with 0 samples seen it begins from the start."""

    job_id: str
    # what it resumes from, in words
    from_where: str


class RunHistory:
    """History of a run, from the events in events.jsonl, in the order of the file.

    A scheduler may reuse job ids: an event belongs to the latest submission with its id.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self._submissions: list[Submission] = []
        # by job id; includes jobs without a recorded submission
        self._jobs: dict[str, JobEvents] = {}
        # submissions without a recorded end, by stage and job id
        self._unsettled: dict[tuple[Stage, str], Submission] = {}
        # training's label of each event, as far as known from the events before it; else empty
        self._labels: list[str] = []
        for event in self.events:
            self._take_in(event)

    def _take_in(self, event: Event) -> None:
        key = (event.stage, event.job_id)
        if event.event in ("submitted", "ended"):
            self._unsettled.pop(key, None)
        if event.event == "submitted":
            job = _submission(event)
            known = self._jobs.get(job.job_id)
            if known is not None and not isinstance(known, Submission):
                # the job began before its submission was recorded
                job.events.extend(known.events)
            self._submissions.append(job)
            self._jobs[job.job_id] = self._unsettled[key] = job
        else:
            if event.job_id not in self._jobs:
                self._jobs[event.job_id] = JobEvents(job_id=event.job_id)
            self._jobs[event.job_id].events.append(event)
        label = ""
        if "label" in event.data:
            label = EndData.of(event).label
        mine = self._jobs[event.job_id]
        if not label and isinstance(mine, Submission):
            label = mine.label
        self._labels.append(label)

    def submissions(self, *stages: str) -> list[Submission]:
        """Return the submitted jobs of these stages, or of all, in order of submission."""
        return [job for job in self._submissions if not stages or job.stage in stages]

    def unsettled(self, *stages: str) -> list[Submission]:
        """Return the jobs of these stages whose end no command has recorded, oldest first."""
        return [job for job in self._unsettled.values() if job.stage in stages]

    def guards(self) -> list[Submission]:
        """Return the guards whose end no command has recorded."""
        return [job for job in self.unsettled(CONTROL) if job.role == GUARD]

    def control_failure(self) -> str:
        """Return why the last controller that ended could not go on, "" if it could."""
        last = _last_of(self._of_stage(CONTROL), "ended")
        if last is None or last.failure is None:
            return ""
        return last.detail

    def job(self, job_id: str) -> JobEvents:
        """Return the events of a job."""
        return self._jobs.get(job_id, JobEvents(job_id=job_id))

    def reached(self, stage: Stage) -> bool:
        """Tell whether anything of a stage is on record."""
        return bool(self._of_stage(stage))

    def _of_stage(self, stage: str) -> list[Event]:
        return [event for event in self.events if event.stage == stage]

    def accounted(self, label: str, accounts: Iterable[JobAccount]) -> tuple[JobAccount, ...]:
        """Return the accounting of all runs of a training's jobs that had nodes.

        Empty if accounting does not have all of its jobs, or if a run is not over.
        """
        job_ids = self.jobs_of(label)
        mine = [account for account in accounts if account.job_id in job_ids]
        if {account.job_id for account in mine} != job_ids or not all(a.over for a in mine):
            return ()
        return tuple(account for account in mine if account.nodes > 0)

    def of_training(self, label: str) -> list[Event]:
        """Return a training's events; jobs without a recorded submission belong to the main one.

        Events of an earlier training whose files were moved away are left out.
        """
        return self._by_label.get(label, [])

    def jobs_of(self, label: str) -> set[str]:
        """Return the ids of the jobs that were submitted for a training, see `of_training`."""
        return {event.job_id for event in _named(self.of_training(label), "submitted")}

    def has_left_files(self, label: str) -> bool:
        """Tell whether a training has written a checkpoint or its result."""
        return bool(_named(self.of_training(label), "checkpoint", "finished"))

    def failed_as_it_went_on(self, label: str, since: float) -> bool:
        """Tell whether a training last restarted after `since`, and failed after that."""
        events = self.of_training(label)
        resumed = max((e.time for e in events if e.event == "resumed"), default=0.0)
        return resumed > since and any(e.event == "failed" and e.time > resumed for e in events)

    @cached_property
    def _by_label(self) -> dict[str, list[Event]]:
        # a job may write events before its submission is recorded
        label_of = {job.job_id: job.label for job in self.submissions("train")}
        by_label: dict[str, list[Event]] = {}
        for event, known in zip(self.events, self._labels, strict=True):
            if event.stage == "train":
                label = known or label_of.get(event.job_id, MAIN_LABEL)
                if event.event == "submitted" and SubmissionData.of(event).anew:
                    by_label[label] = []
                by_label.setdefault(label, []).append(event)
        return by_label

    def attempts(self, label: str, since: float = 0.0) -> int:
        """Count the jobs that were submitted for a training since this Unix time."""
        return len(self._submitted_for(label, since))

    def times_continued(self, label: str, job_id: str, since: float, asked: EventName) -> int:
        """Count how often a training has gone on by itself, up to the present job.

        Counted are the jobs for the training `since` the present command began, without the first,
        and the requeues that all of these asked for, by events of the name `asked`. Requeues by
        Slurm itself do not count.
        """
        jobs = {job_id, *self._submitted_for(label, since)}
        events = self.of_training(label)
        return len(jobs) - 1 + sum(e.event == asked and e.job_id in jobs for e in events)

    def _submitted_for(self, label: str, since: float) -> list[str]:
        return [
            job.job_id
            for job in self.submissions("train")
            if job.label == label and job.submitted_at >= since
        ]

    def ends(self, label: str, failures: Collection[Failure], since: float = 0.0) -> int:
        """Count a training's jobs, submitted since this Unix time, that ended by such a failure."""
        jobs = self._submitted_for(label, since)
        return sum(
            event.event == "ended" and event.failure in failures and event.job_id in jobs
            for event in self.of_training(label)
        )

    def last_failures(self, since: float = 0.0) -> dict[str, JobFailure]:
        """Return the failures of trainings that were not submitted again afterwards, by label."""
        failures: dict[str, JobFailure] = {}
        for event in self.events:
            label = EndData.of(event).label if "label" in event.data else ""
            if not label or event.time < since:
                continue
            if event.event == "submitted":
                failures.pop(label, None)
            elif event.event == "failed":
                failures[label] = _failure_in(event)
        return failures

    def in_vain(self, label: str, failure: Failure, since: float = 0.0) -> int:
        """Count the last jobs in a row that ended by `failure` and had begun at the same sample.

        Jobs submitted before `since` (Unix time) do not count: their cause may have been removed.
        """
        jobs = self._submitted_for(label, since)
        begun: dict[str, int] = {}
        starts: list[int] = []
        for event in self.of_training(label):
            # not by the time of the event, which may come from a node whose clock is behind
            if event.job_id not in jobs:
                continue
            if event.event == "resumed":
                begun[event.job_id] = ProgressData.of(event).samples_seen or 0
            elif event.event == "ended" and event.failure is failure:
                starts.append(begun.get(event.job_id, 0))
            elif event.event == "ended":
                starts = []
        return len(list(takewhile(lambda start: start == starts[-1], reversed(starts))))

    def restarts(self, label: str) -> int:
        """Count the restarts of a training, from a checkpoint or from the start."""
        return len(_named(self.of_training(label), "resumed"))

    def begun_anew(self, label: str) -> int:
        """Count the restarts of a training that had no checkpoint to resume from."""
        resumed = _named(self.of_training(label), "resumed")
        return sum(ProgressData.of(event).samples_seen == 0 for event in resumed)

    def last_restart(self, label: str) -> Restart | None:
        """Return the last restart of a training; None if there was none."""
        last = _last_of(self.of_training(label), "resumed")
        if last is None:
            return None
        reached = dict(ProgressData.of(last))
        return Restart(job_id=last.job_id, from_where=last.detail, **reached)

    def fallbacks(self, label: str) -> int:
        """Count how often a training went on with a smaller batch after running out of memory."""
        return len(_named(self.of_training(label), "fell_back"))

    def is_falling_back(self) -> bool:
        """Tell whether a training ran out of memory and its smaller batch is not submitted yet."""
        trained = self._of_stage("train")
        return bool(trained) and trained[-1].event == "fell_back"

    def drift(self) -> DriftData | None:
        """Return the present drift of the last job; None while its steps are as predicted."""
        last = _last_of(self.events, "drifted", "recovered", "resumed", "submitted")
        return _drift_of(last) if last and last.event == "drifted" else None

    def last_drift(self, label: str) -> DriftData | None:
        """Return the last drift of a training, even if it is over; None if there was none."""
        last = _last_of(self.of_training(label), "drifted")
        return _drift_of(last) if last else None

    def seconds_to_end(self) -> float | None:
        """Return the seconds from a training's end to its job's end; None if not recorded."""
        finished_at: float | None = None
        for event in self.events:
            if event.event == "finished":
                finished_at = event.time
            elif event.event == "ended" and finished_at is not None:
                return max(0.0, event.time - finished_at)
        return None

    def signs(self) -> list[Sign]:
        """Return the signs of life of all trainings in order of time."""
        signs = []
        for label, events in self._by_label.items():
            for event in events:
                if event.event in _SIGNS:
                    kind = _SIGNS[event.event]
                    began_at = ProgressData.of(event).began_at
                    signs.append(Sign(event.time, kind, event.title, event.job_id, label, began_at))
        return sorted(signs, key=lambda sign: sign.time)

    def news(self, since: int) -> list[News]:
        """Return the news of trainings, from the event with index `since` on."""
        news = []
        for event, label in list(zip(self.events, self._labels, strict=True))[since:]:
            if event.stage != "train":
                continue
            kind = event.failure.value.replace("_", " ") if event.failure else "failed"
            name = label or MAIN_LABEL
            if event.event == "preempted":
                news.append(News("training_preempted", name, event.detail))
            elif event.event == "finished":
                news.append(News("training_finished", name, event.detail))
            elif event.event == "fell_back":
                news.append(News("training_failed", name, event.detail))
            # the command's report, which includes the job's own
            elif event.event == "failed" and "label" in event.data:
                news.append(News("training_failed", name, f"{kind}: {event.detail}"))
        return news

    def samples_seen(self) -> list[tuple[EventName, int]]:
        """Return the events of trainings with the samples seen until then, if recorded."""
        found = []
        for event in self._of_stage("train"):
            if "samples_seen" in event.data:
                seen = ProgressData.of(event).samples_seen
                if seen is not None:
                    found.append((event.event, seen))
        return found

    def save_costs(self) -> list[tuple[float, float]]:
        """Return Unix time and cost in seconds of each checkpoint whose cost was measured."""
        costs = []
        for event in _named(self.events, "checkpoint"):
            cost_s = CheckpointData.of(event).cost_s
            if cost_s is not None:
                costs.append((event.time, cost_s))
        return costs

    def detached(self) -> Detached | None:
        """Return when the run was last detached, and for which stages."""
        last = _last_of(self.events, "detached")
        return Detached(last.time, DetachedData.of(last).until) if last else None

    def is_taken_over(self) -> bool:
        """Tell whether a command that stays has taken over from the controllers."""
        last = _last_of(self._of_stage(CONTROL), "detached", "ended")
        return last is not None and DetachedData.of(last).taken_over

    def stage_failure(self, plan_at: float = 0.0) -> Event | None:
        """Return a stage's failure, not that of one of its jobs, if it is the last event.

        Its `detail` is a sentence, which begins with the stage if a job could not be submitted. It
        no longer counts if `tula plan --write` has made the plan since, at Unix time `plan_at`.
        """
        last = self.events[-1] if self.events else None
        if last is None or last.event != "failed" or last.job_id or last.time < plan_at:
            return None
        return last

    def ended_stage(self) -> Stage | None:
        """Return the stage after which the last command ended as requested, if recorded."""
        last = next((event for event in reversed(self.events) if event.stage != CONTROL), None)
        if last is None or last.event != "ended" or last.job_id:
            return None
        return last.stage
