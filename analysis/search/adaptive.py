"""The adaptive search: profile where a measurement is most likely to change the decision.

It starts at cheap corners: the smallest and the largest local batch on the fewest nodes, and the
smallest on the most. From then on the model's own uncertainty decides (D. MacKay, "Information-based
objective functions for active data selection", 1992): a measurement is rated by how much it would
narrow the predictions that matter, over its cost in node-seconds. With Σ the covariance of all
predictions, in units of a measurement's variance,

    gain(j) = Σ_i w_i Σ_ij² / (1 + Σ_jj) / sqrt(cost_j)
    cost_j  = N_j × (steps × t_j + start), with start = 0 on the nodes of the last measurement

w_i is the share of predictions drawn from that uncertainty in which candidate i belongs to the
decision, plus a little for all. The decision is the plan's own: candidates that memory, the largest
batch, deadline and budget rule out in every draw weigh nothing and are not measured.

The search ends when three things hold: the draws agree on the decision, the step times of the
choice and of most candidates are known well enough, and the plan's choice was measured itself. If
that measurement contradicts its prediction, the refitted model decides again; the last of the
`max_profiles` configurations are reserved for this. Then the choice's rival in time or cost is
measured, the best candidate on another number of nodes: a law knows least how a step grows with the
nodes. A choice stays unmeasured only if its profile would cost too much of the training (see
`confirmation`) or cannot run, or if the last profile moved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.models.profiles import Summary, summarize
from tula_hpc.analysis.models.regression import Array
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.analysis.planning.knee import DRAWS, SEED, batches_up_to
from tula_hpc.analysis.search.confirmation import (
    AT_LEAST,
    START_S,
    contradicts,
    is_too_expensive,
    steps_per_profile,
)
from tula_hpc.analysis.search.decision import Chosen, DecisionModel, Evaluated
from tula_hpc.config.search import FormName
from tula_hpc.records import Configuration, Measurement, corners, is_usable

# number of last profiles that measure the plan's choice before anything else: if the first of them
# contradicts its prediction, two are left for the choices that follow
RESERVED = 3
# mean loss of time or cost over the draws, in spreads of a measurement, up to which the draws agree
# on the decision
REGRET = 0.36
# the same as a relative loss: a difference that no measurement could show does not matter
LEAST_REGRET = 0.01
# the same for a knee: mean distance from each draw's batch, in octaves
OCTAVES = 0.5
# largest relative standard deviation of the decision's own step time at the end of the search
KNOWN = 0.07
# likewise of the median candidate's step time, as the plan shows all candidates
MEDIAN_KNOWN = 0.08
# variance of the departure from the law of a single configuration that was not measured, in units
# of a measurement's variance
INTERACTION = 0.5
# weight of a candidate that no draw decides for
BASELINE = 0.1
# A rival is predicted to take less than this many times the time or cost of the choice. It must be
# closer for the last profile, after which no other choice could be measured.
RIVAL = 2.0
CLOSE_RIVAL = 1.3
# candidates within this share of a draw's best belong to the decision
NEAR = 0.03
# of more candidates than this, an evenly spaced selection is evaluated
MOST_POINTS = 400


class AdaptiveSearch:
    """Proposes the configuration to profile next, of all that are believed to fit."""

    def __init__(
        self,
        candidates: Sequence[Configuration],
        decision: DecisionModel = DecisionModel(),  # noqa: B008 - immutable
        max_profiles: int = 8,
        form: FormName = "auto",
    ) -> None:
        self.every = sorted(candidates)
        self.candidates = sorted(decision.conceivable(candidates))
        self.decision = decision
        self.max_profiles = max_profiles
        self.form = form

    def propose(
        self,
        measurements: Sequence[Measurement],
        given_up: frozenset[Configuration] = frozenset(),
        model: StepTimeModel | None = None,
    ) -> list[Configuration]:
        """Return the configurations to profile next, in this order; none at the end of the search.

        `model` is the one fitted to these measurements, if the caller has it already.
        """
        usable = list(filter(is_usable, measurements))
        measured = {row.configuration for row in usable}
        open_ = [c for c in self.candidates if c not in measured and c not in given_up]
        if not open_ or len(measured) >= self.max_profiles:
            return []
        cheap = [c for c in cheap_corners(self.candidates) if c in open_]
        if cheap:
            return cheap
        if len(measured) < AT_LEAST:
            return open_[:1]
        summary = self.decision.known(summarize(measurements))
        model = model or fit_step_time(summary.profiles, self.form, summary.passes)
        return self._by_uncertainty(summary, usable, open_, model)

    def _by_uncertainty(
        self,
        summary: Summary,
        usable: Sequence[Measurement],
        open_: Sequence[Configuration],
        model: StepTimeModel,
    ) -> list[Configuration]:
        measured = {row.configuration for row in usable}
        choices = self.decision.choices(summary, model)
        chosen = {each.configuration for each in choices or ()} & set(self.every)
        points = _thinned(self.every, keep=measured | chosen)
        predictions = Predictions(points, summary, model, self.decision, choices)
        if predictions.hopeless:
            return []
        left = self.max_profiles - len(measured)
        unconfirmed = _unconfirmed(predictions.choices, usable, open_)
        if unconfirmed is not None and (predictions.decided or left <= RESERVED):
            return [unconfirmed]
        by_time = sorted(usable, key=lambda row: row.finished_at)
        *_, last = dict.fromkeys(row.configuration for row in by_time)
        # a last profile elsewhere could contradict its prediction, and move the choice to a
        # configuration that was not measured
        if left == 1 or (predictions.decided and not contradicts(last, usable, self.form)):
            if self.decision.has_knee:
                # measuring a rival does not make the predictions around the choice better
                return []
            near = CLOSE_RIVAL if left == 1 else RIVAL
            rivals = [each for each in predictions.rivals(near) if each.configuration in open_]
            return [each.configuration for each in rivals if not is_too_expensive(usable, each)]
        # the job of the last measurement may still be running
        latest = by_time[-1].nodes if by_time[-1].finished_at > 0.0 else 0
        gains = predictions.gains(latest, steps_per_profile(usable))
        may_run = [i for i in np.flatnonzero(predictions.eligible).tolist() if points[i] in open_]
        best = sorted(may_run, key=lambda i: (gains[i], points[i]))[-1:]
        return [points[i] for i in best]


def _unconfirmed(
    choices: Sequence[Chosen], usable: Sequence[Measurement], open_: Sequence[Configuration]
) -> Configuration | None:
    """Return the first choice that was not measured but can be, if any."""
    for chosen in choices:
        if chosen.configuration in open_ and not is_too_expensive(usable, chosen):
            return chosen.configuration
        if not chosen.needs_profile:
            return None
    return None


def cheap_corners(candidates: Sequence[Configuration]) -> list[Configuration]:
    """Return the smallest and largest batch on the fewest nodes and the smallest on the most."""
    found = corners(candidates)
    if len(found) > 2 and found[-1].nodes == found[-2].nodes:
        del found[-1]
    return found


class Predictions:
    """The model's predictions of all candidates together, with their uncertainty."""

    def __init__(
        self,
        points: Sequence[Configuration],
        summary: Summary,
        model: StepTimeModel,
        decision: DecisionModel,
        choices: Sequence[Chosen] | None,
    ) -> None:
        self.points = points
        self.nodes, self.per_node, self.batch = np.array(points, dtype=np.float64).T
        self.step_s = model.predict(self.nodes, self.batch, self.per_node)
        self.covariance = model.covariance(self.nodes, self.batch, self.per_node)
        # a knee belongs to a smooth curve, without departures of single configurations
        if not decision.has_knee:
            measured = {profile.configuration for profile in summary.profiles}
            unseen = np.array([point not in measured for point in points])
            self.covariance[unseen, unseen] += INTERACTION
        self.spread = model.spread_
        draws = np.clip(_draws(self.covariance) * self.spread, -3.0, 3.0)
        every_s = np.concatenate([self.step_s[None], self.step_s * np.exp(draws)])
        evaluated = decision.evaluate(points, every_s, model, summary)
        self.eligible = evaluated.eligible.any(axis=0)
        self._value = evaluated.eligible_value[0]
        self.hopeless = evaluated.hopeless
        planned = None
        if choices and choices[0].configuration in points:
            planned = points.index(choices[0].configuration)
        if decision.has_knee:
            global_batch = self.nodes * self.per_node * self.batch
            most = batches_up_to(decision.kind, decision.knees(points, model, summary))
            self.decision = _knee_decision(evaluated, global_batch, most, planned)
        else:
            enough = max(LEAST_REGRET, REGRET * self.spread)
            self.decision = _least_decision(evaluated, enough, planned)
        if choices is None:
            index = self.decision.chosen
            choices = [Chosen(points[index], float(self.step_s[index]))]
        self.choices = choices

    @property
    def decided(self) -> bool:
        """True if the draws agree and step times are known."""
        decision = self.decision
        known = self.spread * np.sqrt(self.covariance[decision.chosen, decision.chosen])
        typical = self.spread * np.sqrt(np.median(np.diag(self.covariance)[self.eligible]))
        is_known = known <= KNOWN and typical <= MEDIAN_KNOWN
        return bool(decision.regret <= decision.enough and is_known)

    def rivals(self, near: float) -> list[Chosen]:
        """Return the best candidate on other nodes, if below `near` times the choice's value."""
        chosen = self.decision.chosen
        values = np.where(self.nodes == self.nodes[chosen], np.inf, self._value)
        best = int(np.argmin(values))
        if not values[best] < near * self._value[chosen]:
            return []
        training_s = self.choices[-1].training_s if self.choices else None
        return [Chosen(self.points[best], float(self.step_s[best]), training_s)]

    def gains(self, latest_nodes: int, steps: float) -> Array:
        """Return the gain of each candidate (m,), see the module's equation."""
        weights = np.where(self.eligible, BASELINE + self.decision.belongs, 0.0)
        reduction = weights @ (self.covariance**2 / (1.0 + np.diag(self.covariance)))
        start = np.where(self.nodes == latest_nodes, 0.0, START_S)
        return np.asarray(reduction / np.sqrt(self.nodes * (steps * self.step_s + start)))


class _Decision(NamedTuple):
    """Choice of the nominal prediction, and its agreement with the draws."""

    # index of the candidate
    chosen: int
    # mean loss over the draws; for a knee a distance in octaves
    regret: float
    # regret up to which the draws agree on the decision
    enough: float
    # (m,), share of draws in which a candidate belongs to the decision
    belongs: Array


def _least_decision(evaluated: Evaluated, enough: float, planned: int | None) -> _Decision:
    values = evaluated.eligible_value
    chosen = int(np.argmin(values[0])) if planned is None else planned
    near = values[1:] <= values[1:].min(axis=1, keepdims=True) * (1.0 + NEAR)
    regret = float(np.mean(evaluated.loss(chosen)))
    return _Decision(chosen, regret, enough, np.mean(near, axis=0))


def _knee_decision(
    evaluated: Evaluated, global_batch: Array, most: Array, planned: int | None
) -> _Decision:
    """Compare the planned choice with the largest allowed batch up to the knee of each draw.

    Without a plan the choice is the fastest candidate with that batch by the nominal curve. `most`
    are the largest batches up to the nominal knee and up to those of the draws, (1 + draws,); NaN
    for no knee.
    """
    batches, column = np.unique(global_batch, return_inverse=True)
    columns = [column == index for index in range(len(batches))]
    time_s = evaluated.eligible_value
    # of each batch, by draw; infinite without a candidate
    fastest = np.stack([time_s[:, inside].min(axis=1) for inside in columns], axis=1)
    allowed = np.isfinite(fastest)
    within = allowed & ~(batches > most[:, None])
    last_within = len(batches) - 1 - np.argmax(within[:, ::-1], axis=1)
    best = np.where(within.any(axis=1), last_within, np.argmax(allowed, axis=1))
    at_best = np.flatnonzero(columns[best[0]])
    chosen = int(at_best[np.argmin(time_s[0, at_best])]) if planned is None else planned
    octaves = np.abs(np.log2(batches[best[1:]] / global_batch[chosen]))
    share = np.bincount(best[1:], minlength=len(batches)) / len(octaves)
    front = evaluated.eligible[1:] & (time_s[1:] <= fastest[1:, column] * (1.0 + NEAR))
    return _Decision(
        chosen=chosen,
        regret=float(np.mean(octaves)),
        enough=OCTAVES,
        belongs=np.mean(front, axis=0) * (share[column] + 1.0) / 2.0,
    )


def _draws(covariance: Array) -> Array:
    """Draw (DRAWS, m) from a normal distribution with this covariance, always the same."""
    values, vectors = np.linalg.eigh(covariance)
    normal = np.random.default_rng(SEED).standard_normal((DRAWS, len(values)))
    return np.asarray(normal @ (vectors * np.sqrt(np.maximum(values, 0.0))).T)


def _thinned(candidates: Sequence[Configuration], keep: set[Configuration]) -> list[Configuration]:
    if len(candidates) <= MOST_POINTS:
        return sorted({*candidates, *keep})
    even = np.linspace(0, len(candidates) - 1, MOST_POINTS).round().astype(int)
    return sorted({*(candidates[i] for i in even), *keep})
