"""Loaders: which samples make up a batch, in which order, by which process.

The order of an epoch follows from (seed, epoch), a global batch from the order and its size, an augmentation from
(seed, epoch, index). None of them depends on the number of workers or of loader processes, or on where a training was
interrupted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tula_hpc.errors import InputError
from tula_hpc.nested import Batch
from tula_hpc.workloads.hashing import Keys, mix
from tula_hpc.workloads.loader_processes import process_options
from tula_hpc.workloads.own_code import collate
from tula_hpc.workloads.pixels import ImageDataset, Indices, Preprocessing

_PREFETCH = 2  # batches that each loader process works ahead
Key = tuple[int, int]  # (epoch, index)


@runtime_checkable
class KeyedItems(Protocol):
    """A data set that augments a whole batch from given random bits."""

    def keyed_items(self, indices: Indices, keys: Keys) -> list[tuple[Tensor, int]]:
        """Items at these indices, augmented by these keys."""


class EpochDataset(Dataset[Any]):
    """A data set whose items are asked for by (epoch, index), and then are always the same.

    Args:
        dataset: Items by index.
        seed: Of the augmentation.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # checked when the data was built

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Items of a batch."""
        epochs, indices = np.array(keys, np.int64).reshape(-1, 2).T
        bits = mix(self.seed, epochs, indices)
        if isinstance(self.dataset, KeyedItems):
            return self.dataset.keyed_items(indices, bits)
        return [self._seeded_item(index, seed) for index, seed in zip(indices.tolist(), bits.tolist(), strict=True)]

    def _seeded_item(self, index: int, seed: int) -> Any:
        with _seeded(seed):
            try:
                return self.dataset[index]
            except Exception as error:
                error.add_note(f"(item {index} of the training set)")
                raise


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU random numbers, and put them back: dropout in this process draws from them too."""
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)  # not torch.manual_seed: that would reseed the GPU as well
    try:
        yield
    finally:
        generator.set_state(state)


class ResumableSampler(DistributedSampler[Key]):
    """This worker's part of every full global batch, in an order that follows from (seed, epoch) alone.

    Global batch k of an epoch is ``order[offset + k·B : offset + (k + 1)·B]`` with ``B = local_batch × world_size``;
    rank r has its r-th slice of `local_batch`. A rest smaller than B is left out.

    Args:
        dataset: Anything with a length.
        local_batch: Samples a step and worker.
        rank: Which worker this is.
        world_size: How many there are.
        seed: Of the order.
    """

    def __init__(self, dataset: Dataset[Any], *, local_batch: int, rank: int, world_size: int, seed: int) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed, drop_last=True)
        self.local_batch, self.offset = local_batch, 0

    @property
    def global_batch(self) -> int:
        """Samples a step over all workers, B."""
        return self.local_batch * self.num_replicas

    def set_offset(self, samples: int) -> None:
        """Skip so many global samples of the epoch's order, those that were seen before an interruption.

        The batch may have been another one then: any number up to the length of the data set will do.
        """
        if not 0 <= samples <= self._size():
            raise ValueError(f"offset {samples} is not within an epoch of {self._size()} samples")
        self.offset = samples

    def __len__(self) -> int:
        return self._batches() * self.local_batch

    def __iter__(self) -> Iterator[Key]:
        own = self.order()[self.offset :][: self._batches() * self.global_batch]
        own = own.reshape(-1, self.num_replicas, self.local_batch)[:, self.rank]
        return ((self.epoch, index) for index in own.reshape(-1).tolist())

    def order(self) -> Tensor:
        """The epoch's permutation of all samples, (D,)."""
        generator = torch.Generator().manual_seed(int(mix(self.seed, self.epoch)[0]))
        return torch.randperm(self._size(), generator=generator)

    def _batches(self) -> int:
        return (self._size() - self.offset) // self.global_batch

    def _size(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # checked when the data was built


class EndlessOrder(Sampler[Key]):
    """A `ResumableSampler`'s epochs one after another, for ever: loader processes work ahead into the next epoch."""

    def __init__(self, order: ResumableSampler) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Key]:
        while True:
            yield from self.order
            self.order.set_epoch(self.order.epoch + 1)
            self.order.set_offset(0)


class TrainLoader(DataLoader[Any]):
    """A loader over the epochs of a `ResumableSampler`, which it keeps as `order`; it never ends."""

    def __init__(self, dataset: EpochDataset, order: ResumableSampler, **options: Any) -> None:
        super().__init__(dataset, batch_size=order.local_batch, sampler=EndlessOrder(order), drop_last=True, **options)
        self.order = order

    def stream(self, epoch: int = 0, offset: int = 0) -> Iterator[tuple[Batch, Batch]]:
        """Batches for ever: the rest of `epoch` after `offset` global samples, then the epochs that follow.

        Only one stream of a loader may be in use: the sampler and the loader processes are shared.

        Yields:
            Inputs and targets, of images (local_batch, 3, edge, edge) and labels (local_batch,). Images are bytes where
            the loader pins memory, else as the model takes them.
        """
        self.order.set_epoch(epoch)
        self.order.set_offset(offset)
        yield from self


def make_train_loader(
    dataset: Dataset[Any],
    *,
    local_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    loader_workers: int,
    pin_memory: bool,
) -> TrainLoader:
    """The loader of one worker of a data-parallel training; see `ResumableSampler` for what it yields.

    Args:
        dataset: Items (inputs, targets) by index.
        local_batch: Samples a step and worker.
        rank: Which worker this is.
        world_size: How many there are.
        seed: Of order and augmentation.
        loader_workers: Processes that load; 0 loads in this process.
        pin_memory: Whether batches are for a GPU: put where it can fetch them by itself, images as bytes.

    Raises:
        InputError: The data set is smaller than one global batch.
    """
    order = ResumableSampler(dataset, local_batch=local_batch, rank=rank, world_size=world_size, seed=seed)
    samples = len(dataset)  # type: ignore[arg-type] # checked when the data was built
    if samples < order.global_batch:
        message = f"a global batch of {order.global_batch} is larger than the training set of {samples} samples"
        lower = "lower search.max_batch, and search.min_batch where that is above it; in a study study.batches"
        raise InputError(f"{message}; {lower}")
    return TrainLoader(EpochDataset(dataset, seed), order, **_options(dataset, loader_workers, pin_memory))


def make_test_loader(
    dataset: Dataset[Any], *, batch: int, rank: int, world_size: int, loader_workers: int, pin_memory: bool
) -> DataLoader[Any]:
    """One worker's share of the test set: every `world_size`-th sample, none twice; shares may differ by one sample."""
    samples = range(rank, len(dataset), world_size)  # type: ignore[arg-type] # checked when the data was built
    return DataLoader(dataset, batch_size=batch, sampler=samples, **_options(dataset, loader_workers, pin_memory))


def most_batches(loader: DataLoader[Any], world_size: int) -> int:
    """Return how many batches the worker with the largest share has, whose loader is another `make_test_loader`."""
    share = math.ceil(len(loader.dataset) / world_size)  # type: ignore[arg-type] # as there
    return math.ceil(share / (loader.batch_size or 1))


def _options(dataset: Dataset[Any], loader_workers: int, pin_memory: bool) -> dict[str, Any]:
    # A generator of its own: a loader draws a seed whenever it starts, by default from the numbers that dropout uses.
    options: dict[str, Any] = {"pin_memory": pin_memory, "generator": torch.Generator(), "collate_fn": collate}
    if isinstance(dataset, ImageDataset) and not pin_memory:
        # On a CPU the process that loads makes floats of bytes, while another trains; a GPU does so by itself.
        options["collate_fn"] = partial(_collate_prepared, dataset.preprocessing)
    if loader_workers == 0:
        return options
    options |= {"persistent_workers": True, "prefetch_factor": _PREFETCH}
    return options | process_options(loader_workers, __name__)


def _collate_prepared(preprocessing: Preprocessing, items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*items, strict=True)
    return preprocessing.apply(torch.stack(images)), torch.tensor(labels)
