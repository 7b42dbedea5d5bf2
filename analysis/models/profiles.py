"""Many measurements, one summary: medians by configuration, out-of-memory bounds, failures, contradictions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple, TypeVar, cast

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


class Profile(NamedTuple):
    """What is known of one configuration that ran: medians over its repeated measurements."""

    configuration: Configuration
    times: StepTimes
    memory: MemoryUse
    repeats: int
    # at least one repeat was
    converged: bool
    # every repeat had its nodes to itself
    exclusive: bool
    # some repeat shared one machine between "nodes"
    emulated: bool
    # collective library: nccl, gloo, none for one worker
    backend: str = ""
    # median over the repeats that have it; 0: unknown
    watts_per_node: float = 0.0
    # in so many a step takes the local batch, one after another
    parts: int = 1
    # smaller batches, and seconds of forward and backward of each
    smaller_computes: tuple[tuple[int, float], ...] = ()
    # None: no repeat has it
    processor: ProcessorUse | None = None

    @property
    def part_batch(self) -> float:
        """Samples of a worker that are on the device together."""
        return self.configuration.local_batch / self.parts


class Summary(NamedTuple):
    """All measurements of a run, independent of their order."""

    # by configuration, ascending
    profiles: tuple[Profile, ...]
    out_of_memory: tuple[Configuration, ...]
    # configurations that only failed, with the last reason
    failed: dict[Configuration, str]
    # D; what most measurements say, 0 if none does
    dataset_samples: int
    # of the model; likewise
    parameters: int
    warnings: tuple[str, ...]
    # of an evaluation; likewise
    test_samples: int = 0
    # from the start of a job to its first step, median over the jobs that measured it
    start_s: float | None = None

    @property
    def parts(self) -> int:
        """In so many a single worker takes its batch; several never do."""
        return max((profile.parts for profile in self.profiles), default=1)

    @property
    def memory_uses(self) -> list[MemoryUse]:
        """What each configuration that ran used."""
        return [row.memory for row in self.profiles]

    def oom_bound(self, *, alone: bool) -> float:
        """Local batch from which on memory is known not to suffice, for one worker or for several; inf if for none."""
        bounds = (*self.out_of_memory, *self.short_of_memory)
        return min(as_large(bounds, self.parts, alone=alone), default=math.inf)

    @property
    def short_of_memory(self) -> tuple[Configuration, ...]:
        """Configurations that ran only because the allocator freed what it kept and tried again."""
        return tuple(row.configuration for row in self.profiles if row.memory.ran_short)

    @property
    def oom_reason(self) -> str:
        """What lacked memory with the fewest samples at once, which bounds all others; only where something did."""
        bounds = (*self.out_of_memory, *self.short_of_memory)
        held = as_large(bounds, self.parts, alone=False)
        at_once, first = min(zip(held, bounds, strict=True))
        what = (
            "ran out of memory"
            if first in self.out_of_memory
            else "ran only after the allocator had freed memory"
        )
        if self.parts == 1:
            return f"local batch {first.local_batch} {what}"
        return f"{first}, with {math.ceil(at_once)} samples at once, {what}"


def as_large(
    configurations: Iterable[Configuration], parts: int, *, alone: bool
) -> Iterator[float]:
    """The local batches with which one worker, that takes them in parts, or several would hold as much at once."""
    other = parts if alone else 1.0 / parts
    for configuration in configurations:
        yield configuration.local_batch * (
            1.0 if (configuration.world_size == 1) == alone else other
        )


def is_out_of_memory(measurement: Measurement) -> bool:
    """Whether memory ran out, whatever noticed it."""
    return measurement.status == "oom" or (
        measurement.failure is not None and measurement.failure.is_oom
    )


def is_short_of_memory(measurement: Measurement) -> bool:
    """Whether it ran, but only because the allocator freed what it kept and tried again."""
    return (
        is_usable(measurement) and measurement.memory is not None and measurement.memory.ran_short
    )


def summarize(measurements: Iterable[Measurement]) -> Summary:
    """Group measurements by configuration; repeats become their median: one disturbed profile does not decide."""
    usable, out, other = _sorted_by_use(measurements)
    profiles = tuple(
        _profile(configuration, usable[configuration]) for configuration in sorted(usable)
    )
    out_of_memory = tuple(sorted(out))
    settled = usable.keys() | out.keys()
    failed = {key: _last_reason(other[key]) for key in sorted(other) if key not in settled}
    samples, parameters, tests = (
        Counter(
            value for rows in usable.values() for row in rows if (value := getattr(row, field)) > 0
        )
        for field in ("dataset_samples", "parameters", "test_samples")
    )
    summary = Summary(
        profiles,
        out_of_memory,
        failed,
        dataset_samples=_most_common(samples),
        parameters=_most_common(parameters),
        warnings=tuple(_mixed(samples, parameters)),
        test_samples=_most_common(tests),
        start_s=_start_s(row for rows in usable.values() for row in rows),
    )
    return summary._replace(warnings=(*summary.warnings, *_contradictions(summary)))


def _start_s(rows: Iterable[Measurement]) -> float | None:
    known = [row.start_s for row in rows if 0.0 < row.start_s < CREDIBLE_S]
    return median(known) if known else None


Groups = dict[Configuration, list[Measurement]]


def _sorted_by_use(measurements: Iterable[Measurement]) -> tuple[Groups, Groups, Groups]:
    """By configuration: those with times and memory, those that ran out of memory, all others."""
    groups: tuple[defaultdict[tuple[int, int, int], list[Measurement]], ...]
    groups = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in measurements:
        kind = 0 if is_usable(row) else 1 if is_out_of_memory(row) else 2
        groups[kind][row.nodes, row.workers_per_node, row.local_batch].append(row)
    usable, out, other = (
        {Configuration(*key): rows for key, rows in part.items()} for part in groups
    )
    return usable, out, other


def _profile(configuration: Configuration, rows: Sequence[Measurement]) -> Profile:
    used = [row.processor for row in rows if row.processor]
    return Profile(
        configuration,
        times=_medians([row.times for row in rows if row.times], StepTimes, float),
        memory=_medians([row.memory for row in rows if row.memory], MemoryUse, round),
        repeats=len(rows),
        converged=any(row.converged for row in rows),
        exclusive=all(row.exclusive for row in rows),
        emulated=any(row.emulated for row in rows),
        backend=rows[0].backend,
        watts_per_node=median(
            [row.watts_per_node for row in rows if row.watts_per_node > 0.0] or [0.0]
        ),
        parts=min(row.parts for row in rows),
        smaller_computes=tuple(
            medians_by_batch(pair for row in rows for pair in row.smaller_computes).items()
        ),
        processor=_medians(used, ProcessorUse, float) if used else None,
    )


def medians_by_batch(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The median of each batch's values, batches ascending."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for batch, value in pairs:
        found[batch].append(value)
    return {batch: median(found[batch]) for batch in sorted(found)}


Fields = TypeVar("Fields", bound=Record)


def _medians(
    rows: Sequence[Fields], kind: type[Fields], convert: Callable[[float], float]
) -> Fields:
    if len(rows) == 1:
        return rows[0]
    names = tuple(kind.model_fields)
    columns = zip(*map(attrgetter(*names), rows), strict=True)
    values: dict[str, Any] = {
        name: _median(column, convert) for name, column in zip(names, columns, strict=True)
    }
    return cast(Fields, kind.model_construct(None, **values))


def _median(column: Iterable[float | None], convert: Callable[[float], float]) -> float | None:
    """Of those that know it; None where none does."""
    known = [value for value in column if value is not None]
    return convert(median(known)) if known else None


def _last_reason(rows: Sequence[Measurement]) -> str:
    last = max(rows, key=lambda row: (row.finished_at, row.detail))
    damaged = last.times is not None and last.memory is not None
    silent = "its times or memory cannot be true" if damaged else "no time or memory was recorded"
    return ": ".join(part for part in (last.failure or "", last.detail) if part) or silent


def _most_common(counts: Counter[int]) -> int:
    return max(counts, key=lambda value: (counts[value], value), default=0)


def _mixed(samples: Counter[int], parameters: Counter[int]) -> list[str]:
    found = []
    if len(samples) > 1:
        sizes = ", ".join(f"{value:,}" for value in sorted(samples))
        used = f"{_most_common(samples):,}"
        found.append(
            f"measurements over data sets of different size are mixed ({sizes} samples); {used} is used"
        )
    if len(parameters) > 1:
        sizes = ", ".join(f"{value:,}" for value in sorted(parameters))
        found.append(f"measurements of models of different size are mixed ({sizes} parameters)")
    return found


def _contradictions(summary: Summary) -> list[str]:
    """Configurations that ran well although as many samples at once lacked memory elsewhere."""
    bounds = {alone: summary.oom_bound(alone=alone) for alone in (True, False)}
    ran = [row.configuration for row in summary.profiles if not row.memory.ran_short]
    beyond = [str(where) for where in ran if where.local_batch >= bounds[where.world_size == 1]]
    if not beyond:
        return []
    return [
        f"{summary.oom_reason} once, but {', '.join(beyond)} ran: the bound is kept, to be safe"
    ]
