"""The plain training with bf16, gradient accumulation, clipping and an average of the weights.

It writes a line for each step: the learning rate and the sum of its weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--largest-batch", type=int, default=10**6)
    options = parser.parse_args()
    if options.batch_size > options.largest_batch:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    data = TensorDataset(torch.randn(4096, 32), torch.randint(4, (4096,)))
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model: nn.Module = DistributedDataParallel(inner) if world > 1 else inner
    average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.99))  # type: ignore[no-untyped-call] # torch's
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    lines = Path(f"steps-{rank}.txt")
    for parts in groups(DataLoader(data, options.batch_size, shuffle=True), options.accumulate):
        for index, (inputs, targets) in enumerate(parts):
            last = index == options.accumulate - 1
            quiet = contextlib.nullcontext() if last or world == 1 else model.no_sync()  # type: ignore[operator]
            with quiet, torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs), targets) / options.accumulate
                torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        rate, weights = optimizer.param_groups[0]["lr"], sum(p.double().sum().item() for p in inner.parameters())
        with lines.open("a") as file:
            file.write(f"{rate!r} {weights!r}\n")
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(inner)


def groups(loader: DataLoader[tuple[Tensor, ...]], size: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield groups of batches without end."""
    group: list[tuple[Tensor, ...]] = []
    while True:
        for batch in loader:
            group.append(batch)
            if len(group) == size:
                yield group
                group = []


if __name__ == "__main__":
    main()
