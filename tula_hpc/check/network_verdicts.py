"""Verdicts of `tula_hpc.check` on the network between workers: interfaces and all-reduces."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from tula_hpc.check.reports import (
    AllReduce,
    Collectives,
    Interface,
    RankReport,
    Scope,
    Skip,
    hosts_of,
    hosts_where,
    named,
    workers_by_host,
)
from tula_hpc.check.site_verdicts import Topic, Verdict, failed, ok, warning
from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import format_number

GB = 1e9
# A ring over sockets reaches most of its link's rate; below a third it uses another link or shares
# this one.
LEAST_LINK_SHARE = 1 / 3
SKIPPED = {
    Skip.NO_DEVICE: ("a worker has no device", "see devices"),
    Skip.MISSING_INTERFACE: ("its interface is missing", "see interfaces"),
    Skip.SHARED_DEVICE: ("two workers have the same device", "see devices"),
    Skip.NOT_MET: ("the workers did not meet", "see workers"),
}
SCOPES = {Scope.ALL: "all workers", Scope.NODE: "within a node", Scope.BETWEEN: "between nodes"}


def judge_interfaces(cluster: ClusterSpec, reports: Sequence[RankReport]) -> Iterator[Verdict]:
    """Judge the interfaces that connect the workers."""
    known = hosts_of(reports)
    backend = "nccl" if cluster.device == "cuda" else "gloo"
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    wanted = known[0][1].wanted_interface
    lacking = hosts_where(known, lambda host: host.lacks_interface(backend))
    if lacking:
        example = next(host for report, host in known if report.hostname == lacking[0])
        unset = example.model_copy(update={"wanted_interface": ""})
        there = ", ".join(map(_rate, unset.up_interfaces("gloo"))) or "none that is up"
        found = f"{variable}={wanted}, but {named(lacking)} has no interface of that name"
        yield failed(
            Topic.INTERFACES, found, f"set it in [environment] to one of: {there}", lacking
        )
        return
    chosen = {each.name: each for _, host in known for each in host.chosen_interfaces(backend)}
    down = hosts_where(known, lambda host: not host.up_interfaces(backend))
    if wanted and down:
        found = f"{variable}={wanted}, which is down on {named(down)}"
        yield failed(
            Topic.INTERFACES, found, "use one that is up, or report the nodes to the site", down
        )
        return
    up = [each for each in chosen.values() if each.up]
    shown = ", ".join(map(_rate, up)) or "none"
    ports = {each.name: each for _, host in known for each in host.interfaces if each.infiniband}
    if ports:
        shown += "; InfiniBand: " + ", ".join(map(_rate, ports.values()))
    if not wanted and len(up) > 1 and len(workers_by_host(reports)) > 1:
        found = f"{variable} is not set, and there are {shown}"
        remedy = f"set {variable} in [environment] to the one that connects the nodes"
        yield warning(Topic.INTERFACES, found, remedy)
        return
    yield ok(Topic.INTERFACES, f"{variable}={wanted}: {shown}" if wanted else shown)


def _rate(interface: Interface) -> str:
    if interface.mbit is None:
        return interface.name
    return f"{interface.name} ({format_number(interface.mbit / 1000)} Gbit/s)"


def judge_network(reports: Sequence[RankReport], networks: Sequence[str]) -> Iterator[Verdict]:
    """Judge the networks that NCCL names in its log: "IB" is InfiniBand, "Socket" is TCP."""
    if not networks:
        return
    shown = f"NCCL uses {', '.join(networks)}"
    if "Socket" in networks and _has_infiniband(reports):
        remedy = (
            "see NCCL_IB_HCA and NCCL_IB_DISABLE, and whether the container shows /dev/infiniband"
        )
        yield warning(Topic.INTERFACES, f"{shown}, although there is InfiniBand", remedy)
        return
    yield ok(Topic.INTERFACES, shown)


def _has_infiniband(reports: Sequence[RankReport]) -> bool:
    """Tell whether a port of InfiniBand is up on any node."""
    ports = itertools.chain.from_iterable(host.interfaces for _, host in hosts_of(reports))
    return any(each.infiniband and each.up for each in ports)


def judge_collectives(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    """Judge the rates of all-reduces by the rate that the link should have."""
    known = [report.collectives for report in reports if report.collectives]
    if not known or known[0].skipped is Skip.SINGLE_WORKER:
        return
    skipped = next((each.skipped for each in known if each.skipped), None)
    if skipped is not None:
        why, remedy = SKIPPED[skipped]
        yield failed(Topic.ALL_REDUCE, f"not tried: {why}", remedy)
        return
    rates = _bus_rates(known)
    shown = ", ".join(f"{SCOPES[scope]} {format_number(rate, 3)}" for scope, rate in rates.items())
    found = f"{shown} GB/s of 25 MiB over {known[0].backend}"
    link_gbs = _link_gbs(reports, known[0].backend)
    crossing = rates.get(Scope.BETWEEN, rates[Scope.ALL])
    if link_gbs is not None and crossing < LEAST_LINK_SHARE * link_gbs:
        share = f"{100 * crossing / link_gbs:.0f} % of the {format_number(link_gbs, 3)}"
        found = f"{found}, {share} that the link should carry"
        remedy = "see interfaces; look for a slow or shared link, and for too few cores"
        yield warning(Topic.ALL_REDUCE, found, remedy)
        return
    yield ok(Topic.ALL_REDUCE, found)


def _bus_rates(known: Sequence[Collectives]) -> dict[Scope, float]:
    """Return the rate at which each scope's slowest group uses its links, GB/s.

    A ring moves 2 (n - 1)/n of the payload over each link (Patarasuk, Yuan 2009); nccl-tests'
    "busbw" counts in the same way.
    """
    rates: dict[Scope, list[float]] = defaultdict(list)
    for each in known:
        for timed in each.timed:
            rates[timed.scope].append(bus_rate(timed) / GB)
    return {scope: min(values) for scope, values in rates.items()}


def bus_rate(timed: AllReduce) -> float:
    """Return the bytes per second that each link of a ring carries in the median all-reduce."""
    moved = 2 * (timed.workers - 1) / timed.workers * timed.payload_bytes
    return moved / statistics.median(timed.times_s)


def _link_gbs(reports: Sequence[RankReport], backend: str) -> float | None:
    """Return the rate of the interface between nodes, GB/s; None if it is not known."""
    if len(workers_by_host(reports)) < 2:
        return None
    # NCCL prefers InfiniBand, but which of several ports it uses is not known
    if backend == "nccl" and _has_infiniband(reports):
        return None
    rates = []
    for _, host in hosts_of(reports):
        up = host.up_interfaces(backend)
        if len(up) != 1 or up[0].mbit is None:
            return None
        rates.append(up[0].mbit)
    return min(rates) / 8000
