"""State of a run as a whole, from the contents of its files and the scheduler's answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tula_hpc.analysis.models.profiles import is_out_of_memory
from tula_hpc.config import ClusterSpec, SweepSpec, sweep_for
from tula_hpc.records import MAIN_LABEL, Configuration, Measurement, is_usable
from tula_hpc.records.broken_hosts import broken_hosts
from tula_hpc.records.events import JobFailure
from tula_hpc.retry_policy import NextStep, study_policy
from tula_hpc.stages.context import most_profiled, profiling_left_s
from tula_hpc.status.cost import Accounted, bill_of, cost_so_far, promise_kept
from tula_hpc.status.jobs import Answer, JobPhase, JobStatus, in_phase, job_statuses, of_stage
from tula_hpc.status.run_files import Facts
from tula_hpc.status.run_status import (
    CommandStatus,
    DetachedStatus,
    PlanStatus,
    ProfileStatus,
    RunStatus,
    SchedulerStatus,
    Stand,
    State,
    StudyStatus,
)
from tula_hpc.status.trainings import TrainingStatus, training_statuses
from tula_hpc.status.verdict import (
    ALIVE,
    Parts,
    at_work_since,
    failure_words,
    is_at_work,
    readable,
    verdict,
)

# other states: 0
EXIT_CODES: Mapping[State, int] = {"failed": 1, "stuck": 1, "stopped": 3, "over": 3, "unknown": 4}
NO_ACCOUNT: Accounted = {}
# partitions and configurations
_Places = set[tuple[str, Configuration]]


def describe(
    facts: Facts, answer: Answer, rate_labels: Sequence[str] = (), accounted: Accounted = NO_ACCOUNT
) -> RunStatus:
    """Return the state of the whole run."""
    jobs = job_statuses(facts, answer)
    parts = _parts(facts, answer, jobs, rate_labels)
    state, words = verdict(parts)
    holder = facts.holder
    bill = bill_of(facts)
    return RunStatus(
        name=facts.spec.name if facts.spec else readable(facts.run.root.name),
        run_directory=readable(facts.run.root),
        asked_at=facts.now,
        state=state,
        words=words,
        exit_code=1 if parts.study and parts.study.failed else EXIT_CODES.get(state, 0),
        command=CommandStatus(
            process=holder.process, host=holder.host, alive=holder.alive, stopped=facts.is_stopped
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
        cost=cost_so_far(facts, jobs, accounted, bill),
        doubts=facts.doubts,
        avoided=broken_hosts(facts.history.events, facts.now) if facts.executor == "slurm" else [],
        promise=None if parts.study else promise_kept(bill),
    )


def _parts(
    facts: Facts, answer: Answer, jobs: Sequence[JobStatus], rate_labels: Sequence[str]
) -> Parts:
    trainings = training_statuses(facts, jobs)
    study = _study(facts, trainings, jobs, rate_labels)
    profile: ProfileStatus | None = None
    training: TrainingStatus | None = None
    if not facts.is_study:
        profile = _profile(facts, jobs)
        training = trainings.get(MAIN_LABEL)
    acting = _without_idle_guards(jobs)
    return Parts(facts, answer, acting, profile, training, study, _detached(facts, acting))


def _without_idle_guards(jobs: Sequence[JobStatus]) -> list[JobStatus]:
    open_phases = (*ALIVE, JobPhase.UNKNOWN)
    is_led = any(job.kind == "control" and job.phase in open_phases for job in jobs)
    idle = {JobPhase.FINISHED}
    if is_led:
        idle |= {JobPhase.WAITING, JobPhase.UNKNOWN}
    return [job for job in jobs if job.kind == job.stage or job.phase not in idle]


def _failures(facts: Facts, jobs: Sequence[JobStatus]) -> list[JobStatus]:
    """Return the failed jobs whose work no later job has done."""
    rows = facts.profiled
    known = _measured(row for row in rows if is_usable(row) or is_out_of_memory(row))
    lost = {row.job_id for row in rows if (row.partition, row.configuration) not in known}
    if not facts.plan:
        lost |= {job.job_id for job in jobs} - {row.job_id for row in rows}
    last = {(job.stage, job.label): job for job in jobs}
    done = {label for label, files in facts.trainings.items() if files.result is not None}
    return [
        job
        for job in in_phase(jobs, JobPhase.FAILED)
        if (job.job_id in lost if job.stage == "profile" else job is last[job.stage, job.label])
        and not (job.stage == "train" and job.label in done)
    ]


def _measured(rows: Iterable[Measurement]) -> _Places:
    return {(row.partition, row.configuration) for row in rows}


def _detached(facts: Facts, jobs: Sequence[JobStatus]) -> DetachedStatus | None:
    """Return the controllers; None if there were none, or if a command has taken over since."""
    detached = facts.history.detached()
    if detached is None or facts.history.is_taken_over():
        return None
    control = of_stage(jobs, "control")
    last = {"job_id": control[-1].job_id, "phase": control[-1].phase} if control else {}
    return DetachedStatus.model_validate(
        {"since": detached.since, "until": detached.until or "report", **last}
    )


def _profile(facts: Facts, jobs: Sequence[JobStatus]) -> ProfileStatus:
    good = _Places()
    out = _Places()
    bad = _Places()
    for row in facts.profiled:
        place = (row.partition, row.configuration)
        if is_usable(row):
            good.add(place)
        elif is_out_of_memory(row):
            out.add(place)
        elif row.status == "failed" and not row.is_left_out:
            bad.add(place)
    return ProfileStatus(
        stand=_profile_stand(facts, jobs, bool(good), bool(bad)),
        measured=len(good),
        out_of_memory=len(out - good),
        failed=len(bad - good - out),
        wanted=_wanted(facts.spec, facts.cluster),
        jobs=len(of_stage(jobs, "profile")),
        left_s=_profiling_left_s(facts, jobs),
    )


def _profiling_left_s(facts: Facts, jobs: Sequence[JobStatus]) -> float | None:
    phases = {job.job_id: job.phase for job in of_stage(jobs, "profile")}
    if JobPhase.RUNNING not in phases.values():
        return None
    submitted = facts.history.submissions("profile")
    going_on = [job for job in submitted if phases.get(job.job_id) in ALIVE]
    since = min(job.submitted_at for job in going_on)
    recent = [row for row in facts.profiled if row.finished_at >= since]
    wanted = {(job.partition or "", each) for job in going_on for each in job.configurations}
    left = len(wanted - _measured(recent))
    # jobs of the adaptive search also measure what the search proposes later
    if facts.spec is not None and facts.spec.search.mode == "adaptive":
        every = len(_measured(facts.profiled))
        left = max(left, (_wanted(facts.spec, facts.cluster) or 0) - every)
    return profiling_left_s(list(filter(is_usable, recent)), left, facts.now)


def _profile_stand(facts: Facts, all_jobs: Sequence[JobStatus], good: bool, bad: bool) -> Stand:
    if facts.plan is not None or facts.history.ended_stage() == "profile" or _went_on(facts):
        return "done"
    jobs = of_stage(all_jobs, "profile")
    phases = {job.phase for job in jobs}
    if phases & set(ALIVE):
        return "running" if JobPhase.RUNNING in phases else "waiting"
    if facts.holder.alive:
        return "running"
    if JobPhase.UNKNOWN in phases:
        return "unknown"
    if is_at_work(facts, all_jobs):
        return "waiting"
    stand: Stand = "stopped" if jobs or good else "none"
    if (bad or JobPhase.FAILED in phases) and not good:
        stand = "failed"
    return stand


def _went_on(facts: Facts) -> bool:
    failed = facts.history.stage_failure(facts.plan_at)
    return facts.history.reached("train") or (failed is not None and failed.stage == "plan")


def _wanted(spec: SweepSpec | None, cluster: ClusterSpec | None) -> int | None:
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
    """Return the last job of each training that will not be submitted again, by label."""
    last = {
        job.label: job for job in jobs if job.label in known and known[job.label].stand == "failed"
    }
    if facts.spec is None or not is_at_work(facts, jobs):
        return last
    policy = study_policy(facts.spec.training.max_requeues)
    since = at_work_since(facts, jobs)
    given_up = {}
    for label, job in last.items():
        own = facts.history.job(job.job_id).own_failure
        failure = JobFailure(job.failure, stop=own.stop if own else None)
        if policy.judge(facts.history, label, failure, since) is NextStep.GIVE_UP:
            given_up[label] = job
    return given_up
