"""A built-in workload in a plain loop: the same model, data and optimizer, by torch's own loader."""

from __future__ import annotations

import argparse
import importlib

import torch
from torch.utils.data import DataLoader

from tula_hpc.config import WorkloadSpec
from tula_hpc.data.datasets import build_data
from tula_hpc.data.images import prepared


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tula_hpc.workloads.small_cnns:compact_cnn")
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    spec = WorkloadSpec(dataset=options.dataset, samples=options.samples)
    data = build_data(spec)
    torch.manual_seed(0)
    module, _, name = options.model.partition(":")
    model = getattr(importlib.import_module(module), name)(data.classes, data.image_size)
    loader = DataLoader(data.train, options.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), spec.lr, spec.momentum, weight_decay=spec.weight_decay)
    for _ in range(options.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(prepared(data.train, inputs)), targets)
            torch.autograd.backward(loss)
            optimizer.step()


if __name__ == "__main__":
    main()
