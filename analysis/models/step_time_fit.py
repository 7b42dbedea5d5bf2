"""Choice of the step-time law's form and coefficients from measured rows.

Coefficients are bounded by their signs. Some have a prior belief, which counts as far as the data
leave them open:

- the overlapped share of the computation: 0.6 ± 0.3 on GPUs (the backward pass is two thirds of
  it), 0.1 ± 0.1 on CPUs, where the collective needs the same cores (on the test cluster full fits
  of three networks find 0, 0 and 0.3);
- contention between workers of a node: 0 ± 0.1 for each further worker;
- straggling: 0 ± 0.05 for each doubling of the workers;
- departures u of batches and v of cluster sizes from the law: 0 ± 10 % where the typical residual
  is 3 %.

The belief in departures makes this a mixed-effects model: a measurement of one batch on one cluster
size informs about that batch on the others, and sizes that were not measured are as uncertain as
the measured ones vary.
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
    fit_relative,
    identified,
    spread,
)
from tula_hpc.analysis.models.step_time_law import (
    ALLREDUCE,
    COMPUTE,
    FORMS,
    NAMES,
    PAPER,
    STEP,
    Knots,
    Law,
    Rows,
)

FormName = Literal[
    "auto", "paper", "ring", "double_tree", "tree", "parameter_server", "reduce_scatter_all_gather"
]
Backend = Literal["nccl", "gloo"]


class Belief(NamedTuple):
    """Prior belief in the behaviour of a collective library."""

    form: str
    overlap_share: float
    # standard deviation of that
    overlap_spread: float

    @property
    def spreads(self) -> dict[int, float]:
        """Prior standard deviations by coefficient."""
        return {
            terms.OVERLAP: self.overlap_spread,
            terms.CONTENTION: CONTENTION_SPREAD,
            terms.STRAGGLING: STRAGGLING_SPREAD,
        }


BELIEFS: dict[Backend, Belief] = {
    "nccl": Belief("double_tree", 0.6, 0.3),
    "gloo": Belief("ring", 0.1, 0.1),
}
CONTENTION_SPREAD = 0.1
STRAGGLING_SPREAD = 0.05
# typical relative residual of a step; the beliefs count in its units
NOISE = 0.03
LEAST_NOISE = 0.003
EFFECT_SPREAD = 0.1
# of a measured step
SCATTER = Scatter(error=0.0385, rows=8.0)
# with more batches, or cluster sizes, their departures are not fitted
MAX_KNOTS = 64
# with more rows departures are not fitted, and repeats become their median before the fit
MANY_ROWS = 5000
# batches that tell a floor from a line
FLOOR_BATCHES = 4
# another form must have an information criterion (AIC) that is lower by this
BETTER_BY = 4.0
# steps that scatter less than this share of the usual are worth a second fit
SHARPER = 0.7
# a coefficient is called pinned while the data leave more than this share of its prior's spread
PINNED_SPREAD = 0.9
# Of whole steps, computation and all-reduce: steps have to be predicted, the others guide the fit.
# The step's own all-reduce competes with the computation, in pieces, so the bare one counts less.
WEIGHTS = np.array([1.0, 0.5, 0.1])


class Fitted(NamedTuple):
    """One form of the law, fitted to rows."""

    form: str
    law: Law
    fit: Fit
    free: NDArray[np.bool_]
    bounds: tuple[Array, Array]
    noise: float
    belief: Belief
    # workers of the only measured size between nodes, where the form follows from the belief alone
    only_size: float | None = None

    def form_departures(self, rows: Rows) -> Array:
        """Return how much more t_sync would grow with each form than with this one, as a logarithm.

        (forms, n), from the only size that was measured, where all agree, by the bandwidth terms,
        which differ most. Where the data or the user chose the form, and on a single node: 0.
        """
        if self.only_size is None:
            return np.zeros((1, len(rows.batch)))
        growths = np.stack([_growth(name, rows, self.only_size) for name in FORMS])
        return np.asarray(growths - _growth(self.form, rows, self.only_size))

    @property
    def misfit(self) -> float:
        """Sum of the squared residuals and departures, in units of the noise."""
        return 2.0 * self.fit.cost / self.noise**2

    @property
    def criterion(self) -> float:
        """Akaike's criterion: the misfit, plus two for each coefficient of the law."""
        return self.misfit + 2.0 * float(np.sum(self.free[: len(NAMES)]))

    def unidentified(self) -> list[str]:
        """Return the coefficients that are not free, or little narrower than their prior."""
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
        absent = set()
        if self.law.additive:
            absent |= {"overlap_share", "overhead_s", "alone_s", "straggling"}
        if not np.any(rows.kind == ALLREDUCE):
            absent.add("overhead_s")
        if not _times_alone(rows):
            absent.add("alone_s")
        if not np.any(rows.workers > 1.0):
            absent.add("straggling")
        if not np.any(rows.per_node > 1.0):
            absent |= {"contention", "sharing_s", "node_sync_s"}
        if not self.free[terms.FLOOR]:
            absent.add("compute_floor_s")
        if self.law.form.latency is None:
            absent.add("latency_s")
        return absent


def choose_form(rows: Rows, wanted: FormName, belief: Belief) -> Fitted:
    """Fit the wanted form; for "auto" the believed one unless another is clearly better.

    A floor is fitted only if it is clearly better, too.
    """
    fit = partial(_fit_form, rows, belief=belief)
    found = _sharpened(fit(belief.form if wanted == "auto" else wanted), rows, fit)
    if wanted != "auto":
        return found
    only_size = _only_size(rows)
    # a smaller misfit leaves no room for another form to be clearly better
    if only_size is None and found.misfit > BETTER_BY - 2.0:
        names = [name for name in FORMS if name != belief.form]
        found = _clearly_best(found, [fit(name, noise=found.noise) for name in names])
    batches = np.unique(rows.batch[rows.kind != ALLREDUCE])
    if len(batches) >= FLOOR_BATCHES and found.misfit >= BETTER_BY + 2.0:
        found = _clearly_best(found, [fit(found.form, floor=True, noise=found.noise)])
    return found._replace(only_size=only_size)


def _sharpened(found: Fitted, rows: Rows, fit: Callable[..., Fitted]) -> Fitted:
    """Fit again where steps scatter less than usual: beliefs, in units of the noise, count less."""
    noise = max(spread(found.fit, rows.kind == STEP, Scatter(NOISE, SCATTER.rows / 2)), LEAST_NOISE)
    return found if noise > SHARPER * NOISE else fit(found.form, noise=noise)


def _clearly_best(first: Fitted, others: list[Fitted]) -> Fitted:
    best = min([first, *others], key=lambda fitted: fitted.criterion)
    return best if best.criterion < first.criterion - BETTER_BY else first


def _only_size(rows: Rows) -> float | None:
    """Return the workers if at most one size above a single node was measured."""
    # forms differ between such sizes alone
    between = rows.nodes > 1.0
    if len(np.unique(rows.nodes[between])) > 1:
        return None
    return float(np.max(rows.workers[between], initial=1.0))


def _growth(form: str, rows: Rows, measured: float) -> Array:
    """Return log(f(N) / f(measured)), (n,), of a form's bandwidth term; 0 on a single node."""
    shape = FORMS[form].bandwidth
    between = (rows.nodes > 1.0) & (measured > 1.0)
    workers = np.where(between, rows.workers, 2.0)
    return np.where(between, np.log(shape(workers) / shape(np.maximum(measured, 2.0))), 0.0)


def _times_alone(rows: Rows) -> bool:
    """Tell whether both step and computation of a single worker were timed."""
    alone = rows.workers == 1.0
    return all(np.any(alone & (rows.kind == kind)) for kind in (STEP, COMPUTE))


def _fit_form(
    rows: Rows, form: str, *, belief: Belief, floor: bool = False, noise: float = NOISE
) -> Fitted:
    if form == "paper":
        law = Law(PAPER, Knots(np.zeros(0), np.zeros((0, 2))), additive=True)
    else:
        law = Law(FORMS[form], _knots(rows))
    weights = WEIGHTS[rows.kind]
    linear = law.design(rows) * (weights / rows.seconds)[:, None]
    free = _free(law, rows, linear, floor=floor)
    lower, upper = _bounds(law)
    believed, firmness = _beliefs(law, belief, noise)

    def evaluate(coefficients: Array) -> tuple[Array, Array]:
        found = law.evaluate(coefficients, rows)
        return found.seconds, found.gradients

    problem = Problem(evaluate, rows.seconds, weights, upper, lower, believed, firmness)
    fit = fit_relative(problem, _starts(linear, weights, free, believed), free)
    return Fitted(form, law, fit, free, (lower, upper), noise, belief)


def _knots(rows: Rows) -> Knots:
    """Return the measured batches, and the cluster sizes of several workers, if few enough."""
    batches = np.unique(rows.batch[rows.kind != ALLREDUCE])
    sizes = np.unique(np.stack([rows.nodes, rows.per_node], axis=1)[rows.workers > 1.0], axis=0)
    many_rows = len(rows.kind) > MANY_ROWS
    if many_rows or len(batches) > MAX_KNOTS:
        batches = batches[:0]
    if many_rows or len(sizes) > MAX_KNOTS:
        sizes = sizes[:0]
    return Knots(batches, sizes)


def _free(law: Law, rows: Rows, linear: Array, *, floor: bool) -> NDArray[np.bool_]:
    """Mark the coefficients that the data determine, and those with a prior that any row shows."""
    order = [terms.PER_SAMPLE, terms.FIXED, terms.SYNC, terms.NODE_SYNC, terms.LATENCY]
    if np.any(rows.kind == ALLREDUCE) and not law.additive:
        order.append(terms.OVERHEAD)
    order.append(terms.SHARING)
    if _times_alone(rows) and not law.additive:
        order.append(terms.ALONE)
    free = identified(linear, order)
    # where only several nodes were measured, overlap tells a constant from the computation
    free[terms.SYNC] |= free[terms.LATENCY]
    together = bool(free[terms.SYNC] or free[terms.NODE_SYNC])
    free[terms.OVERLAP] = together and not law.additive
    free[terms.CONTENTION] = len(np.unique(rows.per_node)) > 1 and not law.additive
    free[terms.STRAGGLING] = len(np.unique(rows.workers)) > 1 and not law.additive
    free[terms.FLOOR] = floor and bool(free[terms.FIXED]) and not law.additive
    first_size = len(NAMES) + len(law.knots.batches)
    free[len(NAMES) : first_size] = True
    free[first_size:] = together
    return free


def _bounds(law: Law) -> tuple[Array, Array]:
    lower = np.zeros(law.coefficients)
    upper = np.full(law.coefficients, np.inf)
    upper[[terms.OVERLAP, terms.CONTENTION, terms.STRAGGLING]] = 1.0
    lower[len(NAMES) :] = -1.0
    upper[len(NAMES) :] = 1.0
    return lower, upper


def _beliefs(law: Law, belief: Belief, noise: float) -> tuple[Array, Array]:
    believed = np.zeros(law.coefficients)
    believed[terms.OVERLAP] = 0.0 if law.additive else belief.overlap_share
    firmness = np.zeros(law.coefficients)
    for index, prior_spread in belief.spreads.items():
        firmness[index] = noise / prior_spread
    firmness[len(NAMES) :] = noise / EFFECT_SPREAD
    return believed, firmness


def _starts(linear: Array, weights: Array, free: NDArray[np.bool_], believed: Array) -> list[Array]:
    """Return least-squares fits of the plain sum, with two overlaps: there are several minima."""
    columns = free & np.any(linear != 0.0, axis=0)
    length = np.linalg.norm(linear[:, columns], axis=0)
    start = believed.copy()
    start[columns] = nnls(linear[:, columns] / length, weights)[0] / length
    start[terms.FLOOR] = 0.5 * start[terms.FIXED] if free[terms.FLOOR] else 0.0
    if not free[terms.OVERLAP]:
        return [start]
    little, much = start, start.copy()
    little[terms.OVERLAP] = 0.1
    much[terms.OVERLAP] = 0.8
    return [little, much]
