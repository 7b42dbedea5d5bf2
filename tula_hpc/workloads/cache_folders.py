"""Folders for what is made of data once and used by all workers and later jobs; whatever lies there may be deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def cache_folders() -> Iterator[Path]:
    """The user's cache, which nodes mostly share; or else the node's own temporary files."""
    yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tula_hpc"
    yield Path(tempfile.gettempdir()) / f"tula_hpc-{os.geteuid()}"


def make_private(folder: Path) -> None:
    """Create the folder, 0700; one that others may write to could be made to hold anything.

    Raises:
        OSError: It cannot be made, or belongs to somebody else.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(0, "not a folder of yours")
    folder.chmod(0o700)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process in at a time; the others wait. Where the file system cannot lock, all are let in."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a temporary file, fsync, rename. It is not mapped: a full disk is an error then, not a SIGBUS.

    Raises:
        OSError: It cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
