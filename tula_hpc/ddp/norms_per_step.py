"""Squared norms of small gradients at every step, reported to the observer without another pass.

They are taken by `gradients/small_batch_norms.py`. Several workers have gradients of small batches
anyway, their own; a single worker has them where it takes its batch in micro-batches.
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
    """Null object: a step has no norms of small gradients."""

    are_given = False
    # micro-batches in which a step takes its local batch
    count = 1

    def parts(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Batch, Batch, float]]:
        """Yield micro-batches of a batch with their share of its samples."""
        yield inputs, targets, 1.0

    def report(
        self, observer: GradientObserver, loss_scale: Tensor | float, clipping: Tensor | float
    ) -> None:
        """Give the observer the norms of the last backward pass.

        They are multiplied as clipping has multiplied the large gradient, so that it leaves their
        ratio alone; the observer, which knows of it, takes the noise of the gradient before.
        """

    def release(self) -> None:
        """Let go of the model after its last backward pass."""


class WorkerNorms(LocalNorms, SmallNorms):
    """Norms of the workers' own gradients, and of their average."""

    are_given = True

    def report(
        self, observer: GradientObserver, loss_scale: Tensor | float, clipping: Tensor | float
    ) -> None:
        """Give the observer both; see `SmallNorms`."""
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
    """Return the norms that a worker's steps give for free.

    A single worker takes its batch in two micro-batches where that changes nothing but the order of
    additions. BatchNorm would train on statistics of half the batch: such a model keeps the
    reference pass, at its interval. A single worker whose gradients are only observed has no norms:
    its training must not change by that.

    The model is the one that a step calls: wrapped where there are several workers.
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
