"""How large the gradient scale was that a study's methods used: densities over the steps of all seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures_scale import draw_used
from tula_hpc.analysis.figures_scale import used_scales as histogram_of
from tula_hpc.analysis.figures_study_lines import column_keys, column_style, legend_columns, line_style
from tula_hpc.analysis.formatting import format_number
from tula_hpc.analysis.study_data import StudyContents
from tula_hpc.analysis.study_table import StudyTable
from tula_hpc.records import Metrics

LEAST_SPREAD = 1e-3  # of the scales, relative: less is one value and no density
POINTS = 200

Values = NDArray[np.float64]


def used_scales(runs: Iterable[Metrics]) -> Values:
    """Mean factors on the gradient, of all lines of all runs, (lines,)."""
    found = (row.applied_scale for run in runs for row in run.steps)
    return np.array([value for value in found if value is not None and np.isfinite(value)])


def draw_study_scale(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """A density of the scale used for each method that has one, a panel for each batch."""
    scales = {(b, name): used_scales(contents.of(name, b)) for b in table.batches for name in table.columns}
    scales = {place: values for place, values in scales.items() if len(values) > 1 and np.ptp(values) > 0}
    batches = [batch for batch in table.batches if any(b == batch for b, _ in scales)]
    if not batches:
        return Missing("study_scale", "density of the scale used", "no training logged a gradient scale that varies")
    title = _title(scales, batches[-1])
    with style.styled():
        figure, panels = style.new_figure(title, 0.6 + 1.7 * len(batches), ratios=[1] * len(batches))
        everything = np.concatenate([*scales.values(), np.ones(1)])
        label = "factor on the gradient, mean over parameters"
        if wide := _is_wide(everything):
            style.amount_axis(panels[-1], everything, label)  # of all panels
        else:
            panels[-1].set_xlabel(label)
        for axes, batch in zip(panels, batches, strict=True):
            here = {name: values for (b, name), values in scales.items() if b == batch}
            _draw_batch(axes, here, table.columns, wide=wide)
            axes.set_ylabel(f"density\nB = {batch:,}")
        names = [name for name in table.columns if any(n == name for _, n in scales)]
        style.legend(panels[0], column_keys(table.columns, names), columns=legend_columns(names), left=-0.02)
    caption = (
        "How often gradients were multiplied by which factor, over all logged steps of all seeds (a Gaussian kernel "
        "density): the mean factor over all parameters and over the steps between two lines of the log, of which those "
        "that the gate left alone count as 1, and those that used a part of the scale, as in its warm-up, by that "
        "part. The vertical line is 1, no scaling."
    ) + (" Densities are those of the factor's natural logarithm." if wide else "")
    return Drawing("study_scale", title, caption, figure, _table(scales))


def density(values: Values, at: Values) -> Values:
    """Gaussian kernel density at these places, with Scott's bandwidth; of one value almost: a narrow bell there."""
    if np.ptp(values) > LEAST_SPREAD * max(1.0, float(np.abs(values).max())):
        return np.asarray(gaussian_kde(values)(at), dtype=np.float64)
    width = max((at[-1] - at[0]) / 60, LEAST_SPREAD)
    return np.asarray(np.exp(-0.5 * ((at - values.mean()) / width) ** 2) / (width * np.sqrt(2 * np.pi)))


def _is_wide(factors: Values) -> bool:
    """Whether they need a logarithmic axis; none can have one with a factor of 0."""
    return bool(factors.min() > 0 and factors.max() > style.LOG_RATIO * factors.min())


def _draw_batch(axes: Axes, scales: dict[str, Values], columns: Sequence[str], *, wide: bool) -> None:
    drawn = {name: np.log(values) if wide else values for name, values in scales.items()}
    everything = np.concatenate([*drawn.values(), np.full(1, 0.0 if wide else 1.0)])  # where nothing is scaled
    margin = 0.2 * max(float(np.ptp(everything)), 0.1)
    least = everything.min() - margin
    at = np.linspace(least if wide else max(0.0, least), everything.max() + margin, POINTS)
    for name, values in drawn.items():
        colour, heights, x = column_style(columns, name).colour, density(values, at), np.exp(at) if wide else at
        axes.plot(x, heights, line_style(columns, name), color=colour)
        axes.fill_between(x, heights, color=colour, alpha=0.12, linewidth=0)
    axes.axvline(1, color=style.MUTED.light, linewidth=1)
    axes.set_ylim(bottom=0)


def _title(scales: dict[tuple[int, str], Values], batch: int) -> str:
    means = [(name, float(values.mean())) for (b, name), values in scales.items() if b == batch]
    words = ", ".join(f"{name} by {format_number(mean, 3)}" for name, mean in means[:3])
    return f"At B = {batch:,} gradients were multiplied on average: {words}"


def _table(scales: dict[tuple[int, str], Values]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name, batch, len(values), float(values.mean()), *(float(q) for q in np.quantile(values, [0.05, 0.5, 0.95])))
        for (batch, name), values in scales.items()
    ]
    columns = ("method", "global_batch_samples", "logged_lines", "mean_scale", "low_5", "median", "high_95")
    return Table(columns, rows)


def draw_study_scale_elements(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Density of the scale over single elements at the largest batch, where training.scale_histogram counted them."""
    batch = table.batches[-1]
    steps = {name: [row for run in contents.of(name, batch) for row in run.steps] for name in table.columns}
    found = [used for name, rows in steps.items() if (used := histogram_of(name, rows)) is not None]
    if not found:
        why = "no training had training.scale_histogram"
        return Missing("study_scale_elements", "density of the scale over elements", why, optional=True)
    drawing = draw_used(found[: len(style.SIZES)], "study_scale_elements")
    return drawing._replace(caption=f"At B = {batch:,}, all seeds. {drawing.caption}")
