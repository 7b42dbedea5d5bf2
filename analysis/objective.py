"""Which of the feasible candidates to train with: least time, least cost, or the knee of the training-time curve.

Larger batches shorten training ever less, while they cost memory and generalization. The knee is the batch beyond which
more batch buys little time (V. Satopää et al., "Finding a Kneedle in a Haystack", 2011).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.records import Candidate

Array = NDArray[np.float64]
# Seconds of training over nodes, workers per node and local batch (not only whole ones), arrays of one length.
TrainTime = Callable[[Array, Array, Array], Array]

CURVE_POINTS = 2001
MIN_BATCHES = 3  # a curve through fewer global batches has no bend
MIN_FALL = 0.05  # the least time must be this share below the time of the smallest batch
MIN_BEND = 0.05  # distance from the straight line between the curve's ends, in units of its normalized axes
NEAR_LEAST_TIME = 1.1  # without a knee: the smallest batch within 10 % of the least time


class Choice(NamedTuple):
    """The feasible candidates, best first, and why."""

    ranking: tuple[Candidate, ...]
    reason: str  # one sentence
    knee_batch: float | None  # global batch at the knee; None for other objectives and where there is none
    warnings: tuple[str, ...]


class Curve(NamedTuple):
    """Least training time over the global batch."""

    global_batch: Array  # ascending
    train_time_s: Array  # never rising: the least time with this batch or a smaller one


def choose(kind: Literal["knee", "time", "cost"], feasible: Sequence[Candidate], train_time_s: TrainTime) -> Choice:
    """Rank the feasible candidates.

    "time" and "cost" take the least; ties go to fewer nodes, then to the smaller batch. "knee" takes the candidate
    whose global batch is nearest, in octaves, to the knee of the fitted curve; of equal batches the fastest, then the
    one with fewer nodes. A curve without a knee is said to have none; then the smallest global batch whose training
    time is within 10 % of the least is taken, on as few nodes as possible.

    Args:
        kind: The objective.
        feasible: At least one candidate.
        train_time_s: The fitted model, for the curve between the candidates.
    """
    if kind == "time":
        return Choice(_ranked(feasible, lambda c: (c.train_time_s, c.nodes, c.global_batch)), _LEAST_TIME, None, ())
    if kind == "cost":
        return Choice(_ranked(feasible, lambda c: (c.cost, c.nodes, c.global_batch)), _LEAST_COST, None, ())
    knee, without = find_knee(lower_envelope(feasible, train_time_s)), "the curve has no knee"
    if len({c.global_batch for c in feasible}) < MIN_BATCHES:
        knee, without = None, f"a knee needs {MIN_BATCHES} feasible global batches"
    return _near_least_time(feasible, without) if knee is None else _near_knee(feasible, knee)


_LEAST_TIME = "it has the least predicted training time of all feasible candidates"
_LEAST_COST = "it has the least predicted cost of all feasible candidates"


def lower_envelope(feasible: Sequence[Candidate], train_time_s: TrainTime) -> Curve:
    """Least training time over the global batch; each cluster size counts between its feasible extremes."""
    batches = np.array([candidate.global_batch for candidate in feasible], dtype=np.float64)
    grid = np.geomspace(batches.min(), batches.max(), CURVE_POINTS if batches.min() < batches.max() else 1)
    times = np.full_like(grid, np.inf)
    for (nodes, per_node), low, high in _ranges(feasible):
        inside = (grid >= low * (1 - 1e-9)) & (grid <= high * (1 + 1e-9))
        count, workers = np.full(inside.sum(), float(nodes)), np.full(inside.sum(), float(per_node))
        times[inside] = np.minimum(times[inside], train_time_s(count, workers, grid[inside] / (count * workers)))
    return Curve(grid[np.isfinite(times)], np.minimum.accumulate(times[np.isfinite(times)]))


def find_knee(curve: Curve) -> float | None:
    """Global batch at the knee (kneed, linear axes), or None for a curve that is flat or hardly bends.

    Where several cluster sizes take turns the curve has several bends; the one farthest from the straight line between
    the curve's ends is the knee.
    """
    batches, times = curve
    if len(batches) < MIN_BATCHES or times[0] - times[-1] < MIN_FALL * times[0]:
        return None
    from kneed import KneeLocator  # late: it pulls in a plotting library

    found = KneeLocator(batches, times, curve="convex", direction="decreasing", online=True).all_knees
    bends = {float(knee): _bend(curve, float(knee)) for knee in found}
    knee = max(sorted(bends), key=lambda batch: bends[batch], default=None)
    return knee if knee is not None and bends[knee] >= MIN_BEND else None


def _bend(curve: Curve, batch: float) -> float:
    """How far the curve lies below the straight line between its ends, both axes normalized to 0 … 1."""
    batches, times = curve
    along = (batch - batches[0]) / (batches[-1] - batches[0])
    height = (np.interp(batch, batches, times) - times[-1]) / (times[0] - times[-1])
    return float(1.0 - along - height)


def _ranges(feasible: Sequence[Candidate]) -> list[tuple[tuple[int, int], int, int]]:
    """Nodes and workers per node, smallest and largest global batch of each cluster size."""

    def size(candidate: Candidate) -> tuple[int, int]:
        return candidate.nodes, candidate.workers_per_node

    groups = {key: [c.global_batch for c in group] for key, group in groupby(sorted(feasible, key=size), key=size)}
    return [(key, min(batches), max(batches)) for key, batches in groups.items()]


def _near_knee(feasible: Sequence[Candidate], knee: float) -> Choice:
    def octaves(candidate: Candidate) -> float:
        return round(abs(float(np.log2(candidate.global_batch / knee))), 9)

    ranking = _ranked(feasible, lambda c: (octaves(c), c.global_batch, c.train_time_s, c.nodes))
    where = f"nearest to the knee of the training-time curve at {knee:,.0f}"
    reason = f"its global batch is {where}, and it is the fastest there"
    return Choice(ranking, reason, knee, ())


def _near_least_time(feasible: Sequence[Candidate], why: str) -> Choice:
    limit = NEAR_LEAST_TIME * min(candidate.train_time_s for candidate in feasible)

    def key(candidate: Candidate) -> tuple[float, ...]:
        near = candidate.train_time_s <= limit
        order = (candidate.global_batch, candidate.nodes) if near else (candidate.train_time_s, candidate.nodes)
        return (not near, *order)

    rule = "the smallest global batch whose training time is within 10 % of the least"
    return Choice(_ranked(feasible, key), f"it has {rule}", None, (f"no knee: {why}; taken is {rule}",))


def _ranked(feasible: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]]) -> tuple[Candidate, ...]:
    return tuple(sorted(feasible, key=lambda candidate: (*key(candidate), candidate.configuration)))
