"""Batches that a script takes in several forward passes, as memory forbids them at once.

For local batch b of a step, and the largest batch of one pass that fits into memory, most:

    k(b)      = the least power of two with b / k <= most, and at least `least`
    t_step(b) = t_step(b / k) + (k − 1) × (t_compute(b / k) − t_optimizer)
    M(b)      = M(b / k)

A step of k passes has k forward and backward passes, one all-reduce and one step of the optimizer.
t_compute is a step without synchronization, which holds the optimizer's part once. Measured steps
of k passes are taken for steps of one pass by the same equation, see `times_of_one_pass`.

Limits: a script that reduces its gradients after every pass, which `no_sync` would spare it, takes
longer than that; where it was measured, measured times count. Waiting for storage that all nodes
share is that of one pass.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tula_hpc.records import StepTimes

Array = NDArray[np.float64]


class Passes(NamedTuple):
    """Number of forward passes in which a step takes a worker's batch."""

    # samples of one pass at most
    most: float = math.inf
    # passes, whatever the batch
    least: int = 1

    def of(self, local_batch: ArrayLike) -> Array:
        """Return k for each local batch, in its shape."""
        batch = np.asarray(local_batch, dtype=np.float64)
        needed = np.exp2(np.ceil(np.log2(np.maximum(batch / self.most, 1.0))))
        return np.asarray(np.maximum(needed, float(self.least)))

    def batch_of_one(self, local_batch: ArrayLike) -> Array:
        """Return the samples of one pass for each local batch."""
        return np.asarray(np.asarray(local_batch, dtype=np.float64) / self.of(local_batch))


def times_of_one_pass(times: StepTimes, passes: int) -> StepTimes:
    """Return the times that a step of one pass would have taken, by the module's equation.

    Computation and wait for data are those of all its passes together.
    """
    if passes == 1:
        return times
    share = 1.0 / passes
    each_s = share * (times.compute_time_s + times.data_time_s)
    others_s = (passes - 1) * each_s

    def alone(step_s: float) -> float:
        # rounds of whole steps and of computation are not the same ones
        return max(step_s - others_s, each_s)

    return times.model_copy(
        update={
            "step_time_s": alone(times.step_time_s),
            "step_time_low_s": alone(times.step_time_low_s),
            "step_time_high_s": alone(times.step_time_high_s),
            "compute_time_s": share * times.compute_time_s,
            "data_time_s": share * times.data_time_s,
        }
    )
