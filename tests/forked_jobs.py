"""Fork local jobs and processes of training scripts from the test's process, so that none has to load torch.

This is for tests of what such processes do; other tests start them for real. Everything else is as in a real job: a
shell runs the setup lines, the controller restarts workers that ask for it, and signals reach the same processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging.config
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytest
from submitit.core.logger import CONFIG
from submitit.local import local

from tests.forked import differentiates_in_threads
from tula_hpc.attach import child, processes
from tula_hpc.launch import job_start, local_executor
from tula_hpc.launch.job_specs import resolve
from tula_hpc.launch.local_controller import EndingController
from tula_hpc.stages import rehearsal

SHELL = "/bin/sh"
NAMES = ("PIPE", "DEVNULL", "STDOUT")
# helper processes of multiprocessing, with the attributes in which each keeps its process's id and pipes
HELPERS = {
    resource_tracker._resource_tracker: ("_fd", "_pid"),
    forkserver._forkserver: ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"),
}
# file descriptor on which the shell's lines write the environment that the setup left
VARIABLES_FD = 8
Ran = subprocess.CompletedProcess[str]


class Place(NamedTuple):
    """Where a process runs: file descriptors of its stdout and stderr, environment, folder, and own session or not."""

    output: int
    errors: int
    environment: Mapping[str, str]
    folder: Path | None = None
    has_session: bool = False


class Forked:
    """A forked process, with those parts of `subprocess.Popen` that this package and submitit use."""

    def __init__(self, work: Callable[[], object], place: Place) -> None:
        self.returncode: int | None = None
        # end of a pipe from which the process's output can be read, if it has one
        self.stdout: IO[bytes] | None = None
        self.pid = os.fork()
        if not self.pid:
            _work_and_end(work, place)

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            try:
                process, status = os.waitpid(self.pid, options)
            except ChildProcessError:
                # a signal handler called `poll` during `waitpid`, and one of the two calls has collected the process
                return self.returncode or 0
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _work_and_end(work: Callable[[], object], place: Place) -> None:
    code = 1
    try:
        _settle(place)
        code = _exit_code(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # never return into the test's code, whatever happens
        os._exit(code)


def _exit_code(work: Callable[[], object]) -> int:
    try:
        return int(str(work() or 0))
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 # Python prints any error at a program's end
        traceback.print_exc()
        return 1


def _settle(place: Place) -> None:
    """Give the forked process the signal handlers, files, folder and environment of a newly started one."""
    if place.has_session:
        os.setsid()
    if place.folder is not None:
        os.chdir(place.folder)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(place.output, 1)
    os.dup2(place.errors, 2)
    # these files stay open as long as the process lives
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.config.dictConfig(CONFIG)
    # forget the helper processes of the test's process, which this process must not use
    for helper, names in HELPERS.items():
        for name in names:
            setattr(helper, name, None)
    os.environ.clear()
    os.environ |= place.environment
    # spare the garbage collector the objects of the test process
    gc.freeze()


def children_of(process: int) -> list[int]:
    """Return the process ids of the children: a job's shell has the controller, a controller the workers."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@contextlib.contextmanager
def forking_scripts() -> Iterator[None]:
    """Fork the processes of scripts; if torch has threads, which a fork does not copy, start them as usual."""
    if differentiates_in_threads():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", _subprocess(_start_script))
        yield


@contextlib.contextmanager
def forking_jobs(*, starting_first: bool = False) -> Iterator[None]:
    """Fork the jobs that this process submits, their processes of scripts, and rehearsals; see `forking_scripts`.

    Not for tests of limits that a cluster file's setup lines set, nor for tests of process names.

    Args:
        starting_first: Start the script of each job's first worker as a new process, which imports its modules itself.
    """
    if differentiates_in_threads():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_executor, "hold_lock", lambda _: [])
        patch.setattr(local_executor, "subprocess", _subprocess(_start_job))
        patch.setattr(local, "subprocess", _subprocess(_start_worker))
        patch.setattr(rehearsal, "run_apart", _run_module)
        with forking_scripts():
            if starting_first:
                patch.setattr(processes, "subprocess", _subprocess(_start_first_script))
            yield


def run_command(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> Ran:
    """Run a command in a folder as `subprocess.run` does, but in a fork that forks its jobs; see `forking_jobs`."""
    if differentiates_in_threads():
        command = [sys.executable, "-m", main.__module__, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    return _ran(partial(_command, main, arguments), [*arguments], environment, folder)


def start_command(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path, output: Path = Path(os.devnull)
) -> Forked:
    """Start a command in the background as `run_command` does; its stdout and stderr go to a file."""
    with output.open("wb") as stream:
        place = Place(stream.fileno(), stream.fileno(), {**os.environ}, folder, has_session=True)
        return Forked(partial(_command, main, arguments), place)


def _command(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    sys.argv = ["tula", *arguments]
    with forking_jobs():
        return main(arguments)


def _run_module(command: list[str], _timeout_s: float, env: Mapping[str, str]) -> Ran:
    """Stand in for `run_apart`: run the main function of the MODULE in `python -m MODULE ARGUMENTS` in a fork."""
    at = command.index("-m") + 1
    return _ran(lambda: resolve(f"{command[at]}:main")(command[at + 1 :]), command, env)


def _ran(
    work: Callable[[], object], words: list[str], environment: Mapping[str, str], folder: Path | None = None
) -> Ran:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = Forked(work, Place(output.fileno(), errors.fileno(), {**environment}, folder)).wait()
        output.seek(0)
        errors.seek(0)
        return Ran(words, code or 0, output.read().decode(), errors.read().decode())


def _subprocess(start: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(Popen=start, **{name: getattr(subprocess, name) for name in NAMES})


def _start_script(
    command: list[str], *, cwd: Path, env: Mapping[str, str], stdout: int | IO[bytes], **_: Any
) -> Forked:
    reading = None
    if stdout == subprocess.PIPE:
        reading, output = os.pipe()
    else:
        output = os.dup(stdout if isinstance(stdout, int) else stdout.fileno())
    script = Forked(partial(child.main, command[-1:]), Place(output, output, env, cwd, has_session=True))
    os.close(output)
    if reading is not None:
        script.stdout = os.fdopen(reading, "rb")
    return script


def _start_first_script(command: list[str], *, env: Mapping[str, str], **options: Any) -> Any:
    if env["RANK"] == "0":
        return subprocess.Popen(command, env=env, **options)
    return _start_script(command, env=env, **options)


def _start_worker(command: list[str], *, env: Mapping[str, str], stdout: IO[str], stderr: IO[str], **_: Any) -> Forked:
    return Forked(partial(job_start.main, command[-3:]), Place(stdout.fileno(), stderr.fileno(), env))


def _start_job(command: list[str], *, env: dict[str, str], **_: Any) -> Forked:
    """Fork a process that acts as the job's shell; it inherits the job's lock, and the lock's file bears its number."""
    folder = Path(shlex.split(env["SUBMITIT_LOCAL_COMMAND"])[-3])
    lock = os.open(folder / f"new-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # the last line starts the controller; those before it are the setup
    setup = command[-1].rpartition(" && { ")[0]
    null = os.open(os.devnull, os.O_WRONLY)
    shell = Forked(partial(_be_shell, folder, setup), Place(null, null, env, has_session=True))
    (folder / f"new-{os.getpid()}").rename(folder / f"{shell.pid}.lock")
    os.close(lock)
    os.close(null)
    return shell


def _be_shell(folder: Path, setup: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # give up the inherited lock of the run directory: only the command may hold it, and the job may outlive the command
    for each in [
        path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.readlink().name == ".lock"
    ]:
        os.close(int(each.name))
    own = str(os.getpid())
    with tempfile.TemporaryFile() as answer:
        os.dup2(answer.fileno(), VARIABLES_FD)
        lines = f"{setup} && env -0 >&{VARIABLES_FD}".replace("$$", own)
        code = subprocess.run([SHELL, "-c", lines], check=False, pass_fds=[VARIABLES_FD]).returncode
        if code:
            return code
        answer.seek(0)
        variables = dict(line.split("=", 1) for line in answer.read().decode().split("\0") if line)
    os.close(VARIABLES_FD)
    with (folder / f"{own}_shell.out").open("ab") as output:
        place = Place(output.fileno(), output.fileno(), variables)
        ended = Forked(lambda: EndingController(folder).run(), place).wait()
    if ended == -signal.SIGKILL:
        return 128 + signal.SIGKILL
    (folder / f"{own}.lock").unlink()
    return ended or 0
