"""`training.method`: what each method makes of the workload's optimizer."""

from __future__ import annotations

import ast
import math
import sys
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tests.forked import ALONE
from tests.run_factory import candidate, plan, write_plan
from tula_hpc.checkpoint.per_worker_states import fold_into
from tula_hpc.config import AgsOptions, ClusterSpec, Method, SweepSpec, TrainingSpec, load_sweep
from tula_hpc.ddp import methods
from tula_hpc.ddp.methods import build_stepper, synchronous_epochs
from tula_hpc.ddp.worker import Worker
from tula_hpc.errors import InputError
from tula_hpc.launch.job_specs import TrainJob
from tula_hpc.optim import TulaOptimizer
from tula_hpc.optim import post_local_sgd as post_local
from tula_hpc.optim.post_local_sgd import AVERAGES_PER_EPOCH, EpochAverager, PostLocalSGD
from tula_hpc.records import Configuration, RunDirectory
from tula_hpc.training.drift import begin_drift_watch
from tula_hpc.workloads.fake_steps import Counts, Step
from tula_hpc.workloads.optimizers import norms_and_biases, own_states

CONFIGURATION = Configuration(nodes=1, workers_per_node=1, local_batch=64)
COMPACT = "tula_hpc.workloads.small_cnns:compact_cnn"
# without BatchNorm
PERCEPTRON = "tests.examples.own_workload:perceptron"
LR = {"lars": 5.0, "lamb": 1e-2}


def sweep(method: str, model: str = COMPACT, **training: object) -> SweepSpec:
    optimizer = "adamw" if method == "lamb" else "sgd"
    workload = {"model": model, "dataset": "digits", "loader_workers": 0, "optimizer": optimizer}
    workload |= {"lr": LR.get(method, 0.05)}
    return SweepSpec.model_validate({"name": "x", "workload": workload, "training": {"method": method, **training}})


def with_workload(spec: SweepSpec, **changes: object) -> SweepSpec:
    return spec.model_copy(update={"workload": spec.workload.model_copy(update=changes)})


def new_worker(method: str, model: str = COMPACT, **training: object) -> Worker:
    return Worker(sweep(method, model, **training), ClusterSpec(), CONFIGURATION, ALONE)


def train(worker: Worker, steps: int) -> list[float]:
    return [float(worker.train_step(*batch)) for batch in islice(worker.batches(), steps)]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm([16]), nn.Linear(16, 2))


def optimizer_for(spec: SweepSpec, model: nn.Module, configuration: Configuration = CONFIGURATION) -> Any:
    return build_stepper(spec, model, list(model.parameters()), configuration, 50_000).optimizer


def with_gradients(model: nn.Module, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)


def moves(spec: SweepSpec, factor: float = 1.0) -> dict[str, Tensor]:
    """Return each parameter's change in the first step with a known gradient."""
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_for(spec, model)
    with_gradients(model, factor)
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


# all of them


# methods that tests/ddp/test_worker.py does not cover
@pytest.mark.parametrize(
    "method", [*(pytest.param(it, marks=pytest.mark.processes) for it in ("lars", "lamb")), "adascale"]
)
def test_a_few_steps_learn(method: str) -> None:
    losses = train(new_worker(method, base_batch=16, small_batch=16), 12)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


@pytest.mark.parametrize("method", ["lrs", "sqrt", "polo"])
def test_with_one_worker_some_methods_differ_from_plain_training_in_the_rate_only(method: str) -> None:
    runs = [new_worker("lbt"), new_worker(method)]
    assert train(runs[0], 3) == train(runs[1], 3)


def test_adascale_is_plain_training_at_its_base_batch() -> None:
    runs = [new_worker("lbt"), new_worker("adascale", base_batch=64)]
    assert train(runs[0], 3) == pytest.approx(train(runs[1], 3), rel=1e-5)


def test_adascales_gain_lies_between_one_and_the_ratio_of_batches() -> None:
    worker = new_worker("adascale", PERCEPTRON, base_batch=16)
    assert isinstance(worker.optimizer, TulaOptimizer)
    assert (worker.optimizer.s_min, worker.optimizer.s_max) == (1.0, 4.0)
    train(worker, 5)
    gains = {float(factor) for factor in worker.optimizer.gradscale if factor is not None}
    assert len(gains) == 1
    assert 1.0 < gains.pop() <= 4.0


def test_every_switch_of_ags_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that does not belong to the schedule reaches the optimizer."""
    others = AgsOptions(64, 4.0, 0.1, "tensor", 2.0, 0.9, 3.0, "none", "update", True, "linear", "pass", 0.5)
    monkeypatch.setattr(methods, "TulaOptimizer", lambda base, **given: given)
    plain = optimizer_for(sweep("ags", preset="paper"), small_model())
    for name, value in others._asdict().items():
        given = optimizer_for(sweep("ags", preset="paper", **{name: value}), small_model())
        differs = {key for key in given if given[key] != plain[key]}
        assert bool(differs) == (name not in ("lr_scaling", "reference", "small_batch_shrink")), name


# parameters by kind


def test_norms_and_biases_are_all_but_the_weights() -> None:
    model = small_model()
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in model.parameters()} - {names[id(p)] for p in norms_and_biases(model)} == {
        "0.weight",
        "4.weight",
    }
    # its weight is no vector
    shaped = nn.LayerNorm([4, 4])
    assert len(norms_and_biases(shaped)) == 2


# LARS and LAMB


@pytest.mark.processes
@pytest.mark.parametrize(("method", "plain"), [("lars", "sgd"), ("lamb", "adamw")])
@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_layer_wise_rates_depend_on_the_weights_norm_not_on_the_gradients(
    method: str, plain: str, decay: float
) -> None:
    """With weight decay, only the direction of a move changes a little, not its length."""
    spec = with_workload(sweep(method), weight_decay=decay, lr=0.5)
    weights = dict(small_model().named_parameters())
    trust = 0.001 if method == "lars" else 1.0
    small, large = (moves(spec, factor) for factor in (1.0, 100.0))
    for name in ("0.weight", "4.weight"):
        for move in (small[name], large[name]):
            assert float(move.norm()) == pytest.approx(0.5 * trust * float(weights[name].detach().norm()), rel=1e-2)
    biases = moves(with_workload(sweep("lbt"), optimizer=plain, weight_decay=0.0, lr=0.5), 1.0)
    for name in ("0.bias", "1.weight", "1.bias", "3.weight", "4.bias"):
        torch.testing.assert_close(small[name], biases[name], rtol=1e-4, atol=1e-6)


@pytest.mark.processes
@pytest.mark.parametrize(("method", "plain"), [("lars", "sgd"), ("lamb", "adamw")])
def test_layer_wise_optimizers_hold_the_states_that_memory_is_estimated_for(method: str, plain: str) -> None:
    sizes = []
    for spec in (sweep(method), with_workload(sweep("lbt"), optimizer=plain)):
        model = small_model()
        optimizer = optimizer_for(spec, model)
        with_gradients(model)
        optimizer.step()
        values = [value for state in own_states(optimizer).values() for value in state.values()]
        sizes.append(sum(value.numel() for value in values if isinstance(value, Tensor) and value.dim()))
    assert sizes[0] == sizes[1] > 0


@pytest.mark.processes
@pytest.mark.parametrize("method", ["lars", "lamb"])
def test_a_resumed_layer_wise_run_goes_on_bit_for_bit(method: str) -> None:
    whole, half = new_worker(method), new_worker(method)
    train(whole, 4)
    batches = list(islice(half.batches(), 4))
    for batch in batches[:2]:
        half.train_step(*batch)
    resumed = new_worker(method)
    resumed.load_own_state(half.own_state())
    for batch in batches[2:]:
        resumed.train_step(*batch)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters, resumed.parameters, strict=True))


def test_only_layer_wise_methods_need_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "timm.optim", "timm.optim.lars", "timm.optim.lamb"):
        monkeypatch.setitem(sys.modules, name, None)
    for method in get_args(Method):
        if method in ("lars", "lamb"):
            with pytest.raises(ImportError):
                optimizer_for(sweep(method), small_model())
        else:
            optimizer_for(sweep(method), small_model())
    package = Path(methods.__file__).parent.parent
    texts = [text for text in (path.read_text() for path in package.rglob("*.py")) if "timm" in text]
    assert texts
    tops = [node for text in texts for node in ast.parse(text).body]
    names = {getattr(node, "module", None) for node in tops if isinstance(node, ast.ImportFrom)}
    assert not any(name and name.startswith("timm") for name in names)


@pytest.mark.processes
@pytest.mark.parametrize("plain", ["sgd", "adamw"])
def test_scaling_goes_around_layer_wise_rates_where_a_factor_on_the_gradient_would_cancel_out(plain: str) -> None:
    from timm.optim.lamb import Lamb
    from timm.optim.lars import Lars

    form: dict[str, Any] = {"layer_wise": True, "preset": "paper", "apply": "update", "granularity": "tensor"}
    optimizer = optimizer_for(with_workload(sweep("ags", **form), optimizer=plain), small_model())
    assert isinstance(optimizer, TulaOptimizer)
    assert isinstance(optimizer.base, Lars if plain == "sgd" else Lamb)
    for method in ("ags", "static"):
        with pytest.raises(ValueError, match='expected apply = "update"'):
            sweep(method, **form | {"apply": "gradient"})
        assert with_workload(sweep(method, layer_wise=True), optimizer=plain).scale_applies_to == "update"


@pytest.mark.processes
def test_a_reference_pass_gives_each_parameter_its_own_factor_where_groups_change_their_order() -> None:
    factors = []
    for layer_wise in (False, True):
        options: dict[str, Any] = {"granularity": "tensor", "reference": "pass", "apply": "update", "base_batch": 64}
        worker = new_worker("ags", **options, layer_wise=layer_wise)
        assert isinstance(worker.optimizer, TulaOptimizer)
        inputs, targets = next(worker.batches())
        worker.forward_backward(inputs, targets)
        worker.update_gradscale(inputs, targets)
        of = dict(zip(worker.optimizer.parameters(), worker.optimizer.gradscale, strict=True))
        factors.append([of[parameter] for parameter in worker.model.parameters()])
    assert factors[0] == factors[1]
    assert len({float(factor) for factor in factors[0] if factor is not None}) > 5


@pytest.mark.parametrize(
    ("method", "workload", "expected"),
    [
        ("lars", 'optimizer = "adamw"', 'workload.optimizer = "sgd"'),
        ("lamb", 'optimizer = "sgd"', 'workload.optimizer = "adamw"'),
        ("polo", "zero_stage = 1", "workload.zero_stage = 0"),
    ],
)
def test_combinations_without_sense_are_refused(tmp_path: Path, method: str, workload: str, expected: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(f'name = "x"\n[workload]\n{workload}\n[training]\nmethod = "{method}"\n')
    with pytest.raises(InputError) as caught:
        load_sweep(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: training.method: ")
    assert expected in line
    assert "\n" not in line


# clipping


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_clipped_step_is_no_longer_than_the_norm_allows(precision: str) -> None:
    spec = with_workload(sweep("lbt", clip_norm=1e-3), momentum=0.0, weight_decay=0.0, precision=precision)
    worker = Worker(spec, ClusterSpec(), CONFIGURATION, ALONE)
    before = [p.detach().clone() for p in worker.parameters]
    train(worker, 1)
    after = [p.detach() for p in worker.parameters]
    move = math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(after, before, strict=True)))
    assert move == pytest.approx(0.05 * 1e-3, rel=1e-2)


@pytest.mark.parametrize("reference", ["pass", "free"])
def test_clipping_leaves_factors_and_noise_alone(reference: str) -> None:
    """Clipping shortens the small and the large gradient by the same factor."""
    options = {"granularity": "tensor", "small_batch": 16, "reference": reference, "gate": "none"}
    options |= {"update_interval_epochs": 0.001, "smoothing": 0.0}
    factors, measured = [], []
    for norm in (None, 1e-3):
        worker = new_worker("ags", PERCEPTRON, **options, clip_norm=norm)
        # so that both see the same gradients
        worker.sweep = with_workload(worker.sweep, lr=1e-9)
        for group in worker.optimizer.param_groups:
            group["lr"] = 1e-9
        train(worker, 3)
        assert isinstance(worker.optimizer, TulaOptimizer)
        factors.append(torch.stack([factor for factor in worker.optimizer.gradscale if factor is not None]))
        measured.append((*worker.optimizer.noise(), worker.optimizer.statistics().gradient_norm))
    torch.testing.assert_close(factors[0], factors[1], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(factors[0], torch.ones_like(factors[0]))
    assert measured[1] == pytest.approx(measured[0], rel=1e-3, nan_ok=True)
    assert measured[0][2] > 0


# post-local SGD


def averager(model: nn.Module | None = None, synchronous: int = 0) -> EpochAverager:
    # no collective is called here
    group = cast("Any", object())
    return EpochAverager(model or small_model(), synchronous, group=group)


@given(st.integers(1, 60), st.integers(0, 3), st.integers(0, 30))
def test_an_epoch_has_four_averages_and_ends_with_one(steps: int, synchronous: int, rest: int) -> None:
    """This holds for any number of steps, and with samples left over at the epoch's end."""
    about, samples = averager(synchronous=synchronous), steps * 32 + rest
    for epoch in range(5):
        due = []
        for step in range(steps):
            end = epoch + 1.0 if step == steps - 1 else epoch + (step + 1) * 32 / samples
            about.set_position(epoch + step * 32 / samples, end)
            assert about.local == (epoch >= synchronous)
            due.append(about.due)
        assert due[-1] == (epoch >= synchronous)
        assert sum(due) == (min(steps, AVERAGES_PER_EPOCH) if epoch >= synchronous else 0) or rest
        assert sum(due) <= AVERAGES_PER_EPOCH


def test_frozen_parameters_are_not_averaged() -> None:
    """The mean of equal numbers may differ from them in the last bit."""
    model = small_model()
    model[0].requires_grad_(False)
    averaged = {id(tensor) for tensor in averager(model).tensors}
    assert not averaged & {id(p) for p in model[0].parameters()}
    assert averaged >= {id(tensor) for tensor in (*model[1].parameters(), model[1].running_mean, model[4].weight)}


def test_complex_parameters_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker has 1 + 1j everywhere."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda halves, group: halves.add_(0.5))
    model = nn.ParameterDict({"real": torch.tensor([5.0]), "complex": torch.tensor([3.0 - 7.0j])})
    one = averager(model)
    one.set_position(0.9, 1.0)
    one.average_parameters()
    assert (model["real"].tolist(), model["complex"].tolist()) == ([3.0], [2.0 - 3.0j])


@given(st.integers(1, 1000))
def test_the_synchronous_epochs_are_whole_and_leave_most_of_the_training(epochs: int) -> None:
    synchronous = synchronous_epochs(epochs)
    assert 1 <= synchronous <= 5
    assert synchronous <= max(1, epochs / 5)


def test_an_overflow_of_ones_own_does_not_keep_a_worker_from_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    averaged: list[int] = []
    monkeypatch.setattr(post_local, "average_over_workers", lambda tensors, _: averaged.append(len(tensors)))
    model = nn.Linear(2, 2)
    optimizer = PostLocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), averager(model))
    scaler = GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    for factor in (math.inf, 1.0):
        optimizer.averager.set_position(0.9, 1.0)
        scaler.scale(factor * model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (factor == math.inf)
        # its memory is used for the average
        assert model.weight.grad is None
    assert averaged == [2, 2]


def test_a_restored_optimizer_still_takes_the_rate_that_is_set() -> None:
    model = nn.Linear(2, 2)
    optimizer = PostLocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), averager(model))
    # a plain state fits, too
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = model.weight.detach().clone()
    with_gradients(model)
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_local_steps_are_compared_with_no_prediction(tmp_path: Path) -> None:
    for method in ("lbt", "polo"):
        run = RunDirectory(tmp_path / method).create()
        known = candidate(CONFIGURATION)
        write_plan(run, plan([known] * 4, chosen=known))
        start = begin_drift_watch(TrainJob(sweep(method), ClusterSpec(), CONFIGURATION, run.root), ALONE)
        assert (start.prediction is None) == (method == "polo")


@pytest.mark.parametrize("unit", [1.0, 1.0 - 2.0j])
@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6))
def test_folding_states_makes_their_mean(values: list[float], unit: complex) -> None:
    states = [{"a": [torch.tensor([value * unit])], "n": torch.tensor(7), "lr": 0.1} for value in values]
    mean = states[0]
    for count, state in enumerate(states[1:], start=2):
        fold_into(mean, state, count)
    torch.testing.assert_close(mean["a"], [torch.tensor([sum(values) * unit / len(values)])], rtol=1e-4, atol=1e-3)
    assert (int(cast("Tensor", mean["n"])), mean["lr"]) == (7, 0.1)


# memory


def test_memory_that_a_method_needs_is_counted_where_it_needs_it() -> None:
    step = Step(backward_bytes=100, optimizer_bytes=60, blocks=())
    counts = Counts(20, 20, 20, (4, 8), step, step, step._replace(backward_bytes=300))
    for copies in (0, 1, 3):
        more = counts.with_step_copies(copies)
        # 8: activations decide
        assert [more.peak(b) for b in (2, 8)] == [max(100, 60 + copies * 20), 300]
        assert more.fixed == counts.fixed
    extra = {method: sweep(method, preset="paper") for method in get_args(Method)}
    assert {method for method, spec in extra.items() if spec.training.gradient_copies} == {"ags", "polo"}
    # no extra pass; for a single worker see `analysis.table`
    assert sweep("ags").training.gradient_copies == 0
    assert {method for method, spec in extra.items() if spec.step_copies} == {"adascale"}
    assert sweep("ags", apply="update").step_copies == 1


def test_by_default_the_reference_batch_follows_the_batch_of_the_training() -> None:
    by_default = TrainingSpec.model_validate({"base_batch": 128})
    assert [by_default.reference_batch(batch) for batch in (64, 128, 256, 512, 1024, 4096)] == [64, 64, 64, 64, 32, 32]
    assert TrainingSpec.model_validate({"base_batch": 1}).reference_batch(64) == 1
    assert TrainingSpec.model_validate({"base_batch": 128, "small_batch": 16}).reference_batch(512) == 16
    assert TrainingSpec.model_validate({"base_batch": 512, "preset": "paper"}).reference_batch(4096) == 32
    assert TrainingSpec.model_validate({"method": "adascale"}).reference_batch(4096) == 128


def over_epochs(
    epochs: int, method: str = "ags", workload: str = "sgd", samples: int = 10**6, **training: object
) -> list[float]:
    """Return the reference batch with B = 512 at the start, the middle and the end of a training."""
    spec = with_workload(sweep(method, COMPACT, **training), epochs=epochs, optimizer=workload)
    trained = Configuration(2, 1, 256)
    reference = methods.ReferenceBatch(spec, trained, samples)
    return [reference.after(epochs * done) for done in (0.0, 0.5, 1.0)]


def test_the_reference_batch_shrinks_over_a_training_of_few_updates() -> None:
    assert over_epochs(300, samples=600) == over_epochs(150, samples=1023) == pytest.approx([64, 64 / 8**0.5, 8])
    assert over_epochs(450, samples=600) == pytest.approx([64, 64 / (4 / 3) ** 1.5, 27])
    assert over_epochs(600, samples=600) == over_epochs(120, samples=5 * 512) == [64, 64, 64]
    # what is short in both shrinks once
    assert over_epochs(90, samples=600) == over_epochs(60)
    # an epoch counts as at least one step
    assert over_epochs(300, samples=100) == over_epochs(60)


def test_the_reference_batch_shrinks_over_a_training_of_few_epochs() -> None:
    assert over_epochs(60) == over_epochs(3) == pytest.approx([64, 64 / 8**0.5, 8])
    assert over_epochs(90) == pytest.approx([64, 64 / (4 / 3) ** 1.5, 27])
    assert over_epochs(120) == over_epochs(300) == [64, 64, 64]
    assert over_epochs(60, base_batch=256) == pytest.approx([128, 64, 32])
    # B is smaller than the base batch
    assert over_epochs(60, base_batch=1024) == pytest.approx([512, 512, 512])
    assert over_epochs(300, small_batch_shrink=4.0) == pytest.approx([64, 32, 16])
    # samples
    assert over_epochs(60, small_batch=4, small_batch_shrink=16.0) == pytest.approx([4, 1, 1])
    for constant in (
        over_epochs(10, "adascale"),
        over_epochs(10, workload="adamw"),
        over_epochs(10, preset="paper"),
        over_epochs(10, apply="update"),
    ):
        assert len(set(constant)) == 1


def test_a_training_gives_its_optimizer_the_reference_batch() -> None:
    # norms without passes
    worker = new_worker("ags", PERCEPTRON, base_batch=16, small_batch_shrink=4.0)
    epochs, batch = worker.sweep.workload.epochs, CONFIGURATION.global_batch
    assert isinstance(worker.optimizer, TulaOptimizer)
    for done, reference in ((0.0, 8), (0.5, 4), (1.0, 2)):
        worker.set_position(epochs * done, epochs * done)
        assert worker.optimizer.s_max == pytest.approx(batch / reference)


@given(st.integers(1, 2**20), st.integers(1, 2**30), st.integers(1, 2**30))
def test_a_larger_batch_never_gets_a_larger_reference_batch(base: int, one: int, other: int) -> None:
    training = TrainingSpec.model_validate({"base_batch": base})
    small, large = (training.reference_batch(batch) for batch in sorted((one, other)))
    assert max(1, base // 4) <= large <= small <= max(1, base // 2)
