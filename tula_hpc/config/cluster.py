"""Cluster file: nodes, limits, jobs, `[pricing]`, and `[[partitions]]` that override these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from tula_hpc.config.gpus import check_gpus, parse_weights
from tula_hpc.config.validation import (
    GIB,
    MOST_GIB,
    Line,
    Mount,
    Name,
    PartitionName,
    SbatchOption,
    SlurmWord,
    Spec,
    VariableName,
    message_of,
    shown,
    valid_keys,
)
from tula_hpc.errors import InputError


class PartitionSpec(Spec):
    """`[[partitions]]`: one kind of nodes; a key that is left out has the cluster file's value."""

    partition: PartitionName
    """Name of the partition."""
    device: Literal["cpu", "cuda"] | None = None
    max_nodes: int | None = Field(default=None, ge=1, le=65_536)
    workers_per_node: int | None = Field(default=None, ge=1, le=64)
    cpus_per_worker: int | None = Field(default=None, ge=1, le=1024)
    memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    device_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    account: SlurmWord | None = None
    qos: SlurmWord | None = None
    gres: SlurmWord | None = None
    constraint: SlurmWord | None = None
    pricing: dict[str, Any] = Field(default={})

    def overrides(self) -> dict[str, Any]:
        """Return the keys that are given, except those of `pricing`."""
        return self.model_dump(exclude_none=True, exclude={"pricing"})

    def has(self, key: str) -> bool:
        """Tell whether a dotted key of a cluster file is given here."""
        section, _, name = key.partition(".")
        if section == "pricing":
            return name.partition(".")[0] in self.pricing
        return section in self.overrides()


# largest number of characters, or of table entries, of tres_weights
MOST_WEIGHTS = 2000
# seconds until a job's first step and, at most, for a checkpoint, if neither given nor measured
ASSUMED_START_S = 60.0
ASSUMED_SAVE_S = 5.0


class PricingSpec(Spec):
    """`[pricing]`: price of training; `basis` picks the prices that count."""

    # strict also where `_part` validates a partition's prices, merged with the cluster's
    model_config = ConfigDict(strict=True)

    basis: Literal["node-hour", "memory", "tres", "spot", "energy"] = "node-hour"
    """What is paid for: hours of nodes, memory in use, Slurm's billing units, spot nodes, or
    energy.
    """
    usd_per_node_hour: float = Field(default=1.0, ge=0)
    """Price of a node for an hour, for `basis = "node-hour"`."""
    usd_per_gib_hour: float = Field(default=0.15, ge=0)
    """Price of a GiB of memory in use for an hour, for `basis = "memory"`."""
    tres_weights: dict[str, float] = Field(default={})
    """Billing weights for `basis = "tres"`, as a table or as the text that `scontrol show
    partition` prints.
    """
    max_tres: bool = False
    """Bill the largest of a node's weighted TRES instead of their sum, as Slurm does with
    PriorityFlags=MAX_TRES.
    """
    usd_per_unit: float | None = Field(default=None, ge=0)
    """Price of a billing unit for an hour; without it costs are in service units (SU)."""
    node_cpus: int | None = Field(default=None, ge=1, le=10**6)
    """Cores of a whole node, which exclusive jobs are billed for; without it the cores that a job
    requests.
    """
    node_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    """Memory of a whole node, which exclusive jobs are billed for; without it the memory that a job
    requests.
    """
    node_gpus: int | None = Field(default=None, ge=0, le=10**6)
    """GPUs of a whole node, which exclusive jobs are billed for; without it the GPUs that a job
    requests.
    """
    usd_per_spot_node_hour: float = Field(default=0.3, ge=0)
    """Price of a node for an hour, for `basis = "spot"`."""
    preemption_hours: float = Field(default=24.0, gt=0)
    """Mean time between preemptions of spot nodes."""
    preempted: Literal["node", "job"] = "node"
    """Whether `preemption_hours` holds for each node, so that a job on more nodes is preempted more
    often, or for the whole job.
    """
    watts_per_node: float | None = Field(default=None, gt=0)
    """Power of a whole node under load; without it the power that profiles measure, of processors
    and GPUs alone.
    """
    usd_per_kwh: float = Field(default=0.15, ge=0)
    """Price of a kilowatt-hour, for `basis = "energy"`."""
    pue: float = Field(default=1.2, ge=1)
    """Power that the site draws for each watt of its nodes."""
    checkpoint_write_s: float | None = Field(default=None, ge=0)
    """Time to write a checkpoint, used until a training of the run has measured it; without it
    estimated from the checkpoint's size.
    """
    restart_s: float | None = Field(default=None, ge=0)
    """Time from the start of a job to its first step; without it the time that profiles measure."""

    @field_validator("tres_weights", mode="before")
    @classmethod
    def _as_in_slurm_conf(cls, value: object) -> object:
        if isinstance(value, str | dict) and len(value) > MOST_WEIGHTS:
            raise ValueError(f"expected at most {MOST_WEIGHTS:,} characters or entries")
        return parse_weights(value) if isinstance(value, str | dict) else value

    @property
    def start_s(self) -> float:
        """Seconds from the start of a job to its first step, given or assumed."""
        return ASSUMED_START_S if self.restart_s is None else self.restart_s

    @property
    def save_s(self) -> float:
        """Seconds to write a checkpoint: given, or the largest value that is assumed."""
        return ASSUMED_SAVE_S if self.checkpoint_write_s is None else self.checkpoint_write_s

    @property
    def is_default(self) -> bool:
        """True if costs follow the default price, which the user has not set."""
        usual = type(self).model_fields["usd_per_node_hour"].default
        return self.basis == "node-hour" and self.usd_per_node_hour == usual

    @property
    def currency(self) -> Literal["USD", "SU"]:
        """USD, or SU (service units: billing units times hours) if billing units have no price."""
        return "SU" if self.basis == "tres" and self.usd_per_unit is None else "USD"


# largest time limit, about two years
MOST_MINUTES = 10**6


class ContainerSpec(Spec):
    """`[container]`: image that jobs run in; see `tula_hpc.containers`."""

    image: Annotated[Line, Field(min_length=1)]
    """Image file, or any other image name that the runtime accepts."""
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """Container runtime that runs the image."""
    python: Annotated[Line, Field(min_length=1)] = "python3"
    """Python interpreter inside the image."""
    mounts: tuple[Mount, ...] = Field(default=(), max_length=100)
    """Folders of the host to mount in addition to those that jobs need."""
    options: tuple[Line, ...] = Field(default=(), max_length=100)
    """Further options of `apptainer exec`, or pyxis's options of srun."""

    @field_validator("options")
    @classmethod
    def _options_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _only_options(value, "--writable-tmpfs")


def _only_options(words: tuple[str, ...], example: str) -> tuple[str, ...]:
    for word in words:
        # any other word would be read as the program to run, or as an option's name with a blank
        if not re.match(r"--?[A-Za-z][^\s=]*(=|$)", word):
            expected = f'options with their values in one word, for example "{example}"'
            raise ValueError(f"expected {expected}, got {shown(word)}")
    return words


# Options that [sbatch] may not hold, each with what to use instead: with them, jobs would not be
# found again, or would differ from the plan.
_OWN_OPTIONS = {
    "array": "array_parallelism",
    "chdir": "",
    "clusters": "the variable SLURM_CLUSTERS, which squeue and sacct also follow",
    "cpus-per-gpu": "cpus_per_worker",
    "dependency": "",
    "error": "",
    "input": "",
    "job-name": "the sweep's name",
    "nodes": "search.cluster_sizes",
    "ntasks": "workers_per_node",
    "ntasks-per-gpu": "workers_per_node",
    "ntasks-per-node": "workers_per_node",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "quiet": "",
    "signal": "signal_delay_s",
    "test-only": "",
    "time": "profile_minutes and train_minutes",
    "wait": "",
    "wrap": "setup",
}

# short names of the options that srun_args may not hold
_OWN_OF_SRUN = {"D": "chdir", "N": "nodes", "e": "error", "n": "ntasks", "o": "output"}


def _refusal(option: str, own: str) -> str:
    instead = _OWN_OPTIONS[own]
    return f"{option} is set by this program; {f'see {instead}' if instead else 'leave it out'}"


# Keys of the cluster file, each with the sbatch option that would replace its value: [sbatch] may
# hold the option only while the key has no value. Options that replace gres: see `check_gpus`.
_OPTIONS_OF = {
    "partition": "partition", "controller_partition": "partition",
    "account": "account", "qos": "qos", "constraint": "constraint",
    "memory_gb": "mem", "cpus_per_worker": "cpus-per-task",
}  # fmt: skip


def _refuse_two_values(cluster: ClusterSpec) -> None:
    """Refuse an option of [sbatch] that would replace the value of a key."""
    for name, value in cluster.sbatch.items():
        for key, option in _OPTIONS_OF.items():
            own = getattr(cluster, key)
            is_given = own != type(cluster).model_fields[key].default
            # sbatch also accepts abbreviated options
            if value is not False and is_given and _has_prefix(option, name):
                raise ValueError(
                    f"sbatch.{name}: would replace {key} = {shown(own)}; remove one of them"
                )


def _has_prefix(option: str, name: str) -> bool:
    return option.startswith(name.replace("_", "-"))


# sbatch options that request what a node's workers need; controller jobs leave them out
_OF_WORKERS = frozenset({
    "constraint", "core-spec", "cores-per-socket", "cpus-per-task", "exclusive", "gres", "licenses",
    "mincpus", "sockets-per-node", "threads-per-core", "tmp", "tres-bind", "tres-per-task",
})  # fmt: skip
# short names in srun_args of constraint, gpus, licenses, core-spec and cpus-per-task
_SHORT_OF_WORKERS = ("-C", "-G", "-L", "-S", "-c")


def _is_for_workers(option: str) -> bool:
    name = option.lstrip("-").partition("=")[0].replace("_", "-")
    is_short = option.startswith(_SHORT_OF_WORKERS)
    return is_short or name.startswith(("gpu", "mem")) or name in _OF_WORKERS


# keys that other tools use, each with the end of the message that refuses it
_FOREIGN_KEYS = {
    **dict.fromkeys(("module", "modules", "conda"), "; such commands are lines of setup"),
    **dict.fromkeys(("gpus", "gpus_per_node"), " (did you mean gres?)"),
    **dict.fromkeys(("time", "timeout_min"), "; see profile_minutes and train_minutes"),
}


class ClusterSpec(Spec):
    """Cluster file: where and how jobs run."""

    foreign_keys = _FOREIGN_KEYS

    name: Name = "local"
    """Name of the cluster, shown in reports."""
    executor: Literal["local", "slurm"] = "local"
    """Run jobs as processes on this machine, or submit them to Slurm."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Train on CPUs, with collectives over gloo, or on GPUs, with collectives over nccl."""
    max_nodes: int = Field(default=64, ge=1, le=65_536)
    """Largest number of nodes that a sweep may ask for."""
    workers_per_node: int = Field(default=1, ge=1, le=64)
    """Worker processes on each node; with GPUs one for each GPU."""
    cpus_per_worker: int = Field(default=1, ge=1, le=1024)
    """Cores of each worker, loader processes included."""
    memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    """Host memory of a node; Slurm enforces it, and on CPUs it bounds the batch."""
    device_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    """Memory of a GPU, which bounds the batch; without it the size that profiles measure."""
    memory_margin: float = Field(default=0.1, ge=0, lt=1)
    """Share of the memory limit that plans leave unused."""
    partition: SlurmWord | None = None
    """Partition that jobs are submitted to."""
    account: SlurmWord | None = None
    """Account that jobs are submitted with."""
    qos: SlurmWord | None = None
    """Quality of service that jobs are submitted with."""
    gres: SlurmWord | None = None
    """Generic resources of a node (`--gres`); needed for `device = "cuda"` on Slurm; "none" if
    Slurm does not manage the GPUs, which needs `exclusive`.
    """
    constraint: SlurmWord | None = None
    """Feature that the nodes must have, so that all are of one kind."""
    exclusive: bool = True
    """Keep other jobs off the nodes."""
    profile_minutes: int = Field(default=20, ge=1, le=MOST_MINUTES)
    """Time limit of each profiling job; the next job measures the configurations that are left."""
    train_minutes: int = Field(default=24 * 60, ge=1, le=MOST_MINUTES)
    """Time limit of each training job; at the limit the training saves, requeues and goes on."""
    array_parallelism: int = Field(default=1, ge=1, le=10_000)
    """Profiling jobs that run at the same time."""
    controller_partition: SlurmWord | None = None
    """Partition of a detached sweep's controller jobs; without it the other jobs' partition."""
    controller_minutes: int = Field(default=30, ge=2, le=MOST_MINUTES)
    """Time limit of a controller job."""
    controller_memory_gb: float | None = Field(default=None, gt=0, le=MOST_GIB)
    """Memory of a controller job; without it the site's default."""
    signal_delay_s: int = Field(default=90, ge=1, le=65_535)
    """Time between the warning signal and the time limit, long enough to save a checkpoint."""
    srun_args: tuple[Line, ...] = Field(default=("-K1",), max_length=100)
    """Options of srun, each with its value in one word."""
    setup: tuple[Line, ...] = Field(default=(), max_length=1000, repr=False)
    """Shell lines that every job runs first."""
    on_event: Annotated[Line, Field(min_length=1)] | None = Field(default=None, repr=False)
    """Shell line that runs when something happens that a person wants to know."""
    sbatch: dict[SbatchOption, SlurmWord | Annotated[int, Field(ge=-(2**31), lt=2**31)] | bool] = (
        Field(default={}, max_length=100)
    )
    """Further options of sbatch, by long name."""
    environment: dict[VariableName, Line] = Field(default={}, max_length=1000, repr=False)
    """Environment variables of the jobs."""
    container: ContainerSpec | None = None
    """Image that jobs run in; see [container]."""
    pricing: PricingSpec = PricingSpec()
    """See [pricing]."""
    partitions: tuple[PartitionSpec, ...] = Field(default=(), max_length=100)
    """Several kinds of nodes, each planned from its own measurements; see [[partitions]]."""

    @field_validator("setup")
    @classmethod
    def _shell_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for number, line in enumerate(value, 1):
            found = re.match(r"\s*#\s*(SBATCH|PBS|BSUB)", line, re.IGNORECASE)
            if found:
                raise ValueError(
                    f"expected lines for the shell; line {number} begins with {shown(found[0])}; "
                    "sbatch's options go into [sbatch]"
                )
        return value

    @field_validator("srun_args")
    @classmethod
    def _options_only(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in _only_options(value, "--mpi=pmix"):
            option = _OWN_OF_SRUN.get(word[1], word[2:].partition("=")[0])
            if option in _OWN_OF_SRUN.values():
                raise ValueError(_refusal(word, option))
        return value

    @field_validator("sbatch", mode="before")
    @classmethod
    def _without_dashes(cls, value: object) -> object:
        for key in value if isinstance(value, dict) else ():
            if str(key).startswith("-"):
                name = str(key).lstrip("-")
                raise ValueError(f"options are written without dashes: {name}, not {shown(key)}")
        return value

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for key in value:
            # sbatch also accepts abbreviated options
            own = next((option for option in _OWN_OPTIONS if _has_prefix(option, key)), None)
            if own is not None:
                raise ValueError(_refusal(key, own))
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSpec:
        if self.partitions:
            _check_partitions(self)
            return self
        _refuse_two_values(self)
        if self.pricing.basis == "tres" and not self.pricing.tres_weights:
            example = '"CPU=1.0,Mem=0.25G,GRES/gpu=2.0", see `scontrol show partition`'
            raise ValueError(
                'pricing.tres_weights: basis = "tres" needs the billing weights, for example '
                f"{example}"
            )
        if self.device == "cuda" and self.executor == "slurm":
            check_gpus(self)
        if self.executor == "local" and self.container and self.container.runtime == "pyxis":
            raise ValueError(
                'container.runtime: "pyxis" is a plug-in of Slurm; expected "apptainer"'
            )
        minutes, key = min(
            (self.profile_minutes, "profile_minutes"), (self.train_minutes, "train_minutes")
        )
        if self.executor == "slurm" and self.signal_delay_s >= 60 * minutes:
            raise ValueError(
                f"{key}: expected more than signal_delay_s = {self.signal_delay_s} s, got "
                f"{minutes} min; set {key} = {self.signal_delay_s // 60 + 1} or more, or lower "
                "signal_delay_s"
            )
        return self

    def by_name(self) -> dict[str, ClusterSpec]:
        """Return a complete cluster for each partition; without partitions this one, named ""."""
        parts = {table.partition: _part(self, table) for table in self.partitions}
        return parts or {"": self}

    def parts(self) -> tuple[ClusterSpec, ...]:
        """Return the clusters of `by_name`, without the names."""
        return tuple(self.by_name().values())

    def controller(self) -> ClusterSpec:
        """Return the cluster of controller jobs: one core on a node that other jobs may share."""
        parts = self.parts()
        first = parts[0]
        own = next((part for part in parts if part.partition == self.controller_partition), first)
        fields = {
            "device": "cpu",
            "partitions": (),
            "pricing": own.pricing,
            "partition": self.controller_partition or first.partition,
            "memory_gb": self.controller_memory_gb,
            "workers_per_node": 1,
            "cpus_per_worker": 1,
            "gres": None,
            "constraint": None,
            "exclusive": False,
            # controller jobs need Slurm's commands, and nothing else
            "container": None,
            # at most half of controller_minutes
            "signal_delay_s": min(self.signal_delay_s, 30 * self.controller_minutes),
            "account": own.account,
            "qos": own.qos,
            "sbatch": {key: self.sbatch[key] for key in self.sbatch if not _is_for_workers(key)},
            "srun_args": tuple(word for word in self.srun_args if not _is_for_workers(word)),
        }
        return self.model_copy(update=fields)

    def part(self, name: str) -> ClusterSpec:
        """Return one cluster of `by_name`; raise InputError if there is no such partition."""
        parts = self.by_name()
        if name in parts:
            return parts[name]
        remedy = "the cluster has no [[partitions]]"
        if self.partitions:
            remedy = f"expected {' or '.join(parts)}"
        raise InputError(f"no partition {name!r}; {remedy}", key="partitions")

    def part_names(self) -> tuple[str, ...]:
        """Return the names of `by_name`, as they appear in `Candidate.partition`."""
        return tuple(table.partition for table in self.partitions) or ("",)

    @property
    def memory_limit_bytes(self) -> int | None:
        """Bytes for one worker: the GPU's memory, or its share of the node's; None if unknown."""
        if self.device == "cuda":
            return None if self.device_memory_gb is None else int(self.device_memory_gb * GIB)
        if self.memory_gb is None:
            return None
        return int(self.memory_gb * GIB / self.workers_per_node)


def _part(cluster: ClusterSpec, table: PartitionSpec) -> ClusterSpec:
    own = cluster.model_dump(exclude={"partitions", "pricing"}) | table.overrides()
    pricing = cluster.pricing.model_dump() | table.pricing
    return ClusterSpec.model_validate(own | {"pricing": pricing})


def _check_partitions(cluster: ClusterSpec) -> None:
    names = cluster.part_names()
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"partitions: {twice!r} is listed twice; expected each name once")
    currencies = set()
    for table in cluster.partitions:
        try:
            currencies.add(_part(cluster, table).pricing.currency)
        except ValidationError as error:
            raise ValueError(_mistake_in(table.partition, error.errors()[0])) from None
    if len(currencies) > 1:
        raise ValueError(
            "partitions: some are priced in USD and some in SU, which cannot be compared; "
            "expected one currency: pricing.usd_per_unit turns SU into USD"
        )


def _mistake_in(partition: str, item: Mapping[str, Any]) -> str:
    location = list(map(str, item["loc"]))
    message = message_of(item)
    if item["type"] == "extra_forbidden":
        message += valid_keys(ClusterSpec, location)
    return ": ".join(filter(None, ["partitions", partition, ".".join(location), message]))
