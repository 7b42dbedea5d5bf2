"""Where the time of a step goes, and how well the model predicts it.

How many samples a worker computes in a second, against its local batch, where it takes that at
once.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
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
    """A step taken apart, seconds. The first three are measured; synchronization is what is left of the step."""

    data_s: float
    compute_s: float
    optimizer_s: float
    exposed_sync_s: float


PART_NAMES = ("data wait", "forward + backward", "optimizer", "rest (N > 1: synchronization)")
PART_COLOURS = (style.DATA, style.COMPUTE, style.OPTIMIZER, style.SYNC)


def parts_of(times: StepTimes) -> Parts:
    """Exposed synchronization = step − data − compute − optimizer, at least 0: what overlap does not hide."""
    known = times.data_time_s + times.compute_time_s + times.optimizer_time_s
    return Parts(
        times.data_time_s,
        times.compute_time_s,
        times.optimizer_time_s,
        max(0.0, times.step_time_s - known),
    )


class Bar(NamedTuple):
    """One profiled configuration."""

    configuration: Configuration
    parts: Parts
    step_s: float
    allreduce_s: float
    loader_decides: bool

    def share(self, part: int) -> float:
        """Share of the step that one part takes."""
        return self.parts[part] / self.step_s

    @property
    def unhidden_s(self) -> float:
        """When the step would end if none of the all-reduce were hidden behind the backward pass."""
        return sum(self.parts) - self.parts.exposed_sync_s + self.allreduce_s


def draw_step_breakdown(run: RunContents) -> Drawing | Missing:
    """Shares of a step per profiled configuration, as stacked bars."""
    bars = [_bar(item.configuration, item.times) for item in run.ok if item.times is not None]
    if not bars:
        return Missing("step_breakdown", "step breakdown", "no configuration has been measured yet")
    title = _breakdown_title(bars)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 1.25 + ROW_IN * len(_rows(bars)))
        _draw_bars(axes, bars, run.cluster_sizes)
        keys = [
            style.Key(name, marker="s", colour=colour.light)
            for name, colour in zip(PART_NAMES, PART_COLOURS, strict=True)
        ]
        if any(bar.allreduce_s for bar in bars):
            keys.append(style.Key("bare all-reduce, unhidden", marker="D", colour=style.INK.light))
        style.legend(axes, keys, columns=3, left=-0.22)
    return Drawing(
        "step_breakdown", title, _breakdown_caption(bars), figure, _breakdown_table(bars)
    )


def _breakdown_caption(bars: Sequence[Bar]) -> str:
    text = (
        "One bar per profiled configuration, as shares of its step; the step's time stands at the right. The wait "
        "for data is that of the timed steps. Forward and backward, optimizer and the bare all-reduce of the "
        "gradients are measured apart; the rest is what remains of the whole step, with several workers mostly "
        "synchronization that is not hidden. "
    )
    if any(bar.allreduce_s for bar in bars):
        text += (
            "The diamond adds to the other parts, in place of the rest, the bare all-reduce: there the step would end "
            "if none of it were hidden behind the backward pass and nothing else held the step up. Right of its bar's "
            "end, that much is hidden; left of it, the step takes longer than its parts and the all-reduce together, "
            "as where workers wait for the slowest. "
        )
    return f"{text}Bars may end beyond 100 %, as their parts are measured apart."


def _bar(configuration: Configuration, times: StepTimes) -> Bar:
    decides = loader_decides(times)
    return Bar(configuration, parts_of(times), times.step_time_s, times.allreduce_time_s, decides)


def _rows(bars: Sequence[Bar]) -> list[Bar | None]:
    """Bars from the top down, with an empty row between cluster sizes."""
    rows: list[Bar | None] = []
    for bar in bars:
        previous = rows[-1] if rows else None
        if previous is not None and previous.configuration.nodes != bar.configuration.nodes:
            rows.append(None)
        rows.append(bar)
    return rows


def _draw_bars(axes: Axes, bars: Sequence[Bar], sizes: list[int]) -> None:
    rows = _rows(bars)
    placed = [(y, bar) for y, bar in enumerate(rows) if bar is not None]
    for y, bar in placed:
        _draw_bar(axes, y, bar)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    widest = max(max(sum(bar.parts), bar.unhidden_s) / bar.step_s for bar in bars)
    axes.set_xlim(0, max(1.0, widest) * 1.16)
    style.named_ticks(axes, [0.0, 0.25, 0.5, 0.75, 1.0], lambda share: f"{100 * share:.0f} %")
    axes.set_xlabel("share of a step's time")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(
        [y for y, _ in placed],
        [
            f"N = {bar.configuration.nodes}, B = {bar.configuration.global_batch:,}"
            for _, bar in placed
        ],
    )
    for label, (_, bar) in zip(axes.get_yticklabels(), placed, strict=True):
        label.set_color(style.size_style(sizes, bar.configuration.nodes).colour)


def _draw_bar(axes: Axes, y: int, bar: Bar) -> None:
    left = 0.0
    for seconds, colour in zip(bar.parts, PART_COLOURS, strict=True):
        axes.barh(y, seconds / bar.step_s, left=left, height=0.74, color=colour.light, linewidth=0)
        left += seconds / bar.step_s
    if bar.allreduce_s > 0:
        axes.plot(
            [bar.unhidden_s / bar.step_s],
            [y],
            "D",
            color=style.INK.light,
            markersize=4.2,
            markeredgecolor=style.PAPER.light,
            markeredgewidth=0.7,
        )
    axes.annotate(
        format_duration(bar.step_s),
        (1, y),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="center",
        size=8,
    )


def _breakdown_title(bars: Sequence[Bar]) -> str:
    """Name the part, other than computing, that costs most somewhere. One worker's rest has no name: it shares none."""
    slow = [bar for bar in bars if bar.loader_decides]
    if slow:
        worst = max(slow, key=lambda bar: bar.share(0))
        share = format_percent(worst.share(0))
        return f"The data loader decides: waiting for data takes {share} of a step at {_short(worst.configuration)}"
    named = [(part, bar) for bar in bars for part in _named_parts(bar)]
    part, worst = max(named, key=lambda item: item[1].share(item[0]))
    share = format_percent(worst.share(part))
    if worst.share(part) < NOTABLE:
        return _calm_title(bars, share)
    title = f"{_subject(part, worst)} takes {share} of a step at {_short(worst.configuration)}"
    least = min((bar for other, bar in named if other == part), key=lambda bar: bar.share(part))
    if least.share(part) > 0.8 * worst.share(part):
        return title
    share = format_percent(least.share(part)) if least.share(part) >= 0.005 else "hardly any"
    return f"{title}, but {share} at {_short(least.configuration)}"


def _subject(part: int, bar: Bar) -> str:
    """The part of a step in words."""
    return ("Waiting for data", "", "The optimizer", _rest(bar))[part]


def _rest(bar: Bar) -> str:
    """What is left of a step of several workers; what the all-reduce cannot explain is no exchange."""
    if bar.allreduce_s <= 0:
        return "Synchronization"
    exchanged = bar.parts.exposed_sync_s <= EXCHANGE * bar.allreduce_s
    return "Exchanging gradients" if exchanged else "Waiting for other workers"


def _named_parts(bar: Bar) -> tuple[int, ...]:
    return (0, 2, 3) if bar.configuration.world_size > 1 else (0, 2)


def _calm_title(bars: Sequence[Bar], share: str) -> str:
    """Where no named part takes more than that share of a step."""
    if all(bar.share(3) < NOTABLE for bar in bars):
        return f"Computing fills every step: no other part takes more than {share}"
    exchange = (
        " nor exchanging gradients" if any(bar.configuration.world_size > 1 for bar in bars) else ""
    )
    return f"Neither data nor the optimizer{exchange} takes more than {share} of a step"


def _short(configuration: Configuration) -> str:
    return f"N = {configuration.nodes}, B = {configuration.global_batch:,}"


def _breakdown_table(bars: Sequence[Bar]) -> Table:
    columns = (
        "nodes",
        "workers_per_node",
        "local_batch_samples",
        "global_batch_samples",
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
    rows: list[tuple[Cell, ...]] = [
        (
            *bar.configuration,
            bar.configuration.global_batch,
            bar.step_s,
            *bar.parts,
            bar.allreduce_s,
            *(100 * bar.share(part) for part in range(len(PART_NAMES))),
            100 * bar.unhidden_s / bar.step_s,
        )
        for bar in bars
    ]
    return Table(columns, rows)


class Error(NamedTuple):
    """Prediction against measurement of one configuration, or of a training's epochs (`training` is its label)."""

    configuration: Configuration
    predicted_s: float
    measured_s: float
    training: str = ""

    @property
    def relative(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted_s / self.measured_s - 1


def draw_prediction_error(run: RunContents) -> Drawing | Missing:
    """Relative error of the predicted step time per configuration, by cluster size, and of the training's epochs."""
    if run.plan is None:
        return Missing(
            "prediction_error", "prediction error", "there are no predictions before the plan"
        )
    steps = list(_step_errors(run))
    trainings = list(_training_errors(run))
    if not steps and not trainings:
        return Missing(
            "prediction_error", "prediction error", "no candidate of the plan has been measured"
        )
    title = _error_title(steps, trainings)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        _draw_errors(axes, steps, trainings, run.cluster_sizes)
    caption = (
        "Predicted over measured time of a step, minus one: above zero the model is too slow, below too fast. One "
        "marker per profiled configuration, from the smallest batch (left) to the largest within each number of nodes; "
        "the bar is the median, the box holds the middle half. The model was fitted to these very measurements. "
    )
    if trainings:
        caption += "The star compares an epoch of the real training, which the model has not seen, with its prediction."
    return Drawing(
        "prediction_error", title, caption.strip(), figure, _error_table(steps, trainings)
    )


def _step_errors(run: RunContents) -> Iterable[Error]:
    for item in run.ok:
        candidate = find_candidate(run.plan, item.configuration)
        if candidate is not None and item.times is not None and item.times.step_time_s > 0:
            yield Error(item.configuration, candidate.step_time_s, item.times.step_time_s)


def _training_errors(run: RunContents) -> Iterable[Error]:
    for training in run.trainings:
        candidate = trained_candidate(run, training)
        if candidate is not None and training.epoch_time_s:
            yield Error(
                candidate.configuration,
                candidate.epoch_time_s,
                training.epoch_time_s,
                training.label,
            )


def _draw_errors(
    axes: Axes, steps: Sequence[Error], trainings: Sequence[Error], sizes: list[int]
) -> None:
    groups = [[error for error in steps if error.configuration.nodes == nodes] for nodes in sizes]
    groups = [group for group in groups if group]
    axes.axhline(0, color=style.MUTED.light, linewidth=1)
    for x, group in enumerate(groups):
        _draw_group(axes, x, group, style.size_style(sizes, group[0].configuration.nodes))
    for x, error in enumerate(trainings, start=len(groups)):
        _draw_training(axes, x, error, style.size_style(sizes, error.configuration.nodes))
    names = [f"N = {group[0].configuration.nodes}" for group in groups]
    names += [_training_name(error, named=len(trainings) > 1) for error in trainings]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    widest = 100 * max(abs(error.relative) for error in (*steps, *trainings))
    axes.set_ylim(-max(12.0, widest * 1.15), max(12.0, widest * 1.15))
    axes.yaxis.set_major_locator(MaxNLocator(7, symmetric=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: format_percent(value / 100, signed=True).replace(".0", ""))
    )
    axes.set_ylabel("error of the predicted time")


def _training_name(error: Error, *, named: bool) -> str:
    name = f"training {error.training}" if named else "training"
    return "\n".join([name, *_short(error.configuration).split(", ")])


def _draw_group(axes: Axes, x: int, group: Sequence[Error], look: style.SizeStyle) -> None:
    errors = [100 * error.relative for error in group]
    if len(errors) >= 4:
        low, _, high = statistics.quantiles(errors, n=4, method="inclusive")
        axes.bar(
            x,
            high - low,
            bottom=low,
            width=0.62,
            color=look.colour,
            alpha=0.16,
            linewidth=0,
            zorder=1,
        )
    middle = statistics.median(errors)
    axes.plot([x - 0.31, x + 0.31], [middle, middle], "-", color=look.colour, linewidth=2, zorder=2)
    spread = [
        x + (0.5 if len(errors) == 1 else place / (len(errors) - 1)) * 0.5 - 0.25
        for place in range(len(errors))
    ]
    axes.plot(
        spread,
        errors,
        look.marker,
        color=look.colour,
        markeredgecolor=style.PAPER.light,
        markeredgewidth=0.6,
        markersize=6,
    )


def _draw_training(axes: Axes, x: int, error: Error, look: style.SizeStyle) -> None:
    value = 100 * error.relative
    axes.plot(
        [x],
        [value],
        "*",
        color=look.colour,
        markeredgecolor=style.INK.light,
        markeredgewidth=0.7,
        markersize=13,
    )
    axes.annotate(
        format_percent(error.relative, signed=True),
        (x, value),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        size=8.5,
    )


def _error_title(steps: Sequence[Error], trainings: Sequence[Error]) -> str:
    sizes = (
        f"{format_percent(abs(item.relative))} too {'long' if item.relative >= 0 else 'short'}"
        for item in trainings
    )
    training = f"the training's epochs were predicted {' and '.join(sizes)}" if trainings else ""
    if not steps:
        return training[:1].upper() + training[1:]
    worst = max(steps, key=lambda error: abs(error.relative))
    middle = format_percent(statistics.median(abs(error.relative) for error in steps))
    title = f"Predicted step times are {middle} off in the median"
    return (
        f"{title}; {training}"
        if training
        else f"{title}, {format_percent(abs(worst.relative))} at most ({_short(worst.configuration)})"
    )


def _error_table(steps: Sequence[Error], trainings: Sequence[Error]) -> Table:
    columns = (
        "quantity",
        "nodes",
        "workers_per_node",
        "local_batch_samples",
        "global_batch_samples",
        "predicted_s",
        "measured_s",
        "relative_error_percent",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            f"training_epoch {error.training}" if error.training else "profiled_step",
            *error.configuration,
            error.configuration.global_batch,
            error.predicted_s,
            error.measured_s,
            100 * error.relative,
        )
        for error in (*steps, *trainings)
    ]
    return Table(columns, rows)


# of the highest speed: from there on larger batches gain little
NEARLY = 0.9


class Point(NamedTuple):
    """Forward and backward of one batch, timed without synchronization."""

    # the batch is the one that was computed
    configuration: Configuration
    seconds: float
    # it was timed beside a profile with a larger batch
    beside: bool

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
        style.value_axis(
            axes, [p.samples_per_second for p in points], label="samples per second and worker"
        )
        axes.plot(
            list(speeds),
            list(speeds.values()),
            "-",
            color=style.MUTED.light,
            linewidth=1.2,
            zorder=1,
        )
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
        (p.configuration.local_batch, p.samples_per_second)
        for p in points
        if p.configuration.nodes == where
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
        (*point.configuration, point.seconds, point.samples_per_second, point.beside)
        for point in points
    ]
    return Table(columns, rows)
