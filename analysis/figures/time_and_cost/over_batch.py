"""Epoch time, time to the same progress, and cost against the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import CONFIGURATION_COLUMNS, Cell, Drawing, Missing, Table
from tula_hpc.analysis.run_contents import RunContents, cost_at, measured_epoch
from tula_hpc.formatting import (
    FOREVER_S,
    format_duration,
    format_money,
    format_number,
    format_percent,
    plural,
)
from tula_hpc.records import Candidate, Configuration, Interval, Knee, Measurement, Plan

# most names at the ends of lines; for a line without marks that is clearer than a legend
MOST_NAMES = 14
# most names in the legend, where they are written if the ends of lines have no room
MOST_KEYS = 32


class Quantity(NamedTuple):
    """The quantity on the y axis, by default a duration."""

    # name of the figure's files without suffix
    name: str
    # name of the field of Candidate, and of the table's column unless `column` is
    field: str
    label: str
    column: str = ""
    write: Callable[[float], str] = format_duration
    durations: bool = True


class Point(NamedTuple):
    """One mark: a configuration, its value, and whether the prediction calls it feasible."""

    configuration: Configuration
    interval: Interval
    # None for a measurement
    feasible: bool | None = None


class Curves(NamedTuple):
    """The content of one figure over the batch."""

    measured: list[Point]
    predicted: list[Point]
    chosen: Candidate | None
    out_of_memory: list[Configuration]
    knee: Knee | None = None

    @property
    def has_infeasible(self) -> bool:
        """Tell whether a prediction is infeasible."""
        return not all(point.feasible for point in self.predicted)

    @property
    def hopeless(self) -> list[int]:
        """Batches beyond the largest that is feasible on any number of nodes."""
        feasible = [point.configuration.global_batch for point in self.predicted if point.feasible]
        largest = max(feasible, default=math.inf)
        return [batch for batch in self.batches if batch > largest]

    @property
    def batches(self) -> list[int]:
        """Every global batch that occurs."""
        known = [point.configuration for point in (*self.measured, *self.predicted)]
        return sorted({item.global_batch for item in (*known, *self.out_of_memory)})

    @property
    def knee_batch(self) -> float | None:
        """Position of the knee, if the curve has one among these batches."""
        batch = self.knee.global_batch if self.knee is not None else None
        return None if batch is None or batch > max(self.batches) else batch


def _on(nodes: int, points: Iterable[Point]) -> list[Point]:
    mine = [point for point in points if point.configuration.nodes == nodes]
    return sorted(mine, key=lambda point: point.configuration)


def draw_epoch_time(run: RunContents) -> Drawing | Missing:
    """Draw measured and predicted epoch time against the global batch, a line per cluster size."""
    samples = run.plan.dataset_samples if run.plan else 0
    epochs = [(item.configuration, measured_epoch(item, samples)) for item in run.comparable]
    measured = [Point(where, epoch) for where, epoch in epochs if epoch is not None]
    curves = _curves(run, measured, "epoch_time_s")
    if run.plan:
        curves = curves._replace(knee=run.plan.knee)
    if not curves.measured and not curves.predicted:
        return Missing("epoch_time", "epoch time", "no configuration has been measured yet")
    quantity = Quantity("epoch_time", "epoch_time_s", "time of an epoch")
    caption = (
        "Time of an epoch, against the number of samples that all nodes together process per step. "
        "Lower is better; one colour per number of nodes N."
    )
    return _draw(run, curves, quantity, _time_title(curves), caption)


def draw_cost(run: RunContents) -> Drawing | Missing:
    """Draw the cost of the whole training against the global batch, a line per cluster size."""
    if run.plan is None:
        return Missing("cost", "cost", "prices come with the plan, and there is none yet")
    measured: list[Point] = []
    for item in run.comparable:
        measured += _measured_cost(run.plan, item)
    currency = run.plan.chosen.currency
    quantity = Quantity(
        "cost",
        "cost",
        f"cost of the training, {currency}",
        f"cost_{currency.lower()}",
        lambda amount: format_money(amount, currency),
        durations=False,
    )
    caption = (
        f"What the whole training of {plural(run.plan.epochs, 'epoch')} costs. Lower is better. "
        "More nodes finish sooner, but pay for the time in which they wait for one another. "
        "Measured points are measured step times at the plan's price; evaluation and start-up cost "
        "what the plan says."
    )
    return _draw(run, _curves(run, measured, "cost"), quantity, _cost_title(run.plan), caption)


def draw_progress(run: RunContents) -> Drawing | Missing:
    """Draw the time to the same progress against the global batch, a line per cluster size."""
    heading = "time to the same progress"
    if run.plan is None or run.plan.chosen.progress_time_s is None:
        return Missing("progress", heading, "no gradient noise was measured")
    quantity = Quantity("progress", "progress_time_s", heading)
    chosen = run.plan.chosen
    feasible = [c for c in run.plan.candidates if c.feasible and c.progress_time_s]
    best = min(feasible, key=lambda c: c.progress_time_s or math.inf, default=chosen)
    # not rounded by their intervals, which could make values that are 5 % apart look far apart
    least = format_duration(best.progress_time_s)
    title = f"Least time to the same progress: {_place(best)}, {least}"
    if best.configuration != chosen.configuration:
        title += f"; the chosen one takes {format_duration(chosen.progress_time_s)}"
    caption = (
        f"Expected time to make the progress of {plural(run.plan.epochs, 'epoch')} at "
        "training.base_batch, if gradients are not scaled: beyond the critical batch, a larger "
        "batch learns less from each sample. Noise measured early in training overstates this."
    )
    return _draw(run, _curves(run, [], quantity.field), quantity, title, caption)


def _curves(run: RunContents, measured: list[Point], field: str) -> Curves:
    if run.plan is None:
        return Curves(measured, [], None, run.out_of_memory)
    line = []
    for item in run.plan.candidates:
        # the time is 0 if the training samples do not fill one batch
        if item.train_time_s > 0 and item.wall_time_s < FOREVER_S:
            line.append(Point(item.configuration, item.predicted(field), item.feasible))
    return Curves(measured, line, run.plan.chosen, run.out_of_memory)


def _measured_cost(plan: Plan, item: Measurement) -> Iterable[Point]:
    """Yield the cost that the plan would predict from the measured epoch time, if there is one."""
    candidate = plan.find(item.configuration)
    epoch = measured_epoch(item, plan.dataset_samples)
    if candidate and epoch and candidate.train_time_s > 0:
        relative = epoch.times(plan.epochs / candidate.train_time_s)
        yield Point(item.configuration, Interval(*(cost_at(candidate, pace) for pace in relative)))


def _draw(
    run: RunContents, curves: Curves, quantity: Quantity, title: str, caption: str
) -> Drawing:
    sizes = run.cluster_sizes
    ends = list(_end_labels(curves, sizes))
    at_ends = labels.have_room([end.key.text for end in ends], MOST_NAMES)
    values: list[float] = []
    for point in (*curves.measured, *curves.predicted):
        values += point.interval
    with style.new_figure(title, 3.7) as (figure, (axes,)):
        style.batch_axis(axes, curves.batches, style.BATCH_LABEL, right=0.13 if at_ends else 0.05)
        style.value_axis(axes, values, label=quantity.label, durations=quantity.durations)
        _shade_infeasible(axes, curves)
        _draw_knee(axes, curves)
        for nodes in sizes:
            look = style.size_style(sizes, nodes)
            _draw_predicted(axes, _on(nodes, curves.predicted), look.colour)
            _draw_measured(axes, _on(nodes, curves.measured), look)
        _draw_out_of_memory(axes, curves, sizes)
        taken = labels.label_ends(axes, ends if at_ends else [])
        _mark_chosen(axes, curves, quantity, taken)
        named = []
        if not at_ends:
            every = -(-len(ends) // MOST_KEYS)
            named = [end.key for end in ends[::every]]
        style.legend(axes, [*named, *_keys(curves)])
    caption = " ".join([caption, *_explain_marks(curves)])
    return Drawing(quantity.name, title, caption, figure, _table(curves, quantity))


def _columns(points: list[Point]) -> labels.Points:
    """Return batches, values, and low and high ends of their intervals, (4, points)."""
    rows = [(point.configuration.global_batch, *point.interval) for point in points]
    return np.array(rows, dtype=np.float64).reshape(-1, 4).T


def _draw_predicted(axes: Axes, line: list[Point], colour: str) -> None:
    batches, values, low, high = _columns(line)
    if line:
        style.fill_band(axes, batches, low, high, color=colour, alpha=0.16)
    mark = style.lone_mark(line)
    # the dotted line is visible where the solid one leaves out infeasible points
    axes.plot(batches, values, ":", color=colour, linewidth=1.1, zorder=2, **mark)
    feasible = np.array([point.feasible for point in line], dtype=bool)
    axes.plot(batches, np.where(feasible, values, np.nan), "-", color=colour, zorder=3, **mark)


def _draw_measured(axes: Axes, points: list[Point], look: style.Key) -> None:
    if not points:
        return
    batches, values, low, high = _columns(points)
    axes.errorbar(
        batches,
        values,
        yerr=np.maximum(0.0, [values - low, high - values]),
        fmt=look.marker,
        color=look.colour,
        markeredgecolor=style.PAPER.light,
        markeredgewidth=0.6,
        markersize=5.5,
        elinewidth=1.2,
        zorder=4,
    )


def _shade_infeasible(axes: Axes, curves: Curves) -> None:
    """Shade the batches beyond the largest that is feasible on any cluster size."""
    if not curves.hopeless:
        return
    first = curves.hopeless[0]
    last = max(batch for batch in curves.batches if batch < first)
    grey = style.SHADE.light
    axes.axvspan((last * first) ** 0.5, axes.get_xlim()[1], color=grey, zorder=0)
    text = "not feasible\non any N"
    note = style.annotate_near(axes, text, (1, 1), (-4, -4), xycoords="axes fraction", size=8)
    note.set(ha="right", va="top", color=style.MUTED.light)


def _draw_knee(axes: Axes, curves: Curves) -> None:
    if curves.knee is None or curves.knee_batch is None:
        return
    grey = style.MUTED.light
    if curves.knee.interval_90 is not None:
        low, high = np.clip(curves.knee.interval_90, *axes.get_xlim()).tolist()
        axes.axvspan(low, high, color=grey, alpha=0.16, linewidth=0, zorder=1)
    axes.axvline(curves.knee_batch, color=grey, linestyle="--", linewidth=1.0, zorder=1)


def _draw_out_of_memory(axes: Axes, curves: Curves, sizes: list[int]) -> None:
    known = dict(point[:2] for point in curves.predicted)
    for configuration in curves.out_of_memory:
        y = axes.get_ylim()[1]
        if configuration in known:
            y = known[configuration].value
        colour = style.size_style(sizes, configuration.nodes).colour
        (cross,) = axes.plot([configuration.global_batch], [y], "x", color=colour, zorder=5)
        cross.set(markersize=7, markeredgewidth=2, clip_on=False)


def _mark_chosen(axes: Axes, curves: Curves, quantity: Quantity, taken: labels.Points) -> None:
    chosen = curves.chosen
    if chosen is None:
        return
    lines: list[list[tuple[float, float]]] = []
    for nodes in {point.configuration.nodes for point in curves.predicted}:
        batches, values, *_ = _columns(_on(nodes, curves.predicted)).tolist()
        lines.append(list(zip(batches, values, strict=True)))
    for batch, _, least, most in _columns(curves.measured).T.tolist():
        lines.append([(batch, least), (batch, most)])
    if curves.knee_batch is not None:
        low, high = axes.get_ylim()
        lines.append([(curves.knee_batch, low), (curves.knee_batch, high)])
    value = float(getattr(chosen, quantity.field))
    text = f"chosen: {chosen.configuration.short}\n{quantity.write(value)}"
    labels.mark_chosen(axes, (chosen.global_batch, value), text, lines=lines, taken=taken)


def _end_labels(curves: Curves, sizes: list[int]) -> Iterable[labels.EndLabel]:
    for nodes in sizes:
        points = (*_on(nodes, curves.predicted), *_on(nodes, curves.measured))
        if points:
            last = max(points, key=lambda point: point.configuration.local_batch)
            end = last.configuration.global_batch, last.interval.value
            look = style.size_style(sizes, nodes)._replace(line="-")
            yield labels.EndLabel(*end, look)


def _keys(curves: Curves) -> Iterable[style.Key]:
    if curves.measured:
        yield style.Key("measured", marker="o")
    if curves.predicted:
        yield style.Key("predicted", line="-")
        yield style.Key("90 % interval", line="-", band=True)
    if curves.has_infeasible:
        yield style.Key("not feasible", line=":")
    if curves.out_of_memory:
        yield style.Key("ran out of memory", marker="x")
    if curves.knee and curves.knee_batch is not None:
        name = "knee, 90 % interval" if curves.knee.interval_90 is not None else "knee"
        # its band would look like that of the predictions
        yield style.Key(name, line="--")


def _explain_marks(curves: Curves) -> Iterable[str]:
    if curves.measured:
        yield (
            "Markers are measurements, with bars for their 95 % intervals (often hidden by the "
            "marker)."
        )
    if curves.predicted:
        yield (
            "Lines are the model's predictions, with bands for its 90 % intervals; the ring marks "
            "the chosen point."
        )
    if curves.has_infeasible:
        yield "Dotted parts do not fit in memory or are ruled out otherwise."
    if curves.hopeless:
        yield "In the grey region this holds for every N."
    if curves.knee is not None:
        yield _describe_knee(curves.knee, max(curves.batches))
    if curves.out_of_memory:
        yield "Crosses mark configurations that ran out of memory when they were tried."


def _describe_knee(knee: Knee, largest: int) -> str:
    if knee.global_batch is None:
        return "The curve of the least time has no knee."
    text = f"Beyond the dashed knee at B = {knee.global_batch:,.0f} a larger batch saves little"
    if knee.global_batch > largest:
        text = f"The knee, at B = {knee.global_batch:,.0f}, lies beyond these batches"
    if knee.between:
        text += f"; it lies {knee.between} with 90 % probability"
        if knee.share_without_knee:
            text += f"; {format_percent(knee.share_without_knee)} of the curves have none"
    return f"{text}."


def _place(item: Configuration | Candidate) -> str:
    return f"{plural(item.nodes, 'node')} with batch {item.global_batch:,}"


def _time_title(curves: Curves) -> str:
    chosen = curves.chosen
    if chosen is None:
        best = min(curves.measured, key=lambda point: point.interval.value)
        time = format_duration(best.interval.value)
        return f"Fastest epoch so far: {time}, measured on {_place(best.configuration)}"
    how = "" if chosen.measured else ", predicted"
    title = f"{_place(chosen)}: an epoch in {format_duration(chosen.epoch_time_s)}{how}"
    first = min(
        (point for point in curves.predicted if point.feasible),
        key=lambda point: (point.configuration.nodes, point.configuration.local_batch),
        default=None,
    )
    if first is None or first.configuration == chosen.configuration:
        return title
    factor = first.interval.value / chosen.epoch_time_s
    where = _place(first.configuration)
    if factor < 1.05:
        return f"{title}, against {format_duration(first.interval.value)} for {where}"
    return f"{title}, {format_number(factor, 2)} times as fast as {where}"


def _cost_title(plan: Plan) -> str:
    chosen = plan.chosen
    feasible = [item for item in plan.candidates if item.feasible]
    cheapest = min(feasible, key=lambda item: item.cost, default=chosen)
    price = format_money(chosen.cost, chosen.currency)
    least = format_money(cheapest.cost, cheapest.currency)
    title = f"The chosen configuration would cost {price}"
    there = f" on {chosen.partition}" if chosen.partition else ""
    if cheapest.cost >= chosen.cost or least == price:
        return f"{title}, as cheap as any{there}"
    where = f"{plural(cheapest.nodes, 'node')}, batch {cheapest.global_batch:,}"
    cost = f"the cheapest{there} ({where}) would cost {least}"
    return f"{title}; {cost}, {_compare_times(cheapest, chosen)}"


def _compare_times(item: Candidate, chosen: Candidate) -> str:
    # not rounded by their intervals, which could make times that are 2 % apart look far apart
    time, other = (format_duration(each.wall_time_s) for each in (item, chosen))
    if time == other:
        return "and be as fast"
    verb = "but" if item.wall_time_s > chosen.wall_time_s else "and"
    return f"{verb} take {time} instead of {other}"


def _table(curves: Curves, quantity: Quantity) -> Table:
    column = quantity.column or quantity.field
    values = (column, f"low_{column}", f"high_{column}")
    columns = ("mark", *CONFIGURATION_COLUMNS, *values, "feasible", "chosen")
    chosen = curves.chosen.configuration if curves.chosen else None
    rows: list[tuple[Cell, ...]] = []
    marks = {"measured_95": curves.measured, "predicted_90": curves.predicted}
    for mark, points in marks.items():
        for point in points:
            item = point.configuration
            flags = point.feasible, item == chosen
            rows.append((mark, *item, item.global_batch, *point.interval, *flags))
    for item in curves.out_of_memory:
        rows.append(("out_of_memory", *item, item.global_batch, None, None, None, False, False))
    return Table(columns, rows)
