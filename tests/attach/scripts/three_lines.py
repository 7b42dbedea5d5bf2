"""A plain loop with the three lines: dropout, BatchNorm, random augmentation of three kinds, a schedule.

three_lines.py --batch-size 8 --epochs 2 --log FOLDER [--samples 128] [--loader-workers 2] [--generator]
               [--accumulate 2] [--width 32] [--pause 0.1] [--largest-batch 4]
               [--partner]: an optimizer of their own for vectors
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tula_hpc.attach as tula


class Noisy(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 16, generator=numbers)
        self.targets = torch.randint(0, 4, (samples,), generator=numbers)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = 0.1 * torch.randn(16) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return self.inputs[index] + noise, self.targets[index], index


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--generator", action="store_true")
    parser.add_argument("--partner", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--largest-batch", type=int, default=1000)
    return parser.parse_args()


def compute(options: argparse.Namespace, epoch: int, number: int) -> None:
    time.sleep(options.pause)
    if epoch == 1 and number == 3 and options.batch_size > options.largest_batch:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def main() -> None:
    options = options_given()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    rank = 0
    data = Noisy(options.samples)
    width = options.width
    model: nn.Module = nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, width), nn.Linear(width, 4)
    )
    sampler: DistributedSampler[Any] | None = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        sampler = DistributedSampler(data, shuffle=True)
        model = DistributedDataParallel(model)
    torch.manual_seed(rank)
    loader = DataLoader(
        data,
        batch_size=options.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=options.loader_workers,
        generator=torch.Generator().manual_seed(5) if options.generator else None,
    )
    own = [p for p in model.parameters() if p.dim() > 1 or not options.partner]
    optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": torch.optim.SGD(own, lr=0.1, momentum=0.9)}
    if options.partner:
        vectors = [p for p in model.parameters() if p.dim() == 1]
        optimizers["partner"] = torch.optim.AdamW(vectors, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers["optimizer"], 1, 0.5)
    tula.keep(model=model, **optimizers, scheduler=scheduler)
    options.log.mkdir(exist_ok=True)
    with (options.log / f"losses-{rank}.txt").open("a") as log:
        for epoch in tula.epochs(options.epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for number, (inputs, targets, indices) in enumerate(tula.batches(loader), start=1):
                compute(options, epoch, number)
                quiet: Any = nullcontext()
                if number % options.accumulate and isinstance(model, DistributedDataParallel):
                    quiet = model.no_sync()
                with quiet:
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    (loss / options.accumulate).backward()
                if number % options.accumulate == 0:
                    for optimizer in optimizers.values():
                        optimizer.step()
                        optimizer.zero_grad()
                log.write(f"{float(loss).hex()} {float(inputs.sum()).hex()} {indices.tolist()}\n")
                log.flush()
            scheduler.step()
            tula.report(test_accuracy=0.25 + 0.1 * epoch, test_loss=random.random())
    torch.save(model.state_dict(), options.log / f"weights-{rank}.pt")


if __name__ == "__main__":
    main()
    # a model that is freed after its process group may hang: see leave_group
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
