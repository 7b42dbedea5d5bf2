"""Verdicts of `tula_hpc.check` on made-up facts, and the rules of Slurm and the libraries on which they are based."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.known import known
from tula_hpc.check.__main__ import main
from tula_hpc.check.network_verdicts import bus_rate, judge_network
from tula_hpc.check.partition_check import _as_text
from tula_hpc.check.rank_verdicts import judge_job, slow_ranks
from tula_hpc.check.reports import (
    AllReduce,
    Collectives,
    Compute,
    Device,
    Host,
    Interface,
    Probe,
    RankReport,
    Requeue,
    Scope,
    Signal,
    Skip,
)
from tula_hpc.check.site import Answer, Limits, Nodes, Partition, Site, ask_site, minutes_of, partition_of
from tula_hpc.check.site_verdicts import Level, Topic, Verdict, failed, judge_data_here, judge_site
from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.launch.bounded_command import NOT_CONFIGURED
from tula_hpc.launch.launcher import Launcher
from tula_hpc.records import RunDirectory

CPU = ClusterSpec(executor="slurm", partition="batch", max_nodes=2)
GPU = CPU.model_copy(update={"device": "cuda", "gres": "gpu:2", "workers_per_node": 2})
WORKLOAD = WorkloadSpec(loader_workers=0)
HOST = Host(
    cores=(0, 1),
    node_cores=2,
    memlock_bytes=None,
    open_files=4096,
    shm_free_bytes=2**33,
    interfaces=(Interface(name="lo", up=True), Interface(name="eth0", up=True, mbit=1000)),
    wanted_interface="eth0",
)
V100 = Device(name="V100", torch="2.10", uuid="GPU-0", capability="7.0", driver="580", nccl="2.27", total_bytes=2**35)


def report(rank: int, on: str = "", **found: Any) -> RankReport:
    place = {"rank": rank, "node_rank": rank, "local_rank": 0, "world_size": 2}
    defaults = {"hostname": on or f"node{rank}", "host": HOST, "finished": True}
    return RankReport(**{**place, **defaults, **found})


def judged(topic: Topic, reports: Sequence[RankReport], cluster: ClusterSpec = CPU) -> list[Verdict]:
    verdicts = judge_job(cluster, WORKLOAD, reports, len(reports))
    return [each for each in verdicts if each.topic is topic]


def level(verdicts: Iterable[Verdict]) -> Level:
    (verdict,) = verdicts
    assert (verdict.level is Level.OK) == (verdict.remedy == ""), "a verdict has a remedy exactly if something is wrong"
    return verdict.level


# ---- workers of the job ----


def test_a_command_of_setup_that_failed_is_a_warning() -> None:
    assert judged(Topic.SETUP, [report(0)]) == []
    sentence = "`conda …` in setup of the cluster file ended with exit code 127"
    failed_there = HOST.model_copy(update={"failed_setup": sentence})
    verdicts = judged(Topic.SETUP, [report(0, host=failed_there), report(1, host=failed_there)])
    assert level(verdicts) is Level.WARNING
    assert verdicts[0].found == sentence


@pytest.mark.parametrize("count", [2, 3, 16])
def test_a_rank_that_is_slow_stands_out_whatever_the_unit_and_a_few_disturbed_repeats_do_not(count: int) -> None:
    draw = random.Random(count)
    times = {rank: [draw.uniform(1.0, 1.1) for _ in range(20)] for rank in range(count)}
    assert slow_ranks(times) == set()
    times[0][:7] = [9.0] * 7
    assert slow_ranks(times) == set()
    times[count - 1] = [2 * each for each in times[count - 1]]
    assert slow_ranks(times) == {count - 1}
    assert slow_ranks({rank: [1e-6 * each for each in row] for rank, row in times.items()}) == {count - 1}


def test_a_throttled_rank_is_slow_although_most_of_its_repeats_run_at_full_speed() -> None:
    """A cgroup's quota does that: it allows some repeats at once, and then a wait for the next period."""
    times = {0: [1.0] * 100, 1: [1.0, 1.0, 1.0, 7.0] * 25, 2: [1.1] * 100}
    assert slow_ranks(times) == {1}


def test_a_slow_node_is_named() -> None:
    quick, slow = (Compute(flops=1e9, times_s=(time_s,) * 9) for time_s in (0.01, 0.03))
    (verdict,) = judged(Topic.COMPUTE, [report(0, compute=quick), report(1, compute=slow)])
    assert (verdict.level, verdict.hosts) == (Level.WARNING, ("node1",))
    assert "3.0 times" in verdict.found


@pytest.mark.parametrize(
    ("backend", "wanted", "chosen"),
    [
        ("gloo", "", ["eth0", "eth1", "ib0"]),
        ("gloo", "eth", []),
        ("gloo", "eth0,ib0", ["eth0", "ib0"]),
        ("nccl", "", ["eth0", "eth1", "ib0"]),
        ("nccl", "eth", ["eth0", "eth1"]),
        ("nccl", "=eth", []),
        ("nccl", "=eth1", ["eth1"]),
        ("nccl", "^eth", ["ib0", "docker0"]),
        ("nccl", "^=eth0", ["eth1", "ib0", "docker0"]),
    ],
)
def test_interfaces_are_chosen_as_the_libraries_choose_them(backend: str, wanted: str, chosen: list[str]) -> None:
    names = ("lo", "eth0", "eth1", "ib0", "docker0")
    interfaces = tuple(Interface(name=name, up=True) for name in names)
    host = HOST.model_copy(update={"interfaces": interfaces, "wanted_interface": wanted})
    assert [each.name for each in host.chosen_interfaces(backend)] == chosen
    assert host.lacks_interface(backend) == (bool(wanted) and not chosen)


def test_an_interface_that_one_node_lacks_is_named_with_those_that_are_there() -> None:
    other = HOST.model_copy(update={"interfaces": (Interface(name="ib0", up=True, mbit=100_000),)})
    skipped = Collectives(backend="gloo", skipped=Skip.MISSING_INTERFACE)
    reports = [report(0, collectives=skipped), report(1, host=other, collectives=skipped)]
    (verdict,) = judged(Topic.INTERFACES, reports)
    assert (verdict.level, verdict.hosts) == (Level.FAILED, ("node1",))
    assert "GLOO_SOCKET_IFNAME=eth0" in verdict.found
    assert "ib0 (100 Gbit/s)" in verdict.remedy
    assert level(judged(Topic.ALL_REDUCE, reports)) is Level.FAILED


def test_several_interfaces_of_which_none_is_named_are_a_warning_between_nodes_alone() -> None:
    both = (Interface(name="eth0", up=True), Interface(name="eth1", up=True))
    host = HOST.model_copy(update={"interfaces": both, "wanted_interface": ""})
    apart = [report(rank, host=host) for rank in range(2)]
    assert level(judged(Topic.INTERFACES, apart)) is Level.WARNING
    together = [report(rank, "node0", host=host) for rank in range(2)]
    assert level(judged(Topic.INTERFACES, together)) is Level.OK


def test_two_ranks_on_one_gpu_are_named_and_the_same_gpu_number_on_two_nodes_is_no_conflict() -> None:
    (verdict,) = judged(Topic.DEVICES, [report(rank, "node0", device=V100) for rank in range(2)], GPU)
    assert verdict.level is Level.FAILED
    assert "ranks 0, 1 on node0 have the same GPU GPU-0" in verdict.found
    assert level(judged(Topic.DEVICES, [report(rank, device=V100) for rank in range(2)], GPU)) is Level.OK


def test_devices_of_several_kinds_without_kernels_or_in_use_are_reported() -> None:
    other = V100.model_copy(update={"name": "K80", "has_kernels": False, "free_bytes": 2**34})
    reports = [report(0, device=V100), report(1, device=other)]
    assert level(judged(Topic.DEVICES, reports, GPU)) is Level.WARNING
    (kernels,) = judged(Topic.KERNELS, reports, GPU)
    assert (kernels.level, kernels.hosts) == (Level.FAILED, ("node1",))
    (memory,) = judged(Topic.DEVICE_MEMORY, reports, GPU)
    assert (memory.level, memory.hosts) == (Level.WARNING, ("node1",))
    typed = GPU.model_copy(update={"device_memory_gb": 40.0})
    (too_much,) = judged(Topic.DEVICE_MEMORY, [report(0, device=V100)], typed)
    assert too_much.remedy == "set device_memory_gb = 32.00"
    # rounded to the nearest, it would be more than there is
    odd = V100.model_copy(update={"total_bytes": int(15.747 * 2**30)})
    (of_odd,) = judged(Topic.DEVICE_MEMORY, [report(0, device=odd)], typed)
    assert of_odd.remedy == "set device_memory_gb = 15.74"
    fuller = V100.model_copy(update={"free_bytes": 31 * 2**30})
    free = [report(0, device=fuller), report(1, device=V100.model_copy(update={"free_bytes": 2**35}))]
    (enough,) = judged(Topic.DEVICE_MEMORY, free, GPU)
    assert (enough.level, enough.found) == (Level.OK, "32 GiB each, at least 31 GiB of it free")
    # the worker's own context, which takes half a gigabyte of any device
    slice_of_gpu = V100.model_copy(update={"total_bytes": 5 * 2**30, "free_bytes": 9 * 2**29})
    (small,) = judged(Topic.DEVICE_MEMORY, [report(0, device=slice_of_gpu)], GPU)
    assert small.level is Level.OK


def test_cores_that_are_too_few_or_shared_fail_and_unbound_workers_do_not() -> None:
    two_cores = CPU.model_copy(update={"cpus_per_worker": 2})
    bound = HOST.model_copy(update={"cores": (0,)})
    together = [report(rank, "node0", host=bound) for rank in range(2)]
    assert [each.level for each in judged(Topic.CORES, together, two_cores)] == [Level.FAILED] * 2
    assert level(judged(Topic.CORES, together)) is Level.FAILED
    apart = [each.model_copy(update={"hostname": f"node{each.rank}"}) for each in together]
    assert level(judged(Topic.CORES, apart)) is Level.OK
    assert level(judged(Topic.CORES, [report(rank, "node0") for rank in range(2)])) is Level.OK


def test_loader_processes_that_share_the_workers_cores_are_a_warning() -> None:
    two_cores = CPU.model_copy(update={"cpus_per_worker": 2})
    for processes, expected in ((0, Level.OK), (1, Level.OK), (2, Level.WARNING)):
        workload = WorkloadSpec(loader_workers=processes)
        verdicts = judge_job(two_cores, workload, [report(0)], 1)
        assert level(each for each in verdicts if each.topic is Topic.CORES) is expected
    # starts processes of its own
    script = WorkloadSpec.model_construct(script=Path("train.py"), loader_workers=2)
    assert level(each for each in judge_job(two_cores, script, [report(0)], 1) if each.topic is Topic.CORES) is Level.OK


@pytest.mark.parametrize("workers", [2, 4, 64])
def test_a_ring_moves_nearly_twice_the_payload_whatever_the_number_of_workers(workers: int) -> None:
    timed = AllReduce(scope=Scope.ALL, workers=workers, payload_bytes=1000, times_s=(1.0, 2.0, 9.0))
    assert bus_rate(timed) == pytest.approx(1000 * (workers - 1) / workers)
    assert bus_rate(timed) < 1000


@pytest.mark.parametrize(("time_s", "expected"), [(0.25, Level.OK), (2.5, Level.WARNING)])
def test_an_all_reduce_far_below_its_link_is_a_warning(time_s: float, expected: Level) -> None:
    timed = AllReduce(scope=Scope.ALL, workers=2, payload_bytes=25 * 2**20, times_s=(time_s,))
    found = Collectives(backend="gloo", timed=(timed,))
    assert level(judged(Topic.ALL_REDUCE, [report(rank, collectives=found) for rank in range(2)])) is expected


def test_signals_that_do_not_arrive_and_requeue_that_is_refused_say_what_to_do() -> None:
    deaf, granted = Signal(arrived=False), Requeue(refused="")
    reports = [report(0, signal=Signal(arrived=True), requeue=granted), report(1, signal=deaf)]
    (signal,) = judged(Topic.SIGNAL, reports)
    assert (signal.level, signal.hosts) == (Level.FAILED, ("node1",))
    assert level(judged(Topic.REQUEUE, reports)) is Level.OK
    off = CPU.model_copy(update={"sbatch": {"no-requeue": True}})
    refused = [report(0, requeue=Requeue(refused="disabled"))]
    (requeue,) = judged(Topic.REQUEUE, refused, off)
    assert requeue.level is Level.WARNING
    assert "no-requeue" in requeue.remedy
    assert "ask the site" in judged(Topic.REQUEUE, refused)[0].remedy


def test_a_probe_that_failed_or_killed_its_worker_is_a_verdict_of_its_own() -> None:
    broken = report(0, errors={Probe.COMPUTE: "CUDA error"}, at_work_on=Probe.COMPUTE)
    killed = report(1, finished=False, at_work_on=Probe.LOADER)
    (compute,) = judged(Topic.COMPUTE, [broken, killed])
    assert "CUDA error" in compute.found
    (loader,) = judged(Topic.LOADER, [broken, killed])
    assert (loader.level, loader.hosts) == (Level.FAILED, ("node1",))
    lost = judge_job(CPU, WORKLOAD, [broken], 2)
    assert level(each for each in lost if each.topic is Topic.WORKERS) is Level.FAILED


@pytest.mark.parametrize(
    ("text", "expected"), [("TimeoutError: did not end", Level.WARNING), ("OSError: no such file", Level.FAILED)]
)
def test_a_loader_that_is_slow_to_begin_is_a_warning_and_one_that_cannot_a_failure(text: str, expected: Level) -> None:
    reports = [report(0, errors={Probe.LOADER: text}), report(1, errors={Probe.LOADER: text})]
    (verdict,) = judged(Topic.LOADER, reports)
    assert (verdict.level, verdict.hosts) == (expected, ("node0", "node1"))


def test_sockets_in_place_of_infiniband_are_a_warning() -> None:
    port = Interface(name="mlx5_0:1", up=True, mbit=100_000, infiniband=True)
    host = HOST.model_copy(update={"interfaces": (*HOST.interfaces, port)})
    reports = [report(0, host=host)]
    assert level(judge_network(reports, ["Socket"])) is Level.WARNING
    assert level(judge_network(reports, ["IB"])) is Level.OK
    assert level(judge_network([report(0)], ["Socket"])) is Level.OK
    assert not [*judge_network(reports, [])]


# ---- the login node ----

BATCH = Partition(name="batch", state="UP", total_nodes=4)
NODES = Nodes(count=4, cpus=8, memory_mb=64_000, gres="gpu:v100:4(S:0-1)", state="idle", features="v100,ssd")
SITE = Site(user="ada", partitions=("batch",), partition=BATCH, nodes=(NODES,))


def on_site(topic: Topic, cluster: ClusterSpec = CPU, **changes: Any) -> list[Verdict]:
    site = SITE.model_copy(update=changes)
    return [each for each in judge_site(cluster, site) if each.topic is topic]


def test_a_partition_that_is_missing_or_closed_fails() -> None:
    (missing,) = judge_site(CPU, SITE.model_copy(update={"partition": None, "partitions": ("a", "b")}))
    assert (missing.level, missing.topic) == (Level.FAILED, Topic.PARTITION)
    assert "a, b" in missing.remedy
    drained = BATCH.model_copy(update={"state": "DRAIN"})
    assert level(on_site(Topic.PARTITION, partition=drained)) is Level.FAILED
    assert level(on_site(Topic.PARTITION)) is Level.OK


@pytest.mark.parametrize("source", ["partition", "qos", "qos of the partition", "association"])
def test_a_time_limit_below_train_minutes_fails_whoever_sets_it(source: str) -> None:
    limits = Limits(name="short", account="short", max_minutes=600)
    cluster = CPU.model_copy(update={"account": "short"})
    changes: dict[str, Any] = {
        "partition": {"partition": BATCH.model_copy(update={"max_minutes": 600})},
        "qos": {"qos": (limits,)},
        "qos of the partition": {"qos": (limits,), "partition": BATCH.model_copy(update={"qos": "short"})},
        "association": {"associations": (limits,), "enforces_accounts": True},
    }
    if source == "qos":
        cluster = cluster.model_copy(update={"qos": "short"})
    (verdict,) = on_site(Topic.TIME_LIMITS, cluster, **changes[source])
    assert verdict.level is Level.FAILED
    assert "set train_minutes = 600" in verdict.remedy
    assert level(on_site(Topic.TIME_LIMITS, cluster)) is Level.OK


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cpus_per_worker": 9}, "9 cores"),
        ({"memory_gb": 64.0}, "memory"),
        ({"gres": "gpu:1,nvme:1"}, "gres"),
        ({"constraint": "a100"}, "constraint"),
    ],
)
def test_a_job_that_no_node_fits_fails_and_says_why(settings: dict[str, object], expected: str) -> None:
    (verdict,) = on_site(Topic.NODES, CPU.model_copy(update=settings))
    assert verdict.level is Level.FAILED
    assert expected in verdict.found
    assert level(on_site(Topic.NODES)) is Level.OK


def test_nodes_whose_gpus_slurm_does_not_manage_fit_a_job_that_asks_for_none() -> None:
    unmanaged = NODES.model_copy(update={"gres": "(null)"})
    assert level(on_site(Topic.NODES, CPU.model_copy(update={"gres": "none"}), nodes=(unmanaged,))) is Level.OK


def test_fewer_nodes_than_max_nodes_are_a_warning_and_broken_ones_do_not_count() -> None:
    for changes in (
        {"nodes": (NODES.model_copy(update={"state": "drained"}), NODES.model_copy(update={"count": 1}))},
        {"partition": BATCH.model_copy(update={"max_nodes": 1})},
    ):
        (verdict,) = on_site(Topic.NODES, **changes)
        assert (verdict.level, verdict.remedy.split(",")[0]) == (Level.WARNING, "set max_nodes = 1")


@pytest.mark.parametrize("state", ["idle", "idle~", "mixed-", "allocated#", "planned", "reserved", "completing"])
def test_nodes_that_are_at_work_or_asleep_can_be_used(state: str) -> None:
    assert NODES.model_copy(update={"state": state}).usable


@pytest.mark.parametrize("state", ["down*", "draining", "drained$", "fail", "inval", "maint", "powering_down", "unk*"])
def test_nodes_that_take_no_job_cannot_be_used(state: str) -> None:
    assert not NODES.model_copy(update={"state": state}).usable


def test_a_small_default_of_memory_is_a_warning_only_where_the_node_is_the_jobs_own() -> None:
    little = BATCH.model_copy(update={"default_memory_mb_per_cpu": 1000})
    assert level(on_site(Topic.HOST_MEMORY, partition=little)) is Level.WARNING
    shared = CPU.model_copy(update={"exclusive": False})
    assert level(on_site(Topic.HOST_MEMORY, shared, partition=little)) is Level.OK
    typed = CPU.model_copy(update={"memory_gb": 8.0})
    assert level(on_site(Topic.HOST_MEMORY, typed, partition=little)) is Level.OK
    assert not on_site(Topic.HOST_MEMORY, CPU.model_copy(update={"sbatch": {"mem": 0}}), partition=little)


def test_the_account_and_qos_of_the_users_shell_are_judged_where_the_file_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Limits(name="physics", account="physics", qos=("normal",), max_minutes=60)
    both = (Limits(name="normal"), Limits(name="high"))
    known: dict[str, Any] = {"associations": (own,), "qos": both, "enforces_accounts": True}
    assert level(on_site(Topic.TIME_LIMITS, **known)) is Level.OK
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SBATCH_QOS", "high")
    (account,) = on_site(Topic.ACCOUNT, **known)
    assert account.found == "physics (SBATCH_ACCOUNT of your shell) is one of ada's"
    (qos,) = on_site(Topic.QOS, **known)
    assert (qos.level, qos.found) == (Level.FAILED, "ada's account may not use high (SBATCH_QOS of your shell)")
    for given in ({"qos": "high"}, {"sbatch": {"qos": "high"}}):
        (qos,) = on_site(Topic.QOS, CPU.model_copy(update=given), **known)
        assert qos.found == "ada's account may not use high"
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    (partition,) = on_site(Topic.PARTITION, CPU.model_copy(update={"partition": None}), partition=None)
    assert partition.found == "there is no partition nowhere (SBATCH_PARTITION of your shell)"
    (limit,) = on_site(Topic.TIME_LIMITS, **known)
    assert "account physics allows 60 minutes" in limit.found


@pytest.mark.parametrize(("enforced", "expected"), [(True, Level.FAILED), (False, Level.WARNING)])
def test_an_account_or_qos_that_is_not_the_users_fails_where_that_counts(enforced: bool, expected: Level) -> None:
    own = Limits(name="physics", account="physics", qos=("normal",))
    known = {"associations": (own,), "qos": (Limits(name="normal"), Limits(name="high"))}
    wrong = CPU.model_copy(update={"account": "chemistry"})
    (verdict,) = on_site(Topic.ACCOUNT, wrong, enforces_accounts=enforced, **known)
    assert (verdict.level, verdict.remedy) == (expected, "set account to one of: physics")
    accepted = Answer(job="train", minutes=9, nodes=2, accepted=True, text="could start at noon")
    known_here: dict[str, Any] = {"enforces_accounts": enforced, **known}
    assert level(on_site(Topic.ACCOUNT, wrong, answers=(accepted,), **known_here)) is Level.WARNING
    right = CPU.model_copy(update={"account": "physics", "qos": "normal"})
    for topic in (Topic.ACCOUNT, Topic.QOS):
        assert level(on_site(topic, right, enforces_accounts=enforced, **known)) is Level.OK
    high = right.model_copy(update={"qos": "high"})
    assert level(on_site(Topic.QOS, high, enforces_accounts=enforced, **known)) is expected
    unknown = right.model_copy(update={"qos": "nowhere"})
    assert level(on_site(Topic.QOS, unknown, enforces_accounts=enforced, **known)) is Level.FAILED


def test_what_hides_a_workers_peers_from_nccl_is_a_warning() -> None:
    assert not on_site(Topic.DEVICES, GPU)
    (verdict,) = on_site(Topic.DEVICES, GPU.model_copy(update={"gres": None, "sbatch": {"gpus_per_task": 1}}))
    assert level([verdict]) is Level.WARNING
    assert verdict.found.startswith("sbatch.gpus_per_task: ")
    assert verdict.remedy.startswith('gres = "gpu:2" in its place')


@pytest.mark.parametrize(("accepted", "expected"), [(True, Level.OK), (False, Level.FAILED), (None, Level.WARNING)])
def test_slurms_answer_decides(accepted: bool | None, expected: Level) -> None:
    answer = Answer(job="train", minutes=30, nodes=2, accepted=accepted, text="says Slurm")
    assert level(on_site(Topic.SBATCH, answers=(answer,))) is expected


@pytest.mark.parametrize("readable", [True, False])
def test_a_data_folder_that_cannot_be_read_fails(readable: bool) -> None:
    assert (judge_data_here(Path("/data"), readable).level is Level.OK) is readable
    # the sweep does not look for it there on this machine
    assert judge_data_here(Path("/data"), readable, needed=False).level is Level.OK


# ---- Slurm's formats ----


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", None),
        ("", None),
        ("30", 30),
        ("1:30", 1),
        ("2:00:00", 120),
        ("1-12:00:00", 2160),
        ("7-00", 10080),
        ("1-2:30", 1590),
    ],
)
def test_slurms_time_limits_are_read(text: str, minutes: int | None) -> None:
    assert minutes_of(text) == minutes


ANSWERS = {
    "scontrol show config": "AccountingStorageEnforce = associations,limits\nDefMemPerCPU            = 1500\n",
    "scontrol show partition": (
        "PartitionName=cpu AllowAccounts=ALL Default=YES QoS=N/A MaxNodes=UNLIMITED MaxTime=2-00:00:00 State=UP "
        "TotalNodes=100 DefMemPerNode=UNLIMITED\n"
        "PartitionName=gpu AllowAccounts=ml Default=NO QoS=gpuqos MaxNodes=16 MaxTime=1-00:00:00 State=UP "
        "TotalNodes=24 DefMemPerCPU=4000 MaxMemPerNode=UNLIMITED\n"
    ),
    "sinfo -h": (
        "20|40|192000|gpu:v100:4(S:0-1)|mixed|v100|gpu[01-18,31-32]\n"
        "4|40+|192000|gpu:v100:4|drained*|v100|fat1,fat[3-5]\n"
    ),
    "scontrol show node": (
        "NodeName=gpu01 Arch=x86_64 CoresPerSocket=20 CPUEfctv=36 CPUTot=40 RealMemory=192000 MemSpecLimit=2000\n"
        "NodeName=fat1 Arch=x86_64 CPUTot=40 RealMemory=192000\n"
    ),
    "sacctmgr -n": "gpuqos|12:00:00|cpu=640,node=8\nnormal||\n",
}


def test_what_slurm_prints_becomes_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def answer(command: Sequence[str], _timeout_s: float = 0) -> str:
        if "assoc" in command:
            return "ml|||normal,gpuqos|||\nml||normal,gpuqos|1-00:00:00|node=4\n"
        return ANSWERS[" ".join(command[: 3 if command[0] == "scontrol" else 2])]

    monkeypatch.setattr("tula_hpc.launch.slurm.run_command", answer)
    monkeypatch.setattr("tula_hpc.check.site.could_start", lambda _: "Job 7 to start at noon using 80 processors")
    cluster = CPU.model_copy(update={"partition": "gpu"})
    site = ask_site(Launcher(cluster, RunDirectory(tmp_path), "tula-check"), 2)
    assert site.partition == Partition(
        name="gpu",
        state="UP",
        qos="gpuqos",
        total_nodes=24,
        max_nodes=16,
        max_minutes=1440,
        default_memory_mb_per_cpu=4000,
    )
    assert [(each.count, each.cpus, each.usable) for each in site.nodes] == [(20, 36, True), (4, 40, False)]
    # without what the nodes keep for the system
    assert [each.memory_mb for each in site.nodes] == [190_000, 192_000]
    assert site.qos[0] == Limits(name="gpuqos", max_minutes=720, max_nodes=8)
    assert site.associations[-1].max_nodes == 4
    assert site.enforces_accounts
    assert [(each.job, each.text) for each in site.answers] == [
        ("profile", "could start at noon"),
        ("train", "could start at noon"),
    ]
    default = CPU.model_copy(update={"partition": None})
    site = ask_site(Launcher(default, RunDirectory(tmp_path), "tula-check"), 2)
    assert site.partition is not None
    assert (site.partition.name, site.partition.default_memory_mb_per_cpu) == ("cpu", 1500)
    # the user's own default, with which jobs are submitted
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    site = ask_site(Launcher(default, RunDirectory(tmp_path), "tula-check"), 2)
    assert known(site.partition).name == "gpu"


def test_a_partitions_default_of_memory_for_a_node_replaces_the_clusters_for_a_core() -> None:
    found = partition_of({"PartitionName": "a", "DefMemPerNode": "64000"}, {"DefMemPerCPU": "1500"})
    assert (found.default_memory_mb_per_cpu, found.default_memory_mb_per_node) == (None, 64000)


def test_a_device_that_no_node_has_is_reported_once_with_the_other_one() -> None:
    text = "DeviceError: Slurm granted 2 GPUs, but torch sees none: no driver"
    errors = dict.fromkeys((Probe.DEVICE, Probe.COMPUTE, Probe.TRANSFER), text)
    reports = [report(rank, errors=errors) for rank in range(2)]
    messages = [each for each in judge_job(GPU, WORKLOAD, reports, 2) if text in each.found]
    assert [each.topic for each in messages] == [Topic.DEVICES]
    assert messages[0].remedy.startswith('if these nodes have no GPUs, device = "cpu" in the cluster file; else ')
    one = [report(0, errors=errors), report(1, device=V100)]
    assert all("no GPUs" not in each.remedy for each in judge_job(GPU, WORKLOAD, one, 2))


def test_of_several_failures_the_first_cause_is_named_at_the_end() -> None:
    later = failed(Topic.JOB, "refused", "see its log")
    cause = failed(Topic.PARTITION, "there is no gpu", "set partition to one of: batch")
    fine = Verdict(topic=Topic.QOS, level=Level.OK, found="normal")

    def last_line(*verdicts: Verdict) -> str:
        check: Any = SimpleNamespace(partition="", verdicts=verdicts)
        return _as_text([check], "", 200).splitlines()[-1]

    assert last_line(fine, later, cause).startswith("first: partition: set partition to one of: batch; ")
    assert last_line(fine, cause) == "1 failed, 1 ok"


@pytest.mark.parametrize(
    ("answer", "found", "again"),
    [
        (None, "scontrol is not on PATH: is this a Slurm login node?", False),
        (f"echo '{NOT_CONFIGURED}' >&2; exit 1", "run this on a login node, or set SLURM_CONF", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm controller", True),
    ],
)
def test_without_slurm_a_check_says_once_where_to_run_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    answer: str | None,
    found: str,
    again: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    if answer is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "scontrol").chmod(0o700)
    Path("c.toml").write_text('executor = "slurm"\n')
    assert main(["c.toml"]) == 1
    said = capsys.readouterr().out
    assert found in said
    assert said.count("login node") == (not again)
    assert ("run the check again when Slurm answers; " in said) == again
    assert 'to check this machine instead, set executor = "local"' in said
