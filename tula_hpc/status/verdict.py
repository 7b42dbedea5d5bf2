"""State of a run as a whole and what to do, from the state of its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import command_line, first_line, plural
from tula_hpc.stages.plan import why_no_model
from tula_hpc.status.jobs import Answer, JobPhase, JobStatus, in_phase, of_stage, work_in
from tula_hpc.status.run_files import Facts
from tula_hpc.status.run_status import DetachedStatus, ProfileStatus, State, StudyStatus
from tula_hpc.status.trainings import TrainingStatus

ALIVE = (JobPhase.RUNNING, JobPhase.WAITING)
AGAIN = "run the same command again"
StateAndText = tuple[State, str]


class Parts(NamedTuple):
    """Everything that the state is derived from."""

    facts: Facts
    answer: Answer
    jobs: Sequence[JobStatus]
    profile: ProfileStatus | None
    training: TrainingStatus | None
    study: StudyStatus | None
    detached: DetachedStatus | None

    def has(self, phase: JobPhase) -> bool:
        """Tell whether a job is in this phase."""
        return bool(in_phase(self.jobs, phase))

    @property
    def is_unknown(self) -> bool:
        """Tell whether jobs may wait or run, but the scheduler could not be asked."""
        return self.has(JobPhase.UNKNOWN) or (
            bool(self.facts.cut_off) and self.answer.active is None
        )

    @property
    def at_work(self) -> bool:
        """Tell whether something will act when jobs end."""
        return is_at_work(self.facts, self.jobs)


def verdict(parts: Parts) -> tuple[State, str]:
    """Return the state and its explanation."""
    by_files = (_obstructed, _finished, _stuck, _going_on, _full)
    for judge in (*by_files, _stage_failed, _failed, _over_or_unknown):
        found = judge(parts)
        if found is not None:
            return found
    return "stopped", _stopped_words(parts)


def is_at_work(facts: Facts, jobs: Sequence[JobStatus]) -> bool:
    """Tell whether a command or controller will act when jobs end."""
    return bool(facts.holder.alive) or _is_controlled(jobs)


def at_work_since(facts: Facts, jobs: Sequence[JobStatus]) -> float:
    """Return the Unix time since which the present command, or the controllers, have worked."""
    detached = facts.history.detached()
    # each controller takes the lock anew, so the lock's time is no use
    if detached is not None and _is_controlled(jobs):
        return detached.since
    return facts.holder.since


def _is_controlled(jobs: Sequence[JobStatus]) -> bool:
    return any(job.stage == "control" and job.phase in ALIVE for job in jobs)


def failure_words(job: JobStatus, unknown: str = "ended") -> str:
    """Return a job's failure and its detail; `unknown` stands for a failure without a name."""
    kind = unknown
    if job.failure:
        kind = job.failure.value.replace("_", " ")
    if not job.detail:
        return kind
    # such a detail is a whole sentence that says what is wrong, or an exception
    if job.failure and (job.failure.is_the_users or job.failure is Failure.BUG):
        return job.detail
    return f"{kind}: {job.detail}"


def readable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that can be printed and written as JSON."""
    return os.fsencode(path).decode(errors="replace")


def _obstructed(parts: Parts) -> StateAndText | None:
    """Report a file that the next command will refuse; a command at work has already read it."""
    if not parts.facts.obstacle or parts.at_work:
        return None
    if _is_trained(parts):
        return "finished", f"everything is trained; {parts.facts.obstacle}"
    return "failed", parts.facts.obstacle


def _is_trained(parts: Parts) -> bool:
    study, training = parts.study, parts.training
    if study is not None and study.finished + study.diverged == study.cells:
        return True
    return training is not None and training.stand in ("finished", "diverged")


def _finished(parts: Parts) -> StateAndText | None:
    training = parts.training
    if not _is_trained(parts):
        return _finished_early(parts)
    if parts.at_work:
        return "running", "everything is trained; the report is being written"
    if training is not None and (words := why_no_model(parts.facts.run, parts.facts.spec)):
        return "failed", words
    # not the sweep's command, which may have been asked to end before the report
    report = command_line("report", readable(parts.facts.run.root))
    if not parts.facts.has_report:
        return "finished", f"everything is trained; there is no report yet: {report} writes it"
    if parts.facts.is_report_stale:
        words = f"the report is older than its data: {report} writes it again"
        return "finished", f"everything is trained; {words}"
    return "finished", "everything is done"


def _finished_early(parts: Parts) -> StateAndText | None:
    """Recognize a sweep that was asked to end before training, if that was recorded."""
    if parts.at_work or parts.training is not None:
        return None
    stage = parts.facts.history.ended_stage()
    if stage in ("profile", "plan") and parts.facts.damaged_after:
        return "stopped", f"{parts.facts.damaged_after}: {AGAIN} to measure it again"
    if parts.facts.plan is not None and (
        stage == "plan" or (parts.detached and parts.detached.until == "plan")
    ):
        return "finished", "planned, which was to be the last stage"
    if stage == "profile":
        return "finished", "profiled, which was to be the last stage"
    return None


def _stuck(parts: Parts) -> StateAndText | None:
    stuck = [job for job in parts.jobs if job.stuck]
    if not stuck or parts.has(JobPhase.RUNNING):
        return None
    return "stuck", f"job {stuck[0].job_id} waits until somebody acts: {stuck[0].reason}"


def _going_on(parts: Parts) -> StateAndText | None:
    if running := work_in(parts.jobs, JobPhase.RUNNING):
        stage = running[-1].stage
        verb = {"profile": "profiling", "train": "training"}.get(stage, stage)
        if parts.at_work:
            return "running", verb
        return "running", f"{verb}; {_no_command(parts, 'its end')}"
    # a job that runs is a controller
    if parts.facts.holder.alive or parts.has(JobPhase.RUNNING):
        return "running", _command_words(parts)
    if waiting := work_in(parts.jobs, JobPhase.WAITING):
        words = f"jobs of the stage {waiting[-1].stage} wait in the queue"
        if not parts.at_work:
            words += f"; {_no_command(parts, 'them')}"
        return "waiting", words
    if parts.at_work and parts.detached is not None:
        return "waiting", f"controller job {parts.detached.job_id} waits to handle ended jobs"
    return None


def _no_command(parts: Parts, what: str) -> str:
    holder = parts.facts.holder
    controls = of_stage(parts.jobs, "control")
    if controls and all(job.phase is JobPhase.OVER for job in controls):
        return f"its controller jobs are over, and no command waits for {what}: {AGAIN}"
    if holder.alive is None:
        return f"{holder}, which is not seen from here, may wait for {what}; if not, {AGAIN}"
    return f"no command waits for {what}: {AGAIN}, now or later"


def _command_words(parts: Parts) -> str:
    if parts.facts.is_stopped:
        return "a command holds the run but is stopped, as by Ctrl-Z: nothing goes on until it does"
    if parts.has(JobPhase.WAITING):
        return "a command waits for jobs in the queue"
    if parts.has(JobPhase.UNKNOWN):
        return "a command is at work; the state of its jobs is unknown here"
    return "a command is at work, but no job: it is planning, submitting or writing the report"


def _full(parts: Parts) -> StateAndText | None:
    """Report a full disk, which would end the next command, too."""
    if not parts.facts.is_full or parts.is_unknown:
        return None
    root = readable(parts.facts.run.root)
    return "failed", f"{root}: no space is left; make space there and {AGAIN}"


def _stage_failed(parts: Parts) -> StateAndText | None:
    """Report the failure of a stage as a whole, whose jobs neither run nor wait by then."""
    event = parts.facts.history.stage_failure(parts.facts.plan_at)
    if event is None or not event.detail.strip() or parts.is_unknown:
        return None
    why = first_line(event.detail).rstrip(".")
    return "failed", f"{why}; fix the cause and {AGAIN}"


def _failed(parts: Parts) -> StateAndText | None:
    last = parts.jobs[-1] if parts.jobs else None
    if last is not None and last.stage == "control" and last.phase is JobPhase.FAILED:
        why = last.detail or "no reason on record"
        return "failed", f"controller job {last.job_id}: {why}"
    if parts.is_unknown or parts.has(JobPhase.OVER):
        return None
    if parts.profile is not None and parts.profile.stand == "failed":
        return "failed", "nothing could be measured; fix the cause and run the same command again"
    training, study = parts.training, parts.study
    falls_back = parts.facts.history.is_falling_back()
    if training is not None and training.stand == "failed" and not falls_back:
        last = of_stage(parts.jobs, "train")[-1]
        why = failure_words(last).rstrip(".")
        return "failed", f"training: {why}; {_trained_again(training, last)}"
    if study is not None and study.failed and (study.rates_failed or not study.left):
        failed = f"{plural(study.failed, 'training')} without a result"
        return "failed", f"{failed}; fix the cause and {AGAIN}"
    return None


def _trained_again(training: TrainingStatus, last: JobStatus) -> str:
    if last.failure is Failure.DIVERGED and training.epoch > 0:
        return f"fix the cause, move train/ of the run away, and {AGAIN}"
    mend = "" if last.failure is Failure.CANCELLED else "fix the cause and "
    how = (
        ", which trains from the start" if training.starts_over else " to go on from the last save"
    )
    return f"{mend}{AGAIN}{how}"


def _over_or_unknown(parts: Parts) -> StateAndText | None:
    over = in_phase(parts.jobs, JobPhase.OVER)
    if over:
        what = f"job {over[0].job_id} is over" if len(over) == 1 else f"{len(over)} jobs are over"
        return "over", f"{what}, not yet acted on: {AGAIN}"
    if parts.is_unknown:
        return (
            "unknown",
            "jobs were submitted; whether they wait, run or are gone cannot be seen from here",
        )
    return None


def _stopped_words(parts: Parts) -> str:
    holder = parts.facts.holder
    unless = ""
    if holder.alive is None:
        unless = f", unless {holder} still is, which cannot be seen from here"
    if parts.facts.cut_off:
        unless += ", unless a submission that was cut off succeeded"
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
