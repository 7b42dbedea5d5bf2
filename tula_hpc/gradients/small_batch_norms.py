"""Norms of small-batch gradients, from gradients that training computes anyway.

`LocalNorms` takes the norms of the workers' own gradients before the all-reduce, `PartNorms` those
of a single worker's micro-batches. From them follow the two unknowns of `noise_scale`, |G|² and
tr(Σ), and so the squared norm at any other batch, without a further pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.batches import Batch, samples_in, split
from tula_hpc.gradients.norms import foreach_norms, squared, squares

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class _Exchange(NamedTuple):
    """Bucket that is being averaged."""

    buffer: Tensor
    # views of the buffer, by parameter; none if it is sparse
    gradients: Sequence[Tensor]
    # handle of the all-reduce
    work: Any
    # future that DDP waits for and `_finish` completes; None: DDP waits for `work`
    finished: Future[Tensor] | None


class LocalNorms:
    """Squared norms of the workers' own gradients, by parameter, at every backward pass of DDP.

    Worker i of W holds g_i, the mean gradient of its own b samples, until DDP replaces it by g_B,
    the mean over the workers, with B = W·b. For each tensor

        E (1/W) Σ_i |g_i|² = |G|² + tr(Σ)/b          E |g_B|² = |G|² + tr(Σ)/B

    The mean over the workers is never below |g_B|²: their difference is the variance between the
    workers, and the cross terms 2·G·noise, which a single small gradient has, cancel in it.

    A communication hook takes the norms of each bucket when its gradients are complete, then
    averages the bucket as DDP itself does. After the last bucket one small all-reduce averages the
    workers' norms. Each bucket's norms are also taken once it is averaged, while the buckets behind
    it are still exchanged: at the end of the backward pass, where DDP only waits. Norms and
    exchange thus overlap; on a GPU the stream waits, not the host.

    Gradients are those of DDP without a hook, bit for bit. The only exception is gradients that are
    accumulated in DDP's own buckets (`gradient_as_bucket_view`) over a number of workers that is no
    power of two: DDP then divides, where it otherwise multiplies with the inverse, and the last bit
    can differ.

    With `no_sync` the local gradient is the accumulated one, and its batch is the local batch times
    the number of accumulated passes: set `batch` accordingly. Start accumulating without gradients:
    a pass that adds to averaged gradients yields the norms of neither. Buckets are followed by
    parameter, so that DDP may regroup them. Under `Join` there are no norms once a worker has run
    out of data.

    Args:
        parameters: In the optimizer's order; frozen ones are allowed.
        batch: Samples that each worker's gradient averages over before the all-reduce.
    """

    def __init__(self, parameters: Sequence[Tensor], batch: int) -> None:
        self.parameters = list(parameters)
        self.batch = batch
        self.workers = 1
        self._device = self.parameters[0].device
        self._ddp: DistributedDataParallel | None = None
        # in the present backward pass, by bucket: squares of this worker's norms, and all-reduces
        self._squares: list[Tensor] = []
        self._exchanges: list[_Exchange] = []
        # squares of the averaged norms of the last complete pass
        self._averaged: list[Tensor] | None = None
        # parameters of the last pass in the order of its buckets, and the index of each
        self._order: list[Tensor] = []
        self._index_of: dict[Tensor, int] = {}
        # squares in the order of the buckets, then a NaN; and the all-reduce that sums them
        self._pending: tuple[Tensor, Any] | None = None
        # backward passes with an all-reduce since `take_passes`
        self._passes = 0
        # index of each of `parameters` in the buckets' order, on the host and on the device
        self._indices: list[int] = []
        self._device_indices = torch.empty(0)

    def attach(self, ddp: DistributedDataParallel) -> LocalNorms:
        """Register the communication hook, once and before the first backward pass.

        Raises:
            ValueError: There is only one worker: its own gradient is the whole one (see
                `PartNorms`).
            RuntimeError: The model has a communication hook already, or these norms belong to a
                model already.
        """
        if self._ddp is not None:
            raise RuntimeError(
                "these norms belong to a model already: a second one needs LocalNorms of its own"
            )
        group: dist.ProcessGroup = ddp.process_group
        self.workers = group.size()
        if self.workers == 1:
            raise ValueError(
                "a single worker's gradient is that of the whole batch: use PartNorms instead"
            )
        self._ddp = ddp
        # DDP compares a hook's annotations with classes, and here they are text: a lambda has none
        ddp.register_comm_hook(self, lambda state, bucket: state._reduce(bucket))
        return self

    def release(self) -> None:
        """Drop the model after its last backward pass, so that its memory can be freed.

        DDP's reducer keeps the hook where Python sees no cycle. A process that ends is safer
        without this call: freeing waits for gloo's threads, which may come back to Python late.
        """
        self._ddp = None

    def take_passes(self) -> int:
        """Return how many backward passes with an all-reduce there were since the last call."""
        passes = self._passes
        self._passes = 0
        return passes

    def squares(self, loss_scale: Tensor | float = 1.0) -> tuple[Tensor, int]:
        """Return the mean squared norm of each parameter's gradients, and the batch of a gradient.

        Call it after the backward pass and before gradients are set to None. On a GPU the stream
        waits, not the host.

        Args:
            loss_scale: Factor of the loss; the squares are divided by its square, on the device.

        Returns:
            (n,), float64, in parameter order; NaN where a parameter has no gradient, or any
            worker's is not finite; and `batch`.

        Raises:
            RuntimeError: No gradient was all-reduced since the last call.
        """
        if self._pending is None:
            raise RuntimeError("squares: no backward pass with an all-reduce since the last call")
        found, work = self._pending
        self._pending = None
        work.wait()
        mean = self._in_order(found) / (self.workers * squared(loss_scale))
        return _nan_unless_finite(mean), self.batch

    def averaged(self, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Return each averaged gradient's squared norm, for `TulaOptimizer.observe_norms`.

        See `squares`, of which it is independent.

        Returns:
            (n,), float64, in parameter order; NaN where a parameter has no gradient.

        Raises:
            RuntimeError: No gradient was all-reduced since the last call.
            ValueError: A parameter that is not in this model has a gradient: its norm would be
                missing in ‖G‖.
        """
        if self._averaged is None:
            raise RuntimeError("averaged: no backward pass with an all-reduce since the last call")
        averaged = self._averaged
        self._averaged = None
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse or parameter in self._index_of:
                continue
            raise ValueError(
                f"averaged: the gradient of parameter {index} was not averaged with this model's"
            )
        return self._in_order(torch.cat([*averaged, self._nothing()])) / squared(loss_scale)

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket, as DDP's communication hook; all workers get them in the same order."""
        ddp = self._ddp
        if ddp is None:
            raise RuntimeError("a backward pass after `release`")
        if bucket.index() == 0:
            self._squares = []
            self._order = []
            self._exchanges = []
            self._averaged = None
        group = ddp.process_group
        buffer = bucket.buffer()
        gradients: list[Tensor] = []
        # a sparse gradient has no squares: NaN
        if not buffer.is_sparse:
            self._order += bucket.parameters()
            gradients = bucket.gradients()
            self._squares.append(self._squares_of(gradients))
        work = _average(group, buffer)
        finished: Future[Tensor] | None = None
        # A thread of gloo that comes back to Python while the process ends, as after the loss of a
        # worker, aborts it: `_finish` reports the bucket's end instead. NCCL's future is there at
        # once and needs no thread; and in the first pass of a static graph DDP waits before
        # `_finish` comes.
        if buffer.device.type == "cpu" and not ddp.static_graph:
            finished = Future()
        self._exchanges.append(_Exchange(buffer, gradients, work, finished))
        if bucket.is_last():
            in_backward_pass = torch._C._current_graph_task_id() != -1
            # outside a backward pass: a worker under `Join` that ran out of data
            self._send(group, known=in_backward_pass)
            if in_backward_pass:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            else:
                self._finish()
        return work.get_future().then(_first) if finished is None else finished

    def _finish(self) -> None:
        """Take each bucket's norms as soon as it is averaged, in the backward pass's own thread."""
        exchanges = self._exchanges
        self._exchanges = []
        averaged: list[Tensor] = []
        for exchange in exchanges:
            exchange.work.wait()
            if exchange.gradients:
                averaged.append(self._squares_of(exchange.gradients))
            if exchange.finished is not None:
                exchange.finished.set_result(exchange.buffer)
        self._averaged = averaged

    def _squares_of(self, gradients: Sequence[Tensor]) -> Tensor:
        # a bucket has one type, so that the norms keep the order of its gradients
        norms = foreach_norms(gradients)
        return squares(list(norms.values()), self._device)

    def _send(self, group: dist.ProcessGroup, *, known: bool) -> None:
        """Sum the workers' squares; a worker without a gradient makes them NaN for all."""
        self._passes += 1
        self._index_of = {parameter: index for index, parameter in enumerate(self._order)}
        found = torch.cat([*self._squares, self._nothing()])
        if not known:
            found.fill_(torch.nan)
        self._pending = (found, dist.all_reduce(found, group=group, async_op=True))

    def _nothing(self) -> Tensor:
        """Return the NaN behind a pass's squares, which stands for parameters without a square."""
        return torch.full((1,), torch.nan, device=self._device, dtype=torch.float64)

    def _in_order(self, found: Tensor) -> Tensor:
        """Return squares of the last pass in parameter order.

        The indices are copied to the device only when DDP regroups its buckets.
        """
        absent = len(found) - 1
        indices = [
            absent if p.grad is None else self._index_of.get(p, absent) for p in self.parameters
        ]
        if indices != self._indices:
            self._indices = indices
            self._device_indices = torch.tensor(indices, device=found.device)
        return found[self._device_indices]


def _first(done: Future[Any]) -> Tensor:
    # a group's future holds a list
    reduced: Tensor = done.value()[0]
    return reduced


def _nan_unless_finite(squares: Tensor) -> Tensor:
    # an overflow, as of float16, leaves no norm
    return torch.where(torch.isfinite(squares), squares, torch.nan)


def _average(group: dist.ProcessGroup, buffer: Tensor) -> Any:
    """Start averaging over the workers in place, with DDP's own operations: scale, then sum."""
    workers = group.size()
    if buffer.is_sparse:
        buffer.div_(workers)
    else:
        buffer.mul_(1.0 / workers)
    return dist.all_reduce(buffer, group=group, async_op=True)


class _MicroBatch(NamedTuple):
    """Share of one micro-batch in the batch's samples, and norms of its gradients."""

    share: float
    # norms by index of the parameter, of the gradient as it is added: share times the part's own
    norms: dict[int, Tensor]


class PartNorms:
    """Squared norms of the gradients of a batch's micro-batches, by parameter.

    The gradients of the micro-batches add up to that of the batch, as in gradient accumulation, so
    that no sample is used twice. For K of them with n_k of n samples

        E Σ_k (n_k/n)·|g_k|² = |G|² + Σ_k (n_k/n)·tr(Σ)/n_k = |G|² + tr(Σ)·K/n

    which is the squared norm at a batch of n/K samples, whether or not the K parts are equal.

    Each gradient is seen just before it is added to `.grad`: there is never a second gradient in
    memory. Layers that look at a whole batch see micro-batches instead. For BatchNorm that changes
    the training, and its statistics are those of a micro-batch: see `looks_at_whole_batch`.
    Dropout draws other numbers, by the same law.

    A gradient that comes in several pieces has no norm: that of a parameter which several reentrant
    checkpoints (`torch.utils.checkpoint` with `use_reentrant=True`) share, or of two calls of
    `backward` for one micro-batch.

    Args:
        parameters: In the optimizer's order; frozen ones are allowed.
        count: Micro-batches of a batch, at least 2. More of them bring less noise into the
            estimate, and the device may compute small ones less efficiently.
    """

    def __init__(self, parameters: Sequence[Tensor], count: int = 2) -> None:
        self.parameters = list(parameters)
        self.count = count
        # samples of the batch that was divided last
        self.batch = 0
        self._parts: list[_MicroBatch] = []
        # the micro-batch whose gradients are being computed
        self._open: _MicroBatch | None = None
        for index, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                hook = partial(self._record, index)
                parameter.register_hook(hook)  # type: ignore[no-untyped-call] # torch's

    def parts(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Batch, Batch, float]]:
        """Yield the micro-batches of a batch, samples first, each with its share of the samples.

        Multiply each one's mean loss with its share and call `backward` before the next is taken. A
        batch has at least as many samples as micro-batches.
        """
        self._parts = []
        self.batch = samples_in(targets)
        try:
            for part_inputs, part_targets in split((inputs, targets), self.count):
                share = samples_in(part_targets) / self.batch
                self._open = _MicroBatch(share, {})
                self._parts.append(self._open)
                yield part_inputs, part_targets, share
        finally:
            self._open = None

    def squares(self, loss_scale: Tensor | float = 1.0) -> tuple[Tensor, float]:
        """Return the weighted mean squared norm of each parameter's gradient, and its batch, n/K.

        Call it before gradients are set to None. It does not wait for the device. The squares are
        divided by that of `loss_scale`; (n,), float64, in parameter order, NaN where a parameter
        has no gradient, or where a micro-batch's is not finite or came in pieces.

        Raises:
            RuntimeError: No batch was divided since the last call.
        """
        if not self._parts:
            raise RuntimeError("squares: no batch was divided into parts since the last call")
        parts = self._parts
        self._parts = []
        of_parts = torch.stack([self._squares_of(part) / part.share for part in parts])
        return _nan_unless_finite(of_parts.sum(0) / squared(loss_scale)), self.batch / len(parts)

    def _squares_of(self, part: _MicroBatch) -> Tensor:
        device = self.parameters[0].device
        zero = torch.zeros((), device=device)
        norms = [
            None if p.grad is None else part.norms.get(index, zero)
            for index, p in enumerate(self.parameters)
        ]
        return squares(norms, device)

    def _record(self, index: int, gradient: Tensor) -> None:
        """Take the norm of one micro-batch's gradient, as the parameter's hook."""
        if self._open is None:
            return
        if gradient.is_sparse or index in self._open.norms:
            self._open.norms[index] = torch.full((), torch.nan, device=gradient.device)
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._open.norms[index] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)


def looks_at_whole_batch(model: nn.Module) -> bool:
    """Tell whether BatchNorm in training mode would see something else in parts of a batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
