"""How the adaptive factors are estimated: from gradients of two batches, or from norms of gradients that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tula_hpc.optim.checks import Batches, require
from tula_hpc.optim.gradscale import GradScale, check_shapes
from tula_hpc.optim.noise_scale import STEP_DECAY, NoiseScale, square_at
from tula_hpc.optim.norms import norms_where_present, squares, sum_of_squares


class _Small(NamedTuple):
    """Norms of small gradients that a step to come will use."""

    squares: Tensor  # (n,), float64
    batch: float
    large: Tensor | None  # (n,), float64; None: the step takes them itself


class Estimates:
    """Brings pairs of gradients or norms at the same weights into the factors and into the noise scale.

    Args:
        scale: The factors.
        batches: b_small and b_large.
    """

    def __init__(self, scale: GradScale, batches: Batches) -> None:
        self.scale, self.batches = scale, batches
        self.reference: float = batches.small  # what factors from norms refer to
        self.noise = NoiseScale()
        self._small: _Small | None = None

    def from_gradients(
        self, parameters: Sequence[Tensor], small: Sequence[Tensor | None], large: Sequence[Tensor | None]
    ) -> None:
        """UpdateGradScale of Algorithm 1.

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
            self.scale.update_norms(parameters, *both_squares, present, guard=False)  # many steps will use one pass
        both = [(s, g) for s, g in zip(*norms, strict=True) if s is not None and g is not None]
        if both:  # both norms are there anyway
            sums = [sum_of_squares([pair[which] for pair in both], both[0][1].device) for which in (0, 1)]
            self.noise.observe(sums[0], sums[1], *self.batches)

    def expect(self, parameters: Sequence[Tensor], small: Tensor, batch: float, large: Tensor | None) -> None:
        """Keep squared norms of small gradients for the next `learn`; see `TulaOptimizer.observe_small`.

        Raises:
            ValueError: Shapes or batch do not fit, or each element has its own factor.
        """
        norms_do = self.scale.granularity != "element"
        require(norms_do, 'observe_small: granularity = "element" needs gradients; see update_gradscale')
        fits = 0 < batch < self.batches.large
        require(fits, f"batch: expected above 0 and below large_batch = {self.batches.large}, got {batch}")
        for name, given in (("squares", small), ("large", large)):
            right = given is None or given.shape == (len(parameters),)
            require(right, f"{name}: expected one number for each of {len(parameters)} parameters")
        place = parameters[0].device
        large = None if large is None else large.detach().to(place, torch.float64)
        self._small = _Small(small.detach().to(place, torch.float64), batch, large)

    def forget(self) -> None:
        """Drop what `expect` was given."""
        self._small = None

    def learn(
        self,
        parameters: Sequence[Tensor],
        norms: Mapping[Tensor, Tensor],
        norm_squared: Tensor,
        shortened: Tensor | float = 1.0,
    ) -> bool:
        """Use what `expect` was given, if anything; says whether there was. Does not wait for the device.

        Args:
            parameters: In the optimizer's order.
            norms: Of the large gradient, 0-dim, by parameter.
            norm_squared: ‖G‖² over all of them.
            shortened: What both gradients were multiplied with where norms of the large one are these: the noise is
                that of the gradient before. 0-dim.
        """
        if self._small is None:
            return False
        (small, batch, large), self._small = self._small, None
        before = 1.0 if large is not None else 1.0 / shortened**2  # given by hand, both are as they were
        if large is None:
            large = squares([norms.get(parameter) for parameter in parameters], norm_squared.device)
        wanted = square_at(small, large, batch, self.batches.large, self.batches.small)
        present = [parameter in norms for parameter in parameters]
        self.scale.update_norms(parameters, wanted, large, present, guard=True, stretch=self._stretch())
        both = batch, self.batches.large
        self.noise.observe_parts(small, large, norm_squared, both, factor=before, decay=STEP_DECAY)
        return True

    def set_batches(self, batches: Batches, s_min: float, s_max: float) -> None:
        """Go on with other batches: factors are clamped, averages of squared norms are carried over."""
        self.scale.bound(s_min, s_max)
        self.scale.norms.carry(self.batches, batches)
        self.batches, self.reference = batches, batches.small

    def refer_to(self, reference: float, s_min: float, s_max: float) -> None:
        """Bring factors from norms to this batch from the next `learn` on; averages stay at b_small."""
        self.scale.s_min, self.scale.s_max = s_min, s_max  # the factors in force are those of the last estimate
        self.reference = reference

    def _stretch(self) -> float:
        """What the difference of the squared norms at b_small and b_large is at `reference` and b_large, relative."""
        small, large = self.batches
        if self.reference == small:
            return 1.0
        return (1.0 / self.reference - 1.0 / large) / (1.0 / small - 1.0 / large) if small < large else 1.0

    def state_dict(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Factors, averages, noise, and the batches that they refer to; not what `expect` was given."""
        return {
            "gradscale": [self.scale.factor(parameter) for parameter in parameters],
            "averages": self.scale.norms.averages,
            "noise": self.noise.state_dict(),
            "batches": list(self.batches),
            "reference": self.reference,
        }

    def check_state(self, parameters: Sequence[Tensor], state: Mapping[str, Any]) -> None:
        """Raise ValueError where a state belongs to other parameters.

        Parameters that were added since the last update are not in the averages yet.
        """
        factors, averages = state["gradscale"], state.get("averages")
        fits = len(factors) == len(parameters) and all(
            factor is None or factor.shape in (parameter.shape, torch.Size())
            for factor, parameter in zip(factors, parameters, strict=True)
        )
        require(fits, "state_dict: gradscale belongs to other parameters")
        fits = averages is None or averages.shape in [(3, count) for count in range(len(parameters) + 1)]
        require(fits, "state_dict: averages belong to other parameters")
        reference, (_, largest) = state.get("reference"), state.get("batches", self.batches)
        fits = reference is None or (isinstance(reference, int | float) and 1 <= reference <= largest)
        require(fits, f"state_dict: expected a reference from 1 to {largest}, got {reference!r}")

    def load_state_dict(self, parameters: Sequence[Tensor], state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, as copies. In older states some of it is absent."""
        place = parameters[0].device
        self.forget()
        self.scale.load(parameters, state["gradscale"])
        self.noise.load_state_dict(state.get("noise"), place)
        self.scale.norms.load(state.get("averages"), place)
        self.scale.norms.carry(Batches(*state.get("batches", self.batches)), self.batches)
