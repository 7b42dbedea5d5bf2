"""Drift watch: compare a training's step times with the plan's, on every worker, and log events.

Rank 0 reads plan and open episode for all workers: a network file system may show them different
files at the same moment. When step times drift, a probe times the parts of a step in mid-training,
and changes nothing there, to find the part that has changed. `Detector` and `Watch` of
`analysis/drift.py` decide whether step times have drifted.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.analysis.drift import (
    Detector,
    DriftChange,
    Look,
    Watch,
    attribute,
    expected_parts,
    extra_s,
    window_seconds,
)
from tula_hpc.batches import Batch, split
from tula_hpc.ddp.agreement import CHECK_EVERY_S, Agreeing, if_memory_suffices
from tula_hpc.ddp.process_group import pick_device
from tula_hpc.ddp.worker import Worker, bare_all_reduce
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import RunDirectoryError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.profiling.timing import LoaderWaits, agreed_s, round_s
from tula_hpc.records import (
    Configuration,
    Drift,
    Interval,
    RunDirectory,
    StepParts,
    of_partition,
    read_document,
    write_atomically,
)


class DriftStart(NamedTuple):
    """State that a watch of drift starts with."""

    # the plan's step time, seconds; None: there is nothing to compare step times with
    prediction: Interval | None = None
    # side of an episode that is still open, see `Detector`; 0: there is none
    side: int = 0
    # seconds of an update of AGS's gradient scale
    update_time_s: float = 0.0


def begin_drift_watch(job: TrainJob, env: WorkerEnvironment) -> DriftStart:
    """Return the start of a watch, as rank 0 reads plan, profiles and open episode. Collective.

    Post-local SGD is not watched: its local steps exchange nothing, which no prediction covers.
    """
    if not job.sweep.training.drift or job.sweep.training.method == "polo":
        return DriftStart()
    mine = DriftStart()
    if env.rank == 0:
        mine = _read(job)
    if env.world_size == 1:
        return mine
    # NaN stands for no prediction
    prediction = mine.prediction or Interval(math.nan, math.nan, math.nan)
    numbers = [*prediction, float(mine.side), mine.update_time_s]
    device = pick_device(job.cluster, env.local_rank)
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    *interval, side, update_s = values.tolist()
    known = None if math.isnan(interval[0]) else Interval(*interval)
    return DriftStart(known, int(side), update_s)


def _read(job: TrainJob) -> DriftStart:
    # imported late, as only rank 0 needs these
    import numpy as np

    from tula_hpc.analysis.models.profiles import summarize, update_time

    run = RunDirectory(job.root)
    try:
        plan = run.read_plan()
    except RunDirectoryError:
        # a training that was started by hand has no plan
        return DriftStart()
    measurements = of_partition(run.measurements().records, job.partition)
    workers = np.array(job.configuration.world_size, dtype=np.float64)
    update_s = float(update_time(summarize(measurements)).predict(workers))
    drift = read_drift(run.train(job.label).drift_file)
    if drift is not None and drift.partition != job.partition:
        drift = None
    planned = plan.find(job.configuration, job.partition)
    prediction = planned.predicted("step_time_s") if planned else None
    return DriftStart(prediction, side_of(drift, job.configuration), update_s)


def side_of(drift: Drift | None, configuration: Configuration) -> int:
    """Return the side of this configuration's open episode, see `Detector`; 0 if there is none."""
    if drift is None or drift.configuration != configuration:
        return 0
    return 1 if drift.measured_s > drift.predicted_s else -1


def read_drift(path: Path) -> Drift | None:
    """Return the open episode of a training, or None."""
    # a damaged file counts as none: the watch finds the episode again
    with contextlib.suppress(FileNotFoundError, RunDirectoryError):
        return read_document(Drift, path)
    return None


# the median over blocks is robust to a pause
BLOCKS = 5
# a shared processor runs each process for some milliseconds in turn, which a block averages
BLOCK_S = 0.2
# about as long for each part: a preempted job may have only a few seconds, and waits for the probe
SECONDS = 5.0


def extent_of(pass_s: float) -> tuple[int, int]:
    """Return the number of blocks, fewer if a pass is long, and the passes in each."""
    passes = max(1, math.ceil(BLOCK_S / max(pass_s, 1e-3)))
    return max(1, min(BLOCKS, int(SECONDS / max(pass_s, BLOCK_S)))), passes


class Probe(NamedTuple):
    """Result of a probe."""

    # seconds of the parts, without the wait for the loader
    parts: StepParts
    # node of the worker that is slowest in computing; None: unknown, or there is only one worker
    slowest_node: int | None


def probe_parts(worker: Worker, inputs: Batch, targets: Batch) -> Probe:
    """Time some forward and backward passes without synchronization, and bare all-reduces.

    Collective. Weights, gradients, buffers and random numbers stay as they are: `.grad` is not
    used, see `Worker.local_gradient`, and a separate tensor is all-reduced. A part for which memory
    does not suffice stays unknown.
    """
    by_rank = _by_rank(worker, _compute_s(worker, inputs, targets))
    compute_s = None
    slowest = None
    if min(by_rank) >= 0:
        compute_s = max(by_rank)
        if len(by_rank) > 1:
            # Slurm may deal out task numbers round the nodes
            nodes = _by_rank(worker, worker.env.node_rank)
            slowest = int(nodes[by_rank.index(compute_s)])
    reduced_s = all_reduce_s(worker, worker.parameters, worker.env.world_size)
    parts = StepParts(compute_time_s=compute_s, allreduce_time_s=reduced_s)
    return Probe(parts, slowest)


def _compute_s(worker: Worker, inputs: Batch, targets: Batch) -> float:
    """Return the seconds of a pass in a step's micro-batches; −1 if memory ran out on any worker.

    All workers take the same number of passes: a model may exchange something in its forward pass,
    as SyncBatchNorm does.
    """
    micro_batches = split((inputs, targets), worker.parts)

    def compute() -> bool:
        for micro_batch in micro_batches:
            worker.local_gradient(*micro_batch)
        return True

    return _pass_s(worker, compute) if if_memory_suffices(worker, compute) else -1.0


def all_reduce_s(worker: Agreeing, parameters: Sequence[Tensor], workers: int) -> float | None:
    """Return the slowest worker's seconds of a bare all-reduce; None if any is out of memory.

    Collective.
    """
    if workers == 1:
        return 0.0
    step = if_memory_suffices(worker, lambda: bare_all_reduce(parameters))
    if step is None:
        return None
    step()
    (slowest_s,) = worker.agree(_pass_s(worker, step))
    return slowest_s


def _pass_s(worker: Agreeing, step: Callable[[], object]) -> float:
    """Return the seconds of one pass: the median over blocks of their means. Collective.

    `step` has to be called once before, as the first call may have something to set up.
    """
    blocks, passes = extent_of(agreed_s(worker, step))
    return median(round_s(worker, step, passes) for _ in range(blocks))


def _by_rank(worker: Worker, mine: float) -> list[float]:
    values = [0.0] * worker.env.world_size
    values[worker.env.rank] = mine
    return worker.total(*values)


class StepClock:
    """Clock of the steps since the last reading, without the time between them."""

    def __init__(self, device: torch.device) -> None:
        self.waits = LoaderWaits(device)
        self.steps = 0
        self.busy_s = 0.0
        self.started: float | None = None

    def start(self) -> None:
        """Begin a step."""
        self.started = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Count the step's wait for its batch, which has just ended."""
        self.waits.arrived(seconds)

    def stop(self) -> None:
        """End the step, unless a reading has ended it already."""
        if self.started is not None:
            self.waits.launched()
            self.busy_s += time.perf_counter() - self.started
            self.steps += 1
            self.started = None

    def read(self) -> Look:
        """Return means over the steps since the last reading, the current one included.

        The device must be idle.
        """
        self.stop()
        steps = max(1, self.steps)
        look = Look(float(self.steps), self.busy_s / steps, self.waits.take() / steps)
        self.steps = 0
        self.busy_s = 0.0
        return look


class DriftGuard:
    """One worker's part of the watch; all workers see the same change at the same step."""

    def __init__(self, worker: Worker, job: TrainJob, start: DriftStart) -> None:
        self.worker, self.job = worker, job
        self.run = RunDirectory(job.root)
        # without a watch the clock is never read, and must not keep a CUDA event of each step
        self.clock = StepClock(torch.device("cpu") if start.prediction is None else worker.device)
        self.update_s = start.update_time_s
        self.updates = 0
        self.watch: Watch | None = None
        if start.prediction is not None:
            window_s = window_seconds(job.sweep.training.drift_minutes)
            self.watch = Watch(Detector(start.prediction, start.side), window_s)

    @property
    def look_every_s(self) -> float:
        """Seconds between two agreements of the workers."""
        return CHECK_EVERY_S if self.watch is None else self.watch.look_every_s

    def count_update(self) -> None:
        """Count the next step if it will update AGS's scale."""
        self.updates += self.worker.observer.update_due

    def readings(self) -> tuple[float, ...]:
        """Return this worker's means since the last agreement; nothing without a watch.

        Updates of AGS's scale are subtracted: the plan counts them apart.
        """
        if self.watch is None:
            return ()
        # else steps in the device's queue would be missing
        self.worker.synchronize_device()
        look, updates = self.clock.read(), self.updates
        self.updates = 0
        return look._replace(
            step_time_s=max(0.0, look.step_time_s - updates * self.update_s / max(1.0, look.steps))
        )

    def look(self, shared: tuple[float, ...], batch: tuple[Tensor, Tensor]) -> None:
        """Observe agreed readings; log an episode's beginning or end, with the part behind it."""
        if self.watch is None or not shared:
            return
        change = self.watch.observe(Look(*shared))
        if change is None:
            return
        probe = probe_parts(self.worker, *batch)
        # a shared file system need not serve more than one reader
        if self.worker.env.rank == 0:
            self._log(change, self.watch, probe)

    def _log(self, change: DriftChange, watch: Watch, probe: Probe) -> None:
        job = self.job
        own = of_partition(self.run.measurements().records, job.partition)
        expected = expected_parts(own, job.configuration)
        measured = probe.parts.model_copy(update={"data_time_s": watch.data_time_s})
        drift = episode_of(watch, measured, expected, job.configuration, job.partition)
        hosts = self.worker.env.hosts
        node = probe.slowest_node
        host = ""
        if drift.part == "compute" and node is not None and node < len(hosts):
            host = hosts[node]
        put_on_record(self.run, job.label, self.worker.env.job_id, change, drift, host)


def episode_of(
    watch: Watch,
    measured: StepParts,
    expected: StepParts,
    configuration: Configuration,
    partition: str,
) -> Drift:
    """Return the episode that a watch has found, with the part of the step behind it."""
    measured_s = watch.detector.measured_s
    predicted_s = watch.detector.prediction.value
    return Drift(
        **configuration._asdict(),
        partition=partition,
        measured_s=measured_s,
        predicted_s=predicted_s,
        part=attribute(measured, expected, measured_s - predicted_s),
        measured=measured,
        expected=expected,
    )


def put_on_record(  # noqa: PLR0917 - of one event
    run: RunDirectory, label: str, job_id: str, change: DriftChange, drift: Drift, host: str = ""
) -> None:
    """Log the beginning or end of a training's episode, and keep its file while it lasts."""
    path = run.train(label).drift_file
    if change == "drifted":
        write_atomically(path, drift.model_dump_json(indent=1))
    else:
        path.unlink(missing_ok=True)
    # times are in seconds
    data: dict[str, Any] = {
        "measured_s": drift.measured_s,
        "predicted_s": drift.predicted_s,
        "ratio": drift.measured_s / drift.predicted_s,
        "part": drift.part,
        "parts": {"measured": drift.measured.model_dump(), "expected": drift.expected.model_dump()},
        "local_batch": drift.local_batch,
    }
    if host:
        data["slowest_host"] = host
    detail = _describe(change, drift, host)
    run.log_event(change, "train", detail=detail, job_id=job_id, data=data)


_PARTS = {
    "loader": "waiting for data",
    "compute": "computing",
    "network": "the network",
    "unknown": "no single part",
}


def _describe(change: DriftChange, drift: Drift, host: str) -> str:
    times = f"{1e3 * drift.measured_s:.3g} ms against {1e3 * drift.predicted_s:.3g} ms predicted"
    if change == "recovered":
        return f"steps take {times}: as predicted again"
    detail = f"steps take {times}; the cause is {_PARTS[drift.part]}"
    if drift.part != "unknown":
        extra = extra_s(drift.measured, drift.expected, drift.part)
        if extra:
            detail += f" ({1e3 * extra:+.3g} ms)"
    if host:
        detail += f", slowest on {host}"
    return detail
