"""What of a sweep a cluster can run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.search import SearchSpec, local_batches
from tula_hpc.config.study import StudySpec
from tula_hpc.config.study_columns import study_column
from tula_hpc.config.sweep import SweepSpec
from tula_hpc.errors import InputError


def check_together(sweep: SweepSpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str) -> None:
    """Refuse a sweep that the cluster cannot run.

    Raises:
        InputError: Too many nodes, a precision that the device lacks, no candidate between the batch bounds, or a batch
            of a study that the workers cannot share.
    """
    if sweep.study is not None:
        _check_study(sweep, sweep.study, cluster, sweep_file, cluster_file)
        return
    parts = cluster.parts()
    largest, allowed = max(sweep.search.cluster_sizes), max(part.max_nodes for part in parts)
    if largest > allowed:
        message = f"{largest} nodes, but {cluster_file} has max_nodes = {allowed}"
        raise InputError(message, source=sweep_file, key="search.cluster_sizes")
    if sweep.workload.precision == "fp16" and any(part.device == "cpu" for part in parts):
        message = 'fp16 needs device = "cuda"; on CPU use "bf16" or "fp32"'
        raise InputError(message, source=sweep_file, key="workload.precision")
    samples = sweep.workload.samples
    if samples is not None and sweep.search.max_batch > samples:
        message = f"{sweep.search.max_batch} is above workload.samples = {samples}"
        raise InputError(message, source=sweep_file, key="search.max_batch")
    if _is_above(sweep.search.min_batch, sweep):
        message = f"{sweep.search.min_batch} is above {_samples(sweep)}"
        raise InputError(message, source=sweep_file, key="search.min_batch")
    for part in parts:
        for nodes in cluster_sizes(sweep.search, part):
            if not local_batches(sweep.search, nodes, part.workers_per_node):
                message = (
                    f"no batch between {sweep.search.min_batch} and {sweep.search.max_batch} gives each of "
                    f"{nodes * part.workers_per_node} workers a power of two; widen the bounds or drop {nodes} nodes"
                )
                raise InputError(message, source=sweep_file, key="search.min_batch")


def loaders_without_cores(sweep: SweepSpec, cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Name each key cpus_per_worker, dotted, that leaves no core to the training process of a GPU.

    Slurm binds a worker and its loader processes to its own cores; where these are all taken by loaders, each step
    waits for them. On CPUs one core for both is a choice, on a GPU it leaves the GPU idle.
    """
    loaders = sweep.workload.loader_workers
    for name, part in zip(cluster.part_names(), cluster.parts(), strict=True):
        bound = part.executor == "slurm" and part.device == "cuda"
        if bound and part.cpus_per_worker <= loaders:
            table = f"partitions.{name}." if name else ""
            yield (
                f"{table}cpus_per_worker",
                f"{part.cpus_per_worker} for the training process and its {loaders} loader processes "
                f"(workload.loader_workers), which would wait for one another; expected at least {loaders + 1}, "
                f"better {loaders + 2}, or fewer loader processes",
            )


def _check_study(
    sweep: SweepSpec, study: StudySpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str
) -> None:
    part = study_part(study, cluster)
    if part is None:
        message = f"{study.nodes} nodes, but {cluster_file} has max_nodes = {max(p.max_nodes for p in cluster.parts())}"
        raise InputError(message, source=sweep_file, key="study.nodes")
    for name, column in {name: study_column(sweep, name, check_paths=False) for name in study.columns}.items():
        work, workers = column.workload, study.nodes * part[1].workers_per_node
        if column.training.method == "polo" and workers == 1:
            message = "polo averages the models of several workers; with one it is lbt"
            raise InputError(message, source=sweep_file, key="study.nodes")
        if work.precision == "fp16" and part[1].device == "cpu":
            message = f'fp16 of {name} needs device = "cuda"; on CPU use "bf16" or "fp32"'
            raise InputError(message, source=sweep_file, key="workload.precision")
        for batch in sorted({cell.batch for cell in study.cells()}):
            key = "study.batches" if batch in study.batches else "study.small_batch"
            _check_batch(batch, column, workers, sweep_file, key)


def _check_batch(batch: int, sweep: SweepSpec, workers: int, source: Path | str, key: str) -> None:
    if batch % workers:
        raise InputError(f"{batch} cannot be shared equally among {workers} workers", source=source, key=key)
    if _is_above(batch, sweep, 1 - sweep.workload.holdout):
        raise InputError(f"{batch} is above {_samples(sweep)}", source=source, key=key)


def _is_above(batch: int, sweep: SweepSpec, share: float = 1.0) -> bool:
    """Whether a batch is larger than the share of the training samples that is trained on, as far as they are known."""
    most = sweep.workload.most_samples
    return most is not None and batch > most * share


def _samples(sweep: SweepSpec) -> str:
    work = sweep.workload
    if work.samples is not None:
        return f"workload.samples = {work.samples}"
    return f"the {work.most_samples} training samples of {work.dataset!r}"


def study_part(study: StudySpec, cluster: ClusterSpec) -> tuple[str, ClusterSpec] | None:
    """Name and specification of the first part of the cluster that has nodes enough for a study; None without."""
    named = zip(cluster.part_names(), cluster.parts(), strict=True)
    return next(((name, part) for name, part in named if part.max_nodes >= study.nodes), None)


def cluster_sizes(search: SearchSpec, part: ClusterSpec) -> tuple[int, ...]:
    """The cluster sizes of a search that a partition has nodes for; perhaps none."""
    return tuple(nodes for nodes in search.cluster_sizes if nodes <= part.max_nodes)


def sweep_for(sweep: SweepSpec, part: ClusterSpec) -> SweepSpec | None:
    """The sweep with the cluster sizes that a partition has nodes for; None where it has too few for any."""
    sizes = cluster_sizes(sweep.search, part)
    if sizes == sweep.search.cluster_sizes:
        return sweep
    search = sweep.search.model_copy(update={"cluster_sizes": sizes})
    return sweep.model_copy(update={"search": search}) if sizes else None
