"""The callables that submitit sends to the nodes. Importing this imports no torch: login nodes only pickle them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tula_hpc.config import ClusterSpec, SweepSpec
from tula_hpc.ddp.leaving import leaving_at_once
from tula_hpc.env import join_job
from tula_hpc.records import (
    MAIN_LABEL,
    Configuration,
    Measurement,
    RunDirectory,
    read_records,
    with_rank_files,
)


class Requeueable:
    """A job that submitit may start again as it is: what it has done is on disk."""

    def __call__(self) -> Any:
        """Do the job; every worker calls this."""
        raise NotImplementedError

    def checkpoint(self) -> Any:
        """What submitit writes down when it handles a signal itself; the job is the same, and is not pickled again."""
        from tula_hpc.launch.job_files import TimeOutsLeft

        return TimeOutsLeft(self)


@dataclass(frozen=True)
class ProfileJob(Requeueable):
    """Measures configurations in one allocation, one after another.

    Attributes: sweep: The frozen sweep. cluster: The frozen cluster, or that part of it which is
        measured. configurations: The first to be measured; what the output already holds is not
        measured again after a requeue. output: JSON Lines file that this job alone appends to.
        nodes: Of the allocation. A configuration of fewer runs on the first of them. partition:
        Which part of the cluster it is, see `Measurement.partition`. asks: Whether to go on, after
        the list, with what the search proposes for these nodes. smaller: Whether that may be on
        fewer of them: not while other jobs run, which may measure the same. since: Failures before
        this time do not count for the search, see `counted`. trusted_batch: For the search, see
        `propose`. submitted_at: Unix time.
    """

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

    def __call__(self) -> int:
        """Measure and append; every worker of the job calls this. Returns how many configurations are on record."""
        from tula_hpc.profiling.work_queue import Agenda

        env = join_job()
        # says that the job began, before torch is imported, which takes seconds
        agenda = Agenda(self, env)
        from tula_hpc.ddp.device_errors import telling_broken_devices
        from tula_hpc.profiling.session import run_profile

        with leaving_at_once(), telling_broken_devices(self.output.parent.parent, "profile"):
            return run_profile(self, env, agenda)

    def recorded(self) -> list[Measurement]:
        """What this job has written so far."""
        return read_records(Measurement, with_rank_files(self.output)).records

    def known(self) -> list[Measurement]:
        """All that the run has measured on this part of the cluster, as far as it counts for the search."""
        everything = read_records(Measurement, sorted(self.output.parent.glob("*.jsonl"))).records
        return counted(everything, self.partition, self.since)


def counted(measurements: Iterable[Measurement], partition: str, since: float) -> list[Measurement]:
    """Those that count for the search on one part of the cluster.

    A failure before `since`, in an earlier run of the command, may have been mended.
    """
    own = (m for m in measurements if m.partition == partition)
    return [m for m in own if m.status != "failed" or m.finished_at >= since]


@dataclass(frozen=True)
class TrainJob(Requeueable):
    """Trains one configuration to the end, from the newest checkpoint if there is one.

    Attributes:
        sweep: The frozen sweep.
        cluster: The frozen cluster.
        configuration: Nodes, workers per node and local batch to train with.
        root: The run directory.
        label: Name of this training inside the run directory.
        partition: Which part of the cluster it is, see `Candidate.partition`.
    """

    sweep: SweepSpec
    cluster: ClusterSpec
    configuration: Configuration
    root: Path
    label: str = MAIN_LABEL
    partition: str = ""

    def measurements(self) -> list[Measurement]:
        """What was measured on this part of the cluster."""
        everything = RunDirectory(self.root).measurements().records
        return [m for m in everything if m.partition in ("", self.partition)]

    def __call__(self) -> str:
        """Train; every worker calls this.

        Returns: `finished`; or, after a stop, `stopped` if a requeue was refused, `cancelled` or
            `preempted` if the job is on its way out.
        """
        from tula_hpc.ddp.agreement import StopRequest

        # before torch is imported, which takes seconds
        stop = StopRequest().install()
        # it may have been deleted while this job waited
        RunDirectory(self.root).make_train(self.label)
        from tula_hpc.ddp.device_errors import telling_broken_devices
        from tula_hpc.training.loop import run_training

        with leaving_at_once(), telling_broken_devices(self.root, "train"):
            return run_training(self, stop)


@dataclass(frozen=True)
class ControlJob(Requeueable):
    """The next step of a detached sweep; see `tula_hpc.cli.controller`.

    Attributes:
        root: The run directory; the inputs are those that are frozen there.
        until: The last stage to be done.
        started_at: Unix time of the command that was detached.
    """

    root: Path
    until: str
    started_at: float

    def __call__(self) -> None:
        """Carry on."""
        from tula_hpc.cli.controller import run_controller

        run_controller(self)
