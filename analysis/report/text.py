"""Sentences of the report: the answer, the warnings, and how it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tula_hpc.analysis.costs import interruptions
from tula_hpc.analysis.costs.usage import job_runs
from tula_hpc.analysis.models.profiles import is_out_of_memory, summarize
from tula_hpc.analysis.planning import warnings as plan_warnings
from tula_hpc.analysis.planning.partitions import name_of, of_partition, prefixed
from tula_hpc.analysis.planning.planner import AGAIN
from tula_hpc.analysis.report.bill_text import bill_of, bill_sentences
from tula_hpc.analysis.report.plan_text import background, why_not_better
from tula_hpc.analysis.report.tables import format_time
from tula_hpc.analysis.run_contents import (
    SMALLER_STEPS,
    RunContents,
    Training,
    learned_nothing,
    measured_epochs,
    predicted,
    trained_candidate,
)
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import ClusterSpec, sweep_for
from tula_hpc.formatting import (
    format_bytes,
    format_duration,
    format_money,
    format_number,
    format_percent,
    format_score,
    plural,
)
from tula_hpc.records import Candidate, Measurement, Plan, RunHistory, TrainResult

SECONDS_PER_HOUR = 3600
# hosts and the like that are named, the others are counted
LISTED = 16


def answer(run: RunContents) -> str:
    """Return a paragraph with the advice and its cost, or with how far the run has come.

    What a training took of what it was to take comes first.
    """
    if run.plan is None:
        return " ".join(_without_plan(run))
    first: list[str] = []
    sentences = list(_advice(run.plan))
    for training in run.trainings:
        name = _name_of(run, training)
        bill = bill_of(run.plan, run.events, training)
        told = list(bill_sentences(bill, name)) if bill else []
        first += told
        sentences += _outcome(run, training, f"{name}'s steps" if told else name)
    return " ".join([*first, *sentences])


def _without_plan(run: RunContents) -> Iterator[str]:
    yield "There is no plan yet."
    ok = run.ok
    if not ok:
        yield "No configuration has been measured so far."
        return
    measured = f"{plural(_configurations(ok), 'configuration')} could be measured"
    out = _configurations(filter(is_out_of_memory, run.measurements))
    yield f"{measured}, {out} ran out of memory." if out else f"{measured} so far."
    epochs = {}
    for name in sorted({item.partition for item in ok}):
        rows = [item for item in ok if item.partition == name]
        for configuration, seconds in measured_epochs(rows, 0).items():
            epochs[name, configuration] = seconds
    if epochs:
        name, best = min(epochs, key=lambda key: epochs[key])
        yield (
            f"The fastest is {plural(best.nodes, 'node')}{_of_partition(name)} with global batch "
            f"{best.global_batch:,}: {format_duration(epochs[name, best])} for an epoch."
        )


def _configurations(measurements: Iterable[Measurement]) -> int:
    return len({(item.partition, item.configuration) for item in measurements})


def _of_partition(partition: str) -> str:
    return f" of partition {partition}" if partition else ""


def _advice(plan: Plan) -> Iterator[str]:
    chosen = plan.chosen
    time = predicted(chosen, "train_time_s")
    duration = format_duration(chosen.train_time_s)
    if time.low < time.high:
        ends = f"{format_duration(time.low)} to {format_duration(time.high)}"
        duration += f" (90 % interval {ends})"
    where = _of_partition(chosen.partition)
    memory = format_bytes(chosen.peak_memory_bytes)
    if plan.memory_limit_bytes:
        memory += f" of {format_bytes(plan.memory_limit_bytes)}"
    each = f"{plural(chosen.local_batch, 'sample')} per worker{chosen.in_parts}"
    expected = ""
    if chosen.expected_time_s > chosen.train_time_s:
        parts = "evaluation, checkpoints, starts and interruptions"
        expected = f"{format_duration(chosen.expected_time_s)} expected with {parts}, "
    yield (
        f"Train on {plural(chosen.nodes, 'node')}{where} with global batch "
        f"{chosen.global_batch:,} ({each}): predicted "
        f"{duration} for {plural(plan.epochs, 'epoch')}, {expected}"
        f"{format_money(chosen.cost, chosen.currency)}, {memory} of memory per worker."
    )
    if plan.reason:
        yield _sentence(plan.reason.removeprefix(f"{name_of(chosen)}: "))
    yield from why_not_better(plan)


def about_plan(run: RunContents) -> list[str]:
    """List what the plan's choice excludes and assumes; empty before there is a plan."""
    if run.plan is None:
        return []
    outdated = _outdated_notes(run)
    notes = [note for note in run.plan.notes if note not in outdated]
    return background(run.plan.model_copy(update={"notes": notes}))


def _outdated_notes(run: RunContents) -> set[str]:
    """Return notes on what the plan had to assume until a training measured it."""
    if run.cluster is None or interruptions.measured_cost(run.events) is None:
        return set()
    notes = set()
    for name, part in zip(run.cluster.part_names(), run.cluster.parts(), strict=True):
        note = interruptions.describe(None, part.pricing)
        notes |= {note, prefixed(name, note)}
    return notes


def _name_of(run: RunContents, training: Training) -> str:
    return "The training" if len(run.trainings) == 1 else f"Training {training.label}"


def _outcome(run: RunContents, training: Training, name: str) -> Iterator[str]:
    result = training.result
    if result is None:
        done = "no epoch is done yet"
        if training.metrics.epochs:
            last = training.metrics.epochs[-1]
            score = format_score(last.test_accuracy, last.test_loss)
            verb = "is" if last.epoch == 1 else "are"
            done = f"{plural(last.epoch, 'epoch')} {verb} done, {score}"
        yield f"{name} has started; {done}."
        return
    time = f"{format_duration(result.train_time_s)}{_against_prediction(run, training)}"
    reached = format_score(result.test_accuracy, result.test_loss)
    yield f"{name} ({result.method}) took {time} and reached {reached}."
    if run.plan and not _ended_as(run.plan.chosen, training, result):
        where = f"{plural(result.nodes, 'node')}{_of_partition(training.partition or '')}"
        batch = f"global batch {result.global_batch:,}"
        yield f"It ended on {where} with {batch}, not at the chosen configuration."
    if result.restarts:
        often = "once" if result.restarts == 1 else f"{result.restarts} times"
        yield f"It was interrupted and resumed {often}."


def _ended_as(chosen: Candidate, training: Training, result: TrainResult) -> bool:
    same = (result.nodes, result.global_batch) == (chosen.nodes, chosen.global_batch)
    return same and training.partition in (None, chosen.partition)


def _against_prediction(run: RunContents, training: Training) -> str:
    candidate = trained_candidate(run, training)
    if candidate is None or not training.epoch_time_s:
        return ""
    # the median epoch: the sum of all holds the start of the first one, too
    relative = candidate.epoch_time_s / training.epoch_time_s - 1
    direction = "long" if relative >= 0 else "short"
    off = f"{format_percent(abs(relative))} too {direction}"
    return f" (its median epoch was predicted {off})"


def warnings(run: RunContents) -> list[str]:
    """List everything that limits how far the numbers can be trusted."""
    doubts = run.plan.warnings if run.plan else _doubts_before_plan(run)
    names = {item.partition for item in run.measurements}
    if run.cluster:
        names.update(run.cluster.part_names())
    found = [_sentence(doubt, names) for doubt in doubts]
    found += [*_mixed_devices(run), *_off_prediction(run)]
    return [*found, *_learned_nothing(run), *_scaled_nothing(run), *run.notes]


def _doubts_before_plan(run: RunContents) -> list[str]:
    if run.sweep is None:
        return []
    cluster = run.cluster or ClusterSpec()
    found: list[str] = []
    for name, part in zip(cluster.part_names(), cluster.parts(), strict=True):
        rows = of_partition(run.measurements, name)
        summary = summarize(rows)
        doubts = plan_warnings.about_measurements(summary, run.sweep, part.workers_per_node)
        sweep = sweep_for(run.sweep, part)
        pending = propose(sweep, part, rows) if sweep else []
        doubts += plan_warnings.about_missing(summary, run.sweep.search, pending, AGAIN)
        found += [prefixed(name, doubt) for doubt in doubts]
    return found


def _off_prediction(run: RunContents) -> Iterator[str]:
    for training in run.trainings:
        candidate = trained_candidate(run, training)
        if candidate is None or training.epoch_time_s is None:
            continue
        expected = predicted(candidate, "epoch_time_s")
        outside = not expected.low <= training.epoch_time_s <= expected.high
        if expected.low < expected.high and outside:
            between = f"{format_duration(expected.low)} to {format_duration(expected.high)}"
            took = f"Epochs of the training took {format_duration(training.epoch_time_s)}"
            interval = f"the {between} that were expected with 90 % confidence"
            yield f"{took}, outside of {interval}; see events and drift."


def _learned_nothing(run: RunContents) -> Iterator[str]:
    if run.sweep is None:
        return
    for training in run.trainings:
        if training.result is None:
            continue
        if why := learned_nothing(training.metrics, run.sweep.workload):
            yield f"Training {training.label}: {why}; {SMALLER_STEPS}."


def _scaled_nothing(run: RunContents) -> Iterator[str]:
    for training in run.trainings:
        if training.metrics.scaled_nothing:
            yield f"Training {training.label}: {plan_warnings.SCALED_NOTHING}."


def _mixed_devices(run: RunContents) -> Iterator[str]:
    devices: dict[str, set[str]] = {}
    for item in run.ok:
        if item.device:
            devices.setdefault(item.partition, set()).add(item.device)
    for name, found in sorted(devices.items()):
        if len(found) > 1:
            differ = f"The nodes{_of_partition(name)} differ: {', '.join(sorted(found))}"
            yield f"{differ}. One model for all of them is an average."


def _sentence(text: str, partitions: Iterable[str] = ()) -> str:
    # a name keeps its case
    if not text.startswith(tuple(prefixed(name, "") for name in partitions if name)):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def how_measured(run: RunContents) -> list[tuple[str, str]]:
    """Return name and value of each fact about where the numbers come from."""
    if not run.measurements:
        return []
    ok = run.ok
    hosts: set[str] = set()
    for item in run.measurements:
        hosts.update(item.hosts)
    versions: set[str] = set()
    for item in ok:
        versions.update(f"{name} {version}" for name, version in item.versions.items())
    facts = [
        ("measured", _counts(run.measurements, ok)),
        ("when (UTC)", _period(run.measurements)),
        ("hosts", _listed(hosts)),
        ("device", _listed(item.device for item in run.measurements)),
        ("backend", _listed(item.backend for item in run.measurements)),
        ("versions", _listed(versions)),
        ("parameters of the model", _listed_numbers(item.parameters for item in ok)),
        ("training samples", _listed_numbers(item.dataset_samples for item in ok)),
        ("timed steps", _steps(ok)),
        ("memory", f"{run.memory_kinds}, its peak, per worker"),
        ("cost of profiling", profiling_cost(run)),
    ]
    return [(name, value) for name, value in facts if value]


def profiling_cost(run: RunContents) -> str:
    """Return node-seconds of all profile jobs, and their price where nodes are paid by the hour.

    They are accounting's where it has all these jobs: it also has the seconds in which a job ends.
    """
    noted = _used_by_profiling(run)
    used = _accounted(run, "profile") or noted
    node_seconds = sum(used.values())
    node_hours = format_number(node_seconds / SECONDS_PER_HOUR, 2)
    text = f"{format_number(node_seconds)} node-seconds ({node_hours} node-hours)"
    if used is not noted:
        own = format_number(sum(noted.values()))
        text += f" by Slurm's accounting (by the run's own records {own})"
    prices = _usd_per_node_hour(run.cluster) if run.cluster else {}
    if used and all(name in prices for name in used):
        usd = sum(seconds / SECONDS_PER_HOUR * prices[name] for name, seconds in used.items())
        text += f", {format_money(usd)}"
    return text


def _accounted(run: RunContents, stage: str) -> dict[str, float]:
    """Return accounting's node-seconds by partition; none unless it has the end of every job."""
    jobs = {job.job_id: job for job in RunHistory(run.events).submissions(stage)}
    of_stage = [account for account in run.accounts if account.job_id in jobs]
    # a requeued job has several runs, the last one last
    is_over = {account.job_id: account.over for account in of_stage}
    if is_over.keys() != jobs.keys() or not all(is_over.values()):
        return {}
    total: dict[str, float] = {}
    for account in of_stage:
        name = jobs[account.job_id].partition or ""
        total[name] = total.get(name, 0.0) + account.node_seconds
    return total


def _used_by_profiling(run: RunContents) -> dict[str, float]:
    """Return node-seconds by partition: of whole jobs, or of their measurements without notes."""
    where = {item.job_id: item.partition for item in run.measurements}
    parts = run.cluster.parts() if run.cluster else ()
    limit_s = max((60.0 * part.profile_minutes for part in parts), default=math.inf)
    runs = job_runs(run.job_notes, run.measurements, limit_s=limit_s)
    used = [(where.get(job.job_id, ""), job.node_seconds) for job in runs]
    if not used:
        for item in run.measurements:
            if item.stage == "profile":
                node_seconds = item.node_seconds or item.elapsed_s * item.nodes
                used.append((item.partition, node_seconds))
    total: dict[str, float] = {}
    for name, node_seconds in used:
        total[name] = total.get(name, 0.0) + node_seconds
    return total


def _usd_per_node_hour(cluster: ClusterSpec) -> dict[str, float]:
    prices = {}
    for name, part in zip(cluster.part_names(), cluster.parts(), strict=True):
        if part.pricing.basis == "node-hour":
            prices[name] = part.pricing.usd_per_node_hour
    return prices


def _counts(measurements: Sequence[Measurement], ok: Sequence[Measurement]) -> str:
    out = sum(map(is_out_of_memory, measurements))
    failed = len(measurements) - len(ok) - out
    counts = [plural(len(ok), "profile")]
    if out:
        counts.append(f"{out} out of memory")
    if failed > 0:
        counts.append(f"{failed} failed")
    return ", ".join(counts)


def _period(measurements: Iterable[Measurement]) -> str:
    times = [item.finished_at for item in measurements if item.finished_at > 0]
    if not times:
        return ""
    first = format_time(min(times))
    last = format_time(max(times))
    return first if first == last else f"{first} to {last}"


def _listed(items: Iterable[str]) -> str:
    names = sorted(set(items) - {""})
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _listed_numbers(numbers: Iterable[int]) -> str:
    return _listed(f"{number:,}" for number in numbers if number)


def _steps(ok: Iterable[Measurement]) -> str:
    steps = [item.steps for item in ok if item.steps]
    if not steps:
        return ""
    least = min(steps)
    most = max(steps)
    return f"{least} per configuration" if least == most else f"{least} to {most} per configuration"
