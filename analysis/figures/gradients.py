"""Gradients over training: their norm by batch, and Δ(G).

The paper's figures 3 (gradient norm by batch) and 4 (Δ(G) beside accuracy).

The scale that was really applied: its density over all elements and steps (the paper's figure 6,
right).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures.training import Mark, draw_marks
from tula_hpc.analysis.run_contents import RunContents, Training
from tula_hpc.formatting import format_number, format_percent
from tula_hpc.records import SCALE_BINS_PER_OCTAVE, SCALE_OCTAVES, StepMetrics

# a curve over training is drawn through so many medians
WINDOWS = 40
# the first and the last of so many parts stand for the beginning and the end
ENDS = 10
ENDS_ARE = "The title goes by medians of the first and the last tenth of the logged steps."
MOST_LINES = len(style.SIZES)
# a step of the schedule multiplies the rate by less
RATE_DROP = 0.7


class Curve(NamedTuple):
    """A logged quantity over epochs, where it is finite and above 0."""

    epochs: list[float]
    values: list[float]

    def medians(self) -> Curve:
        """The medians of consecutive windows, each at its median epoch."""
        size = math.ceil(len(self.epochs) / WINDOWS) or 1
        starts = range(0, len(self.epochs), size)
        columns = [[statistics.median(column[at : at + size]) for at in starts] for column in self]
        return Curve(*columns)

    @property
    def change(self) -> tuple[float, float]:
        """Medians of the beginning and of the end."""
        size = math.ceil(len(self.values) / ENDS)
        return statistics.median(self.values[:size]), statistics.median(self.values[-size:])


def _curve(steps: Iterable[StepMetrics], field: str) -> Curve:
    pairs = [(row.epoch, getattr(row, field)) for row in steps]
    known = [(epoch, value) for epoch, value in pairs if value is not None and 0 < value < math.inf]
    return Curve([epoch for epoch, _ in known], [value for _, value in known])


def draw_gradient_norm(run: RunContents) -> Drawing | Missing:
    """The norm of the large batch's gradient, one curve for each batch that was trained with."""
    curves = _norms_by_batch(run.trainings)
    if not curves:
        return Missing(
            "gradient_norm", "gradient norm", "training logged no gradient norm", optional=True
        )
    title = _norm_title(curves)
    with style.styled():
        figure, (axes,) = style.new_figure(title, 3.2)
        style.value_axis(
            axes,
            [v for curve in curves.values() for v in curve.medians().values],
            label="gradient norm",
        )
        ends = []
        for (batch, curve), colour in zip(curves.items(), style.SIZES, strict=False):
            _draw_curve(axes, curve, colour.light)
            medians = curve.medians()
            ends.append(
                labels.EndLabel(
                    medians.epochs[-1], medians.values[-1], f"B = {batch:,}", colour.light
                )
            )
        _epoch_axis(axes)
        labels.label_ends(axes, ends)
    caption = (
        "The norm of the gradient of a whole batch, before any scaling. Dots: logged steps. Lines: medians of "
        f"consecutive parts, {WINDOWS} at most. {ENDS_ARE}"
    )
    rows: list[tuple[Cell, ...]] = [
        (batch, epoch, value)
        for batch, curve in curves.items()
        for epoch, value in zip(*curve, strict=True)
    ]
    return Drawing(
        "gradient_norm",
        title,
        caption,
        figure,
        Table(("global_batch_samples", "epochs", "norm"), rows),
    )


def _norms_by_batch(trainings: Iterable[Training]) -> dict[int, Curve]:
    """Of the first training of each batch; of as many batches as there are colours, ascending."""
    found: dict[int, Curve] = {}
    for training in trainings:
        batch, curve = _batch_of(training), _curve(training.metrics.steps, "gradient_norm")
        if batch is not None and batch not in found and len(curve.values) > 1:
            found[batch] = curve
    return dict(sorted(found.items())[:MOST_LINES])


def _batch_of(training: Training) -> int | None:
    """The global batch; that of the first epoch, where it changed."""
    if training.metrics.epochs:
        return training.metrics.epochs[0].global_batch
    # before the first epoch has ended
    first, *_ = [*training.metrics.steps, None]
    return first.samples_seen // first.step if first is not None and first.step else None


def _norm_title(curves: dict[int, Curve]) -> str:
    changes = {batch: curve.change for batch, curve in curves.items()}
    if len(changes) == 1:
        ((before, after),) = changes.values()
        return f"The gradient's norm {_moved(before, after)}"
    (small, (_, at_small)), *_, (large, (_, at_large)) = changes.items()
    return (
        f"At the end the gradient's norm is {format_number(at_small, 2)} at B = {small:,} "
        f"and {format_number(at_large, 2)} at B = {large:,}"
    )


def _moved(before: float, after: float) -> str:
    """What a quantity did, in words."""
    if abs(after - before) <= 0.1 * before:
        return f"stayed at about {format_number(after, 2)}"
    return f"{'rose' if after > before else 'fell'} from {format_number(before, 2)} to {format_number(after, 2)}"


def draw_variability(run: RunContents) -> Drawing | Missing:
    """Δ(G) beside test accuracy, or the loss on the test set where there is none."""
    training = next((item for item in run.trainings if _has_both(item)), None)
    if training is None:
        why = "training logged no Δ(G) yet, or no epoch"
        return Missing("variability", "gradient variability beside accuracy", why, optional=True)
    curve, epochs = _curve(training.metrics.steps, "sensitivity"), training.metrics.epochs
    judged = all(row.test_accuracy is not None for row in epochs)
    what, unit = ("test accuracy", ", %") if judged else ("test loss", "")
    reached = [100 * (row.test_accuracy or 0.0) if judged else row.test_loss for row in epochs]
    ended = f"{format_number(reached[-1], 3)}{' %' if judged else ''}"
    title = f"Gradient variability {_moved(*curve.change)} as {what} went to {ended}"
    with style.styled():
        figure, (above, below) = style.new_figure(title, 4.4, ratios=(1, 1))
        style.value_axis(above, curve.values, label="variability Δ(G)")
        _draw_curve(above, curve, style.SIZES[0].light)
        below.plot(
            [row.epoch for row in epochs], reached, "o-", color=style.SIZES[2].light, markersize=3.5
        )
        below.set_ylabel(f"{what}{unit}")
        style.from_zero(below)
        _epoch_axis(below)
        draw_marks([above, below], rate_drops(training.metrics.steps))
    caption = (
        "Above: Δ(G), by which share the squared norm of the gradient changed from one step to the next (dots: logged "
        f"steps; line: medians of consecutive parts). {ENDS_ARE} Below: {what}. The paper sees Δ(G) and accuracy "
        "together: fast learning and drops of the learning rate as high Δ(G), convergence as a low and steady one."
    )
    rows: list[tuple[Cell, ...]] = [("step", *pair) for pair in zip(*curve, strict=True)]
    name = "test_accuracy_percent" if judged else "test_loss"
    rows += [(name, row.epoch, value) for row, value in zip(epochs, reached, strict=True)]
    return Drawing("variability", title, caption, figure, Table(("mark", "epochs", "value"), rows))


def _has_both(training: Training) -> bool:
    return bool(
        training.metrics.epochs and len(_curve(training.metrics.steps, "sensitivity").values) > 1
    )


def rate_drops(steps: Sequence[StepMetrics]) -> list[Mark]:
    """Where the schedule cut the learning rate that was constant before: a cosine does so nowhere."""
    return [
        Mark(after.epoch, f"rate × {format_number(after.lr / before.lr, 2)}")
        for earlier, before, after in zip(steps, steps[1:], steps[2:], strict=False)
        if earlier.lr == before.lr and after.lr < RATE_DROP * before.lr
    ]


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Values as faint dots, their medians as a line."""
    axes.plot(*curve, "o", color=colour, markersize=2.6, markeredgewidth=0, alpha=0.45)
    axes.plot(*curve.medians(), "-", color=colour)


def _epoch_axis(axes: Axes) -> None:
    axes.set_xlabel("epochs of training")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlim(left=0)
    axes.margins(x=0.03)


Array = NDArray[np.float64]

# those between the two ends
BINS = 2 * SCALE_OCTAVES * SCALE_BINS_PER_OCTAVE + 1
ONE = BINS // 2
# octaves: below half a bin the curve would show the bins
BANDWIDTH = 0.75 / SCALE_BINS_PER_OCTAVE
POINTS_PER_BIN = 8
# share of a bin from which on it is within the axis
VISIBLE = 1e-4
MOST_SCALE_LINES = len(style.SIZES)


class Used(NamedTuple):
    """The scales of one training."""

    label: str
    # (BINS,), elements × steps around 2^((i − ONE) / SCALE_BINS_PER_OCTAVE)
    counts: Array
    # beyond the bins
    below: float
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
        kernel = np.exp(-0.5 * ((at[:, None] - centres) / BANDWIDTH) ** 2) / (
            BANDWIDTH * np.sqrt(2 * np.pi)
        )
        return 2.0**at, kernel @ self.counts / self.total


def bin_scales() -> Array:
    """The scales that the bins are centred on, (BINS,)."""
    powers: Array = (np.arange(BINS) - ONE) / SCALE_BINS_PER_OCTAVE
    return 2.0**powers


def draw_scale_density(run: RunContents) -> Drawing | Missing:
    """Density of the scale applied, one curve for each training."""
    found = list(
        filter(None, (used_scales(item.label, item.metrics.steps) for item in run.trainings))
    )[:MOST_SCALE_LINES]
    if not found:
        asked = bool(run.sweep and run.sweep.training.scale_histogram and run.trainings)
        return Missing(
            "scale_density",
            "density of the scale",
            "training has logged none yet",
            optional=not asked,
        )
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
                style.Key(used.label, line="-", colour=c.light)
                for used, c in zip(found, style.SIZES, strict=False)
            ]
            style.legend(axes, keys, left=-0.01)
    return Drawing(name, title, _caption(found), figure, _table(found))


def used_scales(label: str, steps: Iterable[StepMetrics]) -> Used | None:
    """Sum over these lines of the log; None where none has a histogram."""
    lines = [row.scale_histogram for row in steps if row.scale_histogram is not None]
    known = np.array([line for line in lines if len(line) == BINS + 2], dtype=np.float64).reshape(
        -1, BINS + 2
    )
    total = known.sum(axis=0)
    return Used(label, total[1:-1], float(total[0]), float(total[-1])) if total.sum() > 0 else None


def _dress(axes: Axes, found: Iterable[Used]) -> None:
    filled = np.flatnonzero(np.max([used.counts / used.total for used in found], axis=0) > VISIBLE)
    first, last = (filled[0], filled[-1]) if len(filled) else (ONE, ONE)
    low, high = (float(np.log2(bin_scales()[place])) for place in (first, last))
    low, high = min(low, -1) - 0.5, max(high, 1) + 0.5
    axes.set_xscale("log", base=2)
    axes.set_xlim(2.0**low, 2.0**high)
    axes.xaxis.set_major_locator(
        FixedLocator([2.0**power for power in range(-SCALE_OCTAVES, SCALE_OCTAVES + 1)])
    )
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
    ends = (
        f" Up to {format_percent(beyond)} lie beyond the ends of the axis."
        if beyond >= 5e-4
        else ""
    )
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
            (used.label, scale, round(count), count / used.total)
            for scale, count in zip(scales, counts, strict=True)
        ]
    return Table(("mark", "scale", "elements_times_steps", "share"), rows)
