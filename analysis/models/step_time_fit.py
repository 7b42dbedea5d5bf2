"""Which form of the step-time law fits measured rows, and with which coefficients.

The coefficients of the law are unknown but for their signs; of some others something is believed
beforehand, and the data decide as far as they can:

- the overlapped share of the computation: 0.6 ± 0.3 on GPUs (the backward pass is two thirds of
  it), 0.1 ± 0.1 on CPUs, where the collective needs the same cores (on the test cluster full fits
  of three networks find 0, 0 and 0.3);
- contention between workers of a node: 0 ± 0.1 for each further worker;
- straggling: 0 ± 0.05 for each doubling of the workers;
- departures u of batches and v of cluster sizes from the law: 0 ± 10 % where the typical residual
is 3 %.

The belief in departures makes this a mixed-effects model: what is measured of one batch on one
cluster size says something of that batch on the others, and sizes that were not measured are as
uncertain as the measured ones vary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

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
    ALONE,
    COMPUTE,
    CONTENTION,
    FIXED,
    FLOOR,
    FORMS,
    LATENCY,
    NAMES,
    NODE_SYNC,
    OVERHEAD,
    OVERLAP,
    PAPER,
    PER_SAMPLE,
    SHARING,
    STEP,
    STRAGGLING,
    SYNC,
    Knots,
    Law,
    Rows,
)

FormName = Literal[
    "auto", "paper", "ring", "double_tree", "tree", "parameter_server", "reduce_scatter_all_gather"
]
Backend = Literal["nccl", "gloo"]


class Belief(NamedTuple):
    """What is believed of a collective library before anything was measured."""

    form: str
    overlap_share: float
    # standard deviation of that
    overlap_spread: float

    @property
    def spreads(self) -> dict[int, float]:
        """Standard deviations of what is believed, by coefficient."""
        return {
            OVERLAP: self.overlap_spread,
            CONTENTION: CONTENTION_SPREAD,
            STRAGGLING: STRAGGLING_SPREAD,
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
# of a measured step, believed before any residual is seen
SCATTER = Scatter(error=0.0385, rows=8.0)
# batches, and cluster sizes, with a departure of their own; with more of them the law alone is
# fitted
MAX_KNOTS = 64
# likewise with more rows; and repeated measurements become their median before the fit
MANY_ROWS = 5000
# a floor needs so many batches to be told from a line
FLOOR_BATCHES = 4
# another form must have an information criterion (AIC) that is lower by this
BETTER_BY = 4.0
# steps that scatter less than this share of the usual are worth a second fit
SHARPER = 0.7
# a belief that the data narrow by less than this is called pinned
SPREAD_UNTOLD = 0.9
# Weights of the rows: a whole step is what has to be predicted, what was measured apart guides it.
# The step's own all-reduce differs from the bare one (it competes with the computation, in pieces),
# so that the bare one says less.
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
    # workers of the only size between nodes, where that leaves the form to the belief
    told_at: float | None = None

    def form_departures(self, rows: Rows) -> Array:
        """(forms, n): by how much t_sync would grow with every form, over how it grows with this one; a logarithm.

        From the only size that was measured on, where all agree, by the bandwidth terms, which
        differ most. Where the data or the user chose the form, and on a single node, nothing is
        open: 0.
        """
        if self.told_at is None:
            return np.zeros((1, len(rows.batch)))
        growths = np.stack([_growth(name, rows, self.told_at) for name in FORMS])
        return np.asarray(growths - _growth(self.form, rows, self.told_at))

    @property
    def misfit(self) -> float:
        """Sum of the squared residuals and departures, in units of the noise."""
        return 2.0 * self.fit.cost / self.noise**2

    @property
    def criterion(self) -> float:
        """Akaike's: the misfit, plus two for each coefficient of the law."""
        return self.misfit + 2.0 * float(np.sum(self.free[: len(NAMES)]))

    def untold(self) -> list[str]:
        """Coefficients that are not free, or of which the data tell hardly more than what was believed."""
        told = np.sqrt(np.maximum(np.diag(self.fit.covariance), 0.0)) * self.noise
        believed = {i for i, wide in self.belief.spreads.items() if told[i] > SPREAD_UNTOLD * wide}
        return [
            name for index, name in enumerate(NAMES) if not self.free[index] or index in believed
        ]

    def departures(self) -> dict[str, dict[str, float]]:
        """By what they belong to."""
        batches, sizes = self.law.knots
        values = self.fit.coefficients[len(NAMES) :].tolist()
        names = [
            f"{nodes:g}" if workers == 1 else f"{nodes:g}x{workers:g}" for nodes, workers in sizes
        ]
        return {
            "local_batch": {
                f"{batch:g}": value for batch, value in zip(batches, values, strict=False)
            },
            "nodes": dict(zip(names, values[len(batches) :], strict=True)),
        }

    def absent(self, rows: Rows) -> set[str]:
        """Coefficients that this form does not have, or that nothing measured is about."""
        absent = set() if np.any(rows.kind == ALLREDUCE) else {"overhead_s"}
        absent |= set() if _tells_alone(rows) else {"alone_s"}
        absent |= set() if np.any(rows.workers > 1.0) else {"straggling"}
        absent |= (
            set() if np.any(rows.per_node > 1.0) else {"contention", "sharing_s", "node_sync_s"}
        )
        absent |= set() if self.free[FLOOR] else {"compute_floor_s"}
        absent |= {"latency_s"} if self.law.form.latency is None else set()
        return absent | (
            {"overlap_share", "overhead_s", "alone_s", "straggling"} if self.law.additive else set()
        )


def choose_form(rows: Rows, wanted: FormName, belief: Belief) -> Fitted:
    """The wanted form, or the best; the believed one unless another is clearly better, with a floor only if it is."""
    fit = partial(_fit_form, rows, belief=belief)
    found = _sharpened(fit(belief.form if wanted == "auto" else wanted), rows, fit)
    if wanted != "auto":
        return found
    told_at = _only_size(rows)
    # or no form can be better by so much
    if told_at is None and found.misfit > BETTER_BY - 2.0:
        names = [name for name in FORMS if name != belief.form]
        found = _clearly_best(found, [fit(name, noise=found.noise) for name in names])
    if _tells_floor(rows) and found.misfit >= BETTER_BY + 2.0:
        found = _clearly_best(found, [fit(found.form, floor=True, noise=found.noise)])
    return found._replace(told_at=told_at)


def _sharpened(found: Fitted, rows: Rows, fit: Callable[..., Fitted]) -> Fitted:
    """Fit again where steps scatter less than is usual: the beliefs, which count in units of it, then count less."""
    noise = max(spread(found.fit, rows.kind == STEP, Scatter(NOISE, SCATTER.rows / 2)), LEAST_NOISE)
    return found if noise > SHARPER * NOISE else fit(found.form, noise=noise)


def _clearly_best(first: Fitted, others: list[Fitted]) -> Fitted:
    best = min([first, *others], key=lambda fitted: fitted.criterion)
    return best if best.criterion < first.criterion - BETTER_BY else first


def _only_size(rows: Rows) -> float | None:
    """Workers, where at most one size above a single node was measured: forms differ between sizes alone."""
    between = rows.nodes > 1.0
    if len(np.unique(rows.nodes[between])) > 1:
        return None
    return float(np.max(rows.workers[between], initial=1.0))


def _growth(form: str, rows: Rows, measured: float) -> Array:
    """(n,): logarithm of a form's bandwidth term, over that of a measured number of workers; 0 on a single node."""
    shape = FORMS[form].bandwidth
    between = (rows.nodes > 1.0) & (measured > 1.0)
    workers = np.where(between, rows.workers, 2.0)
    return np.where(between, np.log(shape(workers) / shape(np.maximum(measured, 2.0))), 0.0)


def _tells_alone(rows: Rows) -> bool:
    """What one worker pays beside its computation shows where that was timed."""
    alone = rows.workers == 1.0
    return all(np.any(alone & (rows.kind == kind)) for kind in (STEP, COMPUTE))


def _tells_floor(rows: Rows) -> bool:
    return len(np.unique(rows.batch[rows.kind != ALLREDUCE])) >= FLOOR_BATCHES


def _fit_form(
    rows: Rows, form: str, *, belief: Belief, floor: bool = False, noise: float = NOISE
) -> Fitted:
    law = (
        Law(PAPER, _knots(rows, use=False), additive=True)
        if form == "paper"
        else Law(FORMS[form], _knots(rows))
    )
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


def _knots(rows: Rows, *, use: bool = True) -> Knots:
    """Every measured batch, and every measured cluster size of several workers, where they are few enough."""
    batches = np.unique(rows.batch[rows.kind != ALLREDUCE])
    sizes = np.unique(np.stack([rows.nodes, rows.per_node], axis=1)[rows.workers > 1.0], axis=0)
    use = use and len(rows.kind) <= MANY_ROWS
    return Knots(
        batches if use and len(batches) <= MAX_KNOTS else batches[:0],
        sizes if use and len(sizes) <= MAX_KNOTS else sizes[:0],
    )


def _free(law: Law, rows: Rows, linear: Array, *, floor: bool) -> NDArray[np.bool_]:
    """Which coefficients the data can tell; those of which something is believed are always free."""
    bare = (OVERHEAD,) if np.any(rows.kind == ALLREDUCE) and not law.additive else ()
    alone = (ALONE,) if _tells_alone(rows) and not law.additive else ()
    free = identified(linear, (PER_SAMPLE, FIXED, SYNC, NODE_SYNC, LATENCY, *bare, SHARING, *alone))
    # where only several nodes were measured, overlap tells a constant from the computation
    free[SYNC] |= free[LATENCY]
    together = bool(free[SYNC] or free[NODE_SYNC])
    free[OVERLAP] = together and not law.additive
    free[CONTENTION] = len(np.unique(rows.per_node)) > 1 and not law.additive
    free[STRAGGLING] = len(np.unique(rows.workers)) > 1 and not law.additive
    free[FLOOR] = floor and bool(free[FIXED]) and not law.additive
    batches, sizes = law.knots
    free[len(NAMES) :] = [True] * len(batches) + [together] * len(sizes)
    return free


def _bounds(law: Law) -> tuple[Array, Array]:
    lower, upper = np.zeros(law.coefficients), np.full(law.coefficients, np.inf)
    upper[[OVERLAP, CONTENTION, STRAGGLING]] = 1.0
    lower[len(NAMES) :], upper[len(NAMES) :] = -1.0, 1.0
    return lower, upper


def _beliefs(law: Law, belief: Belief, noise: float) -> tuple[Array, Array]:
    believed, firmness = np.zeros(law.coefficients), np.zeros(law.coefficients)
    believed[OVERLAP] = 0.0 if law.additive else belief.overlap_share
    for index, wide in belief.spreads.items():
        firmness[index] = noise / wide
    firmness[len(NAMES) :] = noise / EFFECT_SPREAD
    return believed, firmness


def _starts(linear: Array, weights: Array, free: NDArray[np.bool_], believed: Array) -> list[Array]:
    """Non-negative least squares of the plain sum, with little and with much overlap: the error has several minima."""
    columns = free & np.any(linear != 0.0, axis=0)
    length = np.linalg.norm(linear[:, columns], axis=0)
    start = believed.copy()
    start[columns] = nnls(linear[:, columns] / length, weights)[0] / length
    start[FLOOR] = 0.5 * start[FIXED] if free[FLOOR] else 0.0
    if not free[OVERLAP]:
        return [start]
    starts = [start.copy(), start.copy()]
    starts[0][OVERLAP], starts[1][OVERLAP] = 0.1, 0.8
    return starts
