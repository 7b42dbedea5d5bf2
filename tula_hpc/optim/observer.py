"""The interface for observers of gradients, and an observer of gradients that nothing scales.

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

from tula_hpc.gradients.noise_scale import NO_READING, NoiseReading, NoiseScale
from tula_hpc.gradients.norms import is_dense, norms_where_present, squared, squares
from tula_hpc.optim.gate import Sensitivity
from tula_hpc.optim.wrapper import parameters_of


class GradientObserver:
    """Watcher of a training's gradients: `TulaOptimizer`, which scales them, or a `StepObserver`.

    A worker calls `begin_step` before each backward pass, the `observe_*` methods between that and
    the optimizer's step, and the others at any time. Methods that a subclass does not define do
    nothing.
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
            squares: (n,) in parameter order, NaN where there is no gradient.
            batch: Samples that such a gradient averages over, fewer than in the large batch.
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

    def extra_state(self) -> dict[str, Any]:
        """Return the state that the optimizer's own state_dict does not hold, tensors only."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore `extra_state` from copies; None (the training was not observed): start afresh."""


class StepObserver(GradientObserver):
    """Observer of the gradients right before each step of an optimizer; it changes nothing.

    It never waits for the device, except for a fused optimizer under GradScaler, which lets the
    optimizer skip steps itself. It observes neither skipped steps, nor steps while `idle`, nor
    steps with a sparse or complex gradient. The optimizer's `step` must call torch's hooks; a
    gradient averages over `large_batch` samples of all workers.
    """

    def __init__(self, optimizer: Optimizer, large_batch: int) -> None:
        self.large_batch = large_batch
        self._optimizer = optimizer
        self._sensitivity = Sensitivity(math.inf, "none")
        self._noise = NoiseScale()
        self._small: tuple[Tensor, float] | None = None
        self._squares: Tensor | None = None
        self._clipping: Tensor | float = 1.0
        # to be set while gradients do not average over `large_batch` samples
        self.idle = False
        optimizer.register_step_pre_hook(lambda *_: self._observe_step())

    def begin_step(self, *, is_local: bool) -> None:
        """Forget observations of a skipped step; be idle for gradients of one worker alone."""
        self.forget()
        self.idle = is_local

    def observe_small(self, squares: Tensor, batch: float) -> None:
        """Take squared norms of small gradients; see `GradientObserver`."""
        self._small = (squares, batch)

    def observe_norms(self, squares: Tensor) -> None:
        """Take squared norms of the gradients, which the step otherwise computes."""
        self._squares = squares

    def observe_clipping(self, factor: Tensor | float) -> None:
        """Take the factor of clipping; statistics and noise refer to gradients before it."""
        self._clipping = factor

    def forget(self) -> None:
        """Drop the observations for a step that was not taken."""
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
        device = parameters_of(self._optimizer)[0].device
        self._sensitivity.load_state_dict(state.get("sensitivity"), device)
        self._noise.load_state_dict(state.get("noise"), device)

    @torch.no_grad()
    def _observe_step(self) -> None:
        small, known, clipping = self._small, self._squares, self._clipping
        self.forget()
        gradients = [parameter.grad for parameter in parameters_of(self._optimizer)]
        present = {index: g for index, g in enumerate(gradients) if g is not None}
        if self.idle or not present or not all(map(is_dense, present.values())):
            return
        if self._is_skipped():
            return
        large = self._squares_of(gradients) if known is None else known
        by_parameter = large.unbind()
        total = torch.stack([by_parameter[index] for index in present]).sum()
        self._sensitivity.observe(total / clipping**2)
        if small is not None:
            squares, batch = small
            both = (batch, self.large_batch)
            self._noise.observe_parts(squares, large, total, both, factor=1.0 / clipping**2)

    def _squares_of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return squared norms of unscaled gradients; a fused optimizer unscales them itself."""
        found = squares(norms_where_present(gradients), parameters_of(self._optimizer)[0].device)
        loss_scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        return found if loss_scale is None else found / squared(loss_scale)

    def _is_skipped(self) -> bool:
        """Tell whether a fused optimizer will skip this step: GradScaler found an overflow."""
        overflow: Tensor | None = getattr(self._optimizer, "found_inf", None)
        return overflow is not None and bool(overflow)
