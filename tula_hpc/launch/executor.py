"""Executor protocol: jobs run on Slurm or on this machine; types shared with the launcher."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tula_hpc.launch.slurm import JobState, StepState
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


class Executor(Protocol):
    """Runs the jobs of one cluster."""

    limits: Limits

    def check(self) -> None:
        """Raise `LaunchError` where nothing can be submitted from this machine."""

    def most_together(self, count: int) -> int:
        """Return how many of so many jobs fit into one submission."""

    def other_jobs(self) -> int:
        """Count this user's jobs, without the one that asks."""

    def submit(
        self, tasks: Sequence[Callable[[], Any]], request: Request, folder: Path
    ) -> list[str]:
        """Submit from a private folder that holds the notice; return the jobs' ids.

        Raises:
            SubmitLimitError: Fewer at a time, or later, may be accepted.
            RefusedError: The scheduler refused for another reason.
            LaunchError: It did not answer; whether there is a job is open.
            OSError: A job cannot be written.
        """

    def states(
        self, jobs: Sequence[Submitted], timeout_s: float | None = None
    ) -> dict[str, JobState]:
        """Return the states of those that are not over.

        Args:
            jobs: Which ones.
            timeout_s: For one answer; None waits for a scheduler that does not answer for a while.

        Raises:
            LaunchError: It has not answered.
        """

    def ended(self, jobs: Sequence[Submitted]) -> Mapping[str, Sequence[StepState]]:
        """Return the states of steps of jobs that are over."""

    def hosts(self, job: Submitted) -> list[str]:
        """Return the nodes of a job's last run in the order of their numbers; [] if unknown."""

    def cancel_command(self, jobs: Sequence[Submitted]) -> str:
        """Return the shell command that cancels these jobs."""

    def cancel(self, jobs: Sequence[Submitted]) -> None:
        """Cancel these jobs, as a user would; those that are over do not matter."""

    def parameters(self, request: Request) -> dict[str, Any]:
        """Return submitit's parameters for a submission."""

    def script(self, request: Request, folder: Path, tasks: int) -> str:
        """Return the batch script of a submission, for --dry-run; "" where jobs have none."""

    def find_lost(self, path: Path, notice: Notice, known: Collection[str]) -> list[str]:
        """Return the ids of the jobs that a killed command submitted, "" for those never begun.

        Args:
            path: Of the notice.
            notice: Its content.
            known: Ids of its jobs that are on record.
        """
