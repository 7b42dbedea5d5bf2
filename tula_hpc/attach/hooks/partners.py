"""Find the optimizers that step along with the one that counts, each on parameters of its own.

One model may have several optimizers, such as Muon for its matrices and AdamW for the rest. After a
backward pass each of them steps, and together these are one step. The optimizers of a GAN take
turns instead, each after a backward pass of its own, even if one module holds both networks.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from tula_hpc.attach.hooks.find_model import parameters_of
from tula_hpc.attach.hooks.passes import BackwardPasses, Listener


class Partners:
    """Partners of the optimizer that counts, whose steps it reports to a listener.

    A partner steps after that optimizer, without a backward pass in between. It has parameters of
    the same model only, and none of that optimizer's.

    Attributes:
        found: Partners that have stepped.
        stepping: The optimizer, a partner or the one that counts, whose step has begun and not
            ended; None: none of them. It may step within its step, as one whose class calls the
            step of its base class: both have hooks.
        passes: Backward passes before the last step that counts.
    """

    def __init__(self, listener: Listener, backward: BackwardPasses) -> None:
        self.found: list[Optimizer] = []
        self.stepping: Optimizer | None = None
        self.passes = -1
        self._listener = listener
        self._backward = backward
        # the optimizer that counts and its model, and whether others' parameters suit a partner
        self._counted: Optimizer | None = None
        self._model: nn.Module | None = None
        self._suited = WeakKeyDictionary[Optimizer, bool]()

    def may_have(
        self, optimizer: Optimizer, counted: Optimizer | None, model: nn.Module | None
    ) -> bool:
        """Tell whether an optimizer is a partner by its parameters."""
        if counted is None or model is None:
            return False
        if counted is not self._counted or model is not self._model:
            self._counted = counted
            self._model = model
            self._suited.clear()
            self.found.clear()
        if optimizer not in self._suited:
            owned = parameters_of(optimizer)
            is_of_model = owned <= set(model.parameters())
            self._suited[optimizer] = is_of_model and owned.isdisjoint(parameters_of(counted))
        return self._suited[optimizer]

    def ready(self, optimizer: Optimizer) -> bool:
        """Begin the step of an optimizer that is a partner by its parameters; False: it is not one.

        A partner may have an optimizer of the same parameters inside it, whose step is no other.
        """
        if self.passes != self._backward.count or self.stepping is not None:
            return False
        self.stepping = optimizer
        if optimizer not in self.found:
            self.found.append(optimizer)
        self._listener.partner_ready(optimizer)
        return True
