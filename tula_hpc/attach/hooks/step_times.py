"""Times of a script's steps, each from the end of the step before unless a pause came between.

The beginning of a step cannot be seen from outside, so it is taken to be where the step before
ended. After a pause, such as an evaluation, a step is taken to begin as long before its first
forward pass as the mean of the other steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class StepTimes:
    """Times of the present step, by `time.perf_counter`."""

    # when the step began
    began: float = 0.0
    # when the last step ended; None: what came since was not training
    ended: float | None = None
    # when the last step ended, whatever came since; None: there was no step
    stepped_at: float | None = None
    # wait for the batches of this step; None: no batch came from torch's loader
    loading_s: float | None = None
    # wait for batches before a pass that may be an evaluation's
    loading_before_s: float = 0.0
    # gaps between a step's end and the next forward pass so far: their number and their mean
    gaps: int = 0
    gap_s: float = 0.0

    def pass_apart(self) -> None:
        """Note a pass that may be an evaluation's; the batches so far may have been for it."""
        self.loading_before_s += self.loading_s or 0.0
        self.loading_s = None

    def begin(self, *, is_pause: bool) -> float:
        """Begin the step at its first forward pass; return the seconds before that are in no step.

        `is_pause`: a pause ends here.
        """
        if is_pause:
            self.ended = None
        elif self.loading_before_s:
            self.loading_s = (self.loading_s or 0.0) + self.loading_before_s
        self.loading_before_s = 0.0
        now = time.perf_counter()
        # after a pause the gap cannot be seen, and is taken to be the mean
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
            # the script loads in its own way, so that all of the gap may be loading
            self.loading_s = gap_s
        return paused_s

    def end(self, now: float) -> float:
        """End the step; return the seconds in which its batches were waited for."""
        waited_s = (self.loading_s or 0.0) + self.loading_before_s
        self.loading_s = None
        self.loading_before_s = 0.0
        self.ended = self.stepped_at = now
        return waited_s

    def pause(self) -> None:
        """Leave the time up to the next forward pass out of any step."""
        self.ended = self.loading_s = None
        self.loading_before_s = 0.0
