"""Job of `tula_hpc.check`: its data, and the function that its workers run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tula_hpc.check.reports import RankReport
from tula_hpc.config import ClusterSpec, WorkloadSpec
from tula_hpc.ddp.exit_at_once import leaving_at_once
from tula_hpc.ddp.stop_signals import StopRequest
from tula_hpc.env import join_job, loading_libraries, restart_count
from tula_hpc.launch.job_specs import Requeueable
from tula_hpc.records import read_document


@dataclass(frozen=True)
class CheckJob(Requeueable):
    """Small job that examines its nodes.

    Attributes:
        cluster: The cluster, or one partition of it.
        workload: Data and loader to measure.
        nodes: Number of nodes of the job.
        folder: Folder for the workers' reports.
    """

    run: ClassVar[str] = "tula_hpc.check.job:run"

    cluster: ClusterSpec
    workload: WorkloadSpec
    nodes: int
    folder: Path

    def report_file(self, rank: int) -> Path:
        """Return the file of one worker's report."""
        return self.folder / f"rank-{rank}.json"

    def reports(self) -> list[RankReport]:
        """Return the reports that workers have written so far, by rank.

        Raises:
            RunDirectoryError: A report is damaged.
        """
        reports = [read_document(RankReport, path) for path in self.folder.glob("rank-*.json")]
        return sorted(reports, key=lambda report: report.rank)


def run(job: CheckJob) -> None:
    """Measure and report; every worker calls this."""
    # the requeue is tested last: after it nothing is left to do, and the command cancels the job
    if restart_count() > 0:
        return
    stop = StopRequest().install()
    env = join_job()
    with loading_libraries():
        from tula_hpc.check.probes import run_probes

    with leaving_at_once():
        run_probes(job, env, stop)
