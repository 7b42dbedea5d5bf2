"""A study in words: what each batch shows, what to be careful about; and its table as text, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tula_hpc.analysis.planning.warnings import SCALED_NOTHING
from tula_hpc.analysis.report.tables import TextTable
from tula_hpc.analysis.run_contents import is_guess, learned_nothing
from tula_hpc.analysis.study_results import (
    Entry,
    Outcome,
    Spread,
    StudyContents,
    StudyTable,
    least_loss,
    listed,
    percent,
    points,
    signed,
    within_one_deviation,
)
from tula_hpc.config import REFERENCE_COLUMN
from tula_hpc.formatting import plural
from tula_hpc.records import EpochMetrics, Metrics

SMALLER_RATES = "lower workload.lr, or give smaller rates in study.base_lrs"
# accuracy that the small batch may still gain in about the last tenth of its epochs
TRAINED_OUT = 0.01


def verdicts(table: StudyTable) -> list[str]:
    """A paragraph for each batch."""
    return [" ".join(_verdict(table, batch)) for batch in table.batches]


def _verdict(table: StudyTable, batch: int) -> Iterator[str]:
    row, best = table.row(batch), table.best(batch)
    yield f"B = {batch:,}: {_loss(table, batch)}"
    if best is not None:
        yield _best(table.leaders(batch), row)
        if near := [e.column for e in row if e.mark != "best" and within_one_deviation(e, best)]:
            yield f"Within one standard deviation of it: {listed(near)}."
    shares = [
        (e.column, e.recovered)
        for e in row
        if e.recovered is not None and e.column != REFERENCE_COLUMN
    ]
    if shares:
        words = [
            f"{column} {signed(share)}"
            for column, share in sorted(shares, key=lambda item: -item[1])
        ]
        yield f"Recovered of that loss: {', '.join(words)}."
    worst = [
        entry
        for entry in row
        if entry.mark == "worst" and entry.test is not None and not entry.diverged
    ]
    if worst:
        yield f"Worst {_are(worst)} with {percent(worst[0].test)}."
    # of that `_loss` tells
    diverged = (entry for entry in row if entry.diverged and entry.column != REFERENCE_COLUMN)
    yield from (f"{entry.column} {_diverged(entry)}." for entry in diverged)


def _loss(table: StudyTable, batch: int) -> str:
    """What plain training lost; it tells of runs of it that diverged, and compares the others."""
    plain, small = table.entries.get((REFERENCE_COLUMN, batch)), table.reference
    who, said = "plain large-batch training", []
    if plain is not None and plain.diverged:
        said = [f"{who} {_diverged(plain)}"]
        who = "the others" if plain.test and plain.test.runs > 1 else "the other"
    if small is None or plain is None or not (small.settled and plain.settled):
        pairs = (("small batch", small), ("plain large-batch training", plain))
        lacking = [name for name, entry in pairs if entry is None or not entry.settled]
        said.append(f"there is no {' and no '.join(lacking)} to compare with")
    elif plain.test is None:
        said.append(_alone(small))
    else:
        said.append(
            f"{who} ({percent(plain.test)}) {_against(plain.test, small, table.test_samples)}"
        )
    return f"{'; '.join(said)}."


def _alone(small: Entry) -> str:
    told = [f"reached {percent(small.test)}"] if small.test else []
    told += [_diverged(small)] if small.diverged else []
    return f"B = {small.batch:,} {' and '.join(told)}"


def _against(plain: Spread, small: Entry, test_samples: int | None) -> str:
    """The runs of plain training that came through against those of the small batch."""
    if small.test is None:
        return f"cannot be compared: B = {small.batch:,} {_diverged(small)}"
    lost, least = small.test.mean - plain.mean, least_loss(small.test, plain, test_samples)
    reached = f"the {percent(small.test)} of B = {small.batch:,}"
    if small.diverged:
        reached += f", which {_diverged(small)}"
    if lost <= -least:
        return f"came out {points(lost)} above {reached}"
    if lost < least:
        return f"lost nothing to speak of against {reached}"
    return f"lost {points(lost)} against {reached}"


def _are(equals: Sequence[Entry]) -> str:
    """For example "is lbt", "are lbt and ags"."""
    return f"{'is' if len(equals) == 1 else 'are'} {listed([entry.column for entry in equals])}"


def _best(leaders: Sequence[Entry], row: Sequence[Entry]) -> str:
    best = leaders[0]
    others = [
        entry
        for entry in row
        if entry.mark != "best" and entry.test is not None and not entry.diverged
    ]
    text = f"Best {_are(leaders)} with {percent(best.test)}"
    if not others or best.test is None:
        return f"{text}."
    second = max(others, key=lambda entry: entry.test.mean if entry.test else 0.0)
    ahead = best.test.mean - second.test.mean if second.test else 0.0
    return f"{text}, {points(ahead)} above {second.column}."


def _diverged(entry: Entry) -> str:
    runs = entry.diverged + (entry.test.runs if entry.test else 0)
    return f"diverged in {entry.diverged} of {plural(runs, 'run')}"


def cautions(contents: StudyContents, table: StudyTable) -> list[str]:
    """What keeps the table from being the last word."""
    found = [
        *_incomplete(table),
        *_few_seeds(contents),
        *_not_trained_out(contents),
        *_edge_rates(contents),
    ]
    return [*found, *_all_diverged(table), *_all_guess(contents), *_scaled_nothing(contents)]


def _incomplete(table: StudyTable) -> Iterator[str]:
    missing, failed = table.number_of("missing"), table.number_of("failed")
    if missing:
        yield f"{plural(missing, 'training')} of the study {'has' if missing == 1 else 'have'} no result yet."
    if failed:
        yield f"{plural(failed, 'training')} failed and {'is' if failed == 1 else 'are'} not in the means."


def _few_seeds(contents: StudyContents) -> Iterator[str]:
    if len(contents.study.seeds) < 3:
        yield f"Only {plural(len(contents.study.seeds), 'seed')}: the deviations say little."


def _not_trained_out(contents: StudyContents) -> Iterator[str]:
    if not contents.study.small_batch:
        return
    epochs = contents.sweep.workload.epochs
    pairs = [
        _late_pair(metrics, epochs)
        for metrics in contents.of(REFERENCE_COLUMN, contents.study.small_batch)
    ]
    known = [pair for pair in pairs if pair is not None]
    gains = [contents.accuracy(last) - contents.accuracy(earlier) for earlier, last in known]
    if gains and (gain := sum(gains) / len(gains)) > TRAINED_OUT:
        yield (
            f"The small batch still gained {points(gain)} from epoch {known[0][0].epoch} to {epochs}: it is not "
            "trained out, and methods that merely train faster look better than they are."
        )


def _late_pair(metrics: Metrics, epochs: int) -> tuple[EpochMetrics, EpochMetrics] | None:
    """The last look at the test set before the last tenth of the epochs, and the one at the end; None without both."""
    earlier = [row for row in metrics.epochs if row.epoch <= 0.9 * epochs]
    if not earlier or metrics.epochs[-1].epoch < epochs:
        return None
    return earlier[-1], metrics.epochs[-1]


def _edge_rates(contents: StudyContents) -> Iterator[str]:
    for name, rate in contents.rates.rates.items() if contents.rates else ():
        rates = sorted(contents.study.rates_of(name))
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            side = "smaller" if rate == rates[0] else "larger"
            yield f"The chosen rate of {name}, {rate:g}, is at the edge of study.base_lrs: a {side} one may be better."


def _all_diverged(table: StudyTable) -> Iterator[str]:
    """What to do about it; the table counts the runs."""
    small, settled = table.reference, [entry for entry in table.entries.values() if entry.settled]
    if small is not None and small.diverged:
        yield f"The small batch itself {_diverged(small)}: {SMALLER_RATES}."
    elif (
        (small is None or small.test is None)
        and settled
        and not any(entry.test for entry in settled)
    ):
        yield f"Every training that came to an end diverged: {SMALLER_RATES}."


def _all_guess(contents: StudyContents) -> Iterator[str]:
    """Whether nothing, the small batch included, learned anything: one method is the best there, too."""
    finished = [outcome for outcome in contents.outcomes if outcome.status == "finished"]
    if finished and all(_is_guess(contents, outcome) for outcome in finished):
        yield f"No training came out clearly better than guessing, and what differs is chance: {SMALLER_RATES}."


def _is_guess(contents: StudyContents, outcome: Outcome) -> bool:
    """By its accuracy, or by its loss."""
    work, among = contents.sweep.workload, 5 if contents.study.metric == "top5" else 1
    guessed = outcome.test is not None and is_guess(outcome.test, work, among)
    return guessed or bool(learned_nothing(contents.metrics[outcome.cell], work))


def _scaled_nothing(contents: StudyContents) -> Iterator[str]:
    """Columns that are no method of their own anywhere."""
    study = contents.study
    for column in study.columns:
        logged = {batch: contents.of(column, batch) for batch in study.batches}
        idle = [
            batch
            for batch, runs in logged.items()
            if runs and all(metrics.scaled_nothing for metrics in runs)
        ]
        if idle:
            batches = listed([f"{batch:,}" for batch in idle])
            yield f"{column} at B = {batches}: {SCALED_NOTHING}."


def table_cells(table: StudyTable) -> TextTable:
    """For reading: a line for each method, a column for each batch; test accuracy, train accuracy and remarks below."""
    columns = ("method", *(f"B = {batch:,}" for batch in table.batches))
    rows = [
        (name, *(_cell(table.entries[name, batch]) for batch in table.batches))
        for name in table.columns
    ]
    return TextTable(columns, [*_reference_row(table), *rows])


def _reference_row(table: StudyTable) -> list[tuple[str, ...]]:
    small = table.reference
    if small is None:
        return []
    return [
        (
            f"small batch\n{small.column}, B = {small.batch:,}",
            _cell(small),
            *[""] * (len(table.batches) - 1),
        )
    ]


def _cell(entry: Entry) -> str:
    lines = [percent(entry.test) + (f" ({entry.mark})" if entry.mark else "")]
    if entry.train is not None:
        lines.append(f"train {percent(entry.train)}")
    if entry.recovered is not None and entry.column != REFERENCE_COLUMN:
        lines.append(f"{signed(entry.recovered)} recovered")
    counts = [
        f"{getattr(entry, name)} {name}"
        for name in ("diverged", "failed", "missing")
        if getattr(entry, name)
    ]
    return "\n".join([*lines, *counts])


def plain_text(table: StudyTable) -> str:
    """For a terminal: one line for each method, test accuracy only."""
    cells = table_cells(table)
    rows = [cells.columns, *([_one_line(cell) for cell in row] for row in cells.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(cells.columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _one_line(cell: str) -> str:
    first, *others = cell.split("\n")
    kept = [
        line
        for line in others
        if line.endswith(("diverged", "failed", "missing")) or line.startswith("lbt,")
    ]
    return ", ".join([first, *kept])


def latex(table: StudyTable) -> str:
    """A booktabs table, a line for each method: the best of each batch bold, the worst underlined."""
    head = " & ".join(["method", *(f"$B = {batch}$" for batch in table.batches)])
    lines = [
        r"% needs \usepackage{booktabs}; test accuracy in %, mean and deviation over seeds; train accuracy below",
        rf"\begin{{tabular}}{{l{'c' * len(table.batches)}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *_latex_reference(table),
        *(line for name in table.columns for line in _latex_rows(table, name)),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_rows(table: StudyTable, name: str) -> Iterator[str]:
    entries = [table.entries[name, batch] for batch in table.batches]
    yield " & ".join([_escaped(name), *map(_latex_cell, entries)]) + r" \\"
    if any(entry.train for entry in entries):
        yield (
            " & ".join(["", *(rf"\footnotesize {_latex_number(entry.train)}" for entry in entries)])
            + r" \\"
        )


def _latex_reference(table: StudyTable) -> Iterator[str]:
    small = table.reference
    if small is not None:
        text = f"{_latex_number(small.test)} (train {_latex_number(small.train)})"
        label = f"{_escaped(small.column)}, $B = {small.batch}$"
        yield rf"{label} & \multicolumn{{{len(table.batches)}}}{{l}}{{{text}}} \\"
        yield r"\midrule"


def _latex_cell(entry: Entry) -> str:
    text = _latex_number(entry.test) if entry.test else "diverged" if entry.diverged else "--"
    if entry.test and entry.diverged:
        # that many runs diverged
        text += rf"$^{{{entry.diverged}\times}}$"
    return {"best": rf"\textbf{{{text}}}", "worst": rf"\underline{{{text}}}", "": text}[entry.mark]


def _latex_number(value: Spread | None) -> str:
    if value is None:
        return "--"
    deviation = "" if value.deviation is None else rf"\,$\pm$\,{100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{deviation}"


def _escaped(name: str) -> str:
    return name.replace("_", r"\_")
