"""The profile of a built-in workload against that of the same training as a plain script, as JSON.

    python -m tests.benchmarks.script_against_built_in [--out tests/benchmarks/results/script_against_built_in.json]

Each profile has one worker with one thread, in its own process. The two profiles of a pair run at the same time, each
on its own core, and swap cores from pair to pair. Times are divided by the core's slowness meanwhile, see
`host_speed`. `ratio` is the script's number over the built-in's: each two pairs with swapped cores give a geometric
mean, and `ratio` is the median of these. `deviation` is the standard deviation of `ratio` over resampled means, and
`pairs` has the least, median and largest ratio of a pair; `undivided` is the median ratio of the times as they were.
The limit of 3 % is on `step_time_s`. The parts are measured in
different ways, as a script's computation can only be seen within its steps: `compute_time_s` and `optimizer_time_s`
show how much that differs. `peak_bytes` is the growth of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tests.attach.script_runs import SCRIPTS, measurement_of, profiled
from tests.benchmarks.host_speed import CoreSpeed
from tula_hpc.analysis.models.regression import Array
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.profiling.measure import measure
from tula_hpc.records import Configuration, Measurement

RESULT = Path(__file__).parent / "results" / "script_against_built_in.json"
NETWORKS = "tula_hpc.workloads.small_cnns:"
CASES = [("compact_cnn", 32), ("compact_cnn", 128), ("medium_cnn", 64)]
PAIRS = 14
SAMPLES = 4096
LIMIT = 0.03
SEARCH = SearchSpec(warmup_steps=3, min_steps=50, max_steps=200)
TIMES = ("step_time_s", "compute_time_s", "optimizer_time_s", "data_time_s")
ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)

Row = dict[str, float]
Way = Callable[[str, int, float], Measurement]


def built_in(model: str, batch: int, began_at: float) -> Measurement:
    workload = {"model": f"{NETWORKS}{model}", "dataset": "synthetic", "samples": SAMPLES, "loader_workers": 0}
    tables: dict[str, Any] = {"workload": workload, "training": {"method": "lbt", "observe_gradients": False}}
    sweep = SweepSpec.model_validate({"name": "x", **tables}).model_copy(update={"search": SEARCH})
    # a fresh process, as a script has; in a process that has measured before, memory is laid out differently
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as process:
        job = partial(measure, sweep, ClusterSpec(), Configuration(1, 1, batch), ALONE, job_began_at=began_at)
        return process.submit(job).result()


def scripted(model: str, batch: int, began_at: float) -> Measurement:
    arguments = ("--model", f"{NETWORKS}{model}", "--samples", str(SAMPLES), "--batch-size", str(batch))
    own: dict[str, Any] = {"configuration": Configuration(1, 1, batch), "forward_batch": batch}
    own |= {"samples": SAMPLES, "search": SEARCH, "job_began_at": began_at}
    with TemporaryDirectory() as folder:
        script = SCRIPTS / "like_built_in.py"
        (outcome,) = profiled(script, (*arguments, "--epochs", "1000"), Path(folder), **own)
        return measurement_of(outcome)


def numbers(measured: Measurement, speed: CoreSpeed, began_at: float) -> Row:
    assert measured.times is not None
    assert measured.memory is not None
    assert measured.start_s > 0.0
    first_step_at = began_at + measured.start_s
    # whole steps come first, then the parts by themselves
    steps_end_at = first_step_at + measured.steps * measured.times.step_time_s
    now = time.time()
    found = {"peak_bytes": float(measured.memory.peak_bytes)}
    for name in TIMES:
        found[f"{name} undivided"] = seconds = getattr(measured.times, name)
        end_at = steps_end_at if name == "step_time_s" else now
        found[name] = seconds / speed.slowness(first_step_at, end_at)
    return found


def compare(model: str, batch: int, speeds: tuple[CoreSpeed, CoreSpeed]) -> dict[str, Any]:
    """Compare all numbers of the two ways over the pairs."""
    ways: list[Way] = [built_in, scripted]
    rows: list[list[Row]] = []
    with ThreadPoolExecutor(2) as threads:
        for pair in range(PAIRS):
            cores = speeds[::-1] if pair % 2 else speeds
            begun = [threads.submit(on_core, core, way, model, batch) for core, way in zip(cores, ways, strict=True)]
            rows.append([each.result() for each in begun])
    found: dict[str, Any] = {}
    for name in (*TIMES, "peak_bytes"):
        logs = log_ratios(rows, name)
        # two pairs, between which the ways swap cores
        twos = logs.reshape(-1, 2).mean(axis=1)
        drawn = np.random.default_rng(0).choice(twos, size=(1000, len(twos)))
        found[name] = {
            "ratio": round(float(np.exp(np.median(twos))), 4),
            "deviation": round(float(np.std(np.exp(np.median(drawn, axis=1)))), 4),
            "pairs": [round(float(np.exp(f(logs))), 4) for f in (np.min, np.median, np.max)],
        }
    for name in TIMES:
        found[name]["undivided"] = round(float(np.exp(np.median(log_ratios(rows, f"{name} undivided")))), 4)
    print(f"{model}, batch {batch}: {found}", file=sys.stderr)
    return {**found, "within the limit": abs(found["step_time_s"]["ratio"] - 1.0) <= LIMIT}


def log_ratios(rows: list[list[Row]], name: str) -> Array:
    return np.log([theirs[name] / ours[name] for ours, theirs in rows])


def on_core(speed: CoreSpeed, way: Way, model: str, batch: int) -> Row:
    # the core of this thread, and of the processes that it starts
    os.sched_setaffinity(0, {speed.core})
    began_at = time.time()
    return numbers(way(model, batch, began_at), speed, began_at)


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with CoreSpeed(first) as one, CoreSpeed(second) as other:
        found = {f"{model}, batch {batch}": compare(model, batch, (one, other)) for model, batch in CASES}
    results = {"cores": os.cpu_count(), "torch": torch.__version__, "limit": LIMIT, "cases": found}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
