"""A table's columns in the width of a terminal: headings and texts go into more lines, then columns are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from tula_hpc.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2  # blanks between two columns


class TextColumn(NamedTuple):
    """One column."""

    heading: str  # goes into as many lines as it has words
    cells: Sequence[str]
    right: bool = False  # whether cells end at the same place, as numbers do
    narrow: int | None = None  # cells go into more lines in so few characters; None: they do not
    spare: int = 0  # what is left out first has the largest; 0: never left out

    @property
    def least(self) -> int:
        """Characters without which the column cannot be read."""
        cells = _longest(self.cells)
        return max(_longest(self.heading.split()), cells if self.narrow is None else min(cells, self.narrow))

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


def add_columns(table: Table, columns: Sequence[TextColumn], width: int, styles: Sequence[str]) -> None:
    """Fill an empty table without a box, edges or other columns.

    Args:
        table: To be filled.
        columns: Texts, in which nothing is taken for markup or for an escape of the terminal.
        width: Of the terminal, characters.
        styles: Of the rows.
    """
    from rich.text import Text

    clean = [column._replace(cells=[printable(cell) for cell in column.cells]) for column in columns]
    chosen = fitted(clean, width)
    for column, characters in chosen:
        table.add_column(Text(column.heading), justify="right" if column.right else "left", width=characters)
    for row, style in enumerate(styles):
        table.add_row(*(Text(column.cells[row]) for column, _ in chosen), style=style)
