"""What is written down: measurements, events, plans; their files; and the run directory that holds them.

JSON Lines files are append-only, one record a line. A torn last line (a writer was killed) is skipped and counted.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from tula_hpc.errors import Failure, RunDirectoryError, StorageError
from tula_hpc.files import foreign_link, in_words, make_private, mistrust, open_regular, read_bounded

MAX_LINE_BYTES = 4_000_000
MAX_LINES_BYTES = 4 * 1024**3  # of a JSON Lines file
MAX_DOCUMENT_BYTES = 64 * 1024**2  # of a file that is one record, as plan.json is
MAX_FLOAT = 1e100  # beyond it products overflow
# as the inputs bound them: what is larger was not written by this program
Nodes = Annotated[int, Field(ge=1, le=2**20)]
WorkersPerNode = Annotated[int, Field(ge=1, le=2**12)]
Batch = Annotated[int, Field(ge=1, le=2**44)]
JobId = Annotated[str, Field(pattern=r"^(\w[\w.,:%+\[\]-]{0,99})?$")]  # goes into commands, and names files


class Record(BaseModel):
    """Base of all records: immutable; unknown keys of newer versions are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Configuration(NamedTuple):
    """Where one profile or training runs: N nodes, workers on each, local batch b. B = N × workers × b."""

    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch

    @property
    def world_size(self) -> int:
        """Number of workers (processes)."""
        return self.nodes * self.workers_per_node

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers, B."""
        return self.world_size * self.local_batch

    def __str__(self) -> str:
        return f"N={self.nodes} b={self.local_batch} (B={self.global_batch})"


class StepTimes(Record):
    """Medians over the timed steps, seconds; the slowest worker where workers differ."""

    step_time_s: float  # a whole training step: data wait, forward, backward with all-reduce, optimizer
    step_time_low_s: float  # 95 % interval of the median
    step_time_high_s: float
    data_time_s: float  # part of step_time_s: waiting for the loader
    compute_time_s: float  # forward and backward without synchronization (no_sync), measured apart
    optimizer_time_s: float  # the optimizer's step alone, measured apart
    allreduce_time_s: float  # bare all-reduce of the gradient's bytes, measured apart; 0 for one worker
    update_time_s: float = 0.0  # an update of AGS's gradient scale, measured apart; not part of step_time_s


class MemoryUse(Record):
    """What one worker used, bytes; the largest over the workers."""

    peak_bytes: int  # CUDA: peak allocated; CPU: peak resident set over the baseline
    reserved_bytes: int  # CUDA: peak reserved by the allocator; CPU: peak resident set of the whole process
    baseline_bytes: int  # CUDA: 0; CPU: resident set before the model was built (interpreter and libraries)
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    batch_bytes: int  # the loader's prefetched batches on the host
    sharded_bytes: int = 0  # part of optimizer_bytes that the workers divide among them (ZeRO)


class Footprint(Record):
    """An estimate of one worker's memory from counting, before any step was run; bytes.

    `fixed_bytes + activation_bytes_per_sample × b` is what tensors hold at the peak of a step with local batch b, once
    b is so large that the peak lies in the backward pass. `peaks` is what the limit counts, at the powers of two.
    """

    schema_version: Literal[1] = 1
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # of one worker, its share under ZeRO
    activation_bytes_per_sample: int
    fixed_bytes: int
    host_baseline_bytes: int = 0  # CPU: the process with its libraries, before the model
    scaling_bytes: int = (
        0  # AGS: reference gradient and scale factors, on top of `peaks` once training has updated them
    )
    peaks: dict[Batch, int] = Field(min_length=1)  # by local batch
    limit_bytes: int | None = None  # of one worker, the margin taken off
    largest_local_batch: int | None = None  # of `peaks`, within the limit; None: no limit, 0: none fits
    world_size: int = 1  # workers that were assumed: the fewest of the search
    counted_at: tuple[int, ...] = ()  # local batches
    method: Literal["fake", "real"] = "fake"  # real: counted on small real batches, since the model needs values
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0

    def peak_bytes(self, local_batch: int) -> float:
        """The estimate at any local batch: straight lines between the powers of two and beyond the last two."""
        known = sorted(self.peaks)
        right = min(max(1, bisect.bisect_left(known, local_batch)), len(known) - 1)
        low, high = known[right - 1], known[right]
        slope = (self.peaks[high] - self.peaks[low]) / (high - low) if high > low else 0.0
        return max(float(self.peaks[known[0]]), self.peaks[low] + slope * (local_batch - low))


class Measurement(Record):
    """What one profile of a configuration saw; `status` says whether times and memory are there."""

    schema_version: Literal[1] = 1
    status: Literal["ok", "oom", "failed"]
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    times: StepTimes | None = None
    memory: MemoryUse | None = None
    failure: Failure | None = None
    detail: str = ""
    stage: Literal["profile", "train"] = "profile"  # train: an OOM of the final job, a bound all the same
    steps: int = 0
    converged: bool = False  # the median's 95 % interval became narrower than search.ci_width
    exclusive: bool = True  # the nodes were the task's alone
    emulated: bool = False  # several "nodes" shared one machine (local executor)
    dataset_samples: int = 0  # training samples in an epoch, D
    updates_per_epoch: float = 0.0  # of AGS's gradient scale, on average
    parameters: int = 0
    device: str = ""
    backend: str = ""
    hosts: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    samples: dict[str, list[float]] = {}  # per-step seconds: step, data, compute, optimizer, update, allreduce
    job_id: JobId = ""
    finished_at: float = 0.0  # Unix time
    elapsed_s: float = 0.0  # of the whole profile of this configuration
    partition: str = ""  # which of [[partitions]]; empty where the cluster has none
    watts_per_node: float = 0.0  # electrical power of a node during the timed steps, mean over the nodes; 0: unknown
    node_seconds: float = 0.0  # elapsed_s × nodes of the job's allocation, those that only waited included
    noise_scale: float = 0.0  # samples, tr(Σ)/|G|² at the weights that were profiled; 0: unknown
    noise_samples: int = 0  # so many samples the estimate was made from
    noise_terms: tuple[tuple[float, float], ...] = ()  # |G|² and tr(Σ) of each pass, unbiased, so of any sign

    @property
    def configuration(self) -> Configuration:
        """The configuration that was measured."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)


class JobNote(Record):
    """What a profile job says of itself while it runs: for its cost, and for whoever finds it dead.

    A job that is requeued begins again: its notes then hold several runs, each from "began" on.
    """

    note: Literal["began", "ready", "measuring", "ended"]  # ready: all workers have met
    time: float  # Unix time
    job_id: JobId = ""
    allocated_nodes: Nodes = 1
    submitted_at: float = 0.0
    began_at: float = 0.0  # when the allocation was granted, as far as the job can tell
    configuration: Configuration | None = None  # what it is about to measure
    detail: str = ""


class Candidate(Record):
    """One configuration with what the models say of it."""

    partition: str = ""  # which of [[partitions]]; empty where the cluster has none
    nodes: Nodes
    workers_per_node: WorkersPerNode = 1
    local_batch: Batch
    global_batch: Batch
    step_time_s: float
    epoch_time_s: float
    train_time_s: float  # steps alone
    wall_time_s: float | None = (
        None  # expected, with starts, checkpoints and what restarts repeat; not the queue. This is paid for
    )
    cost: float
    currency: str = "USD"  # SU: service units, that is billing units times hours
    energy_kwh: float | None = None  # of the site, its overhead included; None where no power is known
    checkpoint_minutes: float | None = None  # between two checkpoints, as time and cost reckon; training measures anew
    peak_memory_bytes: int
    interval_90: dict[str, tuple[float, float]] = {}
    feasible: bool = True
    measured: bool = False
    why: str = ""  # why it is not feasible
    pareto: bool = False  # no feasible candidate is both faster and cheaper

    @property
    def configuration(self) -> Configuration:
        """The configuration alone."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)


class Knee(Record):
    """The knee of the curve of training time against global batch, and how sure the measurements make it."""

    global_batch: float | None  # None: the curve has no knee
    interval_90: tuple[float, float] | None = None  # over curves drawn from the fit's uncertainty, of those with a knee
    share_without_knee: float = 0.0  # of those curves


class Plan(Record):
    """plan.json: the chosen configuration, every candidate, and what to fall back to."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    objective: str
    chosen: Candidate
    reason: str  # one sentence: why this one
    candidates: list[Candidate]
    fallbacks: list[Candidate]  # ranked smaller batches for OOM, first to be tried first
    candidates_total: int | None = None  # where candidates holds only the best of so many
    runners_up: list[Candidate] = []  # what would have been chosen next, best first
    binding: list[str] = []  # constraints that rule out a better candidate
    knee: Knee | None = None
    critical_batch: float | None = None  # samples; gradient noise scale, weighted mean of tr(Σ) over that of |G|²
    critical_batch_source: Literal["training", "profile"] | None = None  # the training's metrics, or the first weights
    notes: list[str] = []  # what prices and times assume
    models: dict[str, Any]
    warnings: list[str] = []
    dataset_samples: int
    epochs: int
    memory_limit_bytes: int | None = None

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    @property
    def pareto(self) -> list[Candidate]:
        """The Pareto front of expected wall time and cost, fastest first; without a wall time that of the steps."""

        def key(candidate: Candidate) -> tuple[float, float]:
            wall_time_s = candidate.wall_time_s
            return candidate.train_time_s if wall_time_s is None else wall_time_s, candidate.cost

        return sorted((candidate for candidate in self.candidates if candidate.pareto), key=key)


class Event(Record):
    """One line of events.jsonl."""

    time: float
    event: Literal[
        "submitted",
        "started",
        "oom",
        "preempted",
        "requeued",
        "resumed",
        "checkpoint",
        "fell_back",
        "drifted",
        "recovered",
        "replanned",
        "tuned",
        "finished",
        "failed",
        "ended",
        "detached",
    ]
    stage: Literal["profile", "plan", "train", "report", "control"]
    detail: str = ""
    failure: Failure | None = None
    job_id: JobId = ""
    data: dict[str, Any] = {}


R = TypeVar("R", bound=BaseModel)


class ReadResult(NamedTuple, Generic[R]):
    """Records that could be read, and how many lines could not."""

    records: list[R]
    skipped: int


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


def rank_file(path: Path, rank: int) -> Path:
    """The file of one rank beside rank 0's: appending from several clients of a network file system is not atomic."""
    return path if rank == 0 else path.with_name(f"{path.stem}-r{rank}.jsonl")


def with_rank_files(path: Path) -> list[Path]:
    """Rank 0's file and those that other ranks wrote beside it."""
    return [path, *sorted(path.parent.glob(f"{path.stem}-r*.jsonl"))]


def notes_file(path: Path) -> Path:
    """The notes of the job that writes measurements to `path`."""
    return path.with_suffix(".notes")


def read_records(kind: type[R], paths: Iterable[Path]) -> ReadResult[R]:
    """Read JSON Lines files that exist; lines that are torn or not of this kind are skipped and counted.

    Raises:
        RunDirectoryError: A file is there and cannot be read, or is out of all bounds.
    """
    records: list[R] = []
    skipped = 0
    for path in paths:
        for line in _lines(path):
            try:
                records.append(parse_record(kind, line))
            except ValueError:
                skipped += 1
    return ReadResult(records, skipped)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines that are not blank; of one that is too long only the beginning, which is no record."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_LINES_BYTES:
                raise RunDirectoryError(f"expected at most {MAX_LINES_BYTES:,} bytes", source=path)
            while line := file.readline(MAX_LINE_BYTES):
                if line.strip():
                    yield line
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"cannot be read: {in_words(error)}", source=path) from None


# what may be a number that is none, or too large: worth a closer look
_SUSPECT = re.compile(rb"NaN|Infinity|\d{18}|[eE]\+?\d{3}")


def parse_record(kind: type[R], text: bytes) -> R:
    """A record from JSON.

    Raises:
        ValueError: It is not one, or holds a number that is not finite or out of all bounds.
    """
    record = kind.model_validate_json(text)
    if _SUSPECT.search(text):
        _check_numbers(json.loads(text))
    return record


def _check_numbers(value: Any) -> None:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_numbers(item)
    elif isinstance(value, int | float) and not abs(value) <= (MAX_FLOAT if isinstance(value, float) else 2**63):
        raise ValueError(f"holds the number {value:.3g}")


_ANEW = "delete it to have it made anew"


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
    except ValidationError as error:
        raise RunDirectoryError(f"is damaged: {_first_of(error)}; {_ANEW}", source=path) from None
    except ValueError as error:
        raise RunDirectoryError(f"is damaged: {error}; {_ANEW}", source=path) from None


def _first_of(error: ValidationError) -> str:
    """The first of pydantic's complaints in one line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"][:6]))
    return " ".join(f"{where[:200]}: {first['msg']}".removeprefix(": ").split())[:500]


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


def _check_room(folder: Path) -> None:
    """Refuse a folder of a run that might hold what someone else wants us to read or execute."""
    with contextlib.suppress(FileNotFoundError):
        if reason := mistrust(folder):
            raise RunDirectoryError(reason, source=folder)


def _note_owner(lock: Path, descriptor: int) -> None:
    """Write down who holds the lock, in place: a new file would not be the locked one."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    except OSError as error:
        raise StorageError(f"{lock}: cannot be written: {in_words(error)}") from None


class RunDirectory:
    """Paths inside one run directory. It and its folders have mode 0700: they hold pickles that are executed.

    The folders above it are not checked, since those of a group, writable for all of it, are usual on clusters. Whoever
    may write there can put the run directory away, but put none in its place that would belong to us.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def create(self) -> RunDirectory:
        """Make the directory and its rooms; what is there already is checked first.

        Raises:
            RunDirectoryError: It, or a room, belongs to someone else, others may write to it, or a link leads to it.
            OSError: It cannot be made.
        """
        self.check_name()
        self._refuse_foreign_link()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check_owner()
        self.root.chmod(0o700)
        rooms = (self.profile, self.slurm, self.root / "train")
        for room in rooms:
            room.mkdir(mode=0o700, exist_ok=True)
        for room in (*rooms, self.report):
            _check_room(room)
        return self

    def check_name(self) -> None:
        """Refuse a path that would not be itself in a job script: Slurm and submitit fill in what stands behind a %.

        Raises:
            RunDirectoryError: It holds characters that have a meaning there.
        """
        wrong = [letter for letter in str(self.root) if letter in "%\\" or not letter.isprintable()]
        if wrong:
            shown = "".join(letter if letter.isprintable() else "?" for letter in str(self.root))
            message = f"a run directory's path may not hold {wrong[0]!a}; use another --run-dir"
            raise RunDirectoryError(message, source=shown)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from working on this run at the same time; the kernel lets go when the process ends.

        Raises:
            RunDirectoryError: Another one holds it; the message says who.
            StorageError: The owner cannot be written down.
        """
        path = self.root / ".lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {in_words(error)}") from None
        with os.fdopen(descriptor, "r+", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = file.read(200).strip() or "another command"
                raise RunDirectoryError(f"is in use by {owner}", source=self.root) from None
            _note_owner(path, descriptor)
            yield

    def check_owner(self) -> None:
        """Refuse a directory that another user owns, may write to, or leads to by a link.

        Raises:
            RunDirectoryError: It may not be used.
        """
        self._refuse_foreign_link()
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            raise RunDirectoryError(
                f"belongs to user id {status.st_uid}, not to you; use another --run-dir", source=self.root
            )
        if any(self.root.iterdir()) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            message = "others may write to it, and its pickles are executed; chmod 700 it if you trust what it holds"
            raise RunDirectoryError(message, source=self.root)

    def _refuse_foreign_link(self) -> None:
        link = foreign_link(self.root)
        if link is not None:
            message = f"the link {link} on the way to it belongs to another user; use the folder that it stands for"
            raise RunDirectoryError(message, source=self.root)

    def make_train(self, label: str = "main") -> TrainDirectory:
        """The folder of one training, made if it is missing.

        Raises:
            RunDirectoryError: It belongs to someone else, others may write to it, or it is a link.
            StorageError: It cannot be made.
        """
        files = self.train(label)
        try:
            make_private(files.root)
        except OSError as error:
            raise StorageError(f"{files.root}: cannot be made: {in_words(error)}") from None
        _check_room(files.root)
        return files

    @property
    def profile(self) -> Path:
        """Folder of measurements, one file per array task."""
        return self.root / "profile"

    @property
    def slurm(self) -> Path:
        """Submitit's folder: scripts, pickles, stdout, stderr."""
        return self.root / "slurm"

    @property
    def report(self) -> Path:
        """Folder of figures, tables and the report."""
        return self.root / "report"

    @property
    def sweep_file(self) -> Path:
        """The frozen sweep."""
        return self.root / "sweep.toml"

    @property
    def cluster_file(self) -> Path:
        """The frozen cluster."""
        return self.root / "cluster.toml"

    def footprint_file(self, partition: str = "") -> Path:
        """The estimate of memory before any profile, on one part of the cluster."""
        name = f"footprint-{partition}" if partition else "footprint"
        return self.root / f"{name.replace('/', '_')}.json"

    @property
    def plan_file(self) -> Path:
        """The plan."""
        return self.root / "plan.json"

    @property
    def rates_file(self) -> Path:
        """The learning rates that a study chose."""
        return self.root / "study_rates.json"

    def footprints(self, partitions: Iterable[str]) -> dict[str, Footprint]:
        """Those estimates that are there and not damaged, by partition."""
        found = {}
        for name in partitions:
            with contextlib.suppress(FileNotFoundError, RunDirectoryError):
                found[name] = read_document(Footprint, self.footprint_file(name))
        return found

    @property
    def events_file(self) -> Path:
        """Events of all stages."""
        return self.root / "events.jsonl"

    def train(self, label: str = "main") -> TrainDirectory:
        """Files of one training.

        Raises:
            RunDirectoryError: The label leads out of the run directory.
        """
        if Path(label).is_absolute() or ".." in Path(label).parts:
            raise RunDirectoryError(f"{label!r} is no name of a training", source=self.root)
        return TrainDirectory(self.root / "train" / label)

    def measurements(self) -> ReadResult[Measurement]:
        """All measurements, in order of file name and line."""
        return read_records(Measurement, sorted(self.profile.glob("*.jsonl")))

    def job_notes(self) -> list[JobNote]:
        """What all profile jobs said of themselves, job by job."""
        return read_records(JobNote, sorted(self.profile.glob("*.notes"))).records

    def events(self) -> list[Event]:
        """All events, in the order they were written."""
        return read_records(Event, [self.events_file]).records

    def log_event(self, event: str, stage: str, **fields: Any) -> None:
        """Append one event with the time of now."""
        append_record(self.events_file, Event(time=time.time(), event=event, stage=stage, **fields))

    def read_plan(self) -> Plan:
        """Read plan.json.

        Raises:
            RunDirectoryError: There is none, or it is damaged.
        """
        try:
            return read_document(Plan, self.plan_file)
        except FileNotFoundError:
            raise RunDirectoryError("no plan yet; run the sweep with --until plan", source=self.plan_file) from None

    def read_rates(self) -> TunedRates | None:
        """Read study_rates.json; None where there is none.

        Raises:
            RunDirectoryError: It is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_document(TunedRates, self.rates_file)
        return None


class TrainDirectory(NamedTuple):
    """Files of one training."""

    root: Path

    @property
    def metrics_file(self) -> Path:
        """One line per logged step and per epoch."""
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def drift_file(self) -> Path:
        """There while measured step times lie beyond the plan's prediction: a `Drift`."""
        return self.root / "drift.json"

    @property
    def result_file(self) -> Path:
        """Written once, at the end of training."""
        return self.root / "result.json"

    def read_result(self) -> TrainResult | None:
        """Read result.json; None where training has not ended.

        Raises:
            RunDirectoryError: It is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_document(TrainResult, self.result_file)
        return None


SCALE_OCTAVES = 6  # histograms of the scale reach so far on each side of 1
SCALE_BINS_PER_OCTAVE = 6


class StepMetrics(Record):
    """A line of metrics.jsonl for a logged step."""

    kind: Literal["step"] = "step"
    step: int  # optimizer steps taken since the start of training
    samples_seen: int
    epoch: float
    loss: float
    lr: float
    step_time_s: float  # mean over the steps since the last logged one
    sensitivity: float | None = None  # Δ(G)
    gradient_norm: float | None = None
    scaled: float | None = None  # share of the steps since the last line whose gradient was scaled
    scale_mean: float | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    data_time_s: float | None = None  # part of step_time_s: rank 0's wait for the loader, mean
    noise_scale: float | None = None  # samples, tr(Σ)/|G|² smoothed over the updates of the scale so far
    noise_gradient_square: float | None = None  # |G|² of the updates since the last line, unbiased, so of any sign
    noise_trace: float | None = None  # tr(Σ) of the same updates
    # elements × steps since the last line by the scale that was applied: how many below the bins, those in the bins
    # around 2^(k / SCALE_BINS_PER_OCTAVE) from 2^−SCALE_OCTAVES to 2^SCALE_OCTAVES, and those above
    scale_histogram: list[int] | None = None
    attempt: int | None = None  # while settings are tuned: which run of a round, see `RollbackMetrics`


class EpochMetrics(Record):
    """A line of metrics.jsonl at the end of an epoch."""

    kind: Literal["epoch"] = "epoch"
    epoch: int  # epochs completed
    step: int
    samples_seen: int
    global_batch: Batch
    train_loss: float
    test_loss: float
    test_accuracy: float  # share of 1
    test_top5_accuracy: float
    epoch_time_s: float  # training steps only; without evaluation and checkpoints
    steps: int  # steps in this epoch that epoch_time_s covers
    complete: bool = True  # False: a restart fell into the epoch, so that epoch_time_s covers only a part
    noise_scale: float | None = None  # samples, as of the end of the epoch
    critical_batch: float | None = None  # samples, mean tr(Σ) over mean |G|² of the updates since the last such line
    attempt: int | None = None  # see `StepMetrics`


class CurvatureMetrics(Record):
    """A line of metrics.jsonl for the curvature of the training loss on a fixed batch, between two epochs.

    Numbers are None where memory did not suffice, or they are not finite.
    """

    kind: Literal["curvature"] = "curvature"
    epoch: int  # epochs completed; 0: before the first step
    step: int
    samples_seen: int
    samples: int  # of the fixed batch
    eigenvalue: float | None = None  # of the Hessian, largest in magnitude
    residual: float | None = None  # an eigenvalue lies within so much of it
    iterations: int | None = None  # Hessian-vector products
    largest_eigenvalue: float | None = None  # algebraically; another one only where the former is negative
    largest_residual: float | None = None
    gradient_norm: float | None = None  # on the same batch
    attempt: int | None = None  # see `StepMetrics`


class RollbackMetrics(Record):
    """A line of metrics.jsonl: tuning rolled a run of a round back, so the lines of that attempt are no progress."""

    kind: Literal["rollback"] = "rollback"
    attempt: int


class StepParts(Record):
    """Seconds of the parts of a step that are timed apart, the slowest worker's; None where one is not known."""

    data_time_s: float | None = None  # waiting for the loader
    compute_time_s: float | None = None  # forward and backward without synchronization
    allreduce_time_s: float | None = None  # bare all-reduce of the gradient's bytes


class Drift(Record):
    """drift.json: a training whose step times lie beyond the plan's prediction, and which part it is."""

    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    measured_s: float
    predicted_s: float
    part: str  # compute, network, loader or unknown
    partition: str = ""
    measured: StepParts
    expected: StepParts

    @property
    def configuration(self) -> Configuration:
        """What was trained with."""
        return Configuration(self.nodes, self.workers_per_node, self.local_batch)


class TuningOutcome(Record):
    """What tuning within a training came to."""

    delta: float  # at the end
    small_batch: int
    settings: int  # candidates, the configured one included
    tried: int
    pruned: int
    rollbacks: int
    lost_samples: int  # trained on in runs that were rolled back; not in the result's samples_seen
    lost_s: float  # of training steps in them; not in the result's train_time_s


class TrainResult(Record):
    """result.json: how training ended."""

    label: str
    nodes: Nodes
    workers_per_node: WorkersPerNode
    local_batch: Batch
    global_batch: Batch
    method: str
    epochs: int
    steps: int
    samples_seen: int
    final_loss: float
    test_accuracy: float
    test_top5_accuracy: float
    train_time_s: float  # sum of epoch_time_s
    wall_time_s: float  # from the first start to the end, with queueing between restarts
    restarts: int
    diverged: bool = False  # of a study: the loss was not finite, which ended it; its accuracies are 0
    train_accuracy: float | None = None  # of a study: on a fixed choice of training samples, not augmented
    train_top5_accuracy: float | None = None
    tuning: TuningOutcome | None = None  # None: nothing was tuned


class RateTrial(Record):
    """One rate that was tried for a study, on training samples held out for that."""

    family: str  # of optimizers, see `TunedRates.rates`
    lr: float
    accuracy: float | None  # None: it diverged


class TunedRates(Record):
    """study_rates.json: workload.lr as chosen for a study at its small batch, and from what."""

    rates: dict[str, float]  # by family: the base optimizer, or the method where that changes its step (lars, lamb)
    trials: list[RateTrial]


AnyMetrics = StepMetrics | EpochMetrics | CurvatureMetrics | RollbackMetrics


class _AnyMetrics(RootModel[AnyMetrics]):
    root: AnyMetrics = Field(discriminator="kind")


class Metrics(NamedTuple):
    """metrics.jsonl, split by kind."""

    steps: list[StepMetrics]
    epochs: list[EpochMetrics]
    skipped: int
    curvature: Sequence[CurvatureMetrics] = ()


def read_metrics(path: Path) -> Metrics:
    """Read metrics.jsonl. Lines of a run that was rolled back to a checkpoint are superseded by the later ones.

    Those of a run that tuning rolled back for good are left out.
    """
    rows, skipped = read_records(_AnyMetrics, [path])
    rolled_back = {row.root.attempt for row in rows if isinstance(row.root, RollbackMetrics)}
    steps: dict[int, StepMetrics] = {}
    epochs: dict[int, EpochMetrics] = {}
    curvature: dict[int, CurvatureMetrics] = {}
    for row in rows:
        if isinstance(row.root, RollbackMetrics) or (row.root.attempt in rolled_back):
            continue
        if isinstance(row.root, StepMetrics):
            steps[row.root.samples_seen] = row.root
        elif isinstance(row.root, EpochMetrics):
            epochs[row.root.epoch] = row.root
        else:
            curvature[row.root.epoch] = row.root
    return Metrics(_in_order(steps), _in_order(epochs), skipped, _in_order(curvature))


def _in_order(rows: dict[int, R]) -> list[R]:
    return [rows[key] for key in sorted(rows)]
