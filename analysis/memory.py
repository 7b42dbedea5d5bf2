"""How much memory one worker uses with local batch b: linear in b.

`M(b) = fixed_bytes + bytes_per_sample × b`: parameters, gradients and optimizer states do not depend on the batch,
activations and input batches are linear in it (S. Tyagi, F. Wang, "Tula", equation of DNN memory). The same line
describes the data loader's batch memory. It does not depend on the number of nodes.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from tula_hpc.analysis.regression import (
    Array,
    Problem,
    as_columns,
    check_positive,
    fit_relative,
    identified,
    relative_spread,
)

NAMES = ("fixed_bytes", "bytes_per_sample")
FIXED, PER_SAMPLE = range(2)
UNBOUNDED_BATCH = 2**31 - 1  # what `max_batch` says where memory does not grow with the batch


class MemoryModel:
    """Peak bytes over the local batch; coefficients at least 0, fit on relative error, robust to outliers.

    Attributes:
        parameters_: `fixed_bytes` (bytes) and `bytes_per_sample` (bytes per sample of the local batch).
        pinned_: Coefficients that the data cannot identify. With one local batch only, fixed_bytes is 0: the prediction
            for larger batches is then too high rather than too low.
        oom_local_batch_: Smallest local batch known to run out of memory, or None.
        residual_median_: Median of |predicted / measured − 1|.
    """

    parameters_: dict[str, float]
    pinned_: list[str]
    oom_local_batch_: int | None
    residual_median_: float

    def fit(self, local_batch: ArrayLike, peak_bytes: ArrayLike, oom_local_batch: int | None = None) -> Self:
        """Fit to measured peaks.

        Args:
            local_batch: (n,) or scalar, samples per worker.
            peak_bytes: (n,) bytes.
            oom_local_batch: Smallest local batch that ran out of memory; bounds `max_batch`.

        Returns:
            Itself.

        Raises:
            ValueError: No rows, lengths that do not fit, or values that are not positive and finite.
        """
        batch, peak = as_columns(local_batch, peak_bytes)
        check_positive(local_batch=batch, peak_bytes=peak)
        order = np.lexsort((peak, batch))  # sums of floats depend on the order; the model must not
        batch, peak = batch[order], peak[order]
        design = _design(batch)
        free = identified(design / peak[:, None], (PER_SAMPLE, FIXED))
        start = np.zeros(2)
        start[free] = nnls(design[:, free] / peak[:, None], np.ones(len(peak)))[0]
        problem = Problem(lambda line: (design @ line, design), peak, np.ones(len(peak)), np.full(2, np.inf))
        self._fit = fit_relative(problem, [start], free)
        self.parameters_ = dict(zip(NAMES, self._fit.coefficients.tolist(), strict=True))
        self.pinned_ = [name for name, known in zip(NAMES, free, strict=True) if not known]
        self.oom_local_batch_ = oom_local_batch
        self.residual_median_ = float(np.median(np.abs(self._fit.residuals)))
        return self

    def predict(self, local_batch: ArrayLike) -> Array:
        """Bytes, in the shape of `local_batch`."""
        batch = np.asarray(local_batch, dtype=np.float64)
        return np.asarray(self.parameters_["fixed_bytes"] + self.parameters_["bytes_per_sample"] * batch)

    def max_batch(self, limit_bytes: float) -> int:
        """Largest local batch that fits into `limit_bytes` and lies below the out-of-memory bound; 0 if none does."""
        fixed, slope = self.parameters_["fixed_bytes"], self.parameters_["bytes_per_sample"]
        bound = UNBOUNDED_BATCH if self.oom_local_batch_ is None else self.oom_local_batch_ - 1
        if slope == 0.0:
            return bound if fixed <= limit_bytes else 0
        quotient = max(0.0, (limit_bytes - fixed) / slope)
        near = math.floor(min(quotient, float(bound)))  # the division may round to either side
        fitting = [batch for batch in (near - 1, near, near + 1) if fixed + slope * batch <= limit_bytes]
        return max(0, min(bound, max(fitting, default=0)))

    def interval(self, local_batch: ArrayLike, level: float = 0.9) -> tuple[Array, Array]:
        """Lower and upper end, bytes, that hold a new measurement with probability `level`; see `regression`."""
        predicted = self.predict(local_batch)
        gradients = _design(np.ravel(local_batch)) / np.maximum(predicted.ravel(), 1.0)[:, None]
        rows = np.ones(len(self._fit.residuals), dtype=bool)
        width = relative_spread(self._fit, rows, gradients, level).reshape(predicted.shape)
        return predicted * np.exp(-width), predicted * np.exp(width)


def _design(batch: ArrayLike) -> Array:
    column = np.asarray(batch, dtype=np.float64)
    return np.stack([np.ones_like(column), column], axis=1)
