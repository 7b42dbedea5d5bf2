"""The end of a sweep: the chosen configuration and its neighbours, predicted against measured; what profiling cost."""

from __future__ import annotations

from collections.abc import Sequence

from tula_hpc.records import Measurement, Plan, TrainResult

LOG_WIDTH = 140  # columns where the output is no terminal


def print_summary(
    plan: Plan, measurements: Sequence[Measurement], result: TrainResult | None, profiling_cost: str = ""
) -> None:
    """Print the table with rich, and below it what profiling cost."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from tula_hpc.analysis.report_tables import summary_rows, summary_table

    content = summary_table(summary_rows(plan, measurements, result))
    where = f" on {escape(plan.chosen.partition)}" if plan.chosen.partition else ""
    table = Table(title=f"Chosen configuration and its neighbours{where}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in content.columns:
        table.add_column(escape(column))
    for row in content.rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    console.print(table)
    if profiling_cost:
        console.print(f"profiling cost: {escape(profiling_cost)}", highlight=False)
