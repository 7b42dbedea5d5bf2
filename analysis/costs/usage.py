"""The runs of profile jobs, from the notes that they leave, by their own clock: when they waited, began, and ended.

What a time limit adds to a training that is longer, and what a training really used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records import Event, JobNote, Measurement, RunHistory, TrainResult


class JobRun(NamedTuple):
    """One run of a profile job, on a clock of Unix seconds; a requeued job has several."""

    # of the allocation
    nodes: int
    waited_from: float
    began_at: float
    # when all workers had met; the end for a run that did not come so far
    ready_at: float
    ended_at: float
    job_id: str = ""

    @property
    def node_seconds(self) -> float:
        """Nodes × seconds of the allocation."""
        return self.nodes * (self.ended_at - self.began_at)

    @property
    def startup_s(self) -> float:
        """Seconds from the start of the allocation until all workers had met: interpreter, torch, rendezvous."""
        return self.ready_at - self.began_at


def job_runs(
    notes: Sequence[JobNote], measurements: Iterable[Measurement] = (), *, limit_s: float = math.inf
) -> list[JobRun]:
    """The runs that the notes tell of.

    Args: notes: In the order in which they were written, job after job. measurements: Tell how long
        a job lived that was killed without a word: the record that says so has the time. limit_s:
        The jobs' time limit: one that seems to have run for longer did so by a clock that was set
        meanwhile.
    """
    jobs: dict[tuple[str, float], list[list[JobNote]]] = {}
    for told in _split(notes):
        jobs.setdefault((told[0].job_id, told[0].submitted_at), []).append(told)
    recorded: dict[str, list[float]] = {}
    for row in measurements:
        recorded.setdefault(row.job_id, []).append(row.finished_at)
    return [
        run
        for (job_id, _), runs in jobs.items()
        for run in _runs(runs, recorded.get(job_id, []), limit_s)
    ]


def _runs(
    job: Sequence[Sequence[JobNote]], recorded_at: Sequence[float], limit_s: float
) -> Iterator[JobRun]:
    """The runs of one job: a requeued one waits from the end of the run before."""
    waited_from = job[0][0].submitted_at
    for told, after in zip_longest(job, job[1:]):
        until = after[0].time if after else math.inf
        run = _job_run(told, waited_from, [at for at in recorded_at if at < until], limit_s)
        waited_from = run.ended_at
        yield run


def _split(notes: Iterable[JobNote]) -> Iterator[list[JobNote]]:
    """The notes of each run; a run's first note is "began"."""
    told: list[JobNote] = []
    for note in notes:
        if note.note == "began" and told:
            yield told
            told = []
        told.append(note)
    if told:
        yield told


def _job_run(
    told: Sequence[JobNote], waited_from: float, recorded_at: Iterable[float], limit_s: float
) -> JobRun:
    first, last = told[0], told[-1]
    began_at = first.began_at or first.time
    ended_at = max(last.time, began_at)
    if last.note != "ended":
        ended_at = max([ended_at, *recorded_at])
    ended_at = min(ended_at, began_at + limit_s)
    ready_at = next((note.time for note in told if note.note == "ready"), ended_at)
    ready_at = min(max(ready_at, began_at), ended_at)
    waited_from = min(waited_from or began_at, began_at)
    return JobRun(first.allocated_nodes, waited_from, began_at, ready_at, ended_at, first.job_id)


def only_waiting_s(runs: Sequence[JobRun]) -> float:
    """Seconds in which a job waited and none ran: tasks of an array wait for each other, which is no queue."""
    waiting = [(run.waited_from, run.began_at) for run in runs]
    running = [(run.began_at, run.ended_at) for run in runs]
    return _length([*waiting, *running]) - _length(running)


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, reached))
        reached = max(reached, high)
    return total


Array = NDArray[np.float64]


class Use(NamedTuple):
    """What a training used, as far as its records tell."""

    node_seconds: float
    # of the job, requeued ones included
    runs: int
    # killed without a word: not in node_seconds
    unknown_runs: int


def actual_use(events: Iterable[Event], result: TrainResult) -> Use:
    """Node-seconds of a finished training over all its runs, without waiting in the queue.

    A run lasts from its first sign ("started", "resumed"; for the first run the beginning that the
    result knows) to its last ("preempted", "requeued", "finished", …). What comes before the first
    sign, the start of Python, is not seen.

    Args:
        events: Of the run directory.
        result: Of the training.
    """
    signs = RunHistory(events).signs()
    end = max((sign.time for sign in signs if sign.kind == "finished"), default=None)
    begin = None if end is None else end - result.wall_time_s
    seconds, runs, unknown = 0.0, 1, 0
    for sign in signs:
        begins = sign.kind == "resumed" or (sign.kind == "started" and runs > 1)
        if begins and sign.time > (begin or 0.0):
            runs, unknown = runs + 1, unknown + (begin is not None)
            begin = sign.time
        elif sign.kind in ("stopped", "finished") and begin is not None:
            seconds, begin = seconds + sign.time - begin, None
    return Use(seconds * result.nodes, runs, unknown)
