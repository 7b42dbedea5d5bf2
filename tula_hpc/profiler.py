"""How a configuration is measured: a step and its parts apart, and memory."""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tula_hpc import resident
from tula_hpc.clock import unix_time
from tula_hpc.config import ClusterSpec, SweepSpec, batches_timed_apart
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import DivergedError, Failure
from tula_hpc.forward_probe import time_forward
from tula_hpc.loader_waits import LoaderWaits
from tula_hpc.methods import pass_interval
from tula_hpc.nested import Batch, samples_in, take, tensors_of
from tula_hpc.noise_probe import NoiseEstimate, probe_noise
from tula_hpc.power import PowerMeter
from tula_hpc.records import (
    Configuration,
    Measurement,
    MemoryUse,
    ProcessorUse,
    StepTimes,
    compute_of,
)
from tula_hpc.stopping import Suspensions
from tula_hpc.timing import (
    BRIEF_ROUND_S,
    LEAST_ROUNDS,
    ROUND_S,
    StoppingRule,
    agreed_s,
    mean_interval,
    round_s,
    time_rounds,
)
from tula_hpc.worker import Worker, backend_of, describe_versions
from tula_hpc.workloads.optimizers import own_states, shards

# A partition that suspends its jobs in turns would have them measured for ever.
MOST_ATTEMPTS = 3
# After what lay ready in the loader is gone, it may take so long until it delivers as it always will.
SETTLING_S = 1.0
BUCKET_BYTES = 25 * 1024**2  # DDP's default bucket: the bare all-reduce sends what DDP sends


class SharedTimes(NamedTuple):
    """What one configuration of a job tells of later ones."""

    allreduce_s: dict[int, float]  # bare all-reduce by world size: it does not depend on the batch
    computed: set[tuple[int, int]]  # world sizes and samples whose computation was timed

    @classmethod
    def none(cls) -> SharedTimes:
        """At the start of a job."""
        return cls({}, set())

    def copy(self) -> SharedTimes:
        """Return one that can be added to without a change to this one."""
        return SharedTimes(dict(self.allreduce_s), set(self.computed))

    def update(self, other: SharedTimes) -> None:
        """Take over what another one tells."""
        self.allreduce_s.update(other.allreduce_s)
        self.computed.update(other.computed)


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
    suspensions = Suspensions().install()
    for left in reversed(range(MOST_ATTEMPTS)):
        known = SharedTimes.none() if shared is None else shared.copy()
        with suspensions.blamed():
            measured, suspended = _measure(
                sweep, cluster, configuration, env, known, job_began_at=job_began_at, suspensions=suspensions
            )
        if not suspended:
            break
        if env.rank == 0:
            todo = "measuring again" if left else f"taken as it is after {MOST_ATTEMPTS} attempts"
            sys.stderr.write(f"{configuration}: the job was suspended meanwhile; {todo}\n")
        job_began_at = None
    if shared is not None:
        shared.update(known)
    return measured


def _measure(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    configuration: Configuration,
    env: WorkerEnvironment,
    shared: SharedTimes,
    *,
    job_began_at: float | None,
    suspensions: Suspensions,
) -> tuple[Measurement, bool]:
    """See `measure`; also returns whether any worker's process was stopped for a while."""
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
    (suspended,) = worker.agree(float(suspensions.take()))
    worker.release()
    del worker, profile, power
    gc.collect()
    if cluster.device == "cuda":
        torch.cuda.empty_cache()
    record = Measurement(status="ok", elapsed_s=time.monotonic() - started, finished_at=unix_time(), **facts)
    return record, bool(suspended)


def _measured(profile: StepProfile) -> dict[str, Any]:
    """The part of a measurement that the timed steps give. Collective."""
    return {
        "times": profile.times(),
        "steps": len(profile.samples["step"]) * profile.round_steps["step"],
        "converged": profile.rule.converged(profile.samples["step"]),
        "samples": {name: [round(s, 7) for s in values] for name, values in profile.samples.items()},
        "round_steps": profile.round_steps,
        "processor": profile.processor(),
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
        # of each sample that is a mean over several steps or passes
        self.round_steps: dict[str, int] = {}
        self.computed: list[int] = []  # smaller batches whose computation was timed
        self.batch_bytes = 0
        self.noise = NoiseEstimate()
        self.stepped_at = math.inf  # Unix time at the end of the first step
        for group in worker.optimizer.param_groups:
            group["lr"] = 0.0
        self.batches = worker.batches()
        self.waits = LoaderWaits(worker.device)
        # seconds of processors for a step: of the loader's processes, and of this one
        self.processor_s = (0.0, 0.0)

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
        about_s = self._settle_loader()
        power.start()
        memory.start()
        self.worker.train_step(*next(self.batches))  # it takes back the memory that metering gave to the kernel
        self._time_whole_steps(about_s)
        memory.stop()
        power.stop()
        inputs, targets = next(self.batches)
        self.batch_bytes = _bytes(tensors_of(self.worker.as_loaded(inputs, targets)))
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
            self.stepped_at = unix_time()

    def _settle_loader(self) -> float:
        """Take what lies ready, then some steps; return the seconds of a step, about, the same on all workers.

        During warm-up the loader gets ahead by all that it may hold. A training uses that up once: timed steps that
        live on it would not see a loader that is too slow. The other way about, a loader that keeps up needs some steps
        until it is ahead again.
        """
        for _ in range(_prefetched(self.worker)):
            next(self.batches)
        about_s = agreed_s(self.worker, self._whole_step)
        steps = min(self._turn, math.ceil(SETTLING_S / max(about_s, 1e-6)))
        return agreed_s(self.worker, self._whole_step, steps)

    @property
    def _turn(self) -> int:
        """Steps in which each process of the loader delivers once."""
        return max(1, self.worker.loader.num_workers)

    def _whole_step(self) -> None:
        """Do what a step of a training does."""
        started = time.perf_counter()
        inputs, targets = next(self.batches)
        self.waits.arrived(time.perf_counter() - started)
        self.worker.train_step(inputs, targets)
        self.waits.launched()

    def _time_whole_steps(self, about_s: float) -> None:
        steps = self.rule.steps_per_round(about_s, multiple_of=self._turn)
        self.waits.take()
        started = _processor_s()
        seconds: list[float] = []
        waits: list[float] = []
        for mean_s in time_rounds(self.worker, self.rule, self._whole_step, steps):
            seconds.append(mean_s)
            waits.append(self.waits.take() / steps)
        ended = _processor_s()
        count = steps * len(seconds)
        self.processor_s = ((ended[0] - started[0]) / count, (ended[1] - started[1]) / count)
        self.samples |= {"step": seconds, "data": waits}
        self.round_steps |= {"step": steps, "data": steps}

    def _time(self, name: str, step: Callable[[], object], *, briefly: bool = False) -> None:
        """Time a part of a step, by itself, in rounds as whole steps.

        Args:
            name: Of the part.
            step: Does it.
            briefly: The fewest rounds, and short ones: for parts that only guide the model, or are small.
        """
        steps = self._steps_of(step, BRIEF_ROUND_S if briefly else ROUND_S)
        rule = self.rule._replace(max_steps=LEAST_ROUNDS * steps) if briefly else self.rule
        self.samples[name] = list(time_rounds(self.worker, rule, step, steps))
        self.round_steps[name] = steps

    def _steps_of(self, step: Callable[[], object], round_of_s: float) -> int:
        """Return how many calls make a round, the same on all workers: one may be collective. Collective."""
        # the first call may have something to set up
        step()
        return self.rule.steps_per_round(agreed_s(self.worker, step), round_of_s)

    def _compute(self, inputs: Batch, targets: Batch, *, whole: bool = False) -> None:
        self.worker.optimizer.zero_grad(set_to_none=True)
        self.worker.forward_backward(inputs, targets, synchronize=False, whole=whole)

    def _time_smaller_computes(self, inputs: Batch, targets: Batch) -> None:
        """Of one part of the batch, where a step takes it in parts; and of other candidates' batches.

        They take turns: what disturbs the machine for seconds disturbs one round of each, which does not decide.
        """
        worker, batch = self.worker, samples_in(targets)
        part = math.ceil(batch / worker.parts)
        place = worker.configuration
        others = batches_timed_apart(worker.sweep.search, place.nodes, place.workers_per_node, batch)
        known = {size for world, size in self.shared.computed if world == place.world_size}
        self.computed = sorted({part, *others} - {batch} - (known - {part}))
        passes = {size: partial(self._compute, *take((inputs, targets), 0, size), whole=True) for size in self.computed}
        steps = {size: self._steps_of(compute, BRIEF_ROUND_S) for size, compute in passes.items()}
        samples: dict[int, list[float]] = {size: [] for size in self.computed}
        for size in self.computed * LEAST_ROUNDS:
            samples[size].append(round_s(worker, passes[size], steps[size]))
        self.samples |= {compute_of(size): seconds for size, seconds in samples.items()}
        self.round_steps |= {compute_of(size): count for size, count in steps.items()}
        whole = [batch] if part == batch else []
        self.shared.computed.update((place.world_size, size) for size in (*whole, *self.computed))

    def smaller_computes(self) -> tuple[tuple[int, float], ...]:
        """Means for each smaller batch, the slowest worker's. Collective."""
        means = [mean_interval(self.samples[compute_of(size)]).mean_s for size in self.computed]
        return tuple(zip(self.computed, self.worker.agree(*means), strict=True)) if means else ()

    def processor(self) -> ProcessorUse:
        """What loading and computing take of processors, the largest over the workers. Collective."""
        # to the other sign where the least counts
        loader_s, worker_s, cores = self.worker.agree(*self.processor_s, -_cores(self.worker))
        return ProcessorUse(loader_s=loader_s, worker_s=worker_s, cores=-cores)

    def _time_optimizer(self) -> None:
        for parameter in self.worker.parameters:  # or each step would scale, in place, what the one before has scaled
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._time("optimizer", self.worker.optimizer.step, briefly=True)

    def times(self) -> StepTimes:
        """Means, the slowest worker's for the parts that workers do alone. Collective."""
        whole = mean_interval(self.samples["step"])
        data, compute, optimizer, allreduce, update, forward = self.worker.agree(
            *(self._mean(part) for part in ("data", "compute", "optimizer", "allreduce", "update")),
            statistics.median(self.samples["forward"] or [0.0]),
        )
        allreduce = self.shared.allreduce_s.setdefault(self.worker.env.world_size, allreduce)
        return StepTimes(
            step_time_s=whole.mean_s,
            step_time_low_s=whole.low_s,
            step_time_high_s=whole.high_s,
            data_time_s=data,
            compute_time_s=compute,
            optimizer_time_s=optimizer,
            allreduce_time_s=allreduce,
            update_time_s=update,
            forward_time_s=forward or None,
        )

    def _mean(self, part: str) -> float:
        """Return the mean over rounds; 0 for a part that was not timed."""
        rounds = self.samples.get(part)
        return mean_interval(rounds).mean_s if rounds else 0.0


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
    """A call that all-reduces as many bytes as the gradient has, in DDP's bucket size, and nothing else.

    Meanwhile the loader has nothing to do. Where its processes and the collective's threads share cores in training,
    an all-reduce takes longer there than by itself; whole steps, which are timed with the loader at work, hold that.
    """
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
        self.total_bytes: int | None = None
        self.other_bytes: int | None = None
        self.short = Counter[str]()

    @staticmethod
    def _resident_baseline() -> int:
        gc.collect()
        resident.release_freed()
        return resident.resident_bytes()

    def start(self) -> None:
        """Forget peaks so far."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.short = _times_short()
        else:
            resident.reset_peak()

    def stop(self) -> None:
        """Take the peaks since `start`."""
        if self.cuda:
            self.peak_bytes, self.reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.short = _times_short() - self.short
            free, total = torch.cuda.mem_get_info()
            self.total_bytes = total
            self.other_bytes = max(0, total - free - torch.cuda.memory_reserved())
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
            batch_bytes=batch_bytes * max(1, _prefetched(worker)),
            total_bytes=self.total_bytes,
            other_bytes=self.other_bytes,
            alloc_retries=self.short["num_alloc_retries"],
            ooms=self.short["num_ooms"],
        )


def _times_short() -> Counter[str]:
    """Count how often torch's allocator found no memory so far: "num_alloc_retries" and "num_ooms"."""
    stats = torch.cuda.memory_stats()
    return Counter({name: stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")})


def _largest(worker: Worker, use: MemoryUse) -> MemoryUse:
    """The largest of each count over the workers, of the devices' memory the least. Collective."""
    counts = {name: float(count) for name, count in use if count is not None}
    if use.total_bytes is not None:
        counts["total_bytes"] = -float(use.total_bytes)
    largest = worker.agree(*counts.values())
    return MemoryUse(**{name: abs(int(value)) for name, value in zip(counts, largest, strict=True)})


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _prefetched(worker: Worker) -> int:
    """Batches that the loader holds on the host once it is ahead: prefetch × loader processes."""
    return worker.loader.num_workers * (worker.loader.prefetch_factor or 0)


def _processor_s() -> tuple[float, float]:
    """Seconds of processors so far: of the loader's processes, which descend from this one, and of this one."""
    return resident.descendants_processor_s(), time.process_time()


def _cores(worker: Worker) -> float:
    """Cores that a worker may run on: where workers are not bound to cores of their own, its share of the machine."""
    on_machine = worker.configuration.workers_per_node if worker.env.on_slurm else worker.env.world_size
    return min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) / on_machine)


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
