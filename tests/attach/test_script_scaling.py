"""Scaling of a script's own optimizer by hooks, compared with `TulaOptimizer` in a loop, on two workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.forked import start_workers
from tula_hpc.attach.hooks.passes import Listener
from tula_hpc.attach.hooks.step_hooks import Hooks
from tula_hpc.attach.train.script_scaling import ScriptScaling
from tula_hpc.config import SweepSpec
from tula_hpc.ddp.methods import ReferenceBatch, scaling_options
from tula_hpc.errors import InputError
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.optim import TulaOptimizer
from tula_hpc.records import Configuration

WORKERS, STEPS, BATCH, SAMPLES = 2, 12, 16, 128
SCRIPT = {"module": "no.such", "arguments": ["{local_batch}"], "samples": SAMPLES, "epochs": 3}
CASES: dict[str, Any] = {
    "sgd": (partial(SGD, lr=0.1, momentum=0.9), 1, {"method": "ags"}),
    "adamw": (partial(AdamW, lr=0.01), 1, {"method": "ags"}),
    "accumulated": (partial(SGD, lr=0.1), 2, {"method": "ags"}),
    "static": (partial(SGD, lr=0.1), 1, {"method": "static"}),
    "still": (partial(SGD, lr=1e-9), 1, {"method": "ags"}),
    "adascale": (partial(SGD, lr=0.1), 1, {"method": "adascale"}),
}


def spec(accumulation: int, training: dict[str, Any]) -> SweepSpec:
    workload = SCRIPT | {"accumulation": accumulation}
    tables = {"name": "scaled", "workload": workload, "training": {"base_batch": 16} | training}
    return SweepSpec.model_validate(tables, context={"check_paths": False})


def model_and_data(rank: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    torch.manual_seed(1 + rank)
    return model, torch.randn(STEPS, BATCH, 8), torch.randint(4, (STEPS, BATCH))


def passes(model: DistributedDataParallel, inputs: Tensor, targets: Tensor, accumulation: int) -> None:
    parts = list(zip(inputs.chunk(accumulation), targets.chunk(accumulation), strict=True))
    for part, (some, labels) in enumerate(parts):
        model.require_backward_grad_sync = part == len(parts) - 1
        torch.autograd.backward(nn.functional.cross_entropy(model(some), labels) / accumulation)


class Driver(Listener):
    """Scale the steps of a plain loop through hooks, as the process of a training script does."""

    def __init__(self, sweep: SweepSpec, workers: int = WORKERS) -> None:
        self.scaling = ScriptScaling(sweep, Configuration(1, workers, BATCH))
        self.hooks = Hooks(self)
        self.steps = 0

    def forward_begins(self, samples: int) -> None:
        self.scaling.forward_begins(self.hooks.model)

    def gradients_ready(self) -> None:
        assert self.hooks.optimizer is not None
        assert self.hooks.inner_model is not None
        epochs = self.steps * BATCH * WORKERS / SAMPLES
        self.scaling.gradients_ready(self.hooks.optimizer, self.hooks.inner_model, epochs)

    def step_ends(self) -> None:
        self.scaling.step_ends()
        self.steps += 1


def by_hooks(rank: int, name: str, *, clip: bool = False) -> tuple[list[Tensor], dict[str, float]]:
    make, accumulation, training = CASES[name]
    driver = Driver(spec(accumulation, training))
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    optimizer: Optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        passes(parallel, inputs[step], targets[step], accumulation)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], driver.scaling.readings.step_metrics(STEPS)


def in_the_loop(rank: int, name: str) -> list[Tensor]:
    """Train with `TulaOptimizer` in the loop, as `ddp.worker.Worker` does."""
    make, accumulation, training = CASES[name]
    sweep, configuration = spec(accumulation, training), Configuration(1, WORKERS, BATCH)
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    owned = list(model.parameters())
    options = scaling_options(sweep, configuration, SAMPLES)
    if name == "adamw":
        options["apply"] = "update"
    optimizer = TulaOptimizer(make(owned), **options)
    optimizer.expect_small_norms()
    reference = ReferenceBatch(sweep, configuration, SAMPLES)
    norms = None
    if sweep.training.adapts:
        norms = LocalNorms(owned, BATCH).attach(parallel)
    for step in range(STEPS):
        optimizer.zero_grad()
        passes(parallel, inputs[step], targets[step], accumulation)
        if norms is not None:
            optimizer.set_reference(reference.after(step * BATCH * WORKERS / SAMPLES))
            optimizer.observe_small(*norms.squares())
            optimizer.observe_norms(norms.averaged())
        optimizer.step()
    return [p.detach().clone() for p in owned]


MOVING = [name for name in CASES if name != "still"]


def loops(rank: int, folder: Path) -> None:
    """Train with every method in one process, although hooks normally stay for a process's life."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    torch.save({name: in_the_loop(rank, name) for name in MOVING}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def hooked(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    weights, metrics = by_hooks(rank, folder.name)
    torch.save({"weights": weights, "metrics": metrics}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_loops(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    """The final weights of each loop, for each rank."""
    folder = tmp_path_factory.mktemp("loops")
    start_workers(WORKERS, loops, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


@pytest.mark.parametrize("name", MOVING)
def test_a_scripts_steps_are_scaled_as_those_of_the_loop_bit_for_bit(
    tmp_path: Path, of_loops: list[dict[str, list[Tensor]]], name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    start_workers(WORKERS, hooked, folder)
    for rank, expected in enumerate(of_loops):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        same = [other for other in MOVING if all(map(torch.equal, found["weights"], expected[other]))]
        assert same == [name]
        assert found["metrics"]["scale_max"] > 1.0


def clipped(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    _, metrics = by_hooks(rank, "still", clip=folder.name == "clipped")
    torch.save(metrics, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_clipping_leaves_the_ratio_of_the_norms_alone(tmp_path: Path) -> None:
    """A gradient clipped to a hundredth would seem as short as a large batch's, and give the least scale."""
    scales = []
    for name in ("plain", "clipped"):
        (tmp_path / name).mkdir()
        start_workers(WORKERS, clipped, tmp_path / name)
        scales.append(torch.load(tmp_path / name / "0.pt", weights_only=True)["scale_mean"])
    assert scales[1] > 1.0
    assert scales[1] == pytest.approx(scales[0], rel=0.1)


def own_hook(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    model, inputs, _ = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    parallel.register_comm_hook(None, allreduce_hook)
    driver = Driver(spec(1, {"method": "ags"}))
    driver.hooks.install()
    driver.hooks._note_wrapped(parallel)
    with pytest.raises(InputError, match="communication hook"):
        parallel(inputs[0])
    dist.barrier()
    dist.destroy_process_group()


def test_a_communication_hook_of_the_scripts_own_is_refused_with_the_reason(tmp_path: Path) -> None:
    start_workers(WORKERS, own_hook, tmp_path)


def alone(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=1)
    driver = Driver(spec(1, {"method": "ags"}), workers=1)
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    outer = DistributedDataParallel(model) if folder.name == "wrapped" else model
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(outer(inputs[step]), targets[step]))
        optimizer.step()
    torch.save([p.detach() for p in model.parameters()], folder / "0.pt")
    dist.destroy_process_group()


def test_a_model_that_is_wrapped_for_a_single_worker_trains_as_one_that_is_not(tmp_path: Path) -> None:
    """accelerate wraps a model whenever torchrun's variables are set."""
    ends = []
    for name in ("wrapped", "plain"):
        (tmp_path / name).mkdir()
        start_workers(1, alone, tmp_path / name)
        ends.append(torch.load(tmp_path / name / "0.pt", weights_only=True))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_before_the_first_step_of_a_start_the_state_is_that_of_the_last_one() -> None:
    """A checkpoint may be written at that point, after the last batch of an epoch."""
    scaling = Driver(spec(1, {"method": "ags"})).scaling
    scaling.load_state_dict({"steps": 3})
    assert scaling.state_dict() == {"steps": 3}
