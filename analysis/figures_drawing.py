"""A finished figure with its caption and its numbers, and the files it becomes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from tula_hpc.analysis.figures_style import COLOURS, styled, title_band_in
from tula_hpc.printable import printable

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
        return f"'{cell}"  # a spreadsheet would run it as a formula
    return str(cell)


class Drawing(NamedTuple):
    """One figure of the report."""

    name: str  # stem of its files
    title: str  # the finding, in words
    caption: str  # what is shown and how to read it
    figure: Figure
    table: Table

    def svg(self) -> str:
        """The figure alone, on white."""
        return printable(self._render(FigureCanvasSVG(self.figure).print_svg, {"Date": None, "Creator": None}).decode())

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
            self.figure.set_layout_engine("none")  # laid out now; the next file keeps it, which is faster
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
    optional: bool = False  # nobody asked for it: its absence is not worth a line


def attempt(name: str, draw: Callable[..., Drawing | Missing], *contents: object) -> Drawing | Missing:
    """Draw one figure of several; one that fails is named with its error, and takes nothing else with it."""
    try:
        return draw(*contents)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other figures and the tables are worth having
        return Missing(name, name.replace("_", " "), f"it could not be drawn, {type(error).__name__}: {error}")


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
