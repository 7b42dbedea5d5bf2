"""How much memory one worker uses with local batch b on so many workers W.

    allocated(b, W) = max(static(W) + gradients + lift,
                          static(W) + overhead + bucket × [W > 1] + per_sample × b)
    static(W)       = what counting tells: baseline + parameters + optimizer states (sharded ones over W)
    reserved(b, W)  = allocated on CPU;
                      on CUDA ⌈ratio × allocated + slack⌉ to whole segments of 2 MiB, the caching
                      allocator's

All in bytes. The line is the paper's `M_param + M_grad + M_opt + M_act` (S. Tyagi, F. Wang,
"Tula"): activations are linear in b, the rest does not depend on it. The first term is the
optimizer's step, when all gradients live and no activation does; it is above the line for small
batches of models with many weights. `bucket` is what data-parallel training keeps beside it: with W
> 1 the gradients live in buckets for the whole step, and the collectives have buffers. ZeRO stage 1
(S. Rajbhandari et al. 2020) divides the optimizer's states over the workers.

Learned: `overhead` (workspace, and the allocator's holes on CPU), `per_sample`, `bucket`, with
enough batches `lift`, on CUDA `ratio` and `slack`. None is negative. What ran out of memory is a
bound: M(b) is above the limit there, and for every larger batch. Limits: one line for all batches,
so a library that picks another algorithm at a certain batch shows as an error; the memory of a CUDA
context lies outside of the allocator and is not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import ge, gt
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from tula_hpc.analysis.models.profiles import Profile, Summary, as_large
from tula_hpc.analysis.models.regression import (
    Array,
    Fit,
    Problem,
    as_columns,
    check_positive,
    fit_relative,
    identified,
    relative_spread,
)
from tula_hpc.records import Footprint, MemoryUse

# CUDA's caching allocator asks the device for multiples of it
SEGMENT_BYTES = 2 * 1024**2
NAMES = ("fixed_bytes", "bytes_per_sample", "bucket_bytes", "lift_bytes")
OVERHEAD, PER_SAMPLE, BUCKET, LIFT = range(4)
# what `max_batch` says where memory does not grow with the batch
UNBOUNDED_BATCH = 2**31 - 1
# of an out-of-memory record that the line contradicts, against 1 of a measurement
CENSORED_WEIGHT = 10.0
# a bound that bends the line by more than this at the measurements has another cause
CREDIBLE_ERROR = 0.1
# so many different sizes tell the ratio from the slack
RESERVE_SIZES = 3
# so many local batches are needed to tell a kink from noise,
HINGE_BATCHES = 4
# and it must at least halve the largest error
HINGE_GAIN = 0.5


class Rows(NamedTuple):
    """Measured peaks and what is known of each beforehand, all (n,)."""

    local_batch: Array
    # what is modelled: allocated on CUDA, resident on CPU
    peak_bytes: Array
    # baseline, parameters and optimizer states
    static_bytes: Array
    gradient_bytes: Array
    # 1 where there is more than one worker, else 0
    distributed: Array


class MemoryModel:
    """Peak bytes over the local batch; coefficients at least 0, fit on relative error, robust to outliers.

    Attributes: parameters_: `fixed_bytes` (bytes, of a single worker; the counted part is in it)
        and `bytes_per_sample`; where
            they were given or learned also `static_bytes`, `bucket_bytes`, `floor_bytes`,
            `reserved_ratio`, `reserved_slack_bytes`.
        pinned_: Coefficients that the data cannot identify. With one local batch only, fixed_bytes
            is what counting tells, 0 without counts: the prediction for larger batches is then too
            high rather than too low.
        oom_local_batch_: Smallest local batch known to run out of memory, or None.
        oom_contradicts_: Whether the measurements and the out-of-memory bounds cannot lie on one
            line. The bounds hold from their batches on all the same.
        residual_median_: Median of |predicted / measured − 1|.
    """

    parameters_: dict[str, float]
    pinned_: list[str]
    oom_local_batch_: int | None
    oom_contradicts_: bool
    residual_median_: float
    _fit: Fit
    # of a single worker, where its step takes the batch in parts
    _alone: MemoryModel | None = None

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
        """Fit to measured peaks.

        Args: local_batch: (n,) or scalar, samples per worker. peak_bytes: (n,) bytes, what a limit
            counts: reserved on CUDA, resident on CPU. oom_local_batch: (m,) or scalar, local
            batches that ran out of memory. oom_limit_bytes: (m,) or scalar, the memory that there
            was then. Without it the smallest such batch only
                bounds `max_batch`.
            static_bytes: (n,) or scalar, baseline, parameters and optimizer states that every
                worker has whole.
            sharded_bytes: (n,) or scalar, this worker's part of the optimizer states that are
                divided over all workers.
            gradient_bytes: (n,) or scalar.
            workers: (n,) or scalar, W.
            allocated_bytes: (n,) bytes of `peak_bytes` that tensors held, where the allocator
                reserves more.

        Returns:
            Itself.

        Raises: ValueError: No rows, lengths that do not fit, or values that are not positive and
            finite.
        """
        given = (local_batch, peak_bytes, static_bytes, sharded_bytes, gradient_bytes, workers)
        columns = as_columns(*given, peak_bytes if allocated_bytes is None else allocated_bytes)
        check_positive(
            local_batch=columns[0],
            peak_bytes=columns[1],
            workers=columns[5],
            allocated_bytes=columns[6],
        )
        # sums of floats depend on the order; the model must not
        order = np.lexsort(columns[::-1])
        self._set_bounds(oom_local_batch, oom_limit_bytes)
        self._fit_columns(
            [column[order] for column in columns], reserves=allocated_bytes is not None
        )
        return self

    def _fit_columns(self, columns: list[Array], *, reserves: bool) -> None:
        batch, peak, static, sharded, gradients, world, allocated = columns
        self._static = float(np.median(static))
        self._sharded_total = float(np.max(sharded * world))
        self._gradients = float(np.max(gradients))
        self._some_distributed = bool(np.any(world > 1))
        self._reserve = fit_reserve(allocated, peak) if reserves else Reserve(1.0, 0.0, 1.0)
        self._fit_line(
            Rows(batch, allocated, static + sharded, gradients, (world > 1).astype(np.float64))
        )
        residuals = self._predicted(batch, world) / peak - 1.0
        self._fit = self._fit._replace(residuals=residuals)
        self.residual_median_ = float(np.median(np.abs(residuals)))
        self._describe(reserves)

    def _set_bounds(self, batches: ArrayLike | None, limits: ArrayLike | None) -> None:
        self.oom_local_batch_ = (
            None if batches is None or not np.size(batches) else int(np.min(batches))
        )
        self._bounds: list[tuple[float, float]] = []
        self._cap = UNBOUNDED_BATCH if self.oom_local_batch_ is None else self.oom_local_batch_ - 1
        if batches is not None and limits is not None:
            self._bounds = list(zip(*as_columns(batches, limits), strict=True))
            self._cap = UNBOUNDED_BATCH

    def _fit_line(self, rows: Rows) -> None:
        """The line, with a kink if the data show one, above the out-of-memory bounds if that can be."""
        fit, free = _best_fit(rows)
        self._use(fit, free, rows)
        world = 2.0 if self._some_distributed else 1.0
        broken = [
            (b, limit)
            for b, limit in self._bounds
            if self._predicted_below_bounds(b, world) < limit
        ]
        self.oom_contradicts_ = False
        if broken:
            censored = self._censored(broken, world)
            raised = _fit_above(rows, censored, fit, free)
            reached = (
                _problem(censored, np.ones(len(broken))).evaluate(raised.coefficients)[0]
                / censored.peak_bytes
            )
            bent = float(np.median(np.abs(raised.residuals))) > CREDIBLE_ERROR
            self.oom_contradicts_ = bent or bool(np.any(reached < 1.0 - CREDIBLE_ERROR))
            if not self.oom_contradicts_:
                self._use(raised, free, rows)

    def _censored(self, broken: list[tuple[float, float]], world: float) -> Rows:
        """Rows that say what was at least allocated where memory ran out."""
        batch, limit = np.array(broken, dtype=np.float64).T
        ones = np.ones_like(batch)
        allocated = np.maximum(limit - self._reserve.slack, 1.0) / self._reserve.ratio
        return Rows(
            batch,
            allocated,
            self._known(world) * ones,
            self._gradients * ones,
            float(world > 1) * ones,
        )

    def _use(self, fit: Fit, free: NDArray[np.bool_], rows: Rows) -> None:
        self._fit, self._line = fit, fit.coefficients.copy()
        self.pinned_ = [name for name, known in zip(NAMES[:2], free[:2], strict=True) if not known]
        # nothing seen of data-parallel training: the gradients' buckets at least
        if not rows.distributed.any():
            self._line[BUCKET] = self._gradients
        if not free[BUCKET] and self._gradients > 0.0:
            self.pinned_.append("bucket_bytes")

    def _known(self, workers: ArrayLike) -> Array:
        return np.asarray(
            self._static + self._sharded_total / np.asarray(workers, dtype=np.float64)
        )

    def _default_workers(self, workers: ArrayLike | None) -> ArrayLike:
        """Without a number: several where any were seen, since that needs more; all states whole, likewise."""
        return workers if workers is not None else (2 if self._some_distributed else 1)

    def predict(self, local_batch: ArrayLike, workers: ArrayLike | None = None) -> Array:
        """Bytes for each local batch and number of workers, in their common shape.

        Without `workers`: any number of them, of the kind that was measured (one, or several).
        """
        return self._predicted(local_batch, self._default_workers(workers))

    def _predicted(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        if self._alone is None:
            return self._predicted_together(local_batch, workers)
        together, alone = (
            self._predicted_together(local_batch, workers),
            self._alone._predicted(local_batch, 1),
        )
        return np.where(np.asarray(workers) == 1, alone, together)

    def _predicted_together(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        line = self._predicted_below_bounds(local_batch, workers)
        for batch, limit in self._bounds:
            line = np.where(
                np.asarray(local_batch) >= batch,
                np.maximum(line, np.nextafter(limit, math.inf)),
                line,
            )
        return np.asarray(line)

    def _predicted_below_bounds(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        return self._reserve.of(self._allocated(local_batch, workers))

    def _allocated(self, local_batch: ArrayLike, workers: ArrayLike) -> Array:
        batch, world = np.broadcast_arrays(
            np.asarray(local_batch, dtype=np.float64), np.asarray(workers)
        )
        overhead, per_sample, bucket, lift = self._line
        known = self._known(world)
        line = known + overhead + bucket * (world > 1) + per_sample * batch
        return np.asarray(np.maximum(line, known + self._gradients + lift))

    def max_batch(self, limit_bytes: float, workers: int | None = None) -> int:
        """Largest local batch that fits into `limit_bytes` and lies below the out-of-memory bound; 0 if none does."""

        def fits(batch: int) -> bool:
            return float(self.predict(batch, workers)) <= limit_bytes

        if fits(self._cap):
            return self._cap
        # low fits or is 0, high does not: memory never falls with the batch
        low, high = 0, self._cap
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def interval(
        self, local_batch: ArrayLike, level: float = 0.9, workers: ArrayLike | None = None
    ) -> tuple[Array, Array]:
        """Lower and upper end, bytes, that hold a new measurement with probability `level`; see `regression`."""
        world = self._default_workers(workers)
        if self._alone is not None:
            together, alone = (
                self._interval(local_batch, level, world),
                self._alone.interval(local_batch, level, 1),
            )
            low, high = (
                np.where(np.asarray(world) == 1, *ends)
                for ends in zip(alone, together, strict=True)
            )
            return low, high
        return self._interval(local_batch, level, world)

    def _interval(
        self, local_batch: ArrayLike, level: float, world: ArrayLike
    ) -> tuple[Array, Array]:
        predicted = self._predicted_together(local_batch, world)
        batch, several = np.broadcast_arrays(
            np.asarray(local_batch, dtype=np.float64), np.asarray(world) > 1
        )
        gradients = (
            _design(batch.ravel(), several.ravel().astype(np.float64))
            / np.maximum(predicted.ravel(), 1.0)[:, None]
        )
        every = np.ones(len(self._fit.residuals), dtype=bool)
        width = relative_spread(self._fit, every, self._reserve.ratio * gradients, level).reshape(
            predicted.shape
        )
        return predicted * np.exp(-width), predicted * np.exp(width)

    def _describe(self, reserves: bool) -> None:
        overhead, per_sample, bucket, lift = self._line.tolist()
        known = float(self._known(1))
        self.parameters_ = {"fixed_bytes": known + overhead, "bytes_per_sample": per_sample}
        if known > 0.0:
            floor = known + self._gradients + lift
            self.parameters_ |= {
                "static_bytes": known,
                "bucket_bytes": bucket,
                "floor_bytes": floor,
            }
        if reserves:
            self.parameters_ |= {
                "reserved_ratio": self._reserve.ratio,
                "reserved_slack_bytes": self._reserve.slack,
            }


class Reserve(NamedTuple):
    """What an allocator takes from the device for so many bytes of tensors."""

    ratio: float
    # bytes
    slack: float
    # bytes; it takes whole multiples
    step: float

    def of(self, allocated: Array) -> Array:
        """Reserved bytes."""
        return np.asarray(np.ceil((self.ratio * allocated + self.slack) / self.step) * self.step)


def fit_reserve(allocated: Array, reserved: Array) -> Reserve:
    """Ratio (at least 1) and slack (at least 0) of reserved over allocated bytes, both (n,), on relative error.

    Two unknowns need three different sizes, since the segments' rounding is noise; with fewer there
    is only the ratio.
    """
    # rounding up adds half a segment
    above = np.maximum(reserved - 0.5 * SEGMENT_BYTES - allocated, 0.0) / reserved
    columns = np.stack([allocated, np.ones_like(allocated)], axis=1) / reserved[:, None]
    if len(np.unique(allocated)) < RESERVE_SIZES:
        return Reserve(1.0 + float(np.median(above / columns[:, 0])), 0.0, SEGMENT_BYTES)
    extra, slack = nnls(columns, above)[0].tolist()
    return Reserve(1.0 + extra, slack, SEGMENT_BYTES)


def _design(batch: Array, distributed: Array) -> Array:
    """(n, 4) in the order of `NAMES`: gradients of the line."""
    ones = np.ones_like(batch)
    return np.stack([ones, batch, distributed, np.zeros_like(batch)], axis=1)


def _problem(rows: Rows, weights: Array) -> Problem:
    design = _design(rows.local_batch, rows.distributed)
    at_floor = np.array([0.0, 0.0, 0.0, 1.0])
    floor = rows.static_bytes + rows.gradient_bytes

    def evaluate(coefficients: Array) -> tuple[Array, Array]:
        line, least = rows.static_bytes + design @ coefficients, floor + coefficients[LIFT]
        gradients = np.where((line >= least)[:, None], design, at_floor)
        return np.maximum(line, least), gradients

    return Problem(evaluate, rows.peak_bytes, weights, np.full(len(NAMES), np.inf))


def _best_fit(rows: Rows) -> tuple[Fit, NDArray[np.bool_]]:
    """The plain line, or the line with a kink where that is clearly better; and which coefficients are free."""
    relative = _design(rows.local_batch, rows.distributed) / rows.peak_bytes[:, None]
    both = bool(rows.distributed.any() and not rows.distributed.all())
    free = identified(relative, (PER_SAMPLE, OVERHEAD, *((BUCKET,) if both else ())))
    problem = _problem(rows, np.ones(len(rows.peak_bytes)))
    plain = fit_relative(problem, [_start(rows, free)], free)
    batches = np.unique(rows.local_batch)
    if len(batches) < HINGE_BATCHES or not rows.gradient_bytes.any():
        return plain, free
    kinked = free | (np.arange(len(NAMES)) == LIFT)
    bent = fit_relative(
        problem, [_kinked_start(rows, free, batch) for batch in batches[1:-1]], kinked
    )
    better = np.max(np.abs(bent.residuals)) < HINGE_GAIN * np.max(np.abs(plain.residuals))
    return (bent, kinked) if better else (plain, free)


def _start(rows: Rows, free: NDArray[np.bool_]) -> Array:
    """The non-negative line of least relative squares."""
    design = _design(rows.local_batch, rows.distributed) / rows.peak_bytes[:, None]
    start = np.zeros(len(NAMES))
    start[free] = nnls(design[:, free], 1.0 - rows.static_bytes / rows.peak_bytes)[0]
    return start


def _kinked_start(rows: Rows, free: NDArray[np.bool_], first: float) -> Array:
    """The line through the batches from `first` on, and the lift that the smaller ones need."""
    small = rows.local_batch < first
    start = _start(Rows._make(column[~small] for column in rows), free)
    start[LIFT] = max(
        0.0, float(np.median((rows.peak_bytes - rows.static_bytes - rows.gradient_bytes)[small]))
    )
    return start


def _fit_above(rows: Rows, censored: Rows, fit: Fit, free: NDArray[np.bool_]) -> Fit:
    """The fit with out-of-memory bounds as rows; residuals and leverage of the measurements alone."""
    joined = Rows._make(np.concatenate(pair) for pair in zip(rows, censored, strict=True))
    count = len(rows.peak_bytes)
    weights = np.concatenate([np.ones(count), np.full(len(censored.peak_bytes), CENSORED_WEIGHT)])
    raised = fit_relative(_problem(joined, weights), [fit.coefficients, _start(joined, free)], free)
    return raised._replace(residuals=raised.residuals[:count], leverage=raised.leverage[:count])


def fit_memory(summary: Summary, limit_bytes: float | None = None) -> MemoryModel:
    """Fit to what a summary's profiles used of a limited memory, and to what ran out of it.

    On CUDA `reserved_bytes` is what the allocator took and `peak_bytes` what tensors held of it; on
    CPU it is the process with interpreter and libraries, whose smallest baseline counts as known.

    A single worker that takes its batch in parts holds the activations of one part. For several
    workers, which do not, its profiles are those of a part; for itself it has a model of its own.

    Args:
        summary: At least one profile.
        limit_bytes: Memory that there was for one worker; None where unknown.
    """
    out, parts = summary.out_of_memory, summary.parts
    model = _fit_profiles(summary.profiles, as_large(out, parts, alone=False), limit_bytes)
    alone = [row._replace(parts=1) for row in summary.profiles if row.parts > 1]
    if alone:
        model._alone = _fit_profiles(alone, as_large(out, parts, alone=True), limit_bytes)
    return model


def _fit_profiles(
    profiles: Sequence[Profile], out: Iterable[float], limit_bytes: float | None
) -> MemoryModel:
    bounds = list(out) or None
    uses = [row.memory for row in profiles]
    baseline = min(use.baseline_bytes for use in uses)
    counted = [baseline + use.parameter_bytes + use.optimizer_bytes for use in uses]
    floors = [known + use.gradient_bytes for known, use in zip(counted, uses, strict=True)]
    held = [use.baseline_bytes + use.peak_bytes for use in uses]
    reserved = [use.reserved_bytes for use in uses]
    batches = [row.part_batch for row in profiles]
    reserves = any(map(gt, reserved, held)) and all(map(ge, held, floors))
    # less than counting tells cannot be: the counts are of something else
    if not all(map(ge, reserved, floors)):
        return MemoryModel().fit(batches, reserved, bounds, oom_limit_bytes=limit_bytes)
    return MemoryModel().fit(
        batches,
        reserved,
        bounds,
        oom_limit_bytes=limit_bytes,
        static_bytes=[known - use.sharded_bytes for known, use in zip(counted, uses, strict=True)],
        sharded_bytes=[use.sharded_bytes for use in uses],
        gradient_bytes=[use.gradient_bytes for use in uses],
        workers=[row.configuration.world_size for row in profiles],
        allocated_bytes=held if reserves else None,
    )


def estimate_error(footprint: Footprint, profiles: Sequence[Profile]) -> float | None:
    """Median of |estimated / measured − 1| of a limit's bytes, over the profiles; None without any.

    The estimate is for the fewest workers of a search; with more of them buckets come and shares of
    states go.
    """
    errors = [
        abs(footprint.peak_bytes(math.ceil(row.part_batch)) / row.memory.reserved_bytes - 1.0)
        for row in profiles
    ]
    return float(np.median(errors)) if errors else None


def checkpoint_copy_bytes(uses: Sequence[MemoryUse], workers: Sequence[int]) -> int:
    """Host memory of the copy that a checkpoint is written from while training goes on; on the first node only.

        parameters + optimizer states of its own + 2 × states that are divided over the workers
        (ZeRO)

    since the latter are gathered there first, and copied then. On CPUs it comes on top of a step's
    peak; on GPUs the step's peak is the device's, and this the host's.

    Args:
        uses: What was measured.
        workers: Of each.
    """
    whole = (
        use.parameter_bytes
        + use.optimizer_bytes
        - use.sharded_bytes
        + 2 * use.sharded_bytes * world
        for use, world in zip(uses, workers, strict=True)
    )
    return max(whole, default=0)
