"""Checks of the numbers that a user gives to the optimizer: each mistake is one clear line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tula_hpc.optim.gradscale import default_s_max


class Batches(NamedTuple):
    """Global batches, in samples."""

    small: int  # b_small, the reference
    large: int  # b_large, trained with


def require(holds: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def require_one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError with all choices unless the value is among them."""
    require(value in choices, f"{name}: expected one of {', '.join(choices)}; got {value!r}")


def checked_bounds(
    batches: tuple[float, int], s_min: float, s_max: float | None, exponent: float
) -> tuple[float, float]:
    """(s_min, s_max) with the default filled in, which is not below s_min.

    Raises:
        ValueError: The batches or bounds do not fit together.
    """
    small, large = batches
    require(1 <= small <= large, f"small_batch: expected 1 <= small_batch <= large_batch, got {small} and {large}")
    # batches change within a training: a default that follows them must not fall below what was asked for
    s_max = max(default_s_max(small, large, exponent), s_min) if s_max is None else s_max
    fits = 0 <= s_min <= s_max and s_max > 0 and s_min < math.inf
    require(fits, f"s_min: expected 0 <= s_min <= s_max, got {s_min} and {s_max}")
    return s_min, s_max


def check_numbers(
    *,
    delta: float,
    static_scale: float | None,
    update_interval: int | None,
    exponent: float,
    smoothing: float,
    scale_warmup: int,
) -> None:
    """Raise ValueError where one of TulaOptimizer's numbers is out of range."""
    require(delta > 0, f"delta: expected a number above 0, got {delta}")
    interval_fits = update_interval is None or update_interval >= 1
    require(interval_fits, f"update_interval: expected at least 1 step, got {update_interval}")
    scale_fits = static_scale is None or 0 < static_scale < math.inf
    require(scale_fits, f"static_scale: expected a finite number above 0, got {static_scale}")
    require(0 < exponent < math.inf, f"exponent: expected a finite number above 0, got {exponent}")
    require(0 <= smoothing < 1, f"smoothing: expected from 0 to below 1, got {smoothing}")
    require(scale_warmup >= 0, f"scale_warmup: expected a number of steps, got {scale_warmup}")
