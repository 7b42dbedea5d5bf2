"""The plan's decision under many predictions at once: the nominal one and draws around it.

Prices and constraints are the plan's own (`planning.candidates.priced`, `planning.constraints`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.costs.pricing import NodePower
from tula_hpc.analysis.models.fitted import Models
from tula_hpc.analysis.models.memory import fit_memory
from tula_hpc.analysis.models.profiles import Summary, update_time
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.planning.candidates import (
    FEASIBLE,
    CandidateTable,
    Grid,
    Partition,
    Why,
    as_measured,
    predict,
    priced,
)
from tula_hpc.analysis.planning.constraints import CONSTRAINED, conceivable, constrain, excess
from tula_hpc.analysis.planning.knee import (
    DRAWS,
    SEED,
    Lines,
    TimeCurves,
    knee_curves,
    sampled_knees,
)
from tula_hpc.analysis.planning.memory_limit import allowed_bytes
from tula_hpc.analysis.planning.objective import choose, objective_time_s, weighted_score
from tula_hpc.analysis.planning.partitions import part_of, plannable, with_passes
from tula_hpc.config import ClusterSpec, ObjectiveSpec, SweepSpec
from tula_hpc.config.search import KNEES
from tula_hpc.errors import NotEnoughDataError
from tula_hpc.records import Configuration

# excess of candidates ruled out by memory, samples or time limits, not by the user
IMPOSSIBLE = 1.0
# replaces an unknown power, since energies can be compared without knowing it
SOME_POWER = NodePower(1.0, False)
# critical batch until the noise is measured: with it a sample is worth as much in every batch
NO_NOISE = 1e18


class Evaluated(NamedTuple):
    """Candidates (m,) under several predictions (k, m); the first is the nominal one."""

    # the objective, to be minimized; for a knee the time of an epoch, up to a factor
    value: Array
    # share of a limit by which constraints are broken; 0 or less: allowed
    excess: Array

    @property
    def eligible(self) -> NDArray[np.bool_]:
        """Candidates that can be chosen: the allowed ones, or those nearest to being allowed."""
        return np.asarray(self.excess <= np.maximum(self.excess.min(axis=1, keepdims=True), 0.0))

    @property
    def eligible_value(self) -> Array:
        """Values of eligible candidates, infinite elsewhere."""
        return np.where(self.eligible, self.value, np.inf)

    @property
    def hopeless(self) -> bool:
        """True if no prediction allows any candidate."""
        return bool(np.all(self.excess.min(axis=1) > 0.0))

    def loss(self, chosen: int) -> Array:
        """Return the nominal choice's relative loss under each other prediction, (k − 1,).

        It adds up the loss in value and the excess over the limits that the choice breaks.
        """
        best = self.eligible_value[1:].min(axis=1)
        worse = np.maximum(self.value[1:, chosen] / best - 1.0, 0.0)
        over = 1.0 + np.maximum(self.excess[1:], 0.0)
        return np.asarray(worse + over[:, chosen] / over.min(axis=1) - 1.0)


class Chosen(NamedTuple):
    """Configuration that the plan would choose."""

    configuration: Configuration
    step_time_s: float
    # expected seconds of the whole training; None: unknown
    training_s: float | None = None
    # the plan itself chooses it only after a profile has shown that its memory suffices
    needs_profile: bool = False


class DecisionModel(NamedTuple):
    """Objective and constraints of the plan."""

    kind: str = "knee"
    # holds the constraints; None: there are none, and cost is in node-seconds
    sweep: SweepSpec | None = None
    # holds prices and limits; None: likewise
    cluster: ClusterSpec | None = None

    @property
    def has_knee(self) -> bool:
        """True if the choice follows a knee of the curve of time over batch."""
        return self.kind in KNEES

    def known(self, summary: Summary) -> Summary:
        """Return the summary with the passes in which the plan's script takes its batches."""
        if self.sweep is None or self.cluster is None:
            return summary
        return with_passes(self.sweep, self.cluster, summary)

    def conceivable(self, candidates: Sequence[Configuration]) -> list[Configuration]:
        """Return the candidates with a batch that the constraints allow; all if they allow none."""
        if self.sweep is None:
            return list(candidates)
        global_batches = np.array([c.global_batch for c in candidates], dtype=np.int64)
        allowed = conceivable(self.sweep.objective, global_batches)
        return [c for c, is_allowed in zip(candidates, allowed, strict=True) if is_allowed]

    def evaluate(
        self, points: Sequence[Configuration], step_s: Array, model: StepTimeModel, summary: Summary
    ) -> Evaluated:
        """Evaluate the points (m,) under predicted step times (k, m), as the plan would."""
        grid = Grid(*np.array(points, dtype=np.int64).T)
        # a knee belongs to the model's smooth curve, without departures of measurements
        if not self.has_knee:
            step_s = as_measured(step_s, grid, summary, model)
        per_sample_s = step_s / grid.global_batch
        if self.sweep is None or self.cluster is None or summary.dataset_samples < 1:
            counts = self.kind in {"cost", "weighted"}
            workers = grid.nodes * grid.workers_per_node if counts else 1
            power = 0.5 if self.kind == "weighted" else 1.0
            return Evaluated(per_sample_s * workers**power, np.zeros_like(step_s))
        part = _part(self.sweep, self.cluster, summary, model)
        evaluated = _as_planned(self.sweep, part, grid, step_s)
        return evaluated._replace(value=per_sample_s) if self.has_knee else evaluated

    def knees(
        self, points: Sequence[Configuration], model: StepTimeModel, summary: Summary
    ) -> Array:
        """Return the knee of the fitted curve, then of each drawn one, (1 + draws,); NaN: none."""
        curves = None
        if self.sweep is not None and self.cluster is not None and summary.dataset_samples >= 1:
            part = _part(self.sweep, self.cluster, summary, model)
            with contextlib.suppress(NotEnoughDataError):
                curves = knee_curves((part,), self.sweep)
        # if no training ends within the time limit, no candidate has a curve
        if curves is None or not curves.lines.nodes.size:
            curves = _curves_through(points, model)
        return sampled_knees(self.kind, curves)

    def choices(self, summary: Summary, model: StepTimeModel) -> list[Chosen] | None:
        """Return the plan's choices from these measurements, by the plan's own code.

        The last one is the plan's choice as things are. One before it would become the choice if a
        profile showed that its memory suffices. The list is empty if nothing can be chosen; None if
        there is nothing to plan with.
        """
        if self.sweep is None or self.cluster is None or summary.dataset_samples < 1:
            return None
        part = _part(self.sweep, self.cluster, summary, model)
        try:
            grid, _ = plannable(self.sweep, part)
        except NotEnoughDataError:
            return []
        table = predict(0, part, grid, self.sweep)
        unseen = table.why == Why.UNSEEN
        tables = [table]
        if unseen.any():
            tables.insert(0, table._replace(why=np.where(unseen, int(FEASIBLE), table.why)))
        found = [_chosen(self.sweep, part, each, unseen) for each in tables]
        return [one for one in found if one is not None]


def _curves_through(points: Sequence[Configuration], model: StepTimeModel) -> TimeCurves:
    """Return the time of a sample over the batches of these configurations only."""
    ends: dict[tuple[int, int], list[int]] = {}
    for point in points:
        ends.setdefault(point[:2], []).append(point.global_batch)
    columns = [(0, *size, min(found), max(found)) for size, found in ends.items()]

    def nominal(_: int, nodes: Array, per_node: Array, batch: Array) -> Array:
        return model.predict(nodes, batch, per_node) / (nodes * per_node * batch)

    def drawn(_: int, nodes: Array, per_node: Array, batch: Array) -> Array:
        samples = model.samples(nodes, batch, per_node, count=DRAWS, seed=SEED)
        return samples / (nodes * per_node * batch)

    return TimeCurves(Lines(*np.array(columns, dtype=np.float64).T), nominal, drawn)


def _part(
    sweep: SweepSpec, cluster: ClusterSpec, summary: Summary, model: StepTimeModel
) -> Partition:
    memory = fit_memory(summary, allowed_bytes(cluster, summary.memory_uses))
    models = Models(model, memory, update_time(summary))
    part = part_of("", sweep, cluster, summary, models)
    noise = part.critical_batch or NO_NOISE
    return part._replace(power=part.power or SOME_POWER, critical_batch=noise)


def _chosen(
    sweep: SweepSpec, part: Partition, table: CandidateTable, unseen: NDArray[np.bool_]
) -> Chosen | None:
    table = constrain(table, sweep.objective)
    if not np.any(table.why == FEASIBLE):
        return None
    curves = knee_curves((part,), sweep, with_draws=False)
    row = int(choose(sweep.objective, table, curves).ranking[0])
    return Chosen(
        Configuration(*(int(column[row]) for column in table.grid)),
        float(table.step_time_s[row]),
        float(table.wall_time_s[row]),
        bool(unseen[row]),
    )


def _as_planned(sweep: SweepSpec, part: Partition, grid: Grid, step_s: Array) -> Evaluated:
    repeated = Grid(*(np.tile(column, len(step_s)) for column in grid))
    table = constrain(priced(0, part, repeated, sweep, step_s.ravel()), sweep.objective)
    # unseen memory is no reason to leave a batch out: a profile can show that it suffices
    possible = np.isin(table.why, [FEASIBLE, Why.UNSEEN, *CONSTRAINED])
    over = np.maximum(excess(table, sweep.objective), 0.0) + np.where(possible, 0.0, IMPOSSIBLE)
    value = _value(sweep.objective, table)
    return Evaluated(value.reshape(step_s.shape), over.reshape(step_s.shape))


def _value(objective: ObjectiveSpec, table: CandidateTable) -> Array:
    if objective.kind == "weighted":
        weights = objective.time_weight + objective.cost_weight
        score = weighted_score(objective, table.wall_time_s, table.cost)
        return np.asarray(np.exp(score / weights))
    # if nothing costs anything, the plan takes the fastest
    if objective.kind == "cost" and table.cost.any():
        return table.cost
    return objective_time_s(objective, table)
