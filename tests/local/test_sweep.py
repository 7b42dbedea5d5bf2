"""A whole sweep on this machine: submitit's local executor, real DDP processes, real images."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.slow import PACE_FILE
from tests.forked_jobs import children_of, forking_jobs, run_command
from tests.known import known
from tests.run_factory import LATE_SWEEP, late_plan
from tests.tracking.test_trackers import scalars
from tula_hpc.checkpoint.store import CheckpointStore, load_model
from tula_hpc.config import ClusterSpec, SweepSpec, load_sweep
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.launch.launcher import Launcher
from tula_hpc.process_memory import descendants
from tula_hpc.records import Configuration, RunDirectory, TrainResult, read_metrics
from tula_hpc.stages.context import Sweep
from tula_hpc.stages.train import train_stage
from tula_hpc.sweep import main

ROOT = Path(__file__).resolve().parents[2]
# local batch: of 359 test samples, two workers have 180 and 179, so two batches and one
UNEVEN = 179
SLOW_TO_EVALUATE = {"model": "tests.examples.slow:build_slow_to_evaluate", "dataset": "digits", "loader_workers": 0}
SWEEP = """
name = "small"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
samples = 512
epochs = 2
loader_workers = 0
[search]
cluster_sizes = [1, 2]
min_batch = 32
max_batch = 64
mode = "full"
min_steps = 5
max_steps = 10
[objective]
kind = "time"
[training]
small_batch = 16
log_interval_steps = 2
"""


def arguments_in(folder: Path) -> list[str]:
    path = folder / "small.toml"
    path.write_text(SWEEP)
    tells = f'cluster.on_event=printf "%s\\n" "$TULA_EVENT" >>{folder}/notifications'
    mine = ["--run-dir", str(folder / "run"), "--set", tells]
    if find_spec("tensorboard") is not None:
        mine += ["--set", 'training.log_to=["tensorboard"]']
    return [str(path), *mine]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("local")
    command = [sys.executable, "-m", "tula_hpc.sweep", *arguments_in(folder)]
    # the umask of a user whose new files are writable for everybody
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=550, umask=0)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Chosen configuration" in done.stdout
    (folder / "output").write_text(done.stdout)
    return RunDirectory(folder / "run")


def test_all_configurations_are_measured_and_said_to_be_emulated(finished: RunDirectory) -> None:
    measured = finished.measurements().records
    assert {(m.nodes, m.nodes * m.local_batch) for m in measured} == {(n, b) for n in (1, 2) for b in (32, 64)}
    assert all(m.status == "ok" for m in measured)
    assert {m.nodes: m.emulated for m in measured} == {1: False, 2: True}
    assert {m.nodes: m.backend for m in measured} == {1: "none", 2: "gloo"}
    assert all(m.dataset_samples == 512 for m in measured)
    assert all(m.test_samples == 359 and m.times and (m.times.forward_time_s or 0.0) > 0.0 for m in measured)


def test_nobody_else_may_write_to_a_run_whatever_the_umask(finished: RunDirectory) -> None:
    """Even if the owner shares the folder, only the owner may change its pickles, logs and checkpoints."""
    made = [path for path in (finished.root, *finished.root.rglob("*")) if not path.is_symlink()]
    assert any(path.suffix == ".pkl" for path in made)
    assert [path for path in made if path.stat().st_mode & 0o022] == []


def test_configurations_of_one_size_share_a_job(finished: RunDirectory) -> None:
    submitted = [event for event in finished.events() if event.event == "submitted" and event.stage == "profile"]
    assert len(submitted) == 2


def test_the_plan_names_a_candidate_and_training_ran_there(finished: RunDirectory) -> None:
    written = json.loads(finished.plan_file.read_text())
    assert written["schema"] == 1
    assert written["chosen"]["wall_time_s"] == min(c["wall_time_s"] for c in written["candidates"] if c["feasible"])
    result = TrainResult.model_validate_json(finished.train().result_file.read_text())
    assert (result.nodes, result.local_batch) == (written["chosen"]["nodes"], written["chosen"]["local_batch"])
    assert result.samples_seen == result.steps * result.global_batch
    assert result.steps == 2 * (512 // result.global_batch)


def test_metrics_have_every_epoch_and_the_scale(finished: RunDirectory) -> None:
    metrics = read_metrics(finished.train().metrics_file)
    assert [epoch.epoch for epoch in metrics.epochs] == [1, 2]
    assert all(epoch.epoch_time_s > 0 for epoch in metrics.epochs)
    assert metrics.steps[-1].sensitivity is not None
    assert metrics.steps[-1].scale_max is not None
    assert metrics.steps[-1].lr < metrics.steps[0].lr


def test_the_end_says_what_was_decided_what_it_cost_and_where_the_report_is(finished: RunDirectory) -> None:
    output = (finished.root.parent / "output").read_text().splitlines()
    # on a busy machine a training may depart from its plan, which adds a line among the last ones
    decided, cost, model, report = [line for line in output if not line.startswith("off the plan")][-4:]
    assert re.fullmatch(
        r"decided: \d nodes? and a batch of \d+ samples; trained 2 epochs in .* % test accuracy", decided
    )
    assert re.fullmatch(
        r"cost: about .* USD: training .* USD \(.* predicted\), profiling about .* USD; "
        r"at .* per node and hour, the default of .*",
        cost,
    )
    newest = known(finished.train().newest_checkpoint)
    assert model == f"model: {newest}"
    assert load_model(finished.root).keys() == CheckpointStore.load(newest)["model"].keys()
    assert report == f"report: {finished.report / 'report.html'}"


def test_a_tracker_has_every_line_of_the_training(finished: RunDirectory) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra that is not installed here")
    folder, metrics = finished.train().root / "tensorboard" / "metrics", read_metrics(finished.train().metrics_file)
    assert scalars(folder, "train/lr") == pytest.approx({row.step: row.lr for row in metrics.steps})
    assert list(scalars(folder, "epoch/test_accuracy")) == [row.step for row in metrics.epochs]


def test_running_again_does_nothing_twice(finished: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No notification is sent twice either."""
    monkeypatch.setattr("tula_hpc.analysis.figures.all.FIGURES", {})
    before = finished.events_file.read_text()
    again = run_command(main, [*arguments_in(finished.root.parent), "--json"], ROOT)
    assert again.returncode == 0, again.stderr
    assert finished.events_file.read_text() == before
    # stdout has only the object of `tula status --json`, for programs; the lines for people go to stderr
    output = json.loads(again.stdout)
    assert (output["state"], output["name"], output["report"]) == ("finished", "small", True)
    assert output["plan"]["nodes"] == finished.read_plan().chosen.nodes
    assert "Chosen configuration" in again.stderr
    events = (finished.root.parent / "notifications").read_text().split()
    assert events == ["stage_ended", "stage_ended", "training_started", "training_finished", "sweep_ended"]


@pytest.fixture
def forked() -> Iterator[None]:
    with forking_jobs():
        yield


@pytest.mark.usefixtures("forked")
def test_a_stopped_training_is_started_again_and_ends_the_same(finished: RunDirectory, tmp_path: Path) -> None:
    """Signals reach all of the running job's processes: it saves at the end of a step, and is started again."""
    longer = ["workload.epochs=2", "workload.samples=1024", "training.log_interval_steps=1", "training.log_to=[]"]
    chosen = finished.read_plan().chosen
    results = []
    for name, stop_at, loader_workers in (("whole", None, 0), ("cut", 16, 1)):
        spec = load_sweep(finished.sweep_file, [*longer, f"workload.loader_workers={loader_workers}"])
        run = RunDirectory(tmp_path / name).create()
        run.train().root.mkdir()
        configuration = chosen.configuration._replace(nodes=2, local_batch=8)
        launcher = Launcher(ClusterSpec(), run, "tula-stop")
        job = TrainJob(spec, ClusterSpec(), configuration, run.root)
        jobs = launcher.submit([job], stage="train", nodes=2, minutes=3)
        if stop_at is not None:
            stop_when(run, stop_at, int(jobs[0].job_id))
        ended = launcher.wait(jobs)
        assert run.train().result_file.exists(), ended[0].log_tail
        results.append(TrainResult.model_validate_json(run.train().result_file.read_text()))
    whole, cut = results
    assert cut.restarts == 1
    assert (cut.final_loss, cut.test_accuracy, cut.steps) == (whole.final_loss, whole.test_accuracy, whole.steps)
    events = {event.event: event for event in RunDirectory(tmp_path / "cut").events()}
    stopped_at = events["resumed"].data["step"]
    assert events["preempted"].data["step"] == stopped_at >= 16
    restart = known(RunDirectory(tmp_path / "cut").history().last_restart("main"))
    assert restart.epochs_seen == pytest.approx(stopped_at * 2 * 8 / 1024)
    assert restart.step == stopped_at


def stop_when(run: RunDirectory, step: int, shell: int) -> None:
    """Once training has reached the step, send USR2 to the workers and their children, TERM to the controller."""
    deadline = time.monotonic() + 60
    while not (steps := read_metrics(run.train().metrics_file).steps) or steps[-1].step < step:
        assert time.monotonic() < deadline, "training did not get that far"
        time.sleep(0.02)
    controllers = children_of(shell)
    workers = [worker for controller in controllers for worker in children_of(controller)]
    helpers = [helper for worker in workers for helper in descendants(worker)]
    # for each worker: a loader process, its fork server and the resource tracker
    assert len(helpers) >= 2 * 3
    for process in helpers:
        os.kill(process, signal.SIGUSR2)
    for process in (*helpers, *controllers):
        os.kill(process, signal.SIGTERM)


@pytest.mark.usefixtures("forked")
def test_a_stop_in_mid_evaluation_loses_nothing(tmp_path: Path) -> None:
    """Of two workers, the first evaluates one more batch; USR2 reaches only the second."""
    workload = {**SLOW_TO_EVALUATE, "samples": 3 * 2 * UNEVEN, "epochs": 2}
    training = {"method": "lbt", "log_interval_steps": 1}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})
    pace = tmp_path / "pace"
    cluster = ClusterSpec(workers_per_node=2, environment={PACE_FILE: str(pace)})
    ends = []
    for name in ("whole", "cut"):
        run = RunDirectory(tmp_path / name).create()
        run.train().root.mkdir()
        pace.write_text("0.6" if name == "cut" else "0")
        launcher = Launcher(cluster, run, "tula-stop")
        job = TrainJob(spec, cluster, Configuration(1, 2, UNEVEN), run.root)
        jobs = launcher.submit([job], stage="train", nodes=1, minutes=5)
        if name == "cut":
            stop_second_worker_when_first_epoch_is_evaluated(run, int(jobs[0].job_id))
            pace.write_text("0")
        ended = launcher.wait(jobs)
        assert run.train().result_file.exists(), ended[0].log_tail
        result = TrainResult.model_validate_json(run.train().result_file.read_text())
        epochs = [(row.epoch, row.step, row.test_loss) for row in read_metrics(run.train().metrics_file).epochs]
        ends.append((result.final_loss, result.test_accuracy, result.steps, epochs))
    assert ends[0] == ends[1]
    events = {event.event: event for event in RunDirectory(tmp_path / "cut").events()}
    assert events["preempted"].data["step"] == events["resumed"].data["step"] == 3
    assert run.train().metrics_file.read_text().count('"test_loss"') == 2


def stop_second_worker_when_first_epoch_is_evaluated(run: RunDirectory, shell: int) -> None:
    deadline = time.monotonic() + 240
    while not (steps := read_metrics(run.train().metrics_file).steps) or steps[-1].step < 3:
        assert time.monotonic() < deadline, "training did not get that far"
        time.sleep(0.02)
    workers = [worker for controller in children_of(shell) for worker in children_of(controller)]
    os.kill(max(workers), signal.SIGUSR2)


def test_out_of_memory_is_a_record_and_the_plan_stays_below_it(tmp_path: Path) -> None:
    """A real limit on this machine: the shell's ulimit makes torch's allocator fail."""
    path = tmp_path / "hungry.toml"
    path.write_text(
        'name = "hungry"\n'
        '[workload]\nmodel = "tests.examples.hungry:build"\ndataset = "digits"\nloader_workers = 0\n'
        '[search]\ncluster_sizes = [1]\nmin_batch = 64\nmax_batch = 128\nmode = "full"\nestimate = false\n'
        "warmup_steps = 1\nmin_steps = 5\nmax_steps = 5\n"
        # scaling would take the batch in two halves, which needs less memory
        '[training]\nmethod = "lbt"\n'
    )
    cluster = tmp_path / "limited.toml"
    cluster.write_text('name = "limited"\nsetup = ["ulimit -v 6000000"]\n')
    options = ["--cluster", str(cluster), "--until", "plan", "--run-dir", str(tmp_path / "run")]
    assert main([str(path), *options]) == 0
    records = RunDirectory(tmp_path / "run").measurements().records
    # earlier measurements are not lost
    assert len({m.configuration for m in records}) == len(records)
    failed = [m for m in records if m.status == "oom"]
    assert failed
    assert all(m.failure is Failure.HOST_OOM for m in failed)
    bounded = RunDirectory(tmp_path / "run").read_plan()
    assert bounded.chosen.local_batch < min(m.local_batch for m in failed)


@pytest.mark.thorough
def test_out_of_memory_in_training_falls_back_and_keeps_the_samples_seen(tmp_path: Path) -> None:
    """The third epoch runs out of memory; training goes on from the last checkpoint with the next smaller batch."""
    run = RunDirectory(tmp_path / "run").create()
    # torch's libraries alone map 5.2 GB; 64 samples a step take 0.5 GB more, 512 take 4 GB
    cluster = ClusterSpec(setup=("ulimit -v 7000000",))
    result = train_stage(Sweep(LATE_SWEEP, cluster, run), late_plan())
    assert (result.local_batch, result.epochs) == (64, 3)
    failed = [m for m in run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.stage, m.failure) for m in failed] == [(512, "train", Failure.HOST_OOM)]
    events = [event.event for event in run.events() if event.event not in ("checkpoint", "ended")]
    assert events == ["submitted", "oom", "fell_back", "submitted", "resumed", "finished"]
    resumed = next(event for event in run.events() if event.event == "resumed")
    assert resumed.data["samples_seen"] > 0
    # each sample once per epoch, whatever the batch
    assert result.samples_seen == 3 * 1024
