"""The reference gradient is correct, and leaves no trace."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.examples.branches import Branches
from tests.forked import start_workers
from tula_hpc.gradients.reference_gradient import reference_gradient

WORKERS = 2
loss = nn.CrossEntropyLoss()


def plain_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def stateful_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def batch(size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator).to(dtype), torch.randint(3, (size,), generator=generator)


def dense(gradients: list[Tensor | None]) -> Tensor:
    assert all(gradient is not None for gradient in gradients)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **gradients}


def test_equals_the_gradient_of_a_plain_backward_pass() -> None:
    model, (inputs, targets) = plain_model(), batch(6, dtype=torch.float64)
    gradients = reference_gradient(model, loss, inputs, targets, list(model.parameters()))
    torch.autograd.backward(loss(model(inputs), targets))
    assert torch.equal(dense(gradients), dense([p.grad for p in model.parameters()]))


def test_gradients_of_equal_parts_average_to_that_of_the_whole() -> None:
    model, (inputs, targets) = plain_model(), batch(12, dtype=torch.float64)
    parameters = list(model.parameters())
    whole = dense(reference_gradient(model, loss, inputs, targets, parameters))
    parts = zip(inputs.chunk(3), targets.chunk(3), strict=True)
    mean = (
        sum((dense(reference_gradient(model, loss, x, y, parameters)) for x, y in parts), torch.zeros_like(whole)) / 3
    )
    torch.testing.assert_close(mean, whole)


def test_training_goes_on_as_if_it_had_not_been_called() -> None:
    """BatchNorm's statistics, dropout's random numbers and pending gradients stay; the next steps are bit-identical."""
    states = []
    for peek in (False, True):
        model = stateful_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        for step in range(4):
            inputs, targets = batch(16, step)
            torch.autograd.backward(loss(model(inputs), targets))
            if peek:
                before, random_state = whole_state(model), torch.get_rng_state()
                reference_gradient(model, loss, inputs[:4], targets[:4], list(model.parameters()))
                after = whole_state(model)
                assert before.keys() == after.keys()
                assert all(torch.equal(before[name], after[name]) for name in before)
                assert torch.equal(torch.get_rng_state(), random_state)
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert int(states[0]["1.num_batches_tracked"]) == 4
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_leaves_no_trace_when_the_loss_fails() -> None:
    model, (inputs, _) = stateful_model(), batch(8)
    before, random_state = whole_state(model), torch.get_rng_state()
    buffers = dict(model.named_buffers())
    with pytest.raises(IndexError):
        reference_gradient(model, loss, inputs, torch.full((8,), 99), list(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in whole_state(model).items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("training", [True, False])
def test_uses_the_model_in_the_mode_it_is_in(training: bool) -> None:
    model, (inputs, targets) = stateful_model().train(training), batch(8)
    model[1].running_mean.fill_(3.0)  # type: ignore[index]  # a Sequential, typed as a Module
    parameters = list(model.parameters())
    torch.manual_seed(1)
    gradients = dense(reference_gradient(model, loss, inputs, targets, parameters))
    torch.manual_seed(1)
    torch.autograd.backward(loss(model(inputs), targets))
    assert torch.equal(gradients, dense([p.grad for p in parameters]))
    assert all(module.training is training for module in model.modules())


def test_frozen_and_unused_parameters_have_none() -> None:
    model, (inputs, targets) = Branches(), batch(4)
    model.always.bias.requires_grad_(False)
    inputs[0, 0] = -1.0
    gradients = reference_gradient(model, loss, inputs, targets, list(model.parameters()))
    found = {name for (name, _), g in zip(model.named_parameters(), gradients, strict=True) if g is not None}
    assert found == {"always.weight"}
    model.requires_grad_(False)
    assert reference_gradient(model, loss, inputs, targets, list(model.parameters())) == [None] * 6


def test_works_where_gradients_are_off() -> None:
    model, (inputs, targets) = plain_model(), batch(4, dtype=torch.float64)
    parameters = list(model.parameters())
    expected = dense(reference_gradient(model, loss, inputs, targets, parameters))
    with torch.no_grad():
        assert torch.equal(dense(reference_gradient(model, loss, inputs, targets, parameters)), expected)


def test_autocast_covers_forward_pass_and_loss() -> None:
    model, (inputs, targets) = plain_model().float(), batch(4)
    seen: list[torch.dtype] = []

    def recording_loss(output: Tensor, expected: Tensor) -> Tensor:
        seen.append(output.dtype)
        value: Tensor = loss(output, expected)
        return value

    context = torch.autocast("cpu", torch.bfloat16)
    gradients = reference_gradient(model, recording_loss, inputs, targets, list(model.parameters()), autocast=context)
    reference_gradient(model, recording_loss, inputs, targets, list(model.parameters()))
    assert seen == [torch.bfloat16, torch.float32]
    assert dense(gradients).dtype == torch.float32


def test_loss_scale_saves_gradients_that_half_precision_would_lose() -> None:
    model, (inputs, targets) = plain_model().half(), batch(4, dtype=torch.float16)
    parameters = list(model.parameters())

    def tiny_loss(output: Tensor, expected: Tensor) -> Tensor:
        value: Tensor = loss(output.float(), expected) * 2.0**-24
        return value

    lost = dense(reference_gradient(model, tiny_loss, inputs, targets, parameters))
    kept = dense(reference_gradient(model, tiny_loss, inputs, targets, parameters, loss_scale=2.0**24))
    assert (kept != 0).sum() > (lost != 0).sum()


def test_loss_scale_does_not_change_the_gradient() -> None:
    model, (inputs, targets) = plain_model(), batch(4, dtype=torch.float64)
    parameters = list(model.parameters())
    plain = dense(reference_gradient(model, loss, inputs, targets, parameters))
    assert torch.equal(dense(reference_gradient(model, loss, inputs, targets, parameters, loss_scale=2.0**10)), plain)


@pytest.mark.gpu
def test_cuda_random_numbers_are_untouched() -> None:
    model, (inputs, targets) = stateful_model().cuda(), batch(8)
    before = torch.cuda.get_rng_state()
    reference_gradient(model, loss, inputs.cuda(), targets.cuda(), list(model.parameters()))
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_ddp_does_not_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP counts its gradient hooks and would complain of any that ran between its forward and backward pass."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    gradients = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        for peek in (False, True):
            ddp, (inputs, targets) = DistributedDataParallel(plain_model()), batch(4, dtype=torch.float64)
            for _ in range(2):
                value = loss(ddp(inputs), targets)
                if peek:
                    reference_gradient(ddp.module, loss, inputs[:2], targets[:2], list(ddp.parameters()))
                torch.autograd.backward(value)
            gradients.append(dense([p.grad for p in ddp.parameters()]))
    finally:
        dist.destroy_process_group()
    assert torch.equal(gradients[0], gradients[1])


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The observations of each of two workers, see `work`."""
    folder = tmp_path_factory.mktemp("workers")
    start_workers(WORKERS, work, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


@pytest.mark.processes
def test_workers_average_to_the_gradient_of_all_their_samples(workers: list[dict[str, Any]]) -> None:
    model, (inputs, targets) = plain_model(), batch(8, dtype=torch.float64)
    expected = dense(reference_gradient(model, loss, inputs, targets, list(model.parameters())))
    for worker in workers:
        torch.testing.assert_close(worker["average"], expected)
    assert torch.equal(workers[0]["average"], workers[1]["average"])


@pytest.mark.processes
def test_workers_agree_which_parameters_are_unused(workers: list[dict[str, Any]]) -> None:
    """Worker 0 uses a branch that worker 1 does not: the average counts zeros for worker 1."""
    for worker in workers:
        assert worker["found"] == [True, True, True, True, False, False]
    assert torch.equal(workers[0]["sometimes"], workers[1]["sometimes"])
    torch.testing.assert_close(workers[0]["sometimes"], workers[0]["sometimes alone"] / WORKERS)


def work(rank: int, folder: Path) -> None:
    """Run one worker: averages of a plain and of a branching model."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=WORKERS, timeout=timedelta(seconds=60)
    )
    seen: dict[str, Any] = {}
    inputs, targets = (part.chunk(WORKERS)[rank] for part in batch(8, dtype=torch.float64))
    model = plain_model()
    seen["average"] = dense(reference_gradient(model, loss, inputs, targets, list(model.parameters())))
    torch.manual_seed(0)
    branches, (x, y) = Branches(), batch(4)
    x[0, 0] = 1.0 if rank == 0 else -1.0
    gradients = reference_gradient(branches, loss, x, y, list(branches.parameters()))
    alone = torch.autograd.grad(loss(branches(x), y), branches.sometimes.weight, allow_unused=True)[0]
    seen["found"] = [gradient is not None for gradient in gradients]
    seen["sometimes"] = gradients[2]
    seen["sometimes alone"] = alone
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()
