"""Fit models to the measurements of each partition, and predict its candidates for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs.evaluation import END_SHARE, evaluation_of
from tula_hpc.analysis.costs.interruptions import Resume, measured_save_s, resume_of
from tula_hpc.analysis.costs.pricing import node_power
from tula_hpc.analysis.costs.spread import (
    ASSUMED_SAVES,
    MEASURED_SAVES,
    Spread,
    last_save_s,
    start_factors,
    with_start_and_save,
)
from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.critical_batch import CriticalBatch, critical_batch
from tula_hpc.analysis.models.fitted import Models, fit_models
from tula_hpc.analysis.models.memory import fit_memory
from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.planning.candidate_records import as_records
from tula_hpc.analysis.planning.candidates import (
    BELIEVED_FACTOR,
    CandidateTable,
    Grid,
    Partition,
    candidate_grid,
    predict,
    stacked,
)
from tula_hpc.analysis.planning.constraints import conceivable
from tula_hpc.analysis.planning.memory_limit import (
    allowed_bytes,
    checkpoint_copy_bytes,
    on_top_bytes,
)
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, cluster_sizes
from tula_hpc.errors import InputError, NotEnoughDataError
from tula_hpc.records import Candidate, Event, Measurement, Metrics, RunHistory, of_partition


class FittedPartitions(NamedTuple):
    """Partitions with models, and their candidates."""

    parts: tuple[Partition, ...]
    table: CandidateTable
    warnings: tuple[str, ...]
    # from the training's metrics, else from all profiles; None: too little was measured
    critical: CriticalBatch | None = None

    def record(self, row: int) -> Candidate:
        """Return a row of the table as a record."""
        return as_records(self.table.take([row]), self.parts)[0]


class Trained(NamedTuple):
    """Records of trainings of the run, if there were any."""

    metrics: Metrics | None = None
    events: Sequence[Event] = ()


def fit_parts(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    trained: Trained | None = None,
) -> FittedPartitions:
    """Fit models for every partition that has enough measurements, and predict its candidates.

    What a training measured counts for all partitions: the cost of a checkpoint as it is, the cost
    of evaluation as a ratio to the prediction for the partition where it ran.

    Raises:
        NotEnoughDataError: No partition has enough; the message gives the reason for each.
        InputError: A price needs a quantity that is not known.
    """
    trained = trained or Trained()
    parts: list[Partition] = []
    grids: list[Grid] = []
    warnings = _too_large(sweep, cluster)
    errors: list[NotEnoughDataError] = []
    by_name = cluster.by_name()
    for name, spec in by_name.items():
        try:
            part = _fit(name, sweep, spec, of_partition(measurements, name), trained)
            grid, left_out = plannable(sweep, part)
        except NotEnoughDataError as error:
            errors.append(error)
            warnings.append(f"partition {name} is left out: {error}")
            continue
        parts.append(part)
        grids.append(grid)
        warnings += [prefixed(name, text) for text in left_out]
    if not parts:
        lacks = [prefixed(name, str(e)) for name, e in zip(by_name, errors, strict=True)]
        raise NotEnoughDataError(f"plan: {'; '.join(lacks)}")
    critical = critical_batch(measurements, trained.metrics)
    if sweep.objective.kind == "progress" and critical is None:
        raise NotEnoughDataError(
            'plan: objective.kind = "progress" needs the noise of the gradient, and no profile '
            "could measure it; choose another kind"
        )
    batch, interval = (critical.batch, critical.interval_90) if critical else (None, None)
    parts = [
        part._replace(critical_batch=batch, critical_interval=interval)
        for part in _corrected(parts, trained)
    ]
    tables = [_predict(i, *pair, sweep) for i, pair in enumerate(zip(parts, grids, strict=True))]
    return FittedPartitions(tuple(parts), stacked(tables), tuple(warnings), critical)


def _predict(index: int, part: Partition, grid: Grid, sweep: SweepSpec) -> CandidateTable:
    try:
        return predict(index, part, grid, sweep)
    except InputError as error:
        source = f"partition {part.name}" if part.name else None
        raise InputError(str(error), source=source) from None


def _corrected(parts: list[Partition], trained: Trained) -> list[Partition]:
    names = {job.partition or "" for job in RunHistory(trained.events).submissions("train")}
    where = [part for part in parts if not part.name or names == {part.name}]
    # after trainings on several partitions, no evaluation can be assigned to one of them
    if trained.metrics is None or not where:
        return parts
    found = where[0].evaluation.corrected(trained.metrics.epochs)
    return [part._replace(evaluation=part.evaluation.corrected_as(found)) for part in parts]


def _too_large(sweep: SweepSpec, cluster: ClusterSpec) -> list[str]:
    most = max(part.max_nodes for part in cluster.parts())
    left_out = [f"N={nodes}" for nodes in sweep.search.cluster_sizes if nodes > most]
    if not left_out:
        return []
    return [
        f"left out of search.cluster_sizes: {', '.join(left_out)}, more than max_nodes = {most}"
    ]


def prefixed(name: str, text: str) -> str:
    """Return the text with the name of its partition in front, if it has one."""
    return f"{name}: {text}" if name else text


def name_of(candidate: Candidate) -> str:
    """Return the configuration of a candidate, and its partition, if it has one."""
    name = f"{candidate.configuration}{candidate.in_parts}"
    return f"{name} on {candidate.partition}" if candidate.partition else name


def _fit(
    name: str,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    measurements: Sequence[Measurement],
    trained: Trained,
) -> Partition:
    summary = with_passes(sweep, cluster, summarize(measurements))
    grid = candidate_grid(sweep.search, cluster)
    wanted = grid.local_batch[conceivable(sweep.objective, grid.global_batch)]
    if not wanted.size:
        raise NotEnoughDataError(f"no candidate: {_no_candidate(sweep.search, cluster)}")
    bound = max(summary.oom_bound(alone=True), summary.oom_bound(alone=False))
    at_once = summary.passes.batch_of_one(wanted).astype(np.int64)
    possible = {batch for batch in at_once.tolist() if batch < bound}
    limit = allowed_bytes(cluster, summary.memory_uses)
    models = fit_models(summary, limit, sweep.search.form, possible)
    save_s = measured_save_s(trained.events)
    return part_of(name, sweep, cluster, summary, models, save_s=save_s)


def _no_candidate(search: SearchSpec, cluster: ClusterSpec) -> str:
    sizes = cluster_sizes(search, cluster)
    if not sizes:
        return f"max_nodes = {cluster.max_nodes} is below every cluster size"
    ends = [str(nodes * cluster.workers_per_node) for nodes in sorted({min(sizes), max(sizes)})]
    workers = f"each of {' to '.join(ends)} workers"
    if ends == ["1"]:
        workers = "the only worker"
    return f"no batch {_bounds(search)} gives {workers} a power of two; widen the bounds"


def _bounds(search: SearchSpec) -> str:
    least = f"search.min_batch = {search.min_batch}"
    return f"between {least} and search.max_batch = {search.max_batch}"


def part_of(
    name: str,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    summary: Summary,
    models: Models,
    *,
    save_s: float | None = None,
) -> Partition:
    """Return a partition: models, and costs from profiles, files and a save that was measured."""
    evaluation = evaluation_of(
        summary.profiles, sweep.workload, summary.dataset_samples, summary.test_samples
    )
    copy_bytes = checkpoint_copy_bytes(summary)
    pricing = with_start_and_save(cluster.pricing, summary.start_s, copy_bytes)
    starts_s = summary.starts_s if cluster.pricing.restart_s is None else ()
    kept = any(profile.kept for profile in summary.profiles)
    resume = resume_of(sweep.workload, kept)
    saves = ASSUMED_SAVES if save_s is None else MEASURED_SAVES
    # the time between a script's epochs includes its saving
    includes_saving = resume is Resume.EPOCH and evaluation.between_s is not None
    if save_s is None and (includes_saving or resume is Resume.NOTHING):
        save_s = 0.0
    last_s = last_save_s(copy_bytes, pricing.save_s if save_s is None else save_s)
    return Partition(
        name,
        cluster.model_copy(update={"pricing": pricing}),
        summary,
        models,
        node_power(summary.profiles, pricing),
        evaluation,
        Spread(start_factors(starts_s), saves, last_s),
        end_s=END_SHARE * pricing.start_s if starts_s else 0.0,
        save_s=save_s,
        resume=resume,
        critical_batch=summary.critical_batch,
        base_batch=sweep.training.base_batch,
    )


def with_passes(sweep: SweepSpec, cluster: ClusterSpec, summary: Summary) -> Summary:
    """Return the summary with the number of passes in which a script takes its batches.

    A batch takes the fewest passes for which the batch of one pass is below every one that ran out
    of memory and, if two were measured, the memory model predicts that it fits.
    """
    if not sweep.workload.accumulates:
        return summary
    most = _largest_pass(sweep, cluster, summary)
    return summary._replace(passes=Passes(most, sweep.workload.accumulation))


def _largest_pass(sweep: SweepSpec, cluster: ClusterSpec, summary: Summary) -> float:
    sizes = np.exp2(np.arange(sweep.search.max_batch.bit_length(), dtype=np.float64))
    bound = min(summary.oom_bound(alone=True), summary.oom_bound(alone=False))
    fits = sizes < bound
    limit = allowed_bytes(cluster, summary.memory_uses)
    seen = {row.configuration.local_batch for row in summary.of_one_pass}
    if limit is not None and len(seen) > 1:
        memory = fit_memory(summary, limit)
        workers = np.array(max(row.configuration.world_size for row in summary.profiles))
        allowed = limit - on_top_bytes(summary, cluster, sweep.training, workers)
        _, high = memory.interval(sizes, workers=workers)
        believed = (sizes <= BELIEVED_FACTOR * max(seen)) | (high <= allowed)
        fits &= believed & (memory.predict(sizes, workers) <= allowed)
    if fits.all():
        return np.inf
    # the largest batch up to which all fit; a single sample is tried in any case
    return float(sizes[max(0, int(np.argmin(fits)) - 1)])


def plannable(sweep: SweepSpec, part: Partition) -> tuple[Grid, list[str]]:
    """Return the candidates on measured cluster sizes, and a warning about the others.

    Raises:
        NotEnoughDataError: No candidate is on the only cluster size that was measured.
    """
    wanted = candidate_grid(sweep.search, part.cluster)
    sizes = {profile.configuration.nodes for profile in part.summary.profiles}
    if len(sizes) > 1:
        return wanted, []
    kept = wanted.take(np.isin(wanted.nodes, list(sizes)))
    (only,) = sizes
    if not len(kept.nodes):
        why = _not_planned(only, sweep.search, part.cluster)
        raise NotEnoughDataError(
            f"only N={only} was measured, {why}; "
            "a sweep with a new --run-dir profiles the cluster sizes that can be planned"
        )
    left = sorted(set(np.unique(wanted.nodes).tolist()) - sizes)
    if not left:
        return kept, []
    names = ", ".join(f"N={nodes}" for nodes in left)
    return kept, [f"only N={only} was measured: nothing can be said about {names}"]


def _not_planned(nodes: int, search: SearchSpec, cluster: ClusterSpec) -> str:
    if nodes not in search.cluster_sizes:
        return "which is not in search.cluster_sizes"
    if nodes > cluster.max_nodes:
        return f"which is more than max_nodes = {cluster.max_nodes}"
    return f"where no batch {_bounds(search)} gives each worker a power of two"
