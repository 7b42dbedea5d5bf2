"""Sweep file: its checks, its checks against a cluster, and the sweep of each column of a study.

`idle_keys` and `idle_reference` find keys that were given but change nothing: a sweep may hold
them, but its author should know. `Needs`, at a key's field, names another key that it depends on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, ValidationInfo, model_validator

from tula_hpc.config.cluster import ClusterSpec
from tula_hpc.config.search import FOREIGN_KEYS, ObjectiveSpec, SearchSpec, local_batches
from tula_hpc.config.study import StudySpec, check_accuracy
from tula_hpc.config.training import Method, TrainingSpec, check_script
from tula_hpc.config.validation import Name, Spec, explain, given_keys, shown
from tula_hpc.config.workload import DATASETS, WorkloadSpec
from tula_hpc.errors import InputError
from tula_hpc.formatting import plural

# prefix of all job names
JOB_NAMES = "tula-"


class SweepSpec(Spec):
    """A sweep file."""

    foreign_keys = FOREIGN_KEYS

    name: Name
    """Name of the run and its jobs: letters, digits, dots, underscores, hyphens."""
    workload: WorkloadSpec = WorkloadSpec()
    """See [workload]."""
    search: SearchSpec = SearchSpec()
    """See [search]."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """See [objective]."""
    training: TrainingSpec = TrainingSpec()
    """See [training]."""
    study: StudySpec | None = None
    """Makes the sweep a study, which neither profiles nor plans; see [study]."""

    @model_validator(mode="after")
    def _fits_a_script(self, info: ValidationInfo) -> SweepSpec:
        if self.workload.is_script:
            # a script trains by its own steps, unless the sweep file names another method
            if "method" not in self.training.model_fields_set:
                self.__dict__["training"] = self.training.model_copy(update={"method": "lbt"})
            of_study = self.study is not None or (info.context or {}).get("of_study", False)
            scales = "lr_scale" in self.workload.placeholders
            check_script(self.training, scales=scales, of_study=of_study)
        return self

    @model_validator(mode="after")
    def _within_bounds(self) -> SweepSpec:
        most = self.objective.max_global_batch
        least = self.search.min_batch
        if most is not None and most < least:
            raise ValueError(
                f"objective.max_global_batch: {most} is below search.min_batch = {least}; "
                "raise it, or lower search.min_batch"
            )
        warmup = self.training.warmup_epochs
        epochs = self.workload.epochs
        if warmup is not None and warmup >= epochs:
            raise ValueError(
                f"training.warmup_epochs: expected less than workload.epochs = {epochs}, "
                f"got {warmup:g}"
            )
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> SweepSpec:
        method = self.training.method
        optimizer = self.workload.optimizer
        needed = {"lars": "sgd", "lamb": "adamw"}.get(method, optimizer)
        if optimizer != needed:
            raise ValueError(
                f'training.method: "{method}" is {needed} with a rate of its own for each layer; '
                f'expected workload.optimizer = "{needed}" and a workload.lr for it'
            )
        if method == "polo" and self.workload.zero_stage:
            raise ValueError(
                'training.method: in "polo" every worker has an optimizer of its own; '
                "expected workload.zero_stage = 0"
            )
        scales = method in ("ags", "static")
        if self.training.layer_wise and scales and self.scale_applies_to == "gradient":
            raise ValueError(
                "training.layer_wise: LARS and LAMB divide by the gradient's size; "
                'expected apply = "update"'
            )
        return self

    @model_validator(mode="after")
    def _study_compares_accuracies(self) -> SweepSpec:
        if self.study is not None:
            check_accuracy(self.workload, self.study)
        return self

    @property
    def job_name(self) -> str:
        """Prefix of the sweep's job names; it distinguishes a user's sweeps in squeue."""
        return JOB_NAMES + self.name

    @property
    def scale_applies_to(self) -> Literal["gradient", "update"]:
        """`training.apply`; by default the update if the optimizer normalizes gradients."""
        training = self.training
        cancels = self.workload.optimizer == "adamw" or training.has_trust_ratios
        left_out = training.apply is None and training.preset == "default"
        if training.method in ("ags", "static") and left_out and cancels:
            return "update"
        return training.ags.apply

    @property
    def step_copies(self) -> int:
        """Copies of the parameters on top of a plain step: the old ones, if updates are scaled."""
        scales = self.training.method in ("ags", "static") and self.scale_applies_to == "update"
        return int(scales or self.training.method == "adascale")

    def lacks_factors(self, workers: int) -> bool:
        """Tell whether factors cannot be estimated, as a script has only one worker's gradients."""
        return self.training.adapts and self.workload.is_script and workers == 1

    def updates_per_epoch(self, steps: int) -> float:
        """Return how many of AGS's scale updates cost an extra pass, in the mean epoch of `steps`.

        The first pass comes after a whole interval, and none comes after the last step.
        """
        options = self.training.ags
        epochs = self.workload.epochs
        if self.training.method != "ags" or options.reference == "free":
            return 0.0
        interval = max(1, round(options.update_interval_epochs * steps))
        return max(0, steps * epochs - 1) // interval / epochs


def study_column(sweep: SweepSpec, column: str, *, check_paths: bool = True) -> SweepSpec:
    """Return the sweep of one column of its study.

    Raises:
        ValidationError: A variant's value is invalid for its key.
    """
    tables = sweep.model_dump(mode="json", exclude_none=True, exclude={"study"})
    overrides = sweep.study.overrides(column) if sweep.study else {}
    for key, value in overrides.items():
        section, _, last = key.partition(".")
        tables[section][last] = value
    context = {"check_paths": check_paths, "of_study": sweep.study is not None}
    changed = SweepSpec.model_validate_json(
        json.dumps(tables, default=str), strict=True, context=context
    )
    return changed.model_copy(update={"study": sweep.study})


_STUDY_SETS = {"workload.seed": "study.seeds", "workload.holdout": "study.tuning_holdout"}


def check_columns(sweep: SweepSpec, path: Path, *, check_paths: bool) -> None:
    """Check the sweep of each column of a study.

    Raises:
        InputError: One line per mistake in a variant: file, variant, key, expected value.
    """
    if sweep.study is None:
        return
    for name, keys in sweep.study.variants.items():
        _check_variant(name, keys, path)
    for name in sweep.study.columns:
        table = "variants" if name in sweep.study.variants else "methods"
        where = f"{path}: study.{table}.{name}"
        try:
            column = study_column(sweep, name, check_paths=check_paths)
            check_accuracy(column.workload, sweep.study)
        except ValidationError as error:
            lines = (explain(SweepSpec, where, item) for item in error.errors())
            raise InputError("\n".join(dict.fromkeys(lines))) from None
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None


def _check_variant(name: str, keys: Mapping[str, Any], path: Path) -> None:
    """Refuse keys that a variant may not change."""
    for key, value in keys.items():
        section, _, last = key.partition(".")
        where = f"study.variants.{name}.{key}"
        if key in _STUDY_SETS:
            message = f"is set by {_STUDY_SETS[key]}; change it there"
            raise InputError(message, source=path, key=where)
        if section not in ("workload", "training") or not last or "." in last:
            message = (
                "expected a key of [workload] or [training], for example "
                '"training.delta" or "workload.lr"'
            )
            raise InputError(message, source=path, key=where)
        if key == "training.method" and name in get_args(Method) and value != name:
            message = (
                "a variant named after a method has that method; "
                f"give it another name for {shown(value)}"
            )
            raise InputError(message, source=path, key=where)


def check_together(
    sweep: SweepSpec, cluster: ClusterSpec, sweep_file: Path | str, cluster_file: Path | str
) -> None:
    """Refuse a sweep that the cluster cannot run.

    Raises:
        InputError: Too many nodes, a precision that the device lacks, no candidate between the
            batch bounds, or a batch of a study that the workers cannot share.
    """
    if sweep.study is not None:
        _check_study(sweep, sweep.study, cluster, sweep_file, cluster_file)
        return
    parts = cluster.parts()
    largest = max(sweep.search.cluster_sizes)
    allowed = _most_nodes(cluster)
    if largest > allowed:
        message = f"{largest} nodes, but {cluster_file} has max_nodes = {allowed}; change either"
        raise InputError(message, source=sweep_file, key="search.cluster_sizes")
    if sweep.workload.precision == "fp16" and any(part.device == "cpu" for part in parts):
        message = 'fp16 needs device = "cuda"; on CPU use "bf16" or "fp32"'
        raise InputError(message, source=sweep_file, key="workload.precision")
    samples = sweep.workload.samples
    if samples is not None and sweep.search.max_batch > samples:
        message = f"{sweep.search.max_batch} is above workload.samples = {samples}; lower it"
        raise InputError(message, source=sweep_file, key="search.max_batch")
    if _is_above(sweep.search.min_batch, sweep):
        message = f"{sweep.search.min_batch} is above {_samples(sweep)}; lower it"
        raise InputError(message, source=sweep_file, key="search.min_batch")
    for part in parts:
        _check_candidates(sweep, part, sweep_file)


def _check_candidates(sweep: SweepSpec, part: ClusterSpec, sweep_file: Path | str) -> None:
    search = sweep.search
    accumulation = sweep.workload.accumulation
    for nodes in cluster_sizes(search, part):
        workers = nodes * part.workers_per_node
        batches = local_batches(search, nodes, part.workers_per_node)
        if not batches:
            message = (
                f"no batch between {search.min_batch} and {search.max_batch} is a power of two "
                f"times {workers}, the number of workers; widen the bounds, or take {nodes} out of "
                "search.cluster_sizes"
            )
            raise InputError(message, source=sweep_file, key="search.min_batch")
        if batches[0] < accumulation:
            message = (
                f"{plural(batches[0], 'sample')} on each of {plural(workers, 'worker')} cannot be "
                f"taken in {accumulation} parts; expected at most {batches[0]}, or "
                f"search.min_batch = {workers * accumulation}"
            )
            raise InputError(message, source=sweep_file, key="workload.accumulation")


def _most_nodes(cluster: ClusterSpec) -> int:
    return max(part.max_nodes for part in cluster.parts())


def loaders_without_cores(sweep: SweepSpec, cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield each key with too few cores for a worker's loader processes, with advice.

    Slurm binds a worker and its loader processes to the worker's own cores; if loaders take all of
    them, each step waits for the loaders. On CPUs sharing the cores is accepted while the loaders
    are no more than the cores or than the default; with a GPU it would leave the GPU idle.
    """
    loaders = sweep.workload.loader_workers
    if sweep.workload.is_script:
        # a script starts its own loader processes, whose number is not known here
        return
    usual = int(WorkloadSpec.model_fields["loader_workers"].default)
    for name, part in cluster.by_name().items():
        table = f"partitions.{name}." if name else ""
        if part.executor == "local":
            key = "workload.loader_workers"
            cores = max(1, len(os.sched_getaffinity(0)) // part.workers_per_node)
            remedy = ""
        else:
            key = f"{table}cpus_per_worker"
            cores = part.cpus_per_worker
            remedy = f"at least {loaders + 1}, better {loaders + 2}, or "
        most = cores - 1 if part.device == "cuda" else max(cores, usual)
        if loaders > most:
            yield (
                key,
                f"{plural(cores, 'core')} for the training process and its {loaders} loader "
                "processes (workload.loader_workers), which would wait for one another; "
                f"expected {remedy}workload.loader_workers = {most} in the sweep file",
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
        message = f"{study.nodes} nodes, but {cluster_file} has max_nodes = {_most_nodes(cluster)}"
        raise InputError(f"{message}; change either", source=sweep_file, key="study.nodes")
    workers = study.nodes * part[1].workers_per_node
    for name in study.columns:
        column = study_column(sweep, name, check_paths=False)
        work = column.workload
        if column.training.method == "polo" and workers == 1:
            message = "polo averages models of several workers; raise study.nodes, or remove polo"
            raise InputError(message, source=sweep_file, key="study.nodes")
        if work.precision == "fp16" and part[1].device == "cpu":
            message = f'fp16 of {name} needs device = "cuda"; on CPU use "bf16" or "fp32"'
            raise InputError(message, source=sweep_file, key="workload.precision")
        if column.lacks_factors(workers):
            message = (
                f"{name} takes the factors of a script's steps from the gradients of several "
                f"workers, and there is only one; raise study.nodes, or leave out {name}"
            )
            raise InputError(message, source=sweep_file, key="study.nodes")
        for batch in sorted({cell.batch for cell in study.cells()}):
            key = "study.batches" if batch in study.batches else "study.small_batch"
            _check_batch(batch, column, workers, sweep_file, key)
            # trainings that choose the learning rate hold out samples as well
            is_tuned = bool(study.base_lrs) and batch == study.small_batch
            held_out = max(column.workload.holdout, study.tuning_holdout * is_tuned)
            if _is_above(batch, column, 1 - held_out):
                without = f", of which {100 * held_out:.0f} % are held out" if held_out else ""
                message = f"{batch} is above {_samples(column)}{without}; lower it"
                raise InputError(message, source=sweep_file, key=key)


def _check_batch(batch: int, sweep: SweepSpec, workers: int, source: Path | str, key: str) -> None:
    if batch % workers:
        message = f"{batch} cannot be shared equally among {workers} workers; use a multiple"
        raise InputError(message, source=source, key=key)
    if batch // workers % sweep.workload.accumulation:
        message = (
            f"{plural(batch // workers, 'sample')} of a worker cannot be taken in "
            f"{sweep.workload.accumulation} parts (workload.accumulation)"
        )
        raise InputError(message, source=source, key=key)


def _is_above(batch: int, sweep: SweepSpec, share: float = 1.0) -> bool:
    most = sweep.workload.most_samples
    return most is not None and batch > most * share


def _samples(sweep: SweepSpec) -> str:
    work = sweep.workload
    if work.samples is not None:
        return f"workload.samples = {work.samples}"
    return f"the {work.most_samples} training samples of {work.dataset!r}"


def study_part(study: StudySpec, cluster: ClusterSpec) -> tuple[str, ClusterSpec] | None:
    """Return name and cluster of the first partition with enough nodes for a study, or None."""
    fitting = (pair for pair in cluster.by_name().items() if pair[1].max_nodes >= study.nodes)
    return next(fitting, None)


def cluster_sizes(search: SearchSpec, part: ClusterSpec) -> tuple[int, ...]:
    """Return the cluster sizes of a search that a partition has enough nodes for; may be empty."""
    return tuple(nodes for nodes in search.cluster_sizes if nodes <= part.max_nodes)


def sweep_for(sweep: SweepSpec, part: ClusterSpec) -> SweepSpec | None:
    """Return the sweep with the cluster sizes that a partition has nodes for; None if none."""
    sizes = cluster_sizes(sweep.search, part)
    if sizes == sweep.search.cluster_sizes:
        return sweep
    if not sizes:
        return None
    search = sweep.search.model_copy(update={"cluster_sizes": sizes})
    return sweep.model_copy(update={"search": search})


# tables and keys for what a study does not have: a search, a plan, a prediction, a single seed
_NOT_OF_STUDIES = frozenset({
    "search", "objective", "workload.seed", "training.drift", "training.drift_minutes",
    "training.max_fallbacks",
})  # fmt: skip
# keys of [search] that a study uses: for the trial before any job, and a script's first step
_OF_TRIALS = ("search.estimate", "search.first_step_minutes")


def idle_keys(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Yield each dotted key that changes nothing, in a study in no column, with the reason.

    A key with its default value counts as left out.
    """
    study = sweep.study
    if study is None:
        yield from _idle_in(sweep).items()
        return
    columns = {
        name: _idle_in(study_column(sweep, name, check_paths=False)) for name in study.columns
    }
    for key, why in columns[study.columns[0]].items():
        in_all = all(key in idle for idle in columns.values())
        if in_all and key not in study.overrides(study.columns[0]):
            yield key, why
    for name, idle in columns.items():
        for key in study.variants.get(name, {}):
            if key in idle:
                yield f"study.variants.{name}.{key}", idle[key]


def _idle_in(sweep: SweepSpec) -> dict[str, str]:
    """Return the given keys that change nothing, each with the reason."""
    by_others = dict(_idle_by_others(sweep))
    found = {}
    for table in ("workload", "search", "objective", "training", "study"):
        spec = getattr(sweep, table)
        for key, reason in given_keys(spec) if spec is not None else ():
            dotted = f"{table}.{key}"
            of_plans = not _NOT_OF_STUDIES.isdisjoint((table, dotted)) and dotted not in _OF_TRIALS
            if sweep.study is not None and of_plans:
                found[dotted] = "a study does not use it; remove it"
            elif why := reason or by_others.get(dotted, ""):
                found[dotted] = why
    return found


def _idle_by_others(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Yield keys, given or not, that change nothing because of several keys or other tables."""
    work = sweep.workload
    training = sweep.training
    if training.ags.gate == "none":
        why = 'with gate = "none" every step is scaled, whatever delta is; set gate = "paper"'
        yield "training.delta", why
    if training.method == "ags" and training.ags.reference == "pass":
        why = 'needs norms at every step, which reference = "pass" does not give'
        yield from dict.fromkeys(
            ("training.small_batch_shrink", "training.spike_guard"), why
        ).items()
    if training.checkpoint_minutes is not None:
        why = "training.checkpoint_minutes sets the interval; remove one of them"
        yield "training.interruption_hours", why
    if training.method in ("lars", "lamb"):
        yield (
            "training.layer_wise",
            f'method = "{training.method}" has such rates anyway; remove it',
        )
    if training.warmup_epochs is not None:
        yield "workload.warmup_epochs", "training.warmup_epochs overrides it; remove one of them"
    if work.is_script:
        yield "training.observe_gradients", "a script's gradients are not logged; remove it"
        yield "training.lr_scaling", "a script sets its own rate; remove it"
    else:
        yield "search.first_step_minutes", "only scripts use it; remove it"
    if work.is_script and "seed" not in work.placeholders:
        why = "{seed} is in none of workload.arguments; put it there, or remove this"
        yield "workload.seed", why
    if work.dataset in DATASETS and not DATASETS[work.dataset].on_disk:
        reason = f'dataset = "{work.dataset}" reads no folder'
        yield "workload.data_dir", f"{reason}; set workload.dataset, or remove this"


def idle_reference(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Yield the key of AGS's reference batch if no batch of the search is larger, with why."""
    given = sweep.training.small_batch
    largest = sweep.search.max_batch
    is_ags = sweep.study is None and sweep.training.method == "ags"
    if not is_ags or given is None or given < largest:
        return
    unless = ""
    if sweep.training.ags.small_batch_shrink != 1.0:
        unless = " until training.small_batch_shrink brings it below the batch"
    yield (
        "training.small_batch",
        f"{given} is not below search.max_batch, {largest}: gradients are compared with those of "
        f"the same batch, which scales nothing{unless}",
    )
