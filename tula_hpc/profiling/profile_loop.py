"""Loop of the built-in training's profile job: measures one configuration after another.

Where memory runs out:

1. The worker that meets it records "oom" (`record.record_oom`) and ends with an error, which ends
   the job. If processes outside of the job held much of its GPU, the GPU counts as broken instead:
   the next job avoids the host (`record.refuse_shared_device`). A script's profile does the same,
   once the worker has heard of it from the script's process: `_fail` in
   `attach/script_profile_job.py`.
2. Where the kernel or Slurm killed the job before it could, `stages/profile.py` writes that record
   in its place (`_record_end`), for the configuration that `blamed_configuration` finds to blame.
3. The next round proposes no such batch and no larger one on any number of nodes (`believed_to_fit`
   in `analysis/search/propose.py`); a script that accumulates gradients takes such a batch in more
   forward passes. The configurations that the job had not measured yet are submitted again, unless
   that bound rules them out.

Any other error ends the job as well; `retry_policy.py` decides whether another job follows.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta

from tula_hpc.ddp.process_group import Allocation
from tula_hpc.env import WorkerEnvironment, job_started_at
from tula_hpc.errors import StorageError
from tula_hpc.files import HeldFolder
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.process_memory import held_by_others, out_of_memory
from tula_hpc.profiling.measure import SharedTimes, measure
from tula_hpc.profiling.record import broken_devices, record_oom, refuse_shared_device
from tula_hpc.profiling.work_queue import WorkQueue
from tula_hpc.records import Configuration, Identity, append_record
from tula_hpc.workloads.workload import own_code


def run_profile(job: ProfileJob, env: WorkerEnvironment, queue: WorkQueue) -> int:
    """Measure a job's configurations; see `ProfileJob`."""
    allocation = Allocation(job.cluster, env, timedelta(minutes=job.cluster.profile_minutes))
    shared = SharedTimes()
    # done before anything is metered: it takes memory for a moment, which is not the training's
    own_code(tuple(job.sweep.workload.entry_points))
    folder = HeldFolder(job.output.parent)
    measured = 0
    while (configuration := _next(allocation, queue)) is not None:
        member = allocation.join(configuration.nodes)
        if member is not None:
            # the start of the job is measured with its first configuration
            began_at = job_started_at() if measured == 0 else None
            _measure_and_record(job, configuration, member, shared, folder, began_at=began_at)
            measured += 1
    allocation.close()
    return measured


def _next(allocation: Allocation, queue: WorkQueue) -> Configuration | None:
    """Return the next configuration of rank 0's queue, None at its end. Collective."""
    fields = json.loads(allocation.broadcast(lambda: json.dumps(queue.next())))
    if fields is None:
        return None
    return Configuration(*fields)


def _measure_and_record(
    job: ProfileJob,
    configuration: Configuration,
    env: WorkerEnvironment,
    shared: SharedTimes,
    folder: HeldFolder,
    *,
    began_at: float | None,
) -> None:
    failure = measurement = None
    held = ""
    built: list[Identity] = []
    try:
        measurement = measure(
            job.sweep,
            job.cluster,
            configuration,
            env,
            shared,
            job_began_at=began_at,
            on_built=built.append,
        )
    except (RuntimeError, MemoryError) as error:
        failure = out_of_memory(error)
        held = held_by_others(error, os.getppid())
        if failure is None:
            raise
    if loss := folder.loss("measured"):
        raise StorageError(loss)
    # outside the except block: the traceback keeps the tensors of the failed step alive
    if failure is not None:
        refuse_shared_device(held, configuration, broken_devices(job, configuration))
        record_oom(
            job.output,
            job.cluster,
            configuration,
            env,
            failure,
            partition=job.partition,
            identity=next(iter(built), None),
        )
        # the peers wait in a collective: ending with an error lets srun -K1 or gloo end them too
        raise SystemExit(f"out of memory ({failure}) at {configuration}: recorded")
    if env.rank == 0 and measurement is not None:
        cost = {"partition": job.partition, "node_seconds": job.nodes * measurement.elapsed_s}
        append_record(job.output, measurement.model_copy(update=cost))
