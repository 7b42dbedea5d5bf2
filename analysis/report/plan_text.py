"""A plan as text for the terminal: the chosen candidate among its neighbours, why it was chosen, and the warnings.

A table's columns in the width of a terminal: headings and texts go into more lines, then columns
are left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.formatting import (
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    in_samples,
    printable,
)
from tula_hpc.records import Candidate, Plan

# blanks between two columns
GAP = 2


class TextColumn(NamedTuple):
    """One column."""

    # goes into as many lines as it has words
    heading: str
    cells: Sequence[str]
    # whether cells end at the same place, as numbers do
    right: bool = False
    # cells go into more lines in so few characters; None: they do not
    narrow: int | None = None
    # what is left out first has the largest; 0: never left out
    spare: int = 0

    @property
    def least(self) -> int:
        """Characters without which the column cannot be read."""
        cells = _longest(self.cells)
        return max(
            _longest(self.heading.split()),
            cells if self.narrow is None else min(cells, self.narrow),
        )

    @property
    def most(self) -> int:
        """Characters that it can use."""
        return _longest([self.heading, *self.cells])


def _longest(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)


def fitted(columns: Sequence[TextColumn], width: int) -> list[tuple[TextColumn, int]]:
    """Columns with their widths: those for which there is room, and those that are never left out."""
    kept = list(columns)
    while _least(kept) > width and any(column.spare for column in kept):
        kept.remove(max(kept, key=lambda column: column.spare))
    left, widths = width - _least(kept), []
    for column in kept:
        more = max(0, min(left, column.most - column.least))
        widths.append(column.least + more)
        left -= more
    return list(zip(kept, widths, strict=True))


def _least(columns: Sequence[TextColumn]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def add_columns(
    table: Table, columns: Sequence[TextColumn], width: int, styles: Sequence[str]
) -> None:
    """Fill an empty table without a box, edges or other columns.

    Args:
        table: To be filled.
        columns: Texts, in which nothing is taken for markup or for an escape of the terminal.
        width: Of the terminal, characters.
        styles: Of the rows.
    """
    from rich.text import Text

    clean = [
        column._replace(cells=[printable(cell) for cell in column.cells]) for column in columns
    ]
    chosen = fitted(clean, width)
    for column, characters in chosen:
        table.add_column(
            Text(column.heading), justify="right" if column.right else "left", width=characters
        )
    for row, style in enumerate(styles):
        table.add_row(*(Text(column.cells[row]) for column, _ in chosen), style=style)


# global batches up to so many times smaller or larger than the chosen one are shown
NEIGHBOUR_FACTOR = 4
FRONT_MARK = "◆"
# of `Candidate.wall_parts_s`
PART_NAMES = {"starts": "start-up", "repeated": "work repeated after interruptions"}
# columns where the output is no terminal
PLAN_WIDTH = 120


def describe_plan(plan: Plan, profiling: str = "") -> str:
    """Several lines, the last without a line end; coloured only where standard output is a terminal.

    Args:
        plan: The plan.
        profiling: What profiling cost, a sentence without its full stop.
    """
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else PLAN_WIDTH
    with console.capture() as capture:
        console.print(_table(plan, console.width))
    lines = [
        line
        for sentence in sentences(plan, profiling)
        for line in _wrapped(sentence, console.width)
    ]
    # the table has escapes of its own, for its colours
    return "\n".join([capture.get().rstrip("\n"), *map(printable, lines)])


def sentences(plan: Plan, profiling: str = "") -> list[str]:
    """What the plan expects, why it chose what it chose, what that excludes, and what it is not sure of."""
    return [
        _expectation(plan),
        *_where_time_goes(plan.chosen),
        f"Chosen by {plan.objective}: {plan.reason}.",
        *background(plan),
        *([f"Profiling: {profiling}."] if profiling else []),
        *(f"Warning: {warning}." for warning in plan.warnings),
    ]


def background(plan: Plan) -> list[str]:
    """What else there was, what the constraints rule out, and what the numbers assume."""
    return [
        *_alternatives(plan),
        *(f"Constraint: {text}." for text in plan.binding),
        *_knee(plan),
        *_critical_batch(plan),
        *(f"Note: {note}." for note in plan.notes),
    ]


def _expectation(plan: Plan) -> str:
    """The whole time, which is what the cost is for; of plans that do not have it, that of the steps."""
    chosen = plan.chosen
    low, high = chosen.interval_90.get(
        "train_time_s" if chosen.wall_time_s is None else "wall_time_s", (None, None)
    )
    between = f"between {format_duration(low)} and {format_duration(high)} with 90 % probability"
    cost = format_money(chosen.cost, chosen.currency)
    text = f"Training should take {format_duration(chosen.expected_time_s)} ({between}) and cost {cost}"
    if chosen.wall_time_s is not None:
        every = format_duration(60.0 * (chosen.checkpoint_minutes or 0.0))
        text += f"; its steps alone take {format_duration(chosen.train_time_s)}, with a checkpoint every {every}"
    energy = f"; {format_number(chosen.energy_kwh, 3)} kWh" if chosen.energy_kwh is not None else ""
    return f"{text}{energy}."


def _where_time_goes(chosen: Candidate) -> list[str]:
    """The parts of the expected time with their shares, those of less than a thousandth left out."""
    whole_s = sum(chosen.wall_parts_s.values())
    parts = [
        (name, seconds)
        for name, seconds in chosen.wall_parts_s.items()
        if seconds >= 0.001 * whole_s > 0.0
    ]
    shown = [
        f"{PART_NAMES.get(name, name)} {format_duration(s)} ({format_percent(s / whole_s)})"
        for name, s in parts
    ]
    return [f"Of the expected time: {', '.join(shown)}."] if shown else []


def _alternatives(plan: Plan) -> list[str]:
    """What would come next, the fastest and the cheapest, each against the chosen one."""
    # it wins ties
    feasible = [plan.chosen, *(candidate for candidate in plan.candidates if candidate.feasible)]
    fastest = min(feasible, key=lambda c: (c.expected_time_s, c.cost))
    cheapest = min(feasible, key=lambda c: (c.cost, c.expected_time_s))
    named = [("Next best", candidate) for candidate in plan.runners_up]
    named += [("Fastest", fastest), ("Cheapest", cheapest)]
    return [
        f"{what}: {name_of(c)}, {_against(c, plan.chosen)}."
        for what, c in named
        if c != plan.chosen
    ]


def _against(candidate: Candidate, chosen: Candidate) -> str:
    """How a candidate's time and cost compare: "12 % slower, 3 % cheaper"."""
    time = _compared(candidate.expected_time_s, chosen.expected_time_s, "slower", "faster")
    return f"{time}, {_compared(candidate.cost, chosen.cost, 'dearer', 'cheaper')}"


def _compared(value: float, base: float, more: str, less: str) -> str:
    # no percentage of nothing
    if base <= 0.0 < value:
        return more
    if base <= 0.0 or abs(value / base - 1.0) < 0.0005:
        return {"slower": "as fast"}.get(more, "as dear")
    return f"{format_percent(abs(value / base - 1.0))} {more if value > base else less}"


def _knee(plan: Plan) -> list[str]:
    knee = plan.knee
    if knee is None:
        return []
    low, high = knee.interval_90 or (None, None)
    between = f"between {low:,.0f} and {high:,.0f} with 90 % probability" if low and high else ""
    without = (
        f"{format_percent(knee.share_without_knee)} of the curves that the measurements allow have"
    )
    # which a warning says
    if knee.global_batch is None:
        return [f"{without} no knee{f'; the others have theirs {between}' if between else ''}."]
    doubt = f"; {without} none" if knee.share_without_knee else ""
    return [
        f"The knee lies at B={knee.global_batch:,.0f}{f' ({between})' if between else ''}{doubt}."
    ]


def _critical_batch(plan: Plan) -> list[str]:
    if plan.critical_batch is None:
        return []
    source = {
        "profile": "at the weights that were profiled",
        "training": "in the later half of the training so far",
    }.get(plan.critical_batch_source or "", "as it was measured")
    what = f"the gradient's noise scale {source}. Beyond it more samples buy few steps less"
    return [f"Critical batch: {in_samples(plan.critical_batch)}, {what}; it grows in training."]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _table(plan: Plan, width: int) -> Table:
    shown = sorted(
        filter(lambda candidate: _is_near(candidate, plan.chosen), plan.candidates), key=_order
    )
    hidden = len(plan.candidates) - len(shown)
    total = plan.candidates_total or len(plan.candidates)
    parts = (
        [f"{FRONT_MARK} Pareto front: no candidate is faster and cheaper"] if plan.pareto else []
    )
    parts += [f"{len(shown)} of {total:,} candidates; --json shows more"] if hidden else []
    caption = "; ".join(parts) or None
    table = Table(
        box=None, caption=caption, caption_justify="left", pad_edge=False, padding=(0, GAP, 0, 0)
    )
    styles = ["bold" if item == plan.chosen else "" if item.feasible else "dim" for item in shown]
    add_columns(table, _columns(plan, shown), width, styles)
    return table


def _is_near(candidate: Candidate, chosen: Candidate) -> bool:
    ratio = candidate.global_batch / chosen.global_batch
    return 1 / NEIGHBOUR_FACTOR <= ratio <= NEIGHBOUR_FACTOR


def _order(candidate: Candidate) -> tuple[int, int, str]:
    return candidate.global_batch, candidate.nodes, candidate.partition


def _columns(plan: Plan, shown: Sequence[Candidate]) -> list[TextColumn]:
    """The signs first: they must not be lost. "time" is what the cost beside it is for, not the steps alone."""
    return [
        TextColumn("", [_mark(item, plan.chosen) for item in shown]),
        TextColumn("nodes", [str(item.nodes) for item in shown], right=True),
        TextColumn("local batch", [str(item.local_batch) for item in shown], right=True),
        TextColumn("global batch", [str(item.global_batch) for item in shown], right=True),
        TextColumn(
            "step", [format_duration(item.step_time_s) for item in shown], right=True, spare=3
        ),
        TextColumn(
            "epoch", [format_duration(item.epoch_time_s) for item in shown], right=True, spare=1
        ),
        TextColumn(
            "whole time", [format_duration(item.expected_time_s) for item in shown], right=True
        ),
        TextColumn("cost", [format_money(item.cost, item.currency) for item in shown], right=True),
        TextColumn(
            "memory", [format_bytes(item.peak_memory_bytes) for item in shown], right=True, spare=2
        ),
        *(
            [TextColumn("partition", [item.partition for item in shown])]
            if plan.chosen.partition
            else []
        ),
        TextColumn(
            "",
            [item.why or ("measured" if item.measured else "") for item in shown],
            narrow=len("measured"),
        ),
    ]


def _mark(candidate: Candidate, chosen: Candidate) -> str:
    return ("→" if candidate == chosen else " ") + (FRONT_MARK if candidate.pareto else "")
