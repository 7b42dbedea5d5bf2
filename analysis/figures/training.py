"""Figures of a training: accuracy and loss, gradient variability and gradient scale."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.run_contents import RunContents, Training, ends
from tula_hpc.config import SweepSpec
from tula_hpc.formatting import format_number, format_percent, format_score, in_percent, plural
from tula_hpc.records import EpochMetrics, Event, Metrics, RunHistory, StepMetrics

EVENT_NAMES = {
    # by a preemption or a time limit
    "preempted": "stopped",
    "resumed": "restarted",
    "oom": "out of memory",
    "fell_back": "fell back",
    "failed": "failed",
}

MAX_NAME_ROWS = 3
# (epoch, score) without a score: matplotlib draws nothing for NaN
NOTHING = [(0, math.nan)]
# relative difference of values up to which a title gives their mean without a range
EQUAL = 0.1


class Mark(NamedTuple):
    """An event of a training."""

    epoch: float
    what: str


def draw_training(run: RunContents) -> Drawing | Missing:
    """Draw losses and, if known, test accuracy over epochs, with marks for interruptions."""
    trainings = [training for training in run.trainings if training.metrics.epochs]
    if not trainings:
        progress = "finished an epoch" if run.trainings else "started"
        return Missing("training", "training", f"training has not {progress} yet")
    title = _training_title(trainings[0], run.plan.epochs if run.plan else None)
    if len(trainings) > 1:
        title = f"{trainings[0].label}: {title[:1].lower()}{title[1:]}"
    marks = list(training_marks(trainings[0].metrics, run.events))
    has_accuracy = all(map(accuracies_of, trainings))
    has_losses = any(scores_of(training, "test_loss") for training in trainings)
    if not has_accuracy and not has_losses:
        why = "the script's output shows no score; set workload.metric, or call tula.report"
        return Missing("training", "training", why, optional=True)
    # without any loss, as some scripts report only accuracy, there is no second panel
    has_losses = has_losses or any(scores_of(training, "train_loss") for training in trainings)
    height, ratios = (5.0, (1, 1)) if has_accuracy and has_losses else (3.2, (1,))
    with style.new_figure(title, height, ratios=ratios) as (figure, panels):
        ends_of_lines = []
        if has_losses:
            ends_of_lines = list(_draw_all(panels[-1], trainings, _draw_losses))
            _finish_loss_panel(panels[-1])
        if has_accuracy:
            ends_of_lines = list(_draw_all(panels[0], trainings, _draw_accuracy))
            panels[0].set_ylabel("test accuracy, %")
            style.from_zero(panels[0])
        style.epoch_axis(panels[-1])
        draw_marks(panels, marks)
        labels.label_ends(panels[0], ends_of_lines)
    caption = _caption(has_accuracy=has_accuracy, has_losses=has_losses, has_marks=bool(marks))
    return Drawing("training", title, caption, figure, _training_table(trainings, marks))


def _draw_all(
    axes: Axes,
    trainings: Sequence[Training],
    draw: Callable[[Axes, Training, str], tuple[float, float, str]],
) -> Iterator[labels.EndLabel]:
    for training, colour in zip(trainings, itertools.cycle(style.SIZES)):
        x, y, text = draw(axes, training, colour.light)
        name = f" {training.label}" if len(trainings) > 1 else ""
        yield labels.EndLabel(x, y, style.Key(f"{text}{name}", colour=colour.light))


def _caption(*, has_accuracy: bool, has_losses: bool, has_marks: bool) -> str:
    sentences = []
    if has_accuracy:
        where = "Above: share" if has_losses else "Share"
        sentences.append(
            f"{where} of the test samples that the model gets right after each epoch (higher is "
            "better)."
        )
    if has_losses:
        where = "Below: loss" if has_accuracy else "Loss"
        sentences.append(
            f"{where} on the test samples (solid) and on the training samples (dashed), lower is "
            "better; a growing gap between the two is overfitting."
        )
    if has_marks:
        sentences.append(
            "Vertical lines mark where training was interrupted, resumed, or changed its batch."
        )
    return " ".join(sentences)


def training_marks(metrics: Metrics, events: Iterable[Event]) -> Iterable[Mark]:
    """Yield marks for events with a known place on the epoch axis, and for changes of the batch."""
    known = RunHistory(events).samples_seen()
    placed = [(name, seen) for name, seen in known if name in EVENT_NAMES]
    epochs = _epochs_of(metrics, [seen for _, seen in placed])
    # `epochs` is empty if the log has no line: then no event is marked
    for (name, _), epoch in zip(placed, epochs, strict=False):
        yield Mark(epoch, EVENT_NAMES[name])
    for before, after in itertools.pairwise(metrics.epochs):
        if before.global_batch != after.global_batch:
            yield Mark(before.epoch, f"B = {after.global_batch:,}")


def _epochs_of(metrics: Metrics, seen: Sequence[int]) -> list[float]:
    """Return the epochs done after each number of samples; nothing if the log has no line."""
    known = {(0, 0.0)}
    known.update((row.samples_seen, row.epoch) for row in metrics.steps)
    known.update((row.samples_seen, float(row.epoch)) for row in metrics.epochs)
    if len(known) < 2:
        return []
    samples, epochs = zip(*sorted(known), strict=True)
    return list(map(float, np.interp(seen, samples, epochs)))


def accuracies_of(training: Training) -> list[tuple[int, float]]:
    """Return (epoch, test accuracy in percent) for each epoch with a known accuracy."""
    return [(epoch, 100 * share) for epoch, share in scores_of(training, "test_accuracy")]


def scores_of(training: Training, name: str) -> list[tuple[int, float]]:
    """Return (epoch, value) for each epoch with a known value of this field."""
    rows = [(row.epoch, getattr(row, name)) for row in training.metrics.epochs]
    return [(epoch, value) for epoch, value in rows if value is not None]


def _draw_accuracy(axes: Axes, training: Training, colour: str) -> tuple[float, float, str]:
    epochs, percent = zip(*accuracies_of(training), strict=True)
    axes.plot(epochs, percent, "o-", color=colour, markersize=3.5)
    return epochs[-1], percent[-1], f"{percent[-1]:.1f} %"


def _draw_losses(axes: Axes, training: Training, colour: str) -> tuple[float, float, str]:
    test = scores_of(training, "test_loss")
    train = scores_of(training, "train_loss")
    axes.plot(*np.array(test or NOTHING).T, "o-", color=colour, markersize=3.5)
    axes.plot(*np.array(train or NOTHING).T, "--", **style.lone_mark(train), color=colour)
    epoch, last = (test or NOTHING)[-1]
    return epoch, last, format_number(last, 3)


def _finish_loss_panel(loss: Axes) -> None:
    loss.set_ylabel("loss")
    style.from_zero(loss)
    keys = [style.Key("test", marker="o", line="-"), style.Key("training", line="--")]
    style.legend(loss, keys, left=-0.01)


def draw_marks(panels: Sequence[Axes], marks: Sequence[Mark]) -> None:
    """Draw lines through all panels; names above the first are stacked where they would overlap."""
    left, right = panels[0].get_xlim()
    grey = style.MUTED.light
    row_ends: list[float] = []
    for epoch, text in _merged(marks, (right - left) / 100):
        for axes in panels:
            axes.axvline(epoch, color=grey, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        width = (right - left) * (0.012 * len(text) + 0.02)
        start, side = epoch, "left"
        if epoch > left + 0.75 * (right - left):
            start, side = epoch - width, "right"
        row = next((row for row, end in enumerate(row_ends) if end < start), len(row_ends))
        if row == MAX_NAME_ROWS:
            # there is no room for this name; the line and the table still show the event
            continue
        row_ends[row : row + 1] = [start + width]
        above = {"xycoords": ("data", "axes fraction"), "ha": side, "size": 7.5, "color": grey}
        style.annotate_near(panels[0], text, (epoch, 1), (0, 3 + 10 * row), **above)


def _merged(marks: Sequence[Mark], width: float) -> list[tuple[float, str]]:
    """Merge marks closer than `width`, in epochs; a merged mark has each name once."""
    groups: list[tuple[float, list[str]]] = []
    for mark in sorted(marks, key=lambda mark: mark.epoch):
        if not groups or mark.epoch - groups[-1][0] > width:
            groups.append((mark.epoch, []))
        if mark.what not in groups[-1][1]:
            groups[-1][1].append(mark.what)
    return [(epoch, ", ".join(names)) for epoch, names in groups]


def _training_title(training: Training, planned: int | None) -> str:
    last = training.metrics.epochs[-1]
    reached = format_score(last.test_accuracy, last.test_loss).capitalize()
    if training.result is None and planned and last.epoch < planned:
        return f"{reached} after {last.epoch} of {plural(planned, 'epoch')}"
    better = _describe_better(training.metrics.epochs)
    return f"{reached} after {plural(last.epoch, 'epoch')}{better}"


def _describe_better(epochs: Sequence[EpochMetrics]) -> str:
    """Name an earlier epoch that was better by 0.5 points of accuracy, or by 1 % of the loss."""
    last = epochs[-1]
    if last.test_accuracy is None:
        losses = [(row.test_loss, row.epoch) for row in epochs if row.test_loss is not None]
        least, epoch = min(losses, default=(0.0, 0))
        if last.test_loss is not None and last.test_loss - least > 0.01 * abs(last.test_loss):
            return f"; the least was {format_number(least, 3)} after {epoch}"
        return ""
    best = max(epochs, key=lambda row: row.test_accuracy or 0.0)
    if (best.test_accuracy or 0.0) - last.test_accuracy >= 0.005:
        return f"; the best was {format_percent(best.test_accuracy)} after {best.epoch}"
    return ""


def _training_table(trainings: Sequence[Training], marks: Sequence[Mark]) -> Table:
    values = ("global_batch_samples", "test_accuracy_percent", "test_loss", "train_loss")
    nothing = (None,) * len(values)
    rows: list[tuple[Cell, ...]] = []
    for training in trainings:
        for row in training.metrics.epochs:
            scores = (in_percent(row.test_accuracy), row.test_loss, row.train_loss)
            rows.append((training.label, row.epoch, row.global_batch, *scores))
    found: list[tuple[Cell, ...]] = [(f"event {m.what}", m.epoch, *nothing) for m in ends(marks)]
    if left_out := len(marks) - len(found):
        found.insert(len(found) // 2, (plural(left_out, "more event"), None, *nothing))
    return Table(("mark", "epochs", *values), rows + found)


def draw_gradient_scale(run: RunContents) -> Drawing | Missing:
    """Draw Δ(G) with its threshold, the gradient scale and the share of scaled steps."""
    steps: list[StepMetrics] = []
    for training in run.trainings:
        steps = steps or [row for row in training.metrics.steps if row.scale_mean is not None]
    if not steps:
        why = "training has not started yet"
        if run.trainings:
            why = "training logged no gradient scale"
        optional = run.sweep is not None and not run.sweep.training.scales
        return Missing("gradient_scale", "gradient variability and scale", why, optional)
    gate = _gate(run.sweep)
    delta = None if gate == math.inf else gate
    title = _scale_title(steps, delta)
    with style.new_figure(title, 5.6, ratios=(1.2, 1.2, 0.7)) as (figure, panels):
        _draw_variability(panels[0], steps, delta)
        _draw_scale(panels[1], steps)
        _draw_share(panels[2], steps)
    table = _scale_table(steps)
    return Drawing("gradient_scale", title, _scale_caption(gate), figure, table)


def _gate(sweep: SweepSpec | None) -> float | None:
    """Return the threshold δ: infinite without a gate, None if the run's settings are unknown."""
    if sweep is None:
        return None
    training = sweep.training
    # AdaScale has no gate, whatever the keys of AGS say
    has_gate = training.method != "adascale" and training.ags.gate != "none"
    return training.ags.delta if has_gate else math.inf


def _column(steps: Sequence[StepMetrics], field: str) -> npt.NDArray[np.float64]:
    """Return a column of the log; a missing value is NaN, which matplotlib leaves out."""
    return np.array([getattr(row, field) for row in steps], dtype=np.float64)


def _draw_variability(axes: Axes, steps: Sequence[StepMetrics], delta: float | None) -> None:
    values = _column(steps, "sensitivity")
    at = _column(steps, "step")
    blue, red = style.SIZES[0].light, style.ALERT.light
    axes.plot(at, values, "o", color=blue, markersize=3, markeredgewidth=0, alpha=0.7)
    style.value_axis(axes, [*values, delta or 1.0], label="variability Δ(G)")
    if delta is not None:
        axes.axhline(delta, color=red, linewidth=1.2, linestyle=(0, (5, 3)))
        right = {"xycoords": ("axes fraction", "data"), "va": "center"}
        text = f"δ = {format_number(delta)}"
        label = style.annotate_near(axes, text, (1, delta), (4, 0), **right)
        label.set(size=8.5, weight="bold", color=red)


def _draw_scale(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    at = _column(steps, "step")
    colour = style.SIZES[2].light
    ends_of_band = _column(steps, "scale_min"), _column(steps, "scale_max")
    axes.fill_between(at, *ends_of_band, color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, _column(steps, "scale_mean"), "-", color=colour)
    applied = _column(steps, "applied_scale")
    axes.plot(at, applied, "-", color=style.SIZES[0].light, linewidth=1)
    axes.axhline(1, color=style.MUTED.light, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("gradient scale")
    keys = [
        style.Key("mean", line="-", colour=colour),
        style.Key("smallest to largest", line="-", band=True, colour=colour),
        style.Key("mean applied", line="-", colour=style.SIZES[0].light),
    ]
    style.legend(axes, keys, left=-0.01)


def _scaled_percent(row: StepMetrics) -> float | None:
    """Return the share of steps with a scaled gradient, percent.

    Factors are 1 until their first estimate: even steps that the gate lets through are unscaled.
    """
    if row.scaled is None:
        return None
    return 0.0 if row.scaled_nothing else 100 * row.scaled


def _draw_share(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    percent = np.array(list(map(_scaled_percent, steps)), dtype=np.float64)
    axes.plot(_column(steps, "step"), percent, "-", color=style.MUTED.light, linewidth=1.2)
    axes.set_ylim(0, 104)
    axes.set_ylabel("scaled steps, %")
    axes.set_yticks([0, 50, 100])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer steps")


def _scale_title(steps: Sequence[StepMetrics], delta: float | None) -> str:
    known = [row.sensitivity for row in steps if row.sensitivity is not None]
    means = [row.applied_scale for row in steps if row.applied_scale is not None]
    scaled = ""
    if means:
        scaled = f"scaled by {format_number(statistics.fmean(means), 3)} on average"
        # a mean of 1 may hide factors below and above 1
        scaled += describe_range(means)
    if delta is None or not known:
        return f"Gradients were {scaled}" if scaled else "Gradient variability over training"
    calm = sum(value < delta for value in known) / len(known)
    title = (
        f"Gradients were calm (Δ below {format_number(delta)}) in {format_percent(calm)} of "
        "the logged steps"
    )
    if scaled:
        title += f" and {scaled}"
    return title


def describe_range(values: Sequence[float]) -> str:
    """Return the range of values for a title with their mean; "" if they are about equal."""
    low, high = min(values), max(values)
    if high - low <= EQUAL * abs(high):
        return ""
    return f" ({format_number(low, 2)} to {format_number(high, 2)})"


def _scale_caption(gate: float | None) -> str:
    return (
        "Above: Δ(G), how much the squared norm of the gradient changed from one step to the next. "
        "Middle: the estimated factor on gradients (mean over all parameters, band from the "
        "smallest to the largest), which makes a large batch learn like a small one. "
        f"{_describe_gate(gate)} During "
        "warm-up only a part of it is applied. The mean applied factor is over the steps between "
        "two lines of the log; unscaled steps count as 1. Below: the share of steps that were "
        "scaled, which is zero as long as all factors are 1."
    )


def _describe_gate(gate: float | None) -> str:
    if gate is None:
        return "Whether Δ(G) decides at which steps the factor is applied is not known here."
    if gate == math.inf:
        return "After warm-up the factor is applied in full at every step, whatever Δ(G) is."
    threshold = f"the dashed threshold δ = {format_number(gate)}"
    return (
        f"The factor is applied only while Δ(G) is below {threshold}; where gradients change "
        "faster, training is in a sensitive phase, and they are not scaled."
    )


def _scale_table(steps: Sequence[StepMetrics]) -> Table:
    scales = ("scale_mean", "scale_min", "scale_max", "scale_applied")
    columns = ("step", "epochs", "variability", *scales, "scaled_steps_percent")
    rows: list[tuple[Cell, ...]] = []
    for row in steps:
        used = (row.scale_mean, row.scale_min, row.scale_max, row.applied_scale)
        rows.append((row.step, row.epoch, row.sensitivity, *used, _scaled_percent(row)))
    return Table(columns, rows)
