"""What the plan says of an evaluation before any training, over what evaluations of a training take, by model, as JSON.

    python -m tests.benchmarks.evaluation_share tests/benchmarks/results/evaluation_share_cpu.json

Each configuration is profiled as a profile job does it, then trained for some epochs with an evaluation of the test
samples after each, through the loader, by one worker on one thread. Times are of the processor, so that other work
matters little; for that the worker loads its samples itself (`loader_workers = 0`). The rounds of a configuration are
whole: profile, training, and what the plan says; medians over them. `share` is the forward pass's of forward and
backward. `timed` is what the plan says over what an evaluation took, less 1; `assumed` the same where profiles have no
forward pass. `cost` is the share of a profile that timing forward passes takes, for the shortest profile there can be.
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
    """One step an epoch, that most of the time goes into evaluation."""
    workload = {"model": model, "dataset": "synthetic", "samples": batch, "epochs": EPOCHS, "loader_workers": 0}
    search = {"warmup_steps": 2, "min_steps": 5, "max_steps": 5}
    tables: dict[str, Any] = {"workload": workload, "search": search, "training": {"method": "lbt"}}
    return SweepSpec.model_validate({"name": "evaluation", **tables})


def round_of(model: str, batch: int) -> Row:
    """One profile and one training."""
    sweep, configuration = sweep_of(model, batch), Configuration(1, 1, batch)
    started = time.process_time()
    profile = measure(sweep, ClusterSpec(), configuration, ALONE)
    profile_s = time.process_time() - started
    assert profile.times is not None  # it is of status ok
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
    """Seconds of an evaluation by one worker, as the plan has it."""
    summary = summarize([profile])
    found = evaluation_of(summary.profiles, sweep.workload, summary.dataset_samples, summary.test_samples)
    return float(found.seconds(np.array([1.0]), np.array([float(profile.local_batch)]))[0])


def evaluation_time_s(sweep: SweepSpec, configuration: Configuration) -> float:
    """Median over a training's evaluations, as it records them."""
    with TemporaryDirectory() as folder, patch("tula_hpc.training.loop.join_job", lambda: ALONE):
        run = RunDirectory(Path(folder)).create()
        run.train().root.mkdir()
        run_training(TrainJob(sweep, ClusterSpec(), configuration, run.root), StopRequest())
        return median(row.evaluation_time_s or 0.0 for row in read_metrics(run.train().metrics_file).epochs)


def found_of(model: str, batch: int) -> Row:
    """Medians over the rounds."""
    rounds = [round_of(model, batch) for _ in range(ROUNDS)]
    found = {name: median(row[name] for row in rounds) for name in rounds[0]}
    print(f"{model}, b={batch}: {found}", file=sys.stderr)
    return found


def spread(rows: list[Row], name: str) -> Row:
    """Median and ends over the configurations."""
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
