"""Ablation of δ: columns of a study that differ in the threshold of Δ(G) alone."""

from __future__ import annotations

import json
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis import figures_labels as labels
from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures_study_lines import accuracy_axis, heights
from tula_hpc.analysis.formatting import format_number
from tula_hpc.analysis.study_data import StudyContents
from tula_hpc.analysis.study_table import Entry, StudyTable
from tula_hpc.config import SweepSpec, study_column

GATED = ("ags", "static")  # methods that have a δ


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
        return Missing("study_delta", "ablation of δ", "no two columns with results differ in training.delta alone")
    title = _title(lines)
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
    return Drawing("study_delta", title, caption, figure, _table(lines))


def _points(group: dict[float, str], table: StudyTable, batch: int) -> list[Point]:
    points = (Point(delta, table.entries[name, batch]) for delta, name in sorted(group.items()))
    return [point for point in points if point.entry.test]


def _draw(axes: Axes, points: list[Point], table: StudyTable, batch: int) -> labels.EndLabel:
    look = style.size_style(table.batches, batch)
    means = [100 * point.entry.test.mean for point in points if point.entry.test]
    bars = [100 * (point.entry.test.deviation or 0.0) for point in points if point.entry.test]
    deltas = [point.delta for point in points]
    axes.errorbar(deltas, means, bars, fmt=f"{look.marker}-", color=look.colour, capsize=3, elinewidth=1)
    return labels.EndLabel(deltas[-1], means[-1], f"B = {batch:,}", look.colour, look.marker)


def _title(lines: dict[tuple[int, int], list[Point]]) -> str:
    (_, batch), points = max(lines.items(), key=lambda item: item[0][1])
    best = max(points, key=lambda point: point.entry.test.mean if point.entry.test else 0.0)
    return f"At B = {batch:,}, {best.entry.column} with δ = {format_number(best.delta, 3)} is the best of {len(points)}"


def _table(lines: dict[tuple[int, int], list[Point]]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (p.entry.column, p.delta, batch, 100 * p.entry.test.mean, 100 * (p.entry.test.deviation or 0.0))
        for (_, batch), points in lines.items()
        for p in points
        if p.entry.test
    ]
    return Table(("method", "delta", "global_batch_samples", "test_accuracy_percent", "deviation_percent"), rows)
