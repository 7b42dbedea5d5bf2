"""Text of a cluster file, for a partition or this machine; comments say where values come from."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.env import loaded_modules, users_default
from tula_hpc.formatting import plural

if TYPE_CHECKING:
    # imported for types only: it imports the modules that ask Slurm
    from tula_hpc.init.survey import Place, Survey

UNKNOWN = "unknown"
MIB_PER_GIB = 1024
# share of a node's memory for jobs; the rest is for the system and Slurm's own processes
MEMORY_SHARE = 0.95
COLUMN = 32
# type of a GPU that is a part (MIG device) of a whole GPU, as in a100_1g.5gb
_MIG = re.compile(r"\dg\.\d+gb")


class KeyLine(NamedTuple):
    """A key and its value; `asked` values are commented out, since only the user knows them."""

    key: str
    value: str | int | float | bool | list[str] | list[int]
    comment: str
    asked: bool = False

    def text(self) -> str:
        """Return the line of the file."""
        value = json.dumps(self.value, ensure_ascii=False)
        # a literal string of TOML: backslashes of a regular expression stay as they are
        if isinstance(self.value, str) and "\\" in self.value and "'" not in self.value:
            value = f"'{self.value}'"
        start = f"{'# ' if self.asked else ''}{self.key} = {value}"
        return f"{start:<{COLUMN - 1}} # {self.comment}"


def cluster_file(survey: Survey, place: Place) -> str:
    """Return the text of a cluster file, valid without any change."""
    memory = KeyLine("mem", 0, "all of a node's host memory, for loaders and checkpoints")
    tables = {
        "": [*_identity(survey, place), *_shape(place), *_times(place)],
        "[sbatch]": [memory] if place.gpus else [],
        "[environment]": list(_environment(place)),
        "[pricing]": list(_pricing(survey, place)),
    }
    return _text(
        f"# Cluster {survey.cluster_name}, partition {place.partition.name}, as Slurm described it.",
        f"# Lines that begin with # and end with {UNKNOWN!r} hold what Slurm cannot know: fill in what matters.",
        tables=tables,
    )


def local_cluster_file() -> str:
    """Return the text of a cluster file for this machine without Slurm."""
    gpus = '"cuda" for its GPUs, one for each worker'
    tables = {
        "": [
            KeyLine("name", "local", "name of the cluster, shown in reports"),
            KeyLine("executor", "local", "jobs run as processes on this machine"),
            KeyLine("device", "cpu", f"collectives run over gloo; {gpus}"),
            KeyLine("max_nodes", usable_cores(), "as many as this machine has cores"),
            KeyLine("workers_per_node", 1, "worker processes that stand in for a node"),
            KeyLine("cpus_per_worker", 1, "threads of each worker"),
        ]
    }
    return _text(
        "# This machine, without Slurm: worker processes stand in for nodes and run side by side.",
        tables=tables,
    )


def usable_cores() -> int:
    """Return the cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0))


def _text(*head: str, tables: dict[str, list[KeyLine]]) -> str:
    lines = [*head, ""]
    for heading, rows in tables.items():
        if rows:
            lines += [*filter(None, [heading]), *(row.text() for row in rows), ""]
    return "\n".join(lines)


def _identity(survey: Survey, place: Place) -> Iterator[KeyLine]:
    yield KeyLine("name", survey.cluster_name, "ClusterName")
    yield KeyLine("executor", "slurm", "jobs are submitted with sbatch")
    device = "cuda" if place.gpus else "cpu"
    collectives = "nccl" if place.gpus else "gloo"
    yield KeyLine("device", device, f"collectives run over {collectives}")
    kind = "the default partition" if place.is_default else "not the default partition"
    yield KeyLine("partition", place.partition.name, kind)
    if place.account:
        whose = "the first of your accounts that may use the partition"
        if place.account == users_default("account"):
            whose = "SBATCH_ACCOUNT of your shell"
        elif place.account == survey.preferred_account:
            whose = "your default account"
        yield KeyLine("account", place.account, whose)
    elif survey.needs_account:
        yield KeyLine("account", "", UNKNOWN, asked=True)
    if place.qos:
        yield KeyLine("qos", place.qos, "the first of yours that the partition allows")


def _shape(place: Place) -> Iterator[KeyLine]:
    nodes = place.nodes
    if nodes is None:
        return
    # CUDA shows a process only one MIG device, the first of those that it gets
    usable = 1 if _MIG.search(place.gpu_type) else place.gpus
    # a worker needs a core
    workers = max(1, min(usable, nodes.cpus))
    if place.gpus:
        gres = f"gpu:{place.gpu_type}:{workers}" if place.gpu_type else f"gpu:{workers}"
        yield KeyLine(
            "gres", gres, f"of {plural(place.gpus, 'GPU')} a node; Slurm lists {nodes.gres}"
        )
    others = f"; the partition has {plural(place.others, 'other kind')}" if place.others else ""
    count = min(nodes.count, place.most_nodes or nodes.count)
    yield KeyLine(
        "max_nodes", max(1, count), f"{plural(nodes.count, 'node')} of one kind can be used{others}"
    )
    yield KeyLine(
        "workers_per_node", workers, "one for each GPU" if place.gpus else "processes a node"
    )
    cores = max(1, nodes.cpus // workers)
    usual = int(WorkloadSpec.model_fields["loader_workers"].default)
    comment = "loader processes included"
    if place.gpus and cores <= usual:
        comment = f"so few that sweeps need workload.loader_workers = {cores - 1}"
    yield KeyLine("cpus_per_worker", cores, f"of {nodes.cpus} a node, {comment}")
    yield KeyLine("exclusive", True, "keep other jobs off the nodes")
    if place.gpus:
        yield KeyLine(
            "device_memory_gb", 0.0, f"memory of a GPU, for estimates: {UNKNOWN}", asked=True
        )
    else:
        memory_gb = round(MEMORY_SHARE * nodes.memory_mb / MIB_PER_GIB, 1)
        yield KeyLine(
            "memory_gb", memory_gb, f"{100 * MEMORY_SHARE:.0f} % of a node's {nodes.memory_mb} MB"
        )
    yield KeyLine("array_parallelism", max(1, min(4, count // 4)), "profile jobs at a time")


def _times(place: Place) -> Iterator[KeyLine]:
    defaults = ClusterSpec.model_fields
    limit = place.most_minutes
    comment = (
        "the partition has no time limit" if limit is None else f"the time limit is {limit} min"
    )
    shortest_s = math.inf
    for key in ("profile_minutes", "train_minutes"):
        usual = int(defaults[key].default)
        minutes = max(1, min(usual, limit or usual))
        shortest_s = min(shortest_s, 60 * minutes)
        yield KeyLine(key, minutes, comment)
    delay_s = int(defaults["signal_delay_s"].default)
    if delay_s >= shortest_s / 2:
        yield KeyLine(
            "signal_delay_s", int(shortest_s / 4), "time between the warning and a job's limit"
        )
    modules = loaded_modules()
    setup = [f"module load {' '.join(modules)}"] if modules else []
    if place.gpus:
        setup += ["ulimit -l $(ulimit -H -l)", "ulimit -n $(ulimit -H -n)"]
    if setup:
        loaded = "modules that are loaded here, and " if modules else ""
        yield KeyLine("setup", setup, f"shell lines that run first: {loaded}the highest limits")


def _environment(place: Place) -> Iterator[KeyLine]:
    if place.gpus:
        name = "NCCL_SOCKET_IFNAME"
        yield KeyLine(
            name, "eth0", f"tula check lists the interfaces with their rates: {UNKNOWN}", asked=True
        )


def _pricing(survey: Survey, place: Place) -> Iterator[KeyLine]:
    nodes = place.nodes
    if nodes is None:
        return
    if place.billing_weights:
        yield KeyLine("basis", "tres", "billing units times hours, as the site accounts them")
        yield KeyLine("tres_weights", place.billing_weights, "TRESBillingWeights of the partition")
        if survey.max_tres:
            yield KeyLine("max_tres", True, "PriorityFlags of the site has MAX_TRES")
        whole = "of a node, which exclusive jobs are billed for"
        yield KeyLine("node_cpus", nodes.cpus, whole)
        if place.gpus:
            yield KeyLine("node_gpus", place.gpus, whole)
            memory_gb = round(nodes.memory_mb / MIB_PER_GIB, 1)
            yield KeyLine("node_memory_gb", memory_gb, "of a node, which mem = 0 asks for")
        return
    yield KeyLine("basis", "node-hour", "the site has no billing weights")
    yield KeyLine(
        "usd_per_node_hour",
        1.0,
        f"1 USD until this is set, so that costs are node-hours: {UNKNOWN}",
        asked=True,
    )
