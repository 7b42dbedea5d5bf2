"""Slurm's own commands: states of jobs, their requeue, and the accounting of their runs.

Accounting lists every run of a job, requeued ones included, with the number of its nodes.
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

from tula_hpc.env import restart_count
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

# pauses in which a controller may come back, as from an upgrade while nobody looks on
PATIENCE_S = (2, 5, 10, 30, 60, 120, *[300] * 12)
# with the time that the commands take: one that hangs is given up after a minute
LONGEST_WAIT_S = 3600.0
# Slurm's own MaxArraySize
DEFAULT_LARGEST_ARRAY = 1001
# characters of why a job waits
MOST_REASON = 500
# characters of what the controller knows of a job
MOST_FIELDS = 100_000
# of the 90 s before a time limit, of which saving takes some; a grace time is often 60 s or more
REQUEUE_S = 40.0
# of a single attempt, and of the question before it why the job has to leave
REQUEUE_TIMEOUT_S = 15.0
REQUEUE_PAUSE_S = 3.0
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip


# of a run in accounting that has not ended
UNDER_WAY = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")


class JobState(NamedTuple):
    """State of one job in squeue, and the reason for which it waits."""

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


# sbatch's words where it cannot know whether the controller has taken the job
_UNANSWERED = re.compile(
    r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|Connection refused|"
    r"Connection timed out|Zero Bytes were transmitted|Transport endpoint|Resource temporarily unavailable|"
    r"Communication connection failure|Unexpected message received|Insane message length|Slurm backup controller|"
    r"Message (receive|send) failure|Connection reset by peer|in standby mode|"
    # where clients have their configuration from the controller
    r"Could not establish a configuration source",
    re.IGNORECASE,
)
# scontrol's words for a no that stays one: slurm_errno.c, of a job that may not be requeued, is
# over or another's
_REFUSED = re.compile(
    r"Requested operation is presently disabled|Invalid job id|Access/permission denied|Invalid user id|"
    r"Job has already finished|already completing or completed|Only batch jobs are accepted",
    re.IGNORECASE,
)
_SUBMIT_LIMIT = re.compile(
    r"MaxSubmitJob|job submit limit|Job violates accounting/QOS policy|maximum number of jobs",
    re.IGNORECASE,
)

# 12, 12_3 and 12_[4-6%2], 12+0 and 12.batch
_JOB = re.compile(r"(?P<parent>[0-9]{1,15})(?:[_+.].*)?")
# of an array that waits, where they are not shown one by one
_TASKS = re.compile(r"(?P<parent>[0-9]+)_\[(?P<tasks>[0-9,-]+)(?:%[0-9]+)?\]")
_SPAN = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_HOST = re.compile(r"[\w.-]+")
_HEADING = re.compile(r"[A-Z][A-Z_]*")
_STATE = re.compile(r"[A-Z_]+|\?")
# of `scontrol show job --oneliner`; a value may hold blanks, as a job's name does
_FIELD = re.compile(r"(?<!\S)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")
# as in QOSMaxSubmitJobPerUserLimit
_LIMIT = re.compile(r"\b(?:QOS|Assoc)[A-Z]\w+")


def is_unanswered(words: str) -> bool:
    """Tell whether an error of sbatch leaves open if the job was accepted."""
    return bool(_UNANSWERED.search(words))


def is_submit_limit(words: str) -> bool:
    """Tell whether sbatch was refused because of the number of jobs.

    Of a job that is too large or too long for its account it often says the same, but for the
    limit's name.
    """
    named = limits_named(words)
    return any("Submit" in name for name in named) if named else bool(_SUBMIT_LIMIT.search(words))


def limits_named(words: str) -> list[str]:
    """Return the limits of accounting that sbatch names."""
    return _LIMIT.findall(words)


def named(name: str) -> list[str]:
    """Return the ids of the jobs or arrays of that name, oldest first.

    The controller knows them, and, if it does not, perhaps accounting.

    Raises:
        LaunchError: The controller does not answer.
    """
    rows = _queued(["%F", "%j"], ["-t", "all", "-n", name], second=re.compile(re.escape(name)))
    if not rows:
        try:
            where = ["-S", "now-30days", "--name", name]
            text = run_command(["sacct", "-X", "-n", "-P", *where, "-o", "JobID,JobName"])
        except LaunchError:
            # no accounting
            text = ""
        rows = _rows(text, 2)
    found = (_JOB.fullmatch(job_id) for job_id, shown in rows if shown == name)
    return sorted({match["parent"] for match in found if match}, key=int)


def _queued(
    columns: Sequence[str],
    options: Sequence[str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    *,
    second: re.Pattern[str],
) -> list[list[str]]:
    """Return squeue's rows; its headings tell an answer without jobs from no answer.

    The first column is a job's id, the second one matches a pattern, which a site's own lines do not.

    Raises:
        LaunchError: It does not answer.
    """
    text = run_command(["squeue", *options, "-o", "|".join(columns)], timeout_s)
    rows = _rows(text, len(columns))
    jobs = [row for row in rows if _JOB.fullmatch(row[0]) and second.fullmatch(row[1])]
    if not jobs and not any(all(map(_HEADING.fullmatch, row)) for row in rows):
        raise no_answer("squeue", text)
    return jobs


def _rows(text: str, columns: int) -> list[list[str]]:
    """Return the rows of a table with bars, the last column as it is; other lines are left out."""
    rows = ([cell.strip() for cell in line.split("|", columns - 1)] for line in text.splitlines())
    return [row for row in rows if len(row) == columns]


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
    """Have a waiting job start when another one than so far is over, however that ends."""
    run_command(["scontrol", "update", f"JobId={job_id}", f"Dependency=afterany:{after}"])


def avoid_host(array_id: str, task_id: str, host: str, timeout_s: float) -> None:
    """Keep the waiting tasks of an array off one more host.

    Raises:
        LaunchError: Slurm does not answer, or no task waits.
    """
    # which says (null) where there are none: without the field, those before would be forgotten
    excluded = _shown_fields(task_id, timeout_s).get("ExcNodeList")
    if excluded is None:
        raise LaunchError(f"scontrol does not say which nodes job {task_id} is kept off")
    hosts = host if excluded == "(null)" else f"{excluded},{host}"
    command = ["scontrol", "update", f"JobId={array_id}", f"ExcNodeList={hosts}"]
    run_command(command, timeout_s)


def hosts_of(job_id: str) -> list[str]:
    """Return the nodes of a job's last run, in the order of their numbers; [] if unknown."""
    try:
        columns = ["-o", "JobID,NNodes,NodeList"]
        text = run_command(["sacct", "-X", "-n", "-P", "-j", job_id, *columns])
        row = next((row for row in _rows(text, 3) if row[0] == job_id), None)
        count = count_in(row[1]) if row else None
        if row is None or not count or row[2] == "None assigned":
            return []
        lines = run_command(["scontrol", "show", "hostnames", row[2]]).splitlines()
    except LaunchError:
        return []
    # a site's own lines are no names of nodes
    names = _BRACKETS.sub("[", row[2]).split(",")
    beginnings = tuple(name.partition("[")[0] for name in names)
    stripped = [line.strip() for line in lines]
    hosts = [each for each in stripped if each.startswith(beginnings) and _HOST.fullmatch(each)]
    # with a line too many each number would lead to another node
    return hosts if len(hosts) == count else []


def available() -> bool:
    """Tell whether Slurm's commands are here."""
    return shutil.which("sbatch") is not None


NO_KEYS: Mapping[str, str] = {}


def key_of(folder: str) -> str:
    """Return what a submission's folder shares with the names and scripts of its jobs alone, or "".

    By its key a job is known where its id may have passed to another one.
    """
    match = re.fullmatch(r".+-([0-9a-f]{6})", folder)
    return match[1] if match else ""


def queue(
    job_ids: Iterable[str], timeout_s: float = COMMAND_TIMEOUT_S, keys: Mapping[str, str] = NO_KEYS
) -> dict[str, JobState]:
    """Return the states of the jobs that the controller knows and that have their key, if any."""
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
        # squeue's answer when it knows none of them
        if "Invalid job id" in str(error):
            return {}
        raise
    found: dict[str, JobState] = {}
    for shown, state, reason, names in rows:
        own = [job_id for job_id in _ids_shown(shown, wanted) if keys.get(job_id, "") in names]
        found |= dict.fromkeys(own, JobState(state, reason[:MOST_REASON]))
    return found


def _ids_shown(shown: str, wanted: Collection[str]) -> list[str]:
    """Return the wanted ids in squeue's or sacct's id, which may be tasks that waited together."""
    match = _TASKS.fullmatch(shown)
    if match is None:
        return [shown] if shown in wanted else []
    ranges = []
    for item in match["tasks"].split(","):
        if span := _SPAN.fullmatch(item):
            ranges.append(range(int(span["first"]), int(span["last"] or span["first"]) + 1))
    # it may show an array that is larger than any: those that are wanted are looked for in it
    shown_ids = []
    for job_id in wanted:
        parent, _, task = job_id.partition("_")
        if parent == match["parent"] and any(count_in(task) in each for each in ranges):
            shown_ids.append(job_id)
    return shown_ids


def largest_array() -> int:
    """Return how many tasks an array may have here, by default Slurm's own limit."""
    try:
        text = run_command(["scontrol", "show", "config"])
    except LaunchError:
        return DEFAULT_LARGEST_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\s*$", text, re.MULTILINE)
    # 0 means that there are no arrays: a task is a job of its own then
    return max(1, int(match[1])) if match else DEFAULT_LARGEST_ARRAY


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
    found: dict[str, list[StepState]] = {}
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
            found.setdefault(job_id, []).append(row)
    for job_id in job_ids:
        rows = found.get(job_id, [])
        is_known = any(row.job_id == job_id and JobState(row.state, "").is_over for row in rows)
        if not is_known and (last := _last_words(job_id, keys.get(job_id, ""))):
            found[job_id] = last
    return found


def _last_words(job_id: str, key: str) -> list[StepState]:
    """Return the end of a job from the controller, which keeps it for `MinJobAge` (five minutes).

    DerivedExitCode is the highest of the steps: 0:125 where one was killed for its memory.
    """
    fields = _job_fields(job_id)
    state = fields.get("JobState", "").partition(" ")[0]
    if not state or key not in f"{fields.get('JobName')} {fields.get('Command')}":
        return []
    codes = [fields.get(name, "") for name in ("ExitCode", "DerivedExitCode")]
    return [StepState(job_id, state, code) for code in codes]


class Leaving(StrEnum):
    """Reason for which a running process's job is on its way out."""

    CANCELLED = "cancelled"
    # without any time of grace, or after it; or requeued, or without a node that it had
    PREEMPTED = "preempted"


def leaving(job_id: str, timeout_s: float = REQUEUE_TIMEOUT_S) -> Leaving | None:
    """Return why the job of a running process is on its way out, or None if it is not.

    TERM comes for several reasons. A job that is preempted or near its time limit is still RUNNING
    during its grace time. At the limit itself it is not, and only the reason tells.
    """
    fields = _job_fields(job_id, timeout_s)
    is_running = fields.get("JobState", "RUNNING") == "RUNNING"
    if is_running or fields.get("Reason") == "TimeLimit":
        # also where it is unknown: a needless requeue does less harm than lost work
        return None
    # a job that is being requeued shows no time of a preemption, but its next restart
    requeued = (count_in(fields.get("Restarts", "")) or 0) > restart_count()
    preempted = fields.get("PreemptTime", "None") != "None"
    has_lost_node = fields.get("Reason") == "NodeDown"
    is_cancelled = not (requeued or preempted or has_lost_node)
    return Leaving.CANCELLED if is_cancelled else Leaving.PREEMPTED


def _job_fields(job_id: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
    """Return the fields of `scontrol show job`; {} where the controller does not answer."""
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
    """Ask for a requeue of the running job until Slurm answers; None if granted, else its words."""
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
        # an attempt that had no answer may have been worked off: another one would be refused
        if leaving(job_id, _no_longer(until)) is Leaving.PREEMPTED:
            return None


def _no_longer(until: float) -> float:
    return max(1.0, min(REQUEUE_TIMEOUT_S, until - time.monotonic()))


# between the clocks of this machine and of the accounting
SLACK_S = 3600.0
FIELDS = ("JobID", "JobName", "State", "ElapsedRaw", "NNodes")


def accounted_runs(
    stages: Mapping[str, Stage], *, name_prefix: str, since: float, timeout_s: float
) -> dict[str, list[JobAccount]]:
    """Return the runs of these jobs, oldest first; a job that accounting does not know is missing.

    Ids are as Slurm shows them, tasks of arrays as `12_3`. One may have been another job's, where a
    controller began to count from 1 again: so names are compared, too.

    Raises:
        LaunchError: There is no accounting, or it does not answer.
    """
    if not stages:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in stages})
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - SLACK_S))
    where = ["-S", start, "-j", ",".join(parents)]
    text = run_command(["sacct", "-D", "-n", "-P", "-X", *where, "-o", ",".join(FIELDS)], timeout_s)
    found: dict[str, list[JobAccount]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(FIELDS):
            continue
        shown, name, words, elapsed, nodes = fields
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
            found.setdefault(job_id, []).append(run)
    return found
