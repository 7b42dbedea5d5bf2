"""One worker of a job, in this process: the step that profiling and training share, and a whole profile."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import HashStore  # type: ignore[attr-defined] # documented, though not in __all__
from torch.optim import Optimizer

from tests.data.spoiled import spoil_item
from tests.forked import ALONE
from tests.known import known
from tests.planning_data import memory
from tests.test_memory_errors import SHARED_GPU
from tula_hpc.config import ClusterSpec, SweepSpec, TrainingSpec, WorkloadSpec
from tula_hpc.ddp.process_group import (
    Allocation,
    check_kernels,
    check_precision,
    choose_kernels,
    pick_device,
    place_among,
    process_group,
)
from tula_hpc.ddp.worker import Worker, bare_all_reduce
from tula_hpc.errors import DeviceError, DivergedError, InputError
from tula_hpc.failure_kinds import Failure
from tula_hpc.files import HeldFolder
from tula_hpc.gradients.reference_gradient import reference_gradient
from tula_hpc.launch.job_specs import ProfileJob
from tula_hpc.optim import TulaOptimizer
from tula_hpc.profiling.measure import SharedTimes, StepProfile, _with_factors_at_once, measure
from tula_hpc.profiling.meters import MemoryMeter, Power, PowerMeter
from tula_hpc.profiling.meters import largest_over_workers as _largest
from tula_hpc.profiling.probes import FORWARD_PASSES as PASSES
from tula_hpc.profiling.probes import time_forward
from tula_hpc.profiling.profile_loop import _measure_and_record
from tula_hpc.profiling.record import record_oom
from tula_hpc.profiling.timing import Steps, StoppingRule
from tula_hpc.records import Configuration, Measurement, RunDirectory, read_records

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=32)
PERCEPTRON, WITH_BATCHNORM = "tests.examples.own_workload:perceptron", "tests.examples.normed:normed"


def sweep(method: str = "ags", **workload: object) -> SweepSpec:
    fields = {
        "model": "tula_hpc.workloads.small_cnns:compact_cnn",
        "dataset": "digits",
        "loader_workers": 0,
        **workload,
    }
    search = {"warmup_steps": 1, "min_steps": 5, "max_steps": 5}
    training = {"method": method, "small_batch": 16, "update_interval_epochs": 0.1}
    return SweepSpec.model_validate({"name": "x", "workload": fields, "search": search, "training": training})


@pytest.mark.parametrize(
    ("method", "workload"),
    [
        ("ags", {}),
        pytest.param("static", {}, marks=pytest.mark.processes),
        pytest.param("lbt", {}, marks=pytest.mark.processes),
        pytest.param("ags", {"precision": "bf16"}, marks=pytest.mark.processes),
        pytest.param("ags", {"optimizer": "adamw", "lr": 1e-3}, marks=pytest.mark.processes),
        ("static", {"optimizer": "adamw", "lr": 1e-3}),
        pytest.param("ags", {"channels_last": True}, marks=pytest.mark.processes),
    ],
)
def test_a_few_steps_learn_with_every_method_and_option(method: str, workload: dict[str, object]) -> None:
    worker = Worker(sweep(method, **workload), ClusterSpec(), CONFIGURATION, ALONE)
    batches = worker.batches()
    losses = [float(worker.train_step(*next(batches))) for _ in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert isinstance(worker.optimizer, TulaOptimizer) == (method != "lbt")


@pytest.mark.parametrize(
    ("parameters", "buckets"),
    [
        ([torch.zeros(7_000_000), torch.zeros(3)], [25 * 2**20, 28_000_012 - 25 * 2**20]),
        (
            [torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(3000), torch.zeros(5, dtype=torch.bfloat16)],
            [2010, 12000],
        ),
    ],
)
def test_a_bare_all_reduce_takes_as_many_bytes_as_the_gradient_has(
    monkeypatch: pytest.MonkeyPatch, parameters: list[Tensor], buckets: list[int]
) -> None:
    reduced: list[int] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda bucket, **_: reduced.append(bucket.nbytes))
    bare_all_reduce(parameters)()
    assert reduced == buckets


def test_a_step_seeds_whatever_a_model_may_draw_from() -> None:
    worker = Worker(sweep("lbt"), ClusterSpec(), CONFIGURATION, ALONE)
    drawn = []
    for seed in (2**40, 1, 2**40):
        worker.seed(seed)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[2]
    assert all(first != other for first, other in zip(*drawn[:2], strict=True))


def test_the_scale_is_updated_at_its_interval_and_only_then() -> None:
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.optimizer, TulaOptimizer)
    interval = round(0.1 * (worker.samples // CONFIGURATION.local_batch))
    batches = worker.batches()
    for _ in range(interval):
        worker.train_step(*next(batches))
        assert all(factor is None for factor in worker.optimizer.gradscale)
    worker.train_step(*next(batches))
    assert all(factor is not None for factor in worker.optimizer.gradscale)


class Profiled(NamedTuple):
    """A profile, and the calls that it made, in order."""

    measurement: Measurement
    calls: list[str]


@pytest.fixture(scope="module")
def profiled() -> Profiled:
    """A profile timed with the processor's time, which other work on the machine does not prolong."""
    methods: dict[str, tuple[type, str]] = {
        "step": (Worker, "train_step"),
        "meter": (MemoryMeter, "start"),
        "read": (MemoryMeter, "stop"),
        "score": (Worker, "score"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", time.process_time)
        calls = noted(patch, methods)
        return Profiled(measure(sweep(), ClusterSpec(), CONFIGURATION, ALONE), calls)


def noted(monkeypatch: pytest.MonkeyPatch, methods: Mapping[str, tuple[type, str]]) -> list[str]:
    """Record all calls of these methods under the given words, in order; the methods work as before."""
    happened: list[str] = []

    def note(word: str, owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noting(*arguments: Any) -> Any:
            happened.append(word)
            return method(*arguments)

        monkeypatch.setattr(owner, name, noting)

    for word, (owner, name) in methods.items():
        note(word, owner, name)
    return happened


def test_a_profile_times_every_part_and_counts_the_memory(profiled: Profiled) -> None:
    measurement = profiled.measurement
    assert measurement.status == "ok"
    assert measurement.times is not None
    assert min(measurement.times.step_time_s, measurement.times.compute_time_s, measurement.times.update_time_s) > 0
    assert measurement.times.allreduce_time_s == 0
    # local batches of other candidates
    smaller = {"compute of 8", "compute of 16"}
    assert set(measurement.samples) == {"step", "data", "compute", "optimizer", "update", "forward", *smaller}
    assert [batch for batch, _ in measurement.smaller_computes] == [8, 16]
    assert 0.0 < measurement.smaller_computes[0][1] < measurement.times.compute_time_s
    assert (measurement.dataset_samples, measurement.test_samples) == (1438, 359)
    assert measurement.memory is not None
    # momentum
    assert measurement.memory.optimizer_bytes >= measurement.memory.parameter_bytes


def test_a_forward_pass_of_the_evaluation_is_timed_and_is_part_of_the_computation(profiled: Profiled) -> None:
    times = known(profiled.measurement.times)
    assert times.forward_time_s is not None
    assert 0.0 < times.forward_time_s < times.compute_time_s
    assert len(profiled.measurement.samples["forward"]) == PASSES


def test_memory_is_read_before_a_forward_pass_is_timed(profiled: Profiled) -> None:
    assert [call for call in profiled.calls if call in ("read", "score")] == ["read"] + ["score"] * PASSES


def test_no_timed_step_pays_for_the_memory_that_metering_gave_back(profiled: Profiled) -> None:
    since = profiled.calls[profiled.calls.index("meter") :]
    assert since.count("step") == profiled.measurement.steps + 1


class Noisy(nn.Module):
    """A model that draws random numbers in every mode, and records how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool]] = []

    def forward(self, scores: Tensor) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled()))
        return scores + torch.rand_like(scores)


def test_timing_a_forward_pass_leaves_no_trace() -> None:
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.model, nn.Sequential)
    noisy = Noisy()
    worker.model.append(noisy)
    frozen = next(module for module in worker.model if isinstance(module, nn.BatchNorm2d)).eval()
    state = {name: value.clone() for name, value in worker.model.state_dict().items()}
    batch = next(worker.batches())
    generator = torch.get_rng_state()
    assert len(time_forward(worker, *batch)) == PASSES
    assert noisy.calls == [(False, False)] * PASSES
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in worker.model.state_dict().items())
    assert [module for module in worker.model.modules() if not module.training] == [frozen]
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in worker.parameters)


@pytest.mark.parametrize("local_batch", [1, 24, 64, 65])
def test_a_forward_pass_is_timed_at_a_batch_that_evaluation_takes(
    monkeypatch: pytest.MonkeyPatch, local_batch: int
) -> None:
    """Passes of smaller batches are repeated and the time is divided by their number; here each call takes 0.1 s."""
    taken: list[tuple[int, int]] = []
    monkeypatch.setattr(Worker, "score", lambda _, *batch: taken.append((len(batch[0]), len(batch[1]))))
    monkeypatch.setattr("tula_hpc.profiling.probes.round_s", lambda _, step: step() or 0.1)
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    inputs, targets = next(worker.batches())
    few = [torch.cat([part] * 65)[:local_batch] for part in (inputs, targets)]
    copies = -(-64 // local_batch)
    assert time_forward(worker, *few) == pytest.approx([0.1 / copies] * PASSES)
    assert taken == [(copies * local_batch,) * 2] * PASSES


def test_a_forward_pass_without_memory_leaves_the_rest_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Worker, "score", fails)
    measurement = measure(sweep(model=PERCEPTRON), ClusterSpec(), CONFIGURATION, ALONE)
    assert measurement.status == "ok"
    assert measurement.times is not None
    assert measurement.times.forward_time_s is None
    assert measurement.times.compute_time_s > 0


def test_any_other_error_of_a_forward_pass_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("shapes do not fit")

    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    monkeypatch.setattr(Worker, "score", fails)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        time_forward(worker, *next(worker.batches()))
    assert all(module.training for module in worker.model.modules())


def test_a_profile_changes_no_weight() -> None:
    spec = sweep()
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    before = [p.detach().clone() for p in worker.parameters]
    profile = StepProfile(worker, StoppingRule.of(spec.search, math.inf), SharedTimes())
    for _ in range(3):
        worker.train_step(*next(profile.batches))
    assert all(torch.equal(old, new) for old, new in zip(before, worker.parameters, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize(
    "training", [{}, {"reference": "pass"}, {"method": "static", "static_scale": 1e9, "gate": "none"}]
)
def test_timing_the_optimizer_lets_no_gradient_grow(
    monkeypatch: pytest.MonkeyPatch, training: dict[str, object]
) -> None:
    """Otherwise each timed step would scale the gradients that the one before has scaled, without bound."""
    spec = sweep(model=PERCEPTRON, lr=0.1)
    fields = {"small_batch": 4, "exponent": 4.0, "smoothing": 0.0, "s_min": 30.0, **training}
    spec = spec.model_copy(update={"training": TrainingSpec.model_validate(fields)})
    worker = Worker(_with_factors_at_once(spec), ClusterSpec(), CONFIGURATION._replace(local_batch=64), ALONE)
    before = [p.detach().clone() for p in worker.parameters]
    looked_at = noted_gradients(monkeypatch)
    profile = StepProfile(worker, StoppingRule(40, 40, 60.0, 0.02), SharedTimes())
    profile.run(MemoryMeter(ClusterSpec()), PowerMeter(ClusterSpec(), worker))
    assert all(torch.equal(old, new) for old, new in zip(before, worker.parameters, strict=True))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in worker.parameters)
    assert profile.noise.noise_scale > 0
    assert bool(looked_at) == bool(profile.samples.get("update"))
    assert all(0.0 < norm < 100.0 for norm in looked_at)


@pytest.mark.processes
@pytest.mark.parametrize("overflows", [0, 9])
def test_timed_steps_have_factors_however_late_gradients_no_longer_overflow(
    monkeypatch: pytest.MonkeyPatch, overflows: int
) -> None:
    """In fp16 the loss scale begins too large, and each such step halves it."""
    training = {"method": "ags", "preset": "paper"}
    spec = SweepSpec.model_validate(sweep(model=PERCEPTRON).model_dump() | {"training": training})
    worker = Worker(_with_factors_at_once(spec), ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.optimizer, TulaOptimizer)
    worker.scaler = GradScaler("cpu", init_scale=2.0**16)
    unscale = worker.scaler.unscale_
    factors: list[list[Tensor | None]] = []

    def unscale_after_overflow(optimizer: Optimizer) -> None:
        # the loss scale shows how many steps have overflowed
        if worker.scaler.get_scale() > 2.0 ** (16 - overflows):
            for parameter in worker.parameters:
                parameter.grad = torch.full_like(parameter, math.inf)
        unscale(optimizer)

    class Noting(StepProfile):
        def whole_steps(self, memory: MemoryMeter, power: PowerMeter) -> Steps[None]:
            assert isinstance(worker.optimizer, TulaOptimizer)
            factors.append(worker.optimizer.gradscale)
            return super().whole_steps(memory, power)

    monkeypatch.setattr(worker.scaler, "unscale_", unscale_after_overflow)
    profile = Noting(worker, StoppingRule(40, 40, 60.0, 0.02), SharedTimes())
    profile.run(MemoryMeter(ClusterSpec()), PowerMeter(ClusterSpec(), worker))
    assert all(factor is not None for factor in factors[0])


@pytest.mark.parametrize("samples", [4, 32])
def test_a_gradient_of_fewer_samples_has_the_loss_scale_of_each_in_a_step(samples: int) -> None:
    """The scale is as large as float16 allows in a step; in a mean over fewer samples, each gradient is larger."""
    worker = Worker(sweep(model=PERCEPTRON, precision="fp16"), ClusterSpec(), CONFIGURATION, ALONE)
    seen: list[Tensor] = []
    worker.model.register_forward_hook(lambda *call: call[-1].register_hook(seen.append) and None)
    inputs, targets = next(worker.batches())
    worker.forward_backward(inputs, targets, whole=True)
    expected = reference_gradient(
        worker.model, worker.workload.criterion.loss, inputs[:samples], targets[:samples], worker.parameters
    )
    found = worker.local_gradient(inputs[:samples], targets[:samples])
    in_step, _, apart = seen
    torch.testing.assert_close(apart, in_step[:samples])
    torch.testing.assert_close(found, expected, rtol=0.1, atol=1e-3)


@pytest.mark.processes
@pytest.mark.parametrize("method", ["ags", "adascale"])
def test_a_lone_worker_with_batchnorm_is_measured_with_the_passes_that_it_takes(method: str) -> None:
    """This holds although norms are free otherwise; without BatchNorm there is no such pass to time."""
    training = {"method": method, "base_batch": 16}
    spec = SweepSpec.model_validate(sweep(model=WITH_BATCHNORM).model_dump() | {"training": training})
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    assert isinstance(worker.optimizer, TulaOptimizer)
    passes, batches = 0, worker.batches()
    for _ in range(2 * (worker.samples // CONFIGURATION.local_batch)):
        passes += worker.optimizer.update_due
        worker.train_step(*next(batches))
    measurement = measure(spec, ClusterSpec(), CONFIGURATION, ALONE)
    assert 2 * measurement.updates_per_epoch == pytest.approx(passes, abs=1)
    assert measurement.samples["update"]
    workload = spec.workload.model_copy(update={"model": PERCEPTRON})
    plain = measure(spec.model_copy(update={"workload": workload}), ClusterSpec(), CONFIGURATION, ALONE)
    assert plain.updates_per_epoch == 0.0
    assert "update" not in plain.samples


def noted_gradients(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the norms of the large gradients from which factors are estimated."""
    norms: list[float] = []
    update = TulaOptimizer.update_gradscale

    def note(optimizer: TulaOptimizer, small: list[Tensor | None], large: list[Tensor | None]) -> None:
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in large if gradient is not None)))
        update(optimizer, small, large)

    monkeypatch.setattr(TulaOptimizer, "update_gradscale", note)
    return norms


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 16, 64]), st.sampled_from([1, 8, 32, 512]))
def test_every_worker_gives_a_share_that_batchnorm_can_train_on(small: int, nodes: int, local_batch: int) -> None:
    share = TrainingSpec(small_batch=small).reference_share(local_batch, nodes)
    assert 1 <= share <= local_batch
    assert share >= min(2, local_batch)
    assert share * nodes <= max(small, 2 * nodes)


def test_a_second_batch_takes_over_the_all_reduce_that_the_first_one_timed() -> None:
    # as if a job of one worker had one
    shared = SharedTimes({1: 0.25}, set())
    measurement = measure(sweep(model=PERCEPTRON), ClusterSpec(), CONFIGURATION, ALONE, shared)
    assert known(measurement.times).allreduce_time_s == 0.25
    assert "allreduce" not in measurement.samples


@pytest.mark.parametrize(("mode", "known", "timed"), [("adaptive", {(1, 8)}, [16]), ("full", set(), [])])
def test_no_smaller_batch_is_timed_that_the_job_knows_or_will_know(
    mode: str, known: set[tuple[int, int]], timed: list[int]
) -> None:
    spec, shared = sweep("lbt", model=PERCEPTRON), SharedTimes({}, set(known))
    spec = spec.model_copy(update={"search": spec.search.model_copy(update={"mode": mode})})
    measurement = measure(spec, ClusterSpec(), CONFIGURATION, ALONE, shared)
    assert [batch for batch, _ in measurement.smaller_computes] == timed
    assert shared.computed == known | {(1, 32)} | {(1, batch) for batch in timed}


@pytest.mark.parametrize(
    ("nodes", "local_rank", "exclusive", "watts"),
    [(1, 0, True, 200.0), (1, 1, True, 0.0), (1, 0, False, 0.0), (2, 0, True, 0.0)],
    ids=["alone", "another worker reads it", "shared node", "emulated nodes"],
)
def test_one_worker_reads_the_power_of_a_node_that_is_the_jobs_alone(
    monkeypatch: pytest.MonkeyPatch, nodes: int, local_rank: int, exclusive: bool, watts: float
) -> None:
    monkeypatch.setattr("tula_hpc.profiling.meters.mean_power", lambda *_: Power(200.0, None))
    worker = Worker(sweep("lbt"), ClusterSpec(), CONFIGURATION, ALONE)
    worker.configuration = CONFIGURATION._replace(nodes=nodes)
    worker.env = ALONE._replace(local_rank=local_rank)
    power = PowerMeter(ClusterSpec(exclusive=exclusive), worker)
    power.start()
    power.stop()
    assert power.mean() == watts


def test_a_model_whose_loss_is_not_finite_is_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "train_step", lambda *_: torch.tensor(math.nan))
    with pytest.raises(DivergedError, match="not finite before any training, though the samples are"):
        measure(sweep(), ClusterSpec(), CONFIGURATION, ALONE)


def test_a_sample_that_is_not_finite_is_named_by_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = sweep()
    first = int(Worker(spec, ClusterSpec(), CONFIGURATION, ALONE).loader.order.own(0, 0)[0])
    spoil_item(monkeypatch, first)
    with pytest.raises(InputError, match=f"^workload.dataset: item {first} of the training set holds inf or nan$"):
        measure(spec, ClusterSpec(), CONFIGURATION, ALONE)


def test_gpus_that_cannot_be_read_leave_the_power_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tula_hpc.profiling.meters.mean_power", lambda *_: Power(200.0, None))
    worker = Worker(sweep("lbt"), ClusterSpec(), CONFIGURATION, ALONE)
    worker.device = torch.device("cuda")
    power = PowerMeter(ClusterSpec(), worker)
    power.start()
    power.stop()
    assert power.mean() == 0.0


@pytest.mark.parametrize(("on_slurm", "by_node"), [(False, True), (True, True), (True, False)])
def test_the_workers_of_the_first_nodes_are_counted_anew(on_slurm: bool, by_node: bool) -> None:
    """Three nodes with two workers each, numbered node by node or round the nodes; locally, nodes are emulated."""
    places = []
    for rank in range(6):
        node, local_rank = divmod(rank, 2) if by_node else (rank % 3, rank // 3)
        env = ALONE._replace(rank=rank, world_size=6, hosts=("a", "b", "c"), on_slurm=on_slurm)
        env = env._replace(node_rank=node, local_rank=local_rank) if on_slurm else env._replace(local_rank=rank)
        place = place_among(env, nodes=2, workers_per_node=2)
        assert (place is None) == (node == 2)
        places += [place] if place else []
    assert sorted(place.rank for place in places) == [0, 1, 2, 3]
    # rank 0 decides and writes
    assert places[0].rank == 0
    assert all(place.world_size == 4 and place.hosts == ("a", "b") for place in places)
    if on_slurm:
        assert all(place.rank // 2 == place.node_rank for place in places)


@pytest.mark.parametrize(
    ("executor", "local_rank", "seen", "index"),
    [
        # all GPUs of the node are visible to each task
        ("slurm", 3, 4, 3),
        # each task is bound to its own
        ("slurm", 3, 1, 0),
        ("slurm", 3, 2, None),
        ("local", 0, 1, 0),
        # nccl would say "Duplicate GPU detected"
        ("local", 1, 1, None),
    ],
)
def test_each_worker_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, executor: str, local_rank: int, seen: int, index: int | None
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    cluster = ClusterSpec.model_validate({"device": "cuda", "executor": executor, "gres": "gpu:4"})
    if index is not None:
        assert pick_device(cluster, local_rank) == torch.device("cuda", index)
        return
    with pytest.raises(InputError, match=rf"^device: each worker needs a GPU .*, but .* has more .* \({seen}\)"):
        pick_device(cluster, local_rank)


def test_a_node_without_a_gpu_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease install one")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", refuses)
    with pytest.raises(InputError, match=r"torch sees no GPU on .*: Found no NVIDIA driver on your system; if "):
        pick_device(ClusterSpec(device="cuda"), 0)


@pytest.mark.parametrize(
    ("visible", "seen", "words", "expected"),
    [
        ("0,1,2,3", 0, "No CUDA GPUs are available", DeviceError),
        ("0,1,2,3", 3, "", DeviceError),
        # as on all nodes
        ("0", 0, "The NVIDIA driver on your system is too old (found version 11040).", InputError),
        ("", 0, "No CUDA GPUs are available", InputError),
        ("NoDevFiles", 0, "No CUDA GPUs are available", InputError),
        ("MIG-1,MIG-2", 1, "", None),
        ("0,1,2,3", 4, "", None),
    ],
)
def test_gpus_that_slurm_granted_and_that_are_not_there_are_the_nodes_fault(
    monkeypatch: pytest.MonkeyPatch, visible: str, seen: int, words: str, expected: type[Exception] | None
) -> None:
    def init() -> None:
        raise RuntimeError(words)

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: seen > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    monkeypatch.setattr("torch.cuda.init", init)
    cluster = ClusterSpec(device="cuda", executor="slurm", gres="gpu:4")
    if expected is None:
        assert pick_device(cluster, 0) == torch.device("cuda", 0)
        return
    with pytest.raises(expected):
        pick_device(cluster, 0)


@pytest.mark.parametrize(
    ("capability", "known", "fits"),
    [
        # a V100, and torch's build for CUDA 13
        ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_120"], False),
        ((7, 0), ["sm_50", "sm_70", "sm_90"], True),
        ((8, 6), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((12, 1), ["sm_90", "compute_90"], True),
    ],
)
def test_a_gpu_without_kernels_is_named(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: list[str], fits: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: known)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Tesla")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    if fits:
        check_kernels(torch.device("cuda", 0))
        return
    with pytest.raises(InputError, match=rf"no kernels for Tesla .*, only for {' '.join(known)}; install torch 2\.10"):
        check_kernels(torch.device("cuda", 0))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gpu_without_kernels_is_named_before_workers_meet(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """There is no store and no peer: a search for them would fail with another message."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: workers)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_80"])
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Tesla")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("tula_hpc.ddp.process_group.meet", lambda *_: pytest.fail("it looked for its peers"))
    cluster = ClusterSpec(device="cuda", workers_per_node=workers)
    env = ALONE._replace(world_size=workers)
    with pytest.raises(InputError, match="no kernels for Tesla"), process_group(cluster, env):
        pass


def test_while_profiling_peers_are_waited_for_minutes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's job lasts only a few minutes, and a lost peer occupies all of its nodes."""
    timeouts: list[timedelta] = []

    def note(*_: object, timeout: timedelta, **__: object) -> None:
        timeouts.append(timeout)

    monkeypatch.setattr("torch.distributed.init_process_group", note)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("tula_hpc.ddp.process_group.meet", lambda *_: HashStore())
    pair, cluster = ALONE._replace(world_size=2), ClusterSpec(workers_per_node=2)
    Allocation(cluster, pair, timedelta(minutes=1)).join(1)
    with process_group(cluster, pair, HashStore()):
        pass
    profiling, training = timeouts
    assert profiling <= timedelta(minutes=cluster.profile_minutes) / 5
    assert profiling < training


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (12, 0)])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_bf16_is_refused_where_a_gpu_has_no_units_for_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "Tesla")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    device = torch.device("cuda", 0)
    if precision != "bf16" or capability >= (8, 0):
        check_precision(device, precision)
        return
    with pytest.raises(InputError, match=r'^workload\.precision: Tesla \(sm_7.\) .*; use precision = "fp16"$'):
        check_precision(device, precision)


@pytest.fixture
def kernels_as_before() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.mark.usefixtures("kernels_as_before")
@pytest.mark.parametrize(("tries", "tf32"), [(True, False), (False, True)])
def test_the_workload_chooses_kernels(tries: bool, tf32: bool) -> None:
    choose_kernels(WorkloadSpec(cudnn_benchmark=tries, tf32=tf32))
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (tries, tf32, tf32)


class FakeAllocator:
    """A stand-in for the counters of torch's allocator on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, free: int, reserved: int) -> None:
        self.retries = self.ooms = 7
        answers = {
            "mem_get_info": lambda: (free, total),
            "memory_reserved": lambda: reserved,
            "max_memory_reserved": lambda: reserved,
            "max_memory_allocated": lambda: reserved,
            "reset_peak_memory_stats": lambda: None,
            "memory_stats": lambda: {"num_alloc_retries": self.retries, "num_ooms": self.ooms},
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def test_what_lies_outside_the_allocator_and_its_retries_in_timed_steps_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    device = FakeAllocator(monkeypatch, total=1000, free=300, reserved=500)
    meter = MemoryMeter(ClusterSpec(device="cuda"))
    meter.start()
    device.retries += 2
    meter.stop()
    device.retries += 1
    use = meter.use(worker.model, worker.parameters, worker.optimizer)
    # what other processes hold is in other_bytes alone, not in what the batch took
    assert (use.total_bytes, use.other_bytes, use.reserved_bytes, use.peak_bytes) == (1000, 200, 500, 500)
    assert (use.alloc_retries, use.ooms) == (2, 0)
    assert meter.has_run_out


@pytest.mark.parametrize(("free", "said"), [(0, "; of the device's 1,000 MiB, 500 MiB were held outside"), (400, "")])
def test_a_device_that_another_process_had_filled_is_named_where_memory_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    FakeAllocator(monkeypatch, total=1000 * 1024**2, free=free * 1024**2, reserved=500 * 1024**2)
    used = [True, False, True]
    monkeypatch.setattr(torch.cuda, "is_initialized", used.pop)
    for failure in (Failure.DEVICE_OOM, Failure.HOST_OOM, Failure.DEVICE_OOM, Failure.DEVICE_OOM):
        record_oom(tmp_path / "x.jsonl", ClusterSpec(), CONFIGURATION, ALONE, failure)
    with_use, of_host, without_use, again = read_records(Measurement, tmp_path.glob("*.jsonl")).records
    assert with_use.detail.startswith(f"rank 0{said}")
    assert (with_use.detail == "rank 0") == (not said)
    # a worker that has not used the device cannot ask for it
    assert (of_host.detail, without_use.detail, again.detail) == ("rank 0", "rank 0", with_use.detail)


def test_a_configuration_at_which_others_held_the_memory_bounds_nothing_before_its_last_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    job = ProfileJob(sweep(), ClusterSpec(), (CONFIGURATION,), run.profile / "n1-0.jsonl", nodes=1)

    def run_out(*_: object, **__: object) -> Measurement:
        raise torch.OutOfMemoryError(SHARED_GPU)

    def profile() -> None:
        _measure_and_record(job, CONFIGURATION, ALONE, SharedTimes(), HeldFolder(run.profile), began_at=None)

    monkeypatch.setattr("tula_hpc.profiling.profile_loop.measure", run_out)
    data = {"configuration": list(CONFIGURATION), "partition": ""}
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"^memory ran out at .*, but 5\.0 GiB .* by process 4194305$"):
            profile()
        assert run.measurements().records == []
        run.log_event("ended", "profile", job_id="1", failure=Failure.DEVICE_FAILED, data=data)
    with pytest.raises(SystemExit, match="recorded"):
        profile()
    assert [row.failure for row in run.measurements().records] == [Failure.DEVICE_OOM]


def test_of_all_workers_the_device_with_least_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(sweep(), ClusterSpec(), CONFIGURATION, ALONE)
    uses = [memory(32, total_bytes=total, other_bytes=other) for total, other in ((1000, 1), (900, 2))]
    recorded: list[tuple[float, ...]] = []

    def agree(*values: float) -> list[float]:
        recorded.append(values)
        return [max(each) for each in zip(*recorded, strict=True)]

    monkeypatch.setattr(worker, "agree", agree)
    *_, both = [_largest(worker, use) for use in uses]
    assert (both.total_bytes, both.other_bytes) == (900, 2)


def skip_where_refused(precision: object) -> None:
    """Skip a precision that the GPU does not support: a V100 refuses bf16."""
    try:
        check_precision(torch.device("cuda", 0), str(precision))
    except InputError as refusal:
        pytest.skip(str(refusal))


def test_operations_that_a_v100_refuses_fail_no_test_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "V100")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    skip_where_refused("fp16")
    with pytest.raises(pytest.skip.Exception, match="bf16 units"):
        skip_where_refused("bf16")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "workload"),
    [
        ("ags", {}),
        ("ags", {"model": WITH_BATCHNORM, "precision": "fp16"}),
        ("ags", {"precision": "fp16", "channels_last": True}),
        ("lbt", {"precision": "bf16", "channels_last": True, "loader_workers": 1}),
        ("static", {"optimizer": "adamw", "lr": 1e-3}),
    ],
)
def test_a_profile_on_a_gpu(method: str, workload: dict[str, object]) -> None:
    skip_where_refused(workload.get("precision"))
    found = measure(sweep(method, **workload), ClusterSpec(device="cuda"), CONFIGURATION, ALONE)
    assert (found.status, found.device) == ("ok", torch.cuda.get_device_name())
    assert found.memory is not None
    assert 0 < found.memory.parameter_bytes < found.memory.peak_bytes <= found.memory.reserved_bytes
    total, other = found.memory.total_bytes, found.memory.other_bytes
    assert total is not None
    assert other is not None
    assert 0 < other < total - found.memory.reserved_bytes
    assert not found.memory.ran_short
    assert torch.backends.cudnn.benchmark
    assert found.times is not None
    assert min(found.times.step_time_s, found.times.compute_time_s, found.times.optimizer_time_s) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_few_steps_on_a_gpu_learn(precision: str) -> None:
    skip_where_refused(precision)
    worker = Worker(sweep(precision=precision), ClusterSpec(device="cuda"), CONFIGURATION, ALONE)
    batches = worker.batches()
    losses = [float(worker.train_step(*next(batches))) for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(p.is_cuda for p in worker.parameters)
