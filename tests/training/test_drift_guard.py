"""Drift in a real training of one worker: events, files, and that it changes nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from tests.forked import ALONE
from tests.known import known
from tests.run_factory import candidate, measurement, plan, with_step_time, write_plan
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import (
    Configuration,
    Drift,
    Event,
    Measurement,
    RunDirectory,
    StepParts,
    StepTimes,
    append_record,
    read_metrics,
    write_atomically,
)
from tula_hpc.training import drift as drift_probe
from tula_hpc.training import loop as trainer_module
from tula_hpc.training.drift import extent_of, probe_parts
from tula_hpc.training.loop import run_training

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=32)


SMALL, WITH_BATCHNORM = "tests.examples.own_workload:perceptron", "tests.examples.normed:normed"


def sweep(model: str = SMALL, epochs: int = 3, **training: object) -> SweepSpec:
    """Return a sweep of eight steps per epoch, in which a drift episode is noticed after 22 steps."""
    workload = {"model": model, "dataset": "digits", "loader_workers": 0, "samples": 256, "epochs": epochs}
    options = {
        "preset": "paper",
        "small_batch": 8,
        "update_interval_epochs": 0.4,
        "drift_minutes": 1e-4,
        "log_interval_steps": 4,
    }
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": options | training})


def prepared(folder: Path, step_time_s: float | None, largest_s: float | None = None) -> RunDirectory:
    """Make a run directory whose plan predicts a step time for three batches; None: without a plan."""
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    if step_time_s is None:
        return run
    candidates = []
    for local_batch, step_s in ((16, step_time_s), (32, step_time_s), (64, largest_s or step_time_s)):
        there = candidate(CONFIGURATION._replace(local_batch=local_batch))
        changed = with_step_time(there, step_s)
        candidates.append(changed.model_copy(update={"train_time_s": step_s / local_batch, "interval_90": {}}))
        append_record(run.profile / "1.jsonl", profile_of(there.configuration, step_s / there.step_time_s))
    write_plan(run, plan(candidates, chosen=candidates[1], fallbacks=[candidates[0]]))
    return run


def profile_of(configuration: Configuration, factor: float) -> Measurement:
    row = measurement(configuration)
    return row.model_copy(
        update={"times": StepTimes(**{k: v and factor * v for k, v in known(row.times).model_dump().items()})}
    )


@pytest.fixture(autouse=True)
def as_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "join_job", lambda: ALONE)


def train(run: RunDirectory, spec: SweepSpec | None = None) -> list[Event]:
    job = TrainJob(spec or sweep(), ClusterSpec(), CONFIGURATION, run.root)
    with pytest.MonkeyPatch.context() as patch:
        # a probe computes for some of these blocks
        patch.setattr(drift_probe, "BLOCK_S", 0.02)
        assert run_training(job, StopRequest()) == "finished"
    return [event for event in run.events() if event.event in ("drifted", "recovered")]


def weights(run: RunDirectory) -> dict[str, Tensor]:
    loaded = known(CheckpointStore(run.train().checkpoints).load_latest())
    model: dict[str, Tensor] = loaded.state["model"]
    return model


@pytest.mark.processes
def test_a_wrong_prediction_is_reported_once_with_its_size_and_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # processor time, which other work does not prolong
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    run = prepared(tmp_path, step_time_s=1e-5)
    (event,) = train(run, sweep("tula_hpc.workloads.small_cnns:compact_cnn"))
    assert event.event == "drifted"
    assert event.data["ratio"] > 10
    assert event.data["measured_s"] == pytest.approx(event.data["ratio"] * 1e-5)
    assert event.data["part"] == "compute"
    assert event.data["parts"]["measured"]["compute_time_s"] > event.data["parts"]["expected"]["compute_time_s"]
    drift = Drift.model_validate_json(run.train().drift_file.read_bytes())
    assert (drift.configuration, drift.part) == (CONFIGURATION, "compute")


@pytest.mark.processes
def test_a_training_that_is_faster_than_predicted_says_so_too(tmp_path: Path) -> None:
    (event,) = train(prepared(tmp_path, step_time_s=50.0))
    assert event.data["ratio"] < 0.1


@pytest.mark.processes
def test_looking_into_a_drift_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    watched, alone = prepared(tmp_path / "watched", 1e-5), prepared(tmp_path / "alone", None)
    spec = sweep(WITH_BATCHNORM)
    assert len(train(watched, spec)) == 1
    assert train(alone, spec) == []
    states = weights(watched), weights(alone)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    losses = [[step.loss for step in read_metrics(run.train().metrics_file).steps] for run in (watched, alone)]
    assert losses[0] == losses[1]


@pytest.mark.processes
def test_without_a_plan_or_switched_off_nothing_is_watched(tmp_path: Path) -> None:
    assert train(prepared(tmp_path / "none", None)) == []
    assert train(prepared(tmp_path / "off", 1e-5), sweep(drift=False)) == []


@pytest.mark.processes
def test_an_episode_from_before_a_restart_is_not_reported_again_and_can_end(tmp_path: Path) -> None:
    still, over = prepared(tmp_path / "still", 1e-5), prepared(tmp_path / "over", 50.0)
    for run in (still, over):
        write_drift(run, "network", StepParts(allreduce_time_s=0.5))
    assert train(still) == []
    assert still.train().drift_file.exists()
    recovered, faster = train(over, sweep(epochs=5))
    assert (recovered.event, faster.event) == ("recovered", "drifted")


def write_drift(run: RunDirectory, part: str, measured: StepParts) -> None:
    expected = StepParts(data_time_s=0.0, compute_time_s=0.001, allreduce_time_s=0.001)
    known = {key: value for key, value in measured.model_dump().items() if value is not None}
    drift = Drift(
        **CONFIGURATION._asdict(),
        measured_s=1.0,
        predicted_s=0.001,
        part=part,
        measured=expected.model_copy(update=known),
        expected=expected,
    )
    write_atomically(run.train().drift_file, drift.model_dump_json())


def test_metrics_have_the_loaders_wait_and_the_noise_scale(tmp_path: Path) -> None:
    run = prepared(tmp_path, None)
    train(run)
    metrics = read_metrics(run.train().metrics_file)
    assert all(step.data_time_s is not None and 0 < step.data_time_s < step.step_time_s for step in metrics.steps)
    updates = [step for step in metrics.steps if step.noise_trace is not None]
    # an update every third step of 24, but none at first
    assert 5 <= len(updates) <= 8
    assert all(step.noise_gradient_square is not None for step in updates)
    assert any(step.noise_scale is not None for step in updates)
    assert any(epoch.noise_scale is not None for epoch in metrics.epochs)


def test_a_slow_loader_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(self: Worker, *place: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in original(self, *place):
            time.sleep(0.01)
            yield batch

    original = Worker.batches
    monkeypatch.setattr(Worker, "batches", slowly)
    (event,) = train(prepared(tmp_path, step_time_s=0.005))
    assert event.data["part"] == "loader"
    assert event.data["parts"]["measured"]["data_time_s"] > 0.01


def test_a_probe_leaves_weights_gradients_buffers_and_random_numbers_alone() -> None:
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    batch = next(worker.batches())
    worker.train_step(*batch)
    before = {name: value.clone() for name, value in worker.model.state_dict().items()}
    gradients = [p.grad.clone() for p in worker.parameters if p.grad is not None]
    state = torch.get_rng_state()
    probe = probe_parts(worker, *batch)
    assert probe.parts.compute_time_s is not None
    assert probe.parts.compute_time_s > 0
    assert (probe.parts.allreduce_time_s, probe.slowest_node) == (0.0, None)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in worker.model.state_dict().items())
    assert all(
        torch.equal(old, p.grad) for old, p in zip(gradients, worker.parameters, strict=True) if p.grad is not None
    )


def test_a_probe_without_memory_says_that_compute_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tula_hpc.ddp.worker.local_gradient", fails)
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    assert probe_parts(worker, *next(worker.batches())).parts.compute_time_s is None


def test_a_shared_processor_counts_as_slow_and_a_single_pause_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = cycle([0.005, 0.005, 0.005, 0.005, 0.045])
    pretend(monkeypatch, turns)
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    batch = next(worker.batches())
    assert probe_parts(worker, *batch).parts.compute_time_s == pytest.approx(0.013, rel=0.1)

    pause = chain(repeat(0.005, 30), [5.0], repeat(0.005))
    pretend(monkeypatch, pause)
    assert probe_parts(worker, *batch).parts.compute_time_s == pytest.approx(0.005)


def pretend(monkeypatch: pytest.MonkeyPatch, passes: Iterator[float]) -> None:
    """Let passes take these times, one after another."""
    monkeypatch.setattr(drift_probe, "agreed_s", lambda *_: next(passes))
    monkeypatch.setattr(drift_probe, "round_s", lambda _, __, count: fmean(next(passes) for _ in range(count)))


def test_slow_steps_are_probed_for_some_seconds_only() -> None:
    for pass_s in (1e-6, 0.013, 0.19, 0.21, 1.4, 6.0):
        blocks, passes = extent_of(pass_s)
        assert blocks >= 1
        assert blocks * passes * pass_s <= max(drift_probe.SECONDS, pass_s)
    assert extent_of(60.0) == (1, 1)
