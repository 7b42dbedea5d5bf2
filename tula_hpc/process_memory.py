"""Memory and processor time of this process and its children on Linux, from /proc.

`out_of_memory` recognizes the exceptions of torch that mean that memory ran out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tula_hpc.env import is_of_this_slurm_job, process_fields
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import format_bytes, listed

PROC = Path("/proc")
# glibc's malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# bytes; the largest threshold that glibc allows: it always maps larger blocks separately
LARGEST_IN_HEAP = 32 * 1024**2


def resident_bytes() -> int:
    """Return the resident set of this process, bytes."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process since `reset_peak`, bytes."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Return freed memory to the kernel, and let `peak_resident_bytes` start from the present."""
    release_freed()
    # man 5 proc: 5 resets the peak resident set
    (PROC / "self" / "clear_refs").write_text("5")


def keep_freed() -> None:
    """Have the C library keep memory that this process frees for its next allocations.

    By default the library returns the free end of its heap to the kernel. A training step then may
    or may not fault in all of its gradients and activations again, depending on where they happen
    to lie: for a small network that takes up to a third of the step, at one batch and not at the
    next.
    """
    # glibc has mallopt, musl does not
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        # -1: never trim
        option(TRIM_THRESHOLD, -1)
        # setting either option stops glibc from adjusting this threshold by itself
        option(MMAP_THRESHOLD, LARGEST_IN_HEAP)


def release_freed() -> None:
    """Have the C library return freed heap to the kernel, so that it does not count as in use."""
    # glibc has malloc_trim, musl does not
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def descendants_private_bytes() -> int:
    """Return the bytes that the loader's processes share with no other process.

    They may be children of a fork server, thus grandchildren of this process.
    """
    return sum(map(_private, descendants("self")))


def descendants_processor_s() -> float:
    """Return the processor time of the loader's processes so far, see `descendants_private_bytes`.

    A loader ends its processes with the epoch, so those that have ended count, too. A process that
    waits for a file system uses no processor time. The kernel counts in hundredths of a second.
    """
    ended = os.times()
    ended_s = ended.children_user + ended.children_system
    return ended_s + sum(map(_processor_s, descendants("self")))


def _status(field: str) -> int:
    status = (PROC / "self" / "status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def parent_of(pid: int) -> int:
    """Return the id of a process's parent; 0 if it has ended."""
    fields = process_fields(pid)
    return int(fields[1]) if fields else 0


def descendants(pid: int | str) -> Iterator[int]:
    """Yield the ids of a process's children and of all their descendants."""
    for child in _children(pid):
        yield child
        yield from descendants(child)


def _children(pid: int | str) -> list[int]:
    found: list[int] = []
    # the process, or a thread of it, may end meanwhile
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def _private(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        # the process ended meanwhile
        return 0
    sizes_kib = re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE)
    return 1024 * sum(map(int, sizes_kib))


def _processor_s(pid: int) -> float:
    # utime and stime are fields 14 and 15, and fields 16 and 17 for children that have ended, as a
    # fork server's have
    return sum(map(int, process_fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


# torch raises a plain RuntimeError when the host's allocator fails
_HOST_PHRASES = re.compile("DefaultCPUAllocator: (?:can't allocate|not enough) memory")
_DEVICE_PHRASES = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory"
    r"|Failed to CUDA [cm]alloc|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    # since cuDNN 9
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
# messages of cuDNN and cuBLAS if a handle or workspace lacks memory, but for other causes as well
_AMBIGUOUS_DEVICE_PHRASES = re.compile(
    r"unable to find an engine to execute this computation|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUBLAS_STATUS_INTERNAL_ERROR|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR"
)
# share of a GPU's memory; with less free, an ambiguous message is taken for lack of memory
LITTLE_FREE = 0.05


def free_device_share() -> float:
    """Return the share of the current GPU's memory that this process could still get; 1 if unknown.

    It is the memory that no process holds, plus what torch's allocator keeps unused.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        # after some errors a process cannot use its GPU any more
        return 1.0
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


def out_of_memory(error: BaseException) -> Failure | None:
    """Return DEVICE_OOM or HOST_OOM for an error that says so, None for any other.

    Call it while the error is handled: the tensors that it keeps alive count as used.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_PHRASES.search(text):
        return Failure.DEVICE_OOM
    if isinstance(error, MemoryError) or _HOST_PHRASES.search(text):
        return Failure.HOST_OOM
    if _AMBIGUOUS_DEVICE_PHRASES.search(text) and free_device_share() < LITTLE_FREE:
        return Failure.DEVICE_OOM
    return None


# torch's words on the memory of a GPU that has run out (c10/cuda/CUDACachingAllocator.cpp)
_WHOLE_DEVICE = re.compile(r"has a total capac\w+ of ([\d.]+) ([KMG]i)B")
_THIS_PROCESS = "this process has "
_OTHER_PROCESS = re.compile(r"\bProcess (\d+) has ([\d.]+) ([KMG]i)B memory in use")
_UNIT_BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
# share of a GPU's memory from which other processes count as the reason why it ran out
MUCH = 0.2


def held_by_others(error: BaseException, job: int) -> str:
    """Say which processes outside of this job held much of a GPU where its memory ran out.

    "" if none did, or if torch's message does not say so. `job` is a process from which processes
    of this job descend. In containers not all do, but they have the number of their Slurm job.
    """
    text = str(error)
    whole = _WHOLE_DEVICE.search(text)
    # in a container torch may not recognize its own process among those on the GPU
    if whole is None or _THIS_PROCESS not in text:
        return ""
    ours = set(map(str, descendants(job)))
    others = {
        pid: float(count) * _UNIT_BYTES[unit]
        for pid, count, unit in _OTHER_PROCESS.findall(text)
        if pid not in ours and not is_of_this_slurm_job(pid)
    }
    held_bytes = sum(others.values())
    whole_bytes = float(whole[1]) * _UNIT_BYTES[whole[2]]
    if held_bytes < MUCH * whole_bytes:
        return ""
    noun = "process" if len(others) == 1 else "processes"
    return (
        f"{format_bytes(held_bytes)} of the device's {format_bytes(whole_bytes)} were held outside "
        f"of this job, by {noun} {listed(list(others))}"
    )
