"""All models fitted to the measurements on one kind of nodes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from tula_hpc.analysis.models.memory import MemoryModel, fit_memory
from tula_hpc.analysis.models.profiles import Summary, UpdateTime, update_time
from tula_hpc.analysis.models.step_time import StepTimeModel, fit_step_time
from tula_hpc.config.search import FormName
from tula_hpc.errors import NotEnoughDataError

# a single local batch cannot tell fixed costs from costs per sample
MIN_LOCAL_BATCHES = 2
REMEDY = "run the sweep again to profile what is missing"
# remedy where the model itself, or interpreter and libraries, do not fit
LARGER_MACHINE = "raise the limit if nodes have more, or use a machine with more memory"
MORE_MEMORY = "lower search.min_batch, allow more nodes, or use a machine with more memory"


class Models(NamedTuple):
    """Fitted models of step time, memory and updates."""

    step_time: StepTimeModel
    # predicts the bytes of one worker that count against the memory limit
    memory: MemoryModel
    update_time_s: UpdateTime

    def describe(self) -> dict[str, Any]:
        """Return forms, coefficients and residuals in the form that plan.json stores."""
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
            "memory": {
                "parameters": self.memory.parameters_,
                "pinned": self.memory.pinned_,
                "residual_median": self.memory.residual_median_,
                "oom_local_batch": self.memory.oom_local_batch_,
                "oom_contradicts": self.memory.oom_contradicts_,
            },
        }


def fit_models(
    summary: Summary,
    memory_limit_bytes: float | None = None,
    form: FormName = "auto",
    possible: Collection[int] | None = None,
) -> Models:
    """Fit step time, memory and updates to all configurations that ran.

    A configuration that ran out of memory needed more than `memory_limit_bytes`; None: unknown.
    `possible` are the local batches that a plan may choose; None: any. If all of these were
    measured, a single one is enough.

    Raises:
        NotEnoughDataError: Nothing ran, or fewer than two local batches did although more can.
    """
    _check_enough(summary, possible)
    step_time = fit_step_time(summary.profiles, form, summary.passes)
    return Models(step_time, fit_memory(summary, memory_limit_bytes), update_time(summary))


def _check_enough(summary: Summary, possible: Collection[int] | None) -> None:
    because = _failures(summary)
    remedy = f"fix that and {REMEDY}" if summary.failed else REMEDY
    if not summary.profiles:
        if possible is not None and not possible:
            remedy = MORE_MEMORY
        raise NotEnoughDataError(f"no usable measurement{because}; {remedy}")
    seen = {row.configuration.local_batch for row in summary.of_one_pass}
    if len(seen) < MIN_LOCAL_BATCHES and (possible is None or not seen.issuperset(possible)):
        raise NotEnoughDataError(
            f"only local batch {min(seen)} was measured{because}, "
            f"and the models need {MIN_LOCAL_BATCHES} different ones; {remedy}"
        )
    if summary.dataset_samples < 1:
        raise NotEnoughDataError(
            "no measurement says how many training samples the data set has; profile again"
        )


def _failures(summary: Summary) -> str:
    """Return the first failures in brackets, or an empty string."""
    failures = [f"{key} failed ({reason})" for key, reason in summary.failed.items()]
    failures += [f"{key} ran out of memory" for key in summary.out_of_memory]
    if not failures:
        return ""
    if len(failures) > 4:
        failures[4:] = ["…"]
    return f" ({'; '.join(failures)})"
