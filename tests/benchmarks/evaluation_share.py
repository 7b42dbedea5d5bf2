"""Evaluation time that the plan predicts before any training against the time that evaluations take, as JSON.

    python -m tests.benchmarks.evaluation_share tests/benchmarks/results/evaluation_share_cpu.json

Each configuration is profiled as in a profile job, then trained for some epochs with an evaluation of the test samples
after each, through the loader, by one worker on one thread. Times are processor times, so that other work matters
little; for that reason the worker loads its samples itself (`loader_workers = 0`). A round is a profile, a training and
a prediction; the numbers are medians over the rounds. `share` is the forward pass's share of forward and backward.
`timed` is the predicted over the actual evaluation time, minus 1; `assumed` is the same if profiles had timed no
forward pass. `cost` is the share of a profile that timing forward passes takes, for the shortest possible profile.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tula_hpc.analysis.costs.evaluation import FORWARD_SHARE, evaluation_of
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import WorkerEnvironment
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.profiling.measure import measure
from tula_hpc.profiling.probes import FORWARD_PASSES as PASSES
from tula_hpc.records import Configuration, Measurement, RunDirectory, read_metrics
from tula_hpc.training.loop import run_training

ROUNDS = 5
EPOCHS = 3
MODELS = {
    "mobilenet_v3_small": (64, 256),
    "shufflenet_v2_x0_5": (64, 256),
    "resnet18": (64,),
    "tests.benchmarks.vgg_like:vgg_like": (64, 256),
    "tula_hpc.workloads.small_cnns:medium_cnn": (64, 256),
}
ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)

Row = dict[str, float]


def sweep_of(model: str, batch: int) -> SweepSpec:
    """Return a sweep with one step per epoch, so that most of the time is evaluation."""
    workload = {"model": model, "dataset": "synthetic", "samples": batch, "epochs": EPOCHS, "loader_workers": 0}
    search = {"warmup_steps": 2, "min_steps": 5, "max_steps": 5}
    tables: dict[str, Any] = {"workload": workload, "search": search, "training": {"method": "lbt"}}
    return SweepSpec.model_validate({"name": "evaluation", **tables})


def round_of(model: str, batch: int) -> Row:
    """Run one profile and one training, and compare them."""
    sweep, configuration = sweep_of(model, batch), Configuration(1, 1, batch)
    started = time.process_time()
    profile = measure(sweep, ClusterSpec(), configuration, ALONE)
    profile_s = time.process_time() - started
    # its status is "ok"
    assert profile.times is not None
    times = profile.times
    forward_s, evaluation_s = times.forward_time_s or 0.0, evaluation_time_s(sweep, configuration)
    former = profile.model_copy(update={"times": times.model_copy(update={"forward_time_s": None})})
    return {
        "compute_ms": 1e3 * times.compute_time_s / batch,
        "forward_ms": 1e3 * forward_s / batch,
        "loading_ms": 1e3 * times.data_time_s / batch,
        "evaluation_ms": 1e3 * evaluation_s / profile.test_samples,
        "share": forward_s / times.compute_time_s,
        "timed": predicted_s(profile, sweep) / evaluation_s - 1.0,
        "assumed": predicted_s(former, sweep) / evaluation_s - 1.0,
        "cost": PASSES * forward_s / profile_s,
    }


def predicted_s(profile: Measurement, sweep: SweepSpec) -> float:
    """Return the seconds that the plan predicts for an evaluation by one worker."""
    summary = summarize([profile])
    found = evaluation_of(summary.profiles, sweep.workload, summary.dataset_samples, summary.test_samples)
    return float(found.seconds(np.array([1.0]), np.array([float(profile.local_batch)]))[0])


def evaluation_time_s(sweep: SweepSpec, configuration: Configuration) -> float:
    """Train, and return the median seconds of the recorded evaluations."""
    with TemporaryDirectory() as folder, patch("tula_hpc.training.loop.join_job", lambda: ALONE):
        run = RunDirectory(Path(folder)).create()
        run.train().root.mkdir()
        run_training(TrainJob(sweep, ClusterSpec(), configuration, run.root), StopRequest())
        return median(row.evaluation_time_s or 0.0 for row in read_metrics(run.train().metrics_file).epochs)


def found_of(model: str, batch: int) -> Row:
    """Return medians over the rounds."""
    rounds = [round_of(model, batch) for _ in range(ROUNDS)]
    found = {name: median(row[name] for row in rounds) for name in rounds[0]}
    print(f"{model}, b={batch}: {found}", file=sys.stderr)
    return found


def spread(rows: list[Row], name: str) -> Row:
    """Return median, least and largest value over the configurations."""
    values = [row[name] for row in rows]
    return {"median": median(values), "least": min(values), "most": max(values)}


def main(output: str) -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    with patch("time.perf_counter", time.process_time):
        found = {f"{name}, b={batch}": found_of(name, batch) for name, batches in MODELS.items() for batch in batches}
    rows = list(found.values())
    result = {
        "models": found,
        **{name: spread(rows, name) for name in ("share", "timed", "assumed", "cost")},
        "assumed_share": FORWARD_SHARE,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
