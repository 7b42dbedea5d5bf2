"""A training that misbehaves in the way that its first argument names."""

from __future__ import annotations

import builtins
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tula_hpc.attach as tula
from tula_hpc.profiling.meters import MemoryMeter

BATCH = int(sys.argv[2])
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build(*, wrapped: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    if WORLD > 1:
        dist.init_process_group("gloo")
    model: nn.Module = nn.Linear(8, 4)
    if wrapped and WORLD > 1:
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def train(
    steps: int = 10**6, batch: int = BATCH, passes: int = 1, wrapped: bool = True, then: Callable[[int], object] = id
) -> None:
    model, optimizer = build(wrapped=wrapped)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(batch, 8)).square().mean().backward()
        optimizer.step()
        then(step)


def accumulates_more() -> None:
    """Accumulate gradients over more passes after the first iterations, as YOLO does."""
    model, optimizer = build()
    for step in itertools.count():
        optimizer.zero_grad()
        for _ in range(min(4, 1 + step // 12)):
            model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()


def feeds_a_critic() -> None:
    """Train a critic, as a WGAN does: its larger generator makes images without gradients for it."""
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (generator, critic)]
    loader = DataLoader(TensorDataset(torch.randn(2 * BATCH, 8)), BATCH)
    while True:
        for index, (inputs,) in enumerate(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with torch.no_grad():
                made = generator(inputs)
            (critic(inputs) - critic(made)).mean().backward()
            optimizers[1].step()
            if index == 1:
                critic(generator(inputs)).mean().backward()
                optimizers[0].step()


def finds_no_data() -> None:
    Path("no/such/data.pt").read_bytes()


def catches() -> None:
    model, optimizer = build()
    while True:
        try:
            model(torch.randn(BATCH, 8)).square().mean().backward()
            optimizer.step()
        except BaseException:  # noqa: BLE001 # that is what it does
            print("caught")


def changes_by_hand() -> None:
    """Change the weights without a torch optimizer, as scripts and libraries with an optimizer of their own do."""
    model, _ = build()
    while True:
        model.zero_grad()
        model(torch.randn(BATCH, 8)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.1)


def calls_its_closure() -> None:
    model, _ = build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    inputs = torch.randn(BATCH, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        return loss

    while True:
        optimizer.step(closure)  # type: ignore[no-untyped-call] # torch's


def has_sparse_gradients() -> None:
    model = nn.Embedding(12, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randint(12, (BATCH, 2))).square().mean().backward()
        optimizer.step()  # type: ignore[no-untyped-call] # torch's


class Sharded(nn.Linear):
    """A class with this name; the real one of torch.distributed.fsdp needs an accelerator."""


Sharded.__name__ = "FullyShardedDataParallel"


def trains(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()


def gives_batches(size: int | None = 1) -> None:
    """Train with a data set whose items are whole batches."""
    model, optimizer = build()
    data: Any = [torch.randn(BATCH, 8)] * 1000
    while True:
        for batch in DataLoader(data, size, collate_fn=lambda items: items[0] if size else items):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def takes_turns() -> None:
    """Train on several tasks, each with a data set of its own."""
    model, optimizer = build()
    sets = [TensorDataset(torch.randn(samples * BATCH, 8)) for samples in (1, 2)]
    while True:
        one, two = (iter(DataLoader(each, BATCH)) for each in sets)
        for batches in (two, one, two):
            optimizer.zero_grad()
            model(next(batches)[0]).square().mean().backward()
            optimizer.step()


def has_a_loss_of_two_passes() -> None:
    """Take two passes for one loss, as for points within and on a boundary, or for pairs."""
    model, optimizer = build()
    while True:
        optimizer.zero_grad()
        inner, outer = (model(torch.randn(samples, 8)) for samples in (BATCH, 2))
        loss = inner.square().mean() + outer.square().mean()
        loss.backward()
        optimizer.step()


def acts() -> None:
    """Act in an environment without torch.no_grad."""
    model, optimizer = build()
    while True:
        for _ in range(3):
            model(torch.randn(1, 8)).argmax()
        torch.autograd.backward(model(torch.randn(BATCH, 8)).square().mean())
        optimizer.step()


def looks_twice() -> None:
    """Take another pass before each step, as a script does that computes its own labels."""
    model, optimizer = build()
    while True:
        model.eval()
        with torch.no_grad():
            labels = model(torch.randn(BATCH, 8))
        model.train()
        torch.autograd.backward(nn.functional.mse_loss(model(torch.randn(BATCH, 8)), labels))
        optimizer.step()


class LayerByLayer(nn.Module):
    """A model whose layers are in a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class WithLoss(nn.Linear):
    """A model whose forward is never called."""

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias).square().mean()


def calls_a_method() -> None:
    """Train through another method than forward, as scripts of reinforcement learning do."""
    model = WithLoss(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        torch.autograd.backward(model.loss(torch.randn(BATCH, 8)))
        optimizer.step()


def calls_past_its_wrapper() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(WithLoss(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        torch.autograd.backward(model.module.loss(torch.randn(BATCH, 8)))
        optimizer.step()


class WithMode(nn.Linear):
    """A model that trains through a method that every module has."""

    def train(self, mode: bool = True) -> WithMode:
        return super().train(mode)


def calls_forward() -> None:
    model = WithMode(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        torch.autograd.backward(model.forward(torch.randn(BATCH, 8)).square().mean())
        optimizer.step()


def keeps_its_batch() -> None:
    """Train on a single batch, as in a first trial of a model."""
    model, optimizer = build()
    batch = next(iter(DataLoader(torch.randn(8 * BATCH, 8), BATCH)))  # type: ignore[arg-type] # as torch takes it
    while True:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def steps_twice() -> None:
    """Step on one loss and then on another of the same batch."""
    model, optimizer = build()
    while True:
        for batch in DataLoader(torch.randn(8 * BATCH, 8), BATCH):  # type: ignore[arg-type] # as torch takes it
            for power in (1, 2):
                optimizer.zero_grad()
                model(batch).abs().pow(power).mean().backward()
                optimizer.step()


def keeps_models_in_a_dict() -> None:
    """Train models that only a dict holds, as those of SpeechBrain; the dict is never called."""
    models = nn.ModuleDict({"large": nn.Linear(8, 4), "small": nn.Linear(4, 2)})
    optimizer = torch.optim.SGD(models.parameters(), 0.1)
    while True:
        models["small"](models["large"](torch.randn(BATCH, 8))).square().mean().backward()
        optimizer.step()


def trains_no_module(steps: int = 10**6) -> None:
    """Train parameters that no module holds, such as the points of a 3-D scene."""
    points = nn.Parameter(torch.randn(BATCH, 8))
    optimizer = torch.optim.Adam([points])
    for _ in range(steps):
        torch.autograd.backward(points.square().mean())
        optimizer.step()


def steps_before_its_model() -> None:
    """Train a few tensors, and draw a schedule with an optimizer of its own, before the model is made."""
    trains_no_module(steps=5)
    drawing = torch.optim.SGD([torch.zeros(1)])
    for _ in range(300):
        drawing.step()
    train()


def has_two_optimizers() -> None:
    """Train a small model with its own optimizer in addition to the large one, as a GAN does."""
    model, optimizer = build()
    small = nn.Linear(2, 2)
    other = torch.optim.Adam(small.parameters())
    while True:
        for parts in ((small, other, torch.randn(BATCH, 2)), (model, optimizer, torch.randn(BATCH, 8))):
            parts[0](parts[2]).square().mean().backward()
            parts[1].step()


def has_partners() -> None:
    """Give the bias an optimizer of its own, which steps slowly along with that of the weights."""
    model, _ = build()
    weight, bias = model.parameters()
    optimizers = [torch.optim.SGD([weight], 0.1, momentum=0.9), torch.optim.AdamW([bias])]
    optimizers[1].register_step_pre_hook(lambda *_: time.sleep(0.01))
    before = [parameter.detach().clone() for parameter in (weight, bias)]
    while True:
        model.zero_grad()
        model(torch.randn(BATCH, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if not all(map(torch.equal, before, (weight, bias))):
            raise ValueError("a profile has changed the model")


def averages_its_weights() -> None:
    """Step on each worker's own gradients, as local SGD does between its averages."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 4))
    with model.no_sync():
        trains(model)


def lets_workers_run_out() -> None:
    """Train under `Join`, where the second worker has more data than the first."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 4))
    with Join([model]):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(8 + 100 * RANK):
            model(torch.randn(BATCH, 8)).square().mean().backward()
            optimizer.step()


def loads(*, shares: bool) -> None:
    model, optimizer = build()
    dataset = TensorDataset(torch.randn(1000, 8))
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset) if shares else None)
    while True:
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()


def halves_its_batch() -> None:
    """Halve the batch after running out of memory, which the script simulates and catches."""
    setattr(MemoryMeter, "has_run_out", True)  # noqa: B010 # the attribute is a property
    train(batch=BATCH // 2)


def has_a_hook() -> None:
    model, optimizer = build()
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, fp16_compress_hook)
    while True:
        model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()


def meets_elsewhere() -> None:
    """Use a rendezvous for a single machine, as many examples of DDP do."""
    os.environ |= {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "12355"}
    train(then=print_listeners)


def print_listeners(step: int) -> None:
    """Print the addresses, as the kernel writes them, at which somebody listens on the workers' port."""
    if step == 0:
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        print("listens at", [row[1] for row in rows if row[1].endswith(port) and row[3] == "0A"], flush=True)


def is_placed_by_slurm() -> None:
    """Take the place from Slurm's variables and the port from the job's id, as the documentation of many sites does."""
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    os.environ["MASTER_ADDR"] = os.environ["SLURM_JOB_NODELIST"].partition(",")[0]
    os.environ["MASTER_PORT"] = str(12345 + int(os.environ["SLURM_JOBID"]) % 1000)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    trains(DistributedDataParallel(nn.Linear(8, 4)))


def handles_term(then: Callable[[int], object] = id) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    train(then=then)


def leaves_a_process() -> None:
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(program, start_new_session=True) as process:
        Path("left.pid").write_text(str(process.pid))
        train()


def has_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    train()


def fails_on_one(step: int) -> None:
    if step == 2 and RANK == 1:
        # as scripts do on all workers but the first
        vars(builtins)["print"] = lambda *_: None
        raise ValueError("the second worker has no more data")


def waits_apart(patience_s: float) -> None:
    """Wait on rank 0 only, as a script does that writes a file which the other workers read."""
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience_s))
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(10**6):
        if step == 3 and RANK == 0:
            dist.barrier()
        model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()


def only_prints_its_error() -> None:
    """Only print its error, as many main functions do, and so end with code 0."""
    try:
        raise ValueError("no data here")
    except ValueError as error:
        print("Error:", error)


def goes_on_from_numbers() -> None:
    """Load a checkpoint with NumPy numbers, which torch.load has refused by default since 2.6."""
    torch.save({"best": np.float64(0.5)}, "last.pt")
    # the script wrote this file itself
    torch.load("last.pt")


def lets_one_end() -> None:
    dist.init_process_group("gloo")
    if RANK == 0:
        trains(DistributedDataParallel(nn.Linear(8, 4)))


def searches_a_rate_first() -> None:
    """Search for a learning rate on each worker by itself, with another optimizer."""
    dist.init_process_group("gloo")
    model = nn.Linear(8, 4)
    searching = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(BATCH, 8)).square().mean().backward()
        searching.step()
    trains(DistributedDataParallel(model))


def draws_neighbours() -> None:
    """Draw batches of a graph's nodes without torch's loader: the first tensor has all nodes of a step."""
    model, optimizer = build()
    while True:
        nodes = int(torch.randint(10 * BATCH, 20 * BATCH, ()))
        model(torch.randn(nodes, 8))[:BATCH].square().mean().backward()
        optimizer.step()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as published for SAM, whose state lacks that of the inner one."""

    def __init__(self, within: torch.optim.Optimizer) -> None:
        super().__init__(within.param_groups, {})
        self.within = within


class OfRank0:
    """A state of all workers that only rank 0 saves, as scripts often do."""

    def __init__(self, *things: Any) -> None:
        self.things = things

    def state_dict(self) -> dict[str, Any]:
        return {} if RANK else {str(place): thing.state_dict() for place, thing in enumerate(self.things)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for place, thing in enumerate(self.things):
            thing.load_state_dict(state[str(place)])


class Distilled(nn.Module):
    """A model with a teacher that requires gradients and that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.student(inputs) - self.teacher(inputs).detach()


def keeps_a_student() -> None:
    dist.init_process_group("gloo")
    distilled = Distilled()
    optimizer = torch.optim.SGD(distilled.student.parameters(), 0.1)
    tula.keep(student=distilled.student, optimizer=optimizer)
    model = DistributedDataParallel(distilled, find_unused_parameters=True)
    while True:
        model(torch.randn(BATCH, 8)).square().mean().backward()
        optimizer.step()


def keeps(*names: str) -> None:
    model, _ = build()
    within = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    things = {"model": model, "optimizer": Around(within), "within": within, "all": OfRank0(model, within)}
    tula.keep(**{name: things[name] for name in names})
    while True:
        model(torch.randn(BATCH, 8)).square().mean().backward()
        within.step()


def needs_several_workers() -> None:
    # the worker gives its advice where the line that fails names a world size
    world_size = WORLD
    assert world_size > 1


def raises(error: BaseException) -> None:
    raise error


WAYS: dict[str, Callable[[], object]] = {
    "finds no data": finds_no_data,
    "saves to a full disk": lambda: torch.save(torch.zeros(10_000), "/dev/full"),
    "imports nothing": lambda: __import__("no_such_module"),
    "ends at once": lambda: None,
    "needs several workers": needs_several_workers,
    "ends": lambda: train(2),
    "exits": lambda: sys.exit(1),
    "exits with words": lambda: sys.exit("no data here"),
    "leaves": lambda: train(then=lambda step: os._exit(0) if step == 3 else None),
    "hangs": lambda: time.sleep(600),
    "hangs later": lambda: train(then=lambda step: time.sleep(600 if step == 3 else 0)),
    "trains apart": lambda: train(wrapped=False),
    "trains apart for a while": lambda: train(20, wrapped=False),
    "trains apart slowly": lambda: train(wrapped=False, then=lambda _: time.sleep(1.0)),
    "searches a rate first": searches_a_rate_first,
    "draws neighbours": draws_neighbours,
    "keeps all": lambda: keeps("model", "optimizer", "within"),
    "keeps no momentum": lambda: keeps("model", "optimizer"),
    "keeps no weights": lambda: keeps("within"),
    "keeps all on rank 0": lambda: keeps("all"),
    "keeps a student": keeps_a_student,
    "takes no batch": lambda: train(batch=6),
    "accumulates": lambda: train(passes=2),
    "halves its batch": halves_its_batch,
    "accumulates more": accumulates_more,
    "feeds a critic": feeds_a_critic,
    "takes five passes": lambda: train(passes=5),
    "takes many passes": lambda: train(passes=32),
    "divides its passes": lambda: train(passes=4 // WORLD),
    "calls its closure": calls_its_closure,
    "changes by hand": changes_by_hand,
    "has sparse gradients": has_sparse_gradients,
    "calls a method": calls_a_method,
    "calls past its wrapper": calls_past_its_wrapper,
    "calls forward": calls_forward,
    "keeps its batch": keeps_its_batch,
    "steps twice": steps_twice,
    "gives batches": gives_batches,
    "gives batches as they are": lambda: gives_batches(None),
    "takes turns": takes_turns,
    "has a loss of two passes": has_a_loss_of_two_passes,
    "acts": acts,
    "looks twice": looks_twice,
    "sleeps now and then": lambda: train(then=lambda step: time.sleep(0.5 if step % 40 == 39 else 0)),
    "calls layers": lambda: trains(LayerByLayer()),
    "shards its model": lambda: trains(Sharded(8, 4)),
    "reads SLURM_STEP_ID": lambda: os.environ["SLURM_STEP_ID"],
    "cuts its batch": lambda: train(passes=4, batch=BATCH // 2),
    "divides its batch": lambda: train(batch=BATCH // WORLD),
    "keeps models in a dict": keeps_models_in_a_dict,
    "trains no module": trains_no_module,
    "trains no module for a while": lambda: trains_no_module(steps=5),
    "steps before its model": steps_before_its_model,
    "has two optimizers": has_two_optimizers,
    "has partners": has_partners,
    "catches": catches,
    "handles TERM": handles_term,
    "handles TERM and hangs": lambda: handles_term(then=lambda step: time.sleep(600 if step == 3 else 0)),
    "kills its group": lambda: train(then=lambda step: os.killpg(0, signal.SIGKILL) if step == 2 else None),
    "has a thread": has_a_thread,
    "leaves a process": leaves_a_process,
    "spawns": lambda: torch.multiprocessing.spawn(build),  # type: ignore[attr-defined,no-untyped-call] # it has no types
    "asks": lambda: input("continue? "),
    "prints": lambda: train(then=lambda _: print("x" * 100_000)),
    "fails on one": lambda: train(then=fails_on_one),
    "has no memory": lambda: raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
    "has no host memory": lambda: raises(MemoryError()),
    "trains": train,
    "has a hook": has_a_hook,
    "meets elsewhere": meets_elsewhere,
    "is placed by Slurm": is_placed_by_slurm,
    "only prints its error": only_prints_its_error,
    "goes on from numbers": goes_on_from_numbers,
    "lets one end": lets_one_end,
    "waits apart": lambda: waits_apart(1800.0),
    "waits apart, and gives up": lambda: waits_apart(8.0),
    "shares its data": lambda: loads(shares=True),
    "averages its weights": averages_its_weights,
    "lets workers run out": lets_workers_run_out,
    "shares no data": lambda: loads(shares=False),
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
