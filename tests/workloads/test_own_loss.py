"""Workloads with an own loss: language models, regressions, several inputs; and mistakes in them."""

from __future__ import annotations

import json
import math
import signal
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined] # it is documented there
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from tests.forked import ALONE, start_workers
from tests.known import known
from tests.run_factory import make_run, opening_text
from tests.study_factory import make_study
from tests.workloads.test_workloads_own import write_module
from tula_hpc.analysis.figures.all import FIGURES
from tula_hpc.analysis.figures.drawing import Drawing
from tula_hpc.analysis.report.tables import summary_rows, summary_table
from tula_hpc.analysis.run_contents import RunContents, read_run
from tula_hpc.analysis.study_results import read_study
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec, WorkloadSpec, load_sweep
from tula_hpc.ddp.process_group import process_group
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import InputError
from tula_hpc.failure_kinds import Failure
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.optim import TulaOptimizer
from tula_hpc.process_memory import out_of_memory
from tula_hpc.profiling.measure import measure
from tula_hpc.profiling.probes import probe_noise
from tula_hpc.records import Configuration, RunDirectory, TrainResult, read_metrics
from tula_hpc.status.__main__ import status_of
from tula_hpc.status.text import status_text
from tula_hpc.training import loop as trainer_module
from tula_hpc.training.loop import Trainer, run_training
from tula_hpc.user_code import collate
from tula_hpc.workloads.footprint import estimate_footprint
from tula_hpc.workloads.workload import build_workload

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=32)
OWN, LANGUAGE = "tests.examples.own_loss", "tula_hpc.workloads.language_model"
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
    search = {"min_batch": 16, "max_batch": 32, "min_steps": 5, "max_steps": 5, "warmup_steps": 1}
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


def trained_worker(run: RunDirectory, spec: SweepSpec) -> Worker:
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    loaded = known(CheckpointStore(run.train().checkpoints).load_latest())
    worker.load_own_state(loaded.state)
    return worker


def drawn(contents: RunContents, name: str) -> Drawing:
    figure = FIGURES[name](contents)
    assert isinstance(figure, Drawing)
    return figure


def test_a_regression_is_trained_and_judged_by_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(REGRESSION)
    run = train(tmp_path / "run", spec, monkeypatch)
    result, epochs = result_of(run), read_metrics(run.train().metrics_file).epochs
    assert (result.test_accuracy, result.test_top5_accuracy) == (None, None)
    first = epochs[0].train_loss
    assert result.test_loss is not None
    assert first is not None
    assert result.test_loss == epochs[-1].test_loss
    assert result.test_loss < 0.8 * first
    assert any(event.detail.startswith("test loss") for event in run.events())
    worker, every = trained_worker(run, spec), [*range(65)]
    inputs, targets = default_collate([worker.workload.test[index] for index in every])
    with worker.evaluating():
        losses = worker.workload.criterion.losses(worker.model(inputs), targets)
    assert result.test_loss == pytest.approx(float(losses.mean()))
    figure = drawn(read_run(run), "training")
    assert figure.title.startswith("Test loss")
    assert len(figure.figure.axes) == 1


def test_a_metric_is_reported_as_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(REGRESSION | {"metric": f"{OWN}:near", "epochs": 1})
    run = train(tmp_path / "run", spec, monkeypatch)
    result, worker = result_of(run), trained_worker(run, spec)
    inputs, (_, number) = default_collate([worker.workload.test[index] for index in range(65)])
    with worker.evaluating():
        found = worker.model(inputs)["number"]
    assert result.test_accuracy == pytest.approx(float(((found - number).abs() < 0.5).double().mean()))
    assert result.test_top5_accuracy is None


@pytest.mark.processes
def test_a_stopped_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(REGRESSION)
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
    # without dropout, which would draw other numbers
    worker.model.eval()
    assert worker.parts == 2
    batch = next(worker.batches())
    loss = worker.forward_backward(*batch)
    gradients = [parameter.grad.clone() for parameter in worker.parameters if parameter.grad is not None]
    for parameter in worker.parameters:
        parameter.grad = None
    assert float(worker.forward_backward(*batch, whole=True)) == pytest.approx(float(loss))
    for parameter, expected in zip(worker.parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.processes
@pytest.mark.parametrize("workload", [REGRESSION, WORDS], ids=["several inputs", "words"])
def test_a_regression_is_profiled_and_its_memory_estimated(workload: dict[str, Any]) -> None:
    spec = sweep(workload)
    measurement = measure(spec, ClusterSpec(), CONFIGURATION, ALONE)
    assert measurement.status == "ok"
    assert (known(measurement.times).forward_time_s or 0.0) > 0
    assert 16 in dict(measurement.smaller_computes)
    found = estimate_footprint(spec, ClusterSpec())
    assert found.method == "fake"
    assert found.parameter_bytes == 4 * measurement.parameters


@pytest.mark.processes
def test_the_language_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep(WORDS | {"samples": 1024, "optimizer": "adamw", "lr": 0.003, "epochs": 1})
    result = result_of(train(tmp_path / "run", spec, monkeypatch))
    assert result.test_loss is not None
    assert result.test_loss < 0.8 * math.log(128)
    assert result.test_accuracy is not None
    assert 0.1 < result.test_accuracy < 0.6


def test_the_language_model_does_not_see_what_it_predicts() -> None:
    model = build_workload(WorkloadSpec.model_validate(WORDS)).model
    text = torch.arange(32).view(2, 16)
    changed = text.clone()
    changed[:, 9] = 99
    for mode in (True, False):
        scores, others = model.train(mode)(text), model(changed)
        torch.testing.assert_close(scores[:, :9], others[:, :9])
        assert not torch.allclose(scores[:, 9:], others[:, 9:])


def test_half_a_precision_counts_and_adds_up_in_full() -> None:
    """With 8 or 11 bits, a half can neither count 65 × 17 samples nor hold the sum of their losses."""
    worker = Worker(sweep(REGRESSION | {"precision": "bf16"}), ClusterSpec(), CONFIGURATION, ALONE)
    means: list[Tensor] = []

    def half(outputs: dict[str, Tensor], _: object) -> Tensor:
        means.append(outputs["number"].square().mean())
        return means[-1]

    worker.workload = worker.workload._replace(criterion=worker.workload.criterion._replace(loss=half))
    inputs, targets = default_collate([worker.workload.test[index % 65] for index in range(65 * 17)])
    with worker.evaluating():
        loss, count, *_ = worker.score(inputs, targets).tolist()
    assert means[0].dtype == torch.bfloat16
    assert (loss, count) == (float(means[0]) * 65 * 17, 65 * 17)


def work(rank: int, folder: Path) -> None:
    """Run one of two workers: steps with small gradients from both, and a probe of the gradient's noise."""
    torch.set_num_threads(1)
    env = WorkerEnvironment(rank, 2, rank, 0, "1", 0, ("here",), on_slurm=False)
    half = Configuration(nodes=1, workers_per_node=2, local_batch=16)
    spec = sweep(REGRESSION)
    with process_group(ClusterSpec(workers_per_node=2), env, FileStore(str(folder / "store"), 2)):
        torch.save(stepped(Worker(spec, ClusterSpec(workers_per_node=2), half, env)), folder / f"{rank}.pt")


def stepped(worker: Worker) -> dict[str, Any]:
    """Return the state of a worker after some steps."""
    # without dropout
    worker.model.eval()
    batches = worker.batches()
    for _ in range(3):
        worker.train_step(*next(batches))
    assert isinstance(worker.optimizer, TulaOptimizer)
    noise = probe_noise(worker, batches)
    state = {**worker.model.state_dict(), "noise": torch.tensor(noise.terms)}
    return {"state": state, "scale": worker.optimizer.statistics().scale_mean}


@pytest.mark.processes
def test_two_workers_step_alike(tmp_path: Path) -> None:
    start_workers(2, work, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert first["scale"] == second["scale"] > 1.0


def test_a_loss_of_labels_keeps_their_accuracy() -> None:
    workload = build_workload(WorkloadSpec(model="squeezenet1_1", dataset="digits", loss=f"{OWN}:smoothed"))
    scores, labels = torch.randn(6, 10), torch.tensor([0, 1, 2, 3, 4, 5])
    assert float(workload.criterion.loss(scores, labels)) == pytest.approx(
        float(cross_entropy(scores, labels, label_smoothing=0.1))
    )
    right, among_best = workload.criterion.hits(scores, labels).tolist()
    assert right == int((scores.argmax(1) == labels).sum())
    assert among_best >= right
    # nothing is known about a sample whose scores are NaN
    scores[:, 0] = torch.nan
    assert workload.criterion.hits(scores, labels).tolist() == [0, 0]


def test_without_a_loss_it_is_that_of_torch() -> None:
    criterion = build_workload(WorkloadSpec(model="squeezenet1_1")).criterion
    assert criterion.loss is cross_entropy
    scores, labels = torch.randn(6, 10), torch.arange(6)
    assert float(criterion.losses(scores, labels).mean()) == pytest.approx(float(cross_entropy(scores, labels)))


SCORES = "def f(outputs, targets): return "


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (SCORES + "outputs.mean()", r"float32 tensor of shape \(\) for 2 sample.*expected .*\(2,\)"),
        (SCORES + "outputs", r"shape \(2, 10\)"),
        (SCORES + "1 / 0", r"cannot take .*: ZeroDivisionError: division by zero \(mine.py:7\)"),
        ("def f(outputs, targets): assert False", r"cannot take .*: AssertionError \(mine.py:7\)"),
        (SCORES + "None", "returns None"),
        (SCORES + "outputs @ outputs", "cannot take .*mat1 and mat2"),
        (SCORES + "outputs['loss']", "cannot take"),
        ("def f(outputs): return 0", r"cannot be called with \(outputs, targets\)"),
        ("f = 3", "expected a function"),
    ],
)
@pytest.mark.parametrize("key", ["loss", "metric"])
def test_a_loss_or_metric_that_is_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str, key: str
) -> None:
    write_module(tmp_path, monkeypatch, body)
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={key: "mine:f"})
    with pytest.raises(InputError, match=expected) as raised:
        build_workload(spec)
    assert raised.value.key == f"workload.{key}"
    assert "\n" not in str(raised.value)
    # only for losses of torch
    is_mean_of_losses = key == "loss" and "outputs.mean()" in body
    assert ('reduction="none"' in str(raised.value)) == is_mean_of_losses


LOSS = "\ndef loss(outputs, targets): return outputs.mean(1)\n"


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("[torch.zeros(3)] * 2", r"has float32 tensor.*expected \(inputs, targets\)"),
        ("[(torch.zeros(3), None)] * 2", "expected .inputs, targets., each made of tensors"),
        ("[({'x': torch.zeros(3), 'name': 'a'}, 1)] * 2", "expected .inputs, targets., each made of tensors"),
        ("[((), 1)] * 2", "expected .inputs, targets., each made of tensors"),
        ("[(torch.zeros(n), 1) for n in (3, 4)]", r"\(3,\).*\(4,\).*cannot be put into one batch.*padded or cut"),
    ],
)
def test_samples_that_are_none_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: str, expected: str
) -> None:
    write_module(tmp_path, monkeypatch, LOSS + f"def f(spec): return {items}, {items}, 2")
    with pytest.raises(InputError, match=expected) as raised:
        build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f", loss="mine:loss"))
    assert raised.value.key == "workload.dataset"


def test_lack_of_memory_is_no_mistake_of_the_users() -> None:
    """Lack of memory has its own type of error and its own remedies."""
    huge = torch.zeros(1).expand(2**46)
    with pytest.raises(RuntimeError) as raised:
        collate([(huge, 1), (huge, 1)])
    assert out_of_memory(raised.value) is Failure.HOST_OOM
    with pytest.raises(InputError, match=r"workload.dataset: has samples that cannot be put into one batch: Runtime"):
        collate([(torch.zeros(3), 1), (torch.zeros(4), 1)])


def test_images_of_several_sizes_are_reported_without_a_loss_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "def f(spec): return good, [(torch.zeros(3, n, n), 1) for n in (8, 9)], 2")
    with pytest.raises(InputError, match=r"items 0, .* and 1, .* in the test set that cannot be put into one batch"):
        build_workload(WorkloadSpec(model="squeezenet1_1", dataset="mine:f"))


def test_a_loss_without_a_gradient_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, SCORES + "(outputs.argmax(1) == targets).float()")
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={"loss": "mine:f"})
    with pytest.raises(InputError, match=r"workload.loss: mine:f gives a loss without a gradient; compute it from"):
        build_workload(spec)


@pytest.mark.parametrize("share", ["100.0", "-0.1", "float('nan')"])
def test_a_metric_that_is_no_share_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    write_module(tmp_path, monkeypatch, SCORES + f"torch.full((len(targets),), {share})")
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={"metric": "mine:f"})
    with pytest.raises(
        InputError, match=r"workload.metric: mine:f gives \S+ for a sample; expected shares from 0 to 1"
    ):
        build_workload(spec)


def test_a_metric_may_be_whether_samples_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, SCORES + "outputs.argmax(1) == targets")
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={"metric": "mine:f"})
    right, best = build_workload(spec).criterion.hits(torch.eye(10)[:4], torch.tensor([0, 1, 5, 3])).tolist()
    assert right == 3
    assert math.isnan(best)


@pytest.mark.parametrize(
    ("key", "body"),
    [
        ("model", "def f(classes, image_size): return {}['nothing']"),
        ("dataset", "def f(spec): return open('/nowhere')"),
        (
            "dataset",
            "class Bad(list):\n  def __getitem__(self, i): return 1 / 0\ndef f(spec): return Bad([1]), good, 2",
        ),
    ],
)
def test_errors_of_own_functions_are_reported_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, body: str
) -> None:
    write_module(tmp_path, monkeypatch, body)
    spec = WorkloadSpec(model="squeezenet1_1", dataset="digits").model_copy(update={key: "mine:f"})
    with pytest.raises(InputError, match=rf"workload.{key}: mine:f failed: \w+Error: .* \(mine.py:\d+\)"):
        build_workload(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_model_that_asks_for_a_gpu_by_itself_is_told_to_leave_that_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "import torch\ndef f(classes, image_size): return torch.nn.Linear(2, 2).cuda()")
    spec = WorkloadSpec(model="mine:f", dataset="digits")
    with pytest.raises(InputError, match=r"mine:f failed: leave out .cuda\(\) .*RuntimeError: .* \(mine.py:\d+\)"):
        build_workload(spec)


def test_modes_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
class Half(nn.Sequential):
    def __init__(self, *parts):
        super().__init__(*parts)
        self[1].eval()
f = lambda c, s: Half(nn.Flatten(), nn.BatchNorm1d(3 * s * s), nn.Linear(3 * s * s, c))
"""
    write_module(tmp_path, monkeypatch, body)
    spec = WorkloadSpec(dataset="digits").model_copy(update={"model": "mine:f"})
    model = build_workload(spec).model
    assert [module.training for module in model.modules()] == [True, True, False, True]


def unused(rank: int, folder: Path) -> None:
    """Run one of two workers with a model of which the loss leaves something out."""
    torch.set_num_threads(1)
    env = WorkerEnvironment(rank, 2, rank, 0, "1", 0, ("here",), on_slurm=False)
    spec = sweep(REGRESSION | {"model": f"{OWN}:with_unused"})
    with process_group(ClusterSpec(workers_per_node=2), env, FileStore(str(folder / "store"), 2)):
        worker = Worker(spec, ClusterSpec(workers_per_node=2), Configuration(1, 2, 16), env)
        with pytest.raises(InputError, match=r"workload.model: the loss gives no gradient to spare.weight, spare.bias"):
            worker.train_step(*next(worker.batches()))
        del worker


@pytest.mark.processes
def test_parameters_that_several_workers_would_wait_for_are_named(tmp_path: Path) -> None:
    start_workers(2, unused, tmp_path)


def test_a_layout_of_images_is_refused_for_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "f = lambda c, s: nn.Conv3d(1, 1, 3)")
    spec = WorkloadSpec(dataset="digits", channels_last=True).model_copy(update={"model": "mine:f"})
    with pytest.raises(InputError, match=r"workload.channels_last: .*5 dimensions"):
        build_workload(spec)


LENGTHS = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(4, 4, batch_first=True)
    def forward(self, inputs):
        lengths = inputs["length"].cpu()
        packed = nn.utils.rnn.pack_padded_sequence(inputs["x"], lengths, batch_first=True, enforce_sorted=False)
        return self.cells(packed)[1][0]
def model(classes, image_size): return Recurrent()
def loss(outputs, targets): return outputs.square().mean(1) * targets
def f(spec):
    data = [({"x": torch.ones(5, 4), "length": 3}, 1.0)] * 8
    return data, data, 2
"""


def test_memory_is_estimated_where_zeros_are_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, LENGTHS)
    spec = sweep({"model": "mine:model", "dataset": "mine:f", "loss": "mine:loss"})
    found = estimate_footprint(spec, ClusterSpec())
    assert found.method == "real"
    assert found.peaks


def test_the_kind_of_a_dict_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{OWN}.KIND", UserDict)
    worker = Worker(sweep(REGRESSION), ClusterSpec(), CONFIGURATION, ALONE)
    inputs, targets = next(worker.batches())
    assert type(inputs) is UserDict
    assert math.isfinite(float(worker.forward_backward(inputs, targets)))


def test_a_model_may_change_its_input_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed training discards one pass, whose input must not be used again."""
    body = "class Model(nn.Sequential):\n  def forward(self, x):\n    x.sub_(0.5)\n    return super().forward(x)\n"
    write_module(tmp_path, monkeypatch, body + "f = lambda c, s: Model(nn.Flatten(), nn.Linear(s * s * 3, c))")
    run = train(tmp_path / "run", sweep({"model": "mine:f", "samples": 64, "epochs": 1}), monkeypatch)
    assert result_of(run).epochs == 1


@pytest.mark.parametrize(
    ("workload", "study", "expected"),
    [
        (REGRESSION, {}, "workload.metric: a study compares accuracies"),
        (WORDS, {"metric": "top5"}, 'study.metric: "top5" cannot be computed'),
        ({"loss": "smooth"}, {}, "'smooth' is not a function; expected .package.module:function. "),
        ({"metric": "tests.examples.own_loss:nothing"}, {}, "defines no 'nothing'"),
    ],
)
def test_sweeps_that_do_not_fit_are_refused(workload: dict[str, Any], study: dict[str, Any], expected: str) -> None:
    given = {"name": "x", "workload": workload, "study": {"methods": ["ags"], "batches": [64], **study}}
    with pytest.raises(ValueError, match=expected):
        SweepSpec.model_validate(given)


def test_a_variant_that_has_no_accuracy_is_reported_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(f"""
name = "x"
[study]
methods = ["lbt"]
batches = [64]
metric = "top5"
[study.variants.own]
workload.metric = "{OWN}:near"
""")
    with pytest.raises(InputError, match=r'study.toml: study.variants.own: study.metric: "top5" cannot be computed'):
        load_sweep(path)


@pytest.fixture(scope="module")
def known_by_loss(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run whose training has no accuracy, and a loss that may be below zero, as that of a density."""
    run = make_run(tmp_path_factory.mktemp("loss") / "run")
    result = result_of(run).model_copy(update=dict.fromkeys(ACCURACIES) | {"test_loss": -3.25})
    run.train().result_file.write_text(result.model_dump_json())
    lines = [json.loads(line) for line in run.train().metrics_file.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "epoch":
            line.update(dict.fromkeys(ACCURACIES), test_loss=line["test_loss"] - 5.0)
    run.train().metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


ACCURACIES = ("test_accuracy", "test_top5_accuracy")


def test_the_report_has_the_loss_where_there_is_no_accuracy(known_by_loss: RunDirectory) -> None:
    contents = read_run(known_by_loss)
    made, measured = known_by_loss.read_plan(), known_by_loss.measurements().records
    table = summary_table(summary_rows(made, measured, contents.trainings[0]))
    assert (table.columns[-1], table.rows[0][-1], table.rows[1][-1]) == ("test loss", "-3.25", "–")
    assert "the model reached test loss -3.25." in opening_text(contents)
    drawings = {name: drawn(contents, name) for name in ("training", "variability")}
    last = known(contents.trainings[0].metrics.epochs[-1].test_loss)
    for drawing in drawings.values():
        axes = drawing.figure.axes[-1]
        assert axes.get_ylim()[0] < last < axes.get_ylim()[1]
        assert "loss" in axes.get_ylabel()
    assert "accuracy" not in drawings["variability"].title
    assert "test loss -3.25 after epoch" in status_text(status_of(known_by_loss.root))


def test_a_study_says_which_of_its_trainings_had_no_accuracy(tmp_path: Path) -> None:
    run = make_study(tmp_path / "study")
    contents = read_study(run)
    cell = next(outcome.cell for outcome in contents.outcomes if outcome.status == "finished")
    file = run.train(cell.label).result_file
    file.write_text(json.dumps(json.loads(file.read_text()) | dict.fromkeys(ACCURACIES)))
    (outcome,) = (outcome for outcome in read_study(run).outcomes if outcome.cell == cell)
    assert (outcome.status, outcome.test) == ("failed", None)
    assert "no accuracy" in outcome.why
