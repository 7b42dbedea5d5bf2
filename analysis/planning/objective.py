"""Choice among the feasible candidates: by knee, time, progress, cost, or time and cost weighted.

"weighted" minimizes `a · log T + b · log C`, that is the product `T^a × C^b`, with T the expected
wall time and C the cost. Units and sizes of both do not matter: a candidate that takes twice as
long must cost less than `2^(−a/b)` times as much to be preferred. a = b = 1 minimizes time × cost,
b = 0 is "time", a = 0 is "cost". For "progress" see `models.critical_batch`.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable
from tula_hpc.analysis.planning.knee import MIN_BATCHES, SAVED, TimeCurves, batches_up_to, knee_of
from tula_hpc.config import ObjectiveSpec
from tula_hpc.formatting import plural
from tula_hpc.records import Knee, Plan

# candidates up to the knee within this factor of the fastest count as equally fast, since a
# difference that no measurement could show is not worth money
AS_FAST = 1.03
# without a knee: the smallest batch within 10 % of the least time
NEAR_LEAST_TIME = 1.1
# least cost whose logarithm is taken: that of 0 would outweigh any time
TINY_COST = 1e-12


class Choice(NamedTuple):
    """Feasible candidates, best first, and the reason."""

    # rows of the table, at least one
    ranking: NDArray[np.intp]
    reason: str
    # None for objectives without one
    knee: Knee | None
    warnings: tuple[str, ...]


def choose(
    objective: ObjectiveSpec, table: CandidateTable, curves: TimeCurves | None = None
) -> Choice:
    """Rank the feasible candidates, of which there is at least one.

    "time", "progress", "cost" and "weighted" take the least. Of equal times the cheapest is taken,
    of equal costs the fastest; ties in both go to fewer nodes, then to the smaller batch.

    "knee" takes the cheapest candidate within 3 % of the fastest with a global batch up to the knee
    of the fitted curves. If constraints leave none there, it takes the smallest batch beyond.
    "kneedle" includes batches up to half an octave beyond its knee. Without a knee, it takes the
    smallest batch within 10 % of the least expected time, and of that the fewest nodes. Both need
    `curves`.
    """
    feasible = table.why == FEASIBLE
    if objective.has_knee:
        if curves is None:
            raise ValueError(f"curves: {objective.kind} needs them")
        return _by_knee(objective.kind, table, feasible, curves)
    keys = least_keys(objective, objective_time_s(objective, table), table.cost)
    least = f"expected {objective.kind}"
    if objective.kind == "progress":
        least = "expected time to the same progress"
    if objective.kind == "weighted":
        time = _power("time", objective.time_weight)
        least = f"{time} × {_power('cost', objective.cost_weight)}"
    reason = f"it has the least {least} of all feasible candidates"
    return Choice(ranked(table, feasible, keys), reason, None, ())


def objective_of(plan: Plan, own: ObjectiveSpec) -> ObjectiveSpec:
    """Return the objective of a plan: the sweep's `own`, with the changes of `tula plan --set`."""
    changes: dict[str, object] = {"kind": plan.objective}
    for assignment in plan.other_objective:
        key, _, value = assignment.removeprefix("objective.").partition(" = ")
        changes[key] = json.loads(value)
    return ObjectiveSpec.model_validate(dict(own) | changes)


def objective_time_s(objective: ObjectiveSpec, table: CandidateTable) -> Array:
    """Return the expected time that enters the objective."""
    if objective.kind == "progress":
        return table.progress_time_s
    return table.wall_time_s


def least_keys(objective: ObjectiveSpec, time_s: Array, cost: Array) -> tuple[Array, ...]:
    """Return the quantities to minimize; each decides between equals of those before it."""
    if objective.kind == "cost":
        return cost, time_s
    if objective.kind == "weighted":
        return weighted_score(objective, time_s, cost), time_s, cost
    return time_s, cost


def weighted_score(objective: ObjectiveSpec, wall_time_s: Array, cost: Array) -> Array:
    """Return `a · log T + b · log C`."""
    log_time = np.log(np.maximum(wall_time_s, TINY_COST))
    log_cost = np.log(np.maximum(cost, TINY_COST))
    return np.asarray(objective.time_weight * log_time + objective.cost_weight * log_cost)


def _power(name: str, exponent: float) -> str:
    return name if exponent == 1.0 else f"{name}^{exponent:g}"


def ranked(
    table: CandidateTable, mask: NDArray[np.bool_], keys: tuple[Array, ...]
) -> NDArray[np.intp]:
    """Return the rows of the mask, sorted by the keys, then by nodes and batch."""
    rows = np.flatnonzero(mask)
    last = (table.nodes, table.global_batch, table.local_batch, table.part)
    return rows[np.lexsort([key[rows] for key in (*keys, *last)][::-1])]


def _by_knee(
    kind: str, table: CandidateTable, feasible: NDArray[np.bool_], curves: TimeCurves
) -> Choice:
    knee = knee_of(kind, curves)
    if knee.global_batch is None:
        return _near_least_time(table, feasible, knee)
    batch = table.global_batch.astype(np.float64)
    within = feasible & (batch <= batches_up_to(kind, knee.global_batch))
    time_s = table.wall_time_s
    # First those as fast as the fastest, by cost; then the others up to the knee, by time, as a
    # share of at most 1; then those beyond the knee, by batch.
    least_s = time_s[within].min(initial=np.inf)
    slowest_s = time_s[within].max(initial=1.0)
    as_fast = within & (time_s <= AS_FAST * least_s)
    first = np.where(as_fast, 0.0, np.where(within, time_s / slowest_s, 1.0 + batch))
    second = np.where(as_fast, table.cost, time_s)
    ranking = ranked(table, feasible, (first, second, time_s, table.cost))
    knee_is = f"B={knee.global_batch:,.0f}, the knee of the curve fitted to time over batch"
    law = ", where the time bends most"
    above = "half an octave above "
    if kind == "knee":
        above = ""
        law = f"; beyond it a doubling of the batch saves less than {100 * SAVED:.0f} % of the time"
    what = "the fastest feasible configuration"
    if time_s[ranking[0]] > least_s:
        what = (
            f"the cheapest within {100 * (AS_FAST - 1):.0f} % of the fastest feasible configuration"
        )
    reason = f"it is {what} with a batch up to {above}{knee_is}{law}"
    if not within.any():
        reason = f"no batch is below {knee_is}; it is the next above"
    elif knee.global_batch >= 2 * batch.max() and batch[feasible].max() == batch.max():
        # not said where memory or the user's limits rule out the largest batches
        most = f"B={batch.max():,.0f} and {plural(int(table.nodes.max()), 'node')}"
        searched = f"it is {what} that was searched. The search ended at {most}"
        reason = f"{searched}: larger batches would still pay, up to {knee_is}{law}"
        # larger batches are not faster as measured, though they are by the fitted curve
        if 2.0 * batch[ranking[0]] <= batch.max():
            reason = (
                f"{searched}. Larger batches are not faster here, though by the fitted curve they "
                f"would be, up to its knee at B={knee.global_batch:,.0f}"
            )
    return Choice(ranking, reason, knee, ())


def _near_least_time(table: CandidateTable, feasible: NDArray[np.bool_], knee: Knee) -> Choice:
    time = table.wall_time_s
    near = time <= NEAR_LEAST_TIME * time[feasible].min()
    batch = table.global_batch.astype(np.float64)
    nodes = table.nodes.astype(np.float64)
    ranking = ranked(table, feasible & near, (batch, nodes, time, table.cost))
    ranking = np.concatenate([ranking, ranked(table, feasible & ~near, (time, table.cost))])
    rule = "the smallest global batch whose training time is within 10 % of the least"
    why = f"the curve has no knee, which needs {MIN_BATCHES} batches and a bend"
    return Choice(ranking, f"it has {rule}", knee, (f"{why}; the plan takes {rule}",))


def pareto_front(first: Array, second: Array) -> NDArray[np.intp]:
    """Return the rows that no other row beats: smaller in one value and not larger in the other.

    Both columns (n,) are finite. The rows ascend in `first`, so that `second` falls; of equal
    points only the one that comes first is returned.
    """
    order = np.lexsort((second, first))
    least_before = np.concatenate([[np.inf], np.minimum.accumulate(second[order])[:-1]])
    return order[second[order] < least_before]
