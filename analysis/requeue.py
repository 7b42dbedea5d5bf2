"""What a time limit adds to a training that is longer, and what a training really used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records import Event, TrainResult

Array = NDArray[np.float64]

BEGINS = ("started", "resumed")
ENDS = ("preempted", "requeued", "finished", "failed", "oom")


class Requeued(NamedTuple):
    """Expected time of a training under a time limit, and how often it is requeued."""

    time_s: Array  # infinite where a limit leaves no time for work
    requeues: Array


def under_time_limit(work_s: Array, limit_s: float, interval_s: Array, restart_s: float) -> Requeued:
    """Expected seconds of a training whose job ends at the warning before every time limit and is requeued.

    The first job takes R to start. Each requeue repeats that, and the work since the last checkpoint, on average half
    an interval τ:

        requeues k = ⌈(T + R − L) / (L − R − τ/2)⌉ for T + R > L, else 0;    time = T + R + k (R + τ/2)

    Where the warning comes through, training saves before it ends, and the half interval is not repeated.

    Args:
        work_s: T, seconds without interruption, checkpoints included.
        limit_s: L, from the start of a job to that warning: its time limit less `signal_delay_s`.
        interval_s: τ, seconds between two checkpoints.
        restart_s: R, seconds from the start of a job to its first step.
    """
    repeated = restart_s + interval_s / 2.0
    usable = limit_s - repeated
    needed_s = work_s + restart_s
    beyond = np.maximum(needed_s - limit_s, 0.0)
    possible = (usable > 0.0) | (beyond == 0.0)
    requeues = np.where(possible, np.ceil(beyond / np.where(usable > 0.0, usable, 1.0)), np.inf)
    return Requeued(needed_s + np.where(requeues > 0.0, requeues * repeated, 0.0), requeues)


class Use(NamedTuple):
    """What a training used, as far as its records tell."""

    node_seconds: float
    runs: int  # of the job, requeued ones included
    unknown_runs: int  # killed without a word: not in node_seconds


def actual_use(events: Iterable[Event], result: TrainResult) -> Use:
    """Node-seconds of a finished training over all its runs, without waiting in the queue.

    A run lasts from its first sign ("started", "resumed"; for the first run the beginning that the result knows) to its
    last ("preempted", "requeued", "finished", …). What comes before the first sign, the start of Python, is not seen.

    Args:
        events: Of the run directory.
        result: Of the training.
    """
    train = sorted((event for event in events if event.stage == "train"), key=lambda event: event.time)
    end = max((event.time for event in train if event.event == "finished"), default=None)
    begin = None if end is None else end - result.wall_time_s
    seconds, runs, unknown = 0.0, 1, 0
    for event in train:
        if event.event in BEGINS and event.time > (begin or 0.0) and (runs > 1 or event.event == "resumed"):
            runs, unknown = runs + 1, unknown + (begin is not None)
            begin = event.time
        elif event.event in ENDS and begin is not None:
            seconds, begin = seconds + event.time - begin, None
    return Use(seconds * result.nodes, runs, unknown)
