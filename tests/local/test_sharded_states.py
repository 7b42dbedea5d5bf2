"""ZeRO stage 1 with two real workers: the same training as without, in less memory, and it resumes exactly."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.forked import start_workers
from tests.known import known
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.process_group import process_group
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Configuration
from tula_hpc.workloads.optimizers import own_states

WORKERS, BATCH, STEPS, SAVED_AFTER = 2, 16, 4, 2
OPTIMIZERS = ("sgd", "adamw")


def sweep(optimizer: str, zero_stage: int) -> SweepSpec:
    workload = {
        "model": "tula_hpc.workloads.small_cnns:compact_cnn",
        "dataset": "digits",
        "loader_workers": 0,
        "optimizer": optimizer,
        "lr": 0.01,
        "zero_stage": zero_stage,
    }
    training = {"preset": "paper", "small_batch": 8, "update_interval_epochs": 0.05}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})


def new_worker(optimizer: str, zero_stage: int, rank: int, world: int = WORKERS) -> Worker:
    env = WorkerEnvironment(rank, world, 0, rank, "1", 0, ("here",), on_slurm=False)
    return Worker(sweep(optimizer, zero_stage), ClusterSpec(), Configuration(world, 1, BATCH), env)


def weights(worker: Worker) -> Tensor:
    return torch.cat([p.detach().flatten() for p in worker.parameters])


def restored(worker: Worker, store: CheckpointStore) -> Worker:
    """Restore as the trainer does: after one discarded pass, which gives DDP its final buckets."""
    worker.forward_backward(*next(worker.batches()))
    worker.optimizer.zero_grad(set_to_none=True)
    loaded = known(store.load_latest())
    worker.model.load_state_dict(loaded.state["model"])
    worker.optimizer.load_state_dict(loaded.state["optimizer"])
    return worker


def train(worker: Worker, done: int, store: CheckpointStore | None = None) -> Worker:
    for step, batch in enumerate(islice(worker.batches(0, done * BATCH * WORKERS), STEPS - done), start=done + 1):
        worker.train_step(*batch)
        if store is not None and step == SAVED_AFTER:
            optimizer_state = worker.optimizer_state()
            if worker.env.rank == 0:
                state = {"model": worker.model.state_dict(), "optimizer": optimizer_state}
                store.save(state, samples_seen=step * BATCH * WORKERS)
            dist.barrier()
    return worker


def work(rank: int, folder: Path) -> None:
    """Run one worker: train with and without ZeRO, and again from the checkpoint in the middle."""
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False)
    seen: dict[str, Any] = {}
    with process_group(ClusterSpec(), env, FileStore(str(folder / "store"), WORKERS)):
        for name in OPTIMIZERS:
            seen[name] = trained(name, CheckpointStore(folder / name), rank)
        seen["refused"] = consolidated_with_a_hostile_peer(rank, folder)
    torch.save(seen, folder / f"{rank}.pt")


def trained(name: str, store: CheckpointStore, rank: int) -> dict[str, Any]:
    plain, sharded = train(new_worker(name, 0, rank), 0), train(new_worker(name, 1, rank), 0, store)
    resumed = train(restored(new_worker(name, 1, rank), store), SAVED_AFTER)
    states = [_state_elements(worker) for worker in (plain, sharded)]
    return {"plain": weights(plain), "sharded": weights(sharded), "resumed": weights(resumed), "states": states}


class Hostile:
    """An object that runs foreign code when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (Path.touch, (self.folder / "ran",))


def consolidated_with_a_hostile_peer(rank: int, folder: Path) -> str:
    """Let rank 1 send a pickle, which torch's own consolidation of states would load; return rank 0's error."""
    optimizer = train(new_worker("sgd", 1, rank), 0).optimizer
    base = optimizer.base if isinstance(optimizer, TulaOptimizer) else optimizer
    assert isinstance(base, ZeroRedundancyOptimizer)
    if rank == 1:
        # the hostile object in place of this rank's state
        base.optim.state_dict = lambda: Hostile(folder)
        ZeroRedundancyOptimizer.consolidate_state_dict(base)
        return ""
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are looked at below
        base.consolidate_state_dict()
    return str(raised.value)


def _state_elements(worker: Worker) -> int:
    return sum(value.numel() for state in own_states(worker.optimizer).values() for value in state.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    start_workers(WORKERS, work, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Return what each worker recorded."""
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_states_train_the_same_weights(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        torch.testing.assert_close(seen[name]["sharded"], seen[name]["plain"], rtol=1e-6, atol=1e-7)
    assert torch.equal(ranks[0][name]["sharded"], ranks[1][name]["sharded"])


def test_what_a_peer_sends_is_never_unpickled(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert ranks[0]["refused"]
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_worker_holds_a_part_of_the_states_and_all_hold_all(ranks: list[dict[str, Any]], name: str) -> None:
    whole = ranks[0][name]["states"][0]
    parts = [seen[name]["states"][1] for seen in ranks]
    assert sum(parts) == whole
    assert max(parts) < 0.9 * whole


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_equals_the_uninterrupted_one(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        assert torch.equal(seen[name]["resumed"], seen[name]["sharded"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_single_worker_goes_on_from_the_same_checkpoint(folder: Path, name: str) -> None:
    """A single worker has the plain optimizer; every checkpoint holds the whole state, with or without ZeRO."""
    alone = restored(new_worker(name, 1, rank=0, world=1), CheckpointStore(folder / name))
    before = weights(alone)
    assert _state_elements(alone) > 0
    alone.train_step(*next(alone.batches()))
    assert not torch.equal(weights(alone), before)
