from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.analysis.pricing import train_cost_usd
from tula_hpc.config import GIB, PricingSpec

HOUR_S = 3600.0
amounts = st.floats(0.1, 1e6)


def test_one_node_for_one_hour_costs_its_price() -> None:
    assert train_cost_usd(PricingSpec(usd_per_node_hour=2.48), 1.0, HOUR_S, 8.0, 1e9) == pytest.approx(2.48)


def test_one_gibibyte_for_one_hour_costs_its_price() -> None:
    pricing = PricingSpec(basis="memory", usd_per_gib_hour=0.15)
    assert train_cost_usd(pricing, 1.0, HOUR_S, 1.0, float(GIB)) == pytest.approx(0.15)


@given(nodes=amounts, seconds=amounts, workers=amounts, peak=amounts, factor=st.floats(1.0, 100.0))
def test_cost_is_proportional_to_what_is_paid_for(
    nodes: float, seconds: float, workers: float, peak: float, factor: float
) -> None:
    by_node, by_memory = PricingSpec(), PricingSpec(basis="memory")
    for pricing in (by_node, by_memory):
        cost = train_cost_usd(pricing, nodes, seconds, workers, peak)
        assert train_cost_usd(pricing, factor * nodes, seconds, workers, peak) == pytest.approx(factor * cost)
        assert train_cost_usd(pricing, nodes, factor * seconds, workers, peak) == pytest.approx(factor * cost)
    assert train_cost_usd(by_node, nodes, seconds, workers, factor * peak) == train_cost_usd(
        by_node, nodes, seconds, workers, peak
    )
    more = train_cost_usd(by_memory, nodes, seconds, workers, factor * peak)
    assert more == pytest.approx(train_cost_usd(by_memory, nodes, seconds, factor * workers, peak))
    assert more == pytest.approx(factor * train_cost_usd(by_memory, nodes, seconds, workers, peak))


def test_arrays_give_what_their_elements_give() -> None:
    pricing = PricingSpec(basis="memory")
    nodes, seconds, workers, peak = np.array([[1.0, 2.0], [10.0, 20.0], [4.0, 1.0], [1e9, 2e9]])
    each = [
        train_cost_usd(pricing, *column)
        for column in zip(*map(np.ndarray.tolist, (nodes, seconds, workers, peak)), strict=True)
    ]
    np.testing.assert_allclose(train_cost_usd(pricing, nodes, seconds, workers, peak), each)
