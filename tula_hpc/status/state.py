"""State of a run as a whole, from its files and the scheduler's answer, without any reading."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from tula_hpc.analysis.models.profiles import is_out_of_memory
from tula_hpc.config import ClusterSpec, SweepSpec, sweep_for
from tula_hpc.formatting import plural
from tula_hpc.records import MAIN_LABEL, Plan, Record, is_usable
from tula_hpc.records.broken_hosts import BrokenHost, broken_hosts, first_line
from tula_hpc.records.events import JobFailure, StageFailure
from tula_hpc.retries import Verdict, study_policy
from tula_hpc.stages.context import most_profiled, profiling_left_s
from tula_hpc.stages.plan import why_no_model
from tula_hpc.status.cost import (
    Accounted,
    CostStatus,
    PromiseStatus,
    cost_so_far,
    promise_kept,
)
from tula_hpc.status.jobs import Answer, JobPhase, JobStatus, job_statuses
from tula_hpc.status.run_files import Facts
from tula_hpc.status.trainings import TrainingStatus, training_statuses

State = Literal["finished", "running", "waiting", "stuck", "over", "stopped", "failed", "unknown"]
Stand = Literal["none", "running", "waiting", "stopped", "failed", "done", "unknown"]
ALIVE = (JobPhase.RUNNING, JobPhase.WAITING)
# else 0
EXIT_CODES: Mapping[State, int] = {"failed": 1, "stuck": 1, "stopped": 3, "over": 3, "unknown": 4}
NO_ACCOUNT: Accounted = {}
AGAIN = "run the same command again"


class CommandStatus(Record):
    """The command that works on the run directory, or the last one that did."""

    # 0: unknown
    process: int = 0
    # "": unknown
    host: str = ""
    # None: cannot be seen from this machine
    alive: bool | None = False
    # as by Ctrl-Z
    stopped: bool = False


class DetachedStatus(Record):
    """Controller jobs that carry the sweep on."""

    # Unix time
    since: float
    # last stage
    until: str
    # of the last controller job, or of its guard where that has to act
    job_id: str = ""
    # its phase
    phase: JobPhase | None = None


class SchedulerStatus(Record):
    """Answer of the scheduler."""

    # slurm, local, "" where the cluster file cannot be read
    executor: str
    # True also where there was nothing to ask
    answered: bool
    # why it did not answer
    words: str = ""


class ProfileStatus(Record):
    """State of the first stage."""

    stand: Stand
    # configurations
    measured: int
    out_of_memory: int
    # that nothing but failures are known of
    failed: int
    # as many as the search may measure; None: it decides by itself
    wanted: int | None = None
    # submitted
    jobs: int
    # an estimate: what those jobs still have to measure, at the pace so far; None where none runs
    left_s: float | None = None


class PlanStatus(Record):
    """Chosen configuration."""

    nodes: int
    workers_per_node: int
    local_batch: int
    global_batch: int
    # forward passes in which a script takes the local batch
    accumulation: int = 1
    partition: str
    epoch_time_s: float
    train_time_s: float
    cost: float
    currency: str
    reason: str
    # what the cost is for; None in plans that do not have it
    wall_time_s: float | None = None
    # ends of 90 % intervals, by field
    interval_90: dict[str, tuple[float, float]] = Field(default={})

    def with_interval(self, field: str) -> tuple[float, float, float]:
        """Return a field and the ends of its interval; itself where there is none."""
        value = getattr(self, field)
        return (value, *self.interval_90.get(field, (value, value)))

    @classmethod
    def of(cls, plan: Plan) -> PlanStatus:
        """Summarise a plan."""
        names = set(cls.model_fields) - {"reason"}
        return cls(reason=plan.reason, **plan.chosen.model_dump(include=names))


class StudyStatus(Record):
    """Trainings of a study, and those that chose its learning rates."""

    cells: int
    finished: int
    diverged: int
    running: int
    waiting: int
    failed: int
    # none of these, or to be tried again
    left: int
    # trainings that choose the learning rates, not among the cells
    rates: int
    rates_finished: int
    # counted in `failed`, too
    rates_failed: int
    # why, by label
    failures: dict[str, str]
    # those that run
    under_way: list[TrainingStatus]


class RunStatus(Record):
    """State of a run as `status` shows it; `--json` prints it."""

    schema_version: Literal[1] = 1
    name: str
    run_directory: str
    # Unix time
    asked_at: float
    state: State
    # what that means here, and what to do
    words: str
    exit_code: int
    command: CommandStatus
    detached: DetachedStatus | None
    scheduler: SchedulerStatus
    # None: the run is a study
    profile: ProfileStatus | None
    plan: PlanStatus | None
    # of the plan
    training: TrainingStatus | None
    study: StudyStatus | None
    report: bool
    # it is older than a measurement, a result or the plan
    report_stale: bool
    jobs: list[JobStatus]
    # those of them that nothing has made up for
    failures: list[JobStatus]
    cost: CostStatus
    # what could not be read
    doubts: list[str]
    # hosts that its jobs are kept off
    avoided: list[BrokenHost] = Field(default=[])
    # of the training, once it has ended
    promise: PromiseStatus | None = None


class _Parts(NamedTuple):
    """Everything from which the state is derived."""

    facts: Facts
    answer: Answer
    jobs: Sequence[JobStatus]
    profile: ProfileStatus | None
    training: TrainingStatus | None
    study: StudyStatus | None
    detached: DetachedStatus | None

    def has(self, phase: JobPhase) -> bool:
        """Tell whether a job is in this phase."""
        return any(job.phase is phase for job in self.jobs)

    @property
    def is_unknown(self) -> bool:
        """Tell whether jobs may be on their way while the scheduler could not be asked."""
        return self.has(JobPhase.UNKNOWN) or (
            bool(self.facts.cut_off) and self.answer.active is None
        )

    @property
    def at_work(self) -> bool:
        """Tell whether something will act when jobs end."""
        return _is_at_work(self.facts, self.jobs)


def describe(
    facts: Facts, answer: Answer, rate_labels: Sequence[str] = (), accounted: Accounted = NO_ACCOUNT
) -> RunStatus:
    """Return the whole state.

    Args:
        facts: The files.
        answer: Of the scheduler.
        rate_labels: Of the trainings that choose a study's rates; none for other runs.
        accounted: Runs of its jobs as accounting knows them.
    """
    jobs = job_statuses(facts, answer)
    parts = _parts(facts, answer, jobs, rate_labels)
    state, words = verdict(parts)
    holder = facts.holder
    return RunStatus(
        name=facts.spec.name if facts.spec else _readable(facts.run.root.name),
        run_directory=_readable(facts.run.root),
        asked_at=facts.now,
        state=state,
        words=words,
        exit_code=1 if parts.study and parts.study.failed else EXIT_CODES.get(state, 0),
        command=CommandStatus(
            process=holder.process,
            host=holder.host,
            alive=holder.alive,
            stopped=facts.is_stopped,
        ),
        detached=parts.detached,
        scheduler=SchedulerStatus(
            executor=facts.executor, answered=answer.active is not None, words=answer.words
        ),
        profile=parts.profile,
        plan=PlanStatus.of(facts.plan) if facts.plan else None,
        training=parts.training,
        study=parts.study,
        report=facts.has_report,
        report_stale=facts.is_report_stale,
        jobs=jobs,
        failures=_failures(facts, jobs),
        cost=cost_so_far(facts, jobs, accounted),
        doubts=facts.doubts,
        avoided=broken_hosts(facts.history.events, facts.now) if facts.executor == "slurm" else [],
        promise=None if parts.study else promise_kept(facts),
    )


def _parts(
    facts: Facts, answer: Answer, jobs: Sequence[JobStatus], rate_labels: Sequence[str]
) -> _Parts:
    trainings = training_statuses(facts, jobs)
    study = _study(facts, trainings, jobs, rate_labels)
    profile: ProfileStatus | None = None
    training: TrainingStatus | None = None
    if study is None:
        profile = _profile(facts, jobs)
        training = trainings.get(MAIN_LABEL)
    acting = _without_idle_guards(jobs)
    return _Parts(facts, answer, acting, profile, training, study, _detached(facts, acting))


def _without_idle_guards(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Leave out guards of controllers that need not act."""
    open_phases = (*ALIVE, JobPhase.UNKNOWN)
    is_led = any(job.kind == "control" and job.phase in open_phases for job in jobs)
    idle = {JobPhase.FINISHED}
    if is_led:
        idle |= {JobPhase.WAITING, JobPhase.UNKNOWN}
    return [job for job in jobs if job.kind == job.stage or job.phase not in idle]


def _failures(facts: Facts, jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Return the failed jobs whose work was not done by a later one."""
    rows = [row for row in facts.measurements if row.stage == "profile"]
    known = {
        (row.partition, row.configuration)
        for row in rows
        if is_usable(row) or is_out_of_memory(row)
    }
    lost = {row.job_id for row in rows if (row.partition, row.configuration) not in known}
    if not facts.plan:
        lost |= {job.job_id for job in jobs} - {row.job_id for row in rows}
    last = {(job.stage, job.label): job for job in jobs}
    done = {label for label, files in facts.trainings.items() if files.result is not None}
    failed = [job for job in jobs if job.phase is JobPhase.FAILED]
    return [
        job
        for job in failed
        if (job.job_id in lost if job.stage == "profile" else job is last[job.stage, job.label])
        and not (job.stage == "train" and job.label in done)
    ]


def _is_at_work(facts: Facts, jobs: Sequence[JobStatus]) -> bool:
    return bool(facts.holder.alive) or any(
        job.stage == "control" and job.phase in ALIVE for job in jobs
    )


def _detached(facts: Facts, jobs: Sequence[JobStatus]) -> DetachedStatus | None:
    """Return the controllers, None also when a command that stays has taken over since."""
    detached = facts.history.detached()
    if detached is None or facts.history.is_taken_over():
        return None
    control = [job for job in jobs if job.stage == "control"]
    last = {"job_id": control[-1].job_id, "phase": control[-1].phase} if control else {}
    return DetachedStatus.model_validate(
        {"since": detached.since, "until": detached.until or "report", **last}
    )


def _profile(facts: Facts, jobs: Sequence[JobStatus]) -> ProfileStatus:
    rows = [row for row in facts.measurements if row.stage == "profile"]
    good, out, bad = (
        {(row.partition, row.configuration) for row in rows if kind(row)}
        for kind in (
            is_usable,
            is_out_of_memory,
            lambda row: row.status == "failed" and not is_out_of_memory(row),
        )
    )
    return ProfileStatus(
        stand=_profile_stand(facts, jobs, bool(good), bool(bad)),
        measured=len(good),
        out_of_memory=len(out - good),
        failed=len(bad - good - out),
        wanted=_wanted(facts.spec, facts.cluster),
        jobs=sum(job.stage == "profile" for job in jobs),
        left_s=_profiling_left_s(facts, jobs),
    )


def _profiling_left_s(facts: Facts, jobs: Sequence[JobStatus]) -> float | None:
    phases = {job.job_id: job.phase for job in jobs if job.stage == "profile"}
    if JobPhase.RUNNING not in phases.values():
        return None
    submitted = facts.history.submissions("profile")
    going_on = [job for job in submitted if phases.get(job.job_id) in ALIVE]
    since = min(job.submitted_at for job in going_on)
    rows = [row for row in facts.measurements if row.stage == "profile"]
    recent = [row for row in rows if row.finished_at >= since]
    known = {(row.partition, row.configuration) for row in recent}
    wanted = {(job.partition or "", each) for job in going_on for each in job.configurations}
    left = len(wanted - known)
    # a job of the adaptive search asks for more
    if facts.spec is not None and facts.spec.search.mode == "adaptive":
        every = {(row.partition, row.configuration) for row in rows}
        left = max(left, (_wanted(facts.spec, facts.cluster) or 0) - len(every))
    return profiling_left_s(list(filter(is_usable, recent)), left, facts.now)


def _profile_stand(facts: Facts, all_jobs: Sequence[JobStatus], good: bool, bad: bool) -> Stand:
    if facts.plan is not None or facts.history.ended_stage() == "profile" or _went_on(facts):
        return "done"
    jobs = [job for job in all_jobs if job.stage == "profile"]
    phases = {job.phase for job in jobs}
    if phases & set(ALIVE):
        return "running" if JobPhase.RUNNING in phases else "waiting"
    if facts.holder.alive:
        return "running"
    if JobPhase.UNKNOWN in phases:
        return "unknown"
    if _is_at_work(facts, all_jobs):
        return "waiting"
    stand: Stand = "stopped" if jobs or good else "none"
    if (bad or JobPhase.FAILED in phases) and not good:
        stand = "failed"
    return stand


def _went_on(facts: Facts) -> bool:
    failed = _failed_stage(facts)
    return facts.history.reached("train") or (failed is not None and failed.stage == "plan")


def _failed_stage(facts: Facts) -> StageFailure | None:
    """Return why the last command could not plan or submit, if that is why it ended."""
    failure = facts.history.stage_failure()
    # a later plan: planned after all, by `tula plan --write`
    if failure is not None and facts.plan_at <= failure.time:
        return failure
    return None


def _wanted(spec: SweepSpec | None, cluster: ClusterSpec | None) -> int | None:
    """Return an upper bound of the measured configurations; see `most_profiled`."""
    if spec is None or cluster is None or spec.search.mode == "partial":
        return None
    own = [(sweep_for(spec, part), part.workers_per_node) for part in cluster.parts()]
    return sum(most_profiled(sweep, workers) or 0 for sweep, workers in own if sweep is not None)


def _study(
    facts: Facts,
    trainings: Mapping[str, TrainingStatus],
    jobs: Sequence[JobStatus],
    rate_labels: Sequence[str],
) -> StudyStatus | None:
    if facts.spec is None or facts.spec.study is None:
        return None
    cells = [cell.label for cell in facts.spec.study.cells()]
    none = TrainingStatus(label="")
    known = {label: trainings.get(label, none) for label in (*rate_labels, *cells)}
    failed = _failed_for_good(facts, known, jobs)
    stands = Counter(known[label].stand for label in cells if label not in failed)
    ended = stands["finished"] + stands["diverged"]
    return StudyStatus(
        cells=len(cells),
        finished=stands["finished"],
        diverged=stands["diverged"],
        running=stands["running"],
        waiting=stands["waiting"],
        failed=len(failed),
        left=stands.total() - ended - stands["running"] - stands["waiting"],
        rates=len(rate_labels),
        rates_finished=sum(known[label].stand in ("finished", "diverged") for label in rate_labels),
        rates_failed=sum(label in failed for label in rate_labels),
        failures={label: failure_words(job) for label, job in failed.items()},
        under_way=[training for training in known.values() if training.stand == "running"],
    )


def _failed_for_good(
    facts: Facts, known: Mapping[str, TrainingStatus], jobs: Sequence[JobStatus]
) -> dict[str, JobStatus]:
    """Return the last job of each training that is not submitted again, by label."""
    last = {
        job.label: job for job in jobs if job.label in known and known[job.label].stand == "failed"
    }
    if facts.spec is None or not _is_at_work(facts, jobs):
        return last
    policy = study_policy(facts.spec.training.max_requeues)
    given_up = {}
    for label, job in last.items():
        own = facts.history.job(job.job_id).own_failure
        failure = JobFailure(job.failure, stop=own.stop if own else None)
        if policy.judge(facts.history, label, failure) is Verdict.GIVE_UP:
            given_up[label] = job
    return given_up


def failure_words(job: JobStatus, unknown: str = "ended") -> str:
    """Return the failure of a job and its detail, or `unknown` where the failure has no name."""
    kind = unknown
    if job.failure:
        kind = job.failure.value.replace("_", " ")
    if not job.detail:
        return kind
    return f"{kind}: {job.detail}"


def _readable(path: str | os.PathLike[str]) -> str:
    return os.fsencode(path).decode(errors="replace")


def verdict(parts: _Parts) -> tuple[State, str]:
    """Return the state, and its explanation."""
    by_files = (_obstructed, _finished, _stuck, _going_on, _full)
    for judge in (*by_files, _stage_failed, _failed, _left_alone):
        found = judge(parts)
        if found is not None:
            return found
    return "stopped", _stopped_words(parts)


StateAndText = tuple[State, str]


def _obstructed(parts: _Parts) -> StateAndText | None:
    """Report a file that the next command will refuse; one at work has read it before."""
    if not parts.facts.obstacle or parts.at_work:
        return None
    return "failed", parts.facts.obstacle


def _finished(parts: _Parts) -> StateAndText | None:
    study, training = parts.study, parts.training
    ended = study is not None and study.finished + study.diverged == study.cells
    if not ended and not (training is not None and training.stand in ("finished", "diverged")):
        return _finished_early(parts)
    if parts.at_work:
        return "running", "everything is trained; the report is being written"
    if not parts.facts.has_report:
        return "finished", f"everything is trained; there is no report yet: {AGAIN}"
    if parts.facts.is_report_stale:
        return "finished", f"everything is trained; the report is older than that: {AGAIN}"
    if training is not None and (words := why_no_model(parts.facts.run, parts.facts.spec)):
        return "finished", words
    return "finished", "everything is done"


def _finished_early(parts: _Parts) -> StateAndText | None:
    """Recognise a sweep that was asked to end before training, if that is on record."""
    if parts.at_work or parts.training is not None:
        return None
    stage = parts.facts.history.ended_stage()
    if stage in ("profile", "plan") and parts.facts.damaged_after:
        named = next(each for each in parts.facts.doubts if ", line " in each)
        return "stopped", f"{named}: {AGAIN} to measure it again"
    if parts.facts.plan is not None and (
        stage == "plan" or (parts.detached and parts.detached.until == "plan")
    ):
        return "finished", "planned, which was to be the last stage"
    if stage == "profile":
        return "finished", "profiled, which was to be the last stage"
    return None


def _stuck(parts: _Parts) -> StateAndText | None:
    stuck = [job for job in parts.jobs if job.stuck]
    if not stuck or parts.has(JobPhase.RUNNING):
        return None
    return (
        "stuck",
        f"job {stuck[0].job_id} waits until somebody acts: {stuck[0].reason}",
    )


def _going_on(parts: _Parts) -> StateAndText | None:
    stages = [
        job.stage for job in parts.jobs if job.phase is JobPhase.RUNNING and job.stage != "control"
    ]
    if stages:
        verb = {"profile": "profiling", "train": "training"}.get(stages[-1], stages[-1])
        if parts.at_work:
            return "running", verb
        return "running", f"{verb}; {_no_command(parts, 'its end')}"
    if parts.facts.holder.alive or any(
        j.stage == "control" and j.phase is JobPhase.RUNNING for j in parts.jobs
    ):
        return "running", _command_words(parts)
    waiting = [
        job for job in parts.jobs if job.phase is JobPhase.WAITING and job.stage != "control"
    ]
    if waiting:
        words = f"jobs of the stage {waiting[-1].stage} wait in the queue"
        if not parts.at_work:
            words += f"; {_no_command(parts, 'them')}"
        return "waiting", words
    if parts.at_work and parts.detached is not None:
        return "waiting", f"controller job {parts.detached.job_id} waits to act on what is over"
    return None


def _no_command(parts: _Parts, what: str) -> str:
    holder = parts.facts.holder
    if holder.alive is None:
        return f"{holder}, which is not seen from here, may wait for {what}; if not, {AGAIN}"
    return f"no command waits for {what}: {AGAIN}, now or later"


def _command_words(parts: _Parts) -> str:
    if parts.has(JobPhase.WAITING):
        return "a command waits for jobs that wait"
    if parts.has(JobPhase.UNKNOWN):
        return "a command is at work; what its jobs do is not known here"
    return "a command is at work, and no job: it plans, submits or writes the report"


def _full(parts: _Parts) -> StateAndText | None:
    """Report a full disk, on which the next command would end, too."""
    if not parts.facts.is_full or parts.is_unknown:
        return None
    root = _readable(parts.facts.run.root)
    return "failed", f"{root}: no space is left; make space there and {AGAIN}"


def _stage_failed(parts: _Parts) -> StateAndText | None:
    """Report the failure of a stage as a whole; none of its jobs runs or waits by then."""
    event = _failed_stage(parts.facts)
    if event is None or not event.detail.strip() or parts.is_unknown:
        return None
    why = first_line(event.detail)
    # the errors of planning begin with the stage, the scheduler's do not
    if event.stage != "plan":
        why = f"{event.stage}: {why}"
    return "failed", f"{why}; fix the cause and {AGAIN}"


def _failed(parts: _Parts) -> StateAndText | None:
    control = next((job for job in reversed(parts.jobs) if job.stage == "control"), None)
    if control is not None and control.phase is JobPhase.FAILED and control is parts.jobs[-1]:
        return (
            "failed",
            f"controller job {control.job_id}: {control.detail or 'no reason on record'}",
        )
    if parts.is_unknown or parts.has(JobPhase.OVER):
        return None
    if parts.profile is not None and parts.profile.stand == "failed":
        return "failed", "nothing could be measured; fix the cause and run the same command again"
    training, study = parts.training, parts.study
    if training is not None and training.stand == "failed" and not _falls_back(parts):
        last = next(job for job in reversed(parts.jobs) if job.stage == "train")
        return "failed", f"training: {failure_words(last)}"
    if study is not None and study.failed and (study.rates_failed or not study.left):
        return (
            "failed",
            f"{plural(study.failed, 'training')} without a result; fix the cause and {AGAIN}",
        )
    return None


def _falls_back(parts: _Parts) -> bool:
    return parts.facts.history.is_falling_back()


def _left_alone(parts: _Parts) -> StateAndText | None:
    over = [job.job_id for job in parts.jobs if job.phase is JobPhase.OVER]
    if over:
        what = f"job {over[0]} is over" if len(over) == 1 else f"{len(over)} jobs are over"
        return "over", f"{what}, not yet acted on: {AGAIN}"
    if parts.is_unknown:
        return (
            "unknown",
            "jobs were submitted; whether they wait, run or are gone cannot be seen from here",
        )
    return None


def _stopped_words(parts: _Parts) -> str:
    holder = parts.facts.holder
    unless = ""
    if holder.alive is None:
        unless = f", unless {holder} still is, which cannot be seen from here"
    if parts.facts.cut_off:
        unless += ", unless a submission that was cut off came through"
    if parts.study is not None:
        so_far = f"{parts.study.finished + parts.study.diverged} of {parts.study.cells} trainings have a result"
    elif parts.training is not None:
        so_far = "training has begun"
    elif parts.facts.plan is not None:
        so_far = "planned"
    elif parts.profile is not None and parts.profile.measured:
        so_far = f"{plural(parts.profile.measured, 'configuration')} measured"
    else:
        so_far = "nothing is measured"
    return f"{so_far}; nothing is at work{unless}: {AGAIN} to go on"
