"""CIFAR-10 and CIFAR-100 (A. Krizhevsky 2009) in their binary version.

The versions "for Python" are pickles, which run arbitrary code when they are read: they are
refused. Layout: https://www.cs.toronto.edu/~kriz/cifar.html
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
    """Classes, files and normalization of one of the two data sets."""

    classes: int
    # folder inside the binary archive
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    # bytes before each image; the last one is the class
    label_bytes: int
    # files of the pickled version for Python
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
    """Return the folder with the binary version, `data_dir` or its subfolder; None without one."""
    for folder in (data_dir, data_dir / facts.folder):
        if (folder / facts.test[0]).is_file():
            return folder
    return None


def refuse_pickled(facts: CifarFacts, data_dir: Path) -> None:
    """Refuse a folder with the pickled version alone, and name the version to get.

    Raises:
        InputError: `data_dir` holds the version for Python.
    """
    for name in facts.pickled:
        path = data_dir / name
        if path.exists() and not (path.is_dir() and name in ("train", "test")):
            raise data_error(
                data_dir,
                "holds the version for Python, which is pickled and could run any code; "
                f"expected the binary version, {facts.folder}/ "
                "(https://www.cs.toronto.edu/~kriz/cifar.html), or train/ and test/ folders "
                "of images",
            )


def read_binary(
    facts: CifarFacts, folder: Path, names: tuple[str, ...], *, image_size: int
) -> PixelDataset:
    """Read the training or the test set from its files.

    Raises:
        InputError: A file is missing or of the wrong size.
    """
    paths = tuple(folder / name for name in names)
    labels = [_read_labels(facts, path) for path in paths]
    if len(set(map(len, labels))) > 1:
        raise data_error(folder, f"expected {', '.join(names)} to have the same size")
    source = RecordFiles(paths, len(labels[0]), EDGE, label_bytes=facts.label_bytes)
    every = np.concatenate(labels)
    return PixelDataset(
        source, np.arange(len(every)), every, scaling=facts.scaling, image_size=image_size
    )


def _read_labels(facts: CifarFacts, path: Path) -> Indices:
    record = facts.label_bytes + _IMAGE_BYTES
    if not path.is_file():
        raise data_error(path.parent, f"expected a file {path.name} in it")
    content = np.fromfile(path, np.uint8)
    size = len(content)
    if size == 0 or size % record:
        message = f"expected a multiple of {record} bytes, found {size}: an incomplete download?"
        raise data_error(path, message)
    labels = content.reshape(-1, record)[:, facts.label_bytes - 1].astype(np.int64)
    if labels.max() >= facts.classes:
        expected = f"expected labels from 0 to {facts.classes - 1}"
        raise data_error(path, f"holds label {labels.max()}; {expected}")
    return labels
