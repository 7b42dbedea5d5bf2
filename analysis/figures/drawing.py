"""A finished figure with its caption and its numbers, and the files it becomes.

The report on paper: a page with the answer and the table, then one page per figure.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf, PdfPages
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import ScaledTranslation, Transform

from tula_hpc.analysis.figures.style import COLOURS, INK, MUTED, PAPER, styled, title_band_in
from tula_hpc.formatting import keep_units, printable

PNG_DPI = 150
POINTS_PER_INCH = 72
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

Cell = str | int | float | bool | None


class Table(NamedTuple):
    """The numbers of a figure, one row per mark; column names end in the unit."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    def to_csv(self) -> str:
        """Comma-separated, numbers unrounded, an empty cell for what there is not."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_csv_cell(cell) for cell in row] for row in self.rows)
        return printable(text.getvalue())


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

    # stem of its files
    name: str
    # the finding, in words
    title: str
    # what is shown and how to read it
    caption: str
    figure: Figure
    table: Table

    def svg(self) -> str:
        """The figure alone, on white."""
        return printable(
            self._render(
                FigureCanvasSVG(self.figure).print_svg, {"Date": None, "Creator": None}
            ).decode()
        )

    def png(self) -> bytes:
        """The figure alone, 150 dots per inch."""
        self.figure.set_dpi(PNG_DPI)
        return self._render(FigureCanvasAgg(self.figure).print_png, {"Software": None})

    def inline_svg(self, svg: str) -> str:
        """What `svg` returned, for a page: without the title, in its colours, with ids that no other figure uses."""
        root = ElementTree.fromstring(svg)  # noqa: S314 - see above
        _crop_title(root, title_band_in(self.title) * POINTS_PER_INCH)
        for element in root.iter():
            _adapt(element, f"{self.name}-")
        root.set("role", "img")
        root.set("aria-label", printable(self.title))
        return "".join(_serialize(root))

    def _render(self, print_to: Callable[..., None], metadata: dict[str, None]) -> bytes:
        """What a canvas prints: `savefig` would draw everything once more, before that, for the layout's sake."""
        buffer = io.BytesIO()
        clean_texts(self.figure)
        with styled():
            print_to(buffer, metadata=metadata)
            # laid out now; the next file keeps it, which is faster
            self.figure.set_layout_engine("none")
        return buffer.getvalue()


def clean_texts(figure: Figure) -> None:
    """Show control characters in all texts of a figure: XML may not hold them, and fonts have no signs for them."""
    for text in figure.findobj(Text):
        if (shown := printable(text.get_text())) != text.get_text():
            text.set_text(shown)


class Missing(NamedTuple):
    """A figure that cannot be drawn yet."""

    name: str
    subject: str
    why: str
    # nobody asked for it: its absence is not worth a line
    optional: bool = False


def attempt(
    name: str, draw: Callable[..., Drawing | Missing], *contents: object
) -> Drawing | Missing:
    """Draw one figure of several; one that fails is named with its error, and takes nothing else with it."""
    try:
        return draw(*contents)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other figures and the tables are worth having
        return Missing(
            name, name.replace("_", " "), f"it could not be drawn, {type(error).__name__}: {error}"
        )


def _crop_title(root: ElementTree.Element, band_pt: float) -> None:
    for parent in root.iter():
        for child in [item for item in parent if item.get("id") == "title"]:
            parent.remove(child)
    for child in [item for item in root if item.tag == f"{{{SVG}}}metadata"]:
        root.remove(child)
    _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
    root.set("viewBox", f"0 {band_pt:g} {width:g} {height - band_pt:g}")
    for size in ("width", "height"):
        del root.attrib[size]


_COLOUR_NAMES = {colour.light: f"var(--{colour.token})" for colour in COLOURS}
_HEX = re.compile("|".join(_COLOUR_NAMES))


def _adapt(element: ElementTree.Element, prefix: str) -> None:
    """Colours become the page's variables, so that they follow its light or dark scheme; ids get a prefix."""
    for key, value in element.attrib.items():
        if key == "id":
            element.set(key, prefix + value)
        elif key == f"{{{XLINK}}}href":
            element.set(key, value.replace("#", f"#{prefix}", 1))
        else:
            moved = value.replace("url(#", f"url(#{prefix}")
            element.set(key, _HEX.sub(lambda match: _COLOUR_NAMES[match.group()], moved))


def _serialize(root: ElementTree.Element) -> Iterator[str]:
    """SVG as HTML wants it: no prefix, and `href` instead of the obsolete `xlink:href`."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")
        link = element.attrib.pop(f"{{{XLINK}}}href", None)
        if link is not None:
            element.set("href", link)
    yield ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


# A5 across: prints on A4 without becoming small, reads well on a screen
PAGE_WIDTH_IN, PAGE_HEIGHT_IN = 8.27, 5.83
MARGIN_IN = 0.55
# of 9-point text
LINE_IN = 0.165
# a list's heading, and space after it
LIST_EXTRA_LINES = 2
CAPTION_CHARACTERS = 108
TABLE_ROW_IN = 0.36


class TitlePage(NamedTuple):
    """What the first page says."""

    title: str
    subtitle: str
    answer: str
    columns: tuple[str, ...]
    # the first is the chosen one
    rows: list[tuple[str, ...]]
    # the choice
    about: list[str]
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
    next(text for text in figure.texts if text.get_gid() == "title").set_transform(
        _from_top(figure, 0)
    )
    _write(figure, "\n".join(caption), height - below + LINE_IN, size=8.5, linespacing=1.35)
    _write(figure, footer, height - 0.3, size=7.5, color=MUTED.light)
    return figure


def _from_top(figure: Figure, down_in: float) -> Transform:
    """Coordinates whose (0, 1) lies on the left margin, `down_in` inches below the upper margin, at any page height."""
    return figure.transFigure + ScaledTranslation(
        MARGIN_IN, -MARGIN_IN - down_in, figure.dpi_scale_trans
    )


def _write(
    figure: Figure, text: str, down_in: float, *, x_in: float = MARGIN_IN, **look: Any
) -> None:
    """Text whose top is `down_in` inches below the page's upper edge."""
    width, height = figure.get_size_inches()
    figure.text(x_in / width, 1 - down_in / height, text, va="top", **look).set_in_layout(False)


def _title_page(first: TitlePage) -> Figure:
    answer = textwrap.wrap(keep_units(first.answer), 98)
    lists = [
        (name, _bullets(items))
        for name, items in (("About the choice", first.about), ("Warnings", first.warnings))
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
    wrapped = [
        textwrap.wrap(f"• {item}", CAPTION_CHARACTERS, subsequent_indent="   ") for item in items
    ]
    return [line for lines in wrapped for line in lines]


def _draw_table(figure: Figure, first: TitlePage, top_in: float) -> None:
    starts = list(_column_starts(first))
    _rule(figure, top_in + 0.2)
    for x_in, name in zip(starts, first.columns, strict=True):
        _write(figure, name, top_in, x_in=x_in, size=7.5, color=MUTED.light)
    for number, row in enumerate(first.rows, start=1):
        for x_in, cell in zip(starts, row, strict=True):
            _write_cell(
                figure, cell, top_in + TABLE_ROW_IN * (number - 0.2), x_in, bold=number == 1
            )
    _rule(figure, top_in + TABLE_ROW_IN * (len(first.rows) + 0.8))


def _write_cell(figure: Figure, cell: str, down_in: float, x_in: float, *, bold: bool) -> None:
    """A cell; its second line, if any, is a remark."""
    value, _, remark = cell.partition("\n")
    _write(figure, value, down_in, x_in=x_in, size=7.5, weight="bold" if bold else "normal")
    _write(figure, remark, down_in + 0.135, x_in=x_in, size=6.5, color=MUTED.light)


def _column_starts(first: TitlePage) -> Iterable[float]:
    """Columns share the width by their longest cell."""
    columns = zip(first.columns, *first.rows, strict=True)
    longest = [
        max(len(line) for cell in cells for line in cell.split("\n")) + 3 for cells in columns
    ]
    for before in range(len(longest)):
        yield MARGIN_IN + (PAGE_WIDTH_IN - 2 * MARGIN_IN) * sum(longest[:before]) / sum(longest)


def _rule(figure: Figure, down_in: float) -> None:
    width, height = figure.get_size_inches()
    y = 1 - down_in / height
    figure.add_artist(
        Line2D([MARGIN_IN / width, 1 - MARGIN_IN / width], [y, y], color=INK.light, linewidth=0.6)
    )
