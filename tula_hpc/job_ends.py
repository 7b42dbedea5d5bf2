"""Why a job ended without a result: from what Slurm says of its steps, and from its log."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from tula_hpc.errors import Failure
from tula_hpc.slurm import StepState

MOST_WORDS = 500  # characters of what is told of a log


class _Sign(NamedTuple):
    """What tells a failure: states of the job's steps, or words in its log."""

    failure: Failure
    states: frozenset[str]
    words: str


# What CUDA, NVML and the kernel's driver say of hardware or a driver that is broken. Sources:
# - cudaGetErrorString of the errors 46, 100, 214, 220, 719, 802, 803, 999 (CUDA Runtime API, "Data types"); 46 in the
#   words of older versions (jade-hpc-gpu.github.io#40 and #59: V100 nodes; E3SM#8699: two bad nodes of many)
# - c10/cuda/CUDAFunctions.cpp: what torch makes of an error of cudaGetDeviceCount (hpc-community.unige.ch/t/4121)
# - NVML, nvidia-smi and slurmstepd (LSSI-ETH/plmfit#40, rossumai/nvgpu#6, NVIDIA/open-gpu-kernel-modules#387)
# - NVIDIA's "Xid Errors": the numbers that mean hardware or firmware, not those that an application causes (13, 31, 43)
# An illegal memory access is the program's. 719 and 999 may be, too: they are tried elsewhere, and told if they return.
DEVICE_WORDS = (
    r"uncorrectable ECC error|uncorrectable NVLink error|CUDA_ERROR_ECC_UNCORRECTABLE"
    r"|CUDA-capable device(s|\(s\))? (are|is/are) busy or unavailable|no CUDA-capable device is detected"
    r"|unspecified launch failure|CUDA error: unknown error|CUDA unknown error"
    r"|CUDA error: system not yet initialized|cudaGetDeviceCount\(\).{0,200}Error 80[23]: "
    r"|unsupported display driver / cuda driver"
    r"|CUDA driver initialization failed|Driver/library version mismatch"
    r"|GPU is lost|fallen off the bus|Unable to determine the device handle for GPU"
    r"|NVRM: Xid \(PCI[^)]*\): (48|62|63|64|74|79|92|94|95|119|120|140)\b"
)

# In order: what is more specific first. A step that was killed for its memory leaves the *job* FAILED with exit 1:0.
_SIGNS = (
    _Sign(Failure.HOST_OOM, frozenset({"OUT_OF_MEMORY"}), r"oom-kill event|oom_kill|Exceeded job memory limit"),
    _Sign(
        Failure.DEVICE_OOM,
        frozenset(),
        r"OutOfMemoryError|CUDA (error: )?out of memory|Cuda failure.{0,300}out of memory",
    ),
    # whose sentence may quote why there is no device
    _Sign(Failure.BAD_INPUT, frozenset(), r"^(\[rank\d+\]: )?tula_hpc\.errors\.InputError: "),
    # before what follows from it: peers wait for such a worker until their time is up
    _Sign(Failure.DEVICE_FAILED, frozenset(), rf"^(\[rank\d+\]: )?tula_hpc\.errors\.DeviceError: |{DEVICE_WORDS}"),
    _Sign(Failure.NODE_FAILED, frozenset({"NODE_FAIL", "BOOT_FAIL"}), r"DUE TO NODE FAILURE|Node failure on"),
    _Sign(Failure.TIMED_OUT, frozenset({"TIMEOUT", "DEADLINE"}), r"DUE TO TIME LIMIT|not requeued because: timed-out"),
    _Sign(
        Failure.PREEMPTED,
        frozenset({"PREEMPTED"}),
        r"DUE TO PREEMPTION|^(\[rank\d+\]: )?tula_hpc\.errors\.PreemptedError: ",
    ),
    _Sign(Failure.NO_SPACE, frozenset(), r"No space left on device|Disk quota exceeded|File too large"),
    _Sign(Failure.DIVERGED, frozenset(), r"^(\[rank\d+\]: )?tula_hpc\.errors\.DivergedError: "),
)


def classify(rows: Sequence[StepState], log: str) -> Failure:
    """Why a job ended without a result, from its steps' states and the end of its log."""
    states = {"OUT_OF_MEMORY" if row.exit_code == "0:125" else row.state for row in rows}
    for sign in _SIGNS:
        if states & sign.states or re.search(sign.words, log, re.MULTILINE):
            return sign.failure
    if rows and rows[0].state == "CANCELLED":
        return Failure.CANCELLED
    exit_codes = [row.exit_code for row in rows]
    if _network_failed(exit_codes, log):
        return Failure.DEVICE_FAILED
    return Failure.KILLED if _vanished(exit_codes, log) else Failure.BUG


# what a worker says whose peer is gone, or that outlived its own job: another process's end is the reason
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exited|Connection was likely closed|"
    r"failed to recv, got 0 bytes|is a left-over|did not come to rank 0|did not find rank 0|"
    r"Timed out waiting \d+ms for \w+ operation"
)
# torch aborts a process whose nccl has lost a peer, from a thread of its own, and says why
_NCCL_ENDS = re.compile(r"watchdog thread terminated with exception: (.*)")
_NCCL_PEER_LOST = re.compile(r"remote process exited|Watchdog caught collective operation timeout")
# nccl's words for ncclSystemError and ncclRemoteError (init.cc, ncclGetErrorString); a peer's end leads to the latter
_NCCL_SYSTEM = re.compile(r"unhandled system error|ncclSystemError")
_NCCL_REMOTE = re.compile(r"remote process exited or there was a network error|ncclRemoteError")
_ABORT_CODE = "0:6"
_KILLED = re.compile(r"task[s \d,-]*: Killed|^Killed$", re.MULTILINE)
_CRASHED = re.compile(r"Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception")
_CRASH_CODES = {"0:4", "0:6", "0:7", "0:8", "0:11"}  # signals that a process brings upon itself


def lost_a_peer(error: BaseException) -> bool:
    """Tell whether a collective failed of the other side, which is gone or silent."""
    return any(words.search(str(error)) for words in (_PEER_LOST, _NCCL_PEER_LOST, _NCCL_REMOTE))


def _network_failed(exit_codes: Sequence[str], log: str) -> bool:
    """Tell whether nccl lost its peers, or a system call, though no process was killed or raised another error."""
    by_nccl = [*_exceptions(log), *_NCCL_ENDS.findall(log)]
    words = re.compile(f"{_NCCL_SYSTEM.pattern}|{_NCCL_REMOTE.pattern}|{_PEER_LOST.pattern}")
    crashed = _CRASHED.search(log.replace("Aborted", "")) or (_CRASH_CODES - {_ABORT_CODE}) & set(exit_codes)
    if crashed or not all(words.search(line) for line in by_nccl):
        return False
    if any(_NCCL_SYSTEM.search(line) for line in by_nccl):
        return True
    killed = _KILLED.search(log) or {"0:9", "137:0"} & set(exit_codes)
    return not killed and any(_NCCL_REMOTE.search(line) for line in by_nccl)


def device_word(log: str) -> str:
    """Return the line of one task's log that says that a device is broken; "" where none does."""
    for words in (DEVICE_WORDS, _NCCL_SYSTEM.pattern):
        found = next((line.strip() for line in log.splitlines() if re.search(words, line)), "")
        if found:
            return found[:MOST_WORDS]
    return ""


def _vanished(exit_codes: Sequence[str], log: str) -> bool:
    """Whether a process was killed, or lost its peers to that, and none raised an exception of its own.

    When one raises, srun -K1 kills the others, who may have lost it as a peer before.
    """
    raised = _exceptions(log)
    lost = [line for line in raised if _PEER_LOST.search(line)]
    ends = _NCCL_ENDS.findall(log)
    by_nccl = bool(ends) and all(_NCCL_PEER_LOST.search(why) for why in ends)
    crash_codes = _CRASH_CODES - ({_ABORT_CODE} if by_nccl else set())
    crashed = _CRASHED.search(log.replace("Aborted", "") if by_nccl else log)
    if len(lost) < len(raised) or crashed or crash_codes & set(exit_codes):
        return False
    return bool(lost or by_nccl or _KILLED.search(log) or {"0:9", "137:0"} & set(exit_codes))


def telling_line(log: str) -> str:
    """The line of a log that says most about its job's end, for a table: an exception, a sign of a kill, the last."""
    best = next(itertools.chain(*_lines_by_weight(log)), _no_word(log))
    return re.sub(r"^tula_hpc\.errors\.\w+: ", "", best)[:MOST_WORDS]  # these are sentences


def weight(log: str) -> int:
    """How much a log says about its job's end, to choose the one of several that tells it; 0: nothing."""
    lines = _lines_by_weight(log)
    return next((len(lines) - index for index, found in enumerate(lines) if found), 0)


def _lines_by_weight(log: str) -> list[list[str]]:
    """Exceptions of its own, signs of other ends, exceptions for want of a peer, the last words, submitit's words."""
    raised = _exceptions(log)
    own = [line for line in raised if not _PEER_LOST.search(line)]
    lines = [line.strip() for line in without_chatter(log).splitlines()]
    telling = "|".join([_KILLED.pattern, _NCCL_ENDS.pattern, *(sign.words for sign in _SIGNS)])
    signs = [line for line in lines if re.search(telling, line)]
    said = [line for line in lines if not line.startswith(("submitit INFO", "submitit WARNING"))]
    return [own, signs, raised, said[-1:], lines[-1:]]


def _no_word(log: str) -> str:
    return "its log does not say why" if log.strip() else "no log was written"


_CHATTER = re.compile(
    r"submitit (INFO|ERROR) \(.*\) - (Starting with JobEnvironment|Loading pickle|Submitted job triggered an exception)"
)


def without_chatter(log: str) -> str:
    """A log without what submitit writes around every job, which is never why one ended."""
    return "\n".join(line for line in log.splitlines() if line.strip() and not _CHATTER.match(line))


# Python's warnings have an indented line of code below them, as tracebacks have
_WARNING = re.compile(r"^.*:\d+: \w*Warning: .*\n  .*(\n|$)", re.MULTILINE)
_SAID_BY_SLURM = re.compile(r"(srun|slurmstepd): ")


def _exceptions(log: str) -> list[str]:
    """The last lines of tracebacks: the first that is not indented after one that is."""
    # torch puts the rank before them
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in _WARNING.sub("", log).splitlines()]
    pairs = itertools.pairwise(line for line in lines if not _SAID_BY_SLURM.match(line))
    return [line for above, line in pairs if above.startswith("  ") and re.match(r"[\w.]+(:|$)", line)]
