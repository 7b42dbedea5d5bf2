"""Where steps begin and end as hooks see them; each case runs in its own process, since hooks are permanent."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.benchmarks import hooks_cost
from tests.forked import start_workers
from tula_hpc.attach.hooks.find_model import as_wrapped, model_of, name_of, parameters_of, trained_in
from tula_hpc.attach.hooks.passes import FEW_STEPS, Listener, Source
from tula_hpc.attach.hooks.step_hooks import MOST_AWAITED, Hooks
from tula_hpc.batches import LoaderPass, samples_in

# limit for Python calls in a watched step of a plain loop, including calls that the hooks cause in torch
MOST_CALLS = 24


class Recorder(Listener):
    """A listener that records the calls of the hooks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def loading_begins(self, loader: object) -> None:
        self.calls.append("begin")

    def batch_loaded(self, loader: object, waited_s: float) -> None:
        self.calls.append("batch")

    def evaluating(self) -> None:
        self.calls.append("evaluation")

    def forward_begins(self, samples: int) -> None:
        self.calls.append(f"forward {samples}")

    def pass_unused(self, samples: int) -> None:
        self.calls.append(f"unused {samples}")

    def gradients_ready(self) -> None:
        self.calls.append("ready")

    def step_ends(self) -> None:
        self.calls.append("step")

    def partner_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("partner")

    def trains_anew(self, missed: int = 0) -> bool:
        self.calls.append(f"again {missed}")
        return self.calls.count("step") < 5

    def begins_anew(self) -> None:
        self.calls.append("anew")

    def refuse(self, why: str) -> None:
        self.calls.append(f"refused: {why}")


def backward(model: nn.Module, batch: int, width: int = 4) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(batch, width)).square().mean()
    torch.autograd.backward(loss)
    return loss


def known() -> tuple[nn.Linear, torch.optim.SGD]:
    """Return an unwrapped model and its optimizer after a first step, by which the hooks know them."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model, 1)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"batch_size": 4}, 6),
        ({"batch_size": 4, "drop_last": True}, None),
        ({"batch_size": 1}, None),
        ({"batch_size": None}, None),
    ],
)
def test_a_loader_tells_what_it_gives_out_where_its_last_batch_may_be_shorter(
    options: dict[str, Any], samples: int | None
) -> None:
    data = TensorDataset(torch.zeros(6))
    sampler: Sampler[int] = DistributedSampler(data, 1, 0)
    assert LoaderPass(iter(DataLoader(data, sampler=sampler, **options))).given_out == samples


class Endless(Sampler[int]):
    """A sampler without an end, as in detectron2 and other trainings that count iterations."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Repeated(Sampler[int]):
    """A sampler that draws another number of samples than there are, as DeiT's does."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, 0, 1])

    def __len__(self) -> int:
        return 3


class SingleStart:
    """A loader that is started only once, as in YOLOv5 and timm."""

    def __init__(self, sampler: BatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler


def test_an_epoch_is_what_the_sampler_draws() -> None:
    data = TensorDataset(torch.zeros(8))
    repeated = DataLoader(data, batch_sampler=SingleStart(BatchSampler(range(8), 2, False)))
    # minGPT's sampler, which only claims to have an end
    mingpt = RandomSampler(data, replacement=True, num_samples=10**10)
    samplers = (Repeated(), Endless(), mingpt)
    loaders = [*(DataLoader(data, 2, sampler=sampler) for sampler in samplers), repeated]
    assert [LoaderPass(iter(loader)).drawn for loader in loaders] == [3, 0, 0, 8]


class Buckets(list[list[int]]):
    """Batches of items of similar length, as DeepSpeech's sampler makes them; some come twice, for equal numbers."""

    batch_size = 4


@pytest.mark.parametrize(("samples", "expected"), [(32, 32), (30, 32), (25, 32), (24, 24), (40, 40)])
def test_an_epoch_has_all_batches_of_a_sampler_that_fills_up_the_last_ones(samples: int, expected: int) -> None:
    """A step or more apart, they are different samples, and the sweep's number counts."""
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_sampler=Buckets([[0, 1, 2, 3]] * 4))
    assert LoaderPass(iter(loader)).epoch(samples, 8, 2) == (expected, 8)


@pytest.mark.parametrize(("size", "is_begun", "expected"), [(3, False, 18), (1, False, 40), (3, True, 40)])
def test_an_epoch_over_less_data_ends_with_its_pass_though_its_last_batch_is_left_out(
    size: int, is_begun: bool, expected: int
) -> None:
    """As in a curriculum, whose data set grows. A batch of one item may itself be a batch.

    A script that goes on within an epoch may have the epoch's other batches in its loader alone.
    """
    loader = DataLoader(TensorDataset(torch.zeros(10)), size, drop_last=True)
    assert LoaderPass(iter(loader)).epoch(40, 6, 2, is_begun=is_begun) == (expected, 6)


def test_a_worker_has_its_share_of_a_batch_that_accelerate_splits() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed here")
    data = TensorDataset(torch.zeros(8))
    shard = accelerate.BatchSamplerShard(BatchSampler(range(8), 4, False), 2, 1, split_batches=True)
    loader = iter(DataLoader(data, batch_sampler=shard))
    assert [LoaderPass(loader).items_in(batch, 1) for batch in loader] == [2, 2]


@pytest.mark.parametrize(("drops_last", "least"), [(False, 1), (True, 8)])
def test_the_rest_of_an_epoch_ends_as_all_of_it_where_accelerate_skips_its_first_batches(
    drops_last: bool, least: int
) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed here")
    data = TensorDataset(torch.zeros(20))
    shard = accelerate.BatchSamplerShard(BatchSampler(range(20), 4, drops_last), 2, 0)
    rest = iter(DataLoader(data, batch_sampler=accelerate.SkipBatchSampler(shard, 1)))
    assert LoaderPass(rest).epoch(20, 8, 2) == (20, least)


def test_batches_that_were_cut_beforehand_show_their_items() -> None:
    """As fairseq cuts them by their tokens, which may be a batch's first dimension."""
    batches = [[0, 1, 2], [3, 4]]
    loader = iter(DataLoader(TensorDataset(torch.zeros(5, 7)), batch_sampler=batches, collate_fn=steps_first))
    assert [LoaderPass(loader).items_in(batch, count) for count, batch in enumerate(loader, 1)] == [3, 2]


class Bins(Sampler[list[int]]):
    """Batches of items that fill up a number of tokens, as of axolotl's MultipackBatchSampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5]])


def in_a_row(items: list[tuple[Tensor]]) -> Tensor:
    return torch.cat([item[None] for (item,) in items])[None]


def steps_first(items: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([item for (item,) in items], 1)


IMAGE = {"image": torch.zeros(3, 2, 2)}


class ByIndex(Dataset[Any]):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return IMAGE


class OneAfterAnother(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return itertools.repeat(IMAGE)


@pytest.mark.parametrize(("samples", "expected"), [(4, "training"), (2, "other"), (3, "other")])
def test_the_last_of_several_loaders_with_as_many_items_gave_the_batch(samples: int, expected: str) -> None:
    """An evaluation's loader may have as many items; a batch that no loader gave counts for the last that gave any."""
    hooks = Hooks(Listener())
    sizes = {"training": 4, "other": 2, "evaluation": 4}
    loaders = {name: iter(DataLoader(TensorDataset(torch.zeros(8)), size)) for name, size in sizes.items()}
    for name in ("training", "evaluation", "training", "other"):
        hooks.next_batch(loaders[name], next(loaders[name]))
    hooks._before_forward(nn.Identity(), (torch.zeros(samples),), {})
    assert hooks.loader is loaders[expected]


@pytest.mark.parametrize(("asked", "expected"), [([3], 3), ([], 5)])
def test_a_batch_that_a_script_cuts_out_of_others_has_the_samples_that_were_asked_for(
    asked: list[int], expected: int
) -> None:
    """As webdataset does to mix batches.

    If nothing was asked for, the first dimension may count something else, such as a graph's nodes.
    """
    seen: list[int] = []

    class Asking(Listener):
        def asked(self) -> list[int]:
            return asked

        def forward_begins(self, samples: int) -> None:
            seen.append(samples)

    hooks = Hooks(Asking())
    loader = iter(DataLoader(TensorDataset(torch.zeros(10)), 5))
    for _ in range(2):
        hooks.next_batch(loader, next(loader))
    hooks._before_forward(nn.Identity(), (torch.zeros(3),), {})
    assert seen == [expected]


def test_batches_of_an_evaluation_past_the_wrapper_say_nothing_about_a_batch_of_graphs() -> None:
    """Only passes of the wrapper are seen, and the first dimension of joined graphs is that of their nodes."""
    seen: list[int] = []

    class Seeing(Listener):
        def forward_begins(self, samples: int) -> None:
            seen.append(samples)

    hooks = Hooks(Seeing())
    evaluation = DataLoader(TensorDataset(torch.zeros(20)), 10)
    graphs: Any = [torch.zeros(3, 4)] * 8
    training = iter(DataLoader(graphs, 4, collate_fn=torch.cat))
    for loader in (iter(evaluation), training):
        for batch in loader:
            hooks.next_batch(loader, batch)
    hooks._before_forward(nn.Identity(), ({"nodes": torch.zeros(12, 4)},), {})
    assert seen == [4]


def test_passes_without_gradients_over_the_batches_of_a_step_are_no_evaluation() -> None:
    """Contrastive losses over several parts compute features first, and then each part again with gradients."""
    calls: list[object] = []
    model = nn.Linear(1, 1)

    class CallListener(Listener):
        def forward_begins(self, samples: int) -> None:
            calls.append(samples)

        def evaluating(self) -> None:
            calls.append("evaluation")

    hooks = Hooks(CallListener())
    loader = DataLoader(TensorDataset(torch.zeros(16, 1)), 4)
    other = iter(DataLoader(TensorDataset(torch.zeros(64, 1)), 4))

    def given(loader: Any) -> Tensor:
        batch = next(loader)
        hooks.next_batch(loader, batch)
        inputs: Tensor = batch[0]
        return inputs

    for _ in range(2):
        training = iter(loader)
        for _ in range(2):
            parts = [given(training), given(training)]
            for is_again in (False, True):
                with torch.set_grad_enabled(is_again):
                    for part in parts:
                        hooks._before_forward(model, (part,), {})
        del training
        with torch.no_grad():
            hooks._before_forward(model, (given(other),), {})
    assert calls == [4, 4, 4, 4, "evaluation"] * 2


@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_items_without_an_end_are_counted_however_they_come(collate: Any, is_indexed: bool) -> None:
    if is_indexed:
        loader = iter(DataLoader(ByIndex(), 16, sampler=Endless(), collate_fn=collate))
    else:
        loader = iter(DataLoader(OneAfterAnother(), 16, collate_fn=collate))
    batch = next(loader)
    assert (LoaderPass(loader).items_in(batch, 1) or samples_in(batch)) == 16


class Lazy:
    """A placeholder, as in some libraries, which must not be asked for its class."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def plain() -> None:
    lazy = Lazy()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, 3)
        optimizer.step()
    with torch.no_grad():
        model(torch.randn(1, 4))
    model.eval()
    model(torch.randn(1, 4))
    assert type(lazy) is Lazy


def with_frozen_objects() -> None:
    """Exempt all objects from garbage collection before the first step, as scripts do that fork processes."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gc.freeze()
    for _ in range(2):
        backward(model, 3)
        optimizer.step()
    assert gc.get_freeze_count() > 0


class OwnSGD(torch.optim.SGD):
    """An optimizer of a script's own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_a_class_of_its_own() -> None:
    """Use an optimizer and one that is derived from its class: torch's hooks are around the steps of both classes."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    model = nn.Linear(4, 2)
    optimizer, bias = OwnSGD([model.weight], 0.1), OwnSGD([model.bias], 0.1)
    for _ in range(2):
        backward(model, 3)
        optimizer.step()
        bias.step()


def with_closures() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.step(lambda: backward(model, 3).item())


def with_two_optimizers() -> None:
    """Train as a GAN does; the smaller model steps first."""
    small, large = nn.Linear(4, 1), nn.Linear(4, 9)
    first, second = torch.optim.Adam(small.parameters()), torch.optim.SGD(large.parameters(), 0.1)
    for _ in range(2):
        for model, optimizer in ((small, first), (large, second)):
            backward(model, 5)
            optimizer.step()


def with_a_critic() -> None:
    """Train as a WGAN does: the critic steps several times before the larger generator does."""
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 9)
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.SGD(generator.parameters(), 0.1)
    for _ in range(2):
        for _ in range(5):
            backward(critic, 5)
            first.step()
        backward(generator, 5)
        second.step()


class Policy(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        return torch.distributions.Categorical(logits=super().forward(inputs))


def with_actions() -> None:
    """Compute gradients that no step uses, as in reinforcement learning."""
    policy = Policy(4, 2)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    for _ in range(2):
        actions = torch.stack([policy(torch.randn(4)[None]).sample()[0] for _ in range(2)])
        torch.autograd.backward(policy(torch.randn(2, 4)).log_prob(actions).sum())
        optimizer.step()


def with_actions_and_a_loader() -> None:
    """Train a policy several times on what it has done."""
    model, optimizer = known()
    for _ in range(2):
        done = torch.cat([model(torch.randn(2, 4)).detach() for _ in range(4)])
        for inputs, _ in DataLoader(TensorDataset(torch.randn(8, 4), done), 4):
            torch.autograd.backward(model(inputs).sum())
            optimizer.step()


def with_two_passes_and_a_batch_ahead() -> None:
    """Compare two passes over each batch, as R-Drop does, while accelerate or a Trainer has loaded the next one."""
    model, optimizer = known()
    iterator = iter(DataLoader(TensorDataset(torch.randn(6, 4)), 2))
    ahead = next(iterator)
    while ahead is not None:
        (inputs,), ahead = ahead, next(iterator, None)
        torch.autograd.backward((model(inputs) + model(inputs)).sum())
        optimizer.step()


def with_batches_in_one_row() -> None:
    """Join the items of each batch, by a process of the loader that is ahead."""
    model, optimizer = known()
    data = TensorDataset(torch.randn(6, 4))
    for batch in DataLoader(data, batch_sampler=Bins(), collate_fn=in_a_row, num_workers=1):
        torch.autograd.backward(model(batch).sum())
        optimizer.step()


def with_actions_later() -> None:
    """Act only later: after first steps without actions none are looked for, until a step has more passes."""
    model, optimizer = known()
    for step in range(FEW_STEPS + 2):
        for _ in range(2 if step >= FEW_STEPS else 0):
            assert bool(model._forward_hooks) == (step > FEW_STEPS)
            model(torch.randn(1, 4))
        torch.autograd.backward(model(torch.randn(2, 4)).sum())
        optimizer.step()


def with_two_stages() -> None:
    """Train two stages that both contribute to the loss."""
    model, optimizer = known()
    torch.autograd.backward(model(torch.randn(3, 4)).sum() * model(torch.randn(2, 4)).sum())
    optimizer.step()


def with_a_generator() -> None:
    """Make images for a WGAN's critic without a gradient; each time a batch is used up."""
    model, optimizer = known()
    for index, (_,) in enumerate(DataLoader(TensorDataset(torch.randn(6, 4)), 3)):
        made = model(torch.randn(3, 4))
        if index:
            torch.autograd.backward(made.sum())
            optimizer.step()


def with_a_teacher() -> None:
    """Use a teacher that is larger, wrapped and never frozen, but in no optimizer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    teacher, model = DistributedDataParallel(nn.Linear(4, 9)), DistributedDataParallel(nn.Linear(4, 9, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        inputs = torch.randn(3, 4)
        torch.autograd.backward((model(inputs) - teacher(inputs).detach()).square().mean())
        optimizer.step()


def with_parts_of_a_model() -> None:
    """Let two optimizers share a model: the first one's steps are the model's as soon as both are known."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.Adam(part.parameters()) for part in model]
    for _ in range(2):
        backward(model, 5)
        for optimizer in optimizers:
            optimizer.step()
    backward(model, 6)


def with_turns() -> None:
    """Train two networks of one wrapped module by turns, as a GAN does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizers = [torch.optim.Adam(part.parameters()) for part in model.module]
    for optimizer in 2 * optimizers:
        backward(model, 3)
        optimizer.step()


def with_partners() -> None:
    """Give a model's matrix and its bias optimizers of their own, one of which does not step each time."""
    model = nn.Linear(4, 2)
    matrix, bias = torch.optim.SGD([model.weight], 0.1), torch.optim.Adam([model.bias])
    backward(model, 3)
    matrix.step()
    bias.step()
    # as Lightning steps, with a closure that does nothing
    bias.step(lambda: 0.0)
    matrix.step()
    backward(model, 3)
    bias.step()
    matrix.step()
    bias.step()


def with_loaders() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for (inputs,) in DataLoader(TensorDataset(torch.randn(6, 4)), 3):
            torch.autograd.backward(model(inputs).sum())
            optimizer.step()


def with_an_iterator_for_each_batch() -> None:
    """Make an iterator for each batch, as trainings do that count steps; none of them begins an epoch."""
    model, optimizer = known()
    loader = DataLoader(TensorDataset(torch.randn(9, 4)), 3)
    for _ in range(3):
        (inputs,) = next(iter(loader))
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()
    # then by epochs
    for (inputs,) in itertools.chain(loader, loader):
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()


def with_batches_that_are_kept() -> None:
    """Keep the batches of a small data set, which the script loads once."""
    model, optimizer = known()
    loader = DataLoader(TensorDataset(torch.randn(9, 4)), 3)
    others = []
    for (inputs,) in 2 * list(loader):
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()
        # a look at another data set with batches of this size
        others.append(TensorDataset(torch.randn(9, 4)))
        model.eval()
        with torch.no_grad():
            model(next(iter(DataLoader(others[-1], 3)))[0])
        model.train()


def with_several_steps_on_a_batch() -> None:
    """Step several times on a batch, as a GAN's critic; before that, iterate over the data once."""
    model, optimizer = known()
    loader = DataLoader(TensorDataset(torch.randn(9, 4)), 3)
    torch.cat([inputs for (inputs,) in loader]).mean()
    for (inputs,) in loader:
        for _ in range(5):
            torch.autograd.backward(model(inputs).sum())
            optimizer.step()


def with_a_batch_used_twice() -> None:
    """Use a batch twice: a GAN's generator makes images for its own step and for that of the other optimizer."""
    generator, other = nn.Linear(4, 9), nn.Linear(9, 1)
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for model in (generator, other))
    for (inputs,) in DataLoader(TensorDataset(torch.randn(9, 4)), 3):
        for optimizer in (first, second):
            torch.autograd.backward(other(generator(inputs)).sum())
            optimizer.step()


def with_batches_in_parts() -> None:
    """Cut a loader's batch into parts, and take two batches for a step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.randn(8, 4)), 4):
        for part in inputs.split(2):
            torch.autograd.backward(model(part).sum())
        optimizer.step()
    for index, (inputs,) in enumerate(DataLoader(TensorDataset(torch.randn(4, 4)), 2)):
        torch.autograd.backward(model(inputs).sum())
        if index % 2:
            optimizer.step()


def with_two_views() -> None:
    """Take two views of each item in one pass, as SimCLR does; and stack single items to batches."""
    model, optimizer = known()
    pairs: Any = [((torch.randn(4), torch.randn(4)), 0)] * 5
    for views, _ in DataLoader(pairs, 3):
        torch.autograd.backward(model(torch.cat(views)).sum())
        optimizer.step()
    items = iter(DataLoader(TensorDataset(torch.randn(6, 4)), 1))
    torch.autograd.backward(model(torch.cat([next(items)[0] for _ in range(6)])).sum())
    optimizer.step()


class Detector(nn.Linear):
    def forward(self, images: Any, targets: Any = None) -> Any:
        return torch.stack([super(Detector, self).forward(image).sum() for image in images]).sum()


def with_lists_of_items() -> None:
    """Pass lists of items, as detectors do for images of different sizes."""
    model = Detector(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.autograd.backward(model([torch.randn(3, 4)]))
    optimizer.step()
    data: Any = [(torch.randn(3, size, 4), {"boxes": torch.randn(size, 4)}) for size in (5, 6, 7, 8, 9)]
    for images, targets in DataLoader(data, 2, collate_fn=lambda batch: tuple(zip(*batch, strict=True))):
        torch.autograd.backward(model([image.clone() for image in images], targets))
        optimizer.step()


def with_other_dimensions() -> None:
    """Use other first dimensions: joined graphs have their nodes first, and sequences may have their steps."""
    model, optimizer = known()
    data: Any = [torch.randn(size, 4) for size in (7, 8, 9, 7, 8)]
    for nodes in DataLoader(data, 4, collate_fn=torch.cat):
        torch.autograd.backward(model(nodes).sum())
        optimizer.step()
    # batches of an evaluation do not belong to the next step
    for _ in DataLoader(TensorDataset(torch.randn(2, 4)), 1):
        pass
    data = torch.randn(7, 5, 4)
    for sequences in DataLoader(data, 7):
        torch.autograd.backward(model(sequences.transpose(0, 1)).sum())
        optimizer.step()


def with_whole_batches_as_items() -> None:
    """Use items that are whole batches, as a recommender's data set makes; and a detector's single images."""
    model, optimizer = known()
    data: Any = [torch.randn(6, 4)] * 2
    for batch in DataLoader(data, 1, collate_fn=lambda items: items[0]):
        torch.autograd.backward(model(batch).sum())
        optimizer.step()
    data = [(torch.randn(3, 4), {"boxes": torch.randn(2, 4)})]
    detector = Detector(4, 9)
    second = torch.optim.SGD(detector.parameters(), 0.1)
    for _ in range(2):
        for images, targets in DataLoader(data, 1, collate_fn=lambda batch: tuple(zip(*batch, strict=True))):
            torch.autograd.backward(detector(list(images), targets))
            second.step()


def with_models_that_nothing_holds() -> None:
    """Train models that no variable holds, as the generators of a CycleGAN, which share an optimizer."""
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizer = torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)))
    for (inputs,) in DataLoader(TensorDataset(torch.randn(9, 4)), 3):
        torch.autograd.backward(models[1](models[0](inputs)).sum())
        optimizer.step()


class Box:
    """An object of a kind that is not looked into, as a detector's images with their mask."""

    def __init__(self, tensors: torch.Tensor) -> None:
        self.tensors = tensors


def with_objects_of_its_own() -> None:
    class Model(nn.Linear):
        def forward(self, box: Any) -> Any:
            return super().forward(box.tensors)

    model = Model(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data: Any = torch.randn(5, 4)
    for box in DataLoader(data, 3, collate_fn=lambda items: Box(torch.stack(items))):
        torch.autograd.backward(model(box).sum())
        optimizer.step()


def with_batches_ahead() -> None:
    """Fetch batches ahead: Hugging Face's Trainer those of a step, accelerate the next one before it gives one out."""
    model, optimizer = known()
    batches = iter(DataLoader(TensorDataset(torch.randn(8, 4)), 2))
    for _ in range(2):
        for (inputs,) in [next(batches), next(batches)]:
            torch.autograd.backward(model(inputs).sum())
        optimizer.step()
    batches = iter(DataLoader(TensorDataset(torch.randn(7, 4)), 3))
    ahead = next(batches)
    while ahead is not None:
        (inputs,), ahead = ahead, next(batches, None)
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()


@pytest.mark.parametrize(
    ("loaded", "passed", "is_whole"),
    [
        ((32, 8, 3), (4, 32, 3), True),
        ((32, 8, 3), (4, 8, 3), False),
        ((32, 32), (4, 32), False),
        ((32,), (4, 32), False),
    ],
)
def test_some_steps_of_sequences_with_time_first_are_a_whole_batch_and_no_part_that_was_cut(
    loaded: tuple[int, ...], passed: tuple[int, ...], is_whole: bool
) -> None:
    source = Source(items=32)
    source.note_first(torch.zeros(loaded))
    assert source.is_whole(torch.zeros(passed), passed[0], 32) == is_whole


def with_sequences_in_other_dimensions() -> None:
    """Join a batch's sequences in one row, or put their steps first, in the collation or in the loop.

    Both are a whole batch, even where one row, or the number of steps, divides the batch. The next batch is fetched
    ahead, as frameworks do; at last, the first batches of an epoch are dropped, to go on with the rest.
    """
    model, optimizer = known()
    data: Any = [torch.randn(2, 4) for _ in range(7)]
    in_one_row = DataLoader(data, 4, collate_fn=lambda items: {"inputs": torch.cat(items)[None]})
    steps_first = DataLoader(data, 4, collate_fn=lambda items: {"inputs": torch.stack(items, 1)})
    turned = DataLoader(data, 4, collate_fn=lambda items: {"inputs": torch.stack(items)})
    for loader in (in_one_row, steps_first, turned):
        batches = iter(loader)
        ahead = next(batches)
        while ahead is not None:
            batch, ahead = ahead, next(batches, None)
            inputs = batch["inputs"].transpose(0, 1) if loader is turned else batch["inputs"]
            torch.autograd.backward(model(inputs).sum())
            optimizer.step()
    *_, last = DataLoader(data + data + data[:1], 4, collate_fn=lambda items: torch.cat(items)[None])
    torch.autograd.backward(model(last).sum())
    optimizer.step()


class Checkpointed(nn.Linear):
    """A model that computes its activations again in the backward pass, which contains another one."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)


def with_a_batch_ahead_of_the_first_step(by_closure: bool, kind: type[nn.Linear] = nn.Linear) -> None:
    """Fetch the next batch of a stream before the first step, as Lightning does, by a closure or by hand."""
    model = kind(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(DataLoader(TensorDataset(torch.randn(9, 4)), 3))
    ahead = next(batches)
    while ahead is not None:
        (inputs,), ahead = ahead, next(batches, None)
        if by_closure:
            optimizer.step(lambda inputs=inputs: torch.autograd.backward(model(inputs).sum()))
            continue
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()


def with_a_thread_that_loads() -> None:
    """Load in a thread, as prefetch_generator does: its waits are not those of the training."""
    model, optimizer = known()
    loaded: list[Any] = []
    thread = Thread(target=lambda: loaded.extend(DataLoader(TensorDataset(torch.randn(9, 4)), 3)))
    thread.start()
    thread.join()
    for (inputs,) in loaded:
        torch.autograd.backward(model(inputs).sum())
        optimizer.step()


def with_a_loader_for_evaluations_alone() -> None:
    """Use a loader for evaluations only, in a worker that gets its batches from another one."""
    model, optimizer = known()
    for _ in range(2):
        for (inputs,) in DataLoader(TensorDataset(torch.randn(3, 4)), 3):
            model.eval()(inputs)
        backward(model.train(), 3)
        optimizer.step()


def in_evaluation_mode() -> None:
    """Do not leave evaluation mode after an evaluation, until a later epoch; accumulate gradients."""
    model, optimizer = known()
    data = TensorDataset(torch.randn(12, 4))
    for epoch in range(3):
        model.train(epoch != 1)
        for number, (inputs,) in enumerate(DataLoader(data, 3)):
            torch.autograd.backward(model(inputs).sum())
            if number % 2:
                optimizer.step()
        # gradients are not switched off
        model.eval()(torch.randn(1, 4))


def with_a_loader_for_later_evaluations_alone() -> None:
    model, optimizer = known()
    for _ in range(2):
        for _ in range(3):
            backward(model, 3)
            optimizer.step()
        for _ in DataLoader(TensorDataset(torch.randn(6, 4)), 3):
            # the observed wrapper is not called
            pass


def with_a_search_for_a_rate() -> None:
    """Search for a rate and undo it; a further optimizer then comes too late, as its steps are not planned."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    begun = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        for _ in range(2):
            backward(model, 3)
            optimizer.step()
        optimizer.load_state_dict(begun)
    backward(model, 3)
    optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        backward(model, 3)
        optimizer.step()


def with_an_optimizer_for_each_round() -> None:
    """Train in rounds, as after self-play: only the first change may end a search, after which steps count anew."""
    model = nn.Linear(4, 2)
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            backward(model, 3)
            optimizer.step()


def with_the_end_by_lbfgs() -> None:
    """Finish with LBFGS, as many scientific trainings do, of which only the first part is observed."""
    model, optimizer = known()
    backward(model, 3)
    optimizer.step()
    last = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for _ in range(2):
        last.step(lambda: backward(model, 3))  # type: ignore[no-untyped-call] # torch's


def with_a_head_on_a_frozen_model() -> None:
    """Train a head on a frozen model, with an optimizer of its own from the beginning."""
    below, head = nn.Linear(4, 9), nn.Linear(9, 1)
    below.requires_grad_(False)
    first, second = torch.optim.SGD(head.parameters(), 0.1), torch.optim.SGD(below.parameters(), 0.1)
    for _ in range(2):
        backward(head, 3, 9)
        first.step()
    below.requires_grad_(True)
    for _ in range(2):
        backward(below, 3)
        second.step()


def with_a_second_training() -> None:
    """Train a second time, as for folds or repetitions: the first training counts."""
    for model in reversed([nn.Linear(4, 2), nn.Linear(4, 2)]):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            backward(model, 3)
            optimizer.step()


def with_several_loaders() -> None:
    """Take a batch of each loader, in separate passes or in one; from the second step on the first loader counts."""
    model, optimizer = known()
    tensors: list[Any] = [torch.randn(size, 4) for size in (8, 4, 6, 42)]
    for first, second in zip(DataLoader(tensors[0], 4), DataLoader(tensors[1], 2), strict=True):
        torch.autograd.backward(model(first).sum() + model(second).sum())
        optimizer.step()
    for few, many in zip(DataLoader(tensors[2], 2), DataLoader(tensors[3], 14), strict=True):
        torch.autograd.backward(model(torch.cat([few, many, many])).sum())
        optimizer.step()


class Frozen(nn.Module):
    """A stand-in for a large model of which only the adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> Any:
        for adapter in self.adapters:
            inputs = adapter(inputs)
        return self.head(inputs)


def with_frozen_parts() -> None:
    model = Frozen()
    optimizer = torch.optim.SGD(model.adapters.parameters(), 0.1)
    for _ in range(2):
        backward(model, 3)
        optimizer.step()


def with_a_schedule_shown_before() -> None:
    """Step an optimizer of nothing, as to draw a schedule of learning rates, before there is a model."""
    shown = torch.optim.SGD([torch.zeros(1)], 0.1)
    for _ in range(3):
        shown.step()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        backward(model, 3)
        optimizer.step()


def wrapped_again() -> None:
    """Wrap a model again, as a trainer does that begins again with a smaller batch."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = nn.Linear(4, 2)
    for wrapper in [DistributedDataParallel(model), DistributedDataParallel(model)][1:] * 2:
        optimizer = torch.optim.SGD(wrapper.parameters(), 0.1)
        backward(wrapper, 3)
        optimizer.step()


def names_of_wrapped(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Linear(4, 2))
    compiled = DistributedDataParallel(torch.compile(Wrapping()))
    hooks = Hooks(Listener(), "Wrapping")
    hooks._note_wrapped(compiled)
    assert hooks.model is compiled
    names = [model_of(torch.optim.SGD(model.parameters(), 0.1)), name_of(model.module), name_of(compiled)]
    (folder / "results.json").write_text(json.dumps(names))


def test_a_wrapped_model_has_the_name_that_the_script_has_for_it(tmp_path: Path) -> None:
    start_workers(1, names_of_wrapped, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == ["Linear", "Linear", "Wrapping"]


def wrapped() -> None:
    """Wrap a model, which is known before its first pass; frozen layers may be evaluated during training."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model, 3)
    optimizer.step()
    # Lightning sets only the wrapper's mode
    model.training = False
    backward(model, 3)
    optimizer.step()


def with_a_later_optimizer() -> None:
    """Use a later optimizer for all layers after the last ones; its first step may be within another's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)))
    for parameters in (model.module[1].parameters(), model.parameters()):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for _ in range(2):
            backward(model, 3)
            optimizer.step()
    backward(model, 3)
    optimizer.step()


class LayerByLayer(nn.Module):
    """A model that calls the trained layers, which a module of their own holds, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.trained:
            inputs = layer(inputs)
        return {"logits": self.frozen(inputs)}


class Both(nn.Module):
    """A module that holds a model and another one, which it calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.other = model, nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.other(inputs)


def with_layers_one_by_one() -> None:
    """Train some layers of a larger model, as LoRA does."""
    model = LayerByLayer()
    both = Both(model)
    optimizer = torch.optim.SGD(model.trained.parameters(), 0.1)
    for _ in range(3):
        both(torch.randn(1, 4))
        torch.autograd.backward(model(torch.randn(3, 4))["logits"].sum())
        optimizer.step()


class WithoutLength(nn.Linear):
    """A stand-in for what torch.compile returns."""

    def __len__(self) -> int:
        raise TypeError("Linear does not support len()")


def without_length() -> None:
    model = WithoutLength(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        backward(model, 3)
        optimizer.step()


def with_vmap() -> None:
    """Take the gradient of each sample by vmap, which shows the model one sample at a time."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(parameters: Any, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(model, parameters, (inputs.unsqueeze(0),))
        return outputs.sum()

    for (inputs,) in DataLoader(TensorDataset(torch.zeros(6, 4)), 3):
        gradients = vmap(grad(loss), (None, 0))(dict(model.named_parameters()), inputs)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name].mean(0)
        optimizer.step()


CASES: dict[str, tuple[Callable[[], None], str]] = {
    # a model without a wrapper is known from its first step on
    "plain": (plain, "ready step, forward 3 ready step, evaluation evaluation"),
    "with frozen objects": (with_frozen_objects, "ready step, forward 3 ready step"),
    "with a class of its own": (with_a_class_of_its_own, "ready step partner, forward 3 ready step partner"),
    "with vmap": (with_vmap, "begin batch ready step, batch forward 3 ready step"),
    "with closures": (with_closures, "forward 3 ready step, forward 3 ready step"),
    # the smaller model's steps do not count
    "with two optimizers": (with_two_optimizers, "ready step, forward 5 ready step"),
    "with a critic": (with_a_critic, "ready step, forward 5 ready step"),
    "with actions": (with_actions, "ready step, forward 1 forward 1 forward 2 unused 1 unused 1 ready step"),
    "with actions and a loader": (
        with_actions_and_a_loader,
        "ready step,"
        + 2
        * (4 * " forward 2" + " begin batch forward 4" + 4 * " unused 2" + " ready step, batch forward 4 ready step"),
    ),
    "with two passes and a batch ahead": (
        with_two_passes_and_a_batch_ahead,
        "ready step, begin batch batch forward 2 ready step, batch forward 2 ready step, forward 2 ready step",
    ),
    "with batches in one row": (
        with_batches_in_one_row,
        "ready step, begin begin batch forward 3 ready step, batch forward 1 ready step, batch forward 2 ready step",
    ),
    "with layers one by one": (with_layers_one_by_one, "ready step, forward 3 ready step, forward 3 ready step"),
    "with actions later": (
        with_actions_later,
        "ready step,"
        + FEW_STEPS * " forward 2 ready step"
        + " forward 1 forward 1 forward 2 unused 1 ready step"
        + " forward 1 forward 1 forward 2 unused 1 unused 1 ready step",
    ),
    "with two stages": (with_two_stages, "ready step, forward 3 forward 2 ready step"),
    "with a generator": (with_a_generator, "ready step, begin batch forward 3 batch forward 3 ready step"),
    "with a teacher": (with_a_teacher, "forward 3 anew ready step, forward 3 ready step"),
    "with parts of a model": (with_parts_of_a_model, "ready step, anew ready step partner, forward 6"),
    "with turns": (with_turns, "forward 3 ready step, forward 3 forward 3 ready step, forward 3"),
    "with partners": (with_partners, "ready step partner partner, ready step, forward 3 ready step partner"),
    "with loaders": (
        with_loaders,
        "begin batch ready step, batch forward 3 ready step, "
        "begin batch forward 3 ready step, batch forward 3 ready step",
    ),
    "with an iterator for each batch": (
        with_an_iterator_for_each_batch,
        "ready step, begin" + 6 * " batch forward 3 ready step," + " begin" + 3 * " batch forward 3 ready step,",
    ),
    "with batches that are kept": (
        with_batches_that_are_kept,
        "ready step, begin batch batch batch" + 6 * " forward 3 ready step, begin batch evaluation",
    ),
    "with several steps on a batch": (
        with_several_steps_on_a_batch,
        "ready step, begin batch batch batch, begin" + 3 * (" batch forward 3" + 5 * " ready step,"),
    ),
    "with a batch used twice": (
        with_a_batch_used_twice,
        "begin batch ready step, batch forward 3 ready step, batch forward 3 ready step",
    ),
    "with batches in parts": (
        with_batches_in_parts,
        "begin batch ready step, batch forward 2 forward 2 ready step, "
        "begin batch forward 2 batch forward 2 ready step",
    ),
    "with two views": (
        with_two_views,
        "ready step, begin batch forward 3 ready step, batch forward 2 ready step, "
        "begin batch batch batch batch batch batch forward 6 ready step",
    ),
    "with lists of items": (
        with_lists_of_items,
        "ready step, begin batch forward 2 ready step, batch forward 2 ready step, batch forward 1 ready step",
    ),
    "with other dimensions": (
        with_other_dimensions,
        "ready step, begin batch forward 4 ready step, batch forward 1 ready step, "
        "begin batch batch begin batch forward 7 ready step",
    ),
    "with whole batches as items": (
        with_whole_batches_as_items,
        "ready step, begin batch forward 6 ready step, batch forward 6 ready step, "
        "begin batch anew ready step, begin batch forward 1 ready step",
    ),
    "with models that nothing holds": (
        with_models_that_nothing_holds,
        "begin batch ready step, batch forward 3 ready step, batch forward 3 ready step",
    ),
    "with objects of its own": (with_objects_of_its_own, "begin batch ready step, batch forward 2 ready step"),
    "with batches ahead": (
        with_batches_ahead,
        "ready step, begin batch batch forward 2 forward 2 ready step, batch batch forward 2 forward 2 ready step, "
        "begin batch batch forward 3 ready step, batch forward 3 ready step, forward 1 ready step",
    ),
    "with sequences in other dimensions": (
        with_sequences_in_other_dimensions,
        "ready step,"
        + 3 * " begin batch batch forward 4 ready step, forward 3 ready step,"
        + " begin batch batch batch batch forward 3 ready step",
    ),
    "with a batch ahead of the first step": (
        lambda: with_a_batch_ahead_of_the_first_step(by_closure=False),
        "begin batch batch ready step, batch forward 3 ready step, forward 3 ready step",
    ),
    "with a batch ahead of a first step with activation checkpoints": (
        lambda: with_a_batch_ahead_of_the_first_step(by_closure=False, kind=Checkpointed),
        "begin batch batch ready step, batch forward 3 ready step, forward 3 ready step",
    ),
    "with a batch ahead of the first closure": (
        lambda: with_a_batch_ahead_of_the_first_step(by_closure=True),
        "begin batch batch forward 3 ready step, batch forward 3 ready step, forward 3 ready step",
    ),
    "with a thread that loads": (with_a_thread_that_loads, "ready step, begin" + 3 * " forward 3 ready step,"),
    "with a loader for evaluations alone": (
        with_a_loader_for_evaluations_alone,
        "ready step," + 2 * " begin batch evaluation forward 3 ready step,",
    ),
    "in evaluation mode": (
        in_evaluation_mode,
        "ready step, begin"
        + 2 * " batch forward 3 batch forward 3 ready step,"
        # only the end of the first such step shows that its passes were of training
        + " evaluation begin batch evaluation batch evaluation forward 3 forward 3 ready step,"
        + " batch forward 3 batch forward 3 ready step, forward 1"
        + " begin batch forward 3 batch forward 3 unused 1 ready step,"
        + " batch forward 3 batch forward 3 ready step, evaluation",
    ),
    "with a loader for later evaluations alone": (
        with_a_loader_for_later_evaluations_alone,
        "ready step," + 2 * (3 * " forward 3 ready step," + " begin batch batch"),
    ),
    "with a search for a rate": (
        with_a_search_for_a_rate,
        "ready step, forward 3 ready step, again 0 forward 3 ready step, forward 3 ready step, again 0 "
        "forward 3 ready step, forward 3 forward 3 again 1",
    ),
    "with an optimizer for each round": (
        with_an_optimizer_for_each_round,
        "ready step, forward 3 ready step, forward 3 forward 3 again 1 anew ready step, "
        "forward 3 again 0 ready step, forward 3 ready step",
    ),
    "with the end by LBFGS": (with_the_end_by_lbfgs, "ready step, forward 3 ready step," + 4 * " forward 3"),
    "with a head on a frozen model": (
        with_a_head_on_a_frozen_model,
        "ready step, forward 3 ready step, anew ready step, forward 3 ready step",
    ),
    "with a second training": (with_a_second_training, "ready step, forward 3 ready step"),
    "with several loaders": (
        with_several_loaders,
        "ready step, begin begin batch batch forward 4 forward 2 ready step, "
        "batch batch forward 4 ready step, begin begin "
        "batch batch forward 14 ready step, batch batch forward 2 ready step, batch batch forward 2 ready step",
    ),
    "with frozen parts": (with_frozen_parts, "ready step, forward 3 ready step"),
    "with a schedule shown before": (with_a_schedule_shown_before, "ready step, forward 3 ready step"),
    "with a later optimizer": (
        with_a_later_optimizer,
        "forward 3 ready step, forward 3 ready step, forward 3 forward 3 again 1 anew ready step, forward 3 ready step",
    ),
    "without length": (without_length, "ready step, forward 3 ready step"),
    "wrapped again": (wrapped_again, "forward 3 ready step, forward 3"),
    "wrapped": (wrapped, "forward 3 ready step, forward 3 ready step"),
}


def record_calls(case: str, rank: int, folder: Path) -> None:
    listener = Recorder()
    Hooks(listener).install()
    CASES[case][0]()
    (folder / "results.json").write_text(json.dumps(listener.calls))


class Case:
    """A case that a process can run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, folder: Path) -> None:
        record_calls(self.name, rank, folder)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_reported_in_order(name: str, tmp_path: Path) -> None:
    start_workers(1, Case(name), tmp_path)
    calls = json.loads((tmp_path / "results.json").read_text())
    assert " ".join(calls) == CASES[name][1].replace(",", "")


def count_further(rank: int, folder: Path) -> None:
    hooks = Hooks(Listener()).install()
    with_a_second_training()
    (folder / "results.json").write_text(str(hooks.further_steps))


def test_steps_of_further_trainings_are_counted_apart(tmp_path: Path) -> None:
    start_workers(1, count_further, tmp_path)
    assert (tmp_path / "results.json").read_text() == "2"


def count_searches(rank: int, folder: Path) -> None:
    Hooks(Listener()).install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    models = [DistributedDataParallel(nn.Linear(4, size)) for size in (1, 8)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(MOST_AWAITED + 2):
        optimizers[0].step()
    with mock.patch("gc.get_objects", wraps=gc.get_objects) as search:
        for _ in range(10):
            optimizers[0].step()
    (folder / "results.json").write_text(str(search.call_count))


def test_objects_are_not_searched_at_every_step_of_a_model_before_the_largest_wrapped_one(tmp_path: Path) -> None:
    start_workers(1, count_searches, tmp_path)
    assert (tmp_path / "results.json").read_text() == "0"


def count_calls(rank: int, folder: Path) -> None:
    watch = hooks_cost.Watch(folder, 2)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = hooks_cost.endless(DataLoader(TensorDataset(torch.zeros(128, 4), torch.zeros(128, dtype=torch.long)), 2))
    for _ in range(32):
        hooks_cost.step(batches, model, optimizer)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        # including calls that Python's own libraries make for them
        callers = (frame, frame.f_back)
        is_own = any("/tula_hpc/" in each.f_code.co_filename for each in callers if each is not None)
        if event == "call" and is_own:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    hooks_cost.step(batches, model, optimizer)
    sys.setprofile(None)
    (folder / "results.json").write_text(json.dumps([watch.training.steps, calls]))


def test_a_step_like_those_before_takes_few_calls(tmp_path: Path) -> None:
    """Code that has left the processor's caches takes 2 to 3 µs a call, in a step that may take 9 ms."""
    start_workers(1, count_calls, tmp_path)
    steps, calls = json.loads((tmp_path / "results.json").read_text())
    assert steps == 33
    assert "step_ends" in calls
    assert len(calls) <= MOST_CALLS, calls


class Wrapping(nn.Module):
    """A model with its layers in an inner module, as in most scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.ReLU())

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def copied(rank: int, folder: Path) -> None:
    listener = Recorder()
    Hooks(listener).install()
    model, optimizer = known()
    copies = [copy.deepcopy(model)]
    torch.save(model, folder / "model.pt")
    copies.append(torch.load(folder / "model.pt", weights_only=False))
    listener.calls.clear()
    for each in (*copies, model):
        backward(each, 3)
    optimizer.step()
    results = [*listener.calls, b"tula" in (folder / "model.pt").read_bytes()]
    (folder / "results.json").write_text(json.dumps(results))


def test_a_script_may_copy_and_save_its_model_as_a_whole(tmp_path: Path) -> None:
    start_workers(1, copied, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == ["forward 3", "ready", "step", False]


@pytest.mark.parametrize(("asked", "samples"), [((8,), [8, 8]), ((5,), [5, 3]), ((), [5, 3])])
def test_with_time_as_the_first_dimension_samples_are_as_many_as_asked_for(asked: Any, samples: list[int]) -> None:
    calls: list[int] = []

    class AskedForSteps(Listener):
        def asked(self) -> Any:
            return asked

        def forward_begins(self, samples: int) -> None:
            calls.append(samples)

    hooks = Hooks(AskedForSteps())
    # the last batch of an epoch is shorter
    for steps in (5, 3):
        hooks._before_forward(nn.LSTM(2, 2), (torch.zeros(steps, 8, 2),), {})
    assert calls == samples


def count_around(rank: int, folder: Path) -> None:
    hooks = Hooks(Recorder(), "Wrapping").install()
    model, other = Wrapping(), nn.Linear(4, 9)
    for each in (other, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        backward(each, 3)
        optimizer.step()
    results = [hooks.optimizer is optimizer, name_of(hooks.model or other), [model_of(each) for each in hooks.others]]
    (folder / "results.json").write_text(json.dumps(results))


def test_a_model_counts_by_the_name_that_the_script_has_for_it(tmp_path: Path) -> None:
    start_workers(1, count_around, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == [True, "Wrapping", ["Linear"]]


class LightningModule(nn.Module):
    """A stand-in for Lightning's class, which is known by its name."""

    def __init__(self, trainer: object) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 2), nn.Linear(2, 1)
        self._trainer = trainer


def test_what_lightning_wraps_holds_all_models_of_its_module() -> None:
    """A single worker's steps are those of one model, while several workers wrap both."""
    whole = LightningModule(object())
    assert as_wrapped(whole.generator) is whole
    alone = LightningModule(None)
    assert as_wrapped(alone.generator) is alone.generator


def test_a_teacher_within_a_model_is_not_trained() -> None:
    model = nn.ModuleDict({"student": nn.Linear(4, 2), "teacher": nn.Linear(4, 9)})
    assert len(trained_in(model)) == 4
    optimizer = torch.optim.SGD(model["student"].parameters(), 0.1)
    assert set(trained_in(model)) == parameters_of(optimizer)


def test_a_wrapper_of_a_library_has_the_name_of_the_model_within() -> None:
    model = Wrapping()
    wrapper = nn.Module()
    wrapper._forward_module = model
    assert name_of(model) == "Wrapping"
    parallel = nn.DataParallel(wrapper)
    assert name_of(parallel) == "Wrapping"


@pytest.mark.parametrize(
    ("value", "samples"),
    [
        ((torch.zeros(5, 2),), 5),
        (({"input_ids": torch.zeros(7, 2)}, torch.zeros(3)), 7),
        (("text", [torch.tensor(1.0), torch.zeros(2)]), 2),
        ((1, "text"), 0),
    ],
)
def test_samples_are_the_first_dimension_of_the_first_tensor(value: Any, samples: int) -> None:
    assert samples_in(value) == samples
