"""Decoded images in files, read where they lie."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from tula_hpc.errors import InputError
from tula_hpc.workloads.pixels import Bytes, Indices


class RecordFiles:
    """Images in files of equal records; a pickle of this carries the paths, not the pixels.

    Each image is one `pread`. A memory map would be as fast, but its pages count as resident memory of whoever touched
    them, and the memory of a training step is something we measure.

    Args:
        paths: Files of `per_file` records each, the last may have fewer.
        per_file: Records in a file.
        edge: Edge of an image, pixels; a record holds 3 × edge × edge bytes, channel by channel.
        start: Bytes before the first record.
        label_bytes: Bytes before the image in each record.
    """

    def __init__(
        self, paths: tuple[Path, ...], per_file: int, edge: int, *, start: int = 0, label_bytes: int = 0
    ) -> None:
        self.paths, self.per_file, self.edge = paths, per_file, edge
        self.start, self.label_bytes = start, label_bytes
        self._descriptors: dict[Path, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptors": {}}  # another process opens its own

    def read(self, positions: Indices) -> Bytes:
        """Images at these positions, (n, 3, edge, edge).

        Raises:
            InputError: A file ended early or is gone.
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
