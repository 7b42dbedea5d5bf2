"""Will it scale? Strong and weak scaling over the number of nodes N, measured and predicted.

Strong scaling splits the plan's global batch B over more and more nodes; weak scaling gives every
worker the plan's local batch b. t is the seconds of a step, and N₀ the smallest number of nodes
that was profiled and can run the batch:

    speed-up   = (B / t) / (B₀ / t₀)    samples per second, against those on N₀ nodes
    efficiency = speed-up / (N / N₀)
    node-hours = N · T                  T: the whole training as the plan expects it, with
                                        evaluation, checkpoints, starts and interruptions

Step times are the plan's: measured ones, or else those of the model that is fitted to all
measurements. Intervals hold the truth with 90 % probability. Those of times and node-hours are the
plan's. In those of speed-up and efficiency errors that both steps share cancel: each model drawn
from the fit's uncertainty predicts both steps, and the covariance of the two steps counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from tula_hpc.analysis.costs.spread import WIDEST, Z_90
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.planning.candidate_records import as_records
from tula_hpc.analysis.planning.candidates import (
    FEASIBLE,
    CandidateTable,
    Grid,
    Partition,
    Why,
    predict,
)
from tula_hpc.analysis.planning.objective import objective_of
from tula_hpc.analysis.planning.partitions import FittedPartitions, fit_parts
from tula_hpc.analysis.run_contents import RunContents, as_planned, evenly, measured_epochs
from tula_hpc.config import ClusterSpec, SweepSpec, cluster_sizes
from tula_hpc.errors import InputError, NotEnoughDataError
from tula_hpc.formatting import HOUR_S, listed
from tula_hpc.records import Candidate, Configuration, Interval, Measurement, of_partition

Kind = Literal["strong", "weak"]
Basis = Literal["measured", "predicted", "extrapolated"]

# predictions go on to these multiples of the largest profiled number of nodes
BEYOND = (2, 4)
# most numbers of nodes in a curve; more are thinned evenly
MOST_SIZES = 24
# most numbers of nodes in a sentence
MOST_LISTED = 6
# models drawn from the fit's uncertainty
DRAWS = 1000
SEED = 0
UNEVEN = "the batch has no equal shares"
REASONS = {
    Why.SAMPLES: "the data has no full batch",
    Why.OUT_OF_MEMORY: "does not fit in memory",
    Why.MEMORY: "does not fit in memory",
    Why.UNSEEN: "may not fit in memory, as no batch near it was measured",
    Why.FOREVER: "needs longer jobs than train_minutes allows",
    Why.DIVERGED: "has no finite loss",
}


class ScalingRow(NamedTuple):
    """Prediction for one number of nodes, with its measurement if there is one."""

    candidate: Candidate
    basis: Basis
    speed_up: Interval
    efficiency: Interval
    # times of a step and an epoch measured by this row's own profiles
    measured_step_s: float | None
    measured_epoch_s: float | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes, N."""
        return self.candidate.nodes

    @property
    def step_s(self) -> Interval:
        """Seconds of a step."""
        return self.candidate.predicted("step_time_s")

    @property
    def epoch_s(self) -> Interval:
        """Seconds of an epoch."""
        return self.candidate.predicted("epoch_time_s")

    @property
    def training_s(self) -> Interval:
        """Expected seconds of the whole training."""
        return self.candidate.predicted("wall_time_s")

    @property
    def node_hours(self) -> Interval:
        """Node-hours of the whole training."""
        return self.training_s.times(self.nodes / HOUR_S)


class ScalingCurve(NamedTuple):
    """Scaling of one batch over the number of nodes."""

    kind: Kind
    # strong: B of every row; weak: b of every row
    batch: int
    # ascending from N₀; at least two rows, or none for the reason in `why`
    rows: list[ScalingRow]
    why: str = ""
    # numbers of nodes that cannot run the batch, by reason
    left_out: Mapping[str, Sequence[int]] = {}

    @property
    def name(self) -> str:
        """Stem of the curve's files, and name of its figure."""
        return f"{self.kind}_scaling"

    @property
    def base(self) -> ScalingRow:
        """Row of N₀, with which the others are compared."""
        return self.rows[0]

    @property
    def nodes(self) -> list[int]:
        """Number of nodes of each row."""
        return [row.nodes for row in self.rows]

    def measured_speed_up(self, row: ScalingRow) -> float | None:
        """Return the speed-up of measured steps; None unless the row and N₀ were measured."""
        if row.measured_step_s is None or self.base.measured_step_s is None:
            return None
        batches = row.candidate.global_batch / self.base.candidate.global_batch
        return batches * self.base.measured_step_s / row.measured_step_s


class NodeScaling(NamedTuple):
    """Both kinds of scaling of a run, and their sources."""

    strong: ScalingCurve
    weak: ScalingCurve
    # name of the run, and of its partition if it has one
    name: str = ""
    # profiled numbers of nodes, ascending
    profiled_sizes: tuple[int, ...] = ()
    # profiled configurations
    configurations: int = 0
    epochs: int = 0
    # limit in the cluster file
    max_nodes: int = 0
    # measured "nodes" shared one machine
    emulated: bool = False
    # models of all partitions, from which the rows come; None: they could not be fitted
    fitted: FittedPartitions | None = None

    @property
    def curves(self) -> tuple[ScalingCurve, ...]:
        """Return the curves that have rows."""
        return tuple(curve for curve in (self.strong, self.weak) if not curve.why)


def no_scaling(why: str) -> NodeScaling:
    """Return a scaling without rows that holds the reason."""
    return NodeScaling(ScalingCurve("strong", 0, [], why), ScalingCurve("weak", 0, [], why))


def failed(error: Exception) -> str:
    """Return the reason why nothing is predicted after an unexpected error."""
    return f"it could not be predicted, {type(error).__name__}: {error}"


def node_scaling_of(run: RunContents) -> NodeScaling:
    """Fit a run's models as for its plan, and predict both kinds of scaling where it chose."""
    if run.plan is None:
        return no_scaling("its batch comes with the plan, and there is none yet")
    if run.sweep is None or run.cluster is None:
        return no_scaling("sweep.toml or cluster.toml is missing or damaged")
    objective = objective_of(run.plan, run.sweep.objective)
    sweep = run.sweep.model_copy(update={"objective": objective})
    try:
        fitted = fit_parts(sweep, run.cluster, run.measurements)
    except (NotEnoughDataError, InputError) as error:
        return no_scaling(str(error))
    chosen = run.plan.chosen
    names = ("", chosen.partition)
    part = next((part for part in fitted.parts if part.name in names), None)
    if part is None:
        why = f"partition {chosen.partition} of the plan has too few measurements"
        return no_scaling(why)._replace(fitted=fitted)
    where = f" on partition {chosen.partition}" if chosen.partition else ""
    measured = of_partition(as_planned(run.measurements, run.plan), part.name)
    try:
        scaling = part_scaling(part, sweep, chosen, measured)
    except Exception as error:  # noqa: BLE001 - the report needs the models for the what-if
        scaling = no_scaling(failed(error))
    return scaling._replace(name=f"{run.name}{where}", fitted=fitted)


def part_scaling(
    part: Partition, sweep: SweepSpec, chosen: Candidate, measurements: Iterable[Measurement] = ()
) -> NodeScaling:
    """Predict the scaling of a chosen candidate's batches on one partition.

    `measurements` of that partition give the measured epoch times; nothing else depends on them.
    """
    profiles = part.summary.profiles
    profiled = tuple(sorted({profile.configuration.nodes for profile in profiles}))
    if len(profiled) < 2:
        (only,) = profiled
        return no_scaling(f"only N = {only} was profiled, which says nothing about other N")
    sizes = _sizes(profiled, sweep, part.cluster, chosen.nodes)
    epochs_s = measured_epochs(measurements, part.summary.dataset_samples)
    return NodeScaling(
        _curve("strong", part, sweep, chosen, sizes=sizes, epochs_s=epochs_s),
        _curve("weak", part, sweep, chosen, sizes=sizes, epochs_s=epochs_s),
        profiled_sizes=profiled,
        configurations=len(profiles),
        epochs=sweep.workload.epochs,
        max_nodes=part.cluster.max_nodes,
        emulated=any(profile.emulated for profile in profiles),
    )


def _sizes(
    profiled: Sequence[int], sweep: SweepSpec, cluster: ClusterSpec, chosen: int
) -> list[int]:
    """Return the numbers of nodes: chosen, profiled, in the search, and doublings beyond these."""
    doublings = [factor * profiled[-1] for factor in BEYOND]
    asked = (*cluster_sizes(sweep.search, cluster), cluster.max_nodes)
    possible = [nodes for nodes in asked if profiled[0] <= nodes <= doublings[-1]]
    return sorted({chosen, *profiled, *possible, *doublings})


def _curve(
    kind: Kind,
    part: Partition,
    sweep: SweepSpec,
    chosen: Candidate,
    *,
    sizes: Sequence[int],
    epochs_s: Mapping[Configuration, float],
) -> ScalingCurve:
    batch = chosen.global_batch if kind == "strong" else chosen.local_batch
    left_out: dict[str, list[int]] = {}
    table = predict(0, part, _grid(kind, chosen, sizes, left_out), sweep)
    for nodes, why in zip(table.nodes.tolist(), table.why.tolist(), strict=True):
        if why != FEASIBLE:
            reason = REASONS[Why(why)]
            if why == Why.FOREVER and part.cluster.pricing.basis == "spot":
                reason = "interruptions leave no time for work"
            left_out.setdefault(reason, []).append(nodes)
    table = table.take(table.why == FEASIBLE)
    profiled = {profile.configuration.nodes for profile in part.summary.profiles}
    base = next((n for n in table.nodes.tolist() if n in profiled), None)
    if base is not None:
        table = table.take(table.nodes >= base)
    if base is None or table.rows < 2:
        return ScalingCurve(kind, batch, [], _why_not(kind, batch, left_out), left_out)
    # thinned only now, so that the base is never left out
    shown = {*evenly(table.nodes.tolist(), MOST_SIZES), chosen.nodes}
    table = table.take(np.isin(table.nodes, list(shown)))
    return ScalingCurve(kind, batch, _rows(table, part, epochs_s), left_out=left_out)


def _grid(
    kind: Kind, chosen: Candidate, sizes: Iterable[int], left_out: dict[str, list[int]]
) -> Grid:
    """Return the configurations of all sizes; those that cannot split B go to `left_out`."""
    kept = []
    for nodes in sizes:
        local = chosen.local_batch
        rest = 0
        if kind == "strong":
            local, rest = divmod(chosen.global_batch, nodes * chosen.workers_per_node)
        if rest:
            left_out.setdefault(UNEVEN, []).append(nodes)
        else:
            kept.append((nodes, chosen.workers_per_node, local))
    return Grid(*np.array(kept, dtype=np.int64).reshape(-1, 3).T)


def _why_not(kind: Kind, batch: int, left_out: Mapping[str, Sequence[int]]) -> str:
    which = f"global batch {batch:,}" if kind == "strong" else f"local batch {batch:,}"
    because = describe_left_out(left_out)
    text = f"no two numbers of nodes, the fewest of them profiled, can run {which}"
    return f"{text}; left out: {because}" if because else text


def describe_left_out(left_out: Mapping[str, Sequence[int]]) -> str:
    """Return for example "N = 1 (does not fit in memory), N = 3 (no equal shares)"."""
    return ", ".join(f"N = {listed_sizes(nodes)} ({why})" for why, nodes in left_out.items())


def listed_sizes(nodes: Sequence[int]) -> str:
    """Return for example "1, 2 and 4"; of many numbers the first two and the last."""
    texts = [f"{count:,}" for count in nodes]
    if len(nodes) > MOST_LISTED:
        return f"{texts[0]}, {texts[1]}, ..., {texts[-1]}"
    return listed(texts)


def _rows(
    table: CandidateTable, part: Partition, epochs_s: Mapping[Configuration, float]
) -> list[ScalingRow]:
    """Return the rows of candidates, which ascend by nodes and begin with N₀."""
    candidates = as_records(table, [part])
    measured = {row.configuration: row.times.step_time_s for row in part.summary.as_planned}
    speed = table.global_batch / table.step_time_s
    value = speed / speed[0]
    low, high = _ends(table, part, value)
    # drawn models may miss steps that were measured: no end is beyond what both steps allow
    step_s, least_s, most_s = np.array([item.predicted("step_time_s") for item in candidates]).T
    low = np.maximum(low, value * (least_s[0] / step_s[0]) * (step_s / most_s))
    high = np.minimum(high, value * (most_s[0] / step_s[0]) * (step_s / least_s))
    rows = []
    for candidate, *ends in zip(candidates, *np.stack([value, low, high]).tolist(), strict=True):
        speed_up = Interval(*ends)
        efficiency = speed_up.times(candidates[0].nodes / candidate.nodes)
        own = candidate.configuration
        times_s = (measured.get(own), epochs_s.get(own))
        rows.append(ScalingRow(candidate, _basis(candidate, part), speed_up, efficiency, *times_s))
    return rows


def _ends(table: CandidateTable, part: Partition, value: Array) -> tuple[Array, Array]:
    """Return both ends (n,) of the intervals around the speed-ups `value`.

    Drawn models do not show how far unmeasured batches depart from the law; the covariance of the
    predictions does. At each end the wider of the two intervals counts. Noise of the measured steps
    widens the latter, see `Summary.noise`.
    """
    model = part.models.step_time
    where = (table.nodes, table.local_batch, table.workers_per_node)
    relative = table.step_time_s / model.samples(*where, count=DRAWS, seed=SEED)
    relative /= relative[:, :1]
    low, high = np.quantile(np.clip(relative, 1.0 / WIDEST, WIDEST), [0.05, 0.95], axis=0)
    shared = model.covariance(*where)
    variance = np.diag(shared) + shared[0, 0] - 2.0 * shared[0]
    width = Z_90 * model.spread_ * np.sqrt(np.maximum(variance, 0.0))
    noise = part.summary.noise(zip(*table.grid, strict=True))
    # noise of the row and of N₀; the speed-up of N₀ over itself is exactly 1
    width[1:] = np.hypot(width[1:], np.hypot(noise[1:], noise[0]))
    factor = np.exp(np.minimum(width, np.log(WIDEST)))
    return value * np.minimum(low, 1.0 / factor), value * np.maximum(high, factor)


def _basis(candidate: Candidate, part: Partition) -> Basis:
    if candidate.measured:
        return "measured"
    known = [profile.configuration for profile in part.summary.profiles]
    nodes, _, batches = zip(*known, strict=True)
    inside = min(nodes) <= candidate.nodes <= max(nodes)
    inside &= min(batches) <= candidate.local_batch <= max(batches)
    # storage that all nodes share may hold up steps with more samples than any that was measured
    inside &= candidate.global_batch <= max(each.global_batch for each in known)
    return "predicted" if inside else "extrapolated"
