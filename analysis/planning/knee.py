"""Knee of the curve of training time against global batch, and its interval by the fit.

Larger batches shorten training ever less, while they cost memory and generalization. The knee is
the batch beyond which more batch buys little time: with both axes normalized to 0 … 1, the point of
the falling curve that lies farthest below the straight line between its ends (V. Satopää et al.,
"Finding a Kneedle in a Haystack", 2011). Axes are linear. Where several cluster sizes take turns
the curve has several bends; the one farthest from the line is the knee.

The package kneed finds the knee of the fitted curve. Its interval needs hundreds of curves, dense
and without noise: on those the farthest point is the one that kneed finds (tests/analysis/planning/test_knee.py), and
NumPy finds it in all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.planning.candidates import CandidateTable, Part
from tula_hpc.files import loaded_elsewhere
from tula_hpc.records import Knee

Array = NDArray[np.float64]
# Seconds of training over index of the partition, nodes, workers per node and local batch (not only
# whole ones): arrays of one length n give (n,), or (draws, n) where the model is drawn from the
# fit's uncertainty.
TrainTime = Callable[[int, Array, Array, Array], Array]

CURVE_POINTS = 2001
# of the curves drawn from the fit's uncertainty: over 7 octaves one point every 1.6 %
DRAWN_POINTS = 301
# cluster sizes in the curve; of more, those that are fastest somewhere
MAX_LINES = 64
# a curve through fewer global batches has no bend
MIN_BATCHES = 3
# the least time must be this share below the time of the smallest batch
MIN_FALL = 0.05
# distance from the straight line between the curve's ends, in units of its normalized axes
MIN_BEND = 0.05


class Curve(NamedTuple):
    """Least training time over the global batch."""

    # (n,), ascending
    global_batch: Array
    # (n,) or (draws, n), never rising: the least time with this batch or a smaller one
    train_time_s: Array


class Lines(NamedTuple):
    """Cluster sizes as columns, each between its smallest and its largest feasible global batch."""

    part: Array
    nodes: Array
    workers_per_node: Array
    smallest: Array
    largest: Array


def lower_envelope(lines: Lines, train_time_s: TrainTime, points: int = CURVE_POINTS) -> Curve:
    """Return the least training time over the global batch, of all cluster sizes."""
    low = lines.smallest.min()
    high = lines.largest.max()
    grid = np.geomspace(low, high, points if low < high else 1)
    line, point = np.nonzero(
        (grid >= lines.smallest[:, None] * (1 - 1e-9))
        & (grid <= lines.largest[:, None] * (1 + 1e-9))
    )
    times = _evaluate(lines, line, grid[point], train_time_s)
    least = np.full((*times.shape[:-1], len(grid)), np.inf)
    for index in range(len(lines.nodes)):
        mine = line == index
        least[..., point[mine]] = np.minimum(least[..., point[mine]], times[..., mine])
    covered = np.bincount(point, minlength=len(grid)) > 0
    return Curve(grid[covered], np.minimum.accumulate(least[..., covered], axis=-1))


def _evaluate(lines: Lines, line: NDArray[np.intp], batch: Array, train_time_s: TrainTime) -> Array:
    nodes = lines.nodes[line]
    per_node = lines.workers_per_node[line]
    local = batch / (nodes * per_node)
    parts = lines.part[line]
    pieces = []
    for part in np.unique(parts):
        rows = np.flatnonzero(parts == part)
        pieces.append((rows, train_time_s(int(part), nodes[rows], per_node[rows], local[rows])))
    times = np.empty((*pieces[0][1].shape[:-1], len(line)))
    for rows, found in pieces:
        times[..., rows] = found
    return times


def find_knee(curve: Curve) -> float | None:
    """Return the global batch at the knee of a curve, by kneed; None if it hardly bends."""
    batches, times = curve
    if np.isnan(find_knees(curve)):
        return None
    locator = _knee_locator()(batches, times, curve="convex", direction="decreasing", online=True)
    height = (times - times[-1]) / (times[0] - times[-1])
    bend = 1.0 - (batches - batches[0]) / (batches[-1] - batches[0]) - height
    return max(
        sorted(map(float, locator.all_knees)),
        key=lambda batch: float(np.interp(batch, batches, bend)),
        default=None,
    )


@cache
def _knee_locator() -> Any:
    # kneed loads matplotlib and scipy.signal, half a second that only a knee is worth
    with loaded_elsewhere():
        from kneed import KneeLocator
    return KneeLocator


def find_knees(curve: Curve) -> Array:
    """Return the global batch at the knee of each curve, (draws,); NaN if it hardly bends."""
    batches, times = curve
    first = times[..., :1]
    last = times[..., -1:]
    if len(batches) < MIN_BATCHES:
        return np.full(times.shape[:-1], np.nan)
    along = (batches - batches[0]) / (batches[-1] - batches[0])
    height = (times - last) / np.where(first > last, first - last, 1.0)
    bend = 1.0 - along - height
    found = (first - last)[..., 0] >= MIN_FALL * first[..., 0]
    found &= bend.max(axis=-1) >= MIN_BEND
    return np.where(found, batches[np.argmax(bend, axis=-1)], np.nan)


def lines_of(feasible: CandidateTable) -> Lines:
    """Return the cluster sizes of feasible candidates, or of very many the fastest."""
    key = (feasible.part << 25) | (feasible.nodes << 7) | feasible.workers_per_node
    # stable: fast where they are in order already
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    batches = feasible.global_batch[order]
    first = feasible.take(order[starts])
    lines = Lines(
        part=first.part.astype(np.float64),
        nodes=first.nodes.astype(np.float64),
        workers_per_node=first.workers_per_node.astype(np.float64),
        smallest=np.minimum.reduceat(batches, starts).astype(np.float64),
        largest=np.maximum.reduceat(batches, starts).astype(np.float64),
    )
    if len(starts) <= MAX_LINES:
        return lines
    kept = np.isin(key[order][starts], key[_fastest_rows(feasible)])
    return Lines(*(column[kept] for column in lines))


def _fastest_rows(feasible: CandidateTable) -> NDArray[np.intp]:
    """Return the fastest candidate of each of `MAX_LINES` ranges of batches."""
    octaves = np.log2(feasible.global_batch)
    width = (octaves.max() - octaves.min()) / (MAX_LINES - 1) or 1.0
    range_of = ((octaves - octaves.min()) / width).astype(np.int64)
    least = np.full(MAX_LINES, np.inf)
    np.minimum.at(least, range_of, feasible.train_time_s)
    return np.flatnonzero(feasible.train_time_s == least[range_of])


def knee_of(feasible: CandidateTable, nominal: TrainTime, drawn: TrainTime | None) -> Knee | None:
    """Return the knee of the fitted curve with its 90 % interval; None for too few global batches.

    Args:
        feasible: Feasible candidates.
        nominal: The fitted model.
        drawn: Models drawn from the fit's uncertainty; None leaves the interval out.
    """
    batches = feasible.global_batch
    if not np.any((batches > batches.min()) & (batches < batches.max())):
        return None
    lines = lines_of(feasible)
    knee = find_knee(lower_envelope(lines, nominal))
    if drawn is None:
        return Knee(global_batch=knee)
    curves = lower_envelope(lines, drawn, DRAWN_POINTS)
    knees = find_knees(curves)
    share = float(np.mean(np.isnan(knees)))
    if share == 1.0:
        return Knee(global_batch=knee, share_without_knee=share)
    interval = _interval(curves.global_batch, knees, knee)
    return Knee(global_batch=knee, interval_90=interval, share_without_knee=share)


def _interval(grid: Array, knees: Array, knee: float | None) -> tuple[float, float]:
    """Return the interval of the drawn knees, wide enough to hold the fitted curve's knee.

    It is a step of their grid wider, as that is coarser than the fitted curve's. Drawn coefficients
    stay within their bounds: where one is fitted at a bound, all draws lie on the same side of it.
    """
    step = float(grid[-1] / grid[0]) ** (1.0 / (DRAWN_POINTS - 1))
    low, high = np.nanquantile(knees, [0.05, 0.95])
    low = max(grid[0], low / step)
    high = min(grid[-1], high * step)
    return float(min(low, knee or math.inf)), float(max(high, knee or 0.0))


# models drawn from the fit's uncertainty
DRAWS = 200
# the same measurements give the same plan
SEED = 0


def fitted_time(parts: Sequence[Part], epochs: int) -> TrainTime:
    """Return the seconds of training by the fitted models, as a function."""

    def train_time_s(
        index: int, nodes: Array, workers_per_node: Array, local_batch: Array
    ) -> Array:
        part = parts[index]
        return part.models.train_time_s(
            epochs * part.summary.dataset_samples, nodes, workers_per_node, local_batch
        )

    return train_time_s


def drawn_time(parts: Sequence[Part], epochs: int) -> TrainTime:
    """Return the seconds of training by models drawn from the uncertainty of each fit."""

    def train_time_s(
        index: int, nodes: Array, workers_per_node: Array, local_batch: Array
    ) -> Array:
        part = parts[index]
        steps = epochs * part.summary.dataset_samples / (nodes * workers_per_node * local_batch)
        model = part.models.step_time
        return steps * model.samples(nodes, local_batch, workers_per_node, count=DRAWS, seed=SEED)

    return train_time_s
