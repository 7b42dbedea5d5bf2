"""Profile of a built-in workload against that of the same training as a plain script, as JSON.

    python -m tests.benchmarks.script_against_built_in [--out tests/benchmarks/results/script_against_built_in.json]

One worker with one thread. Both profiles are taken in turn, in changing order; `ratio` is the script's time over the
built-in's: the median over the pairs and both ends. `step_time_s` is what the limit of 3 % is about. The parts are
measured in different ways, as a script's computation can only be seen within its steps: `compute_time_s` and
`optimizer_time_s` show how far that differs. `peak_bytes` is the growth of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.attach.script_runs import SCRIPTS, measurement_of, profiled
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.profiling.measure import measure
from tula_hpc.records import Configuration, Measurement

RESULT = Path(__file__).parent / "results" / "script_against_built_in.json"
NETWORKS = "tula_hpc.workloads.small_cnns:"
CASES = [("compact_cnn", 32), ("compact_cnn", 128), ("medium_cnn", 64)]
PAIRS = 7
SAMPLES = 4096
LIMIT = 0.03
SEARCH = SearchSpec(warmup_steps=3, min_steps=15, max_steps=60, noise_steps=0)
TIMES = ("step_time_s", "compute_time_s", "optimizer_time_s", "data_time_s")
ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)

Row = dict[str, float]


def built_in(model: str, batch: int) -> Measurement:
    workload = {"model": f"{NETWORKS}{model}", "dataset": "synthetic", "samples": SAMPLES, "loader_workers": 0}
    tables: dict[str, Any] = {"workload": workload, "training": {"method": "lbt", "observe_gradients": False}}
    sweep = SweepSpec.model_validate({"name": "x", **tables}).model_copy(update={"search": SEARCH})
    return measure(sweep, ClusterSpec(), Configuration(1, 1, batch), ALONE)


def scripted(model: str, batch: int) -> Measurement:
    arguments = ("--model", f"{NETWORKS}{model}", "--samples", str(SAMPLES), "--batch-size", str(batch))
    own: dict[str, Any] = {"configuration": Configuration(1, 1, batch), "forward_batch": batch}
    own |= {"samples": SAMPLES, "search": SEARCH}
    with TemporaryDirectory() as folder:
        script = SCRIPTS / "like_built_in.py"
        (outcome,) = profiled(script, (*arguments, "--epochs", "1000"), Path(folder), **own)
        return measurement_of(outcome)


def numbers(measured: Measurement) -> Row:
    assert measured.times is not None
    assert measured.memory is not None
    found = {name: getattr(measured.times, name) for name in TIMES}
    return {**found, "peak_bytes": float(measured.memory.peak_bytes)}


def compare(model: str, batch: int) -> dict[str, Any]:
    """Ratios of all numbers over the pairs: least, median, most."""
    ratios: dict[str, list[float]] = {}
    for pair in range(PAIRS):
        ways = (built_in, scripted) if pair % 2 else (scripted, built_in)
        rows = {way: numbers(way(model, batch)) for way in ways}
        for name, value in rows[built_in].items():
            ratios.setdefault(name, []).append(rows[scripted][name] / value)
    step = median(ratios["step_time_s"])
    found = {name: [round(f(values), 4) for f in (min, median, max)] for name, values in ratios.items()}
    print(f"{model}, batch {batch}: {found}", file=sys.stderr)
    return {"ratio": found, "within the limit": abs(step - 1.0) <= LIMIT}


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    found = {f"{model}, batch {batch}": compare(model, batch) for model, batch in CASES}
    results = {"cores": os.cpu_count(), "torch": torch.__version__, "limit": LIMIT, "cases": found}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
