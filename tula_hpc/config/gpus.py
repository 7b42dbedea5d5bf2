"""Check the GPUs that a Slurm job gives its workers, and read Slurm's trackable resources (TRES).

Every worker is a task of one job step and uses one GPU. If a worker sees all GPUs of its node, it
takes the one of its local rank; if Slurm shows it a single GPU, it takes that
(`process_group.pick_device`). If a job asks for too few GPUs, all tasks see the same GPU, and
nothing in the job can notice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tula_hpc.config.validation import shown

if TYPE_CHECKING:
    from tula_hpc.config.cluster import ClusterSpec


# value of `gres` where Slurm does not manage the GPUs of its nodes
NO_GRES = "none"
SUFFIXES = "KMGTP"
# TRES whose base unit is MiB, the second suffix
MIB_BASED = ("mem", "vmem", "bb")
_WEIGHT = re.compile(r"(\+?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([KMGTP]?)", re.IGNORECASE)
_EXAMPLE = '"CPU=1.0,Mem=0.25G,GRES/gpu=2.0"'
_NAME = re.compile(r"[a-z]\w*(/[\w.:-]+)?")
# the sockets that Slurm appends to a count: gpu:4(S:0-1)
_SOCKETS = re.compile(r"\([^()]*\)")


def parse_weights(weights: str | Mapping[str, object]) -> dict[str, float]:
    """Return weights per base unit by TRES name in lower case, from TRESBillingWeights.

    "CPU=1.0,Mem=0.25G,GRES/gpu=2.0" bills each core with 1, each GiB with 0.25 and each GPU with 2.
    Weights count per base unit: one core, one GPU, one node, and for memory (also "vmem" and burst
    buffers "bb/…") one MiB. A suffix K, M, G, T or P divides the weight by the ratio of that unit
    to the base unit, in powers of 1024: "0.25G" of memory is 0.25 / 1024 per MiB. A suffix at or
    below the base unit changes nothing, so that "Mem=1K" is 1 per MiB (slurm.conf(5);
    `get_convert_unit_val` in Slurm's source). A table such as {"CPU": 1.0, "Mem": "0.25G"} says the
    same.

    Raises:
        ValueError: An entry is not NAME=WEIGHT, a weight is negative, or a TRES is listed twice.
    """
    entries = _split(weights) if isinstance(weights, str) else list(weights.items())
    parsed: dict[str, float] = {}
    for name, value in entries:
        key = name.strip().lower()
        if not _NAME.fullmatch(key):
            raise ValueError(f"{name!r} is not a TRES; expected for example {_EXAMPLE}")
        if key in parsed:
            raise ValueError(f"{name!r} is listed twice; expected each TRES once")
        parsed[key] = _weight(key, value)
    return parsed


def _split(text: str) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for item in filter(str.strip, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{name.strip()!r} has no weight; expected for example {_EXAMPLE}")
        pairs.append((name, value))
    return pairs


def _weight(key: str, value: object) -> float:
    text = str(value).strip() if isinstance(value, int | float | str) else ""
    match = _WEIGHT.fullmatch(text)
    if match is None or math.isinf(float(match[1])):
        raise ValueError(
            f"{key}: expected a number of 0 or more, perhaps with one of the suffixes K M G T P, "
            f"got {value!r}"
        )
    unit = SUFFIXES.index(match[2].upper()) + 1 if match[2] else 0
    base = SUFFIXES.index("M") + 1 if key.partition("/")[0] in MIB_BASED else 0
    return float(match[1]) / 1024.0 ** max(0, unit - base)


def requested_gres(gres: str) -> Iterator[tuple[str, str, float]]:
    """Yield lower-case name, type ("" for none) and count of each item of `name[[:type]:count],…`.

    Types may begin with a digit, as in "gpu:2080ti:4" and "gpu:1g.5gb": the last field is a count
    only if all of it is digits.
    """
    for item in _SOCKETS.sub("", gres).lower().split(","):
        name, *fields = item.removeprefix("gres:").split(":")
        count = float(fields.pop()) if fields and fields[-1].isdecimal() else 1.0
        if name:
            yield name, ":".join(filter(None, fields)), count


# GPUs in the value of tres-per-task, an option since Slurm 23.11
_TASK_GPUS = re.compile(r"gres[/:]gpu(?::[^:=,]+)?[:=](\d+)")
_BINDING = re.compile(r"(?:v(?:erbose)?,)?(\w+)(?::(.*))?")


class _Option(NamedTuple):
    """Option that asks for GPUs: its key in the cluster file, and its value."""

    key: str
    value: str


def check_gpus(cluster: ClusterSpec) -> None:
    """Refuse a cluster file whose jobs do not give every worker of a node a GPU of its own."""
    options = _options(cluster)
    workers = cluster.workers_per_node
    _check_shares(options, workers)
    counts = list(_gpus_of_node(options, cluster))
    if not counts and "gres" not in options:
        raise ValueError(
            f'gres: device = "cuda" on Slurm needs gres = "gpu:{workers}", also with '
            "exclusive = true: Slurm gives a job's tasks only GPUs that were asked for; "
            f'gres = "{NO_GRES}" if Slurm does not manage the GPUs'
        )
    if not counts and cluster.gres == NO_GRES and not cluster.exclusive:
        raise ValueError(
            f'gres: "{NO_GRES}" needs exclusive = true, as Slurm keeps no other job from the same '
            "GPUs"
        )
    need = "a worker needs a GPU"
    if workers > 1:
        need = f"each of {workers} workers_per_node needs a GPU of its own"
    for option, count in counts:
        if count < workers:
            asked = f"{shown(option.value)} asks for {count} a node"
            raise ValueError(f"{option.key}: {need}, but {asked}; expected at least {workers}")


def hidden_peers(cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Yield each key that hides the other workers' GPUs on a node from a worker, with advice."""
    for part in cluster.parts():
        if part.device != "cuda" or part.executor != "slurm" or part.workers_per_node == 1:
            continue
        options = _options(part)
        hiding = [option for option, _ in _gpus_of_task(options)]
        binding = options.get("gpu-bind")
        if binding is not None and _binding(binding.value)[0] != "none":
            hiding.append(binding)
        for option in hiding:
            yield (
                option.key,
                "where the site confines tasks to their devices, each worker sees its own GPU "
                "alone, and NCCL copies through host memory instead of from GPU to GPU; "
                f'gres = "gpu:{part.workers_per_node}" in its place shows all of a node\'s GPUs to '
                "its workers, and each takes that of its local rank",
            )


def _options(cluster: ClusterSpec) -> dict[str, _Option]:
    """Return the options that ask for GPUs, by sbatch's names; srun's override the job's."""
    options: dict[str, _Option] = {}
    if cluster.gres is not None:
        options["gres"] = _Option("gres", cluster.gres)
    for key, value in cluster.sbatch.items():
        if value is not False:
            options[key.replace("_", "-")] = _Option(f"sbatch.{key}", str(value))
    for word in cluster.srun_args:
        name, _, value = word.removeprefix("--").partition("=")
        if name in ("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpu-bind", "tres-per-task"):
            options[name] = _Option("srun_args", value)
    return options


def _gpus_of_node(
    options: Mapping[str, _Option], cluster: ClusterSpec
) -> Iterator[tuple[_Option, int]]:
    """Yield every option that asks for GPUs, with the number of GPUs that it gives a node."""
    workers = cluster.workers_per_node
    if "gpus-per-node" in options:
        yield options["gpus-per-node"], _count(options["gpus-per-node"].value)
    for option, count in _gpus_of_task(options):
        yield option, workers * count
    if "gpus-per-socket" in options:
        yield options["gpus-per-socket"], _of_sockets(options)
    if "gpus" in options:
        if cluster.max_nodes > 1:
            raise ValueError(
                f"{options['gpus'].key}: expected gpus-per-node = {workers}: jobs have 1 to "
                f"{cluster.max_nodes} nodes, and gpus counts those of the whole job"
            )
        yield options["gpus"], _count(options["gpus"].value)
    # options for GPUs replace those in gres; a site may also name its GPUs otherwise in gres
    others = any(name.startswith("gpus") or name == "tres-per-task" for name in options)
    if "gres" in options and not others:
        named = [count for name, _, count in requested_gres(options["gres"].value) if name == "gpu"]
        if named:
            yield options["gres"], int(sum(named))


def _gpus_of_task(options: Mapping[str, _Option]) -> Iterator[tuple[_Option, int]]:
    if "gpus-per-task" in options:
        yield options["gpus-per-task"], _count(options["gpus-per-task"].value)
    if "tres-per-task" in options:
        match = _TASK_GPUS.search(options["tres-per-task"].value)
        if match:
            yield options["tres-per-task"], int(match[1])


def _of_sockets(options: Mapping[str, _Option]) -> int:
    if "sockets-per-node" not in options:
        raise ValueError(
            f"{options['gpus-per-socket'].key}: Slurm requires sockets-per-node with it; "
            "expected gpus-per-node instead"
        )
    return _count(options["gpus-per-socket"].value) * _count(options["sockets-per-node"].value)


def _count(value: str) -> int:
    """Return the sum of the counts in Slurm's `[type:]count,…`."""
    items = requested_gres(",".join(f"gpu:{item}" for item in value.split(",")))
    return int(sum(count for _, _, count in items))


def _check_shares(options: Mapping[str, _Option], workers: int) -> None:
    """Refuse options that give one of a node's several workers more or less than its own GPU."""
    if workers == 1:
        return
    for option, count in _gpus_of_task(options):
        if count != 1:
            got = shown(option.value)
            raise ValueError(f"{option.key}: expected 1 GPU, since each worker uses one, got {got}")
    binding = options.get("gpu-bind")
    if binding is None:
        return
    kind, argument = _binding(binding.value)
    if kind in ("single", "per_task") and argument not in ("", "1"):
        raise ValueError(
            f'{binding.key}: expected "{kind}:1", one GPU for each worker and one worker for each, '
            f"got {shown(binding.value)}"
        )


def _binding(value: str) -> tuple[str, str]:
    """Return kind and argument of --gpu-bind, as in `verbose,single:1`."""
    match = _BINDING.fullmatch(value)
    return (match[1], match[2] or "") if match else (value, "")
