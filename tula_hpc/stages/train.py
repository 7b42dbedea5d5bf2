"""Run a training: submit its jobs, see how each of them ended, and decide if another one follows.

`train_stage` trains the plan's choice. A study's many trainings (`train_many`) follow the same
rules with another table. `tula_hpc/retry_policy.py` says how often each failure is tried again.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tula_hpc.analysis.drift import describe_drift
from tula_hpc.env import unix_time
from tula_hpc.errors import CancelledJobError, DivergedError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import first_line, format_duration, format_score, plural
from tula_hpc.launch.diagnosis import last_bytes
from tula_hpc.launch.job_specs import TrainJob, in_passes
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import (
    MAIN_LABEL,
    Candidate,
    Measurement,
    Metrics,
    MetricsReader,
    Plan,
    RunDirectory,
    StepMetrics,
    StopReason,
    Submission,
    TrainDirectory,
    TrainResult,
    append_record,
    folder_gone,
    kept_steps,
    measured_identity,
    put_aside,
    read_document,
    samples_a_step,
    training_left_s,
)
from tula_hpc.records.broken_hosts import why_given_up
from tula_hpc.records.events import JobEvents, JobFailure, Restart
from tula_hpc.retry_policy import NextStep, RetryPolicy, plan_policy
from tula_hpc.stages.context import (
    InterruptionNews,
    StageProgress,
    Sweep,
    describe_failures,
    ends_by_accounting,
    failed_measurement,
    note_unseen_ends,
    recording_failure,
    stage_progress,
    submitted_job,
    why_ended,
)
from tula_hpc.stages.notify import notify_of_news

# longest wait for a result: NFS clients remember for up to a minute that a file was not there
RESULT_WAIT_S = 90.0
# most epochs per planned epoch: samples that fill no batch may be drawn twice
MANY_EPOCHS = 1.1
# most samples of a step per planned sample: batches of random size vary by less
MUCH_MORE = 1.5
# longest wait for accounting, which knows of the end of a job a moment later than the queue
ACCOUNTING_WAIT_S = 10.0


def train_stage(sweep: Sweep, plan: Plan) -> TrainResult:
    """Train at the chosen configuration; after OOM at the next smaller one.

    Raises:
        StageError: Training ended without a result; the message says why and where the log is.
    """
    files = sweep.run.make_train()
    with stage_progress("training") as progress:
        tick = training_tick(sweep, progress)
        while not files.result_file.exists():
            unsettled = sweep.run.history().unsettled("train")
            jobs = [job for job in unsettled if job.label == MAIN_LABEL]
            for job in jobs:
                _see_to(sweep, plan, job, tick)
            if not jobs:
                _submit_training(sweep, _next(sweep, plan), tick)
        note_unseen_ends(sweep.run, [MAIN_LABEL])
        notify_of_news(sweep)
        result = read_document(TrainResult, files.result_file)
        score = format_score(result.test_accuracy, result.test_loss)
        # a script may stop early
        wanted = max(result.epochs, sweep.spec.workload.epochs)
        done = f"{result.epochs} of {plural(wanted, 'epoch')} done"
        progress.update(result.epochs, wanted, f"{done}, {score}")
    keep_accounting(sweep)
    return result


def keep_accounting(sweep: Sweep) -> None:
    """Wait a little until accounting knows the ends of the training's jobs, and write them down.

    Reports may be made where accounting cannot be asked. Without accounting nothing is waited for.
    """
    deadline = time.monotonic() + ACCOUNTING_WAIT_S
    while not sweep.run.history().accounted(MAIN_LABEL, sweep.run.accounts()):
        if not sweep.launcher.note_accounts() or time.monotonic() > deadline:
            return
        time.sleep(1.0)


def _next(sweep: Sweep, plan: Plan) -> Candidate:
    with recording_failure(sweep.run, "train"):
        return next_candidate(plan, sweep.run, sweep.spec.training.max_fallbacks)


def _see_to(sweep: Sweep, plan: Plan, job: Submission, tick: Callable[[JobsNow], None]) -> None:
    part = sweep.on(job.partition or "")
    (end,) = part.launcher.wait([submitted_job(sweep.run, job)], tick)
    outcome = settle(part, job, end, plan_policy(sweep.spec.training.max_requeues))
    notify_of_news(sweep)
    if outcome.next_step is NextStep.GIVE_UP:
        error: type[StageError] = StageError
        if outcome.failure.kind is Failure.CANCELLED:
            error = CancelledJobError
        elif outcome.failure.kind is Failure.DIVERGED:
            error = DivergedError
        raise error("\n".join([f"train: {_why_given_up(part, outcome)}", *_lost(sweep)]))
    how = "from its last checkpoint"
    if outcome.next_step is NextStep.SMALLER_BATCH:
        smaller = _next(sweep, plan)
        how = f"at {smaller.configuration}{smaller.in_parts}"
        detail = f"out of memory at {job.configuration}; another job goes on {how}"
        sweep.run.log_event("fell_back", "train", detail=detail)
    elif not (sweep.spec.workload.goes_on or sweep.run.train().newest_checkpoint):
        how = "from the start"
    if outcome.next_step is not NextStep.DONE:
        sys.stderr.write(f"training: {_going_on(outcome, how)}\n")


def _going_on(outcome: Settled, how: str) -> str:
    ended = outcome.failure.detail or str(outcome.failure.kind).replace("_", " ")
    return (
        f"job {outcome.end.job.job_id} ended without a result ({first_line(ended)}); another job "
        f"goes on {how}; to stop for good, end this command with Ctrl-C: it then says how to cancel"
    )


def _lost(sweep: Sweep) -> list[str]:
    if not _starts_over(sweep):
        return []
    # a training that took no step loses nothing
    if not any(sweep.run.train().root.glob("metrics*.jsonl")):
        return []
    if sweep.run.history().has_left_files(MAIN_LABEL):
        return [f"{_gone(sweep)}: this training then begins from the start."]
    return [
        "This training then begins from the start: its script keeps nothing by tula.keep, and has "
        "no workload.resume_arguments."
    ]


def _gone(sweep: Sweep) -> str:
    return f"what the training had saved in {sweep.run.train().checkpoints} is gone"


def _starts_over(sweep: Sweep) -> bool:
    """Tell whether the plan's training, if stopped now, would begin from the start again."""
    work = sweep.spec.workload
    return work.is_script and not work.goes_on and not sweep.run.train().newest_checkpoint


class Settled(NamedTuple):
    """End of a training's job, and what follows from it."""

    next_step: NextStep
    # with the failure that the training itself reported, in place of the scheduler's
    end: Ended
    failure: JobFailure


def settle(sweep: Sweep, job: Submission, end: Ended, policy: RetryPolicy) -> Settled:
    """Record how a training's job ended, and decide the next step.

    `sweep` is on the partition where the job ran. `job` has its configuration if the policy allows
    smaller batches.
    """
    run, files, job_id = sweep.run, sweep.run.train(job.label), end.job.job_id
    events = run.history().job(job_id)
    if events.has_finished:
        _await_result(files)
    if files.result_file.exists():
        run.log_event("ended", "train", job_id=job_id, data={"label": job.label})
        return Settled(NextStep.DONE, end, JobFailure(None))
    if not files.root.exists() or (events.has_finished and not _is_there(files)):
        # the log does not show this reason
        end = end._replace(failure=Failure.KILLED, log_tail=report_deletion(run, files))
    failure = _failure_of(events, end)
    end = end._replace(failure=failure.kind or end.failure)
    data: dict[str, object] = {"label": job.label}
    if end.hosts and failure.kind is Failure.DEVICE_FAILED:
        data["hosts"] = list(end.hosts)
    if failure.stop:
        data["stop"] = failure.stop
    common = {"failure": failure.kind, "job_id": job_id, "data": data}
    # before "ended": if a command is killed in between, the next one records the failure once more
    if failure.kind not in policy.smaller_batch:
        run.log_event("failed", "train", detail=failure.detail, **common)
    elif not events.memory_failure:
        _record_oom(sweep, job, end)
    run.log_event("ended", "train", **common)
    next_step = policy.judge(run.history(), job.label, failure, sweep.started_at)
    return Settled(next_step, end, failure)


def _await_result(files: TrainDirectory) -> None:
    """Wait for the result of a finished job: a network file system may show it late."""
    deadline = time.monotonic() + RESULT_WAIT_S
    # listing the folder makes the file system's client look again
    while _is_there(files) and not files.result_file.exists() and time.monotonic() < deadline:
        time.sleep(1.0)


def _is_there(files: TrainDirectory) -> bool:
    """Tell whether a training's folder holds anything: a command makes a deleted folder anew."""
    return files.root.is_dir() and any(files.root.iterdir())


def report_deletion(run: RunDirectory, files: TrainDirectory) -> str:
    """Warn the user that a training's folder was deleted; return the message.

    Raises:
        StorageError: The whole run is gone.
    """
    if not run.root.exists():
        raise folder_gone(run.root)
    message = f"{files.root} was deleted: this training starts from the beginning"
    sys.stderr.write(f"{message}\n")
    return message


def _failure_of(events: JobEvents, end: Ended) -> JobFailure:
    own = events.own_failure
    detail = own.detail if own else why_ended(end)
    stop = own.stop if own else None
    if events.memory_failure:
        kind = events.memory_failure
    elif events.met_broken_device:
        kind = Failure.DEVICE_FAILED
    elif stop is StopReason.LIMIT_IN_VAIN:
        kind = Failure.TIMED_OUT
    elif stop is not None:
        kind = Failure.PREEMPTED
    else:
        kind = end.failure
    return JobFailure(kind, detail, stop)


def _record_oom(sweep: Sweep, job: Submission, end: Ended) -> None:
    """Record that a job ran out of memory, if it was killed before it could do so itself."""
    if job.configuration is None:
        return
    at = job.configuration
    record = failed_measurement(sweep.cluster, at, end, job.partition or "")
    append_record(
        sweep.run.profile / "train-main.jsonl",
        record.model_copy(update={"stage": "train", "accumulation": job.accumulation}),
    )
    sweep.run.log_event("oom", "train", failure=end.failure, job_id=end.job.job_id, detail=str(at))


def _why_given_up(sweep: Sweep, outcome: Settled) -> str:
    job_id, failure = outcome.end.job.job_id, outcome.failure
    advice = time_limit_advice(sweep, MAIN_LABEL, failure)
    if failure.stop is StopReason.REQUEUES_EXHAUSTED:
        saved = ""
        if not _starts_over(sweep):
            saved = "all work is saved, and the same command continues it; "
        return f"{failure.detail}, the last time in job {job_id}; {saved}{advice}"
    if failure.stop is StopReason.LIMIT_IN_VAIN:
        return (
            f"{failure.detail}; {advice}, or let it go on where it stopped: set "
            "workload.resume_arguments, or have the script keep its state by tula.keep"
        )
    if failure.kind is Failure.DIVERGED and sweep.run.has_trained():
        folder = sweep.run.root / "train"
        return (
            f"{failure.detail}; then move {folder} away, the diverged training, and run the same "
            "command again: it trains anew over the same measurements"
        )
    if failure.kind is Failure.DEVICE_FAILED:
        return why_given_up(sweep.run.events(), job_id, unix_time())
    return "; ".join(filter(None, [advice, describe_failures([outcome.end])]))


def time_limit_advice(sweep: Sweep, label: str, failure: JobFailure) -> str:
    """Say which key to raise if a time limit ended a training; "" if something else did."""
    is_used_up = failure.stop is StopReason.REQUEUES_EXHAUSTED
    is_in_vain = failure.stop is StopReason.LIMIT_IN_VAIN
    if not (is_used_up or is_in_vain or failure.kind is Failure.TIMED_OUT):
        return ""
    limit = f"now {sweep.cluster.train_minutes}"
    # on this machine the key has no effect
    if is_in_vain and sweep.cluster.executor == "slurm":
        limit += f", of which signal_delay_s leaves {sweep.cluster.signal_delay_s} s for stopping"
    epochs = sweep.spec.workload.epochs
    # metrics that cannot be read only leave the pace out of the advice
    metrics = MetricsReader(sweep.run.train(label).metrics_file).read()
    last = metrics.epochs[-1] if metrics.epochs else None
    left_s = training_left_s(metrics.steps, last, epochs)
    # no steps are left of a training that ended while its model was saved
    if left_s and (seen := metrics.steps[-1].epoch) < epochs:
        whole_s = left_s * epochs / (epochs - seen)
        limit += f"; {plural(epochs, 'epoch')} take {format_duration(whole_s)} at this pace"
    key = f"train_minutes in the cluster file ({limit})"
    return f"a larger {key} needs fewer restarts" if is_used_up else f"raise {key}"


def next_candidate(plan: Plan, run: RunDirectory, max_fallbacks: int) -> Candidate:
    """Return the chosen configuration, or after OOM the first fallback below every failed batch.

    A script whose number of forward passes can be set takes the same batch in more passes.
    Batches that ran out of memory on another partition do not count.

    Raises:
        StageError: No smaller batch is left, or there were more fallbacks than allowed.
    """
    records = run.measurements().records
    out = [m for m in records if m.status == "oom" and m.stage == "train"]
    for candidate in (plan.chosen, *plan.fallbacks):
        here = [m for m in out if m.partition == candidate.partition]
        failed = {(m.local_batch, m.accumulation) for m in here}
        if len(failed) > max_fallbacks:
            raise StageError(
                f"train: out of memory {plural(len(failed), 'time')}, and training.max_fallbacks = "
                f"{max_fallbacks} allows no smaller batch; raise it"
            )
        if smaller := _below_failed(candidate, here):
            return smaller
    smallest = min(m.local_batch for m in out)
    raise StageError(
        f"train: out of memory at local batch {smallest}, and plan.json has no smaller fallback; "
        "use nodes with more memory, or a smaller search.min_batch with another --run-dir"
    )


def _below_failed(candidate: Candidate, failed: Sequence[Measurement]) -> Candidate | None:
    """Return the candidate below the batches that failed, in more passes if needed, or None."""
    least = min((m.local_batch // (m.accumulation or 1) for m in failed), default=sys.maxsize)
    if any(m.accumulation is None for m in failed):
        # the number of passes is fixed
        return candidate if candidate.local_batch < least else None
    passes = candidate.accumulation
    while passes < candidate.local_batch and candidate.local_batch // passes >= least:
        passes *= 2
    if candidate.local_batch // passes >= least:
        return None
    return candidate.model_copy(update={"accumulation": passes})


def _submit_training(sweep: Sweep, candidate: Candidate, tick: Callable[[JobsNow], None]) -> None:
    files = sweep.run.make_train()
    if _starts_over(sweep):
        put_aside(files.metrics_file)
    part = sweep.on(candidate.partition)
    at = candidate.configuration
    spec = in_passes(sweep.spec, candidate.accumulation)
    measured = measured_identity(sweep.run.measurements().records)
    place = (part.cluster, at, sweep.run.root, MAIN_LABEL, candidate.partition)
    attempts = sweep.run.history().attempts(MAIN_LABEL)
    job = TrainJob(spec, *place, measured=measured, jobs_before=attempts, since=sweep.started_at)
    data: dict[str, object] = {"label": MAIN_LABEL, "configuration": list(at)}
    data["partition"] = candidate.partition
    if spec.workload.accumulates:
        data["accumulation"] = candidate.accumulation
    if sweep.run.history().has_left_files(MAIN_LABEL):
        if not any(path.is_file() for path in files.root.rglob("*")):
            # all files that the training has left were moved away
            data["anew"] = True
        elif files.newest_checkpoint is None:
            sys.stderr.write(f"warning: {_gone(sweep)}; the training begins from the start\n")
    minutes = part.cluster.train_minutes
    submitted = part.launcher.submit(
        [job], stage="train", nodes=candidate.nodes, minutes=minutes, data=[data]
    )
    tick(JobsNow(0, f"submitted as job {submitted[0].job_id} at {at}{candidate.in_parts}"))


def training_tick(sweep: Sweep, progress: StageProgress) -> Callable[[JobsNow], None]:
    """Return a function that shows the progress of the plan's training with the jobs' states."""
    files = sweep.run.train()
    reader = MetricsReader(files.metrics_file)
    epochs = sweep.spec.workload.epochs
    warned = [""]
    # the last step before a job waited: as long as it is the last, the next job has taken none
    before_wait: list[StepMetrics] = []
    restarts = [sweep.run.history().restarts(MAIN_LABEL)]
    interruptions = InterruptionNews(sweep, "training")

    def tick(now: JobsNow) -> None:
        notify_of_news(sweep, now.running)
        interruptions.tell(now.waiting)
        history = sweep.run.history()
        restart = history.last_restart(MAIN_LABEL)
        if (count := history.restarts(MAIN_LABEL)) > restarts[0]:
            restarts[0] = count
            if words := _restarted(sweep, restart):
                sys.stderr.write(f"training: {words}\n")
        if restart and (words := restart.passed_over) not in warned:
            warned.append(words)
            sys.stderr.write(
                f"warning: a checkpoint cannot be used, and its work is done again: {words}\n"
            )
        metrics = reader.read()
        notes = [*_notes(sweep), *reader.notes]
        if now.waiting:
            before_wait[:] = metrics.steps[-1:]
        saved = files.saved_samples if metrics.steps[-1:] == before_wait else None
        kept = kept_steps(metrics.steps, saved)
        done = kept[-1].epoch if kept else 0.0
        if done and metrics.steps[-1:] == before_wait and _starts_over(sweep):
            lost = f"{round(done, 1):g} of {plural(epochs, 'epoch')}"
            notes.append(f"nothing trained so far is kept ({lost})")
            metrics = Metrics([], [], 0)
            done = 0.0
        shown = [f"{round(done, 1):g} of {plural(epochs, 'epoch')} done", now.text]
        last = metrics.epochs[-1] if metrics.epochs else None
        # a script reports the score of an epoch only after the epoch has ended
        for row in reversed(metrics.epochs):
            if row.is_scored:
                shown.append(format_score(row.test_accuracy, row.test_loss))
                break
        left_s = training_left_s(metrics.steps, last, epochs) if now.running else None
        # a script may go through up to an epoch again after a restart
        notes += _off_plan(metrics, done - restarts[0], epochs)
        # not after one epoch, whose score may come after its end
        if len(metrics.epochs) > 1 and (words := unmatched_metric(sweep, metrics, running=True)):
            notes.append(words)
        progress.update(done, epochs, ", ".join(shown), left_s, notes, state=now.text)

    return tick


def _off_plan(metrics: Metrics, done: float, epochs: int) -> Iterator[str]:
    if done > MANY_EPOCHS * epochs:
        yield (
            "the script goes on after workload.epochs epochs of workload.samples samples: one of the "
            "two keys is too small, or it trains its model again, which is not planned"
        )
    planned = metrics.epochs[-1].global_batch if metrics.epochs else math.inf
    if samples_a_step(metrics.steps) > MUCH_MORE * planned:
        yield (
            "the script takes more forward passes for a step now than in its profile: the plan is "
            f"made for steps of {planned:,} samples"
        )


def _restarted(sweep: Sweep, last: Restart | None) -> str:
    """Say why a job of the training runs again, by accounting, and from where it goes on."""
    if last is None:
        return ""
    sweep.launcher.note_accounts()
    why = ends_by_accounting(sweep).get(last.job_id, [""])[-1]
    # the notes on progress say from where the built-in training goes on
    if not why and last.samples_seen != 0 and not sweep.spec.workload.is_script:
        return ""
    # it may be a new job
    return f"job {last.job_id} runs{f' again, {why}' if why else ''}: {last.from_where}"


def unmatched_metric(sweep: Sweep, metrics: Metrics, *, running: bool = False) -> str:
    """Say that a script's workload.metric has found no score; "" if it has, or is not set."""
    work = sweep.spec.workload
    if not work.is_script or work.metric is None or any(row.is_scored for row in metrics.epochs):
        return ""
    output = sweep.run.train().root / "script" / "rank-0.log"
    printed = last_bytes(output)
    # what was printed a moment ago is not in metrics.jsonl yet
    if any(re.search(work.metric, line) for line in printed.splitlines()):
        return ""
    if running:
        return f"no line of the script's output matches workload.metric so far ({output})"
    return (
        f"workload.metric matches no line of the script's output, {output}: scores are unknown; to "
        "train again over the same measurements, correct the key, and move "
        f"{sweep.run.root / 'train'} away"
    )


def _notes(sweep: Sweep) -> Iterator[str]:
    history = sweep.run.history()
    restart = history.last_restart(MAIN_LABEL)
    if restart and restart.epochs_seen is not None and restart.step is not None:
        epoch = f"{restart.epochs_seen:.4g}"
        yield f"went on from the checkpoint of epoch {epoch}, step {restart.step:,}"
    if drift := describe_drift(history.events):
        yield drift
