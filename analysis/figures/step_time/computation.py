"""Speed of forward and backward by local batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import CONFIGURATION_COLUMNS, Cell, Drawing, Missing, Table
from tula_hpc.analysis.models.profiles import medians_by_batch
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.formatting import format_number
from tula_hpc.records import Configuration, Measurement

# of the highest speed: from there on larger batches gain little
NEARLY = 0.9


class Point(NamedTuple):
    """Forward and backward of one batch, timed without synchronization."""

    # with the batch that was computed
    configuration: Configuration
    seconds: float
    # timed in the profile of a larger batch
    beside: bool

    @property
    def samples_per_second(self) -> float:
        """Speed of one worker."""
        return self.configuration.local_batch / self.seconds


def draw_computation(run: RunContents) -> Drawing | Missing:
    """Draw measured samples per second of forward and backward against the local batch."""
    points = [point for item in run.ok for point in _points(item)]
    speeds = _by_batch(points)
    if len(speeds) < 2:
        return Missing("computation", "computation", "no number of nodes has two local batches yet")
    title = _title(speeds)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        batches = [point.configuration.local_batch for point in points]
        style.batch_axis(axes, batches, "local batch b (samples per step and worker)")
        measured = [point.samples_per_second for point in points]
        style.value_axis(axes, measured, label="samples per second and worker")
        line = list(speeds), list(speeds.values())
        axes.plot(*line, "-", color=style.MUTED.light, linewidth=1.2, zorder=1)
        for point in points:
            _draw_point(axes, point, run.cluster_sizes)
        style.legend(axes, _keys(points, run.cluster_sizes))
    return Drawing("computation", title, _caption(points), figure, _table(points))


def _points(item: Measurement) -> Iterable[Point]:
    if item.times is not None and item.times.compute_time_s > 0.0 and item.parts == 1:
        yield Point(item.configuration, item.times.compute_time_s, beside=False)
    for batch, seconds in item.smaller_computes:
        yield Point(item.configuration._replace(local_batch=batch), seconds, beside=True)


def _draw_point(axes: Axes, point: Point, sizes: list[int]) -> None:
    look = style.size_style(sizes, point.configuration.nodes)
    x, y = point.configuration.local_batch, point.samples_per_second
    (mark,) = axes.plot([x], [y], look.marker, color=look.colour, markersize=6.5)
    if point.beside:
        mark.set(fillstyle="none", markeredgecolor=look.colour, markeredgewidth=1.4)
    else:
        mark.set(markeredgecolor=style.PAPER.light, markeredgewidth=0.6)


def _by_batch(points: Sequence[Point]) -> dict[int, float]:
    """Return each batch's median speed, on the number of nodes with most batches."""
    speeds: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        speed = (point.configuration.local_batch, point.samples_per_second)
        speeds.setdefault(point.configuration.nodes, []).append(speed)
    medians = [medians_by_batch(speeds[nodes]) for nodes in sorted(speeds)]
    return max(medians, key=len, default={})


def _keys(points: Sequence[Point], sizes: list[int]) -> list[style.Key]:
    keys = []
    for nodes in sorted({point.configuration.nodes for point in points}):
        look = style.size_style(sizes, nodes)
        keys.append(style.Key(f"N = {nodes}", marker=look.marker, colour=look.colour))
    if any(point.beside for point in points):
        keys.append(style.Key("beside a larger batch", marker="o", hollow=True))
    return [*keys, style.Key("median", line="-")]


def _title(speeds: Mapping[int, float]) -> str:
    """Name the batch from which on all are fast, not the first that is: one beyond may be slow."""
    best = max(speeds, key=lambda batch: speeds[batch])
    title = f"A worker computes up to {format_number(speeds[best], 3)} samples a second"
    slow = [batch for batch, speed in speeds.items() if speed < NEARLY * speeds[best]]
    if not slow:
        return f"{title}, at every batch nearly as many"
    slowest = min(slow, key=lambda batch: speeds[batch])
    least = f"at b = {slowest:,} it is {100 * speeds[slowest] / speeds[best]:.0f} % of that"
    fast = [batch for batch in speeds if batch > max(slow)]
    if not fast:
        return f"{title}, at b = {best:,}; {least}"
    return f"{title}, nearly as many from b = {min(fast):,} on; {least}"


def _caption(points: Sequence[Point]) -> str:
    text = (
        "Samples that one worker takes forward and backward in a second, without synchronization, "
        "over the samples that it gets per step. Where the line is low, the device waits for its "
        "kernels to start, and more nodes, with a smaller batch each, compute no faster."
    )
    if any(point.beside for point in points):
        text += (
            " Hollow markers were timed beside a profile with a larger batch, which costs no job "
            "of their own."
        )
    if len({point.configuration.nodes for point in points}) > 1:
        text += (
            " Of several workers it is the slowest; the line is the number of nodes with most "
            "batches."
        )
    return text


def _table(points: Sequence[Point]) -> Table:
    columns = (
        *CONFIGURATION_COLUMNS[:-1],
        "forward_backward_s",
        "samples_per_second",
        "beside_a_larger_batch",
    )
    rows: list[tuple[Cell, ...]] = []
    for point in points:
        rows.append((*point.configuration, point.seconds, point.samples_per_second, point.beside))
    return Table(columns, rows)
