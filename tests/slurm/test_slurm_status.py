"""`status` with the answers of a real controller and its accounting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.sweeping import TEMPLATE
from tests.slurm.test_submission import launcher_at, says, stopped
from tests.slurm.testcluster import MiniCluster
from tula_hpc.launch import slurm
from tula_hpc.status import __main__ as status
from tula_hpc.status.jobs import JobPhase
from tula_hpc.status.run_files import read_facts
from tula_hpc.status.run_status import RunStatus
from tula_hpc.status.text import status_text

PATIENCE_S = 90.0


def status_when(root: Path, holds: Callable[[RunStatus], bool]) -> RunStatus:
    """Return the first status for which the predicate holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(run_status := status.status_of(root)):
        assert time.monotonic() < deadline, status_text(run_status)
        time.sleep(1.0)
    return run_status


def test_status_sees_what_runs_waits_was_requeued_and_is_over(
    slurm_cluster: MiniCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_at(tmp_path, "array_parallelism=1")
    root = launcher.run.root
    launcher.run.sweep_file.write_text('name = "test"\n')
    launcher.run.cluster_file.write_text(TEMPLATE.read_text())
    first, second = launcher.submit([says(i, tmp_path, 120) for i in range(2)], stage="profile", nodes=2, minutes=5)
    waiting = launcher_at(tmp_path, "sbatch.hold=true")
    (held,) = waiting.submit([says(2, tmp_path)], stage="profile", nodes=1, minutes=2)

    def phase(run_status: RunStatus, job_id: str) -> JobPhase:
        return next(job.phase for job in run_status.jobs if job.job_id == job_id)

    run_status = status_when(root, lambda run_status: phase(run_status, first.job_id) is JobPhase.RUNNING)
    reasons = {job.job_id: (job.reason, job.stuck) for job in run_status.jobs}
    assert reasons[second.job_id] == ("JobArrayTaskLimit", False)
    assert reasons[held.job_id] == ("JobHeldUser", True)

    # otherwise the second job would run while the first one waits
    slurm.cancel([second.job_id])
    time.sleep(2.0)
    slurm.run_command(["scontrol", "requeue", first.job_id])
    status_when(root, lambda run_status: phase(run_status, first.job_id) is JobPhase.WAITING)
    status_when(root, lambda run_status: phase(run_status, first.job_id) is JobPhase.RUNNING)

    monkeypatch.setattr(status, "QUEUE_TIMEOUT_S", 1.0)
    with stopped(slurm_cluster, 3):
        run_status = status.status_of(root)
    assert (run_status.state, run_status.scheduler.answered) == ("unknown", False)
    monkeypatch.undo()

    slurm.cancel([first.array_id, held.job_id])
    run_status = status_when(root, lambda run_status: {job.phase for job in run_status.jobs} == {JobPhase.OVER})
    assert {job.state for job in run_status.jobs} == {"CANCELLED"}
    assert run_status.state == "over"
    _, accounted = status.ask(read_facts(launcher.run))
    # sacct may list another run, which ended as it began
    runs = [run for run in accounted[first.job_id] if run.elapsed_s]
    assert len(runs) == 2, "the cost includes both runs of the requeued job"
    assert run_status.cost.profile is not None
    assert run_status.cost.profile.source == "sacct"
    node_seconds = sum(run.node_seconds for runs in accounted.values() for run in runs)
    assert run_status.cost.node_hours == pytest.approx(node_seconds / 3600)
    assert min(run.nodes for run in accounted[first.job_id]) == 2
