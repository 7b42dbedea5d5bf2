"""Activation checkpointing: keep the inputs of a model's blocks, recompute the rest in backward.

T. Chen et al. 2016, "Training deep nets with sublinear memory cost". A block is a composite member
of an nn.Sequential or nn.ModuleList, however deep: a residual block, a layer of a transformer, a
module between poolings. If such a list holds nothing but single layers (VGG), about √n of its n
weighted layers together make a block.

Each block's forward pass runs twice: buffers (BatchNorm's running statistics) change in the first
pass only, and dropout draws the same numbers again. Results are those without checkpointing, bit
for bit if the operators are deterministic. Limits: if a module's output depends on a buffer that
its own forward pass changes (spectral normalization), the recomputation uses the changed buffer;
and a block must not change its own input in place, unless doing so twice changes no more (ReLU).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tula_hpc.errors import InputError

KEY = "workload.activation_checkpointing"
# weighted layers; a shorter list of layers has nothing to gain
FEWEST_LAYERS = 4


def checkpoint_activations(model: nn.Module) -> nn.Module:
    """Make a model's blocks recompute their activations; in place, and all names stay.

    Raises:
        InputError: The model has no blocks.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise InputError(
            f"{type(model).__name__} has no blocks whose activations could be computed again: "
            "expected blocks in an nn.Sequential or nn.ModuleList, or at least "
            f"{FEWEST_LAYERS} layers",
            key=KEY,
        )
    for block in blocks:
        if isinstance(block, nn.Sequential) and _is_long_list(block):
            _split(block)
        else:
            _wrap(block)
    return model


def _wrap(block: nn.Module) -> None:
    forward = type(block).forward

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, types.MethodType(forward, self), *args, **kwargs)

    block.forward = types.MethodType(recomputed, block)


def _split(layers: nn.Sequential) -> None:
    """Run a list of single layers in groups, each of which is recomputed as a block."""

    def grouped(self: nn.Sequential, value: Any) -> Any:
        for group in _groups(self):
            value = _run(self, group, value)
        return value

    layers.forward = types.MethodType(grouped, layers)  # type: ignore[method-assign]


def _run(owner: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (owner.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _BuffersUntouched(owner)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _BuffersUntouched(AbstractContextManager[None]):
    """Context in which modules change copies of their buffers.

    It can be entered again: second derivatives recompute more than once.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._originals: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self._originals = [
            (module, dict(module._buffers)) for module in self._owner.modules() if module._buffers
        ]
        for module, buffers in self._originals:
            for name, buffer in buffers.items():
                module._buffers[name] = None if buffer is None else buffer.clone()

    def __exit__(self, *_: object) -> None:
        for module, buffers in self._originals:
            module._buffers.update(buffers)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost composite members of lists, and lists of single layers.

    A child that contains neither of them is itself a block.
    """
    if _is_long_list(module):
        yield module
        return
    for child in filter(_is_composite, module.children()):
        layers_in_list = _is_list(module) and not any(map(_is_composite, child.children()))
        if not layers_in_list and (_is_list(child) or (not _is_list(module) and _has_lists(child))):
            yield from _blocks(child)
        else:
            yield child


def _groups(layers: nn.Sequential) -> Iterator[nn.Module]:
    """Yield groups of consecutive layers that begin with a weighted layer.

    A layer that works in place must not come first, or it would change the group's own input.
    """
    starts = [i for i, layer in enumerate(layers) if _has_weight(layer)]
    step = max(1, math.isqrt(len(starts)))
    cuts = [0, *starts[step::step], len(layers)]
    return (layers[first:last] for first, last in pairwise(cuts))


def _is_list(module: nn.Module) -> bool:
    # no subclasses, whose forward pass may be their own
    return type(module) in (nn.Sequential, nn.ModuleList)


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_long_list(module: nn.Module) -> bool:
    return (
        type(module) is nn.Sequential
        and not any(map(_is_composite, module))
        and sum(map(_has_weight, module)) >= FEWEST_LAYERS
    )


def _has_lists(module: nn.Module) -> bool:
    return any(
        _is_long_list(inner) or (_is_list(inner) and any(map(_is_composite, inner.children())))
        for inner in module.modules()
    )


def _has_weight(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    # BatchNorm, whose weight is a vector, does not count: it belongs to the layer before
    return isinstance(weight, nn.Parameter) and weight.dim() > 1
