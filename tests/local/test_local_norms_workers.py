"""Each worker's gradient norms with real workers over gloo: they are right, and DDP's results stay the same."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.examples.branches import Branches
from tests.forked import start_workers
from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.worker import Worker
from tula_hpc.env import WorkerEnvironment
from tula_hpc.gradients.norms import foreach_norms
from tula_hpc.gradients.reference_gradient import local_gradient
from tula_hpc.gradients.small_batch_norms import LocalNorms
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim.observer import StepObserver
from tula_hpc.records import Configuration

# not a power of two, so that an average computed in another way differs in the last bit
WORKERS = 3
BATCH, STEPS, STEPS_OF_WORKER = 6, 4, 10
OBSERVED = ("lbt", "lars", "static")
loss = nn.CrossEntropyLoss()


class Mixed(nn.Module):
    """Three layers of three types, which DDP keeps in three buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8).double(), nn.Linear(8, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)).double())).half())
        return out.float()


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


class Case(NamedTuple):
    """A model, the options of DDP, and how gradients are taken."""

    model: Callable[[], nn.Module] = plain
    options: dict[str, Any] = {}  # noqa: RUF012 # never changed
    # passes accumulated into one gradient
    passes: int = 1
    set_to_none: bool = True


CASES = {
    "plain": Case(),
    "many buckets": Case(options={"bucket_cap_mb": 1e-4}),
    "bucket views": Case(options={"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}),
    "zeroed": Case(set_to_none=False),
    "accumulated": Case(passes=2),
    "mixed types": Case(Mixed),
    "unused": Case(Branches, {"find_unused_parameters": True}),
    "unused, views": Case(Branches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "static graph": Case(options={"static_graph": True, "bucket_cap_mb": 1e-4}),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return a worker's batch, with which only rank 0 takes the second branch of `Branches`."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 4, generator=generator)
    inputs[0, 0] = 1.0 if rank == 0 else -1.0
    return inputs, torch.randint(3, (BATCH,), generator=generator)


def backward(ddp: DistributedDataParallel, step: int, rank: int, passes: int, scale: float = 1.0) -> None:
    for index in range(passes):
        inputs, targets = batch(step * passes + index, rank)
        with ddp.no_sync() if index < passes - 1 else nullcontext():
            torch.autograd.backward(loss(ddp(inputs), targets) * (scale / passes))


def new_ddp(case: Case) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(case.model(), **case.options)


def train(case: Case, rank: int, *, hook: bool) -> dict[str, Any]:
    """Train some steps; return the gradients and, with the hook, the norms and their expected values."""
    ddp = new_ddp(case)
    seen: dict[str, list[Any]] = {"gradients": [], "squares": [], "expected": [], "averaged": []}
    parameters = list(ddp.parameters())
    norms = LocalNorms(parameters, BATCH * case.passes)
    if hook:
        norms.attach(ddp)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(case.set_to_none)
        if hook:
            seen["expected"].append(expected_squares(ddp, step, rank, case.passes))
        backward(ddp, step, rank, case.passes)
        if hook:
            squares, samples = norms.squares()
            assert samples == BATCH * case.passes
            seen["squares"].append(squares)
            seen["averaged"].append(norms.averaged())
        seen["gradients"].append([None if p.grad is None else p.grad.clone() for p in parameters])
        optimizer.step()
    return seen


def expected_squares(ddp: DistributedDataParallel, step: int, rank: int, passes: int) -> Tensor:
    """Compute the mean of the workers' squared norms without DDP; NaN for a parameter that no worker used."""
    parameters = list(ddp.parameters())
    totals = [torch.zeros_like(p) for p in parameters]
    used = torch.zeros(len(parameters), dtype=torch.float64)
    for index in range(passes):
        found = local_gradient(ddp.module, loss, *batch(step * passes + index, rank), parameters)
        for place, gradient in enumerate(found):
            if gradient is not None:
                totals[place] += gradient / passes
                used[place] = 1.0
    squares = torch.stack([total.double().square().sum() for total in totals])
    for tensor in (squares, used):
        dist.all_reduce(tensor)
    return torch.where(used > 0, squares / WORKERS, math.nan)


def infinite(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, math.inf)


def scaled_and_overflown(rank: int) -> dict[str, Tensor]:
    """Return squared norms of the first step: plain, with a scaled loss, with one worker's bias gradient infinite."""
    seen = {}
    for name, scale in (("plain", 1.0), ("scaled", 1024.0), ("overflown", 1.0)):
        ddp = new_ddp(Case())
        parameters = list(ddp.parameters())
        norms = LocalNorms(parameters, BATCH).attach(ddp)
        if name == "overflown" and rank == 1:
            parameters[1].register_hook(infinite)  # type: ignore[no-untyped-call] # torch's
        backward(ddp, 0, rank, 1, scale)
        seen[name] = norms.squares(torch.tensor(scale))[0]
        seen[f"{name}, averaged"] = norms.averaged(torch.tensor(scale))
    return seen


def frozen_and_foreign(rank: int) -> Tensor:
    """Take norms for a list that has a frozen parameter, lacks one of the model's, and has another order."""
    torch.manual_seed(5)
    model = plain()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    norms = LocalNorms([*reversed(parameters[:-1])], BATCH).attach(ddp)
    backward(ddp, 0, rank, 1)
    return norms.squares()[0]


def only_sparse() -> list[Tensor]:
    """Return the norms of a model that has only sparse gradients."""
    ddp = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    norms = LocalNorms(list(ddp.parameters()), BATCH).attach(ddp)
    torch.autograd.backward(ddp(torch.tensor([1, 2])).sum())
    return [norms.squares()[0], norms.averaged()]


def uneven(rank: int, *, hook: bool) -> dict[str, list[Tensor]]:
    """Train under `Join`, where rank r has 1 + r batches; return the weights and the norms."""
    ddp = new_ddp(Case())
    norms, observed = LocalNorms(list(ddp.parameters()), BATCH), []
    if hook:
        norms.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            backward(ddp, step, rank, 1)
            observed += [norms.squares()[0], norms.averaged()] if hook else []
            optimizer.step()
    return {"weights": list(ddp.parameters()), "observed": observed}


def of_another_model(rank: int) -> list[str]:
    """Return the errors for a second model, and for the gradient of a parameter that DDP ignores."""
    ddp = new_ddp(Case())
    norms = LocalNorms(list(ddp.parameters()), BATCH).attach(ddp)
    twice = refused(lambda: norms.attach(new_ddp(Case())))
    model = plain()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])  # type: ignore[no-untyped-call]
    ignoring = DistributedDataParallel(model)
    norms = LocalNorms(list(model.parameters()), BATCH).attach(ignoring)
    backward(ignoring, 0, rank, 1)
    return [twice, refused(norms.averaged)]


def shared_buffers(rank: int) -> list[Tensor]:
    """Return a worker's buffers, one of them a view with gaps, after all have been set to the first worker's."""
    model = nn.Module()
    model.register_buffer("whole", torch.full((4,), float(rank)))
    model.register_buffer("view", torch.full((8,), float(rank))[::2])
    worker: Any = mock.Mock(model=model, env=mock.Mock(world_size=WORKERS))
    Worker.share_buffers(worker)
    return list(model.buffers())


def exchanged(rank: int) -> list[int]:
    """Return how many numbers each step sends in addition to gradients; only they are float64."""
    ddp, sizes, all_reduce = new_ddp(Case()), [], dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.extend([tensor.numel()] if tensor.dtype is torch.float64 else [])
        return all_reduce(tensor, *arguments, **options)

    norms = LocalNorms(list(ddp.parameters()), BATCH).attach(ddp)
    dist.all_reduce = counted
    for step in range(STEPS):
        backward(ddp, step, rank, 1)
        norms.squares()
    dist.all_reduce = all_reduce
    return sizes


def misuse(rank: int) -> list[str]:
    """Return the errors for reading norms when there are none."""
    ddp, errors = new_ddp(Case()), []
    norms = LocalNorms(list(ddp.parameters()), BATCH).attach(ddp)
    for _ in range(2):
        errors += [refused(norms.squares), refused(norms.averaged)]
        backward(ddp, 0, rank, 1)
        norms.squares()
        norms.averaged()
    with ddp.no_sync():
        torch.autograd.backward(loss(ddp(batch(0, rank)[0]), batch(0, rank)[1]))
    return [*errors, refused(norms.squares), refused(norms.averaged)]


def while_waiting(rank: int) -> list[Tensor]:
    """Return the gradients at the time when norms of the averages are taken; DDP copies the averages to them later."""
    ddp = new_ddp(Case())
    seen: list[Tensor] = []
    norms = LocalNorms(list(ddp.parameters()), BATCH).attach(ddp)
    take = norms._finish

    def spied() -> None:
        seen.extend(p.grad.clone() for p in ddp.parameters() if p.grad is not None)
        take()

    with (
        mock.patch.object(norms, "_finish", spied),
        mock.patch("tula_hpc.gradients.small_batch_norms._first") as in_gloos_thread,
    ):
        backward(ddp, 0, rank, 1)
    in_gloos_thread.assert_not_called()
    return seen


def refused(read: Callable[[], object]) -> str:
    try:
        read()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"


def train_worker(rank: int, method: str, *, informed: bool = True) -> dict[str, Any]:
    """Train a whole worker; it passes the norms of the whole batch to the optimizer only if `informed`."""
    workload = {"model": "tests.examples.own_workload:perceptron", "dataset": "digits", "loader_workers": 0, "lr": 0.05}
    training = {"method": method, "small_batch": 5, "granularity": "tensor", "reference": "free", "clip_norm": 1.0}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False)
    worker = Worker(spec, ClusterSpec(), Configuration(WORKERS, 1, 16), env)
    # discarded, as the trainer does before it restores
    worker.forward_backward(*next(worker.batches()))
    with ExitStack() as stack:
        taken = stack.enter_context(mock.patch("tula_hpc.optim.optimizer.foreach_norms", wraps=foreach_norms))
        if not informed:
            stack.enter_context(mock.patch.object(TulaOptimizer, "observe_norms"))
        losses = [float(worker.train_step(*pair)) for pair in islice(worker.batches(), STEPS_OF_WORKER)]
    assert isinstance(worker.optimizer, TulaOptimizer)
    return {
        "losses": losses,
        "weights": torch.cat([p.detach().flatten() for p in worker.parameters]),
        "factors": [factor is not None for factor in worker.optimizer.gradscale],
        "small_batch": worker.optimizer.small_batch,
        "update_due": worker.optimizer.update_due,
        "noise": worker.optimizer.noise().noise_scale,
        "taken": taken.call_count,
        "statistics": list(worker.optimizer.statistics()),
    }


def train_observed(rank: int, method: str, *, observe: bool) -> dict[str, Any]:
    """Train a worker whose method does not adapt to gradients; return its results and what the observer saw."""
    workload = {"model": "tests.examples.own_workload:perceptron", "dataset": "digits", "loader_workers": 0, "lr": 0.05}
    training = {"method": method, "observe_gradients": observe, "clip_norm": 1.0}
    spec = SweepSpec.model_validate({"name": "x", "workload": workload, "training": training})
    env = WorkerEnvironment(rank, WORKERS, 0, rank, "1", 0, ("here",), on_slurm=False)
    worker = Worker(spec, ClusterSpec(), Configuration(WORKERS, 1, 16), env)
    worker.forward_backward(*next(worker.batches()))
    losses = [float(worker.train_step(*pair)) for pair in islice(worker.batches(), STEPS_OF_WORKER)]
    watch, seen = worker.observer, None
    if isinstance(watch, StepObserver):
        seen = (list(watch.step_metrics(1).values())[:2], list(watch.noise()))
    weights, kept = torch.cat([p.detach().flatten() for p in worker.parameters]), weakref.ref(worker.model)
    worker.release()
    del worker
    gc.collect()
    return {"losses": losses, "weights": weights, "seen": seen, "freed": kept() is None}


def work(rank: int, folder: Path) -> None:
    """Run one worker: every case with and without the hook."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=WORKERS, timeout=timedelta(seconds=60)
    )
    seen: dict[str, Any] = {
        name: {"with": train(case, rank, hook=True), "without": train(case, rank, hook=False)}
        for name, case in CASES.items()
    }
    seen["first step"] = scaled_and_overflown(rank)
    seen["frozen"] = frozen_and_foreign(rank)
    seen["uneven"] = [uneven(rank, hook=hook) for hook in (False, True)]
    seen["of another model"] = of_another_model(rank)
    seen["buffers"] = shared_buffers(rank)
    seen["exchanged"] = exchanged(rank)
    seen["only sparse"] = only_sparse()
    seen["errors"] = misuse(rank)
    seen["while waiting"] = while_waiting(rank)
    seen["worker"] = {method: train_worker(rank, method) for method in ("ags", "adascale")}
    seen["uninformed"] = {method: train_worker(rank, method, informed=False) for method in ("ags", "adascale")}
    for method in OBSERVED:
        for observe in (True, False):
            seen[f"{method}, observed: {observe}"] = train_observed(rank, method, observe=observe)
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each worker recorded."""
    folder = tmp_path_factory.mktemp("workers")
    start_workers(WORKERS, work, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORKERS)]


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_ddp_without_the_hook_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    for seen in ranks:
        pairs = zip(seen[name]["with"]["gradients"], seen[name]["without"]["gradients"], strict=True)
        assert all(same(mine, theirs) for mine, theirs in pairs)


def test_a_worker_without_data_leaves_the_others_no_norms_and_the_same_training(ranks: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(ranks):
        without, with_hook = seen["uneven"]
        assert same(without["weights"], with_hook["weights"])
        assert same(with_hook["weights"], ranks[0]["uneven"][1]["weights"])
        assert [squares.isnan().any().item() for squares in with_hook["observed"]] == [False, False] + rank * [
            True,
            False,
        ]


def test_norms_are_of_one_model_and_of_all_its_gradients(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        twice, ignored = seen["of another model"]
        assert twice == "these norms belong to a model already: a second one needs LocalNorms of its own"
        assert ignored == "averaged: the gradient of parameter 1 was not averaged with this model's"


def test_buffers_are_the_first_workers_whatever_their_strides(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert same(seen["buffers"], [torch.zeros(4), torch.zeros(4)])


@pytest.mark.parametrize("name", CASES)
def test_squares_are_the_mean_of_the_workers_own_norms(ranks: list[dict[str, Any]], name: str) -> None:
    """This holds at every step, although DDP regroups its buckets after the first."""
    tolerance = 2e-3 if name == "mixed types" else 1e-5
    for seen in ranks:
        for squares, expected in zip(seen[name]["with"]["squares"], seen[name]["with"]["expected"], strict=True):
            torch.testing.assert_close(squares.double(), expected, rtol=tolerance, atol=1e-12, equal_nan=True)
        for mine, theirs in zip(seen[name]["with"]["squares"], ranks[0][name]["with"]["squares"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_norms_of_the_averages_are_those_of_the_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    tolerance = 1e-5 if name == "mixed types" else 1e-6
    for seen in ranks:
        for averaged, found in zip(seen[name]["with"]["averaged"], seen[name]["with"]["gradients"], strict=True):
            squares = [math.nan if g is None else float(g.double().square().sum()) for g in found]
            expected = torch.tensor(squares, dtype=torch.float64)
            torch.testing.assert_close(averaged, expected, rtol=tolerance, atol=1e-12, equal_nan=True)


def test_norms_of_the_averages_are_taken_before_ddp_waits_for_them_all(ranks: list[dict[str, Any]]) -> None:
    """At that time each worker still has its own gradients; DDP's later result is their mean."""
    own = zip(*(seen["while waiting"] for seen in ranks), strict=True)
    averaged = ranks[0]["plain"]["without"]["gradients"][0]
    for gradients, average in zip(own, averaged, strict=True):
        assert not torch.equal(gradients[0], gradients[1])
        torch.testing.assert_close(torch.stack(gradients).mean(0), average)


def test_a_parameter_that_nobody_used_has_no_norm(ranks: list[dict[str, Any]]) -> None:
    for name in ("unused", "unused, views"):
        for squares in ranks[1][name]["with"]["squares"]:
            assert squares.isnan().tolist() == [False] * 4 + [True] * 2


def test_the_loss_scale_is_divided_out(ranks: list[dict[str, Any]]) -> None:
    for what in ("", ", averaged"):
        torch.testing.assert_close(ranks[0]["first step"]["scaled" + what], ranks[0]["first step"]["plain" + what])


def test_one_workers_overflow_leaves_that_tensor_alone_without_a_norm_on_all(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        squares, expected = seen["first step"]["overflown"], seen["first step"]["plain"]
        assert squares.isnan().tolist() == [place == 1 for place in range(len(expected))]
        assert torch.equal(squares[2:], expected[2:])
        assert seen["first step"]["overflown, averaged"].isfinite().tolist() == squares.isfinite().tolist()


def test_squares_come_in_the_order_that_was_asked_for(ranks: list[dict[str, Any]]) -> None:
    expected = ranks[0]["first step"]["plain"]
    squares = ranks[0]["frozen"]
    assert squares[-1].isnan()
    torch.testing.assert_close(squares[:-1], expected[1:-1].flip(0))


def test_sparse_gradients_have_no_norms(ranks: list[dict[str, Any]]) -> None:
    assert [squares.isnan().tolist() for squares in ranks[0]["only sparse"]] == [[True], [True]]


def test_one_number_a_parameter_is_sent_at_every_step(ranks: list[dict[str, Any]]) -> None:
    """Parameters without a gradient send a number, too."""
    assert ranks[0]["exchanged"] == [6 + 1] * STEPS


def test_nothing_is_read_twice_nor_without_an_all_reduce(ranks: list[dict[str, Any]]) -> None:
    assert len(ranks[0]["errors"]) == 6
    assert all("no backward pass with an all-reduce" in words for words in ranks[0]["errors"])


@pytest.mark.parametrize("method", ["ags", "adascale"])
def test_a_worker_trains_with_it_and_takes_no_pass(ranks: list[dict[str, Any]], method: str) -> None:
    first = ranks[0]["worker"][method]
    for seen in ranks:
        mine = seen["worker"][method]
        assert torch.equal(mine["weights"], first["weights"])
        assert all(mine["factors"])
        assert not mine["update_due"]
        assert mine["noise"] > 0
    assert sum(first["losses"][-3:]) < sum(first["losses"][:3])


@pytest.mark.parametrize("method", ["ags", "adascale"])
def test_norms_that_came_with_the_all_reduce_are_not_taken_again(ranks: list[dict[str, Any]], method: str) -> None:
    """The results equal those with norms that the optimizer computes itself, with gradients clipped in between."""
    informed = ranks[0]["worker"][method]
    uninformed = ranks[0]["uninformed"][method]
    assert (informed["taken"], uninformed["taken"]) == (0, STEPS_OF_WORKER)
    for name in ("weights", "losses", "statistics", "noise"):
        torch.testing.assert_close(informed[name], uninformed[name], rtol=1e-5, atol=1e-7)


def test_the_reference_batch_is_what_was_asked_for_and_no_multiple_of_the_workers(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["worker"]["ags"]["small_batch"] == 5


@pytest.mark.parametrize("method", OBSERVED)
def test_a_training_that_is_observed_is_the_same_bit_for_bit(ranks: list[dict[str, Any]], method: str) -> None:
    for seen in ranks:
        with_it, without = (seen[f"{method}, observed: {observe}"] for observe in (True, False))
        assert torch.equal(with_it["weights"], without["weights"])
        assert with_it["losses"] == without["losses"]
        assert without["seen"] is None
        assert with_it["freed"]
        assert without["freed"]
        (sensitivity, norm), (noise_scale, *_) = with_it["seen"]
        assert min(sensitivity, norm, noise_scale) > 0
        assert with_it["seen"] == ranks[0][f"{method}, observed: True"]["seen"]
