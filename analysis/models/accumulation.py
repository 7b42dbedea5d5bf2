"""Gradient accumulation in scripts: steps whose batch does not fit into one forward pass.

For a local batch b, with `most` the largest batch of one pass that fits into memory:

    k(b)      = the least power of two with b / k <= most, and at least `least`
    t_step(b) = t_step(b / k) + (k − 1) × (t_compute(b / k) − t_optimizer)
    M(b)      = M(b / k)

A step of k passes has k forward and backward passes, one all-reduce and one step of the optimizer.
t_compute is the time of a step without synchronization, which includes the optimizer once. The same
equation turns measured steps of k passes into steps of one pass, see `times_of_one_pass`.

Limits: a script that reduces its gradients after every pass, instead of using `no_sync`, takes
longer than predicted; measured steps count as measured. Waiting for storage that all nodes share is
counted for one pass only.
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

    # largest number of samples in one pass
    most: float = math.inf
    # lowest number of passes, whatever the batch
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

    The given times of computation and of waiting for data are those of all passes together.
    """
    if passes == 1:
        return times
    share = 1.0 / passes
    each_s = share * (times.compute_time_s + times.data_time_s)
    others_s = (passes - 1) * each_s

    def alone(step_s: float) -> float:
        # steps and computation are timed in different rounds: the difference may be too small
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
