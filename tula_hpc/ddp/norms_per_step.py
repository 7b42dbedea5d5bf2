"""Report squared norms of small batches' gradients at every step, without another pass.

`gradients/small_batch_norms.py` computes them. With several workers, each has the gradient of a
small batch anyway: its own. A single worker has such gradients if it splits its batch into
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tula_hpc.batches import Batch
from tula_hpc.config import TrainingSpec
from tula_hpc.gradients.small_batch_norms import LocalNorms, PartNorms, looks_at_whole_batch
from tula_hpc.optim.observer import GradientObserver


class SmallNorms:
    """Null object for steps without norms of small batches' gradients."""

    are_given = False
    # number of micro-batches into which a step splits its local batch
    count = 1

    def parts(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Batch, Batch, float]]:
        """Yield the micro-batches of a batch, each with its share of the samples."""
        yield inputs, targets, 1.0

    def report(
        self, observer: GradientObserver, loss_scale: Tensor | float, clipping: Tensor | float
    ) -> None:
        """Give the observer the norms of the last backward pass.

        The norms are multiplied by the factor by which clipping has multiplied the large gradient,
        so that clipping does not change their ratio. The observer knows the factor, and computes
        the noise of the gradient before clipping.
        """

    def release(self) -> None:
        """Release the model after its last backward pass."""


class WorkerNorms(LocalNorms, SmallNorms):
    """Norms of the workers' own gradients, and of their average."""

    are_given = True

    def report(
        self, observer: GradientObserver, loss_scale: Tensor | float, clipping: Tensor | float
    ) -> None:
        """Give the observer both kinds of norms; see `SmallNorms`."""
        squares, batch = self.squares(loss_scale)
        observer.observe_small(squares * clipping**2, batch)
        observer.observe_norms(self.averaged(loss_scale) * clipping**2)


class MicroBatchNorms(PartNorms, SmallNorms):
    """Norms of the gradients of a single worker's micro-batches."""

    are_given = True

    def report(
        self, observer: GradientObserver, loss_scale: Tensor | float, clipping: Tensor | float
    ) -> None:
        """Give the observer the norms; see `SmallNorms`."""
        squares, batch = self.squares(loss_scale)
        observer.observe_small(squares * clipping**2, batch)


def small_norms(
    training: TrainingSpec, model: nn.Module, parameters: Sequence[Tensor], local_batch: int
) -> SmallNorms:
    """Return the norms that a worker's steps yield at no extra cost.

    A single worker splits its batch into two micro-batches if that changes nothing but the order of
    additions. BatchNorm would train on statistics of half the batch, so a model with it keeps the
    reference pass, at its interval. A single worker whose gradients are only observed has no norms:
    observing must not change its training.

    `model` is the one that a step calls: wrapped in DDP if there are several workers.
    """
    is_observed = training.observe_gradients and not training.adapts
    if not (is_observed or training.free_reference):
        return SmallNorms()
    if isinstance(model, DistributedDataParallel):
        norms = WorkerNorms(parameters, local_batch)
        norms.attach(model)
        return norms
    if is_observed or looks_at_whole_batch(model) or local_batch < 2:
        return SmallNorms()
    return MicroBatchNorms(parameters)
