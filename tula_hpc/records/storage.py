"""Files of records: read them even if damaged, append to and replace them as a whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import json
import os
import re
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from tula_hpc.env import unix_time
from tula_hpc.errors import RunDirectoryError, StorageError
from tula_hpc.files import in_words, open_regular, read_bounded, whole_file

MAX_LINE_BYTES = 4_000_000
# bytes of a JSON Lines file
MAX_LINES_BYTES = 4 * 1024**3
# records of one kind in memory at once: a few hundred megabytes
MAX_RECORDS = 150_000
# bytes by which reading records of one kind may let the process grow
MAX_HELD_BYTES = 500_000_000
# bytes of a file that is a single record, such as plan.json
MAX_DOCUMENT_BYTES = 64 * 1024**2
# records between two calls of `gc.freeze`
MANY = 10_000
# damaged lines of a file that are reported one by one; the others are only counted
NAMED_LINES = 3
# products of larger numbers may overflow
MAX_FLOAT = 1e100
# seconds to wait for a lock: a suspended or lost writer may hold it for ever
LOCK_S = 2.0
LOCK_PAUSE_S = 0.01
R = TypeVar("R", bound=BaseModel)


class ReadResult(NamedTuple, Generic[R]):
    """Readable records, and the lines that could not be read."""

    records: list[R]
    # number of lines that could not be read
    skipped: int
    # descriptions of the first `NAMED_LINES` such lines of each file
    damage: list[str]


def read_records(
    kind: type[R], paths: Iterable[Path], parse: Callable[[bytes], R] | None = None
) -> ReadResult[R]:
    """Read JSON Lines files that exist; skip and count lines that are torn or of another kind.

    `parse` replaces `parse_record`, to leave out fields that are not needed of very many records.

    Raises:
        RunDirectoryError: A file exists but cannot be read, or exceeds a bound.
    """
    records: list[R] = []
    damage: list[str] = []
    skipped, bounds = 0, Bounds()
    for path in paths:
        bad = 0
        for number, line in enumerate(lines_of(path), 1):
            try:
                record = parse(line) if parse else parse_record(kind, line)
            except ValueError as error:
                bad += 1
                if bad <= NAMED_LINES:
                    words = f"is damaged ({_reason(error)}) and was skipped"
                    damage.append(f"{path}, line {number}: {words}")
                continue
            records.append(_without_fields_set(record))
            bounds.check(path, len(records), len(line))
            if len(records) % MANY == 0:
                # else the garbage collector would search these long-lived records again and again
                gc.freeze()
        skipped += bad
        if bad > NAMED_LINES:
            damage.append(f"{path}: {bad - NAMED_LINES} more damaged lines were skipped")
    return ReadResult(records, skipped, damage)


def _reason(error: ValueError) -> str:
    """Describe the first thing that is wrong with a record."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"][:6]))
    return " ".join(f"{where[:200]}: {first['msg']}".removeprefix(": ").split())[:500]


class Bounds:
    """Bounds on the number of records in memory and on the bytes that they take there.

    Parsed JSON may take 60 times the bytes of its text. Each kind of a run's records has bounds of
    its own; with all kinds together a command stays within 1 GB.
    """

    def __init__(self) -> None:
        self.unseen_bytes = 0
        self.before_bytes = _resident_bytes()

    def check(self, path: Path, records: int, line_bytes: int) -> None:
        """Raise if a bound is exceeded; to be called after each record."""
        if records > MAX_RECORDS:
            raise out_of_bounds(path, f"at most {MAX_RECORDS:,} records up to this file", ASIDE)
        self.unseen_bytes += line_bytes
        if self.unseen_bytes < MAX_LINE_BYTES:
            return
        self.unseen_bytes = 0
        if _resident_bytes() - self.before_bytes > MAX_HELD_BYTES:
            raise out_of_bounds(
                path, f"records that take at most {MAX_HELD_BYTES / 1e6:,.0f} MB of memory", ASIDE
            )


ASIDE = "move what is not needed out of the run directory"


def out_of_bounds(path: Path, bound: str, advice: str) -> RunDirectoryError:
    """Return the error for a file that exceeds a bound, with the file's size."""
    size = path.stat().st_size / 1e6 if path.exists() else 0.0
    return RunDirectoryError(f"has {size:,.1f} MB; expected {bound}; {advice}", source=path)


def _resident_bytes() -> int:
    """Return the resident bytes of this process, 0 if the kernel does not report them.

    The peak would be no use: it may be that of the process that started this one.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


_NONE_SET: set[str] = set()


def _without_fields_set(record: R) -> R:
    """Drop pydantic's set of the fields that were in the file: it is larger than the record."""
    object.__setattr__(record, "__pydantic_fields_set__", _NONE_SET)
    for name in _nested_records(type(record)):
        part = getattr(record, name)
        if isinstance(part, BaseModel):
            object.__setattr__(part, "__pydantic_fields_set__", _NONE_SET)
    return record


@functools.cache
def _nested_records(kind: type[BaseModel]) -> tuple[str, ...]:
    names = []
    for name, field in kind.model_fields.items():
        types = (field.annotation, *get_args(field.annotation))
        if any(isinstance(each, type) and issubclass(each, BaseModel) for each in types):
            names.append(name)
    return tuple(names)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines that are not blank; one that is too long is cut, and so not parsed."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
                raise out_of_bounds(path, f"at most {MAX_LINES_BYTES:,} bytes", ASIDE)
            while line := file.readline(MAX_LINE_BYTES):
                if not line.isspace():
                    yield line
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None


# Signs of a number that is not finite or too large; a text with one is checked number by number.
# Searching for plain words is ten times as fast as for patterns. So all digits are first mapped to
# one character, and everything that may precede a number to another.
_ALIKE = bytes.maketrans(b"123456789E:[- \t\r\n", b"000000000e,,,,,,,")
_SUSPECT = (b"NaN", b"Infinity", b"," + b"0" * 18)
_LARGE_EXPONENT = re.compile(rb"e\+?000")


def _is_suspect(text: bytes) -> bool:
    alike = text.translate(_ALIKE)
    return any(word in alike for word in _SUSPECT) or _LARGE_EXPONENT.search(alike) is not None


def parse_record(kind: type[R], text: bytes) -> R:
    """Parse a record.

    Raises:
        ValueError: The text is no such record, or has a number that is not finite or out of bounds.
    """
    record = kind.model_validate_json(text)
    if _is_suspect(text):
        _check_numbers(json.loads(text))
    return record


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)
    elif isinstance(value, int | float) and not abs(value) <= (
        MAX_FLOAT if isinstance(value, float) else 2**63
    ):
        raise ValueError(f"holds the number {value:.3g}")


_ANEW = "delete it, and the command of the sweep makes it again"


def read_document(kind: type[R], path: Path) -> R:
    """Read a file that is one record.

    Raises:
        FileNotFoundError: The file does not exist.
        RunDirectoryError: The file cannot be read, or is damaged.
    """
    try:
        return parse_record(kind, read_bounded(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None
    except ValueError as error:
        raise RunDirectoryError(f"is damaged: {_reason(error)}; {_ANEW}", source=path) from None


def append_record(path: Path, *records: BaseModel | dict[str, Any], durable: bool = True) -> None:
    """Append a line for each record with a single write, so that several writers' never mix.

    With `durable` the lines are on disk when this returns. Metrics do without: they are many, and
    each wait would delay a step.

    Raises:
        StorageError: The lines cannot be written; the file then ends as it did before.
    """
    lines = ""
    for record in records:
        if isinstance(record, BaseModel):
            lines += f"{record.model_dump_json()}\n"
        else:
            lines += f"{json.dumps(record, allow_nan=False)}\n"
    try:
        _append(path, lines.encode(), durable)
    except OSError as error:
        raise _unwritten(path, error) from error


def _append(path: Path, lines: bytes, durable: bool) -> None:
    # never wait if the file is a pipe; a copy of another user's run may hold links to any file
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        with _locked(descriptor) if durable else contextlib.nullcontext():
            _write_whole(descriptor, _newline_if_torn(descriptor) + lines)
            if durable:
                os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Keep out other processes that use the same lock file; as `_locked`, go on where it fails."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            stack.callback(os.close, descriptor)
            stack.enter_context(_locked(descriptor))
        yield


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock a file against other writers; after `LOCK_S`, or where locks fail, go on without.

    An NFS client appends where the file ended when the client last looked; taking a lock makes it
    look again.
    """
    deadline = time.monotonic() + LOCK_S
    with contextlib.suppress(OSError):
        while not _is_mine(descriptor) and time.monotonic() < deadline:
            time.sleep(LOCK_PAUSE_S)
    try:
        yield
    finally:
        # closing does not unlock if a process forked meanwhile has the file open, too
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _is_mine(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_whole(descriptor: int, data: bytes) -> None:
    """Append all or nothing: on a full disk cut off the part, unless another writer went on."""
    written = os.write(descriptor, data)
    try:
        while written < len(data):
            # the first write reports only how much was written, this one raises the reason
            written += os.write(descriptor, data[written:])
    except OSError:
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written)
        raise


def _newline_if_torn(descriptor: int) -> bytes:
    """Return a newline if a killed writer left half a line, so that the next line is not lost."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    return b"" if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n" else b"\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write, fsync, rename: a reader sees the whole old file or the whole new one.

    Raises:
        StorageError: The file cannot be written; the old one is still there.
    """
    try:
        with whole_file(path, f".{path.name}.") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritten(path, error) from error


def folder_gone(folder: Path) -> StorageError:
    """Return the error for a folder that disappeared while a command worked in it."""
    return StorageError(
        f"{folder}: is gone: somebody has deleted or moved it; put it back to go on, or run the same "
        "command to begin anew",
        is_folder_gone=True,
    )


def _unwritten(path: Path, error: OSError) -> StorageError:
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return folder_gone(path.parent)
    if error.errno == errno.ELOOP:
        return StorageError(f"{path}: is a symbolic link; replace it by the file that it leads to")
    return StorageError(f"{path}: cannot be written: {in_words(error)}")


def rank_file(path: Path, rank: int) -> Path:
    """Return the file of one rank; appends to one file from several NFS clients would mix."""
    return path if rank == 0 else path.with_name(f"{path.stem}-r{rank}.jsonl")


def with_rank_files(path: Path) -> list[Path]:
    """Return rank 0's file and the files that other ranks wrote next to it."""
    return [path, *sorted(path.parent.glob(f"{path.stem}-r*.jsonl"))]


def notes_file(path: Path) -> Path:
    """Return the file with the notes of the job that writes measurements to `path`."""
    return path.with_suffix(".notes")


def note_owner(lock: Path, descriptor: int, role: str) -> None:
    """Write the owner of a lock into the locked file, in place: a new file would not be locked.

    Raises:
        StorageError: The file cannot be written.
    """
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (f"{owner} ({role})" if role else owner).encode(), 0)
        # by the clock of this command's events, which ignores later changes of the system's clock
        now = unix_time()
        os.utime(descriptor, (now, now))
    except OSError as error:
        raise StorageError(f"{lock}: cannot be written: {in_words(error)}") from None
