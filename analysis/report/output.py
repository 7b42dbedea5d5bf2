"""Write a report's files and pages, and tables for the terminal."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tula_hpc.errors import RunDirectoryError
from tula_hpc.files import mistrust
from tula_hpc.formatting import keep_units, printable
from tula_hpc.records import write_atomically

if TYPE_CHECKING:
    import jinja2
    from rich.table import Table

    from tula_hpc.analysis.figures.drawing import Drawing
    from tula_hpc.analysis.report.tables import TextTable


# spaces between two columns
GAP = 2
# characters in a line if the output is not a terminal
PLAN_WIDTH = 120
# suffixes of a figure's own files, and of those with its numbers as a table
SUFFIXES = ("svg", "png", "csv", "txt", "tex")


def figure_files(drawings: Iterable[Drawing]) -> dict[str, bytes]:
    """Return each figure as SVG, PNG and CSV, by file name."""
    files: dict[str, bytes] = {}
    for drawing in drawings:
        files[f"{drawing.name}.svg"] = drawing.svg().encode()
        files[f"{drawing.name}.png"] = drawing.png()
        files[f"{drawing.name}.csv"] = drawing.table.to_csv().encode()
    return files


def prepare_folder(folder: Path) -> None:
    """Make a report's folder, or refuse a place where no report can be written.

    Raises:
        RunDirectoryError: It is not a folder, is a link, or others own it or may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        message = "is not a folder, or lies below a file; move it away, or name another folder"
        raise RunDirectoryError(message, source=folder) from None
    if reason := mistrust(folder):
        raise RunDirectoryError(reason, source=folder)


def replace_files(folder: Path, figures: Iterable[str], files: Mapping[str, bytes]) -> list[Path]:
    """Write a report's files; delete figures of an earlier report that this one does not have.

    Raises:
        RunDirectoryError: See `prepare_folder`.
        StorageError: A file cannot be written.
    """
    prepare_folder(folder)
    for figure in figures:
        for suffix in SUFFIXES:
            name = f"{figure}.{suffix}"
            if name not in files:
                # an earlier report's figure would seem to belong to this report
                (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return [folder / name for name in files]


def render_page(template: str, page: Mapping[str, Any]) -> str:
    """Return HTML from a template in this folder; everything not marked as safe is escaped."""
    return printable(_environment().get_template(template).render(page))


# option of a command, in which a line must not break at a hyphen
_OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")


# cached: compiling a template takes ten times as long as filling it in
@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup, escape

    # imported late, since it loads NumPy, which a command's --help does not need
    from tula_hpc.analysis.report.tables import numbers_as_text

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def in_one_piece(text: str) -> Markup:
        whole = r'<span class="option">\g<0></span>'
        return Markup(_OPTION.sub(whole, str(escape(keep_units(text)))))  # noqa: S704 - escaped before

    environment.filters["keep_units"] = in_one_piece
    environment.filters["as_text"] = lambda table: numbers_as_text(table.columns, table.rows)
    return environment


class TextColumn(NamedTuple):
    """Column of a table for the terminal."""

    # may be broken into a line for each word
    heading: str
    cells: Sequence[str]
    # right-aligned, as numbers are
    right: bool = False
    # least characters of a line if cells may be broken into lines; None if they may not
    narrow: int | None = None
    # columns with a larger number are left out earlier; 0 for never
    spare: int = 0

    @property
    def least(self) -> int:
        """Least width at which the column can be read, characters."""
        cells = _longest(self.cells)
        if self.narrow is not None:
            cells = min(cells, self.narrow)
        return max(_longest(self.heading.split()), cells)

    @property
    def most(self) -> int:
        """Largest width that the column can use, characters."""
        return _longest([self.heading, *self.cells])


def _longest(texts: Sequence[str]) -> int:
    from rich.cells import cell_len

    lines = (line for text in texts for line in text.split("\n"))
    return max(map(cell_len, lines), default=0)


def fitted(columns: Sequence[TextColumn], width: int) -> list[tuple[TextColumn, int]]:
    """Return columns with their widths; spare columns without room are left out."""
    kept = list(columns)
    while _least(kept) > width and any(column.spare for column in kept):
        kept.remove(max(kept, key=lambda column: column.spare))
    left = width - _least(kept)
    found = []
    for column in kept:
        more = max(0, min(left, column.most - column.least))
        found.append((column, column.least + more))
        left -= more
    return found


def _least(columns: Sequence[TextColumn]) -> int:
    return sum(column.least for column in columns) + GAP * (len(columns) - 1)


def terminal_table(
    columns: Sequence[TextColumn], width: int, styles: Sequence[str] = (), **words: Any
) -> Table:
    """Return a table for a terminal of `width` characters; `styles` are those of its rows, if any.

    Texts that look like markup or a terminal's escapes are shown, not interpreted. `words` are
    rich's arguments for a title or a caption.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), **words)
    clean = [column._replace(cells=list(map(printable, column.cells))) for column in columns]
    chosen = fitted(clean, width)
    for column, characters in chosen:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.heading), justify=justify, width=characters)
    rows = list(zip(*(column.cells for column, _ in chosen), strict=True))
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        table.add_row(*map(Text, cells), style=style)
    return table


NO_COLUMNS: Mapping[str, int] = {}


def table_lines(
    content: TextTable,
    title: str = "",
    *,
    width: int = PLAN_WIDTH,
    narrow: Mapping[str, int] = NO_COLUMNS,
    spare: Mapping[str, int] = NO_COLUMNS,
) -> str:
    """Return a table as lines for the terminal, of `width` characters if the output is none.

    `narrow` and `spare` are those of `TextColumn`, by the names of columns.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    columns = [
        TextColumn(name, cells, narrow=narrow.get(name), spare=spare.get(name, 0))
        for name, cells in zip(content.columns, zip(*content.rows, strict=True), strict=True)
    ]
    heading = Text(printable(title)) if title else None
    table = terminal_table(columns, console.width, title=heading, title_justify="left")
    # if rich itself printed to a closed output, it would end the process silently
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
