"""Turn candidates into records, with 90 % intervals and the reason if one is not feasible."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.costs.spread import Ends, step_factors, whole_factors, widened
from tula_hpc.analysis.models.critical_batch import samples_to_same_progress
from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Partition, Why
from tula_hpc.config import GIB
from tula_hpc.formatting import FOREVER_S, format_duration
from tula_hpc.records import Candidate

SHORT_REASONS = {
    Why.FEASIBLE: "",
    Why.FOREVER: "interruptions and restarts would leave no time for work",
    Why.DEADLINE: "after the deadline",
    Why.BUDGET: "over the budget",
    Why.BATCH: "batch too large",
    Why.DIVERGED: "its loss was not finite in a profile",
}
# Ends of intervals above this multiple of the limit are named as "beyond" it: the interval may have
# no upper end.
MOST_TOLD = 10.0
ALSO_ON_TOP = " and more while the gradient scale is updated and a checkpoint is written"


def as_records(
    table: CandidateTable, parts: Sequence[Partition], front: Collection[int] = ()
) -> list[Candidate]:
    """Return candidates as records, with 90 % intervals; `front` has rows of the Pareto front.

    Intervals of steps are those of the model, wider by `Summary.noise` and moved to the planned
    step time, which may be a measured one; they contain the model's prediction if the two agree.
    `costs.spread` has the intervals of the whole time and the cost.
    """
    predicted_s = np.empty(table.rows)
    ends_s = np.empty((2, table.rows))
    for index, part in enumerate(parts):
        mine = table.part == index
        if mine.any():
            rows = table.take(mine)
            points = rows.nodes, rows.local_batch, rows.workers_per_node
            predicted_s[mine] = part.models.step_time.predict(*points)
            ends = part.models.step_time.interval(*points)
            noise = part.summary.noise(zip(*rows.grid, strict=True))
            ends_s[:, mine] = widened(predicted_s[mine], np.stack(ends), noise)
    columns = (*table, predicted_s, *step_factors(table.step_time_s, predicted_s, ends_s))
    rows_and_ends = zip(*(column.tolist() for column in columns), strict=True)
    return [
        _record(CandidateTable(*row), parts, index in front, model_s, (low, high))
        for index, (*row, model_s, low, high) in enumerate(rows_and_ends)
    ]


def _record(
    row: CandidateTable,
    parts: Sequence[Partition],
    pareto: bool,
    model_s: float,
    ends: tuple[float, float],
) -> Candidate:
    """Return one row as a record; its columns hold plain numbers here."""
    part = parts[int(row.part)]
    names = ("step_time_s", "epoch_time_s", "train_time_s", "wall_time_s", "cost")
    numbers = {name: float(getattr(row, name)) for name in names}
    every_s = float(row.checkpoint_s)
    parts_s = _wall_parts_s(row, part)
    each_s = part.cluster.pricing.start_s + every_s / 2.0
    part_ends = part.spread.of_parts(parts_s, ends, part.evaluation.factors, each_s)
    whole = whole_factors(parts_s, part_ends, ends)
    intervals = {}
    for name, value in numbers.items():
        low, high = whole if name in ("wall_time_s", "cost") else ends
        intervals[name] = (value * low, value * high)
    progress_s = None
    if not math.isnan(float(row.progress_time_s)):
        progress_s = float(row.progress_time_s)
        low, high = _progress_factors(float(row.global_batch), part, whole)
        intervals["progress_time_s"] = (progress_s * low, progress_s * high)
    return Candidate(
        partition=part.name,
        nodes=int(row.nodes),
        workers_per_node=int(row.workers_per_node),
        local_batch=int(row.local_batch),
        global_batch=int(row.global_batch),
        accumulation=int(row.accumulation),
        **numbers,
        model_step_time_s=model_s,
        currency=part.cluster.pricing.currency,
        energy_kwh=None if np.isnan(row.energy_kwh) else float(row.energy_kwh),
        checkpoint_minutes=every_s / 60.0 if part.resume is Resume.CHECKPOINT else None,
        progress_time_s=progress_s,
        peak_memory_bytes=int(row.peak_bytes),
        wall_parts_s=parts_s,
        part_intervals_90=part_ends,
        interval_90=intervals,
        feasible=int(row.why) == FEASIBLE,
        measured=bool(row.measured),
        why=_describe_why(row, part),
        pareto=pareto,
    )


def _progress_factors(batch: float, part: Partition, whole: Ends) -> Ends:
    """Return the 90 % factors of the time to the same progress.

    They join, in quadrature, the factors of the whole time and those of the samples that the same
    progress needs, by the interval of the noise scale.
    """
    if part.critical_batch is None or part.critical_interval is None:
        return whole
    needs = samples_to_same_progress(part.critical_batch, batch, part.base_batch)
    ends = [samples_to_same_progress(c, batch, part.base_batch) for c in part.critical_interval]
    fewest, most = sorted(end / needs for end in ends)
    below = math.hypot(1.0 - whole[0], 1.0 - fewest)
    return max(0.0, 1.0 - below), 1.0 + math.hypot(whole[1] - 1.0, most - 1.0)


def _wall_parts_s(row: CandidateTable, part: Partition) -> dict[str, float]:
    """Return the parts of the expected wall time, seconds; empty where it would never end."""
    wall_s = float(row.wall_time_s)
    if wall_s >= FOREVER_S:
        return {}
    jobs = 1.0 + float(row.requeues)
    known = {"steps": float(row.train_time_s), "evaluation": float(row.evaluation_s)}
    known |= {"checkpoints": float(row.saving_s)}
    known |= {"starts": jobs * part.cluster.pricing.start_s, "ends": jobs * part.end_s}
    return known | {"repeated": max(0.0, wall_s - sum(known.values()))}


def _describe_why(row: CandidateTable, part: Partition) -> str:
    match Why(int(row.why)):
        case Why.SAMPLES:
            return _too_few_samples(row, part)
        case Why.OUT_OF_MEMORY:
            return part.summary.oom_reason
        case Why.MEMORY:
            return f"needs {_too_much_memory(float(row.peak_bytes), part)}"
        case Why.UNSEEN:
            return _unseen_memory(row, part)
        case Why.FOREVER if part.resume is not Resume.CHECKPOINT and math.isinf(row.requeues):
            return _too_long(row, part)
        case why:
            return SHORT_REASONS[why]


def _too_few_samples(row: CandidateTable, part: Partition) -> str:
    samples = f"the {part.summary.dataset_samples:,} training samples"
    if row.global_batch > part.summary.dataset_samples:
        return f"global batch exceeds {samples}"
    return f"its batches are larger than asked for and than {samples}: an epoch has no step"


def _too_long(row: CandidateTable, part: Partition) -> str:
    work_s = float(row.train_time_s + row.evaluation_s + row.saving_s)
    needs = f"takes {format_duration(work_s)} besides its start and cannot be resumed"
    if part.resume is Resume.EPOCH:
        epoch_s = work_s * float(row.epoch_time_s / row.train_time_s)
        needs = (
            f"takes {format_duration(epoch_s)} an epoch and is resumed from ends of epochs only, "
            f"after a start of {format_duration(part.cluster.pricing.start_s)}"
        )
    return (
        f"{needs}, but a job of train_minutes = {part.cluster.train_minutes} is told to stop "
        f"{part.cluster.signal_delay_s} s before its end (signal_delay_s)"
    )


def _unseen_memory(row: CandidateTable, part: Partition) -> str:
    workers = row.nodes * row.workers_per_node
    _, high = part.models.memory.interval(float(row.local_batch), workers=workers)
    most = max(profile.part_batch for profile in part.summary.profiles)
    farthest = MOST_TOLD * (part.memory_limit_bytes or 0)
    reaches = "reaches" if high <= farthest else "reaches beyond"
    return (
        f"at most {most:,.0f} samples at once were measured, and the 90 % interval of the memory of "
        f"this batch {reaches} {_too_much_memory(min(float(high), farthest), part)}"
    )


def _too_much_memory(needed: float, part: Partition) -> str:
    limit = part.memory_limit_bytes or 0
    share = part.cluster.memory_margin
    allowed = part.allowed_bytes
    on_top = ALSO_ON_TOP if needed <= allowed else ""
    return (
        f"{needed / GIB:.3g} GiB per worker{on_top}, more than {allowed / GIB:.3g} GiB "
        f"(limit {limit / GIB:.3g} GiB less a margin of {100 * share:.3g} %)"
    )
