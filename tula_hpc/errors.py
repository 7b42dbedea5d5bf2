"""Errors that this package raises on purpose, and reasons of failed jobs.

    TulaError
    ├── InputError              the user's input is wrong (exit code 2)
    │   └── RunDirectoryError   the run directory may not be used
    ├── StageError              a stage failed (exit code 1)
    │   ├── LaunchError         a job could not be submitted or watched
    │   │   ├── NotStartedError         a command of the scheduler cannot be run here at all
    │   │   └── RefusedError            the scheduler refused
    │   │       └── SubmitLimitError    because of a limit of the site on submitted jobs
    │   ├── MeetingError        the workers of a job did not find each other
    │   ├── PreemptedError      the job had to make room for others
    │   ├── DeviceError         a device of a node, or its driver, is broken
    │   ├── StorageError        a file cannot be written: no space, no quota, or no right
    │   ├── NotEnoughDataError  too few measurements to fit a model
    │   ├── DivergedError       the loss is not finite
    │   └── InfeasibleError     no candidate satisfies memory and the constraints
    └── CheckpointError         a checkpoint is missing, damaged or not ours

`Failure` names the reason of each job that ended without a result.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class TulaError(Exception):
    """Root of all errors that this package raises on purpose."""


class InputError(TulaError):
    """The user's input is wrong; the message names file, key and what was expected.

    Args:
        message: The mistake and what was expected, in one line.
        source: The file (or command-line option) that holds the input.
        key: Dotted key inside the source, for example ``search.min_batch``.
    """

    def __init__(
        self, message: str, *, source: Path | str | None = None, key: str | None = None
    ) -> None:
        self.source = source
        self.key = key
        where = ": ".join(str(part) for part in (source, key) if part)
        super().__init__(f"{where}: {message}" if where else message)


class RunDirectoryError(InputError):
    """The run directory may not be used: it has other inputs or another owner, or is in use."""


class StageError(TulaError):
    """A stage failed; the message says which, why, and where the log is."""


class LaunchError(StageError):
    """A job could not be submitted or watched."""


class NotStartedError(LaunchError):
    """A command of the scheduler cannot be run here at all: it is missing or not a program."""


class RefusedError(LaunchError):
    """The scheduler refused: there is no such job."""


class SubmitLimitError(RefusedError):
    """A limit of the site on submitted jobs is reached: fewer, or later ones, may be accepted."""


class MeetingError(StageError):
    """The workers of a job did not find each other."""


class PreemptedError(StageError):
    """The job had to make room for others and is not requeued, or was suspended for too long."""


class DeviceError(StageError):
    """A device of a node, or its driver, is broken; other nodes can do the work."""


class StorageError(StageError):
    """A file cannot be written; nothing half-written is left."""


class NotEnoughDataError(StageError):
    """Too few usable measurements to fit a model; the message names the missing ones."""


class DivergedError(StageError):
    """The loss is not finite."""


class InfeasibleError(StageError):
    """No candidate satisfies the memory limit and the constraints."""


class CheckpointError(TulaError):
    """A checkpoint is missing, damaged or not one of ours."""


class Failure(StrEnum):
    """Reason why a job ended without a result.

    A new kind also needs its signs in `launch/reasons.py` and its number of attempts in the tables of
    `retries.py`; without these its jobs are not submitted again.
    """

    # the accelerator's memory ran out
    DEVICE_OOM = "device_oom"
    # the node's memory limit (cgroup) killed a process
    HOST_OOM = "host_oom"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed_out"
    NODE_FAILED = "node_failed"
    # a GPU, its driver or NCCL's network is broken, not the program
    DEVICE_FAILED = "device_failed"
    # a process vanished without a message: SIGKILL from outside, or its node went down
    KILLED = "killed"
    # a disk is full, or a quota or file size limit reached
    NO_SPACE = "no_space"
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
