"""Training scripts (one with the three lines, one on Lightning) that are preempted and requeued on the real cluster end
as if undisturbed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.attach.test_keeping import Scenario
from tests.slurm.faults.faulty_training import Settings, Training
from tests.slurm.faults.scenarios import REQUEUES
from tests.slurm.testcluster import MiniCluster
from tula_hpc.config import SweepSpec
from tula_hpc.records import Configuration, read_metrics

pytestmark = pytest.mark.usefixtures("quick_nodes")
SCRIPTS = Path(__file__).parents[2] / "attach" / "scripts"
# the faster script first, because its fault has to come first
SCRIPTED = [pytest.param("three_lines.py"), pytest.param("on_lightning.py", marks=pytest.mark.thorough)]
STEPS = 16
SPEC = SweepSpec.model_validate(
    {
        "name": "script",
        "workload": {
            "script": SCRIPTS / "three_lines.py",
            "arguments": [
                *("--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", "128"),
                *("--log", "{run_dir}/log", "--pause", "1"),
            ],
            "samples": 128,
            "epochs": 2,
        },
        "training": {"log_interval_steps": 1, "checkpoint_minutes": 1e-6},
    }
)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The scripts of the selected tests."""
    here = (item for item in request.session.items if item.path == Path(__file__))
    return [str(item.callspec.params["name"]) for item in here if isinstance(item, pytest.Function)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, chosen: list[str]) -> dict[str, Scenario]:
    """The undisturbed training of each script on this machine."""
    scenarios = {
        name: Scenario(tmp_path_factory.mktemp("alone") / "run", 2, (), around=False, script=SCRIPTS / name)
        for name in chosen
    }
    assert all(scenario.start() == [0, 0] for scenario in scenarios.values())
    return scenarios


@pytest.fixture(scope="module")
def preempted(
    slurm_cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory, chosen: list[str]
) -> dict[str, Training]:
    """All trainings at the same time, each on two nodes and preempted there by a job of higher priority."""
    trainings = {}
    for name in chosen:
        workload = SPEC.workload.model_copy(update={"script": SCRIPTS / name})
        settings = Settings(
            Configuration(2, 1, 8), cluster=REQUEUES, spec=SPEC.model_copy(update={"workload": workload})
        )
        folder = tmp_path_factory.mktemp("cut") / "run"
        trainings[name] = Training(name.removesuffix(".py"), slurm_cluster, folder, settings)
        trainings[name].start()
    for training in trainings.values():
        training.wait_for_steps(4)
        training.strike(partial(slurm_cluster.preempt, training.job_id))
    for training in trainings.values():
        training.wait_for_event("resumed")
        training.end()
    return trainings


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_preempted_script_is_requeued_and_ends_as_undisturbed(
    name: str, preempted: dict[str, Training], alone: dict[str, Scenario]
) -> None:
    cut, whole = preempted[name], alone[name]
    assert (cut.result().steps, cut.result().restarts) == (STEPS, 1), cut.account()
    assert cut.result().test_accuracy is not None
    stopped, resumed = cut.events("preempted")[0], cut.events("resumed")[0]
    assert stopped.data["step"] == resumed.data["step"] >= 4
    assert len(cut.events("submitted")) == 1
    for rank in range(2):
        assert weights(cut, rank).keys() == whole.weights(rank).keys()
        assert all(torch.equal(value, weights(cut, rank)[name]) for name, value in whole.weights(rank).items())
        assert losses(cut, rank) == whole.lines(rank)
    assert [row.epoch for row in read_metrics(cut.files.metrics_file).epochs] == [1, 2]


def log_of(training: Training) -> Path:
    return training.files.root / "script" / "work" / "log"


def weights(training: Training, rank: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(log_of(training) / f"weights-{rank}.pt", weights_only=True)
    return found


def losses(training: Training, rank: int) -> list[str]:
    return (log_of(training) / f"losses-{rank}.txt").read_text().splitlines()
