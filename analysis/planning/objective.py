"""Choice among the feasible candidates: least time, least cost, both weighed, or the knee.

"weighted" makes `a · log T + b · log C` least, that is the product `T^a × C^b`, T the expected wall
time, C the cost. Units and sizes of both do not matter: a candidate that takes twice as long must
cost less than `2^(−a/b)` times as much to be preferred. a = b = 1 makes time × cost least, b = 0 is
"time", a = 0 is "cost".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable
from tula_hpc.analysis.planning.constraints import unconstrained
from tula_hpc.analysis.planning.knee import MIN_BATCHES, TrainTime, knee_of
from tula_hpc.config import ObjectiveSpec
from tula_hpc.records import Knee

Array = NDArray[np.float64]

# without a knee: the smallest batch within 10 % of the least time
NEAR_LEAST_TIME = 1.1
# candidates that are ranked; the last of very many are not needed
RANKED = 4096
# as a logarithm, a cost of 0 would outweigh any time
TINY_COST = 1e-12


class Choice(NamedTuple):
    """Feasible candidates, best first, and the reason."""

    # rows of the table, at least one, at most about `RANKED`
    ranking: NDArray[np.intp]
    # one sentence
    reason: str
    # None for other objectives and with too few batches
    knee: Knee | None
    warnings: tuple[str, ...]


def choose(
    objective: ObjectiveSpec,
    table: CandidateTable,
    train_time_s: TrainTime,
    drawn: TrainTime | None = None,
) -> Choice:
    """Rank the feasible candidates.

    "time", "cost" and "weighted" take the least. Of equal times the cheapest is taken, of equal
    costs, as where all is free, the fastest; ties in both go to fewer nodes, then to the smaller
    batch.

    "knee" takes the candidate whose global batch is nearest, in octaves, to the knee of the fitted
    curve; of equal batches the fastest, then the cheapest, then the one with fewer nodes. Where a
    smaller batch is as fast and as cheap as that, or better, it is taken instead. The curve is the
    workload's: constraints decide which candidate is nearest to its knee, not where that lies.
    Without a knee the smallest global batch within 10 % of the least expected time is taken, on as
    few nodes as possible, of those the fastest, then the cheapest.

    Args:
        objective: Kind and weights.
        table: At least one row is feasible.
        train_time_s: The fitted model, for the curve between the candidates.
        drawn: Models drawn from the fit's uncertainty, for the knee's interval.
    """
    feasible = table.why == FEASIBLE
    if objective.kind == "knee":
        return _by_knee(table, feasible, train_time_s, drawn)
    ranking = ranked(table, feasible, least_keys(objective, table.wall_time_s, table.cost))
    least = f"expected {objective.kind}"
    if objective.kind == "weighted":
        time = _power("time", objective.time_weight)
        least = f"{time} × {_power('cost', objective.cost_weight)}"
    return Choice(ranking, f"it has the least {least} of all feasible candidates", None, ())


def least_keys(objective: ObjectiveSpec, wall_time_s: Array, cost: Array) -> tuple[Array, ...]:
    """Return the quantities to be least, the first first; later ones decide between equals."""
    if objective.kind == "time":
        return wall_time_s, cost
    if objective.kind == "cost":
        return cost, wall_time_s
    return _weighted(objective, wall_time_s, cost), wall_time_s, cost


def weighted_score(objective: ObjectiveSpec, table: CandidateTable) -> Array:
    """Return `a · log T + b · log C`, T in seconds."""
    return _weighted(objective, table.wall_time_s, table.cost)


def _weighted(objective: ObjectiveSpec, wall_time_s: Array, cost: Array) -> Array:
    log_time = np.log(np.maximum(wall_time_s, TINY_COST))
    log_cost = np.log(np.maximum(cost, TINY_COST))
    return np.asarray(objective.time_weight * log_time + objective.cost_weight * log_cost)


def _power(name: str, exponent: float) -> str:
    return name if exponent == 1.0 else f"{name}^{exponent:g}"


def ranked(
    table: CandidateTable, mask: NDArray[np.bool_], keys: tuple[Array, ...]
) -> NDArray[np.intp]:
    """Return rows of the mask by the keys, then by nodes and batch; about `RANKED` of them."""
    rows = np.flatnonzero(mask)
    if len(rows) > RANKED:
        first = keys[0][rows]
        rows = rows[first <= np.partition(first, RANKED)[RANKED]]
    last = (table.nodes, table.global_batch, table.local_batch, table.part)
    return rows[np.lexsort([key[rows] for key in (*keys, *last)][::-1])]


def _by_knee(
    table: CandidateTable, feasible: NDArray[np.bool_], nominal: TrainTime, drawn: TrainTime | None
) -> Choice:
    possible = np.flatnonzero(unconstrained(table).why == FEASIBLE)
    knee = knee_of(table.take(possible), nominal, drawn)
    if knee is None:
        why = f"no knee: it needs {MIN_BATCHES} feasible global batches"
        return _near_least_time(table, feasible, None, why)
    if knee.global_batch is None:
        return _near_least_time(table, feasible, knee, "the curve has no knee")
    octaves = np.abs(np.log2(table.global_batch / knee.global_batch))
    octaves = np.round(octaves, 9).astype(np.float64)
    keys = (octaves, table.global_batch.astype(np.float64), table.wall_time_s, table.cost)
    ranking = ranked(table, feasible, keys)
    nearest = int(ranking[0])
    where = f"nearest to the knee of the training-time curve at {knee.global_batch:,.0f}"
    taken = _unbeaten(table, feasible, nearest, keys)
    if taken == nearest:
        reason = f"its global batch is {where}, and it is the fastest there"
        return Choice(ranking, reason, knee, ())
    ranking = np.concatenate([[taken], ranking[ranking != taken]])
    below = f"its global batch is below B={table.global_batch[nearest]:,}, the {where}"
    reason = f"{below}, and it is neither slower nor dearer than the fastest there"
    return Choice(ranking, reason, knee, ())


def _unbeaten(
    table: CandidateTable, feasible: NDArray[np.bool_], row: int, keys: tuple[Array, ...]
) -> int:
    """Return the row, or the first feasible one that beats it, and so on.

    One beats another where it is smaller in global batch, expected time or cost, and larger in
    none.
    """
    columns = np.stack([table.global_batch, table.wall_time_s, table.cost])
    while True:
        own = columns[:, row][:, None]
        beating = feasible & np.all(columns <= own, axis=0) & np.any(columns < own, axis=0)
        if not beating.any():
            return row
        row = int(ranked(table, beating, keys)[0])


def _near_least_time(
    table: CandidateTable, feasible: NDArray[np.bool_], knee: Knee | None, why: str
) -> Choice:
    time = table.wall_time_s
    near = time <= NEAR_LEAST_TIME * time[feasible].min()
    batch = table.global_batch.astype(np.float64)
    nodes = table.nodes.astype(np.float64)
    ranking = ranked(table, feasible & near, (batch, nodes, time, table.cost))
    ranking = np.concatenate([ranking, ranked(table, feasible & ~near, (time, table.cost))])
    rule = "the smallest global batch whose training time is within 10 % of the least"
    return Choice(ranking, f"it has {rule}", knee, (f"{why}; the plan takes {rule}",))
