"""How long one training step takes on N workers with local batch b: the paper's additive model.

`t_step = t_compute + t_sync` (S. Tyagi, F. Wang, "Tula", equations for compute and synchronization cost), where

    t_compute(b) = compute_fixed_s + compute_per_sample_s × b
    t_sync(N)    = sync_s × f(N) + latency_s × g(N)        f and g by collective, see `FORMS`; 0 for one worker

Gradients are all-reduced while the backward pass still runs, so that a part of t_sync can hide behind that share of the
computation. Where the data tells, it is learned; elsewhere the share is 0 and this is the paper's sum:

    t_step = t_compute + max(t_sync − overlap_share × t_compute, 0) + overhead_s

`overhead_s`, for more than one worker, is what a step pays beside the gradient's bytes: workers that wait for the
slowest, BatchNorm's buffers, starting the collectives. It is learned where the bare all-reduce was measured apart;
otherwise it cannot be told from t_sync, and is part of it.

All coefficients are at least 0, the share at most 1. N is the number of workers in the collective, that is nodes ×
workers per node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from tula_hpc.analysis.regression import (
    Array,
    Fit,
    Problem,
    as_columns,
    check_positive,
    fit_relative,
    identified,
    relative_spread,
)

FormName = Literal["auto", "ring", "tree", "parameter_server", "reduce_scatter_all_gather"]


class Collective(NamedTuple):
    """Shape of a collective's time over the number of workers; every shape is 0 for one worker."""

    bandwidth: Callable[[Array], Array]  # f(N): time to move the bytes, in units of sync_s
    latency: Callable[[Array], Array] | None  # g(N): number of messages after one another, in units of latency_s


FORMS: dict[str, Collective] = {
    "ring": Collective(lambda workers: 1.0 - 1.0 / workers, lambda workers: workers - 1.0),
    "tree": Collective(np.log2, None),  # bytes and messages both grow with the depth
    "parameter_server": Collective(lambda workers: np.where(workers > 1.0, workers, 0.0), None),
    "reduce_scatter_all_gather": Collective(lambda workers: 2.0 * (1.0 - 1.0 / workers), np.log2),
}
NAMES = ("compute_fixed_s", "compute_per_sample_s", "sync_s", "latency_s", "overhead_s", "overlap_share")
FIXED, PER_SAMPLE, SYNC, LATENCY, OVERHEAD, OVERLAP = range(6)
PRIORS = np.zeros(6)  # what an unidentified coefficient is pinned to
UPPER = np.array([np.inf, np.inf, np.inf, np.inf, np.inf, 1.0])
STEP, COMPUTE, ALLREDUCE = range(3)  # kinds of rows
# Weights of the rows: a whole step is what has to be predicted, what was measured apart guides it. The step's own
# all-reduce differs from the bare one (it competes with the computation, in pieces), so that the bare one says less.
WEIGHTS = np.array([1.0, 0.5, 0.1])
BETTER_FROM = 0.9  # another form must bring the left-out error below this share of the ring's
TINY_S = 1e-12  # a prediction of 0 has no relative error


class _Rows(NamedTuple):
    """Observations of the three kinds under one another."""

    kind: NDArray[np.int_]
    workers: Array
    batch: Array
    seconds: Array

    def only(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> _Rows:
        return _Rows(self.kind[chosen], self.workers[chosen], self.batch[chosen], self.seconds[chosen])


class StepTimeModel:
    """Seconds per training step over nodes, local batch and workers per node; fit on relative error, robustly.

    Args:
        form: The collective. "auto" takes the one with the least left-out error; the ring unless another is clearly
            better, and with no more steps than coefficients.

    Attributes:
        parameters_: Coefficients by name: compute_fixed_s (s), compute_per_sample_s (s per sample), sync_s (s),
            latency_s (s per message; only forms that have it), overhead_s (s; only where an all-reduce was measured
            apart), overlap_share (1).
        form_: The collective that was chosen.
        pinned_: Coefficients that the data cannot identify; they are 0. (compute_fixed_s: one local batch only. sync_s:
            no two numbers of workers, and nothing measured apart. latency_s: too few numbers of workers above 1.
            overlap_share: two local batches or fewer, and computation not seen alone.)
        residual_median_: Median of |predicted / measured − 1| over the fitted steps.
    """

    parameters_: dict[str, float]
    form_: str
    pinned_: list[str]
    residual_median_: float

    def __init__(self, form: FormName = "auto") -> None:
        if form not in get_args(FormName):
            raise ValueError(f"form: {form!r} is not one of: {', '.join(get_args(FormName))}")
        self.form: FormName = form

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
            workers_per_node: (n,) or scalar.
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
        self.form_, self._free, self._fit = _best_form(rows, self.form)
        self._steps = rows.kind == STEP
        self._measured_apart = bool(np.any(rows.kind == ALLREDUCE))
        self._describe()
        return self

    def _describe(self) -> None:
        named = dict(zip(NAMES, self._fit.coefficients.tolist(), strict=True))
        absent = {"latency_s"} if FORMS[self.form_].latency is None else set()
        absent |= set() if self._measured_apart else {"overhead_s"}
        self.parameters_ = {name: value for name, value in named.items() if name not in absent}
        self.pinned_ = [name for name, free in zip(NAMES, self._free, strict=True) if not free and name not in absent]
        self.residual_median_ = float(np.median(np.abs(self._fit.residuals[self._steps])))

    def predict(self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1) -> Array:
        """Seconds per step, in the shape that the arguments broadcast to."""
        predicted, _ = self._evaluate(nodes, local_batch, workers_per_node)
        return predicted.reshape(np.broadcast_shapes(*map(np.shape, (nodes, local_batch, workers_per_node))))

    def interval(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1, level: float = 0.9
    ) -> tuple[Array, Array]:
        """Lower and upper end, seconds, between which a new measurement lies with probability `level`.

        From the residuals and each point's distance from the data (leverage), with Student's t. Few measurements give
        wide intervals; where none is left over to judge the fit, a relative error of 10 % is assumed, see `regression`.
        A wrong form of the model shows only in the residuals: beyond the profiled range intervals can be too narrow.
        """
        predicted, gradients = self._evaluate(nodes, local_batch, workers_per_node)
        width = relative_spread(self._fit, self._steps, gradients / np.maximum(predicted, TINY_S)[:, None], level)
        shape = np.broadcast_shapes(*map(np.shape, (nodes, local_batch, workers_per_node)))
        return (predicted * np.exp(-width)).reshape(shape), (predicted * np.exp(width)).reshape(shape)

    def _evaluate(self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike) -> tuple[Array, Array]:
        per_node, count, batch = as_columns(workers_per_node, nodes, local_batch)
        check_positive(nodes=count, local_batch=batch, workers_per_node=per_node)
        rows = _Rows(np.full(batch.shape, STEP), per_node * count, batch, batch)
        return _evaluate(self._fit.coefficients, rows, FORMS[self.form_])


def _collect(
    *,
    nodes: ArrayLike,
    local_batch: ArrayLike,
    step_time_s: ArrayLike,
    workers_per_node: ArrayLike,
    compute_time_s: ArrayLike,
    allreduce_time_s: ArrayLike,
) -> _Rows:
    """All observations as rows, in an order that does not depend on that of the input."""
    count, batch, steps, per_node, computes, allreduces = as_columns(
        nodes, local_batch, step_time_s, workers_per_node, compute_time_s, allreduce_time_s
    )
    check_positive(nodes=count, local_batch=batch, step_time_s=steps, workers_per_node=per_node)
    size, workers = len(steps), count * per_node
    kind = np.repeat([STEP, COMPUTE, ALLREDUCE], size)
    rows = _Rows(kind, np.tile(workers, 3), np.tile(batch, 3), np.concatenate([steps, computes, allreduces]))
    usable = np.isfinite(rows.seconds) & (rows.seconds > 0.0) & ((kind != ALLREDUCE) | (rows.workers > 1.0))
    rows = rows.only(usable)
    return rows.only(np.lexsort(rows[::-1]))  # sums of floats depend on the order; the model must not


def _evaluate(coefficients: Array, rows: _Rows, form: Collective) -> tuple[Array, Array]:
    """Predictions (n,) and their gradients (n, 6) with respect to the coefficients."""
    bandwidth, latency = form.bandwidth(rows.workers), _latency(form, rows.workers)
    compute = coefficients[FIXED] + coefficients[PER_SAMPLE] * rows.batch
    sync = coefficients[SYNC] * bandwidth + coefficients[LATENCY] * latency
    exposed = (rows.kind == STEP) & (rows.workers > 1.0) & (sync >= coefficients[OVERLAP] * compute)
    hidden_share = np.where(exposed, coefficients[OVERLAP], 0.0)
    sees_compute = np.where(rows.kind == ALLREDUCE, 0.0, 1.0 - hidden_share)
    sees_sync = np.where(exposed | (rows.kind == ALLREDUCE), 1.0, 0.0)
    sees_overhead = np.where((rows.kind == STEP) & (rows.workers > 1.0), 1.0, 0.0)
    gradients = [
        sees_compute,
        sees_compute * rows.batch,
        sees_sync * bandwidth,
        sees_sync * latency,
        sees_overhead,
        np.where(exposed, -compute, 0.0),
    ]
    predicted = sees_compute * compute + sees_sync * sync + sees_overhead * coefficients[OVERHEAD]
    return predicted, np.stack(gradients, axis=1)


def _latency(form: Collective, workers: Array) -> Array:
    return np.zeros_like(workers) if form.latency is None else form.latency(workers)


def _best_form(rows: _Rows, wanted: FormName) -> tuple[str, NDArray[np.bool_], Fit]:
    names = [wanted] if wanted != "auto" else ["ring"]
    if wanted == "auto" and _tells_forms_apart(rows):
        names = list(FORMS)
    fits = {name: _fit_form(rows, FORMS[name]) for name in names}
    scores = {name: _left_out_error(fit, rows) for name, (_, fit) in fits.items()}
    best = min(scores, key=lambda name: scores[name])
    if "ring" in scores and scores[best] > BETTER_FROM * scores["ring"]:
        best = "ring"
    return best, *fits[best]


def _tells_forms_apart(rows: _Rows) -> bool:
    """Where every row has a coefficient of its own, every form passes through them all."""
    return int(np.sum(rows.kind == STEP)) > len(NAMES)


def _left_out_error(fit: Fit, rows: _Rows) -> float:
    """Mean relative error of steps that were left out, from the leverage (PRESS); each counts at most 100 %."""
    steps = rows.kind == STEP
    left_out = np.abs(fit.residuals[steps]) / np.maximum(1.0 - fit.leverage[steps], 1e-3)
    return float(np.mean(np.minimum(left_out, 1.0)))


def _fit_form(rows: _Rows, form: Collective) -> tuple[NDArray[np.bool_], Fit]:
    weights = WEIGHTS[rows.kind]
    problem = Problem(lambda coefficients: _evaluate(coefficients, rows, form), rows.seconds, weights, UPPER)
    linear = _evaluate(PRIORS, rows, form)[1] * (weights / rows.seconds)[:, None]
    wanted = (PER_SAMPLE, FIXED, SYNC, LATENCY) + ((OVERHEAD,) if np.any(rows.kind == ALLREDUCE) else ())
    free = identified(linear, wanted)
    free[OVERLAP] = free[SYNC] and _tells_overlap(rows)
    return free, fit_relative(problem, _starts(linear, weights, free), free)


def _tells_overlap(rows: _Rows) -> bool:
    """Overlap shows as synchronization that shrinks as the batch grows; that needs compute alone, or a third batch."""
    together = rows.only((rows.kind == STEP) & (rows.workers > 1.0))
    alone = rows.only((rows.kind == COMPUTE) | ((rows.kind == STEP) & (rows.workers == 1.0)))
    batches, batches_alone = len(np.unique(together.batch)), len(np.unique(alone.batch))
    return batches >= 3 or (batches == 2 and batches_alone >= 2)


def _starts(linear: Array, weights: Array, free: NDArray[np.bool_]) -> list[Array]:
    """Non-negative least squares without overlap, and from there with some: the error has several minima over it."""
    columns = free & (np.arange(len(NAMES)) != OVERLAP)
    length = np.linalg.norm(linear[:, columns], axis=0)
    start = PRIORS.copy()
    start[columns] = nnls(linear[:, columns] / length, weights)[0] / length
    shares = np.linspace(0.0, 1.0, 6) if free[OVERLAP] else [0.0]
    return [np.append(start[:OVERLAP], share) for share in shares]
