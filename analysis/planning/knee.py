"""Knee of the least training time over the global batch, and its interval from the fit.

Larger batches shorten training ever less, while they cost memory and generalization. The knee is
the largest batch whose last doubling still saves `SAVED` = 20 % of the training time. For steps
with a fixed cost, T = α/B + β, it is 3 α/β: there, fixed costs take a quarter of the time.

The curve continues beyond `search.max_batch`, until memory or samples run out, so that the knee is
a property of the training and the nodes. Kneedle, which the paper uses, finds the point of the
curve farthest below the line between its ends (V. Satopää et al., "Finding a Kneedle in a
Haystack", 2011): for the same curve that is √(B_min · B_max), whatever α and β are. `kind =
"kneedle"` uses it over the search's own range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.planning.candidates import (
    FEASIBLE,
    CandidateTable,
    Partition,
    Why,
    predict,
    stacked,
)
from tula_hpc.analysis.planning.partitions import plannable
from tula_hpc.config import SweepSpec
from tula_hpc.files import loaded_elsewhere
from tula_hpc.records import Knee

# Function from index of the partition, nodes, workers per node and local batch (not always whole)
# to seconds of training: arrays of one length n give (n,), or (draws, n) if models are drawn from
# the fit's uncertainty.
TrainTime = Callable[[int, Array, Array, Array], Array]

# share of the time that a doubling of the batch has to save
SAVED = 0.2
# points per octave of the fitted curve, and of the curves drawn from the fit's uncertainty
POINTS = 64
DRAWN_POINTS = 16
# Kneedle: a curve through fewer global batches has no bend
MIN_BATCHES = 3
# Kneedle: the least time must be this share below the time of the smallest batch
MIN_FALL = 0.05
# Kneedle: distance from the straight line between the curve's ends, in units of normalized axes
MIN_BEND = 0.05
# number of models drawn from the fit's uncertainty
DRAWS = 200
# fixed, so that the same measurements give the same plan
SEED = 0


class Envelope(NamedTuple):
    """Least training time over the global batch."""

    # (n,), ascending in equal ratios
    global_batch: Array
    # (n,) or (draws, n), never rising: the least time with this batch or a smaller one
    train_time_s: Array
    # points of `global_batch` per octave
    points: int


class Lines(NamedTuple):
    """Cluster sizes as columns, each between its smallest and its largest possible global batch."""

    part: Array
    nodes: Array
    workers_per_node: Array
    smallest: Array
    largest: Array


class TimeCurves(NamedTuple):
    """Training time of every cluster size over its batches, as fitted and as drawn around that."""

    lines: Lines
    nominal: TrainTime
    # None: no interval is needed
    drawn: TrainTime | None = None


def knee_curves(
    parts: Sequence[Partition], sweep: SweepSpec, *, with_draws: bool = True
) -> TimeCurves | None:
    """Return the curves to search for the objective's knee; None for objectives without one.

    Each partition must have a possible batch. `with_draws` also draws models from the uncertainty
    of each fit, for the interval.
    """
    if not sweep.objective.has_knee:
        return None
    epochs = sweep.workload.epochs
    tables = []
    for index, part in enumerate(parts):
        largest = sweep.search.max_batch
        if sweep.objective.kind == "knee":
            largest = max(largest, part.summary.dataset_samples)
        search = sweep.search.model_copy(update={"max_batch": largest})
        wide = sweep.model_copy(update={"search": search})
        table = predict(index, part, plannable(wide, part)[0], wide)
        # unseen memory is no reason to leave a batch out: a profile can show that it suffices
        tables.append(table.take(np.isin(table.why, [FEASIBLE, Why.UNSEEN])))
    drawn = _train_time(parts, epochs, drawn=True) if with_draws else None
    return TimeCurves(lines_of(stacked(tables)), _train_time(parts, epochs, drawn=False), drawn)


def lower_envelope(lines: Lines, train_time_s: TrainTime, points: int = POINTS) -> Envelope:
    """Return the least training time over the global batch, of all cluster sizes."""
    low = lines.smallest.min()
    octaves = math.log2(lines.largest.max() / low)
    # from the low end on, so that a higher end only appends batches
    grid = low * 2.0 ** (np.arange(math.floor(octaves * points + 1e-6) + 1) / points)
    line, point = np.nonzero(
        (grid >= lines.smallest[:, None] * (1 - 1e-9))
        & (grid <= lines.largest[:, None] * (1 + 1e-9))
    )
    times = _evaluate(lines, line, grid[point], train_time_s)
    least = np.full((*times.shape[:-1], len(grid)), np.inf)
    for index in range(len(lines.nodes)):
        mine = line == index
        least[..., point[mine]] = np.minimum(least[..., point[mine]], times[..., mine])
    return Envelope(grid, np.minimum.accumulate(least, axis=-1), points)


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


def doubling_knees(curve: Envelope) -> Array:
    """Return the largest batch of each curve whose last doubling saves `SAVED`, (draws,).

    If no doubling does, the knee is the smallest batch.
    """
    batches, times, octave = curve
    saves = times[..., octave:] <= (1.0 - SAVED) * times[..., :-octave]
    if not saves.shape[-1]:
        return np.full(times.shape[:-1], batches[0])
    last = len(batches) - 1 - np.argmax(saves[..., ::-1], axis=-1)
    return np.asarray(np.where(saves.any(axis=-1), batches[last], batches[0]))


def kneedle_knees(curve: Envelope) -> Array:
    """Return the batch of each curve farthest below its chord, (draws,); NaN if it hardly bends."""
    batches, times, _ = curve
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


def knees(kind: str, curve: Envelope) -> Array:
    """Return the knee of each curve by the objective's law, (draws,); NaN for none."""
    return kneedle_knees(curve) if kind == "kneedle" else doubling_knees(curve)


def find_kneedle(curve: Envelope) -> float | None:
    """Return the knee of one curve by the package kneed; None if it hardly bends.

    Of several knees it is the one farthest below the chord, as for `kneedle_knees`, which searches
    hundreds of curves at once.
    """
    batches, times, _ = curve
    if np.isnan(kneedle_knees(curve)):
        return None
    # imported only when needed: kneed loads matplotlib and scipy.signal, which takes half a second
    with loaded_elsewhere():
        from kneed import KneeLocator
    locator = KneeLocator(batches, times, curve="convex", direction="decreasing", online=True)
    height = (times - times[-1]) / (times[0] - times[-1])
    bend = 1.0 - (batches - batches[0]) / (batches[-1] - batches[0]) - height
    return max(
        sorted(map(float, locator.all_knees)),
        key=lambda batch: float(np.interp(batch, batches, bend)),
        default=None,
    )


def batches_up_to(kind: str, knee: float | Array) -> Array:
    """Return the largest batch that a knee allows: itself; for Kneedle half an octave above it."""
    return np.asarray(knee * (1.0 if kind == "knee" else math.sqrt(2.0)) * (1.0 + 1e-9))


def sampled_knees(kind: str, curves: TimeCurves) -> Array:
    """Return the knee of the fitted curve, then of each drawn one, (1 + draws,); NaN for none."""
    found = []
    for train_time_s in filter(None, (curves.nominal, curves.drawn)):
        sampled = lower_envelope(curves.lines, train_time_s, DRAWN_POINTS)
        found.append(np.atleast_1d(knees(kind, sampled)))
    return np.concatenate(found)


def knee_of(kind: str, curves: TimeCurves) -> Knee:
    """Return the fitted curve's knee, if any, with its 90 % interval where models were drawn."""
    nominal = lower_envelope(curves.lines, curves.nominal)
    knee = find_kneedle(nominal) if kind == "kneedle" else float(doubling_knees(nominal))
    if curves.drawn is None:
        return Knee(global_batch=knee)
    drawn = lower_envelope(curves.lines, curves.drawn, DRAWN_POINTS)
    found = knees(kind, drawn)
    share = float(np.mean(np.isnan(found)))
    if share == 1.0:
        return Knee(global_batch=knee, share_without_knee=share)
    interval = _interval(drawn.global_batch, found, knee)
    is_cut = interval[1] >= drawn.global_batch[-1]
    return Knee(global_batch=knee, interval_90=interval, is_cut=is_cut, share_without_knee=share)


def _interval(grid: Array, found: Array, knee: float | None) -> tuple[float, float]:
    """Return the interval of the drawn knees, wide enough to hold the fitted curve's knee.

    Each end is moved out by a step of their grid, which is coarser than the fitted curve's. The
    fitted knee may lie outside, as drawn coefficients stay within their bounds: if one is fitted at
    its bound, all draws lie on the same side of it.
    """
    step = 2.0 ** (1.0 / DRAWN_POINTS)
    low, high = np.nanquantile(found, [0.05, 0.95])
    low = max(grid[0], low / step)
    high = min(grid[-1], high * step)
    return float(min(low, knee or math.inf)), float(max(high, knee or 0.0))


def lines_of(possible: CandidateTable) -> Lines:
    """Return the cluster sizes of possible candidates."""
    columns = np.stack([possible.part, possible.nodes, possible.workers_per_node], axis=1)
    sizes, line = np.unique(columns, axis=0, return_inverse=True)
    smallest = np.full(len(sizes), np.inf)
    largest = np.zeros(len(sizes))
    np.minimum.at(smallest, line.ravel(), possible.global_batch)
    np.maximum.at(largest, line.ravel(), possible.global_batch)
    part, nodes, workers_per_node = sizes.T.astype(np.float64)
    return Lines(part, nodes, workers_per_node, smallest, largest)


def _train_time(parts: Sequence[Partition], epochs: int, *, drawn: bool) -> TrainTime:
    """Return the seconds of training by the fitted models, or by models drawn around each fit.

    `T = E·D/B · t_step` (S. Tyagi, F. Wang, "Tula"); steps need not be whole.
    """

    def train_time_s(
        index: int, nodes: Array, workers_per_node: Array, local_batch: Array
    ) -> Array:
        part = parts[index]
        steps = epochs * part.summary.dataset_samples / (nodes * workers_per_node * local_batch)
        model = part.models.step_time
        points = (nodes, local_batch, workers_per_node)
        if drawn:
            return steps * model.samples(*points, count=DRAWS, seed=SEED)
        return steps * model.predict(*points)

    return train_time_s
