"""Errors of the models: at fitted measurements, at predicted ones, and in trainings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Cell, Drawing, Missing, Table, configuration_cells
from tula_hpc.analysis.run_contents import RunContents, candidate_of, used_bytes
from tula_hpc.formatting import format_percent
from tula_hpc.records import Configuration, Plan

MARKS = (
    " One marker per profiled configuration, from the smallest batch (left) to the largest within "
    "each number of nodes. The bar is their median; around four or more, a box holds the middle "
    "half. The model was fitted to the filled markers, whose errors are not those of predictions."
)


class Error(NamedTuple):
    """Prediction and measurement of a profiled step, its memory, or a training's epoch."""

    configuration: Configuration
    # seconds, or bytes
    predicted: float
    measured: float
    # label of the training; empty for a profiled configuration
    training: str = ""
    # the model was fitted to this measurement
    fitted: bool = False

    @property
    def relative(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measured - 1


def draw_prediction_error(run: RunContents) -> Drawing | Missing:
    """Draw relative errors of predicted step times by cluster size, and of trainings' epochs."""
    if run.plan is None:
        why = "there are no predictions before the plan"
        return Missing("prediction_error", "prediction error", why)
    steps = list(_step_errors(run.plan, run))
    trainings = list(_training_errors(run))
    if not steps and not trainings:
        why = "no candidate of the plan has been measured"
        return Missing("prediction_error", "prediction error", why)
    title = _error_title(steps, trainings)
    with style.new_figure(title, 3.4) as (figure, (axes,)):
        _draw_errors(axes, steps, trainings, run.cluster_sizes)
    caption = (
        "Predicted over measured time of a step, minus one: above zero the model is too slow, "
        f"below too fast.{_describe_marks(steps)}"
    )
    if trainings:
        caption += (
            " The star compares an epoch of the real training, which the model has not seen, with "
            "its prediction; texts and tables give it as a share of the predicted time."
        )
    table = _error_table([*steps, *trainings])
    return Drawing("prediction_error", title, caption, figure, table)


def draw_memory_error(run: RunContents) -> Drawing | Missing:
    """Draw relative errors of predicted memory by cluster size."""
    if run.plan is None:
        why = "there are no predictions before the plan"
        return Missing("memory_error", "memory error", why)
    errors = list(_memory_errors(run.plan, run))
    if not errors:
        why = "no candidate of the plan has been measured"
        return Missing("memory_error", "memory error", why)
    worst = max(errors, key=lambda error: abs(error.relative))
    title = (
        f"Predicted memory is off by {_median(errors)} (median), "
        f"{format_percent(abs(worst.relative))} at most ({worst.configuration.short})"
    )
    with style.new_figure(title, 3.0) as (figure, (axes,)):
        _draw_errors(axes, errors, (), run.cluster_sizes)
        axes.set_ylabel("error of the model's memory")
    caption = (
        "Predicted over measured peak memory of a worker, minus one: above zero the model expects "
        "more than is used, which wastes memory but stops no training; below zero less."
        f"{_describe_marks(errors)}"
    )
    table = _error_table(errors, "memory", "bytes")
    return Drawing("memory_error", title, caption, figure, table)


def _describe_marks(errors: Sequence[Error]) -> str:
    if not errors:
        return ""
    hollow = " Hollow markers were measured after the plan."
    return MARKS if all(error.fitted for error in errors) else MARKS + hollow


def _memory_errors(plan: Plan, run: RunContents) -> Iterable[Error]:
    for item in run.comparable:
        candidate = plan.find(item.configuration)
        used = used_bytes(item)
        if candidate is not None and used:
            sizes = float(candidate.peak_memory_bytes), float(used)
            yield Error(item.configuration, *sizes, fitted=candidate.measured)


def _step_errors(plan: Plan, run: RunContents) -> Iterable[Error]:
    for item in run.comparable:
        candidate = plan.find(item.configuration)
        if candidate is not None and item.times is not None and item.times.step_time_s > 0:
            times = candidate.model_step_time_s, item.times.step_time_s
            yield Error(item.configuration, *times, fitted=candidate.measured)


def _training_errors(run: RunContents) -> Iterable[Error]:
    for training in run.trainings:
        candidate = candidate_of(run.plan, training)
        if candidate is not None and training.epoch_time_s:
            times = candidate.epoch_time_s, training.epoch_time_s
            yield Error(candidate.configuration, *times, training.label)


def _draw_errors(
    axes: Axes, steps: Sequence[Error], trainings: Sequence[Error], sizes: list[int]
) -> None:
    axes.axhline(0, color=style.MUTED.light, linewidth=1)
    names: list[str] = []
    groups: dict[int, list[Error]] = {}
    for error in steps:
        groups.setdefault(error.configuration.nodes, []).append(error)
    for nodes, group in sorted(groups.items()):
        _draw_group(axes, len(names), group, style.size_style(sizes, nodes))
        names.append(f"N = {nodes}")
    for error in trainings:
        look = style.size_style(sizes, error.configuration.nodes)
        at = len(names), 100 * error.relative
        (star,) = axes.plot(*at, "*", color=look.colour, markersize=13)
        star.set(markeredgecolor=style.INK.light, markeredgewidth=0.7)
        text = format_percent(error.relative, signed=True)
        style.annotate_near(axes, text, at, (9, 0), va="center", size=8.5)
        name = f"training {error.training}" if len(trainings) > 1 else "training"
        names.append("\n".join([name, *error.configuration.short.split(", ")]))
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    widest = 100 * max(abs(error.relative) for error in (*steps, *trainings))
    axes.set_ylim(-max(12.0, widest * 1.15), max(12.0, widest * 1.15))
    axes.yaxis.set_major_locator(MaxNLocator(7, symmetric=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: format_percent(value / 100, signed=True).replace(".0", ""))
    )
    axes.set_ylabel("error of the model's time")


def _draw_group(axes: Axes, x: int, group: Sequence[Error], look: style.Key) -> None:
    errors = [100 * error.relative for error in group]
    colour = look.colour
    if len(errors) >= 4:
        low, _, high = statistics.quantiles(errors, n=4, method="inclusive")
        (box,) = axes.bar(x, high - low, bottom=low, width=0.62, color=colour, linewidth=0)
        box.set(alpha=0.16, zorder=1)
    middle = statistics.median(errors)
    axes.plot([x - 0.31, x + 0.31], [middle, middle], "-", color=colour, linewidth=2, zorder=2)
    places = np.linspace(x - 0.25, x + 0.25, len(errors)) if len(errors) > 1 else [float(x)]
    for place, error, value in zip(places, group, errors, strict=True):
        (mark,) = axes.plot([place], [value], look.marker, color=colour, markersize=6)
        if error.fitted:
            mark.set(markeredgecolor=style.PAPER.light, markeredgewidth=0.6)
        else:
            mark.set(fillstyle="none", markeredgewidth=1.4)


def _error_title(steps: Sequence[Error], trainings: Sequence[Error]) -> str:
    """Name errors of fit and of prediction separately: the former say little about the latter."""
    clauses = []
    fitted = [error for error in steps if error.fitted]
    if fitted:
        clauses.append(f"the model fits its own measurements to {_median(fitted)} (median)")
    if len(fitted) < len(steps):
        later = [error for error in steps if not error.fitted]
        clauses.append(f"measurements after the plan were predicted {_median(later)} off (median)")
    sizes = []
    for item in trainings:
        direction = "long" if item.relative >= 0 else "short"
        sizes.append(f"{format_percent(abs(item.relative))} too {direction}")
    if sizes:
        clauses.append(f"the training's epochs were predicted {' and '.join(sizes)}")
    else:
        worst = max(steps, key=lambda error: abs(error.relative))
        at_most = f"{format_percent(abs(worst.relative))} at most"
        clauses.append(f"{at_most} ({worst.configuration.short})")
    title = "; ".join(clauses)
    return title[:1].upper() + title[1:]


def _median(errors: Sequence[Error]) -> str:
    return format_percent(statistics.median(abs(error.relative) for error in errors))


def _error_table(
    errors: Sequence[Error], profiled: str = "profiled_step", unit: str = "s"
) -> Table:
    rows = []
    for error in errors:
        cells: dict[str, Cell] = {"quantity": profiled}
        if error.training:
            cells["quantity"] = f"training_epoch {error.training}"
        cells |= configuration_cells(error.configuration)
        cells |= {f"predicted_{unit}": error.predicted, f"measured_{unit}": error.measured}
        cells |= {"relative_error_percent": 100 * error.relative, "fitted": error.fitted}
        rows.append(cells)
    return Table.of(rows)
