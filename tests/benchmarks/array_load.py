"""Thousands of trivial profile tasks through real Slurm: is each recorded once, and how many requests does that take?

    python -m tests.benchmarks.array_load WORK OUT.json [COUNT]

WORK is a folder for the run directory. Needs root and Slurm; starts the test cluster with MaxArraySize 101, so that
2,000 tasks are 20 arrays. The tasks write made-up measurements. OUT.json holds how often each task was recorded, the
submitter's peak memory, and its requests to the controller and to accounting, in total and in the busiest minute.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import load_cluster
from tula_hpc.launch import slurm
from tula_hpc.launch.bounded_command import COMMAND_TIMEOUT_S
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
MAX_ARRAY_SIZE = 101


def measures(number: int, folder: Path) -> Callable[[], None]:
    """Return a task that records one configuration. As an inner function it is pickled by value: few imports."""

    def task() -> None:
        row = {"status": "ok", "nodes": 1, "workers_per_node": 1, "local_batch": number + 1}
        with (folder / f"n1-b{number + 1}-0.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    return task


class Requests:
    """Counts requests to Slurm, by program and minute."""

    def __init__(self) -> None:
        self.at: list[tuple[float, str]] = []
        self._ask = slurm.run_command

    def __call__(self, arguments: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Count the command, and run it."""
        self.at.append((time.time(), arguments[0]))
        return self._ask(arguments, timeout_s)

    def summary(self) -> dict[str, Any]:
        """Totals by program; requests per second on average and in the busiest minute."""
        times = [at for at, _ in self.at]
        minutes = Counter(int(at // 60) for at in times)
        span_s = max(times) - min(times)
        return {
            "by_program": dict(Counter(program for _, program in self.at)),
            "per_second": len(times) / span_s,
            "per_second_busiest_minute": max(minutes.values()) / 60,
        }


def run(work: Path, count: int) -> dict[str, Any]:
    """Submit all tasks, wait for them, and count."""
    directory = RunDirectory(work / "run").create()
    cluster = load_cluster(ROOT / "slurm_templates" / "testcluster.toml", ["exclusive=false", "array_parallelism=8"])
    launcher = Launcher(cluster, directory, "tula-load")
    requests = Requests()
    slurm.run_command = requests
    began = time.time()
    jobs = launcher.submit([measures(i, directory.profile) for i in range(count)], stage="profile", nodes=1, minutes=5)
    submitted = time.time()
    ended = launcher.wait(jobs)
    recorded = Counter(row.local_batch for row in directory.measurements().records)
    return {
        "tasks": count,
        "largest_array": MAX_ARRAY_SIZE,
        "arrays": len({job.array_id for job in jobs}),
        "accepted": len(jobs),
        "ended": len(ended),
        "recorded_once": sum(times == 1 for times in recorded.values()),
        "recorded_more_often": sum(times > 1 for times in recorded.values()),
        "not_recorded": count - len(recorded),
        "submitting_s": submitted - began,
        "all_s": time.time() - began,
        "submitter_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "requests": requests.summary(),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    if len(arguments) not in (2, 3):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with MiniCluster(max_array_size=MAX_ARRAY_SIZE) as cluster:
        os.environ |= cluster.environment
        result = run(Path(arguments[0]), int(arguments[2]) if len(arguments) == 3 else 2000)
    Path(arguments[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0 if result["recorded_once"] == result["tasks"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
