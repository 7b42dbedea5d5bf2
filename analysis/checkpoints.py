"""How often a training saves, and what a save costs it: for the plan beforehand, and for the training itself.

Between two saves lie so many seconds of training steps:

    T = max(min(τ(δ, M), `MOST_S`), δ / `MAX_SHARE`)

τ is the interval of Young and Daly (`spot.best_interval_s`), δ what one save costs the training, M the mean time
between two interruptions that leave no time to save. At most `MOST_S` of work are lost, unless saving so often would
cost more than `MAX_SHARE` of the training: the bound on the cost goes first.

Training also saves at the end of an epoch, if the last save is δ / `MAX_SHARE` ago; always, where the user has set T.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.formatting import format_duration
from tula_hpc.analysis.spot import best_interval_s
from tula_hpc.config import CHECKPOINT_MINUTES, PricingSpec
from tula_hpc.records import CREDIBLE_S, Event

Array = NDArray[np.float64]

MOST_S = 60.0 * CHECKPOINT_MINUTES
MAX_SHARE = 0.03  # of training time


class SaveCost(NamedTuple):
    """What one save costs a training, as a training of the same run measured."""

    seconds: float  # δ


def measured_cost(events: Iterable[Event]) -> SaveCost | None:
    """What the run's trainings measured last; None where none has saved yet."""
    costs = [(event.time, event.data.get("cost_s")) for event in events if event.event == "checkpoint"]
    known = [(time, float(cost)) for time, cost in costs if isinstance(cost, int | float) and 0.0 <= cost < CREDIBLE_S]
    return SaveCost(max(known)[1]) if known else None


def describe(save: SaveCost | None, pricing: PricingSpec) -> str:
    """What a save is taken to cost, and who says so."""
    if save is not None:
        return f"a checkpoint costs {format_duration(save.seconds)} of training, as a training of this run measured"
    stated = f"a checkpoint is taken to cost {format_duration(pricing.checkpoint_write_s)} of training"
    return f"{stated} (pricing.checkpoint_write_s), until a training of this run has measured it"


def interval_s(cost_s: float, between_s: Array) -> Array:
    """T, seconds of training steps between two saves; see the module.

    Args:
        cost_s: δ, 0 or more.
        between_s: M, positive.
    """
    return np.maximum(np.minimum(best_interval_s(cost_s, between_s), MOST_S), least_interval_s(cost_s))


def least_interval_s(cost_s: float) -> float:
    """Seconds of training steps of which a save is not more than `MAX_SHARE`."""
    return cost_s / MAX_SHARE


def with_epoch_ends_s(every_s: Array, epoch_s: Array, least_s: float) -> Array:
    """Seconds of training steps between two saves on average, those at ends of epochs included.

    Args:
        every_s: T, positive.
        epoch_s: Steps of an epoch, 0 or more.
        least_s: So long after a save the end of an epoch brings another; 0: each does.
    """
    epoch_s = np.maximum(epoch_s, 1e-9)
    at_ends = epoch_s * np.maximum(np.ceil(least_s / epoch_s), 1.0)
    return np.maximum(
        np.where(epoch_s >= every_s, _several(every_s, epoch_s, least_s), np.minimum(at_ends, every_s)), least_s
    )


def _several(every_s: Array, epoch_s: Array, least_s: float) -> Array:
    """The same for epochs that are longer than T.

    Steps since the last save at the end of an epoch become more from epoch to epoch, until that brings a save.
    """
    whole = np.floor(epoch_s / every_s * (1.0 + 1e-9))
    rest_s = np.maximum(epoch_s - whole * every_s, 0.0)
    at_an_end = rest_s > 1e-9 * every_s
    epochs = np.where(at_an_end, np.maximum(np.ceil(least_s / np.where(at_an_end, rest_s, 1.0)), 1.0), 1.0)
    saves = np.floor(epochs * epoch_s / every_s * (1.0 + 1e-9)) + at_an_end
    return np.asarray(epochs * epoch_s / np.maximum(saves, 1.0))
