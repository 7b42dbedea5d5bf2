"""Read only regular files of bounded size, and trust only the user's own folders.

A path that was typed or tampered with may be a pipe without a writer, a device that never ends, or
a link to another user's files.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import shlex
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# errors of a file system that may work the next time
PASSING = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
)
# a disk with less free space counts as full; some is free, since a failed write frees what it wrote
FULL_BYTES = 1_000_000
# symbolic links followed in one path, as many as Linux allows
MOST_LINKS = 40
# run directories that a message suggests
MOST_RUNS = 3
PLAN_WITHOUT_MEASUREMENTS = "the measurements that plan.json rests on are gone"
# nothing is measured again in a run that has trained
MEASUREMENTS_GONE = (
    "the measurements are gone, and the run has trained: put profile/ back, or measure in a new "
    "--run-dir"
)


def in_words(error: OSError) -> str:
    """Return the operating system's message, with a remedy if space is lacking."""
    message = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.EFBIG:
        return (
            f"{message}: raise the file size limit (ulimit -f), which jobs inherit from the shell "
            "that submits them"
        )
    if error.errno in NO_SPACE:
        return f"{message}; make space there or have the quota raised"
    return message


def is_there(path: Path) -> bool:
    """Tell whether a path leads to something.

    `Path.exists` also answers False, from Python 3.14 on, where it may not look.

    Raises:
        OSError: The file system does not tell.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def not_a_run(path: Path) -> str:
    """Say why a path is no run directory, and suggest others that may be meant."""
    if not is_there(path):
        words = "no such run directory"
    elif path.is_dir():
        words = "is not a run directory: it has no sweep.toml"
    else:
        words = "is not a folder; expected a run directory"
    near = " or ".join(map(str, _runs_near(path)))
    if near:
        return f"{words}; did you mean {near}?"
    return words if path.is_absolute() else f"{words} (looked for in {Path.cwd()})"


def _runs_near(path: Path) -> list[Path]:
    """Return the runs in or around a folder, or for a missing path those with a similar name."""
    try:
        if path.is_dir():
            paths = [*sorted(path.iterdir()), *sorted(path.glob("runs/*")), path.parent]
        else:
            # a file of a run may be given in place of the run
            holder = [path.parent] if path.is_file() else []
            paths = [*holder, Path("runs") / path.stem, Path(path.name), *_similar(path)]
        return [each for each in paths if (each / "sweep.toml").is_file()][:MOST_RUNS]
    except OSError:
        return []


def _similar(path: Path) -> list[Path]:
    folder = path.parent
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    longer = sorted(name for name in names if name.startswith(path.name))
    close = difflib.get_close_matches(path.name, names)
    return [folder / name for name in dict.fromkeys([*longer, *close])]


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, without ever waiting for the writer of a pipe.

    Raises:
        OSError: The file is missing, may not be read, or is a folder, a pipe or a device; or a link
            and not `follow`.
    """
    opener = _without_waiting if follow else _without_link
    # the caller closes it; Path.open takes no opener
    file = open(path, "rb", opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a file, found a pipe or a device", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _without_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file; a file above `most_bytes` is not read at all.

    Raises:
        OSError: The file cannot be read, see `open_regular`, or is too large.
    """
    with open_regular(path) as file:
        too_large = os.fstat(file.fileno()).st_size > most_bytes
        # files of the kernel, as in /proc, show no size before they are read
        content = b"" if too_large else file.read(most_bytes + 1)
    if too_large or len(content) > most_bytes:
        raise OSError(errno.EOVERFLOW, f"expected at most {most_bytes:,} bytes", str(path))
    return content


@contextlib.contextmanager
def whole_file(
    path: Path, prefix: str, suffix: str = "", *, check: Callable[[], None] = lambda: None
) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` after the block: write, fsync, check, rename.

    Readers see the old file or the new one, mode 0600, never half of one. The file is not memory
    mapped, so a full disk is an error, not a SIGBUS. If the block or the check raises, `path` stays
    as it is. Prefix and suffix are of the name under which the file is written, in the same folder;
    `check` is called right before the rename, as writing may take minutes.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        check()
        Path(temporary).replace(path)
    finally:
        with contextlib.suppress(OSError):
            Path(temporary).unlink(missing_ok=True)


def full_disk(folder: Path) -> str:
    """Return a message if a folder lacks space or quota for writing, else an empty string."""
    try:
        # only a write shows that a quota is used up
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(FULL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{folder}: {in_words(error)}" if error.errno in NO_SPACE else ""
    return ""


def now_of_files(folder: Path) -> float:
    """Return the present Unix time by the clock of a folder's file system, else of this machine."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def has_no_room(folder: Path) -> bool:
    """Tell whether a folder's disk is full, without writing; a used-up quota is not noticed."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    # a read-only disk reports no room, and some file systems do not count their blocks
    counts = room.f_blocks > 0 and not room.f_flag & os.ST_RDONLY
    return counts and room.f_bavail * room.f_frsize < FULL_BYTES


def drop_output() -> None:
    """Discard further output after a broken pipe (`| head`); closing it would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_out(text: str, stream: TextIO | None = None) -> None:
    """Print a text, on standard output by default; a closed pipe is no error."""
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        drop_output()


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, with mode 0700 whatever the umask is.

    Raises:
        OSError: A folder cannot be made.
    """
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)


def mistrust(folder: Path) -> str:
    """Return the reason not to trust or execute the content of a folder, else an empty string.

    Raises:
        OSError: The folder does not exist.
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
    """Return the first symbolic link on the way to a path that neither the user nor root owns.

    Its owner can point it elsewhere.
    """
    here = Path("/")
    left = list(reversed(path.absolute().parts[1:]))
    followed = 0
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


def refusal_of_open(root: Path, rooms: Iterable[Path]) -> str:
    """Return a message that refuses the folders open to others, above a run directory or in it.

    Without any the message is empty, as for a single one inside, which has a check of its own. Of
    the folders above, those that only a group may write to do not count: project folders that are
    writable for the members are usual on clusters, and somebody has chosen the members.
    """
    # the nearest first; links are followed, too
    folders = [*root.absolute().parents, *Path(os.path.realpath(root)).parents]
    above = list(filter(_is_open_to_all, dict.fromkeys(folders)))
    # an empty folder holds nothing yet that could be executed
    is_used = root.is_dir() and any(root.iterdir())
    inside = list(filter(_is_open, (root, *rooms))) if is_used else []
    if len(above) == 1 and not inside:
        narrow = shlex.join(["chmod", "o-w", str(above[0])])
        return (
            f"everybody may put another folder in its place; {narrow}, or chmod +t it, "
            "or have its owner do so, or use another --run-dir"
        )
    if len(above) + len(inside) < 2:
        return ""
    commands = [
        shlex.join(["chmod", mode, *map(str, folders)])
        for mode, folders in (("go-w", inside), ("o-w", above))
        if folders
    ]
    return (
        f"others may write to {len(above) + len(inside)} folders, and what lies there is executed; "
        f"if you trust it: {' && '.join(commands)}; or use another --run-dir"
    )


def _is_open(folder: Path) -> bool:
    """Tell whether others may write to a folder; False if it is missing."""
    try:
        mode = folder.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and bool(mode & (stat.S_IWGRP | stat.S_IWOTH))


def _is_open_to_all(folder: Path) -> bool:
    try:
        mode = folder.stat().st_mode
    except OSError:
        # missing or not accessible: a folder that is made there will be the user's own
        return False
    # only folders count: nothing can be made below a device, say
    return stat.S_ISDIR(mode) and bool(mode & stat.S_IWOTH and not mode & stat.S_ISVTX)


class HeldFolder:
    """Folder known by its inode, not by its name, so that a process notices when it is deleted.

    The folder is kept open, or the file system might give its inode number to the next one.

    Raises:
        OSError: The folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def loss(self, doing: str) -> str:
        """Return a message if the folder was deleted or moved during this job, else ""."""
        if not self.is_lost:
            return ""
        return f"{self.folder}: was deleted or moved while this job {doing}; another run may be there now"

    @property
    def is_lost(self) -> bool:
        """True if the name leads nowhere or to another folder; False while that is unknown."""
        try:
            return not os.path.samestat(self.folder.stat(), os.fstat(self._descriptor))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@contextlib.contextmanager
def loaded_elsewhere() -> Iterator[None]:
    """Import matplotlib in this block, so that it reads no settings from the working directory."""
    # a descriptor, since a path would not lead back if the folder was deleted or renamed
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        os.chdir(Path(__file__).parent)
        yield
    finally:
        os.fchdir(before)
        os.close(before)
