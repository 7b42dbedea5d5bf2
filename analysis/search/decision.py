"""What the search aims at: the choice that the plan will make, with its prices and its constraints.

The plan's own functions say what a candidate costs and what rules it out (`table.priced`,
`constraints.constrain`); here they judge the candidates under many predictions at once: the nominal
one and draws from its uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.costs.pricing import NodePower
from tula_hpc.analysis.models.fitted import with_step_time
from tula_hpc.analysis.models.profiles import Summary
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.planning.candidates import (
    FEASIBLE,
    CandidateTable,
    Grid,
    Part,
    conceivable,
    priced,
)
from tula_hpc.analysis.planning.constraints import CONSTRAINED, constrain, excess
from tula_hpc.analysis.planning.objective import weighted_score
from tula_hpc.analysis.planning.partitions import fitting_limit, part_of
from tula_hpc.config import ClusterSpec, ObjectiveSpec, SweepSpec
from tula_hpc.records import Configuration

Array = NDArray[np.float64]

# excess of what is ruled out by memory, samples or time limits, not by the user
IMPOSSIBLE = 1.0
# where none is known energy is compared, not told
SOME_POWER = NodePower(1.0, False)


class Judged(NamedTuple):
    """Candidates (m,) under several predictions (k, m); the first is the nominal one."""

    # what the objective makes least; of "knee" the time of an epoch, up to a factor
    value: Array
    # by how much of a limit each breaks the constraints; 0 or less: it is allowed
    excess: Array
    # what can run, whatever the user allows
    possible: NDArray[np.bool_]

    @property
    def eligible(self) -> NDArray[np.bool_]:
        """What can be chosen: the allowed candidates, and where there are none those that come nearest to it."""
        return np.asarray(self.excess <= np.maximum(self.excess.min(axis=1, keepdims=True), 0.0))

    @property
    def allowed_value(self) -> Array:
        """The value of what can be chosen, infinite elsewhere."""
        return np.where(self.eligible, self.value, np.inf)

    @property
    def hopeless(self) -> bool:
        """Whether no prediction allows any candidate."""
        return bool(np.all(self.excess.min(axis=1) > 0.0))

    def loss(self, chosen: int) -> Array:
        """(k − 1,), what the nominal choice loses under each other prediction: its value and what it breaks."""
        values, over = self.allowed_value[1:], 1.0 + np.maximum(self.excess[1:], 0.0)
        worse = np.maximum(self.value[1:, chosen] / values.min(axis=1) - 1.0, 0.0)
        return np.asarray(worse + over[:, chosen] / over.min(axis=1) - 1.0)


class Aim(NamedTuple):
    """What the decision will be made by."""

    # knee, time, cost or weighted
    kind: str = "knee"
    # with its constraints; None: there are none, and cost is node-seconds
    sweep: SweepSpec | None = None
    # with prices and limits; None: likewise
    cluster: ClusterSpec | None = None

    def conceivable(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Those whose batch the constraints allow, before anything is measured; all where none is."""
        if self.sweep is None:
            return list(candidates)
        allowed = conceivable(
            self.sweep.objective, np.array([c.global_batch for c in candidates], dtype=np.int64)
        )
        return [candidate for candidate, one in zip(candidates, allowed, strict=True) if one]

    def judge(
        self, points: Sequence[Configuration], step_s: Array, model: StepTimeModel, summary: Summary
    ) -> Judged:
        """The points (m,) with their predicted step times (k, m), as the plan would see them."""
        grid = Grid(*np.array(points, dtype=np.int64).T)
        per_sample_s = step_s / grid.global_batch
        if self.sweep is None or self.cluster is None or summary.dataset_samples < 1:
            workers = 1 if self.kind in {"knee", "time"} else grid.nodes * grid.workers_per_node
            power = 0.5 if self.kind == "weighted" else 1.0
            return Judged(
                per_sample_s * workers**power,
                np.zeros_like(step_s),
                np.ones(step_s.shape, dtype=bool),
            )
        judged = _as_planned(
            self.sweep, _part(self.sweep, self.cluster, summary, model), grid, step_s
        )
        return judged._replace(value=per_sample_s) if self.kind == "knee" else judged


def _part(sweep: SweepSpec, cluster: ClusterSpec, summary: Summary, model: StepTimeModel) -> Part:
    part = part_of(
        "", sweep, cluster, summary, with_step_time(summary, fitting_limit(cluster, summary), model)
    )
    return part._replace(power=part.power or SOME_POWER)


def _as_planned(sweep: SweepSpec, part: Part, grid: Grid, step_s: Array) -> Judged:
    many = Grid(*(np.tile(column, len(step_s)) for column in grid))
    table = constrain(priced(0, part, many, sweep, step_s.ravel()), sweep.objective)
    possible = np.isin(table.why, [FEASIBLE, *CONSTRAINED])
    over = np.maximum(excess(table, sweep.objective), 0.0) + IMPOSSIBLE * ~possible
    value, shape = _value(sweep.objective, table), step_s.shape
    return Judged(value.reshape(shape), over.reshape(shape), possible.reshape(shape))


def _value(objective: ObjectiveSpec, table: CandidateTable) -> Array:
    if objective.kind == "weighted":
        return np.asarray(
            np.exp(
                weighted_score(objective, table) / (objective.time_weight + objective.cost_weight)
            )
        )
    # then the plan takes the fastest
    free = not table.cost.any()
    return table.cost if objective.kind == "cost" and not free else table.wall_time_s
