"""Run jobs on this machine so that none is lost if the command is killed.

A job takes its pickle itself, by a rename: the new name says which job of the submission it is, and
which process runs it. If somebody has removed the pickle before, the job never runs.

A live job holds a lock on a file of its own, which the kernel releases when the job ends. The
process number alone proves nothing: the shell may be killed while its children go on, and the
number may have passed to another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from tula_hpc.config import ClusterSpec
from tula_hpc.containers import NO_FOLDERS, Folders, export_lines, python_of
from tula_hpc.env import gpus_as_here
from tula_hpc.launch.job_files import (
    Limits,
    Notice,
    Request,
    Submitted,
    job_command,
    run_setup,
    variables_of,
    write_pickles,
    write_setup,
)
from tula_hpc.launch.slurm import JobState, StepState
from tula_hpc.retry_policy import TIME_OUTS

# how often a process without a command line is looked at
EXEC_POLLS = 25
# seconds from the signal to the job's time limit
SIGNAL_DELAY_S = 30
# The trap on EXIT keeps bash, if it is /bin/sh, from turning into its last command: submitit counts
# on a parent shell. submitit sends INT a second before KILL, and its traceback would look like the
# reason of the end.
TRAPS = ("trap : EXIT", "trap '' INT")
# state of a killed job, as Slurm would report it
KILLED = StepState("", "", "0:9")


def hold_lock(folder: Path) -> list[str]:
    """Return shell lines that lock the file named by the shell's number until the job is over.

    If no file can be locked, the job runs all the same, known only by its process number.
    """
    return [f"exec 9>>{shlex.quote(str(folder))}/$$.lock", "{ flock -w 5 9 2>/dev/null || :; }"]


def is_alive(folder: Path, job_id: str) -> bool:
    """Tell whether a job is not over; reap it if it is an ended child of this process."""
    # the event with the id is damaged
    if not job_id.isdecimal():
        return False
    return _is_locked(folder / f"{job_id}.lock") or folder.name.encode() in _command_of(job_id)


def was_killed(folder: Path, job_id: str) -> bool:
    """Tell whether a job that is over was killed as a whole: other ends remove its lock file."""
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
        # not a child of this process if an earlier command has started it
        with contextlib.suppress(ChildProcessError, OverflowError):
            os.waitpid(int(process), os.WNOHANG)
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            return b""
        if command:
            return command if b"local_controller" in command else b""
        # a process has no command line just after its start, and none after its end
        time.sleep(0.02)
    return b""


def take_pickle(folder: Path, index: int) -> list[str]:
    """Return shell lines that rename `task-<index>.pkl` to the name that the job looks for."""
    place = shlex.quote(str(folder))
    return [
        # the command's own streams would stay open until the job ends
        f"exec </dev/null >>{place}/$$_shell.out 2>&1",
        f"mv {place}/task-{index}.pkl {place}/{index}-$$.pkl",
    ]


def run_controller(folder: Path) -> str:
    """Return a shell line that runs the job under `local_controller`, not submitit's controller.

    Unless the controller was killed, the line removes the job's lock file, which `was_killed` looks
    for. The shell, whose process number is the job's id, passes TERM on to the controller, and so
    to the workers.
    """
    command = shlex.join([sys.executable, "-m", "tula_hpc.launch.local_controller", str(folder)])
    lock = f"{shlex.quote(str(folder))}/$$.lock"
    # wait again, as a trapped signal ends a wait
    waits = "while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done"
    ends = f"[ $code -eq {128 + SIGKILL} ] || rm -f {lock}; exit $code"
    return f"{{ {command} & trap 'kill -TERM $!' TERM; {waits}; {ends}; }}"


def begun(folder: Path, count: int) -> list[str]:
    """Return the ids of a submission's jobs; "" for each that has not begun, and now never will."""
    for index in range(count):
        (folder / f"task-{index}.pkl").unlink(missing_ok=True)
    ids = dict(path.stem.split("-") for path in folder.glob("[0-9]*-[0-9]*.pkl"))
    return [ids.get(str(index), "") for index in range(count)]


def start_controller(
    folder: Path, command: str, setup: Sequence[str], *, workers: int, gpus: int, minutes: int
) -> int:
    """Start a job's shell, as submitit would, and return its process number, the job's id.

    The shell leads a process group and a session of its own: `kill` ends all of the job by that
    number, and neither Ctrl-C at the terminal nor the terminal's end reaches the job.
    """
    variables = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_COMMAND": command,
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_NTASKS": str(workers),
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(SIGNAL_DELAY_S),
        "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * minutes),
        "SUBMITIT_LOCAL_WITH_SHELL": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
    }
    lines = " && ".join([*setup, run_controller(folder)])
    process = subprocess.Popen(
        ["/bin/sh", "-c", lines], env=os.environ | variables, start_new_session=True
    )
    return process.pid


class LocalJobs:
    """Executor of jobs on this machine, which take their pickles themselves."""

    limits = Limits(gone_polls=1, poll_s=0.2, longest_poll_s=0.2, several_hosts=False)

    def __init__(self, cluster: ClusterSpec, folders: Folders = NO_FOLDERS) -> None:
        self.cluster = cluster
        self.folders = folders

    def check(self) -> None:
        """Do nothing: a machine runs its own jobs."""

    def most_together(self, count: int) -> int:
        """Return `count`: this machine has no limit."""
        return count

    def other_jobs(self) -> int:
        """Return 0: no limit counts them."""
        return 0

    def submit(
        self, tasks: Sequence[Callable[[], Any]], request: Request, folder: Path
    ) -> list[str]:
        """Start a controller for each job, once the pickles of all jobs are written."""
        workers = request.nodes * self.cluster.workers_per_node
        gpus = workers if self.cluster.device == "cuda" else 0
        setup = [*TRAPS, *([gpus_as_here()] if gpus else [])]
        setup += run_setup(folder, write_setup(folder, self.cluster))
        hashes = write_pickles(folder, tasks, request.minutes, TIME_OUTS)
        setup += export_lines(self.cluster, self.folders, list(variables_of(self.cluster)))
        python = python_of(self.cluster, self.folders, folder.parents[1], sys.executable)
        ids = []
        for index, sha256 in enumerate(hashes):
            command = job_command(python, folder, index, sha256)
            lines = [*take_pickle(folder, index), *setup, *hold_lock(folder)]
            process = start_controller(
                folder, command, lines, workers=workers, gpus=gpus, minutes=request.minutes
            )
            ids.append(str(process))
        return ids

    def states(
        self, jobs: Sequence[Submitted], timeout_s: float | None = None
    ) -> dict[str, JobState]:
        """Return a state for each job that lives."""
        alive = [job.job_id for job in jobs if is_alive(job.folder, job.job_id)]
        return dict.fromkeys(alive, JobState("RUNNING", ""))

    def ended(self, jobs: Sequence[Submitted]) -> Mapping[str, Sequence[StepState]]:
        """Return which jobs were killed."""
        return {job.job_id: [KILLED] for job in jobs if was_killed(job.folder, job.job_id)}

    def hosts(self, job: Submitted) -> list[str]:
        """Return []: there is no other machine."""
        return []

    def cancel_command(self, jobs: Sequence[Submitted]) -> str:
        """Return a command that kills: on TERM a training saves and is started again."""
        return "kill -KILL " + " ".join(f"-{job.job_id}" for job in jobs)

    def cancel(self, jobs: Sequence[Submitted]) -> None:
        """Kill the jobs, with all processes that they have started."""
        for job in jobs:
            # the number of a job that is over may have passed to another process
            if is_alive(job.folder, job.job_id):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(job.job_id), SIGKILL)

    def script(self, request: Request, folder: Path, tasks: int) -> str:
        """Return "": a local job has no batch script."""
        return ""

    def find_lost(self, path: Path, notice: Notice, known: Collection[str]) -> list[str]:
        """Return the ids of the jobs that have begun, see `begun`."""
        return begun(path.parent, len(notice.tasks))
