"""Measure whole steps in rounds, for the built-in training and for scripts alike.

Methods of a `Course` are generators that yield where they wait for a step's end. The built-in
training's steps are taken in between, see `timing.driven`; a script takes its steps as it likes,
and its hooks report when one has ended. So both are measured in the same way, and make the same
record.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from tula_hpc.ddp.agreement import if_memory_suffices
from tula_hpc.ddp.worker import bare_all_reduce
from tula_hpc.env import unix_time
from tula_hpc.profiling.meters import (
    MemoryMeter,
    Metered,
    PowerMeter,
    ProcessorSeconds,
    cores_of,
    processor_seconds,
)
from tula_hpc.profiling.probes import NoiseEstimate
from tula_hpc.profiling.timing import (
    LoaderWaits,
    Steps,
    StoppingRule,
    halves_of,
    mean_interval,
    rounds_apart,
    rounds_of,
    slowest_round,
)
from tula_hpc.records import ProcessorUse, StepTimes

# a partition that suspends its jobs in turns must not have them measured for ever
MOST_ATTEMPTS = 3
# seconds until a loader without prefetched batches delivers at its steady rate
SETTLING_S = 1.0


class Profiled(Metered, Protocol):
    """A worker whose steps are timed."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Return the parameters with a gradient."""


class Course:
    """Times of whole steps, and of parts by themselves.

    `allreduce_s` has the known seconds of the bare all-reduce by world size; this one's is added.
    """

    def __init__(
        self,
        worker: Profiled,
        rule: StoppingRule,
        waits: LoaderWaits,
        allreduce_s: dict[int, float],
    ) -> None:
        self.worker, self.rule, self.waits = worker, rule, waits
        self.allreduce_s = allreduce_s
        self.samples: dict[str, list[float]] = {}
        # number of steps or passes over which each sample is a mean
        self.round_steps: dict[str, int] = {}
        # processor seconds of a step: in the loader's processes, and in this one
        self.processor_s = (0.0, 0.0)
        self.noise = NoiseEstimate()
        # Unix time at the end of the first step
        self.stepped_at = math.inf

    # what depends on who takes the steps

    @property
    def turn(self) -> int:
        """Steps in which each process of the loader delivers once."""
        raise NotImplementedError

    def use_up_batches(self) -> None:
        """Take the batches that the loader has ready, equally many on each worker."""
        raise NotImplementedError

    def left_out_s(self) -> float:
        """Return the seconds so far that belong to no step; the device was idle in them."""
        return 0.0

    def processor_seconds(self) -> ProcessorSeconds:
        """Return the processor seconds of all steps so far."""
        return processor_seconds()

    def was_suspended(self) -> bool:
        """Tell whether the rounds since the last call have to be timed again. Collective."""
        return False

    # whole steps

    def note_first_step(self) -> None:
        """Take the time at which the first step is over."""
        if math.isinf(self.stepped_at):
            self.worker.synchronize_device()
            self.stepped_at = unix_time()

    def whole_steps(self, memory: MemoryMeter, power: PowerMeter) -> Steps[None]:
        """Time whole steps, and meter their memory and power. Collective."""
        about_s = yield from self.settled()
        power.start()
        with self._on_device():
            memory.start()
        # an untimed step takes back the memory that `memory.start` gave to the kernel
        yield
        yield from self.timed(about_s)
        with self._on_device():
            memory.stop()
        power.stop()

    def settled(self) -> Steps[float]:
        """Use up prefetched batches, then wait some steps; return the seconds of one. Collective.

        During warm-up the loader gets ahead by all that it may hold. A training uses that up once:
        timed steps that live on it would hide a loader that is too slow. A loader that keeps up, on
        the other hand, needs some steps until it is ahead again.
        """
        self.use_up_batches()
        about_s = yield from slowest_round(self.worker, 1, self.left_out_s)
        steps = min(self.turn, math.ceil(SETTLING_S / max(about_s, 1e-6)))
        about_s = yield from slowest_round(self.worker, steps, self.left_out_s)
        return about_s

    def timed(self, about_s: float) -> Steps[None]:
        """Time whole steps, and the waits and the processors' time in them. Collective."""
        self.rule = self.rule.in_proportion(about_s)
        steps = self.rule.steps_per_round(about_s, multiple_of=self.turn)
        for _ in range(MOST_ATTEMPTS):
            started = self.processor_seconds()
            seconds, waits = yield from self.rounds(steps)
            used = self.processor_seconds().since(started)
            if not self.was_suspended():
                break
        count = steps * len(seconds)
        # below 0 where a loader's process has ended while its time was read
        self.processor_s = (max(0.0, used.loader_s) / count, used.worker_s / count)
        self.samples |= {"step": seconds, "data": waits}
        self.round_steps |= {"step": steps, "data": steps}

    def rounds(self, steps: int, apart_s: float | None = None) -> Steps[tuple[list[float], ...]]:
        """Return the mean seconds of a step, and of its wait, in rounds of `steps`. Collective.

        If `apart_s` is given, it is left out of each step, and so is the wait.
        """
        waits: list[float] = []

        def counted(mean_s: float) -> float:
            waits.append(self.waits.take() / steps)
            return mean_s if apart_s is None else without(mean_s, waits[-1] + apart_s)

        self.waits.take()
        seconds = yield from rounds_of(
            self.worker, self.rule, steps, counted=counted, left_out_s=self.left_out_s
        )
        return seconds, waits

    # parts

    def time_apart(self, name: str, step: Callable[[], object], *, briefly: bool = False) -> None:
        """Time a part of a step by itself, in rounds like whole steps; see `rounds_apart`."""
        self.samples[name], self.round_steps[name] = rounds_apart(
            self.worker, self.rule, step, briefly=briefly
        )

    def time_all_reduce(self) -> None:
        """Time the bare all-reduce, if there is one, it is unknown, and memory suffices."""
        world = self.worker.env.world_size
        if world == 1 or world in self.allreduce_s:
            return
        step = if_memory_suffices(self.worker, lambda: bare_all_reduce(self.worker.parameters))
        if step is not None:
            self.time_apart("allreduce", step, briefly=True)

    def mean_s(self, part: str) -> float:
        """Return the mean over rounds; 0 for a part that was not timed."""
        rounds = self.samples.get(part)
        return mean_interval(rounds).mean_s if rounds else 0.0

    # results

    def measured(self) -> dict[str, Any]:
        """Return the fields of a measurement that the timed steps give. Collective."""
        return {
            "times": self.times(),
            "steps": len(self.samples["step"]) * self.round_steps["step"],
            "converged": self.rule.converged(self.samples["step"]),
            "samples": {
                name: [round(s, 7) for s in values] for name, values in self.samples.items()
            },
            "round_steps": self.round_steps,
            "processor": self._processor(),
            "noise_scale": self.noise.noise_scale,
            "noise_samples": self.noise.samples,
            "noise_terms": self.noise.terms,
        }

    def started_s(self, job_began_at: float | None) -> float:
        """Return the seconds from a job's beginning to the end of its first step; 0: unknown."""
        if job_began_at is None:
            return 0.0
        return max(0.0, self.stepped_at - job_began_at)

    def times(self) -> StepTimes:
        """Return means, the slowest worker's for the parts that workers do alone. Collective."""
        whole = mean_interval(self.samples["step"])
        parts = ("data", "compute", "optimizer", "allreduce", "update")
        data, compute, optimizer, allreduce, update, forward = self.worker.agree(
            *map(self.mean_s, parts), statistics.median(self.samples.get("forward") or [0.0])
        )
        world = self.worker.env.world_size
        if allreduce > 0:
            self.allreduce_s.setdefault(world, allreduce)
        first, second, scatter = halves_of(self.samples["step"]) or (None, None, None)
        return StepTimes(
            step_time_s=whole.mean_s,
            step_time_low_s=whole.low_s,
            step_time_high_s=whole.high_s,
            data_time_s=data,
            compute_time_s=compute,
            optimizer_time_s=optimizer,
            allreduce_time_s=self.allreduce_s.get(world, 0.0),
            update_time_s=update,
            forward_time_s=forward or None,
            first_half_s=first,
            second_half_s=second,
            halves_scatter_s=scatter,
        )

    def _processor(self) -> ProcessorUse:
        """Return the largest processor times of loading and computing. Collective."""
        # cores are negated, as the fewest of them count
        mine = (*self.processor_s, -cores_of(self.worker))
        loader_s, worker_s, cores = self.worker.agree(*mine)
        return ProcessorUse(loader_s=loader_s, worker_s=worker_s, cores=-cores)

    def _on_device(self) -> AbstractContextManager[Any]:
        device = self.worker.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def without(whole_s: float, parts_s: float) -> float:
    """Return the rest of a step's time without these parts, which were measured apart."""
    return max(whole_s - parts_s, 1e-9)
