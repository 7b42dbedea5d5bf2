"""Post-local SGD: synchronous at first, then local steps with averaging now and then.

T. Lin et al. 2020, "Don't use large mini-batches, use local SGD"; as a baseline of the Tula paper
it is synchronous for 5 epochs and then averages 4 times an epoch. torch's `PostLocalSGDOptimizer`
does the steps; its averager is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

# averages in an epoch; in an epoch with fewer steps, there is one after each step
AVERAGES_PER_EPOCH = 4


class EpochAverager(ModelAverager):
    """Average of parameters and buffers at equal parts of an epoch, the last at its end.

    torch's `PeriodicModelAverager` counts steps, whose number seldom divides an epoch, and which
    are less data after a fall-back to a smaller batch. This one counts data: an epoch always ends
    with an average, so that one model is evaluated.

    Args:
        model: This worker's model. BatchNorm's statistics are averaged too; integers (its count of
            batches) and frozen parameters are not.
        synchronous_epochs: Epochs before the first local step; nothing is averaged in them.
        group: Process group of the workers; the default group if None.
    """

    def __init__(
        self, model: nn.Module, synchronous_epochs: int, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(group)
        trained = (p for p in model.parameters() if p.requires_grad)
        both = (*trained, *model.buffers())
        self.tensors = [t for t in both if t.is_floating_point() or t.is_complex()]
        self.synchronous_epochs = synchronous_epochs
        self.start = self.end = 0.0

    def set_position(self, start: float, end: float) -> None:
        """Set which data the next step sees: epochs seen before it, and after it, as fractions.

        `start` is the `end` of the step before; `end` is whole after the last step of an epoch.
        """
        self.start, self.end = start, end

    @property
    def local(self) -> bool:
        """True if the step is each worker's own, without the others' gradients."""
        return self.start >= self.synchronous_epochs

    @property
    def begins(self) -> bool:
        """True if the step is the first of the local ones."""
        return self.start == self.synchronous_epochs

    @property
    def due(self) -> bool:
        """True if models are averaged after the step."""
        times = AVERAGES_PER_EPOCH
        return self.local and math.floor(times * self.end) > math.floor(times * self.start)

    def average_parameters(self, params: Any = None) -> None:
        """Average the models if this is due; called after each step. `params` lack the buffers."""
        self.step += 1
        if self.due:
            average_over_workers(self.tensors, self.process_group)


@torch.no_grad()
def average_over_workers(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace tensors by their mean over the workers, in place and in one all-reduce.

    torch's own `average_parameters` gives parameters new storage without their memory format. It
    also leaves out those that had no gradient on a worker: workers could then exchange vectors of
    different lengths.
    """
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat /= dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    means = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view(tensor.shape))


class PostLocalSGD(PostLocalSGDOptimizer):
    """torch's post-local SGD with three corrections.

    - With GradScaler a worker skips its own step where its own gradient overflowed; averages are
      collective, so `step` must be called all the same. `_step_supports_amp_scaling` makes
      GradScaler do so, and leave the check to us. Gradients must have been unscaled.
    - Loading a state replaces the base's parameter groups; torch's class would go on showing the
      old ones, and setting a learning rate there would have no effect.
    - A local gradient is dropped before the average, whose buffer takes its place in memory.

    The state of the base, `optim`, stays each worker's own.
    """

    averager: EpochAverager
    _step_supports_amp_scaling = True

    def step(self, closure: None = None) -> None:  # type: ignore[override] # the base class takes no closure either
        """Take the base's step, unless the gradient overflowed; then average if it is due."""
        # set by GradScaler, and only by it
        if not float(getattr(self, "found_inf", 0.0)):
            self.optim.step()
        if self.averager.due:
            self.optim.zero_grad(set_to_none=True)
        self.averager.average_parameters()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this worker's state, or that of a plain optimizer."""
        self.optim.load_state_dict(state_dict)
        self.averager.step = state_dict.get("step", 0)
        self.param_groups = self.optim.param_groups
