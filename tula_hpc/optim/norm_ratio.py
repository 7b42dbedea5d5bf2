"""Ratios of gradient norms at two batches by tensor, layer, or model, smoothed over updates.

With the squared norms ŝ at b_small and l̂ at b_large, summed over the tensors that share a factor,

    factor = (√ŝ / (√l̂ + ε))^exponent

Exponent 1 is the tensor reading of the Tula paper's Algorithm 1; 2 is the gain of AdaScale (T.
Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training") where both
norms are means.

With the spike guard l̂ is the larger of the average and this update's own squared norm, where every
step has norms of its own. An average does not yet reflect a gradient that has just become many
times as long, and networks without normalization layers do not recover from a step along it that is
lengthened as the ones before; with exponent 2 and an average of b_small's norms that has not
followed, such a step is shorter than the ones before. There is no guard for norms from a pass:
their fluctuation would shorten all steps until the next pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tula_hpc.gradients.noise_scale import square_at

# ε of Algorithm 1
EPSILON = 1e-8


def norm_ratio(
    small: Tensor, large: Tensor, exponent: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return (√small / (√large + ε))^exponent; 1 where it is not finite or both are 0.

    Both are squared norms of one shape; negative estimates count as 0. The division is in `dtype`.
    """
    norms = [square.clamp_min(0).sqrt().to(dtype) for square in (small, large)]
    ratio = norms[0] / (norms[1] + EPSILON)
    ratio = torch.where((norms[0] == 0) & (norms[1] == 0), 1.0, ratio).nan_to_num_(
        nan=1.0, posinf=1.0
    )
    # no infinity, which times 0 would be NaN
    return ratio if exponent == 1.0 else ratio.pow(exponent).nan_to_num_()


class _Units(NamedTuple):
    """Groups of parameters that share a factor."""

    # unit of each parameter; None: it keeps the factor 1
    of: list[int | None]
    # (units, most members): indices of each unit's parameters, padded with one beyond the last
    members: Tensor
    # of factors
    dtype: torch.dtype


class NormRatios:
    """Averages of squared norms by tensor, and their ratio by unit: tensors that share a factor.

    The averages are exponential, without the bias of starting at 0. A pair that is not finite, or
    NaN because there is no gradient, is passed over for its tensor. All ratios of a model come from
    a few operations on vectors.

    Args:
        granularity: "tensor": each is its own unit. "layer": those of `layers`. "model": one unit.
        exponent: Of the ratio.
        smoothing: Decay of the averages for each update, from 0 (the last pair alone) to below 1.
        layers: Parameters that share a factor; one that is in none is a unit of its own.
        exclude: Parameters of no unit.
        spike_guard: Compare a unit's average at b_small with this update's own norm at b_large
            where that is above its average, in updates that ask for it.

    Raises:
        ValueError: A parameter is in two layers, or there are none though they are asked for.
    """

    def __init__(
        self,
        granularity: str,
        exponent: float = 1.0,
        smoothing: float = 0.0,
        layers: Sequence[Sequence[Tensor]] | None = None,
        exclude: Collection[Tensor] = (),
        *,
        spike_guard: bool = False,
    ) -> None:
        self.spike_guard = spike_guard
        self.granularity = granularity
        self.exponent = exponent
        self.smoothing = smoothing
        self.layers = list(map(list, layers or ()))
        self.exclude = frozenset(exclude)
        if granularity == "layer":
            _check_layers(self.layers)
        # (3, n), float64: small, large, and the weight that both have so far
        self.averages: Tensor | None = None
        # by number of parameters
        self._units: dict[int, _Units] = {}
        # the last mask with absent parameters, and its copy on the device
        self._present: tuple[Sequence[bool], Tensor] | None = None

    def update(
        self,
        parameters: Sequence[Tensor],
        small: Tensor,
        large: Tensor,
        present: Sequence[bool] | None = None,
        *,
        guard: bool,
        stretch: float = 1.0,
    ) -> list[Tensor | None]:
        """Update with squared norms of both batches' gradients; return ratios. Never waits.

        Args:
            parameters: In the optimizer's order; later calls may have more of them at the end.
            small: (n,), float64, at b_small; may be an estimate below 0.
            large: (n,), float64, on the same device, at the same weights.
            present: Parameters that have a gradient now: the averages of others, as of frozen ones,
                are kept but count for no unit. None: all.
            guard: Let the spike guard act: these are the norms of the next step alone.
            stretch: The ratio is that of large + stretch·(small − large) to large: the squared norm
                at yet another batch, by the line in 1/batch. The averages stay at b_small.

        Returns:
            For each parameter the 0-dim ratio of its unit, the same object for all of them; None if
            excluded.
        """
        # the sum of infinities of either sign is not finite either
        known = (small + large).isfinite()
        self.averages = self._averaged(small, large, known)
        units = self._units_of(parameters, small.device)
        sums, weight = self.averages[:2], self.averages[2]
        means = torch.where((weight > 0) & self._counted(present, small.device), sums / weight, 0.0)
        if stretch != 1.0:
            # the difference is noisy; stretched below 0 it would leave no step
            more = (means[0] - means[1]).clamp_min(0.0)
            means = torch.stack([means[1] + stretch * more, means[1]])
        if guard and self.spike_guard:
            means = torch.stack([*means, torch.where(known, large, means[1])])
        per_unit = torch.nn.functional.pad(means, (0, 1))[:, units.members].sum(-1)
        ratios = norm_ratio(per_unit[0], per_unit[1:].amax(0), self.exponent, units.dtype).unbind()
        return [None if unit is None else ratios[unit] for unit in units.of]

    def carry(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Convert averages from batches (b_small, b_large) to others, by the line in 1/batch."""
        if self.averages is None or old == new or old[0] >= old[1]:
            return
        small, large, weight = self.averages
        moved = [square_at(small, large, *old, batch).clamp_min(0) for batch in new]
        self.averages = torch.stack([*moved, weight])

    def load(self, averages: Tensor | None, device: torch.device) -> None:
        """Replace the averages by a copy on `device`."""
        self.averages = None if averages is None else averages.to(device, copy=True)

    def _counted(self, present: Sequence[bool] | None, device: torch.device) -> Tensor | bool:
        """Return `present` on the device, copied to it only when it changes."""
        if present is None or all(present):
            return True
        if self._present is None or self._present[0] != present:
            self._present = list(present), torch.tensor(present, device=device)
        return self._present[1]

    def _averaged(self, small: Tensor, large: Tensor, known: Tensor) -> Tensor:
        new = torch.stack([small, large, torch.ones_like(small)])
        old = torch.zeros_like(new)
        if self.averages is not None:
            old[:, : self.averages.shape[1]] = self.averages
        return torch.where(known, self.smoothing * old + (1 - self.smoothing) * new, old)

    def _units_of(self, parameters: Sequence[Tensor], device: torch.device) -> _Units:
        """Return the units, built once for each number of parameters, which are only ever added."""
        count = len(parameters)
        if count not in self._units:
            places = {p: place for place, p in enumerate(parameters) if p not in self.exclude}
            units = self._places_of_units(places)
            of: dict[int, int] = {
                place: number for number, unit in enumerate(units) for place in unit
            }
            widest = max(map(len, units), default=0)
            filled = [[*unit, *[count] * (widest - len(unit))] for unit in units]
            # a copy to the device, which waits for it
            members = torch.tensor(filled, dtype=torch.int64, device=device).reshape(
                len(units), widest
            )
            self._units[count] = _Units(
                [of.get(place) for place in range(count)], members, _kind(parameters)
            )
        return self._units[count]

    def _places_of_units(self, places: Mapping[Tensor, int]) -> list[list[int]]:
        if self.granularity == "model":
            return [list(places.values())] if places else []
        layers = self.layers if self.granularity == "layer" else []
        shared = [[places[p] for p in layer if p in places] for layer in layers]
        taken = {place for unit in shared for place in unit}
        return [unit for unit in shared if unit] + [
            [place] for place in places.values() if place not in taken
        ]


def _kind(parameters: Sequence[Tensor]) -> torch.dtype:
    dtype = torch.float32
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def _check_layers(layers: Sequence[Sequence[Tensor]]) -> None:
    if not layers:
        raise ValueError('layers: granularity = "layer" needs the parameters of each layer')
    every = [parameter for layer in layers for parameter in layer]
    if len(set(every)) < len(every):
        raise ValueError("layers: a parameter is in two of them, or twice in one")
