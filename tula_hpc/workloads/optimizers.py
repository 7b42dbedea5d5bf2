"""The workload's optimizer, and ZeRO stage 1: each worker keeps its share of the optimizer's states.

S. Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", stage 1. Every
worker updates its share of the parameters and sends them to the others; the result is that of the plain optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from tula_hpc.config import WorkloadSpec


def base_optimizer(workload: WorkloadSpec, parameters: Sequence[nn.Parameter], *, sharded: bool = False) -> Optimizer:
    """SGD with momentum, or AdamW.

    Args:
        workload: Which one, and its numbers.
        parameters: What is trained.
        sharded: Whether the states are divided over the workers of the default process group.
    """
    kind, numbers = _kind_and_numbers(workload)
    if sharded:
        return ZeroRedundancyOptimizer(parameters, kind, **numbers)
    return kind(parameters, **numbers)


def _kind_and_numbers(workload: WorkloadSpec) -> tuple[type[Optimizer], dict[str, Any]]:
    if workload.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": workload.lr, "weight_decay": workload.weight_decay}
    numbers = {"lr": workload.lr, "momentum": workload.momentum, "weight_decay": workload.weight_decay}
    return torch.optim.SGD, numbers


def shards(workload: WorkloadSpec, world_size: int) -> bool:
    """Whether the states are divided: there must be someone to divide them with."""
    return workload.zero_stage == 1 and world_size > 1


def zero_share(parameters: Sequence[nn.Parameter], world_size: int) -> list[nn.Parameter]:
    """The largest share that `ZeroRedundancyOptimizer` gives to a worker: largest first, each to who has least."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(world_size)]
    sizes = [0] * world_size
    for parameter in sorted(parameters, key=lambda p: p.numel(), reverse=True):
        rank = sizes.index(min(sizes))
        shares[rank].append(parameter)
        sizes[rank] += parameter.numel()
    return shares[sizes.index(max(sizes))]


def consolidate(optimizer: Optimizer) -> None:
    """Bring divided states together on rank 0, whose `state_dict` then is that of the plain optimizer. Collective."""
    base = getattr(optimizer, "base", optimizer)
    if isinstance(base, ZeroRedundancyOptimizer):
        base.consolidate_state_dict(to=0)


def forget(optimizer: Optimizer) -> None:
    """Drop all momenta, as before the first step."""
    base = getattr(optimizer, "base", optimizer)
    (base.optim if isinstance(base, ZeroRedundancyOptimizer) else base).state.clear()


def own_states(optimizer: Optimizer) -> dict[Any, Any]:
    """The states that this worker holds."""
    base = getattr(optimizer, "base", optimizer)
    return dict(base.optim.state if isinstance(base, ZeroRedundancyOptimizer) else base.state)
