"""Scale several optimizers that step one after the other, each on parameters of its own.

Factors, gate and noise scale come from the gradients of all of them, as if one optimizer had all
parameters. They are taken before the first one steps, the base. Each gradient is scaled only before
its own optimizer steps, as `GradScaler.step` unscales no others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tula_hpc.gradients.norms import dense_gradients, is_dense
from tula_hpc.optim.optimizer import Apply, Look, TulaOptimizer
from tula_hpc.optim.scaled_step import copies, move_where, multiply_where
from tula_hpc.optim.wrapper import parameters_of, untraced


class JointScaling(TulaOptimizer):
    """Scaling of an optimizer, the base, and of partners that step after it.

    The caller steps all of them: `before_step` and `after_step` are for the base, `before_partner`
    and `after_partner` for each partner. The parameters of a new partner come behind those that are
    known, and have no factor before the next step. The option `apply` is for the base only.
    """

    def __init__(self, base: Optimizer, **options: Any) -> None:
        super().__init__(base, **options)
        # the parameters of all, in the order of the state; empty without a partner
        self._all: dict[Tensor, None] = {}
        # share of the scale in this step, 0-dim; None: there was no gradient
        self._share: Tensor | None = None
        # parameters of the partner that steps now, before its step
        self._before: dict[Tensor, Tensor] = {}

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all optimizers, in the order in which they became known."""
        own = super().parameters()
        if not self._all:
            return own
        # the base may have got more of them
        self._all |= dict.fromkeys(own)
        return list(self._all)

    def restore_order(self, parameters: Iterable[Tensor]) -> None:
        """Set the order of all parameters to that of a state that is about to be loaded."""
        self._all = dict.fromkeys(parameters)

    @untraced
    def before_partner(self, partner: Optimizer, apply: Apply, *, joins: bool) -> None:
        """Scale a partner's gradients by the share of this step, or prepare to scale its update.

        `joins`: from the next step on, gate and factors go by its gradients as well.
        """
        self._before = {}
        owned = parameters_of(partner)
        if not all(is_dense(each.grad) for each in owned if each.grad is not None):
            # such gradients have no norms: they are left as they are
            return
        if joins and not set(owned) <= self._all.keys():
            self._all = dict.fromkeys((*self.parameters(), *owned))
        gradients = dense_gradients(owned)
        factors = {parameter: self._scale.factor(parameter) for parameter in gradients}
        if self._share is None:
            return
        with torch.no_grad():
            if apply == "gradient":
                multiply_where(self._share, list(gradients.values()), list(factors.values()))
            else:
                self._before = copies([p for p, factor in factors.items() if factor is not None])

    @untraced
    def after_partner(self) -> None:
        """Scale the update of the partner that has stepped, if `apply` was "update"."""
        before = self._before
        self._before = {}
        if self._share is None:
            return
        with torch.no_grad():
            factors = list(map(self._scale.factor, before))
            move_where(self._share, list(before), list(before.values()), factors)

    def _look(self) -> Look | None:
        look = super()._look()
        self._share = None if look is None else look.share
        if look is None or not self._all:
            return look
        own = set(super().parameters())
        return look._replace(gradients={p: g for p, g in look.gradients.items() if p in own})
