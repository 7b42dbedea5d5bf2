"""The time that one checkpoint costs a training, written while training waits or while it continues, as JSON.

    python -m tests.benchmarks.checkpoint_cost FOLDER [--device cpu|cuda] [--models …] [--batch …] [--out …]

Checkpoints go to FOLDER, so that its file system is part of the measurement. A round takes the same number of training
steps three times, in a random order: without a checkpoint, with one that is written before the first step (`blocking`),
and with one that is copied before the first step and written during the steps (`overlapped`; if it is not on disk after
the last step, its writing is waited for). All three share model, data and momenta. The cost is the difference from
the steps without a checkpoint in the same round; the 90 % interval of its median comes from resampled rounds. `stall_s`
is how long the steps were held up. The result also has the checkpoint interval that a training with that cost would
choose, with one interruption a day, and the share of its time that saving takes: at that interval, and at the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import nn
from torch.optim import SGD

from tula_hpc.analysis.costs.interruptions import MOST_S, interval_s
from tula_hpc.checkpoint.background import BackgroundWriter
from tula_hpc.checkpoint.store import CheckpointStore

MODELS = ("resnet18", "resnet50", "vgg11")
DAY_S = 86_400.0
WAYS = ("none", "blocking", "overlapped")
RESAMPLES = 2000
# a measured stretch of steps takes this many times as long as a write
LONGER = 2.0

Round = dict[str, float]


class Bench:
    """One model in training, and its checkpoints.

    Args:
        folder: Where checkpoints go.
        model: Name of a torchvision classifier.
        batch: Samples in a step.
        image_size: Pixels on one side.
        device: Device of the training.
    """

    def __init__(self, folder: Path, model: str, batch: int, image_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model: nn.Module = torchvision.models.get_model(model, weights=None, num_classes=100).to(device)
        self.inputs = torch.randn(batch, 3, image_size, image_size, device=device)
        self.targets = torch.randint(100, (batch,), device=device)
        self.optimizer = SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.store = CheckpointStore(folder / model)
        self.writer = BackgroundWriter(self.store, device)
        self.saves = 0
        self.stalls: list[float] = []

    def step(self) -> None:
        """Start one training step; the device may finish it later."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(nn.functional.cross_entropy(self.model(self.inputs), self.targets))
        self.optimizer.step()

    def now(self) -> float:
        """Wait for the device, and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def stretch(self, way: str, steps: int) -> float:
        """Return the seconds of some steps, with a checkpoint at their beginning unless `way` is "none"."""
        started = self.now()
        self.save(way)
        for _ in range(steps):
            self.step()
        _, error = self.writer.finish() or (0.0, None)
        if error is not None:
            raise error
        return self.now() - started

    def save(self, way: str) -> None:
        """Write a checkpoint, begin to write one, or do nothing, as `way` says."""
        self.saves += 1
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if way == "blocking":
            self.store.save(state, samples_seen=self.saves)
        elif way == "overlapped":
            started = time.perf_counter()
            self.writer.begin(state, samples_seen=self.saves, restart_count=0)
            self.stalls.append(time.perf_counter() - started)

    def steps_for(self, seconds: float) -> int:
        """Return the number of steps that take about that long."""
        steps = 3
        return max(steps, round(seconds / (self.stretch("none", steps) / steps)))


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Measure one model."""
    bench.stretch("none", 3)
    write_s = min(_seconds(lambda: bench.stretch("blocking", 0)) for _ in range(3))
    steps = bench.steps_for(LONGER * write_s)
    # warm up: create buffers and files
    for way in WAYS:
        bench.stretch(way, steps)
    bench.stalls.clear()
    order, generator, seen = list(WAYS), random.Random(0), list[Round]()
    for _ in range(rounds):
        generator.shuffle(order)
        seen.append({way: bench.stretch(way, steps) for way in order})
    row: dict[str, Any] = {"bytes": bench.store.paths()[-1].stat().st_size, "write_s": write_s}
    row |= {"steps": steps, "step_s": statistics.median(each["none"] for each in seen) / steps, "rounds": rounds}
    costs = {way: cost([each[way] - each["none"] for each in seen]) for way in WAYS[1:]}
    return row | costs | {"stall_s": statistics.median(bench.stalls)}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def cost(extra_s: Sequence[float]) -> dict[str, Any]:
    """Return the median cost, its interval, and the checkpoint interval and shares that follow from it."""
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(extra_s, k=len(extra_s))) for _ in range(RESAMPLES))
    median = statistics.median(extra_s)
    least_s = max(0.0, median)
    chosen_s = float(interval_s(least_s, np.array([DAY_S]))[0])
    return {
        "cost_s": median,
        "interval_90": [medians[RESAMPLES // 20], medians[-RESAMPLES // 20]],
        "chosen_interval_s": chosen_s,
        "share": least_s / chosen_s,
        "share_at_the_most_seldom": least_s / MOST_S,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int, help="pixels; default 64 on CPU, 224 on CUDA")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    image_size = arguments.image_size or (64 if device.type == "cpu" else 224)
    rows = {}
    for model in arguments.models:
        bench = Bench(arguments.folder, model, arguments.batch, image_size, device)
        rows[model] = measure(bench, arguments.rounds)
        print(f"{model}: {json.dumps(rows[model])}", file=sys.stderr)
    result = {"device": _device_name(device), "torch": torch.__version__, "cores": len(os.sched_getaffinity(0))}
    text = json.dumps(result | {"batch": arguments.batch, "image_size": image_size, "models": rows}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


if __name__ == "__main__":
    main()
