"""Memory of this process and its children on Linux, and their time on processors, from /proc.

Which exceptions of torch mean that memory ran out, and whose.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tula_hpc.errors import Failure

PROC = Path("/proc")
# glibc's malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# bytes; glibc maps larger blocks apart in any case
LARGEST_IN_HEAP = 32 * 1024**2


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set of a process, bytes."""
    return _status(pid, "VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set of this process since `reset_peak`, bytes."""
    return _status("self", "VmHWM")


def reset_peak() -> None:
    """Give freed memory back to the kernel and start `peak_resident_bytes` from what is resident now."""
    release_freed()
    # man 5 proc: 5 resets the peak resident set
    (PROC / "self" / "clear_refs").write_text("5")


def keep_freed() -> None:
    """Have the C library keep what this process frees for what it allocates next.

    By default it returns the free end of its heap to the kernel. A training step then may or may
    not fault in all of its gradients and activations again, by how they happen to lie: for a small
    network that takes up to a third of the step, at one batch and not at the next.
    """
    # glibc has it, musl does not
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        # never
        option(TRIM_THRESHOLD, -1)
        # or it would stay where it is: setting either ends its own adjusting
        option(MMAP_THRESHOLD, LARGEST_IN_HEAP)


def release_freed() -> None:
    """Have the C library return freed heap to the kernel: one configuration must not count for the next."""
    # glibc has it, musl does not
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def descendants_private_bytes() -> int:
    """Memory that the loader's processes hold apart from what they share with each other and with this one, bytes.

    They may be children of a fork server, thus grandchildren of this process.
    """
    return sum(_private(pid) for pid in _descendants("self"))


def descendants_processor_s() -> float:
    """Seconds of processors that the loader's processes have used so far, see `descendants_private_bytes`.

    A process that waits for a file system uses none. The kernel counts in hundredths of a second.
    """
    return sum(_processor_s(pid) for pid in _descendants("self"))


def _status(pid: int | str, field: str) -> int:
    match = re.search(
        rf"^{field}:\s+(\d+) kB", (PROC / str(pid) / "status").read_text(), re.MULTILINE
    )
    return int(match.group(1)) * 1024 if match else 0


def _descendants(pid: int | str) -> Iterator[int]:
    for task in (PROC / str(pid) / "task").glob("*/children"):
        # it ended meanwhile
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def _private(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:
        # it ended meanwhile
        return 0
    return 1024 * sum(
        int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE)
    )


def _processor_s(pid: int | str) -> float:
    try:
        line = (PROC / str(pid) / "stat").read_text()
    except OSError:
        # it ended meanwhile
        return 0.0
    # man 5 proc: utime and stime are fields 14 and 15; a command's name, field 2, may hold spaces
    # and brackets
    fields = line.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# torch raises a plain RuntimeError when the host's allocator fails
_HOST_PHRASES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_DEVICE_WORDS = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory|Failed to CUDA [cm]alloc"
    # cuDNN 9 has another name for it than those before
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
# what cuDNN and cuBLAS say when they get no memory for a handle or a workspace, and for other
# reasons too
_PERHAPS_DEVICE_WORDS = re.compile(
    r"unable to find an engine to execute this computation|CUBLAS_STATUS_NOT_INITIALIZED"
    r"|CUBLAS_STATUS_INTERNAL_ERROR|CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR"
)
LITTLE_FREE = 0.05


def free_device_share() -> float:
    """Return the share of the current GPU's memory that this process could still get; 1 where it cannot be told.

    That is what no process holds, and what torch's allocator holds but has not given away.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return 1.0
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        # after some errors a process cannot use its GPU any more
        return 1.0
    return (free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / total


def out_of_memory(
    error: BaseException, free_share: Callable[[], float] = free_device_share
) -> Failure | None:
    """Tell whether an error means that memory ran out. Ask while it is handled: its tensors count.

    Args: error: What was raised. free_share: Tells the share of the device's memory that is free;
        asked only where it decides.

    Returns:
        DEVICE_OOM, HOST_OOM, or None when the error is something else.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or _DEVICE_WORDS.search(text):
        return Failure.DEVICE_OOM
    if isinstance(error, MemoryError) or any(phrase in text for phrase in _HOST_PHRASES):
        return Failure.HOST_OOM
    if _PERHAPS_DEVICE_WORDS.search(text) and free_share() < LITTLE_FREE:
        return Failure.DEVICE_OOM
    return None
