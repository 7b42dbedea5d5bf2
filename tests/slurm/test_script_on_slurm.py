"""A training script with the three lines, and one on Lightning, on the real cluster: preempted and requeued, it ends as
undisturbed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.attach.test_keeping import Story
from tests.slurm.faulty_training import Settings, Training
from tests.slurm.stories import REQUEUES
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import SweepSpec
from tula_hpc.records import Configuration, read_metrics

pytestmark = pytest.mark.usefixtures("quick_nodes")
SCRIPTS = Path(__file__).parents[1] / "attach" / "scripts"
SCRIPT = SCRIPTS / "three_lines.py"
STEPS = 24
SPEC = SweepSpec.model_validate(
    {
        "name": "script",
        "workload": {
            "script": SCRIPT,
            "arguments": [
                *("--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", "128"),
                *("--log", "{run_dir}/log", "--pause", "0.5"),
            ],
            "samples": 128,
            "epochs": 3,
        },
        "training": {"log_interval_steps": 1, "checkpoint_minutes": 1e-6},
    }
)


def test_preempted_a_script_is_requeued_and_ends_as_undisturbed(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    settings = Settings(Configuration(2, 1, 8), cluster=REQUEUES, spec=SPEC)
    whole = Training("whole", slurm_cluster, tmp_path / "whole", settings)
    whole.start()
    whole.end()
    cut = Training("cut", slurm_cluster, tmp_path / "cut", settings)
    cut.start()
    cut.wait_for_steps(4)
    cut.strike(lambda: slurm_cluster.preempt(cut.job_id))
    cut.wait_for_event("resumed")
    cut.end()
    assert (whole.result().steps, cut.result().steps) == (STEPS, STEPS)
    assert (whole.result().restarts, cut.result().restarts) == (0, 1), cut.account()
    stopped, resumed = cut.events("preempted")[0], cut.events("resumed")[0]
    assert stopped.data["step"] == resumed.data["step"] >= 4
    assert len(cut.events("submitted")) == 1
    for rank in range(2):
        assert weights(cut, rank).keys() == weights(whole, rank).keys()
        assert all(torch.equal(value, weights(cut, rank)[name]) for name, value in weights(whole, rank).items())
        assert losses(cut, rank) == losses(whole, rank)
    assert [row.epoch for row in read_metrics(cut.files.metrics_file).epochs] == [1, 2, 3]


def test_preempted_a_script_on_lightning_is_requeued_and_ends_as_undisturbed(
    slurm_cluster: MiniCluster, tmp_path: Path
) -> None:
    alone = Story(tmp_path / "alone", 2, (), around=False, script=SCRIPTS / "on_lightning.py")
    assert alone.start() == [0, 0]
    workload = SPEC.workload.model_copy(update={"script": alone.script, "epochs": 2})
    spec = SPEC.model_copy(update={"workload": workload})
    cut = Training(
        "lightning", slurm_cluster, tmp_path / "cut", Settings(Configuration(2, 1, 8), {}, REQUEUES, spec=spec)
    )
    cut.start()
    cut.wait_for_steps(4)
    cut.strike(lambda: slurm_cluster.preempt(cut.job_id))
    cut.wait_for_event("resumed")
    cut.end()
    assert (cut.result().steps, cut.result().restarts) == (16, 1), cut.account()
    assert cut.result().test_accuracy is not None
    for rank in range(2):
        assert all(torch.equal(value, weights(cut, rank)[name]) for name, value in alone.weights(rank).items())
        assert losses(cut, rank) == alone.lines(rank)


def log_of(training: Training) -> Path:
    return training.files.root / "script" / "work" / "log"


def weights(training: Training, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(log_of(training) / f"weights-{rank}.pt", weights_only=True)
    return found


def losses(training: Training, rank: int) -> list[str]:
    return (log_of(training) / f"losses-{rank}.txt").read_text().splitlines()
