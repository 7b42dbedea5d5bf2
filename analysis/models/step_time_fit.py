"""Choice of the step-time law's form and coefficients from measured rows.

Coefficients are bounded by their signs. Some have a prior belief, see `BELIEFS` and the spreads
below it, which counts as far as the data leave them open. These beliefs were chosen on public step
times of four clusters (T4, K80, RTX 2080 Ti, Quadro), see `tests.benchmarks.transfer`. The belief
in small departures from the law makes this a mixed-effects model: a measurement of one batch on one
cluster size informs about that batch on the others, and sizes that were not measured are as
uncertain as the measured ones vary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tula_hpc.analysis.models import step_time_law as terms
from tula_hpc.analysis.models.regression import (
    Array,
    Fit,
    Problem,
    Scatter,
    explaining_a_row,
    fit_relative,
    identified,
    spread,
)
from tula_hpc.analysis.models.step_time_law import NAMES, Knots, Law, Rows
from tula_hpc.config.search import FormName

Backend = Literal["nccl", "gloo"]


class Belief(NamedTuple):
    """Prior belief in the behaviour of a collective library; spreads are standard deviations."""

    library: Backend
    # exponent of the collective's shape, if no form is given; its spread is small for nccl, so that
    # departures of the first cluster sizes do not pass for a collective that hardly grows
    ring_share: float
    ring_spread: float
    # share of the computation that can hide the collective; little on CPUs, as both need the cores
    overlap_share: float
    overlap_spread: float
    # slow-down of the computation by each doubling of the workers, believed to be 0
    straggling_spread: float

    @property
    def spreads(self) -> dict[int, float]:
        """Prior standard deviations by coefficient."""
        return {
            terms.OVERLAP: self.overlap_spread,
            terms.CONTENTION: CONTENTION_SPREAD,
            terms.STRAGGLING: self.straggling_spread,
            terms.RING_SHARE: self.ring_spread,
            terms.CONGESTION: CONGESTION_SPREAD,
        }


BELIEFS: dict[Backend, Belief] = {
    "nccl": Belief(
        "nccl", 0.8, 0.15, overlap_share=0.4, overlap_spread=0.3, straggling_spread=0.02
    ),
    "gloo": Belief(
        "gloo", 1.0, 0.35, overlap_share=0.1, overlap_spread=0.1, straggling_spread=0.05
    ),
}
# spread around 0 of the slow-down by each further worker of a node
CONTENTION_SPREAD = 0.05
# spread around 0 of the exponent
CONGESTION_SPREAD = 0.1
# spread around 0 of the latency of one message, as a share of the median observation
LATENCY_SPREAD = 0.03
# networks between nodes, before one was measured: 20 Gbit/s, most of them from 2 to 200 Gbit/s
NETWORK_BYTES_PER_S = 2.5e9
NETWORK_SPREAD = 1.4
# or, for unknown bytes, as slow as links inside a node, most between an eighth and 8 times that
NETWORK_OVER_NODE = 1.0
NETWORK_OVER_NODE_SPREAD = 1.3
# or, if neither is known, this share of the median observation
NETWORK_OVER_STEP = 0.3
# typical relative residual of a step, against which beliefs are weighed
NOISE = 0.03
LEAST_NOISE = 0.003
# spread around 0 of the departures u of batches and v of cluster sizes
EFFECT_SPREAD = 0.15
# belief in the scatter of a measured step
SCATTER = Scatter(error=0.0385, rows=8.0)
# with more batches, or cluster sizes, their departures are not fitted
MAX_KNOTS = 64
# number of batches that tell a floor from a line
FLOOR_BATCHES = 4
# another term must lower the information criterion (AIC) by this
BETTER_BY = 4.0
# steps that scatter less than this share of NOISE are worth a second fit
SHARPER = 0.7
# a coefficient counts as pinned if the data leave more than this share of its prior's spread
PINNED_SPREAD = 0.9
# Weights of whole steps, computation and bare all-reduce: steps are what is predicted, the others
# guide the fit. In a step the all-reduce runs in pieces and competes with the computation, so the
# bare one counts least.
WEIGHTS = np.array([1.0, 0.5, 0.1])


class FittedLaw(NamedTuple):
    """One form of the law, fitted to rows."""

    form: str
    law: Law
    fit: Fit
    free: NDArray[np.bool_]
    bounds: tuple[Array, Array]
    noise: float
    belief: Belief
    # standard deviation of log sync_s where no two nodes were measured, else 0
    network_spread: float = 0.0

    def with_believed_network(self, rows: Rows, gradient_bytes: float | None) -> FittedLaw:
        """Return the fit with a typical network between nodes, if none was measured.

        Two nodes take the time to move the gradient's bytes; if these are unknown, a multiple of
        the collective's time inside a node; if that is unknown, too, a share of the median row.
        """
        if self.law.additive or np.any(rows.nodes[rows.kind != terms.COMPUTE] > 1.0):
            return self
        node_s = self.fit.coefficients[terms.NODE_SYNC] * self.law.form.bandwidth(np.array(2.0))
        network_spread = NETWORK_SPREAD
        if gradient_bytes:
            median_s = gradient_bytes / NETWORK_BYTES_PER_S
        elif node_s > 0.0:
            median_s = NETWORK_OVER_NODE * float(node_s)
            network_spread = NETWORK_OVER_NODE_SPREAD
        else:
            median_s = NETWORK_OVER_STEP * float(np.median(rows.seconds))
        coefficients = self.fit.coefficients.copy()
        coefficients[terms.SYNC] = median_s / float(self.law.form.bandwidth(np.array(2.0)))
        fit = self.fit._replace(coefficients=coefficients)
        return self._replace(fit=fit, network_spread=network_spread)

    @property
    def misfit(self) -> float:
        """Sum of the squared residuals and departures, in units of the noise."""
        return 2.0 * self.fit.cost / self.noise**2

    @property
    def criterion(self) -> float:
        """Akaike's criterion: the misfit, plus two for each coefficient of the law."""
        return self.misfit + 2.0 * float(np.sum(self.free[: len(NAMES)]))

    def unidentified(self) -> list[str]:
        """Return the coefficients that are not free, or hardly more certain than their prior."""
        spreads = np.sqrt(np.maximum(np.diag(self.fit.covariance), 0.0)) * self.noise
        pinned = ~self.free[: len(NAMES)]
        for index, prior_spread in self.belief.spreads.items():
            if spreads[index] > PINNED_SPREAD * prior_spread:
                pinned[index] = True
        return [name for name, is_pinned in zip(NAMES, pinned, strict=True) if is_pinned]

    def departures(self) -> dict[str, dict[str, float]]:
        """Return the departures by local batch and by nodes."""
        batches, sizes = self.law.knots
        of_batches = self.fit.coefficients[len(NAMES) : len(NAMES) + len(batches)].tolist()
        of_sizes = self.fit.coefficients[len(NAMES) + len(batches) :].tolist()
        by_batch = {f"{b:g}": value for b, value in zip(batches, of_batches, strict=True)}
        by_nodes = {}
        for (nodes, per_node), value in zip(sizes, of_sizes, strict=True):
            by_nodes[f"{nodes:g}" if per_node == 1 else f"{nodes:g}x{per_node:g}"] = value
        return {"local_batch": by_batch, "nodes": by_nodes}

    def absent(self, rows: Rows) -> set[str]:
        """Return the coefficients that this form lacks, or that no row depends on."""
        several_per_node = np.any(rows.per_node > 1.0)
        present = {
            "overlap_share": not self.law.additive,
            "overhead_s": not self.law.additive and np.any(rows.kind == terms.ALLREDUCE),
            "alone_s": not self.law.additive and _times_alone(rows),
            "straggling": not self.law.additive and np.any(rows.workers > 1.0),
            "contention": several_per_node,
            "sharing_s": several_per_node,
            "node_sync_s": several_per_node,
            "compute_floor_s": self.free[terms.FLOOR],
            "storage_s": self.free[terms.STORAGE],
            "loader_s": self.free[terms.LOADER],
            "latency_s": self.law.form.latency is not None,
            "ring_share": self.law.form.fitted,
            "congestion": self.law.form.fitted,
        }
        return {name for name, is_present in present.items() if not is_present}


def choose_form(
    rows: Rows,
    wanted: FormName,
    belief: Belief,
    *,
    storage_decides: bool = False,
    loader_decides: bool = False,
) -> FittedLaw:
    """Fit the wanted form; "auto" also fits the collective's shape, and "paper" is the plain sum.

    Otherwise a floor, and storage that all nodes share, are fitted only if they make the fit
    clearly better. Storage is also fitted if it is known to decide, and a loader that loads ahead
    only if it is.
    """
    loader_s = _loader_alone(rows) if loader_decides and wanted != "paper" else 0.0
    fit = partial(_fit_form, rows, wanted, belief, loader_s=loader_s)
    found = _sharpened(fit(), rows, fit)
    sizes = np.unique(rows.workers[rows.kind == terms.STEP])
    stored = found.fit.coefficients.copy()
    stored[terms.STORAGE] = _storage_of_slowest(rows, found.fit.residuals)
    if storage_decides and wanted != "paper" and len(sizes) > 1:
        return fit(noise=found.noise, near=stored)
    # a smaller misfit leaves no room for another term to be clearly better
    if wanted == "paper" or found.misfit < BETTER_BY + 2.0:
        return found
    others = []
    if len(np.unique(rows.batch[rows.kind != terms.ALLREDUCE])) >= FLOOR_BATCHES:
        floored = found.fit.coefficients.copy()
        floored[terms.FLOOR] = 0.5 * floored[terms.FIXED]
        others.append(fit(noise=found.noise, near=floored))
    if len(sizes) > 1:
        others.append(fit(noise=found.noise, near=stored))
    best = min([found, *others], key=lambda fitted: fitted.criterion)
    if best.criterion < found.criterion - BETTER_BY:
        return best
    return found


def _loader_alone(rows: Rows) -> float:
    """Return loader_s as if the largest step on the fewest workers only waited for its loader."""
    steps = np.flatnonzero(rows.kind == terms.STEP)
    if not len(steps):
        return 0.0
    largest = steps[np.lexsort([-rows.batch[steps], rows.workers[steps]])[0]]
    return float(rows.seconds[largest] / rows.batch[largest])


def _storage_of_slowest(rows: Rows, residuals: Array) -> float:
    """Return storage_s as if the step that most exceeds its prediction only waited for storage."""
    steps = np.flatnonzero(rows.kind == terms.STEP)
    if not len(steps):
        return 0.0
    slowest = steps[np.argmin(residuals[steps])]
    return float(rows.seconds[slowest] / (rows.workers[slowest] * rows.batch[slowest]))


def _sharpened(found: FittedLaw, rows: Rows, fit: Callable[..., FittedLaw]) -> FittedLaw:
    """Fit again if steps scatter less than usual: with less noise, beliefs have to count less."""
    scatter = spread(found.fit, rows.kind == terms.STEP, Scatter(NOISE, SCATTER.rows / 2))
    noise = max(scatter, LEAST_NOISE)
    if noise > SHARPER * NOISE:
        return found
    return fit(noise=noise, near=found.fit.coefficients)


def _times_alone(rows: Rows) -> bool:
    """Tell whether both step and computation of a single worker were timed."""
    alone = rows.workers == 1.0
    return all(np.any(alone & (rows.kind == kind)) for kind in (terms.STEP, terms.COMPUTE))


def _fit_form(
    rows: Rows,
    form: FormName,
    belief: Belief,
    *,
    noise: float = NOISE,
    near: Array | None = None,
    loader_s: float = 0.0,
) -> FittedLaw:
    """Fit one form; start from `near`, or from least-squares fits of the plain sum.

    A loader that loads ahead is part of the law if `loader_s`, from which it starts, is not 0.
    """
    if form == "paper":
        law = Law(terms.PAPER, Knots(np.zeros(0), np.zeros((0, 2))), additive=True)
    elif form == "auto":
        law = Law(terms.FITTED[belief.library], _knots(rows))
    else:
        law = Law(terms.FORMS[form], _knots(rows))
    weights = WEIGHTS[rows.kind]
    linear = law.design(rows) * (weights / rows.seconds)[:, None]
    free = _free(law, rows, linear)
    if near is not None:
        free[[terms.FLOOR, terms.STORAGE]] = near[[terms.FLOOR, terms.STORAGE]] > 0.0
    free[terms.LOADER] = loader_s > 0.0
    lower, upper = _bounds(law)
    believed, firmness = _beliefs(law, belief, noise)
    if law.form.fitted:
        firmness[terms.LATENCY] = noise / (LATENCY_SPREAD * float(np.median(rows.seconds)))

    def evaluate(coefficients: Array) -> tuple[Array, Array]:
        found = law.evaluate(coefficients, rows)
        return found.seconds, found.gradients

    believed[terms.LOADER] = loader_s
    scale = _scale(rows, linear)
    scale[terms.LOADER] = loader_s
    problem = Problem(evaluate, rows.seconds, weights, upper, lower, believed, firmness, scale)
    starts = _starts(linear, weights, free, believed) if near is None else [near]
    fit = fit_relative(problem, starts, free)
    return FittedLaw(form, law, fit, free, (lower, upper), noise, belief)


def _knots(rows: Rows) -> Knots:
    """Return the measured batches, and the cluster sizes of several workers, if few enough."""
    batches = np.unique(rows.batch[rows.kind != terms.ALLREDUCE])
    sizes = np.unique(np.stack([rows.nodes, rows.per_node], axis=1)[rows.workers > 1.0], axis=0)
    if len(batches) > MAX_KNOTS:
        batches = batches[:0]
    if len(sizes) > MAX_KNOTS:
        sizes = sizes[:0]
    return Knots(batches, sizes)


def _free(law: Law, rows: Rows, linear: Array) -> NDArray[np.bool_]:
    """Mark the coefficients that the data determine, and those with a prior that any row shows."""
    order = [terms.PER_SAMPLE, terms.FIXED, terms.SYNC, terms.NODE_SYNC, terms.LATENCY]
    if np.any(rows.kind == terms.ALLREDUCE) and not law.additive:
        order.append(terms.OVERHEAD)
    order.append(terms.SHARING)
    if _times_alone(rows) and not law.additive:
        order.append(terms.ALONE)
    free = identified(linear, order)
    # without a single node, only the overlap tells constant synchronization from computation
    free[terms.SYNC] |= free[terms.LATENCY]
    together = bool(free[terms.SYNC] or free[terms.NODE_SYNC])
    free[terms.OVERLAP] = together and not law.additive
    free[terms.CONTENTION] = len(np.unique(rows.per_node)) > 1 and not law.additive
    free[terms.STRAGGLING] = len(np.unique(rows.workers)) > 1 and not law.additive
    free[[terms.RING_SHARE, terms.CONGESTION]] = together and law.form.fitted
    first_size = len(NAMES) + len(law.knots.batches)
    free[len(NAMES) : first_size] = True
    free[first_size:] = together
    return free


def _scale(rows: Rows, linear: Array) -> Array:
    """Return the size of each coefficient that alone would explain a row of the plain sum."""
    scale = explaining_a_row(linear)
    scale[terms.FLOOR] = scale[terms.FIXED]
    steps = rows.kind == terms.STEP
    rates = rows.seconds[steps] / (rows.workers[steps] * rows.batch[steps])
    if np.any(steps):
        scale[terms.STORAGE] = np.min(rates)
    return scale


def _bounds(law: Law) -> tuple[Array, Array]:
    lower = np.zeros(law.coefficients)
    upper = np.full(law.coefficients, np.inf)
    upper[[terms.OVERLAP, terms.CONTENTION, terms.STRAGGLING]] = 1.0
    upper[[terms.RING_SHARE, terms.CONGESTION]] = 2.0
    lower[len(NAMES) :] = -1.0
    upper[len(NAMES) :] = 1.0
    return lower, upper


def _beliefs(law: Law, belief: Belief, noise: float) -> tuple[Array, Array]:
    believed = np.zeros(law.coefficients)
    believed[terms.OVERLAP] = 0.0 if law.additive else belief.overlap_share
    believed[terms.RING_SHARE] = belief.ring_share
    firmness = np.zeros(law.coefficients)
    for index, prior_spread in belief.spreads.items():
        firmness[index] = noise / prior_spread
    firmness[len(NAMES) :] = noise / EFFECT_SPREAD
    return believed, firmness


def _starts(linear: Array, weights: Array, free: NDArray[np.bool_], believed: Array) -> list[Array]:
    """Return least-squares fits of the plain sum for two overlaps, as there are several minima."""
    columns = free & np.any(linear != 0.0, axis=0)
    length = np.linalg.norm(linear[:, columns], axis=0)
    start = believed.copy()
    start[columns] = nnls(linear[:, columns] / length, weights)[0] / length
    if not free[terms.OVERLAP]:
        return [start]
    little, much = start, start.copy()
    little[terms.OVERLAP] = 0.1
    much[terms.OVERLAP] = 0.8
    return [little, much]
