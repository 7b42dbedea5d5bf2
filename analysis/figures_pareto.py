"""Time against cost of all candidates, with the Pareto front: what a sooner end costs."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from tula_hpc.analysis import figures_labels as labels
from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.formatting import format_duration, format_money, format_percent, plural
from tula_hpc.analysis.report_data import RunContents
from tula_hpc.records import Candidate, Plan

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
LEGEND_CHARACTERS = 90  # in a row, with six for each entry's mark and the gap after it
TALLEST = 100  # candidates that would take or cost this many times the dearest of the front are not drawn


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
        style.amount_axis(axes, [item.cost for item in drawn], f"cost of the training, {plan.chosen.currency}")
        for name, nodes in sorted({(item.partition, item.nodes) for item in drawn}):
            alike = [item for item in drawn if (item.partition, item.nodes) == (name, nodes)]
            _draw_alike(axes, alike, _look(run, plan, alike[0]))
        front = [(item.cost, item.expected_time_s) for item in plan.pareto]
        axes.plot(*zip(*front, strict=True), "-", color=style.INK.light, linewidth=1.2, zorder=2)
        on = f"\non {plan.chosen.partition}" if plan.chosen.partition else ""
        text = f"chosen: N = {plan.chosen.nodes}, B = {plan.chosen.global_batch:,}{on}"
        here = (plan.chosen.cost, plan.chosen.expected_time_s)
        marks = [[(item.cost, item.expected_time_s)] for item in drawn]
        labels.mark_chosen(axes, here, text, lines=[front, *marks], taken=labels.label_ends(axes, []))
        keys = _keys(run, plan, drawn)
        style.legend(axes, keys, columns=_columns(keys))
    table = Table(COLUMNS, [_row(plan, item) for item in plan.candidates])
    return Drawing("pareto", title, _caption(plan), figure, table)


def _is_near(item: Candidate, plan: Plan) -> bool:
    """What never ends, or costs beyond all measure, would press all else into a corner."""
    slowest, dearest = max(item.expected_time_s for item in plan.pareto), max(item.cost for item in plan.pareto)
    affordable = 0 <= item.cost <= (TALLEST * dearest or math.inf)  # a front that is free bounds nothing
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
    return look._replace(marker=style.partition_marker(names.index(item.partition))) if names else look


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


def _keys(run: RunContents, plan: Plan, drawn: list[Candidate]) -> list[style.Key]:
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
    front = f"{'is' if len(plan.pareto) == 1 else 'are'} the {plural(len(plan.pareto), 'candidate')}"
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
    where = (item.partition, *item.configuration, item.global_batch, item.expected_time_s, item.cost, item.currency)
    return (*where, item.feasible, item.pareto, item == plan.chosen)
