"""The plan against the training that follows it, for three CIFAR-100 workloads on the test cluster, as JSON.

    python -m tests.benchmarks.plan_against_training DATA WORK OUT.json [NAME=CHECKOUT ...]

DATA is CIFAR-100 as an ImageFolder tree, WORK a folder for the run directories; runs that it already holds are used.
Needs root, Slurm and a machine that is otherwise idle. The workloads are those of `cluster_prediction`, each at the
configuration that its knee search chose. A sweep profiles that configuration, plans and trains there. This is done in
rounds: by this checkout, and by other named ones (each with its own `.venv`), in turn and immediately after each other,
so that disturbances of the machine affect all of them.

- predicted_s, training_s: seconds of an epoch's steps, by the plan and in the training: the mean over all epochs except
  the first, which includes a start.
- error: predicted over actual, minus 1; `median` and `worst` are of |error| over workloads and rounds; `by_workload`
  has each workload's median error with its sign.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.benchmarks.cluster_prediction import CLUSTER_FILE, ROOT, SWEEP, WORKLOADS
from tests.slurm.testcluster import MiniCluster

ROUNDS = 3
EPOCHS = 2
# nodes and global batch by workload
CHOSEN = {"vgg_like": (1, 64), "shufflenet": (4, 32), "mobilenet": (4, 32)}


def run_sweep(name: str, checkout: Path, run: Path, data: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run one sweep unless it has finished, and return what it predicted and took."""
    if not (run / "train" / "main" / "result.json").exists():
        file = run.with_name(f"{run.name}.toml")
        file.write_text(SWEEP.format(name=name, data=data, **WORKLOADS[name]._asdict()))
        python = checkout / ".venv" / "bin" / "python"
        command = [str(python), "-m", "tula_hpc.sweep", str(file), "--cluster", str(CLUSTER_FILE)]
        command += ["--run-dir", str(run), "--set", f"workload.epochs={EPOCHS}"]
        nodes, batch = CHOSEN[name]
        command += ["--set", f"search.cluster_sizes=[{nodes}]"]
        command += ["--set", f"search.min_batch={batch}", "--set", f"search.max_batch={batch}"]
        subprocess.run(command, check=True, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
    # read plain JSON, as other checkouts may have other record classes
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    lines = [json.loads(line) for line in (run / "train" / "main" / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["epoch_time_s"] for line in lines if line["kind"] == "epoch"]
    training_s = fmean(epochs[1:])
    return {
        "nodes": chosen["nodes"],
        "global_batch": chosen["global_batch"],
        "predicted_s": chosen["epoch_time_s"],
        "training_s": training_s,
        "epochs_s": epochs,
        "error": chosen["epoch_time_s"] / training_s - 1,
    }


def main(data: Path, work: Path, output: Path, others: list[str]) -> None:
    """Run the sweeps in rounds, and write the results so far after each sweep."""
    checkouts = {"this": ROOT, **{name: Path(path) for name, _, path in (text.partition("=") for text in others)}}
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    with MiniCluster() as cluster:
        environment = {**os.environ, **cluster.environment}
        for number, workload in itertools.product(range(ROUNDS), CHOSEN):
            # reverse the order in every other round
            for name in list(checkouts)[:: -1 if number % 2 else 1]:
                run = work / f"{workload}-{name}-{number}"
                row = run_sweep(workload, checkouts[name], run, data, environment)
                found[name].append({"workload": workload, "round": number, **row})
                print(name, json.dumps(found[name][-1]), flush=True)
                # a round takes half an hour: results so far may be wanted before
                output.write_text(json.dumps(summary(found), indent=1) + "\n")


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the errors of each checkout over the sweeps that have ended."""
    return {
        name: {
            "median": median(abs(row["error"]) for row in rows),
            "worst": max(abs(row["error"]) for row in rows),
            "by_workload": {
                workload: median(errors)
                for workload in CHOSEN
                if (errors := [row["error"] for row in rows if row["workload"] == workload])
            },
            "sweeps": rows,
        }
        for name, rows in found.items()
        if rows
    }


if __name__ == "__main__":
    data_folder, work_folder, output_file = (Path(argument).absolute() for argument in sys.argv[1:4])
    main(data_folder, work_folder, output_file, sys.argv[4:])
