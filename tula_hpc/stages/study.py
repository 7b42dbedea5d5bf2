"""Run the study stage: choose the learning rate, then train each method, batch and seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tula_hpc.config import (
    REFERENCE_COLUMN,
    ClusterSpec,
    StudyCell,
    StudySpec,
    SweepSpec,
    study_column,
    study_part,
)
from tula_hpc.errors import StageError
from tula_hpc.formatting import plural
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import Configuration, RateTrial, RunDirectory, TunedRates, write_atomically
from tula_hpc.stages.context import Sweep, recording_failure, stage_progress
from tula_hpc.stages.preview import Preview, script_of
from tula_hpc.stages.train_many import Trainings, most_at_once

# methods whose steps have another size, so that the base optimizer's learning rate does not fit
OWN_RATES = ("lars", "lamb")


def study_stage(sweep: Sweep) -> dict[str, str]:
    """Choose the rate if asked to, then train every cell that has no result yet.

    Returns:
        Labels of trainings that failed for good, with the reasons.

    Raises:
        StageError: No rate could be chosen, or nothing at all could be trained.
    """
    with recording_failure(sweep.run, "train"):
        return _train_cells(sweep)


def _train_cells(sweep: Sweep) -> dict[str, str]:
    study, name, part = _study_and_part(sweep.spec, sweep.cluster)
    on_part = sweep._replace(cluster=part)
    rates = _choose_rates(on_part, name) if study.base_lrs else {}
    specs = {cell: cell_spec(sweep.spec, cell, rates) for cell in study.cells()}
    jobs = [_job(on_part, name, cell.batch, spec, cell.label) for cell, spec in specs.items()]
    with stage_progress("study") as progress:
        return Trainings(on_part, jobs).run(progress)


def _study_and_part(spec: SweepSpec, cluster: ClusterSpec) -> tuple[StudySpec, str, ClusterSpec]:
    part = study_part(spec.study, cluster) if spec.study else None
    if spec.study is None or part is None:
        # only for callers from Python: a command has checked its inputs
        raise StageError("study: no [study] table, or too few nodes for it")
    return spec.study, *part


def _job(sweep: Sweep, partition: str, batch: int, spec: SweepSpec, label: str) -> TrainJob:
    nodes, per_node = spec.study.nodes if spec.study else 1, sweep.cluster.workers_per_node
    configuration = Configuration(nodes, per_node, batch // (nodes * per_node))
    return TrainJob(spec, sweep.cluster, configuration, sweep.run.root, label, partition)


def cell_spec(sweep: SweepSpec, cell: StudyCell, rates: Mapping[str, float]) -> SweepSpec:
    """Return the sweep of one cell: the column's keys, the cell's seed, and the chosen rate.

    `rates` has the rate of each family, see `TunedRates`, for columns without a rate of their own.
    These rates were chosen at the small batch, so lr scaling starts there.
    """
    column = study_column(sweep, cell.column, check_paths=False)
    workload: dict[str, object] = {"seed": cell.seed}
    # without a plan there is no prediction with which step times could be compared
    training: dict[str, object] = {"drift": False}
    given = sweep.study.overrides(cell.column) if sweep.study else {}
    rate = None if "workload.lr" in given else rates.get(family(column))
    if rate is not None and sweep.study is not None:
        workload |= {"lr": rate}
        if "training.base_batch" not in given:
            training["base_batch"] = sweep.study.small_batch
    return _updated(column, workload, training)


def _updated(
    spec: SweepSpec, workload: Mapping[str, object], training: Mapping[str, object]
) -> SweepSpec:
    return spec.model_copy(
        update={
            "workload": spec.workload.model_copy(update=workload),
            "training": spec.training.model_copy(update=training),
        }
    )


def family(spec: SweepSpec) -> str:
    """Return the name under which methods share a learning rate at the small batch."""
    if spec.training.has_trust_ratios:
        return "lars" if spec.workload.optimizer == "sgd" else "lamb"
    return spec.workload.optimizer


def _choose_rates(sweep: Sweep, partition: str) -> dict[str, float]:
    if (chosen := sweep.run.read_rates()) is not None:
        return chosen.rates
    trials = trial_specs(sweep.spec)
    batch = sweep.spec.study.small_batch if sweep.spec.study else 1
    jobs = [_job(sweep, partition, batch, spec, label) for label, spec in trials.items()]
    with stage_progress("learning rate") as progress:
        failures = Trainings(sweep, jobs).run(progress)
    if failures:
        label, words = next(iter(failures.items()))
        raise StageError(f"study: no learning rate could be chosen, {label} failed: {words}")
    rates = choose(_trial(sweep.run, label, spec) for label, spec in trials.items())
    write_atomically(sweep.run.rates_file, rates.model_dump_json(indent=1))
    return rates.rates


def trial_specs(sweep: SweepSpec) -> dict[str, SweepSpec]:
    """Return the trainings that choose the rates, by label: each rate with each family."""
    study = sweep.study
    if study is None:
        return {}
    names = [
        n
        for n in dict.fromkeys([REFERENCE_COLUMN, *study.columns])
        if "workload.lr" not in study.overrides(n)
    ]
    columns = [study_column(sweep, name, check_paths=False) for name in names]
    # reversed, so that the first column of each family remains
    families = {family(column): column for column in reversed(columns)}
    fixed = {"seed": study.seeds[0], "holdout": study.tuning_holdout}
    return {
        f"study/rate-{name}-{rate:g}": _updated(
            column,
            {**fixed, "lr": rate},
            {"method": name if name in OWN_RATES else REFERENCE_COLUMN, "drift": False},
        )
        for name, column in sorted(families.items())
        for rate in study.rates_of(name)
    }


def _trial(run: RunDirectory, label: str, spec: SweepSpec) -> RateTrial:
    result = run.train(label).read_result()
    if result is None:
        raise StageError(
            f"study: {run.train(label).root} was deleted before a learning rate was chosen"
        )
    top5 = spec.study is not None and spec.study.metric == "top5"
    accuracy = result.test_top5_accuracy if top5 else result.test_accuracy
    return RateTrial(
        family=family(spec), lr=spec.workload.lr, accuracy=None if result.diverged else accuracy
    )


def choose(trials: Iterator[RateTrial]) -> TunedRates:
    """Return the best rate of each family, the smallest if several are equally good.

    Raises:
        StageError: Every rate of a family diverged.
    """
    ordered = sorted(trials, key=lambda trial: (trial.family, trial.lr))
    rates: dict[str, float] = {}
    for name in dict.fromkeys(trial.family for trial in ordered):
        finished = {
            trial.lr: trial.accuracy
            for trial in ordered
            if trial.family == name and trial.accuracy is not None
        }
        if not finished:
            message = (
                f"study: {name} diverged with every one of study.base_lrs, or gave no accuracy"
            )
            raise StageError(f"{message}; give smaller ones")
        rates[name] = max(finished, key=lambda rate: finished[rate])
    return TunedRates(rates=rates, trials=ordered)


def describe_study(spec: SweepSpec, cluster: ClusterSpec, root: Path) -> Preview:
    """Describe the jobs that a study would submit; create nothing."""
    study, _, part = _study_and_part(spec, cluster)
    run = RunDirectory(root)
    cells = study.cells()
    left = _without_result(run, (cell.label for cell in cells))
    trials: list[str] = []
    if study.base_lrs and not run.rates_file.exists():
        trials = _without_result(run, trial_specs(spec))
    batches = ", ".join(map(str, study.batches))
    hours = len([*left, *trials]) * study.nodes * part.train_minutes / 60
    lines = [
        f"study {spec.name!r} on {cluster.name!r} ({cluster.executor}), run directory {root}",
        f"{plural(len(cells), 'training')} of {plural(spec.workload.epochs, 'epoch')} "
        f"on {study.nodes} x {part.workers_per_node} workers:",
        f"  {', '.join(study.columns)} at B = {batches}, seeds {', '.join(map(str, study.seeds))}",
    ]
    if study.small_batch:
        lines.append(f"  and {REFERENCE_COLUMN} at B = {study.small_batch} for reference")
    if not left:
        return Preview([*lines, "all have a result: nothing is submitted"], [])
    if len(left) < len(cells):
        lines.append(f"{len(cells) - len(left)} of them have a result and are not trained again")
    if trials:
        count = plural(len(trials), "training")
        lines.append(f"before them {count} to choose the learning rate at B = {study.small_batch}")
    lines.append(f"at most {hours:.2f} node-hours ({part.train_minutes} min is the limit of each)")
    most = most_at_once(part, study.nodes * part.workers_per_node)
    if part.executor != "slurm" or most < len(left):
        lines.append(f"{most} at a time")
    launcher = Launcher(part, run, spec.job_name, work=spec.workload)
    tasks = min(most, len(left))
    shape = {"nodes": study.nodes, "minutes": part.train_minutes, "tasks": tasks}
    scripts = script_of(launcher, f"train, {plural(tasks, 'task')}", stage="train", **shape)
    return Preview(lines, list(scripts))


def _without_result(run: RunDirectory, labels: Iterable[str]) -> list[str]:
    return [label for label in labels if not run.train(label).result_file.exists()]
