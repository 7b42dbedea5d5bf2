"""Curves of several runs together: epoch time over the batch, and scores of their trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table
from tula_hpc.analysis.figures.training import accuracies_of, scores_of
from tula_hpc.analysis.run_contents import RunContents, measured_epochs
from tula_hpc.formatting import format_duration, in_short
from tula_hpc.records import Interval, of_partition

# most runs that the title names
MOST_NAMED = 4
NAME = "run_curves"
COLUMNS = ("run", "quantity", "global_batch_samples", "epoch", "value")
LINES: tuple[style.LineStyle, ...] = ("-", "--", ":")


class RunCurve(NamedTuple):
    """The curves of one run in the figure."""

    name: str
    # epoch time of the fastest feasible candidate, seconds, by global batch
    predicted_s: Mapping[int, float]
    # epoch time of the fastest measured configuration, seconds, by global batch
    measured_s: Mapping[int, float]
    # global batch, and its predicted epoch time with the 90 % interval, seconds
    chosen: tuple[int, Interval] | None
    # (epoch, test accuracy in percent); test losses if there is no accuracy
    scores: Sequence[tuple[int, float]]
    has_accuracy: bool


def curve_of(run: RunContents) -> RunCurve:
    """Return the curves of a run at any stage."""
    least: dict[int, float] = {}
    chosen = None
    if run.plan:
        for item in run.plan.candidates:
            if item.feasible and item.epoch_time_s > 0:
                _keep_least(least, item.global_batch, item.epoch_time_s)
        chosen = (run.plan.chosen.global_batch, run.plan.chosen.predicted("epoch_time_s"))
    measured: dict[int, float] = {}
    samples = run.plan.dataset_samples if run.plan else 0
    comparable = run.comparable
    for partition in {row.partition for row in comparable}:
        rows = of_partition(comparable, partition)
        for configuration, seconds in measured_epochs(rows, samples).items():
            _keep_least(measured, configuration.global_batch, seconds)
    accuracies: list[tuple[int, float]] = []
    losses: list[tuple[int, float]] = []
    for training in run.trainings[:1]:
        accuracies = accuracies_of(training)
        losses = scores_of(training, "test_loss")
    return RunCurve(run.name, least, measured, chosen, accuracies or losses, bool(accuracies))


def _keep_least(found: dict[int, float], batch: int, seconds: float) -> None:
    found[batch] = min(seconds, found.get(batch, seconds))


def draw_run_curves(curves: Sequence[RunCurve]) -> Drawing | Missing:
    """Draw least epoch times over the batch, and below them the scores if all are of one kind."""
    if not any(curve.predicted_s or curve.measured_s for curve in curves):
        return Missing(NAME, "curves", "none of the runs has measured anything yet")
    kinds = {curve.has_accuracy for curve in curves if curve.scores}
    title = _title(curves)
    looks = zip(curves, cycle(style.SIZES), cycle(style.MARKERS), cycle(LINES))
    keys = [style.Key(c.name, mark, line, colour=colour.light) for c, colour, mark, line in looks]
    height, ratios = (6.0, (3, 2)) if len(kinds) == 1 else (3.6, (1,))
    with style.new_figure(title, height, ratios=ratios, share_x=False) as (figure, panels):
        _draw_times(panels[0], curves, keys)
        if len(kinds) == 1:
            _draw_scores(panels[1], curves, keys)
        style.legend(panels[0], keys, left=0.0)
    table = Table(COLUMNS, list(chain.from_iterable(map(_rows, curves))))
    return Drawing(NAME, title, _caption(kinds), figure, table)


def _draw_times(axes: Axes, curves: Sequence[RunCurve], keys: Sequence[style.Key]) -> None:
    batches: set[int] = set()
    seconds: list[float] = []
    for curve in curves:
        batches |= {*curve.predicted_s, *curve.measured_s}
        seconds += [*curve.predicted_s.values(), *curve.measured_s.values()]
        if curve.chosen:
            seconds.append(curve.chosen[1].value)
    style.value_axis(axes, seconds, label="least time of an epoch", durations=True)
    style.batch_axis(axes, batches, style.BATCH_LABEL)
    for curve, key in zip(curves, keys, strict=True):
        colour = key.colour
        line = np.array(falling(curve.predicted_s), dtype=np.float64).reshape(-1, 2)
        axes.plot(*line.T, key.line, **style.lone_mark(line), color=colour)
        marks = np.array(sorted(curve.measured_s.items()), dtype=np.float64).reshape(-1, 2)
        axes.plot(*marks.T, key.marker, color=colour, markersize=5, linestyle="none")
        if curve.chosen:
            batch, epoch_s = curve.chosen
            ring = axes.plot(batch, epoch_s.value, "o", color=colour, fillstyle="none")
            ring[0].set(markersize=13, markeredgewidth=1.6)


def falling(seconds: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return batches and times, without batches that take longer than a smaller one.

    Batches of 3 nodes lie between those of 2 and 4, so that a line through all would zigzag.
    """
    found: list[tuple[int, float]] = []
    for batch, time_s in sorted(seconds.items()):
        if not found or time_s <= found[-1][1]:
            found.append((batch, time_s))
    return found


def _draw_scores(axes: Axes, curves: Sequence[RunCurve], keys: Sequence[style.Key]) -> None:
    for curve, key in zip(curves, keys, strict=True):
        if curve.scores:
            mark = key.marker if len(curve.scores) == 1 else ""
            axes.plot(*np.array(curve.scores).T, key.line, marker=mark, color=key.colour)
            axes.set_ylabel("test accuracy, %" if curve.has_accuracy else "test loss")
    style.from_zero(axes)
    style.epoch_axis(axes)


def _title(curves: Sequence[RunCurve]) -> str:
    chosen = [(curve.chosen[1], curve) for curve in curves if curve.chosen]
    if not chosen:
        return "Epoch times of the runs"
    chosen.sort(key=lambda pair: pair[0].value)
    # not rounded by their intervals, which could make the longer time look shorter
    texts = [f"{curve.name} {format_duration(epoch_s.value)}" for epoch_s, curve in chosen]
    if len(texts) == 1:
        return f"Epoch time of the chosen configuration: {texts[0]}"
    # the intervals overlap, so that the title must not say which epoch is the shortest
    if any(epoch_s.low <= chosen[0][0].high for epoch_s, _ in chosen[1:]):
        return f"Epoch times of the chosen configurations: {in_short(texts, MOST_NAMED)}"
    others = in_short(texts[1:], MOST_NAMED)
    return f"Shortest epoch of the chosen configurations: {texts[0]} ({others})"


def _caption(kinds: set[bool]) -> str:
    text = (
        "Each run has its own colour and shape. Lines are predictions, on the fastest feasible "
        "number of nodes for each batch, without batches that take longer than a smaller one. "
        "Marks are measurements, on the fastest number that was "
        "measured, which may be another. Rings are the chosen batches; lower is better."
    )
    if len(kinds) == 1:
        score = "test accuracy" if True in kinds else "test loss"
        text += f" Below: {score} after each epoch of the first training of each run."
    return text


def _rows(curve: RunCurve) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    if curve.chosen:
        batch, epoch_s = curve.chosen
        rows.append((curve.name, "chosen_epoch_s", batch, None, epoch_s.value))
    quantities = {"predicted_epoch_s": curve.predicted_s, "measured_epoch_s": curve.measured_s}
    for quantity, values in quantities.items():
        for batch, seconds in sorted(values.items()):
            rows.append((curve.name, quantity, batch, None, seconds))
    score = "test_accuracy_percent" if curve.has_accuracy else "test_loss"
    for epoch, value in curve.scores:
        rows.append((curve.name, score, None, epoch, value))
    return rows
