"""The listener to a script's steps, and notes on its loaders, forward and backward passes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tula_hpc.attach.hooks.find_model import objects_of
from tula_hpc.attach.hooks.patches import after_forward
from tula_hpc.batches import LoaderPass, data_of, leaves_of, note_cuts, tensors_of

# steps, or backward passes, that are too few to judge by
FEW_STEPS = 8
# first elements of a parameter, whose sum shows whether the parameter has changed
SUMMED = 64


class Listener:
    """Receiver of the events of a script's steps; most handle only a few of these."""

    def handler(self, event: str) -> Any:
        """Return the method for an event; None if nothing is done at that event."""
        is_own = getattr(type(self), event) is not getattr(Listener, event)
        return getattr(self, event) if is_own else None

    def iterating(self, loader: object) -> None:
        """Note that an iterator over batches was made or reset, even if for a single batch."""

    def loading_begins(self, loader: object) -> None:
        """Note that such an iterator was made or reset for an epoch, or for an evaluation."""

    def batch_wanted(self) -> None:
        """Note that the script now waits for a batch."""

    def batch_loaded(self, loader: object, waited_s: float) -> None:
        """Note that an iterator gave the script a batch, after a wait of `waited_s` seconds."""

    def evaluating(self) -> None:
        """Note a forward pass of the model that is not part of training."""

    def forward_begins(self, samples: int) -> None:
        """Note that a forward pass in training begins; `samples` is 0 where unknown."""

    def pass_unused(self, samples: int) -> None:
        """Note that a pass since the last step was no part of this step: it led to no gradient."""

    def gradients_ready(self) -> None:
        """Note that the optimizer is about to change the parameters by their gradients."""

    def step_ends(self) -> None:
        """Note that the optimizer has changed the parameters."""

    def partner_ready(self, optimizer: Optimizer) -> None:
        """Note that a partner of the optimizer that counts is about to step; see `Partners`."""

    def partner_stepped(self, optimizer: Optimizer) -> None:
        """Note that a partner has stepped: the step that counts has gone on until now."""

    def asked(self) -> Collection[int]:
        """Return the numbers of samples that a forward pass is expected to have; empty: unknown."""
        return ()

    def trains_apart(self, optimizer: Optimizer) -> bool:
        """Tell whether a step before any model is in DistributedDataParallel is to be left out."""
        return False

    def refuse(self, why: str) -> None:
        """Note that the script cannot be watched; `why` follows the script's name in a message."""

    def trains_further(self) -> None:
        """Note that an optimizer whose steps do not count is about to step."""

    def begins_anew(self) -> None:
        """Note that from now on another optimizer counts, or a larger model than so far."""

    def trains_anew(self, missed: int = 0) -> bool:
        """Note that the model is about to be trained from its beginning, or by another optimizer.

        `missed` steps of that optimizer went by unnoticed. Return whether its steps are to count.
        """
        return True

    def meets(self) -> None:
        """Note that the script's process is about to join the process group."""


@dataclass(slots=True, eq=False)
class Source:
    """Iterator of a loader, and the batch that it gave out last.

    Without an iterator: a script that loads its batches in its own way.
    """

    # returns the iterator, which is not kept alive; None: there is none, or it no longer exists
    loader: Callable[[], object | None] = lambda: None
    # the iterator's id; 0: there is none
    key: int = 0
    # id of the iterator's data set; 0: unknown
    data: int = 0
    # items in the last batch; 0: unknown
    items: int = 0
    # items in the first batch of the pass, and the first two sizes of the first tensor there
    first_items: int = 0
    first_sizes: Sequence[int] = ()
    # what the iterator says of its present pass over the data; None: not asked yet
    loader_pass: LoaderPass | None = None

    def pass_of(self, loader: object) -> LoaderPass:
        """Return what the iterator, `loader`, says of its present pass over the data."""
        if self.loader_pass is None:
            self.loader_pass = LoaderPass(loader)
        return self.loader_pass

    def note_first(self, batch: object) -> None:
        """Note the first batch of a pass, whose items are known."""
        self.first_items = self.items
        self.first_sizes = next((tensor.shape[:2] for tensor in tensors_of(batch)), ())

    def is_whole(self, inputs: object, samples: int, items: int) -> bool:
        """Tell whether inputs are a batch of `items`, though their first dimension is `samples`.

        Sequences may be joined in one row, or have time as their first dimension, in the loader's
        batches or as the script turns them. Within vmap, inputs are one sample. `samples` is 0 for
        a class of the script's own.
        """
        is_one = isinstance(inputs, Tensor) and is_functorch_wrapped_tensor(inputs)
        if not samples or (items and is_one):
            return True
        if not self.first_sizes:
            return False
        first, *others = self.first_sizes
        if samples == first == 1:
            return True
        second = next((t.shape[1] for t in tensors_of(inputs) if t.dim() > 1), 0)
        # with time first, a script may pass on only some of the batch's steps
        is_turned = first != self.first_items or others not in ([], [second]) or others == [samples]
        return is_turned and 0 < items == second

    @property
    def is_gone(self) -> bool:
        """True once the iterator no longer exists, as after an evaluation."""
        return self.key != 0 and self.loader() is None


class Sources:
    """Sources of all iterators that exist."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[object, Source] = weakref.WeakKeyDictionary()

    def of(self, loader: object) -> Source:
        """Return what is known of an iterator, as the same object at each call."""
        known = self._known.get(loader)
        if known is None:
            known = Source(weakref.ref(loader), id(loader), data_of(loader))
            self._known[loader] = known
        return known

    def begin(self, loader: object) -> None:
        """Forget what an iterator said of its last pass, as the next pass may be longer."""
        note_cuts(loader)
        known = self._known.get(loader)
        if known is not None:
            known.loader_pass = None


def take(unused: deque[tuple[int, int]], samples: int) -> int | None:
    """Take the first unused batch of `samples` samples; return its data set; None: no batch."""
    for index, (data, items) in enumerate(unused):
        if items == samples:
            del unused[index]
            return data
    return None


class Apart:
    """Passes between two steps that are not part of training: a pause, unless most steps have them.

    Some losses take a pass without gradients at every step, which then belongs to the step. If
    training's loader begins anew as well, an epoch has ended, however few steps an epoch has.
    """

    def __init__(self) -> None:
        # since the last step there was such a pass, or training's loader began anew
        self.is_noted = False
        # the last pause was at an epoch's end: training's loader began anew
        self.ended_epoch = False
        self._has_passes = False
        self._begins = False
        self._steps = 0

    def note_pass(self) -> None:
        """Note a pass since the last step that is not part of training."""
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
        """Forget what was noted since the step before."""
        self.is_noted = self._has_passes = self._begins = False

    def is_pause(self, steps: int) -> bool:
        """Tell whether a pause ends, at the first training pass after `steps` steps."""
        is_epoch = self._has_passes and self._begins
        is_noted = self.is_noted
        self.ended_epoch = self._begins
        self.step_ends()
        if is_epoch or not is_noted:
            return is_epoch
        self._steps += 1
        return not self.are_of_steps(steps)

    def are_of_steps(self, steps: int) -> bool:
        """Tell whether most of `steps` steps have such passes, without an epoch's end."""
        return 2 * self._steps >= max(steps, FEW_STEPS)


class StepPasses(list[int]):
    """Number of forward passes of each step, in the order of the steps."""

    @property
    def usual(self) -> int:
        """Return the number of passes that most steps have; 0: there was no step."""
        return max(self, key=self.count, default=0)

    @property
    def grow(self) -> bool:
        """Tell whether steps have taken more and more passes, as in the warm-up of YOLO."""
        return len(self) >= 6 and self == sorted(self) and self[2] < self[-3]


class Pass:
    """Forward pass of a step.

    Attributes:
        samples: Samples in its arguments; 0: unknown.
        is_loaded: It took a batch of training's loader, so it is part of an epoch in any case.
        is_used: A backward pass has reached its output; None: no tensor of its output is known.
    """

    def __init__(self, samples: int, *, is_loaded: bool) -> None:
        self.samples = samples
        self.is_loaded = is_loaded
        self.is_used: bool | None = None

    def returns(self, output: Any) -> None:
        """Watch the output of the pass for a backward pass that reaches it."""
        for leaf in leaves_of(output):
            # a distribution over actions has its tensors in attributes
            inner = leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {})
            for tensor in tensors_of(inner):
                self.is_used = bool(self.is_used)
                if tensor.grad_fn is not None:
                    # not a hook on the tensor: torch would warn where such a tensor is saved
                    tensor.grad_fn.register_prehook(self._is_reached)

    def _is_reached(self, _: object) -> None:
        self.is_used = True


class Forwards:
    """Forward passes since the last step, some of which may lead to no gradient.

    A policy that acts in an environment without `torch.no_grad` makes such passes. The search for
    them takes time: it ends after some steps without any, until a step has more passes than before.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        # passes since the last step, and the most that any step had
        self.count = 0
        self.most = 0
        self._passes: list[Pass] = []
        # latest passes since the last step, if they were in evaluation mode and with gradients
        self.evaluated = 0
        # training is by such passes, as of scripts that never leave that mode after an evaluation
        self.in_evaluation = False
        # the pass whose output the model returns next; None: that pass is not watched
        self.inside: Pass | None = None
        # None: passes without a gradient are not looked for
        self.hook: RemovableHandle | None = None
        self._steps = 0
        self._has_unused = False

    def watch(self, model: nn.Module) -> None:
        """Look for passes of this model without a gradient, from now on."""
        self._stop()
        self._model = model
        self._steps = 0
        self.hook = after_forward(model, self._returns)

    def begin(self, samples: int, *, is_loaded: bool) -> None:
        """Note that a pass begins.

        While `hook` is None and `count` is below `most`, it is enough to add 1 to `count` instead.
        """
        self.count += 1
        if self.hook is None:
            if self._model is None or self.count <= self.most:
                return
            self.watch(self._model)
        self.inside = Pass(samples, is_loaded=is_loaded)
        self._passes.append(self.inside)

    def take_evaluated(self, backward: int) -> int:
        """Return how many passes in evaluation mode took the step that ends; 0 if others did.

        `backward` passes came since the last step, none of which was an evaluation's.
        """
        passes = min(self.evaluated, max(1, backward))
        self.evaluated = 0
        self.in_evaluation = self.count == 0
        return passes if self.in_evaluation else 0

    def end_step(self) -> list[int]:
        """Return the samples of each pass that led to no gradient, if other passes of the step did.

        While such passes are not looked for, it is enough to set `count` to 0 instead.
        """
        self.most = max(self.most, self.count)
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
    """Counts backward passes, and detects parameters that change though no optimizer has stepped.

    A backward pass within another one, as of activation checkpoints, is a part of it: torch may run
    it in a thread of its own. So, of passes that overlap in several threads, only the last counts.

    At such a change it calls `refuse` with the words that follow the script's name in the message.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.refuse = refuse
        # backward passes so far
        self.count = 0
        # an optimizer of torch has taken a step
        self.is_stepped = False
        # backward passes that have begun and not ended
        self._open = 0
        self._sums: list[tuple[Tensor, float]] = []

    def install(self) -> None:
        """Watch from now on."""
        original = torch.autograd.backward

        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._open += 1
            try:
                original(*args, **kwargs)
            finally:
                self._open -= 1
            if self._open:
                return
            self.count += 1
            if not self.is_stepped:
                self._look()

        vars(torch.autograd)["backward"] = backward

    def _look(self) -> None:
        # many passes without a step prove nothing, as gradient accumulation has them too
        if self.count == FEW_STEPS:
            trained = [p for p in objects_of(nn.Parameter) if p.grad is not None]
            self._sums = [(p, _sum_of(p)) for p in trained]
        elif self.count == 2 * FEW_STEPS and any(_sum_of(p) != was for p, was in self._sums):
            why = (
                "changes its parameters by hand, or by an optimizer of a library such as fastai; "
                "expected optimizer.step() of an optimizer of torch.optim"
            )
            self.refuse(why)


def _sum_of(parameter: Tensor) -> float:
    return float(parameter.detach().flatten()[:SUMMED].double().sum())
