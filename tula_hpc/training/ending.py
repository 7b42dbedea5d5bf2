"""Ends of a training: its result, a requeue after a stop, or running out of memory.

Course of a training on USR2 (before its time limit) and TERM (preemption, cancellation):

1. `StopRequest` in `ddp/stop_signals.py` notes the signal. `training/job.py` installs it before
   anything else.
2. `ddp/agreement.py`: about once a second all workers agree to stop, after the same step
   (`Agreement.decide`); within an evaluation, between two of its batches (`until_stopped`).
3. `training/loop.py` has them agree after each step. `checkpoint/safe_points.py` then saves, and
   waits until the checkpoint is on disk (`SafePoints.step_ended`).
4. `leave`, here, logs "preempted", and asks for a requeue of this job, up to
   `training.max_requeues` times in the jobs of one command; then the training fails. It does not
   ask where the job is cancelled, or Slurm requeues it by itself, which does not count. The process
   ends; on one machine its exit code asks submitit for the requeue.
5. The requeued job goes on from the checkpoint. Without a requeue, the command that waits submits
   another job, as `retry_policy.py` says (`stages/train.py`).

A script's training: the worker notes the signal (`attach/train/script_job.py`) and passes it on to
the script's process. If the script has no handler of its own, that process notes the signal in the
same way (`attach/train/script_training.py`). It agrees with the others after a step. With
`tula.keep` it does so between two batches, and saves (`attach/train/keeping.py`). In a further
training each process stops by itself, and its worker has those ended that still wait for it
(`WorkerPeers.end_others`). Once the process has ended, its worker goes on with 4.

A profile handles neither signal: submitit requeues it, see `launch/job_start.py`.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import WorkerEnvironment, job_started_at, slurm_job_id, unix_time
from tula_hpc.errors import RunDirectoryError, StageError
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.launch import slurm
from tula_hpc.launch.diagnosis import BY_HAND
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.profiling import record
from tula_hpc.records import RunDirectory, TrainResult, write_atomically
from tula_hpc.records.events import EventName, StopReason
from tula_hpc.training.evaluation import Evaluation
from tula_hpc.training.progress import Training

# not 0: the job must not count as completed
REQUEUED_EXIT_CODE = 1


def record_oom(job: TrainJob, env: WorkerEnvironment, failure: Failure, held: str) -> None:
    """Record that a configuration does not fit into memory, as a measurement and as an event.

    `held` is what `held_by_others` says of the process in which memory ran out.

    Raises:
        DeviceError: Nothing is recorded, see `record.refuse_shared_device`.
    """
    run = RunDirectory(job.root)
    tried = run.history().in_vain(job.label, Failure.DEVICE_FAILED)
    record.refuse_shared_device(held, job.configuration, tried)
    work = job.sweep.workload
    name = job.label.replace("/", "-")
    record.record_oom(
        run.profile / f"train-{name}.jsonl",
        job.cluster,
        job.configuration,
        env,
        failure,
        stage="train",
        partition=job.partition,
        identity=job.measured,
        accumulation=work.accumulation if work.accumulates else None,
    )
    run.log_event(
        "oom",
        "train",
        failure=failure,
        job_id=env.job_id,
        detail=str(job.configuration),
        data={"began_at": job_started_at()},
    )


class LeavingTraining(Protocol):
    """A training that leaves its job, as one of its workers sees it."""

    job: TrainJob
    env: WorkerEnvironment

    @property
    def progress(self) -> Any:
        """Return how far it came: `step` and `samples_seen`."""

    @property
    def is_main(self) -> bool:
        """True on rank 0."""

    def any(self, mine: bool) -> bool:
        """Tell whether `mine` is true on any worker; only rank 0's may be true. Collective."""

    def log_event(self, event: EventName, detail: str, data: dict[str, Any] | None = None) -> None:
        """Add an event of this training to the run's events."""


def leave(training: LeavingTraining, stop: StopRequest, saved: str = "saved at step") -> str:
    """Ask for a requeue of a training that was stopped and saved, and end. Collective.

    `saved` are the words before the number of the last step, in the event.

    Returns:
        `stopped` if the requeue was refused; `cancelled` or `preempted` if the job is on its way
        out. Else the process exits.

    Raises:
        StageError: The training was restarted as often as it may be.
    """
    progress = training.progress
    began = {"began_at": job_started_at()}
    data = {"step": progress.step, "samples_seen": progress.samples_seen}
    if training.is_main:
        name = "TERM" if stop.received is None else stop.received.name
        detail = f"stop requested ({name}); {saved} {progress.step}"
        training.log_event("preempted", detail, data | began)
    return _requeue(training, f"{saved} {progress.step}", data)


def _check_restarts(training: LeavingTraining, data: dict[str, Any]) -> None:
    most = training.job.sweep.training.max_requeues
    if training.any(training.is_main and _restarts(training) >= most):
        used_up = f"restarted {plural(most, 'time')}, as often as training.max_requeues allows"
        if training.is_main:
            training.log_event("failed", used_up, data | {"stop": StopReason.REQUEUES_EXHAUSTED})
        # no worker ends before that is on record: srun -K1 would end rank 0 with it
        training.any(False)
        raise StageError(used_up)


def _restarts(training: LeavingTraining) -> int:
    """Count the restarts that `training.max_requeues` bounds, from the events.

    A checkpoint's count has all restarts, also those of earlier commands and Slurm's own requeues.
    """
    job = training.job
    env = training.env
    try:
        history = RunDirectory(job.root).history()
    except RunDirectoryError:
        # a file that cannot be read just now must not end the training
        return 0
    if env.on_slurm:
        return history.times_continued(job.label, env.job_id, job.since, "requeued")
    # on one machine each stop is such a request, and this one is on record already
    return history.times_continued(job.label, env.job_id, job.since, "preempted") - 1


def _requeue(training: LeavingTraining, saved: str, data: dict[str, Any]) -> str:
    env = training.env
    job_id = slurm_job_id() or ""
    leaving = None
    if env.on_slurm and training.is_main:
        leaving = slurm.leaving(job_id)
    if training.any(leaving is slurm.Leaving.CANCELLED):
        if training.is_main:
            training.log_event("failed", f"{BY_HAND}; {saved}")
        return "cancelled"
    if training.any(leaving is slurm.Leaving.REQUEUED):
        # Slurm runs it again, however often it was restarted
        return "preempted"
    _check_restarts(training, data)
    if training.any(leaving is slurm.Leaving.PREEMPTED):
        # Slurm has ended it, and the command submits another job
        return "preempted"
    if not env.on_slurm:
        from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

        sys.exit(LOCAL_REQUEUE_RETURN_CODE)
    return _ask_for_requeue(training, job_id)


def _ask_for_requeue(training: LeavingTraining, job_id: str) -> str:
    """Return `stopped` if Slurm refuses to requeue the job; else the process exits. Collective."""
    refused = None
    if training.is_main:
        refused = slurm.requeue(job_id)
        if refused:
            stop = {"stop": StopReason.REQUEUE_REFUSED}
            training.log_event("failed", f"requeue refused: {refused}", stop)
        else:
            training.log_event("requeued", "requeued by the job itself")
    if training.any(refused is not None):
        return "stopped"
    sys.exit(REQUEUED_EXIT_CODE)


def write_result(
    training: Training, test: Evaluation, on_training_samples: Evaluation | None, diverged: str
) -> None:
    """Write the training's result on rank 0.

    `test` is the evaluation of the final weights, `on_training_samples` the one on training
    samples, if it is wanted. `diverged` is the error of a training whose loss is not finite; or "".
    """
    if not training.is_main:
        return
    job, progress = training.job, training.progress
    # the progress counts several starts from the same checkpoint as one
    restarts = RunDirectory(job.root).history().restarts(job.label)
    result = TrainResult(
        label=job.label,
        **job.configuration._asdict(),
        global_batch=training.global_batch,
        method=job.sweep.training.method,
        epochs=progress.epoch,
        steps=progress.step,
        samples_seen=progress.samples_seen,
        final_loss=None if diverged else progress.last_loss,
        test_loss=None if diverged else test.loss,
        test_accuracy=test.accuracy,
        test_top5_accuracy=test.top5_accuracy,
        train_time_s=progress.train_time_s,
        # the clock may have been set since an earlier run noted the beginning
        wall_time_s=max(progress.train_time_s, unix_time() - progress.started_at),
        restarts=max(progress.restarts, restarts),
        diverged=bool(diverged),
        train_accuracy=on_training_samples.accuracy if on_training_samples else None,
        train_top5_accuracy=on_training_samples.top5_accuracy if on_training_samples else None,
        starts_s=progress.starts_s,
        evaluation_s=progress.evaluation_s,
        saving_s=progress.saving_s,
    )
    write_atomically(training.files.result_file, result.model_dump_json(indent=1))
    began = {"began_at": job_started_at()}
    training.log_event("finished", diverged or test.text, began)
