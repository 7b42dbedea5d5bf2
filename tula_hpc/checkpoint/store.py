"""Checkpoints that survive being killed, damaged and tampered with.

A file is a fixed header (magic, version, payload length, SHA-256 of the payload) and the bytes of
`torch.save`. It is written under a temporary name, synced, renamed, and only then called saved.
Nothing is unpickled before its checksum matched, and then only tensors and plain values.

File names carry the job's restart count, see `TrainJob.run_number`, and the samples seen, as in
`checkpoint-r0001-000000012800.tula`, so they sort by age. The restart count comes first, because a
restart that had to go back to an older checkpoint abandons the later ones.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import re
import stat
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from tula_hpc.checkpoint.payload import (
    MAX_DEPTH,
    PayloadError,
    check_archive,
    check_loaded,
    instructions_of,
    why_not_plain,
    why_too_large,
)
from tula_hpc.errors import CheckpointError, DataError
from tula_hpc.files import PASSING, in_words, make_private, mistrust, whole_file
from tula_hpc.formatting import first_line

MAGIC = b"TULACKPT"
VERSION = 1
# larger integers are pickled with an instruction that the safe loader lacks
MAX_INTEGER_BITS = 2000

# magic, version, payload length in bytes, SHA-256 of the payload
_HEADER = struct.Struct(">8sIQ32s")
_NAME = re.compile(r"checkpoint-r(\d{4,})-(\d{12,})\.tula")
_TEMPORARY = re.compile(r"\.checkpoint-r(\d{4,})-\d{12,}\.tula\..+\.tmp")
# errors of a payload that passed its checksum but was not made by `save`
_UNLOADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    OSError,
)


class LoadedCheckpoint(NamedTuple):
    """The newest usable checkpoint."""

    state: dict[str, Any]
    path: Path
    # newer files that could not be used, with the reasons
    rejected: list[tuple[Path, str]]
    samples_seen: int
    # highest restart count of the jobs that saved this file and the rejected ones
    restart_count: int


class CheckpointStore:
    """Checkpoints of one training in one folder. One process writes (rank 0); all may read.

    Args:
        folder: Folder of the checkpoints; the first save makes it, with mode 0700.
        keep: Number of usable checkpoints to keep; at least 1, but 2 survive a damaged one.
        partners: Another folder of checkpoints; a file is kept while its namesake there exists.
    """

    def __init__(self, folder: Path, keep: int = 2, partners: Path | None = None) -> None:
        self.folder, self.keep = folder, keep
        self.partners = partners
        self._rejected: set[Path] = set()

    def save(self, state: dict[str, Any], *, samples_seen: int, restart_count: int = 0) -> Path:
        """Save durably, delete all but the newest `keep` files, and return the file's path.

        When this returns, the checkpoint survives a power failure. When it raises, the older
        checkpoints are still there, and no half-written one is.

        `state` holds tensors, numbers, strings and None, in lists, tuples and dicts. The job was
        requeued `restart_count` times before this process started.

        Raises:
            CheckpointError: The state holds something that could not be loaded again, a later
                restart has already saved (this process is a left-over), or the file cannot be
                written.
        """
        path = self.folder / file_name(restart_count, samples_seen)
        if reason := why_too_large(_check_storable(state, "state")):
            raise CheckpointError(f"{path}: the state {reason}")
        if type(state) not in (dict, OrderedDict):
            raise CheckpointError(f"{path}: expected a dict to save, got a {type(state).__name__}")
        try:
            self._prepare_folder()
            self._refuse_left_over(restart_count)
            self._remove_temporaries(restart_count)
            self._write(path, state, restart_count)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be saved: {in_words(error)}") from error
        self._rejected.discard(path)
        self._prune()
        return path

    def keep_newest_only(self) -> None:
        """Delete all but the newest usable file, when training is over."""
        self.keep = 1
        self.partners = None
        self._prune()

    def load_latest(
        self, check: Callable[[dict[str, Any]], object] = bool
    ) -> LoadedCheckpoint | None:
        """Load the newest usable checkpoint; None if there is no file at all.

        `check` raises a CheckpointError if a loaded state cannot be used.

        Raises:
            CheckpointError: There are files, but none can be used. Starting from the beginning
                would silently repeat the work.
            DataError: The same, but the next job may be able to use them.
        """
        rejected: list[tuple[Path, str]] = []
        may_pass = False
        for path in reversed(self.paths()):
            try:
                state = self.load(path)
                check(state)
            except CheckpointError as error:
                rejected.append((path, str(error).removeprefix(f"{path}: ")))
                cause = error.__cause__
                may_pass |= isinstance(cause, OSError) and cause.errno in PASSING
                # an earlier run, still at work on a lost node, may have replaced it meanwhile; or
                # this node's file system shows an old list
                may_pass |= not os.path.lexists(path)
                continue
            self._rejected = {bad for bad, _ in rejected}
            newest = max(_age(each).restart_count for each in (path, *self._rejected))
            return LoadedCheckpoint(state, path, rejected, _age(path).samples_seen, newest)
        if rejected:
            reasons = "; ".join(f"{path.name} {reason}" for path, reason in rejected)
            words = f"{self.folder}: no usable checkpoint: {reasons}"
            raise DataError(words) if may_pass else CheckpointError(words)
        return None

    @staticmethod
    def load(path: Path) -> dict[str, Any]:
        """Verify and load one file, its tensors on the host.

        Its bytes are read once, so the bytes that are unpickled are those that were verified.

        Raises:
            CheckpointError: The file is missing, someone else's, writable by others, a link,
                damaged, or not made by `save`.
        """
        try:
            _check_folder(path.parent)
            payload = _read_verified(path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            if error.errno == errno.ELOOP:
                reason = "is a symbolic link"
            raise CheckpointError(f"{path}: {reason}") from error
        return _unpickle(path, payload)

    def paths(self) -> list[Path]:
        """List all checkpoint files, oldest first; they have not been verified."""
        return sorted((path for path in self._entries() if _NAME.fullmatch(path.name)), key=_age)

    def _entries(self) -> list[Path]:
        try:
            _check_folder(self.folder)
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"{self.folder}: cannot be read: {reason}") from error

    def _prepare_folder(self) -> None:
        make_private(self.folder)
        _check_folder(self.folder)
        self.folder.chmod(0o700)

    def _refuse_left_over(self, restart_count: int) -> None:
        # after a node was lost its old process can live on while the requeued job already runs
        newest = max(map(_age, self.paths()), default=None)
        if newest is not None and restart_count < newest.restart_count:
            stale = f"this process of restart {restart_count} is a left-over"
            raise CheckpointError(
                f"{self.folder}: restart {newest.restart_count} has already saved; {stale}"
            )

    def _remove_temporaries(self, restart_count: int) -> None:
        """Remove files of killed saves, except a later restart's, which may be writing just now."""
        for path in self._entries():
            match = _TEMPORARY.fullmatch(path.name)
            if match and int(match[1]) <= restart_count:
                path.unlink(missing_ok=True)

    def _write(self, path: Path, state: dict[str, Any], restart_count: int) -> None:
        refuse = partial(self._refuse_left_over, restart_count)
        with whole_file(path, f".{path.name}.", ".tmp", check=refuse) as file:
            _write_checkpoint(file, state)
        sync_folder(self.folder)

    def _prune(self) -> None:
        """Delete files older than the `keep` newest; rejected files do not count as kept.

        Errors do no harm: the new checkpoint is safe, and the next save tries again.
        """
        with contextlib.suppress(CheckpointError, OSError):
            usable = 0
            for path in reversed(self.paths()):
                is_wanted = self.partners is not None and (self.partners / path.name).exists()
                if usable >= self.keep and not is_wanted:
                    with contextlib.suppress(OSError):
                        path.unlink()
                if path not in self._rejected:
                    usable += 1


def load_model(place: str | Path) -> dict[str, Any]:
    """Load the weights that a training ended with, for `load_state_dict` of the same model.

    Args:
        place: A run directory, or a checkpoint of one (`train/main/checkpoints/*.tula`).

    Returns:
        Tensors on the CPU by their names, as `state_dict` of the model gave them.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, it belongs to a script, which loads
            its own, or the run is a study, which has many.
    """
    folder = Path(place)
    if folder.is_file():
        state = CheckpointStore.load(folder)
    else:
        folder = folder / "train" / "main" / "checkpoints"
        paths = CheckpointStore(folder).paths()
        if not paths:
            raise CheckpointError(_why_no_model(Path(place), folder))
        try:
            state = CheckpointStore.load(paths[-1])
        except CheckpointError as error:
            # an older checkpoint is another model, so it is only named, never loaded silently
            older = f"; the one before it is {paths[-2]}" if len(paths) > 1 else ""
            raise CheckpointError(f"{error}{older}") from None
    if not isinstance(model := state.get("model"), dict):
        raise CheckpointError(f"{folder}: holds no model; a script loads its own state")
    return model


def _why_no_model(root: Path, folder: Path) -> str:
    if not root.exists():
        return f"{root}: no such run directory or checkpoint"
    if (own := folder.with_name("script") / "work").is_dir():
        return f"{root}: belongs to a script, which saves its own model; see {own}"
    if one := next(root.glob("train/study/*/checkpoints/*.tula"), None):
        return f"{root}: belongs to a study, which trains many models; name one, such as {one}"
    return f"{folder}: has no checkpoint; the run has trained no model yet"


class _Age(NamedTuple):
    restart_count: int
    samples_seen: int


def _age(path: Path) -> _Age:
    restart_count, samples_seen = re.findall(r"\d+", path.name)
    return _Age(int(restart_count), int(samples_seen))


def file_name(restart_count: int, samples_seen: int) -> str:
    """Return the file name of a checkpoint."""
    return f"checkpoint-r{restart_count:04d}-{samples_seen:012d}.tula"


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _HashingWriter:
    """Writer that counts and hashes bytes, so that a checkpoint is in memory only once.

    The first OSError is kept for later: torch's C++ writer calls `write` and cannot pass an
    exception on.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.length = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self.file.write(data)
            except OSError as error:
                self.error = error
            self.sha256.update(data)
        self.length += size
        return size

    def flush(self) -> None:
        """Do nothing: the caller flushes the file."""


def _write_checkpoint(file: IO[bytes], state: dict[str, Any]) -> None:
    # the header last: without it a half-written file cannot pass for a whole one
    file.write(bytes(_HEADER.size))
    writer = _HashingWriter(file)
    # torch.save needs only write and flush
    torch.save(state, cast("IO[bytes]", writer))
    if writer.error is not None:
        raise writer.error
    file.seek(0)
    file.write(_HEADER.pack(MAGIC, VERSION, writer.length, writer.sha256.digest()))


def _read_verified(path: Path) -> bytes:
    # neither follow a link, nor wait for the writer of a pipe; Path.open takes no opener
    careful = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | careful)) as file:
        status = os.fstat(file.fileno())
        _check_ours(path, status)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise CheckpointError(f"{path}: is truncated: {len(header)} bytes")
        magic, version, length, digest = _HEADER.unpack(header)
        if magic != MAGIC:
            raise CheckpointError(f"{path}: is damaged or not a checkpoint of this program")
        if version != VERSION:
            versions = f"has format version {version}; this program reads version {VERSION}"
            raise CheckpointError(f"{path}: {versions}")
        if status.st_size != _HEADER.size + length:
            sizes = f"{status.st_size} bytes, not {_HEADER.size + length}"
            raise CheckpointError(f"{path}: is truncated or damaged: {sizes}")
        payload = file.read()
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"{path}: is damaged: its checksum does not match")
    return payload


def _check_folder(folder: Path) -> None:
    """Refuse files that someone else may have put there, or may exchange."""
    if reason := mistrust(folder):
        raise CheckpointError(f"{folder}: {reason}")


def _check_ours(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file")
    if status.st_uid != os.geteuid():
        raise CheckpointError(f"{path}: belongs to user id {status.st_uid}, not to you")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(
            f"{path}: others may write to it; chmod 600 it if you trust what it holds"
        )


def _unpickle(path: Path, payload: bytes) -> dict[str, Any]:
    try:
        check_archive(payload)
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        check_loaded(state, len(payload))
    except torch.OutOfMemoryError:
        # lack of memory says nothing about the file
        raise
    except PayloadError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except _UNLOADABLE as error:
        raise CheckpointError(
            f"{path}: holds what may not be loaded: {_unloadable_reason(error)}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a dict")
    return state


def _unloadable_reason(error: Exception) -> str:
    """Return one line: torch's own text for refused classes recommends to load them unsafely."""
    if isinstance(error, pickle.UnpicklingError):
        refused = re.search(r"GLOBAL (\S+)", str(error))
        return f"a reference to {refused[1]}" if refused else "more than tensors and plain values"
    return first_line(str(error)) or type(error).__name__


def _check_storable(value: Any, where: str, depth: int = 0) -> int:
    """Refuse values that the safe loader would refuse when the checkpoint is needed.

    Types are compared exactly: a subclass (an enumeration, a NumPy float, a named tuple) is pickled
    as something else.

    Returns:
        The most instructions that the value takes in the pickle.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        deep = f"is nested deeper than {MAX_DEPTH} levels, or contains itself"
        raise CheckpointError(f"{where[:200]}…: {deep}")
    if kind is int and value.bit_length() > MAX_INTEGER_BITS:
        raise CheckpointError(f"{where}: an integer of {value.bit_length()} bits cannot be saved")
    count = instructions_of(value)
    # these may carry attributes, which are saved too
    if kind in (torch.Tensor, torch.nn.Parameter, OrderedDict):
        count += _check_attributes(value, where, depth)
    if kind in (dict, OrderedDict, Counter):
        for key, item in value.items():
            count += _check_key(key, where)
            count += _check_storable(item, f"{where}[{key!r}]", depth + 1)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            count += _check_storable(item, f"{where}[{index}]", depth + 1)
    elif kind not in (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter):
        expected = "expected tensors, numbers, strings, None, lists, tuples, dicts"
        raise CheckpointError(f"{where}: {_describe(kind)} cannot be saved; {expected}")
    return count


def _describe(kind: type) -> str:
    return f"an object of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def _check_key(key: Any, where: str) -> int:
    if type(key) not in (str, int, float, bool, type(None)):
        expected = "expected strings or numbers"
        raise CheckpointError(
            f"{where}: {_describe(type(key))} cannot be saved as a key; {expected}"
        )
    return instructions_of(key)


def _check_attributes(value: Any, where: str, depth: int) -> int:
    count = 0
    for name, item in vars(value).items():
        count += instructions_of(name) + _check_storable(item, f"{where}.{name}", depth + 1)
    if isinstance(value, torch.Tensor) and (reason := why_not_plain(value)):
        raise CheckpointError(f"{where}: {reason} cannot be saved")
    return count
