"""Contents of a run directory, read once for the report and its figures.

Every file is optional: measurements alone, a plan without training, a training in progress, and
logs from another machine can be reported. Only a part of very many rows is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from tula_hpc.analysis.models.profiles import is_out_of_memory, summarize
from tula_hpc.config import (
    MAX_FILE_BYTES,
    ClusterSpec,
    SweepSpec,
    WorkloadSpec,
    load_frozen_cluster,
    load_frozen_sweep,
    without_values,
)
from tula_hpc.env import unix_time
from tula_hpc.errors import InputError, RunDirectoryError
from tula_hpc.files import read_bounded
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import (
    MAIN_LABEL,
    Candidate,
    Configuration,
    EpochMetrics,
    Event,
    Interval,
    JobAccount,
    JobNote,
    Measurement,
    Metrics,
    Plan,
    RunDirectory,
    RunHistory,
    TrainDirectory,
    TrainResult,
    read_metrics,
    steps_of_epoch,
)
from tula_hpc.records.run_directory import holder_of

# an accuracy at most this many standard errors above that of guessing may be a guess
ERRORS = 3.0
SMALLER_STEPS = "lower workload.lr or warm up longer"
# assumed size of a test set whose size is unknown
USUAL_TEST_SAMPLES = 1000


def learned_nothing(metrics: Metrics, work: WorkloadSpec) -> str:
    """Return a clause on the loss of a training that learned nothing, else ""."""
    # the final loss is the mean over the last epoch, which must not hold the training's beginning
    if len(metrics.epochs) < 2:
        return ""
    first = metrics.steps[0].loss if metrics.steps else metrics.epochs[0].train_loss
    last = metrics.epochs[-1].train_loss
    if first is None or last is None:
        return ""
    ended = f"the loss ended at {format_number(last, 3)}"
    if last > first:
        return f"{ended}, above the {format_number(first, 3)} that it began with"
    classes = work.class_count if work.loss is None else None
    # log(classes) is the cross-entropy if every class is equally likely
    if classes and last >= math.log(classes):
        guessing = f"the {format_number(math.log(classes), 3)} of guessing"
        return f"{ended}, not below {guessing} among {classes:,} classes"
    return ""


def is_guess(accuracy: float, work: WorkloadSpec, among_best: int = 1) -> bool:
    """Return whether guessing could reach an accuracy; False if the number of classes is unknown.

    A sample counts as right if its class is among `among_best` guesses (k of top-k).
    """
    if work.class_count is None or work.metric is not None or work.class_count <= among_best:
        return False
    guessed = among_best / work.class_count
    error = math.sqrt(guessed * (1 - guessed) / (work.test_set_size or USUAL_TEST_SAMPLES))
    return accuracy <= guessed + ERRORS * error


# most measurements in a figure with a mark for each
MOST_DRAWN = 400
# most epochs in a figure
MOST_POINTS = 2_000
# most rows in a table
MOST_ROWS = 1_000

T = TypeVar("T")


def drawn(measurements: list[Measurement]) -> list[Measurement]:
    """Return the measurements in figures: all, or medians of each configuration."""
    if len(measurements) <= MOST_DRAWN:
        return measurements
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for row in measurements:
        size = (row.nodes, row.workers_per_node, row.local_batch, row.accumulation or 1)
        key = (row.partition, *size, row.status, row.failure)
        groups.setdefault(key, []).append(row)
    medians = sorted(map(_median, groups.values()), key=attrgetter("partition", "configuration"))
    return evenly(medians, MOST_DRAWN)


def _median(repeats: Sequence[Measurement]) -> Measurement:
    """Return the median of a configuration's measurements; the first of them if none has times."""
    first = repeats[0]
    profiles = summarize(repeats).profiles
    if len(repeats) == 1 or not profiles:
        return first
    (profile,) = profiles
    fields = ("times", "memory", "parts", "smaller_computes")
    return first.model_copy(update={field: getattr(profile, field) for field in fields})


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """Return at most `most` rows, evenly spread, including the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[index * (len(rows) - 1) // (most - 1)] for index in range(most)]


def ends(rows: Sequence[T], most: int = MOST_ROWS) -> list[T]:
    """Return all rows if there are at most `most`, else the first and the last `most` / 2."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most // 2], *rows[-(most // 2) :]]


class Training(NamedTuple):
    """Metrics and result of one training."""

    label: str
    metrics: Metrics
    result: TrainResult | None
    # where its last job ran; "" without partitions, None if unknown
    partition: str | None = None
    # Slurm's accounting of its jobs, see `RunHistory.accounted`
    accounts: Sequence[JobAccount] = ()
    # forward passes that a script's last job was asked for; None if it cannot be
    passes: int | None = None

    @property
    def epoch_time_s(self) -> float | None:
        """Median time of an epoch, see `median_epoch_s`."""
        return median_epoch_s(self.metrics.epochs)


def median_epoch_s(epochs: Sequence[EpochMetrics]) -> float | None:
    """Return the median seconds of an epoch's steps, at the batch and workers of the last epoch.

    None if no epoch counts. Epochs that a restart cut short, or whose steps were not timed, do not
    count, nor does the epoch in which a training changed its batch.
    """
    kept = []
    for before, epoch in pairwise([*epochs[:1], *epochs]):
        is_timed = epoch.complete and epoch.steps > 0
        if is_timed and _setting(before) == _setting(epoch) == _setting(epochs[-1]):
            kept.append(epoch.epoch_time_s)
    # a mean would hold the start of the loader's processes
    return statistics.median(kept) if kept else None


def _setting(epoch: EpochMetrics) -> tuple[int, int | None]:
    return epoch.global_batch, epoch.workers


def training_of(
    label: str,
    metrics: Metrics,
    result: TrainResult | None,
    history: RunHistory,
    accounts: Sequence[JobAccount],
) -> Training:
    """Return a training with what a run's history and accounting say about its jobs."""
    training = Training(label, metrics, result, accounts=history.accounted(label, accounts))
    for job in history.submissions("train"):
        if job.label == label:
            training = training._replace(partition=job.partition, passes=job.accumulation)
    return training


class RunContents(NamedTuple):
    """Contents of the files of one run; empty or None for stages that have not run yet."""

    name: str
    sweep_text: str
    cluster_text: str
    sweep: SweepSpec | None
    cluster: ClusterSpec | None
    measurements: list[Measurement]
    plan: Plan | None
    events: list[Event]
    trainings: list[Training]
    # written by profile jobs
    job_notes: list[JobNote]
    # sentences for the report about files that could not be read, and about thinned rows
    notes: list[str]
    # Slurm's accounting of all jobs, if it was queried
    accounts: Sequence[JobAccount] = ()
    # Unix time of this reading if a command is at work in the run, else 0
    seen_at: float = 0.0
    # Unix time at which the plan was written; 0: no plan
    plan_at: float = 0.0

    @property
    def cluster_sizes(self) -> list[int]:
        """Every N that was measured or planned, ascending; its index decides the colour of N."""
        sizes = {item.nodes for item in self.measurements}
        if self.plan:
            sizes.update(item.nodes for item in self.plan.candidates)
        return sorted(sizes)

    @property
    def labels(self) -> list[str]:
        """Labels of the trainings that have logged something."""
        return [training.label for training in self.trainings]

    @property
    def ok(self) -> list[Measurement]:
        """Measurements with credible times, by N and local batch."""
        timed = [
            item
            for item in self.measurements
            if item.status == "ok" and item.times and item.times.are_credible
        ]
        return sorted(timed, key=attrgetter("nodes", "workers_per_node", "local_batch"))

    @property
    def comparable(self) -> list[Measurement]:
        """Measurements with credible times, each in as many forward passes as its prediction."""
        return as_planned(self.ok, self.plan)

    @property
    def out_of_memory(self) -> list[Configuration]:
        """Configurations that ran out of memory, each once."""
        return sorted({item.configuration for item in self.measurements if is_out_of_memory(item)})

    def of_chosen_partition(self) -> RunContents:
        """Return the run with only the partition that the plan chose."""
        if self.plan is None or not self.plan.chosen.partition:
            return self
        name = self.plan.chosen.partition
        candidates = [item for item in self.plan.candidates if item.partition == name]
        return self._replace(
            cluster=self.cluster.part(name) if self.cluster else None,
            measurements=[item for item in self.measurements if item.partition == name],
            plan=self.plan.model_copy(update={"candidates": candidates}),
        )

    def in_figures(self) -> RunContents:
        """Return the run with no more measurements and epochs than a figure can show."""
        trainings = []
        for training in self.trainings:
            epochs = evenly(training.metrics.epochs, MOST_POINTS)
            trainings.append(training._replace(metrics=training.metrics._replace(epochs=epochs)))
        return self._replace(measurements=drawn(self.measurements), trainings=trainings)

    @property
    def memory_kinds(self) -> str:
        """Kind of memory that is limited; both kinds if only some partitions have GPUs."""
        if self.cluster is None:
            has_gpus = any(item.backend == "nccl" for item in self.measurements)
            return memory_kind("cuda" if has_gpus else "cpu")
        return " or ".join(sorted({memory_kind(part.device) for part in self.cluster.parts()}))


def read_run(run: RunDirectory) -> RunContents:
    """Read a run at any stage.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no run.
    """
    run.require()
    notes: list[str] = []
    measurements = run.measurements()
    if measurements.skipped:
        skipped = plural(measurements.skipped, "line")
        notes.append(f"Skipped in profile/*.jsonl, torn or unknown: {skipped}.")
    count = len(measurements.records)
    if count > MOST_DRAWN:
        medians = f"the medians of each configuration ({MOST_DRAWN} at most)"
        notes.append(f"Of {count:,} measurements figures show {medians}.")
    # load frozen files, which need no data or modules: these may be on another machine
    sweep = _read(load_frozen_sweep, run.sweep_file, notes)
    events = run.events()
    accounts = run.accounts()
    return RunContents(
        name=sweep.name if sweep else run.root.name,
        sweep_text=_read_text(run.sweep_file, notes),
        # reports are mailed, so that values of environment variables are left out
        cluster_text=without_values(_read_text(run.cluster_file, notes)),
        sweep=sweep,
        cluster=_read(load_frozen_cluster, run.cluster_file, notes),
        measurements=measurements.records,
        plan=_read(lambda _: run.read_plan(), run.plan_file, notes),
        events=events,
        trainings=list(_read_trainings(run, RunHistory(events), accounts, notes)),
        job_notes=run.job_notes(),
        notes=notes,
        accounts=accounts,
        seen_at=unix_time() if holder_of(run.root / ".lock").alive else 0.0,
        plan_at=run.plan_file.stat().st_mtime if run.plan_file.exists() else 0.0,
    )


def holds_study(run: RunDirectory) -> bool:
    """Return whether a run is a study, which has its own kind of report."""
    sweep = _read(load_frozen_sweep, run.sweep_file, [])
    return run.has_studied() if sweep is None else sweep.study is not None


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    return ""


def _read(load: Callable[[Path], T], path: Path, notes: list[str]) -> T | None:
    if not path.exists():
        return None
    try:
        return load(path)
    except RunDirectoryError as error:
        notes.append(f"{error}.")
    except InputError:
        notes.append(f"{path.name} is damaged; its settings are unknown.")
    return None


def _read_trainings(
    run: RunDirectory, history: RunHistory, accounts: Sequence[JobAccount], notes: list[str]
) -> Iterable[Training]:
    # the training of the plan comes first
    folders = (path for path in (run.root / "train").glob("*") if path.is_dir())
    for folder in sorted(folders, key=lambda path: (path.name != MAIN_LABEL, path.name)):
        files = TrainDirectory(folder)
        result = _read_result(files, notes)
        metrics = read_metrics(files.metrics_file)
        if metrics.skipped:
            skipped = plural(metrics.skipped, "line")
            notes.append(f"Skipped in train/{folder.name}/metrics.jsonl: {skipped}.")
        if metrics.logged:
            steps = f"{plural(metrics.logged, 'logged step')} in train/{folder.name}/metrics.jsonl"
            notes.append(f"Of {steps} {len(metrics.steps):,} are shown, evenly spread.")
        if metrics.steps or metrics.epochs or result:
            yield training_of(folder.name, metrics, result, history, accounts)


def _read_result(files: TrainDirectory, notes: list[str]) -> TrainResult | None:
    try:
        return files.read_result()
    except RunDirectoryError:
        path = files.result_file
        notes.append(f"{path.parent.name}/{path.name} is damaged.")
        return None


def measured_epoch(measurement: Measurement, dataset_samples: int) -> Interval | None:
    """Return the profiled seconds of an epoch: its steps and the updates of AGS's gradient scale.

    `dataset_samples` is D, the samples of an epoch, for records without it. The interval is that of
    the mean step, 95 %. None without times, or if D has no full step.
    """
    times = measurement.times
    batch = measurement.configuration.global_batch * measurement.batch_share
    batches = (measurement.dataset_samples or dataset_samples) / batch
    steps = steps_of_epoch(batches, short_batch=measurement.short_batch)
    if times is None or steps < 1:
        return None
    step = Interval(times.step_time_s, times.step_time_low_s, times.step_time_high_s)
    updates_s = measurement.updates_per_epoch * times.update_time_s
    return Interval(*(seconds + updates_s for seconds in step.times(steps)))


def as_planned(measurements: Iterable[Measurement], plan: Plan | None) -> list[Measurement]:
    """Return the measurements without those in other forward passes than their candidate's."""
    planned: dict[tuple[str, Configuration], int] = {}
    if plan is not None:
        planned = {(one.partition, one.configuration): one.accumulation for one in plan.candidates}
    return [
        row
        for row in measurements
        # None: the script has no argument for it
        if row.accumulation is None
        or row.accumulation == planned.get((row.partition, row.configuration), row.accumulation)
    ]


def measured_epochs(
    measurements: Iterable[Measurement], dataset_samples: int
) -> dict[Configuration, float]:
    """Return the median measured epoch time of each configuration of one partition, seconds.

    `dataset_samples` is for records without it. Forward passes may differ; see `as_planned`.
    """
    found: dict[tuple[int, int, int], list[float]] = {}
    for item in measurements:
        # plain numbers, as building `configuration` for each of very many measurements is slow
        key = (item.nodes, item.workers_per_node, item.local_batch)
        batch = math.prod(key) * item.batch_share
        batches = (item.dataset_samples or dataset_samples) / batch
        steps = steps_of_epoch(batches, short_batch=item.short_batch)
        if item.status != "ok" or item.times is None or steps < 1:
            continue
        epoch_s = item.times.step_time_s * steps + item.updates_per_epoch * item.times.update_time_s
        found.setdefault(key, []).append(epoch_s)
    return {Configuration(*key): statistics.median(values) for key, values in found.items()}


def cost_at(candidate: Candidate, pace: float) -> float:
    """Return the cost if steps took `pace` times as long as predicted.

    The cost follows the wall time: `C · (f + (1 − f) · pace)`, with f the share of the expected
    wall time that evaluation, starts and ends take.
    """
    parts_s = candidate.wall_parts_s
    fixed_s = sum(parts_s.get(name, 0.0) for name in ("evaluation", "starts", "ends"))
    # without parts, all of the time counts as steps
    fixed = fixed_s / (sum(parts_s.values()) or 1.0)
    return candidate.cost * (fixed + (1.0 - fixed) * pace)


def candidate_of(plan: Plan | None, training: Training) -> Candidate | None:
    """Return the candidate that a training ran.

    None if its batch changed, or if no plan has it in as many forward passes.
    """
    if plan is None:
        return None
    configuration = plan.chosen.configuration
    result = training.result
    if result is not None:
        configuration = Configuration(result.nodes, result.workers_per_node, result.local_batch)
    batches = {epoch.global_batch for epoch in training.metrics.epochs}
    if not batches <= {configuration.global_batch}:
        return None
    found = plan.find(configuration, training.partition)
    if found is not None and training.passes not in (None, found.accumulation):
        return None
    return found


def used_bytes(item: Measurement) -> int | None:
    """Return the bytes of the limited memory, see `memory_kind`."""
    return item.memory.reserved_bytes if item.memory else None


def memory_kind(device: str) -> str:
    """Name the kind of memory that is limited on a device."""
    if device == "cuda":
        return "GPU memory reserved by the allocator"
    return "resident memory of the whole process"
