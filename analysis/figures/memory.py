"""Peak memory of a worker against its local batch, the limit, and the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.planning.memory_limit import memory_limit_bytes, on_top_bytes
from tula_hpc.analysis.run_contents import RunContents, used_bytes
from tula_hpc.config import GIB
from tula_hpc.formatting import format_bytes, plural
from tula_hpc.records import Candidate, Configuration, Interval

# a limit above this multiple of the largest use is written as text, not drawn to scale
FAR_ABOVE = 2.5
# share of the x axis that the label of the largest batch takes
ROOM_FOR_TEXT = 0.3


class MemoryLine(NamedTuple):
    """Memory of a worker, bytes by local batch."""

    measured: list[tuple[Configuration, int]]
    predicted: dict[int, Interval]
    # largest local batch of a candidate that fits; 0 if none does
    largest: int
    all_fit: bool

    @property
    def growth(self) -> float | None:
        """Bytes per further sample between the smallest and the largest batch.

        They are predicted or, without predictions, measured; None if memory does not grow.
        """
        if self.predicted:
            points = [(batch, interval.value) for batch, interval in self.predicted.items()]
        else:
            points = sorted((where.local_batch, float(used)) for where, used in self.measured)
        (first, low), (last, high) = points[0], points[-1]
        if last > first and high > low:
            return (high - low) / (last - first)
        return None


class MemoryContent(NamedTuple):
    """The content of the memory figure, bytes per worker."""

    # one line, and a second for a single worker that splits its batch into micro-batches
    lines: list[MemoryLine]
    # micro-batches per step of a single worker
    parts: int
    limit: int | None
    # what the plan lets a step use: the limit minus its margin and what training holds besides; 0
    # without a limit
    allowed: int
    out_of_memory: list[Configuration]

    @property
    def measured(self) -> list[tuple[Configuration, int]]:
        """All measurements."""
        return [item for line in self.lines for item in line.measured]

    @property
    def predicted(self) -> list[Interval]:
        """All predictions."""
        return [interval for line in self.lines for interval in line.predicted.values()]

    @property
    def batches(self) -> list[int]:
        """Every local batch that occurs."""
        known = {configuration.local_batch for configuration, _ in self.measured}
        for line in self.lines:
            known.update(line.predicted)
        return sorted(known.union(item.local_batch for item in self.out_of_memory))

    @property
    def top(self) -> float:
        """The largest known use, bytes."""
        measured = [used for _, used in self.measured]
        return max(measured + [interval.high for interval in self.predicted])

    @property
    def is_limit_near(self) -> bool:
        """Tell whether the limit is drawn to scale, with the lower one that plans keep."""
        return self.limit is not None and self.limit <= FAR_ABOVE * self.top

    @property
    def bounded(self) -> bool:
        """Tell whether any candidate does not fit."""
        return not all(line.all_fit for line in self.lines)

    @property
    def largest(self) -> int | None:
        """The largest local batch that fits; None if none does, or no candidate is larger."""
        fitting = tried = 0
        for line in self.lines:
            fitting = max(fitting, line.largest)
            tried = max(tried, *line.predicted, 0)
        return fitting if 0 < fitting < tried else None


def draw_memory(run: RunContents) -> Drawing | Missing:
    """Draw measured and predicted peak memory per worker against the local batch."""
    usage = _usage(run)
    if not usage.measured and not usage.predicted:
        return Missing("memory", "memory", "no configuration has been measured yet")
    title = _title(usage)
    unit, unit_bytes = ("GiB", GIB) if usage.top >= GIB else ("MiB", GIB // 1024)
    sizes = run.cluster_sizes
    with style.new_figure(title, 3.7) as (figure, (axes,)):
        style.batch_axis(axes, usage.batches, "local batch b (samples per step and worker)")
        _memory_axis(axes, usage, unit, unit_bytes)
        _draw_prediction(axes, usage, unit_bytes, sizes)
        _draw_measured(axes, usage, unit_bytes, sizes)
        if usage.limit is not None:
            _draw_limit(axes, usage.limit, usage.allowed, unit_bytes)
        if usage.largest is not None:
            _draw_largest(axes, usage.largest, usage.batches)
        _draw_out_of_memory(axes, usage, unit_bytes, sizes)
        style.legend(axes, list(_keys(usage, sizes)))
    return Drawing("memory", title, _caption(usage, run.memory_kinds), figure, _table(usage))


def _usage(run: RunContents) -> MemoryContent:
    summary = summarize(run.measurements)
    known = [(item.configuration, used_bytes(item)) for item in run.comparable]
    measured = [(where, used) for where, used in known if used is not None]
    candidates: list[Candidate] = []
    if run.plan:
        candidates = sorted(run.plan.candidates, key=lambda item: item.local_batch)
    workers = {configuration.world_size for configuration, _ in measured}
    workers.update(item.configuration.world_size for item in candidates)
    limit = _limit(run, summary)
    allowed = _allowed(run, summary, limit, sorted(workers))
    fitting = {item.configuration for item in candidates if _fits(item, summary, allowed)}
    # a single worker that splits its batch into micro-batches needs less memory than several do
    alone = workers & {1} if summary.parts > 1 else set()
    lines = []
    for kind in filter(None, (workers - alone, alone)):
        mine = [item for item in measured if item[0].world_size in kind]
        line = [item for item in candidates if item.configuration.world_size in kind]
        lines.append(_line(mine, line, fitting))
    most = 0
    if limit is not None:
        most = int(max([0.0, *allowed.values()]))
    return MemoryContent(lines, summary.parts, limit, most, run.out_of_memory)


def _limit(run: RunContents, summary: Summary) -> int | None:
    if run.plan:
        return run.plan.memory_limit_bytes
    if run.cluster:
        return memory_limit_bytes(run.cluster, summary.memory_uses)
    return None


def _allowed(
    run: RunContents, summary: Summary, limit: int | None, workers: list[int]
) -> dict[int, float]:
    """Return the memory that the plan allows a step, bytes per worker, by number of workers."""
    if limit is None:
        return dict.fromkeys(workers, math.inf)
    extra_bytes = np.zeros(len(workers))
    if run.sweep and run.cluster and summary.profiles:
        counts = np.array(workers, dtype=np.float64)
        extra_bytes = on_top_bytes(summary, run.cluster, run.sweep.training, counts)
    margin = run.cluster.memory_margin if run.cluster else 0.0
    return dict(zip(workers, (limit * (1 - margin) - extra_bytes).tolist(), strict=True))


def _fits(item: Candidate, summary: Summary, allowed: Mapping[int, float]) -> bool:
    workers = item.configuration.world_size
    below = item.local_batch / item.accumulation < summary.oom_bound(alone=workers == 1)
    return below and item.peak_memory_bytes <= allowed[workers]


def _line(
    measured: list[tuple[Configuration, int]],
    candidates: Sequence[Candidate],
    fitting: Collection[Configuration],
) -> MemoryLine:
    line = {}
    largest = 0
    for item in candidates:
        line[item.local_batch] = item.predicted("peak_memory_bytes")
        if item.configuration in fitting:
            largest = max(largest, item.local_batch)
    too_large = [batch for batch in line if batch > largest]
    if not too_large:
        return MemoryLine(measured, line, largest, all_fit=True)
    # predictions far beyond the largest batch that fits are not worth showing
    shown = {batch: peak for batch, peak in line.items() if batch <= 2 * too_large[0]}
    return MemoryLine(measured, shown, largest, all_fit=False)


def _memory_axis(axes: Axes, usage: MemoryContent, unit: str, unit_bytes: int) -> None:
    """Set the y axis up to the limit and all measurements; predictions far above are cut off."""
    top = usage.top
    if usage.limit is not None and usage.is_limit_near:
        top = max([1.25 * usage.limit, *(used for _, used in usage.measured)])
    style.value_axis(axes, [top / unit_bytes], label=f"peak memory per worker, {unit}")


def _draw_prediction(axes: Axes, usage: MemoryContent, unit_bytes: int, sizes: list[int]) -> None:
    """Draw lines that are straight in b but bent by the log2 axis; dotted where b does not fit."""
    for line, colour in zip(usage.lines, _colours(usage, sizes), strict=True):
        if not line.predicted:
            continue
        known = list(line.predicted)
        batches = np.unique([*np.geomspace(known[0], known[-1], 200), *known])
        if len(known) == 1:
            batches = np.array(known, dtype=np.float64)
        peaks = np.array(list(line.predicted.values())) / unit_bytes
        value, low, high = (np.interp(batches, known, column) for column in peaks.T)
        style.fill_band(axes, batches, low, high, color=style.MUTED.light, alpha=0.22)
        mark = style.lone_mark(known)
        for dash, shown in ((":", batches >= line.largest), ("-", batches <= line.largest)):
            y = np.where(shown, value, np.nan)
            axes.plot(batches, y, dash, color=colour, linewidth=1.4, **mark)


def _colours(usage: MemoryContent, sizes: list[int]) -> list[str]:
    """Return each line's colour; the second line, a single worker's, has its markers' colour."""
    colours = [style.INK.light]
    if len(usage.lines) > 1:
        colours.append(style.size_style(sizes, 1).colour)
    return colours


def _draw_measured(axes: Axes, usage: MemoryContent, unit_bytes: int, sizes: list[int]) -> None:
    for configuration, used in usage.measured:
        look = style.size_style(sizes, configuration.nodes)
        x, y = configuration.local_batch, used / unit_bytes
        (mark,) = axes.plot([x], [y], look.marker, color=look.colour, zorder=4)
        # hollow, since markers of several cluster sizes overlap
        mark.set(fillstyle="none", markeredgewidth=1.5, markersize=6.5)


def _draw_limit(axes: Axes, limit: int, allowed: int, unit_bytes: int) -> None:
    left = axes.get_xlim()[0] * 1.06
    y, top = limit / unit_bytes, axes.get_ylim()[1]
    text = f"limit {format_bytes(limit)}"
    red = style.ALERT.light
    if y < top:
        axes.axhline(y, color=red, linewidth=1.2, linestyle=(0, (5, 3)))
        if allowed < limit:
            axes.axhline(allowed / unit_bytes, color=red, linewidth=0.8, linestyle=(0, (1, 2)))
    else:
        y = top * 0.94
        text += " (far above this axis)"
    style.annotate_near(axes, text, (left, y), (0, 3), color=red, size=8.5, weight="bold")


def _draw_largest(axes: Axes, largest: int, batches: list[int]) -> None:
    beyond = batches[batches.index(largest) + 1]
    start = (largest * beyond) ** 0.5
    axes.axvspan(start, axes.get_xlim()[1], color=style.SHADE.light, zorder=0)
    text = f"b = {largest:,} is the\nlargest that fits "
    # at the bottom left of the bound or, without room there, at the top right of it
    ((place, _),) = axes.transLimits.transform(axes.transScale.transform([(start, 1.0)]))
    units = ("data", "axes fraction")
    if place < ROOM_FOR_TEXT:
        label = style.annotate_near(axes, text, (start, 1), (5, -28), xycoords=units)
    else:
        label = style.annotate_near(axes, text, (start, 0), (-5, 6), xycoords=units, ha="right")
    label.set(color=style.INK.light, size=8.5, weight="bold", in_layout=False)


def _draw_out_of_memory(
    axes: Axes, usage: MemoryContent, unit_bytes: int, sizes: list[int]
) -> None:
    y = axes.get_ylim()[1]
    if usage.limit is not None:
        y = min(y, usage.limit / unit_bytes)
    for configuration in usage.out_of_memory:
        colour = style.size_style(sizes, configuration.nodes).colour
        (cross,) = axes.plot([configuration.local_batch], [y], "x", color=colour, zorder=5)
        cross.set(markersize=8, markeredgewidth=2.2, clip_on=False)


def _keys(usage: MemoryContent, sizes: list[int]) -> Iterable[style.Key]:
    for nodes in sorted({configuration.nodes for configuration, _ in usage.measured}):
        yield style.size_style(sizes, nodes)._replace(hollow=True)
    if usage.predicted:
        names = ["predicted"]
        if len(usage.lines) > 1:
            names = ["predicted, several workers", "predicted, one worker"]
        for name, colour in zip(names, _colours(usage, sizes), strict=True):
            yield style.Key(name, line="-", colour=colour)
    if any(interval.low < interval.high for interval in usage.predicted):
        yield style.Key("90 % interval", line="-", band=True)
    if usage.bounded:
        yield style.Key("does not fit", line=":", colour=style.INK.light)
    if usage.limit is not None and usage.is_limit_near and usage.allowed < usage.limit:
        yield style.Key("most that plans use", line=":", colour=style.ALERT.light)
    if usage.out_of_memory:
        yield style.Key("ran out of memory", marker="x")


def _title(usage: MemoryContent) -> str:
    title = "Memory of a worker"
    growth = [line.growth for line in usage.lines]
    if growth[0]:
        more = format_bytes(growth[0])
        title = f"A worker needs {more} for each further sample of its batch, on average"
        if growth[1:] and growth[-1]:
            title += f", with a single worker {format_bytes(growth[-1])}"
    lines = [line for line in usage.lines if line.predicted]
    if not lines or (usage.limit is None and not usage.bounded):
        return title
    first, last = _describe_fit(lines[0]), _describe_fit(lines[-1])
    if first != last:
        return f"{title}; {first}, on a single worker {last}"
    if lines[0].largest and not lines[0].all_fit:
        first += ", the next candidate does not"
    return f"{title}; {first}"


def _describe_fit(line: MemoryLine) -> str:
    if line.all_fit:
        return "every candidate fits"
    if line.largest == 0:
        return "no candidate fits"
    verb = "fits" if line.largest == 1 else "fit"
    return f"{plural(line.largest, 'sample')} {verb}"


def _caption(usage: MemoryContent, kinds: str) -> str:
    text = (
        f"The most memory that one worker held at any time ({kinds}), against the samples that it "
        f"gets per step.{_describe_marks(usage)}"
    )
    if usage.limit is not None:
        text += f" The limit is {format_bytes(usage.limit)} per worker."
    if usage.limit is not None and usage.allowed < usage.limit:
        dotted = " (dotted in red)" if usage.is_limit_near else ""
        text += (
            f" Plans let a step use no more than {format_bytes(usage.allowed)} of it{dotted}. The "
            "rest is a margin, and room for what training holds in addition to its steps."
        )
    outside = []
    if usage.bounded:
        outside.append("where their line is dotted")
    if usage.largest is not None:
        outside.append("in the grey region")
    if outside:
        text += f" Batches do not fit {' and '.join(outside)}."
    if usage.out_of_memory:
        text += (
            " Crosses mark batches that ran out of memory when they were tried; how much they "
            "needed is unknown."
        )
    return text


def _describe_marks(usage: MemoryContent) -> str:
    curve = "so they lie on one curve"
    lines = "The line is the model's prediction; above a floor it is"
    alone = ""
    if len(usage.lines) > 1:
        curve = "but a single worker's lie on a curve of their own"
        lines = "Lines are the model's predictions; above a floor they are"
        alone = (
            f" It takes its batch in {usage.parts} parts, one after another, and holds the "
            "activations of one of them."
        )
    text = alone
    if usage.measured:
        text = f" Markers are measurements; the number of nodes hardly matters, {curve}.{alone}"
    if usage.predicted:
        text += f" {lines} straight in b, but bent by this axis."
    return text


def _table(usage: MemoryContent) -> Table:
    peak = "peak_memory_bytes"
    columns = ("mark", "nodes", "local_batch_samples", peak, f"low_{peak}", f"high_{peak}")
    rows: list[tuple[Cell, ...]] = []
    for configuration, used in usage.measured:
        rows.append(("measured", configuration.nodes, configuration.local_batch, used, None, None))
    # the second line is that of a single worker
    lines: list[tuple[int | None, MemoryLine]] = list(zip((None, 1), usage.lines, strict=False))
    for nodes, line in lines:
        for batch, interval in line.predicted.items():
            rows.append(("predicted_90", nodes, batch, *interval))
    for item in usage.out_of_memory:
        rows.append(("out_of_memory", item.nodes, item.local_batch, None, None, None))
    if usage.limit is not None:
        rows.append(("limit", None, None, usage.limit, None, None))
    for nodes, line in lines:
        if line.largest and not line.all_fit:
            rows.append(("largest_that_fits", nodes, line.largest, None, None, None))
    return Table(columns, rows)
