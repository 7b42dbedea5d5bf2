"""Scale the gradients of a script's own optimizer, from outside.

The built-in loop takes a step of `TulaOptimizer`. A script takes a step of its own optimizer:
before it the gradients are scaled, or after it the update, as `TulaOptimizer.step` does around its
base. The norms of the workers' own gradients come from DDP's communication hook, as in the built-in
loop. It is registered at the first forward pass, by when the script would have registered its own.
Optimizers that step together share their factors, see `JointScaling`.

Between the backward pass and the step a script may divide the gradients by a loss scale, and clip
them. Both multiply all gradients by one factor, which follows from one parameter's norm before and
after. The small norms are multiplied by the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from tula_hpc.attach.hooks.find_model import as_wrapped, name_of, parameters_of, size_of, trained_in
from tula_hpc.config import SweepSpec, TrainingSpec
from tula_hpc.ddp.methods import ReferenceBatch, scaling_options
from tula_hpc.errors import DivergedError, InputError
from tula_hpc.formatting import plural
from tula_hpc.gradients.norms import dense_gradients, squared
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.optim.joint_scaling import JointScaling
from tula_hpc.optim.observer import GradientObserver
from tula_hpc.optim.optimizer import Apply
from tula_hpc.records import Configuration

# relative difference below which two sums may be of the same squares in another order
ROUNDING = 1e-5
# key of the order of the parameters of several optimizers, next to the state of `JointScaling`
PLACES = "places"


def scaling_of(
    sweep: Mapping[str, Any], configuration: tuple[int, int, int]
) -> ScriptScaling | None:
    """Return the scaling of a script's steps; None without a sweep: its method scales nothing."""
    if not sweep:
        return None
    spec = SweepSpec.model_validate(sweep, context={"check_paths": False})
    return ScriptScaling(spec, Configuration(*configuration))


class ScriptScaling:
    """Scaling of one script's steps; every worker has one."""

    def __init__(self, sweep: SweepSpec, configuration: Configuration) -> None:
        self.sweep, self.configuration = sweep, configuration
        self.samples = sweep.workload.samples or configuration.global_batch
        self.adapts = sweep.training.adapts
        # None: a single worker, which has no gradients of smaller batches
        self.norms: LocalNorms | None = None
        # None before the first step
        self.scaling: JointScaling | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._reference: ReferenceBatch
        # the model whose passes are counted; at first another one may have been taken for it
        self._attached: nn.Module | None = None
        # the model of the last step, as the script defines it
        self._model: nn.Module | None = None
        self._passes = 0

    def forward_begins(self, model: nn.Module | None) -> None:
        """Register the communication hook before the first backward pass; count passes.

        Raises:
            InputError: The script has a hook of its own.
        """
        self._passes += 1
        if model is self._attached:
            return
        self._attached = model
        # some scripts wrap the model of a single worker, too
        is_alone = self.configuration.world_size == 1
        if is_alone or not self.adapts or not isinstance(model, DistributedDataParallel):
            return
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # a frozen teacher may be taken for the model that counts, up to the end of the first step
        self.norms = LocalNorms(trained or [*model.parameters()], self.configuration.local_batch)
        try:
            self.norms.attach(model)
        except RuntimeError:
            raise own_hook(self.sweep.training.method) from None

    def gradients_ready(self, optimizer: Optimizer, model: nn.Module, epochs_seen: float) -> None:
        """Observe the gradients, then do the part of the scaling that comes before the step.

        `model` is the one that the script defines. `epochs_seen` before this step is fractional.
        """
        self._model = model
        if self.scaling is None or self.scaling.base is not optimizer:
            self.scaling = self._around(optimizer, model)
        # an evaluation with gradients looks like further passes
        passes = min(self._passes, self.sweep.workload.accumulation)
        self._passes = 0
        if self.norms is None or not self._observe(self.norms, self.scaling, passes, epochs_seen):
            # as if the gradients had been lengthened by clipping
            self.scaling.observe_clipping(_scale_left_to(optimizer))
        self.scaling.before_step()

    def forget_passes(self) -> None:
        """Forget the backward passes so far, which belong to no step."""
        if self.norms is not None:
            self.norms.take_passes()

    def step_ends(self) -> None:
        """Do the part of the scaling that comes after the step."""
        if self.scaling is not None:
            self.scaling.after_step()

    def partner_ready(self, partner: Optimizer) -> None:
        """Do the part of the scaling that comes before the step of a partner."""
        if self.scaling is not None:
            apply = applies_to(self.sweep.training, partner)
            # a single worker's model may be known only from a later step on, too late for a resume
            joins = self.configuration.world_size > 1
            self.scaling.before_partner(partner, apply, joins=joins)

    def partner_stepped(self) -> None:
        """Do the part that comes after it."""
        if self.scaling is not None:
            self.scaling.after_partner()

    def _around(self, optimizer: Optimizer, model: nn.Module) -> JointScaling:
        sizes = self.sweep, self.configuration, self.samples
        apply = applies_to(self.sweep.training, optimizer)
        self._reference = ReferenceBatch(*sizes, apply)
        options = scaling_options(*sizes) | {"apply": apply}
        scaling = JointScaling(optimizer, **options)
        if self.norms is not None:
            require_averaged(self.sweep.training.method, model, optimizer)
            scaling.expect_small_norms()
        if self._loaded is not None:
            if places := self._loaded.get(PLACES):
                scaling.restore_order(_ordered(places, scaling.parameters(), model))
            scaling.load_own_state(self._loaded)
            self._loaded = None
        return scaling

    def _observe(
        self, norms: LocalNorms, scaling: JointScaling, passes: int, epochs_seen: float
    ) -> bool:
        scaling.forget_observations()
        reduced = norms.take_passes()
        accumulation = self.sweep.workload.accumulation
        # gradients were averaged in each of several passes: the last norms are of neither batch
        if reduced == 0 or (accumulation > 1 and reduced >= passes):
            return False
        # partners, and the script itself, may have added parameters
        norms.parameters = scaling.parameters()
        small, batch = norms.squares()
        averaged = norms.averaged()
        factor = _factor_since(averaged, norms.parameters, scaling.base)
        scaling.set_reference(self._reference.after(min(epochs_seen, self._reference.epochs)))
        scaling.observe_small(small * factor, batch)
        scaling.observe_norms(averaged * factor)
        return True

    @property
    def readings(self) -> GradientObserver:
        """Statistics of the steps; none before the first."""
        return self.scaling or GradientObserver()

    def state_dict(self) -> dict[str, Any]:
        """Return factors, averages and counts."""
        if self.scaling is None or self._model is None:
            # before the first step of this process
            return dict(self._loaded or {})
        state = self.scaling.own_state()
        if places := _places_of(self.scaling, self._model):
            state[PLACES] = places
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, at the first step."""
        self._loaded = state or None


def applies_to(training: TrainingSpec, optimizer: Optimizer) -> Apply:
    """Return what a method that scales multiplies by its factors at the steps of an optimizer."""
    is_left_out = training.apply is None and training.preset == "default"
    # others divide by the size of the gradient, of which a factor cancels out
    cancels = is_left_out and not isinstance(optimizer, SGD)
    return "update" if cancels or training.method == "adascale" else training.ags.apply


def copies_parameters(training: TrainingSpec, workers: int, optimizer: Optimizer) -> bool:
    """Tell whether a training copies parameters before a step, to scale the update after it."""
    # a single worker has no gradients of smaller batches to adapt to
    has_factors = training.method == "static" or (training.adapts and workers > 1)
    return has_factors and applies_to(training, optimizer) == "update"


def _places_of(scaling: JointScaling, model: nn.Module) -> list[int]:
    """Return for each parameter of several optimizers its place in the model; −1: the base's own.

    The base has them in an order of its own; empty without a partner.
    """
    own = parameters_of(scaling.base)
    parameters = scaling.parameters()
    if own.issuperset(parameters):
        return []
    place_of: dict[Tensor, int] = {p: place for place, p in enumerate(model.parameters())}
    return [-1 if parameter in own else place_of[parameter] for parameter in parameters]


def _ordered(places: Sequence[int], own: Sequence[Tensor], model: nn.Module) -> list[Tensor]:
    """Return the parameters that have these places.

    Raises:
        ValueError: The places are of other parameters.
    """
    known = list(model.parameters())
    if places.count(-1) != len(own) or max(places) >= len(known):
        raise ValueError("state_dict: gradscale belongs to other parameters")
    base = iter(own)
    return [next(base) if place < 0 else known[place] for place in places]


def _factor_since(averaged: Tensor, parameters: Sequence[Tensor], optimizer: Optimizer) -> Tensor:
    """Return the squared factor applied to all gradients since their average; 1 up to rounding.

    It is taken from a gradient of the optimizer that is about to step: those of its partners may
    be unscaled only before they step.
    """
    own = parameters_of(optimizer)
    stepping = ((n, p.grad) for n, p in enumerate(parameters) if p in own)
    place, gradient = next((n, gradient) for n, gradient in stepping if gradient is not None)
    now = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    factor = now / (averaged[place] * squared(_scale_left_to(optimizer)))
    known = torch.isfinite(factor) & (factor > 0) & ((factor - 1.0).abs() > ROUNDING)
    return torch.where(known, factor, 1.0)


def _scale_left_to(optimizer: Optimizer) -> Tensor | float:
    """Return the loss scale by which an optimizer itself divides in its step, as fused ones do."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else scale


def own_hook(method: str) -> InputError:
    """Return the error for a method that needs DDP's hook, where the script has its own hook."""
    message = (
        f'"{method}" needs the communication hook of DistributedDataParallel, and the script has '
        'registered its own; expected "lbt", or "lrs" or "sqrt" with {lr_scale}'
    )
    return InputError(message, key="training.method")


def require_averaged(method: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Check that a model in DistributedDataParallel has all gradients of an optimizer.

    Raises:
        InputError: Other parameters have gradients, too, whose norms its hook does not see.
    """
    outside = parameters_of(optimizer).difference(model.parameters())
    if any(parameter.grad is not None for parameter in outside):
        raise InputError(
            f'"{method}" sees only the gradients of {name_of(model)}, and '
            f"{type(optimizer).__name__} also trains other parameters; expected one wrapped model "
            'with all of them, or "lbt", or "lrs" or "sqrt" with {lr_scale}',
            key="training.method",
        )


def require_dense(method: str, optimizer: Optimizer) -> None:
    """Check that a method can scale the gradients of an optimizer.

    Raises:
        InputError: One of them is sparse or complex.
    """
    try:
        dense_gradients([*parameters_of(optimizer)])
    except TypeError as error:
        raise InputError(
            f'"{method}": {error}; expected "lbt", or "lrs" or "sqrt" with {{lr_scale}}',
            key="training.method",
        ) from None


def refuse_another(model: nn.Module, before: int) -> None:
    """Refuse to train another model than was measured, which had `before` parameters."""
    # as in a profile, frozen parameters count only if the profile went on until they were trained
    now = sum(p.numel() for p in trained_in(as_wrapped(model)))
    if before not in (now, size_of(model)):
        raise InputError(
            f"the model has {now:,} parameters now, {before:,} when it was measured; undo the "
            "change, or measure what is there now with another --run-dir"
        )


def refuse_nan(optimizer: Optimizer | None, steps: int) -> None:
    """End a training with a nan among its weights, as a script's loss is not seen from outside.

    A script has no optimizer before its first step.

    Raises:
        DivergedError: A weight is nan.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    with torch.no_grad():
        # the sum is nan if any of its terms is
        sums = [weight.sum().float().cpu() for group in groups for weight in group["params"]]
    if sums and bool(torch.stack(sums).isnan().any()):
        raise DivergedError(
            f"weights of the model are nan after {plural(steps, 'step')}; lower the learning rate, "
            "unless samples hold inf or nan"
        )
