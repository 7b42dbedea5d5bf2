"""Measurements of a configuration, and the estimate of its memory before any profile."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
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

# what a record says beyond that is damaged
CREDIBLE_S = 1e6
# no step takes less
MOMENT_S = 1e-9
CREDIBLE_BYTES = 1e18

# a smaller batch, samples, and seconds of forward and backward of it at once, without
# synchronization
SmallerCompute = tuple[Batch, Annotated[float, Field(gt=MOMENT_S, lt=CREDIBLE_S)]]


class StepTimes(Record):
    """Means over rounds of free-running steps or passes, seconds; of the slowest worker."""

    # a whole training step: data wait, forward, backward with all-reduce, optimizer
    step_time_s: float
    # 95 % interval of the mean
    step_time_low_s: float
    step_time_high_s: float
    # part of step_time_s: what waiting for the loader adds to it, as far as the device has nothing
    # to do meanwhile
    data_time_s: float
    # forward and backward without synchronization (no_sync), measured apart
    compute_time_s: float
    # the optimizer's step alone, measured apart
    optimizer_time_s: float
    # bare all-reduce of the gradient's bytes, measured apart; 0 for one worker
    allreduce_time_s: float
    # an update of AGS's gradient scale, measured apart; not part of step_time_s
    update_time_s: float = 0.0
    # a local batch as evaluation takes it, median of passes; None: unknown
    forward_time_s: float | None = None
    # means of a step over the first and over the second half of its rounds; None: not recorded
    first_half_s: float | None = None
    second_half_s: float | None = None
    # by so much the two may differ where the rounds only scatter
    halves_scatter_s: float | None = None

    @property
    def drift(self) -> float:
        """Return by which share steps became slower from the first half of the rounds to the second.

        0 where the rounds' own scatter explains the difference, or none was recorded.
        """
        halves = (self.first_half_s, self.second_half_s)
        known = [s for s in halves if s is not None and MOMENT_S < s < CREDIBLE_S]
        if len(known) < len(halves) or self.halves_scatter_s is None:
            return 0.0
        first, second = known
        return second / first - 1.0 if abs(second - first) > self.halves_scatter_s else 0.0

    @property
    def are_credible(self) -> bool:
        """Tell whether step and parts are plausible; a damaged `forward_time_s` does not count."""
        return (
            0.0 <= self.data_time_s < CREDIBLE_S
            and 0.0 <= self.compute_time_s < CREDIBLE_S
            and 0.0 <= self.optimizer_time_s < CREDIBLE_S
            and 0.0 <= self.allreduce_time_s < CREDIBLE_S
            and 0.0 <= self.update_time_s < CREDIBLE_S
            and MOMENT_S < self.step_time_s < CREDIBLE_S
        )


class MemoryUse(Record):
    """Memory of one worker, bytes; the largest over the workers."""

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
    # what follows is CUDA's alone: memory of the device, the least of any worker's; None: unknown
    total_bytes: int | None = None
    # of it outside of torch's allocator after the timed steps: CUDA context, NCCL, cuDNN, others
    other_bytes: int | None = None
    # how often in the timed steps the allocator, finding no memory, freed what it kept to try again
    alloc_retries: int = 0
    # and how often that did not help
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
    """Load of a node's processors in the timed steps, of the busiest worker."""

    # seconds of processors for a step: of the loader's processes (of waiting for files there is
    # none), and of the worker's own, which loads by itself where there are none
    loader_s: float = Field(ge=0.0, lt=CREDIBLE_S)
    worker_s: float = Field(ge=0.0, lt=CREDIBLE_S)
    # that the worker may run on, loader included
    cores: float = Field(gt=0.0, lt=2**20)


class Measurement(Record):
    """Profile of one configuration; `status` tells whether times and memory are there."""

    schema_version: Literal[1] = 1
    status: Literal["ok", "oom", "failed"]
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    times: StepTimes | None = None
    memory: MemoryUse | None = None
    failure: Failure | None = None
    detail: str = ""
    # train: an OOM of the final job, a bound all the same
    stage: Literal["profile", "train"] = "profile"
    steps: int = 0
    # the mean's 95 % interval became narrower than search.ci_width
    converged: bool = False
    # the nodes were the task's alone
    exclusive: bool = True
    # several "nodes" shared one machine (local executor)
    emulated: bool = False
    # training samples in an epoch, D
    dataset_samples: int = 0
    # those that fill no batch make a shorter one at the epoch's end, and are not left out
    short_batch: bool = False
    # samples of a batch, on average, over those that were asked for: such as are cut by their tokens
    # differ
    batch_share: float = Field(default=1.0, gt=0.1, lt=10.0)
    # that an evaluation takes; 0: unknown
    test_samples: int = 0
    # of AGS's gradient scale, on average
    updates_per_epoch: float = 0.0
    parameters: int = 0
    # of an epoch of a script, not of its steps: evaluation, saving, start of loaders; None: not seen
    between_epochs_s: float | None = Field(default=None, ge=0.0, lt=CREDIBLE_S)
    # that a script's loaders give out in an epoch, over all workers; 0: not known
    epoch_samples: int = Field(default=0, ge=0)
    # a script keeps its state here, so that it goes on exactly where it was
    kept: bool = False
    # though one iterator over its loader goes on from epoch to epoch: that would begin anew
    one_iterator: bool = False
    # of model, code and data; None: of a job that was killed
    identity: Identity | None = None
    # in so many a step takes the local batch, one after another
    parts: int = Field(default=1, ge=1, le=10**6)
    # forward passes in which a script that is told their number takes the local batch; None: it is
    # not told
    accumulation: int | None = Field(default=None, ge=1, le=2**31)
    smaller_computes: tuple[SmallerCompute, ...] = Field(default=(), max_length=48)
    device: str = ""
    backend: str = ""
    hosts: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default={})
    # seconds: step, data, compute, compute of smaller batches, optimizer, update, allreduce,
    # forward
    samples: dict[str, list[float]] = Field(default={})
    # of so many steps or passes in a row each of these samples is the mean; of one where it is not
    # said
    round_steps: dict[str, Annotated[int, Field(ge=1, le=2**31)]] = Field(default={})
    processor: ProcessorUse | None = None
    job_id: JobId = ""
    finished_at: float = 0.0
    # of the whole profile of this configuration
    elapsed_s: float = 0.0
    # from the start of its job to the end of the first step; 0 for what the job measured later
    start_s: float = 0.0
    # which of [[partitions]]; empty where the cluster has none
    partition: str = ""
    # electrical power of a node during the timed steps, mean over the nodes; 0: unknown
    watts_per_node: float = 0.0
    # elapsed_s × nodes of the job's allocation, those that only waited included
    node_seconds: float = 0.0
    # samples, tr(Σ)/|G|² at the weights that were profiled; 0: unknown
    noise_scale: float = 0.0
    # so many samples the estimate was made from
    noise_samples: int = 0
    # |G|² and tr(Σ) of each pass, unbiased, so of any sign
    noise_terms: tuple[tuple[float, float], ...] = ()

    @model_validator(mode="after")
    def _smaller_indeed(self) -> Measurement:
        if (
            self.smaller_computes
            and max(batch for batch, _ in self.smaller_computes) >= self.local_batch
        ):
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
        """Tell whether that holds for a script with these digests; without any: for an unchanged one."""
        before = sources if self.identity is None else self.identity.sources
        return self.is_left_out and sources in ({}, before)


# to its end, unless other signs are in it than numbers and their names have
_SAMPLES = re.compile(rb'"samples":\{(?:"[^"\\]*":\[[-+\d.e,]*\],?)*(?=\})')


def parse_without_samples(line: bytes) -> Measurement:
    """Parse a measurement, cutting out its samples before, which saves most of the time.

    Raises:
        ValueError: It is none.
    """
    line = _SAMPLES.sub(b'"samples":{', line, count=1)
    return parse_record(Measurement, line).model_copy(update={"samples": {}})


def measurements_for_search(
    measurements: Iterable[Measurement],
    partition: str,
    since: float,
    entry_points: Iterable[str] = (),
) -> list[Measurement]:
    """Return those that count for the search on one partition.

    A failure before `since`, in an earlier run of the command, may have been mended. So may a
    script that took too few steps of a batch, if another code is behind `entry_points` now.
    """
    mine = [m for m in measurements if m.partition == partition]
    now: dict[str, str] = {}
    # they are read only where it matters
    if any(m.is_left_out and m.finished_at < since for m in mine):
        now = digests_of(entry_points)
    return [
        m for m in mine if m.status != "failed" or m.finished_at >= since or m.is_left_out_by(now)
    ]


def measurements_of(measurements: Iterable[Measurement], partition: str) -> list[Measurement]:
    """Return those of one partition, and of runs from before there were partitions."""
    return [m for m in measurements if m.partition in ("", partition)]


def holds_any(output: Path, rows: Iterable[Measurement]) -> bool:
    """Tell whether one of these measurements is in a profile job's file."""
    wanted = {(m.configuration, m.finished_at) for m in rows}
    return bool(wanted & {(m.configuration, m.finished_at) for m in recorded_by_job(output)})


def recorded_by_job(output: Path) -> list[Measurement]:
    """Return a profile job's measurements so far, those in its workers' own files included."""
    return read_records(Measurement, with_rank_files(output)).records


def recorded_in(folder: Path) -> list[Measurement]:
    """Return the measurements so far of all profile jobs of a run."""
    return read_records(Measurement, sorted(folder.glob("*.jsonl"))).records


def is_usable(measurement: Measurement) -> bool:
    """Tell whether times and memory are there and plausible."""
    times, memory = measurement.times, measurement.memory
    if measurement.status != "ok" or times is None or memory is None:
        return False
    return times.are_credible and memory.is_credible


Steps = TypeVar("Steps", float, "NDArray[np.float64]")


def steps_of_epoch(batches: Steps, *, short_batch: bool) -> Steps:
    """Return the steps of an epoch: whole batches, and a shorter one as its share of one.

    Args:
        batches: Samples of an epoch over those of a batch; a number, or an array of any shape.
        short_batch: See `Measurement`.
    """
    return batches if short_batch else batches // 1


def compute_of(batch: int) -> str:
    """Return the key of a smaller batch's computation among the samples."""
    return f"compute of {batch}"


class Footprint(Record):
    """Estimate of one worker's memory from counting, before any step was run; bytes.

    `fixed_bytes + activation_bytes_per_sample × b` is the memory of tensors at the peak of a step
    with local batch b, once b is so large that the peak lies in the backward pass. `peaks` is the
    memory that counts towards the limit, at the powers of two.
    """

    schema_version: Literal[1] = 1
    parameter_bytes: int
    gradient_bytes: int
    # of one worker, its share under ZeRO
    optimizer_bytes: int
    activation_bytes_per_sample: int
    fixed_bytes: int
    # CPU: the process with its libraries, before the model
    host_baseline_bytes: int = 0
    # AGS: reference gradient and scale factors, on top of `peaks` once training has updated them
    scaling_bytes: int = 0
    # host memory of the copy that a checkpoint is written from, on the first node
    checkpoint_bytes: int = 0
    # of these two, what counts towards the limit on top of `peaks`
    beside_bytes: int = 0
    # by local batch
    peaks: dict[Batch, int] = Field(min_length=1)
    # of one worker, the margin taken off
    limit_bytes: int | None = None
    # of `peaks`, within the limit; None: no limit, 0: none fits
    largest_local_batch: int | None = None
    # workers that were assumed: the fewest of the search
    world_size: int = 1
    # local batches
    counted_at: tuple[int, ...] = ()
    # real: counted on small real batches, since the model needs values
    method: Literal["fake", "real"] = "fake"
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def before_batch_bytes(self) -> int:
        """Bytes of a worker before any batch, without those of libraries."""
        states = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return self.host_baseline_bytes + states + self.beside_bytes

    def peak_bytes(self, local_batch: int) -> float:
        """Interpolate the estimate at a local batch, linearly between powers of two and beyond."""
        known = sorted(self.peaks)
        right = min(max(1, bisect.bisect_left(known, local_batch)), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.peaks[high] - self.peaks[low]) / (high - low) if high > low else 0.0
        return max(float(self.peaks[known[0]]), self.peaks[low] + slope * (local_batch - low))


def damaged_footprints(run: Path) -> list[str]:
    """Name a run's estimates of memory that cannot be read, and the remedy."""
    found = []
    for path in sorted(run.glob("footprint*.json")):
        try:
            read_document(Footprint, path)
        except RunDirectoryError:
            words = "delete it, and memory is estimated again where a profile needs that"
            found.append(f"{path}: is damaged, and passed over; {words}")
    return found


class Trial(Record):
    """Workload as it was tried by a command, on its own machine, before it submitted anything."""

    schema_version: Literal[1] = 1
    identity: Identity
    # of what it depends on: code, keys of the workload, libraries; another one asks for a new trial
    key: Digest = ""
    # what Python warned of in the user's own code
    warnings: tuple[str, ...] = ()
    # estimates that were made on the way, by partition, and why one could not be made
    footprints: dict[str, Footprint] = Field(default={})
    reasons: dict[str, str] = Field(default={})
