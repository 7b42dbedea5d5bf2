"""The end of a sweep: the chosen configuration and its neighbours, predicted against measured; what profiling cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tula_hpc.printable import printable, with_own_escapes
from tula_hpc.records import Measurement, Plan, TrainResult

if TYPE_CHECKING:
    from tula_hpc.analysis.report_tables import TextTable
    from tula_hpc.analysis.text_columns import TextColumn

SUMMARY_WIDTH = 140  # columns where the output is no terminal
SPARE = {"memory per worker": 4, "error": 3, "measured": 2, "steps": 1}  # left out first: the largest
NARROW = {"configuration": len("N = 16, B = 16,384"), "measured": len("in training")}  # where lines may end in cells


def print_summary(
    plan: Plan,
    measurements: Sequence[Measurement],
    result: TrainResult | None,
    profiling_cost: str = "",
    trained_epoch_s: float | None = None,
) -> None:
    """Print the table with rich, and below it what profiling cost; see `report_tables.summary_rows`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tula_hpc.analysis.report_tables import summary_rows, summary_table
    from tula_hpc.analysis.text_columns import GAP, add_columns

    console = Console(file=with_own_escapes(sys.stdout), highlight=False, markup=False)
    console.width = console.width if console.is_terminal else SUMMARY_WIDTH
    content = summary_table(summary_rows(plan, measurements, result, trained_epoch_s))
    where = f" on {plan.chosen.partition}" if plan.chosen.partition else ""
    title = Text(printable(f"Chosen configuration and its neighbours{where}"))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    add_columns(table, _columns(content), console.width, [""] * len(content.rows))
    console.print(table)
    if profiling_cost:
        console.print(printable(f"profiling cost: {profiling_cost}"))


def _columns(content: TextTable) -> list[TextColumn]:
    from tula_hpc.analysis.text_columns import TextColumn

    return [
        TextColumn(name, cells, narrow=NARROW.get(name), spare=SPARE.get(name, 0))
        for name, cells in zip(content.columns, zip(*content.rows, strict=True), strict=True)
    ]
