"""A real study on this machine: killed in the middle and continued, with a method that diverges."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.forked_jobs import run_command, start_command
from tests.known import known
from tula_hpc.config import StudyCell, load_sweep
from tula_hpc.failure_kinds import Failure
from tula_hpc.process_memory import descendants
from tula_hpc.records import RunDirectory, TrainResult, TunedRates, read_metrics
from tula_hpc.sweep import main

ROOT = Path(__file__).resolve().parents[2]
SWEEP = """
name = "tiny"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
samples = 1024
epochs = 12
lr = 0.1
loader_workers = 0
[training]
log_interval_steps = 2
[study]
methods = ["static"]
batches = [128]
seeds = [0, 1]
small_batch = 0
evaluate_every = 5
[study.variants.wild]
training.method = "lbt"
workload.lr = 1e12
"""
DEADLINE_S = 180


class Killed:
    """A study whose command and jobs were killed after its first result, and the same command once more."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        path = folder / "tiny.toml"
        path.write_text(SWEEP)
        self.arguments = [str(path), "--run-dir", str(self.run.root)]
        study = known(load_sweep(path).study)
        self.cells = study.cells()
        self.victims = self._kill_in_the_middle()
        self.again = self.once_more()

    def once_more(self, *options: str) -> subprocess.CompletedProcess[str]:
        return run_command(main, [*self.arguments, *options], ROOT)

    def result(self, cell: StudyCell) -> TrainResult:
        return TrainResult.model_validate_json(self.run.train(cell.label).result_file.read_bytes())

    def submissions(self) -> Counter[str]:
        return Counter(str(event.data["label"]) for event in self.run.events() if event.event == "submitted")

    def _kill_in_the_middle(self) -> list[StudyCell]:
        """Kill command and jobs; return the cells whose training was interrupted."""
        process = start_command(main, self.arguments, ROOT)
        deadline = time.monotonic() + DEADLINE_S
        while not (any(map(self._is_done, self.cells)) and any(map(self._is_in_the_middle, self.cells))):
            assert time.monotonic() < deadline, "the study did not get that far"
            assert process.poll() is None, "the study ended early"
            time.sleep(0.05)
        process.kill()
        process.wait()
        for event in self.run.events():
            # a job's lock file is deleted at its end
            if event.event == "submitted" and any(self.run.root.rglob(f"{event.job_id}.lock")):
                kill_with_children(int(event.job_id))
        return [cell for cell in self.cells if self._is_in_the_middle(cell)]

    def _is_done(self, cell: StudyCell) -> bool:
        return self.run.train(cell.label).result_file.exists()

    def _is_in_the_middle(self, cell: StudyCell) -> bool:
        saved = any(self.run.train(cell.label).checkpoints.glob("checkpoint-*"))
        return saved and not self._is_done(cell)


def kill_with_children(pid: int) -> None:
    """Kill all processes of a local job: submitit's shell, its controller and the worker."""
    for process in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(tmp_path_factory.mktemp("study"))


def test_the_same_command_finishes_what_was_killed(killed: Killed) -> None:
    assert killed.again.returncode == 0, killed.again.stderr + killed.again.stdout
    assert killed.victims
    for cell in killed.cells:
        if cell.column != "wild":
            found = killed.result(cell)
            assert (found.epochs, found.steps) == (12, 12 * 8)
            assert found.test_accuracy is not None
            assert found.test_accuracy > 0.5
            assert found.train_accuracy is not None
            assert found.train_accuracy > 0.5


def test_each_cell_ran_once_and_those_that_were_killed_went_on_from_their_checkpoints(killed: Killed) -> None:
    submissions = killed.submissions()
    assert set(submissions) == {cell.label for cell in killed.cells}
    assert max(submissions.values()) <= 2
    twice = {label for label, count in submissions.items() if count == 2}
    assert {cell.label for cell in killed.victims} <= twice
    assert len(twice) < len(killed.cells)
    for cell in killed.victims:
        assert killed.result(cell).restarts == 1
    assert {event.failure for event in killed.run.events() if event.event == "failed"} == {Failure.KILLED}


def test_seeds_differ_and_each_column_has_its_method(killed: Killed) -> None:
    losses = {killed.result(cell).final_loss for cell in killed.cells if cell.column != "wild"}
    assert len(losses) == 2
    assert {killed.result(cell).method for cell in killed.cells} == {"lbt", "static"}


def test_a_diverged_cell_is_a_result_that_is_shown_and_not_tried_again(killed: Killed) -> None:
    wild = [cell for cell in killed.cells if cell.column == "wild"]
    assert all(killed.result(cell).diverged for cell in wild)
    failed = {event.data["label"] for event in killed.run.events() if event.event == "failed"}
    assert not failed & {cell.label for cell in wild}
    endings = [event.detail for event in killed.run.events() if event.event == "finished"]
    assert sum("the loss is not finite" in detail for detail in endings) == len(wild)
    assert "2 diverged" in killed.again.stdout


def test_the_test_set_is_evaluated_at_intervals_and_one_checkpoint_stays(killed: Killed) -> None:
    files = killed.run.train(killed.cells[0].label)
    assert [row.epoch for row in read_metrics(files.metrics_file).epochs] == [5, 10, 12]
    assert len(list(files.checkpoints.glob("*"))) == 1


def test_the_third_command_only_reports(killed: Killed) -> None:
    assert (killed.run.report / "study.html").stat().st_size > 10_000
    before = killed.run.events_file.read_text()
    assert killed.once_more("--until", "train").returncode == 0
    assert killed.run.events_file.read_text() == before


def test_a_cell_that_fails_does_not_stop_the_others_and_is_reported(tmp_path: Path) -> None:
    """The rate is chosen first, on held-out samples; then one column cannot load its model.

    The folder of the first training is deleted before its job comes so far as to look for it.
    """
    path = tmp_path / "tiny.toml"
    text = SWEEP.replace("seeds = [0, 1]", "seeds = [0]\nbase_lrs = [1e-4, 0.1]").replace(
        "small_batch = 0", "small_batch = 128"
    )
    text = text.replace("epochs = 12", "epochs = 4").replace('methods = ["static"]', 'methods = ["lbt"]')
    path.write_text(text.replace("workload.lr = 1e12", 'workload.model = "tests.examples.own_workload:Stripes"'))
    run = RunDirectory(tmp_path / "run")
    process = start_command(main, [str(path), "--run-dir", str(run.root)], ROOT, tmp_path / "output")
    deleted = delete_the_first_training(run)
    code = process.wait()
    output = (tmp_path / "output").read_text()
    assert code == 1, output
    assert "study: 1 training without a result:\n  study/wild-b128-s0: " in output
    assert sum(event.data.get("label") == deleted for event in run.events() if event.event == "submitted") == 1
    assert run.train("study/lbt-b128-s0").result_file.exists()
    assert (run.report / "study.html").exists()
    rates = TunedRates.model_validate_json(run.rates_file.read_bytes())
    assert rates.rates == {"sgd": 0.1}
    assert len(rates.trials) == 2
    failed = [event for event in run.events() if event.event == "failed"]
    # a failure that would repeat is not tried again
    assert len(failed) == 1


def delete_the_first_training(run: RunDirectory) -> str:
    """Delete the first training's folder as soon as its job is submitted; return its label."""
    deadline = time.monotonic() + DEADLINE_S
    while not (submitted := [event for event in run.events() if event.event == "submitted"]):
        assert time.monotonic() < deadline, "nothing was submitted"
        time.sleep(0.01)
    label = str(submitted[0].data["label"])
    shutil.rmtree(run.train(label).root)
    return label
