"""Time of a step: its breakdown, the model's error, and the speed of computing by local batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import CONFIGURATION_COLUMNS, Cell, Drawing, Missing, Table
from tula_hpc.analysis.models.data_loading import loader_decides
from tula_hpc.analysis.models.profiles import medians_by_batch
from tula_hpc.analysis.run_contents import RunContents, find_candidate, trained_candidate
from tula_hpc.formatting import format_duration, format_number, format_percent
from tula_hpc.records import Configuration, Measurement, StepTimes

# height of a bar with its gap
ROW_IN = 0.17
# a part below this share of the step is no finding
NOTABLE = 0.05
# a rest up to so many times as long as the bare all-reduce may be that, slowed down by other work
EXCHANGE = 4.0


class Parts(NamedTuple):
    """Parts of a step, seconds: three that are measured, and the rest of the step."""

    data_s: float
    compute_s: float
    optimizer_s: float
    exposed_sync_s: float


PART_NAMES = ("data wait", "forward + backward", "optimizer", "rest (N > 1: synchronization)")
PART_COLOURS = (style.DATA, style.COMPUTE, style.OPTIMIZER, style.SYNC)
DATA, _, OPTIMIZER, REST = range(len(PART_NAMES))


def parts_of(times: StepTimes) -> Parts:
    """Take a step apart.

    Exposed synchronization = step − data − compute − optimizer, at least 0: the share of it that
    does not overlap with the backward pass.
    """
    measured = (times.data_time_s, times.compute_time_s, times.optimizer_time_s)
    return Parts(*measured, max(0.0, times.step_time_s - sum(measured)))


class Bar(NamedTuple):
    """One profiled configuration."""

    configuration: Configuration
    parts: Parts
    step_s: float
    allreduce_s: float
    loader_decides: bool

    @property
    def name(self) -> str:
        """Nodes and global batch."""
        return _short(self.configuration)

    def share(self, part: int) -> float:
        """Return the share of the step that one part takes."""
        return self.parts[part] / self.step_s

    @property
    def unhidden_s(self) -> float:
        """Time of the step if none of the all-reduce were hidden behind the backward pass."""
        return sum(self.parts) - self.parts.exposed_sync_s + self.allreduce_s


def _short(configuration: Configuration) -> str:
    return f"N = {configuration.nodes}, B = {configuration.global_batch:,}"


def draw_step_breakdown(run: RunContents) -> Drawing | Missing:
    """Draw the shares of a step per profiled configuration, as stacked bars."""
    bars = []
    for item in run.ok:
        if item.times is not None:
            spent = item.times.step_time_s, item.times.allreduce_time_s
            slow = loader_decides(item.times)
            bars.append(Bar(item.configuration, parts_of(item.times), *spent, slow))
    if not bars:
        return Missing("step_breakdown", "step breakdown", "no configuration has been measured yet")
    title = _breakdown_title(bars)
    keys = []
    for name, colour in zip(PART_NAMES, PART_COLOURS, strict=True):
        keys.append(style.Key(name, marker="s", colour=colour.light))
    exchanged = any(bar.allreduce_s for bar in bars)
    if exchanged:
        keys.append(style.Key("bare all-reduce, unhidden", marker="D", colour=style.INK.light))
    rows = _with_gaps(bars)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 1.25 + ROW_IN * len(rows))
        _draw_bars(axes, rows, run.cluster_sizes)
        style.legend(axes, keys, columns=3, left=-0.22)
    caption = _breakdown_caption(exchanged=exchanged)
    return Drawing("step_breakdown", title, caption, figure, _breakdown_table(bars))


def _breakdown_caption(*, exchanged: bool) -> str:
    text = (
        "One bar per profiled configuration, as shares of its step; the step's time stands at the "
        "right. The wait for data is that of the timed steps. Forward and backward, optimizer and "
        "the bare all-reduce of the gradients are measured apart; the rest is what remains of the "
        "whole step, with several workers mostly synchronization that is not hidden. "
    )
    if exchanged:
        text += (
            "The diamond adds to the other parts, in place of the rest, the bare all-reduce: there "
            "the step would end if none of it were hidden behind the backward pass and nothing "
            "else held the step up. Right of its bar's end, that much is hidden; left of it, the "
            "step takes longer than its parts and the all-reduce together, as where workers wait "
            "for the slowest. "
        )
    return f"{text}Bars may end beyond 100 %, as their parts are measured apart."


def _with_gaps(bars: Sequence[Bar]) -> list[Bar | None]:
    """Return the bars from the top down, with an empty row between cluster sizes."""
    rows: list[Bar | None] = []
    for bar in bars:
        previous = rows[-1] if rows else None
        if previous is not None and previous.configuration.nodes != bar.configuration.nodes:
            rows.append(None)
        rows.append(bar)
    return rows


def _draw_bars(axes: Axes, rows: Sequence[Bar | None], sizes: list[int]) -> None:
    names = {}
    colours = []
    widest = 1.0
    for y, bar in enumerate(rows):
        if bar is not None:
            _draw_bar(axes, y, bar)
            widest = max(widest, sum(bar.parts) / bar.step_s, bar.unhidden_s / bar.step_s)
            names[y] = bar.name
            colours.append(style.size_style(sizes, bar.configuration.nodes).colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.16)
    style.named_ticks(axes, [0.0, 0.25, 0.5, 0.75, 1.0], lambda share: f"{100 * share:.0f} %")
    axes.set_xlabel("share of a step's time")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(list(names), list(names.values()))
    for label, colour in zip(axes.get_yticklabels(), colours, strict=True):
        label.set_color(colour)


def _draw_bar(axes: Axes, y: int, bar: Bar) -> None:
    left = 0.0
    for seconds, colour in zip(bar.parts, PART_COLOURS, strict=True):
        axes.barh(y, seconds / bar.step_s, left=left, height=0.74, color=colour.light, linewidth=0)
        left += seconds / bar.step_s
    if bar.allreduce_s > 0:
        (diamond,) = axes.plot([bar.unhidden_s / bar.step_s], [y], "D", color=style.INK.light)
        diamond.set(markersize=4.2, markeredgecolor=style.PAPER.light, markeredgewidth=0.7)
    right = ("axes fraction", "data")
    time = format_duration(bar.step_s)
    axes.annotate(time, (1, y), xycoords=right, ha="right", va="center", size=8)


def _breakdown_title(bars: Sequence[Bar]) -> str:
    """Name the part, other than computing, that costs most somewhere.

    The rest of a single worker's step has no name: it shares nothing.
    """
    worst = max(bars, key=lambda bar: (bar.loader_decides, bar.share(DATA)))
    if worst.loader_decides:
        waiting = f"waiting for data takes {format_percent(worst.share(DATA))} of a step"
        return f"The data loader decides: {waiting} at {worst.name}"
    named = []
    for bar in bars:
        named += [(DATA, bar), (OPTIMIZER, bar)]
        if bar.configuration.world_size > 1:
            named.append((REST, bar))
    part, worst = max(named, key=lambda item: item[1].share(item[0]))
    share = format_percent(worst.share(part))
    if worst.share(part) < NOTABLE:
        return _calm_title(bars, share)
    title = f"{_subject(part, worst)} takes {share} of a step at {worst.name}"
    others = [bar for other, bar in named if other == part]
    least = min(others, key=lambda bar: bar.share(part))
    if least.share(part) > 0.8 * worst.share(part):
        return title
    share = format_percent(least.share(part)) if least.share(part) >= 0.005 else "hardly any"
    return f"{title}, but {share} at {least.name}"


def _subject(part: int, bar: Bar) -> str:
    if part != REST:
        return "Waiting for data" if part == DATA else "The optimizer"
    if bar.allreduce_s <= 0:
        return "Synchronization"
    # the all-reduce cannot explain a longer rest
    exchanged = bar.parts.exposed_sync_s <= EXCHANGE * bar.allreduce_s
    return "Exchanging gradients" if exchanged else "Waiting for other workers"


def _calm_title(bars: Sequence[Bar], share: str) -> str:
    """Return the title where no named part takes more than that share of a step."""
    if all(bar.share(REST) < NOTABLE for bar in bars):
        return f"Computing fills every step: no other part takes more than {share}"
    several = any(bar.configuration.world_size > 1 for bar in bars)
    exchange = " nor exchanging gradients" if several else ""
    return f"Neither data nor the optimizer{exchange} takes more than {share} of a step"


def _breakdown_table(bars: Sequence[Bar]) -> Table:
    columns = (
        *CONFIGURATION_COLUMNS,
        "step_time_s",
        "data_wait_s",
        "forward_backward_s",
        "optimizer_s",
        "exposed_synchronization_s",
        "bare_allreduce_s",
        "data_wait_percent",
        "forward_backward_percent",
        "optimizer_percent",
        "exposed_synchronization_percent",
        "step_without_overlap_percent",
    )
    rows: list[tuple[Cell, ...]] = []
    for bar in bars:
        configuration = bar.configuration
        seconds = (bar.step_s, *bar.parts, bar.allreduce_s)
        shares = [100 * bar.share(part) for part in range(len(PART_NAMES))]
        unhidden = 100 * bar.unhidden_s / bar.step_s
        rows.append((*configuration, configuration.global_batch, *seconds, *shares, unhidden))
    return Table(columns, rows)


class Error(NamedTuple):
    """Prediction against measurement, of a profiled step or of a training's epoch."""

    configuration: Configuration
    predicted_s: float
    measured_s: float
    # label, where it is one
    training: str = ""

    @property
    def relative(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted_s / self.measured_s - 1


def draw_prediction_error(run: RunContents) -> Drawing | Missing:
    """Draw relative errors of predicted step times by cluster size, and of trainings' epochs."""
    if run.plan is None:
        why = "there are no predictions before the plan"
        return Missing("prediction_error", "prediction error", why)
    steps = list(_step_errors(run))
    trainings = list(_training_errors(run))
    if not steps and not trainings:
        why = "no candidate of the plan has been measured"
        return Missing("prediction_error", "prediction error", why)
    title = _error_title(steps, trainings)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        _draw_errors(axes, steps, trainings, run.cluster_sizes)
    caption = (
        "Predicted over measured time of a step, minus one: above zero the model is too slow, "
        "below too fast. One marker per profiled configuration, from the smallest batch (left) to "
        "the largest within each number of nodes; the bar is the median, the box holds the middle "
        "half. The model was fitted to these very measurements."
    )
    if trainings:
        caption += (
            " The star compares an epoch of the real training, which the model has not seen, with "
            "its prediction."
        )
    table = _error_table([*steps, *trainings])
    return Drawing("prediction_error", title, caption, figure, table)


def _step_errors(run: RunContents) -> Iterable[Error]:
    for item in run.ok:
        candidate = find_candidate(run.plan, item.configuration)
        if candidate is not None and item.times is not None and item.times.step_time_s > 0:
            yield Error(item.configuration, candidate.model_s, item.times.step_time_s)


def _training_errors(run: RunContents) -> Iterable[Error]:
    for training in run.trainings:
        candidate = trained_candidate(run, training)
        if candidate is not None and training.epoch_time_s:
            times = candidate.epoch_time_s, training.epoch_time_s
            yield Error(candidate.configuration, *times, training.label)


def _draw_errors(
    axes: Axes, steps: Sequence[Error], trainings: Sequence[Error], sizes: list[int]
) -> None:
    axes.axhline(0, color=style.MUTED.light, linewidth=1)
    names: list[str] = []
    for nodes in sizes:
        group = [error for error in steps if error.configuration.nodes == nodes]
        if group:
            _draw_group(axes, len(names), group, style.size_style(sizes, nodes))
            names.append(f"N = {nodes}")
    for error in trainings:
        look = style.size_style(sizes, error.configuration.nodes)
        _draw_training(axes, len(names), error, look)
        name = f"training {error.training}" if len(trainings) > 1 else "training"
        names.append("\n".join([name, *_short(error.configuration).split(", ")]))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    widest = 100 * max(abs(error.relative) for error in (*steps, *trainings))
    axes.set_ylim(-max(12.0, widest * 1.15), max(12.0, widest * 1.15))
    axes.yaxis.set_major_locator(MaxNLocator(7, symmetric=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: format_percent(value / 100, signed=True).replace(".0", ""))
    )
    axes.set_ylabel("error of the predicted time")


def _draw_group(axes: Axes, x: int, group: Sequence[Error], look: style.SizeStyle) -> None:
    errors = [100 * error.relative for error in group]
    colour = look.colour
    if len(errors) >= 4:
        low, _, high = statistics.quantiles(errors, n=4, method="inclusive")
        (box,) = axes.bar(x, high - low, bottom=low, width=0.62, color=colour, linewidth=0)
        box.set(alpha=0.16, zorder=1)
    middle = statistics.median(errors)
    axes.plot([x - 0.31, x + 0.31], [middle, middle], "-", color=colour, linewidth=2, zorder=2)
    places = np.linspace(x - 0.25, x + 0.25, len(errors)) if len(errors) > 1 else [float(x)]
    (marks,) = axes.plot(places, errors, look.marker, color=colour, markersize=6)
    marks.set(markeredgecolor=style.PAPER.light, markeredgewidth=0.6)


def _draw_training(axes: Axes, x: int, error: Error, look: style.SizeStyle) -> None:
    value = 100 * error.relative
    (star,) = axes.plot([x], [value], "*", color=look.colour, markersize=13)
    star.set(markeredgecolor=style.INK.light, markeredgewidth=0.7)
    text = format_percent(error.relative, signed=True)
    style.write_beside(axes, text, (x, value), (9, 0), va="center", size=8.5)


def _error_title(steps: Sequence[Error], trainings: Sequence[Error]) -> str:
    sizes = []
    for item in trainings:
        direction = "long" if item.relative >= 0 else "short"
        sizes.append(f"{format_percent(abs(item.relative))} too {direction}")
    epochs = f"training's epochs were predicted {' and '.join(sizes)}"
    if not steps:
        return f"The {epochs}"
    middle = format_percent(statistics.median(abs(error.relative) for error in steps))
    title = f"Predicted step times are {middle} off in the median"
    if trainings:
        return f"{title}; the {epochs}"
    worst = max(steps, key=lambda error: abs(error.relative))
    where = _short(worst.configuration)
    return f"{title}, {format_percent(abs(worst.relative))} at most ({where})"


def _error_table(errors: Sequence[Error]) -> Table:
    columns = (
        "quantity",
        *CONFIGURATION_COLUMNS,
        "predicted_s",
        "measured_s",
        "relative_error_percent",
    )
    rows: list[tuple[Cell, ...]] = []
    for error in errors:
        quantity = f"training_epoch {error.training}" if error.training else "profiled_step"
        where = (*error.configuration, error.configuration.global_batch)
        times = (error.predicted_s, error.measured_s, 100 * error.relative)
        rows.append((quantity, *where, *times))
    return Table(columns, rows)


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
        style.legend(axes, _keys(points, run.cluster_sizes), columns=6)
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
    best = max(speeds.values())
    enough = min(batch for batch, speed in speeds.items() if speed >= NEARLY * best)
    title = f"A worker computes up to {format_number(best, 3)} samples a second"
    smallest = min(speeds)
    if enough == smallest:
        return f"{title}, at every batch nearly as many"
    least = f"at b = {smallest:,} it is {100 * speeds[smallest] / best:.0f} % of that"
    return f"{title}, nearly as many from b = {enough:,} on; {least}"


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
