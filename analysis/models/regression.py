"""Robust fits on relative error with bounded coefficients, and intervals around them.

The residual of a row is `weight × log(predicted / observed)`: relative errors count the same for
10 ms and for 10 s. The loss is soft L1, so that a single disturbed measurement does not drag the
model along. A prior belief in a coefficient counts like a row with the residual `belief ×
(coefficient − believed)`, squared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares
from scipy.special import stdtrit

Array = NDArray[np.float64]
Evaluate = Callable[[Array], tuple[Array, Array]]

# residuals above this count linearly, not squared
ROBUST_FROM = 0.05
# Rows farther than this from the model, in logarithms, are outliers. If their share is above
# MOST_OUTLIERS, the model has to follow them, and all rows count squared.
OUTLIER = 0.4
MOST_OUTLIERS = 0.2
# relative tolerance of cost, coefficients and gradient at which a descent ends
TOLERANCE = 1e-8
# in standard deviations: larger residuals count as this large in the spread
OUTLIER_FROM = 2.0
# median of |x| for a standard normal x
MEDIAN_OF_NORMAL = 0.6745
# limits a coefficient's uncertainty to 1 / this times the spread, in units of the size that alone
# explains a row
PLAUSIBLE = 0.05
# predictions below this share of the observed value count as this share
TINY = 1e-6
# a column is identified if the other columns leave more than this share of it unexplained
IDENTIFIED_FROM = 1e-3


class Scatter(NamedTuple):
    """Prior belief in the relative error of a single row."""

    # standard deviation
    error: float
    # number of measurements that weigh as much as the belief
    rows: float


# a standard deviation of 10 % is a median error of 7 %, as such models have with few measurements
# (the paper's partial search: 7.5–14 %); many measurements leave nothing of this belief
PRIOR = Scatter(error=0.1, rows=2.0)


class Fit(NamedTuple):
    """Fitted coefficients with residuals, leverage and covariance."""

    # (p,), pinned ones included
    coefficients: Array
    # (n,), predicted / observed − 1, without weights
    residuals: Array
    # (n,), influence of each row on its own prediction, 0 to 1
    leverage: Array
    # (p, p), per unit of relative variance; zero for pinned coefficients
    covariance: Array
    # half of the minimized sum of losses
    cost: float = 0.0


class Problem(NamedTuple):
    """Model with its data: n rows, and p coefficients with bounds and prior means.

    `evaluate` gives predictions (n,) and their gradients (n, p).
    """

    evaluate: Evaluate
    # all positive
    observed: Array
    weights: Array
    upper: Array
    lower: Array
    believed: Array
    # strength of the prior: typical residual / standard deviation; 0: none
    belief: Array
    # size of each coefficient that alone would explain a typical row; None: from the gradients
    scale: Array | None = None
    robust_from: float = ROBUST_FROM


def as_columns(*values: ArrayLike) -> list[Array]:
    """Broadcast scalars and arrays to 1-D float arrays of one length, or raise ValueError."""
    return [np.array(column, dtype=np.float64).ravel() for column in np.broadcast_arrays(*values)]


def check_positive(**columns: Array) -> None:
    """Raise ValueError for a column that is empty or holds other than positive finite numbers."""
    for name, column in columns.items():
        if column.size == 0:
            raise ValueError(f"{name}: expected at least one value")
        if not np.all(np.isfinite(column) & (column > 0.0)):
            raise ValueError(f"{name}: expected positive finite numbers")


def identified(gradients: Array, order: Iterable[int]) -> NDArray[np.bool_]:
    """Mark columns of an (n, p) matrix that those marked before, in `order`, do not explain."""
    free = np.zeros(gradients.shape[1], dtype=bool)
    for column in order:
        free[column] = _unexplained(gradients[:, column], gradients[:, free]) > IDENTIFIED_FROM
    return free


def _unexplained(column: Array, others: Array) -> float:
    """Return the share of a column's length that is orthogonal to the others."""
    length = float(np.linalg.norm(column))
    if length == 0.0 or others.shape[1] == 0:
        return float(length > 0.0)
    others = others / np.linalg.norm(others, axis=0)
    solution = np.linalg.lstsq(others, column, rcond=None)[0]
    return float(np.linalg.norm(column - others @ solution)) / length


def fit_relative(problem: Problem, starts: Iterable[Array], free: NDArray[np.bool_]) -> Fit:
    """Minimize the robust relative error over the free coefficients; the best start wins."""
    problem = problem._replace(evaluate=_cached(problem.evaluate))
    ends = [_descend(problem, start, free) for start in starts]
    coefficients, jacobian, cost = min(ends, key=lambda end: end[2])
    predicted, _ = problem.evaluate(coefficients)
    off = np.abs(np.log(np.maximum(predicted / problem.observed, TINY))) > OUTLIER
    if np.mean(off) > MOST_OUTLIERS:
        problem = problem._replace(robust_from=1.0)
        coefficients, jacobian, cost = _descend(problem, coefficients, free)
        predicted, _ = problem.evaluate(coefficients)
    # limits the uncertainty of coefficients that no row determines
    plausible = np.diag(PLAUSIBLE / _scales(problem, coefficients)[free])
    jacobian = np.concatenate([jacobian, plausible])
    # J⁺; leverage is the diagonal of J J⁺, covariance J⁺ J⁺ᵀ
    inverse = np.linalg.pinv(jacobian)
    covariance = np.zeros((len(free), len(free)))
    covariance[np.ix_(free, free)] = inverse @ inverse.T
    leverage = np.einsum("ij,ji->i", jacobian, inverse)[: len(problem.observed)]
    return Fit(coefficients, predicted / problem.observed - 1.0, leverage, covariance, cost)


def _descend(problem: Problem, start: Array, free: NDArray[np.bool_]) -> tuple[Array, Array, float]:
    """Return coefficients (p,), robust Jacobian (n + beliefs, free p), cost of a local minimum."""
    scale = _scales(problem, start)[free]
    believed = (problem.belief > 0.0) & free
    firmness = problem.belief[believed]
    of_beliefs = np.diag(problem.belief)[np.ix_(believed, free)]

    def expand(shares: Array) -> Array:
        coefficients = start.copy()
        coefficients[free] = shares * scale
        return coefficients

    def residuals(shares: Array) -> Array:
        coefficients = expand(shares)
        predicted = np.maximum(problem.evaluate(coefficients)[0], TINY * problem.observed)
        of_rows = problem.weights * np.log(predicted / problem.observed)
        return np.concatenate([of_rows, firmness * (coefficients - problem.believed)[believed]])

    def jacobian(shares: Array) -> Array:
        predicted, gradients = problem.evaluate(expand(shares))
        rows = problem.weights / np.maximum(predicted, TINY * problem.observed)
        of_rows = gradients[:, free] * rows[:, None] * scale
        return np.concatenate([of_rows, of_beliefs * scale])

    if not free.any():
        cost = 0.5 * float(np.sum(residuals(start[free]) ** 2))
        return start, np.zeros((len(problem.observed), 0)), cost
    lower = problem.lower[free] / scale
    upper = problem.upper[free] / scale
    # the method needs a start inside the bounds
    margin = 1e-6 * np.where(np.isfinite(upper), upper - lower, 1.0)
    first = np.clip(start[free] / scale, lower + margin, upper - margin)
    end = least_squares(
        residuals,
        first,
        jacobian,
        bounds=(lower, upper),
        loss=partial(_soft_l1, len(problem.observed)),
        f_scale=problem.robust_from,
        ftol=TOLERANCE,
        xtol=TOLERANCE,
        gtol=TOLERANCE,
        max_nfev=200,
    )
    # the method stops just inside a bound of 0
    shares = np.where((end.x < 1e-9) & (lower == 0.0), 0.0, end.x)
    return expand(shares), np.asarray(end.jac) / scale, float(end.cost)


def _cached(evaluate: Evaluate) -> Evaluate:
    """Keep the last result of a model: residuals and gradients are needed at the same point."""

    @lru_cache(maxsize=1)
    def of_point(point: bytes) -> tuple[Array, Array]:
        return evaluate(np.frombuffer(point))

    return lambda coefficients: of_point(coefficients.tobytes())


def _soft_l1(robust: int, squares: Array) -> Array:
    """Return loss and two derivatives: soft L1 for the first `robust` rows, then plain squares."""
    root = np.sqrt(1.0 + squares)
    loss = np.stack([2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3])
    loss[0, robust:] = squares[robust:]
    loss[1, robust:] = 1.0
    loss[2, robust:] = 0.0
    return loss


def _scales(problem: Problem, start: Array) -> Array:
    """Return the size of each coefficient that alone would explain a typical row."""
    if problem.scale is not None:
        return problem.scale
    return explaining_a_row(problem.evaluate(start)[1] / problem.observed[:, None])


def explaining_a_row(relative: Array) -> Array:
    """Return the size (p,) of each coefficient that alone explains a row; 1 if no row shows it.

    `relative` are the gradients (n, p) of the predictions over the observed values.
    """
    largest = np.max(np.abs(relative), axis=0, initial=0.0)
    return np.where(largest > 0.0, 1.0 / np.where(largest > 0.0, largest, 1.0), 1.0)


def relative_spread(
    fit: Fit,
    rows: NDArray[np.bool_],
    relative_gradients: Array,
    level: float,
    *,
    unseen: Array | float = 0.0,
    prior: Scatter = PRIOR,
) -> Array:
    """Return the half-width, in logarithms, of the interval of a new measurement.

    It is `t × σ × sqrt(1 + g C gᵀ + unseen)`, with

        t       Student's t on the degrees of freedom that the rows leave
        σ       from the rows' residuals and the prior belief (inverse gamma)
        g       gradient of the prediction's logarithm, `relative_gradients` (m, p)
        C       covariance of the fit
        unseen  variance that no row could show (m,), in units of σ²

    Only the residuals of `rows` count, a mask (n,) of the rows of the predicted kind.

    Raises:
        ValueError: `level` is not between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: expected a probability between 0 and 1, got {level}")
    degrees, variance = _spread_of(fit, rows, prior)
    of_coefficients = np.einsum(
        "ij,jk,ik->i", relative_gradients, fit.covariance, relative_gradients, optimize=True
    )
    quantile = stdtrit(degrees, 0.5 + level / 2.0)
    return np.asarray(quantile * np.sqrt(variance * (1.0 + of_coefficients + unseen)))


def ends_around(value: Array, below: Array, above: Array) -> tuple[Array, Array]:
    """Return both ends of an interval, given how far they are off in logarithms.

    Far from all measurements the upper end is infinite.
    """
    with np.errstate(over="ignore"):
        return value * np.exp(-below), value * np.exp(above)


def _spread_of(fit: Fit, rows: NDArray[np.bool_], prior: Scatter) -> tuple[float, float]:
    """Return the degrees of freedom, and the relative variance of a single row."""
    degrees = prior.rows + max(0.0, float(np.sum(1.0 - fit.leverage[rows])))
    residuals = np.abs(fit.residuals[rows])
    largest = OUTLIER_FROM * max(float(np.median(residuals)), TOLERANCE) / MEDIAN_OF_NORMAL
    squares = prior.rows * prior.error**2 + float(np.sum(np.minimum(residuals, largest) ** 2))
    return degrees, squares / degrees


def spread(fit: Fit, rows: NDArray[np.bool_], prior: Scatter) -> float:
    """Return the relative standard deviation of a single row."""
    return float(np.sqrt(_spread_of(fit, rows, prior)[1]))


def draws(
    fit: Fit,
    rows: NDArray[np.bool_],
    bounds: tuple[Array, Array],
    prior: Scatter,
    *,
    count: int,
    seed: int,
) -> Array:
    """Draw coefficients (count, p) by Student's t around the fit, clipped to the bounds."""
    random = np.random.default_rng(seed)
    degrees, variance = _spread_of(fit, rows, prior)
    values, vectors = np.linalg.eigh(fit.covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    normal = random.standard_normal((count, len(fit.coefficients))) @ root.T
    scale = np.sqrt(variance * degrees / random.chisquare(degrees, (count, 1)))
    return np.asarray(np.clip(fit.coefficients + scale * normal, *bounds))
