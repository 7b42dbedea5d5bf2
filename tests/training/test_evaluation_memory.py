"""Evaluations take more samples at once than a step; where memory does not suffice for them, they take fewer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.forked import ALONE
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, TrainResult
from tula_hpc.training import loop as trainer_module

LOCAL_BATCH = 16
# of digits
TEST_SAMPLES = 359
SPEC = SweepSpec.model_validate(
    {
        "name": "x",
        "workload": {
            "model": "tests.examples.own_workload:perceptron",
            "dataset": "digits",
            "loader_workers": 0,
            "samples": 64,
            "epochs": 1,
        },
        "training": {"method": "lbt"},
    }
)


def train(monkeypatch: pytest.MonkeyPatch, folder: Path, room: int) -> tuple[RunDirectory, list[int]]:
    """Train where memory suffices to evaluate `room` samples at once; return the sizes that were tried."""
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    tried: list[int] = []
    score = Worker.score

    def limited(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        tried.append(len(targets))
        if len(targets) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(self, inputs, targets)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "join_job", lambda: ALONE)
        patch.setattr(Worker, "score", limited)
        job = TrainJob(SPEC, ClusterSpec(), Configuration(1, 1, LOCAL_BATCH), run.root)
        trainer_module.run_training(job, StopRequest())
    return run, tried


def result_of(run: RunDirectory) -> TrainResult:
    return TrainResult.model_validate_json(run.train().result_file.read_bytes())


@pytest.mark.parametrize("room", [40, LOCAL_BATCH])
def test_an_evaluation_takes_as_many_samples_at_once_as_memory_suffices_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int
) -> None:
    """Every sample counts once, and what did not fit is not tried for each batch again."""
    run, tried = train(monkeypatch, tmp_path / "little", room)
    whole, _ = train(monkeypatch, tmp_path / "whole", 64)
    little, expected = result_of(run), result_of(whole)
    assert little.test_accuracy == expected.test_accuracy
    assert little.test_loss == pytest.approx(expected.test_loss)
    assert sum(size for size in tried if size <= room) == TEST_SAMPLES
    # from 64 samples, each halving is tried once: 64, or 64 and 32
    assert len([size for size in tried if size > room]) <= 2


def test_where_the_samples_of_a_step_do_not_fit_either_the_batch_is_too_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="out of memory"):
        train(monkeypatch, tmp_path / "none", LOCAL_BATCH - 1)
    (row,) = RunDirectory(tmp_path / "none").measurements().records
    assert (row.status, row.local_batch) == ("oom", LOCAL_BATCH)
