"""Names inside a figure, placed where they hide nothing: at the ends of lines, and beside the chosen point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from tula_hpc.analysis.figures.style import INK, SIZES, Key

# (points, 2)
Points = npt.NDArray[np.float64]

# height of a line of text, as a share of the panel
LINE_SHARE = 0.062
# width of a bold letter, likewise
LETTER_SHARE = 0.0136
# letters of a name that leaves the lines two thirds of the panel
LONGEST = 24
# how far names stay from a line across the panel and from the words above it
BENEATH, ABOVE = 0.035, 0.09


class EndLabel(NamedTuple):
    """A name that stands beside the end of a line instead of in a legend."""

    x: float
    y: float
    text: str
    colour: str
    marker: str = ""
    line: Literal["-", ":"] = "-"

    @property
    def key(self) -> Key:
        """The same in a legend."""
        return Key(self.text, self.marker, self.line, colour=self.colour)


def have_room(names: Sequence[str], most: int = len(SIZES)) -> bool:
    """Whether names can stand at the ends of lines: not too many, and none that takes too much of the width."""
    return len(names) <= most and max(map(len, names), default=0) <= LONGEST


def label_ends(axes: Axes, labels: Iterable[EndLabel], *, across: float | None = None) -> Points:
    """Write names at the ends of lines, moved apart where they would overlap. Call when the axis limits are set.

    Args: axes: The panel. labels: The names. across: Height, in data units, of a line across the
        whole panel with words above it: no name lies on them.

    Returns:
        (points, 2): where the names are, in axes fractions.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(labels, key=lambda item: item.y)
    ends = np.array([to_axes.transform((label.x, label.y)) for label in ordered]).reshape(-1, 2)
    barred = None if across is None else float(to_axes.transform((axes.get_xlim()[0], across))[1])
    heights = _heights(ends[:, 1].tolist(), barred)
    for label, height in zip(ordered, heights, strict=True):
        axes.annotate(
            label.text,
            (label.x, height),
            xycoords=("data", "axes fraction"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=label.colour,
            weight="bold",
            size=8.5,
        )
    longest = max((len(label.text) for label in ordered), default=0)
    along = np.linspace(0, 0.02 + LETTER_SHARE * longest, 5)
    return np.array(
        [(x + dx, y) for (x, _), y in zip(ends, heights, strict=True) for dx in along]
    ).reshape(-1, 2)


def _heights(ends: Sequence[float], barred: float | None) -> list[float]:
    """Of the names, ascending as the ends are, in axes fractions: within the panel, and none on a line across it."""
    lowest = LINE_SHARE / 2
    if barred is None:
        return _within(ends, lowest, 1.0)
    room_above = max(0, math.floor((1.0 - barred - ABOVE) / LINE_SHARE) + 1)
    below = max(sum(end < barred for end in ends), len(ends) - room_above)
    return [
        *_within(ends[:below], lowest, barred - BENEATH),
        *_within(ends[below:], barred + ABOVE, 1.0),
    ]


def _within(wanted: Sequence[float], bottom: float, top: float) -> list[float]:
    """Apart from one another, none above the top if there is room, and in no case one below the bottom."""
    apart, last = spread(wanted, LINE_SHARE), len(wanted) - 1
    lowered = [min(height, top - (last - i) * LINE_SHARE) for i, height in enumerate(apart)]
    return [max(height, bottom + i * LINE_SHARE) for i, height in enumerate(lowered)]


def spread(wanted: Sequence[float] | npt.NDArray[np.float64], gap: float) -> list[float]:
    """Ascending positions as near to the wanted ones as a gap between neighbours allows: crowds share their centre."""
    crowds: list[list[float]] = []
    for position in wanted:
        crowds.append([float(position)])
        while len(crowds) > 1 and _overlap(crowds[-2], crowds[-1], gap):
            crowds[-2:] = [crowds[-2] + crowds[-1]]
    return [
        float(np.mean(crowd)) + (i - (len(crowd) - 1) / 2) * gap
        for crowd in crowds
        for i in range(len(crowd))
    ]


def _overlap(lower: Sequence[float], upper: Sequence[float], gap: float) -> bool:
    return float(np.mean(upper) - np.mean(lower)) < gap * (len(lower) + len(upper)) / 2


def mark_chosen(
    axes: Axes,
    point: tuple[float, float],
    text: str,
    *,
    lines: Iterable[Sequence[tuple[float, float]]],
    taken: Points,
) -> None:
    """Ring a point and label it where lines and other labels leave most room. Call when the axis limits are set.

    Args:
        axes: The panel.
        point: In data units.
        text: The label, of one line or more.
        lines: Corners of the lines, in data units.
        taken: (points, 2) where other labels are, in axes fractions.
    """
    axes.plot(
        [point[0]],
        [point[1]],
        "o",
        fillstyle="none",
        markersize=13,
        markeredgewidth=1.6,
        color=INK.light,
        zorder=6,
    )
    to_axes = axes.transData + axes.transAxes.inverted()
    here = to_axes.transform(point)
    drawn = [_along(to_axes.transform(list(line))) for line in lines if line]
    obstacles = np.concatenate([here[None], taken, *drawn])
    axes.annotate(
        text,
        point,
        xytext=_freest_spot(here, obstacles, text),
        textcoords="axes fraction",
        ha="center",
        va="center",
        size=8.5,
        weight="bold",
        linespacing=1.3,
        arrowprops={
            "arrowstyle": "-",
            "color": INK.light,
            "linewidth": 0.9,
            "shrinkB": 8,
            "shrinkA": 1,
        },
        zorder=7,
    ).set_in_layout(False)


def _along(corners: Points) -> Points:
    """Points on a polyline, dense enough that no label slips between them."""
    position = np.arange(len(corners))
    dense = np.linspace(0, len(corners) - 1, 8 * len(corners))
    return np.column_stack([np.interp(dense, position, corners[:, axis]) for axis in (0, 1)])


def _freest_spot(here: Points, obstacles: Points, text: str) -> tuple[float, float]:
    """Centre of a label, in axes fractions, whose box keeps clear of all obstacles, as near to `here` as may be."""
    rows = text.split("\n")
    half = np.array(
        [LETTER_SHARE / 2 * max(map(len, rows)) + 0.01, LINE_SHARE / 2 * len(rows) + 0.01]
    )
    offsets = [(dx, dy) for dx in np.linspace(-0.4, 0.4, 17) for dy in np.linspace(-0.5, 0.5, 21)]
    spots = np.clip(here + np.array(offsets), half, 1 - half)
    gaps = np.maximum(np.abs(spots[:, None] - obstacles) - half, 0)
    clearance = np.minimum(np.hypot(gaps[..., 0], gaps[..., 1]).min(axis=1), 0.05)
    best = spots[np.argmax(clearance - 0.02 * np.hypot(*(spots - here).T))]
    return float(best[0]), float(best[1])
