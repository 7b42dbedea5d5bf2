"""Measurement of a configuration: times of a step and of each part by itself, and memory."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from tula_hpc.batches import Batch, samples_in, take, tensors_of
from tula_hpc.config import ClusterSpec, SweepSpec, batches_timed_apart
from tula_hpc.ddp.methods import pass_interval
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.ddp.worker import Worker, bare_all_reduce
from tula_hpc.env import WorkerEnvironment, unix_time
from tula_hpc.errors import DivergedError
from tula_hpc.profiling.meters import (
    MemoryMeter,
    NodePower,
    bytes_of,
    cores_of,
    largest_over_workers,
    prefetched_batches,
    processor_seconds,
)
from tula_hpc.profiling.probes import NoiseEstimate, probe_noise, time_forward
from tula_hpc.profiling.record import describe
from tula_hpc.profiling.timing import (
    BRIEF_ROUND_S,
    LEAST_ROUNDS,
    LoaderWaits,
    StoppingRule,
    agreed_s,
    calls_in_round,
    halves_of,
    mean_interval,
    round_s,
    rounds_apart,
    time_rounds,
)
from tula_hpc.records import (
    Configuration,
    Identity,
    Measurement,
    ProcessorUse,
    StepTimes,
    compute_of,
)

# a partition that suspends its jobs in turns must not have them measured for ever
MOST_ATTEMPTS = 3
# seconds until a loader without prefetched batches delivers at its steady rate
SETTLING_S = 1.0


class SharedTimes(NamedTuple):
    """Times of one configuration of a job that later ones share."""

    # bare all-reduce by world size: it does not depend on the batch
    allreduce_s: dict[int, float]
    # world sizes and samples with a timed computation
    computed: set[tuple[int, int]]

    @classmethod
    def none(cls) -> SharedTimes:
        """Return the times at the start of a job."""
        return cls({}, set())

    def copy(self) -> SharedTimes:
        """Return an independent copy."""
        return SharedTimes(dict(self.allreduce_s), set(self.computed))

    def update(self, other: SharedTimes) -> None:
        """Add the times of another."""
        self.allreduce_s.update(other.allreduce_s)
        self.computed.update(other.computed)


def measure(
    sweep: SweepSpec,
    cluster: ClusterSpec,
    configuration: Configuration,
    env: WorkerEnvironment,
    shared: SharedTimes | None = None,
    *,
    job_began_at: float | None = None,
    on_built: Callable[[Identity], object] | None = None,
) -> Measurement:
    """Measure one configuration: times of a step's parts, and memory.

    Collective; the result is whole on rank 0.

    Args:
        sweep: The workload, and how long to measure.
        cluster: The device.
        configuration: Nodes and local batch.
        env: This worker's rank among those that measure.
        shared: Times from earlier configurations of the job; this one's are added.
        job_began_at: Unix time, for the first configuration of a job: the start's time is measured
            too.
        on_built: Is told what is measured, before memory may run out.
    """
    suspensions = Suspensions().install()
    attempt = partial(_measure, sweep, cluster, configuration, env)
    for left in reversed(range(MOST_ATTEMPTS)):
        known = (shared or SharedTimes.none()).copy()
        with suspensions.blamed():
            measured, suspended = attempt(
                known, job_began_at=job_began_at, suspensions=suspensions, on_built=on_built
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
    on_built: Callable[[Identity], object] | None,
) -> tuple[Measurement, bool]:
    """Return the measurement, and whether any worker's process was suspended meanwhile."""
    started = time.monotonic()
    memory = MemoryMeter(cluster)
    worker = Worker(_without_updates(sweep), cluster, configuration, env)
    if on_built is not None:
        on_built(worker.workload.identity)
    profile = StepProfile(worker, _stopping_rule(sweep), shared)
    power = NodePower(cluster, worker)
    profile.run(memory, power)
    facts: dict[str, Any] = {
        **describe(configuration, cluster, env),
        **_measured(profile),
        "memory": largest_over_workers(worker, memory.use(worker, profile.batch_bytes)),
        "watts_per_node": power.mean(),
        "dataset_samples": worker.samples,
        "test_samples": len(worker.workload.test),  # type: ignore[arg-type] # checked when the data was built
        "updates_per_epoch": _updates_per_epoch(sweep, worker),
        "parameters": sum(p.numel() for p in worker.model.parameters()),
        "identity": worker.workload.identity,
        "parts": worker.parts,
        "smaller_computes": profile.smaller_computes(),
        "start_s": 0.0 if job_began_at is None else max(0.0, profile.stepped_at - job_began_at),
    }
    (suspended,) = worker.agree(float(suspensions.take()))
    worker.release()
    del worker, profile, power
    _free(cluster)
    record = Measurement(
        status="ok", elapsed_s=time.monotonic() - started, finished_at=unix_time(), **facts
    )
    return record, bool(suspended)


def _free(cluster: ClusterSpec) -> None:
    gc.collect()
    if cluster.device == "cuda":
        torch.cuda.empty_cache()


def _measured(profile: StepProfile) -> dict[str, Any]:
    """Return the fields of a measurement that the timed steps give. Collective."""
    return {
        "times": profile.times(),
        "steps": len(profile.samples["step"]) * profile.round_steps["step"],
        "converged": profile.rule.converged(profile.samples["step"]),
        "samples": {
            name: [round(s, 7) for s in values] for name, values in profile.samples.items()
        },
        "round_steps": profile.round_steps,
        "processor": profile.processor(),
        "noise_scale": profile.noise.noise_scale,
        "noise_samples": profile.noise.samples,
        "noise_terms": profile.noise.terms,
    }


def _updates_per_epoch(sweep: SweepSpec, worker: Worker) -> float:
    steps = worker.samples // worker.configuration.global_batch
    if worker.norms.are_given or not sweep.training.free_reference:
        return sweep.updates_per_epoch(steps)
    return steps / pass_interval(sweep.training, worker.configuration, worker.samples)


def _without_updates(sweep: SweepSpec) -> SweepSpec:
    """Return a sweep in which no update of AGS's scale falls among the timed steps."""
    training = sweep.training.model_copy(update={"update_interval_epochs": 1e9})
    return sweep.model_copy(update={"training": training})


class StepProfile:
    """Times of a step and its parts; the learning rate is 0, so that no weight can diverge."""

    def __init__(
        self, worker: Worker, rule: StoppingRule, shared: SharedTimes | None = None
    ) -> None:
        self.worker, self.rule = worker, rule
        self.shared = shared or SharedTimes.none()
        self.samples: dict[str, list[float]] = {}
        # steps or passes in each sample, which is a mean over them
        self.round_steps: dict[str, int] = {}
        # smaller batches with a timed computation
        self.computed: list[int] = []
        self.batch_bytes = 0
        self.noise = NoiseEstimate()
        # Unix time at the end of the first step
        self.stepped_at = math.inf
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
            raise DivergedError(
                "the loss is not finite before any training: look at the model and at the data"
            )
        about_s = self._settle_loader()
        power.start()
        memory.start()
        # it takes back the memory that metering gave to the kernel
        self.worker.train_step(*next(self.batches))
        self._time_whole_steps(about_s)
        memory.stop()
        power.stop()
        inputs, targets = next(self.batches)
        self.batch_bytes = bytes_of(tensors_of(self.worker.as_loaded(inputs, targets)))
        self._time("compute", lambda: self._compute(inputs, targets))
        self._time_smaller_computes(inputs, targets)
        self._time_optimizer()
        # with norms for free, no update takes a pass
        if self.worker.sweep.training.adapts and not self.worker.norms.are_given:
            # the update looks at the gradients of a backward pass
            self._compute(inputs, targets)
            self._time(
                "update", lambda: self.worker.update_gradscale(inputs, targets), briefly=True
            )
        if (
            self.worker.env.world_size > 1
            and self.worker.env.world_size not in self.shared.allreduce_s
        ):
            self._time("allreduce", bare_all_reduce(self.worker), briefly=True)
        self.noise = probe_noise(self.worker, self.batches, self.worker.sweep.search.noise_steps)
        self.samples["forward"] = time_forward(self.worker, inputs, targets)

    def _note_first_step(self) -> None:
        if math.isinf(self.stepped_at):
            self.worker.synchronize_device()
            self.stepped_at = unix_time()

    def _settle_loader(self) -> float:
        """Use up prefetched batches, then take some steps; return the seconds of one. Collective.

        During warm-up the loader gets ahead by all that it may hold. A training uses that up once:
        timed steps that live on it would hide a loader that is too slow. A loader that keeps up, on
        the other hand, needs some steps until it is ahead again.
        """
        for _ in range(prefetched_batches(self.worker)):
            next(self.batches)
        about_s = agreed_s(self.worker, self._whole_step)
        steps = min(self._turn, math.ceil(SETTLING_S / max(about_s, 1e-6)))
        return agreed_s(self.worker, self._whole_step, steps)

    @property
    def _turn(self) -> int:
        """Return the steps in which each process of the loader delivers once."""
        return max(1, self.worker.loader.num_workers)

    def _whole_step(self) -> None:
        started = time.perf_counter()
        inputs, targets = next(self.batches)
        self.waits.arrived(time.perf_counter() - started)
        self.worker.train_step(inputs, targets)
        self.waits.launched()

    def _time_whole_steps(self, about_s: float) -> None:
        steps = self.rule.steps_per_round(about_s, multiple_of=self._turn)
        self.waits.take()
        started = processor_seconds()
        seconds: list[float] = []
        waits: list[float] = []
        for mean_s in time_rounds(self.worker, self.rule, self._whole_step, steps):
            seconds.append(mean_s)
            waits.append(self.waits.take() / steps)
        ended = processor_seconds()
        count = steps * len(seconds)
        self.processor_s = ((ended[0] - started[0]) / count, (ended[1] - started[1]) / count)
        self.samples |= {"step": seconds, "data": waits}
        self.round_steps |= {"step": steps, "data": steps}

    def _time(self, name: str, step: Callable[[], object], *, briefly: bool = False) -> None:
        """Time a part of a step by itself, in rounds as whole steps; see `rounds_apart`."""
        self.samples[name], self.round_steps[name] = rounds_apart(
            self.worker, self.rule, step, briefly=briefly
        )

    def _compute(self, inputs: Batch, targets: Batch, *, whole: bool = False) -> None:
        self.worker.optimizer.zero_grad(set_to_none=True)
        self.worker.forward_backward(inputs, targets, synchronize=False, whole=whole)

    def _time_smaller_computes(self, inputs: Batch, targets: Batch) -> None:
        """Time a step's micro-batch and other candidates' batches.

        They take turns: a disturbance of some seconds then falls on one round of each, which does
        not decide.
        """
        worker, batch = self.worker, samples_in(targets)
        part = math.ceil(batch / worker.parts)
        nodes, workers_per_node, _ = worker.configuration
        world_size = nodes * workers_per_node
        others = batches_timed_apart(worker.sweep.search, nodes, workers_per_node, batch)
        known = {size for world, size in self.shared.computed if world == world_size}
        self.computed = sorted({part, *others} - {batch} - (known - {part}))
        passes = {
            size: partial(self._compute, *take((inputs, targets), 0, size), whole=True)
            for size in self.computed
        }
        steps = {
            size: calls_in_round(worker, self.rule, compute, BRIEF_ROUND_S)
            for size, compute in passes.items()
        }
        samples: dict[int, list[float]] = {size: [] for size in self.computed}
        for size in self.computed * LEAST_ROUNDS:
            samples[size].append(round_s(worker, passes[size], steps[size]))
        self.samples |= {compute_of(size): seconds for size, seconds in samples.items()}
        self.round_steps |= {compute_of(size): count for size, count in steps.items()}
        self.shared.computed.update((world_size, size) for size in self.computed)
        if part == batch:
            self.shared.computed.add((world_size, batch))

    def smaller_computes(self) -> tuple[tuple[int, float], ...]:
        """Return the slowest worker's mean for each smaller batch. Collective."""
        if not self.computed:
            return ()
        means = [mean_interval(self.samples[compute_of(size)]).mean_s for size in self.computed]
        return tuple(zip(self.computed, self.worker.agree(*means), strict=True))

    def processor(self) -> ProcessorUse:
        """Return the processor time of loading and computing, the largest. Collective."""
        # the sign is changed where the least counts
        loader_s, worker_s, cores = self.worker.agree(*self.processor_s, -cores_of(self.worker))
        return ProcessorUse(loader_s=loader_s, worker_s=worker_s, cores=-cores)

    def _time_optimizer(self) -> None:
        # or each step would scale the gradients that the one before has scaled in place
        for parameter in self.worker.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._time("optimizer", self.worker.optimizer.step, briefly=True)

    def times(self) -> StepTimes:
        """Return means, the slowest worker's for the parts that workers do alone. Collective."""
        whole = mean_interval(self.samples["step"])
        data, compute, optimizer, allreduce, update, forward = self.worker.agree(
            *(self._mean(part) for part in ("data", "compute", "optimizer", "allreduce", "update")),
            statistics.median(self.samples["forward"] or [0.0]),
        )
        allreduce = self.shared.allreduce_s.setdefault(self.worker.env.world_size, allreduce)
        first, second, scatter = halves_of(self.samples["step"]) or (None, None, None)
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
            first_half_s=first,
            second_half_s=second,
            halves_scatter_s=scatter,
        )

    def _mean(self, part: str) -> float:
        """Return the mean over rounds; 0 for a part that was not timed."""
        rounds = self.samples.get(part)
        return mean_interval(rounds).mean_s if rounds else 0.0


def _stopping_rule(sweep: SweepSpec) -> StoppingRule:
    search = sweep.search
    return StoppingRule(search.min_steps, search.max_steps, search.max_seconds, search.ci_width)
