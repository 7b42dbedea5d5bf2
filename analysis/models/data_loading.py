"""Steps that wait for the data loader, and the number of loader processes that would avoid it.

If L processes cannot keep up, a step lasts as long as they take to load a batch, step_s. To avoid
waiting they would have to load it in step_s − wait_s, which needs L · step_s / (step_s − wait_s)
processes and enough cores for them: a step without waiting keeps (loader_s + worker_s) / (step_s −
wait_s) cores busy. Processes that wait for a file system need no cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import StepTimes

# share of a step spent waiting for data, below which a faster loader changes little
DECIDES_FROM = 0.1
# factor on the number of processes, since some items take longer to load than others
HEADROOM = 1.2
# the upper bound of workload.loader_workers
MOST_PROCESSES = 256


def wait_share(times: StepTimes) -> float:
    """Return the share of a step that waits for data."""
    # the wait is timed separately, so it may come out longer than the step
    return min(1.0, times.data_time_s / times.step_time_s)


def loader_decides(times: StepTimes) -> bool:
    """Tell whether a faster loader would make steps notably faster."""
    return wait_share(times) >= DECIDES_FROM


def _largest_alone(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of the largest batch on the fewest workers.

    It shows a slow loader without any shared storage: the fixed cost of a step gives a loader time
    to keep up with smaller batches.
    """
    return min(
        profiles, key=lambda each: (each.configuration.world_size, -each.configuration.local_batch)
    )


def wait_per_sample_s(profiles: Sequence[Profile]) -> float:
    """Return the wait for data, seconds per sample of a worker, without any shared storage."""
    alone = _largest_alone(profiles)
    return alone.times.data_time_s / alone.configuration.local_batch


def loads_ahead(profiles: Sequence[Profile]) -> bool:
    """Tell whether steps wait for loader processes, which go on while the workers synchronize."""
    alone = _largest_alone(profiles)
    has_processes = alone.processor is not None and alone.processor.loader_s > 0.0
    return has_processes and loader_decides(alone.times)


def held_up_by_storage(profiles: Sequence[Profile]) -> list[Profile]:
    """Return the profiles that wait notably longer for data, per sample, than the fewest workers.

    These wait for storage that all workers share. Shared storage makes more workers with larger
    batches wait even longer: a profile that waits longer than those was disturbed, and is left out.
    """
    if not profiles:
        return []
    fewest = min(profile.configuration.world_size for profile in profiles)
    alone_s = wait_per_sample_s(profiles)
    found = []
    for profile in profiles:
        beyond_s = profile.times.data_time_s - alone_s * profile.configuration.local_batch
        is_notable = beyond_s >= DECIDES_FROM * profile.times.step_time_s
        if profile.configuration.world_size > fewest and is_notable:
            found.append(profile)
    return [each for each in found if not _is_contradicted(each, profiles)]


def _is_contradicted(profile: Profile, profiles: Sequence[Profile]) -> bool:
    own = profile.configuration
    for other in profiles:
        its = other.configuration
        reads_more = its.world_size >= own.world_size and its.local_batch >= own.local_batch
        if reads_more and 2.0 * other.times.data_time_s < profile.times.data_time_s:
            return True
    return False


def processes_needed(times: StepTimes, loader_workers: int) -> int:
    """Return how many loader processes would keep up, if they had enough cores.

    `loader_workers` is the profiled number; 0: the worker itself loads the data, that is its wait.
    """
    loading_s = loader_workers * times.step_time_s if loader_workers else times.data_time_s
    # rounded, so that a floating-point error does not turn 96 into 97
    needed = round(HEADROOM * loading_s / _without_waiting_s(times), 6)
    return max(loader_workers + 1, math.ceil(needed))


def cores_needed(profile: Profile) -> float:
    """Return the cores that a step without waiting keeps busy; 0 if that was not measured."""
    used = profile.processor
    return (used.loader_s + used.worker_s) / _without_waiting_s(profile.times) if used else 0.0


def _without_waiting_s(times: StepTimes) -> float:
    return max(times.step_time_s - times.data_time_s, 0.01 * times.step_time_s)


def describe_slow_storage(profiles: Sequence[Profile]) -> str:
    """Return a sentence on a file system that steps wait for, and the remedy."""
    worst = max(profiles, key=lambda profile: wait_share(profile.times))
    samples = worst.configuration.global_batch / worst.times.step_time_s
    return (
        f"the file system that all nodes share holds steps up: at {worst.configuration} waiting for "
        f"data takes {100 * wait_share(worst.times):.0f} % of a step, and less on fewer nodes; all nodes "
        f"together read {format_number(samples, 3)} samples/s there, and more will hardly read more: "
        "copy the data to the nodes' own disks, or pack it into fewer and larger files"
    )


def describe_slow_loader(profile: Profile, loader_workers: int | None) -> str:
    """Return a sentence on a loader that steps wait for, and the remedy.

    `loader_workers` is the profiled number; None: only the user's script knows it.
    """
    share = f"{100 * wait_share(profile.times):.0f} %"
    where = f"takes {share} of a step at {profile.configuration}"
    if loader_workers is None:
        return (
            f"waiting for data, or what else the script does between its steps, {where}: give its "
            "loader more processes, or less to do"
        )
    found = f"the data loader holds steps up: waiting for data {where}"
    processes = processes_needed(profile.times, loader_workers)
    cores = cores_needed(profile)
    if processes > MOST_PROCESSES:
        return (
            f"{found}; even {MOST_PROCESSES} loader processes would not end the wait: "
            "make its items cheaper to load"
        )
    if profile.processor is None or cores <= profile.processor.cores:
        return (
            f"{found}; workload.loader_workers = {processes} (now {loader_workers}) would end "
            "the wait"
        )
    available = plural(math.floor(profile.processor.cores), "core")
    return (
        f"{found}; no number of loader processes on the {available} of a worker would end the wait, "
        f"since loading and computing a batch would keep {format_number(cores, 2)} cores busy: "
        f"raise cpus_per_worker to {math.ceil(cores)} and workload.loader_workers to {processes}"
    )
