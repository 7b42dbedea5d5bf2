"""Wrap an optimizer, the base: show its parameter groups and state as those of the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

Method = TypeVar("Method", bound=Callable[..., Any])


def untraced(method: Method) -> Method:
    """Exclude a method from `torch.compile`, as torch does with its own optimizers'."""
    return cast("Method", torch._disable_dynamo(method))  # type: ignore[attr-defined] # public in fact: torch decorates with it


class WrappingOptimizer(Optimizer):
    """Optimizer that shows the base's parameter groups and state, the very same objects.

    Schedulers, GradScaler and `zero_grad` therefore work as on the base. Subclasses define `step`,
    and save and load their own state next to the base's.
    """

    def __init__(self, base: Optimizer) -> None:
        if not isinstance(base, Optimizer):
            raise TypeError(f"base: expected a torch.optim.Optimizer, got {type(base).__name__}")
        self.base = base
        # torch's own way to complete an optimizer that was not built from parameters: it adds the
        # hook tables. Optimizer.__init__ would replace the shared groups and state.
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the base's gradients."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; its parameters have scale 1 until factors are next estimated."""
        self.base.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out hooks and a scheduler's patch of `step`, as every torch optimizer does."""
        patches = ("step", "_opt_called")
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in patches and not k.startswith("_optimizer_")
        }

    def parameters(self) -> list[Tensor]:
        """Return all parameters of all groups, in order."""
        return parameters_of(self)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
