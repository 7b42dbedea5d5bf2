"""What a run directory holds, read once for the report and its figures: the numbers, and what could not be read.

Everything is optional: a report over measurements alone, over a plan without training, over a
training in progress, or over logs that were copied to another machine must work.

Whether a training learned anything: its loss against the one it began with, its accuracy against
guessing.

How much a report shows: of very many measurements, epochs and events a part, so that a page stays a
page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from tula_hpc.analysis.costs.pricing import fixed_share
from tula_hpc.analysis.models.profiles import is_out_of_memory, summarize
from tula_hpc.config import (
    MAX_FILE_BYTES,
    ClusterSpec,
    SweepSpec,
    WorkloadSpec,
    load_cluster,
    load_frozen_sweep,
    without_values,
)
from tula_hpc.errors import InputError, RunDirectoryError
from tula_hpc.files import read_bounded
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import (
    MAIN_LABEL,
    Candidate,
    Configuration,
    EpochMetrics,
    Event,
    JobNote,
    Measurement,
    Metrics,
    Plan,
    RunDirectory,
    RunHistory,
    StepTimes,
    TrainDirectory,
    TrainResult,
    read_document,
    read_metrics,
)

# standard errors of counting above an accuracy of guessing: less cannot be told from it
ERRORS = 3.0
SMALLER_STEPS = "lower workload.lr or warm up longer"
# where their number is not known
USUAL_TEST_SAMPLES = 1000


def learned_nothing(metrics: Metrics, work: WorkloadSpec) -> str:
    """What of the loss says so, in words; "" where it says nothing of the kind, or too little was logged.

    It ended at the mean of the last epoch; that of a single one holds the beginning.
    """
    if len(metrics.epochs) < 2:
        return ""
    began, ended = _first_loss(metrics), metrics.epochs[-1].train_loss
    if ended > began:
        return f"the loss ended at {format_number(ended, 3)}, above the {format_number(began, 3)} that it began with"
    classes = work.class_count if work.loss is None else None
    # cross-entropy where each class is held for equally likely
    if classes and ended >= math.log(classes):
        guessing = (
            f"the {format_number(math.log(classes), 3)} of guessing among {classes:,} classes"
        )
        return f"the loss ended at {format_number(ended, 3)}, not below {guessing}"
    return ""


def _first_loss(metrics: Metrics) -> float:
    return metrics.steps[0].loss if metrics.steps else metrics.epochs[0].train_loss


def is_guess(accuracy: float, work: WorkloadSpec, among_best: int = 1) -> bool:
    """Whether guessing among the classes reaches as much, as far as counting test samples can tell.

    Args:
        accuracy: On the test set, a share of 1.
        work: Of whose data the number of classes is known, or nothing is said.
        among_best: A sample counts where its class is among so many guesses.
    """
    if work.class_count is None or work.metric is not None or work.class_count <= among_best:
        return False
    guessed = among_best / work.class_count
    error = math.sqrt(guessed * (1 - guessed) / (work.test_samples or USUAL_TEST_SAMPLES))
    return accuracy <= guessed + ERRORS * error


# measurements in a figure that has a mark for each
MOST_DRAWN = 400
# epochs in a figure
MOST_POINTS = 2_000
# of a table
MOST_ROWS = 1_000
# of a cell
MOST_LETTERS = 1_000

T = TypeVar("T")
Gap = TypeVar("Gap")


def drawn(measurements: list[Measurement]) -> list[Measurement]:
    """Those that figures show: all, or the medians of each configuration where they are more than `MOST_DRAWN`."""
    if len(measurements) <= MOST_DRAWN:
        return measurements
    groups: dict[tuple[object, ...], list[Measurement]] = {}
    for row in measurements:
        key = (
            row.partition,
            row.nodes,
            row.workers_per_node,
            row.local_batch,
            row.status,
            row.failure,
        )
        groups.setdefault(key, []).append(row)
    medians = sorted(map(_median, groups.values()), key=attrgetter("partition", "configuration"))
    return evenly(medians, MOST_DRAWN)


def _median(repeats: Sequence[Measurement]) -> Measurement:
    """One for all measurements of a configuration; the first of those that have no times."""
    first, profiles = repeats[0], summarize(repeats).profiles
    if len(repeats) == 1 or not profiles:
        return first
    (profile,) = profiles
    fields = ("times", "memory", "parts", "smaller_computes")
    return first.model_copy(update={field: getattr(profile, field) for field in fields})


def about_drawn(measurements: Sequence[Measurement]) -> list[str]:
    """That figures do not show all measurements, where that is so."""
    if len(measurements) <= MOST_DRAWN:
        return []
    rows = f"{MOST_DRAWN} at most"
    return [
        f"Of {len(measurements):,} measurements figures show the medians of each configuration ({rows})."
    ]


def about_steps(folder: str, logged: int, held: int) -> list[str]:
    """That figures do not show all steps that were logged, where that is so."""
    if not logged:
        return []
    return [
        f"Of {plural(logged, 'logged step')} in train/{folder}/metrics.jsonl {held:,} are shown, evenly spread."
    ]


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly spread, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // (most - 1)] for place in range(most)]


def ends(rows: Sequence[T], gap: Gap, most: int = MOST_ROWS) -> list[T | Gap]:
    """All, or the first and the last of them with `gap` between."""
    if len(rows) <= most:
        return list(rows)
    return [*rows[: most // 2], gap, *rows[-(most // 2) :]]


def cut(text: str) -> str:
    """The beginning of what is too long for a cell."""
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"


class Interval(NamedTuple):
    """A number with the ends of its interval, in the unit of the quantity."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Interval:
        """All three multiplied, for a change of unit."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


class Training(NamedTuple):
    """One training: what it logged, and how it ended, if it ended."""

    label: str
    metrics: Metrics
    result: TrainResult | None
    # see `trained_partition`
    partition: str | None = None

    @property
    def epoch_time_s(self) -> float | None:
        """See `median_epoch_s`."""
        return median_epoch_s(self.metrics.epochs)

    def in_figures(self) -> Training:
        """With no more epochs than a figure can show."""
        return self._replace(
            metrics=self.metrics._replace(epochs=evenly(self.metrics.epochs, MOST_POINTS))
        )


def median_epoch_s(epochs: Sequence[EpochMetrics]) -> float | None:
    """Time of an epoch's steps with the last one's batch and workers, over those that no restart cut short.

    None before the first. The epoch in which a training changed over is of both batches, so it does
    not count. The mean would hold the start of the loader's processes, and whatever disturbed a
    single epoch.
    """
    kept = [
        epoch.epoch_time_s
        for before, epoch in pairwise([*epochs[:1], *epochs])
        if epoch.complete and _setting(before) == _setting(epoch) == _setting(epochs[-1])
    ]
    return statistics.median(kept) if kept else None


def _setting(epoch: EpochMetrics) -> tuple[int, int | None]:
    return epoch.global_batch, epoch.workers


def trained_partition(events: Iterable[Event], label: str = MAIN_LABEL) -> str | None:
    """Where a training's last job was submitted to, "" on a cluster without partitions; None where no event says."""
    jobs = [job for job in RunHistory(events).submissions("train") if job.label == label]
    return jobs[-1].partition if jobs else None


class RunContents(NamedTuple):
    """What the files of one run say. Lists are empty and fields None where a stage has not run yet."""

    name: str
    sweep_text: str
    cluster_text: str
    sweep: SweepSpec | None
    cluster: ClusterSpec | None
    measurements: list[Measurement]
    plan: Plan | None
    events: list[Event]
    trainings: list[Training]
    # what profile jobs said of themselves
    job_notes: list[JobNote]
    # what could not be read
    notes: list[str]

    @property
    def cluster_sizes(self) -> list[int]:
        """Every N that occurs, ascending; its place here gives N its colour."""
        sizes = {item.nodes for item in self.measurements}
        sizes.update(item.nodes for item in (self.plan.candidates if self.plan else ()))
        return sorted(sizes)

    @property
    def ok(self) -> list[Measurement]:
        """Measurements whose times can be true, by N and local batch."""
        timed = (
            item
            for item in self.measurements
            if item.status == "ok" and item.times and item.times.are_credible
        )
        return sorted(timed, key=attrgetter("nodes", "workers_per_node", "local_batch"))

    @property
    def out_of_memory(self) -> list[Configuration]:
        """Configurations that ran out of memory, each once."""
        return sorted({item.configuration for item in self.measurements if is_out_of_memory(item)})

    def of_chosen_partition(self) -> RunContents:
        """The run as one partition sees it, that of the plan's choice; itself where the plan knows no partitions."""
        name = self.plan.chosen.partition if self.plan else ""
        if self.plan is None or not name:
            return self
        candidates = [item for item in self.plan.candidates if item.partition == name]
        return self._replace(
            cluster=self.cluster.part(name) if self.cluster else None,
            measurements=[item for item in self.measurements if item.partition == name],
            plan=self.plan.model_copy(update={"candidates": candidates}),
        )

    def in_figures(self) -> RunContents:
        """With no more measurements and epochs than a figure can show."""
        trainings = [training.in_figures() for training in self.trainings]
        return self._replace(measurements=drawn(self.measurements), trainings=trainings)

    @property
    def memory_kinds(self) -> str:
        """Which memory counts against the limit, in words; both where only some of the partitions have GPUs."""
        if self.cluster is None:
            return memory_kind(
                "cuda" if any(item.backend == "nccl" for item in self.measurements) else "cpu"
            )
        return " or ".join(sorted({memory_kind(part.device) for part in self.cluster.parts()}))

    def samples_of(self, measurement: Measurement) -> int:
        """Training samples in an epoch, D; 0 where no record says."""
        return measurement.dataset_samples or (self.plan.dataset_samples if self.plan else 0)


def read_run(run: RunDirectory) -> RunContents:
    """Read everything that is there.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no run.
    """
    _refuse_empty(run)
    notes: list[str] = []
    measurements = run.measurements()
    if measurements.skipped:
        notes.append(
            f"Skipped in profile/*.jsonl, torn or unknown: {plural(measurements.skipped, 'line')}."
        )
    notes += about_drawn(measurements.records)
    sweep, events = _read_sweep(run.sweep_file, notes), run.events()
    return RunContents(
        name=sweep.name if sweep else run.root.name,
        sweep_text=_read_text(run.sweep_file, notes),
        # reports are mailed around
        cluster_text=without_values(_read_text(run.cluster_file, notes)),
        sweep=sweep,
        cluster=_read_cluster(run.cluster_file, notes),
        measurements=measurements.records,
        plan=_read_plan(run, notes),
        events=events,
        trainings=list(_read_trainings(run, events, notes)),
        job_notes=run.job_notes(),
        notes=notes,
    )


def holds_study(run: RunDirectory) -> bool:
    """Whether its trainings are those of a study, which has a report of its own."""
    sweep = _read_sweep(run.sweep_file, [])
    return sweep is not None and sweep.study is not None


def _refuse_empty(run: RunDirectory) -> None:
    if not run.root.is_dir():
        raise RunDirectoryError("no such run directory", source=run.root)
    parts = (run.sweep_file, run.plan_file, run.events_file)
    if not any(part.exists() for part in parts) and not any(run.profile.glob("*.jsonl")):
        message = (
            "is not a run directory: "
            "expected at least sweep.toml, plan.json, events.jsonl or profile/*.jsonl in it"
        )
        raise RunDirectoryError(message, source=run.root)


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return read_bounded(path, MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}.")
    return ""


def _read_sweep(path: Path, notes: list[str]) -> SweepSpec | None:
    if not path.exists():
        return None
    try:
        # its data and modules are where it ran, not necessarily here
        return load_frozen_sweep(path)
    except InputError:
        notes.append("sweep.toml is damaged; its settings are unknown.")
        return None


def _read_cluster(path: Path, notes: list[str]) -> ClusterSpec | None:
    if not path.exists():
        return None
    try:
        return load_cluster(path)
    except InputError:
        notes.append("cluster.toml is damaged; its settings are unknown.")
        return None


def _read_plan(run: RunDirectory, notes: list[str]) -> Plan | None:
    if not run.plan_file.exists():
        return None
    try:
        return run.read_plan()
    except RunDirectoryError as error:
        notes.append(f"{error}.")
        return None


def _read_trainings(
    run: RunDirectory, events: Sequence[Event], notes: list[str]
) -> Iterable[Training]:
    """All trainings; the one of the plan comes first."""
    folders = (path for path in (run.root / "train").glob("*") if path.is_dir())
    for folder in sorted(folders, key=lambda path: (path.name != MAIN_LABEL, path.name)):
        files, partition = TrainDirectory(folder), trained_partition(events, folder.name)
        result = _read_result(files.result_file, notes)
        training = Training(folder.name, read_metrics(files.metrics_file), result, partition)
        if training.metrics.skipped:
            notes.append(
                f"Skipped in train/{folder.name}/metrics.jsonl: {plural(training.metrics.skipped, 'line')}."
            )
        notes += about_steps(folder.name, training.metrics.logged, len(training.metrics.steps))
        if training.metrics.steps or training.metrics.epochs or training.result:
            yield training


def _read_result(path: Path, notes: list[str]) -> TrainResult | None:
    try:
        return read_document(TrainResult, path)
    except FileNotFoundError:
        return None
    except RunDirectoryError:
        notes.append(f"{path.parent.name}/{path.name} is damaged.")
        return None


def step_interval(times: StepTimes) -> Interval:
    """Measured time of a step with the 95 % interval of its mean, seconds."""
    return Interval(times.step_time_s, times.step_time_low_s, times.step_time_high_s)


def measured_epoch(measurement: Measurement, dataset_samples: int) -> Interval | None:
    """Epoch time that a profile amounts to: ⌊D/B⌋ full steps and the updates of AGS's scale, seconds.

    None where not even one step fits.
    """
    steps = dataset_samples // measurement.configuration.global_batch
    if measurement.times is None or steps == 0:
        return None
    epoch = step_interval(measurement.times).times(steps)
    updates_s = measurement.updates_per_epoch * measurement.times.update_time_s
    return Interval(*(seconds + updates_s for seconds in epoch))


def measured_epochs(
    measurements: Iterable[Measurement], dataset_samples: int
) -> dict[Configuration, float]:
    """Median measured epoch time of each configuration, seconds; repeated profiles count alike.

    Args:
        measurements: Of one partition, where there are several.
        dataset_samples: Training samples in an epoch, for records that do not say.
    """
    times: dict[tuple[int, int, int], list[float]] = {}
    for item in measurements:
        epoch_s = (
            _measured_epoch_s(item, item.dataset_samples or dataset_samples)
            if item.status == "ok"
            else None
        )
        if epoch_s is not None:
            times.setdefault((item.nodes, item.workers_per_node, item.local_batch), []).append(
                epoch_s
            )
    return {Configuration(*place): statistics.median(values) for place, values in times.items()}


def _measured_epoch_s(measurement: Measurement, dataset_samples: int) -> float | None:
    """The value of `measured_epoch`."""
    times = measurement.times
    steps = dataset_samples // (
        measurement.nodes * measurement.workers_per_node * measurement.local_batch
    )
    if times is None or steps == 0:
        return None
    return times.step_time_s * steps + measurement.updates_per_epoch * times.update_time_s


_TIMES = ("train_time_s", "epoch_time_s", "step_time_s")
_SAME_SPREAD = dict.fromkeys(_TIMES, _TIMES)


def predicted(candidate: Candidate, quantity: str) -> Interval:
    """A predicted quantity of a candidate with its 90 % interval, where the plan has one.

    Step, epoch and training time are multiples of one another: the interval of one gives those of
    the others, and that of the cost.
    """
    if quantity == "cost":
        time = predicted(candidate, "train_time_s")
        known = time.value > 0
        return Interval(
            *(cost_at(candidate, seconds / time.value if known else 1.0) for seconds in time)
        )
    value = float(getattr(candidate, quantity))
    for known in (quantity, *_SAME_SPREAD.get(quantity, ())):
        base = float(getattr(candidate, known, 0.0))
        if known in candidate.interval_90 and base > 0:
            low, high = candidate.interval_90[known]
            return Interval(value, value * low / base, value * high / base)
    return Interval(value, value, value)


def cost_at(candidate: Candidate, pace: float) -> float:
    """Cost if steps took `pace` times as long as predicted.

    With f the share of the expected wall time that evaluation and starts take, `C · (f + (1 − f) ·
    pace)`: what is paid follows the wall time. Plans that do not tell its parts have steps alone.
    """
    fixed = fixed_share(candidate.wall_parts_s)
    return candidate.cost * (fixed + (1.0 - fixed) * pace)


def find_candidate(
    plan: Plan | None, configuration: Configuration, partition: str | None = None
) -> Candidate | None:
    """What the plan says of a configuration, if it is a candidate there; of no given partition: on the chosen first."""
    if plan is None:
        return None
    found = [item for item in plan.candidates if item.configuration == configuration]
    if partition is not None:
        return next((item for item in found if item.partition == partition), None)
    return min(found, key=lambda item: item.partition != plan.chosen.partition, default=None)


def trained_configuration(run: RunContents, training: Training) -> Configuration | None:
    """Where a training ran: as its result says, or else, if its batch never changed, as the plan chose."""
    if training.result is not None:
        done = training.result
        configuration = Configuration(done.nodes, done.workers_per_node, done.local_batch)
    elif run.plan is not None:
        configuration = run.plan.chosen.configuration
    else:
        return None
    changed = any(
        epoch.global_batch != configuration.global_batch for epoch in training.metrics.epochs
    )
    return None if changed else configuration


def trained_candidate(run: RunContents, training: Training) -> Candidate | None:
    """What the plan says of where a training ran."""
    configuration = trained_configuration(run, training)
    return find_candidate(run.plan, configuration, training.partition) if configuration else None


def used_bytes(item: Measurement) -> int | None:
    """The memory that counts against the limit: reserved by the GPU allocator, or resident in the whole process."""
    return item.memory.reserved_bytes if item.memory else None


def memory_kind(device: str) -> str:
    """Which memory that is, in words."""
    return (
        "GPU memory reserved by the allocator"
        if device == "cuda"
        else "resident memory of the whole process"
    )
