"""Confirmation of the plan's choice: it was measured itself, or the plan says why it was not.

A training of hours or days is committed to a single configuration. Its predicted step time is the
least of many, so that errors of the prediction favour it, and effects that the model does not know
may hide exactly there. One profile shows it:

    cost of a profile / cost of the training = (steps × t_step + start) / T

on the same nodes, with the steps of a usual profile, and T the training's expected wall time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tula_hpc.analysis.models.accumulation import Passes
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.models.step_time import fit_step_time
from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.search.decision import Chosen
from tula_hpc.config import SweepSpec
from tula_hpc.config.search import FormName
from tula_hpc.records import Configuration, Measurement, Plan, Remedy, is_usable, of_partition

# seconds to start Python and torch and to connect the workers, unless they were measured
START_S = 20.0
# steps of one profile, if no measurement shows them
STEPS = 80.0
# Share of the training that the profile of the choice may cost. The models miss a step time that
# was not measured by about as much: a more expensive profile costs more than it is likely to save.
PROFILE_SHARE = 0.05
# number of measured configurations below which nothing is predicted
AT_LEAST = 3


def steps_per_profile(usable: Sequence[Measurement]) -> float:
    """Return how many steps take as long as one profile, median over the measurements."""
    steps = [
        row.elapsed_s / row.times.step_time_s for row in usable if row.times and row.elapsed_s > 0.0
    ]
    return float(np.median(steps)) if steps else STEPS


def profile_share(usable: Sequence[Measurement], step_time_s: float, training_s: float) -> float:
    """Return the cost of a profile as a share of a training's on the same nodes."""
    starts_s = [row.start_s for row in usable if row.start_s > 0.0]
    start_s = float(np.median(starts_s)) if starts_s else START_S
    return (steps_per_profile(usable) * step_time_s + start_s) / training_s


def is_too_expensive(usable: Sequence[Measurement], chosen: Chosen) -> bool:
    """Tell whether the profile of a choice costs more of the training than it is worth."""
    if chosen.training_s is None:
        return False
    return profile_share(usable, chosen.step_time_s, chosen.training_s) > PROFILE_SHARE


def with_confirmation(
    plan: Plan,
    sweep: SweepSpec,
    measurements: Sequence[Measurement],
    pending: Collection[Configuration],
) -> Plan:
    """Add a note or a warning on a choice that was not measured, if the search proposes no more."""
    # if the search has configurations left to measure, another warning names them
    if plan.chosen.measured or pending:
        return plan
    here = of_partition(measurements, plan.chosen.partition)
    has_failed = any(row.configuration == plan.chosen.configuration for row in here)
    usable = list(filter(is_usable, here))
    share = profile_share(usable, plan.chosen.step_time_s, plan.chosen.wall_time_s)
    if share > PROFILE_SHARE and not has_failed:
        return plan.model_copy(update={"profile_share": share})
    tried = len({row.configuration for row in usable})
    return plan.with_doubts(Remedy.MEASURE.doubts([_unmeasured(plan, sweep, tried)]))


def _unmeasured(plan: Plan, sweep: SweepSpec, profiles: int) -> str:
    """Return the sentence on a choice that was not measured, and could have been."""
    text = f"the chosen {name_of(plan.chosen)} was not measured itself: "
    if sweep.search.mode == "partial":
        return f'{text}search.mode = "partial" measures only corners'
    if profiles >= sweep.search.max_profiles:
        limit = f"search.max_profiles = {sweep.search.max_profiles}"
        return f"{text}all that {limit} allows was measured before it became the best"
    return f"{text}the search could not profile it, or looked for another choice"


def contradicts(
    configuration: Configuration, usable: Sequence[Measurement], form: FormName
) -> bool:
    """Tell whether a measurement is outside the 90 % interval predicted from those before it."""
    own = [row for row in usable if row.configuration == configuration]
    # of measurements in several numbers of passes, the plan takes those with the fewest
    least = min(row.accumulation or 1 for row in own)
    own = [row for row in own if (row.accumulation or 1) == least]
    first_at = min(row.finished_at for row in own)
    earlier = [row for row in usable if row.finished_at < first_at]
    if len({row.configuration for row in earlier}) < AT_LEAST:
        return False
    model = fit_step_time(summarize(earlier).profiles, form, Passes(least=least))
    nodes, per_node, batch = configuration
    low_s, high_s = model.interval(nodes, batch, per_node)
    measured_s = float(np.median([row.times.step_time_s for row in own if row.times]))
    return not float(low_s) <= measured_s <= float(high_s)
