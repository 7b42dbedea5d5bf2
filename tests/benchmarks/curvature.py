"""The largest eigenvalues of the loss's Hessian, by power iteration on Hessian-vector products.

If the gradient g(w) keeps its graph, H·v = ∂(gᵀv)/∂w is one more backward pass (B. Pearlmutter, "Fast exact
multiplication by the Hessian", 1994); the matrix itself is never formed. Power iteration repeats v ← H·v / ‖H·v‖ from a
random start and converges to the eigenvector whose eigenvalue is largest in magnitude. For a unit vector v and the
Rayleigh quotient λ = vᵀHv, some eigenvalue of H lies within ‖H·v − λ·v‖ of λ: this residual comes with every value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tula_hpc.batches import Batch
from tula_hpc.gradients.norms import foreach_norms, sum_of_squares
from tula_hpc.gradients.reference_gradient import average_over_workers, flat_kind, flatten, traceless_loss, unflatten

# residual over the eigenvalue's magnitude at which the iteration ends
TOLERANCE = 0.02
MAX_ITERATIONS = 100

# v to H·v, both (n,)
Product = Callable[[Tensor], Tensor]


class Eigenvalue(NamedTuple):
    """An eigenvalue of the Hessian; NaN where a product was not finite."""

    value: float
    # ‖H·v − λ·v‖: an eigenvalue lies at most this far from the value
    residual: float
    # number of Hessian-vector products
    iterations: int


class Curvature(NamedTuple):
    """Curvature of the loss on one batch at the current weights."""

    # largest in magnitude
    dominant: Eigenvalue
    # algebraically largest: the dominant one, unless that is negative
    largest: Eigenvalue
    # ‖g‖ on the same batch
    gradient_norm: float
    # (n,), unit eigenvector of the dominant eigenvalue; a later measurement may start from it
    direction: Tensor


class LocalHessian:
    """Hessian-vector products of this worker's mean loss, from one graph: forward and first backward pass run once.

    As with `reference_gradient`, whose conditions on model, loss and batch apply, training is not affected: `.grad`,
    buffers and random numbers stay as they are, and the model is used in its present mode (train or eval). The graph
    holds about three times the activations of a training step, for as long as this object lives.

    Args:
        model: The plain module.
        loss: Called as `loss(output, targets)`; a mean over the batch, twice differentiable.
        inputs: This worker's part of the batch; all parts have the same size.
        targets: This worker's targets.
        parameters: Parameters that the Hessian is over; frozen ones are left out. At least one is not frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        inputs: Batch,
        targets: Batch,
        parameters: Sequence[Tensor],
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._gradients: Sequence[Tensor | None]
        everything = (model, loss, inputs, targets, self.parameters)
        # the fused kernels of attention have no second derivative
        with sdpa_kernel(SDPBackend.MATH), traceless_loss(*everything) as value:
            self._gradients = torch.autograd.grad(value, self.parameters, create_graph=True, allow_unused=True)

    @property
    def gradients(self) -> list[Tensor | None]:
        """This worker's gradient for each parameter; None if the loss does not depend on the parameter."""
        return [None if gradient is None else gradient.detach() for gradient in self._gradients]

    def product(self, vector: Tensor) -> Sequence[Tensor | None]:
        """Return this worker's own H·v for each parameter; None means zero.

        Args:
            vector: v, (n,) for n elements of all parameters that are not frozen.
        """
        parts = unflatten(vector, self.parameters)
        pairs = [(g, v) for g, v in zip(self._gradients, parts, strict=True) if g is not None and g.requires_grad]
        # the loss is linear in every parameter
        if not pairs:
            return [None] * len(self.parameters)
        gradients, vectors = zip(*pairs, strict=True)
        # checkpointed activations are recomputed with the kernels of the first pass
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(gradients, self.parameters, vectors, retain_graph=True, allow_unused=True)


def start_vector(parameters: Sequence[Tensor], seed: int = 0) -> Tensor:
    """Return a random direction, (n,), the same on every worker and kind of device."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(sum(p.numel() for p in parameters), generator=generator, dtype=torch.float64)
    device, dtype = flat_kind(parameters)
    return vector.to(device, dtype)


def measure_curvature(
    hessian: LocalHessian,
    *,
    start: Tensor | None = None,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
    group: dist.ProcessGroup | None = None,
) -> Curvature:
    """Measure the Hessian's eigenvalues and the gradient's norm for the mean loss over all workers. Collective.

    Args:
        hessian: This worker's products.
        start: (n,), not zero, the same on all workers; None: a random vector from a fixed seed.
        tolerance: Stop when the residual is at most this share of the eigenvalue's magnitude.
        max_iterations: Most products for each of the two eigenvalues.
        group: Process group of the average; the default group if None. Without torch.distributed nothing is exchanged.

    Returns:
        The same numbers on every worker. The residuals show whether the iteration converged.
    """
    parameters = hessian.parameters

    def product(vector: Tensor) -> Tensor:
        return flatten(average_over_workers(hessian.product(vector), parameters, group), parameters)

    with torch.no_grad():
        gradients = average_over_workers(hessian.gradients, parameters, group)
        present = [gradient for gradient in gradients if gradient is not None]
        norm = sum_of_squares(foreach_norms(present).values(), present[0].device).sqrt()
        first = start_vector(parameters) if start is None else start
        find = partial(power_iteration, start=first, tolerance=tolerance, max_iterations=max_iterations, group=group)
        dominant, direction = find(product)
        largest = dominant
        # H − λ·1 has no negative eigenvalue: its dominant one is its largest
        if dominant.value < 0:
            shifted, _ = find(lambda vector: product(vector) - dominant.value * vector)
            largest = shifted._replace(value=shifted.value + dominant.value)
    return Curvature(dominant, largest, float(norm), direction)


def power_iteration(
    product: Product,
    start: Tensor,
    *,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
    group: dist.ProcessGroup | None = None,
) -> tuple[Eigenvalue, Tensor]:
    """Return the eigenvalue of a symmetric operator that is largest in magnitude, and its unit eigenvector.

    If two eigenvalues have opposite signs and nearly the same magnitude, the iteration does not converge; the residual
    shows it.

    Args:
        product: Maps v to H·v, both (n,); the same on all workers.
        start: (n,), not zero and not orthogonal to the wanted eigenvector; a random vector will do.
        tolerance: Stop when the residual is at most this share of the eigenvalue's magnitude.
        max_iterations: Most products.
        group: Workers that must take the same number of steps.
    """
    vector = start / _norm(start)
    for iteration in range(1, max_iterations + 1):
        image = product(vector)
        value, residual, size = _numbers(vector, image, group)
        found = Eigenvalue(value, residual, iteration)
        if residual <= tolerance * abs(value) or not math.isfinite(value):
            break
        if iteration < max_iterations:
            vector = image / size
    return found, vector


def _norm(vector: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    return size.to(vector.dtype)


def _numbers(vector: Tensor, image: Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """Return vᵀHv, ‖Hv − (vᵀHv)·v‖ and ‖Hv‖, on which all workers agree.

    Different processors may round differently. A worker that therefore stopped earlier would leave the others waiting.
    """
    value = torch.sum(vector * image, dtype=torch.float64)
    rest = image - value.to(image.dtype) * vector
    numbers = torch.stack([value, *(torch.linalg.vector_norm(v, dtype=torch.float64) for v in (rest, image))])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return [float(number) for number in numbers.tolist()]
