"""Folder trees of images, with one folder per class and images anywhere below, and their listings.

A million names take a busy file system minutes to list, and every worker would list them for each
configuration. So a listing is kept in one of `cache_folders`, which workers and later jobs share.
It is valid while every folder that it names keeps its modification time, which changes when a file
or folder in it is made, renamed or deleted. Its file name is a hash of the tree's path, of the
classes left out and of the root's modification time: nodes with copies of their own keep listings
of their own. The file holds a SHA-256 and plain arrays. Nothing is ever unpickled. Old files may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.data.images import Indices
from tula_hpc.errors import InputError
from tula_hpc.files import in_words, make_private, mistrust, read_bounded, whole_file
from tula_hpc.formatting import in_short

# A listing is kept if all folders have been unchanged for this long. One that changed since may
# change again with the same modification time: clocks of file servers are coarse and differ from
# ours, and nodes see times up to a minute late.
SETTLED_S = 60.0
# largest listing that is read
MOST_BYTES = 2**32
# prefix of the names of files that are not complete yet
WRITING = ".writing-"
# age at which such a file counts as left behind
LEFT_S = 24 * 3600.0
DATA_DIR_KEY = "workload.data_dir"
# copied from torchvision's `ImageFolder`: torchvision takes a while to import
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_VERSION = 1
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def cache_folders() -> Iterator[Path]:
    """Yield the user's cache, which nodes mostly share, then the node's own temporary folder."""
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tula_hpc"
    yield Path(tempfile.gettempdir()) / f"tula_hpc-{os.geteuid()}"


def make_own(folder: Path) -> None:
    """Make a private folder: others must not be able to replace its files.

    Raises:
        OSError: The folder cannot be made, is somebody else's, or others may write to it.
    """
    make_private(folder)
    if reason := mistrust(folder):
        raise PermissionError(0, reason)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time into the block, or all of them if the file system cannot lock."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_left(folder: Path) -> None:
    """Remove the temporary files of writers that were killed, after a day."""
    for left in folder.glob(f"{WRITING}*"):
        # another process may be removing it
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()


class Listing(NamedTuple):
    """Files and folders of a tree.

    Attributes:
        classes: Names of the class folders, sorted, (c,).
        counts: Images of each class, (c,).
        names: Paths of the images below the root, by class and sorted, (n,).
        folders: Paths of all folders that were listed, the root first, (f,).
        modified_ns: Their modification times, Unix time, (f,).
    """

    classes: NDArray[np.bytes_]
    counts: NDArray[np.int64]
    names: NDArray[np.bytes_]
    folders: NDArray[np.bytes_]
    modified_ns: NDArray[np.int64]


def _listed_once(root: Path, leave_out: Sequence[str]) -> Listing:
    """Return the kept listing of a tree if it is still valid, else a new one."""
    try:
        facts = [str(_VERSION), str(root.resolve()), *sorted(leave_out)]
        facts.append(str(root.stat().st_mtime_ns))
    except OSError:
        return _list(root, leave_out)[0]
    digest = hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()
    for folder in cache_folders():
        try:
            make_own(folder)
            return _listed_in(folder / f"{digest[:32]}.listing", root, leave_out)
        except OSError as error:
            _log.warning(
                "the listing of %s cannot be kept in %s: %s", root, folder, in_words(error)
            )
    return _list(root, leave_out)[0]


def _listed_in(path: Path, root: Path, leave_out: Sequence[str]) -> Listing:
    listing = _read(path, root)
    if listing is not None:
        return listing
    # the other workers of this node wait for the one that lists
    with locked(path.with_suffix(".lock")):
        listing = _read(path, root)
        if listing is not None:
            return listing
        started_ns = time.time_ns()
        listing, complete = _list(root, leave_out)
        if complete and listing.modified_ns.max() < started_ns - SETTLED_S * 1e9:
            with whole_file(path, WRITING) as file:
                _write(file, listing)
        return listing


def _write(file: BinaryIO, listing: Listing) -> None:
    arrays = io.BytesIO()
    np.savez(arrays, **listing._asdict())
    content = arrays.getvalue()
    file.write(hashlib.sha256(content).digest())
    file.write(content)


def _read(path: Path, root: Path) -> Listing | None:
    """Return the kept listing; None if there is none, it is damaged, or the tree has changed."""
    try:
        content = read_bounded(path, MOST_BYTES)
    except OSError:
        return None
    digest, arrays = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(arrays).digest() != digest:
        _log.warning("%s is damaged: %s is listed again", path, root)
        return None
    with np.load(io.BytesIO(arrays), allow_pickle=False) as found:
        listing = Listing(**{name: found[name] for name in Listing._fields})
    return listing if _holds(root, listing) else None


def _holds(root: Path, listing: Listing) -> bool:
    top = os.fsencode(root) + b"/"
    folders = zip(listing.folders.tolist(), listing.modified_ns.tolist(), strict=True)
    try:
        for name, modified_ns in folders:
            # making a Path for each of many thousand folders would cost more than os.stat itself
            if os.stat(top + name).st_mtime_ns != modified_ns:  # noqa: PTH116
                return False
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class ImageTree:
    """Images of a tree, in order of class and path.

    Attributes:
        root: The folder that holds the class folders.
        names: Paths below the root as bytes, (n,). A million strings would take ten times the
            memory, in each process.
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
        """Return the path of an image."""
        return self.root / os.fsdecode(bytes(self.names[index]))

    def take(self, indices: Indices) -> ImageTree:
        """Return the tree with these images only; its classes stay the same."""
        return replace(self, names=self.names[indices], labels=self.labels[indices])


def data_error(folder: Path, message: str) -> InputError:
    """Return the error for a data folder that is not as expected."""
    return InputError(f"{folder}: {message}", key=DATA_DIR_KEY)


def read_tree(root: Path, leave_out: Sequence[str] = ()) -> ImageTree:
    """List the images of all class folders, except hidden ones and those in `leave_out`.

    Raises:
        InputError: There are no class folders, or one has no images.
    """
    listing = _listed_once(root, leave_out)
    classes = tuple(map(os.fsdecode, listing.classes.tolist()))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), listing.counts)
    return ImageTree(root, listing.names, labels, classes)


def _list(root: Path, leave_out: Sequence[str]) -> tuple[Listing, bool]:
    """Return the listing, and whether every folder could be read."""
    entries = _entries(root)
    folders = [(b".", root.stat().st_mtime_ns)]
    folder_names = [entry.name for entry in entries if entry.is_dir()]
    classes = sorted(
        name for name in folder_names if not name.startswith(".") and name not in leave_out
    )
    if not classes:
        raise data_error(root, "expected one folder for each class, with images in it")
    names: list[bytes] = []
    counts: list[int] = []
    unread: list[OSError] = []
    for name in classes:
        found = sorted(_images(root, name, folders, unread))
        if not found:
            kinds = ", ".join(EXTENSIONS)
            raise data_error(root / name, f"expected images of this class ({kinds}), found none")
        names += found
        counts.append(len(found))
    encoded = np.array(list(map(os.fsencode, classes)))
    paths, modified_ns = zip(*folders, strict=True)
    listing = Listing(
        encoded, np.array(counts), np.array(names), np.array(paths), np.array(modified_ns, np.int64)
    )
    return listing, not unread


def find_subfolder(data_dir: Path, *names: str) -> Path:
    """Return the first of these subfolders that exists.

    Raises:
        InputError: None of them exists.
    """
    for name in names:
        if (data_dir / name).is_dir():
            return data_dir / name
    found = ", ".join(sorted(entry.name for entry in _entries(data_dir))[:8]) or "nothing"
    wanted = " or ".join(f"{name}/" for name in names)
    raise data_error(data_dir, f"expected a folder {wanted} in it, found: {found}")


def check_same_classes(train: ImageTree, test: ImageTree) -> None:
    """Refuse a test set of other classes: its labels would mean something else."""
    if train.classes == test.classes:
        return
    differences = []
    if missing := _lacking(test.classes, train.classes):
        differences.append(f"missing: {missing}")
    if surplus := _lacking(train.classes, test.classes):
        differences.append(f"not in training: {surplus}")
    expected = f"expected the {len(train.classes)} class folders of {train.root.name}/"
    raise data_error(test.root, f"{expected}; {'; '.join(differences)}")


def _lacking(classes: tuple[str, ...], expected: tuple[str, ...]) -> str:
    """Name the first three expected classes that are not there."""
    return in_short(sorted(set(expected) - set(classes)))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise data_error(folder, f"cannot be read: {error.strerror}") from None


def _images(
    root: Path, class_name: str, folders: list[tuple[bytes, int]], unread: list[OSError]
) -> Iterator[bytes]:
    """Yield paths below the root; append each folder with its modification time, and errors."""
    for folder, _, files in os.walk(root / class_name, onerror=unread.append, followlinks=True):
        below = os.path.relpath(folder, root)
        try:
            folders.append((os.fsencode(below), Path(folder).stat().st_mtime_ns))
        except OSError as error:
            unread.append(error)
        for file in files:
            # ._x.jpg: macOS's shadow files
            if file.lower().endswith(EXTENSIONS) and not file.startswith("."):
                yield os.fsencode(f"{below}/{file}")
