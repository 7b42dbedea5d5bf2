"""Find the plan's choice on other nodes, at other prices, within limits, or by another objective.

Models, candidates and objective are the plan's. Each question changes one of these things, and the
planner's own functions choose again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tula_hpc.analysis.planning.candidates import FEASIBLE, priced, stacked
from tula_hpc.analysis.planning.constraints import (
    Constraint,
    constrain,
    constraints_of,
    nearest_outside,
)
from tula_hpc.analysis.planning.knee import TimeCurves, knee_curves
from tula_hpc.analysis.planning.objective import choose, objective_of
from tula_hpc.analysis.planning.partitions import FittedPartitions, prefixed
from tula_hpc.analysis.run_contents import RunContents
from tula_hpc.config import SweepSpec
from tula_hpc.formatting import HOUR_S, format_duration, format_money, plural
from tula_hpc.records import Candidate, Plan

# factors on the price of the chosen nodes
PRICES = (0.5, 2.0)
# deadlines as shares of the choice's expected time
DEADLINES = (0.75, 0.5)
# budget as a share of the choice's cost
BUDGET = 0.5
# how many other numbers of nodes are tried, nearest to the chosen one
OTHER_NODES = 3
OBJECTIVES = {"time": "time as the objective", "cost": "cost as the objective"}
# for each pricing basis the key of its price, and the unit
PRICE_KEYS = {
    "node-hour": ("usd_per_node_hour", "a node-hour"),
    "spot": ("usd_per_spot_node_hour", "a spot node-hour"),
    "memory": ("usd_per_gib_hour", "a GiB-hour"),
    "energy": ("usd_per_kwh", "a kilowatt-hour"),
    "tres": ("usd_per_unit", "a billing unit and hour"),
}


class WhatIf(NamedTuple):
    """A change, and the plan's choice under it."""

    change: str
    # None: no candidate meets the changed constraints
    chosen: Candidate | None
    # if none meets them, the candidate that comes nearest
    nearest: Candidate | None = None
    # keys of the sweep's own limits that this one breaks; what is asked for may not be at fault
    broken: tuple[str, ...] = ()


def what_if(run: RunContents, fitted: FittedPartitions | None) -> list[WhatIf]:
    """Answer all questions for a run's plan; none without a plan or models, see `answers`."""
    if run.plan is None or run.sweep is None or fitted is None:
        return []
    try:
        return answers(run.sweep, fitted, run.plan)
    except Exception:  # noqa: BLE001 - records may be old or damaged; the report needs no what-if
        return []


def answers(sweep: SweepSpec, fitted: FittedPartitions, plan: Plan) -> list[WhatIf]:
    """Answer all questions for a plan, with the plan itself as the first row.

    Empty if the models choose otherwise: the plan then comes from another version or from other
    measurements.
    """
    sweep = sweep.model_copy(update={"objective": objective_of(plan, sweep.objective)})
    curves = knee_curves(fitted.parts, sweep, with_draws=False)
    question = _Question(sweep, fitted, curves, constraints_of(sweep.objective))
    usual = question.ask("as planned")
    found = usual.chosen
    own = (plan.chosen.partition, plan.chosen.configuration)
    if found is None or (found.partition, found.configuration) != own:
        return []
    # the plan's own record has intervals, too
    return [usual._replace(chosen=plan.chosen), *_changes(question, plan.chosen)]


class _Question(NamedTuple):
    """Sweep, models and curves that decide a choice, and the limits before any change."""

    sweep: SweepSpec
    fitted: FittedPartitions
    curves: TimeCurves | None
    own: Sequence[Constraint]

    def ask(self, change: str) -> WhatIf:
        """Choose as the planner does."""
        objective = self.sweep.objective
        table = constrain(self.fitted.table, objective)
        if np.any(table.why == FEASIBLE):
            best = int(choose(objective, table, self.curves).ranking[0])
            return WhatIf(change, self.fitted.record(best))
        row = nearest_outside(table, objective)
        if row is None:
            return WhatIf(change, None)
        nearest = self.fitted.record(row)
        kept = [limit for limit in constraints_of(objective) if limit in self.own]
        broken = tuple(limit.key for limit in kept if limit.amount(nearest) > limit.limit)
        return WhatIf(change, None, nearest, broken)

    def with_objective(self, **changes: object) -> _Question:
        objective = self.sweep.objective.model_copy(update=changes)
        return self._replace(sweep=self.sweep.model_copy(update={"objective": objective}))

    def on_nodes(self, nodes: int) -> _Question:
        """Return the question for one number of nodes; the knee stays that of all numbers."""
        table = self.fitted.table.take(self.fitted.table.nodes == nodes)
        return self._replace(fitted=self.fitted._replace(table=table))

    def with_price(self, index: int, key: str, price: float) -> _Question:
        parts = list(self.fitted.parts)
        cluster = parts[index].cluster
        pricing = cluster.pricing.model_copy(update={key: price})
        cluster = cluster.model_copy(update={"pricing": pricing})
        parts[index] = parts[index]._replace(cluster=cluster)
        tables = []
        for number, part in enumerate(parts):
            mine = self.fitted.table.take(self.fitted.table.part == number)
            tables.append(priced(number, part, mine.grid, self.sweep, mine.step_time_s))
        fitted = self.fitted._replace(parts=tuple(parts), table=stacked(tables))
        return self._replace(fitted=fitted)


def _changes(question: _Question, chosen: Candidate) -> Iterator[WhatIf]:
    others = set(question.fitted.table.nodes.tolist()) - {chosen.nodes}
    nearest = sorted(others, key=lambda nodes: (abs(math.log(nodes / chosen.nodes)), nodes))
    for nodes in sorted(nearest[:OTHER_NODES]):
        yield question.on_nodes(nodes).ask(f"on {plural(nodes, 'node')}")
    yield from _other_prices(question, chosen)
    for share in DEADLINES:
        seconds = share * chosen.wall_time_s
        sooner = question.with_objective(deadline_hours=seconds / HOUR_S)
        answer = sooner.ask(f"a deadline of {format_duration(seconds)}")
        yield answer
        # no candidate can meet a shorter deadline either
        if answer.chosen is None:
            break
    if chosen.cost > 0:
        budget = BUDGET * chosen.cost
        smaller = question.with_objective(budget=budget)
        yield smaller.ask(f"a budget of {format_money(budget, chosen.currency)}")
    for kind, change in OBJECTIVES.items():
        if kind != question.sweep.objective.kind:
            yield question.with_objective(kind=kind).ask(change)


def _other_prices(question: _Question, chosen: Candidate) -> Iterator[WhatIf]:
    """Ask with other prices of the chosen nodes; yield nothing if the nodes are free."""
    names = [part.name for part in question.fitted.parts]
    index = names.index(chosen.partition)
    pricing = question.fitted.parts[index].cluster.pricing
    key, unit = PRICE_KEYS[pricing.basis]
    price = getattr(pricing, key)
    for factor in PRICES if price else ():
        text = f"{format_money(factor * price)} {unit}"
        name = chosen.partition if len(names) > 1 else ""
        yield question.with_price(index, key, factor * price).ask(prefixed(name, text))
