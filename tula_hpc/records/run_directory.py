"""Run directory: its paths, its lock, and whether it may be trusted.

`RunDirectory.locked` flocks `.lock` and writes "process N on HOST" into it; the text stays there
afterwards. `holder_of` finds the owner without taking the lock, so that it keeps no command out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.env import unix_time
from tula_hpc.errors import RunDirectoryError, StorageError
from tula_hpc.files import (
    foreign_link,
    in_words,
    is_there,
    make_private,
    mistrust,
    not_a_run,
    refusal_of_open,
)
from tula_hpc.formatting import command_line
from tula_hpc.records.events import MAIN_LABEL, Event, EventName, JobAccount, JobNote, RunHistory
from tula_hpc.records.measurement import (
    Footprint,
    Measurement,
    Trial,
    damaged_footprints,
    holds_any,
    parse_without_samples,
)
from tula_hpc.records.plan import Plan, read_plan
from tula_hpc.records.storage import (
    ReadResult,
    append_record,
    note_owner,
    read_document,
    read_records,
)
from tula_hpc.records.training import TrainResult, TunedRates


class TrainDirectory:
    """Files of one training."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # a line for each logged step and each epoch
        self.metrics_file = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        # a `Drift`; exists while step times are beyond the plan's
        self.drift_file = root / "drift.json"
        # exists once a script has printed an accuracy that can only be a percentage
        self.percent_file = root / "percent"
        # written once, at the end of training
        self.result_file = root / "result.json"

    @property
    def newest_checkpoint(self) -> Path | None:
        """Return the newest file with the model: the trained one, once training has ended."""
        found = self.checkpoints.glob("checkpoint-*.tula")
        # by the number in the name; a higher number may have more digits
        return max(found, key=lambda path: (len(path.name), path.name), default=None)

    @property
    def saved_samples(self) -> int | None:
        """Return the samples seen by the newest checkpoint, by its name; None if there is none."""
        newest = self.newest_checkpoint
        if newest is None:
            return None
        count = newest.stem.rpartition("-")[2]
        return int(count) if count.isdecimal() else None

    def read_result(self) -> TrainResult | None:
        """Read result.json; None if training has not ended.

        Raises:
            RunDirectoryError: The file is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_document(TrainResult, self.result_file)
        return None


# beyond these bytes, measurements are read without samples: most of the bytes, and rarely used
MAX_SAMPLED_BYTES = 32 * 1024**2


def _check_folder(folder: Path) -> None:
    """Refuse a folder of a run in which others may have put files for this user to execute."""
    with contextlib.suppress(FileNotFoundError):
        if reason := mistrust(folder):
            raise RunDirectoryError(reason, source=folder)


class RunDirectory:
    """Paths inside one run directory, which has mode 0700 as it holds pickles that are executed.

    Folders above it may be writable for a group, as those of projects usually are. If everybody may
    write to one, it must have the sticky bit: else any user could replace the run directory just
    before a job reads from it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        # measurements, one file per array task
        self.profile = self.root / "profile"
        # submitit's files: scripts, pickles, stdout, stderr
        self.slurm = self.root / "slurm"
        # figures, tables and the report
        self.report = self.root / "report"
        # inputs of the run, with all defaults filled in
        self.sweep_file = self.root / "sweep.toml"
        self.cluster_file = self.root / "cluster.toml"
        # result of trying the workload on the login node
        self.trial_file = self.root / "trial.json"
        self.plan_file = self.root / "plan.json"
        # learning rates that a study chose
        self.rates_file = self.root / "study_rates.json"
        # log of all stages
        self.events_file = self.root / "events.jsonl"
        # which events `on_event` was already run for
        self.notifications_file = self.root / "told.json"
        # the scheduler's records of the run's jobs
        self.accounting_file = self.root / "accounting.jsonl"

    def create(self) -> RunDirectory:
        """Make the directory and its folders; check those that exist first.

        Raises:
            RunDirectoryError: One of them is someone else's or open to others, or is a link.
            OSError: One of them cannot be made.
        """
        self.check_name()
        self._refuse_unsafe_path()
        make_private(self.root)
        self.check_owner()
        self.root.chmod(0o700)
        for room in self._rooms:
            if room != self.report:
                room.mkdir(mode=0o700, exist_ok=True)
            _check_folder(room)
        return self

    @property
    def _rooms(self) -> tuple[Path, ...]:
        return (self.profile, self.slurm, self.root / "train", self.report)

    def set_aside(self) -> Path | None:
        """Move the files of jobs and stages to a new folder, `earlier-N`, and return it.

        If jobs left no files, the rest is of no value and is deleted; returns None. The folder of
        pickles is moved first: a job that starts all the same finds nothing to do.

        Raises:
            OSError: A file cannot be moved.
        """
        rooms = (self.slurm, self.profile, self.root / "train", self.report)
        left = [room for room in rooms if room.is_dir() and any(room.iterdir())]
        documents = [
            self.events_file,
            self.trial_file,
            self.accounting_file,
            self.notifications_file,
        ]
        documents += self.root.glob("footprint*.json")
        documents = list(filter(Path.exists, documents))
        if not left:
            for path in documents:
                path.unlink()
            return None
        left += documents
        aside = next(path for n in count(1) if not (path := self.root / f"earlier-{n}").exists())
        make_private(aside)
        for path in left:
            path.rename(aside / path.name)
        self.create()
        return aside

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn an error of the operating system in this block, which only reads, into bad input.

        Raises:
            RunDirectoryError: The run directory or one of its files cannot be read.
        """
        try:
            yield
        except OSError as error:
            where = error.filename or self.root
            raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=where) from None

    def require(self) -> None:
        """Check that there is a run, of which parts may be missing.

        Raises:
            RunDirectoryError: The directory does not exist, holds no run, or cannot be read.
        """
        with self.reading():
            parts = (self.sweep_file, self.events_file, self.plan_file)
            if not any(map(is_there, parts)) and not any(self.profile.glob("*.jsonl")):
                raise RunDirectoryError(not_a_run(self.root), source=self.root)

    def check_name(self) -> None:
        """Refuse a path that job scripts would change: Slurm and submitit replace %j and the like.

        Raises:
            RunDirectoryError: The path holds characters that have a meaning there.
        """
        wrong = [letter for letter in str(self.root) if letter in "%\\" or not letter.isprintable()]
        if wrong:
            shown = "".join(letter if letter.isprintable() else "?" for letter in str(self.root))
            message = f"a run directory's path may not hold {wrong[0]!a}; use another --run-dir"
            raise RunDirectoryError(message, source=shown)

    @contextlib.contextmanager
    def locked(self, role: str = "") -> Iterator[None]:
        """Keep other commands from working on this run until the process ends.

        `role` says what this process does in the run, in at most 100 characters.

        Raises:
            RunDirectoryError: Another command holds the lock; the message says which.
            StorageError: The lock file cannot be locked or written.
        """
        path = self.root / ".lock"
        try:
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
            )
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {in_words(error)}") from None
        with os.fdopen(descriptor, "r+", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = file.read(200).strip() or "another command"
                message = f"is in use by {owner}; see {self.status_command}"
                raise RunDirectoryError(message, source=self.root) from None
            except OSError as error:
                # for instance, NFS without its lock service
                message = f"{path}: cannot be locked: {in_words(error)}; put the run on a file system with flock"
                raise StorageError(message) from None
            note_owner(path, descriptor, role)
            yield

    @property
    def status_command(self) -> str:
        """Return the command that shows the state of this run."""
        return command_line("status", str(self.root))

    def check_owner(self) -> None:
        """Refuse a directory that another user owns, may write to, or may replace.

        Raises:
            RunDirectoryError: The directory is not safe to use.
        """
        self._refuse_unsafe_path()
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            message = f"belongs to user id {status.st_uid}, not to you; use another --run-dir"
            raise RunDirectoryError(message, source=self.root)
        if any(self.root.iterdir()) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            message = "others may write to it, and its pickles are executed; chmod 700 it if you trust what it holds"
            raise RunDirectoryError(message, source=self.root)

    def _refuse_unsafe_path(self) -> None:
        link = foreign_link(self.root)
        if link is not None:
            message = f"the link {link} on the way to it belongs to another user; use the folder that it leads to"
            raise RunDirectoryError(message, source=self.root)
        if message := refusal_of_open(self.root, self._rooms):
            raise RunDirectoryError(message, source=self.root)

    def make_train(self, label: str = MAIN_LABEL) -> TrainDirectory:
        """Return the folder of one training; make it if it is missing.

        Raises:
            RunDirectoryError: The folder is someone else's, writable for others, or a link.
            StorageError: The folder cannot be made.
        """
        files = self.train(label)
        try:
            make_private(files.root)
        except OSError as error:
            raise StorageError(f"{files.root}: cannot be made: {in_words(error)}") from None
        _check_folder(files.root)
        return files

    def has_trained(self) -> bool:
        """Tell whether a training has left files or is submitted: then no new plan may be made."""
        left = any((self.root / "train").glob("*/*"))
        return left or bool(self.history().unsettled("train"))

    def has_studied(self) -> bool:
        """Tell whether a study's training has left files or was submitted; needs no sweep.toml."""
        left = any((self.root / "train" / "study").glob("*"))
        jobs = self.history().submissions("train")
        # labels as `StudyCell.label` has them
        return left or any(job.label.startswith("study/") for job in jobs)

    def has_results(self) -> bool:
        """Tell whether anything was measured, planned or trained; damaged files count, too."""
        measured = self.measurements()
        if measured.skipped or any(row.status == "ok" for row in measured.records):
            return True
        trained = any(path.is_file() for path in (self.root / "train").rglob("*"))
        return trained or self.plan_file.exists() or self.rates_file.exists()

    def footprint_file(self, partition: str = "") -> Path:
        """Return the file with the estimate of memory for one partition."""
        name = f"footprint-{partition}" if partition else "footprint"
        return self.root / f"{name.replace('/', '_')}.json"

    def footprints(self, partitions: Iterable[str]) -> dict[str, Footprint]:
        """Return the estimates that exist and are not damaged, by partition."""
        found = {}
        for name in partitions:
            with contextlib.suppress(FileNotFoundError, RunDirectoryError):
                found[name] = read_document(Footprint, self.footprint_file(name))
        return found

    def trial(self) -> Trial | None:
        """Read trial.json; None if it does not exist or is damaged."""
        with contextlib.suppress(FileNotFoundError, RunDirectoryError):
            return read_document(Trial, self.trial_file)
        return None

    def train(self, label: str = MAIN_LABEL) -> TrainDirectory:
        """Return the files of one training.

        Raises:
            RunDirectoryError: The label leads out of the run directory.
        """
        if Path(label).is_absolute() or ".." in Path(label).parts:
            raise RunDirectoryError(f"{label!r} is no name of a training", source=self.root)
        return TrainDirectory(self.root / "train" / label)

    def measurements(self) -> ReadResult[Measurement]:
        """Read all measurements, by file name and line; if there are many, without samples."""
        paths = sorted(self.profile.glob("*.jsonl"))
        size = sum(path.stat().st_size for path in paths if path.is_file())
        parse = parse_without_samples if size > MAX_SAMPLED_BYTES else None
        return read_records(Measurement, paths, parse)

    def files_of(self, rows: Iterable[Measurement]) -> list[Path]:
        """Return the files that hold these measurements."""
        named = list(rows)
        return [path for path in sorted(self.profile.glob("*.jsonl")) if holds_any(path, named)]

    def job_notes(self) -> list[JobNote]:
        """Read the notes of all profile jobs, job by job."""
        return read_records(JobNote, sorted(self.profile.glob("*.notes"))).records

    def accounts(self) -> list[JobAccount]:
        """Read the accounting records of all jobs as of the last query; none before the first."""
        return read_records(JobAccount, [self.accounting_file]).records

    def read_events(self) -> ReadResult[Event]:
        """Read all events, in the order in which they were written."""
        return read_records(Event, [self.events_file])

    def events(self) -> list[Event]:
        """Return all events that can be read."""
        return self.read_events().records

    def damage(self) -> list[str]:
        """List the estimates of memory, and lines of measurements and events, that are damaged."""
        lines = [*self.measurements().damage, *self.read_events().damage]
        return damaged_footprints(self.root) + lines

    def history(self) -> RunHistory:
        """Return the history that all events make up."""
        return RunHistory(self.events())

    def log_event(self, event: EventName, stage: str, **fields: Any) -> None:
        """Append one event with the present time."""
        append_record(self.events_file, Event(time=unix_time(), event=event, stage=stage, **fields))

    def read_plan(self) -> Plan:
        """Read plan.json.

        Raises:
            RunDirectoryError: The file is missing, is damaged, or was changed.
        """
        try:
            return read_plan(self.plan_file, self.has_trained)
        except FileNotFoundError:
            message = "no plan yet; the sweep makes it when its profiling is over"
            if self.has_trained():
                message = "is missing; run the sweep again, which makes it from the measurements"
            raise RunDirectoryError(message, source=self.plan_file) from None

    def read_rates(self) -> TunedRates | None:
        """Read study_rates.json; None if it does not exist.

        Raises:
            RunDirectoryError: The file is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_document(TunedRates, self.rates_file)
        return None


KERNELS_LIST = Path("/proc/locks")
_OWNER = re.compile(r"process (\d+) on (\S+)")
_LOCK = re.compile(
    r"(?:FLOCK|POSIX|OFDLCK)\s+ADVISORY\s+WRITE\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)"
)
# struct flock: type, whence, start, length, process
_FLOCK = "hhqqi4x"


class Holder(NamedTuple):
    """Command that holds the lock, or the last one that did."""

    # 0: unknown
    process: int
    # "": unknown
    host: str
    # whether it holds the lock; None: this machine cannot see that
    alive: bool | None
    # Unix time at which it took the lock; 0: unknown
    since: float = 0.0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}" if self.host else "a command"


def holder_of(lock_file: Path) -> Holder:
    """Return who works on the run directory of a lock file, as far as this machine can see."""
    try:
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return Holder(0, "", False)
    except PermissionError:
        # the file is someone else's, but the kernel's list still shows whether it is locked
        return Holder(0, "", _is_listed(lock_file.stat(), 0) or None)
    try:
        match = _OWNER.match(os.read(descriptor, 200).decode(errors="replace"))
        process, host = (int(match[1]), match[2]) if match else (0, "")
        if _is_listed(os.fstat(descriptor), process) or _is_locked_elsewhere(descriptor):
            return Holder(process, host, True, os.fstat(descriptor).st_mtime)
    finally:
        os.close(descriptor)
    return Holder(process, host, False if host in ("", os.uname().nodename) else None)


def _is_listed(file: os.stat_result, process: int) -> bool:
    """Tell whether a process of this machine holds a lock on the file.

    On some file systems stat shows another device than the kernel's list. There a lock counts if
    its process is `process`, which the lock file names.
    """
    try:
        text = KERNELS_LIST.read_text()
    except OSError:
        return False
    device = (os.major(file.st_dev), os.minor(file.st_dev))
    for owner, major, minor, inode in _LOCK.findall(text):
        same_device = (int(major, 16), int(minor, 16)) == device
        if int(inode) == file.st_ino and (same_device or int(owner) == process != 0):
            return True
    return False


def _is_locked_elsewhere(descriptor: int) -> bool:
    """Tell whether the file server knows of a lock on the file.

    NFS turns every flock into a lock on the whole range of the file, which `F_GETLK` shows.
    """
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    except OSError:
        # the file system has no such locks
        return False
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
