"""Tuning with two workers over gloo: both decide alike, whole or stopped and resumed, with divided states as well.

Run as a program, this file is the two workers.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forked import fork_workers, give_secret, run_workers
from tula_hpc import stopping, trainer
from tula_hpc.checkpoint import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.jobs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, TrainResult
from tula_hpc.stopping import StopRequest
from tula_hpc.tuning import Tuning
from tula_hpc.worker import Worker, leave_group

WORKERS, BATCH, STEPS_PER_EPOCH = 2, 32, 8
STOPPED_AFTER = STEPS_PER_EPOCH + 3  # in the first round, which is run again
SWEEP = SweepSpec.model_validate(
    {
        "name": "x",
        "workload": {
            "model": "tests.examples.own_workload:perceptron",
            "dataset": "digits",
            "samples": 640,
            "augment": False,
            "loader_workers": 0,
            "epochs": 3,
            "lr": 0.1,
            "schedule": "constant",
            "zero_stage": 1,
        },
        "training": {
            "small_batch": 2,
            "s_max": 1e6,
            "exponent": 4.0,
            "scale_warmup_epochs": 0.0,
            "tune_small_batch": [2, 32],
            "tune_every_epochs": 1,
            "tune_holdout": 0.2,
        },
    }
)


def work(rank: int, folder: Path) -> None:
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False, submission=str(folder))
    pytest.MonkeyPatch().setattr(trainer, "join_job", lambda: env)  # this process ends soon: never put back
    pytest.MonkeyPatch().setattr(stopping, "FIRST_CHECKS", 1000)  # look at every step
    seen = {"whole": train(folder / "whole")}
    train(folder / "stopped", stop_after=STOPPED_AFTER)
    leave_group()  # the trainer has left it to the end of the process
    seen["stopped"] = train(folder / "stopped")
    torch.save(seen, folder / f"{rank}.pt")


def train(root: Path, stop_after: int = 0) -> dict[str, Any]:
    """What this worker has in the end: weights, and the held-out losses at the end of each run of a round."""
    stop, step, measure = StopRequest(), Worker.train_step, Tuning.losses
    workers: list[Worker] = []
    losses: list[list[float]] = []

    def counted(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        workers.append(self)
        if len(workers) == stop_after:
            stop.received = signal.SIGTERM
        return step(self, inputs, targets)

    def noted(self: Tuning) -> list[float]:
        losses.append(measure(self))
        return losses[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(Worker, "train_step", counted)
        patch.setattr(Tuning, "losses", noted)
        trainer.run_training(TrainJob(SWEEP, ClusterSpec(), Configuration(WORKERS, 1, BATCH), root), stop)
    weights = torch.cat([p.detach().flatten() for p in workers[-1].model.parameters()])
    return {"weights": weights, "losses": torch.tensor(losses)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both workers have trained; see `work`."""
    folder = tmp_path_factory.mktemp("tuning")
    for name in ("whole", "stopped"):
        RunDirectory(folder / name).create().train().root.mkdir()
    give_secret(folder)
    run_workers(__file__, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each worker saw."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


def test_the_hopeless_setting_is_left_by_both(folder: Path, ranks: list[dict[str, Any]]) -> None:
    result = TrainResult.model_validate_json(RunDirectory(folder / "whole").train().result_file.read_bytes())
    assert result.tuning is not None
    assert (result.tuning.small_batch, result.tuning.pruned, result.tuning.rollbacks) == (32, 1, 1)
    start, hopeless, other = ranks[0]["whole"]["losses"].mean(dim=1)
    assert other < hopeless
    assert start < hopeless
    assert torch.equal(ranks[0]["whole"]["weights"], ranks[1]["whole"]["weights"])


def test_both_know_the_loss_of_every_held_out_sample(ranks: list[dict[str, Any]]) -> None:
    first, second = (seen["whole"]["losses"] for seen in ranks)
    assert torch.equal(first, second)
    assert first.shape == (3, 128)  # at the start, and after two runs of the first round
    assert (first[0] > 0).all()  # of a hopeless setting a few come to 0


def test_stopped_and_resumed_it_ends_with_the_same_weights(folder: Path, ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert torch.equal(seen["stopped"]["weights"], seen["whole"]["weights"])
    found = [CheckpointStore(RunDirectory(folder / n).train().checkpoints).load_latest() for n in ("whole", "stopped")]
    first, second = (loaded.state["model"] for loaded in found if loaded is not None)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


if __name__ == "__main__":
    sys.exit(fork_workers(WORKERS, partial(work, folder=Path(sys.argv[1]))))
