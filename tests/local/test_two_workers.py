"""The drift watch and its probes with two workers over gloo: both workers do the same collectives."""

from __future__ import annotations

import gc
import json
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.examples.exchanging import Centred
from tests.forked import give_secret, start_workers
from tests.known import known
from tests.run_factory import candidate, plan, with_step_time, write_plan
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp import worker as worker_module
from tula_hpc.ddp.process_group import process_group
from tula_hpc.ddp.rendezvous import LOOPBACK, candidate_ports
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.gradients.reference_gradient import local_gradient
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.profiling import probes as noise_probe
from tula_hpc.profiling.measure import measure
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.training import drift as drift_probe
from tula_hpc.training import loop as trainer
from tula_hpc.training.loop import run_training

WORKERS = 2
CONFIGURATION = Configuration(nodes=WORKERS, workers_per_node=1, local_batch=16)
RUNS = ("watched", "unwatched")


def sweep(drift: bool = True, model: str = "tests.examples.own_workload:perceptron") -> SweepSpec:
    workload = {"model": model, "dataset": "digits", "loader_workers": 0}
    options = {
        "preset": "paper",
        "small_batch": 8,
        "update_interval_epochs": 0.4,
        "drift_minutes": 1e-4,
        "drift": drift,
    }
    fields = {"name": "x", "workload": {**workload, "samples": 256, "epochs": 4}, "training": options}
    fields["search"] = {"max_steps": 20, "min_steps": 5, "mode": "full"}
    return SweepSpec.model_validate(fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two workers that trained and probed although another process held a port; see `work`."""
    folder = tmp_path_factory.mktemp("two")
    for name in RUNS:
        run = RunDirectory(folder / name).create()
        run.train().root.mkdir()
        known = candidate(CONFIGURATION)
        chosen = with_step_time(known, 1e-5)
        write_plan(run, plan([chosen] * 4, chosen=chosen))
    taken = candidate_ports(environment(0, folder))[0]
    # another process, which never answers
    with socket.create_server((LOOPBACK, taken)):
        give_secret(folder)
        start_workers(WORKERS, work, folder)
    return folder


def environment(rank: int, folder: Path) -> WorkerEnvironment:
    hosts = ("first", "second")
    return WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, hosts, on_slurm=False, submission=str(folder))


def drift_events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [e.data for e in RunDirectory(folder / name).events() if e.event == "drifted"]


def test_one_event_names_the_part_and_the_slowest_host(folder: Path) -> None:
    """The second worker computes slowly during the probe."""
    (data,) = drift_events(folder, "watched")
    assert data["ratio"] > 10
    assert data["parts"]["measured"]["allreduce_time_s"] > 0
    assert data["parts"]["measured"]["compute_time_s"] > 0.02
    assert drift_events(folder, "unwatched") == []


def test_the_probe_changes_no_bit_of_the_training(folder: Path) -> None:
    states = []
    for name in RUNS:
        loaded = known(CheckpointStore(RunDirectory(folder / name).train().checkpoints).load_latest())
        states.append(loaded.state["model"])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_workers_find_the_same_noise_scale_and_the_slowest_of_them(folder: Path) -> None:
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS))
    assert first["noise"] == second["noise"]
    assert first["noise"][0] > 0
    assert first["noise"][1] == noise_probe.PASSES * CONFIGURATION.global_batch
    assert first["slowest_node"] == second["slowest_node"] == 1
    assert first["out of memory"] == second["out of memory"] == [None, [0.0, 0, []]]


def test_a_model_that_exchanges_in_its_forward_pass_is_profiled_and_probed(folder: Path) -> None:
    """If each worker chose its number of passes by its own time, the numbers would differ, and both would hang."""
    first, second = (json.loads((folder / f"{rank}.json").read_text())["exchanging"] for rank in range(WORKERS))
    assert first["passes"] == second["passes"]
    assert first["round_steps"] == second["round_steps"]
    assert first["steps"] == second["steps"] > 0
    assert min(first["compute_s"], second["compute_s"]) > 0


def work(rank: int, folder: Path) -> None:
    """Run one worker. Only rank 0 sees the current run directory, so both must follow what rank 0 finds."""
    env = environment(rank, folder)
    stand_in(trainer, "join_job", lambda: env)
    if rank == 1:
        stand_in(worker_module, "local_gradient", slow_gradient)
    for name in RUNS:
        root = folder / name
        # a stale view of the network file system: no plan yet
        if rank == 1:
            root = RunDirectory(folder / f"{name} as seen by 1").create().root
            (root / "train").rmdir()
            (root / "train").symlink_to(folder / name / "train")
        job = TrainJob(sweep(drift=name == "watched"), ClusterSpec(), CONFIGURATION, root)
        assert run_training(job, StopRequest()) == "finished"
    with process_group(ClusterSpec(), env):
        # in its own function, so that its DDP is freed before the process group
        seen = probe(env)
        gc.collect()
        seen["exchanging"] = exchange(env)
    (folder / f"{rank}.json").write_text(json.dumps(seen))


def probe(env: WorkerEnvironment) -> dict[str, Any]:
    """Return a worker's probes: first normal ones, then with the second worker out of memory."""
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, env)
    batches = worker.batches()
    seen: dict[str, Any] = {"noise": noise_probe.probe_noise(worker, batches)}
    seen["slowest_node"] = drift_probe.probe_parts(worker, *next(batches)).slowest_node
    if env.rank == 1:
        stand_in(worker_module, "local_gradient", out_of_memory)
    compute_s = drift_probe.probe_parts(worker, *next(batches)).parts.compute_time_s
    seen["out of memory"] = [compute_s, noise_probe.probe_noise(worker, batches)]
    return seen


def exchange(env: WorkerEnvironment) -> dict[str, Any]:
    """Profile and probe a model with a collective in each forward pass; the second worker's passes are slow."""
    spec, passes = sweep(model="tests.examples.exchanging:exchanging"), 0
    if env.rank == 1:
        stand_in(worker_module, "local_gradient", slow_gradient)
    forward = Centred.forward

    def counting(self: Centred, scores: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return forward(self, scores)

    stand_in(Centred, "forward", counting)
    measured = measure(spec, ClusterSpec(), CONFIGURATION, env)
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, env)
    compute_s = drift_probe.probe_parts(worker, *next(worker.batches())).parts.compute_time_s
    return {"passes": passes, "round_steps": measured.round_steps, "steps": measured.steps, "compute_s": compute_s}


def stand_in(module: ModuleType | type, name: str, value: object) -> None:
    """Replace an attribute for good, which is harmless in a process that ends soon."""
    setattr(module, name, value)


def slow_gradient(*arguments: Any, **options: Any) -> Any:
    time.sleep(0.03)
    return local_gradient(*arguments, **options)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")
