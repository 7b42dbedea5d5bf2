"""Appending to JSON Lines files, and replacing whole files, so that neither is ever half written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tula_hpc.errors import StorageError
from tula_hpc.files import in_words


def append_record(path: Path, record: BaseModel | dict[str, Any], *, durable: bool = True) -> None:
    """Append one line with a single write, so that lines of several writers never mix.

    Args:
        path: A JSON Lines file; made if it is missing.
        record: What to append.
        durable: Whether to wait until the disk has it. Not for metrics: they are many, and the wait would be a step's.

    Raises:
        StorageError: It cannot be written; the file then ends as it did before.
    """
    text = record.model_dump_json() if isinstance(record, BaseModel) else json.dumps(record, allow_nan=False)
    try:
        _append(path, text.encode() + b"\n", durable)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {in_words(error)}") from error


def _append(path: Path, line: bytes, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK  # a pipe without a reader is an error, not a wait
    descriptor = os.open(path, flags, 0o600)
    try:
        _write_whole(descriptor, _newline_if_torn(path) + line)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(descriptor: int, data: bytes) -> None:
    """Append all or nothing: what a disk took before it was full is taken back, unless another writer went on there."""
    written = os.write(descriptor, data)
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])  # the first write only said how much, this one says why
    except OSError:
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written)
        raise


def _newline_if_torn(path: Path) -> bytes:
    """A line end, where a killed writer left a half line, so that it spoils only itself."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return b""
        file.seek(-1, os.SEEK_END)
        return b"" if file.read(1) == b"\n" else b"\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write, fsync, rename: a reader sees the old file or the new one, never half of one.

    Raises:
        StorageError: It cannot be written; the old file is still there.
    """
    try:
        _replace(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {in_words(error)}") from error


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
