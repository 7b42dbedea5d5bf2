"""Jobs on this machine through submitit's local executor; none is lost where the command is killed meanwhile.

submitit starts a process and then renames the pickle that it waits for: a command that is killed in
between leaves a process that waits in vain, and one that is killed a little later a job that nobody
knows. Here a job takes its pickle itself, by a rename that says which job of the submission it is,
and of which process. Where somebody else has taken the pickle away before, the job never runs.

Whether a job on this machine lives: it holds a lock on a file of its own, and the kernel lets go
when it ends.

A process number alone does not tell. The shell that has the number may be killed while what it
started goes on; the number may have come to another process since; and on another host of a shared
file system it means nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from submitit import Job
from submitit.core.utils import DelayedSubmission
from submitit.local.local import LocalExecutor

from tula_hpc.launch.job_files import job_command, write_pickle

# of a process without a command line
EXEC_POLLS = 25


def hold_lock(folder: Path) -> list[str]:
    """Shell lines that make the shell, and what it becomes or starts, hold the lock of the job that has its number.

    Where nothing can be locked the job runs all the same, and its process number has to do.
    """
    return [f"exec 9>>{shlex.quote(str(folder))}/$$.lock", "{ flock -w 5 9 2>/dev/null || :; }"]


def is_alive(folder: Path, job_id: str) -> bool:
    """Whether the job of that submission and number is not over; a child of ours that ended is reaped on the way."""
    # a damaged event
    if not job_id.isdecimal():
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
    except OSError:
        # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def _command_of(process: str) -> bytes:
    for _ in range(EXEC_POLLS):
        # started by an earlier run of the same command
        with contextlib.suppress(ChildProcessError, OverflowError):
            os.waitpid(int(process), os.WNOHANG)
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            return b""
        if command:
            return command if b"submitit" in command else b""
        # a process that has just begun has no command yet, and one that ended none any more
        time.sleep(0.02)
    return b""


def take_pickle(folder: Path, index: int) -> list[str]:
    """Shell lines that make `task-<index>.pkl` the shell's own, under the name by which the job looks for it."""
    place = shlex.quote(str(folder))
    return [
        # the command's own would stay open until the job ends
        f"exec </dev/null >>{place}/$$_shell.out 2>&1",
        f"mv {place}/task-{index}.pkl {place}/{index}-$$.pkl",
    ]


def run_controller(folder: Path) -> str:
    """A shell line that runs the job under a controller of ours; submitit's own, which would follow, never starts.

    Unless the controller was killed, the job's lock goes, as `was_killed` wants it.
    """
    command = shlex.join([sys.executable, "-m", "tula_hpc.launch.local_controller", str(folder)])
    lock = f"{shlex.quote(str(folder))}/$$.lock"
    return f"{{ {command}; code=$?; [ $code -eq {128 + SIGKILL} ] || rm -f {lock}; exit $code; }}"


def begun(folder: Path, count: int) -> list[str]:
    """Ids of a submission's jobs, for a command that goes on; "" for each that has not begun, and now never will."""
    for index in range(count):
        (folder / f"task-{index}.pkl").unlink(missing_ok=True)
    ids = dict(path.stem.split("-") for path in folder.glob("[0-9]*-[0-9]*.pkl"))
    return [ids.get(str(index), "") for index in range(count)]


class TakingExecutor(LocalExecutor):
    """submitit's executor for jobs that take their pickles themselves; all are there before the first job starts."""

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Job[Any]]:
        for delayed in delayed_submissions:
            delayed.set_timeout(self.parameters["timeout_min"], self.max_num_timeout)
        folder, setup = Path(self.folder), self.parameters["setup"]
        hashes = [
            write_pickle(folder, index, delayed)
            for index, delayed in enumerate(delayed_submissions)
        ]
        return [self._start(index, sha256, setup) for index, sha256 in enumerate(hashes)]

    def _start(self, index: int, sha256: str, setup: Sequence[str]) -> Job[Any]:
        folder = Path(self.folder)
        self.parameters["setup"] = [
            *take_pickle(folder, index),
            *setup,
            *hold_lock(folder),
            run_controller(folder),
        ]
        return self._submit_command(job_command(self.python, folder, index, sha256))
