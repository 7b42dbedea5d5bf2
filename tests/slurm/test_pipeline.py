"""The whole pipeline on the real cluster, from the command line as a user would run it."""

from __future__ import annotations

import json
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import machine
from tests.slurm.sweeping import run_sweep
from tests.slurm.testcluster import MiniCluster
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunDirectory, TrainResult

DIGITS = """
name = "digits-slurm"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
epochs = 4
lr = 0.05
loader_workers = 0
[search]
cluster_sizes = [1, 2]
min_batch = 64
max_batch = 128
mode = "full"
max_steps = 20
max_seconds = 3
[objective]
kind = "time"
"""

HUNGRY = """
name = "hungry"
[workload]
model = "tests.examples.hungry:build"
dataset = "digits"
epochs = 1
loader_workers = 0
[search]
cluster_sizes = [1]
min_batch = 16
max_batch = 256
mode = "partial"
estimate = false
warmup_steps = 1
min_steps = 5
max_steps = 10
[objective]
kind = "time"
"""


class Finished:
    """A run directory and the command's output."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.run, self.done, self.folder = RunDirectory(folder / "run"), done, folder

    @property
    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(self.run.plan_file.read_text())
        return plan


@pytest.fixture(scope="session")
def finished(slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Two sweeps in parallel, because they mostly wait for jobs; their reports have no figures."""
    options = ("--until", "plan", "--set", "cluster.memory_gb=1.5")
    with slurm_cluster.cpu_share(200), ThreadPoolExecutor() as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tula_hpc.analysis.figures.all.FIGURES", {})
        folders = {name: tmp_path_factory.mktemp(name) for name in ("digits", "hungry")}
        begun = {
            "digits": pool.submit(run_sweep, DIGITS, folders["digits"], slurm_cluster.environment),
            "hungry": pool.submit(run_sweep, HUNGRY, folders["hungry"], slurm_cluster.environment, *options),
        }
        ended = {name: future.result() for name, future in begun.items()}
    for done in ended.values():
        assert done.returncode == 0, done.stderr + done.stdout
    return {name: Finished(folders[name], done) for name, done in ended.items()}


@pytest.fixture(scope="session")
def digits(finished: dict[str, Finished]) -> Finished:
    return finished["digits"]


@pytest.fixture(scope="session")
def hungry(finished: dict[str, Finished]) -> Finished:
    """A sweep whose larger batches exceed the memory that the job asked for, so that Slurm kills them."""
    return finished["hungry"]


def test_every_configuration_was_measured_on_nodes_of_its_own(digits: Finished) -> None:
    measured = digits.run.measurements().records
    assert {(m.nodes, m.nodes * m.local_batch) for m in measured} == {(n, b) for n in (1, 2) for b in (64, 128)}
    assert all(m.status == "ok" and m.exclusive and not m.emulated for m in measured)
    assert all(len(set(m.hosts)) == m.nodes for m in measured)
    assert all(m.hosts[0].startswith(f"{machine.NAME}-node") for m in measured)


def test_the_parts_of_a_step_are_measured_apart(digits: Finished) -> None:
    for m in digits.run.measurements().records:
        assert m.times is not None
        assert m.times.compute_time_s > 0
        assert (m.times.allreduce_time_s > 0) == (m.nodes > 1)
        assert set(m.samples) >= {"step", "data", "compute", "optimizer"}
        assert m.memory is not None
        assert m.memory.parameter_bytes == m.memory.gradient_bytes == 4 * m.parameters
        assert 0 < m.memory.peak_bytes < m.memory.reserved_bytes


def test_one_job_per_cluster_size(digits: Finished) -> None:
    submitted = [event for event in digits.run.events() if event.event == "submitted" and event.stage == "profile"]
    assert [event.data["nodes"] for event in submitted] == [1, 2]
    assert digits.done.stdout.count("profiling cost: 4 configurations in 2 jobs") == 1


def test_the_first_measurement_of_each_job_has_the_time_of_a_start(digits: Finished) -> None:
    first = [m for m in digits.run.measurements().records if m.start_s > 0.0]
    assert sorted(m.nodes for m in first) == [1, 2]
    ready = {note.job_id: note.time - note.began_at for note in digits.run.job_notes() if note.note == "ready"}
    assert all(ready[m.job_id] < m.start_s < ready[m.job_id] + m.elapsed_s for m in first)
    assert digits.plan["chosen"]["wall_parts_s"]["starts"] == statistics.median(m.start_s for m in first)


def test_training_ran_at_the_chosen_configuration_and_learned(digits: Finished) -> None:
    chosen = digits.plan["chosen"]
    result = TrainResult.model_validate_json(digits.run.train().result_file.read_text())
    assert (result.nodes, result.global_batch) == (chosen["nodes"], chosen["global_batch"])
    assert result.epochs == 4
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.5


def test_the_training_is_compared_with_its_plan_by_accounting(digits: Finished) -> None:
    found = digits.run.history().accounted("main", digits.run.accounts())
    result = digits.run.train().read_result()
    assert result is not None
    assert {run.nodes for run in found} == {digits.plan["chosen"]["nodes"]}
    known_s = result.starts_s + result.train_time_s + (result.evaluation_s or 0.0)
    assert sum(run.elapsed_s for run in found) > known_s - 2.0, "accounting counts whole seconds"
    assert "in all by Slurm's accounting" in digits.done.stdout


def test_the_report_and_the_table_are_there(digits: Finished) -> None:
    assert (digits.run.report / "report.html").stat().st_size > 10_000
    assert (digits.run.report / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "Chosen configuration" in digits.done.stdout


def test_the_cost_of_profiling_comes_from_accounting(digits: Finished) -> None:
    accounts = {account.job_id: account for account in digits.run.accounts()}
    profiled = {job.job_id for job in digits.run.history().submissions("profile")}
    assert profiled <= accounts.keys()
    assert all(accounts[job].over and accounts[job].node_seconds > 0 for job in profiled)
    assert "by Slurm's accounting" in (digits.run.report / "report.html").read_text().replace("&#39;", "'")


def test_the_same_command_again_submits_nothing(digits: Finished, slurm_env: dict[str, str]) -> None:
    before = digits.run.events_file.read_text()
    again = run_sweep(DIGITS, digits.folder, slurm_env, "--until", "train")
    assert again.returncode == 0, again.stderr
    assert digits.run.events_file.read_text() == before


def test_a_task_over_its_memory_limit_is_recorded_as_out_of_memory(hungry: Finished) -> None:
    records = hungry.run.measurements().records
    killed = [m for m in records if m.status == "oom"]
    assert all(m.failure is Failure.HOST_OOM for m in killed)
    largest = max(killed, key=lambda m: m.local_batch)
    assert largest.local_batch == 256
    smallest = next(m for m in records if m.local_batch == 16)
    # measured first by the same job: not lost
    assert (smallest.status, smallest.job_id) == ("ok", largest.job_id)


def test_the_search_goes_on_below_the_bound_and_the_plan_respects_it(hungry: Finished) -> None:
    records = hungry.run.measurements().records
    bound = min(m.local_batch for m in records if m.status == "oom")
    fitting = [m.local_batch for m in records if m.status == "ok"]
    assert len(set(fitting)) >= 2
    assert max(fitting) == bound // 2
    assert hungry.plan["chosen"]["local_batch"] < bound
    for candidate in hungry.plan["candidates"]:
        assert candidate["feasible"] == (candidate["local_batch"] < bound) or not candidate["feasible"]
