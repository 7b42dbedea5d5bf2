"""Robust fits on relative error with non-negative coefficients, and intervals around them; for time and memory.

The residual of a row is `weight × (predicted / observed − 1)`: errors of 10 ms and of 10 s count by their share. The
loss is soft L1, so that a single disturbed measurement does not drag the model along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.stats import t as student_t

Array = NDArray[np.float64]

ROBUST_FROM = 0.05  # relative residuals above this count linearly, not squared
# What is believed of the relative error before any residual is seen, weighing as much as two measurements: a standard
# deviation of 10 %, that is a median error of 7 %, where such models with few measurements end up (the paper's partial
# search: 7.5–14 %). With no degrees of freedom left the interval is this belief; with many it is forgotten.
PRIOR_ERROR = 0.1
PRIOR_ROWS = 2.0
IDENTIFIED_FROM = 1e-3  # share of a column that the other columns must leave unexplained


class Fit(NamedTuple):
    """Fitted coefficients and what their uncertainty needs."""

    coefficients: Array  # (p,), pinned ones included
    residuals: Array  # (n,), predicted / observed − 1, without weights
    leverage: Array  # (n,), how much each row draws its own prediction, 0 to 1
    covariance: Array  # (p, p), per unit of relative variance; zero for pinned coefficients


class Problem(NamedTuple):
    """A model to be fitted; `evaluate(p)` gives predictions (n,) and their gradients (n, p)."""

    evaluate: Callable[[Array], tuple[Array, Array]]
    observed: Array  # (n,), positive
    weights: Array  # (n,)
    upper: Array  # (p,), largest value of each coefficient; the smallest is 0


def as_columns(*values: ArrayLike) -> list[Array]:
    """Broadcast scalars and arrays to 1-D float arrays of one length.

    Raises:
        ValueError: The lengths do not fit together.
    """
    return [np.array(column, dtype=np.float64).ravel() for column in np.broadcast_arrays(*values)]


def check_positive(**columns: Array) -> None:
    """Refuse columns, named by keyword, that are empty or hold anything but positive finite numbers.

    Raises:
        ValueError: Says which column.
    """
    for name, column in columns.items():
        if column.size == 0:
            raise ValueError(f"{name}: expected at least one value")
        if not np.all(np.isfinite(column) & (column > 0.0)):
            raise ValueError(f"{name}: expected positive finite numbers")


def identified(gradients: Array, order: Iterable[int]) -> NDArray[np.bool_]:
    """Which coefficients (columns of an (n, p) matrix) the rows can tell apart, earlier ones in `order` first."""
    free = np.zeros(gradients.shape[1], dtype=bool)
    for column in order:
        free[column] = _unexplained(gradients[:, column], gradients[:, free]) > IDENTIFIED_FROM
    return free


def _unexplained(column: Array, others: Array) -> float:
    """Share of a column's length that is orthogonal to the others."""
    length = float(np.linalg.norm(column))
    if length == 0.0 or others.shape[1] == 0:
        return float(length > 0.0)
    others = others / np.linalg.norm(others, axis=0)
    solution = np.linalg.lstsq(others, column, rcond=None)[0]
    return float(np.linalg.norm(column - others @ solution)) / length


def fit_relative(problem: Problem, starts: Iterable[Array], free: NDArray[np.bool_]) -> Fit:
    """Minimize the robust relative error from each start, moving the free coefficients only; the best end wins."""
    ends = [_descend(problem, start, free) for start in starts]
    coefficients, jacobian, _ = min(ends, key=lambda end: end[2])
    predicted, _ = problem.evaluate(coefficients)
    inverse = np.linalg.pinv(jacobian)  # J⁺; leverage is the diagonal of J J⁺, covariance J⁺ J⁺ᵀ
    covariance = np.zeros((len(free), len(free)))
    covariance[np.ix_(free, free)] = inverse @ inverse.T
    leverage = np.einsum("ij,ji->i", jacobian, inverse)
    return Fit(coefficients, predicted / problem.observed - 1.0, leverage, covariance)


def _descend(problem: Problem, start: Array, free: NDArray[np.bool_]) -> tuple[Array, Array, float]:
    """One local minimum: coefficients (p,), robust Jacobian (n, free p), cost."""
    scale = _scales(problem, start)[free]
    rows = problem.weights / problem.observed

    def expand(shares: Array) -> Array:
        coefficients = start.copy()
        coefficients[free] = shares * scale
        return coefficients

    def residuals(shares: Array) -> Array:
        return problem.weights * (problem.evaluate(expand(shares))[0] / problem.observed - 1.0)

    def jacobian(shares: Array) -> Array:
        return problem.evaluate(expand(shares))[1][:, free] * rows[:, None] * scale

    if not free.any():
        return start, np.zeros((len(rows), 0)), float(np.sum(residuals(start[free]) ** 2))
    upper = problem.upper[free] / scale
    first = np.clip(start[free] / scale, 1e-6, upper * (1 - 1e-6))  # the method needs a start inside the bounds
    end = least_squares(
        residuals,
        first,
        jacobian,
        bounds=(0.0, upper),
        loss="soft_l1",
        f_scale=ROBUST_FROM,
        ftol=1e-10,
        xtol=1e-10,
        gtol=1e-10,
        max_nfev=200,
    )
    shares = np.where(end.x < 1e-9, 0.0, end.x)  # the method stops just inside the bounds
    return expand(shares), np.asarray(end.jac) / scale, float(end.cost)


def _scales(problem: Problem, start: Array) -> Array:
    """Size of each coefficient that alone would explain a typical row, so that all are of order one in the search."""
    gradients = problem.evaluate(start)[1]
    largest = np.max(np.abs(gradients) / problem.observed[:, None], axis=0)
    return np.where(largest > 0.0, 1.0 / np.where(largest > 0.0, largest, 1.0), 1.0)


def relative_spread(fit: Fit, rows: NDArray[np.bool_], relative_gradients: Array, level: float) -> Array:
    """Half-width, in logarithms, of the interval that holds a new measurement with probability `level`.

    `t × σ × sqrt(1 + g C gᵀ)`: Student's t on the degrees of freedom that the rows leave, σ from their residuals and
    the prior belief (inverse gamma), g the gradient of the prediction's logarithm (m, p), C the covariance of the fit.

    Args:
        fit: The fit.
        rows: Which rows (n,) are of the predicted kind; only their residuals count.
        relative_gradients: (m, p), the gradients at the new points over the predictions there.
        level: Probability between 0 and 1.

    Raises:
        ValueError: `level` is not between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
    degrees = PRIOR_ROWS + max(0.0, float(np.sum(1.0 - fit.leverage[rows])))
    variance = (PRIOR_ROWS * PRIOR_ERROR**2 + float(np.sum(fit.residuals[rows] ** 2))) / degrees
    of_coefficients = np.einsum("ij,jk,ik->i", relative_gradients, fit.covariance, relative_gradients)
    width = student_t.ppf(0.5 + level / 2.0, degrees) * np.sqrt(variance * (1.0 + of_coefficients))
    return np.asarray(width, dtype=np.float64)
