"""Slurm's billing of a node: its trackable resources (TRES), each with its weight.

    billing = Σ weight × count                       over the TRES of the job (slurm.conf(5), TRESBillingWeights)
    billing = max(weight × count of cpu, mem, node, gres) + Σ of the others          with PriorityFlags=MAX_TRES

Service units are billing × hours. Slurm's accounting keeps whole numbers of billing units, its fair
share does not; here nothing is rounded. All nodes of a job are alike, so that a job of N nodes is
billed N times a node. What these jobs do not ask for, as licences, energy and burst buffers, counts
nothing; where it has a weight, the plan says so. Of the options in `[sbatch]` those that ask for
generic resources of a node or a task are counted. Where others change what a job holds and that has
a weight, the plan says so, too.
"""

from __future__ import annotations

from typing import NamedTuple

from tula_hpc.config import ClusterSpec, PricingSpec
from tula_hpc.config.gpus import requested_gres
from tula_hpc.formatting import plural

MIB_PER_GIB = 1024.0
# options in [sbatch] that are not counted, with the beginning of the names of the TRES that they
# change
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
    """What a job is billed for on each of its nodes."""

    # counts by TRES name in lower case: cores, MiB, GPUs, …
    tres: dict[str, float]
    # what had to be assumed, as sentences without a full stop
    assumed: tuple[str, ...]


def node_resources(cluster: ClusterSpec) -> NodeResources:
    """What a job holds on each node; exclusive jobs hold all cores and GPUs, whatever they asked for.

    Memory is what the job asks for, also on exclusive nodes (sbatch(1), --exclusive); without
    `memory_gb` the whole node's.
    """
    pricing, workers = cluster.pricing, cluster.workers_per_node
    tres = {"cpu": float(workers * cluster.cpus_per_worker), "mem": 0.0, "node": 1.0} | _gres(
        cluster
    )
    assumed: list[str] = []
    if cluster.exclusive:
        _whole_node(tres, pricing, assumed)
    memory_gb = cluster.memory_gb or pricing.node_memory_gb
    if memory_gb is not None:
        tres["mem"] = memory_gb * MIB_PER_GIB
    elif pricing.tres_weights.get("mem"):
        assumed.append("billing leaves out memory: set memory_gb or pricing.node_memory_gb")
    missing = [name for name, weight in pricing.tres_weights.items() if weight and name not in tres]
    assumed += [f"billing leaves out {name}: jobs ask for nothing of that name" for name in missing]
    assumed += [
        f"billing leaves out what {name} in [sbatch] asks for" for name in _uncounted(cluster)
    ]
    return NodeResources(tres, tuple(assumed))


def _uncounted(cluster: ClusterSpec) -> list[str]:
    """Options of sbatch that change a count that is billed, and are not counted."""
    weighed = [name for name, weight in cluster.pricing.tres_weights.items() if weight]
    changed = {name: _UNCOUNTED[name] for name in _options(cluster) if name in _UNCOUNTED}
    return [
        name for name, start in changed.items() if any(tres.startswith(start) for tres in weighed)
    ]


def _options(cluster: ClusterSpec) -> dict[str, str]:
    """What `[sbatch]` asks for, by sbatch's names; switches that are off are left out."""
    return {
        name.replace("_", "-"): str(value)
        for name, value in cluster.sbatch.items()
        if value is not False
    }


def _whole_node(tres: dict[str, float], pricing: PricingSpec, assumed: list[str]) -> None:
    """All of the node's cores and GPUs, where the prices say how many; else what the job asks for."""
    weighed = [name.partition(":")[0] for name, weight in pricing.tres_weights.items() if weight]
    for name, key, whole in (
        ("cpu", "node_cpus", pricing.node_cpus),
        ("gres/gpu", "node_gpus", pricing.node_gpus),
    ):
        asked = tres.get(name, 0.0)
        if whole is not None:
            of_kind = [other for other in tres if other.startswith(f"{name}:")]
            tres.update(dict.fromkeys([name, *of_kind], float(whole)))
        elif name in weighed:
            tres[name] = asked
            what = plural(round(asked), "core" if name == "cpu" else "GPU")
            assumed.append(
                f"billing assumes nodes of {what}, which is what a job asks for: set pricing.{key}"
            )


def _gres(cluster: ClusterSpec) -> dict[str, float]:
    """Counts of generic resources on a node, by name and by name and type, as `gres = "gpu:a100:4"` asks for them."""
    counts: dict[str, float] = {}
    for name, kind, count in _requests(cluster):
        for key in [f"gres/{name}", f"gres/{name}:{kind}"] if kind else [f"gres/{name}"]:
            counts[key] = counts.get(key, 0.0) + count
    if cluster.device == "cuda" and "gres/gpu" not in counts:
        counts["gres/gpu"] = float(cluster.workers_per_node)
    return counts


def _requests(cluster: ClusterSpec) -> list[tuple[str, str, float]]:
    """Name, type and count of each generic resource of a node; options for GPUs take the place of the GPUs in gres."""
    options = _options(cluster)
    items = list(requested_gres(options.get("gres", cluster.gres or "")))
    for option, times in (("gpus-per-task", cluster.workers_per_node), ("gpus-per-node", 1)):
        if option in options:
            gpus = requested_gres(",".join(f"gpu:{gpu}" for gpu in options[option].split(",")))
            items = [item for item in items if item[0] != "gpu"]
            items += [(name, kind, times * count) for name, kind, count in gpus]
    return items


def billing_per_node(pricing: PricingSpec, tres: dict[str, float]) -> float:
    """Billing units of a node; see the equations above."""
    weighted = {name: weight * tres.get(name, 0.0) for name, weight in pricing.tres_weights.items()}
    if not pricing.max_tres:
        return sum(weighted.values())
    local = [
        value
        for name, value in weighted.items()
        if name in ("cpu", "mem", "node") or name.startswith("gres/")
    ]
    return max([0.0, *local]) + sum(weighted.values()) - sum(local)
