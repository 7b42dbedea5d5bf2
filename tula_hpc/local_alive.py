"""Whether a job on this machine lives: it holds a lock on a file of its own, and the kernel lets go when it ends.

A process number alone does not tell. The shell that has the number may be killed while what it started goes on; the
number may have come to another process since; and on another host of a shared file system it means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from pathlib import Path

EXEC_POLLS = 25  # of a process without a command line


def hold_lock(folder: Path) -> list[str]:
    """Shell lines that make the shell, and what it becomes or starts, hold the lock of the job that has its number.

    Where nothing can be locked the job runs all the same, and its process number has to do.
    """
    return [f"exec 9>>{shlex.quote(str(folder))}/$$.lock", "{ flock -w 5 9 2>/dev/null || :; }"]


def is_alive(folder: Path, job_id: str) -> bool:
    """Whether the job of that submission and number is not over; a child of ours that ended is reaped on the way."""
    if not job_id.isdecimal():  # a damaged event
        return False
    return _is_locked(folder / f"{job_id}.lock") or folder.name.encode() in _command_of(job_id)


def was_killed(folder: Path, job_id: str) -> bool:
    """Whether a job that is over was killed as a whole: one that comes to its own end takes its lock away."""
    return job_id.isdecimal() and (folder / f"{job_id}.lock").exists()


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def _command_of(process: str) -> bytes:
    for _ in range(EXEC_POLLS):
        with contextlib.suppress(ChildProcessError, OverflowError):  # started by an earlier run of the same command
            os.waitpid(int(process), os.WNOHANG)
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            return b""
        if command:
            return command if b"submitit" in command else b""
        time.sleep(0.02)  # a process that has just begun has no command yet, and one that ended none any more
    return b""
