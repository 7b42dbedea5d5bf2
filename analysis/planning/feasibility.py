"""Effect of the constraints: which decide, which are kept only narrowly, by how much they fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.costs.pricing import enough_minutes
from tula_hpc.analysis.models.fitted import LARGER_MACHINE, MORE_MEMORY, REMEDY
from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Why, predict
from tula_hpc.analysis.planning.constraints import (
    CONSTRAINED,
    Constraint,
    breaks,
    constrain,
    constraints_of,
    nearest_outside,
    unconstrained,
)
from tula_hpc.analysis.planning.knee import TimeCurves
from tula_hpc.analysis.planning.memory_limit import on_top_bytes
from tula_hpc.analysis.planning.objective import choose
from tula_hpc.analysis.planning.partitions import FittedPartitions, name_of
from tula_hpc.config import ObjectiveSpec, SweepSpec, TrainingSpec
from tula_hpc.errors import ConstraintsError, InfeasibleError
from tula_hpc.formatting import listed
from tula_hpc.records import Candidate

ADVICE = {
    Why.SAMPLES: "lower search.min_batch and search.max_batch below the number of samples",
    Why.UNSEEN: REMEDY,
    Why.DIVERGED: "check the model and its loss at such a batch",
}
FEWER_PREEMPTIONS = (
    "use fewer nodes, or nodes that are preempted less often than pricing.preemption_hours says"
)


def require_feasible(fitted: FittedPartitions, sweep: SweepSpec) -> None:
    """Refuse a table without any feasible candidate.

    Raises:
        ConstraintsError: Says which constraint fails by how much at the nearest candidate.
        InfeasibleError: Says what the smallest candidate needs, or the one that needs least time.
    """
    table = fitted.table
    if np.any(table.why == FEASIBLE):
        return
    nearest = nearest_outside(table, sweep.objective)
    if nearest is not None:
        candidate = fitted.record(nearest)
        broken = _broken(candidate, constraints_of(sweep.objective))
        where = f"the nearest is {name_of(candidate)}: {broken}"
        raise ConstraintsError(
            f"plan: none of {table.rows:,} candidates keeps the constraints; {where}; raise the "
            "limits that it breaks, or leave them out"
        )
    row = int(np.lexsort((table.global_batch, table.local_batch))[0])
    why_not = Why(int(table.why[row]))
    advice = ADVICE.get(why_not, MORE_MEMORY)
    if why_not is Why.MEMORY and _no_batch_fits(fitted, row, sweep.training):
        advice = f"even one sample would need more than that; {LARGER_MACHINE}"
    if why_not is Why.FOREVER:
        row = _least_time(fitted, sweep.training.max_requeues)
        advice = _more_time(fitted, row, sweep)
    named = fitted.record(row)
    why = f"{name_of(named)}: {named.why}"
    raise InfeasibleError(f"plan: none of {table.rows:,} candidates is feasible; {why}; {advice}")


def _no_batch_fits(fitted: FittedPartitions, row: int, training: TrainingSpec) -> bool:
    """Tell whether a worker of this candidate's cluster would lack memory for a single sample."""
    table = fitted.table
    part = fitted.parts[table.part[row]]
    workers = (table.nodes[[row]] * table.workers_per_node[[row]]).astype(np.float64)
    on_top = on_top_bytes(part.summary, part.cluster, training, workers)
    return bool(part.models.memory.predict(np.ones(1), workers) + on_top > part.allowed_bytes)


def _least_time(fitted: FittedPartitions, max_requeues: int) -> int:
    """Return the row that needs the shortest job, of those for which jobs are too short."""
    rows = np.flatnonzero(fitted.table.why == Why.FOREVER).tolist()
    minutes = [train_minutes_for(fitted.table.take([row]), fitted, max_requeues) for row in rows]
    return rows[int(np.argmin(minutes))]


def _more_time(fitted: FittedPartitions, row: int, sweep: SweepSpec) -> str:
    """Say how long a job must be for a candidate on its partition, and how seldom preempted."""
    rows = fitted.table.take([row])
    part = fitted.parts[rows.part[0]]
    cluster = part.cluster
    if cluster.pricing.basis == "spot" and np.isfinite(rows.requeues[0]):
        return FEWER_PREEMPTIONS
    minutes = train_minutes_for(rows, fitted, sweep.training.max_requeues)
    enough = part._replace(cluster=cluster.model_copy(update={"train_minutes": minutes}))
    preempted = ""
    if predict(0, enough, rows.grid, sweep).why[0] == Why.FOREVER:
        preempted = f"; preemptions leave no time either: {FEWER_PREEMPTIONS}"
    advice = f"raise train_minutes in the cluster file from {cluster.train_minutes} to {minutes}"
    if part.resume is Resume.NOTHING:
        return (
            f"{advice}, or let the script go on from where it was interrupted, by "
            f"workload.resume_arguments or tula.keep{preempted}"
        )
    limit_s = 60 * cluster.train_minutes
    if cluster.signal_delay_s >= limit_s:
        alone = f"signal_delay_s = {cluster.signal_delay_s} alone leaves nothing"
        return f"{advice}; {alone} of a time limit of {limit_s} s{preempted}"
    return f"{advice}{preempted}"


def train_minutes_for(rows: CandidateTable, fitted: FittedPartitions, max_requeues: int) -> int:
    """Return the train_minutes that suffice for one of these candidates if nothing is preempted."""
    part = fitted.parts[rows.part[0]]
    requeues = max_requeues if part.resume is Resume.CHECKPOINT else 0
    work_s = rows.train_time_s + rows.evaluation_s + rows.saving_s
    if part.resume is Resume.EPOCH:
        # the work of one job, which does a whole number of epochs
        epochs = np.round(rows.train_time_s / rows.epoch_time_s)
        work_s *= np.ceil(epochs / (1.0 + max_requeues)) / epochs
    return int(enough_minutes(work_s, rows.checkpoint_s, part.cluster, requeues).min())


def binding(
    fitted: FittedPartitions, objective: ObjectiveSpec, curves: TimeCurves | None
) -> list[str]:
    """Name constraints that rule out a better choice, with that choice.

    Each constraint is dropped by itself; all are dropped together only if none decides by itself.
    """
    if not np.isin(fitted.table.why, CONSTRAINED).any():
        return []
    every = constraints_of(objective)
    found: list[str] = []
    for one in every:
        found += _without([one], fitted, objective, curves)
    if found or len(every) == 1:
        return found
    return _without(every, fitted, objective, curves)


def _without(
    dropped: Sequence[Constraint],
    fitted: FittedPartitions,
    objective: ObjectiveSpec,
    curves: TimeCurves | None,
) -> list[str]:
    """Return a sentence on the choice without some constraints; none if that keeps them anyway."""
    unset = {one.key.removeprefix("objective."): None for one in dropped}
    others = objective.model_copy(update=unset)
    free = constrain(unconstrained(fitted.table), others)
    row = int(choose(others, free, curves).ranking[0])
    if fitted.table.why[row] == FEASIBLE:
        return []
    candidate = fitted.record(row)
    keys = listed([one.key for one in dropped])
    how = _broken(candidate, dropped)
    return [f"without {keys}, {name_of(candidate)} would be chosen: {how}"]


def narrowly_kept(chosen: Candidate, objective: ObjectiveSpec) -> list[str]:
    """List constraints that the chosen candidate keeps, but not up to the end of its interval."""
    found = []
    for constraint in constraints_of(objective):
        _, high = chosen.interval_90.get(constraint.column, (0.0, 0.0))
        if high > constraint.limit:
            expected = constraint.describe(constraint.amount(chosen), chosen)
            limit = constraint.describe(constraint.limit, chosen)
            most = constraint.describe(high, chosen)
            kept = f"{constraint.key} = {limit} is kept only narrowly"
            found.append(f"{kept}: {expected} expected, but the 90 % interval reaches {most}")
    return found


def lost_fallbacks(
    chosen: int, fallbacks: Sequence[Candidate], fitted: FittedPartitions, objective: ObjectiveSpec
) -> list[str]:
    """Warn if constraints leave no smaller batch for when training runs out of memory."""
    table = fitted.table
    smaller = (table.part == table.part[chosen]) & (table.local_batch < table.local_batch[chosen])
    broken = [one for one in constraints_of(objective) if np.any(smaller & (table.why == one.why))]
    against = [one.key for one in broken]
    if fallbacks or not against:
        return []
    verb = "rules" if len(against) == 1 else "rule"
    rules = f"{' and '.join(against)} {verb} out every smaller local batch"
    return [f"{rules}: should memory run out in training, there is nothing to fall back to"]


def _broken(candidate: Candidate, constraints: Sequence[Constraint]) -> str:
    broken = [one for one in constraints if one.amount(candidate) > one.limit]
    return "; ".join(breaks(one, candidate) for one in broken)
