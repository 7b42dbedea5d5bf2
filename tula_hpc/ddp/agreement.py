"""Let all workers agree, at the same step, to stop or to save, and on whether memory suffices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeVar

import torch

from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.process_memory import out_of_memory


class Agreeing(Protocol):
    """Interface of a worker for agreeing with the other workers and for timing."""

    @property
    def device(self) -> torch.device:
        """Return the device that the training uses."""

    def agree(self, *values: float) -> list[float]:
        """Return the largest of each value over all workers. Collective."""

    def synchronize_device(self) -> None:
        """Wait for the device."""


# Seconds between agreements: a preempted job has at least some seconds of grace, and one small
# collective a second costs nothing.
CHECK_EVERY_S = 1.0
# number of first steps that each end with an agreement, until the step time is known
FIRST_CHECKS = 10
# largest factor by which the number of steps between two agreements may grow
GROWTH = 2
T = TypeVar("T")


def if_memory_suffices(worker: Agreeing, make: Callable[[], T]) -> T | None:
    """Return the result of `make`, or None on all workers if memory ran out on any. Collective."""
    made: T | None = None
    try:
        made = make()
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
    # a worker that continued alone would wait forever in its next collective
    (missing,) = worker.agree(float(made is None))
    return None if missing else made


class SaveRequest(IntEnum):
    """Save request of one worker at an agreement; the largest over all workers counts."""

    NOTHING = 0
    SAVE = 1
    # a checkpoint could not be saved
    FAIL = 2


class Stop(IntEnum):
    """Stop request of one worker at an agreement; the largest over all workers counts."""

    NONE = 0
    # not after this step, where a script may be about to save: agree again after the next step
    NEXT = 1
    NOW = 2


class Decision(NamedTuple):
    """Action of all workers after this step."""

    stop: bool
    save: bool
    # largest of each further value over the workers; empty if none was exchanged
    shared: tuple[float, ...] = ()
    # a checkpoint could not be saved
    failed: bool = False


GOES_ON = Decision(stop=False, save=False)


class Agreement:
    """Agreement of all workers, about every `every_s` seconds, to stop or save at the same step."""

    def __init__(
        self,
        worker: Agreeing,
        stop: StopRequest,
        to_save: Callable[[], SaveRequest] = lambda: SaveRequest.NOTHING,
        every_s: float = CHECK_EVERY_S,
    ) -> None:
        self.worker = worker
        self.stop = stop
        self.to_save = to_save
        self.every_s = every_s
        self.interval_steps = 1
        self.steps = 0
        # step and time from which steps are timed: the last agreement; at first the start
        self.agreed_steps = 0
        self.started = time.monotonic()

    def decide(
        self, values: Callable[[], tuple[float, ...]] = tuple, *, asks: bool = True
    ) -> Decision:
        """Decide after a step. Collective.

        `values` returns further numbers to exchange, the same count on every worker; it is called
        only at an agreement. If not `asks`, a stop request does not take effect after this step,
        and the workers agree again after the next.
        """
        self.steps += 1
        since = self.steps - self.agreed_steps
        if since < self.interval_steps:
            return GOES_ON
        now = time.monotonic()
        step_s = (now - self.started) / since
        asked = Stop.NONE
        if self.stop.received is not None:
            asked = Stop.NOW if asks else Stop.NEXT
        mine = (float(asked), float(self.to_save()), step_s, *values())
        stopping, saving, slowest_s, *shared = self.worker.agree(*mine)
        if self.steps >= FIRST_CHECKS:
            # later steps may take longer, above all if only a few were timed
            most = GROWTH * since
            self.interval_steps = max(1, min(most, int(self.every_s / max(slowest_s, 1e-6))))
            self.agreed_steps = self.steps
            self.started = now
        if stopping == Stop.NEXT:
            self.interval_steps = 1
        stop = stopping == Stop.NOW
        save = stop or saving == SaveRequest.SAVE
        return Decision(stop, save, tuple(shared), failed=saving == SaveRequest.FAIL)


class EvaluationStopped(Exception):  # noqa: N818 # no error: the training has been asked to stop
    """Stop of all workers within an evaluation; only the sums of the evaluation are lost."""


def until_stopped(batches: Iterable[T], most: int, agreement: Agreement) -> Iterator[T]:
    """Yield this worker's batches of an evaluation until all workers agree to stop.

    Every worker agrees before each of its batches, and `most` times in all: as often as the worker
    with the most batches.

    Raises:
        EvaluationStopped: On every worker.
    """
    mine = iter(batches)
    for _ in range(most):
        if agreement.decide().stop:
            raise EvaluationStopped
        yield from itertools.islice(mine, 1)
