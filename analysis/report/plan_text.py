"""A plan as text for the terminal: a table around the chosen candidate, reasons, and warnings.

`tula plan` (`analysis/plan.py`) prints the whole of it; a sweep prints its main sentences
(`_say_plan` in `cli/pipeline.py`). The report says it in words of its own (`first_page.py`).

Tables are fitted to the width of the terminal: first headings and texts are broken into lines, then
columns are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tula_hpc.analysis.planning.partitions import name_of
from tula_hpc.analysis.report.output import PLAN_WIDTH, TextColumn, terminal_table
from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import (
    FOREVER_S,
    duration_within,
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    in_comparison,
    in_lines,
    in_samples,
    listed,
    money_within,
    plural,
    printable,
)
from tula_hpc.records import Candidate, Plan, grouped

# the table shows global batches up to this factor smaller or larger than the chosen one
NEIGHBOUR_FACTOR = 4
# the time to the same progress and the planned time count as equal below this ratio
NOTABLE_FACTOR = 1.05
# the noise scale cannot tell two times to the same progress apart below this ratio
SOONER = 1.2
FRONT_MARK = "◆"
# parts of `Candidate.wall_parts_s` in words
PART_NAMES = {
    "starts": "start-up",
    "ends": "end of the job",
    "repeated": "work repeated after interruptions",
    "failed": "jobs that failed before",
}
# roles of alternatives
NEXT_BEST = "next best"
FASTEST = "fastest"
CHEAPEST = "cheapest"
SOONEST = "soonest to learn as much as with training.base_batch"
FEWER = "best on fewer nodes"
MORE = "best on more nodes"
# objective.kind that chooses the candidate with a role
OBJECTIVES = {FASTEST: "time", CHEAPEST: "cost", SOONEST: "progress"}


def describe_plan(plan: Plan, profiling: str = "") -> str:
    """Return the plan as lines; coloured only if standard output is a terminal.

    `profiling` is the cost of profiling, a sentence without its full stop.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAN_WIDTH
    with console.capture() as capture:
        console.print(_table(plan, console.width))
    # without `printable`, since escapes of the table's own are its colours
    lines = [capture.get().rstrip("\n")]
    for sentence in sentences(plan, profiling):
        lines += map(printable, in_lines(sentence, console.width))
    return "\n".join(lines)


def sentences(plan: Plan, profiling: str = "") -> list[str]:
    """Return expectations, the reason of the choice, alternatives, assumptions and warnings."""
    found = [
        expectation(plan),
        *where_time_goes(plan.chosen),
        f"Chosen by {plan.objective}: {plan.reason}.",
        *why_not_better(plan),
        *unmeasured(plan),
        *_alternatives(plan),
        *(f"Constraint: {text}." for text in plan.binding),
        *knee_sentences(plan),
        *progress_sentences(plan),
        *critical_batch_sentences(plan),
        *(f"Note: {note}." for note in plan.notes),
    ]
    if profiling:
        found.append(f"Profiling: {profiling}.")
    for heading, texts in grouped(plan.doubts).items():
        found += [f"{heading}: {text}." for text in texts]
    return found


def why_not_better(plan: Plan) -> list[str]:
    """Say why a candidate that is faster and no dearer was not chosen; empty if there is none."""
    chosen = plan.chosen
    better = [c for c in plan.candidates if c.feasible and beats(c, chosen)]
    if not better:
        return []
    best = min(better, key=lambda c: (c.wall_time_s, c.cost))
    why = "the plan takes the smallest batch within 10 % of the least time, on the fewest nodes"
    if plan.knee and plan.knee.global_batch:
        further = "further " if chosen.global_batch > plan.knee.global_batch else ""
        why = (
            f"its batch lies {further}beyond the knee, and a training may learn less with a larger "
            "batch"
        )
    if plan.objective == "progress":
        why = "with its batch a training needs more samples for the same progress"
    return [
        f"{name_of(best)} would be {against(best, chosen)}, but {why}; "
        'objective.kind = "time" chooses it.'
    ]


def unmeasured(plan: Plan) -> list[str]:
    """Say why the chosen configuration was not measured; empty if it was, or if a warning does."""
    if plan.profile_share is None:
        return []
    percent = format_number(100 * plan.profile_share, 2)
    return [
        "The chosen configuration itself was not measured, as its profile would cost "
        f"{percent} % of the training's node-seconds."
    ]


def beats(candidate: Candidate, chosen: Candidate) -> bool:
    """Tell whether a candidate is faster and no dearer."""
    return candidate.wall_time_s < chosen.wall_time_s and candidate.cost <= chosen.cost


def expectation(plan: Plan) -> str:
    """Say how long the training should take, and what it should cost."""
    chosen = plan.chosen
    interval = chosen.predicted("wall_time_s")
    time, low, high = (duration_within(s, interval.low, interval.high) for s in interval)
    between = f" (between {low} and {high} with 90 % probability)" if low != high else ""
    cost = money_within(*chosen.predicted("cost"), chosen.currency)
    steps = format_duration(chosen.train_time_s)
    text = f"Training should take {time}{between} and cost {cost}; its steps alone take {steps}"
    every_s = 60.0 * (chosen.checkpoint_minutes or math.inf)
    # both are times of steps alone
    if every_s < chosen.train_time_s:
        text += f", with a checkpoint {_often(every_s, chosen.epoch_time_s)}"
    if chosen.energy_kwh is not None:
        text += f"; {format_number(chosen.energy_kwh, 3)} kWh"
    return f"{text}."


def _often(every_s: float, epoch_s: float) -> str:
    epochs = every_s / epoch_s
    if round(epochs) < 1 or abs(epochs - round(epochs)) > 0.01:
        return f"every {format_duration(every_s)}"
    return "after each epoch" if round(epochs) == 1 else f"every {round(epochs)} epochs"


def without_price(plan: Plan, cluster: ClusterSpec) -> list[str]:
    """Say that costs are by the default price; empty if the user has set a price."""
    part = cluster.by_name().get(plan.chosen.partition)
    if part is None or not part.pricing.is_default:
        return []
    price = format_money(part.pricing.usd_per_node_hour)
    return [
        f"The cost is not a real price: it assumes {price} per node and hour, the default of "
        "pricing.usd_per_node_hour in the cluster file; set your price there."
    ]


def where_time_goes(chosen: Candidate) -> list[str]:
    """Return the parts of the expected time with their shares; leave out those below 0.1 %."""
    whole_s = sum(chosen.wall_parts_s.values())
    shown = []
    for name, seconds in chosen.wall_parts_s.items():
        if seconds >= 0.001 * whole_s > 0.0:
            share = format_percent(seconds / whole_s)
            shown.append(f"{PART_NAMES.get(name, name)} {format_duration(seconds)} ({share})")
    if not shown:
        return []
    return [f"Of the expected time: {', '.join(shown)}."]


class Alternative(NamedTuple):
    """Candidate that was not chosen, with its roles, such as "next best" and "cheapest"."""

    candidate: Candidate
    roles: list[str]
    # the sentence on why it was not chosen, or on how sure that is, already compares it
    is_compared: bool

    @property
    def objective(self) -> str:
        """Return the kind of objective that would choose it, the first of several, or else ""."""
        return next((OBJECTIVES[role] for role in self.roles if role in OBJECTIVES), "")

    @property
    def role(self) -> str:
        """Return its roles in words."""
        return listed(self.roles)

    def against(self, plan: Plan) -> str:
        """Compare with the chosen one, by the time to the same progress if that decides."""
        own, of_chosen = map(_to_progress, (self.candidate, plan.chosen))
        if SOONEST in self.roles:
            return f"after {own}; the chosen batch needs {of_chosen}"
        if plan.objective == "progress" and not {FASTEST, CHEAPEST}.issuperset(self.roles):
            return f"to the same progress after {own}; the chosen one needs {of_chosen}"
        return against(self.candidate, plan.chosen)


def _to_progress(candidate: Candidate) -> str:
    needs = _to_same_progress(candidate)
    if needs.wall_time_s >= FOREVER_S:
        return "more time than train_minutes allows"
    cost = format_money(needs.cost, candidate.currency)
    return f"about {format_duration(needs.wall_time_s)} and {cost}"


def _to_same_progress(candidate: Candidate) -> Candidate:
    """Return the candidate with times and cost to the progress of all epochs at base_batch."""
    progress_s = candidate.progress_time_s or 0.0
    more = progress_s / candidate.wall_time_s
    ends = {name: (more * low, more * high) for name, (low, high) in candidate.interval_90.items()}
    times = {"train_time_s": more * candidate.train_time_s, "wall_time_s": progress_s}
    changes = {**times, "cost": more * candidate.cost, "interval_90": ends}
    return candidate.model_copy(update=changes)


def alternatives(plan: Plan) -> list[Alternative]:
    """Return what somebody might want instead, the next best first."""
    chosen = plan.chosen
    # the chosen one wins ties
    feasible = [chosen, *(candidate for candidate in plan.candidates if candidate.feasible)]
    fastest = min(feasible, key=lambda c: (c.wall_time_s, c.cost))
    cheapest = min(feasible, key=lambda c: (c.cost, c.wall_time_s))
    named = [(NEXT_BEST, candidate) for candidate in plan.runners_up[:1]]
    named += [(FASTEST, fastest), (CHEAPEST, cheapest)]
    named += [(FEWER if c.nodes < chosen.nodes else MORE, c) for c in plan.other_nodes]
    soonest = min(feasible, key=lambda c: c.progress_time_s or math.inf)
    if (chosen.progress_time_s or 0.0) > SOONER * (soonest.progress_time_s or math.inf):
        named.append((SOONEST, soonest))
    too_close = chosen
    if too_close_to_call(plan):
        too_close = plan.runners_up[0]
    found: dict[str, Alternative] = {}
    for role, candidate in named:
        # a candidate that already has a role is shown there with its number of nodes
        is_named = name_of(candidate) in found and role in (FEWER, MORE)
        if candidate == chosen or is_named:
            continue
        is_better = candidate == fastest and beats(candidate, chosen)
        is_compared = candidate == too_close or is_better
        other = found.setdefault(name_of(candidate), Alternative(candidate, [], is_compared))
        other.roles.append(role)
    return list(found.values())


def _alternatives(plan: Plan) -> list[str]:
    found = too_close_to_call(plan)
    for other in alternatives(plan):
        # the sentence that compares it has named it
        if other.is_compared and other.roles in ([NEXT_BEST], [FASTEST]):
            continue
        text = "compared above" if other.is_compared else other.against(plan)
        found.append(
            f"{other.role[:1].upper()}{other.role[1:]}: {name_of(other.candidate)}, {text}."
        )
    return found


def too_close_to_call(plan: Plan) -> list[str]:
    """Say that the chosen one may not be better than the next best; empty if it is, or alone."""
    if not plan.runners_up or plan.runners_up[0].configuration == plan.chosen.configuration:
        return []
    chosen = plan.chosen
    other = plan.runners_up[0]
    takes = "takes less time"
    name = "wall_time_s"
    compared = against(other, chosen)
    if plan.objective == "cost":
        takes = "costs less"
        name = "cost"
    elif plan.objective == "progress":
        takes += " to the same progress"
        chosen = _to_same_progress(chosen)
        other = _to_same_progress(other)
        compared = f"{against(other, chosen)} to the same progress"
    for candidate, rival in ((chosen, other), (other, chosen)):
        low, high = _by_steps(rival)
        value = getattr(rival, name)
        if not low * value <= getattr(candidate, name) <= high * value:
            return []
    # nothing speaks for a candidate that is neither faster nor cheaper
    choose = "; choose by what matters more to you"
    if other.wall_time_s >= chosen.wall_time_s and other.cost >= chosen.cost:
        choose = ""
    return [
        f"The next best, {name_of(other)}, is predicted to be {compared}. The "
        f"predictions are too close to say which of the two {takes}{choose}."
    ]


def _by_steps(candidate: Candidate) -> tuple[float, float]:
    """Return the ends of a candidate's time, as factors of it, as far as its steps are uncertain.

    The time in which jobs start and end is also uncertain, but in the same way for all candidates.
    """
    train_s = candidate.train_time_s
    share = train_s / candidate.wall_time_s
    low_s, high_s = candidate.interval_90.get("train_time_s", (math.inf, -math.inf))
    return 1.0 + share * (low_s / train_s - 1.0), 1.0 + share * (high_s / train_s - 1.0)


def against(candidate: Candidate, chosen: Candidate) -> str:
    """Compare with the chosen one, for example "12 % slower and 3 % cheaper"."""
    time = _compared(candidate.wall_time_s, chosen.wall_time_s, "slower", "faster", "slow")
    cost = _compared(candidate.cost, chosen.cost, "more expensive", "cheaper", "expensive")
    return f"{time} and {cost}"


def _compared(value: float, base: float, more: str, less: str, multiple: str) -> str:
    # there is no percentage of zero
    if base <= 0.0 < value:
        return more
    if base <= 0.0 or abs(value / base - 1.0) < 0.0005:
        return "as fast" if more == "slower" else "as expensive"
    return in_comparison(value / base, more, less, f"as {multiple}")


def knee_sentences(plan: Plan) -> list[str]:
    """Say where the knee lies, and between which batches; empty for objectives without one."""
    knee = plan.knee
    if knee is None:
        return []
    between = f"{knee.between} with 90 % probability" if knee.between else ""
    share = format_percent(knee.share_without_knee)
    without = f"{share} of the curves that the measurements allow have"
    if knee.global_batch is None:
        others = f"; the others have theirs {between}" if between else ""
        return [f"{without} no knee{others}."]
    text = f"The knee lies at B={knee.global_batch:,.0f}"
    if between:
        text += f" ({between})"
    if knee.share_without_knee:
        text += f"; {without} none"
    return [f"{text}."]


def critical_batch_sentences(plan: Plan) -> list[str]:
    """Describe the critical batch by the gradient's noise; empty if it was not measured."""
    if plan.critical_batch is None:
        return []
    source = {
        "profile": "at the weights that were profiled",
        "training": "in the later half of the training so far",
    }.get(plan.critical_batch_source or "", "as it was measured")
    batch = in_samples(plan.critical_batch)
    knee = ""
    if plan.knee is not None:
        knee = "; the knee, which is about time alone, does not account for that"
    return [
        f"Critical batch: {batch}, the gradient's noise scale {source}. Beyond it a larger batch "
        f"saves few steps{knee}. The critical batch grows during training, often tenfold."
    ]


def progress_sentences(plan: Plan) -> list[str]:
    """Say how much less is learned with the chosen batch; empty if that is little, or unknown."""
    chosen = plan.chosen
    factor = (chosen.progress_time_s or 0.0) / chosen.wall_time_s
    if factor < NOTABLE_FACTOR:
        return []
    return [
        f"Judging by the gradient's noise, the model learns less in {plural(plan.epochs, 'epoch')} "
        "with this batch than with training.base_batch; learning as much would take "
        f"{_epochs_to_progress(plan)}{_to_progress(chosen)}."
    ]


def _epochs_to_progress(plan: Plan) -> str:
    """Return the epochs to the same progress, as "67 epochs, "; "" if hardly more, or unknown."""
    chosen = plan.chosen
    parts = chosen.wall_parts_s
    once_s = sum(parts.get(name, 0.0) for name in ("starts", "ends"))
    longer_s = (chosen.progress_time_s or 0.0) - once_s
    if not parts or longer_s + once_s >= FOREVER_S:
        return ""
    epochs = round(plan.epochs * longer_s / (chosen.wall_time_s - once_s))
    return f"{epochs:,} epochs, " if epochs > plan.epochs else ""


def _table(plan: Plan, width: int) -> Table:
    least = plan.chosen.global_batch / NEIGHBOUR_FACTOR
    most = plan.chosen.global_batch * NEIGHBOUR_FACTOR
    shown = [c for c in plan.candidates if least <= c.global_batch <= most]
    shown.sort(key=lambda c: (c.global_batch, c.nodes, c.partition))
    captions = []
    if plan.pareto:
        captions.append(f"{FRONT_MARK} Pareto front: no candidate is faster and cheaper")
    if len(shown) < len(plan.candidates):
        captions.append(f"{len(shown)} of {len(plan.candidates):,} candidates; --json shows more")
    styles = []
    for candidate in shown:
        style = ""
        if candidate == plan.chosen:
            style = "bold"
        elif not candidate.feasible:
            style = "dim"
        styles.append(style)
    words = {"caption": "; ".join(captions) or None, "caption_justify": "left"}
    return terminal_table(_columns(plan, shown), width, styles, **words)


def _columns(plan: Plan, shown: Sequence[Candidate]) -> list[TextColumn]:
    def numbers(heading: str, text_of: Callable[[Candidate], object], spare: int = 0) -> TextColumn:
        return TextColumn(heading, [str(text_of(c)) for c in shown], right=True, spare=spare)

    columns = [
        # signs come first, where they are never cut off
        TextColumn("", [_mark(item, plan.chosen) for item in shown]),
        numbers("nodes", lambda c: c.nodes),
        numbers("local batch", lambda c: f"{c.local_batch}{c.in_parts}"),
        numbers("global batch", lambda c: c.global_batch),
        numbers("step", lambda c: format_duration(c.step_time_s), spare=3),
        numbers("epoch", lambda c: format_duration(c.epoch_time_s), spare=1),
        # the time that the cost in the next column is for, not the time of the steps alone
        numbers("whole time", lambda c: format_duration(c.wall_time_s)),
        numbers("cost", lambda c: format_money(c.finite_cost, c.currency)),
        numbers("memory", lambda c: format_bytes(c.peak_memory_bytes), spare=2),
    ]
    if plan.chosen.progress_time_s is not None:
        columns.insert(
            7,
            numbers("same progress", lambda c: format_duration(c.progress_time_s or 0.0), spare=4),
        )
    if plan.chosen.partition:
        columns.append(TextColumn("partition", [item.partition for item in shown]))
    remarks = ["measured" if item.measured and not item.why else item.why for item in shown]
    return [*columns, TextColumn("", remarks, narrow=len("measured"))]


def _mark(candidate: Candidate, chosen: Candidate) -> str:
    arrow = "→" if candidate == chosen else " "
    return f"{arrow}{FRONT_MARK}" if candidate.pareto else arrow
