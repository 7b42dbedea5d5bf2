"""The plan against the training where the data loader is slow, through the command's own code, as JSON.

    python -m tests.benchmarks.loader_bound WORK tests/benchmarks/results/loader_bound.json [CELL ...]

The model takes 40 ms for a step, and the items of the data set take a set time, all by sleeping, so that a busy
processor matters little. Each cell is a sweep of one configuration in a folder of WORK: profile, plan, training of some
hundred steps. `need` is the loader's time for a batch in units of a step, `cv` the variation of its items' times,
`processes` the number of loader processes. A cell has a name like `2.0-0.5-8`; without names all cells are run. Cells
that WORK already holds are used: to run a cell again, delete its folder.

The recorded cells ran one after another on a machine that was otherwise idle, in 16 minutes.

- predicted_ms: the plan's step time, of which wait_ms is waiting for data.
- training_ms: the training's step time, the mean over all epochs except the first, which includes a start.
- ratio: predicted over actual; `worst` is the largest |ratio − 1| of all cells.
- told: the plan's warnings about the loader.
- profile_steps, profile_s: number of the profile's whole steps, and their time.
- load: processes that wanted a processor of this machine after the cell, by its one-minute load average.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.examples.sleepy import ITEM_CV, ITEM_S, STEP_S
from tula_hpc.records import RunDirectory, read_metrics

ROOT = Path(__file__).resolve().parents[2]
CELLS = list(itertools.product((0.7, 1.3, 2.0), (0.5, 1.0), (4, 8)))
BATCH = 16
STEPS_PER_EPOCH = 128
EPOCHS = 4
SWEEP = f"""
name = "loader_bound"
[workload]
model = "tests.examples.sleepy:model"
dataset = "tests.examples.sleepy:images"
image_size = 8
samples = {BATCH * STEPS_PER_EPOCH}
epochs = {EPOCHS}
loader_workers = {{processes}}
[search]
cluster_sizes = [1]
min_batch = {BATCH}
max_batch = {BATCH}
[training]
method = "lbt"
"""


def run_cell(folder: Path, need: float, cv: float, processes: int) -> dict[str, Any]:
    """Run one sweep unless it has finished, and return what it predicted and took."""
    run = RunDirectory(folder / "run")
    if not run.train().result_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "sweep.toml"
        file.write_text(SWEEP.format(processes=processes))
        item_s = need * STEP_S * processes / BATCH
        environment = {**os.environ, ITEM_S: str(item_s), ITEM_CV: str(cv), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tula_hpc.sweep", str(file), "--run-dir", str(run.root)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True)
        (folder / "load").write_text(f"{os.getloadavg()[0]:.1f}")
    plan = run.read_plan()
    (profile,) = run.measurements().records
    assert profile.times is not None
    epochs = read_metrics(run.train().metrics_file).epochs[1:]
    training_s = fmean(epoch.epoch_time_s / epoch.steps for epoch in epochs)
    predicted_s = plan.chosen.step_time_s
    return {
        "need": need,
        "cv": cv,
        "processes": processes,
        "predicted_ms": round(1e3 * predicted_s, 2),
        "wait_ms": round(1e3 * profile.times.data_time_s, 2),
        "training_ms": round(1e3 * training_s, 2),
        "epochs_ms": [round(1e3 * epoch.epoch_time_s / epoch.steps, 2) for epoch in epochs],
        "ratio": round(predicted_s / training_s, 3),
        "told": [warning for warning in plan.warnings if "data" in warning],
        "profile_steps": profile.steps,
        "profile_s": round(sum(profile.samples["step"]) * profile.round_steps["step"], 1),
        "load": float((folder / "load").read_text()),
    }


def main(work: Path, output: Path, names: list[str]) -> None:
    """Run the cells, and write the results."""
    cells = {f"{need}-{cv}-{processes}": (need, cv, processes) for need, cv, processes in CELLS}
    found = {}
    for name in names or cells:
        found[name] = run_cell(work / name, *cells[name])
        print(name, json.dumps(found[name]), flush=True)
    worst = max(abs(cell["ratio"] - 1) for cell in found.values())
    output.write_text(json.dumps({"step_ms": 1e3 * STEP_S, "worst": round(worst, 3), "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
