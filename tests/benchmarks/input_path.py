"""The cost, on a CPU, of loading images as bytes: the loader's images per second and step time, paired, as JSON.

    python -m tests.benchmarks.input_path [--rounds 10] [--out tests/benchmarks/results/input_path_cpu.json]

Three ways that give the same bits are timed one after another, in a random order in each round:

- `floats`: each image becomes floats when it is read, and batches are made of floats (up to version 7fd15a4),
- `loader`: batches are made of bytes and become floats in the process that loads (the way on a CPU),
- `trainer`: bytes reach the process that trains, where they become floats (the way on a GPU, which does it itself).

Small images are arrays of CIFAR's size, augmented; large ones are JPEG files of 320 × 256 pixels that are made for this
run and cropped to 224. Batches that a loader holds ready are taken first, untimed. `time_ratio` is the time of a way
over that of `floats` in the same round; `cpu_ratio` is the same for the processor time of this process and the
loader's, which a busy machine disturbs less. Given are the medians, and the middle half of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from tula_hpc.batches import Batch
from tula_hpc.data.cifar import CIFAR
from tula_hpc.data.image_folders import DecodedOnRead, folder_images
from tula_hpc.data.image_tree import read_tree
from tula_hpc.data.images import ArraySource, ImageDataset, Indices, Jitter, Keys, PixelDataset, prepared
from tula_hpc.data.loader import KeyedItems, make_train_loader
from tula_hpc.workloads.small_cnns import compact_cnn

WAYS = ("floats", "loader", "trainer")
# untimed batches, more than one loader process prepares ahead
READY = 3
TIMED = 8


class Keyed(Dataset[Any]):
    """Small images as a plain data set, not as an image data set; as bytes, or already as floats."""

    def __init__(self, images: PixelDataset, *, floats: bool) -> None:
        self.images, self.floats = images, floats

    def __len__(self) -> int:
        return len(self.images)

    def keyed_items(self, indices: Indices, keys: Keys) -> list[tuple[Tensor, int]]:
        """Return the items as `PixelDataset` does."""
        if not self.floats:
            return self.images.keyed_items(indices, keys)
        assert self.images.jitter is not None
        images = self.images.jitter.apply(self.images.source.read(self.images.positions[indices]), keys)
        scaling = self.images.preprocessing.scaling
        mean, deviation = (torch.tensor(part).view(3, 1, 1) for part in (scaling.mean, scaling.deviation))
        floats = torch.from_numpy(images).float().mul_(1 / (scaling.white * deviation)).sub_(mean / deviation)
        return list(zip(floats.unbind(0), self.images.labels[indices].tolist(), strict=True))


class Single(Dataset[Any]):
    """Large images as a plain data set, one by one; as bytes, or already as floats."""

    def __init__(self, images: DecodedOnRead, *, floats: bool) -> None:
        scaling = images.preprocessing.scaling
        scale = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(scaling.mean, scaling.deviation)]
        self.images, self.last = images, v2.Compose(scale if floats else [v2.Identity()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.last(image), label


def small_images() -> PixelDataset:
    """Return a tenth as many images as CIFAR-10 has."""
    images = np.random.default_rng(0).integers(0, 256, (5000, 3, 32, 32), np.uint8)
    positions = np.arange(len(images))
    scaling = CIFAR["cifar10"].scaling
    source = ArraySource(images)
    return PixelDataset(source, positions, positions % 10, scaling=scaling, image_size=32, jitter=Jitter(4, flip=True))


def large_images(folder: Path) -> DecodedOnRead:
    """Write JPEG files that take some work to decode."""
    random_numbers = np.random.default_rng(0)
    for place in range(200):
        target = folder / f"{place % 10}" / f"{place}.jpg"
        target.parent.mkdir(exist_ok=True)
        coarse = random_numbers.integers(0, 256, (32, 40, 3), np.uint8)
        Image.fromarray(coarse).resize((320, 256)).save(target, quality=90)
    found = folder_images(read_tree(folder), image_size=224, augment=True)
    assert isinstance(found, DecodedOnRead)
    return found


class Case:
    """One kind of images, loaded in each of the ways.

    Args:
        images: The data set.
        batch: Samples in a step.
        loader_workers: Processes that load.
        train: Whether to train a small network on the images, or only to load them.
    """

    def __init__(self, images: ImageDataset, batch: int, loader_workers: int, *, train: bool) -> None:
        self.images, self.batch = images, batch
        self.model = compact_cnn(10, 32) if train else None
        wrapper: Any = Keyed if isinstance(images, KeyedItems) else Single
        data = {"floats": wrapper(images, floats=True), "loader": images, "trainer": wrapper(images, floats=False)}
        self.streams = {way: self._stream(data[way], loader_workers) for way in WAYS}

    def _stream(self, data: Dataset[Any], loader_workers: int) -> Iterator[tuple[Batch, Batch]]:
        options: dict[str, Any] = {"rank": 0, "world_size": 1, "seed": 0, "pin_memory": False}
        return make_train_loader(data, local_batch=self.batch, loader_workers=loader_workers, **options).stream()

    def _step(self, way: str) -> Tensor:
        loaded, targets = next(self.streams[way])
        inputs: Tensor = prepared(self.images, loaded)
        if self.model is not None:
            self.model.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        return inputs

    def same_bits(self) -> bool:
        """Return whether all ways give the same batch."""
        expected, *others = (self._step(way) for way in WAYS)
        return all(torch.equal(expected, other) for other in others)

    def seconds(self, way: str) -> tuple[float, float]:
        """Return the elapsed seconds and the processor seconds of one batch."""
        for _ in range(READY):
            self._step(way)
        started, processors_s = time.perf_counter(), processor_seconds()
        for _ in range(TIMED):
            self._step(way)
        return (time.perf_counter() - started) / TIMED, (processor_seconds() - processors_s) / TIMED


def processor_seconds() -> float:
    """Return the processor seconds of this process and its loader processes, over all threads."""
    processes = ["self", *(str(process.pid) for process in multiprocessing.active_children())]
    tasks = [task for process in processes for task in Path(f"/proc/{process}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Time the ways in turn."""
    assert case.same_bits()
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in random.sample(WAYS, len(WAYS)):
            seconds[way].append(case.seconds(way))
    return {way: _summary(seconds[way], seconds["floats"], case.batch) for way in WAYS}


def _summary(mine: list[tuple[float, float]], base: list[tuple[float, float]], batch: int) -> dict[str, Any]:
    step_s, processors_s = (statistics.median(column) for column in zip(*mine, strict=True))
    pairs = list(zip(mine, base, strict=True))
    return {
        "batch_ms": round(1e3 * step_s, 3),
        "cpu_ms": round(1e3 * processors_s, 3),
        "images_per_s": round(batch / step_s, 1),
        "time_ratio": _spread([own[0] / other[0] for own, other in pairs]),
        "cpu_ratio": _spread([own[1] / other[1] for own, other in pairs]),
    }


def _spread(ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": round(middle, 3), "middle_half": [round(low, 3), round(high, 3)]}


def run(rounds: int) -> dict[str, Any]:
    """Measure every case."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        small, large = small_images(), large_images(Path(folder))
        cases: dict[str, tuple[ImageDataset, int, int, bool]] = {
            "small images, loaded in this process": (small, 128, 0, False),
            "small images, one loader process": (small, 128, 1, False),
            "small images, steps, loaded in this process": (small, 16, 0, True),
            "small images, steps, one loader process": (small, 16, 1, True),
            "JPEG files, loaded in this process": (large, 16, 0, False),
            "JPEG files, one loader process": (large, 16, 1, False),
        }
        results = {}
        for name, (images, batch, loader_workers, train) in cases.items():
            results[name] = measure(Case(images, batch, loader_workers, train=train), rounds)
            gc.collect()
            print(name, json.dumps(results[name]), file=sys.stderr)
    return {"torch": torch.__version__, "cpus": os.cpu_count(), "rounds": rounds, "cases": results}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.input_path")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    text = json.dumps(run(options.rounds), indent=1) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
