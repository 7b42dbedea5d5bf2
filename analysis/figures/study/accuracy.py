"""Accuracy of a study's methods by batch, over epochs and by δ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis import study_results
from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.study_results import Entry, SeedMean, StudyContents, StudyTable
from tula_hpc.config import REFERENCE_COLUMN, SweepSpec, study_column
from tula_hpc.formatting import format_number, in_percent, listed, plural

MOST_PANELS = 3
# first share of the epochs, whose accuracy may lie below the panel: what is compared is the end
LATER = 0.25
# dashes of the small batch's line
DASHES = (0, (5, 3))
ACCURACY_COLUMNS = ("test_accuracy_percent", "deviation_percent")


def column_key(columns: Sequence[str], name: str) -> style.Key:
    """Return the look of a method: plain training is grey, those beyond all colours are dotted."""
    if name == REFERENCE_COLUMN:
        # no other method has this shape
        return style.Key(name, "<", "-")
    index = [column for column in columns if column != REFERENCE_COLUMN].index(name)
    look = style.size_style(range(len(columns)), index)._replace(text=name, line="-")
    if index >= len(style.SIZES):
        look = look._replace(line=":")
    return look


def column_keys(columns: Sequence[str], names: Iterable[str]) -> list[style.Key]:
    """Return the legend's entries for the lines of some of the columns."""
    return [column_key(columns, name)._replace(marker="") for name in names]


def draw_study_accuracy(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Draw mean test accuracy against the global batch, in a band of one standard deviation."""
    lines: dict[str, list[Entry]] = {}
    shown = [table.reference] if table.reference else []
    for name in table.columns:
        if line := [entry for entry in table.line(name) if entry.test]:
            lines[name] = line
            shown += line
    if not lines:
        return Missing("study_accuracy", "accuracy against batch", study_results.no_result(table))
    names = list(lines)
    at_ends = labels.have_room(names)
    title = _accuracy_title(table)
    with style.new_figure(title, 3.9) as (figure, (axes,)):
        right = 0.06 + 0.0145 * max(map(len, names)) if at_ends else 0.05
        style.batch_axis(axes, table.batches, style.BATCH_LABEL, right=right)
        accuracy_axis(axes, shown)
        ends = [_draw_line(axes, entries, table.columns) for entries in lines.values()]
        across = None
        if table.reference and table.reference.test:
            across = _draw_small_batch(axes, table.reference)
        if at_ends:
            labels.label_ends(axes, ends, across=across)
        else:
            style.legend(axes, [end.key for end in ends], left=-0.02)
    dashed = ""
    if across is not None:
        dashed = " The dashed line is plain training with the small batch."
    of_seeds = ", of one seed"
    if table.has_deviations:
        of_seeds = (
            "; the mean over the seeds, in a band (or bar) of one standard deviation to each side"
        )
    hollow = ""
    if any(entry.diverged for entry in chain.from_iterable(lines.values())):
        hollow = " Hollow marks: some of the runs diverged and are not in the mean."
    caption = (
        f"Test accuracy at the end of training against the global batch{of_seeds}.{dashed} All "
        f"have the same number of epochs.{hollow}"
    )
    return Drawing("study_accuracy", title, caption, figure, _accuracy_table(shown))


def _in_percent(value: SeedMean | None) -> tuple[float, float]:
    if value is None:
        return 0.0, 0.0
    return 100 * value.mean, 100 * (value.deviation or 0.0)


def accuracy_axis(axes: Axes, entries: Iterable[Entry]) -> None:
    """Set a y axis for accuracies in percent; not from zero, so that differences are visible."""
    values: list[float] = []
    for entry in entries:
        if entry.test:
            deviation = entry.test.deviation or 0.0
            values += [100 * (entry.test.mean - deviation), 100 * (entry.test.mean + deviation)]
    low, high = min(values), max(values)
    margin = 0.08 * max(high - low, 1.0)
    axes.set_ylim(max(0.0, low - margin), min(101.0, high + margin))
    style.even_ticks(axes.yaxis, 7)
    axes.set_ylabel("test accuracy, %")


def _draw_line(axes: Axes, entries: Sequence[Entry], columns: Sequence[str]) -> labels.EndLabel:
    key = column_key(columns, entries[0].column)
    batches = [entry.batch for entry in entries]
    means, deviations = np.array([_in_percent(entry.test) for entry in entries]).T
    axes.plot(batches, means, key.line, marker=key.marker, color=key.colour, zorder=3)
    partial = np.array([entry.diverged > 0 for entry in entries])
    hollow = np.array(batches)[partial], means[partial]
    axes.plot(*hollow, key.marker, color=key.colour, markerfacecolor="white", zorder=4)
    if len(batches) > 1:
        band = means - deviations, means + deviations
        axes.fill_between(batches, *band, color=key.colour, alpha=0.13, linewidth=0)
    else:
        axes.errorbar(batches, means, deviations, color=key.colour, capsize=3, linewidth=1.2)
    return labels.EndLabel(batches[-1], float(means[-1]), key)


def _draw_small_batch(axes: Axes, small: Entry) -> float:
    """Draw a line across the panel; return its height."""
    mean, deviation = _in_percent(small.test)
    axes.axhspan(mean - deviation, mean + deviation, color=style.SHADE.light, zorder=0)
    axes.axhline(mean, color=style.INK.light, linewidth=1, linestyle=DASHES, zorder=1)
    text = f"{small.column} at B = {small.batch:,}: {study_results.percent(small.test)}"
    # the text is at the right, since there is most room above large batches that lost accuracy
    right = ("axes fraction", "data")
    style.annotate_near(axes, text, (0.99, mean), (0, 4), xycoords=right, ha="right", size=8)
    return mean


def _accuracy_title(table: StudyTable) -> str:
    largest = table.batches[-1]
    leaders = table.leaders(largest)
    plain = table.entries.get((REFERENCE_COLUMN, largest))
    if not leaders:
        return "Test accuracy against the global batch"
    names = [entry.column for entry in leaders]
    reach = "reach" if len(names) > 1 else "reaches"
    title = f"At B = {largest:,} {listed(names)} {reach} {study_results.percent(leaders[0].test)}"
    if plain is None or plain.test is None or REFERENCE_COLUMN in names:
        return title
    return f"{title}, plain large-batch training {study_results.percent(plain.test)}"


def _accuracy_table(entries: Iterable[Entry]) -> Table:
    columns = ("method", "global_batch_samples", *ACCURACY_COLUMNS, "runs")
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        if entry.test:
            mean, deviation, runs = entry.test
            spread = (100 * mean, in_percent(deviation))
            rows.append((entry.column, entry.batch, *spread, runs))
    return Table(columns, rows)


# (epoch, percent)
EpochCurve = list[tuple[float, float]]


def draw_study_epochs(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Draw mean test accuracy after each evaluated epoch, in panels for at most three batches."""
    panels_of: dict[int, dict[str, EpochCurve]] = {}
    for batch in _spread_out(table.batches):
        for name in table.columns:
            curve = _mean_curve(contents, name, batch)
            if curve:
                panels_of.setdefault(batch, {})[name] = curve
    if not panels_of:
        why = study_results.no_result(table)
        if any(entry.missing for entry in table.entries.values()):
            why = "no training has finished an epoch yet"
        return Missing("study_epochs", "accuracy over the epochs", why)
    small = _mean_curve(contents, REFERENCE_COLUMN, contents.study.small_batch)
    names = sorted(set().union(*panels_of.values()), key=table.columns.index)
    keys = column_keys(table.columns, names)
    dashed = ""
    if small:
        keys.append(style.Key("small batch", line="--", colour=style.INK.light))
        dashed = " Dashed: plain training with the small batch."
    purpose = "were the trainings long enough to compare their ends?"
    title = f"Test accuracy over the epochs: {purpose}"
    count = len(panels_of)
    with style.new_figure(title, 0.6 + 2.1 * count, ratios=[1] * count) as (figure, panels):
        for axes, (batch, curves) in zip(panels, panels_of.items(), strict=True):
            _draw_curves(axes, curves, small, table)
            axes.set_ylabel(f"test accuracy, %\nB = {batch:,}")
        style.epoch_axis(panels[-1])
        style.legend(panels[0], keys, left=-0.02)
    caption = (
        f"Test accuracy after each evaluated epoch, mean over the seeds.{dashed} Lines that still "
        "rise at the end are trainings that were cut short."
    )
    numbers = {contents.study.small_batch: {REFERENCE_COLUMN: small}}
    for batch, curves in panels_of.items():
        numbers[batch] = numbers.get(batch, {}) | curves
    return Drawing("study_epochs", title, caption, figure, _curve_table(numbers))


def _spread_out(batches: Sequence[int]) -> list[int]:
    """Return all batches if they are few, else the smallest, the middle and the largest."""
    if len(batches) <= MOST_PANELS:
        return list(batches)
    return [batches[0], batches[len(batches) // 2], batches[-1]]


def _mean_curve(contents: StudyContents, column: str, batch: int) -> EpochCurve:
    """Return the mean accuracy at the epochs that every run has."""
    known = []
    for run in contents.of(column, batch):
        found = [(row.epoch, contents.accuracy(row)) for row in run.epochs]
        if scored := [pair for pair in found if not math.isnan(pair[1])]:
            known.append(dict(scored))
    if not known:
        return []
    curve: EpochCurve = []
    for epoch in sorted(set(known[0]).intersection(*known)):
        mean = float(np.mean([accuracies[epoch] for accuracies in known]))
        curve.append((epoch, 100 * mean))
    return curve


def _draw_curves(
    axes: Axes, curves: dict[str, EpochCurve], small: EpochCurve, table: StudyTable
) -> None:
    for name, curve in curves.items():
        key = column_key(table.columns, name)
        line = zip(*curve, strict=True)
        look = style.lone_mark(curve)
        axes.plot(*line, key.line, color=key.colour, linewidth=1.3, **look)
    if small:
        (dashed,) = axes.plot(*zip(*small, strict=True), color=style.INK.light, linewidth=1)
        dashed.set(linestyle=DASHES, **style.lone_mark(small))
    style.even_ticks(axes.yaxis, 6)
    last = max(curve[-1][0] for curve in curves.values())
    later: list[float] = []
    for curve in [*curves.values(), small]:
        later += [height for epoch, height in curve if epoch >= LATER * last]
    axes.set_ylim(max(0.0, min(later) - 2.0), max(later) + 2.0)


def _curve_table(panels_of: dict[int, dict[str, EpochCurve]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for batch, curves in panels_of.items():
        for name, curve in curves.items():
            rows += [(name, batch, *point) for point in curve]
    return Table(("method", "global_batch_samples", "epochs", "test_accuracy_percent"), rows)


GATED = ("ags", "static")


# δ with the entry that has it, ascending; all of one batch
DeltaLine = list[tuple[float, Entry]]


def delta_groups(contents: StudyContents) -> list[dict[float, str]]:
    """Return columns by δ, for each set of columns that differ in δ alone.

    Sets have at least two values of δ. Columns without a gate, where δ has no effect, are left out.
    """
    groups: dict[str, dict[float, str]] = {}
    for name in contents.study.columns:
        spec = study_column(contents.sweep, name, check_paths=False)
        if spec.training.method in GATED and spec.training.ags.gate != "none":
            groups.setdefault(_all_but_delta(spec), {}).setdefault(spec.training.ags.delta, name)
    return [group for group in groups.values() if len(group) > 1]


def _all_but_delta(spec: SweepSpec) -> str:
    """Return a column's other settings as text to compare, whether given or of the preset."""
    options = spec.training.ags._replace(delta=0.0)
    given = spec.training.model_dump(mode="json", exclude={*options._fields, "preset"})
    return json.dumps([spec.workload.model_dump(mode="json"), given, options])


def draw_study_delta(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Draw mean test accuracy against δ, a line for each batch and set of columns."""
    lines = _delta_lines(contents, table)
    if not lines:
        why = "no two columns with results differ in training.delta alone"
        return Missing("study_delta", "ablation of δ", why)
    title = _delta_title(lines)
    points = list(chain.from_iterable(lines))
    every_delta, entries = zip(*points, strict=True)
    deltas = sorted(set(every_delta))
    with style.new_figure(title, 3.4) as (figure, (axes,)):
        axes.set_xscale("log")
        ends = [_draw_delta_line(axes, line, table) for line in lines]
        at_ends = labels.have_room([end.key.text for end in ends])
        for_names = (deltas[-1] / deltas[0]) ** 0.22 if at_ends else 1.0
        axes.set_xlim(deltas[0] / 1.15, deltas[-1] * for_names * 1.1)
        style.named_ticks(axes, deltas, lambda delta: format_number(delta, 3))
        axes.set_xlabel("threshold δ of the gradient's relative change Δ(G)")
        accuracy_axis(axes, entries)
        if at_ends:
            labels.label_ends(axes, ends)
        else:
            style.legend(axes, list(dict.fromkeys(end.key for end in ends)), left=-0.02)
    bars = ""
    if table.has_deviations:
        bars = " Bars: one standard deviation over the seeds to each side."
    caption = (
        "Test accuracy at the end of training against the threshold δ; gradients are scaled while "
        f"Δ(G) is below δ. The columns shown differ in nothing else.{bars}"
    )
    return Drawing("study_delta", title, caption, figure, _delta_table(points))


def _delta_lines(contents: StudyContents, table: StudyTable) -> list[DeltaLine]:
    lines = []
    for group in delta_groups(contents):
        for batch in table.batches:
            entries = [(delta, table.entries[name, batch]) for delta, name in sorted(group.items())]
            line = [(delta, entry) for delta, entry in entries if entry.test]
            if len(line) > 1:
                lines.append(line)
    return lines


def _draw_delta_line(axes: Axes, line: DeltaLine, table: StudyTable) -> labels.EndLabel:
    batch = line[0][1].batch
    look = style.size_style(table.batches, batch)._replace(text=f"B = {batch:,}", line="-")
    rows = [(delta, *_in_percent(entry.test)) for delta, entry in line]
    deltas, means, bars = zip(*rows, strict=True)
    axes.errorbar(
        deltas, means, bars, fmt=f"{look.marker}-", color=look.colour, capsize=3, elinewidth=1
    )
    return labels.EndLabel(deltas[-1], means[-1], look)


def _delta_title(lines: Sequence[DeltaLine]) -> str:
    line = max(lines, key=lambda line: line[0][1].batch)
    # a mean without its diverged runs cannot be compared
    sound = [(delta, entry) for delta, entry in line if not entry.diverged] or line
    delta, best = max(sound, key=lambda point: _in_percent(point[1].test)[0])
    others = [e for _, e in sound if e is not best and study_results.within_one_deviation(e, best)]
    which = f"{best.column} with δ = {format_number(delta, 3)}"
    title = f"At B = {best.batch:,}, {which} has the highest of {len(line)} means"
    if not others:
        return title
    verb = "is" if len(others) == 1 else "are"
    return f"{title}; {plural(len(others), 'other')} {verb} within its standard deviation"


def _delta_table(points: DeltaLine) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (entry.column, delta, entry.batch, *_in_percent(entry.test)) for delta, entry in points
    ]
    return Table(("method", "delta", "global_batch_samples", *ACCURACY_COLUMNS), rows)
