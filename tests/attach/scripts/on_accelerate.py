"""accelerate in a plain loop; kept by three lines where tula_hpc is around it.

on_accelerate.py --batch-size 8 --epochs 2 [--samples 128] [--accumulate 2] [--seedable] [--stream] [--width 32]
                 [--log FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tula_hpc.attach as tula


class Noisy(TensorDataset):
    """A data set that draws from this process's random numbers, while its loader is a batch ahead."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, targets = (each[index] for each in self.tensors)
        return inputs + 0.1 * torch.randn(16), targets


class Stream(IterableDataset[Any]):
    """A data set without a length."""

    def __init__(self, items: Noisy) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.items.__getitem__, range(len(self.items)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seedable", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--log", type=Path, default=Path("log"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    loading = DataLoaderConfiguration(use_seedable_sampler=options.seedable)
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, dataloader_config=loading)
    set_seed(0)
    data = Noisy(torch.randn(options.samples, 16), torch.randint(0, 4, (options.samples,)))
    width = options.width
    model: nn.Module = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    loader = DataLoader(data, options.batch_size, shuffle=True)
    if options.stream:
        loader = DataLoader(Stream(data), options.batch_size)
    set_seed(accelerator.process_index)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    tula.keep(accelerator=accelerator)
    options.log.mkdir(exist_ok=True)
    with (options.log / f"losses-{accelerator.process_index}.txt").open("a") as log:
        for epoch in tula.epochs(options.epochs):
            for inputs, targets in tula.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                log.write(f"{float(loss).hex()} {float(inputs.sum()).hex()}\n")
                log.flush()
            tula.report(test_accuracy=0.25 + 0.1 * epoch)
    torch.save(model.state_dict(), options.log / f"weights-{accelerator.process_index}.pt")


if __name__ == "__main__":
    main()
