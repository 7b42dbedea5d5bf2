"""Processes of a user's training script, as the workers that start them see them.

Each worker starts one process, in a process group of its own, and watches it: whether it ends,
whether it steps, and whether another worker's process has failed, for which it would wait in a
collective. Whatever happens, nothing that the script has started is left when `watch` returns.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from torch.distributed import (  # type: ignore[attr-defined] # documented, though not in __all__
    HashStore,
    Store,
)

from tula_hpc.attach.hangs import ANSWER_S, are_in_different_collectives, ask_where, describe_places
from tula_hpc.attach.reporting import (
    EVERY_WORKER,
    ChildSpec,
    ProcessMessage,
    end_of,
    read_message,
    unexplained,
)
from tula_hpc.attach.script import Script
from tula_hpc.ddp.rendezvous import LOOPBACK, free_port
from tula_hpc.env import WorkerEnvironment, adopt_orphans, environment_of_script, unix_time
from tula_hpc.errors import InputError, TulaError, error_for
from tula_hpc.failure_kinds import Failure
from tula_hpc.formatting import plural
from tula_hpc.launch.diagnosis import without_chatter
from tula_hpc.own_sources import local_rank_option
from tula_hpc.process_memory import descendants
from tula_hpc.python_path import start_of_python
from tula_hpc.records import Configuration, parse_record, write_atomically
from tula_hpc.records.base import Record

POLL_S = 0.5
# time for another worker to notice a failure, and to ask its own script where it is
LEAVE_S = 2.0 * POLL_S + ANSWER_S
# time for a process to end after its last message: it has nothing left to do
GRACE_S = 10.0
# the same for a training, which may still be uploading its results
TRAINED_GRACE_S = 60.0
# time for a signal that ended a script's process to reach its worker, which knows what to do
SIGNAL_GRACE_S = 3.0


class Meeting(NamedTuple):
    """Address at which the processes of one start meet, decided by rank 0."""

    host: str
    port: int
    # differs for each start
    run_id: str
    # Unix time
    began_at: float


def choose_meeting(env: WorkerEnvironment) -> Meeting:
    """Return a meeting on this host; rank 0 tells the others."""
    host = env.hosts[0] if env.on_slurm else LOOPBACK
    return Meeting(host, free_port(), secrets.token_hex(8), unix_time())


class ProcessEnd(Record):
    """End of a script's process, by its last message or as its worker saw it."""

    rank: int
    message: ProcessMessage
    # file with its output
    log: str

    @property
    def is_done(self) -> bool:
        """True if the process completed its task."""
        return self.message.state == "done"


class Child:
    """A script's process."""

    def __init__(
        self,
        spec: ChildSpec,
        process: subprocess.Popen[bytes],
        log: Path,
        others: set[int],
        answers: int,
    ) -> None:
        self.spec, self.process, self.log = spec, process, log
        # descendants of this process that were there before
        self._others = others
        # pipe on which the script's process reports where it is
        self._answers = answers
        # descriptor that becomes readable once the process has ended
        self._end = os.pidfd_open(process.pid)
        self._message_at = self._printed_at = time.monotonic()
        self._stamp = self._size = 0
        self._message: ProcessMessage | None = None

    def message(self) -> ProcessMessage | None:
        """Return its last message; None before its first one."""
        with contextlib.suppress(OSError):
            stamp = self.spec.message_file.stat().st_mtime_ns
            if stamp != self._stamp:
                self._stamp = stamp
                self._message_at = time.monotonic()
                self._message = read_message(self.spec.message_file)
        return self._message

    def has_ended_its_task(self) -> bool:
        """Tell whether it has given its last message."""
        message = self.message()
        return message is not None and message.state != "stepping"

    def quiet_s(self) -> float:
        """Return the seconds since its last sign of life, or since its start."""
        self.message()
        return time.monotonic() - self._message_at

    def silent_s(self) -> float:
        """Return `quiet_s`, or the seconds since its last output where that is less."""
        with contextlib.suppress(OSError):
            size = self.log.stat().st_size
            if size != self._size:
                self._size = size
                self._printed_at = time.monotonic()
        return min(self.quiet_s(), time.monotonic() - self._printed_at)

    def wait(self, seconds: float) -> int | None:
        """Return its exit code, or None if it still lives after these seconds."""
        # `Popen.wait` would look twenty times a second, on the core of the training
        select.select([self._end], [], [], seconds)
        # it keeps its number until `end`, which kills the process group of that number
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def end(self) -> None:
        """Kill it, its process group, and whatever else it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        os.close(self._end)
        os.close(self._answers)
        _LIVING.discard(self.process.pid)
        # orphans are this process's children now, see `adopt_orphans`; some may start others
        while left := set(descendants("self")) - self._others - _of_living():
            for process in left:
                _kill(process)

    def stopped(self, failure: Failure, detail: str, *, follows: bool = False) -> ProcessEnd:
        """Return the outcome of a living process that is about to be ended, and where it is."""
        at = ask_where(self.process.pid, self._answers)
        message = ProcessMessage(
            state="failed", failure=failure, detail=detail, follows=follows, at=at
        )
        return ProcessEnd(rank=self.spec.rank, message=message, log=str(self.log))

    def outcome(self, code: int) -> ProcessEnd:
        """Return how it ended, once it has."""
        message = self.message()
        if message is None or message.state == "stepping":
            message = unexplained(self.spec.program, message, code, end_of(self.log))
        if message.is_early:
            printed = without_chatter(end_of(self.log)).splitlines()
            parts = [message.detail]
            if printed:
                parts.append(f"its last line of output: {printed[-1].strip()[:300]}")
            if message.remedy:
                parts.append(f"if that is not why: {message.remedy}" if printed else message.remedy)
            message = message.model_copy(update={"detail": "; ".join(parts)})
        return ProcessEnd(rank=self.spec.rank, message=message, log=str(self.log))


# ids of the scripts' processes that this process has started and not ended yet
_LIVING: set[int] = set()


def _of_living() -> set[int]:
    # a copy, as another thread may end its own meanwhile
    living = tuple(_LIVING)
    return set(living).union(*(set(descendants(process)) for process in living))


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)
    # a descendant further down is no child of this process until its parent, killed too, is gone
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


def start(
    spec: ChildSpec, variables: dict[str, str], work: Path, log: IO[bytes], *, is_read: bool = False
) -> Child:
    """Start a script's process in the folder `work`, with variables on top of those of this one.

    Its output goes to `log`; if it `is_read`, through a pipe whose reader writes it there.
    """
    adopt_orphans()
    others = set(descendants("self"))
    spec.message_file.unlink(missing_ok=True)
    file = spec.message_file.with_suffix(".spec")
    answers, answer_end = os.pipe()
    changes = {"answers": answer_end, "program": _with_local_rank(spec.program, variables)}
    write_atomically(file, spec.model_copy(update=changes).model_dump_json())
    process = subprocess.Popen(
        [*start_of_python(), "-m", "tula_hpc.attach.child", str(file)],
        cwd=work,
        env=environment_of_script({"PYTHONUNBUFFERED": "1", **variables}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_read else log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(answer_end,),
    )
    os.close(answer_end)
    _LIVING.add(process.pid)
    return Child(spec, process, Path(log.name), others, answers)


def _with_local_rank(program: Script, variables: dict[str, str]) -> Script:
    """Give a script of several workers its local rank as `torch.distributed.launch` does."""
    given = any(each.startswith(("--local_rank", "--local-rank")) for each in program.arguments)
    # a single worker's script trains without a process group if it gets none
    if given or variables["WORLD_SIZE"] == "1":
        return program
    option = local_rank_option([str(program.path or program.module)])
    if not option:
        return program
    first = f"{option}={variables['LOCAL_RANK']}"
    return program._replace(arguments=(first, *program.arguments))


class WorkerPeers:
    """Messages between a start's workers about their processes; a single worker has no store."""

    def __init__(self, store: Store | None, run_id: str) -> None:
        self.store = HashStore() if store is None else store
        self.run_id = run_id

    def announce(self, outcome: ProcessEnd) -> None:
        """Tell the others how this worker's process ended."""
        self.store.set(f"outcome/{self.run_id}/{outcome.rank}", outcome.model_dump_json())
        if not outcome.is_done:
            self._leave(outcome.rank)

    def leave(self, rank: int, world_size: int) -> None:
        """Tell the others that this worker ends its process, and wait until all do, or have ended.

        A process that loses a peer leaves its place in the script, and can no longer report it.
        """
        self._leave(rank)
        self._await_all("left", world_size, LEAVE_S)

    def end_others(self, rank: int, world_size: int, grace_s: float) -> None:
        """Have the others end their processes too, after a time in which these may end by themselves.

        They may wait without end for this worker's process, which is gone: NCCL does not notice it.
        """
        self._await_all("outcome", world_size, grace_s)
        self._leave(rank)

    def _await_all(self, what: str, world_size: int, seconds: float) -> None:
        ends = time.monotonic() + seconds
        everybody = self._keys(what, world_size)
        while not self.store.check(everybody) and time.monotonic() < ends:
            time.sleep(0.05)

    def _leave(self, rank: int) -> None:
        self.store.set(f"failed/{self.run_id}", "")
        self.store.set(f"left/{self.run_id}/{rank}", "")

    def ask_to_stop(self) -> None:
        """Tell the others that this worker was asked to stop."""
        self.store.set(f"stop/{self.run_id}", "")

    def are_asked_to_stop(self) -> bool:
        """Tell whether any worker was asked to stop."""
        return self.store.check([f"stop/{self.run_id}"])

    def have_failed(self) -> bool:
        """Tell whether another worker's process has failed, for which this one would wait."""
        return self.store.check([f"failed/{self.run_id}"])

    def report_quiet(self, rank: int, *, is_quiet: bool) -> None:
        """Tell the others whether this worker's script gives no sign of life."""
        self.store.set(f"quiet/{self.run_id}/{rank}", str(is_quiet))

    def are_all_quiet(self, world_size: int) -> bool:
        """Tell whether the scripts of all workers are quiet."""
        keys = self._keys("quiet", world_size)
        if not self.store.check(keys):
            return False
        return all(self.store.get(key).decode() == str(True) for key in keys)

    def outcomes(self, world_size: int) -> list[ProcessEnd]:
        """Return the outcomes of all workers of the start, once all have announced theirs."""
        keys = self._keys("outcome", world_size)
        return [parse_record(ProcessEnd, self.store.get(key)) for key in keys]

    def _keys(self, what: str, world_size: int) -> list[str]:
        """Return the keys of all workers."""
        return [f"{what}/{self.run_id}/{rank}" for rank in range(world_size)]


def watch(
    child: Child,
    peers: WorkerPeers,
    step_s: float,
    look: Callable[[Child], str | None] | None = None,
) -> ProcessEnd:
    """Wait until a process ends, or end it where it has to; return its outcome.

    A profile's process may take `step_s` until its first step, and between two; a training's, until
    its first: later an evaluation or a save may take any time. Instead a training has a `look`,
    called a few times a second, which returns a reason to end the process, if there is one.
    """
    try:
        while (code := child.wait(POLL_S)) is None:
            if stopped := _given_up(child, peers, step_s, look):
                peers.leave(child.spec.rank, child.spec.world_size)
                return stopped
            if child.has_ended_its_task():
                code = child.wait(GRACE_S if look is None else TRAINED_GRACE_S)
                break
        if code is not None and code < 0:
            # if the signal was sent to the whole job, this process ends while it sleeps
            time.sleep(SIGNAL_GRACE_S)
        return child.outcome(code or 0)
    finally:
        child.end()


def _given_up(
    child: Child, peers: WorkerPeers, step_s: float, look: Callable[[Child], str | None] | None
) -> ProcessEnd | None:
    """Return the outcome of a process that has to be ended now; None: it may go on."""
    if look is not None and (reason := look(child)):
        return child.stopped(Failure.BUG, f"{child.spec.program.name} {reason}")
    if child.has_ended_its_task():
        return None
    if peers.have_failed():
        return child.stopped(Failure.KILLED, "ended with the others", follows=True)
    is_waited_for = look is None or child.message() is None
    if is_waited_for and child.quiet_s() > step_s:
        return child.stopped(Failure.BAD_INPUT, _without_step(child, step_s))
    return None


def _without_step(child: Child, step_s: float) -> str:
    since = "until its first optimizer step"
    if child.spec.world_size > 1:
        # each worker may have taken steps by itself
        since += " of a model in DistributedDataParallel"
    if child.message() is not None:
        since = "between two optimizer steps"
    limit = f"{step_s:.0f} s"
    if child.spec.mode != "look":
        limit += " (search.first_step_minutes)"
    return f"{child.spec.program.name} took more than {limit} {since}"


def worst(outcomes: list[ProcessEnd]) -> ProcessEnd:
    """Return the outcome that explains the others: a failure with its own cause, if there is one.

    Where workers hang, or wait in vain for one another, it says where each of them is.
    """
    cause = min(outcomes, key=lambda each: (each.is_done, each.message.follows, each.rank))
    places = {each.rank: each.message.at for each in outcomes if each.message.at is not None}
    if cause.is_done or not places:
        return cause
    detail = cause.message.detail
    failure = cause.message.failure
    where = describe_places(places, len(outcomes))
    ended = [
        each for each in outcomes if each.is_done and each.message.result.get("end") == "exited"
    ]
    if cause.message.is_early:
        detail = f"{detail}; that was rank {cause.rank}, while {where}"
    elif cause.message.follows and ended:
        # no worker was lost: one has ended, and the others wait for it
        failure = Failure.BAD_INPUT
        detail = (
            f"rank {ended[0].rank} ended after {plural(ended[0].message.steps, 'step')}, while {where}; "
            "give each worker as many batches as the others, as DistributedSampler does"
        )
    elif cause.message.at is not None:
        detail = f"{detail}: {where}"
        if len(places) == len(outcomes) and are_in_different_collectives(places.values()):
            if cause.message.follows:
                # no worker was lost, as all of them have reported where they are
                detail = f"the workers wait for each other: {where}"
                failure = Failure.BAD_INPUT
            detail = f"{detail}; {EVERY_WORKER}"
    message = cause.message.model_copy(update={"detail": detail, "failure": failure})
    return cause.model_copy(update={"message": message})


def open_log(folder: Path, rank: int) -> IO[bytes]:
    """Open the log of a rank's script, beside the folder in which it runs."""
    return (folder / f"rank-{rank}.log").open("ab")


def error_of(outcome: ProcessEnd, key: str) -> TulaError:
    """Return the error that the end of a process means, with its log; not for lack of memory.

    `key` is the key of the sweep that names the script.
    """
    message = outcome.message
    words = f"{message.detail}; its output: {outcome.log}"
    kind = error_for(message.failure)
    if kind is InputError and not message.detail.startswith("workload."):
        return InputError(words, key=key)
    return kind(words)


def _has_met(meet: Callable[[], object]) -> bool:
    """Tell whether the workers met: rank 0 may have ended, and with it the store they meet in."""
    try:
        meet()
    except RuntimeError:
        return False
    return True


def end_as(
    end: ProcessEnd,
    configuration: Configuration,
    rank: int | None,
    record_oom: Callable[[Failure], object],
    meet: Callable[[], object],
) -> NoReturn:
    """End a job's worker in the way in which the script's failed process has ended.

    `rank` is the rank of the process that this worker started; None: it started none. Where memory
    ran out, the worker of the failed process calls `record_oom`. The others first `meet` it: as
    soon as one worker has ended, srun -K1 kills all.

    Raises:
        TulaError: With the reason, and where the script's output is.
        SystemExit: Memory ran out, which is recorded; or another worker raises the reason.
    """
    failure = end.message.failure
    is_mine = end.rank == rank
    if failure is not None and failure.is_oom:
        if is_mine:
            record_oom(failure)
        if _has_met(meet) or is_mine:
            raise SystemExit(f"out of memory ({failure}) at {configuration}: recorded")
    if failure is Failure.DEVICE_FAILED and not is_mine:
        # that worker does not come: it reports the device, and ends
        _has_met(meet)
    if is_mine:
        sys.stderr.write(end_of(Path(end.log)))
    sys.stderr.flush()
    error = error_of(end, "workload.script")
    if failure is Failure.KILLED and is_mine and end.message.detail.endswith("SIGKILL"):
        # perhaps the kernel killed it for lack of memory: scheduler and peers shall see the same
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if is_mine or failure is Failure.BAD_INPUT:
        raise error
    raise SystemExit(f"rank {end.rank} at {configuration}: {error}")
