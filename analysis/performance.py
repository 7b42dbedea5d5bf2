"""How long one training step takes on N workers with local batch b: fitting the law of `step_time_law` to profiles.

Fitted on relative error, robustly, within bounds, to whole steps and to all that the profiler measured apart. The
coefficients of the law are unknown but for their signs; of three other things something is believed beforehand, and
the data decide as far as they can:

- the overlapped share of the computation: 0.6 on GPUs (the backward pass is two thirds of it), 0.1 on CPUs, where the
  collective needs the same cores; both ± 0.3;
- contention between workers of a node: 0 ± 0.1 for each further worker;
- departures u of batches and v of cluster sizes from the law: 0 ± 10 % where the typical residual is 3 %.

The belief in departures makes this a mixed-effects model: what is measured of one batch on one cluster size says
something of that batch on the others, and sizes that were not measured are as uncertain as the measured ones vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from tula_hpc.analysis.aggregate import Profile
from tula_hpc.analysis.regression import (
    Array,
    Fit,
    Problem,
    Scatter,
    as_columns,
    check_positive,
    draws,
    fit_relative,
    identified,
    relative_spread,
    spread,
)
from tula_hpc.analysis.step_time_law import (
    ALLREDUCE,
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
    SYNC,
    TINY_S,
    Evaluation,
    Knots,
    Law,
    Rows,
)

FormName = Literal["auto", "paper", "ring", "double_tree", "tree", "parameter_server", "reduce_scatter_all_gather"]
Backend = Literal["nccl", "gloo"]


class Belief(NamedTuple):
    """What is believed of a collective library before anything was measured."""

    form: str
    overlap_share: float


BELIEFS: dict[Backend, Belief] = {"nccl": Belief("double_tree", 0.6), "gloo": Belief("ring", 0.1)}
NOISE = 0.03  # typical relative residual of a step; the beliefs count in its units
LEAST_NOISE = 0.003
SPREADS = {OVERLAP: 0.3, CONTENTION: 0.1}  # standard deviations of what is believed
EFFECT_SPREAD = 0.1
SCATTER = Scatter(error=0.04, rows=8.0)  # of a measured step, believed before any residual is seen
MAX_KNOTS = 64  # batches, and cluster sizes, with a departure of their own; with more data the law alone is fitted
FLOOR_BATCHES = 4  # a floor needs so many batches to be told from a line
MANY_ROWS = 5000  # above, repeated measurements of a configuration become their median before the fit
BETTER_BY = 4.0  # another form must have an information criterion (AIC) that is lower by this
SHARPER = 0.7  # steps that scatter less than this share of the usual are worth a second fit
SPREAD_UNTOLD = 0.9  # a belief that the data narrow by less than this is called pinned
# Weights of the rows: a whole step is what has to be predicted, what was measured apart guides it. The step's own
# all-reduce differs from the bare one (it competes with the computation, in pieces), so that the bare one says less.
WEIGHTS = np.array([1.0, 0.5, 0.1])


class StepTimeModel:
    """Seconds per training step over nodes, local batch and workers per node; fit on relative error, robustly.

    Args:
        form: The collective, see `step_time_law`. "auto" takes the one with the least information criterion; the
            backend's own unless another is clearly better. "paper" is the paper's plain sum, without what was added.
        backend: Sets what is believed beforehand: which collective, and how much of it the computation hides.

    Attributes:
        parameters_: Coefficients by name, see `step_time_law`: seconds, seconds per sample, or 1.
        effects_: Departures from the law, relative: {"local_batch": {b: u}, "cluster_size": {(nodes, workers): v}}.
        form_: The collective that was chosen.
        pinned_: Coefficients that the data cannot identify: 0, or for overlap_share and contention what is believed.
        spread_: Relative standard deviation of a single measurement around the law, as residuals and belief tell.
        residual_median_: Median of |predicted / measured − 1| over the fitted steps.
    """

    parameters_: dict[str, float]
    effects_: dict[str, dict[object, float]]
    form_: str
    pinned_: list[str]
    residual_median_: float
    spread_: float

    def __init__(self, form: FormName = "auto", backend: Backend = "nccl") -> None:
        if form not in get_args(FormName):
            raise ValueError(f"form: {form!r} is not one of: {', '.join(get_args(FormName))}")
        if backend not in BELIEFS:
            raise ValueError(f"backend: {backend!r} is not one of: {', '.join(BELIEFS)}")
        self.form: FormName = form
        self.backend: Backend = backend

    def fit(  # noqa: PLR0917 - the columns of one table, in the order of their use, as in scikit-learn
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        step_time_s: ArrayLike,
        workers_per_node: ArrayLike = 1,
        compute_time_s: ArrayLike | None = None,
        allreduce_time_s: ArrayLike | None = None,
    ) -> Self:
        """Fit to measured steps.

        Args:
            nodes: (n,) or scalar.
            local_batch: (n,) or scalar, samples per worker.
            step_time_s: (n,), a whole training step.
            workers_per_node: (n,) or scalar; the mean, where nodes differ.
            compute_time_s: (n,), the step without synchronization, measured apart; NaN or 0 where unknown.
            allreduce_time_s: (n,), the bare all-reduce of the gradient's bytes; NaN or 0 where unknown.

        Returns:
            Itself.

        Raises:
            ValueError: No rows, lengths that do not fit, or values that are not positive and finite.
        """
        rows = _collect(
            nodes=nodes,
            local_batch=local_batch,
            step_time_s=step_time_s,
            workers_per_node=workers_per_node,
            compute_time_s=np.nan if compute_time_s is None else compute_time_s,
            allreduce_time_s=np.nan if allreduce_time_s is None else allreduce_time_s,
        )
        self._fitted = _choose(rows, self.form, BELIEFS[self.backend])
        self._steps = rows.kind == STEP
        self._describe(has_several=bool(np.any(rows.per_node > 1)), has_bare=bool(np.any(rows.kind == ALLREDUCE)))
        return self

    def _describe(self, *, has_several: bool, has_bare: bool) -> None:
        fitted = self._fitted
        self.form_ = fitted.form
        absent = _absent(fitted, has_several=has_several, has_bare=has_bare)
        values = dict(zip(NAMES, fitted.fit.coefficients.tolist(), strict=False))
        self.parameters_ = {name: value for name, value in values.items() if name not in absent}
        self.pinned_ = [name for name in fitted.untold() if name not in absent]
        self.effects_ = fitted.effects()
        self.spread_ = spread(fitted.fit, self._steps, SCATTER)
        self.residual_median_ = float(np.median(np.abs(fitted.fit.residuals[self._steps])))

    def predict(self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1) -> Array:
        """Seconds per step, in the shape that the arguments broadcast to."""
        rows, shape = _points(nodes, local_batch, workers_per_node)
        return self._fitted.law.seconds(self._fitted.fit.coefficients, rows).reshape(shape)

    def interval(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1, level: float = 0.9
    ) -> tuple[Array, Array]:
        """Lower and upper end, seconds, between which a new measurement lies with probability `level`.

        From the residuals, each point's distance from the data (leverage), and, where the batch or the cluster size was
        not measured, the departure from the law that such ones usually show; with Student's t.
        """
        rows, shape = _points(nodes, local_batch, workers_per_node)
        fitted = self._fitted
        found = fitted.law.evaluate(fitted.fit.coefficients, rows)
        seconds = np.maximum(found.seconds, TINY_S)
        width = relative_spread(
            fitted.fit,
            self._steps,
            found.gradients / seconds[:, None],
            level,
            unseen=sum(self._unseen(rows, found)),
            prior=SCATTER,
        )
        return (seconds * np.exp(-width)).reshape(shape), (seconds * np.exp(width)).reshape(shape)

    def covariance(self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1) -> Array:
        """How uncertain the predictions at some points are together, in units of a single measurement's variance.

        Relative, without the noise of a measurement: what is known exactly has 0, and a point measured once at most 1.
        Points of one batch or cluster size that was not measured share that one's unknown departure from the law.

        Returns:
            (m, m), for m points after broadcasting and raveling.
        """
        rows, _ = _points(nodes, local_batch, workers_per_node)
        fitted = self._fitted
        found = fitted.law.evaluate(fitted.fit.coefficients, rows)
        relative = found.gradients / np.maximum(found.seconds, TINY_S)[:, None]
        unseen_batch, unseen_size = self._unseen(rows, found)
        same_batch = rows.batch[:, None] == rows.batch
        same_size = (rows.nodes[:, None] == rows.nodes) & (rows.per_node[:, None] == rows.per_node)
        together = relative @ fitted.fit.covariance @ relative.T
        together += same_batch * np.sqrt(np.outer(unseen_batch, unseen_batch))
        return np.asarray(together + same_size * np.sqrt(np.outer(unseen_size, unseen_size)))

    def _unseen(self, rows: Rows, found: Evaluation) -> tuple[Array, Array]:
        """(m,) each: variance from the departures of batches and of cluster sizes that were not measured."""
        if self._fitted.law.additive:
            return np.zeros(len(rows.batch)), np.zeros(len(rows.batch))
        at_batches, at_sizes = self._fitted.law.knots.weights(rows)
        scale = (np.maximum(found.seconds, TINY_S) * self._fitted.noise / EFFECT_SPREAD) ** 2
        of_batch = found.by_batch_effect**2 * (1.0 - np.sum(at_batches**2, axis=1)) / scale
        return of_batch, found.by_size_effect**2 * (1.0 - np.sum(at_sizes**2, axis=1)) / scale

    def samples(
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        workers_per_node: ArrayLike = 1,
        count: int = 200,
        seed: int = 0,
    ) -> Array:
        """Seconds per step of `count` models drawn from the fit's uncertainty, without measurement noise.

        Returns:
            (count, *shape), shape as the arguments broadcast. The same seed draws the same models for all points.
        """
        rows, shape = _points(nodes, local_batch, workers_per_node)
        law, fit = self._fitted.law, self._fitted.fit
        drawn = draws(fit, self._steps, self._fitted.bounds, SCATTER, count=count, seed=seed)
        return np.stack([law.seconds(coefficients, rows) for coefficients in drawn]).reshape((count, *shape))


def fit_step_time(profiles: Sequence[Profile], form: FormName = "auto") -> StepTimeModel:
    """The model of a run's step times.

    What is known apart as "compute" is the step without synchronization, that is waiting for data, forward and
    backward, and the optimizer together.
    """
    configurations = np.array([row.configuration for row in profiles], dtype=np.float64)
    times = [row.times for row in profiles]
    return StepTimeModel(form, "nccl" if any(row.backend == "nccl" for row in profiles) else "gloo").fit(
        nodes=configurations[:, 0],
        local_batch=configurations[:, 2],
        step_time_s=[row.step_time_s for row in times],
        workers_per_node=configurations[:, 1],
        compute_time_s=[row.data_time_s + row.compute_time_s + row.optimizer_time_s for row in times],
        allreduce_time_s=[row.allreduce_time_s for row in times],
    )


def _points(nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike) -> tuple[Rows, tuple[int, ...]]:
    per_node, count, batch = as_columns(workers_per_node, nodes, local_batch)
    check_positive(nodes=count, local_batch=batch, workers_per_node=per_node)
    shape = np.broadcast_shapes(*map(np.shape, (nodes, local_batch, workers_per_node)))
    return Rows(np.full(batch.shape, STEP), count, per_node, batch, batch), shape


def _collect(
    *,
    nodes: ArrayLike,
    local_batch: ArrayLike,
    step_time_s: ArrayLike,
    workers_per_node: ArrayLike,
    compute_time_s: ArrayLike,
    allreduce_time_s: ArrayLike,
) -> Rows:
    """All observations as rows, in an order that does not depend on that of the input."""
    count, batch, steps, per_node, computes, allreduces = as_columns(
        nodes, local_batch, step_time_s, workers_per_node, compute_time_s, allreduce_time_s
    )
    check_positive(nodes=count, local_batch=batch, step_time_s=steps, workers_per_node=per_node)
    kind = np.repeat([STEP, COMPUTE, ALLREDUCE], len(steps))
    seconds = np.concatenate([steps, computes, allreduces])
    rows = Rows(kind, np.tile(count, 3), np.tile(per_node, 3), np.tile(batch, 3), seconds)
    usable = np.isfinite(rows.seconds) & (rows.seconds > 0.0) & ((kind != ALLREDUCE) | (rows.workers > 1.0))
    rows = rows.only(usable)
    rows = _medians(rows) if len(rows.kind) > MANY_ROWS else rows
    return rows.only(np.lexsort(rows[::-1]))  # sums of floats depend on the order; the model must not


def _medians(rows: Rows) -> Rows:
    """One row for each kind and configuration: of very many measurements most are repeats."""
    keys, group = np.unique(np.stack(rows[:4], axis=1), axis=0, return_inverse=True)
    order = np.lexsort((rows.seconds, group.ravel()))
    first = np.searchsorted(group.ravel()[order], np.arange(len(keys) + 1))
    middle = order[(first[:-1] + first[1:] - 1) // 2]
    return rows.only(middle)


class _Fitted(NamedTuple):
    """One form, fitted."""

    form: str
    law: Law
    fit: Fit
    free: NDArray[np.bool_]
    bounds: tuple[Array, Array]
    noise: float

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
        believed = {i for i, wide in SPREADS.items() if told[i] > SPREAD_UNTOLD * wide}
        return [name for index, name in enumerate(NAMES) if not self.free[index] or index in believed]

    def effects(self) -> dict[str, dict[object, float]]:
        """Departures by what they belong to."""
        batches, sizes = self.law.knots
        values = self.fit.coefficients[len(NAMES) :].tolist()
        keys = [(int(nodes), float(workers)) for nodes, workers in sizes]
        return {
            "local_batch": dict(zip(batches.tolist(), values, strict=False)),
            "cluster_size": dict(zip(keys, values[len(batches) :], strict=True)),
        }


def _choose(rows: Rows, wanted: FormName, belief: Belief) -> _Fitted:
    """The wanted form, or the best; the believed one unless another is clearly better, with a floor only if it is."""
    if wanted != "auto":
        return _sharpened(_fit_form(rows, wanted, belief), rows, belief)
    found = _sharpened(_fit_form(rows, belief.form, belief), rows, belief)
    if _tells_forms(rows) and found.misfit > BETTER_BY - 2.0:  # or no form can be better by so much
        names = [name for name in FORMS if name != belief.form]
        found = _clearly_best(found, [_fit_form(rows, name, belief, noise=found.noise) for name in names])
    if not _tells_floor(rows) or found.misfit < BETTER_BY + 2.0:
        return found
    return _clearly_best(found, [_fit_form(rows, found.form, belief, floor=True, noise=found.noise)])


def _sharpened(found: _Fitted, rows: Rows, belief: Belief) -> _Fitted:
    """Fit again where the steps scatter less than is usual: the beliefs, which count in units of it, then count less."""
    noise = max(spread(found.fit, rows.kind == STEP, Scatter(NOISE, SCATTER.rows / 2)), LEAST_NOISE)
    return found if noise > SHARPER * NOISE else _fit_form(rows, found.form, belief, noise=noise)


def _clearly_best(first: _Fitted, others: list[_Fitted]) -> _Fitted:
    best = min([first, *others], key=lambda fitted: fitted.criterion)
    return best if best.criterion < first.criterion - BETTER_BY else first


def _tells_forms(rows: Rows) -> bool:
    """Forms differ between cluster sizes, so that one size above a single node says nothing about them."""
    return len(np.unique(rows.nodes[rows.nodes > 1.0])) > 1


def _tells_floor(rows: Rows) -> bool:
    return len(np.unique(rows.batch[rows.kind != ALLREDUCE])) >= FLOOR_BATCHES


def _fit_form(rows: Rows, form: str, belief: Belief, *, floor: bool = False, noise: float = NOISE) -> _Fitted:
    law = Law(PAPER, _knots(rows, use=False), additive=True) if form == "paper" else Law(FORMS[form], _knots(rows))
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
    return _Fitted(form, law, fit, free, (lower, upper), noise)


def _knots(rows: Rows, *, use: bool = True) -> Knots:
    """Every measured batch, and every measured cluster size of several workers, where they are few enough."""
    batches = np.unique(rows.batch[rows.kind != ALLREDUCE])
    sizes = np.unique(np.stack([rows.nodes, rows.per_node], axis=1)[rows.workers > 1.0], axis=0)
    return Knots(
        batches if use and len(batches) <= MAX_KNOTS else batches[:0],
        sizes if use and len(sizes) <= MAX_KNOTS else sizes[:0],
    )


def _free(law: Law, rows: Rows, linear: Array, *, floor: bool) -> NDArray[np.bool_]:
    """Which coefficients the data can tell; those of which something is believed are always free."""
    bare = (OVERHEAD,) if np.any(rows.kind == ALLREDUCE) and not law.additive else ()
    free = identified(linear, (PER_SAMPLE, FIXED, SYNC, NODE_SYNC, LATENCY, *bare, SHARING))
    free[SYNC] |= free[LATENCY]  # where only several nodes were measured, overlap tells a constant from the computation
    together = bool(free[SYNC] or free[NODE_SYNC])
    free[OVERLAP] = together and not law.additive
    free[CONTENTION] = len(np.unique(rows.per_node)) > 1 and not law.additive
    free[FLOOR] = floor and bool(free[FIXED]) and not law.additive
    batches, sizes = law.knots
    free[len(NAMES) :] = [True] * len(batches) + [together] * len(sizes)
    return free


def _bounds(law: Law) -> tuple[Array, Array]:
    lower, upper = np.zeros(law.coefficients), np.full(law.coefficients, np.inf)
    upper[[OVERLAP, CONTENTION]] = 1.0
    lower[len(NAMES) :], upper[len(NAMES) :] = -1.0, 1.0
    return lower, upper


def _beliefs(law: Law, belief: Belief, noise: float) -> tuple[Array, Array]:
    believed, firmness = np.zeros(law.coefficients), np.zeros(law.coefficients)
    believed[OVERLAP] = 0.0 if law.additive else belief.overlap_share
    for index, wide in SPREADS.items():
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


def _absent(fitted: _Fitted, *, has_several: bool, has_bare: bool) -> set[str]:
    """Coefficients that this form does not have, or that nothing measured is about."""
    absent = set() if has_bare else {"overhead_s"}
    absent |= set() if has_several else {"contention", "sharing_s", "node_sync_s"}
    absent |= set() if fitted.free[FLOOR] else {"compute_floor_s"}
    absent |= {"latency_s"} if fitted.law.form.latency is None else set()
    return absent | ({"overlap_share", "overhead_s"} if fitted.law.additive else set())
