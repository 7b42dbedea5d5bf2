"""Entry of a profile job. Importing this imports no torch, see `run`.

`profile_loop.py` measures, and describes the case that memory runs out; for a script,
`attach/script_profile_job.py` measures.
"""

from __future__ import annotations

from tula_hpc.ddp.exit_at_once import leaving_at_once
from tula_hpc.env import join_job, loading_libraries
from tula_hpc.launch.job_specs import ProfileJob, resolve
from tula_hpc.profiling.work_queue import WorkQueue


def run(job: ProfileJob) -> int:
    """Measure and append; every worker calls this. Return how many configurations it measured."""
    env = join_job()
    # notes that the job began, before torch is imported, which takes seconds
    queue = WorkQueue(job, env)
    with loading_libraries():
        from tula_hpc.ddp.device_errors import reporting_broken_devices
        from tula_hpc.ddp.own_errors import explaining_own_mistakes

        procedure = resolve(job.procedure)

    with (
        leaving_at_once(),
        explaining_own_mistakes(job.sweep.workload),
        reporting_broken_devices(job.output.parent.parent, "profile"),
    ):
        return int(procedure(job, env, queue))
