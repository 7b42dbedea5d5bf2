"""Expected time against expected cost of every candidate, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table, configuration_cells
from tula_hpc.analysis.figures.time_and_cost.over_batch import MOST_KEYS
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.formatting import format_duration, format_money, format_percent, plural
from tula_hpc.records import Candidate, Plan

# candidates beyond this multiple of the front's longest time or highest cost are not drawn
TALLEST = 100


def draw_pareto(run: RunContents) -> Drawing | Missing:
    """Draw expected time against expected cost of every candidate, and the Pareto front."""
    if run.plan is None or not run.plan.pareto:
        return Missing("pareto", "time against cost", "the front comes with the plan")
    plan, chosen = run.plan, run.plan.chosen
    title = _title(plan)
    drawn = _near_the_front(plan)
    marks: dict[tuple[str, int], list[Candidate]] = {}
    front = _points(plan.pareto)
    points = _points(drawn)
    for item in drawn:
        marks.setdefault((item.partition, item.nodes), []).append(item)
    with style.new_figure(title, 3.7) as (figure, (axes,)):
        costs, times = np.array(points).reshape(-1, 2).T.tolist()
        style.value_axis(axes, times, label="expected time of the training", durations=True)
        style.amount_axis(axes, costs, f"cost of the training, {chosen.currency}")
        for _, group in sorted(marks.items(), key=lambda entry: entry[0]):
            _draw_group(axes, group, _look(run, plan, group[0]))
        axes.plot(*zip(*front, strict=True), "-", color=style.INK.light, linewidth=1.2, zorder=2)
        text = f"chosen: {chosen.configuration.short}"
        if chosen.partition:
            text += f"\non {chosen.partition}"
        here = (chosen.cost, chosen.wall_time_s)
        lines = [front, *([point] for point in points)]
        labels.mark_chosen(axes, here, text, lines=lines, taken=labels.label_ends(axes, []))
        style.legend(axes, _front_keys(run, plan, drawn))
    table = Table.of([_row(plan, item) for item in plan.candidates])
    return Drawing("pareto", title, _caption(plan), figure, table)


def _points(items: Iterable[Candidate]) -> list[tuple[float, float]]:
    return [(item.cost, item.wall_time_s) for item in items]


def _near_the_front(plan: Plan) -> list[Candidate]:
    """Return the candidates to draw; those far from the front would squeeze the others together."""
    slowest = TALLEST * plan.pareto[-1].wall_time_s
    # a front of free candidates sets no bound
    dearest = TALLEST * max(item.cost for item in plan.pareto) or math.inf
    near = []
    for item in plan.candidates:
        if 0 <= item.cost <= dearest and 0 < item.wall_time_s <= slowest:
            near.append(item)
    return near


def _partitions(plan: Plan) -> list[str]:
    """Return the partitions' names in the order of the plan; none if there is only one."""
    names = list(dict.fromkeys(item.partition for item in plan.candidates))
    return names if len(names) > 1 else []


def _look(run: RunContents, plan: Plan, item: Candidate) -> style.Key:
    """Return the style of a cluster size; the shape is the partition's, if there are several."""
    look = style.size_style(run.cluster_sizes, item.nodes)
    names = _partitions(plan)
    if not names:
        return look
    return look._replace(marker=style.partition_marker(names.index(item.partition)))


def _draw_group(axes: Axes, items: list[Candidate], look: style.Key) -> None:
    for feasible in (True, False):
        mine = _points(item for item in items if item.feasible == feasible)
        costs, times = np.array(mine).reshape(-1, 2).T
        (marks,) = axes.plot(costs, times, look.marker, color=look.colour, markersize=5.5, zorder=3)
        marks.set_alpha(1.0)
        if not feasible:
            marks.set(alpha=0.6, fillstyle="none")


def _front_keys(run: RunContents, plan: Plan, drawn: list[Candidate]) -> list[style.Key]:
    names = _partitions(plan)
    shown = {item.nodes for item in drawn}
    keys = []
    for nodes in run.cluster_sizes:
        if nodes in shown:
            look = style.size_style(run.cluster_sizes, nodes)
            keys.append(look._replace(marker="o") if names else look)
    if len(keys) > MOST_KEYS:
        keys = []
    keys += [style.Key(name, style.partition_marker(index)) for index, name in enumerate(names)]
    if any(not item.feasible for item in drawn):
        keys.append(style.Key("not feasible", marker="o", hollow=True))
    if len(plan.pareto) > 1:
        keys.append(style.Key("Pareto front", line="-", colour=style.INK.light))
    return keys


def _where(item: Candidate) -> str:
    of = f" of partition {item.partition}" if item.partition else ""
    return f"{plural(item.nodes, 'node')}{of} with batch {item.global_batch:,}"


def _title(plan: Plan) -> str:
    fastest, cheapest = plan.pareto[0], plan.pareto[-1]
    if fastest == cheapest:
        return f"{_where(fastest)}: no other feasible candidate is faster, and none is cheaper"
    currency = plan.chosen.currency
    least_cost = format_money(cheapest.cost, currency)
    most_cost = format_money(fastest.cost, currency)
    least_time = format_duration(fastest.wall_time_s)
    most_time = format_duration(cheapest.wall_time_s)
    if most_time == least_time:
        return (
            f"The cheapest candidate costs {least_cost} and takes about as long as the fastest: "
            f"{most_time}"
        )
    if least_cost == most_cost:
        return (
            f"The fastest candidate takes {least_time} and costs about as much as the cheapest: "
            f"{most_cost}"
        )
    return f"The Pareto front runs from {least_cost} in {most_time} to {most_cost} in {least_time}"


def _caption(plan: Plan) -> str:
    chosen = plan.chosen
    several = _partitions(plan)
    shape = ", its shape that of its partition" if several else ""
    front = "One candidate alone is the Pareto front"
    if len(plan.pareto) > 1:
        front = f"On the line are the {len(plan.pareto):,} candidates of the Pareto front"
    text = (
        "What the whole training costs and how long it is expected to last, one mark for each "
        f"candidate{shape}; lower left is better. {front}: no "
        "other feasible candidate is both faster and cheaper. The chosen one (ring) is "
    )
    if chosen.pareto:
        return f"{text}on it."
    better = min(plan.pareto, key=lambda item: (item.cost > chosen.cost, item.wall_time_s))
    sooner = format_percent(1.0 - better.wall_time_s / chosen.wall_time_s)
    return f"{text}not: {_where(better)} would take {sooner} less time at no higher cost."


def _row(plan: Plan, item: Candidate) -> dict[str, Cell]:
    return {
        "partition": item.partition,
        **configuration_cells(item.configuration),
        "wall_time_s": item.wall_time_s,
        "cost": item.cost,
        "currency": item.currency,
        "feasible": item.feasible,
        "pareto": item.pareto,
        "chosen": item == plan.chosen,
    }
