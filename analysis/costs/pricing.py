"""What a training costs, on every basis of `[pricing]`, over columns of candidates.

Paid is expected wall time, that is training, evaluation after every epoch (`evaluation`), the start
of the job, checkpoints (`checkpoints`), and what interruptions repeat: preemptions of spot nodes
(`spot`) and requeues at the time limit (`requeue`). Waiting in the queue is not paid for.

What a training draws: watts of a node, kilowatt-hours of the site.

    E = N × P × T × PUE

P, the power of a node, is the figure of the cluster file, or else what was measured during the
profiled steps. That is less than a node draws: processors and GPUs, as far as they can be read,
without power supplies, memory and fans. PUE (power usage effectiveness) is what the site draws over
what its nodes draw: cooling, losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from numpy import float64
from numpy.typing import NDArray

from tula_hpc.analysis.costs import interruptions as checkpoints
from tula_hpc.analysis.costs import interruptions as spot
from tula_hpc.analysis.costs import slurm_billing as billing
from tula_hpc.analysis.costs.interruptions import SaveCost, under_time_limit
from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.config import GIB, ClusterSpec, PricingSpec, TrainingSpec
from tula_hpc.errors import InputError

JOULES_PER_KWH = 3.6e6


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


SECONDS_PER_HOUR = 3600.0
MOMENT_S = 1e-9
# 30,000 years: expected times of what never ends are cut here, so that they can be written down
FOREVER_S = 1e12

Array = NDArray[float64]
Quantity = TypeVar("Quantity", float, Array)


def fixed_share(wall_parts_s: Mapping[str, float]) -> float:
    """Share of a candidate's expected wall time that is the same however long a step takes: evaluation and starts.

    0 where the parts are not known.
    """
    whole_s = sum(wall_parts_s.values())
    return (wall_parts_s["evaluation"] + wall_parts_s["starts"]) / whole_s if whole_s > 0 else 0.0


class Usage(NamedTuple):
    """What trainings need; columns of one length."""

    nodes: Array
    workers_per_node: Array
    train_time_s: Array
    # per worker
    peak_memory_bytes: Array
    # all evaluations together, on top of train_time_s
    evaluation_s: Array | float = 0.0
    epochs: Array | float = 1.0


class Bill(NamedTuple):
    """What they cost; columns of that length."""

    # expected, with starts, checkpoints, interruptions; `FOREVER_S` where it would never end
    wall_time_s: Array
    # expected, at the time limit
    requeues: Array
    # in `PricingSpec.currency`
    cost: Array
    # NaN where no power is known
    energy_kwh: Array
    # seconds of steps between two checkpoints
    checkpoint_s: Array
    # part of the wall time: what all checkpoints cost where nothing is repeated
    saving_s: Array


def train_cost_usd(
    pricing: PricingSpec,
    nodes: Quantity,
    train_time_s: Quantity,
    workers_per_node: Quantity,
    peak_memory_bytes: Quantity,
) -> Quantity:
    """Cost of training on N nodes for T hours (S. Tyagi, F. Wang, "Tula", equations of cost).

    Basis "node-hour": `C = T × N × p`, p in USD per node and hour; "spot" likewise, at its own
    price. Basis "memory": `C = T × N × workers × M × q`, M the GiB that each worker uses, q in USD
    per GiB and hour.

    Args:
        pricing: Basis and prices.
        nodes: N; numbers, or arrays of one shape, as all arguments that follow.
        train_time_s: T, seconds.
        workers_per_node: Workers on each node.
        peak_memory_bytes: M, bytes per worker; counts only for the basis "memory".

    Returns:
        USD.

    Raises:
        ValueError: The basis needs more than this; see `bill`.
    """
    node_hours = nodes * train_time_s / SECONDS_PER_HOUR
    if pricing.basis == "node-hour":
        return node_hours * pricing.usd_per_node_hour
    if pricing.basis == "spot":
        return node_hours * pricing.usd_per_spot_node_hour
    if pricing.basis == "memory":
        return node_hours * workers_per_node * peak_memory_bytes / GIB * pricing.usd_per_gib_hour
    raise ValueError(f"basis {pricing.basis!r} is not paid by node, time and memory alone")


def bill(
    usage: Usage,
    cluster: ClusterSpec,
    training: TrainingSpec,
    power: NodePower | None,
    save: SaveCost | None = None,
) -> Bill:
    """Expected wall time and cost of trainings on one kind of nodes.

    Args: usage: The trainings. cluster: Prices, time limit and its warning, and what a node has;
        without partitions (see `ClusterSpec.parts`). training: `checkpoint_minutes`, where the user
        sets it. power: Of a node; None where unknown. save: What a checkpoint costs; None: as the
        prices state.

    Raises:
        InputError: The basis is energy, and no power is known.
    """
    pricing = cluster.pricing
    save_s = pricing.checkpoint_write_s if save is None else save.seconds
    interval_s = _checkpoint_s(cluster, training, usage, save_s)
    saving_s = usage.train_time_s / interval_s * save_s
    work_s = usage.train_time_s + usage.evaluation_s + saving_s
    if pricing.basis == "spot":
        work_s = _with_preemptions_s(pricing, usage, interval_s, save_s)
    until_warning_s = cluster.train_minutes * 60.0 - cluster.signal_delay_s
    limited = under_time_limit(work_s, until_warning_s, interval_s, pricing.start_s)
    wall_s = np.minimum(limited.time_s, FOREVER_S)
    kwh = (
        energy_kwh(usage.nodes, wall_s, power.watts, pricing.pue)
        if power
        else np.full_like(wall_s, np.nan)
    )
    cost = _cost(usage._replace(train_time_s=wall_s), cluster, kwh, power)
    return Bill(wall_s, limited.requeues, cost, kwh, interval_s, saving_s)


def _cost(usage: Usage, cluster: ClusterSpec, kwh: Array, power: NodePower | None) -> Array:
    pricing = cluster.pricing
    if pricing.basis == "energy":
        if power is None:
            message = "no measurement has the power of a node; give it in watts, or choose another pricing.basis"
            raise InputError(message, key="pricing.watts_per_node")
        return kwh * pricing.usd_per_kwh
    if pricing.basis == "tres":
        units = billing.billing_per_node(pricing, billing.node_resources(cluster).tres)
        price = 1.0 if pricing.usd_per_unit is None else pricing.usd_per_unit
        return usage.nodes * usage.train_time_s / SECONDS_PER_HOUR * (units * price)
    return train_cost_usd(
        pricing, usage.nodes, usage.train_time_s, usage.workers_per_node, usage.peak_memory_bytes
    )


def _with_preemptions_s(
    pricing: PricingSpec, usage: Usage, interval_s: Array, save_s: float
) -> Array:
    """Training on spot nodes, with what preemptions repeat, evaluations among it."""
    work_s = usage.train_time_s + usage.evaluation_s
    # they lie between checkpoints as steps do
    evaluating = work_s / np.maximum(usage.train_time_s, MOMENT_S)
    between_s = between_preemptions_s(pricing, usage.nodes)
    return spot.expected_time_s(
        work_s, interval_s * evaluating, between_s, write_s=save_s, restart_s=pricing.start_s
    )


def expected_preemptions(pricing: PricingSpec, nodes: Array, wall_time_s: Array) -> Array:
    """How often jobs of N nodes are preempted in so much time, on average; 0 except on spot nodes."""
    if pricing.basis != "spot":
        return np.zeros_like(wall_time_s)
    return wall_time_s / between_preemptions_s(pricing, nodes)


def between_preemptions_s(pricing: PricingSpec, nodes: Array) -> Array:
    """Mean seconds between two preemptions of a job of N nodes; only for the basis "spot"."""
    between_s = pricing.preemption_hours * SECONDS_PER_HOUR
    return between_s / nodes if pricing.preempted == "node" else np.full_like(nodes, between_s)


def _checkpoint_s(
    cluster: ClusterSpec, training: TrainingSpec, usage: Usage, save_s: float
) -> Array:
    """Seconds of steps between two checkpoints, as training chooses them: at the interval, and at ends of epochs."""
    between_s = between_preemptions_s(cluster.pricing, usage.nodes)
    if cluster.pricing.basis != "spot":
        between_s = np.full_like(usage.nodes, training.interruption_hours * SECONDS_PER_HOUR)
    is_set = training.checkpoint_minutes is not None
    every_s = (
        np.full_like(between_s, training.checkpoint_s)
        if is_set
        else checkpoints.interval_s(save_s, between_s)
    )
    least_s = 0.0 if is_set else checkpoints.least_interval_s(save_s)
    return checkpoints.with_epoch_ends_s(every_s, usage.train_time_s / usage.epochs, least_s)


def assumptions(cluster: ClusterSpec, power: NodePower | None) -> list[str]:
    """What the prices of one kind of nodes assume and the user should know."""
    pricing = cluster.pricing
    found = list(billing.node_resources(cluster).assumed) if pricing.basis == "tres" else []
    if pricing.basis == "spot":
        whose = "a node" if pricing.preempted == "node" else "the job"
        found.append(
            f"spot nodes: {whose} is preempted every {pricing.preemption_hours:g} hours on average"
        )
    if power is not None and (pricing.basis == "energy" or power.measured):
        found.append(_draws(power, pricing.pue))
    return found


def _draws(power: NodePower, pue: float) -> str:
    site = f"the site {pue:g} times as much"
    if not power.measured:
        return f"a node draws {power.watts:.0f} W (as pricing.watts_per_node says), {site}"
    what = f"a node's processors and GPUs draw {power.watts:.0f} W (measured), {site}"
    return f"{what}; power supplies, memory and fans are not included: pricing.watts_per_node can say the whole"
