from __future__ import annotations

import pytest

from tula_hpc.errors import Failure
from tula_hpc.slurm import JobState, StepState, classify


def rows(*states: tuple[str, str, str]) -> list[StepState]:
    return [StepState(*state) for state in states]


@pytest.mark.parametrize(
    ("steps", "log", "failure"),
    [
        # as sacct of Slurm 22.05 shows a step over its memory: the job itself only says FAILED
        (
            rows(("7", "FAILED", "1:0"), ("7.batch", "FAILED", "1:0"), ("7.0", "OUT_OF_MEMORY", "0:125")),
            "",
            Failure.HOST_OOM,
        ),
        ([], "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.", Failure.HOST_OOM),
        (rows(("7", "FAILED", "1:0")), "torch.OutOfMemoryError: CUDA out of memory.", Failure.DEVICE_OOM),
        (rows(("7", "NODE_FAIL", "0:0")), "", Failure.NODE_FAILED),
        (rows(("7", "TIMEOUT", "0:0"), ("7.0", "CANCELLED", "0:15")), "", Failure.TIMED_OUT),
        ([], "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***", Failure.TIMED_OUT),
        (rows(("7", "PREEMPTED", "0:0")), "", Failure.PREEMPTED),
        (rows(("7", "CANCELLED", "0:0")), "", Failure.CANCELLED),
        (rows(("7", "FAILED", "1:0")), "Traceback (most recent call last):\nKeyError: 'x'", Failure.BUG),
        ([], "", Failure.BUG),
    ],
)
def test_failures_are_told_apart(steps: list[StepState], log: str, failure: Failure) -> None:
    assert classify(steps, log) is failure


def test_requeued_and_suspended_jobs_are_not_over() -> None:
    for state in ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUE_HOLD", "REQUEUED"):
        assert not JobState(state, "").is_over
    for state in ("COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED"):
        assert JobState(state, "").is_over
