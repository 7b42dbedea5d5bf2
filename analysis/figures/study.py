"""Accuracy of a study's methods: against the batch, and over the epochs.

Ablation of δ: columns of a study that differ in the threshold of Δ(G) alone.

How large the gradient scale was that a study's methods used: densities over the steps of all seeds.

The table of a study as a figure: methods down, batches across, the better the darker.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures.gradients import draw_used
from tula_hpc.analysis.figures.gradients import used_scales as histogram_of
from tula_hpc.analysis.study_results import (
    CSV_COLUMNS,
    Entry,
    StudyContents,
    StudyTable,
    answer,
    csv_rows,
    listed,
    no_result,
    percent,
    signed,
    within_one_deviation,
)
from tula_hpc.config import REFERENCE_COLUMN, SweepSpec, study_column
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import Metrics

MOST_PANELS = 3
# in a row, with six for each entry's line and the gap after it
LEGEND_CHARACTERS = 100
# the first quarter of the epochs may lie below the panel: the ends are compared
LATER = 0.25


def column_style(columns: Sequence[str], name: str) -> style.SizeStyle:
    """Colour and marker of a method: by its place among the others; plain training is grey."""
    if name == REFERENCE_COLUMN:
        return style.SizeStyle(style.MUTED.light, "o")
    return style.size_style(
        range(len(columns)), [c for c in columns if c != REFERENCE_COLUMN].index(name)
    )


def line_style(columns: Sequence[str], name: str) -> Literal["-", ":"]:
    """Whole lines until the colours are used up, then dotted ones."""
    others = [c for c in columns if c != REFERENCE_COLUMN]
    return "-" if name == REFERENCE_COLUMN or others.index(name) < len(style.SIZES) else ":"


def column_keys(columns: Sequence[str], names: Sequence[str]) -> list[style.Key]:
    """Entries of a legend of lines, for some of the columns."""
    return [
        style.Key(n, line=line_style(columns, n), colour=column_style(columns, n).colour)
        for n in names
    ]


def draw_study_accuracy(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean test accuracy against the global batch with a band of one standard deviation, and the small batch's line."""
    lines = {
        name: [e for b in table.batches if (e := table.entries[name, b]).test]
        for name in table.columns
    }
    lines = {name: entries for name, entries in lines.items() if entries}
    if not lines:
        return Missing("study_accuracy", "accuracy against batch", no_result(table))
    title = _accuracy_title(table)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.9)
        beside, longest = labels.have_room(list(lines)), max(map(len, lines))
        style.batch_axis(
            axes, table.batches, "global batch B", right=0.06 + 0.0145 * longest if beside else 0.05
        )
        accuracy_axis(
            axes, heights([*(e for entries in lines.values() for e in entries), table.reference])
        )
        ends = [_draw_line(axes, entries, table.columns) for entries in lines.values()]
        across = None
        if table.reference is not None and table.reference.test is not None:
            _draw_small_batch(axes, table.reference)
            across = 100 * table.reference.test.mean
        if beside:
            labels.label_ends(axes, ends, across=across)
        else:
            style.legend(
                axes, [end.key for end in ends], columns=legend_columns(list(lines)), left=-0.02
            )
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
    partial = [
        (entry.batch, mean) for entry, mean in zip(entries, means, strict=True) if entry.diverged
    ]
    axes.plot(
        *np.array(partial).reshape(-1, 2).T,
        look.marker,
        color=look.colour,
        markerfacecolor="white",
        zorder=4,
    )
    if len(batches) > 1:
        axes.fill_between(
            batches,
            means - deviations,
            means + deviations,
            color=look.colour,
            alpha=0.13,
            linewidth=0,
        )
    else:
        axes.errorbar(batches, means, deviations, color=look.colour, capsize=3, linewidth=1.2)
    return labels.EndLabel(
        batches[-1], float(means[-1]), entries[0].column, look.colour, look.marker, line
    )


def _draw_small_batch(axes: Axes, small: Entry) -> None:
    mean = 100 * (small.test.mean if small.test else 0.0)
    deviation = 100 * ((small.test.deviation if small.test else None) or 0.0)
    axes.axhspan(mean - deviation, mean + deviation, color=style.SHADE.light, zorder=0)
    axes.axhline(mean, color=style.INK.light, linewidth=1, linestyle=(0, (5, 3)), zorder=1)
    axes.annotate(
        f"{small.column} at B = {small.batch:,}: {percent(small.test)}",
        # where the large batches have lost, most room is above them
        (0.99, mean),
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
            rows.append(
                (entry.column, entry.batch, 100 * entry.test.mean, deviation, entry.test.runs)
            )
    return Table(
        ("method", "global_batch_samples", "test_accuracy_percent", "deviation_percent", "runs"),
        rows,
    )


def draw_study_epochs(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean test accuracy after each evaluated epoch, a panel for each of the batches (three at most)."""
    shown = _spread_out(table.batches)
    curves = {
        (name, batch): _mean_curve(contents, name, batch)
        for batch in shown
        for name in table.columns
    }
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
        figure, panels = style.new_figure(
            title, 0.6 + 2.1 * len(batches), ratios=[1] * len(batches)
        )
        for axes, batch in zip(panels, batches, strict=True):
            _draw_curves(
                axes,
                {name: curve for (name, b), curve in curves.items() if b == batch},
                small,
                table,
            )
            axes.set_ylabel(f"test accuracy, %\nB = {batch:,}")
        panels[-1].set_xlabel("epochs")
        style.legend(
            panels[0], _keys(table, names, bool(small)), columns=legend_columns(names), left=-0.02
        )
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
    known = [
        {row.epoch: contents.accuracy(row) for row in run.epochs} for run in runs if run.epochs
    ]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    return [
        (epoch, 100 * float(np.mean([accuracies[epoch] for accuracies in known])))
        for epoch in shared
    ]


def _draw_curves(
    axes: Axes,
    curves: dict[str, list[tuple[float, float]]],
    small: list[tuple[float, float]],
    table: StudyTable,
) -> None:
    for name, curve in curves.items():
        colour, line = column_style(table.columns, name).colour, line_style(table.columns, name)
        axes.plot(*zip(*curve, strict=True), line, color=colour, linewidth=1.3)
    if small:
        axes.plot(
            *zip(*small, strict=True), color=style.INK.light, linewidth=1, linestyle=(0, (5, 3))
        )
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    last = max(epoch for curve in curves.values() for epoch, _ in curve)
    later = [
        height
        for curve in [*curves.values(), small]
        for epoch, height in curve
        if epoch >= LATER * last
    ]
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
    rows: list[tuple[Cell, ...]] = [
        (*place, *point) for place, curve in curves.items() for point in curve
    ]
    return Table(("method", "global_batch_samples", "epochs", "test_accuracy_percent"), rows)


# methods that have a δ
GATED = ("ags", "static")


class Point(NamedTuple):
    """One column at one batch."""

    delta: float
    entry: Entry


def delta_groups(contents: StudyContents) -> list[dict[float, str]]:
    """Columns by δ, for each set of columns that are the same otherwise; sets with at least two values of δ.

    Without a gate δ does nothing.
    """
    groups: dict[str, dict[float, str]] = {}
    for name in contents.study.columns:
        spec = study_column(contents.sweep, name, check_paths=False)
        if spec.training.method in GATED and spec.training.ags.gate != "none":
            groups.setdefault(_all_but_delta(spec), {}).setdefault(spec.training.ags.delta, name)
    return [group for group in groups.values() if len(group) > 1]


def _all_but_delta(spec: SweepSpec) -> str:
    """What else a column is, for comparison; whether a key is given or comes from the preset makes no difference."""
    options = spec.training.ags._replace(delta=0.0)
    given = spec.training.model_dump(mode="json", exclude={*options._fields, "preset"})
    return json.dumps([spec.workload.model_dump(mode="json"), given, options])


def draw_study_delta(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean test accuracy against δ, a line for each batch and set of columns."""
    lines = {
        (i, batch): points
        for i, group in enumerate(delta_groups(contents))
        for batch in table.batches
        if len(points := _points(group, table, batch)) > 1
    }
    if not lines:
        return Missing(
            "study_delta",
            "ablation of δ",
            "no two columns with results differ in training.delta alone",
        )
    title = _delta_title(lines)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        deltas = sorted({point.delta for points in lines.values() for point in points})
        axes.set_xscale("log")
        beside = labels.have_room([f"B = {batch:,}" for _, batch in lines])
        for_names = (deltas[-1] / deltas[0]) ** 0.22 if beside else 1.0
        axes.set_xlim(deltas[0] / 1.15, deltas[-1] * for_names * 1.1)
        style.named_ticks(axes, deltas, lambda delta: format_number(delta, 3))
        axes.set_xlabel("threshold δ of the gradient's relative change Δ(G)")
        accuracy_axis(axes, heights([point.entry for points in lines.values() for point in points]))
        ends = [_draw(axes, points, table, batch) for (_, batch), points in lines.items()]
        if beside:
            labels.label_ends(axes, ends)
        else:
            style.legend(axes, list(dict.fromkeys(end.key for end in ends)), columns=6, left=-0.02)
    caption = (
        "Test accuracy at the end of training against the threshold δ; gradients are scaled where Δ(G) is below, and "
        "with a smooth gate the less the larger Δ(G)/δ is. The columns shown differ in nothing else. Bars: one "
        "standard deviation over the seeds to each side."
    )
    return Drawing("study_delta", title, caption, figure, _delta_table(lines))


def _points(group: dict[float, str], table: StudyTable, batch: int) -> list[Point]:
    points = (Point(delta, table.entries[name, batch]) for delta, name in sorted(group.items()))
    return [point for point in points if point.entry.test]


def _draw(axes: Axes, points: list[Point], table: StudyTable, batch: int) -> labels.EndLabel:
    look = style.size_style(table.batches, batch)
    means = [100 * point.entry.test.mean for point in points if point.entry.test]
    bars = [100 * (point.entry.test.deviation or 0.0) for point in points if point.entry.test]
    deltas = [point.delta for point in points]
    axes.errorbar(
        deltas, means, bars, fmt=f"{look.marker}-", color=look.colour, capsize=3, elinewidth=1
    )
    return labels.EndLabel(deltas[-1], means[-1], f"B = {batch:,}", look.colour, look.marker)


def _delta_title(lines: dict[tuple[int, int], list[Point]]) -> str:
    (_, batch), points = max(lines.items(), key=lambda item: item[0][1])
    best = max(points, key=lambda point: point.entry.test.mean if point.entry.test else 0.0)
    return f"At B = {batch:,}, {best.entry.column} with δ = {format_number(best.delta, 3)} is the best of {len(points)}"


def _delta_table(lines: dict[tuple[int, int], list[Point]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            p.entry.column,
            p.delta,
            batch,
            100 * p.entry.test.mean,
            100 * (p.entry.test.deviation or 0.0),
        )
        for (_, batch), points in lines.items()
        for p in points
        if p.entry.test
    ]
    return Table(
        ("method", "delta", "global_batch_samples", "test_accuracy_percent", "deviation_percent"),
        rows,
    )


# of the scales, relative: less is one value and no density
LEAST_SPREAD = 1e-3
POINTS = 200

Values = NDArray[np.float64]


def used_scales(runs: Iterable[Metrics]) -> Values:
    """Mean factors on the gradient, of all lines of all runs, (lines,)."""
    found = (row.applied_scale for run in runs for row in run.steps)
    return np.array([value for value in found if value is not None and np.isfinite(value)])


def draw_study_scale(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """A density of the scale used for each method that has one, a panel for each batch."""
    scales = {
        (b, name): used_scales(contents.of(name, b))
        for b in table.batches
        for name in table.columns
    }
    scales = {
        place: values for place, values in scales.items() if len(values) > 1 and np.ptp(values) > 0
    }
    batches = [batch for batch in table.batches if any(b == batch for b, _ in scales)]
    if not batches:
        return Missing(
            "study_scale",
            "density of the scale used",
            "no training logged a gradient scale that varies",
        )
    title = _scale_title(scales, batches[-1])
    with style.styled():
        figure, panels = style.new_figure(
            title, 0.6 + 1.7 * len(batches), ratios=[1] * len(batches)
        )
        everything = np.concatenate([*scales.values(), np.ones(1)])
        label = "factor on the gradient, mean over parameters"
        if wide := _is_wide(everything):
            # of all panels
            style.amount_axis(panels[-1], everything, label)
        else:
            panels[-1].set_xlabel(label)
        for axes, batch in zip(panels, batches, strict=True):
            here = {name: values for (b, name), values in scales.items() if b == batch}
            _draw_scales_of_batch(axes, here, table.columns, wide=wide)
            axes.set_ylabel(f"density\nB = {batch:,}")
        names = [name for name in table.columns if any(n == name for _, n in scales)]
        style.legend(
            panels[0], column_keys(table.columns, names), columns=legend_columns(names), left=-0.02
        )
    caption = (
        "How often gradients were multiplied by which factor, over all logged steps of all seeds (a Gaussian kernel "
        "density): the mean factor over all parameters and over the steps between two lines of the log, of which those "
        "that the gate left alone count as 1, and those that used a part of the scale, as in its warm-up, by that "
        "part. The vertical line is 1, no scaling."
    ) + (" Densities are those of the factor's natural logarithm." if wide else "")
    return Drawing("study_scale", title, caption, figure, _scale_table(scales))


def density(values: Values, at: Values) -> Values:
    """Gaussian kernel density at these places, with Scott's bandwidth; of one value almost: a narrow bell there."""
    if np.ptp(values) > LEAST_SPREAD * max(1.0, float(np.abs(values).max())):
        return np.asarray(gaussian_kde(values)(at), dtype=np.float64)
    width = max((at[-1] - at[0]) / 60, LEAST_SPREAD)
    return np.asarray(
        np.exp(-0.5 * ((at - values.mean()) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    )


def _is_wide(factors: Values) -> bool:
    """Whether they need a logarithmic axis; none can have one with a factor of 0."""
    return bool(factors.min() > 0 and factors.max() > style.LOG_RATIO * factors.min())


def _draw_scales_of_batch(
    axes: Axes, scales: dict[str, Values], columns: Sequence[str], *, wide: bool
) -> None:
    drawn = {name: np.log(values) if wide else values for name, values in scales.items()}
    # where nothing is scaled
    everything = np.concatenate([*drawn.values(), np.full(1, 0.0 if wide else 1.0)])
    margin = 0.2 * max(float(np.ptp(everything)), 0.1)
    least = everything.min() - margin
    at = np.linspace(least if wide else max(0.0, least), everything.max() + margin, POINTS)
    for name, values in drawn.items():
        colour, heights, x = (
            column_style(columns, name).colour,
            density(values, at),
            np.exp(at) if wide else at,
        )
        axes.plot(x, heights, line_style(columns, name), color=colour)
        axes.fill_between(x, heights, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(1, color=style.MUTED.light, linewidth=1)
    axes.set_ylim(bottom=0)


def _scale_title(scales: dict[tuple[int, str], Values], batch: int) -> str:
    means = [(name, float(values.mean())) for (b, name), values in scales.items() if b == batch]
    words = ", ".join(f"{name} by {format_number(mean, 3)}" for name, mean in means[:3])
    return f"At B = {batch:,} gradients were multiplied on average: {words}"


def _scale_table(scales: dict[tuple[int, str], Values]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            batch,
            len(values),
            float(values.mean()),
            *(float(q) for q in np.quantile(values, [0.05, 0.5, 0.95])),
        )
        for (batch, name), values in scales.items()
    ]
    columns = (
        "method",
        "global_batch_samples",
        "logged_lines",
        "mean_scale",
        "low_5",
        "median",
        "high_95",
    )
    return Table(columns, rows)


def draw_study_scale_elements(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Density of the scale over single elements at the largest batch, where training.scale_histogram counted them."""
    batch = table.batches[-1]
    steps = {
        name: [row for run in contents.of(name, batch) for row in run.steps]
        for name in table.columns
    }
    found = [used for name, rows in steps.items() if (used := histogram_of(name, rows)) is not None]
    if not found:
        why = "no training had training.scale_histogram"
        return Missing(
            "study_scale_elements", "density of the scale over elements", why, optional=True
        )
    drawing = draw_used(found[: len(style.SIZES)], "study_scale_elements")
    return drawing._replace(caption=f"At B = {batch:,}, all seeds. {drawing.caption}")


ROW_IN = 0.6
# of the width, for the methods' names
NAME_SHARE = 0.22
# that fit into it
NAME_CHARACTERS = 17
# batches beside one another; more are in several blocks, one below the other
MOST_ACROSS = 5
# so many batches leave each cell room for a long line
ROOMY = 3
# opacity of the best
DARKEST = 0.5
# height of the legend, with the margin
KEYS_IN = 0.35
NOTE_ROWS = 0.6
BACK = "back: the share of what lbt lost against the small batch that was won back; below 0 % more was lost"


def draw_study_table(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean and deviation of test accuracy, train accuracy and the recovered share in every cell."""
    if not any(entry.settled for entry in table.entries.values()):
        return Missing("study_table", "table of methods and batches", no_result(table))
    title = answer(table).removesuffix(".")
    blocks, block_rows = _blocks(table.batches), 1 + len(table.columns)
    rows = block_rows * len(blocks)
    lines = rows + (table.reference is not None) + (NOTE_ROWS if _any_back(table) else 0.0)
    with style.styled():
        figure, (axes,) = style.new_figure(title, ROW_IN * lines + KEYS_IN)
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(lines, 0)
        for place, batches in enumerate(blocks):
            _draw_block(axes, table, batches, place * block_rows, len(blocks[0]))
        if table.reference is not None:
            _draw_reference(axes, table.reference, rows + 0.5)
        if _any_back(table):
            axes.text(0, lines - 0.5, BACK, va="center", size=8, color=style.MUTED.light)
        style.legend(axes, _mark_keys(table), left=0.0)
    return Drawing(
        "study_table", title, _caption(contents), figure, Table(CSV_COLUMNS, csv_rows(table))
    )


def _blocks(batches: Sequence[int]) -> list[Sequence[int]]:
    """As few as there can be, of about equal length."""
    across = math.ceil(len(batches) / math.ceil(len(batches) / MOST_ACROSS))
    return [batches[first : first + across] for first in range(0, len(batches), across)]


def _draw_block(
    axes: Axes, table: StudyTable, batches: Sequence[int], top: int, across: int
) -> None:
    """All methods at these batches, in columns as wide as if there were `across`."""
    width = (1 - NAME_SHARE) / across
    for place, batch in enumerate(batches):
        left = NAME_SHARE + place * width
        axes.text(
            left + width / 2, top + 0.6, f"B = {batch:,}", ha="center", color=style.MUTED.light
        )
        _draw_row(axes, table.row(batch), (left, top + 1), width, roomy=across <= ROOMY)
    for place, name in enumerate(table.columns):
        text = textwrap.fill(name, NAME_CHARACTERS)
        axes.text(0, top + 1.5 + place, text, va="center", weight="bold", linespacing=1.0)


def _any_back(table: StudyTable) -> bool:
    """Whether any cell says how much came back."""
    return any(
        entry.recovered is not None
        for entry in table.entries.values()
        if entry.column != REFERENCE_COLUMN
    )


def _mark_keys(table: StudyTable) -> list[style.Key]:
    """What colour and frames mean, where there are any."""
    if not any(entry.mark for entry in table.entries.values()):
        return []
    return [
        style.Key("darker: better at its batch", "s", colour=style.SIZES[5].light),
        style.Key(
            "best (bold) or within one deviation of it", "s", hollow=True, colour=style.INK.light
        ),
        style.Key("worst", "s", hollow=True, colour=style.ALERT.light),
    ]


def _draw_row(
    axes: Axes, row: list[Entry], corner: tuple[float, float], width: float, *, roomy: bool
) -> None:
    left, top = corner
    means = [entry.test.mean for entry in row if entry.test]
    low, high = min(means, default=0.0), max(means, default=1.0)
    best = next((entry for entry in row if entry.mark == "best"), None)
    for place, entry in enumerate(row):
        share = (entry.test.mean - low) / (high - low) if entry.test and high > low else 0.0
        box = (left + 0.04 * width, top + 0.06 + place), 0.92 * width, 0.88
        axes.add_patch(
            Rectangle(*box, color=style.SIZES[5].light, alpha=DARKEST * share, linewidth=0)
        )
        leads = best is not None and within_one_deviation(entry, best)
        if leads or entry.mark == "worst":
            edge = style.INK.light if leads else style.ALERT.light
            axes.add_patch(Rectangle(*box, fill=False, edgecolor=edge, linewidth=1.4))
        _write(axes, entry, left + width / 2, top + 0.5 + place, roomy=roomy)


def _write(axes: Axes, entry: Entry, x: float, y: float, *, roomy: bool) -> None:
    text = percent(entry.test) if entry.test else "diverged" if entry.diverged else "no result"
    colour = style.ALERT.light if entry.mark == "worst" else style.INK.light
    weight = "bold" if entry.mark == "best" else "normal"
    achieved, counts = _achieved(entry), _counts(entry)
    lines = (
        [line for line in (", ".join(achieved), ", ".join(counts)) if line]
        if roomy
        else [*achieved, *counts]
    )
    size = None if roomy else 8
    head, first, pitch = _rows(len(lines))
    axes.text(x, y + head, text, ha="center", va="center", color=colour, weight=weight, size=size)
    for place, line in enumerate(lines):
        height = y + first + pitch * place
        axes.text(
            x,
            height,
            line,
            ha="center",
            va="center",
            size=7 if roomy else 6,
            color=style.MUTED.light,
        )


def _rows(lines: int) -> tuple[float, float, float]:
    """In a cell with so many small lines: accuracy and first line, from the middle, and from one line to the next."""
    if lines < 3:
        return -0.12 * lines, 0.27 - 0.12 * lines, 0.22
    return (-0.29, -0.08, 0.18) if lines == 3 else (-0.35, -0.19, 0.14)


def _achieved(entry: Entry) -> list[str]:
    parts = [f"train {100 * entry.train.mean:.1f}"] if entry.train else []
    if entry.recovered is not None and entry.column != REFERENCE_COLUMN:
        parts.append(f"{signed(entry.recovered)} back")
    return parts


def _counts(entry: Entry) -> list[str]:
    runs = entry.diverged + entry.failed + entry.missing + (entry.test.runs if entry.test else 0)
    counts = [(getattr(entry, name), name) for name in ("diverged", "failed", "missing")]
    return [f"{count} of {runs} {name}" for count, name in counts if count]


def _draw_reference(axes: Axes, small: Entry, y: float) -> None:
    train = f", train {100 * small.train.mean:.1f}" if small.train else ""
    text = f"small batch: {small.column} at B = {small.batch:,}: {percent(small.test)}{train}"
    axes.text(0, y, text, va="center", color=style.INK.light)


def _caption(contents: StudyContents) -> str:
    kind = "top-5 accuracy" if contents.study.metric == "top5" else "accuracy"
    epochs, seeds = plural(contents.sweep.workload.epochs, "epoch"), len(contents.study.seeds)
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "of one seed"
    return (
        f"Test {kind} at the end of {epochs}, {over}; below it the accuracy on training samples, and how much of what "
        "plain large-batch training (lbt) lost against the small batch came back; below 0 % more was lost. The darker, "
        "the higher the mean among those of its batch. Framed dark: best of the batch (bold), or within one standard "
        "deviation of it; framed red: worst. Runs that diverged are counted and not in the means; for the frames they "
        "count as 0."
    )
