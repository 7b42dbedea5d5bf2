"""Steps of a script as a profile sees them, and the pauses between them that are not training.

The script trains as it always does, except that its learning rates are 0 during each update; they
are restored after each step, so that no schedule notices. Pauses between steps, such as an
evaluation or the start of another epoch, are left out of the times, unless most steps have them.
So are gaps that are long and rare.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tula_hpc.attach import kept_things
from tula_hpc.attach.hooks.find_model import (
    as_wrapped,
    is_sharded,
    model_of,
    modules_with,
    name_of,
    parameters_of,
    trained_in,
)
from tula_hpc.attach.hooks.passes import FEW_STEPS, Apart, StepPasses
from tula_hpc.attach.hooks.step_times import LongGaps, Pause
from tula_hpc.attach.reporting import ChildSpec, Mode
from tula_hpc.attach.script import ParsedOptions, steps_asked
from tula_hpc.attach.train.peers import ScriptPeers, lacking_in
from tula_hpc.attach.train.script_scaling import copies_parameters
from tula_hpc.batches import LoaderPass, length_of
from tula_hpc.config import TrainingSpec
from tula_hpc.ddp.process_group import PROFILE_COLLECTIVE_TIMEOUT
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import InputError
from tula_hpc.optim.scaled_step import copies
from tula_hpc.profiling.meters import ProcessorSeconds, processor_seconds
from tula_hpc.profiling.timing import LoaderWaits
from tula_hpc.records import Configuration

# most steps that a worker may take by itself before the model is in DistributedDataParallel
MOST_APART = 200
# steps in a row with the same number of passes, fewer than were asked for, after which a profile
# no longer waits for more passes
MOST_ALIKE = 64


class MeasuredSteps(Mode):
    """Times of a script's steps, and agreement with the other workers' processes."""

    configuration: Configuration
    options: ParsedOptions
    # of the training that is planned
    training: TrainingSpec

    def __init__(self, spec: ChildSpec, env: WorkerEnvironment, device: str) -> None:
        super().__init__(spec)
        self.env, self.expected_device = env, device
        self.device = torch.device("cpu")
        self.parameters: Sequence[Tensor] = ()
        self.waits = LoaderWaits(self.device)
        # training passes so far: how many had each number of samples, and how many each step had
        self.forward_samples = Counter[int]()
        self.step_passes = StepPasses()
        # how many steps took each number of batches from a loader; batches of this step, by loader
        self.step_batches = Counter[int]()
        self._batches = Counter[int]()
        # steps taken while waiting for one with as many passes as were asked for
        self.awaited = 0
        # iterator that gave out the last batch of training
        self.loader: Any = None
        # iterators that gave out others, and whether an earlier one of them has gone on
        self._loaders: weakref.WeakSet[object] = weakref.WeakSet()
        self.takes_turns = False
        # an iterator went on from one epoch of `tula.epochs` to the next, where a resumed script
        # would begin it anew
        self.has_one_iterator = False
        # iterators begun since the last epoch of `tula.epochs` began; None: there was no such epoch
        self._begun: weakref.WeakSet[object] | None = None
        self._went_on: weakref.WeakSet[object] = weakref.WeakSet()
        # whether the steps to come leave out the all-reduce of gradients
        self.unsynchronized = False
        # seconds of the optimizer in each step; None: they are not timed
        self.optimizer_s: list[float] | None = None
        # steps taken before a model is in DistributedDataParallel, and the class that they trained
        self._steps_apart = 0
        self.trained_apart = ""
        # time so far that belongs to no step: seconds, and the processors' seconds in it
        self.left_out_s = 0.0
        self._left_out = ProcessorSeconds(0.0, 0.0)
        self._peers: ScriptPeers
        self._forwards = 0
        # backward passes before this step
        self._backward_before = 0
        # groups whose learning rates are 0 now, each with its own rate
        self._rates: list[tuple[dict[str, Any], Any]] = []
        # copies of the parameters during an update that training would scale
        self._copies: Mapping[Tensor, Tensor] = {}
        self._updating_since = 0.0
        # seconds of the steps of partners since the last step
        self._partners_s = 0.0
        self._ended_at = 0.0
        # when the present step began: when the last one ended, or the pause after it
        self._began_at = 0.0
        # wait for batches since the last step; None: no loader has given one
        self._loading_s: float | None = None
        self._apart = Apart()
        self._long_gaps = LongGaps()
        # processor seconds of all steps when an epoch or an evaluation began after the last step
        self._used_before: ProcessorSeconds | None = None
        self.pauses: list[Pause] = []
        self._mark = self.waits.mark()

    # events that the hooks report

    def epoch_begins(self) -> None:
        """Note that an epoch of `tula.epochs` begins."""
        self._begun = weakref.WeakSet()

    def iterating(self, loader: object) -> None:
        """See `Listener`."""
        if self._begun is not None:
            self._begun.add(loader)

    def loading_begins(self, loader: object) -> None:
        """Note that an epoch begins, or an evaluation."""
        self._apart.note_loader(is_of_steps=self.hooks.is_of_steps(loader))
        if self._used_before is None:
            self._used_before = self.processor_seconds()

    def evaluating(self) -> None:
        """Note an evaluation's pass."""
        self._apart.note_pass()

    def batch_wanted(self) -> None:
        """Note that the device gets no further work from now on, until the batch arrives."""
        self.waits.launched()

    def batch_loaded(self, loader: object, waited_s: float) -> None:
        """Note the wait for a batch."""
        self.waits.arrived(waited_s)
        self._loading_s = (self._loading_s or 0.0) + waited_s
        if self.hooks.is_of_steps(loader):
            self._batches[id(loader)] += 1
        if self._begun is not None and loader not in self._begun:
            self._went_on.add(loader)

    def forward_begins(self, samples: int) -> None:
        """Note a training pass; the first of a step ends the pause before it."""
        if self._forwards == 0:
            if (loader := self.hooks.loader) is not None:
                if loader is not self.loader:
                    self.takes_turns |= loader in self._loaders
                    self._loaders.add(loader)
                self.loader = loader
                self.has_one_iterator |= loader in self._went_on
            if self.steps:
                self._end_of_pause()
        self._forwards += 1
        self.forward_samples[samples] += 1
        if self.unsynchronized and isinstance(self.hooks.model, DistributedDataParallel):
            self.hooks.model.require_backward_grad_sync = False

    def pass_unused(self, samples: int) -> None:
        """See `Listener`."""
        self._forwards -= 1
        self.forward_samples -= Counter((samples,))

    def gradients_ready(self) -> None:
        """Set the learning rates to 0, so that the weights stay as they are."""
        if self.hooks.optimizer is not None:
            self._begin_update(self.hooks.optimizer)

    def partner_ready(self, optimizer: Optimizer) -> None:
        """Do the same for an optimizer that steps along with the one that counts."""
        self._begin_update(optimizer)

    def partner_stepped(self, optimizer: Optimizer) -> None:
        """Add the time of its step to the optimizers'; only now does the wait for a batch begin."""
        self._partners_s += self._end_update()
        self.waits.launched()
        self._ended_at = time.perf_counter()

    def _begin_update(self, optimizer: Optimizer) -> None:
        if self.optimizer_s is not None:
            self.synchronize_device()
            self._updating_since = time.perf_counter()
        if copies_parameters(self.training, self.env.world_size, optimizer):
            with torch.no_grad():
                self._copies = copies([p for p in parameters_of(optimizer) if p.grad is not None])
        # they are still 0 after a step that failed before its end
        if self._rates:
            return
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                self._rates.append((group, rate))
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0

    def _end_update(self) -> float:
        """Restore the learning rates; return the update's seconds, 0 if they are not timed."""
        seconds = 0.0
        if self.optimizer_s is not None:
            self.synchronize_device()
            seconds = time.perf_counter() - self._updating_since
        self._copies = {}
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates.clear()
        return seconds

    def step_ends(self) -> None:
        """Restore learning rates and synchronization, and go on with the profile."""
        seconds = self._end_update()
        if self.optimizer_s is not None:
            self.optimizer_s.append(seconds + self._partners_s)
        self._partners_s = 0.0
        if self.unsynchronized and isinstance(self.hooks.model, DistributedDataParallel):
            _synchronize_again(self.hooks.model)
        # a model without a wrapper is only known from the end of the first step on
        if self.steps:
            self.step_passes.append(self._passes())
            self.step_batches[max(self._batches.values(), default=0)] += 1
            self._long_gaps.step_ends(time.perf_counter() - self._began_at)
        self._batches.clear()
        self._forwards = 0
        self._backward_before = self.hooks.backward.count
        self._loading_s = None
        self._apart.step_ends()
        self._used_before = None
        # a script that loads in its own way never reports that it wants a batch
        self.waits.launched()
        self.count_step()
        try:
            self.after_step()
        except BaseException as error:  # noqa: BLE001 # the script must not catch it
            # a refusal is shown without a traceback
            self.fail(error.with_traceback(None) if isinstance(error, InputError) else error)
        # not before `after_step`, where a round that ends takes its waits
        self._mark = self.waits.mark()
        self._ended_at = self._began_at = time.perf_counter()

    def _passes(self) -> int:
        """Return the passes of this step; several forward passes for one loss count as one."""
        backward = self.hooks.backward.count - self._backward_before
        # a script that calls autograd's functions itself has backward passes that are not counted
        return min(self._forwards, backward) if backward else self._forwards

    def await_passes(self, parts: int) -> Iterator[None]:
        """Wait for a step of `parts` passes; scripts may begin with fewer, as YOLO. Collective.

        Give up when the number of passes stays the same for `MOST_ALIKE` steps.
        """
        before = alike = 0
        while alike < MOST_ALIKE:
            (passes,) = map(int, self.agree(*self.step_passes[-1:] or [0]))
            if not 0 < passes < parts:
                if self.awaited:
                    del self.step_passes[:-1]
                return
            alike = alike + 1 if passes == before else 1
            before = passes
            self.awaited += 1
            yield

    def trains_apart(self, optimizer: Optimizer) -> bool:
        """See `Listener`. A few such steps may search for a rate; `MOST_APART` are the training."""
        if self.env.world_size == 1 or self._steps_apart == MOST_APART:
            return False
        self._steps_apart += 1
        if not self.trained_apart:
            models = modules_with(parameters_of(optimizer))
            if not models or is_sharded(models[0]):
                return False
            self.trained_apart = name_of(models[0])
        return True

    def unwrapped(self, model: str) -> InputError:
        """Return the error for workers that do not train together."""
        return InputError(
            f"{self.spec.program.name} does not wrap {model}, the first model that an optimizer "
            f"trains, in DistributedDataParallel, without which {self.env.world_size} workers "
            "train apart: call init_process_group, then DistributedDataParallel(model), where "
            "WORLD_SIZE is above 1; other ways to exchange gradients are not measured"
        )

    def begins_anew(self) -> None:
        """Forget the steps of a smaller model."""
        super().begins_anew()
        self.forward_samples.clear()
        self.step_passes.clear()
        self.step_batches.clear()
        self.awaited = 0
        self._forwards = 0
        self._apart = Apart()
        self.pauses.clear()

    def after_step(self) -> None:
        """Do the profile's work between this step and the next."""
        raise NotImplementedError

    def _end_of_pause(self) -> None:
        if self._apart.is_pause(self.steps):
            self.synchronize_device()
            self.waits.back_to(self._mark)
            seconds = time.perf_counter() - self._ended_at
            self._leave_out(Pause(self.steps, seconds, ends_epoch=self._apart.ended_epoch))
            if self._used_before is not None:
                self._left_out = processor_seconds().since(self._used_before)
            return
        if self._apart.are_of_steps(self.steps):
            # passes that come with most steps are a part of them: the first ones were no pauses
            self.pauses = [each for each in self.pauses if each.steps > FEW_STEPS]
        gap_s = time.perf_counter() - self._ended_at
        if paused_s := self._long_gaps.pause_s(gap_s - (self._loading_s or 0.0)):
            self._leave_out(Pause(self.steps, paused_s, is_gap=True))
        elif self._loading_s is None:
            self.waits.arrived(gap_s)

    def _leave_out(self, pause: Pause) -> None:
        """Leave a pause that ends now out of the steps' times."""
        self.left_out_s += pause.seconds
        self.pauses.append(pause)
        self._began_at = time.perf_counter()

    # used by the course of a profile

    def processor_seconds(self) -> ProcessorSeconds:
        """Return the processor seconds of all steps so far."""
        return processor_seconds().since(self._left_out)

    @property
    def found(self) -> tuple[nn.Module, Optimizer]:
        """The model and the optimizer whose steps count; they are known since the first step."""
        model = as_wrapped(cast("nn.Module", self.hooks.model))
        return model, cast("Optimizer", self.hooks.optimizer)

    def _model_name(self) -> str:
        return name_of(self.found[0])

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer whose steps count, and those that step along with it."""
        return [self.found[1], *self.hooks.partners.found]

    @property
    def not_counted(self) -> list[Optimizer]:
        """Optimizers whose steps are not part of those that count, and never were."""
        others = self.hooks.others.items()
        never = (each for each, has_counted in others if not has_counted)
        return [each for each in never if each not in self.hooks.partners.found]

    def _others(self) -> list[str]:
        """Return the optimizers that do not count, with their models as far as these are known."""
        names = ((type(each).__name__, model_of(each)) for each in self.not_counted)
        return [" of ".join(filter(None, each)) for each in names]

    def meet(self) -> None:
        """Make a group of this package's own with the other processes. Collective.

        Raises:
            InputError: The processes do not train together, or not as a profile can measure.
        """
        name, world = self.spec.program.name, self.env.world_size
        model, _ = self.found
        self.parameters = trained_in(model)
        if not self.parameters:
            raise InputError(
                f"{name}: no parameter of the model has requires_grad, so that nothing is trained"
            )
        if is_sharded(model):
            raise InputError(
                f"{name} shards its model (FSDP), which is not measured or planned here; expected "
                "DistributedDataParallel"
            )
        self.device = self.parameters[0].device
        self.waits.device = self.device
        self._long_gaps.note_device(self.device)
        if self.device.type != self.expected_device:
            raise InputError(
                f"{name} trains on {self.device.type}, but {self.expected_device} is to be "
                f'measured; move the model there, or set device = "{self.device.type}" in the '
                f"cluster file (tula attach: --device {self.device.type})"
            )
        if world > 1 and not isinstance(model, DistributedDataParallel):
            raise self.unwrapped(name_of(model))
        if world > 1 and not getattr(model, "require_backward_grad_sync", True):
            raise InputError(
                f"{name} takes its steps within no_sync, so that its workers exchange no gradients; "
                "take the last backward pass of each step outside of it (training that averages "
                "weights instead, as accelerate's LocalSGD, cannot be planned)"
            )
        if world > 1 and dist.get_world_size() != world:
            raise InputError(
                f"{name} made a process group of {dist.get_world_size()} workers; expected "
                f"{world}, as in WORLD_SIZE"
            )
        self._peers = ScriptPeers(world, PROFILE_COLLECTIVE_TIMEOUT)
        self._peers.device = self.device

    def check_kept(self) -> None:
        """Refuse a script that keeps too little of its training. Collective.

        Raises:
            InputError: The weights or the optimizer would begin anew after a stop.
        """
        # a checkpoint has the states of rank 0
        lacking = self._peers.texts(lacking_in(kept_things(), self.found[0], *self.optimizers))[0]
        if lacking:
            raise InputError(lacking, source="tula.keep")

    def agree(self, *values: float) -> list[float]:
        """Return the largest of each value over all workers. Collective."""
        return self._peers.agree(*values)

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all workers. Collective."""
        return self._peers.total(*values)

    def synchronize_device(self) -> None:
        """Wait until the device's queue is empty."""
        self._peers.synchronize_device()

    @property
    def loader_workers(self) -> int:
        """Processes of the training's loader; 0 if it has none, or is not torch's."""
        return int(getattr(self.loader, "_num_workers", 0))

    @property
    def loaded_samples(self) -> int:
        """Samples in the training's data set; 0: unknown.

        A data set with just the samples of all steps that were asked for says nothing of an epoch.
        """
        samples = length_of(getattr(self.loader, "_dataset", None)) or 0
        steps = steps_asked(self.spec.program.arguments, self.options)
        is_of_all = samples in {self.configuration.global_batch * each for each in steps}
        return 0 if self.gives_batches or self.takes_turns or is_of_all else samples

    @property
    def loader_batches(self) -> int:
        """Batches of this worker's loader that an epoch takes; 0: unknown."""
        return int(min(length_of(self.loader) or 0, _most_batches(self.found[0])))

    @property
    def loader_mean(self) -> float:
        """Mean samples in a batch, for a sampler whose batches have no fixed size; else 0."""
        batches = (length_of(self.loader) or 0) * self.env.world_size
        if not batches or LoaderPass(self.loader).size:
            return 0.0
        return self.loaded_samples / batches

    @property
    def gives_batches(self) -> bool:
        """Tell whether each item of the loader is a whole batch, made by the data set."""
        usual = self.forward_samples.most_common(1)
        return LoaderPass(self.loader).gives_items and bool(usual) and usual[0][0] > 1


def _most_batches(model: nn.Module) -> float:
    """Return the batches to which Lightning's Trainer limits an epoch; inf: it does not."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    trainer = getattr(module, "_trainer", None)
    return float(getattr(trainer, "num_training_batches", math.inf))


def _synchronize_again(model: DistributedDataParallel) -> None:
    """Have a model reduce its gradients again, once the forward pass that it is in has ended."""

    def restore() -> None:
        model.require_backward_grad_sync = True
        if model.find_unused_parameters:
            # else parameters that these passes used would count as used in the next one
            model.reducer._reset_state()

    def restore_after_pass(*_: object) -> None:
        handle.remove()
        restore()

    if DistributedDataParallel._active_ddp_module is model:
        # Lightning's manual optimization steps within a pass, which has to end as it began
        handle = model.register_forward_hook(restore_after_pass)
    else:
        restore()
