"""Which parameters belong together, and which are normalization layers' or biases."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# nn.RMSNorm is younger than the oldest torch that is supported; its weight is a vector, as all others' but LayerNorm's
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that layer-wise rates and weight decay usually leave out: of normalization layers, and all vectors.

    A bias is a vector. So are scales that some models have beside their weights.
    """
    of_norms = {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
    return [p for p in model.parameters() if id(p) in of_norms or p.dim() <= 1]


def layers(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The given parameters by the module that they belong to directly, as weight and bias of a convolution.

    A parameter that several modules share belongs to the first of them.
    """
    left = {id(p): p for p in parameters}
    found = [[left.pop(id(p)) for p in m.parameters(recurse=False) if id(p) in left] for m in model.modules()]
    return [layer for layer in found if layer]
