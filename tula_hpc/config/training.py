"""`[training]` of a sweep, with the two presets of adaptive gradient scaling (AGS)."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from tula_hpc.config.validation import Needs, Spec

Granularity = Literal["element", "tensor", "model"]
Gate = Literal["paper", "none"]
LrScaling = Literal["none", "sqrt", "linear"]


class AgsOptions(NamedTuple):
    """Options of adaptive gradient scaling; `TrainingSpec` explains each.

    If `small_batch` is None, `following_batch` gives it; likewise `following_shrink` for
    `small_batch_shrink`.
    """

    small_batch: int | None
    small_batch_shrink: float | None
    delta: float
    granularity: Granularity
    exponent: float
    smoothing: float
    scale_warmup_epochs: float
    gate: Gate
    apply: Literal["gradient", "update"]
    spike_guard: bool
    lr_scaling: LrScaling
    reference: Literal["pass", "free"]
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
    apply="gradient",
    spike_guard=False,
    lr_scaling="none",
    reference="pass",
    update_interval_epochs=1.0,
)
# values that did best with small networks on a part of CIFAR-100
DEFAULT = AgsOptions(
    small_batch=None,
    small_batch_shrink=None,
    delta=0.5,
    granularity="tensor",
    exponent=2.0,
    smoothing=0.95,
    scale_warmup_epochs=5.0,
    gate="none",
    apply="gradient",
    spike_guard=True,
    lr_scaling="none",
    reference="free",
    update_interval_epochs=0.0,
)


def following_batch(base_batch: int, global_batch: int) -> int:
    """Return the default preset's reference batch at a global batch B.

    It is base/2 up to B = 4·base, then 2·base²/B, and base/4 from B = 8·base on. A larger batch has
    fewer steps, and each has to make up for more. With many steps, a smaller reference batch fits
    the training images better and the test images worse.
    """
    less = 2 * base_batch**2 // global_batch
    return max(1, base_batch // 4, min(base_batch // 2, less))


def following_shrink(base_batch: int, global_batch: int, epochs: int, updates: int) -> float:
    """Return the factor by which the default preset's reference batch shrinks over a training.

    In short trainings, of up to 60 epochs or up to 300 updates, it is 2·B/base, from 1 to 8. From
    120 epochs and 600 updates on it is 1. In between its exponent falls with the logarithm of the
    epochs or of the updates, whichever leaves the larger factor. In a short training, larger
    factors of the gradient near the end make up for missing steps. A long training fits the
    training images anyway, and fitting them more costs accuracy on the test images.
    """
    in_short_trainings = min(8.0, max(1.0, 2.0 * global_batch / base_batch))
    return float(in_short_trainings ** max(_shortness(epochs, 120), _shortness(updates, 600)))


def _shortness(count: int, many: int) -> float:
    # 1 up to half of `many`, 0 from `many` on, linear in the logarithm between them
    return min(1.0, max(0.0, math.log2(many / count)))


# share of the samples that a single worker spends on extra passes where norms are otherwise free
PASS_SHARE = 0.02
Method = Literal["ags", "static", "lbt", "lrs", "sqrt", "lars", "lamb", "polo", "adascale"]
# methods whose factors are estimated from the gradients
ADAPTING = ("ags", "adascale")
# methods that multiply gradients or updates by factors
SCALING = (*ADAPTING, "static")

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
OF_AGS = Needs("method", ("ags",))
OF_GATED = Needs("method", ("ags", "static"))
OF_RATES = Needs("method", ("ags", "lars", "lamb"))
WATCHED = Needs("drift", (True,))
UNADAPTED = Needs("method", tuple(name for name in get_args(Method) if name not in ADAPTING))


class TrainingSpec(Spec):
    """`[training]`: the method for the large batch, checkpoints and restarts."""

    method: Method = "ags"
    """Method for the large batch: scaled gradients (ags, adascale, static), a scaled rate (lrs,
    sqrt), rates by layer (lars, lamb), averaged models (polo), or none (lbt, a script's default).
    """
    base_batch: int = Field(default=128, ge=1, le=2**30)
    """Global batch that `workload.lr`, or a script's rate, was chosen for; scaling starts there."""
    warmup_epochs: float | None = Field(default=None, ge=0)
    """Epochs over which the learning rate grows to its value; without it as many as the method
    needs.
    """
    preset: Annotated[Literal["default", "paper"], OF_AGS] = "default"
    """Defaults of the next thirteen keys; paper is the paper's Algorithm 1 to the letter."""
    small_batch: Annotated[int | None, OF_AGS] = Field(default=None, ge=1, le=2**30)
    """Reference batch over all workers; without it half of `base_batch`, and less for large
    batches.
    """
    small_batch_shrink: Annotated[float | None, OF_AGS] = Field(default=None, ge=1, le=1e6)
    """Factor by which the reference batch shrinks over the training; without it chosen by the
    training's length.
    """
    delta: Annotated[float | None, OF_GATED] = Field(default=None, gt=0)
    """Threshold of the gate: relative change of the gradient's squared norm."""
    granularity: Annotated[Granularity | None, OF_AGS] = None
    """Which part of the model shares one factor: an element, a tensor, or all of it."""
    exponent: Annotated[float | None, OF_AGS] = Field(default=None, gt=0, le=4)
    """Exponent to which the ratio of norms is raised to get the factor: 1 in the paper, 2 in
    AdaScale.
    """
    smoothing: Annotated[float | None, OF_AGS] = Field(default=None, ge=0, lt=1)
    """Decay per update of the moving averages of squared norms."""
    scale_warmup_epochs: Annotated[float | None, OF_GATED] = Field(default=None, ge=0)
    """Epochs over which factors grow from 1 to their value."""
    gate: Annotated[Gate | None, OF_GATED] = None
    """Which steps are scaled: those whose change is below `delta` (paper), or all (none)."""
    apply: Annotated[Literal["gradient", "update"] | None, OF_GATED] = None
    """What the factor multiplies: the gradient or the optimizer's update; without it the update if
    the optimizer divides by the gradient's size, else the gradient.
    """
    spike_guard: Annotated[bool | None, OF_AGS] = None
    """Compute the factor of a gradient longer than its moving average from its own length."""
    lr_scaling: Annotated[LrScaling | None, OF_RATES] = None
    """How the learning rate is scaled in addition, from `base_batch` to the global batch."""
    reference: Annotated[Literal["pass", "free"] | None, OF_AGS] = None
    """Source of the small-batch gradient: an extra pass, or the workers' own gradients (free)."""
    update_interval_epochs: Annotated[float | None, OF_AGS] = Field(default=None, ge=0)
    """Epochs between two extra passes; 0: passes take 2 % of the samples."""
    s_max: Annotated[float | None, OF_AGS] = Field(default=None, gt=0)
    """Largest factor; without it (global batch / small_batch) to the power of exponent / 2."""
    s_min: Annotated[float, OF_AGS] = Field(default=0.0, ge=0)
    """Smallest factor."""
    static_scale: Annotated[float, Needs("method", ("static",))] = Field(default=2.0, gt=0)
    """Factor of `method = "static"`."""
    layer_wise: bool = False
    """Use LARS in place of SGD, or LAMB in place of AdamW, with any method around it."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Norm to which longer gradients are shortened before they are scaled."""
    log_interval_steps: int = Field(default=10, ge=1, le=10**9)
    """Steps between two lines of metrics.jsonl."""
    log_to: tuple[TrackerName, ...] = Field(default=(), max_length=3)
    """Trackers that also receive the lines of metrics.jsonl."""
    checkpoint_minutes: float | None = Field(default=None, gt=0, le=1e6)
    """Time between two checkpoints; without it the interval that loses least time at the measured
    cost of a checkpoint, at most 5 minutes.
    """
    interruption_hours: float = Field(default=24.0, gt=0, le=1e6)
    """Assumed mean time between kills that leave no time to save, until the training has seen
    some.
    """
    max_requeues: int = Field(default=20, ge=0, le=10**6)
    """How often one command lets a training go on after preemption or a time limit; requeues by
    Slurm itself do not count.
    """
    max_fallbacks: int = Field(default=3, ge=0, le=1000)
    """How often a training may go on with the next smaller batch after running out of memory."""
    drift: bool = True
    """Compare step times with the plan's prediction while training."""
    drift_minutes: Annotated[float, WATCHED] = Field(default=1.0, gt=0, le=1e6)
    """Time that step times lie outside the prediction's interval before an event is recorded."""
    observe_gradients: Annotated[bool, UNADAPTED] = True
    """Log norm, change and noise of gradients even if the method does not use them."""

    @field_validator("log_to")
    @classmethod
    def _each_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) != len(value):
            raise ValueError("expected each tracker once")
        return value

    @property
    def ags(self) -> AgsOptions:
        """Options of adaptive gradient scaling: the preset, overridden by the keys given here."""
        paper = self.preset == "paper" or self.method == "static"
        preset = PAPER if paper else DEFAULT
        given = {}
        for name in AgsOptions._fields:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if given.get("reference") == "pass":
            preset = preset._replace(update_interval_epochs=PAPER.update_interval_epochs)
        return preset._replace(**given)

    @property
    def adapts(self) -> bool:
        """True if factors are estimated from the gradients."""
        return self.method in ADAPTING

    @property
    def scales(self) -> bool:
        """True if gradients or updates are multiplied by factors."""
        return self.method in SCALING

    @property
    def free_reference(self) -> bool:
        """True if every step needs norms of the workers' own gradients, without an extra pass."""
        return self.method == "adascale" or (self.method == "ags" and self.ags.reference == "free")

    def reference_batch(self, global_batch: int) -> int:
        """Return the global batch that gradients are compared with; for AdaScale the base batch."""
        if self.method == "adascale":
            return self.base_batch
        return self.ags.small_batch or following_batch(self.base_batch, global_batch)

    def reference_share(self, local_batch: int, workers: int) -> int:
        """Return the samples of the reference batch on each worker; BatchNorm needs at least 2."""
        wanted = max(2, self.reference_batch(local_batch * workers) // workers)
        return min(wanted, local_batch)

    def pass_interval(self, local_batch: int, workers: int, samples: int) -> int:
        """Return the number of steps from one reference pass to the next.

        Forms that expect norms at every step without a pass have an interval of 0 epochs. A single
        worker with BatchNorm has no such norms, so its passes take `PASS_SHARE` of the samples.
        """
        batch = local_batch * workers
        epochs = self.ags.update_interval_epochs
        if epochs == 0:
            taken = self.reference_share(local_batch, workers) * workers
            return math.ceil(taken / (PASS_SHARE * batch))
        return max(1, round(epochs * max(1, samples // batch)))

    @property
    def has_trust_ratios(self) -> bool:
        """True if the base optimizer is LARS or LAMB."""
        return self.layer_wise or self.method in ("lars", "lamb")

    @property
    def gradient_copies(self) -> int:
        """Memory on top of a plain step's forward and backward pass, in copies of the gradient.

        AGS with extra passes holds the reference gradient while it updates its scale and, if each
        element has its own factor, the factors of the last update. Local steps of post-local SGD
        hold a worker's own gradients in addition to DDP's idle buckets.
        """
        if self.method == "polo":
            return 1
        if self.method != "ags" or self.ags.reference == "free":
            return 0
        return 2 if self.ags.granularity == "element" else 1

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between two checkpoints; None if these follow from the cost of a checkpoint."""
        return None if self.checkpoint_minutes is None else 60.0 * self.checkpoint_minutes

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
                'reference: "free" gives only norms; granularity = "element" needs '
                'reference = "pass"'
            )
        if options.reference == "pass" and options.update_interval_epochs == 0:
            raise ValueError(
                "update_interval_epochs: an extra pass at every step doubles the work; "
                "expected above 0"
            )
        return self


# keys of [training] for what a training script does by itself; they would have no effect on it
_SCRIPTS_OWN = ("layer_wise", "clip_norm", "warmup_epochs")
_OF_LAYERS = "has a rate of its own for each layer"
_OUTSIDE = {"lars": _OF_LAYERS, "lamb": _OF_LAYERS, "polo": "averages models in place of gradients"}


def check_script(training: TrainingSpec, *, scales: bool, of_study: bool) -> None:
    """Refuse keys of `[training]` that cannot act on a training script from outside.

    The script `scales` if its arguments hold {lr_scale}, a factor of its learning rate. In a column
    `of_study` that factor may be 1, as all columns have the same arguments.
    """
    method = training.method
    if method in _OUTSIDE:
        raise ValueError(
            f'training.method: "{method}" {_OUTSIDE[method]}, which is not possible in a script; '
            'expected "lbt" (its own rate), "ags", "adascale" or "static", or "lrs" or "sqrt" with '
            "{lr_scale} in its arguments"
        )
    if method not in ("lrs", "sqrt") and scales and not of_study:
        raise ValueError(
            f'training.method: {{lr_scale}} is 1 for every batch with "{method}"; expected "lrs" '
            '(linear) or "sqrt"'
        )
    if training.adapts and not training.free_reference:
        raise ValueError(
            'training.reference: "pass" repeats a part of a step, which is not possible in a '
            'script; expected "free"'
        )
    if method in ("lrs", "sqrt") and not scales:
        raise ValueError(
            f'training.method: "{method}" needs {{lr_scale}} in workload.arguments, the factor '
            'of its learning rate: "--lr", "{lr_scale*0.1}" if that rate is 0.1 at base_batch'
        )
    for key in _SCRIPTS_OWN:
        if getattr(training, key) != TrainingSpec.model_fields[key].default:
            raise ValueError(f"training.{key}: a script does that by itself; remove it")
