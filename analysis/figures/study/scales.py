"""Scales that a study's methods applied to gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures.study.accuracy import column_key, column_keys
from tula_hpc.analysis.figures.training import describe_range
from tula_hpc.analysis.study_results import StudyContents, StudyTable
from tula_hpc.formatting import format_number
from tula_hpc.records import Metrics

# least relative spread of scales with a density; less is a single value
LEAST_SPREAD = 1e-3
# standard deviations of the kernel by which a curve goes on at each end
TAIL = 3.0
POINTS = 200

Values = NDArray[np.float64]


def used_scales(runs: Iterable[Metrics]) -> Values:
    """Return the mean factors on the gradient in all lines of all runs, (lines,)."""
    found = []
    for run in runs:
        for row in run.steps:
            scale = row.applied_scale
            if scale is not None and math.isfinite(scale):
                found.append(scale)
    return np.array(found)


def draw_study_scale(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Draw the density of each method's gradient scale, if it varies, in a panel per batch."""
    scales = _scales_by_batch(contents, table)
    if not scales:
        why = "no training logged a gradient scale that varies"
        return Missing("study_scale", "density of the gradient scale", why)
    title = _scale_title(scales)
    count = len(scales)
    names = sorted(set().union(*scales.values()), key=table.columns.index)
    # the axis includes 1, the factor of unscaled gradients
    everything = np.ones(1)
    for here in scales.values():
        everything = np.concatenate([everything, *here.values()])
    # a factor of 0 has no logarithm
    wide = bool(0 < everything.min() < everything.max() / style.LOG_RATIO)
    label = "factor on the gradient, mean over parameters"
    with style.new_figure(title, 0.6 + 1.7 * count, ratios=[1] * count) as (figure, panels):
        panels[-1].set_xlabel(label)
        for axes, (batch, here) in zip(panels, scales.items(), strict=True):
            _draw_scales_of_batch(axes, here, table.columns, wide=wide)
            axes.set_ylabel(f"density\nB = {batch:,}")
        if wide:
            # up to the ends of all curves
            low = min(axes.dataLim.x0 for axes in panels)
            high = max(axes.dataLim.x1 for axes in panels)
            style.amount_axis(panels[-1], [low, high], label)
        keys = column_keys(table.columns, names)
        style.legend(panels[0], keys, left=-0.02)
    return Drawing("study_scale", title, _scale_caption(wide=wide), figure, _scale_table(scales))


def _scale_caption(*, wide: bool) -> str:
    caption = (
        "How often gradients were multiplied by which factor, over all logged steps of all seeds "
        "(a Gaussian kernel density). Factors are means over all parameters and over the steps "
        "between two lines of the log: steps that the gate left unscaled count as 1, and steps "
        "that used a part of the scale, as in its warm-up, count with that part. The vertical line "
        "is 1, no scaling."
    )
    if wide:
        caption += " Densities are those of the factor's natural logarithm."
    return caption


def _scales_by_batch(contents: StudyContents, table: StudyTable) -> dict[int, dict[str, Values]]:
    """Return the scales that vary, by batch and method."""
    scales: dict[int, dict[str, Values]] = {}
    for batch in table.batches:
        for name in table.columns:
            values = used_scales(contents.of(name, batch))
            if len(values) > 1 and np.ptp(values) > LEAST_SPREAD * np.abs(values).max():
                scales.setdefault(batch, {})[name] = values
    return scales


def bandwidth(values: Values) -> float:
    """Return the standard deviation of the kernel of `density`, by Scott's rule."""
    return float(np.std(values, ddof=1) * len(values) ** -0.2)


def density(values: Values, at: Values) -> Values:
    """Return a Gaussian kernel density at the places `at`, with Scott's bandwidth."""
    # this import takes most of a second, and a sweep's report does not need it
    from scipy.stats import gaussian_kde

    return np.asarray(gaussian_kde(values)(at), dtype=np.float64)


def _draw_scales_of_batch(
    axes: Axes, scales: Mapping[str, Values], columns: Sequence[str], *, wide: bool
) -> None:
    drawn = dict(scales)
    # factor of unscaled gradients, or its logarithm
    unscaled = 1.0
    if wide:
        drawn = {name: np.log(values) for name, values in scales.items()}
        unscaled = 0.0
    everything = np.concatenate([*drawn.values(), [unscaled]])
    margin = TAIL * max(map(bandwidth, drawn.values()))
    least = everything.min() - margin
    if not wide:
        least = max(0.0, least)
    at = np.linspace(least, everything.max() + margin, POINTS)
    x = np.exp(at) if wide else at
    for name, values in drawn.items():
        key = column_key(columns, name)
        heights = density(values, at)
        axes.plot(x, heights, key.line, color=key.colour)
        axes.fill_between(x, heights, color=key.colour, alpha=0.12, linewidth=0)
    axes.axvline(1, color=style.MUTED.light, linewidth=1)
    axes.set_ylim(bottom=0)


def _scale_title(scales: Mapping[int, Mapping[str, Values]]) -> str:
    largest = max(scales)
    means = []
    for name, values in list(scales[largest].items())[:3]:
        mean = format_number(float(values.mean()), 3)
        means.append(f"{name} by {mean}{describe_range(values.tolist())}")
    return f"At B = {largest:,} gradients were multiplied on average: {', '.join(means)}"


def _scale_table(scales: Mapping[int, Mapping[str, Values]]) -> Table:
    quantiles = ("low_5", "median", "high_95")
    columns = ("method", "global_batch_samples", "logged_lines", "mean_scale", *quantiles)
    rows: list[tuple[Cell, ...]] = []
    for batch, here in scales.items():
        for name, values in here.items():
            spread = np.quantile(values, [0.05, 0.5, 0.95]).tolist()
            rows.append((name, batch, len(values), float(values.mean()), *spread))
    return Table(columns, rows)
