"""Curvature, and the critical batch of an epoch, in real trainings of one worker; and the small numbers they need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tula_hpc import curvature_probe
from tula_hpc import trainer as trainer_module
from tula_hpc.analysis.correlation import rank_correlation
from tula_hpc.checkpoint import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.curvature_probe import fixed_batch, probe_curvature
from tula_hpc.env import WorkerEnvironment
from tula_hpc.jobs import TrainJob
from tula_hpc.optim import CriticalBatch, LocalHessian, NoiseReading, measure_curvature
from tula_hpc.records import Configuration, Metrics, RunDirectory, read_metrics
from tula_hpc.records.metrics import SCALE_BINS_PER_OCTAVE, SCALE_OCTAVES
from tula_hpc.stopping import StopRequest
from tula_hpc.worker import Worker

ALONE = WorkerEnvironment(0, 1, 0, 0, "1", 0, ("here",), on_slurm=False)
PERCEPTRON, WITH_BATCHNORM = "tests.examples.own_workload:perceptron", "tests.examples.normed:normed"


def sweep(model: str = PERCEPTRON, **training: object) -> SweepSpec:
    workload = {"model": model, "dataset": "digits", "loader_workers": 0, "samples": 128, "epochs": 2}
    options = {"small_batch": 8, "log_interval_steps": 2, "update_interval_epochs": 0.25, "curvature_samples": 64}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": options | training})


def train(folder: Path, spec: SweepSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Metrics, dict[str, Tensor]]:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    job = TrainJob(spec, ClusterSpec(), Configuration(1, 1, 16), run.root)
    assert trainer_module.run_training(job, StopRequest()) == "finished"
    loaded = CheckpointStore(run.train().checkpoints).load_latest()
    assert loaded is not None
    return read_metrics(run.train().metrics_file), loaded.state["model"]


def test_a_training_measures_at_its_epochs_and_is_not_changed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, weights = train(
        tmp_path / "measured", sweep(WITH_BATCHNORM, curvature_epochs=[0, 2], curvature_samples=16), monkeypatch
    )
    plain, same = train(tmp_path / "plain", sweep(WITH_BATCHNORM), monkeypatch)
    assert [(row.epoch, row.step, row.samples_seen) for row in metrics.curvature] == [(0, 0, 0), (2, 16, 256)]
    assert all(row.eigenvalue and row.gradient_norm and row.samples == 16 for row in metrics.curvature)
    assert list(plain.curvature) == []
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_the_first_line_is_the_curvature_of_the_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, _ = train(tmp_path / "run", sweep(curvature_epochs=[0]), monkeypatch)
    worker = Worker(sweep(), ClusterSpec(), Configuration(1, 1, 32), ALONE)
    expected = probe_curvature(worker, 64)
    assert expected is not None
    assert metrics.curvature[0].eigenvalue == pytest.approx(expected.dominant.value)


def test_an_epochs_line_has_its_critical_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pairs that its steps logged, averaged before they are divided."""
    metrics, _ = train(tmp_path / "run", sweep(), monkeypatch)
    for epoch in metrics.epochs:
        rows = [row for row in metrics.steps if epoch.epoch - 1 < row.epoch <= epoch.epoch]
        terms = [(r.noise_gradient_square, r.noise_trace) for r in rows if r.noise_gradient_square is not None]
        square, trace = (sum(term or 0.0 for term in column) for column in zip(*terms, strict=True))
        assert epoch.critical_batch == (pytest.approx(trace / square) if square > 0 and trace > 0 else None)
    assert any(epoch.critical_batch for epoch in metrics.epochs)


def test_a_training_logs_the_scales_it_used_and_is_not_changed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, weights = train(tmp_path / "counted", sweep(scale_histogram=True), monkeypatch)
    plain, same = train(tmp_path / "plain", sweep(), monkeypatch)
    elements = sum(value.numel() for value in weights.values())
    assert [sum(row.scale_histogram or []) for row in metrics.steps] == [2 * elements] * len(metrics.steps)
    assert {row.scale_histogram for row in plain.steps} == {None}
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.mark.parametrize("gate", ["none", "smooth"])
def test_a_training_logs_the_mean_scale_that_it_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: str
) -> None:
    """Warm-up and gate are in it: it lies in the one bin of the histogram that the step filled."""
    options: dict[str, Any] = {"gate": gate, "granularity": "model", "reference": "free", "exclude_norms": False}
    options |= {"delta": 2.0, "scale_histogram": True, "log_interval_steps": 1}
    metrics, _ = train(tmp_path, sweep(**options), monkeypatch)
    applied = [row.applied_scale or 0.0 for row in metrics.steps]
    bins = [next(place for place, count in enumerate(row.scale_histogram or []) if count) for row in metrics.steps]
    centres = [(place - 1) / SCALE_BINS_PER_OCTAVE - SCALE_OCTAVES for place in bins]
    assert [math.log2(scale) for scale in applied] == pytest.approx(centres, abs=0.51 / SCALE_BINS_PER_OCTAVE)
    assert applied[0] == 1.0 != metrics.steps[0].scale_mean
    assert max(applied) > 1.5


def test_the_batch_is_the_same_whatever_is_trained_with() -> None:
    batches = []
    for local_batch, workers in ((16, 1), (32, 1), (8, 2)):
        place = Configuration(1, workers, local_batch)
        worker = Worker(sweep(), ClusterSpec(), place, ALONE)
        parts = []
        for rank in range(workers):
            worker.env = WorkerEnvironment(rank, workers, rank, 0, "1", 0, ("here",), on_slurm=False)
            parts.append(fixed_batch(worker, 64))
        batches.append([torch.cat(column) for column in zip(*parts, strict=True)])
    for inputs, targets in batches[1:]:
        assert torch.equal(inputs, batches[0][0])
        assert torch.equal(targets, batches[0][1])
    assert len(batches[0][1]) == 64


def test_activations_that_are_computed_again_give_the_same_curvature() -> None:
    model, batch = "tula_hpc.workloads.compact:compact_cnn", 16
    found = []
    for again in (False, True):
        spec = sweep(model)
        workload = spec.workload.model_copy(update={"activation_checkpointing": again})
        worker = Worker(
            spec.model_copy(update={"workload": workload}), ClusterSpec(), Configuration(1, 1, batch), ALONE
        )
        inputs, targets = fixed_batch(worker, 4)
        before = [buffer.clone() for buffer in worker.model.buffers()]
        hessian = LocalHessian(worker.model, worker.workload.criterion.loss, inputs, targets, worker.parameters)
        found.append(measure_curvature(hessian, max_iterations=3).dominant)
        assert all(torch.equal(old, new) for old, new in zip(before, worker.model.buffers(), strict=True))
    assert found[0] == pytest.approx(found[1])


def test_no_more_samples_than_there_are() -> None:
    worker = Worker(sweep(), ClusterSpec(), Configuration(1, 1, 32), ALONE)
    assert len(fixed_batch(worker, 1000)[1]) == 128


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("derivative for aten::x is not implemented")]
)
def test_what_cannot_be_measured_stops_no_training(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(curvature_probe, "LocalHessian", fails)
    metrics, _ = train(tmp_path / "run", sweep(curvature_epochs=[1]), monkeypatch)
    (row,) = metrics.curvature
    assert (row.epoch, row.eigenvalue, row.gradient_norm) == (1, None, None)


def test_an_error_of_the_model_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(sweep(), ClusterSpec(), Configuration(1, 1, 32), ALONE)
    worker.workload = worker.workload._replace(
        criterion=worker.workload.criterion._replace(loss=lambda out, _: out.reshape(7))
    )
    with pytest.raises(RuntimeError, match="shape"):
        probe_curvature(worker, 64)


# small helpers


def test_a_critical_batch_is_the_ratio_of_weighted_means() -> None:
    critical = CriticalBatch()
    for square, trace, weight in ((1.0, 30.0, 1), (math.nan, math.nan, 5), (3.0, 10.0, 3)):
        critical.add(NoiseReading(math.nan, square, trace), weight)
    assert critical.take() == pytest.approx(60 / 10)
    assert math.isnan(critical.take())


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=20, unique=True))
def test_ranks_ignore_all_but_the_order(values: list[float]) -> None:
    cubes, ranks = [value**3 for value in values], sorted(values)
    if len(set(cubes)) == len(values):
        assert rank_correlation(values, cubes) == pytest.approx(1)
        assert rank_correlation(values, [-cube for cube in cubes]) == pytest.approx(-1)
    by_rank = [float(ranks.index(value)) for value in values]
    assert rank_correlation(values, by_rank) == pytest.approx(1)


def test_rank_correlation_shares_equal_ranks_and_leaves_gaps_out() -> None:
    assert rank_correlation([1, 1, 2], [5, 5, 9]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, math.nan], [3, 2, 1, 9]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
    assert math.isnan(rank_correlation([1, 2], [1, 2]))
