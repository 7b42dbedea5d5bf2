"""An ordinary training script: handwritten digits, its own loop, DistributedDataParallel (torchrun).

python sweeps/own_script.py --batch-size 64
torchrun --nproc-per-node 2 sweeps/own_script.py --batch-size 32
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--batch-size", type=int, default=64, help="samples in a step of one process"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from, if it exists")
    options = parser.parse_args()

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = images.float().reshape(-1, 1, 8, 8) / 16
    train = TensorDataset(images[:1438], labels[:1438])
    test_images, test_labels = images[1438:].to(device), labels[1438:].to(device)
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(
        train, options.batch_size, sampler=sampler, num_workers=2, persistent_workers=True
    )

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, 10),
    ).to(device)  # fmt: skip
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    first = 0
    if options.resume is not None and options.resume.exists():
        saved = torch.load(options.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["epoch"] + 1
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch}: Acc@1 {100 * right:.2f}", flush=True)
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            torch.save(
                {"epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}},
                "last.pt",
            )
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
