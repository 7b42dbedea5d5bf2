"""Scale factors for gradients: estimated from two batches, kept, and applied without waiting for the device.

Source: Tula paper, Algorithm 1 (UpdateGradScale): s = min(|g_small / (g_large + ε)|, s_max) with
s_max = √(b_large / b_small). The floor s_min > 0 is what the paper's convergence lemma asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-8  # ε of Algorithm 1
PIECE_ELEMENTS = (
    2**24
)  # gated factors are made for so many elements at a time: bounds the extra memory (64 MiB in float32)

Granularity = Literal["element", "tensor"]


def default_s_max(small_batch: int, large_batch: int) -> float:
    """√(b_large / b_small), the square-root scaling rule."""
    return math.sqrt(large_batch / small_batch)


def element_ratio(small: Tensor, large: Tensor) -> Tensor:
    """|g_small / (g_large + ε)| element by element, at least in float32; 1 where that is not finite."""
    dtype = torch.promote_types(large.dtype, torch.float32)
    return _finite_or_one((small.to(dtype) / (large.to(dtype) + EPSILON)).abs())


def tensor_ratio(small: Tensor, large: Tensor) -> Tensor:
    """‖g_small‖ / (‖g_large‖ + ε), one 0-dim factor for the whole tensor; 1 where that is not finite."""
    dtype = torch.promote_types(large.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in (small, large)]
    return _finite_or_one(norms[0] / (norms[1] + EPSILON))


RATIOS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"element": element_ratio, "tensor": tensor_ratio}


def _finite_or_one(ratio: Tensor) -> Tensor:
    return ratio.nan_to_num_(nan=1.0, posinf=1.0)


class ScaleSummary(NamedTuple):
    """The factors over all elements of all parameters."""

    mean: float
    lowest: float
    highest: float


class GradScale:
    """The adaptive factors, `gradscale` of Algorithm 1. A parameter without a factor counts as 1.

    Args:
        granularity: One factor for each element, or one for each tensor.
        s_min: Lower bound of a factor.
        s_max: Upper bound of a factor.
    """

    def __init__(self, granularity: Granularity, s_min: float, s_max: float) -> None:
        self.granularity = granularity
        self.s_min, self.s_max = s_min, s_max
        self._factors: dict[Tensor, Tensor] = {}
        self._summaries: dict[int, ScaleSummary] = {}  # by number of parameters; kept until a factor changes

    def factor(self, parameter: Tensor) -> Tensor | None:
        """The parameter's factor, of its shape or 0-dim; None stands for 1."""
        return self._factors.get(parameter)

    def update(
        self, parameters: Sequence[Tensor], small: Sequence[Tensor | None], large: Sequence[Tensor | None]
    ) -> None:
        """New factors from gradients of two batches at the same weights; where either is None the old factor stays.

        Raises:
            ValueError: Lengths or shapes differ.
        """
        triples = [
            (p, s, g) for p, s, g in zip(parameters, small, large, strict=True) if s is not None and g is not None
        ]
        for parameter, *gradients in triples:
            if any(gradient.shape != parameter.shape for gradient in gradients):
                shapes = " and ".join(str(tuple(gradient.shape)) for gradient in gradients)
                raise ValueError(f"gradients of shapes {shapes} for a parameter of shape {tuple(parameter.shape)}")
        ratio = RATIOS[self.granularity]
        for p, small_gradient, large_gradient in triples:
            self._set(p, ratio(small_gradient.detach().to(p.device), large_gradient.detach().to(p.device)))

    def bound(self, s_min: float, s_max: float) -> None:
        """Set new bounds and clamp the factors to them."""
        self.s_min, self.s_max = s_min, s_max
        for parameter, factor in self._factors.items():
            self._set(parameter, factor)

    def load(self, parameters: Sequence[Tensor], factors: Sequence[Tensor | None]) -> None:
        """Replace all factors by copies, clamped to the bounds: the batch may have changed since they were saved."""
        self._factors, self._summaries = {}, {}
        for parameter, factor in zip(parameters, factors, strict=True):
            if factor is not None:
                self._set(parameter, factor.to(parameter.device))

    def summary(self, parameters: Sequence[Tensor]) -> ScaleSummary:
        """Mean, minimum and maximum over all elements. Waits for the device when factors have changed."""
        if len(parameters) not in self._summaries:
            self._summaries[len(parameters)] = _summarize([(p.numel(), self.factor(p)) for p in parameters])
        return self._summaries[len(parameters)]

    def _set(self, parameter: Tensor, factor: Tensor) -> None:
        # a new tensor each time, so that a state_dict taken before keeps its values
        self._factors[parameter] = factor.clamp(self.s_min, self.s_max)
        self._summaries = {}


class StaticScale:
    """One constant factor s for all parameters: U(s) of the paper's static scaling. It has no bounds.

    Args:
        scale: The factor, positive.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factor(self, parameter: Tensor) -> Tensor:
        """The constant as a 0-dim tensor on the parameter's device, made once."""
        key = (parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        if key not in self._factors:
            self._factors[key] = torch.full((), self.scale, device=key[0], dtype=key[1])
        return self._factors[key]

    def summary(self, parameters: Sequence[Tensor]) -> ScaleSummary:
        """The constant, three times."""
        return ScaleSummary(self.scale, self.scale, self.scale)


class _Pair(NamedTuple):
    gradient: Tensor
    factor: Tensor


def multiply_where(quiet: Tensor, gradients: Sequence[Tensor], factors: Sequence[Tensor | None]) -> None:
    """Multiply gradients in place by their factors where `quiet`, by 1 where not; None stands for the factor 1.

    The choice is made on the device. A fused s·q + (1 − q) would need fewer launches than `torch.where`, but
    `torch._foreach_add` reads a 0-dim tensor on the host.

    Args:
        quiet: 0-dim bool tensor.
        gradients: Dense gradients.
        factors: For each gradient a factor of its shape or 0-dim, on its device.
    """
    pairs = [_Pair(g, factor) for g, factor in zip(gradients, factors, strict=True) if factor is not None]
    for piece in _pieces(pairs):
        here = quiet.to(piece[0].factor.device)
        chosen = [torch.where(here, pair.factor, 1.0) for pair in piece]
        torch._foreach_mul_([pair.gradient for pair in piece], chosen)


def _pieces(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Lists of one device and type, each of about `PIECE_ELEMENTS` elements at most (or one larger tensor)."""
    open_pieces: dict[tuple[torch.device, torch.dtype, torch.dtype], list[_Pair]] = {}
    elements: dict[tuple[torch.device, torch.dtype, torch.dtype], int] = {}
    for pair in pairs:
        key = (pair.factor.device, pair.factor.dtype, pair.gradient.dtype)
        if key in open_pieces and elements[key] + pair.factor.numel() > PIECE_ELEMENTS:
            yield open_pieces.pop(key)
        piece = open_pieces.setdefault(key, [])
        elements[key] = pair.factor.numel() + (elements[key] if piece else 0)
        piece.append(pair)
    yield from open_pieces.values()


def _summarize(sized: Sequence[tuple[int, Tensor | None]]) -> ScaleSummary:
    present = [(size, factor.detach()) for size, factor in sized if factor is not None and size]
    ones = sum(size for size, factor in sized if factor is None)
    if not present:
        return ScaleSummary(1.0, 1.0, 1.0)
    device = present[0][1].device
    rows = [torch.stack([f.mean(), f.amin(), f.amax()]).to(device) for _, f in present]
    means, lows, highs = torch.stack(rows).T.tolist()  # the one transfer
    weights = [size for size, _ in present]
    total = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) + ones
    if ones:
        lows, highs = [*lows, 1.0], [*highs, 1.0]
    return ScaleSummary(total / (sum(weights) + ones), min(lows), max(highs))
