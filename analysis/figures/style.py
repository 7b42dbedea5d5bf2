"""Colours, axes, titles and legends of all figures; matplotlib's global settings stay untouched."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import ScaledTranslation

from tula_hpc.formatting import DAY_S, HOUR_S, MINUTE_S, format_duration, format_number, keep_units

BATCH_LABEL = "global batch B (samples per step over all nodes)"
WIDTH_IN = 5.4
# a bold title line of this length is as wide as the figure
TITLE_CHARACTERS = 54
TITLE_LINE_IN = 0.2
# characters in a row of a legend as wide as the figure, and characters that a mark takes there
LEGEND_CHARACTERS = 78
LEGEND_MARK = 6
# height of a row of a legend, and rows for which every figure has room
LEGEND_ROW_IN = 0.17
LEGEND_ROWS = 3
EDGE_IN = 0.09
# quantities that span more than this factor get a logarithmic axis
LOG_RATIO = 4
# width of a letter below a tick, as a share of a panel as wide as the figure
TICK_LETTER_SHARE = 0.0161
# widths of the mark and of the band that are drawn for a line of a single point
LONE_MARK_PT = 13
LONE_BAND_PT = 9
# share of an axis that stays free below zero if marks lie on zero
BELOW_ZERO = 0.05


class Colour(NamedTuple):
    """One colour by its name in the report's style sheet, on white and on a dark page."""

    token: str
    light: str
    dark: str


INK = Colour("ink", "#1f2328", "#e6e8eb")
MUTED = Colour("muted", "#6a7078", "#9aa2ab")
GRID = Colour("grid", "#e2e5e8", "#343a41")
SHADE = Colour("shade", "#eceef0", "#2a2f35")
PAPER = Colour("paper", "#ffffff", "#16191d")
ALERT = Colour("alert", "#b3261e", "#ff8a80")

# Okabe and Ito's palette, which can be told apart with every common colour blindness, without its
# yellow, which vanishes on white
SIZES = (
    Colour("size-1", "#0072b2", "#4fa8e0"),
    Colour("size-2", "#d55e00", "#ff8a3d"),
    Colour("size-3", "#009e73", "#35c89b"),
    Colour("size-4", "#cc79a7", "#e29cc5"),
    Colour("size-5", "#e69f00", "#f2b84b"),
    Colour("size-6", "#56b4e9", "#8fd0f5"),
    Colour("size-7", "#5b3f95", "#b596e0"),
    Colour("size-8", "#8b5a2b", "#c99a6b"),
)
# seven shapes on eight colours: pairs repeat only after 56 sizes
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# parts of a step: they differ in lightness as well, and none is the colour of a cluster size
DATA = Colour("data", "#ddcc77", "#e3d58d")
COMPUTE = Colour("compute", "#a9b7c6", "#5d6e80")
OPTIMIZER = Colour("optimizer", "#5f6f80", "#a3b4c6")
SYNC = Colour("sync", "#882255", "#d2689f")

COLOURS = (INK, MUTED, GRID, SHADE, PAPER, ALERT, *SIZES, DATA, COMPUTE, OPTIMIZER, SYNC)

_SETTINGS: dict[Any, Any] = {
    # ships with matplotlib, so that figures look the same everywhere
    "font.family": "DejaVu Sans",
    "font.size": 9,
    # names from files may hold a dollar sign
    "text.parse_math": False,
    "text.color": INK.light,
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "xtick.color": MUTED.light,
    "ytick.color": MUTED.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
    # the same numbers give the same file
    "svg.hashsalt": "tula_hpc",
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the figures' style to drawing and saving, whatever the user's matplotlibrc says."""
    with mpl.rc_context(), warnings.catch_warnings():
        # letters that the font lacks are drawn as boxes, which needs no warning
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


LineStyle = Literal["", "-", "--", ":"]


class Key(NamedTuple):
    """Look of what is drawn, and its entry in a legend."""

    text: str
    marker: str = ""
    line: LineStyle = ""
    band: bool = False
    hollow: bool = False
    colour: str = MUTED.light


def size_style(sizes: Sequence[int], nodes: int) -> Key:
    """Return the look of a cluster size in every figure, by its position among all of the run."""
    index = list(sizes).index(nodes)
    colour = SIZES[index % len(SIZES)].light
    return Key(f"N = {nodes}", MARKERS[index % len(MARKERS)], colour=colour)


def partition_marker(index: int) -> str:
    """Return the marker of a partition; never a circle, which legends use for all partitions."""
    return MARKERS[1 + index % (len(MARKERS) - 1)]


def title_band_in(title: str) -> float:
    """Return the height of the title above a figure, inches."""
    return 2 * EDGE_IN + TITLE_LINE_IN * len(_title_lines(title))


def _title_lines(title: str) -> list[str]:
    """Break the title into as few lines as it needs, of about equal length."""
    title = keep_units(title)
    wide = textwrap.wrap(title, TITLE_CHARACTERS) or [""]
    for width in range(TITLE_CHARACTERS // 2, TITLE_CHARACTERS):
        even = textwrap.wrap(title, width)
        if len(even) == len(wide):
            return even
    return wide


@contextmanager
def new_figure(
    title: str,
    body_in: float,
    ratios: Sequence[float] = (1,),
    columns: int = 1,
    *,
    share_x: bool = True,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Begin a figure in the figures' style: with a title, and with panels row by row.

    All rows together are `body_in` inches high; `ratios` are their relative heights.
    """
    height = body_in + title_band_in(title)
    layout = ConstrainedLayoutEngine(rect=(0, 0, 1, body_in / height), h_pad=0.06, w_pad=EDGE_IN)
    heights = {"height_ratios": list(ratios)}
    with styled():
        figure = Figure(figsize=(WIDTH_IN, height), layout=layout, facecolor=PAPER.light)
        FigureCanvasAgg(figure)
        inset = ScaledTranslation(EDGE_IN, -EDGE_IN, figure.dpi_scale_trans)
        text = "\n".join(_title_lines(title))
        label = figure.text(0, 1, text, va="top", size=10.5, weight="bold", linespacing=1.25)
        # by this id the page removes the title, which it has as text
        label.set(transform=figure.transFigure + inset, gid="title", in_layout=False)
        grid = figure.subplots(
            len(ratios), columns, sharex=share_x, squeeze=False, gridspec_kw=heights
        )
        for axes in grid.flat:
            axes.set_facecolor("none")
            axes.grid(axis="y")
        yield figure, list(grid.flat)


def batch_axis(axes: Axes, batches: Iterable[int], label: str, *, right: float = 0.05) -> None:
    """Set a log2 x axis with plain batch numbers; its share `right` stays free for labels."""
    ticks = sorted(set(batches))
    left = 0.05
    # half an octave more, so that a single batch has a width too
    octaves = math.log2(ticks[-1] / ticks[0]) + 0.5
    width = octaves / (1 - left - right)
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 2 ** (left * width), ticks[-1] * 2 ** (right * width))
    every = math.ceil(len(ticks) / 10)
    named_ticks(axes, ticks, lambda value: f"{round(value):,}", first=ticks[::-1][::every][::-1])
    axes.set_xlabel(label)


def named_ticks(
    axes: Axes,
    ticks: Sequence[float],
    write: Callable[[float], str],
    *,
    first: Sequence[float] = (),
) -> None:
    """Set those of the ascending ticks of the x axis whose names do not overlap.

    If the names of `first` do not overlap, exactly these ticks are set. Otherwise the later one of
    two names that overlap is kept. The axis must have its scale and limits already.
    """
    shown = _apart(axes, first, write)
    if not first or len(shown) < len(first):
        shown = _apart(axes, ticks, write)
    axes.xaxis.set_major_locator(ticker.FixedLocator(shown))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: write(value)))


def _apart(axes: Axes, ticks: Sequence[float], write: Callable[[float], str]) -> list[float]:
    """Select ticks from right to left, with at least a letter's width between their names."""
    to_axis = axes.xaxis.get_transform().transform
    left, right = to_axis(axes.get_xlim())
    grid = axes.get_gridspec()
    letter = TICK_LETTER_SHARE * (grid.ncols if grid else 1)
    kept: list[float] = []
    end = math.inf
    for tick in reversed(ticks):
        half = letter * len(write(tick)) / 2
        centre = float((to_axis([tick])[0] - left) / (right - left))
        if centre + half + letter <= end:
            kept.append(tick)
            end = centre - half
    return kept[::-1]


def _decades(first: int, last: int, steps: Sequence[float]) -> list[float]:
    """Return the multiples `steps` of the powers of ten with exponents `first` to `last`."""
    return [step * 10.0**power for power in range(first, last + 1) for step in steps]


def _multiples(unit: float, steps: Sequence[float]) -> list[float]:
    return [unit * step for step in steps]


# ticks as multiples of each power of ten
_ROUND = (1, 2, 5)
_FINE = (1, 1.5, 2, 3, 4, 5, 7)
# ticks of durations, seconds, and those where these are too few
_DURATIONS = (
    *_decades(-6, 0, _ROUND),
    *(10.0, 20.0, 30.0),
    *_multiples(MINUTE_S, (1, 2, 5, 10, 20, 30)),
    *_multiples(HOUR_S, (1, 2, 6, 12)),
    *_multiples(DAY_S, _decades(0, 3, _ROUND)),
)
_FINE_DURATIONS = (
    *_decades(-6, 0, _FINE),
    *(10.0, 15.0, 20.0, 30.0, 40.0),
    *_multiples(MINUTE_S, (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40)),
    *_multiples(HOUR_S, (1, 1.5, 2, 3, 4, 6, 9, 12, 18)),
    *_multiples(DAY_S, _decades(0, 3, _FINE)),
)
# fewest and most ticks of a logarithmic axis
_FEWEST = 3
_MOST = 8


def even_ticks(axis: Axis, most: int, *, longest_s: float | None = None) -> None:
    """Place about `most` ticks at round numbers, or at round durations up to `longest_s`."""
    axis.set_major_locator(ticker.MaxNLocator(most, steps=[*_ROUND, 10]))
    if longest_s is not None:
        steps = [step for step in _DURATIONS if most * step >= longest_s]
        if steps:
            axis.set_major_locator(ticker.MultipleLocator(steps[0]))


def duration_tick(seconds: float) -> str:
    """Return a short tick label: "20 s", "5 min"."""
    return "0" if seconds == 0 else format_duration(seconds).replace(".0 ", " ")


def number_tick(value: float) -> str:
    """Return a plain tick label."""
    return format_number(value, 6).replace("-", "−")


def lone_mark(points: Sized) -> dict[str, Any]:
    """Return the look that makes a line of a single point visible; nothing for other lines."""
    return {"marker": "_", "markersize": LONE_MARK_PT} if len(points) == 1 else {}


def fill_band(
    axes: Axes, x: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike, **look: Any
) -> None:
    """Fill the band between the ends of intervals; a single interval is as wide as a mark."""
    if np.size(x) == 1:
        axes.vlines(x, low, high, linewidth=LONE_BAND_PT, **look)
    else:
        axes.fill_between(x, low, high, linewidth=0, **look)


def from_zero(axes: Axes) -> None:
    """Begin the y axis at zero, unless values are negative, as a user's own loss may be."""
    if axes.dataLim.y0 >= 0.0:
        # leaves room for marks at the upper end
        axes.set_ylim(0.0, max(axes.get_ylim()[1], 1.05 * axes.dataLim.y1) or None)


def value_axis(axes: Axes, values: Iterable[float], *, label: str, durations: bool = False) -> None:
    """Set a y axis for positive quantities: logarithmic if they span more than `LOG_RATIO`."""
    numbers = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    if high / low <= LOG_RATIO:
        axes.set_ylim(0 if numbers else -BELOW_ZERO, high * 1.18)
        even_ticks(axes.yaxis, 6, longest_s=high * 1.18 if durations else None)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.08, high * (high / low) ** 0.08)
        _round_ticks(axes.yaxis, axes.get_ylim(), durations=durations)
    tick = duration_tick if durations else number_tick
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: tick(value)))
    axes.set_ylabel(label)


def amount_axis(axes: Axes, values: Iterable[float], label: str) -> None:
    """Set an x axis for amounts as `value_axis` does, but linear if an amount is zero."""
    known = [value for value in values if math.isfinite(value)]
    numbers = [value for value in known if value > 0]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    if 0 in known or high / low <= LOG_RATIO:
        axes.set_xlim(-BELOW_ZERO * high if 0 in known else 0, high * 1.08)
        even_ticks(axes.xaxis, 7)
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
        _round_ticks(axes.xaxis, axes.get_xlim())
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: number_tick(value)))
    axes.set_xlabel(label)


def epoch_axis(axes: Axes) -> None:
    """Set an x axis for the epochs of a training, beginning at zero."""
    axes.set_xlabel("epochs of training")
    axes.xaxis.set_major_locator(ticker.MaxNLocator(10, steps=[*_ROUND, 10], integer=True))
    axes.set_xlim(left=0)


def _round_ticks(axis: Axis, limits: tuple[float, float], *, durations: bool = False) -> None:
    """Set at most eight ticks: the roundest numbers of which at least three are within limits."""
    first = math.floor(math.log10(limits[0]))
    last = math.floor(math.log10(limits[1]))
    ticks: list[Sequence[float]] = [_decades(first, last, steps) for steps in (_ROUND, _FINE)]
    if durations:
        ticks = [_DURATIONS, _FINE_DURATIONS, *ticks]
    within: list[float] = []
    for each in ticks:
        if len(within) < _FEWEST:
            within = [tick for tick in each if limits[0] <= tick <= limits[1]]
    if len(within) > _MOST and not durations:
        # every second one of 1, 2, 5 and 10 would be at uneven distances
        within = [tick for tick in _decades(first, last, (1,)) if tick in within]
    axis.set_major_locator(ticker.FixedLocator(within[:: math.ceil(len(within) / _MOST)]))
    axis.set_minor_locator(ticker.NullLocator())


def legend(axes: Axes, keys: Sequence[Key], *, left: float = -0.09) -> int:
    """Write a legend above the panel, from `left` (a share of its width); return how many rows."""
    handles = []
    for key in keys:
        handle = Line2D([], [], color=key.colour, markersize=5, solid_capstyle="butt")
        handle.set(marker=key.marker, linestyle=key.line)
        handle.set_fillstyle("none" if key.hollow else "full")
        if key.band:
            handle.set(linewidth=7, alpha=0.25)
        handles.append(handle)
    columns = _columns([len(key.text) + LEGEND_MARK for key in keys])
    rows = math.ceil(len(keys) / columns)
    _make_room(axes, rows)
    axes.legend(
        handles,
        [key.text for key in keys],
        loc="lower left",
        bbox_to_anchor=(left, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        borderpad=0.2,
        handletextpad=0.5,
    )
    return rows


def _make_room(axes: Axes, rows: int) -> None:
    """Make the figure higher for a legend of many rows, so that its panels keep their size."""
    figure = axes.figure
    engine = figure.get_layout_engine()
    more_in = LEGEND_ROW_IN * (rows - LEGEND_ROWS)
    if (
        more_in <= 0
        or not isinstance(figure, Figure)
        or not isinstance(engine, ConstrainedLayoutEngine)
    ):
        return
    before_in = figure.get_figheight()
    body_in = engine.get()["rect"][3] * before_in + more_in
    figure.set_figheight(before_in + more_in)
    engine.set(rect=(0, 0, 1, body_in / (before_in + more_in)))


def _columns(characters: Sequence[int]) -> int:
    """Return the number of columns that gives a legend, filled by column, the fewest rows."""
    for rows in range(1, len(characters) + 1):
        count = math.ceil(len(characters) / rows)
        widths = list(map(max, np.array_split(characters, count)))
        if sum(widths) <= LEGEND_CHARACTERS:
            return count
    return 1


def annotate_near(
    axes: Axes, text: str, place: tuple[float, float], offset_pt: tuple[float, float], **look: Any
) -> Annotation:
    """Write text beside a place in the panel, `offset_pt` points away from it."""
    return axes.annotate(text, place, xytext=offset_pt, textcoords="offset points", **look)
