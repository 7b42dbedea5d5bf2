"""Memory of one worker with local batch b on W workers.

    allocated(b, W) = max(static(W) + gradients + lift,
                          static(W) + overhead + bucket × [W > 1] + per_sample × b)
    static(W)       = baseline + parameters + optimizer states (sharded ones / W), all counted
    reserved(b, W)  = allocated on CPU;
                      on CUDA ⌈ratio × allocated + slack⌉ to whole segments of 2 MiB, the caching
                      allocator's

All in bytes. The line is the paper's `M_param + M_grad + M_opt + M_act` (S. Tyagi, F. Wang,
"Tula"): activations are linear in b, the rest does not depend on it. The first term is the peak in
the optimizer's step, when memory holds all gradients but no activations; it exceeds the line for
small batches of models with many weights. `bucket` is the extra memory of data-parallel training:
with W > 1 the gradients stay in buckets for the whole step, and the collectives have buffers. ZeRO
stage 1 (S. Rajbhandari et al. 2020) divides the optimizer's states over the workers.

Fitted are `overhead` (workspace, and the allocator's holes on CPU), `per_sample`, `bucket`, with
enough batches `lift`, and on CUDA `ratio` and `slack`; none is negative. A batch that ran out of
memory, and every larger one, needs more than the limit. Limits: one line for all batches, so a
library that picks another algorithm at a certain batch shows as an error; the memory of a CUDA
context lies outside of the allocator and is not included.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.profiles import Profile, Summary, equivalent_batches
from tula_hpc.analysis.models.regression import (
    Array,
    Fit,
    Problem,
    as_columns,
    check_positive,
    ends_around,
    fit_relative,
    identified,
    relative_spread,
)

# CUDA's caching allocator asks the device for multiples of this size
SEGMENT_BYTES = 2 * 1024**2
NAMES = ("fixed_bytes", "bytes_per_sample", "bucket_bytes", "lift_bytes")
OVERHEAD, PER_SAMPLE, BUCKET, LIFT = range(4)
# answer of `max_batch` where memory does not grow with the batch
UNBOUNDED_BATCH = 2**31 - 1
# weight of an out-of-memory record that the line contradicts; a measurement has weight 1
CENSORED_WEIGHT = 10.0
# largest relative error of a credible fit to out-of-memory bounds, else they have another cause
CREDIBLE_ERROR = 0.1
# number of different sizes that tell the ratio from the slack
RESERVE_SIZES = 3
# number of local batches that tell a kink from noise
HINGE_BATCHES = 4
# a kink must at least halve the largest error
HINGE_GAIN = 0.5
# largest error of a plain line below which a kink would only fit rounding
HINGE_ERROR = 1e-5


class Peaks(NamedTuple):
    """Measured peaks with the counted bytes of each, all (n,); see `MemoryModel.fit`."""

    local_batch: Array
    # allocated on CUDA, resident on CPU
    peak_bytes: Array
    # sharded optimizer states included
    static_bytes: Array
    gradient_bytes: Array
    # 1 where there is more than one worker, else 0
    distributed: Array


class MemoryModel:
    """Peak bytes over the local batch: a robust fit on relative errors, no coefficient below 0.

    Attributes:
        parameters_: `fixed_bytes` (bytes, of a single worker, counted bytes included) and
            `bytes_per_sample`; if they were given or fitted also `static_bytes`,
            `bucket_bytes`, `floor_bytes`, `reserved_ratio`, `reserved_slack_bytes`.
        pinned_: Coefficients that the data cannot identify. With one local batch only, fixed_bytes
            is the counted part, 0 without counts: the prediction for larger batches is then too
            high rather than too low.
        oom_local_batch_: Smallest local batch known to run out of memory, or None.
        oom_contradicts_: True if measurements and out-of-memory bounds cannot lie on one line.
            Predictions from a bound's batch on exceed its limit all the same.
        residual_median_: Median of |predicted / measured − 1|.
    """

    parameters_: dict[str, float]
    pinned_: list[str]
    oom_local_batch_: int | None
    oom_contradicts_: bool
    residual_median_: float
    _fit: Fit
    # model of a single worker whose step takes the batch in micro-batches
    _alone: MemoryModel | None = None
    # forward passes in which a script takes a predicted batch
    passes: Passes = Passes()

    def fit(
        self,
        local_batch: ArrayLike,
        peak_bytes: ArrayLike,
        oom_local_batch: ArrayLike | None = None,
        *,
        oom_limit_bytes: ArrayLike | None = None,
        static_bytes: ArrayLike = 0.0,
        sharded_bytes: ArrayLike = 0.0,
        gradient_bytes: ArrayLike = 0.0,
        workers: ArrayLike = 1,
        allocated_bytes: ArrayLike | None = None,
    ) -> Self:
        """Fit to measured peaks, all (n,) or scalars; out-of-memory records are (m,).

        Args:
            local_batch: Samples per worker.
            peak_bytes: Bytes that count against a limit: reserved on CUDA, resident on CPU.
            oom_local_batch: Local batches that ran out of memory.
            oom_limit_bytes: Memory available to these; None: they only bound `max_batch`.
            static_bytes: Baseline, parameters and optimizer states that are not divided.
            sharded_bytes: This worker's share of optimizer states divided over all.
            gradient_bytes: Gradients of one worker.
            workers: Number of workers, W.
            allocated_bytes: Bytes that tensors held; None: as much as `peak_bytes`.

        Raises:
            ValueError: No rows, lengths that do not fit, or values that are not positive and
                finite.
        """
        given = (local_batch, peak_bytes, static_bytes, sharded_bytes, gradient_bytes, workers)
        columns = as_columns(*given, peak_bytes if allocated_bytes is None else allocated_bytes)
        # sums of floats depend on the order of the rows, the model must not
        order = np.lexsort(columns[::-1])
        batch, peak, static, sharded, gradients, world, allocated = (
            column[order] for column in columns
        )
        check_positive(local_batch=batch, peak_bytes=peak, workers=world, allocated_bytes=allocated)
        reserves = allocated_bytes is not None
        self._set_bounds(oom_local_batch, oom_limit_bytes)
        self._static = float(np.median(static))
        self._sharded_total = float(np.max(sharded * world))
        self._gradients = float(np.max(gradients))
        self._some_distributed = bool(np.any(world > 1))
        self._reserve = fit_reserve(allocated, peak) if reserves else Reserve(1.0, 0.0, 1.0)
        distributed = (world > 1).astype(np.float64)
        self._fit_line(Peaks(batch, allocated, static + sharded, gradients, distributed))
        residuals = self._predicted(batch, world) / peak - 1.0
        self._fit = self._fit._replace(residuals=residuals)
        self.residual_median_ = float(np.median(np.abs(residuals)))
        self._describe(reserves)
        return self

    def _set_bounds(self, batches: ArrayLike | None, limits: ArrayLike | None) -> None:
        self.oom_local_batch_ = None
        self._bounds: list[tuple[float, float]] = []
        self._largest_batch = UNBOUNDED_BATCH
        if batches is None or not np.size(batches):
            return
        self.oom_local_batch_ = math.ceil(np.min(batches))
        if limits is None:
            self._largest_batch = self.oom_local_batch_ - 1
        else:
            self._bounds = list(zip(*as_columns(batches, limits), strict=True))

    def _fit_line(self, rows: Peaks) -> None:
        """Fit the line, with a kink if the data show one, above all bounds if possible."""
        fit, free = _best_fit(rows)
        self._use(fit, free, rows)
        self.oom_contradicts_ = False
        world = 2.0 if self._some_distributed else 1.0
        broken = [
            (batch, limit)
            for batch, limit in self._bounds
            if self._reserve.of(self._allocated(batch, world)) < limit
        ]
        if not broken:
            return
        censored = self._censored(broken, world)
        raised = _fit_above(rows, censored, fit, free)
        raised_bytes, _ = _problem(censored, np.ones(len(broken))).evaluate(raised.coefficients)
        reached = raised_bytes / censored.peak_bytes
        bent = float(np.median(np.abs(raised.residuals))) > CREDIBLE_ERROR
        self.oom_contradicts_ = bent or bool(np.any(reached < 1.0 - CREDIBLE_ERROR))
        if not self.oom_contradicts_:
            self._use(raised, free, rows)

    def _censored(self, broken: list[tuple[float, float]], world: float) -> Peaks:
        """Return out-of-memory records as rows, with lower bounds of the bytes then allocated."""
        batch, limit = np.array(broken, dtype=np.float64).T
        ones = np.ones_like(batch)
        return Peaks(
            local_batch=batch,
            peak_bytes=np.maximum(limit - self._reserve.slack, 1.0) / self._reserve.ratio,
            static_bytes=self._known(world) * ones,
            gradient_bytes=self._gradients * ones,
            distributed=float(world > 1) * ones,
        )

    def _use(self, fit: Fit, free: NDArray[np.bool_], rows: Peaks) -> None:
        self._fit = fit
        self._line = fit.coefficients.copy()
        self.pinned_ = [name for name, known in zip(NAMES[:2], free[:2], strict=True) if not known]
        # without a data-parallel measurement, assume buckets of the gradients' size
        if not rows.distributed.any():
            self._line[BUCKET] = self._gradients
        if not free[BUCKET] and self._gradients > 0.0:
            self.pinned_.append("bucket_bytes")

    def _known(self, workers: ArrayLike) -> Array:
        world = np.asarray(workers, dtype=np.float64)
        return np.asarray(self._static + self._sharded_total / world)

    def _default_workers(self, workers: ArrayLike | None) -> ArrayLike:
        """Return `workers`; for None 2 if several were measured (they need more memory), else 1."""
        if workers is not None:
            return workers
        return 2 if self._some_distributed else 1

    def predict(self, local_batch: ArrayLike, workers: ArrayLike | None = None) -> Array:
        """Predict bytes for each local batch and number of workers, in their common shape.

        Without `workers` it predicts for several if several were measured, else for one.
        """
        world = self._default_workers(workers)
        batch = self.passes.batch_of_one(local_batch)
        predicted = self._predicted(batch, world)
        if self._alone is None:
            return predicted
        return np.where(np.asarray(world) == 1, self._alone.predict(batch, 1), predicted)

    def _predicted(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        line = self._reserve.of(self._allocated(local_batch, workers))
        for batch, limit in self._bounds:
            beyond = np.asarray(local_batch) >= batch
            line = np.where(beyond, np.maximum(line, np.nextafter(limit, math.inf)), line)
        return np.asarray(line)

    def _allocated(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        batch, world = np.broadcast_arrays(
            np.asarray(local_batch, dtype=np.float64), np.asarray(workers)
        )
        overhead, per_sample, bucket, lift = self._line
        known = self._known(world)
        line = known + overhead + bucket * (world > 1) + per_sample * batch
        return np.asarray(np.maximum(line, known + self._gradients + lift))

    def max_batch(self, limit_bytes: float, workers: int | None = None) -> int:
        """Return the largest local batch within the limit and the out-of-memory bound, or 0."""

        def exceeds(batch: int) -> bool:
            return float(self.predict(batch, workers)) > limit_bytes

        # memory never falls with the batch
        return bisect_left(range(1, self._largest_batch + 1), True, key=exceeds)

    def interval(
        self, local_batch: ArrayLike, level: float = 0.9, workers: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Return the bytes between which a new measurement lies with probability `level`."""
        world = self._default_workers(workers)
        batch = self.passes.batch_of_one(local_batch)
        low, high = self._interval(batch, level, world)
        if self._alone is None:
            return low, high
        alone_low, alone_high = self._alone.interval(batch, level, 1)
        is_alone = np.asarray(world) == 1
        return np.where(is_alone, alone_low, low), np.where(is_alone, alone_high, high)

    def _interval(
        self, local_batch: ArrayLike, level: float, world: ArrayLike
    ) -> tuple[Array, Array]:
        predicted = self._predicted(local_batch, world)
        batch, several = np.broadcast_arrays(
            np.asarray(local_batch, dtype=np.float64), np.asarray(world) > 1
        )
        design = _design(batch.ravel(), several.ravel().astype(np.float64))
        gradients = design / np.maximum(predicted.ravel(), 1.0)[:, None]
        every = np.ones(len(self._fit.residuals), dtype=bool)
        width = relative_spread(self._fit, every, self._reserve.ratio * gradients, level)
        width = width.reshape(predicted.shape)
        return ends_around(predicted, width, width)

    def _describe(self, reserves: bool) -> None:
        overhead, per_sample, bucket, lift = self._line.tolist()
        known = float(self._known(1))
        self.parameters_ = {"fixed_bytes": known + overhead, "bytes_per_sample": per_sample}
        if known > 0.0:
            self.parameters_["static_bytes"] = known
            self.parameters_["bucket_bytes"] = bucket
            self.parameters_["floor_bytes"] = known + self._gradients + lift
        if reserves:
            self.parameters_["reserved_ratio"] = self._reserve.ratio
            self.parameters_["reserved_slack_bytes"] = self._reserve.slack


class Reserve(NamedTuple):
    """Bytes that an allocator takes from the device, as a line over the tensors' bytes."""

    ratio: float
    # bytes
    slack: float
    # bytes; the allocator takes whole multiples
    step: float

    def of(self, allocated: Array) -> Array:
        """Return reserved bytes."""
        return np.asarray(np.ceil((self.ratio * allocated + self.slack) / self.step) * self.step)


def fit_reserve(allocated: Array, reserved: Array) -> Reserve:
    """Fit ratio (at least 1) and slack (at least 0) of reserved over allocated bytes, both (n,).

    The fit minimizes relative errors. Two unknowns need three different sizes, since the rounding
    to segments is noise; with fewer only the ratio is fitted.
    """
    # rounding up adds half a segment on average
    above = np.maximum(reserved - 0.5 * SEGMENT_BYTES - allocated, 0.0) / reserved
    columns = np.stack([allocated, np.ones_like(allocated)], axis=1) / reserved[:, None]
    if len(np.unique(allocated)) < RESERVE_SIZES:
        return Reserve(1.0 + float(np.median(above / columns[:, 0])), 0.0, SEGMENT_BYTES)
    extra, slack = nnls(columns, above)[0].tolist()
    return Reserve(1.0 + extra, slack, SEGMENT_BYTES)


def _design(batch: Array, distributed: Array) -> Array:
    """Return the line's gradients (n, 4) in the order of `NAMES`."""
    ones = np.ones_like(batch)
    return np.stack([ones, batch, distributed, np.zeros_like(batch)], axis=1)


def _problem(rows: Peaks, weights: Array) -> Problem:
    design = _design(rows.local_batch, rows.distributed)
    at_floor = np.array([0.0, 0.0, 0.0, 1.0])
    floor = rows.static_bytes + rows.gradient_bytes

    def evaluate(coefficients: Array) -> tuple[Array, Array]:
        line = rows.static_bytes + design @ coefficients
        least = floor + coefficients[LIFT]
        gradients = np.where((line >= least)[:, None], design, at_floor)
        return np.maximum(line, least), gradients

    unbounded = np.full(len(NAMES), np.inf)
    zeros = np.zeros(len(NAMES))
    return Problem(
        evaluate, rows.peak_bytes, weights, unbounded, zeros, believed=zeros, belief=zeros
    )


def _best_fit(rows: Peaks) -> tuple[Fit, NDArray[np.bool_]]:
    """Return the plain line, or a clearly better one with a kink, and its free coefficients."""
    relative = _design(rows.local_batch, rows.distributed) / rows.peak_bytes[:, None]
    order = [PER_SAMPLE, OVERHEAD]
    if rows.distributed.any() and not rows.distributed.all():
        order.append(BUCKET)
    free = identified(relative, order)
    problem = _problem(rows, np.ones(len(rows.peak_bytes)))
    plain = fit_relative(problem, [_start(rows, free)], free)
    error = np.max(np.abs(plain.residuals))
    batches = np.unique(rows.local_batch)
    if len(batches) < HINGE_BATCHES or not rows.gradient_bytes.any() or error < HINGE_ERROR:
        return plain, free
    kinked = free | (np.arange(len(NAMES)) == LIFT)
    starts = [_kinked_start(rows, free, batch) for batch in batches[1:-1]]
    bent = fit_relative(problem, starts, kinked)
    if np.max(np.abs(bent.residuals)) < HINGE_GAIN * error:
        return bent, kinked
    return plain, free


def _start(rows: Peaks, free: NDArray[np.bool_]) -> Array:
    """Return the non-negative line of least relative squares."""
    design = _design(rows.local_batch, rows.distributed) / rows.peak_bytes[:, None]
    start = np.zeros(len(NAMES))
    start[free] = nnls(design[:, free], 1.0 - rows.static_bytes / rows.peak_bytes)[0]
    return start


def _kinked_start(rows: Peaks, free: NDArray[np.bool_], first: float) -> Array:
    """Return the line through the batches from `first` on, with the lift that smaller ones need."""
    small = rows.local_batch < first
    start = _start(Peaks._make(column[~small] for column in rows), free)
    lift = np.median((rows.peak_bytes - rows.static_bytes - rows.gradient_bytes)[small])
    start[LIFT] = max(0.0, float(lift))
    return start


def _fit_above(rows: Peaks, censored: Peaks, fit: Fit, free: NDArray[np.bool_]) -> Fit:
    """Fit with the bounds as further rows; return residuals and leverage of measurements only."""
    joined = Peaks._make(map(np.concatenate, zip(rows, censored, strict=True)))
    count = len(rows.peak_bytes)
    weights = np.concatenate([np.ones(count), np.full(len(censored.peak_bytes), CENSORED_WEIGHT)])
    raised = fit_relative(_problem(joined, weights), [fit.coefficients, _start(joined, free)], free)
    return raised._replace(residuals=raised.residuals[:count], leverage=raised.leverage[:count])


def fit_memory(summary: Summary, limit_bytes: float | None = None) -> MemoryModel:
    """Fit to the memory of at least one profile, and to the configurations that ran out of it.

    On CUDA `reserved_bytes` is what the allocator took, of which tensors held `peak_bytes`; on CPU
    it is the whole process, and the smallest baseline (interpreter and libraries) counts as known.
    `limit_bytes` was available to one worker; None: unknown.

    A single worker that takes its batch in micro-batches has a model of its own. Several workers
    never split their batch: the model for them takes its profile as one of a micro-batch.
    """
    out, parts = summary.out_of_memory, summary.parts
    bounds = equivalent_batches(out, parts, alone=False)
    model = _fit_profiles(summary.profiles, bounds, limit_bytes)
    alone = [row._replace(parts=1) for row in summary.profiles if row.parts > 1]
    if alone:
        bounds = equivalent_batches(out, parts, alone=True)
        model._alone = _fit_profiles(alone, bounds, limit_bytes)
    model.passes = summary.passes
    return model


def _fit_profiles(
    profiles: Sequence[Profile], out: list[float], limit_bytes: float | None
) -> MemoryModel:
    baseline = min(row.memory.baseline_bytes for row in profiles)
    columns: list[tuple[float, ...]] = []
    for row in profiles:
        use = row.memory
        sizes = (
            row.part_batch,
            row.configuration.world_size,
            use.reserved_bytes,
            use.baseline_bytes + use.peak_bytes,
            baseline + use.parameter_bytes + use.optimizer_bytes - use.sharded_bytes,
            use.sharded_bytes,
            use.gradient_bytes,
        )
        columns.append(sizes)
    batch, workers, reserved, held, static, sharded, gradients = np.array(columns, dtype=float).T
    floor = static + sharded + gradients
    # a process cannot hold less than was counted: then the counts do not belong to it
    if np.any(reserved < floor):
        return MemoryModel().fit(batch, reserved, out, oom_limit_bytes=limit_bytes)
    reserves = np.any(reserved > held) and np.all(held >= floor)
    return MemoryModel().fit(
        batch,
        reserved,
        out,
        oom_limit_bytes=limit_bytes,
        static_bytes=static,
        sharded_bytes=sharded,
        gradient_bytes=gradients,
        workers=workers,
        allocated_bytes=held if reserves else None,
    )
