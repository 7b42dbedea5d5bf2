"""Training scripts on the real cluster, unchanged: from the sweep file to a plan, and how a failing one ends."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.attach.test_script_sweep import EXAMPLE, QUICK, mine
from tests.slurm.test_pipeline import CLUSTER
from tests.slurm.testcluster import MiniCluster
from tula_hpc.errors import Failure
from tula_hpc.records import RunDirectory, is_usable

pytestmark = pytest.mark.usefixtures("quick_nodes")


def sweep(path: Path, folder: Path, cluster: MiniCluster, *settings: str) -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "tula_hpc.sweep", str(path), "--cluster", str(CLUSTER), "--until", "plan"]
    command += ["--run-dir", str(folder / "run"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=cluster.environment, timeout=500
    )


@pytest.fixture(scope="module")
def done(
    slurm_cluster: MiniCluster, quick_nodes: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """The shipped example on 1, 2 and 4 nodes in one allocation, then one whose second worker fails."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("example", "failing")}
    sizes = ("search.cluster_sizes=[1,2,4]", "search.nest=true", "search.min_batch=64", "search.max_batch=64")
    with ThreadPoolExecutor() as pool:
        example = pool.submit(sweep, EXAMPLE, folders["example"], slurm_cluster, *QUICK, *sizes)
        failing = pool.submit(
            sweep, mine(folders["failing"], "fails on one"), folders["failing"], slurm_cluster, *QUICK
        )
        return {"example": (folders["example"], example.result()), "failing": (folders["failing"], failing.result())}


Done = dict[str, tuple[Path, subprocess.CompletedProcess[str]]]


def test_a_script_is_measured_on_each_number_of_nodes(done: Done) -> None:
    folder, command = done["example"]
    assert command.returncode == 0, command.stderr + command.stdout
    run = RunDirectory(folder / "run")
    records = run.measurements().records
    assert {(m.nodes, m.local_batch) for m in records} == {(1, 64), (2, 32), (4, 16)}
    for m in records:
        assert is_usable(m)
        assert len(set(m.hosts)) == m.nodes
        assert m.times is not None
        assert (m.times.allreduce_time_s > 0) == (m.nodes > 1)
        assert m.node_seconds == pytest.approx(4 * m.elapsed_s)
    assert len({m.job_id for m in records}) == 1
    plan = run.read_plan()
    assert plan is not None
    assert plan.chosen.global_batch == 64


def test_the_worker_that_fails_is_told_of_at_once(done: Done) -> None:
    folder, command = done["failing"]
    assert command.returncode == 1
    assert "ValueError: the second worker has no more data (misbehaving.py:" in command.stderr
    run = RunDirectory(folder / "run")
    (end,) = (event for event in run.events() if event.event == "ended" and event.job_id)
    assert end.failure is Failure.BAD_INPUT
    assert [m.status for m in run.measurements().records] == ["failed"]
