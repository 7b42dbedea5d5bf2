"""Predicted and measured memory, with each training in its own process, as JSON.

    python -m tests.benchmarks.memory_estimate [--device cpu|cuda] [--out tests/benchmarks/results/NAME.json]

The estimate before any profile is compared with the peak of real training steps: on CPU the resident set of the process
that trains, at two local batches each; on CUDA the memory that the allocator reserved. The two constants for CPUs
(`HEAP_HOLES`, `LIBRARIES_BYTES`) were chosen on the `tuned` models; the `held_out` models played no part in that. On
CUDA the four models of the paper are measured at four local batches each, and the fitted memory model is compared, too:
at the points it was fitted to, and at each point when fitted to the others. Images are random, in ten classes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.records import Footprint, MemoryUse
from tula_hpc.stages.batches_that_fit import estimate

RESULTS = Path(__file__).parent / "results"
# measured steps, after two that warm up
STEPS = 3


class Case(NamedTuple):
    """One model and image size, and the local batches that are measured."""

    model: str
    image_size: int
    batches: tuple[int, ...]
    group: str


def _cases(group: str, image_size: int, batches: tuple[int, ...], models: str) -> list[Case]:
    return [Case(model, image_size, batches, group) for model in models.split()]


CASES = {
    "cpu": [
        *_cases("tuned", 32, (16, 64), "resnet18 resnet50 vgg11 alexnet mobilenet_v3_small mobilenet_v3_large"),
        *_cases("tuned", 32, (16, 64), "vit_b_16 densenet121"),
        *_cases("tuned", 224, (4, 16), "resnet18 resnet50 vgg11 alexnet mobilenet_v3_large vit_b_16 densenet121"),
        *_cases("held_out", 32, (16, 64), "efficientnet_b0 shufflenet_v2_x1_0 swin_t"),
        *_cases("held_out", 224, (4, 16), "squeezenet1_1 mobilenet_v3_small regnet_y_400mf"),
    ],
    "cuda": [
        *_cases("paper", 224, (32, 64, 128, 256), "resnet50 alexnet mobilenet_v3_large"),
        *_cases("paper", 32, (128, 256, 512, 1024), "vgg11"),
        *_cases("further", 224, (16, 64), "vit_b_16 densenet121 vgg11"),
    ],
}


def sweep_tables(case: Case) -> dict[str, Any]:
    """Return a sweep on random images whose candidates are the case's batches."""
    facts = {"model": case.model, "image_size": case.image_size, "dataset": "synthetic", "loader_workers": 0}
    search = {"cluster_sizes": [1], "min_batch": min(case.batches), "max_batch": max(case.batches)}
    return {"name": "memory", "workload": facts, "search": search, "training": {"method": "lbt"}}


def measure(case: Case, local_batch: int, device: str) -> MemoryUse:
    """Train a few steps in this process, as a profile does, and return the memory used."""
    from tula_hpc.ddp.process_group import process_group
    from tula_hpc.ddp.worker import Worker
    from tula_hpc.env import WorkerEnvironment
    from tula_hpc.profiling.meters import MemoryMeter
    from tula_hpc.records import Configuration

    sweep, cluster = SweepSpec.model_validate(sweep_tables(case)), ClusterSpec.model_validate({"device": device})
    env = WorkerEnvironment(0, 1, 0, 0, "", 0, ("here",), on_slurm=False)
    meter = MemoryMeter(cluster)
    with process_group(cluster, env):
        worker = Worker(sweep, cluster, Configuration(1, 1, local_batch), env)
        batches = worker.batches()
        for _ in range(2):
            worker.train_step(*next(batches))
        meter.start()
        for _ in range(STEPS):
            worker.train_step(*next(batches))
        meter.stop()
        return meter.use(worker.model, worker.parameters, worker.optimizer)


def measure_apart(case: Case, local_batch: int, device: str) -> MemoryUse | None:
    """Measure in a fresh process; None if that fails, for example out of memory."""
    job = json.dumps([case.model, case.image_size, local_batch, device])
    command = [sys.executable, "-m", "tests.benchmarks.memory_estimate", "--one", job]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{job}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return MemoryUse.model_validate_json(done.stdout.splitlines()[-1])


def estimated(case: Case, device: str) -> Footprint:
    """Return the estimate, made by the command that a sweep uses.

    Raises:
        SystemExit: The command made no estimate.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("sweep.toml", "cluster.toml")]
        for file, content in zip(files, (sweep_tables(case), {"device": device}), strict=True):
            file.write_text(tomli_w.dumps(content))
        found = estimate(files[0], files[1])
    if found.footprint is None:
        raise SystemExit(f"{case}: {found.reason}")
    return found.footprint


def rows_of(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """Yield estimate and measurement at each batch."""
    footprint = estimated(case, device)
    for batch in case.batches:
        use = measure_apart(case, batch, device)
        if use is not None:
            row = case._asdict() | {"batches": None, "local_batch": batch, "estimated_bytes": footprint.peaks[batch]}
            row |= {"measured_bytes": use.reserved_bytes, "error": footprint.peaks[batch] / use.reserved_bytes - 1}
            row["tensor_bytes_estimated"] = round(_tensors(footprint, batch))
            row["memory"] = use.model_dump()
            print(f"{case.model} {case.image_size} b={batch}: {row['error']:+.1%}", file=sys.stderr)
            yield {key: value for key, value in row.items() if value is not None}


def _tensors(footprint: Footprint, batch: int) -> float:
    """Return the bytes of tensors alone in the backward pass, to compare with CUDA's allocated bytes."""
    return footprint.fixed_bytes + footprint.activation_bytes_per_sample * batch


def fitted_errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return errors of the memory model fitted to one network's rows: at these rows, and at each row when left out."""

    from tula_hpc.analysis.models.memory import MemoryModel

    def fit(used: Sequence[dict[str, Any]]) -> MemoryModel:
        uses = [MemoryUse.model_validate(row["memory"]) for row in used]
        return MemoryModel().fit(
            [row["local_batch"] for row in used],
            [use.reserved_bytes for use in uses],
            static_bytes=[use.baseline_bytes + use.parameter_bytes + use.optimizer_bytes for use in uses],
            gradient_bytes=[use.gradient_bytes for use in uses],
            allocated_bytes=[use.peak_bytes + use.baseline_bytes for use in uses],
        )

    def error(model: MemoryModel, row: dict[str, Any]) -> float:
        return float(model.predict(row["local_batch"]) / row["measured_bytes"] - 1)

    whole = fit(rows)
    left_out = [error(fit([other for other in rows if other is not row]), row) for row in rows]
    return {
        "parameters": whole.parameters_,
        "errors": [error(whole, row) for row in rows],
        "left_out_errors": left_out,
    }


def compare(device: str, jobs: int = 1) -> dict[str, Any]:
    """Return all cases of a device: rows, and medians by group."""
    with ThreadPoolExecutor(jobs) as pool:
        of_cases = list(pool.map(lambda case: list(rows_of(case, device)), CASES[device]))
    rows = [row for some in of_cases for row in some]
    result: dict[str, Any] = {"device": device, "rows": rows}
    groups = {row["group"] for row in rows}
    errors = {group: [abs(row["error"]) for row in rows if row["group"] == group] for group in sorted(groups)}
    result["estimate_error_median"] = {group: statistics.median(found) for group, found in errors.items()}
    result["estimate_error_max"] = {group: max(found) for group, found in errors.items()}
    if device == "cuda":
        paper = [row for row in rows if row["group"] == "paper"]
        by_model = {model: list(found) for model, found in groupby(paper, key=lambda row: row["model"])}
        fitted = {model: fitted_errors(found) for model, found in by_model.items()}
        result["fitted"] = fitted
        for key in ("errors", "left_out_errors"):
            every = [abs(error) for found in fitted.values() for error in found[key]]
            result[f"fitted_{key}_median"] = statistics.median(every)
    return result


def main() -> None:
    """Run one measurement (`--one`, in its own process), or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.memory_estimate")
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time, if the device has room for them")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, image_size, batch, device = json.loads(options.one)
        print(measure(Case(model, image_size, (batch,), ""), batch, device).model_dump_json())
        return
    result = compare(options.device, options.jobs)
    out = options.out or RESULTS / f"memory_estimate_{options.device}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key.endswith(("median", "max"))}, indent=1))


if __name__ == "__main__":
    main()
