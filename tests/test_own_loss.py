"""Workloads with a loss of one's own: language models, regressions, several inputs; and mistakes in them."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from tests.test_workloads_own import write_module
from tula_hpc import trainer as trainer_module
from tula_hpc.analysis.figures import draw_all
from tula_hpc.analysis.report_data import read_run
from tula_hpc.checkpoint import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import InputError
from tula_hpc.jobs import TrainJob
from tula_hpc.profiler import measure
from tula_hpc.records import Configuration, RunDirectory, TrainResult, read_metrics
from tula_hpc.stopping import StopRequest
from tula_hpc.trainer import Trainer, run_training
from tula_hpc.worker import Worker
from tula_hpc.workloads import build_workload
from tula_hpc.workloads.footprint import estimate_footprint

ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=32)
OWN, LANGUAGE = "tests.examples.own_loss", "tula_hpc.workloads.language"
REGRESSION = {"model": f"{OWN}:regression", "dataset": f"{OWN}:points", "loss": f"{OWN}:squared_error"}
WORDS = {
    "model": f"{LANGUAGE}:transformer",
    "dataset": f"{LANGUAGE}:programs",
    "loss": f"{LANGUAGE}:next_character_loss",
    "metric": f"{LANGUAGE}:next_character_right",
    "image_size": 16,
    "samples": 96,
}


def sweep(workload: dict[str, Any], **training: object) -> SweepSpec:
    quick = {"epochs": 2, "lr": 0.05, "loader_workers": 0}
    options = {"log_interval_steps": 1, "base_batch": 16, "drift": False}
    search = {"min_batch": 16, "max_batch": 32, "min_steps": 5, "max_steps": 5, "warmup_steps": 1, "noise_steps": 0}
    given = {"name": "x", "workload": quick | workload, "training": options | training, "search": search}
    return SweepSpec.model_validate(given)


def train(folder: Path, spec: SweepSpec, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    run = RunDirectory(folder)
    if not folder.exists():
        run.create()
        run.train().root.mkdir()
    run_training(TrainJob(spec, ClusterSpec(), CONFIGURATION, run.root), StopRequest())
    return run


def result_of(run: RunDirectory) -> TrainResult:
    return TrainResult.model_validate_json(run.train().result_file.read_bytes())


def test_a_regression_is_trained_and_judged_by_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path / "run", sweep(REGRESSION), monkeypatch)
    result, epochs = result_of(run), read_metrics(run.train().metrics_file).epochs
    assert (result.test_accuracy, result.test_top5_accuracy) == (None, None)
    assert result.test_loss == epochs[-1].test_loss < 0.8 * epochs[0].train_loss
    assert any(event.detail.startswith("test loss") for event in run.events())
    figure = next(item for item in draw_all(read_run(run)).drawings if item.name == "training")
    assert figure.title.startswith("test loss")
    assert len(figure.figure.axes) == 1


def test_a_metric_is_reported_as_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(REGRESSION | {"metric": f"{OWN}:near", "epochs": 1})
    result = result_of(train(tmp_path / "run", spec, monkeypatch))
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    loaded = CheckpointStore(RunDirectory(tmp_path / "run").train().checkpoints).load_latest()
    assert loaded is not None
    worker.load_own_state(loaded.state)
    inputs, (_, number) = default_collate([worker.workload.test[index] for index in range(256)])
    with worker.evaluating():
        found = worker.model(inputs)["number"]
    assert result.test_accuracy == pytest.approx(float(((found - number).abs() < 0.5).double().mean()))
    assert result.test_top5_accuracy is None


@pytest.mark.parametrize("workload", [REGRESSION, WORDS], ids=["several inputs", "words"])
def test_a_stopped_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: dict[str, Any]
) -> None:
    spec = sweep(workload)
    whole = train(tmp_path / "whole", spec, monkeypatch)
    taken, original = [], Trainer._train_step

    def step(self: Trainer, batches: Any) -> None:
        original(self, batches)
        taken.append(1)
        if len(taken) == 2:
            self.stop.received = signal.SIGTERM

    monkeypatch.setattr(Trainer, "_train_step", step)
    with pytest.raises(SystemExit):
        train(tmp_path / "parts", spec, monkeypatch)
    parts = train(tmp_path / "parts", spec, monkeypatch)
    assert result_of(parts).restarts == 1
    states = [CheckpointStore(run.train().checkpoints).load_latest() for run in (whole, parts)]
    first, second = (state.state["model"] for state in states if state is not None)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_step_in_parts_has_the_gradient_of_the_whole_batch() -> None:
    worker = Worker(sweep(REGRESSION), ClusterSpec(), CONFIGURATION, ALONE)
    worker.model.eval()  # without dropout, which would draw other numbers
    assert worker.parts == 2
    batch = next(worker.batches())
    loss = worker.forward_backward(*batch)
    gradients = [parameter.grad.clone() for parameter in worker.parameters if parameter.grad is not None]
    for parameter in worker.parameters:
        parameter.grad = None
    assert float(worker.forward_backward(*batch, whole=True)) == pytest.approx(float(loss))
    for parameter, expected in zip(worker.parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("workload", [REGRESSION, WORDS], ids=["several inputs", "words"])
def test_it_is_profiled_and_its_memory_estimated(workload: dict[str, Any]) -> None:
    spec = sweep(workload)
    measurement = measure(spec, ClusterSpec(), CONFIGURATION, ALONE)
    assert measurement.status == "ok"
    assert measurement.times is not None
    assert (measurement.times.forward_time_s or 0.0) > 0
    assert 16 in dict(measurement.smaller_computes)
    found = estimate_footprint(spec, ClusterSpec())
    assert found.method == "fake"
    assert found.parameter_bytes == 4 * measurement.parameters


def test_the_language_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(WORDS | {"samples": 1024, "optimizer": "adamw", "lr": 0.003, "epochs": 1})
    result = result_of(train(tmp_path / "run", spec, monkeypatch))
    assert result.test_loss is not None
    assert result.test_loss < 0.8 * math.log(128)
    assert result.test_accuracy is not None
    assert 0.1 < result.test_accuracy < 0.6


def test_a_loss_of_labels_keeps_their_accuracy() -> None:
    workload = build_workload(WorkloadSpec(model="squeezenet1_1", dataset="digits", loss=f"{OWN}:smoothed"))
    scores, labels = torch.randn(6, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    assert float(workload.criterion.loss(scores, labels)) == pytest.approx(
        float(cross_entropy(scores, labels, label_smoothing=0.1))
    )
    right, among_best = workload.criterion.hits(scores, labels).tolist()
    assert right == int((scores.argmax(1) == labels).sum())
    assert among_best >= right


def test_without_a_loss_it_is_that_of_torch() -> None:
    criterion = build_workload(WorkloadSpec(model="squeezenet1_1")).criterion
    assert criterion.loss is cross_entropy
    scores, labels = torch.randn(6, 10), torch.arange(6)
    assert float(criterion.losses(scores, labels).mean()) == pytest.approx(float(cross_entropy(scores, labels)))


SCORES = "def f(outputs, targets): return "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SCORES + "outputs.mean()", r"float32 tensor of shape \(\) for 2 sample.*expected a number for each.*\(2,\)"),
        (SCORES + "outputs", r"shape \(2, 10\)"),
        (SCORES + "targets", "int64 tensor"),
        (SCORES + "None", "returns None"),
        (SCORES + "outputs @ outputs", "cannot take .*mat1 and mat2"),
        (SCORES + "outputs['loss']", "cannot take"),
        ("def f(outputs): return 0", r"cannot be called with \(outputs, targets\)"),
        ("f = 3", "expected a function"),
    ],
)
@pytest.mark.parametrize("key", ["loss", "metric"])
def test_a_loss_or_metric_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str, key: str
) -> None:
    write_module(tmp_path, monkeypatch, body)
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={key: "mine:f"})
    with pytest.raises(InputError, match=said) as raised:
        build_workload(spec)
    assert raised.value.key == f"workload.{key}"
    assert "\n" not in str(raised.value)


LOSS = "\ndef loss(outputs, targets): return outputs.mean(1)\n"


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ("[torch.zeros(3)] * 2", r"has float32 tensor.*expected \(inputs, targets\)"),
        ("[(torch.zeros(3), None)] * 2", "expected .inputs, targets., each with"),
        ("[((), 1)] * 2", "expected .inputs, targets., each with"),
        ("[(torch.zeros(n), 1) for n in (3, 4)]", "cannot be put into one batch.*padded or cut"),
    ],
)
def test_samples_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: str, said: str) -> None:
    write_module(tmp_path, monkeypatch, LOSS + f"def f(spec): return {items}, {items}, 2")
    with pytest.raises(InputError, match=said) as raised:
        build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f", loss="mine:loss"))
    assert raised.value.key == "workload.dataset"


def test_images_of_several_sizes_are_told_without_a_loss_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "def f(spec): return good, [(torch.zeros(3, n, n), 1) for n in (8, 9)], 2")
    with pytest.raises(InputError, match="items 0 and 1 in the test set that cannot be put into one batch"):
        build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f"))


@pytest.mark.parametrize(
    ("workload", "study", "said"),
    [
        (REGRESSION, {}, "workload.metric: a study compares accuracies"),
        (WORDS, {"metric": "top5"}, 'study.metric: "top5" is of labels'),
        ({"loss": "smooth"}, {}, "'smooth' is not a function; expected .package.module:function. "),
        ({"metric": "tests.examples.own_loss:nothing"}, {}, "defines no 'nothing'"),
    ],
)
def test_sweeps_that_do_not_fit(workload: dict[str, Any], study: dict[str, Any], said: str) -> None:
    given = {"name": "x", "workload": workload, "study": {"methods": ["ags"], "batches": [64], **study}}
    with pytest.raises(ValueError, match=said):
        SweepSpec.model_validate(given)
