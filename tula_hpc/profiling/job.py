"""Entry of the built-in training's profile job. Importing this imports no torch, see `run`.

`profile_loop.py` measures, and describes the case that memory runs out. The profile job of a script
begins in `attach/script_profile_job.py`.
"""

from __future__ import annotations

from tula_hpc.ddp.exit_at_once import leaving_at_once
from tula_hpc.env import join_job, loading_libraries
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.profiling.work_queue import WorkQueue


def run(job: ProfileJob) -> int:
    """Measure and append; every worker calls this. Return how many configurations it measured."""
    env = join_job()
    # notes that the job began, before torch is imported, which takes seconds
    queue = WorkQueue(job, env)
    with loading_libraries():
        from tula_hpc.ddp.device_errors import reporting_broken_devices
        from tula_hpc.ddp.own_errors import explaining_own_mistakes
        from tula_hpc.profiling.profile_loop import run_profile

    with (
        leaving_at_once(),
        explaining_own_mistakes(job.sweep.workload),
        reporting_broken_devices(job.output.parent.parent, "profile"),
    ):
        return run_profile(job, env, queue)
