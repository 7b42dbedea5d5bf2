"""A worker of a job on this machine that fails takes the others with it, after a while for their own words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.test_launch import launcher
from tula_hpc.errors import Failure


def fails_with_a_peer_that_waits(exit_code: int) -> Callable[[], None]:
    """A job of which rank 1 ends with an error, or by SIGKILL, while rank 0 waits for it as it would over nccl."""

    def job() -> None:
        if os.environ["SUBMITIT_LOCAL_GLOBALID"] == "0":
            time.sleep(300)
        elif exit_code < 0:
            os.kill(os.getpid(), -exit_code)
        else:
            raise KeyError("of rank 1")

    return job


def test_a_worker_that_fails_ends_its_job(tmp_path: Path) -> None:
    local = launcher(tmp_path, workers_per_node=2, array_parallelism=2)
    jobs = [fails_with_a_peer_that_waits(exit_code) for exit_code in (1, -9)]
    raised, killed = local.wait(local.submit(jobs, stage="train", nodes=1, minutes=4))
    assert raised.failure is Failure.BUG
    assert "of rank 1" in raised.log_tail
    assert killed.failure is Failure.KILLED
    assert "task 1: Killed" in killed.log_tail
