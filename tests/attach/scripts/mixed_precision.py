"""Mixed precision in a plain loop: GradScaler, clipping, pinned batches, channels last; kept by three lines.

mixed_precision.py --batch-size 64 --epochs 2 [--samples 1024] [--repeatable]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import tula_hpc.attach as tula


class Images(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.pixels = torch.randint(0, 256, (samples, 3, 32, 32), generator=numbers, dtype=torch.uint8)
        self.targets = torch.randint(0, 10, (samples,), generator=numbers)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # the targets cannot be predicted, so only a model that has seen them can learn them
        image = self.pixels[index].float() / 255
        return image + 0.1 * self.targets[index], self.targets[index]


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(256 * 16, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--repeatable", action="store_true")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(options.repeatable)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model: nn.Module = network().to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's types lack it
    data = Images(options.samples)
    sampler: DistributedSampler[Any] | None = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if is_gpu else "gloo")
        sampler = DistributedSampler(data)
        model = DistributedDataParallel(model)
    loader = DataLoader(
        data,
        options.batch_size,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=2,
        pin_memory=is_gpu,
        drop_last=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    scaler = GradScaler(device.type, enabled=is_gpu)
    tula.keep(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    for epoch in tula.epochs(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for pixels, labels in tula.batches(loader):
            images = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
            targets = labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.float16 if is_gpu else torch.bfloat16):
                outputs = model(images)
                loss = nn.functional.cross_entropy(outputs, targets)
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        right = outputs.argmax(1) == targets
        tula.report(test_accuracy=float(right.float().mean()), test_loss=float(loss))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
