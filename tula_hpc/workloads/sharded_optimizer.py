"""ZeRO stage 1: each worker keeps a share of the optimizer's states.

S. Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
stage 1. Every worker updates its share of the parameters and sends them to the others; the result
is that of the plain optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from tula_hpc.batches import map_tensors

# largest description that a worker may send of the names and shapes of its states
MOST_DESCRIPTION_BYTES = 64 * 1024**2
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = {str(dtype): dtype for dtype in (*FLOATS, torch.int32, torch.int64)}


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
        # for members of torch's class that its stubs do not know
        torch_own: Any = self
        torch_own._sync_param_groups(self.param_groups, self.optim.param_groups)
        own: dict[int, dict[str, Any]] = self.optim.state_dict()["state"]
        gathered = []
        for rank in range(self.world_size):
            groups = [group["params"] for group in torch_own._partition_parameters()[rank]]
            parameters = [parameter for group in groups for parameter in group]
            state: dict[int, dict[str, Any]] = {}
            if rank == self.rank:
                state = map_tensors(lambda tensor: tensor.detach().cpu(), own)
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
        ValueError: The state has another shape, or is of no known type.
    """
    possible = (parameter.shape, torch.Size([]), torch.Size([1]))
    if dtype not in DTYPES or torch.Size(shape) not in possible:
        of_parameter = f"of a parameter of shape {tuple(parameter.shape)}"
        raise ValueError(f"a worker sends a state {dtype} {shape} {of_parameter}")
    return torch.zeros(shape, dtype=DTYPES[dtype], device=device)
