"""Tables of strong and weak scaling: for the page, as plain text, and as LaTeX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tula_hpc.analysis import node_scaling
from tula_hpc.analysis.node_scaling import Basis, NodeScaling, ScalingCurve
from tula_hpc.analysis.report.tables import TextTable, latex_escaped
from tula_hpc.formatting import (
    HOUR_S,
    MINUTE_S,
    UNKNOWN,
    aligned,
    format_number,
    plural,
    printable,
)
from tula_hpc.records import Interval

# mark of an extrapolated N in texts that have no column for the basis
EXTRAPOLATED_MARK = "*"
# seconds per unit that a column of times may have, ascending
UNITS = {"ms": 1e-3, "s": 1.0, "min": MINUTE_S, "h": HOUR_S}


class ScalingSection(NamedTuple):
    """The page's section on one kind of scaling."""

    heading: str
    # name of the figure, and of the files without suffix
    name: str
    table: TextTable
    text: str


def scaling_sections(scaling: NodeScaling) -> list[ScalingSection]:
    """Return a section on each kind of scaling that was predicted; none repeats a sentence."""
    sections = []
    shown: list[str] = []
    for curve in scaling.curves:
        sentences = list(explain(scaling, curve))
        text = " ".join(sentence for sentence in sentences if sentence not in shown)
        shown += sentences
        table = scaling_table(curve)
        pairs = zip(curve.rows, table.rows, strict=True)
        rows = [(f"{nodes}\n{row.basis}", *others) for row, (nodes, *others) in pairs]
        heading = f"{curve.kind} scaling".capitalize()
        sections.append(ScalingSection(heading, curve.name, table._replace(rows=rows), text))
    return sections


def scaling_files(scaling: NodeScaling) -> dict[str, bytes]:
    """Return each kind of scaling as plain text and as LaTeX, by file name."""
    files = {}
    for curve in scaling.curves:
        files[f"{curve.name}.txt"] = printable(plain_text(scaling, curve)).encode()
        files[f"{curve.name}.tex"] = printable(latex(scaling, curve)).encode()
    return files


def scaling_table(curve: ScalingCurve) -> TextTable:
    """Return the curve as a table, with each interval in the second line of its cell."""
    batch_name = "local batch"
    time_name = "epoch"
    values = [(r.candidate.local_batch, r.epoch_s, r.measured_epoch_s) for r in curve.rows]
    if curve.kind == "weak":
        batch_name = "global batch"
        time_name = "step"
        values = [(r.candidate.global_batch, r.step_s, r.measured_step_s) for r in curve.rows]
    # the largest unit that is no longer than the shortest time
    shortest_s = min(time.value for _, time, _ in values)
    unit = ["ms", *(unit for unit, seconds in UNITS.items() if seconds <= shortest_s)][-1]
    rows: list[tuple[str, ...]] = []
    for row, (batch, time, measured_s) in zip(curve.rows, values, strict=True):
        measured = UNKNOWN
        if measured_s is not None:
            measured = _number(measured_s / UNITS[unit])
        mark = EXTRAPOLATED_MARK if row.basis == "extrapolated" else ""
        cells = (
            f"{row.nodes:,}{mark}",
            f"{batch:,}",
            _cell(time.times(1.0 / UNITS[unit])),
            measured,
            _cell(row.speed_up),
            _cell(row.efficiency.times(100.0)),
            _cell(row.node_hours),
        )
        rows.append(cells)
    columns = (
        "nodes",
        batch_name,
        f"{time_name}, {unit}",
        f"measured, {unit}",
        "speed-up",
        "efficiency, %",
        "node-hours",
    )
    return TextTable(columns, rows)


def _cell(interval: Interval) -> str:
    value, low, high = map(_number, interval)
    return value if interval.low == interval.high else f"{value}\n{low} – {high}"


def _number(value: float) -> str:
    """Return three significant digits, including final zeros."""
    if not 1e-3 <= value < 1e9:
        return format_number(value, 3)
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def explain(scaling: NodeScaling, curve: ScalingCurve) -> Iterator[str]:
    """Yield sentences on the measurements, the predictions, and the meaning of the numbers."""
    per_node = curve.base.candidate.workers_per_node
    workers = f"with {per_node} workers each " if per_node > 1 else ""
    yield (
        f"Step times were measured on {node_scaling.listed_sizes(scaling.profiled_sizes)} nodes "
        f"{workers}({scaling.configurations} configurations of nodes and batch), and a model was fitted to "
        "them."
    )
    clauses = []
    for basis, outcome in _OUTCOMES.items():
        nodes = [row.nodes for row in curve.rows if row.basis == basis]
        if nodes:
            verb = "is" if len(nodes) == 1 else "are"
            clauses.append(f"N = {node_scaling.listed_sizes(nodes)} {outcome.format(verb)}")
    yield f"{', '.join(clauses)}."
    yield from _definitions(scaling, curve)


_OUTCOMES: dict[Basis, str] = {
    "measured": "{} among the measured ones",
    "predicted": "{} predicted within the measured range",
    "extrapolated": f"({EXTRAPOLATED_MARK}) {{}} extrapolated beyond the measured range",
}


def _definitions(scaling: NodeScaling, curve: ScalingCurve) -> Iterator[str]:
    base = curve.base.nodes
    yield (
        f"Speed-up (of samples per second) and efficiency are relative to N = {base:,}, the "
        "smallest measured number of nodes that can run the batch."
    )
    yield (
        f"Node-hours are those expected of the whole training ({plural(scaling.epochs, 'epoch')}) "
        "with evaluation, checkpoints, starts and interruptions. "
        "Measured configurations count as measured; all other numbers are the model's, and ranges "
        "are 90 % intervals."
    )
    if scaling.emulated:
        yield "The nodes shared one machine when they were measured; real nodes will differ."
    if curve.rows[-1].nodes > scaling.max_nodes:
        yield f"The cluster file allows jobs of {plural(scaling.max_nodes, 'node')} at most."
    if left_out := node_scaling.describe_left_out(curve.left_out):
        yield f"Left out: {left_out}."


def _subject(scaling: NodeScaling, curve: ScalingCurve) -> str:
    if curve.kind == "strong":
        return f"Strong scaling of {scaling.name}: one global batch of {curve.batch:,} samples."
    samples = plural(curve.batch, "sample")
    return f"Weak scaling of {scaling.name}: {samples} per worker and step."


def plain_text(scaling: NodeScaling, curve: ScalingCurve) -> str:
    """Return the table in aligned columns, with a heading and an explanation."""
    table = scaling_table(curve)
    rows = [table.columns, *(tuple(map(_on_one_line, row)) for row in table.rows)]
    lines = aligned(rows, str.rjust)
    return "\n".join([_subject(scaling, curve), "", *lines, "", *explain(scaling, curve)]) + "\n"


def _on_one_line(cell: str) -> str:
    value, _, ends = cell.partition("\n")
    text = f"{value} ({ends.replace(' – ', '-')})" if ends else value
    return text.replace(UNKNOWN, "-")


def latex(scaling: NodeScaling, curve: ScalingCurve) -> str:
    """Return a table that needs no package, with its intervals below, and an explanation."""
    table = scaling_table(curve)
    lines = [
        r"{\small\setlength{\tabcolsep}{3pt}",
        r"\noindent",
        rf"\begin{{tabular}}{{{'r' * len(table.columns)}}}",
        r"\hline",
        rf"{' & '.join(map(_latex_small, table.columns))} \\",
        r"\hline",
    ]
    for row in table.rows:
        lines += _latex_lines(row)
    sentences = [_subject(scaling, curve), *explain(scaling, curve)]
    lines += [r"\hline", r"\end{tabular}", "", r"\noindent", *map(latex_escaped, sentences)]
    return "\n".join([*lines, r"\par}"]) + "\n"


def _latex_lines(row: Sequence[str]) -> Iterator[str]:
    values = []
    ranges = []
    for cell in row:
        value, _, ends = cell.partition("\n")
        values.append(latex_escaped(value))
        ranges.append(_latex_small(ends.replace(" – ", "–")))
    yield rf"{' & '.join(values)} \\"
    if any(ranges):
        yield rf"{' & '.join(ranges)} \\"


def _latex_small(text: str) -> str:
    return rf"\footnotesize {latex_escaped(text)}" if text else ""
