from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.config import WorkloadSpec
from tula_hpc.schedule import learning_rate


def workload(**fields: object) -> WorkloadSpec:
    return WorkloadSpec.model_validate({"epochs": 100, "lr": 0.1, **fields})


def test_steps_divide_at_the_milestones() -> None:
    spec = workload(schedule="step", milestones=(50, 75), gamma=0.2)
    rates = [learning_rate(spec, epoch) for epoch in (0, 49.99, 50, 74.99, 75, 99)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004])


def test_warm_up_rises_to_the_rate_without_a_jump() -> None:
    spec = workload(schedule="constant", warmup_epochs=5)
    rates = [learning_rate(spec, epoch / 10) for epoch in range(60)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(0.01)
    assert learning_rate(spec, 5 - 1e-9) == pytest.approx(0.1)


@given(st.floats(min_value=0, max_value=100))
def test_cosine_stays_within_bounds_and_ends_at_zero(epoch: float) -> None:
    spec = workload(schedule="cosine", warmup_epochs=3)
    assert 0 <= learning_rate(spec, epoch) <= 0.1
    assert learning_rate(spec, 100) == pytest.approx(0, abs=1e-12)
