"""Methods with two workers over gloo: post-local SGD, and norms that must be those of the all-reduced gradient."""

from __future__ import annotations

import contextlib
import shutil
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forked import ALONE, give_secret, start_workers
from tests.known import known
from tests.same_state import same_state
from tula_hpc.checkpoint.per_worker_states import LocalStates
from tula_hpc.checkpoint.store import CheckpointStore, LoadedCheckpoint
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp import agreement as stopping
from tula_hpc.ddp.process_group import leave_group, process_group
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.errors import StageError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.records import Configuration, RunDirectory, read_metrics
from tula_hpc.training import loop as trainer
from tula_hpc.training.loop import run_training

WORKERS, BATCH, STEPS = 2, 16, 3
# the first epoch is synchronous; then models are averaged after every second step
STEPS_PER_EPOCH, EPOCHS = 8, 3
# at a local step, when the workers' models differ
STOPPED_AFTER = STEPS_PER_EPOCH + 1
OPTIMIZERS = {"lbt": "sgd", "lars": "sgd", "lamb": "adamw"}
# a model with BatchNorm
COMPACT = "tula_hpc.workloads.small_cnns:compact_cnn"
# without BatchNorm, so two workers can equal one
PERCEPTRON = "tests.examples.own_workload:perceptron"


def sweep(method: str, model: str = COMPACT, zero_stage: int = 0) -> SweepSpec:
    workload = {
        "model": model,
        "dataset": "digits",
        "loader_workers": 0,
        "samples": STEPS_PER_EPOCH * BATCH * WORKERS,
        "epochs": EPOCHS,
        "optimizer": OPTIMIZERS.get(method, "sgd"),
        "zero_stage": zero_stage,
    }
    # saves come only at the ends of epochs
    training = {"method": method, "checkpoint_minutes": 5.0}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})


def new_worker(spec: SweepSpec, env: WorkerEnvironment = ALONE) -> Worker:
    configuration = Configuration(env.world_size, 1, BATCH * WORKERS // env.world_size)
    return Worker(spec, ClusterSpec(), configuration, env)


def weights(worker: Worker) -> Tensor:
    return torch.cat([p.detach().flatten() for p in worker.model.parameters()])


def trained(worker: Worker) -> Worker:
    for batch in islice(worker.batches(), STEPS):
        worker.train_step(*batch)
    return worker


# the two workers


def work(rank: int, folder: Path) -> None:
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False, submission=str(folder))
    # never undone, because this process ends soon
    pytest.MonkeyPatch().setattr(trainer, "join_job", lambda: env)
    assert train(folder / "whole") == "finished"
    train(folder / "stopped", stop_after=STOPPED_AFTER)
    # the trainer leaves the group to the end of the process
    leave_group()
    if rank == 0:
        shutil.copytree(folder / "stopped", folder / "as it stopped")
    assert train(folder / "stopped") == "finished"
    train(folder / "stopped at an epoch's end", stop_after=2 * STEPS_PER_EPOCH)
    leave_group()
    assert train(folder / "stopped at an epoch's end") == "finished"
    with process_group(ClusterSpec(), env):
        seen = {"polo": local_steps(env), **methods(env)}
    torch.save(seen, folder / f"{rank}.pt")


def train(root: Path, stop_after: int = 0) -> str:
    stop, step = StopRequest(), Worker.train_step
    steps = 0

    def counted(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == stop_after:
            stop.received = signal.SIGTERM
        return step(self, inputs, targets)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(Worker, "train_step", counted)
        # check for a stop at every step
        patch.setattr(stopping, "FIRST_CHECKS", EPOCHS * STEPS_PER_EPOCH)
        return run_training(TrainJob(sweep("polo"), ClusterSpec(), Configuration(WORKERS, 1, BATCH), root), stop)
    return "stopped"


def local_steps(env: WorkerEnvironment) -> dict[str, Tensor]:
    """Return gradients, weights and running means of a synchronous step, a local one, and one with an average."""
    worker = new_worker(sweep("polo"), env)
    seen = {}
    spans = {"synchronous": (0.875, 1.0), "local": (1.0, 1.125), "averaged": (1.125, 1.25)}
    for (name, span), batch in zip(spans.items(), worker.batches(), strict=False):
        worker.set_position(*span)
        worker.train_step(*batch)
        seen[f"{name} weights"] = weights(worker)
        seen[f"{name} means"] = torch.cat([b.flatten() for n, b in worker.model.named_buffers() if "mean" in n])
        # there, the gradient is dropped before the average
        if name != "averaged":
            seen[f"{name} gradient"] = torch.cat([p.grad.flatten() for p in worker.parameters if p.grad is not None])
    return seen


def methods(env: WorkerEnvironment) -> dict[str, Any]:
    plain = {name: weights(trained(new_worker(sweep(name, PERCEPTRON), env))) for name in OPTIMIZERS}
    sharded = {f"{name} sharded": weights(trained(new_worker(sweep(name, PERCEPTRON, 1), env))) for name in OPTIMIZERS}
    return plain | sharded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both workers have trained; see `work`."""
    folder = tmp_path_factory.mktemp("methods")
    for name in ("whole", "stopped", "stopped at an epoch's end"):
        RunDirectory(folder / name).create().train().root.mkdir()
    give_secret(folder)
    start_workers(WORKERS, work, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what each worker recorded."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


def checkpoints(folder: Path, name: str) -> Path:
    return RunDirectory(folder / name).train().checkpoints


def latest(folder: Path) -> LoadedCheckpoint:
    return known(CheckpointStore(folder).load_latest())


# norms


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_workers_train_as_one_with_the_whole_batch(ranks: list[dict[str, Any]], name: str) -> None:
    """Layer-wise rates see the norm of the all-reduced gradient, not of a worker's own."""
    spec = sweep(name, PERCEPTRON)
    start, alone = new_worker(spec), trained(new_worker(spec))
    sizes = [p.numel() for p in start.parameters]
    expected = torch.split(weights(alone) - weights(start), sizes)
    for seen in ranks:
        for move, wanted in zip(torch.split(seen[name] - weights(start), sizes), expected, strict=True):
            # the layer-wise moves are small against the weights
            assert (move - wanted).norm() < 0.02 * wanted.norm()
    assert torch.equal(ranks[0][name], ranks[1][name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_states_change_nothing(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        torch.testing.assert_close(seen[f"{name} sharded"], seen[name], rtol=1e-6, atol=1e-7)


# post-local SGD


def test_workers_step_together_then_apart_and_meet_in_the_average(ranks: list[dict[str, Any]]) -> None:
    first, second = (seen["polo"] for seen in ranks)
    for what in ("weights", "gradient"):
        assert torch.equal(first[f"synchronous {what}"], second[f"synchronous {what}"])
        assert not torch.equal(first[f"local {what}"], second[f"local {what}"])
    for what in ("weights", "means"):
        assert not torch.equal(first[f"local {what}"], second[f"local {what}"])
        assert torch.equal(first[f"averaged {what}"], second[f"averaged {what}"])


def test_a_run_that_stopped_between_two_averages_goes_on_bit_for_bit(folder: Path) -> None:
    for part in ("", "worker-0001"):
        whole, resumed = (latest(checkpoints(folder, name) / part).state for name in ("whole", "stopped"))
        for what in ("model", "optimizer", "scaler"):
            assert same_state(whole[what], resumed[what])
        assert part or same_state(whole["observer"], resumed["observer"])


def test_gradients_are_observed_though_nothing_scales_them(folder: Path) -> None:
    """Only in the synchronous epoch, where they are gradients of the whole batch; later each worker uses its own."""
    whole, resumed = (read_metrics(RunDirectory(folder / name).train().metrics_file) for name in ("whole", "stopped"))
    again = {row.step: row for row in resumed.steps}
    assert whole.steps[-1].step == EPOCHS * STEPS_PER_EPOCH
    for row in whole.steps:
        same_row = again[row.step]
        assert (row.sensitivity, row.gradient_norm) == (same_row.sensitivity, same_row.gradient_norm)
        assert (row.gradient_norm is not None) == (row.epoch <= 1.0)
        assert (row.scaled, row.scale_mean, row.applied_scale) == (None, None, None)
        assert (row.noise_trace is not None) == (row.epoch <= 1.0)
    assert not whole.scaled_nothing


def test_a_run_that_stopped_after_an_epochs_last_step_still_saves_every_workers_state(folder: Path) -> None:
    """The next start ends the epoch without taking a step, and saves then."""
    whole, resumed = (checkpoints(folder, name) for name in ("whole", "stopped at an epoch's end"))
    for part in ("", "worker-0001"):
        ended = [CheckpointStore.load(CheckpointStore(kept / part).paths()[-2]) for kept in (whole, resumed)]
        assert same_state(ended[0]["optimizer"], ended[1]["optimizer"])
        assert [state.get("workers") for state in ended] == [None if part else WORKERS] * 2


def test_every_worker_saves_its_own_state_and_evaluates_one_model(folder: Path) -> None:
    """At an epoch's end all workers have the same model, but each has its own momenta."""
    for name, one_model in (("as it stopped", False), ("whole", True)):
        mine, others = (latest(checkpoints(folder, name) / part).state for part in ("", "worker-0001"))
        assert mine["workers"] == WORKERS
        assert same_state(mine["model"], others["model"]) == one_model
        assert not same_state(mine["optimizer"], others["optimizer"])


def test_another_number_of_workers_goes_on_from_the_mean(folder: Path) -> None:
    states = LocalStates(checkpoints(folder, "as it stopped"), new_worker(sweep("polo")))
    parts = [latest(checkpoints(folder, "as it stopped") / part).state for part in ("", "worker-0001")]
    loaded = latest(states.folder)
    # states stay on the host, where the mean is taken
    states.worker.device = torch.device("meta")
    mean = states.load(loaded)
    states.worker.device = torch.device("cpu")
    for name, tensor in mean["model"].items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (parts[0]["model"][name] + parts[1]["model"][name]) / 2)
    momenta = [state["optimizer"]["state"][0]["momentum_buffer"] for state in (mean, *parts)]
    torch.testing.assert_close(momenta[0], (momenta[1] + momenta[2]) / 2)
    states.worker.load_own_state(mean)
    trained(states.worker)
    assert "2 workers" in states.note(loaded)


def test_a_damaged_part_is_named_with_what_to_do(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints"
    shutil.copytree(checkpoints(folder, "as it stopped"), copy)
    loaded = latest(copy)
    (copy / "worker-0001" / loaded.path.name).unlink()
    with pytest.raises(StageError, match=r"worker-0001.*delete .* to go on from the checkpoint before it"):
        LocalStates(copy, new_worker(sweep("polo"))).load(loaded)
