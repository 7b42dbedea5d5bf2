"""Slurm's own commands: which jobs are still there, and what is on record of those that are not."""

from __future__ import annotations

import contextlib
import getpass
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from tula_hpc.env import restart_count, without_filters
from tula_hpc.errors import LaunchError

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
    """Standard output of one of Slurm's commands, without the filters that a user may have set for squeue.

    Raises:
        LaunchError: It failed or did not answer; the message holds its own words.
    """
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=without_filters(),
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
    """An answer of the controller; one that does not answer for a while is waited out, and the user told of it.

    Raises:
        LaunchError: There is no Slurm here, or no answer for 9 minutes.
    """
    pauses, waited = iter(PATIENCE_S), False
    while True:
        try:
            answer = ask()
        except LaunchError as error:
            if not available():
                raise
            words, pause_s = in_one_line(error), next(pauses, None)
            if pause_s is None:
                raise LaunchError(f"the Slurm controller has not answered for 9 minutes: {words}") from None
            say(f"Slurm does not answer ({words}); trying again in {pause_s} s")
            time.sleep(pause_s)
            waited = True
        else:
            if waited:
                say("Slurm answers again")
            return answer


def in_one_line(error: LaunchError) -> str:
    """Which command failed, and the last of what it said: what led to that comes before."""
    first, *others = [line.strip() for line in str(error).splitlines()]
    return f"{first.partition(':')[0]}: {others[-1]}" if others else first


def say(line: str) -> None:
    """Tell whoever waits, at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


# sbatch's words where it cannot know whether the controller has taken the job
_UNANSWERED = re.compile(
    r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|Connection refused|"
    r"Connection timed out|Zero Bytes were transmitted|Transport endpoint|Resource temporarily unavailable|"
    r"Communication connection failure|Unexpected message received|Insane message length|Slurm backup controller|"
    r"Message (receive|send) failure|Connection reset by peer|in standby mode|"
    r"Could not establish a configuration source",  # where clients have their configuration from the controller
    re.IGNORECASE,
)
_SUBMIT_LIMIT = re.compile(
    r"MaxSubmitJob|job submit limit|Job violates accounting/QOS policy|maximum number of jobs", re.IGNORECASE
)

_PARENT = re.compile(r"^(\d+)", re.MULTILINE)  # of 12, of 12_3 and 12_[4-6%2], of 12+0 and 12.batch
_TASKS = re.compile(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]")  # of an array that waits, where they are not shown one by one
# of `scontrol show job --oneliner`; a value may hold blanks, as a job's name does
_FIELD = re.compile(r"(?<!\S)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")
_LIMIT = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")  # as in QOSMaxSubmitJobPerUserLimit


def is_unanswered(words: str) -> bool:
    """Whether an error of sbatch leaves open if the job was accepted."""
    return bool(_UNANSWERED.search(words))


def is_submit_limit(words: str) -> bool:
    """Whether sbatch was refused because of how many jobs there are, as far as it says which limit was reached.

    Of a job that is too large or too long for its account it often says the same, but for the limit's name.
    """
    named = limits_named(words)
    return any("Submit" in name for name in named) if named else bool(_SUBMIT_LIMIT.search(words))


def limits_named(words: str) -> list[str]:
    """Limits of accounting that sbatch names."""
    return _LIMIT.findall(words)


def named(name: str) -> list[str]:
    """Ids of the jobs or arrays of that name, oldest first; from the controller and, as far as it goes, accounting.

    Raises:
        LaunchError: The controller does not answer.
    """
    ids = set(_PARENT.findall(run_command(["squeue", "-h", "-t", "all", "-n", name, "-o", "%F"])))
    if not ids:
        try:
            text = run_command(["sacct", "-X", "-n", "-P", "-S", "now-30days", "--name", name, "-o", "JobID"])
        except LaunchError:  # no accounting
            text = ""
        ids = set(_PARENT.findall(text))
    return sorted(ids, key=int)


def task_ids(job_id: str, count: int) -> list[str]:
    """Ids of the tasks of an array of so many; a single one is a plain job."""
    return [job_id] if count == 1 else [f"{job_id}_{index}" for index in range(count)]


def own_jobs(timeout_s: float = COMMAND_TIMEOUT_S) -> int:
    """Jobs that this user has in the queue, tasks of arrays counted one by one."""
    return len(run_command(["squeue", "-h", "-r", "-u", getpass.getuser(), "-o", "%i"], timeout_s).split())


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs or arrays; those that are over do not matter."""
    run_command(["scancel", *job_ids])


def let_follow(job_id: str, after: str) -> None:
    """Let a job that waits start when another one than so far is over, however that ends."""
    run_command(["scontrol", "update", f"JobId={job_id}", f"Dependency=afterany:{after}"])


def avoid_host(array_id: str, task_id: str, host: str, timeout_s: float) -> None:
    """Keep the tasks of an array that still wait off a host, besides those that one of its tasks was kept off.

    Raises:
        LaunchError: Slurm does not answer, or no task waits.
    """
    told = run_command(["scontrol", "show", "job", "--oneliner", task_id], timeout_s)
    found = re.search(r"\bExcNodeList=(\S+)", told)
    excluded = [found[1]] if found and found[1] != "(null)" else []
    run_command(["scontrol", "update", f"JobId={array_id}", f"ExcNodeList={','.join([*excluded, host])}"], timeout_s)


def hosts_of(job_id: str) -> list[str]:
    """Return the nodes of a job's last run, in the order of their numbers; none where nobody knows them."""
    with contextlib.suppress(LaunchError):
        told = run_command(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "NodeList"]).strip()
        if told and told != "None assigned":
            return run_command(["scontrol", "show", "hostnames", told]).split()
    return []


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
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        shown, _, said = line.partition("|")
        state, bar, reason = said.partition("|")
        if bar:
            found |= dict.fromkeys(_ids_shown(shown), JobState(state, reason))
    return {job_id: state for job_id, state in found.items() if job_id in wanted}


def _ids_shown(shown: str) -> list[str]:
    """Return the ids that squeue shows in one: of the tasks of an array that wait together, else that one."""
    match = _TASKS.fullmatch(shown)
    if match is None:
        return [shown]
    ids = []
    for item in match[2].split(","):
        first, _, last = item.partition("-")
        ids += [f"{match[1]}_{index}" for index in range(int(first), int(last or first) + 1)]
    return ids


def largest_array() -> int:
    """Tasks that an array may have on this cluster; Slurm's default where the controller does not say."""
    try:
        text = run_command(["scontrol", "show", "config"])
    except LaunchError:
        return DEFAULT_LARGEST_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else DEFAULT_LARGEST_ARRAY


def steps(job_ids: Sequence[str]) -> dict[str, list[StepState]]:
    """The jobs and their steps as accounting has them; where it has not heard of an end, the controller's last words.

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
    ended = {row.job_id for rows in found.values() for row in rows if JobState(row.state, "").is_over}
    late = [job_id for job_id in job_ids if job_id not in ended]
    return found | {job_id: rows for job_id in late if (rows := _last_words(job_id))}


def _last_words(job_id: str) -> list[StepState]:
    """What the controller remembers of a job that is over: for `MinJobAge`, by default five minutes.

    DerivedExitCode is the highest of the steps: 0:125 where one was killed for its memory.
    """
    fields = _job_fields(job_id)
    state = fields.get("JobState", "").partition(" ")[0]
    return [StepState(job_id, state, fields.get(key, "")) for key in ("ExitCode", "DerivedExitCode") if state]


class Leaving(StrEnum):
    """Why a running process's job is on its way out."""

    CANCELLED = "cancelled"
    PREEMPTED = "preempted"  # without any time of grace, or after it; or requeued


def leaving(job_id: str) -> Leaving | None:
    """Return why a running process's job is on its way out, or None if it is not: TERM comes for several reasons.

    A job that is preempted or near its time limit is still RUNNING during its grace time.
    """
    fields = _job_fields(job_id)
    if fields.get("JobState", "RUNNING") == "RUNNING":
        return None  # also where it is unknown: a needless requeue does less harm than lost work
    # a job that is being requeued shows no time of a preemption, but its next restart
    requeued = int(fields.get("Restarts", "0")) > restart_count()
    preempted = fields.get("PreemptTime", "None") != "None"
    return Leaving.PREEMPTED if requeued or preempted else Leaving.CANCELLED


def _job_fields(job_id: str) -> dict[str, str]:
    """Return what the controller knows of a job, by `scontrol show job`'s names; empty where it does not answer."""
    try:
        text = run_command(["scontrol", "show", "job", "--oneliner", job_id])
    except LaunchError:
        return {}
    return dict(_FIELD.findall(text.partition("\n")[0]))


def requeue(job_id: str) -> str | None:
    """Ask for a requeue of the running job; None when granted, else Slurm's words."""
    try:
        run_command(["scontrol", "requeue", job_id])
    except LaunchError as error:
        return str(error)
    return None
