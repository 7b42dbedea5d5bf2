"""Unchanged training scripts on the real cluster: from the sweep file to a plan, and the end of a failing script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.attach.test_script_sweep import EXAMPLE, QUICK, mine
from tests.slurm.sweeping import run_sweep_file
from tests.slurm.testcluster import MiniCluster
from tula_hpc.failure_kinds import Failure
from tula_hpc.records import RunDirectory, is_usable

pytestmark = pytest.mark.usefixtures("quick_nodes")


SIZES = ("search.cluster_sizes=[1,2]", "search.nest=true", "search.min_batch=64", "search.max_batch=64")


def test_a_script_is_measured_on_each_number_of_nodes(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    """Measure the shipped example on 1 and 2 nodes in one allocation."""
    settings = (*QUICK, *SIZES)
    command = run_sweep_file(EXAMPLE, tmp_path, slurm_cluster.environment, "--until", "plan", settings=settings)
    assert command.returncode == 0, command.stderr + command.stdout
    run = RunDirectory(tmp_path / "run")
    records = run.measurements().records
    assert {(m.nodes, m.local_batch) for m in records} == {(1, 64), (2, 32)}
    for m in records:
        assert is_usable(m)
        assert len(set(m.hosts)) == m.nodes
        assert m.times is not None
        assert (m.times.allreduce_time_s > 0) == (m.nodes > 1)
        assert m.node_seconds == pytest.approx(2 * m.elapsed_s)
    assert len({m.job_id for m in records}) == 1
    plan = run.read_plan()
    assert plan is not None
    assert plan.chosen.global_batch == 64


@pytest.mark.thorough
def test_the_worker_that_fails_is_reported_at_once(slurm_cluster: MiniCluster, tmp_path: Path) -> None:
    path, options = mine(tmp_path, "fails on one"), ("--until", "plan")
    command = run_sweep_file(path, tmp_path, slurm_cluster.environment, *options, settings=QUICK)
    assert command.returncode == 1
    assert "ValueError: the second worker has no more data (misbehaving.py:" in command.stderr
    run = RunDirectory(tmp_path / "run")
    (end,) = (event for event in run.events() if event.event == "ended" and event.job_id)
    assert end.failure is Failure.BAD_INPUT
    assert [m.status for m in run.measurements().records] == ["failed"]
