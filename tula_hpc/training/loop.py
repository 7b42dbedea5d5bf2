"""What the final job runs: trains, evaluates, checkpoints, stops and resumes at a step boundary."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from tula_hpc.batches import Batch
from tula_hpc.checkpoint.background import Saving
from tula_hpc.checkpoint.interval import Cadence, expected_interruptions
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.data.datasets import training_samples
from tula_hpc.data.loader import make_test_loader, most_batches
from tula_hpc.ddp.agreement import (
    Agreed,
    Decision,
    EvaluationStopped,
    StopRequest,
    Suspensions,
    Wish,
    until_stopped,
)
from tula_hpc.ddp.methods import learning_rate
from tula_hpc.ddp.process_group import process_group
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment, join_job, slurm_job_id, unix_time
from tula_hpc.errors import DivergedError, Failure, StageError, StorageError
from tula_hpc.files import HeldFolder
from tula_hpc.launch import slurm
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.optim import CriticalBatch
from tula_hpc.process_memory import out_of_memory
from tula_hpc.profiling.record import oom_record
from tula_hpc.records import (
    EpochMetrics,
    RunDirectory,
    StepMetrics,
    TrainResult,
    append_record,
    rank_file,
    write_atomically,
)
from tula_hpc.training.drift import DriftGuard, DriftStart, begin_drift_watch
from tula_hpc.training.metrics import NO_EVALUATION, Evaluation, StepWindow, finite_or_none
from tula_hpc.training.per_worker_states import LocalStates

# not 0: the job must not count as completed
REQUEUED_EXIT_CODE = 1


def run_training(job: TrainJob, stop: StopRequest) -> str:
    """Train a job's configuration; see `TrainJob`."""
    env = join_job()
    failure: Failure | None = None
    outcome = ""
    try:
        with process_group(job.cluster, env):
            start = begin_drift_watch(job, env)
            job = replace(job, configuration=start.configuration)
            outcome = Trainer(job, env, stop, start).run()
    except (RuntimeError, MemoryError) as error:
        failure = out_of_memory(error)
        if failure is None:
            raise
    # outside the except block: the traceback keeps the tensors of the failed step alive
    if failure is not None:
        _record_oom(job, env, failure)
        raise SystemExit(f"out of memory ({failure}) at {job.configuration}: recorded")
    return outcome


def _record_oom(job: TrainJob, env: WorkerEnvironment, failure: Failure) -> None:
    run = RunDirectory(job.root)
    where = {"stage": "train", "partition": job.partition}
    record = oom_record(job.cluster, job.configuration, env, failure).model_copy(update=where)
    name = job.label.replace("/", "-")
    append_record(rank_file(run.profile / f"train-{name}.jsonl", env.rank), record)
    run.log_event("oom", "train", failure=failure, job_id=env.job_id, detail=str(job.configuration))


@dataclass
class Progress:
    """How far training has come; saved with every checkpoint. Samples, not steps: the batch may change on the way."""

    # epochs completed
    epoch: int = 0
    # samples seen of the current epoch, over all workers
    offset: int = 0
    samples_seen: int = 0
    step: int = 0
    epoch_steps: int = 0
    epoch_time_s: float = 0.0
    # sum of the steps' losses on rank 0 in this epoch
    epoch_loss: float = 0.0
    train_time_s: float = 0.0
    # Unix time of the first start
    started_at: float = 0.0
    restarts: int = 0
    # restarts after which work had to be done again
    interruptions: int = 0
    # what is saved here is the last word of its process
    stopped: bool = False
    # mean over the last whole epoch
    last_loss: float = 0.0


class Trainer:
    """One worker's training loop; a study's cell (`sweep.study` is there) differs from a plan's training.

    It evaluates less often if asked to, measures the accuracy on training samples at the end, keeps
    its last checkpoint only, and a loss that is not finite is its result, not an error.
    """

    def __init__(
        self, job: TrainJob, env: WorkerEnvironment, stop: StopRequest, start: DriftStart
    ) -> None:
        self.job, self.env, self.stop, self.study = job, env, stop, job.sweep.study
        self.run_directory = RunDirectory(job.root)
        self.files = self.run_directory.train(job.label)
        self.worker = Worker(job.sweep, job.cluster, job.configuration, env)
        self.samples_per_epoch = self.worker.samples
        self.store = CheckpointStore(self.files.checkpoints)
        self.local_states = LocalStates(self.files.checkpoints, self.worker)
        self.guard = DriftGuard(self.worker, job, start)
        self.window = StepWindow()
        self.suspensions = Suspensions().install()
        # rank 0 alone reads the noise
        self.critical_batch = CriticalBatch()
        if job.sweep.training.scale_histogram and env.rank == 0:
            self.worker.observer.count_scales()
        # of the last step
        self.batch: tuple[Batch, Batch] | None = None
        self.restart_count = env.restart_count
        self.progress = self._restore()
        self.saving = self._start_saving()
        self.agreed = Agreed(self.worker, stop, self.saving.wish, self.guard.look_every_s)
        seen = self._epochs_seen()
        # after a stop at an epoch's last step the next save comes before any step
        self.worker.set_position(seen, seen)
        self.epoch_loss = torch.tensor(
            self.progress.epoch_loss, dtype=torch.float64, device=self.worker.device
        )
        self.test_loader = self._loader(self.worker.workload.test)

    def _start_saving(self) -> Saving:
        training, pricing, progress = (
            self.job.sweep.training,
            self.job.cluster.pricing,
            self.progress,
        )
        trained_s = progress.train_time_s + progress.epoch_time_s
        nodes, seen = self.job.configuration.nodes, progress.interruptions
        interruptions = expected_interruptions(
            pricing, training, nodes, seen=seen, over_s=trained_s
        )
        fixed_s = None if training.checkpoint_minutes is None else training.checkpoint_s
        store, ground = (
            (self.store, HeldFolder(self.files.root)) if self.env.rank == 0 else (None, None)
        )
        return Saving(
            self.worker, store, self.local_states, Cadence(interruptions, fixed_s), ground
        )

    def _loader(self, samples: Dataset[Any]) -> DataLoader[Any]:
        """This worker's share of samples that are not augmented."""
        job, env = self.job, self.env
        return make_test_loader(
            samples,
            batch=max(64, job.configuration.local_batch),
            rank=env.rank,
            world_size=env.world_size,
            loader_workers=job.sweep.workload.loader_workers,
            pin_memory=self.worker.device.type == "cuda",
        )

    def run(self) -> str:
        """Train all epochs, or until asked to stop."""
        try:
            with self.suspensions.blamed():
                return self._train_or_leave()
        except DivergedError as error:
            if self.study is None:
                raise
            return self._finish(NO_EVALUATION, str(error))
        finally:
            self._end_saving()

    def _end_saving(self) -> None:
        """Whatever has ended the training, what was being saved comes to its end, and is mentioned if that is bad."""
        error = self.saving.abandon()
        if error is not None:
            # a full disk: what has ended the training must not get lost
            with contextlib.suppress(StorageError):
                self._event("checkpoint", f"not saved: {error}", {})

    def _train_or_leave(self) -> str:
        with contextlib.suppress(EvaluationStopped):
            return self._train()
        # an evaluation changes nothing of the training: whoever resumes here begins with it
        self.progress.stopped = True
        self._save(wait=True)
        return self._leave()

    def _train(self) -> str:
        last = self.job.sweep.workload.epochs
        # of the present weights
        evaluation: Evaluation | None = None
        batches: Iterator[tuple[Batch, Batch]] | None = None
        while self.progress.epoch < last:
            batches = batches or self.worker.batches(self.progress.epoch, self.progress.offset)
            if not self._train_epoch(batches):
                return self._leave()
            evaluation = self._evaluate_if_due(self.progress.epoch + 1)
            self._end_epoch(evaluation)
        return self._finish(evaluation or self._evaluate(self.test_loader))

    def _evaluate_if_due(self, epoch: int) -> Evaluation:
        """Of the test set, at the end of that epoch: of each, or in a study of some and the last."""
        every = self.study.evaluate_every if self.study else 1
        due = epoch % every == 0 or epoch == self.job.sweep.workload.epochs
        if not due:
            return NO_EVALUATION
        # what it still has to do is the steps' time
        self.worker.synchronize_device()
        started = time.perf_counter()
        evaluation = self._evaluate(self.test_loader)
        return evaluation._replace(seconds=time.perf_counter() - started)

    def _train_epoch(self, batches: Iterator[tuple[Batch, Batch]]) -> bool:
        """The rest of the current epoch in whole batches; False if all workers agreed to stop in the middle."""
        size = self.job.configuration.global_batch
        self.window = StepWindow()
        while self.progress.offset + size <= self.samples_per_epoch:
            started = time.perf_counter()
            self._train_step(batches)
            decision = self.agreed.decide(self.guard.readings)
            self.guard.clock.stop()
            self._count_time(started, decision)
            if decision.failed:
                # where all of them raise it
                self.saving.settle()
            if decision.save:
                self.progress.stopped = decision.stop
                self._save(wait=decision.stop)
            if decision.stop:
                return False
            self._watch_drift(decision)
        return True

    def _count_time(self, started: float, decision: Decision) -> None:
        """Of the step that is over. What the device still has to do is the steps' time, not a save's."""
        landed = self.saving.has_landed
        if decision.save or landed:
            self.worker.synchronize_device()
        seconds = time.perf_counter() - started
        if self.suspensions.take():
            # the step says nothing of what steps and saves take
            self.window.started += seconds
            seconds = 0.0
        self.progress.epoch_time_s += seconds
        self.saving.cadence.worked(seconds)
        if landed:
            self.saving.note()
            self._tell_cost()

    def _watch_drift(self, decision: Decision) -> None:
        """Time that looking into a drift takes is no step's time."""
        started = time.perf_counter()
        if self.batch is not None:
            self.guard.look(decision.shared, self.batch)
        self.window.started += time.perf_counter() - started

    def _train_step(self, batches: Iterator[tuple[Batch, Batch]]) -> None:
        progress, size = self.progress, self.job.configuration.global_batch
        self.guard.clock.start()
        self._place_step()
        inputs, targets = self._next_batch(batches)
        # dropout follows from (seed, rank, samples seen): a resumed run draws what it would have
        # drawn
        self.worker.seed(
            hash((self.job.sweep.workload.seed, self.env.rank, progress.samples_seen)) % 2**63
        )
        self.guard.count_update()
        loss = self.worker.train_step(inputs, targets)
        progress.offset += size
        progress.samples_seen += size
        progress.step += 1
        progress.epoch_steps += 1
        self.epoch_loss += loss
        self.window.add(loss)
        if progress.step % self.job.sweep.training.log_interval_steps == 0 or self._epoch_ends():
            self._log_steps()

    def _next_batch(self, batches: Iterator[tuple[Batch, Batch]]) -> tuple[Batch, Batch]:
        # or two batches would be held while the step needs the most memory
        self.batch = None
        started = time.perf_counter()
        self.batch = batch = next(batches)
        waited_s = time.perf_counter() - started
        self.guard.clock.waited(waited_s)
        self.window.waited_s += waited_s
        return batch

    def _epoch_ends(self) -> bool:
        return self.progress.offset + self.job.configuration.global_batch > self.samples_per_epoch

    def _place_step(self) -> None:
        """The rate, and what else of a step follows from the data seen so far."""
        progress, size = self.progress, self.job.configuration.global_batch
        start = self._epochs_seen()
        for group in self.worker.optimizer.param_groups:
            group["lr"] = learning_rate(self.job.sweep, size, start)
        # samples left over at the end are not trained on
        last = progress.offset + 2 * size > self.samples_per_epoch
        after = 1.0 if last else (progress.offset + size) / self.samples_per_epoch
        self.worker.set_position(start, progress.epoch + after)

    def _epochs_seen(self) -> float:
        return self.progress.epoch + self.progress.offset / self.samples_per_epoch

    def _epoch_share(self) -> float:
        """How much of the current epoch's whole batches are trained on: 1 at its end, whatever is left over."""
        size, offset = self.job.configuration.global_batch, self.progress.offset
        trained = offset + (self.samples_per_epoch - offset) // size * size
        return offset / trained if trained else 0.0

    def _log_steps(self) -> None:
        """One line for the steps since the last one. The device is waited for here, and only here."""
        progress, optimizer = self.progress, self.worker.optimizer
        waited_s = self.window.waited_s
        mean_loss, steps, seconds = self.window.close()
        if self._any_diverged(mean_loss):
            raise DivergedError(
                f"the loss is not finite at step {progress.step}; lower workload.lr or warm up longer"
            )
        if self.env.rank != 0:
            return
        noise = self.worker.observer.noise()
        self.critical_batch.add(noise, steps)
        append_record(
            self.files.metrics_file,
            StepMetrics(
                step=progress.step,
                samples_seen=progress.samples_seen,
                epoch=progress.epoch + self._epoch_share(),
                loss=mean_loss,
                lr=optimizer.param_groups[0]["lr"],
                step_time_s=seconds / steps,
                **self._gradients_seen(steps),
                data_time_s=waited_s / steps,
                noise_scale=finite_or_none(noise.noise_scale),
                noise_gradient_square=finite_or_none(noise.recent_square),
                noise_trace=finite_or_none(noise.recent_trace),
                scale_histogram=self.worker.observer.read_scales(),
            ),
            durable=False,
        )

    def _gradients_seen(self, steps: int) -> dict[str, float | None]:
        numbers = self.worker.observer.step_metrics(steps)
        return {name: finite_or_none(value) for name, value in numbers.items()}

    def _any_diverged(self, loss: float) -> bool:
        """Workers agree where all of them end with it, in a study; another training just fails."""
        diverged = not math.isfinite(loss)
        return diverged if self.study is None else self._any(diverged)

    def _evaluate(self, loader: DataLoader[Any]) -> Evaluation:
        """Loss and accuracy over all samples of the workers' loaders together; each has a share of them."""
        self.worker.share_buffers()
        sums = torch.zeros(4, dtype=torch.float64, device=self.worker.device)
        with self.worker.evaluating():
            for inputs, targets in self._until_stopped(loader):
                sums += self.worker.score(inputs, targets)
        loss, count, right, among_best = self.worker.total(*sums.tolist())
        return Evaluation(
            loss / count, finite_or_none(right / count), finite_or_none(among_best / count)
        )

    def _until_stopped(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a loader that `_loader` made, until all workers agree to stop."""
        # a checkpoint that is due, or has failed, can wait for the end of the evaluation
        agreed = Agreed(self.worker, self.stop, lambda: Wish.NOTHING)
        return until_stopped(loader, most_batches(loader, self.env.world_size), agreed)

    def _end_epoch(self, evaluation: Evaluation) -> None:
        progress = self.progress
        progress.epoch += 1
        progress.train_time_s += progress.epoch_time_s
        progress.epoch_loss = float(self.epoch_loss)
        if self.study is not None and not math.isfinite(evaluation.loss):
            raise DivergedError(
                f"the loss on the test set is not finite after {progress.epoch} epochs"
            )
        progress.last_loss = progress.epoch_loss / max(1, progress.epoch_steps)
        if self.env.rank == 0 and evaluation is not NO_EVALUATION:
            append_record(self.files.metrics_file, self._epoch_metrics(evaluation))
        progress.offset = progress.epoch_steps = 0
        progress.epoch_time_s = 0.0
        self.epoch_loss.zero_()
        is_last = progress.epoch >= self.job.sweep.workload.epochs
        if is_last or self._any(self.saving.may_save):
            self._save(wait=is_last)

    def _epoch_metrics(self, evaluation: Evaluation) -> EpochMetrics:
        progress = self.progress
        return EpochMetrics(
            epoch=progress.epoch,
            step=progress.step,
            samples_seen=progress.samples_seen,
            global_batch=self.job.configuration.global_batch,
            train_loss=progress.last_loss,
            test_loss=evaluation.loss,
            test_accuracy=evaluation.accuracy,
            test_top5_accuracy=evaluation.top5_accuracy,
            epoch_time_s=progress.epoch_time_s,
            steps=progress.epoch_steps,
            noise_scale=finite_or_none(self.worker.observer.noise().noise_scale),
            critical_batch=finite_or_none(self.critical_batch.take()),
            evaluation_time_s=evaluation.seconds,
            workers=self.env.world_size,
        )

    def _save(self, *, wait: bool = False) -> None:
        """A checkpoint of this moment. It is on disk some time later, or on return if it is waited for."""
        if self.window.steps:
            # or the losses since the last line would be lost to a resumed run
            self._log_steps()
        seen = self.progress.samples_seen
        self.saving.save(
            self._state, samples_seen=seen, restart_count=self.restart_count, wait=wait
        )
        self._tell_cost()
        # the time of saving is no step's time
        self.window = StepWindow()

    def _tell_cost(self) -> None:
        """An event for what saving costs, the first time and when it has changed by much."""
        news = self.saving.cadence.news()
        if news is not None:
            shown = (
                f"saving costs {news['cost_s']:.3g} s of training, {news['share']:.2%} of it so far"
            )
            self._event("checkpoint", f"{shown}; one every {news['interval_s']:.0f} s", news)

    def _state(self) -> dict[str, Any]:
        """A checkpoint's content, whole on rank 0, {} on the others. Collective."""
        self.progress.epoch_loss = float(self.epoch_loss)
        optimizer_state = self.worker.optimizer_state()
        if self.env.rank != 0:
            return {}
        observer_state = self.worker.observer.extra_state()
        return {
            "model": self.worker.model.state_dict(),
            "optimizer": optimizer_state,
            "scaler": self.worker.scaler.state_dict(),
            "progress": asdict(self.progress),
            "critical_batch": self.critical_batch.state_dict(),
            "global_batch": self.job.configuration.global_batch,
            **({"observer": observer_state} if observer_state else {}),
        }

    def _restore(self) -> Progress:
        """State of the newest good checkpoint, or the initial one.

        DDP regroups its gradient buckets after the first backward pass, which changes the order of
        additions. One pass is thrown away before any state is set, so that a resumed run adds in
        the same order as an uninterrupted one.
        """
        initial = {key: value.clone() for key, value in self.worker.model.state_dict().items()}
        self._throw_away_one_pass()
        # on the host: on a GPU, Adam's step counts would be waited for at every step
        loaded = self.store.load_latest()
        self._check_same(loaded)
        if loaded is None:
            self.worker.model.load_state_dict(initial)
            return Progress(started_at=unix_time())
        self.worker.load_own_state(self.local_states.load(loaded))
        self.worker.observer.load_extra_state(loaded.state.get("observer"))
        if "critical_batch" in loaded.state:
            self.critical_batch.load_state_dict(loaded.state["critical_batch"])
        # a resubmitted job counts its restarts from 0 again, and would be fenced out as the stale
        # one
        self.restart_count = max(self.restart_count, loaded.restart_count + 1)
        progress = Progress(**loaded.state["progress"])
        progress.restarts += 1
        progress.interruptions += not progress.stopped
        progress.stopped = False
        self._log_resume(progress, loaded)
        return progress

    def _check_same(self, loaded: LoadedCheckpoint | None) -> None:
        """All workers must go on from one checkpoint; a stale directory listing on one node must not split them."""
        mine = (
            (-1.0, -1.0)
            if loaded is None
            else (float(loaded.restart_count), float(loaded.samples_seen))
        )
        highest = self.worker.agree(*mine)
        lowest = self.worker.agree(*(-value for value in mine))
        if highest != [-value for value in lowest]:
            raise StageError(
                f"workers see different checkpoints in {self.store.folder}; start the job again"
            )

    def _throw_away_one_pass(self) -> None:
        first = self.worker.loader.dataset[(0, 0)]
        inputs, targets = default_collate([first] * self.job.configuration.local_batch)
        self.worker.forward_backward(*self.worker.to_device(inputs, targets))
        self.worker.optimizer.zero_grad(set_to_none=True)

    def _log_resume(self, progress: Progress, loaded: LoadedCheckpoint) -> None:
        if self.env.rank != 0:
            return
        refused = "; ".join(f"{bad.name} refused: {why}" for bad, why in loaded.rejected)
        detail = f"from {loaded.path.name} at step {progress.step}{self.local_states.note(loaded)}"
        detail += f" ({refused})" if refused else ""
        data = {
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "epoch": progress.epoch,
        }
        self._event("resumed", detail, data)

    def _leave(self) -> str:
        """Stopped with everything saved: ask for a requeue and end."""
        name = "TERM" if self.stop.received is None else self.stop.received.name
        data = {"step": self.progress.step, "samples_seen": self.progress.samples_seen}
        if self.env.rank == 0:
            self._event(
                "preempted", f"stop requested ({name}); saved at step {self.progress.step}", data
            )
        if self.progress.restarts >= self.job.sweep.training.max_requeues:
            used_up = f"restarted {self.progress.restarts} times, as often as training.max_requeues allows"
            if self.env.rank == 0:
                self._event("failed", used_up, data)
            raise StageError(used_up)
        return self._requeue()

    def _requeue(self) -> str:
        job_id = slurm_job_id() or ""
        leaving = slurm.leaving(job_id) if self.env.on_slurm and self.env.rank == 0 else None
        if self._any(leaving is slurm.Leaving.CANCELLED):
            if self.env.rank == 0:
                self._event("failed", "cancelled; what was done is saved", {})
            return "cancelled"
        if self._any(leaving is slurm.Leaving.PREEMPTED):
            # Slurm requeues it by itself, or has ended it: then the command submits another job
            return "preempted"
        if not self.env.on_slurm:
            from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

            sys.exit(LOCAL_REQUEUE_RETURN_CODE)
        refused = slurm.requeue(job_id) if self.env.rank == 0 else None
        is_refused = self._any(refused is not None)
        if self.env.rank == 0:
            detail = f"requeue refused: {refused}" if refused else "requeued by the job itself"
            self._event("failed" if refused else "requeued", detail, {})
        if is_refused:
            return "stopped"
        sys.exit(REQUEUED_EXIT_CODE)

    def _any(self, mine: bool) -> bool:
        (largest,) = self.worker.agree(float(mine))
        return bool(largest)

    def _event(self, event: str, detail: str, data: dict[str, Any]) -> None:
        self.run_directory.log_event(
            event, "train", detail=detail, job_id=self.env.job_id, data=data
        )

    def _finish(self, evaluation: Evaluation, diverged: str = "") -> str:
        self.saving.settle()
        progress, configuration = self.progress, self.job.configuration
        training = self._evaluate_training() if self.study is not None and not diverged else None
        result = TrainResult(
            label=self.job.label,
            nodes=configuration.nodes,
            workers_per_node=configuration.workers_per_node,
            local_batch=configuration.local_batch,
            global_batch=configuration.global_batch,
            method=self.job.sweep.training.method,
            epochs=progress.epoch,
            steps=progress.step,
            samples_seen=progress.samples_seen,
            final_loss=progress.last_loss,
            test_loss=None if diverged else evaluation.loss,
            test_accuracy=evaluation.accuracy,
            test_top5_accuracy=evaluation.top5_accuracy,
            train_time_s=progress.train_time_s,
            # an earlier run began by another look at the clock, which may have been set since
            wall_time_s=max(progress.train_time_s, unix_time() - progress.started_at),
            restarts=progress.restarts,
            diverged=bool(diverged),
            train_accuracy=training.accuracy if training else None,
            train_top5_accuracy=training.top5_accuracy if training else None,
        )
        if self.study is not None:
            self.local_states.keep_newest_only()
        if self.env.rank == 0:
            write_atomically(self.files.result_file, result.model_dump_json(indent=1))
            self._event("finished", diverged or evaluation.words, {})
            if self.study is not None:
                self.store.keep_newest_only()
        return "finished"

    def _evaluate_training(self) -> Evaluation:
        """Of a fixed choice of training samples as they are, at the end."""
        return self._evaluate(self._loader(training_samples(self.job.sweep.workload)))
