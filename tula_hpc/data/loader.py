"""Loaders: which samples make up a batch, in which order, by which process.

The order of an epoch follows from (seed, epoch), a global batch from the order and its size, an
augmentation from (seed, epoch, index). None of them depends on the number of workers or of loader
processes, or on where a training was interrupted.

Processes of loaders: started clean, deaf to the signals that tell a job to stop, and gone when
their owner is.

Neither nccl nor CUDA survives a fork, nor do locks that other threads hold: processes come from a
server that was started clean and that imports torch once for all of them.

TERM and USR2 ask a training to save at the next whole step, for which it needs its loader. Where
Slurm tracks processes by cgroup it tells only the tasks, elsewhere their children too, as `kill` of
a process group does. What is blocked when a process starts stays so in it and in those that it
starts. So the owner ends them with KILL, and they watch over it: the server ends only when they
have, and torch's own look at the parent process sees the server.

Batches on their way to a GPU: one is copied while the device works on the one before.
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
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tula_hpc.batches import Batch, map_tensors, tensors_of
from tula_hpc.data.images import ImageDataset, Indices, Keys, Preprocessing, mix
from tula_hpc.errors import InputError
from tula_hpc.user_code import collate

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


def process_options(count: int, module: str) -> dict[str, Any]:
    """Options of a `DataLoader`; the servers that its processes come from are running then.

    Args:
        count: Of processes.
        module: That the server imports for all of them.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    # starting the tracker lets TERM through again, so that the server is started apart
    with _deaf():
        resource_tracker.ensure_running()
    with _deaf():
        forkserver.ensure_running()
    _end_all_at_exit()
    return {
        "num_workers": count,
        "multiprocessing_context": context,
        "worker_init_fn": partial(_end_with, os.getpid()),
    }


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Signals that come meanwhile are delivered to this process afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# once for each process
@functools.cache
def _end_all_at_exit() -> None:
    """Before multiprocessing waits at exit for those that it has sent TERM, which it does where a loader has failed."""
    atexit.register(_end_all)


def _end_all() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _end_with(owner: int, _: int) -> None:
    """In a loader's process: end as soon as another has, however it did."""
    try:
        alive = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        # a kernel before 5.3
        return

    def watch() -> None:
        select.select([alive], [], [])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="owner").start()


# batches that each loader process works ahead
_PREFETCH = 2
# (epoch, index)
Key = tuple[int, int]


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
        return [
            self._seeded_item(index, seed)
            for index, seed in zip(indices.tolist(), bits.tolist(), strict=True)
        ]

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
    # not torch.manual_seed: that would reseed the GPU as well
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class ResumableSampler(DistributedSampler[Key]):
    """This worker's part of every full global batch, in an order that follows from (seed, epoch) alone.

    Global batch k of an epoch is ``order[offset + k·B : offset + (k + 1)·B]`` with ``B =
    local_batch × world_size``; rank r has its r-th slice of `local_batch`. A rest smaller than B is
    left out.

    Args:
        dataset: Anything with a length.
        local_batch: Samples a step and worker.
        rank: Which worker this is.
        world_size: How many there are.
        seed: Of the order.
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
        """Samples a step over all workers, B."""
        return self.local_batch * self.num_replicas

    def set_offset(self, samples: int) -> None:
        """Skip so many global samples of the epoch's order, those that were seen before an interruption.

        The batch may have been another one then: any number up to the length of the data set will
        do.
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
        super().__init__(
            dataset,
            batch_size=order.local_batch,
            sampler=EndlessOrder(order),
            drop_last=True,
            **options,
        )
        self.order = order

    def stream(self, epoch: int = 0, offset: int = 0) -> Iterator[tuple[Batch, Batch]]:
        """Batches for ever: the rest of `epoch` after `offset` global samples, then the epochs that follow.

        Only one stream of a loader may be in use: the sampler and the loader processes are shared.

        Yields: Inputs and targets, of images (local_batch, 3, edge, edge) and labels
            (local_batch,). Images are bytes where the loader pins memory, else as the model takes
            them.
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

    Args: dataset: Items (inputs, targets) by index. local_batch: Samples a step and worker. rank:
        Which worker this is. world_size: How many there are. seed: Of order and augmentation.
        loader_workers: Processes that load; 0 loads in this process. pin_memory: Whether batches
        are for a GPU: put where it can fetch them by itself, images as bytes.

    Raises:
        InputError: The data set is smaller than one global batch.
    """
    order = ResumableSampler(
        dataset, local_batch=local_batch, rank=rank, world_size=world_size, seed=seed
    )
    samples = len(dataset)  # type: ignore[arg-type] # checked when the data was built
    if samples < order.global_batch:
        message = f"a global batch of {order.global_batch} is larger than the training set of {samples} samples"
        lower = "lower search.max_batch, and search.min_batch where that is above it; in a study study.batches"
        raise InputError(f"{message}; {lower}")
    return TrainLoader(
        EpochDataset(dataset, seed), order, **_options(dataset, loader_workers, pin_memory)
    )


def make_test_loader(
    dataset: Dataset[Any],
    *,
    batch: int,
    rank: int,
    world_size: int,
    loader_workers: int,
    pin_memory: bool,
) -> DataLoader[Any]:
    """One worker's share of the test set: every `world_size`-th sample, none twice; shares may differ by one sample."""
    samples = range(rank, len(dataset), world_size)  # type: ignore[arg-type] # checked when the data was built
    return DataLoader(
        dataset, batch_size=batch, sampler=samples, **_options(dataset, loader_workers, pin_memory)
    )


def most_batches(loader: DataLoader[Any], world_size: int) -> int:
    """Return how many batches the worker with the largest share has, whose loader is another `make_test_loader`."""
    share = math.ceil(len(loader.dataset) / world_size)  # type: ignore[arg-type] # as there
    return math.ceil(share / (loader.batch_size or 1))


def _options(dataset: Dataset[Any], loader_workers: int, pin_memory: bool) -> dict[str, Any]:
    # A generator of its own: a loader draws a seed whenever it starts, by default from the numbers
    # that dropout uses.
    options: dict[str, Any] = {
        "pin_memory": pin_memory,
        "generator": torch.Generator(),
        "collate_fn": collate,
    }
    if isinstance(dataset, ImageDataset) and not pin_memory:
        # On a CPU the process that loads makes floats of bytes, while another trains; a GPU does so
        # by itself.
        options["collate_fn"] = partial(_collate_prepared, dataset.preprocessing)
    if loader_workers == 0:
        return options
    options |= {"persistent_workers": True, "prefetch_factor": _PREFETCH}
    return options | process_options(loader_workers, __name__)


def _collate_prepared(
    preprocessing: Preprocessing, items: list[tuple[Tensor, int]]
) -> tuple[Tensor, Tensor]:
    images, labels = zip(*items, strict=True)
    return preprocessing.apply(torch.stack(images)), torch.tensor(labels)


C = TypeVar("C")


class Copies(Protocol[C]):
    """How batches are copied."""

    def begin(self, batch: Batch) -> C:
        """Begin to copy a batch, and do not wait for it."""

    def arrive(self, copying: C) -> Batch:
        """Give the batch to whoever works on the device: what is asked of it from now on finds the batch there."""


def one_ahead(batches: Iterator[Batch], copies: Copies[C]) -> Iterator[Batch]:
    """Yield batches on the device in their order; when one is yielded, the copy of the next has begun.

    Whoever asks for a batch waits for the loader to have the next one. Of what was yielded nothing
    is kept.
    """
    under_way: deque[C] = deque()
    for batch in batches:
        under_way.append(copies.begin(batch))
        # Or host memory of one more batch would be held during a step.
        del batch
        if len(under_way) > 1:
            yield copies.arrive(under_way.popleft())
    while under_way:
        yield copies.arrive(under_way.popleft())


class Copying(NamedTuple):
    """A batch that a stream copies."""

    batch: Batch
    done: torch.cuda.Event


class StreamCopies:
    """Copies to a GPU on a stream of their own.

    The batch must lie in pinned memory, or the host waits for the copy. It may be freed at once:
    the allocator of pinned memory does not hand it out again before the copy is done. Likewise the
    GPU's: memory of a copy belongs to this stream, and `record_stream` keeps it from the next copy
    until the stream that uses the tensor has done what it was asked before the tensor was freed.

    Args:
        device: Which GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's

    def begin(self, batch: Batch) -> Copying:
        """Begin to copy."""
        with torch.cuda.stream(self.stream):
            copied = map_tensors(self._copy, batch)
        return Copying(copied, self.stream.record_event())  # type: ignore[no-untyped-call] # torch's

    def arrive(self, copying: Copying) -> Batch:
        """Let the current stream wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copying.done)
        for tensor in tensors_of(copying.batch):
            tensor.record_stream(current)
        return copying.batch

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)
