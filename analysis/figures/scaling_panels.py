"""Strong and weak scaling over the number of nodes: time, speed-up, efficiency and node-hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from tula_hpc.analysis import node_scaling
from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Drawing, Missing, Table, configuration_cells
from tula_hpc.analysis.node_scaling import NodeScaling, ScalingCurve, ScalingRow
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import Interval

COLOUR = style.SIZES[0].light
# looks of marks: filled circles are measured, hollow ones predicted, diamonds extrapolated
PREDICTED = style.Key("predicted", marker="o", hollow=True, colour=COLOUR)
EXTRAPOLATED = style.Key("extrapolated", marker="D", line="--", hollow=True, colour=COLOUR)
# largest factor between a value and an end of its interval that the panel has to show
MOST_WIDTH = 2.5
# ratio of the ends of an interval above which the title gives both of them, not the value
WIDE = 2.0


class PanelQuantity(NamedTuple):
    """The y axis of one panel, with an entry for each row of the curve."""

    label: str
    values: list[Interval]
    # values by measured steps; None without a measurement
    measured: list[float | None]
    # values of perfect scaling, if it is drawn
    ideal: Sequence[float] = ()
    durations: bool = False
    share: bool = False

    def add(self, value: Interval, measured: float | None) -> None:
        """Add the entry of one row."""
        self.values.append(value)
        self.measured.append(measured)


def draw_strong_scaling(run: RunContents, scaling: NodeScaling | None = None) -> Drawing | Missing:
    """Draw how one global batch scales over the nodes; `scaling` is that of the run, if known."""
    return _draw((scaling or node_scaling.node_scaling_of(run)).strong, run)


def draw_weak_scaling(run: RunContents, scaling: NodeScaling | None = None) -> Drawing | Missing:
    """Draw how one local batch scales over the nodes; `scaling` is that of the run, if known."""
    return _draw((scaling or node_scaling.node_scaling_of(run)).weak, run)


def _draw(curve: ScalingCurve, run: RunContents) -> Drawing | Missing:
    if curve.why:
        return Missing(curve.name, f"{curve.kind} scaling", curve.why)
    title = finding(curve)
    sizes = curve.nodes
    chosen = run.plan.chosen.nodes if run.plan else None
    with style.new_figure(title, 4.7, ratios=(1, 1), columns=2) as (figure, panels):
        for place, (axes, quantity) in enumerate(zip(panels, _quantities(curve), strict=True)):
            style.batch_axis(axes, sizes, "number of nodes N" if place > 1 else "")
            _value_axis(axes, quantity)
            _draw_panel(axes, curve, quantity, chosen)
        rows = style.legend(panels[0], _keys(curve), left=-0.2)
        # the legend must not change the width of its panel
        if legend := panels[0].get_legend():
            legend.set_in_layout(False)
        # an empty title of as many lines leaves room for the legend
        panels[0].set_title("\n".join([" "] * rows))
    return Drawing(curve.name, title, _caption(curve, chosen), figure, _table(curve, chosen))


def _quantities(curve: ScalingCurve) -> tuple[PanelQuantity, ...]:
    base = curve.base.nodes
    is_weak = curve.kind == "weak"
    perfect: list[float] = []
    label = "time of a step" if is_weak else "time of an epoch"
    times = PanelQuantity(label, [], [], durations=True)
    speed_ups = PanelQuantity(f"speed-up over N = {base}", [], [], perfect)
    shares = PanelQuantity("efficiency", [], [], [1.0] * len(curve.rows), share=True)
    hours = PanelQuantity("node-hours of the training", [], [])
    for row in curve.rows:
        if is_weak:
            times.add(row.step_s, row.measured_step_s)
        else:
            times.add(row.epoch_s, row.measured_epoch_s)
        gain = curve.measured_speed_up(row)
        speed_ups.add(row.speed_up, gain)
        perfect.append(row.nodes / base)
        shares.add(row.efficiency, None if gain is None else gain * base / row.nodes)
        hours.add(row.node_hours, None)
    return times, speed_ups, shares, hours


def _value_axis(axes: Axes, quantity: PanelQuantity) -> None:
    shown = [*quantity.ideal]
    for (value, low, high), measured in zip(quantity.values, quantity.measured, strict=True):
        shown += [value, max(low, value / MOST_WIDTH), min(high, value * MOST_WIDTH)]
        shown.append(measured or value)
    if not quantity.share:
        style.value_axis(axes, shown, label=quantity.label, durations=quantity.durations)
        return
    axes.set_ylim(0.0, 1.08 * max(1.0, *shown))
    style.even_ticks(axes.yaxis, 6)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
    axes.set_ylabel(quantity.label)


def _draw_panel(
    axes: Axes, curve: ScalingCurve, quantity: PanelQuantity, chosen: int | None
) -> None:
    sizes = curve.nodes
    if quantity.ideal:
        axes.plot(sizes, quantity.ideal, ":", color=style.MUTED.light, linewidth=1.3, zorder=1)
    values, lows, highs = zip(*quantity.values, strict=True)
    axes.fill_between(sizes, lows, highs, color=COLOUR, alpha=0.16, linewidth=0)
    beyond = [row.basis == "extrapolated" for row in curve.rows]
    for i in range(len(sizes) - 1):
        dash = "--" if beyond[i] or beyond[i + 1] else "-"
        axes.plot(sizes[i : i + 2], values[i : i + 2], dash, color=COLOUR, zorder=3)
    marks = zip(sizes, values, quantity.measured, beyond, strict=True)
    for nodes, value, measured, is_beyond in marks:
        key = EXTRAPOLATED if is_beyond else PREDICTED
        if measured is not None:
            # the line already shows the prediction
            key = PREDICTED._replace(hollow=False)
        (mark,) = axes.plot([nodes], [measured or value], key.marker, color=COLOUR, zorder=4)
        mark.set(markersize=5.0, markerfacecolor=style.PAPER.light if key.hollow else COLOUR)
        if nodes == chosen:
            (ring,) = axes.plot([nodes], [value], "o", color=style.INK.light, fillstyle="none")
            ring.set(markersize=12, markeredgewidth=1.4, zorder=6)


def _keys(curve: ScalingCurve) -> list[style.Key]:
    found = {row.basis for row in curve.rows}
    keys = []
    if "measured" in found:
        keys.append(style.Key("measured", marker="o", colour=COLOUR))
    # also for measured rows, since a whole training is never measured
    if {"measured", "predicted"} & found:
        keys.append(PREDICTED._replace(line="-"))
    if "extrapolated" in found:
        keys.append(EXTRAPOLATED)
    keys.append(style.Key("90 % interval", line="-", band=True, colour=COLOUR))
    return [*keys, style.Key("perfect scaling", line=":")]


def finding(curve: ScalingCurve) -> str:
    """Return speed-up and efficiency on the most nodes in the measured range, and on the most.

    Measured nodes "are" this fast, others "would be"; of a wide interval both ends are given. For
    example "Strong scaling of batch 1,024: 4 nodes are 3.3 times as fast as 1 (efficiency 82 %), 16
    would be 3.9 to 9.1 times as fast (24 to 57 %)".
    """
    within = [row for row in curve.rows[1:] if row.basis != "extrapolated"]
    last = curve.rows[-1]
    clauses = []
    if within:
        predicted = curve.measured_speed_up(within[-1]) is None
        nodes = plural(within[-1].nodes, "node")
        if predicted:
            nodes += " would"
        clauses.append(f"{nodes} {_describe_gain(curve, within[-1], would=predicted)}")
    if not within or last is not within[-1]:
        nodes = f"{last.nodes:,}" if within else plural(last.nodes, "node")
        clauses.append(f"{nodes} would {_describe_gain(curve, last, would=True)}")
    clauses[0] = clauses[0].replace("(", f"as {curve.base.nodes:,} (efficiency ")
    subject = f"Strong scaling of batch {curve.batch:,}"
    if curve.kind == "weak":
        subject = f"Weak scaling, {plural(curve.batch, 'sample')} per worker"
    return f"{subject}: {', '.join(clauses)}"


def _describe_gain(curve: ScalingCurve, row: ScalingRow, *, would: bool = False) -> str:
    factor = f"{format_number(row.speed_up.value, 2)} times "
    efficiency = f"({100 * row.efficiency.value:.0f} %)"
    if factor == "1 times ":
        factor = ""
    _, low, high = row.speed_up
    if high > WIDE * low:
        factor = f"{format_number(low, 2)} to {format_number(high, 2)} times "
        ends = [f"{100 * end:.0f}" for end in row.efficiency[1:]]
        efficiency = f"({' to '.join(ends)} %)"
    if curve.kind == "weak":
        return f"process {factor}as many samples {efficiency}"
    return f"{'be' if would else 'are'} {factor}as fast {efficiency}"


def _caption(curve: ScalingCurve, chosen: int | None) -> str:
    base = curve.base.nodes
    shares = f"The global batch of {curve.batch:,} samples is split over N nodes."
    if curve.kind == "weak":
        shares = f"Each worker has {plural(curve.batch, 'sample')} per step on any N."
    perfect = "N" if base == 1 else f"N / {base}"
    sentences = [
        f"{shares} Speed-up is in samples per second, over N = {base}, the smallest profiled N "
        f"that can run the batch; efficiency is speed-up over {perfect}; node-hours are those "
        "expected of the whole training. The dotted line is perfect scaling.",
        "Lines and hollow circles are predicted within the profiled range, filled circles "
        "measured; the bands are 90 % intervals.",
    ]
    if any(row.basis == "extrapolated" for row in curve.rows):
        sentences.append("Dashed lines and diamonds are extrapolated beyond what was profiled.")
    if chosen in curve.nodes:
        sentences.append("The ring marks the chosen N.")
    if left_out := node_scaling.describe_left_out(curve.left_out):
        sentences.append(f"Left out: {left_out}.")
    return " ".join(sentences)


def _table(curve: ScalingCurve, chosen: int | None) -> Table:
    rows = []
    for row in curve.rows:
        intervals = {
            "step_time_s": row.step_s,
            "epoch_time_s": row.epoch_s,
            "training_time_s": row.training_s,
            "speed_up": row.speed_up,
            "efficiency_percent": row.efficiency.times(100.0),
            "node_hours": row.node_hours,
        }
        cells = configuration_cells(row.candidate.configuration)
        cells["basis"] = row.basis
        for name, (value, low, high) in intervals.items():
            cells |= {name: value, f"low_{name}": low, f"high_{name}": high}
        cells["measured_step_time_s"] = row.measured_step_s
        cells["measured_epoch_time_s"] = row.measured_epoch_s
        cells["chosen"] = row.nodes == chosen
        rows.append(cells)
    return Table.of(rows)
