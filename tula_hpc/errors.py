"""Errors that this package raises on purpose.

    TulaError
    ├── InputError              the user's input is wrong (exit code 2)
    │   ├── RunDirectoryError   the run directory may not be used
    │   └── TrialError          a trial found a mistake in what the sweep file names
    ├── StageError              a stage failed (exit code 1)
    │   ├── LaunchError         a job could not be submitted or watched
    │   │   ├── NotStartedError         a command of the scheduler cannot be run here at all
    │   │   ├── NotConfiguredError      such a command runs, but finds no configuration
    │   │   └── RefusedError            the scheduler refused a submission
    │   │       └── SubmitLimitError    because of a limit of the site on submitted jobs
    │   ├── MeetingError        the workers of a job did not find each other
    │   ├── DataError           data could not be read this time
    │   ├── PreemptedError      the job had to make room for others
    │   ├── CancelledJobError   somebody cancelled the job
    │   ├── DeviceError         a device is broken, or other jobs hold its memory
    │   ├── StorageError        a file cannot be written: no space, no quota, or no right
    │   ├── NotEnoughDataError  too few measurements to fit a model
    │   ├── DivergedError       the loss is not finite
    │   └── InfeasibleError     no candidate satisfies memory and the constraints
    │       └── ConstraintsError    every candidate breaks a constraint of the objective
    └── CheckpointError         a checkpoint is missing, damaged or not made by this package

The kinds of failed jobs are in `failure_kinds.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tula_hpc.failure_kinds import Failure


class TulaError(Exception):
    """Root of all errors that this package raises on purpose."""

    # kind of failure of a job that ends with this error; None: the message or the cause decides
    failure: ClassVar[Failure | None] = None


class InputError(TulaError):
    """The user's input is wrong; the message names file, key and the expected input.

    Args:
        message: The mistake and the expected input, in one line.
        source: The file (or command-line option) that holds the input.
        key: Dotted key inside the source, for example ``search.min_batch``.
    """

    failure = Failure.BAD_INPUT

    def __init__(
        self, message: str, *, source: Path | str | None = None, key: str | None = None
    ) -> None:
        self.source = source
        self.key = key
        where = ": ".join(str(part) for part in (source, key) if part)
        super().__init__(f"{where}: {message}" if where else message)


class RunDirectoryError(InputError):
    """The run directory may not be used: it has other inputs or another owner, or is in use."""


class TrialError(InputError):
    """A trial of the workload has found a mistake in what the sweep file names."""


class StageError(TulaError):
    """A stage failed; the message says which, why, and where the log is."""

    failure = Failure.BUG


class LaunchError(StageError):
    """A job could not be submitted or watched."""


class NotStartedError(LaunchError):
    """A command of the scheduler cannot be run here at all: it is missing or not a program."""


class NotConfiguredError(LaunchError):
    """A command of the scheduler runs here, but finds no configuration, so that no wait helps."""


class RefusedError(LaunchError):
    """The scheduler refused a submission: no job came of it."""


class SubmitLimitError(RefusedError):
    """A limit of the site on submitted jobs is reached: fewer, or later ones, may be accepted."""


class MeetingError(StageError):
    """The workers of a job did not find each other."""

    failure = Failure.KILLED


class DataError(StageError):
    """Data could not be read this time: a file system failed, or a loader process was killed."""

    failure = Failure.KILLED


class PreemptedError(StageError):
    """The job had to make room for others and is not requeued, or was suspended for too long."""

    failure = Failure.PREEMPTED


class CancelledJobError(StageError):
    """The job was cancelled, by scancel or an operator: there is no cause to mend."""

    failure = Failure.CANCELLED


class DeviceError(StageError):
    """A device is broken, or other jobs hold its memory; other nodes can do the work."""

    failure = Failure.DEVICE_FAILED


class StorageError(StageError):
    """A file cannot be written; nothing half-written is left.

    Args:
        message: The file or folder, and the reason.
        is_folder_gone: The folder was deleted, with all that was in it.
    """

    failure = Failure.NO_SPACE

    def __init__(self, message: str, *, is_folder_gone: bool = False) -> None:
        self.is_folder_gone = is_folder_gone
        super().__init__(message)


class NotEnoughDataError(StageError):
    """Too few usable measurements to fit a model; the message names the missing ones."""


class DivergedError(StageError):
    """The loss is not finite."""

    failure = Failure.DIVERGED


class InfeasibleError(StageError):
    """No candidate satisfies the memory limit and the constraints."""


class ConstraintsError(InfeasibleError):
    """Every candidate breaks a constraint of the objective."""


class CheckpointError(TulaError):
    """A checkpoint is missing, damaged or not made by this package."""


_BY_FAILURE: dict[Failure | None, type[TulaError]] = {
    each.failure: each
    for each in (
        InputError,
        DivergedError,
        DeviceError,
        DataError,
        PreemptedError,
        StorageError,
        CancelledJobError,
    )
}


def error_for(failure: Failure | None) -> type[TulaError]:
    """Return the error whose name alone shows this kind of failure; `StageError` if none does."""
    return _BY_FAILURE.get(failure, StageError)
