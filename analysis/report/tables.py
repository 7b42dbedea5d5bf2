"""Tables of the report: typed rows first, then the text of their cells."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import filterfalse
from operator import itemgetter
from typing import Any, NamedTuple

from tula_hpc.analysis.costs.training_bill import TrainingBill
from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.run_contents import Training, as_planned, ends, measured_epochs
from tula_hpc.analysis.what_if import WhatIf
from tula_hpc.config import leaves
from tula_hpc.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    in_comparison,
    listed,
    plural,
)
from tula_hpc.records import (
    Candidate,
    Configuration,
    Event,
    Interval,
    JobAccount,
    Measurement,
    Plan,
    TrainResult,
    of_partition,
)


class SummaryRow(NamedTuple):
    """The chosen configuration or one of its neighbours: prediction against measurement."""

    # "chosen", "smaller batch", "larger batch", "same batch, 2 nodes"
    role: str
    candidate: Candidate
    # epoch time by the profile, seconds
    measured_epoch_s: float | None
    # result of the training that ran with this configuration
    result: TrainResult | None = None
    # median epoch time of that training, seconds
    trained_epoch_s: float | None = None
    # cost of that training, in the candidate's currency
    paid: float | None = None


OFF = "against prediction"
SUMMARY_COLUMNS = (
    "configuration",
    "epoch predicted (90 %)",
    "measured",
    OFF,
    "all steps",
    "whole time",
    "cost",
    "memory per worker",
)


def summary_rows(
    plan: Plan,
    measurements: Sequence[Measurement],
    trained: Training | None,
    bill: TrainingBill | None = None,
) -> list[SummaryRow]:
    """Return rows of the chosen configuration, its neighbours in batch, its batch on other nodes.

    All are of the chosen partition, as is a training with its bill.
    """
    here = of_partition(as_planned(measurements, plan), plan.chosen.partition)
    measured = measured_epochs(here, plan.dataset_samples)
    result = trained.result if trained else None
    rows = []
    for role, item in _chosen_and_neighbours(plan):
        row = SummaryRow(role, item, measured.get(item.configuration))
        same = (item.nodes, item.global_batch)
        if trained and result and (result.nodes, result.global_batch) == same:
            row = row._replace(result=result, paid=bill.cost.actual if bill else None)
            # an epoch in other forward passes cannot be compared with the prediction
            if trained.passes in (None, item.accumulation):
                row = row._replace(trained_epoch_s=trained.epoch_time_s)
        rows.append(row)
    return rows


def _chosen_and_neighbours(plan: Plan) -> Iterator[tuple[str, Candidate]]:
    chosen = plan.chosen
    yield "chosen", chosen
    here = [item for item in plan.candidates if item.partition == chosen.partition]
    same_size = [item for item in here if item.nodes == chosen.nodes]
    smaller = [item for item in same_size if item.global_batch < chosen.global_batch]
    larger = [item for item in same_size if item.global_batch > chosen.global_batch]
    if smaller:
        yield "smaller batch", max(smaller, key=lambda item: item.global_batch)
    if larger:
        yield "larger batch", min(larger, key=lambda item: item.global_batch)
    for item in sorted(here, key=lambda item: item.nodes):
        if item.global_batch == chosen.global_batch and item.nodes != chosen.nodes:
            yield f"same batch, {plural(item.nodes, 'node')}", item


def summary_cells(row: SummaryRow) -> tuple[str, ...]:
    """Return the cells of SUMMARY_COLUMNS and the accuracy; a second line in a cell is a remark."""
    item = row.candidate
    role = row.role
    if not item.feasible:
        role += ", not feasible"
    measured = format_duration(row.measured_epoch_s)
    off = UNKNOWN
    if row.trained_epoch_s is not None:
        if row.trained_epoch_s and item.epoch_time_s:
            off = in_comparison(row.trained_epoch_s / item.epoch_time_s)
        measured += f"\n{format_duration(row.trained_epoch_s)} in training"
        off += "\nin training"
    steps, whole, cost = _times_and_cost(item, item.cost)
    reached = UNKNOWN
    if row.result is not None:
        if row.result.train_time_s:
            steps += f"\n{format_duration(row.result.train_time_s)} in training"
        reached = format_percent(row.result.test_accuracy)
        if row.result.test_accuracy is None and row.result.test_loss is not None:
            reached = format_number(row.result.test_loss, 3)
    if row.paid is not None:
        cost += f"\n{format_money(row.paid, item.currency)} paid"
    return (
        f"{item.configuration.short}\n{role}",
        format_interval(item.predicted("epoch_time_s")),
        measured,
        off,
        steps,
        whole,
        cost,
        format_bytes(item.peak_memory_bytes),
        reached,
    )


def _times_and_cost(item: Candidate, cost: float | None) -> tuple[str, str, str]:
    """Return cells for the predicted time of the steps, and time and cost of the whole training.

    All are dashes if no full batch fits into an epoch.
    """
    if item.train_time_s <= 0:
        return UNKNOWN, UNKNOWN, UNKNOWN
    times = format_duration(item.train_time_s), format_duration(item.wall_time_s)
    return *times, format_money(cost, item.currency)


def format_interval(seconds: Interval) -> str:
    """Return a duration, and the ends of its interval on a second line: "11.6 s – 13.3 s".

    It is a dash if not even one full batch fits into an epoch.
    """
    if seconds.low == seconds.high:
        return format_duration(seconds.value or None)
    ends = f"{format_duration(seconds.low)} – {format_duration(seconds.high)}"
    return f"{format_duration(seconds.value)}\n{ends}"


class TextTable(NamedTuple):
    """A table as text."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary_table(rows: Sequence[SummaryRow], *, with_score: bool = True) -> TextTable:
    """Return the table of the chosen configuration, with the accuracy of a training."""
    columns: tuple[str, ...] = SUMMARY_COLUMNS
    results = [row.result for row in rows if row.result and with_score]
    if any(result.test_accuracy is not None for result in results):
        columns = (*columns, "accuracy")
    elif any(result.test_loss is not None for result in results):
        columns = (*columns, "test loss")
    cells = [summary_cells(row)[: len(columns)] for row in rows]
    shown = list(range(len(columns)))
    if not any(row.trained_epoch_s for row in rows):
        # only a training shows how far a prediction was off
        shown.remove(columns.index(OFF))
    pick = itemgetter(*shown)
    return TextTable(pick(columns), list(map(pick, cells)))


_LATEX: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
}


def latex_escaped(text: str) -> str:
    """Return a text for LaTeX with any font: without accents, and "?" for other non-ASCII signs."""
    plain = unicodedata.normalize("NFKD", text.replace("–", "--"))
    kept = filterfalse(unicodedata.combining, plain)
    return "".join(kept).encode("ascii", "replace").decode().translate(str.maketrans(_LATEX))


def candidate_table(plan: Plan, measurements: Sequence[Measurement]) -> TextTable:
    """Return every candidate with its predictions, by partition."""
    comparable = as_planned(measurements, plan)
    measured: dict[str, Mapping[Configuration, float]] = {}
    for name in {item.partition for item in plan.candidates}:
        measured[name] = measured_epochs(of_partition(comparable, name), plan.dataset_samples)
    left_out = set()
    if not any(measured):
        left_out.add("partition")
    if all(item.progress_time_s is None for item in plan.candidates):
        left_out.add("same progress")
    columns: tuple[str, ...] = ()
    rows = []
    for item in sorted(plan.candidates, key=lambda item: (item.partition, item.configuration)):
        steps, whole, cost = _times_and_cost(item, item.finite_cost)
        passes = f"{item.local_batch:,} per worker{item.in_parts}"
        note = ""
        if not item.feasible:
            note = f"not feasible\n{item.why}"
        cells = {
            "partition": item.partition,
            "nodes": str(item.nodes),
            "batch": f"{item.global_batch:,}\n{passes}",
            "step": format_duration(item.step_time_s),
            "epoch predicted (90 %)": format_interval(item.predicted("epoch_time_s")),
            "measured": format_duration(measured[item.partition].get(item.configuration)),
            "all steps": steps,
            "same progress": format_duration(item.progress_time_s),
            "whole time": whole,
            "cost": cost,
            "memory per worker": format_bytes(item.peak_memory_bytes),
            "note": note,
        }
        for name in left_out:
            del cells[name]
        columns = tuple(cells)
        rows.append(tuple(cells.values()))
    return TextTable(columns, rows)


WHAT_IF_COLUMNS = ("if", "choice", "expected time", "cost")


def what_if_table(rows: Sequence[WhatIf]) -> TextTable:
    """Return the plan's choice under each possible change; the first row is without any change."""
    cells: list[tuple[str, ...]] = []
    for row in rows:
        item = row.chosen
        if item is None:
            continue
        where = f" on {item.partition}" if item.partition else ""
        choice = f"{item.configuration.short}{where}"
        # not rounded by their intervals, which could make values that are 2 % apart look far apart
        time = format_duration(item.wall_time_s)
        cells.append((row.change, choice, time, format_money(item.cost, item.currency)))
    return TextTable(WHAT_IF_COLUMNS, cells)


def not_possible(rows: Sequence[WhatIf]) -> list[str]:
    """Say which changes no candidate can meet, within which limits, and which comes nearest."""
    found = []
    for row in rows:
        if row.chosen is None:
            nearest = ""
            if row.nearest is not None:
                time = format_duration(row.nearest.wall_time_s)
                cost = format_money(row.nearest.cost, row.nearest.currency)
                nearest = f"; {name_of(row.nearest)} comes nearest, with {time} and {cost}"
            within = f" within {listed(row.broken)}" if row.broken else ""
            found.append(f"Not possible: {row.change}{within}{nearest}.")
    return found


def nothing_changes(rows: Sequence[WhatIf]) -> str:
    """Say that no change leads to another choice; "" if one does, which a table should show."""
    names = {name_of(found) for row in rows if (found := row.chosen or row.nearest)}
    if len(names) != 1:
        return ""
    sentences = not_possible(rows)
    asked = [row.change for row in rows[1:] if row.chosen]
    if asked:
        sentences.insert(0, f"None of these changes the choice: {', '.join(asked)}.")
    return " ".join(sentences)


def fallback_table(plan: Plan) -> TextTable:
    """Return the candidates to try if memory runs out, in the order of trying."""
    rows: list[tuple[str, ...]] = []
    for item in plan.fallbacks:
        memory = format_bytes(item.peak_memory_bytes)
        time = format_duration(item.train_time_s)
        rows.append((f"{item.global_batch:,}", str(item.nodes), time, memory))
    return TextTable(("global batch", "nodes", "all steps", "memory per worker"), rows)


def failure_table(measurements: Iterable[Measurement]) -> TextTable:
    """Return profiles that ended without times; of very many the first and the last."""
    failed = [item for item in measurements if item.status != "ok"]
    rows: list[tuple[str, ...]] = []
    for item in ends(failed):
        reason = str(item.failure or UNKNOWN)
        where = f" on {item.partition}" if item.partition else ""
        rows.append(
            (f"{item.configuration}{where}", item.status, reason, cut(item.detail), item.job_id)
        )
    _count_rest(rows, len(failed), "more in profile/*.jsonl")
    return TextTable(("configuration", "status", "reason", "detail", "job"), rows)


def _count_rest(rows: list[tuple[str, ...]], total: int, more: str) -> None:
    """Add a row between the first and the last ones that says how many are left out."""
    if total > len(rows):
        count = f"{total - len(rows):,} {more}"
        rows.insert(len(rows) // 2, (count, *[""] * (len(rows[0]) - 1)))


def account_table(accounts: Sequence[JobAccount]) -> TextTable:
    """Return every run of every job as accounting has it; of very many the first and the last."""
    rows: list[tuple[str, ...]] = []
    for account in ends(accounts):
        state = account.state
        if not account.over:
            state += ", when last asked"
        used = (format_duration(account.elapsed_s), format_number(account.node_seconds))
        rows.append((account.job_id, account.stage, str(account.nodes), *used, state))
    _count_rest(rows, len(accounts), "more in accounting.jsonl")
    return TextTable(("job", "stage", "nodes", "time", "node-seconds", "state"), rows)


# most letters in a cell
MOST_LETTERS = 1_000


def cut(text: str) -> str:
    """Return the beginning of a text that is too long for a cell."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"


def event_table(events: Sequence[Event]) -> TextTable:
    """Return the events in order; of very many the first and the last."""
    rows: list[tuple[str, ...]] = []
    for event in ends(events):
        detail = cut(event.detail or str(event.failure or ""))
        rows.append((format_time(event.time), event.stage, event.title, detail, event.job_id))
    _count_rest(rows, len(events), "more in events.jsonl")
    return TextTable(("time (UTC)", "stage", "event", "detail", "job"), rows)


# most rows of a figure's numbers on the page; the CSV file has all
MOST_NUMBERS = 40
# last parts of the names of its columns that are units
UNITS = {"s": "s", "percent": "%", "bytes": "bytes", "samples": "samples", "usd": "USD", "su": "SU"}


def numbers_as_text(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> TextTable:
    """Return the numbers below a figure; of many rows the first and the last."""
    found = [tuple(cut(_plain(cell)) for cell in row) for row in ends(rows, MOST_NUMBERS)]
    _count_rest(found, len(rows), "more")
    return TextTable(tuple(map(_with_unit, columns)), found)


def _with_unit(column: str) -> str:
    """Return the heading of a column: "epoch_time_s" becomes "epoch time, s"."""
    name, _, unit = column.rpartition("_")
    words = f"{name}, {UNITS[unit]}" if name and unit in UNITS else column
    return words.replace("_", " ")


def format_time(unix_s: float) -> str:
    """Return date and time in UTC, to the second; a dash for a number that is not a time."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def model_tables(models: Mapping[str, Any]) -> list[tuple[str, TextTable]]:
    """Return each model of the plan with its parameters; pinned parameters are marked."""
    return [(name.replace("_", " "), _model_table(model)) for name, model in models.items()]


def _model_table(model: object) -> TextTable:
    names: set[str] = set()
    if isinstance(model, dict) and isinstance(model.get("pinned"), list):
        names.update(map(str, model["pinned"]))
    rows: list[tuple[str, ...]] = []
    for key, value in leaves(model if isinstance(model, dict) else {"value": model}):
        mark = ""
        if key.split(".")[-1] in names:
            mark = "pinned"
        if key != "pinned":
            rows.append((key, _plain(value), mark))
    return TextTable(("quantity", "value", ""), rows)


def _plain(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)
