"""The report's tables: first typed rows, then the text of their cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tula_hpc.analysis.planning.partitions import of_part
from tula_hpc.analysis.run_contents import (
    MOST_ROWS,
    Interval,
    cut,
    ends,
    measured_epochs,
    predicted,
)
from tula_hpc.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    plural,
)
from tula_hpc.records import Candidate, Configuration, Event, Measurement, Plan, TrainResult


class SummaryRow(NamedTuple):
    """The chosen configuration or one of its neighbours: prediction against measurement."""

    # "chosen", "smaller batch", "larger batch", "same batch, 2 nodes"
    role: str
    configuration: Configuration
    feasible: bool
    # with its 90 % interval, as far as the plan has one
    predicted_epoch_s: Interval
    # from the profile
    measured_epoch_s: float | None
    # predicted / measured − 1
    relative_error: float | None
    # predicted, all epochs
    train_time_s: float
    # predicted, all epochs
    cost: float
    currency: str
    # predicted, per worker
    peak_memory_bytes: int
    # median of the real training, where it ran at this configuration
    trained_epoch_s: float | None
    # of that training
    test_accuracy: float | None
    test_loss: float | None


SUMMARY_COLUMNS = (
    "configuration",
    "epoch predicted (90 %)",
    "measured",
    "error",
    "steps",
    "cost",
    "memory per worker",
)


def summary_rows(
    plan: Plan,
    measurements: Sequence[Measurement],
    result: TrainResult | None,
    trained_epoch_s: float | None = None,
) -> list[SummaryRow]:
    """The chosen configuration first, then the next smaller and larger batch at its N, then its batch at other N.

    All on the partition that was chosen, where there are several: the same configuration on another
    is something else. `trained_epoch_s` is the training's own time of an epoch, see
    `report_data.median_epoch_s`.
    """
    measured = measured_epochs(of_part(measurements, plan.chosen.partition), plan.dataset_samples)
    return [
        _summary_row(role, item, measured, result, trained_epoch_s)
        for role, item in _chosen_and_neighbours(plan)
    ]


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


def _summary_row(
    role: str,
    item: Candidate,
    measured: Mapping[Configuration, float],
    result: TrainResult | None,
    trained_epoch_s: float | None,
) -> SummaryRow:
    epoch = measured.get(item.configuration)
    trained = (
        result
        if result and (result.nodes, result.global_batch) == (item.nodes, item.global_batch)
        else None
    )
    return SummaryRow(
        role=role,
        configuration=item.configuration,
        feasible=item.feasible,
        predicted_epoch_s=predicted(item, "epoch_time_s"),
        measured_epoch_s=epoch,
        relative_error=item.epoch_time_s / epoch - 1 if epoch else None,
        train_time_s=item.train_time_s,
        cost=item.cost,
        currency=item.currency,
        peak_memory_bytes=item.peak_memory_bytes,
        trained_epoch_s=trained_epoch_s if trained else None,
        test_accuracy=trained.test_accuracy if trained else None,
        test_loss=trained.test_loss if trained else None,
    )


def summary_cells(row: SummaryRow) -> tuple[str, ...]:
    """The cells of SUMMARY_COLUMNS, and what training reached after them; a second line in a cell is a remark."""
    where = f"N = {row.configuration.nodes}, B = {row.configuration.global_batch:,}"
    return (
        f"{where}\n{row.role}{'' if row.feasible else ', not feasible'}",
        format_interval(row.predicted_epoch_s),
        _with_remark(format_duration(row.measured_epoch_s), row.trained_epoch_s, "in training"),
        format_percent(row.relative_error, signed=True),
        *_time_and_cost(row.train_time_s, row.cost, row.currency),
        format_bytes(row.peak_memory_bytes),
        _reached(row),
    )


def _time_and_cost(train_time_s: float, cost: float, currency: str) -> tuple[str, str]:
    """Cells of a training's predicted time and cost; neither where its batch holds more samples than there are."""
    if train_time_s <= 0:
        return format_duration(None), format_money(None, currency)
    return format_duration(train_time_s), format_money(cost, currency)


def _with_remark(cell: str, seconds: float | None, what: str) -> str:
    return cell if seconds is None else f"{cell}\n{format_duration(seconds)} {what}"


def format_interval(seconds: Interval) -> str:
    """A duration, and on a second line the ends of its interval, where it has one: "11.6 s – 13.3 s".

    The dash stands for an epoch into which not even one full batch fits.
    """
    if seconds.low == seconds.high:
        return format_duration(seconds.value or None)
    low, high = format_duration(seconds.low), format_duration(seconds.high)
    return f"{format_duration(seconds.value)}\n{low} – {high}"


class TextTable(NamedTuple):
    """A table as text."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def summary_table(rows: Sequence[SummaryRow]) -> TextTable:
    """The table of the chosen configuration; the columns of training are there when something was trained."""
    columns = SUMMARY_COLUMNS + _trained_columns(rows)
    return TextTable(columns, [summary_cells(row)[: len(columns)] for row in rows])


def _trained_columns(rows: Sequence[SummaryRow]) -> tuple[str, ...]:
    if any(row.test_accuracy is not None for row in rows):
        return ("accuracy",)
    return ("test loss",) if any(row.test_loss is not None for row in rows) else ()


def _reached(row: SummaryRow) -> str:
    """The cell for it."""
    if row.test_accuracy is None and row.test_loss is not None:
        return format_number(row.test_loss, 3)
    return format_percent(row.test_accuracy)


def candidate_table(plan: Plan, measurements: Sequence[Measurement]) -> TextTable:
    """Every candidate with what the models say of it, partition by partition where there are several."""
    names = sorted({item.partition for item in plan.candidates})
    measured = {
        name: measured_epochs(of_part(measurements, name), plan.dataset_samples) for name in names
    }
    columns = (
        *(("partition",) if any(names) else ()),
        "nodes",
        "batch",
        "step",
        "epoch predicted (90 %)",
        "measured",
        "steps",
        "cost",
        "memory per worker",
        "note",
    )
    ordered = sorted(plan.candidates, key=lambda item: (item.partition, item.configuration))
    return TextTable(
        columns, [_candidate_cells(item, measured[item.partition]) for item in ordered]
    )


def _candidate_cells(item: Candidate, measured: Mapping[Configuration, float]) -> tuple[str, ...]:
    return (
        *((item.partition,) if item.partition else ()),
        str(item.nodes),
        f"{item.global_batch:,}\n{item.local_batch:,} per worker",
        format_duration(item.step_time_s),
        format_interval(predicted(item, "epoch_time_s")),
        format_duration(measured.get(item.configuration)),
        *_time_and_cost(item.train_time_s, item.cost, item.currency),
        format_bytes(item.peak_memory_bytes),
        "" if item.feasible else f"not feasible\n{item.why}",
    )


def fallback_table(plan: Plan) -> TextTable:
    """What training falls back to when memory runs out, first to be tried first."""
    columns = ("global batch", "nodes", "steps", "memory per worker")
    rows: list[tuple[str, ...]] = [
        (
            f"{item.global_batch:,}",
            str(item.nodes),
            format_duration(item.train_time_s),
            format_bytes(item.peak_memory_bytes),
        )
        for item in plan.fallbacks
    ]
    return TextTable(columns, rows)


def failure_table(measurements: Iterable[Measurement]) -> TextTable:
    """Profiles that ended without times; of very many the first and the last."""
    failed = [item for item in measurements if item.status != "ok"]
    left_out = ("", "", "", f"{len(failed) - MOST_ROWS:,} more are in profile/*.jsonl", "")
    rows = [_failure_cells(item) if item else left_out for item in ends(failed, None)]
    return TextTable(("configuration", "status", "reason", "detail", "job"), rows)


def _failure_cells(item: Measurement) -> tuple[str, ...]:
    return (
        str(item.configuration),
        item.status,
        str(item.failure or UNKNOWN),
        cut(item.detail),
        item.job_id,
    )


def event_table(events: Sequence[Event]) -> TextTable:
    """What happened, in order; of very many events the first and the last."""
    left_out = ("", "", "", f"{len(events) - MOST_ROWS:,} more are in events.jsonl", "")
    rows = [_event_cells(event) if event else left_out for event in ends(events, None)]
    return TextTable(("time (UTC)", "stage", "event", "detail", "job"), rows)


def _event_cells(event: Event) -> tuple[str, ...]:
    detail = cut(event.detail or str(event.failure or ""))
    return (format_time(event.time), event.stage, event.title, detail, event.job_id)


def format_time(unix_s: float) -> str:
    """Date and time in UTC, to the second; the dash where the number is no time."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def model_tables(models: Mapping[str, Any]) -> list[tuple[str, TextTable]]:
    """Each model of the plan with its parameters, whatever it is made of; pinned parameters are marked."""
    return [(name.replace("_", " "), _model_table(model)) for name, model in models.items()]


def _model_table(model: object) -> TextTable:
    pinned = model.get("pinned", []) if isinstance(model, dict) else []
    names = {str(name) for name in pinned} if isinstance(pinned, list) else set()
    rows: list[tuple[str, ...]] = [
        (key, value, "pinned" if key.split(".")[-1] in names else "")
        for key, value in _flatten(model)
        if key != "pinned"
    ]
    return TextTable(("quantity", "value", ""), rows)


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key or "value", _plain(value)


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: UNKNOWN}[value]
    if isinstance(value, int | float):
        return format_number(float(value)) if isinstance(value, float) else f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return str(value)
