from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from tests.known import known
from tests.planning_data import (
    CORNERS,
    MIB,
    SAMPLES,
    SWEEP_FILE,
    cluster,
    failed,
    grid,
    memory,
    ok,
    oom,
    peak_bytes,
    step_time_s,
    sweep,
    times,
)
from tests.study_factory import SWEEP as STUDY
from tests.table_factory import Row, table_of
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.plan import main, make_plan
from tula_hpc.analysis.planning import feasibility
from tula_hpc.analysis.planning.constraints import constrain
from tula_hpc.analysis.planning.knee import knee_curves
from tula_hpc.analysis.planning.objective import choose
from tula_hpc.analysis.planning.partitions import FittedPartitions, fit_parts
from tula_hpc.analysis.report.plan_text import alternatives, sentences, too_close_to_call
from tula_hpc.analysis.run_contents import measured_epoch
from tula_hpc.config import GIB, ObjectiveSpec, SweepSpec, TrainingSpec, load_sweep
from tula_hpc.errors import InfeasibleError, NotEnoughDataError
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import not_a_run
from tula_hpc.formatting import command_line, format_duration, in_comparison
from tula_hpc.records import (
    Candidate,
    Configuration,
    Measurement,
    Metrics,
    Plan,
    RunDirectory,
    StepMetrics,
    append_record,
)

SWEEP = f"""{SWEEP_FILE}
[search]
mode = "partial"
"""


def by_configuration(plan: Plan) -> dict[Configuration, Candidate]:
    return {candidate.configuration: candidate for candidate in plan.candidates}


def test_a_plan_predicts_every_candidate_from_four_corners() -> None:
    plan = make_plan(sweep("cost"), cluster(), CORNERS)
    assert len(plan.candidates) == 18
    assert [c.configuration for c in plan.candidates if c.measured] == [row.configuration for row in CORNERS]
    for candidate in plan.candidates:
        assert candidate.step_time_s == pytest.approx(step_time_s(candidate.nodes, candidate.local_batch), rel=0.03)
        assert candidate.peak_memory_bytes == pytest.approx(peak_bytes(candidate.local_batch), rel=1e-3)
    assert plan.warnings == []
    assert "full batches of 1,024 leave out 3 % of the 20,000 samples in every epoch" in plan.notes
    assert plan.models["step_time"]["form"] == "auto"


@pytest.mark.parametrize("basis", ["node-hour", "memory"])
def test_times_and_costs_follow_from_the_step_time(basis: str) -> None:
    spec = sweep(workload={"epochs": 7})
    pricing = {"basis": basis, "usd_per_node_hour": 2.48, "usd_per_gib_hour": 0.15}
    for c in make_plan(spec, cluster(pricing=pricing), grid()).candidates:
        assert c.epoch_time_s == pytest.approx(SAMPLES // c.global_batch * c.step_time_s)
        assert c.train_time_s == pytest.approx(7 * c.epoch_time_s)
        hours = c.wall_time_s / 3600 * c.nodes
        assert c.cost == pytest.approx(hours * (2.48 if basis == "node-hour" else c.peak_memory_bytes / GIB * 0.15))
        for name in ("step_time_s", "epoch_time_s", "train_time_s", "cost"):
            low, high = c.interval_90[name]
            assert low < getattr(c, name) < high


@pytest.mark.processes
def test_a_prediction_is_no_surer_than_what_was_measured() -> None:
    """A model that meets every mean shows no scatter, however far off each mean may be."""

    def planned(off: float) -> Plan:
        rows = []
        for row in CORNERS:
            assert row.times is not None
            step = row.times.step_time_s
            times = row.times.model_copy(update={"step_time_high_s": off * step, "step_time_low_s": step / off})
            rows.append(row.model_copy(update={"times": times, "converged": off < 1.02}))
        return make_plan(sweep(), cluster(), rows)

    def step_ends(plan: Plan, configuration: Configuration) -> tuple[float, float]:
        found = known(plan.find(configuration))
        low, high = (end / found.step_time_s for end in found.interval_90["step_time_s"])
        return low, high

    plans = [planned(off) for off in (1.0, 1.01, 1.6, 9.0)]
    for configuration in (CORNERS[0].configuration, Configuration(2, 1, 64)):
        exact, sure, noisy, unknown = (step_ends(plan, configuration) for plan in plans)
        assert sure == pytest.approx(exact, rel=0.01)
        assert noisy[0] < 1.6**-0.8
        assert noisy[1] > 1.6**0.8
        # a measurement without information is not used
        assert unknown[1] < 2 * exact[1]


@pytest.mark.parametrize("objective", ["knee", "time", "cost"])
def test_the_chosen_one_is_feasible_and_best(objective: str) -> None:
    plan = make_plan(sweep(objective), cluster(), grid())
    feasible = [candidate for candidate in plan.candidates if candidate.feasible]
    assert plan.chosen in feasible
    assert str(plan.chosen.configuration) in plan.reason
    if objective == "time":
        assert plan.chosen.train_time_s == min(candidate.train_time_s for candidate in feasible)
    if objective == "cost":
        assert plan.chosen.cost == min(candidate.cost for candidate in feasible)


def test_a_plan_survives_json_and_has_the_published_fields() -> None:
    plan = make_plan(sweep(), cluster(), CORNERS)
    text = plan.model_dump_json(by_alias=True)
    assert Plan.model_validate_json(text) == plan
    tables = json.loads(text)
    assert tables["schema"] == 1
    assert {"objective", "chosen", "candidates", "fallbacks", "models", "warnings"} <= tables.keys()
    assert {"form", "parameters", "pinned", "residual_median"} <= tables["models"]["step_time"].keys()


def test_the_order_of_the_measurements_does_not_matter() -> None:
    rows = [*grid(), ok(1, 32, times=times(1, 32, step_time_s=9.0)), oom(1, 2048), failed(2, 16)]
    assert make_plan(sweep(), cluster(), rows[::-1]) == make_plan(sweep(), cluster(), rows)


def test_the_memory_limit_less_its_margin_is_respected() -> None:
    limit = cluster(memory_gb=2.0, memory_margin=0.3)
    plan = make_plan(sweep("time"), limit, CORNERS)
    for candidate in plan.candidates:
        assert candidate.feasible == (candidate.peak_memory_bytes <= 1.4 * GIB)
        assert candidate.feasible or "more than 1.4 GiB (limit 2 GiB less a margin of 30 %)" in candidate.why
    assert plan.memory_limit_bytes == 2 * GIB
    near = [candidate for candidate in plan.candidates if 1.4 * GIB < candidate.peak_memory_bytes <= 2 * GIB]
    assert near


def test_the_limit_counts_the_whole_process_or_what_the_allocator_reserved() -> None:
    rows = [ok(1, b, memory=memory(b, peak_bytes=1, reserved_bytes=(300 + b) * MIB)) for b in (32, 64, 128)]
    for limits in (cluster(memory_gb=1.0), cluster(device="cuda", device_memory_gb=1.0)):
        plan = make_plan(sweep(cluster_sizes=[1]), limits, rows)
        assert plan.chosen.peak_memory_bytes == pytest.approx((300 + plan.chosen.local_batch) * MIB, rel=1e-3)


@pytest.mark.parametrize(("device", "workers", "fits"), [("cpu", 1, False), ("cpu", 4, True), ("cuda", 1, True)])
def test_on_cpus_there_has_to_be_room_for_the_copy_that_a_checkpoint_is_written_from(
    device: str, workers: int, fits: bool
) -> None:
    """The copy is 80 MiB for one of a node's workers; on GPUs it is in host memory, for which there is no limit."""
    spec = sweep("time").model_copy(update={"training": TrainingSpec(method="lbt")})
    rows = [row.model_copy(update={"workers_per_node": workers}) for row in CORNERS]
    room = (peak_bytes(256) + 30 * MIB) / GIB / 0.9
    key, amount = ("device_memory_gb", room) if device == "cuda" else ("memory_gb", workers * room)
    plan = make_plan(spec, cluster(device=device, workers_per_node=workers, memory_margin=0.1, **{key: amount}), rows)
    large = [candidate for candidate in plan.candidates if candidate.local_batch == 256]
    assert {candidate.feasible for candidate in large} == {fits}
    assert fits or "and more while the gradient scale is updated and a checkpoint is written" in large[0].why
    assert any("the first node holds 80 MiB more in host memory" in note for note in plan.notes)


def test_a_bound_from_running_out_of_memory_is_respected() -> None:
    plan = make_plan(sweep("time"), cluster(), [*CORNERS, oom(1, 128)])
    for candidate in plan.candidates:
        assert candidate.feasible == (candidate.local_batch < 128)
        assert candidate.feasible or candidate.why == "local batch 128 ran out of memory"
    assert plan.chosen.local_batch == 64
    assert plan.models["memory"]["oom_local_batch"] == 128


def test_a_batch_larger_than_the_data_set_is_not_feasible() -> None:
    rows = [row.model_copy(update={"dataset_samples": 600}) for row in CORNERS]
    plan = make_plan(sweep("time"), cluster(), rows)
    assert {candidate.feasible for candidate in plan.candidates if candidate.global_batch > 600} == {False}
    assert {candidate.feasible for candidate in plan.candidates if candidate.global_batch <= 600} == {True}


def test_no_feasible_candidate_is_an_error_that_says_why_and_what_to_do() -> None:
    with pytest.raises(InfeasibleError, match=r"none of 18 .* N=4 b=8 .* GiB per worker.*; even one sample would need"):
        make_plan(sweep(), cluster(memory_gb=0.1), CORNERS)
    # the copy that a checkpoint is written from
    copy = memory(1).parameter_bytes + memory(1).optimizer_bytes
    needs = "GiB per worker"
    for held, advice in ((0, "even one sample would need"), (copy, "lower search.min_batch, allow")):
        roomy = 1.001 * (peak_bytes(1) + held) / GIB / (1 - cluster().memory_margin)
        with pytest.raises(InfeasibleError, match=rf"none of 18 .* {needs}.*; {re.escape(advice)}"):
            make_plan(sweep(), cluster(memory_gb=roomy), CORNERS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no usable measurement; run the sweep again"),
        (
            [ok(1, 32), failed(1, 64)],
            r"N=1 b=64.*ValueError: no.*; fix that and run the sweep again to profile what is",
        ),
        (
            [oom(1, 32), failed(2, 16)],
            r"no usable measurement \(.*N=2 b=16.*ValueError: no.*; N=1 b=32.*out of memory\)",
        ),
        ([ok(1, 32), ok(2, 32)], "only local batch 32 was measured"),
        ([ok(1, 32, dataset_samples=0), ok(1, 64, dataset_samples=0)], "how many training samples"),
        ([ok(3, 32), ok(3, 64)], "only N=3 was measured, which is not in search.cluster_sizes"),
    ],
)
def test_too_little_data_is_an_error_that_says_what_is_missing(rows: list[Measurement], message: str) -> None:
    with pytest.raises(NotEnoughDataError, match=message):
        make_plan(sweep(), cluster(), rows)


def test_one_cluster_size_plans_only_itself_and_says_so() -> None:
    plan = make_plan(sweep("time"), cluster(), [ok(2, 16), ok(2, 512)])
    assert {candidate.nodes for candidate in plan.candidates} == {2}
    assert any("only N=2 was measured: nothing can be said about N=1, N=4" in warning for warning in plan.warnings)


def test_fallbacks_are_smaller_the_next_smaller_on_as_many_nodes_first() -> None:
    plan = make_plan(sweep("time"), cluster(), [*CORNERS, oom(1, 1024)])
    chosen, same = plan.chosen, [c for c in plan.fallbacks if c.nodes == plan.chosen.nodes]
    assert all(c.feasible and c.local_batch < chosen.local_batch for c in plan.fallbacks)
    assert plan.fallbacks[: len(same)] == same
    assert [c.local_batch for c in same] == [chosen.local_batch // 2**k for k in range(1, len(same) + 1)]
    others = plan.fallbacks[len(same) :]
    assert [c.train_time_s for c in others] == sorted(c.train_time_s for c in others)
    smaller = [c for c in plan.candidates if c.feasible and c.local_batch < chosen.local_batch]
    assert {c.configuration for c in plan.fallbacks} == {c.configuration for c in smaller}


def warnings_of(rows: list[Measurement], objective: str = "time", samples: int = SAMPLES) -> str:
    rows = [row.model_copy(update={"dataset_samples": samples}) if samples != SAMPLES else row for row in rows]
    return "\n".join(make_plan(sweep(objective), cluster(), rows).warnings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exclusive": False}, "shared their nodes with other jobs: N=1 b=32"),
        ({"emulated": True}, "were made with all nodes on one machine"),
        ({"dataset_samples": 5}, "data sets of different size"),
    ],
)
def test_doubts_about_a_measurement_become_warnings(changes: dict[str, object], message: str) -> None:
    assert message in warnings_of([ok(1, 32, **changes), *CORNERS[1:]])


def test_missing_measurements_become_warnings() -> None:
    rows = [*CORNERS[:3], failed(4, 256), failed(4, 256)]
    found = warnings_of(rows)
    assert "N=4 b=256 (B=1024) was not measured: bug: ValueError: no" in found
    assert warnings_of([*rows, failed(4, 512)]) == found, "it is beyond search.max_batch, which may have been larger"
    assert "not yet profiled: N=4 b=256" in warnings_of(CORNERS[:3])
    assert "not yet profiled" not in warnings_of([*CORNERS[:3], failed(4, 256)])
    assert "2 damaged lines" in "\n".join(make_plan(sweep(), cluster(), CORNERS, skipped_lines=2).warnings)
    other = [row.model_copy(update={"workers_per_node": 2}) for row in CORNERS]
    assert "not run with 1 worker per node: N=1 b=32" in warnings_of([*CORNERS, *other])


def test_candidates_beyond_the_profiled_range_become_a_warning() -> None:
    found = warnings_of([ok(1, 32), ok(1, 64), ok(4, 8), ok(4, 16), failed(4, 256), failed(4, 256)])
    assert (
        "feasible candidates, the chosen one among them, lie beyond the profiled range (N 1 to 4, b 8 to 64)" in found
    )


def test_samples_that_full_batches_leave_out_become_a_warning() -> None:
    assert "full batches of 1,024 leave out 49 % of the 2,000 samples" in warnings_of(CORNERS, samples=2000)
    assert "leave out" not in warnings_of(CORNERS, samples=2 * 1024)


def test_more_batches_are_counted_if_they_are_smaller_than_asked_for() -> None:
    """Such a script cuts its batches by tokens, for example."""
    rows = [row.model_copy(update={"short_batch": True}) for row in CORNERS]
    smaller = [row.model_copy(update={"batch_share": 0.9}) for row in rows]
    usual, longer = (make_plan(sweep("time"), cluster(), each) for each in (rows, smaller))
    assert longer.chosen.epoch_time_s == pytest.approx(usual.chosen.epoch_time_s / 0.9)
    found = [measured_epoch(each[0], 1000) for each in (rows, smaller)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].value == pytest.approx(found[0].value / 0.9)


def test_an_epoch_without_a_full_batch_is_not_planned() -> None:
    """Batches that are larger than asked for may exceed all samples: no time at all would be the least time."""
    rows = [row.model_copy(update={"batch_share": 1.25, "dataset_samples": 1200}) for row in CORNERS]
    plan = make_plan(sweep("time"), cluster(), rows)
    assert plan.chosen.global_batch == 512
    for candidate in plan.candidates:
        assert candidate.feasible == (1.25 * candidate.global_batch <= 1200)
        if not candidate.feasible:
            is_larger = candidate.global_batch > 1200
            words = "global batch exceeds the 1,200 training samples"
            assert candidate.why == words if is_larger else candidate.why.endswith(": an epoch has no step")
    assert "leave out 47 % of the 1,200 samples" in "\n".join(plan.warnings)


def test_a_shorter_last_batch_leaves_out_nothing_and_counts_as_its_share_of_a_step() -> None:
    rows = [row.model_copy(update={"dataset_samples": 2000, "short_batch": True}) for row in CORNERS]
    plan = make_plan(sweep("time"), cluster(), rows)
    assert "leave out" not in "\n".join([*plan.warnings, *plan.notes])
    for row in plan.candidates:
        assert row.epoch_time_s / row.step_time_s == pytest.approx(2000 / row.global_batch)


@pytest.mark.parametrize(("left_out", "is_said"), [(1023, True), (1004, True), (1003, False)])
def test_left_out_samples_are_mentioned_from_one_percent_on(left_out: int, is_said: bool) -> None:
    # the fastest candidate takes batches of 1,024
    samples = 97 * 1024 + left_out
    assert (left_out / samples >= 0.01) == is_said
    message = f"full batches of 1,024 leave out 1 % of the {samples:,} samples in every epoch"
    rows = [row.model_copy(update={"dataset_samples": samples}) for row in CORNERS]
    assert message not in warnings_of(rows)
    assert (message in make_plan(sweep(), cluster(), rows).notes) == is_said


@pytest.mark.parametrize(("trained", "expected"), [(1.0, ""), (0.25, "; 75.0 % of its model was not trained while it")])
def test_a_plan_of_a_script_says_that_it_is_of_its_first_training_as_it_begins(trained: float, expected: str) -> None:
    rows = []
    for row in CORNERS:
        assert row.memory is not None
        of_all = row.memory.parameter_bytes
        memory = row.memory.model_copy(update={"gradient_bytes": round(trained * of_all)})
        rows.append(row.model_copy(update={"memory": memory}))
    spec = sweep("time")
    script = {"script": Path("train.py"), "arguments": ("{local_batch}",), "samples": 20_000}
    of_script = spec.model_copy(update={"workload": spec.workload.model_copy(update=script)})
    found = [
        [note for note in make_plan(each, cluster(), rows).notes if "first training" in note]
        for each in (spec, of_script)
    ]
    assert found[0] == []
    (note,) = found[1]
    assert note.partition("make it longer")[2].startswith(expected)
    assert bool(expected) == (";" in note)


def test_the_knee_is_that_of_the_fitted_curve() -> None:
    rows = [ok(4, 8), ok(4, 2048)]
    plan = make_plan(sweep(cluster_sizes=[4], max_batch=8192), cluster(), rows)
    # 3 α/β of a step of 0.1 s and 0.25 ms for each sample of the global batch
    assert known(plan.knee).global_batch == pytest.approx(1200, rel=0.1)
    assert plan.chosen.global_batch == 1024
    assert "the fastest feasible configuration with a batch up to B=1,2" in plan.reason
    short = make_plan(sweep(cluster_sizes=[4], max_batch=512), cluster(), [ok(4, 8), ok(4, 128)])
    searched = ": it is the fastest feasible configuration that was searched. The search ended at B=512 and 4 nodes: "
    assert f"{searched}larger batches would still pay, up to B=1,2" in short.reason
    near = make_plan(sweep(cluster_sizes=[4], max_batch=1024), cluster(), [ok(4, 8), ok(4, 128)])
    assert "The search ended" not in near.reason, "the next batch is beyond the knee"


def test_larger_batches_are_not_said_to_pay_where_those_that_were_searched_do_not() -> None:
    spec = sweep(cluster_sizes=[4], max_batch=512)
    fitted = fit_parts(spec, cluster(), [ok(4, 8), ok(4, 128)])
    table = constrain(fitted.table, spec.objective)
    curves = knee_curves(fitted.parts, spec)
    assert "larger batches would still pay" in choose(spec.objective, table, curves).reason
    # a measured step far below the curve
    quick = np.where(table.global_batch == 64, 0.1, 1.0) * table.wall_time_s
    reason = choose(spec.objective, table._replace(wall_time_s=quick), curves).reason
    assert "it is the fastest feasible configuration that was searched. The search ended at " in reason
    assert (
        "Larger batches are not faster here, though by the fitted curve they would be, up to its knee at B=1,2"
        in reason
    )
    assert "would still pay" not in reason


def test_batches_that_the_user_forbids_are_not_said_to_be_slower() -> None:
    spec = sweep(cluster_sizes=[4], max_batch=512)
    limited = spec.model_copy(update={"objective": ObjectiveSpec(max_global_batch=128)})
    plan = make_plan(limited, cluster(), [ok(4, 8), ok(4, 128)])
    assert plan.chosen.global_batch == 128
    assert "it is the fastest feasible configuration with a batch up to B=1,2" in plan.reason
    assert "Larger batches are not faster" not in plan.reason


def test_a_batch_whose_loss_is_not_finite_is_not_chosen_on_any_number_of_nodes() -> None:
    fastest = make_plan(sweep("time"), cluster(), CORNERS).chosen
    diverged = failed(1, fastest.local_batch, failure=Failure.DIVERGED, detail="the loss is not finite")
    rows = [row for row in CORNERS if row.local_batch != fastest.local_batch]
    plan = make_plan(sweep("time"), cluster(), [*rows, ok(4, 128), diverged])
    assert plan.chosen.local_batch != fastest.local_batch
    whys = {c.why for c in plan.candidates if c.local_batch == fastest.local_batch}
    assert whys == {"its loss was not finite in a profile"}


def test_a_choice_whose_profile_failed_is_not_said_to_have_been_too_expensive_to_profile() -> None:
    spec = sweep("time", workload={"epochs": 1}, cluster_sizes=[1], min_batch=32, max_batch=256, mode="full")
    crashed = [failed(1, 256)] * 2
    plan = make_plan(spec, cluster(), [ok(1, 32), ok(1, 64), ok(1, 128), *crashed])
    assert plan.chosen.configuration == Configuration(1, 1, 256)
    assert plan.profile_share is None
    assert f"{plan.chosen.configuration} was not measured: " in " ".join(plan.warnings)


def test_a_curve_without_a_knee_is_said_to_have_none() -> None:
    flat = [ok(1, b, times=times(1, b, step_time_s=0.001 * b, compute_time_s=0.001 * b)) for b in (32, 128, 1024)]
    plan = make_plan(sweep("kneedle", cluster_sizes=[1]), cluster(), flat)
    message = " ".join(sentences(plan))
    assert message.count("the curve has no knee") == 1
    assert "no knee: " not in message
    assert "of the curves that the measurements allow have no knee; the others have theirs between" in message


def planned(
    kind: str = "time", rows: list[Measurement] | None = None, pricing: object = None, **objective: Any
) -> Plan:
    spec = sweep(kind)
    limited = spec.model_copy(update={"objective": ObjectiveSpec.model_validate({"kind": kind, **objective})})
    return make_plan(limited, cluster(pricing=pricing or {}), CORNERS if rows is None else rows)


def test_what_is_chosen_keeps_the_constraints_and_the_rest_says_which_it_breaks() -> None:
    free = planned()
    middle = sorted(c.wall_time_s for c in free.candidates)[9]
    plan = planned("cost", deadline_hours=middle / 3600)
    for candidate in plan.candidates:
        assert candidate.feasible == (candidate.wall_time_s <= middle)
        assert candidate.why == ("" if candidate.feasible else "after the deadline")
    assert plan.chosen.cost == min(c.cost for c in plan.candidates if c.feasible)
    assert all(c.feasible for c in (*plan.fallbacks, *plan.runners_up, *plan.pareto))
    batch = planned(max_global_batch=128)
    assert batch.chosen.global_batch <= 128
    assert {c.why for c in batch.candidates if c.global_batch > 128} == {"batch too large"}
    budget = planned(budget=sorted(c.cost for c in free.candidates)[9])
    assert {c.why for c in budget.candidates} == {"", "over the budget"}


def test_a_constraint_that_decides_is_named_with_what_it_rules_out() -> None:
    wished = planned("cost").chosen
    plan = planned("cost", deadline_hours=0.99 * wished.wall_time_s / 3600)
    assert str(wished.configuration) in plan.binding[0]
    assert "over objective.deadline_hours" in plan.binding[0]
    assert planned("time", deadline_hours=0.99 * wished.wall_time_s / 3600).binding == []
    assert planned("cost").binding == []


def test_each_constraint_is_dropped_alone_to_see_whether_it_decides() -> None:
    wished = planned("cost").chosen
    limits: dict[str, Any] = {
        "deadline_hours": 0.99 * wished.wall_time_s / 3600,
        "max_global_batch": wished.global_batch // 2,
    }
    plan = planned("cost", **limits)
    assert len(plan.binding) == len(limits)
    for text, key in zip(plan.binding, limits, strict=True):
        others = {other: limit for other, limit in limits.items() if other != key}
        assert text.startswith(f"without objective.{key}, {planned('cost', **others).chosen.configuration} would be")
        assert f"over objective.{key}" in text
        assert not any(f"over objective.{other}" in text for other in others)


def test_constraints_that_decide_only_together_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    best, kept = Row(1, 8, time_s=1.0, cost=10.0), Row(1, 4, time_s=5.0, cost=1.0)
    named = planned().chosen.model_copy(update={"cost": best.cost, "global_batch": best.global_batch})
    monkeypatch.setattr(FittedPartitions, "record", lambda _, row: {0: named}[row])
    limits = ObjectiveSpec(kind="time", budget=5.0, max_global_batch=4)
    fitted = FittedPartitions((), constrain(table_of([best, kept]), limits), ())
    (text,) = feasibility.binding(fitted, limits, None)
    assert text.startswith("without objective.budget and objective.max_global_batch, ")
    assert "over objective.budget" in text
    assert "over objective.max_global_batch" in text


def test_a_constraint_that_is_kept_only_narrowly_is_a_warning() -> None:
    def warned(key: str, kind: str, limit: float) -> bool:
        limits: dict[str, Any] = {key: limit}
        return any(f"objective.{key}" in w and "narrowly" in w for w in planned(kind, **limits).warnings)

    cheapest, fastest = planned("cost").chosen, planned("time").chosen
    late = cheapest.interval_90["wall_time_s"][1] / 3600
    assert warned("deadline_hours", "cost", (cheapest.wall_time_s / 3600 + late) / 2)
    assert not warned("deadline_hours", "cost", 1.01 * late)
    upper = fastest.interval_90["cost"][1]
    assert warned("budget", "time", (fastest.cost + upper) / 2)
    assert not warned("budget", "time", 1.01 * upper)


def test_constraints_that_leave_no_fallback_are_a_warning() -> None:
    fastest = planned("time").chosen
    alone = planned("time", deadline_hours=1.001 * fastest.wall_time_s / 3600)
    assert alone.fallbacks == []
    assert any("objective.deadline_hours rules out every smaller local batch" in w for w in alone.warnings)
    assert planned("time").fallbacks
    assert not any("fall back" in warning for warning in planned("time").warnings)


def test_the_advice_for_what_is_not_feasible_fits_the_reason() -> None:
    long = sweep(workload={"epochs": 5000})
    with pytest.raises(InfeasibleError, match=r"no time for work; raise train_minutes .* from 1 to \d+") as raised:
        make_plan(long, cluster(train_minutes=1), CORNERS)
    enough = int(re.findall(r"from 1 to (\d+)", str(raised.value))[0])
    assert make_plan(long, cluster(train_minutes=enough), CORNERS).chosen.feasible
    with pytest.raises(InfeasibleError, match=r"; signal_delay_s = 90 alone leaves nothing of .* 60 s"):
        make_plan(sweep(), cluster(train_minutes=1), CORNERS)
    few = [row.model_copy(update={"dataset_samples": 10}) for row in CORNERS]
    with pytest.raises(
        InfeasibleError, match=r"exceeds the 10 training samples; lower search\.min_batch and .*max_batch"
    ):
        make_plan(sweep(), cluster(), few)


def test_constraints_that_leave_nothing_say_by_how_much_and_name_the_nearest() -> None:
    fastest = planned().chosen
    with pytest.raises(InfeasibleError) as caught:
        planned(deadline_hours=fastest.wall_time_s / 3600 / 2)
    line = str(caught.value)
    assert "none of 18 candidates keeps the constraints" in line
    assert f"the nearest is {fastest.configuration}" in line
    assert "(100 %) over objective.deadline_hours" in line
    cheapest = planned("cost").chosen
    with pytest.raises(InfeasibleError, match=r"over objective\.budget"):
        planned(budget=cheapest.cost / 2)
    with pytest.raises(InfeasibleError, match=r"B=32, 300 % over objective\.max_global_batch, B=8"):
        planned(max_global_batch=8)


def test_the_front_of_time_and_cost_is_marked() -> None:
    plan = planned("knee", grid())
    feasible = [c for c in plan.candidates if c.feasible]
    assert plan.pareto[0].train_time_s == min(c.train_time_s for c in feasible)
    assert plan.pareto[-1].cost == min(c.cost for c in feasible)
    for candidate in feasible:
        beaten = any(c.train_time_s < candidate.train_time_s and c.cost < candidate.cost for c in feasible)
        assert not (beaten and candidate.pareto)


def test_the_front_is_in_the_order_of_expected_wall_time() -> None:
    plan = planned("knee", grid())
    slow, fast = (
        plan.chosen.model_copy(update={"pareto": True, "wall_time_s": s, "train_time_s": 1 / s}) for s in (9, 1)
    )
    assert plan.model_copy(update={"candidates": [slow, fast]}).pareto == [fast, slow]


@pytest.mark.parametrize("kind", ["time", "cost", "weighted", "knee"])
def test_runners_up_are_what_would_be_chosen_next(kind: str) -> None:
    plan = planned(kind)
    assert len(plan.runners_up) == 3
    assert plan.chosen not in plan.runners_up
    score = {"time": lambda c: c.train_time_s, "cost": lambda c: c.cost, "weighted": lambda c: c.wall_time_s * c.cost}
    if kind in score:
        best = sorted(plan.candidates, key=score[kind])[:4]
        assert [plan.chosen, *plan.runners_up] == best


def test_a_plan_for_post_local_steps_says_that_it_counts_an_all_reduce_in_each() -> None:
    spec = sweep("time")
    by_method = {}
    for method in ("lbt", "polo"):
        training = spec.training.model_copy(update={"method": method})
        by_method[method] = make_plan(spec.model_copy(update={"training": training}), cluster(), grid()).warnings
    added = [warning for warning in by_method["polo"] if warning not in by_method["lbt"]]
    assert len(added) == 1
    assert "times and costs are for an all-reduce in each step" in added[0]


def test_the_knee_has_an_interval_that_holds_it() -> None:
    plan = planned("knee", grid())
    assert plan.knee is not None
    assert plan.knee.global_batch is not None
    assert plan.knee.interval_90 is not None
    low, high = plan.knee.interval_90
    assert 0.8 * low <= plan.knee.global_batch <= 1.25 * high
    assert planned("knee", grid()).knee == plan.knee
    assert planned("time").knee is None


def test_on_spot_nodes_the_plan_says_how_often_to_checkpoint() -> None:
    plan = planned("cost", pricing={"basis": "spot", "preemption_hours": 2.0, "checkpoint_write_s": 5.0})
    chosen = plan.chosen
    assert chosen.checkpoint_minutes is not None
    assert chosen.wall_time_s > chosen.train_time_s
    assert chosen.cost == pytest.approx(chosen.nodes * chosen.wall_time_s / 3600 * 0.3)
    more = {c.nodes: c.checkpoint_minutes for c in plan.candidates}
    assert more[1] > more[2] > more[4]  # type: ignore[operator]
    assert any("preempted every 2 hours" in note for note in plan.notes)


def test_measured_power_gives_kilowatt_hours() -> None:
    rows = [row.model_copy(update={"watts_per_node": 500.0}) for row in CORNERS]
    for c in planned(rows=rows, pricing={"pue": 1.5}).candidates:
        assert c.energy_kwh == pytest.approx(c.nodes * 0.5 * 1.5 * c.wall_time_s / 3600)
    assert planned().chosen.energy_kwh is None


def test_the_cost_of_a_batch_beyond_the_critical_one_is_stated() -> None:
    def noisy(scale: float) -> list[Measurement]:
        terms = tuple((1.0, scale * factor) for factor in (0.9, 1.0, 1.1))
        return [
            row.model_copy(update={"noise_scale": scale, "noise_terms": terms, "noise_samples": 96}) for row in CORNERS
        ]

    plan = planned(rows=noisy(100.0))
    assert plan.critical_batch == pytest.approx(100.0)
    assert any(text.startswith("Critical batch: 100 samples") for text in sentences(plan))
    for kind, has_knee in (("time", False), ("knee", True)):
        about = sentences(planned(kind, rows=noisy(100.0)))
        assert any("does not account for that" in text for text in about) == has_knee
    (costs,) = [text for text in sentences(plan) if f"learns less in {plan.epochs} epochs with this batch" in text]
    assert "; learning as much would take 25 epochs, about " in costs
    # the job starts once, however long it trains
    late = planned(rows=noisy(100.0), pricing={"restart_s": 3600.0})
    starts_s = 3600.0 - plan.chosen.wall_parts_s["starts"]
    times_s = {c.configuration: starts_s + (c.progress_time_s or 0.0) for c in plan.candidates}
    assert all(c.progress_time_s == pytest.approx(times_s[c.configuration]) for c in late.candidates)
    # a batch is not faster because its epochs leave out samples
    for c in plan.candidates:
        needs = (100.0 + c.global_batch) / (100.0 + sweep("time").training.base_batch)
        skipped = (SAMPLES / c.global_batch) / (SAMPLES // c.global_batch)
        works_s = [(each or 0.0) - c.wall_parts_s["starts"] for each in (c.progress_time_s, c.wall_time_s)]
        assert works_s[0] == pytest.approx(needs * skipped * works_s[1], rel=1e-3)
    assert max(SAMPLES % c.global_batch for c in plan.candidates) > 0.02 * SAMPLES
    (soonest,) = [text for text in sentences(plan) if text.startswith("Soonest to learn as much")]
    assert ", after " in soonest
    assert not any("Soonest" in text for text in sentences(planned(rows=noisy(1e6))))
    assert not any("learns less" in text for text in sentences(planned(rows=noisy(1e6))))
    assert planned().critical_batch is None
    assert plan.critical_batch_source == "profile"
    for method, scales in (("ags", True), ("lbt", False)):
        training = sweep().training.model_copy(update={"method": method})
        spec = sweep("time").model_copy(update={"training": training})
        notes = make_plan(spec, cluster(), noisy(100.0)).notes
        assert any("what scaling gradients" in note for note in notes) == scales


def test_the_time_to_the_same_progress_is_no_surer_than_the_noise() -> None:
    def with_noise(scatter: float) -> list[Measurement]:
        terms = tuple((1.0, 100.0 * factor) for factor in (1.0 - scatter, 1.0, 1.0 + scatter))
        return [row.model_copy(update={"noise_terms": terms, "noise_samples": 96}) for row in CORNERS]

    def factors(candidate: Candidate, name: str) -> tuple[float, float]:
        low, high = candidate.interval_90[name]
        return low / getattr(candidate, name), high / getattr(candidate, name)

    sure, unsure = (planned(rows=with_noise(scatter)).candidates for scatter in (0.0, 0.9))
    for exact, uncertain in zip(sure, unsure, strict=True):
        whole = factors(exact, "wall_time_s")
        assert factors(exact, "progress_time_s") == pytest.approx(whole)
        low, high = factors(uncertain, "progress_time_s")
        assert low <= whole[0]
        # only at the base's own batch does the number of samples not depend on the noise
        assert (high > whole[1] * (1 + 1e-9)) == (exact.global_batch != sweep().training.base_batch)


def test_a_critical_batch_from_training_is_not_said_to_be_the_first_weights() -> None:
    steps = [
        StepMetrics(
            step=at, samples_seen=at, epoch=0.0, loss=1.0, lr=0.1, step_time_s=0.1,
            noise_gradient_square=1.0, noise_trace=100.0,
        )
        for at in range(1, 9)
    ]  # fmt: skip
    plan = make_plan(sweep("time"), cluster(), CORNERS, metrics=Metrics(steps, [], 0))
    assert plan.critical_batch_source == "training"
    message = " ".join([*sentences(plan), *plan.warnings])
    assert "in the later half of the training so far" in message
    assert " epochs with this batch than with training.base_batch" in message
    assert "profiled" not in message
    assert "its least" not in message


def test_more_requeues_than_allowed_are_a_warning() -> None:
    spec = sweep("time", workload={"epochs": 5000})
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"max_requeues": 2})})
    plan = make_plan(spec, cluster(train_minutes=60), CORNERS)
    assert plan.chosen.wall_time_s > plan.chosen.train_time_s
    (message,) = (warning for warning in plan.warnings if "more than training.max_requeues = 2 allows" in warning)
    enough = int(re.findall(r"train_minutes to (\d+) in the cluster file", message)[0])
    for minutes, often in ((enough, False), (enough - 1, True)):
        again = make_plan(spec, cluster(train_minutes=minutes), CORNERS)
        assert again.chosen.configuration == plan.chosen.configuration
        assert any("more than training.max_requeues" in warning for warning in again.warnings) == often


def test_preemptions_count_as_restarts_too() -> None:
    def warned(**pricing: Any) -> bool:
        found = planned("cost", pricing=pricing).warnings
        return any("preemptions), more than training.max_requeues = 20 allows" in text for text in found)

    often = {"preemption_hours": 0.002, "restart_s": 1.0, "checkpoint_write_s": 0.1}
    assert warned(basis="spot", **often)
    assert not warned(basis="spot", **often | {"preemption_hours": 2.0})
    assert not warned(**often)


def test_an_interval_without_end_can_be_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: StepTimeModel, nodes: Any, *rest: Any) -> tuple[Any, Any]:
        return np.zeros(len(nodes)), np.full(len(nodes), np.inf)

    monkeypatch.setattr(StepTimeModel, "interval", endless)
    plan = planned()
    assert Plan.model_validate_json(plan.model_dump_json(by_alias=True)) == plan


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run").create()
    directory.sweep_file.write_text(SWEEP)
    directory.cluster_file.write_text('name = "here"\n')
    for row in CORNERS:
        append_record(directory.profile / "task.jsonl", row)
    return directory


def test_the_command_prints_the_choice_and_its_reason(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.root)]) == 0
    printed = capsys.readouterr().out
    chosen = make_plan(sweep(), cluster(), CORNERS).chosen
    (marked,) = (line for line in printed.splitlines() if line.startswith("→"))
    assert marked.split()[1:4] == [str(chosen.nodes), str(chosen.local_batch), str(chosen.global_batch)]
    assert "Chosen by knee" in printed
    assert not run.plan_file.exists()


def test_the_command_plans_again_by_another_objective_as_json(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.root), "--objective", "cost", "--json"]) == 0
    plan = Plan.model_validate_json(capsys.readouterr().out)
    asked = load_sweep(run.sweep_file, ["objective.kind=cost"], check_paths=False)
    assert plan == make_plan(asked, cluster(), CORNERS)


def test_the_command_plans_under_other_constraints_and_prices(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*overrides: str) -> Plan:
        options = [option for text in overrides for option in ("--set", text)]
        assert main([str(run.root), "--objective", "cost", "--json", *options]) == 0
        return Plan.model_validate_json(capsys.readouterr().out)

    assert ask("objective.max_global_batch=64").chosen.global_batch <= 64
    spot = ask("pricing.basis=spot", "cluster.pricing.usd_per_spot_node_hour=7")
    chosen = spot.chosen
    assert chosen.cost == pytest.approx(7 * chosen.nodes * chosen.wall_time_s / 3600)
    units = ask("pricing.basis=tres", "pricing.tres_weights=CPU=2,Mem=0.25G")
    assert units.chosen.currency == "SU"


def test_the_command_says_what_else_there_was(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    best = make_plan(sweep("cost"), cluster(), CORNERS).chosen
    limit = f"objective.deadline_hours={0.99 * best.wall_time_s / 3600:.6f}"
    more = ["--set", "pricing.watts_per_node=300", "--set", "search.max_batch=8192"]
    assert main([str(run.root), "--objective", "knee", "--set", limit, *more]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in (
        "Next best: N=",
        "Best on fewer nodes: N=",
        'objective.kind = "time" chooses it',
        "Cheapest: N=",
        "The knee lies at B=",
        "kWh",
        "◆ Pareto front",
    ):
        assert words in printed
    assert main([str(run.root), "--objective", "cost", "--set", limit]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Constraint: without objective.deadline_hours, {best.configuration} would be chosen" in printed
    assert main([str(run.root), "--objective", "cost", "--set", "objective.deadline_hours=1s"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main([str(run.root), "--set", "pricing.basis=energy"]) == 2
    assert f"{run.cluster_file}: pricing.watts_per_node: " in capsys.readouterr().err


def test_what_is_free_is_chosen_by_its_time(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.root), "--objective", "cost", "--set", "pricing.usd_per_node_hour=0"]) == 0
    printed = capsys.readouterr().out
    assert f"{make_plan(sweep('time'), cluster(), CORNERS).chosen.configuration}: " in printed
    assert "Cheapest:" not in printed
    assert "Fastest:" not in printed


def test_the_command_replaces_the_plan_only_when_asked(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.plan_file.write_text("mine")
    main([str(run.root)])
    assert "\nTo train with this plan, without measuring again:\n  " in capsys.readouterr().out
    main([str(run.root), "--objective", "cost"])
    assert "\nWith --write the run follows this plan; to train then:\n" in capsys.readouterr().out
    values = ["--set", "workload.epochs=7", "--set", "pricing.usd_per_node_hour=2"]
    main([str(run.root), *values, "--objective", "cost"])
    train = command_line("sweep", str(run.sweep_file), "--cluster", str(run.cluster_file), "--run-dir", str(run.root))
    message = f"\nTo train with these values:\n  {train} {' '.join(values)} --set objective.kind=cost\n"
    assert message in capsys.readouterr().out
    for value in values[1::2]:
        assert main([str(run.root), "--set", value, "--write"]) == 2
        assert capsys.readouterr().err.endswith(
            f"only [objective]; to train with these values: {train} --set {value}\n"
        )
    assert run.plan_file.read_text() == "mine"
    assert main([str(run.root), "--write"]) == 0
    assert run.read_plan() == make_plan(load_sweep(run.sweep_file, check_paths=False), cluster(), CORNERS)


@pytest.mark.parametrize("trains", [True, False])
def test_the_plan_of_a_training_is_not_replaced(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], trains: bool
) -> None:
    assert main([str(run.root), "--write"]) == 0
    written = run.plan_file.read_bytes()
    run.log_event("submitted", "train", job_id="2")
    if not trains:
        run.make_train().metrics_file.touch()
        run.log_event("ended", "train", job_id="2")
    capsys.readouterr()
    assert main([str(run.root), "--objective", "cost", "--write"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"{run.plan_file}: the training of this run follows this plan")
    assert "leave out --write" in output.err
    assert output.err.count("\n") == 1
    assert run.plan_file.read_bytes() == written
    assert main([str(run.root), "--objective", "cost"]) == 0


def test_the_plan_is_not_replaced_under_a_sweep_that_is_at_work(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with run.locked():
        assert main([str(run.root), "--write"]) == 2
        assert "is in use by process" in capsys.readouterr().err
        assert main([str(run.root)]) == 0


def test_a_written_plan_knows_which_objective_it_follows_in_place_of_the_sweeps(run: RunDirectory) -> None:
    assert main([str(run.root), "--objective", "time", "--set", "objective.deadline_hours=900h", "--write"]) == 0
    assert run.read_plan().other_objective == ['objective.kind = "time"', "objective.deadline_hours = 900.0"]
    assert main([str(run.root), "--objective", sweep().objective.kind, "--write"]) == 0
    assert run.read_plan().other_objective == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workload.model", "resnet18", 'measured with "elsewhere.models:net"'),
        ("workload.precision", "bf16", 'measured with "fp32"; to measure with "bf16", start a sweep with'),
        ("workload.image_size", "64", "measured without it"),
        ("training.method", "lars", '"ags"'),
        ("cluster.workers_per_node", "4", "measured with 1"),
        ("cluster.environment.OMP_NUM_THREADS", "'4'", "measured with another"),
    ],
)
def test_what_was_measured_is_not_passed_off_as_something_else(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], key: str, value: str, words: str
) -> None:
    assert main([str(run.root), "--set", f"{key}={value}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *warnings, refusal = printed.err.splitlines()
    assert len(warnings) == ("environment" in key)
    file = run.cluster_file if key.startswith("cluster.") else run.sweep_file
    assert refusal.startswith(f"{file}: {key.removeprefix('cluster.').removesuffix('.OMP_NUM_THREADS')}: ")
    assert words in refusal
    assert "a new --run-dir" in refusal


def test_each_partition_keeps_to_what_was_measured_there(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    tables = '[[partitions]]\npartition = "a"\n[[partitions]]\npartition = "b"\nworkers_per_node = {}\n'
    run.cluster_file.write_text('name = "here"\nexecutor = "slurm"\n' + tables.format(2))
    asked = 'partitions=[{partition="a"}, {partition="b", workers_per_node=4}]'
    assert main([str(run.root), "--set", f"cluster.{asked}"]) == 2
    assert "partitions.b.workers_per_node: measured with 2" in capsys.readouterr().err


def test_a_price_that_every_partition_has_for_itself_is_set_for_one(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    table = '[[partitions]]\npartition = "a"\npricing = { usd_per_node_hour = 1.0 }\n'
    run.cluster_file.write_text(f'executor = "local"\n{table}')
    rows = [row.model_copy(update={"partition": "a"}) for row in CORNERS]
    (run.profile / "task.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    assert main([str(run.root), "--set", "pricing.usd_per_node_hour=5"]) == 2
    assert "changes nothing" in capsys.readouterr().err
    costs = []
    for price in (5, 10):
        assert main([str(run.root), "--json", "--set", f"partitions.a.pricing.usd_per_node_hour={price}"]) == 0
        costs.append(json.loads(capsys.readouterr().out)["chosen"]["cost"])
    assert costs[1] == pytest.approx(2 * costs[0])


@pytest.mark.parametrize(
    "override",
    [
        "workload.epochs=7", "workload.lr=0.2", "workload.data_dir=/elsewhere",
        "workload.model=elsewhere.models:net", "training.checkpoint_minutes=2",
        "search.max_batch=512", "cluster.memory_gb=64", "cluster.train_minutes=90", "pricing.usd_per_node_hour=3",
    ],
)  # fmt: skip
def test_what_planning_alone_needs_may_be_changed(run: RunDirectory, override: str) -> None:
    assert main([str(run.root), "--set", override]) == 0


def test_a_study_is_refused_as_one(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.sweep_file.write_text(tomli_w.dumps(STUDY))
    assert main([str(run.root)]) == 2
    error = capsys.readouterr().err
    assert f"{run.root}: is a study" in error
    assert f"report {run.root} writes its report" in error
    assert error.count("\n") == 1


@pytest.mark.processes
def test_a_reader_that_closes_the_output_is_no_error(run: RunDirectory) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "tula_hpc.analysis.plan", str(run.root)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("width", [80, 88, 200])
def test_on_a_terminal_signs_and_remarks_are_whole(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    # rich then writes as to a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([str(run.root), "--set", "pricing.usd_per_node_hour=123456"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    table = lines[: next(place for place, line in enumerate(lines) if line.startswith("◆ Pareto"))]
    # a command that is to be copied is one line
    assert all(len(line) <= width for line in lines if " --run-dir " not in line)
    assert not [line for line in lines if "…" in line]
    apart = itertools.pairwise(lines)
    assert not [line for line, after in apart if re.search(r" \d+$", line) and re.match(r"  [a-z%]", after)]
    plan = make_plan(load_sweep(run.sweep_file, check_paths=False), cluster(), CORNERS)
    near = [c for c in plan.candidates if 1 / 4 <= c.global_batch / plan.chosen.global_batch <= 4]
    assert sum(line.startswith("→") for line in table) == 1
    assert sum("◆" in line for line in table) == sum(c.pareto for c in near)
    assert sum("measured" in line for line in table) == sum(c.measured for c in near)
    headings = " ".join(" ".join(line.split()) for line in table[:2])
    assert "cost" in headings
    assert ("step" in headings) == (width > 80)


def test_the_time_shown_with_the_cost_is_the_one_that_is_paid_for(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.root), "--set", "pricing.restart_s=36000"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert "whole time" in heading
    assert "training" not in heading
    assert re.search(r"\b10 h\b.*USD", next(row for row in rows if row.startswith("→")))
    assert "Training should take 10 h" in " ".join(rows)


def test_the_command_counts_torn_lines(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with (run.profile / "task.jsonl").open("a") as file:
        file.write('{"status": "ok", "nod')
    assert main([str(run.root)]) == 0
    assert "1 damaged line of the measurements" in " ".join(capsys.readouterr().out.split())


def test_another_path_is_refused_with_the_runs_near_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "sweep.toml").touch()
    Path("mine.toml").touch()
    assert not_a_run(Path("mine")) == "no such run directory; did you mean runs/mine?"
    assert not_a_run(Path("mine.toml")) == "is not a folder; expected a run directory; did you mean runs/mine?"
    assert not_a_run(Path("runs/mine/sweep.toml")).endswith("expected a run directory; did you mean runs/mine?")
    assert not_a_run(Path("runs")).endswith("it has no sweep.toml; did you mean runs/mine or runs/other?")
    assert not_a_run(Path.cwd()).endswith(f"did you mean {Path.cwd()}/runs/mine or {Path.cwd()}/runs/other?")
    assert not_a_run(Path("yours")) == f"no such run directory (looked for in {Path.cwd()})"
    assert not_a_run(Path("runs/mnie")) == "no such run directory; did you mean runs/mine?"
    Path("runs/mine/report").mkdir()
    assert not_a_run(Path("runs/mine/report")).endswith("it has no sweep.toml; did you mean runs/mine?")
    monkeypatch.chdir("runs")
    assert not_a_run(Path("runs/mine")) == "no such run directory; did you mean mine?"


def test_mistakes_give_one_clear_line_and_their_exit_code(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def line(*arguments: str, code: int) -> str:
        assert main(list(arguments)) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    assert "no such run directory" in line(str(tmp_path / "none"), code=2)
    assert "is not a folder; expected a run directory" in line(str(run.sweep_file), code=2)
    (run.profile / "task.jsonl").unlink()
    assert "no usable measurement" in line(str(run.root), code=1)
    with run.locked():
        early = line(str(run.root), code=1)
        assert early.startswith("too little is measured yet, and the sweep is still at work: ")
        assert early.endswith(f"tula status {run.root}\n")
    run.sweep_file.write_text('name = "test"\n[search]\nmin_batch = 0\n')
    assert "search.min_batch" in line(str(run.root), code=2)
    run.sweep_file.unlink()
    assert "is not a run directory: it has no sweep.toml" in line(str(run.root), code=2)
    with pytest.raises(SystemExit, match="2"):
        main([str(run.root), "--objective", "luck"])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([str(run.root), "--what-if", "--json"])
    assert "--what-if: prints a table; leave out --json" in capsys.readouterr().err


def test_the_papers_form_can_be_asked_for() -> None:
    paper = make_plan(sweep(form="paper"), cluster(), grid()).models["step_time"]
    own = make_plan(sweep(), cluster(), grid()).models["step_time"]
    assert paper["form"] == "paper"
    assert own["form"] != "paper"
    assert set(own["departures"]["nodes"]) == {"2", "4"}


@pytest.mark.parametrize(
    ("optimizer", "training", "warned"),
    [
        ("adamw", {"preset": "paper"}, True),
        ("adamw", {"method": "static", "apply": "gradient"}, True),
        ("adamw", {}, False),
        ("adamw", {"preset": "paper", "apply": "update"}, False),
        ("adamw", {"method": "lbt", "apply": "gradient"}, False),
        ("sgd", {"preset": "paper"}, False),
    ],
)
def test_factors_that_adam_cancels_out_are_warned_of(optimizer: str, training: dict[str, Any], warned: bool) -> None:
    spec = SweepSpec.model_validate({"name": "s", "workload": {"optimizer": optimizer}, "training": training})
    plan = make_plan(spec, cluster(), grid())
    assert any("AdamW divides" in text for text in plan.warnings) is warned


def test_a_measured_step_counts_as_measured_and_the_model_keeps_its_own_word() -> None:
    rows = grid()
    odd = rows[7]
    assert odd.times is not None
    slower = odd.times.model_copy(update={"step_time_s": 1.1 * odd.times.step_time_s})
    rows[7] = odd.model_copy(update={"times": slower})
    plan = make_plan(sweep(), cluster(), rows)
    candidate = next(c for c in plan.candidates if c.configuration == odd.configuration)
    assert candidate.step_time_s == slower.step_time_s
    assert 0.9 < candidate.model_step_time_s / candidate.step_time_s < 0.99


def test_a_next_best_within_the_intervals_is_called_too_close() -> None:
    plan = make_plan(sweep("time"), cluster(), CORNERS)
    next_best = plan.runners_up[0]

    def doubts(ratio: float, starts_s: float = 0.0) -> list[str]:
        """Return the doubt about a next best whose steps are known to 10 %; the starts are equal for both."""
        mine = plan.chosen.train_time_s
        chosen, other = (
            candidate.model_copy(
                update={
                    "train_time_s": steps_s,
                    "wall_time_s": steps_s + starts_s,
                    "interval_90": {"train_time_s": (0.9 * steps_s, 1.1 * steps_s)},
                }
            )
            for candidate, steps_s in ((plan.chosen, mine), (next_best, ratio * mine))
        )
        return too_close_to_call(plan.model_copy(update={"chosen": chosen, "runners_up": [other]}))

    (text,) = doubts(1.02)
    assert text.startswith(f"The next best, {next_best.configuration}, is predicted to be 2")
    assert "The predictions are too close to say which of the two takes less time" in text
    assert doubts(1.5) == []
    # starts are equal for both, however long they are
    assert doubts(1.5, starts_s=100.0 * plan.chosen.train_time_s) == []


def test_by_progress_candidates_are_compared_by_the_time_to_the_same_progress() -> None:
    rows = [row.model_copy(update={"noise_terms": ((1.0, 200.0),) * 8, "noise_samples": 512}) for row in grid()]
    plan = make_plan(sweep("progress", {"epochs": 60}, cluster_sizes=[1, 2, 4], max_batch=1024), cluster(), rows)
    chosen, other = plan.chosen, plan.runners_up[0]
    assert chosen.progress_time_s is not None
    assert other.progress_time_s is not None
    assert other.wall_time_s > 1.5 * chosen.wall_time_s
    # 3.8 % apart
    (text,) = too_close_to_call(plan)
    slower = in_comparison(other.progress_time_s / chosen.progress_time_s, "slower", "faster", "as slow")
    assert text.startswith(f"The next best, {other.configuration}, is predicted to be {slower} and ")
    assert " to say which of the two takes less time to the same progress; choose by" in text
    (next_best,) = [each for each in alternatives(plan) if each.candidate == other]
    assert f" after about {format_duration(other.progress_time_s)} and " in next_best.against(plan)
