"""Steps that had not settled when their measurement ended, or changed while it lasted.

Both are reported, with a remedy, only if they matter: one end of a configuration's measured range
would change the choice, or the chosen configuration itself drifted. (A training's steps take as
long as the last measured ones.) The plan's own code makes the choice, with refitted models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tula_hpc.analysis.models.data_loading import loader_decides
from tula_hpc.analysis.models.profiles import MOST_NOISE, Profile, Summary
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.analysis.planning.partitions import FittedPartitions, prefixed
from tula_hpc.analysis.search.decision import DecisionModel
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec
from tula_hpc.config.search import LEAST_SECONDS, MOST_SECONDS
from tula_hpc.formatting import format_duration, in_comparison
from tula_hpc.records import Configuration, Measurement, Plan, Remedy, of_partition

# drift of the chosen configuration that is reported: its training takes longer or shorter by about
# half of that
NOTABLE_DRIFT = 0.05
# factor on the number of steps that makes an interval half as wide
LONGER = 4
# share of the least time limit: a measurement that took less was ended by the script itself
ENDED = 0.5
# number of configurations whose ends are tried, widest range first: each end takes a fit
MOST_TRIED = 8
# number of measured configurations in all these fits together
MOST_ROWS = 512


class Unsteady(NamedTuple):
    """Measured configuration whose step time is uncertain."""

    profile: Profile
    # ends of the 95 % interval, or of both halves if these differ by more
    low_s: float
    high_s: float

    @property
    def drift(self) -> float:
        """Change from the first half of the rounds to the second; 0 where there is none."""
        return self.profile.times.drift

    def describe(self) -> str:
        """Describe the measurement."""
        times = self.profile.times
        step = f"the step of {self.profile.configuration}"
        if not self.drift or times.first_half_s is None or times.second_half_s is None:
            ends = f"{format_duration(self.low_s)} and {format_duration(self.high_s)}"
            return f"{step} takes between {ends}: its measurement was too short for its noise"
        first = format_duration(times.first_half_s)
        second = format_duration(times.second_half_s)
        changed = in_comparison(1.0 + self.drift)
        return f"{step} became {changed} while it was measured ({first}, then {second})"


def unsteady(profiles: Iterable[Profile]) -> list[Unsteady]:
    """Return the configurations that had not settled, or drifted, the widest range first.

    If steps wait for the loader, they are as uneven as its items, which has a warning of its own.
    """
    found = []
    for profile in profiles:
        times = profile.times
        ends = [times.step_time_s]
        if not profile.converged and not loader_decides(times):
            ends += [times.step_time_low_s, times.step_time_high_s]
        if times.drift:
            ends += [times.first_half_s or 0.0, times.second_half_s or 0.0]
        least = times.step_time_s / MOST_NOISE
        most = times.step_time_s * MOST_NOISE
        known = [min(max(end, least), most) for end in ends if math.isfinite(end)]
        if max(known) > min(known):
            found.append(Unsteady(profile, min(known), max(known)))
    return sorted(found, key=lambda one: one.low_s / one.high_s)


def with_steadiness(
    plan: Plan,
    sweep: SweepSpec,
    cluster: ClusterSpec,
    fitted: FittedPartitions,
    measurements: Sequence[Measurement],
) -> Plan:
    """Add a warning about unsteady steps on the partition that the plan chose."""
    name = plan.chosen.partition
    part = next(part for part in fitted.parts if part.name == name)
    decision = DecisionModel(sweep.objective.kind, sweep, cluster.part(name))
    summary = part.summary
    every = unsteady(summary.profiles)
    tried = min(MOST_TRIED, MOST_ROWS // (2 * len(summary.profiles)))
    usual: Configuration | None = None
    if every and tried:
        usual = _choice(decision, summary, part.models.step_time)
    # other partitions may have an even better choice
    alone = len(cluster.parts()) == 1
    choice = "the plan would choose" if alone else "the best there would be"
    found: list[tuple[Unsteady, str]] = []
    for index, one in enumerate(every):
        change = None
        if usual is not None and index < tried:
            change = _change(one, usual, decision, sweep.search, summary)
        is_chosen = one.profile.configuration == plan.chosen.configuration
        if change:
            seconds, other = change
            took = format_duration(seconds)
            text = f"if it takes {took}, predictions change, and {choice} {other}"
            found.append((one, text))
        elif is_chosen and abs(one.drift) >= NOTABLE_DRIFT:
            found.append((one, _on_training(one)))
    if not found:
        return plan
    # one warning: what to do about all of them is the same
    first, effect = found[0]
    more = ""
    if len(found) > 1:
        others = ", ".join(str(one.profile.configuration) for one, _ in found[1:])
        more = f"The steps of {others} are uncertain, too. "
    rows = of_partition(measurements, name)
    text = f"{first.describe()}; {effect}. {more}{_what_to_do(first, sweep.search, rows)}"
    return plan.with_doubts(Remedy.MEASURE.doubts([prefixed(name, text)]))


def _change(
    one: Unsteady,
    usual: Configuration,
    decision: DecisionModel,
    search: SearchSpec,
    summary: Summary,
) -> tuple[float, Configuration] | None:
    """Return the end of the range that changes the choice, and the new choice; None without one."""
    for seconds in (one.low_s, one.high_s):
        if seconds == one.profile.times.step_time_s:
            continue
        times = one.profile.times.model_copy(update={"step_time_s": seconds})
        changed = one.profile._replace(times=times)
        profiles = tuple(changed if each is one.profile else each for each in summary.profiles)
        model = fit_step_time(profiles, search.form, summary.passes)
        other = _choice(decision, summary._replace(profiles=profiles), model)
        if other is not None and other != usual:
            return seconds, other
    return None


def _choice(
    decision: DecisionModel, summary: Summary, model: StepTimeModel
) -> Configuration | None:
    choices = decision.choices(summary, model)
    return choices[-1].configuration if choices else None


def _on_training(one: Unsteady) -> str:
    later = (one.profile.times.second_half_s or 0.0) / one.profile.times.step_time_s
    compared = in_comparison(later, "more time", "less time", "as much time", other="predicted")
    return f"at its later pace the training's steps take {compared}"


def _what_to_do(one: Unsteady, search: SearchSpec, rows: Iterable[Measurement]) -> str:
    """Name the key to raise: of the limit that ended the measurement, or of the warm-up."""
    anew = "and another --run-dir measures"
    if one.drift < 0:
        steps = LONGER * search.warmup_steps
        return f"A new sweep with --set search.warmup_steps={steps} {anew} it when it has warmed up"
    own = [row for row in rows if row.configuration == one.profile.configuration]
    # without max_seconds the training's length set the limit
    timed_s = max(
        (sum(row.samples.get("step", ())) * row.round_steps.get("step", 1) for row in own),
        default=0.0,
    )
    key = f"search.max_seconds={LONGER * math.ceil(search.max_seconds or timed_s or MOST_SECONDS)}"
    # the next round would have exceeded max_steps
    if any(row.steps + row.round_steps.get("step", 1) > search.max_steps for row in own):
        key = f"search.max_steps={LONGER * search.max_steps}"
    elif 0 < timed_s < ENDED * (search.max_seconds or LEAST_SECONDS):
        return (
            "The script ended before its steps had settled: with more samples, or {epochs} in its "
            "arguments, a new sweep with another --run-dir measures it for longer"
        )
    return f"A new sweep with --set {key} {anew} it for longer"
