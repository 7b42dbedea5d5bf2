"""Scaling of a script's own optimizer by hooks, compared with `TulaOptimizer` in a loop, on two workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

from tests.forked import start_workers
from tests.known import known
from tula_hpc.attach.hooks.passes import Listener
from tula_hpc.attach.hooks.step_hooks import Hooks
from tula_hpc.attach.train.peers import ScriptPeers
from tula_hpc.attach.train.script_scaling import ScriptScaling, copies_parameters
from tula_hpc.batches import tensors_of
from tula_hpc.config import SweepSpec, TrainingSpec
from tula_hpc.ddp.methods import ReferenceBatch, scaling_options
from tula_hpc.errors import InputError
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.optimizer import Apply
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

    def partner_ready(self, optimizer: Optimizer) -> None:
        self.scaling.partner_ready(optimizer)

    def partner_stepped(self, optimizer: Optimizer) -> None:
        self.scaling.partner_stepped()


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
    applies_to: Apply = options["apply"]
    if name == "adamw":
        # of a built-in training the sweep says so
        options["apply"] = applies_to = "update"
    optimizer = TulaOptimizer(make(owned), **options)
    optimizer.expect_small_norms()
    reference = ReferenceBatch(sweep, configuration, SAMPLES, applies_to)
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


def under_loss_scales(rank: int, folder: Path) -> None:
    """Train with loss scales that grow; a fused optimizer divides by them itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, {"method": "static" if "static" in folder.name else "ags"}))
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1, fused="fused" in folder.name)
    scaler = GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(inputs[step]), targets[step])
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    torch.save(driver.scaling.readings.step_metrics(STEPS), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["ags", "static"])
def test_a_fused_optimizer_that_divides_by_the_loss_scale_itself_is_scaled_as_any_other(
    tmp_path: Path, method: str
) -> None:
    found: list[dict[str, float]] = []
    for name in ("plain", "fused"):
        folder = tmp_path / f"{name} {method}"
        folder.mkdir()
        start_workers(WORKERS, under_loss_scales, folder)
        found.append(torch.load(folder / "0.pt"))
    assert found[0] == pytest.approx(found[1], rel=1e-3)


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


def trains_two_models(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    Driver(spec(1, {"method": "ags"})).hooks.install()
    models = [DistributedDataParallel(nn.Linear(8, outputs)) for outputs in (8, 4)]
    optimizer = SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)
    torch.autograd.backward(models[1](models[0](torch.randn(BATCH, 8))).sum())
    with pytest.raises(
        InputError, match=r'"ags" sees only the gradients of Linear, and SGD also trains other parameters'
    ):
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def test_an_optimizer_of_two_wrapped_models_is_refused_with_the_reason(tmp_path: Path) -> None:
    start_workers(WORKERS, trains_two_models, tmp_path)


def has_a_teacher(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, {"method": "ags"}))
    driver.hooks.install()
    # as those of DINO: the teacher, wrapped first, is as large as the student
    teacher, model = (DistributedDataParallel(nn.Linear(8, 4)) for _ in range(2))
    teacher.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        inputs = torch.randn(BATCH, 8)
        torch.autograd.backward((model(inputs) - teacher(inputs)).square().sum())
        expected = 0 if driver.scaling.scaling is None else 1
        assert known(driver.scaling.norms)._passes == expected
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def test_a_frozen_teacher_that_is_wrapped_is_no_hindrance(tmp_path: Path) -> None:
    start_workers(WORKERS, has_a_teacher, tmp_path)


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


@pytest.mark.parametrize(
    ("method", "kind", "workers", "copies"),
    [
        ("ags", SGD, 2, False),
        ("ags", AdamW, 2, True),
        ("adascale", SGD, 2, True),
        # a single worker has no gradients of smaller batches, so that nothing is scaled
        ("ags", AdamW, 1, False),
        ("static", AdamW, 1, True),
        ("static", SGD, 1, False),
        ("lbt", AdamW, 2, False),
    ],
)
def test_parameters_are_copied_where_the_update_is_scaled(
    method: Any, kind: Callable[..., Optimizer], workers: int, *, copies: bool
) -> None:
    optimizer = kind(nn.Linear(2, 2).parameters(), lr=0.1)
    assert copies_parameters(TrainingSpec(method=method), workers, optimizer) is copies


def test_before_the_first_step_of_a_start_the_state_is_that_of_the_last_one() -> None:
    """A checkpoint may be written at that point, after the last batch of an epoch."""
    scaling = Driver(spec(1, {"method": "ags"})).scaling
    scaling.load_state_dict({"steps": 3})
    assert scaling.state_dict() == {"steps": 3}


# without smoothing a step's factors follow from its own gradients: those before a partner was known do not matter
TOGETHER: dict[str, Any] = {
    "sgd": (partial(SGD, lr=0.1, momentum=0.9), {"method": "ags", "smoothing": 0.0}),
    "adamw": (partial(AdamW, lr=0.01), {"method": "ags", "smoothing": 0.0}),
    "model": (partial(SGD, lr=0.1), {"method": "ags", "smoothing": 0.0, "granularity": "model"}),
    "static": (partial(SGD, lr=0.1), {"method": "static", "gate": "none"}),
}


def with_optimizers(rank: int, folder: Path, name: str, makes: Sequence[Any], shares: Sequence[slice]) -> None:
    """Train by hooks with an optimizer for each share of the parameters; save weights and metrics."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{name}", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, TOGETHER[folder.name][1]))
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizers = [make(parameters[share]) for make, share in zip(makes, shares, strict=True)]
    for step in range(STEPS):
        parallel.zero_grad()
        passes(parallel, inputs[step], targets[step], 1)
        for optimizer in optimizers:
            optimizer.step()
    metrics = driver.scaling.readings.step_metrics(STEPS)
    torch.save({"weights": [p.detach() for p in parameters], "metrics": metrics}, folder / f"{name}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def all_by_one(rank: int, folder: Path) -> None:
    with_optimizers(rank, folder, "one", [TOGETHER[folder.name][0]], [slice(None)])


def each_by_its_own(rank: int, folder: Path) -> None:
    make = TOGETHER[folder.name][0]
    with_optimizers(rank, folder, "several", [make] * 3, [slice(1), slice(1, 3), slice(3, None)])


@pytest.mark.parametrize("name", TOGETHER)
def test_optimizers_that_step_together_scale_as_a_single_one_of_all_parameters_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    start_workers(WORKERS, all_by_one, folder)
    start_workers(WORKERS, each_by_its_own, folder)
    for rank in range(WORKERS):
        one, several = (torch.load(folder / f"{each}-{rank}.pt") for each in ("one", "several"))
        assert all(map(torch.equal, one["weights"], several["weights"]))
        assert one["metrics"] == several["metrics"]
        assert one["metrics"]["scale_max"] > 1.0


HALF = STEPS // 2


def parts_of(rank: int, folder: Path) -> None:
    """Train the steps up to the half, those from there on, or all, with AdamW for a part and SGD for the rest."""
    part = folder.name
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, {"method": "ags"}))
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    first, *others = model.parameters()
    optimizers = [AdamW(others, lr=0.01), SGD([first], lr=0.1, momentum=0.9)]
    kept: list[Any] = [model, *optimizers, driver.scaling]
    if part == "rest":
        for thing, state in zip(kept, torch.load(folder.parent / "begun" / f"{rank}.pt"), strict=True):
            thing.load_state_dict(state)
        driver.steps = HALF
    for step in {"begun": range(HALF), "rest": range(HALF, STEPS), "whole": range(STEPS)}[part]:
        parallel.zero_grad()
        passes(parallel, inputs[step], targets[step], 1)
        for optimizer in optimizers:
            optimizer.step()
    torch.save([thing.state_dict() for thing in kept], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_optimizers_that_step_together_go_on_bit_for_bit(tmp_path: Path) -> None:
    for part in ("begun", "rest", "whole"):
        (tmp_path / part).mkdir()
        start_workers(WORKERS, parts_of, tmp_path / part)
    for rank in range(WORKERS):
        ends = [list(tensors_of(torch.load(tmp_path / part / f"{rank}.pt"))) for part in ("rest", "whole")]
        assert len(ends[0]) == len(ends[1]) > 20
        assert all(map(torch.equal, *ends))


def with_sparse_gradients(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, {"method": "ags"}))
    driver.hooks.install()
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
    parallel = DistributedDataParallel(model)
    embedding, *others = model.parameters()
    optimizers = [SGD(others, lr=0.1), SparseAdam([embedding])]
    before = embedding.detach().clone()
    for _ in range(3):
        parallel.zero_grad()
        torch.autograd.backward(parallel(torch.randint(9, (BATCH, 2))).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    assert not torch.equal(before, embedding)
    assert driver.hooks.partners.found == optimizers[1:]
    dist.barrier()
    dist.destroy_process_group()


def test_a_partners_sparse_gradients_are_left_as_they_are(tmp_path: Path) -> None:
    start_workers(WORKERS, with_sparse_gradients, tmp_path)


def grows(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    driver = Driver(spec(1, {"method": "ags"}))
    driver.hooks.install()
    model, inputs, targets = model_and_data(rank)
    parallel = DistributedDataParallel(model)
    head, *others = reversed(list(model.parameters()))
    optimizer = SGD([head], lr=0.1)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": others})
        parallel.zero_grad()
        passes(parallel, inputs[step], targets[step], 1)
        optimizer.step()
    assert all(factor is not None for factor in known(driver.scaling.scaling).gradscale)
    dist.barrier()
    dist.destroy_process_group()


def test_a_script_may_give_its_optimizer_more_parameters(tmp_path: Path) -> None:
    start_workers(WORKERS, grows, tmp_path)


def agree_on_no_device(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=WORKERS)
    torch.set_default_device("meta")
    peers = ScriptPeers(WORKERS)
    assert peers.agree(float(rank)) == [1.0]
    assert peers.texts(str(rank)) == ["0", "1"]


def test_workers_agree_wherever_a_script_makes_its_tensors_by_default(tmp_path: Path) -> None:
    """Most such scripts use a GPU; this one uses a device that holds no numbers."""
    start_workers(WORKERS, agree_on_no_device, tmp_path)
