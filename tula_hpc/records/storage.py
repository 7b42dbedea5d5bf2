"""Files of records: reading whatever is in them, appending and replacing without half a record."""

from __future__ import annotations

import contextlib
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
# of a JSON Lines file
MAX_LINES_BYTES = 4 * 1024**3
# of one kind that are held at once: a few hundred megabytes
MAX_RECORDS = 150_000
# by which reading one kind may let the process grow
MAX_HELD_BYTES = 500_000_000
# of a file that is one record, as plan.json is
MAX_DOCUMENT_BYTES = 64 * 1024**2
# records
MANY = 10_000
# damaged lines of one file that are named one by one
NAMED_LINES = 3
# beyond it products overflow
MAX_FLOAT = 1e100
# a writer that is suspended, or whose node is gone, may keep its lock for ever
LOCK_S = 2.0
LOCK_PAUSE_S = 0.01
R = TypeVar("R", bound=BaseModel)


class ReadResult(NamedTuple, Generic[R]):
    """Readable records, and the lines that could not be read."""

    records: list[R]
    # number of the others
    skipped: int
    # of each file the first ones, in words
    damage: list[str]


def read_records(
    kind: type[R], paths: Iterable[Path], parse: Callable[[bytes], R] | None = None
) -> ReadResult[R]:
    """Read JSON Lines files that exist; skip and count lines that are torn or of another kind.

    `parse` takes the place of `parse_record`, for those that leave out fields not needed of so many.

    Raises:
        RunDirectoryError: A file is there and cannot be read, or is out of all bounds.
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
                    words = f"is damaged ({_reason(error)}), and passed over"
                    damage.append(f"{path}, line {number}: {words}")
                continue
            records.append(_light(record))
            bounds.check(path, len(records), len(line))
            if len(records) % MANY == 0:
                # they will stay: the collector of cycles would look through all of them again and
                # again
                gc.freeze()
        skipped += bad
        if bad > NAMED_LINES:
            damage.append(f"{path}: so are {bad - NAMED_LINES} more lines")
    return ReadResult(records, skipped, damage)


def _reason(error: ValueError) -> str:
    """Return the first thing that is wrong with a record."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"][:6]))
    return " ".join(f"{where[:200]}: {first['msg']}".removeprefix(": ").split())[:500]


class Bounds:
    """Bounds on the records that are held and on the memory that they take.

    JSON may take 60 times its bytes. Each kind of a run's records has its own bounds: all together a
    command stays within 1 GB.
    """

    def __init__(self) -> None:
        self.unseen_bytes = 0
        self.before_bytes = _resident_bytes()

    def check(self, path: Path, records: int, line_bytes: int) -> None:
        """Refuse to hold more than this many, after each one."""
        if records > MAX_RECORDS:
            raise out_of_bounds(path, f"at most {MAX_RECORDS:,} records up to here", ASIDE)
        self.unseen_bytes += line_bytes
        if self.unseen_bytes < MAX_LINE_BYTES:
            return
        self.unseen_bytes = 0
        if _resident_bytes() - self.before_bytes > MAX_HELD_BYTES:
            raise out_of_bounds(
                path, f"records that need at most {MAX_HELD_BYTES / 1e6:,.0f} MB of memory", ASIDE
            )


ASIDE = "move what is not needed out of the run directory"


def out_of_bounds(path: Path, bound: str, advice: str) -> RunDirectoryError:
    """Return the error of a file beyond a bound, with the file's size."""
    size = path.stat().st_size / 1e6 if path.exists() else 0.0
    return RunDirectoryError(f"has {size:,.1f} MB; expected {bound}; {advice}", source=path)


def _resident_bytes() -> int:
    """Return the memory of this process, 0 where the kernel does not tell.

    The peak may be that of the process that started it.
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


_NONE_SET: set[str] = set()


def _light(record: R) -> R:
    """Drop pydantic's list of the fields that were in the file: it is larger than the record."""
    object.__setattr__(record, "__pydantic_fields_set__", _NONE_SET)
    for name in _parts(type(record)):
        part = getattr(record, name)
        if isinstance(part, BaseModel):
            object.__setattr__(part, "__pydantic_fields_set__", _NONE_SET)
    return record


@functools.cache
def _parts(kind: type[BaseModel]) -> tuple[str, ...]:
    kinds = {
        name: (field.annotation, *get_args(field.annotation))
        for name, field in kind.model_fields.items()
    }
    return tuple(name for name, types in kinds.items() if any(map(_is_record, types)))


def _is_record(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines that are not blank; of one that is too long only the beginning, no record."""
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


# what may be a number that is none, or too large: worth a closer look. Plain words are found ten
# times as fast as patterns, so all digits are made alike before, and all that may stand before a
# number
_ALIKE = bytes.maketrans(b"123456789E:[- \t\r\n", b"000000000e,,,,,,,")
_SUSPECT = (b"NaN", b"Infinity", b"," + b"0" * 18)
_LARGE_EXPONENT = re.compile(rb"e\+?000")


def _is_suspect(text: bytes) -> bool:
    alike = text.translate(_ALIKE)
    return any(word in alike for word in _SUSPECT) or _LARGE_EXPONENT.search(alike) is not None


def parse_record(kind: type[R], text: bytes) -> R:
    """Parse a record.

    Raises:
        ValueError: It is not one, or holds a number that is not finite or out of all bounds.
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
        FileNotFoundError: There is none.
        RunDirectoryError: It cannot be read, or is damaged.
    """
    try:
        return parse_record(kind, read_bounded(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None
    except ValueError as error:
        raise RunDirectoryError(f"is damaged: {_reason(error)}; {_ANEW}", source=path) from None


def append_record(path: Path, record: BaseModel | dict[str, Any], *, durable: bool = True) -> None:
    """Append one line with a single write, so that lines of several writers never mix.

    With `durable` the disk has it when this returns. Not for metrics: they are many, and the wait
    would be a step's.

    Raises:
        StorageError: It cannot be written; the file then ends as it did before.
    """
    text = (
        record.model_dump_json()
        if isinstance(record, BaseModel)
        else json.dumps(record, allow_nan=False)
    )
    try:
        _append(path, text.encode() + b"\n", durable)
    except OSError as error:
        raise _unwritten(path, error) from error


def _append(path: Path, line: bytes, durable: bool) -> None:
    # no wait where it is a pipe
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        with _locked(descriptor) if durable else contextlib.nullcontext():
            _write_whole(descriptor, _newline_if_torn(descriptor) + line)
            if durable:
                os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock a file once nobody else appends to it, if that is soon and its file system has locks.

    A client of NFS appends where the file ended when it last looked; for a lock it looks again.
    """
    deadline = time.monotonic() + LOCK_S
    with contextlib.suppress(OSError):
        while not _is_mine(descriptor) and time.monotonic() < deadline:
            time.sleep(LOCK_PAUSE_S)
    try:
        yield
    finally:
        # to close it is not enough where a process that was forked meanwhile has it, too
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _is_mine(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_whole(descriptor: int, data: bytes) -> None:
    """Append all or nothing: take back the part on a full disk, unless another writer went on."""
    written = os.write(descriptor, data)
    try:
        while written < len(data):
            # the first write only said how much, this one says why
            written += os.write(descriptor, data[written:])
    except OSError:
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written)
        raise


def _newline_if_torn(descriptor: int) -> bytes:
    """Return a line end if a killed writer left half a line, so that it spoils only itself."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    return b"" if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n" else b"\n"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write, fsync, rename: a reader sees the old file or the new one, never half of one.

    Raises:
        StorageError: It cannot be written; the old file is still there.
    """
    try:
        with whole_file(path, f".{path.name}.") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _unwritten(path, error) from error


def folder_gone(folder: Path) -> StorageError:
    """Return the error that a folder is gone in which a command was at work."""
    return StorageError(
        f"{folder}: is gone: somebody has deleted or moved it; put it back to go on, or run the same "
        "command to begin anew",
        is_folder_gone=True,
    )


def _unwritten(path: Path, error: OSError) -> StorageError:
    if isinstance(error, FileNotFoundError) and not path.parent.exists():
        return folder_gone(path.parent)
    return StorageError(f"{path}: cannot be written: {in_words(error)}")


def rank_file(path: Path, rank: int) -> Path:
    """Return one rank's file: appending from several clients of a network file system mixes."""
    return path if rank == 0 else path.with_name(f"{path.stem}-r{rank}.jsonl")


def with_rank_files(path: Path) -> list[Path]:
    """Return rank 0's file and those that other ranks wrote beside it."""
    return [path, *sorted(path.parent.glob(f"{path.stem}-r*.jsonl"))]


def notes_file(path: Path) -> Path:
    """Return the file of notes of the job that writes measurements to `path`."""
    return path.with_suffix(".notes")


def note_owner(lock: Path, descriptor: int, role: str) -> None:
    """Write the owner of a lock into the locked file; a new file would not be locked.

    Raises:
        StorageError: It cannot be written.
    """
    owner = f"process {os.getpid()} on {os.uname().nodename}"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (f"{owner} ({role})" if role else owner).encode(), 0)
        # by the clock of this command's events, which does not step with the system's
        now = unix_time()
        os.utime(descriptor, (now, now))
    except OSError as error:
        raise StorageError(f"{lock}: cannot be written: {in_words(error)}") from None
