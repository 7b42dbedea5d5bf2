"""A study in sentences, on results at each batch and on doubts; its table as text and LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from tula_hpc.analysis.planning.warnings import SCALED_NOTHING
from tula_hpc.analysis.report.tables import TextTable, latex_escaped
from tula_hpc.analysis.run_contents import is_guess, learned_nothing
from tula_hpc.analysis.study_results import (
    CellOutcome,
    Entry,
    SeedMean,
    StudyContents,
    StudyTable,
    counted,
    least_loss,
    percent,
    points,
    signed,
    within_one_deviation,
)
from tula_hpc.config import REFERENCE_COLUMN
from tula_hpc.formatting import aligned, listed, plural

SMALLER_RATES = "lower workload.lr, or give smaller rates in study.base_lrs"
# gain of accuracy in the last tenth of the epochs above which the small batch needs more epochs
TRAINED_OUT = 0.01


def verdicts(table: StudyTable) -> list[str]:
    """Return a paragraph for each batch."""
    return [" ".join(_verdict(table, batch)) for batch in table.batches]


def _verdict(table: StudyTable, batch: int) -> Iterator[str]:
    row = table.row(batch)
    best = table.best(batch)
    yield f"B = {batch:,}: {_loss(table, batch)}"
    if best is not None:
        yield _best(table.leaders(batch), row)
        near = [e.column for e in row if e.mark != "best" and within_one_deviation(e, best)]
        if near:
            yield f"Within one standard deviation of it: {listed(near)}."
    methods = [entry for entry in row if entry.column != REFERENCE_COLUMN]
    shares = [(e.column, e.recovered) for e in methods if e.recovered is not None]
    if shares:
        shares.sort(key=lambda item: -item[1])
        recovered = [f"{column} {signed(share)}" for column, share in shares]
        yield f"How much of that loss was recovered: {', '.join(recovered)}."
    worst = [e for e in row if e.mark == "worst" and e.test is not None and not e.diverged]
    if worst:
        yield f"Worst {_verb_and_names(worst)} with {percent(worst[0].test)}."
    # `_loss` already names plain training that diverged
    ended: dict[str, list[str]] = {}
    for entry in methods:
        if entry.diverged:
            ended.setdefault(_diverged(entry), []).append(entry.column)
    for words, names in ended.items():
        yield f"{listed(names)} {words if len(names) == 1 else f'each {words}'}."


def _loss(table: StudyTable, batch: int) -> str:
    plain = table.entries.get((REFERENCE_COLUMN, batch))
    small = table.reference
    if small is not None and small.batch == batch and small.settled:
        return f"the small batch itself, which {_outcome(small)}."
    plain_name = "plain large-batch training"
    compared = plain_name
    clauses = []
    if plain is not None and plain.diverged:
        clauses.append(f"{plain_name} {_diverged(plain)}")
        compared = "the others" if plain.test and plain.test.runs > 1 else "the other"
    if small is None or plain is None or not (small.settled and plain.settled):
        pairs = (("small batch", small), (plain_name, plain))
        lacking = [name for name, entry in pairs if entry is None or not entry.settled]
        clauses.append(f"there is no {' and no '.join(lacking)} to compare with")
    elif plain.test is None:
        clauses.append(f"B = {small.batch:,} {_outcome(small)}")
    else:
        result = _against(plain.test, small, table.test_samples)
        clauses.append(f"{compared} ({percent(plain.test)}) {result}")
    return f"{'; '.join(clauses)}."


def _outcome(small: Entry) -> str:
    clauses = []
    if small.test:
        clauses.append(f"reached {percent(small.test)}")
    if small.diverged:
        clauses.append(_diverged(small))
    return " and ".join(clauses)


def _against(plain: SeedMean, small: Entry, test_samples: int | None) -> str:
    if small.test is None:
        return f"cannot be compared: B = {small.batch:,} {_diverged(small)}"
    lost = small.test.mean - plain.mean
    least = least_loss(small.test, plain, test_samples)
    reached = f"the {percent(small.test)} of B = {small.batch:,}"
    if small.diverged:
        reached += f", which {_diverged(small)}"
    if lost <= -least:
        return f"came out {points(lost)} above {reached}"
    if lost < least:
        return f"lost hardly anything against {reached}"
    return f"lost {points(lost)} against {reached}"


def _verb_and_names(equals: Sequence[Entry]) -> str:
    # for example "is lbt", "are lbt and ags"
    verb = "is" if len(equals) == 1 else "are"
    return f"{verb} {listed([entry.column for entry in equals])}"


def _best(leaders: Sequence[Entry], row: Sequence[Entry]) -> str:
    best = leaders[0]
    text = f"Best {_verb_and_names(leaders)} with {percent(best.test)}"
    means = {}
    for entry in row:
        if entry.mark != "best" and entry.test is not None and not entry.diverged:
            means[entry.column] = entry.test.mean
    if not means or best.test is None:
        return f"{text}."
    second = max(means, key=lambda column: means[column])
    return f"{text}, {points(best.test.mean - means[second])} above {second}."


def _diverged(entry: Entry) -> str:
    runs = entry.diverged
    if entry.test:
        runs += entry.test.runs
    return f"diverged in {entry.diverged} of {plural(runs, 'run')}"


def cautions(contents: StudyContents, table: StudyTable) -> list[str]:
    """List doubts about the table."""
    found = list(_incomplete(table))
    if len(contents.study.seeds) == 1:
        found.append("Only 1 seed: differences may be chance.")
    elif len(contents.study.seeds) < 3:
        found.append("Only 2 seeds: the deviations say little.")
    found += [*_not_trained_out(contents), *_edge_rates(contents), *_all_diverged(table)]
    return [*found, *_all_guess(contents), *_scaled_nothing(contents)]


def _incomplete(table: StudyTable) -> Iterator[str]:
    missing = table.number_of("missing")
    failed = table.number_of("failed")
    if missing:
        verb = "has" if missing == 1 else "have"
        yield f"{plural(missing, 'training')} of the study {verb} no result yet."
    if failed:
        verb = "is" if failed == 1 else "are"
        yield f"{plural(failed, 'training')} failed and {verb} not in the means."


def _not_trained_out(contents: StudyContents) -> Iterator[str]:
    if not contents.study.small_batch:
        return
    epochs = contents.sweep.workload.epochs
    gains = []
    first_epoch = 0
    for metrics in contents.of(REFERENCE_COLUMN, contents.study.small_batch):
        tested = [row for row in metrics.epochs if not math.isnan(contents.accuracy(row))]
        earlier = [row for row in tested if row.epoch <= 0.9 * epochs]
        if earlier and tested[-1].epoch >= epochs:
            first_epoch = first_epoch or earlier[-1].epoch
            gains.append(contents.accuracy(tested[-1]) - contents.accuracy(earlier[-1]))
    if gains and (gain := sum(gains) / len(gains)) > TRAINED_OUT:
        yield (
            f"The small batch still gained {points(gain)} from epoch {first_epoch} to {epochs}: it "
            "needs more epochs, and methods that merely train faster look better than they are."
        )


def _edge_rates(contents: StudyContents) -> Iterator[str]:
    if not contents.rates:
        return
    for name, rate in contents.rates.rates.items():
        rates = sorted(contents.study.rates_of(name))
        if len(rates) > 1 and rate in (rates[0], rates[-1]):
            side = "smaller" if rate == rates[0] else "larger"
            chosen = f"The chosen rate of {name}, {rate:g}, is at the edge of study.base_lrs"
            yield f"{chosen}: a {side} one may be better."


def _all_diverged(table: StudyTable) -> Iterator[str]:
    small = table.reference
    if small is not None and small.diverged:
        yield f"The small batch itself {_diverged(small)}: {SMALLER_RATES}."
        return
    if small is not None and small.test is not None:
        return
    if table.settled and not any(entry.test for entry in table.settled):
        yield f"Every training that came to an end diverged: {SMALLER_RATES}."


def _all_guess(contents: StudyContents) -> Iterator[str]:
    finished = [outcome for outcome in contents.outcomes if outcome.status == "finished"]
    if finished and all(_is_guess(contents, outcome) for outcome in finished):
        chance = "No training is clearly better than guessing, and the differences are chance"
        yield f"{chance}: {SMALLER_RATES}."


def _is_guess(contents: StudyContents, outcome: CellOutcome) -> bool:
    work = contents.sweep.workload
    among_best = 5 if contents.study.metric == "top5" else 1
    guessed = outcome.test is not None and is_guess(outcome.test, work, among_best)
    return guessed or bool(learned_nothing(contents.metrics[outcome.cell], work))


def _scaled_nothing(contents: StudyContents) -> Iterator[str]:
    study = contents.study
    for column in study.columns:
        idle = []
        for batch in study.batches:
            runs = contents.of(column, batch)
            if runs and all(metrics.scaled_nothing for metrics in runs):
                idle.append(f"{batch:,}")
        if idle:
            yield f"{column} at B = {listed(idle)}: {SCALED_NOTHING}."


def table_cells(table: StudyTable) -> TextTable:
    """Return a row for each method and a column for each batch, with remarks below accuracies."""
    head, *rows = _rows(table, _cell, "\n")
    return TextTable(head, rows)


def _rows(table: StudyTable, cell: Callable[[Entry], str], separator: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("method", *(f"B = {batch:,}" for batch in table.batches))]
    small = table.reference
    if small is not None:
        name = f"small batch{separator}{small.column}, B = {small.batch:,}"
        rows.append((name, cell(small), *[""] * (len(table.batches) - 1)))
    for column in table.columns:
        rows.append((column, *map(cell, table.line(column))))
    return rows


def _cell(entry: Entry) -> str:
    lines = [_marked(entry)]
    if entry.train is not None:
        lines.append(f"train {percent(entry.train)}")
    if entry.recovered is not None and entry.column != REFERENCE_COLUMN:
        lines.append(f"{signed(entry.recovered)} recovered")
    return "\n".join([*lines, *counted(entry.without_score)])


def _marked(entry: Entry) -> str:
    return f"{percent(entry.test)} ({entry.mark})" if entry.mark else percent(entry.test)


def plain_text(table: StudyTable) -> str:
    """Return the table for a terminal: one line for each method, test accuracy only."""
    return "\n".join(aligned(_rows(table, _on_one_line, ", ")))


def _on_one_line(entry: Entry) -> str:
    return ", ".join([_marked(entry), *counted(entry.without_score)])


def latex(table: StudyTable) -> str:
    """Return a booktabs table with the best of each batch in bold and the worst underlined."""
    head = " & ".join(["method", *(f"$B = {batch}$" for batch in table.batches)])
    rows: list[str] = []
    for name in table.columns:
        rows += _latex_rows(table, name)
    lines = [
        r"% needs \usepackage{booktabs}; test accuracy in %, mean and deviation over seeds; "
        "train accuracy below",
        rf"\begin{{tabular}}{{l{'c' * len(table.batches)}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *_latex_reference(table),
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex_rows(table: StudyTable, name: str) -> Iterator[str]:
    entries = table.line(name)
    yield " & ".join([latex_escaped(name), *map(_latex_cell, entries)]) + r" \\"
    if any(entry.train for entry in entries):
        numbers = [rf"\footnotesize {_latex_number(entry.train)}" for entry in entries]
        yield " & ".join(["", *numbers]) + r" \\"


def _latex_reference(table: StudyTable) -> Iterator[str]:
    small = table.reference
    if small is not None:
        text = f"{_latex_number(small.test)} (train {_latex_number(small.train)})"
        label = f"{latex_escaped(small.column)}, $B = {small.batch}$"
        yield rf"{label} & \multicolumn{{{len(table.batches)}}}{{l}}{{{text}}} \\"
        yield r"\midrule"


def _latex_cell(entry: Entry) -> str:
    text = _latex_number(entry.test)
    if entry.test and entry.diverged:
        # number of runs that diverged
        text += rf"$^{{{entry.diverged}\times}}$"
    elif entry.diverged:
        text = "diverged"
    if entry.mark == "best":
        return rf"\textbf{{{text}}}"
    return rf"\underline{{{text}}}" if entry.mark == "worst" else text


def _latex_number(value: SeedMean | None) -> str:
    if value is None:
        return "--"
    deviation = "" if value.deviation is None else rf"\,$\pm$\,{100 * value.deviation:.1f}"
    return f"{100 * value.mean:.1f}{deviation}"
