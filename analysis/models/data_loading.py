"""When the data loader decides how long a step takes, and how many of its processes would end that.

With L processes that cannot keep up, a step lasts as long as the loader takes for a batch, step_s.
They would keep up if they took step_s − wait_s, which takes L · step_s / (step_s − wait_s) of them,
as far as there are cores: of loading and computing together a step without waiting takes (loader_s
+ worker_s) / (step_s − wait_s) cores. Processes that wait for a file system need none. Items are
uneven, so that some more are needed than on average.
"""

from __future__ import annotations

import math

from tula_hpc.analysis.models.profiles import Profile
from tula_hpc.formatting import format_number, plural
from tula_hpc.records import StepTimes

# of a step; below it a faster loader changes little
DECIDES_FROM = 0.1
HEADROOM = 1.2
# as workload.loader_workers is bounded
MOST_PROCESSES = 256


def wait_share(times: StepTimes) -> float:
    """Share of a step that waits for data."""
    return times.data_time_s / times.step_time_s


def loader_decides(times: StepTimes) -> bool:
    """Whether a faster loader would make steps notably faster."""
    return wait_share(times) >= DECIDES_FROM


def processes_needed(times: StepTimes, loader_workers: int) -> int:
    """Loader processes with which steps would hardly wait for data, if there are cores for them.

    Args: times: Of a configuration for which the loader decides. loader_workers: With which it was
        profiled; 0: the worker loads by itself, which is its wait.
    """
    loading_s = loader_workers * times.step_time_s if loader_workers else times.data_time_s
    # rounded: 96 must not become 97 by a last digit
    needed = round(HEADROOM * loading_s / _without_waiting_s(times), 6)
    return max(loader_workers + 1, math.ceil(needed))


def cores_needed(profile: Profile) -> float:
    """Cores that loading and computing keep busy in a step without waiting; 0 where that was not measured."""
    used = profile.processor
    return (used.loader_s + used.worker_s) / _without_waiting_s(profile.times) if used else 0.0


def _without_waiting_s(times: StepTimes) -> float:
    return max(times.step_time_s - times.data_time_s, 0.01 * times.step_time_s)


def describe_slow_loader(profile: Profile, loader_workers: int) -> str:
    """Say how much of a step waits for data, and what would end it: of a configuration for which the loader decides."""
    share = f"{wait_share(profile.times):.0%}"
    found = f"the data loader decides: waiting for data takes up to {share} of a step at {profile.configuration}"
    processes, cores = processes_needed(profile.times, loader_workers), cores_needed(profile)
    if processes > MOST_PROCESSES:
        return f"{found}; even {MOST_PROCESSES} loader processes would not end it: make its items cheaper to load"
    if profile.processor is None or cores <= profile.processor.cores:
        return f"{found}; workload.loader_workers = {processes} (now {loader_workers}) would end it"
    has, needs = math.floor(profile.processor.cores), math.ceil(cores)
    end = f"no number of loader processes on the {plural(has, 'core')} of a worker would end it"
    batch = f"loading and computing a batch would keep {format_number(cores, 2)} cores busy"
    return f"{found}; {end}, as {batch}: raise cpus_per_worker to {needs} and workload.loader_workers to {processes}"
