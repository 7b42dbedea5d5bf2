"""Watches a training's step times on every worker, and says in events when they drift and which part it is."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.drift import Detector, Look, Verdict, Watch, attribute, expected_parts, extra_s, window_seconds
from tula_hpc.drift_probe import Probe, probe_parts
from tula_hpc.drift_start import DriftStart
from tula_hpc.jobs import TrainJob
from tula_hpc.loader_waits import LoaderWaits
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Drift, RunDirectory, StepParts, write_atomically
from tula_hpc.stopping import CHECK_EVERY_S
from tula_hpc.worker import Worker


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

    def count_update(self, optimizer: Optimizer) -> None:
        """Call before a step: whether it will update AGS's scale."""
        self.updates += isinstance(optimizer, TulaOptimizer) and optimizer.update_due

    def readings(self) -> tuple[float, ...]:
        """What this worker saw since the last look; without the updates of AGS's scale, which the plan counts apart."""
        if self.watch is None:
            return ()
        self.worker.synchronize_device()  # or the steps still queued on it would be missing
        look, updates = self.clock.read(), self.updates
        self.updates = 0
        return look._replace(step_time_s=max(0.0, look.step_time_s - updates * self.update_s / max(1.0, look.steps)))

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
        self.run.log_event(verdict, "train", detail=detail, job_id=self.worker.env.job_id, data=data)


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
    return f"steps take {times}; it is {_WORDS[drift.part]}{size}" + (f", slowest on {host}" if host else "")
