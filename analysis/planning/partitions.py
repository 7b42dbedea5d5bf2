"""Each kind of nodes with its own measurements and models: what the candidates of a plan are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs.evaluation import evaluation_of, with_start
from tula_hpc.analysis.costs.interruptions import measured_cost
from tula_hpc.analysis.costs.pricing import node_power
from tula_hpc.analysis.models.fitted import Models, fit_models
from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.planning.candidates import (
    CandidateTable,
    Grid,
    Part,
    allowed_bytes,
    candidate_grid,
    conceivable,
    predict,
    stacked,
)
from tula_hpc.analysis.planning.memory_limit import memory_limit_bytes
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, cluster_sizes
from tula_hpc.errors import InputError, NotEnoughDataError
from tula_hpc.records import Candidate, Event, Measurement, Metrics, RunHistory


class Fitted(NamedTuple):
    """What can be planned."""

    parts: tuple[Part, ...]
    table: CandidateTable
    warnings: tuple[str, ...]


class Trained(NamedTuple):
    """What trainings of the run have left, if there were any."""

    metrics: Metrics | None = None
    events: Sequence[Event] = ()


def fit_parts(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    trained: Trained | None = None,
) -> Fitted:
    """Fit models for every partition that has measurements enough, and predict its candidates.

    What a training measured of evaluation and checkpoints counts for all of them: of a checkpoint
    its cost, of evaluation the ratio to what is predicted for the partition where it ran.

    Raises:
        NotEnoughDataError: No partition has; the message says what each of them lacks.
        InputError: Prices that need what is not known.
    """
    trained = trained or Trained()
    parts: list[Part] = []
    grids: list[Grid] = []
    warnings = _too_large(sweep, cluster)
    errors: list[NotEnoughDataError] = []
    for name, spec in zip(cluster.part_names(), cluster.parts(), strict=True):
        try:
            part = _fit(name, sweep, spec, of_part(measurements, name), trained)
            grid, left_out = _plannable(sweep, part)
        except NotEnoughDataError as error:
            errors.append(error)
            warnings.append(f"partition {name} is left out: {_lack(error)}")
            continue
        parts.append(part)
        grids.append(grid)
        warnings += [prefixed(name, text) for text in left_out]
    if not parts:
        lacks = zip(cluster.part_names(), errors, strict=True)
        raise NotEnoughDataError(
            f"plan: {'; '.join(prefixed(name, _lack(error)) for name, error in lacks)}"
        )
    parts = _corrected(parts, trained)
    tables = [
        _predicted(place, part, grid, sweep)
        for place, (part, grid) in enumerate(zip(parts, grids, strict=True))
    ]
    return Fitted(tuple(parts), stacked(tables), tuple(warnings))


def _corrected(parts: list[Part], trained: Trained) -> list[Part]:
    """With the ratio of measured evaluations to those predicted; as they are where nobody knows which part trained."""
    names = {job.partition or "" for job in RunHistory(trained.events).submissions("train")}
    where = next((part for part in parts if not part.name or names == {part.name}), None)
    if trained.metrics is None or where is None:
        return parts
    found = where.evaluation.corrected(trained.metrics.epochs)
    return [part._replace(evaluation=part.evaluation.corrected_as(found)) for part in parts]


def _lack(error: NotEnoughDataError) -> str:
    return str(error).removeprefix("plan: ")


def _too_large(sweep: SweepSpec, cluster: ClusterSpec) -> list[str]:
    """A warning about cluster sizes that no partition has the nodes for."""
    possible = {nodes for part in cluster.parts() for nodes in cluster_sizes(sweep.search, part)}
    names = ", ".join(f"N={nodes}" for nodes in sweep.search.cluster_sizes if nodes not in possible)
    most = max(part.max_nodes for part in cluster.parts())
    return (
        [f"left out of search.cluster_sizes: {names}, more than max_nodes = {most}"]
        if names
        else []
    )


def _predicted(place: int, part: Part, grid: Grid, sweep: SweepSpec) -> CandidateTable:
    try:
        return predict(place, part, grid, sweep)
    except InputError as error:
        raise InputError(
            str(error), source=f"partition {part.name}" if part.name else None
        ) from None


def of_part(measurements: Sequence[Measurement], name: str) -> Sequence[Measurement]:
    """The measurements of one partition; all of them where the cluster has none."""
    return [row for row in measurements if row.partition == name] if name else measurements


def prefixed(name: str, text: str) -> str:
    """The text with the name of its partition in front, where there is one."""
    return f"{name}: {text}" if name else text


def name_of(candidate: Candidate) -> str:
    """Its configuration, and on which partition, where there are several."""
    return f"{candidate.configuration}{f' on {candidate.partition}' if candidate.partition else ''}"


def _fit(
    name: str,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    trained: Trained,
) -> Part:
    summary = summarize(measurements)
    grid = candidate_grid(sweep.search, cluster)
    wanted = {
        int(batch) for batch in grid.local_batch[conceivable(sweep.objective, grid.global_batch)]
    }
    if not wanted:
        raise NotEnoughDataError(f"plan: no candidate: {_no_candidate(sweep.search, cluster)}")
    bound = max(summary.oom_bound(alone=alone) for alone in (True, False))
    possible = {batch for batch in wanted if batch < bound}
    models = fit_models(summary, fitting_limit(cluster, summary), sweep.search.form, possible)
    return part_of(name, sweep, cluster, summary, models)._replace(
        save=measured_cost(trained.events)
    )


def _no_candidate(search: SearchSpec, cluster: ClusterSpec) -> str:
    """Why no cluster size has a batch, and what to change."""
    sizes = cluster_sizes(search, cluster)
    if not sizes:
        return f"max_nodes = {cluster.max_nodes} is below every cluster size"
    workers = " to ".join(
        str(nodes * cluster.workers_per_node) for nodes in sorted({min(sizes), max(sizes)})
    )
    return f"no batch {_bounds(search)} gives each of {workers} workers a power of two; widen the bounds"


def _bounds(search: SearchSpec) -> str:
    return (
        f"between search.min_batch = {search.min_batch} and search.max_batch = {search.max_batch}"
    )


def part_of(
    name: str, sweep: SweepSpec, cluster: ClusterSpec, summary: Summary, models: Models
) -> Part:
    """One kind of nodes before any training: models, and what profiles and files say beside them."""
    evaluation = evaluation_of(
        summary.profiles, sweep.workload, summary.dataset_samples, summary.test_samples
    )
    priced = with_start(cluster, summary.start_s)
    return Part(
        name, priced, summary, models, node_power(summary.profiles, cluster.pricing), evaluation
    )


def fitting_limit(cluster: ClusterSpec, summary: Summary) -> float | None:
    """Bytes of a worker for the memory model's bounds: what the margin leaves, as the rest may have been in use."""
    limit = memory_limit_bytes(cluster, summary.memory_uses)
    return None if limit is None else allowed_bytes(limit, cluster.memory_margin)


def _plannable(sweep: SweepSpec, part: Part) -> tuple[Grid, list[str]]:
    """The candidates that the measurements can say something about, and a warning about the others."""
    wanted = candidate_grid(sweep.search, part.cluster)
    sizes = {profile.configuration.nodes for profile in part.summary.profiles}
    if len(sizes) > 1:
        return wanted, []
    kept = wanted.take(np.isin(wanted.nodes, list(sizes)))
    if not len(kept.nodes):
        message = f"plan: only N={min(sizes)} was measured, {_not_planned(min(sizes), sweep.search, part.cluster)}"
        raise NotEnoughDataError(
            f"{message}; a sweep with a new --run-dir profiles the cluster sizes that can be planned"
        )
    left = sorted({int(nodes) for nodes in np.unique(wanted.nodes)} - sizes)
    names = ", ".join(f"N={nodes}" for nodes in left)
    return kept, [
        f"only N={min(sizes)} was measured: nothing can be said about {names}"
    ] if left else []


def _not_planned(nodes: int, search: SearchSpec, cluster: ClusterSpec) -> str:
    """Why a cluster size has no candidate."""
    if nodes not in search.cluster_sizes:
        return "which is not in search.cluster_sizes"
    if nodes > cluster.max_nodes:
        return f"which is more than max_nodes = {cluster.max_nodes}"
    return f"where no batch {_bounds(search)} gives each worker a power of two"
