"""Interval between checkpoints, from the cost of saving and the rate of interruptions.

The formula is that of `analysis.costs.interruptions`. The cost of one save, δ, is the time for
which the steps stand still while the state is copied, plus the time by which they take longer while
it is written. This module knows numbers only; a checkpoint is written so:

1. `Cadence.due` tells that the interval is over.
2. `Saving.request` in `background.py` asks for it, unless an earlier one is still being written.
3. `Agreement.decide` in `ddp/agreement.py` has all workers save after the same step. At a stop they
   save whatever the interval.
4. At an epoch's end, a good moment, `Saving.may_save` lets it come early, and after the last epoch
   there always is one: `_end_epoch` in `training/loop.py` and `attach/train/keeping.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs import interruptions as interruption_costs
from tula_hpc.analysis.costs.pricing import between_preemptions_s
from tula_hpc.config import PricingSpec, TrainingSpec
from tula_hpc.formatting import HOUR_S

# the first save comes early, so that its cost is known
FIRST_S = 60.0
# the first ones are slow, and left out of the mean time of a step
WARM_UP_STEPS = 5
# saves; the cost of earlier ones fades
REMEMBERED = 5
# report an interval that changed by this much
NEWS_RATIO = 1.5


class Interruptions(NamedTuple):
    """Rate at which a training is cut off without time to save, and its evidence."""

    # mean time between two of them, before any was seen
    prior_s: float
    # the prior is a fact, not a first guess
    is_known: bool = False
    seen: int = 0
    # of training, before this process
    over_s: float = 0.0

    def mean_s(self, since_s: float) -> float:
        """Return the mean time between interruptions, M = (prior + time) / (1 + seen).

        It is as if one interruption had been seen in the prior's time before. `since_s` is the time of
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
        """Return the work after an earlier moment."""
        return Work(self.steps - earlier.steps, self.seconds - earlier.seconds)


class Cost(NamedTuple):
    """Cost of a save, seconds."""

    # the steps stood still
    stall_s: float
    # and took longer while it was written
    slowdown_s: float
    # until it was on disk; no cost by itself
    write_s: float

    @property
    def total_s(self) -> float:
        """δ."""
        return self.stall_s + self.slowdown_s


class Cadence:
    """Rank 0's clock of saves, in seconds of steps.

    Wall time does not count: an interruption loses steps, and saves may cost a share of their time.
    The interval follows from measurements unless the user has set one, `fixed_s`.
    """

    def __init__(self, interruptions: Interruptions, fixed_s: float | None = None) -> None:
        self.interruptions, self.fixed_s = interruptions, fixed_s
        self.work = Work()
        # when the last save was begun
        self.saved = Work()
        # since when nothing is being written
        self.quiet = Work(WARM_UP_STEPS)
        # mean while nothing is being written
        self.step_s: float | None = None
        # of the save that is being written
        self.stall_s = 0.0
        self.last: Cost | None = None
        # δ: mean over the last saves; None: none was measured
        self.cost_s: float | None = None
        # measured saves, and their cost together
        self.saves, self.spent_s = 0, 0.0
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
        """Tell whether a save at an epoch's end, say, keeps the bound on the cost.

        If the user has set the interval there is no bound.
        """
        if self.fixed_s is not None or self.cost_s is None:
            return True
        least_s = interruption_costs.least_interval_s(self.cost_s)
        return self.work.since(self.saved).seconds >= least_s

    def began(self, stall_s: float) -> None:
        """Count a save that was begun, for which the steps stood still so long."""
        self.saved, self.stall_s = self.work, stall_s
        quiet = self.work.since(self.quiet)
        if quiet.steps > 0:
            self.step_s = quiet.seconds / quiet.steps

    def waited(self) -> None:
        """Count a save that was waited for, as at a stop: its cost is not that of others."""
        self.saved = self.quiet = self.work

    def ended(self, write_s: float) -> None:
        """Count the cost of the save that is now on disk; call it between two steps.

        The steps since then took longer than as many while nothing was written, by no more than
        `write_s`, the time from the end of the stall: that counts if there is nothing to compare
        them with.
        """
        busy = self.work.since(self.saved)
        usual_s = 0.0 if self.step_s is None else busy.steps * self.step_s
        slowdown_s = min(max(0.0, busy.seconds - usual_s), write_s)
        self.last = Cost(self.stall_s, slowdown_s, write_s)
        self.saves += 1
        self.spent_s += self.last.total_s
        before_s = self.last.total_s if self.cost_s is None else self.cost_s
        self.cost_s = before_s + (self.last.total_s - before_s) / min(self.saves, REMEMBERED)
        # not before the end of the warm-up
        self.quiet = max(self.work, self.quiet)

    @property
    def share(self) -> float:
        """Cost of measured saves as a share of the steps' time so far."""
        return self.spent_s / self.work.seconds if self.work.seconds > 0.0 else 0.0

    def news(self) -> dict[str, float] | None:
        """Return the first save's cost, and later ones if the interval has changed much."""
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
