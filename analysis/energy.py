"""What a training draws: watts of a node, kilowatt-hours of the site.

    E = N × P × T × PUE

P, the power of a node, is the figure of the cluster file, or else what was measured during the profiled steps. That is
less than a node draws: processors and GPUs, as far as they can be read, without power supplies, memory and fans. PUE
(power usage effectiveness) is what the site draws over what its nodes draw: cooling, losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.aggregate import Profile
from tula_hpc.config import PricingSpec

JOULES_PER_KWH = 3.6e6

Quantity = TypeVar("Quantity", float, NDArray[np.float64])


class NodePower(NamedTuple):
    """Power of a node under load."""

    watts: float
    measured: bool


def node_power(profiles: Iterable[Profile], pricing: PricingSpec) -> NodePower | None:
    """The stated figure, which is of the whole node; else the median over what was measured, else None."""
    if pricing.watts_per_node is not None:
        return NodePower(pricing.watts_per_node, False)
    measured = [profile.watts_per_node for profile in profiles if profile.watts_per_node > 0.0]
    return NodePower(median(measured), True) if measured else None


def energy_kwh(nodes: Quantity, time_s: Quantity, watts: float, pue: float) -> Quantity:
    """Kilowatt-hours of N nodes over a time in seconds, the site's overhead included."""
    return nodes * time_s * (watts * pue / JOULES_PER_KWH)
