"""Learning rate as a function of how much data was seen, so that it stays right when the batch changes."""

from __future__ import annotations

import math

from tula_hpc.config import WorkloadSpec


def learning_rate(workload: WorkloadSpec, epoch: float) -> float:
    """Rate at a (fractional) epoch: linear warm-up from 1/10 of the rate, then constant, steps or a cosine to 0.

    torch's schedulers count steps; after an out-of-memory restart with a smaller batch a step is less data, and the
    schedule would run ahead. This one counts data.

    Args:
        workload: lr, schedule, milestones (epochs), gamma, warmup_epochs.
        epoch: Samples seen over samples per epoch.
    """
    if epoch < workload.warmup_epochs:
        return workload.lr * (0.1 + 0.9 * epoch / workload.warmup_epochs)
    if workload.schedule == "step":
        return workload.lr * float(workload.gamma ** sum(epoch >= milestone for milestone in workload.milestones))
    if workload.schedule == "cosine":
        span = max(workload.epochs - workload.warmup_epochs, 1e-9)
        progress = min(1.0, (epoch - workload.warmup_epochs) / span)
        return workload.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return workload.lr
