"""Times the parts of a training step in mid-training, without a trace, to tell which of them has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from tula_hpc.memory_errors import out_of_memory
from tula_hpc.nested import Batch, split
from tula_hpc.profiler import bare_all_reduce
from tula_hpc.records import StepParts
from tula_hpc.timing import agreed_s, round_s
from tula_hpc.worker import Worker

BLOCKS = 5  # the median over blocks sheds a pause
BLOCK_S = 0.2  # a processor that is shared is had in turns of some milliseconds: within a block they even out
SECONDS = 5.0  # for each part, about; a preempted job may have only some seconds, and waits for a probe to end


class Extent(NamedTuple):
    """How much is timed: so many blocks of so many passes."""

    blocks: int
    passes: int


def extent_of(pass_s: float) -> Extent:
    """Short passes come in larger numbers, as training's own step times are means over many; long ones in fewer blocks.

    Args:
        pass_s: Of one pass, about.
    """
    passes = max(1, math.ceil(BLOCK_S / max(pass_s, 1e-3)))
    return Extent(max(1, min(BLOCKS, int(SECONDS / max(pass_s, BLOCK_S)))), passes)


class Probe(NamedTuple):
    """What was found."""

    parts: StepParts  # without the wait for the loader
    slowest_rank: int | None  # in computing, where workers differ; None for one worker or where it is not known


def probe_parts(worker: Worker, inputs: Batch, targets: Batch) -> Probe:
    """Time some forward and backward passes without synchronization, and some bare all-reduces. Collective.

    Weights, gradients, buffers and random numbers are afterwards what they were: gradients are taken beside `.grad`,
    see `Worker.local_gradient`, and what is all-reduced is a tensor of its own. Where memory does not suffice for that,
    the part stays unknown.

    Args:
        worker: Whose model to use.
        inputs: A batch of the size that is trained with.
        targets: Its targets.
    """
    by_rank = _by_rank(worker, _compute_s(worker, inputs, targets))
    compute_s = None if min(by_rank) < 0 else max(by_rank)
    slowest = by_rank.index(max(by_rank)) if compute_s is not None and len(by_rank) > 1 else None
    parts = StepParts(compute_time_s=compute_s, allreduce_time_s=_all_reduce_s(worker))
    return Probe(parts, slowest)


def _compute_s(worker: Worker, inputs: Batch, targets: Batch) -> float:
    """Seconds of a pass, in as many parts as a step takes it; −1 where memory ran out on any worker.

    All take as many passes: a model may exchange something in its forward pass, as SyncBatchNorm does.
    """
    parts = split((inputs, targets), worker.parts)

    def compute() -> None:
        for part in parts:
            worker.local_gradient(*part)

    try:
        compute()
        fits = True
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
        fits = False
    # whoever went on alone would wait for ever
    (missing,) = worker.agree(float(not fits))
    return -1.0 if missing else _pass_s(worker, compute)


def _all_reduce_s(worker: Worker) -> float | None:
    """Seconds of a bare all-reduce, the slowest worker's; None where memory ran out on any worker."""
    if worker.env.world_size == 1:
        return 0.0
    step = None
    try:
        step = bare_all_reduce(worker)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
    (missing,) = worker.agree(float(step is None))  # whoever went on alone would wait for ever
    if missing or step is None:
        return None
    step()
    (slowest_s,) = worker.agree(_pass_s(worker, step))
    return slowest_s


def _pass_s(worker: Worker, step: Callable[[], object]) -> float:
    """Seconds of one pass: the median over blocks of their means. Collective: all workers take as many passes.

    Args:
        worker: Whose device is waited for.
        step: A pass; one has been taken, as the first may have something to set up.
    """
    extent = extent_of(agreed_s(worker, step))
    return median(round_s(worker, step, extent.passes) for _ in range(extent.blocks))


def _by_rank(worker: Worker, mine: float) -> list[float]:
    """Every worker's value, in order of rank."""
    values = [0.0] * worker.env.world_size
    values[worker.env.rank] = mine
    return worker.total(*values)
