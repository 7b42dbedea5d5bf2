"""Time against cost of all candidates, with the Pareto front: what a sooner end costs."""

from __future__ import annotations

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
        times = [_time_s(item) for item in drawn]
        style.value_axis(axes, times, label="expected time of the training", durations=True)
        style.amount_axis(axes, [item.cost for item in drawn], f"cost of the training, {plan.chosen.currency}")
        for nodes in run.cluster_sizes:
            _draw_size(
                axes, [item for item in drawn if item.nodes == nodes], style.size_style(run.cluster_sizes, nodes)
            )
        front = [(item.cost, _time_s(item)) for item in plan.pareto]
        axes.plot(*zip(*front, strict=True), "-", color=style.INK.light, linewidth=1.2, zorder=2)
        text = f"chosen: N = {plan.chosen.nodes}, B = {plan.chosen.global_batch:,}"
        here = (plan.chosen.cost, _time_s(plan.chosen))
        marks = [[(item.cost, _time_s(item))] for item in drawn]
        labels.mark_chosen(axes, here, text, lines=[front, *marks], taken=labels.label_ends(axes, []))
        style.legend(axes, _keys(run, drawn))
    table = Table(COLUMNS, [_row(plan, item) for item in plan.candidates])
    return Drawing("pareto", title, _caption(plan), figure, table)


def _time_s(item: Candidate) -> float:
    return item.train_time_s if item.wall_time_s is None else item.wall_time_s


def _is_near(item: Candidate, plan: Plan) -> bool:
    """What never ends, or costs beyond all measure, would press all else into a corner."""
    slowest, dearest = max(map(_time_s, plan.pareto)), max(item.cost for item in plan.pareto)
    return 0 < _time_s(item) <= TALLEST * slowest and 0 < item.cost <= TALLEST * dearest


def _draw_size(axes: Axes, items: list[Candidate], look: style.SizeStyle) -> None:
    for feasible, fill in ((True, "full"), (False, "none")):
        mine = [item for item in items if item.feasible == feasible]
        axes.plot(
            [item.cost for item in mine],
            [_time_s(item) for item in mine],
            look.marker,
            color=look.colour,
            fillstyle=fill,
            markersize=5.5,
            alpha=1.0 if feasible else 0.6,
            zorder=3,
        )


def _keys(run: RunContents, drawn: list[Candidate]) -> list[style.Key]:
    looks = [(nodes, style.size_style(run.cluster_sizes, nodes)) for nodes in run.cluster_sizes]
    shown = {item.nodes for item in drawn}
    keys = [style.Key(f"N = {nodes}", look.marker, colour=look.colour) for nodes, look in looks if nodes in shown]
    keys = keys if len(keys) <= 8 else []
    if any(not item.feasible for item in drawn):
        keys.append(style.Key("not feasible", marker="o", hollow=True))
    return [*keys, style.Key("Pareto front", line="-", colour=style.INK.light)]


def _title(plan: Plan) -> str:
    """What the front offers beside the chosen one."""
    chosen, fastest, cheapest = plan.chosen, plan.pareto[0], plan.pareto[-1]
    if fastest == cheapest:
        where = f"{plural(fastest.nodes, 'node')} with batch {fastest.global_batch:,}"
        return f"{where}: no other candidate is faster, and none is cheaper"
    times = [format_duration(_time_s(item)) for item in (cheapest, fastest)]
    costs = [format_money(item.cost, chosen.currency) for item in (cheapest, fastest)]
    if times[0] == times[1]:
        return f"The cheapest of the front costs {costs[0]} and is as fast as any: {times[0]}"
    if costs[0] == costs[1]:
        return f"The fastest of the front takes {times[1]} and is as cheap as any: {costs[1]}"
    return f"The front runs from {costs[0]} in {times[0]} to {costs[1]} in {times[1]}"


def _caption(plan: Plan) -> str:
    front = f"{'is' if len(plan.pareto) == 1 else 'are'} the {plural(len(plan.pareto), 'candidate')}"
    text = (
        "What the whole training costs and how long it is expected to last, one mark for each candidate; down and to "
        f"the left is better. On the line {front} of the Pareto front: no other feasible one is both faster "
        "and cheaper. "
    )
    if plan.chosen.pareto:
        return f"{text}The chosen one (ring) is on it."
    better = min(plan.pareto, key=lambda item: (item.cost > plan.chosen.cost, _time_s(item)))
    sooner = format_percent(1.0 - _time_s(better) / _time_s(plan.chosen))
    batch = f"{plural(better.nodes, 'node')} with batch {better.global_batch:,}"
    return f"{text}The chosen one (ring) is not: {batch} would take {sooner} less time for no more money."


def _row(plan: Plan, item: Candidate) -> tuple[Cell, ...]:
    where = (item.partition, *item.configuration, item.global_batch, _time_s(item), item.cost, item.currency)
    return (*where, item.feasible, item.pareto, item == plan.chosen)
