from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.config import LrScaling, Method, SweepSpec
from tula_hpc.ddp.methods import learning_rate, lr_scale, warmup_epochs

# training.base_batch
BASE = 128
METHODS = get_args(Method)
BASELINES = ("lbt", "lrs", "sqrt", "lars", "lamb", "polo")
batches = st.sampled_from([32, 128, 256, 1024, 8192])


def sweep(training: dict[str, object] | None = None, **workload: object) -> SweepSpec:
    training = {"method": "lbt", "base_batch": BASE} | (training or {})
    optimizer = "adamw" if training["method"] == "lamb" else "sgd"
    fields = {"epochs": 100, "lr": 0.1, "optimizer": optimizer, "schedule": "constant", **workload}
    return SweepSpec.model_validate({"name": "x", "workload": fields, "training": training})


def test_steps_divide_at_the_milestones() -> None:
    spec = sweep({"method": "static"}, schedule="step", milestones=(50, 75), gamma=0.2)
    rates = [learning_rate(spec, 1024, epoch) for epoch in (0, 49.99, 50, 74.99, 75, 99)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004])


@pytest.mark.parametrize("method", BASELINES)
@pytest.mark.parametrize("batch", [129, 512, 4096])
def test_warm_up_rises_to_the_methods_rate_without_a_jump(method: str, batch: int) -> None:
    spec = sweep({"method": method})
    rates = [learning_rate(spec, batch, epoch / 10) for epoch in range(60)]
    peak = 0.1 * lr_scale(spec.training, batch)
    assert rates == sorted(rates)
    assert len(set(rates)) == 51
    assert rates[-1] == pytest.approx(peak)
    assert learning_rate(spec, batch, 5 - 1e-9) == pytest.approx(peak)


@given(st.sampled_from(METHODS), batches, st.floats(0.01, 50), st.floats(0.0, 100.0))
def test_no_rate_is_above_the_methods_and_warm_up_starts_at_most_at_the_base_rate(
    method: str, batch: int, warmup: float, epoch: float
) -> None:
    spec = sweep({"method": method, "warmup_epochs": warmup})
    peak = 0.1 * lr_scale(spec.training, batch)
    assert 0 < learning_rate(spec, batch, epoch) <= peak * (1 + 1e-9)
    start = learning_rate(spec, batch, 0.0)
    assert start <= min(0.1, 0.1 * peak + 1e-12)
    if peak >= 10 * 0.1:
        # Goyal et al.: from the base rate
        assert start == pytest.approx(0.1)


def test_methods_that_scale_gradients_keep_the_workloads_rate_and_warm_up() -> None:
    for method in ("static", "ags", "adascale"):
        assert warmup_epochs(sweep({"method": method}), 4096) == 0
        assert warmup_epochs(sweep({"method": method}, warmup_epochs=3), 4096) == 3
        assert learning_rate(sweep({"method": method}), 4096, 0.0) == pytest.approx(0.1)


@pytest.mark.parametrize("method", BASELINES)
def test_baselines_warm_up_over_five_epochs_or_a_fifth_of_a_short_run(method: str) -> None:
    assert warmup_epochs(sweep({"method": method}), 512) == 5
    assert warmup_epochs(sweep({"method": method}, epochs=10), 512) == 2
    # the user wants more
    assert warmup_epochs(sweep({"method": method}, warmup_epochs=8), 512) == 8
    wanted = sweep({"method": method, "warmup_epochs": 0}, warmup_epochs=8)
    # the user wants this
    assert warmup_epochs(wanted, 512) == 0


@pytest.mark.parametrize("batch", [32, BASE])
def test_up_to_the_base_batch_plain_training_is_the_one_that_was_tuned(batch: int) -> None:
    plain = [learning_rate(sweep({"method": "static"}), batch, epoch / 10) for epoch in range(60)]
    assert [learning_rate(sweep({"method": "lbt"}), batch, epoch / 10) for epoch in range(60)] == plain
    scaled = [learning_rate(sweep({"method": "lrs"}), batch, epoch / 10) for epoch in range(60)]
    assert scaled == pytest.approx([rate * batch / BASE for rate in plain])


@given(batches)
def test_only_some_methods_scale_the_rate_and_all_agree_at_the_base_batch(batch: int) -> None:
    ratio = batch / BASE
    expected = {"lrs": ratio, "sqrt": math.sqrt(ratio), "lars": ratio, "lamb": math.sqrt(ratio)}
    for method in METHODS:
        assert lr_scale(sweep({"method": method}).training, batch) == pytest.approx(expected.get(method, 1.0))
        assert lr_scale(sweep({"method": method, "lr_scaling": "linear"}).training, BASE) == 1.0


@pytest.mark.parametrize("method", ["lars", "lamb"])
def test_layer_wise_rates_scale_as_asked_for(method: str) -> None:
    for scaling, expected in {"none": 1.0, "sqrt": 2.0, "linear": 4.0}.items():
        assert lr_scale(sweep({"method": method, "lr_scaling": scaling}).training, 4 * BASE) == expected


@pytest.mark.parametrize("scaling", get_args(LrScaling))
def test_ags_scales_its_rate_on_request_and_then_warms_up(scaling: str) -> None:
    spec = sweep({"method": "ags", "lr_scaling": scaling})
    same = {"none": "static", "sqrt": "sqrt", "linear": "lrs"}[scaling]
    for epoch in (0.0, 2.5, 7.0):
        assert learning_rate(spec, 1024, epoch) == learning_rate(sweep({"method": same}), 1024, epoch)


def test_the_rate_follows_the_batch_in_force() -> None:
    """After running out of memory training goes on with half the batch."""
    spec = sweep({"method": "lrs"})
    assert learning_rate(spec, 512, 50.0) == pytest.approx(learning_rate(spec, 1024, 50.0) / 2)


@given(st.floats(min_value=0, max_value=100), st.sampled_from(["lbt", "lrs"]))
def test_cosine_stays_within_bounds_and_ends_at_zero(epoch: float, method: str) -> None:
    spec = sweep({"method": method}, schedule="cosine", warmup_epochs=3)
    peak = 0.1 * lr_scale(spec.training, 512)
    assert 0 <= learning_rate(spec, 512, epoch) <= peak * (1 + 1e-12)
    assert learning_rate(spec, 512, 100) == pytest.approx(0, abs=1e-12)
