"""Ratios of gradient norms at two batches, by tensor or of the model, smoothed over updates.

With the squared norms ŝ at b_small and l̂ at b_large, of a tensor, or summed over all,

    factor = (√ŝ / (√l̂ + ε))^exponent

Exponent 1 is the tensor reading of the Tula paper's Algorithm 1; 2 is the gain of AdaScale (T.
Johnson et al. 2020, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training") where both
norms are means.

With the spike guard l̂ is the larger of the average and this update's own squared norm, if every
step has norms of its own. The average does not yet reflect a gradient that has just become many
times as long. If a step along it is lengthened like the steps before, networks without
normalization layers do not recover. With the guard, exponent 2 and an average of b_small's norms
that has not followed yet, such a step is shorter than the steps before it. Norms from a reference
pass have no guard: their fluctuation would shorten all steps until the next pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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


class NormRatios:
    """Averages of squared norms by tensor, and their ratios: for each tensor, or for all together.

    The averages are exponential, without the bias of starting at 0. A pair that is not finite, or
    NaN because there is no gradient, is passed over for its tensor. All ratios of a model come from
    a few operations on vectors.

    Args:
        granularity: "tensor": each tensor has its own ratio. "model": all tensors share one.
        exponent: Exponent of the ratio.
        smoothing: Decay of the averages for each update, from 0 (the last pair alone) to below 1.
        spike_guard: Compare the average at b_small with this update's own norm at b_large where
            that norm is above its average, in updates with `guard`.
    """

    def __init__(
        self, granularity: str, exponent: float, smoothing: float, *, spike_guard: bool
    ) -> None:
        self.spike_guard = spike_guard
        self.granularity = granularity
        self.exponent = exponent
        self.smoothing = smoothing
        # (3, n), float64: decayed sums at b_small and b_large, and the weight that both have so far
        self.averages: Tensor | None = None
        # the last `present` with absent parameters, and its copy on the device
        self._present: tuple[Sequence[bool], Tensor] | None = None

    def update(
        self,
        parameters: Sequence[Tensor],
        small: Tensor,
        large: Tensor,
        present: Sequence[bool],
        *,
        guard: bool,
        stretch: float,
    ) -> list[Tensor]:
        """Update with squared norms of both batches' gradients; return ratios. Never waits.

        Args:
            parameters: In the optimizer's order; later calls may have more of them at the end.
            small: (n,), float64, at b_small; may be an estimate below 0.
            large: (n,), float64, on the same device, at the same weights.
            present: Parameters that have a gradient now: the averages of others, as of frozen ones,
                are kept but do not count.
            guard: Let the spike guard act, as these are the norms of the next step alone.
            stretch: The ratio is that of large + stretch·(small − large) to large: the squared norm
                at yet another batch, by the line in 1/batch. The averages stay at b_small.

        Returns:
            For each parameter its 0-dim ratio, the same object where they share it.
        """
        # the sum of infinities of either sign is not finite either
        known = (small + large).isfinite()
        self.averages = self._averaged(small, large, known)
        sums, weight = self.averages[:2], self.averages[2]
        means = torch.where((weight > 0) & self._counted(present, small.device), sums / weight, 0.0)
        if stretch != 1.0:
            # the difference is noisy; stretched below 0 it would leave no step
            more = (means[0] - means[1]).clamp_min(0.0)
            means = torch.stack([means[1] + stretch * more, means[1]])
        if guard and self.spike_guard:
            means = torch.stack([*means, torch.where(known, large, means[1])])
        if self.granularity == "model":
            means = means.sum(-1, keepdim=True)
        # over the few types, not over all parameters
        types = {parameter.dtype for parameter in parameters}
        dtype = functools.reduce(torch.promote_types, types, torch.float32)
        ratios = norm_ratio(means[0], means[1:].amax(0), self.exponent, dtype).unbind()
        return list(ratios) * (len(parameters) // len(ratios))

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

    def _counted(self, present: Sequence[bool], device: torch.device) -> Tensor | bool:
        """Return `present` on the device, copied to it only when it changes."""
        if all(present):
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
