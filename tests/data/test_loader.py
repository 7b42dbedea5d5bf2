"""Loaders give the same samples in the same order, for any number of workers and wherever training was resumed."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, Subset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tula_hpc.attach.train.loaders import random_state
from tula_hpc.config import WorkloadSpec
from tula_hpc.data.datasets import build_data
from tula_hpc.data.images import prepared
from tula_hpc.data.loader import ResumableSampler, TrainLoader, make_test_loader, make_train_loader
from tula_hpc.data.named_items import NamedItems
from tula_hpc.errors import DataError, InputError

laws = settings(max_examples=50)
Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module", autouse=True)
def check_processes_often() -> Iterator[None]:
    """Shorten the 5 s between torch's checks of a loader process, which is also how long it waits for one to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        patch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
        yield
        # tracebacks of mistakes keep loaders alive
        gc.collect()


class Noise(Dataset[tuple[Tensor, int]]):
    """Items augmented with every kind of random number, which also have the number of threads of their process."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [float(torch.rand(())), np.random.rand(), random.random()]
        return torch.tensor([*drawn, float(torch.get_num_threads())]), index


def sampler(samples: int, local_batch: int, world_size: int, rank: int = 0, seed: int = 0) -> ResumableSampler:
    return ResumableSampler(Noise(samples), local_batch=local_batch, rank=rank, world_size=world_size, seed=seed)


def loader(dataset: Dataset[Any], local_batch: int = 4, **options: Any) -> TrainLoader:
    defaults = {"rank": 0, "world_size": 1, "seed": 0, "loader_workers": 0, "pin_memory": False}
    return make_train_loader(dataset, local_batch=local_batch, **(defaults | options))


def global_batches(samples: int, local_batch: int, world_size: int, epoch: int = 0, offset: int = 0) -> list[list[int]]:
    """Return the indices of each global batch, joined from those that every rank gets."""
    shares = []
    for rank in range(world_size):
        one = sampler(samples, local_batch, world_size, rank)
        one.set_epoch(epoch)
        one.set_offset(offset)
        keys = list(one)
        assert len(keys) == len(one)
        assert all(key[0] == epoch for key in keys)
        shares.append([index for _, index in keys])
    steps = len(shares[0]) // local_batch
    return [[i for share in shares for i in share[k * local_batch : (k + 1) * local_batch]] for k in range(steps)]


sizes = {"samples": st.integers(1, 200), "local_batch": st.integers(1, 9), "world_size": st.integers(1, 6)}


@laws
@given(**sizes, epoch=st.integers(0, 3))
def test_an_epoch_sees_each_sample_once_in_full_batches(
    samples: int, local_batch: int, world_size: int, epoch: int
) -> None:
    batch = local_batch * world_size
    batches = global_batches(samples, local_batch, world_size, epoch)
    assert len(batches) == samples // batch
    seen = list(itertools.chain(*batches))
    assert len(set(seen)) == len(seen) == samples // batch * batch


@laws
@given(samples=st.integers(24, 200), world_size=st.sampled_from([1, 2, 3, 4, 6, 12]), epoch=st.integers(0, 3))
def test_a_global_batch_does_not_depend_on_the_number_of_workers(samples: int, world_size: int, epoch: int) -> None:
    assert global_batches(samples, 12 // world_size, world_size, epoch) == global_batches(samples, 12, 1, epoch)


@laws
@given(**sizes, steps=st.integers(0, 5))
def test_resuming_goes_on_where_it_stopped(samples: int, local_batch: int, world_size: int, steps: int) -> None:
    whole = global_batches(samples, local_batch, world_size)
    seen = min(steps, len(whole)) * local_batch * world_size
    assert global_batches(samples, local_batch, world_size, offset=seen) == whole[steps:]


@laws
@given(samples=st.integers(40, 200), before=st.integers(1, 20), after=st.integers(1, 20), steps=st.integers(0, 2))
def test_resuming_with_another_batch_repeats_nothing(samples: int, before: int, after: int, steps: int) -> None:
    first = list(itertools.chain(*global_batches(samples, before, 1)[:steps]))
    rest = list(itertools.chain(*global_batches(samples, after, 1, offset=len(first))))
    assert not set(first) & set(rest)
    assert samples - len(first) - len(rest) < after


@laws
@given(seed=st.integers(0, 50), epoch=st.integers(0, 50))
def test_the_order_follows_from_seed_and_epoch(seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        one = sampler(50, 5, 1, seed=seed)
        one.set_epoch(epoch)
        return [index for _, index in one]

    assert order(seed, epoch) == order(seed, epoch)
    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)
    # these would be equal if the two were only added
    assert order(seed, epoch + 1) != order(seed + 1, epoch)


def test_an_offset_outside_the_epoch_is_a_mistake() -> None:
    for offset in (-1, 11):
        with pytest.raises(ValueError, match="not within an epoch of 10 samples"):
            sampler(10, 2, 1).set_offset(offset)


def take(one: TrainLoader, count: int, epoch: int = 0, offset: int = 0) -> list[Batch]:
    return list(itertools.islice(one.stream(epoch, offset), count))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a[0][:, :3], b[0][:, :3]) and torch.equal(a[1], b[1]) for a, b in zip(left, right, strict=True)
    )


def test_the_stream_goes_through_the_epochs() -> None:
    one = loader(Noise(10))
    labels = [batch[1].tolist() for batch in take(one, 4)]
    assert labels == [*global_batches(10, 4, 1, epoch=0), *global_batches(10, 4, 1, epoch=1)]


def test_a_stream_that_begins_in_the_middle_equals_the_rest_of_the_whole() -> None:
    one = loader(Noise(20))
    assert same(take(one, 8, epoch=1, offset=8), take(one, 15)[7:])


def test_a_stream_that_begins_at_the_end_goes_on_with_the_next_epoch() -> None:
    one = loader(Noise(10))
    assert same(take(one, 3, epoch=0, offset=8), take(one, 3, epoch=1))


def test_augmentation_differs_between_epochs_and_not_between_workers() -> None:
    def by_index(batches: list[Batch]) -> dict[int, list[float]]:
        return {
            int(label): item.tolist() for items, labels in batches for item, label in zip(items, labels, strict=True)
        }

    alone = by_index(take(loader(Noise(16)), 4))
    ranks = [by_index(take(loader(Noise(16), 2, rank=rank, world_size=2), 4)) for rank in range(2)]
    assert ranks[0] | ranks[1] == alone
    later = by_index(take(loader(Noise(16)), 4, epoch=1))
    assert all(later[index] != alone[index] for index in alone)
    other = by_index(take(loader(Noise(16), seed=1), 4))
    assert all(other[index] != alone[index] for index in alone)


def test_small_images_are_augmented_reproducibly() -> None:
    train = build_data(WorkloadSpec(dataset="digits")).train
    one = loader(train, 32)
    first = take(one, 3, epoch=2)
    torch.rand(5)
    again = take(one, 3, epoch=2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    index = int(first[0][1][0])
    assert one.dataset[(0, index)][0].tolist() != one.dataset[(1, index)][0].tolist() or (
        one.dataset[(2, index)][0].tolist() != one.dataset[(3, index)][0].tolist()
    )


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_gpu_is_given_bytes_and_a_cpu_what_the_model_takes() -> None:
    train = build_data(WorkloadSpec(dataset="digits", image_size=12)).train
    (floats, labels), *_ = take(loader(train, 32), 1)
    (images, same_labels), *_ = take(loader(train, 32, pin_memory=True), 1)
    assert (floats.dtype, images.dtype) == (torch.float32, torch.uint8)
    assert (floats.shape, images.shape) == ((32, 3, 12, 12), (32, 3, 8, 8))
    assert torch.equal(prepared(train, images), floats)
    assert torch.equal(labels, same_labels)


def test_loading_leaves_the_random_numbers_of_others_alone() -> None:
    before = random_state()
    take(loader(Noise(8)), 3)
    take(loader(build_data(WorkloadSpec(dataset="digits")).train), 3)
    assert random_state() == before


@pytest.mark.processes
def test_loader_processes_yield_what_this_process_would() -> None:
    """Over three epochs the processes persist, and learn of a new epoch only by the keys."""
    several = loader(Noise(12), loader_workers=2)
    batches = take(several, 7)
    assert same(batches, take(loader(Noise(12)), 7))
    # threads of a loader process
    assert all((items[:, 3] == 1).all() for items, _ in batches)
    assert several.prefetch_factor == 2
    assert several.persistent_workers
    assert same(take(several, 2, epoch=5, offset=4), take(loader(Noise(12)), 2, epoch=5, offset=4))


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    with pytest.raises(InputError, match="global batch of 16 is larger than the training set of 10 samples"):
        loader(Noise(10), 8, world_size=2)


@laws
@given(samples=st.integers(0, 40), world_size=st.integers(1, 6), batch=st.integers(1, 7))
def test_the_test_set_is_shared_out_without_copies(samples: int, world_size: int, batch: int) -> None:
    shares = [
        [
            int(label)
            for _, labels in make_test_loader(
                Noise(samples), batch=batch, rank=rank, world_size=world_size, loader_workers=0, pin_memory=False
            )
            for label in labels
        ]
        for rank in range(world_size)
    ]
    assert sorted(itertools.chain(*shares)) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_batch_larger_than_the_training_set_names_the_keys_of_sweeps_and_studies() -> None:
    keys = r"lower search\.max_batch \(and search\.min_batch .*\), or in a study study\.batches"
    with pytest.raises(InputError, match=keys):
        loader(Noise(3))


class _Broken(Noise):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 5:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            _Broken(12),
            r"item 5 of the training set cannot be loaded: OSError: image file is truncated \(test_loader.py:\d+\)",
        ),
        (Subset(_Broken(12), [3, 4, 5, 6]), "item 5 of the training set cannot be loaded"),
    ],
)
def test_an_item_that_cannot_be_loaded_gives_one_line(loader_workers: int, data: Any, expected: str) -> None:
    with pytest.raises(InputError, match=rf"^workload\.dataset: {expected}") as raised:
        take(loader(data, loader_workers=loader_workers), 3)
    assert "\n" not in str(raised.value)


def test_an_item_that_is_none_is_named_as_that() -> None:
    data: Any = [(torch.zeros(3), 1), None]
    with pytest.raises(InputError, match=r"item 1 of the training set is None; expected \(image, label\)$"):
        NamedItems(data, "training", classes=2).items([0, 1])


@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_a_label_of_no_class_is_reported_with_its_item(loader_workers: int) -> None:
    several = loader(Noise(12), loader_workers=loader_workers, classes=7)
    with pytest.raises(
        InputError, match=r"^workload.dataset: item \d+ of the training set has label \d+; expected 0 to 6$"
    ):
        take(several, 3)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "loader_workers": loader_workers, "pin_memory": False}
    with pytest.raises(InputError, match=r"item 7 of the test set has label 7; expected 0 to 6"):
        list(make_test_loader(Noise(12), batch=4, classes=7, **options))


class _Uneven(Noise):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3 + (index == 5)), index


@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_items_that_make_no_batch_are_named(loader_workers: int) -> None:
    message = (
        r"^workload\.dataset: has items (5 and \d+|\d+ and 5) in the training set that cannot be put into one batch"
    )
    with pytest.raises(InputError, match=message):
        take(loader(_Uneven(12), loader_workers=loader_workers), 3)


class _Killed(Noise):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(3), index


@pytest.mark.processes
def test_a_loader_process_that_was_killed_is_reported() -> None:
    with pytest.raises(DataError, match="a loader process was killed, perhaps for lack of memory"):
        take(loader(_Killed(12), loader_workers=1), 1)


class _Absent(Noise):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("loader_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_a_file_system_that_fails_is_no_mistake(loader_workers: int) -> None:
    """Another attempt may succeed, so the user is not asked to correct anything."""
    with pytest.raises(DataError, match=r"^item \d+ of the training set cannot be read: OSError: .*Stale"):
        take(loader(_Absent(12), loader_workers=loader_workers), 1)
