"""A whole sweep file.

What of a sweep a cluster can run.

The sweep as each column of its study trains it.

Keys of training that were given and change nothing, or leave nothing to scale.

A sweep may hold them, but whoever wrote them should know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, model_validator

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.search import ObjectiveSpec, SearchSpec, local_batches
from tula_hpc.config.study import StudySpec
from tula_hpc.config.training import AgsOptions, Method, TrainingSpec
from tula_hpc.config.validation import Name, Spec, explain, shown
from tula_hpc.config.workload import DATASETS, WorkloadSpec
from tula_hpc.errors import InputError

# so begin the names of all jobs
JOB_NAMES = "tula-"


class SweepSpec(Spec):
    """A whole sweep file."""

    name: Name
    workload: WorkloadSpec = WorkloadSpec()
    search: SearchSpec = SearchSpec()
    objective: ObjectiveSpec = ObjectiveSpec()
    training: TrainingSpec = TrainingSpec()
    # the sweep is a study then: nothing is profiled or planned
    study: StudySpec | None = None

    @model_validator(mode="after")
    def _some_batch_is_left(self) -> SweepSpec:
        most, least = self.objective.max_global_batch, self.search.min_batch
        if most is not None and most < least:
            raise ValueError(
                f"objective.max_global_batch: {most} is below search.min_batch = {least}"
            )
        return self

    @model_validator(mode="after")
    def _warm_up_ends(self) -> SweepSpec:
        warmup, epochs = self.training.warmup_epochs, self.workload.epochs
        if warmup is not None and warmup >= epochs:
            raise ValueError(
                f"training.warmup_epochs: {warmup:g} leaves nothing of workload.epochs = {epochs}"
            )
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> SweepSpec:
        method, work = self.training.method, self.workload
        needed = {"lars": "sgd", "lamb": "adamw"}.get(method, work.optimizer)
        if work.optimizer != needed:
            message = f'"{method}" is {needed} with a rate of its own for each layer'
            raise ValueError(
                f'training.method: {message}; expected workload.optimizer = "{needed}", and its lr'
            )
        if method == "polo" and work.zero_stage:
            message = "every worker has an optimizer of its own"
            raise ValueError(
                f'training.method: in "polo" {message}; expected workload.zero_stage = 0'
            )
        if (
            self.training.layer_wise
            and method in ("ags", "static")
            and self.scale_applies_to == "gradient"
        ):
            message = "LARS and LAMB divide by the gradient's size"
            raise ValueError(f'training.layer_wise: {message}; expected apply = "update"')
        return self

    @model_validator(mode="after")
    def _study_compares_accuracies(self) -> SweepSpec:
        if self.study is not None:
            check_accuracy(self.workload, self.study)
        return self

    @property
    def job_name(self) -> str:
        """Base of the names of the sweep's jobs; it tells sweeps of one user apart in squeue."""
        return JOB_NAMES + self.name

    @property
    def scale_applies_to(self) -> Literal["gradient", "update"]:
        """`training.apply`; left out, the update where the optimizer divides by the gradient's size."""
        training = self.training
        cancels = self.workload.optimizer == "adamw" or training.has_trust_ratios
        left_out = training.apply is None and training.preset == "default"
        return (
            "update"
            if training.method in ("ags", "static") and left_out and cancels
            else training.ags.apply
        )

    @property
    def step_copies(self) -> int:
        """Parameters' worth of memory on top of a plain optimizer's step: those before it, where updates are scaled."""
        scales = self.training.method in ("ags", "static") and self.scale_applies_to == "update"
        return int(scales or self.training.method == "adascale")

    def updates_per_epoch(self, steps: int) -> float:
        """How often AGS updates its scale, on average: the first time after a whole interval, and not after the end.

        Args:
            steps: Of an epoch.
        """
        options, epochs = self.training.ags, self.workload.epochs
        if self.training.method != "ags" or options.reference == "free":
            # no update costs a pass
            return 0.0
        interval = max(1, round(options.update_interval_epochs * steps))
        return max(0, steps * epochs - 1) // interval / epochs


def check_accuracy(work: WorkloadSpec, study: StudySpec) -> None:
    """A study compares accuracies: there must be one of the kind that it asks for.

    Raises:
        ValueError: Begins with the key.
    """
    if work.loss is not None and work.metric is None and work.dataset not in DATASETS:
        message = "a study compares accuracies, and own data with an own loss may know none"
        raise ValueError(
            f"workload.metric: {message}; give a function that says how much of a sample is right"
        )
    if work.metric is not None and study.metric == "top5":
        raise ValueError(
            'study.metric: "top5" is of labels, and workload.metric is given; expected "top1"'
        )


def study_column(sweep: SweepSpec, column: str, *, check_paths: bool = True) -> SweepSpec:
    """The sweep as one column of its study trains it.

    Raises:
        ValidationError: A variant's value is not one that its key takes.
    """
    tables = sweep.model_dump(mode="json", exclude_none=True, exclude={"study"})
    for key, value in (sweep.study.overrides(column) if sweep.study else {}).items():
        section, _, last = key.partition(".")
        tables[section][last] = value
    context = {"check_paths": check_paths}
    changed = SweepSpec.model_validate_json(
        json.dumps(tables, default=str), strict=True, context=context
    )
    return changed.model_copy(update={"study": sweep.study})


_STUDY_SETS = {"workload.seed": "study.seeds", "workload.holdout": "study.tuning_holdout"}


def check_columns(sweep: SweepSpec, path: Path, *, check_paths: bool) -> None:
    """What each column of a study comes to.

    Raises:
        InputError: One line per mistake in a variant: file, variant, key, what was expected.
    """
    if sweep.study is None:
        return
    for name, keys in sweep.study.variants.items():
        _check_variant(name, keys, path)
    for name in sweep.study.columns:
        where = f"{path}: study.{'variants' if name in sweep.study.variants else 'methods'}.{name}"
        try:
            check_accuracy(study_column(sweep, name, check_paths=check_paths).workload, sweep.study)
        except ValidationError as error:
            lines = (explain(SweepSpec, where, item) for item in error.errors())
            raise InputError("\n".join(dict.fromkeys(lines))) from None
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None


def _check_variant(name: str, keys: Mapping[str, Any], path: Path) -> None:
    """Only what a training is may vary."""
    for key, value in keys.items():
        section, _, last = key.partition(".")
        where = f"study.variants.{name}.{key}"
        if key in _STUDY_SETS:
            raise InputError(f"is set by {_STUDY_SETS[key]}", source=path, key=where)
        if section not in ("workload", "training") or not last or "." in last:
            message = 'expected a key of [workload] or [training], for example "training.delta" or "workload.lr"'
            raise InputError(message, source=path, key=where)
        if key == "training.method" and name in get_args(Method) and value != name:
            message = f"a variant named after a method has that method; call it otherwise for {shown(value)}"
            raise InputError(message, source=path, key=where)


def check_together(
    sweep: SweepSpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str
) -> None:
    """Refuse a sweep that the cluster cannot run.

    Raises: InputError: Too many nodes, a precision that the device lacks, no candidate between the
        batch bounds, or a batch
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

    Slurm binds a worker and its loader processes to its own cores; where these are all taken by
    loaders, each step waits for them. On CPUs one core for both is a choice, on a GPU it leaves the
    GPU idle.
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
    sweep: SweepSpec,
    study: StudySpec,
    cluster: ClusterSpec,
    sweep_file: Path | str,
    cluster_file: Path | str,
) -> None:
    part = study_part(study, cluster)
    if part is None:
        message = f"{study.nodes} nodes, but {cluster_file} has max_nodes = {max(p.max_nodes for p in cluster.parts())}"
        raise InputError(message, source=sweep_file, key="study.nodes")
    for name, column in {
        name: study_column(sweep, name, check_paths=False) for name in study.columns
    }.items():
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
        raise InputError(
            f"{batch} cannot be shared equally among {workers} workers", source=source, key=key
        )
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


OF_METHODS = ("preset", *AgsOptions._fields, "s_max", "s_min", "static_scale")
# what each method makes use of; those that are not here, of nothing
USED = {
    "ags": {"preset", *AgsOptions._fields, "s_max", "s_min"},
    "static": {
        "static_scale",
        "delta",
        "gate",
        "smoothing",
        "scale_warmup_epochs",
        "exclude_norms",
        "apply",
    },
    "lars": {"lr_scaling"},
    "lamb": {"lr_scaling"},
}


def idle_keys(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Each such key, dotted, with the reason: of [training], and of a study's variants.

    One that has its default value is as good as left out. Of a study's [training] those alone that
    change nothing for any column.
    """
    if sweep.study is None:
        yield from ((f"training.{key}", why) for key, why in _idle(sweep.training).items())
        return
    of_columns = {
        name: _idle(study_column(sweep, name, check_paths=False).training)
        for name in sweep.study.columns
    }
    for key in OF_METHODS:
        whys = dict.fromkeys(of_column.get(key, "") for of_column in of_columns.values())
        if _is_given(sweep.training, key) and all(whys):
            yield f"training.{key}", "; ".join(whys)
    for name, values in sweep.study.variants.items():
        own = {key: why for key, why in of_columns[name].items() if f"training.{key}" in values}
        yield from ((f"study.variants.{name}.training.{key}", why) for key, why in own.items())


def _idle(training: TrainingSpec) -> dict[str, str]:
    """Keys of one training that have another value than their default and change nothing, each with the reason."""
    given = [key for key in OF_METHODS if _is_given(training, key)]
    return {key: why for key in given if (why := _reason(training, key))}


def _is_given(training: TrainingSpec, key: str) -> bool:
    return bool(getattr(training, key) != TrainingSpec.model_fields[key].default)


def _reason(training: TrainingSpec, key: str) -> str:
    """Why a key changes nothing; empty if it does change something."""
    options = training.ags
    if key not in USED.get(training.method, ()):
        return f'method = "{training.method}" makes no use of it'
    if key == "delta" and options.gate == "none":
        return 'with gate = "none" every step is scaled, whatever it is; a gate is "paper", "smooth" or "smoothed"'
    if (
        key in ("small_batch_shrink", "spike_guard")
        and training.method == "ags"
        and options.reference == "pass"
    ):
        return 'with reference = "pass" there are no norms at every step, which it needs'
    return ""


def idle_reference(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Each key that gives AGS a reference batch which is not below any batch of the sweep, dotted, with the reason."""
    study = sweep.study
    if study is None:
        if why := _not_below(sweep.training, sweep.search.max_batch, "search.max_batch"):
            yield "training.small_batch", why
        return
    found: dict[str, str] = {}
    for name in study.columns:
        training = study_column(sweep, name, check_paths=False).training
        own = f"study.variants.{name}." if "training.small_batch" in study.overrides(name) else ""
        if why := _not_below(training, max(study.batches), "the largest of study.batches"):
            found[f"{own}training.small_batch"] = why
    yield from found.items()


def _not_below(training: TrainingSpec, largest: int, key: str) -> str:
    """Why AGS's reference batch leaves nothing to scale; empty where it is below the largest batch, or not given."""
    given, shrink = training.small_batch, training.ags.small_batch_shrink
    if training.method != "ags" or given is None or given < largest:
        return ""
    unless = "" if shrink == 1.0 else " until training.small_batch_shrink brings it below the batch"
    return (
        f"{given} is not below {key}, {largest}: gradients are held against those of the same batch, "
        f"which scales nothing{unless}"
    )
