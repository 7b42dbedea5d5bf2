"""Messages between a worker and its script's process: one file in each direction.

Exit codes and output carry no meaning by themselves: a script may end and print as it likes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from multiprocessing import active_children
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from pydantic import Field
from torch.optim import Optimizer

from tula_hpc.attach.hangs import Place, place_of
from tula_hpc.attach.hooks.passes import Listener
from tula_hpc.attach.hooks.step_hooks import Hooks, Others
from tula_hpc.attach.own_folder import Saved, spare_files
from tula_hpc.attach.script import Script
from tula_hpc.ddp.device_errors import broken_device
from tula_hpc.env import meeting_variables, set_back
from tula_hpc.errors import (
    CheckpointError,
    DeviceError,
    InputError,
    MeetingError,
    StorageError,
    TulaError,
)
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import NO_SPACE, PASSING, full_disk
from tula_hpc.formatting import first_line
from tula_hpc.launch.diagnosis import last_bytes, lost_a_peer
from tula_hpc.process_memory import held_by_others, keep_freed, out_of_memory, parent_of
from tula_hpc.records import parse_record, write_atomically
from tula_hpc.records.base import Record
from tula_hpc.user_code import describe_error, lacks_gpu

EVERY_WORKER = "call each collective on every worker, none of them within `if rank == 0`"
# gloo's message when it aborts the process
_MISMATCH = re.compile(r"(\d+) vs (\d+)\. Received data size doesn't match expected size")
# words for several workers, in an error or in the line that raised it
_OF_WORKERS = re.compile(
    "world_?size|only distributed|distributed training|assert .*distributed"
    "|process group has not been initialized",
    re.IGNORECASE,
)
# method of a mode that handles an event, see `Listener`
Handler = TypeVar("Handler", bound=Callable[..., None])
# time between two signs of life
BEAT_S = 1.0
# last lines of a failed script's output that are shown, and most characters of them
SHOWN_LINES = 12
MOST_SHOWN = 20_000
# most characters of a failure's detail
MOST_WORDS = 500


class ChildSpec(Record):
    """Specification of a script's process, written by its worker."""

    mode: Literal["profile", "train", "look"]
    program: Script
    # working directory of the command, in which a module is found
    home: Path = Field(default_factory=Path.cwd)
    # file that it writes its messages to
    message_file: Path
    # id of the process that started it
    parent: int = Field(default_factory=os.getpid)
    # descriptor on which it answers where it is, see `hangs`
    answers: int | None = None
    rank: int = 0
    world_size: int = 1
    # device of the cluster file
    device: Literal["cpu", "cuda"] = "cpu"
    # see `config.WorkloadSpec`
    counted_model: str | None = None
    # the mode's own settings
    settings: dict[str, Any] = Field(default={})


class ProcessMessage(Record):
    """Message of a script's process: it steps, it is done, or it failed and why."""

    state: Literal["stepping", "done", "failed"]
    failure: Failure | None = None
    # the reason of a failure, in one sentence
    detail: str = ""
    # where memory ran out: what `held_by_others` says
    held: str = ""
    # it failed because another worker's process had
    follows: bool = False
    # optimizer steps so far
    steps: int = 0
    # the script ended by itself too early; what it printed last may say why
    is_early: bool = False
    # it ended too early after some steps, but with exit code 0: a larger batch leaves fewer steps
    is_short: bool = False
    # advice, for the end of the message
    remedy: str = ""
    # where it was when it waited for other workers
    at: Place | None = None
    # the mode's own result
    result: dict[str, Any] = Field(default={})


def read_message(path: Path) -> ProcessMessage | None:
    """Return the last message of a process, None if there is none."""
    try:
        return parse_record(ProcessMessage, path.read_bytes())
    except (OSError, ValueError):
        return None


def failed_by(error: BaseException) -> ProcessMessage:
    """Return the failure that an exception in a script's process means, in one sentence."""
    own = error.failure if isinstance(error, TulaError) else None
    cause = error.__cause__
    if isinstance(error, CheckpointError | StorageError) and isinstance(cause, OSError):
        own = Failure.KILLED if cause.errno in PASSING else own
    if own is not None and not isinstance(error, MeetingError | DeviceError):
        return _failed(own, str(error))
    device = broken_device(error)
    if isinstance(error, MeetingError) or (lost_a_peer(error) and not device):
        lost = _failed(Failure.KILLED, f"lost a peer: {_first_line(error)}")
        return lost.model_copy(update={"follows": True, "at": place_of(error)})
    failure = out_of_memory(error) or (Failure.DEVICE_FAILED if device else None)
    if failure is None and isinstance(error, OSError) and error.errno in NO_SPACE:
        failure = Failure.NO_SPACE
    if failure is not None:
        message = _failed(failure, device or _first_line(error))
        # the job's processes here descend from the parent of the worker that started this one
        held = held_by_others(error, parent_of(os.getppid()))
        return message.model_copy(update={"held": held})
    if not isinstance(error, Exception):
        return _failed(Failure.BUG, f"ended by {type(error).__name__}")
    detail = describe_error(error)
    full = full_disk(Path.cwd())
    # this word is in torch.save's message about a failed write
    if not full and "inline_container" in str(error):
        full = "torch.save could not write all of it; make space on the disk that it saves to"
    if full:
        return _failed(Failure.NO_SPACE, f"{detail}; {full}")
    return _failed(Failure.BAD_INPUT, f"{detail}{_hint(error)}")


def unexplained(
    script: Script, message: ProcessMessage | None, code: int, printed: str = ""
) -> ProcessMessage:
    """Return the failure of a process that ended without a report, by its exit code.

    A signal's code is less than 0. `message` is its last message, `printed` the end of its output.
    """
    failure = Failure.BAD_INPUT
    detail = f"{script.name} ended its process by itself, with exit code {code}"
    if code == -signal.SIGABRT and (found := _MISMATCH.search(printed)):
        detail = (
            f"the workers of {script.name} took part in different collectives (one sent "
            f"{found[1]} bytes where {found[2]} were expected); {EVERY_WORKER}"
        )
    elif code < 0:
        # some signals have no name
        known = {each.value: each.name for each in signal.Signals}
        name = known.get(-code, f"signal {-code}")
        failure = Failure.KILLED
        detail = f"{script.name} was ended by {name}"
    elif code == 0:
        detail += "; expected it to return or to call sys.exit, not os._exit"
    steps = message.steps if message is not None else 0
    return ProcessMessage(state="failed", failure=failure, detail=detail, steps=steps)


def _hint(error: Exception) -> str:
    """Return what a script lacks here, after a semicolon."""
    if lacks_gpu(error):
        return (
            "; it has no GPU here: see device and gres in the cluster file; run tula attach on a "
            "machine with one, for example by srun --gpus 1"
        )
    if str(error).startswith("Parent directory"):
        return "; the script has to make it (os.makedirs), as it runs in a folder of its own"
    if "does not match the world size" in str(error):
        # Lightning's
        return "; give {nodes} to its option for num_nodes; devices are the workers of a node"
    if isinstance(error, EOFError):
        return "; it asks for input, but a job has none"
    if isinstance(error, KeyError) and str(error.args[:1]).startswith("('SLURM_"):
        return "; of Slurm's variables a script gets only those of its place, such as SLURM_PROCID"
    return ""


def _failed(failure: Failure, detail: str) -> ProcessMessage:
    words = " ".join(detail.split())[:MOST_WORDS]
    return ProcessMessage(state="failed", failure=failure, detail=words)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def end_of(log: Path) -> str:
    """Return the last lines of a script's output, and all of a traceback that they would cut."""
    lines = last_bytes(log)[-MOST_SHOWN:].splitlines()
    first = max(0, len(lines) - SHOWN_LINES)
    above = first
    while above and lines[above].startswith(" "):
        above -= 1
    if lines[above:] and lines[above].startswith("Traceback "):
        first = above
    return "".join(f"{line}\n" for line in lines[first:])


def not_caught(handle: Handler) -> Handler:
    """Have an error of ours in a handler of an event end the process: the script may catch it."""

    @wraps(handle)
    def guarded(mode: Mode, *args: Any) -> None:
        try:
            handle(mode, *args)
        except TulaError as error:
            # a refusal is shown without a traceback
            mode.fail(error.with_traceback(None))

    return cast("Handler", guarded)


def leave(code: int) -> NoReturn:
    """End this process at once: the script cannot catch that, and its threads are not awaited."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        kill_daemons()
    finally:
        os._exit(code)


def kill_daemons() -> None:
    """Kill daemon processes, which Python would end by TERM: a loader's may not heed that."""
    for process in active_children():
        if process.daemon:
            process.kill()


class Mode(Listener):
    """Work of a script's process in addition to running the script; base of all modes."""

    def __init__(self, spec: ChildSpec, others: Others | None = None) -> None:
        self.spec = spec
        self.hooks = Hooks(self, spec.counted_model, others)
        self.steps = 0
        # `time.perf_counter` at which the next sign of life is due; none before the first one
        self.sign_due = math.inf
        self._meeting = meeting_variables()

    def begin(self) -> None:
        """Watch from now on; called before the script runs, in the main thread."""
        if self.spec.device == "cpu":
            keep_freed()
        spare_files(Path.cwd(), self.place)
        self.hooks.install()

    def place(self) -> Saved | None:
        """Return the point from which a training can go on if the script saves now, or None."""
        return None

    def ended(self, code: int) -> ProcessMessage:
        """Return the last message, once the script has ended by itself with this exit code."""
        raise NotImplementedError

    def say(self, message: ProcessMessage) -> None:
        """Write a message for the worker that started this process."""
        write_atomically(self.spec.message_file, message.model_dump_json())

    def count_step(self) -> None:
        """Count a step, and give a sign of life about once a second."""
        self.steps += 1
        if self.steps == 1:
            self.begin_signs()
        elif time.perf_counter() > self.sign_due:
            self.give_sign()

    def begin_signs(self) -> None:
        """Give the first sign of life, after which the worker no longer waits for a first step."""
        self.say(ProcessMessage(state="stepping", steps=self.steps))
        self.sign_due = time.perf_counter() + BEAT_S

    def give_sign(self) -> None:
        """Give a sign of life about once a second, after the first one."""
        now = time.perf_counter()
        if now > self.sign_due:
            self.sign_due = now + BEAT_S
            # there may be no file while the script's first step is reported anew
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.spec.message_file)

    def trains_apart(self, optimizer: Optimizer) -> bool:
        """See `Listener`."""
        return self.spec.world_size > 1

    def begins_anew(self) -> None:
        """Count from the next step on."""
        self.steps = 0
        self.sign_due = math.inf

    def refuse(self, why: str) -> None:
        """See `Listener`."""
        self.fail(InputError(f"{self.spec.program.name} {why}"))

    def meets(self) -> None:
        """Restore the variables that say where the workers meet, if the script has changed them."""
        for name, own in set_back(self._meeting).items():
            has = f"{own} as {self.spec.program.name} has it"
            sys.stderr.write(f"tula: {name} is {self._meeting[name]}, not {has}\n")

    def fail(self, error: BaseException, so_far: dict[str, Any] | None = None) -> NoReturn:
        """Say why this process fails and how far it came, and end it."""
        # an error that was never raised has no traceback to show
        if error.__traceback__ is not None:
            # not by `print`, which scripts replace on all workers but the first
            sys.stderr.write("".join(traceback.format_exception(error)))
        message = failed_by(error)
        detail = f"{message.detail}{self._looked_for(error)}{self._as_one(error)}"
        detail += self.circumstances()
        known = {"steps": self.steps, "detail": detail, "result": so_far or {}}
        self.say(message.model_copy(update=known))
        leave(1)

    def _looked_for(self, error: BaseException) -> str:
        """Return where a relative path was looked for, after a semicolon."""
        name = error.filename if isinstance(error, FileNotFoundError) else None
        if not name or Path(str(name)).is_absolute():
            return ""
        if (self.spec.home / str(name)).exists():
            return "; the script runs in a folder of its own, where it is not: give its full path"
        return f"; looked for from {self.spec.home}, where the command was started"

    def _as_one(self, error: BaseException) -> str:
        """Return what to do if a script refuses to run as a single worker, after a semicolon."""
        place = place_of(error)
        words = f"{error} {place.code if place else ''}"
        if self.spec.world_size > 1 or self.steps or not _OF_WORKERS.search(words):
            return ""
        if self.spec.mode != "look":
            return "; if it needs several workers, leave 1 out of search.cluster_sizes"
        return (
            "; it is a single worker here: if it needs several, complete the sweep file of "
            "tula init --script without tula attach, and leave 1 out of search.cluster_sizes"
        )

    def circumstances(self) -> str:
        """Return what may explain a failure of the script at this moment, after a semicolon."""
        return ""
