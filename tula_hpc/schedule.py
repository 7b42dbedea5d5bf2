"""Learning rate as a function of how much data was seen, so that it stays right when the batch changes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tula_hpc.config import SweepSpec, TrainingSpec, WorkloadSpec
from tula_hpc.config.ags import LrScaling

WARMUP_EPOCHS = 5.0  # of the baselines in the paper
LARGEST_WARMUP = 0.2  # of all epochs: a short run must not be all warm-up
WARMED_UP = ("lars", "lamb", "polo")  # at whatever batch
SCALING: Mapping[str, LrScaling] = {"lrs": "linear", "sqrt": "sqrt", "lars": "linear", "lamb": "sqrt"}


def learning_rate(sweep: SweepSpec, global_batch: int, epoch: float) -> float:
    """Rate at a (fractional) epoch: linear warm-up to the method's rate, then constant, steps or a cosine to 0.

    torch's schedulers count steps; after an out-of-memory restart with a smaller batch a step is less data, and the
    schedule would run ahead. This one counts data, and the method's rate follows the batch in force.

    Warm-up begins at a tenth of the method's rate, or at workload.lr where that is lower: a rate that was scaled up
    more than tenfold starts from the base rate (P. Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2),
    and no warm-up starts above it.

    Args:
        sweep: [workload]: lr, schedule, milestones (epochs), gamma, warmup_epochs. [training]: see `lr_scale` and
            `warmup_epochs`.
        global_batch: Over all workers.
        epoch: Samples seen over samples per epoch.
    """
    rate = sweep.workload.lr * lr_scale(sweep.training, global_batch)
    warmup = warmup_epochs(sweep, global_batch)
    if epoch >= warmup:
        return rate * _decay(sweep.workload, epoch, warmup)
    start = min(sweep.workload.lr, 0.1 * rate)
    return start + (rate - start) * epoch / warmup


def lr_scale(training: TrainingSpec, global_batch: int) -> float:
    """The method's rate over workload.lr, which was chosen for `base_batch`: linear, square root, or 1.

    LARS scales linearly, as in the paper (and Y. You et al. 2017, "Large batch training of convolutional networks"),
    LAMB by the root (Y. You et al. 2020, "Large batch optimization for deep learning"); `training.lr_scaling` says
    otherwise for these two and for AGS.
    """
    ratio = global_batch / training.base_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[_scaling(training)]


def _scaling(training: TrainingSpec) -> LrScaling:
    if training.method == "ags":
        return training.ags.lr_scaling
    if training.method in ("lars", "lamb") and training.lr_scaling is not None:
        return training.lr_scaling
    return SCALING.get(training.method, "none")


def warmup_epochs(sweep: SweepSpec, global_batch: int) -> float:
    """Epochs of warm-up: training.warmup_epochs, else what the method needs but at least workload.warmup_epochs.

    The paper's baselines, and AGS with a scaled rate, need `WARMUP_EPOCHS` or a fifth of the training, whichever is
    less; plain training and a rate that is scaled need them beyond `base_batch`: up to it they are what was tuned.
    """
    training, workload = sweep.training, sweep.workload
    if training.warmup_epochs is not None:
        return training.warmup_epochs
    larger = global_batch > training.base_batch and (training.method == "lbt" or _scaling(training) != "none")
    needs = larger or training.method in WARMED_UP
    needed = min(WARMUP_EPOCHS, LARGEST_WARMUP * workload.epochs) if needs else 0.0
    return max(needed, workload.warmup_epochs)


def _decay(workload: WorkloadSpec, epoch: float, warmup: float) -> float:
    """The schedule's factor after the warm-up."""
    if workload.schedule == "step":
        return float(workload.gamma ** sum(epoch >= milestone for milestone in workload.milestones))
    if workload.schedule == "cosine":
        span = max(workload.epochs - warmup, 1e-9)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (epoch - warmup) / span)))
    return 1.0
