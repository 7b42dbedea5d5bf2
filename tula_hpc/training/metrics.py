"""Collect what a training logs of its steps and evaluations."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from torch import Tensor


class Evaluation(NamedTuple):
    """Of a set of samples."""

    loss: float
    # None: there is none for such targets
    accuracy: float | None
    top5_accuracy: float | None
    # that it took
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """For an event."""
        return (
            f"test loss {self.loss:.4g}"
            if self.accuracy is None
            else f"test accuracy {self.accuracy:.4f}"
        )


NO_EVALUATION = Evaluation(0.0, 0.0, 0.0)


class StepWindow:
    """Losses and time since the last logged line. Losses stay on the device until the line is written."""

    def __init__(self) -> None:
        self.steps = 0
        self.total: Tensor | None = None
        # for the loader
        self.waited_s = 0.0
        self.started = time.perf_counter()

    def add(self, loss: Tensor) -> None:
        """Count one step."""
        self.total = loss.double() if self.total is None else self.total + loss
        self.steps += 1

    def close(self) -> tuple[float, int, float]:
        """Mean loss, steps and seconds; and start anew."""
        mean = float(self.total) / self.steps if self.total is not None else math.nan
        result = (mean, self.steps, time.perf_counter() - self.started)
        self.steps, self.total, self.waited_s, self.started = 0, None, 0.0, time.perf_counter()
        return result


def finite_or_none(value: float | None) -> float | None:
    """JSON has no infinity: the first step's Δ(G) is none."""
    return value if value is not None and math.isfinite(value) else None
