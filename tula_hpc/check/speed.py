"""Time a worker's device, and all-reduces among workers, for `tula_hpc.check`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tula_hpc.check.reports import (
    AllReduce,
    Collectives,
    Compute,
    RankReport,
    Scope,
    Skip,
    Transfer,
)
from tula_hpc.config import ClusterSpec
from tula_hpc.ddp.process_group import backend_of, pick_device, process_group
from tula_hpc.env import WorkerEnvironment

if TYPE_CHECKING:
    from tula_hpc.check.job import CheckJob
    from tula_hpc.check.probes import Peers

# time limit of a probe: even if two probes reach it, all end within the job's three minutes
PROBE_S = 40
COMPUTE_S = 2.0
LEAST_REPEATS, MOST_REPEATS = 5, 100
# edge of the matrices, large enough that a product takes milliseconds on either device
MATRIX_EDGE = {"cpu": 512, "cuda": 4096}
TRANSFER_BYTES = 64 * 2**20
# size of DistributedDataParallel's default bucket
BUCKET_BYTES = 25 * 2**20
ALL_REDUCE_S = 2.0


def time_compute(cluster: ClusterSpec, place: WorkerEnvironment) -> Compute:
    """Time products of square matrices in fp32."""
    device = pick_device(cluster, place.local_rank)
    edge = MATRIX_EDGE[device.type]
    left, right = torch.rand(2, edge, edge, device=device)

    def multiply() -> None:
        torch.mm(left, right)
        _synchronize(device)

    return Compute(flops=2.0 * edge**3, times_s=_repeat(multiply))


def time_transfer(cluster: ClusterSpec, place: WorkerEnvironment) -> Transfer:
    """Time copies to the device from pinned memory, as batches are copied."""
    device = pick_device(cluster, place.local_rank)
    source = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        _synchronize(device)

    return Transfer(payload_bytes=TRANSFER_BYTES, times_s=_repeat(copy))


def time_collectives(
    job: CheckJob, place: WorkerEnvironment, report: RankReport, peers: Peers
) -> Collectives:
    """Time all-reduces among all workers and, if nodes have several, within and between nodes."""
    backend = backend_of(job.cluster)
    skipped = why_skipped(backend, place, report, peers)
    if skipped is not None:
        return Collectives(backend=backend, skipped=skipped)
    assert peers.store is not None, "they have met"  # noqa: S101 # an invariant
    device = pick_device(job.cluster, place.local_rank)
    # an alarm does not interrupt a collective that hangs: torch has to give it up
    most = timedelta(seconds=PROBE_S)
    with process_group(job.cluster, place, PrefixStore("group", peers.store), most):
        every = time_all_reduce(Scope.ALL, device, None, place.world_size)
        nested = _time_by_node(job, place, device, peers)
    return Collectives(backend=backend, timed=(every, *nested))


def why_skipped(
    backend: str, place: WorkerEnvironment, report: RankReport, peers: Peers
) -> Skip | None:
    """Return why a collective would fail, or None; all workers agree before any waits in it."""
    if place.world_size == 1:
        return Skip.SINGLE_WORKER
    lacks = report.host is not None and report.host.lacks_interface(backend)
    device = None
    if report.device is not None:
        # on CPUs every worker counts as a device of its own
        device = f"{report.hostname} {report.device.uuid or place.rank}"
    found = map(json.loads, peers.exchange(json.dumps([lacks, device])))
    lacking, devices = zip(*found, strict=True)
    if peers.store is None:
        return Skip.NOT_MET
    if any(lacking):
        return Skip.MISSING_INTERFACE
    if None in devices:
        return Skip.NO_DEVICE
    return Skip.SHARED_DEVICE if len(set(devices)) < len(devices) else None


def _time_by_node(
    job: CheckJob, place: WorkerEnvironment, device: torch.device, peers: Peers
) -> Sequence[AllReduce]:
    nodes, each = job.nodes, place.world_size // job.nodes
    if nodes == 1 or each == 1:
        return []
    # every worker has to make every group, in the same order
    within = [dist.new_group(range(node * each, (node + 1) * each)) for node in range(nodes)]
    leaders = dist.new_group(range(0, place.world_size, each))
    node, local_rank = divmod(place.rank, each)
    timed = [time_all_reduce(Scope.NODE, device, within[node], each)]
    peers.wait()
    if local_rank == 0:
        timed.append(time_all_reduce(Scope.BETWEEN, device, leaders, nodes))
    peers.wait()
    return timed


def time_all_reduce(
    scope: Scope, device: torch.device, group: dist.ProcessGroup | None, workers: int
) -> AllReduce:
    """Time all-reduces of one bucket; all workers of the group do the same number of them."""
    bucket = torch.zeros(BUCKET_BYTES // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(bucket, group=group)
        _synchronize(device)

    # not timed: the first all-reduce makes the connections
    reduce()
    slowest = torch.tensor([_timed(reduce)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    count = min(MOST_REPEATS, max(LEAST_REPEATS, int(ALL_REDUCE_S / max(slowest.item(), 1e-6))))
    times = tuple(_timed(reduce) for _ in range(count))
    return AllReduce(scope=scope, workers=workers, payload_bytes=BUCKET_BYTES, times_s=times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _repeat(act: Callable[[], None]) -> tuple[float, ...]:
    """Time an action repeatedly; the first call, which loads libraries, does not count."""
    act()
    times: list[float] = []
    ends = time.perf_counter() + COMPUTE_S
    while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and time.perf_counter() < ends):
        times.append(_timed(act))
    return tuple(times)


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
