"""How far the estimate of memory, made before any profile, was from what was measured then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tula_hpc.analysis.memory import estimate_error
from tula_hpc.analysis.parts import Fitted, prefixed
from tula_hpc.records import Footprint, Plan

NOTEWORTHY_ERROR = 0.3  # above it the estimate is not to be relied on for the next sweep of this workload


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
            models["partitions"] = models["partitions"] | {name: _noted(models["partitions"][name], error)}
    warnings = [prefixed(name, _warning(error)) for name, error in errors.items() if error > NOTEWORTHY_ERROR]
    return plan.model_copy(update={"models": models, "warnings": [*plan.warnings, *warnings]})


def _noted(models: dict[str, Any], error: float) -> dict[str, Any]:
    return models | {"memory": models["memory"] | {"estimate_error_median": error}}


def _warning(error: float) -> str:
    return f"the estimate of memory before profiling was off by {error:.0%} in the median"
