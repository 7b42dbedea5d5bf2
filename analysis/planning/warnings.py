"""Warnings of a plan: doubts about measurements, models and the choice.

`_doubts` in `planner.py` groups them by what the user can do. Some warnings come from elsewhere:

- contradictions among measurements: `models/profiles.py`
- partitions and cluster sizes that are left out: `partitions.py`
- constraints that are kept only narrowly: `feasibility.py`
- a choice that was not measured: `search/confirmation.py`
- a curve without a knee: `objective.py`
- steps that had not settled: `search/steadiness.py`
- what a training adds in a report: `doubts` in `report/text.py`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tula_hpc.analysis.costs.interruptions import Resume, best_interval_s
from tula_hpc.analysis.costs.pricing import between_preemptions_s, expected_preemptions
from tula_hpc.analysis.models.data_loading import (
    describe_slow_loader,
    describe_slow_storage,
    held_up_by_storage,
    loader_decides,
    wait_share,
)
from tula_hpc.analysis.models.profiles import Profile, Summary
from tula_hpc.analysis.models.step_time import StepTimeModel
from tula_hpc.analysis.planning.candidates import FEASIBLE, Why, priced
from tula_hpc.analysis.planning.feasibility import train_minutes_for
from tula_hpc.analysis.planning.partitions import FittedPartitions, prefixed
from tula_hpc.config import ClusterSpec, SearchSpec, SweepSpec, WorkloadSpec
from tula_hpc.formatting import (
    format_duration,
    format_money,
    format_number,
    format_percent,
    in_short,
    plural,
)
from tula_hpc.records import Candidate, Configuration, Doubt, Plan, Remedy

# a batch from this multiple of training.base_batch on is large; smaller ones seldom cost accuracy
LARGE_BATCH = 2
# shares of the samples that full batches leave out: the first is worth a note, the second a warning
DROPPED_SHARE = 0.01
MANY_DROPPED = 0.1
# relative difference in samples that is normal: scripts may leave some out, or draw some twice
NEAR = 0.1
# share of the expected time lost to rare checkpoints that is worth a warning
BOUND_SHARE = 0.05
# measured over fitted step time, or the reverse; single runs of real clusters reach 1.4
CONTRADICTS_FROM = 1.5
# trained share of a model's parameters below which layers without gradients are worth a note
MOST_TRAINED = 0.99
SHORT_OF_MEMORY = (
    "ran only because torch's allocator freed its cache and tried again, which is slow and may "
    "fail in training; local batches from this size on are not planned, but may fit in a new sweep "
    'with PYTORCH_CUDA_ALLOC_CONF = "expandable_segments:True" in [environment]'
)
ONE_ITERATOR = (
    "after an interruption the script may continue with other samples: it uses one iterator over "
    "its loader for all epochs, which a restart begins anew; give tula.batches a DataLoader that is "
    "iterated from its beginning in each epoch"
)
SCALED_NOTHING = (
    "no gradient was scaled: the training was too short for a first estimate, as it may be on a "
    "single worker, or the gate let no step use one"
)


def about_measurements(summary: Summary, workers_per_node: int) -> list[str]:
    """List doubts about the measurements themselves."""
    profiles = summary.profiles
    shared = [p for p in profiles if not p.exclusive]
    emulated = [p for p in profiles if p.emulated]
    short = [p for p in profiles if p.memory.ran_short]
    other = [p for p in profiles if p.configuration.workers_per_node != workers_per_node]
    return [
        *summary.warnings,
        *_listed(shared, "shared their nodes with other jobs"),
        *_listed(emulated, "were made with all nodes on one machine; real nodes will differ"),
        *_listed(short, SHORT_OF_MEMORY),
        *_listed(other, f"were not run with {plural(workers_per_node, 'worker')} per node"),
    ]


def about_loading(
    profiles: Sequence[Profile], work: WorkloadSpec, chosen: Configuration | None = None
) -> list[str]:
    """Say if loading data, and not the computation, decides how long a step takes.

    The sentence is about the chosen configuration if it waits for data, else about the one that
    waits most.
    """
    # storage is not to blame if data come from the user's own function, which may hold them in
    # memory, or if all nodes are one machine, as they share its cores, too
    reads_apart = work.reads_files and not any(profile.emulated for profile in profiles)
    if reads_apart and (stored := held_up_by_storage(profiles)):
        return [describe_slow_storage(stored)]
    slow = [profile for profile in profiles if loader_decides(profile.times)]
    if not slow:
        return []
    worst = max(slow, key=lambda p: (p.configuration == chosen, wait_share(p.times)))
    return [describe_slow_loader(worst, None if work.is_script else work.loader_workers)]


def about_samples(summary: Summary) -> list[str]:
    """Say if a script's loaders yield another number of samples than the sweep file says."""
    stated = summary.dataset_samples
    for profile in summary.profiles:
        found = profile.epoch_samples
        # allow for a last batch that is not full but counted as such
        most = NEAR * stated + profile.configuration.global_batch
        if found and abs(found - stated) > most:
            return [
                f"an epoch of the script has about {format_number(found)} samples by its loader, but "
                f"{stated:,} by workload.samples, from which times and costs are computed; correct "
                "that key, and measure with another --run-dir"
            ]
    return []


def about_missing(
    summary: Summary, search: SearchSpec, pending: Iterable[Configuration], how_to_profile: str
) -> list[str]:
    """List a partition's wanted configurations that failed or are pending, and what to do."""
    failed: dict[str, list[Configuration]] = {}
    for configuration, failure in summary.failed.items():
        within = search.min_batch <= configuration.global_batch <= search.max_batch
        if within and configuration.nodes in search.cluster_sizes:
            failed.setdefault(failure, []).append(configuration)
    found = []
    for failure, each in failed.items():
        were = "was" if len(each) == 1 else "were"
        found.append(f"{_names(each)} {were} not measured: {failure}")
    missing = [c for c in pending if c not in summary.failed]
    if missing:
        found.append(f"not yet profiled: {_names(missing)}; {how_to_profile}")
    return found


def about_model(profiles: Sequence[Profile], model: StepTimeModel) -> list[str]:
    """Name measurements that are far from the model that is fitted to all of them."""
    nodes, per_node, batch = zip(*(row.configuration for row in profiles), strict=True)
    found = []
    for row, expected_s in zip(profiles, model.predict(nodes, batch, per_node), strict=True):
        ratio = row.times.step_time_s / float(expected_s)
        if abs(math.log(ratio)) > math.log(CONTRADICTS_FROM):
            found.append(f"{row.configuration} ({format_number(ratio, 2)} times the model's)")
    if not found:
        return []
    return [
        f"steps measured far from the model that is fitted to all of them: {', '.join(found)}; a new "
        "sweep, with a new --run-dir, shows whether they were disturbed"
    ]


def about_partition(
    name: str,
    cluster: ClusterSpec,
    summary: Summary,
    sweep: SweepSpec,
    pending: Iterable[Configuration],
    *,
    how_to_profile: str,
    chosen: Configuration | None = None,
    model: StepTimeModel | None = None,
) -> list[Doubt]:
    """List doubts about the measurements and the model of a partition, and missing measurements."""
    far_off = about_model(summary.profiles, model) if model else []
    one_iterator = any(profile.one_iterator for profile in summary.profiles)
    doubts = [
        *Remedy.MEASURE.doubts(about_measurements(summary, cluster.workers_per_node)),
        *Remedy.CHANGE.doubts(about_samples(summary)),
        *Remedy.CHANGE.doubts([ONE_ITERATOR] if one_iterator else []),
        *Remedy.CHANGE.doubts(about_loading(summary.profiles, sweep.workload, chosen)),
        *Remedy.MEASURE.doubts(far_off),
        *Remedy.MEASURE.doubts(about_missing(summary, sweep.search, pending, how_to_profile)),
    ]
    return [Doubt(prefixed(name, doubt.text), doubt.remedy) for doubt in doubts]


def about_extrapolation(chosen: int, fitted: FittedPartitions, search: SearchSpec) -> list[str]:
    """Count the candidates beyond the profiled range, and say if the chosen row is among them."""
    found = []
    for index, part in enumerate(fitted.parts):
        texts = _extrapolated(chosen, index, fitted, search)
        found += [prefixed(part.name, text) for text in texts]
    return found


def about_left_out_samples(chosen: int, fitted: FittedPartitions, *, many: bool) -> list[str]:
    """Say if full batches of the chosen row leave out samples: many, or for False only some."""
    global_batch = int(fitted.table.global_batch[chosen])
    summary = fitted.parts[fitted.table.part[chosen]].summary
    samples = summary.dataset_samples
    taken = global_batch * summary.batch_share
    share = samples % taken / samples
    if summary.short_batch or share < DROPPED_SHARE or (share >= MANY_DROPPED) != many:
        return []
    batches = f"full batches of {global_batch:,}"
    return [f"{batches} leave out {100 * share:.0f} % of the {samples:,} samples in every epoch"]


def about_script(fitted: FittedPartitions, workload: WorkloadSpec) -> list[str]:
    """Say that the plan of a script is for its first training, with the steps at its beginning."""
    if not workload.is_script:
        return []
    uses = [use for part in fitted.parts for use in part.summary.memory_uses]
    trained = min((use.gradient_bytes / max(1, use.parameter_bytes) for use in uses), default=1.0)
    frozen = ""
    if trained < MOST_TRAINED:
        frozen = (
            f"; {format_percent(1.0 - trained)} of its model was not trained while it was measured"
        )
    return [
        "the plan is for the script's first training, with steps as measured at its beginning: "
        "further trainings (folds, fine-tuning) come on top, and layers that are unfrozen later, or "
        f"larger images, make it longer{frozen}"
    ]


def about_range(plan: Plan, sweep: SweepSpec) -> list[str]:
    """Say if the search ends below the knee, so that the plan takes its largest batch."""
    knee = plan.knee.global_batch if plan.knee else None
    largest = max(candidate.global_batch for candidate in plan.candidates)
    if plan.objective != "knee" or knee is None or knee < 2 * largest:
        return []
    # larger batches were searched, and are slower
    if 2 * plan.chosen.global_batch <= largest:
        return []
    # the user's constraint keeps larger batches from being measured or planned
    if (sweep.objective.max_global_batch or math.inf) < 2 * largest:
        return []
    above = f"set search.max_batch above {sweep.search.max_batch:,}"
    return [f"to measure up to the knee, B={knee:,.0f}, {above}"]


def about_unseen_memory(fitted: FittedPartitions) -> list[str]:
    """Say which batches are left out since their memory was not measured and may not suffice."""
    found = []
    for index, part in enumerate(fitted.parts):
        unseen = (fitted.table.part == index) & (fitted.table.why == Why.UNSEEN)
        if unseen.any():
            least = fitted.table.local_batch[unseen].min()
            text = (
                f"local batches from {least:,} on are not planned: they are more than twice as "
                "large as any measured one, and the 90 % interval of their memory exceeds the limit"
            )
            found.append(prefixed(part.name, text))
    return found


def about_method(chosen: Candidate, sweep: SweepSpec) -> list[str]:
    """Say if the method does nothing for a large batch, or does not suit the plan or AdamW."""
    training = sweep.training
    times = chosen.global_batch / training.base_batch
    has_script_alone = sweep.workload.is_script and chosen.configuration.world_size == 1
    does_nothing = training.method == "lbt" or sweep.lacks_factors(chosen.configuration.world_size)
    if does_nothing and times >= LARGE_BATCH:
        remedy = (
            "a new sweep with --set training.method=ags and another --run-dir trains with scaled "
            "gradients"
        )
        if has_script_alone:
            remedy = (
                'to raise the learning rate with the batch, set training.method = "sqrt" and give '
                '{lr_scale} to the script in workload.arguments ("ags" needs several workers: '
                "search.cluster_sizes without 1)"
            )
        unless = ", unless the script does so" if sweep.workload.is_script else ""
        why = f"and the learning rate is not adjusted for it{unless}"
        if training.adapts:
            why = "and the gradients of a script on a single worker are not scaled"
        return [
            f"the batch is {times:,.3g} times training.base_batch ({training.base_batch:,}), "
            f'which may cost accuracy, {why} (training.method = "{training.method}"); {remedy}'
        ]
    if training.method == "polo":
        return [
            "times and costs are for an all-reduce in each step, but post-local SGD has only few "
            "after its first epochs: several workers are faster and cheaper than predicted, and "
            "more of them may be worthwhile"
        ]
    scales = training.method in ("ags", "static")
    if not scales or sweep.workload.optimizer != "adamw" or sweep.scale_applies_to == "update":
        return []
    why = "AdamW divides gradients by their own size, so that scaling them has hardly any effect"
    return [f'{why}; training.apply = "update" scales the updates of AdamW instead']


def about_interruptions(chosen: int, fitted: FittedPartitions, sweep: SweepSpec) -> list[str]:
    """Warn if time limits and preemptions restart the training more often than is allowed."""
    row = fitted.table.take([chosen])
    cluster = fitted.parts[row.part[0]].cluster
    allowed = sweep.training.max_requeues
    requeues = int(row.requeues[0])
    nodes = row.nodes.astype(np.float64)
    preemptions = math.ceil(expected_preemptions(cluster.pricing, nodes, row.wall_time_s)[0])
    if requeues + preemptions <= allowed:
        return []
    causes = []
    if requeues:
        limit = f"train_minutes = {cluster.train_minutes}"
        causes.append(f"{plural(requeues, 'requeue')} under {limit}")
    if preemptions:
        causes.append(plural(preemptions, "preemption"))
    often = f"restart about {plural(requeues + preemptions, 'time')} ({', '.join(causes)})"
    remedy = f"set that to {requeues + preemptions} in the sweep file"
    if not preemptions:
        minutes = train_minutes_for(row, fitted, allowed)
        remedy += f", or train_minutes to {minutes} in the cluster file"
    return [
        f"training has to {often}, more than training.max_requeues = {allowed} allows; {remedy}"
    ]


def about_beginning_anew(chosen: int, fitted: FittedPartitions) -> list[str]:
    """Warn if an interruption makes a script start over, and say what that costs."""
    row = fitted.table.take([chosen])
    part = fitted.parts[row.part[0]]
    if part.resume is not Resume.NOTHING:
        return []
    # half of the work is lost on average: an interruption is equally likely at any time
    lost_s, lost = row.wall_time_s[0] / 2, row.cost[0] / 2
    price = f"{format_duration(lost_s)} and {format_money(lost, part.cluster.pricing.currency)}"
    return [
        "after an interruption the job is requeued and the training begins anew, at a loss of "
        f"{price} on average: set workload.resume_arguments in the sweep file ([] if the script "
        "goes on by itself), or let it keep its state by tula.keep (sweeps/README.md)"
    ]


def about_checkpoints(chosen: int, fitted: FittedPartitions, sweep: SweepSpec) -> list[str]:
    """Warn if, on spot nodes, the bound on the cost of saving loses more time than it spares."""
    row = fitted.table.take([chosen])
    part = fitted.parts[row.part[0]]
    pricing = part.cluster.pricing
    training = sweep.training
    is_set = training.checkpoint_minutes is not None
    if pricing.basis != "spot" or is_set or part.resume is not Resume.CHECKPOINT:
        return []
    save_s = pricing.save_s if part.save_s is None else part.save_s
    between_s = between_preemptions_s(pricing, row.nodes.astype(np.float64))
    # rounded to two digits, as a user would set it
    minutes = float(f"{best_interval_s(save_s, between_s)[0] / 60.0:.2g}")
    often = training.model_copy(update={"checkpoint_minutes": minutes})
    sweep = sweep.model_copy(update={"training": often})
    saved_often = priced(int(row.part[0]), part, row.grid, sweep, row.step_time_s)
    spared = 1.0 - float(saved_often.wall_time_s[0] / row.wall_time_s[0])
    if spared < BOUND_SHARE:
        return []
    apart = f"{row.checkpoint_s[0] / 60.0:.2g} minutes apart"
    why = f"checkpoints are {apart}, so that saving costs at most 3 % of training"
    other = f"training.checkpoint_minutes = {minutes:g}"
    return [f"{why}; with {other} the whole training would take {format_percent(spared)} less time"]


def _listed(profiles: Sequence[Profile], fault: str) -> list[str]:
    if not profiles:
        return []
    return [f"these measurements {fault}: {_names(p.configuration for p in profiles)}"]


def _names(configurations: Iterable[Configuration]) -> str:
    return in_short(list(map(str, configurations)), most=6)


def _extrapolated(
    chosen: int, index: int, fitted: FittedPartitions, search: SearchSpec
) -> list[str]:
    """Count candidates beyond the node counts and local batches that were profiled."""
    table = fitted.table
    profiles = fitted.parts[index].summary.profiles
    nodes, _, batches = zip(*(profile.configuration for profile in profiles), strict=True)
    feasible = (table.part == index) & (table.why == FEASIBLE)
    inside = (min(nodes) <= table.nodes) & (table.nodes <= max(nodes))
    inside &= (min(batches) <= table.local_batch) & (table.local_batch <= max(batches))
    beyond = int(np.sum(feasible & ~inside))
    if not beyond:
        return []
    candidates = f"{beyond:,} of {int(np.sum(feasible)):,} feasible candidates"
    if table.part[chosen] == index and not inside[chosen]:
        candidates += ", the chosen one among them,"
    verb = "lies" if beyond == 1 else "lie"
    ranges = f"N {min(nodes)} to {max(nodes)}, b {min(batches)} to {max(batches)}"
    why = ": extrapolated"
    if search.mode == "adaptive" and len(profiles) >= search.max_profiles:
        why = f", as search.max_profiles = {search.max_profiles} is used up: raise it to measure there"
    return [f"{candidates} {verb} beyond the profiled range ({ranges}){why}"]
