"""Epoch time and training cost against the global batch: what was measured, what is predicted, what was chosen.

Time against cost of all candidates, with the Pareto front: what a sooner end costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis.costs.pricing import FOREVER_S
from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.run_contents import (
    Interval,
    RunContents,
    cost_at,
    find_candidate,
    measured_epoch,
    predicted,
)
from tula_hpc.formatting import format_duration, format_money, format_number, format_percent, plural
from tula_hpc.records import Candidate, Configuration, Knee, Measurement, Plan

# at the ends of lines: beside one that has no marks a name tells more than in a legend
MOST_NAMES = 14
BATCH_LABEL = "global batch B (samples per step over all nodes)"


class Quantity(NamedTuple):
    """What the y axis shows."""

    # stem of the files
    name: str
    column: str
    # of Candidate
    field: str
    label: str
    write: Callable[[float], str]
    durations: bool


class Point(NamedTuple):
    """One mark: a configuration, its value, and whether the prediction calls it feasible."""

    configuration: Configuration
    interval: Interval
    feasible: bool = True


class Curves(NamedTuple):
    """Everything that one of these figures draws."""

    measured: list[Point]
    predicted: list[Point]
    chosen: Candidate | None
    out_of_memory: list[Configuration]
    knee: Knee | None = None

    def of(self, nodes: int) -> tuple[list[Point], list[Point]]:
        """Measured and predicted points of one cluster size, by batch."""
        mine = (
            [point for point in points if point.configuration.nodes == nodes]
            for points in (self.measured, self.predicted)
        )
        measured, line = (sorted(points, key=lambda point: point.configuration) for points in mine)
        return measured, line

    @property
    def hopeless(self) -> list[int]:
        """Batches beyond the largest that is feasible on any N."""
        feasible = [point.configuration.global_batch for point in self.predicted if point.feasible]
        return [batch for batch in self.batches if feasible and batch > max(feasible)]

    @property
    def batches(self) -> list[int]:
        """Every global batch that occurs."""
        points = [point.configuration for point in (*self.measured, *self.predicted)]
        return sorted(
            {configuration.global_batch for configuration in (*points, *self.out_of_memory)}
        )


def draw_epoch_time(run: RunContents) -> Drawing | Missing:
    """Measured and predicted epoch time against the global batch, one line per cluster size."""
    measured = [
        Point(item.configuration, epoch)
        for item in run.ok
        if (epoch := measured_epoch(item, run.samples_of(item)))
    ]
    curves = _curves(run, measured, "epoch_time_s")._replace(
        knee=run.plan.knee if run.plan else None
    )
    if not curves.measured and not curves.predicted:
        return Missing("epoch_time", "epoch time", "no configuration has been measured yet")
    quantity = Quantity(
        "epoch_time",
        "epoch_time_s",
        "epoch_time_s",
        "time of an epoch",
        format_duration,
        durations=True,
    )
    caption = (
        "Time to see every training sample once, against the number of samples that all nodes together process per "
        "step. Lower is better; one colour per number of nodes N. "
    )
    return _draw(run, curves, quantity, _time_title(curves), caption + _reading(curves))


def draw_cost(run: RunContents) -> Drawing | Missing:
    """Cost of the whole training against the global batch, one line per cluster size."""
    if run.plan is None:
        return Missing("cost", "cost", "prices come with the plan, and there is none yet")
    measured = [point for item in run.ok for point in _measured_cost(run.plan, item)]
    curves = _curves(run, measured, "cost")
    currency = run.plan.chosen.currency
    quantity = Quantity(
        "cost",
        f"cost_{currency.lower()}",
        "cost",
        f"cost of the training, {currency}",
        lambda amount: format_money(amount, currency),
        durations=False,
    )
    caption = (
        f"What the whole training of {plural(run.plan.epochs, 'epoch')} costs. Lower is better. More nodes finish "
        "sooner, but pay for the time in which they wait for one another. Measured points are measured step times at "
        "the plan's price; evaluation and start-up cost what the plan says. "
    )
    return _draw(run, curves, quantity, _cost_title(run.plan), caption + _reading(curves))


def _curves(run: RunContents, measured: list[Point], field: str) -> Curves:
    candidates = (
        [item for item in run.plan.candidates if (item.wall_time_s or 0) < FOREVER_S]
        if run.plan
        else []
    )
    # an epoch of less than one full batch takes no time
    timed = [item for item in candidates if item.train_time_s > 0]
    line = [Point(item.configuration, predicted(item, field), item.feasible) for item in timed]
    return Curves(measured, line, run.plan.chosen if run.plan else None, run.out_of_memory)


def _measured_cost(plan: Plan, item: Measurement) -> Iterable[Point]:
    """What the plan says, had it known the measured epoch time of a configuration."""
    candidate = find_candidate(plan, item.configuration)
    epoch = measured_epoch(item, item.dataset_samples or plan.dataset_samples)
    if candidate and epoch and candidate.train_time_s > 0:
        relative = epoch.times(plan.epochs / candidate.train_time_s)
        yield Point(item.configuration, Interval(*(cost_at(candidate, pace) for pace in relative)))


def _draw(
    run: RunContents, curves: Curves, quantity: Quantity, title: str, caption: str
) -> Drawing:
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.7)
        points = [point.interval for point in (*curves.measured, *curves.predicted)]
        ends, keys = list(_end_labels(curves, run.cluster_sizes)), _keys(curves)
        beside = labels.have_room([end.text for end in ends], MOST_NAMES)
        style.batch_axis(axes, curves.batches, BATCH_LABEL, right=0.13 if beside else 0.05)
        style.value_axis(
            axes,
            [end for interval in points for end in interval],
            label=quantity.label,
            durations=quantity.durations,
        )
        _shade_infeasible(axes, curves)
        _draw_knee(axes, curves.knee)
        for nodes in run.cluster_sizes:
            _draw_size(axes, curves, nodes, style.size_style(run.cluster_sizes, nodes))
        _draw_out_of_memory(axes, curves, run.cluster_sizes)
        taken = labels.label_ends(axes, ends if beside else [])
        _mark_chosen(axes, curves, quantity, taken)
        style.legend(
            axes,
            keys if beside else [*(end.key for end in ends), *keys],
            columns=5 if beside else 6,
        )
    return Drawing(quantity.name, title, caption, figure, _table(curves, quantity))


def _draw_size(axes: Axes, curves: Curves, nodes: int, look: style.SizeStyle) -> None:
    measured, line = curves.of(nodes)
    batches = [point.configuration.global_batch for point in line]
    if line:
        low, high = [point.interval.low for point in line], [point.interval.high for point in line]
        axes.fill_between(batches, low, high, color=look.colour, alpha=0.16, linewidth=0)
    values = [point.interval.value for point in line]
    # shows through where it is infeasible
    axes.plot(batches, values, ":", color=look.colour, linewidth=1.1, zorder=2)
    feasible = [
        value if point.feasible else float("nan") for value, point in zip(values, line, strict=True)
    ]
    axes.plot(batches, feasible, "-", color=look.colour, zorder=3)
    if measured:
        x = [point.configuration.global_batch for point in measured]
        bars = [
            (p.interval.value - p.interval.low, p.interval.high - p.interval.value)
            for p in measured
        ]
        axes.errorbar(
            x,
            [point.interval.value for point in measured],
            yerr=[[max(0.0, end) for end in ends] for ends in zip(*bars, strict=True)],
            fmt=look.marker,
            color=look.colour,
            markeredgecolor=style.PAPER.light,
            markeredgewidth=0.6,
            markersize=5.5,
            elinewidth=1.2,
            zorder=4,
        )


def _shade_infeasible(axes: Axes, curves: Curves) -> None:
    """Grey from the last batch that any cluster size can run to the first that none can."""
    if curves.hopeless:
        last = max(batch for batch in curves.batches if batch < curves.hopeless[0])
        start = (last * curves.hopeless[0]) ** 0.5
        axes.axvspan(start, axes.get_xlim()[1], color=style.SHADE.light, zorder=0)
        axes.annotate(
            "not feasible\non any N",
            (1, 1),
            xycoords="axes fraction",
            xytext=(-4, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=style.MUTED.light,
            size=8,
        )


def _draw_knee(axes: Axes, knee: Knee | None) -> None:
    """A line at the knee in a band as wide as its interval; neither where the curve has none."""
    if knee is None or knee.global_batch is None:
        return
    if knee.interval_90 is not None:
        axes.axvspan(*knee.interval_90, color=style.MUTED.light, alpha=0.16, linewidth=0, zorder=1)
    axes.axvline(
        knee.global_batch, color=style.MUTED.light, linestyle="--", linewidth=1.0, zorder=1
    )


def _draw_out_of_memory(axes: Axes, curves: Curves, sizes: list[int]) -> None:
    """A cross on the predicted line, or at the upper edge where there is no prediction."""
    known = {point.configuration: point.interval.value for point in curves.predicted}
    for configuration in curves.out_of_memory:
        y = known.get(configuration, axes.get_ylim()[1])
        colour = style.size_style(sizes, configuration.nodes).colour
        axes.plot(
            [configuration.global_batch],
            [y],
            "x",
            color=colour,
            markersize=7,
            markeredgewidth=2,
            clip_on=False,
            zorder=5,
        )


def _mark_chosen(axes: Axes, curves: Curves, quantity: Quantity, taken: labels.Points) -> None:
    if curves.chosen is None:
        return
    sizes = {point.configuration.nodes for point in curves.predicted}
    lines: list[list[tuple[float, float]]] = [
        [(point.configuration.global_batch, point.interval.value) for point in curves.of(nodes)[1]]
        for nodes in sizes
    ]
    if curves.knee is not None and curves.knee.global_batch is not None:
        lines.append([(curves.knee.global_batch, end) for end in axes.get_ylim()])
    value = float(getattr(curves.chosen, quantity.field))
    text = f"chosen: N = {curves.chosen.nodes}, B = {curves.chosen.global_batch:,}\n{quantity.write(value)}"
    labels.mark_chosen(axes, (curves.chosen.global_batch, value), text, lines=lines, taken=taken)


def _end_labels(curves: Curves, sizes: list[int]) -> Iterable[labels.EndLabel]:
    for nodes in sizes:
        measured, line = curves.of(nodes)
        last = max(
            (*line, *measured), key=lambda point: point.configuration.local_batch, default=None
        )
        if last is not None:
            look = style.size_style(sizes, nodes)
            yield labels.EndLabel(
                last.configuration.global_batch, last.interval.value, f"N = {nodes}", *look
            )


def _keys(curves: Curves) -> list[style.Key]:
    keys = []
    if curves.measured:
        keys.append(style.Key("measured", marker="o"))
    if curves.predicted:
        keys += [style.Key("predicted", line="-"), style.Key("90 % interval", line="-", band=True)]
    if any(not point.feasible for point in curves.predicted):
        keys.append(style.Key("not feasible", line=":"))
    if curves.out_of_memory:
        keys.append(style.Key("ran out of memory", marker="x"))
    if curves.knee is not None and curves.knee.global_batch is not None:
        keys.append(style.Key("knee", line="--"))
    return keys


def _reading(curves: Curves) -> str:
    """The sentences of the caption that explain the marks that are there."""
    parts = []
    if curves.measured:
        parts.append(
            "Markers are measured, their bars the 95 % interval of the measurement (often hidden by the marker)."
        )
    if curves.predicted:
        parts.append(
            "Lines are the model's predictions, the bands its 90 % intervals; the ring marks the chosen point."
        )
    if any(not point.feasible for point in curves.predicted):
        parts.append("Dotted parts do not fit in memory or are ruled out otherwise.")
    if curves.hopeless:
        parts.append("In the grey region that holds for every N.")
    if curves.knee is not None:
        parts.append(_knee_in_words(curves.knee))
    if curves.out_of_memory:
        parts.append("Crosses mark configurations that ran out of memory when they were tried.")
    return " ".join(parts)


def _knee_in_words(knee: Knee) -> str:
    if knee.global_batch is None:
        return "The curve of the least time has no knee."
    text = f"Beyond the dashed knee at B = {knee.global_batch:,.0f} a larger batch saves little"
    if knee.interval_90 is None:
        return f"{text}."
    low, high = knee.interval_90
    without = (
        f"; {format_percent(knee.share_without_knee)} of the curves have none"
        if knee.share_without_knee
        else ""
    )
    return f"{text}; its band, {low:,.0f} to {high:,.0f}, holds it with 90 % probability{without}."


def _time_title(curves: Curves) -> str:
    if curves.chosen is None:
        best = min(curves.measured, key=lambda point: point.interval.value)
        where = best.configuration
        time = format_duration(best.interval.value)
        where_measured = (
            f"measured on {plural(where.nodes, 'node')} with batch {where.global_batch:,}"
        )
        return f"Fastest epoch so far: {time}, {where_measured}"
    chosen = curves.chosen
    time = format_duration(chosen.epoch_time_s)
    title = f"{plural(chosen.nodes, 'node')} with batch {chosen.global_batch:,}: an epoch in {time}"
    first = min(
        curves.predicted,
        key=lambda point: (point.configuration.nodes, point.configuration.local_batch),
        default=None,
    )
    if first is None or first.configuration == chosen.configuration:
        return title
    factor = first.interval.value / chosen.epoch_time_s
    pace = f"{format_number(factor, 2)} times as fast as" if factor >= 1.05 else "against"
    slow = "" if factor >= 1.05 else f"{format_duration(first.interval.value)} for "
    where = first.configuration
    return f"{title}, {pace} {slow}{plural(where.nodes, 'node')} with batch {where.global_batch:,}"


def _cost_title(plan: Plan) -> str:
    chosen = plan.chosen
    cheapest = min(
        (item for item in plan.candidates if item.feasible),
        key=lambda item: item.cost,
        default=chosen,
    )
    price, least = (format_money(item.cost, item.currency) for item in (chosen, cheapest))
    title = f"The chosen configuration costs {price}"
    if cheapest.cost >= chosen.cost or least == price:
        return f"{title}, as cheap as any"
    where = f"{plural(cheapest.nodes, 'node')}, batch {cheapest.global_batch:,}"
    return f"{title}; the cheapest ({where}) {least}, {_against(cheapest.expected_time_s, chosen.expected_time_s)}"


def _against(time_s: float, chosen_s: float) -> str:
    """How the time of another one compares, as far as the digits that are shown tell."""
    time, chosen = format_duration(time_s), format_duration(chosen_s)
    if time == chosen:
        return "and is as fast"
    return f"{'but' if time_s > chosen_s else 'and'} takes {time} instead of {chosen}"


def _table(curves: Curves, quantity: Quantity) -> Table:
    columns = (
        "mark",
        "nodes",
        "workers_per_node",
        "local_batch_samples",
        "global_batch_samples",
        quantity.column,
        f"low_{quantity.column}",
        f"high_{quantity.column}",
        "feasible",
        "chosen",
    )
    chosen = curves.chosen.configuration if curves.chosen else None
    marks = [("measured_95", point) for point in curves.measured] + [
        ("predicted_90", point) for point in curves.predicted
    ]
    rows: list[tuple[Cell, ...]] = [
        (
            mark,
            *point.configuration,
            point.configuration.global_batch,
            *point.interval,
            point.feasible,
            point.configuration == chosen,
        )
        for mark, point in marks
    ]
    rows += [
        ("out_of_memory", *item, item.global_batch, None, None, None, False, False)
        for item in curves.out_of_memory
    ]
    return Table(columns, rows)


COLUMNS = (
    "partition",
    "nodes",
    "workers_per_node",
    "local_batch_samples",
    "global_batch_samples",
    "wall_time_s",
    "cost",
    "currency",
    "feasible",
    "pareto",
    "chosen",
)
# in a row, with six for each entry's mark and the gap after it
LEGEND_CHARACTERS = 90
# candidates that would take or cost this many times the dearest of the front are not drawn
TALLEST = 100


def draw_pareto(run: RunContents) -> Drawing | Missing:
    """Expected time against expected cost of every candidate; the front is joined, the chosen one marked."""
    if run.plan is None or not run.plan.pareto:
        return Missing("pareto", "time against cost", "the front comes with the plan")
    plan = run.plan
    title = _title(plan)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.7)
        drawn = [item for item in plan.candidates if _is_near(item, plan)]
        times = [item.expected_time_s for item in drawn]
        style.value_axis(axes, times, label="expected time of the training", durations=True)
        style.amount_axis(
            axes, [item.cost for item in drawn], f"cost of the training, {plan.chosen.currency}"
        )
        for name, nodes in sorted({(item.partition, item.nodes) for item in drawn}):
            alike = [item for item in drawn if (item.partition, item.nodes) == (name, nodes)]
            _draw_alike(axes, alike, _look(run, plan, alike[0]))
        front = [(item.cost, item.expected_time_s) for item in plan.pareto]
        axes.plot(*zip(*front, strict=True), "-", color=style.INK.light, linewidth=1.2, zorder=2)
        on = f"\non {plan.chosen.partition}" if plan.chosen.partition else ""
        text = f"chosen: N = {plan.chosen.nodes}, B = {plan.chosen.global_batch:,}{on}"
        here = (plan.chosen.cost, plan.chosen.expected_time_s)
        marks = [[(item.cost, item.expected_time_s)] for item in drawn]
        labels.mark_chosen(
            axes, here, text, lines=[front, *marks], taken=labels.label_ends(axes, [])
        )
        keys = _front_keys(run, plan, drawn)
        style.legend(axes, keys, columns=_columns(keys))
    table = Table(COLUMNS, [_row(plan, item) for item in plan.candidates])
    return Drawing("pareto", title, _caption(plan), figure, table)


def _is_near(item: Candidate, plan: Plan) -> bool:
    """What never ends, or costs beyond all measure, would press all else into a corner."""
    slowest, dearest = (
        max(item.expected_time_s for item in plan.pareto),
        max(item.cost for item in plan.pareto),
    )
    # a front that is free bounds nothing
    affordable = 0 <= item.cost <= (TALLEST * dearest or math.inf)
    return affordable and 0 < item.expected_time_s <= TALLEST * slowest


def _columns(keys: list[style.Key]) -> int:
    """Of the legend: as many rows as its words need, of equal length."""
    rows = math.ceil(sum(len(key.text) + 6 for key in keys) / LEGEND_CHARACTERS)
    return math.ceil(len(keys) / rows)


def _partitions(plan: Plan) -> list[str]:
    """Their names where there are several, in the order of the plan."""
    names = list(dict.fromkeys(item.partition for item in plan.candidates))
    return names if len(names) > 1 else []


def _look(run: RunContents, plan: Plan, item: Candidate) -> style.SizeStyle:
    """As in every figure; but where there are several partitions, the shape tells which, and the colour alone N."""
    look, names = style.size_style(run.cluster_sizes, item.nodes), _partitions(plan)
    return (
        look._replace(marker=style.partition_marker(names.index(item.partition))) if names else look
    )


def _draw_alike(axes: Axes, items: list[Candidate], look: style.SizeStyle) -> None:
    for feasible, fill in ((True, "full"), (False, "none")):
        mine = [item for item in items if item.feasible == feasible]
        axes.plot(
            [item.cost for item in mine],
            [item.expected_time_s for item in mine],
            look.marker,
            color=look.colour,
            fillstyle=fill,
            markersize=5.5,
            alpha=1.0 if feasible else 0.6,
            zorder=3,
        )


def _front_keys(run: RunContents, plan: Plan, drawn: list[Candidate]) -> list[style.Key]:
    looks = [(nodes, style.size_style(run.cluster_sizes, nodes)) for nodes in run.cluster_sizes]
    shown, names = {item.nodes for item in drawn}, _partitions(plan)
    keys = [
        style.Key(f"N = {nodes}", "o" if names else look.marker, colour=look.colour)
        for nodes, look in looks
        if nodes in shown
    ]
    keys = keys if len(keys) <= 8 else []
    keys += [style.Key(name, style.partition_marker(place)) for place, name in enumerate(names)]
    if any(not item.feasible for item in drawn):
        keys.append(style.Key("not feasible", marker="o", hollow=True))
    return [*keys, style.Key("Pareto front", line="-", colour=style.INK.light)]


def _where(item: Candidate) -> str:
    of = f" of partition {item.partition}" if item.partition else ""
    return f"{plural(item.nodes, 'node')}{of} with batch {item.global_batch:,}"


def _title(plan: Plan) -> str:
    """What the front offers beside the chosen one."""
    chosen, fastest, cheapest = plan.chosen, plan.pareto[0], plan.pareto[-1]
    if fastest == cheapest:
        return f"{_where(fastest)}: no other candidate is faster, and none is cheaper"
    times = [format_duration(item.expected_time_s) for item in (cheapest, fastest)]
    costs = [format_money(item.cost, chosen.currency) for item in (cheapest, fastest)]
    if times[0] == times[1]:
        return f"The cheapest of the front costs {costs[0]} and is as fast as any: {times[0]}"
    if costs[0] == costs[1]:
        return f"The fastest of the front takes {times[1]} and is as cheap as any: {costs[1]}"
    return f"The front runs from {costs[0]} in {times[0]} to {costs[1]} in {times[1]}"


def _caption(plan: Plan) -> str:
    front = (
        f"{'is' if len(plan.pareto) == 1 else 'are'} the {plural(len(plan.pareto), 'candidate')}"
    )
    text = (
        "What the whole training costs and how long it is expected to last, one mark for each candidate"
        f"{', its shape that of its partition' if _partitions(plan) else ''}; down and to the left is better. "
        f"On the line {front} of the Pareto front: no other feasible one is both faster and cheaper. "
    )
    if plan.chosen.pareto:
        return f"{text}The chosen one (ring) is on it."
    better = min(plan.pareto, key=lambda item: (item.cost > plan.chosen.cost, item.expected_time_s))
    sooner = format_percent(1.0 - better.expected_time_s / plan.chosen.expected_time_s)
    return f"{text}The chosen one (ring) is not: {_where(better)} would take {sooner} less time for no more money."


def _row(plan: Plan, item: Candidate) -> tuple[Cell, ...]:
    where = (
        item.partition,
        *item.configuration,
        item.global_batch,
        item.expected_time_s,
        item.cost,
        item.currency,
    )
    return (*where, item.feasible, item.pareto, item == plan.chosen)
