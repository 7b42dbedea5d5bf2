"""timm's model, optimizer, schedule and loader in a script without any reference to tula_hpc.

on_timm.py --batch-size 8 --epochs 2 [--samples 128]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import timm
import torch
import torch.distributed as dist
from PIL import Image
from timm.data import create_loader  # type: ignore[attr-defined] # timm's own way to export
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined] # timm's own way to export
from timm.scheduler import create_scheduler_v2  # type: ignore[attr-defined] # timm's own way to export
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

SIZE = (3, 32, 32)


class Images(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        numbers = np.random.default_rng(1)
        self.pixels = numbers.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)
        self.targets = numbers.integers(0, 4, samples)
        # timm's loader sets it
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.targets[index])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--samples", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("test_resnet", num_classes=4)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=1e-4)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=options.epochs)
    loader = create_loader(
        Images(options.samples),  # type: ignore[arg-type] # it needs no more
        SIZE,
        options.batch_size,
        is_training=True,
        use_prefetcher=False,
        num_workers=0,
        persistent_workers=False,
        distributed=distributed,
    )
    for epoch in range(options.epochs):
        if distributed:
            loader.sampler.set_epoch(epoch)
        right = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            torch.autograd.backward(nn.functional.cross_entropy(outputs, targets))
            optimizer.step()
            right += int((outputs.argmax(1) == targets).sum())
        schedule.step(epoch + 1)
        print(f"epoch {epoch}: Acc@1 {100 * right / len(loader.dataset):.2f}", flush=True)


if __name__ == "__main__":
    main()
