"""The price of a node and hour on every basis of `[pricing]`, for what was already used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from tula_hpc.analysis import billing
from tula_hpc.analysis.formatting import format_money, format_number
from tula_hpc.analysis.pricing import SECONDS_PER_HOUR, train_cost_usd
from tula_hpc.config import ClusterSpec
from tula_hpc.records import Measurement

WATTS_PER_KILOWATT = 1000.0


def node_hour_price(part: ClusterSpec, peak_bytes: float | None, watts: float | None) -> float | None:
    """What a node costs in an hour, in `PricingSpec.currency`; None where the basis needs what is not known.

    Args:
        part: The nodes, and what they cost; a cluster without partitions (see `ClusterSpec.parts`).
        peak_bytes: Memory that each worker uses, for the basis "memory".
        watts: Measured power of a node, for the basis "energy"; the cluster file's figure goes before it.
    """
    pricing = part.pricing
    if pricing.basis == "tres":
        units = billing.billing_per_node(pricing, billing.node_resources(part).tres)
        return units * (1.0 if pricing.usd_per_unit is None else pricing.usd_per_unit)
    if pricing.basis == "energy":
        watts = pricing.watts_per_node or watts
        return watts * pricing.pue / WATTS_PER_KILOWATT * pricing.usd_per_kwh if watts else None
    if pricing.basis == "memory" and not peak_bytes:
        return None
    return train_cost_usd(pricing, 1.0, SECONDS_PER_HOUR, float(part.workers_per_node), float(peak_bytes or 0.0))


def describe_price(part: ClusterSpec, watts: float | None) -> str:
    """The basis in words."""
    pricing, currency = part.pricing, part.pricing.currency
    if pricing.basis == "tres":
        units = billing.billing_per_node(pricing, billing.node_resources(part).tres)
        price = "" if pricing.usd_per_unit is None else f", {format_money(pricing.usd_per_unit)} a unit and hour"
        return f"Slurm's billing: {format_number(units)} units a node{price}"
    if pricing.basis == "energy":
        known = pricing.watts_per_node or watts
        power = f"nodes of {known:.0f} W" if known else "the power of a node is not known"
        return f"energy: {format_money(pricing.usd_per_kwh)} a kWh, {power}, PUE {pricing.pue:g}"
    if pricing.basis == "memory":
        return f"memory: {format_money(pricing.usd_per_gib_hour)} a GiB and hour"
    if pricing.basis == "spot":
        return f"spot: {format_money(pricing.usd_per_spot_node_hour, currency)} a node and hour"
    return f"node-hour: {format_money(pricing.usd_per_node_hour, currency)} a node and hour"


def measured_watts(measurements: Iterable[Measurement]) -> float | None:
    """Power of a node during the profiled steps, median; None where it was not measured."""
    watts = [row.watts_per_node for row in measurements if row.watts_per_node > 0.0]
    return median(watts) if watts else None


def profiled_bytes(measurements: Sequence[Measurement]) -> float | None:
    """Memory of a worker while it profiled, mean over the measurements."""
    used = [row.memory.reserved_bytes for row in measurements if row.memory is not None and row.memory.is_credible]
    return fmean(used) if used else None
