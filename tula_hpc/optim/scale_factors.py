"""Scale factors for gradients: estimated from two batches and kept.

Source: Tula paper, Algorithm 1 (UpdateGradScale): s = min(|g_small / (g_large + ε)|, s_max) with
s_max = √(b_large / b_small). The paper's convergence lemma needs the floor s_min > 0.

Adaptive factors are estimated from gradients of two batches, or from norms of gradients. The whole
law, by which AGS multiplies a gradient or an update in each step, and the file of each part:

    factor  = 1 + w·(s − 1)                           scaled_step.py, TulaOptimizer
    s       = clamp(ratio, s_min, s_max)              GradScale, here
    s_max   = (b_large / b_small)^(exponent / 2)      default_s_max, here
    ratio   = (√ŝ / (√l̂ + ε))^exponent                norm_ratio.py; by element: element_ratio, here
    ŝ, l̂    = averages of ‖g_small‖², ‖g_large‖²      NormRatios in norm_ratio.py: of a tensor, or
              with decay `smoothing`                  summed over the model; spike guard
    ŝ'      = l̂ + stretch·max(ŝ − l̂, 0)               NormRatios, too; at another batch b_ref than
    stretch = (1/b_ref − 1/b_large)                   b_small, as `small_batch_shrink` asks for:
              / (1/b_small − 1/b_large)               Estimates, here; ddp/methods.py
    w       = gate(Δ(G))·min(1, steps/scale_warmup)   Sensitivity in gate.py; _warm_share in
                                                      optimizer.py

‖g_small‖² comes from the workers' own gradients or micro-batches (`gradients/small_batch_norms.py`,
brought to b_small by `square_at` in `gradients/noise_scale.py`), or from a pass over b_small
samples (`gradients/reference_gradient.py`). Which batch, exponent and so on a method or preset has
is defined in `config/training.py` (AgsOptions) and by `scaling_options` in `ddp/methods.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tula_hpc.gradients.noise_scale import NoiseScale, square_at
from tula_hpc.gradients.norms import norms_where_present, squares, sum_of_squares
from tula_hpc.optim.norm_ratio import EPSILON, NormRatios

Granularity = Literal["element", "tensor", "model"]


def default_s_max(small_batch: float, large_batch: int, exponent: float) -> float:
    """Return √(b_large / b_small)^exponent: the square-root scaling rule, or with 2 the linear."""
    return float(math.sqrt(large_batch / small_batch) ** exponent)


def element_ratio(small: Tensor, large: Tensor, exponent: float = 1.0) -> Tensor:
    """Return |g_small / (g_large + ε)|^exponent by element; 1 where either is not finite."""
    dtype = torch.promote_types(large.dtype, torch.float32)
    ratio = (small.to(dtype) / (large.to(dtype) + EPSILON)).abs().nan_to_num_(nan=1.0, posinf=1.0)
    # else an overflow would make the factor 0 and freeze the element until the next update
    ratio = torch.where(large.isinf(), 1.0, ratio)
    # nan_to_num: the power stays finite, however large
    return ratio if exponent == 1.0 else ratio.pow_(exponent).nan_to_num_()


class GradScale:
    """Adaptive factors, `gradscale` of Algorithm 1. A parameter without a factor counts as 1.

    Factors are from `s_min` to `s_max`. `smoothing` is the decay, for each update, of the averages
    of squared norms; at "element", of the factor itself, as averages would take more memory. For
    the other arguments see `NormRatios`; at "element" each element has a factor of its own, and
    there is no spike guard.
    """

    def __init__(
        self,
        granularity: Granularity,
        s_min: float,
        s_max: float,
        *,
        exponent: float,
        smoothing: float,
        spike_guard: bool,
    ) -> None:
        self.granularity, self.exponent, self.smoothing = granularity, exponent, smoothing
        self.s_min, self.s_max = s_min, s_max
        self.norms = NormRatios(granularity, exponent, smoothing, spike_guard=spike_guard)
        self._factors: dict[Tensor, Tensor] = {}

    def factor(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's factor, of its shape or 0-dim; None stands for 1."""
        return self._factors.get(parameter)

    def update_elements(
        self,
        parameters: Sequence[Tensor],
        small: Sequence[Tensor | None],
        large: Sequence[Tensor | None],
    ) -> None:
        """Set factors from gradients of two batches at the same weights, where there are both."""
        for p, s, g in zip(parameters, small, large, strict=True):
            if s is not None and g is not None:
                ratio = element_ratio(
                    s.detach().to(p.device), g.detach().to(p.device), self.exponent
                )
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
        """Set the factors of `present` parameters from squared norms; see `NormRatios.update`."""
        ratios = self.norms.update(parameters, small, large, present, guard=guard, stretch=stretch)
        shared = {id(ratio): ratio for ratio in ratios}
        bounded = torch.stack(list(shared.values())).clamp_(self.s_min, self.s_max).unbind()
        factors = dict(zip(shared, bounded, strict=True))
        for parameter, ratio, here in zip(parameters, ratios, present, strict=True):
            if here:
                self._factors[parameter] = factors[id(ratio)].to(parameter.device)

    def bound(self, s_min: float, s_max: float) -> None:
        """Set new bounds and clamp the factors to them."""
        self.s_min, self.s_max = s_min, s_max
        for parameter, factor in self._factors.items():
            self._set(parameter, factor)

    def load(self, parameters: Sequence[Tensor], factors: Sequence[Tensor | None]) -> None:
        """Replace all factors by copies, clamped to the bounds, as the batch may have changed."""
        self._factors = {}
        for parameter, factor in zip(parameters, factors, strict=True):
            if factor is not None:
                self._set(parameter, factor.to(parameter.device))

    def summary(self, parameters: Sequence[Tensor]) -> tuple[float, float, float]:
        """Return mean, least and largest factor over all elements. Waits for the device."""
        factors = [(parameter.numel(), self.factor(parameter)) for parameter in parameters]
        present = [(size, each.detach()) for size, each in factors if each is not None and size]
        ones = sum(size for size, each in factors if each is None)
        if not present:
            return 1.0, 1.0, 1.0
        device = present[0][1].device
        rows = [torch.stack([f.mean(), f.amin(), f.amax()]).to(device) for _, f in present]
        # the only transfer from the device
        means, lows, highs = torch.stack(rows).T.tolist()
        weights = [size for size, _ in present]
        total = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) + ones
        if ones:
            lows = [*lows, 1.0]
            highs = [*highs, 1.0]
        return total / (sum(weights) + ones), min(lows), max(highs)

    def _smoothed(self, parameter: Tensor, ratio: Tensor) -> Tensor:
        old = self._factors.get(parameter)
        if self.smoothing == 0 or old is None:
            return ratio
        # unbounded, one tiny g_large would outweigh many updates
        bounded = ratio.clamp_(self.s_min, self.s_max)
        return torch.lerp(old.to(ratio.dtype).expand_as(ratio), bounded, 1 - self.smoothing)

    def _set(self, parameter: Tensor, factor: Tensor) -> None:
        # a new tensor each time, so that a state_dict taken before keeps its values
        self._factors[parameter] = factor.clamp(self.s_min, self.s_max)


class StaticScale:
    """Constant factor s for all parameters: U(s) of the paper's static scaling, without bounds."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factor(self, parameter: Tensor) -> Tensor:
        """Return the constant as a 0-dim tensor on the parameter's device."""
        key = (parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        if key not in self._factors:
            self._factors[key] = torch.full((), self.scale, device=key[0], dtype=key[1])
        return self._factors[key]

    def summary(self, parameters: Sequence[Tensor]) -> tuple[float, float, float]:
        """Return mean, least and largest factor."""
        return self.scale, self.scale, self.scale


def check_shapes(
    parameters: Sequence[Tensor], small: Sequence[Tensor | None], large: Sequence[Tensor | None]
) -> None:
    """Raise ValueError unless each parameter has a gradient of its shape, or None."""
    for name, gradients in (("small_grads", small), ("large_grads", large)):
        if len(gradients) != len(parameters):
            expected = f"one entry for each of {len(parameters)} parameters"
            raise ValueError(f"{name}: expected {expected}, got {len(gradients)}")
    for parameter, *pair in zip(parameters, small, large, strict=True):
        both = [gradient for gradient in pair if gradient is not None]
        if len(both) == 2 and any(gradient.shape != parameter.shape for gradient in both):
            shapes = " and ".join(str(tuple(gradient.shape)) for gradient in both)
            raise ValueError(
                f"gradients of shapes {shapes} for a parameter of shape {tuple(parameter.shape)}"
            )


class Batches(NamedTuple):
    """Pair of global batches, in samples."""

    # b_small, the reference
    small: int
    # b_large, the training's batch
    large: int


def require(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def require_one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError with all choices unless the value is among them."""
    require(value in choices, f"{name}: expected one of {', '.join(choices)}; got {value!r}")


def checked_bounds(
    batches: tuple[float, int], s_min: float, s_max: float | None, exponent: float
) -> tuple[float, float]:
    """Return (s_min, s_max) with the default of s_max filled in, which is not below s_min.

    Raises:
        ValueError: The batches or bounds do not fit together.
    """
    small, large = batches
    require(
        1 <= small <= large,
        f"small_batch: expected 1 <= small_batch <= large_batch, got {small} and {large}",
    )
    # batches change within a training: a default that follows them must not fall below s_min
    if s_max is None:
        s_max = max(default_s_max(small, large, exponent), s_min)
    fits = 0 <= s_min <= s_max and s_max > 0 and s_min < math.inf
    require(fits, f"s_min: expected 0 <= s_min <= s_max, got {s_min} and {s_max}")
    return s_min, s_max


def check_numbers(
    *,
    delta: float,
    static_scale: float | None,
    update_interval: int | None,
    exponent: float,
    smoothing: float,
    scale_warmup: int,
) -> None:
    """Raise ValueError where one of TulaOptimizer's numbers is out of range."""
    require(delta > 0, f"delta: expected a number above 0, got {delta}")
    interval_fits = update_interval is None or update_interval >= 1
    require(interval_fits, f"update_interval: expected at least 1 step, got {update_interval}")
    scale_fits = static_scale is None or 0 < static_scale < math.inf
    require(scale_fits, f"static_scale: expected a finite number above 0, got {static_scale}")
    require(0 < exponent < math.inf, f"exponent: expected a finite number above 0, got {exponent}")
    require(0 <= smoothing < 1, f"smoothing: expected from 0 to below 1, got {smoothing}")
    require(scale_warmup >= 0, f"scale_warmup: expected a number of steps, got {scale_warmup}")


class Estimates:
    """Estimation of the factors and of the noise scale from pairs of gradients or norms."""

    def __init__(self, scale: GradScale, batches: Batches) -> None:
        self.scale, self.batches = scale, batches
        # batch that factors from norms refer to, in samples
        self.reference: float = batches.small
        self.noise = NoiseScale()
        # for the next step: squared norms of small gradients, (n,) in float64, their batch, and
        # those of the large gradient; None: the step computes the latter
        self._small: tuple[Tensor, float, Tensor | None] | None = None

    def from_gradients(
        self,
        parameters: Sequence[Tensor],
        small: Sequence[Tensor | None],
        large: Sequence[Tensor | None],
    ) -> None:
        """Estimate the factors by UpdateGradScale of Algorithm 1.

        Raises:
            ValueError: The numbers of gradients or their shapes do not fit the parameters.
        """
        check_shapes(parameters, small, large)
        norms = [norms_where_present(gradients) for gradients in (small, large)]
        present = [s is not None and g is not None for s, g in zip(*norms, strict=True)]
        if self.scale.granularity == "element":
            self.scale.update_elements(parameters, small, large)
        else:
            place = parameters[0].device
            both_squares = squares(norms[0], place), squares(norms[1], place)
            # no spike guard: many steps will use the norms of one pass
            self.scale.update_norms(parameters, *both_squares, present, guard=False)
        both = [(s, g) for s, g in zip(*norms, strict=True) if s is not None and g is not None]
        # the noise scale comes for free, as both norms are known
        if both:
            device = both[0][1].device
            sums = [sum_of_squares(column, device) for column in zip(*both, strict=True)]
            self.noise.observe(sums[0], sums[1], *self.batches)

    def expect(
        self, parameters: Sequence[Tensor], small: Tensor, batch: float, large: Tensor | None
    ) -> None:
        """Keep norms of small gradients for the next `learn`; see `TulaOptimizer.observe_small`.

        Raises:
            ValueError: Shapes or batch do not fit, or each element has its own factor.
        """
        norms_do = self.scale.granularity != "element"
        require(
            norms_do, 'observe_small: granularity = "element" needs gradients; see update_gradscale'
        )
        fits = 0 < batch < self.batches.large
        require(
            fits,
            f"batch: expected above 0 and below large_batch = {self.batches.large}, got {batch}",
        )
        for name, given in (("squares", small), ("large", large)):
            right = given is None or given.shape == (len(parameters),)
            require(right, f"{name}: expected one number for each of {len(parameters)} parameters")
        place = parameters[0].device
        large = None if large is None else large.detach().to(place, torch.float64)
        self._small = (small.detach().to(place, torch.float64), batch, large)

    def forget(self) -> None:
        """Drop the norms of `expect`."""
        self._small = None

    def learn(
        self,
        parameters: Sequence[Tensor],
        norms: Mapping[Tensor, Tensor],
        norm_squared: Tensor,
        shortened: Tensor | float,
    ) -> bool:
        """Use the norms of `expect`; return False if there are none. Does not wait for the device.

        Args:
            parameters: In the optimizer's order.
            norms: Norms of the large gradient, 0-dim, by parameter.
            norm_squared: ‖G‖² over all of them.
            shortened: Factor by which clipping shortened both gradients, 0-dim, to be undone in the
                noise scale; not used if `expect` got the large gradient's norms before clipping.
        """
        if self._small is None:
            return False
        (small, batch, large), self._small = self._small, None
        # norms that the caller has given are those before clipping
        before = 1.0 if large is not None else 1.0 / shortened**2
        if large is None:
            large = squares([norms.get(parameter) for parameter in parameters], norm_squared.device)
        wanted = square_at(small, large, batch, self.batches.large, self.batches.small)
        present = [parameter in norms for parameter in parameters]
        self.scale.update_norms(
            parameters, wanted, large, present, guard=True, stretch=self._stretch()
        )
        both = batch, self.batches.large
        self.noise.observe_parts(small, large, norm_squared, both, factor=before)
        return True

    def set_batches(self, batches: Batches, s_min: float, s_max: float) -> None:
        """Change the batches: clamp the factors, carry the averages of squared norms over."""
        self.scale.bound(s_min, s_max)
        self.scale.norms.carry(self.batches, batches)
        self.batches, self.reference = batches, batches.small

    def refer_to(self, reference: float, s_min: float, s_max: float) -> None:
        """Let factors from norms refer to the batch `reference` from the next `learn` on."""
        # the present factors are not clamped: they belong to the last estimate
        self.scale.s_min, self.scale.s_max = s_min, s_max
        self.reference = reference

    def _stretch(self) -> float:
        """Return the squared norm's excess over b_large's at `reference`, relative to b_small's."""
        small, large = self.batches
        if self.reference == small or small >= large:
            return 1.0
        return (1.0 / self.reference - 1.0 / large) / (1.0 / small - 1.0 / large)

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Return factors, averages, noise, and their batches; not the norms of `expect`."""
        return {
            "gradscale": list(map(self.scale.factor, parameters)),
            "averages": self.scale.norms.averages,
            "noise": self.noise.state_dict(),
            "batches": list(self.batches),
            "reference": self.reference,
        }

    def check_state(self, parameters: Sequence[Tensor], state: Mapping[str, Any]) -> None:
        """Raise ValueError where a state belongs to other parameters.

        Parameters that were added since the last update are not in the averages yet.
        """
        factors = state["gradscale"]
        averages = state["averages"]
        fits = len(factors) == len(parameters) and all(
            factor is None or factor.shape in (parameter.shape, torch.Size())
            for factor, parameter in zip(factors, parameters, strict=True)
        )
        require(fits, "state_dict: gradscale belongs to other parameters")
        fits = averages is None or averages.shape in [
            (3, count) for count in range(len(parameters) + 1)
        ]
        require(fits, "state_dict: averages belong to other parameters")
        reference = state["reference"]
        _, largest = state["batches"]
        fits = isinstance(reference, int | float) and 1 <= reference <= largest
        require(fits, f"state_dict: expected a reference from 1 to {largest}, got {reference!r}")

    def load_state_dict(self, parameters: Sequence[Tensor], state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` as copies."""
        place = parameters[0].device
        self.forget()
        self.scale.load(parameters, state["gradscale"])
        self.noise.load_state_dict(state["noise"], place)
        self.scale.norms.load(state["averages"], place)
        self.scale.norms.carry(Batches(*state["batches"]), self.batches)
