"""`python -m tula_hpc.check` on the real cluster: a healthy one, and one with each fault that it has to find."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import machine
from tests.slurm.testcluster import MiniCluster
from tula_hpc.check.__main__ import main
from tula_hpc.check.network_verdicts import bus_rate
from tula_hpc.check.reports import AllReduce, RankReport, Scope

pytestmark = pytest.mark.usefixtures("quick_nodes")
NODE_1, NODE_2, NODE_3 = (f"{machine.NAME}-node{number}" for number in (1, 2, 3))
CLUSTER = """
name = "test"
executor = "slurm"
max_nodes = {max_nodes}
workers_per_node = {workers}
memory_gb = 4.0
signal_delay_s = 30
[sbatch]
nodelist = "{name}-node[{nodes}]"
{sbatch}
[environment]
OMP_NUM_THREADS = "1"
{environment}
"""
ETH0 = 'GLOO_SOCKET_IFNAME = "eth0"'
SWEEP = """
name = "checked"
[workload]
model = "tula_hpc.workloads.small_cnns:compact_cnn"
dataset = "digits"
loader_workers = 0
"""
# other work on this machine may slow a node down
BUSY = ("compute", "warning")
# bandwidth of the test cluster's links of 1 Gbit/s
LINK_GBS = 0.125


class Checked:
    """The command's output, as data."""

    def __init__(self, code: int, printed: str) -> None:
        self.code, self.data = code, json.loads(printed)
        (self.partition,) = self.data["partitions"]
        self.ranks = [RankReport.model_validate(each) for each in self.partition["ranks"]]

    def levels(self, topic: str) -> list[str]:
        return [each["level"] for each in self.partition["verdicts"] if each["topic"] == topic]

    def found(self, topic: str) -> str:
        return " ".join(each["found"] for each in self.partition["verdicts"] if each["topic"] == topic)

    def not_ok(self) -> set[tuple[str, str]]:
        verdicts = self.partition["verdicts"]
        return {(each["topic"], each["level"]) for each in verdicts if each["level"] != "ok"}

    def all_reduces(self, scope: Scope) -> list[AllReduce]:
        found = [rank.collectives for rank in self.ranks]
        return [timed for each in found if each for timed in each.timed if timed.scope is scope]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path


def files(
    here: Path,
    sbatch: str = "",
    environment: str = ETH0,
    *,
    nodes: str = "1-2",
    name: str = "cluster",
    max_nodes: int = 4,
    workers: int = 2,
) -> list[str]:
    """Write a cluster file; return the command's arguments."""
    settings = {"name": machine.NAME, "nodes": nodes, "sbatch": sbatch, "environment": environment}
    settings |= {"max_nodes": str(max_nodes), "workers": str(workers)}
    (here / f"{name}.toml").write_text(CLUSTER.format(**settings))
    return [f"{name}.toml", "--sweep", "sweep.toml"]


def check(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> Checked:
    code = main([*arguments, "--json"])
    printed, errors = capsys.readouterr()
    assert printed, errors
    return Checked(code, printed)


@contextmanager
def checking(here: Path, arguments: list[str], environment: dict[str, str]) -> Iterator[Callable[[], Checked]]:
    """Run the command in the background; the yielded function waits for its end."""
    command = [sys.executable, "-m", "tula_hpc.check", *arguments, "--json"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=here, **pipes) as process:

        def ended() -> Checked:
            printed, errors = process.communicate(timeout=550)
            assert printed, errors
            return Checked(process.returncode, printed)

        try:
            yield ended
        finally:
            process.send_signal(signal.SIGINT)


def jobs_of(cluster: MiniCluster) -> list[str]:
    return cluster.run("squeue", "-h", "-n", "tula-check", "-o", "%i %T").splitlines()


@contextmanager
def slow_node(host: str) -> Iterator[None]:
    machine.set_cpu_quota((host,), 20)
    try:
        yield
    finally:
        machine.set_cpu_quota((host,), 200)


def test_a_healthy_cluster_passes_a_slow_link_shows_and_requeue_that_is_off_is_found(
    slurm_cluster: MiniCluster, here: Path, slurm_env: dict[str, str]
) -> None:
    """Two checks run at the same time, on two nodes each."""
    healthy = files(here)
    # [:1] leaves the sweep out, whose loader the first check measures
    faulty = files(here, sbatch="no-requeue = true", nodes="3-4", name="faulty", workers=1)[:1]
    with (
        slurm_cluster.slow_link(NODE_3, slurm_cluster.rate_mbit // 4),
        checking(here, healthy, slurm_env) as first,
        checking(here, faulty, slurm_env) as second,
    ):
        healthy_found, faulty_found = first(), second()
    check_healthy(healthy_found)
    assert faulty_found.levels("requeue") == ["warning"]
    assert all(bus_rate(each) < 1.1e9 * LINK_GBS / 4 for each in faulty_found.all_reduces(Scope.BETWEEN))
    assert faulty_found.code == 0
    assert list((here / "runs").iterdir()) == []
    slurm_cluster.wait_for(lambda: not jobs_of(slurm_cluster), 20, "the end of the jobs")


def check_healthy(checked: Checked) -> None:
    assert checked.not_ok() <= {BUSY}, checked.data
    assert checked.code == 0
    assert [rank.hostname for rank in checked.ranks] == [NODE_1] * 2 + [NODE_2] * 2
    assert all(rank.finished and rank.signal and rank.signal.arrived for rank in checked.ranks)
    assert checked.ranks[0].requeue is not None
    assert checked.levels("requeue") == ["ok"]
    assert checked.found("loader").endswith("(digits, 0 processes)")
    crossing, within = (checked.all_reduces(scope) for scope in (Scope.BETWEEN, Scope.NODE))
    assert [len(crossing), len(within)] == [2, 4]
    assert all(bus_rate(each) < 1.1e9 * LINK_GBS for each in crossing)


def test_a_missing_interface_and_shared_cores_are_found(here: Path, slurm_env: dict[str, str]) -> None:
    # every Python process of the job binds itself to the same core, as a wrong --cpu-bind would
    (here / "bound").mkdir()
    (here / "bound/sitecustomize.py").write_text("import os\nos.sched_setaffinity(0, {0})\n")
    environment = f'GLOO_SOCKET_IFNAME = "eth7"\nPYTHONPATH = "{here / "bound"}"'
    # [:1] leaves the sweep out, which needs more nodes than this cluster file has
    with checking(here, files(here, environment=environment, nodes="1", max_nodes=1)[:1], slurm_env) as ended:
        checked = ended()
    assert checked.code == 1
    failed = {topic for topic, level in checked.not_ok() if level == "failed"}
    assert failed == {"interfaces", "all-reduce", "cores"}, checked.data
    assert "eth7" in checked.found("interfaces")
    assert "eth0" in str(checked.partition["verdicts"])


@pytest.mark.thorough
def test_a_slow_node_and_two_ranks_on_one_device_are_found(here: Path, slurm_env: dict[str, str]) -> None:
    """Two jobs run at the same time; torch opens none of the made-up GPUs, so Slurm's variables say who has which."""
    path = files(here, sbatch='gpu_bind = "map_gpu:1,1"', nodes="3", name="gpus", max_nodes=1)[0]
    (here / path).write_text((here / path).read_text().replace("[sbatch]", 'device = "cuda"\ngres = "gpu:2"\n[sbatch]'))
    with (
        slow_node(NODE_2),
        checking(here, files(here, workers=1), slurm_env) as first,
        checking(here, [path], slurm_env) as second,
    ):
        checked, gpus = first(), second()
    assert gpus.code == 1
    assert f"ranks 0, 1 on {NODE_3} have the same GPU 1" in gpus.found("devices")
    assert checked.not_ok() == {BUSY}, checked.data
    assert NODE_2 in checked.found("compute")
    assert NODE_1 not in checked.found("compute")


def test_a_job_that_waits_says_why_and_is_cancelled(
    slurm_cluster: MiniCluster, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = files(here, sbatch='begin = "now+1hour"')
    checked = check(capsys, [*arguments, "--wait-minutes", "0.01"])
    assert checked.code == 1
    assert checked.levels("job") == ["failed"]
    assert "BeginTime" in checked.found("job")
    assert not jobs_of(slurm_cluster)
    held = check(capsys, files(here, sbatch="hold = true"))
    assert "scontrol release" in held.found("job")
    assert not jobs_of(slurm_cluster)
    assert list((here / "runs").iterdir()) == []


def test_what_sbatch_refuses_is_a_verdict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = files(here, sbatch="mem = 999999")
    path = here / arguments[0]
    path.write_text(path.read_text().replace("memory_gb = 4.0\n", ""))
    checked = check(capsys, arguments)
    assert checked.code == 1
    assert checked.levels("sbatch") == ["failed"] * 2
    assert checked.levels("job") == ["failed"]


def test_an_interrupted_check_cancels_its_job(
    slurm_cluster: MiniCluster, here: Path, slurm_env: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "tula_hpc.check", *files(here, sbatch='begin = "now+1hour"')]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=slurm_env, cwd=here, **pipes) as process:
        assert process.stderr is not None
        assert any("waits (BeginTime" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=60)
    assert (process.returncode, printed) == (130, "")
    assert "Traceback" not in complaints
    assert not jobs_of(slurm_cluster)
    assert list((here / "runs").iterdir()) == []
