"""Plans and searches with hardly any data: what they still say, and whether their advice then helps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.planning_data import (
    CORNERS,
    SAMPLES,
    SWEEP_FILE,
    cluster,
    compute_time_s,
    grid,
    memory,
    ok,
    oom,
    peak_bytes,
    sweep,
    times,
)
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.analysis.plan import main, make_plan
from tula_hpc.analysis.planning.candidates import candidates
from tula_hpc.analysis.planning.warnings import ONE_ITERATOR, about_samples
from tula_hpc.analysis.report.plan_text import describe_plan, sentences
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import GIB, ClusterSpec, ObjectiveSpec, SweepSpec
from tula_hpc.errors import InfeasibleError, NotEnoughDataError
from tula_hpc.records import Configuration, Measurement, RunDirectory, append_record

RUN = f"""{SWEEP_FILE}
[search]
min_batch = 32
max_batch = 2048
cluster_sizes = [1, 2, 4, 8]
"""


@pytest.mark.parametrize("mode", ["adaptive", "partial", "full"])
def test_a_single_candidate_is_planned_once_it_was_measured(mode: str) -> None:
    spec = sweep("knee", mode=mode, cluster_sizes=[1], min_batch=64, max_batch=64)
    assert propose(spec, cluster(), [ok(1, 64)]) == []
    plan = make_plan(spec, cluster(), [ok(1, 64)])
    assert plan.chosen.step_time_s == pytest.approx(times(1, 64).step_time_s, rel=0.01)
    assert plan.chosen.peak_memory_bytes == pytest.approx(peak_bytes(64), rel=0.01)


def test_what_memory_leaves_is_planned_even_if_it_is_a_single_batch() -> None:
    spec = sweep("time", cluster_sizes=[1], min_batch=64, max_batch=256)
    plan = make_plan(spec, cluster(), [ok(1, 64), oom(1, 128)])
    assert [c.local_batch for c in plan.candidates if c.feasible] == [64]
    with pytest.raises(NotEnoughDataError, match=r"only local batch 64 was measured.* run the sweep again"):
        # running it again helps here, because 128 is proposed
        make_plan(spec, cluster(), [ok(1, 64)])
    assert propose(spec, cluster(), [ok(1, 64)])


def test_where_all_ran_out_of_memory_the_advice_is_not_to_run_it_again() -> None:
    spec, rows = sweep("time", cluster_sizes=[1], min_batch=64, max_batch=128), [oom(1, 64), oom(1, 128)]
    assert propose(spec, cluster(), rows) == []
    with pytest.raises(NotEnoughDataError, match=r"ran out of memory.*lower search\.min_batch") as error:
        make_plan(spec, cluster(), rows)
    assert "run the sweep again" not in str(error.value)


def replay(spec: SweepSpec, on: ClusterSpec, trusted_batch: int) -> list[Measurement]:
    """Search in jobs that each measure the proposals for one number of nodes and end when memory runs out."""
    rows: list[Measurement] = []
    while proposed := propose(spec, on, rows, trusted_batch=trusted_batch):
        for nodes, _, batch in [c for c in proposed if c.nodes == proposed[0].nodes]:
            fits = peak_bytes(batch) <= (on.memory_limit_bytes or 0)
            rows.append(ok(nodes, batch) if fits else oom(nodes, batch))
            if not fits:
                break
    return rows


@pytest.mark.parametrize("mode", ["adaptive", "partial", "full"])
def test_batches_far_beyond_memory_are_not_tried_one_after_another(mode: str) -> None:
    """4 GiB hold 899 samples; before smaller batches were looked at, seven jobs were killed on the way down."""
    spec = sweep("knee", mode=mode, cluster_sizes=[1, 2, 4], min_batch=32, max_batch=65_536)
    rows = replay(spec, cluster(memory_gb=4.0), trusted_batch=256)
    assert sum(row.status == "oom" for row in rows) <= 1
    # the largest batch that fits
    assert max(row.local_batch for row in rows if row.status == "ok") == 512


def test_a_batch_that_may_fit_is_tried() -> None:
    spec = sweep("time", cluster_sizes=[1], min_batch=32, max_batch=512)
    limit_gb = peak_bytes(512) / GIB
    assert [c.local_batch for c in propose(spec, cluster(memory_gb=limit_gb), [ok(1, 32), ok(1, 128)])] == [512]


@pytest.fixture
def begun(tmp_path: Path) -> RunDirectory:
    """A run without measurements."""
    run = RunDirectory(tmp_path / "run").create()
    run.sweep_file.write_text(RUN)
    run.cluster_file.write_text('name = "here"\n')
    return run


@pytest.fixture(scope="module")
def searched() -> list[Measurement]:
    """Return what an adaptive search for the knee measures until it wants nothing more."""
    spec = sweep("knee", mode="adaptive", min_batch=32, max_batch=2048, cluster_sizes=[1, 2, 4, 8])
    rows: list[Measurement] = []
    while proposed := propose(spec, cluster(), rows):
        rows.append(ok(proposed[0].nodes, proposed[0].local_batch, finished_at=len(rows) + 1.0))
    return rows


@pytest.fixture
def finished(begun: RunDirectory, searched: list[Measurement]) -> RunDirectory:
    """A run whose search wants nothing more."""
    for row in searched:
        append_record(begun.profile / "task.jsonl", row, durable=False)
    return begun


@pytest.mark.parametrize("arguments", [["--objective", "time"], ["--set", "search.cluster_sizes=[1, 2, 4, 8, 16]"]])
def test_running_a_finished_run_again_does_not_serve_other_aims(
    finished: RunDirectory, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command would measure nothing more, and with other values it is refused for this run directory."""
    assert main([str(finished.root)]) == 0
    assert "not yet profiled" not in capsys.readouterr().out
    assert main([str(finished.root), *arguments]) == 0
    output = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "not yet profiled" in output
    assert "run the sweep again" not in output
    assert "a new --run-dir" in output


def test_the_aim_of_the_run_itself_is_no_other_one(begun: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for row in CORNERS[:3]:
        append_record(begun.profile / "task.jsonl", row, durable=False)
    assert main([str(begun.root), "--objective", "knee", "--set", "pricing.basis=node-hour"]) == 0
    assert "run the sweep again" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_priced_choice_is_not_called_as_expensive_as_a_free_one() -> None:
    parts = [{"partition": "own", "pricing": {"usd_per_node_hour": 0}}, {"partition": "cloud"}]
    rows = [row.model_copy(update={"partition": name}) for name in ("own", "cloud") for row in CORNERS]
    plan = make_plan(sweep("knee"), cluster(partitions=parts), rows)
    assert (plan.chosen.partition, plan.chosen.cost) == ("own", 0.0)
    messages = [line for line in sentences(plan) if line.startswith("Next best")]
    assert any("on cloud, as fast and more expensive." in line for line in messages)
    assert all(("as expensive" in line) == ("on own" in line) for line in messages)


def test_where_preemptions_leave_no_time_the_advice_is_about_them() -> None:
    spot = cluster(pricing={"basis": "spot", "preemption_hours": 1e-4})
    with pytest.raises(InfeasibleError, match=r"no time for work; use fewer nodes, .*preemption_hours"):
        make_plan(sweep("cost"), spot, CORNERS)


def slowed(row: Measurement, factor: float) -> Measurement:
    """Return the measurement with slower steps, as on a faulty node."""
    assert row.times is not None
    changes: dict[str, Any] = {"times": row.times.model_copy(update={"step_time_s": factor * row.times.step_time_s})}
    return row.model_copy(update=changes)


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (1.2, False), (3.0, True), (0.3, True)])
def test_a_measurement_that_all_others_contradict_is_named(factor: float, warned: bool) -> None:
    """Without the warning, the plan would show a step time as measured that is far from the measured one."""
    rows = [slowed(row, factor) if row.configuration == (2, 1, 64) else row for row in grid()]
    plan = make_plan(sweep("time"), cluster(), rows)
    found = [text for text in plan.warnings if "far from the model that is fitted" in text]
    assert [re.findall(r"N=\d+ b=\d+", text) for text in found] == ([["N=2 b=64"]] if warned else [])


@pytest.mark.parametrize("partitions", ["[]", '[{partition = "third"}]'])
def test_measurements_of_partitions_are_not_passed_off_as_those_of_others(
    tmp_path: Path, partitions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without partitions both would be mixed to an average of two machines that nobody has."""
    run = RunDirectory(tmp_path / "run").create()
    run.sweep_file.write_text(RUN)
    run.cluster_file.write_text(
        'name = "both"\nexecutor = "slurm"\n[[partitions]]\npartition = "old"\n[[partitions]]\npartition = "new"\n'
    )
    for row in CORNERS:
        append_record(run.profile / "task.jsonl", row.model_copy(update={"partition": "old"}), durable=False)
        append_record(run.profile / "task.jsonl", slowed(row, 0.3).model_copy(update={"partition": "new"}))
    assert main([str(run.root), "--set", 'cluster.partitions=[{partition = "old"}]']) == 0
    capsys.readouterr()
    assert main([str(run.root), "--set", f"cluster.partitions={partitions}"]) == 2
    assert "partitions: the measurements cover old and new" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"memory": memory(64, baseline_bytes=-(10**12))},
        {"times": times(1, 64, step_time_s=1e-30)},
        {"times": times(1, 64, data_time_s=-1.0)},
        {"times": times(1, 64, optimizer_time_s=-1.0)},
        {"times": times(1, 64, data_time_s=1e90)},
    ],
)
def test_a_damaged_record_leaves_the_plan_to_the_others(damage: dict[str, object]) -> None:
    spec = sweep("knee")
    whole, other = (make_plan(spec, cluster(), rows) for rows in (CORNERS, [*CORNERS, ok(1, 64, **damage)]))
    assert other.chosen == whole.chosen
    assert other.models == whole.models


@pytest.mark.parametrize("kind", ["time", "cost"])
def test_a_weight_of_a_hundred_decides_as_if_it_were_alone(kind: str) -> None:
    """A power of times of weeks would exceed a float, and one of a small cost would be 0 for every candidate."""
    priced = cluster(pricing={"basis": "memory", "usd_per_gib_hour": 1e-6})
    alone = sweep(kind, {"epochs": 500}, cluster_sizes=[4])
    objective = ObjectiveSpec.model_validate({"kind": "weighted", f"{kind}_weight": 100.0})
    heavy = alone.model_copy(update={"objective": objective})
    assert make_plan(heavy, priced, grid()).chosen == make_plan(alone, priced, grid()).chosen


def test_where_the_bound_on_saves_loses_more_than_it_spares_the_plan_says_what_to_set() -> None:
    """The advice must still hold after it is followed."""
    spot = cluster(pricing={"basis": "spot", "preemption_hours": 2.0, "checkpoint_write_s": 30.0})
    spec, rows = sweep("time"), [row.model_copy(update={"dataset_samples": 2_000_000}) for row in CORNERS]
    plan = make_plan(spec, spot, rows)
    (advice,) = [text for text in plan.warnings if "checkpoint_minutes" in text]
    found = re.search(r"training\.checkpoint_minutes = ([\d.]+) the whole training would take ([\d.]+) % less", advice)
    assert found is not None
    training = spec.training.model_copy(update={"checkpoint_minutes": float(found[1])})
    often = make_plan(spec.model_copy(update={"training": training}), spot, rows)
    (same,) = [c for c in often.candidates if c.configuration == plan.chosen.configuration]
    assert 1.0 - same.wall_time_s / plan.chosen.wall_time_s == pytest.approx(float(found[2]) / 100.0, abs=0.001)
    assert not any("checkpoint_minutes" in text for text in often.warnings)


@pytest.mark.parametrize("pricing", [{}, {"basis": "spot"}, {"basis": "spot", "checkpoint_write_s": 0.5}])
def test_where_interruptions_are_rare_the_bound_is_no_matter(pricing: dict[str, Any]) -> None:
    plan = make_plan(sweep("time", workload={"epochs": 500}), cluster(pricing=pricing), CORNERS)
    assert not any("checkpoint_minutes" in text for text in plan.warnings)


def test_a_partition_with_too_few_nodes_is_not_to_be_measured_again() -> None:
    parts = [{"partition": "large"}, {"partition": "small", "max_nodes": 1}]
    rows = [row.model_copy(update={"partition": "large"}) for row in CORNERS]
    plan = make_plan(sweep("time", cluster_sizes=[2, 4]), cluster(partitions=parts), rows)
    (message,) = [text for text in plan.warnings if "small" in text]
    assert message == "partition small is left out: no candidate: max_nodes = 1 is below every cluster size"


def test_where_no_batch_between_the_bounds_can_be_shared_the_bounds_are_named() -> None:
    spec = sweep("time", cluster_sizes=[1, 2], min_batch=100, max_batch=120)
    on, rows = cluster(workers_per_node=8), [ok(1, b, workers_per_node=8) for b in (8, 16)]
    bounds = "no batch between search.min_batch = 100 and search.max_batch = 120 gives each"
    with pytest.raises(NotEnoughDataError) as caught:
        make_plan(spec, on, rows)
    assert str(caught.value) == f"plan: no candidate: {bounds} of 8 to 16 workers a power of two; widen the bounds"
    alone = sweep("time", cluster_sizes=[1], min_batch=100, max_batch=120)
    with pytest.raises(NotEnoughDataError, match="= 120 gives the only worker a power of two; widen the bounds"):
        make_plan(alone, cluster(), [ok(1, 64), ok(1, 128)])
    odd = sweep("time", cluster_sizes=[3, 7], min_batch=100, max_batch=120)
    measured = [ok(3, batch) for batch in (16, 32)]
    with pytest.raises(NotEnoughDataError, match=f"only N=3 was measured, where {bounds} worker a power of two; "):
        make_plan(odd, cluster(), measured)
    with pytest.raises(NotEnoughDataError, match="only N=3 was measured, which is more than max_nodes = 2; "):
        make_plan(sweep("time", cluster_sizes=[1, 3]), cluster(max_nodes=2), measured)


@pytest.mark.parametrize("objective", ["knee", "time", "cost", "weighted"])
@pytest.mark.parametrize("first", ["own", "cloud"])
def test_of_equal_nodes_the_free_ones_are_taken_whichever_stand_first(objective: str, first: str) -> None:
    prices = {"own": {"usd_per_node_hour": 0}, "cloud": {"usd_per_node_hour": 1}}
    names = sorted(prices, key=lambda name: name != first)
    rows = [row.model_copy(update={"partition": name}) for name in names for row in CORNERS]
    on = cluster(partitions=[{"partition": name, "pricing": prices[name]} for name in names])
    assert make_plan(sweep(objective), on, rows).chosen.partition == "own"


def test_at_the_knee_no_candidate_is_better_in_batch_time_and_cost() -> None:
    """Sizes that are no powers of two have batches very close together: 11 · 128 and 23 · 64, on twice the nodes."""
    spec = sweep("knee", mode="full", cluster_sizes=[8, 11, 16, 23], min_batch=128, max_batch=16384)
    rows = [_far_apart(c) for c in candidates(spec.search, 1)]
    plan = make_plan(spec, cluster(), rows)
    own = (plan.chosen.global_batch, plan.chosen.wall_time_s, plan.chosen.cost)
    feasible = [c for c in plan.candidates if c.feasible and c.configuration != plan.chosen.configuration]
    others = [(c.global_batch, c.wall_time_s, c.cost) for c in feasible]
    assert not any(all(theirs <= mine for theirs, mine in zip(other, own, strict=True)) for other in others)


def _far_apart(c: Configuration) -> Measurement:
    """Measure on a network whose latency grows with every node."""
    sync_s = 0.05 * (1 - 1 / c.nodes) + 0.01 * (c.nodes - 1)
    step_s = compute_time_s(c.local_batch) + sync_s
    return ok(c.nodes, c.local_batch, times=times(c.nodes, c.local_batch, step_time_s=step_s, allreduce_time_s=sync_s))


def test_a_plan_names_what_the_search_proposes_next_where_starts_were_measured() -> None:
    spec = sweep("cost", mode="adaptive", cluster_sizes=[1, 2, 4], max_batch=4096)
    rows: list[Measurement] = []
    while proposed := propose(spec, cluster(), rows):
        named = " ".join(make_plan(spec, cluster(), rows).warnings) if len(rows) >= 3 else ""
        assert not named or all(f"{c}" in named for c in proposed)
        began = len(rows) + 1.0
        rows += [ok(c.nodes, c.local_batch, start_s=30.0, finished_at=began + i) for i, c in enumerate(proposed)]
    assert "not yet profiled" not in " ".join(make_plan(spec, cluster(), rows).warnings)


def test_a_batch_that_one_worker_cannot_hold_in_parts_is_not_tried_on_several() -> None:
    """One worker holds half of its batch at once; if that fails, half of that batch fails on several workers."""
    spec = sweep("time", mode="full", cluster_sizes=[1, 4], min_batch=64, max_batch=2048)
    rows = [*(ok(1, batch, parts=2) for batch in (64, 128, 256)), oom(1, 512)]
    left = propose(spec, cluster(), rows)
    assert max(c.local_batch for c in left if c.nodes == 4) == 128
    plan = make_plan(spec, cluster(), [*rows, ok(4, 16), ok(4, 128)])
    against = {(c.nodes, c.local_batch): c.why for c in plan.candidates}
    assert against[1, 256] == against[4, 128] == ""
    assert against[4, 256] == "N=1 b=512 (B=512), with 256 samples at once, ran out of memory"


def test_a_scripts_loader_that_gives_out_other_samples_than_the_file_says_is_named() -> None:
    rows = [ok(1, batch) for batch in (32, 64)]
    fits = [row.model_copy(update={"epoch_samples": row.dataset_samples + row.local_batch}) for row in rows]
    assert about_samples(summarize(fits)) == []
    assert about_samples(summarize(rows)) == []
    twice = [row.model_copy(update={"epoch_samples": 2 * row.dataset_samples}) for row in rows]
    (words,) = about_samples(summarize(twice))
    assert f"{rows[0].dataset_samples:,} by workload.samples" in words


@pytest.mark.parametrize("is_one", [False, True])
def test_a_script_that_does_not_go_on_exactly_is_named(*, is_one: bool) -> None:
    spec = sweep("time", mode="full", cluster_sizes=[1], min_batch=32, max_batch=128)
    rows = [ok(1, batch, kept=True, one_iterator=is_one) for batch in (32, 64, 128)]
    assert (ONE_ITERATOR in make_plan(spec, cluster(), rows).warnings) is is_one


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The workload of a script in the working directory."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return {"script": "train.py", "arguments": ["{local_batch}"], "samples": SAMPLES, "epochs": 60}


def test_a_script_that_cannot_go_on_has_no_plan_for_jobs_shorter_than_its_training(script: dict[str, Any]) -> None:
    spec = sweep("cost", script)
    times_s = {c.configuration: c.wall_time_s for c in make_plan(spec, cluster(), CORNERS).candidates}
    fastest, least_s = min(times_s.items(), key=lambda item: item[1])
    short = cluster(train_minutes=math.floor(least_s / 60 / 2))
    limit = rf"cannot be resumed, but a job of train_minutes = {short.train_minutes} is told to stop"
    message = rf"; {re.escape(str(fastest))}: takes .* {limit}"
    with pytest.raises(InfeasibleError, match=message) as raised:
        make_plan(spec, short, CORNERS)
    adaptive = sweep("knee", script, mode="adaptive")
    assert propose(adaptive, short, CORNERS) == [], "more profiles would not help"
    enough = int(re.findall(r"from \d+ to (\d+)", str(raised.value))[0])
    plan = make_plan(spec, cluster(train_minutes=enough), CORNERS)
    assert plan.chosen.configuration == fastest
    table = describe_plan(plan)
    assert "never" in table
    assert " d " not in table


@pytest.mark.parametrize("requeues", [1, 9])
def test_a_script_that_goes_on_from_ends_of_epochs_needs_jobs_for_whole_ones(
    requeues: int, script: dict[str, Any]
) -> None:
    spec = sweep("cost", script | {"resume_arguments": []}, cluster_sizes=[1])
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"max_requeues": requeues})})
    rows = [row.model_copy(update={"between_epochs_s": 60.0}) for row in CORNERS]
    with pytest.raises(InfeasibleError, match=r"takes .* an epoch and is resumed from ends of epochs only") as raised:
        make_plan(spec, cluster(train_minutes=3), rows)
    enough = int(re.findall(r"from 3 to (\d+)", str(raised.value))[0])
    often, seldom = (make_plan(spec, cluster(train_minutes=minutes), rows) for minutes in (enough - 1, enough))
    warned = [any("training.max_requeues" in doubt.text for doubt in each.doubts) for each in (often, seldom)]
    assert warned == [True, False]


def test_what_is_said_not_to_fit_into_a_job_does_not(script: dict[str, Any]) -> None:
    """Until the warning a job has 210 s; a start takes 200 s of them, and each epoch is saved for a minute."""
    on = cluster(train_minutes=5, pricing={"restart_s": 200.0, "checkpoint_write_s": 60.0})
    with pytest.raises(InfeasibleError, match=r"takes (.*) an epoch and .*, after a start of 3 min 20 s, ") as raised:
        make_plan(sweep("cost", script | {"resume_arguments": []}), on, CORNERS)
    minutes, seconds = map(int, re.findall(r"takes (\d+) min (\d+) s an epoch", str(raised.value))[0])
    assert 60 < 60 * minutes + seconds < 120


def test_on_spot_nodes_a_time_limit_is_named_where_it_is_at_fault(script: dict[str, Any]) -> None:
    spec, spot = sweep("time", script), {"basis": "spot", "preemption_hours": 1e4}
    limit = r"cannot be resumed, but a job of train_minutes = 3 .*; raise train_minutes in the cluster file from 3 to"
    with pytest.raises(InfeasibleError, match=limit) as raised:
        make_plan(spec, cluster(train_minutes=3, pricing=spot), CORNERS)
    enough = int(re.findall(r"from 3 to (\d+)", str(raised.value))[0])
    assert make_plan(spec, cluster(train_minutes=enough, pricing=spot), CORNERS).chosen.feasible
    with pytest.raises(InfeasibleError, match=f"{limit} .*; preemptions leave no time either: use fewer nodes, or"):
        make_plan(spec, cluster(train_minutes=3, pricing=spot | {"preemption_hours": 1e-4}), CORNERS)
