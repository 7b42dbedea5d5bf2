"""Scale factors for gradients: estimated from two batches and kept.

Source: Tula paper, Algorithm 1 (UpdateGradScale): s = min(|g_small / (g_large + ε)|, s_max) with
s_max = √(b_large / b_small). The floor s_min > 0 is what the paper's convergence lemma asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tula_hpc.optim.norm_ratio import EPSILON, NormRatios, norm_ratio

Granularity = Literal["element", "tensor", "layer", "model"]


def default_s_max(small_batch: float, large_batch: int, exponent: float = 1.0) -> float:
    """√(b_large / b_small), the square-root scaling rule, to the power of `exponent`: 2 gives the linear rule."""
    return float(math.sqrt(large_batch / small_batch) ** exponent)


def element_ratio(small: Tensor, large: Tensor, exponent: float = 1.0) -> Tensor:
    """|g_small / (g_large + ε)|^exponent element by element, at least in float32; 1 where any of them is not finite."""
    dtype = torch.promote_types(large.dtype, torch.float32)
    ratio = (small.to(dtype) / (large.to(dtype) + EPSILON)).abs().nan_to_num_(nan=1.0, posinf=1.0)
    ratio = torch.where(large.isinf(), 1.0, ratio)  # or an overflow would leave 0, and the element still until the next
    return ratio if exponent == 1.0 else ratio.pow_(exponent).nan_to_num_()  # finite, however large


def tensor_ratio(small: Tensor, large: Tensor, exponent: float = 1.0) -> Tensor:
    """(‖g_small‖ / (‖g_large‖ + ε))^exponent, one 0-dim factor for the whole tensor; see `norm_ratio`."""
    dtype = torch.promote_types(large.dtype, torch.float32)
    squares = [torch.linalg.vector_norm(g, dtype=dtype).double().square() for g in (small, large)]
    return norm_ratio(squares[0], squares[1], exponent, dtype)


class ScaleSummary(NamedTuple):
    """The factors over all elements of all parameters."""

    mean: float
    lowest: float
    highest: float


class GradScale:
    """The adaptive factors, `gradscale` of Algorithm 1. A parameter without a factor counts as 1.

    Args:
        granularity: What shares a factor: an element, a tensor, a layer or the whole model.
        s_min: Lower bound of a factor.
        s_max: Upper bound of a factor.
        exponent: Of the ratio.
        smoothing: Decay, for each update, of the averages of squared norms; at "element", of the factor itself, where
            more would take more memory.
        layers: See `NormRatios`.
        exclude: Parameters that never have a factor.
        spike_guard: See `NormRatios`; not at "element".
    """

    def __init__(
        self,
        granularity: Granularity,
        s_min: float,
        s_max: float,
        *,
        exponent: float = 1.0,
        smoothing: float = 0.0,
        layers: Sequence[Sequence[Tensor]] | None = None,
        exclude: Collection[Tensor] = (),
        spike_guard: bool = False,
    ) -> None:
        self.granularity, self.exponent, self.smoothing = granularity, exponent, smoothing
        self.exclude = frozenset(exclude)
        self.s_min, self.s_max = s_min, s_max
        self.norms = NormRatios(granularity, exponent, smoothing, layers, self.exclude, spike_guard=spike_guard)
        self._factors: dict[Tensor, Tensor] = {}
        self._summaries: dict[int, ScaleSummary] = {}  # by number of parameters; kept until a factor changes

    def factor(self, parameter: Tensor) -> Tensor | None:
        """The parameter's factor, of its shape or 0-dim; None stands for 1."""
        return self._factors.get(parameter)

    def update_elements(
        self, parameters: Sequence[Tensor], small: Sequence[Tensor | None], large: Sequence[Tensor | None]
    ) -> None:
        """New factors from gradients of two batches at the same weights; where either is None the old factor stays."""
        for p, s, g in zip(parameters, small, large, strict=True):
            if s is not None and g is not None and p not in self.exclude:
                ratio = element_ratio(s.detach().to(p.device), g.detach().to(p.device), self.exponent)
                self._set(p, self._smoothed(p, ratio))

    def update_norms(
        self,
        parameters: Sequence[Tensor],
        small: Tensor,
        large: Tensor,
        present: Sequence[bool],
        *,
        guard: bool,
        stretch: float = 1.0,
    ) -> None:
        """New factors from squared norms, as `NormRatios.update` takes them; where not `present` the old one stays."""
        ratios = self.norms.update(parameters, small, large, present, guard=guard, stretch=stretch)
        shared = {id(ratio): ratio for ratio in ratios if ratio is not None}
        if not shared:
            return
        bounded = torch.stack(list(shared.values())).clamp_(self.s_min, self.s_max).unbind()
        factors = dict(zip(shared, bounded, strict=True))
        for parameter, ratio, here in zip(parameters, ratios, present, strict=True):
            if ratio is not None and here:
                self._factors[parameter] = factors[id(ratio)].to(parameter.device)
        self._summaries = {}

    def bound(self, s_min: float, s_max: float) -> None:
        """Set new bounds and clamp the factors to them."""
        self.s_min, self.s_max = s_min, s_max
        for parameter, factor in self._factors.items():
            self._set(parameter, factor)

    def load(self, parameters: Sequence[Tensor], factors: Sequence[Tensor | None]) -> None:
        """Replace all factors by copies, clamped to the bounds: the batch may have changed since they were saved."""
        self._factors, self._summaries = {}, {}
        for parameter, factor in zip(parameters, factors, strict=True):
            if factor is not None and parameter not in self.exclude:
                self._set(parameter, factor.to(parameter.device))

    def summary(self, parameters: Sequence[Tensor]) -> ScaleSummary:
        """Mean, minimum and maximum over all elements. Waits for the device when factors have changed."""
        if len(parameters) not in self._summaries:
            self._summaries[len(parameters)] = _summarize([(p.numel(), self.factor(p)) for p in parameters])
        return self._summaries[len(parameters)]

    def _smoothed(self, parameter: Tensor, ratio: Tensor) -> Tensor:
        old = self._factors.get(parameter)
        if self.smoothing == 0 or old is None:
            return ratio
        bounded = ratio.clamp_(self.s_min, self.s_max)  # or one tiny g_large would outweigh many updates
        return torch.lerp(old.to(ratio.dtype).expand_as(ratio), bounded, 1 - self.smoothing)

    def _set(self, parameter: Tensor, factor: Tensor) -> None:
        # a new tensor each time, so that a state_dict taken before keeps its values
        self._factors[parameter] = factor.clamp(self.s_min, self.s_max)
        self._summaries = {}


class StaticScale:
    """One constant factor s for all parameters: U(s) of the paper's static scaling. It has no bounds.

    Args:
        scale: The factor, positive.
        exclude: Parameters that never have a factor.
    """

    def __init__(self, scale: float, exclude: Collection[Tensor] = ()) -> None:
        self.scale, self.exclude = scale, frozenset(exclude)
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factor(self, parameter: Tensor) -> Tensor | None:
        """The constant as a 0-dim tensor on the parameter's device, made once; None stands for 1."""
        if parameter in self.exclude:
            return None
        key = (parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        if key not in self._factors:
            self._factors[key] = torch.full((), self.scale, device=key[0], dtype=key[1])
        return self._factors[key]

    def summary(self, parameters: Sequence[Tensor]) -> ScaleSummary:
        """Of the constant and of the ones that excluded parameters have."""
        sizes = {kept: sum(p.numel() for p in parameters if (p in self.exclude) == kept) for kept in (True, False)}
        values = [value for value, kept in ((1.0, True), (self.scale, False)) if sizes[kept]] or [self.scale]
        share = sizes[False] / max(1, sizes[True] + sizes[False])
        mean = values[0] if len(values) == 1 else 1 + share * (self.scale - 1)
        return ScaleSummary(mean, min(values), max(values))


def check_shapes(parameters: Sequence[Tensor], small: Sequence[Tensor | None], large: Sequence[Tensor | None]) -> None:
    """Raise ValueError unless there is a gradient of the parameter's shape, or None, for each parameter."""
    for name, gradients in (("small_grads", small), ("large_grads", large)):
        if len(gradients) != len(parameters):
            expected = f"one entry for each of {len(parameters)} parameters"
            raise ValueError(f"{name}: expected {expected}, got {len(gradients)}")
    for parameter, *pair in zip(parameters, small, large, strict=True):
        both = [gradient for gradient in pair if gradient is not None]
        if len(both) == 2 and any(gradient.shape != parameter.shape for gradient in both):
            shapes = " and ".join(str(tuple(gradient.shape)) for gradient in both)
            raise ValueError(f"gradients of shapes {shapes} for a parameter of shape {tuple(parameter.shape)}")


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
