"""The scale that was really applied: its density over all elements and steps (the paper's figure 6, right)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.formatting import format_number, format_percent
from tula_hpc.analysis.report_data import RunContents
from tula_hpc.records import SCALE_BINS_PER_OCTAVE, SCALE_OCTAVES, StepMetrics

Array = NDArray[np.float64]

BINS = 2 * SCALE_OCTAVES * SCALE_BINS_PER_OCTAVE + 1  # those between the two ends
ONE = BINS // 2
BANDWIDTH = 0.75 / SCALE_BINS_PER_OCTAVE  # octaves: below half a bin the curve would show the bins
POINTS_PER_BIN = 8
VISIBLE = 1e-4  # share of a bin from which on it is within the axis
MOST_LINES = len(style.SIZES)


class Used(NamedTuple):
    """The scales of one training."""

    label: str
    counts: Array  # (BINS,), elements × steps around 2^((i − ONE) / SCALE_BINS_PER_OCTAVE)
    below: float  # beyond the bins
    above: float

    @property
    def total(self) -> float:
        """All elements × steps."""
        return float(self.counts.sum() + self.below + self.above)

    @property
    def unscaled_share(self) -> float:
        """Share that was left as it was, or nearly so."""
        return float(self.counts[ONE]) / self.total

    @property
    def median(self) -> float:
        """Half of all was scaled by no more, to the width of a bin."""
        reached = self.below + np.cumsum(self.counts)
        place = int(np.searchsorted(reached, self.total / 2))
        return float(bin_scales()[min(place, BINS - 1)])

    def density(self) -> tuple[Array, Array]:
        """Scales, and the share of elements and steps per octave around them: a Gaussian kernel on the counts."""
        centres = np.log2(bin_scales())
        at = np.linspace(centres[0] - 0.5, centres[-1] + 0.5, POINTS_PER_BIN * BINS)
        kernel = np.exp(-0.5 * ((at[:, None] - centres) / BANDWIDTH) ** 2) / (BANDWIDTH * np.sqrt(2 * np.pi))
        return 2.0**at, kernel @ self.counts / self.total


def bin_scales() -> Array:
    """The scales that the bins are centred on, (BINS,)."""
    powers: Array = (np.arange(BINS) - ONE) / SCALE_BINS_PER_OCTAVE
    return 2.0**powers


def draw_scale_density(run: RunContents) -> Drawing | Missing:
    """Density of the scale applied, one curve for each training."""
    found = list(filter(None, (used_scales(item.label, item.metrics.steps) for item in run.trainings)))[:MOST_LINES]
    if not found:
        asked = bool(run.sweep and run.sweep.training.scale_histogram and run.trainings)
        return Missing("scale_density", "density of the scale", "training has logged none yet", optional=not asked)
    return draw_used(found, "scale_density")


def draw_used(found: Sequence[Used], name: str) -> Drawing:
    """One curve for each, under this file stem."""
    title = _title(found)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.4)
        for used, colour in zip(found, style.SIZES, strict=False):
            scales, density = used.density()
            axes.fill_between(scales, density, color=colour.light, alpha=0.18, linewidth=0)
            axes.plot(scales, density, "-", color=colour.light)
        _dress(axes, found)
        if len(found) > 1:
            keys = [
                style.Key(used.label, line="-", colour=c.light) for used, c in zip(found, style.SIZES, strict=False)
            ]
            style.legend(axes, keys, left=-0.01)
    return Drawing(name, title, _caption(found), figure, _table(found))


def used_scales(label: str, steps: Iterable[StepMetrics]) -> Used | None:
    """Sum over these lines of the log; None where none has a histogram."""
    lines = [row.scale_histogram for row in steps if row.scale_histogram is not None]
    known = np.array([line for line in lines if len(line) == BINS + 2], dtype=np.float64).reshape(-1, BINS + 2)
    total = known.sum(axis=0)
    return Used(label, total[1:-1], float(total[0]), float(total[-1])) if total.sum() > 0 else None


def _dress(axes: Axes, found: Iterable[Used]) -> None:
    filled = np.flatnonzero(np.max([used.counts / used.total for used in found], axis=0) > VISIBLE)
    first, last = (filled[0], filled[-1]) if len(filled) else (ONE, ONE)
    low, high = (float(np.log2(bin_scales()[place])) for place in (first, last))
    low, high = min(low, -1) - 0.5, max(high, 1) + 0.5
    axes.set_xscale("log", base=2)
    axes.set_xlim(2.0**low, 2.0**high)
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(-SCALE_OCTAVES, SCALE_OCTAVES + 1)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number_tick(value)))
    axes.set_xlabel("scale applied to the gradient")
    axes.axvline(1, color=style.MUTED.light, linewidth=1, zorder=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("density, share per octave")


def _title(found: Sequence[Used]) -> str:
    if len(found) > 1:
        shares = [used.unscaled_share for used in found]
        return f"Between {format_percent(min(shares))} and {format_percent(max(shares))} of the updates were not scaled"
    (used,) = found
    share = f"{format_percent(used.unscaled_share)} of the updates were not scaled"
    return f"{share}; the median of the scale is {format_number(used.median, 2)}"


def _caption(found: Sequence[Used]) -> str:
    beyond = max((used.below + used.above) / used.total for used in found)
    ends = f" Up to {format_percent(beyond)} lie beyond the ends of the axis." if beyond >= 5e-4 else ""
    return (
        "How strongly gradients were scaled: density over all elements of the gradient and all steps, smoothed with a "
        f"Gaussian of {format_number(BANDWIDTH, 2)} octaves. At 1 (to 6 %) gradients were left as they are, above they "
        f"are made longer.{ends}"
    )


def _table(found: Iterable[Used]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for used in found:
        counts = [used.below, *used.counts.tolist(), used.above]
        scales = [0.0, *bin_scales().tolist(), float("inf")]
        rows += [
            (used.label, scale, round(count), count / used.total) for scale, count in zip(scales, counts, strict=True)
        ]
    return Table(("mark", "scale", "elements_times_steps", "share"), rows)
