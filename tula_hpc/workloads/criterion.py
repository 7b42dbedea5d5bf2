"""Loss that a training minimizes, and scores of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tula_hpc.batches import tensors_of
from tula_hpc.config import WorkloadSpec
from tula_hpc.user_code import own_function

# maps (outputs, targets) of a batch to a number for each sample, (batch,)
OfSamples = Callable[[Any, Any], Tensor]
# number of best scores; a label among them is a hit of the second kind
BEST = 5
# label that torch's losses leave out by default (`ignore_index`)
IGNORED = -100


class Criterion(NamedTuple):
    """Functions of outputs and targets of a batch.

    Attributes:
        loss: Mean loss over the samples, a scalar.
        losses: Loss of each sample, (batch,).
        metric: Correct share of each sample, (batch,); None unless the user has a metric.
        hits: Sums over the samples, (2,) of float64: the correct share, and whether the label is
            among the best five scores; NaN if that has no meaning.
    """

    loss: Callable[[Any, Any], Tensor]
    losses: OfSamples
    metric: OfSamples | None
    hits: Callable[[Any, Any], Tensor]


def build_criterion(spec: WorkloadSpec) -> Criterion:
    """Return the user's loss and metric, by default cross-entropy and hits of labels.

    Raises:
        InputError: There is no such function.
    """
    metric = _own("workload.metric", spec.metric)
    losses = _own("workload.loss", spec.loss)
    hits = label_hits if metric is None else partial(_sum_of, metric)
    if losses is None:
        return Criterion(cross_entropy, partial(cross_entropy, reduction="none"), metric, hits)
    return Criterion(partial(_mean_of, losses), losses, metric, hits)


def _own(key: str, name: str | None) -> OfSamples | None:
    return None if name is None else own_function(key, name, ("outputs", "targets"))


def label_hits(outputs: Any, targets: Any) -> Tensor:
    """Count the labels with the best score, and those with one of the best five.

    Args:
        outputs: Scores, (batch, classes). Anything else gives NaN. A sample with a score of NaN has
            no hit.
        targets: Labels, (batch,) of integers. Anything else gives NaN.
    """
    if not _are_scores(outputs, targets):
        device = next(tensors_of(targets)).device
        return torch.full((2,), torch.nan, dtype=torch.float64, device=device)
    best = outputs.topk(min(BEST, outputs.shape[1]), dim=1).indices == targets[:, None]
    best &= ~outputs.isnan().any(dim=1, keepdim=True)
    return torch.stack([best[:, 0].sum(), best.sum()]).double()


def _are_scores(outputs: Any, targets: Any) -> bool:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    integers = not targets.is_floating_point() and not targets.is_complex()
    return outputs.dim() == 2 and targets.shape == outputs.shape[:1] and integers


def labels_without_score(outputs: Any, targets: Any) -> str:
    """Say that labels are beyond a model's scores, for the message of a loss or metric that failed.

    It is "" if all labels have a score, or if these are no scores and labels.
    """
    if not _are_scores(outputs, targets):
        return ""
    classes = outputs.shape[1]
    outside = (targets >= classes) | ((targets < 0) & (targets != IGNORED))
    if not outside.any():
        return ""
    label = int(targets[outside][0])
    more = ", or give the model more classes" if label >= classes else ""
    return (
        f"; a sample has label {label}, and the model gives scores for labels 0 to {classes - 1}: "
        f"correct the data set's labels{more}"
    )


def _mean_of(function: OfSamples, outputs: Any, targets: Any) -> Tensor:
    return function(outputs, targets).mean()


def _sum_of(function: OfSamples, outputs: Any, targets: Any) -> Tensor:
    total = function(outputs, targets).double().sum()
    return torch.stack([total, torch.full_like(total, torch.nan)])


# code of ours that calls the user's loss or metric, and the key that names it
CALLS = {_mean_of.__code__: "workload.loss", _sum_of.__code__: "workload.metric"}
