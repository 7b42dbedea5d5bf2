"""A plan as text for the terminal: the chosen candidate among its neighbours, why it was chosen, and the warnings."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table

from tula_hpc.analysis.formatting import format_bytes, format_duration, format_money
from tula_hpc.records import Candidate, Plan

NEIGHBOUR_FACTOR = 4  # global batches up to so many times smaller or larger than the chosen one are shown
LOG_WIDTH = 120  # columns where the output is no terminal


def describe_plan(plan: Plan) -> str:
    """Several lines, the last without a line end; coloured only where standard output is a terminal."""
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else LOG_WIDTH
    with console.capture() as capture:
        console.print(_table(plan))
    sentences = [_expectation(plan), f"Chosen by {plan.objective}: {plan.reason}."]
    sentences += [f"Warning: {warning}." for warning in plan.warnings]
    lines = [line for sentence in sentences for line in _wrapped(sentence, console.width)]
    return "\n".join([capture.get().rstrip("\n"), *lines])


def _expectation(plan: Plan) -> str:
    chosen = plan.chosen
    low, high = chosen.interval_90.get("train_time_s", (None, None))
    between = f"between {format_duration(low)} and {format_duration(high)} with 90 % probability"
    cost = format_money(chosen.cost, chosen.currency)
    return f"Training should take {format_duration(chosen.train_time_s)} ({between}) and cost {cost}."


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False)


def _table(plan: Plan) -> Table:
    shown = sorted(filter(lambda candidate: _is_near(candidate, plan.chosen), plan.candidates), key=_order)
    hidden = len(plan.candidates) - len(shown)
    title = f"{len(shown)} of {len(plan.candidates)} candidates; --json shows all" if hidden else None
    table = Table(box=None, caption=title, caption_justify="left", pad_edge=False)
    table.add_column("")
    for heading in (
        "nodes",
        "local batch",
        "global batch",
        "step",
        "epoch",
        "training",
        "cost",
        "memory",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for candidate in shown:
        is_chosen = candidate == plan.chosen
        table.add_row(*_cells(candidate, is_chosen), style="bold" if is_chosen else "" if candidate.feasible else "dim")
    return table


def _is_near(candidate: Candidate, chosen: Candidate) -> bool:
    ratio = candidate.global_batch / chosen.global_batch
    return 1 / NEIGHBOUR_FACTOR <= ratio <= NEIGHBOUR_FACTOR


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.global_batch, candidate.nodes


def _cells(candidate: Candidate, is_chosen: bool) -> list[str]:
    return [
        "→" if is_chosen else "",
        str(candidate.nodes),
        str(candidate.local_batch),
        str(candidate.global_batch),
        format_duration(candidate.step_time_s),
        format_duration(candidate.epoch_time_s),
        format_duration(candidate.train_time_s),
        format_money(candidate.cost, candidate.currency),
        format_bytes(candidate.peak_memory_bytes),
        candidate.why or ("measured" if candidate.measured else ""),
    ]
