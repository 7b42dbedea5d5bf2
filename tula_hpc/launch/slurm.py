"""Call Slurm's commands: for the states of jobs, their requeue, and the accounting of their runs.

Accounting lists every run of a job, including those that a requeue followed, with its node count.
"""

from __future__ import annotations

import getpass
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from tula_hpc.env import own_uids, restart_count
from tula_hpc.errors import LaunchError, NotStartedError
from tula_hpc.launch.bounded_command import (
    COMMAND_TIMEOUT_S,
    count_in,
    in_one_line,
    no_answer,
    run_command,
    unreached,
)
from tula_hpc.records.events import JobAccount, Stage

# pauses between attempts: a controller may come back, for example from an upgrade, unattended
PATIENCE_S = (2, 5, 10, 30, 60, 120, *[300] * 12)
# limit of pauses and commands together; a command that hangs is given up after a minute
LONGEST_WAIT_S = 3600.0
# Slurm's default of MaxArraySize
DEFAULT_LARGEST_ARRAY = 1001
# how many characters of the reason why a job waits are kept
MOST_REASON = 500
# how many characters of a line of `scontrol show` are read
MOST_FIELDS = 100_000
# seconds for a requeue: saving takes some of the 90 s before a limit, or of 60 s or more of grace
REQUEUE_S = 40.0
# time limit of one attempt, and of the question before it why the job has to stop
REQUEUE_TIMEOUT_S = 15.0
REQUEUE_PAUSE_S = 3.0
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
# states in accounting of a run that has not ended
UNDER_WAY = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")


class JobState(NamedTuple):
    """State of one job in squeue, and the reason why it waits."""

    state: str
    reason: str

    @property
    def is_over(self) -> bool:
        """Tell whether the job will not run (again)."""
        return self.state in OVER


class StepState(NamedTuple):
    """One row of sacct: a job or one of its steps."""

    job_id: str
    state: str
    exit_code: str


T = TypeVar("T")


def retry_until_answered(ask: Callable[[], T]) -> T:
    """Return an answer of the controller; retry while it does not answer, and tell the user so.

    Raises:
        LaunchError: There is no Slurm here, or no answer for an hour.
    """
    pauses = iter(PATIENCE_S)
    ends = time.monotonic() + LONGEST_WAIT_S
    waited = False
    while True:
        try:
            answer = ask()
        except LaunchError as error:
            if not available():
                raise
            words = unreached(error)
            pause_s = next(pauses, None)
            if pause_s is None or time.monotonic() >= ends:
                raise LaunchError(
                    f"the Slurm controller has not answered for an hour: {words}"
                ) from None
            sys.stderr.write(f"Slurm does not answer ({words}); trying again in {pause_s} s\n")
            time.sleep(min(pause_s, max(0.0, ends - time.monotonic())))
            waited = True
        else:
            if waited:
                sys.stderr.write("Slurm answers again\n")
            return answer


# sbatch's words that leave open whether the controller has accepted the job
_UNANSWERED = re.compile(
    r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|Connection refused|"
    r"Connection timed out|Zero Bytes were transmitted|Transport endpoint|Resource temporarily unavailable|"
    r"Communication connection failure|Unexpected message received|Insane message length|Slurm backup controller|"
    r"Message (receive|send) failure|Connection reset by peer|in standby mode|"
    # if clients get their configuration from the controller
    r"Could not establish a configuration source",
    re.IGNORECASE,
)
# scontrol's words for a final refusal (slurm_errno.c): the job may not be requeued, is over, or
# belongs to somebody else
_REFUSED = re.compile(
    r"Requested operation is presently disabled|Invalid job id|Access/permission denied|Invalid user id|"
    r"Job has already finished|already completing or completed|Only batch jobs are accepted",
    re.IGNORECASE,
)
_SUBMIT_LIMIT = re.compile(
    r"MaxSubmitJob|job submit limit|Job violates accounting/QOS policy|maximum number of jobs",
    re.IGNORECASE,
)

# ids of jobs, such as 12, 12_3, 12_[4-6%2], 12+0 and 12.batch
_JOB = re.compile(r"(?P<parent>[0-9]{1,15})(?:[_+.].*)?")
# waiting tasks of an array, if they are not shown one by one
_TASKS = re.compile(r"(?P<parent>[0-9]+)_\[(?P<tasks>[0-9,-]+)(?:%[0-9]+)?\]")
_SPAN = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_HOST = re.compile(r"[\w.-]+")
_HEADING = re.compile(r"[A-Z][A-Z_]*")
_STATE = re.compile(r"[A-Z_]+|\?")
# a field of `scontrol show job --oneliner`; its value may hold blanks, as a job's name may
_FIELD = re.compile(r"(?<!\S)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")
# a limit, such as QOSMaxSubmitJobPerUserLimit
_LIMIT = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")
NO_KEYS: Mapping[str, str] = {}


def is_unanswered(words: str) -> bool:
    """Tell whether an error of sbatch leaves open if the job was accepted."""
    return bool(_UNANSWERED.search(words))


def is_submit_limit(words: str) -> bool:
    """Tell whether sbatch was refused because of the number of jobs.

    For a job that is too large or too long for its account, sbatch often says the same, except for
    the limit's name.
    """
    named = limits_named(words)
    return any("Submit" in name for name in named) if named else bool(_SUBMIT_LIMIT.search(words))


def limits_named(words: str) -> list[str]:
    """Return the limits of accounting that sbatch names."""
    return _LIMIT.findall(words)


def named(name: str) -> list[str]:
    """Return the ids of the user's jobs or arrays of this name, oldest first.

    If the controller knows none, accounting is asked.

    Raises:
        LaunchError: The controller does not answer.
    """
    columns = ["%F", "%j", "%U"]
    shown = _queued(columns, ["-t", "all", "-n", name], second=re.compile(re.escape(name)))
    # anyone may give a job this name
    own = own_uids()
    rows = [row for row in shown if row[2] in own]
    if not rows:
        try:
            where = ["-S", "now-30days", "--name", name]
            text = run_command(["sacct", "-X", "-n", "-P", *where, "-o", "JobID,JobName"])
        except LaunchError:
            # no accounting
            text = ""
        rows = [row for row in _rows(text, 2) if row[1] == name]
    matches = (_JOB.fullmatch(row[0]) for row in rows)
    return sorted({match["parent"] for match in matches if match}, key=int)


def _queued(
    columns: Sequence[str],
    options: Sequence[str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    *,
    second: re.Pattern[str],
) -> list[list[str]]:
    """Return squeue's rows; its headings distinguish an answer without jobs from no answer.

    Only rows with a job's id first and a match of `second` next are squeue's, not the site's own.

    Raises:
        LaunchError: squeue does not answer.
    """
    text = run_command(["squeue", *options, "-o", "|".join(columns)], timeout_s)
    rows = _rows(text, len(columns))
    jobs = [row for row in rows if _JOB.fullmatch(row[0]) and second.fullmatch(row[1])]
    if not jobs and not any(all(map(_HEADING.fullmatch, row)) for row in rows):
        raise no_answer("squeue", text)
    return jobs


def _rows(text: str, columns: int) -> list[list[str]]:
    """Return the rows of a table with bars, the last column as it is; other lines are left out."""
    rows = []
    for line in text.splitlines():
        row = list(map(str.strip, line.split("|", columns - 1)))
        if len(row) == columns:
            rows.append(row)
    return rows


def task_ids(job_id: str, count: int) -> list[str]:
    """Return the ids of an array's tasks; a single one is a plain job."""
    return [job_id] if count == 1 else [f"{job_id}_{index}" for index in range(count)]


def own_jobs(timeout_s: float = COMMAND_TIMEOUT_S) -> int:
    """Count this user's jobs in the queue, tasks of arrays one by one."""
    return len(_queued(["%i", "%T"], ["-r", "-u", getpass.getuser()], timeout_s, second=_STATE))


def cancel(job_ids: Iterable[str]) -> None:
    """Cancel jobs or arrays; those that are over do not matter."""
    run_command(["scancel", *job_ids])


def let_follow(job_id: str, after: str) -> None:
    """Let a waiting job follow job `after` instead of its former one, however that ends."""
    run_command(["scontrol", "update", f"JobId={job_id}", f"Dependency=afterany:{after}"])


def avoid_host(array_id: str, task_id: str, host: str, timeout_s: float) -> None:
    """Exclude one more host for the waiting tasks of an array.

    Raises:
        LaunchError: Slurm does not answer, or no task waits.
    """
    # (null) if no host is excluded; without the field, hosts excluded before would be forgotten
    excluded = _shown_fields(task_id, timeout_s).get("ExcNodeList")
    if excluded is None:
        raise LaunchError(f"scontrol does not say which nodes are excluded for job {task_id}")
    hosts = host if excluded == "(null)" else f"{excluded},{host}"
    command = ["scontrol", "update", f"JobId={array_id}", f"ExcNodeList={hosts}"]
    run_command(command, timeout_s)


def hosts_of(job_id: str) -> list[str]:
    """Return the nodes of a job's last run, in the order of their numbers; [] if unknown."""
    try:
        where = ["-j", job_id, "-o", "JobID,NNodes,NodeList"]
        rows = _rows(run_command(["sacct", "-X", "-n", "-P", *where]), 3)
        _, nodes, names = next((row for row in rows if row[0] == job_id), ("", "", ""))
        count = count_in(nodes)
        if not count or names == "None assigned":
            return []
        lines = run_command(["scontrol", "show", "hostnames", names]).splitlines()
    except LaunchError:
        return []
    # names of nodes only, without a site's own lines
    beginnings = tuple(each.partition("[")[0] for each in _BRACKETS.sub("[", names).split(","))
    stripped = map(str.strip, lines)
    hosts = [each for each in stripped if each.startswith(beginnings) and _HOST.fullmatch(each)]
    # with a line too many the numbers would mean other nodes
    return hosts if len(hosts) == count else []


def available() -> bool:
    """Tell whether Slurm's commands are here."""
    return shutil.which("sbatch") is not None


def key_of(folder: str) -> str:
    """Return the part of a folder's name that only its jobs' names and scripts share, or "".

    By this key a job is recognized even if its id may have passed to another job.
    """
    match = re.fullmatch(r".+-([0-9a-f]{6})", folder)
    return match[1] if match else ""


def queue(
    job_ids: Iterable[str], timeout_s: float = COMMAND_TIMEOUT_S, keys: Mapping[str, str] = NO_KEYS
) -> dict[str, JobState]:
    """Return the states of the jobs that the controller knows, with their key if it is given."""
    wanted = set(job_ids)
    if not wanted:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in wanted})
    try:
        rows = _queued(
            ["%i", "%T", "%r", "%j_%o"],
            ["-r", "-t", "all", "-j", ",".join(parents)],
            timeout_s,
            second=_STATE,
        )
    except LaunchError as error:
        # squeue's answer if it knows none of the jobs
        if "Invalid job id" in str(error):
            return {}
        raise
    states: dict[str, JobState] = {}
    for shown, state, reason, names in rows:
        own = [job_id for job_id in _ids_shown(shown, wanted) if keys.get(job_id, "") in names]
        states |= dict.fromkeys(own, JobState(state, reason[:MOST_REASON]))
    return states


def _ids_shown(shown: str, wanted: Collection[str]) -> list[str]:
    """Return the wanted ids in an id of squeue or sacct, which may be several waiting tasks."""
    match = _TASKS.fullmatch(shown)
    if match is None:
        return [shown] if shown in wanted else []
    ranges = []
    for item in match["tasks"].split(","):
        if span := _SPAN.fullmatch(item):
            ranges.append(range(int(span["first"]), int(span["last"] or span["first"]) + 1))
    # look up only the wanted ids, since an array may be shown absurdly large
    shown_ids = []
    for job_id in wanted:
        parent, _, task = job_id.partition("_")
        if parent == match["parent"] and any(count_in(task) in each for each in ranges):
            shown_ids.append(job_id)
    return shown_ids


def largest_array() -> int:
    """Return how many tasks an array may have, 1 without arrays; Slurm's default if unknown."""
    try:
        text = run_command(["scontrol", "show", "config"])
    except LaunchError:
        return DEFAULT_LARGEST_ARRAY
    limits = re.findall(r"^MaxArraySize\s*=\s*([0-9]{1,9})\b", text, re.MULTILINE)
    limits += re.findall(r"^SchedulerParameters\s*=.*\bmax_array_tasks=([0-9]{1,9})\b", text, re.M)
    return max(1, min(map(int, limits), default=DEFAULT_LARGEST_ARRAY))


def steps(job_ids: Sequence[str], keys: Mapping[str, str] = NO_KEYS) -> dict[str, list[StepState]]:
    """Return the states of jobs and their steps from accounting, or else from the controller.

    Jobs that neither knows are missing; see `queue` for the keys.
    """
    if not job_ids:
        return {}
    try:
        text = run_command(
            ["sacct", "-n", "-P", "-j", ",".join(job_ids), "-o", "JobID,State,ExitCode,JobName"]
        )
    except LaunchError:
        text = ""
    wanted = set(job_ids)
    steps_of: dict[str, list[StepState]] = {}
    others: set[str] = set()
    for step_id, state, exit_code, name in _rows(text, 4):
        shown, dot, step = step_id.partition(".")
        for job_id in _ids_shown(shown, wanted):
            # a job's own row comes before those of its steps
            if not dot and keys.get(job_id, "") not in name:
                others.add(job_id)
            if job_id in others:
                continue
            row = StepState(f"{job_id}{dot}{step}", state.partition(" ")[0], exit_code)
            steps_of.setdefault(job_id, []).append(row)
    for job_id in job_ids:
        rows = steps_of.get(job_id, [])
        is_known = any(row.job_id == job_id and JobState(row.state, "").is_over for row in rows)
        if not is_known and (last := _last_words(job_id, keys.get(job_id, ""))):
            steps_of[job_id] = last
    return steps_of


def _last_words(job_id: str, key: str) -> list[StepState]:
    """Return the end of a job from the controller, which keeps it for `MinJobAge` (five minutes).

    DerivedExitCode is the highest of the steps: 0:125 if one was killed for its memory.
    """
    fields = _job_fields(job_id)
    state = fields.get("JobState", "").partition(" ")[0]
    if not state or key not in f"{fields.get('JobName')} {fields.get('Command')}":
        return []
    codes = ("ExitCode", "DerivedExitCode")
    return [StepState(job_id, state, fields.get(name, "")) for name in codes]


class Leaving(StrEnum):
    """Reason why the job of a running process is about to end."""

    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    # preempted, with its grace time over, if any; or one of its nodes is lost
    PREEMPTED = "preempted"


def leaving(job_id: str, timeout_s: float = REQUEUE_TIMEOUT_S) -> Leaving | None:
    """Return why the job of a running process is about to end, or None if it goes on.

    TERM comes for several reasons. A job that is preempted or near its time limit is still RUNNING
    during its grace time. At the limit itself it is not, and only its Reason shows the limit.
    """
    fields = _job_fields(job_id, timeout_s)
    is_running = fields.get("JobState", "RUNNING") == "RUNNING"
    if is_running or fields.get("Reason") == "TimeLimit":
        # also if the state is unknown: a needless requeue does less harm than lost work
        return None
    # a job that is being requeued shows no PreemptTime, but counts its next restart already
    if (count_in(fields.get("Restarts", "")) or 0) > restart_count():
        return Leaving.REQUEUED
    if fields.get("PreemptTime", "None") != "None" or fields.get("Reason") == "NodeDown":
        return Leaving.PREEMPTED
    return Leaving.CANCELLED


def _job_fields(job_id: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
    """Return the fields of `scontrol show job`; {} if the controller does not answer."""
    try:
        return _shown_fields(job_id, timeout_s)
    except LaunchError:
        return {}


def _shown_fields(job_id: str, timeout_s: float) -> dict[str, str]:
    text = run_command(["scontrol", "show", "job", "--oneliner", job_id], timeout_s)
    line = next((line for line in text.splitlines() if line.startswith("JobId=")), "")
    return fields_of(line)


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show --oneliner`."""
    return dict(_FIELD.findall(line[:MOST_FIELDS]))


def requeue(job_id: str, within_s: float = REQUEUE_S) -> str | None:
    """Ask for a requeue of the running job until Slurm answers; None if granted, else why not."""
    until = time.monotonic() + within_s
    while True:
        try:
            run_command(["scontrol", "requeue", job_id], _no_longer(until))
        except NotStartedError as error:
            return str(error)
        except LaunchError as error:
            words = in_one_line(error)
        else:
            return None
        if _REFUSED.search(words) or time.monotonic() + REQUEUE_PAUSE_S >= until:
            return words
        time.sleep(REQUEUE_PAUSE_S)
        # an attempt without an answer may have succeeded, and another one would be refused
        if leaving(job_id, _no_longer(until)) in (Leaving.REQUEUED, Leaving.PREEMPTED):
            return None


def _no_longer(until: float) -> float:
    return max(1.0, min(REQUEUE_TIMEOUT_S, until - time.monotonic()))


# largest difference between the clocks of this machine and of accounting
SLACK_S = 3600.0


def accounted_runs(
    stages: Mapping[str, Stage], *, name_prefix: str, since: float, timeout_s: float
) -> dict[str, list[JobAccount]]:
    """Return the runs of these jobs, oldest first; a job that accounting does not know is missing.

    Ids are as Slurm shows them, tasks of arrays as `12_3`. An id may have been another job's before
    the controller began to count from 1 again: so names are compared, too.

    Raises:
        LaunchError: There is no accounting, or it does not answer.
    """
    if not stages:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in stages})
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - SLACK_S))
    where = ["-S", start, "-j", ",".join(parents), "-o", "JobID,JobName,State,ElapsedRaw,NNodes"]
    text = run_command(["sacct", "-D", "-n", "-P", "-X", *where], timeout_s)
    accounts: dict[str, list[JobAccount]] = {}
    for shown, name, words, elapsed, nodes in _rows(text, 5):
        if not name.startswith(name_prefix):
            continue
        state = words.partition(" ")[0]
        for job_id in _ids_shown(shown, stages):
            run = JobAccount(
                job_id=job_id,
                stage=stages[job_id],
                state=state,
                over=state not in UNDER_WAY,
                nodes=count_in(nodes) or 0,
                elapsed_s=count_in(elapsed) or 0,
            )
            accounts.setdefault(job_id, []).append(run)
    return accounts
