"""What the workers of `tula_hpc.check` do on their nodes, as far as one process without a GPU can show."""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest import mock

import pytest
import torch

from tests.forked import give_secret, start_workers
from tula_hpc.check import speed
from tula_hpc.check.job import CheckJob
from tula_hpc.check.probes import Peers, Reporter, describe_device, describe_host
from tula_hpc.check.reports import Device, Host, Meeting, Probe, RankReport, Skip
from tula_hpc.check.speed import why_skipped
from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.env import WorkerEnvironment
from tula_hpc.records import Record

TWO_GPUS = ClusterSpec(executor="slurm", device="cuda", gres="gpu:2", workers_per_node=2)


def place(rank: int, world_size: int = 2, folder: Path = Path()) -> WorkerEnvironment:
    here = ("localhost",)
    return WorkerEnvironment(rank, world_size, rank, 0, "check", 0, here, on_slurm=False, submission=str(folder))


def agreed(folder: Path, *reports: RankReport) -> list[Skip | None]:
    """Return what the workers with these reports decide, each in a thread, over a real store."""

    def decide(report: RankReport) -> Skip | None:
        peers = Peers(place(report.rank, len(reports), folder))
        peers.meet()
        skipped = why_skipped("gloo", peers.place, report, peers)
        peers.leave()
        return skipped

    give_secret(folder)
    with ThreadPoolExecutor(len(reports)) as pool:
        return [*pool.map(decide, reports)]


def report(rank: int, uuid: str = "", *, interface: str = "", device: bool = True) -> RankReport:
    host = describe_host("gloo").model_copy(update={"wanted_interface": interface})
    return RankReport(
        rank=rank,
        node_rank=0,
        local_rank=rank,
        world_size=2,
        hostname="node",
        host=host,
        device=Device(name="V100", torch=torch.__version__, uuid=uuid) if device else None,
    )


def test_a_worker_that_fails_leaves_at_once_where_others_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end through the interpreter, where nccl would wait for the others until the job's time is up."""
    left: list[int] = []

    def fail(*_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr("tula_hpc.check.job.join_job", lambda: place(0))
    monkeypatch.setattr("tula_hpc.check.probes.run_probes", fail)
    monkeypatch.setattr("tula_hpc.ddp.exit_at_once.has_peers", lambda: True)
    monkeypatch.setattr("tula_hpc.ddp.exit_at_once._leave_with_the_interpreter", left.append)
    monkeypatch.setattr("tula_hpc.ddp.stop_signals.StopRequest.install", lambda self: self)
    with pytest.raises(SystemExit):
        CheckJob(TWO_GPUS, WorkloadSpec(), 1, tmp_path)()
    assert left == [1]


def test_workers_agree_not_to_begin_what_would_hang(tmp_path: Path) -> None:
    assert agreed(tmp_path, report(0), report(1)) == [None] * 2
    assert agreed(tmp_path, report(0, "GPU-a"), report(1, "GPU-b")) == [None] * 2
    assert agreed(tmp_path, report(0, "GPU-a"), report(1, "GPU-a")) == [Skip.SHARED_DEVICE] * 2
    assert agreed(tmp_path, report(0), report(1, interface="none7")) == [Skip.MISSING_INTERFACE] * 2
    assert agreed(tmp_path, report(0), report(1, device=False)) == [Skip.NO_DEVICE] * 2
    assert agreed(tmp_path, report(0)) == [Skip.SINGLE_WORKER]


def _hang_alone(rank: int, folder: Path) -> None:
    """Wait as rank 0 in a collective that rank 1, which is at something else, never enters."""
    speed.PROBE_S = 2
    peers = Peers(place(rank, 2, folder))
    peers.meet()
    job = CheckJob(ClusterSpec(), WorkloadSpec(), 2, folder)
    given_up = folder / "given up"

    def stay_away(*_: object) -> NoReturn:
        # if it ended earlier, rank 0 would notice the closed connection
        while not given_up.exists():
            time.sleep(0.1)
        sys.exit(0)

    if rank == 1:
        with mock.patch.object(speed, "time_all_reduce", stay_away):
            speed.time_collectives(job, peers.place, report(1), peers)
    with pytest.raises(RuntimeError):
        speed.time_collectives(job, peers.place, report(0), peers)
    given_up.touch()


@pytest.mark.processes
def test_a_collective_that_hangs_is_given_up_within_the_limit_of_a_probe(tmp_path: Path) -> None:
    give_secret(tmp_path)
    # less than the ten minutes that torch waits in a training
    start_workers(2, _hang_alone, tmp_path, timeout_s=100)


@pytest.mark.parametrize(("visible", "distinct"), [(["GPU-a", "GPU-b"], 2), (["GPU-a"], 1)])
def test_ranks_that_see_one_and_the_same_gpu_report_one_uuid(
    monkeypatch: pytest.MonkeyPatch, visible: list[str], distinct: int
) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        assert device.index is not None
        uuid = visible[device.index]
        return SimpleNamespace(name="V100", uuid=uuid, major=7, minor=0, total_memory=2**35)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**35))
    devices = [describe_device(TWO_GPUS, place(rank)) for rank in range(2)]
    assert len({device.uuid for device in devices}) == distinct
    assert {device.has_kernels for device in devices} == {torch.version.cuda is None}
    assert {(device.free_bytes, device.total_bytes) for device in devices} == {(2**34, 2**35)}


def test_a_node_has_the_name_by_which_slurm_can_leave_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    assert Reporter(tmp_path / "rank-0.json", place(0)).report.hostname == "gpu07"


def test_the_report_on_disk_says_what_a_worker_was_doing_when_it_died(tmp_path: Path) -> None:
    cluster = ClusterSpec()
    job = CheckJob(cluster, WorkloadSpec(), 1, tmp_path)
    reporter = Reporter(job.report_file(0), place(0))
    reporter.note(host=describe_host("gloo"))
    reporter.attempt(Probe.MEETING, lambda: Meeting(seconds=1.0))

    def never_ends() -> Record:
        (on_disk,) = job.reports()
        assert on_disk.at_work_on is Probe.COMPUTE
        while True:
            time.sleep(0.01)

    reporter.attempt(Probe.COMPUTE, never_ends, limit_s=1)
    reporter.finish()
    (found,) = job.reports()
    assert (found.meeting, found.compute, found.finished) == (Meeting(seconds=1.0), None, True)
    assert found.errors == {Probe.COMPUTE: "TimeoutError: did not end within 1 s"}


def test_the_host_is_described_as_the_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    host: Host = describe_host("gloo")
    assert {each.name for each in host.interfaces if not each.infiniband} == {name for _, name in socket.if_nameindex()}
    assert [(each.name, each.up) for each in host.chosen_interfaces("gloo")] == [("lo", True)]
    assert set(host.cores) == os.sched_getaffinity(0)
