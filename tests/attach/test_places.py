"""Find the rest of an epoch of any loader again by its random numbers; and the three lines without the project."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    dataloader,
)

import tula_hpc.attach as tula
from tula_hpc.attach.train import loaders
from tula_hpc.attach.train.loaders import LoaderHistory, Passed, Stream, batch_size_of, random_state, set_random_state
from tula_hpc.batches import LoaderPass

SAMPLES, BATCH = 22, 4


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(()) + random.random()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (torch.rand(()) for _ in range(SAMPLES))


class Buckets(Sampler[list[int]]):
    """Batches of unequal sizes from a sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        for start, end in ((0, 3), (3, 10), (10, 12), (12, 20), (20, 22)):
            yield order[start:end]

    def __len__(self) -> int:
        return 5


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "in order, whole batches": lambda: DataLoader(Noisy(), BATCH, drop_last=True),
    "own generator": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=generator()),
    "sampler with a generator": lambda: DataLoader(
        Noisy(), BATCH, sampler=RandomSampler(Noisy(), generator=generator())
    ),
    "drawn with replacement": lambda: DataLoader(
        Noisy(), BATCH, sampler=RandomSampler(Noisy(), replacement=True, num_samples=70, generator=generator())
    ),
    "weighted": lambda: DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, 30)),
    "own batches": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "a stream": lambda: DataLoader(Endless(), BATCH),
    "no loader": lambda: [torch.full((2,), n) for n in range(5)],
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("passed", [1, 3, 6, None])
def test_the_rest_of_an_epoch_and_the_next_are_as_without_a_stop(name: str, passed: int | None) -> None:
    torch.manual_seed(3)
    loader = LOADERS[name]()
    began = random_state(loader)
    stream = iter(loader)
    done = [batch for _, batch in zip(range(passed or 1000), stream, strict=False)]
    now = random_state(loader)
    expected = [*stream, *loader]
    torch.manual_seed(99)
    random.seed(99)
    again = LOADERS[name]()
    sampler = getattr(getattr(again, "batch_sampler", None), "sampler", None)
    set_random_state(began, again)
    # the end counts as one more
    resumed = Stream(again, Passed(len(done) + (passed is None), batch_size_of(again), 1), 1)
    set_random_state(now, again)
    found = list(resumed.batches)
    resumed.close()
    found += list(again)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
    assert getattr(getattr(again, "batch_sampler", None), "sampler", None) is sampler


def test_random_numbers_of_every_gpu_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that names its GPU may never select it, so that torch's current GPU is another one."""
    found: dict[int, list[int]] = {}
    states = [torch.tensor([number], dtype=torch.uint8) for number in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    # the numbers of the node that continues
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: found.update({gpu: state.tolist()}))
    set_random_state(random_state())
    assert found == {0: [0], 1: [1]}


class Cycle(Sampler[int]):
    """A sampler without an end, and so without a length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SAMPLES))


def test_a_sampler_without_an_end_is_led_to_its_next_sample() -> None:
    stream = Stream(DataLoader(Noisy(), BATCH, sampler=Cycle()), Passed(7, BATCH, 1), 1)
    # each item is its index and up to two more values
    assert (next(stream.batches) - torch.arange(6, 10)).abs().max() <= 2
    stream.close()


@pytest.mark.parametrize(("batch", "workers", "left"), [(2, 1, 14), (8, 1, 14), (4, 2, 18), (1, 4, 20)])
def test_what_is_left_is_counted_in_samples_of_all_workers(batch: int, workers: int, left: int) -> None:
    """Each of `workers` has passed two batches of 4; half as many workers have then passed twice as many each."""
    loader = DataLoader(Noisy(), batch)
    stream = Stream(loader, Passed(2, 4, 1), workers)
    known = LoaderPass(stream.batches)
    parts = [*stream.batches]
    assert sum(len(part) for part in parts) == left
    # a batch of one item may be a whole batch itself
    assert [known.items_in(part, count) or 1 for count, part in enumerate(parts, 1)] == [len(part) for part in parts]
    assert known.full == (0 if batch == 1 else left // batch)
    assert len(loader) == -(-SAMPLES // batch)
    stream.close()


def test_without_anything_around_the_three_lines_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # otherwise scripts that later tests fork would see what these calls note
    monkeypatch.setattr(tula, "_kept", None)
    loader = DataLoader(Noisy(), BATCH)
    tula.keep(model=object())
    assert list(tula.epochs(3)) == [0, 1, 2]
    assert tula.batches(loader) is loader
    tula.report(test_accuracy=0.5, anything=1.0)


@pytest.mark.parametrize("ahead", [False, True])
def test_random_numbers_are_noted_at_each_batch_only_where_a_library_loads_ahead(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # modules that earlier tests have imported
    for library in loaders.LOADING_AHEAD:
        monkeypatch.delitem(sys.modules, library, raising=False)
    if ahead:
        monkeypatch.setitem(sys.modules, loaders.LOADING_AHEAD[0], sys)
    # imported again afterwards
    kind = dataloader._SingleProcessDataLoaderIter
    monkeypatch.setattr(kind, "_next_data", kind._next_data)
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)
    noted: list[int] = []
    monkeypatch.setattr(loaders, "random_numbers", lambda: noted.append(1))
    LoaderHistory().install()
    batches = list(DataLoader(Noisy(), BATCH, drop_last=True))
    # the end of the epoch is searched for, too
    assert len(noted) == ahead * (len(batches) + 1)
