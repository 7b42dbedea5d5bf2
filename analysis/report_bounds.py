"""How much a report shows: of very many measurements, epochs and events a part, so that a page stays a page."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeVar

from tula_hpc.analysis.aggregate import summarize
from tula_hpc.analysis.formatting import plural
from tula_hpc.records import Measurement

MOST_DRAWN = 400  # measurements in a figure that has a mark for each
MOST_POINTS = 2_000  # epochs in a figure
MOST_ROWS = 1_000  # of a table
MOST_LETTERS = 1_000  # of a cell

T = TypeVar("T")
Gap = TypeVar("Gap")


def drawn(measurements: list[Measurement]) -> list[Measurement]:
    """Those that figures show: all, or the medians of each configuration where they are more than `MOST_DRAWN`."""
    if len(measurements) <= MOST_DRAWN:
        return measurements
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for row in measurements:
        key = (row.partition, row.nodes, row.workers_per_node, row.local_batch, row.status, row.failure)
        groups.setdefault(key, []).append(row)
    medians = sorted(map(_median, groups.values()), key=attrgetter("partition", "configuration"))
    return evenly(medians, MOST_DRAWN)


def _median(repeats: Sequence[Measurement]) -> Measurement:
    """One for all measurements of a configuration; the first of those that have no times."""
    first, profiles = repeats[0], summarize(repeats).profiles
    if len(repeats) == 1 or not profiles:
        return first
    (profile,) = profiles
    fields = ("times", "memory", "parts", "smaller_computes")
    return first.model_copy(update={field: getattr(profile, field) for field in fields})


def about_drawn(measurements: Sequence[Measurement]) -> list[str]:
    """That figures do not show all measurements, where that is so."""
    if len(measurements) <= MOST_DRAWN:
        return []
    rows = f"{MOST_DRAWN} at most"
    return [f"Of {len(measurements):,} measurements figures show the medians of each configuration ({rows})."]


def about_steps(folder: str, logged: int, held: int) -> list[str]:
    """That figures do not show all steps that were logged, where that is so."""
    if not logged:
        return []
    return [f"Of {plural(logged, 'logged step')} in train/{folder}/metrics.jsonl {held:,} are shown, evenly spread."]


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // (most - 1)] for place in range(most)]


def ends(rows: Sequence[T], gap: Gap, most: int = MOST_ROWS) -> list[T | Gap]:
    """All, or the first and the last of them with `gap` between."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most // 2], gap, *rows[-(most // 2) :]]


def cut(text: str) -> str:
    """The beginning of what is too long for a cell."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"
