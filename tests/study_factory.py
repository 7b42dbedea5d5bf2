"""Make a study's run directory without training: accuracies follow a formula, some runs diverge, some fail."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import tomli_w

from tests.known import known
from tula_hpc.config import StudyCell, SweepSpec
from tula_hpc.records import EpochMetrics, RunDirectory, StepMetrics, TrainResult, write_atomically

STUDY: dict[str, object] = {
    "methods": ["lbt", "lrs", "lars", "ags"],
    "batches": [256, 512, 1024],
    "seeds": [0, 1, 2],
    "small_batch": 128,
    "variants": {
        "ags-d0.1": {"training": {"method": "ags", "delta": 0.1}},
        "ags-d2": {"training": {"method": "ags", "delta": 2.0}},
    },
}
SWEEP: dict[str, object] = {
    "name": "made-up",
    "workload": {"dataset": "digits", "epochs": 20},
    # δ has an effect only with this gate
    "training": {"gate": "paper"},
    "study": STUDY,
}
LOSS_PER_DOUBLING = {"lbt": 0.05, "lrs": 0.03, "lars": 0.08, "ags": 0.015, "ags-d0.1": 0.035, "ags-d2": 0.02}


def accuracy(cell: StudyCell) -> float | None:
    """Return an accuracy that falls with every doubling of the batch; None where the run diverges."""
    if cell.column == "lrs" and cell.batch == 1024 and cell.seed == 2:
        return None
    noise = random.Random(cell.label).gauss(0.0, 0.006)
    return 0.74 - LOSS_PER_DOUBLING[cell.column] * math.log2(cell.batch / 128) + noise


def make_study(
    root: Path, tables: dict[str, object] = SWEEP, outcome: Callable[[StudyCell], float | None] = accuracy
) -> RunDirectory:
    """Make the directory of a study whose runs have all ended; `outcome` gives the end of each run."""
    spec = SweepSpec.model_validate(tables)
    run = RunDirectory(root).create()
    write_atomically(run.sweep_file, tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True)))
    for cell in known(spec.study).cells():
        run.train(cell.label).root.mkdir(parents=True)
        reached = outcome(cell)
        write_atomically(run.train(cell.label).result_file, result(spec, cell, reached).model_dump_json())
        if reached is not None:
            _log(run, spec, cell, reached)
    return run


def result(spec: SweepSpec, cell: StudyCell, reached: float | None) -> TrainResult:
    """Return the result of a run with the accuracy `reached`; None: the run diverged."""
    return TrainResult(
        label=cell.label,
        nodes=1,
        workers_per_node=1,
        local_batch=cell.batch,
        global_batch=cell.batch,
        method="lbt",
        epochs=spec.workload.epochs if reached is not None else 1,
        steps=100,
        samples_seen=100 * cell.batch,
        final_loss=0.5,
        test_accuracy=reached or 0.0,
        test_top5_accuracy=reached or 0.0,
        train_time_s=1.0,
        wall_time_s=1.0,
        starts_s=0.0,
        saving_s=0.0,
        restarts=0,
        diverged=reached is None,
        train_accuracy=None if reached is None else min(1.0, reached + 0.2),
    )


def _log(run: RunDirectory, spec: SweepSpec, cell: StudyCell, reached: float) -> None:
    lines: list[StepMetrics | EpochMetrics] = []
    chance = random.Random(cell.label)
    top = math.sqrt(cell.batch / 32)
    for epoch in range(1, spec.workload.epochs + 1):
        common = {"epoch": epoch, "step": 5 * epoch, "samples_seen": 5 * epoch * cell.batch}
        if cell.column.startswith("ags"):
            scale = 1 + (top - 1) * chance.betavariate(3, 5)
            scaled = {"scale_mean": scale, "scale_min": 0.1, "scale_max": top, "scaled": 0.8, "scale_share": 0.8}
            lines.append(StepMetrics(loss=1.0, lr=0.05, step_time_s=0.1, **common, **scaled))
        metrics = EpochMetrics(
            global_batch=cell.batch,
            train_loss=1.0,
            test_loss=1.0,
            test_accuracy=reached * (1 - math.exp(-4 * epoch / spec.workload.epochs)) / (1 - math.exp(-4)),
            test_top5_accuracy=0.9,
            epoch_time_s=1.0,
            steps=5,
            **common,
        )
        lines.append(metrics)
    run.train(cell.label).metrics_file.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
