"""Rounds and parts of a script's steps, as its profile times them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tula_hpc.gradients.reference_gradient import flatten
from tula_hpc.profiling.measured_rounds import Course, without
from tula_hpc.profiling.meters import ProcessorSeconds
from tula_hpc.profiling.probes import PASSES, estimate_from, shared_norms, squared_length
from tula_hpc.profiling.timing import Steps, StoppingRule

if TYPE_CHECKING:
    from tula_hpc.attach.script_profile import ScriptProfile

# most steps in which the optimizer's part is timed
OPTIMIZER_STEPS = 10
# seconds for them: of long steps fewer are timed, but at least LEAST_OPTIMIZER_STEPS
OPTIMIZER_SECONDS = 5.0
LEAST_OPTIMIZER_STEPS = 3
# the same for the measurements of the noise scale
NOISE_SECONDS = 10.0
LEAST_PASSES = 2


class ScriptCourse(Course):
    """Times of a script's steps and their parts.

    No part of a step can be run by itself: a part is timed in the script's own steps, some of which
    leave something out.
    """

    worker: ScriptProfile

    def __init__(self, worker: ScriptProfile) -> None:
        settings = worker.settings
        rule = StoppingRule.of(settings.search, settings.training_steps or math.inf)
        super().__init__(worker, rule, worker.waits, dict(settings.allreduce_s))

    @property
    def turn(self) -> int:
        """See `Course`."""
        return max(1, self.worker.loader_workers)

    def use_up_batches(self) -> None:
        """Take the batches that the loader has ready, equally many on each worker. Collective."""
        loader = self.worker.loader
        ahead = self.worker.loader_workers * (getattr(loader, "_prefetch_factor", None) or 0)
        left = 0
        with contextlib.suppress(TypeError, AttributeError):
            left = len(loader) - loader._num_yielded - 1
        (least,) = self.worker.agree(-float(max(0, min(ahead, left))))
        for _ in range(round(-least)):
            next(loader)
        self.waits.take()

    def left_out_s(self) -> float:
        """See `Course`."""
        return self.worker.left_out_s

    def processor_seconds(self) -> ProcessorSeconds:
        """See `Course`."""
        return self.worker.processor_seconds()

    def was_suspended(self) -> bool:
        """See `Course`. A script cannot be started again to measure everything anew."""
        (suspended,) = self.worker.agree(float(self.worker.suspensions.take()))
        return bool(suspended)

    def parts(self) -> Steps[None]:
        """Time parts of steps, then look at gradients. Collective."""
        (step_s,) = self.worker.agree(self.mean_s("step"))
        yield from self._time_optimizer(step_s)
        yield from self._time_computation()
        self.time_all_reduce()
        yield from self._probe_noise(step_s)

    def _time_optimizer(self, step_s: float) -> Steps[None]:
        seconds: list[float] = []
        in_time = max(math.ceil(OPTIMIZER_SECONDS / step_s), LEAST_OPTIMIZER_STEPS)
        self.worker.optimizer_s = seconds
        for _ in range(min(OPTIMIZER_STEPS, in_time)):
            yield
        self.worker.optimizer_s = None
        self.samples["optimizer"] = seconds
        self.round_steps["optimizer"] = 1

    def _time_computation(self) -> Steps[None]:
        """Time steps without synchronization; a single worker's steps never have any."""
        steps = self.round_steps["step"]
        optimizer_s = self.mean_s("optimizer")
        self.round_steps["compute"] = steps
        if self.worker.env.world_size == 1:
            both = zip(self.samples["step"], self.samples["data"], strict=True)
            self.samples["compute"] = [without(whole, wait + optimizer_s) for whole, wait in both]
            return
        self.worker.unsynchronized = True
        # the first such step has something to set up
        yield
        self.samples["compute"], _ = yield from self.rounds(steps, apart_s=optimizer_s)
        self.worker.unsynchronized = False
        yield

    def _probe_noise(self, step_s: float) -> Steps[None]:
        """Estimate the noise scale from gradients at weights that stay as they are.

        The parts compared are the workers' local batches or, for a single worker, the batches of
        two steps.
        """
        worker = self.worker
        batch = worker.configuration.local_batch
        world = worker.env.world_size
        # BatchNorm has no statistics of a single sample
        if batch < 2:
            return
        steps = 1 if world > 1 else 2
        in_time = max(math.ceil(NOISE_SECONDS / (steps * step_s)), LEAST_PASSES)
        norms: list[tuple[float, float]] = []
        worker.unsynchronized = world > 1
        with captured(worker.parameters) as gradients:
            for _ in range(min(PASSES, in_time)):
                own: list[Tensor] = []
                for _ in range(steps):
                    yield
                    own.append(flatten(gradients, worker.parameters))
                squares = sum(map(squared_length, own))
                norms.append(shared_norms(worker, sum(own[1:], own[0]), squares, steps))
        worker.unsynchronized = False
        self.noise = estimate_from(norms, batch, batch * world * steps)


@contextlib.contextmanager
def captured(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Yield a list that holds copies of the gradients that backward passes leave.

    They are this worker's own, before clipping, unscaling or anything else changes them. Unlike a
    communication hook of DDP's, this takes nothing away from the script.
    """
    found: list[Tensor | None] = [None] * len(parameters)

    def note(index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            found[index] = parameter.grad.detach().to(dtype, copy=True)

    with contextlib.ExitStack() as handles:
        for index, parameter in enumerate(parameters):
            hook = partial(note, index)
            handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call] # torch's
            handles.enter_context(handle)
        yield found
