"""Node time that jobs used: of profile jobs from their notes, of a training from its events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import format_duration, format_number, format_percent, plural
from tula_hpc.records import Event, JobNote, Measurement, RunHistory, TrainResult, is_usable


class JobRun(NamedTuple):
    """One run of a profile job, with times in Unix seconds; a requeued job has several runs."""

    # allocated nodes
    nodes: int
    waited_from: float
    began_at: float
    # when all workers had met, or `ended_at` for a run that ended before
    ready_at: float
    ended_at: float
    job_id: str = ""

    @property
    def node_seconds(self) -> float:
        """Node-seconds of the allocation."""
        return self.nodes * (self.ended_at - self.began_at)

    @property
    def startup_s(self) -> float:
        """Seconds until all workers had met: interpreter, torch, rendezvous."""
        return self.ready_at - self.began_at


def job_runs(
    notes: Sequence[JobNote],
    measurements: Iterable[Measurement] = (),
    cluster: ClusterSpec | None = None,
) -> list[JobRun]:
    """Return the runs of all jobs from their notes, job by job in the order of writing.

    Measurements give the end of a job that was killed before it could write a note. The cluster
    gives the jobs' time limit: a run that seems longer is cut, since its clock must have been set.
    """
    parts = cluster.parts() if cluster else ()
    limit_s = max((60.0 * part.profile_minutes for part in parts), default=math.inf)
    jobs: dict[tuple[str, float], list[list[JobNote]]] = {}
    for run_notes in _split(notes):
        jobs.setdefault((run_notes[0].job_id, run_notes[0].submitted_at), []).append(run_notes)
    recorded: dict[str, list[float]] = {}
    for row in measurements:
        recorded.setdefault(row.job_id, []).append(row.finished_at)
    found: list[JobRun] = []
    for (job_id, _), job in jobs.items():
        found += _runs(job, recorded.get(job_id, []), limit_s)
    return found


def _runs(
    job: Sequence[Sequence[JobNote]], recorded_at: Sequence[float], limit_s: float
) -> Iterator[JobRun]:
    """Yield the runs of one job; after a requeue it waits from the end of the previous run."""
    waited_from = job[0][0].submitted_at
    for notes, following in zip_longest(job, job[1:]):
        until = following[0].time if following else math.inf
        run = _job_run(notes, waited_from, [at for at in recorded_at if at < until], limit_s)
        waited_from = run.ended_at
        yield run


def _split(notes: Iterable[JobNote]) -> Iterator[list[JobNote]]:
    """Yield the notes of each run; a run's first note is "began"."""
    of_run: list[JobNote] = []
    for note in notes:
        if note.note == "began" and of_run:
            yield of_run
            of_run = []
        of_run.append(note)
    if of_run:
        yield of_run


def _job_run(
    notes: Sequence[JobNote], waited_from: float, recorded_at: Iterable[float], limit_s: float
) -> JobRun:
    first, last = notes[0], notes[-1]
    began_at = first.began_at or first.time
    ended_at = max(last.time, began_at)
    if last.note != "ended":
        ended_at = max([ended_at, *recorded_at])
    ended_at = min(ended_at, began_at + limit_s)
    ready_at = next((note.time for note in notes if note.note == "ready"), ended_at)
    ready_at = min(max(ready_at, began_at), ended_at)
    waited_from = min(waited_from or began_at, began_at)
    return JobRun(first.allocated_nodes, waited_from, began_at, ready_at, ended_at, first.job_id)


def only_waiting_s(runs: Sequence[JobRun]) -> float:
    """Return the seconds in which jobs waited and none ran."""
    # tasks of an array wait for each other, which is no queueing
    waiting = [(run.waited_from, run.began_at) for run in runs]
    running = [(run.began_at, run.ended_at) for run in runs]
    return length_of_union([*waiting, *running]) - length_of_union(running)


def length_of_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length that intervals cover, overlaps counted once."""
    total = 0.0
    reached = -math.inf
    for low, high in sorted(intervals):
        total += max(0.0, high - max(low, reached))
        reached = max(reached, high)
    return total


def describe_profiling(runs: Sequence[JobRun], measurements: Iterable[Measurement]) -> str:
    """Return the cost of profile jobs, by their own clocks, in one sentence; "" without notes."""
    if not runs:
        return ""
    node_seconds = sum(run.node_seconds for run in runs)
    startup = sum(run.nodes * run.startup_s for run in runs)
    starting = format_percent(startup / max(node_seconds, 1e-9))
    waited_s = only_waiting_s(runs)
    waiting = format_duration(waited_s) if waited_s >= 0.5 else "no time"
    profiles = [row for row in measurements if row.stage == "profile" and is_usable(row)]
    measured = {(row.partition, row.configuration) for row in profiles}
    jobs = {run.job_id for run in runs}
    return (
        f"{plural(len(measured), 'configuration')} in {plural(len(jobs), 'job')}: "
        f"{format_number(node_seconds, 3)} node-seconds ({starting} of them starting up), "
        f"and {waiting} waiting for nodes"
    )


class Use(NamedTuple):
    """Recorded use of nodes by a training."""

    node_seconds: float
    # runs of the training's jobs, requeued ones included
    runs: int
    # runs that were killed without an event; their time is not in node_seconds
    unknown_runs: int
    # runs counted from their first event, as no event says when the job was given nodes
    without_start: int = 0


def actual_use(events: Iterable[Event], result: TrainResult) -> Use:
    """Add up the node-seconds of a finished training over all its runs, without queueing.

    A run lasts from its event "resumed" (the first run: from the beginning that the result gives)
    to its last event ("preempted", "requeued", "finished", …). If one of its events says when the
    job began, the run is counted from there; else the start of Python is not included.
    """
    signs = RunHistory(events).signs()
    end = max((sign.time for sign in signs if sign.kind == "finished"), default=None)
    begin = None if end is None else end - result.wall_time_s
    seconds = 0.0
    runs = 1
    unknown_runs = 0
    without_start = 0
    # when the run's job began, by the event of its first work
    began_at: float | None = None
    for sign in signs:
        if sign.kind == "resumed" and sign.time > (begin or 0.0):
            runs += 1
            unknown_runs += begin is not None
            begin = sign.time
            began_at = sign.began_at
        elif sign.kind in ("stopped", "finished") and begin is not None:
            # the end of a failed job is noted by the waiting command, which knows no `began_at`
            began_at = sign.began_at or began_at
            if sign.time < begin:
                # this job failed before the one in which the result's first run began
                runs += 1
                unknown_runs += began_at is None
                seconds += sign.time - (began_at or sign.time)
                began_at = None
                continue
            seconds += sign.time - (began_at or begin)
            without_start += began_at is None
            begin = began_at = None
    return Use(seconds * result.nodes, runs, unknown_runs, without_start)
