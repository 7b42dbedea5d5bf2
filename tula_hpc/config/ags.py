"""The options of adaptive gradient scaling, and its two presets."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Granularity = Literal["element", "tensor", "layer", "model"]
Gate = Literal["paper", "none", "smooth", "smoothed"]
LrScaling = Literal["none", "sqrt", "linear"]


class AgsOptions(NamedTuple):
    """The form of adaptive gradient scaling: what each switch of `[training]` comes to."""

    small_batch: int | None  # reference batch b_small, global; None: it follows the batch, see `following_batch`
    small_batch_shrink: float | None  # b_small is divided by so much until the end; None: see `following_shrink`
    delta: float  # threshold of Δ(G)
    granularity: Granularity  # what shares one factor: an element, a tensor, a layer, or the whole model
    exponent: float  # of the ratio of norms: 1 is the paper's, 2 a gain as AdaScale's
    smoothing: float  # decay of the moving averages of squared norms (of the ratio at "element"), for each update
    scale_warmup_epochs: float  # the factors grow from 1 to their value over so many epochs
    gate: Gate  # which steps are scaled: Δ < δ; all; the less the larger Δ/δ is; Δ of smoothed norms < δ
    exclude_norms: bool  # normalization layers and biases keep the factor 1
    apply: Literal["gradient", "update"]  # scale the gradient, or what the base optimizer makes of it
    spike_guard: bool  # a gradient longer than its moving average is scaled by its own length; without passes only
    lr_scaling: LrScaling  # of the rate, on top, from base_batch to the global batch
    reference: Literal["pass", "free"]  # small gradient: an extra pass; or from the workers' own gradients, no pass
    update_interval_epochs: float  # between two passes, should there be any; 0: as often as 2 % of the samples allow


PAPER = AgsOptions(
    small_batch=32,
    small_batch_shrink=1.0,
    delta=0.5,
    granularity="element",
    exponent=1.0,
    smoothing=0.0,
    scale_warmup_epochs=0.0,
    gate="paper",
    exclude_norms=False,
    apply="gradient",
    spike_guard=False,
    lr_scaling="none",
    reference="pass",
    update_interval_epochs=1.0,
)
# What did best with small networks on a part of CIFAR-100.
DEFAULT = AgsOptions(
    small_batch=None,
    small_batch_shrink=None,
    delta=0.5,
    granularity="tensor",
    exponent=2.0,
    smoothing=0.95,
    scale_warmup_epochs=5.0,
    gate="none",
    exclude_norms=False,
    apply="gradient",
    spike_guard=True,
    lr_scaling="none",
    reference="free",
    update_interval_epochs=0.0,
)


def following_batch(base_batch: int, global_batch: int) -> int:
    """Reference batch of the default: half of the batch that the rate is for; from four times that on less, 2·base²/B.

    From eight times on it is a quarter. Steps are the fewer the larger the batch is, and each has to make up for more;
    where they are many, a smaller reference fits the training images better and the test images worse.
    """
    less = 2 * base_batch**2 // global_batch
    return max(1, base_batch // 4, min(base_batch // 2, less))


def following_shrink(base_batch: int, global_batch: int, epochs: int, updates: int) -> float:
    """By how much the default's reference batch shrinks over a training: 2·B/base, at most 8 times, where it is short.

    Short are up to 60 epochs, and up to 300 updates. From 120 epochs and 600 updates on it does not shrink, and between
    them the exponent falls with the logarithm of either, whichever leaves more. In a short training larger factors,
    late, make up for steps that are not taken; in a long one the training images are fitted anyway, and more of it
    takes accuracy from the test images.
    """
    in_short_trainings = min(8.0, max(1.0, 2.0 * global_batch / base_batch))
    return float(in_short_trainings ** max(_shortness(epochs, 120), _shortness(updates, 600)))


def _shortness(count: int, many: int) -> float:
    """1 up to half of `many`, 0 from there on, falling with the logarithm between them."""
    return min(1.0, max(0.0, math.log2(many / count)))
