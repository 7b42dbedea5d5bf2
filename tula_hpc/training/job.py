"""The training job on its nodes. Importing this imports no torch, see `run`."""

from __future__ import annotations

from tula_hpc.ddp.exit_at_once import leaving_at_once
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import loading_libraries
from tula_hpc.launch.job_specs import TrainJob, resolve
from tula_hpc.records import RunDirectory


def run(job: TrainJob) -> str:
    """Train; every worker calls this.

    Returns:
        `finished`; or, after a stop, `stopped` if a requeue was refused, `cancelled` or
        `preempted` if the job is on its way out.
    """
    # installed before torch is imported, which takes seconds
    stop = StopRequest().install()
    # the folder may have been deleted while this job waited
    RunDirectory(job.root).make_train(job.label)
    with loading_libraries():
        from tula_hpc.ddp.device_errors import reporting_broken_devices
        from tula_hpc.ddp.own_errors import explaining_own_mistakes

        procedure = resolve(job.procedure)

    with (
        leaving_at_once(),
        explaining_own_mistakes(job.sweep.workload),
        reporting_broken_devices(job.root, "train"),
    ):
        return str(procedure(job, stop))
