"""What a training costs."""

from __future__ import annotations

from typing import TypeVar

from numpy import float64
from numpy.typing import NDArray

from tula_hpc.config import GIB, PricingSpec

SECONDS_PER_HOUR = 3600.0

Quantity = TypeVar("Quantity", float, NDArray[float64])


def train_cost_usd(
    pricing: PricingSpec,
    nodes: Quantity,
    train_time_s: Quantity,
    workers_per_node: Quantity,
    peak_memory_bytes: Quantity,
) -> Quantity:
    """Cost of training on N nodes for T hours (S. Tyagi, F. Wang, "Tula", equations of cost).

    Basis "node-hour": `C = T × N × p`, p in USD per node and hour. Basis "memory": `C = T × N × workers × M × q`, M the
    GiB that each worker uses, q in USD per GiB and hour.

    Args:
        pricing: Basis and prices.
        nodes: N; numbers, or arrays of one shape, as all arguments that follow.
        train_time_s: T, seconds.
        workers_per_node: Workers on each node.
        peak_memory_bytes: M, bytes per worker; counts only for the basis "memory".

    Returns:
        USD.
    """
    node_hours = nodes * train_time_s / SECONDS_PER_HOUR
    if pricing.basis == "node-hour":
        return node_hours * pricing.usd_per_node_hour
    return node_hours * workers_per_node * peak_memory_bytes / GIB * pricing.usd_per_gib_hour
