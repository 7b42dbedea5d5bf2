"""From measurements to models: everything that is fitted to what ran on one kind of nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.models.memory import MemoryModel, fit_memory
from tula_hpc.analysis.models.profiles import Summary
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.analysis.models.step_time_fit import FormName
from tula_hpc.errors import NotEnoughDataError

Array = NDArray[np.float64]

# one cannot tell fixed costs from costs per sample
MIN_LOCAL_BATCHES = 2
REMEDY = "run the sweep again to profile what is missing"
MORE_MEMORY = "lower search.min_batch, allow more nodes, or use a machine with more memory"


class UpdateTime(NamedTuple):
    """Seconds of an update of AGS's gradient scale over the number of workers; its reference batch does not vary."""

    # ascending; empty where no update was measured
    workers: Array
    seconds: Array

    def predict(self, workers: Array) -> Array:
        """Interpolated between the measured numbers of workers, constant beyond them; 0 where none was measured."""
        return (
            np.interp(workers, self.workers, self.seconds)
            if len(self.workers)
            else np.zeros_like(workers)
        )


class Models(NamedTuple):
    """Everything that was fitted to the measurements."""

    step_time: StepTimeModel
    # what the limit counts, per worker
    memory: MemoryModel
    # the loader's batches on the host; None where it holds none
    batch_memory: MemoryModel | None
    # of AGS's gradient scale
    update_time_s: UpdateTime

    def train_time_s(
        self, samples_seen: int, nodes: Array, workers_per_node: Array, local_batch: Array
    ) -> Array:
        """Seconds to see so many samples, `T = E·D/B · t_step` (S. Tyagi, F. Wang, "Tula"); not in whole steps."""
        steps = samples_seen / (nodes * workers_per_node * local_batch)
        return steps * self.step_time.predict(nodes, local_batch, workers_per_node)

    def describe(self) -> dict[str, Any]:
        """Forms, coefficients and residuals, as plan.json has them."""
        step = self.step_time
        return {
            "step_time": {
                "form": step.form_,
                "parameters": step.parameters_,
                "pinned": step.pinned_,
                "residual_median": step.residual_median_,
                "spread": step.spread_,
                "departures": step.departures_,
            },
            "memory": _describe_memory(self.memory),
            "batch_memory": _describe_memory(self.batch_memory),
        }


def _describe_memory(model: MemoryModel | None) -> dict[str, Any]:
    if model is None:
        return {
            "parameters": {"fixed_bytes": 0.0, "bytes_per_sample": 0.0},
            "pinned": [],
            "residual_median": 0.0,
        }
    return {
        "parameters": model.parameters_,
        "pinned": model.pinned_,
        "residual_median": model.residual_median_,
        "oom_local_batch": model.oom_local_batch_,
        "oom_contradicts": model.oom_contradicts_,
    }


def fit_models(
    summary: Summary,
    memory_limit_bytes: float | None = None,
    form: FormName = "auto",
    possible: Collection[int] | None = None,
) -> Models:
    """Fit step time, memory and the loader's batch memory to all configurations that ran.

    Time: see `fit_step_time`; `form` is the step-time model's. Memory: `reserved_bytes` is what a
    limit counts, on CUDA what the allocator reserved on the device, on CPU the resident set of the
    whole process, interpreter and libraries included (baseline + peak). What ran out of memory
    needed more than `memory_limit_bytes`, where that is known. `possible` are the local batches
    that can be asked for and did not run out of memory: where these are measured, one is enough;
    None: any.

    Raises:
        NotEnoughDataError: Nothing ran, or fewer than two local batches did although more can.
    """
    _check_enough(summary, possible)
    return models_of(summary, memory_limit_bytes, fit_step_time(summary.profiles, form))


def models_of(
    summary: Summary, memory_limit_bytes: float | None, step_time: StepTimeModel
) -> Models:
    """What was fitted already, and what is fitted beside it; at least one profile, see `fit_models`."""
    configurations = np.array([row.configuration for row in summary.profiles], dtype=np.float64)
    batches = np.array([row.memory.batch_bytes for row in summary.profiles], dtype=np.float64)
    memory = fit_memory(summary, memory_limit_bytes)
    loads = batches > 0
    batch_memory = (
        MemoryModel().fit(configurations[loads, 2], batches[loads]) if loads.any() else None
    )
    return Models(step_time, memory, batch_memory, update_time(summary))


def update_time(summary: Summary) -> UpdateTime:
    """Of AGS's scale. Medians over the local batches: they do not matter, the reference batch is a part of each."""
    by_workers: dict[int, list[float]] = {}
    for row in summary.profiles:
        if row.times.update_time_s > 0:
            by_workers.setdefault(row.configuration.world_size, []).append(row.times.update_time_s)
    workers = sorted(by_workers)
    medians = [float(np.median(by_workers[count])) for count in workers]
    return UpdateTime(np.array(workers, dtype=np.float64), np.array(medians))


def _check_enough(summary: Summary, possible: Collection[int] | None) -> None:
    failures = [f"{key} failed ({reason})" for key, reason in summary.failed.items()]
    failures += [f"{key} ran out of memory" for key in summary.out_of_memory]
    because = (
        f" ({'; '.join(failures[:4])}{'; …' if len(failures) > 4 else ''})" if failures else ""
    )
    again = f"mend that and {REMEDY}" if summary.failed else REMEDY
    if not summary.profiles:
        remedy = again if possible or possible is None else MORE_MEMORY
        raise NotEnoughDataError(f"plan: no usable measurement{because}; {remedy}")
    seen = {row.configuration.local_batch for row in summary.profiles}
    if len(seen) < MIN_LOCAL_BATCHES and (possible is None or not seen.issuperset(possible)):
        only = f"only local batch {min(seen)} was measured{because}"
        raise NotEnoughDataError(
            f"plan: {only}, and the models need {MIN_LOCAL_BATCHES} different ones; {again}"
        )
    if summary.dataset_samples < 1:
        raise NotEnoughDataError(
            "plan: no measurement says how many training samples the data set has; profile again"
        )
