"""Reports of the workers of `tula_hpc.check`, and queries on several reports. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from pydantic import Field

from tula_hpc.formatting import in_short
from tula_hpc.records import Record

T = TypeVar("T")

VIRTUAL_INTERFACES = ("lo", "docker", "virbr", "br-", "cni", "tun")


class Probe(StrEnum):
    """Measurement by a worker; its result is the field of `RankReport` with the same name."""

    DEVICE = "device"
    MEETING = "meeting"
    COMPUTE = "compute"
    TRANSFER = "transfer"
    SIGNAL = "signal"
    DATA = "data"
    LOADER = "loader"
    COLLECTIVES = "collectives"
    REQUEUE = "requeue"


class Scope(StrEnum):
    """Workers that take part in a timed all-reduce."""

    ALL = "all"
    NODE = "node"
    BETWEEN = "between"


class Skip(StrEnum):
    """Reason why no collective was tried: there is one worker, or it would have failed or hung."""

    SINGLE_WORKER = "single_worker"
    NO_DEVICE = "no_device"
    MISSING_INTERFACE = "missing_interface"
    SHARED_DEVICE = "shared_device"
    NOT_MET = "not_met"


class Interface(Record):
    """A network interface as the kernel shows it in /sys/class/net or /sys/class/infiniband."""

    name: str
    up: bool
    mbit: int | None = None
    infiniband: bool = False


class Host(Record):
    """A worker's node, described before torch is imported."""

    cores: tuple[int, ...]
    node_cores: int
    # limit of locked memory; None: unlimited
    memlock_bytes: int | None
    open_files: int
    shm_free_bytes: int
    interfaces: tuple[Interface, ...]
    # value of the variable that names the collectives' interface (NCCL_SOCKET_IFNAME or gloo's)
    wanted_interface: str = ""
    # message about the first command of setup that failed
    failed_setup: str = ""

    def lacks_interface(self, backend: str) -> bool:
        """Tell whether this node lacks all interfaces that the variable names."""
        wanted = [name for name in self.wanted_interface.split(",") if name]
        if not wanted or self.wanted_interface.startswith("^"):
            return False
        return not self.chosen_interfaces(backend)

    def up_interfaces(self, backend: str) -> list[Interface]:
        """Return the interfaces that collectives over sockets may use and that are up."""
        return [each for each in self.chosen_interfaces(backend) if each.up]

    def chosen_interfaces(self, backend: str) -> list[Interface]:
        """Return the interfaces that collectives over sockets may use, by the libraries' own rules.

        gloo reads the variable as exact names. NCCL reads it as prefixes, after "=" as exact names,
        and after "^" as names to leave out.
        """
        sockets = [each for each in self.interfaces if not each.infiniband]
        value = self.wanted_interface
        if not value:
            return [each for each in sockets if not each.name.startswith(VIRTUAL_INTERFACES)]
        names = tuple(name for name in value.lstrip("^=").split(",") if name)
        if backend == "gloo" or value.lstrip("^").startswith("="):
            matching = [each for each in sockets if each.name in names]
        else:
            matching = [each for each in sockets if each.name.startswith(names)]
        if value.startswith("^"):
            return [each for each in sockets if each not in matching and each.name != "lo"]
        return matching


class Device(Record):
    """The device of one worker; of a CPU only the name is known."""

    name: str
    torch: str
    uuid: str = ""
    capability: str = ""
    architectures: tuple[str, ...] = ()
    has_kernels: bool = True
    driver: str = ""
    nccl: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None


class Meeting(Record):
    """Time that this worker took to meet the others."""

    seconds: float


class Compute(Record):
    """Timed matrix products of one size, one after another."""

    flops: float
    times_s: tuple[float, ...]


class Transfer(Record):
    """Timed copies from pinned host memory to the device."""

    payload_bytes: int
    times_s: tuple[float, ...]


class Signal(Record):
    """Arrival of USR2, which Slurm sent to the whole job."""

    arrived: bool
    # error of scancel, on the worker that ran it
    refused: str = ""


class Data(Record):
    """The workload's data folder, as this node sees it."""

    folder: str
    readable: bool


class Loader(Record):
    """Images that the workload's loader delivered after its prefetched batches."""

    dataset: str
    processes: int
    images: int
    seconds: float


class AllReduce(Record):
    """A timed all-reduce of the gradient bucket's size."""

    scope: Scope
    workers: int
    payload_bytes: int
    times_s: tuple[float, ...]


class Collectives(Record):
    """All-reduces over the backend that training uses, or why none was tried."""

    backend: str
    skipped: Skip | None = None
    timed: tuple[AllReduce, ...] = ()


class Requeue(Record):
    """The controller's answer to a requeue of this very job; `refused` is "" if it was granted."""

    refused: str


class RankReport(Record):
    """Report of one worker, saved after each probe, because the next may kill the process."""

    rank: int
    node_rank: int
    local_rank: int
    world_size: int
    hostname: str
    # Slurm's names of the GPUs that the worker may use; empty outside Slurm
    visible_gpus: tuple[str, ...] = ()
    host: Host | None = None
    device: Device | None = None
    meeting: Meeting | None = None
    compute: Compute | None = None
    transfer: Transfer | None = None
    signal: Signal | None = None
    data: Data | None = None
    loader: Loader | None = None
    collectives: Collectives | None = None
    requeue: Requeue | None = None
    at_work_on: Probe | None = None
    errors: dict[Probe, str] = Field(default={})
    finished: bool = False


def workers_by_host(reports: Iterable[RankReport]) -> Counter[str]:
    """Count the workers on each host."""
    return Counter(report.hostname for report in reports)


def having(
    reports: Sequence[RankReport], result: Callable[[RankReport], T | None]
) -> list[tuple[RankReport, T]]:
    """Return each report that has a result, with the result."""
    pairs = [(report, result(report)) for report in reports]
    return [(report, found) for report, found in pairs if found is not None]


def hosts_of(reports: Sequence[RankReport]) -> list[tuple[RankReport, Host]]:
    """Return each report that describes its host, with the host."""
    return having(reports, lambda report: report.host)


def hosts_where(known: Iterable[tuple[RankReport, T]], holds: Callable[[T], bool]) -> list[str]:
    """Return the names of the hosts whose result meets a condition."""
    return [report.hostname for report, result in known if holds(result)]


def named(hosts: Iterable[str]) -> str:
    """Name each host once; name only the first few of many."""
    return in_short(sorted(set(hosts)))
