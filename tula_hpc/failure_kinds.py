"""Kinds of failed jobs: why a job ended without a result.

Every job that ends so is of one kind, which decides whether it is submitted again, what the user is
told, and what the search learns of it.

A new kind is added here, with the error that means it, if any (`TulaError.failure` in `errors.py`;
also in `_TELLING` there if its name alone tells the kind), and in these two places:

- `launch/diagnosis.py` recognizes it in the states of Slurm and in logs; a job in whose
  process nothing is raised is of that kind only by its signs;
- `retry_policy.py` says how often its jobs are submitted again: without an entry a training's
  never are.

Whoever else branches on kinds is found by `grep -r Failure.`. `tests/test_retry_policy.py` fails
until a new kind is in its table.
"""

from __future__ import annotations

from enum import StrEnum


class Failure(StrEnum):
    """Reason why a job ended without a result.

    Values stand in events.jsonl and in measurements; one that was written keeps its meaning.
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
    # a GPU, its driver or NCCL's network is broken, not the program
    DEVICE_FAILED = "device_failed"
    # a process vanished without a message: SIGKILL from outside, or its node went down
    KILLED = "killed"
    # a disk is full, or a quota or file size limit reached
    NO_SPACE = "no_space"
    # by the user or an operator
    CANCELLED = "cancelled"
    # the user's model, data or settings are wrong; the log's last line says which
    BAD_INPUT = "bad_input"
    # the loss of a training is not finite; the log's last line says since when
    DIVERGED = "diverged"
    # an exception in user code or ours; the log's last lines say which
    BUG = "bug"

    @property
    def is_the_users(self) -> bool:
        """True if only a change by the user makes another attempt end in another way."""
        return self in (Failure.BAD_INPUT, Failure.DIVERGED)

    @property
    def is_oom(self) -> bool:
        """True if memory ran out, on device or host: a bound for the memory model."""
        return self in (Failure.DEVICE_OOM, Failure.HOST_OOM)
