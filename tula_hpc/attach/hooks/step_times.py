"""Times of a script's steps, each from the end of the step before unless a pause came between.

The beginning of a step cannot be seen from outside, so it is taken to be where the step before
ended. After a pause, such as an evaluation, a step is taken to begin as long before its first
forward pass as the mean of the other steps. A long and rare gap between two steps is a pause as
well: a policy that plays, a checkpoint, or an evaluation of which no pass is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from tula_hpc.attach.hooks.passes import FEW_STEPS
from tula_hpc.profiling.timing import device_mark

# mean steps that a gap between two steps has to last to be long
LONG_GAP = 8
# long gaps that come after fewer steps than this are a part of the steps
RARE = 16
# weight of a step in the mean that a gap is compared with: a 32nd, once there are as many steps
RECENT = 32


class Pause(NamedTuple):
    """Pause between two steps of a script."""

    # number of steps before it
    steps: int
    seconds: float
    # training's loader began anew
    ends_epoch: bool = False
    # a long gap in which no pass and no loader was seen
    is_gap: bool = False


class LongGaps:
    """Finds gaps between two steps that are long and rare, which no step should be charged for.

    A GPU works behind the host: the host's steps are short until it has to wait, for a loss that it
    reads for example. A gap is therefore compared with the mean step, and is only as long as the
    device was idle in it.

    Attributes:
        gpu: Device of the model; None: the CPU.
    """

    def __init__(self) -> None:
        self.gpu: torch.device | None = None
        self._mean_s = 0.0
        # seconds that a gap has to last to be long; none is before there are enough steps
        self.least_s = math.inf
        # steps so far, and those before the last long gap
        self._steps = 0
        self._steps_before = 0
        # when the device had done the last step's work; None: on a CPU
        self._done: torch.cuda.Event | None = None

    def note_device(self, device: torch.device) -> None:
        """Note the model's device, which is known from the first step on."""
        self.gpu = device if device.type == "cuda" else None

    def step_ends(self, seconds: float) -> None:
        """Note a step of so many seconds of the host's, the gap before it included."""
        self._steps += 1
        self._mean_s += (seconds - self._mean_s) / min(self._steps, RECENT)
        if self._steps >= FEW_STEPS:
            self.least_s = LONG_GAP * self._mean_s
        if self.gpu is not None:
            self._done = device_mark(self.gpu)

    def pause_s(self, gap_s: float) -> float:
        """Return the seconds of the pause that ends now; 0 for a gap that belongs to the steps.

        `gap_s` has the host's seconds since the last step, without waits for batches.
        """
        if gap_s >= self.least_s and self.gpu is not None and self._done is not None:
            gap_s = min(gap_s, _idle_s(self._done, self.gpu))
        if gap_s < self.least_s:
            return 0.0
        is_rare = self._steps - self._steps_before >= RARE
        self._steps_before = self._steps
        return gap_s if is_rare else 0.0


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
    # seconds of the present gap in which further optimizers of the step stepped
    going_on_s: float = 0.0
    long_gaps: LongGaps = field(default_factory=LongGaps)

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
            between_s = now - self.ended
            idle_s = between_s - (self.loading_s or 0.0)
            if idle_s >= self.long_gaps.least_s:
                paused_s = self.long_gaps.pause_s(idle_s)
            if not paused_s:
                gap_s = between_s
                self.gaps += 1
                self.gap_s += (gap_s - self.gap_s) / self.gaps
        elif self.stepped_at is not None:
            paused_s = now - self.stepped_at
        self.began = now - gap_s
        if self.loading_s is None:
            # the script loads in its own way, so that all of the gap may be loading
            self.loading_s = max(0.0, gap_s - self.going_on_s)
        self.going_on_s = 0.0
        return paused_s

    def end(self, now: float) -> float:
        """End the step; return the seconds in which its batches were waited for."""
        waited_s = (self.loading_s or 0.0) + self.loading_before_s
        self.loading_s = None
        self.loading_before_s = 0.0
        if self.stepped_at is not None:
            self.long_gaps.step_ends(now - self.began)
        self.ended = self.stepped_at = now
        return waited_s

    def go_on(self) -> None:
        """Note that the step that has ended went on until now, as another optimizer's step."""
        if self.ended is not None:
            self.going_on_s = time.perf_counter() - self.ended

    def pause(self) -> None:
        """Leave the time up to the next forward pass out of any step."""
        self.ended = self.loading_s = None
        self.loading_before_s = 0.0


def between_epochs_s(pauses: Sequence[Pause], epoch_steps: int, steps: int) -> float | None:
    """Return the seconds of an epoch that belong to no step; None if there was no pause.

    Evaluations and gaps have periods of their own. `steps` have been taken.
    """
    if not pauses:
        return None
    gaps = [pause for pause in pauses if pause.is_gap]
    others = [pause for pause in pauses if not pause.is_gap]
    return sum(_seconds_an_epoch(kind, epoch_steps, steps) for kind in (gaps, others) if kind)


def _seconds_an_epoch(pauses: Sequence[Pause], epoch_steps: int, steps: int) -> float:
    """Return the seconds of an epoch for pauses of one kind, of which it may have several.

    A single pause that ends no epoch is taken to come again, with the shortest period of which no
    second one would have been seen: the steps before it, or after it if these are more.
    """
    typical_s = median(pause.seconds for pause in pauses)
    first, *others = pauses
    if others:
        apart = median(later.steps - earlier.steps for earlier, later in pairwise(pauses))
    elif first.ends_epoch:
        return typical_s
    else:
        apart = max(first.steps, steps - first.steps)
    return typical_s * max(1, round(epoch_steps / max(1, apart)))


def _idle_s(done: torch.cuda.Event, device: torch.device) -> float:
    """Return the seconds since the device had done the work before a mark."""
    now = device_mark(device)
    now.synchronize()
    return 1e-3 * float(done.elapsed_time(now))  # type: ignore[no-untyped-call] # torch's
