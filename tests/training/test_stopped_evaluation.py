"""A stop during an evaluation: the state before it is saved, and the resumed training begins with that evaluation."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.examples.own_workload import perceptron
from tests.forked import ALONE
from tests.known import known
from tula_hpc.batches import tensors_of
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp import agreement as stopping
from tula_hpc.ddp.agreement import Agreement, EvaluationStopped, SaveRequest, Stop, until_stopped
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import CheckpointError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, TrainResult
from tula_hpc.training import loop as trainer_module
from tula_hpc.training.loop import run_training

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=64)
# batches of the test set, which has 359 samples
BATCHES = 6


class Stateful(nn.Module):
    """A perceptron with extra state that is no tensor, and a running scale outside of its state."""

    scale: Tensor

    def __init__(self, classes: int, image_size: int) -> None:
        super().__init__()
        self.body = perceptron(classes, image_size)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(images.square().mean().sqrt(), 0.1)
        output: Tensor = self.body(images / self.scale)
        return output

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


def sweep(
    training: dict[str, object],
    study: dict[str, object] | None = None,
    model: str = "tests.examples.own_workload:perceptron",
) -> SweepSpec:
    workload = {"model": model, "dataset": "digits", "samples": 320, "loader_workers": 0, "epochs": 2}
    tables = {"workload": workload, "training": {"log_interval_steps": 2, "small_batch": 16, **training}}
    return SweepSpec.model_validate({"name": "x", **tables} | ({"study": study} if study else {}))


PLAIN = sweep({"method": "ags"})
OWN = sweep({"method": "lbt"}, model=f"{__name__}:Stateful")
STUDY = sweep({"method": "lbt"}, {"methods": ["lbt"], "batches": [64]})


@pytest.fixture(autouse=True)
def as_a_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    # check for a stop after every batch, however short
    monkeypatch.setattr(stopping, "FIRST_CHECKS", 1000)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(run: RunDirectory, spec: SweepSpec) -> str:
    return run_training(TrainJob(spec, ClusterSpec(), CONFIGURATION, run.root), StopRequest().install())


def prepared(folder: Path) -> RunDirectory:
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    return run


def counted(patch: pytest.MonkeyPatch, strike_at: int) -> list[int]:
    """Record the numbers of the evaluated batches; send USR2 during the batch `strike_at`."""
    seen: list[int] = []

    def striking(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(*arguments: Any) -> Any:
            seen.append(len(seen))
            if len(seen) == strike_at:
                os.kill(os.getpid(), signal.SIGUSR2)
            return evaluate(*arguments)

        return evaluated

    patch.setattr(Worker, "score", striking(Worker.score))
    return seen


def lines(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without their times."""
    path = run.train().metrics_file
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if not key.endswith(("time_s", "_at"))} for row in rows]


def end(run: RunDirectory) -> tuple[TrainResult, dict[str, Any]]:
    loaded = known(CheckpointStore(run.train().checkpoints).load_latest())
    result = TrainResult.model_validate_json(run.train().result_file.read_bytes())
    parts_s = result.starts_s, result.evaluation_s, result.saving_s
    assert all(seconds is not None and seconds > 0.0 for seconds in parts_s)
    same = dict.fromkeys(("train_time_s", "wall_time_s", "starts_s", "evaluation_s", "saving_s"), 0.0)
    return result.model_copy(update=same), loaded.state


@pytest.mark.parametrize(
    ("spec", "strike_at"),
    [
        pytest.param(PLAIN, 2, id="of the first epoch"),
        pytest.param(OWN, 2, id="of a model with a state of its own", marks=pytest.mark.processes),
        pytest.param(PLAIN, BATCHES + 2, id="of the last epoch", marks=pytest.mark.processes),
        pytest.param(STUDY, 2 * BATCHES + 2, id="of training samples, in a study", marks=pytest.mark.processes),
    ],
)
def test_a_stop_in_mid_evaluation_loses_nothing(tmp_path: Path, spec: SweepSpec, strike_at: int) -> None:
    whole, cut = prepared(tmp_path / "whole"), prepared(tmp_path / "cut")
    assert train(whole, spec) == "finished"
    with pytest.MonkeyPatch.context() as patch:
        seen = counted(patch, strike_at)
        with pytest.raises(SystemExit):
            train(cut, spec)
    assert len(seen) == strike_at, "the evaluation went on"
    assert lines(cut) == lines(whole)[: len(lines(cut))]
    assert train(cut, spec) == "finished"
    assert lines(cut) == lines(whole)
    (result, state), (expected, expected_state) = end(cut), end(whole)
    assert result == expected.model_copy(update={"restarts": 1})
    assert state["progress"]["interruptions"] == 0
    weights = zip(tensors_of(state["model"]), tensors_of(expected_state["model"]), strict=True)
    assert all(torch.equal(*pair) for pair in weights)


def test_a_training_begins_with_the_model_as_it_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass before the training leaves no trace, even in a buffer outside of the model's state."""
    scales: list[float] = []
    step = Worker.train_step

    def noted(self: Worker, *batch: Tensor) -> Tensor:
        scales.append(float(self.model.get_buffer("scale")))
        return step(self, *batch)

    monkeypatch.setattr(Worker, "train_step", noted)
    assert train(prepared(tmp_path / "run"), OWN) == "finished"
    assert scales[0] == 1.0 != scales[1]


def test_each_start_from_one_checkpoint_counts(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, 2)
        with pytest.raises(SystemExit):
            train(run, PLAIN)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "score", lambda *_: pytest.fail("killed"))
            with pytest.raises(pytest.fail.Exception, match="killed"):
                train(run, PLAIN)
    assert train(run, PLAIN) == "finished"
    assert end(run)[0].restarts == 3


def test_an_earlier_job_that_is_still_at_work_cannot_save(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    job = TrainJob(PLAIN, ClusterSpec(), CONFIGURATION, run.root)
    assert run_training(replace(job, jobs_before=1), StopRequest().install()) == "finished"
    with pytest.raises(CheckpointError, match="is a left-over"):
        CheckpointStore(run.train().checkpoints).save({}, samples_seen=9**9, restart_count=job.run_number(20))


class Peer:
    """A worker whose peer asks for a stop at a given check."""

    device = torch.device("cpu")

    def __init__(self, stops_at: int) -> None:
        self.looks, self.stops_at = 0, stops_at

    def agree(self, *values: float) -> list[float]:
        self.looks += 1
        return [Stop.NOW if self.looks == self.stops_at else Stop.NONE, *values[1:]]

    def synchronize_device(self) -> None:
        pass


def test_all_workers_check_as_often_though_one_has_fewer_batches() -> None:
    for batches in (3, 4):
        peer = Peer(stops_at=0)
        looked = until_stopped(range(batches), 4, Agreement(peer, StopRequest(), lambda: SaveRequest.NOTHING))
        assert list(looked) == list(range(batches))
        assert peer.looks == 4


def test_a_worker_without_a_batch_left_stops_with_its_peers() -> None:
    looked = until_stopped(range(3), 4, Agreement(Peer(stops_at=4), StopRequest(), lambda: SaveRequest.NOTHING))
    assert [next(looked) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(EvaluationStopped):
        next(looked)
