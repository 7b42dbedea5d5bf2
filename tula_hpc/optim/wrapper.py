"""Wrap an optimizer, the base: show its parameter groups and state, and add state of our own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.optim.scale_factors import require

Method = TypeVar("Method", bound=Callable[..., Any])
# key of our own state in state_dict(), next to "state" and "param_groups"
STATE_KEY = "tula"


def untraced(method: Method) -> Method:
    """Exclude a method from `torch.compile`, as torch does with its own optimizers'."""
    return cast("Method", torch._disable_dynamo(method))  # type: ignore[attr-defined] # public in fact: torch decorates with it


class WrappingOptimizer(Optimizer, ABC):
    """Optimizer that shows the base's parameter groups and state, the very same objects.

    Schedulers, GradScaler and `zero_grad` therefore work as on the base. Subclasses define `step`
    and their own state.
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
        absent = f"state_dict: no {STATE_KEY!r} entry; a plain optimizer's state goes to optimizer.base.load_state_dict"
        require(isinstance(own, Mapping), absent)
        self._check_own_state(own)
        self.base.load_state_dict(state_dict)
        self.load_own_state(own)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Return this optimizer's own state, for a caller that saves the base's by other means."""

    @abstractmethod
    def load_own_state(self, own: Mapping[str, Any]) -> None:
        """Restore an `own_state`.

        Raises:
            ValueError: The state belongs to other parameters. Nothing has changed.
        """

    @abstractmethod
    def _check_own_state(self, own: Mapping[str, Any]) -> None:
        """Raise ValueError where an own state cannot be loaded; change nothing."""

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
        return [parameter for group in self.param_groups for parameter in group["params"]]
