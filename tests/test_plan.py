from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planning_data import (
    MIB,
    SAMPLES,
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
from tula_hpc.analysis.plan import main, make_plan
from tula_hpc.config import GIB
from tula_hpc.errors import InfeasibleError, NotEnoughDataError
from tula_hpc.records import Candidate, Configuration, Measurement, Plan, RunDirectory, append_record

CORNERS = [ok(1, 32), ok(1, 1024), ok(4, 8), ok(4, 256)]

SWEEP = """
name = "test"
[workload]
model = "elsewhere.models:net"
dataset = "cifar100"
data_dir = "/nowhere/at/all"
epochs = 5
"""


def by_configuration(plan: Plan) -> dict[Configuration, Candidate]:
    return {candidate.configuration: candidate for candidate in plan.candidates}


def test_a_plan_predicts_every_candidate_from_four_corners() -> None:
    plan = make_plan(sweep(), cluster(), CORNERS)
    assert len(plan.candidates) == 18
    assert [c.configuration for c in plan.candidates if c.measured] == [row.configuration for row in CORNERS]
    for candidate in plan.candidates:
        assert candidate.step_time_s == pytest.approx(step_time_s(candidate.nodes, candidate.local_batch), rel=1e-3)
        assert candidate.peak_memory_bytes == pytest.approx(peak_bytes(candidate.local_batch), rel=1e-3)
    assert plan.warnings == []
    assert plan.models["step_time"]["form"] == "ring"
    assert plan.models["batch_memory"]["parameters"]["bytes_per_sample"] == pytest.approx(12_288, rel=1e-3)


@pytest.mark.parametrize("basis", ["node-hour", "memory"])
def test_times_and_costs_follow_from_the_step_time(basis: str) -> None:
    spec = sweep(workload={"epochs": 7})
    pricing = {"basis": basis, "usd_per_node_hour": 2.48, "usd_per_gib_hour": 0.15}
    for c in make_plan(spec, cluster(pricing=pricing), grid()).candidates:
        assert c.epoch_time_s == pytest.approx(SAMPLES // c.global_batch * c.step_time_s)
        assert c.train_time_s == pytest.approx(7 * c.epoch_time_s)
        hours = c.train_time_s / 3600 * c.nodes
        assert c.cost == pytest.approx(hours * (2.48 if basis == "node-hour" else c.peak_memory_bytes / GIB * 0.15))
        for name in ("step_time_s", "epoch_time_s", "train_time_s", "cost"):
            low, high = c.interval_90[name]
            assert low < getattr(c, name) < high


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
    with pytest.raises(InfeasibleError, match=r"none of 18 .* N=4 b=8 .* GiB per worker.* machine with more memory"):
        make_plan(sweep(), cluster(memory_gb=0.1), CORNERS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no usable measurement; run the sweep again"),
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
        ({"converged": False}, "stopped before the step time had settled: N=1 b=32"),
        ({"exclusive": False}, "shared their nodes with other jobs: N=1 b=32"),
        ({"emulated": True}, "shared one machine between their nodes"),
        ({"dataset_samples": 5}, "data sets of different size"),
        ({"times": times(1, 32, data_time_s=0.02)}, r"waiting for data takes up to 48% of a step at N=1 b=32"),
    ],
)
def test_doubts_about_a_measurement_become_warnings(changes: dict[str, object], message: str) -> None:
    assert message in warnings_of([ok(1, 32, **changes), *CORNERS[1:]])


def test_missing_measurements_become_warnings() -> None:
    found = warnings_of([*CORNERS[:3], failed(4, 256), failed(4, 256)])
    assert "N=4 b=256 (B=1024) was not measured: bug: ValueError: no" in found
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
    assert "full batches of 1,024 leave out 49% of the 2,000 samples" in warnings_of(CORNERS, samples=2000)
    assert "leave out" not in warnings_of(CORNERS, samples=2 * 1024)


def test_the_knee_is_that_of_the_fitted_curve() -> None:
    rows = [ok(1, 32), ok(1, 2048)]
    plan = make_plan(sweep(cluster_sizes=[1], max_batch=2048), cluster(), rows)
    assert plan.chosen.global_batch == 256  # √(32 · 2048)
    assert "at 256" in plan.reason


def test_a_curve_without_a_knee_is_said_to_have_none() -> None:
    flat = [ok(1, b, times=times(1, b, step_time_s=0.001 * b, compute_time_s=0.001 * b)) for b in (32, 128, 1024)]
    assert "no knee" in "\n".join(make_plan(sweep("knee", cluster_sizes=[1]), cluster(), flat).warnings)


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
    assert plan == make_plan(sweep("cost"), cluster(), CORNERS)


def test_the_command_replaces_the_plan_only_when_asked(run: RunDirectory) -> None:
    run.plan_file.write_text("mine")
    main([str(run.root)])
    assert run.plan_file.read_text() == "mine"
    assert main([str(run.root), "--write"]) == 0
    assert run.read_plan() == make_plan(sweep(), cluster(), CORNERS)


def test_the_command_counts_torn_lines(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with (run.profile / "task.jsonl").open("a") as file:
        file.write('{"status": "ok", "nod')
    assert main([str(run.root)]) == 0
    assert "1 damaged line of the measurements" in " ".join(capsys.readouterr().out.split())


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
    (run.profile / "task.jsonl").unlink()
    assert "no usable measurement" in line(str(run.root), code=1)
    run.sweep_file.write_text('name = "test"\n[search]\nmin_batch = 0\n')
    assert "search.min_batch" in line(str(run.root), code=2)
    run.sweep_file.unlink()
    assert "sweep.toml: no such file" in line(str(run.root), code=2)
    with pytest.raises(SystemExit, match="2"):
        main([str(run.root), "--objective", "luck"])


def loaded_after(code: str, *modules: str) -> list[str]:
    report = f"import sys\n{code}\nprint([m for m in {modules!r} if m in sys.modules])"
    command = [sys.executable, "-c", report]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    found = output.stdout.splitlines()[-1]
    return [module for module in modules if repr(module) in found]


def test_planning_never_imports_torch_or_submitit(run: RunDirectory) -> None:
    code = f"from tula_hpc.analysis.plan import main\nassert main([{str(run.root)!r}, '--json']) == 0"
    assert loaded_after(code, "torch", "submitit", "numpy") == ["numpy"]


def test_help_imports_no_numerics() -> None:
    code = "from tula_hpc.analysis.plan import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert loaded_after(code, "torch", "submitit", "numpy", "scipy", "kneed", "rich") == []


def test_the_package_refuses_its_bare_name() -> None:
    command = [sys.executable, "-c", "import analysis"]
    output = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert output.returncode != 0
    assert "ImportError: import this package as tula_hpc.analysis" in output.stderr
