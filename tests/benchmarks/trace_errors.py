"""How well step times of public traces are predicted, and how often the 90 % intervals hold, as JSON.

    python -m tests.benchmarks.trace_errors tests/benchmarks/results/trace_errors.json

The traces are single runs of six workloads with 1 to 64 GPUs on 1 to 16 nodes (A. Qiao et al., "Pollux", OSDI 2021,
artifact). Every number is a median over the points of one workload, next to that of the paper's own form on the same
data.

- full: fitted to and compared with all points with one worker per node, N = 2 … 16.
- cross_validated: the same points in eight parts, each predicted from the other seven.
- corners: fitted to {2, 16} nodes × {smallest, largest batch}, compared with the others; with and without sync_time.
- adaptive: fitted to the at most eight points of a replayed adaptive search, compared with the others; with and without
  sync_time, for each objective.
- several_workers: fitted to all placements and sizes, compared with those that have several workers on a node.
- coverage: for each of these, the share of the compared points that lie inside their interval.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.traces import WORKLOADS, Trace, read_trace, single_workers
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.search.adaptive import AdaptiveSearch
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.config.search import FormName
from tula_hpc.records import Configuration, Measurement, MemoryUse, StepTimes

PARTS = 8
MAX_PROFILES = 8
OBJECTIVES = ("knee", "time", "cost")


def fit(trace: Trace, *, sync: bool = False, form: FormName = "auto") -> StepTimeModel:
    """Fit a model to some rows; with `sync`, the trace's computation times are used, too."""
    compute = trace.compute_s if sync else None
    return StepTimeModel(form).fit(trace.nodes, trace.local_batch, trace.step_s, trace.per_node, compute)


def score(model: StepTimeModel, trace: Trace) -> dict[str, float]:
    """Return median and 95th percentile of the relative error, and the share of points inside their 90 % interval."""
    points = (trace.nodes, trace.local_batch, trace.per_node)
    return summary(np.abs(model.predict(*points) / trace.step_s - 1.0), inside(model, trace))


def inside(model: StepTimeModel, trace: Trace) -> NDArray[np.bool_]:
    """Mark the points that lie inside their interval."""
    low, high = model.interval(trace.nodes, trace.local_batch, trace.per_node, level=0.9)
    return np.asarray((low <= trace.step_s) & (trace.step_s <= high))


def summary(errors: Array, covered: NDArray[np.bool_]) -> dict[str, float]:
    """Return the numbers of one case."""
    return {
        "median": float(np.median(errors)),
        "p95": float(np.quantile(errors, 0.95)),
        "coverage": float(np.mean(covered)),
        "points": len(errors),
    }


def corners(trace: Trace) -> NDArray[np.bool_]:
    """Mark the smallest and the largest batch on the fewest and on the most nodes."""
    found = np.zeros(len(trace.nodes), dtype=bool)
    for nodes in (trace.nodes.min(), trace.nodes.max()):
        of_size = trace.nodes == nodes
        batches = trace.local_batch[of_size]
        found |= of_size & np.isin(trace.local_batch, [batches.min(), batches.max()])
    return found


def cross_validated(trace: Trace, form: FormName = "auto") -> dict[str, float]:
    """Predict every point from a fit that did not see it."""
    part = np.random.default_rng(0).permutation(len(trace.nodes)) % PARTS
    errors, covered = np.zeros(len(part)), np.zeros(len(part), dtype=bool)
    for index in range(PARTS):
        model, unseen = fit(trace.only(part != index), form=form), trace.only(part == index)
        errors[part == index] = np.abs(model.predict(unseen.nodes, unseen.local_batch) / unseen.step_s - 1.0)
        covered[part == index] = inside(model, unseen)
    return summary(errors, covered)


def adaptive(trace: Trace, objective: str, *, sync: bool) -> dict[str, Any]:
    """Replay the search over the trace; return its errors at points that it did not measure."""
    place = {
        Configuration(int(n), 1, int(b)): i for i, (n, b) in enumerate(zip(trace.nodes, trace.local_batch, strict=True))
    }
    search = AdaptiveSearch(list(place), DecisionModel(objective), MAX_PROFILES)
    rows: list[Measurement] = []
    while proposed := search.propose(rows):
        rows.append(as_measurement(trace, place[proposed[0]], len(rows), sync=sync))
    seen = np.array([place[row.configuration] for row in rows])
    node_seconds = trace.nodes * trace.step_s
    return {
        **score(fit(trace.only(seen), sync=sync), trace.only(np.setdiff1d(np.arange(len(trace.nodes)), seen))),
        "profiled": [str(row.configuration) for row in rows],
        "node_seconds_share": float(node_seconds[seen].sum() / node_seconds.sum()),
    }


def as_measurement(trace: Trace, row: int, order: int, *, sync: bool) -> Measurement:
    """Return one row as the profiler would have recorded it, as far as the trace has the values."""
    step_s, compute_s = float(trace.step_s[row]), float(trace.compute_s[row]) if sync else 0.0
    return Measurement(
        status="ok",
        nodes=int(trace.nodes[row]),
        workers_per_node=1,
        local_batch=int(trace.local_batch[row]),
        backend="nccl",
        finished_at=order + 1.0,
        times=StepTimes(
            step_time_s=step_s,
            step_time_low_s=step_s,
            step_time_high_s=step_s,
            data_time_s=0.0,
            compute_time_s=compute_s,
            optimizer_time_s=0.0,
            allreduce_time_s=0.0,
        ),
        memory=MemoryUse(
            peak_bytes=1,
            reserved_bytes=1,
            baseline_bytes=0,
            parameter_bytes=0,
            gradient_bytes=0,
            optimizer_bytes=0,
        ),
    )


def cases(workload: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and numbers of every case of one workload."""
    everything = read_trace(workload)
    trace = single_workers(everything)
    at_corners = corners(trace)
    few, others = trace.only(at_corners), trace.only(~at_corners)
    several = everything.only(everything.workers > everything.nodes)
    yield "full", score(fit(trace), trace)
    yield "full, paper's form", score(fit(trace, form="paper"), trace)
    yield "cross_validated", cross_validated(trace)
    yield "cross_validated, paper's form", cross_validated(trace, "paper")
    yield "corners", score(fit(few), others)
    yield "corners with sync_time", score(fit(few, sync=True), others)
    yield "corners, paper's form", score(fit(few, form="paper"), others)
    yield "corners with sync_time, paper's form", score(fit(few, sync=True, form="paper"), others)
    for objective in OBJECTIVES:
        yield f"adaptive for {objective}", adaptive(trace, objective, sync=False)
        yield f"adaptive for {objective} with sync_time", adaptive(trace, objective, sync=True)
    yield "several_workers", score(fit(everything), several)
    yield "several_workers, paper's form", score(fit(everything, form="paper"), several)


def main() -> None:
    """Run all, print the means over the workloads, write the JSON."""
    by_case: dict[str, dict[str, Any]] = {}
    for workload in WORKLOADS:
        for name, found in cases(workload):
            by_case.setdefault(name, {})[workload] = found
    for name, of_workload in by_case.items():
        means = {key: float(np.mean([w[key] for w in of_workload.values()])) for key in ("median", "p95", "coverage")}
        of_workload["mean"] = means
        print(f"{name:42} median {means['median']:6.1%}  p95 {means['p95']:6.1%}  coverage {means['coverage']:.1%}")
    Path(sys.argv[1]).write_text(json.dumps(by_case, indent=1) + "\n")


if __name__ == "__main__":
    main()
