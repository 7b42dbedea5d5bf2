"""Measurements of a made-up cluster that follows known equations, for tests of the models and the plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import Measurement, MemoryUse, StepTimes

MIB = 1024**2
COMPUTE_FIXED_S = 0.01
COMPUTE_PER_SAMPLE_S = 0.001
RING_S = 0.12
FIXED_BYTES = 500 * MIB
BYTES_PER_SAMPLE = 4 * MIB
SAMPLES = 20_000


def compute_time_s(local_batch: int) -> float:
    return COMPUTE_FIXED_S + COMPUTE_PER_SAMPLE_S * local_batch


def sync_time_s(workers: int) -> float:
    return RING_S * (1 - 1 / workers)


def step_time_s(nodes: int, local_batch: int) -> float:
    return compute_time_s(local_batch) + sync_time_s(nodes)


def peak_bytes(local_batch: int) -> int:
    return FIXED_BYTES + BYTES_PER_SAMPLE * local_batch


def times(nodes: int, local_batch: int, **changes: float) -> StepTimes:
    step = step_time_s(nodes, local_batch)
    fields = {
        "step_time_s": step,
        "step_time_low_s": 0.99 * step,
        "step_time_high_s": 1.01 * step,
        "data_time_s": 0.1 * COMPUTE_FIXED_S,
        "compute_time_s": compute_time_s(local_batch) - 0.2 * COMPUTE_FIXED_S,
        "optimizer_time_s": 0.1 * COMPUTE_FIXED_S,
        "allreduce_time_s": sync_time_s(nodes),
    }
    return StepTimes.model_validate(fields | changes)


def memory(local_batch: int, **changes: int) -> MemoryUse:
    fields = {
        "peak_bytes": peak_bytes(local_batch) - 200 * MIB,
        "reserved_bytes": peak_bytes(local_batch),
        "baseline_bytes": 200 * MIB,
        "parameter_bytes": 40 * MIB,
        "gradient_bytes": 40 * MIB,
        "optimizer_bytes": 40 * MIB,
    }
    return MemoryUse.model_validate(fields | changes)


def ok(nodes: int, local_batch: int, **changes: Any) -> Measurement:
    fields = {
        "status": "ok",
        "nodes": nodes,
        "workers_per_node": 1,
        "local_batch": local_batch,
        "times": times(nodes, local_batch),
        "memory": memory(local_batch),
        "converged": True,
        "dataset_samples": SAMPLES,
        "parameters": 10_000_000,
    }
    return Measurement.model_validate(fields | changes)


def oom(nodes: int, local_batch: int, **changes: Any) -> Measurement:
    fields = {"status": "oom", "nodes": nodes, "workers_per_node": 1, "local_batch": local_batch}
    return Measurement.model_validate(fields | {"failure": Failure.DEVICE_OOM} | changes)


def failed(nodes: int, local_batch: int, **changes: Any) -> Measurement:
    fields = {"status": "failed", "nodes": nodes, "workers_per_node": 1, "local_batch": local_batch}
    return Measurement.model_validate(fields | {"failure": Failure.BUG, "detail": "ValueError: no"} | changes)


def grid(sizes: Iterable[int] = (1, 2, 4), batches: Iterable[int] = (32, 64, 128, 256, 512, 1024)) -> list[Measurement]:
    """Return a measurement for every cluster size and global batch."""
    return [ok(nodes, batch // nodes) for nodes in sizes for batch in batches]


def sweep(objective: str = "knee", workload: dict[str, Any] | None = None, **search: Any) -> SweepSpec:
    # with this mode, a plan from the corners of the grid is complete
    bounds = {"mode": "partial"} | search
    tables = {"name": "test", "objective": {"kind": objective}, "search": bounds, "workload": workload or {"epochs": 5}}
    return SweepSpec.model_validate(tables)


def cluster(**changes: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(changes)


CORNERS = [ok(1, 32), ok(1, 1024), ok(4, 8), ok(4, 256)]

SWEEP_FILE = """
name = "test"
[workload]
model = "elsewhere.models:net"
dataset = "cifar100"
data_dir = "/nowhere/at/all"
epochs = 5
"""
