"""The adaptive search: profile where it changes the decision or the model is least sure, stop when the decision stands.

It starts at cheap corners: the smallest and the largest local batch on the fewest nodes, and the
smallest on the most. On the fewest nodes a profile also times the computation of the batches in
between. From then on the model's own uncertainty decides (D. MacKay, "Information-based objective
functions for active data selection", 1992): of every candidate that was not measured, by how much
would its measurement narrow the predictions that matter, for each node-second it costs? With Σ the
covariance of all predictions, in units of a measurement's variance,

    gain(j) = Σ_i w_i Σ_ij² / (1 + Σ_jj) / sqrt(cost_j)        cost_j = N_j × (steps × t_j + start, on other nodes)

w_i is how often candidate i belongs to the decision in predictions drawn from that uncertainty,
plus a little for all. The decision is the plan's own (`aim`): what memory, the largest batch,
deadline and budget rule out in every draw weighs nothing and is not measured. The search ends when
those draws agree on the decision and the chosen step time is known well enough, or when
`max_profiles` configurations were measured.

Everything is a pure function of the measurements: replayed over recorded ones, it proposes the same
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.analysis.models.step_time_fit import FormName
from tula_hpc.analysis.search.decision import Aim, Judged
from tula_hpc.records import Configuration, Measurement, is_usable

# start of Python and torch and the rendezvous, when the nodes are not the last job's
START_S = 20.0
# of about one step's length that one profile takes, where none tells
STEPS = 80.0
DRAWS = 200
SEED = 0
# measurements, where there are so many candidates
AT_LEAST = 3
# mean loss of the decision over the draws below which it stands: of time or cost, in spreads of a
REGRET = 0.36
# measurement, and relative: what no measurement could tell apart is not worth one
LEAST_REGRET = 0.01
# likewise of the knee's batch
OCTAVES = 0.5
# largest relative standard deviation of the decision's own step time
KNOWN = 0.07
# weight of a candidate that no draw decides for
BASELINE = 0.1
# candidates within this share of a draw's best belong to the decision
NEAR = 0.03
# candidates that are looked at; of more, an even choice
MOST_POINTS = 400


class AdaptiveSearch:
    """Proposes what to profile next.

    Args:
        candidates: Configurations that may be profiled, all that are believed to fit.
        aim: What the decision will be made by.
        max_profiles: So many measured configurations end the search.
        form: Of the step-time model.
    """

    def __init__(
        self,
        candidates: Sequence[Configuration],
        aim: Aim = Aim(),  # noqa: B008 - immutable
        max_profiles: int = 8,
        form: FormName = "auto",
    ) -> None:
        self.every, self.candidates = sorted(candidates), sorted(aim.conceivable(candidates))
        self.aim, self.max_profiles, self.form = aim, max_profiles, form

    def propose(
        self, measurements: Sequence[Measurement], given_up: frozenset[Configuration] = frozenset()
    ) -> list[Configuration]:
        """What to profile next, first things first; nothing when the search is done.

        Args:
            measurements: All so far, in any order.
            given_up: Configurations that failed and are not to be tried again.
        """
        usable = [row for row in measurements if is_usable(row)]
        measured = {row.configuration for row in usable}
        open_ = [c for c in self.candidates if c not in measured and c not in given_up]
        corners = [c for c in cheap_corners(self.candidates) if c in open_]
        if corners or not open_ or len(measured) >= self.max_profiles:
            return corners if len(measured) < self.max_profiles else []
        if len(measured) < AT_LEAST:
            return open_[:1]
        return self._by_uncertainty(summarize(measurements), usable, open_)

    def _by_uncertainty(
        self, summary: Summary, usable: Sequence[Measurement], open_: Sequence[Configuration]
    ) -> list[Configuration]:
        points = _thinned(self.every, keep={row.configuration for row in usable})
        view = _View(points, summary, fit_step_time(summary.profiles, self.form), self.aim)
        if view.decided:
            return []
        gains = view.gains(_latest_nodes(usable), _steps_per_profile(usable))
        may_run = set(open_) & {points[i] for i in np.flatnonzero(view.eligible)}
        best = max(range(len(points)), key=lambda i: (points[i] in may_run, gains[i], points[i]))
        return [points[best]] if points[best] in may_run else []


def cheap_corners(candidates: Sequence[Configuration]) -> list[Configuration]:
    """Smallest and largest local batch on the fewest nodes, the smallest on the most; each once, ascending."""
    if not candidates:
        return []
    sizes = sorted({c.nodes for c in candidates})
    few = sorted(c for c in candidates if c.nodes == sizes[0])
    many = sorted(c for c in candidates if c.nodes == sizes[-1])
    return sorted({few[0], few[-1], many[0]})


class _View:
    """What the model says of all candidates together, and how sure it is."""

    def __init__(
        self, points: Sequence[Configuration], summary: Summary, model: StepTimeModel, aim: Aim
    ) -> None:
        self.nodes, self.per_node, self.batch = np.array(points, dtype=np.float64).T
        self.step_s = model.predict(self.nodes, self.batch, self.per_node)
        self.covariance = model.covariance(self.nodes, self.batch, self.per_node)
        self.spread = model.spread_
        draws = _draws(self.covariance) * self.spread
        every_s = np.concatenate(
            [self.step_s[None], self.step_s * np.exp(np.clip(draws, -3.0, 3.0))]
        )
        judged = aim.judge(points, every_s, model, summary)
        self.eligible, self.hopeless = judged.eligible.any(axis=0), judged.hopeless
        self.decision = _Decision(self, judged, aim.kind)

    @property
    def decided(self) -> bool:
        """Whether the draws agree on the decision, and its own time is known; or that there is nothing to decide."""
        known = self.spread * np.sqrt(self.covariance[self.decision.chosen, self.decision.chosen])
        return self.hopeless or bool(
            self.decision.regret <= self.decision.enough and known <= KNOWN
        )

    def gains(self, latest_nodes: float | None, steps: float) -> Array:
        """(m,), see the module's equation."""
        weights = np.where(self.eligible, BASELINE + self.decision.belongs, 0.0)
        reduction = weights @ (self.covariance**2 / (1.0 + np.diag(self.covariance)))
        start = np.where(self.nodes == latest_nodes, 0.0, START_S) if latest_nodes else START_S
        return np.asarray(reduction / np.sqrt(self.nodes * (steps * self.step_s + start)))


class _Decision:
    """One objective over the candidates, as predicted and in each draw."""

    def __init__(self, view: _View, judged: Judged, kind: str) -> None:
        if kind == "knee":
            self._knee(judged, view.nodes * view.per_node * view.batch)
        else:
            self.enough = max(LEAST_REGRET, REGRET * view.spread)
            self._least(judged)

    def _least(self, judged: Judged) -> None:
        values = judged.allowed_value
        self.chosen = int(np.argmin(values[0]))
        self.regret = float(np.mean(judged.loss(self.chosen)))
        self.belongs = np.mean(
            values[1:] <= values[1:].min(axis=1, keepdims=True) * (1.0 + NEAR), axis=0
        )

    def _knee(self, judged: Judged, global_batch: Array) -> None:
        """The knee is the whole curve's; chosen is the nearest batch that is allowed, as in the plan."""
        batches, column = np.unique(global_batch, return_inverse=True)
        columns = [column == place for place in range(len(batches))]
        # where nothing can run: of them all
        possible = judged.possible | ~judged.possible.any(axis=1, keepdims=True)
        knees = knee_columns(batches, _fastest(judged.value, possible, columns))
        time_s, fastest = judged.allowed_value, _fastest(judged.value, judged.eligible, columns)
        away = np.abs(np.log2(batches / batches[knees][:, None]))
        nearest = np.argmin(np.where(np.isfinite(fastest), away, np.inf), axis=1)
        octaves = np.abs(np.log2(batches[nearest[1:]] / batches[nearest[0]]))
        at_nearest = np.flatnonzero(columns[nearest[0]])
        self.chosen = int(at_nearest[np.argmin(time_s[0, at_nearest])])
        self.regret, self.enough = float(np.mean(octaves)), OCTAVES
        share = np.bincount(nearest[1:], minlength=len(batches)) / len(octaves)
        front = judged.eligible[1:] & (time_s[1:] <= fastest[1:, column] * (1.0 + NEAR))
        self.belongs = np.mean(front, axis=0) * (share[column] + 1.0) / 2.0


def _fastest(time_s: Array, of: NDArray[np.bool_], columns: Sequence[NDArray[np.bool_]]) -> Array:
    """(k, batches): the least time of the candidates in each column; infinite where there is none."""
    among = np.where(of, time_s, np.inf)
    return np.stack([among[:, inside].min(axis=1) for inside in columns], axis=1)


def knee_columns(batches: Array, times: Array) -> NDArray[np.intp]:
    """For each row of times (n, m) over ascending batches (m,): the column farthest below the chord of its envelope.

    Infinite times are of batches that cannot be chosen: the chord joins the first and the last of
    the others.
    """
    finite, rows = np.isfinite(times), np.arange(len(times))
    first, last = np.argmax(finite, axis=1), len(batches) - 1 - np.argmax(finite[:, ::-1], axis=1)
    envelope = np.minimum.accumulate(np.where(finite, times, np.inf), axis=1)
    high, low = envelope[rows, first][:, None], envelope[rows, last][:, None]
    start, end = batches[first][:, None], batches[last][:, None]
    height = (np.minimum(envelope, high) - low) / np.maximum(high - low, 1e-300)
    along = (batches - start) / np.maximum(end - start, 1e-300)
    return np.asarray(np.argmax(np.where(finite, 1.0 - along - height, -np.inf), axis=1))


def _draws(covariance: Array) -> Array:
    """(DRAWS, m) of a normal distribution with this covariance; always the same."""
    values, vectors = np.linalg.eigh(covariance)
    normal = np.random.default_rng(SEED).standard_normal((DRAWS, len(values)))
    return np.asarray(normal @ (vectors * np.sqrt(np.maximum(values, 0.0))).T)


def _latest_nodes(usable: Sequence[Measurement]) -> float | None:
    """Nodes of the measurement that ended last: a job on as many may still be running."""
    latest = max(usable, key=lambda row: row.finished_at)
    return float(latest.nodes) if latest.finished_at > 0.0 else None


def _steps_per_profile(usable: Sequence[Measurement]) -> float:
    """How many of its steps a profile lasts, by those that were taken."""
    lasted = [
        row.elapsed_s / row.times.step_time_s for row in usable if row.times and row.elapsed_s > 0.0
    ]
    return float(np.median(lasted)) if lasted else STEPS


def _thinned(candidates: Sequence[Configuration], keep: set[Configuration]) -> list[Configuration]:
    if len(candidates) <= MOST_POINTS:
        return sorted({*candidates, *keep})
    even = np.linspace(0, len(candidates) - 1, MOST_POINTS).round().astype(int)
    return sorted({*(candidates[i] for i in even), *keep})
