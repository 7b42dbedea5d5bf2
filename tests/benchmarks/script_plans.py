"""The plan against the training that follows it, for scripts of several kinds on this machine, as JSON.

    python -m tests.benchmarks.script_plans WORK tests/benchmarks/results/script_plans.json [SCRIPT ...]

For each script in `CASES`, from `tests/attach/scripts`, a sweep of one configuration with one worker of one thread
profiles, plans and trains some epochs, all by the command. This is done in rounds over all scripts, two sweeps at a
time, each on its own core. WORK is a folder for the run directories; sweeps that it already holds are used. The machine
should do nothing else, for half an hour.

- predicted_ms, training_ms: step time by the plan and in the training: the mean over all epochs except the first.
- slowed: how much slower the core was in those epochs than while the profile timed steps, see `host_speed`.
- error: predicted over actual, minus 1, where the actual time is divided by `slowed`; `undivided` is without that.
  `median` is over a script's rounds, with its sign, because a profile that is over in a second may see one speed of the
  machine alone. `deviation` is the standard deviation of that median over resampled rounds, `worst` the largest
  |median|, and `all` the median over all scripts together.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tests.benchmarks.host_speed import CoreSpeed
from tula_hpc.records import RunDirectory, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "attach" / "scripts"
ROUNDS = 12
EPOCHS, STEPS, BATCH = 4, 96, 32
LIMIT = 0.05
# Arguments that make a step take 10 to 80 ms. This wide, plain.py diverges at its own learning rate; denormal numbers
# then make its first hundred steps take twice as long on a CPU. A profile, whose learning rate is 0, has none.
CASES = {
    "plain.py": ("--width", "40000", "--lr", "0.0005"),
    "like_built_in.py": (),
    "on_trainer.py": ("--width", "192"),
    "on_lightning.py": ("--width", "20000"),
    "on_accelerate.py": ("--width", "40000"),
    "on_timm.py": (),
}
SWEEP = """
name = "{name}"
[workload]
script = "{script}"
arguments = {arguments}
samples = {samples}
epochs = {epochs}
[search]
cluster_sizes = [1]
min_batch = {batch}
max_batch = {batch}
[training]
method = "lbt"
"""


def run_sweep(script: str, folder: Path, speed: CoreSpeed) -> dict[str, float]:
    """Run one sweep on a core unless it has finished, and return what it predicted and took."""
    result = folder / "found.json"
    if not result.exists():
        run = RunDirectory(folder / "run")
        # a sweep that was interrupted begins anew
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        samples = STEPS * BATCH
        given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(samples), *CASES[script]]
        fields = {"script": SCRIPTS / script, "arguments": json.dumps(given), "samples": samples, "epochs": EPOCHS}
        (folder / "sweep.toml").write_text(SWEEP.format(name=Path(script).stem, batch=BATCH, **fields))
        command = [sys.executable, "-m", "tula_hpc.sweep", str(folder / "sweep.toml"), "--run-dir", str(run.root)]
        command += ["--until", "train"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # the core of this thread, and of the processes that it starts
        os.sched_setaffinity(0, {speed.core})
        subprocess.run(command, check=True, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
        result.write_text(json.dumps(compared(run, speed)))
    found: dict[str, float] = json.loads(result.read_text())
    return found


def compared(run: RunDirectory, speed: CoreSpeed) -> dict[str, float]:
    """Return the step times of plan and training, and how the core's speed changed between them."""
    (measured,) = run.measurements().records
    assert measured.times is not None
    assert measured.start_s > 0.0
    # a local job starts when it is submitted
    stepped_at = run.events()[0].time + measured.start_s
    in_profile = speed.slowness(stepped_at, stepped_at + measured.steps * measured.times.step_time_s)
    epochs = read_metrics(run.train().metrics_file).epochs
    training_s = fmean(epoch.epoch_time_s / epoch.steps for epoch in epochs[1:])
    began_at = epochs[0].ended_at
    ended_at = epochs[-1].ended_at
    assert began_at is not None
    assert ended_at is not None
    slowed = speed.slowness(began_at, ended_at) / in_profile
    predicted_s = run.read_plan().chosen.step_time_s
    return {
        "predicted_ms": round(1e3 * predicted_s, 4),
        "training_ms": round(1e3 * training_s, 4),
        "slowed": round(slowed, 4),
        "error": round(predicted_s / training_s * slowed - 1, 4),
        "undivided": round(predicted_s / training_s - 1, 4),
    }


def main(work: Path, output: Path, names: list[str]) -> None:
    """Run the sweeps, and write the results after each round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names or CASES}
    pairs = [list(found)[begin : begin + 2] for begin in range(0, len(found), 2)]
    first, second, *_ = sorted(os.sched_getaffinity(0))
    with CoreSpeed(first) as one, CoreSpeed(second) as other, ThreadPoolExecutor(2) as threads:
        for number in range(ROUNDS):
            # a script changes cores from round to round
            speeds = (other, one) if number % 2 else (one, other)
            for scripts in pairs:
                folders = [work / f"{Path(script).stem}-{number}" for script in scripts]
                for script, row in zip(scripts, threads.map(run_sweep, scripts, folders, speeds), strict=True):
                    found[script].append(row)
                    print(number, script, row, flush=True)
            output.write_text(json.dumps(summary(found), indent=1) + "\n")


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians over the rounds so far, followed by all sweeps."""
    errors = {script: np.array([row["error"] for row in rows]) for script, rows in found.items()}
    medians = {script: round(float(np.median(row)), 4) for script, row in errors.items()}
    random = np.random.default_rng(0)
    drawn = {script: np.median(random.choice(row, size=(1000, len(row))), axis=1) for script, row in errors.items()}
    return {
        "cores": os.cpu_count(),
        "limit": LIMIT,
        "worst": max(map(abs, medians.values())),
        "all": round(float(np.median(np.concatenate(list(errors.values())))), 4),
        "median": medians,
        "deviation": {script: round(float(np.std(values)), 4) for script, values in drawn.items()},
        "undivided": {s: round(float(np.median([row["undivided"] for row in rows])), 4) for s, rows in found.items()},
        "sweeps": found,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
