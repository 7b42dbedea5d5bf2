"""Which candidates a plan holds: all of them up to some thousands, beyond that those that someone may ask for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.objective import Choice
from tula_hpc.analysis.pareto import pareto_front
from tula_hpc.analysis.parts import Fitted
from tula_hpc.analysis.table import FEASIBLE, CandidateTable, as_records
from tula_hpc.records import Candidate

WRITTEN = 4096  # candidates up to which all are written
BEST = 256  # beyond that: so many of the best,
NEIGHBOURS = 64  # so many on the chosen one's nodes and with its batch,
FALLBACKS = 256  # fallbacks,
FRONT = 512  # and of the Pareto front, evenly


def front_rows(table: CandidateTable) -> NDArray[np.intp]:
    """Rows of the Pareto front of expected time and cost among the feasible, fastest first."""
    feasible = np.flatnonzero(table.why == FEASIBLE)
    return feasible[pareto_front(table.wall_time_s[feasible], table.cost[feasible])]


def fallback_rows(table: CandidateTable, choice: Choice) -> list[int]:
    """Smaller local batches, should memory run out: the next smaller on as many nodes, then all others by rank.

    All on the kind of nodes that was chosen: that is where training's checkpoints and environment are.
    """
    chosen, ranked = choice.ranking[0], choice.ranking
    mine = ranked[(table.local_batch[ranked] < table.local_batch[chosen]) & (table.part[ranked] == table.part[chosen])]
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
        rows = np.unique(np.concatenate([choice.ranking[:BEST], few, near, np.array(fallbacks, dtype=np.intp)]))
    records = as_records(table.take(rows), fitted.parts, np.isin(rows, front))
    return dict(zip(rows.tolist(), records, strict=True))


def _neighbours(table: CandidateTable, chosen: int) -> NDArray[np.intp]:
    """Every batch on the chosen one's nodes, and its batch on the numbers of nodes next to it."""
    same_nodes = (table.nodes == table.nodes[chosen]) & (table.part == table.part[chosen])
    same_batch = np.flatnonzero(table.global_batch == table.global_batch[chosen])
    nearest = np.argsort(np.abs(table.nodes[same_batch] - table.nodes[chosen]), kind="stable")
    return np.concatenate([np.flatnonzero(same_nodes)[:NEIGHBOURS], same_batch[nearest[:NEIGHBOURS]]])
