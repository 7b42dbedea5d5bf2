"""Folder trees of images: one folder a class, images anywhere below it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets.folder import IMG_EXTENSIONS

from tula_hpc.errors import InputError
from tula_hpc.workloads.pixels import Indices
from tula_hpc.workloads.tree_listings import Listing, listed_once

DATA_DIR_KEY = "workload.data_dir"


@dataclass(frozen=True)
class ImageTree:
    """What a tree holds, in order of class and path.

    Attributes:
        root: The folder of class folders.
        names: Paths below the root as bytes, (n,). A million strings would cost ten times the memory, in each process.
        labels: Class of each image, (n,).
        classes: Names of the class folders, sorted.
    """

    root: Path
    names: NDArray[np.bytes_]
    labels: Indices
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return self.root / os.fsdecode(bytes(self.names[index]))

    def take(self, indices: Indices) -> ImageTree:
        """These images only, of the same classes."""
        return replace(self, names=self.names[indices], labels=self.labels[indices])


def data_error(folder: Path, message: str) -> InputError:
    """The error for a data folder that is not as expected."""
    return InputError(f"{folder}: {message}", key=DATA_DIR_KEY)


def read_tree(root: Path, leave_out: Iterable[str] = ()) -> ImageTree:
    """List a folder of class folders; folders whose names begin with a dot or are left out do not count.

    Raises:
        InputError: No class folders, or one without images.
    """
    leave_out = list(leave_out)
    listing = listed_once(root, leave_out, lambda: _list(root, leave_out))
    classes = tuple(os.fsdecode(name) for name in listing.classes.tolist())
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), listing.counts)
    return ImageTree(root, listing.names, labels, classes)


def _list(root: Path, leave_out: Iterable[str]) -> tuple[Listing, bool]:
    """The listing, and whether every folder could be read."""
    entries = _entries(root)
    folders = [(b".", root.stat().st_mtime_ns)]
    classes = sorted(entry.name for entry in entries if _is_class(entry, leave_out))
    if not classes:
        raise data_error(root, "expected one folder for each class, with images in it")
    names: list[bytes] = []
    counts: list[int] = []
    unread: list[OSError] = []
    for name in classes:
        found = sorted(_images(root, name, folders, unread))
        if not found:
            kinds = ", ".join(IMG_EXTENSIONS)
            raise data_error(root / name, f"expected images of this class ({kinds}), found none")
        names += found
        counts.append(len(found))
    encoded = np.array([os.fsencode(name) for name in classes])
    paths, modified_ns = zip(*folders, strict=True)
    listing = Listing(encoded, np.array(counts), np.array(names), np.array(paths), np.array(modified_ns, np.int64))
    return listing, not unread


def find_part(data_dir: Path, *names: str) -> Path:
    """The first of these folders that is there.

    Raises:
        InputError: None is.
    """
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    found = ", ".join(sorted(entry.name for entry in _entries(data_dir))[:8]) or "nothing"
    raise data_error(data_dir, f"expected a folder {' or '.join(f'{name}/' for name in names)} in it, found: {found}")


def check_same_classes(train: ImageTree, test: ImageTree) -> None:
    """Refuse a test set of other classes: its labels would mean something else.

    Raises:
        InputError: The class folders differ.
    """
    if train.classes == test.classes:
        return
    missing, surplus = _some(train.classes, test.classes), _some(test.classes, train.classes)
    differences = [f"missing: {missing}"] * bool(missing) + [f"not in training: {surplus}"] * bool(surplus)
    raise data_error(
        test.root, f"expected the {len(train.classes)} class folders of {train.root.name}/; {'; '.join(differences)}"
    )


def _some(classes: tuple[str, ...], others: tuple[str, ...]) -> str:
    """Names of the first three classes that the others lack."""
    lacking = sorted(set(classes) - set(others))
    return ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise data_error(folder, f"cannot be read: {error.strerror}") from None


def _is_class(entry: os.DirEntry[str], leave_out: Iterable[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".") and entry.name not in leave_out


def _images(root: Path, class_name: str, folders: list[tuple[bytes, int]], unread: list[OSError]) -> Iterator[bytes]:
    """Paths below the root; notes each folder with its modification time, and errors."""
    for folder, _, files in os.walk(root / class_name, onerror=unread.append, followlinks=True):
        below = os.path.relpath(folder, root)
        try:
            folders.append((os.fsencode(below), Path(folder).stat().st_mtime_ns))
        except OSError as error:
            unread.append(error)
        for file in files:
            if file.lower().endswith(IMG_EXTENSIONS) and not file.startswith("."):  # ._x.jpg: macOS's shadow files
                yield os.fsencode(f"{below}/{file}")
