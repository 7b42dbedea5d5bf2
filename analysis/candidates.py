"""From measurements to candidates: the fitted models, and what they say of every configuration of the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tula_hpc.analysis.aggregate import Summary
from tula_hpc.analysis.memory import MemoryModel
from tula_hpc.analysis.performance import StepTimeModel
from tula_hpc.analysis.pricing import train_cost_usd
from tula_hpc.config import GIB, ClusterSpec
from tula_hpc.errors import NotEnoughDataError
from tula_hpc.records import Candidate, Configuration

Array = NDArray[np.float64]

MIN_LOCAL_BATCHES = 2  # one cannot tell fixed costs from costs per sample
REMEDY = "run the sweep again to profile what is missing"


class UpdateTime(NamedTuple):
    """Seconds of an update of AGS's gradient scale over the number of workers; its reference batch does not vary."""

    workers: Array  # ascending; empty where no update was measured
    seconds: Array

    def predict(self, workers: Array) -> Array:
        """Interpolated between the measured numbers of workers, constant beyond them; 0 where none was measured."""
        return np.interp(workers, self.workers, self.seconds) if len(self.workers) else np.zeros_like(workers)


class Models(NamedTuple):
    """Everything that was fitted to the measurements."""

    step_time: StepTimeModel
    memory: MemoryModel  # what the limit counts, per worker
    batch_memory: MemoryModel | None  # the loader's batches on the host; None where it holds none
    update_time_s: UpdateTime  # of AGS's gradient scale

    def train_time_s(self, samples_seen: int, nodes: Array, workers_per_node: Array, local_batch: Array) -> Array:
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
            },
            "memory": _describe_memory(self.memory),
            "batch_memory": _describe_memory(self.batch_memory),
        }


def _describe_memory(model: MemoryModel | None) -> dict[str, Any]:
    if model is None:
        return {"parameters": {"fixed_bytes": 0.0, "bytes_per_sample": 0.0}, "pinned": [], "residual_median": 0.0}
    return {
        "parameters": model.parameters_,
        "pinned": model.pinned_,
        "residual_median": model.residual_median_,
        "oom_local_batch": model.oom_local_batch_,
    }


def fit_models(summary: Summary) -> Models:
    """Fit step time, memory and the loader's batch memory to all configurations that ran.

    Time: what is known apart as "compute" is the step without synchronization, that is waiting for data, forward and
    backward, and the optimizer together. Memory: `reserved_bytes` is what a limit counts, on CUDA what the allocator
    reserved on the device, on CPU the resident set of the whole process, interpreter and libraries included (baseline +
    peak).

    Raises:
        NotEnoughDataError: Nothing ran, or fewer than two local batches did.
    """
    _check_enough(summary)
    configurations = np.array([row.configuration for row in summary.profiles], dtype=np.float64)
    times = [row.times for row in summary.profiles]
    step_time = StepTimeModel().fit(
        nodes=configurations[:, 0],
        local_batch=configurations[:, 2],
        step_time_s=[row.step_time_s for row in times],
        workers_per_node=configurations[:, 1],
        compute_time_s=[row.data_time_s + row.compute_time_s + row.optimizer_time_s for row in times],
        allreduce_time_s=[row.allreduce_time_s for row in times],
    )
    reserved = np.array([row.memory.reserved_bytes for row in summary.profiles], dtype=np.float64)
    batches = np.array([row.memory.batch_bytes for row in summary.profiles], dtype=np.float64)
    memory = MemoryModel().fit(configurations[:, 2], reserved, oom_local_batch=summary.oom_local_batch)
    loads = batches > 0
    batch_memory = MemoryModel().fit(configurations[loads, 2], batches[loads]) if loads.any() else None
    return Models(step_time, memory, batch_memory, _update_time(summary))


def _update_time(summary: Summary) -> UpdateTime:
    """Medians over the local batches: they do not matter, the reference batch is a part of each."""
    by_workers: dict[int, list[float]] = {}
    for row in summary.profiles:
        if row.times.update_time_s > 0:
            by_workers.setdefault(row.configuration.world_size, []).append(row.times.update_time_s)
    workers = sorted(by_workers)
    medians = [float(np.median(by_workers[count])) for count in workers]
    return UpdateTime(np.array(workers, dtype=np.float64), np.array(medians))


def _check_enough(summary: Summary) -> None:
    failures = [f"{key} failed ({reason})" for key, reason in summary.failed.items()]
    failures += [f"{key} ran out of memory" for key in summary.out_of_memory]
    because = f" ({'; '.join(failures[:4])}{'; …' if len(failures) > 4 else ''})" if failures else ""
    if not summary.profiles:
        raise NotEnoughDataError(f"plan: no usable measurement{because}; {REMEDY}")
    seen = {row.configuration.local_batch for row in summary.profiles}
    if len(seen) < MIN_LOCAL_BATCHES:
        only = f"only local batch {min(seen)} was measured{because}"
        raise NotEnoughDataError(f"plan: {only}, and the models need {MIN_LOCAL_BATCHES} different ones; {REMEDY}")
    if summary.dataset_samples < 1:
        raise NotEnoughDataError("plan: no measurement says how many training samples the data set has; profile again")


def build_candidates(
    configurations: Sequence[Configuration],
    models: Models,
    cluster: ClusterSpec,
    summary: Summary,
    *,
    epochs: int,
    updates_per_epoch: float = 0.0,
) -> list[Candidate]:
    """Predict every configuration and say which are feasible.

    `epoch_time_s` is t_step × (D // B), full batches only, plus the updates of the gradient scale, and `train_time_s`
    epochs times that. All intervals are that of the step time, scaled.

    Args:
        configurations: At least one.
        models: From `fit_models`.
        cluster: Memory limit and prices.
        summary: Data set size, out-of-memory bound, and what was measured.
        epochs: E.
        updates_per_epoch: Of AGS's gradient scale, on average.
    """
    nodes, per_node, local_batch = np.array(configurations, dtype=np.float64).T
    step = models.step_time.predict(nodes, local_batch, per_node)
    low, high = models.step_time.interval(nodes, local_batch, per_node, level=0.9)
    peak = np.ceil(models.memory.predict(local_batch))
    epoch = step * (summary.dataset_samples // (nodes * per_node * local_batch))
    epoch += updates_per_epoch * models.update_time_s.predict(nodes * per_node)
    train = epochs * epoch
    cost = train_cost_usd(cluster.pricing, nodes, train, per_node, peak)
    columns = np.stack([step, epoch, train, cost, low / step, high / step], axis=1)
    measured = {row.configuration for row in summary.profiles}
    return [
        _candidate(
            configuration,
            predicted,
            int(peak_bytes),
            why=_why_not(configuration, int(peak_bytes), cluster, summary),
            measured=configuration in measured,
        )
        for configuration, predicted, peak_bytes in zip(configurations, columns.tolist(), peak.tolist(), strict=True)
    ]


def _candidate(
    configuration: Configuration, predicted: Sequence[float], peak_bytes: int, *, why: str, measured: bool
) -> Candidate:
    """One candidate; `predicted` holds step, epoch and training time (s), cost, and the interval's relative ends."""
    *values, low, high = predicted
    numbers = dict(zip(("step_time_s", "epoch_time_s", "train_time_s", "cost"), values, strict=True))
    return Candidate(
        nodes=configuration.nodes,
        workers_per_node=configuration.workers_per_node,
        local_batch=configuration.local_batch,
        global_batch=configuration.global_batch,
        **numbers,
        peak_memory_bytes=peak_bytes,
        interval_90={name: (value * low, value * high) for name, value in numbers.items()},
        feasible=not why,
        measured=measured,
        why=why,
    )


def _why_not(configuration: Configuration, peak_bytes: int, cluster: ClusterSpec, summary: Summary) -> str:
    """Why a configuration is not feasible; empty if it is."""
    bound, limit = summary.oom_local_batch, cluster.memory_limit_bytes
    if configuration.global_batch > summary.dataset_samples:
        return f"global batch exceeds the {summary.dataset_samples:,} training samples"
    if bound is not None and configuration.local_batch >= bound:
        return f"local batch {bound} ran out of memory"
    if limit is not None and peak_bytes > limit * (1.0 - cluster.memory_margin):
        allowed = limit * (1.0 - cluster.memory_margin) / GIB
        margin = f"limit {limit / GIB:.3g} GiB less a margin of {100 * cluster.memory_margin:.3g} %"
        return f"needs {peak_bytes / GIB:.3g} GiB per worker, more than {allowed:.3g} GiB ({margin})"
    return ""
