"""Verdicts of `tula_hpc.check` on the reports of its workers: pure functions of these records."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from tula_hpc.check.network_verdicts import GB, judge_collectives, judge_interfaces
from tula_hpc.check.reports import (
    Device,
    Host,
    Probe,
    RankReport,
    having,
    hosts_of,
    hosts_where,
    named,
    workers_by_host,
)
from tula_hpc.check.site_verdicts import Topic, Verdict, failed, ok, warning
from tula_hpc.config import GIB, ClusterSpec, WorkloadSpec
from tula_hpc.formatting import format_bytes, format_number, plural

# A worker is slow if it takes this many times the others' time. Equal nodes differ by a few per
# cent, GPUs whose clocks fall as they warm up by about ten.
SLOW = 1.25
# Batches travel from loader processes through /dev/shm: two ready batches per process, each of up
# to 64 MiB, a hundred images of 224² in fp32.
SHM_BYTES_PER_PROCESS = 2 * 64 * 2**20
# a training process has some hundred files and sockets open, and more for batches in transit
LEAST_OPEN_FILES = 1024
# with less memory free, somebody else uses the GPU, too
LEAST_FREE_SHARE = 0.95
# most that this process's own context takes, which is a large share of a small MIG device
CONTEXT_BYTES = 2**30
# PCIe 3 x16 reaches 12 GB/s from pinned memory; a fifth of that means a narrow bus
LEAST_TRANSFER_GBS = 2.5

Known = Sequence[tuple[RankReport, Device]]


def judge_job(
    cluster: ClusterSpec, workload: WorkloadSpec, reports: Sequence[RankReport], expected: int
) -> list[Verdict]:
    """Judge the reports of the job's workers."""
    if not reports:
        return []
    judged = [
        _judge_workers(reports, expected),
        *_judge_setup(reports),
        *_judge_devices(cluster, reports),
        *_judge_cores(cluster, workload, reports),
        *_judge_limits(cluster, reports),
        _judge_shm(workload, reports),
        *judge_interfaces(cluster, reports),
        *_judge_compute(reports),
        *_judge_transfer(reports),
        *judge_collectives(reports),
        *_judge_data(reports),
        *_judge_loader(reports),
        *_judge_signal(reports),
        *_judge_requeue(cluster, reports),
    ]
    order = list(Topic)
    return sorted([*judged, *_judge_errors(reports)], key=lambda each: order.index(each.topic))


TOPIC_OF = {
    Probe.DEVICE: Topic.DEVICES,
    Probe.MEETING: Topic.WORKERS,
    Probe.COMPUTE: Topic.COMPUTE,
    Probe.TRANSFER: Topic.TRANSFER,
    Probe.SIGNAL: Topic.SIGNAL,
    Probe.DATA: Topic.DATA_THERE,
    Probe.LOADER: Topic.LOADER,
    Probe.COLLECTIVES: Topic.ALL_REDUCE,
    Probe.REQUEUE: Topic.REQUEUE,
}
REMEDY_OF = {
    Probe.DEVICE: "see gres and workers_per_node; nvidia-smi in a job on that node shows its GPUs",
    Probe.MEETING: "open ports 10000 to 32767 between nodes, or set MASTER_PORT in [environment]",
    Probe.COMPUTE: "report the node to the site, and avoid it by [sbatch] exclude",
    Probe.TRANSFER: "report the node to the site, and avoid it by [sbatch] exclude",
    Probe.SIGNAL: "ask the site whether jobs may be signalled",
    Probe.DATA: "set workload.data_dir to a folder that all nodes see",
    Probe.LOADER: "see workload.data_dir and loader_workers; slow file systems take long to list",
    Probe.COLLECTIVES: (
        "name the interface that connects the nodes, see interfaces; NCCL_DEBUG=INFO shows more"
    ),
    Probe.REQUEUE: "ask the site whether jobs may be requeued",
}


def _judge_errors(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    """Judge probes that failed or killed their worker; report the same error only once."""
    found: dict[tuple[Probe, str], list[str]] = defaultdict(list)
    for report in reports:
        for probe, text in report.errors.items():
            found[probe, text].append(report.hostname)
        last = report.at_work_on
        if not report.finished and last is not None and last not in report.errors:
            found[last, "the worker crashed or hung in this probe"].append(report.hostname)
    no_device = {text for probe, text in found if probe is Probe.DEVICE}
    everywhere = set(workers_by_host(reports))
    for (probe, text), hosts in found.items():
        # other probes that need the device fail with the same error
        if text in no_device and probe is not Probe.DEVICE:
            continue
        # only a warning: listing a tree of images for the first time takes minutes, and trainings
        # wait that long
        late = probe is Probe.LOADER and text.startswith(TimeoutError.__name__)
        make = warning if late else failed
        remedy = REMEDY_OF[probe]
        if probe is Probe.DEVICE and set(hosts) == everywhere:
            remedy = (
                f'if these nodes have no GPUs, device = "cpu" in the cluster file; else {remedy}'
            )
        yield make(TOPIC_OF[probe], f"{named(hosts)}: {text}", remedy, hosts)


def _judge_workers(reports: Sequence[RankReport], expected: int) -> Verdict:
    hosts = workers_by_host(reports)
    found = f"{len(reports)} of {expected} on {named(hosts)}"
    if len(reports) < expected:
        remedy = "see the job's logs; all nodes must see this folder and the Python environment"
        return failed(Topic.WORKERS, f"reports came from {found}", remedy)
    return ok(Topic.WORKERS, found)


def _judge_setup(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    for _, host in hosts_of(reports):
        if host.failed_setup:
            # one warning is enough: the batch script runs setup once for all workers
            remedy = "correct it there; slurm_templates/README.md has lines for modules and conda"
            yield warning(Topic.SETUP, host.failed_setup, remedy)
            return


def _judge_devices(cluster: ClusterSpec, reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = having(reports, lambda report: report.device)
    if not known:
        yield from _judge_given(reports)
        return
    names = Counter(device.name for _, device in known)
    kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        remedy = "choose nodes of one kind with constraint, or list them as [[partitions]]"
        yield warning(Topic.DEVICES, f"of several kinds: {kinds}", remedy)
    if cluster.device == "cpu":
        if len(names) == 1:
            yield ok(Topic.DEVICES, kinds)
        yield ok(Topic.VERSIONS, f"torch {_versions(known, lambda device: device.torch)}")
        return
    ranks: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for report, device in known:
        ranks[report.hostname, device.uuid].append(report)
    shared = {key: owners for key, owners in ranks.items() if len(owners) > 1}
    for (host, uuid), owners in shared.items():
        yield _same_device(host, uuid, owners)
    if len(names) == 1 and not shared:
        yield ok(Topic.DEVICES, f"{kinds}, each worker with one of its own")
    yield from _judge_kernels(known)
    yield from _judge_device_memory(cluster, known)
    torch = _versions(known, lambda device: device.torch)
    driver = _versions(known, lambda device: device.driver)
    nccl = _versions(known, lambda device: device.nccl)
    yield ok(Topic.VERSIONS, f"torch {torch}, driver {driver}, NCCL {nccl}")


def _versions(known: Known, version: Callable[[Device], str]) -> str:
    found = {version(device) for _, device in known}
    return ", ".join(sorted(found - {""})) or "unknown"


def _judge_given(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    """Judge which GPU each worker has by what Slurm says, if no GPU could be opened."""
    owners: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for report in reports:
        if seen := report.visible_gpus:
            owners[report.hostname, seen[report.local_rank % len(seen)]].append(report)
    for (host, name), sharing in owners.items():
        if len(sharing) > 1:
            yield _same_device(host, name, sharing)


def _same_device(host: str, name: str, owners: Sequence[RankReport]) -> Verdict:
    who = ", ".join(str(report.rank) for report in owners)
    remedy = (
        'ask for a GPU for each worker: gres = "gpu:N" with N = workers_per_node; '
        "if [sbatch] has gpu-bind, remove it"
    )
    return failed(Topic.DEVICES, f"ranks {who} on {host} have the same GPU {name}", remedy, [host])


def _judge_kernels(known: Known) -> Iterator[Verdict]:
    lacking = [(report, device) for report, device in known if not device.has_kernels]
    first = (lacking or list(known))[0][1]
    built_for = " ".join(first.architectures)
    if lacking:
        found = f"torch {first.torch} has none for {first.name} (capability {first.capability})"
        remedy = f"it is built for {built_for}; install a build that has them, see constraints.txt"
        yield failed(Topic.KERNELS, found, remedy, [report.hostname for report, _ in lacking])
        return
    yield ok(
        Topic.KERNELS, f"torch has them for capability {first.capability} (built for {built_for})"
    )


def _judge_device_memory(cluster: ClusterSpec, known: Known) -> Iterator[Verdict]:
    total = min((device.total_bytes for _, device in known if device.total_bytes), default=0)
    used = hosts_where(known, _in_use)
    if used:
        found = f"on {named(used)} some of it is in use before the job begins"
        remedy = (
            "see nvidia-smi there; exclusive = true keeps other jobs off; "
            "left-over processes are for the site to end"
        )
        yield warning(Topic.DEVICE_MEMORY, found, remedy, used)
    typed = cluster.memory_limit_bytes
    if total and typed is not None and typed > total:
        found = (
            f"device_memory_gb = {cluster.device_memory_gb:g}, but a GPU has {format_bytes(total)}"
        )
        # rounded down, as there would be a warning of a larger number, too
        at_most = math.floor(100 * total / GIB) / 100
        yield warning(Topic.DEVICE_MEMORY, found, f"set device_memory_gb = {at_most:.2f}")
    elif total and not used:
        free = min((device.free_bytes for _, device in known if device.free_bytes), default=0)
        at_least = f", at least {format_bytes(free)} of it free" if free else ""
        yield ok(Topic.DEVICE_MEMORY, f"{format_bytes(total)} each{at_least}")


def _in_use(device: Device) -> bool:
    if device.free_bytes is None or not device.total_bytes:
        return False
    usual = max((1.0 - LEAST_FREE_SHARE) * device.total_bytes, CONTEXT_BYTES)
    return device.total_bytes - device.free_bytes > usual


def _judge_cores(
    cluster: ClusterSpec, workload: WorkloadSpec, reports: Sequence[RankReport]
) -> Iterator[Verdict]:
    known = hosts_of(reports)
    wanted = cluster.cpus_per_worker
    fewer = hosts_where(known, lambda host: len(host.cores) < wanted)
    least = min(len(host.cores) for _, host in known)
    usable = f"a worker may use {plural(least, 'core')}; cpus_per_worker = {wanted}"
    if fewer:
        found = f"on {named(fewer)} {usable}"
        remedy = (
            "see srun_args: options that bind tasks must leave each worker cpus_per_worker cores"
        )
        yield failed(Topic.CORES, found, remedy, fewer)
    sharing = [report.hostname for report, host in known if _shares_cores(report, host, known)]
    if sharing:
        found = f"workers on {named(sharing)} are bound to the same cores"
        remedy = "see srun_args: --cpu-bind=cores gives each worker its own"
        yield failed(Topic.CORES, found, remedy, sharing)
    processes = _loader_processes(workload)
    if processes >= wanted and processes > 0 and least == wanted:
        loaders = plural(processes, "loader process")
        found = f"{loaders} and the training process share {plural(wanted, 'core')}"
        remedy = (
            f"cpus_per_worker = {processes + 1} gives each a core of its own, if nodes have that "
            "many; the plan says whether steps wait for the loader"
        )
        yield warning(Topic.CORES, found, remedy)
    elif not fewer and not sharing:
        yield ok(Topic.CORES, usable)


def _shares_cores(report: RankReport, host: Host, known: Sequence[tuple[RankReport, Host]]) -> bool:
    if len(host.cores) == host.node_cores:
        return False
    for other, its_host in known:
        if other.hostname == report.hostname and other.rank != report.rank:
            cores = set(its_host.cores)
            if len(cores) < host.node_cores and cores & set(host.cores):
                return True
    return False


def _judge_limits(cluster: ClusterSpec, reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = hosts_of(reports)
    few = hosts_where(known, lambda host: host.open_files < LEAST_OPEN_FILES)
    least = min(host.open_files for _, host in known)
    if few:
        found = f"on {named(few)} a worker may open only {least} files"
        yield warning(Topic.LIMITS, found, 'setup = ["ulimit -n 65536"]', few)
    with_ports = [pair for pair in known if any(each.infiniband for each in pair[1].interfaces)]
    locked = hosts_where(with_ports, lambda host: host.memlock_bytes is not None)
    if locked and cluster.device == "cuda":
        found = f"on {named(locked)} locked memory is limited, which InfiniBand needs without limit"
        remedy = 'setup = ["ulimit -l unlimited"]; where that is refused, ask the site'
        yield warning(Topic.LIMITS, found, remedy, locked)
    elif not few:
        limits = [h.memlock_bytes for _, h in known if h.memlock_bytes is not None]
        shown = format_bytes(min(limits)) if limits else "unlimited"
        yield ok(Topic.LIMITS, f"{least} open files, locked memory {shown}")


def _loader_processes(workload: WorkloadSpec) -> int:
    """Return a worker's number of loader processes; 0 for a script, whose own are not known."""
    return 0 if workload.is_script else workload.loader_workers


def _judge_shm(workload: WorkloadSpec, reports: Sequence[RankReport]) -> Verdict:
    per_host = workers_by_host(reports)
    tight = []
    for report, host in hosts_of(reports):
        processes = _loader_processes(workload) * per_host[report.hostname]
        if host.shm_free_bytes < processes * SHM_BYTES_PER_PROCESS:
            tight.append(report.hostname)
    least = min(host.shm_free_bytes for _, host in hosts_of(reports))
    free = f"{format_bytes(least)} free in /dev/shm"
    if tight:
        remedy = "lower loader_workers, or have the site enlarge it; containers take --shm-size"
        return warning(Topic.SHM, f"{named(tight)}: {free}", remedy, tight)
    return ok(Topic.SHM, free)


def _judge_compute(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = having(reports, lambda report: report.compute)
    if not known:
        return
    times = {report.rank: compute.times_s for report, compute in known}
    flops = known[0][1].flops
    medians = {rank: statistics.median(_block_means(each)) for rank, each in times.items()}
    slow = slow_ranks(times)
    if slow:
        others = statistics.median(each for rank, each in medians.items() if rank not in slow)
        worst = max(medians[rank] for rank in slow)
        hosts = [report.hostname for report in reports if report.rank in slow]
        who = ", ".join(f"rank {rank}" for rank in sorted(slow)) + f" on {named(hosts)}"
        found = (
            f"{who}: {worst / others:.1f} times the time of the others, "
            "and all wait for the slowest"
        )
        remedy = (
            "see what else runs there; report the node to the site, or avoid it by [sbatch] exclude"
        )
        yield warning(Topic.COMPUTE, found, remedy, hosts)
        return
    rates = sorted(flops / each / GB for each in medians.values())
    yield ok(Topic.COMPUTE, f"{_range(rates)} Gflop/s (fp32 matrix products)")


def slow_ranks(times: Mapping[int, Sequence[float]]) -> set[int]:
    """Return the ranks that are slow compared to the others, by repeated timings of the same work.

    Three quarters of a slow rank's blocks of repeats take longer than `SLOW` times the median of
    all ranks. So neither a few disturbed repeats nor a few slow ranks decide. Slow ranks are found
    only if at least half of the ranks are fast.
    """
    if len(times) < 2:
        return set()
    blocks = {rank: _block_means(each) for rank, each in times.items()}
    fast = statistics.median_low(map(statistics.median, blocks.values()))
    return {rank for rank, each in blocks.items() if _lower_quartile(each) > SLOW * fast}


def _block_means(times: Sequence[float]) -> list[float]:
    """Return the mean of each block of consecutive repeats, for eight blocks or a few more.

    A throttled core runs some repeats at full speed and pauses in the next: only the mean of
    several repeats shows it.
    """
    length = max(1, len(times) // 8)
    return [
        statistics.fmean(times[start : start + length]) for start in range(0, len(times), length)
    ]


def _lower_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]


def _range(values: Sequence[float]) -> str:
    """Show the least and the largest of sorted values; only one if both look the same."""
    ends = [format_number(values[0], 3), format_number(values[-1], 3)]
    return " to ".join(dict.fromkeys(ends))


def _judge_transfer(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    rates = [
        (report, transfer.payload_bytes / statistics.median(transfer.times_s) / GB)
        for report, transfer in having(reports, lambda report: report.transfer)
    ]
    if not rates:
        return
    shown = f"{_range(sorted(rate for _, rate in rates))} GB/s"
    slow = hosts_where(rates, lambda rate: rate < LEAST_TRANSFER_GBS)
    if slow:
        found = f"{shown}; {named(slow)} is below {LEAST_TRANSFER_GBS:g}"
        remedy = "ask the site how the GPUs are attached; bind workers to the cores near them"
        yield warning(Topic.TRANSFER, found, remedy, slow)
        return
    yield ok(Topic.TRANSFER, shown)


def _judge_data(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = having(reports, lambda report: report.data)
    if not known:
        return
    folder = known[0][1].folder
    lacking = hosts_where(known, lambda data: not data.readable)
    if lacking:
        remedy = REMEDY_OF[Probe.DATA]
        yield failed(Topic.DATA_THERE, f"{named(lacking)} cannot read {folder}", remedy, lacking)
        return
    yield ok(Topic.DATA_THERE, f"all nodes can read {folder}")


def _judge_loader(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = [report.loader for report in reports if report.loader]
    if not known:
        return
    rates = sorted(each.images / each.seconds for each in known)
    processes = plural(known[0].processes, "process")
    yield ok(Topic.LOADER, f"{_range(rates)} samples/s a worker ({known[0].dataset}, {processes})")


def _judge_signal(reports: Sequence[RankReport]) -> Iterator[Verdict]:
    known = having(reports, lambda report: report.signal)
    if not known:
        return
    refused = next((each.refused for _, each in known if each.refused), "")
    deaf = hosts_where(known, lambda each: not each.arrived)
    if refused:
        remedy = "make Slurm's commands work in jobs: trainings ask for their requeue from there"
        yield failed(Topic.SIGNAL, f"scancel on a node: {refused}", remedy)
    elif deaf:
        remedy = "wrappers that srun starts must pass USR2 on to Python; see setup and srun_args"
        yield failed(Topic.SIGNAL, f"USR2 did not reach {named(deaf)}", remedy, deaf)
    else:
        yield ok(Topic.SIGNAL, "USR2 reached every worker")


def _judge_requeue(cluster: ClusterSpec, reports: Sequence[RankReport]) -> Iterator[Verdict]:
    asked = next((report.requeue for report in reports if report.requeue), None)
    if asked is None:
        return
    if not asked.refused:
        yield ok(Topic.REQUEUE, "granted to this job, which was then cancelled")
        return
    own = [key for key in cluster.sbatch if key.replace("_", "-") in ("requeue", "no-requeue")]
    remedy = f"take {own[0]} out of [sbatch]" if own else "ask the site"
    remedy += "; until then a training goes on only if a command or --detach submits it again"
    # only a warning: a training whose requeue is refused saves and is submitted again
    yield warning(Topic.REQUEUE, f"refused: {asked.refused}", remedy)
