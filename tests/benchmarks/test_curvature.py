"""Curvature against exact Hessians, and without effects on the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from tests.benchmarks.curvature import Curvature, LocalHessian, measure_curvature, power_iteration
from tests.forked import start_workers

pytestmark = pytest.mark.thorough
WORKERS = 2
cross_entropy = nn.CrossEntropyLoss()


def symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    size = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix: Tensor = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    return matrix


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def with_batchnorm() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.get_buffer("1.running_var").fill_(0.3)
    return model


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (size,), generator=generator)


def exact_hessian(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Hessian (n, n) by automatic differentiation of every element."""
    named = {name: p.detach() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in named.items()}

    def loss_at(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [p.numel() for p in named.values()])
        parameters = {name: part.view(shapes[name]) for (name, part) in zip(named, parts, strict=True)}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        value: Tensor = cross_entropy(functional_call(model, (parameters, buffers), (inputs,)), targets)
        return value

    flat = torch.cat([p.reshape(-1) for p in named.values()])
    found: Tensor = torch.autograd.functional.hessian(loss_at, flat)  # type: ignore[no-untyped-call]
    return found


def curvature_of(model: nn.Module, size: int = 16, **options: Any) -> Curvature:
    hessian = LocalHessian(model, cross_entropy, *batch(size), list(model.parameters()))
    return measure_curvature(hessian, **options)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", [network, with_batchnorm])
def test_equals_the_exact_hessians(build: Callable[[], nn.Module], training: bool) -> None:
    """BatchNorm has a different Hessian in each mode; that of the present mode counts."""
    model = build().train(training)
    eigenvalues = torch.linalg.eigvalsh(exact_hessian(model, *batch(16)))
    found = curvature_of(model, tolerance=1e-5, max_iterations=2000)
    assert found.dominant.value == pytest.approx(float(eigenvalues[eigenvalues.abs().argmax()]), rel=1e-4)
    assert found.largest.value == pytest.approx(float(eigenvalues[-1]), rel=1e-4)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6), st.integers(1, 8), st.integers(0, 100))
def test_an_eigenvalue_is_within_the_residual_after_any_number_of_steps(
    eigenvalues: list[float], steps: int, seed: int
) -> None:
    matrix = symmetric(eigenvalues, seed)
    start = torch.randn(len(matrix), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, _ = power_iteration(lambda vector: matrix @ vector, start, tolerance=0.0, max_iterations=steps)
    assert min(abs(found.value - each) for each in eigenvalues) <= found.residual + 1e-6
    assert found.iterations <= steps


def test_frozen_parameters_are_left_out_and_unused_ones_do_no_harm() -> None:
    model = network()
    model.get_submodule("0").requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    found = curvature_of(model, tolerance=1e-6, max_iterations=1000)
    # behind the frozen layer
    block = exact_hessian(network(), *batch(16))[30:, 30:]
    assert found.dominant.value == pytest.approx(float(torch.linalg.eigvalsh(block)[-1]), rel=1e-4)
    assert len(found.direction) == 3 + len(block)
    # the unused one comes first
    assert float(found.direction[:3].norm()) == pytest.approx(0, abs=1e-6)


def test_training_goes_on_as_if_it_had_not_been_measured() -> None:
    states = []
    for peek in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        for step in range(3):
            inputs, targets = batch(16, step)
            torch.autograd.backward(cross_entropy(model(inputs), targets))
            if peek:
                gradients = [p.grad for p in model.parameters()]
                copies, random = [g.clone() for g in gradients if g is not None], torch.get_rng_state()
                curvature_of(model)
                assert [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)] == [True] * 6
                assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True) if g is not None)
                assert torch.equal(torch.get_rng_state(), random)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# two workers


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two workers, see `work`."""
    folder = tmp_path_factory.mktemp("workers")
    start_workers(WORKERS, work, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


def test_workers_together_find_the_curvature_of_all_their_samples(workers: list[dict[str, Any]]) -> None:
    alone = curvature_of(network(), tolerance=1e-6, max_iterations=1000)
    for found in workers:
        assert found["value"] == pytest.approx(alone.dominant.value, rel=1e-6)
        assert found["gradient_norm"] == pytest.approx(alone.gradient_norm)
    assert workers[0] == workers[1]


def test_workers_that_round_differently_end_at_the_same_step(workers: list[dict[str, Any]]) -> None:
    assert workers[0]["rounded"] == workers[1]["rounded"]


def work(rank: int, folder: Path) -> None:
    """Run one worker on its half of the batch, and with products that differ a little between the two workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORKERS)
    model = network()
    inputs, targets = (part.chunk(WORKERS)[rank] for part in batch(16))
    hessian = LocalHessian(model, cross_entropy, inputs, targets, list(model.parameters()))
    found = measure_curvature(hessian, tolerance=1e-6, max_iterations=1000)
    matrix = symmetric([5.0, 4.5, 1.0]) * (1 + 1e-3 * rank)
    rounded, _ = power_iteration(lambda vector: matrix @ vector, torch.ones(3).double(), tolerance=1e-3)
    seen = {"value": found.dominant.value, "gradient_norm": found.gradient_norm, "rounded": list(rounded)}
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()
