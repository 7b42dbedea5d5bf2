"""How long one training step takes on N workers with local batch b: the model of step times, fitted to profiles.

The law is in `step_time_law`, how its form and coefficients are found in `step_time_fit`. Fitted on
relative error, robustly, within bounds, to whole steps and to all that the profiler measured apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self, get_args

import numpy as np
from numpy.typing import ArrayLike

from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.analysis.models.regression import (
    Array,
    as_columns,
    check_positive,
    draws,
    relative_spread,
    spread,
)
from tula_hpc.analysis.models.step_time_fit import (
    BELIEFS,
    EFFECT_SPREAD,
    MANY_ROWS,
    SCATTER,
    Backend,
    FormName,
    choose_form,
)
from tula_hpc.analysis.models.step_time_law import (
    ALLREDUCE,
    COMPUTE,
    NAMES,
    STEP,
    TINY_S,
    Evaluation,
    Rows,
)

__all__ = ["Backend", "FormName", "StepTimeModel", "fit_step_time"]


class StepTimeModel:
    """Seconds per training step over nodes, local batch and workers per node; fit on relative error, robustly.

    Args: form: The collective, see `step_time_law`. "auto" takes the one with the least information
        criterion; the
            backend's own unless another is clearly better. "paper" is the paper's plain sum,
            without what was added.
        backend: Sets what is believed beforehand: which collective, and how much of it the
            computation hides.

    Attributes: parameters_: Coefficients by name, see `step_time_law`: seconds, seconds per sample,
        or 1. departures_: From the law, in logarithms: {"local_batch": {"32": u, …}, "nodes": {"4":
        v, …}}; with several
            workers on each node "4x2".
        form_: The collective that was chosen.
        pinned_: Coefficients that the data cannot identify: 0, or what is believed of it.
        spread_: Relative standard deviation of a single measurement around the law, as residuals
            and belief tell.
        residual_median_: Median of |predicted / measured − 1| over the fitted steps.
    """

    parameters_: dict[str, float]
    departures_: dict[str, dict[str, float]]
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
        """Fit to measured steps, and to parts of steps.

        Args: nodes: (n,) or scalar. local_batch: (n,) or scalar, samples per worker. step_time_s:
            (n,), a whole training step; NaN where only parts are known. workers_per_node: (n,) or
            scalar; the mean, where nodes differ. compute_time_s: (n,), the step without
            synchronization, of the batch as a whole, measured apart; NaN or 0
                where unknown.
            allreduce_time_s: (n,), the bare all-reduce of the gradient's bytes; NaN or 0 where
                unknown.

        Returns:
            Itself.

        Raises: ValueError: No rows, lengths that do not fit, or values that are not positive and
            finite.
        """
        rows = _collect(
            nodes=nodes,
            local_batch=local_batch,
            step_time_s=step_time_s,
            workers_per_node=workers_per_node,
            compute_time_s=np.nan if compute_time_s is None else compute_time_s,
            allreduce_time_s=np.nan if allreduce_time_s is None else allreduce_time_s,
        )
        self._fitted = choose_form(rows, self.form, BELIEFS[self.backend])
        self._steps = rows.kind == STEP
        self._describe(rows)
        return self

    def _describe(self, rows: Rows) -> None:
        fitted = self._fitted
        self.form_ = fitted.form
        absent = fitted.absent(rows)
        values = dict(zip(NAMES, fitted.fit.coefficients.tolist(), strict=False))
        self.parameters_ = {name: value for name, value in values.items() if name not in absent}
        self.pinned_ = [name for name in fitted.untold() if name not in absent]
        self.departures_ = fitted.departures()
        self.spread_ = spread(fitted.fit, self._steps, SCATTER)
        self.residual_median_ = float(np.median(np.abs(fitted.fit.residuals[self._steps])))

    def predict(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1
    ) -> Array:
        """Seconds per step, in the shape that the arguments broadcast to."""
        rows, shape = _points(nodes, local_batch, workers_per_node)
        return self._fitted.law.seconds(self._fitted.fit.coefficients, rows).reshape(shape)

    def interval(
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        workers_per_node: ArrayLike = 1,
        level: float = 0.9,
    ) -> tuple[Array, Array]:
        """Lower and upper end, seconds, between which a new measurement lies with probability `level`.

        From the residuals, each point's distance from the data (leverage), and, where the batch or
        the cluster size was not measured, the departure from the law that such ones usually show,
        and how far forms of the law differ there that the data do not tell apart; with Student's t.
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
            unseen=sum(self._unseen(rows, found))
            + np.mean((self._open_form(rows, found) / self.spread_) ** 2, axis=0),
            prior=SCATTER,
        )
        return (seconds * np.exp(-width)).reshape(shape), (seconds * np.exp(width)).reshape(shape)

    def covariance(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1
    ) -> Array:
        """How uncertain the predictions at some points are together, in units of a single measurement's variance.

        Relative, without the noise of a measurement: what is known exactly has 0, and a point
        measured once at most 1. Points of one batch or cluster size that was not measured share
        that one's unknown departure from the law, and all of them the form of the law where the
        data do not tell it.

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
        of_form = self._open_form(rows, found) / self.spread_
        together += of_form.T @ of_form / len(of_form) + same_batch * np.sqrt(
            np.outer(unseen_batch, unseen_batch)
        )
        return np.asarray(together + same_size * np.sqrt(np.outer(unseen_size, unseen_size)))

    def _unseen(self, rows: Rows, found: Evaluation) -> tuple[Array, Array]:
        """(m,) each: variance from the departures of batches and of cluster sizes that were not measured."""
        if self._fitted.law.additive:
            return np.zeros(len(rows.batch)), np.zeros(len(rows.batch))
        at_batches, at_sizes = self._fitted.law.knots.weights(rows)
        scale = (np.maximum(found.seconds, TINY_S) * self._fitted.noise / EFFECT_SPREAD) ** 2
        of_batch = found.by_batch_effect**2 * (1.0 - np.sum(at_batches**2, axis=1)) / scale
        return of_batch, found.by_size_effect**2 * (1.0 - np.sum(at_sizes**2, axis=1)) / scale

    def _open_form(self, rows: Rows, found: Evaluation) -> Array:
        """(forms, m): by what each form would change the prediction's logarithm, while none is told from the others."""
        _, at_sizes = self._fitted.law.knots.weights(rows)
        effect = (
            found.by_size_effect
            / np.maximum(found.seconds, TINY_S)
            * (1.0 - np.sum(at_sizes**2, axis=1))
        )
        return np.asarray(self._fitted.form_departures(rows) * effect)

    def samples(
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        workers_per_node: ArrayLike = 1,
        count: int = 200,
        seed: int = 0,
    ) -> Array:
        """Seconds per step of `count` models drawn from the fit's uncertainty, without measurement noise.

        While the data do not tell the form of the law, each of them has one at random.

        Returns: (count, *shape), shape as the arguments broadcast. The same seed draws the same
            models for all points.
        """
        rows, shape = _points(nodes, local_batch, workers_per_node)
        law, fit = self._fitted.law, self._fitted.fit
        drawn = draws(fit, self._steps, self._fitted.bounds, SCATTER, count=count, seed=seed)
        seconds = np.stack([law.seconds(coefficients, rows) for coefficients in drawn])
        if self._fitted.told_at is not None:
            of_form = self._open_form(rows, law.evaluate(fit.coefficients, rows))
            seconds *= np.exp(
                of_form[np.random.default_rng(seed).integers(len(of_form), size=count)]
            )
        return seconds.reshape((count, *shape))


def fit_step_time(profiles: Sequence[Profile], form: FormName = "auto") -> StepTimeModel:
    """The model of a run's step times.

    What is known apart as "compute" is the step without synchronization, that is waiting for data,
    forward and backward, and the optimizer together; of batches as a whole, where a step takes its
    own in parts.
    """
    nodes, per_node, batch, step_s, compute_s, allreduce_s = np.array(
        [columns for profile in profiles for columns in _observations(profile)], dtype=np.float64
    ).T
    backend: Backend = "nccl" if any(row.backend == "nccl" for row in profiles) else "gloo"
    return StepTimeModel(form, backend).fit(nodes, batch, step_s, per_node, compute_s, allreduce_s)


def _observations(profile: Profile) -> Iterator[tuple[float, ...]]:
    """Nodes, workers per node, batch, and seconds of a step, of one without synchronization, and of the all-reduce."""
    (nodes, per_node, batch), times = profile.configuration, profile.times
    beside_s = times.data_time_s + times.optimizer_time_s
    whole_s = beside_s + times.compute_time_s if profile.parts == 1 else math.nan
    yield nodes, per_node, batch, times.step_time_s, whole_s, times.allreduce_time_s
    for smaller, seconds in profile.smaller_computes:
        # a loader that is too slow is so for each sample
        waits_s = times.data_time_s * smaller / batch
        yield (
            nodes,
            per_node,
            smaller,
            math.nan,
            waits_s + times.optimizer_time_s + seconds,
            math.nan,
        )


def _points(
    nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike
) -> tuple[Rows, tuple[int, ...]]:
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
    check_positive(
        nodes=count,
        local_batch=batch,
        step_time_s=steps[~np.isnan(steps)],
        workers_per_node=per_node,
    )
    kind = np.repeat([STEP, COMPUTE, ALLREDUCE], len(steps))
    seconds = np.concatenate([steps, computes, allreduces])
    rows = Rows(kind, np.tile(count, 3), np.tile(per_node, 3), np.tile(batch, 3), seconds)
    usable = (
        np.isfinite(rows.seconds)
        & (rows.seconds > 0.0)
        & ((kind != ALLREDUCE) | (rows.workers > 1.0))
    )
    rows = rows.only(usable)
    rows = _medians(rows) if len(rows.kind) > MANY_ROWS else rows
    # sums of floats depend on the order; the model must not
    return rows.only(np.lexsort(rows[::-1]))


def _medians(rows: Rows) -> Rows:
    """One row for each kind and configuration: of very many measurements most are repeats."""
    keys, group = np.unique(np.stack(rows[:4], axis=1), axis=0, return_inverse=True)
    order = np.lexsort((rows.seconds, group.ravel()))
    first = np.searchsorted(group.ravel()[order], np.arange(len(keys) + 1))
    middle = order[(first[:-1] + first[1:] - 1) // 2]
    return rows.only(middle)
