"""Slurm's own commands: which jobs are still there, how they ended, and what that means."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tula_hpc.errors import Failure, LaunchError

COMMAND_TIMEOUT_S = 60
DEFAULT_LARGEST_ARRAY = 1001  # Slurm's own MaxArraySize
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


class JobState(NamedTuple):
    """What squeue says of one job: its state, and why it waits."""

    state: str
    reason: str

    @property
    def is_over(self) -> bool:
        """Whether the job will not run (again)."""
        return self.state in OVER


class StepState(NamedTuple):
    """One row of sacct: a job or one of its steps."""

    job_id: str
    state: str
    exit_code: str


def run_command(arguments: Sequence[str]) -> str:
    """Standard output of one of Slurm's commands.

    Raises:
        LaunchError: It failed or did not answer; the message holds its own words.
    """
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LaunchError(f"{arguments[0]} is not on PATH: is this a Slurm login node?") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{arguments[0]} did not answer within {COMMAND_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"{arguments[0]} failed: {(error.stderr or error.stdout).strip()}") from None
    return done.stdout


def available() -> bool:
    """Whether Slurm's commands are here."""
    return shutil.which("sbatch") is not None


def queue(job_ids: Iterable[str]) -> dict[str, JobState]:
    """States of those of the jobs that the controller still knows; a job that is long over is missing."""
    wanted = set(job_ids)
    if not wanted:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in wanted})
    try:
        text = run_command(["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(parents)])
    except LaunchError as error:
        if "Invalid job id" in str(error):  # squeue's answer when it knows none of them
            return {}
        raise
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == 2)
    return {job_id: JobState(state, reason) for job_id, state, reason in rows if job_id in wanted}


def largest_array() -> int:
    """Tasks that an array may have on this cluster; Slurm's default where the controller does not say."""
    try:
        text = run_command(["scontrol", "show", "config"])
    except LaunchError:
        return DEFAULT_LARGEST_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else DEFAULT_LARGEST_ARRAY


def steps(job_id: str) -> list[StepState]:
    """The job and its steps as accounting has them; empty where there is no accounting."""
    try:
        text = run_command(["sacct", "-n", "-P", "-j", job_id, "-o", "JobID,State,ExitCode"])
    except LaunchError:
        return []
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == 2)
    return [StepState(job, state.split(" ")[0], code) for job, state, code in rows]


class _Sign(NamedTuple):
    """What tells a failure: states of the job's steps, or words in its log."""

    failure: Failure
    states: frozenset[str]
    words: str


# In order: what is more specific first. A step that was killed for its memory leaves the *job* FAILED with exit 1:0.
_SIGNS = (
    _Sign(Failure.HOST_OOM, frozenset({"OUT_OF_MEMORY"}), r"oom-kill event|oom_kill|Exceeded job memory limit"),
    _Sign(
        Failure.DEVICE_OOM, frozenset(), r"OutOfMemoryError|CUDA (error: )?out of memory|Cuda failure.*out of memory"
    ),
    _Sign(Failure.NODE_FAILED, frozenset({"NODE_FAIL", "BOOT_FAIL"}), r"DUE TO NODE FAILURE"),
    _Sign(Failure.TIMED_OUT, frozenset({"TIMEOUT", "DEADLINE"}), r"DUE TO TIME LIMIT|not requeued because: timed-out"),
    _Sign(Failure.PREEMPTED, frozenset({"PREEMPTED"}), r"DUE TO PREEMPTION"),
)


def classify(rows: Sequence[StepState], log: str) -> Failure:
    """Why a job ended without a result, from its steps' states and the end of its log."""
    states = {"OUT_OF_MEMORY" if row.exit_code == "0:125" else row.state for row in rows}
    for sign in _SIGNS:
        if states & sign.states or re.search(sign.words, log):
            return sign.failure
    return Failure.CANCELLED if rows and rows[0].state == "CANCELLED" else Failure.BUG


def is_being_cancelled(job_id: str) -> bool:
    """Whether a running process's job is on its way out for good: scancel sends TERM as a preemption does.

    A job that is preempted or near its time limit is still RUNNING during its grace time.
    """
    try:
        text = run_command(["scontrol", "show", "job", "--oneliner", job_id])
    except LaunchError:
        return False  # unknown: a needless requeue does less harm than lost work
    return "JobState=RUNNING" not in text


def requeue(job_id: str) -> str | None:
    """Ask for a requeue of the running job; None when granted, else Slurm's words."""
    try:
        run_command(["scontrol", "requeue", job_id])
    except LaunchError as error:
        return str(error)
    return None
