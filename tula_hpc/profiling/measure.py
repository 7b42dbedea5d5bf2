"""Measurement of a configuration: times of a step and of each part by itself, and memory.

`profile_loop.py` calls it for each configuration, and says what follows if memory runs out.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from tula_hpc.batches import Batch, samples_in, take
from tula_hpc.config import ClusterSpec, SweepSpec, batches_timed_apart
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment, unix_time
from tula_hpc.errors import DivergedError, InputError
from tula_hpc.profiling.measured_rounds import MOST_ATTEMPTS, Course
from tula_hpc.profiling.meters import MemoryMeter, PowerMeter, largest_over_workers
from tula_hpc.profiling.probes import probe_noise, time_forward
from tula_hpc.profiling.record import describe
from tula_hpc.profiling.timing import (
    BRIEF_ROUND_S,
    LEAST_ROUNDS,
    LoaderWaits,
    StoppingRule,
    calls_in_round,
    driven,
    mean_interval,
    round_s,
    warm_up,
)
from tula_hpc.records import Configuration, Identity, Measurement, compute_of

# overflows that bring GradScaler's loss scale from its first, 2^16, down to 2^-8
MOST_OVERFLOWS = 24


@dataclass
class SharedTimes:
    """Times of one configuration of a job that later ones share."""

    # seconds of the bare all-reduce by world size: they do not depend on the batch
    allreduce_s: dict[int, float] = field(default_factory=dict)
    # world sizes and local batches whose computation has been timed
    computed: set[tuple[int, int]] = field(default_factory=set)

    def update(self, other: SharedTimes) -> None:
        """Add the times of another one."""
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

    Collective; the result is complete on rank 0. `env` is this worker's place among those that
    measure.

    `shared` has times from earlier configurations of the job; this one's are added. With the first
    one, `job_began_at` (Unix time) is given, so that the job's start is measured too. `on_built` is
    called with the workload's identity, before memory may run out.
    """
    shared = shared or SharedTimes()
    suspensions = Suspensions().install()
    attempt = partial(_measure, sweep, cluster, configuration, env)
    for left in reversed(range(MOST_ATTEMPTS)):
        known = deepcopy(shared)
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
    worker = Worker(_with_factors_at_once(sweep), cluster, configuration, env)
    if on_built is not None:
        on_built(worker.workload.identity)
    training_steps = sweep.workload.epochs * worker.samples / configuration.global_batch
    profile = StepProfile(worker, StoppingRule.of(sweep.search, training_steps), shared)
    power = PowerMeter(cluster, worker)
    profile.run(memory, power)
    facts: dict[str, Any] = {
        **describe(configuration, cluster, env),
        **profile.measured(),
        "memory": largest_over_workers(
            worker, memory.use(worker.model, worker.parameters, worker.optimizer)
        ),
        "watts_per_node": power.mean(),
        "dataset_samples": worker.samples,
        "test_samples": len(worker.workload.test),  # type: ignore[arg-type] # checked when the data was built
        "updates_per_epoch": _updates_per_epoch(sweep, worker),
        "parameters": sum(p.numel() for p in worker.model.parameters()),
        "identity": worker.workload.identity,
        "parts": worker.parts,
        "smaller_computes": profile.smaller_computes(),
        "start_s": profile.started_s(job_began_at),
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


def _updates_per_epoch(sweep: SweepSpec, worker: Worker) -> float:
    own = worker.configuration
    steps = worker.samples // own.global_batch
    if worker.norms.are_given or not sweep.training.free_reference:
        return sweep.updates_per_epoch(steps)
    return steps / sweep.training.pass_interval(own.local_batch, own.world_size, worker.samples)


def _with_factors_at_once(sweep: SweepSpec) -> SweepSpec:
    """Return a sweep in which AGS has its first factors from the second step on."""
    training = sweep.training.model_copy(update={"update_interval_epochs": 1e-9})
    return sweep.model_copy(update={"training": training})


class StepProfile(Course):
    """Times of a step and its parts; the learning rate is 0, so that no weight can diverge."""

    worker: Worker

    def __init__(self, worker: Worker, rule: StoppingRule, shared: SharedTimes) -> None:
        self.shared = shared
        super().__init__(worker, rule, LoaderWaits(worker.device), self.shared.allreduce_s)
        # smaller batches whose computation has been timed
        self.computed: list[int] = []
        # loss of the last whole step
        self.loss = torch.zeros(())
        for group in worker.optimizer.param_groups:
            group["lr"] = 0.0
        self.batches = worker.batches()

    def run(self, memory: MemoryMeter, power: PowerMeter) -> None:
        """Warm up, then time whole steps, metering memory and power, and then each part apart.

        Raises:
            InputError: Training samples hold inf or nan.
            DivergedError: The untrained model's loss is not finite, though the samples are.
        """
        self._whole_step()
        self.note_first_step()
        driven(warm_up(self.worker, self.worker.sweep.search.warmup_steps - 1), self._whole_step)
        if self._takes_passes:
            # nearly all steps of a training scale their gradients, but few need an extra pass
            self._step_for_factors()
            self.worker.observer.expect_small_norms()
        (diverged,) = self.worker.agree(0.0 if math.isfinite(float(self.loss)) else 1.0)
        if diverged:
            self._refuse_loss()
        driven(self.whole_steps(memory, power), self._whole_step)
        inputs, targets = next(self.batches)
        self.time_apart("compute", lambda: self._compute(inputs, targets))
        self._time_smaller_computes(inputs, targets)
        self._time_optimizer()
        self.noise = probe_noise(self.worker, self.batches)
        if self._takes_passes:
            # the update looks at the gradients of a backward pass
            self._compute(inputs, targets)
            update = partial(self.worker.update_gradscale, inputs, targets)
            self.time_apart("update", update, briefly=True)
        self.time_all_reduce()
        self.samples["forward"] = time_forward(self.worker, inputs, targets)

    @property
    def _takes_passes(self) -> bool:
        """True if AGS's factors come from passes over a reference batch, not from free norms."""
        return self.worker.sweep.training.adapts and not self.worker.norms.are_given

    def _step_for_factors(self) -> None:
        """Take steps until one gives factors; a step that overflows only lowers the loss scale."""
        for _ in range(MOST_OVERFLOWS):
            is_due = self.worker.observer.update_due
            before = self.worker.scaler.get_scale()
            self._whole_step()
            if is_due and self.worker.scaler.get_scale() >= before:
                return

    def _refuse_loss(self) -> NoReturn:
        batches = self.worker.sweep.search.warmup_steps
        found = self.worker.loader.not_finite(0, 0, batches)
        (index,) = self.worker.agree(-1.0 if found is None else float(found))
        if index >= 0:
            words = f"item {index:.0f} of the training set holds inf or nan"
            raise InputError(words, key="workload.dataset")
        raise DivergedError(
            "the loss is not finite before any training, though the samples are: check the model "
            "and its loss"
        )

    @property
    def turn(self) -> int:
        """See `Course`."""
        return max(1, self.worker.loader.num_workers)

    def use_up_batches(self) -> None:
        """See `Course`."""
        loader = self.worker.loader
        # a loader that is ahead holds this many batches
        for _ in range(loader.num_workers * (loader.prefetch_factor or 0)):
            next(self.batches)

    def _whole_step(self) -> None:
        started = time.perf_counter()
        inputs, targets = next(self.batches)
        self.waits.arrived(time.perf_counter() - started)
        self.loss = self.worker.train_step(inputs, targets)
        self.waits.launched()

    def _compute(self, inputs: Batch, targets: Batch, *, whole: bool = False) -> None:
        self.worker.optimizer.zero_grad(set_to_none=True)
        self.worker.forward_backward(inputs, targets, synchronize=False, whole=whole)

    def _time_smaller_computes(self, inputs: Batch, targets: Batch) -> None:
        """Time the computation of a step's micro-batch, and of other candidates' smaller batches.

        They take turns: a disturbance of some seconds then falls on one round of each batch, which
        does not decide the mean.
        """
        worker, batch = self.worker, samples_in(targets)
        part = math.ceil(batch / worker.parts)
        nodes, workers_per_node, _ = worker.configuration
        world_size = nodes * workers_per_node
        others = batches_timed_apart(worker.sweep.search, nodes, workers_per_node, batch)
        known = {size for world, size in self.shared.computed if world == world_size}
        self.computed = sorted({part, *others} - {batch} - (known - {part}))
        passes = {}
        steps = {}
        samples: dict[int, list[float]] = {}
        for size in self.computed:
            passes[size] = partial(self._compute, *take((inputs, targets), 0, size), whole=True)
            steps[size] = calls_in_round(worker, self.rule, passes[size], BRIEF_ROUND_S)
            samples[size] = []
        for size in self.computed * LEAST_ROUNDS:
            samples[size].append(round_s(worker, passes[size], steps[size]))
        for size in self.computed:
            self.samples[compute_of(size)] = samples[size]
            self.round_steps[compute_of(size)] = steps[size]
            self.shared.computed.add((world_size, size))
        if part == batch:
            self.shared.computed.add((world_size, batch))

    def smaller_computes(self) -> tuple[tuple[int, float], ...]:
        """Return the slowest worker's mean for each smaller batch. Collective."""
        if not self.computed:
            return ()
        means = [mean_interval(self.samples[compute_of(size)]).mean_s for size in self.computed]
        return tuple(zip(self.computed, self.worker.agree(*means), strict=True))

    def _time_optimizer(self) -> None:
        # else each step would scale gradients that the step before has already scaled in place
        for parameter in self.worker.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.time_apart("optimizer", self.worker.optimizer.step, briefly=True)
