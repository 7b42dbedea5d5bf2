"""A training's bill: its expected and actual time and cost, and the parts that were off.

Seconds are those of the training's jobs, from when the scheduler grants nodes until it has them
back. They come from the scheduler's accounting, if there is one (accounting.jsonl). Otherwise the
run's own records give them up to the last work of each job; the end of a job is then assumed to
take as long as planned, unless the notes show that it ended sooner. The price of a second is the
plan's, so that expected and actual cost differ only by the time.

A training times its own steps, evaluations and saves, and the start of each of its jobs. The rest
of the time in accounting is the end of the job; after interruptions it also holds work that was
lost, and counts as repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from tula_hpc.analysis.costs.evaluation import END_SHARE
from tula_hpc.analysis.costs.spread import TimePart
from tula_hpc.analysis.costs.usage import actual_use
from tula_hpc.formatting import FOREVER_S
from tula_hpc.records import Candidate, EpochMetrics, Event, JobAccount, RunHistory, TrainResult

# a part is mentioned if it is off by at least this share of the expected whole time
NOTEWORTHY_SHARE = 0.05
# Accounting is believed if it has at least this share of the time that the training recorded. It
# may have a little less, as it counts whole seconds and parts are timed on one worker.
LEAST_SHARE = 0.8


class PromiseVerdict(StrEnum):
    """Place of a measured value relative to the 90 % interval of the expected value."""

    WITHIN = "within"
    MORE = "more"
    LESS = "less"
    UNKNOWN = "unknown"


class Source(StrEnum):
    """Origin of a whole time and its cost."""

    ACCOUNTING = "accounting"
    NOTES = "notes"


class Compared(NamedTuple):
    """A quantity's expected and actual value."""

    expected: float
    # 90 % interval; None if the plan has none
    interval: tuple[float, float] | None
    # None: unknown
    actual: float | None

    @property
    def verdict(self) -> PromiseVerdict:
        """Return where the actual value lies relative to the interval."""
        if self.actual is None or self.interval is None:
            return PromiseVerdict.UNKNOWN
        low, high = self.interval
        if self.actual > high:
            return PromiseVerdict.MORE
        return PromiseVerdict.LESS if self.actual < low else PromiseVerdict.WITHIN

    @property
    def excess(self) -> float:
        """Return actual minus expected; 0 if the actual value is unknown."""
        return 0.0 if self.actual is None else self.actual - self.expected


class TrainingBill(NamedTuple):
    """Expected and actual time and cost of a training that ended."""

    # seconds
    whole: Compared
    # seconds
    parts: Mapping[TimePart, Compared]
    # in `currency`
    cost: Compared
    currency: str
    source: Source
    # number of job starts in the part `STARTS`
    starts: int
    # runs that were killed without a note; their time is missing in all numbers here
    unknown_runs: int
    # actual
    node_seconds: float

    def parts_off(self) -> list[TimePart]:
        """Return the parts outside their intervals that matter to the whole, the largest first."""
        off = []
        for part, seconds in self.parts.items():
            outside = seconds.verdict in (PromiseVerdict.MORE, PromiseVerdict.LESS)
            if outside and self.has_felt(part):
                off.append(part)
        return sorted(off, key=lambda part: -abs(self.parts[part].excess))

    def has_felt(self, part: TimePart) -> bool:
        """Return whether a part changed the whole time by a noteworthy share."""
        return abs(self.parts[part].excess) >= NOTEWORTHY_SHARE * self.whole.expected

    def most_of_it(self) -> TimePart | None:
        """Return the part that moved the whole time most; None if that time is in its interval."""
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
    """Compare a training with its plan; None if the plan expected that it never ends.

    The events are of this training alone. `accounts` holds every run of its jobs, or nothing if
    accounting has no complete record. `epochs` supplies the evaluation time if the result has none.
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
        starts=repeating + 1,
        unknown_runs=used.unknown_runs,
        node_seconds=used.node_seconds,
    )


class _Used(NamedTuple):
    seconds: float
    node_seconds: float
    source: Source
    unknown_runs: int = 0


def _used(result: TrainResult, events: Sequence[Event], accounts: Sequence[JobAccount]) -> _Used:
    seconds = sum(account.elapsed_s for account in accounts)
    # if a node failed, Slurm may record less time than the training worked
    evaluation_s = result.evaluation_s or 0.0
    done_s = result.train_time_s + result.starts_s + evaluation_s + result.saving_s
    if seconds > 0.0 and seconds >= LEAST_SHARE * done_s:
        node_seconds = sum(account.node_seconds for account in accounts)
        return _Used(seconds, node_seconds, Source.ACCOUNTING)
    use = actual_use(events, result)
    work_s = use.node_seconds / result.nodes
    without_start = use.without_start / use.runs
    if work_s <= 0.0:
        # the events are lost; the wall time is all work, unless restarts waited in the queue
        work_s = result.wall_time_s
        without_start = 1.0
    end_s = END_SHARE * result.starts_s
    noted_s = RunHistory(events).seconds_to_end()
    if noted_s is not None:
        end_s = min(end_s, noted_s)
    seconds = work_s + end_s + without_start * result.starts_s
    return _Used(seconds, seconds * result.nodes, Source.NOTES, use.unknown_runs)


def _failed_s(result: TrainResult, history: RunHistory, accounts: Sequence[JobAccount]) -> float:
    """Return the seconds of all runs before the last run that began from the start.

    If a job has left events of fewer runs than it had, nothing says which of its runs they belong
    to, except for the very last run.
    """
    if not result.restarts:
        return sum(account.elapsed_s for account in accounts[:-1])
    runs = Counter(account.job_id for account in accounts)
    begun = {job: history.job(job).begun_with_nothing for job in runs}
    so_far_s = sum(account.elapsed_s for account in accounts)
    # from the last run back, as the first runs of a requeued job may have left no event
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
    # failed_s may be too much, since nothing says which runs left no events
    found[TimePart.FAILED] = failed_s = min(failed_s, rest_s)
    rest_s -= failed_s
    if repeating > 0:
        found[TimePart.REPEATED] = max(0.0, rest_s - END_SHARE * result.starts_s)
    else:
        found[TimePart.REPEATED] = 0.0
        # the run's own records end with the last work and say nothing about the end of the job
        if used.source is Source.ACCOUNTING:
            found[TimePart.ENDS] = rest_s
    return found


def _parts(
    promised: Candidate, actual_s: Mapping[TimePart, float | None]
) -> dict[TimePart, Compared]:
    """Return the parts that were expected or occurred, in the order of `TimePart`."""
    intervals = {str(TimePart.FAILED): (0.0, 0.0), **promised.part_intervals_90}
    if "train_time_s" in promised.interval_90:
        intervals.setdefault(TimePart.STEPS, promised.interval_90["train_time_s"])
    # an old plan has no parts
    promised_s = promised.wall_parts_s or {TimePart.STEPS: promised.train_time_s}
    found = {}
    for part in TimePart:
        expected_s = promised_s.get(part, 0.0)
        if expected_s > 0.0 or (actual_s[part] or 0.0) > 0.0:
            found[part] = Compared(expected_s, intervals.get(part), actual_s[part])
    return found
