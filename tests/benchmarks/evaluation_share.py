"""What share of a step's forward and backward an evaluation's forward pass takes, by model, as JSON.

    python -m tests.benchmarks.evaluation_share tests/benchmarks/results/evaluation_share_cpu.json

Forward and backward of a training batch, as the profiler times them, and an evaluation of as many samples, as training
does it, take turns on one thread. Times are of the processor, so that other work matters little; medians over turns.
`predicted_over_measured` is what the plan would say of an evaluation over what it takes, less 1.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from tula_hpc.analysis.evaluation import FORWARD_SHARE
from tula_hpc.config import WorkloadSpec
from tula_hpc.workloads import Workload, build_workload

TURNS = 8
MODELS = {
    "mobilenet_v3_small": (64, 256),
    "shufflenet_v2_x0_5": (64, 256),
    "resnet18": (64,),
    "tests.benchmarks.vgg_like:vgg_like": (64, 256),
    "tula_hpc.workloads.compact:medium_cnn": (64, 256),
}


def timed(action: Callable[[], object]) -> float:
    """Processor seconds."""
    started = time.process_time()
    action()
    return time.process_time() - started


def measure(name: str, batch: int) -> dict[str, float]:
    """Medians of one model, milliseconds a sample."""
    workload = build_workload(WorkloadSpec(model=name, dataset="synthetic", samples=2048))
    size = workload.image_size
    inputs, targets = torch.rand(batch, 3, size, size), torch.arange(batch) % workload.classes
    train, evaluate = _train(workload, inputs, targets), _evaluate(workload, inputs, targets)
    train(), evaluate()  # warm
    turns = [(timed(train), timed(evaluate)) for _ in range(TURNS)]
    compute, forward = (median(column) / batch for column in zip(*turns, strict=True))
    found = {"compute_ms": 1e3 * compute, "evaluation_ms": 1e3 * forward, "share": forward / compute}
    return found | {"predicted_over_measured": FORWARD_SHARE * compute / forward - 1.0}


def _train(workload: Workload, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    def step() -> None:
        workload.model.train()
        workload.model.zero_grad(set_to_none=True)
        workload.loss(workload.model(inputs), targets).backward()  # type: ignore[no-untyped-call] # torch has no types here

    return step


def _evaluate(workload: Workload, inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def score() -> None:
        workload.model.eval()
        outputs = workload.model(inputs)
        workload.loss(outputs, targets)
        outputs.topk(5, dim=1)

    return score


def main(output: str) -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    found = {f"{name}, b={batch}": measure(name, batch) for name, batches in MODELS.items() for batch in batches}
    shares = [row["share"] for row in found.values()]
    result = {
        "models": found,
        "share": {"median": median(shares), "least": min(shares), "most": max(shares)},
        "assumed_share": FORWARD_SHARE,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    Path(output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
