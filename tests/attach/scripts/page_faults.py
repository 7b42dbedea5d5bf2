"""A training of large activations that prints how many pages the median step faults in.

page_faults.py --batch-size 4 --epochs 1
"""

from __future__ import annotations

import argparse
import os
import resource
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 200_000), nn.ReLU(), nn.Linear(200_000, 1))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    faults = []
    for _ in range(STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(options.batch_size, 8)).mean())
        optimizer.step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print(f"faults {median(faults)}", flush=True)


if __name__ == "__main__":
    main()
