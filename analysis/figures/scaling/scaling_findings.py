"""Title, caption and numbers of a figure of scaling."""

from __future__ import annotations

from tula_hpc.analysis.figures.drawing import CONFIGURATION_COLUMNS, Cell, Table
from tula_hpc.analysis.scaling import Curve, ScalingRow, describe_left_out
from tula_hpc.formatting import format_number, plural

# columns of an interval: its value, and both ends
QUANTITIES = (
    "step_time_s",
    "epoch_time_s",
    "training_time_s",
    "speed_up",
    "efficiency_percent",
    "node_hours",
)


def finding(curve: Curve) -> str:
    """Return speed-up and efficiency on the most nodes within the measured range, and on the most.

    Only measured nodes "are" so fast, others "would be". For example "Strong scaling of batch 1,024: 4
    nodes are 3.3 times as fast as 1 (efficiency 82 %), 16 would be 7.9 times as fast (50 %)".
    """
    within = [row for row in curve.rows[1:] if row.basis != "extrapolated"]
    last = curve.rows[-1]
    clauses = []
    if within:
        predicted = curve.measured_speed_up(within[-1]) is None
        nodes = plural(within[-1].nodes, "node")
        if predicted:
            nodes += " would"
        clauses.append(f"{nodes} {_outdo(curve, within[-1], would=predicted)}")
    if not within or last is not within[-1]:
        nodes = f"{last.nodes:,}" if within else plural(last.nodes, "node")
        clauses.append(f"{nodes} would {_outdo(curve, last, would=True)}")
    clauses[0] = clauses[0].replace("(", f"as {curve.base.nodes:,} (efficiency ")
    subject = f"Strong scaling of batch {curve.batch:,}"
    if curve.kind == "weak":
        subject = f"Weak scaling, {plural(curve.batch, 'sample')} per worker"
    return f"{subject}: {', '.join(clauses)}"


def _outdo(curve: Curve, row: ScalingRow, *, would: bool = False) -> str:
    factor = format_number(row.speed_up.value, 2)
    efficiency = f"({100 * row.efficiency.value:.0f} %)"
    if curve.kind == "weak":
        return f"process {factor} times as many samples {efficiency}"
    return f"{'be' if would else 'are'} {factor} times as fast {efficiency}"


def caption(curve: Curve, chosen: int | None) -> str:
    """Describe the figure, and how to read it."""
    base = curve.base.nodes
    shares = f"The global batch of {curve.batch:,} samples is split over N nodes."
    if curve.kind == "weak":
        shares = f"Each worker has {plural(curve.batch, 'sample')} per step on any N."
    perfect = "N" if base == 1 else f"N / {base}"
    sentences = [
        f"{shares} Speed-up is in samples per second, over N = {base}, the smallest profiled N "
        f"that can run the batch; efficiency is speed-up over {perfect}; node-hours are those of "
        "the whole training as it is expected. The dotted line is perfect scaling.",
        "Lines and hollow circles are predicted within the profiled range, filled circles "
        "measured; the bands are 90 % intervals.",
    ]
    if any(row.basis == "extrapolated" for row in curve.rows):
        sentences.append("Dashed lines and diamonds are extrapolated beyond what was profiled.")
    if chosen in [row.nodes for row in curve.rows]:
        sentences.append("The ring marks the chosen N.")
    if left_out := describe_left_out(curve.left_out):
        sentences.append(f"Left out: {left_out}.")
    return " ".join(sentences)


def numbers(curve: Curve, chosen: int | None) -> Table:
    """Return all rows, each quantity with its 90 % interval."""
    columns = [*CONFIGURATION_COLUMNS, "basis"]
    for name in QUANTITIES:
        columns += [name, f"low_{name}", f"high_{name}"]
    columns += ["measured_step_time_s", "measured_epoch_time_s", "chosen"]
    return Table(tuple(columns), [_row(row, chosen) for row in curve.rows])


def _row(row: ScalingRow, chosen: int | None) -> tuple[Cell, ...]:
    item = row.candidate
    cells: list[Cell] = [*item.configuration, item.global_batch, row.basis]
    percent = row.efficiency.times(100.0)
    times = (row.step_s, row.epoch_s, row.training_s)
    for interval in (*times, row.speed_up, percent, row.node_hours):
        cells += interval
    cells += [row.measured_step_s, row.measured_epoch_s, row.nodes == chosen]
    return tuple(cells)
