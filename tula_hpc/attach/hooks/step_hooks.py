"""Find the step boundaries of a training script that does not know it is watched.

torch has global hooks around `optimizer.step`, which fire for every optimizer, also for those that
accelerate, Lightning and Hugging Face's Trainer wrap. The model that counts is the largest in
`DistributedDataParallel`. Without any, as with a single worker, it is found at the first step: the
module with the optimizer's parameters. A GAN's second optimizer has others, and does not count.

A step that `GradScaler` skips fires no hook. Lightning runs forward and backward in a closure, in
`optimizer.step`. It is wrapped: `gradients_ready` comes when it ends, before parameters change.
Batches of torch's `DataLoader` are watched where its iterator gives them out. If a script loads in
another way, the time between a step's end and the next forward pass is its wait for batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from tula_hpc.attach.hooks.find_model import (
    is_named,
    larger_than,
    modules_with,
    parameters_of,
    parts_with,
    size_of,
    trained_apart,
    watch_freezing,
    why_repeated,
    why_unheld,
    wrapped_and_trained,
)
from tula_hpc.attach.hooks.partners import Partners
from tula_hpc.attach.hooks.passes import BackwardPasses, Forwards, Listener, Source, Sources, take
from tula_hpc.attach.hooks.patches import (
    after,
    after_closure,
    around_next,
    at_first_call,
    before,
    before_forward,
    on_loopback_alone,
    refuse_other_workers,
)
from tula_hpc.batches import LoaderPass, data_of, length_of, samples_in, tensors_of

# most batches remembered that were given out and not yet used; the oldest are forgotten
MOST_AHEAD = 1024
# a script that takes more batches in a row than this without using any keeps its batches
FEW_AHEAD = 2
# steps without a new batch after which such a script is taken to use those that it keeps
KEPT_STEPS = 2
# most steps of smaller models before the largest's first: a WGAN's critic may begin with a hundred
MOST_AWAITED = 200
Others = MutableMapping[Optimizer, bool]


class Hooks:
    """Reports to a listener where the steps of this process's training begin and end.

    Attributes:
        model: The model as the script calls it; None until it is known.
        inner_model: That model without DistributedDataParallel around it.
        optimizer: The optimizer whose steps count; None before its first step.
        others: Other optimizers that have stepped; True: it counted before.
        partners: Those of them that step along with it.
        backward: Counter of backward passes.
        has_repeated: A pass took the same batch as the pass before, and was not counted.
        further_steps: Steps of `others` since the last step that counts.
        source: Source of the last step's batches, or of the present one's; None: no step yet.
    """

    def __init__(
        self, listener: Listener, counted: str | None = None, others: Others | None = None
    ) -> None:
        self.listener = listener
        # class name of the model that counts; None: the largest wrapped model counts
        self.counted = counted
        self.model: nn.Module | None = None
        self.inner_model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.others: Others = {} if others is None else others
        # an optimizer with the same parameters has taken the place of the one that counted
        self._is_renewed = False
        self.has_repeated = False
        self.further_steps = 0
        self.source: Source | None = None
        self._forward_hook: RemovableHandle | None = None
        self._forwards = Forwards()
        self.backward = BackwardPasses(listener.refuse)
        self.partners = Partners(listener, self.backward)
        self._sources = Sources()
        # iterators that have given a batch since the last step, by id, the latest last
        self._given: dict[int, Source] = {}
        self._last = Source()
        # an evaluation has used the last batch
        self._is_evaluated = False
        # iterators that gave batches for the step before, by id: training's, not an evaluation's
        self._prior: dict[int, Source] = {}
        # dimension of inputs that counts samples, if no loader shows their number; None: unknown
        self._dimension: int | None = None
        # batches given out that the model has not had: id of the data set, and samples
        self._unused: deque[tuple[int, int]] = deque(maxlen=MOST_AHEAD)
        # id of the inputs with which a pass took a batch, and backward passes before; 0: none did
        self._taken = (0, 0)
        # steps since the last new batch reached the model
        self._since_new = 0
        # batches given out in a row without a forward pass; whether there were more than FEW_AHEAD
        self._in_a_row = 0
        self._keeps_batches = False
        # id of the iterator whose batches this step takes; 0: unknown
        self._key = 0
        # id of those batches' data set, 0: unknown; each epoch may have a loader of its own
        self._data = 0
        # ids of data sets from whose last iterator the script took only the first batch: no epoch
        self._firsts_alone: set[int] = set()

    def install(self) -> Hooks:
        """Watch from now on, and return the hooks; call this before the script runs."""
        after(DistributedDataParallel, "__init__", self._note_wrapped)
        # an iterator with persistent workers is not made anew for an epoch, but reset
        for name in ("__init__", "_reset"):
            after(dataloader._BaseDataLoaderIter, name, self._begin_loading)
        around_next(self.next_batch, self.listener)
        self.backward.install()
        refuse_other_workers(self.listener.refuse)
        before((dist, dist.distributed_c10d), "init_process_group", self.listener.meets)
        on_loopback_alone()
        watch_freezing()
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        return self

    def _note_wrapped(self, model: DistributedDataParallel, *_: Any) -> None:
        # a script that begins again with a smaller batch wraps the same model once more
        again = model.module is self.inner_model
        larger = self.model is None or again or size_of(model) > size_of(self.model)
        if larger and is_named(model, self.counted):
            self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self.model = model
        self._forwards.watch(model)
        # stored, as it is needed several times in every step
        self.inner_model = model.module if isinstance(model, DistributedDataParallel) else model
        self._forward_hook = before_forward(model, self._before_forward)

    def _modules_of(self, owned: set[Tensor], *, parts: bool = True) -> list[nn.Module]:
        """Return the modules that may be the model of these parameters, inner ones first."""
        found = modules_with(owned) or (parts_with(owned) if parts else [])
        return found if self.counted in {None, *(type(m).__name__ for m in found)} else []

    def _watch_one_of(self, modules: Sequence[nn.Module]) -> None:
        """Watch whichever of several nested modules the script calls.

        A class of the script may call its layers one by one, or never be called itself.
        """
        self._watch(modules[0])

        def begin(model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            # unless another model counts by now
            if self.model is modules[0] and model is not modules[0]:
                self._watch(model)
                self._before_forward(model, args, kwargs)

        at_first_call(modules, begin, larger_than(modules[0]))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        # evaluation has no gradients; Lightning switches the mode of the inner model only
        inner = module if self.inner_model is None else self.inner_model
        in_a_row = self._in_a_row
        self._in_a_row = 0
        forwards = self._forwards
        forwards.inside = None
        latest = self._last
        if torch.is_grad_enabled() and (inner.training or forwards.in_evaluation):
            forwards.in_evaluation = not inner.training
            samples = latest.items
            first = args[0] if args else None
            if not (isinstance(first, Tensor) and first.dim() and first.size(0) == samples > 0):
                samples = self._samples_in(args, kwargs)
            # the batch usually comes from the loader that gave a batch last
            is_last = samples == latest.items and self._given
            key = latest.key if is_last else self._key_of(samples)
            if not self._key:
                self._key = key
                self.source = self._given.get(key, latest)
                # an iterator that no longer exists counts only if it gave this batch
                self._data = self.source.data if key else data_of(self.loader)
            elif key != self._key and key in self._prior and self._key in self._prior:
                # the batch of a second loader, which each step uses along with the first
                return
            unused = self._unused
            is_first = unused and unused[0][1] == samples
            inputs = id(args[0] if args else next(iter(kwargs.values()), None))
            data = None
            # else the same batch again, for the same loss, while a framework has the next one ready
            if in_a_row or self._taken != (inputs, self.backward.count):
                data = unused.popleft()[0] if is_first else take(unused, samples)
            if data is not None:
                self._taken = (inputs, self.backward.count)
                self._since_new = 0
                # batches come one at a time again, as after statistics of the data were taken
                self._keeps_batches &= not 0 < in_a_row <= FEW_AHEAD
            elif samples and samples == latest.items and not self._is_of_another:
                # the same batch again, as for a GAN's other optimizer: no further part of a step
                self.has_repeated = True
                return
            if forwards.hook is None and forwards.count < forwards.most:
                forwards.count += 1
            else:
                forwards.begin(samples, is_loaded=data is not None and data == self._data)
            self.listener.forward_begins(samples)
        elif inner.training and latest.data and self._data in (0, latest.data):
            # this pass computes features, and the same batch is passed again with gradients
            return
        else:
            self._use_next()
            self._is_evaluated = True
            forwards.evaluated = forwards.evaluated + 1 if torch.is_grad_enabled() else 0
            self.listener.evaluating()

    def _key_of(self, samples: int) -> int:
        """Return the id of the last loader that gave `samples` samples since the last step; 0: none."""
        alike = (key for key in reversed(self._given) if self._given[key].items == samples)
        return next(alike, 0)

    @property
    def _is_of_another(self) -> bool:
        """Tell whether a pass takes another batch than the last one given out, of equal size."""
        gone = self._last.is_gone and self._last.data not in self._firsts_alone
        return gone or self._is_evaluated or (self._keeps_batches and self._since_new >= KEPT_STEPS)

    def _samples_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the samples of a forward pass by its arguments; 0 where these do not show them."""
        first = args[0] if args else kwargs
        given = self._last.items
        if isinstance(first, list | tuple) and len(first) == given:
            return given
        samples = samples_in(first) or samples_in((args, kwargs))
        # others may be an evaluation's, whose passes go by unnoticed where it leaves out the wrapper
        unused = [count for data, count in self._unused if data == self._last.data]
        if samples in unused or any(samples == each.items for each in self._given.values()):
            return samples
        both = [each.items for key, each in self._given.items() if key in self._prior]
        if len(both) > 1:
            # batches of several loaders joined, as of labelled and many more unlabelled items
            return min(both)
        # frameworks load a few batches ahead; to resume an epoch, a script may have dropped many
        whole = unused[0] if 0 < len(unused) <= FEW_AHEAD else given
        # a class of its own; a first dimension of views, nodes, steps in time
        is_hidden = 0 < sum(unused) < samples or self._last.is_whole(first, samples, whole)
        # a script may also mix several batches and cut them anew, into those that were asked for
        if is_hidden or not (given % samples in (0, given) or samples in self.listener.asked()):
            return whole
        return samples if given else self._samples_along(first, samples)

    def _samples_along(self, first: Any, samples: int) -> int:
        """Return the samples of inputs whose first dimension may be time, as of recurrent nets."""
        if self._dimension == 0:
            return samples
        second = next((t.shape[1] for t in tensors_of(first) if t.dim() > 1), 0)
        if self._dimension is None:
            asked = self.listener.asked()
            self._dimension = int(0 < second in asked and samples not in asked)
        return second if self._dimension else samples

    def is_of_steps(self, loader: object | None) -> bool:
        """Tell whether a loader's iterator is over the data set of training's batches."""
        return loader is not None and self._data in (0, data_of(loader))

    @property
    def loader(self) -> object | None:
        """Iterator of torch's loader that gave this step's batch, else the last that gave any."""
        return (self.source or self._last).loader()

    def loader_pass(self) -> LoaderPass | None:
        """Return what that iterator says of its present pass over the data; None: no iterator."""
        source = self.source or self._last
        if (loader := source.loader()) is None:
            return None
        return source.loader_pass or source.pass_of(loader)

    def next_batch(self, loader: object, batch: object) -> None:
        """Note a batch that a loader gives out."""
        source = self._last
        if not source.key and self._since_new >= KEPT_STEPS:
            # training gets its batches from elsewhere, so that this one is an evaluation's
            return
        self._in_a_row += 1
        if self._in_a_row > FEW_AHEAD:
            self._keeps_batches = True
        if source.loader() is not loader:
            source = self._last = self._sources.of(loader)
        count = getattr(loader, "_num_yielded", 0)
        known = source.loader_pass or source.pass_of(loader)
        is_full = count <= known.full
        items = known.size if is_full else known.items_in(batch, count) or samples_in(batch)
        source.items = items
        self._is_evaluated = False
        self._given.pop(source.key, None)
        self._given[source.key] = source
        self._unused.append((source.data, items))
        self._firsts_alone.discard(source.data)
        if count == 1:
            source.note_first(batch)
            if length_of(loader) != 1:
                self._firsts_alone.add(source.data)

    def _use_next(self) -> None:
        """Count the next batch of the last loader's data set as used, as by an evaluation."""
        data = data_of(self._last.loader())
        if (unused := next((each for each in self._unused if each[0] == data), None)) is not None:
            self._unused.remove(unused)

    def _use_first(self) -> None:
        """Count batches as used by passes before a model's first step, which went by unnoticed."""
        # some frameworks have taken the next batch by then
        given = [each for each in self._unused if each[0] == self._last.data]
        self._unused = deque(given[self.backward.count :], MOST_AHEAD)

    def _begin_loading(self, loader: object, *_: Any) -> None:
        # batches of other data sets stay, as training's do when an evaluation comes between
        data = data_of(loader)
        self._unused = deque((each for each in self._unused if each[0] != data), MOST_AHEAD)
        self._sources.begin(loader)
        # an iterator that no longer exists may have had the same id
        self._prior.pop(id(loader), None)
        self._in_a_row = 0
        self.listener.iterating(loader)
        may_be_of_steps = data == self._data or self.source is None
        if not (may_be_of_steps and data in self._firsts_alone):
            self.listener.loading_begins(loader)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> Any:
        if optimizer is self.partners.stepping:
            return None
        if optimizer is self.optimizer or self._counts(optimizer):
            self.partners.stepping = optimizer
            if len(args) > 1 or kwargs:
                return after_closure(args, kwargs, self._end_passes)
            self._end_passes(0)
            return None
        if self.partners.may_have(optimizer, self.optimizer, self.inner_model):
            return after_closure(args, kwargs, partial(self._begin_partner, optimizer))
        self.further_steps += 1
        self.listener.trains_further()
        return None

    def _end_passes(self, calls: int) -> None:
        if calls > 1:
            self.listener.refuse(why_repeated(type(self.optimizer).__name__))
        forwards = self._forwards
        if forwards.evaluated:
            backward = self.backward.count - max(0, self.partners.passes)
            for _ in range(forwards.take_evaluated(backward)):
                self.listener.forward_begins(self._last.items)
        if forwards.hook is None:
            forwards.count = 0
        else:
            for samples in forwards.end_step():
                self.listener.pass_unused(samples)
        self.listener.gradients_ready()

    def _begin_partner(self, optimizer: Optimizer, _: int) -> None:
        if not self.partners.ready(optimizer):
            self.further_steps += 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self.partners.stepping:
            return
        self.partners.stepping = None
        if optimizer is not self.optimizer:
            self.listener.partner_stepped(optimizer)
            return
        self.partners.passes = self.backward.count
        self._prior = self._given
        self._given = {}
        self._taken = (0, 0)
        self._since_new += 1
        self._key = 0
        self.further_steps = 0
        self.listener.step_ends()

    def _counts(self, optimizer: Optimizer) -> bool:
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        # the largest wrapped model is known already, and a search for a larger one takes long
        is_over = self.optimizer is None and not is_wrapped and self.further_steps >= MOST_AWAITED
        if optimizer in self.others and not is_over:
            return self._succeeds(optimizer)
        if self._is_renewed and self.partners.stepping is None and self._succeeds(optimizer):
            return True
        # the optimizer's first step
        self.backward.is_stepped = True
        if not is_wrapped and self.listener.trains_apart(optimizer):
            return False
        if self.optimizer is None or not is_wrapped:
            self._look_at(optimizer)
        if optimizer is not self.optimizer:
            self.others[optimizer] = False
        return optimizer is self.optimizer

    def _succeeds(self, optimizer: Optimizer) -> bool:
        """Let an optimizer with the same parameters, or more, replace the one that counts.

        It does so at its second step in a row, as its first may be inside a step of the other. So
        training follows a search for a rate, or training of all layers that of the last. From then
        on one with the same parameters is made anew for each round, and only goes on.
        """
        missed = self.further_steps
        if self.optimizer is None or missed > 1 or not (missed or self._is_renewed):
            return False
        before, owned = map(parameters_of, (self.optimizer, optimizer))
        goes_on = self._is_renewed and owned == before
        # LBFGS only finishes what another optimizer has trained
        may_follow = before <= owned and not isinstance(optimizer, LBFGS) and (missed or goes_on)
        if self.others.get(optimizer) or not may_follow or not self.listener.trains_anew(missed):
            return False
        self.others[self.optimizer] = True
        self._is_renewed = True
        self._take(optimizer)
        if not goes_on:
            self.listener.begins_anew()
        return True

    def _take(self, optimizer: Optimizer) -> None:
        self.others.pop(optimizer, None)
        self.optimizer = optimizer
        optimizer.register_load_state_dict_pre_hook(self._before_load)

    def _before_load(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        # a search for a learning rate ends by loading the state that it began with
        if optimizer is self.optimizer and optimizer.state and not state["state"]:
            self.listener.trains_anew()

    def _look_at(self, optimizer: Optimizer) -> None:
        """Count an optimizer's steps if it has the model's parameters, or those of a larger one."""
        owned = parameters_of(optimizer)
        if self.optimizer is None and isinstance(self.model, DistributedDataParallel):
            self._leave_untrained(self.model)
        if not isinstance(self.model, DistributedDataParallel):
            found = self._modules_of(owned)
            # a script may train a few tensors before its model exists
            is_long = self.counted is None and self.further_steps >= MOST_AWAITED
            if not found and is_long and (why := why_unheld(optimizer)):
                self.listener.refuse(why)
            if not found or self._awaits_larger(found[0], owned):
                return
            if self.model is not None and size_of(found[0]) <= size_of(self.model):
                self._await_whole(owned.union(self.model.parameters()))
                return
            self._watch_one_of(found)
            self._use_first()
        elif owned.isdisjoint(self.model.parameters()):
            return
        if self.optimizer is not None:
            self.others[self.optimizer] = False
            self.listener.begins_anew()
        self._take(optimizer)

    def _leave_untrained(self, wrapped: DistributedDataParallel) -> None:
        """Watch the largest wrapped model that any optimizer trains, not a larger teacher."""
        models = wrapped_and_trained(self.counted)
        if models and wrapped not in models:
            self._watch(max(models, key=size_of))
            self.listener.begins_anew()

    def _awaits_larger(self, model: nn.Module, owned: set[Tensor]) -> bool:
        """Tell whether an optimizer that has not stepped yet has a larger model, as in a GAN."""
        if self.further_steps >= MOST_AWAITED:
            return False
        held = map(self._modules_of, trained_apart([self.optimizer, *self.others], owned))
        return any(found and size_of(found[0]) > size_of(model) for found in held)

    def _await_whole(self, owned: set[Tensor]) -> None:
        """Watch the module that holds these parameters, the model's among them, once it is called.

        Two optimizers may share one model. A module that only groups two models is never called.
        """

        def begin(model: nn.Module, *_: Any) -> None:
            if torch.is_grad_enabled() and self.model is not model:
                self._watch(model)
                # this pass is not reported, but it has used a batch
                self._use_next()
                self.listener.begins_anew()

        at_first_call(self._modules_of(owned, parts=False), begin)
