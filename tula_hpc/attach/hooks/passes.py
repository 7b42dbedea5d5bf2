"""Listener of a script's steps; notes on its loaders and passes: pauses, use, changes by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tula_hpc.attach.hooks.find_model import objects_of
from tula_hpc.attach.hooks.patches import after_forward
from tula_hpc.batches import LoaderPass, data_of, leaves_of, tensors_of

# passes apart may come with all of the first steps, by chance
FEW_STEPS = 8
# elements of a parameter that tell whether it changes
SUMMED = 64


class Listener:
    """Receiver of the events of a script's steps; most handle only a few of these."""

    def model_wrapped(self, model: DistributedDataParallel) -> None:
        """Note a model that the script has just wrapped, before its first forward pass."""

    def iterating(self, loader: object) -> None:
        """Note that an iterator over batches was made or begins anew, be it for one batch alone."""

    def loading_begins(self, loader: object) -> None:
        """Note that one was made for an epoch, or an evaluation."""

    def batch_wanted(self) -> None:
        """Note that the script now waits for a batch."""

    def batch_loaded(self, loader: object, waited_s: float) -> None:
        """Note that it has got one from an iterator, after so many seconds."""

    def evaluating(self) -> None:
        """Note a forward pass of the model that is none of training."""

    def forward_begins(self, samples: int) -> None:
        """Note that a forward pass in training begins, with so many samples; 0: unknown."""

    def pass_unused(self, samples: int) -> None:
        """Note that a pass since the last step was no part of this one: no gradient came from it."""

    def gradients_ready(self) -> None:
        """Note that the optimizer will now change the parameters by their gradients."""

    def step_ends(self) -> None:
        """Note that it has."""

    def asked(self) -> Collection[int]:
        """Return numbers of samples of which a pass should have one; none: it is not known."""
        return ()

    def trains_apart(self, optimizer: Optimizer) -> bool:
        """Tell whether a step before any model is in DistributedDataParallel does not count."""
        return False

    def refuse(self, why: str) -> None:
        """Note that the script cannot be watched; `why` follows its name."""

    def begins_anew(self) -> None:
        """Note that another optimizer counts from now, or a larger model than that of the steps so far."""

    def trains_anew(self, missed: int = 0) -> bool:
        """Note that the model is about to be trained from its beginning, or by another optimizer.

        That one has taken so many steps of which nobody was told. Return whether its steps count.
        """
        return True

    def meets(self) -> None:
        """Note that the script's process is about to meet the others."""


@dataclass(slots=True, eq=False)
class Source:
    """Iterator of a loader, and the batch that it has last given out.

    Without an iterator it stands for a script that loads in a way of its own.
    """

    # which is not kept alive
    loader: Callable[[], object | None] = lambda: None
    # its id
    key: int = 0
    # its data set by the id; 0: not known
    data: int = 0
    # of its last batch; 0: not known
    items: int = 0
    # of the pass that it is in; None: not asked yet
    told: LoaderPass | None = None

    @property
    def is_gone(self) -> bool:
        """True once the iterator is, as after an evaluation: it gives this batch no more."""
        return self.key != 0 and self.loader() is None


class Sources:
    """The iterators that there are."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[object, Source] = weakref.WeakKeyDictionary()

    def of(self, loader: object) -> Source:
        """Return what is known of an iterator, which is the same object each time."""
        known = self._known.get(loader)
        if known is None:
            known = Source(weakref.ref(loader), id(loader), data_of(loader))
            self._known[loader] = known
        return known

    def begin(self, loader: object) -> None:
        """Forget what an iterator has told of its pass, as the next one may be longer."""
        known = self._known.get(loader)
        if known is not None:
            known.told = None


class Apart:
    """Passes between two steps that are none of training: a pause, unless they come with most steps.

    Some losses take a pass without gradients at every step, and are a part of it. Where training's
    loader begins anew as well, it is an epoch's end, however few steps an epoch has.
    """

    def __init__(self) -> None:
        # since the last step there was such a pass, or a beginning of training's loader
        self.is_noted = False
        self._has_passes = False
        self._begins = False
        self._steps = 0

    def note_pass(self) -> None:
        """Note such a pass since the last step."""
        self.is_noted = True
        self._has_passes = True

    def note_loader(self, *, is_of_steps: bool) -> None:
        """Note that a loader has begun anew since the last step: training's, or an evaluation's."""
        if is_of_steps:
            self.is_noted = True
            self._begins = True
        else:
            self.note_pass()

    def step_ends(self) -> None:
        """Forget what was within the step."""
        self.is_noted = self._has_passes = self._begins = False

    def is_pause(self, steps: int) -> bool:
        """Tell whether a pause ends, with the first pass of training after so many steps."""
        is_epoch = self._has_passes and self._begins
        is_noted = self.is_noted
        self.step_ends()
        if is_epoch or not is_noted:
            return is_epoch
        self._steps += 1
        return not self.are_of_steps(steps)

    def are_of_steps(self, steps: int) -> bool:
        """Tell whether most of so many steps have such passes, without an epoch's end."""
        return 2 * self._steps >= max(steps, FEW_STEPS)


class StepPasses(list[int]):
    """Forward passes of each step, in their order."""

    @property
    def usual(self) -> int:
        """Return the passes that most steps have; 0: there was no step."""
        return max(self, key=self.count, default=0)

    @property
    def grow(self) -> bool:
        """Tell whether steps have taken more and more, as in the warm-up of YOLO."""
        return len(self) >= 6 and self == sorted(self) and self[2] < self[-3]


class Pass:
    """Forward pass of a step.

    Attributes:
        samples: As its arguments tell; 0: unknown.
        is_loaded: It has taken a batch of training's loader, which is a part of an epoch in any case.
        is_used: A backward pass has come to its output; None: nobody knows.
    """

    def __init__(self, samples: int, *, is_loaded: bool) -> None:
        self.samples = samples
        self.is_loaded = is_loaded
        self.is_used: bool | None = None

    def returns(self, output: Any) -> None:
        """Watch what the pass has returned, as it is when it leaves the model."""
        for leaf in leaves_of(output):
            # a distribution over actions has its tensors in attributes
            inner = leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {})
            for tensor in tensors_of(inner):
                self.is_used = bool(self.is_used)
                if tensor.grad_fn is not None:
                    # not the tensor's own hook, of which torch warns where it is saved
                    tensor.grad_fn.register_prehook(self._is_reached)

    def _is_reached(self, _: object) -> None:
        self.is_used = True


class Forwards:
    """Forward passes since the last step, of which some may lead to no gradient.

    So a policy acts in an environment where the script does without `torch.no_grad`. After some
    steps without such a pass none is looked for, as that takes time, until a step has more passes.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        # since the last step, and the most of a step
        self.count = 0
        self._most = 0
        self._passes: list[Pass] = []
        # of which the model's next output is; None: of none that was noted
        self.inside: Pass | None = None
        # None: none is looked for
        self.hook: RemovableHandle | None = None
        self._steps = 0
        self._has_unused = False

    def watch(self, model: nn.Module) -> None:
        """Look for such passes of this model, from now on."""
        self._stop()
        self._model = model
        self._steps = 0
        self.hook = after_forward(model, self._returns)

    def begin(self, samples: int, *, is_loaded: bool) -> None:
        """Note that a pass begins."""
        self.count += 1
        if self.hook is None:
            if self._model is None or self.count <= self._most:
                return
            self.watch(self._model)
        self.inside = Pass(samples, is_loaded=is_loaded)
        self._passes.append(self.inside)

    def end_step(self) -> list[int]:
        """Return the samples of passes that led to no gradient, beside others that did.

        While none is looked for, only `count` has to begin anew with a step.
        """
        self._most = max(self._most, self.count)
        self.count = 0
        unused = []
        if any(each.is_used for each in self._passes):
            apart = (each for each in self._passes if each.is_used is False and not each.is_loaded)
            unused += [each.samples for each in apart]
        self._passes.clear()
        self._has_unused |= bool(unused)
        self._steps += 1
        if self._steps == FEW_STEPS and not self._has_unused:
            self._stop()
        return unused

    def _returns(self, module: nn.Module, args: object, output: Any) -> None:
        if self.inside is not None:
            self.inside.returns(output)

    def _stop(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        self.hook = None
        self._passes.clear()
        self.inside = None


class BackwardPasses:
    """Counts backward passes, and finds out that parameters change though no optimizer has stepped.

    At such a change `refuse` is called, with what follows the script's name.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.refuse = refuse
        # passes so far
        self.count = 0
        # an optimizer of torch has taken a step
        self.is_stepped = False
        self._sums: list[tuple[Tensor, float]] = []

    def install(self) -> None:
        """Watch from now on."""
        original = torch.autograd.backward

        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.count += 1
            if not self.is_stepped:
                self._look()

        vars(torch.autograd)["backward"] = backward

    def _look(self) -> None:
        # passes alone say nothing: a step may have many
        if self.count == FEW_STEPS:
            trained = [p for p in objects_of(nn.Parameter) if p.grad is not None]
            self._sums = [(p, _sum_of(p)) for p in trained]
        elif self.count == 2 * FEW_STEPS and any(_sum_of(p) != was for p, was in self._sums):
            why = (
                "changes its parameters by hand, or by an optimizer of another library, as fastai's; "
                "expected optimizer.step() of one of torch.optim"
            )
            self.refuse(why)


def _sum_of(parameter: Tensor) -> float:
    return float(parameter.detach().flatten()[:SUMMED].double().sum())
