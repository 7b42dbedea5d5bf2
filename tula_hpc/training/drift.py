"""Watches a training's step times on every worker, and says in events when they drift and which part it is.

What a training is held against, and with which batch it goes on: rank 0 reads the run directory and
tells all.

A network file system may show workers different files at the same moment; they must not act on them
each for itself.

Times the parts of a training step in mid-training, without a trace, to tell which of them has
changed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc.analysis.drift import (
    Detector,
    Look,
    Prediction,
    Verdict,
    Watch,
    attribute,
    expected_parts,
    extra_s,
    predict,
    prediction_of,
    update_time_s,
    window_seconds,
)
from tula_hpc.batches import Batch, split
from tula_hpc.ddp.agreement import CHECK_EVERY_S
from tula_hpc.ddp.process_group import pick_device
from tula_hpc.ddp.worker import Worker, bare_all_reduce
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import RunDirectoryError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.process_memory import out_of_memory
from tula_hpc.profiling.timing import LoaderWaits, agreed_s, round_s
from tula_hpc.records import (
    Candidate,
    Configuration,
    Drift,
    Measurement,
    Plan,
    RunDirectory,
    StepParts,
    read_document,
    write_atomically,
)


class DriftStart(NamedTuple):
    """The beginning of a watch."""

    # to train with: the job's own unless the plan was made anew
    configuration: Configuration
    # None: nothing to hold step times against
    prediction: Prediction | None = None
    # of an episode that goes on, see `Detector`
    side: int = 0
    # of AGS's gradient scale
    update_time_s: float = 0.0


def begin_drift_watch(job: TrainJob, env: WorkerEnvironment) -> DriftStart:
    """Read plan, profiles and the open episode if there is one. Collective: every worker gets what rank 0 found.

    Local steps of post-local SGD exchange nothing, which no prediction knows: there is nothing to
    hold them against.
    """
    if not job.sweep.training.drift or job.sweep.training.method == "polo":
        return DriftStart(job.configuration)
    mine = _read(job, env.job_id) if env.rank == 0 else DriftStart(job.configuration)
    if env.world_size == 1:
        return mine
    values = torch.tensor(
        _as_numbers(mine), dtype=torch.float64, device=pick_device(job.cluster, env.local_rank)
    )
    dist.broadcast(values, src=0)
    return _from_numbers(job.configuration, values.tolist())


def _as_numbers(start: DriftStart) -> list[float]:
    prediction = start.prediction or Prediction(math.nan, math.nan, math.nan)
    return [
        float(start.configuration.local_batch),
        *prediction,
        float(start.side),
        start.update_time_s,
    ]


def _from_numbers(planned: Configuration, numbers: list[float]) -> DriftStart:
    local_batch, *interval, side, update_s = numbers
    prediction = None if math.isnan(interval[0]) else Prediction(*interval)
    return DriftStart(
        planned._replace(local_batch=int(local_batch)), prediction, int(side), update_s
    )


def _read(job: TrainJob, job_id: str) -> DriftStart:
    run = RunDirectory(job.root)
    try:
        plan = run.read_plan()
    except RunDirectoryError:
        # a training that was started by hand
        return DriftStart(job.configuration)
    measurements = job.measurements()
    update_s = update_time_s(measurements, job.configuration.world_size)
    drift = read_drift(run.train(job.label).drift_file)
    drift = drift if drift is not None and _is_of(drift, job) else None
    again = (
        _choose_again(job, plan, drift, measurements)
        if drift and job.sweep.training.replan_on_drift
        else None
    )
    if again is not None and drift is not None and again.configuration != job.configuration:
        detail = f"{again.configuration} instead of {job.configuration}: {drift.part} has drifted"
        run.log_event(
            "replanned", "train", detail=detail, job_id=job_id, data=again.configuration._asdict()
        )
        return DriftStart(again.configuration, prediction_of(again), 0, update_s)
    prediction = predict(plan, job.configuration, job.partition)
    return DriftStart(job.configuration, prediction, _side(drift, job.configuration), update_s)


def _choose_again(
    job: TrainJob, plan: Plan, drift: Drift, measurements: list[Measurement]
) -> Candidate | None:
    from tula_hpc.analysis.planning.replan import choose_again

    failed = [m.local_batch for m in measurements if m.status == "oom"]
    return choose_again(
        plan,
        job.sweep.objective,
        job.configuration,
        drift,
        partial(expected_parts, measurements),
        partition=job.partition,
        below=min(failed, default=None),
    )


def _is_of(drift: Drift, job: TrainJob) -> bool:
    """Whether the episode was seen on as many nodes of the same kind: of others it says nothing."""
    nodes, per_node, _ = job.configuration
    return (drift.nodes, drift.workers_per_node, drift.partition) == (
        nodes,
        per_node,
        job.partition,
    )


def _side(drift: Drift | None, configuration: Configuration) -> int:
    if drift is None or drift.configuration != configuration:
        return 0
    return 1 if drift.measured_s > drift.predicted_s else -1


def read_drift(path: Path) -> Drift | None:
    """The open episode of a training, or None."""
    # damaged: as good as none, it is found out anew
    with contextlib.suppress(FileNotFoundError, RunDirectoryError):
        return read_document(Drift, path)
    return None


# the median over blocks sheds a pause
BLOCKS = 5
# a processor that is shared is had in turns of some milliseconds: within a block they even out
BLOCK_S = 0.2
# for each part, about; a preempted job may have only some seconds, and waits for a probe to end
SECONDS = 5.0


class Extent(NamedTuple):
    """How much is timed: so many blocks of so many passes."""

    blocks: int
    passes: int


def extent_of(pass_s: float) -> Extent:
    """Short passes come in larger numbers, as training's own step times are means over many; long ones in fewer blocks.

    Args:
        pass_s: Of one pass, about.
    """
    passes = max(1, math.ceil(BLOCK_S / max(pass_s, 1e-3)))
    return Extent(max(1, min(BLOCKS, int(SECONDS / max(pass_s, BLOCK_S)))), passes)


class Probe(NamedTuple):
    """What was found."""

    # without the wait for the loader
    parts: StepParts
    # in computing, where workers differ; None for one worker or where it is not known
    slowest_rank: int | None


def probe_parts(worker: Worker, inputs: Batch, targets: Batch) -> Probe:
    """Time some forward and backward passes without synchronization, and some bare all-reduces. Collective.

    Weights, gradients, buffers and random numbers are afterwards what they were: gradients are
    taken beside `.grad`, see `Worker.local_gradient`, and what is all-reduced is a tensor of its
    own. Where memory does not suffice for that, the part stays unknown.

    Args:
        worker: Whose model to use.
        inputs: A batch of the size that is trained with.
        targets: Its targets.
    """
    by_rank = _by_rank(worker, _compute_s(worker, inputs, targets))
    compute_s = None if min(by_rank) < 0 else max(by_rank)
    slowest = by_rank.index(max(by_rank)) if compute_s is not None and len(by_rank) > 1 else None
    parts = StepParts(compute_time_s=compute_s, allreduce_time_s=_all_reduce_s(worker))
    return Probe(parts, slowest)


def _compute_s(worker: Worker, inputs: Batch, targets: Batch) -> float:
    """Seconds of a pass, in as many parts as a step takes it; −1 where memory ran out on any worker.

    All take as many passes: a model may exchange something in its forward pass, as SyncBatchNorm
    does.
    """
    parts = split((inputs, targets), worker.parts)

    def compute() -> None:
        for part in parts:
            worker.local_gradient(*part)

    try:
        compute()
        fits = True
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
        fits = False
    # whoever went on alone would wait for ever
    (missing,) = worker.agree(float(not fits))
    return -1.0 if missing else _pass_s(worker, compute)


def _all_reduce_s(worker: Worker) -> float | None:
    """Seconds of a bare all-reduce, the slowest worker's; None where memory ran out on any worker."""
    if worker.env.world_size == 1:
        return 0.0
    step = None
    try:
        step = bare_all_reduce(worker)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
    # whoever went on alone would wait for ever
    (missing,) = worker.agree(float(step is None))
    if missing or step is None:
        return None
    step()
    (slowest_s,) = worker.agree(_pass_s(worker, step))
    return slowest_s


def _pass_s(worker: Worker, step: Callable[[], object]) -> float:
    """Seconds of one pass: the median over blocks of their means. Collective: all workers take as many passes.

    Args:
        worker: Whose device is waited for.
        step: A pass; one has been taken, as the first may have something to set up.
    """
    extent = extent_of(agreed_s(worker, step))
    return median(round_s(worker, step, extent.passes) for _ in range(extent.blocks))


def _by_rank(worker: Worker, mine: float) -> list[float]:
    """Every worker's value, in order of rank."""
    values = [0.0] * worker.env.world_size
    values[worker.env.rank] = mine
    return worker.total(*values)


class StepClock:
    """Seconds of the steps since the last reading, without what lies between steps (evaluation, checkpoints)."""

    def __init__(self, device: torch.device) -> None:
        self.waits = LoaderWaits(device)
        self.steps = 0
        self.busy_s = 0.0
        self.started: float | None = None

    def start(self) -> None:
        """A step begins."""
        self.started = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """So long the step waited for its batch, which is there now."""
        self.waits.arrived(seconds)

    def stop(self) -> None:
        """The step is over; nothing happens if a reading has closed it already."""
        if self.started is not None:
            self.waits.launched()
            self.busy_s += time.perf_counter() - self.started
            self.steps += 1
            self.started = None

    def read(self) -> Look:
        """Means over the steps since the last reading, the current one included; the device must be waited for."""
        self.stop()
        steps = max(1, self.steps)
        look = Look(float(self.steps), self.busy_s / steps, self.waits.take() / steps)
        self.steps, self.busy_s = 0, 0.0
        return look


class DriftGuard:
    """One worker's part of the watch; every worker has one, and all come to the same verdict at the same step.

    Args:
        worker: What is trained.
        job: Which training; its configuration is the one in force.
        start: What step times are held against.
    """

    def __init__(self, worker: Worker, job: TrainJob, start: DriftStart) -> None:
        self.worker, self.job = worker, job
        self.run = RunDirectory(job.root)
        # without a watch nobody reads the clock, and it must not keep an event of each step
        self.clock = StepClock(torch.device("cpu") if start.prediction is None else worker.device)
        self.update_s = start.update_time_s
        self.updates = 0
        self.watch: Watch | None = None
        if start.prediction is not None:
            window_s = window_seconds(job.sweep.training.drift_minutes)
            self.watch = Watch(Detector(start.prediction, start.side), window_s)

    @property
    def look_every_s(self) -> float:
        """How often workers are to agree on what they saw."""
        return CHECK_EVERY_S if self.watch is None else self.watch.look_every_s

    def count_update(self) -> None:
        """Count the next step if it will update AGS's scale."""
        self.updates += self.worker.observer.update_due

    def readings(self) -> tuple[float, ...]:
        """What this worker saw since the last look; without the updates of AGS's scale, which the plan counts apart."""
        if self.watch is None:
            return ()
        # or the steps still queued on it would be missing
        self.worker.synchronize_device()
        look, updates = self.clock.read(), self.updates
        self.updates = 0
        return look._replace(
            step_time_s=max(0.0, look.step_time_s - updates * self.update_s / max(1.0, look.steps))
        )

    def look(self, shared: tuple[float, ...], batch: tuple[Tensor, Tensor]) -> None:
        """Take in what all workers agreed on; where that makes an episode begin or end, find out why and say so."""
        if self.watch is None or not shared:
            return
        verdict = self.watch.observe(Look(*shared))
        if verdict is not None:
            probe = probe_parts(self.worker, *batch)
            self._say(verdict, self._drift(self.watch, probe))

    def _drift(self, watch: Watch, probe: Probe) -> tuple[Drift, str]:
        """The episode in numbers, and the slowest worker's host where that matters. Whole on rank 0."""
        measured_s, predicted_s = watch.detector.measured_s, watch.detector.prediction.step_time_s
        measured = probe.parts.model_copy(update={"data_time_s": watch.data_time_s})
        expected = self._expected()
        part = attribute(measured, expected, measured_s - predicted_s)
        record = Drift(
            **self.job.configuration._asdict(),
            partition=self.job.partition,
            measured_s=measured_s,
            predicted_s=predicted_s,
            part=part,
            measured=measured,
            expected=expected,
        )
        return record, self._host(probe.slowest_rank) if part == "compute" else ""

    def _expected(self) -> StepParts:
        """From the profiles; only rank 0 writes, and one reader is enough for a shared file system."""
        if self.worker.env.rank != 0:
            return StepParts()
        return expected_parts(self.job.measurements(), self.job.configuration)

    def _host(self, rank: int | None) -> str:
        hosts, per_node = self.worker.env.hosts, self.job.configuration.workers_per_node
        node = -1 if rank is None else rank // per_node
        return hosts[node] if 0 <= node < len(hosts) else ""

    def _say(self, verdict: Verdict, found: tuple[Drift, str]) -> None:
        if self.worker.env.rank != 0:
            return
        drift, host = found
        path = self.run.train(self.job.label).drift_file
        if verdict == "drifted":
            write_atomically(path, drift.model_dump_json(indent=1))
        else:
            path.unlink(missing_ok=True)
        data = event_data(drift) | ({"slowest_host": host} if host else {})
        detail = _in_words(verdict, drift, host)
        self.run.log_event(
            verdict, "train", detail=detail, job_id=self.worker.env.job_id, data=data
        )


def event_data(drift: Drift) -> dict[str, Any]:
    """What an event says of an episode: step times, their ratio, the part, and all parts, seconds."""
    return {
        "measured_s": drift.measured_s,
        "predicted_s": drift.predicted_s,
        "ratio": drift.measured_s / drift.predicted_s,
        "part": drift.part,
        "parts": {"measured": drift.measured.model_dump(), "expected": drift.expected.model_dump()},
        "local_batch": drift.local_batch,
    }


_WORDS = {
    "loader": "waiting for data",
    "compute": "computing",
    "network": "the network",
    "unknown": "no one part",
}


def _in_words(verdict: Verdict, drift: Drift, host: str) -> str:
    times = f"{1e3 * drift.measured_s:.3g} ms against {1e3 * drift.predicted_s:.3g} ms predicted"
    if verdict == "recovered":
        return f"steps take {times}: as predicted again"
    extra = extra_s(drift.measured, drift.expected, drift.part) if drift.part != "unknown" else 0.0
    size = f" ({1e3 * extra:+.3g} ms)" if extra else ""
    return f"steps take {times}; it is {_WORDS[drift.part]}{size}" + (
        f", slowest on {host}" if host else ""
    )
