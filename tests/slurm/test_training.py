"""Training that is preempted on the real cluster, with and without the site's user signal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.run_factory import LATE_SWEEP, late_plan
from tests.slurm.testcluster import MiniCluster
from tula_hpc.checkpoint import CheckpointStore
from tula_hpc.config import SweepSpec, load_cluster
from tula_hpc.errors import Failure
from tula_hpc.jobs import TrainJob
from tula_hpc.launch import Launcher
from tula_hpc.records import Configuration, RunDirectory, TrainResult, read_metrics
from tula_hpc.stages import Sweep, train_stage

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = Configuration(nodes=2, workers_per_node=1, local_batch=32)
SWEEP = SweepSpec.model_validate(
    {
        "name": "preempted",
        "workload": {
            "model": "tula_hpc.workloads.compact:compact_cnn",
            "dataset": "digits",
            "epochs": 8,
            "lr": 0.05,
            "loader_workers": 1,
        },
        "training": {"preset": "paper", "small_batch": 16, "log_interval_steps": 5, "update_interval_epochs": 0.5},
    }
)


class Training:
    """One training on the cluster, in a run directory of its own."""

    def __init__(self, cluster: MiniCluster, folder: Path) -> None:
        self.cluster, self.run = cluster, RunDirectory(folder).create()
        self.files = self.run.train()
        self.files.root.mkdir(parents=True)
        self.spec = load_cluster(ROOT / "slurm_templates" / "testcluster.toml")
        self.launcher = Launcher(self.spec, self.run, "tula-preempted")

    def start(self) -> None:
        job = TrainJob(SWEEP, self.spec, CONFIGURATION, self.run.root)
        (self.job,) = self.launcher.submit([job], stage="train", nodes=2, minutes=20)

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            steps = read_metrics(self.files.metrics_file).steps
            return bool(steps) and steps[-1].step >= step

        self.cluster.wait_for(reached, 120, f"step {step}")

    def finish(self) -> TrainResult:
        ended = self.launcher.wait([self.job])
        assert self.files.result_file.exists(), ended[0].log_tail
        return TrainResult.model_validate_json(self.files.result_file.read_text())

    def state(self) -> dict[str, torch.Tensor]:
        loaded = CheckpointStore(self.files.checkpoints).load_latest()
        assert loaded is not None
        model: dict[str, torch.Tensor] = loaded.state["model"]
        return model


@pytest.fixture(scope="session")
def whole(slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The uninterrupted run."""
    training = Training(slurm_cluster, tmp_path_factory.mktemp("train") / "whole")
    training.start()
    training.finish()
    return training


@pytest.mark.parametrize("user_signal", [False, True], ids=["TERM only", "with the user signal"])
def test_a_preempted_job_resumes_where_it_stopped_and_ends_the_same(
    slurm_cluster: MiniCluster, whole: Training, tmp_path: Path, user_signal: bool
) -> None:
    cut = Training(slurm_cluster, tmp_path / "cut")
    with slurm_cluster.changed(user_signal=user_signal, grace_s=30):
        cut.start()
        cut.wait_for_step(30)
        slurm_cluster.preempt(cut.job.job_id)
        result = cut.finish()

    events = {event.event: event for event in cut.run.events()}
    assert events["preempted"].data["step"] == events["resumed"].data["step"] >= 30
    assert ("SIGUSR2" if user_signal else "SIGTERM") in events["preempted"].detail
    assert result.restarts == 1

    uninterrupted = TrainResult.model_validate_json(whole.files.result_file.read_text())
    assert result.final_loss == uninterrupted.final_loss
    assert (result.steps, result.samples_seen) == (uninterrupted.steps, uninterrupted.samples_seen)
    assert result.test_accuracy == uninterrupted.test_accuracy
    states = cut.state(), whole.state()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_losses_before_and_after_the_break_are_those_of_the_uninterrupted_run(whole: Training) -> None:
    losses = [epoch.train_loss for epoch in read_metrics(whole.files.metrics_file).epochs]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_a_training_killed_for_its_memory_goes_on_with_a_smaller_batch(
    slurm_cluster: MiniCluster, tmp_path: Path
) -> None:
    """The model becomes hungry in its third epoch; Slurm kills the step, and the plan's fallback takes over."""
    cluster = load_cluster(ROOT / "slurm_templates" / "testcluster.toml", ["memory_gb=1.5"])
    run = RunDirectory(tmp_path / "run").create()
    result = train_stage(Sweep(LATE_SWEEP, cluster, run), late_plan())
    assert (result.local_batch, result.epochs, result.samples_seen) == (64, 4, 4 * 1024)
    failed = [m for m in run.measurements().records if m.status == "oom"]
    assert [(m.local_batch, m.stage, m.failure) for m in failed] == [(512, "train", Failure.HOST_OOM)]
    resumed = next(event for event in run.events() if event.event == "resumed")
    assert resumed.data["samples_seen"] > 0


def test_a_cancelled_training_stays_cancelled_and_goes_on_when_asked_again(
    slurm_cluster: MiniCluster, whole: Training, tmp_path: Path
) -> None:
    """scancel sends TERM as a preemption does; the job must save, but not requeue itself."""
    cut = Training(slurm_cluster, tmp_path / "cut")
    cut.start()
    cut.wait_for_step(30)
    slurm_cluster.run("scancel", cut.job.job_id)
    ended = cut.launcher.wait([cut.job])
    assert ended[0].failure is Failure.CANCELLED
    assert slurm_cluster.job_state(cut.job.job_id) == "CANCELLED"
    assert not cut.files.result_file.exists()
    saved = CheckpointStore(cut.files.checkpoints).load_latest()
    assert saved is not None
    assert saved.state["progress"]["step"] >= 30
    cut.start()
    result = cut.finish()
    assert result.final_loss == TrainResult.model_validate_json(whole.files.result_file.read_text()).final_loss
