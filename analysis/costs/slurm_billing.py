"""Slurm's billing of a node by its trackable resources (TRES), each with its weight.

    billing = Σ weight × count
    billing = max(weight × count of cpu, mem, node, gres) + Σ of the others

over the TRES of the job (slurm.conf(5), TRESBillingWeights). The second equation holds with
PriorityFlags=MAX_TRES.

Service units are billing × hours. Slurm's accounting keeps whole billing units only, its fair share
does not; here nothing is rounded. All nodes of a job are alike, so that a job of N nodes is billed
N times as much as one node. Resources that these jobs do not ask for, such as licenses, energy and
burst buffers, count as 0. Of the options in `[sbatch]`, only those that ask for generic resources
of a node or a task are counted. The plan warns if such an omitted resource has a weight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tula_hpc.config import ClusterSpec, PricingSpec
from tula_hpc.config.gpus import requested_gres
from tula_hpc.formatting import plural

MIB_PER_GIB = 1024.0
# options in [sbatch] that are not counted, each with the prefix of the TRES names that it changes
_UNCOUNTED = {
    "bb": "bb/",
    "bbf": "bb/",
    "cpus-per-task": "cpu",
    "exclusive": "",
    "gpus": "gres/gpu",
    "gpus-per-socket": "gres/gpu",
    "licenses": "license/",
    "mem": "mem",
    "mem-per-cpu": "mem",
    "mem-per-gpu": "mem",
    "mincpus": "cpu",
    "tres-per-task": "",
}


class NodeResources(NamedTuple):
    """Resources that a job is billed for on each of its nodes."""

    # counts by TRES name in lower case: cores, MiB, GPUs, …
    tres: dict[str, float]
    # notes to the user about assumptions
    assumed: tuple[str, ...]


def node_resources(cluster: ClusterSpec) -> NodeResources:
    """Return a job's resources on each node; an exclusive job holds all cores and GPUs.

    Memory is what the job asks for, also on exclusive nodes (sbatch(1), --exclusive), or the whole
    node's if `memory_gb` is not set.
    """
    pricing, workers = cluster.pricing, cluster.workers_per_node
    weighted = [name for name, weight in pricing.tres_weights.items() if weight]
    tres = {"cpu": float(workers * cluster.cpus_per_worker), "mem": 0.0, "node": 1.0}
    tres |= _gres(cluster)
    assumed: list[str] = []
    if cluster.exclusive:
        assumed += _take_whole_node(tres, pricing, weighted)
    memory_gb = cluster.memory_gb or pricing.node_memory_gb
    if memory_gb is not None:
        tres["mem"] = memory_gb * MIB_PER_GIB
    elif "mem" in weighted:
        assumed.append("billing leaves out memory: set memory_gb or pricing.node_memory_gb")
    for name in weighted:
        if name not in tres:
            assumed.append(f"billing leaves out {name}: jobs ask for nothing of that name")
    for name, value in _options(cluster).items():
        start = _UNCOUNTED.get(name)
        # all of a node's memory, which is counted
        if (name, value) == ("mem", "0") and pricing.node_memory_gb is not None:
            continue
        if start is not None and any(tres_name.startswith(start) for tres_name in weighted):
            assumed.append(f"billing leaves out what {name} in [sbatch] asks for")
    return NodeResources(tres, tuple(assumed))


def _options(cluster: ClusterSpec) -> dict[str, str]:
    """Return the options of `[sbatch]` by sbatch's names, without switches that are off."""
    return {
        name.replace("_", "-"): str(value)
        for name, value in cluster.sbatch.items()
        if value is not False
    }


def _take_whole_node(
    tres: dict[str, float], pricing: PricingSpec, weighted: list[str]
) -> list[str]:
    """Set counts to the whole node's cores and GPUs; return notes about unknown counts."""
    assumed = []
    names = [name.partition(":")[0] for name in weighted]
    for name, noun, key, whole in (
        ("cpu", "core", "node_cpus", pricing.node_cpus),
        ("gres/gpu", "GPU", "node_gpus", pricing.node_gpus),
    ):
        if whole is not None:
            tres[name] = float(whole)
            for other in tres:
                if other.startswith(f"{name}:"):
                    tres[other] = float(whole)
        elif name in names:
            asked = tres.setdefault(name, 0.0)
            assumed.append(
                f"billing assumes nodes of {plural(round(asked), noun)}, "
                f"which is what a job asks for: set pricing.{key}"
            )
    return assumed


def _gres(cluster: ClusterSpec) -> dict[str, float]:
    """Return the counts of generic resources on a node, by name and by "name:type"."""
    counts: defaultdict[str, float] = defaultdict(float)
    for name, kind, count in _requests(cluster):
        counts[f"gres/{name}"] += count
        if kind:
            counts[f"gres/{name}:{kind}"] += count
    if cluster.device == "cuda" and "gres/gpu" not in counts:
        counts["gres/gpu"] = float(cluster.workers_per_node)
    return counts


def _requests(cluster: ClusterSpec) -> list[tuple[str, str, float]]:
    """Return name, type and count of each generic resource; GPU options replace GPUs in `gres`."""
    options = _options(cluster)
    items = list(requested_gres(options.get("gres", cluster.gres or "")))
    for option, times in (("gpus-per-task", cluster.workers_per_node), ("gpus-per-node", 1)):
        if option in options:
            gpus = requested_gres(",".join(f"gpu:{gpu}" for gpu in options[option].split(",")))
            items = [item for item in items if item[0] != "gpu"]
            for name, kind, count in gpus:
                items.append((name, kind, times * count))
    return items


def billing_per_node(pricing: PricingSpec, tres: dict[str, float]) -> float:
    """Return the billing units of a node by the module's equations."""
    weighted = {name: weight * tres.get(name, 0.0) for name, weight in pricing.tres_weights.items()}
    if not pricing.max_tres:
        return sum(weighted.values())
    local = [
        value
        for name, value in weighted.items()
        if name in ("cpu", "mem", "node") or name.startswith("gres/")
    ]
    return max([0.0, *local]) + sum(weighted.values()) - sum(local)
