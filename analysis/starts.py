"""How long a job takes until its first step: interpreter, torch, rendezvous, model and data. Every restart pays it.

Profile jobs measure it, each with its first configuration; `pricing.restart_s` overrides that.
"""

from __future__ import annotations

from tula_hpc.analysis.formatting import format_duration
from tula_hpc.config import ClusterSpec, PricingSpec


def with_start(cluster: ClusterSpec, measured_s: float | None) -> ClusterSpec:
    """The cluster with the measured time in its prices, where they do not state one and it is known."""
    if cluster.pricing.restart_s is not None or measured_s is None:
        return cluster
    pricing = cluster.pricing.model_copy(update={"restart_s": measured_s})
    return cluster.model_copy(update={"pricing": pricing})


def describe(measured_s: float | None, pricing: PricingSpec) -> str:
    """What a start is taken to take, and who says so.

    Args:
        measured_s: As profile jobs measured it.
        pricing: As `with_start` left it.
    """
    said = format_duration(pricing.start_s)
    if measured_s is not None and pricing.restart_s == measured_s:
        return f"a job takes {said} to its first step, as profile jobs of this run measured"
    return f"a job is taken to take {said} to its first step (pricing.restart_s)"
