"""Small images of a folder tree, decoded once into a file that all workers and later jobs share.

Decoding 50,000 PNG files takes one core several seconds, and would do so in every epoch. The file
is a plain .npy array of bytes (n, 3, edge, edge) in one of `cache_folders`. Its name is a hash of
the tree's path and of name, size and modification time of each image, so a changed tree is decoded
again. Nothing is ever unpickled. Old files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tula_hpc.data.image_tree import (
    WRITING,
    ImageTree,
    cache_folders,
    data_error,
    locked,
    make_own,
    remove_left,
)
from tula_hpc.data.images import Bytes, Indices, open_rgb, to_square
from tula_hpc.errors import InputError
from tula_hpc.files import in_words, whole_file

# size of the decoded images; a larger file would crowd out the rest of the node's page cache
MAX_BYTES = 2 * 1024**3
_log = logging.getLogger(__name__)


class RecordFiles:
    """Images in files of equal records; a pickle of this carries the paths, not the pixels.

    Each image is one `pread`. A memory map would be as fast, but its pages count as resident memory
    of the process that touched them, and the memory of a training step is measured.

    Args:
        paths: Files of `per_file` records each, the last may have fewer.
        per_file: Records in a file.
        edge: Edge of an image, pixels; a record holds 3 × edge × edge bytes, channel by channel.
        start: Bytes before the first record.
        label_bytes: Bytes before the image in each record.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        per_file: int,
        edge: int,
        *,
        start: int = 0,
        label_bytes: int = 0,
    ) -> None:
        self.paths, self.per_file, self.edge = paths, per_file, edge
        self.start, self.label_bytes = start, label_bytes
        self._descriptors: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # another process opens descriptors of its own
        return {**self.__dict__, "_descriptors": {}}

    def read(self, positions: Indices) -> Bytes:
        """Return the images at these positions, (n, 3, edge, edge).

        Raises:
            InputError: A file ends early or is gone.
        """
        size = 3 * self.edge * self.edge
        images = np.empty((len(positions), size), np.uint8)
        for row, position in zip(images, positions.tolist(), strict=True):
            path = self.paths[position // self.per_file]
            record = self.start + position % self.per_file * (self.label_bytes + size)
            data = os.pread(self._open(path), size, record + self.label_bytes)
            if len(data) != size:
                raise InputError(f"ends before image {position}", source=path)
            row[:] = np.frombuffer(data, np.uint8)
        return images.reshape(-1, 3, self.edge, self.edge)

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InputError(f"cannot be read: {error.strerror}", source=path) from None
            weakref.finalize(self, os.close, descriptor)
            self._descriptors[path] = descriptor
        return self._descriptors[path]


def fits(tree: ImageTree, edge: int) -> bool:
    """Tell whether the decoded tree is small enough to be kept."""
    return len(tree) * 3 * edge * edge <= MAX_BYTES


def decoded(tree: ImageTree, edge: int) -> RecordFiles:
    """Return the tree's images as squares of `edge` pixels; decode them if no file holds them yet.

    Raises:
        InputError: An image cannot be decoded, or no folder takes the decoded images.
    """
    name = f"{_identity(tree, edge)}.npy"
    problems = []
    for folder in cache_folders():
        try:
            return _decoded_in(folder, name, tree, edge)
        except OSError as error:
            problems.append(f"{folder} ({error.strerror})")
            _log.warning("decoded images cannot be kept in %s: %s", folder, in_words(error))
    size_mb = len(tree) * 3 * edge * edge // 1_000_000 + 1
    raise InputError(
        f"{size_mb} MB of decoded images cannot be kept in {' or '.join(problems)}; "
        "set XDG_CACHE_HOME to a folder with room for them"
    )


def _decoded_in(folder: Path, name: str, tree: ImageTree, edge: int) -> RecordFiles:
    make_own(folder)
    path = folder / name
    if not path.exists():
        # the other workers of this node wait for the one that decodes
        with locked(folder / f"{name}.lock"):
            if not path.exists():
                _log.info("decoding %d images of %s once, into %s", len(tree), tree.root, path)
                remove_left(folder)
                with whole_file(path, WRITING) as file:
                    _write_array(file, tree, edge)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise OSError(0, f"{path.name} is damaged; delete it") from None
    if array.dtype != np.uint8 or array.shape != (len(tree), 3, edge, edge):
        raise OSError(0, f"{path.name} is damaged; delete it")
    return RecordFiles((path,), len(tree), edge, start=array.offset)


def _write_array(file: BinaryIO, tree: ImageTree, edge: int) -> None:
    shape = (len(tree), 3, edge, edge)
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for index in range(len(tree)):
        file.write(to_square(open_rgb(tree.path(index)), edge).tobytes())


def _identity(tree: ImageTree, edge: int) -> str:
    digest = hashlib.sha256(f"2 {edge} {tree.root.resolve()}".encode(errors="surrogateescape"))
    for index in range(len(tree)):
        path = tree.path(index)
        try:
            status = path.stat()
        except OSError as error:
            # a link may lead nowhere
            raise data_error(path, f"cannot be read: {error.strerror}") from None
        facts = b"\0%d %d\n" % (status.st_size, status.st_mtime_ns)
        digest.update(bytes(tree.names[index]) + facts)
    return digest.hexdigest()[:32]
