"""How each worker of a job begins: from the pickle that was submitted, and no other.

    python -m tula_hpc.job_start FOLDER INDEX SHA256

It takes the place of `python -m submitit.core._submit FOLDER`, which unpickles what it finds. Signals are handled by
submitit as there; what the job returns is not pickled, since nobody would load it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.logger import get_logger

from tula_hpc.env import enter_submission
from tula_hpc.errors import LaunchError
from tula_hpc.job_pickle import RequeuePaths, load_pickle, with_time_outs_left

WAIT_S = 60.0


def main(arguments: Sequence[str]) -> None:
    """Load the job and do it.

    Raises:
        SystemExit: The pickle is not the one that was submitted.
    """
    folder, index, sha256 = arguments
    enter_submission(folder)
    env, logger = JobEnvironment(), get_logger()
    logger.info(f"Starting with {env}")
    path = _pickle_of(env, Path(folder), index)
    logger.info(f"Loading pickle: {path}")
    _await(path)
    try:
        job = load_pickle(path, sha256)
    except LaunchError as error:
        sys.exit(str(error))
    paths = RequeuePaths(folder, job_id=env.job_id, task_id=env.global_rank)
    env._handle_signals(paths, with_time_outs_left(job, paths))
    try:
        job.result()
    except Exception:
        logger.error("Submitted job triggered an exception")
        raise
    logger.info("Job completed successfully")


def _await(path: Path) -> None:
    """Wait a while for a file system that shows this node late what the submitter wrote."""
    deadline = time.monotonic() + WAIT_S
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(1.0)


def _pickle_of(env: JobEnvironment, folder: Path, index: str) -> Path:
    """A job on this machine has taken its pickle for itself, see `local_jobs`."""
    name = f"{index}-{env.job_id}" if env.cluster == "local" else f"task-{index}"
    return folder / f"{name}.pkl"


if __name__ == "__main__":
    main(sys.argv[1:])
