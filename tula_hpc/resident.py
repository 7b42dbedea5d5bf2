"""Memory of this process and its children on Linux, from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set of a process, bytes."""
    return _status(pid, "VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set of this process since `reset_peak`, bytes."""
    return _status("self", "VmHWM")


def reset_peak() -> None:
    """Give freed memory back to the kernel and start `peak_resident_bytes` from what is resident now."""
    release_freed()
    (PROC / "self" / "clear_refs").write_text("5")  # man 5 proc: 5 resets the peak resident set


def release_freed() -> None:
    """Have the C library return freed heap to the kernel: one configuration must not count for the next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def descendants_private_bytes() -> int:
    """Memory that the loader's processes hold apart from what they share with each other and with this one, bytes.

    They may be children of a fork server, thus grandchildren of this process.
    """
    return sum(_private(pid) for pid in _descendants("self"))


def _status(pid: int | str, field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", (PROC / str(pid) / "status").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _descendants(pid: int | str) -> Iterator[int]:
    for task in (PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def _private(pid: int) -> int:
    try:
        rollup = (PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # it ended meanwhile
        return 0
    return 1024 * sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE))
