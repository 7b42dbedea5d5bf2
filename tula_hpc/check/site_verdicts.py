"""Type of all verdicts of `tula_hpc.check`, and the verdicts on Slurm's answers (see `site`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from tula_hpc.check.site import Limits, Nodes, Site
from tula_hpc.config import ClusterSpec, hidden_peers
from tula_hpc.config.gpus import NO_GRES
from tula_hpc.containers import Folders, describe
from tula_hpc.formatting import command_line, format_bytes, plural
from tula_hpc.launch.slurm_executor import option_of, origin_of, partitions_of
from tula_hpc.records import Record

# share of a node's memory below which an exclusive job is warned of: nobody can use the rest
LEAST_MEMORY_SHARE = 0.5


class Level(StrEnum):
    """Severity of a verdict."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Topic(StrEnum):
    """Subject of a verdict; the members are in the order of the table."""

    SLURM = "slurm"
    PARTITION = "partition"
    ACCOUNT = "account"
    QOS = "qos"
    TIME_LIMITS = "time limits"
    NODES = "nodes"
    HOST_MEMORY = "host memory"
    SBATCH = "sbatch"
    CONTAINER = "container"
    DATA_HERE = "data folder here"
    JOB = "job"
    SETUP = "setup"
    WORKERS = "workers"
    DEVICES = "devices"
    KERNELS = "kernels"
    DEVICE_MEMORY = "device memory"
    VERSIONS = "versions"
    CORES = "cores"
    LIMITS = "limits"
    SHM = "shared memory"
    INTERFACES = "interfaces"
    COMPUTE = "compute"
    TRANSFER = "host to device"
    ALL_REDUCE = "all-reduce"
    DATA_THERE = "data folder"
    LOADER = "loader"
    SIGNAL = "signal"
    REQUEUE = "requeue"


class Verdict(Record):
    """One line of the table."""

    topic: Topic
    level: Level
    found: str
    # advice; "" if all is well
    remedy: str = ""
    # the hosts that the verdict concerns; empty: all
    hosts: tuple[str, ...] = ()


def ok(topic: Topic, found: str) -> Verdict:
    """Return a verdict that all is well."""
    return Verdict(topic=topic, level=Level.OK, found=found)


def warning(topic: Topic, found: str, remedy: str, hosts: Iterable[str] = ()) -> Verdict:
    """Return a verdict on something that costs time or may fail later."""
    return Verdict(topic=topic, level=Level.WARNING, found=found, remedy=remedy, hosts=_once(hosts))


def failed(topic: Topic, found: str, remedy: str, hosts: Iterable[str] = ()) -> Verdict:
    """Return a verdict on something that jobs will not survive."""
    return Verdict(topic=topic, level=Level.FAILED, found=found, remedy=remedy, hosts=_once(hosts))


def _once(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(hosts)))


def judge_container(cluster: ClusterSpec, folders: Folders, run: Path) -> list[Verdict]:
    """Say in which container jobs run; warn if its image is a file that is missing here."""
    container = cluster.container
    if container is None:
        return []
    if container.image.startswith(("/", ".")) and not Path(container.image).exists():
        remedy = "put the image where all nodes see it, or correct container.image"
        return [warning(Topic.CONTAINER, f"{container.image} is not on this machine", remedy)]
    return [ok(Topic.CONTAINER, describe(cluster, folders, run))]


def judge_site(cluster: ClusterSpec, site: Site) -> list[Verdict]:
    """Judge what Slurm says about the place where jobs are to run."""
    if site.partition is None:
        wanted = ",".join(partitions_of(cluster))
        there = ", ".join(site.partitions) or "none that you may see"
        lacking = "no partition is the default"
        if wanted:
            lacking = f"there is no partition {wanted}{origin_of(cluster, 'partition')}"
        return [failed(Topic.PARTITION, lacking, f"set partition to one of: {there}")]
    return [
        _judge_partition(cluster, site),
        *_judge_account(cluster, site),
        *_judge_qos(cluster, site),
        *_judge_time_limits(cluster, site),
        _judge_nodes(cluster, site),
        *_judge_host_memory(cluster, site),
        *_judge_hidden_peers(cluster),
        *_judge_answers(site),
    ]


def _judge_partition(cluster: ClusterSpec, site: Site) -> Verdict:
    partition = site.partition
    assert partition is not None  # noqa: S101 # an invariant of judge_site
    name = f"{partition.name}{origin_of(cluster, 'partition')}"
    if partition.state != "UP":
        found = f"{name} is {partition.state}"
        return failed(
            Topic.PARTITION, found, "use another partition, or ask the site when it opens"
        )
    return ok(Topic.PARTITION, f"{name} is up, with {plural(partition.total_nodes, 'node')}")


def _judge_account(cluster: ClusterSpec, site: Site) -> Iterator[Verdict]:
    known = sorted({each.account for each in site.associations})
    account = option_of(cluster, "account")
    if not account:
        if known and not site.enforces_accounts:
            return
        if known:
            yield ok(Topic.ACCOUNT, f"none is set; yours: {', '.join(known)}")
        return
    shown = f"{account}{origin_of(cluster, 'account')}"
    if not known:
        yield ok(Topic.ACCOUNT, f"{shown}; not checked, as accounting lists no account of yours")
    elif account in known:
        yield ok(Topic.ACCOUNT, f"{shown} is one of {site.user}'s")
    else:
        # a site's plugin may turn a project's name into that of an account
        is_taken = any(answer.accepted for answer in site.answers)
        make = failed if site.enforces_accounts and not is_taken else warning
        found = f"accounting has no user {site.user} in account {shown}"
        yield make(Topic.ACCOUNT, found, f"set account to one of: {', '.join(known)}")


def _judge_qos(cluster: ClusterSpec, site: Site) -> Iterator[Verdict]:
    qos = option_of(cluster, "qos")
    if not qos or not site.qos:
        return
    names = [each.name for each in site.qos]
    shown = f"{qos}{origin_of(cluster, 'qos')}"
    if qos not in names:
        found = f"there is no QOS {shown}"
        yield failed(Topic.QOS, found, f"set qos to one of: {', '.join(names)}")
        return
    allowed = sorted({name for each in _own_associations(cluster, site) for name in each.qos})
    if allowed and qos not in allowed:
        make = failed if site.enforces_accounts else warning
        found = f"{site.user}'s account may not use {shown}"
        yield make(Topic.QOS, found, f"set qos to one of: {', '.join(allowed)}")
        return
    yield ok(Topic.QOS, f"{shown} may be used")


def _own_associations(cluster: ClusterSpec, site: Site) -> list[Limits]:
    account = option_of(cluster, "account")
    partitions = ["", *partitions_of(cluster)]
    return [
        each
        for each in site.associations
        if account in ("", each.account) and each.partition in partitions
    ]


def _limits_in_force(cluster: ClusterSpec, site: Site) -> list[tuple[str, Limits]]:
    """Return each limit, with the name of the partition, QOS or account that sets it."""
    partition = site.partition
    assert partition is not None  # noqa: S101 # an invariant of judge_site
    of_partition = Limits(
        name=partition.name, max_minutes=partition.max_minutes, max_nodes=partition.max_nodes
    )
    limits = [(f"partition {partition.name}", of_partition)]
    names = {option_of(cluster, "qos"), partition.qos}
    limits += [(f"QOS {each.name}", each) for each in site.qos if each.name in names]
    if site.enforces_accounts and option_of(cluster, "account"):
        limits += [(f"account {each.account}", each) for each in _own_associations(cluster, site)]
    return limits


def _judge_time_limits(cluster: ClusterSpec, site: Site) -> Iterator[Verdict]:
    limits = _limits_in_force(cluster, site)
    bounded = [(each.max_minutes, name) for name, each in limits if each.max_minutes is not None]
    keys = {"profile_minutes": cluster.profile_minutes, "train_minutes": cluster.train_minutes}
    shown = ", ".join(f"{key} = {minutes}" for key, minutes in keys.items())
    if not bounded:
        yield ok(Topic.TIME_LIMITS, f"{shown}; no limit is known")
        return
    most, name = min(bounded)
    above = {key: minutes for key, minutes in keys.items() if minutes > most}
    for key, minutes in above.items():
        found = f"{key} = {minutes}, but {name} allows {most} minutes"
        yield failed(
            Topic.TIME_LIMITS, found, f"set {key} = {most}; a training goes on in the next job"
        )
    if not above:
        yield ok(Topic.TIME_LIMITS, f"{shown}; {name} allows {most} minutes")


def _judge_nodes(cluster: ClusterSpec, site: Site) -> Verdict:
    fitting = [each for each in site.nodes if each.usable and not _misfits(cluster, each, site)]
    count = sum(each.count for each in fitting)
    if count == 0:
        reasons: set[str] = set()
        for each in site.nodes:
            state = f"{plural(each.count, 'node')} {each.state}"
            reasons.update(_misfits(cluster, each, site) or [state])
        found = "no node fits a job: " + ("; ".join(sorted(reasons)) or "the partition shows none")
        return failed(Topic.NODES, found, "ask for what a node has, or use another partition")
    limits = _limits_in_force(cluster, site)
    fit = f"jobs fit {plural(count, 'node')} of the partition"
    bounds = [(count, fit)]
    bounds += [
        (each.max_nodes, f"{name} allows {plural(each.max_nodes, 'node')} a job")
        for name, each in limits
        if each.max_nodes is not None
    ]
    most, why = min(bounds)
    if most < cluster.max_nodes:
        found = f"max_nodes = {cluster.max_nodes}, but {why}"
        return warning(Topic.NODES, found, f"set max_nodes = {most}, or larger jobs never start")
    idle = sum(each.count for each in fitting if each.state.lower().startswith("idle"))
    return ok(Topic.NODES, f"{fit}, {idle} idle")


def _misfits(cluster: ClusterSpec, nodes: Nodes, site: Site) -> list[str]:
    misfits = []
    cores = cluster.workers_per_node * cluster.cpus_per_worker
    if cores > nodes.cpus:
        product = f"workers_per_node x cpus_per_worker = {cores}"
        misfits.append(f"{product} cores, but nodes have {nodes.cpus}")
    memory_mb = _memory_asked_mb(cluster, site)
    if memory_mb is not None and memory_mb > nodes.memory_mb:
        asked, there = format_bytes(memory_mb * 2**20), format_bytes(nodes.memory_mb * 2**20)
        misfits.append(f"{asked} of memory, but nodes have {there}")
    for item in (cluster.gres or "").split(","):
        name = re.split("[:=]", item.removeprefix("gres:"))[0]
        is_asked = name not in ("", NO_GRES)
        if is_asked and not re.search(rf"(^|,){re.escape(name)}(:|,|$)", nodes.gres):
            misfits.append(f"gres = {cluster.gres}, but nodes have {_named(nodes.gres)}")
    # only a plain feature is checked; sbatch judges constraints with operators
    wanted = cluster.constraint or ""
    if re.fullmatch(r"[\w.-]+", wanted) and wanted not in nodes.features.split(","):
        misfits.append(f"constraint = {wanted}, but nodes have {_named(nodes.features)}")
    return misfits


def _named(words: str) -> str:
    """Return Slurm's list, or "none" for "(null)", Slurm's empty list."""
    return "none" if words == "(null)" else words


def _memory_asked_mb(cluster: ClusterSpec, site: Site) -> int | None:
    """Return the memory per node that a job asks for; None for all, or if [sbatch] sets it."""
    if any(key.startswith("mem") for key in cluster.sbatch):
        return None
    if cluster.memory_gb is not None:
        return round(cluster.memory_gb * 1024)
    partition = site.partition
    assert partition is not None  # noqa: S101 # an invariant of judge_site
    if partition.default_memory_mb_per_cpu:
        cores = cluster.workers_per_node * cluster.cpus_per_worker
        return partition.default_memory_mb_per_cpu * cores
    return partition.default_memory_mb_per_node or None


def _judge_host_memory(cluster: ClusterSpec, site: Site) -> Iterator[Verdict]:
    asked = _memory_asked_mb(cluster, site)
    largest = max((each.memory_mb for each in site.nodes if each.usable), default=0)
    if asked is None or asked > largest:
        return
    shown = f"{format_bytes(asked * 2**20)} of a node's {format_bytes(largest * 2**20)}"
    by_default = cluster.memory_gb is None
    if by_default and cluster.exclusive and asked < LEAST_MEMORY_SHARE * largest:
        found = f"without memory_gb a job has {shown}, by the site's default for its cores"
        yield warning(
            Topic.HOST_MEMORY, found, "set memory_gb, or [sbatch] mem = 0 for the whole node"
        )
        return
    yield ok(Topic.HOST_MEMORY, f"a job has {shown}")


def _judge_hidden_peers(cluster: ClusterSpec) -> Iterator[Verdict]:
    for key, why in hidden_peers(cluster):
        cost, _, remedy = why.partition("; ")
        yield warning(Topic.DEVICES, f"{key}: {cost}", remedy)


def _judge_answers(site: Site) -> Iterator[Verdict]:
    for answer in site.answers:
        job = f"{answer.job} job of {plural(answer.nodes, 'node')} for {answer.minutes} minutes"
        found = f"{job}: {answer.text}"
        if answer.accepted is None:
            yield warning(Topic.SBATCH, found, "run the check again when Slurm answers")
        elif answer.accepted:
            yield ok(Topic.SBATCH, found)
        else:
            remedy = f"fix the cause; {command_line('sweep', '--dry-run')} shows the script"
            yield failed(Topic.SBATCH, found, remedy)


def judge_data_here(folder: Path, readable: bool, needed: bool = True) -> Verdict:
    """Judge the data folder, as seen here; `needed`: a sweep would read it (search.estimate)."""
    if readable:
        return ok(Topic.DATA_HERE, f"{folder} can be read")
    found = f"{folder} cannot be read"
    if not needed:
        return ok(Topic.DATA_HERE, f"{found}, and need not be, with search.estimate = false")
    remedy = "set workload.data_dir to a folder that all nodes see"
    otherwise = "search.estimate = false if only the compute nodes have it"
    return failed(Topic.DATA_HERE, found, f"{remedy}, or {otherwise}")
