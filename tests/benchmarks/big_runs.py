"""Time and memory of the plan, status and report of very large runs, and the size of the report, as JSON.

    python -m tests.benchmarks.big_runs tests/benchmarks/results/big_runs.json

The runs hold 100,000 measurements of all configurations or of only one, a million logged steps, 100,000 events, and all
of these in one run directory (two gigabytes of disk in total, deleted afterwards). Each command is its own process;
reported are elapsed seconds, processor seconds and peak memory.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.big_run_factory import make_big_run
from tests.run_factory import configurations

MEASUREMENTS, STEPS, EVENTS = 100_000, 1_000_000, 100_000
ONE = configurations()[:1]
RUNS: dict[str, dict[str, Any]] = {
    "small": {},
    "measurements": {"measurements": MEASUREMENTS},
    "measurements_of_one_configuration": {"measurements": MEASUREMENTS, "of": ONE},
    "steps": {"steps": STEPS},
    "events": {"events": EVENTS},
    "all": {"measurements": MEASUREMENTS, "steps": STEPS, "events": EVENTS},
}
COMMANDS = ("analysis.plan", "status", "analysis.report")
LIMITS = {"processor_s": 20.0, "memory_mb": 1000.0, "report_mb": 5.0}


def measured(module: str, run: Path) -> dict[str, float]:
    """Run a command as its own process, and return its time and memory."""
    command = [sys.executable, "-m", f"tula_hpc.{module}", str(run)]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {errors.decode()}")
    return {
        "elapsed_s": round(time.perf_counter() - started, 1),
        "processor_s": round(usage.ru_utime + usage.ru_stime, 1),
        "memory_mb": round(usage.ru_maxrss * 1024 / 1e6),
    }


def of_run(kind: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Measure all commands on one kind of run."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_big_run(Path(folder) / "run", **kind)
        found = {module: measured(module, run.root) for module in COMMANDS}
        found["analysis.report"] |= {
            "report_mb": round((run.report / "report.html").stat().st_size / 1e6, 2),
            "pdf_mb": round((run.report / "report.pdf").stat().st_size / 1e6, 2),
        }
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, write, and return 1 if a limit is exceeded."""
    (output,) = arguments
    result: dict[str, Any] = {
        "limits": LIMITS,
        "runs": {name: of_run(kind) for name, kind in RUNS.items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
        # shows whether other work ran at the same time
        "load_average": os.getloadavg()[0],
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    rows = [row for commands in result["runs"].values() for row in commands.values()]
    return int(any(row.get(name, 0) > limit for row in rows for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
