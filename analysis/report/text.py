"""Sentences of the report: doubts with their remedies, assumptions, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tula_hpc.analysis.costs import interruptions
from tula_hpc.analysis.costs.usage import job_runs
from tula_hpc.analysis.models.profiles import is_out_of_memory, summarize
from tula_hpc.analysis.planning.partitions import prefixed
from tula_hpc.analysis.planning.planner import AGAIN
from tula_hpc.analysis.planning.warnings import SCALED_NOTHING, about_partition
from tula_hpc.analysis.report.plan_text import critical_batch_sentences
from tula_hpc.analysis.report.tables import format_time
from tula_hpc.analysis.run_contents import SMALLER_STEPS, RunContents, learned_nothing
from tula_hpc.analysis.search.propose import propose
from tula_hpc.config import ClusterSpec, sweep_for
from tula_hpc.formatting import HOUR_S, format_money, format_number, in_short, plural
from tula_hpc.records import Doubt, Measurement, Remedy, RunHistory, of_partition
from tula_hpc.records.events import setup_failures
from tula_hpc.records.training import NOT_FINITE, WITHOUT_SCORES

# most hosts, devices and the like that are named; the others are counted
LISTED = 16


def of_partition_in_words(partition: str) -> str:
    """Return " of partition gpu"; empty without partitions."""
    return f" of partition {partition}" if partition else ""


def assumptions(run: RunContents) -> list[str]:
    """List the plan's assumptions, and its critical batch by the gradient's noise."""
    if run.plan is None:
        return []
    outdated = _outdated_notes(run)
    names = _partitions(run)
    notes = [as_sentence(note, names) for note in run.plan.notes if note not in outdated]
    return [*critical_batch_sentences(run.plan), *notes]


def _outdated_notes(run: RunContents) -> set[str]:
    """Return notes on assumptions that a training has since replaced by measurements."""
    measured = {
        "save": interruptions.measured_save_s(run.events) is not None,
        "evaluation": any(training.metrics.epochs for training in run.trainings),
        "start": any(training.result is not None for training in run.trainings),
    }
    found: set[str] = set()
    for quantity, notes in run.plan.provisional.items() if run.plan else ():
        if measured[quantity]:
            found.update(notes)
    return found


def doubts(run: RunContents) -> list[Doubt]:
    """List everything that limits how far the numbers can be trusted."""
    known = run.plan.doubts if run.plan else _doubts_before_plan(run)
    names = _partitions(run)
    found = [Doubt(as_sentence(doubt.text, names), doubt.remedy) for doubt in known]
    return [
        *found,
        *Remedy.MEASURE.doubts(map(as_sentence, setup_failures(run.job_notes))),
        *Remedy.KNOW.doubts(_mixed_devices(run)),
        *Remedy.CHANGE.doubts(_about_training(run)),
        *Remedy.KNOW.doubts(run.notes),
    ]


def _partitions(run: RunContents) -> set[str]:
    names = {item.partition for item in run.measurements}
    if run.cluster:
        names.update(run.cluster.part_names())
    return names


def _doubts_before_plan(run: RunContents) -> list[Doubt]:
    if run.sweep is None:
        return []
    cluster = run.cluster or ClusterSpec()
    found: list[Doubt] = []
    for name, part in cluster.by_name().items():
        rows = of_partition(run.measurements, name)
        sweep = sweep_for(run.sweep, part)
        pending = propose(sweep, part, rows) if sweep else []
        found += about_partition(
            name, part, summarize(rows), run.sweep, pending, how_to_profile=AGAIN
        )
    return found


def _about_training(run: RunContents) -> Iterator[str]:
    for training in run.trainings:
        found = [SCALED_NOTHING] if training.metrics.scaled_nothing else []
        if training.result is not None and run.sweep is not None:
            work = run.sweep.workload
            if why := learned_nothing(training.metrics, work):
                found.append(f"{why}; {SMALLER_STEPS}")
            if work.is_script and work.metric and not training.result.is_scored:
                found.append(WITHOUT_SCORES)
            if work.loss is not None and not training.result.is_test_finite:
                found.append(NOT_FINITE)
        yield from (f"Training {training.label}: {words}." for words in found)


def _mixed_devices(run: RunContents) -> Iterator[str]:
    devices: dict[str, set[str]] = {}
    for item in run.ok:
        if item.device:
            devices.setdefault(item.partition, set()).add(item.device)
    for name, found in sorted(devices.items()):
        if len(found) > 1:
            differ = f"The nodes{of_partition_in_words(name)} differ: {', '.join(sorted(found))}"
            yield f"{differ}. One model for all of them is an average."


def as_sentence(text: str, partitions: Iterable[str] = ()) -> str:
    """Return a clause as a sentence; a partition's name or a key in front keeps its case."""
    first = text.partition(" ")[0]
    # a key as objective.budget has a dot inside, the first word of "none. …" only at its end
    is_key = "." in first[:-1]
    if not is_key and not text.startswith(tuple(prefixed(name, "") for name in partitions if name)):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def how_measured(run: RunContents) -> list[tuple[str, str]]:
    """Return name and value of each fact about where the numbers come from."""
    if not run.measurements:
        return []
    ok = run.ok
    hosts = {host for item in run.measurements for host in item.hosts}
    versions = {f"{name} {version}" for item in ok for name, version in item.versions.items()}
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
        ("memory", f"{run.memory_kinds}, peak per worker"),
        ("cost of profiling", profiling_cost(run)),
    ]
    return [(name, value) for name, value in facts if value]


def profiling_cost(run: RunContents) -> str:
    """Return node-seconds of all profile jobs, and their price if nodes are paid by the hour.

    They are accounting's if it has all these jobs, as it includes the seconds in which jobs end.
    """
    noted = _noted_of_profiling(run)
    used = used_by_profiling(run)
    node_seconds = sum(used.values())
    node_hours = format_number(node_seconds / HOUR_S, 2)
    text = f"{format_number(node_seconds)} node-seconds ({node_hours} node-hours)"
    if used != noted:
        own = format_number(sum(noted.values()))
        text += f" by Slurm's accounting (by the run's own records {own})"
    parts = run.cluster.by_name() if run.cluster else {}
    prices = {}
    for name, part in parts.items():
        if part.pricing.basis == "node-hour":
            prices[name] = part.pricing.usd_per_node_hour
    if used and all(name in prices for name in used):
        usd = sum(seconds / HOUR_S * prices[name] for name, seconds in used.items())
        text += f", {format_money(usd)}"
    return text


def used_by_profiling(run: RunContents) -> dict[str, float]:
    """Return node-seconds of profile jobs by partition, by accounting if it has all their ends."""
    jobs = {job.job_id: job for job in RunHistory(run.events).submissions("profile")}
    accounts = [account for account in run.accounts if account.job_id in jobs]
    # a requeued job has an account for each run, of which the last one counts
    is_over = {account.job_id: account.over for account in accounts}
    if not jobs or is_over.keys() != jobs.keys() or not all(is_over.values()):
        return _noted_of_profiling(run)
    return _by_partition(
        (jobs[account.job_id].partition or "", account.node_seconds) for account in accounts
    )


def _noted_of_profiling(run: RunContents) -> dict[str, float]:
    """Return node-seconds by partition: of whole jobs or, without notes, of measurements."""
    where = {item.job_id: item.partition for item in run.measurements}
    runs = job_runs(run.job_notes, run.measurements, run.cluster)
    used = [(where.get(job.job_id, ""), job.node_seconds) for job in runs]
    if not used:
        for item in run.measurements:
            if item.stage == "profile":
                node_seconds = item.node_seconds or item.elapsed_s * item.nodes
                used.append((item.partition, node_seconds))
    return _by_partition(used)


def _by_partition(used: Iterable[tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, node_seconds in used:
        total[name] = total.get(name, 0.0) + node_seconds
    return total


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
    return in_short(sorted(set(items) - {""}), LISTED)


def _listed_numbers(numbers: Iterable[int]) -> str:
    return _listed(f"{number:,}" for number in numbers if number)


def _steps(ok: Iterable[Measurement]) -> str:
    steps = [item.steps for item in ok if item.steps]
    if not steps:
        return ""
    ends = sorted({min(steps), max(steps)})
    return f"{' to '.join(map(str, ends))} per configuration"
