"""A study's table: accuracy by method and batch over the seeds, against plain training and a small batch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from tula_hpc.analysis.study_data import Outcome
from tula_hpc.config import REFERENCE_COLUMN, StudySpec

LEAST_LOSS = 0.01  # accuracy that the large batch must have lost before a share of it says anything
PLAIN_LOSS = 0.02  # a loss that says something however few the test samples are

Mark = Literal["best", "worst", ""]


class Spread(NamedTuple):
    """Accuracy over seeds, as a share of 1."""

    mean: float
    deviation: float | None  # sample standard deviation, n − 1 in the denominator; None for one seed
    runs: int


class Entry(NamedTuple):
    """A method (or variant) at one batch. Runs that diverged or failed have no accuracy: they are counted instead."""

    column: str
    batch: int
    test: Spread | None  # of the runs that finished; None if none did
    train: Spread | None
    diverged: int
    failed: int
    missing: int
    recovered: float | None = None  # share of what plain training lost against the small batch, see `recovered_share`
    mark: Mark = ""

    @property
    def settled(self) -> bool:
        """Whether there is anything to compare."""
        return self.test is not None or self.diverged > 0


class StudyTable(NamedTuple):
    """All entries, and the small batch that they are held against."""

    columns: tuple[str, ...]
    batches: tuple[int, ...]  # ascending
    reference: Entry | None
    entries: dict[tuple[str, int], Entry]
    test_samples: int | None = None

    def row(self, batch: int) -> list[Entry]:
        """The entries of one batch, in the order of the columns."""
        return [self.entries[column, batch] for column in self.columns]

    def leaders(self, batch: int) -> list[Entry]:
        """The method of highest mean test accuracy at a batch; several where they are equal, none where all are."""
        return [entry for entry in self.row(batch) if entry.mark == "best"]

    def best(self, batch: int) -> Entry | None:
        """The first of these."""
        return next(iter(self.leaders(batch)), None)

    def number_of(self, status: Literal["diverged", "failed", "missing"]) -> int:
        """How many runs of the whole study ended so."""
        entries = {(entry.column, entry.batch): entry for entry in (*self.entries.values(), *self._references())}
        return sum(getattr(entry, status) for entry in entries.values())

    def _references(self) -> tuple[Entry, ...]:
        return () if self.reference is None else (self.reference,)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and deviation; None of nothing."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def make_table(study: StudySpec, outcomes: Iterable[Outcome], test_samples: int | None = None) -> StudyTable:
    """Aggregate the outcomes over seeds, mark the best and the worst at each batch.

    Args:
        study: What was to be trained.
        outcomes: How that ended.
        test_samples: Size of the test set, where it is known; see `least_loss`.
    """
    grouped: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((outcome.cell.column, outcome.cell.batch), []).append(outcome)
    plain = {place: _entry(*place, group) for place, group in grouped.items()}
    reference = plain.get((REFERENCE_COLUMN, study.small_batch)) if study.small_batch else None
    entries: dict[tuple[str, int], Entry] = {}
    batches = tuple(sorted(study.batches))
    for batch in batches:
        row = [plain.get((column, batch)) or _entry(column, batch, []) for column in study.columns]
        marks = marks_of(row)
        for entry in row:
            recovered = recovered_share(entry, plain.get((REFERENCE_COLUMN, batch)), reference, test_samples)
            entries[entry.column, batch] = entry._replace(recovered=recovered, mark=marks.get(entry.column, ""))
    return StudyTable(study.columns, batches, reference, entries, test_samples)


def _entry(column: str, batch: int, outcomes: Sequence[Outcome]) -> Entry:
    ended = Counter(outcome.status for outcome in outcomes)
    test = spread([outcome.test for outcome in outcomes if outcome.test is not None])
    train = spread([outcome.train for outcome in outcomes if outcome.train is not None])
    return Entry(column, batch, test, train, ended["diverged"], ended["failed"], ended["missing"])


def marks_of(row: Sequence[Entry]) -> Mapping[str, Mark]:
    """Best and worst of one batch, by column; equals alike, and none where all are equal.

    Here a run that diverged counts as an accuracy of 0, and a method of which any did is never the best.
    """
    levels = {entry.column: _level(entry) for entry in row if entry.settled}
    lowest = min(levels.values(), default=0.0)
    if all(level == lowest for level in levels.values()):
        return {}
    whole = {entry.column: levels[entry.column] for entry in row if entry.settled and not entry.diverged}
    highest = max(whole.values(), default=lowest)
    marks: dict[str, Mark] = {column: "best" for column, level in whole.items() if level == highest}
    return marks | {column: "worst" for column, level in levels.items() if level == lowest}


def _level(entry: Entry) -> float:
    if entry.test is None:
        return 0.0
    return entry.test.mean * entry.test.runs / (entry.test.runs + entry.diverged)


def recovered_share(
    entry: Entry, plain: Entry | None, small: Entry | None, test_samples: int | None = None
) -> float | None:
    """(method − lbt) / (small batch − lbt), of mean test accuracies at the same batch.

    0 is no better than plain large-batch training, 1 as good as the small batch. None where one of the three is
    unknown, where a run of one of them diverged, as the mean of those that are left would hide it, or where plain
    training lost less than `least_loss`.
    """
    if plain is None or small is None or entry.test is None or plain.test is None or small.test is None:
        return None
    if entry.diverged or plain.diverged or small.diverged:
        return None
    lost = small.test.mean - plain.test.mean
    least = least_loss(small.test, plain.test, test_samples)
    return (entry.test.mean - plain.test.mean) / lost if lost >= least else None


def least_loss(small: Spread, plain: Spread, test_samples: int | None) -> float:
    """What the large batch must have lost before a share of it says anything.

    The standard error of the difference by counting, `sqrt(Σ p(1 − p) / (n · runs))` for n test samples, where that is
    known and lies between `LEAST_LOSS` and `PLAIN_LOSS`.
    """
    if test_samples is None:
        return LEAST_LOSS
    variance = sum(s.mean * (1 - s.mean) / (test_samples * s.runs) for s in (small, plain))
    return min(PLAIN_LOSS, max(LEAST_LOSS, math.sqrt(max(0.0, variance))))


def within_one_deviation(entry: Entry, best: Entry) -> bool:
    """Whether a method's mean is at most the best's standard deviation over seeds below the best's mean."""
    if entry.test is None or best.test is None or entry.diverged:
        return False
    return best.test.mean - entry.test.mean <= (best.test.deviation or 0.0)
