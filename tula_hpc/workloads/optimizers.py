"""The workload's optimizer, plain or layer-wise, and ZeRO stage 1: each worker keeps its share of the states.

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
from tula_hpc.workloads.sharded_optimizer import ShardedOptimizer


def base_optimizer(
    workload: WorkloadSpec,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool = False,
    layer_wise: bool = False,
    exempt: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """SGD with momentum, or AdamW; or what makes their rate layer-wise, LARS and LAMB.

    Args:
        workload: Which one, and its numbers.
        parameters: What is trained.
        sharded: Whether the states are divided over the workers of the default process group.
        layer_wise: LARS (Y. You et al. 2017) in place of SGD, LAMB (Y. You et al. 2020) in place of AdamW: each
            parameter's update is multiplied by its trust ratio.
        exempt: Parameters that LARS and LAMB treat as SGD and Adam do, without trust ratio and weight decay.
    """
    kind, numbers = _layer_wise(workload) if layer_wise else _plain(workload)
    groups = _groups(parameters, exempt) if layer_wise else parameters
    if sharded:
        return ShardedOptimizer(groups, kind, **numbers)
    return kind(groups, **numbers)


def _plain(workload: WorkloadSpec) -> tuple[type[Optimizer], dict[str, Any]]:
    if workload.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": workload.lr, "weight_decay": workload.weight_decay}
    numbers = {"lr": workload.lr, "momentum": workload.momentum, "weight_decay": workload.weight_decay}
    return torch.optim.SGD, numbers


def _layer_wise(workload: WorkloadSpec) -> tuple[type[Optimizer], dict[str, Any]]:
    """With timm's trust coefficient and moments, which are the papers'.

    LAMB as published does not clip gradients by their norm, as timm's would; training.clip_norm does that.
    """
    lars, lamb = layer_wise_kinds()
    kind, numbers = _plain(workload)
    return (lars, numbers) if kind is torch.optim.SGD else (lamb, {**numbers, "max_grad_norm": None})


def layer_wise_kinds() -> tuple[type[Optimizer], type[Optimizer]]:
    """LARS and LAMB. Their library takes seconds and tens of megabytes: it is imported only where it is used."""
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    return Lars, Lamb


def _groups(parameters: Sequence[nn.Parameter], exempt: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """In timm there is a trust ratio where there is weight decay, or always on request."""
    names = {id(p) for p in exempt}
    adapted = [p for p in parameters if id(p) not in names]
    others = [p for p in parameters if id(p) in names]
    groups = [{"params": adapted, "always_adapt": True}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


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
