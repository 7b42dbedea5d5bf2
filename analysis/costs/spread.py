"""Uncertainty of a training's whole time: possible errors of each of its parts and of their sum.

Every part has its own 90 % interval. The ends of the sum T = Σ t follow from the ends of the parts
in quadrature, separately below and above:

    high − T = √Σ (high_i − t_i)²        T − low = √Σ (t_i − low_i)²

This is exact for independent normal errors. The errors have separate causes: the model of step
times, nodes and file system at the time of a start, the model of evaluations.

- Steps: the interval of the step-time model, see `step_factors`.
- Starts: the factor e^(±z s √(1 + 1/n)) around the median of n measured starts. s² is their
  variance on a logarithmic scale, pooled with `START_SPREAD`² as if `PRIOR_STARTS` more had been
  measured, since a run has only a handful. Stated and assumed starts: `STATED_SPREAD`.
- Ends of jobs, from the last work until the nodes are free: `END_FACTORS`, see `evaluation`, and a
  second on each side, as accounting counts whole seconds.
- Evaluation: `EvaluationTime.factors`.
- Checkpoints: an assumed cost may be nothing or twice as much, a measured cost half or twice as
  much. Training waits for its last save, which the expected time leaves out: it raises the upper
  end by the time to write it at `SLOW_DISK`, at most by the cost of a save.
- Repeated work of k interruptions, whose number is Poisson-distributed: 1 ± z/√k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.config import PricingSpec

Array = NDArray[np.float64]
Ends = tuple[float, float]

# 90 % of a normal distribution lie within this many standard deviations
Z_90 = 1.645
# standard deviation of a start's logarithm; starts were 0 to 21 % off in seven trainings on the test
# cluster while nothing else ran there
START_SPREAD = 0.15
PRIOR_STARTS = 4
STATED_SPREAD = 0.35
END_FACTORS = (0.5, 2.0)
# accounting subtracts two times in whole seconds
ACCOUNTED_S = 1.0
MEASURED_SAVES = (0.5, 2.0)
ASSUMED_SAVES = (0.0, 2.0)
# bytes per second
SLOW_DISK = 50e6
# least expected number of interruptions in z/√k, which would diverge at 0
FEWEST = 0.01
MOMENT_S = 1e-9
# largest factor: far from all measurements an upper end may be infinite, which JSON has no form for
WIDEST = 1e6


class TimePart(StrEnum):
    """Part of a training's whole time, as `Candidate.wall_parts_s` names it."""

    STARTS = "starts"
    STEPS = "steps"
    EVALUATION = "evaluation"
    CHECKPOINTS = "checkpoints"
    REPEATED = "repeated"
    ENDS = "ends"
    # jobs that failed and left nothing to resume from; the expected time has none
    FAILED = "failed"


class Spread(NamedTuple):
    """Factors between which the parts lie with 90 % probability, on one kind of nodes."""

    starts: Ends
    saves: Ends = ASSUMED_SAVES
    # most seconds that the save at the end takes
    last_save_s: float = 0.0

    def of_parts(
        self, parts_s: Mapping[str, float], pace: Ends, evaluation: Ends, interruption_s: float
    ) -> dict[str, Ends]:
        """Return the interval of each part of `Candidate.wall_parts_s`, seconds.

        `pace` and `evaluation` are the factors of the step time and of evaluations. An interruption
        repeats `interruption_s`: a start and half an interval between checkpoints.
        """
        expected = parts_s.get(TimePart.REPEATED, 0.0) / max(interruption_s, MOMENT_S)
        more = Z_90 / math.sqrt(max(expected, FEWEST))
        factors = {
            TimePart.STARTS: self.starts,
            TimePart.STEPS: pace,
            TimePart.EVALUATION: evaluation,
            TimePart.CHECKPOINTS: self.saves,
            TimePart.REPEATED: (max(0.0, 1.0 - more), 1.0 + more),
            TimePart.ENDS: END_FACTORS,
        }
        found = {}
        for part, (low, high) in factors.items():
            if part in parts_s:
                found[str(part)] = (parts_s[part] * low, parts_s[part] * high)
        if TimePart.CHECKPOINTS in found:
            low, high = found[TimePart.CHECKPOINTS]
            found[str(TimePart.CHECKPOINTS)] = (low, high + self.last_save_s)
        if TimePart.ENDS in found:
            low, high = found[TimePart.ENDS]
            found[str(TimePart.ENDS)] = (max(0.0, low - ACCOUNTED_S), high + ACCOUNTED_S)
        return found


def step_factors(planned_s: Array, model_s: Array, ends_s: Array) -> Array:
    """Return the ends of the intervals around planned step times (n,), as factors (2, n) of them.

    The factors are those of the model's 90 % interval, `ends_s` (2, n), around its prediction. A
    planned time may be a single measurement, off by chance: if the intervals around it and around
    the prediction overlap, the result is widened to hold both values.
    """
    low, high = np.clip(ends_s / model_s, 0.0, WIDEST)
    apart = model_s / planned_s
    agree = (apart * low <= high) & (apart * high >= low)
    return np.stack(
        [
            np.where(agree, np.minimum(low, apart), low),
            np.where(agree, np.maximum(high, apart), high),
        ]
    )


def widened(model_s: Array, ends_s: Array, half: Array) -> Array:
    """Return intervals (2, n) around predictions (n,), widened by a second spread in quadrature.

    `half` (n,) is half the width of the second spread, in logarithms.
    """
    with np.errstate(divide="ignore", over="ignore"):
        low, high = np.hypot(np.log(ends_s / model_s), half)
        return np.asarray(model_s * np.exp(np.stack([-low, high])))


def start_factors(measured_s: Sequence[float]) -> Ends:
    """Return the factors of a start around the median measured start; assumed ones without any."""
    count = len(measured_s)
    if not count:
        half = Z_90 * STATED_SPREAD
        return math.exp(-half), math.exp(half)
    logs = list(map(math.log, measured_s))
    center = fmean(logs)
    square = sum((each - center) ** 2 for each in logs) + PRIOR_STARTS * START_SPREAD**2
    variance = square / (PRIOR_STARTS + count - 1)
    half = Z_90 * math.sqrt(variance * (1.0 + 1.0 / count))
    return math.exp(-half), math.exp(half)


def with_start_and_save(
    pricing: PricingSpec, start_s: float | None, state_bytes: float
) -> PricingSpec:
    """Return the prices with the measured start, and the time to save a state of this size.

    Stated times stay. The time of a save is at most that assumed for a checkpoint of unknown size.
    """
    measured: dict[str, float] = {}
    if pricing.restart_s is None and start_s is not None:
        measured["restart_s"] = start_s
    if pricing.checkpoint_write_s is None and state_bytes > 0:
        measured["checkpoint_write_s"] = last_save_s(state_bytes, pricing.save_s)
    return pricing.model_copy(update=measured)


def last_save_s(state_bytes: float, save_s: float) -> float:
    """Return the seconds that the save at a training's end may take at most."""
    return min(state_bytes / SLOW_DISK, save_s)


def whole_factors(parts_s: Mapping[str, float], intervals: Mapping[str, Ends], pace: Ends) -> Ends:
    """Return the interval of the sum as factors of it; those of the steps if no part is known."""
    whole_s = sum(parts_s.values())
    if whole_s <= 0.0:
        return pace
    below = above = 0.0
    for part, (low, high) in intervals.items():
        below = math.hypot(below, parts_s[part] - low)
        above = math.hypot(above, high - parts_s[part])
    return max(0.0, 1.0 - below / whole_s), 1.0 + above / whole_s
