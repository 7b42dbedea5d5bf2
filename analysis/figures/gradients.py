"""Figures of gradients over a training: their norm by batch, and Δ(G) above accuracy.

They follow figures 3 and 4 of the paper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures.training import Mark, accuracies_of, draw_marks, scores_of
from tula_hpc.analysis.run_contents import RunContents, Training
from tula_hpc.formatting import format_number
from tula_hpc.records import StepMetrics

# most medians that a curve over training is drawn through
WINDOWS = 40
# parts of a training, of which the first stands for its beginning and the last for its end
ENDS = 10
ENDS_ARE = "Beginning and end in the title are medians of the first and last tenth of logged steps."
# relative difference up to which beginning and end count as equal
STEADY = 0.1
# ratio of the largest to the smallest value up to which values "stayed" where they were
WIDE = 1.5
# most curves in a figure
MOST_LINES = len(style.SIZES)
# a cut by the schedule multiplies the learning rate by less than this
RATE_DROP = 0.7


class LoggedCurve(NamedTuple):
    """A logged quantity over epochs, where it is finite and above 0."""

    epochs: list[float]
    values: list[float]

    def medians(self) -> LoggedCurve:
        """Return medians of consecutive windows, each at its median epoch."""
        medians = LoggedCurve([], [])
        size = math.ceil(len(self.epochs) / WINDOWS) or 1
        for start in range(0, len(self.epochs), size):
            medians.epochs.append(statistics.median(self.epochs[start : start + size]))
            medians.values.append(statistics.median(self.values[start : start + size]))
        return medians

    @property
    def change(self) -> tuple[float, float]:
        """Medians of the beginning and of the end."""
        size = math.ceil(len(self.values) / ENDS)
        return statistics.median(self.values[:size]), statistics.median(self.values[-size:])

    def describe_change(self) -> str:
        """Say how values went from beginning to end, and if they were far off in between."""
        before, after = self.change
        ends = f"from {format_number(before, 2)} to {format_number(after, 2)}"
        if abs(after - before) > STEADY * before:
            return f"{'rose' if after > before else 'fell'} {ends}{self._detour()}"
        if max(self.values) <= WIDE * min(self.values):
            return f"stayed at about {format_number(after, 2)}"
        between = f"{format_number(min(self.values), 2)} and {format_number(max(self.values), 2)}"
        return f"varied between {between}, and ended where it began, at {format_number(after, 2)}"

    def _detour(self) -> str:
        # medians, since a single logged step should not count
        middle = self.medians().values
        low, high = min(middle), max(middle)
        if high > (1 + STEADY) * max(self.change):
            return f" (peak {format_number(high, 2)})"
        if low < (1 - STEADY) * min(self.change):
            return f" (low {format_number(low, 2)})"
        return ""


def _curve(steps: Iterable[StepMetrics], field: str) -> LoggedCurve:
    curve = LoggedCurve([], [])
    for row in steps:
        value = getattr(row, field)
        if value is not None and 0 < value < math.inf:
            curve.epochs.append(row.epoch)
            curve.values.append(value)
    return curve


def draw_gradient_norm(run: RunContents) -> Drawing | Missing:
    """Draw the norm of the large batch's gradient over epochs, one curve per batch."""
    curves = _norms_by_batch(run.trainings)
    if not curves:
        why = "training logged no gradient norm"
        return Missing("gradient_norm", "gradient norm", why, optional=True)
    title = _norm_title(curves)
    ends = []
    heights = []
    rows: list[tuple[Cell, ...]] = []
    with style.new_figure(title, 3.2) as (figure, (axes,)):
        for (batch, curve), colour in zip(curves.items(), style.SIZES, strict=False):
            medians = _draw_curve(axes, curve, colour.light)
            heights += medians.values
            end = medians.epochs[-1], medians.values[-1]
            key = style.Key(f"B = {batch:,}", colour=colour.light)
            ends.append(labels.EndLabel(*end, key))
            rows += [(batch, *point) for point in zip(*curve, strict=True)]
        style.value_axis(axes, heights, label="gradient norm")
        style.epoch_axis(axes)
        labels.label_ends(axes, ends)
    caption = (
        "The norm of the gradient of a whole batch, before any scaling. Dots: logged steps. "
        f"Lines: medians of consecutive parts, {WINDOWS} at most. {ENDS_ARE}"
    )
    table = Table(("global_batch_samples", "epochs", "norm"), rows)
    return Drawing("gradient_norm", title, caption, figure, table)


def _norms_by_batch(trainings: Iterable[Training]) -> dict[int, LoggedCurve]:
    """Return curves of the smallest batches, ascending, each of its batch's first training."""
    found: dict[int, LoggedCurve] = {}
    for training in trainings:
        batch = _batch_of(training)
        curve = _curve(training.metrics.steps, "gradient_norm")
        if batch is not None and batch not in found and len(curve.values) > 1:
            found[batch] = curve
    return dict(sorted(found.items())[:MOST_LINES])


def _batch_of(training: Training) -> int | None:
    """Return the global batch; if it changed, the first epoch's."""
    if training.metrics.epochs:
        return training.metrics.epochs[0].global_batch
    # no epoch has ended yet
    for first in training.metrics.steps[:1]:
        if first.step:
            return first.samples_seen // first.step
    return None


def _norm_title(curves: dict[int, LoggedCurve]) -> str:
    small, large = min(curves), max(curves)
    if small == large:
        return f"The gradient's norm {curves[small].describe_change()}"
    at_small, at_large = curves[small].change[1], curves[large].change[1]
    return (
        f"At the end the gradient's norm is {format_number(at_small, 2)} at B = {small:,} "
        f"and {format_number(at_large, 2)} at B = {large:,}"
    )


def draw_variability(run: RunContents) -> Drawing | Missing:
    """Draw Δ(G), and below it test accuracy, or test loss if accuracy is not known."""
    training = next(filter(_has_both, run.trainings), None)
    if training is None:
        why = "training logged no Δ(G) yet, or no epoch"
        return Missing("variability", "gradient variability and accuracy", why, optional=True)
    curve = _curve(training.metrics.steps, "sensitivity")
    name, score, unit = "test_accuracy_percent", "test accuracy", " %"
    scores = accuracies_of(training)
    if len(scores) < len(training.metrics.epochs):
        name, score, unit = "test_loss", "test loss", ""
        scores = scores_of(training, name)
    ended = f"{format_number(scores[-1][1], 3)}{unit}"
    title = f"Gradient variability {curve.describe_change()} while {score} went to {ended}"
    with style.new_figure(title, 4.4, ratios=(1, 1)) as (figure, (above, below)):
        style.value_axis(above, curve.values, label="variability Δ(G)")
        _draw_curve(above, curve, style.SIZES[0].light)
        below.plot(*zip(*scores, strict=True), "o-", color=style.SIZES[2].light, markersize=3.5)
        below.set_ylabel(f"{score},{unit}" if unit else score)
        style.from_zero(below)
        style.epoch_axis(below)
        draw_marks([above, below], rate_drops(training.metrics.steps))
    caption = (
        "Above: Δ(G), the relative change of the gradient's squared norm from one step to the next "
        f"(dots: logged steps; line: medians of consecutive parts). {ENDS_ARE} Below: "
        f"{score}. In the paper on Tula (Tyagi, Wang) the two go together: Δ(G) is high during fast "
        "learning and at drops of the learning rate, low and steady at convergence."
    )
    rows: list[tuple[Cell, ...]] = [("step", *pair) for pair in zip(*curve, strict=True)]
    rows += [(name, *pair) for pair in scores]
    return Drawing("variability", title, caption, figure, Table(("mark", "epochs", "value"), rows))


def _has_both(training: Training) -> bool:
    curve = _curve(training.metrics.steps, "sensitivity")
    epochs = len(training.metrics.epochs)
    return len(curve.values) > 1 and len(scores_of(training, "test_loss")) == epochs > 0


def rate_drops(steps: Sequence[StepMetrics]) -> list[Mark]:
    """Mark steps at which the schedule cut a constant learning rate; a cosine has no such steps."""
    marks = []
    for earlier, before, after in zip(steps, steps[1:], steps[2:], strict=False):
        if earlier.lr == before.lr and after.lr < RATE_DROP * before.lr:
            marks.append(Mark(after.epoch, f"rate × {format_number(after.lr / before.lr, 2)}"))
    return marks


def _draw_curve(axes: Axes, curve: LoggedCurve, colour: str) -> LoggedCurve:
    medians = curve.medians()
    axes.plot(*curve, "o", color=colour, markersize=2.6, markeredgewidth=0, alpha=0.45)
    axes.plot(*medians, "-", color=colour)
    return medians
