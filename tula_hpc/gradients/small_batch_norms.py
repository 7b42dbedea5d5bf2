"""The small-batch gradient for free: norms of every worker's own gradient, taken before the all-reduce mixes them.

With W workers and a local batch of b samples, worker i holds g_i, the mean gradient of its own
samples, until DDP replaces it by the mean over the workers, g_B with B = W·b. For each tensor

    E (1/W) Σ_i |g_i|² = |G|² + tr(Σ)/b          E |g_B|² = |G|² + tr(Σ)/B

so that both unknowns, and with them the squared norm at any other batch, are known without a
further pass (see `noise_scale`). The mean over the workers is never below |g_B|²: their difference
is the variance between the workers, and the cross terms 2·G·noise, which a single small gradient
has, cancel in it.

The small-batch gradient of a single worker: it takes its batch in parts, and the norm of each
part's gradient.

The gradients of the parts add up to that of the batch, as in gradient accumulation, so that no
sample is used twice. For parts of n_k of n samples

    E Σ_k (n_k/n)·|g_k|² = |G|² + Σ_k (n_k/n)·tr(Σ)/n_k = |G|² + tr(Σ)·K/n

which is the squared norm at a batch of n/K samples, whether or not the K parts are equal.
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
    """A bucket that is being averaged."""

    buffer: Tensor
    # views of it; none of a sparse one
    gradients: Sequence[Tensor]
    # the handle of the all-reduce
    work: Any
    # what DDP waits for, where it is told here
    told: Future[Tensor] | None


class _Pending(NamedTuple):
    """Squares of one backward pass on their way over the workers."""

    # sum over the workers in the order of the buckets, a NaN behind them; complete after `work`
    squares: Tensor
    # the handle of the all-reduce
    work: Any


class LocalNorms:
    """Squared norms of the workers' own gradients, for each parameter, at every backward pass of a DDP model.

    A communication hook takes the norms of each bucket when its gradients are complete, then
    averages the bucket as DDP itself does. After the last bucket one small all-reduce averages the
    workers' norms. With `averages`, each bucket's norms are taken anew once it is averaged, while
    those behind it are still exchanged: at the end of the backward pass, where DDP only waits.
    Norms and exchange thus overlap as the gradients' own do; on a GPU the stream waits, not the
    host.

    Gradients are those of DDP without a hook, bit for bit; the one exception are gradients that are
    accumulated in DDP's own buckets (`gradient_as_bucket_view`) over a number of workers that is no
    power of two: DDP then divides, where it otherwise multiplies with the inverse, and the last bit
    can differ.

    With `no_sync` the local gradient is the one that was accumulated, and its batch is the local
    batch times the number of accumulated passes: set `batch` accordingly. Accumulate so: a pass
    that begins with gradients which are averaged already adds this worker's own to them, and its
    norms are of neither. Buckets are followed by parameter, so that DDP may regroup them. Under
    `Join` there are no norms once a worker has run out of data.

    Args:
        parameters: In the optimizer's order; frozen ones are allowed.
        batch: Samples of which each worker's gradient, before the all-reduce, is the mean.
        averages: Whether `averaged` is wanted.
    """

    def __init__(self, parameters: Sequence[Tensor], batch: int, *, averages: bool = False) -> None:
        self.parameters, self.batch, self.averages = list(parameters), batch, averages
        self.workers = 1
        self._device = self.parameters[0].device
        self._ddp: DistributedDataParallel | None = None
        # of the buckets seen in the backward pass under way
        self._squares: list[Tensor] = []
        # of that pass
        self._exchanges: list[_Exchange] = []
        # squares of the averages of the last complete pass
        self._averaged: list[Tensor] | None = None
        # their parameters
        self._order: list[Tensor] = []
        # of each parameter of the last complete pass among them
        self._place: dict[Tensor, int] = {}
        self._pending: _Pending | None = None
        self._positions: list[int] = []
        # `_positions` on the device
        self._index = torch.empty(0)

    def attach(self, ddp: DistributedDataParallel) -> LocalNorms:
        """Register the communication hook; before the first backward pass, and only once: each model needs its own.

        Raises: ValueError: There is only one worker: its own gradient is the whole one (see
            `PartNorms`). RuntimeError: The model has a communication hook already, or these norms
            are of a model already.
        """
        if self._ddp is not None:
            raise RuntimeError(
                "these norms are of a model already: a second one needs LocalNorms of its own"
            )
        group: dist.ProcessGroup = ddp.process_group
        self.workers = group.size()
        if self.workers == 1:
            raise ValueError(
                "a single worker's own gradient is that of the whole batch: take norms of parts of it"
            )
        self._ddp = ddp
        # a lambda has no annotations: DDP compares them with classes, and here they are text until
        # they are evaluated
        ddp.register_comm_hook(self, lambda state, bucket: state._reduce(bucket))
        return self

    def release(self) -> None:
        """Let go of the model, after its last backward pass; without that it stays in memory until the process ends.

        DDP's reducer keeps the hook where Python sees no cycle. A process that ends needs no
        release, and is safer
        without: what is freed then waits for gloo's threads, which may come back to Python late.
        """
        self._ddp = None

    def squares(self, loss_scale: Tensor | float = 1.0) -> tuple[Tensor, int]:
        """Mean over the workers of the squared norm of each parameter's gradient; and the batch of such a gradient.

        Call it after the backward pass and before gradients are set to None. On a GPU the stream
        waits, not the host.

        Args: loss_scale: What the loss was multiplied with; the squares are divided by its square,
            on the device.

        Returns: (n,), float64, in parameter order; NaN where a parameter has no gradient, or any
            worker's is not finite.

        Raises:
            RuntimeError: No gradient was all-reduced since the last call.
        """
        if self._pending is None:
            raise RuntimeError("squares: no backward pass with an all-reduce since the last call")
        pending, self._pending = self._pending, None
        pending.work.wait()
        mean = self._in_order(pending.squares) / (self.workers * squared(loss_scale))
        return nan_unless_finite(mean), self.batch

    def averaged(self, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Squared norm of each parameter's gradient of the whole batch: what `TulaOptimizer.observe_norms` asks for.

        Call it as `squares`; one takes nothing from the other.

        Returns:
            (n,), float64, in parameter order; NaN where a parameter has no gradient.

        Raises: RuntimeError: No gradient was all-reduced since the last call, or `averages` is off.
            ValueError: A parameter has a gradient, and is none of this model's: its norm would be
            missing in ‖G‖.
        """
        if self._averaged is None:
            raise RuntimeError("averaged: no backward pass with an all-reduce since the last call")
        averaged, self._averaged = self._averaged, None
        for place, parameter in enumerate(self.parameters):
            if (
                parameter.grad is not None
                and parameter not in self._place
                and not parameter.grad.is_sparse
            ):
                raise ValueError(
                    f"averaged: the gradient of parameter {place} was not averaged with this model's"
                )
        return self._in_order(torch.cat([*averaged, self._nothing()])) / squared(loss_scale)

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook. Buckets come in the same order on all workers."""
        ddp = self._ddp
        if ddp is None:
            raise RuntimeError("a backward pass after `release`")
        if bucket.index() == 0:
            self._squares, self._order, self._exchanges, self._averaged = [], [], [], None
        group, buffer, gradients = ddp.process_group, bucket.buffer(), []
        # a sparse gradient has no squares: NaN
        if not buffer.is_sparse:
            self._order += bucket.parameters()
            gradients = bucket.gradients()
            self._squares.append(self._squares_of(gradients))
        work = _average(group, buffer)
        told: Future[Tensor] | None = Future() if _is_told(ddp, buffer) else None
        self._exchanges.append(_Exchange(buffer, gradients, work, told))
        if bucket.is_last():
            # outside a backward pass: a worker that ran out of data
            joined = torch._C._current_graph_task_id() == -1
            self._send(group, known=not joined)
            if joined:
                self._finish()
            else:
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return work.get_future().then(_first) if told is None else told

    def _finish(self) -> None:
        """Norms of each bucket as soon as it is averaged: in the thread of the backward pass, at its end."""
        exchanges, self._exchanges = self._exchanges, []
        averaged: list[Tensor] = []
        for exchange in exchanges:
            exchange.work.wait()
            if self.averages and exchange.gradients:
                averaged.append(self._squares_of(exchange.gradients))
            if exchange.told is not None:
                exchange.told.set_result(exchange.buffer)
        self._averaged = averaged if self.averages else None

    def _squares_of(self, gradients: Sequence[Tensor]) -> Tensor:
        # of one type, so that they come in their order
        norms = foreach_norms(gradients)
        return squares(list(norms.values()), self._device)

    def _send(self, group: dist.ProcessGroup, *, known: bool) -> None:
        """Average the workers' squares; a worker without a gradient of its own makes them NaN for all."""
        self._place = {parameter: place for place, parameter in enumerate(self._order)}
        found = torch.cat([*self._squares, self._nothing()])
        if not known:
            found.fill_(torch.nan)
        self._pending = _Pending(found, dist.all_reduce(found, group=group, async_op=True))

    def _nothing(self) -> Tensor:
        """What stands behind the squares of a pass, for parameters that are not among them."""
        return torch.full((1,), torch.nan, device=self._device, dtype=torch.float64)

    def _in_order(self, found: Tensor) -> Tensor:
        """Squares of the last pass in parameter order; the index is copied to the device only when DDP regroups."""
        nowhere = len(found) - 1
        positions = [
            nowhere if p.grad is None else self._place.get(p, nowhere) for p in self.parameters
        ]
        if positions != self._positions:
            self._positions, self._index = positions, torch.tensor(positions, device=found.device)
        return found[self._index]


def _is_told(ddp: DistributedDataParallel, buffer: Tensor) -> bool:
    """Whether DDP hears from `_finish` of a bucket's end, so that gloo's threads run no Python.

    A thread that comes back to Python while the process ends, as after the loss of a worker, aborts
    it. NCCL's future is there at once and needs no thread; and in the first pass of a static graph
    DDP waits before `_finish` comes.
    """
    return buffer.device.type == "cpu" and not ddp.static_graph


def _first(done: Future[Any]) -> Tensor:
    """What was all-reduced, of the list that a group's future holds."""
    found: Tensor = done.value()[0]
    return found


def nan_unless_finite(squares: Tensor) -> Tensor:
    """Infinity, as from an overflow in float16, becomes NaN: there is no norm."""
    return torch.where(torch.isfinite(squares), squares, torch.nan)


def _average(group: dist.ProcessGroup, buffer: Tensor) -> Any:
    """The mean over the workers in place, with DDP's own operations: scale first, then sum."""
    workers = group.size()
    if buffer.is_sparse:
        buffer.div_(workers)
    else:
        buffer.mul_(1.0 / workers)
    return dist.all_reduce(buffer, group=group, async_op=True)


class _Part(NamedTuple):
    """What is seen of one part of a batch."""

    # of the batch's samples
    share: float
    # by place of the parameter: of the gradient as it is added, share times the part's own
    norms: dict[int, Tensor]


class PartNorms:
    """Squared norms of the gradients of a batch's parts, for each parameter.

    Each part's gradient is seen just before it is added to `.grad`: there is never a second
    gradient in memory. Layers that look at a whole batch see parts instead. For BatchNorm that
    changes what is trained, and its statistics are those of a part: see `looks_at_whole_batch`.
    Dropout draws other numbers, by the same law.

    A gradient that comes in several pieces has no norm: that of a parameter which several reentrant
    checkpoints (`torch.utils.checkpoint` with `use_reentrant=True`) share, or of two calls of
    `backward` for one part.

    Args: parameters: In the optimizer's order; frozen ones are allowed. count: Into how many parts
        a batch is divided, at least 2. More of them bring less noise into the estimate, and
            the device may compute small parts less efficiently.
    """

    def __init__(self, parameters: Sequence[Tensor], count: int = 2) -> None:
        self.parameters, self.count = list(parameters), count
        # samples of the batch that was divided last
        self.batch = 0
        self._parts: list[_Part] = []
        # whose gradients are being computed
        self._open: _Part | None = None
        for place, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._see, place))  # type: ignore[no-untyped-call] # torch's

    def parts(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Batch, Batch, float]]:
        """Parts of a batch with their share of its samples, one after another.

        Multiply each part's mean loss with its share and call `backward` before the next part is
        taken.

        Args:
            inputs: The batch, samples first; at least as many as there are parts.
            targets: As many.
        """
        self._parts, self.batch = [], samples_in(targets)
        try:
            for part in split((inputs, targets), self.count):
                self._open = _Part(samples_in(part[1]) / self.batch, {})
                self._parts.append(self._open)
                yield *part, self._open.share
        finally:
            self._open = None

    def squares(self, loss_scale: Tensor | float = 1.0) -> tuple[Tensor, float]:
        """Weighted mean over the parts of the squared norm of each parameter's gradient; and the batch of it, n/K.

        Call it before gradients are set to None. It does not wait for the device.

        Args: loss_scale: What the loss was multiplied with; the squares are divided by its square,
            on the device.

        Returns: (n,), float64, in parameter order; NaN where a parameter has no gradient, or where
            a part's is not finite or came in pieces.

        Raises:
            RuntimeError: There was no batch in parts since the last call.
        """
        if not self._parts:
            raise RuntimeError("squares: no batch in parts since the last call")
        parts, self._parts = self._parts, []
        of_parts = torch.stack([self._squares_of(part) / part.share for part in parts])
        return nan_unless_finite(of_parts.sum(0) / squared(loss_scale)), self.batch / len(parts)

    def _squares_of(self, part: _Part) -> Tensor:
        device = self.parameters[0].device
        zero = torch.zeros((), device=device)
        norms = [
            None if p.grad is None else part.norms.get(place, zero)
            for place, p in enumerate(self.parameters)
        ]
        return squares(norms, device)

    def _see(self, place: int, gradient: Tensor) -> None:
        """Hook of a parameter: the gradient of one part, which is its share of the part's own."""
        if self._open is None:
            return
        # there is no norm of it here
        if gradient.is_sparse or place in self._open.norms:
            self._open.norms[place] = torch.full((), torch.nan, device=gradient.device)
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._open.norms[place] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)


def looks_at_whole_batch(model: nn.Module) -> bool:
    """Whether the model has BatchNorm in training mode, which would see something else in parts of a batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
