"""What the constraints leave: an error that says by how much they fail, or which of them decide."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.constraints import breaks, constraints_of, nearest_outside
from tula_hpc.analysis.knee import TrainTime
from tula_hpc.analysis.objective import Choice, choose
from tula_hpc.analysis.parts import Fitted
from tula_hpc.analysis.table import FEASIBLE, Why, as_records
from tula_hpc.config import ObjectiveSpec
from tula_hpc.errors import InfeasibleError
from tula_hpc.records import Candidate

CONSTRAINED = (Why.DEADLINE, Why.BUDGET, Why.BATCH)


def require_feasible(fitted: Fitted, objective: ObjectiveSpec) -> None:
    """Refuse a table without any feasible candidate.

    Raises:
        InfeasibleError: Says which constraint fails by how much at the nearest candidate, or what the smallest lacks.
    """
    table = fitted.table
    if np.any(table.why == FEASIBLE):
        return
    nearest = nearest_outside(table, objective)
    if nearest is not None:
        candidate = _record(fitted, nearest)
        broken = "; ".join(_broken(candidate, objective))
        where = f"the nearest is {_name(candidate)}: {broken}"
        raise InfeasibleError(f"plan: none of {table.rows:,} candidates keeps the constraints; {where}")
    smallest = _record(fitted, int(np.lexsort((table.global_batch, table.local_batch))[0]))
    advice = "lower search.min_batch, allow more nodes, or use a machine with more memory"
    why = f"{_name(smallest)}: {smallest.why}"
    raise InfeasibleError(f"plan: none of {table.rows:,} candidates is feasible; {why}; {advice}")


def binding(fitted: Fitted, objective: ObjectiveSpec, choice: Choice, train_time_s: TrainTime) -> list[str]:
    """Constraints that rule out what would be chosen without them, with what it would be."""
    table = fitted.table
    outside = np.isin(table.why, CONSTRAINED)
    if not outside.any():
        return []
    free = table._replace(why=np.where(outside, int(FEASIBLE), table.why))
    wished = choose(objective, free, train_time_s).ranking[0]
    if not outside[wished]:
        return []
    candidate = _record(fitted, int(wished))
    return [f"{_name(candidate)} would be chosen: {how}" for how in _broken(candidate, objective)]


def _broken(candidate: Candidate, objective: ObjectiveSpec) -> list[str]:
    found = [(constraint, breaks(constraint, candidate)) for constraint in constraints_of(objective)]
    return [text for constraint, text in found if constraint.is_broken_by(candidate)]


def _record(fitted: Fitted, row: int) -> Candidate:
    nobody: NDArray[np.bool_] = np.zeros(1, dtype=bool)
    return as_records(fitted.table.take([row]), fitted.parts, nobody)[0]


def _name(candidate: Candidate) -> str:
    return f"{candidate.configuration}{f' on {candidate.partition}' if candidate.partition else ''}"
