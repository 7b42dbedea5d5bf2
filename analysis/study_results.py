"""What a study's run directory holds, read once: how each of its trainings ended, and what they logged.

A study's table: accuracy by method and batch over the seeds, against plain training and a small
batch.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tula_hpc.config import REFERENCE_COLUMN, StudyCell, StudySpec, SweepSpec, load_frozen_sweep
from tula_hpc.errors import RunDirectoryError
from tula_hpc.formatting import UNKNOWN
from tula_hpc.invocation import command_line
from tula_hpc.records import (
    EpochMetrics,
    Event,
    Metrics,
    RunDirectory,
    RunHistory,
    TrainResult,
    TunedRates,
    read_metrics,
)


class Outcome(NamedTuple):
    """How one training ended. Accuracies are shares of 1, of the study's metric, at the end of training."""

    cell: StudyCell
    # missing: it waits, runs, or was never submitted
    status: Literal["finished", "diverged", "failed", "missing"]
    # of those that finished
    test: float | None = None
    train: float | None = None
    why: str = ""


class StudyContents(NamedTuple):
    """What the files of a study say."""

    name: str
    sweep: SweepSpec
    study: StudySpec
    outcomes: list[Outcome]
    metrics: dict[StudyCell, Metrics]
    rates: TunedRates | None
    sweep_text: str
    events: list[Event]

    def of(self, column: str, batch: int) -> list[Metrics]:
        """What the trainings of a column at a batch logged, seed by seed: of those that finished.

        Before the first has: of those under way. One that began or failed must not cut the others
        short.
        """
        ended = [o for o in self.outcomes if (o.cell.column, o.cell.batch) == (column, batch)]
        finished = [o.cell for o in ended if o.status == "finished"]
        return [
            self.metrics[cell]
            for cell in finished or (o.cell for o in ended if o.status != "diverged")
        ]

    def accuracy(self, row: EpochMetrics) -> float:
        """Test accuracy after an epoch, in the metric of the study; NaN where there is none."""
        accuracy = row.test_top5_accuracy if self.study.metric == "top5" else row.test_accuracy
        return math.nan if accuracy is None else accuracy


def read_study(run: RunDirectory) -> StudyContents:
    """Read everything that is there.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no study.
        InputError: Its sweep.toml is damaged.
    """
    if not run.sweep_file.exists():
        raise RunDirectoryError("is not a run directory: it has no sweep.toml", source=run.root)
    # its data are where it ran, not necessarily here
    sweep = load_frozen_sweep(run.sweep_file)
    if sweep.study is None:
        raise RunDirectoryError(
            f"holds no study; use {command_line('report', str(run.root))}", source=run.root
        )
    events, cells = run.events(), sweep.study.cells()
    return StudyContents(
        name=sweep.name,
        sweep=sweep,
        study=sweep.study,
        outcomes=list(_outcomes(run, sweep.study, _failures(events))),
        metrics={cell: read_metrics(run.train(cell.label).metrics_file) for cell in cells},
        rates=_read_rates(run),
        sweep_text=run.sweep_file.read_text(encoding="utf-8", errors="replace"),
        events=events,
    )


def _failures(events: Iterable[Event]) -> dict[str, str]:
    """Describe the failure of each training that was not submitted again afterwards, by label."""
    return {
        label: f"{str(failure.kind or '').replace('_', ' ')}: {failure.detail}"
        for label, failure in RunHistory(events).last_failures().items()
    }


def _outcomes(run: RunDirectory, study: StudySpec, failures: dict[str, str]) -> Iterator[Outcome]:
    for cell in study.cells():
        result = _read_result(run, cell)
        if result is None:
            why = failures.get(cell.label, "")
            yield Outcome(cell, "failed" if why else "missing", why=why)
        elif result.diverged:
            yield Outcome(
                cell, "diverged", why=f"the loss was not finite after {result.steps:,} steps"
            )
        else:
            test, train = _accuracies(result, study)
            missing = (
                "no accuracy: none of such targets, or workload.metric was not finite"
                if test is None
                else ""
            )
            yield Outcome(cell, "failed" if missing else "finished", test, train, missing)


def _accuracies(result: TrainResult, study: StudySpec) -> tuple[float | None, float | None]:
    if study.metric == "top5":
        return result.test_top5_accuracy, result.train_top5_accuracy
    return result.test_accuracy, result.train_accuracy


def _read_result(run: RunDirectory, cell: StudyCell) -> TrainResult | None:
    # damaged: as good as none
    with contextlib.suppress(RunDirectoryError):
        return run.train(cell.label).read_result()
    return None


def _read_rates(run: RunDirectory) -> TunedRates | None:
    with contextlib.suppress(RunDirectoryError):
        return run.read_rates()
    return None


# accuracy that the large batch must have lost before a share of it says anything
LEAST_LOSS = 0.01
# a loss that says something however few the test samples are
PLAIN_LOSS = 0.02

Mark = Literal["best", "worst", ""]


class Spread(NamedTuple):
    """Accuracy over seeds, as a share of 1."""

    mean: float
    # sample standard deviation, n − 1 in the denominator; None for one seed
    deviation: float | None
    runs: int


class Entry(NamedTuple):
    """A method (or variant) at one batch. Runs that diverged or failed have no accuracy: they are counted instead."""

    column: str
    batch: int
    # of the runs that finished; None if none did
    test: Spread | None
    train: Spread | None
    diverged: int
    failed: int
    missing: int
    # share of what plain training lost against the small batch, see `recovered_share`
    recovered: float | None = None
    mark: Mark = ""

    @property
    def settled(self) -> bool:
        """Whether there is anything to compare."""
        return self.test is not None or self.diverged > 0


class StudyTable(NamedTuple):
    """All entries, and the small batch that they are held against."""

    columns: tuple[str, ...]
    # ascending
    batches: tuple[int, ...]
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
        entries = {
            (entry.column, entry.batch): entry
            for entry in (*self.entries.values(), *self._references())
        }
        return sum(getattr(entry, status) for entry in entries.values())

    def _references(self) -> tuple[Entry, ...]:
        return () if self.reference is None else (self.reference,)


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and deviation; None of nothing."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def make_table(
    study: StudySpec, outcomes: Iterable[Outcome], test_samples: int | None = None
) -> StudyTable:
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
            recovered = recovered_share(
                entry, plain.get((REFERENCE_COLUMN, batch)), reference, test_samples
            )
            entries[entry.column, batch] = entry._replace(
                recovered=recovered, mark=marks.get(entry.column, "")
            )
    return StudyTable(study.columns, batches, reference, entries, test_samples)


def _entry(column: str, batch: int, outcomes: Sequence[Outcome]) -> Entry:
    ended = Counter(outcome.status for outcome in outcomes)
    test = spread([outcome.test for outcome in outcomes if outcome.test is not None])
    train = spread([outcome.train for outcome in outcomes if outcome.train is not None])
    return Entry(column, batch, test, train, ended["diverged"], ended["failed"], ended["missing"])


def marks_of(row: Sequence[Entry]) -> Mapping[str, Mark]:
    """Best and worst of one batch, by column; equals alike, and none where all are equal.

    Here a run that diverged counts as an accuracy of 0, and a method of which any did is never the
    best.
    """
    levels = {entry.column: _level(entry) for entry in row if entry.settled}
    lowest = min(levels.values(), default=0.0)
    if all(level == lowest for level in levels.values()):
        return {}
    whole = {
        entry.column: levels[entry.column] for entry in row if entry.settled and not entry.diverged
    }
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

    0 is no better than plain large-batch training, 1 as good as the small batch. None where one of
    the three is unknown, where a run of one of them diverged, as the mean of those that are left
    would hide it, or where plain training lost less than `least_loss`.
    """
    if (
        plain is None
        or small is None
        or entry.test is None
        or plain.test is None
        or small.test is None
    ):
        return None
    if entry.diverged or plain.diverged or small.diverged:
        return None
    lost = small.test.mean - plain.test.mean
    least = least_loss(small.test, plain.test, test_samples)
    return (entry.test.mean - plain.test.mean) / lost if lost >= least else None


def least_loss(small: Spread, plain: Spread, test_samples: int | None) -> float:
    """What the large batch must have lost before a share of it says anything.

    The standard error of the difference by counting, `sqrt(Σ p(1 − p) / (n · runs))` for n test
    samples, where that is known and lies between `LEAST_LOSS` and `PLAIN_LOSS`.
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


def percent(value: Spread | None) -> str:
    """For example "71.3 ± 0.4 %"."""
    if value is None:
        return UNKNOWN
    deviation = "" if value.deviation is None else f" ± {100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{deviation} %"


def points(difference: float) -> str:
    """For example "6.2 points"; without the sign."""
    amount = f"{abs(100 * difference):.1f}"
    return f"{'less than 0.1' if amount == '0.0' else amount} points"


def listed(names: Sequence[str]) -> str:
    """For example "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def answer(table: StudyTable) -> str:
    """The study in one or two sentences: who is best, how often."""
    leaders = {column: _led(table, column) for column in table.columns}
    most = max(leaders.values(), default=0)
    decided = sum(table.best(batch) is not None for batch in table.batches)
    if not most and any(
        sum(entry.settled for entry in table.row(batch)) > 1 for batch in table.batches
    ):
        return (
            "No method is best at any batch: all are equal, or each of them diverged in some run."
        )
    if not most:
        return "No batch has two methods with results yet."
    names = listed([column for column, count in leaders.items() if count == most])
    verb = "are" if " and " in names else "is"
    where = (
        f"at {most} of {decided} batches" if decided > 1 else "at the one batch that can be judged"
    )
    return f"{names} {verb} best, or within one standard deviation of the best, {where}."


def _led(table: StudyTable, column: str) -> int:
    pairs = ((table.entries[column, batch], table.best(batch)) for batch in table.batches)
    return sum(best is not None and within_one_deviation(entry, best) for entry, best in pairs)


def signed(share: float) -> str:
    """For example "−12 %"."""
    return f"{100 * share:.0f} %".replace("-", "−")


def no_result(table: StudyTable) -> str:
    """Why no entry has a result: trainings are still to come, or all are over."""
    entries = table.entries.values()
    if any(entry.missing for entry in entries):
        return "no training has a result yet"
    ends = [
        (sum(getattr(entry, name) for entry in entries), name) for name in ("diverged", "failed")
    ]
    return f"all trainings are over without a result: {listed([f'{count} {name}' for count, name in ends if count])}"


def csv_rows(table: StudyTable) -> list[tuple[str | int | float | None, ...]]:
    """The table's numbers, percent; the small batch first. The head is `CSV_COLUMNS`."""
    small = [("small batch", table.reference)] if table.reference else []
    return [
        _csv_row(kind, entry)
        for kind, entry in [*small, *(("", entry) for entry in table.entries.values())]
    ]


CSV_COLUMNS = (
    "kind",
    "method",
    "global_batch_samples",
    "test_accuracy_percent",
    "test_deviation_percent",
    "train_accuracy_percent",
    "train_deviation_percent",
    "runs",
    "diverged",
    "failed",
    "missing",
    "recovered_percent",
    "mark",
)


def _csv_row(kind: str, entry: Entry) -> tuple[str | int | float | None, ...]:
    runs = entry.test.runs if entry.test else 0
    accuracies = (*_percents(entry.test), *_percents(entry.train))
    counts = (runs, entry.diverged, entry.failed, entry.missing)
    recovered = None if entry.recovered is None else 100 * entry.recovered
    return (kind, entry.column, entry.batch, *accuracies, *counts, recovered, entry.mark)


def _percents(value: Spread | None) -> tuple[float | None, float | None]:
    if value is None:
        return None, None
    return 100 * value.mean, None if value.deviation is None else 100 * value.deviation
