"""Watch a script's training for drift of its step times from the plan's, as the built-in loop does.

Step times are those that the hooks measure. In mid-training a bare all-reduce can be timed
separately, a forward pass cannot: time that neither the all-reduce nor the wait for data explains
counts as computation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from tula_hpc.analysis.drift import Detector, Look, Watch, expected_parts, extra_s, window_seconds
from tula_hpc.attach.train.peers import ScriptPeers
from tula_hpc.errors import RunDirectoryError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import (
    Configuration,
    Drift,
    Interval,
    Plan,
    RunDirectory,
    StepParts,
    of_partition,
)
from tula_hpc.records.base import Record
from tula_hpc.training.drift import all_reduce_s, episode_of, put_on_record, read_drift, side_of


class DriftSettings(Record):
    """The plan's step, as passed to a script's process."""

    # predicted seconds of a step, and their 90 % interval
    prediction: Interval
    window_s: float
    # side of an episode that goes on from an earlier job, see `Detector`
    side: int = 0
    expected: StepParts = StepParts()
    configuration: Configuration
    partition: str = ""


def drift_settings(job: TrainJob) -> DriftSettings | None:
    """Return the plan's step for a training's watch; None: no plan, or the watch is off."""
    if not job.sweep.training.drift:
        return None
    run = RunDirectory(job.root)
    try:
        plan = run.read_plan()
    except RunDirectoryError:
        # a training that was started by hand
        return None
    planned = plan.find(job.configuration, job.partition)
    if planned is None or _in_other_parts(plan, job):
        return None
    drift = read_drift(run.train(job.label).drift_file)
    passes = job.sweep.workload.accumulation
    measured = [
        row
        for row in of_partition(run.measurements().records, job.partition)
        if (row.accumulation or passes) == passes
    ]
    return DriftSettings(
        prediction=planned.predicted("step_time_s"),
        window_s=window_seconds(job.sweep.training.drift_minutes),
        side=side_of(drift, job.configuration),
        expected=expected_parts(measured, job.configuration),
        configuration=job.configuration,
        partition=job.partition,
    )


def _in_other_parts(plan: Plan, job: TrainJob) -> bool:
    """Tell whether the job trains in more forward passes than planned, as memory ran out."""
    work = job.sweep.workload
    known = (plan.chosen, *plan.fallbacks, *plan.candidates)
    planned = [c.accumulation for c in known if c.configuration == job.configuration]
    return work.accumulates and work.accumulation not in planned


class ScriptDrift:
    """One worker's part of the watch; all workers reach the same verdict at the same step."""

    def __init__(self, settings: DriftSettings, run: RunDirectory, label: str, job_id: str) -> None:
        self.settings = settings
        self.run = run
        self.label = label
        self.job_id = job_id
        self.watch = Watch(Detector(settings.prediction, settings.side), settings.window_s)
        self._steps = 0
        self._busy_s = self._waited_s = 0.0

    def count(self, step_s: float, waited_s: float) -> None:
        """Count a step, and the wait for data in it, both in seconds."""
        self._steps += 1
        self._busy_s += step_s
        self._waited_s += waited_s

    def readings(self, peers: ScriptPeers) -> tuple[float, ...]:
        """Return this worker's means since the last agreement."""
        # work in the device's queue belongs to these steps
        began = time.perf_counter()
        peers.synchronize_device()
        self._busy_s += time.perf_counter() - began
        steps = max(1, self._steps)
        look = Look(float(self._steps), self._busy_s / steps, self._waited_s / steps)
        self._steps = 0
        self._busy_s = self._waited_s = 0.0
        return look

    def look(
        self, shared: tuple[float, ...], peers: ScriptPeers, parameters: Sequence[Tensor]
    ) -> bool:
        """Observe agreed readings, and log the begin or end of an episode. Collective.

        Return whether this took time, which must not count as the script's.
        """
        if not shared:
            return False
        verdict = self.watch.observe(Look(*shared))
        if verdict is None:
            return False
        reduced_s = None
        if parameters:
            reduced_s = all_reduce_s(peers, parameters, peers.count)
        if peers.rank == 0:
            put_on_record(self.run, self.label, self.job_id, verdict, self._drift(reduced_s))
        return True

    def _drift(self, reduced_s: float | None) -> Drift:
        expected = self.settings.expected
        seen = StepParts(data_time_s=self.watch.data_time_s, allreduce_time_s=reduced_s)
        if expected.compute_time_s is not None:
            explained_s = extra_s(seen, expected, "loader") + extra_s(seen, expected, "network")
            detector = self.watch.detector
            rest_s = expected.compute_time_s + detector.measured_s - detector.prediction.value
            rest_s -= explained_s
            seen = seen.model_copy(update={"compute_time_s": max(0.0, rest_s)})
        at = self.settings.configuration
        return episode_of(self.watch, seen, expected, at, self.settings.partition)
