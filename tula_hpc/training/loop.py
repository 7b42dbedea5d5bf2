"""Training loop of one worker: epochs, steps, and the decisions between two steps."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Iterator

from tula_hpc.batches import Batch
from tula_hpc.ddp.agreement import Agreement, Decision, EvaluationStopped
from tula_hpc.ddp.methods import learning_rate
from tula_hpc.ddp.process_group import process_group
from tula_hpc.ddp.stop_signals import StopRequest, Suspensions
from tula_hpc.env import WorkerEnvironment, job_started_at, join_job, unix_time
from tula_hpc.errors import DivergedError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.process_memory import held_by_others, out_of_memory
from tula_hpc.training.checkpoints import Checkpoints
from tula_hpc.training.drift import DriftGuard, DriftStart, begin_drift_watch
from tula_hpc.training.ending import leave, record_oom, write_result
from tula_hpc.training.evaluation import NO_EVALUATION, Evaluation, Evaluator
from tula_hpc.training.progress import Training
from tula_hpc.training.training_log import TrainingLog


def run_training(job: TrainJob, stop: StopRequest) -> str:
    """Train a job's configuration; see `TrainJob`."""
    env = join_job()
    failure: Failure | None = None
    outcome = held = ""
    try:
        with process_group(job.cluster, env):
            outcome = Trainer(job, env, stop, begin_drift_watch(job, env)).run()
    except (RuntimeError, MemoryError) as error:
        failure = out_of_memory(error)
        held = held_by_others(error, os.getppid())
        if failure is None:
            raise
    # outside the except block: the traceback keeps the tensors of the failed step alive
    if failure is not None:
        record_oom(job, env, failure, held)
        raise SystemExit(f"out of memory ({failure}) at {job.configuration}: recorded")
    return outcome


class Trainer:
    """One worker's training loop; every worker has one. Building it resumes the training."""

    def __init__(
        self, job: TrainJob, env: WorkerEnvironment, stop: StopRequest, start: DriftStart
    ) -> None:
        self.job = job
        self.stop = stop
        self.training = Training(job, env)
        self.worker = self.training.worker
        self.suspensions = Suspensions().install()
        self.log = TrainingLog(self.training, self.suspensions)
        self.guard = DriftGuard(self.worker, job, start)
        # batch of the last step
        self.batch: tuple[Batch, Batch] | None = None
        self.checkpoints = Checkpoints(self.training, self.log, self.suspensions)
        self.saving = self.checkpoints.saving
        self.agreement = Agreement(self.worker, stop, self.saving.request, self.guard.look_every_s)
        # set already here: after a stop at an epoch's last step, the next save precedes any step
        self.worker.set_position(self.training.epochs_seen, self.training.epochs_seen)
        self.evaluator = Evaluator(self.training, stop)
        self.has_started = False

    def run(self) -> str:
        """Train all epochs, or until asked to stop."""
        try:
            with self.suspensions.blamed():
                return self._train_or_leave()
        except DivergedError as error:
            # in a study it is the training's result
            if self.training.study is None:
                raise
            return self._finish(NO_EVALUATION, str(error))
        finally:
            # first, as the wait for a checkpoint may be long
            self.log.metrics.close()
            self.checkpoints.close()

    def _train_or_leave(self) -> str:
        with contextlib.suppress(EvaluationStopped):
            return self._train()
        # an evaluation changes nothing in the training, and the resumed training begins with it
        self.training.progress.stopped = True
        self.checkpoints.save(wait=True)
        return leave(self.training, self.stop)

    def _train(self) -> str:
        progress = self.training.progress
        # evaluation of the current weights; None: there is none yet
        evaluation: Evaluation | None = None
        batches: Iterator[tuple[Batch, Batch]] | None = None
        while progress.epoch < self.training.epochs:
            batches = batches or self._begin()
            if not self._train_epoch(batches):
                return leave(self.training, self.stop)
            evaluation = NO_EVALUATION
            if self.training.is_evaluated(progress.epoch + 1):
                self._count_start()
                evaluation = self.evaluator.test()
                progress.evaluation_s += evaluation.seconds
            self._end_epoch(evaluation)
        self._count_start()
        return self._finish(evaluation or self.evaluator.test())

    def _train_epoch(self, batches: Iterator[tuple[Batch, Batch]]) -> bool:
        """Train the rest of the epoch; return False if all workers agreed to stop in it."""
        self.log.restart_window()
        while not self.training.epoch_ends:
            started = self.log.begin_step()
            self._train_step(batches)
            decision = self.agreement.decide(self.guard.readings)
            self.guard.clock.stop()
            self.checkpoints.step_ended(started, decision)
            if decision.stop:
                return False
            self._watch_drift(decision)
        return True

    def _watch_drift(self, decision: Decision) -> None:
        started = time.perf_counter()
        if self.batch is not None:
            self.guard.look(decision.shared, self.batch)
        # the time for probing a drift belongs to no step
        self.log.exclude(time.perf_counter() - started)

    def _train_step(self, batches: Iterator[tuple[Batch, Batch]]) -> None:
        progress, size = self.training.progress, self.training.global_batch
        self.guard.clock.start()
        self._set_position()
        inputs, targets = self._next_batch(batches)
        # dropout follows from (seed, rank, samples seen): a resumed run draws the same numbers as
        # an uninterrupted one
        seed = (self.job.sweep.workload.seed, self.training.env.rank, progress.samples_seen)
        self.worker.seed(hash(seed) % 2**63)
        self.guard.count_update()
        loss = self.worker.train_step(inputs, targets)
        progress.count_step(size)
        progress.epoch_steps += 1
        self.log.add_step(loss)

    def _set_position(self) -> None:
        start = self.training.epochs_seen
        rate = learning_rate(self.job.sweep, self.training.global_batch, start)
        for group in self.worker.optimizer.param_groups:
            group["lr"] = rate
        self.worker.set_position(start, self.training.epochs_after_step)

    def _next_batch(self, batches: Iterator[tuple[Batch, Batch]]) -> tuple[Batch, Batch]:
        # else two batches would be held while the step needs the most memory
        self.batch = None
        started = time.perf_counter()
        self.batch = batch = next(batches)
        waited_s = time.perf_counter() - started
        self.guard.clock.waited(waited_s)
        self.log.add_wait(waited_s)
        return batch

    def _begin(self) -> Iterator[tuple[Batch, Batch]]:
        """Return the batches from here on, once the first is there.

        Loader processes start with the first batch: as in a profile, that time belongs to the job's
        start and to no step.
        """
        progress = self.training.progress
        batches = self.worker.batches(progress.epoch, progress.offset)
        if self.training.epoch_ends:
            self._count_start()
            return batches
        first = deque([next(batches)])
        self._count_start()

        def following() -> Iterator[tuple[Batch, Batch]]:
            # popped, so that it is not held here while it is used
            yield first.popleft()
            yield from batches

        return following()

    def _count_start(self) -> None:
        """Count the time of this job up to its first work, unless it was counted before."""
        progress = self.training.progress
        if self.has_started:
            return
        self.has_started = True
        now = unix_time()
        progress.starts_s += max(0.0, now - job_started_at())
        if progress.samples_seen == 0:
            progress.started_at = now

    def _end_epoch(self, evaluation: Evaluation) -> None:
        progress = self.training.progress
        progress.count_epoch()
        progress.epoch_loss = float(self.log.epoch_loss)
        if self.training.study is not None and not math.isfinite(evaluation.loss):
            epochs = plural(progress.epoch, "epoch")
            raise DivergedError(f"the loss on the test set is not finite after {epochs}")
        progress.last_loss = progress.epoch_loss / max(1, progress.epoch_steps)
        self.log.write_epoch(evaluation)
        progress.begin_epoch()
        self.log.epoch_loss.zero_()
        is_last = progress.epoch >= self.training.epochs
        if is_last or self.training.any(self.saving.may_save):
            self.checkpoints.save(wait=is_last)

    def _finish(self, test: Evaluation, diverged: str = "") -> str:
        # readers take a training with a result to be complete
        self.log.metrics.flush()
        self.saving.settle()
        study = self.training.study
        on_training_samples: Evaluation | None = None
        if study is not None and not diverged:
            on_training_samples = self.evaluator.score_training_samples()
        write_result(self.training, test, on_training_samples, diverged)
        if study is not None:
            # a study has many trainings
            self.checkpoints.keep_last_only()
        return "finished"
