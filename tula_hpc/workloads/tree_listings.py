"""Listings of folder trees, kept in a file that all workers and all later jobs share.

A million names take a busy file system minutes to list, and every worker would for each configuration. A listing is
believed while every folder that it names has the modification time that it had: that changes when a file or folder in
it is made, renamed or deleted. The file lies in `cache_folders`; its name is a hash of the tree's path, of what is left
out and of the root's modification time, so that nodes with copies of their own keep listings of their own. It holds a
SHA-256 and plain arrays. Nothing is ever unpickled. Old files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.files import read_bounded
from tula_hpc.workloads.cache_folders import cache_folders, locked, make_private, write_whole

# Changed later than this before it was listed, a folder may change again without another time: clocks of file servers
# are coarse and differ from ours, and nodes see times up to a minute late.
SETTLED_S = 60.0
MOST_BYTES = 2**32
_VERSION = 1
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


class Listing(NamedTuple):
    """What a tree holds.

    Attributes:
        classes: Names of the class folders, sorted, (c,).
        counts: Images of each class, (c,).
        names: Paths of the images below the root, by class and sorted, (n,).
        folders: Paths of all folders that were looked into, the root first, (f,).
        modified_ns: When each was modified, Unix time, (f,).
    """

    classes: NDArray[np.bytes_]
    counts: NDArray[np.int64]
    names: NDArray[np.bytes_]
    folders: NDArray[np.bytes_]
    modified_ns: NDArray[np.int64]


def listed_once(root: Path, leave_out: Iterable[str], make: Callable[[], tuple[Listing, bool]]) -> Listing:
    """Give the tree's listing, as it is kept where that still holds.

    Args:
        root: The tree.
        leave_out: Class folders that do not count.
        make: Lists the tree, and says whether all of it could be read.
    """
    try:
        name = f"{_identity(root, leave_out)}.listing"
    except OSError:
        return make()[0]
    for folder in cache_folders():
        try:
            return _listed_in(folder, name, root, make)
        except OSError as error:
            _log.warning("the listing of %s cannot be kept in %s: %s", root, folder, error)
    return make()[0]


def _listed_in(folder: Path, name: str, root: Path, make: Callable[[], tuple[Listing, bool]]) -> Listing:
    make_private(folder)
    path = folder / name
    listing = _read(path, root)
    if listing is not None:
        return listing
    # The other workers of this node wait for the one that lists.
    with locked(path.with_suffix(".lock")):
        listing = _read(path, root)
        if listing is not None:
            return listing
        started_ns = time.time_ns()
        listing, complete = make()
        if complete and listing.modified_ns.max() < started_ns - SETTLED_S * 1e9:
            write_whole(path, lambda file: _write(file, listing))
        return listing


def _identity(root: Path, leave_out: Iterable[str]) -> str:
    facts = [str(_VERSION), str(root.resolve()), *sorted(leave_out), str(root.stat().st_mtime_ns)]
    return hashlib.sha256("\0".join(facts).encode(errors="surrogateescape")).hexdigest()[:32]


def _write(file: BinaryIO, listing: Listing) -> None:
    arrays = io.BytesIO()
    np.savez(arrays, **listing._asdict())
    content = arrays.getvalue()
    file.write(hashlib.sha256(content).digest())
    file.write(content)


def _read(path: Path, root: Path) -> Listing | None:
    """The listing as it is kept; None where there is none, it is damaged, or the tree has changed."""
    try:
        content = read_bounded(path, MOST_BYTES)
    except OSError:
        return None
    digest, arrays = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(arrays).digest() != digest:
        _log.warning("%s is damaged: %s is listed anew", path, root)
        return None
    with np.load(io.BytesIO(arrays), allow_pickle=False) as found:
        listing = Listing(**{name: found[name] for name in Listing._fields})
    return listing if _holds(root, listing) else None


def _holds(root: Path, listing: Listing) -> bool:
    top = os.fsencode(root) + b"/"
    folders = zip(listing.folders.tolist(), listing.modified_ns.tolist(), strict=True)
    try:
        # A Path for each of many thousand folders would cost more than the question itself.
        return all(os.stat(top + name).st_mtime_ns == modified_ns for name, modified_ns in folders)  # noqa: PTH116
    except OSError:
        return False
