"""What whoever reads a plan should know before relying on it: the warnings of plan.json.

How far the estimate of memory, made before any profile, was from what was measured then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tula_hpc.analysis.costs.interruptions import best_interval_s
from tula_hpc.analysis.costs.pricing import Usage, between_preemptions_s, bill, expected_preemptions
from tula_hpc.analysis.models.critical_batch import CriticalBatch
from tula_hpc.analysis.models.data_loading import describe_slow_loader, loader_decides, wait_share
from tula_hpc.analysis.models.memory import estimate_error
from tula_hpc.analysis.models.profiles import Profile, Summary
from tula_hpc.analysis.planning.candidates import FEASIBLE, CandidateTable, Part
from tula_hpc.analysis.planning.partitions import Fitted, prefixed
from tula_hpc.config import SearchSpec, SweepSpec
from tula_hpc.formatting import format_number, format_percent, in_samples, plural
from tula_hpc.records import Candidate, Configuration, Footprint, Plan

AGAIN = "run the sweep again"
# of the samples
DROPPED_SHARE = 0.1
# of the expected time, lost because saves may cost only so much
BOUND_SHARE = 0.05
# measured over fitted step time, or the reverse; single runs of real clusters reach 1.4
CONTRADICTS_FROM = 1.5
SHORT_OF_MEMORY = (
    "ran only because torch's allocator freed what it kept and tried again, which is slow and may fail in training, so "
    'that no local batch as large is planned; where PYTORCH_CUDA_ALLOC_CONF = "expandable_segments:True" is not in '
    "[environment], a new sweep with it may fit more"
)
SCALED_NOTHING = (
    "no gradient was scaled: each factor was 1 all along, as before their first estimate, which a short training on a "
    "single worker may not come to, or the gate let no step use any"
)


def about_measurements(summary: Summary, sweep: SweepSpec, workers_per_node: int) -> list[str]:
    """Doubts about the measurements themselves."""
    profiles = summary.profiles
    # where the loader decides, steps are as uneven as its items: that is said once
    unsettled = [p for p in profiles if not p.converged and not loader_decides(p.times)]
    return [
        *summary.warnings,
        *_listed(unsettled, "stopped before the step time had settled"),
        *_listed([p for p in profiles if not p.exclusive], "shared their nodes with other jobs"),
        *_listed(
            [p for p in profiles if p.emulated],
            "shared one machine between their nodes; real nodes will differ",
        ),
        *_listed([p for p in profiles if p.memory.ran_short], SHORT_OF_MEMORY),
        *_other_workers(profiles, workers_per_node),
        *_slow_loader(profiles, sweep.workload.loader_workers),
    ]


def about_missing(
    summary: Summary, search: SearchSpec, pending: Iterable[Configuration], how_to_profile: str
) -> list[str]:
    """List wanted configurations that failed or are not measured yet, and how to profile these.

    Args:
        summary: Of the measurements on one kind of nodes.
        search: Bounds of the configurations that are wanted.
        pending: Configurations that the search still proposes there.
        how_to_profile: Advice.
    """
    found = []
    for configuration, failure in summary.failed.items():
        within = search.min_batch <= configuration.global_batch <= search.max_batch
        if within and configuration.nodes in search.cluster_sizes:
            found.append(f"{configuration} was not measured: {failure}")
    missing = [c for c in pending if c not in summary.failed]
    if missing:
        found.append(f"not yet profiled: {_names(missing)}; {how_to_profile}")
    return found


def about_model(part: Part) -> list[str]:
    """Measurements that the model of all of them contradicts."""
    nodes, per_node, batch = np.array(
        [row.configuration for row in part.summary.profiles], dtype=np.float64
    ).T
    predicted_s = part.models.step_time.predict(nodes, batch, per_node).tolist()
    found = [
        f"{row.configuration} ({format_number(row.times.step_time_s / expected_s, 2)} times)"
        for row, expected_s in zip(part.summary.profiles, predicted_s, strict=True)
        if abs(math.log(row.times.step_time_s / expected_s)) > math.log(CONTRADICTS_FROM)
    ]
    what = "step times far from what all measurements together make likely, which the plan goes by"
    return [f"{what}: {', '.join(found)}"] if found else []


def about_part(
    part: Part, sweep: SweepSpec, pending: Iterable[Configuration], how_to_profile: str
) -> list[str]:
    """Doubts about the measurements on one kind of nodes, and what is missing of them."""
    doubts = about_measurements(part.summary, sweep, part.cluster.workers_per_node)
    doubts += about_model(part)
    doubts += about_missing(part.summary, sweep.search, pending, how_to_profile)
    return [prefixed(part.name, doubt) for doubt in doubts]


def about_lines(skipped: int) -> list[str]:
    """Lines of the measurements that could not be read."""
    return [f"{plural(skipped, 'damaged line')} of the measurements skipped"] if skipped else []


def about_choice(chosen: int, fitted: Fitted) -> list[str]:
    """Doubts about the chosen row."""
    found = []
    for place, part in enumerate(fitted.parts):
        texts = _extrapolated(chosen, place, fitted.table, part.summary.profiles)
        found += [prefixed(part.name, text) for text in texts]
    part = fitted.parts[fitted.table.part[chosen]]
    return found + _dropped(int(fitted.table.global_batch[chosen]), part.summary.dataset_samples)


def about_method(sweep: SweepSpec) -> list[str]:
    """What of the method predictions do not know; and whether factors cancel out, as Adam divides by their size."""
    if sweep.training.method == "polo":
        what = (
            "times and costs are those of an all-reduce in each step, "
            "and post-local SGD has few after its first epochs"
        )
        return [
            f"{what}: several workers are faster and cheaper than predicted, and more of them may be worth while"
        ]
    scales = sweep.training.method in ("ags", "static")
    if not scales or sweep.workload.optimizer != "adamw" or sweep.scale_applies_to == "update":
        return []
    why = "AdamW divides gradients by their own size, so that a factor before it hardly acts"
    return [f'{why}; training.apply = "update" scales what AdamW makes of them']


def about_batch(chosen: Candidate, critical: CriticalBatch | None) -> list[str]:
    """Whether the chosen batch is larger than the gradient's noise makes useful."""
    if critical is None or chosen.global_batch <= critical.batch:
        return []
    extra = critical.extra_samples(chosen.global_batch)
    beyond = f"lies beyond the critical batch of {in_samples(critical.batch)}"
    what = f"the chosen global batch of {chosen.global_batch:,} {beyond}"
    meaning = f"the gradient's noise scale, where twice the fewest samples are needed; here {extra:.1f} times"
    least = (
        "; it grows in training, often tenfold, so that this is its least"
        if critical.source == "profile"
        else ""
    )
    return [f"{what} ({meaning}){least}"]


def about_interruptions(chosen: int, fitted: Fitted, sweep: SweepSpec) -> list[str]:
    """Whether time limits and preemptions would restart the chosen training more often than is allowed."""
    row, allowed = fitted.table.take([chosen]), sweep.training.max_requeues
    cluster, requeues = fitted.parts[row.part[0]].cluster, int(row.requeues[0])
    nodes = row.nodes.astype(np.float64)
    preemptions = math.ceil(expected_preemptions(cluster.pricing, nodes, row.wall_time_s)[0])
    if requeues + preemptions <= allowed:
        return []
    causes = (
        [f"{plural(requeues, 'requeue')} under train_minutes = {cluster.train_minutes}"]
        if requeues
        else []
    )
    causes += [plural(preemptions, "preemption")] if preemptions else []
    often = f"restart about {plural(requeues + preemptions, 'time')} ({', '.join(causes)})"
    return [f"training has to {often}, more than training.max_requeues = {allowed} allows"]


def about_checkpoints(chosen: int, fitted: Fitted, sweep: SweepSpec) -> list[str]:
    """Whether the bound on what saves cost loses more on spot nodes than it spares; the user can lift it."""
    row = fitted.table.take([chosen])
    part = fitted.parts[row.part[0]]
    pricing, training = part.cluster.pricing, sweep.training
    if pricing.basis != "spot" or training.checkpoint_minutes is not None:
        return []
    nodes, per_node = row.nodes.astype(np.float64), row.workers_per_node.astype(np.float64)
    save_s = part.save.seconds if part.save else pricing.checkpoint_write_s
    minutes = float(
        f"{best_interval_s(save_s, between_preemptions_s(pricing, nodes))[0] / 60.0:.2g}"
    )
    often = training.model_copy(update={"checkpoint_minutes": minutes})
    usage = Usage(
        nodes, per_node, row.train_time_s, row.peak_bytes, row.evaluation_s, sweep.workload.epochs
    )
    spared = 1.0 - float(
        bill(usage, part.cluster, often, part.power, part.save).wall_time_s[0] / row.wall_time_s[0]
    )
    if spared < BOUND_SHARE:
        return []
    apart = f"{row.checkpoint_s[0] / 60.0:.2g} minutes apart"
    why = f"checkpoints are {apart}, so that saving costs at most 3 % of training"
    return [
        f"{why}; training.checkpoint_minutes = {minutes:g} would take {format_percent(spared)} less in all"
    ]


def _listed(profiles: Sequence[Profile], what: str) -> list[str]:
    return (
        [f"measurements that {what}: {_names(p.configuration for p in profiles)}"]
        if profiles
        else []
    )


def _names(configurations: Iterable[Configuration], shown: int = 6) -> str:
    names = [str(configuration) for configuration in configurations]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _other_workers(profiles: Sequence[Profile], workers_per_node: int) -> list[str]:
    other = [p for p in profiles if p.configuration.workers_per_node != workers_per_node]
    return _listed(other, f"were not run with {plural(workers_per_node, 'worker')} per node")


def _slow_loader(profiles: Sequence[Profile], loader_workers: int) -> list[str]:
    slow = [profile for profile in profiles if loader_decides(profile.times)]
    if not slow:
        return []
    worst = max(slow, key=lambda profile: wait_share(profile.times))
    return [describe_slow_loader(worst, loader_workers)]


def _extrapolated(
    chosen: int, place: int, table: CandidateTable, profiles: Sequence[Profile]
) -> list[str]:
    """Candidates of a part outside the rectangle of node counts and local batches that were profiled there."""
    nodes = [profile.configuration.nodes for profile in profiles]
    batches = [profile.configuration.local_batch for profile in profiles]
    feasible = (table.part == place) & (table.why == FEASIBLE)
    inside = (min(nodes) <= table.nodes) & (table.nodes <= max(nodes))
    inside &= (min(batches) <= table.local_batch) & (table.local_batch <= max(batches))
    beyond, of = int(np.sum(feasible & ~inside)), int(np.sum(feasible))
    if not beyond:
        return []
    profiled = (
        f"the profiled range (N {min(nodes)} to {max(nodes)}, b {min(batches)} to {max(batches)})"
    )
    mine = (
        ", the chosen one among them," if table.part[chosen] == place and not inside[chosen] else ""
    )
    verb = "lies" if beyond == 1 else "lie"
    return [
        f"{beyond:,} of {of:,} feasible candidates{mine} {verb} beyond {profiled}: extrapolated"
    ]


def _dropped(global_batch: int, samples: int) -> list[str]:
    share = samples % global_batch / samples
    if share <= DROPPED_SHARE:
        return []
    return [
        f"full batches of {global_batch:,} leave out {share:.0%} of the {samples:,} samples in every epoch"
    ]


# above it the estimate is not to be relied on for the next sweep of this workload
NOTEWORTHY_ERROR = 0.3


def with_estimates(plan: Plan, fitted: Fitted, footprints: Mapping[str, Footprint]) -> Plan:
    """The plan with `estimate_error_median` beside each memory model, and a warning where it is large.

    Args:
        plan: Its models are those of the chosen part, and under "partitions" those of all.
        fitted: The parts.
        footprints: Estimates by name of the part; those without measurements do not matter.
    """
    parts = {part.name: part for part in fitted.parts}
    found = {
        name: estimate_error(footprint, parts[name].summary.profiles)
        for name, footprint in footprints.items()
        if name in parts
    }
    errors = {name: error for name, error in found.items() if error is not None}
    models = dict(plan.models)
    for name, error in errors.items():
        if name == plan.chosen.partition:
            models = _noted(models, error)
        if name in models.get("partitions", {}):
            models["partitions"] = models["partitions"] | {
                name: _noted(models["partitions"][name], error)
            }
    warnings = [
        prefixed(name, _warning(error))
        for name, error in errors.items()
        if error > NOTEWORTHY_ERROR
    ]
    return plan.model_copy(update={"models": models, "warnings": [*plan.warnings, *warnings]})


def _noted(models: dict[str, Any], error: float) -> dict[str, Any]:
    return models | {"memory": models["memory"] | {"estimate_error_median": error}}


def _warning(error: float) -> str:
    return f"the estimate of memory before profiling was off by {error:.0%} in the median"
