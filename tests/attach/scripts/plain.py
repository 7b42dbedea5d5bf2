"""A plain training: its own loop, DistributedDataParallel for several workers, an evaluation an epoch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset


class Streamed(IterableDataset[tuple[Tensor, ...]]):
    """Samples without a known number, as from archives."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(self.samples.__getitem__, range(len(self.samples)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--streamed", action="store_true")
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = torch.randn(options.samples, 64), torch.randint(10, (options.samples,))
    train, test = TensorDataset(images, labels), TensorDataset(images[:256], labels[:256])
    sampler: DistributedSampler[object] | None = None
    if world > 1:
        sampler = DistributedSampler(train, world, dist.get_rank())
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        train, options.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=options.loaders, drop_last=True
    )
    if options.streamed:
        loader = DataLoader(Streamed(train), options.batch_size)
    model: nn.Module = nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 10))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            torch.autograd.backward(loss)
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, 64))
        print(f"epoch {epoch}: loss {loss.item():.4f}, Acc@1 {100 * right / len(test):.2f}", flush=True)


if __name__ == "__main__":
    main()
