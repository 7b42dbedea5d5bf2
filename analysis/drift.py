"""Detect that step times drift from the plan's prediction, and name the part of the step at fault.

Every worker feeds the same agreed numbers to its own `Watch`, so that all workers see the same
change at the same step. No torch is imported.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from tula_hpc.records import (
    Configuration,
    Event,
    Interval,
    Measurement,
    RunHistory,
    StepParts,
    StepTimes,
    is_usable,
)

# windows in a row beyond the edge that raise an alarm
THRESHOLD = 12
# windows beyond the edge that each other window undoes
STEP_BACK = 2
# a step time counts as drifted if it exceeds the interval's end by this factor
MARGIN = 1.1
# looks left out after every start, while allocators, caches and loader processes settle
WARM_UP_LOOKS = 10
# a part is named when it explains this share of the deviation
NAMED_FROM = 0.3
# if the computation explains this share of the deviation, the all-reduce waits for busy processors
STARVED_FROM = 0.1
# A computation that changed by this factor also shows a busy processor. It is then named if it
# explains `STARVED_FROM` of the deviation.
STARVED_TIMES = 1.5
# an all-reduce that explains this share of the deviation can be its cause without a busy processor
ALONE_FROM = 0.8
# longest time between two looks; a window consists of looks
SECONDS_PER_LOOK = 1.0

DriftChange = Literal["drifted", "recovered"]


class SignSum:
    """One-sided cumulative sum of signs, which raises an alarm at `THRESHOLD`.

    How far beyond the edge a window lies does not count: one enormous pause is one window (E. S.
    Page, "Continuous Inspection Schemes", 1954, with signs for any distribution). If the true
    median lies exactly on the edge, the mean time to a false alarm is 322 windows or more; if a
    quarter of the windows lies beyond it, nine million.
    """

    def __init__(self) -> None:
        self.sum = 0

    def alarms(self, beyond: bool) -> bool:
        """Add one window, and return whether it raises an alarm."""
        step = 1 if beyond else -STEP_BACK
        self.sum = max(0, self.sum + step)
        return self.sum >= THRESHOLD


class Detector:
    """Detector of drift episodes: "drifted" when an episode begins, "recovered" when it ends.

    An episode begins when step times exceed an end of the prediction's interval by the factor
    `MARGIN`, and ends when they lie inside the interval again; between the two nothing changes.
    `prediction` is the step time in seconds, with the 90 % interval of one measurement. `side` is
    +1 (slower) or −1 (faster) to continue an episode after a restart, else 0.
    """

    def __init__(self, prediction: Interval, side: int = 0) -> None:
        self.prediction = prediction
        self.recent: deque[float] = deque(maxlen=THRESHOLD)
        self._start(side)

    def observe(self, step_time_s: float) -> DriftChange | None:
        """Add one window's step time, and return the change that it completes, if any."""
        self.recent.append(step_time_s)
        if self.side:
            if not self.back.alarms(self._is_back(step_time_s)):
                return None
            self._start(side=0)
            return "recovered"
        slow = self.slow.alarms(step_time_s > self.prediction.high * MARGIN)
        fast = self.fast.alarms(step_time_s < self.prediction.low / MARGIN)
        if not slow and not fast:
            return None
        self._start(side=1 if slow else -1)
        return "drifted"

    @property
    def measured_s(self) -> float:
        """Median step time of the latest windows, which raised the alarm."""
        return median(self.recent)

    def _is_back(self, step_time_s: float) -> bool:
        if self.side > 0:
            return step_time_s <= self.prediction.high
        return step_time_s >= self.prediction.low

    def _start(self, side: int) -> None:
        self.side = side
        self.slow = SignSum()
        self.fast = SignSum()
        self.back = SignSum()


class Look(NamedTuple):
    """Means over the steps since the last look, of the slowest worker; equal on all workers."""

    steps: float
    step_time_s: float
    data_time_s: float


class Watch:
    """Windows of several looks, whose mean step times are compared with the prediction.

    A single look is too short: loader processes that started together deliver in bursts, which may
    last longer. A pause of the machine spoils one window, which raises no alarm.
    """

    def __init__(self, detector: Detector, window_s: float) -> None:
        self.detector = detector
        self.window_s = window_s
        self.looks = 0
        self.open: list[Look] = []
        self.waits: deque[float] = deque(maxlen=THRESHOLD)

    @property
    def look_every_s(self) -> float:
        """Seconds between two looks."""
        return min(SECONDS_PER_LOOK, self.window_s)

    def observe(self, look: Look) -> DriftChange | None:
        """Add one look, and return the change that it completes, if any."""
        self.looks += 1
        if self.looks <= WARM_UP_LOOKS:
            return None
        self.open.append(look)
        total_s = sum(look.steps * look.step_time_s for look in self.open)
        if total_s < 0.9 * self.window_s:
            return None
        steps = sum(look.steps for look in self.open)
        data_time_s = sum(look.steps * look.data_time_s for look in self.open) / steps
        self.open = []
        self.waits.append(data_time_s)
        return self.detector.observe(total_s / steps)

    @property
    def data_time_s(self) -> float:
        """Median wait for the loader in the latest windows."""
        return median(self.waits)


def window_seconds(drift_minutes: float) -> float:
    """Return the seconds of a window, given the minutes of drift that raise an alarm."""
    return drift_minutes * 60.0 / THRESHOLD


def expected_parts(measurements: Iterable[Measurement], configuration: Configuration) -> StepParts:
    """Return the profiled parts of the step at a configuration.

    For a measured configuration they are the median of its profiles. For others they lie on
    straight lines: data wait and compute over the local batch, the all-reduce over the number of
    workers, through the measured values on both sides, or beyond all of them through the last two.
    """
    rows = []
    for row in measurements:
        same_nodes = row.workers_per_node == configuration.workers_per_node
        if same_nodes and row.times and is_usable(row):
            rows.append((row, row.times))
    own = [pair for pair in rows if pair[0].configuration == configuration] or rows
    batch = configuration.local_batch
    workers = configuration.world_size
    waits = [(row.local_batch, times.data_time_s) for row, times in own]
    reduced = []
    for row, times in rows:
        if times.allreduce_time_s > 0:
            reduced.append((row.configuration.world_size, times.allreduce_time_s))
    return StepParts(
        data_time_s=_at(batch, waits),
        compute_time_s=_at(batch, _computes(own, alone=workers == 1)),
        allreduce_time_s=0.0 if workers == 1 else _at(workers, reduced),
    )


def _computes(
    rows: Sequence[tuple[Measurement, StepTimes]], *, alone: bool
) -> list[tuple[int, float]]:
    in_parts: list[tuple[int, float]] = []
    whole: list[tuple[int, float]] = []
    for row, times in rows:
        (in_parts if row.parts > 1 else whole).append((row.local_batch, times.compute_time_s))
        whole += row.smaller_computes
    # a single worker splits large batches into micro-batches, several workers never do
    return in_parts if alone and in_parts else whole


def _at(where: int, points: Sequence[tuple[int, float]]) -> float | None:
    """Interpolate between the neighbours, or continue the last two; None without points."""
    values: dict[int, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    places = sorted(values)
    if not places:
        return None
    if where in values or len(places) == 1:
        return median(values.get(where, values[places[0]]))
    right = min(max(bisect(places, where), 1), len(places) - 1)
    before, after = places[right - 1 : right + 1]
    first = median(values[before])
    slope = (median(values[after]) - first) / (after - before)
    return max(0.0, first + slope * (where - before))


PARTS = {"loader": "data_time_s", "compute": "compute_time_s", "network": "allreduce_time_s"}


def attribute(measured: StepParts, expected: StepParts, deviation_s: float) -> str:
    """Name the part that deviates most in the direction of the whole step, or "unknown".

    The parts are compute, network and loader. A busy processor slows the all-reduce too, while a
    slow link leaves the computation alone. If both deviate, the all-reduce's share is therefore
    added to the computation's, unless the all-reduce explains the deviation by itself and the
    computation little of it. A busy processor slows a whole step more than its parts timed one by
    one: a computation that changed by `STARVED_TIMES` has to explain less of the deviation.

    `deviation_s` is the measured step time less the predicted one.
    """
    if deviation_s == 0.0:
        return "unknown"
    shares = {part: extra_s(measured, expected, part) / deviation_s for part in PARTS}
    measured_s = measured.compute_time_s
    expected_s = expected.compute_time_s
    slow = False
    if shares["compute"] > 0.0 and measured_s and expected_s:
        slow = max(measured_s / expected_s, expected_s / measured_s) > STARVED_TIMES
    alone = shares["network"] > ALONE_FROM and shares["compute"] < NAMED_FROM
    if shares["network"] > 0.0 and (slow or shares["compute"] > STARVED_FROM) and not alone:
        shares["compute"] += shares["network"]
    part = max(shares, key=lambda name: shares[name])
    least = STARVED_FROM if part == "compute" and slow else NAMED_FROM
    return part if shares[part] > least else "unknown"


def extra_s(measured: StepParts, expected: StepParts, part: str) -> float:
    """Return the seconds that a part takes longer than expected; 0 if either time is unknown."""
    measured_s = getattr(measured, PARTS[part])
    expected_s = getattr(expected, PARTS[part])
    return 0.0 if measured_s is None or expected_s is None else float(measured_s - expected_s)


def describe_drift(events: Iterable[Event]) -> str:
    """Return the present drift for a progress line; "" when step times are as predicted."""
    drift = RunHistory(events).drift()
    if drift is None:
        return ""
    part = "no part of it alone" if drift.part == "unknown" else drift.part
    return f"step time {drift.ratio:.2f} × the prediction ({part})"
