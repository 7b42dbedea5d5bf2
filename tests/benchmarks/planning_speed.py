"""How long planning takes on one core: aggregating a hundred thousand measurements, and the command, as JSON.

    python -m tests.benchmarks.planning_speed tests/benchmarks/results/planning_speed.json

Aggregating: measurements as records, over few configurations with many repeats and over as many configurations as
measurements. Times are processor times, summed over all threads, the best of three. The command is timed as a process
from its start, in elapsed and in processor seconds.
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
from tula_hpc.records import Measurement, RunDirectory, append_record

EPOCHS = 5
MEASUREMENTS = 100_000
LIMITS_S = {"aggregate": 3.0, "command": 1.5}


def best_of(function: Callable[[], object], clock: Callable[[], float], repeats: int = 3) -> float:
    """Return the least seconds of some runs."""
    times = []
    for _ in range(repeats):
        started = clock()
        function()
        times.append(clock() - started)
    return min(times)


def aggregating() -> dict[str, float]:
    """Return the seconds to summarize, by number of configurations."""
    found = {}
    for configurations in (1_000, 50_000, MEASUREMENTS):
        rows = repeated(configurations)
        found[str(configurations)] = best_of(lambda rows=rows: summarize(rows), time.process_time)  # type: ignore[misc]
    return found


def repeated(configurations: int) -> list[Measurement]:
    """Return `MEASUREMENTS` measurements, spread over some configurations; the repeats' times differ."""
    found = []
    for index in range(configurations):
        row = ok(1 + index % 1_000, 1 + index // 1_000)
        assert row.times is not None
        for repeat in range(MEASUREMENTS // configurations):
            slower = {name: (1 + 0.01 * repeat) * value for name, value in row.times if value is not None}
            its = {"finished_at": float(repeat), "times": row.times.model_copy(update=slower)}
            found.append(row.model_copy(update=its))
    return found


def commanding() -> dict[str, dict[str, float]]:
    """Return the seconds of the command as a process, for a run with 18 measurements, and of the plan alone."""
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
    """Return the least elapsed and processor seconds of a command."""
    elapsed, used = [], []
    for _ in range(repeats):
        before, started = os.times(), time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
        elapsed.append(time.perf_counter() - started)
        after = os.times()
        # user and system time of children
        used.append(sum(after[2:4]) - sum(before[2:4]))
    return {"elapsed_s": min(elapsed), "processor_s": min(used)}


def main(output: str) -> int:
    """Measure, write, and return 1 if a limit is exceeded."""
    result: dict[str, Any] = {
        "limits_s": LIMITS_S,
        "aggregate_s": aggregating(),
        "command": commanding(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        # shows whether other work ran at the same time
        "load_average": os.getloadavg()[0],
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    slowest = {
        "aggregate": max(result["aggregate_s"].values()),
        "command": max(times["processor_s"] for times in result["command"].values()),
    }
    return int(any(slowest[name] > limit for name, limit in LIMITS_S.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
