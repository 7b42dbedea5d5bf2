"""Loaders: order of samples, loader processes, and batches on their way to a GPU.

The order of an epoch depends only on (seed, epoch), a global batch on the order and its size, an
augmentation on (seed, epoch, index). The number of workers or of loader processes, and where a
training was interrupted, change none of them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import multiprocessing
import os
import select
import signal
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tula_hpc.batches import Batch, is_finite, map_tensors, tensors_of
from tula_hpc.data.images import ImageDataset, Indices, Keys, Preprocessing, mix, samples_of
from tula_hpc.data.named_items import NamedItems, RaisingLoader, collated
from tula_hpc.errors import InputError
from tula_hpc.user_code import collate, random_numbers_kept, seed_random_numbers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# batches that each loader process prepares ahead
_PREFETCH = 2
# smallest batch of an evaluation, samples
SMALLEST_TEST_BATCH = 64
# (epoch, index of the sample)
Key = tuple[int, int]


# Neither nccl nor CUDA survives a fork, nor do locks that other threads hold: loader processes come
# from a server that was started clean and that imports torch once for all of them.
#
# TERM and USR2 ask a training to save after the next whole step, for which it needs its loader.
# Slurm signals only the tasks if it tracks processes by cgroup, otherwise their children too, as a
# `kill` of the process group does. A process inherits the blocked signals of the one that starts
# it, so loader processes and their server never receive these two. Their owner ends loader
# processes with KILL, and they watch for its end themselves: torch has them watch only their
# parent, the server, which ends after them.
def _process_options(count: int) -> dict[str, Any]:
    """Start the servers of loader processes, and return options of a `DataLoader`."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # starting the tracker unblocks TERM, so the server is started in a block of its own
    with stop_signals_blocked():
        resource_tracker.ensure_running()
    with stop_signals_blocked():
        forkserver.ensure_running()
    _kill_children_at_exit()
    return {
        "num_workers": count,
        "multiprocessing_context": context,
        "worker_init_fn": partial(_end_with_owner, os.getpid()),
        "persistent_workers": True,
        "prefetch_factor": _PREFETCH,
    }


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals of a stop, also for the processes that are started in this block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Registered once in each process. If a loader has failed, multiprocessing sends its processes TERM
# at exit, which they block, and waits for them forever.
@functools.cache
def _kill_children_at_exit() -> None:
    atexit.register(_kill_children)


def _kill_children() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _end_with_owner(owner: int, _: int) -> None:
    try:
        alive = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        # kernels before 5.3 have no pidfd_open
        return

    def watch() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner").start()


@runtime_checkable
class KeyedItems(Protocol):
    """A data set that augments a whole batch from given random bits."""

    def keyed_items(self, indices: Indices, keys: Keys) -> list[tuple[Tensor, int]]:
        """Return items at these indices, augmented by these keys."""


class EpochDataset(NamedItems):
    """Data set whose items depend on (epoch, index) and the augmentation's seed alone."""

    def __init__(self, dataset: Dataset[Any], seed: int, classes: int | None) -> None:
        super().__init__(dataset, "training", classes)
        self.seed = seed

    def items(self, indices: list[Key]) -> list[Any]:
        """Return the items of these keys; see `NamedItems.items`."""
        epochs, positions = np.array(indices, np.int64).reshape(-1, 2).T
        bits = mix(self.seed, epochs, positions)
        if isinstance(self.dataset, KeyedItems):
            return self.dataset.keyed_items(positions, bits)
        items = []
        # once for all items: restoring NumPy's random numbers may take longer than loading an item
        with random_numbers_kept():
            for index, seed in zip(positions.tolist(), bits.tolist(), strict=True):
                seed_random_numbers(seed)
                items.append(self.item(index))
        return items

    def pair(self, first: Any, second: Any) -> str:
        """Name the items of two keys for a message."""
        return super().pair(first[1], second[1])


class ResumableSampler(DistributedSampler[Key]):
    """One worker's share of each full global batch; the order follows from (seed, epoch) alone.

    Global batch k of an epoch is ``order[offset + k·B : offset + (k + 1)·B]`` with ``B =
    local_batch × world_size``; rank r has its r-th slice of `local_batch` samples. A remainder
    smaller than B is left out. The data set needs nothing but a length.
    """

    def __init__(
        self, dataset: Dataset[Any], *, local_batch: int, rank: int, world_size: int, seed: int
    ) -> None:
        super().__init__(
            dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed, drop_last=True
        )
        self.local_batch, self.offset = local_batch, 0

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers, B."""
        return self.local_batch * self.num_replicas

    def set_offset(self, samples: int) -> None:
        """Skip the first global samples of the epoch's order, seen before an interruption.

        Any number up to the length of the data set is valid: before the interruption the batch may
        have been another one.
        """
        if not 0 <= samples <= self._size():
            raise ValueError(f"offset {samples} is not within an epoch of {self._size()} samples")
        self.offset = samples

    def __len__(self) -> int:
        return self._batches(self.offset) * self.local_batch

    def __iter__(self) -> Iterator[Key]:
        own = self.own(self.epoch, self.offset)
        return ((self.epoch, index) for index in own.tolist())

    def own(self, epoch: int, offset: int) -> Tensor:
        """Return the positions of this worker's samples in an epoch, after `offset` global ones."""
        own = self.order(epoch)[offset:][: self._batches(offset) * self.global_batch]
        return own.reshape(-1, self.num_replicas, self.local_batch)[:, self.rank].reshape(-1)

    def order(self, epoch: int) -> Tensor:
        """Return an epoch's permutation of all samples, (D,)."""
        generator = torch.Generator().manual_seed(int(mix(self.seed, epoch)[0]))
        return torch.randperm(self._size(), generator=generator)

    def _batches(self, offset: int) -> int:
        return (self._size() - offset) // self.global_batch

    def _size(self) -> int:
        return samples_of(self.dataset)


class EndlessOrder(Sampler[Key]):
    """Endless epochs of a `ResumableSampler`: loader processes work ahead into the next epoch."""

    def __init__(self, order: ResumableSampler) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Key]:
        while True:
            yield from self.order
            self.order.set_epoch(self.order.epoch + 1)
            self.order.set_offset(0)


class TrainLoader(RaisingLoader):
    """An endless loader over the epochs of a `ResumableSampler`, which it keeps as `order`."""

    def __init__(self, dataset: EpochDataset, order: ResumableSampler, **options: Any) -> None:
        super().__init__(
            dataset,
            batch_size=order.local_batch,
            sampler=EndlessOrder(order),
            drop_last=True,
            **options,
        )
        self.order = order

    def stream(self, epoch: int = 0, offset: int = 0) -> Iterator[tuple[Batch, Batch]]:
        """Yield the rest of `epoch` after `offset` global samples, then all epochs that follow.

        Only one stream of a loader may be in use: the sampler and the loader processes are shared.

        Yields:
            Inputs and targets; for images (local_batch, 3, edge, edge) and labels (local_batch,).
            Images are bytes if the loader pins memory, else floats as the model takes them.
        """
        self.order.set_epoch(epoch)
        self.order.set_offset(offset)
        yield from self

    def not_finite(self, epoch: int, offset: int, batches: int) -> int | None:
        """Return the position of a sample of this worker that holds inf or nan; None without one.

        The search covers `batches` batches after `offset` global samples, up to the epoch's end.
        """
        for index in self.order.own(epoch, offset)[: batches * self.order.local_batch].tolist():
            if not is_finite(collate([self.dataset[(epoch, index)]])):
                return int(index)
        return None


def make_train_loader(
    dataset: Dataset[Any],
    *,
    local_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    loader_workers: int,
    pin_memory: bool,
    classes: int | None = None,
) -> TrainLoader:
    """Return one worker's loader of a data-parallel training; see `ResumableSampler`.

    `seed` decides order and augmentation. `loader_workers` processes load, with 0 this process.
    `pin_memory` is for a GPU: batches are in pinned memory, images as bytes. Targets are checked
    as labels of `classes` classes; with None they are no labels.

    Raises:
        InputError: The data set is smaller than one global batch.
    """
    order = ResumableSampler(
        dataset, local_batch=local_batch, rank=rank, world_size=world_size, seed=seed
    )
    samples = samples_of(dataset)
    if samples < order.global_batch:
        raise InputError(
            f"a global batch of {order.global_batch} is larger than the training set of "
            f"{samples} samples; lower search.max_batch (and search.min_batch if it is larger), "
            "or in a study study.batches"
        )
    options = _options(dataset, loader_workers, pin_memory)
    return TrainLoader(EpochDataset(dataset, seed, classes), order, **options)


def make_test_loader(
    dataset: Dataset[Any],
    *,
    batch: int,
    rank: int,
    world_size: int,
    loader_workers: int,
    pin_memory: bool,
    classes: int | None = None,
) -> DataLoader[Any]:
    """Return a loader of every `world_size`-th test sample; shares may differ by one sample."""
    samples = range(rank, samples_of(dataset), world_size)
    options = _options(dataset, loader_workers, pin_memory)
    named = NamedItems(dataset, "test", classes)
    return RaisingLoader(named, batch_size=batch, sampler=samples, **options)


def most_batches(loader: DataLoader[Any], world_size: int) -> int:
    """Return the number of batches of the worker with the largest share in `make_test_loader`."""
    share = math.ceil(samples_of(loader.dataset) / world_size)
    return math.ceil(share / (loader.batch_size or 1))


def _options(dataset: Dataset[Any], loader_workers: int, pin_memory: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "pin_memory": pin_memory,
        # a loader draws a seed whenever it starts, by default from the generator of dropout
        "generator": torch.Generator(),
        "collate_fn": partial(collated, collate),
    }
    if isinstance(dataset, ImageDataset) and not pin_memory:
        # For a CPU the process that loads turns bytes into floats, while another one trains; a GPU
        # does so itself.
        make = partial(_collate_prepared, dataset.preprocessing)
        options["collate_fn"] = partial(collated, make)
    return options | (_process_options(loader_workers) if loader_workers else {})


def _collate_prepared(
    preprocessing: Preprocessing, items: list[tuple[Tensor, int]]
) -> tuple[Tensor, Tensor]:
    images, labels = zip(*items, strict=True)
    return preprocessing.apply(torch.stack(images)), torch.tensor(labels)


def one_ahead(batches: Iterator[Batch], copies: StreamCopies) -> Iterator[Batch]:
    """Yield batches on the device in their order, each after the copy of the next has begun.

    Each request waits for the loader to have the next batch. Yielded batches are not kept.
    """
    under_way: deque[Copying] = deque()
    for batch in batches:
        under_way.append(copies.begin(batch))
        # otherwise the host memory of one more batch would be held during a step
        del batch
        if len(under_way) > 1:
            yield copies.arrive(under_way.popleft())
    while under_way:
        yield copies.arrive(under_way.popleft())


class Copying(NamedTuple):
    """A batch while a stream copies it."""

    batch: Batch
    done: torch.cuda.Event


class StreamCopies:
    """Copies to a GPU on a stream of their own.

    The batch must be in pinned memory, or the host waits for the copy. The batch may be freed at
    once: the allocator of pinned memory does not reuse its memory before the copy is done. On the
    GPU, the memory of a copy belongs to this stream. `record_stream` keeps the next copy from using
    it until the stream that uses the tensor has done all work queued before the tensor was freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, batch: Batch) -> Copying:
        """Begin to copy a batch to the GPU."""
        with torch.cuda.stream(self.stream):
            copied = map_tensors(lambda one: one.to(self.device, non_blocking=True), batch)
        return Copying(copied, self.stream.record_event())  # type: ignore[no-untyped-call]

    def arrive(self, copying: Copying) -> Batch:
        """Let the current stream wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copying.done)
        for tensor in tensors_of(copying.batch):
            tensor.record_stream(current)
        return copying.batch
