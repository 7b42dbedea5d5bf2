"""How every figure looks: colours, axes, titles. matplotlib's object-oriented API; its settings are untouched."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from tula_hpc.formatting import DAY_S, HOUR_S, MINUTE_S, format_duration, format_number, keep_units

WIDTH_IN = 6.4
# a bold title line of this length is as wide as the figure
TITLE_CHARACTERS = 64
TITLE_LINE_IN = 0.2
EDGE_IN = 0.09
# quantities that span more than this factor get a logarithmic axis
LOG_RATIO = 4
# width of a letter below a tick, as a share of the panel
TICK_LETTER_SHARE = 0.0136
# of an axis, left free where marks lie on zero
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

# Okabe and Ito's palette without its yellow, which vanishes on white: told apart with every common
# colour blindness
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

# parts of a step: told apart by lightness as well, and never a colour of a cluster size
DATA = Colour("data", "#ddcc77", "#e3d58d")
COMPUTE = Colour("compute", "#a9b7c6", "#5d6e80")
OPTIMIZER = Colour("optimizer", "#5f6f80", "#a3b4c6")
SYNC = Colour("sync", "#882255", "#d2689f")

COLOURS = (INK, MUTED, GRID, SHADE, PAPER, ALERT, *SIZES, DATA, COMPUTE, OPTIMIZER, SYNC)

_SETTINGS: dict[Any, Any] = {
    # ships with matplotlib: the same letters everywhere
    "font.family": "DejaVu Sans",
    "font.size": 9,
    # names from files may hold a dollar sign
    "text.parse_math": False,
    "text.color": INK.light,
    "axes.edgecolor": MUTED.light,
    "axes.labelcolor": INK.light,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
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
    """Draw and save inside this: matplotlib's defaults and ours instead of the user's matplotlibrc, for a while."""
    with mpl.rc_context(), warnings.catch_warnings():
        # a name in a script that the font lacks shows as boxes
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


class SizeStyle(NamedTuple):
    """How one cluster size looks in every figure."""

    colour: str
    marker: str


def size_style(sizes: Sequence[int], nodes: int) -> SizeStyle:
    """Colour and marker of a cluster size: by its place among all sizes of the run."""
    place = list(sizes).index(nodes)
    return SizeStyle(SIZES[place % len(SIZES)].light, MARKERS[place % len(MARKERS)])


def partition_marker(place: int) -> str:
    """Shape of a partition by its place among those of the plan; never a circle, which stands for all of them."""
    others = MARKERS[1:]
    return others[place % len(others)]


def title_band_in(title: str) -> float:
    """Height of the title above a figure, inches."""
    return 2 * EDGE_IN + TITLE_LINE_IN * len(_title_lines(title))


def _title_lines(title: str) -> list[str]:
    """The title in as few lines as it needs, of about equal length."""
    title = keep_units(title)
    wide = textwrap.wrap(title, TITLE_CHARACTERS) or [""]
    widths = range(TITLE_CHARACTERS // 2, TITLE_CHARACTERS)
    return next(
        (even for width in widths if len(even := textwrap.wrap(title, width)) == len(wide)), wide
    )


def new_figure(
    title: str, body_in: float, ratios: Sequence[float] = (1,)
) -> tuple[Figure, list[Axes]]:
    """A figure with a title and, `body_in` inches high, panels one below the other that share the x axis."""
    band = title_band_in(title)
    layout = ConstrainedLayoutEngine(
        rect=(0, 0, 1, body_in / (body_in + band)), h_pad=0.06, w_pad=EDGE_IN
    )
    figure = Figure(figsize=(WIDTH_IN, body_in + band), layout=layout, facecolor=PAPER.light)
    FigureCanvasAgg(figure)
    top_left = figure.transFigure + ScaledTranslation(EDGE_IN, -EDGE_IN, figure.dpi_scale_trans)
    text = "\n".join(_title_lines(title))
    label = figure.text(
        0, 1, text, transform=top_left, va="top", size=10.5, weight="bold", linespacing=1.25
    )
    # the report removes it where the title stands in the page's own text
    label.set_gid("title")
    label.set_in_layout(False)
    panels = figure.subplots(
        len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(ratios)}
    )
    return figure, [_bare(axes) for axes in panels[:, 0]]


def _bare(axes: Axes) -> Axes:
    axes.set_facecolor("none")
    axes.grid(axis="y")
    return axes


def batch_axis(axes: Axes, batches: Iterable[int], label: str, *, right: float = 0.05) -> None:
    """A log2 axis with plain batch numbers; `right` is the share of it left free on the right, for labels of lines."""
    ticks = sorted(set(batches))
    # half an octave more: one batch alone has a width too
    left, octaves = 0.05, math.log2(ticks[-1] / ticks[0]) + 0.5
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
    """Ticks of the x axis, ascending, as far as their names keep clear of one another; the last one before others.

    All of `first` and no other, if they do. Call when the axis has its scale and limits.
    """
    even = _apart(axes, first, write)
    axes.xaxis.set_major_locator(
        FixedLocator(even if first and len(even) == len(first) else _apart(axes, ticks, write))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def _apart(axes: Axes, ticks: Sequence[float], write: Callable[[float], str]) -> list[float]:
    """From the right, those whose names begin a letter's width or more after the end of the one before."""
    kept: list[float] = []
    end = math.inf
    for tick in reversed(ticks):
        half = TICK_LETTER_SHARE * len(write(tick)) / 2
        centre = _across(axes, tick)
        if centre + half + TICK_LETTER_SHARE <= end:
            kept.append(tick)
            end = centre - half
    return kept[::-1]


def _across(axes: Axes, value: float) -> float:
    """Where a value lies on the x axis, as a share of its width."""
    left, value, right = axes.xaxis.get_transform().transform(
        [axes.get_xlim()[0], value, axes.get_xlim()[1]]
    )
    return float((value - left) / (right - left))


def _seconds_ticks() -> list[float]:
    under_a_minute = [
        *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
        10.0,
        20.0,
        30.0,
    ]
    minutes = [MINUTE_S * step for step in (1, 2, 5, 10, 20, 30)]
    hours = [HOUR_S * step for step in (1, 2, 5, 10)]
    days = [DAY_S * step * 10**power for power in range(4) for step in (1, 2, 5)]
    return [*under_a_minute, *(float(tick) for tick in (*minutes, *hours, *days))]


_DURATIONS = _seconds_ticks()
# of each power of ten
_ROUND = (1, 2, 5)
_FINE = (1, 1.5, 2, 3, 4, 5, 7)


def duration_tick(seconds: float) -> str:
    """A short tick label: "20 s", "5 min"."""
    return "0" if seconds == 0 else format_duration(seconds).replace(".0 ", " ")


def number_tick(value: float) -> str:
    """A plain tick label."""
    return format_number(value, 6).replace("-", "−")


def from_zero(axes: Axes) -> None:
    """Begin the axis of a loss at zero; one of a user's own may be below."""
    if axes.dataLim.y0 >= 0.0:
        axes.set_ylim(bottom=0.0)


def value_axis(axes: Axes, values: Iterable[float], *, label: str, durations: bool = False) -> None:
    """A y axis for positive quantities: from zero where they are of one size, else logarithmic with round numbers."""
    numbers = [value for value in values if math.isfinite(value) and value > 0]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    if high / low <= LOG_RATIO:
        axes.set_ylim(0 if numbers else -BELOW_ZERO, high * 1.18)
        axes.yaxis.set_major_locator(MaxNLocator(6))
    else:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.08, high * (high / low) ** 0.08)
        _round_ticks(axes.yaxis, axes.get_ylim(), _DURATIONS if durations else ())
    tick = duration_tick if durations else number_tick
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.set_ylabel(label)


def amount_axis(axes: Axes, values: Iterable[float], label: str) -> None:
    """An x axis for amounts, as `value_axis`; one that holds nothing at all has no logarithm."""
    known = [value for value in values if math.isfinite(value)]
    numbers, free = [value for value in known if value > 0], 0 in known
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    if free or high / low <= LOG_RATIO:
        axes.set_xlim(-BELOW_ZERO * high if free else 0, high * 1.08)
        axes.xaxis.set_major_locator(MaxNLocator(7))
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** 0.06, high * (high / low) ** 0.06)
        _round_ticks(axes.xaxis, axes.get_xlim())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_tick(value)))
    axes.set_xlabel(label)


def _round_ticks(axis: Axis, limits: tuple[float, float], ticks: Sequence[float] = ()) -> None:
    """Some of these that lie within the limits, else round numbers."""
    within = _within(limits, ticks) or _within(limits, _decades(limits, _ROUND))
    if len(within) < 3:
        within = _within(limits, _decades(limits, _FINE))
    axis.set_major_locator(FixedLocator(within[:: math.ceil(len(within) / 8)]))
    axis.set_minor_locator(NullLocator())


def _within(limits: tuple[float, float], ticks: Iterable[float]) -> list[float]:
    return [tick for tick in ticks if limits[0] <= tick <= limits[1]]


def _decades(limits: tuple[float, float], steps: Sequence[float]) -> Iterator[float]:
    """These multiples of every power of ten from the lower limit's to the upper one's."""
    low, high = (math.floor(math.log10(limit)) for limit in limits)
    return (step * 10.0**power for power in range(low, high + 1) for step in steps)


class Key(NamedTuple):
    """One entry of the legend: what a mark means, whatever its colour."""

    text: str
    marker: str = ""
    line: Literal["", "-", "--", ":"] = ""
    band: bool = False
    hollow: bool = False
    colour: str = MUTED.light


def legend(axes: Axes, keys: Sequence[Key], *, columns: int = 5, left: float = -0.09) -> None:
    """What the marks mean, in rows above the panel, from `left` (a share of its width) on."""
    handles = [
        Line2D(
            [],
            [],
            color=key.colour,
            marker=key.marker or None,
            linestyle=key.line or "none",
            linewidth=7 if key.band else 1.6,
            alpha=0.25 if key.band else 1,
            solid_capstyle="butt",
            fillstyle="none" if key.hollow else "full",
            markersize=5,
        )
        for key in keys
    ]
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
