"""The user's constraints: which candidates they rule out, and by how much these exceed them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Why
from tula_hpc.config import ObjectiveSpec
from tula_hpc.formatting import HOUR_S, format_duration, format_money, format_percent
from tula_hpc.records import Candidate

# ruled out by the user; everything else is impossible
CONSTRAINED = (Why.DEADLINE, Why.BUDGET, Why.BATCH)


class Constraint(NamedTuple):
    """One of the user's constraints."""

    # key in the sweep file, e.g. "objective.budget"
    key: str
    limit: float
    # name of the limited column of the table, and field of a candidate
    column: str
    why: Why

    def excess(self, table: CandidateTable) -> NDArray[np.float64]:
        """Return the share by which each candidate exceeds the limit; 0 or less within it."""
        return np.asarray(getattr(table, self.column) / self.limit - 1.0, dtype=np.float64)

    def amount(self, candidate: Candidate) -> float:
        """Return the limited quantity of one candidate."""
        return float(getattr(candidate, self.column))

    def describe(self, amount: float, candidate: Candidate) -> str:
        """Return an amount of the limited quantity in words, in the candidate's currency."""
        if self.why is Why.DEADLINE:
            return format_duration(amount)
        if self.why is Why.BUDGET:
            return format_money(amount, candidate.currency)
        return f"B={amount:,.0f}"


def constraints_of(objective: ObjectiveSpec) -> list[Constraint]:
    """Return the constraints that are set."""
    found = []
    for key, unit, column, why in (
        ("deadline_hours", HOUR_S, "wall_time_s", Why.DEADLINE),
        ("budget", 1.0, "cost", Why.BUDGET),
        ("max_global_batch", 1.0, "global_batch", Why.BATCH),
    ):
        limit = getattr(objective, key)
        if limit is not None:
            found.append(Constraint(f"objective.{key}", limit * unit, column, why))
    return found


def unconstrained(table: CandidateTable) -> CandidateTable:
    """Return the table as if the user had set no constraint."""
    return table._replace(why=np.where(np.isin(table.why, CONSTRAINED), int(FEASIBLE), table.why))


def constrain(table: CandidateTable, objective: ObjectiveSpec) -> CandidateTable:
    """Rule out candidates that break the user's constraints, each for the first that it breaks."""
    why = table.why.copy()
    for constraint in constraints_of(objective):
        why[(why == FEASIBLE) & (constraint.excess(table) > 0.0)] = constraint.why
    return table._replace(why=why)


def excess(table: CandidateTable, objective: ObjectiveSpec) -> NDArray[np.float64]:
    """Return the largest share by which each candidate exceeds any limit; 0 or less within all."""
    over = [constraint.excess(table) for constraint in constraints_of(objective)]
    if not over:
        return np.zeros(table.rows)
    return np.asarray(np.max(over, axis=0))


def breaks(constraint: Constraint, candidate: Candidate) -> str:
    """Describe by how much a candidate breaks a constraint."""
    amount = constraint.amount(candidate)
    limit = constraint.describe(constraint.limit, candidate)
    over = format_percent(amount / constraint.limit - 1.0)
    if constraint.why is not Why.BATCH:
        beyond = constraint.describe(amount - constraint.limit, candidate)
        # a share of a tiny limit says nothing
        over = f"{beyond} ({over})" if amount < 3 * constraint.limit else beyond
    return f"{constraint.describe(amount, candidate)}, {over} over {constraint.key}, {limit}"


def nearest_outside(table: CandidateTable, objective: ObjectiveSpec) -> int | None:
    """Return the row that breaks the constraints least, by the largest share over any limit.

    Returns None if no row would be feasible without them.
    """
    possible = np.flatnonzero(np.isin(table.why, CONSTRAINED))
    if not len(possible):
        return None
    return int(possible[np.argmin(excess(table.take(possible), objective))])


def conceivable(objective: ObjectiveSpec, global_batch: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the batches that constraints may allow before measuring; all if they allow none."""
    most = np.inf if objective.max_global_batch is None else objective.max_global_batch
    allowed = global_batch <= most
    return np.asarray(allowed | ~allowed.any())
