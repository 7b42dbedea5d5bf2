"""Choosing again in mid-training: the plan's candidates for the nodes that are there, with step times that drifted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tula_hpc.analysis.planning.knee import MIN_BATCHES, Curve, find_knees
from tula_hpc.analysis.planning.objective import NEAR_LEAST_TIME, least_keys
from tula_hpc.config import ObjectiveSpec
from tula_hpc.records import Candidate, Configuration, Drift, Plan, StepParts

CURVE_POINTS = 401

# what the profiles say of a configuration
Parts = Callable[[Configuration], StepParts]


def choose_again(
    plan: Plan,
    objective: ObjectiveSpec,
    planned: Configuration,
    drift: Drift,
    parts: Parts,
    *,
    partition: str = "",
    below: int | None = None,
) -> Candidate | None:
    """The best feasible candidate on the planned nodes, now that a part of the step takes another time.

    The drifted part is changed in every candidate, see `drifted_step_s`; the time of steps follows
    in proportion, and expected time, cost and intervals with it, see `slowed`. Constraints of the
    objective count unless no candidate keeps them any more. The batch moves by the factor by which
    the objective's choice among the candidates of these nodes moves, or their knee: the plan had
    others to choose from as well (its knee is that of all cluster sizes), and without a drift its
    choice has to stand.

    Args:
        plan: Whose candidates are ranked anew.
        objective: By which they are ranked.
        planned: What the plan chose.
        drift: What was measured against what had been expected.
        parts: What the profiles say of any configuration.
        partition: Of the planned nodes.
        below: A local batch that ran out of memory; only smaller ones are candidates.

    Returns: The candidate with the step time that it will have; None where the drift has no name or
        no candidate is left.
    """
    if drift.part == "unknown":
        return None
    there = [
        c for c in _candidates(plan, planned, partition) if below is None or c.local_batch < below
    ]
    if not there:
        return None
    evaluation = _computing(drift) if drift.part == "compute" else 1.0
    steps = [drifted_step_s(c, drift, parts(c.configuration)) / c.step_time_s for c in there]
    changed = [slowed(c, factor, evaluation) for c, factor in zip(there, steps, strict=True)]
    kept = _keeping(changed, objective)
    target = planned.global_batch * _moved(objective, _keeping(there, objective), kept)
    return min(kept, key=lambda c: (abs(math.log2(c.global_batch / target)), c.global_batch))


def _moved(
    objective: ObjectiveSpec, before: Sequence[Candidate], after: Sequence[Candidate]
) -> float:
    """Factor from the batch that was best to the one that is; of knees their own, lest a hair moves it by an octave."""
    if objective.kind == "knee":
        then, now = knee_batch(before), knee_batch(after)
        if then is not None and now is not None:
            return now / then
    return _best(objective, after).global_batch / _best(objective, before).global_batch


def _best(objective: ObjectiveSpec, candidates: Sequence[Candidate]) -> Candidate:
    score = _score(objective, candidates)
    return min(candidates, key=lambda c: (score(c), c.global_batch))


def _keeping(candidates: list[Candidate], objective: ObjectiveSpec) -> list[Candidate]:
    """Those within the constraints; all where none is."""
    return [c for c in candidates if _keeps(c, objective)] or candidates


def _candidates(plan: Plan, planned: Configuration, partition: str) -> list[Candidate]:
    listed = (*plan.candidates, *plan.runners_up, *plan.fallbacks, plan.chosen)
    known = {c.configuration: c for c in listed if c.partition == partition}
    place = planned[:2]
    return [c for key, c in sorted(known.items()) if key[:2] == place and c.feasible]


def drifted_step_s(candidate: Candidate, drift: Drift, expected: StepParts) -> float:
    """Seconds per step of a candidate, after the drift.

    The all-reduce takes longer by the same time for every batch, the wait for the loader by a time
    in proportion to the local batch, and computing by the factor that was measured. What is hidden
    behind computing stays hidden.

    Args:
        candidate: As planned.
        drift: As measured at another batch.
        expected: Parts of the candidate's step before the drift.
    """
    if drift.part == "network":
        extra = _extra(drift.measured.allreduce_time_s, drift.expected.allreduce_time_s)
    elif drift.part == "loader":
        share = candidate.local_batch / drift.local_batch
        extra = share * _extra(drift.measured.data_time_s, drift.expected.data_time_s)
    else:
        extra = (_computing(drift) - 1.0) * (expected.compute_time_s or 0.0)
    return max(candidate.step_time_s + extra, 0.01 * candidate.step_time_s)


def _computing(drift: Drift) -> float:
    """How many times as long computing takes."""
    now, then = drift.measured.compute_time_s, drift.expected.compute_time_s
    return now / then if now and then else 1.0


def _extra(measured_s: float | None, expected_s: float | None) -> float:
    return 0.0 if measured_s is None or expected_s is None else measured_s - expected_s


def slowed(candidate: Candidate, factor: float, evaluation: float = 1.0) -> Candidate:
    """A candidate whose steps take `factor` times as long, with what that makes of all that is paid by time.

    Checkpoints and repeated work follow the steps; evaluations take `evaluation` times as long,
    starts as long as before. Where the plan does not tell these parts, all its time is that of
    steps.
    """
    own = {"evaluation": evaluation, "starts": 1.0}
    parts = {
        name: seconds * own.get(name, factor) for name, seconds in candidate.wall_parts_s.items()
    }
    before_s = sum(candidate.wall_parts_s.values())
    whole = sum(parts.values()) / before_s if before_s > 0 else factor
    factors = dict.fromkeys(("step_time_s", "epoch_time_s", "train_time_s"), factor)
    factors |= dict.fromkeys(("wall_time_s", "cost", "energy_kwh"), whole)
    values = {name: value for name in factors if (value := getattr(candidate, name)) is not None}
    changes = {name: value * factors[name] for name, value in values.items()}
    intervals = {
        name: tuple(changes[name] + factor * (end - values[name]) for end in ends)
        if name in values
        else ends
        for name, ends in candidate.interval_90.items()
    }
    return candidate.model_copy(update=changes | {"interval_90": intervals, "wall_parts_s": parts})


def _keeps(candidate: Candidate, objective: ObjectiveSpec) -> bool:
    """Whether the candidate is within deadline and budget; a bound on the batch is in `feasible` already."""
    in_time = (
        objective.deadline_hours is None
        or candidate.expected_time_s <= 3600 * objective.deadline_hours
    )
    return in_time and (objective.budget is None or candidate.cost <= objective.budget)


def _score(
    objective: ObjectiveSpec, candidates: Sequence[Candidate]
) -> Callable[[Candidate], tuple[float, ...]]:
    """What is to be least, as in the plan."""
    if objective.kind != "knee":
        return lambda c: tuple(
            map(float, least_keys(objective, np.array(c.expected_time_s), np.array(c.cost)))
        )
    knee = knee_batch(candidates)
    if knee is not None:
        return lambda c: (abs(math.log2(c.global_batch / knee)),)
    limit_s = NEAR_LEAST_TIME * min(c.expected_time_s for c in candidates)
    return lambda c: (float(c.global_batch) if c.expected_time_s <= limit_s else math.inf,)


def knee_batch(candidates: Iterable[Candidate]) -> float | None:
    """Global batch at the knee of training time over batch, the time interpolated between candidates; None without."""
    points = sorted({c.global_batch: c.train_time_s for c in candidates}.items())
    batches, times = np.array(points, dtype=np.float64).T
    dense = np.geomspace(batches[0], batches[-1], CURVE_POINTS) if len(points) > 1 else batches
    curve = np.exp(np.interp(np.log(dense), np.log(batches), np.log(times)))
    knee = (
        float(find_knees(Curve(dense, np.minimum.accumulate(curve))))
        if len(points) >= MIN_BATCHES
        else math.nan
    )
    return None if math.isnan(knee) else knee
