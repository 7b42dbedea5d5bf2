"""A finished figure with its caption and its numbers, and the files that it becomes.

These are SVG for the page, PNG and CSV next to it, and the report's PDF: a page with the decision
and the table around the chosen candidate, then a page for each figure.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation

from tula_hpc.analysis.figures.style import COLOURS, INK, MUTED, PAPER, styled, title_band_in
from tula_hpc.formatting import keep_units, printable
from tula_hpc.records import Configuration

PNG_DPI = 150
POINTS_PER_INCH = 72
SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"

Cell = str | int | float | bool | None

CONFIGURATION_COLUMNS = (
    "nodes",
    "workers_per_node",
    "local_batch_samples",
    "global_batch_samples",
)


class Table(NamedTuple):
    """The numbers of a figure, one row per mark; column names end in the unit."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Cell]]) -> Table:
        """Make a table of rows that have the same columns, at least one."""
        return cls(tuple(rows[0]), [tuple(row.values()) for row in rows])

    def to_csv(self) -> str:
        """Return comma-separated values: numbers unrounded, an empty cell for None."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        for row in self.rows:
            writer.writerow(map(_csv_cell, row))
        return printable(text.getvalue())


def configuration_cells(configuration: Configuration) -> dict[str, Cell]:
    """Return the cells of `CONFIGURATION_COLUMNS`."""
    cells = (*configuration, configuration.global_batch)
    return dict(zip(CONFIGURATION_COLUMNS, cells, strict=True))


def _csv_cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@"):
        # a spreadsheet would run it as a formula
        return f"'{cell}"
    return str(cell)


class Drawing(NamedTuple):
    """One figure of the report."""

    # name of its files without suffix
    name: str
    # what the figure shows, in one sentence
    title: str
    # what is drawn, and how to read it
    caption: str
    figure: Figure
    table: Table

    def svg(self) -> str:
        """Return the figure as SVG, on white."""
        print_svg = FigureCanvasSVG(self.figure).print_svg
        return printable(self._render(print_svg, {"Date": None, "Creator": None}).decode())

    def png(self) -> bytes:
        """Return the figure as PNG, on white."""
        self.figure.set_dpi(PNG_DPI)
        return self._render(FigureCanvasAgg(self.figure).print_png, {"Software": None})

    def inline_svg(self, svg: str) -> str:
        """Return the figure as SVG inside an HTML page; `svg` is what the method `svg` returned.

        It has no title, takes its colours from the page, and shares no id with another figure.
        """
        root = ElementTree.fromstring(svg)  # noqa: S314 - `svg` made it
        _crop_title(root, title_band_in(self.title) * POINTS_PER_INCH)
        for element in root.iter():
            _adapt_to_page(element, f"{self.name}-")
        root.set("role", "img")
        root.set("aria-label", printable(self.title))
        root.set("aria-describedby", f"{self.name}-caption")
        return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)

    def _render(self, print_to: Callable[..., None], metadata: dict[str, None]) -> bytes:
        """Print on a canvas; `savefig` would draw everything once more, only for the layout."""
        buffer = io.BytesIO()
        clean_texts(self.figure)
        with styled():
            print_to(buffer, metadata=metadata)
            # the next file keeps this layout, which is faster than a new one
            self.figure.set_layout_engine("none")
        return buffer.getvalue()


def clean_texts(figure: Figure) -> None:
    """Escape control characters in all texts of a figure: XML forbids them, and fonts lack them."""
    for text in figure.findobj(Text):
        if (shown := printable(text.get_text())) != text.get_text():
            text.set_text(shown)


class Missing(NamedTuple):
    """A figure that cannot be drawn yet."""

    name: str
    subject: str
    why: str
    # the inputs did not ask for the figure, so that the report does not mention its absence
    optional: bool = False


def attempt(
    name: str, draw: Callable[..., Drawing | Missing], *contents: object
) -> Drawing | Missing:
    """Draw one of several figures; if that fails, return the error as the reason."""
    try:
        return draw(*contents)
    except Exception as error:  # noqa: BLE001 - the other figures and tables are worth having
        why = f"it could not be drawn, {type(error).__name__}: {error}"
        return Missing(name, name.replace("_", " "), why)


def _crop_title(root: ElementTree.Element, band_pt: float) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            if child.get("id") == "title" or child.tag == f"{SVG}metadata":
                parent.remove(child)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    root.set("viewBox", f"0 {band_pt:g} {width:g} {height - band_pt:g}")
    for size in ("width", "height"):
        del root.attrib[size]


_COLOUR_NAMES = {colour.light: f"var(--{colour.token})" for colour in COLOURS}
_HEX = re.compile("|".join(_COLOUR_NAMES))


def _adapt_to_page(element: ElementTree.Element, prefix: str) -> None:
    """Prefix ids, and use the page's colour names, which follow its light or dark scheme."""
    # HTML knows neither the SVG namespace in tags nor `xlink:href`
    element.tag = element.tag.removeprefix(SVG)
    for key, value in list(element.attrib.items()):
        if key == "id":
            element.set(key, prefix + value)
        elif key != XLINK_HREF:
            moved = value.replace("url(#", f"url(#{prefix}")
            element.set(key, _HEX.sub(lambda match: _COLOUR_NAMES[match.group()], moved))
    link = element.attrib.pop(XLINK_HREF, None)
    if link is not None:
        element.set("href", link.replace("#", f"#{prefix}", 1))


# A5 in landscape: easy to read on a screen, and large enough when printed on A4
PAGE_WIDTH_IN = 8.27
PAGE_HEIGHT_IN = 5.83
MARGIN_IN = 0.55
# height of a line of 9-point text
LINE_IN = 0.165
# lines for a list's heading and for the space after the list
LIST_EXTRA_LINES = 2
CAPTION_CHARACTERS = 108
# width of a letter, as a share of the font size
LETTER_EM = 0.66
TABLE_ROW_IN = 0.36
# height of a line of small text in the table
CELL_LINE_IN = 0.135
# least space between two columns
COLUMN_GAP_IN = 0.1


class TitlePage(NamedTuple):
    """The texts of the first page."""

    title: str
    subtitle: str
    answer: str
    columns: tuple[str, ...]
    # cells of the table; the first row is the chosen candidate
    rows: list[tuple[str, ...]]
    # sentences by heading
    lists: dict[str, list[str]]


def render_pdf(first: TitlePage, drawings: Sequence[Drawing]) -> bytes:
    """Render a page of texts, and a page for each figure.

    This changes the layout of the figures: render their other files first.
    """
    buffer = io.BytesIO()
    metadata = {"Title": printable(first.title), "Creator": "tula_hpc", "CreationDate": None}
    with styled(), PdfPages(buffer, metadata=metadata) as pages:
        _add_page(pages, _title_page(first))
        for number, drawing in enumerate(drawings, start=2):
            _add_page(pages, _figure_page(drawing, f"{first.title} · {number}"))
    return buffer.getvalue()


def _add_page(pages: PdfPages, figure: Figure) -> None:
    """Print a page; `pages.savefig` would draw everything once more, only for the layout."""
    clean_texts(figure)
    print_to: Callable[[PdfPages], None] = FigureCanvasPdf(figure).print_pdf
    print_to(pages)


def _figure_page(drawing: Drawing, footer: str) -> Figure:
    """Enlarge the figure to a page, with its panels between the title and the caption."""
    figure = drawing.figure
    caption = textwrap.wrap(keep_units(drawing.caption), CAPTION_CHARACTERS)
    above = MARGIN_IN + title_band_in(drawing.title)
    below = MARGIN_IN + LINE_IN * (len(caption) + 1)
    panels = figure.get_figheight() - title_band_in(drawing.title)
    height = max(PAGE_HEIGHT_IN, above + panels + below)
    figure.set_size_inches(PAGE_WIDTH_IN, height)
    left = MARGIN_IN / PAGE_WIDTH_IN
    rect = (left, below / height, 1 - 2 * left, 1 - (above + below) / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, h_pad=0.06))
    # the title keeps to the margins at any page height
    margins = ScaledTranslation(MARGIN_IN, -MARGIN_IN, figure.dpi_scale_trans)
    title = next(text for text in figure.texts if text.get_gid() == "title")
    title.set_transform(figure.transFigure + margins)
    _write(figure, "\n".join(caption), height - below + LINE_IN, size=8.5, linespacing=1.35)
    _write(figure, footer, height - 0.3, size=7.5, color=MUTED.light)
    return figure


def _write(figure: Figure, text: str, down_in: float, **look: Any) -> Text:
    """Write text that begins `down_in` inches below the page's upper edge, at the left margin."""
    width, height = figure.get_size_inches()
    written = figure.text(MARGIN_IN / width, 1 - down_in / height, text, va="top", **look)
    written.set_in_layout(False)
    return written


def _title_page(first: TitlePage) -> Figure:
    answer = textwrap.wrap(keep_units(first.answer), 98)
    first = first._replace(columns=_narrow_headings(first))
    table_top = 1.35 + 0.2 * len(answer)
    notes_top = table_top
    if first.rows:
        notes_top += TABLE_ROW_IN * (len(first.rows) + 2) + _second_line_in(first.columns)
    lists = {name: _bullets(items) for name, items in first.lists.items() if items}
    needed = sum(LINE_IN * (len(lines) + LIST_EXTRA_LINES) for lines in lists.values())
    height = max(PAGE_HEIGHT_IN, notes_top + needed + MARGIN_IN)
    figure = Figure(figsize=(PAGE_WIDTH_IN, height), facecolor=PAPER.light)
    FigureCanvasAgg(figure)
    _write(figure, first.title, 0.5, size=_fitting(first.title, 17), weight="bold")
    _write(figure, first.subtitle, 0.86, size=_fitting(first.subtitle, 9), color=MUTED.light)
    _write(figure, "\n".join(answer), 1.15, size=10, linespacing=1.4)
    if first.rows:
        _draw_table(figure, first, table_top)
    for name, lines in lists.items():
        _write(figure, name, notes_top - 0.05, size=9, weight="bold")
        _write(figure, "\n".join(lines), notes_top + LINE_IN, size=8.5, linespacing=1.35)
        notes_top += LINE_IN * (len(lines) + LIST_EXTRA_LINES)
    return figure


def _fitting(line: str, most_pt: float) -> float:
    """Return a font size, at most `most_pt`, at which a line is no wider than the page."""
    width_pt = (PAGE_WIDTH_IN - 2 * MARGIN_IN) * POINTS_PER_INCH
    return min(most_pt, width_pt / (LETTER_EM * max(1, len(line))))


def _bullets(items: Sequence[str]) -> list[str]:
    lines = []
    for item in items:
        bullet = f"• {keep_units(item)}"
        lines += textwrap.wrap(bullet, CAPTION_CHARACTERS, subsequent_indent="   ")
    return lines


def _narrow_headings(first: TitlePage) -> tuple[str, ...]:
    """Break headings that are wider than the cells below into two lines."""
    headings = []
    for name, *cells in zip(first.columns, *first.rows, strict=True):
        text = keep_units(name)
        width = max(1, *map(len, "\n".join(cells).split("\n")))
        while len(lines := textwrap.wrap(text, width, break_long_words=False)) > 2:
            width += 1
        headings.append("\n".join(lines))
    return tuple(headings)


def _second_line_in(headings: Sequence[str]) -> float:
    """Return the height of the headings' second line, inches; 0 if none has one."""
    return CELL_LINE_IN * max(name.count("\n") for name in headings)


def _draw_table(figure: Figure, first: TitlePage, top_in: float) -> None:
    rows_in = top_in + _second_line_in(first.columns)
    columns = []
    for name, *cells in zip(first.columns, *first.rows, strict=True):
        texts = [_write(figure, name, top_in, size=7.5, color=MUTED.light)]
        for number, cell in enumerate(cells, start=1):
            down_in = rows_in + TABLE_ROW_IN * (number - 0.2)
            weight = "bold" if number == 1 else "normal"
            # the second line of a cell is a remark
            value, _, remark = cell.partition("\n")
            texts.append(_write(figure, value, down_in, size=7.5, weight=weight))
            down_in += CELL_LINE_IN
            texts.append(_write(figure, remark, down_in, size=6.5, color=MUTED.light))
        columns.append(texts)
    # fonts cannot measure control characters
    clean_texts(figure)
    _spread(columns, figure.dpi)
    _rule(figure, rows_in + 0.2)
    _rule(figure, rows_in + TABLE_ROW_IN * (len(first.rows) + 0.8))


def _spread(columns: Sequence[Sequence[Text]], dpi: float) -> None:
    """Spread columns over the width of the page, with smaller letters if they need more."""
    widths = [max(text.get_window_extent().width / dpi for text in column) for column in columns]
    gaps = max(1, len(columns) - 1)
    page_in = PAGE_WIDTH_IN - 2 * MARGIN_IN
    shrunk = min(1.0, (page_in - COLUMN_GAP_IN * gaps) / sum(widths))
    gap_in = (page_in - shrunk * sum(widths)) / gaps
    left_in = MARGIN_IN
    for column, width in zip(columns, widths, strict=True):
        for text in column:
            text.set_x(left_in / PAGE_WIDTH_IN)
            text.set_fontsize(shrunk * text.get_fontproperties().get_size_in_points())
        left_in += shrunk * width + gap_in


def _rule(figure: Figure, down_in: float) -> None:
    width, height = figure.get_size_inches()
    across = [MARGIN_IN / width, 1 - MARGIN_IN / width]
    y = 1 - down_in / height
    figure.add_artist(Line2D(across, [y, y], color=INK.light, linewidth=0.6))
