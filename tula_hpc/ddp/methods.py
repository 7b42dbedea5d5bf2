"""Build the optimizer and compute the learning rate of `training.method`.

| method | base optimizer | wrapper |
| --- | --- | --- |
| lbt, lrs, sqrt | the workload's | none: they differ in the learning rate |
| lars, lamb | SGD or AdamW with a rate for each layer | none |
| polo | the workload's | post-local SGD; none with one worker |
| static, ags | the workload's; LARS or LAMB if `layer_wise` | `TulaOptimizer` with its options |
| adascale | the workload's | `TulaOptimizer` with options that make its scale AdaScale's gain |

The learning rate follows the data seen, so that it stays right when the batch changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from tula_hpc.config import SweepSpec, TrainingSpec, WorkloadSpec
from tula_hpc.config.training import LrScaling, following_shrink
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.observer import GradientObserver, StepObserver
from tula_hpc.optim.optimizer import Apply, StaticScaleObserver
from tula_hpc.records import Configuration
from tula_hpc.workloads.optimizers import base_optimizer, norms_and_biases, shards

if TYPE_CHECKING:
    from tula_hpc.optim.post_local_sgd import EpochAverager

# epochs with synchronous steps at the start of post-local SGD, as in the paper
SYNCHRONOUS_EPOCHS = 5


class NoAverager:
    """Null object for methods in which every step uses the gradients of all workers."""

    local = False
    begins = False

    def set_position(self, start: float, end: float) -> None:
        """Do nothing; see `EpochAverager`."""


class Stepper(NamedTuple):
    """Everything that a method puts around a worker's steps."""

    optimizer: Optimizer
    observer: GradientObserver
    averager: EpochAverager | NoAverager


def build_stepper(
    sweep: SweepSpec,
    model: nn.Module,
    parameters: list[nn.Parameter],
    configuration: Configuration,
    samples: int,
) -> Stepper:
    """Build the method's optimizer with its observer.

    `samples` is the size of the training set, by which intervals in epochs become steps.
    """
    training = sweep.training
    batch = configuration.global_batch
    observer: GradientObserver
    base = base_optimizer(
        sweep.workload,
        parameters,
        sharded=shards(sweep.workload, configuration.world_size),
        layer_wise=training.has_trust_ratios,
        exempt=norms_and_biases(model),
    )
    if training.scales:
        scaling = TulaOptimizer(base, **scaling_options(sweep, configuration, samples))
        observer = scaling
        if training.method == "static" and training.observe_gradients:
            observer = StaticScaleObserver(scaling, batch)
        return Stepper(scaling, observer, NoAverager())
    observer = StepObserver(base, batch) if training.observe_gradients else GradientObserver()
    if training.method == "polo" and configuration.world_size > 1:
        # imported late: few trainings need it, and torch's part of it takes a while to import
        from tula_hpc.optim.post_local_sgd import EpochAverager, PostLocalSGD

        averager = EpochAverager(model, synchronous_epochs(sweep.workload.epochs))
        return Stepper(PostLocalSGD(base, averager), observer, averager)
    return Stepper(base, observer, NoAverager())


def synchronous_epochs(epochs: int) -> int:
    """Return the synchronous epochs of post-local SGD: a fifth of all, at least 1, at most 5."""
    return min(SYNCHRONOUS_EPOCHS, max(1, epochs // 5))


def scaling_options(sweep: SweepSpec, configuration: Configuration, samples: int) -> dict[str, Any]:
    """Return the method's options of `TulaOptimizer`; see `build_stepper`."""
    training = sweep.training
    if training.method == "adascale":
        return _adascale(training, configuration, samples)
    options = training.ags
    static = training.method == "static"
    interval = training.pass_interval(configuration.local_batch, configuration.world_size, samples)
    return {
        **scaled_batches(training, configuration),
        "update_interval": None if static else interval,
        "delta": options.delta,
        "granularity": options.granularity,
        "s_max": training.s_max,
        "s_min": training.s_min,
        "static_scale": training.static_scale if static else None,
        "exponent": options.exponent,
        "smoothing": options.smoothing,
        "scale_warmup": round(
            _scale_warmup_epochs(sweep) * _steps_per_epoch(configuration, samples)
        ),
        "gate": options.gate,
        "apply": sweep.scale_applies_to,
        "spike_guard": options.spike_guard,
    }


def _scale_warmup_epochs(sweep: SweepSpec) -> float:
    epochs = sweep.training.ags.scale_warmup_epochs
    if sweep.training.scale_warmup_epochs is not None:
        return epochs
    # not set by the user: the preset's value, but at most a fifth of the training
    return min(epochs, sweep.workload.epochs / 5)


def _adascale(training: TrainingSpec, configuration: Configuration, samples: int) -> dict[str, Any]:
    """Return options of AdaScale (T. Johnson et al. 2020, "AdaScale SGD"): updates times a gain.

        r = (σ² + μ²) / (σ²/S + μ²) = ‖g_b‖² / ‖g_B‖²,  S = B/b,  so that 1 <= r <= S

    Moving averages have the decay max(0, 1 − S/1000), as in that paper. AdaScale's scale-invariant
    iterations are left out: methods are compared over equal epochs, so the learning rate follows
    the data seen. b is the batch that workload.lr was chosen for.
    """
    batches = scaled_batches(training, configuration)
    ratio = batches["large_batch"] / batches["small_batch"]
    interval = training.pass_interval(configuration.local_batch, configuration.world_size, samples)
    return {
        **batches,
        "update_interval": interval,
        "granularity": "model",
        "exponent": 2.0,
        "gate": "none",
        "apply": "update",
        "smoothing": max(0.0, 1.0 - ratio / 1000.0),
        "s_min": 1.0,
    }


def scaled_batches(training: TrainingSpec, configuration: Configuration) -> dict[str, int]:
    """Return b_small and b_large, as options of `TulaOptimizer`."""
    large = configuration.global_batch
    workers = configuration.world_size
    if training.free_reference and workers > 1:
        # computed from norms, so it need not be a whole number of samples per worker
        small = training.reference_batch(large)
    else:
        small = workers * training.reference_share(configuration.local_batch, workers)
    return {"small_batch": min(small, large), "large_batch": large}


class ReferenceBatch:
    """Schedule of b_small over a training: from the configured value it shrinks exponentially.

        b_small(e) = b_small / shrink^(e / E),  at least 1

    E is the number of epochs. `applies_to` is what the factors multiply: of a script, only its
    optimizer shows that, and None means what the sweep says.
    """

    def __init__(
        self,
        sweep: SweepSpec,
        configuration: Configuration,
        samples: int,
        applies_to: Apply | None = None,
    ) -> None:
        batch = configuration.global_batch
        self.first = min(sweep.training.reference_batch(batch), batch)
        applies_to = applies_to or sweep.scale_applies_to
        self.log_shrink = math.log(_shrink(sweep, configuration, samples, applies_to))
        self.epochs = sweep.workload.epochs

    def after(self, epochs_seen: float) -> float:
        """Return b_small after e epochs, from 0 to E."""
        return max(1.0, self.first * math.exp(-self.log_shrink * epochs_seen / self.epochs))


def _shrink(
    sweep: SweepSpec, configuration: Configuration, samples: int, applies_to: Apply
) -> float:
    options = sweep.training.ags
    if sweep.training.method != "ags":
        return 1.0
    if options.small_batch_shrink is not None:
        return options.small_batch_shrink
    # no other value was tried with optimizers whose update is scaled
    if applies_to == "update":
        return 1.0
    epochs = sweep.workload.epochs
    updates = epochs * _steps_per_epoch(configuration, samples)
    return following_shrink(sweep.training.base_batch, configuration.global_batch, epochs, updates)


def _steps_per_epoch(configuration: Configuration, samples: int) -> int:
    return max(1, samples // configuration.global_batch)


# epochs of warm-up of the paper's baselines
WARMUP_EPOCHS = 5.0
# largest share of all epochs for warm-up: a short run must not be all warm-up
LARGEST_WARMUP = 0.2
# methods that need warm-up at any batch
WARMED_UP = ("lars", "lamb", "polo")
SCALING: Mapping[str, LrScaling] = {
    "lrs": "linear",
    "sqrt": "sqrt",
    "lars": "linear",
    "lamb": "sqrt",
}


def learning_rate(sweep: SweepSpec, global_batch: int, epoch: float) -> float:
    """Return the learning rate at an epoch: linear warm-up, then constant, in steps or cosine.

    The epoch is fractional: samples seen over samples per epoch. torch's schedulers count steps,
    and would run ahead after an out-of-memory restart with a smaller batch, when a step is less
    data. This schedule counts data, and the method's rate follows the current batch.

    Warm-up begins at a tenth of the method's rate, or at workload.lr if that is lower: a rate
    that was scaled up more than tenfold starts from the base rate (P. Goyal et al. 2017, "Accurate,
    large minibatch SGD", section 2.2), and no warm-up starts above it. See also `lr_scale` and
    `warmup_epochs`.
    """
    rate = sweep.workload.lr * lr_scale(sweep.training, global_batch)
    warmup = warmup_epochs(sweep, global_batch)
    if epoch >= warmup:
        return rate * _decay(sweep.workload, epoch, warmup)
    start = min(sweep.workload.lr, 0.1 * rate)
    return start + (rate - start) * epoch / warmup


def lr_scale(training: TrainingSpec, global_batch: int) -> float:
    """Return the method's rate divided by workload.lr, which is right for `base_batch`.

    LARS scales linearly, as in the paper (and Y. You et al. 2017, "Large batch training of
    convolutional networks"), LAMB by the square root (Y. You et al. 2020, "Large batch optimization
    for deep learning"); `training.lr_scaling` overrides that for these two and for AGS.
    """
    ratio = global_batch / training.base_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[_lr_scaling(training)]


def _lr_scaling(training: TrainingSpec) -> LrScaling:
    if training.method == "ags":
        return training.ags.lr_scaling
    if training.method in ("lars", "lamb") and training.lr_scaling is not None:
        return training.lr_scaling
    return SCALING.get(training.method, "none")


def warmup_epochs(sweep: SweepSpec, global_batch: int) -> float:
    """Return the epochs of warm-up: training.warmup_epochs, or else a default of the method.

    The default is workload.warmup_epochs. For LARS, LAMB and post-local SGD it is at least
    `WARMUP_EPOCHS` or a fifth of the training, whichever is less; beyond `base_batch`, for which
    the workload's rate was tuned, also for plain training and methods with a scaled rate.
    """
    training, workload = sweep.training, sweep.workload
    if training.warmup_epochs is not None:
        return training.warmup_epochs
    larger = global_batch > training.base_batch and (
        training.method == "lbt" or _lr_scaling(training) != "none"
    )
    if not larger and training.method not in WARMED_UP:
        return workload.warmup_epochs
    return max(min(WARMUP_EPOCHS, LARGEST_WARMUP * workload.epochs), workload.warmup_epochs)


def _decay(workload: WorkloadSpec, epoch: float, warmup: float) -> float:
    if workload.schedule == "step":
        return float(workload.gamma ** sum(epoch >= milestone for milestone in workload.milestones))
    if workload.schedule == "cosine":
        span = max(workload.epochs - warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (epoch - warmup) / span)))
    return 1.0
