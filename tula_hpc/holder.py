"""Which command works on a run directory: asked without taking the lock, so that nobody is ever refused for the asking.

`RunDirectory.locked` flocks `.lock` and writes "process N on HOST" into it, which stays there afterwards.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

KERNELS_LIST = Path("/proc/locks")
_OWNER = re.compile(r"process (\d+) on (\S+)")
_LOCK = re.compile(r"(?:FLOCK|POSIX|OFDLCK)\s+ADVISORY\s+WRITE\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)")
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process


class Holder(NamedTuple):
    """The command that has the lock, or the last one that had it."""

    process: int  # 0: unknown
    host: str  # "": unknown
    alive: bool | None  # whether it holds the lock; None: cannot be seen from this machine

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" if self.host else "a command"


NOBODY = Holder(0, "", False)


def holder_of(lock_file: Path, locks: Path = KERNELS_LIST) -> Holder:
    """Who works on the run directory of that lock file, as far as this machine can see.

    Args:
        lock_file: May be missing.
        locks: The kernel's list of locks.
    """
    try:
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return NOBODY
    except PermissionError:  # someone else's; whether it is locked can be seen all the same
        return Holder(0, "", _is_listed(lock_file.stat(), 0, locks) or None)
    try:
        match = _OWNER.match(os.read(descriptor, 200).decode(errors="replace"))
        process, host = (int(match[1]), match[2]) if match else (0, "")
        if _is_listed(os.fstat(descriptor), process, locks) or _is_locked_elsewhere(descriptor):
            return Holder(process, host, True)
    finally:
        os.close(descriptor)
    return Holder(process, host, False if host in ("", os.uname().nodename) else None)


def _is_listed(file: os.stat_result, process: int, locks: Path) -> bool:
    """Whether a process of this machine holds a lock on the file.

    Some file systems show another device to stat than to the kernel's list: there the process must be the noted one.
    """
    try:
        text = locks.read_text()
    except OSError:
        return False
    device = (os.major(file.st_dev), os.minor(file.st_dev))
    for owner, major, minor, inode in _LOCK.findall(text):
        same_device = (int(major, 16), int(minor, 16)) == device
        if int(inode) == file.st_ino and (same_device or int(owner) == process != 0):
            return True
    return False


def _is_locked_elsewhere(descriptor: int) -> bool:
    """Whether the file server knows of a lock: NFS makes a lock on the whole file's range of every flock."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    except OSError:  # a file system without such locks
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
