"""Choose again in mid-training, on the same nodes, after step times drifted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tula_hpc.analysis.planning.constraints import constraints_of
from tula_hpc.analysis.planning.knee import MIN_BATCHES, curve_through, knees
from tula_hpc.analysis.planning.objective import NEAR_LEAST_TIME, least_keys
from tula_hpc.config import ObjectiveSpec
from tula_hpc.records import Candidate, Configuration, Drift, Plan, StepParts

# profiled parts of the step at a configuration
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
    """Return the best feasible candidate on the planned nodes after a part of the step drifted.

    It has its new step time; None for an unknown drift or without candidates. The drifted part is
    changed in every candidate, see `drifted_step_s` and `slowed`, with `parts` as profiled.
    Constraints of the objective count unless no candidate keeps them any more. After a local batch
    ran out of memory only those `below` it are candidates.

    The batch moves by the factor by which the objective's choice among the candidates of these
    nodes moves, or their knee: the plan had other candidates as well, and without a drift its
    choice has to stand.
    """
    if drift.part == "unknown":
        return None
    there = _candidates(plan, planned, partition, below)
    if not there:
        return None
    evaluation = _compute_factor(drift) if drift.part == "compute" else 1.0
    changed = []
    for candidate in there:
        step_s = drifted_step_s(candidate, drift, parts(candidate.configuration))
        changed.append(slowed(candidate, step_s / candidate.step_time_s, evaluation))
    kept = _within_constraints(changed, objective)
    target = planned.global_batch * _batch_factor(
        objective, _within_constraints(there, objective), kept
    )
    return min(kept, key=lambda c: (abs(math.log2(c.global_batch / target)), c.global_batch))


def _batch_factor(
    objective: ObjectiveSpec, before: Sequence[Candidate], after: Sequence[Candidate]
) -> float:
    """Return the factor from the best batch before the drift to the best one after it."""
    if objective.has_knee:
        # their own knees: by single candidates a hair could move the batch by an octave
        then = knee_batch(objective.kind, before)
        now = knee_batch(objective.kind, after)
        if then is not None and now is not None:
            return now / then
    return _best(objective, after).global_batch / _best(objective, before).global_batch


def _best(objective: ObjectiveSpec, candidates: Sequence[Candidate]) -> Candidate:
    score = _score(objective, candidates)
    return min(candidates, key=lambda c: (score(c), c.global_batch))


def _within_constraints(candidates: list[Candidate], objective: ObjectiveSpec) -> list[Candidate]:
    every = constraints_of(objective)
    kept = [c for c in candidates if not any(one.is_broken_by(c) for one in every)]
    return kept or candidates


def _candidates(
    plan: Plan, planned: Configuration, partition: str, below: int | None
) -> list[Candidate]:
    known = {}
    for candidate in (*plan.candidates, *plan.runners_up, *plan.fallbacks, plan.chosen):
        same_nodes = candidate.configuration[:2] == planned[:2]
        fits = below is None or candidate.local_batch < below
        if same_nodes and fits and candidate.partition == partition:
            known[candidate.configuration] = candidate
    return [candidate for _, candidate in sorted(known.items()) if candidate.feasible]


def drifted_step_s(candidate: Candidate, drift: Drift, expected: StepParts) -> float:
    """Return the seconds per step of a candidate after the drift.

    The all-reduce takes longer by the same time for every batch, the wait for the loader by a time
    in proportion to the local batch, and computing by the measured factor. Time hidden behind
    computing stays hidden. `expected` are the parts of the candidate's step before the drift.
    """
    if drift.part == "network":
        extra = _extra_s(drift.measured.allreduce_time_s, drift.expected.allreduce_time_s)
    elif drift.part == "loader":
        share = candidate.local_batch / drift.local_batch
        extra = share * _extra_s(drift.measured.data_time_s, drift.expected.data_time_s)
    else:
        extra = (_compute_factor(drift) - 1.0) * (expected.compute_time_s or 0.0)
    return max(candidate.step_time_s + extra, 0.01 * candidate.step_time_s)


def _compute_factor(drift: Drift) -> float:
    now = drift.measured.compute_time_s
    then = drift.expected.compute_time_s
    return now / then if now and then else 1.0


def _extra_s(measured_s: float | None, expected_s: float | None) -> float:
    return 0.0 if measured_s is None or expected_s is None else measured_s - expected_s


def slowed(candidate: Candidate, factor: float, evaluation: float = 1.0) -> Candidate:
    """Return a candidate after its steps slowed down, with all times and costs that follow.

    Checkpoints and repeated work follow the steps, evaluations have a factor of their own, starts
    take as long as before. Where the training would never end, `wall_parts_s` is empty, and all
    follows the steps. Only the intervals of steps stay.
    """
    other_factors = {"evaluation": evaluation, "starts": 1.0, "ends": 1.0}
    parts = {}
    for name, seconds in candidate.wall_parts_s.items():
        parts[name] = seconds * other_factors.get(name, factor)
    before_s = sum(candidate.wall_parts_s.values())
    whole = sum(parts.values()) / before_s if before_s > 0 else factor
    fixed_s = parts.get("starts", 0.0) + parts.get("ends", 0.0)
    work = (sum(parts.values()) - fixed_s) / (before_s - fixed_s) if before_s > fixed_s else factor
    of_steps = dict.fromkeys(("step_time_s", "epoch_time_s", "train_time_s"), factor)
    factors = of_steps | dict.fromkeys(("wall_time_s", "cost", "energy_kwh"), whole)
    if candidate.progress_time_s:
        factors["progress_time_s"] = work + (1.0 - work) * fixed_s / candidate.progress_time_s
    changes: dict[str, Any] = {}
    for name, own_factor in factors.items():
        before = getattr(candidate, name)
        if before is not None:
            changes[name] = before * own_factor
    # the watch compares steps; of starts and the like nothing new is known
    intervals = {
        name: (factor * low, factor * high)
        for name, (low, high) in candidate.interval_90.items()
        if name in of_steps
    }
    changes |= {"interval_90": intervals, "wall_parts_s": parts, "part_intervals_90": {}}
    return candidate.model_copy(update=changes)


def _score(
    objective: ObjectiveSpec, candidates: Sequence[Candidate]
) -> Callable[[Candidate], tuple[float, ...]]:
    """Return the function that the objective makes least, as in the plan."""
    if not objective.has_knee:

        def keys(candidate: Candidate) -> tuple[float, ...]:
            time_s = candidate.wall_time_s
            if objective.kind == "progress" and candidate.progress_time_s is not None:
                time_s = candidate.progress_time_s
            return tuple(
                map(float, least_keys(objective, np.array(time_s), np.array(candidate.cost)))
            )

        return keys
    knee = knee_batch(objective.kind, candidates)
    if knee is not None:
        return lambda c: (abs(math.log2(c.global_batch / knee)),)
    limit_s = NEAR_LEAST_TIME * min(c.wall_time_s for c in candidates)
    return lambda c: (float(c.global_batch) if c.wall_time_s <= limit_s else math.inf,)


def knee_batch(kind: str, candidates: Iterable[Candidate]) -> float | None:
    """Return the global batch at the knee of training time over batch; None without a knee.

    The time of a sample is interpolated between candidates: that of an epoch has full batches only.
    """
    points = sorted({c.global_batch: c.step_time_s / c.global_batch for c in candidates}.items())
    if len(points) < MIN_BATCHES:
        return None
    batches, times = np.array(points, dtype=np.float64).T
    knee = float(knees(kind, curve_through(batches, times)))
    return None if math.isnan(knee) else knee
