"""A script from its sweep file to a plan, on this machine, in real processes through the command."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.forked_jobs import run_command
from tests.known import known
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunDirectory, is_usable
from tula_hpc.sweep import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "sweeps" / "own_script.toml"
SCRIPTS = ROOT / "tests" / "attach" / "scripts"
QUICK = ("search.warmup_steps=1", "search.min_steps=5", "search.max_steps=5", "search.mode=full")


def sweep(path: Path, folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return run_command(main, [str(path), "--run-dir", str(folder / "run"), "--until", "plan", *words], folder)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, str]:
    """The run and the output of the shipped example: 1 and 2 nodes, batches of 64 and 128."""
    folder = tmp_path_factory.mktemp("example")
    done = sweep(EXAMPLE, folder, *QUICK, "search.min_batch=64", "search.max_batch=128")
    assert done.returncode == 0, done.stderr + done.stdout
    return RunDirectory(folder / "run"), done.stdout


def test_all_configurations_of_the_example_are_measured(planned: tuple[RunDirectory, str]) -> None:
    records = planned[0].measurements().records
    assert {(m.nodes, m.nodes * m.local_batch) for m in records} == {(n, b) for n in (1, 2) for b in (64, 128)}
    assert all(is_usable(m) for m in records)
    assert {m.nodes: m.backend for m in records} == {1: "none", 2: "gloo"}
    for m in records:
        assert m.dataset_samples == 1438
        assert (known(m.times).allreduce_time_s > 0) == (m.nodes > 1)
        assert m.node_seconds >= m.elapsed_s > 0
        assert known(m.identity).sources.keys() == {"own_script.py"}
    # the start is measured once a job
    assert sorted(m.start_s > 0 for m in records) == [False, False, True, True]


def test_the_bare_all_reduce_is_timed_once(planned: tuple[RunDirectory, str]) -> None:
    records = [m for m in planned[0].measurements().records if m.nodes == 2]
    assert len({m.times.allreduce_time_s for m in records if m.times}) == 1
    assert sum("allreduce" in m.samples for m in records) == 1


def test_a_plan_is_made_from_the_measurements(planned: tuple[RunDirectory, str]) -> None:
    run, output = planned
    plan = known(run.read_plan())
    assert plan.chosen.feasible
    assert plan.chosen.global_batch in (64, 128)
    # with the digits, a profile sees many epochs
    assert all(m.between_epochs_s for m in run.measurements().records)
    assert plan.chosen.wall_parts_s["evaluation"] > 0
    notes = " ".join(plan.notes)
    assert "outside its steps (evaluation, saving, start of loaders) takes " in notes
    assert "as its profiles measured" in notes
    assert "profiling cost: 4 configurations in 2 jobs" in output


def test_a_scripts_output_is_kept_and_its_files_are_not(planned: tuple[RunDirectory, str]) -> None:
    run = planned[0]
    assert len(list(run.profile.glob("*/*/rank-0.log"))) == 4
    assert not list(run.profile.rglob("last.pt"))
    assert not (run.root.parent / "last.pt").exists()


def mine(folder: Path, way: str, **keys: str) -> Path:
    path = folder / "mine.toml"
    more = "\n".join(f"{key} = {value}" for key, value in keys.items())
    path.write_text(f"""
name = "mine"
[workload]
script = "{SCRIPTS / "misbehaving.py"}"
arguments = ["{way}", "{{local_batch}}"]
samples = 4000
epochs = 2
{more}
[search]
cluster_sizes = [2]
min_batch = 64
max_batch = 64
""")
    return path


def test_a_script_that_exits_ends_the_sweep_in_one_line(tmp_path: Path) -> None:
    done = sweep(mine(tmp_path, "exits with words"), tmp_path, *QUICK)
    assert done.returncode == 1, done.stderr
    assert "workload.script: misbehaving.py exited with code 1 before its first optimizer step" in done.stderr
    assert "Traceback" not in done.stderr
    log = Path(done.stderr.partition("its output: ")[2].splitlines()[0])
    assert log.read_text() == "no data here\n"
    (end,) = (event for event in RunDirectory(tmp_path / "run").events() if event.event == "ended" and event.job_id)
    assert end.failure is Failure.BAD_INPUT


def test_a_script_that_ends_early_is_measured_in_the_steps_that_it_takes(tmp_path: Path) -> None:
    path, script = tmp_path / "short.toml", tmp_path / "plain.py"
    script.write_text((SCRIPTS / "plain.py").read_text())
    path.write_text("""
name = "short"
[workload]
script = "plain.py"
arguments = ["--batch-size", "{local_batch}", "--samples", "1600", "--epochs", "4"]
samples = 1600
epochs = 4
[search]
cluster_sizes = [1, 2]
min_batch = 64
max_batch = 512
mode = "partial"
""")
    done = sweep(path, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    records = RunDirectory(tmp_path / "run").measurements().records
    measured = [m for m in records if m.status == "ok"]
    assert sorted(m.configuration for m in measured) == [(1, 1, 64), (2, 1, 32)]
    # the script takes 100 steps, including those that measure something else than whole steps
    assert all(10 <= m.steps <= 40 for m in measured)
    # too few steps of the largest batch
    left_out = [m for m in records if m.is_left_out]
    assert sorted(m.configuration for m in left_out) == [(1, 1, 512), (2, 1, 256)]
    assert len(records) == 4
    assert "N=1 b=512 (B=512), N=2 b=256 (B=512) were not measured: the script takes too few" in done.stdout
    # the same script is not tried again, a changed one is
    assert sweep(path, tmp_path).returncode == 0
    assert len(RunDirectory(tmp_path / "run").measurements().records) == 4
    script.write_text(script.read_text().replace("range(options.epochs)", "range(100 * options.epochs)"))
    done = sweep(path, tmp_path, "search.max_steps=20")
    assert done.returncode == 0, done.stderr + done.stdout
    records = RunDirectory(tmp_path / "run").measurements().records
    now = [m.configuration for m in records if m.status == "ok"]
    assert sorted(now) == [(1, 1, 64), (1, 1, 512), (2, 1, 32), (2, 1, 256)]
    assert len(records) == 6
    assert "takes too few" not in done.stdout


def test_a_script_that_takes_a_number_of_steps_is_planned_with_all_of_them(tmp_path: Path) -> None:
    """It gives out full batches only: 15 in a pass, though an epoch is 15.625 batches."""
    script = (SCRIPTS / "plain.py").read_text()
    script = script.replace('"--epochs", type=int, default=2)', '"--steps", dest="epochs", type=int)')
    (tmp_path / "steps.py").write_text(script)
    path = tmp_path / "steps.toml"
    path.write_text("""
name = "steps"
[workload]
script = "steps.py"
arguments = ["--batch-size", "{local_batch}", "--samples", "1000", "--steps", "{steps}"]
samples = 1000
epochs = 50
[search]
cluster_sizes = [1]
min_batch = 64
max_batch = 64
""")
    done = sweep(path, tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr + done.stdout
    plan = known(RunDirectory(tmp_path / "run").read_plan())
    assert plan.chosen.epoch_time_s == pytest.approx(15.625 * plan.chosen.step_time_s)


def test_a_batch_that_memory_forbids_is_taken_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "parts.toml"
    path.write_text(f"""
name = "parts"
[workload]
script = "{SCRIPTS / "averaging.py"}"
arguments = [
    "--batch-size", "{{local_batch}}", "--accumulate", "{{accumulation}}", "--largest-batch", "16"
]
samples = 4096
epochs = 2
[objective]
kind = "time"
[search]
cluster_sizes = [1]
min_batch = 16
max_batch = 32
""")
    done = sweep(path, tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr + done.stdout
    run = RunDirectory(tmp_path / "run")
    found = [(m.local_batch, m.accumulation, m.failure) for m in run.measurements().records]
    good = [(16, 1, None), (32, 2, None)]
    assert Counter(found) == Counter([*good, (32, 1, Failure.DEVICE_OOM)])
    plan = known(run.read_plan())
    assert [(c.local_batch, c.accumulation, c.feasible) for c in plan.candidates] == [
        (batch, passes, True) for batch, passes, _ in good
    ]
    assert "in 2 parts" in done.stdout


def test_a_mistake_in_the_file_is_reported_before_any_job(tmp_path: Path) -> None:
    path = mine(tmp_path, "trains")
    path.write_text(path.read_text().replace("misbehaving.py", "gone.py"))
    done = sweep(path, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mine.toml: workload.script: no such file" in done.stderr
    assert not (tmp_path / "run").exists()
