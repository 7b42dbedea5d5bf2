"""Slurm's own commands: which jobs are still there, how they ended, and what that means."""

from __future__ import annotations

import getpass
import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from tula_hpc.errors import Failure, LaunchError

COMMAND_TIMEOUT_S = 60
PATIENCE_S = (2, 5, 10, 30, 60, 120, 300)  # pauses in which a controller may come back
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


def run_command(arguments: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Standard output of one of Slurm's commands.

    Raises:
        LaunchError: It failed or did not answer; the message holds its own words.
    """
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise LaunchError(f"{arguments[0]} is not on PATH: is this a Slurm login node?") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{arguments[0]} did not answer within {timeout_s:g} s") from None
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"{arguments[0]} failed: {(error.stderr or error.stdout).strip()}") from None
    return done.stdout


T = TypeVar("T")


def patiently(ask: Callable[[], T]) -> T:
    """An answer of the controller; one that does not answer for a while is waited out.

    Raises:
        LaunchError: There is no Slurm here, or no answer for 9 minutes.
    """
    words = ""
    for pause_s in PATIENCE_S:
        try:
            return ask()
        except LaunchError as error:
            if not available():
                raise
            words = str(error)
            time.sleep(pause_s)
    raise LaunchError(f"the Slurm controller has not answered for 9 minutes: {words}")


# sbatch's words where it cannot know whether the controller has taken the job
_UNANSWERED = re.compile(
    r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|Connection refused|"
    r"Connection timed out|Zero Bytes were transmitted|Transport endpoint|Resource temporarily unavailable|"
    r"Communication connection failure|Unexpected message received|Insane message length|Slurm backup controller",
    re.IGNORECASE,
)
_SUBMIT_LIMIT = re.compile(
    r"MaxSubmitJob|job submit limit|Job violates accounting/QOS policy|maximum number of jobs", re.IGNORECASE
)


def is_unanswered(words: str) -> bool:
    """Whether an error of sbatch leaves open if the job was accepted."""
    return bool(_UNANSWERED.search(words))


def is_submit_limit(words: str) -> bool:
    """Whether sbatch was refused because of how many jobs there are."""
    return bool(_SUBMIT_LIMIT.search(words))


def named(name: str) -> list[str]:
    """Ids of the jobs or arrays of that name, oldest first; from the controller and, as far as it goes, accounting.

    Raises:
        LaunchError: The controller does not answer.
    """
    ids = set(run_command(["squeue", "-h", "-t", "all", "-n", name, "-o", "%F"]).split())
    if not ids:
        try:
            text = run_command(["sacct", "-X", "-n", "-P", "-S", "now-30days", "--name", name, "-o", "JobID"])
        except LaunchError:  # no accounting
            text = ""
        ids = {line.partition("_")[0] for line in text.split()}
    return sorted(ids, key=int)


def task_ids(job_id: str, count: int) -> list[str]:
    """Ids of the tasks of an array of so many; a single one is a plain job."""
    return [job_id] if count == 1 else [f"{job_id}_{index}" for index in range(count)]


def own_jobs() -> int:
    """Jobs that this user has in the queue, tasks of arrays counted one by one."""
    return len(run_command(["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i"]).split())


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs or arrays; those that are over do not matter."""
    run_command(["scancel", *job_ids])


def available() -> bool:
    """Whether Slurm's commands are here."""
    return shutil.which("sbatch") is not None


def queue(job_ids: Iterable[str], timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, JobState]:
    """States of those of the jobs that the controller still knows; a job that is long over is missing."""
    wanted = set(job_ids)
    if not wanted:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in wanted})
    try:
        text = run_command(["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r", "-j", ",".join(parents)], timeout_s)
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


def steps(job_ids: Sequence[str]) -> dict[str, list[StepState]]:
    """The jobs and their steps as accounting has them; where there is no accounting the controller's last words.

    A job of which nobody knows anything is missing.
    """
    if not job_ids:
        return {}
    try:
        text = run_command(["sacct", "-n", "-P", "-j", ",".join(job_ids), "-o", "JobID,State,ExitCode"])
    except LaunchError:
        text = ""
    found: dict[str, list[StepState]] = {}
    for line in text.splitlines():
        if line.count("|") == 2:
            row = StepState(*line.split("|"))
            found.setdefault(row.job_id.partition(".")[0], []).append(row._replace(state=row.state.split(" ")[0]))
    return found or {job_id: rows for job_id in job_ids if (rows := _last_words(job_id))}


def _last_words(job_id: str) -> list[StepState]:
    """What the controller remembers of a job that is over: for `MinJobAge`, by default five minutes.

    DerivedExitCode is the highest of the steps: 0:125 where one was killed for its memory.
    """
    try:
        text = run_command(["scontrol", "show", "job", "--oneliner", job_id])
    except LaunchError:
        return []
    fields = dict(word.split("=", 1) for word in text.splitlines()[0].split() if "=" in word)
    state = fields.get("JobState", "")
    return [StepState(job_id, state, fields.get(key, "")) for key in ("ExitCode", "DerivedExitCode") if state]


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
    _Sign(Failure.NODE_FAILED, frozenset({"NODE_FAIL", "BOOT_FAIL"}), r"DUE TO NODE FAILURE|Node failure on"),
    _Sign(Failure.TIMED_OUT, frozenset({"TIMEOUT", "DEADLINE"}), r"DUE TO TIME LIMIT|not requeued because: timed-out"),
    _Sign(Failure.PREEMPTED, frozenset({"PREEMPTED"}), r"DUE TO PREEMPTION"),
    _Sign(Failure.NO_SPACE, frozenset(), r"No space left on device|Disk quota exceeded|File too large"),
)


def classify(rows: Sequence[StepState], log: str) -> Failure:
    """Why a job ended without a result, from its steps' states and the end of its log."""
    states = {"OUT_OF_MEMORY" if row.exit_code == "0:125" else row.state for row in rows}
    for sign in _SIGNS:
        if states & sign.states or re.search(sign.words, log):
            return sign.failure
    if rows and rows[0].state == "CANCELLED":
        return Failure.CANCELLED
    return Failure.KILLED if _vanished([row.exit_code for row in rows], log) else Failure.BUG


# what a worker says whose peer is gone, or that outlived its own job: another process's end is the reason
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection was likely closed|"
    r"failed to recv, got 0 bytes|is a left-over"
)
_KILLED = re.compile(r"task[s \d,-]*: Killed|^Killed$", re.MULTILINE)
_CRASHED = re.compile(r"Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception")
_CRASH_CODES = {"0:4", "0:6", "0:7", "0:8", "0:11"}  # signals that a process brings upon itself


def _vanished(exit_codes: Sequence[str], log: str) -> bool:
    """Whether a process was killed, or lost its peers to that, and none raised an exception of its own.

    When one raises, srun -K1 kills the others, who may have lost it as a peer before.
    """
    raised = _exceptions(log)
    lost = [line for line in raised if _PEER_LOST.search(line)]
    if len(lost) < len(raised) or _CRASHED.search(log) or _CRASH_CODES & set(exit_codes):
        return False
    return bool(lost or _KILLED.search(log) or {"0:9", "137:0"} & set(exit_codes))


def telling_line(log: str) -> str:
    """The line of a log that says most about its job's end, for a table: an exception, a sign of a kill, the last."""
    raised = _exceptions(log)
    own = [line for line in raised if not _PEER_LOST.search(line)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = "|".join([_KILLED.pattern, *(sign.words for sign in _SIGNS)])
    signs = [line for line in lines if re.search(telling, line)]
    said = [line for line in lines if not line.startswith(("submitit INFO", "submitit WARNING"))]
    return next(iter([*own, *signs, *raised, *said[-1:], *lines[-1:]]), "no log was written")[:500]


def _exceptions(log: str) -> list[str]:
    """The last lines of tracebacks: the first that is not indented after one that is."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in log.splitlines()]  # which torch puts before them
    pairs = itertools.pairwise(lines)
    return [line for above, line in pairs if above.startswith("  ") and re.match(r"[\w.]+(:|$)", line)]


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
