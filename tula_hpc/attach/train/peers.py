"""Let a script's workers agree with each other, without use of the script's process group."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tula_hpc.attach.hooks.find_model import name_of, trained_in
from tula_hpc.batches import tensors_of
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.errors import InputError
from tula_hpc.workloads.optimizers import consolidate


def stop_as_others(stop: StopRequest, workers: int) -> None:
    """Note TERM in `stop` alone again where the framework of several workers has wrapped it.

    Lightning's handler sends a tensor to all workers, wherever each of them is at that moment.
    """
    handler = signal.getsignal(signal.SIGTERM)
    wrapped = getattr(handler, "signal_handlers", [])
    if workers > 1 and any(getattr(each, "__self__", None) is stop for each in wrapped):
        stop.install()


class ScriptPeers:
    """All workers of the script that this process runs. Construction is collective.

    They agree by gloo on the host, so that collectives of the script's own group, which may be
    NCCL's, keep their order. They wait for each other for `patience`; None: as long as torch does.

    Attributes:
        device: Device of the script's tensors.

    Raises:
        InputError: There are several workers, and the script has made no process group.
    """

    def __init__(
        self, started: int, patience: timedelta | None = None, model: nn.Module | None = None
    ) -> None:
        self.device = device_of(model)
        is_joined = dist.is_available() and dist.is_initialized()
        if not is_joined and started > 1:
            raise InputError(
                f"the script runs in {started} processes; expected it to call "
                "torch.distributed.init_process_group before it trains"
            )
        self.rank = dist.get_rank() if is_joined else 0
        self.count = dist.get_world_size() if is_joined else 1
        self._group: dist.ProcessGroup | None = None
        if self.count > 1:
            self._group = dist.new_group(backend="gloo", timeout=patience)

    def agree(self, *values: float) -> list[float]:
        """Return the largest of each value over all workers. Collective."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, *values: float) -> list[float]:
        """Return the sum of each value over all workers. Collective."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self._group is None:
            return list(values)
        # not where the script makes its tensors by default, which may be a GPU
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(tensor, op=operation, group=self._group)
        return list(map(float, tensor.tolist()))

    def texts(self, mine: str) -> list[str]:
        """Return every worker's text, by rank. Collective."""
        if self._group is None:
            return [mine]
        own = mine.encode()
        (longest,) = self.agree(float(len(own)))
        # no text has the character 0
        content = bytearray(own.ljust(int(longest) + 1, b"\0"))
        padded = torch.frombuffer(content, dtype=torch.uint8)
        all_of_them = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(all_of_them, padded, group=self._group)
        return [each.numpy().tobytes().rstrip(b"\0").decode() for each in all_of_them]

    def synchronize_device(self) -> None:
        """Wait for the device."""
        synchronize(self.device)


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_of(model: nn.Module | None) -> torch.device:
    """Return the device of a script's model, or without a model torch's current device.

    They differ in a script that names its GPU and never makes it torch's current one: that is then
    the first GPU, another worker's.
    """
    if model is not None:
        return next(model.parameters()).device
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def require_state(name: str, kept: Any) -> None:
    """Refuse to keep what has no state, such as a plain number or a dictionary.

    Raises:
        InputError: It lacks `state_dict` or `load_state_dict`.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(kept, method, None)):
            kind = type(kept).__name__
            raise InputError(f"a {kind} has no {method}", source=f"tula.keep({name}=…)")


def state_of(kept: Any) -> Any:
    """Return a kept object's state; a sharded optimizer's is gathered on rank 0. Collective."""
    if isinstance(kept, torch.optim.Optimizer):
        consolidate(kept)
    return _plain(kept.state_dict())


def _plain(value: Any) -> Any:
    """Return a state with NumPy's numbers as Python's, which load without unpickling code."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def lacking_in(kept: Mapping[str, Any], model: nn.Module, *optimizers: Optimizer) -> str:
    """Say what kept objects lack of a model's weights and optimizers' states; "": nothing.

    An optimizer around another one may leave the inner one's momentum out of its own state. On
    other workers than rank 0 these states may be empty.

    Raises:
        InputError: One of them has no state.
    """
    # accelerate's objects keep everything; a sharded optimizer's state is whole on no worker
    whole = ("save_state", "consolidate_state_dict")
    if not kept or any(hasattr(each, name) for each in kept.values() for name in whole):
        return ""
    for name, each in kept.items():
        require_state(name, each)
    held = _plain_tensors([state_of(each) for each in kept.values()])
    parts = [(f"weights of {name_of(model)}", _plain_tensors(trained_in(model)))]
    for each in optimizers:
        states = _plain_tensors([*each.state.values()])
        remembered = [tensor for tensor in states if tensor.count_nonzero() > 1]
        parts.append((f"state of the {type(each).__name__} that takes the steps", remembered))
    for name, tensors in parts:
        if not all(any(_is_same(tensor, each) for each in held) for tensor in tensors[:1]):
            return (
                f"the {name} would begin anew after a stop, as nothing that is kept "
                f"({', '.join(kept)}) has it in its state: keep that, too; of an optimizer "
                "around another one keep both, the inner one first"
            )
    return ""


def _plain_tensors(state: Any) -> list[torch.Tensor]:
    """Return the tensors of torch's own classes; others, as of few bits, may not be comparable."""
    return [each for each in tensors_of(state) if type(each) in (torch.Tensor, nn.Parameter)]


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor, other.to(tensor.device))
