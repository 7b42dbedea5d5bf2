"""TulaOptimizer: adaptive (AGS) or static gradient scaling around any optimizer.

Source: Tula paper, Algorithm 1. For every step i with the all-reduced large-batch gradient G_i:

    Δ(G_i) = |(‖G_i‖² − ‖G_{i−1}‖²) / ‖G_{i−1}‖²|
    G̃_i = gradscale ⊙ G_i   where Δ(G_i) < δ,   G_i elsewhere
    w   = base optimizer's step with G̃_i

The defaults are that algorithm to the letter; everything beyond it is an option. `scale_factors.py`
has the whole law of the factor, with the file of each part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.gradients.noise_scale import NoiseReading
from tula_hpc.gradients.norms import dense_gradients, foreach_norms, sum_of_squares
from tula_hpc.optim.gate import Gate, Sensitivity
from tula_hpc.optim.observer import GradientObserver, StepObserver
from tula_hpc.optim.scale_factors import (
    Batches,
    Estimates,
    GradScale,
    Granularity,
    StaticScale,
    check_numbers,
    checked_bounds,
    require,
    require_one_of,
)
from tula_hpc.optim.scaled_step import copies, fits, move_where, multiply_where, scale_and_step
from tula_hpc.optim.wrapper import WrappingOptimizer, untraced

Apply = Literal["gradient", "update"]
# key of our own state in state_dict(), next to "state" and "param_groups", and its version
STATE_KEY = "tula"
VERSION = 2
# steps without any estimate of the factors before a warning
STEPS_UNTIL_WARNING = 100


class Statistics(NamedTuple):
    """Numbers of `TulaOptimizer.statistics`."""

    # Δ(G) of the last step; NaN before the second step, inf or NaN where the norm is not finite
    sensitivity: float
    # ‖G‖ of the last step, before scaling; NaN before the first step
    gradient_norm: float
    # share of the scale in the last step: 0, 1, or between them while the scale warms up
    scaled: float
    # factors over all elements of all parameters, used in the last step or not
    scale_mean: float
    scale_min: float
    scale_max: float
    # steps since the last call of statistics() that used any of the scale
    scaled_steps: int
    # steps since the last call of statistics()
    steps: int
    # mean share of the scale in these steps, from 0 to 1: they applied 1 + share·(scale − 1)
    share: float


class Look(NamedTuple):
    """Gradients of one step."""

    # by parameter
    gradients: dict[Tensor, Tensor]
    # share of the scale to use, 0-dim: a bool or from 0 to 1
    share: Tensor


class TulaOptimizer(WrappingOptimizer, GradientObserver):
    """Optimizer that scales gradients in place where training is not sensitive.

    It has no parameter groups or state of its own but shows the base's, the very same objects:
    schedulers, GradScaler and `zero_grad` work as on the base. Without a scale (before the first
    update), or with scale 1, it equals the base bit for bit. The gate is decided on the device: a
    step never waits for it.

    Every worker must hold the same all-reduced gradient when `step` is called; then all take the
    same branch. Gradients with loss scaling must have been unscaled (GradScaler.step does that).
    Parameters without a gradient are skipped.

    Factors come from `update_gradscale`, with the gradients of two batches, or from
    `observe_small`, with norms of small gradients that the workers have anyway. A norm that is not
    finite changes no factor; at "element", a ratio that is not finite counts as 1.

    Args:
        base: The optimizer to wrap; do not use it directly any more.
        small_batch: b_small, the global reference batch that factors refer to.
        large_batch: b_large, the global batch of the training; not below `small_batch`.
        delta: δ > 0. A step with Δ(G) ≥ δ is sensitive: its gradient is left as it is. `math.inf`
            turns the gate off.
        granularity: "element": a factor for each element. "tensor": one for each tensor, the ratio
            of norms. "model": one for all.
        s_max: Upper bound of the factors; (b_large / b_small)^(exponent / 2) if None, but not below
            `s_min`.
        s_min: Lower bound of the factors. The convergence lemma needs it above 0.
        static_scale: Use this constant s instead of adaptive factors (the paper's static scaling);
            bounds do not apply.
        update_interval: Steps after which `update_due` turns true; None: never.
        exponent: Exponent of the ratio of gradients or norms, above 0. 1 is the paper's, 2 gives
            a gain like AdaScale's.
        smoothing: Decay of moving averages of the squared norms (at "element": of the factor) for
            each update, from 0 to below 1.
        scale_warmup: Steps over which factors grow from 1 to their value: 1 + (factor − 1)·min(1,
            steps/scale_warmup).
        gate: Rule for using the scale, see `Sensitivity`: "paper" or "none".
        apply: "gradient", or "update": the factor multiplies the base's update, p ← p_old +
                s·(p_new − p_old). For bases that divide by the gradient's size (Adam, LARS,
                LAMB), where a factor of the gradient would cancel out. It needs a copy of the
                parameters during the step.
        spike_guard: Scale a gradient that is longer than its moving average by its own length, see
            `norm_ratio.py`. Acts on norms that `observe_small` gives; without effect at "element"
            and if `smoothing` is 0.

    Raises:
        TypeError: `base` is not an optimizer.
        ValueError: A number is out of range.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        small_batch: int,
        large_batch: int,
        delta: float = 0.5,
        granularity: Granularity = "element",
        s_max: float | None = None,
        s_min: float = 0.0,
        static_scale: float | None = None,
        update_interval: int | None = None,
        exponent: float = 1.0,
        smoothing: float = 0.0,
        scale_warmup: int = 0,
        gate: Gate = "paper",
        apply: Apply = "gradient",
        spike_guard: bool = False,
    ) -> None:
        super().__init__(base)
        require_one_of("granularity", granularity, get_args(Granularity))
        require_one_of("gate", gate, get_args(Gate))
        require_one_of("apply", apply, get_args(Apply))
        form: dict[str, Any] = {"exponent": exponent, "smoothing": smoothing}
        intervals: dict[str, Any] = {
            "update_interval": update_interval,
            "scale_warmup": scale_warmup,
        }
        check_numbers(delta=delta, static_scale=static_scale, **form, **intervals)
        batches = Batches(small_batch, large_batch)
        bounds = checked_bounds(batches, s_min, s_max, exponent)
        self.update_interval, self.scale_warmup = update_interval, scale_warmup
        self.apply, self._fixed_s_max = apply, s_max
        self._adaptive = GradScale(granularity, *bounds, **form, spike_guard=spike_guard)
        self._scale = self._adaptive if static_scale is None else StaticScale(static_scale)
        self._estimates = Estimates(self._adaptive, batches)
        self._sensitivity = Sensitivity(delta, gate)
        self._shortened: Tensor | float = 1.0
        # squared norms of the next step's gradients, if known
        self._squares: Tensor | None = None
        self.steps = self._steps_since_update = self._steps_since_statistics = 0
        self._looked_for_factors = False
        # between `before_step` and `after_step`: gradients, and parameters before the step
        self._unfinished: tuple[Look | None, dict[Tensor, Tensor]] = (None, {})

    @property
    def small_batch(self) -> int:
        """Return b_small, the global reference batch."""
        return self._estimates.batches.small

    @property
    def large_batch(self) -> int:
        """Return b_large, the global batch of the training."""
        return self._estimates.batches.large

    @property
    def delta(self) -> float:
        """Return the threshold δ."""
        return self._sensitivity.delta

    @property
    def s_max(self) -> float:
        """Return the present upper bound of the adaptive factors."""
        return self._adaptive.s_max

    @property
    def s_min(self) -> float:
        """Return the lower bound of the adaptive factors."""
        return self._adaptive.s_min

    @property
    def gradscale(self) -> list[Tensor | None]:
        """Return factors in parameter order, of a parameter's shape or 0-dim; None stands for 1."""
        return list(map(self._scale.factor, self.parameters()))

    @property
    def update_due(self) -> bool:
        """True if `update_interval` steps were taken since the last estimate, or the start."""
        return self.update_interval is not None and self._steps_since_update >= self.update_interval

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @untraced
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Gate and scale the gradients in place, then step the base; or scale its update after it.

        Args:
            closure: Recomputes loss and gradients. The base calls it; its gradients are gated after
                each call. With apply="update" the last call decides.

        Raises:
            TypeError: A gradient is sparse or complex. Nothing has been changed.
        """
        loss = None
        if closure is not None:
            loss = self._step_with(closure)
        else:
            look = self._look()
            if not self._step_in_pieces(look):
                before = self._prepare(look)
                self.base.step()
                self._scale_update(look, before)
        self._count_step()
        return loss

    @untraced
    def before_step(self) -> None:
        """Gate and scale the gradients; the caller then steps the base and calls `after_step`.

        Both calls together equal `step`, to the bit, with the same errors.
        """
        look = self._look()
        before = self._prepare(look)
        self._unfinished = (look, before) if before else (None, {})

    @untraced
    def after_step(self) -> None:
        """Scale the base's update with apply="update", and count the step."""
        look, before = self._unfinished
        self._unfinished = (None, {})
        self._scale_update(look, before)
        self._count_step()

    def _count_step(self) -> None:
        self.steps += 1
        if (
            self.steps >= STEPS_UNTIL_WARNING
            and self.update_interval is None
            and not self._looked_for_factors
        ):
            # with an interval, the first update may still come
            self._warn_without_factors()
        self._steps_since_update += 1
        self._steps_since_statistics += 1

    @untraced
    def update_gradscale(
        self, small_grads: Sequence[Tensor | None], large_grads: Sequence[Tensor | None]
    ) -> None:
        """Estimate the factors by UpdateGradScale of Algorithm 1.

        Args:
            small_grads: Gradient of the reference batch, averaged over the workers, for each
                parameter of all groups in order.
            large_grads: Gradient of the large batch at the same weights, all-reduced, not yet
                scaled nor clipped. Where either is None the parameter keeps its factor.

        Raises:
            ValueError: The numbers of gradients or their shapes do not fit the parameters, or
                scaling is static.
        """
        require(
            self._scale is self._adaptive,
            "static_scale is set: there are no adaptive factors to update",
        )
        with torch.no_grad():
            self._estimates.from_gradients(self.parameters(), small_grads, large_grads)
        self._steps_since_update = 0

    @untraced
    def observe_small(self, squares: Tensor, batch: float, large: Tensor | None = None) -> None:
        """Take squared norms of small gradients, from which the next step estimates the factors.

        The step takes the large gradient's norms itself and brings the small ones from `batch` to
        `small_batch` by the law of the gradient noise, see `square_at`. Smoothing helps: one
        estimate is noisy, and may fall below 0.

        Call it after the backward pass. `zero_grad` forgets norms that no step has used, as when a
        step is skipped for an overflow; a state_dict does not hold them. Does not wait for the
        device.

        Args:
            squares: (n,) squared norm of each parameter's gradient over `batch` samples, unscaled,
                or the mean of several; in parameter order, NaN where a parameter has none.
            batch: Samples that such a gradient averages over, fewer than `large_batch`.
            large: (n,) squared norms of the large gradient. Needed only if the gradients are
                changed before the step, as by clipping: small and large norms must then both be
                from before the change, or both from after it.

        Raises:
            ValueError: Shapes or batch do not fit, scaling is static, or each element has its own
                factor.
        """
        require(
            self._scale is self._adaptive,
            "static_scale is set: there are no adaptive factors to update",
        )
        self._estimates.expect(self.parameters(), squares, batch, large)

    @untraced
    def observe_clipping(self, factor: Tensor | float) -> None:
        """Take the factor of clipping in the next step: gate and noise use the norms before it.

        Gradients that are all clipped to one norm would seem not to change at all. Where
        `observe_small` is given no norms of the large gradient, the small ones must be clipped
        alike.

        Args:
            factor: 0-dim or a number above 0, at most 1; does not wait for the device.
        """
        self._shortened = factor

    @untraced
    def observe_norms(self, squares: Tensor) -> None:
        """Take squared norms of the next step's gradients, which it then does not compute.

        `LocalNorms.averaged` has them while other gradients are still on their way. They must
        include later changes such as clipping. They are forgotten like those of `observe_small`.
        Does not wait for the device.

        Args:
            squares: (n,) in parameter order, for each parameter that has a gradient.

        Raises:
            ValueError: There is not one number for each parameter.
        """
        count = len(self.parameters())
        require(
            squares.shape == (count,),
            f"squares: expected one number for each of {count} parameters",
        )
        self._squares = squares

    def set_batch(self, large_batch: int, small_batch: int | None = None) -> None:
        """Change the batch, as after running out of memory.

        The default s_max follows, the factors are clamped, and averages of squared norms are
        carried over to the new batches. Warm-up and interval go on with the data seen: both, and
        the steps taken, are turned into steps of the new batch.

        Args:
            large_batch: The new b_large.
            small_batch: The new b_small; unchanged if None.

        Raises:
            ValueError: The batches or bounds do not fit together. Nothing has been changed.
        """
        if small_batch is None:
            small_batch = self.small_batch
        batches = Batches(small_batch, large_batch)
        bounds = checked_bounds(batches, self.s_min, self._fixed_s_max, self._adaptive.exponent)
        ratio = self.large_batch / large_batch
        self._estimates.set_batches(batches, *bounds)
        self.steps, self.scale_warmup = round(self.steps * ratio), round(self.scale_warmup * ratio)
        self._steps_since_update = round(self._steps_since_update * ratio)
        if self.update_interval is not None:
            self.update_interval = max(1, round(self.update_interval * ratio))

    def set_reference(self, batch: float) -> None:
        """Let factors from norms refer to another batch than b_small from the next estimate on.

        The averages stay at b_small: only the ratio is brought to `batch` by the law of the
        gradient noise, see `square_at`. The default s_max follows. Loading a state restores the
        reference if the batches are the same. `update_gradscale` still uses its gradients' b_small.

        Args:
            batch: Samples, at least 1 and at most `large_batch`.

        Raises:
            ValueError: `batch` is out of range, or the bounds do not fit. Nothing has been changed.
        """
        fits = 1 <= batch <= self.large_batch
        require(fits, f"batch: expected from 1 to large_batch = {self.large_batch}, got {batch}")
        bounds = checked_bounds(
            (batch, self.large_batch), self.s_min, self._fixed_s_max, self._adaptive.exponent
        )
        self._estimates.refer_to(batch, *bounds)

    def expect_small_norms(self) -> None:
        """Take factors only from `observe_small`: `update_due` stays false."""
        self.update_interval = None

    def set_delta(self, delta: float) -> None:
        """Change the threshold δ.

        Raises:
            ValueError: δ is not above 0. Nothing has been changed.
        """
        require(delta > 0, f"delta: expected above 0, got {delta}")
        self._sensitivity.delta = delta

    def statistics(self) -> Statistics:
        """Return numbers for the log and reset the counts of steps. Waits for the device."""
        sensitivity, norm, scaled, scaled_steps, used = self._sensitivity.read()
        scale = self._scale.summary(self.parameters())
        steps, self._steps_since_statistics = self._steps_since_statistics, 0
        counts = scaled_steps, steps, used / max(1, steps)
        return Statistics(sensitivity, norm, scaled, *scale, *counts)

    def step_metrics(self, steps: int) -> dict[str, float]:
        """Return `statistics` for a log line of that many steps, by name."""
        found = self.statistics()
        return {
            "sensitivity": found.sensitivity,
            "gradient_norm": found.gradient_norm,
            "scaled": found.scaled_steps / steps,
            "scale_share": found.share,
            "scale_mean": found.scale_mean,
            "scale_min": found.scale_min,
            "scale_max": found.scale_max,
        }

    def noise(self) -> NoiseReading:
        """Return the gradient's noise scale, from the pairs that the factors were estimated from.

        Resets the means of recent pairs. Waits for the device.
        """
        return self._estimates.noise.read()

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the base's gradients and the observations that no step has used."""
        super().zero_grad(set_to_none)
        self.forget_observations()

    def forget_observations(self) -> None:
        """Drop the observations for a step that was not taken."""
        self._estimates.forget()
        self._shortened, self._squares = 1.0, None

    def _warn_without_factors(self) -> None:
        self._looked_for_factors = True
        if all(factor is None for factor in self.gradscale):
            message = "nothing has been scaled: call update_gradscale or observe_small, which give the factors"
            # up to the caller of `step`, past the frames that `untraced` adds
            warnings.warn(f"after {self.steps} steps {message}", stacklevel=7)

    def _step_with(self, closure: Callable[[], float]) -> float:
        looks: list[Look | None] = []

        def evaluate() -> float:
            loss = closure()
            look = self._look()
            if self.apply == "gradient":
                self._scale_gradients(look)
            else:
                looks[:] = [look]
            return loss

        before: dict[Tensor, Tensor] = {}
        if self.apply == "update":
            before = self._copies(self.parameters(), factors_to_come=True)
        found: float = self.base.step(evaluate)
        self._scale_update(looks[0] if looks else None, before)
        return found

    def _step_in_pieces(self, look: Look | None) -> bool:
        """Scale gradients and step the base at once; return False if that is not possible."""
        if look is None or self.apply == "update" or not fits(self.base, look.gradients):
            return False
        factors = self._factors(look)
        if all(factor is None for factor in factors.values()):
            return False
        with torch.no_grad():
            scale_and_step(self.base, look.share, look.gradients, factors)
        return True

    def _prepare(self, look: Look | None) -> dict[Tensor, Tensor]:
        """Scale the gradients, or return copies of the parameters whose update is to be scaled."""
        if self.apply == "update":
            return self._copies(list(look.gradients) if look else [])
        self._scale_gradients(look)
        return {}

    def _scale_gradients(self, look: Look | None) -> None:
        if look is not None:
            with torch.no_grad():
                multiply_where(
                    look.share, list(look.gradients.values()), list(self._factors(look).values())
                )

    def _factors(self, look: Look) -> dict[Tensor, Tensor | None]:
        return {parameter: self._scale.factor(parameter) for parameter in look.gradients}

    def _scale_update(self, look: Look | None, before: Mapping[Tensor, Tensor]) -> None:
        if look is not None and before:
            moved = [parameter for parameter in look.gradients if parameter in before]
            with torch.no_grad():
                factors = list(map(self._scale.factor, moved))
                move_where(look.share, moved, [before[parameter] for parameter in moved], factors)

    def _copies(
        self, parameters: Sequence[Tensor], *, factors_to_come: bool = False
    ) -> dict[Tensor, Tensor]:
        """Copy parameters that have a factor, or may have one by the end of the step."""
        wanted = [p for p in parameters if factors_to_come or self._scale.factor(p) is not None]
        with torch.no_grad():
            return copies(wanted)

    def _look(self) -> Look | None:
        """Look at gradients before scaling: norms, new factors, the gate; None: no gradients."""
        parameters = self.parameters()
        gradients = dense_gradients(parameters)
        # neither a norm to remember nor anything to scale
        if not gradients:
            return None
        with torch.no_grad():
            norms = self._norms(parameters, gradients)
            norm_squared = sum_of_squares(norms.values(), parameters[0].device)
            if self._estimates.learn(parameters, norms, norm_squared, self._shortened):
                self._steps_since_update = 0
            share = self._sensitivity.observe(norm_squared / self._shortened**2, self._warm_share)
            self._shortened = 1.0
            return Look(gradients, share)

    def _norms(
        self, parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Return each gradient's norm, computed unless `observe_norms` gave it."""
        squares, self._squares = self._squares, None
        if squares is None:
            taken, order = foreach_norms(list(gradients.values())), list(gradients)
            return {order[place]: norm for place, norm in taken.items()}
        norms = squares.sqrt().to(torch.promote_types(parameters[0].dtype, torch.float32)).unbind()
        return {
            parameter: norms[place]
            for place, parameter in enumerate(parameters)
            if parameter in gradients
        }

    @property
    def _warm_share(self) -> float:
        return 1.0 if self.steps >= self.scale_warmup else self.steps / self.scale_warmup

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state_dict with, under "tula", this optimizer's own plain state."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = {**self.base.state_dict(), STATE_KEY: self.own_state()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the base's state and this optimizer's own, bit for bit.

        Raises:
            ValueError: Its own state is absent, or of other parameters. Nothing has changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        own: Any = state_dict.pop(STATE_KEY, None)
        absent = (
            f"state_dict: no {STATE_KEY!r} entry; a plain optimizer's state goes to "
            "optimizer.base.load_state_dict"
        )
        require(isinstance(own, Mapping), absent)
        self._check_own_state(own)
        self.base.load_state_dict(state_dict)
        self.load_own_state(own)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def own_state(self) -> dict[str, Any]:
        """Return this optimizer's own state, for a caller that saves the base's by other means.

        It has factors, averages and counts; δ, bounds and batches stay the constructor's.
        """
        return {
            "version": VERSION,
            "steps": self.steps,
            "steps_since_update": self._steps_since_update,
            "steps_since_statistics": self._steps_since_statistics,
            "sensitivity": self._sensitivity.state_dict(),
            **self._estimates.state_dict(self.parameters()),
        }

    def _check_own_state(self, own: Mapping[str, Any]) -> None:
        version = own.get("version")
        require(
            version == VERSION,
            f"state_dict: expected version {VERSION} of the {STATE_KEY!r} entry, got {version}",
        )
        self._estimates.check_state(self.parameters(), own)

    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Restore an `own_state`.

        Raises:
            ValueError: The state belongs to other parameters. Nothing has changed.
        """
        self._check_own_state(own)
        parameters = self.parameters()
        self._shortened, self._squares = 1.0, None
        if own["batches"] == [self.small_batch, self.large_batch]:
            # the saved factors are within the bounds for this reference
            self.set_reference(own["reference"])
        self._estimates.load_state_dict(parameters, own)
        self._sensitivity.load_state_dict(own["sensitivity"], parameters[0].device)
        # warm-up and interval are steps of today's batch: they go on with the data seen, not with
        # another batch's steps
        batch = own["batches"][1]
        self.steps = round(own["steps"] * batch / self.large_batch)
        self._steps_since_update = round(own["steps_since_update"] * batch / self.large_batch)
        self._steps_since_statistics = own["steps_since_statistics"]


class StaticScaleObserver(StepObserver):
    """Observer of gradients that a `TulaOptimizer` scales by a constant; it estimates no noise."""

    def __init__(self, optimizer: TulaOptimizer, large_batch: int) -> None:
        super().__init__(optimizer, large_batch)
        self._scaling = optimizer

    def observe_clipping(self, factor: Tensor | float) -> None:
        """Take the factor of clipping, for the optimizer's gate as well."""
        super().observe_clipping(factor)
        self._scaling.observe_clipping(factor)

    def step_metrics(self, steps: int) -> dict[str, float]:
        """Return the optimizer's statistics, by name."""
        return self._scaling.step_metrics(steps)
