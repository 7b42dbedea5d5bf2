"""Peak memory of a worker against its local batch, the limit, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.formatting import format_bytes, plural
from tula_hpc.analysis.report_data import Interval, RunContents, predicted, used_bytes
from tula_hpc.config import GIB
from tula_hpc.records import Configuration

FAR_ABOVE = 2.5  # a limit this many times above all else is named, not drawn to scale


class Usage(NamedTuple):
    """Everything that the memory figure draws, bytes per worker."""

    measured: list[tuple[Configuration, int]]
    predicted: dict[int, Interval]  # by local batch
    limit: int | None
    allowed: int | None  # what plans use of it: the limit less the margin
    largest: int | None  # largest local batch among the candidates that fits, where one does not
    out_of_memory: list[Configuration]

    @property
    def batches(self) -> list[int]:
        """Every local batch that occurs."""
        measured = {configuration.local_batch for configuration, _ in self.measured}
        return sorted(measured | set(self.predicted) | {item.local_batch for item in self.out_of_memory})

    @property
    def top(self) -> float:
        """The largest use that is known, bytes."""
        return max([used for _, used in self.measured] + [interval.high for interval in self.predicted.values()])


def draw_memory(run: RunContents) -> Drawing | Missing:
    """Measured and predicted peak memory per worker against the local batch."""
    usage = _usage(run)
    if not usage.measured and not usage.predicted:
        return Missing("memory", "memory", "no configuration has been measured yet")
    title = _title(usage)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.7)
        unit, unit_bytes = ("GiB", GIB) if usage.top >= GIB else ("MiB", GIB // 1024)
        style.batch_axis(axes, usage.batches, "local batch b (samples per step and worker)")
        _memory_axis(axes, usage, unit, unit_bytes)
        _draw_prediction(axes, usage, unit_bytes)
        _draw_measured(axes, usage, unit_bytes, run.cluster_sizes)
        _draw_bounds(axes, usage, unit_bytes)
        _draw_out_of_memory(axes, usage, unit_bytes, run.cluster_sizes)
        style.legend(axes, list(_keys(usage, run.cluster_sizes)), columns=7)
    return Drawing("memory", title, _caption(usage, run.memory_kinds), figure, _table(usage))


def _usage(run: RunContents) -> Usage:
    measured = [(item.configuration, used) for item in run.ok if (used := used_bytes(item)) is not None]
    limit = run.plan.memory_limit_bytes if run.plan else run.cluster.memory_limit_bytes if run.cluster else None
    margin = run.cluster.memory_margin if run.cluster else 0.0
    allowed = None if limit is None else int(limit * (1 - margin))
    candidates = sorted(run.plan.candidates if run.plan else (), key=lambda item: item.local_batch)
    line = {item.local_batch: predicted(item, "peak_memory_bytes") for item in candidates}
    bound = min((item.local_batch for item in run.out_of_memory), default=None)
    too_large = [
        batch
        for batch, peak in line.items()
        if (bound is not None and batch >= bound) or (allowed is not None and peak.value > allowed)
    ]
    fitting = [batch for batch in line if batch not in too_large]
    largest = max(fitting) if fitting and too_large else None
    if too_large:  # far beyond the bound there is nothing to see
        line = {batch: peak for batch, peak in line.items() if batch <= 2 * too_large[0]}
    return Usage(measured, line, limit, allowed, largest, run.out_of_memory)


def _memory_axis(axes: Axes, usage: Usage, unit: str, unit_bytes: int) -> None:
    """Up to the limit and what was measured; predictions far above the limit leave the panel."""
    top = usage.top
    if usage.limit is not None and usage.limit <= FAR_ABOVE * top:
        top = max([1.25 * usage.limit, *(used for _, used in usage.measured)])
    style.value_axis(axes, [top / unit_bytes], label=f"peak memory per worker, {unit}")


def _draw_prediction(axes: Axes, usage: Usage, unit_bytes: int) -> None:
    """Straight lines in b between the candidates, which the log2 axis bends."""
    if not usage.predicted:
        return
    known = list(usage.predicted)
    batches = np.geomspace(known[0], known[-1], 200)
    value, low, high = (
        np.interp(batches, known, np.array(ends) / unit_bytes) for ends in zip(*usage.predicted.values(), strict=True)
    )
    axes.fill_between(batches, low, high, color=style.MUTED.light, alpha=0.22, linewidth=0)
    axes.plot(batches, value, "-", color=style.INK.light, linewidth=1.4)


def _draw_measured(axes: Axes, usage: Usage, unit_bytes: int, sizes: list[int]) -> None:
    for configuration, used in usage.measured:
        look = style.size_style(sizes, configuration.nodes)
        axes.plot(
            [configuration.local_batch],
            [used / unit_bytes],
            look.marker,
            color=look.colour,
            fillstyle="none",  # cluster sizes lie on one another
            markeredgewidth=1.5,
            markersize=6.5,
            zorder=4,
        )


def _draw_bounds(axes: Axes, usage: Usage, unit_bytes: int) -> None:
    left = axes.get_xlim()[0] * 1.06
    if usage.limit is not None:
        y, top = usage.limit / unit_bytes, axes.get_ylim()[1]
        text = f"limit {format_bytes(usage.limit)}"
        if y < top:
            axes.axhline(y, color=style.ALERT.light, linewidth=1.2, linestyle=(0, (5, 3)))
        else:
            text, y = f"{text} (far above this axis)", top * 0.94
        if usage.allowed is not None and usage.allowed < usage.limit < top * unit_bytes:
            axes.axhline(usage.allowed / unit_bytes, color=style.ALERT.light, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            text, (left, y), xytext=(0, 3), textcoords="offset points", color=style.ALERT.light, size=8.5, weight="bold"
        )
    if usage.largest is not None:
        _draw_largest(axes, usage.largest, usage.batches)


def _draw_largest(axes: Axes, largest: int, batches: list[int]) -> None:
    beyond = min((batch for batch in batches if batch > largest), default=largest * 2)
    start = (largest * beyond) ** 0.5
    axes.axvspan(start, axes.get_xlim()[1], color=style.SHADE.light, zorder=0)
    axes.annotate(
        f"b = {largest:,} is the\nlargest that fits ",
        (start, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-5, 6),
        textcoords="offset points",
        ha="right",
        color=style.INK.light,
        size=8.5,
        weight="bold",
    ).set_in_layout(False)


def _draw_out_of_memory(axes: Axes, usage: Usage, unit_bytes: int, sizes: list[int]) -> None:
    """A cross at the limit, which was passed; where none is known, at the axis's upper edge."""
    top = axes.get_ylim()[1]
    y = top if usage.limit is None else min(top, usage.limit / unit_bytes)
    for configuration in usage.out_of_memory:
        colour = style.size_style(sizes, configuration.nodes).colour
        axes.plot(
            [configuration.local_batch],
            [y],
            "x",
            color=colour,
            markersize=8,
            markeredgewidth=2.2,
            clip_on=False,
            zorder=5,
        )


def _keys(usage: Usage, sizes: list[int]) -> Iterable[style.Key]:
    for nodes in sorted({configuration.nodes for configuration, _ in usage.measured}):
        look = style.size_style(sizes, nodes)
        yield style.Key(f"N = {nodes}", marker=look.marker, hollow=True, colour=look.colour)
    if usage.predicted:
        yield style.Key("predicted", line="-", colour=style.INK.light)
    if any(interval.low < interval.high for interval in usage.predicted.values()):
        yield style.Key("90 % interval", line="-", band=True)
    if usage.out_of_memory:
        yield style.Key("ran out of memory", marker="x")


def _title(usage: Usage) -> str:
    growth = _growth(usage)
    title = (
        f"A worker needs {format_bytes(growth)} for each further sample of its batch"
        if growth
        else "Memory of a worker"
    )
    if usage.largest is not None:
        return f"{title}; {plural(usage.largest, 'sample')} fit, the next candidate does not"
    if usage.predicted and usage.limit is not None:
        return f"{title}; every candidate fits"
    return title


def _growth(usage: Usage) -> float | None:
    """Bytes per further sample: between the smallest and the largest batch, predicted or else measured."""
    points = [(batch, interval.value) for batch, interval in usage.predicted.items()]
    points = points or sorted((configuration.local_batch, float(used)) for configuration, used in usage.measured)
    (first, low), (last, high) = points[0], points[-1]
    return (high - low) / (last - first) if last > first and high > low else None


def _caption(usage: Usage, kinds: str) -> str:
    parts = [f"The most memory that one worker held at any time ({kinds}), against the samples that it gets per step."]
    if usage.measured:
        parts.append("Markers are measured; the number of nodes hardly matters, so that they lie on one curve.")
    if usage.predicted:
        parts.append("The line is the model's prediction, a straight line in b that this axis bends.")
    if usage.limit is not None:
        parts.append(f"The limit is {format_bytes(usage.limit)} per worker.")
    if usage.limit is not None and usage.allowed is not None and usage.allowed < usage.limit:
        parts.append(f"Plans use no more than {format_bytes(usage.allowed)} of it (dotted), to leave a margin.")
    if usage.largest is not None:
        parts.append("Batches in the grey region do not fit.")
    if usage.out_of_memory:
        parts.append(
            "Crosses mark batches that ran out of memory when they were tried; how much they needed is unknown."
        )
    return " ".join(parts)


def _table(usage: Usage) -> Table:
    columns = (
        "mark",
        "nodes",
        "local_batch_samples",
        "peak_memory_bytes",
        "low_peak_memory_bytes",
        "high_peak_memory_bytes",
    )
    rows: list[tuple[Cell, ...]] = [
        ("measured", configuration.nodes, configuration.local_batch, used, None, None)
        for configuration, used in usage.measured
    ]
    rows += [("predicted_90", None, batch, *interval) for batch, interval in usage.predicted.items()]
    rows += [("out_of_memory", item.nodes, item.local_batch, None, None, None) for item in usage.out_of_memory]
    rows += [("limit", None, None, usage.limit, None, None)] if usage.limit is not None else []
    rows += [("largest_that_fits", None, usage.largest, None, None, None)] if usage.largest is not None else []
    return Table(columns, rows)
