"""One worker's training as the parts of its loop share it: job, worker, and progress."""

from __future__ import annotations

from typing import Any

from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import RunDirectory, refuse_another
from tula_hpc.records.events import EventName


class Training:
    """One worker's training."""

    def __init__(self, job: TrainJob, env: WorkerEnvironment) -> None:
        self.job = job
        self.env = env
        self.run_directory = RunDirectory(job.root)
        self.files = self.run_directory.train(job.label)
        self.worker = Worker(job.sweep, job.cluster, job.configuration, env)
        refuse_another(self.run_directory, job.measured, self.worker.workload.identity)
        self.global_batch = job.configuration.global_batch
        self.epochs = job.sweep.workload.epochs
        # not None if this is one of a study's trainings, which are compared with each other
        self.study = job.sweep.study
        self.samples_per_epoch = self.worker.samples
        self.progress = Progress()

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the logs, the checkpoints and the result."""
        return self.env.rank == 0

    @property
    def epochs_seen(self) -> float:
        """Epochs of data seen so far, fractional."""
        return self.progress.epoch + self.progress.offset / self.samples_per_epoch

    @property
    def epochs_after_step(self) -> float:
        """Epochs of data seen after the next step; whole after the last step of an epoch."""
        after = self.progress.offset + self.global_batch
        # samples left over at the end are not trained on
        is_last = after + self.global_batch > self.samples_per_epoch
        return self.progress.epoch + (1.0 if is_last else after / self.samples_per_epoch)

    @property
    def epoch_ends(self) -> bool:
        """True if the current epoch has no further whole batch."""
        return self.progress.epoch_ends(self.samples_per_epoch, self.global_batch)

    def is_evaluated(self, epoch: int) -> bool:
        """Tell whether the test set is evaluated at the end of that epoch, counted from 1."""
        if self.study is None or epoch == self.epochs:
            return True
        return epoch % self.study.evaluate_every == 0

    def any(self, mine: bool) -> bool:
        """Tell whether `mine` is true on any worker. Collective."""
        (largest,) = self.worker.agree(float(mine))
        return bool(largest)

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of this training to the run's events."""
        self.run_directory.log_event(
            event, "train", detail=detail, job_id=self.env.job_id, data=data or {}
        )
