"""Three lines in loops that do not simply follow one another over one loader, by case.

odd_loops.py --batch-size 8 --epochs 2 --log FOLDER CASE
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tula_hpc.attach as tula

SAMPLES = 128
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, required=True)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("case")
options = parser.parse_args()
options.log.mkdir(exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
generator = torch.Generator().manual_seed(5)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if options.case == "rate":
    # a search for a learning rate, longer than an epoch and with an optimizer of its own
    before = copy.deepcopy(model.state_dict())
    searching = torch.optim.SGD(model.parameters(), lr=1e-4)
    for number in range(2 * SAMPLES // options.batch_size + 3):
        searching.param_groups[0]["lr"] *= 1.1
        inputs, numbers = data[number * options.batch_size % SAMPLES :][: options.batch_size]
        torch.autograd.backward(nn.functional.mse_loss(model(inputs).squeeze(1), numbers / SAMPLES))
        searching.step()
        searching.zero_grad()
    model.load_state_dict(before)
if options.case != "not kept":
    tula.keep(model=model, optimizer=optimizer)


def loader(numbers: torch.Generator = generator) -> DataLoader[Any]:
    return DataLoader(data, options.batch_size, shuffle=True, generator=numbers)


def train(inputs: Tensor, numbers: Tensor, *, steps: bool = True) -> None:
    loss = (model(inputs).squeeze(1) - numbers / SAMPLES).square().mean()
    loss.backward()
    if steps:
        optimizer.step()
        optimizer.zero_grad()
    with (options.log / "losses-0.txt").open("a") as log:
        log.write(f"{float(loss.detach()).hex()} {numbers.tolist()}\n")


class Repeated:
    """A sampler of batches without an end, as YOLO and timm have."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Infinite(DataLoader[Any]):
    """A loader that keeps one iterator, with its processes, for all epochs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr] # it is a `Repeated`

    def __iter__(self) -> Any:
        return (next(self.iterator) for _ in range(len(self)))


def is_first_time() -> bool:
    """Return whether this is the training's first start; always false without tula_hpc."""
    flag: Path = options.log / "once"
    if tula._around is None or flag.exists():
        return False
    flag.touch()
    return True


first, second = loader(), loader()
third = loader(torch.Generator().manual_seed(7))
if options.case == "persistent":
    first = DataLoader(data, options.batch_size, shuffle=True, num_workers=1, persistent_workers=True)
    second = DataLoader(TensorDataset(data.tensors[0][:8]), 8, num_workers=1, persistent_workers=True)
if options.case == "final":
    # the order depends on the script's own random numbers
    first = DataLoader(data, options.batch_size, shuffle=True)
if options.case == "infinite":
    first = Infinite(data, options.batch_size, shuffle=True, num_workers=1)
if options.case == "apart":
    second = loader(torch.Generator().manual_seed(6))
if options.case == "phases":
    for count in (0, 1, 2):
        for _ in tula.epochs(count):
            for batch in tula.batches(first):
                train(*batch)
elif options.case in ("shared", "apart", "twice"):
    for _ in tula.epochs(options.epochs):
        for each in (first, first if options.case == "twice" else second):
            for batch in tula.batches(each):
                train(*batch)
elif options.case == "peek":
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
            # a second iteration over the same loader, as for a picture of some samples
            next(iter(first))
elif options.case == "look":
    # a look at some samples before the training
    next(iter(first))
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
elif options.case == "zipped":
    second = loader(torch.Generator().manual_seed(6))
    for _ in tula.epochs(options.epochs):
        for count in (1, 2):
            pairs = zip(first, itertools.islice(second, len(second) // count), strict=False)
            for one, other in tula.batches(pairs):
                train(torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]]))
        # another loader, as for an evaluation
        train(*next(iter(third)))
elif options.case == "carry":
    number = 0
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            number += 1
            train(*batch, steps=number % 3 == 0)
        if number == len(first) and is_first_time():
            os.kill(os.getpid(), signal.SIGTERM)
elif options.case == "persistent":
    for _ in tula.epochs(options.epochs):
        for inputs, numbers in tula.batches(first):
            train(inputs + torch.randn(4), numbers)
            if int(numbers.sum()) % 3 == 0:
                list(second)
elif options.case == "half":
    for _ in tula.epochs(1):
        for number, batch in enumerate(tula.batches(first)):
            train(*batch)
            if number == 2:
                break
        break
    for _ in tula.epochs(2):
        for batch in tula.batches(first):
            train(*batch)
elif options.case == "numbered":
    for _ in tula.epochs(options.epochs):
        for number, batch in tula.numbered(first):
            train(*batch, steps=number % 3 == 2 or number + 1 == len(first))
            # some scripts set the rate by the fraction of the epoch that is over
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
elif options.case == "before":
    if options.log.joinpath("losses-0.txt").exists():
        tula.report(test_accuracy=0.99)
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
        tula.report(test_accuracy=0.1)
elif options.case == "early":
    for epoch in tula.epochs(10):
        for batch in tula.batches(first):
            train(*batch)
        tula.report(test_accuracy=0.1 * (epoch + 1))
        if epoch == 2:
            break
    tula.report(test_loss=0.5)
elif options.case == "one iterator":
    going = iter(loader())
    for _ in tula.epochs(options.epochs):
        for _ in range(len(first) // 2 + 1):
            batch = next(going, None)
            if batch is None:
                going = iter(loader())
                batch = next(going)
            train(*batch)
elif options.case in ("persistent", "rate", "infinite"):
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
elif options.case == "late":
    for epoch in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
        if epoch + 1 == options.epochs:
            os.kill(os.getpid(), signal.SIGTERM)
        tula.report(test_accuracy=0.5)
elif options.case == "not kept":
    for epoch in range(options.epochs):
        for batch in first:
            train(*batch)
        tula.report(test_accuracy=0.1 * (epoch + 1))
elif options.case == "final":
    for _ in tula.epochs(options.epochs):
        for batch in tula.batches(first):
            train(*batch)
    if is_first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    tula.report(test_accuracy=0.5)
    with (options.log / "losses-0.txt").open("a") as behind:
        behind.write(f"{torch.rand(1).item()}\n")
torch.save(model.state_dict(), options.log / "weights-0.pt")
