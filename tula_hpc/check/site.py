"""Slurm's description of a cluster, as a login node sees it, for `tula_hpc.check`.

For the formats see scontrol(1), sinfo(1) and sacctmgr(1). Fields that a site does not show are None
or empty.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from tula_hpc.errors import LaunchError, RefusedError
from tula_hpc.launch import slurm
from tula_hpc.launch.bounded_command import count_in, no_answer
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm_executor import could_start, partitions_of
from tula_hpc.records import Record

TIMEOUT_S = 20.0
NO_LIMIT = ("", "UNLIMITED", "INFINITE", "NONE", "N/A", "(null)", "Partition_Limit")


class Partition(Record):
    """A partition, as the controller describes it."""

    name: str
    state: str
    # the partition's QOS, whose limits hold for all its jobs
    qos: str = ""
    total_nodes: int = 0
    max_nodes: int | None = None
    max_minutes: int | None = None
    default_memory_mb_per_cpu: int | None = None
    default_memory_mb_per_node: int | None = None


class Nodes(Record):
    """Nodes of a partition that are alike and in the same state."""

    count: int
    cpus: int
    memory_mb: int
    gres: str
    state: str
    features: str

    @property
    def usable(self) -> bool:
        """Tell whether jobs may run on these nodes, now or later."""
        return not re.search("down|drain|fail|inval|maint|unk", self.state.lower())


class Limits(Record):
    """Limits of one QOS, or of one association of the user with an account; None: no limit."""

    name: str
    account: str = ""
    partition: str = ""
    qos: tuple[str, ...] = ()
    max_minutes: int | None = None
    max_nodes: int | None = None


class Answer(Record):
    """Answer of `sbatch --test-only` to a job like that of a sweep."""

    job: str
    minutes: int
    nodes: int
    # None: Slurm did not say
    accepted: bool | None
    text: str


class Site(Record):
    """All that Slurm says about the place where a cluster's jobs are to run."""

    user: str
    partitions: tuple[str, ...] = ()
    partition: Partition | None = None
    nodes: tuple[Nodes, ...] = ()
    enforces_accounts: bool = False
    # the user's associations with accounts
    associations: tuple[Limits, ...] = ()
    qos: tuple[Limits, ...] = ()
    answers: tuple[Answer, ...] = ()


def ask_site(launcher: Launcher, nodes: int) -> Site:
    """Ask Slurm about a cluster, or one of its partitions; submit nothing.

    Raises:
        LaunchError: There is no Slurm here, or it does not answer.
    """
    config = ask_config()
    wanted = partitions_of(launcher.cluster)
    partitions = ask_partitions(wanted)
    chosen = next((each for each in partitions if _is_chosen(each, wanted)), None)
    return Site(
        user=getpass.getuser(),
        partitions=tuple(each["PartitionName"] for each in partitions),
        partition=partition_of(chosen, config) if chosen else None,
        nodes=nodes_of(chosen["PartitionName"]) if chosen else (),
        enforces_accounts=enforces_accounts(config),
        associations=associations(config),
        qos=all_qos(),
        answers=_answers(launcher, nodes),
    )


def ask_config() -> dict[str, str]:
    """Ask for Slurm's configuration."""
    shown = ask("scontrol", "show", "config")
    config = dict(re.findall(r"^(\w+) *= (\S*)", shown, re.MULTILINE))
    if not config:
        raise no_answer("scontrol show config", shown)
    return config


def ask_partitions(wanted: Collection[str] = ()) -> list[dict[str, str]]:
    """Ask for the fields of every partition that is shown, and of those `wanted`, if hidden."""
    partitions, shown = _shown_partitions()
    hidden = set(wanted) - {each["PartitionName"] for each in partitions}
    if hidden:
        every, _ = _shown_partitions("--all")
        partitions += [each for each in every if each["PartitionName"] in hidden]
    if not partitions:
        raise no_answer("scontrol show partition", shown)
    return partitions


def enforces_accounts(config: dict[str, str]) -> bool:
    """Tell whether a job needs an account that accounting knows."""
    enforced = config.get("AccountingStorageEnforce", "none").split(",")
    return bool({"associations", "limits", "qos", "safe", "all"} & set(enforced))


def _shown_partitions(*options: str) -> tuple[list[dict[str, str]], str]:
    shown = ask("scontrol", "show", "partition", *options, "--oneliner")
    lines = (line for line in shown.splitlines() if line.startswith("PartitionName="))
    return list(map(slurm.fields_of, lines)), shown


def _is_chosen(partition: dict[str, str], wanted: Collection[str]) -> bool:
    if wanted:
        return partition["PartitionName"] in wanted
    return partition.get("Default") == "YES"


def ask(*command: str) -> str:
    """Return the output of one of Slurm's commands, which may take `TIMEOUT_S`.

    Raises:
        LaunchError: The command gave no answer.
    """
    return slurm.run_command(command, TIMEOUT_S)


def partition_of(fields: dict[str, str], config: dict[str, str]) -> Partition:
    """Read a partition's fields; what a partition does not set is as in the configuration."""
    own = {key: value for key, value in fields.items() if value not in NO_LIMIT}
    # a partition's default for a node replaces the cluster's for a core, and the other way round
    memory = own if own.keys() & {"DefMemPerCPU", "DefMemPerNode"} else config
    return Partition(
        name=fields["PartitionName"],
        state=fields.get("State", ""),
        qos="" if fields.get("QoS", "") in NO_LIMIT else fields["QoS"],
        total_nodes=count_in(fields.get("TotalNodes", "")) or 0,
        max_nodes=count_in(fields.get("MaxNodes", "")),
        max_minutes=minutes_of(fields.get("MaxTime", "")),
        default_memory_mb_per_cpu=count_in(memory.get("DefMemPerCPU", "")),
        default_memory_mb_per_node=count_in(memory.get("DefMemPerNode", "")),
    )


def minutes_of(text: str) -> int | None:
    """Return the minutes of a time limit: 30, 1:30, 2:00:00 or 1-12:00:00; None for no limit."""
    number = "([0-9]{1,9})"
    found = re.fullmatch(f"(?:{number}-)?{number}(?::{number})?(?::{number})?", text)
    if found is None:
        return None
    days, first, second, _ = (int(each or 0) for each in found.groups())
    if found[1]:
        # days-hours[:minutes[:seconds]]
        return (days * 24 + first) * 60 + second
    return first * 60 + second if found[4] else first


def nodes_of(partition: str) -> tuple[Nodes, ...]:
    """Ask for a partition's nodes, in groups of nodes that are alike."""
    text = ask("sinfo", "-h", "-e", "-p", partition, "-o", "%D|%c|%m|%G|%T|%f|%N")
    rows = [row for line in text.splitlines() if len(row := line.split("|")) == 7]
    # the first of the nodes in a list such as gpu[01-20,25],fat1
    names = [re.sub(r"\[([^],-]+)[^]]*\]", r"\1", row[6]).partition(",")[0] for row in rows]
    kept = _kept_from_jobs(names)
    found = []
    for row, name in zip(rows, names, strict=True):
        cpus, memory_mb = kept.get(name, (0, 0))
        if (count := count_in(row[0])) is not None:
            group = Nodes(
                count=count,
                cpus=_leading_number(row[1]) - cpus,
                memory_mb=_leading_number(row[2]) - memory_mb,
                gres=row[3],
                state=row[4],
                features=row[5],
            )
            found.append(group)
    return tuple(found)


def _kept_from_jobs(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the CPUs and MiB of each node that are the system's (CoreSpecCount, MemSpecLimit)."""
    wanted = ",".join(name for name in names if re.fullmatch(r"\w[\w.-]*", name))
    try:
        shown = ask("scontrol", "show", "node", "--oneliner", wanted) if wanted else ""
    except LaunchError:
        return {}
    found = {}
    for line in shown.splitlines():
        fields = slurm.fields_of(line)
        total = _leading_number(fields.get("CPUTot", ""))
        effective = _leading_number(fields.get("CPUEfctv", "")) or total
        memory_mb = _leading_number(fields.get("MemSpecLimit", ""))
        found[fields.get("NodeName", "")] = (total - effective, memory_mb)
    return found


def _leading_number(text: str) -> int:
    """Read a number to which sinfo appends + if nodes differ."""
    found = re.match(r"[0-9]{1,15}", text)
    return int(found[0]) if found else 0


def all_qos() -> tuple[Limits, ...]:
    """Ask accounting for every QOS; return none if there is no accounting."""
    rows = _accounting("show", "qos", "format=Name,MaxWall,MaxTRES")
    return tuple(
        Limits(name=name, max_minutes=minutes_of(wall), max_nodes=_nodes_in(tres))
        for name, wall, tres in (row for row in rows if len(row) == 3)
    )


def associations(config: dict[str, str]) -> tuple[Limits, ...]:
    """Ask accounting for this user's accounts; return none if there is no accounting."""
    whose = [f"user={getpass.getuser()}"]
    # sacctmgr lists the accounts on all clusters of the site
    if cluster := config.get("ClusterName"):
        whose.append(f"clusters={cluster}")
    rows = _accounting("show", "assoc", *whose, "format=Account,Partition,QOS,MaxWall,MaxTRES")
    return tuple(
        Limits(
            name=account,
            account=account,
            partition=partition,
            qos=tuple(filter(None, qos.split(","))),
            max_minutes=minutes_of(wall),
            max_nodes=_nodes_in(tres),
        )
        for account, partition, qos, wall, tres in (row for row in rows if len(row) == 5)
    )


def default_account(config: dict[str, str]) -> str:
    """Ask accounting for the account of jobs that name none; "" if that is not known."""
    where = [getpass.getuser(), "withassoc", f"clusters={config.get('ClusterName', '')}"]
    rows = _accounting("show", "user", *where, "format=DefaultAccount")
    return rows[0][0] if rows else ""


def _nodes_in(tres: str) -> int | None:
    return next((count_in(item[5:]) for item in tres.split(",") if item.startswith("node=")), None)


def _accounting(*words: str) -> Sequence[Sequence[str]]:
    try:
        text = ask("sacctmgr", "-n", "-P", *words)
    except LaunchError:
        return []
    return [line.split("|") for line in text.splitlines()]


def _answers(launcher: Launcher, nodes: int) -> tuple[Answer, ...]:
    cluster = launcher.cluster
    jobs = {"profile": cluster.profile_minutes, "train": cluster.train_minutes}
    return tuple(_answer(launcher, job, minutes, nodes) for job, minutes in jobs.items())


def _answer(launcher: Launcher, job: str, minutes: int, nodes: int) -> Answer:
    accepted: bool | None = True
    try:
        text = could_start(launcher.script(stage=job, nodes=nodes, minutes=minutes, tasks=1))
        # sbatch says "Job 12 to start at TIME using …", but there is no such job
        text = re.sub(r"^Job \d+ to start at (\S+).*", r"could start at \1", text)
    except RefusedError as error:
        accepted, text = False, str(error)
    except LaunchError as error:
        accepted, text = None, str(error)
    return Answer(job=job, minutes=minutes, nodes=nodes, accepted=accepted, text=text)


def readable_here(folder: Path) -> bool:
    """Tell whether this machine sees a data folder and may list it."""
    try:
        next(folder.iterdir(), None)
    except OSError:
        return False
    return True
