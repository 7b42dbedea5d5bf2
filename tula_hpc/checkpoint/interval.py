"""Interval between checkpoints, from the cost of saving and the rate of interruptions.

The formula is that of `analysis.costs.interruptions`. The cost of one save, δ, is the time for
which the steps stop while the state is copied, plus the extra time that they take while it is
written. This module only computes numbers. A checkpoint comes about as follows:

1. `Cadence.due` says that the interval is over.
2. `Saving.request` in `background.py` requests a save, unless an earlier one is still being
   written.
3. `Agreement.decide` in `ddp/agreement.py` has all workers save after the same step. At a stop they
   always save.
4. At an epoch's end, a good moment, `Saving.may_save` lets a save come early, and after the last
   epoch there is always one: `_end_epoch` in `training/loop.py` and `attach/train/keeping.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs import interruptions as interruption_costs
from tula_hpc.analysis.costs.pricing import between_preemptions_s
from tula_hpc.config import PricingSpec, TrainingSpec
from tula_hpc.formatting import HOUR_S

# interval before the first save, which comes early so that the cost of a save is known
FIRST_S = 60.0
# first steps, which are slow, and left out of the mean time of a step
WARM_UP_STEPS = 5
# saves over which the mean cost is taken; the cost of earlier ones fades
REMEMBERED = 5
# report an interval that changed by this much
NEWS_RATIO = 1.5


class Interruptions(NamedTuple):
    """Rate at which a training is cut off without time to save, and its evidence."""

    # mean time between two interruptions, assumed before any was seen
    prior_s: float
    # whether the prior is a fact, not a first guess
    is_known: bool = False
    # interruptions before this process
    seen: int = 0
    # time of training before this process
    over_s: float = 0.0

    def mean_s(self, since_s: float) -> float:
        """Return the mean time between interruptions, M = (prior + time) / (1 + seen).

        The prior counts like one interruption seen in a time of `prior_s`. `since_s` is the time of
        training in this process, which has not been cut off.
        """
        if self.is_known:
            return self.prior_s
        return (self.prior_s + self.over_s + since_s) / (1 + self.seen)


def expected_interruptions(
    pricing: PricingSpec, training: TrainingSpec, nodes: int, *, seen: int, over_s: float
) -> Interruptions:
    """Take the rate from spot prices, else from the configuration and past interruptions.

    `seen` interruptions of this training fell into `over_s` seconds of it.
    """
    if pricing.basis == "spot":
        (between_s,) = between_preemptions_s(pricing, np.array([float(nodes)]))
        return Interruptions(float(between_s), is_known=True)
    return Interruptions(training.interruption_hours * HOUR_S, seen=seen, over_s=over_s)


class Work(NamedTuple):
    """Training steps, and the time that they took."""

    steps: int = 0
    seconds: float = 0.0

    def since(self, earlier: Work) -> Work:
        """Return the work done since an earlier moment."""
        return Work(self.steps - earlier.steps, self.seconds - earlier.seconds)


class Cost(NamedTuple):
    """Cost of a save, seconds."""

    # time for which the steps stopped while the state was copied
    stall_s: float
    # extra time that the steps took while the state was written
    slowdown_s: float
    # time until the state was on disk; no cost by itself
    write_s: float

    @property
    def total_s(self) -> float:
        """The cost δ of the save."""
        return self.stall_s + self.slowdown_s


class Cadence:
    """Rank 0's clock of saves, which counts the seconds of steps.

    Wall time does not count: an interruption loses steps, and the cost of saves is bounded by a
    share of the steps' time. The interval follows from measurements unless the user has set one,
    `fixed_s`.
    """

    def __init__(self, interruptions: Interruptions, fixed_s: float | None = None) -> None:
        self.interruptions, self.fixed_s = interruptions, fixed_s
        self.work = Work()
        # work when the last save began
        self.saved = Work()
        # work since which nothing is being written
        self.quiet = Work(WARM_UP_STEPS)
        # mean time of a step while nothing is being written
        self.step_s: float | None = None
        # stall of the save that is being written
        self.stall_s = 0.0
        # cost of the last measured save
        self.last: Cost | None = None
        # δ, mean over the last saves; None before the first one is measured
        self.cost_s: float | None = None
        # number of measured saves, and their total cost
        self.saves, self.spent_s = 0, 0.0
        # interval that was reported last
        self.reported_s: float | None = None

    def worked(self, seconds: float) -> None:
        """Count a step."""
        self.work = Work(self.work.steps + 1, self.work.seconds + seconds)
        if self.work.steps == WARM_UP_STEPS:
            self.quiet = self.work

    @property
    def interval_s(self) -> float:
        """Seconds of steps from one save to the next."""
        if self.fixed_s is not None:
            return self.fixed_s
        if self.cost_s is None:
            return FIRST_S
        between_s = np.array([self.interruptions.mean_s(self.work.seconds)])
        return float(interruption_costs.interval_s(self.cost_s, between_s)[0])

    def due(self) -> bool:
        """Tell whether the interval is over."""
        return self.work.since(self.saved).seconds >= self.interval_s

    @property
    def may_save(self) -> bool:
        """Tell whether an early save, as at an epoch's end, keeps the cost within its bound.

        If the user has set the interval there is no bound.
        """
        if self.fixed_s is not None or self.cost_s is None:
            return True
        least_s = interruption_costs.least_interval_s(self.cost_s)
        return self.work.since(self.saved).seconds >= least_s

    def began(self, stall_s: float) -> None:
        """Count a save that has begun, for which the steps stopped for `stall_s`."""
        self.saved, self.stall_s = self.work, stall_s
        quiet = self.work.since(self.quiet)
        if quiet.steps > 0:
            self.step_s = quiet.seconds / quiet.steps

    def waited(self) -> None:
        """Count a save that training waited for, as at a stop, but not its cost, which differs."""
        self.saved = self.quiet = self.work

    def ended(self, write_s: float) -> None:
        """Count the cost of the save that is now on disk; call it between two steps.

        The slowdown is what the steps since the save began took beyond their usual time. It is at
        most `write_s`, the time from the end of the stall, and about that if no usual time is
        known.
        """
        busy = self.work.since(self.saved)
        usual_s = 0.0 if self.step_s is None else busy.steps * self.step_s
        slowdown_s = min(max(0.0, busy.seconds - usual_s), write_s)
        self.last = Cost(self.stall_s, slowdown_s, write_s)
        self.saves += 1
        self.spent_s += self.last.total_s
        before_s = self.last.total_s if self.cost_s is None else self.cost_s
        self.cost_s = before_s + (self.last.total_s - before_s) / min(self.saves, REMEMBERED)
        # `quiet` may not begin before the end of the warm-up
        self.quiet = max(self.work, self.quiet)

    @property
    def share(self) -> float:
        """Total cost of the measured saves as a share of the steps' time so far."""
        return self.spent_s / self.work.seconds if self.work.seconds > 0.0 else 0.0

    def news(self) -> dict[str, float] | None:
        """Return the cost after the first save, and later if the interval has changed much."""
        if self.last is None:
            return None
        if self.reported_s is not None:
            ratio = self.interval_s / self.reported_s
            if 1 / NEWS_RATIO < ratio < NEWS_RATIO:
                return None
        self.reported_s = self.interval_s
        between_s = self.interruptions.mean_s(self.work.seconds)
        costs = {**self.last._asdict(), "cost_s": self.cost_s or 0.0, "share": self.share}
        return {"interval_s": self.reported_s, **costs, "between_interruptions_s": between_s}
