"""Run a Slurm command, bounded in time and size: its output may be anything and never end.

On many clusters `squeue` and its like are a site's own scripts, which put banners around answers,
or are broken.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from tula_hpc.env import slurm_conf, without_filters
from tula_hpc.errors import LaunchError, NotConfiguredError, NotStartedError
from tula_hpc.formatting import first_line

COMMAND_TIMEOUT_S = 60.0
# seconds until the user is told that a command still waits for its controller
NOTICE_AFTER_S = 8.0
# largest answer: a million jobs, with 60 characters for each
MOST_BYTES = 64 * 2**20
# how many of the last characters of a command's error message are kept
MOST_WORDS = 4_000
# how many characters of an unexpected answer are shown
MOST_SHOWN = 200
# Slurm's message if clients get their configuration from a controller and do not find it
NOT_CONFIGURED = "Could not establish a configuration source"
CHUNK_BYTES = 2**16


class Done(NamedTuple):
    """A command that has ended, its exit code and its output."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """Return the command's own words about its failure, shortened; never empty."""
        how = f"exit code {self.code}" if self.code >= 0 else f"killed by signal {-self.code}"
        return (self.stderr.strip() or self.stdout.strip() or how)[-MOST_WORDS:]


def run_command(arguments: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Return the output of a Slurm command, run without the user's filters for squeue.

    Raises:
        NotConfiguredError: The command finds no configuration of Slurm on this machine.
        LaunchError: The command failed, with its own words in the message, or did not answer.
    """
    done = run(arguments, timeout_s, environment=without_filters())
    if done.code and NOT_CONFIGURED in done.complaint:
        raise NotConfiguredError(
            f"Slurm cannot be reached from here ({arguments[0]}: {NOT_CONFIGURED}): run this on a "
            "login node, or set SLURM_CONF"
        )
    if done.code:
        raise LaunchError(f"{arguments[0]} failed: {done.complaint}")
    return done.stdout


def run(
    arguments: Sequence[str],
    timeout_s: float,
    *,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Run a command to its end, whatever its exit code; bytes that are not UTF-8 become escapes.

    Raises:
        NotStartedError: The command cannot be started.
        LaunchError: The command was killed, as it did not end in time or printed too much.
    """
    name = arguments[0]
    try:
        process = _start(arguments, stdin, environment)
    except (OSError, ValueError) as error:
        raise NotStartedError(_not_started(name, error)) from None
    with process:
        try:
            stdout, stderr = _read(process, name, timeout_s)
        except BaseException:
            # its children, too, which may hold its pipes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    texts = [text.decode(errors="backslashreplace") for text in (stdout, stderr)]
    return Done(process.returncode, *texts)


def _start(
    arguments: Sequence[str], stdin: str, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a command in a group of its own, so that its children can be killed with it."""
    with contextlib.ExitStack() as stack:
        given: IO[bytes] | int = subprocess.DEVNULL
        if stdin:
            # a file, since a pipe would have to be written to while the others are read
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(stdin.encode(errors="surrogateescape"))
            given.seek(0)
        return subprocess.Popen(
            arguments,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )


def _not_started(name: str, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError) and shutil.which(name) is None:
        return f"{name} is not on PATH: is this a Slurm login node?"
    words = error.strerror if isinstance(error, OSError) else str(error)
    return f"{name} cannot be started: {words}"


def _read(process: subprocess.Popen[bytes], name: str, timeout_s: float) -> tuple[bytes, bytes]:
    """Return standard output and error once both are at their end and the process has ended."""
    deadline = time.monotonic() + timeout_s
    notice_at = time.monotonic() + NOTICE_AFTER_S
    pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
    read = {pipe.fileno(): bytearray() for pipe in pipes}
    with selectors.DefaultSelector() as open_pipes:
        for pipe in pipes:
            open_pipes.register(pipe, selectors.EVENT_READ)
        while open_pipes.get_map():
            ready = open_pipes.select(max(0.0, min(deadline, notice_at) - time.monotonic()))
            if not ready and time.monotonic() < deadline:
                notice_at = deadline
                sys.stderr.write(
                    f"{name} has not answered for {NOTICE_AFTER_S:g} s; still waiting\n"
                )
                continue
            if not ready or time.monotonic() > deadline:
                raise LaunchError(f"{name} did not answer within {timeout_s:g} s")
            for key, _ in ready:
                chunk = os.read(key.fd, CHUNK_BYTES)
                read[key.fd] += chunk
                if not chunk:
                    open_pipes.unregister(key.fileobj)
                if len(read[key.fd]) > MOST_BYTES:
                    raise LaunchError(
                        f"{name} printed more than {MOST_BYTES // 2**20} MiB and was stopped"
                    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
        stdout, stderr = map(bytes, read.values())
        return stdout, stderr
    raise LaunchError(f"{name} did not end within {timeout_s:g} s")


def no_answer(name: str, printed: str) -> LaunchError:
    """Make the error for output that does not hold the answer."""
    first = first_line(printed).strip()
    if not first:
        return LaunchError(f"{name} answered nothing")
    return LaunchError(f"{name} gave no answer, but {first[:MOST_SHOWN]!r}")


def in_one_line(error: LaunchError) -> str:
    """Return the command that failed and the last line of its complaint."""
    first, *others = [line.strip() for line in str(error).splitlines()]
    return f"{first.partition(':')[0]}: {others[-1]}" if others else first


def unreached(error: LaunchError) -> str:
    """Return the complaint in one line, and where Slurm's commands look for their controller.

    With another cluster's configuration no controller seems to be there.
    """
    words, file = in_one_line(error), slurm_conf()
    if isinstance(error, NotStartedError):
        return words
    if not file:
        return f"{words}; SLURM_CONF is not set"
    readable = "" if os.access(file, os.R_OK) else ", no readable file"
    return f"{words}; SLURM_CONF is {file}{readable}"


def count_in(text: str) -> int | None:
    """Read a count as Slurm prints it; None if the text is no count, or an absurdly large one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None
