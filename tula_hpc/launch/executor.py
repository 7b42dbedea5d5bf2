"""Requests, notices and the pace of looks, which executors of jobs share with the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.records import Record


class Submitted(NamedTuple):
    """A job on its way: its id and the folder of its logs."""

    job_id: str
    folder: Path

    def log_files(self) -> list[Path]:
        """Return standard error, then standard output, of every task so far."""
        return [
            *sorted(self.folder.glob(f"{self.job_id}_*.err")),
            *sorted(self.folder.glob(f"{self.job_id}_*.out")),
        ]

    @property
    def array_id(self) -> str:
        """Id of the array that the job is a task of; its own id for a plain job."""
        return self.job_id.partition("_")[0]


class Request(NamedTuple):
    """Shape of a submission, the same for all of its jobs."""

    stage: str
    nodes: int
    # time limit of each job
    minutes: int
    # ids of jobs that must be over before
    after: tuple[str, ...] = ()
    # of the job or array, unique to the submission
    name: str = ""
    # hosts to keep the jobs off
    avoided: tuple[str, ...] = ()


class Notice(Record):
    """Content of submission.json, written before the submission is made.

    Its name finds jobs that a killed command could not record.
    """

    # of the job or array; unique
    name: str
    stage: str
    # see `Event.data` of "submitted"
    tasks: list[dict[str, Any]]


# seconds, between the looks that decide whether a job is over
MISSED_PAUSE_S = 1.0


class Limits(NamedTuple):
    """Pace at which an executor is asked, and whether its jobs can leave this machine."""

    # a job is over when so many looks in a row have missed it
    gone_polls: int
    # seconds from one look to the next, at first and after half an hour
    poll_s: float
    longest_poll_s: float
    several_hosts: bool

    def pause_s(self, waited_s: float, *, missed: bool) -> float:
        """Return the pause before the next look: long waits ask less often.

        Args:
            waited_s: Seconds of waiting so far.
            missed: The last look missed a job, and a few more decide whether it is over.
        """
        if missed:
            return min(self.poll_s, MISSED_PAUSE_S)
        return min(self.longest_poll_s, max(self.poll_s, waited_s / 60))
