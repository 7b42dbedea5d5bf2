"""The cost of observing gradients that nothing scales: steps of a plain training with and without, as JSON.

    python -m tests.benchmarks.observation_cost [--out tests/benchmarks/results/observation_cost.json]

Two workers over gloo with one thread each train a compact network and VGG11 on the digits of scikit-learn by
`method = "lbt"`, with `observe_gradients` and without; steps of the two take turns in changing order. `ratio`:
quartiles of the ratios of neighbouring steps. The final weights of both are equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.forked import fork_workers, run_workers
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.records import Configuration

RESULT = Path(__file__).parent / "results" / "observation_cost.json"
WORKERS = 2
# edge, local batch, pairs
MODELS = {"tula_hpc.workloads.small_cnns:compact_cnn": (16, 64, 400), "vgg11": (32, 32, 40)}


def new_worker(rank: int, model: str, *, observe: bool) -> Worker:
    """Return one of two workers, with the same weights and data whether observed or not."""
    edge, local_batch, _ = MODELS[model]
    workload = {"model": model, "dataset": "digits", "image_size": edge, "loader_workers": 0, "lr": 0.01}
    training = {"method": "lbt", "observe_gradients": observe}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False)
    return Worker(spec, ClusterSpec(), Configuration(WORKERS, 1, local_batch), env)


def compare(rank: int, model: str) -> dict[str, Any]:
    """Return the seconds of a step without observation, and quartiles of the ratio with over without."""
    workers = [new_worker(rank, model, observe=observe) for observe in (False, True)]
    batches = [worker.batches() for worker in workers]
    pairs = MODELS[model][2]
    times = np.zeros((2, pairs + 3))
    for index in range(pairs + 3):
        for kind in (0, 1) if index % 2 else (1, 0):
            batch = next(batches[kind])
            # the same dropout in both
            workers[kind].seed(index)
            dist.barrier()
            started = time.perf_counter()
            workers[kind].train_step(*batch)
            times[kind, index] = time.perf_counter() - started
    both = zip(workers[0].parameters, workers[1].parameters, strict=True)
    assert all(torch.equal(one, other) for one, other in both)
    kept = times[:, 3:]
    ratios = np.quantile(kept[1] / kept[0], (0.25, 0.5, 0.75))
    local_batch = MODELS[model][1]
    return {"local_batch": local_batch, "step_time_s": float(np.median(kept[0])), "ratio": ratios.round(4).tolist()}


def work(rank: int, folder: Path) -> None:
    """Run one worker; rank 0 writes the results."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORKERS)
    found = {model: compare(rank, model) for model in MODELS}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        run_workers(__file__, folder, timeout_s=1800, OMP_NUM_THREADS="1")
        found = json.loads((Path(folder) / "found.json").read_text())
    for model, figures in found.items():
        print(f"{model}: {figures}")
    results = {"workers": WORKERS, "cores": os.cpu_count(), "torch": torch.__version__, "models": found}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        sys.exit(fork_workers(WORKERS, partial(work, folder=Path(sys.argv[1]))))
    main()
