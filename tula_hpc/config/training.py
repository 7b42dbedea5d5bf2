"""`[training]` of a sweep, with the two presets of adaptive gradient scaling (AGS)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from tula_hpc.config.validation import Spec

Granularity = Literal["element", "tensor", "layer", "model"]
Gate = Literal["paper", "none", "smooth", "smoothed"]
LrScaling = Literal["none", "sqrt", "linear"]


class AgsOptions(NamedTuple):
    """Form of adaptive gradient scaling: the preset with the keys that are given."""

    # reference batch b_small, global; None: it follows the batch, see `following_batch`
    small_batch: int | None
    # b_small is divided by it until the end; None: see `following_shrink`
    small_batch_shrink: float | None
    # threshold of Δ(G)
    delta: float
    # an element, a tensor, a layer or the whole model shares one factor
    granularity: Granularity
    # of the ratio of norms: 1 as in the paper, 2 a gain as AdaScale's
    exponent: float
    # decay of the moving averages of squared norms (of the ratio at "element"), for each update
    smoothing: float
    # epochs in which the factors grow from 1 to their value
    scale_warmup_epochs: float
    # scaled steps; "paper": Δ < δ; "none": all; "smooth": the less the larger Δ/δ is; "smoothed": Δ
    # of smoothed norms < δ
    gate: Gate
    # normalization layers and biases keep the factor 1
    exclude_norms: bool
    # scale the gradient, or the base optimizer's update
    apply: Literal["gradient", "update"]
    # a gradient longer than its moving average is scaled by its own length; only without passes
    spike_guard: bool
    # of the rate, on top, from base_batch to the global batch
    lr_scaling: LrScaling
    # small gradient: an extra pass; or from the workers' own gradients, no pass
    reference: Literal["pass", "free"]
    # between two passes, if any; 0: as often as 2 % of the samples allow
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
# did best with small networks on a part of CIFAR-100
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
    """Return the default's reference batch: base/2 up to a batch of 4·base, then 2·base²/B.

    From 8·base on it is base/4. Steps are the fewer the larger the batch is, and each has to make
    up for more; where they are many, a smaller reference fits the training images better and the
    test images worse.
    """
    less = 2 * base_batch**2 // global_batch
    return max(1, base_batch // 4, min(base_batch // 2, less))


def following_shrink(base_batch: int, global_batch: int, epochs: int, updates: int) -> float:
    """Return the factor by which the default's reference batch shrinks over a training.

    It is 2·B/base, at most 8, in short trainings: up to 60 epochs, and up to 300 updates. From 120
    epochs and 600 updates on it is 1, and between them its exponent falls with the logarithm of
    either, whichever leaves more. In a short training larger factors, late, make up for missing
    steps; in a long one the training images are fitted anyway, and more of it takes accuracy from
    the test images.
    """
    in_short_trainings = min(8.0, max(1.0, 2.0 * global_batch / base_batch))
    return float(in_short_trainings ** max(_shortness(epochs, 120), _shortness(updates, 600)))


def _shortness(count: int, many: int) -> float:
    # 1 up to half of `many`, 0 from `many` on
    return min(1.0, max(0.0, math.log2(many / count)))


# between two checkpoints, unless saving costs too much
CHECKPOINT_MINUTES = 5.0
# share of the samples that a single worker spends on passes though norms are wanted for free
PASS_SHARE = 0.02
Method = Literal["ags", "static", "lbt", "lrs", "sqrt", "lars", "lamb", "polo", "adascale"]

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class TrainingSpec(Spec):
    """`[training]`: method for the large batch, checkpoints and restarts."""

    method: Method = "ags"
    # global; workload.lr was chosen for it, and scaling starts there
    base_batch: int = Field(default=128, ge=1, le=2**30)
    # of the rate; None: 5 where the method needs them
    warmup_epochs: float | None = Field(default=None, ge=0)
    # of AGS: values of the next fourteen keys where they are left out
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
    # gradients are clipped to this norm before they are scaled
    clip_norm: float | None = Field(default=None, gt=0)
    log_interval_steps: int = Field(default=10, ge=1, le=10**9)
    # where the lines of metrics.jsonl go, too; see tracking/trackers.py
    log_to: tuple[TrackerName, ...] = Field(default=(), max_length=3)
    # None: from what saving costs, at most 5
    checkpoint_minutes: float | None = Field(default=None, gt=0, le=1e6)
    # mean time to the first kill without time to save
    interruption_hours: float = Field(default=24.0, gt=0, le=1e6)
    max_requeues: int = Field(default=20, ge=0, le=10**6)
    # relaunches with a smaller batch after lack of memory
    max_fallbacks: int = Field(default=3, ge=0, le=1000)
    # compare measured step times with the plan's prediction
    drift: bool = True
    # time outside the prediction's interval before an event is recorded
    drift_minutes: float = Field(default=1.0, gt=0, le=1e6)
    # a requeue after that event may choose another batch for the same nodes
    replan_on_drift: bool = False
    # log norm, Δ(G) and noise with methods that do not adapt, too
    observe_gradients: bool = True
    # count the applied scales for each line of metrics.jsonl; costs time
    scale_histogram: bool = False

    @property
    def ags(self) -> AgsOptions:
        """Form of adaptive gradient scaling: the preset with the keys that are given."""
        paper = self.preset == "paper" or self.method == "static"
        preset = PAPER if paper else DEFAULT
        values = {name: getattr(self, name) for name in AgsOptions._fields}
        given = {name: value for name, value in values.items() if value is not None}
        if given.get("reference") == "pass":
            preset = preset._replace(update_interval_epochs=PAPER.update_interval_epochs)
        return preset._replace(**given)

    @property
    def adapts(self) -> bool:
        """True if factors are estimated from the gradients."""
        return self.method in ("ags", "adascale")

    @property
    def scales(self) -> bool:
        """True if gradients or updates are multiplied by factors."""
        return self.adapts or self.method == "static"

    @property
    def free_reference(self) -> bool:
        """True if every step needs norms of the workers' own gradients, without a pass."""
        return self.method == "adascale" or (self.method == "ags" and self.ags.reference == "free")

    def reference_batch(self, global_batch: int) -> int:
        """Return the global batch that gradients are compared with; for AdaScale the base batch."""
        if self.method == "adascale":
            return self.base_batch
        return self.ags.small_batch or following_batch(self.base_batch, global_batch)

    @property
    def has_trust_ratios(self) -> bool:
        """True if the base optimizer is LARS or LAMB."""
        return self.layer_wise or self.method in ("lars", "lamb")

    @property
    def gradient_copies(self) -> int:
        """Memory on top of a plain step's forward and backward pass, in copies of the gradient.

        For AGS with passes, while it updates its scale: the reference gradient, and factors of the
        same size from the last update where each element has its own. In local steps of post-local
        SGD: a worker's own gradients beside DDP's idle buckets.
        """
        if self.method == "polo":
            return 1
        if self.method != "ags" or self.ags.reference == "free":
            return 0
        return 2 if self.ags.granularity == "element" else 1

    @property
    def checkpoint_s(self) -> float:
        """Seconds between two checkpoints in the plan; training may choose others unless given."""
        given = self.checkpoint_minutes
        return 60.0 * (CHECKPOINT_MINUTES if given is None else given)

    @model_validator(mode="after")
    def _bounds(self) -> TrainingSpec:
        if self.s_max is not None and self.s_min > self.s_max:
            raise ValueError(
                f"s_min: {self.s_min} is above s_max = {self.s_max}; lower it, or raise s_max"
            )
        options = self.ags
        if self.method != "ags":
            return self
        if options.granularity == "element" and options.reference == "free":
            raise ValueError(
                'reference: "free" knows norms only; granularity = "element" needs '
                'reference = "pass"'
            )
        if options.reference == "pass" and options.update_interval_epochs == 0:
            raise ValueError(
                "update_interval_epochs: an extra pass at every step doubles the work; "
                "expected above 0"
            )
        return self


# what a training script does by itself, so that nothing here has an effect on it
_SCRIPTS_OWN = ("layer_wise", "clip_norm", "warmup_epochs", "scale_histogram")
_OF_LAYERS = "has a rate of its own for each layer"
_OUTSIDE = {
    "lars": _OF_LAYERS,
    "lamb": _OF_LAYERS,
    "polo": "averages models in place of gradients",
}


def check_script(training: TrainingSpec, *, scales: bool) -> None:
    """Refuse what cannot be done to a training script from outside.

    Args:
        training: The table.
        scales: Whether the script takes a factor of its rate, {lr_scale}.

    Raises:
        ValueError: With the key in front.
    """
    method = training.method
    if method in _OUTSIDE:
        raise ValueError(
            f'training.method: "{method}" {_OUTSIDE[method]}, which is not done to a script; '
            'expected "lbt" (its own rate), "ags", "adascale" or "static", or "lrs" or "sqrt" with '
            "{lr_scale} in its arguments"
        )
    if method not in ("lrs", "sqrt") and scales:
        raise ValueError(
            f'training.method: {{lr_scale}} is 1 for every batch with "{method}"; expected "lrs" '
            '(linear) or "sqrt"'
        )
    if training.adapts and not training.free_reference:
        raise ValueError(
            'training.reference: "pass" repeats a part of a step, which is not done to a script; '
            'expected "free"'
        )
    if method in ("lrs", "sqrt") and not scales:
        raise ValueError(
            f'training.method: "{method}" needs {{lr_scale}} in workload.arguments, by which the '
            "script multiplies its learning rate"
        )
    for key in _SCRIPTS_OWN:
        if getattr(training, key) != TrainingSpec.model_fields[key].default:
            raise ValueError(f"training.{key}: a script does that by itself; remove it")
