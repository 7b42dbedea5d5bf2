"""The table of a study as a figure: methods down, batches across, the better the darker."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tula_hpc.analysis import figures_style as style
from tula_hpc.analysis.figures_drawing import Drawing, Missing, Table
from tula_hpc.analysis.formatting import plural
from tula_hpc.analysis.study_data import StudyContents
from tula_hpc.analysis.study_table import Entry, StudyTable, within_one_deviation
from tula_hpc.analysis.study_text import CSV_COLUMNS, answer, csv_rows, no_result, percent, signed
from tula_hpc.config import REFERENCE_COLUMN

ROW_IN = 0.6
NAME_SHARE = 0.22  # of the width, for the methods' names
NAME_CHARACTERS = 17  # that fit into it
MOST_ACROSS = 5  # batches beside one another; more are in several blocks, one below the other
ROOMY = 3  # so many batches leave each cell room for a long line
DARKEST = 0.5  # opacity of the best
KEYS_IN = 0.35  # height of the legend, with the margin
NOTE_ROWS = 0.6
BACK = "back: the share of what lbt lost against the small batch that was won back; below 0 % more was lost"


def draw_study_table(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Mean and deviation of test accuracy, train accuracy and the recovered share in every cell."""
    if not any(entry.settled for entry in table.entries.values()):
        return Missing("study_table", "table of methods and batches", no_result(table))
    title = answer(table).removesuffix(".")
    blocks, block_rows = _blocks(table.batches), 1 + len(table.columns)
    rows = block_rows * len(blocks)
    lines = rows + (table.reference is not None) + (NOTE_ROWS if _any_back(table) else 0.0)
    with style.styled():
        figure, (axes,) = style.new_figure(title, ROW_IN * lines + KEYS_IN)
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(lines, 0)
        for place, batches in enumerate(blocks):
            _draw_block(axes, table, batches, place * block_rows, len(blocks[0]))
        if table.reference is not None:
            _draw_reference(axes, table.reference, rows + 0.5)
        if _any_back(table):
            axes.text(0, lines - 0.5, BACK, va="center", size=8, color=style.MUTED.light)
        style.legend(axes, _keys(table), left=0.0)
    return Drawing("study_table", title, _caption(contents), figure, Table(CSV_COLUMNS, csv_rows(table)))


def _blocks(batches: Sequence[int]) -> list[Sequence[int]]:
    """As few as there can be, of about equal length."""
    across = math.ceil(len(batches) / math.ceil(len(batches) / MOST_ACROSS))
    return [batches[first : first + across] for first in range(0, len(batches), across)]


def _draw_block(axes: Axes, table: StudyTable, batches: Sequence[int], top: int, across: int) -> None:
    """All methods at these batches, in columns as wide as if there were `across`."""
    width = (1 - NAME_SHARE) / across
    for place, batch in enumerate(batches):
        left = NAME_SHARE + place * width
        axes.text(left + width / 2, top + 0.6, f"B = {batch:,}", ha="center", color=style.MUTED.light)
        _draw_batch(axes, table.row(batch), (left, top + 1), width, roomy=across <= ROOMY)
    for place, name in enumerate(table.columns):
        text = textwrap.fill(name, NAME_CHARACTERS)
        axes.text(0, top + 1.5 + place, text, va="center", weight="bold", linespacing=1.0)


def _any_back(table: StudyTable) -> bool:
    """Whether any cell says how much came back."""
    return any(entry.recovered is not None for entry in table.entries.values() if entry.column != REFERENCE_COLUMN)


def _keys(table: StudyTable) -> list[style.Key]:
    """What colour and frames mean, where there are any."""
    if not any(entry.mark for entry in table.entries.values()):
        return []
    return [
        style.Key("darker: better at its batch", "s", colour=style.SIZES[5].light),
        style.Key("best (bold) or within one deviation of it", "s", hollow=True, colour=style.INK.light),
        style.Key("worst", "s", hollow=True, colour=style.ALERT.light),
    ]


def _draw_batch(axes: Axes, row: list[Entry], corner: tuple[float, float], width: float, *, roomy: bool) -> None:
    left, top = corner
    means = [entry.test.mean for entry in row if entry.test]
    low, high = min(means, default=0.0), max(means, default=1.0)
    best = next((entry for entry in row if entry.mark == "best"), None)
    for place, entry in enumerate(row):
        share = (entry.test.mean - low) / (high - low) if entry.test and high > low else 0.0
        box = (left + 0.04 * width, top + 0.06 + place), 0.92 * width, 0.88
        axes.add_patch(Rectangle(*box, color=style.SIZES[5].light, alpha=DARKEST * share, linewidth=0))
        leads = best is not None and within_one_deviation(entry, best)
        if leads or entry.mark == "worst":
            edge = style.INK.light if leads else style.ALERT.light
            axes.add_patch(Rectangle(*box, fill=False, edgecolor=edge, linewidth=1.4))
        _write(axes, entry, left + width / 2, top + 0.5 + place, roomy=roomy)


def _write(axes: Axes, entry: Entry, x: float, y: float, *, roomy: bool) -> None:
    text = percent(entry.test) if entry.test else "diverged" if entry.diverged else "no result"
    colour = style.ALERT.light if entry.mark == "worst" else style.INK.light
    weight = "bold" if entry.mark == "best" else "normal"
    achieved, counts = _achieved(entry), _counts(entry)
    lines = [line for line in (", ".join(achieved), ", ".join(counts)) if line] if roomy else [*achieved, *counts]
    size = None if roomy else 8
    head, first, pitch = _rows(len(lines))
    axes.text(x, y + head, text, ha="center", va="center", color=colour, weight=weight, size=size)
    for place, line in enumerate(lines):
        height = y + first + pitch * place
        axes.text(x, height, line, ha="center", va="center", size=7 if roomy else 6, color=style.MUTED.light)


def _rows(lines: int) -> tuple[float, float, float]:
    """In a cell with so many small lines: accuracy and first line, from the middle, and from one line to the next."""
    if lines < 3:
        return -0.12 * lines, 0.27 - 0.12 * lines, 0.22
    return (-0.29, -0.08, 0.18) if lines == 3 else (-0.35, -0.19, 0.14)


def _achieved(entry: Entry) -> list[str]:
    parts = [f"train {100 * entry.train.mean:.1f}"] if entry.train else []
    if entry.recovered is not None and entry.column != REFERENCE_COLUMN:
        parts.append(f"{signed(entry.recovered)} back")
    return parts


def _counts(entry: Entry) -> list[str]:
    runs = entry.diverged + entry.failed + entry.missing + (entry.test.runs if entry.test else 0)
    counts = [(getattr(entry, name), name) for name in ("diverged", "failed", "missing")]
    return [f"{count} of {runs} {name}" for count, name in counts if count]


def _draw_reference(axes: Axes, small: Entry, y: float) -> None:
    train = f", train {100 * small.train.mean:.1f}" if small.train else ""
    text = f"small batch: {small.column} at B = {small.batch:,}: {percent(small.test)}{train}"
    axes.text(0, y, text, va="center", color=style.INK.light)


def _caption(contents: StudyContents) -> str:
    kind = "top-5 accuracy" if contents.study.metric == "top5" else "accuracy"
    epochs, seeds = plural(contents.sweep.workload.epochs, "epoch"), len(contents.study.seeds)
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "of one seed"
    return (
        f"Test {kind} at the end of {epochs}, {over}; below it the accuracy on training samples, and how much of what "
        "plain large-batch training (lbt) lost against the small batch came back; below 0 % more was lost. The darker, "
        "the higher the mean among those of its batch. Framed dark: best of the batch (bold), or within one standard "
        "deviation of it; framed red: worst. Runs that diverged are counted and not in the means; for the frames they "
        "count as 0."
    )
