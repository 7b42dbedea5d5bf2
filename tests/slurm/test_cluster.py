"""The test cluster works as documented; all other tests in this folder rely on that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.config.test_hidden_values import command_lines
from tests.slurm import machine, testcluster
from tests.slurm.testcluster import ClusterError, MiniCluster

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(Path(testcluster.__file__).resolve())]
NODE_2, NODE_3, NODE_4 = (f"{machine.NAME}-node{number}" for number in (2, 3, 4))
TELL_SIGNALS = "trap 'echo got USR2' USR2; trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.1; done"
ALLOCATE_300_MB = "print(len(bytearray(300 << 20)))"


def submit(cluster: MiniCluster, script: str, log: Path, *options: str) -> str:
    """Submit a batch job with one shell line; return its id."""
    files = ["--chdir", "/", "--output", str(log), "--open-mode", "append"]
    return cluster.run("sbatch", "--parsable", *files, *options, "--wrap", script).strip()


def steps(cluster: MiniCluster, job_id: str) -> dict[str, str]:
    """Return the state of each step of a finished job, from accounting."""
    lines = cluster.run("sacct", "-Pn", "-o", "JobID,State", "-j", job_id).splitlines()
    return dict(line.split("|") for line in lines)


def cpu_quota(host: str) -> float:
    """Return the number of cores that a node may use, from its cgroup."""
    if (machine.CGROUPS / "cgroup.controllers").exists():
        quota_us, period_us = (machine.CGROUPS / machine.NAME / host / "cpu.max").read_text().split()
    else:
        folder = machine.CGROUPS / "cpu" / machine.NAME / host
        quota_us, period_us = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota_us) / int(period_us)


def test_all_nodes_are_idle(slurm_cluster: MiniCluster) -> None:
    slurm_cluster.wait_for(
        lambda: slurm_cluster.run("sinfo", "-hp", "batch", "-o", "%t %D").split() == ["idle", "4"], 30
    )
    assert slurm_cluster.is_up()


def test_tasks_of_a_step_run_on_different_hosts(slurm_cluster: MiniCluster) -> None:
    hosts = slurm_cluster.run("srun", "--nodes=2", "uname", "-n").split()
    assert len(set(hosts)) == 2
    assert set(hosts) <= set(slurm_cluster.hosts)


def test_nodes_know_each_other_by_name(slurm_cluster: MiniCluster) -> None:
    lookup = f"import socket; print(*map(socket.gethostbyname, {slurm_cluster.hosts}))"
    addresses = slurm_cluster.run("srun", f"--nodelist={NODE_3}", "python3", "-c", lookup).split()
    assert addresses == [f"{machine.SUBNET}.{i}" for i in (1, 2, 3, 4)]


def test_both_ends_of_a_link_are_shaped(slurm_cluster: MiniCluster) -> None:
    from_node = slurm_cluster.run("srun", f"--nodelist={NODE_2}", "/sbin/tc", "-j", "qdisc", "show", "dev", "eth0")
    to_node = slurm_cluster.run("tc", "-j", "qdisc", "show", "dev", f"{machine.NAME}-2")
    for end in (from_node, to_node):
        (shaper,) = json.loads(end)
        assert shaper["kind"] == "tbf"
        # bytes per second
        assert shaper["options"]["rate"] == slurm_cluster.rate_mbit * 1_000_000 // 8


def test_jobs_run_under_their_nodes_cpu_quota(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(slurm_cluster, "echo $$ ready; sleep 60", log, f"--nodelist={NODE_2}")
    slurm_cluster.wait_for(lambda: log.exists() and "ready" in log.read_text(), 20)
    places = Path(f"/proc/{log.read_text().split()[0]}/cgroup").read_text().splitlines()
    slurm_cluster.run("scancel", job_id)
    assert any(
        line.split(":")[1] in ("cpu", "cpu,cpuacct", "") and f"/{machine.NAME}/{NODE_2}/" in line for line in places
    )
    assert cpu_quota(NODE_2) == slurm_cluster.cpu_percent / 100


def test_a_step_over_its_memory_is_killed_and_says_so(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    line = f'srun --mem=100 python3 -c "{ALLOCATE_300_MB}"; srun --mem=1000 python3 -c "{ALLOCATE_300_MB}"'
    job_id = submit(slurm_cluster, line, tmp_path / "log", "--mem=1000")
    slurm_cluster.wait_for(lambda: slurm_cluster.job_state(job_id) == "COMPLETED", 30)
    slurm_cluster.wait_for(lambda: steps(slurm_cluster, job_id).get(f"{job_id}.1") == "COMPLETED", 10)
    assert steps(slurm_cluster, job_id)[f"{job_id}.0"] == "OUT_OF_MEMORY"
    assert str(300 << 20) in (tmp_path / "log").read_text()


def test_every_node_of_a_job_has_the_whole_limit(slurm_cluster: MiniCluster) -> None:
    # three times 300 MB under 500 MB per node: together they exceed it
    hold = f"{ALLOCATE_300_MB}; import time; time.sleep(1)"
    sizes = slurm_cluster.run("srun", "--nodes=3", "--mem=500", "python3", "-c", hold).split()
    assert sizes == [str(300 << 20)] * 3


@pytest.mark.thorough
def test_a_preempted_job_is_requeued_and_knows_it(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = f'echo run ${{SLURM_RESTART_COUNT:-0}}; [ ${{SLURM_RESTART_COUNT:-0}} = 1 ] || srun sh -c "{TELL_SIGNALS}"'
    job_id = submit(slurm_cluster, line, log, "--nodes=2", "--exclusive", "--signal=USR2@30", "--time=10")
    slurm_cluster.wait_for(lambda: log.exists() and log.read_text().count("ready") == 2, 20)
    urgent_id = slurm_cluster.preempt(job_id)
    slurm_cluster.wait_for(lambda: slurm_cluster.job_state(urgent_id) == "COMPLETED", 40)
    slurm_cluster.wait_for(lambda: slurm_cluster.job_state(job_id) == "COMPLETED", 30)
    messages = [text for text in log.read_text().splitlines() if text.startswith(("run", "got"))]
    assert (messages[0], messages[-1]) == ("run 0", "run 1")
    assert set(messages[1:-1]) == {"got TERM"}


@pytest.mark.thorough
def test_preemption_can_send_the_users_signal(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with slurm_cluster.changed(user_signal=True) as cluster:
        job_id = submit(cluster, f'srun sh -c "{TELL_SIGNALS}"', log, "--signal=USR2@30", "--time=10", "--exclusive")
        cluster.wait_for(lambda: log.exists() and "ready" in log.read_text(), 20)
        cluster.preempt(job_id)
        cluster.wait_for(lambda: "got" in log.read_text(), 20)
        cluster.run("scancel", job_id)
    assert "got USR2" in log.read_text()


@pytest.mark.thorough
def test_signals_reach_the_steps(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job_id = submit(slurm_cluster, f'srun sh -c "{TELL_SIGNALS}"; echo after', log)
    slurm_cluster.wait_for(lambda: log.exists() and "ready" in log.read_text(), 20)
    slurm_cluster.signal(job_id, "USR2")
    slurm_cluster.wait_for(lambda: "got USR2" in log.read_text(), 20)
    slurm_cluster.run("scancel", job_id)
    assert "after" not in log.read_text()


@pytest.mark.thorough
def test_accounting_can_be_missing(slurm_cluster: MiniCluster) -> None:
    with slurm_cluster.changed(accounting=False) as cluster, pytest.raises(ClusterError, match="accounting"):
        cluster.run("sacct")
    assert slurm_cluster.run("sacct")


@pytest.mark.thorough
@pytest.mark.parametrize("kill", [MiniCluster.kill_slurmd, MiniCluster.kill_node])
def test_a_killed_node_can_come_back(slurm_cluster: MiniCluster, kill: Callable[[MiniCluster, str], None]) -> None:
    # a node that dies before it has reported the end of its last job gets no new job for a minute
    slurm_cluster.wait_for(lambda: slurm_cluster.run("sinfo", "-hn", NODE_4, "-p", "batch", "-o", "%t") == "idle\n", 30)
    before = slurm_cluster.pid(f"slurmd-{NODE_4}")
    kill(slurm_cluster, NODE_4)
    assert slurm_cluster.pid(f"slurmd-{NODE_4}") is None
    slurm_cluster.start_slurmd(NODE_4)
    slurm_cluster.wait_for(lambda: slurm_cluster.pid(f"slurmd-{NODE_4}") not in (None, before), 10)
    assert slurm_cluster.run("srun", f"--nodelist={NODE_4}", "uname", "-n").strip() == NODE_4


def test_submitit_reaches_it_from_outside(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    import submitit

    executor = submitit.SlurmExecutor(tmp_path)
    executor.update_parameters(nodes=2, ntasks_per_node=1, time=5, partition="batch", mem="500MB", array_parallelism=1)
    jobs = executor.map_array(divmod, [7, 9], [2, 2])
    assert [job.results() for job in jobs] == [[(3, 1)] * 2, [(4, 1)] * 2]


def test_a_second_cluster_is_refused_in_one_line(slurm_cluster: MiniCluster) -> None:
    second = subprocess.run([*COMMAND, "up"], capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert "already up" in second.stderr
    assert second.stderr.count("\n") == 1
    assert slurm_cluster.is_up()


@pytest.fixture(scope="class")
def without_the_session_cluster(slurm_cluster: MiniCluster) -> Iterator[None]:
    slurm_cluster.down()
    yield
    MiniCluster().down()
    slurm_cluster.__enter__()


@pytest.mark.usefixtures("without_the_session_cluster")
class TestLifeCycle:
    def test_down_leaves_nothing(self) -> None:
        assert not testcluster.STATE.exists()
        assert not list(Path("/run/netns").glob(f"{machine.NAME}-*"))
        assert not list(Path("/sys/class/net").glob(f"{machine.NAME}-*"))
        assert not list(machine.CGROUPS.rglob(machine.NAME))
        assert f"/{machine.NAME}/" not in Path("/proc/mounts").read_text()
        assert f"{machine.NAME}-" not in Path("/etc/hosts").read_text()

    def test_what_a_killed_run_left_is_replaced(self) -> None:
        begin = "import os; from tests.slurm.testcluster import MiniCluster"
        script = f"{begin}; MiniCluster(nodes=1, accounting=False).__enter__(); os.kill(os.getpid(), 9)"
        killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
        assert killed.returncode == -9
        assert MiniCluster().pid("slurmctld")
        # the cluster runs, but its owner is gone
        assert testcluster.running_cluster() is None
        with MiniCluster(nodes=2, accounting=False) as cluster:
            assert testcluster.running_cluster() == cluster
            assert len(cluster.run("srun", "--nodes=2", "uname", "-n").split()) == 2

    def test_down_kills_jobs_too(self) -> None:
        with MiniCluster(nodes=1, accounting=False) as cluster:
            job_id = cluster.run("sbatch", "--parsable", "--chdir=/", "-o", "/dev/null", "--wrap", "sleep 987").strip()
            cluster.wait_for(lambda: cluster.job_state(job_id) == "RUNNING", 20)
            cluster.run("scontrol", "suspend", job_id)
        assert b"sleep\x00987\x00" not in command_lines()


@pytest.mark.parametrize("option", ["--nodes=0", "--cpu-percent=0", "--grace-s=-1", "--max-array-size=-1"])
def test_impossible_settings_are_one_clear_line(option: str) -> None:
    refused = subprocess.run([*COMMAND, "up", option], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "expected" in refused.stderr
    assert refused.stderr.count("\n") == 1
