"""Profile of a script, taken in its own process at the ends of its own steps.

What is done between the script's steps is one generator, `ScriptProfile._course`, which reads like
a profile of the built-in training: each `yield` in it waits for the end of the script's next step.
When all is measured the process ends at once, whatever the script would do next.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tula_hpc import process_memory
from tula_hpc.attach import was_kept
from tula_hpc.attach.measured_steps import MeasuredSteps, Steps, between_epochs_s, captured, flat
from tula_hpc.attach.reporting import ChildSpec, Said, leave
from tula_hpc.batches import tensors_of
from tula_hpc.config import ClusterSpec, SearchSpec
from tula_hpc.ddp.stop_signals import Suspensions
from tula_hpc.ddp.worker import bare_all_reduce
from tula_hpc.env import WorkerEnvironment, unix_time
from tula_hpc.errors import Failure, InputError
from tula_hpc.optim import gradient_square, noise_scale, noise_trace
from tula_hpc.profiling.measure import MOST_ATTEMPTS, SETTLING_S
from tula_hpc.profiling.meters import (
    MemoryMeter,
    NodePower,
    bytes_of,
    cores_of,
    largest_over_workers,
    processor_seconds,
)
from tula_hpc.profiling.probes import PASSES, NoiseEstimate
from tula_hpc.profiling.record import describe
from tula_hpc.profiling.timing import StoppingRule, mean_interval, rounds_apart
from tula_hpc.records import Configuration, Identity, Measurement, ProcessorUse, StepTimes
from tula_hpc.records.base import Record
from tula_hpc.workloads.optimizers import own_states

# in which the optimizer's part is timed
OPTIMIZER_STEPS = 10


class Settings(Record):
    """What a profile of a script is told."""

    search: SearchSpec
    cluster: ClusterSpec
    configuration: Configuration
    place: WorkerEnvironment
    # of one forward pass of one worker, and passes of a step; None: as they are found
    forward_batch: int | None = None
    accumulation: int | None = None
    # of an epoch
    samples: int = 0
    # digests of its own files
    sources: dict[str, str] = Field(default={})
    # of as many workers, as it was measured before
    allreduce_s: float | None = None
    # Unix time, for the first configuration of a job
    job_began_at: float | None = None


def profiling(spec: ChildSpec) -> ScriptProfile:
    """Return the mode "profile"."""
    return ScriptProfile(spec, Settings.model_validate(spec.settings))


class ScriptProfile(MeasuredSteps):
    """Times of a script's step and its parts, and memory."""

    def __init__(self, spec: ChildSpec, settings: Settings) -> None:
        super().__init__(spec, settings.place, settings.cluster.device)
        self.settings, self.configuration = settings, settings.configuration
        search = settings.search
        self.rule = StoppingRule(
            search.min_steps, search.max_steps, search.max_seconds, search.ci_width
        )
        self.samples: dict[str, list[float]] = {}
        self.round_steps: dict[str, int] = {}
        self.processor_s = (0.0, 0.0)
        self.noise = NoiseEstimate()
        self.stepped_at = math.inf
        self.course = self._course()
        self.suspensions = Suspensions()

    def begin(self) -> None:
        """Watch from now on; what memory holds now is not the script's."""
        if self.settings.cluster.device == "cpu":
            process_memory.keep_freed()
        self.suspensions.install()
        self.memory = MemoryMeter(self.settings.cluster)
        super().begin()

    def begins_anew(self) -> None:
        """Measure the larger model from its first step on."""
        super().begins_anew()
        self.course = self._course()

    def after_step(self) -> None:
        """Go on with the profile, and end the process after it."""
        try:
            next(self.course)
        except StopIteration:
            self.say(self._told())
            leave(0)

    def ended(self, code: int) -> Said:
        """Return that the script ended too early."""
        name, steps = self.spec.program.name, self.steps
        how = "ended" if code == 0 else f"exited with code {code}"
        if steps == 0 and self.hooks.others:
            kinds = ", ".join(type(each).__name__ for each in self.hooks.others)
            why = f"no optimizer of the model that counts took a step, only {kinds}"
        else:
            why = f"after {steps} optimizer steps, before it was measured"
        return Said(
            state="failed", failure=Failure.BAD_INPUT, detail=f"{name} {how}: {why}", steps=steps
        )

    def _told(self) -> Said:
        measured = self._measurement()
        result = {"measurement": measured.model_dump(mode="json"), **self._seen()}
        return Said(state="done", steps=self.steps, result=result)

    # the course of the profile

    def _course(self) -> Iterator[None]:
        # the first step has just ended
        self.meet()
        self.synchronize_device()
        self.stepped_at = unix_time()
        for _ in range(self.settings.search.warmup_steps):
            yield
        self._check_passes()
        about_s = yield from self._settle()
        power = NodePower(self.settings.cluster, self)
        power.start()
        self._meter("start")
        # it takes back the memory that metering gave to the kernel
        yield
        yield from self._time_whole_steps(about_s)
        self._meter("stop")
        power.stop()
        self.watts = power.mean()
        yield from self._time_optimizer()
        yield from self._time_computation()
        if self.env.world_size > 1 and self.settings.allreduce_s is None:
            rounds = rounds_apart(self, self.rule, bare_all_reduce(self), briefly=True)
            self.samples["allreduce"], self.round_steps["allreduce"] = rounds
        yield from self._probe_noise()

    def _check_passes(self) -> None:
        """Refuse another batch, or another number of passes, than was asked for. Collective.

        Raises:
            InputError: The script does something else.
        """
        name = self.spec.program.name
        passes = self.step_forwards.most_common(1)[0][0] if self.step_forwards else 0
        batch = self.forward_samples.most_common(1)[0][0] if self.forward_samples else 0
        if passes == 0:
            raise InputError(f"{name}: {self._model_name()} takes no training pass in a step")
        asked, parts = self.settings.forward_batch, self.settings.accumulation
        if parts is not None and passes != parts:
            raise InputError(
                f"{name} takes {passes} forward passes for an optimizer step, not {parts}; "
                f"set workload.accumulation = {passes}",
                key="workload.accumulation",
            )
        # 0: no tensor tells
        if asked is not None and batch not in (0, asked):
            raise InputError(
                f"asked for {asked} samples a forward, the model got {batch}: look at how {name} "
                "takes its batch, and at {local_batch} and {global_batch}",
                key="workload.arguments",
            )
        if asked is None:
            self.configuration = self.configuration._replace(local_batch=max(1, batch) * passes)

    def _model_name(self) -> str:
        return type(self.hooks.inner_model).__name__

    def _settle(self) -> Steps:
        """Use up prefetched batches, then take some steps; return the seconds of one. Collective.

        See `profiling.measure.StepProfile`.
        """
        self.use_up_batches()
        about_s = yield from self.agreed_round(1)
        steps = min(self._turn, math.ceil(SETTLING_S / max(about_s, 1e-6)))
        about_s = yield from self.agreed_round(steps)
        return about_s

    @property
    def _turn(self) -> int:
        return max(1, self.loader_workers)

    def _meter(self, action: str) -> None:
        on_device: AbstractContextManager[Any] = nullcontext()
        if self.device.type == "cuda":
            on_device = torch.cuda.device(self.device)
        with on_device:
            getattr(self.memory, action)()

    def _time_whole_steps(self, about_s: float) -> Iterator[None]:
        steps = self.rule.steps_per_round(about_s, multiple_of=self._turn)
        for _ in range(MOST_ATTEMPTS):
            started = processor_seconds()
            self.samples |= {"step": [], "data": []}
            yield from self._rounds("step", steps)
            ended = processor_seconds()
            (suspended,) = self.agree(float(self.suspensions.take()))
            if not suspended:
                break
        count = steps * len(self.samples["step"])
        self.processor_s = ((ended[0] - started[0]) / count, (ended[1] - started[1]) / count)
        self.round_steps |= {"step": steps, "data": steps}

    def _rounds(self, name: str, steps: int) -> Iterator[None]:
        """Time rounds of steps, and the waits in them, until all workers have enough. Collective."""
        seconds = self.samples.setdefault(name, [])
        waits = self.samples["data"] if name == "step" else []
        self.waits.take()
        unfinished = 1.0
        while unfinished:
            mean_s = yield from self.round_of(steps)
            wait_s = self.waits.take() / steps
            waits.append(wait_s)
            seconds.append(mean_s if name == "step" else self._alone(mean_s, wait_s))
            (unfinished,) = self.agree(0.0 if self.rule.done(seconds, steps) else 1.0)

    def _alone(self, step_s: float, wait_s: float) -> float:
        """Return a step's computation: what is neither waiting for data nor the optimizer."""
        return max(step_s - wait_s - self._mean("optimizer"), 1e-9)

    def _time_optimizer(self) -> Iterator[None]:
        self.optimizer_s = []
        for _ in range(OPTIMIZER_STEPS):
            yield
        self.samples["optimizer"], self.optimizer_s = self.optimizer_s, None
        self.round_steps["optimizer"] = 1

    def _time_computation(self) -> Iterator[None]:
        """Time steps without synchronization; of a single worker all are."""
        steps = self.round_steps["step"]
        self.round_steps["compute"] = steps
        if self.env.world_size == 1:
            both = zip(self.samples["step"], self.samples["data"], strict=True)
            self.samples["compute"] = [self._alone(step_s, wait_s) for step_s, wait_s in both]
            return
        self.unsynchronized = True
        # the first has something to set up
        yield
        yield from self._rounds("compute", steps)
        self.unsynchronized = False
        yield

    def _probe_noise(self) -> Iterator[None]:
        """Estimate the noise scale from gradients at weights that stay as they are.

        Parts are the workers' local batches; of a single worker, the batches of two steps.
        """
        world, batch = self.env.world_size, self.configuration.local_batch
        # BatchNorm's statistics of one sample are none
        if batch < 2:
            return
        steps = 1 if world > 1 else 2
        large = batch * world * steps
        terms: list[tuple[float, float]] = []
        self.unsynchronized = world > 1
        with captured(self.parameters) as gradients:
            for _ in range(PASSES):
                total: Tensor | None = None
                squares = 0.0
                for _ in range(steps):
                    yield
                    own = flat(gradients, self.parameters)
                    squares += _squared(own)
                    total = own if total is None else total + own
                norms = self._norms(total, squares, world * steps)
                square, trace = (f(*norms, batch, large) for f in (gradient_square, noise_trace))
                terms.append((square, trace))
        self.unsynchronized = False
        if all(map(math.isfinite, chain.from_iterable(terms))):
            sums = [sum(column) for column in zip(*terms, strict=True)]
            scale = noise_scale(*sums)
            scale = 0.0 if math.isnan(scale) else scale
            self.noise = NoiseEstimate(scale, large * PASSES, tuple(terms))

    def _norms(self, total: Tensor | None, squares: float, parts: int) -> tuple[float, float]:
        """Return the parts' mean |g|² and |mean g|². Collective."""
        if total is None:
            return math.nan, math.nan
        if self.env.world_size > 1:
            dist.all_reduce(total)
        (summed,) = self.total(squares)
        return summed / parts, _squared(total / parts)

    # what was found

    def _mean(self, part: str) -> float:
        rounds = self.samples.get(part)
        return mean_interval(rounds).mean_s if rounds else 0.0

    def _times(self) -> StepTimes:
        whole = mean_interval(self.samples["step"])
        parts = ("data", "compute", "optimizer", "allreduce")
        data, compute, optimizer, allreduce = self.agree(*map(self._mean, parts))
        return StepTimes(
            step_time_s=whole.mean_s,
            step_time_low_s=whole.low_s,
            step_time_high_s=whole.high_s,
            data_time_s=data,
            compute_time_s=compute,
            optimizer_time_s=optimizer,
            allreduce_time_s=self.settings.allreduce_s or allreduce,
        )

    def _measurement(self) -> Measurement:
        """Return what was measured. Collective; whole on rank 0."""
        settings, began_at = self.settings, self.settings.job_began_at
        loader_s, worker_s, cores = self.agree(*self.processor_s, -cores_of(self))
        identity = self._identity()
        facts: dict[str, Any] = describe(self.configuration, settings.cluster, self.env)
        return Measurement(
            status="ok",
            times=self._times(),
            memory=largest_over_workers(self, self._memory_use()),
            steps=len(self.samples["step"]) * self.round_steps["step"],
            converged=self.rule.converged(self.samples["step"]),
            samples={name: [round(s, 7) for s in rows] for name, rows in self.samples.items()},
            round_steps=self.round_steps,
            processor=ProcessorUse(loader_s=loader_s, worker_s=worker_s, cores=-cores),
            noise_scale=self.noise.noise_scale,
            noise_samples=self.noise.samples,
            noise_terms=self.noise.terms,
            watts_per_node=self.watts,
            dataset_samples=settings.samples,
            parameters=identity.parameters,
            between_epochs_s=self._between_epochs_s(),
            kept=was_kept(),
            identity=identity,
            start_s=0.0 if began_at is None else max(0.0, self.stepped_at - began_at),
            finished_at=unix_time(),
            **facts,
        )

    def _between_epochs_s(self) -> float | None:
        """Return the longest time of any worker between two epochs. Collective."""
        steps = self.settings.samples // self.configuration.global_batch
        mine = between_epochs_s(self.pauses, steps)
        (longest,) = self.agree(-1.0 if mine is None else mine)
        return None if longest < 0.0 else longest

    def _memory_use(self) -> Any:
        model, optimizer = self.found
        return self.memory.use_with(
            parameter_bytes=bytes_of(model.parameters()),
            gradient_bytes=bytes_of(self.parameters),
            optimizer_bytes=bytes_of(tensors_of(own_states(optimizer))),
            batch_bytes=self.batch_bytes * max(1, self.prefetched),
        )

    def _identity(self) -> Identity:
        """Return what tells the model and its code from others, by the parameters that are trained.

        Names and layers do not count: scripts exchange layers by the number of workers
        (SyncBatchNorm), and what a framework wraps has other names than what a single worker calls.
        """
        kinds = (f"{p.dtype} {tuple(p.shape)}" for p in self.parameters)
        return Identity(
            parameters=sum(p.numel() for p in self.parameters),
            gradient_bytes=bytes_of(self.parameters),
            structure=hashlib.sha256("\n".join(sorted(kinds)).encode()).hexdigest()[:32],
            train_samples=self.settings.samples,
            test_samples=0,
            sources=self.settings.sources,
        )

    def _seen(self) -> dict[str, Any]:
        """Return what the script was seen to do, for people."""
        model, optimizer = self.hooks.model, self.hooks.optimizer
        (passes, _), (batch, _) = (
            counted.most_common(1)[0] for counted in (self.step_forwards, self.forward_samples)
        )
        return {
            "model": self._model_name(),
            "wrapped": isinstance(model, DistributedDataParallel),
            "optimizer": type(optimizer).__name__,
            "others": [type(other).__name__ for other in self.hooks.others],
            "forward_batch": batch,
            "accumulation": passes,
            "loader_workers": self.loader_workers,
            "samples": self.loaded_samples,
        }


def _squared(vector: Tensor) -> float:
    return float(vector.square().sum(dtype=torch.float64))
