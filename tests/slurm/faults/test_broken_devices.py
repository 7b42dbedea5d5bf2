"""Nodes with broken GPUs: a job that lands on one is moved to another; if all are broken, one line says so."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.slurm.sweeping import ROOT, Done, run_sweep
from tests.slurm.testcluster import MiniCluster
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunDirectory

pytestmark = pytest.mark.usefixtures("quick_nodes")
ONE = "search.min_batch=128"
SAID = "CUDA error: uncorrectable ECC error encountered"
NCCL = "NCCL error in: NCCLUtils.hpp:317, unhandled system error (run with NCCL_DEBUG=INFO for details)"
SWEEP = """
name = "broken"
[workload]
model = "tests.examples.broken:build"
dataset = "digits"
epochs = 1
loader_workers = 0
[search]
cluster_sizes = [1]
min_batch = 64
max_batch = 128
mode = "full"
pack = "never"
min_steps = 5
max_steps = 10
max_seconds = 2
estimate = false
[objective]
kind = "time"
"""


def run_broken(
    folder: Path, cluster: MiniCluster, broken: tuple[str, ...], until: str, *settings: str, said: str = SAID
) -> Done:
    """Run the sweep command with broken devices on these nodes."""
    environment = {**cluster.environment, "BROKEN_HOSTS": ",".join(broken), "BROKEN_SAYS": said}
    return run_sweep(SWEEP, folder, environment, "--until", until, settings=settings)


def broken_jobs(run: RunDirectory, stage: str) -> Counter[str]:
    """Count, by host, the jobs of a stage that reported a failed device."""
    own = [e for e in run.events() if (e.event, e.stage, e.failure) == ("failed", stage, Failure.DEVICE_FAILED)]
    return Counter(host for _, host in {(e.job_id, host) for e in own for host in e.data["hosts"]})


def test_a_sweep_ends_well_on_the_nodes_that_are_whole(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    first, second, *_ = slurm_cluster.hosts
    planned, run = run_broken(tmp_path, slurm_cluster, (first,), "plan"), RunDirectory(tmp_path / "run")
    assert planned.returncode == 0, planned.stderr + planned.stdout
    # each configuration is a task of one array
    tasks = [job.job_id.split("_") for job in run.history().submissions()][:2]
    assert tasks == [[tasks[0][0], "0"], [tasks[0][0], "1"]]
    # one of the two jobs found the broken node, and no other job was sent there
    assert broken_jobs(run, "profile") == {first: 1}
    measured = run.measurements().records
    assert Counter((m.configuration.local_batch, m.status) for m in measured) == {(64, "ok"): 1, (128, "ok"): 1}
    # the next command still knows of that node, and its training meets another one
    trained = run_broken(tmp_path, slurm_cluster, (first, second), "train", said=NCCL)
    assert trained.returncode == 0, trained.stderr + trained.stdout
    assert broken_jobs(run, "train") == {second: 1}
    assert run.train().result_file.exists()
    status = [sys.executable, "-m", "tula_hpc.status", str(run.root)]
    shown = subprocess.run(status, capture_output=True, text=True, check=False, cwd=ROOT, env=slurm_cluster.environment)
    assert all(f"{host} for " in shown.stdout for host in (first, second)), shown.stdout


@pytest.mark.thorough
def test_where_every_node_is_broken_one_line_says_so(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    done = run_broken(tmp_path, slurm_cluster, slurm_cluster.hosts, "plan", ONE)
    run = RunDirectory(tmp_path / "run")
    assert done.returncode == 1
    submitted = [event for event in run.events() if event.event == "submitted"]
    assert len(submitted) == 3
    hosts = broken_jobs(run, "profile")
    assert len(hosts) == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("profile: a device failed once more")]
    assert f" reported '{SAID}'; have these nodes repaired" in line
    assert all(host in line for host in hosts)


@pytest.mark.thorough
def test_nodes_without_the_gpus_that_slurm_granted_are_broken(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    """The test cluster's GPUs are made up: no driver shows them to torch."""
    gpus = ("cluster.device=cuda", "cluster.gres=gpu:1")
    done, run = run_broken(tmp_path, slurm_cluster, (), "plan", ONE, *gpus), RunDirectory(tmp_path / "run")
    assert done.returncode == 1
    hosts = broken_jobs(run, "profile")
    assert len(hosts) == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("profile: a device failed once more")]
    assert " reported 'Slurm granted 1 GPU, but torch sees none: " in line
    assert 'set device = "cpu" in the cluster file' in line
    assert all(host in line for host in hosts)


@pytest.mark.thorough
def test_where_too_few_nodes_are_left_the_refusal_names_those_left_out(
    slurm_cluster: MiniCluster, tmp_path: Path
) -> None:
    *_, third, fourth = slurm_cluster.hosts
    both = ("search.cluster_sizes=[2]", f"cluster.sbatch.nodelist={third},{fourth}")
    done = run_broken(tmp_path, slurm_cluster, (third,), "plan", ONE, *both)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("the scheduler refused the job")]
    assert f"nodes with broken devices are left out: {third} reported '{SAID}'" in line
