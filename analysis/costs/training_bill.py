"""A training's promise and its bill: expected and actual time, and the part that was off.

Seconds are those of the training's jobs, from when the scheduler gave them nodes to when it had
them back, without queueing. The scheduler's accounting tells them, where there is one
(accounting.jsonl). The run's own notes tell them up to the last work of each job; how long a job
takes to end is then taken as planned, unless its end was noted sooner. The price of a second is the
plan's, so that a bill differs from its promise by the time alone.

The steps, evaluations and saves of a training are timed by itself, and the start of each of its
jobs. The rest of the time in accounting is the end of the job; after interruptions it is the work
that was lost with them, too, and counts as repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from tula_hpc.analysis.costs.evaluation import END_SHARE
from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.costs.usage import actual_use
from tula_hpc.formatting import FOREVER_S
from tula_hpc.records import Candidate, EpochMetrics, Event, JobAccount, RunHistory, TrainResult

# of the whole time as expected: a part that differs by less moves nobody's plans
NOTEWORTHY_SHARE = 0.05
# accounting counts in whole seconds, and parts are timed on one worker
LEAST_SHARE = 0.8


class PromiseVerdict(StrEnum):
    """Place of a measured value against the 90 % interval of the expected one."""

    WITHIN = "within"
    MORE = "more"
    LESS = "less"
    UNKNOWN = "unknown"


class Source(StrEnum):
    """Origin of a whole time and its cost."""

    ACCOUNTING = "accounting"
    NOTES = "notes"


class Compared(NamedTuple):
    """A quantity as it was expected and as it came."""

    expected: float
    # at 90 %; None where the plan has none
    interval: tuple[float, float] | None
    # None: not known
    actual: float | None

    @property
    def verdict(self) -> PromiseVerdict:
        """Return where the actual value lies."""
        if self.actual is None or self.interval is None:
            return PromiseVerdict.UNKNOWN
        low, high = self.interval
        if self.actual > high:
            return PromiseVerdict.MORE
        return PromiseVerdict.LESS if self.actual < low else PromiseVerdict.WITHIN

    @property
    def excess(self) -> float:
        """Return actual less expected; 0 where the former is not known."""
        return 0.0 if self.actual is None else self.actual - self.expected


class TrainingBill(NamedTuple):
    """Expected against actual, of a training that ended."""

    # seconds
    whole: Compared
    parts: Mapping[TimePart, Compared]
    # in the currency
    cost: Compared
    currency: str
    source: Source
    # of the job, restarts included
    runs: int
    # of them killed without a note, and in no figure here
    unknown_runs: int

    def parts_off(self) -> list[TimePart]:
        """Return the parts outside their intervals that matter to the whole, the largest first."""
        off = []
        for part, seconds in self.parts.items():
            outside = seconds.verdict in (PromiseVerdict.MORE, PromiseVerdict.LESS)
            if outside and self.has_felt(part):
                off.append(part)
        return sorted(off, key=lambda part: -abs(self.parts[part].excess))

    def has_felt(self, part: TimePart) -> bool:
        """Return whether a part made a noteworthy difference to the whole."""
        return abs(self.parts[part].excess) >= NOTEWORTHY_SHARE * self.whole.expected

    def most_of_it(self) -> TimePart | None:
        """Return the part that moved the whole most, where that is outside of its interval."""
        if self.whole.verdict not in (PromiseVerdict.MORE, PromiseVerdict.LESS) or not self.parts:
            return None
        way = 1.0 if self.whole.verdict is PromiseVerdict.MORE else -1.0
        return max(self.parts, key=lambda part: way * self.parts[part].excess)


def training_bill(
    promised: Candidate,
    result: TrainResult,
    events: Sequence[Event],
    accounts: Sequence[JobAccount] = (),
    epochs: Sequence[EpochMetrics] = (),
) -> TrainingBill | None:
    """Compare a training with its plan; None for a plan without an end.

    The events are of this training alone. `accounts` are every run of its jobs, none where
    accounting does not tell; `epochs` have the evaluations of results that do not tell them.
    """
    whole_s = promised.wall_time_s
    if not 0.0 < whole_s < FOREVER_S:
        return None
    used = _used(result, events, accounts)
    price = promised.cost / (whole_s * promised.nodes)
    history = RunHistory(events)
    failed_s = 0.0
    if used.source is Source.ACCOUNTING:
        failed_s = _failed_s(result, history, accounts)
    repeating = result.restarts - history.begun_anew(result.label)
    parts = _parts(promised, _actual_parts_s(result, used, epochs, failed_s, repeating))
    return TrainingBill(
        whole=Compared(whole_s, promised.interval_90.get("wall_time_s"), used.seconds),
        parts=parts,
        cost=Compared(promised.cost, promised.interval_90.get("cost"), used.node_seconds * price),
        currency=promised.currency,
        source=used.source,
        runs=used.runs,
        unknown_runs=used.unknown_runs,
    )


class _Used(NamedTuple):
    seconds: float
    node_seconds: float
    source: Source
    runs: int
    unknown_runs: int = 0


def _used(result: TrainResult, events: Sequence[Event], accounts: Sequence[JobAccount]) -> _Used:
    seconds = sum(account.elapsed_s for account in accounts)
    # of a node that failed, Slurm may note less than was done
    evaluation_s = result.evaluation_s or 0.0
    done_s = result.train_time_s + result.starts_s + evaluation_s + result.saving_s
    if seconds > 0.0 and seconds >= LEAST_SHARE * done_s:
        node_seconds = sum(account.node_seconds for account in accounts)
        return _Used(seconds, node_seconds, Source.ACCOUNTING, len(accounts))
    use = actual_use(events, result)
    work_s = use.node_seconds / result.nodes
    without_start = use.without_start / use.runs
    if work_s <= 0.0:
        # events were lost; without restarts nothing but work lies between
        work_s = result.wall_time_s
        without_start = 1.0
    seconds = work_s + _end_s(result.starts_s, events) + without_start * result.starts_s
    return _Used(seconds, seconds * result.nodes, Source.NOTES, use.runs, use.unknown_runs)


def _end_s(starts_s: float, events: Iterable[Event]) -> float:
    """Return the seconds from a training's last work to its job's end: an estimate, or less."""
    noted_s = RunHistory(events).seconds_to_end()
    return min(END_SHARE * starts_s, math.inf if noted_s is None else noted_s)


def _failed_s(result: TrainResult, history: RunHistory, accounts: Sequence[JobAccount]) -> float:
    """Return the seconds of runs before the last one that began with nothing.

    Where a job has left events of fewer runs than it had, it is not known which ones they are, but
    for the last of all.
    """
    if not result.restarts:
        return sum(account.elapsed_s for account in accounts[:-1])
    runs = Counter(account.job_id for account in accounts)
    begun = {job: history.job(job).begun_with_nothing for job in runs}
    so_far_s = sum(account.elapsed_s for account in accounts)
    # from the last one back: the first runs of a requeued job may have left nothing
    for account in reversed(accounts):
        so_far_s -= account.elapsed_s
        left = begun[account.job_id]
        is_known = account is accounts[-1] or len(left) == runs[account.job_id]
        runs[account.job_id] -= 1
        if is_known and left and left.pop():
            return so_far_s
    return 0.0


def _actual_parts_s(
    result: TrainResult,
    used: _Used,
    epochs: Sequence[EpochMetrics],
    failed_s: float,
    repeating: int,
) -> dict[TimePart, float | None]:
    found: dict[TimePart, float | None] = {
        TimePart.STARTS: result.starts_s,
        TimePart.STEPS: result.train_time_s,
        TimePart.EVALUATION: result.evaluation_s,
        TimePart.CHECKPOINTS: result.saving_s,
        TimePart.REPEATED: None,
        TimePart.ENDS: None,
        TimePart.FAILED: failed_s,
    }
    timed_s = [row.evaluation_time_s for row in epochs if row.evaluation_time_s is not None]
    if result.evaluation_s is None and timed_s:
        found[TimePart.EVALUATION] = sum(timed_s)
    known_s = [found[part] for part in list(TimePart)[:4]]
    if None in known_s:
        return found
    rest_s = max(0.0, used.seconds - sum(seconds or 0.0 for seconds in known_s))
    # of a run that left no event it is not known which one it was
    found[TimePart.FAILED] = failed_s = min(failed_s, rest_s)
    rest_s -= failed_s
    if repeating > 0:
        found[TimePart.REPEATED] = max(0.0, rest_s - END_SHARE * result.starts_s)
    else:
        found[TimePart.REPEATED] = 0.0
        # notes end with the last work
        if used.source is Source.ACCOUNTING:
            found[TimePart.ENDS] = rest_s
    return found


def _parts(
    promised: Candidate, actual_s: Mapping[TimePart, float | None]
) -> dict[TimePart, Compared]:
    """Return the parts that were expected or came, in the order of `TimePart`."""
    intervals = {str(TimePart.FAILED): (0.0, 0.0), **promised.part_intervals_90}
    if "train_time_s" in promised.interval_90:
        intervals.setdefault(TimePart.STEPS, promised.interval_90["train_time_s"])
    found = {}
    for part in TimePart:
        expected_s = promised.wall_parts_s.get(part, 0.0)
        if expected_s > 0.0 or (actual_s[part] or 0.0) > 0.0:
            found[part] = Compared(expected_s, intervals.get(part), actual_s[part])
    return found
