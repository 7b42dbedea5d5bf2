"""What rules a candidate out: memory, the data set, a time limit that is never met, and the user's own constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Why
from tula_hpc.config import ObjectiveSpec
from tula_hpc.formatting import format_duration, format_money, format_percent
from tula_hpc.records import Candidate

SECONDS_PER_HOUR = 3600.0
# by the user; all else is impossible
CONSTRAINED = (Why.DEADLINE, Why.BUDGET, Why.BATCH)


class Constraint(NamedTuple):
    """One of the user's constraints."""

    # in the sweep file
    key: str
    limit: float
    # of the table
    column: str
    why: Why
    # an amount in words
    says: Callable[[float, Candidate], str]

    def excess(self, table: CandidateTable) -> NDArray[np.float64]:
        """By how much of the limit each candidate is over it; 0 or less inside."""
        return np.asarray(getattr(table, self.column) / self.limit - 1.0, dtype=np.float64)

    def of(self, candidate: Candidate) -> float:
        """What is limited, of one candidate."""
        if self.why is Why.DEADLINE:
            return candidate.expected_time_s
        return float(candidate.cost if self.why is Why.BUDGET else candidate.global_batch)

    def is_broken_by(self, candidate: Candidate) -> bool:
        """Whether it rules the candidate out."""
        return self.of(candidate) > self.limit


def constraints_of(objective: ObjectiveSpec) -> list[Constraint]:
    """Those that are set."""
    hours, budget, batch = objective.deadline_hours, objective.budget, objective.max_global_batch
    found = []
    if hours is not None:
        limit_s = hours * SECONDS_PER_HOUR
        found.append(
            Constraint("objective.deadline_hours", limit_s, "wall_time_s", Why.DEADLINE, _duration)
        )
    if budget is not None:
        found.append(Constraint("objective.budget", budget, "cost", Why.BUDGET, _money))
    if batch is not None:
        found.append(
            Constraint(
                "objective.max_global_batch", float(batch), "global_batch", Why.BATCH, _batch
            )
        )
    return found


def unconstrained(table: CandidateTable) -> CandidateTable:
    """The table as if the user had set no constraint."""
    return table._replace(why=np.where(np.isin(table.why, CONSTRAINED), int(FEASIBLE), table.why))


def _duration(amount: float, _: Candidate) -> str:
    return format_duration(amount)


def _money(amount: float, candidate: Candidate) -> str:
    return format_money(amount, candidate.currency)


def _batch(amount: float, _: Candidate) -> str:
    return f"B={amount:,.0f}"


def constrain(table: CandidateTable, objective: ObjectiveSpec) -> CandidateTable:
    """The table with candidates outside the user's constraints ruled out, each by the first that it breaks."""
    why = table.why.copy()
    for constraint in constraints_of(objective):
        why[(why == FEASIBLE) & (constraint.excess(table) > 0.0)] = constraint.why
    return table._replace(why=why)


def excess(table: CandidateTable, objective: ObjectiveSpec) -> NDArray[np.float64]:
    """The largest share by which each candidate is over any of the user's limits; 0 or less where it keeps them."""
    over = [constraint.excess(table) for constraint in constraints_of(objective)]
    return np.asarray(np.max(over, axis=0) if over else np.zeros(table.rows))


def breaks(constraint: Constraint, candidate: Candidate) -> str:
    """How a candidate breaks a constraint, in words."""
    amount, limit = constraint.of(candidate), constraint.limit
    share = format_percent(amount / limit - 1.0)
    by = (
        share
        if constraint.why is Why.BATCH
        else f"{constraint.says(amount - limit, candidate)} ({share})"
    )
    return f"{constraint.says(amount, candidate)}, {by} over {constraint.key} = {constraint.says(limit, candidate)}"


def nearest_outside(table: CandidateTable, objective: ObjectiveSpec) -> int | None:
    """The row that would be feasible but for the constraints and breaks them least; None where there is none.

    By the largest share by which it is over any limit.
    """
    possible = np.flatnonzero(np.isin(table.why, CONSTRAINED))
    if not len(possible):
        return None
    return int(possible[np.argmin(excess(table.take(possible), objective))])
