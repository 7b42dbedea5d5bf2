"""How many samples a worker computes in a second, against its local batch, where it takes that at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.aggregate import medians_by_batch
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.formatting import format_number
from tula_hpc.analysis.report_data import RunContents
from tula_hpc.records import Configuration, Measurement

NEARLY = 0.9  # of the highest speed: from there on larger batches gain little


class Point(NamedTuple):
    """Forward and backward of one batch, timed without synchronization."""

    configuration: Configuration  # the batch is the one that was computed
    seconds: float
    beside: bool  # it was timed beside a profile with a larger batch

    @property
    def samples_per_second(self) -> float:
        """Of one worker."""
        return self.configuration.local_batch / self.seconds


def draw_computation(run: RunContents) -> Drawing | Missing:
    """Samples per second of forward and backward, measured, over the local batch."""
    points = [point for item in run.ok for point in _points(item)]
    speeds = _by_batch(points)
    if len(speeds) < 2:
        return Missing("computation", "computation", "no number of nodes has two local batches yet")
    title = _title(speeds)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        batches = [point.configuration.local_batch for point in points]
        style.batch_axis(axes, batches, "local batch b (samples per step and worker)")
        style.value_axis(axes, [p.samples_per_second for p in points], label="samples per second and worker")
        axes.plot(list(speeds), list(speeds.values()), "-", color=style.MUTED.light, linewidth=1.2, zorder=1)
        _draw(axes, points, run.cluster_sizes)
        style.legend(axes, list(_keys(points, run.cluster_sizes)), columns=6)
    return Drawing("computation", title, _caption(points), figure, _table(points))


def _points(item: Measurement) -> Iterable[Point]:
    if item.times is not None and item.times.compute_time_s > 0.0 and item.parts == 1:
        yield Point(item.configuration, item.times.compute_time_s, beside=False)
    for batch, seconds in item.smaller_computes:
        yield Point(item.configuration._replace(local_batch=batch), seconds, beside=True)


def _draw(axes: Axes, points: Sequence[Point], sizes: list[int]) -> None:
    for point in points:
        look = style.size_style(sizes, point.configuration.nodes)
        axes.plot(
            [point.configuration.local_batch],
            [point.samples_per_second],
            look.marker,
            color=look.colour,
            fillstyle="none" if point.beside else "full",
            markeredgecolor=look.colour if point.beside else style.PAPER.light,
            markeredgewidth=1.4 if point.beside else 0.6,
            markersize=6.5,
        )


def _by_batch(points: Sequence[Point]) -> dict[int, float]:
    """Median speed of each batch, samples per second, on as many nodes as most batches were computed on."""
    batches = {(p.configuration.nodes, p.configuration.local_batch) for p in points}
    count = Counter(nodes for nodes, _ in batches)
    where = min(count, key=lambda nodes: (-count[nodes], nodes), default=0)
    return medians_by_batch(
        (p.configuration.local_batch, p.samples_per_second) for p in points if p.configuration.nodes == where
    )


def _keys(points: Sequence[Point], sizes: list[int]) -> Iterable[style.Key]:
    for nodes in sorted({point.configuration.nodes for point in points}):
        look = style.size_style(sizes, nodes)
        yield style.Key(f"N = {nodes}", marker=look.marker, colour=look.colour)
    if any(point.beside for point in points):
        yield style.Key("beside a larger batch", marker="o", hollow=True)
    yield style.Key("median", line="-")


def _title(speeds: Mapping[int, float]) -> str:
    best = max(speeds.values())
    enough = min(batch for batch, speed in speeds.items() if speed >= NEARLY * best)
    title = f"A worker computes up to {format_number(best, 3)} samples a second"
    smallest = min(speeds)
    if enough == smallest:
        return f"{title}, at every batch nearly as many"
    share = 100 * speeds[smallest] / best
    return f"{title}, nearly as many from b = {enough:,} on; at b = {smallest:,} it is {share:.0f} % of that"


def _caption(points: Sequence[Point]) -> str:
    text = (
        "Samples that one worker takes forward and backward in a second, without synchronization, over the samples "
        "that it gets per step. Where the line is low, the device waits for its kernels to start, and more nodes, with "
        "a smaller batch each, compute no faster. "
    )
    if any(point.beside for point in points):
        text += "Hollow markers were timed beside a profile with a larger batch, which costs no job of their own. "
    if len({point.configuration.nodes for point in points}) > 1:
        text += "Of several workers it is the slowest; the line is the number of nodes with most batches."
    return text.strip()


def _table(points: Sequence[Point]) -> Table:
    columns = (
        "nodes",
        "workers_per_node",
        "local_batch_samples",
        "forward_backward_s",
        "samples_per_second",
        "beside_a_larger_batch",
    )
    rows: list[tuple[Cell, ...]] = [
        (*point.configuration, point.seconds, point.samples_per_second, point.beside) for point in points
    ]
    return Table(columns, rows)
