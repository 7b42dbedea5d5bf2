"""Notes on the passes of a script's model: pauses, changes by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tula_hpc.attach.hooks.find_model import objects_of

# passes apart may come with all of the first steps, by chance
FEW_STEPS = 8
# elements of a parameter that tell whether it changes
SUMMED = 64


class Apart:
    """Passes between two steps that are none of training: a pause, unless they come with most steps.

    Some losses take a pass without gradients at every step, and are a part of it. Where training's
    loader begins anew as well, it is an epoch's end, however few steps an epoch has.
    """

    def __init__(self) -> None:
        self._has_passes = False
        self._begins = False
        self._steps = 0

    def note_pass(self) -> None:
        """Note such a pass since the last step."""
        self._has_passes = True

    def note_loader(self, *, is_of_steps: bool) -> None:
        """Note that a loader has begun anew since the last step: training's, or an evaluation's."""
        if is_of_steps:
            self._begins = True
        else:
            self.note_pass()

    def step_ends(self) -> None:
        """Forget what was within the step."""
        self._has_passes = self._begins = False

    def is_pause(self, steps: int) -> bool:
        """Tell whether a pause ends, with the first pass of training after so many steps."""
        is_epoch = self._has_passes and self._begins
        is_noted = self._has_passes or self._begins
        self.step_ends()
        if is_epoch or not is_noted:
            return is_epoch
        self._steps += 1
        return 2 * self._steps < max(steps, FEW_STEPS)


class BackwardPasses:
    """Counts backward passes, and finds out that parameters change though no optimizer has stepped.

    At such a change `refuse` is called, with what follows the script's name.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.refuse = refuse
        # passes so far
        self.count = 0
        # an optimizer of torch has taken a step
        self.is_stepped = False
        self._sums: list[tuple[Tensor, float]] = []

    def install(self) -> None:
        """Watch from now on."""
        original = torch.autograd.backward

        @wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.count += 1
            if not self.is_stepped:
                self._look()

        vars(torch.autograd)["backward"] = backward

    def _look(self) -> None:
        # passes alone say nothing: a step may have many
        if self.count == FEW_STEPS:
            trained = [p for p in objects_of(nn.Parameter) if p.grad is not None]
            self._sums = [(p, _sum_of(p)) for p in trained]
        elif self.count == 2 * FEW_STEPS and any(_sum_of(p) != was for p, was in self._sums):
            why = (
                "changes its parameters by hand, or by an optimizer of another library, as fastai's; "
                "expected optimizer.step() of one of torch.optim"
            )
            self.refuse(why)


def _sum_of(parameter: Tensor) -> float:
    return float(parameter.detach().flatten()[:SUMMED].double().sum())
