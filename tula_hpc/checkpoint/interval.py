"""How often a training saves: from what saving costs it, and from how often it is cut off; numbers only.

The interval is that of `analysis.checkpoints`. What one save costs the training, δ, is the time for
which the steps stand still while the state is copied, and by how much longer they take while it is
written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.costs import interruptions as checkpoints
from tula_hpc.analysis.costs.pricing import SECONDS_PER_HOUR, between_preemptions_s
from tula_hpc.config import PricingSpec, TrainingSpec

# the first save comes early, so that its cost is known
FIRST_S = 60.0
# slow ones, which say nothing about the steps while nothing is written
WARM_UP_STEPS = 5
# saves; what the ones before them cost fades
REMEMBERED = 5
# an interval that changed by so much is worth a line
NEWS_RATIO = 1.5


class Interruptions(NamedTuple):
    """How often a training is cut off without time to save, and what that is taken from."""

    # mean time between two of them, before any was seen
    prior_s: float
    # the prior is a fact, not a first guess
    is_known: bool = False
    seen: int = 0
    # of training, before this process
    over_s: float = 0.0

    def mean_s(self, since_s: float) -> float:
        """M after so many further seconds: (prior + time) / (1 + seen), as if one more had been seen after the prior.

        Args:
            since_s: Of training in this process, which has not been cut off.
        """
        return (
            self.prior_s
            if self.is_known
            else (self.prior_s + self.over_s + since_s) / (1 + self.seen)
        )


def expected_interruptions(
    pricing: PricingSpec, training: TrainingSpec, nodes: int, *, seen: int, over_s: float
) -> Interruptions:
    """From spot prices, which say how often nodes are taken away; else from the configuration and what was seen.

    Args:
        pricing: Of the cluster.
        training: Its `interruption_hours`.
        nodes: Of the training.
        seen: Interruptions of this training so far.
        over_s: In so many seconds of training.
    """
    if pricing.basis == "spot":
        return Interruptions(
            float(between_preemptions_s(pricing, np.array([float(nodes)]))[0]), is_known=True
        )
    return Interruptions(training.interruption_hours * SECONDS_PER_HOUR, seen=seen, over_s=over_s)


def interval_s(cost_s: float, between_s: float) -> float:
    """Seconds of training steps between two saves, of one training; see `checkpoints.interval_s`."""
    return float(checkpoints.interval_s(cost_s, np.array([between_s]))[0])


class Work(NamedTuple):
    """Training steps that were taken, and the time that they took."""

    steps: int = 0
    seconds: float = 0.0

    def since(self, earlier: Work) -> Work:
        """What came after that."""
        return Work(self.steps - earlier.steps, self.seconds - earlier.seconds)


class Cost(NamedTuple):
    """What a save cost, seconds."""

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
    """Rank 0's clock of saves. It counts the seconds of steps: a kill costs them, and the bound is a share of them.

    Args:
        interruptions: For M.
        fixed_s: The interval, where the user has set one; None: it follows from what is measured.
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
        # δ: mean over the last saves; None: not one was measured
        self.cost_s: float | None = None
        # measured, and what they cost together
        self.saves, self.spent_s = 0, 0.0
        self.told_s: float | None = None

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
        return interval_s(self.cost_s, self.interruptions.mean_s(self.work.seconds))

    def due(self) -> bool:
        """Whether the interval is over."""
        return self.work.since(self.saved).seconds >= self.interval_s

    @property
    def may_save(self) -> bool:
        """Whether a save at a good moment, as the end of an epoch is one, keeps the bound on the cost.

        Where the user has set the interval there is no bound.
        """
        if self.fixed_s is not None or self.cost_s is None:
            return True
        return self.work.since(self.saved).seconds >= checkpoints.least_interval_s(self.cost_s)

    def began(self, stall_s: float) -> None:
        """A save was begun, for which the steps stood still so long."""
        self.saved, self.stall_s = self.work, stall_s
        quiet = self.work.since(self.quiet)
        if quiet.steps > 0:
            self.step_s = quiet.seconds / quiet.steps

    def waited(self) -> None:
        """A save was begun and waited for, as at a stop: it says nothing about one that is not."""
        self.saved = self.quiet = self.work

    def ended(self, write_s: float) -> None:
        """What was begun is on disk; call it between two steps.

        The steps since then took longer than as many while nothing was written, by no more than the
        time of writing: that counts where there is nothing to compare them with.

        Args:
            write_s: From the end of the stall.
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
        """What measured saves cost, of the training steps' time so far."""
        return self.spent_s / self.work.seconds if self.work.seconds > 0.0 else 0.0

    def news(self) -> dict[str, float] | None:
        """What is worth a line after a save: what the first one cost, and when the interval has changed by much."""
        if self.last is None or not self._has_changed():
            return None
        self.told_s = self.interval_s
        between_s = self.interruptions.mean_s(self.work.seconds)
        costs = {**self.last._asdict(), "cost_s": self.cost_s or 0.0, "share": self.share}
        return {"interval_s": self.told_s, **costs, "between_interruptions_s": between_s}

    def _has_changed(self) -> bool:
        if self.told_s is None:
            return True
        return not 1 / NEWS_RATIO < self.interval_s / self.told_s < NEWS_RATIO
