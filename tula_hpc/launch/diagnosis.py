"""Explain why a job failed, by Slurm's states and the job's log, and why a job waits.

Slurm's reasons for a wait are those of "JOB REASON CODES" in squeue(1) and the controller's own
descriptions. Only the part of a log that belongs to the job's last run is read.

`failure_kinds.py` has the kinds of failures, and says what a new kind needs.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tula_hpc.env import RUN_MARK, SETUP_WORDS
from tula_hpc.errors import error_for
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import PASSING, open_regular
from tula_hpc.launch.slurm import JobState, StepState

# who has ended a job that Slurm calls cancelled
BY_HAND = "by scancel or an operator"
# beginnings of lines that report an end, but not its reason
_WITHOUT_REASON = ("submitit INFO", "submitit WARNING", "srun: ")
# how many characters of a line of a log are shown
MOST_WORDS = 500


class _Sign(NamedTuple):
    failure: Failure
    # pattern of words in the job's log that mean this failure
    words: str
    # states of the job's steps that mean this failure
    states: tuple[str, ...] = ()


# Messages of CUDA, NVML and the kernel's driver about broken hardware or a broken driver. Sources:
# - cudaGetErrorString of the errors 46, 100, 214, 220, 719, 802, 803, 999 (CUDA Runtime API, "Data
#   types"); 46 in the words of older versions (jade-hpc-gpu.github.io#40 and #59: V100 nodes;
#   E3SM#8699: two bad nodes of many)
# - c10/cuda/CUDAFunctions.cpp: torch's message for an error of cudaGetDeviceCount
#   (hpc-community.unige.ch/t/4121)
# - NVML, nvidia-smi and slurmstepd (LSSI-ETH/plmfit#40, rossumai/nvgpu#6,
#   NVIDIA/open-gpu-kernel-modules#387)
# - NVIDIA's "Xid Errors": the numbers that mean hardware or firmware, not those that an application
#   causes (13, 31, 43)
# An illegal memory access is the program's fault. 719 and 999 may be, too: such a job is tried on
# other nodes, and the error is reported if it returns.
DEVICE_WORDS = (
    r"uncorrectable ECC error|uncorrectable NVLink error|CUDA_ERROR_ECC_UNCORRECTABLE"
    r"|CUDA-capable device(s|\(s\))? (are|is/are) busy or unavailable"
    r"|no CUDA-capable device is detected"
    r"|unspecified launch failure|CUDA error: unknown error|CUDA unknown error"
    r"|CUDA error: system not yet initialized|cudaGetDeviceCount\(\).{0,200}Error 80[23]: "
    r"|unsupported display driver / cuda driver"
    r"|CUDA driver initialization failed|Driver/library version mismatch"
    r"|GPU is lost|fallen off the bus|Unable to determine the device handle for GPU"
    r"|NVRM: Xid \(PCI[^)]*\): (48|62|63|64|74|79|92|94|95|119|120|140)\b"
)


def _raised(failure: Failure) -> str:
    """Return a pattern of a traceback's last line with the error that means this failure."""
    return rf"^(\[rank\d+\]: )?tula_hpc\.errors\.{error_for(failure).__name__}: "


_PASSING = "|".join(map(os.strerror, PASSING))
# Errors about a file that a file system refused for a passing reason: ours, and Python's own.
# A network connection has most of these, too, but without a file's name.
_REFUSED_FILE = (
    rf"^(\[rank\d+\]: )?(tula_hpc\.errors\.\w+: .* cannot be \w+: ({_PASSING})"
    rf"|\w+Error: \[Errno ({errno.EIO}|{errno.EREMOTEIO}|{errno.ESTALE})\]"
    rf"|\w+Error: \[Errno \d+\] ({_PASSING}): b?['\"])"
)
# Python's last words when it cannot write a traceback any more
CUT_OFF = r"^(object repr|object type name|object type|object address) *: ?$|^lost sys\.stderr$"
# srun's words, with the path, when the job's Python is not on the node
PYTHON_GONE = r"^\S+ error: execve\(\): (\S+): No such file or directory"
# Signs that are more specific come first. If a step was killed for its memory, the *job* is FAILED
# with exit code 1:0.
_SIGNS = (
    _Sign(
        Failure.HOST_OOM,
        r"oom-kill event|oom_kill|Exceeded job memory limit",
        states=("OUT_OF_MEMORY",),
    ),
    _Sign(
        Failure.DEVICE_OOM,
        r"OutOfMemoryError|CUDA (error: )?out of memory|Cuda failure.{0,300}out of memory",
    ),
    # before BAD_INPUT: the file may be one of the user's
    _Sign(Failure.KILLED, _REFUSED_FILE),
    # before DEVICE_FAILED: its sentence may quote why there is no device
    _Sign(Failure.BAD_INPUT, rf"{_raised(Failure.BAD_INPUT)}|{PYTHON_GONE}"),
    # before its consequences: peers wait for a worker with a broken device until their time is up
    _Sign(Failure.DEVICE_FAILED, rf"{_raised(Failure.DEVICE_FAILED)}|{DEVICE_WORDS}"),
    _Sign(
        Failure.NODE_FAILED,
        r"DUE TO NODE FAILURE|Node failure on",
        states=("NODE_FAIL", "BOOT_FAIL"),
    ),
    _Sign(
        Failure.TIMED_OUT,
        r"DUE TO TIME LIMIT|not requeued because: timed-out",
        states=("TIMEOUT", "DEADLINE"),
    ),
    _Sign(
        Failure.PREEMPTED,
        rf"DUE TO PREEMPTION|{_raised(Failure.PREEMPTED)}",
        states=("PREEMPTED",),
    ),
    _Sign(
        Failure.NO_SPACE, rf"No space left on device|Disk quota exceeded|File too large|{CUT_OFF}"
    ),
    _Sign(Failure.DIVERGED, _raised(Failure.DIVERGED)),
    _Sign(Failure.KILLED, _raised(Failure.KILLED)),
)


def classify(rows: Sequence[StepState], log: str) -> Failure:
    """Return why a job ended without a result, by its steps' states and the end of its log."""
    states = {"OUT_OF_MEMORY" if row.exit_code == "0:125" else row.state for row in rows}
    for sign in _SIGNS:
        if states.intersection(sign.states) or re.search(sign.words, log, re.MULTILINE):
            return sign.failure
    if rows and rows[0].state == "CANCELLED":
        return Failure.CANCELLED
    exit_codes = [row.exit_code for row in rows]
    if _network_failed(exit_codes, log):
        return Failure.DEVICE_FAILED
    return Failure.KILLED if _vanished(exit_codes, log) else Failure.BUG


# words of a worker whose peer is gone, or that has outlived its own job: the reason is the end of
# another process
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection was likely closed|"
    r"failed to recv, got 0 bytes|is a left-over|did not come to rank 0|did not find rank 0|"
    r"Timed out waiting \d+ms for \w+ operation|wait timeout after \d+ms"
)
# torch aborts a process whose nccl has lost a peer, in a thread of torch's own, and says why
_NCCL_ENDS = re.compile(r"(?:watchdog thread terminated with exception: |debug info, due to )(.*)")
_NCCL_PEER_LOST = re.compile(
    r"remote process exited|Watchdog caught collective operation timeout"
    r"|watchdog hang|collective timeout or exception"
)
# nccl's words for ncclSystemError and ncclRemoteError (init.cc, ncclGetErrorString); the
# end of a peer leads to the latter
_NCCL_SYSTEM = re.compile(r"unhandled system error|ncclSystemError")
_NCCL_REMOTE = re.compile(r"remote process exited or there was a network error|ncclRemoteError")
_ABORT_CODE = "0:6"
_KILLED = re.compile(r"task[s \d,-]*: Killed|^Killed$", re.MULTILINE)
# srun terminates tasks when a node is lost, of which Slurm may say nothing, or a peer has exited
_TERMINATED = re.compile(r"task[s \d,-]*: Terminated")
_EXITED = re.compile(r"task[s \d,-]*: Exited with exit code")
_CRASHED = re.compile(
    r"Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"
)
# exit codes of processes that crashed: signals that a process brings upon itself
_CRASH_CODES = {"0:4", "0:6", "0:7", "0:8", "0:11"}


def lost_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed because a peer is gone or silent, or the network failed."""
    lost = (_PEER_LOST, _NCCL_PEER_LOST, _NCCL_REMOTE, _NCCL_SYSTEM)
    return any(words.search(str(error)) for words in lost)


def _network_failed(exit_codes: Sequence[str], log: str) -> bool:
    """Tell whether nccl lost its peers, or one of its system calls failed.

    False if a process crashed or raised another error, or if peers were lost as one was killed.
    """
    by_nccl = [*_exceptions(log), *_NCCL_ENDS.findall(log)]
    words = re.compile(f"{_NCCL_SYSTEM.pattern}|{_NCCL_REMOTE.pattern}|{_PEER_LOST.pattern}")
    crashed = _CRASHED.search(log.replace("Aborted", "")) or (_CRASH_CODES - {_ABORT_CODE}) & set(
        exit_codes
    )
    if crashed or not all(map(words.search, by_nccl)):
        return False
    if any(map(_NCCL_SYSTEM.search, by_nccl)):
        return True
    killed = _KILLED.search(log) or {"0:9", "137:0"} & set(exit_codes)
    return not killed and any(map(_NCCL_REMOTE.search, by_nccl))


def device_word(log: str) -> str:
    """Return the line of one task's log that reports a broken device; "" if there is none."""
    for words in (DEVICE_WORDS, _NCCL_SYSTEM.pattern):
        found = next((line.strip() for line in log.splitlines() if re.search(words, line)), "")
        if found:
            return found[:MOST_WORDS]
    return ""


def _vanished(exit_codes: Sequence[str], log: str) -> bool:
    """Tell whether a process was killed, or its peers have lost it, and none had another error.

    If a process raises, srun -K1 kills the others, which may have lost it as a peer before.
    """
    raised = _exceptions(log)
    lost = [line for line in raised if _PEER_LOST.search(line)]
    ends = _NCCL_ENDS.findall(log)
    by_nccl = bool(ends) and all(map(_NCCL_PEER_LOST.search, ends))
    crash_codes = _CRASH_CODES - ({_ABORT_CODE} if by_nccl else set())
    crashed = _CRASHED.search(log.replace("Aborted", "") if by_nccl else log)
    if len(lost) < len(raised) or crashed or crash_codes & set(exit_codes):
        return False
    if _TERMINATED.search(log) and not _EXITED.search(log):
        return True
    return bool(lost or by_nccl or _KILLED.search(log) or {"0:9", "137:0"} & set(exit_codes))


# submitit's words for a job that was not requeued at its time limit
_NOT_REQUEUED = re.compile(r"^[\w.]*UncompletedJobError: Job not requeued because: timed-out")


def informative_line(log: str) -> str:
    """Return the line that says most about a job's end: an exception, another sign, or the last."""
    unknown = "its log does not say why"
    if not log.strip():
        place = "the run directory has to be on a file system that all nodes see"
        unknown = f"no log was written; {place}"
    best = next(itertools.chain(*_lines_by_weight(log)), unknown)
    best = _NOT_REQUEUED.sub("reached its time limit", best)
    best = re.sub(
        PYTHON_GONE,
        r"\1, the job's Python, is not on its node: it was moved or deleted, or is not on a file "
        "system that all nodes see; run the same command from an environment that is",
        best,
    )
    best = re.sub(
        CUT_OFF,
        "its log ends where the reason could not be written: the disk of the run directory, or a "
        "quota, was full; make space there or have the quota raised",
        best,
    )
    # errors of this package are sentences, which need no class name
    best = re.sub(r"^tula_hpc\.errors\.\w+: ", "", best)[:MOST_WORDS]
    before = setup_failure(log)
    return f"{best}; before that, {before}" if before and before != best else best


def is_own_sentence(log: str) -> bool:
    """Tell whether the line that says most is an error of this package: a whole sentence."""
    best = next(itertools.chain(*_lines_by_weight(log)), "")
    return best.startswith("tula_hpc.errors.")


def setup_failure(log: str) -> str:
    """Return the line of a log about a command of `setup` that failed; "" if there is none."""
    return next((line for line in log.splitlines() if SETUP_WORDS in line), "")


def weight(log: str) -> int:
    """Return how much a log says about its job's end, for comparison with others; 0: nothing."""
    lines = _lines_by_weight(log)
    return next((len(lines) - index for index, found in enumerate(lines) if found), 0)


def _lines_by_weight(log: str) -> list[list[str]]:
    """Return a log's lines by weight, the most telling first.

    In order: exceptions that are not about a lost peer, signs of other ends, all exceptions, the
    last line that is neither submitit's nor srun's, the last line.
    """
    raised = _exceptions(log)
    own = [line for line in raised if not _PEER_LOST.search(line)]
    lines = list(map(str.strip, without_chatter(log).splitlines()))
    informative = "|".join([_KILLED.pattern, _NCCL_ENDS.pattern, *(sign.words for sign in _SIGNS)])
    signs = [line for line in lines if re.search(informative, line)]
    by_job = [line for line in lines if not line.startswith(_WITHOUT_REASON)]
    return [own, signs, raised, by_job[-1:], lines[-1:]]


_CHATTER = re.compile(
    r"submitit (INFO|ERROR) \(.*\) - "
    r"(Starting with JobEnvironment|Loading pickle|Submitted job triggered an exception)"
    # torch's own warnings and notes, such as on a host whose name cannot be looked up
    r"|(\[rank\d+\]: ?)?\[[WI]\d+ \d\d:\d\d:\d\d\.\d+ [\w.]+:\d+\] |\[Gloo\] Rank \d+ is connected"
)


def without_chatter(log: str) -> str:
    """Remove the lines that submitit writes around every job, torch's warnings, and empty ones."""
    return "\n".join(line for line in log.splitlines() if line.strip() and not _CHATTER.match(line))


# Python's warnings have an indented line of code below them, as tracebacks have
_WARNING = re.compile(r"^.*:\d+: \w*Warning: .*\n  .*(\n|$)", re.MULTILINE)
_SLURMS_LINE = re.compile(r"(srun|slurmstepd): ")


def _exceptions(log: str) -> list[str]:
    """Return the last lines of tracebacks: the first unindented line after an indented one."""
    # torch puts the rank before each line of a traceback
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in _WARNING.sub("", log).splitlines()]
    pairs = itertools.pairwise(line for line in lines if not _SLURMS_LINE.match(line))
    return [
        line for above, line in pairs if above.startswith("  ") and re.match(r"[\w.]+(:|$)", line)
    ]


class Wait(NamedTuple):
    """Reason why a job waits."""

    # explanation, in which JOB stands for the job's id; "" if the reason is not known here
    words: str
    # whether the reason will not go away by itself
    stuck: bool = False


# by patterns of the whole reason that Slurm gives; those that are more specific come first
_REASONS = {
    "None|": Wait("not looked at by the scheduler yet"),
    "Priority": Wait("other jobs go first"),
    "Resources": Wait("enough nodes have to become free"),
    "DependencyNeverSatisfied": Wait(
        "the job that it was to follow did not end as it should", stuck=True
    ),
    "Dependency": Wait("the job that it follows is not over"),
    "BeginTime": Wait("its start is set for later, about two minutes after a requeue"),
    "JobHeldUser|.*held state|.*requeued held": Wait(
        "held; `scontrol release JOB` lets it go", stuck=True
    ),
    "JobHeldAdmin": Wait(
        "held by an administrator: ask them, or try `scontrol release JOB`", stuck=True
    ),
    "JobHoldMaxRequeue": Wait(
        "held after too many requeues; `scontrol release JOB` lets it go", stuck=True
    ),
    "JobArrayTaskLimit": Wait(
        "earlier tasks of its array, of which array_parallelism run at a time"
    ),
    "ReqNodeNotAvail.*[Rr]eserv.*": Wait(
        "a reservation has its nodes, or begins before its time limit would end: `scontrol show "
        "reservation` says until when; with shorter train_minutes or profile_minutes it may begin now"
    ),
    "ReqNodeNotAvail.*": Wait("its nodes are down or drained (`sinfo -R` says why), or reserved"),
    "Nodes required for job are .*": Wait(
        "its nodes are down or drained (`sinfo -R` says why), or kept for other jobs"
    ),
    "NodeDown": Wait("a node that it needs is down"),
    "PartitionTimeLimit": Wait("asks for more time than its partition allows", stuck=True),
    "PartitionNodeLimit": Wait(
        "asks for more nodes than its partition allows, or some of its nodes are down", stuck=True
    ),
    "PartitionConfig": Wait("asks for more than its partition has or allows", stuck=True),
    "PartitionDown|PartitionInactive": Wait(
        "its partition is closed until an administrator opens it"
    ),
    "MaxMemPerLimit": Wait("asks for more memory than its partition allows", stuck=True),
    "DeadLine": Wait("it cannot end before its deadline", stuck=True),
    "BadConstraints": Wait("no node has what it asks for", stuck=True),
    "(Invalid|AccountNotAllowed|QOSNotAllowed).*": Wait(
        "its account or QOS may not be used here", stuck=True
    ),
    "Reservation": Wait("its reservation has not begun"),
    "ReservationDeleted": Wait("its reservation was deleted", stuck=True),
    "(QOS|Assoc)Max.*Per(Job|Node).*": Wait("asks for more than a single job may have", stuck=True),
    "(QOS|Assoc)Grp.*RunM.*": Wait("other jobs of its account or QOS fill a limit"),
    "QOSMin.*": Wait("asks for less than its QOS demands", stuck=True),
    "(QOS|Assoc)Grp.*(Minutes|Wall).*": Wait(
        "the budget of its account or QOS is used up", stuck=True
    ),
    "QOSUsageThreshold": Wait("its QOS is not used fairly enough for now"),
    "(QOS|Max).*(PerUser|PU).*": Wait("your own other jobs fill a limit for one user"),
    "(QOS|Max).*(PerAccount|PA).*": Wait("other jobs of its account fill a limit"),
    "QOSGrp.*|QOS.*Limit": Wait("other jobs of its QOS fill a limit"),
    "AssocGrp.*|AssocMax.*|Association.*Limit": Wait("other jobs of its account fill a limit"),
    "Licenses": Wait("licenses have to become free"),
    "BurstBuffer.*": Wait("the burst buffer has to become free"),
    "Cleaning|Prolog": Wait("the nodes are getting ready"),
    "(JobLaunchFailure|SystemFailure|NonZeroExitCode).*": Wait(
        "it could not be started", stuck=True
    ),
}
_STATES = {
    "REQUEUE_HOLD": Wait("held after a requeue; `scontrol release JOB` lets it go", stuck=True),
    "SPECIAL_EXIT": Wait(
        "held after a special exit; `scontrol release JOB` lets it go", stuck=True
    ),
    "RESV_DEL_HOLD": Wait("held, since its reservation was deleted", stuck=True),
    "SUSPENDED": Wait(
        "suspended, by Slurm for other jobs or by hand, which `scontrol resume JOB` ends"
    ),
    "STOPPED": Wait("stopped; it keeps its nodes"),
    "REQUEUED": Wait("requeued"),
    "REQUEUE_FED": Wait("requeued"),
    "EXPEDITING": Wait("requeued ahead of others"),
    "LAUNCH_FAILED": Wait("its nodes could not start it"),
    "RECONFIG_FAIL": Wait("its nodes could not be set up for it"),
    "REVOKED": Wait("another cluster of the federation runs it"),
}
# all other states of a job that is not over are kinds of running
WAITING = {"PENDING", *_STATES}


def waits(job: JobState) -> bool:
    """Tell whether a job that is not over waits."""
    return job.state in WAITING


def explain(job: JobState) -> Wait:
    """Return why a job waits."""
    if job.state in _STATES:
        return _STATES[job.state]
    reason = job.reason.strip("()")
    found = (wait for pattern, wait in _REASONS.items() if re.fullmatch(pattern, reason))
    return next(found, Wait(""))


MAX_LOG_BYTES = 200_000


def last_bytes(path: Path) -> str:
    """Return the end of a file as text; "" if it cannot be read, such as a colleague's."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_logs(paths: Iterable[Path]) -> tuple[Path | None, list[str]]:
    """Return the log that says most about the last run's end, and that run's text in all logs."""
    logs = {path: _last_run(last_bytes(path)) for path in paths}
    return max(logs, key=lambda path: weight(logs[path]), default=None), list(logs.values())


def ends(logs: Sequence[str], lines: int) -> str:
    """Join the last lines of each log."""
    tails = ("\n".join(log.splitlines()[-lines:]) for log in logs)
    return "\n".join(filter(None, tails))


def complaining_nodes(paths: Iterable[Path]) -> list[int]:
    """Return the numbers, within their job, of the nodes whose logs report a broken device.

    submitit writes at the top of a task's log on which node it runs: `Starting with
    JobEnvironment(…, node=1(2), …)`. If only nccl complains, on several nodes, none is returned.
    """
    nodes: dict[str, int] = {}
    complaints: list[tuple[str, str]] = []
    for path in paths:
        text = last_bytes(path)
        if places := re.findall(r"Starting with JobEnvironment\(.*\bnode=(\d+)\(", text):
            nodes[path.stem] = int(places[-1])
        if word := device_word(_last_run(text)):
            complaints.append((path.stem, word))
    found = {nodes[task] for task, _ in complaints if task in nodes}
    sure = {nodes[t] for t, word in complaints if t in nodes and re.search(DEVICE_WORDS, word)}
    # a complaint of nccl counts only if it comes from a single node
    return sorted(sure or (found if len(found) == 1 else ()))


def _last_run(text: str) -> str:
    _, mark, last = text.rpartition(RUN_MARK)
    return last.partition("\n")[2] if mark else last
