"""TulaOptimizer: adaptive (AGS) or static gradient scaling around any optimizer.

Source: Tula paper, Algorithm 1. For every step i with the all-reduced large-batch gradient G_i:

    Δ(G_i) = |(‖G_i‖² − ‖G_{i−1}‖²) / ‖G_{i−1}‖²|
    G̃_i = gradscale ⊙ G_i   where Δ(G_i) < δ,   G_i elsewhere
    w   = base optimizer's step with G̃_i
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.optim.gradscale import RATIOS, GradScale, Granularity, StaticScale, default_s_max, multiply_where
from tula_hpc.optim.noise_scale import NoiseReading, NoiseScale
from tula_hpc.optim.sensitivity import Sensitivity, squared_norm

STATE_KEY = "tula"  # beside "state" and "param_groups" in state_dict()


class Statistics(NamedTuple):
    """What `TulaOptimizer.statistics` returns."""

    sensitivity: float  # Δ(G) of the last step; NaN before the second step, inf or NaN where the norm is not finite
    gradient_norm: float  # ‖G‖ of the last step, before scaling; NaN before the first step
    scaled: float  # 1 if the last step was not sensitive, so that its gradient was multiplied by the scale, else 0
    scale_mean: float  # of the scale over all elements of all parameters, whether or not the last step used it
    scale_min: float
    scale_max: float
    scaled_steps: int  # steps since the last call of statistics() that were not sensitive
    steps: int  # steps since the last call of statistics()


class TulaOptimizer(Optimizer):
    """Scales gradients in place where training is not sensitive, then steps the wrapped optimizer.

    It has no parameter groups or state of its own but shows the base's, the very same objects: schedulers, GradScaler
    and `zero_grad` work as on the base. Without a scale (before the first `update_gradscale`), or with scale 1, it
    equals the base bit for bit. The gate is decided on the device: a step never waits for it.

    Every worker must hold the same all-reduced gradient when `step` is called; then all take the same branch. Gradients
    with loss scaling must have been unscaled (GradScaler.step does that). Parameters without a gradient are skipped.

    Args:
        base: The optimizer to wrap. Use it no longer directly.
        small_batch: b_small, the global reference batch that small gradients come from.
        large_batch: b_large, the global batch that is trained with; not below `small_batch`.
        delta: δ > 0. A step with Δ(G) ≥ δ is sensitive: its gradient is left as it is. `math.inf` turns the gate off.
        granularity: "element": a factor for each element. "tensor": one for each tensor, the ratio of norms.
        s_max: Upper bound of the factors; √(b_large / b_small) if None.
        s_min: Lower bound of the factors. The convergence lemma needs it above 0.
        static_scale: Use this constant s instead of adaptive factors (the paper's static scaling); bounds do not apply.
        update_interval: `update_due` turns true after so many steps; None: never.

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
    ) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(f"base: expected a torch.optim.Optimizer, got {type(base).__name__}")
        _require(delta > 0, f"delta: expected a number above 0, got {delta}")
        _require(granularity in RATIOS, f"granularity: expected one of {', '.join(RATIOS)}; got {granularity!r}")
        interval_fits = update_interval is None or update_interval >= 1
        _require(interval_fits, f"update_interval: expected at least 1 step, got {update_interval}")
        scale_fits = static_scale is None or 0 < static_scale < math.inf
        _require(scale_fits, f"static_scale: expected a finite number above 0, got {static_scale}")
        self.base = base
        self.small_batch, self.large_batch = small_batch, large_batch
        self.update_interval = update_interval
        self._fixed_s_max = s_max
        self._adaptive = GradScale(granularity, *_bounds(small_batch, large_batch, s_min, s_max))
        self._scale = self._adaptive if static_scale is None else StaticScale(static_scale)
        self._sensitivity = Sensitivity(delta)
        self._noise = NoiseScale()
        self.steps = self._steps_since_update = self._steps_since_statistics = 0
        # torch's own way to complete an optimizer that was not built from parameters: it adds the hook tables.
        # Optimizer.__init__ would replace the shared groups and state.
        super().__setstate__({})

    # The base may replace these objects (load_state_dict does), so they are looked up each time.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base's state."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The base's defaults; OneCycleLR and others look there for momentum."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    @property
    def delta(self) -> float:
        """The threshold δ."""
        return self._sensitivity.delta

    @property
    def s_max(self) -> float:
        """Upper bound of the adaptive factors now in force."""
        return self._adaptive.s_max

    @property
    def s_min(self) -> float:
        """Lower bound of the adaptive factors."""
        return self._adaptive.s_min

    @property
    def gradscale(self) -> list[Tensor | None]:
        """The factors in parameter order, of the parameter's shape or 0-dim; None stands for 1 (no update yet)."""
        return [self._scale.factor(parameter) for parameter in self._parameters()]

    @property
    def update_due(self) -> bool:
        """Whether `update_interval` steps were taken since the last `update_gradscale` (or since the start)."""
        return self.update_interval is not None and self._steps_since_update >= self.update_interval

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Gate and scale the gradients in place, then step the base.

        Args:
            closure: Computes loss and gradients anew. The base calls it; its gradients are gated after each call.

        Raises:
            TypeError: A gradient is sparse or complex. Nothing has been changed.
        """
        if closure is None:
            self._scale_gradients()
            self.base.step()
            loss = None
        else:
            loss = self.base.step(self._gated(closure))
        self.steps += 1
        self._steps_since_update += 1
        self._steps_since_statistics += 1
        return loss

    def update_gradscale(self, small_grads: Sequence[Tensor | None], large_grads: Sequence[Tensor | None]) -> None:
        """Estimate the factors anew (UpdateGradScale of Algorithm 1).

        Args:
            small_grads: Gradient of the reference batch, averaged over the workers, for each parameter of all groups in
                order.
            large_grads: Gradient of the large batch at the same weights, all-reduced and not yet scaled. Where either
                is None the parameter keeps its factor.

        Raises:
            ValueError: The numbers of gradients or their shapes do not fit the parameters, or scaling is static.
        """
        _require(self._scale is self._adaptive, "static_scale is set: there are no adaptive factors to update")
        parameters = self._parameters()
        for name, gradients in (("small_grads", small_grads), ("large_grads", large_grads)):
            message = f"{name}: expected one entry for each of {len(parameters)} parameters, got {len(gradients)}"
            _require(len(gradients) == len(parameters), message)
        with torch.no_grad():
            self._adaptive.update(parameters, small_grads, large_grads)
            self._observe_noise(small_grads, large_grads)
        self._steps_since_update = 0

    def set_batch(self, large_batch: int, small_batch: int | None = None) -> None:
        """Go on with another batch, as after running out of memory: the default s_max follows, the factors are clamped.

        Args:
            large_batch: The new b_large.
            small_batch: The new b_small; unchanged if None.

        Raises:
            ValueError: The batches or bounds do not fit together. Nothing has been changed.
        """
        small_batch = self.small_batch if small_batch is None else small_batch
        self._adaptive.bound(*_bounds(small_batch, large_batch, self.s_min, self._fixed_s_max))
        self.small_batch, self.large_batch = small_batch, large_batch

    def statistics(self) -> Statistics:
        """Numbers for the log; starts the counts of steps anew. Waits for the device, so call it now and then only."""
        sensitivity, norm, scaled, scaled_steps = self._sensitivity.read()
        scale = self._scale.summary(self._parameters())
        steps, self._steps_since_statistics = self._steps_since_statistics, 0
        return Statistics(sensitivity, norm, scaled, scale.mean, scale.lowest, scale.highest, scaled_steps, steps)

    def noise(self) -> NoiseReading:
        """The gradient's noise scale, from the pairs of gradients that `update_gradscale` was given.

        Starts the means of recent pairs anew. Waits for the device.
        """
        return self._noise.read()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the base does it."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; its parameters have scale 1 until the next `update_gradscale`."""
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The base's state_dict and, under "tula", factors, norms and counters: tensors, numbers, lists and dicts only.

        What the constructor sets (δ, bounds, batches) is not part of it: training can resume with another batch.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state = {**self.base.state_dict(), STATE_KEY: self._own_state()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore base and scaling, bit for bit; factors outside the bounds now in force are clamped.

        Raises:
            ValueError: There is no scaling state in it, or it belongs to other parameters. Nothing has been changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        own: Any = state_dict.pop(STATE_KEY, None)
        self._check_own_state(own)
        self.base.load_state_dict(state_dict)
        self._load_own_state(own)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Like every torch optimizer, copies and pickles leave hooks and a scheduler's patch of `step` behind."""
        patches = ("step", "_opt_called")
        return {k: v for k, v in self.__dict__.items() if k not in patches and not k.startswith("_optimizer_")}

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _observe_noise(self, small: Sequence[Tensor | None], large: Sequence[Tensor | None]) -> None:
        """Both gradients are there anyway, so that the noise scale costs two norms."""
        both = [(s, g) for s, g in zip(small, large, strict=True) if s is not None and g is not None]
        if both:
            norms = [squared_norm([pair[which] for pair in both], both[0][1].device) for which in (0, 1)]
            self._noise.observe(norms[0], norms[1], self.small_batch, self.large_batch)

    def _gated(self, closure: Callable[[], float]) -> Callable[[], float]:
        def evaluate() -> float:
            loss = closure()
            self._scale_gradients()
            return loss

        return evaluate

    def _scale_gradients(self) -> None:
        """The gate of Algorithm 1, without a host synchronization."""
        parameters = self._parameters()
        with_gradient = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, gradient in with_gradient:
            _check_dense(parameter, gradient)
        if not with_gradient:  # nothing seen: neither a norm to remember nor anything to scale
            return
        gradients = [gradient for _, gradient in with_gradient]
        with torch.no_grad():
            quiet = self._sensitivity.observe(gradients, parameters[0].device)
            multiply_where(quiet, gradients, [self._scale.factor(p) for p, _ in with_gradient])

    def _own_state(self) -> dict[str, Any]:
        return {
            "version": 1,
            "steps": self.steps,
            "steps_since_update": self._steps_since_update,
            "steps_since_statistics": self._steps_since_statistics,
            "sensitivity": self._sensitivity.state_dict(),
            "noise": self._noise.state_dict(),
            "gradscale": [self._adaptive.factor(parameter) for parameter in self._parameters()],
        }

    def _check_own_state(self, own: Any) -> None:
        absent = f"state_dict: no {STATE_KEY!r} entry; a plain optimizer's state goes to optimizer.base.load_state_dict"
        _require(isinstance(own, Mapping), absent)
        version = own.get("version")
        _require(version == 1, f"state_dict: expected version 1 of the {STATE_KEY!r} entry, got {version}")
        factors, parameters = own["gradscale"], self._parameters()
        fits = len(factors) == len(parameters) and all(
            factor is None or factor.shape in (parameter.shape, torch.Size())
            for factor, parameter in zip(factors, parameters, strict=True)
        )
        _require(fits, "state_dict: gradscale belongs to other parameters")

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        parameters = self._parameters()
        self._adaptive.load(parameters, own["gradscale"])
        self._sensitivity.load_state_dict(own["sensitivity"], parameters[0].device)
        self._noise.load_state_dict(own.get("noise"), parameters[0].device)  # absent in older checkpoints
        self.steps = own["steps"]
        self._steps_since_update = own["steps_since_update"]
        self._steps_since_statistics = own["steps_since_statistics"]


def _bounds(small: int, large: int, s_min: float, s_max: float | None) -> tuple[float, float]:
    """(s_min, s_max) with the default filled in."""
    _require(1 <= small <= large, f"small_batch: expected 1 <= small_batch <= large_batch, got {small} and {large}")
    s_max = default_s_max(small, large) if s_max is None else s_max
    _require(0 <= s_min <= s_max and s_max > 0, f"s_min: expected 0 <= s_min <= s_max, got {s_min} and {s_max}")
    return s_min, s_max


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_dense(parameter: Tensor, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided or gradient.is_complex():
        kind = "complex" if gradient.is_complex() else "sparse"
        shape = tuple(parameter.shape)
        raise TypeError(f"gradient scaling needs dense real gradients; a parameter of shape {shape} has a {kind} one")
