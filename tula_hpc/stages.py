"""The stages of a sweep: profile, plan, train, report. Each reads files and writes files, and skips what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.errors import Failure, StageError
from tula_hpc.jobs import ProfileJob, TrainJob
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
    read_records,
    with_rank_files,
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

    @property
    def packed(self) -> bool:
        """Whether one job measures all configurations of one N."""
        pack = self.spec.search.pack
        return pack == "always" or (pack == "auto" and self.cluster.executor == "local")


class Batch(NamedTuple):
    """Configurations of one N on their way through the scheduler: one output file and job per group."""

    groups: list[tuple[Configuration, ...]]
    outputs: list[Path]
    jobs: list[Submitted]


def profile_stage(sweep: Sweep) -> None:
    """Measure what the search proposes until it proposes nothing more.

    Raises:
        StageError: Nothing could be measured at all; the message holds the first failure's log.
    """
    from tula_hpc.analysis.search import propose

    with stage_progress("profile") as progress:
        _wait_for_earlier(sweep, "profile", lambda text: progress.update(0, 1, f"jobs submitted before: {text}"))
        failures: list[Ended] = []
        started = time.time()
        while proposed := propose(sweep.spec, sweep.cluster, _settled(sweep.run, started)):
            failures += _profile_round(sweep, proposed, progress)
        measured = sweep.run.measurements().records
        progress.update(len(measured), len(measured), f"{len(measured)} measurements")
    if not any(m.status == "ok" for m in measured):
        raise StageError(f"profile: nothing could be measured; {_why(failures)}")


def _settled(run: RunDirectory, started: float) -> list[Measurement]:
    """Measurements that count for the search: a failure of an earlier run of the command may have been mended since."""
    return [m for m in run.measurements().records if m.status != "failed" or m.finished_at >= started]


def _profile_round(sweep: Sweep, proposed: Sequence[Configuration], progress: StageProgress) -> list[Ended]:
    """Submit one array per N, wait, and write a record for every configuration that left none.

    Where jobs would disturb each other only the first array or job is submitted; the search then proposes anew, knowing
    more (a batch that ran out of memory is not tried on more nodes).
    """
    total = len(sweep.run.measurements().records) + len(proposed)
    batches = [_submit_profiles(sweep, configurations) for configurations in _first_wave(sweep, proposed)]
    jobs = [job for batch in batches for job in batch.jobs]

    def tick(text: str) -> None:
        progress.update(len(sweep.run.measurements().records), total, text)

    return _record_failures(sweep, batches, sweep.launcher.wait(jobs, tick))


def _first_wave(sweep: Sweep, proposed: Sequence[Configuration]) -> list[list[Configuration]]:
    """What is submitted together, by cluster size."""
    by_nodes = [list(group) for _, group in groupby(sorted(proposed), key=lambda c: c.nodes)]
    if sweep.cluster.executor == "local" and not sweep.packed:
        return [by_nodes[0][:1]]
    if sweep.cluster.executor == "local" or sweep.cluster.array_parallelism == 1:
        return by_nodes[:1]
    return by_nodes


def _submit_profiles(sweep: Sweep, configurations: Sequence[Configuration]) -> Batch:
    alone: list[tuple[Configuration, ...]] = [(configuration,) for configuration in configurations]
    groups = [tuple(configurations)] if sweep.packed else alone
    outputs = [_new_output(sweep.run, group) for group in groups]
    jobs = [ProfileJob(sweep.spec, sweep.cluster, group, out) for group, out in zip(groups, outputs, strict=True)]
    nodes, minutes = configurations[0].nodes, sweep.cluster.profile_minutes
    return Batch(groups, outputs, sweep.launcher.submit(jobs, stage="profile", nodes=nodes, minutes=minutes))


def _new_output(run: RunDirectory, group: Sequence[Configuration]) -> Path:
    """A file that no other task writes to: n<N>-b<b>[-<b>]-<attempt>.jsonl."""
    batches = sorted({group[0].local_batch, group[-1].local_batch})
    stem = f"n{group[0].nodes}-b{'-'.join(map(str, batches))}"
    taken = len(list(run.profile.glob(f"{stem}-*.jsonl")))
    path = run.profile / f"{stem}-{taken}.jsonl"
    path.touch(mode=0o600)
    return path


def _record_failures(sweep: Sweep, batches: Sequence[Batch], ended: Sequence[Ended]) -> list[Ended]:
    """A record for the first configuration that a job left without one; those after it are proposed again."""
    how = {end.job.job_id: end for end in ended}
    failures = []
    for batch in batches:
        for group, output, job in zip(batch.groups, batch.outputs, batch.jobs, strict=True):
            recorded = read_records(Measurement, with_rank_files(output)).records
            missing = [c for c in group if c not in {m.configuration for m in recorded}]
            if missing and not any(m.status == "oom" for m in recorded):
                failures.append(how[job.job_id])
                append_record(output, _failed(sweep.cluster, missing[0], how[job.job_id]))
    return failures


def _failed(cluster: ClusterSpec, configuration: Configuration, end: Ended) -> Measurement:
    return Measurement(
        status="oom" if end.failure.is_oom else "failed",
        failure=end.failure,
        detail=_last_line(end.log_tail),
        nodes=configuration.nodes,
        workers_per_node=configuration.workers_per_node,
        local_batch=configuration.local_batch,
        exclusive=cluster.exclusive or cluster.executor == "local",
        job_id=end.job.job_id,
        finished_at=time.time(),
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


def _wait_for_earlier(sweep: Sweep, stage: str, tick: Callable[[str], None]) -> None:
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
    plan = make_plan(sweep.spec, sweep.cluster, measured.records, measured.skipped)
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
        _wait_for_earlier(sweep, "train", _training_tick(sweep, label, progress))
        attempts = 0
        while not files.result_file.exists():
            candidate = next_candidate(plan, sweep.run, sweep.spec.training.max_fallbacks)
            end = _train_once(sweep, candidate.configuration, label, progress)
            attempts += 1
            _await_result(sweep.run, files.result_file, end.job)
            if not files.result_file.exists():
                _after_failure(sweep, candidate.configuration, end, attempts)
        result = TrainResult.model_validate_json(files.result_file.read_bytes())
        progress.update(result.epochs, result.epochs, f"test accuracy {result.test_accuracy:.1%}")
    return result


def _await_result(run: RunDirectory, result_file: Path, job: Submitted) -> None:
    """A job that says it finished left a result, even if a network file system shows it a minute later."""
    finished = any(event.event == "finished" and event.job_id == job.job_id for event in run.events())
    deadline = time.monotonic() + RESULT_WAIT_S
    while finished and not result_file.exists() and time.monotonic() < deadline:
        list(result_file.parent.iterdir())  # makes the client look again
        time.sleep(1.0)


def next_candidate(plan: Plan, run: RunDirectory, max_fallbacks: int) -> Candidate:
    """The chosen configuration, or, after OOM, the first of it and its fallbacks that is below every failed batch.

    Raises:
        StageError: No smaller batch is left, or there were more fallbacks than allowed.
    """
    failed = {m.local_batch for m in run.measurements().records if m.status == "oom" and m.stage == "train"}
    if not failed:
        return plan.chosen
    if len(failed) > max_fallbacks:
        raise StageError(f"train: out of memory {len(failed)} times; training.max_fallbacks = {max_fallbacks}")
    smaller = [c for c in (plan.chosen, *plan.fallbacks) if c.local_batch < min(failed)]
    if not smaller:
        raise StageError(f"train: out of memory at local batch {min(failed)}, and plan.json has no smaller fallback")
    return smaller[0]


def _train_once(sweep: Sweep, configuration: Configuration, label: str, progress: StageProgress) -> Ended:
    job = TrainJob(sweep.spec, sweep.cluster, configuration, sweep.run.root, label)
    minutes = sweep.cluster.train_minutes
    submitted = sweep.launcher.submit([job], stage="train", nodes=configuration.nodes, minutes=minutes)
    tick = _training_tick(sweep, label, progress)
    tick(f"submitted as job {submitted[0].job_id} at {configuration}")
    return sweep.launcher.wait(submitted, tick)[0]


def _training_tick(sweep: Sweep, label: str, progress: StageProgress) -> Callable[[str], None]:
    metrics_file = sweep.run.train(label).metrics_file

    def tick(text: str) -> None:
        metrics = read_metrics(metrics_file)
        done = metrics.steps[-1].epoch if metrics.steps else 0.0
        seen = f"; test accuracy {metrics.epochs[-1].test_accuracy:.1%}" if metrics.epochs else ""
        progress.update(round(done, 2), sweep.spec.workload.epochs, f"epochs; {text}{seen}")

    return tick


def _after_failure(sweep: Sweep, configuration: Configuration, end: Ended, attempts: int) -> None:
    """Write down why training ended; return if another submission is worth it.

    Raises:
        StageError: It is not.
    """
    events = [event for event in sweep.run.events() if event.job_id == end.job.job_id]
    failure = _training_failure(events, end)
    if failure.is_oom:
        if not any(event.event == "oom" for event in events):  # killed before it could say so
            _record_training_oom(sweep, configuration, end)
        sweep.run.log_event("fell_back", "train", detail=f"out of memory at {configuration}")
        return
    sweep.run.log_event("failed", "train", failure=failure, job_id=end.job.job_id, detail=_last_line(end.log_tail))
    again = failure in (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)
    if not again or attempts > sweep.spec.training.max_requeues:
        raise StageError(f"train: {_why([end], failure)}")


def _training_failure(events: Sequence[Event], end: Ended) -> Failure:
    """What the job itself wrote down last, else what the scheduler says."""
    own = [event.failure for event in events if event.event == "oom" and event.failure]
    if own:
        return own[-1]
    stopped = bool(events) and "requeue refused" in events[-1].detail
    return Failure.PREEMPTED if stopped else end.failure


def _record_training_oom(sweep: Sweep, configuration: Configuration, end: Ended) -> None:
    record = _failed(sweep.cluster, configuration, end).model_copy(update={"stage": "train"})
    append_record(sweep.run.profile / "train-main.jsonl", record)
    sweep.run.log_event("oom", "train", failure=end.failure, job_id=end.job.job_id, detail=str(configuration))


def report_stage(sweep: Sweep) -> list[Path]:
    """Write figures and report."""
    from tula_hpc.analysis.report import write_report

    return write_report(sweep.run)


def _why(failures: Sequence[Ended], failure: Failure | None = None) -> str:
    if not failures:
        return "see profile/*.jsonl for the reasons"
    first = failures[0]
    words = (failure or first.failure).value.replace("_", " ")
    log = f"\nlog: {first.log_file}" if first.log_file else ""
    return f"{words} in job {first.job.job_id}\n{first.log_tail}{log}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no log was written"
