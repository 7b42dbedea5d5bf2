"""Survey a cluster's partitions: what this user may use, and which one suits a training best."""

from __future__ import annotations

import contextlib
import getpass
import grp
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tula_hpc.check.site import (
    Limits,
    Nodes,
    Partition,
    all_qos,
    ask_config,
    ask_partitions,
    associations,
    default_account,
    enforces_accounts,
    nodes_of,
    partition_of,
)
from tula_hpc.config.gpus import requested_gres
from tula_hpc.env import users_default

EVERYBODY = ("", "ALL", "(null)")


class Place(NamedTuple):
    """One partition, the most frequent kind of node in it, and this user's limits there."""

    partition: Partition
    is_default: bool
    # the largest group of usable nodes that are alike; None: no node can be used
    nodes: Nodes | None
    # number of further kinds of usable nodes
    others: int
    # GPUs of a node, and their type; "" if it has none or several types, or Slurm does not say
    gpus: int
    gpu_type: str
    # account and QOS to submit with; "": none is needed, or it is not known
    account: str
    qos: str
    # the strictest of the limits of partition, QOS and account; None: no limit
    most_nodes: int | None
    most_minutes: int | None
    billing_weights: str
    # why the user cannot use the partition; "": it can be used
    refused: str


class Survey(NamedTuple):
    """Slurm's answers about the cluster and this user."""

    cluster_name: str
    places: tuple[Place, ...]
    needs_account: bool
    # account that jobs are submitted with where it may be used: the user's choice, or the default
    preferred_account: str
    requeues: bool
    # whether a job is billed for the largest of its weighted TRES
    max_tres: bool

    def best(self) -> Place | None:
        """Return the partition to begin with: one with GPUs, then most nodes, then the default."""
        usable = [place for place in self.places if not place.refused]
        return max(usable, key=_merit, default=None)


def _merit(place: Place) -> tuple[int, int, bool, int]:
    minutes = place.most_minutes
    nodes = place.most_nodes or 0
    return min(place.gpus, 1), nodes, place.is_default, 10**9 if minutes is None else minutes


def survey_cluster(wanted: str | None = None) -> Survey:
    """Ask Slurm about every partition that is shown, and a `wanted` one; submit nothing.

    Raises:
        LaunchError: There is no Slurm here, or it does not answer.
    """
    config = ask_config()
    preferred = users_default("account") or default_account(config)
    of_user = sorted(associations(config), key=lambda each: each.account != preferred)
    all_limits = {each.name: each for each in all_qos()}
    needs_account = enforces_accounts(config)
    places = [
        _place(fields, config, of_user, all_limits, needs_account=needs_account)
        for fields in ask_partitions([wanted] if wanted else [])
    ]
    return Survey(
        cluster_name=config.get("ClusterName", "cluster"),
        places=tuple(places),
        needs_account=needs_account,
        preferred_account=preferred,
        requeues=config.get("JobRequeue", "1") != "0",
        max_tres="MAX_TRES" in config.get("PriorityFlags", "").split(","),
    )


def _place(
    fields: dict[str, str],
    config: dict[str, str],
    of_user: Sequence[Limits],
    all_limits: dict[str, Limits],
    *,
    needs_account: bool,
) -> Place:
    partition = partition_of(fields, config)
    kinds = _kinds_of([group for group in nodes_of(partition.name) if group.usable])
    nodes = kinds[-1] if kinds else None
    gpus = 0.0
    gpu_types = set()
    for name, kind, count in requested_gres(nodes.gres if nodes else ""):
        if name == "gpu":
            gpus += count
            gpu_types.add(kind)
    accounts = [each for each in of_user if each.partition in ("", partition.name)]
    allowed = _allowed(fields, accounts)
    named = users_default("account")
    account = allowed[0] if allowed else None
    # limits and QOS of another account would not be those of the jobs
    if account is not None and named not in ("", account.account):
        account = None
    qos = _qos_for(fields, account)
    limits = [all_limits[name] for name in (partition.qos, qos) if name in all_limits]
    limits += [account] if account else []
    return Place(
        partition=partition,
        is_default=fields.get("Default") == "YES",
        nodes=nodes,
        others=max(0, len(kinds) - 1),
        gpus=int(gpus),
        # with several types, a job may get any of them
        gpu_type=gpu_types.pop() if len(gpu_types) == 1 else "",
        account=named or (account.account if account else ""),
        qos=qos,
        most_nodes=_least(
            nodes.count if nodes else 0, partition.max_nodes, *(each.max_nodes for each in limits)
        ),
        most_minutes=_least(partition.max_minutes, *(each.max_minutes for each in limits)),
        billing_weights=fields.get("TRESBillingWeights", "").replace("(null)", ""),
        refused=next(
            _obstacles(fields, partition, nodes, accounts, allowed, needs_account=needs_account), ""
        ),
    )


def _kinds_of(groups: Iterable[Nodes]) -> list[Nodes]:
    """Join the groups of nodes that are alike; the most frequent kind comes last."""
    kinds: dict[tuple[str, int, int], Nodes] = {}
    for group in groups:
        kind = (group.gres, group.cpus, group.memory_mb)
        known = kinds.get(kind, group.model_copy(update={"count": 0}))
        kinds[kind] = known.model_copy(update={"count": known.count + group.count})
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: (kinds[kind].count, kind))]


def _allowed(fields: dict[str, str], accounts: Sequence[Limits]) -> list[Limits]:
    """Return the accounts with which a partition may be used, by their names and their QOS."""
    only = fields.get("AllowAccounts", "")
    denied = fields.get("DenyAccounts", "").split(",")
    any_qos = fields.get("AllowQos", "") in EVERYBODY
    found = []
    for each in accounts:
        is_listed = only in EVERYBODY or each.account in only.split(",")
        # accounting may list no QOS
        has_qos = any_qos or not each.qos or _qos_for(fields, each) != ""
        if is_listed and has_qos and each.account not in denied:
            found.append(each)
    return found


def _qos_for(fields: dict[str, str], account: Limits | None) -> str:
    """Return the QOS that a job has to name: the user's first that is allowed here, or ""."""
    only = fields.get("AllowQos", "")
    if only in EVERYBODY or account is None:
        return ""
    return next((name for name in account.qos if name in only.split(",")), "")


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _obstacles(
    fields: dict[str, str],
    partition: Partition,
    nodes: Nodes | None,
    accounts: Sequence[Limits],
    allowed: Sequence[Limits],
    *,
    needs_account: bool,
) -> Iterator[str]:
    """Yield the reasons why the user cannot use a partition, the main one first."""
    if partition.state not in ("UP", ""):
        yield f"its state is {partition.state}"
    if nodes is None:
        yield "its nodes are down or drained (sinfo -R says why), or kept for others"
    if fields.get("RootOnly") == "YES" and os.getuid() != 0:
        yield "only root may submit to it"
    if fields.get("ReqResv") == "YES":
        yield "its jobs need a reservation"
    groups = fields.get("AllowGroups", "")
    if groups not in EVERYBODY and not _groups() & set(groups.split(",")):
        yield f"it is for the groups {groups}"
    if needs_account and not accounts:
        yield f"{getpass.getuser()} has no account there"
    if accounts and not allowed:
        keys = {"accounts": "AllowAccounts", "QOS": "AllowQos"}
        only = {noun: fields.get(key, "") for noun, key in keys.items()}
        named = [f"{noun} {names}" for noun, names in only.items() if names not in EVERYBODY]
        yield f"it is for the {' and the '.join(named)}" if named else "it is not for your accounts"


def _groups() -> set[str]:
    names = set()
    for number in {os.getgid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(number).gr_name)
    return names
