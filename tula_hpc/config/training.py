"""`[training]` of a sweep.

The options of adaptive gradient scaling, and its two presets.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from tula_hpc.config.validation import Spec

Granularity = Literal["element", "tensor", "layer", "model"]
Gate = Literal["paper", "none", "smooth", "smoothed"]
LrScaling = Literal["none", "sqrt", "linear"]


class AgsOptions(NamedTuple):
    """The form of adaptive gradient scaling: what each switch of `[training]` comes to."""

    # reference batch b_small, global; None: it follows the batch, see `following_batch`
    small_batch: int | None
    # b_small is divided by so much until the end; None: see `following_shrink`
    small_batch_shrink: float | None
    # threshold of Δ(G)
    delta: float
    # what shares one factor: an element, a tensor, a layer, or the whole model
    granularity: Granularity
    # of the ratio of norms: 1 is the paper's, 2 a gain as AdaScale's
    exponent: float
    # decay of the moving averages of squared norms (of the ratio at "element"), for each update
    smoothing: float
    # the factors grow from 1 to their value over so many epochs
    scale_warmup_epochs: float
    # which steps are scaled: Δ < δ; all; the less the larger Δ/δ is; Δ of smoothed norms < δ
    gate: Gate
    # normalization layers and biases keep the factor 1
    exclude_norms: bool
    # scale the gradient, or what the base optimizer makes of it
    apply: Literal["gradient", "update"]
    # a gradient longer than its moving average is scaled by its own length; without passes only
    spike_guard: bool
    # of the rate, on top, from base_batch to the global batch
    lr_scaling: LrScaling
    # small gradient: an extra pass; or from the workers' own gradients, no pass
    reference: Literal["pass", "free"]
    # between two passes, should there be any; 0: as often as 2 % of the samples allow
    update_interval_epochs: float


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

    From eight times on it is a quarter. Steps are the fewer the larger the batch is, and each has
    to make up for more; where they are many, a smaller reference fits the training images better
    and the test images worse.
    """
    less = 2 * base_batch**2 // global_batch
    return max(1, base_batch // 4, min(base_batch // 2, less))


def following_shrink(base_batch: int, global_batch: int, epochs: int, updates: int) -> float:
    """By how much the default's reference batch shrinks over a training: 2·B/base, at most 8 times, where it is short.

    Short are up to 60 epochs, and up to 300 updates. From 120 epochs and 600 updates on it does not
    shrink, and between them the exponent falls with the logarithm of either, whichever leaves more.
    In a short training larger factors, late, make up for steps that are not taken; in a long one
    the training images are fitted anyway, and more of it takes accuracy from the test images.
    """
    in_short_trainings = min(8.0, max(1.0, 2.0 * global_batch / base_batch))
    return float(in_short_trainings ** max(_shortness(epochs, 120), _shortness(updates, 600)))


def _shortness(count: int, many: int) -> float:
    """1 up to half of `many`, 0 from there on, falling with the logarithm between them."""
    return min(1.0, max(0.0, math.log2(many / count)))


# at most between two checkpoints, unless saving costs too much
CHECKPOINT_MINUTES = 5.0
# of the training's samples, in passes that a single worker takes though norms are wanted for free
PASS_SHARE = 0.02
Method = Literal["ags", "static", "lbt", "lrs", "sqrt", "lars", "lamb", "polo", "adascale"]


class TrainingSpec(Spec):
    """`[training]`: how the large batch is trained, checkpoints and restarts."""

    method: Method = "ags"
    # global; workload.lr was chosen for it: scaling starts there
    base_batch: int = Field(default=128, ge=1, le=2**30)
    # of the rate; None: 5 where the method needs them
    warmup_epochs: float | None = Field(default=None, ge=0)
    # of AGS: what the next fourteen keys are where they are left out
    preset: Literal["default", "paper"] = "default"
    small_batch: int | None = Field(default=None, ge=1, le=2**30)
    small_batch_shrink: float | None = Field(default=None, ge=1, le=1e6)
    delta: float | None = Field(default=None, gt=0)
    granularity: Granularity | None = None
    exponent: float | None = Field(default=None, gt=0, le=4)
    smoothing: float | None = Field(default=None, ge=0, lt=1)
    scale_warmup_epochs: float | None = Field(default=None, ge=0)
    gate: Gate | None = None
    exclude_norms: bool | None = None
    apply: Literal["gradient", "update"] | None = None
    spike_guard: bool | None = None
    lr_scaling: LrScaling | None = None
    reference: Literal["pass", "free"] | None = None
    update_interval_epochs: float | None = Field(default=None, ge=0)
    # None: (global batch / small_batch)^(exponent / 2), at least s_min
    s_max: float | None = Field(default=None, gt=0)
    s_min: float = Field(default=0.0, ge=0)
    # the s of method = "static"
    static_scale: float = Field(default=2.0, gt=0)
    # LARS in place of SGD, LAMB in place of AdamW, whatever the method puts around it
    layer_wise: bool = False
    # gradients are shortened to this norm, before they are scaled
    clip_norm: float | None = Field(default=None, gt=0)
    log_interval_steps: int = Field(default=10, ge=1, le=10**9)
    # None: from what saving costs, at most 5
    checkpoint_minutes: float | None = Field(default=None, gt=0, le=1e6)
    # mean time to the first kill without time to save
    interruption_hours: float = Field(default=24.0, gt=0, le=1e6)
    max_requeues: int = Field(default=20, ge=0, le=10**6)
    # after OOM, relaunch smaller at most so often
    max_fallbacks: int = Field(default=3, ge=0, le=1000)
    # hold measured step times against the plan's prediction
    drift: bool = True
    # beyond its interval for so long: an event says so
    drift_minutes: float = Field(default=1.0, gt=0, le=1e6)
    # after it, a requeue may choose another batch for the same nodes
    replan_on_drift: bool = False
    # norm, Δ(G) and noise are logged of gradients that no method adapts to, too
    observe_gradients: bool = True
    # count the scales that were applied, for each line of metrics.jsonl; costs time
    scale_histogram: bool = False

    @property
    def ags(self) -> AgsOptions:
        """The preset with the keys that are given."""
        paper = self.preset == "paper" or self.method == "static"
        preset = PAPER if paper else DEFAULT
        given = {
            name: getattr(self, name)
            for name in AgsOptions._fields
            if getattr(self, name) is not None
        }
        if given.get("reference") == "pass":
            preset = preset._replace(update_interval_epochs=PAPER.update_interval_epochs)
        return preset._replace(**given)

    @property
    def adapts(self) -> bool:
        """Whether factors are estimated from the gradients."""
        return self.method in ("ags", "adascale")

    @property
    def free_reference(self) -> bool:
        """Whether norms of small gradients are wanted from the workers' own gradients at every step, without a pass."""
        return self.method == "adascale" or (self.method == "ags" and self.ags.reference == "free")

    def reference_batch(self, global_batch: int) -> int:
        """The small batch that gradients are held against, global; AdaScale's is the one that workload.lr is for."""
        if self.method == "adascale":
            return self.base_batch
        return self.ags.small_batch or following_batch(self.base_batch, global_batch)

    @property
    def has_trust_ratios(self) -> bool:
        """Whether the base optimizer is LARS or LAMB."""
        return self.layer_wise or self.method in ("lars", "lamb")

    @property
    def gradient_copies(self) -> int:
        """Gradients' worth of memory on top of a plain step's forward and backward pass.

        While AGS updates its scale: the reference gradient, and factors of the same size from the
        last update where each element has its own. In local steps of post-local SGD: gradients of
        one's own beside DDP's idle buckets.
        """
        if self.method == "polo":
            return 1
        if self.method != "ags" or self.ags.reference == "free":
            return 0
        return 2 if self.ags.granularity == "element" else 1

    @property
    def checkpoint_s(self) -> float:
        """Seconds between two checkpoints that the plan reckons with, and that training keeps where they are given."""
        return 60.0 * (
            CHECKPOINT_MINUTES if self.checkpoint_minutes is None else self.checkpoint_minutes
        )

    @model_validator(mode="after")
    def _bounds(self) -> TrainingSpec:
        if self.s_max is not None and self.s_min > self.s_max:
            raise ValueError(f"s_min: {self.s_min} is above s_max = {self.s_max}")
        options = self.ags
        if (
            self.method == "ags"
            and options.granularity == "element"
            and options.reference == "free"
        ):
            raise ValueError(
                'reference: "free" knows norms only; granularity = "element" needs reference = "pass"'
            )
        if (
            options.reference == "pass"
            and options.update_interval_epochs == 0
            and self.method == "ags"
        ):
            raise ValueError(
                "update_interval_epochs: an extra pass at every step doubles the work; expected above 0"
            )
        return self
