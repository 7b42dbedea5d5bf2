"""Observers of gradients: the interface, one for gradients that nothing scales, and a histogram.

`TulaOptimizer` observes the gradients that it scales, a `StepObserver` those of any other
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.gradients.noise_scale import NO_READING, STEP_DECAY, NoiseReading, NoiseScale
from tula_hpc.gradients.norms import norms_where_present, squared, squares
from tula_hpc.optim.gate import Sensitivity


class GradientObserver:
    """Watcher of a training's gradients: `TulaOptimizer`, which scales them, or a `StepObserver`.

    A worker calls `begin_step` before each backward pass, the `observe_*` methods between that and
    the optimizer's step, and the others at any time. Whatever a subclass does not define does
    nothing here.
    """

    @property
    def update_due(self) -> bool:
        """True if the next step must take a reference pass and call `update_gradscale`."""
        return False

    def begin_step(self, *, is_local: bool) -> None:
        """Forget observations that no step has used; gradients of a local step are one worker's."""

    def update_gradscale(
        self, small_grads: Sequence[Tensor | None], large_grads: Sequence[Tensor | None]
    ) -> None:
        """Take gradients of a reference pass and of the large batch, in parameter order."""

    def expect_small_norms(self) -> None:
        """Prepare for `observe_small` at every step: no reference pass is due any more."""

    def set_reference(self, batch: float) -> None:
        """Set the reference batch, in samples, that factors from norms refer to."""

    def observe_small(self, squares: Tensor, batch: float) -> None:
        """Take squared norms of small gradients at the next step's weights.

        Args:
            squares: (n,) in parameter order, NaN where there is none.
            batch: Samples of which such a gradient is the mean, below the large batch.
        """

    def observe_norms(self, squares: Tensor) -> None:
        """Take squared norms of the next step's gradients, (n,) in parameter order."""

    def observe_clipping(self, factor: Tensor | float) -> None:
        """Take the factor that shortened the next step's gradients and all norms given for it."""

    def step_metrics(self, steps: int) -> dict[str, float]:
        """Return numbers for a log line of that many steps. Waits for the device."""
        return {}

    def noise(self) -> NoiseReading:
        """Return the gradient's noise scale and restart its recent means. Waits for the device."""
        return NO_READING

    def count_scales(self) -> None:
        """Count from now on the factors that are applied."""

    def read_scales(self) -> list[int] | None:
        """Return and reset the counts of `count_scales`. Waits for the device."""
        return None

    def extra_state(self) -> dict[str, Any]:
        """Return the state that the optimizer's own state_dict does not hold, tensors only."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore `extra_state` from copies; None (the training was not observed): start afresh."""


class StepObserver(GradientObserver):
    """Observer of the gradients right before each step of an optimizer; it changes nothing.

    It never waits for the device, except for a fused optimizer under GradScaler, which lets the
    optimizer skip steps itself. Skipped steps are not observed, nor is any while `idle`, nor
    gradients of which one is sparse or complex.

    Args:
        optimizer: Its `step` must call torch's hooks.
        large_batch: Samples, over all workers, of which a gradient is the mean.
    """

    def __init__(self, optimizer: Optimizer, large_batch: int) -> None:
        self.large_batch = large_batch
        self._optimizer = optimizer
        self._sensitivity = Sensitivity(math.inf, "none")
        self._noise = NoiseScale()
        self._small: tuple[Tensor, float] | None = None
        self._squares: Tensor | None = None
        self._clipping: Tensor | float = 1.0
        # set it while gradients are not of `large_batch` samples
        self.idle = False
        optimizer.register_step_pre_hook(lambda *_: self._observe_step())

    def begin_step(self, *, is_local: bool) -> None:
        """Forget observations of a skipped step; local gradients are not of `large_batch`."""
        self.forget()
        self.idle = is_local

    def observe_small(self, squares: Tensor, batch: float) -> None:
        """Take squared norms of small gradients; see `GradientObserver`."""
        self._small = (squares, batch)

    def observe_norms(self, squares: Tensor) -> None:
        """Take squared norms of the gradients, which the step otherwise computes."""
        self._squares = squares

    def observe_clipping(self, factor: Tensor | float) -> None:
        """Take the factor of clipping; statistics and noise are those before it."""
        self._clipping = factor

    def forget(self) -> None:
        """Drop the observations for a step that did not come."""
        self._small = None
        self._squares = None
        self._clipping = 1.0

    def step_metrics(self, steps: int) -> dict[str, float]:
        """Return Δ(G) and ‖G‖ of the last step, by name; nothing while idle. Waits for the device.

        Δ(G) is NaN before the second step, ‖G‖ before the first; Δ(G) is inf or NaN where a norm is
        not finite.
        """
        if self.idle:
            return {}
        sensitivity, norm, *_ = self._sensitivity.read()
        return {"sensitivity": sensitivity, "gradient_norm": norm}

    def noise(self) -> NoiseReading:
        """Return the noise scale and restart its recent means. Waits for the device."""
        return NO_READING if self.idle else self._noise.read()

    def extra_state(self) -> dict[str, Any]:
        """Return the averages, tensors only."""
        return {"sensitivity": self._sensitivity.state_dict(), "noise": self._noise.state_dict()}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the averages from copies; None: start afresh."""
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
    def _observe_step(self) -> None:
        small, known, clipping = self._small, self._squares, self._clipping
        self.forget()
        gradients = [parameter.grad for parameter in self._parameters]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if self.idle or not present or not _are_dense(gradients) or self._is_skipped():
            return
        large = self._squares_of(gradients) if known is None else known
        by_parameter = large.unbind()
        total = torch.stack([by_parameter[index] for index in present]).sum()
        self._sensitivity.observe(total / clipping**2)
        if small is not None:
            squares, batch = small
            self._noise.observe_parts(
                squares,
                large,
                total,
                (batch, self.large_batch),
                factor=1.0 / clipping**2,
                decay=STEP_DECAY,
            )

    def _squares_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return squared norms of gradients, which a fused optimizer divides by the loss scale."""
        found = squares(norms_where_present(gradients), self._parameters[0].device)
        loss_scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        return found if loss_scale is None else found / squared(loss_scale)

    def _is_skipped(self) -> bool:
        """Tell whether a fused optimizer will skip this step: GradScaler found an overflow."""
        overflow: Tensor | None = getattr(self._optimizer, "found_inf", None)
        return overflow is not None and bool(overflow)


def _are_dense(gradients: Sequence[Tensor | None]) -> bool:
    return not any(
        gradient.layout is not torch.strided or gradient.is_complex()
        for gradient in gradients
        if gradient is not None
    )


BINS_PER_OCTAVE = 6
# on each side of 1
OCTAVES = 6
# the bin of factor 1; before it one for all factors that are too small
ONE = OCTAVES * BINS_PER_OCTAVE + 1
BINS = 2 * ONE + 1
# counted at a time: bounds the extra memory, and float32 counts up to it exactly
PIECE_ELEMENTS = 2**22


class ScaleHistogram:
    """Histogram of the applied factors, each element of a gradient counted once a step.

    Bins are evenly spaced in log2: the middle one is centred on 1, and others on every power of √2,
    where factors are clamped. The first and the last bin hold all beyond, 0 included. Everything
    stays on the device until it is read.
    """

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
        """Count one step. Does not wait for the device.

        Args:
            factors: For each gradient one factor for all its elements or one for each; None stands
                for 1.
            sizes: Elements of each gradient.
            gate: Share of the factors: 1 + gate·(factor − 1) was applied. 0-dim; None: all of it.
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
        """Return and reset elements × steps in each of the `BINS` bins. Waits for the device."""
        counts = [0.0] * BINS if self._counts is None else self._counts.tolist()
        counts[ONE] += self._unscaled
        self._counts, self._unscaled = None, 0
        return list(map(round, counts))

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
    """Return each factor's bin as a float; factors that are not finite fall into the ends."""
    applied = factors.float()
    if gate is not None:
        weight = gate.to(applied.device, applied.dtype) if isinstance(gate, Tensor) else gate
        applied = 1 + weight * (applied - 1)
    bins = (applied.abs().log2() * BINS_PER_OCTAVE).round() + ONE
    return bins.nan_to_num(nan=BINS - 1.0).clamp_(0, BINS - 1)
