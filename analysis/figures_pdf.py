"""The report on paper: a page with the answer and the table, then one page per figure."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.transforms import ScaledTranslation, Transform

from tula_hpc.analysis.figures_drawing import Drawing, clean_texts
from tula_hpc.analysis.figures_style import INK, MUTED, PAPER, styled, title_band_in
from tula_hpc.analysis.formatting import keep_units
from tula_hpc.printable import printable

PAGE_WIDTH_IN, PAGE_HEIGHT_IN = 8.27, 5.83  # A5 across: prints on A4 without becoming small, reads well on a screen
MARGIN_IN = 0.55
LINE_IN = 0.165  # of 9-point text
LIST_EXTRA_LINES = 2  # a list's heading, and space after it
CAPTION_CHARACTERS = 108
TABLE_ROW_IN = 0.36


class TitlePage(NamedTuple):
    """What the first page says."""

    title: str
    subtitle: str
    answer: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]  # the first is the chosen one
    about: list[str]  # the choice
    warnings: list[str]


def render_pdf(first: TitlePage, drawings: Sequence[Drawing]) -> bytes:
    """All pages. Lays the drawings out anew for the page: render their other files before."""
    buffer = io.BytesIO()
    metadata = {"Title": printable(first.title), "Creator": "tula_hpc", "CreationDate": None}
    with styled(), PdfPages(buffer, metadata=metadata) as pages:
        _add_page(pages, _title_page(first))
        for number, drawing in enumerate(drawings, start=2):
            _add_page(pages, _figure_page(drawing, f"{first.title} · {number}"))
    return buffer.getvalue()


def _add_page(pages: PdfPages, figure: Figure) -> None:
    """As `pages.savefig`, which would draw everything once more, before that, for the layout's sake."""
    clean_texts(figure)
    print_to: Callable[[PdfPages], None] = FigureCanvasPdf(figure).print_pdf
    print_to(pages)


def _figure_page(drawing: Drawing, footer: str) -> Figure:
    """The figure itself, made as large as the page, with its caption below."""
    figure, band = drawing.figure, title_band_in(drawing.title)
    caption = textwrap.wrap(keep_units(drawing.caption), CAPTION_CHARACTERS)
    below = MARGIN_IN + LINE_IN * (len(caption) + 1)
    body = max(figure.get_figheight() - band, PAGE_HEIGHT_IN - MARGIN_IN - band - below)
    width, height = PAGE_WIDTH_IN, MARGIN_IN + band + body + below
    figure.set_size_inches(width, height)
    rect = (MARGIN_IN / width, below / height, 1 - 2 * MARGIN_IN / width, body / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, h_pad=0.06))
    next(text for text in figure.texts if text.get_gid() == "title").set_transform(_from_top(figure, 0))
    _write(figure, "\n".join(caption), height - below + LINE_IN, size=8.5, linespacing=1.35)
    _write(figure, footer, height - 0.3, size=7.5, color=MUTED.light)
    return figure


def _from_top(figure: Figure, down_in: float) -> Transform:
    """Coordinates whose (0, 1) lies on the left margin, `down_in` inches below the upper margin, at any page height."""
    return figure.transFigure + ScaledTranslation(MARGIN_IN, -MARGIN_IN - down_in, figure.dpi_scale_trans)


def _write(figure: Figure, text: str, down_in: float, *, x_in: float = MARGIN_IN, **look: Any) -> None:
    """Text whose top is `down_in` inches below the page's upper edge."""
    width, height = figure.get_size_inches()
    figure.text(x_in / width, 1 - down_in / height, text, va="top", **look).set_in_layout(False)


def _title_page(first: TitlePage) -> Figure:
    answer = textwrap.wrap(keep_units(first.answer), 98)
    lists = [
        (name, _bullets(items)) for name, items in (("About the choice", first.about), ("Warnings", first.warnings))
    ]
    lists = [(name, lines) for name, lines in lists if lines]
    table_top = 1.35 + 0.2 * len(answer)
    notes_top = table_top + TABLE_ROW_IN * (len(first.rows) + 2) if first.rows else table_top
    needed = sum(LINE_IN * (len(lines) + LIST_EXTRA_LINES) for _, lines in lists)
    height = max(PAGE_HEIGHT_IN, notes_top + needed + MARGIN_IN)
    figure = Figure(figsize=(PAGE_WIDTH_IN, height), facecolor=PAPER.light)
    FigureCanvasAgg(figure)
    _write(figure, first.title, 0.5, size=17, weight="bold")
    _write(figure, first.subtitle, 0.86, size=9, color=MUTED.light)
    _write(figure, "\n".join(answer), 1.15, size=10, linespacing=1.4)
    if first.rows:
        _draw_table(figure, first, table_top)
    for name, lines in lists:
        _write(figure, name, notes_top - 0.05, size=9, weight="bold")
        _write(figure, "\n".join(lines), notes_top + LINE_IN, size=8.5, linespacing=1.35)
        notes_top += LINE_IN * (len(lines) + LIST_EXTRA_LINES)
    return figure


def _bullets(items: Sequence[str]) -> list[str]:
    wrapped = [textwrap.wrap(f"• {item}", CAPTION_CHARACTERS, subsequent_indent="   ") for item in items]
    return [line for lines in wrapped for line in lines]


def _draw_table(figure: Figure, first: TitlePage, top_in: float) -> None:
    starts = list(_column_starts(first))
    _rule(figure, top_in + 0.2)
    for x_in, name in zip(starts, first.columns, strict=True):
        _write(figure, name, top_in, x_in=x_in, size=7.5, color=MUTED.light)
    for number, row in enumerate(first.rows, start=1):
        for x_in, cell in zip(starts, row, strict=True):
            _write_cell(figure, cell, top_in + TABLE_ROW_IN * (number - 0.2), x_in, bold=number == 1)
    _rule(figure, top_in + TABLE_ROW_IN * (len(first.rows) + 0.8))


def _write_cell(figure: Figure, cell: str, down_in: float, x_in: float, *, bold: bool) -> None:
    """A cell; its second line, if any, is a remark."""
    value, _, remark = cell.partition("\n")
    _write(figure, value, down_in, x_in=x_in, size=7.5, weight="bold" if bold else "normal")
    _write(figure, remark, down_in + 0.135, x_in=x_in, size=6.5, color=MUTED.light)


def _column_starts(first: TitlePage) -> Iterable[float]:
    """Columns share the width by their longest cell."""
    columns = zip(first.columns, *first.rows, strict=True)
    longest = [max(len(line) for cell in cells for line in cell.split("\n")) + 3 for cells in columns]
    for before in range(len(longest)):
        yield MARGIN_IN + (PAGE_WIDTH_IN - 2 * MARGIN_IN) * sum(longest[:before]) / sum(longest)


def _rule(figure: Figure, down_in: float) -> None:
    width, height = figure.get_size_inches()
    y = 1 - down_in / height
    figure.add_artist(Line2D([MARGIN_IN / width, 1 - MARGIN_IN / width], [y, y], color=INK.light, linewidth=0.6))
