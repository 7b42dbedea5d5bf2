"""Norms of small gradients without an extra pass: their laws on a problem with known G and Σ, and in one worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.forked import ALONE
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.worker import Worker
from tula_hpc.gradients.noise_scale import gradient_square, noise_trace, square_at
from tula_hpc.gradients.small_batch_norms import LocalNorms, PartNorms, looks_at_whole_batch
from tula_hpc.optim import TulaOptimizer
from tula_hpc.profiling.measure import measure
from tula_hpc.records import Configuration

SIZES, NOISE = (6, 14), 3.0
BATCH = 12


class Blocks(nn.Module):
    """Linear regression with its weights in two tensors: y = x·w + ε, x ~ N(0, 1), ε ~ N(0, σ²), loss (x·w − y)²/2.

    The weights are as far from the truth as they are large. By the fourth moments of the normal distribution, for a
    tensor of p weights d_k of all weights d: G_k = d_k and tr(Σ_k) = p(|d|² + σ²) + |d_k|².
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        draws = [torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES]
        self.blocks = nn.ParameterList(nn.Parameter(draw) for draw in draws)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x @ torch.cat(list(self.blocks))
        return result

    def truth(self) -> tuple[Tensor, Tensor]:
        """Return |G|² and tr(Σ) of each tensor."""
        squares = torch.stack([block.detach().square().sum() for block in self.blocks])
        sizes = torch.tensor(SIZES, dtype=torch.float64)
        return squares, sizes * (squares.sum() + NOISE**2) + squares


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean() / 2


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, sum(SIZES), generator=generator, dtype=torch.float64)
    return inputs, NOISE * torch.randn(size, generator=generator, dtype=torch.float64)


def backward_in_parts(model: nn.Module, norms: PartNorms, inputs: Tensor, targets: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    for x, y, share in norms.parts(inputs, targets):
        torch.autograd.backward(loss(model(x), y) * share)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def draw(samples: int, count: int, draws: int = 500) -> tuple[Blocks, Tensor, Tensor, float]:
    """Return a model, squared norms of parts and of the whole, (draws, tensors) each, and the batch of the parts."""
    model, generator = Blocks(), torch.Generator().manual_seed(samples)
    norms, small, large = PartNorms(list(model.parameters()), count), [], []
    for _ in range(draws):
        backward_in_parts(model, norms, *batch(samples, generator))
        small.append(norms.squares()[0])
        large.append(torch.stack([g.square().sum() for g in gradients(model)]))
        effective = samples / count
    return model, torch.stack(small), torch.stack(large), effective


def assert_unbiased(draws: Tensor, truth: Tensor) -> None:
    """Assert that the mean of the draws is within four standard errors, for each tensor."""
    error = (draws.mean(0) - truth).abs()
    assert (error < 4 * draws.std(0) / math.sqrt(len(draws))).all()


@pytest.mark.parametrize(
    ("samples", "count"), [(7, 2), pytest.param(12, 4, marks=pytest.mark.processes)], ids=["unequal", "quarters"]
)
def test_squares_signal_and_noise_are_unbiased_for_every_tensor(samples: int, count: int) -> None:
    model, small, large, effective = draw(samples, count)
    square, trace = model.truth()
    assert_unbiased(small, square + trace / effective)
    assert_unbiased(large, square + trace / samples)
    assert_unbiased(gradient_square(small, large, effective, samples), square)
    assert_unbiased(noise_trace(small, large, effective, samples), trace)
    for reference in (1, 2, 100):
        assert_unbiased(square_at(small, large, effective, samples, reference), square + trace / reference)


def test_the_line_goes_through_what_it_was_made_from() -> None:
    small, large = torch.rand(5) + 1, torch.rand(5)
    torch.testing.assert_close(square_at(small, large, 4, 32, 4), small)
    torch.testing.assert_close(square_at(small, large, 4, 32, 32), large)
    torch.testing.assert_close(square_at(small, large, 4, 32, math.inf), gradient_square(small, large, 4, 32))


def test_all_parts_bring_less_noise_than_the_first_alone() -> None:
    """With a large gradient, its product with a part's noise would dominate; over all parts it cancels."""
    model, (inputs, targets) = Blocks(), batch(12 * 400, torch.Generator().manual_seed(0))
    parts = [
        torch.autograd.grad(loss(model(x), y), list(model.parameters()))
        for x, y in zip(inputs.chunk(800), targets.chunk(800), strict=True)
    ]
    flat = torch.stack([torch.cat(part) for part in parts]).view(400, 2, -1) + 30.0
    whole = flat.mean(1).square().sum(1)
    first, both = flat[:, 0].square().sum(1) - whole, flat.square().sum(2).mean(1) - whole
    assert (both >= 0).all()
    assert both.std() < first.std() / 3


@pytest.mark.parametrize(("samples", "count"), [(12, 2), (7, 2), (7, 3)])
def test_parts_add_up_to_the_batch_and_each_is_seen(samples: int, count: int) -> None:
    model, (inputs, targets) = Blocks(), batch(samples, torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    norms = PartNorms(parameters, count)
    backward_in_parts(model, norms, inputs, targets)
    whole = torch.autograd.grad(loss(model(inputs), targets), parameters)
    torch.testing.assert_close(gradients(model), list(whole))
    expected = torch.zeros(2, dtype=torch.float64)
    for x, y in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
        own = torch.autograd.grad(loss(model(x), y), parameters)
        expected += len(y) / samples * torch.stack([g.square().sum() for g in own])
    squares, effective = norms.squares()
    torch.testing.assert_close(squares, expected)
    assert effective == samples / count


def test_an_overflow_leaves_no_norm() -> None:
    model, (inputs, targets) = Blocks(), batch(BATCH, torch.Generator().manual_seed(1))
    norms = PartNorms(list(model.parameters()))
    inputs[0, 0] = math.inf
    backward_in_parts(model, norms, inputs, targets)
    assert norms.squares()[0].isnan().all()


def test_frozen_and_unused_parameters_have_no_norm_and_a_part_without_gradient_counts_zero() -> None:
    class Switched(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            used = self.blocks[0] if x[0, 0] < 0 else self.blocks[0].detach()
            result: Tensor = x @ torch.cat([used, self.blocks[1]])
            return result

    model, (inputs, targets) = Switched(), batch(BATCH, torch.Generator().manual_seed(1))
    inputs[0, 0], inputs[BATCH // 2, 0] = -1.0, 1.0
    frozen, unused = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    norms = PartNorms([frozen, *model.parameters(), unused])
    backward_in_parts(model, norms, inputs, targets)
    squares, _ = norms.squares()
    assert squares.isnan().tolist() == [True, False, False, True]
    own = torch.autograd.grad(loss(model(inputs[: BATCH // 2]), targets[: BATCH // 2]), model.blocks[0])[0]
    torch.testing.assert_close(squares[1], own.square().sum() / 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_comes_in_pieces_has_no_norm(reentrant: bool) -> None:
    class Repeated(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            # otherwise a reentrant checkpoint has nothing to differentiate
            result = x.detach().requires_grad_()
            for _ in range(2):
                result = checkpoint(lambda y: y * self.blocks[0].sum(), result, use_reentrant=reentrant)
            return super().forward(result)

    model, (inputs, targets) = Repeated(), batch(BATCH, torch.Generator().manual_seed(1))
    norms = PartNorms(list(model.parameters()))
    backward_in_parts(model, norms, inputs, targets)
    assert norms.squares()[0].isnan().tolist() == [reentrant, False]


def test_a_part_in_two_passes_has_no_norm() -> None:
    model, (inputs, targets) = Blocks(), batch(BATCH, torch.Generator().manual_seed(1))
    norms = PartNorms(list(model.parameters()))
    for x, y, share in norms.parts(inputs, targets):
        for _ in range(2):
            torch.autograd.backward(loss(model(x), y) * share / 2)
    assert norms.squares()[0].isnan().all()


@pytest.mark.parametrize("exponent", [10, 64, 100])
def test_a_loss_scale_is_divided_out_however_large_it_grows(exponent: int) -> None:
    model, (inputs, targets) = Blocks(), batch(BATCH, torch.Generator().manual_seed(1))
    norms = PartNorms(list(model.parameters()))
    backward_in_parts(model, norms, inputs, targets)
    plain, _ = norms.squares()
    model.zero_grad()
    for x, y, share in norms.parts(inputs, targets):
        torch.autograd.backward(loss(model(x), y) * share * 2.0**exponent)
    assert torch.equal(norms.squares(torch.tensor(2.0**exponent))[0], plain)


def test_other_passes_are_not_counted() -> None:
    model, (inputs, targets) = Blocks(), batch(BATCH, torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    norms = PartNorms(parameters)
    torch.autograd.backward(loss(model(inputs), targets))
    with pytest.raises(RuntimeError, match="no batch was divided"):
        norms.squares()
    # a step that is discarded
    backward_in_parts(model, norms, *batch(BATCH, torch.Generator().manual_seed(2)))
    backward_in_parts(model, norms, inputs, targets)
    torch.autograd.grad(loss(model(inputs), targets), parameters)
    squares, _ = norms.squares()
    backward_in_parts(model, norms, inputs, targets)
    assert torch.equal(norms.squares()[0], squares)
    with pytest.raises(RuntimeError, match="no batch was divided"):
        norms.squares()


def test_batchnorm_alone_looks_at_the_whole_batch() -> None:
    assert looks_at_whole_batch(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4))))
    assert not looks_at_whole_batch(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Dropout()))
    # frozen statistics are not those of the batch
    assert not looks_at_whole_batch(nn.BatchNorm1d(4).eval())


def test_a_group_of_one_worker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="single worker"):
            LocalNorms(list(ddp.parameters()), 8).attach(ddp)
    finally:
        dist.destroy_process_group()


# one worker of a job


def worker_of(model: str, local_batch: int = 32, precision: str = "fp32", **training: object) -> Worker:
    workload = {"model": model, "dataset": "digits", "loader_workers": 0, "precision": precision, "lr": 0.05}
    options = {"method": "ags", "small_batch": 8, "granularity": "tensor", "reference": "free", **training}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": options})
    return Worker(spec, ClusterSpec(), Configuration(1, 1, local_batch), ALONE)


PERCEPTRON, WITH_BATCHNORM = "tests.examples.own_workload:perceptron", "tests.examples.normed:normed"


def watched(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, float]]:
    """Return a list to which the optimizer's observations are added from now on."""
    assert isinstance(worker.optimizer, TulaOptimizer)
    seen: list[tuple[Tensor, float]] = []
    tell: Any = worker.optimizer.observe_small

    def listen(squares: Tensor, samples: float) -> None:
        seen.append((squares, samples))
        tell(squares, samples)

    monkeypatch.setattr(worker.optimizer, "observe_small", listen)
    return seen


@pytest.mark.parametrize("local_batch", [32, 33])
def test_a_single_worker_informs_its_optimizer_at_every_step(monkeypatch: pytest.MonkeyPatch, local_batch: int) -> None:
    worker = worker_of(PERCEPTRON, local_batch)
    seen, batches = watched(worker, monkeypatch), worker.batches()
    for _ in range(3):
        worker.train_step(*next(batches))
    assert [samples for _, samples in seen] == [local_batch / 2] * 3
    assert all(len(squares) == len(worker.parameters) and (squares > 0).all() for squares, _ in seen)
    assert isinstance(worker.optimizer, TulaOptimizer)
    assert not worker.optimizer.update_due
    assert worker.optimizer.noise().noise_scale > 0


def test_parts_train_what_the_whole_batch_does() -> None:
    free, passing = worker_of(PERCEPTRON, 33), worker_of(PERCEPTRON, 33, reference="pass")
    inputs, targets = next(free.batches())
    losses = [worker.forward_backward(inputs, targets) for worker in (free, passing)]
    torch.testing.assert_close(losses[0], losses[1])
    for mine, theirs in zip(free.parameters, passing.parameters, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_batch_is_taken_as_a_whole_where_that_is_asked_for() -> None:
    worker, passes = worker_of(PERCEPTRON, 33), []
    worker.model.register_forward_hook(lambda *_: passes.append(1))
    batch = next(worker.batches())
    worker.forward_backward(*batch, whole=True)
    assert (len(passes), worker.parts) == (1, 2)
    worker.forward_backward(*batch)
    assert len(passes) == 3


def test_half_precision_norms_are_those_of_the_unscaled_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = []
    for precision in ("fp32", "fp16"):
        worker = worker_of(PERCEPTRON, precision=precision)
        seen = watched(worker, monkeypatch)
        worker.train_step(*next(worker.batches()))
        squares.append(seen[0][0])
    torch.testing.assert_close(squares[1], squares[0], rtol=0.05, atol=0.0)


@pytest.mark.parametrize(("interval", "steps"), [(1.0, 1438 // 256), (0.0, 2)], ids=["given", "2 % of the samples"])
def test_batchnorm_keeps_the_pass_at_its_interval(interval: float, steps: int) -> None:
    worker = worker_of(WITH_BATCHNORM, 256, update_interval_epochs=interval)
    assert not worker.norms.are_given
    assert isinstance(worker.optimizer, TulaOptimizer)
    assert worker.optimizer.update_interval == steps
    batches = worker.batches()
    for _ in range(steps + 1):
        assert all(factor is None for factor in worker.optimizer.gradscale)
        worker.train_step(*next(batches))
    assert all(factor is not None for factor in worker.optimizer.gradscale)


def test_a_batch_that_cannot_be_divided_keeps_it_too() -> None:
    assert not worker_of(PERCEPTRON, 1).norms.are_given


@pytest.mark.processes
@pytest.mark.parametrize(("model", "updates"), [(PERCEPTRON, False), (WITH_BATCHNORM, True)])
def test_a_profile_times_an_update_only_where_it_takes_a_pass(model: str, updates: bool) -> None:
    workload = {"model": model, "dataset": "digits", "loader_workers": 0}
    training = {"granularity": "tensor", "reference": "free"}
    search = {"warmup_steps": 1, "min_steps": 5, "max_steps": 5}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training, "search": search})
    measurement = measure(spec, ClusterSpec(), Configuration(1, 1, 32), ALONE)
    assert measurement.status == "ok"
    assert ("update" in measurement.samples) == updates
    assert measurement.parts == (1 if updates else 2)
    assert updates or 16 in dict(measurement.smaller_computes)
