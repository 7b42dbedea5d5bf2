"""The report's sentences: the answer, the warnings, and how it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from tula_hpc.analysis.costs import interruptions as checkpoints
from tula_hpc.analysis.costs.usage import job_runs
from tula_hpc.analysis.models.profiles import is_out_of_memory, summarize
from tula_hpc.analysis.planning import warnings as cautions
from tula_hpc.analysis.planning.partitions import name_of, of_part, prefixed
from tula_hpc.analysis.planning.warnings import AGAIN
from tula_hpc.analysis.report.plan_text import background
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
from tula_hpc.records import Candidate, Configuration, Measurement, Plan, TrainResult

SECONDS_PER_HOUR = 3600
# hosts and the like: so many by name, then a count
LISTED = 16


def answer(run: RunContents) -> str:
    """One paragraph: what to do and what it takes, or how far the run has come."""
    if run.plan is None:
        return " ".join(_without_plan(run))
    return " ".join(
        [
            *_advice(run.plan),
            *(sentence for training in run.trainings for sentence in _outcome(run, training)),
        ]
    )


def _without_plan(run: RunContents) -> Iterator[str]:
    yield "There is no plan yet."
    if not run.ok:
        yield "No configuration has been measured so far."
        return
    out = len(_places(filter(is_out_of_memory, run.measurements)))
    yield f"{plural(len(_places(run.ok)), 'configuration')} " + (
        f"could be measured, {out} ran out of memory." if out else "could be measured so far."
    )
    epochs = {
        (name, configuration): seconds
        for name in sorted({item.partition for item in run.ok})
        for configuration, seconds in measured_epochs(
            (i for i in run.ok if i.partition == name), 0
        ).items()
    }
    if epochs:
        name, best = min(epochs, key=lambda place: epochs[place])
        yield (
            f"The fastest is {plural(best.nodes, 'node')}{_of(name)} with global batch {best.global_batch:,}: "
            f"{format_duration(epochs[name, best])} for an epoch."
        )


def _places(measurements: Iterable[Measurement]) -> set[tuple[str, Configuration]]:
    """Where they were taken, each place once."""
    return {(item.partition, item.configuration) for item in measurements}


def _of(partition: str) -> str:
    return f" of partition {partition}" if partition else ""


def _advice(plan: Plan) -> Iterator[str]:
    chosen = plan.chosen
    time = predicted(chosen, "train_time_s")
    between = (
        f" (90 % interval {format_duration(time.low)} to {format_duration(time.high)})"
        if time.low < time.high
        else ""
    )
    limit = f" of {format_bytes(plan.memory_limit_bytes)}" if plan.memory_limit_bytes else ""
    yield (
        f"Train on {plural(chosen.nodes, 'node')}{_of(chosen.partition)} with global batch {chosen.global_batch:,} "
        f"({plural(chosen.local_batch, 'sample')} per worker): predicted {format_duration(chosen.train_time_s)}"
        f"{between} for {plural(plan.epochs, 'epoch')}, {_expected(chosen)}"
        f"{format_money(chosen.cost, chosen.currency)}, "
        f"{format_bytes(chosen.peak_memory_bytes)}{limit} of memory per worker."
    )
    if plan.reason:
        yield _sentence(plan.reason.removeprefix(f"{name_of(chosen)}: "))


def _expected(chosen: Candidate) -> str:
    """The time that is paid for, where it is not that of the steps alone."""
    expected_s = chosen.expected_time_s
    if expected_s <= chosen.train_time_s:
        return ""
    return f"{format_duration(expected_s)} expected with evaluation, checkpoints, starts and interruptions, "


def about_plan(run: RunContents) -> list[str]:
    """What the plan's choice excludes and assumes, a sentence each; empty before there is a plan."""
    if run.plan is None:
        return []
    outdated = _outdated_notes(run)
    return background(
        run.plan.model_copy(
            update={"notes": [note for note in run.plan.notes if note not in outdated]}
        )
    )


def _outdated_notes(run: RunContents) -> set[str]:
    """What the plan had to assume until a training measured it."""
    if run.cluster is None or checkpoints.measured_cost(run.events) is None:
        return set()
    parts = zip(run.cluster.part_names(), run.cluster.parts(), strict=True)
    notes = [(name, checkpoints.describe(None, part.pricing)) for name, part in parts]
    return {text for name, note in notes for text in (note, prefixed(name, note))}


def _outcome(run: RunContents, training: Training) -> Iterator[str]:
    """What a training did: at the end, or so far."""
    name = "The training" if len(run.trainings) == 1 else f"Training {training.label}"
    result = training.result
    if result is None:
        last = training.metrics.epochs[-1] if training.metrics.epochs else None
        done = (
            f"{last.epoch} epochs are done, {format_score(last.test_accuracy, last.test_loss)}"
            if last
            else "no epoch is done yet"
        )
        yield f"{name} has started; {done}."
        return
    time = f"{format_duration(result.train_time_s)}{_against_prediction(run, training)}"
    reached = format_score(result.test_accuracy, result.test_loss)
    yield f"{name} ({result.method}) took {time} and reached {reached}."
    if run.plan and not _as_chosen(training, result, run.plan.chosen):
        where = f"{plural(result.nodes, 'node')}{_of(training.partition or '')}"
        yield f"It ended on {where} with global batch {result.global_batch:,}, not at the chosen configuration."
    if result.restarts:
        often = "once" if result.restarts == 1 else f"{result.restarts} times"
        yield f"It was interrupted and resumed {often}."


def _as_chosen(training: Training, result: TrainResult, chosen: Candidate) -> bool:
    """Whether a training ended where the plan would have it."""
    same = (result.nodes, result.global_batch) == (chosen.nodes, chosen.global_batch)
    return same and training.partition in (None, chosen.partition)


def _against_prediction(run: RunContents, training: Training) -> str:
    candidate = trained_candidate(run, training)
    if candidate is None or not training.epoch_time_s:
        return ""
    return f" ({_in_words(candidate.epoch_time_s / training.epoch_time_s - 1)})"


def _in_words(relative: float) -> str:
    """A relative error, predicted / measured − 1, of the median epoch: the sum holds the start of the first, too."""
    wrong = f"{format_percent(abs(relative))} too {'long' if relative >= 0 else 'short'}"
    return f"its median epoch was predicted {wrong}"


def warnings(run: RunContents) -> list[str]:
    """Everything that limits what the numbers are worth."""
    doubts = run.plan.warnings if run.plan else _doubts_before_plan(run)
    names = {item.partition for item in run.measurements} | set(
        run.cluster.part_names() if run.cluster else ()
    )
    said = [_sentence(doubt, names) for doubt in doubts]
    of_trainings = [*_off_prediction(run), *_learned_nothing(run), *_scaled_nothing(run)]
    return [*said, *_mixed_devices(run), *of_trainings, *run.notes]


def _doubts_before_plan(run: RunContents) -> list[str]:
    """What the plan would warn of, had it been made."""
    if run.sweep is None:
        return []
    cluster = run.cluster or ClusterSpec()
    found: list[str] = []
    for name, part in zip(cluster.part_names(), cluster.parts(), strict=True):
        rows = of_part(run.measurements, name)
        summary = summarize(rows)
        doubts = cautions.about_measurements(summary, run.sweep, part.workers_per_node)
        sweep = sweep_for(run.sweep, part)
        pending = propose(sweep, part, rows) if sweep else []
        doubts += cautions.about_missing(summary, run.sweep.search, pending, AGAIN)
        found += [prefixed(name, doubt) for doubt in doubts]
    return found


def _off_prediction(run: RunContents) -> Iterator[str]:
    """Trainings whose epochs took what the plan all but ruled out."""
    for training in run.trainings:
        candidate = trained_candidate(run, training)
        if candidate is None or training.epoch_time_s is None:
            continue
        foreseen = predicted(candidate, "epoch_time_s")
        if (
            foreseen.low < foreseen.high
            and not foreseen.low <= training.epoch_time_s <= foreseen.high
        ):
            between = f"{format_duration(foreseen.low)} to {format_duration(foreseen.high)}"
            took = f"Epochs of the training took {format_duration(training.epoch_time_s)}"
            yield f"{took}, outside of the {between} that were expected with 90 % confidence; see events and drift."


def _learned_nothing(run: RunContents) -> Iterator[str]:
    """Of trainings that are over: one that blew up, but stayed finite, reaches some accuracy as well."""
    if run.sweep is None:
        return
    for training in run.trainings:
        if training.result is not None and (
            why := learned_nothing(training.metrics, run.sweep.workload)
        ):
            yield f"Training {training.label}: {why}; {SMALLER_STEPS}."


def _scaled_nothing(run: RunContents) -> Iterator[str]:
    for training in run.trainings:
        if training.metrics.scaled_nothing:
            yield f"Training {training.label}: {cautions.SCALED_NOTHING}."


def _mixed_devices(run: RunContents) -> Iterator[str]:
    """Each partition has a model of its own."""
    found = {(item.partition, item.device) for item in run.ok}
    for name in sorted({partition for partition, _ in found}):
        devices = sorted(device for partition, device in found if partition == name and device)
        if len(devices) > 1:
            yield f"The nodes{_of(name)} differ: {', '.join(devices)}. One model for all of them is an average."


def _sentence(text: str, partitions: Iterable[str] = ()) -> str:
    """With a full stop and a capital, which the name of a partition at its beginning keeps out."""
    named = text.startswith(tuple(prefixed(name, "") for name in partitions if name))
    return (text if named else text[:1].upper() + text[1:]) + (
        "" if text.endswith((".", "!", "?")) else "."
    )


def how_measured(run: RunContents) -> list[tuple[str, str]]:
    """Name and value of each fact about where the numbers come from."""
    if not run.measurements:
        return []
    ok = run.ok
    facts = [
        ("measured", _counts(run.measurements, ok)),
        ("when (UTC)", _period(run.measurements)),
        ("hosts", _listed(host for item in run.measurements for host in item.hosts)),
        ("device", _listed(item.device for item in run.measurements)),
        ("backend", _listed(item.backend for item in run.measurements)),
        (
            "versions",
            _listed(f"{name} {version}" for item in ok for name, version in item.versions.items()),
        ),
        (
            "parameters of the model",
            _listed(f"{item.parameters:,}" for item in ok if item.parameters),
        ),
        (
            "training samples",
            _listed(f"{item.dataset_samples:,}" for item in ok if item.dataset_samples),
        ),
        ("timed steps", _steps(ok)),
        ("memory", f"{run.memory_kinds}, its peak, per worker"),
        ("what profiling cost", profiling_cost(run)),
    ]
    return [(name, value) for name, value in facts if value]


def profiling_cost(run: RunContents) -> str:
    """Node-seconds of all profile jobs, and their price where nodes are paid by the hour."""
    used = _used_by_profiling(run)
    node_seconds = sum(used.values())
    node_hours = format_number(node_seconds / SECONDS_PER_HOUR, 2)
    text = f"{format_number(node_seconds)} node-seconds ({node_hours} node-hours)"
    prices = _usd_per_node_hour(run.cluster) if run.cluster else {}
    if used and all(name in prices for name in used):
        text += f", {format_money(sum(seconds / SECONDS_PER_HOUR * prices[name] for name, seconds in used.items()))}"
    return text


def _used_by_profiling(run: RunContents) -> dict[str, float]:
    """Node-seconds by partition: of whole jobs, start-up included; where none left notes, of what they measured."""
    where = {item.job_id: item.partition for item in run.measurements}
    limits = (60.0 * part.profile_minutes for part in (run.cluster.parts() if run.cluster else ()))
    runs = job_runs(run.job_notes, run.measurements, limit_s=max(limits, default=math.inf))
    used = [(where.get(job.job_id, ""), job.node_seconds) for job in runs]
    if not used:
        profiles = [item for item in run.measurements if item.stage == "profile"]
        used = [
            (item.partition, item.node_seconds or item.elapsed_s * item.nodes) for item in profiles
        ]
    total: dict[str, float] = {}
    for name, node_seconds in used:
        total[name] = total.get(name, 0.0) + node_seconds
    return total


def _usd_per_node_hour(cluster: ClusterSpec) -> dict[str, float]:
    """By name of the partition, of those whose nodes are paid by the hour."""
    prices = [
        (name, part.pricing)
        for name, part in zip(cluster.part_names(), cluster.parts(), strict=True)
    ]
    return {
        name: pricing.usd_per_node_hour for name, pricing in prices if pricing.basis == "node-hour"
    }


def _counts(measurements: Sequence[Measurement], ok: Sequence[Measurement]) -> str:
    out = sum(map(is_out_of_memory, measurements))
    failed = len(measurements) - len(ok) - out
    parts = [plural(len(ok), "profile")]
    parts += [f"{out} out of memory"] if out else []
    parts += [f"{failed} failed"] if failed > 0 else []
    return ", ".join(parts)


def _period(measurements: Iterable[Measurement]) -> str:
    times = [item.finished_at for item in measurements if item.finished_at > 0]
    if not times:
        return ""
    first, last = format_time(min(times)), format_time(max(times))
    return first if first == last else f"{first} to {last}"


def _listed(items: Iterable[str]) -> str:
    names = sorted({item for item in items if item})
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _steps(ok: Iterable[Measurement]) -> str:
    steps = [item.steps for item in ok if item.steps]
    if not steps:
        return ""
    least, most = min(steps), max(steps)
    return f"{least} per configuration" if least == most else f"{least} to {most} per configuration"
