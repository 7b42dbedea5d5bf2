"""From measurements to a plan: models, predictions, prices, constraints, choice.

Whatever computes with NumPy is imported late: `plan --help` and a mistake in its arguments are
answered at once.

Which candidates a plan holds: all of them up to some thousands, beyond that those that someone may
ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, as_records, pareto_front
from tula_hpc.analysis.planning.objective import Choice
from tula_hpc.analysis.planning.partitions import Fitted
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Candidate, Event, Footprint, Measurement, Metrics, Plan

if TYPE_CHECKING:
    from tula_hpc.analysis.models.critical_batch import CriticalBatch
    from tula_hpc.analysis.planning.candidates import Part
    from tula_hpc.analysis.planning.knee import TrainTime


RUNNERS_UP = 3
AGAIN = "run the sweep again"


def make_plan(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    skipped_lines: int = 0,
    footprints: Mapping[str, Footprint] | None = None,
    *,
    metrics: Metrics | None = None,
    events: Sequence[Event] = (),
    how_to_profile: str = AGAIN,
) -> Plan:
    """Fit the models, predict every candidate, choose by the objective.

    With measurements of a single cluster size, only that size is planned: one size says nothing
    about another. The order of the measurements does not matter; `skipped_lines`, how many could
    not be read, goes into the warnings, and so does the error of the memory estimates by partition,
    `footprints`, where it is large. `metrics` of a training tell more of the critical batch than
    the first weights, which profiles see, and how long evaluation takes; `events` of the run tell
    what a checkpoint costs, and on which partition was trained. `how_to_profile` is the advice
    where the search wants more.

    Raises:
        NotEnoughDataError: Too few measurements; the message says what is missing.
        InfeasibleError: No candidate fits, or none keeps the constraints.
        InputError: Prices that need what is not known.
    """
    from tula_hpc.analysis.models.critical_batch import critical_batch
    from tula_hpc.analysis.planning.constraints import constrain
    from tula_hpc.analysis.planning.feasibility import require_feasible
    from tula_hpc.analysis.planning.knee import drawn_time, fitted_time
    from tula_hpc.analysis.planning.objective import choose
    from tula_hpc.analysis.planning.partitions import Trained, fit_parts
    from tula_hpc.analysis.planning.warnings import about_lines, with_estimates

    fitted = fit_parts(sweep, cluster, measurements, Trained(metrics, events))
    fitted = fitted._replace(table=constrain(fitted.table, sweep.objective))
    require_feasible(fitted, sweep.objective)
    laws = [law(fitted.parts, sweep.workload.epochs) for law in (fitted_time, drawn_time)]
    choice = choose(sweep.objective, fitted.table, *laws)
    plan = _written(sweep, fitted, choice)
    critical = critical_batch(measurements, metrics)
    doubts = _doubts(plan, sweep, fitted, choice, critical)
    doubts += _doubts_about_parts(sweep, fitted, measurements, how_to_profile)
    remarks = _remarks(sweep, fitted, critical, laws[0])
    remarks["warnings"] = [*choice.warnings, *fitted.warnings, *doubts, *about_lines(skipped_lines)]
    return with_estimates(plan.model_copy(update=remarks), fitted, footprints or {})


def _doubts(
    plan: Plan, sweep: SweepSpec, fitted: Fitted, choice: Choice, critical: CriticalBatch | None
) -> list[str]:
    """Doubts about the choice."""
    from tula_hpc.analysis.planning import warnings as cautions
    from tula_hpc.analysis.planning.feasibility import lost_fallbacks, narrowly_kept

    row = int(choice.ranking[0])
    return [
        *cautions.about_choice(row, fitted),
        *cautions.about_batch(plan.chosen, critical),
        *cautions.about_method(sweep),
        *cautions.about_interruptions(row, fitted, sweep),
        *cautions.about_checkpoints(row, fitted, sweep),
        *narrowly_kept(plan.chosen, sweep.objective),
        *lost_fallbacks(row, plan.fallbacks, fitted, sweep.objective),
    ]


def _doubts_about_parts(
    sweep: SweepSpec, fitted: Fitted, measurements: Sequence[Measurement], how_to_profile: str
) -> list[str]:
    from tula_hpc.analysis.planning.warnings import about_part

    return [
        text
        for part in fitted.parts
        for text in about_part(part, sweep, measurements, how_to_profile)
    ]


def _remarks(
    sweep: SweepSpec, fitted: Fitted, critical: CriticalBatch | None, train_time_s: TrainTime
) -> dict[str, Any]:
    """Fields of the plan that say what the constraints exclude, what prices assume, and which batch still pays."""
    from tula_hpc.analysis.planning.feasibility import binding

    return {
        "binding": binding(fitted, sweep.objective, train_time_s),
        "critical_batch": critical.batch if critical else None,
        "critical_batch_source": critical.source if critical else None,
        "notes": _all_notes(fitted.parts),
    }


def _all_notes(parts: Sequence[Part]) -> list[str]:
    """What holds for all partitions once, and then the rest with the name of the partition that it is about."""
    from tula_hpc.analysis.planning.partitions import prefixed

    notes = {part.name: _notes(part) for part in parts}
    first, *others = notes.values()
    shared = [note for note in first if all(note in other for other in others)]
    return [
        *shared,
        *(
            prefixed(name, note)
            for name, own in notes.items()
            for note in own
            if note not in shared
        ),
    ]


def _notes(part: Part) -> list[str]:
    """What prices, times and memory of a partition assume."""
    from tula_hpc.analysis.costs import evaluation as starts
    from tula_hpc.analysis.costs import interruptions as checkpoints
    from tula_hpc.analysis.costs.pricing import assumptions
    from tula_hpc.analysis.planning.candidates import checkpoint_copy
    from tula_hpc.analysis.planning.memory_limit import describe_limit
    from tula_hpc.formatting import format_bytes

    copy = format_bytes(checkpoint_copy(part.summary))
    counted = (
        "which is reckoned with" if part.cluster.device == "cpu" else "beside what loads the data"
    )
    said = (
        f"while a checkpoint is written, the first node holds {copy} more in host memory, {counted}"
    )
    costs = checkpoints.describe(part.save, part.cluster.pricing)
    begins = starts.describe(part.summary.start_s, part.cluster.pricing)
    limit = describe_limit(part.cluster, part.summary.memory_uses)
    return [
        *assumptions(part.cluster, part.power),
        part.evaluation.describe(),
        costs,
        begins,
        said,
        *limit,
    ]


def _written(sweep: SweepSpec, fitted: Fitted, choice: Choice) -> Plan:
    """The plan without its warnings."""
    from tula_hpc.analysis.planning.partitions import name_of

    fallbacks = fallback_rows(fitted.table, choice)
    records = written_records(fitted, choice, fallbacks)
    first, *others = (records[row] for row in choice.ranking[: 1 + RUNNERS_UP])
    part = fitted.parts[fitted.table.part[choice.ranking[0]]]
    described = part.models.describe()
    if len(fitted.parts) > 1:
        described["partitions"] = {other.name: other.models.describe() for other in fitted.parts}
    return Plan(
        objective=sweep.objective.kind,
        chosen=first,
        reason=f"{name_of(first)}: {choice.reason}",
        candidates=list(records.values()),
        candidates_total=fitted.table.rows if fitted.table.rows > len(records) else None,
        fallbacks=[records[row] for row in fallbacks],
        runners_up=others,
        knee=choice.knee,
        models=described,
        dataset_samples=part.summary.dataset_samples,
        epochs=sweep.workload.epochs,
        memory_limit_bytes=part.memory_limit_bytes,
    )


# candidates up to which all are written
WRITTEN = 4096
# beyond that: so many of the best,
BEST = 256
# so many on the chosen one's nodes and with its batch,
NEIGHBOURS = 64
# fallbacks,
FALLBACKS = 256
# and of the Pareto front, evenly
FRONT = 512


def front_rows(table: CandidateTable) -> NDArray[np.intp]:
    """Rows of the Pareto front of expected time and cost among the feasible, fastest first."""
    feasible = np.flatnonzero(table.why == FEASIBLE)
    return feasible[pareto_front(table.wall_time_s[feasible], table.cost[feasible])]


def fallback_rows(table: CandidateTable, choice: Choice) -> list[int]:
    """Smaller local batches, should memory run out: the next smaller on as many nodes, then all others by rank.

    All on the kind of nodes that was chosen: that is where training's checkpoints and environment
    are.
    """
    chosen, ranked = choice.ranking[0], choice.ranking
    mine = ranked[
        (table.local_batch[ranked] < table.local_batch[chosen])
        & (table.part[ranked] == table.part[chosen])
    ]
    as_many = table.nodes[mine] == table.nodes[chosen]
    same, others = mine[as_many], mine[~as_many]
    same = same[np.argsort(-table.local_batch[same], kind="stable")]
    limit = None if table.rows <= WRITTEN else FALLBACKS
    return [int(row) for row in np.concatenate([same, others])[:limit]]


def written_records(fitted: Fitted, choice: Choice, fallbacks: list[int]) -> dict[int, Candidate]:
    """Records by row of the table, ascending."""
    table, front = fitted.table, front_rows(fitted.table)
    rows = np.arange(table.rows)
    if table.rows > WRITTEN:
        few = front[np.linspace(0, len(front) - 1, min(FRONT, len(front))).astype(np.intp)]
        near = _neighbours(table, int(choice.ranking[0]))
        rows = np.unique(
            np.concatenate([choice.ranking[:BEST], few, near, np.array(fallbacks, dtype=np.intp)])
        )
    records = as_records(table.take(rows), fitted.parts, np.isin(rows, front))
    return dict(zip(rows.tolist(), records, strict=True))


def _neighbours(table: CandidateTable, chosen: int) -> NDArray[np.intp]:
    """Every batch on the chosen one's nodes, and its batch on the numbers of nodes next to it."""
    same_nodes = (table.nodes == table.nodes[chosen]) & (table.part == table.part[chosen])
    same_batch = np.flatnonzero(table.global_batch == table.global_batch[chosen])
    nearest = np.argsort(np.abs(table.nodes[same_batch] - table.nodes[chosen]), kind="stable")
    return np.concatenate(
        [np.flatnonzero(same_nodes)[:NEIGHBOURS], same_batch[nearest[:NEIGHBOURS]]]
    )
