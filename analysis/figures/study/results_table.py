"""A study's accuracies as a table, with a row for each method and a column for each batch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from tula_hpc.analysis import study_results
from tula_hpc.analysis.figures import style
from tula_hpc.analysis.figures.drawing import Drawing, Missing, Table
from tula_hpc.analysis.study_results import Entry, StudyContents, StudyTable
from tula_hpc.config import REFERENCE_COLUMN
from tula_hpc.formatting import plural

ROW_IN = 0.6
# share of the width for the methods' names
NAME_SHARE = 0.22
# characters in a line of a method's name
NAME_CHARACTERS = 17
# most batches in one block; more batches take several blocks, one below the other
MOST_ACROSS = 4
# with at most this many batches in a block, a cell has room for a long line
ROOMY = 2
# opacity of the best method's cell
DARKEST = 0.5
# height of the legend, with the margin
KEYS_IN = 0.35
NOTE_ROWS = 0.6
BACK = (
    "back: how much of lbt's loss against the small batch was recovered;\n"
    "below 0 %, even more was lost"
)


def draw_study_table(contents: StudyContents, table: StudyTable) -> Drawing | Missing:
    """Draw accuracies and the recovered share in a cell per method and batch, darker if better."""
    if not table.settled:
        why = study_results.no_result(table)
        return Missing("study_table", "table of methods and batches", why)
    title = study_results.answer(table).removesuffix(".")
    explain_back = any(map(_is_recovered, table.entries.values()))
    # as few blocks as possible, of about equal length
    count = math.ceil(len(table.batches) / MOST_ACROSS)
    across = math.ceil(len(table.batches) / count)
    block_rows = 1 + len(table.columns)
    lines: float = block_rows * count
    if table.reference is not None:
        lines += 1
    if explain_back:
        lines += NOTE_ROWS
    with style.new_figure(title, ROW_IN * lines + KEYS_IN) as (figure, (axes,)):
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(lines, 0)
        for block in range(count):
            batches = table.batches[block * across : (block + 1) * across]
            _draw_block(axes, table, batches, block * block_rows, across)
        if table.reference is not None:
            _draw_reference(axes, table.reference, block_rows * count + 0.5)
        if explain_back:
            axes.text(0, lines - 0.5, BACK, va="center", size=8, color=style.MUTED.light)
        style.legend(axes, _mark_keys(table), left=0.0)
    numbers = Table.of(study_results.csv_rows(table))
    return Drawing("study_table", title, _caption(contents), figure, numbers)


def _is_recovered(entry: Entry) -> bool:
    return entry.recovered is not None and entry.column != REFERENCE_COLUMN


def _draw_block(
    axes: Axes, table: StudyTable, batches: Sequence[int], top: int, across: int
) -> None:
    """Draw all methods at these batches, in columns as wide as if there were `across` of them."""
    width = (1 - NAME_SHARE) / across
    for column, batch in enumerate(batches):
        left = NAME_SHARE + column * width
        head = f"B = {batch:,}"
        axes.text(left + width / 2, top + 0.6, head, ha="center", color=style.MUTED.light)
        _draw_batch(axes, table.row(batch), (left, top + 1), width, roomy=across <= ROOMY)
    for row, name in enumerate(table.columns):
        text = textwrap.fill(name, NAME_CHARACTERS)
        axes.text(0, top + 1.5 + row, text, va="center", weight="bold", linespacing=1.0)


def _mark_keys(table: StudyTable) -> list[style.Key]:
    if not any(entry.mark for entry in table.entries.values()):
        return []
    best = "best (bold)"
    if table.has_deviations:
        best += " or within one deviation of it"
    return [
        style.Key("darker: better at its batch", "s", colour=style.SIZES[5].light),
        style.Key(best, "s", hollow=True, colour=style.INK.light),
        style.Key("worst", "s", hollow=True, colour=style.ALERT.light),
    ]


def _draw_batch(
    axes: Axes, entries: list[Entry], corner: tuple[float, float], width: float, *, roomy: bool
) -> None:
    left, top = corner
    means = [entry.test.mean for entry in entries if entry.test]
    low, high = min(means, default=0.0), max(means, default=1.0)
    best = next((entry for entry in entries if entry.mark == "best"), None)
    for row, entry in enumerate(entries):
        share = 0.0
        if entry.test and high > low:
            share = (entry.test.mean - low) / (high - low)
        box = (left + 0.04 * width, top + 0.06 + row), 0.92 * width, 0.88
        fill = Rectangle(*box, color=style.SIZES[5].light, alpha=DARKEST * share, linewidth=0)
        axes.add_patch(fill)
        leads = best is not None and study_results.within_one_deviation(entry, best)
        if leads or entry.mark == "worst":
            edge = style.INK.light if leads else style.ALERT.light
            axes.add_patch(Rectangle(*box, fill=False, edgecolor=edge, linewidth=1.4))
        _write_cell(axes, entry, left + width / 2, top + 0.5 + row, roomy=roomy)


def _write_cell(axes: Axes, entry: Entry, x: float, y: float, *, roomy: bool) -> None:
    text = "diverged" if entry.diverged else "no result"
    if entry.test:
        text = study_results.percent(entry.test)
    lines = [*_achieved(entry), *_counts(entry)]
    if roomy:
        lines = list(filter(None, (", ".join(_achieved(entry)), ", ".join(_counts(entry)))))
    head, first, pitch = _line_heights(len(lines))
    accuracy = axes.text(x, y + head, text, ha="center", va="center", color=style.INK.light)
    if entry.mark == "worst":
        accuracy.set_color(style.ALERT.light)
    elif entry.mark == "best":
        accuracy.set_fontweight("bold")
    size, small_size = (9, 7) if roomy else (8, 6)
    accuracy.set_fontsize(size)
    for i, line in enumerate(lines):
        remark = axes.text(
            x, y + first + pitch * i, line, ha="center", va="center", size=small_size
        )
        remark.set_color(style.MUTED.light)


def _line_heights(lines: int) -> tuple[float, float, float]:
    """Return where texts lie in a cell with this many small lines, in rows from its middle.

    They are the places of the accuracy and of the first line, and the distance between lines.
    """
    if lines < 3:
        return -0.12 * lines, 0.27 - 0.12 * lines, 0.22
    return (-0.29, -0.08, 0.18) if lines == 3 else (-0.35, -0.19, 0.14)


def _achieved(entry: Entry) -> list[str]:
    parts = []
    if entry.train:
        parts.append(f"train {100 * entry.train.mean:.1f} %")
    if entry.recovered is not None and _is_recovered(entry):
        parts.append(f"{study_results.signed(entry.recovered)} back")
    return parts


def _counts(entry: Entry) -> list[str]:
    counts = entry.without_score
    runs = sum(counts.values())
    if entry.test:
        runs += entry.test.runs
    return [f"{count} of {runs} {name}" for name, count in counts.items() if count]


def _draw_reference(axes: Axes, small: Entry, y: float) -> None:
    reached = study_results.percent(small.test)
    text = f"small batch: {small.column} at B = {small.batch:,}: {reached}"
    text = ", ".join([text, *_achieved(small)])
    axes.text(0, y, text, va="center", color=style.INK.light)


def _caption(contents: StudyContents) -> str:
    kind = "top-5 accuracy" if contents.study.metric == "top5" else "accuracy"
    epochs = plural(contents.sweep.workload.epochs, "epoch")
    seeds = len(contents.study.seeds)
    over = "of one seed"
    near = ""
    if seeds > 1:
        over = f"mean and standard deviation over {seeds} seeds"
        near = ", or within one standard deviation of it"
    return (
        f"Test {kind} at the end of {epochs}, {over}; below it the accuracy on training samples, "
        "and how much of what plain large-batch training (lbt) lost against the small batch was "
        "recovered; below 0 %, even more was lost. Darker cells have higher means at their batch. "
        f"Dark frame: best of the batch (bold){near}; red: worst. "
        "Runs that diverged are counted but not in the means; for the frames they count as 0."
    )
