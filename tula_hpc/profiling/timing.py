"""Times of steps in rounds until their mean is known, and waits for the loader.

Training waits for the device about once a second. A step that is timed by itself, with a wait for
the device before and after it, also counts the host's work until the device is busy again. A round
is therefore a number of steps with a wait at its two ends only. All workers agree when to stop.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

import torch

from tula_hpc.config import SearchSpec
from tula_hpc.config.search import LEAST_SECONDS, MOST_SECONDS
from tula_hpc.ddp.agreement import Agreeing

# waiting for the device at a round's ends costs about a millisecond, below half a per cent of it
ROUND_S = 0.25
# a round of parts that only guide the model, or are small
BRIEF_ROUND_S = 0.05
# most time for a quantity, as a share of the time of the training's steps: eight profiles of two
# quantities then take a quarter of a short training; LEAST_SECONDS are allowed in any case
SHARE_OF_TRAINING = 0.015
# most time of a warm-up, in which LEAST_WARM_UP steps are taken in any case
WARM_UP_S = 5.0
LEAST_WARM_UP = 2
# an interval from fewer rounds ends no measurement
LEAST_ROUNDS = 5
# with fewer rounds, halves whose extremes are pulled in say nothing about scatter
LEAST_HALVED = 6
# rounds that max_steps should hold: the interval of ten is about half as wide as that of five
USUAL_ROUNDS = 10
# 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL = 1.959964

T = TypeVar("T")
# a generator that yields where it waits for the end of a step
Steps = Generator[None, None, T]


class MeanInterval(NamedTuple):
    """Mean and its 95 % interval, seconds."""

    mean_s: float
    low_s: float
    high_s: float

    @property
    def relative_width(self) -> float:
        """Width of the interval over the mean."""
        return (self.high_s - self.low_s) / self.mean_s if self.mean_s > 0 else 0.0


def mean_interval(rounds: Sequence[float]) -> MeanInterval:
    """Return the Winsorized mean over rounds, at least one, with its 95 % interval; in seconds.

    A training of n steps takes n times the mean step: a median misses that L loader processes which
    started together deliver in bursts, so that one step of L waits for all. A mean follows each
    disturbance of the machine instead, and one pause must not decide a profile of seconds. From
    five rounds on the largest therefore counts as the second largest, and the smallest as the
    second smallest. Whatever happens twice stays, and bursts of a loader are in every round, as a
    round holds a multiple of L steps. The interval is that of W. J.
    Dixon, J. W. Tukey, "Approximate behavior of the distribution of Winsorized t" (Technometrics
    10, 1968): with h = n − 2 rounds left as they are and the deviation s of all n after pulling in,
    t(h−1) · (n−1)/(h−1) · s/√n. Below five rounds it is Student's, n = h; a single round has no
    width. Times are positive: the low end is at least 0.
    """
    count = len(rounds)
    kept = count - 2 if count >= LEAST_ROUNDS else count
    ordered = sorted(pulled_in(rounds))
    # fmean rounds: the mean of equal values may differ from them in the last digit
    mean = min(max(statistics.fmean(ordered), ordered[0]), ordered[-1])
    if count == 1:
        return MeanInterval(mean, mean, mean)
    error = statistics.stdev(ordered, mean) / math.sqrt(count)
    half = _student_t(kept - 1) * (count - 1) / (kept - 1) * error
    return MeanInterval(mean, max(0.0, mean - half), mean + half)


def pulled_in(rounds: Sequence[float]) -> list[float]:
    """Return the rounds in their order, the largest and the smallest as in `mean_interval`."""
    if len(rounds) < LEAST_ROUNDS:
        return list(rounds)
    _, low, *_, high, _ = sorted(rounds)
    return [min(max(seconds, low), high) for seconds in rounds]


def halves_of(rounds: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the mean seconds of both halves of the rounds, and their scatter; None below six.

    The scatter is the difference that is exceeded in less than one of 20 measurements whose rounds
    only scatter. The round in the middle of an odd number is in neither half. For m rounds in each
    half, whose deviation s around the half's own mean is pooled, Student's test asks for a
    difference of `t(2m−2) · s · √(2/m)`. Rounds are pulled in as in `mean_interval`, and s is
    widened likewise.
    """
    count = len(rounds)
    if count < LEAST_HALVED:
        return None
    half = count // 2
    known = pulled_in(rounds)
    first, second = known[:half], known[-half:]
    pooled = math.sqrt((statistics.variance(first) + statistics.variance(second)) / 2)
    scatter = _student_t(2 * half - 2) * (count - 1) / (count - 3) * pooled * math.sqrt(2 / half)
    return statistics.fmean(first), statistics.fmean(second), scatter


def _student_t(degrees: int) -> float:
    """Return the 97.5 % quantile; beyond the table by its expansion, to three digits."""
    if degrees <= len(STUDENT_T):
        return STUDENT_T[degrees - 1]
    first = (NORMAL**3 + NORMAL) / 4
    second = (5 * NORMAL**5 + 16 * NORMAL**3 + 3 * NORMAL) / 96
    return NORMAL + first / degrees + second / degrees**2


class StoppingRule(NamedTuple):
    """Rule for ending a measurement."""

    min_steps: int
    max_steps: int
    max_seconds: float
    ci_width: float
    # steps of the training whose share bounds `max_seconds`; infinite: there is no such bound
    training_steps: float = math.inf

    @classmethod
    def of(cls, search: SearchSpec, training_steps: float) -> StoppingRule:
        """Return a sweep's rule, for a training of `training_steps`; infinite: unknown."""
        if search.max_seconds is not None:
            return cls(search.min_steps, search.max_steps, search.max_seconds, search.ci_width)
        limits = (search.min_steps, search.max_steps, MOST_SECONDS, search.ci_width)
        return cls(*limits, training_steps)

    def in_proportion(self, about_s: float) -> StoppingRule:
        """Return the rule for steps of about `about_s` seconds; the same on all workers.

        The time is bounded by a share of the training. If `min_steps` take longer than that, fewer
        steps are timed, but no fewer than `LEAST_ROUNDS`.
        """
        if math.isinf(self.training_steps):
            return self
        share_s = SHARE_OF_TRAINING * self.training_steps * about_s
        most_s = min(max(share_s, LEAST_SECONDS), self.max_seconds)
        in_time = max(LEAST_ROUNDS, int(most_s / max(about_s, 1e-6)))
        return self._replace(max_seconds=most_s, min_steps=min(self.min_steps, in_time))

    def steps_per_round(
        self, about_s: float, round_s: float = ROUND_S, multiple_of: int = 1
    ) -> int:
        """Return the steps in a round of about `round_s` seconds, if a step takes about `about_s`.

        Five rounds hold at least min_steps, and max_steps holds at least ten rounds. A round is
        always a multiple of `multiple_of`, the steps in which each loader process delivers once:
        only whole turns take as long as in training. `about_s` is the same on all workers.
        """
        wanted = math.ceil(round_s / max(about_s, 1e-6))
        fewest = math.ceil(self.min_steps / LEAST_ROUNDS)
        steps = max(fewest, min(wanted, self.max_steps // USUAL_ROUNDS))
        return math.ceil(steps / multiple_of) * multiple_of

    def done(self, rounds: Sequence[float], steps: int) -> bool:
        """Tell whether these rounds, at least two, suffice or have used up the limits."""
        if len(rounds) < 2 or len(rounds) * steps < self.min_steps:
            return False
        too_many = (len(rounds) + 1) * steps > self.max_steps
        too_long = sum(rounds) * steps >= self.max_seconds
        return too_many or too_long or self.converged(rounds)

    def converged(self, rounds: Sequence[float]) -> bool:
        """Tell whether the mean's interval is narrow enough."""
        return len(rounds) >= LEAST_ROUNDS and mean_interval(rounds).relative_width <= self.ci_width


def least_timed(turn: int) -> int:
    """Return the fewest steps in which steps can be timed, see `StoppingRule.steps_per_round`."""
    return max(LEAST_ROUNDS, 2 * turn)


def within(search: SearchSpec, steps: int, turn: int) -> SearchSpec | None:
    """Return limits with which a warm-up and two timings take no more than `steps` of a script.

    None if the steps, which are those that other parts of its profile leave, are too few, or enough
    for the limits in force. Rounds are multiples of `turn`, the steps in which each loader process
    delivers once.
    """
    most = (steps - search.warmup_steps) // 2
    if not least_timed(turn) <= most < search.max_steps:
        return None
    least = min(search.min_steps, most)
    if turn > 1:
        # whole turns that fit into `most`
        least = min(least, most // turn * turn, LEAST_ROUNDS * turn)
    return search.model_copy(update={"max_steps": most, "min_steps": least})


def driven(steps: Steps[T], step: Callable[[], object]) -> T:
    """Call `step` for each step that a generator waits for, and return the generator's result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            found: T = ended.value
            return found
        step()


def round_of(worker: Agreeing, steps: int, left_out_s: Callable[[], float] = float) -> Steps[float]:
    """Wait for a number of steps in a row; return the mean seconds of one, the device's included.

    `left_out_s` returns the seconds so far that belong to no step; by default 0.
    """
    worker.synchronize_device()
    before_s = left_out_s()
    started = time.perf_counter()
    for _ in range(steps):
        yield
    worker.synchronize_device()
    return (time.perf_counter() - started - (left_out_s() - before_s)) / steps


def rounds_of(
    worker: Agreeing,
    rule: StoppingRule,
    steps: int,
    *,
    counted: Callable[[float], float] = float,
    left_out_s: Callable[[], float] = float,
) -> Steps[list[float]]:
    """Return the mean seconds of a step in rounds until all workers' rules are satisfied.

    Collective, and all workers take the same number of steps, as these may be collective too.

    `counted` is called after a round with its mean, and returns the part that counts.
    """
    rounds: list[float] = []
    unfinished = 1.0
    while unfinished:
        mean_s = yield from round_of(worker, steps, left_out_s)
        rounds.append(counted(mean_s))
        (unfinished,) = worker.agree(0.0 if rule.done(rounds, steps) else 1.0)
    return rounds


def slowest_round(
    worker: Agreeing, steps: int, left_out_s: Callable[[], float] = float
) -> Steps[float]:
    """Wait for steps in a row; return the slowest worker's mean seconds of one. Collective."""
    mine = yield from round_of(worker, steps, left_out_s)
    (slowest_s,) = worker.agree(mine)
    return slowest_s


def warm_up(worker: Agreeing, most: int, left_out_s: Callable[[], float] = float) -> Steps[None]:
    """Wait for `most` steps, or for fewer if they are long. Collective."""
    if most == 0:
        return
    about_s = yield from slowest_round(worker, 1, left_out_s)
    enough = max(LEAST_WARM_UP, math.ceil(WARM_UP_S / max(about_s, 1e-6)))
    for _ in range(min(most, enough) - 1):
        yield


def round_s(worker: Agreeing, step: Callable[[], object], steps: int = 1) -> float:
    """Return the mean seconds of a number of calls in a row, the device's work included."""
    return driven(round_of(worker, steps), step)


def agreed_s(worker: Agreeing, step: Callable[[], object]) -> float:
    """Return the slowest worker's seconds of a call, the same on all workers. Collective."""
    return driven(slowest_round(worker, 1), step)


def rounds_apart(
    worker: Agreeing, rule: StoppingRule, step: Callable[[], object], *, briefly: bool
) -> tuple[list[float], int]:
    """Return mean seconds of a call in each round, and the calls in a round. Collective.

    `briefly` takes the fewest rounds, and short ones, for a part that only guides the model or is
    small.
    """
    steps = calls_in_round(worker, rule, step, BRIEF_ROUND_S if briefly else ROUND_S)
    if briefly:
        rule = rule._replace(max_steps=LEAST_ROUNDS * steps)
    return driven(rounds_of(worker, rule, steps), step), steps


def calls_in_round(
    worker: Agreeing, rule: StoppingRule, step: Callable[[], object], round_of_s: float
) -> int:
    """Return the calls in a round, the same on all workers. Collective."""
    # the first call may have something to set up
    step()
    return rule.steps_per_round(agreed_s(worker, step), round_of_s)


class LoaderWaits:
    """Sum of waits for the loader between two moments at which the device is idle.

    On a CPU each second of the host's wait makes training longer by one. A GPU works behind the
    host, which asks for the next batch while steps are still queued: with a loader that keeps up
    the host may wait in every step without the device ever being idle. Training loses only the part
    of a wait for which the device is idle: the time on the device between the end of the last
    step's work and the arrival of the batch, by two events. It is at most the host's own wait: any
    other idle time in between is no wait for data.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lost_s = 0.0
        self._launched: torch.cuda.Event | None = None
        self._waits: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []

    def arrived(self, waited_s: float) -> None:
        """Count the host's wait for a batch that has just come; call it before the step."""
        if self._launched is None:
            # a CPU, or the first step after `take`: the device was idle throughout
            self._lost_s += waited_s
            return
        self._waits.append((waited_s, self._launched, device_mark(self.device)))
        self._launched = None

    def launched(self) -> None:
        """Mark that the step's work has been given to the device."""
        if self.device.type == "cuda":
            self._launched = device_mark(self.device)

    def mark(self) -> tuple[float, int]:
        """Return a mark for `back_to`."""
        return self._lost_s, len(self._waits)

    def back_to(self, mark: tuple[float, int]) -> None:
        """Forget the waits since a mark, which were not training's; the device must be idle."""
        self._lost_s, count = mark
        del self._waits[count:]
        self._launched = None

    def take(self) -> float:
        """Return the seconds since the last call; the device must be idle."""
        lost_s = self._lost_s
        for waited_s, launched, arrived in self._waits:
            idle_s = 1e-3 * launched.elapsed_time(arrived)  # type: ignore[no-untyped-call] # torch's
            lost_s += min(waited_s, idle_s)
        self._lost_s = 0.0
        self._launched = None
        self._waits = []
        return lost_s


def device_mark(device: torch.device) -> torch.cuda.Event:
    """Return an event that a GPU reaches when it has done all work that it was given so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call] # torch's
    return event
