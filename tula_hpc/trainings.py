"""Many trainings through the scheduler, each once, whatever dies on the way.

On Slurm they go in as one array, of which `array_parallelism` run at a time. On one machine as many run side by side as
it has cores for.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence

from tula_hpc import slurm
from tula_hpc.config import ClusterSpec
from tula_hpc.errors import Failure, StageError
from tula_hpc.jobs import TrainJob
from tula_hpc.launch import Ended, Submitted
from tula_hpc.progress import StageProgress
from tula_hpc.stages import Sweep, await_result, last_line, training_failure, why

ATTEMPTS = 3  # of a training that dies of what looks like a bug: a killed process looks the same
LARGEST_ARRAY = 500  # tasks: many sites allow fewer jobs a user than Slurm allows tasks an array
INTERRUPTIONS = (Failure.PREEMPTED, Failure.TIMED_OUT, Failure.NODE_FAILED)


class Trainings:
    """Trainings on their way, by label.

    A training that has a result is not run again. One whose job died goes on from its checkpoint in a new job, so often
    as its failure allows; what failed for good does not hold up the others.

    Args:
        sweep: The run directory, and the part of the cluster that trains.
        jobs: All of as many nodes.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[TrainJob]) -> None:
        self.sweep, self.run_directory, self.launcher = sweep, sweep.run, sweep.launcher
        self.jobs = {job.label: job for job in jobs}
        self.running: dict[str, tuple[Submitted, str]] = {}  # job and label by job id
        self.waiting: deque[str] = deque()
        self.attempts: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.most = most_at_once(sweep.cluster, jobs[0].configuration.world_size) if jobs else 0

    def run(self, progress: StageProgress) -> dict[str, str]:
        """Until every training has a result or has failed for good; returns the latter's labels with the reasons.

        Raises:
            StageError: Not one training came as far as its first logged step: something is wrong with all of them.
        """
        self._adopt()
        self._show(progress, "all done" if not (self.waiting or self.running) else "starting")
        while self.waiting or self.running:
            self._submit()
            jobs = [job for job, _ in self.running.values()]
            for end in self.launcher.wait_for_some(jobs, lambda text: self._show(progress, text)):
                self._settle(end)
        self._show(progress, f"{len(self.failures)} without a result" if self.failures else "all done")
        return self.failures

    def _show(self, progress: StageProgress, text: str) -> None:
        progress.update(sum(map(self._is_done, self.jobs)), len(self.jobs), text)

    def _is_done(self, label: str) -> bool:
        return self.run_directory.train(label).result_file.exists()

    def _adopt(self) -> None:
        """Jobs that an interrupted run of the same command left behind are waited for, not submitted again."""
        left = [label for label in self.jobs if not self._is_done(label)]
        submitted = [event for event in self.run_directory.events() if event.event == "submitted"]
        ours = {event.job_id: event for event in submitted if event.data.get("label") in left}
        for job_id in self.launcher.active(list(ours)):
            job = Submitted(job_id, self.run_directory.root / str(ours[job_id].data["folder"]))
            self.running[job_id] = (job, str(ours[job_id].data["label"]))
        adopted = {label for _, label in self.running.values()}
        self.attempts.update(adopted)
        self.waiting.extend(label for label in left if label not in adopted)

    def _submit(self) -> None:
        """On Slurm only when no array is left: two at a time would be twice `array_parallelism`."""
        local = self.sweep.cluster.executor == "local"
        free = self.most - len(self.running) if local else self.most * (not self.running)
        labels = [self.waiting.popleft() for _ in range(min(max(0, free), len(self.waiting)))]
        if not labels:
            return
        for label in labels:
            self.run_directory.train(label).root.mkdir(mode=0o700, parents=True, exist_ok=True)
        jobs = [self.jobs[label] for label in labels]
        nodes, minutes = jobs[0].configuration.nodes, self.sweep.cluster.train_minutes
        submitted = self.launcher.submit(jobs, stage="train", nodes=nodes, minutes=minutes, labels=labels)
        self.running |= {job.job_id: (job, label) for job, label in zip(submitted, labels, strict=True)}
        self.attempts.update(labels)

    def _settle(self, end: Ended) -> None:
        """A job is over: its training is done, waits for another job, or has failed."""
        _, label = self.running.pop(end.job.job_id)
        await_result(self.run_directory, self.run_directory.train(label).result_file, end.job)
        if self._is_done(label):
            return
        failure = training_failure([e for e in self.run_directory.events() if e.job_id == end.job.job_id], end)
        detail, data = last_line(end.log_tail), {"label": label}
        self.run_directory.log_event(
            "failed", "train", failure=failure, job_id=end.job.job_id, detail=detail, data=data
        )
        self._refuse_hopeless(end, failure)
        if self.attempts[label] < self._allowed(failure):
            self.waiting.append(label)
        else:
            log = f"; log: {end.log_file}" if end.log_file else ""
            self.failures[label] = f"{failure.value.replace('_', ' ')}: {detail}{log}"

    def _allowed(self, failure: Failure) -> int:
        """How often a training that ended so is submitted. The same batch runs out of the same memory again."""
        if failure in INTERRUPTIONS:
            return self.sweep.spec.training.max_requeues + 1
        return ATTEMPTS if failure is Failure.BUG else 1

    def _refuse_hopeless(self, end: Ended, failure: Failure) -> None:
        logged = (self.run_directory.train(label).metrics_file.exists() for label in self.jobs)
        if failure is Failure.BUG and self.attempts.total() - len(self.running) >= ATTEMPTS and not any(logged):
            raise StageError(f"train: nothing gets as far as its first logged step; {why([end], failure)}")


def most_at_once(cluster: ClusterSpec, workers: int) -> int:
    """So many trainings are submitted together: on Slurm the tasks of an array, locally what the cores can carry.

    Locally `array_parallelism` bounds them only where the cluster file sets it: its default is meant for measuring.
    """
    if cluster.executor == "slurm":
        return max(1, min(LARGEST_ARRAY, slurm.largest_array()))
    cores = len(os.sched_getaffinity(0))
    fitting = max(1, cores // (workers * cluster.cpus_per_worker))
    return min(fitting, cluster.array_parallelism) if "array_parallelism" in cluster.model_fields_set else fitting
