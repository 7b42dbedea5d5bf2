"""Δ(G), norm and noise of gradients that nothing scales: what `TulaOptimizer` tells of those that it scales.

A histogram of the scale that was really applied, each element of a gradient counted once a step.

Bins are evenly spaced in log2: the middle one is centred on 1, and so are others on every power of
√2, where factors are clamped. The first and the last bin hold all that lies beyond (0 as well).
Everything stays on the device until it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.gradients.noise_scale import STEP_DECAY, NoiseReading, NoiseScale
from tula_hpc.gradients.norms import norms_where_present, squared, squares
from tula_hpc.optim.gate import Sensitivity


class Seen(NamedTuple):
    """What `GradientObserver.statistics` returns."""

    # Δ(G) of the last step; NaN before the second step, inf or NaN where the norm is not finite
    sensitivity: float
    # ‖G‖ of the last step; NaN before the first step
    gradient_norm: float


class GradientObserver:
    """Looks at the gradients right before each step of an optimizer; changes nothing.

    It never waits for the device, but for a fused optimizer under GradScaler, which leaves it to
    that to skip steps. A step that is skipped is not seen, nor is any while `idle`. Gradients that
    are sparse or complex, and those beside them, are not looked at.

    Args:
        optimizer: Whose steps are waited for; its `step` must call torch's hooks.
        large_batch: Samples, over all workers, of which a gradient is the mean.
    """

    def __init__(self, optimizer: Optimizer, large_batch: int) -> None:
        self.large_batch = large_batch
        self._optimizer = optimizer
        self._sensitivity = Sensitivity(math.inf, "none")
        self._noise = NoiseScale()
        self._small: tuple[Tensor, float] | None = None
        self._squares: Tensor | None = None
        self._shortened: Tensor | float = 1.0
        # set it while gradients are not of `large_batch` samples
        self.idle = False
        optimizer.register_step_pre_hook(lambda *_: self._look())

    def observe_small(self, small: Tensor, batch: float) -> None:
        """Say what the squared norms of small gradients at the next step's weights are; see `TulaOptimizer`.

        Args:
            small: (n,) in parameter order, NaN where there is none.
            batch: Samples of which such a gradient is the mean, below `large_batch`.
        """
        self._small = small, batch

    def observe_norms(self, large: Tensor) -> None:
        """Say what the squared norms of the next step's gradients are, (n,) in parameter order: else they are taken."""
        self._squares = large

    def observe_clipping(self, factor: Tensor | float) -> None:
        """Say what the next step's gradients, and all norms that were told, were multiplied with."""
        self._shortened = factor

    def forget(self) -> None:
        """Drop what was told of a step that did not come."""
        self._small, self._squares, self._shortened = None, None, 1.0

    def statistics(self) -> Seen:
        """Numbers for the log. Waits for the device, so call it now and then only."""
        sensitivity, norm, *_ = self._sensitivity.read()
        return Seen(sensitivity, norm)

    def noise(self) -> NoiseReading:
        """The gradient's noise scale. Starts the means of recent pairs anew. Waits for the device."""
        return self._noise.read()

    def state_dict(self) -> dict[str, Any]:
        """Tensors only."""
        return {"sensitivity": self._sensitivity.state_dict(), "noise": self._noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` gave, as copies; None, as from a training that was not observed: begin anew."""
        self.forget()
        state = state or {}
        device = self._parameters[0].device
        self._sensitivity.load_state_dict(state.get("sensitivity"), device)
        self._noise.load_state_dict(state.get("noise"), device)

    @property
    def _parameters(self) -> list[Tensor]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    @torch.no_grad()
    def _look(self) -> None:
        """The hook: `.grad` of all parameters, and what was told of this step, which is then forgotten."""
        small, told, shortened = self._small, self._squares, self._shortened
        self.forget()
        gradients = [parameter.grad for parameter in self._parameters]
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if (
            self.idle
            or not present
            or any(map(_is_sparse_or_complex, gradients))
            or self._is_skipped()
        ):
            return
        large = self._taken(gradients) if told is None else told
        squares_seen = large.unbind()
        total = torch.stack([squares_seen[place] for place in present]).sum()
        self._sensitivity.observe(total / shortened**2)
        if small is not None:
            batches = small[1], self.large_batch
            self._noise.observe_parts(
                small[0], large, total, batches, factor=1.0 / shortened**2, decay=STEP_DECAY
            )

    def _taken(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Squared norms of the gradients, which a fused optimizer divides by the loss scale itself."""
        taken = squares(norms_where_present(gradients), self._parameters[0].device)
        loss_scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        return taken if loss_scale is None else taken / squared(loss_scale)

    def _is_skipped(self) -> bool:
        """Whether a fused optimizer will leave this step out, for an overflow that GradScaler has found."""
        overflow: Tensor | None = getattr(self._optimizer, "found_inf", None)
        return overflow is not None and bool(overflow)


def _is_sparse_or_complex(gradient: Tensor | None) -> bool:
    return gradient is not None and (gradient.layout is not torch.strided or gradient.is_complex())


BINS_PER_OCTAVE = 6
# on each side of 1
OCTAVES = 6
# the bin of factor 1; before it one for all factors that are too small
ONE = OCTAVES * BINS_PER_OCTAVE + 1
BINS = 2 * ONE + 1
# counted at a time: bounds the extra memory, and float32 counts so far exactly
PIECE_ELEMENTS = 2**22


class ScaleHistogram:
    """Counts applied factors over elements and steps."""

    def __init__(self) -> None:
        # (BINS,), float64: exact up to 2^53
        self._counts: Tensor | None = None
        # elements × steps without any factor
        self._unscaled = 0
        self._sizes: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def observe(
        self,
        factors: Sequence[Tensor | None],
        sizes: Sequence[int],
        gate: Tensor | float | None = None,
    ) -> None:
        """Take in one step. Does not wait for the device.

        Args: factors: For each gradient one factor for all its elements or one for each; None
            stands for 1. sizes: Elements of each gradient. gate: How much of the factors counts: 1
            + gate·(factor − 1) was applied. 0-dim; None: all of it.
        """
        shared: dict[torch.device, list[tuple[Tensor, int]]] = {}
        for factor, size in zip(factors, sizes, strict=True):
            if factor is None:
                self._unscaled += size
            elif factor.numel() == size:
                self._count_elements(factor.detach(), gate)
            else:
                shared.setdefault(factor.device, []).append((factor.detach(), size))
        for pairs in shared.values():
            self._count_shared(
                [factor for factor, _ in pairs], tuple(size for _, size in pairs), gate
            )

    def read(self) -> list[int]:
        """Elements × steps in each of the `BINS` bins since the last reading. Waits for the device."""
        counts = [0.0] * BINS if self._counts is None else self._counts.tolist()
        counts[ONE] += self._unscaled
        self._counts, self._unscaled = None, 0
        return [round(count) for count in counts]

    def _count_elements(self, factors: Tensor, gate: Tensor | float | None) -> None:
        for piece in torch.split(factors.reshape(-1), PIECE_ELEMENTS):
            self._add(torch.histc(_bins(piece, gate), bins=BINS, min=-0.5, max=BINS - 0.5))

    def _count_shared(
        self, factors: Sequence[Tensor], sizes: tuple[int, ...], gate: Tensor | float | None
    ) -> None:
        bins = _bins(torch.stack([factor.reshape(()).float() for factor in factors]), gate)
        key = (bins.device, sizes)
        # copied to the device once: a copy waits for it
        if key not in self._sizes:
            self._sizes[key] = torch.tensor(sizes, dtype=torch.float64, device=bins.device)
        empty = torch.zeros(BINS, dtype=torch.float64, device=bins.device)
        self._add(empty.index_add_(0, bins.long(), self._sizes[key]))

    def _add(self, counts: Tensor) -> None:
        known = self._counts
        self._counts = (
            counts.double() if known is None else known + counts.to(known.device, known.dtype)
        )


def _bins(factors: Tensor, gate: Tensor | float | None) -> Tensor:
    """Each factor's bin as a float; not finite factors fall into the ends."""
    applied = factors.float()
    if gate is not None:
        weight = gate.to(applied.device, applied.dtype) if isinstance(gate, Tensor) else gate
        applied = 1 + weight * (applied - 1)
    places = (applied.abs().log2() * BINS_PER_OCTAVE).round() + ONE
    return places.nan_to_num(nan=BINS - 1.0).clamp_(0, BINS - 1)
