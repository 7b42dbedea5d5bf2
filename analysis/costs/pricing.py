"""Cost and energy of trainings, on every basis of `[pricing]`, over columns of candidates.

Expected wall time is paid for: training, evaluation after every epoch (`evaluation`), the start and
end of the job, checkpoints, and the work that preemptions of spot nodes and requeues at the time
limit repeat (`interruptions`). Waiting in the queue is not paid for.

Energy is E = N × P × T × PUE, in kilowatt-hours of the site. P, the power of a node, is the figure
in the cluster file, or else measured during the profiled steps. The measured power is less than a
node draws: it covers processors and GPUs, as far as they can be read, without power supplies,
memory and fans. PUE (power usage effectiveness) is the site's power over that of its nodes, which
adds cooling and losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from tula_hpc.analysis.costs import interruptions, slurm_billing
from tula_hpc.analysis.costs.interruptions import Resume
from tula_hpc.analysis.costs.spread import MOMENT_S, Array
from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.config import GIB, ClusterSpec, PricingSpec, TrainingSpec
from tula_hpc.errors import InputError
from tula_hpc.formatting import FOREVER_S, HOUR_S, format_money

JOULES_PER_KWH = 3.6e6

Amount = TypeVar("Amount", float, Array)


class NodePower(NamedTuple):
    """Power of a node under load."""

    watts: float
    measured: bool


def node_power(profiles: Iterable[Profile], pricing: PricingSpec) -> NodePower | None:
    """Return the stated power of the whole node, else the median measured power, else None."""
    if pricing.watts_per_node is not None:
        return NodePower(pricing.watts_per_node, False)
    measured = [profile.watts_per_node for profile in profiles if profile.watts_per_node > 0.0]
    return NodePower(median(measured), True) if measured else None


class Usage(NamedTuple):
    """Resources that trainings use; columns of equal length."""

    nodes: Array
    workers_per_node: Array
    train_time_s: Array
    # peak memory of each worker
    peak_memory_bytes: Array
    # seconds of all evaluations together, not included in train_time_s
    evaluation_s: Array | float = 0.0
    epochs: Array | float = 1.0
    # seconds that the end of each job takes
    end_s: Array | float = 0.0


class Bill(NamedTuple):
    """Expected time and cost of trainings; columns of equal length."""

    # including starts, checkpoints and interruptions; `FOREVER_S` for trainings that never end
    wall_time_s: Array
    # number of requeues at the time limit
    requeues: Array
    # in `PricingSpec.currency`
    cost: Array
    # NaN if the power of a node is unknown
    energy_kwh: Array
    # seconds of steps between two checkpoints
    checkpoint_s: Array
    # seconds of all checkpoints if no work is repeated; included in the wall time
    saving_s: Array


def train_cost_usd(
    pricing: PricingSpec,
    nodes: Amount,
    train_time_s: Amount,
    workers_per_node: Amount,
    peak_memory_bytes: Amount,
) -> Amount:
    """Return the cost of training on N nodes (S. Tyagi, F. Wang, "Tula", equations of cost).

    Basis "node-hour": `C = T × N × p`, with p in USD per node and hour; "spot" the same, with its
    own price. Basis "memory": `C = T × N × workers × M × q`, with M the GiB that each worker uses
    and q in USD per GiB and hour. Arguments are numbers, or arrays of one shape.

    Raises:
        ValueError: The basis needs more quantities than these; see `bill`.
    """
    node_hours = nodes * train_time_s / HOUR_S
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
    save_s: float | None = None,
    *,
    resume: Resume = Resume.CHECKPOINT,
) -> Bill:
    """Return expected wall time and cost of trainings on a cluster without partitions.

    Without `save_s` a checkpoint costs what the prices state.

    Raises:
        InputError: The basis is energy, and the power of a node is unknown.
    """
    pricing = cluster.pricing
    if save_s is None:
        save_s = pricing.save_s
    if resume is Resume.NOTHING:
        # all of its work is one epoch, from whose beginning it starts over
        save_s = 0.0
        usage = usage._replace(epochs=1.0)
    interval_s = _saved_every_s(cluster, training, usage, save_s, resume)
    saving_s = usage.train_time_s / interval_s * save_s
    work_s = usage.train_time_s + usage.evaluation_s + saving_s
    limit_s = cluster.train_minutes * 60.0 - cluster.signal_delay_s
    start_s = pricing.start_s
    if resume is Resume.CHECKPOINT:
        limited = interruptions.under_time_limit(work_s, limit_s, interval_s, start_s)
    else:
        limited = interruptions.by_epochs_under_time_limit(work_s, limit_s, usage.epochs, start_s)
    time_s = limited.time_s
    if pricing.basis == "spot":
        # a preempted job has its whole time limit again, so that both kinds of losses add up
        time_s = time_s + _with_preemptions_s(pricing, usage, interval_s, save_s) - work_s
    ends_s = (1.0 + np.minimum(limited.requeues, FOREVER_S)) * usage.end_s
    wall_s = np.minimum(time_s + ends_s, FOREVER_S)
    kwh = np.full_like(wall_s, np.nan)
    if power:
        kwh = usage.nodes * wall_s * (power.watts * pricing.pue / JOULES_PER_KWH)
    cost = _cost(usage._replace(train_time_s=wall_s), cluster, kwh, power)
    return Bill(wall_s, limited.requeues, cost, kwh, interval_s, saving_s)


def enough_minutes(work_s: Array, interval_s: Array, cluster: ClusterSpec, requeues: int) -> Array:
    """Return the least train_minutes with which trainings are requeued at most k times.

    In the letters of `under_time_limit`, L = (T + R + k (R + τ/2)) / (1 + k). k (`requeues`) is 0
    for a training that starts over after an interruption, and for the work of a single job.
    """
    start_s = cluster.pricing.start_s
    limit_s = (work_s + start_s + requeues * (start_s + interval_s / 2.0)) / (1.0 + requeues)
    return np.ceil((limit_s + cluster.signal_delay_s) / 60.0)


def _cost(usage: Usage, cluster: ClusterSpec, kwh: Array, power: NodePower | None) -> Array:
    pricing = cluster.pricing
    if pricing.basis == "energy":
        if power is None:
            raise InputError(
                "no measurement has the power of a node; "
                "give it in watts, or choose another pricing.basis",
                key="pricing.watts_per_node",
            )
        return kwh * pricing.usd_per_kwh
    if pricing.basis == "tres":
        units = slurm_billing.billing_per_node(pricing, slurm_billing.node_resources(cluster).tres)
        price = 1.0 if pricing.usd_per_unit is None else pricing.usd_per_unit
        return usage.nodes * usage.train_time_s / HOUR_S * (units * price)
    return train_cost_usd(
        pricing, usage.nodes, usage.train_time_s, usage.workers_per_node, usage.peak_memory_bytes
    )


def _with_preemptions_s(
    pricing: PricingSpec, usage: Usage, interval_s: Array, save_s: float
) -> Array:
    work_s = usage.train_time_s + usage.evaluation_s
    # evaluations also fall between checkpoints, so that an interval holds more work than its steps
    evaluating = np.maximum(work_s, MOMENT_S) / np.maximum(usage.train_time_s, MOMENT_S)
    return interruptions.expected_time_s(
        work_s,
        interval_s * evaluating,
        between_preemptions_s(pricing, usage.nodes),
        write_s=save_s,
        restart_s=pricing.start_s,
    )


def expected_preemptions(pricing: PricingSpec, nodes: Array, wall_time_s: Array) -> Array:
    """Return the mean number of preemptions of trainings on N nodes; 0 except on spot nodes."""
    if pricing.basis != "spot":
        return np.zeros_like(wall_time_s)
    return wall_time_s / between_preemptions_s(pricing, nodes)


def between_preemptions_s(pricing: PricingSpec, nodes: Array) -> Array:
    """Return the mean seconds between preemptions of a job of N nodes; only for basis "spot"."""
    between_s = pricing.preemption_hours * HOUR_S
    return between_s / nodes if pricing.preempted == "node" else np.full_like(nodes, between_s)


def _saved_every_s(
    cluster: ClusterSpec, training: TrainingSpec, usage: Usage, save_s: float, resume: Resume
) -> Array:
    """Return the mean seconds of steps between points to resume from, ends of epochs included."""
    epoch_s = usage.train_time_s / usage.epochs
    if resume is not Resume.CHECKPOINT:
        return np.maximum(epoch_s, MOMENT_S)
    if training.checkpoint_s is not None:
        every_s = np.full_like(usage.nodes, training.checkpoint_s)
        return interruptions.with_epoch_ends_s(every_s, epoch_s, 0.0)
    between_s = np.full_like(usage.nodes, training.interruption_hours * HOUR_S)
    if cluster.pricing.basis == "spot":
        between_s = between_preemptions_s(cluster.pricing, usage.nodes)
    every_s = interruptions.interval_s(save_s, between_s)
    least_s = interruptions.least_interval_s(save_s)
    return interruptions.with_epoch_ends_s(every_s, epoch_s, least_s)


def assumptions(cluster: ClusterSpec, power: NodePower | None) -> list[str]:
    """Return notes to the user about assumptions behind the costs on one kind of nodes."""
    pricing = cluster.pricing
    found: list[str] = []
    if pricing.basis == "tres":
        found += slurm_billing.node_resources(cluster).assumed
    if pricing.is_default:
        found.append(
            f"costs assume {format_money(pricing.usd_per_node_hour)} per node and hour, not a real "
            "price but the default of pricing.usd_per_node_hour: read them as node-hours, or set "
            "it in the cluster file"
        )
    if pricing.basis == "spot":
        preempted = "a node" if pricing.preempted == "node" else "the job"
        hours = pricing.preemption_hours
        often = "hour" if hours == 1 else f"{hours:g} hours"
        found.append(f"spot nodes: {preempted} is preempted every {often} on average")
    if power is not None and (pricing.basis == "energy" or power.measured):
        found.append(_power_note(power, pricing.pue))
    return found


def _power_note(power: NodePower, pue: float) -> str:
    watts = f"{power.watts:.0f} W"
    site = f"the site {pue:g} times as much"
    if not power.measured:
        return f"a node draws {watts} (as pricing.watts_per_node says), {site}"
    return (
        f"a node's processors and GPUs draw {watts} (measured), {site}; power supplies, memory and "
        "fans are not included: set pricing.watts_per_node to include them"
    )
