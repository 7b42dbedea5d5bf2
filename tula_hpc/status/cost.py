"""Cost of a run so far: node-hours of its jobs by stage, where these come from, and their price.

`node_hour_price` covers every basis of `[pricing]`, for resources that were already used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

from tula_hpc.analysis.costs import slurm_billing as billing
from tula_hpc.analysis.costs.pricing import train_cost_usd
from tula_hpc.analysis.costs.training_bill import PromiseVerdict, TrainingBill, training_bill
from tula_hpc.analysis.costs.training_bill import Source as BillSource
from tula_hpc.analysis.costs.usage import actual_use, job_runs, only_waiting_s
from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import HOUR_S, format_money, format_number
from tula_hpc.records import MAIN_LABEL, JobAccount, Measurement, Record, Submission
from tula_hpc.status.jobs import JobPhase, JobStatus, in_phase, of_stage
from tula_hpc.status.run_files import Facts

WATTS_PER_KILOWATT = 1000.0


def node_hour_price(
    part: ClusterSpec, peak_bytes: float | None, watts: float | None
) -> float | None:
    """Return the price of a node-hour in `PricingSpec.currency`, None if unknown.

    `part` has no partitions of its own. `peak_bytes`, of each worker, are for the basis "memory",
    `watts`, as measured, for the basis "energy" if the cluster file does not give them.
    """
    pricing = part.pricing
    if pricing.basis == "tres":
        units = billing.billing_per_node(pricing, billing.node_resources(part).tres)
        return units * (1.0 if pricing.usd_per_unit is None else pricing.usd_per_unit)
    if pricing.basis == "energy":
        watts = pricing.watts_per_node or watts
        if not watts:
            return None
        return watts * pricing.pue / WATTS_PER_KILOWATT * pricing.usd_per_kwh
    if pricing.basis == "memory" and not peak_bytes:
        return None
    return train_cost_usd(
        pricing, 1.0, HOUR_S, float(part.workers_per_node), float(peak_bytes or 0.0)
    )


def describe_price(part: ClusterSpec, watts: float | None) -> str:
    """Describe the basis of the price."""
    pricing, currency = part.pricing, part.pricing.currency
    if pricing.basis == "tres":
        units = billing.billing_per_node(pricing, billing.node_resources(part).tres)
        words = f"Slurm's billing: {format_number(units)} units a node"
        if pricing.usd_per_unit is None:
            return words
        return f"{words}, {format_money(pricing.usd_per_unit)} per unit and hour"
    if pricing.basis == "energy":
        known = pricing.watts_per_node or watts
        power = f"nodes of {known:.0f} W" if known else "the power of a node is not known"
        return f"energy: {format_money(pricing.usd_per_kwh)} per kWh, {power}, PUE {pricing.pue:g}"
    if pricing.basis == "memory":
        return f"memory: {format_money(pricing.usd_per_gib_hour)} per GiB and hour"
    if pricing.basis == "spot":
        return f"spot: {format_money(pricing.usd_per_spot_node_hour, currency)} per node and hour"
    words = f"{format_money(pricing.usd_per_node_hour, currency)} per node and hour"
    if pricing.is_default:
        words += ", the default of pricing.usd_per_node_hour"
    return words


def measured_watts(measurements: Iterable[Measurement]) -> float | None:
    """Return the median power of a node during the profiled steps; None if not measured."""
    watts = [row.watts_per_node for row in measurements if row.watts_per_node > 0.0]
    return median(watts) if watts else None


def profiled_bytes(measurements: Sequence[Measurement]) -> float | None:
    """Return a worker's bytes of memory while profiling, mean over the measurements."""
    used = [
        row.memory.reserved_bytes
        for row in measurements
        if row.memory is not None and row.memory.is_credible
    ]
    return fmean(used) if used else None


Source = Literal["sacct", "notes", "events", "steps", ""]


class StageCost(Record):
    """Node-hours of one stage's jobs, and their cost."""

    node_hours: float
    # in `CostStatus.currency`; None if the price is unknown
    cost: float | None = None
    # sacct: accounting, all runs; notes: the jobs' own records; the others are estimates
    source: Source = ""
    # seconds in which a job waited and none ran; only for profiling
    queue_s: float | None = None


class CostStatus(Record):
    """Cost of the run so far."""

    currency: str = "USD"
    # basis of the price, in words
    price: str = ""
    profile: StageCost | None = None
    train: StageCost | None = None
    # controllers of a detached sweep; None if accounting has none
    control: StageCost | None = None
    node_hours: float = 0.0
    cost: float | None = None


class PromiseStatus(Record):
    """Training that has ended, compared with its plan."""

    # predicted seconds
    expected_s: float
    # its 90 % interval; None: the plan has none
    interval_s: tuple[float, float] | None
    actual_s: float
    # within, more, less or unknown
    verdict: PromiseVerdict
    # this and the next two in `promised_currency`, the plan's
    expected_cost: float
    # its 90 % interval; None: the plan has none
    cost_interval: tuple[float, float] | None
    paid: float | None
    promised_currency: str
    # source of the actual numbers: accounting or notes
    told_by: str


def bill_of(facts: Facts) -> TrainingBill | None:
    """Return the bill of the plan's training; None until it has ended, or if nothing is known."""
    files = facts.trainings.get(MAIN_LABEL)
    if facts.plan is None or files is None or files.result is None:
        return None
    accounts = facts.history.accounted(MAIN_LABEL, facts.run.accounts())
    own = facts.history.of_training(MAIN_LABEL)
    # a training that fell back to a smaller batch, too, was promised what the plan chose
    return training_bill(facts.plan.chosen, files.result, own, accounts)


def promise_kept(bill: TrainingBill | None) -> PromiseStatus | None:
    """Compare the plan's training with its plan; None where there is no bill of it."""
    if bill is None or bill.whole.actual is None:
        return None
    return PromiseStatus(
        expected_s=bill.whole.expected,
        interval_s=bill.whole.interval,
        actual_s=bill.whole.actual,
        verdict=bill.whole.verdict,
        expected_cost=bill.cost.expected,
        cost_interval=bill.cost.interval,
        paid=bill.cost.actual,
        promised_currency=bill.currency,
        told_by=bill.source.value,
    )


class _Use(NamedTuple):
    # node-seconds
    by_partition: Mapping[str, float]
    source: Source
    queue_s: float | None = None


Accounted = Mapping[str, Sequence[JobAccount]]


def cost_so_far(
    facts: Facts, jobs: Sequence[JobStatus], accounted: Accounted, bill: TrainingBill | None
) -> CostStatus:
    """Return the cost of all stages so far; `bill` is that of the plan's training, see `bill_of`."""
    uses = {
        "profile": _profiling(facts, jobs, accounted),
        "train": _training(facts, jobs, accounted, bill),
        "control": _by_accounting(facts, jobs, "control", accounted),
    }
    stages = {name: _priced(facts, name, use) for name, use in uses.items() if use is not None}
    costs = [stage.cost for stage in stages.values()]
    known = [cost for cost in costs if cost is not None]
    parts = facts.cluster.by_name() if facts.cluster else {}
    first = next(iter(parts.values()), None)
    price = ""
    if first and len(parts) == 1:
        price = describe_price(first, measured_watts(facts.measurements))
    return CostStatus(
        currency=first.pricing.currency if first else "USD",
        price=price,
        node_hours=sum(stage.node_hours for stage in stages.values()),
        cost=sum(known) if first and len(known) == len(costs) else None,
        profile=stages.get("profile"),
        train=stages.get("train"),
        control=stages.get("control"),
    )


def _priced(facts: Facts, stage: str, use: _Use) -> StageCost:
    costs = []
    for name, node_seconds in use.by_partition.items():
        price = _price(facts, stage, name)
        if price is not None:
            costs.append(node_seconds / HOUR_S * price)
    cost = sum(costs) if len(costs) == len(use.by_partition) else None
    node_hours = sum(use.by_partition.values()) / HOUR_S
    return StageCost(node_hours=node_hours, cost=cost, source=use.source, queue_s=use.queue_s)


def _price(facts: Facts, stage: str, partition: str) -> float | None:
    """Return the price of a node-hour on a partition; an unknown one counts as the first."""
    if facts.cluster is None:
        return None
    parts = facts.cluster.by_name()
    there = parts.get(partition) or next(iter(parts.values()))
    part = facts.cluster.controller() if stage == "control" else there
    rows = [row for row in facts.measurements if row.partition == partition]
    planned = facts.plan.chosen.peak_memory_bytes if facts.plan and stage == "train" else None
    return node_hour_price(part, planned or profiled_bytes(rows), measured_watts(rows))


def _profiling(facts: Facts, jobs: Sequence[JobStatus], accounted: Accounted) -> _Use | None:
    """Return the use by accounting if that has every job, else by the jobs' notes."""
    runs = job_runs(facts.notes, facts.measurements, facts.cluster)
    by_accounting = _by_accounting(facts, jobs, "profile", accounted)
    if not runs:
        return by_accounting
    if by_accounting and _knows_all(jobs, "profile", accounted):
        return by_accounting._replace(queue_s=only_waiting_s(runs))
    profiling = of_stage(jobs, "profile")
    running = {job.job_id for job in in_phase(profiling, JobPhase.RUNNING)}
    latest = {run.job_id: run for run in runs if run.job_id in running}
    used = [(run.job_id, run.node_seconds) for run in runs if run is not latest.get(run.job_id)]
    limit_s = _limit_s(facts, "profile")
    used += [
        (job_id, run.nodes * _bounded(facts.now - run.began_at, limit_s))
        for job_id, run in latest.items()
    ]
    return _Use(_by_partition(facts, jobs, used), "notes", only_waiting_s(runs))


def _training(
    facts: Facts, jobs: Sequence[JobStatus], accounted: Accounted, bill: TrainingBill | None
) -> _Use | None:
    """Return the use by accounting if that has every job, else by bill, else an estimate."""
    by_accounting = _by_accounting(facts, jobs, "train", accounted)
    if by_accounting and _knows_all(jobs, "train", accounted):
        return by_accounting
    return _by_bill(facts, jobs, bill) or _estimated_training(facts, jobs) or by_accounting


def _by_bill(facts: Facts, jobs: Sequence[JobStatus], bill: TrainingBill | None) -> _Use | None:
    """Return the use on the bill of the plan's training, if it has every run of every job."""
    billed = facts.history.jobs_of(MAIN_LABEL)
    has_all = all(job.job_id in billed for job in of_stage(jobs, "train"))
    if facts.plan is None or bill is None or bill.unknown_runs or not has_all:
        return None
    source: Source = "sacct" if bill.source is BillSource.ACCOUNTING else "notes"
    return _Use({facts.plan.chosen.partition: bill.node_seconds}, source)


def _knows_all(jobs: Iterable[JobStatus], stage: str, accounted: Accounted) -> bool:
    return all(
        job.job_id in accounted or job.phase is JobPhase.WAITING for job in of_stage(jobs, stage)
    )


def _by_accounting(
    facts: Facts, jobs: Sequence[JobStatus], stage: str, accounted: Accounted
) -> _Use | None:
    used = []
    for job in of_stage(jobs, stage):
        if job.job_id in accounted:
            used.append((job.job_id, sum(run.node_seconds for run in accounted[job.job_id])))
    return _Use(_by_partition(facts, jobs, used), "sacct") if used else None


def _by_partition(
    facts: Facts, jobs: Iterable[JobStatus], used: Iterable[tuple[str, float]]
) -> dict[str, float]:
    """Sum node-seconds by partition: as submitted, else as measured, else as planned."""
    where = {row.job_id: row.partition for row in facts.measurements}
    planned = facts.plan.chosen.partition if facts.plan else ""
    for job in jobs:
        where[job.job_id] = job.partition or where.get(
            job.job_id, planned if job.stage == "train" else ""
        )
    total: dict[str, float] = {}
    for job_id, node_seconds in used:
        total[where.get(job_id, "")] = total.get(where.get(job_id, ""), 0.0) + node_seconds
    return total


def _estimated_training(facts: Facts, jobs: Sequence[JobStatus]) -> _Use | None:
    if facts.executor != "local":
        return _from_steps(facts, jobs)
    # The last event in the file, not the one with the latest time. The command that submitted a job
    # records its end by the same clock; a job begun after the system's clock was set has another.
    submitted = {(job.job_id, job.submitted_at): job for job in facts.history.submissions()}
    newest = {job.label: job.submitted_at for job in jobs}
    used = []
    for job in of_stage(jobs, "train"):
        is_newest = newest[job.label] == job.submitted_at
        events = submitted[job.job_id, job.submitted_at]
        seconds = _local_seconds(facts, job, events, is_newest)
        used.append((job.job_id, (job.nodes or 1) * seconds))
    return _Use(_by_partition(facts, jobs, used), "events") if used else None


def _local_seconds(facts: Facts, job: JobStatus, events: Submission, is_newest: bool) -> float:
    """Return the seconds from submission to the last sign of life, or to now: there is no queue.

    File times count only if no record has the job's end, since copying a run changes them.
    """
    files = facts.trainings.get(job.label) if is_newest else None
    # at its limit a training begins another run in the same job
    limit_s = _limit_s(facts, "train") * max(1, len(events.begun_with_nothing))
    last_sign = events.last_sign_at
    if job.phase is JobPhase.RUNNING:
        return _bounded(facts.now - job.submitted_at, limit_s)
    if job.phase in (JobPhase.FINISHED, JobPhase.FAILED) and last_sign > job.submitted_at:
        return _bounded(last_sign - job.submitted_at, limit_s)
    if files is not None and files.result is not None:
        return files.result.wall_time_s
    logged_at = (files.logged_at or 0.0) if files else 0.0
    return _bounded(max(last_sign, logged_at) - job.submitted_at, limit_s)


def _limit_s(facts: Facts, stage: Literal["profile", "train"]) -> float:
    """Return the time limit of a run of a stage's jobs: none took longer, whatever clocks say."""
    parts = facts.cluster.parts() if facts.cluster else ()
    minutes = (part.profile_minutes if stage == "profile" else part.train_minutes for part in parts)
    return 60.0 * max(minutes, default=math.inf)


def _bounded(seconds: float, limit_s: float) -> float:
    return max(0.0, min(seconds, limit_s))


def _from_steps(facts: Facts, jobs: Sequence[JobStatus]) -> _Use | None:
    """Estimate the use from the events of an ended training, or from the steps of another."""
    nodes = {job.label: job.nodes for job in jobs if job.stage == "train" and job.nodes}
    planned = facts.plan.chosen.nodes if facts.plan else 1
    used: dict[str, float] = {}
    partition = facts.plan.chosen.partition if facts.plan else ""
    for label, files in facts.trainings.items():
        seconds = 0.0
        if files.result is not None:
            seconds = actual_use(facts.history.of_training(label), files.result).node_seconds
            seconds = seconds or files.result.nodes * files.result.train_time_s
        elif steps := files.tail.steps:
            step_s = median(row.step_time_s for row in steps)
            seconds = nodes.get(label, planned) * steps[-1].step * step_s
        used[partition] = used.get(partition, 0.0) + seconds
    return _Use(used, "steps") if used else None
