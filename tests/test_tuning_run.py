"""Settings tuned in real trainings of one worker: hopeless ones are left, and a resumed training decides alike."""

from __future__ import annotations

import math
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tula_hpc import trainer as trainer_module
from tula_hpc.checkpoint import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import DivergedError
from tula_hpc.jobs import TrainJob
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Configuration, RunDirectory, TrainResult, TuningOutcome, read_metrics
from tula_hpc.stopping import StopRequest
from tula_hpc.trainer import Trainer, run_training
from tula_hpc.worker import Worker
from tula_hpc.workloads import validation_samples
from tula_hpc.workloads.data import build_data

ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=64)
HOPELESS: dict[str, Any] = {"small_batch": 2, "s_max": 1e6, "exponent": 4.0}  # factors to (64/2)² and beyond
EPOCHS = 4


def sweep(**training: object) -> SweepSpec:
    workload = {
        "model": "tests.examples.own_workload:perceptron",
        "dataset": "digits",
        "samples": 640,
        "augment": False,
        "loader_workers": 0,
        "epochs": EPOCHS,
        "lr": 0.1,
        "schedule": "constant",
    }
    options = {"tune_small_batch": [2, 32], "tune_every_epochs": 1, "tune_holdout": 0.2, "scale_warmup_epochs": 0.0}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": options | training})


LEAVES = sweep(**HOPELESS, log_interval_steps=1)
FOUR = sweep(**HOPELESS, tune_delta=[0.1], gate="paper", log_interval_steps=4)


@pytest.fixture(autouse=True)
def as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)


def prepared(folder: Path) -> RunDirectory:
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    return run


@pytest.fixture(scope="module")
def left_a_hopeless_one(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run."""
    return finished(prepared(tmp_path_factory.mktemp("left")), LEAVES)


@pytest.fixture(scope="module")
def of_four_settings(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run."""
    return finished(prepared(tmp_path_factory.mktemp("four")), FOUR)


def finished(run: RunDirectory, spec: SweepSpec) -> RunDirectory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "join_job", lambda: ALONE)
        train(run, spec)
    return run


def result_of(run: RunDirectory) -> tuple[TrainResult, TuningOutcome]:
    result = TrainResult.model_validate_json(run.train().result_file.read_bytes())
    assert result.tuning is not None
    return result, result.tuning


def train(run: RunDirectory, spec: SweepSpec) -> tuple[TrainResult, TuningOutcome]:
    assert run_training(TrainJob(spec, ClusterSpec(), CONFIGURATION, run.root), StopRequest()) == "finished"
    return result_of(run)


def weights(run: RunDirectory) -> dict[str, Tensor]:
    loaded = CheckpointStore(run.train().checkpoints).load_latest()
    assert loaded is not None
    model: dict[str, Tensor] = loaded.state["model"]
    return model


def tuned(run: RunDirectory) -> list[dict[str, Any]]:
    return [event.data for event in run.events() if event.event == "tuned"]


def test_a_hopeless_setting_is_rolled_back_and_pruned(left_a_hopeless_one: RunDirectory) -> None:
    run = left_a_hopeless_one
    result, outcome = result_of(run)
    assert (outcome.small_batch, outcome.pruned, outcome.rollbacks) == (32, 1, 1)
    assert (result.test_accuracy or 0.0) > 0.6  # one in ten is right by chance, and the hopeless one is no better
    first, second, *_ = tuned(run)
    assert (first["tried"]["small_batch"], first["outcome"], first["from"]) == (2, "rolled_back", "start")
    assert first["loss"] > first["start_loss"] > second["loss"]
    assert second["pruned"]["small_batch"] == 2
    steps = 512 // 64
    assert (result.epochs, result.steps, result.samples_seen) == (EPOCHS, EPOCHS * steps, EPOCHS * steps * 64)
    assert outcome.lost_samples == steps * 64


def test_metrics_of_what_was_rolled_back_are_kept_but_are_no_progress(left_a_hopeless_one: RunDirectory) -> None:
    run = left_a_hopeless_one
    metrics = read_metrics(run.train().metrics_file)
    assert [row.epoch for row in metrics.epochs] == list(range(1, EPOCHS + 1))
    attempts = {row.attempt for row in metrics.epochs} | {row.attempt for row in metrics.steps}
    assert attempts == {1, 2}  # the run again, and all that came when nothing was left to try
    assert run.train().metrics_file.read_text().count('"attempt":0') > len(metrics.steps) / EPOCHS


def test_a_challenger_that_loses_leaves_the_training_as_if_it_had_never_been(tmp_path: Path) -> None:
    """Weights, metrics and progress are those of a training that had nothing to try; here it is the last round."""
    run, alone = prepared(tmp_path / "tuned"), prepared(tmp_path / "alone")
    good: dict[str, Any] = {
        "small_batch": 32,
        "s_max": 1e6,
        "exponent": 4.0,
        "log_interval_steps": 1,
        "tune_every_epochs": 2,
    }
    result, outcome = train(run, sweep(**good))
    expected, _ = train(alone, sweep(**good | {"tune_small_batch": [32]}))
    assert (outcome.rollbacks, outcome.pruned, outcome.small_batch) == (1, 1, 32)
    assert outcome.lost_samples == 2 * 512
    assert all(torch.equal(value, weights(alone)[name]) for name, value in weights(run).items())
    losses = [[row.loss for row in read_metrics(each.train().metrics_file).steps] for each in (run, alone)]
    assert losses[0] == losses[1]
    assert result.test_accuracy == expected.test_accuracy
    assert result.steps == expected.steps


def test_divergence_within_a_round_is_no_end_while_a_setting_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = original(self, inputs, targets)
        return loss * torch.nan if self.sweep.training.small_batch in bad else loss

    original, bad = Worker.train_step, {None, 2}
    monkeypatch.setattr(Worker, "train_step", diverges)
    run = prepared(tmp_path / "one")
    _, outcome = train(run, sweep(small_batch=2))
    assert (outcome.small_batch, outcome.pruned) == (32, 1)
    assert tuned(run)[0]["loss"] is None
    bad.add(32)
    with pytest.raises(DivergedError, match="not finite at step 8"):
        train(prepared(tmp_path / "all"), sweep(small_batch=2))


def test_scales_of_a_run_that_diverged_are_not_counted_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = original(self, inputs, targets)
        return loss * torch.nan if self.sweep.training.small_batch == 2 else loss

    original = Worker.train_step
    monkeypatch.setattr(Worker, "train_step", diverges)
    run = prepared(tmp_path)
    _, outcome = train(run, sweep(small_batch=2, scale_histogram=True, log_interval_steps=4))
    assert outcome.pruned == 1
    elements = sum(value.numel() for value in weights(run).values())
    steps = [row.step for row in read_metrics(run.train().metrics_file).steps]
    lines = [sum(row.scale_histogram or []) for row in read_metrics(run.train().metrics_file).steps]
    assert lines == [elements * (step - before) for before, step in pairwise([0, *steps])]


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("stopped_after", [3, 11, 20])
def test_a_run_stopped_in_the_middle_of_a_round_ends_with_the_same_weights(
    of_four_settings: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_after: int
) -> None:
    """Steps are those taken, eight a run: in the hopeless one, in the one again, and in a round after it."""
    whole, parts = of_four_settings, prepared(tmp_path)
    _, expected = result_of(whole)
    stop_after(monkeypatch, stopped_after)
    with pytest.raises(SystemExit):
        train(parts, FOUR)
    monkeypatch.undo()
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    _, outcome = train(parts, FOUR)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(parts).items())
    times = {"lost_s": 0.0}
    assert outcome.model_copy(update=times) == expected.model_copy(update=times)
    assert tuned(whole) == tuned(parts)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    taken, original = [], Trainer._train_step
    monkeypatch.setattr("tula_hpc.stopping.FIRST_CHECKS", 1000)  # look at every step

    def counted(self: Trainer, batches: Any) -> None:
        original(self, batches)
        taken.append(self)
        if len(taken) == steps:
            self.stop.received = signal.SIGUSR2

    monkeypatch.setattr(Trainer, "_train_step", counted)


@pytest.mark.parametrize("place", ["before the judgement", "after it is noted"])
def test_a_run_killed_while_a_round_is_judged_decides_alike(
    left_a_hopeless_one: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    whole, parts = left_a_hopeless_one, prepared(tmp_path)
    kill(monkeypatch, place)
    with pytest.raises(KilledError):
        train(parts, LEAVES)
    monkeypatch.undo()
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    train(parts, LEAVES)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(parts).items())
    last = [read_metrics(run.train().metrics_file).epochs[-1].test_loss for run in (whole, parts)]
    assert last[0] == last[1]


def kill(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def dies(*_: object, **__: object) -> None:
        raise KilledError

    target = {"before the judgement": "end_round", "after it is noted": "_go_back"}
    monkeypatch.setattr(f"tula_hpc.tuning.Tuning.{target[place]}", dies)


def test_a_setting_reaches_the_optimizer_and_the_reference_pass() -> None:
    options = {"gate": "paper", "granularity": "tensor", "reference": "pass"}
    spec = sweep(**options, update_interval_epochs=0.5)
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.optimizer, TulaOptimizer)
    inputs, targets = next(worker.batches())
    for small_batch in (16, 48):
        worker.use_setting(0.1, small_batch)
        assert (worker.optimizer.delta, worker.optimizer.small_batch) == (0.1, small_batch)
        assert worker.optimizer.s_max == pytest.approx((64 / small_batch) ** (spec.training.ags.exponent / 2))
        assert worker.optimizer.update_interval == 4  # half an epoch
        worker.optimizer.zero_grad()
        worker.forward_backward(inputs[:small_batch], targets[:small_batch])
        alone = [p.grad for p in worker.parameters]
        for found, expected in zip(worker.reference_gradient(inputs, targets), alone, strict=True):
            assert found is not None
            torch.testing.assert_close(found, expected)


def test_a_larger_reference_batch_takes_its_passes_less_often() -> None:
    """Where the default form needs passes, as one worker with BatchNorm does, they may see 2 % of the samples."""
    workload = sweep().workload.model_copy(update={"model": "tula_hpc.workloads.compact:compact_cnn"})
    worker = Worker(sweep().model_copy(update={"workload": workload}), ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.optimizer, TulaOptimizer)
    for small_batch in (8, 32):
        worker.use_setting(0.5, small_batch)
        assert worker.optimizer.update_interval == math.ceil(small_batch / 64 / 0.02)


@pytest.mark.parametrize("which", ["left_a_hopeless_one", "of_four_settings"])
def test_at_the_end_no_checkpoint_of_a_round_is_left(request: pytest.FixtureRequest, which: str) -> None:
    run: RunDirectory = request.getfixturevalue(which)
    assert not list((run.train().checkpoints / "rounds").glob("*.tula"))


def test_samples_that_judge_are_not_trained_on_and_the_same_for_every_seed() -> None:
    spec = sweep().workload.model_copy(update={"samples": None, "augment": False})
    worker = Worker(sweep().model_copy(update={"workload": spec}), ClusterSpec(), CONFIGURATION, ALONE)
    held = images(validation_samples(spec, 0.2))
    trained, whole = images(worker.workload.train), images(build_data(spec).train)
    assert sorted(held + trained) == sorted(whole)
    assert len(held) == round(0.2 * len(whole))
    assert held == images(validation_samples(spec.model_copy(update={"seed": 3}), 0.2))
    assert images(worker.workload.test) == images(build_data(spec).test)


def images(data: Any) -> list[bytes]:
    return [image.numpy().tobytes() for image, _ in data.__getitems__(list(range(len(data))))]
