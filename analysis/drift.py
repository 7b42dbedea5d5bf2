"""Does training keep to the plan's prediction, and if not, which part of a step is it? Numbers only, no torch.

Every worker feeds the same agreed numbers to a `Watch` of its own, so that all come to the same
verdict at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from tula_hpc.records import (
    Candidate,
    Configuration,
    Event,
    Measurement,
    Plan,
    RunHistory,
    StepParts,
    StepTimes,
    is_usable,
)

# of the cumulative sum: so many windows in a row are an alarm
THRESHOLD = 12
# each window on the right side undoes two on the wrong one
STEP_BACK = 2
# how far beyond the interval's end a step time must lie to count; back inside the interval it is
# well
MARGIN = 1.1
# after every start: allocators, caches and loader processes are not yet what they will be
WARM_UP_LOOKS = 10
# a part is named when it explains this share of the deviation
NAMED_FROM = 0.3
# so much of it in the computation, and the all-reduce is slow because the processor is
STARVED_FROM = 0.1
# likewise where the computation takes so many times as long; then it is named from that share on
STARVED_TIMES = 1.5
# so much of it in the all-reduce needs no busy processor to explain it
ALONE_FROM = 0.8
# windows are made of looks about so far apart
SECONDS_PER_LOOK = 1.0

Verdict = Literal["drifted", "recovered"]


class Prediction(NamedTuple):
    """What the plan says of a step, seconds; the interval is that of one measurement, at 90 %."""

    step_time_s: float
    low_s: float
    high_s: float


def predict(plan: Plan, configuration: Configuration, partition: str = "") -> Prediction | None:
    """The plan's prediction for a configuration; None if it is none of the plan's candidates."""
    known = (plan.chosen, *plan.fallbacks, *plan.runners_up, *plan.candidates)
    own = (c for c in known if c.configuration == configuration and c.partition == partition)
    candidate = next(own, None)
    return None if candidate is None else prediction_of(candidate)


def prediction_of(candidate: Candidate) -> Prediction:
    """Step time and interval; where only the training time has an interval, its relative ends."""
    intervals, step = candidate.interval_90, candidate.step_time_s
    low, high = 1.0, 1.0
    for name, value in (("step_time_s", step), ("train_time_s", candidate.train_time_s)):
        if name in intervals and value > 0:
            low, high = (end / value for end in intervals[name])
            break
    return Prediction(step, step * low, step * high)


class SignSum:
    """One-sided cumulative sum of signs: +1 for a window beyond the edge, −`STEP_BACK` for any other, never below 0.

    Only on which side a window lies counts, not how far: one enormous pause is one window. It
    alarms at `THRESHOLD`. (E. S. Page, "Continuous Inspection Schemes", 1954, with signs for any
    distribution.)
    """

    def __init__(self) -> None:
        self.sum = 0

    def alarms(self, beyond: bool) -> bool:
        """Take in one window."""
        self.sum = max(0, self.sum + (1 if beyond else -STEP_BACK))
        return self.sum >= THRESHOLD


def windows_between_false_alarms(share_beyond: float) -> float:
    """Least mean number of independent windows until `SignSum` alarms although nothing has changed.

    With the share p of windows beyond the edge, r > 1 solves p·r + (1 − p)·r⁻² = 1; the mean is at
    least r^h for the threshold h (G. Lorden, "Procedures for Reacting to a Change in Distribution",
    1971, theorem 2). At p = 1/2, when the true median lies on the very edge, r is the golden ratio:
    322 windows; at p = 1/4 nine million.

    Args:
        share_beyond: p, between 0 and 2/3: from there on windows beyond the edge prevail.
    """
    if share_beyond <= 0:
        return math.inf
    q = 1.0 - share_beyond
    root = (q + math.sqrt(q * q + 4 * share_beyond * q)) / (2 * share_beyond)
    return float(max(1.0, root) ** THRESHOLD)


class Detector:
    """Turns windows into "drifted" when an episode begins and "recovered" when it is over.

    An episode begins when step times lie beyond the prediction's interval by a further factor
    `MARGIN`, and is over when they lie inside the interval again: between the two nothing changes.

    Args:
        prediction: What to hold windows against.
        side: +1 (slower) or −1 (faster) where an episode goes on from before a restart, else 0.
    """

    def __init__(self, prediction: Prediction, side: int = 0) -> None:
        self.prediction, self.side = prediction, side
        self.recent: deque[float] = deque(maxlen=THRESHOLD)
        self._start()

    def observe(self, step_time_s: float) -> Verdict | None:
        """Take in one window's step time."""
        self.recent.append(step_time_s)
        if self.side:
            return self._over() if self.back.alarms(self._is_back(step_time_s)) else None
        slow = self.slow.alarms(step_time_s > self.prediction.high_s * MARGIN)
        fast = self.fast.alarms(step_time_s < self.prediction.low_s / MARGIN)
        return self._began(1 if slow else -1) if slow or fast else None

    @property
    def measured_s(self) -> float:
        """Median of the latest windows, those that made the alarm."""
        return median(self.recent)

    def _is_back(self, step_time_s: float) -> bool:
        return (
            step_time_s <= self.prediction.high_s
            if self.side > 0
            else step_time_s >= self.prediction.low_s
        )

    def _began(self, side: int) -> Verdict:
        self.side = side
        self._start()
        return "drifted"

    def _over(self) -> Verdict:
        self.side = 0
        self._start()
        return "recovered"

    def _start(self) -> None:
        self.slow, self.fast, self.back = SignSum(), SignSum(), SignSum()


class Look(NamedTuple):
    """What all workers agreed on at a step boundary: means over the steps since the last look, the slowest worker's."""

    steps: float
    step_time_s: float
    data_time_s: float


class Watch:
    """Groups looks into windows and holds each window's mean against the prediction, which is of means too.

    Loader processes that started together deliver in bursts, which may be longer than a look. A
    pause of the machine spoils one window, which is no alarm.

    Args:
        detector: Where windows go.
        window_s: Length of a window; `THRESHOLD` of them are about what "for long" means.
    """

    def __init__(self, detector: Detector, window_s: float) -> None:
        self.detector, self.window_s = detector, window_s
        self.looks = 0
        self.open: list[Look] = []
        self.waits: deque[float] = deque(maxlen=THRESHOLD)

    @property
    def look_every_s(self) -> float:
        """How often to look."""
        return min(SECONDS_PER_LOOK, self.window_s)

    def observe(self, look: Look) -> Verdict | None:
        """Take in one look."""
        self.looks += 1
        if self.looks <= WARM_UP_LOOKS:
            return None
        self.open.append(look)
        if sum(look.steps * look.step_time_s for look in self.open) < 0.9 * self.window_s:
            return None
        steps = sum(look.steps for look in self.open)
        step_time_s = sum(look.steps * look.step_time_s for look in self.open) / steps
        data_time_s = sum(look.steps * look.data_time_s for look in self.open) / steps
        self.open = []
        self.waits.append(data_time_s)
        return self.detector.observe(step_time_s)

    @property
    def data_time_s(self) -> float:
        """Wait for the loader in the latest windows, median."""
        return median(self.waits)


def window_seconds(drift_minutes: float) -> float:
    """Length of a window when step times must lie beyond the interval for so long."""
    return drift_minutes * 60.0 / THRESHOLD


def expected_parts(measurements: Iterable[Measurement], configuration: Configuration) -> StepParts:
    """What the profile says of the parts of a step at a configuration.

    Where it was measured, the median of its profiles. Elsewhere straight lines: data wait and
    compute over the local batch, the all-reduce over the number of workers, through the two nearest
    measured values.
    """
    rows = [
        (m, m.times)
        for m in measurements
        if is_usable(m) and m.times and m.workers_per_node == configuration.workers_per_node
    ]
    own = [(row, times) for row, times in rows if row.configuration == configuration] or rows
    batch, world = configuration.local_batch, configuration.world_size
    alone = world == 1
    return StepParts(
        data_time_s=_at(batch, [(row.local_batch, times.data_time_s) for row, times in own]),
        compute_time_s=_at(batch, _computes(own, alone=alone)),
        allreduce_time_s=0.0 if alone else _at(world, _all_reduces(rows)),
    )


def update_time_s(measurements: Iterable[Measurement], world_size: int) -> float:
    """An update of AGS's gradient scale, which is not part of the predicted step; 0 where it was not measured."""
    rows = [m for m in measurements if is_usable(m) and m.times and m.times.update_time_s > 0]
    near = min((abs(m.configuration.world_size - world_size) for m in rows), default=0)
    times = [
        m.times for m in rows if m.times and abs(m.configuration.world_size - world_size) == near
    ]
    return median(t.update_time_s for t in times) if times else 0.0


def _computes(
    rows: Sequence[tuple[Measurement, StepTimes]], *, alone: bool
) -> list[tuple[int, float]]:
    """Local batches and their computation. What one worker takes in parts says of several what a part takes them."""
    in_parts = [(row.local_batch, times.compute_time_s) for row, times in rows if row.parts > 1]
    if alone and in_parts:
        return in_parts
    whole = [(row.local_batch, times.compute_time_s) for row, times in rows if row.parts == 1]
    return whole + [point for row, _ in rows for point in row.smaller_computes]


def _all_reduces(rows: Sequence[tuple[Measurement, StepTimes]]) -> list[tuple[int, float]]:
    return [
        (row.configuration.world_size, times.allreduce_time_s)
        for row, times in rows
        if times.allreduce_time_s > 0
    ]


def _at(where: int, points: Sequence[tuple[int, float]]) -> float | None:
    """Value at `where` on the line through the two nearest places with their median values; None without points."""
    values: dict[int, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    nearest = sorted(values, key=lambda place: (abs(place - where), place))[:2]
    if not nearest:
        return None
    first = median(values[nearest[0]])
    if nearest[0] == where or len(nearest) == 1:
        return first
    slope = (median(values[nearest[1]]) - first) / (nearest[1] - nearest[0])
    return max(0.0, first + slope * (where - nearest[0]))


PARTS = {"loader": "data_time_s", "compute": "compute_time_s", "network": "allreduce_time_s"}


def attribute(measured: StepParts, expected: StepParts, deviation_s: float) -> str:
    """The part that deviates in the same direction as the whole step: compute, network, loader, or unknown.

    What deviates most. A busy processor slows the all-reduce as well, while a slow link leaves the
    computation alone: where both deviate, the all-reduce counts to the computation, unless it
    explains the deviation by itself and the computation little of it. A busy processor slows a
    whole step more than its parts by themselves: where the computation takes `STARVED_TIMES` as
    long, less of the deviation has to be explained.

    Args:
        measured: Parts as they are now.
        expected: Parts as they were in the profile.
        deviation_s: Measured step time less the predicted one.
    """
    if deviation_s == 0.0:
        return "unknown"
    shares = {part: extra_s(measured, expected, part) / deviation_s for part in PARTS}
    now, then = measured.compute_time_s, expected.compute_time_s
    slow = shares["compute"] > 0.0 and bool(
        now and then and max(now / then, then / now) > STARVED_TIMES
    )
    alone = shares["network"] > ALONE_FROM and shares["compute"] < NAMED_FROM
    if shares["network"] > 0.0 and (slow or shares["compute"] > STARVED_FROM) and not alone:
        shares["compute"] += shares["network"]
    part = max(shares, key=lambda name: shares[name])
    least = STARVED_FROM if part == "compute" and slow else NAMED_FROM
    return part if shares[part] > least else "unknown"


def extra_s(measured: StepParts, expected: StepParts, part: str) -> float:
    """Seconds that a part takes longer than expected; 0 where either is not known."""
    now, then = (getattr(parts, PARTS[part]) for parts in (measured, expected))
    return 0.0 if now is None or then is None else float(now - then)


def describe_drift(events: Iterable[Event]) -> str:
    """Return the present drift for a line of progress; "" when step times are as predicted."""
    drift = RunHistory(events).drift()
    return f"step time {drift.ratio:.2f} × the prediction ({drift.part})" if drift else ""
