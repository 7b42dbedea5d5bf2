"""How a configuration is measured: a step and its parts apart, and memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc import resident
from tula_hpc.config import ClusterSpec, SweepSpec, batches_timed_apart
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import DivergedError, Failure
from tula_hpc.forward_probe import time_forward
from tula_hpc.methods import pass_interval
from tula_hpc.nested import Batch, samples_in, take, tensors_of
from tula_hpc.noise_probe import NoiseEstimate, probe_noise
from tula_hpc.power import PowerMeter
from tula_hpc.records import Configuration, Measurement, MemoryUse, StepTimes, compute_of
from tula_hpc.timing import StoppingRule, median_interval, seconds_of, time_steps
from tula_hpc.worker import Worker, backend_of, describe_versions
from tula_hpc.workloads.optimizers import own_states, shards

BUCKET_BYTES = 25 * 1024**2  # DDP's default bucket: the bare all-reduce sends what DDP sends


class SharedTimes(NamedTuple):
    """What one configuration of a job tells of later ones."""

    allreduce_s: dict[int, float]  # bare all-reduce by world size: it does not depend on the batch
    computed: set[tuple[int, int]]  # world sizes and samples whose computation was timed

    @classmethod
    def none(cls) -> SharedTimes:
        """At the start of a job."""
        return cls({}, set())


def oom_record(
    cluster: ClusterSpec, configuration: Configuration, env: WorkerEnvironment, failure: Failure
) -> Measurement:
    """A measurement that says: this configuration does not fit."""
    facts = describe(configuration, cluster, env)
    return Measurement(status="oom", failure=failure, detail=f"rank {env.rank}", **facts)


def measure(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    configuration: Configuration,
    env: WorkerEnvironment,
    shared: SharedTimes | None = None,
    *,
    job_began_at: float | None = None,
) -> Measurement:
    """Measure one configuration: times apart by part of a step, and memory.

    Collective: every worker of the process group calls it; the result is whole on rank 0.

    Args:
        sweep: The workload, and how long to measure.
        cluster: The device.
        configuration: Nodes and local batch.
        env: This worker's place among those that measure.
        shared: What earlier configurations of the same job measured for this one too; what this one measures is added.
        job_began_at: Unix time, for the first configuration of a job: how long a start takes is measured too.
    """
    started = time.monotonic()
    memory = MemoryMeter(cluster)
    worker = Worker(_without_updates(sweep), cluster, configuration, env)
    profile = StepProfile(worker, _stopping_rule(sweep), shared)
    power = NodePower(cluster, worker)
    profile.run(memory, power)
    facts: dict[str, Any] = {
        **describe(configuration, cluster, env),
        **_measured(profile),
        "memory": _largest(worker, memory.use(worker, profile.batch_bytes)),
        "watts_per_node": power.mean(),
        "dataset_samples": worker.samples,
        "test_samples": len(worker.workload.test),  # type: ignore[arg-type] # checked when the data was built
        "updates_per_epoch": _updates_per_epoch(sweep, worker),
        "parameters": sum(p.numel() for p in worker.model.parameters()),
        "parts": worker.parts,
        "smaller_computes": profile.smaller_computes(),
        "start_s": 0.0 if job_began_at is None else max(0.0, profile.stepped_at - job_began_at),
    }
    worker.release()
    del worker, profile, power
    gc.collect()
    if cluster.device == "cuda":
        torch.cuda.empty_cache()
    return Measurement(status="ok", elapsed_s=time.monotonic() - started, finished_at=time.time(), **facts)


def _measured(profile: StepProfile) -> dict[str, Any]:
    """The part of a measurement that the timed steps give. Collective."""
    return {
        "times": profile.times(),
        "steps": len(profile.samples["step"]),
        "converged": profile.rule.converged(profile.samples["step"]),
        "samples": {name: [round(s, 7) for s in values] for name, values in profile.samples.items()},
        "noise_scale": profile.noise.noise_scale,
        "noise_samples": profile.noise.samples,
        "noise_terms": profile.noise.terms,
    }


def _updates_per_epoch(sweep: SweepSpec, worker: Worker) -> float:
    steps = worker.samples // worker.configuration.global_batch
    if worker.norms is not None or not sweep.training.free_reference:
        return sweep.updates_per_epoch(steps)
    return steps / pass_interval(sweep.training, worker.configuration, worker.samples)


def _without_updates(sweep: SweepSpec) -> SweepSpec:
    """The sweep with AGS's scale updates too far apart to fall among the timed steps: they are timed apart."""
    training = sweep.training.model_copy(update={"update_interval_epochs": 1e9})
    return sweep.model_copy(update={"training": training})


class StepProfile:
    """Times a step and its parts. The learning rate is 0 throughout, so that no weight can diverge meanwhile."""

    def __init__(self, worker: Worker, rule: StoppingRule, shared: SharedTimes | None = None) -> None:
        self.worker, self.rule = worker, rule
        self.shared = SharedTimes.none() if shared is None else shared
        self.samples: dict[str, list[float]] = {}
        self.computed: list[int] = []  # smaller batches whose computation was timed
        self.batch_bytes = 0
        self.noise = NoiseEstimate()
        self.stepped_at = math.inf  # Unix time at the end of the first step
        for group in worker.optimizer.param_groups:
            group["lr"] = 0.0
        self.batches = worker.batches()

    def run(self, memory: MemoryMeter, power: NodePower) -> None:
        """Warm up, then time whole steps (memory and power are metered here), and each part apart.

        Raises:
            DivergedError: The untrained model's loss is not finite already.
        """
        loss = torch.zeros(())
        for _ in range(self.worker.sweep.search.warmup_steps):
            loss = self.worker.train_step(*next(self.batches))
            self._note_first_step()
        (diverged,) = self.worker.agree(0.0 if math.isfinite(float(loss)) else 1.0)
        if diverged:
            raise DivergedError("the loss is not finite before any training: look at the model and at the data")
        power.start()
        memory.start()
        self.worker.train_step(*next(self.batches))  # it takes back the memory that metering gave to the kernel
        self._time_whole_steps()
        memory.stop()
        power.stop()
        inputs, targets = next(self.batches)
        self.batch_bytes = _bytes(tensors_of((inputs, targets)))
        self._time("compute", lambda: self._compute(inputs, targets))
        self._time_smaller_computes(inputs, targets)
        self._time_optimizer()
        if self.worker.sweep.training.adapts and self.worker.norms is None:  # else no update takes a pass
            self._compute(inputs, targets)  # the update looks at the gradients of a backward pass
            self._time("update", lambda: self.worker.update_gradscale(inputs, targets), briefly=True)
        if self.worker.env.world_size > 1 and self.worker.env.world_size not in self.shared.allreduce_s:
            self._time("allreduce", bare_all_reduce(self.worker), briefly=True)
        self.noise = probe_noise(self.worker, self.batches, self.worker.sweep.search.noise_steps)
        self.samples["forward"] = time_forward(self.worker, inputs, targets)

    def _note_first_step(self) -> None:
        if math.isinf(self.stepped_at):
            self.worker.synchronize_device()
            self.stepped_at = time.time()

    def _time_whole_steps(self) -> None:
        waits: list[float] = []

        def step() -> None:
            started = time.perf_counter()
            inputs, targets = next(self.batches)
            waits.append(time.perf_counter() - started)
            self.worker.train_step(inputs, targets)

        self._time("step", step)
        self.samples["data"] = waits

    def _time(self, name: str, step: Callable[[], None], *, briefly: bool = False) -> None:
        """With `briefly` the fewest steps allowed: for parts that only guide the model, or are small."""
        rule = self.rule._replace(max_steps=self.rule.min_steps) if briefly else self.rule
        self.samples[name] = time_steps(self.worker, rule, step)

    def _compute(self, inputs: Batch, targets: Batch, *, whole: bool = False) -> None:
        self.worker.optimizer.zero_grad(set_to_none=True)
        self.worker.forward_backward(inputs, targets, synchronize=False, whole=whole)

    def _time_smaller_computes(self, inputs: Batch, targets: Batch) -> None:
        """Of one part of the batch, where a step takes it in parts; and of other candidates' batches.

        They take turns: what disturbs the machine for seconds disturbs a few passes of each, which no median sees.
        """
        worker, batch = self.worker, samples_in(targets)
        part = math.ceil(batch / worker.parts)
        place = worker.configuration
        others = batches_timed_apart(worker.sweep.search, place.nodes, place.workers_per_node, batch)
        known = {size for world, size in self.shared.computed if world == place.world_size}
        self.computed = sorted({part, *others} - {batch} - (known - {part}))
        samples: dict[int, list[float]] = {size: [] for size in self.computed}
        for size in self.computed * self.rule.min_steps:
            compute = partial(self._compute, *take((inputs, targets), 0, size), whole=True)
            samples[size].append(seconds_of(worker, compute))
        self.samples |= {compute_of(size): seconds for size, seconds in samples.items()}
        whole = [batch] if part == batch else []
        self.shared.computed.update((place.world_size, size) for size in (*whole, *self.computed))

    def smaller_computes(self) -> tuple[tuple[int, float], ...]:
        """Medians for each smaller batch, the slowest worker's. Collective."""
        medians = [median_interval(self.samples[compute_of(size)]).median_s for size in self.computed]
        return tuple(zip(self.computed, self.worker.agree(*medians), strict=True)) if medians else ()

    def _time_optimizer(self) -> None:
        for parameter in self.worker.parameters:  # or each step would scale, in place, what the one before has scaled
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._time("optimizer", self.worker.optimizer.step, briefly=True)

    def times(self) -> StepTimes:
        """Medians, the slowest worker's for the parts that workers do alone. Collective."""
        whole = median_interval(self.samples["step"])
        parts = ("data", "compute", "optimizer", "allreduce", "update", "forward")
        medians = [median_interval(self.samples[part]).median_s if self.samples.get(part) else 0.0 for part in parts]
        data, compute, optimizer, allreduce, update, forward = self.worker.agree(*medians)
        allreduce = self.shared.allreduce_s.setdefault(self.worker.env.world_size, allreduce)
        return StepTimes(
            step_time_s=whole.median_s,
            step_time_low_s=whole.low_s,
            step_time_high_s=whole.high_s,
            data_time_s=data,
            compute_time_s=compute,
            optimizer_time_s=optimizer,
            allreduce_time_s=allreduce,
            update_time_s=update,
            forward_time_s=forward or None,
        )


class NodePower:
    """Mean power of the nodes over the timed steps, read by one worker of each; 0 where it is unknown.

    It is the whole node's, so that it means something only where the job has its nodes to itself. Emulated nodes are
    one machine.
    """

    def __init__(self, cluster: ClusterSpec, worker: Worker) -> None:
        self.worker = worker
        real = worker.configuration.nodes == 1 or worker.env.on_slurm
        self.meter = PowerMeter() if worker.env.local_rank == 0 and cluster.exclusive and real else None
        self.watts = 0.0

    def start(self) -> None:
        """Begin."""
        if self.meter is not None:
            self.meter.start()

    def stop(self) -> None:
        """End. Where the GPUs that work cannot be read, the rest of the node says little about them."""
        if self.meter is not None:
            power = self.meter.stop()
            blind = self.worker.device.type == "cuda" and power.gpus_w is None
            self.watts = 0.0 if blind else power.watts

    def mean(self) -> float:
        """Watts, the mean over the nodes whose power is known. Collective."""
        total, nodes = self.worker.total(self.watts, float(self.watts > 0))
        return total / nodes if nodes else 0.0


def bare_all_reduce(worker: Worker) -> Callable[[], None]:
    """A call that all-reduces as many bytes as the gradient has, in DDP's bucket size, and nothing else."""
    count = sum(p.numel() for p in worker.parameters)
    flat = torch.ones(count, dtype=worker.parameters[0].dtype, device=worker.device)
    buckets = torch.split(flat, BUCKET_BYTES // flat.element_size())

    def step() -> None:
        handles = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for handle in handles:
            if handle is not None:
                handle.wait()
        flat.fill_(1.0)  # or the sums overflow after some hundred steps

    return step


class MemoryMeter:
    """Peak memory over the timed steps: CUDA's allocator, or the process's resident set over its baseline on CPU."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cuda = cluster.device == "cuda"
        self.baseline_bytes = 0 if self.cuda else self._resident_baseline()
        self.peak_bytes = self.reserved_bytes = 0

    @staticmethod
    def _resident_baseline() -> int:
        gc.collect()
        resident.release_freed()
        return resident.resident_bytes()

    def start(self) -> None:
        """Forget peaks so far."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            resident.reset_peak()

    def stop(self) -> None:
        """Take the peaks since `start`."""
        if self.cuda:
            self.peak_bytes, self.reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            process = resident.peak_resident_bytes() + resident.descendants_private_bytes()
            self.peak_bytes, self.reserved_bytes = max(0, process - self.baseline_bytes), process

    def use(self, worker: Worker, batch_bytes: int) -> MemoryUse:
        """All that is known of this worker's memory; `batch_bytes` is the size of one batch."""
        states = _bytes(tensors_of(own_states(worker.optimizer)))
        return MemoryUse(
            peak_bytes=self.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            baseline_bytes=self.baseline_bytes,
            parameter_bytes=_bytes(worker.model.parameters()),
            gradient_bytes=_bytes(worker.parameters),
            optimizer_bytes=states,
            sharded_bytes=states if shards(worker.sweep.workload, worker.env.world_size) else 0,
            batch_bytes=batch_bytes * _batches_ready(worker),
        )


def _largest(worker: Worker, use: MemoryUse) -> MemoryUse:
    names = list(MemoryUse.model_fields)
    largest = worker.agree(*(float(getattr(use, name)) for name in names))
    return MemoryUse(**{name: int(value) for name, value in zip(names, largest, strict=True)})


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _batches_ready(worker: Worker) -> int:
    """Batches that the loader holds on the host: prefetch × loader workers, at least the one in use."""
    return max(1, worker.loader.num_workers * (worker.loader.prefetch_factor or 0))


def _stopping_rule(sweep: SweepSpec) -> StoppingRule:
    search = sweep.search
    return StoppingRule(search.min_steps, search.max_steps, search.max_seconds, search.ci_width)


def describe(configuration: Configuration, cluster: ClusterSpec, env: WorkerEnvironment) -> dict[str, Any]:
    """The part of a measurement that says where it was taken."""
    return {
        "nodes": configuration.nodes,
        "workers_per_node": configuration.workers_per_node,
        "local_batch": configuration.local_batch,
        "exclusive": cluster.exclusive or cluster.executor == "local",
        "emulated": cluster.executor == "local" and configuration.nodes > 1,
        "device": _device_name(cluster),
        "backend": backend_of(cluster) if env.world_size > 1 else "none",
        "hosts": env.hosts,
        "versions": describe_versions(),
        "job_id": env.job_id,
    }


def _device_name(cluster: ClusterSpec) -> str:
    if cluster.device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {cluster.cpus_per_worker} thread(s)"
    return "cpu"
