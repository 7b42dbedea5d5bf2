"""Run a few ranks of a large process group in step, and check that all call the same collectives in the same order.

On a cluster, a rank that calls a collective which the others do not call waits for ever. Here each rank is a process
whose process group sends every request (operation, shapes, types, root) to the test. The test compares the requests of
all ranks. At the first difference it fails and quotes each rank's lines; otherwise it carries the collective out.
The ranks that are not run count as copies of rank 1, so sums and maxima are those of a whole group.

The test sees every call that reaches the process group, also those of DistributedDataParallel and
ZeroRedundancyOptimizer, in C++ or Python. It does not see waits for a store, GPU streams or the inner work of NCCL.
"""

from __future__ import annotations

import functools
import gc
import inspect
import random
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined] # the stub lacks one of them
    HashStore,
    _create_work_from_future,
)
from torch.futures import Future

from tests.forked import context_of_workers
from tula_hpc.ddp import process_group as worker_module
from tula_hpc.env import WorkerEnvironment

# limit for a rank that neither calls a collective nor ends
PATIENCE_S = 120.0
BACKEND = "lockstep"
Array = npt.NDArray[Any]


class Request(NamedTuple):
    """A collective that a rank calls; must be equal on all ranks."""

    operation: str
    # shape and dtype of each tensor
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    # SUM, MAX, MIN or AVG for a reduction
    kind: str = ""
    # sending rank of a broadcast
    root: int = -1


class Asked(NamedTuple):
    """A request with the rank's data."""

    request: Request
    arrays: list[Array]
    # lines of code that led to the request
    lines: str


class Ended(NamedTuple):
    """The message of a rank that has ended."""

    result: object = None
    error: str = ""


class PeerLostError(RuntimeError):
    """Another rank has ended or calls another collective, so this rank's collective cannot finish."""


class LockstepGroup(dist.ProcessGroup):
    """The process group of one rank.

    Args:
        rank: Rank of this process.
        size: World size of the group; most of its ranks are not run.
        others: Connection to the test.
    """

    def __init__(self, rank: int, size: int, others: Connection) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the stub has only one of the two constructors
        self._rank, self._size, self._others = rank, size, others

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 # torch's name
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override] # the stub declares a plain attribute
        return BACKEND

    # torch's stub declares overloads, of which only one is ever called

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        operation = options if isinstance(options, dist.ReduceOp.RedOpType) else options.reduceOp
        return self._ask("all_reduce", tensors, tensors, kind=_name_of(operation))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        return self._ask("broadcast", tensors, tensors, root=options.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any = None) -> dist.Work:  # type: ignore[override]
        return self._ask("all_gather", inputs, outputs[0])

    def barrier(self, _options: Any = None) -> dist.Work:
        return self._ask("barrier", [], [])

    def _ask(
        self, operation: str, given: Sequence[Tensor], taken: Sequence[Tensor], kind: str = "", root: int = -1
    ) -> dist.Work:
        shapes = tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in given)
        arrays = [tensor.detach().numpy() for tensor in given]
        self._others.send(Asked(Request(operation, shapes, kind, root), arrays, _lines_that_ask()))
        answers = self._others.recv()
        if answers is None:
            raise PeerLostError("a rank is lost")
        for target, answer in zip(taken, answers, strict=True):
            target.detach().copy_(torch.from_numpy(answer))
        done: Future[Any] = Future()
        done.set_result(list(taken))
        work: dist.Work = _create_work_from_future(done)
        return work


def _name_of(operation: Any) -> str:
    known = {"SUM": dist.ReduceOp.SUM, "MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN, "AVG": dist.ReduceOp.AVG}
    (name,) = (name for name, each in known.items() if operation == each)
    return name


def _lines_that_ask() -> str:
    """Return the lines of this project that led to a collective, also where torch made the last call."""
    lines, frame = [], inspect.currentframe()
    while frame is not None:
        name = _name_of_own(frame.f_code.co_filename)
        if name:
            lines.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


@functools.cache
def _name_of_own(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return name if "/tula_hpc" in folder else ""


class Clock:
    """A clock that advances at every call by random seconds, at a different pace on each rank.

    Args:
        rank: Rank of this process.
    """

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)
        self.pace_s = 0.01 * self.random.lognormvariate(0, 1)
        self.now_s = 1e6

    def __call__(self) -> float:
        self.now_s += self.pace_s * self.random.lognormvariate(0, 1)
        return self.now_s


class Rank(NamedTuple):
    """One of the ranks that are run."""

    rank: int
    world_size: int

    @property
    def env(self) -> WorkerEnvironment:
        """The environment of this rank as a job gives it."""
        return WorkerEnvironment(self.rank, self.world_size, 0, self.rank, "1", 0, ("here",), on_slurm=False)


def ranks_of(world_size: int) -> list[Rank]:
    """Return the ranks that are run: the first, the second and the last one."""
    return [Rank(rank, world_size) for rank in (0, 1, world_size - 1)]


class Outcome(NamedTuple):
    """What the ranks did."""

    # collectives that all ranks called, in order
    requests: list[Request]
    # end of each rank that was run
    ends: list[Ended]

    @property
    def results(self) -> list[object]:
        """What each rank returned; fails the test if a rank raised an error."""
        errors = [end.error for end in self.ends if end.error]
        assert not errors, errors[0]
        return [end.result for end in self.ends]


def in_step(work: Callable[[Rank], object], world_size: int) -> Outcome:
    """Run `work` on some ranks of a group of `world_size`, in step at each collective of `worker.process_group`.

    Raises:
        AssertionError: Ranks called different collectives, or some ended while others called one more.
    """
    context, ways, processes = context_of_workers(), [], []
    for rank in ranks_of(world_size):
        here, there = context.Pipe()
        ways.append(here)
        processes.append(context.Process(target=_be, args=(work, rank, there)))
        processes[-1].start()
        there.close()
    try:
        return _carry_out(ways, world_size)
    finally:
        # all results have arrived by now; a rank that still waits in a collective must not keep the test waiting
        for process in processes:
            process.kill()
            process.join()


def _be(work: Callable[[Rank], object], rank: Rank, others: Connection) -> None:
    """Run one rank; the body of its process."""
    # no garbage collection: neither the test's objects nor those of so short a process are worth a scan
    gc.freeze()
    gc.disable()
    dist.Backend.register_backend(BACKEND, partial(_make_group, others), devices=["cpu"])
    stand_in(worker_module, "backend_of", lambda _: BACKEND)
    stand_in(worker_module, "meet", lambda *_: HashStore())
    clock = Clock(rank.rank)
    for name in ("perf_counter", "monotonic"):
        stand_in(time, name, clock)
    try:
        ended = Ended(work(rank))
    except BaseException as error:  # noqa: BLE001 # the test has to learn of every error
        ended = Ended(error=f"rank {rank.rank}: {''.join(traceback.format_exception(error))}")
    others.send(ended)


def _make_group(others: Connection, _store: object, rank: int, size: int, _timeout: object) -> LockstepGroup:
    return LockstepGroup(rank, size, others)


def stand_in(module: Any, name: str, value: object) -> None:
    """Replace an attribute for good, which is harmless in a process that ends soon."""
    setattr(module, name, value)


def _carry_out(ways: Sequence[Connection], world_size: int) -> Outcome:
    requests: list[Request] = []
    ends: list[Ended | None] = [None] * len(ways)
    while None in ends:
        messages = [_hear(way) if end is None else end for way, end in zip(ways, ends, strict=True)]
        asked = [each for each in messages if isinstance(each, Asked)]
        # ranks that wait for a failed rank are ended too; this counts as the failure's effect, not as a deadlock
        failed = any(isinstance(each, Ended) and each.error for each in messages)
        alike = len({each.request for each in asked}) <= 1
        together = failed or len(asked) in (0, len(ways))
        assert together, _difference(messages, requests)
        assert alike, _difference(messages, requests)
        if len(asked) == len(ways):
            requests.append(asked[0].request)
            replies: Sequence[object] = _answers(asked, world_size)
        else:
            replies = [None] * len(ways)
        for way, each, reply in zip(ways, messages, replies, strict=True):
            if isinstance(each, Asked):
                way.send(reply)
        ends = [None if isinstance(each, Asked) else each for each in messages]
    return Outcome(requests, [end for end in ends if end is not None])


def _hear(way: Connection) -> Asked | Ended:
    assert way.poll(PATIENCE_S), "a rank neither asks for a collective nor ends"
    received: Asked | Ended = way.recv()
    return received


def _difference(received: Sequence[Asked | Ended], before: Sequence[Request]) -> str:
    lines = [f"ranks differ after {len(before)} equal collectives:"]
    for name, each in zip(("first", "second", "last"), received, strict=True):
        words = f"{each.request} from {each.lines}" if isinstance(each, Asked) else "has ended"
        lines.append(f"  {name} rank: {words}")
    return "\n".join(lines)


def _answers(asked: Sequence[Asked], world_size: int) -> list[list[Array]]:
    """Return what the collective gives to each rank that is run."""
    request, places = asked[0].request, len(asked[0].arrays)
    columns = [[each.arrays[place] for each in asked] for place in range(places)]
    if request.operation == "all_reduce":
        return [[np.asarray(_reduced(each, request.kind, world_size)) for each in columns]] * len(asked)
    if request.operation == "broadcast":
        sources = {0: 0, 1: 1, world_size - 1: 2}
        if request.root not in sources:
            return [each.arrays for each in asked]
        return [asked[sources[request.root]].arrays] * len(asked)
    if request.operation == "all_gather":
        first, second, last = columns[0]
        return [[first, *[second] * (world_size - 2), last]] * len(asked)
    return [[]] * len(asked)


def _reduced(column: Sequence[Array], kind: str, world_size: int) -> Array:
    first, second, last = column
    if kind == "MAX":
        return np.maximum(np.maximum(first, second), last)
    if kind == "MIN":
        return np.minimum(np.minimum(first, second), last)
    with np.errstate(over="ignore", invalid="ignore"):
        total: Array = first + second * np.asarray(world_size - 2, second.dtype) + last
        return total / np.asarray(world_size, total.dtype) if kind == "AVG" else total
