"""Optimizers by name, plain or layer-wise, and ZeRO stage 1: each worker keeps a share of states.

S. Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
stage 1. Every worker updates its share of the parameters and sends them to the others; the result
is that of the plain optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from tula_hpc.config import WorkloadSpec

# nn.RMSNorm is younger than the oldest torch that is supported; its weight is a vector, as all
# others' but LayerNorm's
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
# of names and shapes of one worker's states
MOST_DESCRIPTION_BYTES = 64 * 1024**2
DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.int64,
    )
}


def norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return parameters that layer-wise rates and weight decay usually leave out.

    These are the parameters of normalization layers, and all vectors: biases, and the scales that
    some models have beside their weights.
    """
    of_norms = set()
    for module in model.modules():
        if isinstance(module, _NORMS):
            of_norms |= {id(p) for p in module.parameters(recurse=False)}
    return [p for p in model.parameters() if id(p) in of_norms or p.dim() <= 1]


def layers(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the module that holds them, as weight and bias of a convolution.

    A parameter that several modules share belongs to the first of them.
    """
    left = {id(p): p for p in parameters}
    found = []
    for module in model.modules():
        layer = [left.pop(id(p)) for p in module.parameters(recurse=False) if id(p) in left]
        if layer:
            found.append(layer)
    return found


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """ZeRO stage 1 over the default process group that gathers its states without pickle.

    torch's `consolidate_state_dict` pickles each worker's state, and the others unpickle the bytes
    that come over the network: a stranger in the process group could run code on all nodes. Here a
    worker sends a description in JSON and then its tensors; the receiver checks the description
    against its own parameters.
    """

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the states of all workers together on worker `to`, on the CPU. Collective.

        Raises:
            ValueError: A worker describes states that cannot be those of its parameters.
        """
        # torch's own, which its stubs do not know
        torch_own: Any = self
        torch_own._sync_param_groups(self.param_groups, self.optim.param_groups)
        own: dict[int, dict[str, Any]] = self.optim.state_dict()["state"]
        gathered = []
        for rank in range(self.world_size):
            groups = [group["params"] for group in torch_own._partition_parameters()[rank]]
            parameters = [parameter for group in groups for parameter in group]
            state: dict[int, dict[str, Any]] = {}
            if rank == self.rank:
                for index, values in own.items():
                    state[index] = {name: _on_cpu(value) for name, value in values.items()}
            # the worker that gathers has nothing to send
            if rank == self.rank != to:
                _send(own, rank, torch_own._default_device)
            elif rank not in (self.rank, to):
                state = _receive(parameters, rank, torch_own._default_device)
            gathered.append({"state": state, "param_groups": _numbered(groups)})
        # `state_dict` reads this
        self._all_state_dicts = gathered if self.rank == to else []


def _numbered(groups: Sequence[Sequence[Tensor]]) -> list[dict[str, list[int]]]:
    """Return the groups as an optimizer's state has them: parameters counted from 0."""
    numbered = []
    first = 0
    for group in groups:
        numbered.append({"params": list(range(first, first + len(group)))})
        first += len(group)
    return numbered


def _send(states: dict[int, dict[str, Any]], rank: int, device: torch.device) -> None:
    """Broadcast this worker's states: the description's length, the description, each tensor."""
    entries: list[list[Any]] = []
    tensors: list[Tensor] = []
    for index, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                entries.append([index, name, str(value.dtype), list(value.shape)])
                tensors.append(value)
            else:
                entries.append([index, name, "", value])
    text = bytearray(json.dumps(entries).encode())
    description = torch.frombuffer(text, dtype=torch.uint8).to(device)
    dist.broadcast(torch.tensor([description.numel()], device=device), src=rank)
    dist.broadcast(description, src=rank)
    for tensor in tensors:
        dist.broadcast(tensor.detach().to(device).contiguous(), src=rank)


def _receive(
    parameters: Sequence[Tensor], rank: int, device: torch.device
) -> dict[int, dict[str, Any]]:
    """Return the states that another worker broadcasts, on the CPU."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(length, src=rank)
    if not 0 < int(length) <= MOST_DESCRIPTION_BYTES:
        raise ValueError(
            f"worker {rank} sends a description of {int(length)} bytes of its optimizer's state"
        )
    description = torch.zeros(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(description, src=rank)
    states: dict[int, dict[str, Any]] = {}
    for index, name, dtype, content in json.loads(bytes(description.cpu().tolist())):
        value: Any = content
        if dtype:
            value = _empty_like_sent(parameters[index], dtype, content, device)
            dist.broadcast(value, src=rank)
            value = value.cpu()
        states.setdefault(index, {})[name] = value
    return states


def _empty_like_sent(
    parameter: Tensor, dtype: str, shape: Sequence[int], device: torch.device
) -> Tensor:
    """Make room for a state, which has the shape of its parameter, or one number.

    Raises:
        ValueError: It has neither, or is of no known type.
    """
    possible = (parameter.shape, torch.Size([]), torch.Size([1]))
    if dtype not in DTYPES or torch.Size(shape) not in possible:
        of_parameter = f"of a parameter of shape {tuple(parameter.shape)}"
        raise ValueError(f"a worker sends a state {dtype} {shape} {of_parameter}")
    return torch.zeros(shape, dtype=DTYPES[dtype], device=device)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def base_optimizer(
    workload: WorkloadSpec,
    parameters: Sequence[nn.Parameter],
    *,
    sharded: bool = False,
    layer_wise: bool = False,
    exempt: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """Return SGD with momentum or AdamW, or their layer-wise forms LARS and LAMB.

    Args:
        workload: Optimizer and its numbers.
        parameters: Parameters to train.
        sharded: Whether the states are divided over the workers of the default process group.
        layer_wise: LARS (Y. You et al. 2017) in place of SGD, LAMB (Y. You et al. 2020) in place of
            AdamW: each parameter's update is multiplied by its trust ratio.
        exempt: Parameters that LARS and LAMB treat as SGD and Adam do, without trust ratio and
            weight decay.
    """
    kind: type[Optimizer] = torch.optim.SGD
    # in this order, which checkpoints keep
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
    """Return timm's groups: trust ratios apply with weight decay, or always on request."""
    names = {id(p) for p in exempt}
    adapted = [p for p in parameters if id(p) not in names]
    others = [p for p in parameters if id(p) in names]
    groups = [{"params": adapted, "always_adapt": True}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def shards(workload: WorkloadSpec, world_size: int) -> bool:
    """Tell whether the states are divided, which takes several workers."""
    return workload.zero_stage == 1 and world_size > 1


def zero_share(parameters: Sequence[nn.Parameter], world_size: int) -> list[nn.Parameter]:
    """Return the largest share that `ZeroRedundancyOptimizer` gives to a worker.

    It goes through the parameters, largest first, and gives each to the worker with the least.
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
    base = getattr(optimizer, "base", optimizer)
    if isinstance(base, ZeroRedundancyOptimizer):
        base.consolidate_state_dict(to=0)


def forget(optimizer: Optimizer) -> None:
    """Drop all momenta, as before the first step."""
    _plain(optimizer).state.clear()


def own_states(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the states that this worker holds."""
    return dict(_plain(optimizer).state)


def _plain(optimizer: Optimizer) -> Optimizer:
    base: Any = getattr(optimizer, "base", optimizer)
    plain: Optimizer = base.optim if isinstance(base, ZeroRedundancyOptimizer) else base
    return plain
