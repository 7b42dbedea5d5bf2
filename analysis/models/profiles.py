"""Summarize a run's measurements: medians, memory bounds, failures and contradictions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.accumulation import Passes, times_of_one_pass
from tula_hpc.analysis.models.critical_batch import profiled_batch
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import (
    CREDIBLE_S,
    Configuration,
    Measurement,
    MemoryUse,
    ProcessorUse,
    Record,
    StepTimes,
    is_usable,
)

# width of a normal distribution's 90 % interval over that of its 95 % interval
SHARE_90 = 1.645 / 1.96
# intervals of a step end at this factor above and below it: wider ones say no more
MOST_NOISE = 2.0


class Profile(NamedTuple):
    """Medians over the repeated measurements of one configuration; 0 or None if none has any."""

    configuration: Configuration
    times: StepTimes
    memory: MemoryUse
    # the interval of at least one repeat became narrower than search.ci_width
    converged: bool
    # every repeat had its nodes to itself
    exclusive: bool
    # some repeat shared one machine between "nodes"
    emulated: bool
    # collective library: nccl, gloo, none for one worker
    backend: str = ""
    watts_per_node: float = 0.0
    # micro-batches in which a step takes the local batch
    parts: int = 1
    # smaller local batches, each with the seconds of its forward and backward pass
    smaller_computes: tuple[tuple[int, float], ...] = ()
    processor: ProcessorUse | None = None
    # the script keeps its state, so that it resumes exactly where it was
    kept: bool = False
    # but not in mid-epoch: one iterator yields the batches of all epochs, and starts over on resume
    one_iterator: bool = False
    # forward passes in which a script took the local batch, if their number is passed to it
    accumulation: int = 1
    # seconds of a script's epoch that are not in its steps
    between_epochs_s: float | None = None
    # samples that a script's loaders yield in an epoch
    epoch_samples: int = 0

    @property
    def part_batch(self) -> float:
        """Samples of a worker that are on the device together."""
        return self.configuration.local_batch / self.parts / self.accumulation

    @property
    def of_one_pass(self) -> Profile:
        """This profile as if its local batch had been that of a single forward pass."""
        return self._replace(
            configuration=_of_one_pass(self.configuration, self.accumulation),
            times=times_of_one_pass(self.times, self.accumulation),
            accumulation=1,
        )


class StepPartTimes(NamedTuple):
    """Parts of a step, seconds: three that are measured, and the rest of the step."""

    data_s: float
    compute_s: float
    optimizer_s: float
    exposed_sync_s: float


def parts_of(times: StepTimes) -> StepPartTimes:
    """Split a step into parts that add up to it.

    Exposed synchronization = step − data − compute − optimizer, at least 0: the synchronization
    that does not overlap with the backward pass. Computation and optimizer are timed separately: if
    the step leaves less time than they took, both are shortened by the same factor.
    """
    data_s = min(times.data_time_s, times.step_time_s)
    left_s = times.step_time_s - data_s
    apart_s = times.compute_time_s + times.optimizer_time_s
    share = min(1.0, left_s / apart_s) if apart_s > 0.0 else 1.0
    return StepPartTimes(
        data_s,
        share * times.compute_time_s,
        share * times.optimizer_time_s,
        max(0.0, left_s - apart_s),
    )


class Summary(NamedTuple):
    """All measurements of a run, independent of their order."""

    # by configuration, ascending
    profiles: tuple[Profile, ...]
    # their local batch is that of one pass if a script takes it in several
    out_of_memory: tuple[Configuration, ...]
    # configurations that only failed, with the last reason
    failed: dict[Configuration, str]
    # training samples, D, and parameters of the model; the most frequent number, 0 if unknown
    dataset_samples: int
    parameters: int
    warnings: tuple[str, ...]
    # samples of an evaluation, likewise
    test_samples: int = 0
    # this field and the next one are explained in `Measurement`
    short_batch: bool = False
    batch_share: float = 1.0
    # seconds from the start of a job to its first step, for each job that timed it; their median
    starts_s: tuple[float, ...] = ()
    start_s: float | None = None
    # samples of a global batch, at the profiled weights; None: not measured
    critical_batch: float | None = None
    # forward passes in which a script takes its batches, see `planning.partitions.with_passes`
    passes: Passes = Passes()
    # local batches at which the untrained model's loss was not finite, on any number of nodes
    diverged: tuple[int, ...] = ()

    @property
    def of_one_pass(self) -> list[Profile]:
        """All profiles as the step-time model is fitted to them."""
        return [row.of_one_pass for row in self.profiles]

    @property
    def as_planned(self) -> list[Profile]:
        """Profiles that took their batch in as many passes as a training would."""
        return [
            row
            for row in self.profiles
            if row.accumulation == self.passes.of(row.configuration.local_batch)
        ]

    def noise(self, configurations: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
        """Return how far noise leaves the steps of configurations (n,) unknown, in logarithms.

        It is half of a 90 % interval: a measured configuration has its own, others the median. The
        step-time model cannot know it, as it sees one time per configuration, and no scatter if it
        follows all of them. Steps timed until `search.ci_width` was reached have next to none.
        """
        own = {}
        for row in self.as_planned:
            most = row.times.step_time_high_s / row.times.step_time_s
            own[row.configuration] = SHARE_90 * math.log(min(max(most, 1.0), MOST_NOISE))
        usual = median(own.values()) if own else 0.0
        return np.array([own.get(Configuration(*each), usual) for each in configurations])

    @property
    def parts(self) -> int:
        """Micro-batches per step of a single worker; several workers never split their batch."""
        return max((profile.parts for profile in self.profiles), default=1)

    @property
    def memory_uses(self) -> list[MemoryUse]:
        """Memory of each configuration that ran."""
        return [row.memory for row in self.profiles]

    def oom_bound(self, *, alone: bool) -> float:
        """Return the least local batch that lacks memory, on one worker or on several, or inf."""
        lacking = equivalent_batches(self.short_of_memory, self.parts, alone=alone)
        return min(lacking, default=math.inf)

    @property
    def short_of_memory(self) -> list[Configuration]:
        """Configurations that ran out of memory, or only ran after the allocator freed its cache."""
        short = [row.of_one_pass.configuration for row in self.profiles if row.memory.ran_short]
        return [*self.out_of_memory, *short]

    @property
    def oom_reason(self) -> str:
        """Memory that ran out with the fewest samples at once; it did in at least one configuration."""
        held = equivalent_batches(self.short_of_memory, self.parts, alone=False)
        at_once, first = min(zip(held, self.short_of_memory, strict=True))
        outcome = "ran only after the allocator had freed memory"
        if first in self.out_of_memory:
            outcome = "ran out of memory"
        if self.parts == 1:
            return f"local batch {first.local_batch} {outcome}"
        return f"{first}, with {math.ceil(at_once)} samples at once, {outcome}"


def equivalent_batches(
    configurations: Iterable[Configuration], parts: int, *, alone: bool
) -> list[float]:
    """Return for each configuration the local batch that holds as many samples at once.

    The result is for one worker (`alone`), which takes its batch in `parts` micro-batches, or for
    several, which hold the whole batch at once.
    """
    factor = parts if alone else 1.0 / parts
    return [
        c.local_batch * (1.0 if (c.world_size == 1) == alone else factor) for c in configurations
    ]


def _of_one_pass(configuration: Configuration, passes: int) -> Configuration:
    return configuration._replace(local_batch=max(1, configuration.local_batch // passes))


def is_out_of_memory(measurement: Measurement) -> bool:
    """Tell whether memory ran out, by status or by the kind of failure."""
    failure = measurement.failure
    return measurement.status == "oom" or (failure is not None and failure.is_oom)


# measurements by configuration and number of passes, which may differ between them
Groups = dict[tuple[Configuration, int], list[Measurement]]


def summarize(measurements: Iterable[Measurement]) -> Summary:
    """Group measurements by configuration; the median keeps one disturbed profile from deciding."""
    usable, out, other = _grouped(measurements)
    rows = list(chain.from_iterable(usable.values()))
    known = {configuration for configuration, _ in (*usable, *out)}
    samples = _counts(row.dataset_samples for row in rows)
    parameters = _counts(row.parameters for row in rows)
    starts_s = tuple(sorted(row.start_s for row in rows if 0.0 < row.start_s < CREDIBLE_S))
    failed = {}
    for configuration, passes in sorted(other):
        if configuration not in known:
            failed[configuration] = _last_reason(other[configuration, passes])
    summary = Summary(
        profiles=tuple(_profile(*key, usable[key]) for key in sorted(usable)),
        out_of_memory=tuple(sorted({_of_one_pass(*key) for key in out})),
        failed=failed,
        dataset_samples=_most_common(samples),
        parameters=_most_common(parameters),
        warnings=tuple(_mixed(samples, parameters)),
        test_samples=_most_common(_counts(row.test_samples for row in rows)),
        short_batch=bool(rows) and all(row.short_batch for row in rows),
        batch_share=median(row.batch_share for row in rows) if rows else 1.0,
        starts_s=starts_s,
        start_s=median(starts_s) if starts_s else None,
        critical_batch=profiled_batch(rows),
        diverged=_diverged(rows, chain.from_iterable(other.values())),
    )
    return summary._replace(warnings=(*summary.warnings, *_contradictions(summary)))


def _grouped(measurements: Iterable[Measurement]) -> tuple[Groups, Groups, Groups]:
    """Group usable measurements, those out of memory and all others by configuration and passes."""
    # plain tuples hash faster than configurations, and there may be very many rows
    groups: tuple[defaultdict[tuple[int, int, int, int], list[Measurement]], ...]
    groups = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in measurements:
        kind = 2
        if is_usable(row):
            kind = 0
        elif is_out_of_memory(row):
            kind = 1
        key = (row.nodes, row.workers_per_node, row.local_batch, row.accumulation or 1)
        groups[kind][key].append(row)
    usable, out, other = (
        {(Configuration(*key[:3]), key[3]): rows for key, rows in group.items()} for group in groups
    )
    return usable, out, other


def _profile(configuration: Configuration, passes: int, rows: Sequence[Measurement]) -> Profile:
    used = [row.processor for row in rows if row.processor]
    watts = [row.watts_per_node for row in rows if row.watts_per_node > 0.0]
    between_s = [row.between_epochs_s for row in rows if row.between_epochs_s is not None]
    smaller = medians_by_key(pair for row in rows for pair in row.smaller_computes)
    memories = [row.memory for row in rows if row.memory]
    return Profile(
        configuration,
        times=_medians([row.times for row in rows if row.times], float),
        # memory that was short once does not suffice
        memory=_medians(memories, round, largest=("alloc_retries", "ooms")),
        converged=any(row.converged for row in rows),
        exclusive=all(row.exclusive for row in rows),
        emulated=any(row.emulated for row in rows),
        backend=rows[0].backend,
        watts_per_node=median(watts) if watts else 0.0,
        parts=min(row.parts for row in rows),
        smaller_computes=tuple(smaller.items()),
        processor=_medians(used, float) if used else None,
        kept=any(row.kept for row in rows),
        one_iterator=any(row.one_iterator for row in rows),
        accumulation=passes,
        between_epochs_s=median(between_s) if between_s else None,
        epoch_samples=_most_common(_counts(row.epoch_samples for row in rows)),
    )


def medians_by_key(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the median of each key's values, keys ascending."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return {key: median(found[key]) for key in sorted(found)}


Fields = TypeVar("Fields", bound=Record)


def _medians(
    rows: Sequence[Fields], convert: Callable[[float], float], largest: Collection[str] = ()
) -> Fields:
    """Return the median of each field over the rows that have it; of `largest` ones the maximum."""
    if len(rows) == 1:
        return rows[0]
    names = tuple(type(rows[0]).model_fields)
    changes = {}
    for name, column in zip(names, zip(*map(attrgetter(*names), rows), strict=True), strict=True):
        # values are mostly equal, and to find that is much faster than a median
        if column.count(column[0]) < len(column):
            known = [value for value in column if value is not None]
            changes[name] = convert(max(known) if name in largest else median(known))
    return rows[0].model_copy(update=changes) if changes else rows[0]


def _last_reason(rows: Sequence[Measurement]) -> str:
    last = max(rows, key=lambda row: (row.finished_at, row.detail))
    if last.failure or last.detail:
        return ": ".join(part for part in (last.failure or "", last.detail) if part)
    if last.times is not None and last.memory is not None:
        return "its times or memory are not plausible"
    return "no time or memory was recorded"


def _diverged(usable: Iterable[Measurement], failed: Iterable[Measurement]) -> tuple[int, ...]:
    """Return the local batches that only diverged; one that was mended since has been measured."""
    measured = {row.local_batch for row in usable}
    diverged = {row.local_batch for row in failed if row.failure is Failure.DIVERGED}
    return tuple(sorted(diverged - measured))


def _counts(values: Iterable[int]) -> Counter[int]:
    return Counter(value for value in values if value > 0)


def _most_common(counts: Counter[int]) -> int:
    return max(counts, key=lambda value: (counts[value], value), default=0)


def _mixed(samples: Counter[int], parameters: Counter[int]) -> list[str]:
    found = []
    if len(samples) > 1:
        sizes = ", ".join(f"{value:,}" for value in sorted(samples))
        found.append(
            f"measurements over data sets of different size are mixed ({sizes} samples); "
            f"{_most_common(samples):,} is used"
        )
    if len(parameters) > 1:
        sizes = ", ".join(f"{value:,}" for value in sorted(parameters))
        found.append(f"measurements of models of different size are mixed ({sizes} parameters)")
    return found


def _contradictions(summary: Summary) -> list[str]:
    """Warn of configurations that ran with as many samples at once as lacked memory elsewhere."""
    bound_alone = summary.oom_bound(alone=True)
    bound_of_several = summary.oom_bound(alone=False)
    beyond = []
    for row in summary.profiles:
        bound = bound_alone if row.configuration.world_size == 1 else bound_of_several
        at_once = row.of_one_pass.configuration.local_batch
        if at_once >= bound and not row.memory.ran_short:
            beyond.append(str(row.configuration))
    if not beyond:
        return []
    return [
        f"{summary.oom_reason} once, but {', '.join(beyond)} ran: the bound is kept, to be safe"
    ]


class UpdateTime(NamedTuple):
    """Seconds per update of AGS's gradient scale over the number of workers."""

    # ascending; empty where no update was measured
    workers: Sequence[int]
    seconds: Sequence[float]

    def predict(self, workers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Interpolate between measured numbers of workers, constant beyond; 0 without any."""
        return np.interp(workers, self.workers or [1], self.seconds or [0.0])


def update_time(summary: Summary) -> UpdateTime:
    """Return the seconds per update of AGS's scale, by number of workers.

    Medians over the local batches: the reference batch of an update does not depend on them.
    """
    by_workers = medians_by_key(
        (row.configuration.world_size, row.times.update_time_s)
        for row in summary.profiles
        if row.times.update_time_s > 0
    )
    return UpdateTime(list(by_workers), list(by_workers.values()))
