from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning_data import grid
from tula_hpc.analysis.costs.pricing import (
    Bill,
    NodePower,
    Usage,
    assumptions,
    bill,
    expected_preemptions,
    node_power,
    train_cost_usd,
)
from tula_hpc.analysis.models.profiles import summarize
from tula_hpc.config import GIB, ClusterSpec, PricingSpec, TrainingSpec
from tula_hpc.errors import InputError
from tula_hpc.formatting import FOREVER_S

HOUR_S = 3600.0
# leaves training as the only thing that takes time
NO_STARTS: dict[str, Any] = {"restart_s": 0.0, "checkpoint_write_s": 0.0}
amounts = st.floats(0.1, 1e6)


def usage(*, nodes: float = 1.0, hours: float = 1.0, workers: float = 1.0, peak: float = GIB) -> Usage:
    return Usage(*(np.array([value]) for value in (nodes, workers, hours * HOUR_S, peak)))


def priced(needs: Usage, power: NodePower | None = None, *, minutes: float | None = None, **pricing: Any) -> Bill:
    spec = ClusterSpec.model_validate({"pricing": pricing, "train_minutes": 10**6})
    return bill(needs, spec, TrainingSpec(checkpoint_minutes=minutes), power)


def test_one_node_for_one_hour_costs_its_price() -> None:
    assert train_cost_usd(PricingSpec(usd_per_node_hour=2.48), 1.0, HOUR_S, 8.0, 1e9) == pytest.approx(2.48)
    assert priced(usage(), usd_per_node_hour=2.48, **NO_STARTS).cost == pytest.approx(2.48)


def test_one_gibibyte_for_one_hour_costs_its_price() -> None:
    pricing = PricingSpec(basis="memory", usd_per_gib_hour=0.15)
    assert train_cost_usd(pricing, 1.0, HOUR_S, 1.0, float(GIB)) == pytest.approx(0.15)
    assert priced(usage(), basis="memory", **NO_STARTS).cost == pytest.approx(0.15)


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


BASES: list[dict[str, Any]] = [
    {"basis": "node-hour"},
    {"basis": "memory"},
    {"basis": "tres", "tres_weights": "CPU=1,Mem=0.25G"},
    {"basis": "spot"},
    {"basis": "energy"},
]


@pytest.mark.parametrize("pricing", BASES, ids=lambda pricing: str(pricing["basis"]))
def test_columns_give_what_their_elements_give(pricing: dict[str, Any]) -> None:
    columns = np.array([[1.0, 2.0, 64.0], [4.0, 1.0, 8.0], [1e3, 2e6, 1e5], [1e9, 2e9, 4e9]])
    power = NodePower(300.0, measured=True)
    together = priced(Usage(*columns), power, **pricing)
    each = [priced(Usage(*column[:, None]), power, **pricing) for column in columns.T]
    for name in Bill._fields:
        np.testing.assert_allclose(getattr(together, name), [getattr(one, name)[0] for one in each])


@pytest.mark.parametrize("pricing", BASES, ids=lambda pricing: str(pricing["basis"]))
def test_cost_and_time_rise_with_nodes_and_time(pricing: dict[str, Any]) -> None:
    power = NodePower(300.0, measured=True)
    base = priced(usage(nodes=2, hours=10), power, **pricing)
    longer, wider = (priced(usage(nodes=n, hours=h), power, **pricing) for n, h in ((2, 20), (4, 10)))
    assert longer.cost > base.cost
    assert wider.cost > base.cost
    assert longer.wall_time_s > base.wall_time_s


def test_service_units_are_billing_times_hours_and_have_a_price_only_if_given() -> None:
    weights: dict[str, Any] = {"basis": "tres", "tres_weights": "CPU=4", **NO_STARTS}
    assert priced(usage(nodes=3, hours=2), **weights).cost == pytest.approx(3 * 2 * 4)
    assert priced(usage(nodes=3, hours=2), **weights, usd_per_unit=0.5).cost == pytest.approx(12)
    assert PricingSpec.model_validate(weights).currency == "SU"
    assert PricingSpec.model_validate(weights | {"usd_per_unit": 0.5}).currency == "USD"


def test_a_requeued_training_pays_for_what_it_repeats() -> None:
    pricing = {"restart_s": 100.0, "checkpoint_write_s": 4.0}
    spec = ClusterSpec.model_validate({"train_minutes": 60, "pricing": pricing})
    paid = bill(usage(hours=1.5), spec, TrainingSpec(checkpoint_minutes=10), None)
    assert paid.requeues == 1
    assert paid.wall_time_s == pytest.approx(100 + 1.5 * HOUR_S + 9 * 4 + 100 + 300)
    assert paid.cost == pytest.approx(float(paid.wall_time_s[0]) / HOUR_S)


@pytest.mark.parametrize("pricing", BASES, ids=lambda pricing: str(pricing["basis"]))
def test_the_start_and_checkpoints_are_paid_whatever_the_basis(pricing: dict[str, Any]) -> None:
    def paid(**more: float) -> Bill:
        power, rarely = NodePower(300.0, measured=True), {"preemption_hours": 1e9}
        return priced(usage(hours=10), power, minutes=30.0, **rarely, **NO_STARTS | more, **pricing)

    plain, started, saved = paid(), paid(restart_s=600.0), paid(checkpoint_write_s=90.0)
    assert plain.wall_time_s == pytest.approx(10 * HOUR_S)
    assert started.wall_time_s == pytest.approx(10 * HOUR_S + 600)
    assert saved.wall_time_s == pytest.approx(10 * HOUR_S + 20 * 90)
    assert started.cost == pytest.approx(plain.cost * (1 + 1 / 60))


def test_a_job_ends_at_the_warning_before_its_time_limit() -> None:
    def requeues(signal_delay_s: int) -> float:
        limits = {"train_minutes": 61, "signal_delay_s": signal_delay_s, "pricing": NO_STARTS}
        return float(bill(usage(), ClusterSpec.model_validate(limits), TrainingSpec(), None).requeues[0])

    assert (requeues(60), requeues(61)) == (0, 1)


def test_preemptions_are_counted_on_spot_nodes_alone() -> None:
    nodes, hours = np.array([2.0, 4.0]), np.array([12.0, 24.0]) * HOUR_S
    spot = PricingSpec(basis="spot", preemption_hours=6.0)
    np.testing.assert_allclose(expected_preemptions(spot, nodes, hours), [4, 16])
    of_job = spot.model_copy(update={"preempted": "job"})
    np.testing.assert_allclose(expected_preemptions(of_job, nodes, hours), [2, 4])
    np.testing.assert_allclose(expected_preemptions(PricingSpec(), nodes, hours), 0)


def test_nodes_are_preempted_as_often_as_there_are_nodes() -> None:
    lost = {
        (nodes, who): float(priced(usage(nodes=nodes, hours=50), basis="spot", preempted=who).wall_time_s[0])
        for nodes in (1, 16)
        for who in ("node", "job")
    }
    assert lost[1, "node"] == lost[1, "job"] == lost[16, "job"] < lost[16, "node"]
    per_node = priced(usage(nodes=16, hours=50), basis="spot", preemption_hours=16.0)
    per_job = priced(usage(nodes=16, hours=50), basis="spot", preemption_hours=1.0, preempted="job")
    assert per_node._replace(energy_kwh=per_job.energy_kwh) == per_job


def test_on_spot_nodes_the_best_interval_is_used_unless_the_user_sets_one() -> None:
    needs = usage(nodes=4, hours=100)
    best, mine = priced(needs, basis="spot"), priced(needs, basis="spot", minutes=120.0)
    assert mine.checkpoint_s == 7200
    assert best.checkpoint_s < 7200
    assert best.wall_time_s < mine.wall_time_s
    assert priced(needs).checkpoint_s == 300


def test_what_never_ends_has_a_finite_price() -> None:
    paid = priced(usage(nodes=1e6, hours=100), basis="spot")
    assert paid.wall_time_s == FOREVER_S
    assert np.all(np.isfinite(paid.cost))


def test_energy_is_known_with_every_basis_and_paid_by_one() -> None:
    power = NodePower(500.0, measured=True)
    by_hour = priced(usage(nodes=2, hours=3), power, pue=1.5, **NO_STARTS)
    assert by_hour.energy_kwh == pytest.approx(2 * 3 * 0.5 * 1.5)
    assert by_hour.cost == pytest.approx(6.0)
    by_kwh = priced(usage(nodes=2, hours=3), power, basis="energy", pue=1.5, usd_per_kwh=0.2, **NO_STARTS)
    assert by_kwh.cost == pytest.approx(4.5 * 0.2)
    assert np.isnan(priced(usage()).energy_kwh)
    with pytest.raises(InputError, match=r"pricing\.watts_per_node"):
        priced(usage(), basis="energy")


def test_the_stated_power_of_a_whole_node_goes_before_what_was_measured_of_it() -> None:
    pricing = PricingSpec(watts_per_node=100.0)
    rows = [
        row.model_copy(update={"watts_per_node": watts}) for row, watts in zip(grid(), (0, 200, 400, 300), strict=False)
    ]
    assert node_power(summarize(rows).profiles, pricing) == NodePower(100.0, measured=False)
    assert node_power(summarize(rows).profiles, PricingSpec()) == NodePower(300.0, measured=True)
    assert node_power(summarize(grid()).profiles, pricing) == NodePower(100.0, measured=False)
    assert node_power(summarize(grid()).profiles, PricingSpec()) is None


def test_assumptions_of_prices_are_named() -> None:
    spot = ClusterSpec.model_validate({"pricing": {"basis": "spot", "preemption_hours": 6}})
    assert "every 6 hours" in assumptions(spot, None)[0]
    priced = ClusterSpec.model_validate({"pricing": {"usd_per_node_hour": 2.0}})
    assert assumptions(priced, None) == []
    assert assumptions(ClusterSpec(), None)[0].startswith("costs assume 1.00 USD per node and hour, not a real price")
    measured = assumptions(priced, NodePower(450.0, measured=True))[0]
    assert "processors and GPUs draw 450 W (measured)" in measured
    assert "power supplies, memory and fans are not included" in measured
    energy = ClusterSpec.model_validate({"pricing": {"basis": "energy"}})
    assert "not included" not in assumptions(energy, NodePower(450.0, measured=False))[0]
