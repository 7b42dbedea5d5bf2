"""The plan against the training that follows it, for scripts of several kinds on this machine, as JSON.

    python -m tests.benchmarks.script_plans WORK tests/benchmarks/results/script_plans.json [SCRIPT ...]

For each script in `CASES`, from `tests/attach/scripts`, a sweep of one configuration with one worker of one thread
profiles, plans and trains some epochs, all by the command. This is done in rounds over all scripts. WORK is a folder
for the run directories; runs that it already holds are used. The machine should do nothing else, for an hour: on a
virtual machine with neighbours a single sweep is off by 10 %, which the mean over the rounds has to even out.

- predicted_ms, training_ms: step time by the plan and in the training: the mean over all epochs except the first.
- error: predicted over actual, minus 1. `mean` is over a script's rounds, with its sign, `deviation` the standard
  deviation of that mean; `worst` is the largest |mean|, and `all` the mean over all scripts together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tula_hpc.records import RunDirectory, read_metrics

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "attach" / "scripts"
ROUNDS = 12
EPOCHS, STEPS, BATCH = 4, 96, 32
LIMIT = 0.05
# Arguments that make a step take 20 to 100 ms. This wide, plain.py diverges at its own learning rate; denormal numbers
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


def run_sweep(script: str, folder: Path) -> dict[str, Any]:
    """Run one sweep unless it has finished, and return what it predicted and took."""
    run = RunDirectory(folder / "run")
    if not run.train().result_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        samples = STEPS * BATCH
        given = ["--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", str(samples), *CASES[script]]
        fields = {"script": SCRIPTS / script, "arguments": json.dumps(given), "samples": samples, "epochs": EPOCHS}
        (folder / "sweep.toml").write_text(SWEEP.format(name=Path(script).stem, batch=BATCH, **fields))
        command = [sys.executable, "-m", "tula_hpc.sweep", str(folder / "sweep.toml"), "--run-dir", str(run.root)]
        command += ["--until", "train"]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=variables, capture_output=True)
    epochs = read_metrics(run.train().metrics_file).epochs[1:]
    training_s = fmean(epoch.epoch_time_s / epoch.steps for epoch in epochs)
    predicted_s = run.read_plan().chosen.step_time_s
    found = {"predicted_ms": 1e3 * predicted_s, "training_ms": 1e3 * training_s, "error": predicted_s / training_s - 1}
    return {name: round(value, 4) for name, value in found.items()}


def main(work: Path, output: Path, names: list[str]) -> None:
    """Run the sweeps, and write the results after each round."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(ROUNDS):
        for script in names or CASES:
            found.setdefault(script, []).append(run_sweep(script, work / f"{Path(script).stem}-{number}"))
            print(number, script, found[script][-1], flush=True)
        errors = {script: [row["error"] for row in rows] for script, rows in found.items()}
        means = {script: round(fmean(row), 4) for script, row in errors.items()}
        totals = {
            "cores": os.cpu_count(),
            "limit": LIMIT,
            "rounds": number + 1,
            "worst": max(map(abs, means.values())),
            "all": round(fmean(error for row in errors.values() for error in row), 4),
            "mean": means,
            "deviation": {s: round(stdev(row) / len(row) ** 0.5, 4) for s, row in errors.items() if len(row) > 1},
        }
        output.write_text(json.dumps({**totals, "sweeps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
