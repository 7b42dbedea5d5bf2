"""The small-batch gradient of a single worker: it takes its batch in parts, and the norm of each part's gradient.

The gradients of the parts add up to that of the batch, as in gradient accumulation, so that no sample is used twice.
For parts of n_k of n samples

    E Σ_k (n_k/n)·|g_k|² = |G|² + Σ_k (n_k/n)·tr(Σ)/n_k = |G|² + tr(Σ)·K/n

which is the squared norm at a batch of n/K samples, whether or not the K parts are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tula_hpc.nested import Batch, samples_in, split
from tula_hpc.optim.local_norms import nan_unless_finite
from tula_hpc.optim.norms import squared, squares


class _Part(NamedTuple):
    """What is seen of one part of a batch."""

    share: float  # of the batch's samples
    norms: dict[int, Tensor]  # by place of the parameter: of the gradient as it is added, share times the part's own


class PartNorms:
    """Squared norms of the gradients of a batch's parts, for each parameter.

    Each part's gradient is seen just before it is added to `.grad`: there is never a second gradient in memory. Layers
    that look at a whole batch see parts instead. For BatchNorm that changes what is trained, and its statistics are
    those of a part: see `looks_at_whole_batch`. Dropout draws other numbers, by the same law.

    A gradient that comes in several pieces has no norm: that of a parameter which several reentrant checkpoints
    (`torch.utils.checkpoint` with `use_reentrant=True`) share, or of two calls of `backward` for one part.

    Args:
        parameters: In the optimizer's order; frozen ones are allowed.
        count: Into how many parts a batch is divided, at least 2. More of them bring less noise into the estimate, and
            the device may compute small parts less efficiently.
    """

    def __init__(self, parameters: Sequence[Tensor], count: int = 2) -> None:
        self.parameters, self.count = list(parameters), count
        self.batch = 0  # samples of the batch that was divided last
        self._parts: list[_Part] = []
        self._open: _Part | None = None  # whose gradients are being computed
        for place, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.register_hook(partial(self._see, place))  # type: ignore[no-untyped-call] # torch's

    def parts(self, inputs: Batch, targets: Batch) -> Iterator[tuple[Batch, Batch, float]]:
        """Parts of a batch with their share of its samples, one after another.

        Multiply each part's mean loss with its share and call `backward` before the next part is taken.

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

        Args:
            loss_scale: What the loss was multiplied with; the squares are divided by its square, on the device.

        Returns:
            (n,), float64, in parameter order; NaN where a parameter has no gradient, or where a part's is not finite or
            came in pieces.

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
        norms = [None if p.grad is None else part.norms.get(place, zero) for place, p in enumerate(self.parameters)]
        return squares(norms, device)

    def _see(self, place: int, gradient: Tensor) -> None:
        """Hook of a parameter: the gradient of one part, which is its share of the part's own."""
        if self._open is None:
            return
        if gradient.is_sparse or place in self._open.norms:  # there is no norm of it here
            self._open.norms[place] = torch.full((), torch.nan, device=gradient.device)
            return
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        self._open.norms[place] = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)


def looks_at_whole_batch(model: nn.Module) -> bool:
    """Whether the model has BatchNorm in training mode, which would see something else in parts of a batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
