"""Optimizers by name, plain or layer-wise, and with their states divided over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tula_hpc.config import WorkloadSpec

# Layers with parameters to leave out. nn.RMSNorm is newer than the oldest torch that is supported;
# its weight is a vector, like all others except LayerNorm's, and vectors are left out anyway.
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that layer-wise rates and weight decay usually leave out.

    These are the parameters of normalization layers, and all vectors: biases, and the scales that
    some models have in addition to their weights.
    """
    of_norms: set[int] = set()
    for module in model.modules():
        if isinstance(module, _NORMS):
            of_norms.update(map(id, module.parameters(recurse=False)))
    return [p for p in model.parameters() if id(p) in of_norms or p.dim() <= 1]


def base_optimizer(
    workload: WorkloadSpec,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool = False,
    layer_wise: bool = False,
    exempt: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """Return SGD with momentum or AdamW, or their layer-wise forms LARS and LAMB.

    LARS (Y. You et al. 2017) takes the place of SGD, LAMB (Y. You et al. 2020) that of AdamW: each
    parameter's update is multiplied by its trust ratio. They treat parameters in `exempt` as SGD
    and Adam do, without trust ratio and weight decay. If `sharded`, the states are divided over the
    workers of the default process group.
    """
    kind: type[Optimizer] = torch.optim.SGD
    # the order of these keys stays the same, since checkpoints hold it
    numbers: dict[str, Any] = {"lr": workload.lr}
    if workload.optimizer == "adamw":
        kind = torch.optim.AdamW
    else:
        numbers["momentum"] = workload.momentum
    numbers["weight_decay"] = workload.weight_decay
    groups: Sequence[Any] = parameters
    if layer_wise:
        groups = _layer_wise_groups(parameters, exempt)
        # with timm's trust coefficient and moments, which are the papers'
        lars, lamb = layer_wise_kinds()
        kind = lars if kind is torch.optim.SGD else lamb
        if kind is lamb:
            # LAMB as published does not clip gradients by their norm, as timm's would;
            # training.clip_norm does that.
            numbers["max_grad_norm"] = None
    if sharded:
        # imported here, since few trainings need it
        from tula_hpc.workloads.sharded_optimizer import ShardedOptimizer

        return ShardedOptimizer(groups, kind, **numbers)
    return kind(groups, **numbers)


def layer_wise_kinds() -> tuple[type[Optimizer], type[Optimizer]]:
    """Return LARS and LAMB; their library takes seconds and tens of megabytes to import."""
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    return Lars, Lamb


def _layer_wise_groups(
    parameters: Sequence[nn.Parameter], exempt: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups for timm, which applies trust ratios with weight decay or `always_adapt`."""
    exempt_ids = set(map(id, exempt))
    adapted: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for p in parameters:
        (others if id(p) in exempt_ids else adapted).append(p)
    groups = [{"params": adapted, "always_adapt": True}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def shards(workload: WorkloadSpec, world_size: int) -> bool:
    """Tell whether the optimizer's states are divided, which takes several workers."""
    return workload.zero_stage == 1 and world_size > 1


def zero_share(parameters: Sequence[nn.Parameter], world_size: int) -> list[nn.Parameter]:
    """Return the largest share that `ZeroRedundancyOptimizer` gives to a worker.

    That class goes through the parameters, largest first, and gives each to the worker with the
    fewest elements so far.
    """
    shares: list[list[nn.Parameter]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        shares[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return shares[sizes.index(max(sizes))]


def consolidate(optimizer: Optimizer) -> None:
    """Gather divided states on rank 0, so that its `state_dict` is the plain one. Collective."""
    if is_divided(optimizer):
        _base(optimizer).consolidate_state_dict(to=0)


def own_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the optimizer's states that this worker holds."""
    base = _base(optimizer)
    return dict(base.optim.state if is_divided(optimizer) else base.state)


def is_divided(optimizer: Optimizer) -> bool:
    """Tell whether each worker holds only a share of the optimizer's states."""
    # a method that only torch's class has, since importing the class takes a while
    return hasattr(_base(optimizer), "consolidate_state_dict")


def _base(optimizer: Optimizer) -> Any:
    return getattr(optimizer, "base", optimizer)
