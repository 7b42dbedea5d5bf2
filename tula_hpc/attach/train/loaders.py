"""Note a script's place in its random numbers and in its loader, and find that place again.

The order of an epoch follows from the random numbers at its beginning, including those of
generators that belong to the loader or its sampler. So a loader is begun again with the numbers of
its first beginning and led to the batch that comes next. Then the script goes on with the numbers
of the moment at which the checkpoint was saved.

If the script's process loads by itself, samples that it has had are skipped by their indices,
without loading them. Loader processes have random numbers of their own, which only loading
advances: there the batches are loaded and dropped.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tula_hpc.attach.hooks.patches import after_index
from tula_hpc.batches import length_of
from tula_hpc.data.loader import stop_signals_blocked
from tula_hpc.user_code import RandomNumbers, random_numbers

# libraries that load a batch before the step on the batch before; Lightning only from a stream
LOADING_AHEAD = ("accelerate", "lightning")
# attributes in which loaders of accelerate and of Lightning's Fabric count how often they are gone
# through, and by which they order samples
COUNTERS = ("iteration", "_num_iter_calls")
# prefix of such a count among the states of generators, which are base64
PASSES = "passes:"


class Passed(NamedTuple):
    """Batches that a worker has had from a loader, their size, and the number of workers."""

    batches: int
    # samples in a batch of the loader; 0: unknown
    batch_size: int
    workers: int

    @property
    def samples(self) -> int:
        """Samples in these batches, over all workers."""
        return self.batches * self.batch_size * self.workers


def random_state(loader: object = None, numbers: RandomNumbers | None = None) -> str:
    """Return this process's random states and those of a loader's own generators, as text.

    `numbers`, if given, are taken as the states of the host.
    """
    host = numbers or random_numbers()
    name, keys, *rest = host.numpy
    state = {
        "python": host.python,
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(host.torch),
        "gpus": _states_of_gpus(),
        "generators": generator_states(loader),
    }
    return json.dumps(state)


def _states_of_gpus() -> list[str]:
    """Return the states of all GPUs here: a script may use another than torch's current one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
        return []
    return [_text(state) for state in torch.cuda.get_rng_state_all()]


def set_random_state(text: str, loader: object = None) -> None:
    """Go back to a state that `random_state` returned."""
    state = json.loads(text)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    # this job's node may show fewer GPUs
    for gpu, gpu_text in enumerate(state.get("gpus", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(gpu_text), gpu)
    if loader is not None:
        set_generator_states(loader, state["generators"])


def generator_states(loader: object) -> list[str]:
    """Return the states of a loader's own generators, and how often the loader was gone through."""
    states = [_text(generator.get_state()) for generator in _generators(loader)]
    return states + [f"{PASSES}{getattr(loader, name)}" for name in _counters(loader)]


def _counters(loader: object) -> list[str]:
    return [name for name in COUNTERS if isinstance(getattr(loader, name, None), int)]


def set_generator_states(loader: Any, states: list[str], done: list[object] | None = None) -> None:
    """Go back to states that `generator_states` returned.

    Generators and loaders in `done` are skipped; those that get their states here are added to it.
    """
    known = [] if done is None else done
    numbers = [state for state in states if not state.startswith(PASSES)]
    for generator, state in zip(_generators(loader), numbers, strict=False):
        if not _holds(known, generator):
            generator.set_state(_tensor(state))
            known.append(generator)
    for name, state in zip(_counters(loader), states[len(numbers) :], strict=False):
        if not _holds(known, loader):
            setattr(loader, name, int(state.removeprefix(PASSES)))
            known.append(loader)


def _holds(known: Sequence[object], wanted: object) -> bool:
    """Tell whether this very object is known, not an equal one."""
    return any(each is wanted for each in known)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _generators(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, and of loaders inside it."""
    if inner := getattr(loader, "flattened", None):
        return [generator for each in inner for generator in _generators(each)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = [
        (loader, "generator"),
        # a loader of accelerate's, whose batch sampler wraps another
        (loader, "synchronized_generator"),
        (getattr(loader, "sampler", None), "generator"),
        (batch_sampler, "generator"),
        (getattr(batch_sampler, "sampler", None), "generator"),
    ]
    found: list[torch.Generator] = []
    for holder, name in holders:
        generator = getattr(holder, name, None)
        if isinstance(generator, torch.Generator) and not _holds(found, generator):
            found.append(generator)
    return found


def batch_size_of(loader: object) -> int:
    """Return the samples of a loader's batch; 0: unknown."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else 0


class OwnBeginnings:
    """Generators of loaders that a script goes through by itself in its epochs, as in `zip(a, b)`.

    A loader is identified by its place in the order in which an epoch begins its loaders.

    Args:
        restored: Generators that have their states of a checkpoint; those restored here are added.
    """

    def __init__(self, restored: list[object]) -> None:
        self._restored = restored
        # loaders begun in this epoch: loops over `tula.batches` before, and ids of the generators
        self._known: set[tuple[int, ...]] = set()
        # loaders begun in this epoch, by place, each with its states before it was begun
        self._begun: list[tuple[object, list[str]]] = []
        # a checkpoint's states by place: those before the loader was begun, None if it was not, and
        # those at the moment of the checkpoint
        self._found: dict[int, tuple[list[str] | None, list[str]]] = {}
        # loaders by place, those of earlier epochs too
        self._loaders: dict[int, object] = {}

    def note(self, loader: object, calls: int) -> None:
        """Note a loader right before an iterator is made of it; restore its states after a resume.

        `calls` of `tula.batches` came before. Until the next call, a loader's generators go on by
        themselves however often it is begun.
        """
        counting = [loader] if _counters(loader) else []
        key = (calls, *map(id, [*_generators(loader), *counting]))
        if key in self._known:
            return
        self._known.add(key)
        place = len(self._begun)
        if place in self._found:
            before, saved = self._found[place]
            if before is None:
                set_generator_states(loader, saved, self._restored)
            else:
                set_generator_states(loader, before)
        self._begun.append((loader, generator_states(loader)))
        self._loaders[place] = loader

    def begin_epoch(self, *, is_new: bool) -> None:
        """Count places from the first one again; `is_new`: nothing of the epoch was done before."""
        for place in range(len(self._begun)):
            self._found.pop(place, None)
        self._begun = []
        self._known.clear()
        if is_new:
            self._found = {place: (None, saved) for place, (_, saved) in self._found.items()}

    def go_on(self) -> None:
        """Give the loaders begun so far their states at the moment of the checkpoint."""
        for place, (loader, _) in enumerate(self._begun):
            if place in self._found:
                set_generator_states(loader, self._found[place][1])
                self._restored += _generators(loader)

    def state(self) -> str:
        """Return the states of all these loaders, as text."""
        found = dict(self._found)
        for place, loader in self._loaders.items():
            before = self._begun[place][1] if place < len(self._begun) else None
            found[place] = (before, generator_states(loader))
        return json.dumps(found)

    def load(self, text: str) -> None:
        """Take what `state` returned, to be restored as the loaders are begun."""
        self._found = {int(place): tuple(states) for place, states in json.loads(text).items()}


class Stream:
    """Batches of a loader, which is any iterable, without those that have passed.

    `begin` makes the iterator of a loader that has a wrapper; None: there is no wrapper.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        passed: Passed | None,
        workers: int,
        begin: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self.loader = loader
        self.is_wrapped = begin is not None
        self.begin = begin or partial(iter, loader)
        self._changes = contextlib.ExitStack()
        self.batches = self._begin(passed, workers) if passed else _begun(self.begin)

    def close(self) -> None:
        """Give the loader its own sampler back."""
        self._changes.close()

    def _begin(self, passed: Passed, workers: int) -> Iterator[Any]:
        loader = self.loader
        size = batch_size_of(loader)
        is_same = (passed.batch_size, passed.workers) == (size, workers)
        # a loader that counts how often it was gone through has to come to its end
        is_plain = not self.is_wrapped and not _counters(loader)
        length = length_of(loader)
        is_indexed = _is_indexed(loader) and not (is_same and loader.num_workers)
        # after the last batch a sampler may draw once more
        is_over = length is not None and passed.batches >= length + is_indexed
        if is_plain and is_same and is_over:
            return iter(())
        if is_indexed:
            return self._begin_by_index(loader, passed.samples // workers)
        is_counted = is_same or not size
        batches = passed.batches if is_counted else passed.samples // (size * workers)
        stream = _begun(self.begin)
        with contextlib.suppress(StopIteration):
            for _ in range(batches):
                # not by islice, which calls `iter` again: Lightning's loader would begin anew
                next(stream)
        return stream

    def _begin_by_index(self, loader: Any, samples: int) -> Iterator[Any]:
        batch_sampler = loader.batch_sampler
        rest = _Rest(batch_sampler.sampler, samples)
        self._changes.callback(setattr, batch_sampler, "sampler", batch_sampler.sampler)
        batch_sampler.sampler = rest
        stream = _begun(self.begin)
        # the sampler draws its numbers here, as it did before the first batch
        rest.begin()
        return stream


def _begun(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    # a stop is obeyed at a step's end, up to which loader processes have to live
    with stop_signals_blocked():
        return begin()


class LoaderHistory:
    """Past of a training's loaders, as far as a resumed training has to know it.

    Persistent processes of a loader start once in a training, which draws a random number. In a
    resumed training they start again, but must draw none. And accelerate's loaders, the Trainer's
    among them, load a batch before the step on the batch before it. If the script's process loads
    by itself, a resumed training loads that batch with the random numbers of its first loading. It
    goes on with those of the moment at which the checkpoint was saved.
    """

    def __init__(self) -> None:
        # starts of persistent processes so far and until this epoch, by data set and their number
        self.starts: Counter[str] = Counter()
        self.before: Counter[str] = Counter()
        # such starts in earlier processes of the training that this process has not repeated yet
        self._earlier: Counter[str] = Counter()
        # an epoch is being resumed, so far with the random numbers of its beginning
        self.is_behind = False
        # batches that the loader loads at once, one for each worker that it sends its batch
        self.parts = 1
        # loaders inside the one that is gone through, as inside Lightning's; random numbers before
        # each was last begun in this epoch, and in the checkpoint's, by place among them
        self._inner: Sequence[object] = ()
        self._begun: dict[str, str] = {}
        self._begun_before: dict[str, str] = {}
        # batches loaded by each iterator, and random numbers before those last loaded at once
        self._loading = weakref.WeakKeyDictionary[Any, tuple[int, RandomNumbers]]()
        # numbers before the batch that is loaded ahead, and those when a framework began to take
        # all batches of its next step
        self._taken: tuple[RandomNumbers | None, RandomNumbers] | None = None
        # the checkpoint's: batches before those loaded ahead, numbers for them, numbers after them
        self._found: tuple[int, str, str] | None = None

    def install(self) -> None:
        """Watch from now on."""
        start = DataLoader._get_iterator
        load: Any = _SingleProcessDataLoaderIter._next_data

        @wraps(start)
        def started(loader: Any) -> Any:
            if not loader.persistent_workers or not self._had(loader):
                return start(loader)
            before = random_state(loader)
            iterator = start(loader)
            set_random_state(before, loader)
            # as if the loader's processes were running already
            iterator._reset(loader)
            return iterator

        @wraps(load)
        def loaded(iterator: Any) -> Any:
            behind = self._begin(iterator)
            try:
                return load(iterator)
            finally:
                # also if no batch is left
                if behind:
                    set_random_state(behind)

        DataLoader._get_iterator = started  # type: ignore[assignment, method-assign] # to note it
        _SingleProcessDataLoaderIter._next_data = loaded  # type: ignore[method-assign] # likewise

    def _had(self, loader: Any) -> bool:
        """Tell whether a loader has started processes in this training; if not, count the start."""
        data = loader.dataset
        key = f"{type(data).__qualname__} {length_of(data)} {loader.num_workers}"
        if self.is_behind:
            return self.before[key] == 1
        # a loader that is made anew for each epoch starts processes each time
        if self._earlier.pop(key, 0) == 1:
            return True
        self.starts[key] += 1
        return False

    def _begin(self, iterator: Any) -> str:
        """Note that an iterator loads a batch; return the numbers to restore after it, "": none."""
        if any(name in sys.modules for name in LOADING_AHEAD):
            loaded, before = self._loading.get(iterator, (0, None))
            if before is None or loaded % self.parts == 0:
                before = random_numbers()
            self._loading[iterator] = (loaded + 1, before)
        if self._found is None:
            return ""
        left, ahead, behind = self._found
        self._found = (left - 1, ahead, behind)
        if left == 0:
            after_index(iterator, partial(set_random_state, ahead))
        if left == 1 - self.parts:
            self._found = None
            return behind
        return ""

    def begin_epoch(self) -> None:
        """Note that an epoch begins of which nothing was done before."""
        self.is_behind = False
        self.before = Counter(self.starts)

    def load_from(self, loader: object, workers: int) -> None:
        """Note the loader that comes next; accelerate's may load each worker's batch at once."""
        self.parts = workers if getattr(loader, "split_batches", None) is False else 1
        self._inner = getattr(loader, "flattened", ())
        self._begun = {}

    def note_beginning(self, loader: object) -> None:
        """Note a loader right before it is begun, which happens in mid-epoch to short inner ones.

        When a resumed training begins one again, it has the numbers of its last beginning.
        """
        for place in (str(n) for n, inner in enumerate(self._inner) if inner is loader):
            # a first time has the numbers of the epoch's loader
            before = self._begun_before.get(place)
            if self.is_behind and place in self._begun and before:
                set_random_state(before, loader)
            self._begun[place] = random_state(loader)

    def take_batches(self, iterator: object) -> None:
        """Note that a framework takes the batches of its next step, the first loaded already."""
        self._taken = (self._before(iterator), random_numbers())

    def load_ahead(self, passed: int, numbers: Mapping[str, str]) -> None:
        """Have the batch after `passed` ones loaded with the checkpoint's random numbers for it."""
        if numbers.get("ahead") and "now" in numbers:
            self._found = (passed * self.parts, numbers["ahead"], numbers["now"])

    def begin_without_draws(self, loader: object, begin: Callable[[], Any]) -> Any:
        """Begin to load, and restore the random numbers from before, the loader's own, too."""
        numbers = random_state(loader)
        begun = begin()
        set_random_state(numbers, loader)
        return begun

    def catch_up(self) -> None:
        """Note that a resumed training has come to the place of its checkpoint."""
        self.is_behind = False
        self._found = None

    def _before(self, iterator: object) -> RandomNumbers | None:
        return self._loading[iterator][1] if iterator in self._loading else None

    def moments(self, iterator: object, loader: object) -> dict[str, str]:
        """Return what a resumed training needs, and the present random numbers, as text."""
        ahead, now = self._taken or (self._before(iterator), None)
        return {
            "ahead": random_state(numbers=ahead) if ahead else "",
            "now": random_state(loader, now),
            "history": json.dumps([self.starts, self.before, self._begun]),
        }

    def load_state(self, text: str) -> None:
        """Go on, within an epoch, from the "history" that `moments` returned."""
        starts, before, *begun = json.loads(text)
        self.starts = Counter(starts)
        self.before = Counter(before)
        self._begun_before = dict(*begun)
        self._earlier = Counter(self.starts)
        self.is_behind = True


def _is_indexed(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Tell whether a loader cuts a sampler's indices into batches, as torch's own do by default."""
    return (
        isinstance(loader, DataLoader)
        # not a loader of accelerate's, which begins only when it is asked for the first batch
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )


class _Rest:
    """Indices of a sampler without the first `left_out`."""

    def __init__(self, sampler: Any, left_out: int) -> None:
        self.sampler, self.left_out = sampler, left_out
        self.rest: Iterator[Any] | None = None
        self.is_given = False

    def begin(self) -> Iterator[Any]:
        """Have the sampler draw its numbers, and leave out the first indices."""
        if self.rest is None:
            self.rest = iter(self.sampler)
            for _ in itertools.islice(self.rest, self.left_out):
                pass
        return self.rest

    def __iter__(self) -> Iterator[Any]:
        if self.is_given:
            # gone through once more within the epoch, as for a look at a batch
            return iter(self.sampler)
        self.is_given = True
        return self.begin()

    def __len__(self) -> int:
        # a script that asks means the whole epoch
        return len(self.sampler)
