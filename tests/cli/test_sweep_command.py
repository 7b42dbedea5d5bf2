"""The command line: what a user types, and what happens after a mistake."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.closed_folder import close_folder
from tests.fake_slurm import put_commands
from tests.known import known
from tests.planning_data import failed, ok
from tests.run_factory import EPOCHS, candidate, make_run, plan, script_spec, sweep_of, write_plan, write_training
from tula_hpc.__main__ import main as tula
from tula_hpc.analysis.costs.training_bill import Compared, Source, TrainingBill
from tula_hpc.analysis.plan import lost_inputs
from tula_hpc.analysis.report.bill_text import bill_sentences, promised_amounts
from tula_hpc.cli import open_run as opening
from tula_hpc.cli.changed_inputs import changes_of, freeze
from tula_hpc.cli.commands import COMMANDS
from tula_hpc.cli.open_run import check_run, open_run
from tula_hpc.cli.options import load_inputs
from tula_hpc.cli.pipeline import _cost, _decision, _model_lines, _say_plan, _say_what_it_takes, carry_out
from tula_hpc.config import PUT_BACK, ClusterSpec, SweepSpec, load_cluster, load_frozen_sweep, load_sweep
from tula_hpc.errors import InputError, RunDirectoryError, TrialError
from tula_hpc.files import PLAN_WITHOUT_MEASUREMENTS
from tula_hpc.formatting import command_line, format_duration, format_money
from tula_hpc.launch.local_executor import is_alive
from tula_hpc.records import Configuration, Footprint, JobNote, RunDirectory, append_record
from tula_hpc.stages.batches_that_fit import Estimate
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.rehearsal import ELSEWHERE
from tula_hpc.status import __main__ as status
from tula_hpc.status.run_files import read_facts
from tula_hpc.sweep import _parser, main
from tula_hpc.workloads.footprint import estimate_footprint

SWEEP = """
name = "small"
[workload]
dataset = "digits"
[search]
cluster_sizes = [1, 2]
min_batch = 32
max_batch = 64
estimate = false
"""
# where the workload is tried, or memory estimated, in a process that imports torch
SET_BACK = (
    "Set them back in your file (or in this copy, if it was edited); or use another name in it, or "
    "another --run-dir, for a sweep of its own, which measures again."
)
TRIED = ("--set", "search.estimate=true")


@pytest.fixture
def sweep_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SWEEP)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--set", "workload.epochs=3", "--set", "search.min_batch=128"],
            "small.toml with --set search.min_batch=128: search.min_batch: 128 is above max_batch = 64",
        ),
        (["--set", "search.max_batch=8"], "small.toml with --set search.max_batch=8: search.min_batch: 32 is above"),
        (["--set", "objective.max_global_batch=1"], "objective.max_global_batch: 1 is below search.min_batch"),
        (["--set", "search.cluster_sizes=[0]"], "search.cluster_sizes.0"),
        (["--set", "workload.model=resnet19"], "did you mean 'resnet18'"),
        (["--set", "workload.dataset=imagenet"], "workload.data_dir"),
        (["--set", "workload.epoch=3"], "did you mean 'epochs'"),
        (["--set", "max_batch=32"], "--set: max_batch: unknown key (did you mean search.max_batch?)"),
        (["--cluster", "small.toml"], "small.toml: is a sweep file (it has [workload]); expected a cluster file"),
        (
            ["--set", "cluster.max_nodes=1"],
            "with --set cluster.max_nodes=1: search.cluster_sizes: 2 nodes, but the default cluster (this machine) has",
        ),
        (["--set", "search.cluster_sizes=[1,128]"], "max_nodes"),
        (["--set", "workload.precision=fp16"], "workload.precision"),
        (["--set", "workload.samples=50"], "search.max_batch: 64 is above workload.samples = 50"),
        (
            ["--set", "search.min_batch=2048", "--set", "search.max_batch=4096"],
            "with --set search.min_batch=2048 --set search.max_batch=4096: search.min_batch: 2048 is above the 1438",
        ),
        (["--cluster", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--detach"], '--detach: needs a cluster with executor = "slurm"'),
        (["--take-over"], "--take-over: nothing is detached here"),
        (["--take-over", "--dry-run"], "--take-over: cancels controller jobs, but --dry-run changes nothing"),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_is_created(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([str(sweep_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in sweep_file.parent.iterdir()] == ["small.toml"]


def test_a_run_below_a_folder_that_may_not_be_searched_is_bad_input(
    sweep_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    close_folder("theirs", monkeypatch)
    # as from Python 3.14 on
    monkeypatch.setattr(Path, "exists", os.path.exists)
    assert main([str(sweep_file), "--run-dir", "theirs/run"]) == 2
    where = sweep_file.parent / "theirs" / "run"
    assert capsys.readouterr().err == f"{where}: cannot be reached: Permission denied; use another --run-dir\n"


CLUTSER = r"unrecognized arguments: --clutser c\.toml \(did you mean --cluster\?\)"


@pytest.mark.parametrize(
    ("command", "arguments", "mistake"),
    [
        ("sweep", ["--until", "plann"], r"argument --until: invalid choice: .* \(did you mean plan\?\)"),
        ("sweep", ["--cluster", ""], "argument --cluster: expected a path, got an empty text"),
        ("sweep", ["--clutser", "c.toml"], CLUTSER),
        ("study", ["--clutser", "c.toml"], CLUTSER),
        ("footprint", ["--clutser", "c.toml"], CLUTSER),
    ],
)
def test_a_mistyped_word_of_the_command_line_is_named(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], mistake: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(COMMANDS[command].module).main([str(sweep_file), *arguments])
    assert re.fullmatch(f"tula {command}: {mistake}; see tula {command} --help\n", capsys.readouterr().err)


def inputs_of(sweep_file: Path, *keys: str, cluster: Path | None = None) -> tuple[SweepSpec, ClusterSpec]:
    """Read the input files with these keys set, as the command does."""
    given = [str(sweep_file), *(word for key in keys for word in ("--set", key))]
    return load_inputs(_parser().parse_args([*given, "--cluster", str(cluster)] if cluster else given))


def measure(run: RunDirectory) -> None:
    """Write a measurement of a job whose end has been handled."""
    run.log_event("submitted", "profile", job_id="1")
    append_record(run.profile / "n1-b32-0.jsonl", ok(1, 32))
    run.log_event("ended", "profile", job_id="1")


def test_a_forgotten_cluster_file_is_named(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_file = sweep_file.parent / "cluster.toml"
    cluster_file.write_text("max_nodes = 2\n")
    root = sweep_file.parent / "my run"
    run = open_run(*inputs_of(sweep_file, cluster=cluster_file), root).run
    measure(run)
    for nodes, values in ((64, []), (3, ["--set", "cluster.max_nodes=3"])):
        assert main([str(sweep_file), "--run-dir", str(root), "--dry-run", *values]) == 2
        error = capsys.readouterr().err
        assert f"made from other inputs, and no cluster is given now:\n  max_nodes: 2 before, {nodes} now\n" in error
        assert f"Add --cluster '{run.cluster_file}'; or use another --run-dir" in error


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_other_inputs_are_refused_with_the_difference(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], dry: tuple[str, ...]
) -> None:
    root = sweep_file.parent / "run"
    run = open_run(*inputs_of(sweep_file), root).run
    measure(run)
    (run.train().root / "checkpoints").mkdir(parents=True)
    again = [str(sweep_file), "--run-dir", str(root), *dry]
    assert main([*again, "--set", "workload.epochs=99"]) == 2
    error = capsys.readouterr().err
    assert "made from other inputs" in error
    assert "than your sweep file (or --set) has now" in error
    assert "workload.epochs: 10 before, 99 now" in error
    assert "plan again" not in error
    away = f"move {run.root / 'train'} away: it holds what is trained so far."
    assert f"To train from the start over the same measurements, {away}" in error
    run.train().result_file.touch()
    assert main([*again, "--set", "workload.epochs=99"]) == 2
    assert (
        "belongs to a training that is over and was made from other inputs than your sweep file (or --set) has now:"
        in capsys.readouterr().err
    )
    run.train().result_file.unlink()
    # as if copied from another run
    assert main([*again, "--set", "name=another"]) == 2
    assert f"(or in this copy, if it was edited), and add --run-dir {root}; or use " in capsys.readouterr().err
    assert main([*again, "--set", "workload.seed=99"]) == 2
    assert "anew" not in capsys.readouterr().err
    assert main([*again, "--set", "objective.budget=99"]) == 2
    error = capsys.readouterr().err
    assert "objective.budget: not set before, 99.0 now" in error
    plan_again = command_line("plan", str(root), "--set", "KEY=VALUE")
    assert f"To plan again over the same measurements: {plan_again}\n" in error, "the training has its own plan"
    assert "away: it holds" in error
    (run.train().root / "checkpoints").rmdir()
    run.train().root.rmdir()
    run.log_event("submitted", "control", job_id="9")
    assert main([*again, "--set", "workload.epochs=99"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  workload.epochs: 10 before, 99 now",
        SET_BACK,
        "The sweep goes on unattended: other values are accepted once job 9 is over.",
    ]


def test_a_refusal_lists_only_what_may_not_change(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = "workload.dataset=cifar10"
    run = open_run(*inputs_of(sweep_file, data, "workload.data_dir=/"), sweep_file.parent / "run").run
    measure(run)
    given = [data, "workload.data_dir=/tmp", "workload.lr=0.2", "objective.kind=cost", "workload.seed=3"]
    command = [str(sweep_file), "--run-dir", str(run.root), *(word for key in given for word in ("--set", key))]
    assert main(command) == 2
    assert capsys.readouterr().err.splitlines()[1:] == ["  workload.seed: 0 before, 3 now", SET_BACK]
    (run.train().root / "checkpoints").mkdir(parents=True)
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == SET_BACK
    refused = [line.split(":")[0].strip() for line in lines[1:-1]]
    assert refused == ["objective.kind", "workload.lr", "workload.seed"]


def test_inputs_may_be_corrected_until_something_was_measured(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def inputs(seed: int) -> tuple[SweepSpec, ClusterSpec]:
        return inputs_of(sweep_file, f"workload.seed={seed}")

    run = open_run(*inputs(7), sweep_file.parent / "run").run
    (run.root / "footprint.json").write_text("{}")
    run.log_event("submitted", "profile", job_id="1")
    append_record(run.profile / "n1-b32-0.jsonl", failed(1, 32))
    run.log_event("ended", "profile", job_id="1")
    check_run(*inputs(8), run.root)
    assert load_sweep(run.sweep_file).workload.seed == 7
    with (
        run.locked(),
        pytest.raises(RunDirectoryError, match=r"is in use by .*another name or --run-dir makes a run of its own$"),
    ):
        open_run(*inputs(8), run.root)
    open_run(*inputs(8), run.root)
    assert load_sweep(run.sweep_file).workload.seed == 8
    aside = run.root / "earlier-1"
    line = f"{run.root}: no measurement was made with the earlier inputs: the new ones replace them"
    assert capsys.readouterr().err == f"{line}; the files of the earlier jobs are in {aside}\n"
    assert [*run.measurements().records, *run.events(), *run.root.glob("footprint*")] == []
    assert {path.name for path in aside.iterdir()} == {"events.jsonl", "footprint.json", "profile"}
    run.log_event("failed", "profile", detail="refused before any job")
    open_run(*inputs(9), run.root)
    assert not (run.root / "earlier-2").exists(), "the earlier inputs have no measurements to put aside"
    assert run.events() == []
    measure(run)
    with pytest.raises(RunDirectoryError, match="made from other inputs"):
        check_run(*inputs(10), run.root)
    (run.profile / "n1-b32-0.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError, match="made from other inputs"):
        open_run(*inputs(10), run.root)
    assert load_sweep(run.sweep_file).workload.seed == 9


def test_a_run_on_slurm_asks_for_its_cluster_file(sweep_file: Path) -> None:
    spec, here = inputs_of(sweep_file)
    run = open_run(spec, ClusterSpec(executor="slurm", partition="batch"), sweep_file.parent / "run").run
    measure(run)
    with pytest.raises(RunDirectoryError, match=f"give its cluster file: --cluster {re.escape(str(run.cluster_file))}"):
        check_run(spec, here, run.root)


def test_a_run_without_a_cluster_file_is_called_that_where_one_is_given(sweep_file: Path) -> None:
    spec, here = inputs_of(sweep_file)
    run = open_run(spec, here, sweep_file.parent / "run").run
    measure(run)
    with pytest.raises(RunDirectoryError) as raised:
        check_run(spec, ClusterSpec(executor="slurm", partition="batch", memory_gb=4.0), run.root)
    message = "was made without --cluster, on this machine; to measure on Slurm use another --run-dir"
    assert str(raised.value) == f"{run.cluster_file}: {message}"


def test_other_inputs_wait_for_the_jobs_of_the_earlier_ones(sweep_file: Path) -> None:
    run = open_run(*inputs_of(sweep_file), sweep_file.parent / "run").run
    others = inputs_of(sweep_file, "workload.seed=1")
    folder = run.slurm / "profile-1"
    folder.mkdir()
    # left by a command that was killed while it submitted
    notice = folder / "submission.json"
    notice.write_text('{"name": "x", "stage": "profile", "tasks": [{}]}')
    with pytest.raises(RunDirectoryError, match="made from other inputs"):
        open_run(*others, run.root)
    run.log_event("submitted", "profile", job_id="99999999", data={"folder": "slurm/profile-1"})
    with (folder / "99999999.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_alive(folder, "99999999")
        words = "other inputs are accepted once job 99999999 is over; to cancel: kill -KILL -99999999"
        with pytest.raises(RunDirectoryError, match=words):
            check_run(*others, run.root)
        with pytest.raises(RunDirectoryError, match=words):
            open_run(*others, run.root)
    open_run(*others, run.root)
    assert (run.root / "earlier-1" / "slurm" / "profile-1" / "submission.json").exists()
    assert not list(run.slurm.iterdir())


def test_a_copy_of_a_run_at_work_does_not_wait_for_jobs_that_write_elsewhere(sweep_file: Path) -> None:
    inputs = inputs_of(sweep_file)
    # whoever made the copied run chose this name, and the message asks for it to be typed
    run = open_run(*inputs, sweep_file.parent / "run; ls").run
    folder = run.slurm / "profile-1"
    folder.mkdir()
    data = {"run": str(run.root), "folder": "slurm/profile-1"}
    run.log_event("submitted", "profile", job_id="99999999", data=data)
    copied = sweep_file.parent / "my copy"
    with (folder / "99999999.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        shutil.copytree(run.root, copied)
        with (copied / "slurm" / "profile-1" / "99999999.lock").open("w") as its:
            fcntl.flock(its, fcntl.LOCK_EX)
            with pytest.raises(RunDirectoryError, match=f"whose job 99999999 is at work .* --run-dir '{run.root}', or"):
                open_run(*inputs, copied)
        assert f"this is a copy of {run.root}: its job 99999999 writes there, not here" in (
            read_facts(RunDirectory(copied)).doubts
        )
        assert read_facts(run).doubts == []
    open_run(*inputs, copied)
    shutil.rmtree(copied)
    run.root.rename(copied)
    renamed = f"this run was called {run.root.name}: to go on with it add --run-dir '{copied}'"
    assert read_facts(RunDirectory(copied)).doubts == [renamed]


def test_inputs_that_another_command_replaced_are_not_worked_with(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_two(*inputs: Any, **options: Any) -> Any:
        opened = open_run(*inputs, **options)
        open_run(*inputs_of(sweep_file, "workload.seed=1"), opened.run.root)
        return opened

    monkeypatch.setattr("tula_hpc.cli.open_run.open_run", open_two)
    assert main([str(sweep_file), "--run-dir", "run"]) == 2
    assert "another command has just changed its inputs" in capsys.readouterr().err


def test_data_may_move_at_any_time(sweep_file: Path) -> None:
    def inputs(*more: str) -> tuple[SweepSpec, ClusterSpec]:
        return inputs_of(sweep_file, "workload.dataset=cifar10", *more)

    run = open_run(*inputs("workload.data_dir=/"), sweep_file.parent / "run").run
    measure(run)
    run.plan_file.write_text("{}")
    (run.train().root / "checkpoints").mkdir(parents=True)
    run.make_train().metrics_file.write_text("")
    open_run(*inputs("workload.data_dir=/tmp"), run.root)
    assert load_sweep(run.sweep_file).workload.data_dir == Path("/tmp")
    assert run.plan_file.exists(), "the plan is still that of the training"
    with pytest.raises(RunDirectoryError, match=r"workload\.augment: true before, false now"):
        open_run(*inputs("workload.data_dir=/", "workload.augment=false"), run.root)


def test_bounds_of_the_search_may_change_until_something_was_trained(sweep_file: Path) -> None:
    run = open_run(*inputs_of(sweep_file, "search.max_batch=4096"), sweep_file.parent / "run").run
    measure(run)
    open_run(*inputs_of(sweep_file, "search.max_batch=1024"), run.root)
    assert load_sweep(run.sweep_file).search.max_batch == 1024
    assert run.measurements().records
    (run.train().root / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match="To train from the start"):
        open_run(*inputs_of(sweep_file, "search.max_batch=512"), run.root)


def test_what_no_measurement_depends_on_may_change_until_something_was_trained(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(*inputs_of(sweep_file), sweep_file.parent / "run").run
    measure(run)
    run.plan_file.write_text("{}")
    changed = inputs_of(sweep_file, "workload.lr=0.01", "objective.kind=cost", "training.delta=0.3")
    check_run(*changed, run.root)
    assert run.plan_file.exists()
    opened = open_run(*changed, run.root)
    assert load_sweep(run.sweep_file) == opened.spec == changed[0]
    assert not run.plan_file.exists(), "the plan is made anew"
    assert "workload.lr: 0.05 before, 0.01 from now on" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match=r"workload\.seed: 0 before, 1 now"):
        open_run(*inputs_of(sweep_file, "workload.lr=0.01", "workload.seed=1"), run.root)
    other = inputs_of(sweep_file, "workload.lr=0.02", "objective.kind=cost", "training.delta=0.3")
    # a finished job whose files were moved away; no process has its number
    run.log_event("submitted", "train", job_id="99999999")
    check_run(*other, run.root)
    run.train().root.mkdir()
    run.train().metrics_file.write_text("")
    with pytest.raises(RunDirectoryError, match="To train from the start"):
        open_run(*other, run.root)


@pytest.mark.parametrize("key", ["tf32", "cudnn_benchmark"])
def test_a_run_of_an_earlier_version_goes_on_until_a_new_key_is_set(sweep_file: Path, key: str) -> None:
    """Otherwise nobody would know which kernels were measured."""

    run = open_run(*inputs_of(sweep_file), sweep_file.parent / "run").run
    measure(run)
    lines = run.sweep_file.read_text().splitlines(keepends=True)
    run.sweep_file.write_text("".join(line for line in lines if not line.startswith(f"{key} =")))
    assert run.sweep_file.read_text() != "".join(lines)
    open_run(*inputs_of(sweep_file), run.root)
    with pytest.raises(RunDirectoryError, match=rf"workload\.{key}: not set before, false now"):
        open_run(*inputs_of(sweep_file, f"workload.{key}=false"), run.root)


@pytest.mark.parametrize(
    ("table", "key"), [("workload", "hang_minutes"), ("workload", "accumulation"), ("study", "tuning_holdout")]
)
def test_a_run_of_an_earlier_version_may_lack_a_key_of_scripts_or_studies(tmp_path: Path, table: str, key: str) -> None:
    script = {"script": "/x.py", "arguments": ["{local_batch}"], "samples": 64, "epochs": 1}
    tables = {"workload": {"workload": script}, "study": {"study": {"methods": ["lbt"], "batches": [64]}}}[table]
    spec = SweepSpec.model_validate({"name": "x", **tables}, context={"check_paths": False})
    path = tmp_path / "sweep.toml"
    lines = freeze(spec).splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{key} =")))
    assert path.read_text() != "".join(lines)
    assert changes_of(path, spec) == {}


@pytest.mark.parametrize(
    ("file", "table", "line", "refused"),
    [
        ("sweep_file", "training", "no_such_key = 8", "unknown key"),
        ("sweep_file", "training", f"delta = {'9' * 5000}", "value has 5000 digits; it says what was measured"),
        ("cluster_file", "pricing", "checkpoint_write_s = 7.0", r"7\.0 before, not set now"),
    ],
)
def test_a_run_whose_file_has_what_is_not_set_now_does_not_go_on(
    sweep_file: Path, file: str, table: str, line: str, refused: str
) -> None:
    run = open_run(*inputs_of(sweep_file), sweep_file.parent / "run").run
    measure(run)
    (run.train().root / "checkpoints").mkdir(parents=True)
    path = getattr(run, file)
    frozen = path.read_text()
    path.write_text(frozen.replace(f"[{table}]\n", f"[{table}]\n{line}\n"))
    assert path.read_text() != frozen
    with pytest.raises(RunDirectoryError, match=refused):
        open_run(*inputs_of(sweep_file), run.root)


@pytest.mark.parametrize("command", ["status", "report", "plan", "init", "sweep"])
def test_a_working_directory_that_was_deleted_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="2"):
        tula([command, "any"])
    assert capsys.readouterr().err.startswith("the working directory has been deleted: cd to a folder that exists")


def test_how_jobs_are_submitted_may_change_while_a_run_goes_on(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def inputs(*keys: str) -> tuple[SweepSpec, ClusterSpec]:
        return inputs_of(sweep_file, *(f"cluster.{key}" for key in keys), cluster=cluster_file)

    cluster_file = sweep_file.parent / "c.toml"
    cluster_file.write_text('executor = "slurm"\naccount = "spent"\n')
    run = open_run(*inputs(), sweep_file.parent / "run").run
    measure(run)
    check_run(*inputs("account=rich"), run.root)
    assert load_cluster(run.cluster_file).account == "spent"
    opened = open_run(*inputs("account=rich", "train_minutes=90"), run.root)
    assert (opened.cluster.account, load_cluster(run.cluster_file)) == ("rich", opened.cluster)
    assert "account: spent before, rich from now on" in capsys.readouterr().err
    # a plan takes the time limit into account
    run.plan_file.touch()
    open_run(*inputs("account=rich", "train_minutes=90", "qos=long"), run.root)
    assert run.plan_file.exists()
    open_run(*inputs("account=rich", "train_minutes=2"), run.root)
    assert not run.plan_file.exists()
    candidates = [candidate(Configuration(1, 1, batch)) for batch in (32, 64)]
    write_plan(run, plan(candidates, other_objective=["objective.budget = 9.0"]))
    open_run(*inputs("account=rich", "train_minutes=3"), run.root)
    assert "by your sweep file, without objective.budget = 9.0 (tula plan --write)" in capsys.readouterr().err
    # nothing was measured between nodes
    open_run(*inputs("account=rich", "environment.GLOO_SOCKET_IFNAME=ib0"), run.root)
    append_record(run.profile / "n2-b32-0.jsonl", ok(2, 32))
    with pytest.raises(RunDirectoryError, match="_IFNAME: one value before, another now"):
        open_run(*inputs("account=rich", "environment.GLOO_SOCKET_IFNAME=eth0"), run.root)
    with run.locked(), pytest.raises(RunDirectoryError, match="is in use by"):
        open_run(*inputs("account=other", "environment.GLOO_SOCKET_IFNAME=ib0"), run.root)
    with pytest.raises(RunDirectoryError, match="partition: not set before, gpu now"):
        open_run(*inputs("account=other", "partition=gpu", "environment.GLOO_SOCKET_IFNAME=ib0"), run.root)
    assert load_cluster(run.cluster_file).account == "rich"


def test_what_a_scripts_output_is_searched_for_may_change_after_profiles(sweep_file: Path) -> None:
    metrics = (f"{name} (?P<test_accuracy>.*)" for name in ("acc", "Acc"))
    before, after = (script_spec(sweep_file.parent, metric=metric) for metric in metrics)
    run = open_run(before, ClusterSpec(), sweep_file.parent / "run").run
    measure(run)
    check_run(after, ClusterSpec(), run.root)
    (run.train().root / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        RunDirectoryError,
        match=r"metric: acc[^;]*\nSet .*\nTo train from the start over the same measurements, move .*tr",
    ):
        check_run(after, ClusterSpec(), run.root)
    (run.root / "train").rename(run.root / "earlier-train")
    check_run(after, ClusterSpec(), run.root)


def test_a_script_that_is_gone_after_it_was_measured_gets_its_name_back(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_file.write_text(
        'name = "x"\n[workload]\nscript = "train.py"\narguments = ["{local_batch}"]\nsamples = 2048\nepochs = 3\n'
    )
    assert main([str(sweep_file)]) == 2
    assert capsys.readouterr().err.endswith("; check the path\n")
    measure(RunDirectory(sweep_file.parent / "runs" / "x").create())
    assert main([str(sweep_file)]) == 2
    refused = capsys.readouterr().err
    lost = sweep_file.parent / "train.py"
    assert refused.startswith(f"{sweep_file}: workload.script: {lost}: no such file; check the path. If this run has ")
    assert refused.endswith("give the file that name again, or measure another script with another --run-dir\n")


def test_a_script_whose_folder_was_moved_is_the_same(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, copied, moved = (sweep_file.parent / name for name in ("first", "copied", "moved"))
    first.mkdir()
    run = open_run(script_spec(first), ClusterSpec(), first / "run").run
    measure(run)
    shutil.copytree(first, copied)
    open_run(script_spec(copied), ClusterSpec(), copied / "run")
    (copied / "train.py").write_text("another = 1\n")
    with pytest.raises(RunDirectoryError, match=r"workload\.script: .*first/train\.py before, .*copied/train\.py now"):
        open_run(script_spec(copied), ClusterSpec(), run.root)
    first.rename(moved)
    open_run(script_spec(moved), ClusterSpec(), moved / "run")
    assert load_frozen_sweep(moved / "run" / "sweep.toml").workload.script == moved / "train.py"
    assert "workload.script: " in capsys.readouterr().err
    (other := moved / "other.py").touch()
    with pytest.raises(RunDirectoryError, match=r"workload\.script"):
        open_run(script_spec(moved, script=str(other)), ClusterSpec(), moved / "run")


def test_keys_of_a_partition_are_free_as_those_of_the_cluster(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def inputs(*keys: str) -> tuple[SweepSpec, ClusterSpec]:
        return inputs_of(sweep_file, *(f"partitions.{key}" for key in keys), cluster=cluster_file)

    cluster_file = sweep_file.parent / "c.toml"
    tables = ['[[partitions]]\npartition = "v1.pricing.x"\naccount = "spent"\n', '[[partitions]]\npartition = "dear"\n']
    cluster_file.write_text("".join(['executor = "local"\n', *tables]))
    run = open_run(*inputs(), sweep_file.parent / "run").run
    measure(run)
    changed = inputs("dear.pricing.usd_per_node_hour=5", "v1.pricing.x.account=rich")
    open_run(*changed, run.root)
    assert load_cluster(run.cluster_file) == changed[1]
    error = capsys.readouterr().err
    assert "cluster.toml: partitions.dear.pricing.usd_per_node_hour: not set before, 5 from now on" in error
    assert "cluster.toml: partitions.v1.pricing.x.account: spent before, rich from now on" in error
    for keys, message in {
        "v1.pricing.x.max_nodes=1": r"  partitions\.v1\.pricing\.x\.max_nodes: not set before, 1 now\n",
        "dear.workers_per_node=2": r"  partitions\.dear\.workers_per_node: not set before, 2 now\n",
    }.items():
        with pytest.raises(RunDirectoryError, match=message):
            check_run(*inputs("dear.pricing.usd_per_node_hour=5", "v1.pricing.x.account=rich", keys), run.root)
    cluster_file.write_text("".join(['executor = "local"\n', *reversed(tables)]))
    with pytest.raises(RunDirectoryError, match=r'  partitions: \["v1\.pricing\.x", "dear"\] before, \["dear", "v1'):
        check_run(*inputs("dear.pricing.usd_per_node_hour=5", "v1.pricing.x.account=rich"), run.root)


def test_a_dry_run_warns_of_a_script_as_the_sweep_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    table = "[workload]\nscript = 'train.py'\narguments = ['{local_batch}.yaml']\nsamples = 2048\nepochs = 3\n"
    Path("train.toml").write_text(f"name = 'train'\n{table}[search]\ncluster_sizes = [2]\n")
    assert main(["train.toml", "--dry-run"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: train.py does not seem to use DistributedDataParallel")
    assert second.startswith("warning: no such file: 16.yaml, 32.yaml, 64.yaml and 3 more; the search may try these")


def test_a_dry_run_where_the_data_are_not_warns_and_refuses_else_what_the_sweep_refuses(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = ["--set", "workload.data_dir=/nowhere/at/all"]
    for dataset in ("imagenet", "tests.examples.own_workload:stripes"):
        mistake = [str(sweep_file), *TRIED, "--set", f"workload.dataset={dataset}", *nowhere]
        assert main(mistake) == 2
        words = capsys.readouterr().err
        assert 'workload.data_dir: no such folder: "/nowhere/at/all"' in words
        assert main([*mistake, "--dry-run"]) == 0
        assert capsys.readouterr().err == f"warning: {words}"
    mistake = [*mistake, "--set", "workload.model=json:lodas"]
    assert main(mistake) == 2
    words = capsys.readouterr().err
    assert "defines no 'lodas'" in words
    assert main([*mistake, "--dry-run"]) == 2
    assert capsys.readouterr().err == words


def test_a_mistake_that_the_trial_finds_names_the_sweep_file(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: object) -> None:
        raise TrialError("workload.model: mine:net returned None\nNothing was submitted.")

    monkeypatch.setattr("tula_hpc.cli.dry_run.rehearse", find)
    assert main([str(sweep_file), *TRIED, "--dry-run"]) == 2
    message = f"{sweep_file}: workload.model: mine:net returned None\nNothing was submitted.\n"
    assert capsys.readouterr().err.endswith(f"\n{message}")


def test_data_of_the_compute_nodes_alone_need_a_word(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster_file = sweep_file.parent / "c.toml"
    cluster_file.write_text('executor = "slurm"\n')
    keys = ("workload.dataset=imagenet", "workload.data_dir=/local/imagenet")
    given = [str(sweep_file), *(word for key in keys for word in ("--set", key))]
    on_slurm = [*given, "--cluster", str(cluster_file)]
    assert main([*on_slurm, *TRIED]) == 2
    refused = capsys.readouterr().err
    assert "workload.data_dir: no such folder: " in refused
    assert refused.endswith(f"; check the path\n{ELSEWHERE}\n")
    spec, _ = inputs_of(sweep_file, *keys, cluster=cluster_file)
    assert spec.workload.data_dir == Path("/local/imagenet")
    assert capsys.readouterr().err == f"warning: {refused.splitlines()[0]}\n"
    # on this machine jobs find no more than the command does
    assert main(given) == 2
    assert ELSEWHERE not in capsys.readouterr().err
    # another folder than the one in which the command was started
    folder = sweep_file.parent / "project"
    folder.mkdir()
    (folder / "net_of_mine.py").write_text("def build(classes, image_size): ...")
    elsewhere = shutil.copy(sweep_file, folder)
    assert main([str(elsewhere), "--set", "workload.model=net_of_mine:build", *on_slurm[-2:], *TRIED]) == 2
    refused = capsys.readouterr().err
    assert "it lies beside the sweep file: start the command in " in refused
    assert ELSEWHERE not in refused
    assert not (sweep_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (["training.delta=0.1"], "training.delta", 'with gate = "none"'),
        (["training.delta=0.1", "training.method=static"], "", ""),
        (["training.delta=0.1", "training.gate=paper"], "", ""),
        (
            ["training.small_batch=16", "training.method=lbt"],
            "training.small_batch",
            'method = "lbt" does not use it; set method = "ags", or remove it',
        ),
        (["training.lr_scaling=sqrt", "training.method=lars"], "", ""),
        (["training.lr_scaling=sqrt", "training.method=polo"], "training.lr_scaling", 'method = "polo"'),
        (["training.spike_guard=true", "training.reference=pass"], "training.spike_guard", "needs norms at every step"),
        (["training.preset=paper", "training.small_batch=16"], "", ""),
        (["training.static_scale=3.0"], "training.static_scale", 'method = "ags"'),
        (["training.static_scale=2.0"], "", ""),
        (["training.observe_gradients=false"], "training.observe_gradients", 'method = "ags"'),
        (
            ["training.drift=false", "training.drift_minutes=2"],
            "training.drift_minutes",
            "set drift = true, or remove it",
        ),
        (
            ["workload.milestones=[1]"],
            "workload.milestones",
            'schedule = "cosine" does not use it; set schedule = "step", or remove it',
        ),
        (["workload.milestones=[1]", "workload.schedule=step"], "", ""),
        (["workload.momentum=0.5", "workload.optimizer=adamw"], "workload.momentum", 'optimizer = "adamw"'),
        (["workload.holdout=0.2", "workload.test_samples=9"], "workload.test_samples", "holdout = 0.2"),
        (["workload.data_dir=/"], "workload.data_dir", "reads no folder; set workload.dataset"),
        (
            ["workload.warmup_epochs=0.5", "training.warmup_epochs=0.1"],
            "workload.warmup_epochs",
            "training.warmup_epochs overrides it",
        ),
        (["search.mode=partial", "search.max_profiles=9"], "search.max_profiles", 'set mode = "adaptive"'),
        (["search.first_step_minutes=3"], "search.first_step_minutes", "only scripts use it"),
        (["objective.cost_weight=2"], "objective.cost_weight", 'set kind = "weighted"'),
        (["cluster.device_memory_gb=8"], "device_memory_gb", "see memory_gb"),
        (
            ["cluster.executor=local", "cluster.account=a", "cluster.qos=b"],
            "account, qos",
            'set executor = "slurm", or remove this',
        ),
    ],
)
def test_a_key_that_changes_nothing_is_named(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], settings: list[str], key: str, words: str
) -> None:
    given = [part for each in settings for part in ("--set", each)]
    assert main([str(sweep_file), "--dry-run", *given]) == 0
    output = capsys.readouterr().err.splitlines()
    assert len(output) == bool(key)
    file = sweep_file if "." in key else "cluster"
    assert not key or output[0].startswith(f"warning: {file}: {key}: changes nothing: ")
    assert words in "".join(output)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["small_batch=63"], ""),
        (["small_batch=64"], "training.small_batch: 64 is not below search.max_batch, 64: "),
        (["small_batch=64", "small_batch_shrink=1"], "which scales nothing\n"),
        (["small_batch=512"], "which scales nothing until training.small_batch_shrink brings it below the batch\n"),
        (["small_batch=512", "preset=paper"], "which scales nothing\n"),
        (["small_batch=512", "method=lbt"], "changes nothing: "),
    ],
)
def test_a_reference_batch_above_every_batch_is_named(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], settings: list[str], expected: str
) -> None:
    given = [part for each in settings for part in ("--set", f"training.{each}")]
    assert main([str(sweep_file), "--dry-run", *given]) == 0
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == bool(expected)


@pytest.mark.processes
def test_a_reader_that_stops_gets_no_error(sweep_file: Path) -> None:
    command = [sys.executable, "-m", "tula_hpc.sweep", str(sweep_file), "--dry-run"]
    here = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=here)
    known(process.stdout).close()
    _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (128 + signal.SIGPIPE, b"")


def test_a_run_that_is_in_use_is_refused_with_its_owner(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sweep_file.parent / "run"
    sweep = open_run(*inputs_of(sweep_file), root)
    with sweep.run.locked():
        assert main([str(sweep_file), "--run-dir", str(root)]) == 2
    assert f"is in use by process {os.getpid()}" in capsys.readouterr().err
    assert not sweep.run.events()


def test_an_interrupt_ends_a_command_though_slurm_does_not_answer(
    sweep_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = RunDirectory(sweep_file.parent / "run").create()
    sweep = Sweep(SweepSpec(name="x"), ClusterSpec(executor="slurm"), run)
    run.log_event("submitted", "train", job_id="7")
    (sweep_file.parent / "squeue").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (sweep_file.parent / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(sweep_file.parent))
    monkeypatch.setattr(opening, "LAST_ANSWER_S", 0.2)
    monkeypatch.setattr("tula_hpc.cli.pipeline.carry_out", interrupted)
    # it is ignored in the background of a shell without job control
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a second Ctrl-C while Slurm is asked
    once_more = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    once_more.start()
    assert opening.work(sweep, "report") == 130
    once_more.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    output = capsys.readouterr().err
    assert "interrupted. To continue, run the same command again, or from anywhere: cd " in output
    assert "unless they are over: Slurm does not answer; to cancel them: scancel 7" in output
    assert " --detach\n" not in output
    monkeypatch.setattr("tula_hpc.cli.detached.carry_on_detached", interrupted)
    assert opening.work(sweep, "report", detach=True) == 130
    assert " --detach\n" in capsys.readouterr().err


def test_an_interrupt_before_the_work_is_reported(
    sweep_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tula_hpc.sweep.load_inputs", interrupted)
    assert main([str(sweep_file)]) == 130
    assert capsys.readouterr().err == "\ninterrupted before anything was begun\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_swallows_while_inputs_are_read_ends_the_command(
    sweep_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def swallowing(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise InputError("goes on")

    monkeypatch.setattr("tula_hpc.config.load_together", swallowing)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            main([str(sweep_file)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capfd.readouterr().err == "\ninterrupted before anything was begun\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sweep.toml", None, f"is missing; {PUT_BACK}"),
        ("sweep.toml", "name = ", PUT_BACK),
        ("cluster.toml", "name = ", PUT_BACK),
        ("plan.json", "{", "delete it, and the command of the sweep makes it again"),
    ],
)
def test_status_and_the_command_say_the_same_about_a_lost_file(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, words: str
) -> None:
    run = open_run(*inputs_of(sweep_file), sweep_file.parent / "run").run
    run.log_event("submitted", "train", job_id="2")
    run.log_event("ended", "train", job_id="2")
    run.train().checkpoints.mkdir(parents=True)
    lost = run.root / name
    lost.unlink(missing_ok=True)
    if content is not None:
        lost.write_text(content)
        assert lost_inputs(run) == "", "nothing was measured with them"
    measure(run)
    if content is not None:
        lost.touch()
    assert main([str(sweep_file), "--run-dir", str(run.root)]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith(f"{lost}: ")
    assert refused.endswith(f"{words}\n")
    assert refused.count("\n") == 1
    assert status.main([str(run.root), "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert (output["state"], output["words"]) == ("failed", refused.rstrip("\n"))


def test_a_foreign_folder_is_not_taken_over(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep_file.parent / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").touch()
    assert main([str(sweep_file), "--run-dir", str(folder)]) == 2
    assert "not empty and not a run directory" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["chapter1.tex"]
    # left by a job whose run was deleted while it ran
    rest = sweep_file.parent / "deleted" / "train" / "main"
    rest.mkdir(parents=True)
    (rest / "metrics.jsonl").touch()
    assert main([str(sweep_file), "--run-dir", str(rest.parents[1])]) == 2
    assert "holds the rest of a run that was deleted" in capsys.readouterr().err


def test_a_run_directory_that_cannot_be_made_is_refused(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(sweep_file), "--run-dir", "/proc/x"]) == 2
    words = capsys.readouterr().err
    assert words.startswith("/proc/x: cannot be made: ")
    assert words.endswith("; use another --run-dir\n")


@pytest.mark.parametrize("below", ["", "x"])
@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--cluster", "c.toml"], ["--cluster", "c.toml", "--dry-run"]])
@pytest.mark.parametrize(
    "table", ["", '[study]\nnodes = 1\nbatches = [64]\nmethods = ["lbt"]\n'], ids=["sweep", "study"]
)
def test_a_file_in_the_place_of_a_run_directory_is_refused_as_that_before_slurm_is_asked(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], below: str, options: list[str], table: str
) -> None:
    sweep_file.write_text(f"{SWEEP}{table}")
    Path("c.toml").write_text('executor = "slurm"\n')
    file = Path("runs").absolute() if below else Path("other").absolute()
    file.touch()
    where = [] if below else ["--run-dir", str(file)]
    assert main([str(sweep_file), *where, *options]) == 2
    # a study does not use [search], and says so before it starts
    assert capsys.readouterr().err.splitlines()[2 * bool(table) :] == [
        f"{file}: is not a folder; use another --run-dir"
    ]


def dry_run(sweep_file: Path, capsys: pytest.CaptureFixture[str], *options: str, more: str = "") -> str:
    cluster = sweep_file.parent / "c.toml"
    cluster.write_text(f'name = "c"\nexecutor = "slurm"\nprofile_minutes = 30\n{more}')
    assert main([str(sweep_file), "--cluster", str(cluster), "--dry-run", *options]) == 0
    assert {path.name for path in sweep_file.parent.iterdir()} == {"small.toml", "c.toml"}
    return capsys.readouterr().out


def test_dry_run_prints_jobs_hours_and_scripts_and_creates_nothing(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full")
    assert "N=2: local batches 16, 32, in one job" in out
    # (1 + 2 nodes) x 0.5 h
    assert "at most 1.50 node-hours" in out
    # one to profile and one to train; the other size is in a table
    assert out.count("#!/bin/bash") == 2
    assert re.search(r"^#   profile, N=1, 1 task  1$\n^#   profile, N=2, 1 task  2$", out, re.MULTILINE)
    assert "--array" not in out
    assert "if 2 nodes are chosen" in out
    assert "if 1 node is chosen" in dry_run(sweep_file, capsys, "--set", "search.cluster_sizes=[1]")
    of_two = dry_run(sweep_file, capsys, more='[[partitions]]\npartition = "old"\n[[partitions]]\npartition = "new"\n')
    assert [f"of partition '{name}' are chosen" in of_two for name in ("old", "new")] == [True, True]


@pytest.mark.parametrize("until", ["profile", "plan"])
def test_a_dry_run_shows_no_training_that_the_command_would_not_submit(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], until: str
) -> None:
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full", "--until", until)
    assert "at most 1.50 node-hours" in out
    assert "training:" not in out
    assert out.count("#!/bin/bash") == 1


def test_a_dry_run_without_slurm_says_that_it_was_not_asked(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(sweep_file.parent))
    assert "Slurm was not asked: sbatch is not on PATH" in dry_run(sweep_file, capsys)
    assert main([str(sweep_file), "--dry-run"]) == 0
    assert "Slurm" not in capsys.readouterr().out, "for local jobs Slurm is not asked"


def test_a_run_next_to_the_sweep_file_is_named_where_another_folder_begins_a_new_one(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = open_run(*inputs_of(sweep_file), sweep_file.parent / "runs" / "small").run
    elsewhere = sweep_file.parent / "elsewhere"
    for folder in (sweep_file.parent, elsewhere):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert main([str(sweep_file), "--dry-run"]) == 0
        way = (
            f"to go on with the one in {earlier.root}, end this command (Ctrl-C) and start it in {sweep_file.parent}\n"
        )
        is_told = way in capsys.readouterr().err
        assert is_told == (folder == elsewhere)


def test_a_forgotten_cluster_file_is_mentioned_where_there_is_slurm(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (commands := sweep_file.parent / "bin").mkdir()
    put_commands(commands)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    conf = sweep_file.parent / "slurm.conf"
    for is_configured in (False, True):
        if is_configured:
            conf.touch()
            monkeypatch.setenv("SLURM_CONF", str(conf))
        assert main([str(sweep_file), "--dry-run"]) == 0
        assert ("no --cluster: everything runs on this machine" in capsys.readouterr().err) == is_configured


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--detach"]])
@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ("max_nodes = 128", "max_nodes: 128, but partition cpu has 100 nodes; set max_nodes = 100, and "),
        ("partition = 'gpuu'", "partition: Slurm has no partition 'gpuu'; expected one of: cpu"),
        (
            "cpus_per_worker = 64",
            "cpus_per_worker: 64, with 1 worker a node, but nodes of partition cpu have 40 CPUs; lower it",
        ),
        ("memory_gb = 200", "memory_gb: 200 GiB of a node, but nodes of partition cpu have 188 GiB; lower it"),
    ],
)
def test_what_no_partition_can_run_is_refused_before_anything_is_submitted(
    sweep_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    keys: str,
    refused: str,
    options: list[str],
) -> None:
    commands, cluster, run = sweep_file.parent / "bin", sweep_file.parent / "c.toml", sweep_file.parent / "run"
    commands.mkdir()
    put_commands(commands)
    (commands / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    cluster.write_text(f"executor = 'slurm'\n{keys}\n")
    sizes = ["--set", f"search.cluster_sizes=[{101 if 'nodes' in keys else 1}]", "--set", "search.max_batch=1024"]
    command = [str(sweep_file), "--cluster", str(cluster), "--run-dir", str(run), *sizes, *options]
    assert main(command) == 2
    assert f"{cluster}: {refused}" in capsys.readouterr().err
    assert not run.exists()
    if "gpuu" in keys:
        cluster.write_text("executor = 'slurm'\n")
        monkeypatch.setenv("SBATCH_PARTITION", "gpuu")
        assert main(command) == 2
        assert "no partition 'gpuu' (SBATCH_PARTITION of your shell); expected" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_CONF", str(run))
    assert main(command) == 2
    assert capsys.readouterr().err == f"SLURM_CONF: no readable file {run}; correct it, or unset it\n"


def test_dry_run_of_an_array_for_each_size(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full", "--set", "search.pack=never")
    assert "N=2: local batches 16, 32, in an array of 2 jobs" in out
    # (1 + 2 nodes) x 2 batches x 0.5 h
    assert "at most 3.00 node-hours" in out
    assert out.count("#SBATCH --array=0-1%1") == 1
    assert re.search(r"^#   profile, N=2, 2 tasks  2$", out, re.MULTILINE)


def test_dry_run_of_a_detached_sweep_shows_its_controller_job(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = dry_run(sweep_file, capsys, "--detach", more='controller_partition = "admin"\ncontroller_minutes = 7\n')
    assert "detached: when these jobs are over, a controller job of at most 7 min on one core submits" in out
    assert out.count("#!/bin/bash") == 3
    controller = out.partition("# ---- admin: controller, N=1, 1 task ----")[2]
    assert "#SBATCH --partition=admin\n" in controller
    assert "#SBATCH --time=7\n" in controller


def test_dry_run_of_all_sizes_in_one_allocation(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full", "--set", "search.nest=true")
    assert "2×16, 1×32, 2×32, 1×64, all in one job on 2 nodes" in out
    assert "at most 1.00 node-hours" in out
    assert out.count("#!/bin/bash") == 2
    one = "search.cluster_sizes=[1]"
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full", "--set", "search.nest=true", "--set", one)
    assert "all in one job on 1 node\n" in out


def test_dry_run_of_an_adaptive_search_says_where_it_starts(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = dry_run(sweep_file, capsys, "--set", "search.mode=adaptive", "--set", "search.max_batch=1024")
    assert "12 candidates; adaptive search starts with 3 and measures at most 8 of them" in out
    few = ("--set", "search.max_profiles=3")
    out = dry_run(sweep_file, capsys, "--set", "search.mode=adaptive", "--set", "search.max_batch=1024", *few)
    assert "12 candidates; adaptive search measures 3 of them:" in out


def test_dry_run_of_a_search_that_has_begun_counts_what_is_left(
    sweep_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"search.{each}" for each in ("mode=adaptive", "max_batch=1024")]
    run = open_run(load_sweep(sweep_file, more), ClusterSpec(), sweep_file.parent / "runs/small").run
    measure(run)
    command = [str(sweep_file), "--set", more[0], "--set", more[1], "--dry-run"]
    assert main(command) == 0
    assert "12 candidates, 1 measured; adaptive search goes on with " in (out := capsys.readouterr().out)
    assert " and measures at most 7 more:" in out


@pytest.mark.processes
def test_a_dry_run_refuses_what_fits_nowhere_as_the_sweep_would(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(of_sweep: Path, of_cluster: Path) -> Estimate:
        return Estimate(estimate_footprint(load_sweep(of_sweep), load_cluster(of_cluster)))

    monkeypatch.setattr("tula_hpc.cli.dry_run.rehearse", lambda *_: "it was not asked")
    monkeypatch.setattr("tula_hpc.cli.dry_run.estimate", in_this_process)
    cluster = sweep_file.parent / "c.toml"
    cluster.write_text('executor = "slurm"\ndevice = "cuda"\ngres = "gpu:1"\ndevice_memory_gb = 0.001\n')
    small = ("--set", "workload.model=tula_hpc.workloads.small_cnns:compact_cnn")
    assert main([str(sweep_file), "--cluster", str(cluster), "--dry-run", *TRIED, *small]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines()[-1].startswith("no batch fits into memory: by an estimate a worker uses ")


def test_a_dry_run_where_the_data_are_not_keeps_to_what_fits_as_the_sweep_would_where_they_are(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    footprint = Footprint(
        parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1, activation_bytes_per_sample=1, fixed_bytes=1,
        peaks={32: 1}, largest_local_batch=32,
    )  # fmt: skip
    monkeypatch.setattr("tula_hpc.cli.dry_run.estimate", lambda *_: Estimate(footprint))
    elsewhere = ("--set", "workload.dataset=cifar10", "--set", "workload.data_dir=gone")
    out = dry_run(sweep_file, capsys, *TRIED, *elsewhere, "--set", "search.max_batch=4096", more="memory_gb = 1.0\n")
    assert "by an estimate, local batches up to 32 fit into memory\n" in out
    assert "N=1: local batches 32, in one job\n" in out


def test_a_dry_run_goes_on_without_an_estimate_and_says_why(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tula_hpc.cli.dry_run.rehearse", lambda *_: "it was killed")
    monkeypatch.setattr("tula_hpc.cli.dry_run.estimate", lambda *_: Estimate(None, "it was killed"))
    out = dry_run(sweep_file, capsys, *TRIED, "--set", "search.mode=full", more="memory_gb = 1.0\n")
    assert "no estimate of memory (it was killed): the search begins with all batches\n" in out
    assert "N=2: local batches 16, 32, in one job" in out


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ('device = "cuda"\ngres = "gpu:1"\ncpus_per_worker = 2\n', ["cpus_per_worker"]),
        ('device = "cuda"\ngres = "gpu:1"\ncpus_per_worker = 3\n', []),
        ("cpus_per_worker = 1\n", []),
        (
            'device = "cuda"\ngres = "gpu:1"\ncpus_per_worker = 3\n[[partitions]]\npartition = "old"\n'
            '[[partitions]]\npartition = "new"\ncpus_per_worker = 1\n',
            ["partitions.new.cpus_per_worker"],
        ),
    ],
)
def test_loaders_that_take_all_cores_of_a_gpus_worker_are_warned_of(
    sweep_file: Path, capsys: pytest.CaptureFixture[str], more: str, named: list[str]
) -> None:
    cluster_file = sweep_file.parent / "c.toml"
    cluster_file.write_text(f'executor = "slurm"\n{more}')
    inputs_of(sweep_file, cluster=cluster_file)
    output = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in output] == named
    assert all(f"warning: {cluster_file}: " in line and "expected at least 3, better 4" in line for line in output)


def test_dry_run_of_a_cluster_with_parts(sweep_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = '[[partitions]]\npartition = "old"\n[[partitions]]\npartition = "new"\nmax_nodes = 1\n'
    out = dry_run(sweep_file, capsys, "--set", "search.mode=full", more=tables)
    assert "partition 'old': 4 candidates" in out
    assert "partition 'new': 2 candidates" in out
    rows = re.findall(r"^#   (old|new): (profile|train), N=(\d), 1 task +(\d) +(old|new)$", out, re.MULTILINE)
    assert [row[0] + row[2] for row in rows if row[1] == "profile"] == ["old1", "old2", "new1"]
    assert [row[0] + row[2] for row in rows if row[1] == "train"] == ["old2", "new1"]
    assert all((row[0], row[2]) == (row[4], row[3]) for row in rows)


def test_dry_run_of_a_run_that_was_begun_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = make_run(tmp_path / "run", stage="profile")
    run.sweep_file.write_text(freeze(load_sweep(run.sweep_file, check_paths=False)))
    run.cluster_file.write_text(freeze(load_cluster(run.cluster_file)))

    def dry_run(*changed: str) -> str:
        before = run.events_file.read_text()
        command = [str(run.sweep_file), "--cluster", str(run.cluster_file), "--run-dir", str(run.root), "--dry-run"]
        assert main([*command, *changed]) == 0
        assert run.events_file.read_text() == before
        return capsys.readouterr().out

    measured = dry_run()
    assert "first the command waits for the jobs of earlier commands: profile job 17\n" in measured
    assert "21 candidates, and nothing is left to profile\n" in measured
    assert "if 4 nodes are chosen" in measured
    make_run(tmp_path / "planned", stage="plan").plan_file.rename(run.plan_file)
    run.log_event("ended", "profile", job_id="17")
    planned, chosen = dry_run(), run.read_plan().chosen
    assert f"per submission, at {chosen.configuration} by the plan" in planned
    assert "waits" not in planned
    assert planned.count("#!/bin/bash") == 1
    assert "if 4 nodes are chosen" in dry_run("--set", "objective.kind=cost"), "the plan is made anew"
    run.log_event("submitted", "train", job_id="18", data={"label": "main"})
    training = dry_run()
    assert "jobs of earlier commands: train job 18\n" in training
    assert "candidates" not in training
    write_training(run, epochs_done=EPOCHS)
    over = dry_run()
    assert over.splitlines()[1:] == ["the training is over: nothing is submitted, and the report is written again"]
    assert dry_run("--detach") == over


def test_a_sweep_says_which_objective_it_trains_by_where_that_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    sweep, made = sweep_of(run), run.read_plan()

    def note(**changed: object) -> str:
        _say_plan(sweep, made.model_copy(update=changed))
        return capsys.readouterr().out.splitlines()[0]

    other = note(other_objective=["objective.budget = 9.0"])
    assert other.startswith(f"objective: objective.budget = 9.0, by {run.plan_file} (tula plan --write), not as in ")
    assert other.endswith(f"{run.sweep_file}; deleting plan.json undoes that")
    assert note(objective="cost").startswith('objective: objective.kind = "cost", by ')
    assert note().startswith("plan: ")
    doubtful = made.model_copy(update={"warnings": ["one", "two"]})
    _say_plan(sweep, doubtful, is_new=False)
    continued = capsys.readouterr().out
    assert f"plan: {doubtful.chosen.configuration}, as before, with 2 remarks: " in continued
    assert "warning: one" not in continued
    run.log_event("submitted", "train", job_id="18")
    assert note(objective="cost").endswith(str(run.sweep_file)), "the training follows that plan"


def test_a_plan_without_its_measurements_is_reported_before_they_are_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    run = make_run(tmp_path / "run", stage="plan")
    for path in run.profile.iterdir():
        path.unlink()
    monkeypatch.setattr("tula_hpc.cli.pipeline.try_before_jobs", lambda _: True)
    monkeypatch.setattr("tula_hpc.cli.pipeline.profile_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(sweep_of(run), "plan")
    assert f"warning: {PLAN_WITHOUT_MEASUREMENTS}: everything is measured and planned anew" in capsys.readouterr().err


def test_a_sweep_until_the_plan_ends_with_time_cost_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    monkeypatch.setattr("tula_hpc.cli.pipeline._profile", lambda _: True)
    monkeypatch.setattr("tula_hpc.cli.pipeline.plan_stage", lambda sweep: sweep.run.read_plan())
    notified: list[str] = []
    monkeypatch.setattr("tula_hpc.cli.pipeline.notify", lambda *words: notified.append(words[2]))
    sweep = sweep_of(run)
    assert carry_out(sweep, "plan") == 0
    plan = run.read_plan()
    # the reason of a plan begins with the name of its choice
    assert notified == [f"planned: {plan.reason}"]
    chosen = plan.chosen
    *_, following = lines = capsys.readouterr().out.splitlines()
    planned, takes, learns = [line for line in lines if line.startswith("planned: ")]
    epochs = f"20 epochs of {format_duration(chosen.epoch_time_s)}"
    assert planned == f"planned: {chosen.configuration}, 4 workers and {epochs}"
    assert takes.startswith("planned: Training should take ")
    assert "learning as much would take about 7 min " in learns
    write = command_line("plan", str(run.root), "--objective", "cost", "--write")
    assert [line for line in lines if line.startswith("cheapest: ") and line.endswith(f"; {write} chooses it")]
    small = {"measured": False, "nodes": 1, "wall_time_s": 1.0, "accumulation": 2}
    changed = {"chosen": chosen.model_copy(update=small)}
    for note, at in (("began", 0.0), ("ended", 40.0)):
        append_record(
            run.profile / "a.notes", JobNote(note=note, time=at, job_id="17", began_at=0.0, allocated_nodes=2)
        )
    priceless = sweep._replace(cluster=load_cluster(run.cluster_file, ["pricing={}"]))
    _say_what_it_takes(priceless, plan.model_copy(update={**changed, "profile_share": 0.2}))
    shown = capsys.readouterr().out
    assert shown.startswith(f"planned: N=1 b={chosen.local_batch} (B={chosen.local_batch}) in 2 parts, 1 worker and ")
    assert "more than this training (1)\n" in shown
    adaptive = load_sweep(run.sweep_file, ["search.mode=adaptive"], check_paths=False)
    priceless = priceless._replace(spec=adaptive)
    _say_what_it_takes(priceless, plan.model_copy(update={**changed, "profile_share": 0.2}))
    output = capsys.readouterr().out
    assert (
        "was not measured, as its profile would cost 20 % of the training's node-seconds. "
        "Its numbers are predicted by a model."
    ) in output
    assert "cluster file; set your price there.\n" in output
    assert "profiling took 80 node-seconds, more than this training (1); search.max_profiles limits it" in output
    inputs = (str(run.sweep_file), "--cluster", str(run.cluster_file), "--run-dir", str(run.root))
    assert (
        following
        == f"to train by this plan, without measuring again: cd {Path.cwd()} && {command_line('sweep', *inputs)}"
    )
    run.make_train().result_file.touch()
    assert carry_out(sweep, "plan") == 0
    trained = capsys.readouterr().out
    assert "cheapest: " in trained
    assert " chooses it" not in trained, "a run that has trained keeps its plan"
    assert "to train by this plan" not in trained


def test_the_end_says_where_a_script_has_written_its_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    sweep = Sweep(script_spec(tmp_path), load_cluster(run.cluster_file), run)
    own = run.train().root / "script" / "work"
    (own / "out").mkdir(parents=True)
    (own / "out" / "data").symlink_to(run.sweep_file)
    (own / "all").symlink_to(tmp_path)
    assert _model_lines(sweep) == []
    (own / "out" / "model.pt").touch()
    assert _model_lines(sweep) == [f"files of the script: {own}"]


@pytest.mark.parametrize("price", [None, 3.0])
def test_the_cost_at_the_end_says_where_its_price_is_the_default(tmp_path: Path, price: float | None) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    values = [] if price is None else [f"pricing.usd_per_node_hour={price}"]
    cluster = load_cluster(run.cluster_file, ["pricing={}", *values])
    text = _cost(sweep_of(run)._replace(cluster=cluster), run.read_plan(), None)
    usual = "; at 1.00 USD per node and hour, the default of pricing.usd_per_node_hour"
    assert text.endswith(usual) == (price is None), text


def test_the_predicted_cost_has_the_same_digits_wherever_it_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stage="plan")
    sweep = sweep_of(run)
    cost = Compared(8.123, (4.0, 12.0), 9.0)
    predicted = promised_amounts(cost, "USD")[0]
    assert predicted != format_money(cost.expected), "its interval allows fewer digits"
    whole = Compared(8.0, None, 8.0)
    bill = TrainingBill(whole, {}, cost, "USD", Source.NOTES, starts=1, unknown_runs=0, node_seconds=8.0)
    for text in (" ".join(bill_sentences(bill)), _cost(sweep, run.read_plan(), bill)):
        assert f"{predicted} was predicted" in text


def test_the_end_says_whether_fewer_epochs_are_fewer_steps(tmp_path: Path) -> None:
    """An epoch that ends with a shorter batch has one step more than the plan's."""

    run = make_run(tmp_path / "run")
    made, result = run.read_plan(), run.train().read_result()
    assert result is not None
    planned = made.epochs * (made.dataset_samples // result.global_batch)
    for steps, why in ((planned, f"in all of its {planned:,} planned steps"), (10, "after which the script ended")):
        shorter = result.model_copy(update={"epochs": 1, "steps": steps, "restarts": 0})
        assert f"trained 1 of {made.epochs} epochs, {why}, in " in _decision(made, shorter, None)


def test_the_end_names_the_nodes_of_a_training_that_fell_back_to_more_of_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    made, result = run.read_plan(), known(run.train().read_result())
    assert "trained with" not in _decision(made, result, None)
    spread = result.model_copy(update={"nodes": 2 * result.nodes, "local_batch": result.local_batch // 2})
    at = f"{spread.nodes} nodes and a batch of {spread.global_batch:,}"
    assert f"; trained with {at}, which fits into memory; trained 20 epochs in " in _decision(made, spread, None)
