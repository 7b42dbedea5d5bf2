"""Small images of a folder tree, decoded once and kept in a file that all workers and all later jobs share.

Decoding 50,000 PNG files takes a core several seconds, and would in every epoch. The file is a plain .npy array of
bytes (n, 3, edge, edge), in `$XDG_CACHE_HOME/tula_hpc` (default ~/.cache/tula_hpc). Its name is a hash of the tree's
path and of name, size and modification time of each image in it, so a changed tree is decoded anew. Nothing is ever
unpickled. Old files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tula_hpc.errors import InputError
from tula_hpc.workloads.decoding import open_rgb, to_square
from tula_hpc.workloads.record_files import RecordFiles
from tula_hpc.workloads.trees import ImageTree

MAX_BYTES = 2 * 1024**3  # larger trees are decoded as they are read: the file would crowd out the node's page cache
_log = logging.getLogger(__name__)


def fits(tree: ImageTree, edge: int) -> bool:
    """Whether the decoded tree is small enough to be kept."""
    return len(tree) * 3 * edge * edge <= MAX_BYTES


def decoded(tree: ImageTree, edge: int) -> RecordFiles:
    """The tree's images as squares of `edge` pixels, decoded now unless that was done before.

    Raises:
        InputError: An image cannot be decoded, or no folder takes the decoded images.
    """
    name = f"{_identity(tree, edge)}.npy"
    problems = []
    for folder in _folders():
        try:
            return _decoded_in(folder, name, tree, edge)
        except OSError as error:
            problems.append(f"{folder} ({error.strerror})")
            _log.warning("decoded images cannot be kept in %s: %s", folder, error)
    size_mb = len(tree) * 3 * edge * edge // 1_000_000 + 1
    raise InputError(f"{size_mb} MB of decoded images cannot be kept in {' or '.join(problems)}; set XDG_CACHE_HOME")


def _folders() -> Iterator[Path]:
    """The user's cache, which nodes mostly share; or else the node's own temporary files."""
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tula_hpc"
    yield Path(tempfile.gettempdir()) / f"tula_hpc-{os.geteuid()}"


def _decoded_in(folder: Path, name: str, tree: ImageTree, edge: int) -> RecordFiles:
    _make_private(folder)
    path = folder / name
    if not path.exists():
        with _locked(folder / f"{name}.lock"):  # the other workers of this node wait for the one that decodes
            if not path.exists():
                _write(path, tree, edge)
    return _opened(path, tree, edge)


def _make_private(folder: Path) -> None:
    """Create the folder, 0700; one that others may write to could be made to hold anything."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(0, "not a folder of yours")
    folder.chmod(0o700)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems cannot lock: then several decode, all the same
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, tree: ImageTree, edge: int) -> None:
    """Decode into a temporary file, fsync, rename. Written, not mapped: a full disk is an error then, not a SIGBUS."""
    _log.info("decoding %d images of %s once, into %s", len(tree), tree.root, path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".decoding-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write_array(file, tree, edge)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _write_array(file: BinaryIO, tree: ImageTree, edge: int) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": _shape(tree, edge)}
    np.lib.format.write_array_header_1_0(file, header)
    for index in range(len(tree)):
        file.write(to_square(open_rgb(tree.path(index)), edge).tobytes())


def _opened(path: Path, tree: ImageTree, edge: int) -> RecordFiles:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise OSError(0, f"{path.name} is damaged; delete it") from None
    if array.dtype != np.uint8 or array.shape != _shape(tree, edge):
        raise OSError(0, f"{path.name} is damaged; delete it")
    return RecordFiles((path,), len(tree), edge, start=array.offset)


def _shape(tree: ImageTree, edge: int) -> tuple[int, int, int, int]:
    return (len(tree), 3, edge, edge)


def _identity(tree: ImageTree, edge: int) -> str:
    """Hash of where the tree lies and of every file in it."""
    digest = hashlib.sha256(f"1 {edge} {tree.root.resolve()}".encode(errors="surrogateescape"))
    for index in range(len(tree)):
        status = tree.path(index).stat()
        digest.update(bytes(tree.names[index]) + b"\0%d %d\n" % (status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:32]
