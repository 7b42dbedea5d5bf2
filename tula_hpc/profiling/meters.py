"""Meters of a profile: power of the nodes, memory, and processor time.

Power is read as far as possible: for processors by RAPL, for GPUs by NVML. RAPL counts the energy
of processor packages in `/sys/class/powercap/intel-rapl:*` (AMD's too); often only root can read
the counters (since CVE-2020-8694), and then that part is unknown. NVML counts the energy of each
GPU since the driver was loaded, from Volta on. Neither includes power supplies, fans, memory and
network: a node draws more, by some tens of per cent.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tula_hpc import process_memory
from tula_hpc.batches import bytes_of, tensors_of
from tula_hpc.config import ClusterSpec
from tula_hpc.ddp.agreement import Agreeing
from tula_hpc.env import WorkerEnvironment
from tula_hpc.records import Configuration, MemoryUse
from tula_hpc.workloads.optimizers import is_divided, own_states

POWERCAP = Path("/sys/class/powercap")
MICRO = 1e-6
MILLI = 1e-3


class Power(NamedTuple):
    """Mean power over a time; None: unknown."""

    processors_w: float | None
    gpus_w: float | None

    @property
    def watts(self) -> float:
        """Sum of the known parts, 0 if there are none."""
        return (self.processors_w or 0.0) + (self.gpus_w or 0.0)


class EnergyReading(NamedTuple):
    """Energy counters of the whole node at a time, without the sources that cannot be read."""

    time_s: float
    rapl: Mapping[str, RaplCounter]
    gpu_joules: float | None


def read_energy(gpus: int = 0) -> EnergyReading:
    """Read the counters as they are now; those of GPUs only if at least `gpus` can be read."""
    joules = _nvml_joules(gpus)
    return EnergyReading(time.monotonic(), read_rapl(), joules)


def mean_power(began: EnergyReading, ended: EnergyReading) -> Power:
    """Return the node's mean power between two readings."""
    elapsed_s = max(ended.time_s - began.time_s, 1e-9)
    processors_w: float | None = None
    gpus_w: float | None = None
    if both := began.rapl.keys() & ended.rapl.keys():
        used = sum(_used(began.rapl[name], ended.rapl[name]) for name in both)
        processors_w = used * MICRO / elapsed_s
    if began.gpu_joules is not None and ended.gpu_joules is not None:
        gpus_w = max(0.0, ended.gpu_joules - began.gpu_joules) / elapsed_s
    return Power(processors_w, gpus_w)


class RaplCounter(NamedTuple):
    """Energy counter of a processor package."""

    microjoules: int
    # microjoules at which it begins at 0 again
    wraps_at: int


def read_rapl() -> dict[str, RaplCounter]:
    """Return the readable counters of processor packages by name; they include their parts."""
    found = {}
    for zone in sorted(POWERCAP.glob("intel-rapl:*")):
        # intel-rapl:0:1 is a part of intel-rapl:0
        if zone.name.count(":") != 1:
            continue
        try:
            # psys is the whole machine, packages included
            if (zone / "name").read_text().strip() == "psys":
                continue
            energy, limit = (
                int((zone / name).read_text()) for name in ("energy_uj", "max_energy_range_uj")
            )
        except (OSError, ValueError):
            continue
        found[zone.name] = RaplCounter(energy, limit)
    return found


def _used(began: RaplCounter, ended: RaplCounter) -> int:
    """Return the microjoules between two readings."""
    difference = ended.microjoules - began.microjoules
    if difference < 0:
        # the counter has wrapped once
        difference += ended.wraps_at
    return difference


def _nvml_joules(least: int) -> float | None:
    """Return the energy of all GPUs since their driver was loaded.

    None if NVML is too old, or shows fewer than `least`, as to a task that may use only some GPUs.
    """
    try:
        # pynvml is in the package nvidia-ml-py, which may be absent
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        energy = list(map(nvml.nvmlDeviceGetTotalEnergyConsumption, handles))
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
    return sum(energy) * MILLI if len(energy) >= max(1, least) else None


class Metered(Agreeing, Protocol):
    """Part of a worker that meters need."""

    @property
    def configuration(self) -> Configuration:
        """Nodes and workers."""

    @property
    def env(self) -> WorkerEnvironment:
        """Place among the workers."""

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all workers. Collective."""


class PowerMeter:
    """Mean power of the nodes over the timed steps, read by one worker of each; 0: unknown.

    It is the power of the whole node: unknown where the job shares its nodes, or where nodes are
    emulated on one machine.
    """

    def __init__(self, cluster: ClusterSpec, worker: Metered) -> None:
        self.worker = worker
        real = worker.configuration.nodes == 1 or worker.env.on_slurm
        self.reads = worker.env.local_rank == 0 and cluster.exclusive and real
        self.gpus = worker.configuration.workers_per_node if worker.device.type == "cuda" else 0
        self.began: EnergyReading | None = None
        self.watts = 0.0

    def start(self) -> None:
        """Begin."""
        if self.reads:
            self.began = read_energy(self.gpus)

    def stop(self) -> None:
        """End. Without its busy GPUs a node's power is unknown."""
        if self.began is not None:
            power = mean_power(self.began, read_energy(self.gpus))
            blind = self.gpus > 0 and power.gpus_w is None
            self.watts = 0.0 if blind else power.watts

    def mean(self) -> float:
        """Return the mean watts over the nodes of known power. Collective."""
        total, nodes = self.worker.total(self.watts, float(self.watts > 0))
        return total / nodes if nodes else 0.0


class MemoryMeter:
    """Peak memory over the timed steps: CUDA's allocator, or a process's growth on a CPU."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cuda = cluster.device == "cuda"
        self.baseline_bytes = 0
        if not self.cuda:
            gc.collect()
            process_memory.release_freed()
            self.baseline_bytes = process_memory.resident_bytes()
        self.peak_bytes = self.reserved_bytes = 0
        self.total_bytes: int | None = None
        self.other_bytes: int | None = None
        self.short = Counter[str]()

    @property
    def has_run_out(self) -> bool:
        """Tell whether the device's memory has ever run out; a script may have caught that."""
        return self.cuda and _times_short()["num_ooms"] > 0

    def start(self) -> None:
        """Reset the peaks."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.short = _times_short()
        else:
            process_memory.reset_peak()

    def stop(self) -> None:
        """Take the peaks since `start`."""
        if self.cuda:
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
            self.short = _times_short() - self.short
            free, total = torch.cuda.mem_get_info()
            self.total_bytes = total
            self.other_bytes = max(0, total - free - torch.cuda.memory_reserved())
        else:
            process = (
                process_memory.peak_resident_bytes() + process_memory.descendants_private_bytes()
            )
            self.peak_bytes = max(0, process - self.baseline_bytes)
            self.reserved_bytes = process

    def use(self, model: nn.Module, trained: Iterable[Tensor], *optimizers: Optimizer) -> MemoryUse:
        """Return the metered memory with the sizes of its known parts.

        `trained` are the model's parameters with a gradient.
        """
        states = {each: bytes_of(tensors_of(own_states(each))) for each in optimizers}
        return MemoryUse(
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            baseline_bytes=self.baseline_bytes,
            total_bytes=self.total_bytes,
            other_bytes=self.other_bytes,
            alloc_retries=self.short["num_alloc_retries"],
            ooms=self.short["num_ooms"],
            parameter_bytes=bytes_of(model.parameters()),
            gradient_bytes=bytes_of(trained),
            optimizer_bytes=sum(states.values()),
            sharded_bytes=sum(size for each, size in states.items() if is_divided(each)),
        )


def _times_short() -> Counter[str]:
    """Return torch's counts of failed allocations: "num_alloc_retries" and "num_ooms"."""
    stats = torch.cuda.memory_stats()
    return Counter({name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")})


def largest_over_workers(worker: Metered, use: MemoryUse) -> MemoryUse:
    """Return the largest of each count over the workers, the least device memory. Collective."""
    counts = {name: float(count) for name, count in use if count is not None}
    if use.total_bytes is not None:
        counts["total_bytes"] = -float(use.total_bytes)
    largest = worker.agree(*counts.values())
    return MemoryUse(**{name: abs(int(value)) for name, value in zip(counts, largest, strict=True)})


class ProcessorSeconds(NamedTuple):
    """Processor seconds of the loader's processes, and of the worker's own."""

    loader_s: float
    worker_s: float

    def since(self, earlier: ProcessorSeconds) -> ProcessorSeconds:
        """Return the difference."""
        return ProcessorSeconds(self.loader_s - earlier.loader_s, self.worker_s - earlier.worker_s)


def processor_seconds() -> ProcessorSeconds:
    """Return the processor seconds so far."""
    return ProcessorSeconds(process_memory.descendants_processor_s(), time.process_time())


def cores_of(worker: Metered) -> float:
    """Return the cores of a worker: its affinity, at most its share of the machine."""
    on_machine = worker.env.world_size
    if worker.env.on_slurm:
        on_machine = worker.configuration.workers_per_node
    return min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) / on_machine)
