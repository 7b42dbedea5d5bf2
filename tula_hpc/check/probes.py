"""Measurements that the workers of `tula_hpc.check` take on their nodes.

No probe may hide the findings of another: each is limited in time, its error is part of the report,
and the report is on disk before the next probe begins. Probes that can kill the job, or end it on
purpose, come last.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.distributed_c10d import Store

from tula_hpc.check.reports import (
    Data,
    Device,
    Host,
    Interface,
    Loader,
    Meeting,
    Probe,
    RankReport,
    Requeue,
    Signal,
)
from tula_hpc.check.speed import PROBE_S, time_collectives, time_compute, time_transfer
from tula_hpc.config import ClusterSpec
from tula_hpc.data.datasets import build_data
from tula_hpc.data.loader import make_train_loader
from tula_hpc.ddp.process_group import backend_of, check_kernels, pick_device, place_among
from tula_hpc.ddp.rendezvous import meet
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import (
    WorkerEnvironment,
    failed_setup,
    node_name,
    slurm_job_id,
    socket_interface,
    visible_gpus,
)
from tula_hpc.errors import InputError, LaunchError
from tula_hpc.launch import slurm
from tula_hpc.records import Record, write_atomically

if TYPE_CHECKING:
    from tula_hpc.check.job import CheckJob

# how long workers wait for each other: a node's first import of torch from a file server takes a
# minute
PATIENCE = timedelta(seconds=90)
LOADER_S = 3.0
LOADER_BATCH = 64
# how long to wait for a signal, which Slurm delivers within a second or two
SIGNAL_S = 15.0
NET = Path("/sys/class/net")
# constants of netdevice(7)
SIOCGIFFLAGS, IFF_RUNNING = 0x8913, 0x40
INFINIBAND = Path("/sys/class/infiniband")


def run_probes(job: CheckJob, env: WorkerEnvironment, stop: StopRequest) -> None:
    """Measure one worker's part of the job and report it."""
    place = place_among(env, job.nodes, job.cluster.workers_per_node) or env
    reporter = Reporter(job.report_file(env.rank), place)
    reporter.note(host=describe_host(backend_of(job.cluster)))
    reporter.attempt(Probe.DEVICE, lambda: describe_device(job.cluster, place))
    peers = Peers(place)
    reporter.attempt(Probe.MEETING, peers.meet, limit_s=PATIENCE.seconds + PROBE_S)
    torch.set_num_threads(job.cluster.cpus_per_worker)
    peers.wait()
    reporter.attempt(Probe.COMPUTE, lambda: time_compute(job.cluster, place))
    if job.cluster.device == "cuda":
        peers.wait()
        reporter.attempt(Probe.TRANSFER, lambda: time_transfer(job.cluster, place))
    if place.on_slurm:
        peers.wait()
        reporter.attempt(Probe.SIGNAL, lambda: await_signal(place, stop))
    folder = job.workload.data_dir
    if folder is not None:
        reporter.attempt(Probe.DATA, lambda: look_into(folder))
    if not job.workload.is_script:
        peers.wait()
        reporter.attempt(Probe.LOADER, lambda: time_loader(job, place))
    reporter.attempt(
        Probe.COLLECTIVES, lambda: time_collectives(job, place, reporter.report, peers)
    )
    if Probe.COLLECTIVES in reporter.report.errors:
        # other workers may wait for this one in a collective: if it exits, srun -K1 ends them
        raise SystemExit(1)
    if place.rank > 0 or not place.on_slurm:
        reporter.finish()
        peers.leave()
        return
    peers.leave()
    # A granted requeue ends the job; the report has Slurm's KillWait to reach the disk.
    reporter.attempt(
        Probe.REQUEUE, lambda: Requeue(refused=slurm.requeue(slurm_job_id() or "") or "")
    )
    reporter.finish()


class Reporter:
    """Keeps one worker's report on disk."""

    def __init__(self, path: Path, place: WorkerEnvironment) -> None:
        self.path = path
        self.report = RankReport(
            rank=place.rank,
            node_rank=place.node_rank,
            local_rank=place.local_rank,
            world_size=place.world_size,
            # the name that [sbatch] exclude takes
            hostname=node_name(),
            visible_gpus=visible_gpus(),
        )

    def attempt(self, probe: Probe, measure: Callable[[], Record], limit_s: int = PROBE_S) -> None:
        """Run a probe, and report its result or its error."""
        self.note(at_work_on=probe)
        try:
            with _time_limit(limit_s):
                found = measure()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the node is a finding
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            self.note(errors={**self.report.errors, probe: text})
        else:
            self.note(**{probe.value: found})

    def finish(self) -> None:
        """Mark the report as finished."""
        self.note(at_work_on=None, finished=True)

    def note(self, **fields: object) -> None:
        """Add to the report, and save it."""
        self.report = self.report.model_copy(update=fields)
        write_atomically(self.path, self.report.model_dump_json())


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this thread's Python code when the time is over."""

    def end(_number: int, _frame: object) -> None:
        raise TimeoutError(f"did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Peers:
    """The other workers, reached through a store like that in which a training's workers meet."""

    def __init__(self, place: WorkerEnvironment) -> None:
        self.place = place
        self.store: Store | None = None
        self._rounds = 0

    def meet(self) -> Meeting:
        """Meet the other workers, and return how long that took."""
        began = time.monotonic()
        if self.place.world_size > 1:
            self.store = meet(self.place, PATIENCE)
        return Meeting(seconds=time.monotonic() - began)

    def wait(self) -> None:
        """Wait until all workers begin the next probe, or give up on them for good."""
        self.exchange("")

    def exchange(self, message: str) -> list[str]:
        """Return each worker's message, by rank; only this worker's own if another is missing."""
        self._rounds += 1
        if self.store is None:
            return [message]
        try:
            keys = self._keys()
            self.store.set(keys[self.place.rank], message)
            self.store.wait(keys, PATIENCE)
            return [self.store.get(key).decode() for key in keys]
        except RuntimeError:
            self.store = None
            return [message]

    def leave(self) -> None:
        """Leave the store; rank 0, which serves it, waits until all others have left."""
        if self.place.rank == 0:
            self.wait()
        elif self.store is not None:
            self._rounds += 1
            with contextlib.suppress(RuntimeError):
                self.store.set(self._keys()[self.place.rank], "")

    def _keys(self) -> list[str]:
        return [f"check/{self._rounds}/{rank}" for rank in range(self.place.world_size)]


def describe_host(backend: str) -> Host:
    """Describe the node's cores, limits and interfaces."""
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = os.statvfs("/dev/shm")  # noqa: S108 - nothing is written there
    return Host(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        node_cores=os.cpu_count() or 1,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        open_files=open_files,
        shm_free_bytes=shared.f_bavail * shared.f_frsize,
        interfaces=(*_interfaces(), *_infiniband_ports()),
        wanted_interface=socket_interface(backend),
        failed_setup=failed_setup(),
    )


def _interfaces() -> Iterator[Interface]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for index, name in socket.if_nameindex():
            request = struct.pack("16s16x", name.encode())
            answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
            (flags,) = struct.unpack_from("H", answer, 16)
            yield Interface(name=name, up=bool(flags & IFF_RUNNING), mbit=_speed_mbit(index, name))


def _speed_mbit(index: int, name: str) -> int | None:
    # in a container /sys may show the interfaces of another network namespace
    if _read(NET / name / "ifindex") != str(index):
        return None
    speed = _read(NET / name / "speed")
    return int(speed) if speed.isdecimal() else None


def _infiniband_ports() -> Iterator[Interface]:
    for path in sorted(INFINIBAND.glob("*/ports/*")):
        up = _read(path / "state").endswith("ACTIVE")
        # for example "100 Gb/sec (4X EDR)"
        gbit = _read(path / "rate").partition(" ")[0]
        mbit = round(1000 * float(gbit)) if gbit.replace(".", "", 1).isdecimal() else None
        yield Interface(name=f"{path.parts[-3]}:{path.name}", up=up, mbit=mbit, infiniband=True)


def _read(path: Path) -> str:
    """Return a line of sysfs; "" if the kernel refuses, as it does for interfaces that are down."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def describe_device(cluster: ClusterSpec, place: WorkerEnvironment) -> Device:
    """Describe the device that a training would choose here.

    Raises:
        InputError: There is no device for this worker, see `pick_device`.
    """
    device = pick_device(cluster, place.local_rank)
    if device.type == "cpu":
        return Device(name=_processor(), torch=torch.__version__)
    properties = torch.cuda.get_device_properties(device)
    found = Device(
        name=properties.name,
        torch=torch.__version__,
        uuid=str(properties.uuid),
        capability=f"{properties.major}.{properties.minor}",
        architectures=tuple(torch.cuda.get_arch_list()),
        has_kernels=_has_kernels(device),
        driver=_driver(),
        nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        total_bytes=properties.total_memory,
    )
    with contextlib.suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info(device)
        found = found.model_copy(update={"free_bytes": free, "total_bytes": total})
    return found


def _has_kernels(device: torch.device) -> bool:
    try:
        check_kernels(device)
    except InputError:
        return False
    return True


def _driver() -> str:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - NVML's own errors can only be named where it is installed
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, os.uname().machine)


def await_signal(place: WorkerEnvironment, stop: StopRequest) -> Signal:
    """Have Slurm send USR2 to all workers, as it does before a time limit, and await the signal."""
    refused = ""
    if place.rank == 0:
        try:
            slurm.run_command(["scancel", "--signal=USR2", slurm_job_id() or ""], SIGNAL_S)
        except LaunchError as error:
            refused = slurm.in_one_line(error)
    ends = time.monotonic() + SIGNAL_S
    while stop.received is None and time.monotonic() < ends:
        time.sleep(0.05)
    return Signal(arrived=stop.received is signal.SIGUSR2, refused=refused)


def look_into(folder: Path) -> Data:
    """Find out whether this node sees the data folder and may read it."""
    return Data(
        folder=str(folder), readable=folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)
    )


def time_loader(job: CheckJob, place: WorkerEnvironment) -> Loader:
    """Time the loader alone, on all workers at once, once prefetched batches are used up."""
    spec = job.workload
    train = build_data(spec).train
    samples = len(train)  # type: ignore[arg-type] # checked when the data was built
    batch = max(1, min(LOADER_BATCH, samples // place.world_size))
    loader = make_train_loader(
        train,
        local_batch=batch,
        rank=place.rank,
        world_size=place.world_size,
        seed=spec.seed,
        loader_workers=spec.loader_workers,
        pin_memory=job.cluster.device == "cuda",
    )
    batches = loader.stream()
    round_length = max(1, spec.loader_workers)
    for _ in range(3 * round_length):
        next(batches)
    began = time.perf_counter()
    rounds = 0
    # loader processes that began together deliver in bursts: only whole rounds show the rate
    while time.perf_counter() - began < LOADER_S:
        for _ in range(round_length):
            next(batches)
        rounds += 1
    seconds = time.perf_counter() - began
    return Loader(
        dataset=spec.dataset,
        processes=spec.loader_workers,
        images=rounds * round_length * batch,
        seconds=seconds,
    )
