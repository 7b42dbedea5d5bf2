"""What Slurm's accounting knows of jobs: every run of each, requeued ones included, and the nodes that it held."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

from tula_hpc.slurm_command import count_in, run_command

SLACK_S = 3600.0  # between the clocks of this machine and of the accounting
FIELDS = ("JobID", "JobName", "State", "ElapsedRaw", "NNodes")


class AccountedRun(NamedTuple):
    """One run of a job."""

    job_id: str
    state: str
    elapsed_s: float
    nodes: int

    @property
    def node_seconds(self) -> float:
        """Nodes × seconds of the allocation."""
        return self.nodes * self.elapsed_s


def accounted_runs(
    job_ids: Collection[str], *, name_prefix: str, since: float, timeout_s: float
) -> dict[str, list[AccountedRun]]:
    """The runs of these jobs, oldest first; a job that accounting does not know is missing.

    Args:
        job_ids: As Slurm shows them, tasks of arrays as `12_3`.
        name_prefix: Of the jobs' names. An id may have been another's, where a controller began to count anew.
        since: Unix time of the first submission.
        timeout_s: For the answer.

    Raises:
        LaunchError: There is no accounting, or it does not answer.
    """
    if not job_ids:
        return {}
    parents = sorted({job_id.partition("_")[0] for job_id in job_ids})
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - SLACK_S))
    where = ["-S", start, "-j", ",".join(parents)]
    text = run_command(["sacct", "-D", "-n", "-P", "-X", *where, "-o", ",".join(FIELDS)], timeout_s)
    found: dict[str, list[AccountedRun]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == len(FIELDS) and fields[0] in job_ids and fields[1].startswith(name_prefix):
            found.setdefault(fields[0], []).append(_run(fields))
    return found


def _run(fields: list[str]) -> AccountedRun:
    job_id, _, state, elapsed, nodes = fields
    numbers = [count_in(text) or 0 for text in (elapsed, nodes)]
    return AccountedRun(job_id, state.partition(" ")[0], float(numbers[0]), numbers[1])
