"""Make a plan from fitted partitions: constraints, choice, warnings and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from tula_hpc.analysis.costs import evaluation, interruptions
from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.costs.pricing import assumptions
from tula_hpc.analysis.planning import warnings
from tula_hpc.analysis.planning.candidate_records import as_records
from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Partition
from tula_hpc.analysis.planning.constraints import constrain
from tula_hpc.analysis.planning.feasibility import (
    binding,
    lost_fallbacks,
    narrowly_kept,
    require_feasible,
)
from tula_hpc.analysis.planning.knee import knee_curves
from tula_hpc.analysis.planning.memory_limit import checkpoint_copy_bytes, describe_limit
from tula_hpc.analysis.planning.objective import Choice, choose, pareto_front
from tula_hpc.analysis.planning.partitions import FittedPartitions, name_of, prefixed
from tula_hpc.config import SweepSpec
from tula_hpc.formatting import format_bytes, plural
from tula_hpc.records import Configuration, Doubt, Measurement, Plan, Remedy, of_partition

# quantities that a training measures
Quantity = Literal["save", "evaluation", "start"]

RUNNERS_UP = 3
AGAIN = "run the sweep again"


def plan_candidates(
    sweep: SweepSpec,
    fitted: FittedPartitions,
    measurements: Sequence[Measurement],
    *,
    pending: Callable[[Partition, Sequence[Measurement]], Sequence[Configuration]],
    how_to_profile: str,
    skipped_lines: int,
) -> Plan:
    """Return the plan; see `tula_hpc.analysis.plan.make_plan`.

    `pending` returns the configurations that the search still proposes on a partition.
    """
    fitted = fitted._replace(table=constrain(fitted.table, sweep.objective))
    require_feasible(fitted, sweep)
    curves = knee_curves(fitted.parts, sweep)
    choice = choose(sweep.objective, fitted.table, curves)
    plan = _without_warnings(sweep, fitted, choice, binding(fitted, sweep.objective, curves))
    doubts = _doubts(plan, sweep, fitted, choice)
    for part in fitted.parts:
        rows = of_partition(measurements, part.name)
        doubts += warnings.about_partition(
            part.name,
            part.cluster,
            part.summary,
            sweep,
            pending(part, rows),
            how_to_profile=how_to_profile,
            chosen=plan.chosen.configuration,
            model=part.models.step_time,
        )
    if skipped_lines:
        skipped = f"{plural(skipped_lines, 'damaged line')} of the measurements skipped"
        doubts.append(Doubt(skipped, Remedy.KNOW))
    return plan.with_doubts(doubts)


def _doubts(plan: Plan, sweep: SweepSpec, fitted: FittedPartitions, choice: Choice) -> list[Doubt]:
    row = int(choice.ranking[0])
    to_measure = [
        *fitted.warnings,
        *warnings.about_extrapolation(row, fitted, sweep.search),
        *warnings.about_range(plan, sweep),
        *warnings.about_unseen_memory(fitted),
    ]
    to_change = [
        *warnings.about_method(plan.chosen, sweep),
        *warnings.about_interruptions(row, fitted, sweep),
        *warnings.about_beginning_anew(row, fitted),
        *warnings.about_checkpoints(row, fitted, sweep),
        *narrowly_kept(plan.chosen, sweep.objective),
        *lost_fallbacks(row, plan.fallbacks, fitted, sweep.objective),
    ]
    to_know = [*choice.warnings, *warnings.about_left_out_samples(row, fitted, many=True)]
    return [
        *Remedy.MEASURE.doubts(to_measure),
        *Remedy.CHANGE.doubts(to_change),
        *Remedy.KNOW.doubts(to_know),
    ]


def _all_notes(sweep: SweepSpec, fitted: FittedPartitions, chosen: int) -> list[str]:
    notes = {part.name: _notes(part) for part in fitted.parts}
    first, *others = notes.values()
    found = [note for note in first if all(note in other for other in others)]
    shared = set(found)
    for name, texts in notes.items():
        found += [prefixed(name, note) for note in texts if note not in shared]
    found += warnings.about_script(fitted, sweep.workload)
    found += warnings.about_left_out_samples(chosen, fitted, many=False)
    if fitted.critical and sweep.training.scales:
        what = "what scaling gradients (training.method) saves"
        found.append(f"times to the same progress leave out {what}")
    return found


def _provisional(parts: Sequence[Partition]) -> dict[Quantity, list[str]]:
    """Return the notes that a training's measurements replace, both with and without partition."""
    found: dict[Quantity, list[str]] = {"save": [], "evaluation": [], "start": []}
    for part in parts:
        assumed: dict[Quantity, bool] = {
            "save": part.save_s is None and part.resume is Resume.CHECKPOINT,
            "evaluation": part.evaluation.is_assumed,
            "start": not part.end_s,
        }
        for quantity, note in _timed_notes(part).items():
            if assumed[quantity]:
                found[quantity] += [note, prefixed(part.name, note)]
    return found


def _timed_notes(part: Partition) -> dict[Quantity, str]:
    pricing = part.cluster.pricing
    return {
        "evaluation": part.evaluation.describe(),
        "save": interruptions.describe(part.save_s, pricing, part.resume),
        "start": evaluation.describe(pricing.start_s, measured=part.end_s > 0.0),
    }


def _notes(part: Partition) -> list[str]:
    return [
        *assumptions(part.cluster, part.power),
        *_timed_notes(part).values(),
        *_describe_copy(part),
        *describe_limit(part.cluster, part.summary.memory_uses),
        *_describe_passes(part),
    ]


def _describe_copy(part: Partition) -> list[str]:
    # how a script saves by itself is not known
    if part.resume is not Resume.CHECKPOINT:
        return []
    copy = format_bytes(checkpoint_copy_bytes(part.summary))
    counted = "in addition to what loads the data"
    if part.cluster.device == "cpu":
        counted = "which the plan counts"
    held = f"the first node holds {copy} more in host memory"
    return [f"while a checkpoint is written, {held}, {counted}"]


def _describe_passes(part: Partition) -> list[str]:
    most = part.summary.passes.most
    if math.isinf(most):
        return []
    at_once = plural(round(most), "sample")
    return [f"a worker takes at most {at_once} in one forward pass, and more in several passes"]


def _without_warnings(
    sweep: SweepSpec, fitted: FittedPartitions, choice: Choice, decisive: list[str]
) -> Plan:
    table = fitted.table
    chosen = int(choice.ranking[0])
    feasible = np.flatnonzero(table.why == FEASIBLE)
    front = feasible[pareto_front(table.wall_time_s[feasible], table.cost[feasible])]
    records = as_records(table, fitted.parts, set(front.tolist()))
    first, *others = (records[row] for row in choice.ranking[: 1 + RUNNERS_UP])
    part = fitted.parts[table.part[chosen]]
    described = part.models.describe()
    if len(fitted.parts) > 1:
        described["partitions"] = {other.name: other.models.describe() for other in fitted.parts}
    return Plan(
        objective=sweep.objective.kind,
        chosen=first,
        reason=f"{name_of(first)}: {choice.reason}",
        candidates=records,
        fallbacks=[records[row] for row in _fallback_rows(table, choice)],
        runners_up=others,
        other_nodes=[records[row] for row in _on_other_nodes(table, choice)],
        knee=choice.knee,
        models=described,
        dataset_samples=part.summary.dataset_samples,
        epochs=sweep.workload.epochs,
        memory_limit_bytes=part.memory_limit_bytes,
        binding=decisive,
        critical_batch=fitted.critical.batch if fitted.critical else None,
        critical_batch_source=fitted.critical.source if fitted.critical else None,
        notes=_all_notes(sweep, fitted, chosen),
        provisional=_provisional(fitted.parts),
    )


def _on_other_nodes(table: CandidateTable, choice: Choice) -> list[int]:
    """Return the best row on fewer nodes than the chosen one, and the best on more, if ranked."""
    nodes = table.nodes[choice.ranking]
    of_each = (np.flatnonzero(nodes < nodes[0]), np.flatnonzero(nodes > nodes[0]))
    return [int(choice.ranking[places[0]]) for places in of_each if places.size]


def _fallback_rows(table: CandidateTable, choice: Choice) -> list[int]:
    """Return rows of smaller local batches to fall back to when training runs out of memory.

    Those on the same number of nodes come first, the next smaller batch first. All are on the
    chosen partition, where training has its checkpoints and environment.
    """
    rows = choice.ranking
    chosen = rows[0]
    rows = rows[table.part[rows] == table.part[chosen]]
    rows = rows[table.local_batch[rows] < table.local_batch[chosen]]
    as_many = table.nodes[rows] == table.nodes[chosen]
    order = np.argsort(np.where(as_many, -table.local_batch[rows], 0), kind="stable")
    return list(map(int, rows[order]))
