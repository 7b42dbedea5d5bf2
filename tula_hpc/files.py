"""Careful with files: only regular ones of bounded size are read, and only folders of one's own are trusted.

A path that was typed or tampered with may be a pipe that nobody ever writes to, a device that never
ends, or a link to what belongs to somebody else.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO, TextIO

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# with less left, a disk counts as full: what filled it has just been deleted again
FULL_BYTES = 1_000_000
# on the way to one path, as Linux allows
MOST_LINKS = 40


def in_words(error: OSError) -> str:
    """What the operating system says, and where space is lacking what to do."""
    words = error.strerror or str(error) or type(error).__name__
    return (
        f"{words}; make space there or have the quota raised" if error.errno in NO_SPACE else words
    )


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading without ever waiting for whoever would write to a pipe.

    Raises:
        OSError: It is missing, may not be read, or is a folder, a pipe or a device.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it; Path.open takes no opener
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a file, found a pipe or a device", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """The whole of a regular file that is not larger than so many bytes; a larger one is not read at all.

    Raises:
        OSError: It cannot be read, see `open_regular`, or is too large.
    """
    with open_regular(path) as file:
        too_large = os.fstat(file.fileno()).st_size > most_bytes
        # files of the kernel have no size beforehand
        content = b"" if too_large else file.read(most_bytes + 1)
    if too_large or len(content) > most_bytes:
        raise OSError(errno.EOVERFLOW, f"expected at most {most_bytes:,} bytes", str(path))
    return content


def full_disk(folder: Path) -> str:
    """That nothing can be written to a folder for lack of space or quota, in words; empty where that is not so."""
    try:
        # a quota shows nowhere else
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(FULL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder}: {in_words(error)}" if error.errno in NO_SPACE else ""
    return ""


def drop_output() -> None:
    """After a broken pipe: whoever read the output has heard enough, as `head` has; closing it would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_out(text: str, stream: TextIO | None = None) -> None:
    """Print it all, for whoever still reads; on standard output or what stands for it."""
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        drop_output()


def make_private(folder: Path) -> None:
    """Make a folder, and those that are missing on the way to it, with mode 0700 whatever the umask is.

    Raises:
        OSError: It cannot be made.
    """
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def mistrust(folder: Path) -> str:
    """Why what lies in a folder may not be believed or executed; empty where it may.

    Raises:
        OSError: It is not there.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link; expected a folder"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to user id {status.st_uid}, not to you"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it; chmod go-w it if you trust what it holds"
    return ""


def foreign_link(path: Path) -> Path | None:
    """The first symbolic link on the way to a path that neither we nor root made: its owner can point it elsewhere."""
    here, left, followed = Path("/"), list(reversed(path.absolute().parts[1:])), 0
    while left:
        part = left.pop()
        here = here.parent if part == ".." else here / part
        if not here.is_symlink():
            continue
        followed += 1
        if here.lstat().st_uid not in (0, os.geteuid()) or followed > MOST_LINKS:
            return here
        target = here.readlink()
        here = Path("/") if target.is_absolute() else here.parent
        left += reversed([part for part in target.parts if part != "/"])
    return None


def open_to_all(path: Path) -> Path | None:
    """The first folder above a path that every user may write to, without the sticky bit; links are followed, too.

    Anyone can put another folder in the place of what is below it. Folders that a group may write
    to are not meant: those of a project, writable for its members, are usual on clusters, and who
    is in a group has been chosen.
    """
    above = [*path.absolute().parents, *Path(os.path.realpath(path)).parents]
    return next((folder for folder in above if _is_open_to_all(folder)), None)


def _is_open_to_all(folder: Path) -> bool:
    try:
        mode = folder.stat().st_mode
    except OSError:
        # it is not there yet, or not to be seen: what we make there is ours
        return False
    return bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX)


class HeldFolder:
    """A folder by what it is, not by its name: a process that holds one notices when somebody has deleted it.

    It is kept open, or the file system might give its number to the next folder of that name.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def loss(self, doing: str) -> str:
        """That it is lost, in words, to a job that was doing something; empty while it is there."""
        words = f"{self.folder}: was deleted while this job {doing}; another run may be there now"
        return words if self.is_lost else ""

    @property
    def is_lost(self) -> bool:
        """Whether the name leads nowhere, or to another folder. What cannot be told for now is not lost."""
        try:
            named, held = self.folder.stat(), os.fstat(self._descriptor)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        return not os.path.samestat(named, held)
