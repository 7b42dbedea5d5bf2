"""CIFAR-10 and CIFAR-100 (A. Krizhevsky 2009) in their binary version, read where it lies.

The versions "for Python" are pickles; a pickle runs whatever it says when it is read, so they are
refused.
Layout: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tula_hpc.data.image_cache import RecordFiles
from tula_hpc.data.image_tree import data_error
from tula_hpc.data.images import Indices, PixelDataset, Scaling

EDGE = 32
_IMAGE_BYTES = 3 * EDGE * EDGE


class CifarFacts(NamedTuple):
    """One of the two data sets."""

    classes: int
    # what the binary archive unpacks to
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    # the class is the last of them
    label_bytes: int
    # files of the version for Python
    pickled: tuple[str, ...]
    # mean and deviation of the training images by channel
    scaling: Scaling


CIFAR = {
    "cifar10": CifarFacts(
        10,
        "cifar-10-batches-bin",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        ("test_batch.bin",),
        1,
        ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1", "test_batch"),
        Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ),
    "cifar100": CifarFacts(
        100,
        "cifar-100-binary",
        ("train.bin",),
        ("test.bin",),
        2,
        ("cifar-100-python", "cifar-100-python.tar.gz", "train", "test", "meta"),
        Scaling((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
}


def find_binary(facts: CifarFacts, data_dir: Path) -> Path | None:
    """The folder with the binary version: `data_dir` itself or what the archive unpacked into it; None without."""
    for folder in (data_dir, data_dir / facts.folder):
        if (folder / facts.test[0]).is_file():
            return folder
    return None


def refuse_pickled(facts: CifarFacts, data_dir: Path) -> None:
    """Say which version to get where only the pickled one is there.

    Raises:
        InputError: `data_dir` holds the version for Python.
    """
    for name in facts.pickled:
        path = data_dir / name
        if path.exists() and not (path.is_dir() and name in ("train", "test")):
            raise data_error(
                data_dir,
                "holds the version for Python, which is pickled and could run anything; expected the binary version, "
                f"{facts.folder}/ (https://www.cs.toronto.edu/~kriz/cifar.html), or train/ and test/ folders of images",
            )


def read_binary(
    facts: CifarFacts, folder: Path, names: tuple[str, ...], *, image_size: int
) -> PixelDataset:
    """One part of the binary version.

    Raises:
        InputError: A file is missing or of the wrong size.
    """
    paths = tuple(folder / name for name in names)
    labels = [_labels(facts, path) for path in paths]
    if len({len(part) for part in labels}) > 1:
        raise data_error(folder, f"expected {', '.join(names)} to be of one size")
    source = RecordFiles(paths, len(labels[0]), EDGE, label_bytes=facts.label_bytes)
    every = np.concatenate(labels)
    return PixelDataset(
        source, np.arange(len(every)), every, scaling=facts.scaling, image_size=image_size
    )


def _labels(facts: CifarFacts, path: Path) -> Indices:
    record = facts.label_bytes + _IMAGE_BYTES
    if not path.is_file():
        raise data_error(path.parent, f"expected a file {path.name} in it")
    size = path.stat().st_size
    if size == 0 or size % record:
        raise data_error(
            path, f"expected a multiple of {record} bytes, found {size}: an incomplete download?"
        )
    with path.open("rb") as file:
        records = np.fromfile(file, np.uint8).reshape(-1, record)
    labels = records[:, facts.label_bytes - 1].astype(np.int64)
    if labels.max() >= facts.classes:
        raise data_error(
            path, f"holds label {labels.max()}; expected labels from 0 to {facts.classes - 1}"
        )
    return labels
