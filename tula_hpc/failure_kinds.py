r"""Kinds of failed jobs: why a job ended without a result.

The kind decides whether the job is submitted again, what the user reads, and what the search learns
from it.

To add a kind, define it here, and in `errors.py` the error that means it, if any
(`TulaError.failure`, and `_BY_FAILURE` if the error's name alone shows the kind). Two places
follow:

- `launch/diagnosis.py` recognizes the kind in the states of Slurm and in logs; these signs are all
  there is for a job whose process raises no error;
- `retry_policy.py` says how often a job that failed like this is submitted again; without an entry
  a training's job never is.

`grep -rE '\bFailure\.|is_oom|is_the_users|FOR_THE_USER' tula_hpc analysis` finds the other code that
branches on kinds. `tests/test_retry_policy.py` fails
until a new kind is in its table.
"""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """Reason why a job ended without a result.

    Values are stored in events.jsonl and in measurements, so a value never changes its meaning.
    """

    # the accelerator's memory ran out
    DEVICE_OOM = "device_oom"
    # the node's memory limit (cgroup) killed a process
    HOST_OOM = "host_oom"
    # Slurm took the nodes for another job, or somebody had the job requeued
    PREEMPTED = "preempted"
    # the job's time limit is over
    TIMED_OUT = "timed_out"
    # Slurm lost a node of the job
    NODE_FAILED = "node_failed"
    # a GPU, its driver or NCCL's network is broken, or other jobs hold the GPU's memory
    DEVICE_FAILED = "device_failed"
    # a process vanished without a message: SIGKILL from outside, or its node went down
    KILLED = "killed"
    # a disk is full, or a quota or file size limit reached
    NO_SPACE = "no_space"
    # the user or an operator cancelled the job
    CANCELLED = "cancelled"
    # the user's model, data or settings are wrong; the log's last line says which
    BAD_INPUT = "bad_input"
    # the loss of a training is not finite; the log's last line says since when
    DIVERGED = "diverged"
    # an exception in user code or ours; the log's last lines say which
    BUG = "bug"

    @property
    def is_the_users(self) -> bool:
        """True if another attempt would end the same way until the user changes something."""
        return self in (Failure.BAD_INPUT, Failure.DIVERGED)

    @property
    def is_oom(self) -> bool:
        """True if memory ran out, on device or host: a bound for the memory model."""
        return self in (Failure.DEVICE_OOM, Failure.HOST_OOM)
