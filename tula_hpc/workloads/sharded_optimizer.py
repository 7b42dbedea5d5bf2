"""ZeRO stage 1 whose divided states come together as numbers.

torch's `ZeroRedundancyOptimizer.consolidate_state_dict` pickles each worker's state, and the others unpickle what comes
over the network: whoever gets into the process group runs code on all nodes. Here a worker sends a description in JSON
and then its tensors; what the description may ask for is held against the receiver's own parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["ShardedOptimizer"]

# of names and shapes of one worker's states
MOST_DESCRIPTION_BYTES = 64 * 1024**2
DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
}


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Divide an optimizer's states over the workers of the default process group."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the states of all workers together on worker `to`, on the CPU. Collective.

        Raises:
            ValueError: A worker describes states that cannot be those of its parameters.
        """
        self._sync_param_groups(self.param_groups, self.optim.param_groups)  # type: ignore[attr-defined] # torch's own
        own: dict[int, dict[str, Any]] = self.optim.state_dict()["state"]
        gathered = []
        for rank in range(self.world_size):
            parts = self._partition_parameters()[rank]  # type: ignore[attr-defined]
            parameters = [parameter for group in parts for parameter in group["params"]]
            state: dict[int, dict[str, Any]] = {}
            if rank == self.rank:
                state = {index: {name: _on_cpu(value) for name, value in own[index].items()} for index in own}
            # the worker that gathers has nothing to send
            if rank == self.rank != to:
                _send(own, rank, self._default_device)  # type: ignore[attr-defined]
            elif rank not in (self.rank, to):
                state = _receive(parameters, rank, self._default_device)  # type: ignore[attr-defined]
            gathered.append({"state": state, "param_groups": _numbered([group["params"] for group in parts])})
        # what `state_dict` reads
        self._all_state_dicts = gathered if self.rank == to else []


def _numbered(groups: Sequence[Sequence[Tensor]]) -> list[dict[str, list[int]]]:
    """Return the parameter groups of a worker's own optimizer, which counts its parameters from 0."""
    numbered, first = [], 0
    for group in groups:
        numbered.append({"params": list(range(first, first + len(group)))})
        first += len(group)
    return numbered


def _send(states: dict[int, dict[str, Any]], rank: int, device: torch.device) -> None:
    """Broadcast this worker's states: the length of the description, the description, each tensor."""
    entries: list[list[Any]] = []
    tensors: list[Tensor] = []
    for index, state in states.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                entries.append([index, name, str(value.dtype), list(value.shape)])
                tensors.append(value)
            else:
                entries.append([index, name, "", value])
    description = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8).to(device)
    dist.broadcast(torch.tensor([description.numel()], device=device), src=rank)
    dist.broadcast(description, src=rank)
    for tensor in tensors:
        dist.broadcast(tensor.detach().to(device).contiguous(), src=rank)


def _receive(parameters: Sequence[Tensor], rank: int, device: torch.device) -> dict[int, dict[str, Any]]:
    """Return the states that another worker broadcasts, on the CPU."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.broadcast(length, src=rank)
    if not 0 < int(length) <= MOST_DESCRIPTION_BYTES:
        raise ValueError(f"worker {rank} sends a description of {int(length)} bytes of its optimizer's state")
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


def _empty_like_sent(parameter: Tensor, dtype: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Make room for a tensor: a state is as large as its parameter, or one number.

    Raises:
        ValueError: It is neither, or of no known type.
    """
    if dtype not in DTYPES or torch.Size(shape) not in (parameter.shape, torch.Size([]), torch.Size([1])):
        raise ValueError(f"a worker sends a state {dtype} {shape} of a parameter of shape {tuple(parameter.shape)}")
    return torch.zeros(shape, dtype=DTYPES[dtype], device=device)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
