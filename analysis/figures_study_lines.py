"""Accuracy of a study's methods: against the batch, and over the epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tula_hpc.analysis import figures_labels as labels
from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.study_data import StudyContents
from tula_hpc.analysis.study_table import Entry, StudyTable
from tula_hpc.analysis.study_text import listed, no_result, percent
from tula_hpc.config import REFERENCE_COLUMN

MOST_PANELS = 3
LEGEND_CHARACTERS = 100  # in a row, with six for each entry's line and the gap after it
LATER = 0.25  # the first quarter of the epochs may lie below the panel: the ends are compared


def column_style(columns: Sequence[str], name: str) -> style.SizeStyle:
    """Colour and marker of a method: by its place among the others; plain training is grey."""
    if name == REFERENCE_COLUMN:
        return style.SizeStyle(style.MUTED.light, "o")
    return style.size_style(range(len(columns)), [c for c in columns if c != REFERENCE_COLUMN].index(name))


def line_style(columns: Sequence[str], name: str) -> Literal["-", ":"]:
    """Whole lines until the colours are used up, then dotted ones."""
    others = [c for c in columns if c != REFERENCE_COLUMN]
    return "-" if name == REFERENCE_COLUMN or others.index(name) < len(style.SIZES) else ":"


def column_keys(columns: Sequence[str], names: Sequence[str]) -> list[style.Key]:
    """Entries of a legend of lines, for some of the columns."""
    return [style.Key(n, line=line_style(columns, n), colour=column_style(columns, n).colour) for n in names]


def draw_study_accuracy(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean test accuracy against the global batch with a band of one standard deviation, and the small batch's line."""
    lines = {name: [e for b in table.batches if (e := table.entries[name, b]).test] for name in table.columns}
    lines = {name: entries for name, entries in lines.items() if entries}
    if not lines:
        return Missing("study_accuracy", "accuracy against batch", no_result(table))
    title = _accuracy_title(table)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.9)
        beside, longest = labels.have_room(list(lines)), max(map(len, lines))
        style.batch_axis(axes, table.batches, "global batch B", right=0.06 + 0.0145 * longest if beside else 0.05)
        accuracy_axis(axes, heights([*(e for entries in lines.values() for e in entries), table.reference]))
        ends = [_draw_line(axes, entries, table.columns) for entries in lines.values()]
        across = None
        if table.reference is not None and table.reference.test is not None:
            _draw_small_batch(axes, table.reference)
            across = 100 * table.reference.test.mean
        if beside:
            labels.label_ends(axes, ends, across=across)
        else:
            style.legend(axes, [end.key for end in ends], columns=legend_columns(list(lines)), left=-0.02)
    caption = (
        "Test accuracy at the end of training against the global batch; the mean over the seeds, in a band (or bar) of "
        "one standard deviation to each side. The dashed line is plain training with the small batch. All have seen "
        "equally many epochs. Hollow marks: some of the runs diverged and are not in the mean."
    )
    return Drawing("study_accuracy", title, caption, figure, _accuracy_table(lines, table))


def heights(entries: Sequence[Entry | None]) -> list[float]:
    """Ends of the bars, percent: one deviation to each side of the mean."""
    spreads = [entry.test for entry in entries if entry is not None and entry.test]
    return [100 * (s.mean + side * (s.deviation or 0.0)) for s in spreads for side in (-1, 1)]


def accuracy_axis(axes: Axes, values: Sequence[float]) -> None:
    """A y axis for accuracies in percent that shows their differences: not from zero."""
    low, high = min(values), max(values)
    margin = 0.08 * max(high - low, 1.0)
    axes.set_ylim(max(0.0, low - margin), min(101.0, high + margin))
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.set_ylabel("test accuracy, %")


def _draw_line(axes: Axes, entries: Sequence[Entry], columns: Sequence[str]) -> labels.EndLabel:
    look, line = column_style(columns, entries[0].column), line_style(columns, entries[0].column)
    batches = [entry.batch for entry in entries]
    means = np.array([100 * entry.test.mean for entry in entries if entry.test])
    deviations = np.array([100 * (entry.test.deviation or 0.0) for entry in entries if entry.test])
    axes.plot(batches, means, line, marker=look.marker, color=look.colour, zorder=3)
    partial = [(entry.batch, mean) for entry, mean in zip(entries, means, strict=True) if entry.diverged]
    axes.plot(*np.array(partial).reshape(-1, 2).T, look.marker, color=look.colour, markerfacecolor="white", zorder=4)
    if len(batches) > 1:
        axes.fill_between(batches, means - deviations, means + deviations, color=look.colour, alpha=0.13, linewidth=0)
    else:
        axes.errorbar(batches, means, deviations, color=look.colour, capsize=3, linewidth=1.2)
    return labels.EndLabel(batches[-1], float(means[-1]), entries[0].column, look.colour, look.marker, line)


def _draw_small_batch(axes: Axes, small: Entry) -> None:
    mean = 100 * (small.test.mean if small.test else 0.0)
    deviation = 100 * ((small.test.deviation if small.test else None) or 0.0)
    axes.axhspan(mean - deviation, mean + deviation, color=style.SHADE.light, zorder=0)
    axes.axhline(mean, color=style.INK.light, linewidth=1, linestyle=(0, (5, 3)), zorder=1)
    axes.annotate(
        f"{small.column} at B = {small.batch:,}: {percent(small.test)}",
        (0.99, mean),  # where the large batches have lost, most room is above them
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        size=8,
    )


def _accuracy_title(table: StudyTable) -> str:
    largest = table.batches[-1]
    leaders, plain = table.leaders(largest), table.entries.get((REFERENCE_COLUMN, largest))
    if not leaders:
        return "Test accuracy against the global batch"
    names = [entry.column for entry in leaders]
    reach = "reach" if len(names) > 1 else "reaches"
    title = f"At B = {largest:,} {listed(names)} {reach} {percent(leaders[0].test)}"
    if plain is None or plain.test is None or REFERENCE_COLUMN in names:
        return title
    return f"{title}, plain large-batch training {percent(plain.test)}"


def _accuracy_table(lines: dict[str, list[Entry]], table: StudyTable) -> Table:
    small = [table.reference] if table.reference else []
    rows: list[tuple[Cell, ...]] = []
    for entry in [*small, *(entry for entries in lines.values() for entry in entries)]:
        if entry.test:
            deviation = None if entry.test.deviation is None else 100 * entry.test.deviation
            rows.append((entry.column, entry.batch, 100 * entry.test.mean, deviation, entry.test.runs))
    return Table(("method", "global_batch_samples", "test_accuracy_percent", "deviation_percent", "runs"), rows)


def draw_study_epochs(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean test accuracy after each evaluated epoch, a panel for each of the batches (three at most)."""
    shown = _spread_out(table.batches)
    curves = {(name, batch): _mean_curve(contents, name, batch) for batch in shown for name in table.columns}
    curves = {place: curve for place, curve in curves.items() if curve}
    batches = [batch for batch in shown if any(b == batch for _, b in curves)]
    names = [name for name in table.columns if any(n == name for n, _ in curves)]
    if not curves:
        under_way = any(entry.missing for entry in table.entries.values())
        why = "no training has finished an epoch yet" if under_way else no_result(table)
        return Missing("study_epochs", "accuracy over the epochs", why)
    small = _mean_curve(contents, REFERENCE_COLUMN, contents.study.small_batch)
    title = "Test accuracy over the epochs: whether the trainings were long enough to compare their ends"
    with style.styled():
        figure, panels = style.new_figure(title, 0.6 + 2.1 * len(batches), ratios=[1] * len(batches))
        for axes, batch in zip(panels, batches, strict=True):
            _draw_curves(axes, {name: curve for (name, b), curve in curves.items() if b == batch}, small, table)
            axes.set_ylabel(f"test accuracy, %\nB = {batch:,}")
        panels[-1].set_xlabel("epochs")
        style.legend(panels[0], _keys(table, names, bool(small)), columns=legend_columns(names), left=-0.02)
    caption = (
        "Test accuracy after each epoch at which it was looked at, mean over the seeds. Dashed: plain training with "
        "the small batch. Lines that still rise at the end are trainings that were cut short."
    )
    return Drawing("study_epochs", title, caption, figure, _curve_table(curves))


def _spread_out(batches: Sequence[int]) -> list[int]:
    """All of a few batches; of many the smallest, the middle and the largest."""
    if len(batches) <= MOST_PANELS:
        return list(batches)
    return [batches[0], batches[len(batches) // 2], batches[-1]]


def _mean_curve(contents: StudyContents, column: str, batch: int) -> list[tuple[float, float]]:
    """(epoch, percent) at the epochs that every run has."""
    runs = contents.of(column, batch)
    known = [{row.epoch: contents.accuracy(row) for row in run.epochs} for run in runs if run.epochs]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    return [(epoch, 100 * float(np.mean([accuracies[epoch] for accuracies in known]))) for epoch in shared]


def _draw_curves(
    axes: Axes, curves: dict[str, list[tuple[float, float]]], small: list[tuple[float, float]], table: StudyTable
) -> None:
    for name, curve in curves.items():
        colour, line = column_style(table.columns, name).colour, line_style(table.columns, name)
        axes.plot(*zip(*curve, strict=True), line, color=colour, linewidth=1.3)
    if small:
        axes.plot(*zip(*small, strict=True), color=style.INK.light, linewidth=1, linestyle=(0, (5, 3)))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    last = max(epoch for curve in curves.values() for epoch, _ in curve)
    later = [height for curve in [*curves.values(), small] for epoch, height in curve if epoch >= LATER * last]
    axes.set_ylim(max(0.0, min(later) - 2.0), max(later) + 2.0)


def legend_columns(names: Sequence[str]) -> int:
    """For these and one more: rows of about equal length, six entries at most in each, fewer if names are long."""
    most = max(1, min(6, LEGEND_CHARACTERS // (max(map(len, names)) + 6)))
    return math.ceil((len(names) + 1) / math.ceil((len(names) + 1) / most))


def _keys(table: StudyTable, names: Sequence[str], small: bool) -> list[style.Key]:
    return [
        *column_keys(table.columns, names),
        *([style.Key("small batch", line="--", colour=style.INK.light)] if small else []),
    ]


def _curve_table(curves: dict[tuple[str, int], list[tuple[float, float]]]) -> Table:
    rows: list[tuple[Cell, ...]] = [(*place, *point) for place, curve in curves.items() for point in curve]
    return Table(("method", "global_batch_samples", "epochs", "test_accuracy_percent"), rows)
