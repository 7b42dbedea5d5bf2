"""Times of a script's steps: from the end of the one before, unless a pause came between.

From outside a step's beginning is not seen: it begins where the one before ended. After a pause,
such as an evaluation, it begins as long before its first forward pass as other steps do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Times of the step that is being taken, by `time.perf_counter`."""

    # when it began
    began: float = 0.0
    # when the last step ended; None: what came since was no training
    ended: float | None = None
    # when it did, whatever came since; None: there was none
    stepped_at: float | None = None
    # in which the batches of this step were waited for; None: none came from torch's loader
    loading_s: float | None = None
    # before a pass apart, which may be an evaluation's
    loading_before_s: float = 0.0
    # from the end of a step to the next forward pass, so far: how many, and their mean
    gaps: int = 0
    gap_s: float = 0.0

    def pass_apart(self) -> None:
        """Note a pass that may be an evaluation's, which the batches so far may have been for."""
        self.loading_before_s += self.loading_s or 0.0
        self.loading_s = None

    def begin(self, *, is_pause: bool) -> float:
        """Begin the step at its first forward pass; return the seconds before it that are of no step.

        `is_pause` tells that a pause ends.
        """
        if is_pause:
            self.ended = None
        elif self.loading_before_s:
            self.loading_s = (self.loading_s or 0.0) + self.loading_before_s
        self.loading_before_s = 0.0
        now = time.perf_counter()
        # after a pause the gap may have been as long as others, which is not seen
        gap_s = self.gap_s
        paused_s = 0.0
        if self.ended is not None:
            gap_s = now - self.ended
            self.gaps += 1
            self.gap_s += (gap_s - self.gap_s) / self.gaps
        elif self.stepped_at is not None:
            paused_s = now - self.stepped_at
        self.began = now - gap_s
        if self.loading_s is None:
            # a script that loads in its own way
            self.loading_s = gap_s
        return paused_s

    def end(self, now: float) -> float:
        """End the step; return the wait for its batches."""
        waited_s = (self.loading_s or 0.0) + self.loading_before_s
        self.loading_s = None
        self.loading_before_s = 0.0
        self.ended = self.stepped_at = now
        return waited_s

    def pause(self) -> None:
        """Count the time up to the next forward pass as no step's."""
        self.ended = self.loading_s = None
        self.loading_before_s = 0.0
