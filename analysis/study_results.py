"""Contents of a study's run directory, and its table: accuracy by method and batch over the seeds.

The table compares every method with plain training at the same batch and with a small batch.
Texts, CSV and figures are made from it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from tula_hpc.config import (
    PUT_BACK,
    REFERENCE_COLUMN,
    StudyCell,
    StudySpec,
    SweepSpec,
    load_frozen_sweep,
)
from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import not_a_run
from tula_hpc.formatting import UNKNOWN, command_line, in_percent, listed, plural
from tula_hpc.records import (
    EpochMetrics,
    Event,
    Metrics,
    RunDirectory,
    RunHistory,
    TunedRates,
    read_metrics,
)

T = TypeVar("T")


class CellOutcome(NamedTuple):
    """Outcome of one training. Accuracies are shares of 1, in the study's metric."""

    cell: StudyCell
    # missing: the training waits, runs, or was never submitted
    status: Literal["finished", "diverged", "failed", "missing"]
    # test and training accuracy, only of trainings that finished
    test: float | None = None
    train: float | None = None
    # reason why it diverged or failed
    why: str = ""


class StudyContents(NamedTuple):
    """Contents of the files of a study."""

    sweep: SweepSpec
    study: StudySpec
    outcomes: list[CellOutcome]
    metrics: dict[StudyCell, Metrics]
    rates: TunedRates | None
    sweep_text: str
    events: list[Event]

    def of(self, column: str, batch: int) -> list[Metrics]:
        """Return the metrics of a column's finished trainings at a batch, one for each seed.

        While none has finished, return those of all that are under way or failed. The two are not
        mixed, since an incomplete training would cut the curves of the others short.
        """
        finished = []
        under_way = []
        for cell, status, *_ in self.outcomes:
            if (cell.column, cell.batch) != (column, batch):
                continue
            if status == "finished":
                finished.append(self.metrics[cell])
            elif status != "diverged":
                under_way.append(self.metrics[cell])
        return finished or under_way

    def accuracy(self, row: EpochMetrics) -> float:
        """Return the test accuracy after an epoch, in the metric of the study, or NaN."""
        accuracy = row.test_accuracy
        if self.study.metric == "top5":
            accuracy = row.test_top5_accuracy
        return math.nan if accuracy is None else accuracy


def read_study(run: RunDirectory) -> StudyContents:
    """Read a study, finished or not.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no study.
        InputError: Its sweep.toml is damaged.
    """
    if not run.sweep_file.exists():
        if run.has_studied():
            raise RunDirectoryError(f"is missing; {PUT_BACK}", source=run.sweep_file)
        raise RunDirectoryError(not_a_run(run.root), source=run.root)
    # load the frozen file, which needs no data: these may be on another machine
    sweep = load_frozen_sweep(run.sweep_file)
    if sweep.study is None:
        report = command_line("report", str(run.root))
        raise RunDirectoryError(f"holds no study; use {report}", source=run.root)
    events = run.events()
    cells = sweep.study.cells()
    return StudyContents(
        sweep=sweep,
        study=sweep.study,
        outcomes=list(_outcomes(run, sweep.study, _failures(events))),
        metrics={cell: read_metrics(run.train(cell.label).metrics_file) for cell in cells},
        rates=_unless_damaged(run.read_rates),
        sweep_text=run.sweep_file.read_text(encoding="utf-8", errors="replace"),
        events=events,
    )


def _failures(events: Iterable[Event]) -> dict[str, str]:
    """Return by label why trainings failed, if they were not submitted again."""
    failures = {}
    for label, failure in RunHistory(events).last_failures().items():
        kind = str(failure.kind or "").replace("_", " ")
        failures[label] = f"{kind}: {failure.detail}"
    return failures


def _outcomes(
    run: RunDirectory, study: StudySpec, failures: dict[str, str]
) -> Iterator[CellOutcome]:
    for cell in study.cells():
        result = _unless_damaged(run.train(cell.label).read_result)
        if result is None:
            why = failures.get(cell.label, "")
            yield CellOutcome(cell, "failed" if why else "missing", why=why)
        elif result.diverged:
            why = f"the loss was not finite after {plural(result.steps, 'step')}"
            yield CellOutcome(cell, "diverged", why=why)
        else:
            test = result.test_accuracy
            train = result.train_accuracy
            if study.metric == "top5":
                test = result.test_top5_accuracy
                train = result.train_top5_accuracy
            if test is None:
                why = "no accuracy: its targets have none, or workload.metric was not finite"
                yield CellOutcome(cell, "failed", why=why)
            else:
                yield CellOutcome(cell, "finished", test, train)


def _unless_damaged(read: Callable[[], T | None]) -> T | None:
    """Read a file; a damaged one counts as missing."""
    with contextlib.suppress(RunDirectoryError):
        return read()
    return None


# accuracy that the large batch must have lost for a recovered share to be meaningful
LEAST_LOSS = 0.01
# lost accuracy that is enough however few test samples there are
PLAIN_LOSS = 0.02

Mark = Literal["best", "worst", ""]


class SeedMean(NamedTuple):
    """Accuracy over seeds, as a share of 1."""

    mean: float
    # sample standard deviation, n − 1 in the denominator; None for one seed
    deviation: float | None
    runs: int


class Entry(NamedTuple):
    """A method (or variant) at one batch; runs that diverged or failed are only counted."""

    column: str
    batch: int
    # accuracies of the runs that finished; None if none did
    test: SeedMean | None
    train: SeedMean | None
    diverged: int
    failed: int
    missing: int
    # share of the accuracy that plain training lost against the small batch, see `recovered_share`
    recovered: float | None = None
    mark: Mark = ""

    @property
    def without_score(self) -> dict[str, int]:
        """Return how many runs ended without a score, or have not ended, by how they ended."""
        return {"diverged": self.diverged, "failed": self.failed, "missing": self.missing}

    @property
    def settled(self) -> bool:
        """Return whether a run finished or diverged, so that there is a result to compare."""
        return self.test is not None or self.diverged > 0


class StudyTable(NamedTuple):
    """All entries, and the training with the small batch that they are compared with."""

    columns: tuple[str, ...]
    # ascending
    batches: tuple[int, ...]
    reference: Entry | None
    entries: dict[tuple[str, int], Entry]
    test_samples: int | None = None

    def row(self, batch: int) -> list[Entry]:
        """Return the entries of one batch, in the order of the columns."""
        return [self.entries[column, batch] for column in self.columns]

    def line(self, column: str) -> list[Entry]:
        """Return the entries of one column, in the order of the batches."""
        return [self.entries[column, batch] for batch in self.batches]

    def leaders(self, batch: int) -> list[Entry]:
        """Return the methods of highest mean test accuracy at a batch; none where all are equal."""
        return [entry for entry in self.row(batch) if entry.mark == "best"]

    def best(self, batch: int) -> Entry | None:
        """Return the first of the leaders; None if there are none."""
        return next(iter(self.leaders(batch)), None)

    @property
    def settled(self) -> list[Entry]:
        """Return the entries with a result to compare."""
        return [entry for entry in self.entries.values() if entry.settled]

    @property
    def has_deviations(self) -> bool:
        """Return whether any mean is over several seeds."""
        return any(
            entry.test and entry.test.deviation is not None for entry in self.entries.values()
        )

    def number_of(self, status: Literal["diverged", "failed", "missing"]) -> int:
        """Count the runs of the whole study that have this status."""
        entries = dict(self.entries)
        if self.reference is not None:
            # the table may already hold the small batch, which must not count twice
            entries[self.reference.column, self.reference.batch] = self.reference
        return sum(getattr(entry, status) for entry in entries.values())


def seed_mean(values: Sequence[float]) -> SeedMean | None:
    """Return mean and standard deviation; None without values."""
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return SeedMean(statistics.fmean(values), deviation, len(values))


def make_table(
    study: StudySpec, outcomes: Iterable[CellOutcome], test_samples: int | None = None
) -> StudyTable:
    """Aggregate the outcomes over seeds, and mark the best and the worst at each batch.

    `test_samples` is the size of the test set, or None if unknown; see `least_loss`.
    """
    grouped: dict[tuple[str, int], list[CellOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault((outcome.cell.column, outcome.cell.batch), []).append(outcome)
    means = {key: _entry(*key, group) for key, group in grouped.items()}
    reference = means.get((REFERENCE_COLUMN, study.small_batch))
    entries: dict[tuple[str, int], Entry] = {}
    batches = tuple(sorted(study.batches))
    for batch in batches:
        row = [means.get((column, batch)) or _entry(column, batch, []) for column in study.columns]
        marks = marks_of(row)
        plain = means.get((REFERENCE_COLUMN, batch))
        for entry in row:
            recovered = recovered_share(entry, plain, reference, test_samples)
            mark = marks.get(entry.column, "")
            entries[entry.column, batch] = entry._replace(recovered=recovered, mark=mark)
    return StudyTable(study.columns, batches, reference, entries, test_samples)


def _entry(column: str, batch: int, outcomes: Sequence[CellOutcome]) -> Entry:
    ended = Counter(outcome.status for outcome in outcomes)
    test = seed_mean([outcome.test for outcome in outcomes if outcome.test is not None])
    train = seed_mean([outcome.train for outcome in outcomes if outcome.train is not None])
    return Entry(column, batch, test, train, ended["diverged"], ended["failed"], ended["missing"])


def marks_of(row: Sequence[Entry]) -> Mapping[str, Mark]:
    """Return the best and the worst of one batch, by column; none where all are equal.

    A run that diverged counts as an accuracy of 0 here, and a method with such a run is never the
    best.
    """
    levels: dict[str, float] = {}
    without_divergence = []
    for entry in row:
        if not entry.settled:
            continue
        levels[entry.column] = 0.0
        if entry.test is not None:
            test = entry.test
            levels[entry.column] = test.mean * test.runs / (test.runs + entry.diverged)
        if not entry.diverged:
            without_divergence.append(levels[entry.column])
    lowest = min(levels.values(), default=0.0)
    if all(level == lowest for level in levels.values()):
        return {}
    highest = max(without_divergence, default=lowest)
    marks: dict[str, Mark] = {}
    for entry in row:
        level = levels.get(entry.column)
        if level == lowest:
            marks[entry.column] = "worst"
        elif level == highest and not entry.diverged:
            marks[entry.column] = "best"
    return marks


def recovered_share(
    entry: Entry, plain: Entry | None, small: Entry | None, test_samples: int | None = None
) -> float | None:
    """Return (method − lbt) / (small batch − lbt), in mean test accuracies.

    0 means no better than plain large-batch training, 1 as good as the small batch. None if plain
    training lost less than `least_loss`, if one of the three is unknown, or if one of its runs
    diverged, which the mean of the others would hide.
    """
    if plain is None or small is None or entry.diverged or plain.diverged or small.diverged:
        return None
    if entry.test is None or plain.test is None or small.test is None:
        return None
    lost = small.test.mean - plain.test.mean
    least = least_loss(small.test, plain.test, test_samples)
    if lost >= least:
        return (entry.test.mean - plain.test.mean) / lost
    return None


def least_loss(small: SeedMean, plain: SeedMean, test_samples: int | None) -> float:
    """Return the least lost accuracy for which a recovered share is meaningful.

    It is the standard error of the difference from counting n test samples, `sqrt(Σ p(1 − p) / (n ·
    runs))`, limited to `LEAST_LOSS` to `PLAIN_LOSS`; `LEAST_LOSS` if n is unknown.
    """
    if test_samples is None:
        return LEAST_LOSS
    variance = sum(s.mean * (1 - s.mean) / (test_samples * s.runs) for s in (small, plain))
    return min(PLAIN_LOSS, max(LEAST_LOSS, math.sqrt(max(0.0, variance))))


def within_one_deviation(entry: Entry, best: Entry) -> bool:
    """Return whether a mean is at most one deviation of the best below the best's mean."""
    if entry.test is None or best.test is None or entry.diverged:
        return False
    return best.test.mean - entry.test.mean <= (best.test.deviation or 0.0)


def percent(value: SeedMean | None) -> str:
    """Return for example "71.3 ± 0.4 %"."""
    if value is None:
        return UNKNOWN
    deviation = "" if value.deviation is None else f" ± {100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{deviation} %"


def points(difference: float) -> str:
    """Return for example "6.2 points", without a sign."""
    amount = f"{abs(100 * difference):.1f}"
    if amount == "0.0":
        amount = "less than 0.1"
    return f"{amount} points"


def answer(table: StudyTable) -> str:
    """Return a sentence that names the best methods, and at how many batches they are best."""
    led = dict.fromkeys(table.columns, 0)
    decided = 0
    comparable = False
    for batch in table.batches:
        row = table.row(batch)
        comparable = comparable or sum(entry.settled for entry in row) > 1
        best = table.best(batch)
        if best is None:
            continue
        decided += 1
        for entry in row:
            led[entry.column] += within_one_deviation(entry, best)
    most = max(led.values(), default=0)
    if not most and comparable:
        return f"No method is best at any batch: {_why_none(table)}."
    if not most:
        yet = " yet" if table.number_of("missing") else ""
        return f"No batch has two methods with results{yet}."
    names = [column for column, count in led.items() if count == most]
    verb = "are" if len(names) > 1 else "is"
    where = "at the one batch that can be judged"
    if decided > 1:
        where = f"at {most} of {decided} batches"
    near = ", or within one standard deviation of the best," if table.has_deviations else ""
    return f"{listed(names)} {verb} best{near} {where}."


def _why_none(table: StudyTable) -> str:
    """Say why no batch has a best method although methods can be compared."""
    if not any(entry.test for entry in table.settled):
        return "all diverged"
    diverged = [entry.diverged for entry in table.settled]
    if all(diverged):
        return "each diverged in some run"
    if any(diverged):
        return "all are equal, or each diverged in some run"
    return "all are equal"


def signed(share: float) -> str:
    """Return for example "−12 %"."""
    return f"{round(100 * share)} %".replace("-", "−")


def no_result(table: StudyTable) -> str:
    """Say why no entry has a result: trainings are still missing, or all diverged or failed."""
    counts: Counter[str] = Counter()
    for entry in table.entries.values():
        counts.update(entry.without_score)
    if counts["missing"]:
        return "no training has a result yet"
    return f"all trainings are over without a result: {listed(counted(counts))}"


def counted(counts: Mapping[str, int]) -> list[str]:
    """Return for example "2 diverged", "1 failed"."""
    return [f"{count} {name}" for name, count in counts.items() if count]


def csv_rows(table: StudyTable) -> list[dict[str, str | int | float | None]]:
    """Return the table's rows by column, in percent; the small batch comes first."""
    rows = [_csv_row("", entry) for entry in table.entries.values()]
    if table.reference:
        rows.insert(0, _csv_row("small batch", table.reference))
    return rows


def _csv_row(kind: str, entry: Entry) -> dict[str, str | int | float | None]:
    test, deviation, runs = entry.test or (None, None, 0)
    train, train_deviation, _ = entry.train or (None, None, 0)
    return {
        "kind": kind,
        "method": entry.column,
        "global_batch_samples": entry.batch,
        "test_accuracy_percent": in_percent(test),
        "test_deviation_percent": in_percent(deviation),
        "train_accuracy_percent": in_percent(train),
        "train_deviation_percent": in_percent(train_deviation),
        "runs": runs,
        "diverged": entry.diverged,
        "failed": entry.failed,
        "missing": entry.missing,
        "recovered_percent": in_percent(entry.recovered),
        "mark": entry.mark,
    }
