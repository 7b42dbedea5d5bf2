"""The time that watching a script's training costs: steps with the hooks and without, in turn, as JSON.

    python -m tests.benchmarks.hooks_cost [--out tests/benchmarks/results/hooks_cost.json]

A process with one thread trains a compact network by a plain loop over torch's DataLoader. Blocks of ten steps come
in pairs, in changing order: one with all hooks of `attach`, reporting to a `ScriptTraining` that writes its usual
lines, and one with unchanged torch. Single steps do not take turns, because the hooks' code would leave the processor's
caches in between, unlike in any training. Neighbours on the host and the place of code in memory change the ratio of a
single process by half a percent, so several processes measure one after another on each of the two cores.

- ratio: quartiles of the ratios of a pair's blocks, over all processes; the limit of 1 % is on their median.
- error: standard error of that median, by the medians of the processes.
- cost_s: median of the additional time of a watched step.
- batches: the smaller the batch, the larger the hooks' share of a step.
- ags: two workers with one thread each scale gradients by AGS. The ratio is that of a plain loop with the hooks over a
  loop that does what the built-in one does: `TulaOptimizer` with its communication hook, a line of metrics.jsonl every
  ten steps, and an agreement of the workers on stops.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

from tests.forked import start_workers
from tula_hpc.attach.reporting import ChildSpec
from tula_hpc.attach.script import Script
from tula_hpc.attach.train.peers import ScriptPeers
from tula_hpc.attach.train.resume_point import TrainSettings
from tula_hpc.attach.train.script_training import ScriptTraining
from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.config import SweepSpec
from tula_hpc.ddp.agreement import Agreement
from tula_hpc.ddp.methods import ReferenceBatch, scaling_options
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.training.metrics_writer import MetricsWriter, StepWindow
from tula_hpc.workloads.small_cnns import compact_cnn

RESULT = Path(__file__).parent / "results" / "hooks_cost.json"
# by local batch: processes on each core, and their pairs of blocks
CASES = {8: (8, 100), 16: (6, 60)}
CORES = 2
BLOCK = LOG_STEPS = 10
WARM_UP = 5
SAMPLES, EDGE, CLASSES = 4096, 32, 10
LIMIT = 0.01
# the case with AGS
WORKERS, AGS_BATCH, AGS_PAIRS, AGS_PARTS = 2, 16, 200, 10
AGS: dict[str, Any] = {
    "name": "hooks",
    "workload": {"module": "no.such", "arguments": ["{local_batch}"], "samples": 10**9, "epochs": 1},
    "training": {"method": "ags", "base_batch": 16},
}


class Watch:
    """A script's training whose hooks can be removed and installed again."""

    def __init__(self, folder: Path, batch: int, rank: int = 0, workers: int = 1, **settings: Any) -> None:
        run = RunDirectory(folder / f"run-{batch}-{rank}").create()
        run.make_train()
        own_settings = TrainSettings(
            root=run.root, label="main", job_id="1", samples=10**9, global_batch=batch * workers,
            log_interval_steps=LOG_STEPS, between_s=3600.0, configuration=(1, workers, batch), **settings,
        )  # fmt: skip
        report = run.root / "message.json"
        spec = ChildSpec(
            mode="train", program=Script(Path("x.py"), None, ()), home=folder, message_file=report, parent=0, rank=rank,
            world_size=workers, settings=own_settings.model_dump(),
        )  # fmt: skip
        self.plain = dataloader._BaseDataLoaderIter.__next__
        self.plain_backward = torch.autograd.backward
        self.training = ScriptTraining(spec)
        self.training.hooks.install()
        self.watched = dataloader._BaseDataLoaderIter.__next__
        self.backward = torch.autograd.backward
        self.tables: list[Any] = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
        self.hooks = [dict(table) for table in self.tables]

    def has_found(self, model: nn.Module) -> None:
        """Include the model's hook, which is installed by the first step."""
        self.tables += [model._forward_pre_hooks]
        self.hooks += [dict(model._forward_pre_hooks)]

    def put(self, *, on: bool) -> None:
        """Install all hooks, or remove them."""
        dataloader._BaseDataLoaderIter.__next__ = self.watched if on else self.plain  # type: ignore[method-assign]
        vars(torch.autograd)["backward"] = self.backward if on else self.plain_backward
        for table, hooks in zip(self.tables, self.hooks, strict=True):
            table.clear()
            table.update(hooks if on else {})


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def step(
    batches: Iterator[Any],
    model: nn.Module,
    optimizer: Optimizer,
    before: Callable[[], None] | None = None,
    after: Callable[[Tensor], None] | None = None,
) -> float:
    """Take one step of a plain loop and return its seconds; `before` and `after` run around the optimizer's step."""
    started = time.perf_counter()
    inputs, targets = next(batches)
    optimizer.zero_grad()
    loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
    torch.autograd.backward(loss)
    if before is not None:
        before()
    optimizer.step()
    if after is not None:
        after(loss.detach())
    return time.perf_counter() - started


def watch_some(core: int, folder: Path, batch: int, pairs: int) -> None:
    """Write seconds per step of blocks in turn, (2, pairs): without hooks and with them."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 3, EDGE, EDGE), torch.randint(CLASSES, (SAMPLES,)))
    model = compact_cnn(CLASSES, EDGE)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    watch = Watch(folder, batch, core)
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
    # the hooks saw all watched steps, and none of the others
    assert watch.training.steps == WARM_UP + BLOCK * pairs
    np.save(folder / f"{core}.npy", times)


def compare(batch: int, processes: int, pairs: int) -> dict[str, Any]:
    """Compare steps without hooks and with them, in several processes one after another on each core."""
    times = []
    for _ in range(processes):
        with tempfile.TemporaryDirectory() as folder:
            work = partial(watch_some, batch=batch, pairs=pairs)
            start_workers(CORES, work, Path(folder))
            times += [np.load(Path(folder) / f"{core}.npy") for core in range(CORES)]
    return compared(times)


def compared(times: list[np.ndarray]) -> dict[str, Any]:
    """Summarize seconds per step of blocks, (2, pairs) of each process: the baseline, then the way with a cost."""
    ratios = [each[1] / each[0] for each in times]
    quartiles = np.quantile(np.concatenate(ratios), (0.25, 0.5, 0.75))
    medians = [np.median(each) for each in ratios]
    baseline, costly = np.concatenate(times, axis=1)
    return {
        "step_time_s": float(np.median(baseline)),
        "cost_s": float(np.median(costly - baseline)),
        "ratio": quartiles.round(4).tolist(),
        "error": round(float(np.std(medians, ddof=1)) / len(medians) ** 0.5, 4),
    }


class Scaled:
    """A model that two workers train by AGS in a loop like that of `ddp.worker.Worker` and `training.loop`."""

    def __init__(self, sweep: SweepSpec, model: nn.Module, metrics: Path | None) -> None:
        configuration = Configuration(1, WORKERS, AGS_BATCH)
        self.model = DistributedDataParallel(model)
        owned = list(model.parameters())
        self.optimizer = TulaOptimizer(SGD(owned, 0.01), **scaling_options(sweep, configuration, SAMPLES))
        self.optimizer.expect_small_norms()
        self.reference = ReferenceBatch(sweep, configuration, SAMPLES)
        self.norms = LocalNorms(owned, AGS_BATCH).attach(self.model)
        self.metrics = MetricsWriter(metrics, SAMPLES, AGS_BATCH * WORKERS, WORKERS)
        self.progress = Progress()
        self.window = StepWindow()
        self.agreement = Agreement(ScriptPeers(WORKERS), StopRequest())

    def observe(self) -> None:
        self.optimizer.set_reference(self.reference.after(0.0))
        self.optimizer.observe_small(*self.norms.squares())
        self.optimizer.observe_norms(self.norms.averaged())

    def end_step(self, loss: Tensor) -> None:
        self.window.add(loss=loss)
        self.progress.step += 1
        if self.progress.step % LOG_STEPS == 0:
            mean_loss = self.window.mean_loss()
            self.metrics.write_steps(self.progress, self.window, self.optimizer, lr=0.01, loss=mean_loss)
            self.window = StepWindow()
        self.agreement.decide()


def scale(rank: int, folder: Path) -> None:
    """Write seconds per step of blocks in turn, (2, pairs): AGS in the loop, and by the hooks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    torch.manual_seed(rank)
    sweep = SweepSpec.model_validate(AGS, context={"check_paths": False})
    data = TensorDataset(torch.randn(SAMPLES, 3, EDGE, EDGE), torch.randint(CLASSES, (SAMPLES,)))
    batches = endless(DataLoader(data, AGS_BATCH, shuffle=True, drop_last=True))
    scaled = Scaled(sweep, compact_cnn(CLASSES, EDGE), None if rank else folder / "metrics.jsonl")
    watch = Watch(folder, AGS_BATCH, rank, WORKERS, sweep=AGS)
    model = DistributedDataParallel(compact_cnn(CLASSES, EDGE))
    optimizer = SGD(model.parameters(), 0.01)

    def block(*, hooked: bool) -> float:
        watch.put(on=hooked)
        if hooked:
            return fmean(step(batches, model, optimizer) for _ in range(BLOCK))
        loop = batches, scaled.model, scaled.optimizer, scaled.observe, scaled.end_step
        return fmean(step(*loop) for _ in range(BLOCK))

    watch.has_found(model)
    # the first pair warms up
    times = np.zeros((2, AGS_PAIRS + 1))
    for pair in range(AGS_PAIRS + 1):
        for hooked in (False, True) if pair % 2 else (True, False):
            times[int(hooked), pair] = block(hooked=hooked)
    assert watch.training.scaling is not None
    for scaling in (scaled.optimizer, watch.training.scaling.scaling):
        assert scaling is not None
        assert any(float(factor.max()) > 1.0 for factor in scaling.gradscale if factor is not None)
    np.save(folder / f"{rank}.npy", times[:, 1:])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the figures and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start_workers(WORKERS, scale, Path(folder))
        times = np.mean([np.load(Path(folder) / f"{rank}.npy") for rank in range(WORKERS)], axis=0)
    # parts of the pairs take the place of processes
    scaled = compared(np.split(times, AGS_PARTS, axis=1))
    found = {batch: compare(batch, *counts) for batch, counts in CASES.items()}
    print(f"AGS by hooks over AGS in the loop: {scaled}")
    for batch, figures in found.items():
        print(f"batch {batch}: {figures}")
    results = {"cores": os.cpu_count(), "torch": torch.__version__, "limit": LIMIT, "batches": found, "ags": scaled}
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
