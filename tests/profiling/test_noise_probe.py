"""The noise scale at profiling, compared with the covariance of all samples' gradients, computed one by one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.forked import ALONE
from tests.known import known
from tula_hpc.analysis.models.critical_batch import critical_batch
from tula_hpc.batches import tensors_of
from tula_hpc.config import ClusterSpec, SweepSpec, TrainingSpec
from tula_hpc.data.images import prepared
from tula_hpc.ddp.worker import Worker
from tula_hpc.optim import TulaOptimizer
from tula_hpc.profiling import measured_rounds
from tula_hpc.profiling import probes as noise_probe
from tula_hpc.profiling.measure import StepProfile, measure
from tula_hpc.profiling.measured_rounds import Course
from tula_hpc.profiling.meters import MemoryMeter, PowerMeter
from tula_hpc.profiling.probes import NoiseEstimate, probe_noise
from tula_hpc.profiling.timing import LoaderWaits, StoppingRule
from tula_hpc.records import Configuration

STATEFUL = "tests.training.test_stopped_evaluation:Stateful"


def sweep(model: str = "tests.examples.own_workload:perceptron", **search: object) -> SweepSpec:
    workload = {"model": model, "dataset": "digits", "loader_workers": 0, "augment": False, "lr": 0.1}
    times = {"warmup_steps": 1, "min_steps": 5, "max_steps": 5}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "search": times | search})


def worker_of(local_batch: int = 64, model: str = "tests.examples.own_workload:perceptron") -> Worker:
    return Worker(sweep(model), ClusterSpec(), Configuration(1, 1, local_batch), ALONE)


def true_noise_scale(worker: Worker) -> float:
    """Return tr(Σ)/|G|² over the whole training set."""
    samples = [worker.workload.train[index] for index in range(worker.samples)]
    images = prepared(worker.workload.train, torch.stack([image for image, _ in samples]))
    labels = torch.tensor([label for _, label in samples])

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return worker.workload.criterion.loss(functional_call(worker.model, parameters, (image[None],)), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(dict(worker.model.named_parameters()), images, labels)
    gradients = torch.cat([g.flatten(1) for g in each.values()], dim=1).detach()
    square = gradients.mean(0).square().sum()
    return float((gradients.square().sum(1).mean() - square) / square)


def test_the_estimate_is_near_the_truth_of_the_whole_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_probe, "PASSES", 60)
    worker = worker_of()
    found = probe_noise(worker, worker.batches())
    assert found.noise_scale == pytest.approx(true_noise_scale(worker), rel=0.2)
    assert found.samples == 60 * 64


@pytest.mark.processes
def test_a_profile_has_it_and_the_plan_can_read_it() -> None:
    measured = [measure(sweep(), ClusterSpec(), Configuration(1, 1, batch), ALONE) for batch in (64, 128)]
    assert all(m.noise_scale > 0 and len(m.noise_terms) == noise_probe.PASSES for m in measured)
    critical = known(critical_batch(measured))
    assert 0.2 < critical.batch / true_noise_scale(worker_of()) < 5


class ScoreLookup(nn.Module):
    """A model that looks up a score for each of two kinds of pixels and takes the mean; both complex parts count."""

    def __init__(self, classes: int, kind: str) -> None:
        super().__init__()
        self.sparse = kind == "sparse"
        self.scores = nn.Parameter(torch.zeros(2, classes, dtype=torch.complex64 if kind == "complex" else None))

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.view_as_real(self.scores).sum(-1) if self.scores.is_complex() else self.scores
        kinds = (images > images.mean()).long().flatten(1)
        return nn.functional.embedding(kinds, scores, sparse=self.sparse).mean(1)


def dense(classes: int, image_size: int) -> nn.Module:
    """Return a model for `model = "tests.profiling.test_noise_probe:dense"`."""
    return ScoreLookup(classes, "dense")


def sparse(classes: int, image_size: int) -> nn.Module:
    """Return a model with sparse gradients."""
    return ScoreLookup(classes, "sparse")


def in_pairs(classes: int, image_size: int) -> nn.Module:
    """Return a model with complex gradients, which are pairs of numbers."""
    return ScoreLookup(classes, "complex")


@pytest.mark.parametrize(("model", "parts"), [(sparse, 1), (in_pairs, 2)])
def test_gradients_that_are_sparse_or_complex_have_their_noise(model: Callable[..., object], parts: int) -> None:
    workers = [worker_of(model=f"{__name__}:{each.__name__}") for each in (dense, model)]
    expected, found = (torch.tensor(probe_noise(worker, worker.batches()).terms) for worker in workers)
    torch.testing.assert_close(found, parts * expected)
    assert (found[:, 1] > 0).all()


@pytest.mark.parametrize("local_batch", [1, 2, 3])
def test_a_batch_too_small_to_be_split_says_nothing(local_batch: int) -> None:
    worker = worker_of(local_batch)
    assert probe_noise(worker, worker.batches()) == NoiseEstimate()


@pytest.mark.parametrize("model", ["tula_hpc.workloads.small_cnns:compact_cnn", STATEFUL])
def test_the_model_is_left_as_it_was(model: str) -> None:
    worker = worker_of(16, model)
    batches = worker.batches()
    worker.train_step(*next(batches))
    before = [tensor.tolist() for tensor in tensors_of(worker.model_state())]
    assert probe_noise(worker, batches).samples > 0
    assert [tensor.tolist() for tensor in tensors_of(worker.model_state())] == before


def test_a_profiles_timed_steps_scale_by_factors_of_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[Tensor] = []
    timed = StepProfile.whole_steps

    def whole_steps(profile: StepProfile, memory: MemoryMeter, power: PowerMeter) -> Any:
        assert isinstance(profile.worker.optimizer, TulaOptimizer)
        factors.extend(factor for factor in profile.worker.optimizer.gradscale if factor is not None)
        return timed(profile, memory, power)

    monkeypatch.setattr(StepProfile, "whole_steps", whole_steps)
    spec = sweep().model_copy(update={"training": TrainingSpec(preset="paper")})
    assert "update" in dict(measure(spec, ClusterSpec(), Configuration(1, 1, 32), ALONE).round_steps)
    assert factors


def test_without_memory_nothing_is_known_and_the_profile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tula_hpc.ddp.worker.local_gradient", fails)
    measured = measure(sweep(), ClusterSpec(), Configuration(1, 1, 32), ALONE)
    assert (measured.status, measured.noise_scale, measured.noise_terms) == ("ok", 0.0, ())


def test_an_all_reduce_for_which_memory_does_not_suffice_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs as much memory as the gradients again; the training itself may still fit."""

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measured_rounds, "bare_all_reduce", fails)
    env = ALONE._replace(world_size=2)
    worker: Any = SimpleNamespace(env=env, parameters=[], agree=lambda *values: list(values))
    course = Course(worker, StoppingRule(5, 5, 1.0, 0.02), LoaderWaits(torch.device("cpu")), {})
    course.samples["step"] = [1.0]
    course.time_all_reduce()
    assert (course.times().allreduce_time_s, course.allreduce_s) == (0.0, {})
