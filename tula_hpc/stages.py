"""The stages of a sweep: profile, plan, train, report. Each reads files and writes files, and skips what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.drift import describe_drift, in_force
from tula_hpc.errors import Failure, StageError
from tula_hpc.jobs import TrainJob
from tula_hpc.launch import Ended, Launcher, Submitted
from tula_hpc.progress import StageProgress, stage_progress
from tula_hpc.records import (
    Candidate,
    Configuration,
    Event,
    Measurement,
    Plan,
    RunDirectory,
    TrainResult,
    append_record,
    read_metrics,
    write_atomically,
)

RESULT_WAIT_S = 90.0  # NFS clients remember for up to a minute that a file was not there


class Sweep(NamedTuple):
    """One sweep: its frozen inputs and its run directory."""

    spec: SweepSpec
    cluster: ClusterSpec
    run: RunDirectory

    @property
    def launcher(self) -> Launcher:
        """Submits this sweep's jobs; the name tells sweeps of one user apart in squeue."""
        return Launcher(self.cluster, self.run, f"tula-{self.spec.name}")

    def on(self, partition: str) -> Sweep:
        """The sweep on one part of the cluster; see `ClusterSpec.part`."""
        return self._replace(cluster=self.cluster.part(partition))


def failed_measurement(
    cluster: ClusterSpec, configuration: Configuration, end: Ended, partition: str = ""
) -> Measurement:
    """A record for a configuration that a job died of without writing one."""
    return Measurement(
        status="oom" if end.failure.is_oom else "failed",
        failure=end.failure,
        detail=last_line(end.log_tail),
        nodes=configuration.nodes,
        workers_per_node=configuration.workers_per_node,
        local_batch=configuration.local_batch,
        exclusive=cluster.exclusive or cluster.executor == "local",
        job_id=end.job.job_id,
        finished_at=time.time(),
        partition=partition,
    )


def jobs_left(sweep: Sweep) -> list[tuple[str, Submitted]]:
    """Stage and job of every job of this sweep that is not over."""
    submitted = [event for event in sweep.run.events() if event.event == "submitted"]
    active = sweep.launcher.active([event.job_id for event in submitted])
    return [
        (event.stage, Submitted(event.job_id, sweep.run.root / str(event.data.get("folder", ""))))
        for event in submitted
        if event.job_id in active
    ]


def wait_for_earlier(sweep: Sweep, stage: str, tick: Callable[[str], None]) -> None:
    """Jobs that an interrupted run of the same command left behind are waited for, not submitted again."""
    jobs = [job for of_stage, job in jobs_left(sweep) if of_stage == stage]
    if jobs:
        sweep.launcher.wait(jobs, tick)


def plan_stage(sweep: Sweep) -> Plan:
    """Fit the models and choose; writes plan.json. A plan that is still good is kept, see `_plan_is_good`."""
    if _plan_is_good(sweep.run):
        return sweep.run.read_plan()
    from tula_hpc.analysis.plan import make_plan

    measured = sweep.run.measurements()
    footprints = sweep.run.footprints(sweep.cluster.part_names())
    plan = make_plan(sweep.spec, sweep.cluster, measured.records, measured.skipped, footprints)
    write_atomically(sweep.run.plan_file, plan.model_dump_json(by_alias=True, indent=1))
    return plan


def training_began(run: RunDirectory) -> bool:
    """Whether a training was submitted: from then on nothing is profiled or planned again."""
    return any(event.event == "submitted" and event.stage == "train" for event in run.events())


def _plan_is_good(run: RunDirectory) -> bool:
    """Training began with it, or nothing was measured since it was written (also by `analysis.plan --write`)."""
    if not run.plan_file.exists():
        return False
    written = run.plan_file.stat().st_mtime
    return training_began(run) or all(path.stat().st_mtime <= written for path in run.profile.glob("*.jsonl"))


def train_stage(sweep: Sweep, plan: Plan, label: str = "main") -> TrainResult:
    """Train at the chosen configuration; after OOM at the next smaller one, after a refused requeue again.

    Raises:
        StageError: Training ended without a result; the message says why and where the log is.
    """
    files = sweep.run.train(label)
    files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with stage_progress("train") as progress:
        wait_for_earlier(sweep, "train", _training_tick(sweep, label, progress))
        attempts = 0
        while not files.result_file.exists():
            candidate = next_candidate(plan, sweep.run, sweep.spec.training.max_fallbacks)
            end = _train_once(sweep, candidate, label, progress)
            attempts += 1
            await_result(sweep.run, files.result_file, end.job)
            if not files.result_file.exists():
                _after_failure(sweep, candidate, end, attempts)
        result = TrainResult.model_validate_json(files.result_file.read_bytes())
        progress.update(result.epochs, result.epochs, f"test accuracy {result.test_accuracy:.1%}")
    return result


def await_result(run: RunDirectory, result_file: Path, job: Submitted) -> None:
    """A job that says it finished left a result, even if a network file system shows it a minute later."""
    finished = any(event.event == "finished" and event.job_id == job.job_id for event in run.events())
    deadline = time.monotonic() + RESULT_WAIT_S
    while finished and not result_file.exists() and time.monotonic() < deadline:
        list(result_file.parent.iterdir())  # makes the client look again
        time.sleep(1.0)


def next_candidate(plan: Plan, run: RunDirectory, max_fallbacks: int) -> Candidate:
    """The chosen configuration, or, after OOM, the first of it and its fallbacks that is below every failed batch.

    Batches that ran out of memory on another part of the cluster do not count.

    Raises:
        StageError: No smaller batch is left, or there were more fallbacks than allowed.
    """
    records = run.measurements().records
    failed = {(m.partition, m.local_batch) for m in records if m.status == "oom" and m.stage == "train"}
    if not failed:
        return plan.chosen
    if len(failed) > max_fallbacks:
        raise StageError(f"train: out of memory {len(failed)} times; training.max_fallbacks = {max_fallbacks}")
    for candidate in (plan.chosen, *plan.fallbacks):
        if not any(part == candidate.partition and batch <= candidate.local_batch for part, batch in failed):
            return candidate
    smallest = min(batch for _, batch in failed)
    raise StageError(f"train: out of memory at local batch {smallest}, and plan.json has no smaller fallback")


def _train_once(sweep: Sweep, candidate: Candidate, label: str, progress: StageProgress) -> Ended:
    there = sweep.on(candidate.partition)
    spec, at = _as_planned(sweep.spec, candidate), candidate.configuration
    job = TrainJob(spec, there.cluster, at, sweep.run.root, label, candidate.partition)
    minutes = there.cluster.train_minutes
    submitted = there.launcher.submit([job], stage="train", nodes=candidate.nodes, minutes=minutes)
    tick = _training_tick(sweep, label, progress)
    tick(f"submitted as job {submitted[0].job_id} at {at}")
    return there.launcher.wait(submitted, tick)[0]


def _as_planned(spec: SweepSpec, candidate: Candidate) -> SweepSpec:
    """The sweep with the plan's checkpoint interval, where the user left it open."""
    if spec.training.checkpoint_minutes is not None or candidate.checkpoint_minutes is None:
        return spec
    training = spec.training.model_copy(update={"checkpoint_minutes": candidate.checkpoint_minutes})
    return spec.model_copy(update={"training": training})


def _training_tick(sweep: Sweep, label: str, progress: StageProgress) -> Callable[[str], None]:
    metrics_file = sweep.run.train(label).metrics_file

    def tick(text: str) -> None:
        metrics = read_metrics(metrics_file)
        done = metrics.steps[-1].epoch if metrics.steps else 0.0
        seen = f"; test accuracy {metrics.epochs[-1].test_accuracy:.1%}" if metrics.epochs else ""
        drift = describe_drift(sweep.run.events())
        progress.update(round(done, 2), sweep.spec.workload.epochs, f"epochs; {text}{seen}{drift}")

    return tick


def _after_failure(sweep: Sweep, candidate: Candidate, end: Ended, attempts: int) -> None:
    """Write down why training ended; return if another submission is worth it.

    Raises:
        StageError: It is not.
    """
    events = [event for event in sweep.run.events() if event.job_id == end.job.job_id]
    failure = training_failure(events, end)
    if failure.is_oom:
        if not any(event.event == "oom" for event in events):  # killed before it could say so
            _record_training_oom(sweep, in_force(candidate, events), end)
        sweep.run.log_event("fell_back", "train", detail=f"out of memory at {candidate.configuration}")
        return
    sweep.run.log_event("failed", "train", failure=failure, job_id=end.job.job_id, detail=last_line(end.log_tail))
    again = failure in (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)
    if not again or attempts > sweep.spec.training.max_requeues:
        raise StageError(f"train: {why([end], failure)}")


def training_failure(events: Sequence[Event], end: Ended) -> Failure:
    """What the job itself wrote down last, else what the scheduler says."""
    own = [event.failure for event in events if event.event == "oom" and event.failure]
    if own:
        return own[-1]
    stopped = bool(events) and "requeue refused" in events[-1].detail
    return Failure.PREEMPTED if stopped else end.failure


def _record_training_oom(sweep: Sweep, candidate: Candidate, end: Ended) -> None:
    cluster = sweep.on(candidate.partition).cluster
    record = failed_measurement(cluster, candidate.configuration, end, candidate.partition)
    append_record(sweep.run.profile / "train-main.jsonl", record.model_copy(update={"stage": "train"}))
    detail = str(candidate.configuration)
    sweep.run.log_event("oom", "train", failure=end.failure, job_id=end.job.job_id, detail=detail)


def report_stage(sweep: Sweep) -> list[Path]:
    """Write figures and report."""
    from tula_hpc.analysis.report import write_report

    return write_report(sweep.run)


def why(failures: Sequence[Ended], failure: Failure | None = None) -> str:
    """In words, with the end of the log: why the first of these jobs failed."""
    if not failures:
        return "see profile/*.jsonl for the reasons"
    first = failures[0]
    words = (failure or first.failure).value.replace("_", " ")
    log = f"\nlog: {first.log_file}" if first.log_file else ""
    return f"{words} in job {first.job.job_id}\n{first.log_tail}{log}"


def last_line(text: str) -> str:
    """The last line that says anything, for a table."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no log was written"
