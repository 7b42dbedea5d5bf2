"""Define jobs as data alone: login nodes pickle them, so importing this imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from submitit import JobEnvironment

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.launch.job_files import TimeOutsLeft
from tula_hpc.records import MAIN_LABEL, Configuration, Identity
from tula_hpc.tracking.follow import following

# more runs than Slurm gives one job by requeues
RUNS_OF_A_JOB = 1000


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def in_passes(sweep: SweepSpec, passes: int) -> SweepSpec:
    """Return the sweep of a script that takes a worker's batch in `passes` forward passes."""
    if not sweep.workload.accumulates:
        return sweep
    workload = sweep.workload.model_copy(update={"accumulation": passes})
    return sweep.model_copy(update={"workload": workload})


class Requeueable:
    """A job that submitit may start again unchanged, since its progress is on disk.

    Attributes:
        run: `module:function` that does the job; every worker calls it with the job.
    """

    run: ClassVar[str]

    def __call__(self) -> Any:
        """Do the job; every worker calls this."""
        return resolve(self.run)(self)

    def checkpoint(self) -> Any:
        """Return submitit's note for a requeue: the time-outs left, in place of a second pickle."""
        return TimeOutsLeft(self)


@dataclass(frozen=True)
class ProfileJob(Requeueable):
    """Measures configurations in one allocation, one after another.

    Attributes:
        configurations: What to measure first; after a requeue those already in the output are left
            out.
        output: JSON Lines file that this job alone appends to.
        nodes: Size of the allocation. Configurations with fewer nodes run on its first nodes.
        asks: Whether to measure, after the list, what the search proposes for these nodes.
        smaller: Whether proposals may take fewer nodes: not while other jobs run, which may
            measure the same.
        since: Failures before this time do not count for the search, see
            `measurements_for_search`.
        trusted_batch: Local batch that fits by an estimate, for the search: see `propose`.
    """

    run: ClassVar[str] = "tula_hpc.profiling.job:run"

    sweep: SweepSpec
    cluster: ClusterSpec
    configurations: tuple[Configuration, ...]
    output: Path
    nodes: int
    partition: str = ""
    asks: bool = False
    smaller: bool = False
    since: float = 0.0
    trusted_batch: int | None = None
    submitted_at: float = 0.0

    @property
    def procedure(self) -> str:
        """Return the `module:function` that measures; a script has processes of its own."""
        if self.sweep.workload.is_script:
            return "tula_hpc.attach.script_profile_job:run_profile"
        return "tula_hpc.profiling.profile_loop:run_profile"


@dataclass(frozen=True)
class TrainJob(Requeueable):
    """Trains one configuration to the end, from the newest checkpoint if there is one.

    A model or data other than those that the plan was made for (`measured`) are refused. `measured`
    is None if there is no plan, or if its records do not identify them.
    """

    run: ClassVar[str] = "tula_hpc.training.job:run"

    sweep: SweepSpec
    cluster: ClusterSpec
    configuration: Configuration
    root: Path
    label: str = MAIN_LABEL
    partition: str = ""
    measured: Identity | None = None
    # number of jobs that were submitted for this training before this one
    jobs_before: int = 0
    # Unix time at which the command began that submitted this job
    since: float = 0.0

    def run_number(self, restart_count: int) -> int:
        """Return a number that grows from run to run of this training, whichever job runs."""
        return self.jobs_before * RUNS_OF_A_JOB + restart_count

    @property
    def procedure(self) -> str:
        """Return the `module:function` that trains; a script has processes of its own."""
        if self.sweep.workload.is_script:
            return "tula_hpc.attach.train.script_job:run_training"
        return "tula_hpc.training.loop:run_training"

    def __call__(self) -> Any:
        """Do the job; with `training.log_to`, rank 0 has a follower pass its metrics on."""
        names = self.sweep.training.log_to
        if not names or JobEnvironment().global_rank > 0:
            return super().__call__()
        with following(self.root, self.label, names):
            return super().__call__()


@dataclass(frozen=True)
class ControlJob(Requeueable):
    """The next step of a detached sweep; see `tula_hpc.cli.detached`.

    `started_at` is the Unix time at which the command began that was detached.
    """

    run: ClassVar[str] = "tula_hpc.cli.detached:run_controller"

    root: Path
    until: str
    started_at: float
