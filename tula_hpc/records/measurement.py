"""Measurements of configurations, and the estimate of memory before any profile."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from tula_hpc.errors import RunDirectoryError
from tula_hpc.failure_kinds import Failure
from tula_hpc.own_sources import digests_of
from tula_hpc.records.base import Batch, Configuration, JobId, Nodes, Record, WorkersPerNode
from tula_hpc.records.identity import Digest, Identity
from tula_hpc.records.storage import parse_record, read_document, read_records, with_rank_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# a record with a longer time, or more bytes, is damaged
CREDIBLE_S = 1e6
# seconds; no step is shorter
MOMENT_S = 1e-9
CREDIBLE_BYTES = 1e18

# samples of a smaller local batch, and seconds of its forward and backward in one pass, without
# synchronization
SmallerCompute = tuple[Batch, Annotated[float, Field(gt=MOMENT_S, lt=CREDIBLE_S)]]


class StepTimes(Record):
    """Seconds: means over rounds of free-running steps or passes, by the slowest worker."""

    # a whole training step: data wait, forward, backward with all-reduce, optimizer
    step_time_s: float
    # 95 % interval of the mean
    step_time_low_s: float
    step_time_high_s: float
    # part of step_time_s: waiting for the loader while the device has nothing to do
    data_time_s: float
    # forward and backward without synchronization (no_sync), measured apart
    compute_time_s: float
    # the optimizer's step alone, measured apart
    optimizer_time_s: float
    # bare all-reduce of the gradient's bytes, measured apart; 0 for one worker
    allreduce_time_s: float
    # an update of AGS's gradient scale, measured apart; not part of step_time_s
    update_time_s: float = 0.0
    # evaluation's forward pass of a local batch, median; None: unknown
    forward_time_s: float | None = None
    # mean of a step over the first half of the rounds, and over the second; None: not recorded
    first_half_s: float | None = None
    second_half_s: float | None = None
    # largest difference of the two halves that scatter between rounds explains
    halves_scatter_s: float | None = None

    @property
    def drift(self) -> float:
        """Share by which the second half of rounds was slower; 0 if that is scatter, or unknown."""
        halves = (self.first_half_s, self.second_half_s)
        known = [s for s in halves if s is not None and MOMENT_S < s < CREDIBLE_S]
        if len(known) < len(halves) or self.halves_scatter_s is None:
            return 0.0
        first, second = known
        return second / first - 1.0 if abs(second - first) > self.halves_scatter_s else 0.0

    @property
    def are_credible(self) -> bool:
        """Tell whether the times of step and parts are plausible, except `forward_time_s`."""
        return (
            0.0 <= self.data_time_s < CREDIBLE_S
            and 0.0 <= self.compute_time_s < CREDIBLE_S
            and 0.0 <= self.optimizer_time_s < CREDIBLE_S
            and 0.0 <= self.allreduce_time_s < CREDIBLE_S
            and 0.0 <= self.update_time_s < CREDIBLE_S
            and MOMENT_S < self.step_time_s < CREDIBLE_S
        )


class MemoryUse(Record):
    """Bytes of memory of one worker: the largest value of all workers."""

    # CUDA: peak allocated; CPU: peak resident set over the baseline
    peak_bytes: int
    # CUDA: peak reserved by the allocator; CPU: peak resident set of the whole process
    reserved_bytes: int
    # CUDA: 0; CPU: resident set before the model was built (interpreter and libraries)
    baseline_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    # part of optimizer_bytes that the workers divide among them (ZeRO)
    sharded_bytes: int = 0
    # CUDA only, as the fields below: memory of the smallest device of any worker; None: unknown
    total_bytes: int | None = None
    # used outside of torch's allocator after the timed steps: CUDA context, NCCL, cuDNN, others
    other_bytes: int | None = None
    # how often the allocator ran out in the timed steps, so that it freed its cache and retried
    alloc_retries: int = 0
    # how often the retry failed, too
    ooms: int = 0

    @property
    def is_credible(self) -> bool:
        """Tell whether the counts are plausible."""
        held = self.baseline_bytes + self.peak_bytes
        counts = [count for count in self.__dict__.values() if count is not None]
        return (
            min(self.reserved_bytes, held) > 0 and min(counts) >= 0 and max(counts) < CREDIBLE_BYTES
        )

    @property
    def ran_short(self) -> bool:
        """Tell whether the steps ran only because the allocator freed its cache and tried again."""
        return self.alloc_retries + self.ooms > 0


class ProcessorUse(Record):
    """Load of a node's processors in the timed steps, by the busiest worker."""

    # processor seconds per step: of the loader's processes (without waiting for files), and of the
    # worker's own process, which also loads if there are no loader processes
    loader_s: float = Field(ge=0.0, lt=CREDIBLE_S)
    worker_s: float = Field(ge=0.0, lt=CREDIBLE_S)
    # cores that the worker and its loader may run on
    cores: float = Field(gt=0.0, lt=2**20)


class Measurement(Record):
    """Profile of one configuration; it has times and memory if `status` is "ok"."""

    schema_version: Literal[1] = 1
    status: Literal["ok", "oom", "failed"]
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    times: StepTimes | None = None
    memory: MemoryUse | None = None
    failure: Failure | None = None
    detail: str = ""
    # "train": the training ran out of memory, which bounds the batch as a profile's OOM does
    stage: Literal["profile", "train"] = "profile"
    steps: int = 0
    # the 95 % interval of the mean step time became narrower than search.ci_width
    converged: bool = False
    # no other job could use the nodes
    exclusive: bool = True
    # several "nodes" shared one machine (local executor)
    emulated: bool = False
    # training samples in an epoch, D; 0: unknown
    dataset_samples: int = 0
    # an epoch ends with a shorter batch, instead of dropping the samples that fill no batch
    short_batch: bool = False
    # mean samples of a batch over those asked for; not 1 if batches vary, e.g. by their tokens
    batch_share: float = Field(default=1.0, gt=0.1, lt=10.0)
    # samples of an evaluation; 0: unknown
    test_samples: int = 0
    # mean number of updates of AGS's gradient scale in an epoch
    updates_per_epoch: float = 0.0
    parameters: int = 0
    # script: seconds of an epoch outside its steps (evaluation, saving, ...); None: not seen
    between_epochs_s: float | None = Field(default=None, ge=0.0, lt=CREDIBLE_S)
    # script: samples that the loaders of all workers give out in an epoch; 0: unknown
    epoch_samples: int = Field(default=0, ge=0)
    # script: it saves its state with `tula_hpc.attach`, so a restart goes on exactly where it was
    kept: bool = False
    # script: one loader iterator serves all epochs; it would begin anew after a restart
    one_iterator: bool = False
    # of model, code and data; None: unknown, as the job was killed
    identity: Identity | None = None
    # micro-batches in which a step takes the local batch, one after another
    parts: int = Field(default=1, ge=1, le=10**6)
    # script: forward passes for the local batch, as its argument {accumulation} asks for; None: it
    # has no such argument
    accumulation: int | None = Field(default=None, ge=1, le=2**31)
    smaller_computes: tuple[SmallerCompute, ...] = Field(default=(), max_length=48)
    device: str = ""
    backend: str = ""
    hosts: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default={})
    # seconds by name: step, data, compute, compute of N (`compute_of`), optimizer, update,
    # allreduce, forward
    samples: dict[str, list[float]] = Field(default={})
    # number of steps or passes in a row that each of these samples averages; 1 if missing
    round_steps: dict[str, Annotated[int, Field(ge=1, le=2**31)]] = Field(default={})
    processor: ProcessorUse | None = None
    job_id: JobId = ""
    finished_at: float = 0.0
    # seconds of the whole profile of this configuration
    elapsed_s: float = 0.0
    # from the start of the job to the end of its first step; 0 unless measured first in its job
    start_s: float = 0.0
    # name in [[partitions]]; empty if the cluster has none
    partition: str = ""
    # electrical power in the timed steps, mean over the nodes; 0: unknown
    watts_per_node: float = 0.0
    # elapsed_s × all nodes of the job's allocation, including nodes that only waited
    node_seconds: float = 0.0
    # samples: tr(Σ)/|G|² at the profiled weights; 0: unknown
    noise_scale: float = 0.0
    # number of samples that the estimate was made from
    noise_samples: int = 0
    # |G|² and tr(Σ) of each pass; unbiased, so they may be negative
    noise_terms: tuple[tuple[float, float], ...] = ()

    @model_validator(mode="after")
    def _smaller_indeed(self) -> Measurement:
        if any(batch >= self.local_batch for batch, _ in self.smaller_computes):
            raise ValueError(
                f"smaller_computes: expected batches below local_batch = {self.local_batch}"
            )
        return self

    @property
    def configuration(self) -> Configuration:
        """Return the measured configuration."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)

    @property
    def is_left_out(self) -> bool:
        """Tell whether a script has too few steps of this batch to be measured."""
        return self.status == "failed" and self.failure is None and self.steps > 0

    def is_left_out_by(self, sources: dict[str, str]) -> bool:
        """Tell whether a script with these code digests is left out; {}: its code is unchanged."""
        before = sources if self.identity is None else self.identity.sources
        return self.is_left_out and sources in ({}, before)


# the whole dictionary; does not match if it holds anything but names and numbers
_SAMPLES = re.compile(rb'"samples":\{(?:"[^"\\]*":\[[-+\d.e,]*\],?)*(?=\})')


def parse_without_samples(line: bytes) -> Measurement:
    """Parse a measurement after cutting out its samples, which saves most of the time.

    Raises:
        ValueError: The line is no measurement.
    """
    line = _SAMPLES.sub(b'"samples":{', line, count=1)
    return parse_record(Measurement, line).model_copy(update={"samples": {}})


def measurements_for_search(
    measurements: Iterable[Measurement],
    partition: str,
    since: float,
    entry_points: Iterable[str] = (),
) -> list[Measurement]:
    """Return the measurements that count for the search on one partition.

    A failure before `since` was in an earlier run of the command, and its cause may have been
    removed. Likewise a batch of which a script took too few steps, if the code behind
    `entry_points` has changed.
    """
    mine = [m for m in measurements if m.partition == partition]
    now: dict[str, str] = {}
    # the code's files are read only if the result depends on them
    if any(m.is_left_out and m.finished_at < since for m in mine):
        now = digests_of(entry_points)
    return [
        m for m in mine if m.status != "failed" or m.finished_at >= since or m.is_left_out_by(now)
    ]


def of_partition(measurements: Sequence[Measurement], name: str) -> Sequence[Measurement]:
    """Return the measurements of one partition; all of them if the cluster has no partitions."""
    return [row for row in measurements if row.partition == name] if name else measurements


def holds_any(output: Path, rows: Iterable[Measurement]) -> bool:
    """Tell whether a profile job's file holds one of these measurements."""
    key = attrgetter("configuration", "finished_at")
    return not set(map(key, rows)).isdisjoint(map(key, recorded_by_job(output)))


def recorded_by_job(output: Path) -> list[Measurement]:
    """Return a profile job's measurements so far, including those in other ranks' files."""
    return read_records(Measurement, with_rank_files(output)).records


def recorded_in(folder: Path) -> list[Measurement]:
    """Return the measurements so far of all profile jobs of a run."""
    return read_records(Measurement, sorted(folder.glob("*.jsonl"))).records


def is_usable(measurement: Measurement) -> bool:
    """Tell whether a measurement has times and memory, and both are plausible."""
    times, memory = measurement.times, measurement.memory
    if measurement.status != "ok" or times is None or memory is None:
        return False
    return times.are_credible and memory.is_credible


Steps = TypeVar("Steps", float, "NDArray[np.float64]")


def steps_of_epoch(batches: Steps, *, short_batch: bool) -> Steps:
    """Return the steps of an epoch; with `short_batch` a shorter last batch counts as a fraction.

    `batches` are the samples of an epoch over those of a batch.
    """
    return batches if short_batch else batches // 1


def compute_of(batch: int) -> str:
    """Return the key that a smaller batch's computation has in `Measurement.samples`."""
    return f"compute of {batch}"


class Footprint(Record):
    """Estimate of one worker's memory in bytes, from counting tensors before any step is run.

    `fixed_bytes + activation_bytes_per_sample × b` is the memory of tensors at the peak of a step
    with local batch b, if b is so large that the peak lies in the backward pass. `peaks` is the
    memory that counts towards the limit, at local batches that are powers of two.
    """

    schema_version: Literal[1] = 1
    parameter_bytes: int
    gradient_bytes: int
    # of one worker; under ZeRO its share of the states
    optimizer_bytes: int
    activation_bytes_per_sample: int
    fixed_bytes: int
    # CPU: the process with its libraries, before the model
    host_baseline_bytes: int = 0
    # AGS: reference gradient and scale factors; on top of `peaks` once training has updated them
    scaling_bytes: int = 0
    # host memory, on the first node, of the copy from which a checkpoint is written
    checkpoint_bytes: int = 0
    # the part of the previous two that counts towards the limit, on top of `peaks`
    beside_bytes: int = 0
    # bytes by local batch
    peaks: dict[Batch, int] = Field(min_length=1)
    # bytes one worker may use, after the safety margin; None: no limit
    limit_bytes: int | None = None
    # largest local batch in `peaks` that fits the limit; None: no limit, 0: none fits
    largest_local_batch: int | None = None
    # number of workers that the estimate assumes: the fewest of the search
    world_size: int = 1
    # local batches at which tensors were counted
    counted_at: tuple[int, ...] = ()
    # real: counted on small real batches, since the model cannot run on fake tensors
    method: Literal["fake", "real"] = "fake"
    assumptions: tuple[str, ...] = ()
    # time that the estimate took
    seconds: float = 0.0

    @property
    def before_batch_bytes(self) -> int:
        """Bytes of a worker before its first batch, without those of libraries."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return self.host_baseline_bytes + states + self.beside_bytes

    def peak_bytes(self, local_batch: int) -> float:
        """Interpolate the estimate at a local batch, linearly between `peaks` and beyond them."""
        known = sorted(self.peaks)
        right = min(max(1, bisect.bisect_left(known, local_batch)), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.peaks[high] - self.peaks[low]) / (high - low) if high > low else 0.0
        return max(float(self.peaks[known[0]]), self.peaks[low] + slope * (local_batch - low))


def damaged_footprints(run: Path) -> list[str]:
    """List a run's estimates of memory that are damaged, with the remedy."""
    found = []
    for path in sorted(run.glob("footprint*.json")):
        try:
            read_document(Footprint, path)
        except RunDirectoryError:
            words = "delete it, and memory is estimated again when a profile needs that"
            found.append(f"{path}: is damaged and was skipped; {words}")
    return found


class Trial(Record):
    """Result of a command's trial of the workload on its own machine, before it submits jobs."""

    schema_version: Literal[1] = 1
    identity: Identity
    # digest of code, keys of the workload and libraries; a new trial is needed if it differs
    key: Digest = ""
    # Python's warnings about the user's own code
    warnings: tuple[str, ...] = ()
    # estimates made in the trial, and reasons why one could not be made, by partition
    footprints: dict[str, Footprint] = Field(default={})
    reasons: dict[str, str] = Field(default={})
