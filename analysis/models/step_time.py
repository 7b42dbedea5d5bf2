"""Step time on N workers with local batch b: the model of step times, fitted to profiles.

The law is in `step_time_law`, the choice of its form and coefficients in `step_time_fit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Self, get_args

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.data_loading import held_up_by_storage, loads_ahead, wait_per_sample_s
from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.analysis.models.regression import (
    Array,
    as_columns,
    check_positive,
    draws,
    ends_around,
    relative_spread,
    spread,
)
from tula_hpc.analysis.models.step_time_fit import (
    BELIEFS,
    EFFECT_SPREAD,
    SCATTER,
    Backend,
    choose_form,
)
from tula_hpc.analysis.models.step_time_law import (
    ALLREDUCE,
    COMPUTE,
    NAMES,
    STEP,
    SYNC,
    TINY_S,
    Linearization,
    Rows,
)
from tula_hpc.config.search import FormName

__all__ = ["Backend", "StepTimeModel", "fit_step_time"]

# predictions of drawn models that are computed at once, so that they fit into a processor's cache
AT_ONCE = 2**15


class StepTimeModel:
    """Seconds per training step over nodes, local batch and workers per node.

    Args:
        form: The collective, see `step_time_law`. "auto" fits the shape of the backend's own
            collective. "paper" is the paper's plain sum.
        backend: Sets the prior belief: which collective, and how much of it the computation hides.

    Attributes:
        parameters_: Coefficients by name, see `step_time_law`, in seconds, seconds per sample, or
            without a unit.
        departures_: Departures from the law, in logarithms: {"local_batch": {"32": u, …}, "nodes":
            {"4": v, …}}; the key for two workers on each of four nodes is "4x2".
        form_: The form that was fitted, `form`.
        pinned_: Coefficients that the data cannot identify: 0, or the prior belief.
        spread_: Relative standard deviation of a single measurement around the law, from residuals
            and prior.
        residual_median_: Median of |predicted / measured − 1| over the fitted steps.
        passes: Forward passes in which a script takes a predicted batch, see `accumulation`.
        optimizer_s: Seconds of the optimizer in a step, spent once for all its passes.
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
        self.passes = Passes()
        self.optimizer_s = 0.0

    def fit(  # noqa: PLR0917 - the columns of one table, in the order of their use
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        step_time_s: ArrayLike,
        workers_per_node: ArrayLike = 1,
        compute_time_s: ArrayLike | None = None,
        allreduce_time_s: ArrayLike | None = None,
        gradient_bytes: float | None = None,
        *,
        storage_decides: bool = False,
        loader_decides: bool = False,
    ) -> Self:
        """Fit to steps, and to computation and all-reduce timed separately; (n,) or scalars.

        Args:
            nodes: Number of nodes, K.
            local_batch: Samples per worker, b.
            step_time_s: A whole training step; NaN where it was not measured.
            workers_per_node: r; the mean if nodes differ.
            compute_time_s: The step without synchronization, of the whole batch; NaN or 0 where
                unknown. It includes waiting for data unless `loader_decides`.
            allreduce_time_s: The bare all-reduce of the gradient's bytes; NaN or 0 where unknown.
            gradient_bytes: Gradients of one worker, to predict a network that was not measured.
            storage_decides: Some steps are known to wait for storage that all nodes share; if
                False, that term is fitted only if it makes the fit clearly better.
            loader_decides: Loader processes are known to take longer than the step on the fewest
                workers; they load while it runs.

        Raises:
            ValueError: No rows, lengths that do not fit, or values that are not positive and
                finite.
        """
        columns = as_columns(
            nodes,
            workers_per_node,
            local_batch,
            step_time_s,
            np.nan if compute_time_s is None else compute_time_s,
            np.nan if allreduce_time_s is None else allreduce_time_s,
        )
        rows = _rows(columns)
        fitted = choose_form(
            rows,
            self.form,
            BELIEFS[self.backend],
            storage_decides=storage_decides,
            loader_decides=loader_decides,
        )
        self._fitted = fitted.with_believed_network(rows, gradient_bytes)
        self._steps = rows.kind == STEP
        self._describe(rows)
        return self

    def _describe(self, rows: Rows) -> None:
        fitted = self._fitted
        absent = fitted.absent(rows)
        self.form_ = fitted.form
        values = dict(zip(NAMES, fitted.fit.coefficients.tolist(), strict=False))
        self.parameters_ = {name: value for name, value in values.items() if name not in absent}
        self.pinned_ = [name for name in fitted.unidentified() if name not in absent]
        self.departures_ = fitted.departures()
        self.spread_ = spread(fitted.fit, self._steps, SCATTER)
        self.residual_median_ = float(np.median(np.abs(fitted.fit.residuals[self._steps])))

    def predict(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1
    ) -> Array:
        """Predict seconds per step, in the shape that the arguments broadcast to."""
        rows, further, shape = self._points(nodes, local_batch, workers_per_node)
        return self._seconds(self._fitted.fit.coefficients, rows, further).reshape(shape)

    def interval(
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        workers_per_node: ArrayLike = 1,
        level: float = 0.9,
    ) -> tuple[Array, Array]:
        """Return the seconds between which a new measurement lies with probability `level`.

        Its width comes from the residuals, each point's distance from the data (leverage), and the
        usual departure from the law of batches and cluster sizes that were not measured. If only a
        single node was measured, the range of usual networks is added.
        """
        rows, further, shape = self._points(nodes, local_batch, workers_per_node)
        found = self._evaluate(rows, further)
        seconds = np.maximum(found.seconds, TINY_S)
        width = relative_spread(
            self._fitted.fit,
            self._steps,
            found.gradients / seconds[:, None],
            level,
            unseen=sum(self._unseen(rows, found)),
            prior=SCATTER,
        )
        below = above = width
        if self._fitted.network_spread:
            slower, faster = self._by_network(rows, further, float(ndtri(0.5 + level / 2.0)))
            below = np.hypot(width, np.log(seconds / faster))
            above = np.hypot(width, np.log(slower / seconds))
        low, high = ends_around(seconds, below, above)
        return low.reshape(shape), high.reshape(shape)

    def covariance(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike = 1
    ) -> Array:
        """Return the relative covariance (m, m) of predictions, in units of a step's variance.

        It leaves out the noise of a measurement: a point that is known exactly has variance 0, a
        point measured once at most 1. Points of the same unmeasured batch or cluster size share its
        unknown departure from the law; without a measured network all points on several nodes share
        the unknown network.
        """
        rows, further, _ = self._points(nodes, local_batch, workers_per_node)
        fitted = self._fitted
        found = self._evaluate(rows, further)
        relative = found.gradients / np.maximum(found.seconds, TINY_S)[:, None]
        unseen_batch, unseen_size = self._unseen(rows, found)
        same_batch = rows.batch[:, None] == rows.batch
        same_size = (rows.nodes[:, None] == rows.nodes) & (rows.per_node[:, None] == rows.per_node)
        together = relative @ fitted.fit.covariance @ relative.T
        of_batch = same_batch * np.sqrt(np.outer(unseen_batch, unseen_batch))
        of_size = same_size * np.sqrt(np.outer(unseen_size, unseen_size))
        together += of_batch + of_size
        if self._fitted.network_spread:
            slower, faster = self._by_network(rows, further, 1.0)
            of_network = 0.5 * np.log(slower / faster) / self.spread_
            together += np.outer(of_network, of_network)
        return np.asarray(together)

    def _unseen(self, rows: Rows, found: Linearization) -> tuple[Array, Array]:
        """Return the variances (m,) by the unknown departures of batches, and of cluster sizes."""
        if self._fitted.law.additive:
            return np.zeros(len(rows.batch)), np.zeros(len(rows.batch))
        knots = self._fitted.law.knots
        at_batches, at_sizes = knots.weights(rows)
        scale = (np.maximum(found.seconds, TINY_S) * self._fitted.noise / EFFECT_SPREAD) ** 2
        unknown = 1.0 - knots.known_batches(rows.batch, at_batches)
        of_batch = found.by_batch_effect**2 * unknown / scale
        by_size = np.hypot(found.by_size_effect, found.by_storage_effect)
        sizes = knots.sizes[:, 0]
        if len(np.unique(sizes[sizes > 1.0])) < 2:
            # the only measured size of several nodes departs as much, and the law was fitted to it
            by_size = np.sqrt(2.0) * by_size
        return of_batch, by_size**2 * (1.0 - np.sum(at_sizes**2, axis=1)) / scale

    def _points(
        self, nodes: ArrayLike, local_batch: ArrayLike, workers_per_node: ArrayLike
    ) -> tuple[Rows, Array, tuple[int, ...]]:
        """Return steps of one pass (n,), the number of further passes of each, and the shape."""
        passes = self.passes.of(local_batch)
        batch = np.asarray(local_batch, dtype=np.float64) / passes
        shape = np.broadcast_shapes(*map(np.shape, (nodes, batch, workers_per_node)))
        per_node, count, batch = as_columns(workers_per_node, nodes, batch)
        check_positive(nodes=count, local_batch=batch, workers_per_node=per_node)
        rows = Rows(np.full(batch.shape, STEP), count, per_node, batch, batch)
        return rows, np.broadcast_to(passes - 1.0, shape).ravel(), shape

    def _seconds(self, coefficients: Array, rows: Rows, further: Array) -> Array:
        seconds = self._fitted.law.seconds(coefficients, rows)
        if not further.any():
            return seconds
        computes = self._fitted.law.seconds(coefficients, _computes(rows))
        return np.asarray(seconds + further * np.maximum(computes - self.optimizer_s, 0.0))

    def _evaluate(self, rows: Rows, further: Array) -> Linearization:
        coefficients = self._fitted.fit.coefficients
        found = self._fitted.law.evaluate(coefficients, rows)
        if not further.any():
            return found
        others = self._fitted.law.evaluate(coefficients, _computes(rows))
        others = others._replace(seconds=np.maximum(others.seconds - self.optimizer_s, 0.0))
        return Linearization(
            found.seconds + further * others.seconds,
            found.gradients + further[:, None] * others.gradients,
            found.by_batch_effect + further * others.by_batch_effect,
            found.by_size_effect + further * others.by_size_effect,
            found.by_storage_effect + further * others.by_storage_effect,
        )

    def _by_network(self, rows: Rows, further: Array, deviations: float) -> tuple[Array, Array]:
        """Predict (n,) for a network slower by `deviations`, then for one as much faster."""
        found = []
        for sign in (1.0, -1.0):
            coefficients = self._fitted.fit.coefficients.copy()
            coefficients[SYNC] *= math.exp(sign * deviations * self._fitted.network_spread)
            found.append(np.maximum(self._seconds(coefficients, rows, further), TINY_S))
        return found[0], found[1]

    def samples(
        self,
        nodes: ArrayLike,
        local_batch: ArrayLike,
        workers_per_node: ArrayLike = 1,
        count: int = 200,
        seed: int = 0,
    ) -> Array:
        """Draw models from the fit's uncertainty and predict seconds per step, without noise.

        The result is (count, *shape). The same seed draws the same models for all points. In each
        model all points of an unmeasured cluster size share one drawn departure from the law.
        Departures of single batches are left out, so that curves over the batch stay smooth.
        """
        rows, further, shape = self._points(nodes, local_batch, workers_per_node)
        fitted = self._fitted
        drawn = draws(fitted.fit, self._steps, fitted.bounds, SCATTER, count=count, seed=seed)
        network = np.random.default_rng([seed, 0]).standard_normal(count)
        drawn[:, SYNC] *= np.exp(fitted.network_spread * network)
        parts = np.array_split(drawn, min(count, 1 + count * len(further) // AT_ONCE))
        seconds = np.concatenate([self._seconds(part, rows, further) for part in parts])
        found = self._evaluate(rows, further)
        of_size = self.spread_ * np.sqrt(self._unseen(rows, found)[1])
        sizes = np.stack([rows.nodes, rows.per_node], axis=1)
        for size in np.unique(sizes[of_size > 0.0], axis=0):
            key = [seed, 1, *(int(1000 * part) for part in size)]
            departure = np.random.default_rng(key).standard_normal(count)
            points = np.all(sizes == size, axis=1)
            seconds[:, points] *= np.exp(np.outer(departure, of_size[points]))
        return seconds.reshape((count, *shape))


def fit_step_time(
    profiles: Sequence[Profile],
    form: FormName = "auto",
    passes: Passes = Passes(),  # noqa: B008 - immutable
) -> StepTimeModel:
    """Fit the model to at least one profile; `passes` are those of the batches to be predicted."""
    profiles = [profile.of_one_pass for profile in profiles]
    model = _fit(profiles, form, ahead=False)
    # the law has one wait for a loader, and a step of several passes waits in each
    if form != "paper" and passes == Passes() and loads_ahead(profiles):
        other = _fit(profiles, form, ahead=True)
        one_size = len({profile.configuration.world_size for profile in profiles}) == 1
        # only synchronization tells whether the loader goes on meanwhile
        if one_size or other.spread_ <= model.spread_:
            model = other
    model.passes = passes
    model.optimizer_s = float(np.median([row.times.optimizer_time_s for row in profiles]))
    return model


def _fit(profiles: Sequence[Profile], form: FormName, *, ahead: bool) -> StepTimeModel:
    """Fit to profiles whose wait for data adds to a step, or comes from a loader that goes on."""
    alone_s = 0.0 if ahead else wait_per_sample_s(profiles)
    rows = [row for profile in profiles for row in _observations(profile, alone_s)]
    nodes, per_node, batch, step_s, compute_s, allreduce_s = np.array(rows, dtype=np.float64).T
    backend: Backend = "nccl" if any(row.backend == "nccl" for row in profiles) else "gloo"
    gradient_bytes = max(profile.memory.gradient_bytes for profile in profiles)
    return StepTimeModel(form, backend).fit(
        nodes,
        batch,
        step_s,
        per_node,
        compute_s,
        allreduce_s,
        gradient_bytes or None,
        storage_decides=bool(held_up_by_storage(profiles)),
        loader_decides=ahead,
    )


def _observations(profile: Profile, alone_s: float) -> Iterator[tuple[float, ...]]:
    """Yield nodes, workers per node, batch, and the seconds of step, computation and all-reduce.

    Computation is the step without synchronization. `alone_s` is the wait for data per sample on
    the fewest workers that adds to it.
    """
    nodes, per_node, batch = profile.configuration
    times = profile.times
    # any longer wait is for storage that all nodes share, which is a term of its own
    wait_s = min(times.data_time_s, alone_s * batch)
    # unknown for a whole batch that is taken in micro-batches
    whole_s = math.nan
    if profile.parts == 1:
        whole_s = wait_s + times.optimizer_time_s + times.compute_time_s
    yield nodes, per_node, batch, times.step_time_s, whole_s, times.allreduce_time_s
    for smaller, seconds in profile.smaller_computes:
        # the wait for a slow loader grows with the samples
        compute_s = wait_s * smaller / batch + times.optimizer_time_s + seconds
        yield nodes, per_node, smaller, math.nan, compute_s, math.nan


def _computes(rows: Rows) -> Rows:
    return rows._replace(kind=np.full(rows.batch.shape, COMPUTE))


def _rows(columns: Sequence[Array]) -> Rows:
    """Return all observations as rows, in an order that does not depend on that of the input."""
    count, per_node, batch, steps, computes, allreduces = columns
    known_steps = steps[~np.isnan(steps)]
    check_positive(
        nodes=count, local_batch=batch, step_time_s=known_steps, workers_per_node=per_node
    )
    kind = np.repeat([STEP, COMPUTE, ALLREDUCE], len(steps))
    seconds = np.concatenate([steps, computes, allreduces])
    rows = Rows(kind, np.tile(count, 3), np.tile(per_node, 3), np.tile(batch, 3), seconds)
    measured = np.isfinite(rows.seconds) & (rows.seconds > 0.0)
    rows = rows.only(measured & ((kind != ALLREDUCE) | (rows.workers > 1.0)))
    # sums of floats depend on the order of the rows, the model must not
    return rows.only(np.lexsort(rows[::-1]))
