"""What a training is held against, and with which batch it goes on: rank 0 reads the run directory and tells all.

A network file system may show workers different files at the same moment; they must not act on them each for itself.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tula_hpc.drift import Prediction, expected_parts, predict, prediction_of, update_time_s
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import RunDirectoryError
from tula_hpc.jobs import TrainJob
from tula_hpc.records import Candidate, Configuration, Drift, Measurement, Plan, RunDirectory, read_document
from tula_hpc.worker import pick_device


class DriftStart(NamedTuple):
    """The beginning of a watch."""

    configuration: Configuration  # to train with: the job's own unless the plan was made anew
    prediction: Prediction | None = None  # None: nothing to hold step times against
    side: int = 0  # of an episode that goes on, see `Detector`
    update_time_s: float = 0.0  # of AGS's gradient scale


def begin_drift_watch(job: TrainJob, env: WorkerEnvironment) -> DriftStart:
    """Read plan, profiles and the open episode if there is one. Collective: every worker gets what rank 0 found.

    Local steps of post-local SGD exchange nothing, which no prediction knows: there is nothing to hold them against.
    """
    if not job.sweep.training.drift or job.sweep.training.method == "polo":
        return DriftStart(job.configuration)
    mine = _read(job, env.job_id) if env.rank == 0 else DriftStart(job.configuration)
    if env.world_size == 1:
        return mine
    values = torch.tensor(_as_numbers(mine), dtype=torch.float64, device=pick_device(job.cluster, env.local_rank))
    dist.broadcast(values, src=0)
    return _from_numbers(job.configuration, values.tolist())


def _as_numbers(start: DriftStart) -> list[float]:
    prediction = start.prediction or Prediction(math.nan, math.nan, math.nan)
    return [float(start.configuration.local_batch), *prediction, float(start.side), start.update_time_s]


def _from_numbers(planned: Configuration, numbers: list[float]) -> DriftStart:
    local_batch, *interval, side, update_s = numbers
    prediction = None if math.isnan(interval[0]) else Prediction(*interval)
    return DriftStart(planned._replace(local_batch=int(local_batch)), prediction, int(side), update_s)


def _read(job: TrainJob, job_id: str) -> DriftStart:
    run = RunDirectory(job.root)
    try:
        plan = run.read_plan()
    except RunDirectoryError:  # a training that was started by hand
        return DriftStart(job.configuration)
    measurements = job.measurements()
    update_s = update_time_s(measurements, job.configuration.world_size)
    drift = read_drift(run.train(job.label).drift_file)
    drift = drift if drift is not None and _is_of(drift, job) else None
    again = _choose_again(job, plan, drift, measurements) if drift and job.sweep.training.replan_on_drift else None
    if again is not None and drift is not None and again.configuration != job.configuration:
        detail = f"{again.configuration} instead of {job.configuration}: {drift.part} has drifted"
        run.log_event("replanned", "train", detail=detail, job_id=job_id, data=again.configuration._asdict())
        return DriftStart(again.configuration, prediction_of(again), 0, update_s)
    prediction = predict(plan, job.configuration, job.partition)
    return DriftStart(job.configuration, prediction, _side(drift, job.configuration), update_s)


def _choose_again(job: TrainJob, plan: Plan, drift: Drift, measurements: list[Measurement]) -> Candidate | None:
    from tula_hpc.analysis.rerank import choose_again

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
    return (drift.nodes, drift.workers_per_node, drift.partition) == (nodes, per_node, job.partition)


def _side(drift: Drift | None, configuration: Configuration) -> int:
    if drift is None or drift.configuration != configuration:
        return 0
    return 1 if drift.measured_s > drift.predicted_s else -1


def read_drift(path: Path) -> Drift | None:
    """The open episode of a training, or None."""
    with contextlib.suppress(FileNotFoundError, RunDirectoryError):  # damaged: as good as none, it is found out anew
        return read_document(Drift, path)
    return None
