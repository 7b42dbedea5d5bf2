"""Nodes that may be taken away: how often to checkpoint, and what a training then takes.

Preemptions are taken as a Poisson process with mean time M between them. With a checkpoint of δ seconds after every τ
seconds of work and R seconds to restart, work of T_s seconds takes on average (J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006, equations 20 and 37)

    T = M · e^(R/M) · (e^((τ + δ)/M) − 1) · T_s / τ
    τ = √(2δM) · (1 + √(δ/2M)/3 + (δ/2M)/9) − δ     for δ < 2M, else M

The first term of τ alone is the older estimate of J. W. Young (Communications of the ACM 17, 1974). A job of N nodes
ends with the first of them: where M is known per node, the job has M/N. Waiting for new nodes is not in T: it is not
paid for. Nor is the first start of the job, which `requeue` adds whatever the price.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MIN_INTERVAL_S = 10.0  # training asks about once a second whether it should save; below this nothing is gained


def best_interval_s(write_s: float, between_s: Array) -> Array:
    """Seconds of work between two checkpoints that make the expected time least (Daly, equation 37).

    Args:
        write_s: δ, seconds to write a checkpoint, 0 or more.
        between_s: M, mean seconds between two preemptions of the job, positive.
    """
    ratio = write_s / (2.0 * between_s)
    higher_order = np.sqrt(2.0 * write_s * between_s) * (1.0 + np.sqrt(ratio) / 3.0 + ratio / 9.0) - write_s
    return np.maximum(np.where(ratio < 1.0, higher_order, between_s), MIN_INTERVAL_S)


def expected_time_s(work_s: Array, interval_s: Array, between_s: Array, *, write_s: float, restart_s: float) -> Array:
    """Expected seconds for so much work, preemptions included (Daly, equation 20); infinite where none gets through.

    Work shorter than an interval is one segment, with as large a share of a checkpoint as it is of the interval: what
    is spent on checkpoints is the same share of all work, see `pricing.bill`.

    Args:
        work_s: T_s, seconds without preemptions and checkpoints, 0 or more.
        interval_s: τ, seconds of work between two checkpoints, positive.
        between_s: M, as above.
        write_s: δ.
        restart_s: R, seconds from the start of a job to its first step.
    """
    segment_s = np.where(work_s > 0.0, np.minimum(interval_s, work_s), interval_s)
    saved_s = segment_s * (1.0 + write_s / interval_s)
    with np.errstate(over="ignore"):
        segment = between_s * np.exp(restart_s / between_s) * np.expm1(saved_s / between_s)
        return np.asarray(segment * (work_s / segment_s))
