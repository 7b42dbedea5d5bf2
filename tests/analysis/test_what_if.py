"""The table of other prices, nodes, deadlines and objectives: each row is what a plan with them would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.known import known
from tests.planning_data import SWEEP_FILE, cluster, grid, sweep
from tula_hpc.analysis.plan import main, make_plan
from tula_hpc.analysis.planning.knee import batches_up_to
from tula_hpc.analysis.planning.partitions import FittedPartitions, fit_parts
from tula_hpc.analysis.report.tables import WHAT_IF_COLUMNS, not_possible, nothing_changes, what_if_table
from tula_hpc.analysis.what_if import WhatIf, answers
from tula_hpc.config import SweepSpec
from tula_hpc.formatting import format_duration, format_money, plural
from tula_hpc.records import Candidate, RunDirectory, append_record

ROWS = grid()
SPEC = sweep("knee", cluster_sizes=[1, 2, 4], min_batch=32, max_batch=1024)
PRICED = cluster(max_nodes=4, pricing={"usd_per_node_hour": 2.0})


@pytest.fixture(scope="module")
def fitted() -> FittedPartitions:
    return fit_parts(SPEC, PRICED, ROWS)


@pytest.fixture(scope="module")
def found(fitted: FittedPartitions) -> dict[str, WhatIf]:
    return {row.change: row for row in answers(SPEC, fitted, make_plan(SPEC, PRICED, ROWS))}


def with_objective(**changes: Any) -> SweepSpec:
    return SPEC.model_copy(update={"objective": SPEC.objective.model_copy(update=changes)})


def alike(one: Candidate | None, other: Candidate) -> None:
    assert one is not None
    assert one.configuration == other.configuration
    assert one.wall_time_s == pytest.approx(other.wall_time_s)
    assert one.cost == pytest.approx(other.cost)


def test_each_answer_is_what_a_plan_would_choose(found: dict[str, WhatIf]) -> None:
    first, *_ = found
    planned = make_plan(SPEC, PRICED, ROWS).chosen
    assert first == "as planned"
    assert found[first].chosen == planned
    alike(found["time as the objective"].chosen, make_plan(with_objective(kind="time"), PRICED, ROWS).chosen)
    alike(found["cost as the objective"].chosen, make_plan(with_objective(kind="cost"), PRICED, ROWS).chosen)


def test_on_other_nodes_the_knee_is_the_plans(found: dict[str, WhatIf]) -> None:
    plan = make_plan(SPEC, PRICED, ROWS)
    assert plan.knee is not None
    assert plan.knee.global_batch is not None
    most = batches_up_to("knee", np.array(plan.knee.global_batch))
    others = {1, 2, 4} - {plan.chosen.nodes}
    assert {words for words in found if words.startswith("on ")} == {f"on {plural(n, 'node')}" for n in others}
    for nodes in others:
        allowed = [c for c in plan.candidates if c.feasible and c.nodes == nodes and c.global_batch <= most]
        alike(found[f"on {plural(nodes, 'node')}"].chosen, min(allowed, key=lambda c: c.wall_time_s))


def test_another_price_is_paid(found: dict[str, WhatIf]) -> None:
    half, double = found["1.00 USD a node-hour"].chosen, found["4.00 USD a node-hour"].chosen
    assert half is not None
    assert double is not None
    assert double.cost == pytest.approx(4 * half.cost)
    alike(double, make_plan(SPEC, cluster(max_nodes=4, pricing={"usd_per_node_hour": 4.0}), ROWS).chosen)


def test_a_deadline_is_kept_or_said_to_be_impossible(found: dict[str, WhatIf]) -> None:
    planned = known(found["as planned"].chosen)
    deadlines = [row for change, row in found.items() if change.startswith("a deadline of ")]
    assert deadlines
    for share, row in zip((0.75, 0.5), deadlines, strict=False):
        assert row.chosen is not None or row is deadlines[-1], "a shorter deadline is not kept, either"
        if row.chosen is not None:
            assert row.chosen.wall_time_s <= share * planned.wall_time_s
        else:
            assert known(row.nearest).wall_time_s > share * planned.wall_time_s


def test_half_the_cost_is_kept_or_said_to_be_impossible(found: dict[str, WhatIf]) -> None:
    planned = known(found["as planned"].chosen)
    half = found[f"a budget of {format_money(0.5 * planned.cost, 'USD')}"]
    if half.chosen is None:
        (words,) = (words for words in not_possible([half]))
        assert words.endswith(f" and {format_money(known(half.nearest).cost, 'USD')}.")
    else:
        alike(half.chosen, make_plan(with_objective(budget=0.5 * planned.cost), PRICED, ROWS).chosen)


def test_a_change_that_only_the_sweeps_own_limits_forbid_is_told_with_them(
    fitted: FittedPartitions, found: dict[str, WhatIf]
) -> None:
    planned = known(found["as planned"].chosen)
    # on no other number of nodes is a candidate as cheap; half the cost is kept later than the deadline
    limits = {"budget": 1.01 * planned.cost, "deadline_hours": 1.01 * planned.wall_time_s / 3600}
    spec = with_objective(kind="time", **limits)
    asked = answers(spec, fitted, make_plan(spec, PRICED, ROWS))
    impossible = [row for row in asked if row.chosen is None]
    assert any(row.broken for row in impossible)
    for row in impossible:
        assert row.nearest is not None
        broken = []
        if row.nearest.cost > limits["budget"]:
            broken.append("objective.budget")
        if row.nearest.wall_time_s > 3600 * limits["deadline_hours"]:
            broken.append("objective.deadline_hours")
        (words,) = not_possible([row])
        if "deadline" in row.change or "budget" in row.change:
            # the limit that is asked for is named by its amount
            broken = [key for key in broken if key.partition(".")[2].split("_")[0] not in row.change]
        assert sorted(row.broken) == broken
        within = f" within {' and '.join(row.broken)}" if broken else ""
        assert words.startswith(f"Not possible: {row.change}{within}; ")


def test_a_plan_of_other_measurements_is_asked_nothing(fitted: FittedPartitions) -> None:
    plan = make_plan(SPEC, PRICED, ROWS)
    other = plan.model_copy(update={"chosen": plan.chosen.model_copy(update={"local_batch": 3})})
    assert answers(SPEC, fitted, other) == []


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.sweep_file.write_text(SWEEP_FILE + "[search]\ncluster_sizes = [1, 2, 4]\nmin_batch = 32\nmax_batch = 1024\n")
    run.cluster_file.write_text("max_nodes = 4\n[pricing]\nusd_per_node_hour = 2.0\n")
    for row in ROWS:
        append_record(run.profile / "x.jsonl", row)
    assert main([str(run.root), "--what-if"]) == 0
    printed = capsys.readouterr().out
    for words in ("as planned", "on 2 nodes", "4.00 USD a node-hour", "cost as the objective"):
        assert words in printed


def test_the_table_has_a_row_for_each_change(found: dict[str, WhatIf]) -> None:
    rows = [*found.values(), WhatIf("a budget of nothing", None)]
    table = what_if_table(rows)
    assert table.columns == WHAT_IF_COLUMNS
    assert [row[0] for row in table.rows] == [row.change for row in rows if row.chosen]
    assert not_possible(rows)[-1] == "Not possible: a budget of nothing."
    assert len(not_possible(rows)) == len(rows) - len(table.rows)
    assert {len(row) for row in table.rows} == {len(WHAT_IF_COLUMNS)}
    assert nothing_changes(rows) == ""


def test_rows_are_printed_as_far_apart_as_they_are(found: dict[str, WhatIf]) -> None:
    planned = known(found["as planned"].chosen)

    def printed(ratio: float) -> list[str]:
        time_s = ratio * 51.9
        changes = {"wall_time_s": time_s, "interval_90": {"wall_time_s": (40.0, 70.0)}}
        other = planned.model_copy(update=changes)
        first = planned.model_copy(update={**changes, "wall_time_s": 51.9})
        return [row[2] for row in what_if_table([WhatIf("", first), WhatIf("", other)]).rows]

    assert printed(0.93) == ["51.9 s", "48.3 s"], "both are 50 s with the digits of their interval"
    assert printed(0.75) == ["51.9 s", "38.9 s"]


def test_where_no_change_leads_to_another_choice_a_sentence_says_so(found: dict[str, WhatIf]) -> None:
    planned = found["as planned"].chosen
    rows = [WhatIf("as planned", planned), WhatIf("on 1 node", planned), WhatIf("a deadline", None, planned)]
    assert planned is not None
    ends = f"{format_duration(planned.wall_time_s)} and {format_money(planned.cost, 'USD')}"
    nearest = f"{planned.configuration} comes nearest, with {ends}"
    impossible = f"Not possible: a deadline; {nearest}."
    assert nothing_changes(rows) == f"None of these changes the choice: on 1 node. {impossible}"
    assert nothing_changes(rows[::2]) == impossible
