"""Every rank of a profile or a training asks for the same collectives, whatever happens on one of them.

If one rank calls another collective than its peers, or one more, they wait for each other until the job is killed.
Clocks run at a different pace on each rank (see `lockstep.Clock`), so a decision that a rank takes by its own time
leads to a different number of collectives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGUSR2
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import TensorDataset

from tests.lockstep import Outcome, PeerLostError, Rank, in_step, ranks_of, stand_in
from tests.run_factory import candidate, plan, with_step_time, write_plan
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, Method, SweepSpec, WorkloadSpec
from tula_hpc.ddp import worker as worker_module
from tula_hpc.ddp.process_group import leave_group, process_group
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import CheckpointError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.profiling import probes as forward_probe
from tula_hpc.profiling.measure import measure
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.training import drift as drift_probe
from tula_hpc.training import loop as trainer
from tula_hpc.training.loop import run_training
from tula_hpc.workloads import sharded_optimizer
from tula_hpc.workloads.workload import own_code

pytestmark = pytest.mark.processes

LOCAL_BATCH, STEPS, EPOCHS = 2, 14, 2
CPU = ClusterSpec()
HERE = "tests.ddp.test_equal_collectives:"
PIXELS = 8 * 8


def points(spec: WorkloadSpec) -> tuple[TensorDataset, TensorDataset, int]:
    """Return data of `STEPS` steps per epoch with a remainder, and few test samples."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(spec.samples or 1, 1, 8, 8, generator=generator)
    labels = torch.arange(len(images)) % 3
    return TensorDataset(images, labels), TensorDataset(images[:40], labels[:40]), 3


def linear(classes: int, image_size: int) -> nn.Module:
    """Return a model of a weight and a bias, so that with ZeRO most workers hold no optimizer state."""
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, classes))


def normed(classes: int, image_size: int) -> nn.Module:
    """Return a model with BatchNorm, whose statistics DDP broadcasts."""
    hidden = nn.Linear(image_size**2, 8)
    return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))


class MeanOverWorkers(nn.Module):
    """A layer with a collective in its forward pass, as SyncBatchNorm has."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not dist.is_initialized():
            return inputs
        mean = inputs.detach().mean(0)
        dist.all_reduce(mean)
        return inputs - mean / dist.get_world_size()


def talking(classes: int, image_size: int) -> nn.Module:
    """Return a model whose workers call a collective in every forward pass."""
    return nn.Sequential(nn.Flatten(), MeanOverWorkers(), nn.Linear(image_size**2, classes))


@dataclass(frozen=True)
class Form:
    """Settings of a training that differ from the common ones."""

    training: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    study: dict[str, Any] | None = None

    def sweep(self, world_size: int) -> SweepSpec:
        batch = world_size * LOCAL_BATCH
        workload = {
            "model": f"{HERE}linear",
            "dataset": f"{HERE}points",
            "samples": STEPS * batch + 1,
            "image_size": 8,
            "epochs": EPOCHS,
            "loader_workers": 0,
            "augment": False,
            "lr": 0.01,
        }
        training = {"base_batch": batch, "log_interval_steps": 2, "checkpoint_minutes": 0.01, "drift_minutes": 1e-3}
        fields = {
            "name": "x",
            "workload": workload | self.workload,
            "training": training | self.training,
            "search": {"min_steps": 5, "max_steps": 10, "warmup_steps": 2},
            "study": self.study and {"batches": [batch], "methods": ["lbt"], **self.study},
        }
        return SweepSpec.model_validate(fields)


SMALL = {"small_batch": 8}
PASSES = {"reference": "pass", "update_interval_epochs": 0.4}
FORMS = {
    "lbt": Form({"method": "lbt"}),
    "lrs": Form({"method": "lrs"}),
    "sqrt": Form({"method": "sqrt"}),
    "lars": Form({"method": "lars"}, {"lr": 1.0}),
    "lamb": Form({"method": "lamb"}, {"optimizer": "adamw"}),
    "polo": Form({"method": "polo"}, {"model": f"{HERE}normed"}),
    "adascale": Form({"method": "adascale", "base_batch": 8}),
    "static": Form({"method": "static", **SMALL}),
    "ags, norms for free": Form({"method": "ags", **SMALL}),
    "ags, passes by tensor": Form({"method": "ags", **PASSES, **SMALL}),
    "ags, passes by element": Form({"method": "ags", "preset": "paper", "update_interval_epochs": 0.4, **SMALL}),
    "ags on updates, clipped, counted": Form(
        {"method": "ags", "apply": "update", "clip_norm": 0.1, **SMALL}, {"optimizer": "adamw"}
    ),
    "not observed, batchnorm": Form({"method": "lbt", "observe_gradients": False}, {"model": f"{HERE}normed"}),
    "divided states": Form({"method": "lbt", "clip_norm": 0.1}, {"zero_stage": 1}),
    "divided states, ags": Form({"method": "ags", **SMALL}, {"zero_stage": 1}),
    "study": Form({"method": "lbt"}, study={"evaluate_every": 2}),
}
# Forms whose collectives depend on the number of workers: model averages, shares of the reference batch, optimizer
# states that most workers lack, evaluations without many of the workers. `BY_RATE` differs from "lbt" only in rates or
# optimizers.
OF_MANY = ("polo", "ags, passes by tensor", "divided states", "study")
VARIED = ("lbt", "adascale", "static", "ags, norms for free")
BY_RATE = ("lrs", "sqrt", "lars", "lamb")
CASES = [
    *(pytest.param(name, 16, marks=pytest.mark.thorough) for name in (*OF_MANY, *BY_RATE)),
    *((name, 16) for name in FORMS if name not in (*OF_MANY, *BY_RATE)),
    *((name, 1024) for name in OF_MANY),
    *(pytest.param(name, 1024, marks=pytest.mark.thorough) for name in VARIED),
]
# Forms with their own code for a step that overflows: gradients are each worker's, summed, observed by passes or during
# the all-reduce, scaled or clipped afterwards, or in pieces. All other forms run the same code as one of these.
OVERFLOWING = (
    "lbt",
    "polo",
    "adascale",
    "ags, norms for free",
    "ags, passes by tensor",
    "ags on updates, clipped, counted",
    "divided states",
    "divided states, ags",
)
# Forms that cover every collective that a failed rank might miss: average, pass, norm, state and evaluation.
FAILING = ("lbt", "polo", "ags, norms for free", "ags, passes by tensor", "divided states", "study")
# Forms for profiles, whose steps before the probes are those of a training, except for the observer of gradients.
PROFILED = ("lbt", "ags, passes by tensor", "divided states")


def in_full(names: Iterable[str], few: Iterable[str]) -> list[Any]:
    """Parametrize by all names; those not among the few are marked `thorough`."""
    return [pytest.param(name, marks=[] if name in few else pytest.mark.thorough) for name in names]


def place(world_size: int) -> Configuration:
    return Configuration(nodes=world_size, workers_per_node=1, local_batch=LOCAL_BATCH)


def prepared(folder: Path, world_size: int) -> Path:
    """Make a run directory with a plan whose step time of 1 ms is never met, so that the drift watch acts."""
    run = RunDirectory(folder).create()
    run.train().root.mkdir()
    chosen = with_step_time(candidate(place(world_size)), 1e-3)
    write_plan(run, plan([chosen] * 4, chosen=chosen))
    return folder


def absent_states(real: Any, rank: Rank) -> Any:
    """Return a stand-in for `_receive` that gets no optimizer state from ranks that are not run."""
    run = {each.rank for each in ranks_of(rank.world_size)}

    def receive(parameters: Any, source: int, device: torch.device) -> Any:
        return real(parameters, source, device) if source in run else {}

    return receive


def profile(sweep: SweepSpec, rank: Rank) -> str:
    with process_group(CPU, rank.env):
        return measure(sweep, CPU, place(rank.world_size), rank.env).status


def train(sweep: SweepSpec, root: Path, rank: Rank, stop: StopRequest | None = None) -> str:
    """Return the training's result, or the exit code with which it asks to be started again."""
    stand_in(trainer, "join_job", lambda: rank.env)
    stand_in(sharded_optimizer, "_receive", absent_states(sharded_optimizer._receive, rank))
    job = TrainJob(sweep, CPU, place(rank.world_size), root)
    try:
        return run_training(job, stop or StopRequest())
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        # on a cluster the next training is a new process, without this group
        leave_group()
        return f"exit {end.code}"


def at_step(number: int, act: Any) -> None:
    """Call `act(worker)` before that step of this process's training."""
    real, steps = Worker.train_step, iter(range(1, 10**9))

    def train_step(self: Worker, *batch: Any) -> Tensor:
        if next(steps) == number:
            act(self)
        return real(self, *batch)

    stand_in(Worker, "train_step", train_step)


def run_form(work: Any, form: Form, world_size: int, folder: Path) -> Outcome:
    """Run `work(rank, sweep, root)` on some ranks in step."""
    root, sweep = prepared(folder, world_size), form.sweep(world_size)
    # cached here once, so that forked processes need not read the code
    own_code(tuple(sweep.workload.entry_points))
    return in_step(partial(work, sweep=sweep, root=root), world_size)


@pytest.fixture(scope="module", autouse=True)
def with_layerwise_optimizers() -> None:
    """Import timm once for the forms that need it: not in each forked process, nor in workers of other tests."""
    import timm.optim  # noqa: F401


# what happens


def all_of_it(rank: Rank, sweep: SweepSpec, root: Path) -> list[str]:
    """Run a profile, a training in which only rank 0 is asked to stop, and the rest of that training."""
    done = [profile(sweep, rank)]
    stop = StopRequest()
    if rank.rank == 0:
        at_step(4, lambda _: setattr(stop, "received", SIGUSR2))
    done.append(train(sweep, root, rank, stop))
    stop.received = None
    return [*done, train(sweep, root, rank)]


@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_a_profile_a_stop_and_the_resumed_training(name: str, world_size: int, tmp_path: Path) -> None:
    form = FORMS[name]
    outcome = run_form(all_of_it, form, world_size, tmp_path)
    assert outcome.results == [["ok", f"exit {LOCAL_REQUEUE_RETURN_CODE}", "finished"]] * 3
    seen = {event.event for event in RunDirectory(tmp_path).events()}
    assert {"preempted", "resumed", "finished"} <= seen
    assert ("drifted" in seen) == (form.training["method"] != "polo")


def test_no_method_is_left_out() -> None:
    assert {form.training["method"] for form in FORMS.values()} == set(get_args(Method))


def test_a_collective_in_the_forward_pass(tmp_path: Path) -> None:
    """Every rank does as many passes as the others, in probes too, although their clocks differ."""
    form = Form({"method": "lbt"}, {"model": f"{HERE}talking"})
    outcome = run_form(all_of_it, form, 16, tmp_path)
    assert outcome.results == [["ok", f"exit {LOCAL_REQUEUE_RETURN_CODE}", "finished"]] * 3


def overflows(rank: Rank, sweep: SweepSpec, root: Path) -> str:
    """Train while the second rank's gradients are not finite at two steps."""

    def spoil(worker: Worker) -> None:
        for parameter in worker.parameters:
            hook = parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
            hooks.append(hook)

    def heal(worker: Worker) -> None:
        assert worker.scaler.get_scale() < GradScaler("cpu").get_scale()
        while hooks:
            hooks.pop().remove()

    hooks: list[Any] = []
    if rank.rank == 1:
        at_step(3, spoil)
        at_step(5, heal)
        at_step(STEPS + 3, spoil)
        at_step(STEPS + 5, heal)
    return train(sweep, root, rank)


@pytest.mark.parametrize("name", in_full(FORMS, OVERFLOWING))
def test_an_overflow_on_one_rank(name: str, tmp_path: Path) -> None:
    # with "polo", each worker steps by itself from the second epoch on
    epochs = EPOCHS if name == "polo" else 1
    form = replace(FORMS[name], workload=FORMS[name].workload | {"precision": "fp16", "epochs": epochs})
    outcome = run_form(overflows, form, 16, tmp_path)
    assert outcome.results == ["finished"] * 3


# memory runs out


def no_memory(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory_at_step(rank: Rank, sweep: SweepSpec, root: Path) -> None:
    if rank.rank == 1:
        at_step(5, no_memory)
    train(sweep, root, rank)


def out_of_memory_in_profile(rank: Rank, sweep: SweepSpec, root: Path) -> None:
    if rank.rank == 1:
        at_step(4, no_memory)
    profile(sweep, rank)


@pytest.mark.parametrize(
    ("work", "name"),
    [*((out_of_memory_at_step, name) for name in FAILING), *((out_of_memory_in_profile, name) for name in PROFILED)],
)
def test_a_rank_without_memory_for_a_step_asks_for_nothing_more(work: Any, name: str, tmp_path: Path) -> None:
    """The rank ends, and its peers wait in the next collective until then."""
    outcome = run_form(work, FORMS[name], 16, tmp_path)
    first, second, last = (end.error for end in outcome.ends)
    assert "out of memory" in second
    assert PeerLostError.__name__ in first
    assert PeerLostError.__name__ in last


def probes_without_memory(rank: Rank, sweep: SweepSpec, root: Path) -> list[str]:
    """Probe while the second rank has no memory for a second gradient, a buffer to reduce, or an evaluation."""
    if rank.rank == 1:
        stand_in(worker_module, "local_gradient", no_memory)
        stand_in(drift_probe, "bare_all_reduce", no_memory)
        stand_in(forward_probe, "round_s", no_memory)
    return [profile(sweep, rank), train(sweep, root, rank)]


@pytest.mark.parametrize("name", ["lbt", "ags, norms for free"])
def test_a_rank_without_memory_for_a_probe_goes_on_with_its_peers(name: str, tmp_path: Path) -> None:
    outcome = run_form(probes_without_memory, FORMS[name], 16, tmp_path)
    assert outcome.results == [["ok", "finished"]] * 3


def evaluates_without_memory(rank: Rank, sweep: SweepSpec, root: Path) -> str:
    """Train while the second rank has memory for two test samples at once, and has three of them."""
    score = Worker.score

    def limited(self: Worker, inputs: Tensor, targets: Tensor) -> Tensor:
        return no_memory() if len(targets) > LOCAL_BATCH else score(self, inputs, targets)

    if rank.rank == 1:
        stand_in(Worker, "score", limited)
    return train(sweep, root, rank)


def test_a_rank_without_memory_for_a_test_batch_takes_it_in_parts(tmp_path: Path) -> None:
    outcome = run_form(evaluates_without_memory, FORMS["study"], 16, tmp_path)
    assert outcome.results == ["finished"] * 3


# what ends a training


def diverges(rank: Rank, sweep: SweepSpec, root: Path) -> str:
    if rank.rank == 1:
        at_step(5, lambda worker: worker.model[1].weight.data.fill_(torch.nan))
    return train(sweep, root, rank)


def test_where_a_loss_that_is_not_finite_is_a_result_all_ranks_come_to_it(tmp_path: Path) -> None:
    outcome = run_form(diverges, FORMS["study"], 16, tmp_path)
    assert outcome.results == ["finished"] * 3


def cannot_save(rank: Rank, sweep: SweepSpec, root: Path) -> str:
    def refuse(*_: object, **__: object) -> None:
        raise CheckpointError("no space left on device")

    if rank.rank == 0:
        stand_in(CheckpointStore, "save", refuse)
    return train(sweep, root, rank)


@pytest.mark.parametrize("name", ["lbt", "polo", "divided states"])
def test_a_checkpoint_that_rank_0_cannot_save_ends_all_ranks(name: str, tmp_path: Path) -> None:
    outcome = run_form(cannot_save, FORMS[name], 16, tmp_path)
    for end in outcome.ends:
        assert CheckpointError.__name__ in end.error


# the means themselves


def asks_once_more_where_time_flies(rank: Rank) -> None:
    """Break the rule: call one more collective if this rank's own clock says so."""
    with process_group(CPU, rank.env):
        started = time.perf_counter()
        dist.all_reduce(torch.ones(3))
        if rank.rank == 1 and time.perf_counter() > started:
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(2))


def test_one_collective_more_on_one_rank_is_found() -> None:
    with pytest.raises(AssertionError, match="ranks differ after 1 equal collectives"):
        in_step(asks_once_more_where_time_flies, 16)


def reduces(rank: Rank) -> tuple[list[float], float, list[float]]:
    """Return a sum and a maximum over all ranks, and a broadcast from the last rank."""
    with process_group(CPU, rank.env):
        total, largest = torch.tensor([1.0, float(rank.rank)]), torch.tensor(float(rank.rank))
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        word = torch.full((2,), float(rank.rank))
        dist.broadcast(word, src=rank.world_size - 1)
    return total.tolist(), float(largest), word.tolist()


def test_collectives_are_carried_out_as_if_all_others_were_rank_1() -> None:
    outcome = in_step(reduces, 16)
    assert outcome.results == [([16.0, 14.0 + 15.0], 15.0, [15.0, 15.0])] * 3
    assert [request.operation for request in outcome.requests] == [
        "all_reduce", "all_reduce", "broadcast",
    ]  # fmt: skip
