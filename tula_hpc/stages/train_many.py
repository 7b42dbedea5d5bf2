"""Many trainings through the scheduler, each once, whatever dies on the way.

On Slurm they go in as one array, of which `array_parallelism` run at a time. On one machine as many
run side by side as it has cores for.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence

from tula_hpc.config import ClusterSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import Failure, StageError
from tula_hpc.launch import slurm
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended, Submitted
from tula_hpc.records import Event
from tula_hpc.records.broken_hosts import RETRIES, in_vain, why_given_up
from tula_hpc.records.run_directory import events_of, unsettled
from tula_hpc.stages.context import StageProgress, Sweep, submission_of, why
from tula_hpc.stages.train import (
    REQUEUES_USED_UP,
    await_result,
    reason,
    say_deleted,
    told_of_deletion,
    training_failure,
)

# of a training that dies of what looks like a bug: a killed process looks the same
ATTEMPTS = 3
# at once: many sites allow fewer jobs a user than Slurm allows tasks an array
MOST_TRAININGS = 500
INTERRUPTIONS = (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)


class Trainings:
    """Trainings on their way, by label.

    A training that has a result is not run again. One whose job died goes on from its checkpoint in
    a new job, so often as its failure allows; what failed for good does not hold up the others.

    Args:
        sweep: The run directory, and the part of the cluster that trains.
        jobs: All of as many nodes.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[TrainJob]) -> None:
        self.sweep, self.run_directory, self.launcher = sweep, sweep.run, sweep.launcher
        self.jobs = {job.label: job for job in jobs}
        # job and label by job id
        self.running: dict[str, tuple[Submitted, str]] = {}
        self.waiting: deque[str] = deque()
        self.attempts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.most = most_at_once(sweep.cluster, jobs[0].configuration.world_size) if jobs else 0

    def run(self, progress: StageProgress) -> dict[str, str]:
        """Until every training has a result or has failed for good; returns the latter's labels with the reasons.

        Raises: StageError: Not one training came as far as its first logged step: something is
            wrong with all of them.
        """
        self._adopt()
        self._show(progress, "all done" if not (self.waiting or self.running) else "starting")
        while self._goes_on():
            self._submit()
            jobs = [job for job, _ in self.running.values()]
            for end in self.launcher.wait_for_some(jobs, lambda text: self._show(progress, text)):
                self._settle(end)
        self._show(
            progress, f"{len(self.failures)} without a result" if self.failures else "all done"
        )
        return self.failures

    def _goes_on(self) -> bool:
        """Whether there is anything to do; what was done is to be done again where its folder has been deleted."""
        known = {*self.waiting, *self.failures, *(label for _, label in self.running.values())}
        for label in self.jobs:
            if label not in known and not self._is_done(label):
                say_deleted(self.run_directory.train(label))
                self.waiting.append(label)
        return bool(self.waiting or self.running)

    def _show(self, progress: StageProgress, text: str) -> None:
        progress.update(sum(map(self._is_done, self.jobs)), len(self.jobs), text)

    def _is_done(self, label: str) -> bool:
        return self.run_directory.train(label).result_file.exists()

    def _adopt(self) -> None:
        """Jobs that an interrupted run of the same command left behind are seen to, not submitted again.

        What has failed for good since the command began (its process may be another one by now)
        stays so.
        """
        left = [label for label in self.jobs if not self._is_done(label)]
        for event in unsettled(self.run_directory, "train"):
            if event.data.get("label") in left:
                job = submission_of(self.run_directory, event)
                self.running[job.job_id] = (job, str(event.data["label"]))
        failed = self._count_attempts()
        adopted = {label for _, label in self.running.values()}
        for label in left:
            event_of = failed.get(label)
            if label in adopted:
                continue
            failure = event_of.failure or Failure.BUG if event_of is not None else None
            if (
                event_of is not None
                and failure
                and not self._may_try_again(label, failure, event_of.detail)
            ):
                self.failures[label] = _in_words(failure, event_of.detail)
            else:
                self.waiting.append(label)

    def _count_attempts(self) -> dict[str, Event]:
        """Count the submissions of this command; returns the last failure of each label."""
        events = [
            event for event in self.run_directory.events() if event.time >= self.sweep.started_at
        ]
        self.attempts.update(
            str(e.data["label"]) for e in events if e.event == "submitted" and "label" in e.data
        )
        return {
            str(e.data["label"]): e for e in events if e.event == "failed" and "label" in e.data
        }

    def _submit(self) -> None:
        """On Slurm only when no array is left: two at a time would be twice `array_parallelism`."""
        local = self.sweep.cluster.executor == "local"
        free = self.most - len(self.running) if local else self.most * (not self.running)
        labels = [self.waiting.popleft() for _ in range(min(max(0, free), len(self.waiting)))]
        if not labels:
            return
        for label in labels:
            self.run_directory.make_train(label)
        jobs = [self.jobs[label] for label in labels]
        nodes, minutes = jobs[0].configuration.nodes, self.sweep.cluster.train_minutes
        data = [{"label": label} for label in labels]
        submitted = self.launcher.submit(
            jobs, stage="train", nodes=nodes, minutes=minutes, data=data
        )
        accepted = labels[: len(submitted)]
        self.running |= {
            job.job_id: (job, label) for job, label in zip(submitted, accepted, strict=True)
        }
        self.attempts.update(accepted)
        self.waiting.extendleft(reversed(labels[len(submitted) :]))

    def _settle(self, end: Ended) -> None:
        """A job is over: its training is done, waits for another job, or has failed."""
        _, label = self.running.pop(end.job.job_id)
        files = self.run_directory.train(label)
        await_result(self.run_directory, files.result_file, end.job)
        if self._is_done(label):
            self._log("ended", label, end)
            return
        end = told_of_deletion(files, end)
        events = events_of(self.run_directory, end.job.job_id)
        failure, detail = training_failure(events, end), reason(events, end)
        # before the end counts as seen to: a command that is killed in between writes it down once
        # more
        self._log("failed", label, end, failure, detail)
        self._log("ended", label, end, failure)
        self._refuse_hopeless(end, failure, label)
        if self._may_try_again(label, failure, detail):
            self.waiting.append(label)
        else:
            log = f"; log: {end.log_file}" if end.log_file else ""
            self.failures[label] = _in_words(failure, detail) + log

    def _log(
        self, event: str, label: str, end: Ended, failure: Failure | None = None, detail: str = ""
    ) -> None:
        hosts = {"hosts": list(end.hosts)} if failure is Failure.DEVICE_FAILED and end.hosts else {}
        said = {"failure": failure, "detail": detail, "data": {"label": label, **hosts}}
        self.run_directory.log_event(event, "train", job_id=end.job.job_id, **said)

    def _may_try_again(self, label: str, failure: Failure, detail: str) -> bool:
        if failure is Failure.DEVICE_FAILED:
            return is_tried_again(self.run_directory.events(), label, self.sweep.started_at)
        return REQUEUES_USED_UP not in detail and self.attempts[label] < self._allowed(failure)

    def _allowed(self, failure: Failure) -> int:
        """How often a training that ended so is submitted. The same batch runs out of the same memory again."""
        if failure in INTERRUPTIONS:
            return self.sweep.spec.training.max_requeues + 1
        return ATTEMPTS if failure in (Failure.BUG, Failure.KILLED) else 1

    def _refuse_hopeless(self, end: Ended, failure: Failure, label: str) -> None:
        logged = [self.run_directory.train(label).metrics_file.exists() for label in self.jobs]
        if (
            failure is Failure.DEVICE_FAILED
            and not any(logged)
            and not self._may_try_again(label, failure, "")
        ):
            raise StageError(
                f"train: {why_given_up(self.run_directory.events(), end.job.job_id, unix_time())}"
            )
        wrong = failure in (Failure.BUG, Failure.BAD_INPUT)
        if wrong and self.attempts.total() - len(self.running) >= ATTEMPTS and not any(logged):
            raise StageError(
                f"train: nothing gets as far as its first logged step; {why([end], failure)}"
            )


def is_tried_again(events: Sequence[Event], label: str, since: float = 0.0) -> bool:
    """Tell whether a training whose last job met a broken device is submitted once more."""
    submitted = {
        e.job_id for e in events if e.event == "submitted" and e.data.get("label") == label
    }
    return (
        in_vain((e for e in events if e.job_id in submitted), Failure.DEVICE_FAILED, since)
        <= RETRIES
    )


def _in_words(failure: Failure, detail: str) -> str:
    return f"{failure.value.replace('_', ' ')}: {detail}"


def most_at_once(cluster: ClusterSpec, workers: int) -> int:
    """So many trainings are submitted together: on Slurm the tasks of an array, locally what the cores can carry.

    Locally `array_parallelism` bounds them only where the cluster file sets it: its default is
    meant for measuring. On GPUs it always does: each training's first worker takes the first GPU,
    however many cores there are.
    """
    if cluster.executor == "slurm":
        return max(1, min(MOST_TRAININGS, slurm.largest_array()))
    if cluster.device == "cuda":
        return cluster.array_parallelism
    cores = len(os.sched_getaffinity(0))
    fitting = max(1, cores // (workers * cluster.cpus_per_worker))
    return (
        min(fitting, cluster.array_parallelism)
        if "array_parallelism" in cluster.model_fields_set
        else fitting
    )
