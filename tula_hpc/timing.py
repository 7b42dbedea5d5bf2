"""Timing until the median is known well enough, with all workers agreeing on when to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

CHUNK = 5  # steps between two looks at the interval; each look costs one small collective


class Interval(NamedTuple):
    """A median and its 95 % interval, seconds."""

    median_s: float
    low_s: float
    high_s: float

    @property
    def relative_width(self) -> float:
        """Width of the interval over the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s > 0 else 0.0


def median_interval(samples: list[float]) -> Interval:
    """Median with its distribution-free 95 % interval from order statistics.

    The ranks are n/2 ± 1.96·√n/2 (normal approximation of the binomial; David & Nagaraja, Order Statistics, §7.1),
    which holds for any distribution of independent samples. Below 6 samples the interval is the whole range.
    """
    ordered = sorted(samples)
    n = len(ordered)
    half = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor(n / 2 - half))
    high = min(n - 1, math.ceil(n / 2 + half))
    return Interval(statistics.median(ordered), ordered[low], ordered[high])


class Agreement(Protocol):
    """What timing needs from a worker."""

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all workers."""

    def synchronize_device(self) -> None:
        """Wait for the device."""


class StoppingRule(NamedTuple):
    """When enough has been measured."""

    min_steps: int
    max_steps: int
    max_seconds: float
    ci_width: float

    def done(self, samples: list[float]) -> bool:
        """Whether these samples suffice, or may not go on."""
        if len(samples) < self.min_steps:
            return False
        if len(samples) >= self.max_steps or sum(samples) >= self.max_seconds:
            return True
        return self.converged(samples)

    def converged(self, samples: list[float]) -> bool:
        """Whether the median's interval is narrow enough."""
        return len(samples) >= self.min_steps and median_interval(samples).relative_width <= self.ci_width


def seconds_of(worker: Agreement, step: Callable[[], object]) -> float:
    """Seconds of one call of `step`, the device's work included."""
    worker.synchronize_device()
    started = time.perf_counter()
    step()
    worker.synchronize_device()
    return time.perf_counter() - started


def time_steps(worker: Agreement, rule: StoppingRule, step: Callable[[], None]) -> list[float]:
    """Seconds of each call of `step`, the device's work included; the slowest worker decides when to stop."""
    samples: list[float] = []
    while True:
        for _ in range(min(CHUNK, rule.max_steps - len(samples))):
            samples.append(seconds_of(worker, step))
        (unfinished,) = worker.agree(0.0 if rule.done(samples) else 1.0)
        if not unfinished or len(samples) >= rule.max_steps:
            return samples
