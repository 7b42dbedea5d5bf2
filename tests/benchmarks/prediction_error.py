"""Predicted and measured epoch times and memory of a finished sweep, as JSON.

    python -m tests.benchmarks.prediction_error RUN tests/benchmarks/results/NAME.json

Profiled candidates are compared with their own profiles, to which the model was fitted; the model has not seen the
training's epochs.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tula_hpc.analysis.run_contents import measured_epochs
from tula_hpc.records import Measurement, Plan, RunDirectory, TrainResult, read_metrics


def compare(run: RunDirectory) -> dict[str, Any]:
    """Return rows per candidate, their medians, and the training."""
    plan, measured = run.read_plan(), run.measurements().records
    rows = epoch_rows(plan, measured)
    memory = memory_rows(plan, measured)
    return {
        "objective": plan.objective,
        "chosen": str(plan.chosen.configuration),
        "reason": plan.reason,
        "epochs": rows,
        "epoch_error_median": statistics.median(abs(row["error"]) for row in rows),
        "epoch_error_max": max(abs(row["error"]) for row in rows),
        "memory": memory,
        "memory_error_median": statistics.median(abs(row["error"]) for row in memory),
        "model": plan.models["step_time"],
        "training": training(run, plan),
        "profiling_node_seconds": sum(m.node_seconds or m.elapsed_s * m.nodes for m in measured),
        "device": measured[0].device,
        "versions": measured[0].versions,
    }


def epoch_rows(plan: Plan, measured: list[Measurement]) -> list[dict[str, Any]]:
    """Return predicted and measured epoch time of every profiled candidate, seconds."""
    times = measured_epochs(measured, plan.dataset_samples)
    return [
        {
            "nodes": c.nodes,
            "global_batch": c.global_batch,
            "predicted_s": c.epoch_time_s * c.model_step_time_s / c.step_time_s,
            "measured_s": times[c.configuration],
            "error": c.epoch_time_s * c.model_step_time_s / c.step_time_s / times[c.configuration] - 1,
        }
        for c in plan.candidates
        if c.configuration in times
    ]


def memory_rows(plan: Plan, measured: list[Measurement]) -> list[dict[str, Any]]:
    """Return predicted and measured peak memory per worker of every profiled candidate, bytes."""
    used = {m.configuration: m.memory.reserved_bytes for m in measured if m.memory is not None}
    return [
        {
            "nodes": c.nodes,
            "local_batch": c.local_batch,
            "predicted_bytes": c.peak_memory_bytes,
            "measured_bytes": used[c.configuration],
            "error": c.peak_memory_bytes / used[c.configuration] - 1,
        }
        for c in plan.candidates
        if c.configuration in used
    ]


def training(run: RunDirectory, plan: Plan) -> dict[str, Any] | None:
    """Compare the epochs of the final training with the prediction; None before it has ended."""
    files = run.train()
    if not files.result_file.exists():
        return None
    result = TrainResult.model_validate_json(files.result_file.read_bytes())
    times = [epoch.epoch_time_s for epoch in read_metrics(files.metrics_file).epochs]
    return {
        "nodes": result.nodes,
        "global_batch": result.global_batch,
        "epoch_times_s": times,
        "predicted_epoch_time_s": plan.chosen.epoch_time_s,
        "error_of_mean": plan.chosen.epoch_time_s / statistics.mean(times) - 1,
        "test_accuracy": result.test_accuracy,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compare(RunDirectory(Path(sys.argv[1]))), indent=1) + "\n")
