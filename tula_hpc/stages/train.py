"""The stages of a sweep: profile, plan, train, report. Each reads files and writes files, and skips what is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tula_hpc.analysis.drift import describe_drift, in_force
from tula_hpc.env import unix_time
from tula_hpc.errors import Failure, StageError
from tula_hpc.formatting import format_score
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended, Submitted
from tula_hpc.records import (
    MAIN_LABEL,
    Candidate,
    Event,
    Plan,
    RunDirectory,
    TrainDirectory,
    TrainResult,
    append_record,
    read_document,
    read_metrics,
)
from tula_hpc.records.broken_hosts import RETRIES, in_vain, why_given_up
from tula_hpc.records.run_directory import events_of, unsettled
from tula_hpc.stages.context import (
    StageProgress,
    Sweep,
    failed_measurement,
    last_line,
    stage_progress,
    submission_of,
    why,
)

# in the last word of a job that does not go on for that reason
REQUEUES_USED_UP = "training.max_requeues"
# in a row without getting further: then it is something that the training does
KILLS = 3
# NFS clients remember for up to a minute that a file was not there
RESULT_WAIT_S = 90.0


def train_stage(sweep: Sweep, plan: Plan, label: str = MAIN_LABEL) -> TrainResult:
    """Train at the chosen configuration; after OOM at the next smaller one, after a refused requeue again.

    Raises:
        StageError: Training ended without a result; the message says why and where the log is.
    """
    files = sweep.run.make_train(label)
    with stage_progress("train") as progress:
        while not files.result_file.exists():
            submitted = [
                e for e in unsettled(sweep.run, "train") if e.data.get("label", label) == label
            ]
            for event in submitted:
                _settle(sweep, plan, event, label, progress)
            if not submitted:
                candidate = next_candidate(plan, sweep.run, sweep.spec.training.max_fallbacks)
                _submit_training(sweep, candidate, label, progress)
        result = read_document(TrainResult, files.result_file)
        progress.update(
            result.epochs, result.epochs, format_score(result.test_accuracy, result.test_loss)
        )
    return result


def _settle(sweep: Sweep, plan: Plan, event: Event, label: str, progress: StageProgress) -> None:
    """Wait for a training's job, and see to it that what it left is on record.

    Raises:
        StageError: It ended without a result, and another submission is not worth it.
    """
    candidate = _candidate_of(event, plan)
    launcher = sweep.on(candidate.partition).launcher
    end = launcher.wait([submission_of(sweep.run, event)], _training_tick(sweep, label, progress))[
        0
    ]
    files = sweep.run.train(label)
    await_result(sweep.run, files.result_file, end.job)
    done = files.result_file.exists()
    end = told_of_deletion(files, end)
    events = events_of(sweep.run, end.job.job_id)
    failure = training_failure(events, end)
    end = end._replace(failure=failure)
    # before the end counts as seen to: a command that is killed in between writes it down once more
    if not done:
        _note_failure(sweep, candidate, end, events)
    sweep.run.log_event("ended", "train", job_id=end.job.job_id, failure=None if done else failure)
    if not done:
        _judge_failure(sweep, candidate, end, events)


def _candidate_of(event: Event, plan: Plan) -> Candidate:
    """What a job was submitted to train."""
    wanted = event.data.get("configuration"), event.data.get("partition")
    known = (plan.chosen, *plan.fallbacks, *plan.candidates)
    return next((c for c in known if (list(c.configuration), c.partition) == wanted), plan.chosen)


def await_result(run: RunDirectory, result_file: Path, job: Submitted) -> None:
    """A job that says it finished left a result, even if a network file system shows it a minute later."""
    finished = any(event.event == "finished" for event in events_of(run, job.job_id))
    deadline = time.monotonic() + RESULT_WAIT_S
    while finished and not result_file.exists() and time.monotonic() < deadline:
        try:
            # makes the client look again
            list(result_file.parent.iterdir())
        except FileNotFoundError:
            # the whole folder is gone, see `told_of_deletion`
            return
        time.sleep(1.0)


def told_of_deletion(files: TrainDirectory, end: Ended) -> Ended:
    """The end of a training's job; where the folder, made before that job, is gone, that is the reason, not the log."""
    if files.root.exists():
        return end
    return end._replace(failure=Failure.KILLED, log_tail=say_deleted(files))


def say_deleted(files: TrainDirectory) -> str:
    """Tell the user of a folder that somebody has deleted; returns the words."""
    words = f"{files.root} was deleted: this training begins anew"
    sys.stderr.write(f"{words}\n")
    return words


def next_candidate(plan: Plan, run: RunDirectory, max_fallbacks: int) -> Candidate:
    """The chosen configuration, or, after OOM, the first of it and its fallbacks that is below every failed batch.

    Batches that ran out of memory on another part of the cluster do not count.

    Raises:
        StageError: No smaller batch is left, or there were more fallbacks than allowed.
    """
    records = run.measurements().records
    failed = {
        (m.partition, m.local_batch) for m in records if m.status == "oom" and m.stage == "train"
    }
    if not failed:
        return plan.chosen
    if len(failed) > max_fallbacks:
        raise StageError(
            f"train: out of memory {len(failed)} times; training.max_fallbacks = {max_fallbacks}"
        )
    for candidate in (plan.chosen, *plan.fallbacks):
        if not any(
            part == candidate.partition and batch <= candidate.local_batch for part, batch in failed
        ):
            return candidate
    smallest = min(batch for _, batch in failed)
    raise StageError(
        f"train: out of memory at local batch {smallest}, and plan.json has no smaller fallback"
    )


def _submit_training(
    sweep: Sweep, candidate: Candidate, label: str, progress: StageProgress
) -> None:
    sweep.run.make_train(label)
    there = sweep.on(candidate.partition)
    at = candidate.configuration
    job = TrainJob(sweep.spec, there.cluster, at, sweep.run.root, label, candidate.partition)
    data = {"label": label, "configuration": list(at), "partition": candidate.partition}
    minutes = there.cluster.train_minutes
    submitted = there.launcher.submit(
        [job], stage="train", nodes=candidate.nodes, minutes=minutes, data=[data]
    )
    _training_tick(sweep, label, progress)(f"submitted as job {submitted[0].job_id} at {at}")


def _training_tick(sweep: Sweep, label: str, progress: StageProgress) -> Callable[[str], None]:
    metrics_file = sweep.run.train(label).metrics_file

    def tick(text: str) -> None:
        metrics = read_metrics(metrics_file)
        done = metrics.steps[-1].epoch if metrics.steps else 0.0
        seen = ""
        if metrics.epochs:
            seen = (
                f"; {format_score(metrics.epochs[-1].test_accuracy, metrics.epochs[-1].test_loss)}"
            )
        drift = describe_drift(sweep.run.events())
        progress.update(round(done, 2), sweep.spec.workload.epochs, f"epochs; {text}{seen}{drift}")

    return tick


def _note_failure(sweep: Sweep, candidate: Candidate, end: Ended, events: Sequence[Event]) -> None:
    """Write down why training ended."""
    if not end.failure.is_oom:
        detail = reason(events, end)
        hosts = {"hosts": list(end.hosts)} if end.hosts else {}
        sweep.run.log_event(
            "failed", "train", failure=end.failure, job_id=end.job.job_id, detail=detail, data=hosts
        )
    elif not any(event.event == "oom" for event in events):
        # killed before it could say so
        _record_training_oom(sweep, in_force(candidate, events), end)


def _judge_failure(sweep: Sweep, candidate: Candidate, end: Ended, events: Sequence[Event]) -> None:
    """Return if another submission is worth it.

    Raises:
        StageError: It is not.
    """
    failure, detail, attempts = end.failure, reason(events, end), _attempts(sweep)
    if failure.is_oom:
        sweep.run.log_event(
            "fell_back", "train", detail=f"out of memory at {candidate.configuration}"
        )
    if failure.is_oom or not attempts:
        return
    if REQUEUES_USED_UP in detail:
        raise StageError(
            f"train: {detail}, the last time in job {end.job.job_id}; all that was done is saved"
        )
    if failure is Failure.DEVICE_FAILED:
        if in_vain(sweep.run.events(), failure, sweep.started_at) > RETRIES:
            raise StageError(
                f"train: {why_given_up(sweep.run.events(), end.job.job_id, unix_time())}"
            )
        return
    again = failure in (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED, Failure.KILLED)
    if not again or attempts > sweep.spec.training.max_requeues or _is_stuck(sweep):
        raise StageError(f"train: {why([end], failure)}")


def _is_stuck(sweep: Sweep) -> bool:
    """Whether the last jobs of this command were all killed, and had all begun at the same sample."""
    return in_vain(sweep.run.events(), Failure.KILLED, sweep.started_at) >= KILLS


def _attempts(sweep: Sweep) -> int:
    """Jobs that this command submitted. What an earlier one left may have died of something that has been mended."""
    submitted = [
        event
        for event in sweep.run.events()
        if (event.event, event.stage) == ("submitted", "train")
    ]
    return sum(event.time >= sweep.started_at for event in submitted)


def training_failure(events: Sequence[Event], end: Ended) -> Failure:
    """What the job itself wrote down last, else what the scheduler says."""
    own = [event.failure for event in events if event.event == "oom" and event.failure]
    if own:
        return own[-1]
    if any(event.failure is Failure.DEVICE_FAILED for event in events):
        return Failure.DEVICE_FAILED
    stopped = any(words in reason(events, end) for words in ("requeue refused", REQUEUES_USED_UP))
    return Failure.PREEMPTED if stopped else end.failure


def reason(events: Sequence[Event], end: Ended) -> str:
    """One line: the job's own last word on why it ended, else what its log says."""
    own = [event.detail for event in events if event.event == "failed"]
    return own[-1] if own else last_line(end.log_tail)


def _record_training_oom(sweep: Sweep, candidate: Candidate, end: Ended) -> None:
    cluster = sweep.on(candidate.partition).cluster
    record = failed_measurement(cluster, candidate.configuration, end, candidate.partition)
    append_record(
        sweep.run.profile / "train-main.jsonl", record.model_copy(update={"stage": "train"})
    )
    detail = str(candidate.configuration)
    sweep.run.log_event("oom", "train", failure=end.failure, job_id=end.job.job_id, detail=detail)
