"""Start a worker of a job: load the pickle that was submitted, and no other.

    python -m tula_hpc.launch.job_start FOLDER INDEX SHA256

It replaces `python -m submitit.core._submit FOLDER`, which unpickles whatever it finds. As there,
submitit handles signals; but the job's result is not pickled, since nothing would load it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.logger import get_logger
from submitit.core.utils import UncompletedJobError

from tula_hpc.env import end_with_controller, enter_submission
from tula_hpc.errors import LaunchError, PreemptedError
from tula_hpc.launch import slurm
from tula_hpc.launch.job_files import RequeuePaths, load_pickle, with_time_outs_left

WAIT_S = 60.0


def main(arguments: Sequence[str]) -> None:
    """Load the job and do it.

    Raises:
        SystemExit: The pickle is not the one that was submitted.
    """
    # first of all: torch's import takes seconds, in which the controller may be killed
    end_with_controller()
    folder, index, sha256 = arguments
    enter_submission(folder)
    env, logger = JobEnvironment(), get_logger()
    logger.info(f"Starting with {env}")
    # a job on this machine has renamed its pickle, see `local_executor.take_pickle`
    name = f"{index}-{env.job_id}" if env.cluster == "local" else f"task-{index}"
    path = Path(folder, f"{name}.pkl")
    logger.info(f"Loading pickle: {path}")
    _await(path)
    try:
        job = load_pickle(path, sha256)
    except LaunchError as error:
        sys.exit(str(error))
    paths = RequeuePaths(folder, job_id=env.job_id, task_id=env.global_rank)
    job = with_time_outs_left(job, paths)
    if env.cluster == "slurm":
        ask = functools.partial(requeue, env.job_id, job._timeout_countdown)
        # submitit calls this method
        env._requeue = ask  # type: ignore[method-assign]
    env._handle_signals(paths, job)
    try:
        job.result()
    except Exception:
        logger.error("Submitted job triggered an exception")
        raise
    logger.info("Job completed successfully")


def requeue(job_id: str, time_outs_left: int, countdown: int) -> None:
    """Requeue a job that has to stop; submitit's own function takes a refusal for a bug.

    `time_outs_left` were left before the signal, `countdown` are left now: fewer if submitit counts
    this stop as a time-out.

    Raises:
        UncompletedJobError: The job reached its time limit, and Slurm refused.
        PreemptedError: The job stops for another reason, and Slurm refused.
    """
    words = slurm.requeue(job_id)
    if words is None:
        get_logger().info(f"Requeued job {job_id} ({countdown} remaining timeouts)")
    elif countdown < time_outs_left:
        message = f"Job not requeued because: timed-out, and requeue refused: {words}"
        raise UncompletedJobError(message)
    else:
        raise PreemptedError(f"requeue refused: {words}")


def _await(path: Path) -> None:
    """Wait for a file that another node wrote, which the file system may show late on this one."""
    deadline = time.monotonic() + WAIT_S
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
