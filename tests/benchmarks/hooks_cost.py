"""What it costs a script to be watched in training: steps with the hooks and without, in turn, as JSON.

    python -m tests.benchmarks.hooks_cost [--out tests/benchmarks/results/hooks_cost.json]

One process with one thread trains a compact network by a plain loop over torch's DataLoader. Blocks of ten steps come
in pairs, one with all hooks of `attach` in place and told to a `ScriptTraining` that writes its usual line, one with
torch as it was, in changing order. Where single steps take turns, the hooks' code has left the processor's caches by
the next one, as in no training.

- ratio: quartiles of the ratios of a pair's blocks; the limit of 1 % is about their median.
- cost_s: median of what a watched step takes more.
- batches: the smaller the batch, the more a step feels the hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

from tula_hpc.attach.reporting import ChildSpec
from tula_hpc.attach.script import Script
from tula_hpc.attach.train.script_training import ScriptTraining, TrainSettings
from tula_hpc.records import RunDirectory
from tula_hpc.workloads.small_cnns import compact_cnn

RESULT = Path(__file__).parent / "results" / "hooks_cost.json"
# local batch, and pairs of blocks
CASES = {8: 600, 64: 30}
BLOCK = 10
WARM_UP = 5
SAMPLES, EDGE, CLASSES = 4096, 32, 10
LIMIT = 0.01


class Watch:
    """A script's training whose hooks can be taken off and put on again."""

    def __init__(self, folder: Path, batch: int) -> None:
        run = RunDirectory(folder / f"run-{batch}").create()
        run.make_train()
        settings = TrainSettings(
            root=run.root, label="main", job_id="1", samples=10**9, global_batch=batch, log_interval_steps=10,
            between_s=3600.0,
        )  # fmt: skip
        said = folder / f"said-{batch}.json"
        spec = ChildSpec(
            mode="train", program=Script(Path("x.py"), None, ()), home=folder, said=said, parent=0,
            settings=settings.model_dump(),
        )  # fmt: skip
        self.plain = dataloader._BaseDataLoaderIter.__next__
        self.training = ScriptTraining(spec)
        self.training.hooks.install()
        self.watched = dataloader._BaseDataLoaderIter.__next__
        self.tables: list[Any] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        self.hooks = [dict(table) for table in self.tables]

    def has_found(self, model: nn.Module) -> None:
        """Take the model's hook in, which comes with the first step."""
        self.tables += [model._forward_pre_hooks]
        self.hooks += [dict(model._forward_pre_hooks)]

    def put(self, *, on: bool) -> None:
        """Put all hooks on, or take them off."""
        dataloader._BaseDataLoaderIter.__next__ = self.watched if on else self.plain  # type: ignore[method-assign]
        for table, hooks in zip(self.tables, self.hooks, strict=True):
            table.clear()
            table.update(hooks if on else {})


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def step(batches: Iterator[Any], model: nn.Module, optimizer: Optimizer) -> float:
    """Seconds of a step of a plain loop."""
    started = time.perf_counter()
    inputs, targets = next(batches)
    optimizer.zero_grad()
    loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
    torch.autograd.backward(loss)
    optimizer.step()
    return time.perf_counter() - started


def compare(folder: Path, batch: int, pairs: int) -> dict[str, Any]:
    """Seconds of a step without, and quartiles of what it takes with, over that."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 3, EDGE, EDGE), torch.randint(CLASSES, (SAMPLES,)))
    model = compact_cnn(CLASSES, EDGE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    watch = Watch(folder, batch)
    batches = endless(DataLoader(data, batch, shuffle=True, drop_last=True))
    for _ in range(WARM_UP):
        step(batches, model, optimizer)
    watch.has_found(model)
    times = np.zeros((2, pairs))
    for pair in range(pairs):
        for on in (False, True) if pair % 2 else (True, False):
            watch.put(on=on)
            times[int(on), pair] = fmean(step(batches, model, optimizer) for _ in range(BLOCK))
    watch.put(on=False)
    # all of them were seen, and none of the others
    assert watch.training.steps == WARM_UP + BLOCK * pairs
    quartiles = np.quantile(times[1] / times[0], (0.25, 0.5, 0.75))
    return {
        "step_time_s": float(np.median(times[0])),
        "cost_s": float(np.median(times[1] - times[0])),
        "ratio": quartiles.round(4).tolist(),
        "within the limit": bool(quartiles[1] <= 1.0 + LIMIT),
    }


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {batch: compare(Path(folder), batch, pairs) for batch, pairs in CASES.items()}
    for batch, figures in found.items():
        print(f"batch {batch}: {figures}")
    results = {"cores": os.cpu_count(), "torch": torch.__version__, "limit": LIMIT, "batches": found}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
