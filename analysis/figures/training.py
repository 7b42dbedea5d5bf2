"""Training as it went: accuracy and loss, gradient sensitivity and gradient scale."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tula_hpc.analysis.figures import labels, style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.run_contents import MOST_ROWS, RunContents, Training, ends
from tula_hpc.config import Gate, TrainingSpec
from tula_hpc.formatting import format_number, format_percent, format_score, in_percent, plural
from tula_hpc.records import EpochMetrics, Event, Metrics, RunHistory, StepMetrics

EVENT_NAMES = {
    "preempted": "preempted",
    "resumed": "restarted",
    "oom": "out of memory",
    "fell_back": "fell back",
    "failed": "failed",
}

MAX_NAME_ROWS = 3


class Mark(NamedTuple):
    """Something that happened during training."""

    epoch: float
    what: str


def draw_training(run: RunContents) -> Drawing | Missing:
    """Test accuracy, where there is one, and losses over epochs, with what interrupted them."""
    trainings = [training for training in run.trainings if training.metrics.epochs]
    if not trainings:
        why = (
            "training has not finished an epoch yet"
            if run.trainings
            else "training has not started yet"
        )
        return Missing("training", "training", why)
    title = _training_title(trainings[0], run.plan.epochs if run.plan else None)
    marks = list(training_marks(trainings[0].metrics, run.events))
    judged = all(_judged(training) for training in trainings)
    with style.styled():
        figure, panels = style.new_figure(
            title, 5.0 if judged else 3.2, ratios=(1, 1) if judged else (1,)
        )
        named, ends = len(trainings) > 1, []
        for training, colour in zip(trainings, itertools.cycle(style.SIZES)):
            losses = _draw_losses(panels[-1], training, colour.light, named=named)
            ends.append(
                _draw_accuracy(panels[0], training, colour.light, named=named) if judged else losses
            )
        _dress(panels, marks)
        labels.label_ends(panels[0], ends)
    caption = (
        "Above: share of the test samples that the model gets right after each epoch (higher is better). Below: loss "
        if judged
        else "Loss "
    )
    caption += (
        "on the test samples (solid) and on the training samples (dashed), lower is better; a growing gap between the "
        "two is overfitting. "
    )
    if marks:
        caption += (
            "Vertical lines mark where training was interrupted, went on, or changed its batch."
        )
    return Drawing("training", title, caption.strip(), figure, _training_table(trainings, marks))


def training_marks(metrics: Metrics, events: Iterable[Event]) -> Iterable[Mark]:
    """Events of training whose place on the epoch axis is known, and changes of the batch."""
    known = RunHistory(events).samples_seen()
    placed = [(name, seen) for name, seen in known if name in EVENT_NAMES]
    epochs = _epochs_of(metrics, [seen for _, seen in placed])
    # none where no step is known
    for (name, _), epoch in zip(placed, epochs, strict=False):
        yield Mark(epoch, EVENT_NAMES[name])
    for before, after in itertools.pairwise(metrics.epochs):
        if before.global_batch != after.global_batch:
            yield Mark(before.epoch, f"B = {after.global_batch:,}")


def _epochs_of(metrics: Metrics, seen: Sequence[int]) -> list[float]:
    """Epochs done when so many samples were seen; nothing where no line of the log tells."""
    steps = ((row.samples_seen, row.epoch) for row in metrics.steps)
    known = sorted(
        {(0, 0.0), *steps, *((row.samples_seen, float(row.epoch)) for row in metrics.epochs)}
    )
    if len(known) < 2:
        return []
    samples, epochs = zip(*known, strict=True)
    return [float(epoch) for epoch in np.interp(seen, samples, epochs)]


def _judged(training: Training) -> list[tuple[int, float]]:
    """(epoch, percent) where there is an accuracy."""
    return [
        (row.epoch, 100 * row.test_accuracy)
        for row in training.metrics.epochs
        if row.test_accuracy is not None
    ]


def _draw_accuracy(axes: Axes, training: Training, colour: str, *, named: bool) -> labels.EndLabel:
    """Draw one curve; its label, with the last value, is placed when all are drawn."""
    epochs, percent = zip(*_judged(training), strict=True)
    axes.plot(epochs, percent, "o-", color=colour, markersize=3.5)
    text = f"{percent[-1]:.1f} %" + (f" {training.label}" if named else "")
    return labels.EndLabel(epochs[-1], percent[-1], text, colour)


def _draw_losses(axes: Axes, training: Training, colour: str, *, named: bool) -> labels.EndLabel:
    """Draw two curves; a label for the one of the test samples."""
    rows = training.metrics.epochs
    epochs = [row.epoch for row in rows]
    axes.plot(epochs, [row.test_loss for row in rows], "o-", color=colour, markersize=3.5)
    axes.plot(epochs, [row.train_loss for row in rows], "--", color=colour)
    text = format_number(rows[-1].test_loss, 3) + (f" {training.label}" if named else "")
    return labels.EndLabel(epochs[-1], rows[-1].test_loss, text, colour)


def _dress(panels: Sequence[Axes], marks: Sequence[Mark]) -> None:
    for accuracy in panels[:-1]:
        accuracy.set_ylabel("test accuracy, %")
        accuracy.set_ylim(bottom=0)
    loss = panels[-1]
    loss.set_ylabel("loss")
    style.from_zero(loss)
    loss.set_xlabel("epochs of training")
    loss.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    loss.set_xlim(left=0)
    loss.margins(x=0.03)
    style.legend(
        loss,
        [style.Key("test", marker="o", line="-"), style.Key("training", line="--")],
        left=-0.01,
    )
    draw_marks(panels, marks)


def draw_marks(panels: Sequence[Axes], marks: Sequence[Mark]) -> None:
    """Vertical lines through all panels, named above the first; names that would overlap stand one above the other."""
    left, right = panels[0].get_xlim()
    row_ends: list[float] = []
    for place, text in _merged(marks, (right - left) / 100):
        for axes in panels:
            axes.axvline(
                place, color=style.MUTED.light, linewidth=1, linestyle=(0, (2, 2)), zorder=1
            )
        width = (right - left) * (0.012 * len(text) + 0.02)
        start = place - width if place > left + 0.75 * (right - left) else place
        row = next((row for row, end in enumerate(row_ends) if end < start), len(row_ends))
        if row == MAX_NAME_ROWS:
            # so many interruptions cannot all be named; their lines and the table show them
            continue
        row_ends[row : row + 1] = [start + width]
        _name_mark(panels[0], place, text, row, "left" if start == place else "right")


def _name_mark(
    axes: Axes, place: float, text: str, row: int, side: Literal["left", "right"]
) -> None:
    axes.annotate(
        text,
        (place, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3 + 10 * row),
        textcoords="offset points",
        ha=side,
        size=7.5,
        color=style.MUTED.light,
    )


def _merged(marks: Sequence[Mark], width: float) -> list[tuple[float, str]]:
    """Marks that are closer than `width` become one, with all their names once."""
    groups: list[tuple[float, list[str]]] = []
    for mark in sorted(marks):
        if not groups or mark.epoch - groups[-1][0] > width:
            groups.append((mark.epoch, []))
        groups[-1][1].append(mark.what)
    return [(place, ", ".join(dict.fromkeys(names))) for place, names in groups]


def _training_title(training: Training, planned: int | None) -> str:
    last = training.metrics.epochs[-1]
    reached = format_score(last.test_accuracy, last.test_loss).capitalize()
    if training.result is None and planned and last.epoch < planned:
        return f"{reached} after {last.epoch} of {plural(planned, 'epoch')}"
    return (
        f"{reached} after {plural(last.epoch, 'epoch')}{_if_it_was_better(training.metrics.epochs)}"
    )


def _if_it_was_better(epochs: Sequence[EpochMetrics]) -> str:
    """By half a percent of accuracy, or by a hundredth of the loss."""
    last = epochs[-1]
    if last.test_accuracy is None:
        least = min(epochs, key=lambda row: row.test_loss)
        better = last.test_loss - least.test_loss > 0.01 * abs(last.test_loss)
        return (
            f"; the least was {format_number(least.test_loss, 3)} after {least.epoch}"
            if better
            else ""
        )
    best = max(epochs, key=lambda row: row.test_accuracy or 0.0)
    better = (best.test_accuracy or 0.0) - last.test_accuracy >= 0.005
    return (
        f"; the best was {format_percent(best.test_accuracy)} after {best.epoch}" if better else ""
    )


def _training_table(trainings: Sequence[Training], marks: Sequence[Mark]) -> Table:
    columns = (
        "mark",
        "epochs",
        "global_batch_samples",
        "test_accuracy_percent",
        "test_loss",
        "train_loss",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            training.label,
            row.epoch,
            row.global_batch,
            in_percent(row.test_accuracy),
            row.test_loss,
            row.train_loss,
        )
        for training in trainings
        for row in training.metrics.epochs
    ]
    left_out: tuple[Cell, ...] = (
        f"{len(marks) - MOST_ROWS:,} more events",
        None,
        None,
        None,
        None,
        None,
    )
    found: list[tuple[Cell, ...]] = [
        (f"event {mark.what}", mark.epoch, None, None, None, None) for mark in marks
    ]
    return Table(columns, rows + ends(found, left_out))


def draw_sensitivity(run: RunContents) -> Drawing | Missing:
    """Δ(G) with its threshold, the gradient scale and the share of scaled steps over the plan's training."""
    training = next((item for item in run.trainings if _scaled_steps(item)), None)
    if training is None:
        why = (
            "training logged no gradient scale" if run.trainings else "training has not started yet"
        )
        return Missing("sensitivity", "gradient sensitivity and scale", why)
    steps = _scaled_steps(training)
    gate = _gate(run.sweep.training) if run.sweep else UNKNOWN_GATE
    title = _sensitivity_title(steps, gate)
    with style.styled():
        figure, panels = style.new_figure(title, 5.6, ratios=(1.2, 1.2, 0.7))
        _draw_sensitivity(panels[0], steps, gate.delta)
        _draw_scale(panels[1], steps)
        _draw_share(panels[2], steps)
    return Drawing(
        "sensitivity", title, _sensitivity_caption(gate), figure, _sensitivity_table(steps)
    )


class _Gate(NamedTuple):
    """Which steps are scaled."""

    # None: the run's settings are not known
    kind: Gate | None
    # threshold of Δ(G); None where none counts, or none is known
    delta: float | None


UNKNOWN_GATE = _Gate(None, None)


def _gate(training: TrainingSpec) -> _Gate:
    options = training.ags
    # AdaScale has no gate, whatever the keys of AGS say
    if training.method == "adascale" or options.gate == "none":
        return _Gate("none", None)
    return _Gate(options.gate, options.delta)


def _scaled_steps(training: Training) -> list[StepMetrics]:
    return [row for row in training.metrics.steps if row.scale_mean is not None]


def _column(steps: Sequence[StepMetrics], field: str) -> list[float]:
    """A column of the log with NaN, which matplotlib leaves out, where it has no value."""
    return [
        float("nan") if (value := getattr(row, field)) is None else float(value) for row in steps
    ]


def _draw_sensitivity(axes: Axes, steps: Sequence[StepMetrics], delta: float | None) -> None:
    values = _column(steps, "sensitivity")
    at = [row.step for row in steps]
    axes.plot(
        at, values, "o", color=style.SIZES[0].light, markersize=3, markeredgewidth=0, alpha=0.7
    )
    known = [value for value in values if math.isfinite(value)]
    style.value_axis(axes, [*known, delta or 1.0], label="sensitivity Δ(G)")
    if delta is not None:
        axes.axhline(delta, color=style.ALERT.light, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(
            f"δ = {format_number(delta)}",
            (1, delta),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=8.5,
            weight="bold",
            color=style.ALERT.light,
        )


def _draw_scale(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    at, colour = [row.step for row in steps], style.SIZES[2].light
    low, mean, high = (_column(steps, field) for field in ("scale_min", "scale_mean", "scale_max"))
    applied = _column(steps, "applied_scale")
    axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(at, mean, "-", color=colour)
    axes.plot(at, applied, "-", color=style.SIZES[0].light, linewidth=1)
    axes.axhline(1, color=style.MUTED.light, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("gradient scale")
    style.legend(
        axes,
        [
            style.Key("mean", line="-", colour=colour),
            style.Key("smallest to largest", line="-", band=True, colour=colour),
            style.Key("mean applied", line="-", colour=style.SIZES[0].light),
        ],
        left=-0.01,
    )


def _scaled_percent(row: StepMetrics) -> float | None:
    """Steps whose gradient was scaled. The gate may let steps use factors that are 1 until their first estimate."""
    if row.scaled is None:
        return None
    return 0.0 if row.scaled_nothing else 100 * row.scaled


def _draw_share(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    at, colour = [row.step for row in steps], style.MUTED.light
    percent = [math.nan if (share := _scaled_percent(row)) is None else share for row in steps]
    axes.plot(at, percent, "-", color=colour, linewidth=1.2)
    axes.set_ylim(0, 104)
    axes.set_ylabel("scaled steps, %")
    axes.set_yticks([0, 50, 100])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("optimizer steps")


def _sensitivity_title(steps: Sequence[StepMetrics], gate: _Gate) -> str:
    known = [row.sensitivity for row in steps if row.sensitivity is not None]
    means = [row.applied_scale for row in steps if row.applied_scale is not None]
    # older files: what a step used of the scale at most
    known_in_part = any(row.scale_share is None for row in steps)
    by = (
        f"by {'up to ' if known_in_part else ''}{format_number(statistics.fmean(means), 3)}"
        if means
        else ""
    )
    if gate.delta is None or not known:
        return (
            f"Gradients were scaled {by} on average" if by else "Gradient sensitivity over training"
        )
    calm = sum(value < gate.delta for value in known) / len(known)
    title = f"Gradients were calm (Δ below {format_number(gate.delta)}) in {format_percent(calm)} of the logged steps"
    return f"{title} and scaled {by} on average" if by else title


def _sensitivity_caption(gate: _Gate) -> str:
    norm = "the moving average of the gradient's squared norm"
    return (
        f"Above: Δ(G), how much {norm if gate.kind == 'smoothed' else 'the squared norm of the gradient'} changed from "
        "one step to the next. Middle: the factor on gradients as estimated (mean over all parameters, band from the "
        f"smallest to the largest), which makes a large batch step like a small one. {_gate_in_words(gate)} While it "
        "warms up a part of it is applied. The mean applied is over the steps between two lines of the log, of which "
        "those that were left alone count as 1. "
        f"Below: the share of steps that {'used some of it' if gate.kind == 'smooth' else 'were scaled'}, "
        "none as long as all factors are 1."
    )


def _gate_in_words(gate: _Gate) -> str:
    if gate.delta is None:
        unknown = "Whether Δ(G) decides at which steps it is applied is not known here."
        return (
            unknown
            if gate.kind is None
            else "After its warm-up it is applied in full at every step, whatever Δ(G) is."
        )
    threshold = f"the dashed threshold δ = {format_number(gate.delta)}"
    if gate.kind == "smooth":
        return (
            "The faster gradients change, the less of it is applied: the share 1 − Δ(G)/δ, and nothing from "
            f"{threshold} on."
        )
    return (
        f"It is applied only while Δ(G) is below {threshold}; where gradients change faster, training is in a "
        "sensitive phase and they are left alone."
    )


def _sensitivity_table(steps: Sequence[StepMetrics]) -> Table:
    scales = ("scale_mean", "scale_min", "scale_max", "scale_applied")
    columns = ("step", "epochs", "sensitivity", *scales, "scaled_steps_percent")
    rows: list[tuple[Cell, ...]] = [
        (
            row.step,
            row.epoch,
            row.sensitivity,
            row.scale_mean,
            row.scale_min,
            row.scale_max,
            row.applied_scale,
            _scaled_percent(row),
        )
        for row in steps
    ]
    return Table(columns, rows)
