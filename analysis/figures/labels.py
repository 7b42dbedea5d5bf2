"""Labels where they hide nothing in a figure: at the ends of lines, next to the chosen point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from tula_hpc.analysis.figures.style import INK, SIZES, Key

# (points, 2)
Points = npt.NDArray[np.float64]

# height of a line of text, as a share of the panel
LINE_SHARE = 0.062
# width of a bold letter, as a share of the panel
LETTER_SHARE = 0.0155
# most letters of a name at the end of a line, so that lines keep two thirds of the panel
LONGEST = 24
# least distances of a name from a line across the panel: below the line, and above its text
BENEATH = 0.035
ABOVE = 0.09
# distance of a label from lines beyond which more distance is no better, as a share of the panel
MOST_CLEARANCE = 0.05
# radius around the chosen point, where its own line may be, and the distance from a line at
# which the label's pointer touches it, as shares of the panel
RING_SHARE = 0.06
TOUCH_SHARE = 0.02
# pointer from a label to the point that it names
ARROW = {"arrowstyle": "-", "color": INK.light, "linewidth": 0.9, "shrinkB": 8, "shrinkA": 1}


class EndLabel(NamedTuple):
    """A name at the end of a line, instead of in a legend."""

    x: float
    y: float
    # what a legend would have instead
    key: Key


def have_room(names: Sequence[str], most: int = len(SIZES)) -> bool:
    """Tell whether names are few and short enough to be written at the ends of lines."""
    return len(names) <= most and max(map(len, names), default=0) <= LONGEST


def label_ends(axes: Axes, labels: Iterable[EndLabel], *, across: float | None = None) -> Points:
    """Write names at the ends of lines, moved apart where they would overlap.

    The axis limits must be set already. `across` is the height, in data units, of a line across the
    whole panel with text above it; names keep clear of both. Returns the places that the names
    take, in axes fractions, (points, 2).
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    ordered = sorted(labels, key=lambda item: item.y)
    ends = np.array([to_axes.transform((label.x, label.y)) for label in ordered]).reshape(-1, 2)
    barred = None if across is None else float(to_axes.transform((axes.get_xlim()[0], across))[1])
    heights = _heights(ends[:, 1].tolist(), barred)
    for label, height in zip(ordered, heights, strict=True):
        axes.annotate(
            label.key.text,
            (label.x, height),
            xycoords=("data", "axes fraction"),
            # leaves room for the ring if the end is the chosen point
            xytext=(11, 0),
            textcoords="offset points",
            va="center",
            color=label.key.colour,
            weight="bold",
            size=8.5,
        )
    longest = max((len(label.key.text) for label in ordered), default=0)
    along = np.linspace(0, 0.02 + LETTER_SHARE * longest, 5)
    across_names = np.add.outer(ends[:, 0], along).ravel()
    return np.column_stack([across_names, np.repeat(heights, len(along))])


def _heights(ends: Sequence[float], barred: float | None) -> list[float]:
    """Return the names' heights in axes fractions, clear of a line across the panel at `barred`."""
    lowest = LINE_SHARE / 2
    if barred is None:
        return list(_within(ends, lowest, 1.0))
    room_above = max(0, math.floor((1.0 - barred - ABOVE) / LINE_SHARE) + 1)
    below = max(sum(end < barred for end in ends), len(ends) - room_above)
    return [
        *_within(ends[:below], lowest, barred - BENEATH),
        *_within(ends[below:], barred + ABOVE, 1.0),
    ]


def _within(wanted: Sequence[float], bottom: float, top: float) -> npt.NDArray[np.float64]:
    """Move heights apart: never below the bottom, and not above the top if there is room."""
    steps = LINE_SHARE * np.arange(len(wanted))
    lowered = np.minimum(spread(wanted, LINE_SHARE), top - steps[::-1])
    return np.asarray(np.maximum(lowered, bottom + steps))


def spread(wanted: Sequence[float], gap: float) -> npt.NDArray[np.float64]:
    """Return ascending positions, `gap` apart, as near to the wanted ones as possible.

    Positions that would overlap form a group, which keeps its centre. After rank times gap is
    subtracted, positions need only be ascending, so that isotonic regression finds them.
    """
    steps = gap * np.arange(len(wanted))
    fit = isotonic_regression(np.asarray(wanted, dtype=np.float64) - steps)
    return np.asarray(fit.x + steps, dtype=np.float64)


def mark_chosen(
    axes: Axes,
    point: tuple[float, float],
    text: str,
    *,
    lines: Iterable[Sequence[tuple[float, float]]],
    taken: Points,
) -> None:
    """Ring a point and label it where lines and other labels leave most room.

    The axis limits must be set already. The point and the corners of lines are in data units,
    `taken` are (points, 2) places of other labels in axes fractions.
    """
    ring = axes.plot([point[0]], [point[1]], "o", color=INK.light, fillstyle="none", zorder=6)
    ring[0].set(markersize=13, markeredgewidth=1.6)
    to_axes = axes.transData + axes.transAxes.inverted()
    here = to_axes.transform(point)
    drawn = [_along(to_axes.transform(list(line))) for line in lines if line]
    obstacles = np.concatenate([here[None], taken, *drawn])
    label = axes.annotate(
        text,
        point,
        xytext=_freest_spot(here, obstacles, text),
        textcoords="axes fraction",
        ha="center",
        va="center",
        size=8.5,
        weight="bold",
        linespacing=1.3,
        arrowprops=ARROW,
        zorder=7,
    )
    label.set_in_layout(False)


def _along(corners: Points) -> Points:
    """Return points on a polyline, dense enough that no label slips between them."""
    position = np.arange(len(corners))
    dense = np.linspace(0, len(corners) - 1, 8 * len(corners))
    return np.column_stack([np.interp(dense, position, corners[:, axis]) for axis in (0, 1)])


def _freest_spot(here: Points, obstacles: Points, text: str) -> tuple[float, float]:
    """Return the centre of a label, in axes fractions, clear of obstacles and near `here`."""
    rows = text.split("\n")
    width = LETTER_SHARE * max(map(len, rows))
    height = LINE_SHARE * len(rows)
    half = np.array([width / 2 + 0.01, height / 2 + 0.01])
    # the whole panel only if no spot nearby is free, since it has five times as many spots
    for reach in ((0.4, 0.5), (1.0, 1.0)):
        spots = np.clip(here + _grid(*reach), half, 1 - half)
        gaps = np.maximum(np.abs(spots[:, None] - obstacles) - half, 0)
        clearance = np.minimum(np.hypot(gaps[..., 0], gaps[..., 1]).min(axis=1), MOST_CLEARANCE)
        if clearance.any():
            break
    # a label on a line is worse than a pointer across one
    faults = 2 * (clearance == 0) + _are_crossed(here, spots, obstacles)
    worth = clearance - 0.02 * np.hypot(*(spots - here).T) - MOST_CLEARANCE * faults
    best = spots[np.argmax(worth)]
    return float(best[0]), float(best[1])


def _grid(across: float, up: float) -> Points:
    """Return offsets up to these, 0.05 apart, as shares of the panel."""
    sides = [np.linspace(-end, end, round(end / 0.025) + 1) for end in (across, up)]
    return np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)


def _are_crossed(here: Points, spots: Points, obstacles: Points) -> npt.NDArray[np.bool_]:
    """Tell for each spot whether its pointer to `here` meets an obstacle outside of the ring."""
    outside = obstacles[np.hypot(*(obstacles - here).T) > RING_SHARE]
    across, up = outside.T
    found = np.zeros(len(spots), dtype=np.bool_)
    for share in np.linspace(0, 1, 25):
        x, y = (here + share * (spots - here)).T
        # a maximum over an axis of length two would take twenty times as long
        touches = np.abs(x[:, None] - across) < TOUCH_SHARE
        touches &= np.abs(y[:, None] - up) < TOUCH_SHARE
        found |= touches.any(axis=1)
    return found
