"""A sweep that carries on by itself: nothing has to stay alive on the login node.

The command does what can be done at once and submits the first jobs. Then a small controller job, which Slurm starts
when they are over (`afterany`: also when they failed), does the same: it sees to what they left, submits what comes
next, and leaves another controller behind. Every one of them may be killed: whatever it did is on disk.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from tula_hpc.env import slurm_job_id
from tula_hpc.errors import Failure, TulaError
from tula_hpc.jobs import ControlJob
from tula_hpc.launch import StillRunningError, Submitted
from tula_hpc.pipeline import carry_out
from tula_hpc.records import RunDirectory
from tula_hpc.stages import Sweep, jobs_left, unsettled

if TYPE_CHECKING:
    from collections.abc import Sequence


def carry_on_detached(sweep: Sweep, until: str) -> int:
    """Begin a detached sweep, on the login node; returns the exit code.

    Raises:
        StageError: What could be done at once failed.
    """
    waiting = controllers(sweep)
    if waiting:
        print(f"already detached: job {waiting[0].job_id} carries on; see {_status(sweep.run)}")
        return 0
    sweep.run.log_event("detached", "control", data={"until": until})
    return _step(sweep._replace(detached=True), until)


def _step(sweep: Sweep, until: str) -> int:
    """Do what can be done now; where jobs are on their way, leave a controller that comes after them."""
    try:
        return carry_out(sweep, until)
    except StillRunningError as left:
        there = controllers(sweep)  # where a controller was requeued by Slurm after it had left another
        controller = there[0] if there else _submit_controller(sweep, left.jobs, until)
        what = f"{len(left.jobs)} jobs are" if len(left.jobs) > 1 else f"job {left.jobs[0].job_id} is"
        print(f"detached: job {controller.job_id} carries on when {what} over; see {_status(sweep.run)}")
        return 0


def _submit_controller(sweep: Sweep, jobs: Sequence[Submitted], until: str) -> Submitted:
    job = ControlJob(sweep.run.root, until, sweep.started_at)
    launcher = sweep._replace(cluster=sweep.cluster.controller(), detached=False).launcher
    after = sorted({job.array_id for job in jobs})
    minutes = sweep.cluster.controller_minutes
    return launcher.submit([job], stage="control", nodes=1, minutes=minutes, after=after)[0]


def controllers(sweep: Sweep) -> list[Submitted]:
    """Controller jobs of this run that are not over, without the one that asks."""
    return [job for job in jobs_left(sweep, "control") if job.job_id != slurm_job_id()]


def run_controller(job: ControlJob) -> None:
    """What a controller job does; an error ends it, and the events say so.

    Raises:
        SystemExit: A stage failed for good.
    """
    from tula_hpc.config import load_cluster, load_sweep

    run = RunDirectory(job.root)
    sweep = Sweep(load_sweep(run.sweep_file), load_cluster(run.cluster_file), run, job.started_at, detached=True)
    failure, words = None, ""
    try:
        with run.locked():
            _step(sweep, job.until)
    except TulaError as error:
        failure, words = Failure.BUG, str(error)
    run.log_event("ended", "control", job_id=slurm_job_id() or "", failure=failure, detail=words[:2000])
    if failure is not None:
        sys.exit(f"{words}\nMend the cause and run the same command again: what is done is not done again.")


def take_over(sweep: Sweep) -> None:
    """A command that stays does what a controller would have done; a waiting one is cancelled."""
    from tula_hpc import slurm

    left = unsettled(sweep.run, "control")
    if sweep.cluster.executor != "slurm" or not left:
        return
    waiting = controllers(sweep)
    if waiting:
        slurm.cancel([job.job_id for job in waiting])
        print(f"controller job {waiting[0].job_id} is cancelled: this command carries on instead")
    for event in left:
        sweep.run.log_event("ended", "control", job_id=event.job_id)


def _status(run: RunDirectory) -> str:
    return f"python -m tula_hpc.status {shlex.quote(str(run.root))}"
