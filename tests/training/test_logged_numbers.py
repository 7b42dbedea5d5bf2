"""The critical batch of an epoch and the scales that were used, in real trainings of one worker."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from tests.forked import ALONE
from tests.known import known
from tula_hpc.attach.train.scores import SCORES
from tula_hpc.checkpoint.safe_points import Progress
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import DivergedError
from tula_hpc.gradients.noise_scale import CriticalBatch, NoiseReading
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.optim.observer import GradientObserver
from tula_hpc.records import Configuration, Metrics, RunDirectory, TrainResult, read_metrics
from tula_hpc.training import loop as trainer_module
from tula_hpc.training import metrics_writer
from tula_hpc.training.ending import write_result
from tula_hpc.training.metrics_writer import MetricsWriter, StepWindow
from tula_hpc.training.progress import Training
from tula_hpc.training.training_log import TrainingLog

PERCEPTRON = "tests.examples.own_workload:perceptron"


def sweep(**training: object) -> SweepSpec:
    workload = {"model": PERCEPTRON, "dataset": "digits", "loader_workers": 0, "samples": 128, "epochs": 2}
    options = {"small_batch": 8, "log_interval_steps": 2, "update_interval_epochs": 0.25}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": options | training})


def train(folder: Path, spec: SweepSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Metrics, dict[str, Tensor]]:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    job = TrainJob(spec, ClusterSpec(), Configuration(1, 1, 16), run.root)
    assert trainer_module.run_training(job, StopRequest()) == "finished"
    loaded = known(CheckpointStore(run.train().checkpoints).load_latest())
    return read_metrics(run.train().metrics_file), loaded.state["model"]


def test_an_epochs_line_has_its_critical_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the pairs that its steps logged, averaged before they are divided."""
    metrics, _ = train(tmp_path / "run", sweep(), monkeypatch)
    for epoch in metrics.epochs:
        rows = [row for row in metrics.steps if epoch.epoch - 1 < row.epoch <= epoch.epoch]
        terms = [(r.noise_gradient_square, r.noise_trace) for r in rows if r.noise_gradient_square is not None]
        square, trace = (sum(term or 0.0 for term in column) for column in zip(*terms, strict=True))
        assert epoch.critical_batch == (pytest.approx(trace / square) if square > 0 and trace > 0 else None)
    assert any(epoch.critical_batch for epoch in metrics.epochs)


@pytest.mark.processes
def test_the_first_batch_is_of_the_start_and_no_step_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loader processes, which import torch, start with it, so that a profile's start includes them, too."""
    slow_s = 1.5
    batches = Worker.batches

    def late(worker: Worker, epoch: int = 0, offset: int = 0) -> Iterator[Any]:
        time.sleep(slow_s)
        yield from batches(worker, epoch, offset)

    begun = time.time()
    monkeypatch.setattr(trainer_module, "job_started_at", lambda: begun)
    monkeypatch.setattr(Worker, "batches", late)
    metrics, _ = train(tmp_path, sweep(), monkeypatch)
    first = metrics.steps[0]
    assert 2 * (first.data_time_s or 0.0) < slow_s
    assert 2 * first.step_time_s < slow_s
    result = known(RunDirectory(tmp_path).train().read_result())
    assert result.starts_s is not None
    assert result.starts_s > slow_s
    assert result.train_time_s < slow_s


@pytest.mark.parametrize("gate", ["none", "paper"])
def test_a_training_logs_the_mean_scale_that_it_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """The mean includes warm-up and gate."""
    options: dict[str, Any] = {"gate": gate, "granularity": "model", "reference": "free"}
    options |= {"delta": 2.0, "log_interval_steps": 1}
    metrics, _ = train(tmp_path, sweep(**options), monkeypatch)
    applied = [row.applied_scale or 0.0 for row in metrics.steps]
    assert applied[0] == 1.0 != metrics.steps[0].scale_mean
    assert max(applied) > 1.5


def test_a_critical_batch_is_the_ratio_of_weighted_means() -> None:
    critical = CriticalBatch()
    for square, trace, weight in ((1.0, 30.0, 1), (math.nan, math.nan, 5), (3.0, 10.0, 3)):
        critical.add(NoiseReading(math.nan, square, trace), weight)
    assert critical.take() == pytest.approx(60 / 10)
    assert math.isnan(critical.take())


class Lost(nn.Module):
    """A layer whose gradient is nan, though its output is finite."""

    def forward(self, scores: Tensor) -> Tensor:
        if scores.requires_grad:
            scores.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call] # torch's
        return scores


def lost(classes: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, classes), Lost())


@pytest.mark.parametrize("study", [None, {"methods": ["lbt"], "batches": [16]}], ids=["a plan", "a study"])
def test_a_training_that_takes_no_step_in_float16_ends_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, study: dict[str, object] | None
) -> None:
    """GradScaler skips each of its steps, so that weights and loss stay finite."""
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    workload = {"model": f"{__name__}:lost", "dataset": "digits", "loader_workers": 0, "samples": 128, "epochs": 6}
    tables: dict[str, object] = {"name": "x", "workload": workload | {"precision": "fp16"}}
    tables["training"] = {"method": "lbt", "log_interval_steps": 2}
    if study is not None:
        tables["study"] = study
    run = RunDirectory(tmp_path / "run").create()
    run.train().root.mkdir()
    job = TrainJob(SweepSpec.model_validate(tables), ClusterSpec(), Configuration(1, 1, 16), run.root)
    words = "at step 32 gradients in float16 are still not finite at the smallest useful loss scale, so that no step"
    if study is None:
        with pytest.raises(DivergedError, match=words):
            trainer_module.run_training(job, StopRequest())
    else:
        logged: list[int] = []

        def note_and_write(*given: Any) -> None:
            logged.extend(row.step for row in read_metrics(run.train().metrics_file).steps)
            write_result(*given)

        monkeypatch.setattr(trainer_module, "write_result", note_and_write)
        assert trainer_module.run_training(job, StopRequest()) == "finished"
        assert TrainResult.model_validate_json(run.train().result_file.read_bytes()).diverged
        # all lines are there before the result, with which the training is taken to be complete
        assert logged == list(range(2, 32, 2))


def test_a_study_says_that_no_step_is_taken_if_only_another_worker_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, which writes the result, takes its steps."""
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    monkeypatch.setattr(Training, "any", lambda training, mine: True)
    monkeypatch.setattr(TrainingLog, "_refuse_samples", lambda *_: None)
    workload = {"model": PERCEPTRON, "dataset": "digits", "loader_workers": 0, "samples": 128, "epochs": 1}
    study = {"methods": ["lbt"], "batches": [16]}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "study": study})
    run = RunDirectory(tmp_path / "run").create()
    run.train().root.mkdir()
    job = TrainJob(spec, ClusterSpec(), Configuration(1, 1, 16), run.root)
    assert trainer_module.run_training(job, StopRequest()) == "finished"
    assert any("gradients in float16 are still not finite" in event.detail for event in run.events())


def test_lines_of_short_steps_wait_for_each_other_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(metrics_writer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file, 1024, 8, 1)
    progress = Progress()

    def log(at: float) -> list[int]:
        clock.now = at
        progress.count_step(8)
        window = StepWindow()
        window.add(seconds=0.1)
        writer.write_steps(progress, window, GradientObserver(), lr=0.1)
        return [line.step for line in read_metrics(file).steps]

    assert [log(at) for at in (10.0, 10.1, 10.9, 11.0, 11.1)] == [[1], [1], [1], [1, 2, 3, 4], [1, 2, 3, 4]]
    writer.write_epoch(progress, 1, GradientObserver(), dict.fromkeys(SCORES))
    # in the order of the training
    assert [json.loads(line).get("step") for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5, 5]
    assert log(11.2)[-1] == 5
    writer.close()
    assert read_metrics(file).steps[-1].step == 6
