"""Run many trainings through the scheduler, each to one result, whatever fails on the way.

On Slurm they are submitted as one array, of which `array_parallelism` tasks run at a time. On one
machine as many run at a time as it has cores for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tula_hpc.config import ClusterSpec
from tula_hpc.env import unix_time
from tula_hpc.errors import StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Ended, JobsNow
from tula_hpc.records import Submission
from tula_hpc.records.broken_hosts import why_given_up
from tula_hpc.records.events import JobFailure
from tula_hpc.retry_policy import STUDY_ATTEMPTS, NextStep, study_policy
from tula_hpc.stages.context import (
    StageProgress,
    Sweep,
    describe_failures,
    note_unseen_ends,
    submitted_job,
)
from tula_hpc.stages.notify import notify_of_news
from tula_hpc.stages.train import Settled, report_deletion, settle, time_limit_advice

# submitted at once: many sites allow a user fewer jobs than Slurm allows an array tasks
MOST_TRAININGS = 500


class Trainings:
    """Trainings in progress, by label.

    A training that has a result is not run again. If its job died, a training goes on from its
    checkpoint in a new job, as often as the policy allows; if it failed for good, it does not hold
    up the others. All jobs have the same number of nodes.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[TrainJob]) -> None:
        self.sweep, self.run_directory, self.launcher = sweep, sweep.run, sweep.launcher
        self.jobs = {job.label: job for job in jobs}
        self.policy = study_policy(sweep.spec.training.max_requeues)
        # unfinished jobs, by id
        self.running: dict[str, Submission] = {}
        self.waiting: deque[str] = deque()
        self.failures: dict[str, str] = {}
        # number of trainings with a result, and Unix time, when `run` began
        self._done_before = 0
        self._began_at = 0.0
        self.most = most_at_once(sweep.cluster, jobs[0].configuration.world_size) if jobs else 0

    def run(self, progress: StageProgress) -> dict[str, str]:
        """Train until every training has a result or has failed for good.

        Returns:
            Labels of those that failed, with the reasons.

        Raises:
            StageError: No training reached its first logged step: something is wrong with all.
        """
        self._adopt()
        self._done_before = sum(map(self._is_done, self.jobs))
        self._began_at = unix_time()
        self._show(progress, JobsNow(0, "" if not (self.waiting or self.running) else "starting"))
        while self._goes_on():
            self._submit()
            jobs = [submitted_job(self.run_directory, job) for job in self.running.values()]
            for end in self.launcher.wait_for_some(jobs, lambda now: self._show(progress, now)):
                self._settle(end)
        failed = f"{len(self.failures)} without a result" if self.failures else ""
        self._show(progress, JobsNow(0, failed))
        return self.failures

    def _goes_on(self) -> bool:
        """Tell whether any training is left; one whose folder was deleted starts again."""
        running = (job.label for job in self.running.values())
        known = {*self.waiting, *self.failures, *running}
        for label in self.jobs:
            if label not in known and not self._is_done(label):
                report_deletion(self.run_directory, self.run_directory.train(label))
                self.waiting.append(label)
        return bool(self.waiting or self.running)

    def _show(self, progress: StageProgress, now: JobsNow) -> None:
        done, whole = sum(map(self._is_done, self.jobs)), len(self.jobs)
        text = f"{done} of {plural(whole, 'training')} done"
        # trainings that were done before say nothing about the pace
        here = done - self._done_before
        left_s = None
        if here > 0 and now.running:
            left_s = (whole - done) * (unix_time() - self._began_at) / here
        progress.update(done, whole, ", ".join(filter(None, [text, now.text])), left_s)

    def _is_done(self, label: str) -> bool:
        return self.run_directory.train(label).result_file.exists()

    def _adopt(self) -> None:
        """Take over the jobs of an interrupted command; submit no others for their trainings.

        A training that failed for good since the command began, perhaps in another process, is not
        tried again.
        """
        left = [label for label in self.jobs if not self._is_done(label)]
        note_unseen_ends(self.run_directory, self.jobs.keys() - set(left))
        history = self.run_directory.history()
        for job in history.unsettled("train"):
            if job.label in left:
                self.running[job.job_id] = job
        adopted = {job.label for job in self.running.values()}
        failed = history.last_failures(self.sweep.started_at)
        for label in left:
            if label in adopted:
                continue
            next_step = NextStep.AGAIN
            if label in failed:
                since = self.sweep.started_at
                next_step = self.policy.judge(history, label, failed[label], since)
            if next_step is NextStep.AGAIN:
                self.waiting.append(label)
            else:
                self.failures[label] = self._describe(label, failed[label])

    def _submit(self) -> None:
        """Fill free slots; on Slurm submit one array at a time, which limits how many jobs run."""
        free = self.most - len(self.running)
        if self.sweep.cluster.executor != "local" and self.running:
            free = 0
        labels = [self.waiting.popleft() for _ in range(min(max(0, free), len(self.waiting)))]
        if not labels:
            return
        for label in labels:
            self.run_directory.make_train(label)
        history = self.run_directory.history()
        since = self.sweep.started_at
        jobs = [
            replace(self.jobs[label], jobs_before=history.attempts(label), since=since)
            for label in labels
        ]
        nodes, minutes = jobs[0].configuration.nodes, self.sweep.cluster.train_minutes
        data = [{"label": label} for label in labels]
        submitted = self.launcher.submit(
            jobs, stage="train", nodes=nodes, minutes=minutes, data=data
        )
        accepted = {job.job_id for job in submitted}
        for job in self.run_directory.history().unsettled("train"):
            if job.job_id in accepted:
                self.running[job.job_id] = job
        self.waiting.extendleft(reversed(labels[len(submitted) :]))

    def _settle(self, end: Ended) -> None:
        job = self.running.pop(end.job.job_id)
        outcome = settle(self.sweep, job, end, self.policy)
        notify_of_news(self.sweep)
        if outcome.next_step is NextStep.DONE:
            return
        self._refuse_hopeless(outcome)
        if outcome.next_step is NextStep.AGAIN:
            self.waiting.append(job.label)
        else:
            log = f"; log: {end.log_file}" if end.log_file else ""
            self.failures[job.label] = self._describe(job.label, outcome.failure) + log

    def _describe(self, label: str, failure: JobFailure) -> str:
        kind = failure.kind or Failure.BUG
        failed = f"{kind.value.replace('_', ' ')}: {failure.detail}"
        # with the spec of the training's column, which may have other epochs
        column = self.sweep._replace(spec=self.jobs[label].sweep)
        advice = time_limit_advice(column, label, failure)
        if not advice:
            return failed
        return f"{failed}; {advice}"

    def _refuse_hopeless(self, outcome: Settled) -> None:
        """Stop if no training has logged a step and the failure would end all of them."""
        if any(self.run_directory.train(label).metrics_file.exists() for label in self.jobs):
            return
        kind, job_id = outcome.failure.kind, outcome.end.job.job_id
        if kind is Failure.DEVICE_FAILED and outcome.next_step is NextStep.GIVE_UP:
            reason = why_given_up(self.run_directory.events(), job_id, unix_time())
            raise StageError(f"train: {reason}")
        history, since = self.run_directory.history(), self.sweep.started_at
        over = sum(history.attempts(label, since) for label in self.jobs) - len(self.running)
        if kind in (Failure.BUG, Failure.BAD_INPUT) and over >= STUDY_ATTEMPTS:
            message = describe_failures([outcome.end])
            raise StageError(f"train: no training reaches its first logged step; {message}")


def most_at_once(cluster: ClusterSpec, workers: int) -> int:
    """Return how many trainings are started together: an array's tasks, or as many as cores allow.

    On one machine `array_parallelism` limits them only if the cluster file sets it: its default is
    meant for measuring. On GPUs it always does: each training's first worker takes the first GPU,
    however many cores there are.
    """
    if cluster.executor == "slurm":
        return MOST_TRAININGS
    if cluster.device == "cuda":
        return cluster.array_parallelism
    cores = len(os.sched_getaffinity(0))
    fitting = max(1, cores // (workers * cluster.cpus_per_worker))
    if "array_parallelism" in cluster.model_fields_set:
        return min(fitting, cluster.array_parallelism)
    return fitting
