"""Peak memory of a worker against its local batch, the limit, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.models.fitted import update_time
from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.planning.candidates import on_top_bytes
from tula_hpc.analysis.planning.memory_limit import memory_limit_bytes
from tula_hpc.analysis.run_contents import Interval, RunContents, predicted, used_bytes
from tula_hpc.config import GIB
from tula_hpc.formatting import format_bytes, plural
from tula_hpc.records import Candidate, Configuration

MEMORY = "Memory of a worker"
# a limit this many times above all else is named, not drawn to scale
FAR_ABOVE = 2.5


class Line(NamedTuple):
    """What a worker holds, bytes by local batch; a single one that takes its batch in parts has a line of its own."""

    measured: list[tuple[Configuration, int]]
    predicted: dict[int, Interval]
    # largest local batch among the candidates that fits, 0 if none does; None: all of them do
    largest: int | None

    @property
    def growth(self) -> float | None:
        """Bytes per further sample: between the smallest and the largest batch, predicted or else measured."""
        points = [(batch, interval.value) for batch, interval in self.predicted.items()]
        points = points or sorted(
            (configuration.local_batch, float(used)) for configuration, used in self.measured
        )
        (first, low), (last, high) = points[0], points[-1]
        return (high - low) / (last - first) if last > first and high > low else None

    @property
    def fitting(self) -> int:
        """The largest candidate that fits; 0 if none does."""
        return max(self.predicted, default=0) if self.largest is None else self.largest


class Usage(NamedTuple):
    """Everything that the memory figure draws, bytes per worker."""

    # of all workers, or of several and of a single one that takes its batch in parts
    lines: list[Line]
    # in so many
    parts: int
    limit: int | None
    # what plans let a step use of it: less the margin, and what training holds beside its steps
    allowed: int | None
    out_of_memory: list[Configuration]

    @property
    def measured(self) -> list[tuple[Configuration, int]]:
        """Everything that was measured."""
        return [item for line in self.lines for item in line.measured]

    @property
    def predicted(self) -> list[Interval]:
        """Everything that was predicted."""
        return [interval for line in self.lines for interval in line.predicted.values()]

    @property
    def batches(self) -> list[int]:
        """Every local batch that occurs."""
        known = {configuration.local_batch for configuration, _ in self.measured}
        known.update(batch for line in self.lines for batch in line.predicted)
        return sorted(known | {item.local_batch for item in self.out_of_memory})

    @property
    def top(self) -> float:
        """The largest use that is known, bytes."""
        return max(
            [used for _, used in self.measured] + [interval.high for interval in self.predicted]
        )

    @property
    def largest(self) -> int | None:
        """The largest local batch that fits at all, where larger ones were candidates."""
        fitting = max((line.fitting for line in self.lines), default=0)
        return (
            fitting
            if fitting and any(batch > fitting for line in self.lines for batch in line.predicted)
            else None
        )


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
        _draw_prediction(axes, usage, unit_bytes, run.cluster_sizes)
        _draw_measured(axes, usage, unit_bytes, run.cluster_sizes)
        _draw_bounds(axes, usage, unit_bytes)
        _draw_out_of_memory(axes, usage, unit_bytes, run.cluster_sizes)
        style.legend(
            axes, list(_keys(usage, run.cluster_sizes)), columns=6 if len(usage.lines) == 1 else 4
        )
    return Drawing("memory", title, _caption(usage, run.memory_kinds), figure, _table(usage))


def _usage(run: RunContents) -> Usage:
    summary = summarize(run.measurements)
    measured = [
        (item.configuration, used) for item in run.ok if (used := used_bytes(item)) is not None
    ]
    candidates = sorted(run.plan.candidates if run.plan else (), key=lambda item: item.local_batch)
    where = [configuration for configuration, _ in measured] + [
        item.configuration for item in candidates
    ]
    workers = sorted({configuration.world_size for configuration in where})
    limit = _limit(run, summary)
    allowed = _allowed(run, summary, limit, workers)
    fitting = {item.configuration for item in candidates if _fits(item, summary, allowed)}
    lines = [
        _line(
            [item for item in measured if item[0].world_size in kind],
            [item for item in candidates if item.configuration.world_size in kind],
            fitting,
        )
        for kind in _kinds(workers, summary.parts)
    ]
    most = None if limit is None else int(max([0.0, *allowed.values()]))
    return Usage(lines, summary.parts, limit, most, run.out_of_memory)


def _limit(run: RunContents, summary: Summary) -> int | None:
    if run.plan:
        return run.plan.memory_limit_bytes
    return memory_limit_bytes(run.cluster, summary.memory_uses) if run.cluster else None


def _allowed(
    run: RunContents, summary: Summary, limit: int | None, workers: list[int]
) -> dict[int, float]:
    """What a step of so many workers may use by plan, bytes of each: as the plan decides what is feasible."""
    if limit is None:
        return dict.fromkeys(workers, math.inf)
    beside = np.zeros(len(workers))
    if run.sweep and run.cluster and summary.profiles:
        counts = np.array(workers, dtype=np.float64)
        beside = on_top_bytes(
            summary, update_time(summary), run.cluster, run.sweep.training, counts
        )
    margin = run.cluster.memory_margin if run.cluster else 0.0
    return dict(zip(workers, (limit * (1 - margin) - beside).tolist(), strict=True))


def _fits(item: Candidate, summary: Summary, allowed: Mapping[int, float]) -> bool:
    workers = item.configuration.world_size
    below = item.local_batch < summary.oom_bound(alone=workers == 1)
    return below and item.peak_memory_bytes <= allowed[workers]


def _kinds(workers: list[int], parts: int) -> list[list[int]]:
    """Numbers of workers that need the same memory: a single one that takes its batch in parts needs less."""
    if parts == 1:
        return [workers]
    kinds = [[count for count in workers if count > 1], [count for count in workers if count == 1]]
    return [kind for kind in kinds if kind]


def _line(
    measured: list[tuple[Configuration, int]],
    candidates: Sequence[Candidate],
    fitting: Collection[Configuration],
) -> Line:
    line = {item.local_batch: predicted(item, "peak_memory_bytes") for item in candidates}
    largest = max(
        (item.local_batch for item in candidates if item.configuration in fitting), default=0
    )
    too_large = [batch for batch in line if batch > largest]
    # far beyond the bound there is nothing to see
    if too_large:
        line = {batch: peak for batch, peak in line.items() if batch <= 2 * too_large[0]}
    return Line(measured, line, largest if too_large else None)


def _memory_axis(axes: Axes, usage: Usage, unit: str, unit_bytes: int) -> None:
    """Up to the limit and what was measured; predictions far above the limit leave the panel."""
    top = usage.top
    if usage.limit is not None and usage.limit <= FAR_ABOVE * top:
        top = max([1.25 * usage.limit, *(used for _, used in usage.measured)])
    style.value_axis(axes, [top / unit_bytes], label=f"peak memory per worker, {unit}")


def _draw_prediction(axes: Axes, usage: Usage, unit_bytes: int, sizes: list[int]) -> None:
    """Straight lines in b between the candidates, which the log2 axis bends; dotted where they do not fit."""
    for line, colour in zip(usage.lines, _colours(usage, sizes), strict=True):
        if not line.predicted:
            continue
        known = list(line.predicted)
        batches = np.unique([*np.geomspace(known[0], known[-1], 200), *known])
        value, low, high = (
            np.interp(batches, known, np.array(ends) / unit_bytes)
            for ends in zip(*line.predicted.values(), strict=True)
        )
        axes.fill_between(batches, low, high, color=style.MUTED.light, alpha=0.22, linewidth=0)
        for style_of, part in ((":", batches >= line.fitting), ("-", batches <= line.fitting)):
            axes.plot(batches, np.where(part, value, np.nan), style_of, color=colour, linewidth=1.4)


def _colours(usage: Usage, sizes: list[int]) -> list[str]:
    """Of each line; a single worker's apart is that of its markers."""
    return [style.INK.light, *(style.size_style(sizes, 1).colour for _ in usage.lines[1:])]


def _draw_measured(axes: Axes, usage: Usage, unit_bytes: int, sizes: list[int]) -> None:
    for configuration, used in usage.measured:
        look = style.size_style(sizes, configuration.nodes)
        axes.plot(
            [configuration.local_batch],
            [used / unit_bytes],
            look.marker,
            color=look.colour,
            # cluster sizes lie on one another
            fillstyle="none",
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
            axes.axhline(
                usage.allowed / unit_bytes,
                color=style.ALERT.light,
                linewidth=0.8,
                linestyle=(0, (1, 2)),
            )
        axes.annotate(
            text,
            (left, y),
            xytext=(0, 3),
            textcoords="offset points",
            color=style.ALERT.light,
            size=8.5,
            weight="bold",
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
        names = (
            ["predicted"]
            if len(usage.lines) == 1
            else ["predicted, several workers", "predicted, one worker"]
        )
        for name, colour in zip(names, _colours(usage, sizes), strict=True):
            yield style.Key(name, line="-", colour=colour)
    if any(interval.low < interval.high for interval in usage.predicted):
        yield style.Key("90 % interval", line="-", band=True)
    if any(line.largest is not None for line in usage.lines):
        yield style.Key("does not fit", line=":", colour=style.INK.light)
    if usage.out_of_memory:
        yield style.Key("ran out of memory", marker="x")


def _title(usage: Usage) -> str:
    several, *alone = (line.growth for line in usage.lines)
    title = (
        f"A worker needs {format_bytes(several)} for each further sample of its batch"
        if several
        else MEMORY
    )
    if several and alone and alone[0]:
        title += f", a single one {format_bytes(alone[0])}"
    lines = [line for line in usage.lines if line.predicted]
    if not lines or (usage.limit is None and all(line.largest is None for line in lines)):
        return title
    first, *other = dict.fromkeys(map(_fit_in_words, lines))
    if other:
        return f"{title}; {first}, on a single worker {other[0]}"
    return f"{title}; {first}{', the next candidate does not' if lines[0].largest else ''}"


def _fit_in_words(line: Line) -> str:
    if line.largest is None:
        return "every candidate fits"
    return f"{plural(line.largest, 'sample')} fit" if line.largest else "no candidate fits"


def _caption(usage: Usage, kinds: str) -> str:
    parts = [
        f"The most memory that one worker held at any time ({kinds}), against the samples that it gets per step.",
        *_marks_in_words(usage),
    ]
    if usage.limit is not None:
        parts.append(f"The limit is {format_bytes(usage.limit)} per worker.")
    if usage.limit is not None and usage.allowed is not None and usage.allowed < usage.limit:
        parts.append(
            f"Plans let a step use no more than {format_bytes(usage.allowed)} of it (dotted in red)."
        )
        parts.append("The rest is a margin, and room for what training holds beside its steps.")
    if any(line.largest is not None for line in usage.lines):
        parts.append("Batches do not fit where their line is dotted.")
    if usage.largest is not None:
        parts.append("Batches in the grey region do not fit.")
    if usage.out_of_memory:
        parts.append(
            "Crosses mark batches that ran out of memory when they were tried; how much they needed is unknown."
        )
    return " ".join(parts)


def _marks_in_words(usage: Usage) -> Iterable[str]:
    """Sentences about markers and lines."""
    one = len(usage.lines) == 1
    curve = (
        "so that they lie on one curve"
        if one
        else "but a single worker's lie on a curve of their own"
    )
    if usage.measured:
        yield f"Markers are measured; the number of nodes hardly matters, {curve}."
    if not one:
        yield f"It takes its batch in {usage.parts} parts, one after another, and holds the activations of one of them."
    if usage.predicted:
        lines = "The line is the model's prediction" if one else "Lines are the model's predictions"
        yield f"{lines}, straight in b, which this axis bends."


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
    of_nodes = [None, 1][: len(usage.lines)]
    for nodes, line in zip(of_nodes, usage.lines, strict=True):
        rows += [
            ("predicted_90", nodes, batch, *interval) for batch, interval in line.predicted.items()
        ]
    rows += [
        ("out_of_memory", item.nodes, item.local_batch, None, None, None)
        for item in usage.out_of_memory
    ]
    rows += [("limit", None, None, usage.limit, None, None)] if usage.limit is not None else []
    for nodes, line in zip(of_nodes, usage.lines, strict=True):
        rows += (
            [("largest_that_fits", nodes, line.largest, None, None, None)] if line.largest else []
        )
    return Table(columns, rows)
