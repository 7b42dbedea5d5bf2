"""How long planning takes on one core: a million candidates, a hundred thousand measurements, the command, as JSON.

    python -m tests.benchmarks.planning_speed tests/benchmarks/results/planning_speed.json

Predicting and choosing: every candidate of cluster sizes 1 … 65,536 with global batches up to 2^30 is predicted,
priced, held against constraints and ranked, and the Pareto front is found; models are fitted before. Aggregating:
measurements as records, over few configurations with many repeats and over as many configurations as measurements.
Times are of the processor, all threads added up, the best of three. The command is timed as a process from its start,
in elapsed and in processor seconds.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.planning_data import cluster, grid, ok, sweep
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import make_plan
from tula_hpc.analysis.planning.candidates import candidate_grid, predict
from tula_hpc.analysis.planning.constraints import constrain
from tula_hpc.analysis.planning.knee import knee_curves
from tula_hpc.analysis.planning.objective import choose
from tula_hpc.analysis.planning.partitions import Fitted, fit_parts
from tula_hpc.analysis.planning.planner import fallback_rows, written_records
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Measurement, RunDirectory, append_record

EPOCHS = 5
MEASUREMENTS = 100_000
LIMITS_S = {"predict_and_choose": 1.0, "aggregate": 3.0, "command": 2.5}


def best_of(function: Callable[[], object], clock: Callable[[], float], repeats: int = 3) -> float:
    """Least seconds of some runs."""
    times = []
    for _ in range(repeats):
        started = clock()
        function()
        times.append(clock() - started)
    return min(times)


def planning() -> dict[str, float]:
    """Seconds to predict and choose among a million candidates, by objective."""
    measured = [row.model_copy(update={"dataset_samples": 2**40}) for row in grid()]
    small = fit_parts(million("time"), wide(), measured)
    part = small.parts[0]

    def decide(spec: SweepSpec) -> Fitted:
        table = constrain(predict(0, part, candidate_grid(spec.search, part.cluster), spec), spec.objective)
        choice = choose(spec.objective, table, knee_curves((part,), spec))
        fitted = Fitted((part,), table, ())
        written_records(fitted, choice, fallback_rows(table, choice))
        return fitted

    specs = {kind: million(kind) for kind in ("time", "cost", "weighted", "knee")}
    seconds = {kind: best_of(lambda spec=spec: decide(spec), time.process_time) for kind, spec in specs.items()}  # type: ignore[misc]
    return {"candidates": decide(specs["time"]).table.rows, **seconds}


def million(kind: str) -> SweepSpec:
    """A sweep over about a million candidates."""
    spec = sweep(kind, cluster_sizes=list(range(1, 65_537)), min_batch=1, max_batch=2**30, workload={"epochs": EPOCHS})
    return spec.model_copy(update={"objective": spec.objective.model_copy(update={"deadline_hours": 1e9})})


def wide() -> ClusterSpec:
    """As many nodes as that needs; memory rules some candidates out."""
    return cluster(max_nodes=65_536, memory_gb=64.0)


def aggregating() -> dict[str, float]:
    """Seconds to summarize, by number of configurations."""
    found = {}
    for configurations in (1_000, 50_000, MEASUREMENTS):
        rows = repeated(configurations)
        found[str(configurations)] = best_of(lambda rows=rows: summarize(rows), time.process_time)  # type: ignore[misc]
    return found


def repeated(configurations: int) -> list[Measurement]:
    """Measurements over so many configurations."""
    each = (ok(1 + index % 1_000, 1 + index // 1_000) for index in range(configurations))
    repeats = range(MEASUREMENTS // configurations)
    return [row.model_copy(update={"finished_at": float(repeat)}) for row in each for repeat in repeats]


def commanding() -> dict[str, dict[str, float]]:
    """Seconds of the command over a run with 18 measurements, as a process; and of the plan alone."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run").create()
        run.sweep_file.write_text('name = "speed"\n[workload]\nmodel = "elsewhere.models:net"\nepochs = 5\n')
        run.cluster_file.write_text('name = "here"\n')
        for row in grid():
            append_record(run.profile / "task.jsonl", row, durable=False)
        command = [sys.executable, "-m", "tula_hpc.analysis.plan", str(run.root)]
        asked = {
            "knee": [*command, "--objective", "knee"],
            "cost_on_spot": [*command, "--objective", "cost", "--set", "pricing.basis=spot"],
        }
        found = {name: process_seconds(words) for name, words in asked.items()}
    inside = best_of(lambda: make_plan(sweep("knee"), cluster(), grid()), time.process_time)
    return {**found, "make_plan_knee": {"processor_s": inside}}


def process_seconds(command: Sequence[str], repeats: int = 5) -> dict[str, float]:
    """Least elapsed and processor seconds of a command."""
    elapsed, used = [], []
    for _ in range(repeats):
        before, started = os.times(), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
        elapsed.append(time.perf_counter() - started)
        after = os.times()
        used.append(sum(after[2:4]) - sum(before[2:4]))  # of the children, user and system
    return {"elapsed_s": min(elapsed), "processor_s": min(used)}


def main(output: str) -> int:
    """Measure, write, and return 1 where a limit is broken."""
    result: dict[str, Any] = {
        "limits_s": LIMITS_S,
        "predict_and_choose_s": planning(),
        "aggregate_s": aggregating(),
        "command": commanding(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],  # of other work at the same time
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    slowest = {
        "predict_and_choose": max(v for k, v in result["predict_and_choose_s"].items() if k != "candidates"),
        "aggregate": max(result["aggregate_s"].values()),
        "command": max(times["processor_s"] for times in result["command"].values()),
    }
    return int(any(slowest[name] > limit for name, limit in LIMITS_S.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
